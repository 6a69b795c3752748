//! One thread a row, no tricks: the readable baseline, and the kernel for `f32`, whose accuracy tensor cores lack.
//!
//! Each thread walks over the keys its row attends, one at a time, with the online softmax in three registers and a
//! block of the output's columns in as many as there are. More columns are more walks. The query is read again for every
//! key: with it, the output would not fit into the registers of a thread.

use flashcore_ir::types::{Bf16, F16, F32, S32, Storable, U16, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, Reg, SpecialRegister};
use flashcore_problem::Operand;

use super::Work;
use crate::config::ScalarConfig;
use crate::specialization::Specialization;
use crate::tile::{ExpressionCode, GlobalRows, ScoreTerms, add_sink, lse};

/// Columns of the output that a thread has at a time.
const COLUMNS_PER_WALK: u32 = 64;

/// How far, in base 2, a score may be above the maximum before that is raised. A maximum that rises with every key, as
/// under `ALiBi`, would multiply the output by an approximate power each time, and the errors of 161 such powers, all the
/// same, were measured to be more than `f32` can bear.
const MOST_BEYOND_MAXIMUM: f32 = 16.0;

/// Keys that are added up on their own where results are to have all bits of an `f32`: where many weights are the same, a
/// sum is rounded to the same side with each, and 449 keys were measured to be too many.
const KEYS_AT_A_TIME: u32 = 16;

/// The sums over the keys before those that are being added up.
struct SumsBefore {
    sum: Reg<F32>,
    result: Vec<Reg<F32>>,
}

impl SumsBefore {
    fn new(k: &mut Builder, columns: u32) -> Self {
        Self { sum: k.copy(0.0f32), result: (0..columns).map(|_| k.copy(0.0f32)).collect() }
    }

    fn scale(&self, k: &mut Builder, factor: Reg<F32>) {
        for sum in self.result.iter().chain([&self.sum]) {
            k.mul_to(*sum, factor);
        }
    }

    /// Takes sums over, which begin at zero again.
    fn take(&self, k: &mut Builder, sum: Reg<F32>, result: &[Reg<F32>]) {
        for (before, now) in self.result.iter().zip(result).chain([(&self.sum, &sum)]) {
            k.add_to(*before, *now);
            k.set(*now, 0.0f32);
        }
    }

    fn give(&self, k: &mut Builder, sum: Reg<F32>, result: &[Reg<F32>]) {
        for (before, now) in self.result.iter().zip(result).chain([(&self.sum, &sum)]) {
            k.add_to(*now, *before);
        }
    }
}

/// A type that memory holds, one element at a time.
pub(crate) trait MemoryElement: Storable {
    /// Whether results are to have all bits of an `f32`.
    const IS_EXACT: bool = false;

    /// As `f32`, exactly.
    fn widen(k: &mut Builder, element: Reg<Self>) -> Reg<F32>;
    /// From `f32`, rounded to nearest even.
    fn round(k: &mut Builder, value: Reg<F32>) -> Reg<Self>;
}

impl MemoryElement for F16 {
    fn widen(k: &mut Builder, element: Reg<Self>) -> Reg<F32> {
        k.f16_to_f32(element)
    }

    fn round(k: &mut Builder, value: Reg<F32>) -> Reg<Self> {
        k.f32_to_f16(value)
    }
}

impl MemoryElement for Bf16 {
    /// A `bf16` is the upper half of an `f32`; the conversion instruction is younger than the architecture.
    fn widen(k: &mut Builder, element: Reg<Self>) -> Reg<F32> {
        let bits = k.reinterpret::<Self, U16>(element);
        let bits = k.widen_half(bits);
        let bits = k.shl(bits, 16u32);
        k.reinterpret(bits)
    }

    fn round(k: &mut Builder, value: Reg<F32>) -> Reg<Self> {
        k.f32_to_bf16(value)
    }
}

impl MemoryElement for F32 {
    const IS_EXACT: bool = true;

