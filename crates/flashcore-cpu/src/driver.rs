//! Which tiles meet which: one loop for all types and features.

use crate::microkernel::{Microkernel, Order, Strip, Target, TileProduct, padded, within};
use crate::output_tiles::{OutputTile, output_tiles};
use crate::pack::{Head, store};
use crate::real::Real;
use crate::scores::Scoring;
use crate::softmax::finish;
use flashcore_problem::{InputViews, OutputViews, Problem};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Query rows that share packed keys and values, at most: enough that packing costs one or two hundredths of using.
const QUERY_TILE: usize = 256;

/// Keys of one tile. The scores of a strip of 32 query rows are then 16 KiB, which stay in a first-level cache between
/// the two products, and keys and values of 128 columns 64 KiB each, which stay in a second-level cache. A mask wastes
/// no more with large tiles than with small ones, since each strip takes only the keys of a tile that it attends.
const KEY_TILE: usize = 128;

/// No strip has more lanes than this.
const MOST_LANES: usize = 32;

/// Tiles for each thread, at least, where there are enough query rows: so few that threads rarely wait for the last.
const TILES_PER_THREAD: usize = 4;

/// Computes a problem whose inputs and outputs validated.
pub(crate) fn attend<R: Real, K: Microkernel<R>>(
    kernel: &K,
    problem: &Problem,
    inputs: &InputViews<'_>,
    outputs: OutputViews<'_>,
) {
    const { assert!(K::STRIP <= MOST_LANES && QUERY_TILE.is_multiple_of(K::STRIP)) };
    if problem.output_shape().is_empty() {
        return;
    }
    let query_tile = query_tile(problem, K::STRIP, rayon::current_num_threads());
    // Lent from tile to tile, so that there are no more than threads.
    let idle = Mutex::new(Vec::new());
    output_tiles(problem, outputs, query_tile).into_par_iter().with_max_len(1).for_each(|tile| {
        let lent = idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut scratch = lent.unwrap_or_else(|| Scratch::new::<K>(problem, query_tile));
        attend_tile(kernel, problem, inputs, &mut scratch, tile);
        idle.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    });
}

/// The rows of a tile: fewer where there would not be enough tiles for all threads. The bits of the result do not
/// depend on it, because strips begin at multiples of their size and key tiles at multiples of theirs.
fn query_tile(problem: &Problem, strip: usize, threads: usize) -> usize {
    let heads = problem.batch * problem.query_heads;
    let mut rows = QUERY_TILE;
    while rows > strip && heads * problem.query_length.div_ceil(rows) < TILES_PER_THREAD * threads {
        rows /= 2;
    }
    rows
}

/// The packed tiles of one thread. Rows and keys past the end of a tile hold what an earlier tile left there: they are
/// computed with and never looked at.
struct Scratch<R> {
    strips: Vec<QueryStrip<R>>,
    /// Rows of `head_dim`: a tile and as many more as a block of rows that begins near its end may reach.
    key: Vec<R>,
    /// `KEY_TILE` rows of `value_columns`.
    value: Vec<R>,
    /// For each key of a tile, and as many more, a lane for each query row of a strip: products, scores, weights.
    scores: Vec<R>,
    /// What the softmax of a strip says its output is to be multiplied by.
    correction: Vec<R>,
    /// One row of the query before it is transposed, or of the output after.
    row: Vec<R>,
    /// The columns of the value, padded.
    value_columns: usize,
}

/// Query rows side by side in vector lanes, and what has become of them so far.
struct QueryStrip<R> {
    first_row: usize,
    rows: usize,
    /// The lanes in use, padded.
    columns: usize,
    /// The keys that each row attends.
    attended: Vec<Range<usize>>,
    /// Transposed: `head_dim` rows of `columns`.
    query: Vec<R>,
    /// Transposed: `value_columns` rows of `columns`.
    output: Vec<R>,
    maximum: Vec<R>,
    sum: Vec<R>,
}

