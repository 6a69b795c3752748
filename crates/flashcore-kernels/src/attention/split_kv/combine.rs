//! Split-KV combine kernel: reduces the partial results of all splits of a row.
//!
//! A warp has one row of the output. Its lanes each look at one split for the largest row max and the row sum; then each
//! has some columns and adds up those of all splits, rescaled to that row max. The sink, the division by the row sum and
//! the LSE come here, once for all keys.

use flashcore_ir::types::{Bf16, F16, F32, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, Reg, ShuffleMode, SpecialRegister};

use super::partial::PartialRow;
use crate::attention::scalar::MemoryElement;
use crate::attention::scheduler::chunks::{ChunkParameters, SequenceChunks};
use crate::attention::{TileContext, TileSource};
use crate::config::Config;
use crate::parameters::{Parameters, SplitParameters};
use crate::primitives::{LANES, lse_log2, normalize_row};
use crate::specialization::Specialization;
use flashcore_problem::{DType, Operand};

/// Splits whose outputs are in flight at a time.
pub(crate) const SPLITS_AT_ONCE: u32 = 16;
/// Columns that a lane has beside each other, and loads at a time.
const COLUMNS: u32 = 4;

/// Rows, and so warps, of a CTA.
pub(crate) const ROWS: u32 = 4;

/// Everything that is compiled into a combine kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CombineSpec {
    /// The specialization, without what does not reach the text of the kernel.
    pub specialization: Specialization,
    /// The chunks, whose number differs by sequence; `None` for splits.
    pub chunks: Option<Chunks>,
}

/// The combine kernel of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunks {
    /// True if it starts while the chunks end (PDL).
    pub pdl: bool,
}

impl CombineSpec {
    /// The kernel after attention with this config.
    pub(crate) fn of(config: Config, specialization: Specialization) -> Self {
        match config.traits().chunks {
            Some((_, pdl)) => Self { specialization: specialization.for_chunk_combine(), chunks: Some(Chunks { pdl }) },
            None => Self { specialization: specialization.for_combine(), chunks: None },
        }
    }

    /// Writes the kernel.
    pub(crate) fn generate(self) -> Kernel {
        let Self { specialization, chunks } = self;
        let Specialization { dtype, value_dim, append, .. } = specialization;
        let of = if chunks.is_some() { "_chunks" } else { "" };
        let new = if append.is_some_and(|append| append.packed_new) { "_packednew" } else { "" };
        let name = format!("flashcore_combine{of}_{dtype}_d{value_dim}{}{new}", specialization.suffix());
        match dtype {
            DType::Bf16 => kernel::<Bf16>(name, specialization, chunks),
            DType::F16 => kernel::<F16>(name, specialization, chunks),
            // Of other types there are no kernels: see `unsupported`.
            DType::F32 | DType::F64 | DType::E4m3 | DType::E5m2 => kernel::<F32>(name, specialization, chunks),
        }
    }
}

fn kernel<T: MemoryElement>(name: String, specialization: Specialization, chunks: Option<Chunks>) -> Kernel {
    let mut builder = Builder::new(name, ROWS * LANES);
    let k = &mut builder;
    let parameters = Parameters::load(k, specialization);
    if chunks.is_some_and(|chunks| chunks.pdl) {
        // Lengths too are memory that a preceding kernel may still write.
        k.section("grid dependency wait", Builder::grid_dependency_wait);
    }
    let (splits, chunk_keys) = match chunks {
        Some(_) => {
            let chunks = ChunkParameters::load(k, &parameters);
            (chunks.splits, Some(chunks.chunk_keys))
        }
        None => (SplitParameters::load(k, &parameters), None),
    };
    // Masks and lengths matter no more, but to count chunks.
    let limits = if chunks.is_some() { specialization } else { specialization.without_limits() };
    let context = TileContext::new(k, &parameters, limits, ROWS, TileSource::Grid, false);
    let thread = k.special(SpecialRegister::ThreadX);
    let (warp, lane) = (k.shr(thread, LANES.ilog2()), k.and(thread, LANES - 1));
    let row = k.add(context.first_row, warp);
    let exists = k.compare(Compare::Lt, row, context.end_row);
    let (exists, count) = match chunk_keys {
        Some(chunk_keys) => {
            let SequenceChunks { count, .. } = SequenceChunks::of(k, &context, chunk_keys);
            // A sequence of one chunk is complete.
            (k.eval(exists & count.gt(1)), count)
        }
        None => (exists, splits.num_splits),
    };
    k.if_uniform(exists, |k| {
        let index = context.global_row(k, row);
        let partials = RowPartials { splits, count, index, value_dim: specialization.value_dim };
        let row_max = k.section("row max", |k| partials.row_max(k, lane));
        let output = context.output(k);
        let output = output.row(k, warp);
        combine::<T>(k, &context, &partials, &Target { lane, row, output }, row_max);
    });
    builder.finish()
}

/// The partial results of one row.
struct RowPartials {
    splits: SplitParameters,
    /// The splits of the row.
    count: Reg<U32>,
    /// The index of the row among all rows.
    index: Reg<U64>,
    value_dim: u32,
}

/// The lane, and the row that it stores.
struct Target {
    lane: Reg<U32>,
    row: Reg<U32>,
    output: Reg<U64>,
}

