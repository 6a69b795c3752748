//! Values of operations that the record of a GPU does not decide: those that PTX bounds and the simulator rounds correctly, and
//! sums of tensor cores of other architectures.
//!
//! Every other value is compared with what an H200 gave, bit by bit: `cargo test -p flashcore-bench --test testkit
//! conformance` replays its record.

use crate::support::{run, run_with, words};
use flashcore_ir::types::{Bf16x2, F16x2, F32, Storable, U32, U64};
use flashcore_ir::{Arch, Builder, Fp8, Reg};
use flashcore_sim::{Argument, GlobalMemory, Options, TensorSum};

/// Compares the bits of a function of one input.
#[track_caller]
fn check<T: Storable>(build: impl Fn(&mut Builder, Reg<T>) -> Reg<T>, rows: &[(u32, u32)]) {
    for &(input, expected) in rows {
        let kernel = crate::support::kernel(32, |k| {
            let y = k.parameter::<U64>("y");
            let input = k.copy(input);
            let input = k.reinterpret::<U32, T>(input);
            let result = build(k, input);
            let lane = k.lane();
            let own = k.mad_wide(lane, 4u32, y);
            k.store_one(own, result);
        });
        let mut memory = GlobalMemory::new();
        let y = memory.allocate_uninitialised("y", 128);
        run(&kernel, &[Argument::U64(y)], &memory).unwrap_or_else(|error| panic!("{error}"));
        let actual = words(&memory.read(y));
        assert_eq!(actual, [expected; 32], "{input:#x} gives {:#x}, expected {expected:#x}", actual[0]);
    }
}

fn f(value: f32) -> u32 {
    value.to_bits()
}

/// A pair of `f16`.
fn h(low: f32, high: f32) -> u32 {
    let [low, high] = [low, high].map(|value| u32::from(half::f16::from_f32(value).to_bits()));
    low | high << 16
}

/// A pair of `bf16`.
fn b(low: f32, high: f32) -> u32 {
    let [low, high] = [low, high].map(|value| u32::from(half::bf16::from_f32(value).to_bits()));
    low | high << 16
}

const NAN: u32 = 0x7fff_ffff;
const QUIET: u32 = 0x7fc0_0000;
const INFINITY: f32 = f32::INFINITY;

#[test]
fn special_functions() {
    let subnormal = f(f32::MIN_POSITIVE / 2.0);
    check(
        |k, a| k.exp2::<F32>(a),
        &[
            (f(3.0), f(8.0)),
            (f(0.5), f(core::f32::consts::SQRT_2)),
            (f(-INFINITY), f(0.0)),
            (f(-127.0), f(0.0)),
            (f(-126.0), f(f32::MIN_POSITIVE)),
            (f(128.0), f(INFINITY)),
            (QUIET, NAN),
        ],
    );
    check(|k, a| k.log2(a), &[(f(8.0), f(3.0)), (f(0.0), f(-INFINITY)), (subnormal, f(-INFINITY)), (f(-1.0), NAN)]);
    check(
        |k, a| k.reciprocal(a),
        &[(f(4.0), f(0.25)), (f(-0.0), f(-INFINITY)), (subnormal, f(INFINITY)), (f(2f32.powi(127)), f(0.0))],
    );
    check(
        |k, a| k.reciprocal_sqrt(a),
        &[(f(4.0), f(0.5)), (f(0.0), f(INFINITY)), (f(-0.0), f(-INFINITY)), (f(INFINITY), f(0.0)), (f(-1.0), NAN)],
    );
    check(|k, a| k.sqrt(a), &[(f(4.0), f(2.0)), (f(-0.0), f(-0.0)), (subnormal, f(0.0)), (f(-1.0), NAN)]);
    check(|k, a| k.tanh::<F32>(a), &[(f(0.0), f(0.0)), (f(0.5), f(0.462_117_16)), (f(-30.0), f(-1.0))]);
}

#[test]
fn special_functions_of_pairs() {
    check(|k, a| k.exp2::<F16x2>(a), &[(h(3.0, -1.0), h(8.0, 0.5)), (h(-24.0, 16.0), h(2f32.powi(-24), INFINITY))]);
    check(|k, a| k.exp2::<Bf16x2>(a), &[(b(3.0, -127.0), b(8.0, 0.0))]);
    check(|k, a| k.tanh::<F16x2>(a), &[(h(0.0, 20.0), h(0.0, 1.0))]);
}