impl<R: Real> Scratch<R> {
    fn new<K: Microkernel<R>>(problem: &Problem, query_tile: usize) -> Self {
        let (head_dim, value_columns) = (problem.head_dim, padded(problem.value_dim, K::ROW_BLOCK));
        let strip = || QueryStrip {
            first_row: 0,
            rows: 0,
            columns: 0,
            attended: Vec::with_capacity(K::STRIP),
            query: vec![R::ZERO; head_dim * K::STRIP],
            output: vec![R::ZERO; value_columns * K::STRIP],
            maximum: vec![R::ZERO; K::STRIP],
            sum: vec![R::ZERO; K::STRIP],
        };
        Self {
            strips: (0..query_tile.div_ceil(K::STRIP)).map(|_| strip()).collect(),
            key: vec![R::ZERO; (KEY_TILE + K::ROW_BLOCK) * head_dim],
            value: vec![R::ZERO; KEY_TILE * value_columns],
            scores: vec![R::ZERO; (KEY_TILE + K::ROW_BLOCK) * K::STRIP],
            correction: vec![R::ZERO; K::STRIP],
            row: vec![R::ZERO; head_dim.max(problem.value_dim)],
            value_columns,
        }
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
    let (batch, strides) = (tile.batch, problem.strides());
    let key_head = problem.key_head(tile.head);
    let query = Head::new(inputs.query, problem.query_shape(), strides.query, batch, tile.head);
    let key = Head::new(inputs.key, problem.key_shape(), strides.key, batch, key_head);
    let value = Head::new(inputs.value, problem.value_shape(), strides.value, batch, key_head);
    let scoring = Scoring::new(problem, inputs, batch, tile.head);
    let key_length = inputs.key_length(problem, batch);

    let used = tile.rows.len().div_ceil(K::STRIP);
    let (strips, row) = (&mut scratch.strips[..used], &mut scratch.row[..problem.head_dim]);
    for (index, strip) in strips.iter_mut().enumerate() {
        let first = index * K::STRIP;
        let rows = (tile.rows.len() - first).min(K::STRIP);
        strip.begin(tile.first_row + first, rows, K::COLUMN_BLOCK);
        strip.attended.extend((strip.first_row..).take(rows).map(|row| problem.attended_keys(key_length, row)));
        strip.load_query(kernel, query, row);
    }
    for keys in key_tiles(strips) {
        for (row, index) in scratch.key.chunks_exact_mut(problem.head_dim).zip(keys.clone()) {
            key.load(kernel, index, row);
        }
        for (row, index) in scratch.value.chunks_exact_mut(scratch.value_columns).zip(keys.clone()) {
            value.load(kernel, index, &mut row[..problem.value_dim]);
        }
        let mut tile = KeyTile {
            keys,
            head_dim: problem.head_dim,
            value_dim: problem.value_dim,
            value_columns: scratch.value_columns,
            key: &scratch.key,
            value: &scratch.value,
            scores: &mut scratch.scores,
            correction: &mut scratch.correction,
            is_finite: None,
        };
        for strip in &mut *strips {
            tile.meet(kernel, &scoring, strip);
        }
    }
    finish_tile(problem, &scoring, scratch, tile, K::STRIP);
}

impl<R: Real> QueryStrip<R> {
    fn begin(&mut self, first_row: usize, rows: usize, column_block: usize) {
        (self.first_row, self.rows, self.columns) = (first_row, rows, padded(rows, column_block));
        self.attended.clear();
        if rows < self.columns {
            // Lanes without a row compute too, with a query that cannot be slow as a subnormal or a NaN might.
            self.query.fill(R::ZERO);
        }
        self.output.fill(R::ZERO);
        self.maximum.fill(R::NEGATIVE_INFINITY);
        self.sum.fill(R::ZERO);
    }

    fn load_query(&mut self, kernel: &impl Microkernel<R>, query: Head<'_>, row: &mut [R]) {
        for lane in 0..self.rows {
            query.load(kernel, self.first_row + lane, row);
            for (place, &element) in self.query[lane..].iter_mut().step_by(self.columns).zip(&*row) {
                *place = element;
            }
        }
    }
}

/// The keys that any row attends, in tiles that begin at multiples of their size. The ranges of neighbouring rows
/// overlap or touch, so nothing between the first and the last is left out.
fn key_tiles<R>(strips: &[QueryStrip<R>]) -> impl Iterator<Item = Range<usize>> + use<R> {
    let occupied = strips.iter().flat_map(|strip| &strip.attended).filter(|range| !range.is_empty());
    let first = occupied.clone().map(|range| range.start).min().unwrap_or(0);
    let end = occupied.map(|range| range.end).max().unwrap_or(0);
    let first = first - first % KEY_TILE;
    (first..end).step_by(KEY_TILE).map(move |start| start..end.min(start + KEY_TILE))
}

/// Packed keys and values, and room for the scores of one strip.
struct KeyTile<'a, R> {
    keys: Range<usize>,
    head_dim: usize,
    value_dim: usize,
    value_columns: usize,
    key: &'a [R],
    value: &'a [R],
    scores: &'a mut [R],
    correction: &'a mut [R],
    /// For each key, whether none of its value is a NaN or an infinity; looked at only where a mask needs to know.
    is_finite: Option<[bool; KEY_TILE]>,
}

