//! Codes and scales of one tensor.

use super::element::saturation_limit;
use super::{QuantizeError, ScaleMode, scale_strides};
use crate::{DType, InputViews, Operand, Problem, Scale, Shape, Strides, Tensor, TensorView};

/// The rows of a tensor that take part.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) problem: &'a Problem,
    pub(super) inputs: &'a InputViews<'a>,
    pub(super) tensor: TensorView<'a>,
    /// Query, key or value.
    pub(super) operand: Operand,
    pub(super) strides: Strides,
}

/// A row of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The sequence that it belongs to.
    pub(super) sequence: usize,
    /// Batch or page of the row.
    pub(super) batch: usize,
    /// Row of the batch or page.
    pub(super) row: usize,
    pub(super) head: usize,
}

/// A change of a row of a sequence and head.
pub(super) type Change<'a> = &'a dyn Fn(usize, usize, &mut [f64]);

/// Codes with their scale.
pub(super) struct Coded {
    pub(super) tensor: Tensor,
    pub(super) scale: Scale,
    pub(super) saturated: usize,
}

impl Rows<'_> {
    fn shape(&self) -> Shape {
        match self.operand {
            Operand::Query => self.problem.query_shape(),
            Operand::Key => self.problem.key_shape(),
            _ => self.problem.value_shape(),
        }
    }

    /// Calls `visit` for each row with its numbers.
    pub(super) fn each(
        &self,
        mut visit: impl FnMut(Place, &mut [f64]) -> Result<(), QuantizeError>,
    ) -> Result<(), QuantizeError> {
        let Shape { heads, columns, .. } = self.shape();
        let (dtype, data) = (self.tensor.dtype, self.tensor.data);
        let size = dtype.size_bytes();
        let mut numbers = vec![0.0; columns];
        for sequence in self.inputs.sequences(self.problem) {
            let is_query = self.operand == Operand::Query;
            let rows = if is_query { 0..sequence.query_length } else { sequence.attended_range(self.problem) };
            for row in rows {
                let (batch, row) = if is_query { sequence.query_row(row) } else { sequence.key_row(row) };
                for head in 0..heads {
                    let start = self.strides.row_start(batch, head, row) * size;
                    for (number, bytes) in numbers.iter_mut().zip(data[start..].chunks_exact(size)) {
                        *number = dtype.decode(bytes);
                    }
                    visit(Place { sequence: sequence.index, batch, row, head }, &mut numbers)?;
                }
            }
        }
        Ok(())
    }

    fn empty(&self, dtype: DType) -> Tensor {
        // The extent of strides that validated fits.
        Tensor::zeros(dtype, self.strides.extent(self.shape()).unwrap_or(0))
    }

    fn set(&self, tensor: &mut Tensor, place: Place, numbers: impl Iterator<Item = f64>) {
        let start = self.strides.row_start(place.batch, place.head, place.row);
        for (column, number) in numbers.enumerate() {
            tensor.set(start + column, number);
        }
    }
}

/// The rows, changed and rounded to a type that needs no scale.
pub(super) fn round(rows: &Rows<'_>, dtype: DType, change: Change<'_>) -> Tensor {
    let mut tensor = rows.empty(dtype);
    let done = rows.each(|place, numbers| {
        change(place.sequence, place.head, numbers);
        rows.set(&mut tensor, place, numbers.iter().copied());
        Ok(())
    });
    debug_assert_eq!(done, Ok(()), "nothing here refuses");
    tensor
}

/// The rows, changed, as codes of 8 bits with their scales.
pub(super) fn encode(
    rows: &Rows<'_>,
    dtype: DType,
    mode: ScaleMode,
    change: Change<'_>,
) -> Result<Coded, QuantizeError> {
    let problem = rows.problem;
    let scale_operand = match rows.operand {
        Operand::Query => Operand::QScale,
        Operand::Key => Operand::KScale,
        _ => Operand::VScale,
    };
    let (strides, block) = scale_strides(mode, scale_operand, problem);
    let group = problem.query_heads / problem.key_heads;
    let index = |Place { sequence, batch, row, head }: Place| match scale_operand {
        Operand::QScale => strides.query_index(sequence, (batch, row), head, group),
        _ => strides.key_index(sequence, (batch, row), head),
    };
    // The scale of a block is that of its first row, whether or not this row takes part.
    let first = |place: Place| index(Place { row: place.row - place.row % block, ..place });

    let mut largest = vec![0.0_f64; strides.extent(scale_operand, problem).unwrap_or(0)];
    rows.each(|place, numbers| {
        if let Some(wrong) = numbers.iter().find(|number| !number.is_finite()) {
            let (tensor, value) = (rows.operand.name(), wrong.to_string());
            let Place { batch, row, head, .. } = place;
            return Err(QuantizeError::NotFinite { tensor, value, batch, head, row });
        }
        change(place.sequence, place.head, numbers);
        let slot = &mut largest[first(place)];
        *slot = numbers.iter().fold(*slot, |largest, number| largest.max(number.abs()));
        Ok(())
    })?;
    let scales: Vec<f32> = match mode {
        ScaleMode::Fixed(scale) => vec![scale; largest.len()],
        _ => largest.into_iter().map(|largest| scale_of(largest, dtype)).collect(),
    };

    let (mut tensor, mut saturated) = (rows.empty(dtype), 0);
    let mut data = scales.clone();
    let limit = saturation_limit(dtype);
    rows.each(|place, numbers| {
        change(place.sequence, place.head, numbers);
        let scale = scales[first(place)];
        data[index(place)] = scale;
        let codes = numbers.iter().map(|number| number / f64::from(scale));
        saturated += codes.clone().filter(|code| code.abs() > limit).count();
        rows.set(&mut tensor, place, codes);
        Ok(())
    })?;
    Ok(Coded { tensor, scale: Scale { data, strides }, saturated })
}

/// The scale of elements by their largest magnitude: positive, whatever that is.
fn scale_of(largest: f64, dtype: DType) -> f32 {
    if largest == 0.0 {
        return 1.0;
    }
    ((largest / dtype.largest()) as f32).max(f32::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_positive_and_nothing_saturates_under_them() {
        assert_eq!(scale_of(0.0, DType::E4m3), 1.0);
        assert_eq!(scale_of(448.0, DType::E4m3), 1.0);
        assert_eq!(scale_of(1.75, DType::E5m2), 2.0_f32.powi(-15));
        assert_eq!(scale_of(1e-44, DType::E4m3), f32::MIN_POSITIVE);
        assert_eq!((saturation_limit(DType::E4m3), saturation_limit(DType::E5m2)), (464.0, 61_440.0));
        for step in 0..1000 {
            let largest = f64::from(1.0 + step as f32 * 1e-3);
            let code = largest / f64::from(scale_of(largest, DType::E4m3));
            assert!(code < 448.001 && DType::E4m3.round(code) == 448.0, "{largest}: {code}");
        }
    }
}
