//! `f32` products on tensor cores: `mma.sync` m16n8k8 of `tf32`, which has the exponent of `f32` and 10 of its 23 fraction bits.
//!
//! With [`Tf32Products::Three`] (3xTF32) each operand is the sum of two `tf32`, `x = high + low`, and a product is
//! `high * high + low * high + high * low`: what is missing, `low * low` and the last bit of some `low`, is near a rounding
//! of `f32`. With [`Tf32Products::One`] an operand is rounded to `tf32`, as `f16` has it, and that is all.
//!
//! Tensor cores cut sums off and do not round them (`TensorSum` of the simulator): a long chain of `mma`s pulls its sum
//! towards zero, by up to a unit in the last place of `f32` each. So chains are [`CHAIN`] steps long, the products with
//! `low` have a chain of their own, and chains are added up by ordinary additions, which round to nearest.
//!
//! A lane with group `g = lane / 4` and member `t = lane % 4` holds of A rows `g` and `g + 8`, columns `t`
//! and `t + 4`, of B rows `t` and `t + 4` of column `g`: what `ldmatrix` gives when it moves a row of four
//! `f32` as eight 16-bit elements, for Q and for K. P has columns `2t` and `2t + 1` in a lane. The order of keys in a sum
//! does not matter, so column `t` of A is key `2t`, column `t + 4` is key `2t + 1`, and the rows of V are
//! loaded in the same order ([`ValueWords`]): nothing is exchanged between lanes.

use core::ops::Range;

use flashcore_ir::types::{F32, Tf32, U32};
use flashcore_ir::{Builder, Compare, MmaShape, Reg, SharedAddress};

use super::fragment::{Accumulator, FragmentA, OperandA};
use crate::primitives::{FragmentPosition, MMA_N, SharedLayout, SharedOperand, SharedTile};

/// Depth of a product.
const DEPTH: u32 = 8;
/// Depth steps that are summed in the tensor core before their sum is added to the result.
const CHAIN: u32 = 4;
/// Tiles of 16 × 8 results that are multiplied at a time: as many as hide the latency of a chain, and half as many beside
/// outputs that take most registers.
const TILES_AT_A_TIME: usize = 4;
/// Tiles of results of a warp from which on they take most registers.
const MANY_TILES: usize = 16;
/// Bits of an `f32` that are not part of a `tf32`.
const REST_BITS: u32 = 0x1fff;
/// Bytes of an `f32`, and of those in a chunk.
const WORD_BYTES: u32 = 4;
const CHUNK_WORDS: u32 = 4;
const CHUNK_BYTES: u32 = WORD_BYTES * CHUNK_WORDS;

/// Products of `tf32` that make up one of `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tf32Products {
    /// One product of rounded operands (1xTF32): relative error 2^-11 of each operand, like `f16`.
    One,
    /// Three products of split operands (3xTF32): error near that of `f32`.
    Three,
}

/// Registers of an operand, split: `value = high + low`.
#[derive(Debug, Clone)]
struct Split<const COUNT: usize> {
    high: [Reg<Tf32>; COUNT],
    low: Option<[Reg<Tf32>; COUNT]>,
}

impl<const COUNT: usize> Split<COUNT> {
    fn of(k: &mut Builder, products: Tf32Products, values: [Reg<F32>; COUNT]) -> Self {
        let high = values.map(|value| k.f32_to_tf32(value));
        if products == Tf32Products::One {
            return Self { high, low: None };
        }
        let mut index = 0;
        let low = values.map(|value| {
            let bits = k.reinterpret::<Tf32, U32>(high[index]);
            index += 1;
            // The manual leaves open what a conversion to `tf32` puts into the bits that tensor cores ignore.
            let bits = k.and(bits, !REST_BITS);
            let rounded = k.reinterpret::<U32, F32>(bits);
            let rest = k.sub(value, rounded);
            k.f32_to_tf32(rest)
        });
        Self { high, low: Some(low) }
    }
}

impl FragmentA for Tf32 {
    type Register = F32;
    const DEPTH: u32 = DEPTH;

    fn load(k: &mut Builder, a: SharedOperand, by_column: &[Reg<U32>], step: u32) -> [Reg<F32>; 4] {
        a.load::<Tf32>(k, by_column, 0, step * DEPTH).map(|matrix| k.reinterpret(matrix))
    }

