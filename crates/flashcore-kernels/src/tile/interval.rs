//! Expressions that are the same for all scores of a tile.
//!
//! A term for each distance up to a limit is the same for all that is further away: of most tiles of a long sequence it
//! need be computed once. Whether it is follows from how large and how small the integers of an expression can be in a tile,
//! which costs a few instructions for all of its scores.

use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, ReduceOp, Reg};
use flashcore_problem::expression::{Binary, Expression, Kind, Step, Term, Unary};

use super::LANES;
use super::expression::ExpressionPlace;
use super::expression_bound::BoundExpression;
use super::expression_tables::{ANYTHING, largest_magnitude};
use crate::plan::LONGEST;

/// The scores of a tile: all rows and keys in it, the same for all lanes of a warp.
#[derive(Debug, Clone, Copy)]
pub struct TileSpan {
    /// The first and the last query row.
    pub rows: Span,
    /// No tile has more rows.
    pub most_rows: u32,
    /// The first and the last key.
    pub keys: Span,
    /// No tile has more keys.
    pub most_keys: u32,
}

/// The smallest and the largest that an integer can be.
pub type Span = [Reg<S32>; 2];

/// Whether a term is the same for all scores of a tile; `None` where it hardly ever is, or that cannot be told.
pub(super) fn is_constant(
    k: &mut Builder,
    bound: BoundExpression,
    term: Term,
    place: ExpressionPlace,
    tile: TileSpan,
) -> Option<Reg<Pred>> {
    let mut spans = Spans::new(bound, place, tile, None);
    let mut integers = Vec::new();
    spans.decisive(term, &mut integers)?;
    let mut constant = None;
    for integer in integers {
        let [low, high] = spans.of(k, integer);
        let same = k.compare(Compare::Eq, low, high);
        constant = Some(constant.map_or(same, |others| k.and(others, same)));
    }
    // Ends that are equal say nothing if a sum wraps between them.
    constant.map(|constant| spans.checks.iter().fold(constant, |constant, check| k.and(constant, *check)))
}

/// A table of integers that a warp looks through: its address, the index of its last entry, and the lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct SearchedTable {
    pub(super) entries: (Reg<U64>, Reg<S32>),
    pub(super) lane: Reg<U32>,
}

/// Indices this far apart, at most, have their entries read at once.
const MOST_AT_ONCE: i64 = 255;
/// Entries of a table that are looked through for a span; of more, any integer is expected.
const MOST_ENTRIES: i32 = 1024;
/// Integers that are further apart than this need not have their sums between the sums of their ends.
const WIDEST: i64 = 1 << 31;
/// No row or key of a tile is further from zero than this, not even one behind the last there is.
const FURTHEST: i64 = LONGEST as i64 + 1024;

/// The spans of the integers of an expression in a tile.
pub(super) struct Spans {
    pub(super) expression: &'static Expression,
    bound: BoundExpression,
    place: ExpressionPlace,
    tile: TileSpan,
    /// Without it, entries of tables have no spans.
    table: Option<SearchedTable>,
    /// What must hold if spans are to be right: no sum of theirs wraps between its ends.
    pub(super) checks: Vec<Reg<Pred>>,
}

impl Spans {
    pub(super) const fn new(
        bound: BoundExpression,
        place: ExpressionPlace,
        tile: TileSpan,
        table: Option<SearchedTable>,
    ) -> Self {
        Self { expression: bound.expression, bound, place, tile, table, checks: Vec::new() }
    }

    /// No integer of a term is further from zero than this, if it does not wrap.
    fn magnitude(&self, term: Term) -> i64 {
        match self.expression.step(term) {
            Step::Batch | Step::Head | Step::Query | Step::Key => FURTHEST,
            Step::IntegerSlot(_, size) => largest_magnitude(size),
            Step::Integer(value) => i64::from(value).abs(),
            Step::ShiftRight(a, _) | Step::Unary(Unary::Negate, a) => self.magnitude(a),
            Step::Binary(op, a, b) => {
                let [a, b] = [a, b].map(|operand| self.magnitude(operand));
                match op {
                    Binary::Minimum | Binary::Maximum => a.max(b),
                    Binary::Multiply => a.saturating_mul(b),
                    _ => a.saturating_add(b),
                }
            }
            _ => ANYTHING,
        }
    }

    /// The integers that a term depends on and that depend on rows or keys. `None` where one of them has no span, or
    /// none of its steps makes many values one.
    fn decisive(&self, term: Term, integers: &mut Vec<Term>) -> Option<()> {
        let expression = self.expression;
        let uses = expression.uses(term);
        if uses.score {
            return None;
        }
        if !(uses.query || uses.key) {
            return Some(());
        }
        if expression.kind(term) == Kind::Integer && !matches!(expression.step(term), Step::IntegerAt(_)) {
            if !(self.width(term).is_some() && can_be_constant(expression, term)) {
                return None;
            }
            if !integers.contains(&term) {
                integers.push(term);
            }
            return Some(());
        }
        expression.step(term).operands().try_for_each(|operand| self.decisive(operand, integers))
    }

