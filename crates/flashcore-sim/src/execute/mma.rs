//! Tensor cores: `mma.sync` and its fragment layouts.
//!
//! Lane `l` is thread `t = l % 4` of group `g = l / 4`. Of an operand of 16-bit elements, register `r` of A holds row
//! `g + 8(r % 2)`, columns `2t + 8(r / 2)` and the next; register `r` of B holds rows `2t + 8r` and the next of column
//! `g`. Of `tf32`, register `r` of A holds row `g + 8(r % 2)`, column `t + 4(r / 2)`, and register `r` of B row `t + 4r`
//! of column `g`. Of 8-bit floats, register `r` of A holds row `g + 8(r % 2)`, columns `4t + 16(r / 2)` and the next three,
//! and register `r` of B rows `4t + 16r` and the next three of column `g`. The accumulator has rows `g` and `g + 8`, columns `2t` and the next.
//!
//! Products are exact. How they are summed in `f32` is a [`TensorSum`]; in `f16` they are summed in `f64` from the
//! accumulator on, in order of the depth, and rounded once, to nearest even.

use flashcore_ir::{Arch, Fp8, MmaShape, RegisterId, Type};

use crate::error::Stop;
use crate::fp8;
use crate::numeric::{Bf16, F16, Half, TF32_MASK, canonical, join, split};
use crate::state::registers::{ALL, Registers};
use crate::tensor_sum::{Factor, TensorSum};

const ROWS: usize = 16;
const COLUMNS: usize = 8;
const MOST_DEPTH: usize = 32;

/// An operation of the tensor core.
pub(crate) struct Mma<'a> {
    pub(crate) shape: MmaShape,
    pub(crate) operand: Type,
    pub(crate) accumulate: Type,
    pub(crate) d: &'a [RegisterId],
    pub(crate) a: &'a [RegisterId],
    pub(crate) b: &'a [RegisterId],
    pub(crate) c: &'a [RegisterId],
}

type Accumulator = [[f64; COLUMNS]; ROWS];

/// The operands as matrices: A by rows, and B by rows, of which the depth is used.
struct Operands {
    a: [[f32; MOST_DEPTH]; ROWS],
    b: [[f64; COLUMNS]; MOST_DEPTH],
}

impl Operands {
    /// Replaces each element of the accumulator, given itself and its products in order of the depth.
    fn each_element(&self, sums: &mut Accumulator, add: impl Fn(f32, Products<'_>) -> f32) {
        for (row, sums) in self.a.iter().zip(sums) {
            for (column, element) in sums.iter_mut().enumerate() {
                *element = add(*element as f32, Products { row, b: &self.b, column, depth: 0 }).into();
            }
        }
    }
}

/// The factors of the products of an element.
#[derive(Clone)]
struct Products<'a> {
    row: &'a [f32; MOST_DEPTH],
    b: &'a [[f64; COLUMNS]; MOST_DEPTH],
    column: usize,
    depth: usize,
}

impl Iterator for Products<'_> {
    type Item = (f64, f64);

    fn next(&mut self) -> Option<Self::Item> {
        let a = *self.row.get(self.depth)?;
        self.depth += 1;
        Some((a.into(), self.b[self.depth - 1][self.column]))
    }
}

