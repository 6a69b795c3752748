//! Which tiles meet which: one loop for all types and features.

use crate::microkernel::{Microkernel, TileProduct, padded, within};
use crate::output_tiles::{OutputTile, output_tiles};
use crate::pack::{Head, store};
use crate::real::{Real, multiply_all};
use crate::scores::Scoring;
use crate::softmax::RunningSoftmax;
use flashcore_problem::{InputViews, OutputViews, Problem};
use rayon::prelude::*;
use std::ops::Range;

/// Query rows that stay while keys pass: enough that packing a key tile costs little beside using it.
const QUERY_TILE: usize = 64;

/// Keys of one tile. With 128 columns in `f32`, a tile of keys and one of values are 32 KiB each: both stay in a
/// second-level cache, and a row of each in the first.
const KEY_TILE: usize = 64;

/// Computes a problem whose inputs and outputs validated.
pub(crate) fn attend<R: Real, K: Microkernel<R>>(
    kernel: &K,
    problem: &Problem,
    inputs: &InputViews<'_>,
    outputs: OutputViews<'_>,
) {
    if problem.output_shape().is_empty() {
        return;
    }
    output_tiles(problem, outputs, QUERY_TILE).into_par_iter().for_each_init(
        || Scratch::new::<K>(problem),
        |scratch, tile| attend_tile(kernel, problem, inputs, scratch, tile),
    );
}

/// The packed tiles of one thread. Rows and keys past the end of a tile hold what an earlier tile left there: they are
/// computed with and never looked at.
struct Scratch<R> {
    /// `QUERY_TILE` rows of `head_dim`.
    query: Vec<R>,
    /// Transposed: `head_dim` rows of `KEY_TILE`.
    key: Vec<R>,
    /// `KEY_TILE` rows of `value_columns`.
    value: Vec<R>,
    /// `QUERY_TILE` rows of `KEY_TILE`: products, then scores, then weights.
    scores: Vec<R>,
    /// `QUERY_TILE` rows of `value_columns`.
    output: Vec<R>,
    /// One row of the key before it is transposed.
    key_row: Vec<R>,
    softmax: Vec<RunningSoftmax<R>>,
    /// The columns of the value, padded.
    value_columns: usize,
}

impl<R: Real> Scratch<R> {
    fn new<K: Microkernel<R>>(problem: &Problem) -> Self {
        let (head_dim, value_columns) = (problem.head_dim, padded(problem.value_dim, K::COLUMN_BLOCK));
        Self {
            query: vec![R::ZERO; QUERY_TILE * head_dim],
            key: vec![R::ZERO; head_dim * KEY_TILE],
            value: vec![R::ZERO; KEY_TILE * value_columns],
            scores: vec![R::ZERO; QUERY_TILE * KEY_TILE],
            output: vec![R::ZERO; QUERY_TILE * value_columns],
            key_row: vec![R::ZERO; head_dim],
            softmax: vec![RunningSoftmax::EMPTY; QUERY_TILE],
            value_columns,
        }
    }

    fn load_query(&mut self, query: Head<'_>, first_row: usize, rows: usize, head_dim: usize) {
        for (index, row) in self.query.chunks_exact_mut(head_dim).take(rows).enumerate() {
            query.load(first_row + index, row);
        }
        self.output.fill(R::ZERO);
        self.softmax.fill(RunningSoftmax::EMPTY);
    }

    /// Loads `keys`, which are at most a tile.
    fn load_key(&mut self, key: Head<'_>, keys: Range<usize>) {
        for (index, row) in keys.enumerate() {
            key.load(row, &mut self.key_row);
            for (column, &element) in self.key.chunks_exact_mut(KEY_TILE).zip(&self.key_row) {
                column[index] = element;
            }
        }
    }

    /// Loads the values of `keys`. Returns whether all are finite.
    fn load_value(&mut self, value: Head<'_>, keys: Range<usize>, value_dim: usize) -> bool {
        let mut all_finite = true;
        for (row, index) in self.value.chunks_exact_mut(self.value_columns).zip(keys) {
            let row = &mut row[..value_dim];
            value.load(index, row);
            // Zero times a finite number is zero; times anything else it is a NaN, and so is the sum.
            all_finite &= row.iter().fold(R::ZERO, |sum, &element| sum + element * R::ZERO) == R::ZERO;
        }
        all_finite
    }
}

