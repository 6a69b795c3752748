//! Expressions by name: those that suites, the command line and benches use.

use flashcore_problem::{MaskMod, Problem, ScoreMod};

/// Distances, to both sides, that [`score_mod`]'s `relative` tells apart.
const FURTHEST: i32 = 128;

/// The names of expressions for scores.
pub const SCORE_MODS: [&str; 5] = ["relative", "distance", "capped", "tempered", "near"];
/// The names of expressions for masks.
pub const MASK_MODS: [&str; 4] = ["documents", "prefix", "blocks", "dilated"];

/// An expression for scores, by name.
pub fn score_mod(name: &str) -> Option<ScoreMod> {
    Some(match name {
        // A learned term for each head and distance, the same for all that are further.
        "relative" => ScoreMod::new(name, |score, at| {
            let distance = (at.query - at.key).max(-FURTHEST).min(FURTHEST);
            score + at.number(at.head * (2 * FURTHEST + 1) + distance + FURTHEST)
        }),
        // Attention falls with distance, the same for all heads.
        "distance" => ScoreMod::new(name, |score, at| score - (at.query - at.key).abs().to_number() * 0.03),
        "capped" => ScoreMod::new(name, |score, _| (score / 3.0).tanh() * 3.0),
        // Each batch has a temperature, and each head another.
        "tempered" => ScoreMod::new(name, |score, at| score * (at.number(at.batch + at.head).min(0.5).exp() + 0.25)),
        // Low scores count less so, high scores more; twice as much weight for adjacent keys.
        "near" => ScoreMod::new(name, |score, at| {
            let bent = score.less(0.0).number(score * 0.5, score.abs() * 1.5);
            let is_near = (at.query - at.key).abs().less(17);
            is_near.number(bent + core::f32::consts::LN_2, bent.max(-4.0))
        }),
        _ => return None,
    })
}

/// An expression for masks, by name.
pub fn mask_mod(name: &str) -> Option<MaskMod> {
    Some(match name {
        // Several sequences one after the other, by a number for each position.
        "documents" => MaskMod::new(name, |at| at.integer(at.query).equals(at.integer(at.key))),
        // The first keys for all, and causal after them.
        "prefix" => MaskMod::new(name, |at| at.key.less(37) | at.query.at_least(at.key)),
        // Every other block of 32 by 64.
        "blocks" => MaskMod::new(name, |at| {
            let sum = (at.query >> 5) + (at.key >> 6);
            sum.equals((sum >> 1) * 2)
        }),
        // Every third key, the other way round in every other head.
        "dilated" => MaskMod::new(name, |at| {
            let third = (at.key * 21846) >> 16;
            let is_third = at.key.equals(third * 3);
            at.head.less(1) & is_third | at.head.more(0) & !is_third
        }),
        _ => return None,
    })
}

/// Gives a problem expressions, and the tables that they read.
pub fn give(problem: &mut Problem, score: Option<ScoreMod>, mask: Option<MaskMod>) {
    (problem.score_mod, problem.mask_mod) = (score, mask);
    let (mut numbers, mut integers) = (false, false);
    for (_, expression) in problem.expressions() {
        let (reads_numbers, reads_integers) = expression.tables();
        (numbers, integers) = (numbers || reads_numbers, integers || reads_integers);
    }
    problem.aux_f32 = if numbers { (2 * FURTHEST as usize + 1).saturating_mul(problem.query_heads.max(1)) } else { 0 };
    // Longest first: where there are fewer queries than keys, they are numbered from 0 on like the keys.
    problem.aux_i32 = if integers { problem.query_length.max(problem.key_length).max(1) } else { 0 };
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::DType;

    #[test]
    fn every_name_has_a_expression_that_is_valid() {
        for name in SCORE_MODS {
            let mut problem = Problem::new(1, 2, 200, 64, DType::F16);
            give(&mut problem, Some(score_mod(name).expect(name)), None);
            assert_eq!(problem.validate(), Ok(()), "{name}");
        }
        for name in MASK_MODS {
            let mut problem = Problem::new(1, 2, 200, 64, DType::F16);
            give(&mut problem, None, Some(mask_mod(name).expect(name)));
            assert_eq!(problem.validate(), Ok(()), "{name}");
        }
        assert_eq!((score_mod("none"), mask_mod("none")), (None, None));
    }

    /// Meaning of the arithmetic in `dilated`.
    #[test]
    fn a_third_is_a_third() {
        for key in 0..30_000 {
            assert_eq!((key * 21846) >> 16, key / 3);
        }
    }
}
