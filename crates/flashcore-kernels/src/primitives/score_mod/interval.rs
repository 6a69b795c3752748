//! Interval arithmetic over a block: the smallest and the largest that an integer of an expression can be in it.
//!
//! A term that depends on the distance up to a limit is constant beyond it: for most blocks of a long sequence it need be
//! computed once. The intervals of the integers of the expression tell, for a few instructions per block.

use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, ReduceOp, Reg};
use flashcore_problem::expression::{Binary, Expression, Kind, Step, Term, Unary};

use super::bound::BoundExpression;
use super::codegen::LaneScores;
use super::tables::{ANYTHING, largest_magnitude};
use crate::primitives::LANES;
use crate::unsupported::LONGEST;

/// The scores of a block: all rows and keys in it, the same for all lanes of a warp.
#[derive(Debug, Clone, Copy)]
pub struct ScoreBlock {
    /// The first and the last query row.
    pub rows: Interval,
    /// The most rows of a block.
    pub max_rows: u32,
    /// The first and the last key.
    pub keys: Interval,
    /// The most keys of a block.
    pub max_keys: u32,
}

/// The smallest and the largest that an integer can be.
pub type Interval = [Reg<S32>; 2];

/// True if a term is the same for all scores of a block; `None` where it hardly ever is, or intervals cannot tell.
pub(crate) fn is_constant(
    k: &mut Builder,
    bound: BoundExpression,
    term: Term,
    scores: LaneScores,
    block: ScoreBlock,
) -> Option<Reg<Pred>> {
    let mut intervals = Intervals::new(bound, scores, block, None);
    let mut integers = Vec::new();
    intervals.decisive(term, &mut integers)?;
    let mut constant = None;
    for integer in integers {
        let [low, high] = intervals.of(k, integer);
        let same = k.compare(Compare::Eq, low, high);
        constant = Some(constant.map_or(same, |others| k.and(others, same)));
    }
    // Equal ends tell nothing if a sum wraps between them.
    constant.map(|constant| intervals.checks.iter().fold(constant, |constant, check| k.and(constant, *check)))
}

/// A table of integers that a warp searches: its address, the index of its last entry, and the lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SearchedTable {
    pub(crate) entries: (Reg<U64>, Reg<S32>),
    pub(crate) lane: Reg<U32>,
}

/// The widest interval of indices whose entries are loaded at once.
const MAX_AT_ONCE: i64 = 255;
/// The most entries of a table that are searched for an interval; of more, any integer is expected.
const MAX_ENTRIES: i32 = 1024;
/// Integers further apart than this need not have their sums between the sums of their ends.
const WIDEST: i64 = 1 << 31;
/// The largest row or key of a block, even past the last that exists.
const FURTHEST: i64 = LONGEST as i64 + 1024;

/// The intervals of the integers of an expression in a block.
pub(crate) struct Intervals {
    pub(crate) expression: &'static Expression,
    bound: BoundExpression,
    scores: LaneScores,
    block: ScoreBlock,
    /// Without it, entries of tables have no intervals.
    table: Option<SearchedTable>,
    /// Conditions of the intervals: no sum wraps between its ends.
    pub(crate) checks: Vec<Reg<Pred>>,
}

impl Intervals {
    pub(crate) const fn new(
        bound: BoundExpression,
        scores: LaneScores,
        block: ScoreBlock,
        table: Option<SearchedTable>,
    ) -> Self {
        Self { expression: bound.expression, bound, scores, block, table, checks: Vec::new() }
    }

    /// Bound of the magnitude of a term, if it does not wrap.
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

    /// Collects the integers that a term depends on and that depend on rows or keys. `None` where one of them has no
    /// interval, or no step of it makes many values one.
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

    /// The largest width of an interval; `None` where it does not follow from those of the operands.
    pub(crate) fn width(&self, term: Term) -> Option<i64> {
        let step = self.expression.step(term);
        let width = match step {
            Step::Batch | Step::Head | Step::IntegerSlot(..) | Step::Integer(_) => 0,
            Step::Query => i64::from(self.block.max_rows) - 1,
            Step::Key => i64::from(self.block.max_keys) - 1,
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

    /// The interval of an integer that has a width.
    pub(crate) fn of(&mut self, k: &mut Builder, term: Term) -> Interval {
        match self.expression.step(term) {
            Step::Batch => [self.scores.batch; 2],
            Step::Head => [self.scores.head; 2],
            Step::Query => self.block.rows,
            Step::Key => self.block.keys,
            Step::IntegerSlot(slot, _) => [self.bound.integer(slot); 2],
            Step::Integer(value) => [k.copy(value); 2],
            Step::ShiftRight(a, bits) => self.of(k, a).map(|end| k.shr(end, bits)),
            Step::IntegerAt(index) => {
                let indices = self.of(k, index);
                self.of_entries(k, indices, self.width(index))
            }
            Step::Unary(_, a) => {
                let [low, high] = self.of(k, a);
                let interval = [high, low].map(|end| k.sub(0i32, end));
                self.checked(k, term, interval)
            }
            Step::Binary(op, a, b) => {
                let ([low, high], [other_low, other_high]) = (self.of(k, a), self.of(k, b));
                match op {
                    Binary::Minimum => [k.min(low, other_low), k.min(high, other_high)],
                    Binary::Maximum => [k.max(low, other_low), k.max(high, other_high)],
                    _ => {
                        let interval = match op {
                            Binary::Subtract => [k.sub(low, other_high), k.sub(high, other_low)],
                            Binary::Multiply => [k.mul(low, other_low), k.mul(high, other_high)],
                            _ => [k.add(low, other_low), k.add(high, other_high)],
                        };
                        self.checked(k, term, interval)
                    }
                }
            }
            // `width` has refused it.
            step => unreachable!("{step:?} has no interval"),
        }
    }

    /// Checks that a sum does not wrap between its ends. All between them wrap alike unless one end does and the other does
    /// not, which shows as long as an interval is not wider than half of all integers.
    fn checked(&mut self, k: &mut Builder, term: Term, interval: Interval) -> Interval {
        if self.magnitude(term) >= ANYTHING {
            self.checks.push(k.compare(Compare::Le, interval[0], interval[1]));
        }
        interval
    }

    /// The interval of the entries of the table whose indices lie in an interval no wider than `width`.
    fn of_entries(&self, k: &mut Builder, indices: Interval, width: Option<i64>) -> Interval {
        let Some(SearchedTable { entries: (table, last), lane }) = self.table else { return indices };
        let [first, end] = indices.map(|index| k.eval(index.max(0).min(last)));
        if let Some(width @ ..=MAX_AT_ONCE) = width {
            // All are loaded at once; lanes past the last load it again.
            let own = k.eval(first + lane.signed());
            let entries: Vec<_> = (0..=width as i32)
                .step_by(LANES as usize)
                .map(|further| {
                    let index = k.eval((own + further).min(end).unsigned());
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
        let few = k.eval((end - first).lt(MAX_ENTRIES));
        k.if_uniform(few, |k| {
            let lane = k.reinterpret::<U32, S32>(lane);
            let (low, high) = (k.copy(i32::MAX), k.copy(i32::MIN));
            let past_end = k.add(end, 1i32);
            k.for_uniform(first, past_end, LANES as i32, |k, index| {
                let own = k.eval((index + lane).min(end).unsigned());
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
