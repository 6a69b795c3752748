//! Scales of an append to an FP8 cache: given, or computed for each new row and written beside the cache.

use super::AppendProblem;
use super::views::Errors;
use crate::{InputViews, Operand, OutputViews, ProblemError, ScaleStrides, ScaleView, TensorError};

/// Source of the scales of new keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleSource {
    /// There are none: codes are the numbers themselves, rounded.
    None,
    /// They are read.
    Given,
    /// They are computed from the row of each token and head, and written.
    Computed,
}

/// The scales of the rows of one cache, by place.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowScales<'a> {
    /// All are 1; also of caches that are not FP8.
    None,
    /// They are read.
    Given(ScaleView<'a>),
    /// They are computed and written.
    Computed(ScaleStrides),
}

impl<'a> RowScales<'a> {
    /// The scales of a source: given ones, or those that are written.
    pub(crate) fn new(source: ScaleSource, given: Option<ScaleView<'a>>, written: Option<ScaleStrides>) -> Self {
        match source {
            ScaleSource::None => Self::None,
            ScaleSource::Given => given.map_or(Self::None, Self::Given),
            ScaleSource::Computed => written.map_or(Self::None, Self::Computed),
        }
    }
}

impl AppendProblem {
    /// Source of the scales of one of the caches, [`Operand::KScale`] or [`Operand::VScale`].
    pub const fn scale_source(&self, scale: Operand) -> ScaleSource {
        let is_on = if matches!(scale, Operand::KScale) { self.k_scale } else { self.v_scale };
        match (is_on, self.compute_scales) {
            (false, _) => ScaleSource::None,
            (true, false) => ScaleSource::Given,
            (true, true) => ScaleSource::Computed,
        }
    }

    pub(super) fn scale_errors(&self, errors: &mut Vec<ProblemError>) {
        let dtype = self.cache_dtype();
        if dtype != self.dtype && !dtype.is_float8() {
            let allowed = format!("that of the tensors, {}, or e4m3 or e5m2", self.dtype);
            errors.push(ProblemError::OutOfRange { argument: "cache_dtype", value: dtype.to_string(), allowed });
        }
        for (argument, is_on) in [("k_scale", self.k_scale), ("v_scale", self.v_scale)] {
            if is_on && !dtype.is_float8() {
                errors.push(ProblemError::ScaleOfWideType { argument, dtype });
            }
        }
        if self.compute_scales && !self.k_scale && !self.v_scale {
            errors.push(ProblemError::OutOfRange {
                argument: "compute_scales",
                value: true.to_string(),
                allowed: "false without k_scale and v_scale".to_owned(),
            });
        }
    }

    /// The reason why scales cannot lie by these strides for an append by slot: each row and head that is computed has its
    /// own, and nothing depends on sequences.
    pub fn scale_stride_error(&self, scale: Operand, strides: ScaleStrides) -> Option<TensorError> {
        match self.scale_source(scale) {
            ScaleSource::None => None,
            ScaleSource::Given => (strides.sequence != 0)
                .then(|| stride_error(scale, strides, "by slot there are no sequences: its sequence stride must be 0")),
            ScaleSource::Computed => (!strides.is_per_token(self.key_cache_shape())).then(|| {
                let allowed = "each row and head must have a computed scale of its own, [page or batch, row, head]";
                stride_error(scale, strides, allowed)
            }),
        }
    }

    /// Checks the scales of an append by slot.
    pub(super) fn check_scales(
        &self,
        inputs: &InputViews<'_>,
        outputs: &OutputViews<'_>,
        errors: &mut Vec<TensorError>,
    ) {
        for (operand, given, written) in
            [(Operand::KScale, inputs.k_scale, &outputs.k_scale), (Operand::VScale, inputs.v_scale, &outputs.v_scale)]
        {
            match (self.scale_source(operand), given, written) {
                (ScaleSource::Computed, _, Some(written)) => {
                    errors.extend(self.scale_stride_error(operand, written.strides));
                }
                (ScaleSource::Given, Some(given), _) => {
                    errors.extend(self.scale_stride_error(operand, given.strides));
                    if errors.is_empty() {
                        let slots = inputs.slot_mapping.unwrap_or_default();
                        let places = slots.iter().filter_map(|&slot| self.place(slot));
                        let index = |place, head| given.strides.key_index(0, place, head);
                        let heads = self.key_heads;
                        let indices = places.flat_map(|place| (0..heads).map(move |head| index(place, head)));
                        given.check_positive(operand.name(), indices, errors);
                    }
                }
                _ => {}
            }
        }
    }
}

fn stride_error(operand: Operand, strides: ScaleStrides, allowed: &'static str) -> TensorError {
    let ScaleStrides { sequence, batch, row, key_head: head, .. } = strides;
    TensorError::ScaleStrides { tensor: operand.name(), sequence, batch, row, head, allowed }
}

/// Given scales are inputs, those that are computed outputs.
pub(crate) fn check_presence(
    operand: Operand,
    source: ScaleSource,
    is_given: bool,
    is_written: bool,
    errors: &mut Vec<TensorError>,
) {
    let mut presence = Errors(Vec::new());
    presence.presence(operand.name(), source == ScaleSource::Given, is_given);
    let output = if operand == Operand::KScale { "k_scale of the outputs" } else { "v_scale of the outputs" };
    presence.presence(output, source == ScaleSource::Computed, is_written);
    errors.append(&mut presence.0);
}
