//! Error map: the largest error by tile of queries and tile of keys.
//!
//! An output element says nothing of the key that made it wrong. But if the value of a key is 1 in the column of its tile
//! and 0 in all others, then column `t` of an output row is the weight of all keys of tile `t`, and its error is that of
//! this tile alone.

use flashcore_problem::{Inputs, Invalid, Outputs, Problem, Tensor, oracle, reference};

use crate::lab::record::ProblemKey;

/// Errors by tile of queries (rows) and tile of keys (columns).
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorMap {
    /// The problem that was asked for.
    pub problem: ProblemKey,
    /// The backend.
    pub subject: String,
    /// Rows of a tile of queries, and keys of a tile.
    pub tile: usize,
    /// The largest error of a weight, for each tile of queries and each tile of keys.
    pub cells: Vec<Vec<f64>>,
    /// The largest error of a careful implementation of the same precision: twice that is allowed.
    pub reference: f64,
}

/// Bytes of value columns that a row is a multiple of: what GPU kernels take.
const COLUMN_BYTES: usize = 16;
/// The most tiles of keys that are distinguished.
const MOST_TILES: usize = 64;

/// Measures where the errors of `attend` lie on a problem of this shape, type and mask.
pub fn error_map<E: From<Invalid>>(
    problem: &Problem,
    subject: &str,
    seed: u64,
    attend: impl FnOnce(&Problem, &Inputs) -> Result<Outputs, E>,
) -> Result<ErrorMap, E> {
    let longest = problem.query_length.max(problem.key_length).max(1);
    let tile = longest.div_ceil(MOST_TILES).next_multiple_of(16);
    let tiles = problem.key_length.div_ceil(tile).max(1);
    let mut weights = problem.clone();
    weights.value_dim = tiles.next_multiple_of(COLUMN_BYTES / problem.dtypes().key_value.size_bytes().min(2));
    let mut inputs = Inputs::random(&weights, seed);
    inputs.value = tile_values(&weights, tile);
    let expected = oracle(&weights, &inputs)?.output;
    let distance = |outputs: &Outputs| -> Vec<f64> {
        let found = outputs.output.dense(weights.output_shape(), weights.strides().output);
        // What is no number is infinitely wrong.
        let error = |(found, expected): (&f64, &f64)| {
            let error = (found - expected).abs();
            if error.is_nan() { f64::INFINITY } else { error }
        };
        found.iter().zip(&expected).map(error).collect()
    };
    let of_reference = distance(&reference(&weights, &inputs)?).into_iter().fold(0.0, f64::max);
    let errors = distance(&attend(&weights, &inputs)?);
    let mut cells = vec![vec![0.0f64; tiles]; problem.query_length.div_ceil(tile)];
    for (index, error) in errors.iter().enumerate() {
        let (row, column) = (index / weights.value_dim % problem.query_length, index % weights.value_dim);
        if column < tiles {
            let cell = &mut cells[row / tile][column];
            *cell = cell.max(*error);
        }
    }
    let problem = ProblemKey::of(problem);
    Ok(ErrorMap { problem, subject: subject.to_owned(), tile, cells, reference: of_reference })
}

/// Values that are 1 in the column of the key's tile.
fn tile_values(problem: &Problem, tile: usize) -> Tensor {
    let shape = problem.value_shape();
    let mut values = Tensor::zeros(problem.dtypes().key_value, shape.elements().unwrap_or(0));
    for (index, (_, _, row)) in shape.each_row().enumerate() {
        values.set(index * shape.columns + row / tile, 1.0);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{Alignment, DType, Mask};

    #[test]
    fn an_error_is_where_it_was_made() {
        let mut problem = Problem::new(1, 2, 96, 32, DType::F16);
        problem.mask = Mask::Causal(Alignment::BottomRight);
        let right = error_map::<Invalid>(&problem, "reference", 1, reference).expect("a map");
        assert_eq!((right.tile, right.cells.len(), right.cells[0].len()), (16, 6, 6));
        assert!(right.cells.iter().flatten().all(|error| *error <= right.reference));
        // Somebody who forgets the keys of the third tile for the fifth tile of queries.
        let forget = |problem: &Problem, inputs: &Inputs| -> Result<Outputs, Invalid> {
            let mut outputs = reference(problem, inputs)?;
            for row in 64..80 {
                outputs.output.set(row * problem.value_dim + 2, 0.0);
            }
            Ok(outputs)
        };
        let wrong = error_map(&problem, "forgetful", 1, forget).expect("a map");
        let mut found = Vec::new();
        for (row, cells) in wrong.cells.iter().enumerate() {
            found.extend(
                cells.iter().enumerate().filter(|cell| *cell.1 > 10.0 * wrong.reference).map(|cell| (row, cell.0)),
            );
        }
        assert_eq!(found, [(4, 2)]);
    }
}
