//! Random numbers of an append, for tests and trials: independent tensors, poison wherever nothing may be read.

use super::{AppendProblem, PositionType, Rotary, ScaleSource};
use crate::{DType, Inputs, Operand, Outputs, PositionNumbers, Scale, ScaleStrides, SplitMix64, Tensor};

impl AppendProblem {
    /// Random inputs: slots that differ from each other and lie anywhere in the cache, some of them skipped, keys and
    /// values of skipped tokens and gaps between rows poisoned. Given scales take turns in their form, and saturate some
    /// values; where scales are computed, some rows are all zeros.
    pub fn random(&self, seed: u64) -> Inputs {
        self.drawn(seed, false)
    }

    /// [`random`](Self::random) inputs as a device takes them: some slots are far out of range on either side, and some
    /// positions outside of the table.
    pub fn random_with_strays(&self, seed: u64) -> Inputs {
        self.drawn(seed, true)
    }

    fn drawn(&self, seed: u64, has_strays: bool) -> Inputs {
        let problem = self;
        let mut random = SplitMix64::new(seed);
        let mut slot_mapping = random_slots(problem, &mut random);
        if !has_strays {
            slot_mapping.iter_mut().filter(|slot| problem.place(**slot).is_none()).for_each(|slot| *slot = -1);
        }
        let strides = problem.strides;
        let mut fill = |shape: crate::Shape, strides: crate::Strides, skipped: bool| {
            let mut tensor = Tensor::poisoned(problem.dtype, strides.extent(shape).unwrap_or(0));
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
        let (positions, tables) = match problem.rotary.map(|rotary| rotary.positions) {
            None => (None, None),
            Some(PositionType::I32) => {
                let positions = positions.iter().map(|&position| position as i32).collect();
                (Some(PositionNumbers::I32(positions)), Some((cos, sin)))
            }
            Some(PositionType::I64) => (Some(PositionNumbers::I64(positions)), Some((cos, sin))),
        };
        let (cos, sin) = tables.unwrap_or_default();
        Inputs {
            query,
            k_scale,
            v_scale,
            new_key: key,
            new_value: value,
            slot_mapping: Some(slot_mapping),
            positions,
            cos,
            sin,
            query_norm,
            key_norm,
            ..Inputs::default()
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

impl AppendProblem {
    /// Caches, query output and computed scales full of poison.
    pub fn poisoned(&self) -> Outputs {
        let cache = self.key_cache_shape();
        let scales = |operand, seed: usize| {
            let is_computed = self.scale_source(operand) == ScaleSource::Computed;
            is_computed.then(|| unwritten_scales(cache, (self.tokens + seed) as u64))
        };
        let (k_scale, v_scale) = (scales(Operand::KScale, 0), scales(Operand::VScale, 1));
        Outputs { k_scale, v_scale, ..Outputs::poisoned_rows(Self::OPERANDS, self) }
    }
}

impl Outputs {
    /// The strides of the computed scales of keys and of values; those of contiguous ones of a cache where there are none.
    pub fn scale_strides(&self, cache: crate::Shape) -> [ScaleStrides; 2] {
        let contiguous = ScaleStrides::per_cache_row(cache);
        [&self.k_scale, &self.v_scale].map(|scale| scale.as_ref().map_or(contiguous, |scale| scale.strides))
    }

    /// The computed scales of keys and of values; empty where there are none.
    pub fn scales(&self) -> [&[f32]; 2] {
        [&self.k_scale, &self.v_scale].map(|scale| scale.as_ref().map_or(&[][..], |scale| &scale.data))
    }
}
