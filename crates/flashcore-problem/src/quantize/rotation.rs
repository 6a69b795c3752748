//! Hadamard rotation with random signs: an orthogonal matrix that spreads outliers, and costs `log2` additions an element.

use super::QuantizeError;
use crate::SplitMix64;

/// An orthogonal matrix for rows of a head dimension: random signs, then a Hadamard matrix over its root.
///
/// A head dimension that is not a power of two is rotated in blocks of the largest power of two that divides it: 96 in
/// three blocks of 32. The same rotation of query and key leaves their products as they are; whoever rotates the weights
/// of a projection instead has it for free.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    signs: Vec<f64>,
    block: usize,
}

impl Rotation {
    /// The least block that spreads an outlier enough to be worth it.
    const LEAST_BLOCK: usize = 16;
    /// The stream of the signs.
    const STREAM: u64 = 0x4ada;

    /// The rotation of a head dimension by a seed.
    pub fn new(head_dim: usize, seed: u64) -> Result<Self, QuantizeError> {
        let block = if head_dim == 0 { 0 } else { 1 << head_dim.trailing_zeros() };
        if block < Self::LEAST_BLOCK {
            return Err(QuantizeError::HeadDim { head_dim, least: Self::LEAST_BLOCK });
        }
        let mut random = SplitMix64::stream(seed, Self::STREAM);
        let signs = (0..head_dim).map(|_| if random.next_u64() >> 63 == 0 { 1.0 } else { -1.0 }).collect();
        Ok(Self { signs, block })
    }

    /// Columns that are rotated together.
    pub const fn block(&self) -> usize {
        self.block
    }

    /// Rotates a row.
    ///
    /// # Panics
    ///
    /// When the row has not as many columns as the head dimension.
    pub fn apply(&self, row: &mut [f64]) {
        assert_eq!(row.len(), self.signs.len(), "a row has as many columns as the head dimension");
        for (number, sign) in row.iter_mut().zip(&self.signs) {
            *number *= sign;
        }
        let root = (self.block as f64).sqrt();
        for block in row.chunks_exact_mut(self.block) {
            let mut half = 1;
            while half < block.len() {
                for pair in block.chunks_exact_mut(2 * half) {
                    let (left, right) = pair.split_at_mut(half);
                    for (left, right) in left.iter_mut().zip(right) {
                        (*left, *right) = (*left + *right, *left - *right);
                    }
                }
                half *= 2;
            }
            for number in block {
                *number /= root;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Unit vectors become columns of the matrix: orthogonal, all entries of one magnitude within a block.
    #[test]
    fn the_matrix_is_orthogonal() {
        for (head_dim, block) in [(16, 16), (64, 64), (96, 32), (128, 128), (576, 64)] {
            let rotation = Rotation::new(head_dim, 5).unwrap();
            assert_eq!(rotation.block(), block);
            let columns: Vec<Vec<f64>> = (0..head_dim)
                .map(|one| {
                    let mut row: Vec<f64> = (0..head_dim).map(|column| f64::from(u8::from(column == one))).collect();
                    rotation.apply(&mut row);
                    row
                })
                .collect();
            for (i, left) in columns.iter().enumerate() {
                let spread = left.iter().filter(|number| number.abs() > 0.0).count();
                assert_eq!(spread, block);
                for (j, right) in columns.iter().enumerate() {
                    let product: f64 = left.iter().zip(right).map(|(left, right)| left * right).sum();
                    assert!((product - f64::from(u8::from(i == j))).abs() < 1e-14, "{head_dim}: {i} {j}");
                }
            }
        }
    }

    #[test]
    fn seeds_differ_and_odd_dimensions_are_refused() {
        let signs = |seed| Rotation::new(128, seed).unwrap().signs;
        assert_eq!(signs(1), signs(1));
        let different = signs(1).iter().zip(signs(2)).filter(|(left, right)| *left != right).count();
        assert!((40..88).contains(&different), "{different}");
        for head_dim in [0, 1, 8, 24, 129] {
            assert_eq!(Rotation::new(head_dim, 1), Err(QuantizeError::HeadDim { head_dim, least: 16 }));
        }
    }
}