/// Attention of one tile of query rows.
fn attend_tile<R: Real, K: Microkernel<R>>(
    kernel: &K,
    problem: &Problem,
    inputs: &InputViews<'_>,
    scratch: &mut Scratch<R>,
    tile: OutputTile<'_>,
) {
    let (batch, rows, strides) = (tile.batch, tile.rows.len(), problem.strides());
    let key_head = problem.key_head(tile.head);
    let query = Head::new(inputs.query, problem.query_shape(), strides.query, batch, tile.head);
    let key = Head::new(inputs.key, problem.key_shape(), strides.key, batch, key_head);
    let value = Head::new(inputs.value, problem.value_shape(), strides.value, batch, key_head);
    let scoring = Scoring::new(problem, inputs, batch, tile.head);
    let key_length = inputs.key_length(problem, batch);
    let attended: Vec<Range<usize>> =
        (tile.first_row..tile.first_row + rows).map(|row| problem.attended_keys(key_length, row)).collect();

    scratch.load_query(query, tile.first_row, rows, problem.head_dim);
    for keys in key_tiles(&attended) {
        scratch.load_key(key, keys.clone());
        score_tile(kernel, problem, scratch, rows);
        let in_tile: Vec<Range<usize>> = attended.iter().map(|range| within(range, keys.start, keys.len())).collect();
        weigh_tile(kernel, &scoring, scratch, tile.first_row, keys.start, &in_tile);
        let all_finite = scratch.load_value(value, keys.clone(), problem.value_dim);
        if all_finite {
            accumulate(kernel, scratch, rows, keys.len());
        } else {
            accumulate_attended(scratch, &in_tile);
        }
    }
    finish(problem, &scoring, scratch, tile);
}

/// The keys that any row attends, in tiles. The ranges of neighbouring rows overlap or touch, so nothing between the
/// first and the last is left out.
fn key_tiles(attended: &[Range<usize>]) -> impl Iterator<Item = Range<usize>> + use<> {
    let occupied = attended.iter().filter(|range| !range.is_empty());
    let first = occupied.clone().map(|range| range.start).min().unwrap_or(0);
    let end = occupied.map(|range| range.end).max().unwrap_or(0);
    (first..end).step_by(KEY_TILE).map(move |start| start..end.min(start + KEY_TILE))
}

/// Products of all queries with all keys of the tile.
fn score_tile<R: Real, K: Microkernel<R>>(kernel: &K, problem: &Problem, scratch: &mut Scratch<R>, rows: usize) {
    let rows = padded(rows, K::ROW_BLOCK);
    scratch.scores[..rows * KEY_TILE].fill(R::ZERO);
    kernel.multiply_accumulate(TileProduct {
        rows,
        depth: problem.head_dim,
        columns: KEY_TILE,
        left: &scratch.query,
        left_stride: problem.head_dim,
        right: &scratch.key,
        product: &mut scratch.scores,
    });
}

/// Products to weights, row by row. What a row does not attend gets no weight, whatever the product was.
fn weigh_tile<R: Real, K: Microkernel<R>>(
    kernel: &K,
    scoring: &Scoring<'_>,
    scratch: &mut Scratch<R>,
    first_row: usize,
    first_key: usize,
    attended: &[Range<usize>],
) {
    let rows = scratch.scores.chunks_exact_mut(KEY_TILE).zip(scratch.output.chunks_exact_mut(scratch.value_columns));
    for (index, ((scores, output), (softmax, range))) in rows.zip(scratch.softmax.iter_mut().zip(attended)).enumerate()
    {
        scores[..range.start].fill(R::ZERO);
        scores[range.end..].fill(R::ZERO);
        if range.is_empty() {
            continue;
        }
        let scores = &mut scores[range.clone()];
        scoring.apply(first_row + index, first_key + range.start..first_key + range.end, scores);
        let correction = softmax.update(kernel, scores);
        if correction != R::ONE {
            multiply_all(output, correction);
        }
    }
}

/// Adds weights times values.
fn accumulate<R: Real, K: Microkernel<R>>(kernel: &K, scratch: &mut Scratch<R>, rows: usize, keys: usize) {
    kernel.multiply_accumulate(TileProduct {
        rows: padded(rows, K::ROW_BLOCK),
        depth: keys,
        columns: scratch.value_columns,
        left: &scratch.scores,
        left_stride: KEY_TILE,
        right: &scratch.value,
        product: &mut scratch.output,
    });
}

/// Adds weights times values for attended keys only: a weight of zero does not hide a NaN or an infinity.
fn accumulate_attended<R: Real>(scratch: &mut Scratch<R>, attended: &[Range<usize>]) {
    let columns = scratch.value_columns;
    let rows = scratch.output.chunks_exact_mut(columns).zip(scratch.scores.chunks_exact(KEY_TILE));
    for ((output, weights), range) in rows.zip(attended) {
        for key in range.clone() {
            for (element, &value) in output.iter_mut().zip(&scratch.value[key * columns..]) {
                *element += weights[key] * value;
            }
        }
    }
}

fn finish<R: Real>(problem: &Problem, scoring: &Scoring<'_>, scratch: &Scratch<R>, tile: OutputTile<'_>) {
    let sink = scoring.sink();
    let mut log_sum_exp = tile.log_sum_exp;
    let outputs = scratch.output.chunks_exact(scratch.value_columns);
    for (index, ((bytes, output), softmax)) in tile.rows.into_iter().zip(outputs).zip(&scratch.softmax).enumerate() {
        let finished = softmax.finish(sink);
        if finished.is_empty {
            bytes.fill(0);
        } else {
            store(problem.dtype, &output[..problem.value_dim], finished.factor, bytes);
        }
        if let Some(rows) = &mut log_sum_exp {
            rows[index] = finished.log_sum_exp.to_f64() as f32;
        }
    }
}