/// The first element of the sum of an `mma` of e4m3 with an accumulator, where `factors` are codes of the first row of A and of
/// the first column of B by their depth.
fn first_of_fp8(arch: Arch, start: f32, factors: &[(usize, u8, u8)]) -> f32 {
    let mut builder = Builder::new("test", 32);
    let k = &mut builder;
    let [a, b, d] = ["a", "b", "d"].map(|name| k.parameter::<U64>(name));
    let lane = k.lane();
    let [a, b] = [(a, 16u32), (b, 8u32)].map(|(base, bytes)| k.mad_wide(lane, bytes, base));
    let (left, right) = (k.load::<U32>(a, 4), k.load::<U32>(b, 2));
    let sums = [(); 4].map(|()| k.copy(start));
    k.mma_fp8([Fp8::E4m3; 2], &sums, &[left[0], left[1], left[2], left[3]], &[right[0], right[1]]);
    let target = k.mad_wide(lane, 4u32, d);
    k.store_one(target, sums[0]);
    let kernel = builder.finish().verify(arch).expect("it keeps the rules");
    // Lane t has depths 4t to 4t + 3 of the first 16 in register 0 of both, and the others in register 2 of A and 1 of B.
    let (mut left, mut right) = (vec![0; 32 * 16], vec![0; 32 * 8]);
    for &(depth, of_a, of_b) in factors {
        let (half, lane, byte) = (depth / 16, depth % 16 / 4, depth % 4);
        left[16 * lane + 8 * half + byte] = of_a;
        right[8 * lane + 4 * half + byte] = of_b;
    }
    let mut memory = GlobalMemory::new();
    let [a, b] = [("a", &left), ("b", &right)].map(|(name, bytes)| memory.allocate(name, bytes));
    let d = memory.allocate_uninitialised("d", 128);
    let options = Options { tensor_sum: TensorSum::H200, ..Options::default() };
    let arguments = [a, b, d].map(Argument::U64);
    run_with(&kernel, &arguments, &memory, options).unwrap_or_else(|error| panic!("{error}"));
    f32::from_bits(words(&memory.read(d))[0])
}

/// Tensor cores that multiply 8-bit floats keep 13 bits below the largest term, the accumulator among them. Hopper multiplies
/// them as `f16`, in two steps from zero, and rounds as it adds the accumulator.
#[test]
fn sums_of_fp8_by_architecture() {
    const ONE: u8 = 0x38;
    const SIXTEEN: u8 = 0x58;
    /// `2^-9`, and three times that.
    const LEAST: u8 = 1;
    const THREE_LEAST: u8 = 3;
    for arch in [Arch::Sm89, Arch::Sm120] {
        assert_eq!(first_of_fp8(arch, 8192.0, &[(0, ONE, ONE)]), 8193.0);
        assert_eq!(first_of_fp8(arch, 16384.0, &[(0, ONE, ONE)]), 16384.0);
        assert_eq!(first_of_fp8(arch, 0.0, &[(0, SIXTEEN, SIXTEEN), (2, LEAST, LEAST)]), 256.0);
    }
    let ulp = |of: f32| of * f32::EPSILON;
    // Eight products of 2^-18, half of them in each half of the depth.
    let small = |byte: usize| (0..8).map(move |lane| (4 * lane + byte, LEAST, LEAST));
    for arch in [Arch::Sm90, Arch::Sm90a] {
        assert_eq!(first_of_fp8(arch, 16384.0, &[(0, ONE, ONE)]), 16385.0);
        // The step of the lower bytes comes first, and its sum is one term of the step of the upper ones.
        let lower_then_upper: Vec<_> = small(0).chain([(2, SIXTEEN, SIXTEEN)]).collect();
        assert_eq!(first_of_fp8(arch, 0.0, &lower_then_upper), 256.0 + ulp(256.0));
        let together: Vec<_> = small(3).chain([(2, SIXTEEN, SIXTEEN)]).collect();
        assert_eq!(first_of_fp8(arch, 0.0, &together), 256.0);
        let upper_after_lower: Vec<_> = small(2).chain([(0, SIXTEEN, SIXTEEN)]).collect();
        assert_eq!(first_of_fp8(arch, 0.0, &upper_after_lower), 256.0);
        // Three quarters of a unit are rounded up.
        assert_eq!(first_of_fp8(arch, 128.0, &[(5, THREE_LEAST, LEAST)]), 128.0 + ulp(128.0));
    }
    assert_eq!(first_of_fp8(Arch::Sm89, 128.0, &[(5, THREE_LEAST, LEAST)]), 128.0);
}
