//! Random numbers of an append, for tests and trials: independent tensors, poison wherever nothing may be read.

use super::oracle::poisoned;
use super::{AppendInputs, AppendOutputs, AppendProblem, PositionType, Positions, Rotary, ScaleSource};
use crate::{DType, Operand, Scale, ScaleStrides, SplitMix64, Tensor, TensorView};

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
    /// The scale of keys, where it is given.
    pub k_scale: Option<Scale>,
    /// The scale of values, where it is given.
    pub v_scale: Option<Scale>,
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
    /// The scales of keys, where they are computed.
    pub k_scale: Option<Scale>,
    /// The scales of values, where they are computed.
    pub v_scale: Option<Scale>,
}

impl AppendData {
    /// Random inputs: slots that differ from each other and lie anywhere in the cache, some of them skipped, keys and
    /// values of skipped tokens and gaps between rows poisoned. Given scales take turns in their form, and saturate some
    /// values; where scales are computed, some rows are all zeros.
    pub fn random(problem: &AppendProblem, seed: u64) -> Self {
        Self::drawn(problem, seed, false)
    }

    /// [`random`](Self::random) inputs as a device takes them: some slots are far out of range on either side, and some
    /// positions outside of the table.
    pub fn with_strays(problem: &AppendProblem, seed: u64) -> Self {
        Self::drawn(problem, seed, true)
    }

    fn drawn(problem: &AppendProblem, seed: u64, has_strays: bool) -> Self {
        let mut random = SplitMix64::new(seed);
        let mut slot_mapping = random_slots(problem, &mut random);
        if !has_strays {
            slot_mapping.iter_mut().filter(|slot| problem.place(**slot).is_none()).for_each(|slot| *slot = -1);
        }
        let strides = problem.strides;
        let mut fill = |shape: crate::Shape, strides: crate::Strides, skipped: bool| {
            let mut tensor = poisoned(problem.dtype, shape, strides);
            for (batch, head, row) in shape.each_row() {
                if skipped && problem.place(slot_mapping[row]).is_none() {
                    continue;
                }
                let start = strides.row_start(batch, head, row);
                let is_zero = problem.compute_scales && (head + row) % ZEROS == ZEROS - 1;
                let factor = if is_zero { 0.0 } else { 1.0 };
                (start..start + shape.columns).for_each(|index| tensor.set(index, factor * random.normal()));
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
            .map(|position| if has_strays { position } else { position.rem_euclid(max) })
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
        let scale = |operand, random: &mut SplitMix64| given_scale(problem, operand, &slot_mapping, random);
        let mut scale_random = SplitMix64::stream(seed, SCALE_STREAM);
        let k_scale = scale(Operand::KScale, &mut scale_random);
        let v_scale = scale(Operand::VScale, &mut scale_random);
        Self {
            k_scale,
            v_scale,
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
            k_scale: self.k_scale.as_ref().map(Scale::view),
            v_scale: self.v_scale.as_ref().map(Scale::view),
            ..AppendInputs::new(&self.key, &self.value, &self.slot_mapping)
        }
    }
}

/// The stream of given scales.
const SCALE_STREAM: u64 = 0x5ca1e;
/// One row in so many is all zeros where scales are computed.
pub(crate) const ZEROS: usize = 5;

/// Scales of tokens that are not skipped, NaN elsewhere: of the tensor, by head, or by row and head.
fn given_scale(
    problem: &AppendProblem,
    operand: Operand,
    slot_mapping: &[i64],
    random: &mut SplitMix64,
) -> Option<Scale> {
    if problem.scale_source(operand) != ScaleSource::Given {
        return None;
    }
    let strides = match random.below(3) {
        0 => ScaleStrides::TENSOR,
        1 => ScaleStrides::KEY_HEAD,
        _ => ScaleStrides::per_cache_row(problem.key_cache_shape()),
    };
    let mut data = vec![f32::NAN; strides.extent_of_cache(problem.key_cache_shape()).unwrap_or(0)];
    for place in slot_mapping.iter().filter_map(|&slot| problem.place(slot)) {
        for head in 0..problem.key_heads {
            let index = strides.key_index(0, place, head);
            if data[index].is_nan() {
                data[index] = random_scale(problem.cache_dtype(), random);
            }
        }
    }
    Some(Scale { data, strides })
}

/// A scale from 1/4 to 2, or so small that most normal numbers saturate.
pub(crate) fn random_scale(dtype: DType, random: &mut SplitMix64) -> f32 {
    let small = if random.below(5) == 0 { 4.0 / dtype.largest() } else { 1.0 };
    ((random.uniform() * 3.0 - 2.0).exp2() * small) as f32
}

/// The scales of a cache before they are computed: poison, in one of two orders, some with room between heads.
pub(crate) fn unwritten_scales(cache: crate::Shape, seed: u64) -> Scale {
    let crate::Shape { batch, rows, heads, .. } = cache;
    let strides = match seed % 3 {
        0 => ScaleStrides::per_cache_row(cache),
        1 => ScaleStrides { batch: rows * heads, row: 1, key_head: rows, ..ScaleStrides::TENSOR },
        _ => ScaleStrides { batch: 2 * rows * heads + 1, row: 2 * heads, key_head: 2, ..ScaleStrides::TENSOR },
    };
    let poison = f32::from_bits(DType::F32.poison() as u32);
    let extent = strides.extent_of_cache(cache).unwrap_or(0);
    Scale { data: vec![poison; if batch == 0 { 0 } else { extent }], strides }
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
        let (strides, cache, dtype) = (problem.strides, problem.key_cache_shape(), problem.cache_dtype());
        let scales = |operand, seed: usize| {
            let is_computed = problem.scale_source(operand) == ScaleSource::Computed;
            is_computed.then(|| unwritten_scales(cache, (problem.tokens + seed) as u64))
        };
        Self {
            k_scale: scales(Operand::KScale, 0),
            v_scale: scales(Operand::VScale, 1),
            key_cache: poisoned(dtype, cache, strides.key_cache),
            value_cache: poisoned(dtype, problem.value_cache_shape(), strides.value_cache),
            query: poisoned(problem.dtype, problem.query_shape(), strides.query_output),
        }
    }

    /// Views to be written.
    pub fn outputs(&mut self, problem: &AppendProblem) -> AppendOutputs<'_> {
        let mut outputs = AppendOutputs::new(&mut self.key_cache, &mut self.value_cache);
        outputs.k_scale = self.k_scale.as_mut().map(Scale::view_mut);
        outputs.v_scale = self.v_scale.as_mut().map(Scale::view_mut);
        if problem.query_heads > 0 { outputs.with_query(&mut self.query) } else { outputs }
    }

    /// The strides of the computed scales of keys and of values; those of contiguous ones where there are none.
    pub fn scale_strides(&self, problem: &AppendProblem) -> [ScaleStrides; 2] {
        let contiguous = ScaleStrides::per_cache_row(problem.key_cache_shape());
        [&self.k_scale, &self.v_scale].map(|scale| scale.as_ref().map_or(contiguous, |scale| scale.strides))
    }

    /// The computed scales of keys and of values; empty where there are none.
    pub fn scales(&self) -> [&[f32]; 2] {
        [&self.k_scale, &self.v_scale].map(|scale| scale.as_ref().map_or(&[][..], |scale| &scale.data))
    }
}
