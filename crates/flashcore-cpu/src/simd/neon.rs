//! The NEON level, for 64-bit Arm processors, all of which have NEON: four query rows to a register, thirty-two registers.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::microkernel::vector_kernel::simd_level;
use crate::microkernel::{FusedForward, convert};
use crate::simd::exp2::{COEFFICIENTS, MAX_EXPONENT, MIN_EXPONENT};
use crate::simd::level::Level;
use crate::simd::tanh::{TanhVector, tanh};
use crate::simd::vector::{Vector, vector_methods};
use core::arch::aarch64::{
    float32x4_t, uint16x4_t, vaddq_f32, vaddq_s32, vaddvq_f32, vbicq_u32, vbslq_f32, vceqq_f32, vcltq_f32,
    vcvtnq_s32_f32, vdivq_f32, vdupq_n_f32, vfmaq_f32, vld1_u8, vld1q_f32, vld1q_u8, vmaxnmq_f32, vmaxnmvq_f32,
    vminq_f32, vmovl_u16, vmulq_f32, vreinterpret_u16_u8, vreinterpretq_f32_f64, vreinterpretq_f32_s32,
    vreinterpretq_f32_u8, vreinterpretq_f32_u32, vreinterpretq_f64_f32, vreinterpretq_s32_f32, vreinterpretq_u32_f32,
    vrndnq_f32, vshlq_n_s32, vshlq_n_u32, vst1q_f32, vsubq_f32, vtrn1q_f32, vtrn1q_f64, vtrn2q_f32, vtrn2q_f64,
};
use core::arch::asm;
use flashcore_problem::DType;

/// The level, and a witness that the processor has its instructions.
pub(crate) struct Neon(());

impl Neon {
    /// `None` if the processor lacks something.
    pub(crate) fn detect() -> Option<Self> {
        Level::Neon.missing().is_empty().then_some(Self(()))
    }
}

// Six rows by two vectors of two registers are twenty-four sums; with four registers of the right factor and one of the
// left, 29 of 32. Each step is eight loads, since one loads two registers of the right factor, for 24 multiply-adds,
// whose latency (4 cycles, two to four at a time) needs eight to sixteen sums. Twelve rows by two registers are as
// many sums, but 13 loads, and read the keys twice as often.
simd_level!(Neon, Pair, rows: 6, features: "neon");

impl FusedForward for Neon {}

/// Registers of a vector.
const REGISTERS: usize = 2;
/// Lanes of a register.
const WIDTH: usize = 4;

/// A vector of two registers.
#[derive(Clone, Copy)]
pub(crate) struct Pair([float32x4_t; REGISTERS]);

impl Pair {
    #[inline(always)]
    fn zip(self, other: Self, operation: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Self(std::array::from_fn(|register| operation(self.0[register], other.0[register])))
    }
}

impl Vector for Pair {
    type Real = f32;
    const LANES: usize = REGISTERS * WIDTH;

