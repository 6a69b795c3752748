//! Rows that are copied from one tensor to another, normalized, rotated and quantised on the way.

use crate::driver::output::Disjoint;
use crate::elements::{round, widen};
use crate::planted::planted;
use flashcore_problem::quantize::{quantized, row_scale};
use flashcore_problem::{
    AppendProblem, DType, QkNorm, Rotary, RotaryStyle, RowMove, ScaleStrides, ScaleView, ScaleViewMut, Strides,
    TensorView,
};

/// Rows of heads of one tensor, and where they go.
pub(crate) struct HeadRows<'a> {
    pub(crate) dtype: DType,
    pub(crate) columns: usize,
    /// The tensor they come from; `None` where they lie in the target already.
    pub(crate) source: Option<(TensorView<'a>, Strides)>,
    pub(crate) target: Strides,
    /// Elements from the beginning of the target's memory to its first.
    pub(crate) offset: usize,
    /// The type of an FP8 target and its scales; `None` for a target of the type of the rows.
    pub(crate) quantize: Option<Quantize<'a>>,
}

/// Quantisation of rows to FP8.
#[derive(Clone, Copy)]
pub(crate) struct Quantize<'a> {
    pub(crate) dtype: DType,
    pub(crate) scales: &'a RowScales<'a>,
}

/// The scales of rows in an FP8 cache, by place and head.
pub(crate) enum RowScales<'a> {
    /// All are 1.
    None,
    /// They are read.
    Given(ScaleView<'a>),
    /// They are computed and written.
    Computed(Disjoint<'a, f32>, ScaleStrides),
}

impl<'a> RowScales<'a> {
    /// Scales of a problem that validated: given ones are inputs, computed ones outputs.
    pub(crate) fn new(given: Option<ScaleView<'a>>, written: Option<ScaleViewMut<'a>>) -> Self {
        match (given, written) {
            (_, Some(ScaleViewMut { data, strides })) => Self::Computed(Disjoint::new(data), strides),
            (Some(scale), None) => Self::Given(scale),
            (None, None) => Self::None,
        }
    }
}

impl Quantize<'_> {
    /// Writes the codes of a row.
    ///
    /// # Safety
    ///
    /// Nobody else uses the scale of this row and head.
    unsafe fn write(&self, row: &[f32], moved: RowMove, head: usize, codes: &mut [u8]) {
        let index = |strides: ScaleStrides| strides.key_index(moved.sequence, moved.to, head);
        let scale = match self.scales {
            RowScales::None => 1.0,
            RowScales::Given(scale) => scale.data[index(scale.strides)],
            RowScales::Computed(scales, strides) => {
                let scale = row_scale(self.dtype, row);
                // SAFETY: the contract of this function; validation refuses scales that rows share.
                unsafe { scales.part(index(*strides), 1) }.fill(scale);
                scale
            }
        };
        codes.iter_mut().zip(row).for_each(|(code, &x)| *code = quantized(self.dtype, x, scale));
    }
}

impl HeadRows<'_> {
    /// Moves rows of one head.
    ///
    /// # Safety
    ///
    /// Nobody else uses the rows of this head in the target, or their scales.
    pub(crate) unsafe fn write(
        &self,
        target: &Disjoint<'_, u8>,
        head: usize,
        moves: impl Iterator<Item = RowMove>,
        mut transform: Option<Transform<'_>>,
    ) {
        let size = self.dtype.size_bytes();
        let bytes = self.columns * size;
        if let (Some(quantize), Some((source, strides))) = (self.quantize, self.source) {
            let mut plain = Transform::nothing(self.dtype);
            let transform = transform.as_mut().unwrap_or(&mut plain);
            for moved in moves {
                let RowMove { from, to, position, .. } = moved;
                let row = &source.data[strides.row_start(from.0, head, from.1) * size..][..bytes];
                let start = self.target.row_start(to.0, head, to.1) + self.offset;
                // SAFETY: the contract of this function; a code is a byte.
                unsafe {
                    let codes = target.part(start, self.columns);
                    quantize.write(transform.of(position, row, self.columns), moved, head, codes);
                }
            }
            return;
        }
        for RowMove { from, to, position, .. } in moves {
            let start = (self.target.row_start(to.0, head, to.1) + self.offset) * size;
            // SAFETY: the contract of this function.
            let row = unsafe { target.part(start, bytes) };
            if let Some((source, strides)) = self.source {
                row.copy_from_slice(&source.data[strides.row_start(from.0, head, from.1) * size..][..bytes]);
            }
            if let Some(transform) = &mut transform {
                transform.apply(position, row);
            }
        }
    }
}

