//! `score_mod` and `mask_mod` expressions on the scores of a row panel and some keys.

use crate::attend::group::Group;
use crate::simd::real::Real;
use flashcore_problem::expression::{Evaluator, Places, WIDTH};
use std::f64::consts::LOG2_E;
use std::ops::Range;

/// Applies the expressions of the problem to scores: a row of `lanes` for each key from `first_key` on, in base 2 unless
/// there is a `score_mod`, and in base 2 afterwards. A key that a row does not attend gets a score of minus infinity.
pub(crate) fn apply<R: Real>(group: &Group<'_>, rows: &Range<usize>, first_key: usize, scores: &mut [R], lanes: usize) {
    let (problem, tables) = (group.problem, group.scoring.tables());
    if let Some(score_mod) = problem.score_mod {
        let base = R::from_f64(LOG2_E);
        let evaluator = Evaluator::new(score_mod.expression(), score_mod.constants(), tables);
        each(group, evaluator, rows, first_key, (scores, lanes), |evaluator, places, scores| {
            let inputs = std::array::from_fn(|lane| scores.get(lane).copied().unwrap_or(R::ZERO));
            let changed = evaluator.scores(places, &inputs);
            for (score, changed) in scores.iter_mut().zip(changed) {
                *score = changed * base;
            }
        });
    }
    if let Some(mask_mod) = problem.mask_mod {
        let evaluator = Evaluator::new(mask_mod.expression(), mask_mod.constants(), tables);
        each(group, evaluator, rows, first_key, (scores, lanes), |evaluator, places, scores| {
            for (score, takes_part) in scores.iter_mut().zip(evaluator.attended(places)) {
                if !takes_part {
                    *score = R::NEGATIVE_INFINITY;
                }
            }
        });
    }
}

/// True if the `mask_mod` leaves a key, of those inside of the mask, to a row.
pub(crate) fn takes_part(group: &Group<'_>, row: usize, key: usize) -> bool {
    group.problem.mask_mod.is_none_or(|mask_mod| {
        let (head, query) = group.place(row);
        !mask_mod.attended(group.scoring.tables(), (group.sequence.index, head, query), std::iter::once(key)).is_empty()
    })
}

/// Calls `change` with the places of the scores of one key and up to [`WIDTH`] rows, and with the scores.
fn each<R: Real>(
    group: &Group<'_>,
    mut evaluator: Evaluator<'_, R>,
    rows: &Range<usize>,
    first_key: usize,
    (scores, lanes): (&mut [R], usize),
    change: impl Fn(&mut Evaluator<'_, R>, &Places, &mut [R]),
) {
    for lane in (0..rows.len()).step_by(WIDTH) {
        let count = WIDTH.min(rows.len() - lane);
        // Lanes past the last row are those of the last.
        let place = |offset: usize| group.place(rows.start + lane + offset.min(count - 1));
        let mut places = Places {
            batch: group.sequence.index as i32,
            head: std::array::from_fn(|offset| place(offset).0 as i32),
            query: std::array::from_fn(|offset| place(offset).1 as i32),
            key: [0; WIDTH],
        };
        for (key, scores) in (first_key..).zip(scores.chunks_exact_mut(lanes)) {
            places.key = [key as i32; WIDTH];
            change(&mut evaluator, &places, &mut scores[lane..lane + count]);
        }
    }
}
