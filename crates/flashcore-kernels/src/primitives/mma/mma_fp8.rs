//! `mma.sync` m16n8k32 of 8-bit floats: query, key and value are multiplied as they are, from `sm_89` on.
//!
//! A lane with group `g` and member `t` holds in each register four adjacent depths, `4t` to `4t + 3` of 16: of A
//! those of row `g` or `g + 8`, of B those of column `g`. Nothing is exchanged between lanes:
//!
//! * Of Q and K, `ldmatrix` gives a lane four adjacent columns of its row: the operands as they are.
//! * Of P, a lane has keys `2t` and `2t + 1` of each 8. The order of keys in a sum does not matter if P and V have the same, so
//!   the depths `4t` to `4t + 3` of 16 keys stand for keys `2t`, `2t + 1`, `2t + 8` and `2t + 9`.
//! * Of V, transposed as 16-bit elements, a lane gets columns `2g` and `2g + 1` of keys `2t` and `2t + 1`. Two byte permutes
//!   of two such registers are the even and the odd column of the four keys. One tile of results has the even columns of
//!   each 16, the next the odd ones, as in products with 16-bit weights ([`adjacent_columns`]).
//!
//! Tensor cores that have the instruction may keep few bits when they add 8-bit products. There P · V is added up in two
//! levels: the product of a block of keys starts at zero, for 16 columns at a time, and is added to the output in `f32`. On
//! `sm_90` the instruction is itself such a level ([`Arch::has_fp8_mma`](flashcore_ir::Arch::has_fp8_mma)): ptxas makes two
//! products of `f16` out of it, which start at zero, and adds them to the accumulator in `f32`.

use flashcore_ir::types::{F16x2, F32, U32};
use flashcore_ir::{Builder, Fp8, Reg};

#[cfg(doc)]
use super::fp8::adjacent_columns;
use super::fragment::{Accumulator, FragmentA, OperandA};
use crate::primitives::{MMA_N, SharedOperand};

/// Depth of a product.
const DEPTH: u32 = 32;
/// Keys of a block of `ldmatrix`: half the depth.
const BLOCK_KEYS: u32 = 16;
/// Columns of a block of `ldmatrix`.
const BLOCK_COLUMNS: u32 = 32;
/// Columns of one of its matrices.
const MATRIX_COLUMNS: u32 = 16;
/// The most registers of an output whose products may all be there at a time.
const MOST_UNORDERED_REGISTERS: u32 = 64;
/// Selectors of the bytes of even and of odd columns.
const PARITIES: [u32; 2] = [0x6420, 0x7531];

/// Fragments of A of 8-bit floats.
#[derive(Debug, Clone, Copy)]
pub struct E4m3;

impl FragmentA for E4m3 {
    type Register = U32;
    const DEPTH: u32 = DEPTH;

    fn load(k: &mut Builder, a: SharedOperand, by_column: &[Reg<U32>], step: u32) -> [Reg<U32>; 4] {
        load_words(k, a, by_column, 0, step * DEPTH)
    }

    /// Results that e4m3 has no room for become its largest number.
    fn round(k: &mut Builder, results: &[[Reg<F32>; 4]]) -> [Reg<U32>; 4] {
        core::array::from_fn(|index| {
            // Two tiles are the depths of a register, and two elements of each those of a row.
            let (first, row) = (index / 2 * 2, index % 2 * 2);
            let Some([left, right]) = results.get(first..first + 2) else { return k.copy(0u32) };
            let [low, high] = [left, right].map(|elements| k.fp8_pair(Fp8::E4m3, elements[row], elements[row + 1]));
            let joined = k.register();
            k.join_halves_to(joined, low, high);
            joined
        })
    }
}

/// The four matrices of a block, as words.
fn load_words(
    k: &mut Builder,
    operand: SharedOperand,
    by_column: &[Reg<U32>],
    outer: u32,
    depth: u32,
) -> [Reg<U32>; 4] {
    operand.load::<F16x2>(k, by_column, outer, depth).map(|matrix| k.reinterpret::<F16x2, U32>(matrix))
}

