//! The terms of each element of a tensor-core product, against which its error is measured.
//!
//! The positions of the fragments are written down here a second time, from the figures of the PTX manual, and not
//! taken from the simulator, which is what is being judged.

use flashcore_ir::{Fp8, MmaShape, Type};
use half::{bf16, f16};

use super::inputs::pair_element;

const LANES: usize = 32;
const ROWS: usize = 16;
const COLUMNS: usize = 8;

/// A form of `mma`, whose inputs are the registers of `a`, then those of `b`, then those of `c`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Products {
    /// The shape.
    pub shape: MmaShape,
    /// Type of the registers of the factors.
    pub operand: Type,
    /// Types of the factors, left and right, where they are 8-bit floats.
    pub fp8: Option<[Fp8; 2]>,
    /// Type of the accumulator.
    pub accumulate: Type,
}

impl Products {
    /// Registers of `a`, `b` and of `c` or `d`.
    pub const fn registers(self) -> [usize; 3] {
        let depth = self.shape.depth() as usize;
        let per_register = match self.operand {
            Type::Tf32 => 1,
            Type::U32 => 4,
            _ => 2,
        };
        let accumulators = if matches!(self.accumulate, Type::F16x2) { 2 } else { 4 };
        [ROWS * depth / LANES / per_register, COLUMNS * depth / LANES / per_register, accumulators]
    }

    /// `sum |a·b| + |c|` of every element: for each register of the result, for each thread, of each half.
    pub(super) fn magnitudes(self, inputs: &[Vec<u8>]) -> Vec<Vec<[f64; 2]>> {
        let [a_registers, b_registers, c_registers] = self.registers();
        let threads = inputs[0].len() / 4;
        let mut magnitudes = vec![vec![[0.0; 2]; threads]; c_registers];
        let (a, rest) = inputs.split_at(a_registers);
        let (b, c) = rest.split_at(b_registers);
        for warp in 0..threads / LANES {
            let sums = self.warp(a, b, warp);
            for lane in 0..LANES {
                let thread = warp * LANES + lane;
                for (register, c) in c.iter().enumerate() {
                    let terms = elements(self.accumulate, word(c, thread));
                    for (half, c) in terms.into_iter().enumerate() {
                        let (row, column) = self.accumulator(lane, register, half);
                        magnitudes[register][thread][half] = sums[row][column] + c.abs();
                    }
                }
            }
        }
        magnitudes
    }

    /// `sum |a·b|` of one warp.
    fn warp(self, a: &[Vec<u8>], b: &[Vec<u8>], warp: usize) -> [[f64; COLUMNS]; ROWS] {
        let depth = self.shape.depth() as usize;
        let mut rows = vec![[0.0; ROWS]; depth];
        let mut columns = vec![[0.0; COLUMNS]; depth];
        for lane in 0..LANES {
            let (group, thread) = (lane / 4, lane % 4);
            for (register, a) in a.iter().enumerate() {
                let row = group + 8 * (register % 2);
                for (half, value) in self.factors(0, word(a, warp * LANES + lane)).into_iter().enumerate() {
                    rows[self.depth_of(thread, register / 2, half)][row] = value.abs();
                }
            }
            for (register, b) in b.iter().enumerate() {
                for (half, value) in self.factors(1, word(b, warp * LANES + lane)).into_iter().enumerate() {
                    columns[self.depth_of(thread, register, half)][group] = value.abs();
                }
            }
        }
        let mut sums = [[0.0; COLUMNS]; ROWS];
        for (a, b) in rows.iter().zip(&columns) {
            for (sums, a) in sums.iter_mut().zip(a) {
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += a * b;
                }
            }
        }
        sums
    }

    /// Position along the depth of an element of an operand: registers follow each other every 16 of 8-bit elements, every 8
    /// of 16-bit ones, and every 4 of `tf32`.
    const fn depth_of(self, thread: usize, step: usize, part: usize) -> usize {
        match self.operand {
            Type::Tf32 => thread + 4 * step,
            Type::U32 => 4 * thread + part + 16 * step,
            _ => 2 * thread + part + 8 * step,
        }
    }

    /// The factors in a word of the left operand, or of the right one.
    fn factors(self, side: usize, word: u32) -> Vec<f64> {
        match self.fp8 {
            Some(types) => word.to_le_bytes().map(|code| fp8_value(types[side], code)).to_vec(),
            None => elements(self.operand, word),
        }
    }

    /// Row and column of an element of the accumulator.
    const fn accumulator(self, lane: usize, register: usize, half: usize) -> (usize, usize) {
        let (group, thread) = (lane / 4, lane % 4);
        if matches!(self.accumulate, Type::F16x2) {
            (group + 8 * register, 2 * thread + half)
        } else {
            (group + 8 * (register / 2), 2 * thread + register % 2)
        }
    }
}

/// The value of an 8-bit float: `f16` with fewer fraction bits, and for e4m3 with a smaller exponent bias.
fn fp8_value(ty: Fp8, code: u8) -> f64 {
    let (sign, magnitude) = (u16::from(code & 0x80) << 8, u16::from(code & 0x7f));
    match ty {
        Fp8::E4m3 if magnitude == 0x7f => f64::NAN,
        Fp8::E4m3 => 256.0 * f64::from(f16::from_bits(sign | magnitude << 7).to_f32_const()),
        Fp8::E5m2 => f64::from(f16::from_bits(sign | magnitude << 8).to_f32_const()),
    }
}

fn word(bytes: &[u8], index: usize) -> u32 {
    let bytes = &bytes[4 * index..][..4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// The numbers in a word, as the tensor core reads them.
fn elements(ty: Type, word: u32) -> Vec<f64> {
    match pair_element(ty) {
        Some(Type::F16) => halves(word).map(|bits| f64::from(f16::from_bits(bits).to_f32_const())).to_vec(),
        Some(_) => halves(word).map(|bits| f64::from(bf16::from_bits(bits).to_f32_const())).to_vec(),
        None if ty == Type::Tf32 => vec![f64::from(f32::from_bits(word & 0xffff_e000))],
        None => vec![f64::from(f32::from_bits(word))],
    }
}

const fn halves(word: u32) -> [u16; 2] {
    [word as u16, (word >> 16) as u16]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::conformance::{Executor, SimExecutor, Tolerance, cases};
    use flashcore_ir::Arch;

    /// No sum is larger than the sum of the magnitudes of its terms. With terms that differ by powers of two, positions
    /// that are not those of the simulator would be found out.
    #[test]
    fn magnitudes_bound_what_the_simulator_computes() {
        let mut judged = 0;
        for case in cases() {
            let Tolerance::Sum { products, .. } = case.tolerance else { continue };
            if !case.name.ends_with("wide") {
                continue;
            }
            let inputs = case.input_bytes(0);
            let kernel = case.verified(Arch::Sm90).expect("it keeps the rules");
            let outputs = SimExecutor::default().execute_case(&case, &kernel, &inputs).expect("it runs");
            let mut closest = 0.0f64;
            for (magnitudes, output) in products.magnitudes(&inputs).iter().zip(&outputs) {
                for (thread, magnitudes) in magnitudes.iter().enumerate() {
                    let sum = elements(products.accumulate, word(output, thread))[0].abs();
                    assert!(sum <= magnitudes[0] * 1.001, "{}: {sum} of {}", case.name, magnitudes[0]);
                    closest = closest.max(sum / magnitudes[0]);
                }
            }
            assert!(closest > 0.99, "{}: no sum comes near {closest}", case.name);
            judged += 1;
        }
        assert_eq!(judged, 10);
    }
}