    fn widen(_: &mut Builder, element: Reg<Self>) -> Reg<F32> {
        element
    }

    fn round(_: &mut Builder, value: Reg<F32>) -> Reg<Self> {
        value
    }
}

/// Writes the kernel.
pub(crate) fn kernel<T: MemoryElement>(name: String, config: ScalarConfig, specialization: Specialization) -> Kernel {
    let mut builder = Builder::new(name, config.threads);
    let k = &mut builder;
    let work = Work::new(k, specialization, config.threads);
    let thread = k.special(SpecialRegister::ThreadX);
    let row = k.add(work.first_row, thread);
    let exists = k.compare(Compare::Lt, row, work.parameters.query_length);
    let thread_row = ThreadRow::new(k, &work, row, thread);
    k.if_then(exists, |k| {
        // Exact sums take the registers of as many columns again.
        let most = if T::IS_EXACT { COLUMNS_PER_WALK / 2 } else { COLUMNS_PER_WALK };
        for first in (0..specialization.value_dim).step_by(most as usize) {
            let columns = most.min(specialization.value_dim - first);
            thread_row.walk::<T>(k, &work, first, columns);
        }
    });
    builder.finish()
}

/// The row of a thread.
struct ThreadRow {
    row: Reg<U32>,
    query: GlobalAddress,
    output: GlobalAddress,
    key: GlobalRows,
    value: GlobalRows,
    /// The keys it attends.
    first_key: Reg<U32>,
    end_key: Reg<U32>,
    position: Reg<S32>,
    terms: ScoreTerms,
    mask: Option<ExpressionCode>,
}

impl ThreadRow {
    fn new(k: &mut Builder, work: &Work, row: Reg<U32>, thread: Reg<U32>) -> Self {
        let (query, output) = (work.query(k), work.output(k));
        let (first, end) = (work.first_key(k, row), work.end_key(k, row));
        Self {
            row,
            query: row_address(k, query, thread),
            output: row_address(k, output, thread),
            key: work.key(k),
            value: work.value(k),
            first_key: k.reinterpret(first),
            end_key: k.reinterpret(end),
            position: work.position(k, row),
            terms: work.score_terms(k, row, 1),
            mask: work.mask_expression(k, row, 1),
        }
    }

