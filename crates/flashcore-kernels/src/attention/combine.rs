//! Adds up what is known of the KV splits.
//!
//! A warp has one row of the output. Its lanes each look at one part for the largest maximum and the sum; then each has some
//! columns and adds up those of all parts, brought to that maximum. The sink, the division by the sum and the log-sum-exp
//! come here, once for all keys.

use core::f32::consts::LN_2;

use flashcore_ir::types::{F32, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, Reg, ShuffleMode, SpecialRegister};
use flashcore_problem::Operand;

use super::partial::PartialRow;
use super::scalar::MemoryElement;
use super::{Place, Rows, Work};
use crate::parameters::{Parameters, SplitParameters};
use crate::specialization::Specialization;
use crate::tile::{LANES, add_sink};

/// Parts whose outputs are on their way at a time.
const PARTS_AT_ONCE: u32 = 8;

/// Rows, and so warps, of a CTA.
pub(crate) const ROWS: u32 = 4;

/// Writes the kernel.
pub(crate) fn kernel<T: MemoryElement>(name: String, specialization: Specialization) -> Kernel {
    let mut builder = Builder::new(name, ROWS * LANES);
    let k = &mut builder;
    let parameters = Parameters::load(k, specialization);
    let num_splits = SplitParameters::load(k, &parameters);
    // Whether rows have limits matters no more, nor do their scores.
    let plain = specialization.without_limits();
    let work = Work::at(k, &parameters, plain, ROWS, Place::Grid, Rows::OfHead);
    let thread = k.special(SpecialRegister::ThreadX);
    let (warp, lane) = (k.shr(thread, LANES.ilog2()), k.and(thread, LANES - 1));
    let row = k.add(work.first_row, warp);
    let exists = k.compare(Compare::Lt, row, work.row_count);
    k.if_uniform(exists, |k| {
        let number = work.row_of_all(k, row);
        let rows = OfRow { num_splits, number, value_dim: specialization.value_dim };
        let maximum = k.section("maximum", |k| rows.maximum(k, lane));
        let output = work.output(k);
        let output = output.row(k, warp);
        combine::<T>(k, &work, &rows, &Target { lane, row, output }, maximum);
    });
    builder.finish()
}

/// The parts of one row.
struct OfRow {
    num_splits: SplitParameters,
    number: Reg<U64>,
    value_dim: u32,
}

/// Where the row goes.
struct Target {
    lane: Reg<U32>,
    row: Reg<U32>,
    output: Reg<U64>,
}

impl OfRow {
    fn part(&self, k: &mut Builder, part: Reg<U32>) -> PartialRow {
        PartialRow::new(k, self.num_splits, part, self.number, self.value_dim)
    }

    /// Goes through the parts, as many at a time as there are lanes: the first of them, and the maximum and the sum of the
    /// part of this lane, minus infinity and zero where there is none.
    fn each_lane(
        &self,
        k: &mut Builder,
        lane: Reg<U32>,
        visit: impl FnOnce(&mut Builder, Reg<U32>, Reg<F32>, Reg<F32>),
    ) {
        k.for_uniform(0u32, self.num_splits.num_splits, LANES, |k, first| {
            let part = k.add(first, lane);
            let exists = k.compare(Compare::Lt, part, self.num_splits.num_splits);
            let partial = self.part(k, part);
            let (maximum, sum) = (k.copy(f32::NEG_INFINITY), k.copy(0.0f32));
            k.when(exists, |k| {
                k.load_into(maximum, GlobalAddress::from(partial.sums));
                k.load_into(sum, GlobalAddress::from(partial.sums).plus(4));
            });
            visit(k, first, maximum, sum);
        });
    }

    /// The largest maximum of all parts.
    fn maximum(&self, k: &mut Builder, lane: Reg<U32>) -> Reg<F32> {
        let largest = k.copy(f32::NEG_INFINITY);
        self.each_lane(k, lane, |k, _, maximum, _| k.max_to(largest, maximum));
        over_warp(k, largest, |k, largest, other| k.max_to(largest, other));
        largest
    }
}

