//! One thread a row, no tricks: the readable baseline.
//!
//! Each thread walks over the keys its row attends, one at a time, with the online softmax in three registers and
//! the output in as many as the head has dimensions. The query is read again for every key: with it, the output
//! would not fit into the registers of a thread.

use core::f32::consts::LN_2;

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Kernel, Reg, SpecialRegister};

use super::Work;
use crate::config::{ScalarConfig, Specialisation};
use crate::element::{ELEMENT_BYTES, Element};
use crate::tile::GlobalRows;

/// Writes the kernel.
pub(crate) fn kernel<T: Element>(name: String, config: ScalarConfig, specialisation: Specialisation) -> Kernel {
    let mut builder = Builder::new(name, config.threads);
    let k = &mut builder;
    let work = Work::new(k, config.threads);
    let thread = k.special(SpecialRegister::ThreadX);
    let row = k.add(work.first_row, thread);
    let (query, output) = (work.query(k), work.output(k));
    let (query, output) = (row_address(k, query, thread), row_address(k, output, thread));
    let (key, value) = (work.key(k), work.value(k));

    let exists = k.compare(Compare::Lt, row, work.parameters.query_length);
    k.if_then(exists, |k| {
        let limit = work.key_limit(k, row, specialisation.causal);
        let limit = k.reinterpret(limit);
        let maximum = k.copy(f32::NEG_INFINITY);
        let sum = k.copy(0.0f32);
        let result: Vec<_> = (0..specialisation.head_dim).map(|_| k.copy(0.0f32)).collect();

        k.for_lanes(0u32, limit, |k, index| {
            let score = k.section("score", |k| {
                let key = row_address(k, key, index);
                dot_product::<T>(k, query, key, specialisation.head_dim)
            });
            let (weight, factor) = k.section("softmax", |k| {
                let scaled = k.mul(score, work.parameters.scale_log2);
                let before = k.copy(maximum);
                k.max_to(maximum, scaled);
                let lost = k.sub(before, maximum);
                let factor = k.exp2(lost);
                let below = k.sub(scaled, maximum);
                let weight = k.exp2(below);
                k.scale_add_to(sum, factor, weight);
                (weight, factor)
            });
            k.section("accumulate", |k| {
                let value = row_address(k, value, index);
                for (pair, results) in result.chunks_exact(2).enumerate() {
                    for (result, element) in results.iter().zip(load_pair::<T>(k, value, pair as u32)) {
                        k.mul_to(*result, factor);
                        k.fma_to(*result, weight, element);
                    }
                }
            });
        });

        k.section("epilogue", |k| {
            let empty = k.compare(Compare::Eq, sum, 0.0f32);
            let inverse = k.reciprocal(sum);
            let inverse = k.select(empty, 0.0f32, inverse);
            for (pair, results) in result.chunks_exact(2).enumerate() {
                let [low, high] = [results[0], results[1]].map(|result| k.mul(result, inverse));
                let rounded = k.pair::<T>(low, high);
                k.store_one(pair_address(output, pair as u32), rounded);
            }
            if specialisation.log_sum_exp {
                let logarithm = k.log2(sum);
                let base_two = k.add(maximum, logarithm);
                let natural = k.mul(base_two, LN_2);
                let address = work.log_sum_exp(k, row);
                k.store_one(address, natural);
            }
        });
    });
    builder.finish()
}

fn row_address(k: &mut Builder, rows: GlobalRows, row: Reg<U32>) -> GlobalAddress {
    let row = k.widen(row);
    k.mad(row, rows.stride, rows.first).into()
}

fn pair_address(row: GlobalAddress, pair: u32) -> GlobalAddress {
    row.plus((pair * 2 * ELEMENT_BYTES) as i32)
}

fn load_pair<T: Element>(k: &mut Builder, row: GlobalAddress, pair: u32) -> [Reg<F32>; 2] {
    let pair = k.load_one::<T>(pair_address(row, pair));
    T::widen(k, pair)
}

/// A loop of the kernel, not of Rust: unrolled, its loads would all be started first and take the registers that the
/// output needs.
fn dot_product<T: Element>(k: &mut Builder, left: GlobalAddress, right: GlobalAddress, length: u32) -> Reg<F32> {
    let sum = k.copy(0.0f32);
    let pairs = length / 2;
    k.for_uniform(0u32, pairs, 1u32, |k, pair| {
        let [left, right] = [left, right].map(|row| {
            let row = k.mad_wide(pair, 2 * ELEMENT_BYTES, row.base());
            load_pair::<T>(k, row.into(), 0)
        });
        for (left, right) in left.into_iter().zip(right) {
            k.fma_to(sum, left, right);
        }
    });
    sum
}