impl RowPartials {
    fn split(&self, k: &mut Builder, split: Reg<U32>) -> PartialRow {
        PartialRow::new(k, self.splits, split, self.index, self.value_dim)
    }

    /// Visits the splits, as many at a time as there are lanes: the first of them, and the row max and row sum of the split
    /// of this lane, minus infinity and zero where there is none.
    fn each_lane(
        &self,
        k: &mut Builder,
        lane: Reg<U32>,
        visit: impl FnOnce(&mut Builder, Reg<U32>, Reg<F32>, Reg<F32>),
    ) {
        k.for_uniform(0u32, self.count, LANES, |k, first| {
            let split = k.add(first, lane);
            let exists = k.compare(Compare::Lt, split, self.count);
            let partial = self.split(k, split);
            let (row_max, row_sum) = (k.copy(f32::NEG_INFINITY), k.copy(0.0f32));
            k.when(exists, |k| {
                k.load_into(row_max, GlobalAddress::from(partial.stats));
                k.load_into(row_sum, GlobalAddress::from(partial.stats).plus(4));
            });
            visit(k, first, row_max, row_sum);
        });
    }

    /// The largest row max of all splits.
    fn row_max(&self, k: &mut Builder, lane: Reg<U32>) -> Reg<F32> {
        let largest = k.copy(f32::NEG_INFINITY);
        self.each_lane(k, lane, |k, _, row_max, _| k.max_to(largest, row_max));
        reduce_warp(k, largest, |k, largest, other| k.max_to(largest, other));
        largest
    }
}

/// Reduces `value` over the lanes of a warp.
fn reduce_warp(k: &mut Builder, value: Reg<F32>, reduce: impl Fn(&mut Builder, Reg<F32>, Reg<F32>)) {
    for distance in [1u32, 2, 4, 8, 16] {
        let other = k.shuffle(ShuffleMode::Butterfly, value, distance);
        reduce(k, value, other);
    }
}

fn combine<T: MemoryElement>(
    k: &mut Builder,
    context: &TileContext,
    partials: &RowPartials,
    target: &Target,
    row_max: Reg<F32>,
) {
    let num_splits = partials.count;
    let none = k.compare(Compare::Eq, row_max, f32::NEG_INFINITY);
    let shift = k.select(none, 0.0f32, row_max);
    let row_sum = k.copy(0.0f32);
    // Lanes past the last column read the last ones, and store nothing. Head dimensions are multiples of 8.
    let columns: Vec<_> = (0..partials.value_dim.div_ceil(LANES * COLUMNS))
        .map(|step| {
            let column = k.eval(target.lane * COLUMNS + step * LANES * COLUMNS);
            let exists = k.compare(Compare::Lt, column, partials.value_dim);
            let results = [(); COLUMNS as usize].map(|()| k.copy(0.0f32));
            (k.min(column, partials.value_dim - COLUMNS), exists, results)
        })
        .collect();
    k.section("splits", |k| {
        partials.each_lane(k, target.lane, |k, first, split_max, split_sum| {
            let exponent = k.sub(split_max, shift);
            let factor = k.exp2(exponent);
            k.fma_to(row_sum, split_sum, factor);
            let left = k.eval((num_splits - first).min(LANES));
            let last = k.sub(num_splits, 1u32);
            k.for_uniform(0u32, left, SPLITS_AT_ONCE, |k, begin| {
                let mut loaded = Vec::new();
                for next in 0..SPLITS_AT_ONCE {
                    let lane = k.add(begin, next);
                    // The factor of a split that is not there is zero; the last is read in its place.
                    let factor = k.shuffle(ShuffleMode::Index, factor, lane);
                    let split = k.eval((first + lane).min(last));
                    let partial = partials.split(k, split);
                    for (column, _, results) in &columns {
                        let from = k.mad_wide(*column, 4u32, partial.output);
                        let elements = k.load::<F32>(GlobalAddress::from(from), COLUMNS);
                        loaded.extend(results.iter().zip(elements).map(|(result, element)| (*result, factor, element)));
                    }
                }
                for (result, factor, element) in loaded {
                    k.fma_to(result, element, factor);
                }
            });
        });
        reduce_warp(k, row_sum, |k, row_sum, other| k.add_to(row_sum, other));
    });
    k.section("epilogue", |k| {
        let sink = context.sink(k);
        let form = context.specialization.lse_form;
        let lse_of_keys = (!form.includes_sink).then(|| lse_log2(k, row_max, row_sum, form.base));
        let (row_max, inverse) = normalize_row(k, row_max, row_sum, sink);
        for (column, exists, results) in &columns {
            let to = GlobalAddress::from(k.mad_wide(*column, T::TYPE.bytes(), target.output));
            for (index, result) in results.iter().enumerate() {
                let scaled = k.mul(*result, inverse);
                let rounded = T::round(k, scaled);
                let to = to.plus((index as u32 * T::TYPE.bytes()) as i32);
                k.when(*exists, |k| k.store_one(to, rounded));
            }
        }
        if context.specialization.has(Operand::Lse) {
            let lse = lse_of_keys.unwrap_or_else(|| lse_log2(k, row_max, row_sum, form.base));
            let address = context.lse_address(k, target.row);
            let first = k.compare(Compare::Eq, target.lane, 0u32);
            k.when(first, |k| k.store_one(address, lse));
        }
    });
}
