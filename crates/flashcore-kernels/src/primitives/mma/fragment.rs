//! `mma.sync` fragments: the registers of tensor-core products.
//!
//! A product of 16-bit elements is 16 × 8 with a depth of 16. A lane with group `g = lane / 4` and member `t = lane % 4` holds
//!
//! * of the result, rows `g` and `g + 8`, columns `2t` and `2t + 1`: four `f32`;
//! * of the left operand, the same rows, columns `2t`, `2t + 1`, `2t + 8` and `2t + 9`: four pairs;
//! * of the right operand, rows `2t`, `2t + 1`, `2t + 8` and `2t + 9` of column `g`: two pairs.
//!
//! So two neighbouring results, rounded to pairs, are a left operand as they stand: P goes from QK to PV without leaving
//! its registers.

use flashcore_ir::types::{F16x2, F32, U32};
use flashcore_ir::{Builder, MmaShape, Reg};

use crate::element::Element;
use crate::primitives::{MMA_N, TileAddresses};

/// A left operand in registers: for each 16 rows, one fragment for each depth step.
#[derive(Debug, Clone)]
pub struct LeftFragments<T: Element> {
    m_tiles: Vec<Vec<[Reg<T>; 4]>>,
}

impl<T: Element> LeftFragments<T> {
    /// Loads `columns` columns of the 16 rows that each of `m_tiles` points at.
    pub fn load(k: &mut Builder, m_tiles: &[TileAddresses], columns: u32) -> Self {
        let m_tiles = m_tiles.iter().map(|addresses| {
            let by_column = addresses.by_column(k);
            (0..columns / T::LAYOUT.mma_k()).map(|step| load_left(k, *addresses, &by_column, step)).collect()
        });
        Self { m_tiles: m_tiles.collect() }
    }
}

fn load_left<T: Element>(k: &mut Builder, addresses: TileAddresses, by_column: &[Reg<U32>], step: u32) -> [Reg<T>; 4] {
    let matrices = k.load_matrix(addresses.block(by_column, 0, step * T::LAYOUT.mma_k()), 4, false);
    [matrices[0], matrices[1], matrices[2], matrices[3]]
}

/// A left operand: in registers, or loaded or rounded step by step as it is multiplied.
#[derive(Debug, Clone)]
pub enum LeftOperand<'a, T: Element> {
    /// In registers.
    Registers(LeftFragments<T>),
    /// In shared memory: for each 16 rows their addresses, and the number of columns.
    Shared(Vec<TileAddresses>, u32),
    /// The results of another product, rounded to a P fragment.
    Accumulator(&'a Accumulator),
}

impl<T: Element> LeftOperand<'_, T> {
    /// Depth steps of the product.
    fn steps(&self) -> u32 {
        match self {
            Self::Registers(fragments) => fragments.m_tiles.first().map_or(0, Vec::len) as u32,
            Self::Shared(_, columns) => columns / T::LAYOUT.mma_k(),
            Self::Accumulator(results) => results.m_tiles.first().map_or(0, Vec::len) as u32 / 2,
        }
    }

    fn step(&self, k: &mut Builder, by_column: &[Vec<Reg<U32>>], step: u32) -> Vec<[Reg<T>; 4]> {
        match self {
            Self::Registers(fragments) => fragments.m_tiles.iter().map(|m_tile| m_tile[step as usize]).collect(),
            Self::Shared(m_tiles, _) => {
                let m_tiles = m_tiles.iter().zip(by_column);
                m_tiles.map(|(addresses, by_column)| load_left(k, *addresses, by_column, step)).collect()
            }
            Self::Accumulator(results) => {
                let tile = 2 * step as usize;
                results.m_tiles.iter().map(|tiles| round(k, tiles[tile], tiles[tile + 1])).collect()
            }
        }
    }

    fn by_column(&self, k: &mut Builder) -> Vec<Vec<Reg<U32>>> {
        match self {
            Self::Registers(_) | Self::Accumulator(_) => Vec::new(),
            Self::Shared(m_tiles, _) => m_tiles.iter().map(|addresses| addresses.by_column(k)).collect(),
        }
    }
}

/// Two neighbouring results as a left operand.
fn round<T: Element>(k: &mut Builder, left: [Reg<F32>; 4], right: [Reg<F32>; 4]) -> [Reg<T>; 4] {
    [k.pair(left[0], left[1]), k.pair(left[2], left[3]), k.pair(right[0], right[1]), k.pair(right[2], right[3])]
}

/// A right operand in shared memory, loaded by `ldmatrix` as it is multiplied.
#[derive(Debug, Clone, Copy)]
pub enum RightFragments {
    /// The rows of the tile are the columns of the operand: keys, for scores.
    Transposed(TileAddresses),
    /// The rows of the tile are the rows of the operand: values. `ldmatrix` transposes 16-bit elements only.
    Straight(TileAddresses),
}

