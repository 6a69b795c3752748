//! Results of operations, against values worked out by hand.

use crate::support::{kernel, run, words};
use flashcore_ir::types::{Bf16, Bf16x2, F16, F16x2, F32, S32, S64, Storable, U16, U32, U64};
use flashcore_ir::{Builder, Compare, ReduceOp, Reg, Rounding, ShuffleMode, VoteMode};
use flashcore_sim::{Argument, GlobalMemory};

/// Runs what `build` computes from `N` inputs, one row for each lane, and compares the bits.
#[track_caller]
fn check<const N: usize, A: Storable, D: Storable>(
    build: impl Fn(&mut Builder, [Reg<A>; N]) -> Reg<D>,
    rows: &[([u64; N], u64)],
) {
    assert!(rows.len() <= 32, "a row for each lane");
    let (input_bytes, output_bytes) = (A::TYPE.bytes() as usize, D::TYPE.bytes() as usize);
    let kernel = kernel(32, |k| {
        let (x, y) = (k.parameter::<U64>("x"), k.parameter::<U64>("y"));
        let lane = k.lane();
        let inputs = core::array::from_fn(|input| {
            let index = k.mad(lane, N as u32, input as u32);
            let address = k.mad_wide(index, A::TYPE.bytes(), x);
            k.load_one::<A>(address)
        });
        let result = build(k, inputs);
        let address = k.mad_wide(lane, D::TYPE.bytes(), y);
        k.store_one(address, result);
    });
    // Lanes without a row of their own repeat the first.
    let row = |lane: usize| rows.get(lane).unwrap_or(&rows[0]);
    let input: Vec<u8> = (0..32)
        .flat_map(|lane| row(lane).0.into_iter().flat_map(|bits| bits.to_le_bytes()[..input_bytes].to_vec()))
        .collect();
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &input);
    let y = memory.allocate_uninitialised("y", 32 * output_bytes);
    run(&kernel, &[Argument::U64(x), Argument::U64(y)], &memory).unwrap_or_else(|error| panic!("{error}"));
    for (lane, result) in memory.read(y).chunks(output_bytes).enumerate() {
        let mut bits = [0; 8];
        bits[..output_bytes].copy_from_slice(result);
        let (inputs, expected) = row(lane);
        let actual = u64::from_le_bytes(bits);
        assert_eq!(actual, *expected, "{inputs:#x?} gives {actual:#x}, expected {expected:#x}");
    }
}

fn f(value: f32) -> u64 {
    value.to_bits().into()
}

fn s(value: i32) -> u64 {
    (value as u32).into()
}

fn sl(value: i64) -> u64 {
    value as u64
}

/// A pair of `f16`.
fn h(low: f32, high: f32) -> u64 {
    u64::from(half::f16::from_f32(low).to_bits()) | u64::from(half::f16::from_f32(high).to_bits()) << 16
}

/// A pair of `bf16`.
fn b(low: f32, high: f32) -> u64 {
    u64::from(half::bf16::from_f32(low).to_bits()) | u64::from(half::bf16::from_f32(high).to_bits()) << 16
}

const NAN: u64 = 0x7fff_ffff;
const QUIET: u64 = 0x7fc0_0000;
const INFINITY: f32 = f32::INFINITY;