/// Norm and rotary embedding of rows, with memory for one.
pub(crate) struct Transform<'a> {
    dtype: DType,
    norm: Option<QkNorm>,
    rotary: Option<(Rotary, DType, TensorView<'a>, TensorView<'a>)>,
    /// Weights of the norm; empty without one.
    weights: Vec<f32>,
    row: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl<'a> Transform<'a> {
    /// The transform of an append, with the tables of its rotary embedding and the weights of its norm.
    pub(crate) fn new(
        problem: &AppendProblem,
        tables: Option<(TensorView<'a>, TensorView<'a>)>,
        weights: Option<TensorView<'_>>,
    ) -> Self {
        let columns = |is_on: bool| vec![0.0; if is_on { problem.head_dim } else { 0 }];
        let pairs = || vec![0.0; problem.rotary.map_or(0, |rotary| rotary.dim / 2)];
        let mut norm = columns(problem.qk_norm.is_some());
        if let Some(weights) = weights {
            widen(problem.dtype, weights.data, &mut norm);
        }
        let rotary = problem.rotary.zip(tables).map(|(rotary, (cos, sin))| (rotary, problem.table_dtype(), cos, sin));
        let row = columns(problem.qk_norm.is_some() || problem.rotary.is_some());
        Self { dtype: problem.dtype, norm: problem.qk_norm, rotary, weights: norm, row, cos: pairs(), sin: pairs() }
    }

    /// No norm and no rotary embedding.
    fn nothing(dtype: DType) -> Self {
        let (weights, row, cos, sin) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { dtype, norm: None, rotary: None, weights, row, cos, sin }
    }

    /// Transforms a row; where there is nothing to do, its bits stay.
    fn apply(&mut self, position: i64, bytes: &mut [u8]) {
        if self.row.is_empty() {
            return;
        }
        self.compute(position, bytes);
        round(self.dtype, &self.row, bytes);
    }

    /// The row as it is after norm and rotary embedding, not rounded.
    fn of(&mut self, position: i64, bytes: &[u8], columns: usize) -> &[f32] {
        self.row.resize(columns, 0.0);
        self.compute(position, bytes);
        &self.row
    }

    fn compute(&mut self, position: i64, bytes: &[u8]) {
        widen(self.dtype, bytes, &mut self.row);
        if let Some(norm) = self.norm {
            let mean = self.row.iter().map(|x| x * x).sum::<f32>() / self.row.len() as f32;
            let scale = 1.0 / (mean + norm.eps).sqrt();
            self.row.iter_mut().zip(&self.weights).for_each(|(x, weight)| *x = *x * scale * weight);
        }
        self.rotate(position);
    }

    fn rotate(&mut self, position: i64) {
        let Some((rotary, dtype, cos, sin)) = self.rotary else { return };
        let position = planted!(RotaryPast128: position.min(128), position);
        let start = rotary.clamp(position) * rotary.table_stride * dtype.size_bytes();
        widen(dtype, &cos.data[start..], &mut self.cos);
        widen(dtype, &sin.data[start..], &mut self.sin);
        let half = rotary.dim / 2;
        for (pair, (cos, sin)) in self.cos.iter().zip(&self.sin).enumerate() {
            let (first, second) = match rotary.style {
                RotaryStyle::Neox => (pair, pair + half),
                RotaryStyle::GptJ => (2 * pair, 2 * pair + 1),
            };
            let (x, y) = (self.row[first], self.row[second]);
            self.row[first] = x * cos - y * sin;
            self.row[second] = y * cos + x * sin;
        }
    }
}