/// `d = a · b + c`.
pub(crate) fn mma(registers: &mut Registers<'_>, mma: &Mma<'_>, sum: TensorSum) -> Result<(), Stop> {
    let no_such_form = || {
        let Mma { shape, operand, accumulate, .. } = mma;
        Stop::no_such_form("Mma", format_args!("{shape} of {operand} in {accumulate}"))
    };
    let operands = match mma.operand {
        Type::F16x2 => halves::<F16>(registers, mma),
        Type::Bf16x2 => halves::<Bf16>(registers, mma),
        Type::Tf32 => singles(registers, mma),
        Type::Pred | Type::U16 | Type::F16 | Type::Bf16 | Type::U32 | Type::S32 | Type::F32 | Type::U64 | Type::S64 => {
            return Err(no_such_form());
        }
    };
    let mut sums: Accumulator = [[0.0; COLUMNS]; ROWS];
    match mma.accumulate {
        Type::F32 => {
            for (register, &c) in mma.c.iter().enumerate() {
                for (lane, &bits) in registers.word_of(c).iter().enumerate() {
                    let (row, column) = single_position(lane, register);
                    sums[row][column] = f32::from_bits(bits).into();
                }
            }
        }
        Type::F16x2 => {
            for (register, &c) in mma.c.iter().enumerate() {
                for (lane, &bits) in registers.word_of(c).iter().enumerate() {
                    for (half, bits) in split(bits).into_iter().enumerate() {
                        sums[lane / 4 + 8 * register][2 * (lane % 4) + half] = F16::decode(bits).into();
                    }
                }
            }
        }
        Type::Pred
        | Type::U16
        | Type::F16
        | Type::Bf16
        | Type::U32
        | Type::S32
        | Type::Tf32
        | Type::Bf16x2
        | Type::U64
        | Type::S64 => return Err(no_such_form()),
    }
    let depth = mma.shape.depth() as usize;
    match (sum, mma.accumulate) {
        (TensorSum::Truncating { .. }, Type::F32) => {
            truncate(sum, &operands, ([Factor::of(mma.operand); 2], depth), &mut sums);
        }
        _ => multiply(&operands, depth, &mut sums),
    }
    for (register, &d) in mma.d.iter().enumerate() {
        let words = core::array::from_fn(|lane| {
            if mma.accumulate == Type::F32 {
                let (row, column) = single_position(lane, register);
                canonical(sums[row][column] as f32)
            } else {
                join([0, 1].map(|half| F16::encode(sums[lane / 4 + 8 * register][2 * (lane % 4) + half])))
            }
        });
        registers.set_word(d, ALL, &words);
    }
    Ok(())
}

/// The element of the accumulator that register `register` of a lane holds in `f32`.
fn single_position(lane: usize, register: usize) -> (usize, usize) {
    (lane / 4 + 8 * (register / 2), 2 * (lane % 4) + register % 2)
}

fn halves<H: Half>(registers: &Registers<'_>, mma: &Mma<'_>) -> Operands {
    let mut operands = Operands { a: [[0.0; MOST_DEPTH]; ROWS], b: [[0.0; COLUMNS]; MOST_DEPTH] };
    for (register, &a) in mma.a.iter().enumerate() {
        for (lane, &word) in registers.word_of(a).iter().enumerate() {
            let (group, thread) = (lane / 4, lane % 4);
            let [low, high] = split(word);
            let row = &mut operands.a[group + 8 * (register % 2)];
            let column = 2 * thread + 8 * (register / 2);
            row[column] = H::decode(low);
            row[column + 1] = H::decode(high);
        }
    }
    for (register, &b) in mma.b.iter().enumerate() {
        for (lane, &word) in registers.word_of(b).iter().enumerate() {
            let (group, thread) = (lane / 4, lane % 4);
            let [low, high] = split(word);
            let row = 2 * thread + 8 * register;
            operands.b[row][group] = H::decode(low).into();
            operands.b[row + 1][group] = H::decode(high).into();
        }
    }
    operands
}

fn singles(registers: &Registers<'_>, mma: &Mma<'_>) -> Operands {
    let mut operands = Operands { a: [[0.0; MOST_DEPTH]; ROWS], b: [[0.0; COLUMNS]; MOST_DEPTH] };
    for (register, &a) in mma.a.iter().enumerate() {
        for (lane, &bits) in registers.word_of(a).iter().enumerate() {
            let (group, thread) = (lane / 4, lane % 4);
            operands.a[group + 8 * (register % 2)][thread + 4 * (register / 2)] = f32::from_bits(bits & TF32_MASK);
        }
    }
    for (register, &b) in mma.b.iter().enumerate() {
        for (lane, &bits) in registers.word_of(b).iter().enumerate() {
            let (group, thread) = (lane / 4, lane % 4);
            operands.b[thread + 4 * register][group] = f32::from_bits(bits & TF32_MASK).into();
        }
    }
    operands
}

