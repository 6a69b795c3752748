//! `mma.sync` fragments: the registers of tensor-core products.
//!
//! A product of 16-bit elements is 16 × 8 with a depth of 16. A lane with group `g = lane / 4` and member `t = lane % 4` holds
//!
//! * of the result, rows `g` and `g + 8`, columns `2t` and `2t + 1`: four `f32`;
//! * of A, the same rows, columns `2t`, `2t + 1`, `2t + 8` and `2t + 9`: four pairs;
//! * of B, rows `2t`, `2t + 1`, `2t + 8` and `2t + 9` of column `g`: two pairs.
//!
//! So two neighbouring results, rounded to pairs, are A as they stand: P goes from QK to PV without leaving
//! its registers.

use flashcore_ir::types::{F16x2, F32, Ty, U32};
use flashcore_ir::{Builder, MmaShape, Reg};

use crate::element::Element;
use crate::primitives::{MMA_N, SharedOperand};

/// Fragments of A, by element: of 16 rows and one depth step a lane has four registers.
pub trait FragmentA {
    /// A register.
    type Register: Ty;
    /// Columns of a depth step.
    const DEPTH: u32;

    /// Loads the fragment of a depth step of the first 16 rows of an operand, given its
    /// `SharedOperand::by_column`.
    fn load(k: &mut Builder, a: SharedOperand, by_column: &[Reg<U32>], step: u32) -> [Reg<Self::Register>; 4];

    /// Rounds the results of the columns of a depth step, by 8; what is missing at the end is zero.
    fn round(k: &mut Builder, results: &[[Reg<F32>; 4]]) -> [Reg<Self::Register>; 4];
}

impl<T: Element> FragmentA for T {
    type Register = T;
    const DEPTH: u32 = T::LAYOUT.mma_k();

    fn load(k: &mut Builder, a: SharedOperand, by_column: &[Reg<U32>], step: u32) -> [Reg<T>; 4] {
        a.load(k, by_column, 0, step * Self::DEPTH)
    }

    fn round(k: &mut Builder, results: &[[Reg<F32>; 4]]) -> [Reg<T>; 4] {
        round_pairs(k, results)
    }
}

/// Two neighbouring results as a fragment of pairs.
pub(super) fn round_pairs<T: Element>(k: &mut Builder, results: &[[Reg<F32>; 4]]) -> [Reg<T>; 4] {
    let [left, right] = [results[0], results[1]];
    [k.pair(left[0], left[1]), k.pair(left[2], left[3]), k.pair(right[0], right[1]), k.pair(right[2], right[3])]
}

/// The A operand of a product: in registers, or loaded or rounded step by step as it is multiplied.
#[derive(Debug, Clone)]
pub enum OperandA<'a, F: FragmentA> {
    /// In registers: for each 16 rows the fragment of each depth step, and the columns.
    Registers(Vec<Vec<[Reg<F::Register>; 4]>>, u32),
    /// In shared memory: for each 16 rows where they are, and the columns.
    Shared(Vec<SharedOperand>, u32),
    /// The results of another product.
    Accumulator(&'a Accumulator),
}

impl<F: FragmentA> OperandA<'_, F> {
    /// Loads `columns` columns of the 16 rows of each of `m_tiles`.
    pub fn load(k: &mut Builder, m_tiles: &[SharedOperand], columns: u32) -> Self {
        let m_tiles = m_tiles.iter().map(|a| {
            let by_column = a.by_column(k);
            (0..columns.div_ceil(F::DEPTH)).map(|step| F::load(k, *a, &by_column, step)).collect()
        });
        Self::Registers(m_tiles.collect(), columns)
    }

    /// Rounds the results of another product.
    pub fn round(k: &mut Builder, results: &Accumulator) -> Self {
        let operand = OperandA::<F>::Accumulator(results);
        let m_tiles = (0..operand.m_tiles()).map(|m_tile| {
            let steps = 0..operand.steps();
            steps.map(|step| operand.fragment(k, &[], m_tile, step)).collect()
        });
        Self::Registers(m_tiles.collect(), operand.columns())
    }

    /// Columns of the operand: the depth of the product.
    pub(super) fn columns(&self) -> u32 {
        match self {
            Self::Registers(_, columns) | Self::Shared(_, columns) => *columns,
            Self::Accumulator(results) => results.m_tiles.first().map_or(0, Vec::len) as u32 * MMA_N,
        }
    }

    /// Depth steps of the product.
    pub(super) fn steps(&self) -> u32 {
        self.columns().div_ceil(F::DEPTH)
    }

    /// Rows, by 16.
    pub(super) fn m_tiles(&self) -> usize {
        match self {
            Self::Registers(m_tiles, _) => m_tiles.len(),
            Self::Shared(m_tiles, _) => m_tiles.len(),
            Self::Accumulator(results) => results.m_tiles.len(),
        }
    }

    /// The base registers of each 16 rows in shared memory.
    pub(super) fn by_column(&self, k: &mut Builder) -> Vec<Vec<Reg<U32>>> {
        match self {
            Self::Registers(..) | Self::Accumulator(_) => Vec::new(),
            Self::Shared(m_tiles, _) => m_tiles.iter().map(|a| a.by_column(k)).collect(),
        }
    }

    /// The fragment of a depth step of 16 rows.
    pub(super) fn fragment(
        &self,
        k: &mut Builder,
        by_column: &[Vec<Reg<U32>>],
        m_tile: usize,
        step: u32,
    ) -> [Reg<F::Register>; 4] {
        match self {
            Self::Registers(m_tiles, _) => m_tiles[m_tile][step as usize],
            Self::Shared(m_tiles, _) => F::load(k, m_tiles[m_tile], &by_column[m_tile], step),
            Self::Accumulator(results) => {
                let (tiles, per_step) = (&results.m_tiles[m_tile], (F::DEPTH / MMA_N) as usize);
                let first = step as usize * per_step;
                F::round(k, &tiles[first..tiles.len().min(first + per_step)])
            }
        }
    }

    /// The fragments of a depth step, by 16 rows.
    pub(super) fn step(&self, k: &mut Builder, by_column: &[Vec<Reg<U32>>], step: u32) -> Vec<[Reg<F::Register>; 4]> {
        (0..self.m_tiles()).map(|m_tile| self.fragment(k, by_column, m_tile, step)).collect()
    }
}

/// Accumulator type of the products of one tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// `f32` throughout.
    F32 = 32,
    /// `f16` within a tile, of `f16` operands, then added in `f32`: half the registers, twice the speed on some hardware,
    /// and a few bits less.
    F16 = 16,
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

    /// Adds `A · B`. Each fragment of B is loaded once for all rows.
    pub fn multiply<T: Element>(
        &self,
        k: &mut Builder,
        a: &OperandA<'_, T>,
        b: SharedOperand,
        accumulation: Accumulation,
    ) {
        let halves = match accumulation {
            Accumulation::F32 => None,
            Accumulation::F16 => Some(Halves::zero(k, self)),
        };
        let (a_by_column, by_column) = (a.by_column(k), b.by_column(k));
        let columns = self.m_tiles.first().map_or(0, Vec::len);
        for step in 0..a.steps() {
            let lefts = a.step(k, &a_by_column, step);
            for tile in (0..columns).step_by(2) {
                let matrices = b.load::<T>(k, &by_column, tile as u32 * MMA_N, step * T::DEPTH);
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
