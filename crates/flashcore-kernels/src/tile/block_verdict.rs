//! What an expression says of all scores of a tile at once.
//!
//! Comparisons of integers follow from the spans of both sides: where one ends before the other begins, and where each is
//! but one integer. So of most tiles it is known whether they are attended without asking about any score.

use flashcore_ir::types::Pred;
use flashcore_ir::{Builder, Compare, Reg};
use flashcore_problem::expression::{Binary, Kind, Step, Term, Unary};

use super::expression::ExpressionPlace;
use super::expression_bound::BoundExpression;
use super::interval::{SearchedTable, Spans, TileSpan};

/// What is known of a truth; where nothing stands, it may be.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Verdict {
    /// Whether it may hold for some score.
    pub(super) may_hold: Option<Reg<Pred>>,
    /// Whether it may fail for some score.
    pub(super) may_fail: Option<Reg<Pred>>,
}

impl Verdict {
    /// That of the result of an expression.
    pub(super) fn new(
        k: &mut Builder,
        bound: BoundExpression,
        place: ExpressionPlace,
        tile: TileSpan,
        table: SearchedTable,
    ) -> Self {
        let mut spans = Spans::new(bound, place, tile, Some(table));
        let verdict = Self::of(k, &mut spans, bound.expression.result());
        // What follows from spans that are wrong is nothing.
        let [may_hold, may_fail] = [verdict.may_hold, verdict.may_fail].map(|may| {
            spans.checks.iter().fold(may, |may, check| {
                let wrong = k.not(*check);
                may.map(|may| k.or(may, wrong))
            })
        });
        Self { may_hold, may_fail }
    }

    fn of(k: &mut Builder, spans: &mut Spans, term: Term) -> Self {
        match spans.expression.step(term) {
            Step::Unary(Unary::Not, a) => {
                let Self { may_hold, may_fail } = Self::of(k, spans, a);
                Self { may_hold: may_fail, may_fail: may_hold }
            }
            Step::Binary(op @ (Binary::And | Binary::Or), a, b) => {
                let (a, b) = (Self::of(k, spans, a), Self::of(k, spans, b));
                if op == Binary::And {
                    Self { may_hold: both(k, a.may_hold, b.may_hold), may_fail: either(k, a.may_fail, b.may_fail) }
                } else {
                    Self { may_hold: either(k, a.may_hold, b.may_hold), may_fail: both(k, a.may_fail, b.may_fail) }
                }
            }
            Step::Binary(op @ (Binary::Less | Binary::Equal), a, b) => Self::of_comparison(k, spans, op, a, b),
            _ => Self::default(),
        }
    }

    fn of_comparison(k: &mut Builder, spans: &mut Spans, op: Binary, a: Term, b: Term) -> Self {
        let has_span = |term| spans.expression.kind(term) == Kind::Integer && spans.width(term).is_some();
        if !(has_span(a) && has_span(b)) {
            return Self::default();
        }
        let ([low, high], [other_low, other_high]) = (spans.of(k, a), spans.of(k, b));
        let (may_hold, may_fail) = if op == Binary::Less {
            (k.compare(Compare::Lt, low, other_high), k.compare(Compare::Ge, high, other_low))
        } else {
            let begins = k.compare(Compare::Le, low, other_high);
            let ends = k.compare(Compare::Le, other_low, high);
            // Both are but one integer, and the same.
            let [differs, differs_too] =
                [(low, other_high), (high, other_low)].map(|(one, other)| k.compare(Compare::Ne, one, other));
            (k.and(begins, ends), k.or(differs, differs_too))
        };
        Self { may_hold: Some(may_hold), may_fail: Some(may_fail) }
    }
}

/// Where both may be, as far as is known.
fn both(k: &mut Builder, a: Option<Reg<Pred>>, b: Option<Reg<Pred>>) -> Option<Reg<Pred>> {
    match (a, b) {
        (Some(a), Some(b)) => Some(k.and(a, b)),
        (a, b) => a.or(b),
    }
}

/// Where either may be, as far as is known.
fn either(k: &mut Builder, a: Option<Reg<Pred>>, b: Option<Reg<Pred>>) -> Option<Reg<Pred>> {
    let (a, b) = (a?, b?);
    Some(k.or(a, b))
}