fn multiply(operands: &Operands, depth: usize, sums: &mut Accumulator) {
    for (row, sums) in operands.a.iter().zip(sums) {
        for (a, b) in row.iter().zip(&operands.b).take(depth) {
            let a = f64::from(*a);
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
}

/// Sums as hardware does, element by element.
fn truncate(sum: TensorSum, operands: &Operands, (factors, depth): ([Factor; 2], usize), sums: &mut Accumulator) {
    operands.each_element(sums, |start, products| sum.add(factors, start, products.take(depth)));
}

/// Sums 8-bit floats as Hopper does ([`Arch::has_fp8_mma`]): as `f16`, in two steps from zero, and the accumulator in `f32`.
fn truncate_as_f16(sum: TensorSum, operands: &Operands, sums: &mut Accumulator) {
    let factors = [Factor::of(Type::F16x2); 2];
    operands.each_element(sums, |start, products| {
        let of = |upper: bool| {
            let step = products.clone().enumerate().filter(move |(depth, _)| (depth % 4 >= 2) == upper);
            step.map(|(_, product)| product)
        };
        let lower = sum.add(factors, 0.0, of(false));
        start + sum.add(factors, lower, of(true))
    });
}

/// An operation of the tensor core on 8-bit floats.
pub(crate) struct MmaFp8<'a> {
    pub(crate) types: [Fp8; 2],
    pub(crate) d: &'a [RegisterId],
    pub(crate) a: &'a [RegisterId],
    pub(crate) b: &'a [RegisterId],
    pub(crate) c: &'a [RegisterId],
}

/// `d = a · b + c` of 8-bit floats, 16 × 8 × 32.
pub(crate) fn mma_fp8(registers: &mut Registers<'_>, mma: &MmaFp8<'_>, sum: TensorSum, arch: Arch) {
    let [left, right] = mma.types;
    let mut operands = Operands { a: [[0.0; MOST_DEPTH]; ROWS], b: [[0.0; COLUMNS]; MOST_DEPTH] };
    for (register, &a) in mma.a.iter().enumerate() {
        for (lane, &word) in registers.word_of(a).iter().enumerate() {
            let row = &mut operands.a[lane / 4 + 8 * (register % 2)];
            for (byte, code) in word.to_le_bytes().into_iter().enumerate() {
                row[4 * (lane % 4) + 16 * (register / 2) + byte] = fp8::decode(left, code);
            }
        }
    }
    for (register, &b) in mma.b.iter().enumerate() {
        for (lane, &word) in registers.word_of(b).iter().enumerate() {
            for (byte, code) in word.to_le_bytes().into_iter().enumerate() {
                operands.b[4 * (lane % 4) + 16 * register + byte][lane / 4] = fp8::decode(right, code).into();
            }
        }
    }
    let mut sums: Accumulator = [[0.0; COLUMNS]; ROWS];
    for (register, &c) in mma.c.iter().enumerate() {
        for (lane, &bits) in registers.word_of(c).iter().enumerate() {
            let (row, column) = single_position(lane, register);
            sums[row][column] = f32::from_bits(bits).into();
        }
    }
    match sum {
        TensorSum::Exact => multiply(&operands, MOST_DEPTH, &mut sums),
        TensorSum::Truncating { .. } if arch.has_fp8_mma() => {
            truncate(sum, &operands, (mma.types.map(Factor::of_fp8), MOST_DEPTH), &mut sums);
        }
        TensorSum::Truncating { .. } => truncate_as_f16(sum, &operands, &mut sums),
    }
    for (register, &d) in mma.d.iter().enumerate() {
        let words = core::array::from_fn(|lane| {
            let (row, column) = single_position(lane, register);
            canonical(sums[row][column] as f32)
        });
        registers.set_word(d, ALL, &words);
    }
}
