//! The registers of tensor-core products.
//!
//! A product is 16 × 8 with a depth of 16. A lane with group `g = lane / 4` and member `t = lane % 4` holds
//!
//! * of the result, rows `g` and `g + 8`, columns `2t` and `2t + 1`: four `f32`;
//! * of the left operand, the same rows, columns `2t`, `2t + 1`, `2t + 8` and `2t + 9`: four pairs;
//! * of the right operand, rows `2t`, `2t + 1`, `2t + 8` and `2t + 9` of column `g`: two pairs.
//!
//! So two neighbouring results, rounded to pairs, are a left operand as they stand: the weights of attention go from
//! one product to the next without leaving their registers.

use flashcore_ir::types::F32;
use flashcore_ir::{Builder, MmaShape, Reg};

use super::shared::TileAddresses;
use super::{PRODUCT_DEPTH, RESULT_COLUMNS};
use crate::element::Element;

/// A left operand of 16 rows: one fragment for each 16 columns.
#[derive(Debug, Clone)]
pub struct LeftFragments<T: Element> {
    steps: Vec<[Reg<T>; 4]>,
}

impl<T: Element> LeftFragments<T> {
    /// Loads 16 rows and `columns` columns, from the rows that `addresses` points at.
    pub fn load(k: &mut Builder, addresses: TileAddresses, columns: u32) -> Self {
        let by_column = addresses.by_column(k);
        let steps = (0..columns / PRODUCT_DEPTH)
            .map(|step| {
                let matrices = k.load_matrix(addresses.block(&by_column, 0, step * PRODUCT_DEPTH), 4, false);
                [matrices[0], matrices[1], matrices[2], matrices[3]]
            })
            .collect();
        Self { steps }
    }

    /// Rounds results to a left operand.
    pub fn round(k: &mut Builder, results: &Accumulator) -> Self {
        let steps = results
            .tiles
            .chunks_exact(2)
            .map(|tiles| {
                let (left, right) = (tiles[0], tiles[1]);
                [
                    k.pair(left[0], left[1]),
                    k.pair(left[2], left[3]),
                    k.pair(right[0], right[1]),
                    k.pair(right[2], right[3]),
                ]
            })
            .collect();
        Self { steps }
    }
}

/// A right operand in shared memory, loaded piece by piece as it is multiplied.
#[derive(Debug, Clone, Copy)]
pub enum RightFragments {
    /// The rows of the tile are the columns of the operand: keys, for scores.
    Transposed(TileAddresses),
    /// The rows of the tile are the rows of the operand: values.
    Straight(TileAddresses),
}

/// A result of 16 rows: four `f32` for each 8 columns.
#[derive(Debug, Clone)]
pub struct Accumulator {
    /// By 8 columns.
    pub tiles: Vec<[Reg<F32>; 4]>,
}

impl Accumulator {
    /// Zeros in `columns` columns.
    pub fn zero(k: &mut Builder, columns: u32) -> Self {
        let tiles = (0..columns / RESULT_COLUMNS).map(|_| core::array::from_fn(|_| k.copy(0.0f32))).collect();
        Self { tiles }
    }

    /// Sets all to zero.
    pub fn clear(&self, k: &mut Builder) {
        for element in self.tiles.iter().flatten() {
            k.set(*element, 0.0f32);
        }
    }

    /// Adds the product of `left` and `right`.
    pub fn multiply_add<T: Element>(&self, k: &mut Builder, left: &LeftFragments<T>, right: RightFragments) {
        let (addresses, transposed) = match right {
            RightFragments::Transposed(addresses) => (addresses, false),
            RightFragments::Straight(addresses) => (addresses, true),
        };
        let by_column = addresses.by_column(k);
        for (step, left) in left.steps.iter().enumerate() {
            let depth = step as u32 * PRODUCT_DEPTH;
            for (pair, tiles) in self.tiles.chunks_exact(2).enumerate() {
                let columns = pair as u32 * 2 * RESULT_COLUMNS;
                let (row, column) = if transposed { (depth, columns) } else { (columns, depth) };
                let matrices = k.load_matrix::<T>(addresses.block(&by_column, row, column), 4, transposed);
                k.mma(MmaShape::M16N8K16, &tiles[0], left, &matrices[..2]);
                k.mma(MmaShape::M16N8K16, &tiles[1], left, &matrices[2..]);
            }
        }
    }

    /// Multiplies the rows of a lane by one factor each.
    pub fn scale_rows(&self, k: &mut Builder, factors: [Reg<F32>; 2]) {
        for (index, element) in self.tiles.iter().flat_map(|tile| tile.iter().enumerate()) {
            k.mul_to(*element, factors[index / 2]);
        }
    }

    /// Visits each element with the row of the lane it is in (0 or 1) and its column, less twice the lane's member.
    pub fn each(&self, mut visit: impl FnMut(usize, u32, Reg<F32>)) {
        for (tile, elements) in self.tiles.iter().enumerate() {
            for (index, element) in elements.iter().enumerate() {
                visit(index / 2, tile as u32 * RESULT_COLUMNS + index as u32 % 2, *element);
            }
        }
    }
}