    /// In the order of [`ValueWords`], and not rounded: column `t` is result `2t`, column `t + 4` is result `2t + 1`.
    fn round(_: &mut Builder, results: &[[Reg<F32>; 4]]) -> [Reg<F32>; 4] {
        let results = results[0];
        [results[0], results[2], results[1], results[3]]
    }
}

impl OperandA<'_, Tf32> {
    /// The fragment of a depth step of 16 rows, split.
    fn split(
        &self,
        k: &mut Builder,
        products: Tf32Products,
        by_column: &[Vec<Reg<U32>>],
        (m_tile, step): (usize, u32),
    ) -> Split<4> {
        let values = self.fragment(k, by_column, m_tile, step);
        Split::of(k, products, values)
    }
}

/// Adds `A · B` to `results`; B is K-major.
pub fn multiply_tf32_k_major(
    k: &mut Builder,
    products: Tf32Products,
    results: &Accumulator,
    a: &OperandA<'_, Tf32>,
    b: SharedOperand,
) {
    let (a_by_column, by_column) = (a.by_column(k), b.by_column(k));
    multiply_add(
        k,
        results,
        a.steps(),
        |k, step| (0..a.m_tiles()).map(|m_tile| a.split(k, products, &a_by_column, (m_tile, step))).collect(),
        // Two tiles of results have a block of 16 columns.
        |k, step, tiles| {
            let mut all = Vec::new();
            for tile in tiles.step_by(2) {
                let matrices = b.load::<Tf32>(k, &by_column, tile as u32 * MMA_N, step * DEPTH);
                for pair in matrices.chunks_exact(2) {
                    let values = [0, 1].map(|index| k.reinterpret(pair[index]));
                    all.push(Split::of(k, products, values));
                }
            }
            all
        },
    );
}

/// Adds `A · B` to `results`, whose columns are those of the tile; B is MN-major.
pub fn multiply_tf32_mn_major(
    k: &mut Builder,
    products: Tf32Products,
    results: &Accumulator,
    a: &OperandA<'_, Tf32>,
    b: ValueWords,
) {
    let by_column = b.by_column(k);
    let steps = 0..a.steps();
    let m_tiles: Vec<Vec<Split<4>>> = (0..a.m_tiles())
        .map(|m_tile| steps.clone().map(|step| a.split(k, products, &[], (m_tile, step))).collect())
        .collect();
    multiply_add(
        k,
        results,
        a.steps(),
        |_, step| m_tiles.iter().map(|steps| steps[step as usize].clone()).collect(),
        |k, step, tiles| {
            let mut all = Vec::new();
            for tile in tiles {
                let words = b.load(k, &by_column, step * DEPTH, tile as u32 * MMA_N);
                all.push(Split::of(k, products, words));
            }
            all
        },
    );
}

/// Sums of a chain for one tile of results.
struct Sums {
    high: [Reg<F32>; 4],
    /// The products with a `low`.
    low: Option<[Reg<F32>; 4]>,
}

/// Adds the product of two operands to `results`, in chains. `left` gives the fragments of a step for each 16 rows, `right`
/// those of a step for each of some tiles of 8 columns.
fn multiply_add(
    k: &mut Builder,
    results: &Accumulator,
    steps: u32,
    mut left: impl FnMut(&mut Builder, u32) -> Vec<Split<4>>,
    mut right: impl FnMut(&mut Builder, u32, Range<usize>) -> Vec<Split<2>>,
) {
    let columns = results.m_tiles.first().map_or(0, Vec::len);
    let m_tiles = results.m_tiles.len().max(1);
    let at_a_time = if m_tiles * columns >= MANY_TILES { TILES_AT_A_TIME / 2 } else { TILES_AT_A_TIME };
    // Keys are loaded for two tiles of scores at a time.
    let at_a_time = (at_a_time / m_tiles).max(2);
    for first in (0..columns).step_by(at_a_time) {
        let tiles = first..columns.min(first + at_a_time);
        for chain in (0..steps).step_by(CHAIN as usize) {
            let mut sums: Vec<Vec<Sums>> = Vec::new();
            for step in chain..steps.min(chain + CHAIN) {
                let (lefts, rights) = (left(k, step), right(k, step, tiles.clone()));
                if sums.is_empty() {
                    sums = lefts.iter().map(|left| rights.iter().map(|_| zero(k, left)).collect()).collect();
                }
                for (left, sums) in lefts.iter().zip(&sums) {
                    for (right, sums) in rights.iter().zip(sums) {
                        multiply(k, sums, left, right);
                    }
                }
            }
            for (sums, results) in sums.iter().zip(&results.m_tiles) {
                for (sums, results) in sums.iter().zip(&results[tiles.clone()]) {
                    add(k, sums, results);
                }
            }
        }
    }
}

