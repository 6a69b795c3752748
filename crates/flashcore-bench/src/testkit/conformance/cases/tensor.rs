//! Tensor cores: `ldmatrix`, which moves bits, and `mma`, whose sums are not defined exactly.
//!
//! What hardware does (measured by Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores",
//! 2021, and others since; PTX promises only "at least single precision" and leaves the order open): products are
//! exact; products and accumulator are shifted to the exponent of the largest of them and cut off, not rounded, at one
//! or more bits below the 24 of `f32`; they are added exactly; the sum is cut off to the accumulator's type, or for
//! `f16` rounded to nearest. A shape deeper than the unit takes two such steps.
//!
//! The bound in units of 2^-24 of `sum |a·b| + |c|`, which is no less than the largest term: each of `depth + 1` terms
//! loses less than 1 when it is cut off, the cut of the sum less than 2 in each of at most two steps, and the simulator,
//! which adds in `f64` and rounds once, is off by at most 1/2; so `depth + 6` is never exceeded. For sums in `f16` the
//! roundings dominate: 2^-11 for each of at most two steps and for the simulator.

use flashcore_ir::{Arch, Fp8, MmaShape, Op, RegisterId, Space, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::elementwise::{Form, any};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::products::Products;
use crate::testkit::conformance::writer::{THREADS, Writer, at, register};

const CTAS: u32 = 8;
/// Half a unit in the last place of `f32` and of `f16`.
const SINGLE: f64 = f64::from_bits((1023 - 24) << 52);
const HALF: f64 = f64::from_bits((1023 - 11) << 52);
/// The least numbers of `f32` and `f16`: sums among the subnormals lose bits whatever their terms are.
const LEAST_SINGLE: f64 = f64::from_bits((1023 - 149) << 52);
const LEAST_HALF: f64 = f64::from_bits((1023 - 24) << 52);

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for count in [1, 2, 4] {
        for transposed in [false, true] {
            for ty in Type::ALL {
                let case = load_matrix(count, transposed, ty);
                if case.verified(Arch::Sm120).is_ok() {
                    list.push(case);
                }
            }
        }
    }
    for shape in MmaShape::ALL {
        for operand in [Type::F16x2, Type::Bf16x2, Type::Tf32] {
            for accumulate in [Type::F32, Type::F16x2] {
                multiply(list, Products { shape: *shape, operand, accumulate, fp8: None });
            }
        }
    }
    for left in Fp8::ALL {
        for right in Fp8::ALL {
            multiply_fp8(list, *left, *right);
        }
    }
}

/// Products of 8-bit floats. Where tensor cores multiply them as such, they keep fewer bits of their sums than of others, 13
/// as others report; the results themselves go into a record, which tells how many (`flashcore conformance --sums`).
fn multiply_fp8(list: &mut Vec<ConformanceCase>, left: Fp8, right: Fp8) {
    /// The last bit kept, at worst: of 33 terms and of the sum.
    const KEPT: f64 = f64::from_bits((1023 - 13) << 52);
    let shape = MmaShape::M16N8K32;
    let products = Products { shape, operand: Type::U32, accumulate: Type::F32, fp8: Some([left, right]) };
    let sum = Tolerance::Sum { products, relative: 36.0 * KEPT, absolute: LEAST_SINGLE };
    let [a, b, c] = products.registers();
    let op = Op::MmaFp8 { left, right, d: any(c), a: any(a), b: any(b), c: any(c) };
    let finite = [Fill::FiniteFp8(left), Fill::FiniteFp8(right)];
    for (name, [a, b], c, tolerance) in [
        ("wide", finite, Fill::Wide, sum),
        ("no accumulator", finite, Fill::Among(&[0]), sum),
        ("small integers", [Fill::SmallFp8(left), Fill::SmallFp8(right)], Fill::SmallInteger, Tolerance::Exact),
        ("any bits", [Fill::Bits; 2], Fill::Normal, sum),
    ] {
        let form = Form {
            modifiers: format!("{left} by {right}, {name}"),
            tolerance,
            fill: &|operand| match operand {
                "a" => Some(a),
                "b" => Some(b),
                "c" => Some(c),
                _ => None,
            },
            launch: (THREADS, CTAS),
            op: op.clone(),
        };
        list.push(form.case());
    }
}