#[test]
fn integer_arithmetic() {
    check(|k, [a, b]| k.add::<U32>(a, b), &[([1, 2], 3), ([0xffff_ffff, 2], 1)]);
    check(|k, [a, b]| k.add::<U64>(a, b), &[([0xffff_ffff, 2], 0x1_0000_0001), ([u64::MAX, 2], 1)]);
    check(|k, [a, b]| k.sub::<U32>(a, b), &[([1, 2], 0xffff_ffff), ([7, 2], 5)]);
    check(|k, [a, b]| k.sub::<S64>(a, b), &[([1, 2], sl(-1))]);
    check(|k, [a, b]| k.mul::<U32>(a, b), &[([0x1_0001, 0x1_0001], 0x2_0001), ([3, 5], 15)]);
    check(|k, [a, b]| k.mul::<S64>(a, b), &[([sl(-3), 5], sl(-15))]);
    check(|k, [a, b]| k.mul_high::<U32>(a, b), &[([0xffff_ffff, 0xffff_ffff], 0xffff_fffe)]);
    check(|k, [a, b]| k.mul_high::<S32>(a, b), &[([s(-1), s(-1)], 0), ([s(-1), 2], s(-1))]);
    check(|k, [a, b]| k.mul_wide::<U32>(a, b), &[([0xffff_ffff, 0xffff_ffff], 0xffff_fffe_0000_0001)]);
    check(|k, [a, b]| k.mul_wide::<S32>(a, b), &[([s(-2), 3], sl(-6))]);
    check(|k, [a, b, c]| k.mad::<U32>(a, b, c), &[([3, 5, 7], 22), ([0x8000_0000, 2, 7], 7)]);
    check(|k, [a, b, c]| k.mad::<U64>(a, b, c), &[([1 << 40, 3, 7], (3 << 40) + 7)]);
    check(|k, [a, b]| k.mad_wide::<U32>(a, b, 5u64), &[([0xffff_ffff, 2], 0x2_0000_0003)]);
    check(|k, [a, b]| k.mad_wide::<S32>(a, b, 5i64), &[([s(-4), 2], sl(-3))]);
    check(|k, [a, b]| k.div::<U32>(a, b), &[([7, 2], 3), ([7, 0], 0xffff_ffff), ([0xffff_fffe, 3], 0x5555_5554)]);
    check(|k, [a, b]| k.rem::<U32>(a, b), &[([7, 2], 1), ([7, 0], 0xffff_ffff)]);
    check(|k, [a, b]| k.min::<U32>(a, b), &[([1, 0xffff_ffff], 1)]);
    check(|k, [a, b]| k.min::<S32>(a, b), &[([1, s(-1)], s(-1))]);
    check(|k, [a, b]| k.max::<U64>(a, b), &[([1, u64::MAX], u64::MAX)]);
    check(|k, [a, b]| k.max::<S64>(a, b), &[([1, sl(-1)], 1)]);
    check(|k, [a]| k.neg::<S32>(a), &[([5], s(-5)), ([s(i32::MIN)], s(i32::MIN))]);
    check(|k, [a]| k.abs::<S32>(a), &[([s(-5)], 5), ([5], 5), ([s(i32::MIN)], s(i32::MIN))]);
}

#[test]
fn bits() {
    check(|k, [a, b]| k.and::<U32>(a, b), &[([0b1100, 0b1010], 0b1000)]);
    check(|k, [a, b]| k.or::<U64>(a, b), &[([0b1100 << 40, 0b1010], 0b1100 << 40 | 0b1010)]);
    check(|k, [a, b]| k.xor::<S32>(a, b), &[([0b1100, 0b1010], 0b0110)]);
    check(|k, [a]| k.not::<U64>(a), &[([0xff], 0xffff_ffff_ffff_ff00)]);
    check(|k, [a, b]| k.shl::<U32>(a, b), &[([3, 4], 48), ([3, 31], 0x8000_0000), ([3, 32], 0), ([3, 0xffff_ffff], 0)]);
    check(|k, [a, b]| k.shr::<U32>(a, b), &[([48, 4], 3), ([0x8000_0000, 32], 0)]);
    check(|k, [a]| k.shr::<S32>(a, 2u32), &[([s(-8)], s(-2)), ([8], 2)]);
    check(|k, [a]| k.shr::<S32>(a, 40u32), &[([s(-8)], s(-1)), ([8], 0)]);
    check(|k, [a]| k.shl::<U64>(a, 40u32), &[([3], 3 << 40)]);
    check(|k, [a]| k.shl::<U64>(a, 64u32), &[([3], 0)]);
    check(|k, [a]| k.shr::<S64>(a, 64u32), &[([sl(-3)], sl(-1))]);
    check(|k, [a]| k.shr::<U64>(a, 63u32), &[([sl(-3)], 1)]);
    // The table of a function is the function of 0xf0, 0xcc and 0xaa.
    check(|k, [a, b, c]| k.lop3(0xf0 & 0xcc | 0xaa, a, b, c), &[([0b1100, 0b1010, 1], 0b1001)]);
    check(|k, [a, b, c]| k.lop3(0xf0 ^ 0xcc ^ 0xaa, a, b, c), &[([0xff00, 0x0ff0, 0x1234], 0xff00 ^ 0x0ff0 ^ 0x1234)]);
    check(|k, [a, b, c]| k.lop3(!0xf0 & 0xaa, a, b, c), &[([0xff00, 7, 0x1234], 0x34)]);
    check(
        |k, [a, p, n]| k.bit_field_extract(a, p, n),
        &[
            ([0x1234_5678, 8, 8], 0x56),
            ([0x1234_5678, 28, 8], 0x1),
            ([0x1234_5678, 8, 0], 0),
            ([0x1234_5678, 0, 32], 0x1234_5678),
            ([0x1234_5678, 40, 8], 0),
        ],
    );
    check(
        |k, [a, b, p, n]| k.bit_field_insert(a, b, p, n),
        &[
            ([0xab, 0x1234_5678, 8, 8], 0x1234_ab78),
            ([0xab, 0x1234_5678, 28, 8], 0xb234_5678),
            ([0xab, 0x1234_5678, 8, 0], 0x1234_5678),
            ([0xab, 0x1234_5678, 0, 32], 0xab),
            ([0xab, 0x1234_5678, 40, 8], 0x1234_5678),
        ],
    );
    check(
        |k, [a, b, s]| k.permute(a, b, s),
        &[
            ([0x3322_1180, 0x7766_5544, 0x7531], 0x7755_3311),
            ([0x3322_1180, 0x7766_5544, 0x3210], 0x3322_1180),
            // Bit 3 of a nibble gives eight times the sign of the byte.
            ([0x3322_1180, 0x7766_5544, 0x9890], 0x00ff_0080),
        ],
    );
    check(|k, [a]| k.pop_count(a), &[([0xf0f0_0001], 9), ([0], 0)]);
    check(|k, [a]| k.leading_zeros(a), &[([1], 31), ([0], 32), ([0x8000_0000], 0)]);
}

