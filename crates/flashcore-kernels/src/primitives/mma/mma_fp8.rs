//! `mma.sync` m16n8k32 of 8-bit floats: query, key and value are multiplied as they are, from `sm_89` on.
//!
//! A lane with group `g` and member `t` holds in each register four adjacent depths, `4t` to `4t + 3` of 16: of the left
//! operand those of row `g` or `g + 8`, of the right operand those of column `g`. Nothing is exchanged between lanes:
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
use super::fragment::Accumulator;
use crate::primitives::{MMA_N, TileAddresses};

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

/// Q as the left operand of products of 8-bit floats.
#[derive(Debug, Clone)]
pub enum E4m3Query {
    /// In registers: for each 16 rows, the fragments of each depth step.
    Registers(Vec<Vec<[Reg<U32>; 4]>>),
    /// In shared memory: for each 16 rows their addresses, and the number of columns.
    Shared(Vec<TileAddresses>, u32),
}

impl E4m3Query {
    /// Loads `columns` columns of the 16 rows that each of `m_tiles` points at.
    pub fn load(k: &mut Builder, m_tiles: &[TileAddresses], columns: u32) -> Self {
        let m_tiles = m_tiles.iter().map(|addresses| {
            let by_column = addresses.by_column(k);
            (0..columns / DEPTH).map(|step| load_block(k, *addresses, &by_column, (0, step * DEPTH), false)).collect()
        });
        Self::Registers(m_tiles.collect())
    }

    fn steps(&self) -> u32 {
        match self {
            Self::Registers(m_tiles) => m_tiles.first().map_or(0, Vec::len) as u32,
            Self::Shared(_, columns) => columns / DEPTH,
        }
    }

    fn by_column(&self, k: &mut Builder) -> Vec<Vec<Reg<U32>>> {
        match self {
            Self::Registers(_) => Vec::new(),
            Self::Shared(m_tiles, _) => m_tiles.iter().map(|addresses| addresses.by_column(k)).collect(),
        }
    }

    fn step(&self, k: &mut Builder, by_column: &[Vec<Reg<U32>>], step: u32) -> Vec<[Reg<U32>; 4]> {
        match self {
            Self::Registers(m_tiles) => m_tiles.iter().map(|m_tile| m_tile[step as usize]).collect(),
            Self::Shared(m_tiles, _) => {
                let m_tiles = m_tiles.iter().zip(by_column);
                m_tiles
                    .map(|(addresses, by_column)| load_block(k, *addresses, by_column, (0, step * DEPTH), false))
                    .collect()
            }
        }
    }
}

/// Four matrices of a block of 16 rows and 32 columns.
fn load_block(
    k: &mut Builder,
    addresses: TileAddresses,
    by_column: &[Reg<U32>],
    (row, column): (u32, u32),
    transposed: bool,
) -> [Reg<U32>; 4] {
    let matrices = k.load_matrix::<F16x2>(addresses.block(by_column, row, column), 4, transposed);
    [0, 1, 2, 3].map(|index| k.reinterpret::<F16x2, U32>(matrices[index]))
}

/// Adds `query * keys` to `scores`; the rows of the tile at `keys` are keys, of 8-bit floats of type `ty`.
pub fn multiply_e4m3_query(k: &mut Builder, ty: Fp8, scores: &Accumulator, query: &E4m3Query, keys: TileAddresses) {
    let (query_by_column, by_column) = (query.by_column(k), keys.by_column(k));
    let key_tiles = scores.m_tiles.first().map_or(0, Vec::len);
    for step in 0..query.steps() {
        let lefts = query.step(k, &query_by_column, step);
        for tile in (0..key_tiles).step_by(2) {
            let matrices = load_block(k, keys, &by_column, (tile as u32 * MMA_N, step * DEPTH), false);
            for (tile, right) in (tile..).zip([[matrices[0], matrices[1]], [matrices[2], matrices[3]]]) {
                for (left, tiles) in lefts.iter().zip(&scores.m_tiles) {
                    k.mma_fp8([Fp8::E4m3, ty], &tiles[tile], left, &right);
                }
            }
        }
    }
}

/// P as the left operand of products of 8-bit floats: weights rounded to e4m3.
#[derive(Debug, Clone)]
pub struct E4m3Weights {
    /// For each 16 rows, the fragments of each 32 keys; the second half of the last is zero where there are 16 keys left.
    m_tiles: Vec<Vec<[Reg<U32>; 4]>>,
    keys: u32,
}

impl E4m3Weights {
    /// Rounds weights, a multiple of 16 columns. Those that e4m3 has no room for become its largest number.
    pub fn round(k: &mut Builder, weights: &Accumulator) -> Self {
        let keys = weights.m_tiles.first().map_or(0, Vec::len) as u32 * MMA_N;
        let m_tiles = weights.m_tiles.iter().map(|tiles| {
            let steps = tiles.chunks(4).map(|tiles| {
                core::array::from_fn(|index| {
                    // Two tiles are the keys of a register, and two elements of each those of a row.
                    let (first, row) = (index / 2 * 2, index % 2 * 2);
                    let Some([left, right]) = tiles.get(first..first + 2) else { return k.copy(0u32) };
                    let [low, high] =
                        [left, right].map(|elements| k.fp8_pair(Fp8::E4m3, elements[row], elements[row + 1]));
                    let joined = k.register();
                    k.join_halves_to(joined, low, high);
                    joined
                })
            });
            steps.collect()
        });
        Self { m_tiles: m_tiles.collect(), keys }
    }
}

/// Multiplies weights by values of 8-bit floats of type `ty`, and adds the products to `output`, whose tiles have even and odd
/// columns of each 16 in turn. In two levels there are products of their own of 16 columns at a time, and `promote` adds each
/// element to that of `output`, given its row among those of the lane.
pub fn multiply_e4m3_weights(
    k: &mut Builder,
    ty: Fp8,
    output: &Accumulator,
    weights: &E4m3Weights,
    values: TileAddresses,
    mut promote: Option<impl FnMut(&mut Builder, usize, Reg<F32>, Reg<F32>)>,
) {
    let by_column = values.by_column(k);
    let columns = output.m_tiles.first().map_or(0, Vec::len) as u32 * MMA_N;
    let output_registers = output.m_tiles.len() as u32 * columns / 2;
    for column in (0..columns).step_by(BLOCK_COLUMNS as usize) {
        if promote.is_some() && column > 0 && output_registers > MOST_UNORDERED_REGISTERS {
            // ptxas would start all products before it adds the first to the output, and have no registers for them.
            k.warp_sync();
        }
        let blocks: Vec<_> = (0..weights.keys)
            .step_by(BLOCK_KEYS as usize)
            .map(|key| load_block(k, values, &by_column, (key, column), true))
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
            for (step, blocks) in blocks.chunks(2).enumerate() {
                for (parity, bytes) in PARITIES.into_iter().enumerate() {
                    // Of each 16 columns, the matrices of the first and of the last 8 keys.
                    let right = [0, 1].map(|half| match blocks.get(half) {
                        Some(words) => k.permute(words[2 * matrix], words[2 * matrix + 1], bytes),
                        None => k.copy(0u32),
                    });
                    for (weights, product) in weights.m_tiles.iter().zip(&product.m_tiles) {
                        k.mma_fp8([Fp8::E4m3, ty], &product[parity], &weights[step], &right);
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