/// Accumulator type of the products of one tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// `f32` throughout.
    F32,
    /// `f16` within a tile, of `f16` operands, then added in `f32`: half the registers, twice the speed on some hardware,
    /// and a few bits less.
    F16,
}

/// A result: for each 16 rows, four `f32` for each 8 columns.
#[derive(Debug, Clone)]
pub struct Accumulator {
    /// By 16 rows, then by 8 columns.
    pub m_tiles: Vec<Vec<[Reg<F32>; 4]>>,
}

impl Accumulator {
    /// Zeros in `m_tiles` times 16 rows and `columns` columns.
    pub fn zero(k: &mut Builder, m_tiles: u32, columns: u32) -> Self {
        let mut m_tile = || (0..columns / MMA_N).map(|_| core::array::from_fn(|_| k.copy(0.0f32))).collect();
        Self { m_tiles: (0..m_tiles).map(|_| m_tile()).collect() }
    }

    /// Sets all to zero.
    pub fn clear(&self, k: &mut Builder) {
        for element in self.m_tiles.iter().flatten().flatten() {
            k.set(*element, 0.0f32);
        }
    }

    /// Adds `left * right`. Each fragment of the right operand is loaded once for all rows.
    pub fn multiply_add<T: Element>(
        &self,
        k: &mut Builder,
        left: &LeftOperand<'_, T>,
        right: RightFragments,
        accumulation: Accumulation,
    ) {
        let halves = match accumulation {
            Accumulation::F32 => None,
            Accumulation::F16 => Some(Halves::zero(k, self)),
        };
        let (addresses, transposed) = match right {
            RightFragments::Transposed(addresses) => (addresses, false),
            RightFragments::Straight(addresses) => (addresses, true),
        };
        let (left_by_column, by_column) = (left.by_column(k), addresses.by_column(k));
        let columns = self.m_tiles.first().map_or(0, Vec::len);
        for step in 0..left.steps() {
            let depth = step * T::LAYOUT.mma_k();
            let lefts = left.step(k, &left_by_column, step);
            for tile in (0..columns).step_by(2) {
                let column = tile as u32 * MMA_N;
                let (row, column) = if transposed { (depth, column) } else { (column, depth) };
                let matrices = k.load_matrix::<T>(addresses.block(&by_column, row, column), 4, transposed);
                for (m_tile, (left, tiles)) in lefts.iter().zip(&self.m_tiles).enumerate() {
                    for (tile, right) in (tile..).zip(matrices.chunks_exact(2)) {
                        match &halves {
                            None => k.mma(MmaShape::M16N8K16, &tiles[tile], left, right),
                            Some(halves) => k.mma(MmaShape::M16N8K16, &halves.m_tiles[m_tile][tile], left, right),
                        }
                    }
                }
            }
        }
        if let Some(halves) = halves {
            halves.add_to(k, self);
        }
    }

    /// Multiplies the rows of a lane by one factor each.
    pub fn scale_rows(&self, k: &mut Builder, factors: &[Reg<F32>]) {
        self.each(|row, _, element| k.mul_to(element, factors[row]));
    }

    /// Visits each element with its row among those of the lane, and its column less twice the lane's member.
    ///
    /// A lane has two rows of each 16: its group, and the one 8 further on.
    pub fn each(&self, mut visit: impl FnMut(usize, u32, Reg<F32>)) {
        for (m_tile, tiles) in self.m_tiles.iter().enumerate() {
            for (tile, elements) in tiles.iter().enumerate() {
                for (index, element) in elements.iter().enumerate() {
                    visit(2 * m_tile + index / 2, tile as u32 * MMA_N + index as u32 % 2, *element);
                }
            }
        }
    }
}

/// A result in `f16`: for each 16 rows, two pairs for each 8 columns.
struct Halves {
    m_tiles: Vec<Vec<[Reg<F16x2>; 2]>>,
}

impl Halves {
    /// Zeros of the shape of `result`.
    fn zero(k: &mut Builder, result: &Accumulator) -> Self {
        let mut zero = || {
            let zero = k.copy::<U32>(0u32);
            k.reinterpret::<U32, F16x2>(zero)
        };
        let m_tiles = result.m_tiles.iter().map(|tiles| tiles.iter().map(|_| [zero(), zero()]).collect());
        Self { m_tiles: m_tiles.collect() }
    }

    fn add_to(&self, k: &mut Builder, result: &Accumulator) {
        for (halves, elements) in self.m_tiles.iter().flatten().zip(result.m_tiles.iter().flatten()) {
            for (pair, elements) in halves.iter().zip(elements.chunks_exact(2)) {
                for (half, element) in F16x2::widen(k, *pair).into_iter().zip(elements) {
                    k.add_to(*element, half);
                }
            }
        }
    }
}