#[test]
fn single_precision() {
    let tiny = f32::MIN_POSITIVE / 2.0;
    check(
        |k, [a, b]| k.add::<F32>(a, b),
        &[([f(1.5), f(2.25)], f(3.75)), ([f(INFINITY), f(-INFINITY)], NAN), ([f(tiny), f(tiny)], f(2.0 * tiny))],
    );
    check(|k, [a, b]| k.sub::<F32>(a, b), &[([f(1.5), f(2.25)], f(-0.75))]);
    check(|k, [a, b]| k.mul::<F32>(a, b), &[([f(1.5), f(2.25)], f(3.375)), ([f(0.0), f(INFINITY)], NAN)]);
    check(|k, [a, b]| k.div::<F32>(a, b), &[([f(1.0), f(3.0)], f(1.0 / 3.0)), ([f(1.0), f(0.0)], f(INFINITY))]);
    check(
        |k, [a, b, c]| k.fma::<F32>(a, b, c),
        // The square of 1 + 2^-12 needs 25 bits; only a fused sum keeps the last.
        &[([0x3f80_0800, 0x3f80_0800, f(-1.0)], f(2f32.powi(-11) + 2f32.powi(-24)))],
    );
    check(
        |k, [a, b]| k.min::<F32>(a, b),
        &[([f(1.0), f(-2.0)], f(-2.0)), ([QUIET, f(3.0)], f(3.0)), ([f(0.0), f(-0.0)], f(-0.0)), ([QUIET, QUIET], NAN)],
    );
    check(
        |k, [a, b]| k.max::<F32>(a, b),
        &[([f(1.0), f(-2.0)], f(1.0)), ([f(-INFINITY), QUIET], f(-INFINITY)), ([f(-0.0), f(0.0)], f(0.0))],
    );
    check(|k, [a]| k.neg::<F32>(a), &[([f(1.0)], f(-1.0)), ([f(0.0)], f(-0.0))]);
    check(|k, [a]| k.abs::<F32>(a), &[([f(-1.0)], f(1.0)), ([f(-0.0)], f(0.0))]);
}

