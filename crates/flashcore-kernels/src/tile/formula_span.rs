//! Formulas that are the same for all scores of a tile.
//!
//! A term for each distance up to a limit is the same for all that is further away: of most tiles of a long sequence it
//! need be computed once. Whether it is follows from how large and how small the integers of a formula can be in a tile,
//! which costs a few instructions for all of its scores.

use flashcore_ir::types::{Pred, S32};
use flashcore_ir::{Builder, Compare, Reg};
use flashcore_problem::formula::{Binary, Formula, Kind, Step, Term, Unary};

use super::formula::FormulaPlace;

/// The scores of a tile: all rows and keys in it, the same for all lanes of a warp.
#[derive(Debug, Clone, Copy)]
pub struct TileSpan {
    /// The first query row.
    pub first_row: Reg<S32>,
    /// How many rows there are.
    pub rows: u32,
    /// The first key.
    pub first_key: Reg<S32>,
    /// How many keys there are.
    pub keys: u32,
}

/// The smallest and the largest that an integer can be.
type Span = [Reg<S32>; 2];

/// Whether a term is the same for all scores of a tile; `None` where it hardly ever is, or that cannot be told.
pub(super) fn is_constant(
    k: &mut Builder,
    formula: &'static Formula,
    term: Term,
    place: FormulaPlace,
    tile: TileSpan,
) -> Option<Reg<Pred>> {
    let mut integers = Vec::new();
    decisive(formula, term, &mut integers)?;
    let mut constant = None;
    for integer in integers {
        let [low, high] = span(k, formula, integer, place, tile);
        let same = k.compare(Compare::Eq, low, high);
        constant = Some(constant.map_or(same, |others| k.and(others, same)));
    }
    constant
}

/// The integers that a term depends on and that depend on rows or keys. `None` where one of them has no span, or none of
/// its steps makes many values one.
fn decisive(formula: &Formula, term: Term, integers: &mut Vec<Term>) -> Option<()> {
    let uses = formula.uses(term);
    if uses.score {
        return None;
    }
    if !(uses.query || uses.key) {
        return Some(());
    }
    if formula.kind(term) == Kind::Integer && !matches!(formula.step(term), Step::IntegerAt(_)) {
        if !(has_span(formula, term) && can_be_constant(formula, term)) {
            return None;
        }
        if !integers.contains(&term) {
            integers.push(term);
        }
        return Some(());
    }
    formula.step(term).operands().try_for_each(|operand| decisive(formula, operand, integers))
}

/// Whether the smallest and the largest follow from those of its operands.
fn has_span(formula: &Formula, term: Term) -> bool {
    let step = formula.step(term);
    let is_monotone = match step {
        Step::Batch | Step::Head | Step::Query | Step::Key | Step::Integer(_) | Step::ShiftRight(..) => true,
        Step::Binary(Binary::Add | Binary::Subtract | Binary::Minimum | Binary::Maximum, ..) => true,
        Step::Binary(Binary::Multiply, a, b) => {
            let is_number = |term| matches!(formula.step(term), Step::Integer(0..));
            is_number(a) || is_number(b)
        }
        Step::Unary(Unary::Negate, _) => true,
        _ => false,
    };
    is_monotone && step.operands().all(|operand| has_span(formula, operand))
}

fn can_be_constant(formula: &Formula, term: Term) -> bool {
    let step = formula.step(term);
    let is_limit = matches!(step, Step::Binary(Binary::Minimum | Binary::Maximum, ..) | Step::ShiftRight(..));
    is_limit || step.operands().any(|operand| can_be_constant(formula, operand))
}

fn span(k: &mut Builder, formula: &Formula, term: Term, place: FormulaPlace, tile: TileSpan) -> Span {
    let of = |k: &mut Builder, operand| span(k, formula, operand, place, tile);
    match formula.step(term) {
        Step::Batch => [place.batch; 2],
        Step::Head => [place.head; 2],
        Step::Query => [tile.first_row, k.add(tile.first_row, tile.rows as i32 - 1)],
        Step::Key => [tile.first_key, k.add(tile.first_key, tile.keys as i32 - 1)],
        Step::Integer(value) => [k.copy(value); 2],
        Step::ShiftRight(a, bits) => of(k, a).map(|end| k.shr(end, bits)),
        Step::Unary(_, a) => {
            let [low, high] = of(k, a);
            [high, low].map(|end| k.sub(0i32, end))
        }
        Step::Binary(op, a, b) => {
            let ([low, high], [other_low, other_high]) = (of(k, a), of(k, b));
            match op {
                Binary::Subtract => [k.sub(low, other_high), k.sub(high, other_low)],
                Binary::Minimum => [k.min(low, other_low), k.min(high, other_high)],
                Binary::Maximum => [k.max(low, other_low), k.max(high, other_high)],
                Binary::Multiply => [k.mul(low, other_low), k.mul(high, other_high)],
                _ => [k.add(low, other_low), k.add(high, other_high)],
            }
        }
        // `has_span` is asked before.
        step => unreachable!("{step:?} has no span"),
    }
}
