//! The microkernel that any processor runs: loops over fixed-size arrays that the compiler turns into vectors.

use crate::microkernel::{Microkernel, TileProduct};
use crate::real::Real;

/// Four rows by eight columns of `f32` are eight 128-bit accumulators: half of what SSE2 has, a quarter of NEON's.
const ROWS: usize = 4;
const COLUMNS: usize = 8;

/// Partial results that a reduction keeps apart, so that it can run in vector lanes.
const LANES: usize = 8;

/// Runs everywhere.
pub(crate) struct Portable;

impl<R: Real> Microkernel<R> for Portable {
    const ROW_BLOCK: usize = ROWS;
    const COLUMN_BLOCK: usize = COLUMNS;

    fn multiply_accumulate(&self, tiles: TileProduct<'_, R>) {
        for first_row in (0..tiles.rows).step_by(ROWS) {
            let left: [&[R]; ROWS] =
                std::array::from_fn(|row| &tiles.left[(first_row + row) * tiles.left_stride..][..tiles.depth]);
            for first_column in (0..tiles.columns).step_by(COLUMNS) {
                let place = |row: usize| (first_row + row) * tiles.columns + first_column;
                let mut block: [[R; COLUMNS]; ROWS] = std::array::from_fn(|row| fixed(&tiles.product[place(row)..]));
                for (step, right) in tiles.right.chunks_exact(tiles.columns).take(tiles.depth).enumerate() {
                    let right: [R; COLUMNS] = fixed(&right[first_column..]);
                    for row in 0..ROWS {
                        let factor = left[row][step];
                        for column in 0..COLUMNS {
                            block[row][column] += factor * right[column];
                        }
                    }
                }
                for (row, values) in block.iter().enumerate() {
                    tiles.product[place(row)..][..COLUMNS].copy_from_slice(values);
                }
            }
        }
    }

    fn maximum(&self, scores: &[R], floor: R) -> R {
        let mut lanes = [floor; LANES];
        let chunks = scores.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, &score) in lanes.iter_mut().zip(chunk) {
                *lane = lane.maximum(score);
            }
        }
        rest.iter().chain(&lanes).fold(floor, |largest, &score| largest.maximum(score))
    }

    fn exponentiate(&self, scores: &mut [R], shift: R) -> R {
        let mut lanes = [R::ZERO; LANES];
        let mut chunks = scores.chunks_exact_mut(LANES);
        for chunk in &mut chunks {
            for (lane, score) in lanes.iter_mut().zip(chunk) {
                *score = (*score - shift).exp2();
                *lane += *score;
            }
        }
        for (lane, score) in lanes.iter_mut().zip(chunks.into_remainder()) {
            *score = (*score - shift).exp2();
            *lane += *score;
        }
        lanes.into_iter().fold(R::ZERO, |sum, lane| sum + lane)
    }
}

/// The first `COLUMNS` elements as an array.
fn fixed<R: Real>(values: &[R]) -> [R; COLUMNS] {
    let mut array = [R::ZERO; COLUMNS];
    array.copy_from_slice(&values[..COLUMNS]);
    array
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_accumulate() {
        let (rows, depth, columns) = (8, 3, 16);
        let left: Vec<f64> = (0..rows * 5).map(|index| index as f64).collect();
        let right: Vec<f64> = (0..depth * columns).map(|index| 1.0 + index as f64).collect();
        let mut product = vec![0.5; rows * columns];
        let tiles =
            TileProduct { rows, depth, columns, left: &left, left_stride: 5, right: &right, product: &mut product };
        Portable.multiply_accumulate(tiles);
        for row in 0..rows {
            for column in 0..columns {
                let sum: f64 = (0..depth).map(|step| left[row * 5 + step] * right[step * columns + column]).sum();
                assert_eq!(product[row * columns + column].to_bits(), (sum + 0.5).to_bits(), "{row}, {column}");
            }
        }
    }

    #[test]
    fn reductions_of_any_length() {
        for length in 0..40 {
            let scores: Vec<f32> = (0..length).map(|index| -((index * 7 % 11) as f32)).collect();
            let largest = scores.iter().copied().fold(-20.0, f32::max);
            assert_eq!(Portable.maximum(&scores, -20.0).to_bits(), largest.to_bits(), "{length}");
            let mut weights = scores.clone();
            let sum = Portable.exponentiate(&mut weights, 1.0);
            let expected: Vec<f32> = scores.iter().map(|score| f32::exp2(score - 1.0)).collect();
            assert_eq!(weights, expected, "{length}: powers of two are exact");
            assert_eq!(
                sum.to_bits(),
                expected.iter().fold(0.0, |sum, weight| sum + weight).to_bits(),
                "{length}: and so are their sums"
            );
        }
    }
}