#[test]
fn pairs() {
    check(
        |k, [a, b]| k.add::<F16x2>(a, b),
        // 2048 + 1 is a tie of f16, which goes to the even 2048; 65504 + 16 to infinity.
        &[([h(1.5, 2048.0), h(2.0, 1.0)], h(3.5, 2048.0)), ([h(65504.0, 1.0), h(16.0, -1.0)], h(INFINITY, 0.0))],
    );
    check(|k, [a, b]| k.sub::<Bf16x2>(a, b), &[([b(1.5, 256.0), b(2.0, -1.0)], b(-0.5, 256.0))]);
    check(|k, [a, b]| k.mul::<F16x2>(a, b), &[([h(1.5, 3.0), h(2.0, -0.5)], h(3.0, -1.5))]);
    check(
        |k, [a, b, c]| k.fma::<F16x2>(a, b, c),
        // 33 * 63 = 2079 is rounded once with the addend: 2079 - 2080 = -1, and (1 + 2^-10)^2 - 1 keeps its last bit.
        &[
            ([h(33.0, 1.0), h(63.0, 2.0), h(-2080.0, 4.0)], h(-1.0, 6.0)),
            ([0x3c01_3c01, 0x3c01_3c01, h(-1.0, -1.0)], h(0.001_954_078_7, 0.001_954_078_7)),
        ],
    );
    check(
        |k, [a, b, c]| k.fma::<Bf16x2>(a, b, c),
        // 1.0625^2 = 1.125 + 2^-8 lies half way between two bf16, and 2^-100 decides.
        &[
            ([b(1.0625, 1.0625), b(1.0625, 1.0625), b(2f32.powi(-100), -2f32.powi(-100))], b(1.132_812_5, 1.125)),
            ([b(1.0625, 3.0), b(1.0625, 0.5), b(0.0, 0.5)], b(1.125, 2.0)),
        ],
    );
    check(|k, [a, b]| k.max::<F16x2>(a, b), &[([0x7e00_3c00, h(0.5, -3.0)], h(1.0, -3.0))]);
    check(|k, [a, b]| k.min::<Bf16x2>(a, b), &[([b(1.0, 2.0), b(0.5, 3.0)], b(0.5, 2.0))]);
    check(|k, [a]| k.neg::<F16x2>(a), &[([h(1.0, -2.0)], h(-1.0, 2.0))]);
    check(|k, [a]| k.abs::<Bf16x2>(a), &[([b(1.0, -2.0)], b(1.0, 2.0))]);
    check(
        |k, [a]| k.exp2::<F16x2>(a),
        &[([h(3.0, -1.0)], h(8.0, 0.5)), ([h(-24.0, 16.0)], h(2f32.powi(-24), INFINITY))],
    );
    check(|k, [a]| k.exp2::<Bf16x2>(a), &[([b(3.0, -127.0)], b(8.0, 0.0))]);
    check(|k, [a]| k.tanh::<F16x2>(a), &[([h(0.0, 20.0)], h(0.0, 1.0))]);
}

#[test]
fn special_functions() {
    let subnormal = f(f32::MIN_POSITIVE / 2.0);
    check(
        |k, [a]| k.exp2::<F32>(a),
        &[
            ([f(3.0)], f(8.0)),
            ([f(0.5)], f(core::f32::consts::SQRT_2)),
            ([f(-INFINITY)], f(0.0)),
            ([f(-127.0)], f(0.0)),
            ([f(-126.0)], f(f32::MIN_POSITIVE)),
            ([f(128.0)], f(INFINITY)),
            ([QUIET], NAN),
        ],
    );
    check(
        |k, [a]| k.log2(a),
        &[([f(8.0)], f(3.0)), ([f(0.0)], f(-INFINITY)), ([subnormal], f(-INFINITY)), ([f(-1.0)], NAN)],
    );
    check(
        |k, [a]| k.reciprocal(a),
        &[([f(4.0)], f(0.25)), ([f(-0.0)], f(-INFINITY)), ([subnormal], f(INFINITY)), ([f(2f32.powi(127))], f(0.0))],
    );
    check(
        |k, [a]| k.reciprocal_sqrt(a),
        &[
            ([f(4.0)], f(0.5)),
            ([f(0.0)], f(INFINITY)),
            ([f(-0.0)], f(-INFINITY)),
            ([f(INFINITY)], f(0.0)),
            ([f(-1.0)], NAN),
        ],
    );
    check(|k, [a]| k.sqrt(a), &[([f(4.0)], f(2.0)), ([f(-0.0)], f(-0.0)), ([subnormal], f(0.0)), ([f(-1.0)], NAN)]);
    check(|k, [a]| k.tanh::<F32>(a), &[([f(0.0)], f(0.0)), ([f(0.5)], f(0.462_117_16)), ([f(-30.0)], f(-1.0))]);
}

