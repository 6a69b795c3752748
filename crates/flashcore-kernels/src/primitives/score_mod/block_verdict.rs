//! Block verdict: whether a `mask_mod` holds for all, some or no scores of a block.
//!
//! Comparisons of integers follow from the intervals of both sides: one ends before the other begins, or each is a single
//! integer. So most blocks are known to be full or empty without evaluating any score.

use flashcore_ir::types::Pred;
use flashcore_ir::{Builder, Compare, Reg};
use flashcore_problem::expression::{Binary, Kind, Step, Term, Unary};

use super::bound::BoundExpression;
use super::codegen::LaneScores;
use super::interval::{Intervals, ScoreBlock, SearchedTable};

/// Bounds of a truth value over a block; `None` means that it may be.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Verdict {
    /// True if it may hold for some score.
    pub(crate) may_hold: Option<Reg<Pred>>,
    /// True if it may fail for some score.
    pub(crate) may_fail: Option<Reg<Pred>>,
}

impl Verdict {
    /// The verdict on the result of an expression.
    pub(crate) fn new(
        k: &mut Builder,
        bound: BoundExpression,
        scores: LaneScores,
        block: ScoreBlock,
        table: SearchedTable,
    ) -> Self {
        let mut intervals = Intervals::new(bound, scores, block, Some(table));
        let verdict = Self::of(k, &mut intervals, bound.expression.result());
        // Nothing follows from intervals that are wrong.
        let [may_hold, may_fail] = [verdict.may_hold, verdict.may_fail].map(|may| {
            intervals.checks.iter().fold(may, |may, check| {
                let wrong = k.not(*check);
                may.map(|may| k.or(may, wrong))
            })
        });
        Self { may_hold, may_fail }
    }

    fn of(k: &mut Builder, intervals: &mut Intervals, term: Term) -> Self {
        match intervals.expression.step(term) {
            Step::Unary(Unary::Not, a) => {
                let Self { may_hold, may_fail } = Self::of(k, intervals, a);
                Self { may_hold: may_fail, may_fail: may_hold }
            }
            Step::Binary(op @ (Binary::And | Binary::Or), a, b) => {
                let (a, b) = (Self::of(k, intervals, a), Self::of(k, intervals, b));
                if op == Binary::And {
                    Self { may_hold: both(k, a.may_hold, b.may_hold), may_fail: either(k, a.may_fail, b.may_fail) }
                } else {
                    Self { may_hold: either(k, a.may_hold, b.may_hold), may_fail: both(k, a.may_fail, b.may_fail) }
                }
            }
            Step::Binary(op @ (Binary::Less | Binary::Equal), a, b) => Self::of_comparison(k, intervals, op, a, b),
            _ => Self::default(),
        }
    }

    fn of_comparison(k: &mut Builder, intervals: &mut Intervals, op: Binary, a: Term, b: Term) -> Self {
        let has_interval = |term| intervals.expression.kind(term) == Kind::Integer && intervals.width(term).is_some();
        if !(has_interval(a) && has_interval(b)) {
            return Self::default();
        }
        let ([low, high], [other_low, other_high]) = (intervals.of(k, a), intervals.of(k, b));
        let (may_hold, may_fail) = if op == Binary::Less {
            (k.compare(Compare::Lt, low, other_high), k.compare(Compare::Ge, high, other_low))
        } else {
            let begins = k.compare(Compare::Le, low, other_high);
            let ends = k.compare(Compare::Le, other_low, high);
            // It may fail unless both are one and the same integer.
            let [differs, differs_too] =
                [(low, other_high), (high, other_low)].map(|(one, other)| k.compare(Compare::Ne, one, other));
            (k.and(begins, ends), k.or(differs, differs_too))
        };
        Self { may_hold: Some(may_hold), may_fail: Some(may_fail) }
    }
}

/// True where both may be, as far as is known.
fn both(k: &mut Builder, a: Option<Reg<Pred>>, b: Option<Reg<Pred>>) -> Option<Reg<Pred>> {
    match (a, b) {
        (Some(a), Some(b)) => Some(k.and(a, b)),
        (a, b) => a.or(b),
    }
}

/// True where either may be, as far as is known.
fn either(k: &mut Builder, a: Option<Reg<Pred>>, b: Option<Reg<Pred>>) -> Option<Reg<Pred>> {
    let (a, b) = (a?, b?);
    Some(k.or(a, b))
}