    /// Computes `columns` columns of the output, from column `first` on.
    fn walk<T: MemoryElement>(&self, k: &mut Builder, work: &Work, first: u32, columns: u32) {
        // What weights are relative to: the largest score, or one that is not much smaller.
        let maximum = k.copy(f32::NEG_INFINITY);
        let sum = k.copy(0.0f32);
        let result: Vec<_> = (0..columns).map(|_| k.copy(0.0f32)).collect();
        let sums_before = T::IS_EXACT.then(|| SumsBefore::new(k, columns));
        k.for_lanes(self.first_key, self.end_key, |k, key| {
            let score = k.section("score", |k| self.score::<T>(k, work.specialization.head_dim, key));
            let (weight, factor) = k.section("softmax", |k| {
                let limit = k.add(maximum, MOST_BEYOND_MAXIMUM);
                let raises = k.compare(Compare::Gt, score, limit);
                let before = k.copy(maximum);
                k.set_where(maximum, raises, score);
                // Before the first score that is not minus infinity there is no maximum, and no weight.
                let none = k.compare(Compare::Eq, maximum, f32::NEG_INFINITY);
                let shift = k.select(none, 0.0f32, maximum);
                let lost = k.sub(before, shift);
                let factor = k.exp2(lost);
                let factor = k.select(raises, factor, 1.0f32);
                let below = k.sub(score, shift);
                let weight = k.exp2(below);
                k.scale_add_to(sum, factor, weight);
                if let Some(before) = &sums_before {
                    k.if_then(raises, |k| before.scale(k, factor));
                }
                (weight, factor)
            });
            k.section("accumulate", |k| {
                let value = row_address(k, self.value, key);
                for (column, result) in (first..).zip(&result) {
                    let element = load::<T>(k, value, column);
                    k.mul_to(*result, factor);
                    k.fma_to(*result, weight, element);
                }
            });
            if let Some(before) = &sums_before {
                let number = k.sub(key, self.first_key);
                let within = k.and(number, KEYS_AT_A_TIME - 1);
                let is_last = k.compare(Compare::Eq, within, KEYS_AT_A_TIME - 1);
                k.if_then(is_last, |k| before.take(k, sum, &result));
            }
        });
        if let Some(before) = &sums_before {
            before.give(k, sum, &result);
        }
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
            for (column, result) in (first..).zip(&result) {
                let scaled = k.mul(*result, inverse);
                let rounded = T::round(k, scaled);
                k.store_one(element_address::<T>(self.output, column), rounded);
            }
            if work.specialization.has(Operand::Lse) && first == 0 {
                let natural = lse(k, maximum, sum);
                let address = work.lse(k, self.row);
                k.store_one(address, natural);
            }
        });
    }

    /// The score of one key in base 2.
    fn score<T: MemoryElement>(&self, k: &mut Builder, head_dim: u32, key: Reg<U32>) -> Reg<F32> {
        let key_row = row_address(k, self.key, key);
        let product = dot_product::<T>(k, self.query, key_row, head_dim);
        let distance = self.terms.slope.map(|_| {
            let key = k.reinterpret::<U32, S32>(key);
            let distance = k.sub(self.position, key);
            k.to_f32(distance)
        });
        let bias = self.terms.bias.map(|bias| {
            let row = k.widen(self.row);
            let row = k.mad(row, bias.row_stride, bias.first);
            let key = k.widen(key);
            let address = k.mad(key, bias.key_stride, row);
            k.load_one::<F32>(address)
        });
        let score = self.terms.score(k, product, distance, bias);
        let key = k.reinterpret::<U32, S32>(key);
        modified(k, &self.terms, self.mask.as_ref(), score, key)
    }
}

/// What expressions make of a score of the lane's only row.
pub(super) fn modified(
    k: &mut Builder,
    terms: &ScoreTerms,
    mask: Option<&ExpressionCode>,
    mut score: Reg<F32>,
    key: Reg<S32>,
) -> Reg<F32> {
    if let Some(expression) = &terms.expression {
        score = k.section("expression", |k| expression.of_tile(key).score(k, 0, 0, score));
    }
    if let Some(expression) = mask {
        k.section("expression", |k| {
            let attended = expression.of_tile(key).attended(k, 0, 0);
            score = k.select(attended, score, f32::NEG_INFINITY);
        });
    }
    score
}

fn row_address(k: &mut Builder, rows: GlobalRows, row: Reg<U32>) -> GlobalAddress {
    let row = k.widen(row);
    k.mad(row, rows.stride, rows.first).into()
}

fn element_address<T: MemoryElement>(row: GlobalAddress, column: u32) -> GlobalAddress {
    row.plus((column * T::TYPE.bytes()) as i32)
}

fn load<T: MemoryElement>(k: &mut Builder, row: GlobalAddress, column: u32) -> Reg<F32> {
    let element = k.load_one::<T>(element_address::<T>(row, column));
    T::widen(k, element)
}

/// A loop of the kernel, not of Rust: unrolled, its loads would all be started first and take the registers that the
/// output needs.
fn dot_product<T: MemoryElement>(k: &mut Builder, left: GlobalAddress, right: GlobalAddress, length: u32) -> Reg<F32> {
    let sum = k.copy(0.0f32);
    k.for_uniform(0u32, length, 1u32, |k, column| {
        let [left, right] = [left, right].map(|row| {
            let address = k.mad_wide(column, T::TYPE.bytes(), row.base());
            load::<T>(k, address.into(), 0)
        });
        k.fma_to(sum, left, right);
    });
    sum
}
