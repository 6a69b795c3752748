//! Score modifiers: scales of 8-bit tensors, softcap, `ALiBi` and bias on vectors of scores.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::simd::real::Real;
use crate::simd::vector::{MAX_LANES, Vector};

/// Products of keys and a row panel, to become scores in base 2.
pub(crate) struct ScoreModifiers<'a, R> {
    /// A row of `lanes` for each key.
    pub(crate) scores: &'a mut [R],
    /// A multiple of the lanes of a vector.
    pub(crate) lanes: usize,
    /// Scales of the query row of each lane, which come first.
    pub(crate) row_scales: Option<&'a [R]>,
    /// Scales of each key, padded to whole vectors.
    pub(crate) key_scales: Option<&'a [R]>,
    pub(crate) softcap: Option<R>,
    pub(crate) alibi: Option<Alibi<'a, R>>,
    pub(crate) bias: Option<BiasRows<'a>>,
    /// Factor of the result: `log2(e)`, or 1 where a `score_mod` follows.
    pub(crate) base: R,
}

/// `ALiBi`: a slope times the distance of the key is subtracted.
#[derive(Clone, Copy)]
pub(crate) struct Alibi<'a, R> {
    /// Slope of the head of each lane.
    pub(crate) slopes: &'a [R],
    /// Position of the row of each lane, counted from the first key.
    pub(crate) positions: &'a [R],
}

/// Bias, which is added.
#[derive(Clone, Copy)]
pub(crate) struct BiasRows<'a> {
    pub(crate) data: &'a [f32],
    /// Index in `data` of the first key's term for the row of each lane.
    pub(crate) starts: &'a [usize],
    pub(crate) key_stride: usize,
}

impl BiasRows<'_> {
    /// The term of a lane for a key.
    #[inline(always)]
    fn term<R: Real>(&self, lane: usize, key: usize) -> R {
        R::from_f64(f64::from(self.data[self.starts[lane] + key * self.key_stride]))
    }
}

/// Applies the modifiers to a row panel.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn modify_scores<V: Vector>(modifiers: ScoreModifiers<'_, V::Real>) {
    let ScoreModifiers { scores, lanes, row_scales, key_scales, softcap, alibi, bias, base } = modifiers;
    assert!(lanes.is_multiple_of(V::LANES) && scores.len().is_multiple_of(lanes), "scores of half a vector");
    let keys = scores.len() / lanes;
    for lane in (0..lanes).step_by(V::LANES) {
        for first_key in (0..keys).step_by(V::LANES) {
            let count = V::LANES.min(keys - first_key);
            let terms = bias.map(|bias| {
                // Read along the keys, which are contiguous, and transposed in registers.
                let (mut rows, mut columns) = ([V::Real::ZERO; SQUARE], [V::Real::ZERO; SQUARE]);
                for (offset, row) in rows.chunks_exact_mut(V::LANES).take(V::LANES).enumerate() {
                    for (key, term) in row[..count].iter_mut().enumerate() {
                        *term = bias.term(lane + offset, first_key + key);
                    }
                }
                // SAFETY: both have room for a square of vectors.
                unsafe { V::transpose(rows.as_ptr(), V::LANES, columns.as_mut_ptr(), V::LANES) };
                columns
            });
            for key in 0..count {
                // SAFETY: the row of each key has a vector at this lane, and so have slopes and positions.
                unsafe {
                    let place = scores[(first_key + key) * lanes + lane..][..V::LANES].as_mut_ptr();
                    let mut score = V::load(place);
                    if let Some(scales) = row_scales {
                        score = score.mul(V::load(scales[lane..][..V::LANES].as_ptr()));
                    }
                    if let Some(scales) = key_scales {
                        score = score.mul(V::splat(scales[first_key + key]));
                    }
                    if let Some(softcap) = softcap {
                        score = score.tanh().mul(V::splat(softcap));
                    }
                    if let Some(alibi) = alibi {
                        let slopes = V::load(alibi.slopes[lane..][..V::LANES].as_ptr());
                        let positions = V::load(alibi.positions[lane..][..V::LANES].as_ptr());
                        let key = V::splat(V::Real::from_f64((first_key + key) as f64));
                        score = score.sub(slopes.mul(positions.sub(key).max(key.sub(positions))));
                    }
                    if let Some(terms) = &terms {
                        score = score.add(V::load(terms[key * V::LANES..][..V::LANES].as_ptr()));
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
    let ScoreModifiers { scores, lanes: _, row_scales, key_scales, softcap, alibi, bias, base } = modifiers;
    let counting: [V::Real; MAX_LANES] = std::array::from_fn(|lane| V::Real::from_f64(lane as f64));
    for first_key in (0..keys).step_by(V::LANES) {
        // SAFETY: the scores are whole vectors, and so are the arrays.
        unsafe {
            let place = scores[first_key..][..V::LANES].as_mut_ptr();
            let mut score = V::load(place);
            if let Some(scales) = row_scales {
                score = score.mul(V::splat(scales[0]));
            }
            if let Some(scales) = key_scales {
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