/// Combines `value` over the lanes of a warp.
fn over_warp(k: &mut Builder, value: Reg<F32>, combine: impl Fn(&mut Builder, Reg<F32>, Reg<F32>)) {
    for distance in [1u32, 2, 4, 8, 16] {
        let other = k.shuffle(ShuffleMode::Butterfly, value, distance);
        combine(k, value, other);
    }
}

fn combine<T: MemoryElement>(k: &mut Builder, work: &Work, rows: &OfRow, target: &Target, maximum: Reg<F32>) {
    let none = k.compare(Compare::Eq, maximum, f32::NEG_INFINITY);
    let shift = k.select(none, 0.0f32, maximum);
    let sum = k.copy(0.0f32);
    // Lanes have columns that are as far apart as there are lanes; those behind the last read it, and store nothing.
    let columns: Vec<_> = (0..rows.value_dim.div_ceil(LANES))
        .map(|step| {
            let column = k.add(target.lane, step * LANES);
            let exists = k.compare(Compare::Lt, column, rows.value_dim);
            (k.min(column, rows.value_dim - 1), exists, k.copy(0.0f32))
        })
        .collect();
    k.section("num_splits", |k| {
        rows.each_lane(k, target.lane, |k, first, part_maximum, part_sum| {
            let exponent = k.sub(part_maximum, shift);
            let factor = k.exp2(exponent);
            k.fma_to(sum, part_sum, factor);
            let left = k.sub(rows.num_splits.num_splits, first);
            let left = k.min(left, LANES);
            let last = k.sub(rows.num_splits.num_splits, 1u32);
            k.for_uniform(0u32, left, PARTS_AT_ONCE, |k, number| {
                let mut loaded = Vec::new();
                for next in 0..PARTS_AT_ONCE {
                    let lane = k.add(number, next);
                    // The factor of a part that is not there is zero; the last is read in its place.
                    let factor = k.shuffle(ShuffleMode::Index, factor, lane);
                    let part = k.add(first, lane);
                    let part = k.min(part, last);
                    let partial = rows.part(k, part);
                    for (column, _, result) in &columns {
                        let from = k.mad_wide(*column, 4u32, partial.output);
                        loaded.push((*result, factor, k.load_one::<F32>(GlobalAddress::from(from))));
                    }
                }
                for (result, factor, element) in loaded {
                    k.fma_to(result, element, factor);
                }
            });
        });
        over_warp(k, sum, |k, sum, other| k.add_to(sum, other));
    });
    k.section("epilogue", |k| {
        let (maximum, factor) = match work.sink(k) {
            Some(sink) => {
                let (maximum, factor) = add_sink(k, maximum, sum, sink);
                (maximum, Some(factor))
            }
            None => (maximum, None),
        };
        let empty = k.compare(Compare::Eq, sum, 0.0f32);
        let inverse = k.reciprocal(sum);
        let mut inverse = k.select(empty, 0.0f32, inverse);
        if let Some(factor) = factor {
            inverse = k.mul(inverse, factor);
        }
        for (column, exists, result) in &columns {
            let scaled = k.mul(*result, inverse);
            let rounded = T::round(k, scaled);
            let to = k.mad_wide(*column, T::TYPE.bytes(), target.output);
            k.when(*exists, |k| k.store_one(to, rounded));
        }
        if work.specialization.has(Operand::Lse) {
            // In an empty row both terms are minus infinity, and so is their sum.
            let logarithm = k.log2(sum);
            let base_two = k.add(maximum, logarithm);
            let natural = k.mul(base_two, LN_2);
            let address = work.lse(k, target.row);
            let first = k.compare(Compare::Eq, target.lane, 0u32);
            k.when(first, |k| k.store_one(address, natural));
        }
    });
}
