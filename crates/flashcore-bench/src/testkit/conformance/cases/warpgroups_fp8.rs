//! wgmma of 8-bit floats: every swizzle of its operands, A in registers, and sums that tell how many bits a GPU keeps.
//!
//! With small integers every sum is exact. With numbers over the whole range of the types, a sum is off by at most 36 units
//! of the last bit kept, 13 below the largest exponent on an H200; its bits go into a record, so that
//! `flashcore conformance --sums` tells how many there are.

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Fp8, Major, Swizzle, Type};

use super::warpgroups::{product_plan, write_product};
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

/// The exponent of the largest numbers.
const fn largest_exponent(ty: Fp8) -> i32 {
    match ty {
        Fp8::E4m3 => 8,
        Fp8::E5m2 => 15,
    }
}

fn product(form: &str, how: Form) -> ConformanceCase {
    let Form { columns, types, a, b, adds, fill } = how;
    let codes = types.map(|ty| if fill == Terms::SmallIntegers { Fill::SmallFp8(ty) } else { Fill::FiniteFp8(ty) });
    let start = match fill {
        Terms::SmallIntegers => Fill::SmallInteger,
        Terms::Wide => Fill::Wide,
        Terms::NoAccumulator => Fill::Among(&[0]),
    };
    let fills = [(Type::U32, codes[0]), (Type::U32, codes[1]), (Type::F32, start)];
    let mut plan = product_plan("WgmmaFp8", form, columns, fills);
    if fill != Terms::SmallIntegers {
        let exponent: i32 = types.map(largest_exponent).iter().sum();
        let absolute = 36.0 * 2f64.powi(exponent - 13);
        plan.tolerance = Tolerance::Within { relative: 0.0, absolute };
    }
    let k_major = |swizzle| (Major::Depth, swizzle);
    write_product::<U32, F32>(plan, columns, (a.map(k_major), k_major(b), adds), |k, sums, left, right, adds| {
        k.wgmma_fp8(types, columns, sums, left, right, adds);
    })
}