impl<R: Real> KeyTile<'_, R> {
    /// The strip attends what it attends of these keys.
    fn meet<K: Microkernel<R>>(&mut self, kernel: &K, scoring: &Scoring<'_>, strip: &mut QueryStrip<R>) {
        let in_tile = |range: &Range<usize>| within(range, self.keys.start, self.keys.len());
        let occupied = strip.attended.iter().map(in_tile).filter(|range| !range.is_empty());
        let Some(keys) = occupied.reduce(|all, range| all.start.min(range.start)..all.end.max(range.end)) else {
            return;
        };
        let is_masked = strip.attended.iter().any(|range| in_tile(range) != keys);
        let columns = strip.columns;

        kernel.multiply(TileProduct {
            rows: padded(keys.len(), K::ROW_BLOCK),
            depth: self.head_dim,
            columns,
            left: &self.key[keys.start * self.head_dim..],
            left_stride: self.head_dim,
            left_order: Order::RowByRow,
            right: &strip.query,
            target: Target::Scaled(R::from_f64(scoring.factor())),
            product: self.scores,
        });
        let scores = &mut self.scores[..keys.len() * columns];
        let rows = strip.first_row..strip.first_row + strip.rows;
        let first_key = self.keys.start + keys.start;
        scoring.apply(rows, first_key..first_key + keys.len(), scores, columns);
        if is_masked {
            let attended = strip.attended.iter().map(|range| within(range, first_key, keys.len()));
            mask(scores, columns, attended);
        }
        kernel.weigh(Strip {
            columns,
            scores,
            maximum: &mut strip.maximum[..columns],
            sum: &mut strip.sum[..columns],
            correction: &mut self.correction[..columns],
        });
        if is_masked && !self.are_values_finite(keys.clone()) {
            self.accumulate_attended(strip, keys);
            return;
        }
        kernel.multiply(TileProduct {
            rows: self.value_columns,
            depth: keys.len(),
            columns,
            left: &self.value[keys.start * self.value_columns..],
            left_stride: self.value_columns,
            left_order: Order::ColumnByColumn,
            right: self.scores,
            target: Target::Corrected(self.correction),
            product: &mut strip.output,
        });
    }

    /// Asked of the keys of one strip only, so that the answer does not depend on which strips share a tile.
    #[expect(clippy::needless_bitwise_bool, reason = "without leaving early, the loop becomes vectors")]
    fn are_values_finite(&mut self, keys: Range<usize>) -> bool {
        let is_finite = self.is_finite.get_or_insert_with(|| {
            let mut is_finite = [true; KEY_TILE];
            let rows = self.value.chunks_exact(self.value_columns).take(self.keys.len());
            for (is_finite, row) in is_finite.iter_mut().zip(rows) {
                // Zero times a finite number is zero, and times anything else a NaN.
                let elements = row[..self.value_dim].iter();
                *is_finite = elements.fold(true, |all, &element| all & (element * R::ZERO == R::ZERO));
            }
            is_finite
        });
        is_finite[keys].iter().all(|&is_finite| is_finite)
    }

    /// Adds weights times values for attended keys only: a weight of zero does not hide a NaN or an infinity.
    fn accumulate_attended(&self, strip: &mut QueryStrip<R>, keys: Range<usize>) {
        for (lane, range) in strip.attended.iter().enumerate() {
            let range = within(range, self.keys.start, self.keys.len());
            for (column, output) in strip.output.chunks_exact_mut(strip.columns).enumerate() {
                output[lane] *= self.correction[lane];
                for key in range.clone() {
                    let weight = self.scores[(key - keys.start) * strip.columns + lane];
                    output[lane] += weight * self.value[key * self.value_columns + column];
                }
            }
        }
    }
}

/// What a row does not attend gets a score of minus infinity and hence no weight, whatever the product was.
///
/// The rows of `scores` are keys; `attended` counts from the first of them.
#[expect(clippy::needless_bitwise_bool, reason = "without a branch, the loop becomes vectors")]
fn mask<R: Real>(scores: &mut [R], columns: usize, attended: impl Iterator<Item = Range<usize>>) {
    // Compared in the type of the scores, which has room for the size of a tile, so that vectors can do it.
    let number = |key: usize| R::from_f64(key as f64);
    let (mut starts, mut ends) = ([R::ZERO; MOST_LANES], [R::ZERO; MOST_LANES]);
    for ((start, end), range) in starts.iter_mut().zip(&mut ends).zip(attended) {
        (*start, *end) = (number(range.start), number(range.end));
    }
    for (key, scores) in scores.chunks_exact_mut(columns).enumerate() {
        let key = number(key);
        for (score, (&start, &end)) in scores.iter_mut().zip(starts.iter().zip(&ends)) {
            *score = if (key >= start) & (key < end) { *score } else { R::NEGATIVE_INFINITY };
        }
    }
}

fn finish_tile<R: Real>(
    problem: &Problem,
    scoring: &Scoring<'_>,
    scratch: &mut Scratch<R>,
    tile: OutputTile<'_>,
    strip_rows: usize,
) {
    let sink = scoring.sink();
    let mut log_sum_exp = tile.log_sum_exp;
    let row = &mut scratch.row[..problem.value_dim];
    for (index, bytes) in tile.rows.into_iter().enumerate() {
        let (strip, lane) = (&scratch.strips[index / strip_rows], index % strip_rows);
        let finished = finish(strip.maximum[lane], strip.sum[lane], sink);
        if finished.is_empty {
            bytes.fill(0);
        } else {
            for (element, &column) in row.iter_mut().zip(strip.output[lane..].iter().step_by(strip.columns)) {
                *element = column;
            }
            store(problem.dtype, row, finished.factor, bytes);
        }
        if let Some(rows) = &mut log_sum_exp {
            rows[index] = finished.log_sum_exp.to_f64() as f32;
        }
    }
}