/// A tile of 32 rows for each warp, of which each lane points at any one.
fn load_matrix(count: u32, transposed: bool, ty: Type) -> ConformanceCase {
    const ROW_BYTES: u32 = 16;
    let how = if transposed { " transposed" } else { "" };
    let mut writer = Writer::with_launch(format!("LoadMatrix x{count}{how} {ty}"), THREADS, [CTAS, 1, 1]);
    let tile = writer.input_address("tile", Type::U32, writer.count() * 4, Fill::Bits);
    let row = writer.input("row", Type::U32, Fill::Below(32));
    let source = writer.element(tile, writer.thread, ROW_BYTES);
    let slot = writer.shared_slots(ROW_BYTES);
    let words = writer.load_many(Space::Global, Type::U32, 4, at(source, 0));
    writer.store_many(Space::Shared, Type::U32, words, at(slot, 0));
    writer.push(Op::WarpSync {});
    // The row of the warp's tile: the slot of the lane of that number.
    let lane_bits = writer.mask(writer.local, 31);
    let first = writer.register(Type::U32);
    writer.push(Op::Sub { ty: Type::U32, d: first, a: register(row), b: register(lane_bits) });
    let address = writer.mad(first, ROW_BYTES, slot);
    let d: Vec<RegisterId> = (0..count).map(|_| writer.register(ty)).collect();
    writer.push(Op::LoadMatrix { count, transposed, ty, d: d.clone(), source: at(address, 0) });
    for (index, d) in d.into_iter().enumerate() {
        writer.output(&format!("d{index}"), ty, d);
    }
    writer.finish("LoadMatrix", Tolerance::Bits)
}

fn multiply(list: &mut Vec<ConformanceCase>, products: Products) {
    let Products { shape, operand, accumulate, .. } = products;
    let depth = f64::from(shape.depth());
    let sum_error = (depth + 6.0) * SINGLE;
    let tolerance = match accumulate {
        Type::F16x2 => Tolerance::Sum { products, relative: 3.0 * HALF + sum_error, absolute: LEAST_HALF },
        _ => Tolerance::Sum { products, relative: sum_error, absolute: LEAST_SINGLE },
    };
    let [a, b, c] = products.registers();
    let op = Op::Mma { shape, operand, accumulate, d: any(c), a: any(a), b: any(b), c: any(c) };
    for (name, fills) in [
        ("normal", [Fill::Normal; 3]),
        ("wide", [Fill::Wide; 3]),
        ("small integers", [Fill::SmallInteger; 3]),
        ("tiny", [Fill::Tiny; 3]),
        ("tiny times normal", [Fill::Tiny, Fill::Normal, Fill::Tiny]),
        ("exceptional", [Fill::Exceptional; 3]),
    ] {
        // Products of numbers to 2^13 leave the range of f16, where each machine overflows in its own way.
        if accumulate == Type::F16x2 && name == "wide" {
            continue;
        }
        // Small integers are summed exactly, whatever the order: there machines must agree to the bit.
        let exact = name == "small integers";
        let form = Form {
            modifiers: format!("{shape} {operand} in {accumulate}, {name}"),
            tolerance: if exact { Tolerance::Exact } else { tolerance },
            fill: &|operand| ["a", "b", "c"].iter().position(|name| *name == operand).map(|index| fills[index]),
            launch: (THREADS, CTAS),
            op: op.clone(),
        };
        let case = form.case();
        if case.verified(Arch::Sm120).is_ok() {
            list.push(case);
        }
    }
}
