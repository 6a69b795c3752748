//! wgmma of 8-bit floats: every swizzle of its operands, A in registers, and sums that tell how many bits a GPU keeps.
//!
//! With small integers every sum is exact. With numbers over the whole range of the types, a sum is off by at most 36 units
//! of the last bit kept, 13 below the largest exponent on an H200; its bits go into a record, so that
//! `flashcore conformance --sums` tells how many there are.

use flashcore_ir::builder::{Adds, LeftMatrix, MatrixLayout, SharedMatrix};
use flashcore_ir::types::{F32, U32, U64};
use flashcore_ir::{Compare, Fp8, GlobalAddress, Major, Reg, SpecialRegister, Swizzle, Type};

use super::warpgroups::{THREADS, shared_base};
use crate::testkit::conformance::built::Plan;
use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::inputs::Fill;

#[derive(Clone, Copy)]
struct Form {
    columns: u32,
    types: [Fp8; 2],
    /// The swizzle of A in shared memory; none for registers.
    a: Option<Swizzle>,
    b: Swizzle,
    /// True if the product is added; none for a predicate.
    adds: Option<bool>,
    fill: Terms,
}

/// Contents of the operands.
#[derive(Clone, Copy, PartialEq)]
enum Terms {
    SmallIntegers,
    /// All finite numbers, and an accumulator of their size.
    Wide,
    /// All finite numbers, and zero.
    NoAccumulator,
}

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    let plain = Form {
        columns: 64,
        types: [Fp8::E4m3; 2],
        a: Some(Swizzle::Bytes128),
        b: Swizzle::Bytes128,
        adds: Some(true),
        fill: Terms::SmallIntegers,
    };
    for swizzle in Swizzle::ALL {
        list.push(product(&format!("A {swizzle}"), Form { a: Some(*swizzle), ..plain }));
        list.push(product(&format!("B {swizzle}"), Form { b: *swizzle, a: None, columns: 128, ..plain }));
    }
    for columns in [8, 24, 96, 176, 256] {
        list.push(product(&format!("{columns} columns"), Form { columns, ..plain }));
    }
    list.push(product("that replaces", Form { adds: Some(false), ..plain }));
    list.push(product("that may add", Form { adds: None, a: None, ..plain }));
    for (left, right) in Fp8::ALL.iter().flat_map(|left| Fp8::ALL.iter().map(move |right| (*left, *right))) {
        let form = Form { types: [left, right], a: None, columns: 32, ..plain };
        list.push(product(&format!("{left} by {right}, small integers"), form));
        list.push(product(&format!("{left} by {right}, wide"), Form { fill: Terms::Wide, ..form }));
        let form = Form { fill: Terms::NoAccumulator, a: plain.a, ..form };
        list.push(product(&format!("{left} by {right}, no accumulator"), form));
    }
}

fn layout(swizzle: Swizzle) -> MatrixLayout {
    let (leading_bytes, stride_bytes) = swizzle.bytes().map_or((128, 256), |width| (0, 8 * width));
    MatrixLayout { swizzle, leading_bytes, stride_bytes }
}

/// The exponent of the largest numbers.
const fn largest_exponent(ty: Fp8) -> i32 {
    match ty {
        Fp8::E4m3 => 8,
        Fp8::E5m2 => 15,
    }
}

fn product(form: &str, how: Form) -> ConformanceCase {
    let Form { columns, types, a, b, adds, fill } = how;
    let [a_bytes, b_bytes] = [64 * 128, columns * 128];
    let count = columns / 2;
    let codes = types.map(|ty| if fill == Terms::SmallIntegers { Fill::SmallFp8(ty) } else { Fill::FiniteFp8(ty) });
    let start = match fill {
        Terms::SmallIntegers => Fill::SmallInteger,
        Terms::Wide => Fill::Wide,
        Terms::NoAccumulator => Fill::Among(&[0]),
    };
    let mut plan = Plan::new("WgmmaFp8", form, THREADS)
        .input("a", Type::U32, a_bytes / 4, codes[0])
        .input("b", Type::U32, b_bytes / 4, codes[1])
        .input("c", Type::F32, THREADS * count, start)
        .output("d", Type::F32, THREADS * count);
    if fill != Terms::SmallIntegers {
        let exponent: i32 = types.map(largest_exponent).iter().sum();
        let absolute = 36.0 * 2f64.powi(exponent - 13);
        plan.tolerance = Tolerance::Within { relative: 0.0, absolute };
    }
    plan.case(|k, inputs, outputs| {
        let [a_at, b_at] = [a_bytes, b_bytes].map(|bytes| k.reserve_shared(bytes, 1024));
        let barrier = k.reserve_mbarrier();
        let base = shared_base(k);
        let [a_at, b_at, barrier] = [a_at, b_at, barrier].map(|offset| k.add(base, offset));
        let thread = k.special(SpecialRegister::ThreadX);
        let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
        k.when(first, |k| {
            k.mbarrier_init(barrier, 1u32);
            k.fence_mbarrier_init();
        });
        k.cta_sync();
        k.if_then(first, |k| {
            k.mbarrier_arrive_expect(barrier, a_bytes + b_bytes);
            k.bulk_load(a_at, inputs[0], a_bytes, barrier);
            k.bulk_load(b_at, inputs[1], b_bytes, barrier);
        });
        k.mbarrier_wait(barrier, 0u32);
        let own = k.mul_wide(thread, 4 * count);
        let (from, to) = (k.add(inputs[2], own), k.add(outputs[0], own));
        let address = |base: Reg<U64>, index: usize| GlobalAddress::from(base).plus(4 * index as i32);
        let sums: Vec<Reg<F32>> = (0..count as usize).map(|index| k.load_one(address(from, index))).collect();
        let right = SharedMatrix { descriptor: k.matrix_descriptor(b_at, layout(b)), major: Major::Depth };
        // Whatever lies there is a fragment.
        let slot = k.mad::<U32>(thread, 16u32, a_at);
        let fragment: Vec<Reg<U32>> = k.load_shared(slot, 4);
        let left = match a {
            None => LeftMatrix::Registers(&fragment),
            Some(swizzle) => {
                let descriptor = k.matrix_descriptor(a_at, layout(swizzle));
                LeftMatrix::Shared(SharedMatrix { descriptor, major: Major::Depth })
            }
        };
        let adds = match adds {
            Some(true) => Adds::Add,
            Some(false) => Adds::Replace,
            None => Adds::Where(k.compare::<U32>(Compare::Eq, thread, thread)),
        };
        k.wgmma_fence();
        k.wgmma_fp8(types, columns, &sums, left, right, adds);
        k.wgmma_commit();
        k.wgmma_wait(0);
        for (index, sum) in sums.iter().enumerate() {
            k.store_one(address(to, index), *sum);
        }
    })
}
