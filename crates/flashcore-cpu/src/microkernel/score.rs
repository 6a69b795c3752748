//! Score modifiers: scales of 8-bit tensors, softcap, `ALiBi` and bias on vectors of scores.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::simd::real::Real;
use crate::simd::vector::{MAX_LANES, Vector};

/// A tile of products, to become scores in base 2.
pub(crate) struct ScoreModifiers<'a, R> {
    /// A row of `lanes` for each row of the tile.
    pub(crate) scores: &'a mut [R],
    /// A multiple of the lanes of a vector.
    pub(crate) lanes: usize,
    /// Scales of each lane, which come first.
    pub(crate) lane_scales: Option<&'a [R]>,
    /// Scales of each row of the tile, padded to whole vectors.
    pub(crate) tile_row_scales: Option<&'a [R]>,
    pub(crate) softcap: Option<R>,
    pub(crate) alibi: Option<Alibi<'a, R>>,
    pub(crate) bias: Option<BiasRows<'a>>,
    /// Factor of the result: `log2(e)`, or 1 where a `score_mod` follows.
    pub(crate) base: R,
}

/// `ALiBi`: a slope times the distance of row and lane is subtracted.
#[derive(Clone, Copy)]
pub(crate) struct Alibi<'a, R> {
    /// Slope of the head of each lane.
    pub(crate) slopes: &'a [R],
    /// Position of each lane, counted from that of the first row of the tile.
    pub(crate) positions: &'a [R],
}

/// Bias, which is added.
#[derive(Clone, Copy)]
pub(crate) struct BiasRows<'a> {
    pub(crate) data: &'a [f32],
    /// Index in `data` of the term of the first row for each lane.
    pub(crate) starts: &'a [usize],
    pub(crate) row_stride: usize,
}

impl BiasRows<'_> {
    /// The term of a lane for a row.
    #[inline(always)]
    fn term<R: Real>(&self, lane: usize, row: usize) -> R {
        R::from_f64(f64::from(self.data[self.starts[lane] + row * self.row_stride]))
    }
}

/// Applies the modifiers to a tile.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn modify_scores<V: Vector>(modifiers: ScoreModifiers<'_, V::Real>) {
    let ScoreModifiers { scores, lanes, lane_scales, tile_row_scales, softcap, alibi, bias, base } = modifiers;
    assert!(lanes.is_multiple_of(V::LANES) && scores.len().is_multiple_of(lanes), "scores of half a vector");
    let rows = scores.len() / lanes;
    for lane in (0..lanes).step_by(V::LANES) {
        for first_row in (0..rows).step_by(V::LANES) {
            let count = V::LANES.min(rows - first_row);
            let terms = bias.map(|bias| {
                // Read along the rows of the tile, which are contiguous, and transposed in registers.
                let (mut squares, mut columns) = ([V::Real::ZERO; SQUARE], [V::Real::ZERO; SQUARE]);
                for (offset, of_lane) in squares.chunks_exact_mut(V::LANES).take(V::LANES).enumerate() {
                    for (row, term) in of_lane[..count].iter_mut().enumerate() {
                        *term = bias.term(lane + offset, first_row + row);
                    }
                }
                // SAFETY: both have room for a square of vectors.
                unsafe { V::transpose(squares.as_ptr(), V::LANES, columns.as_mut_ptr(), V::LANES) };
                columns
            });
            for row in 0..count {
                // SAFETY: each row has a vector at this lane, and so have slopes and positions.
                unsafe {
                    let place = scores[(first_row + row) * lanes + lane..][..V::LANES].as_mut_ptr();
                    let mut score = V::load(place);
                    if let Some(scales) = lane_scales {
                        score = score.mul(V::load(scales[lane..][..V::LANES].as_ptr()));
                    }
                    if let Some(scales) = tile_row_scales {
                        score = score.mul(V::splat(scales[first_row + row]));
                    }
                    if let Some(softcap) = softcap {
                        score = score.tanh().mul(V::splat(softcap));
                    }
                    if let Some(alibi) = alibi {
                        let slopes = V::load(alibi.slopes[lane..][..V::LANES].as_ptr());
                        let positions = V::load(alibi.positions[lane..][..V::LANES].as_ptr());
                        let row = V::splat(V::Real::from_f64((first_row + row) as f64));
                        score = score.sub(slopes.mul(positions.sub(row).max(row.sub(positions))));
                    }
                    if let Some(terms) = &terms {
                        score = score.add(V::load(terms[row * V::LANES..][..V::LANES].as_ptr()));
                    }
                    score.mul(V::splat(base)).store(place);
                }
            }
        }
    }
}

const SQUARE: usize = MAX_LANES * MAX_LANES;

/// Applies the modifiers to one query row, whose scores are contiguous: `scores` is padded to whole vectors, and of slopes,
/// positions and starts the first counts.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn modify_row<V: Vector>(modifiers: ScoreModifiers<'_, V::Real>, keys: usize) {
    let ScoreModifiers { scores, lanes: _, lane_scales, tile_row_scales, softcap, alibi, bias, base } = modifiers;
    let counting: [V::Real; MAX_LANES] = std::array::from_fn(|lane| V::Real::from_f64(lane as f64));
    for first_key in (0..keys).step_by(V::LANES) {
        // SAFETY: the scores are whole vectors, and so are the arrays.
        unsafe {
            let place = scores[first_key..][..V::LANES].as_mut_ptr();
            let mut score = V::load(place);
            if let Some(scales) = lane_scales {
                score = score.mul(V::splat(scales[0]));
            }
            if let Some(scales) = tile_row_scales {
                score = score.mul(V::load(scales[first_key..][..V::LANES].as_ptr()));
            }
            if let Some(softcap) = softcap {
                score = score.tanh().mul(V::splat(softcap));
            }
            if let Some(alibi) = alibi {
                let first = alibi.positions[0] - V::Real::from_f64(first_key as f64);
                let distance = V::splat(first).sub(V::load(counting.as_ptr()));
                let distance = distance.max(V::splat(V::Real::ZERO).sub(distance));
                score = score.sub(V::splat(alibi.slopes[0]).mul(distance));
            }
            if let Some(bias) = bias {
                let mut terms = [V::Real::ZERO; MAX_LANES];
                for (offset, term) in terms.iter_mut().take(V::LANES.min(keys - first_key)).enumerate() {
                    *term = bias.term(0, first_key + offset);
                }
                score = score.add(V::load(terms.as_ptr()));
            }
            score.mul(V::splat(base)).store(place);
        }
    }
}