/// Adds `A · B` to `results`; B is K-major, of 8-bit floats of type `ty`.
pub fn multiply_e4m3_k_major(
    k: &mut Builder,
    ty: Fp8,
    results: &Accumulator,
    a: &OperandA<'_, E4m3>,
    b: SharedOperand,
) {
    let (a_by_column, by_column) = (a.by_column(k), b.by_column(k));
    let tiles = results.m_tiles.first().map_or(0, Vec::len);
    for step in 0..a.steps() {
        let lefts = a.step(k, &a_by_column, step);
        for tile in (0..tiles).step_by(2) {
            let matrices = load_words(k, b, &by_column, tile as u32 * MMA_N, step * DEPTH);
            for (tile, right) in (tile..).zip([[matrices[0], matrices[1]], [matrices[2], matrices[3]]]) {
                for (left, tiles) in lefts.iter().zip(&results.m_tiles) {
                    k.mma_fp8([Fp8::E4m3, ty], &tiles[tile], left, &right);
                }
            }
        }
    }
}

/// Adds `A · B` to `output`, whose tiles have even and odd columns of each 16 in turn; B is MN-major, of 8-bit floats of type
/// `ty`. In two levels there are products of their own of 16 columns at a time, and `promote` adds each element to that of
/// `output`, given its row among those of the lane.
pub fn multiply_e4m3_mn_major(
    k: &mut Builder,
    ty: Fp8,
    output: &Accumulator,
    a: &OperandA<'_, E4m3>,
    b: SharedOperand,
    mut promote: Option<impl FnMut(&mut Builder, usize, Reg<F32>, Reg<F32>)>,
) {
    let steps: Vec<_> = (0..a.steps()).map(|step| a.step(k, &[], step)).collect();
    let by_column = b.by_column(k);
    let columns = output.m_tiles.first().map_or(0, Vec::len) as u32 * MMA_N;
    let output_registers = output.m_tiles.len() as u32 * columns / 2;
    for column in (0..columns).step_by(BLOCK_COLUMNS as usize) {
        if promote.is_some() && column > 0 && output_registers > MOST_UNORDERED_REGISTERS {
            // ptxas would start all products before it adds the first to the output, and have no registers for them.
            k.warp_sync();
        }
        let blocks: Vec<_> = (0..a.columns())
            .step_by(BLOCK_KEYS as usize)
            .map(|key| load_words(k, b, &by_column, column, key))
            .collect();
        for (matrix, column) in
            (column..columns.min(column + BLOCK_COLUMNS)).step_by(MATRIX_COLUMNS as usize).enumerate()
        {
            let first_tile = (column / MMA_N) as usize;
            let product = match promote {
                Some(_) => Accumulator::zero(k, output.m_tiles.len() as u32, MATRIX_COLUMNS),
                None => Accumulator {
                    m_tiles: output
                        .m_tiles
                        .iter()
                        .map(|tiles| tiles[first_tile..][..PARITIES.len()].to_vec())
                        .collect(),
                },
            };
            for (lefts, blocks) in steps.iter().zip(blocks.chunks(2)) {
                for (parity, bytes) in PARITIES.into_iter().enumerate() {
                    // Of each 16 columns, the matrices of the first and of the last 8 keys.
                    let right = [0, 1].map(|half| match blocks.get(half) {
                        Some(words) => k.permute(words[2 * matrix], words[2 * matrix + 1], bytes),
                        None => k.copy(0u32),
                    });
                    for (left, product) in lefts.iter().zip(&product.m_tiles) {
                        k.mma_fp8([Fp8::E4m3, ty], &product[parity], left, &right);
                    }
                }
            }
            let Some(promote) = &mut promote else { continue };
            k.section("promote", |k| {
                for (m_tile, (product, output)) in product.m_tiles.iter().zip(&output.m_tiles).enumerate() {
                    for (product, output) in product.iter().zip(&output[first_tile..]) {
                        for (index, (product, element)) in product.iter().zip(output).enumerate() {
                            promote(k, 2 * m_tile + index / 2, *element, *product);
                        }
                    }
                }
            });
        }
    }
}
