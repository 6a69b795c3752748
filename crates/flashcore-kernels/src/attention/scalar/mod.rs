//! Scalar kernel: one thread a row, the readable baseline, and the kernel for `f32`, whose accuracy tensor cores lack.
//!
//! Each thread walks over the keys its row attends, one at a time, with the online softmax in three registers and a
//! block of the output's columns in as many as there are. More columns are more walks. The query is read again for every
//! key: with it, the output would not fit into the registers of a thread.

pub(crate) mod config;

use flashcore_ir::types::{Bf16, F16, F32, S32, Storable, U16, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, Reg, SpecialRegister};
use flashcore_problem::Operand;

use crate::attention::TileContext;
use crate::attention::kv_source::KvSource;
use crate::config::ScalarConfig;
use crate::primitives::{ExpressionCode, GlobalRows, ScoreTerms, lse_exact, normalize_row};
use crate::specialization::Specialization;

/// Columns of the output that a thread has at a time.
const COLUMNS_PER_WALK: u32 = 64;

/// Lazy rescale: how far, in base 2, a score may exceed a stale row max. A row max that rises with every key, as under
/// `ALiBi`, would multiply the output by an approximate power each time, and the errors of 161 such powers, all the same,
/// were measured to be more than `f32` can bear.
const RESCALE_THRESHOLD: f32 = 16.0;

/// Keys of a partial sum where results are to have all bits of an `f32`: where many weights are the same, a sum is rounded
/// to the same side with each, and 449 keys were measured to be too many.
const KEYS_PER_SUM: u32 = 16;

/// The sums over the keys before those of the current partial sum.
struct EarlierSums {
    row_sum: Reg<F32>,
    result: Vec<Reg<F32>>,
}

impl EarlierSums {
    fn new(k: &mut Builder, columns: u32) -> Self {
        Self { row_sum: k.copy(0.0f32), result: (0..columns).map(|_| k.copy(0.0f32)).collect() }
    }

    fn scale(&self, k: &mut Builder, factor: Reg<F32>) {
        for sum in self.result.iter().chain([&self.row_sum]) {
            k.mul_to(*sum, factor);
        }
    }

    /// Takes over a partial sum, which begins at zero again.
    fn take(&self, k: &mut Builder, row_sum: Reg<F32>, result: &[Reg<F32>]) {
        for (before, now) in self.result.iter().zip(result).chain([(&self.row_sum, &row_sum)]) {
            k.add_to(*before, *now);
            k.set(*now, 0.0f32);
        }
    }

    /// Adds the earlier sums to the last one.
    fn give(&self, k: &mut Builder, row_sum: Reg<F32>, result: &[Reg<F32>]) {
        for (before, now) in self.result.iter().zip(result).chain([(&self.row_sum, &row_sum)]) {
            k.add_to(*now, *before);
        }
    }
}

/// Element type in memory, one element at a time.
pub(crate) trait MemoryElement: Storable {
    /// True if results are to have all bits of an `f32`.
    const IS_EXACT: bool = false;

    /// The element as `f32`, exactly.
    fn widen(k: &mut Builder, element: Reg<Self>) -> Reg<F32>;
    /// An `f32` rounded to nearest even.
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
    /// Shifts the bits: a `bf16` is the upper half of an `f32`; the conversion instruction is younger than the architecture.
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
    let context = TileContext::of_grid(k, specialization, config.threads);
    let thread = k.special(SpecialRegister::ThreadX);
    let row = k.add(context.first_row, thread);
    let exists = k.compare(Compare::Lt, row, context.end_row);
    let thread_row = ThreadRow::new(k, &context, row, thread);
    k.if_then(exists, |k| {
        // Exact sums take the registers of as many columns again.
        let most = if T::IS_EXACT { COLUMNS_PER_WALK / 2 } else { COLUMNS_PER_WALK };
        for first in (0..specialization.value_dim).step_by(most as usize) {
            let columns = most.min(specialization.value_dim - first);
            thread_row.walk::<T>(k, &context, first, columns);
        }
    });
    builder.finish()
}

/// The row of a thread, and its operands.
struct ThreadRow {
    row: Reg<U32>,
    query: GlobalAddress,
    output: GlobalAddress,
    source: KvSource,
    /// The keys it attends.
    first_key: Reg<U32>,
    end_key: Reg<U32>,
    position: Reg<S32>,
    terms: ScoreTerms,
    mask_mod: Option<ExpressionCode>,
}

impl ThreadRow {
    fn new(k: &mut Builder, context: &TileContext, row: Reg<U32>, thread: Reg<U32>) -> Self {
        let (query, output) = (context.query(k), context.output(k));
        let (first, end) = (context.first_key(k, row), context.end_key(k, row));
        Self {
            row,
            query: row_address(k, query, thread),
            output: row_address(k, output, thread),
            source: KvSource::new(k, context),
            first_key: k.reinterpret(first),
            end_key: k.reinterpret(end),
            position: context.position(k, row),
            terms: context.score_terms(k, row, 1),
            mask_mod: context.mask_mod(k, row, 1),
        }
    }