    vector_methods! {
        fn store(self, to: *mut f32) {
            for (register, lanes) in self.0.into_iter().enumerate() {
                vst1q_f32(to.add(register * WIDTH), lanes);
            }
        }

        /// Multiply-adds take an element of a register for all lanes, so that an element of the left factor is only loaded.
        /// Left alone, the compiler loads it into all lanes with `ld1r`, which also occupies a unit that could multiply: 14.5
        /// cycles for the 24 multiply-adds of a step instead of 12, says llvm-mca of a Neoverse N2.
        fn splat(mut value: f32) -> Self {
            // The assembly is a comment, which only hides where the value comes from.
            asm!("// {0:s}", inout(vreg) value, options(pure, nomem, nostack, preserves_flags));
            Self([vdupq_n_f32(value); REGISTERS])
        }

        fn load(from: *const f32) -> Self {
            Self(std::array::from_fn(|register| vld1q_f32(from.add(register * WIDTH))))
        }

        fn widen(dtype: DType, from: *const u8) -> Self {
            Self(std::array::from_fn(|register| {
                let from = from.add(register * WIDTH * dtype.size_bytes());
                match dtype {
                    DType::F16 => widen_f16(vreinterpret_u16_u8(vld1_u8(from))),
                    DType::Bf16 => {
                        let wide = vmovl_u16(vreinterpret_u16_u8(vld1_u8(from)));
                        vreinterpretq_f32_u32(vshlq_n_u32::<16>(wide))
                    }
                    DType::F32 => vreinterpretq_f32_u8(vld1q_u8(from)),
                    DType::F64 => unreachable!("problems in f64 are computed in f64"),
                    DType::E4m3 | DType::E5m2 => {
                        let mut numbers = [0.0_f32; WIDTH];
                        convert::load(dtype, std::slice::from_raw_parts(from, WIDTH), &mut numbers);
                        vld1q_f32(numbers.as_ptr())
                    }
                }
            }))
        }

        fn add(self, other: Self) -> Self { self.zip(other, |left, right| vaddq_f32(left, right)) }
        fn sub(self, other: Self) -> Self { self.zip(other, |left, right| vsubq_f32(left, right)) }
        fn mul(self, other: Self) -> Self { self.zip(other, |left, right| vmulq_f32(left, right)) }

        fn mul_add(self, factor: Self, term: Self) -> Self {
            Self(std::array::from_fn(|register| {
                vfmaq_f32(term.0[register], self.0[register], factor.0[register])
            }))
        }

        /// The instruction returns the number of a number and a quiet NaN. Scores are results of arithmetic, which makes
        /// every NaN a quiet one.
        fn max(self, other: Self) -> Self { self.zip(other, |left, right| vmaxnmq_f32(left, right)) }

        fn if_equal(self, other: Self, yes: Self, no: Self) -> Self {
            Self(std::array::from_fn(|register| {
                vbslq_f32(vceqq_f32(self.0[register], other.0[register]), yes.0[register], no.0[register])
            }))
        }

        fn exp2(self) -> Self { Self(self.0.map(|exponent| exp2(exponent))) }
        fn sum(self) -> f32 { vaddvq_f32(vaddq_f32(self.0[0], self.0[1])) }

        fn largest(self) -> f32 {
            let larger = vmaxnmq_f32(self.0[0], self.0[1]);
            // Where all are NaN, there is still this.
            vmaxnmvq_f32(vmaxnmq_f32(larger, vdupq_n_f32(f32::NEG_INFINITY)))
        }

        fn tanh(self) -> Self { tanh(self) }

        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            for row in (0..Self::LANES).step_by(WIDTH) {
                for column in (0..Self::LANES).step_by(WIDTH) {
                    let from = from.add(row * from_stride + column);
                    let square = std::array::from_fn(|index| vld1q_f32(from.add(index * from_stride)));
                    for (index, lanes) in transpose(square).into_iter().enumerate() {
                        vst1q_f32(to.add((column + index) * to_stride + row), lanes);
                    }
                }
            }
        }
    }
}

impl TanhVector for Pair {
    vector_methods! {
        fn div(self, other: Self) -> Self { self.zip(other, |left, right| vdivq_f32(left, right)) }

        fn if_less(self, other: Self, yes: Self, no: Self) -> Self {
            Self(std::array::from_fn(|register| {
                vbslq_f32(vcltq_f32(self.0[register], other.0[register]), yes.0[register], no.0[register])
            }))
        }
    }
}

/// Transposes rows to columns.
///
/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn transpose(rows: [float32x4_t; WIDTH]) -> [float32x4_t; WIDTH] {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        // Even and odd columns of two rows, then of four.
        let of_two = |first, second| {
            [vtrn1q_f32(first, second), vtrn2q_f32(first, second)].map(|columns| vreinterpretq_f64_f32(columns))
        };
        let ([upper_even, upper_odd], [lower_even, lower_odd]) = (of_two(rows[0], rows[1]), of_two(rows[2], rows[3]));
        [
            vtrn1q_f64(upper_even, lower_even),
            vtrn1q_f64(upper_odd, lower_odd),
            vtrn2q_f64(upper_even, lower_even),
            vtrn2q_f64(upper_odd, lower_odd),
        ]
        .map(|column| vreinterpretq_f32_f64(column))
    }
}