fn zero(k: &mut Builder, left: &Split<4>) -> Sums {
    let mut zeros = || core::array::from_fn(|_| k.copy(0.0f32));
    let high = zeros();
    Sums { high, low: left.low.as_ref().map(|_| zeros()) }
}

fn multiply(k: &mut Builder, sums: &Sums, left: &Split<4>, right: &Split<2>) {
    const SHAPE: MmaShape = MmaShape::M16N8K8;
    if let (Some(sums), Some(left_low), Some(right_low)) = (&sums.low, &left.low, &right.low) {
        k.mma(SHAPE, sums, left_low, &right.high);
        k.mma(SHAPE, sums, &left.high, right_low);
    }
    k.mma(SHAPE, &sums.high, &left.high, &right.high);
}

/// Adds the sums of a chain to the results.
fn add(k: &mut Builder, sums: &Sums, results: &[Reg<F32>; 4]) {
    for (index, result) in results.iter().enumerate() {
        let high = sums.high[index];
        let sum = match sums.low {
            None => high,
            Some(low) => {
                // The rest of an infinity is a NaN, which must not reach a sum that is infinite rightly.
                let magnitude = k.abs(high);
                let is_finite = k.compare(Compare::Lt, magnitude, f32::INFINITY);
                let rest = k.select(is_finite, low[index], 0.0f32);
                k.add(high, rest)
            }
        };
        k.add_to(*result, sum);
    }
}

/// The words of V that a lane loads: rows `2t` and `2t + 1` of a step's eight keys, column `g` of a tile's eight.
///
/// The 32 lanes of a load have four rows, two apart, and eight columns: 32 different banks in the swizzled layout, whose
/// rows are 128 bytes long, and in the padded one.
#[derive(Debug, Clone, Copy)]
pub struct ValueWords {
    tile: SharedTile,
    /// The address of row `2t`, column `g`.
    first: Reg<U32>,
}

impl ValueWords {
    /// The words of a lane in a tile; `base` is the address of shared memory.
    pub fn new(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self {
        let FragmentPosition { group, member } = FragmentPosition::new(k, lane);
        let row = k.shl(member, 1u32);
        let chunk = k.shr(group, CHUNK_WORDS.ilog2());
        let word = k.and(group, CHUNK_WORDS - 1);
        let chunk = tile.chunk_address(k, base, row, chunk);
        Self { tile, first: k.mad(word, WORD_BYTES, chunk) }
    }

    /// The words in the stage that is `bytes` further on.
    pub(crate) fn in_stage(self, k: &mut Builder, bytes: Reg<U32>) -> Self {
        Self { first: k.add(self.first, bytes), ..self }
    }

    /// Base registers for the even and the odd row, for each eight columns of a panel.
    fn by_column(self, k: &mut Builder) -> Vec<[Reg<U32>; 2]> {
        let columns = 0..self.tile.panel_columns() / MMA_N;
        match self.tile.layout {
            SharedLayout::Plain | SharedLayout::Padded => columns.map(|_| [self.first; 2]).collect(),
            // The next row exchanges each chunk with its neighbour.
            SharedLayout::Swizzled => k.section("swizzle", |k| {
                let both = columns.map(|column| {
                    let even = match column {
                        0 => self.first,
                        _ => k.xor(self.first, column * MMA_N * WORD_BYTES),
                    };
                    [even, k.xor(even, CHUNK_BYTES)]
                });
                both.collect()
            }),
        }
    }

    /// Loads the words of eight keys from `key` on and eight columns from `column` on, both multiples of 8.
    fn load(self, k: &mut Builder, by_column: &[[Reg<U32>; 2]], key: u32, column: u32) -> [Reg<F32>; 2] {
        let (panel, within) = (column / self.tile.panel_columns(), column % self.tile.panel_columns());
        let beside = match self.tile.layout {
            SharedLayout::Swizzled => 0,
            SharedLayout::Plain | SharedLayout::Padded => within * WORD_BYTES,
        };
        let row_bytes = self.tile.row_bytes();
        let offset = key * row_bytes + self.tile.panel_step(panel) + beside;
        let [even, odd] = by_column[(within / MMA_N) as usize];
        [(even, offset), (odd, offset + row_bytes)]
            .map(|(base, offset)| k.load_shared::<F32>(SharedAddress::from(base).plus(offset as i32), 1)[0])
    }
}