    /// Computes `columns` columns of the output, from column `first` on.
    fn walk<T: MemoryElement>(&self, k: &mut Builder, context: &TileContext, first: u32, columns: u32) {
        // The largest score, or one that is not much smaller.
        let row_max = k.copy(f32::NEG_INFINITY);
        let row_sum = k.copy(0.0f32);
        let result: Vec<_> = (0..columns).map(|_| k.copy(0.0f32)).collect();
        let earlier = T::IS_EXACT.then(|| EarlierSums::new(k, columns));
        k.for_lanes(self.first_key, self.end_key, |k, key| {
            let score = k.section("score", |k| self.score::<T>(k, context.specialization.head_dim, key));
            let (weight, factor) = k.section("softmax", |k| {
                let raises = k.eval(score.gt(row_max + RESCALE_THRESHOLD));
                let before = k.copy(row_max);
                k.set_where(row_max, raises, score);
                // Before the first score that is not minus infinity there is no row max, and no weight.
                let none = k.compare(Compare::Eq, row_max, f32::NEG_INFINITY);
                let shift = k.select(none, 0.0f32, row_max);
                let lost = k.sub(before, shift);
                let factor = k.exp2(lost);
                let factor = k.select(raises, factor, 1.0f32);
                let below = k.sub(score, shift);
                let weight = k.exp2(below);
                k.scale_add_to(row_sum, factor, weight);
                if let Some(earlier) = &earlier {
                    k.if_then(raises, |k| earlier.scale(k, factor));
                }
                (weight, factor)
            });
            k.section("accumulate", |k| {
                let value = row_address(k, self.source.value, key);
                for (column, result) in (first..).zip(&result) {
                    let element = load::<T>(k, value, column);
                    k.mul_to(*result, factor);
                    k.fma_to(*result, weight, element);
                }
            });
            if let Some(earlier) = &earlier {
                let is_last = k.eval(((key - self.first_key) & (KEYS_PER_SUM - 1)).eq(KEYS_PER_SUM - 1));
                k.if_then(is_last, |k| earlier.take(k, row_sum, &result));
            }
        });
        if let Some(earlier) = &earlier {
            earlier.give(k, row_sum, &result);
        }
        k.section("epilogue", |k| {
            let sink = context.sink(k);
            let form = context.specialization.lse_form;
            let lse_of_keys = (!form.includes_sink && first == 0).then(|| lse_exact(k, row_max, row_sum, form.base));
            let (row_max, inverse) = normalize_row(k, row_max, row_sum, sink);
            for (column, result) in (first..).zip(&result) {
                let scaled = k.mul(*result, inverse);
                let rounded = T::round(k, scaled);
                k.store_one(element_address::<T>(self.output, column), rounded);
            }
            if context.specialization.has(Operand::Lse) && first == 0 {
                let lse = lse_of_keys.unwrap_or_else(|| lse_exact(k, row_max, row_sum, form.base));
                let address = context.lse_address(k, self.row);
                k.store_one(address, lse);
            }
        });
    }

    /// The score of one key in base 2.
    fn score<T: MemoryElement>(&self, k: &mut Builder, head_dim: u32, key: Reg<U32>) -> Reg<F32> {
        let key_row = row_address(k, self.source.key, key);
        let product = dot_product::<T>(k, self.query, key_row, head_dim);
        let distance = self.terms.slope.map(|_| {
            let distance = k.eval(self.position - key.signed());
            k.to_f32(distance)
        });
        let bias = self.terms.bias.map(|bias| {
            let row = k.eval(self.row.widen().mul_add(bias.row_stride, bias.first));
            let address = k.eval(key.widen().mul_add(bias.key_stride, row));
            k.load_one::<F32>(address)
        });
        let score = self.terms.score(k, product, distance, bias);
        let key = k.reinterpret::<U32, S32>(key);
        modified_score(k, &self.terms, self.mask_mod.as_ref(), score, key)
    }
}

/// A score of the lane's only row after `score_mod` and `mask_mod`.
pub(crate) fn modified_score(
    k: &mut Builder,
    terms: &ScoreTerms,
    mask_mod: Option<&ExpressionCode>,
    mut score: Reg<F32>,
    key: Reg<S32>,
) -> Reg<F32> {
    if let Some(expression) = &terms.expression {
        score = k.section("expression", |k| expression.block(key).score(k, 0, 0, score));
    }
    if let Some(expression) = mask_mod {
        k.section("expression", |k| {
            let attended = expression.block(key).attended(k, 0, 0);
            score = k.select(attended, score, f32::NEG_INFINITY);
        });
    }
    score
}

fn row_address(k: &mut Builder, rows: GlobalRows, row: Reg<U32>) -> GlobalAddress {
    rows.row(k, row).into()
}

fn element_address<T: MemoryElement>(row: GlobalAddress, column: u32) -> GlobalAddress {
    row.plus((column * T::TYPE.bytes()) as i32)
}

fn load<T: MemoryElement>(k: &mut Builder, row: GlobalAddress, column: u32) -> Reg<F32> {
    let element = k.load_one::<T>(element_address::<T>(row, column));
    T::widen(k, element)
}

/// The dot product of two rows, by a loop of the kernel, not of Rust: unrolled, its loads would all be started first and take the registers that the
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
