//! The microkernel that any processor runs: loops over fixed-size arrays that the compiler turns into vectors.

use crate::microkernel::{Microkernel, Order, Strip, Target, TileProduct};
use crate::real::Real;
use crate::softmax::{correction, finite_shift};

/// Four rows by eight columns of `f32` are eight 128-bit accumulators: half of what SSE2 has, a quarter of NEON's.
const ROWS: usize = 4;
const COLUMNS: usize = 8;

/// Runs everywhere.
pub(crate) struct Portable;

impl<R: Real> Microkernel<R> for Portable {
    const ROW_BLOCK: usize = ROWS;
    const COLUMN_BLOCK: usize = COLUMNS;
    const STRIP: usize = 2 * COLUMNS;

    fn multiply(&self, mut product: TileProduct<'_, R>) {
        for first_row in (0..product.rows).step_by(ROWS) {
            let (left, stride, depth) = (product.left, product.left_stride, product.depth);
            match product.left_order {
                Order::RowByRow => {
                    let rows: [&[R]; ROWS] = std::array::from_fn(|row| &left[(first_row + row) * stride..][..depth]);
                    multiply_rows(&mut product, first_row, |step| std::array::from_fn(|row| rows[row][step]));
                }
                Order::ColumnByColumn => {
                    multiply_rows(&mut product, first_row, |step| fixed(&left[step * stride + first_row..]));
                }
            }
        }
    }

    fn weigh(&self, strip: Strip<'_, R>) {
        for first in (0..strip.columns).step_by(COLUMNS) {
            let old: [R; COLUMNS] = fixed(&strip.maximum[first..]);
            let mut new = old;
            for scores in strip.scores.chunks_exact(strip.columns) {
                let scores: [R; COLUMNS] = fixed(&scores[first..]);
                for lane in 0..COLUMNS {
                    new[lane] = new[lane].maximum(scores[lane]);
                }
            }
            let shift = new.map(finite_shift);
            let mut added = [R::ZERO; COLUMNS];
            for scores in strip.scores.chunks_exact_mut(strip.columns) {
                let scores = &mut scores[first..first + COLUMNS];
                for lane in 0..COLUMNS {
                    scores[lane] = (scores[lane] - shift[lane]).exp2();
                    added[lane] += scores[lane];
                }
            }
            for lane in 0..COLUMNS {
                let correction = correction(old[lane], new[lane]);
                strip.maximum[first + lane] = new[lane];
                strip.sum[first + lane] = strip.sum[first + lane] * correction + added[lane];
                strip.correction[first + lane] = correction;
            }
        }
    }
}

/// The rows of a product from `first_row` on, whose left factors `left` gives for each step.
fn multiply_rows<R: Real>(tiles: &mut TileProduct<'_, R>, first_row: usize, left: impl Fn(usize) -> [R; ROWS]) {
    for first_column in (0..tiles.columns).step_by(COLUMNS) {
        let place = |row: usize| (first_row + row) * tiles.columns + first_column;
        let mut block = [[R::ZERO; COLUMNS]; ROWS];
        if let Target::Corrected(correction) = tiles.target {
            let correction: [R; COLUMNS] = fixed(&correction[first_column..]);
            for (row, values) in block.iter_mut().enumerate() {
                *values = fixed(&tiles.product[place(row)..]);
                for (value, factor) in values.iter_mut().zip(correction) {
                    *value *= factor;
                }
            }
        }
        for (step, right) in tiles.right.chunks_exact(tiles.columns).take(tiles.depth).enumerate() {
            let right: [R; COLUMNS] = fixed(&right[first_column..]);
            let left = left(step);
            for row in 0..ROWS {
                for column in 0..COLUMNS {
                    block[row][column] += left[row] * right[column];
                }
            }
        }
        if let Target::Scaled(factor) = tiles.target {
            for value in block.as_flattened_mut() {
                *value *= factor;
            }
        }
        for (row, values) in block.iter().enumerate() {
            tiles.product[place(row)..][..COLUMNS].copy_from_slice(values);
        }
    }
}

/// The first elements as an array.
fn fixed<R: Real, const COUNT: usize>(values: &[R]) -> [R; COUNT] {
    let mut array = [R::ZERO; COUNT];
    array.copy_from_slice(&values[..COUNT]);
    array
}
