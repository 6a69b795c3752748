//! Random numbers of an append, for tests and trials: independent tensors, poison wherever nothing may be read.

use super::oracle::poisoned;
use super::{AppendInputs, AppendOutputs, AppendProblem, PositionType, Positions, Rotary};
use crate::{SplitMix64, Tensor, TensorView};

/// Owned inputs of an append.
#[derive(Clone, Debug, PartialEq)]
pub struct AppendData {
    /// New keys.
    pub key: Tensor,
    /// New values.
    pub value: Tensor,
    /// Slot of each token.
    pub slot_mapping: Vec<i64>,
    /// Query rows.
    pub query: Tensor,
    /// Position of each token.
    pub positions: Vec<i64>,
    /// The same in 32 bits.
    positions_i32: Vec<i32>,
    /// Cosines.
    pub cos: Tensor,
    /// Sines.
    pub sin: Tensor,
    /// Weights of the norm of the query.
    pub query_norm: Tensor,
    /// Weights of the norm of the key.
    pub key_norm: Tensor,
    position_type: Option<PositionType>,
    has_query: bool,
    has_norm: bool,
}

/// Memory that an append writes, as it was before.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheMemory {
    /// The key cache.
    pub key_cache: Tensor,
    /// The value cache.
    pub value_cache: Tensor,
    /// The query output.
    pub query: Tensor,
}

impl AppendData {
    /// Random inputs: slots that differ from each other and lie anywhere in the cache, some of them skipped (-1, and far
    /// out of range on either side), positions of which some are outside of the table, keys and values of skipped tokens
    /// and gaps between rows poisoned.
    pub fn random(problem: &AppendProblem, seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let slot_mapping = random_slots(problem, &mut random);
        let strides = problem.strides;
        let mut fill = |shape: crate::Shape, strides: crate::Strides, skipped: bool| {
            let mut tensor = poisoned(problem.dtype, shape, strides);
            for (batch, head, row) in shape.each_row() {
                if skipped && problem.place(slot_mapping[row]).is_none() {
                    continue;
                }
                let start = strides.row_start(batch, head, row);
                (start..start + shape.columns).for_each(|index| tensor.set(index, random.normal()));
            }
            tensor
        };
        let key = fill(problem.key_shape(), strides.key, true);
        let value = fill(problem.value_shape(), strides.value, true);
        let query = fill(problem.query_shape(), strides.query, false);
        let max = problem.rotary.map_or(1, |rotary| rotary.max_position) as i64;
        let positions: Vec<i64> = (0..problem.tokens)
            .map(|_| match random.below(8) {
                0 => -1 - random.below(1000) as i64,
                1 => max + random.below(1_000_000) as i64,
                _ => random.below(max as usize) as i64,
            })
            .collect();
        let (cos, sin) = problem.rotary.map_or_else(
            || (Tensor::zeros(problem.dtype, 0), Tensor::zeros(problem.dtype, 0)),
            |rotary| tables(problem, rotary, &mut random),
        );
        let columns = if problem.qk_norm.is_some() { problem.head_dim } else { 0 };
        let mut weights = |columns: usize| {
            let values: Vec<f64> = (0..columns).map(|_| 1.0 + 0.25 * random.normal()).collect();
            Tensor::from_values(problem.dtype, &values)
        };
        let query_norm = weights(if problem.query_heads > 0 { columns } else { 0 });
        let key_norm = weights(columns);
        Self {
            key,
            value,
            slot_mapping,
            query,
            positions_i32: positions.iter().map(|&position| position as i32).collect(),
            positions,
            cos,
            sin,
            query_norm,
            key_norm,
            position_type: problem.rotary.map(|rotary| rotary.positions),
            has_query: problem.query_heads > 0,
            has_norm: problem.qk_norm.is_some(),
        }
    }

    /// Views of what the problem has.
    pub fn inputs(&self) -> AppendInputs<'_> {
        let some = |on: bool, tensor| on.then(|| TensorView::from(tensor));
        let rotary = self.position_type.is_some();
        AppendInputs {
            query: some(self.has_query, &self.query),
            positions: self.position_type.map(|kind| match kind {
                PositionType::I32 => Positions::I32(&self.positions_i32),
                PositionType::I64 => Positions::I64(&self.positions),
            }),
            cos: some(rotary, &self.cos),
            sin: some(rotary, &self.sin),
            query_norm: some(self.has_norm && self.has_query, &self.query_norm),
            key_norm: some(self.has_norm, &self.key_norm),
            ..AppendInputs::new(&self.key, &self.value, &self.slot_mapping)
        }
    }
}

/// Cosines and sines of random angles, in every row; poison between rows.
pub(crate) fn tables(problem: &AppendProblem, rotary: Rotary, random: &mut SplitMix64) -> (Tensor, Tensor) {
    let elements = rotary.table_extent().unwrap_or(0);
    let table = || Tensor::poisoned(problem.table_dtype(), elements);
    let (mut cos, mut sin) = (table(), table());
    for row in 0..rotary.max_position {
        for pair in 0..rotary.dim / 2 {
            let (angle, index) = (random.uniform() * core::f64::consts::TAU, row * rotary.table_stride + pair);
            cos.set(index, angle.cos());
            sin.set(index, angle.sin());
        }
    }
    (cos, sin)
}

/// Slots without repetition, some of which are to be skipped.
fn random_slots(problem: &AppendProblem, random: &mut SplitMix64) -> Vec<i64> {
    let slots = problem.slots();
    let mut free: Vec<usize> = (0..slots.min(MOST_DRAWN)).collect();
    (0..problem.tokens)
        .map(|_| match random.below(8) {
            0 => -1,
            1 => [i64::MIN, -7, slots as i64, slots as i64 + 3, i64::MAX][random.below(5)],
            _ if free.is_empty() => -1,
            _ => free.swap_remove(random.below(free.len())) as i64,
        })
        .collect()
}

/// The most slots that random ones are drawn from.
const MOST_DRAWN: usize = 1 << 20;

impl CacheMemory {
    /// Caches and query output full of poison.
    pub fn poisoned(problem: &AppendProblem) -> Self {
        let strides = problem.strides;
        Self {
            key_cache: poisoned(problem.dtype, problem.key_cache_shape(), strides.key_cache),
            value_cache: poisoned(problem.dtype, problem.value_cache_shape(), strides.value_cache),
            query: poisoned(problem.dtype, problem.query_shape(), strides.query_output),
        }
    }

    /// Views to be written.
    pub fn outputs(&mut self, problem: &AppendProblem) -> AppendOutputs<'_> {
        let outputs = AppendOutputs::new(&mut self.key_cache, &mut self.value_cache);
        if problem.query_heads > 0 { outputs.with_query(&mut self.query) } else { outputs }
    }
}