#[test]
fn conversions() {
    check(|k, [a]| k.widen(a), &[([0xffff_ffff], 0xffff_ffff)]);
    check(|k, [a]| k.widen_signed(a), &[([s(-2)], sl(-2))]);
    check(|k, [a]| k.truncate(a), &[([0x1234_5678_9abc_def0], 0x9abc_def0)]);
    check(|k, [a]| k.widen_half(a), &[([0xfffe], 0xfffe)]);
    check(|k, [a]| k.to_f32::<U32>(a), &[([0xffff_ffff], f(4_294_967_296.0)), ([16_777_217], f(16_777_216.0))]);
    check(|k, [a]| k.to_f32::<S32>(a), &[([s(-7)], f(-7.0))]);
    check(
        |k, [a]| k.to_integer::<S32>(a, Rounding::ToZero),
        &[([f(-2.7)], s(-2)), ([f(3e9)], s(i32::MAX)), ([f(-3e9)], s(i32::MIN)), ([QUIET], 0)],
    );
    check(|k, [a]| k.to_integer::<U32>(a, Rounding::ToZero), &[([f(-2.7)], 0), ([f(5e9)], 0xffff_ffff)]);
    check(|k, [a]| k.to_integer::<S32>(a, Rounding::Down), &[([f(-2.1)], s(-3)), ([f(2.9)], 2)]);
    check(|k, [a]| k.to_integer::<S32>(a, Rounding::Up), &[([f(-2.9)], s(-2)), ([f(2.1)], 3)]);
    check(
        |k, [a]| k.to_integer::<S32>(a, Rounding::NearestInteger),
        &[([f(2.5)], 2), ([f(3.5)], 4), ([f(-2.5)], s(-2))],
    );
    check(
        |k, [a]: [Reg<F16>; 1]| k.f16_to_f32(a),
        &[([0x3c00], f(1.0)), ([0x0001], f(2f32.powi(-24))), ([0x7c00], f(INFINITY))],
    );
    check(|k, [a]: [Reg<Bf16>; 1]| k.bf16_to_f32(a), &[([0x3f80], f(1.0)), ([0xc000], f(-2.0))]);
    check(
        |k, [a]| k.f32_to_f16(a),
        &[([f(1.0)], 0x3c00), ([f(65520.0)], 0x7c00), ([f(2f32.powi(-25))], 0), ([QUIET], 0x7fff)],
    );
    check(
        |k, [a]| k.f32_to_bf16(a),
        &[([0x3f80_8000], 0x3f80), ([0x3f81_8000], 0x3f82), ([0x3f80_8001], 0x3f81), ([QUIET], 0x7fff)],
    );
    check(|k, [a]| k.f32_to_tf32(a), &[([0x3f80_1000], 0x3f80_2000), ([0x3f80_0fff], 0x3f80_0000)]);
    check(|k, [low, high]| k.pair::<F16x2>(low, high), &[([f(1.0), f(-2.0)], h(1.0, -2.0))]);
    check(|k, [low, high]| k.pair::<Bf16x2>(low, high), &[([f(1.0), f(-2.0)], b(1.0, -2.0))]);
    check(|k, [low, high]: [Reg<F16>; 2]| k.pack::<F16x2>(low, high), &[([0x1111, 0x2222], 0x2222_1111)]);
    check(|k, [a]: [Reg<F16x2>; 1]| k.unpack(a).0, &[([0x2222_1111], 0x1111)]);
    check(|k, [a]: [Reg<Bf16x2>; 1]| k.unpack(a).1, &[([0x2222_1111], 0x2222)]);
    check(|k, [a]: [Reg<U16>; 1]| k.reinterpret::<U16, Bf16>(a), &[([0x1234], 0x1234)]);
    check(|k, [a]: [Reg<U64>; 1]| k.reinterpret::<U64, S64>(a), &[([u64::MAX], u64::MAX)]);
}

