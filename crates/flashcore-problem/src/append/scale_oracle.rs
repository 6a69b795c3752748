//! Oracle of computed scales: the range that the largest magnitude of a row allows.

use crate::DType;
use crate::quantize::computed_scale;

/// The right value of one scale that is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ScaleElement {
    /// Index in the storage of the scales.
    pub(super) index: usize,
    low: f32,
    high: f32,
    /// True if the row may be all zeros within the errors of a backend.
    may_be_zero: bool,
}

impl ScaleElement {
    /// The scale of a row, from the elements of which each comes with the most that a backend may be off.
    pub(super) fn of(dtype: DType, index: usize, row: impl Iterator<Item = (f64, f64)>) -> Self {
        let (mut low, mut high) = (0.0_f64, 0.0_f64);
        for (value, error) in row {
            // The maximum of a number and a NaN is the number.
            (low, high) = (low.max(value.abs() - error), high.max(value.abs() + error));
        }
        // Rounding to f32 and the rule of the scale are monotonic but for 0, whose scale is 1. Within errors of 0 the
        // scale may be the smallest.
        if low == 0.0 && high > 0.0 {
            let high = computed_scale(dtype, high as f32);
            return Self { index, low: f32::MIN_POSITIVE, high, may_be_zero: true };
        }
        let [low, high] = [low, high].map(|amax| computed_scale(dtype, amax as f32));
        Self { index, low, high, may_be_zero: false }
    }

    /// Nothing, or the first of the scales that is wrong, or was written and must not be.
    pub(super) fn check<'a>(
        tensor: &str,
        expected: impl Iterator<Item = &'a Self>,
        before: &[f32],
        after: &[f32],
    ) -> Result<(), String> {
        if before.len() != after.len() {
            return Err(format!("{tensor} had {} elements and has {}", before.len(), after.len()));
        }
        let mut written = vec![None; after.len()];
        for scale in expected {
            written[scale.index] = Some(scale);
        }
        for (index, (expected, (found, before))) in written.into_iter().zip(after.iter().zip(before)).enumerate() {
            match expected {
                None if found.to_bits() != before.to_bits() => {
                    return Err(format!("element {index} of {tensor} was written; it must stay as it was"));
                }
                Some(Self { low, high, may_be_zero, .. })
                    if !(low <= found && found <= high || *may_be_zero && *found == 1.0) =>
                {
                    return Err(format!("element {index} of {tensor} is {found}; it must be from {low} to {high}"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