/// The integer is added to the exponent in the bits of the polynomial's value: that lies between 0.7 and 1.5, and the
/// power is not subnormal, so no bit is lost. The integer nearest to a NaN is 0, and leaves the NaN as it is.
///
/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn exp2(exponent: float32x4_t) -> float32x4_t {
    const FRACTION_BITS: i32 = 23;
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        // A NaN stays one.
        let exponent = vminq_f32(exponent, vdupq_n_f32(MAX_EXPONENT));
        let fraction = vsubq_f32(exponent, vrndnq_f32(exponent));
        let mut power = vdupq_n_f32(COEFFICIENTS[0]);
        for coefficient in &COEFFICIENTS[1..] {
            power = vfmaq_f32(vdupq_n_f32(*coefficient), power, fraction);
        }
        let whole = vshlq_n_s32::<FRACTION_BITS>(vcvtnq_s32_f32(exponent));
        let power = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(power), whole));
        // A NaN is not less than anything.
        let is_zero = vcltq_f32(exponent, vdupq_n_f32(MIN_EXPONENT));
        vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(power), is_zero))
    }
}

/// The instruction is as old as the 64-bit architecture, but its intrinsic needs a processor that also computes in
/// `f16`, and for Rust 1.94.
///
/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn widen_f16(narrow: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: the instruction reads one register and writes another, and the caller vouches that it exists.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {narrow:v}.4h",
            wide = out(vreg) wide,
            narrow = in(vreg) narrow,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn across_lanes() {
        let nan = f32::NAN;
        for (lanes, expected_sum, expected_largest) in [
            ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], 255.0, 128.0),
            ([-1.0, -2.0, -4.0, -8.0, -16.0, -32.0, -64.0, -128.0], -255.0, -1.0),
            ([nan, 2.0, nan, 8.0, 16.0, nan, -64.0, 3.0], nan, 16.0),
            ([nan; Pair::LANES], nan, f32::NEG_INFINITY),
        ] {
            // SAFETY: the processor has NEON, and the array has a vector.
            let (sum, largest) = unsafe { (Pair::load(lanes.as_ptr()).sum(), Pair::load(lanes.as_ptr()).largest()) };
            assert!(sum == expected_sum || sum.is_nan() && expected_sum.is_nan(), "{lanes:?}: sum {sum}");
            assert!(largest == expected_largest, "{lanes:?}: largest {largest}");
        }
    }

    #[test]
    fn tangents_are_as_exact_as_stated() {
        // SAFETY: the processor has NEON.
        let tanh = |x: f32| unsafe { Pair::splat(x).tanh().to_array()[0] };
        // A step that is no fraction of a power of two, from beyond where the result is 1.
        for step in -100_000_i32..=100_000 {
            let x = step as f32 * 1.1e-4;
            let (value, exact) = (f64::from(tanh(x)), f64::from(x).tanh());
            assert!((value - exact).abs() <= crate::simd::tanh::MAX_ERROR * exact.abs(), "tanh({x}) is {value}");
        }
        assert_eq!([f32::NEG_INFINITY, f32::INFINITY, 0.0].map(tanh), [-1.0, 1.0, 0.0]);
        assert!(tanh(f32::NAN).is_nan());
    }

    /// From rows and to rows that are longer than a vector, and nothing between them is touched.
    #[test]
    fn squares_are_transposed() {
        const FROM_STRIDE: usize = Pair::LANES + 3;
        const TO_STRIDE: usize = Pair::LANES + 5;
        let from: Vec<f32> = (0..Pair::LANES * FROM_STRIDE).map(|index| index as f32).collect();
        let mut to = vec![-1.0; Pair::LANES * TO_STRIDE];
        // SAFETY: the processor has NEON, and each row holds more than a vector.
        unsafe { Pair::transpose(from.as_ptr(), FROM_STRIDE, to.as_mut_ptr(), TO_STRIDE) };
        for (index, &element) in to.iter().enumerate() {
            let (column, row) = (index / TO_STRIDE, index % TO_STRIDE);
            let expected = if row < Pair::LANES { from[row * FROM_STRIDE + column] } else { -1.0 };
            assert_eq!(element, expected, "row {row}, column {column}");
        }
    }
}