#[test]
fn comparison_and_selection() {
    /// The six comparisons as bits, lowest first: eq, ne, lt, le, gt, ge.
    fn all<T: flashcore_ir::types::Number>(k: &mut Builder, a: Reg<T>, b: Reg<T>) -> Reg<U32> {
        let mut answers = k.copy::<U32>(0u32);
        for (bit, compare) in Compare::ALL.iter().enumerate() {
            let holds = k.compare(*compare, a, b);
            let answer = k.select::<U32>(holds, 1u32 << bit, 0u32);
            answers = k.or::<U32>(answers, answer);
        }
        answers
    }
    let (less, equal, greater, unordered) = (0b00_1110, 0b10_1001, 0b11_0010, 0b00_0010);
    check(|k, [a, b]| all::<U32>(k, a, b), &[([1, s(-1)], less), ([7, 7], equal), ([s(-1), 1], greater)]);
    check(|k, [a, b]| all::<S32>(k, a, b), &[([s(-1), 1], less), ([7, 7], equal), ([1, s(-1)], greater)]);
    check(|k, [a, b]| all::<U64>(k, a, b), &[([1, 1 << 40], less), ([u64::MAX, 0], greater)]);
    check(|k, [a, b]| all::<S64>(k, a, b), &[([u64::MAX, 0], less), ([1 << 40, 1], greater)]);
    check(
        |k, [a, b]| all::<F32>(k, a, b),
        &[
            ([f(-1.0), f(1.0)], less),
            ([f(0.0), f(-0.0)], equal),
            ([f(INFINITY), f(1.0)], greater),
            ([QUIET, QUIET], unordered),
        ],
    );
    check(
        |k, [a, b]| {
            let holds = k.compare::<U64>(Compare::Lt, a, b);
            k.select::<U64>(holds, a, b)
        },
        &[([5 << 40, 6 << 40], 5 << 40), ([8, 7], 7)],
    );
    check(
        |k, [a, b]| {
            let less = k.compare::<U32>(Compare::Lt, a, b);
            let zero = k.compare::<U32>(Compare::Eq, a, 0u32);
            let both = k.and::<flashcore_ir::types::Pred>(less, zero);
            let neither = k.not::<flashcore_ir::types::Pred>(both);
            k.select::<U32>(neither, 10u32, 20u32)
        },
        &[([0, 1], 20), ([0, 0], 10), ([1, 2], 10)],
    );
}

/// Lane `l` holds `100 + l`.
#[track_caller]
fn check_lanes(build: impl Fn(&mut Builder, Reg<U32>) -> Reg<U32>, expected: impl Fn(u64) -> u64) {
    let rows: Vec<_> = (0..32).map(|lane| ([100 + lane], expected(lane))).collect();
    check(|k, [a]| build(k, a), &rows);
}

#[test]
fn shuffles() {
    check_lanes(|k, a| k.shuffle(ShuffleMode::Butterfly, a, 5u32), |lane| 100 + (lane ^ 5));
    check_lanes(|k, a| k.shuffle(ShuffleMode::Up, a, 3u32), |lane| 100 + if lane < 3 { lane } else { lane - 3 });
    check_lanes(|k, a| k.shuffle(ShuffleMode::Down, a, 3u32), |lane| 100 + if lane > 28 { lane } else { lane + 3 });
    check_lanes(|k, a| k.shuffle(ShuffleMode::Index, a, 7u32), |_| 107);
    check_lanes(
        |k, a| {
            let lane = k.lane();
            let index = k.sub::<U32>(31u32, lane);
            k.shuffle(ShuffleMode::Index, a, index)
        },
        |lane| 131 - lane,
    );
}