    /// How far apart the smallest and the largest can be; `None` where they do not follow from those of the operands.
    pub(super) fn width(&self, term: Term) -> Option<i64> {
        let step = self.expression.step(term);
        let width = match step {
            Step::Batch | Step::Head | Step::IntegerSlot(..) | Step::Integer(_) => 0,
            Step::Query => i64::from(self.tile.most_rows) - 1,
            Step::Key => i64::from(self.tile.most_keys) - 1,
            Step::IntegerAt(index) => {
                self.table?;
                self.width(index)?;
                WIDEST - 1
            }
            Step::ShiftRight(a, bits) => (self.width(a)? >> bits) + 1,
            Step::Unary(Unary::Negate, a) => self.width(a)?,
            Step::Binary(op, a, b) => {
                let widths = [self.width(a)?, self.width(b)?];
                match op {
                    Binary::Add | Binary::Subtract => widths[0] + widths[1],
                    Binary::Minimum | Binary::Maximum => widths[0].max(widths[1]),
                    Binary::Multiply => match [a, b].map(|operand| self.expression.step(operand)) {
                        [Step::Integer(times @ 0..), _] => widths[1].checked_mul(i64::from(times))?,
                        [_, Step::Integer(times @ 0..)] => widths[0].checked_mul(i64::from(times))?,
                        _ => return None,
                    },
                    _ => return None,
                }
            }
            _ => return None,
        };
        (width < WIDEST).then_some(width)
    }

    /// The span of an integer that has a width.
    pub(super) fn of(&mut self, k: &mut Builder, term: Term) -> Span {
        match self.expression.step(term) {
            Step::Batch => [self.place.batch; 2],
            Step::Head => [self.place.head; 2],
            Step::Query => self.tile.rows,
            Step::Key => self.tile.keys,
            Step::IntegerSlot(slot, _) => [self.bound.integer(slot); 2],
            Step::Integer(value) => [k.copy(value); 2],
            Step::ShiftRight(a, bits) => self.of(k, a).map(|end| k.shr(end, bits)),
            Step::IntegerAt(index) => {
                let indices = self.of(k, index);
                self.of_entries(k, indices, self.width(index))
            }
            Step::Unary(_, a) => {
                let [low, high] = self.of(k, a);
                let span = [high, low].map(|end| k.sub(0i32, end));
                self.checked(k, term, span)
            }
            Step::Binary(op, a, b) => {
                let ([low, high], [other_low, other_high]) = (self.of(k, a), self.of(k, b));
                match op {
                    Binary::Minimum => [k.min(low, other_low), k.min(high, other_high)],
                    Binary::Maximum => [k.max(low, other_low), k.max(high, other_high)],
                    _ => {
                        let span = match op {
                            Binary::Subtract => [k.sub(low, other_high), k.sub(high, other_low)],
                            Binary::Multiply => [k.mul(low, other_low), k.mul(high, other_high)],
                            _ => [k.add(low, other_low), k.add(high, other_high)],
                        };
                        self.checked(k, term, span)
                    }
                }
            }
            // `width` is asked before.
            step => unreachable!("{step:?} has no span"),
        }
    }

    /// Sums wrap, all between the ends of a span by as much, unless one end does and the other does not. That shows, as
    /// long as a span is not wider than half of all integers.
    fn checked(&mut self, k: &mut Builder, term: Term, span: Span) -> Span {
        if self.magnitude(term) >= ANYTHING {
            self.checks.push(k.compare(Compare::Le, span[0], span[1]));
        }
        span
    }

    /// The smallest and the largest of some entries of the table, whose indices are no further apart than `width`.
    fn of_entries(&self, k: &mut Builder, indices: Span, width: Option<i64>) -> Span {
        let Some(SearchedTable { entries: (table, last), lane }) = self.table else { return indices };
        let [first, end] = indices.map(|index| {
            let index = k.max(index, 0i32);
            k.min(index, last)
        });
        if let Some(width @ ..=MOST_AT_ONCE) = width {
            // All are read at once, those of lanes behind the last again.
            let lane = k.reinterpret::<U32, S32>(lane);
            let own = k.add(first, lane);
            let entries: Vec<_> = (0..=width as i32)
                .step_by(LANES as usize)
                .map(|further| {
                    let index = k.add(own, further);
                    let index = k.min(index, end);
                    let index = k.reinterpret::<S32, U32>(index);
                    let address = k.mad_wide(index, 4u32, table);
                    k.load_one::<S32>(address)
                })
                .collect();
            return [ReduceOp::Min, ReduceOp::Max].map(|op| {
                let of_lane = entries[1..].iter().fold(entries[0], |one, other| match op {
                    ReduceOp::Min => k.min(one, *other),
                    _ => k.max(one, *other),
                });
                k.reduce_warp(op, of_lane)
            });
        }
        let found = [k.copy(i32::MIN), k.copy(i32::MAX)];
        let width = k.sub(end, first);
        let few = k.compare(Compare::Lt, width, MOST_ENTRIES);
        k.if_uniform(few, |k| {
            let lane = k.reinterpret::<U32, S32>(lane);
            let (low, high) = (k.copy(i32::MAX), k.copy(i32::MIN));
            let behind = k.add(end, 1i32);
            k.for_uniform(first, behind, LANES as i32, |k, index| {
                let own = k.add(index, lane);
                let own = k.min(own, end);
                let own = k.reinterpret::<S32, U32>(own);
                let address = k.mad_wide(own, 4u32, table);
                let entry = k.load_one::<S32>(address);
                let (lower, higher) = (k.min(low, entry), k.max(high, entry));
                k.set(low, lower);
                k.set(high, higher);
            });
            let low = k.reduce_warp(ReduceOp::Min, low);
            let high = k.reduce_warp(ReduceOp::Max, high);
            k.set(found[0], low);
            k.set(found[1], high);
        });
        found
    }
}

fn can_be_constant(expression: &Expression, term: Term) -> bool {
    let step = expression.step(term);
    let is_limit = matches!(step, Step::Binary(Binary::Minimum | Binary::Maximum, ..) | Step::ShiftRight(..));
    is_limit || step.operands().any(|operand| can_be_constant(expression, operand))
}
