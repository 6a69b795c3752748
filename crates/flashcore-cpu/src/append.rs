//! Append to a KV cache on the CPU: a work item is one head of the query, the keys or the values of all tokens, so that no
//! two threads write one row even where two tokens have the same slot; the last of them is then the one that stays.

use crate::driver::output::Disjoint;
use crate::driver::parallel::{LoopSchedule, for_each};
use crate::elements::{round, widen};
use flashcore_problem::{
    AppendInputs, AppendOutputs, AppendProblem, Invalid, RotaryStyle, Strides, TensorView, TensorViewMut, ValueCache,
};

/// Appends keys and values to a KV cache, as [`AppendProblem`] defines it, on all threads of rayon's current pool.
///
/// On an error the outputs are as they were.
pub fn append(problem: &AppendProblem, inputs: &AppendInputs<'_>, outputs: AppendOutputs<'_>) -> Result<(), Invalid> {
    problem.validate_views(inputs, &outputs)?;
    let AppendOutputs { key_cache, value_cache, query, .. } = outputs;
    let key_cache = Disjoint::new(key_cache.data);
    let (own_values, offset) = match value_cache {
        ValueCache::Separate(TensorViewMut { data, .. }) => (Some(Disjoint::new(data)), 0),
        ValueCache::InKeyCache { offset } => (None, offset),
    };
    let value_cache = own_values.as_ref().unwrap_or(&key_cache);
    let query_output = query.map(|query| Disjoint::new(query.data));
    let (queries, keys) = (problem.query_heads, problem.key_heads);
    let work = |item: usize| {
        if item < queries {
            if let Some(output) = &query_output {
                // SAFETY: this item alone has the rows of this head, which overlap no other by validation.
                unsafe { query_head(problem, inputs, output, item) };
            }
        } else {
            let (head, is_key) = ((item - queries) / 2, (item - queries).is_multiple_of(2));
            let (cache, offset) = if is_key { (&key_cache, 0) } else { (value_cache, offset) };
            // SAFETY: this item alone has the rows of this head of this cache; caches that share a memory lie apart by
            // validation.
            unsafe { cache_head(problem, inputs, cache, offset, head, is_key) };
        }
    };
    for_each(queries + 2 * keys, problem.tokens.saturating_mul(problem.head_dim), LoopSchedule::Dynamic, work);
    Ok(())
}

/// Writes one head of the query output.
///
/// # Safety
///
/// Nobody else uses the rows of this head.
unsafe fn query_head(problem: &AppendProblem, inputs: &AppendInputs<'_>, output: &Disjoint<'_, u8>, head: usize) {
    let bytes = problem.head_dim * problem.dtype.size_bytes();
    let mut transform = Transform::new(problem, inputs, inputs.query_norm);
    for token in 0..problem.tokens {
        let start = byte_offset(problem, problem.strides.query_output, 0, head, token);
        // SAFETY: the contract of this function.
        let target = unsafe { output.part(start, bytes) };
        if let Some(query) = inputs.query {
            target.copy_from_slice(&query.data[byte_offset(problem, problem.strides.query, 0, head, token)..][..bytes]);
        }
        transform.apply(token, target);
    }
}

/// Writes one head of a cache.
///
/// # Safety
///
/// Nobody else uses the rows of this head.
unsafe fn cache_head(
    problem: &AppendProblem,
    inputs: &AppendInputs<'_>,
    cache: &Disjoint<'_, u8>,
    offset: usize,
    head: usize,
    is_key: bool,
) {
    let strides = problem.strides;
    let (source, source_strides, cache_strides, columns) = if is_key {
        (inputs.key, strides.key, strides.key_cache, problem.head_dim)
    } else {
        (inputs.value, strides.value, strides.value_cache, problem.value_dim)
    };
    let bytes = columns * problem.dtype.size_bytes();
    let mut transform = is_key.then(|| Transform::new(problem, inputs, inputs.key_norm));
    for (token, &slot) in inputs.slot_mapping.iter().enumerate() {
        let Some((page, row)) = problem.place(slot) else { continue };
        let start = byte_offset(problem, cache_strides, page, head, row) + offset * problem.dtype.size_bytes();
        // SAFETY: the contract of this function.
        let target = unsafe { cache.part(start, bytes) };
        target.copy_from_slice(&source.data[byte_offset(problem, source_strides, 0, head, token)..][..bytes]);
        if let Some(transform) = &mut transform {
            transform.apply(token, target);
        }
    }
}

const fn byte_offset(problem: &AppendProblem, strides: Strides, batch: usize, head: usize, row: usize) -> usize {
    strides.row_start(batch, head, row) * problem.dtype.size_bytes()
}

/// Norm and rotary embedding of rows, with memory for one.
struct Transform<'a> {
    problem: &'a AppendProblem,
    inputs: &'a AppendInputs<'a>,
    /// Weights of the norm; empty without one.
    weights: Vec<f32>,
    row: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl<'a> Transform<'a> {
    fn new(problem: &'a AppendProblem, inputs: &'a AppendInputs<'a>, weights: Option<TensorView<'_>>) -> Self {
        let columns = |is_on: bool| vec![0.0; if is_on { problem.head_dim } else { 0 }];
        let pairs = || vec![0.0; problem.rotary.map_or(0, |rotary| rotary.dim / 2)];
        let mut norm = columns(problem.qk_norm.is_some());
        if let Some(weights) = weights {
            widen(problem.dtype, weights.data, &mut norm);
        }
        let row = columns(problem.qk_norm.is_some() || problem.rotary.is_some());
        Self { problem, inputs, weights: norm, row, cos: pairs(), sin: pairs() }
    }

    /// Transforms the row of a token; where there is nothing to do, its bits stay.
    fn apply(&mut self, token: usize, bytes: &mut [u8]) {
        if self.row.is_empty() {
            return;
        }
        widen(self.problem.dtype, bytes, &mut self.row);
        if let Some(norm) = self.problem.qk_norm {
            let mean = self.row.iter().map(|x| x * x).sum::<f32>() / self.row.len() as f32;
            let scale = 1.0 / (mean + norm.eps).sqrt();
            self.row.iter_mut().zip(&self.weights).for_each(|(x, weight)| *x = *x * scale * weight);
        }
        self.rotate(token);
        round(self.problem.dtype, &self.row, bytes);
    }

    fn rotate(&mut self, token: usize) {
        let (Some(rotary), Some(positions), Some(cos), Some(sin)) =
            (self.problem.rotary, self.inputs.positions, self.inputs.cos, self.inputs.sin)
        else {
            return;
        };
        let dtype = self.problem.table_dtype();
        let start = rotary.clamp(positions.get(token)) * rotary.table_stride * dtype.size_bytes();
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