/// Segments of 8 lanes: the mask of the manual's operand c is 0b11000, its clamp 7 or, upwards, 0.
#[test]
fn shuffles_in_segments() {
    type Source = fn(u64) -> u64;
    let expected: [(ShuffleMode, u32, u32, Source); 5] = [
        (ShuffleMode::Index, 3, 0x1807, |lane| lane / 8 * 8 + 3),
        // Of the index, the bits below the segment count.
        (ShuffleMode::Index, 11, 0x1807, |lane| lane / 8 * 8 + 3),
        (ShuffleMode::Down, 3, 0x1807, |lane| if lane % 8 < 5 { lane + 3 } else { lane }),
        (ShuffleMode::Up, 3, 0x1800, |lane| if lane % 8 >= 3 { lane - 3 } else { lane }),
        (ShuffleMode::Butterfly, 3, 0x1807, |lane| lane ^ 3),
    ];
    for (mode, index, control, expected) in expected {
        let mut memory = GlobalMemory::new();
        let y = memory.allocate_uninitialised("y", 128);
        let mut k = Builder::new("segments", 32);
        let target = k.parameter::<U64>("y");
        let lane = k.lane();
        let received = k.shuffle(mode, lane, index);
        let address = k.mad_wide(lane, 4u32, target);
        k.store_one(address, received);
        let mut kernel = k.finish();
        kernel.instructions_mut(&mut |instruction| {
            if let flashcore_ir::Op::Shuffle { control: segments, .. } = &mut instruction.op {
                *segments = control;
            }
        });
        run(&crate::support::verified(kernel), &[Argument::U64(y)], &memory).unwrap();
        let expected: Vec<u32> = (0..32).map(|lane| expected(lane) as u32).collect();
        assert_eq!(words(&memory.read(y)), expected, "{mode}");
    }
}

#[test]
fn votes_and_reductions() {
    let vote = |mode: VoteMode, limit: u32| {
        move |k: &mut Builder, a: Reg<U32>| {
            let holds = k.compare::<U32>(Compare::Lt, a, limit);
            let answer = k.vote(mode, holds);
            k.select::<U32>(answer, 1u32, 0u32)
        }
    };
    for (limit, [all, any, uniform]) in [(100, [0, 0, 1]), (116, [0, 1, 0]), (132, [1, 1, 1])] {
        check_lanes(vote(VoteMode::All, limit), |_| all);
        check_lanes(vote(VoteMode::Any, limit), |_| any);
        check_lanes(vote(VoteMode::Uniform, limit), |_| uniform);
    }
    check_lanes(
        |k, a| {
            let holds = k.compare::<U32>(Compare::Ge, a, 116u32);
            k.ballot(holds)
        },
        |_| 0xffff_0000,
    );
    for (op, expected) in [
        (ReduceOp::Add, (100..132).sum()),
        (ReduceOp::Min, 100),
        (ReduceOp::Max, 131),
        (ReduceOp::And, (100..132).fold(u64::MAX, |all, lane| all & lane)),
        (ReduceOp::Or, (100..132).fold(0, |all, lane| all | lane)),
        (ReduceOp::Xor, (100..132).fold(0, |all, lane| all ^ lane)),
    ] {
        check_lanes(|k, a| k.reduce_warp::<U32>(op, a), |_| expected);
    }
    for (op, expected) in [(ReduceOp::Min, s(-9)), (ReduceOp::Max, 7)] {
        // One row is lane 1, the others repeat lane 0.
        check(|k, [a]| k.reduce_warp::<S32>(op, a), &[([7], expected), ([s(-9)], expected)]);
    }
}

#[test]
fn control_flow_by_lanes() {
    // Each lane takes its own branch.
    check_lanes(
        |k, a| {
            let result = k.copy::<U32>(0u32);
            let odd = k.and::<U32>(a, 1u32);
            let odd = k.compare::<U32>(Compare::Eq, odd, 1u32);
            k.if_else(odd, |k| k.set::<U32>(result, 1u32), |k| k.set::<U32>(result, 2u32));
            k.when(odd, |k| k.add_to::<U32>(result, 10u32));
            k.unless(odd, |k| k.add_to::<U32>(result, 20u32));
            result
        },
        |lane| if lane % 2 == 1 { 11 } else { 22 },
    );
    // Each lane leaves its loop in its own time, the lanes of the outer loop with it.
    check_lanes(
        |k, _| {
            let lane = k.lane();
            let sum = k.copy::<U32>(0u32);
            k.for_lanes(0u32, lane, |k, i| {
                k.for_lanes(0u32, i, |k, _| k.add_to::<U32>(sum, 1u32));
            });
            sum
        },
        |lane| lane * (lane.max(1) - 1) / 2,
    );
}
