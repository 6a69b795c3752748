//! The mask of a tile: scores of rows that a lane does not attend become minus infinity.

#![expect(clippy::inline_always, reason = "instructions of a level must end up in its functions")]

use crate::attend::blocked::MAX_LANES;
use crate::simd::real::Real;
use std::ops::Range;

/// Range of rows of a tile that each lane attends, counted from a first one. Unused lanes attend none.
#[derive(Clone, Copy)]
pub(crate) struct LaneRanges {
    starts: [u32; MAX_LANES],
    ends: [u32; MAX_LANES],
}

impl LaneRanges {
    /// From the rows that each lane attends, for rows from `first_row` on.
    pub(crate) fn new(first_row: usize, attended: impl Iterator<Item = Range<usize>>) -> Self {
        let mut ranges = Self { starts: [0; MAX_LANES], ends: [0; MAX_LANES] };
        let offset = |row: usize| u32::try_from(row.saturating_sub(first_row)).unwrap_or(u32::MAX);
        for ((start, end), attended) in ranges.starts.iter_mut().zip(&mut ranges.ends).zip(attended) {
            (*start, *end) = (offset(attended.start), offset(attended.end));
        }
        ranges
    }
}

/// Sets scores that are not attended to minus infinity, which gives them no weight, whatever the product was. `scores` has
/// a row of `lanes` for each row of the tile.
#[inline(always)]
pub(crate) fn mask<R: Real>(scores: &mut [R], lanes: usize, ranges: &LaneRanges) {
    // A copy, which no score can alias, so that it stays in registers.
    let LaneRanges { starts, ends } = *ranges;
    let (starts, ends) = (&starts[..lanes], &ends[..lanes]);
    for (row, scores) in (0_u32..).zip(scores.chunks_exact_mut(lanes)) {
        for ((score, &start), &end) in scores.iter_mut().zip(starts).zip(ends) {
            *score = if start <= row && row < end { *score } else { R::NEGATIVE_INFINITY };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unattended_scores_are_minus_infinity() {
        let ranges = LaneRanges::new(10, [9..11, 10..13, 12..12, 11..40].into_iter());
        let mut scores = vec![1.0_f32; 3 * 5];
        mask(&mut scores, 5, &ranges);
        let attended: Vec<bool> = scores.iter().map(|score| score.is_finite()).collect();
        let expected =
            [[true, true, false, false, false], [false, true, false, true, false], [false, true, false, true, false]];
        assert_eq!(attended, expected.as_flattened());
    }
}
