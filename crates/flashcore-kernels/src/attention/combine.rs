//! Adds up what is known of the parts of the keys.
//!
//! A warp has one row of the output: its lanes go over the parts for the largest maximum, then each has some columns and
//! adds up those of all parts, each brought to that maximum. The sink, the division by the sum and the log-sum-exp come
//! here, once for all keys.

use core::f32::consts::LN_2;

use flashcore_ir::types::{F32, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, Reg, SpecialRegister};

use super::partial::PartialRow;
use super::scalar::MemoryElement;
use super::{Place, Rows, Work};
use crate::parameters::{Parameters, PartParameters};
use crate::specialisation::Specialisation;
use crate::tile::{LANES, add_sink};

/// Rows, and so warps, of a CTA.
pub(crate) const ROWS: u32 = 4;

/// Writes the kernel.
pub(crate) fn kernel<T: MemoryElement>(name: String, specialisation: Specialisation) -> Kernel {
    let mut builder = Builder::new(name, ROWS * LANES);
    let k = &mut builder;
    let parameters = Parameters::load(k);
    let parts = PartParameters::load(k);
    // Whether rows have limits matters no more, nor do their scores.
    let plain = Specialisation { left: false, right: false, key_lengths: false, ..specialisation };
    let work = Work::at(k, parameters, plain, ROWS, Place::Grid, Rows::OfHead);
    let thread = k.special(SpecialRegister::ThreadX);
    let (warp, lane) = (k.shr(thread, LANES.ilog2()), k.and(thread, LANES - 1));
    let row = k.add(work.first_row, warp);
    let exists = k.compare(Compare::Lt, row, work.row_count);
    k.if_uniform(exists, |k| {
        let number = work.row_of_all(k, row);
        let rows = OfRow { parts, number, value_dim: specialisation.value_dim };
        let maximum = k.section("maximum", |k| rows.maximum(k));
        let output = work.output(k);
        let output = output.row(k, warp);
        combine::<T>(k, &work, &rows, &Target { lane, row, output }, maximum);
    });
    builder.finish()
}

/// The parts of one row.
struct OfRow {
    parts: PartParameters,
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
        PartialRow::new(k, self.parts, part, self.number, self.value_dim)
    }

    /// The largest maximum of all parts: every lane reads all, which are the same for all of them.
    fn maximum(&self, k: &mut Builder) -> Reg<F32> {
        let maximum = k.copy(f32::NEG_INFINITY);
        k.for_uniform(0u32, self.parts.parts, 1u32, |k, part| {
            let partial = self.part(k, part);
            let other = k.load_one::<F32>(partial.sums);
            k.max_to(maximum, other);
        });
        maximum
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
    k.section("parts", |k| {
        k.for_uniform(0u32, rows.parts.parts, 1u32, |k, part| {
            let partial = rows.part(k, part);
            let sums = k.load::<F32>(partial.sums, 2);
            let exponent = k.sub(sums[0], shift);
            let factor = k.exp2(exponent);
            k.fma_to(sum, sums[1], factor);
            for (column, _, result) in &columns {
                let from = k.mad_wide(*column, 4u32, partial.output);
                let element = k.load_one::<F32>(GlobalAddress::from(from));
                k.fma_to(*result, element, factor);
            }
        });
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
        if work.specialisation.log_sum_exp {
            // In an empty row both terms are minus infinity, and so is their sum.
            let logarithm = k.log2(sum);
            let base_two = k.add(maximum, logarithm);
            let natural = k.mul(base_two, LN_2);
            let address = work.log_sum_exp(k, target.row);
            let first = k.compare(Compare::Eq, target.lane, 0u32);
            k.when(first, |k| k.store_one(address, natural));
        }
    });
}
