//! Expressions as code: their steps for each score of a tile.
//!
//! Query rows and keys of a tile are registers plus numbers that are known when the code is written. Sums and differences
//! of them stay like that, so that the distance of a score costs no instruction of its own: the difference of the
//! registers is computed once for a tile. What depends on the row or the key alone is computed once for it, and what is
//! read from a table for a row once for all tiles of keys.

use core::f32::consts::{LN_2, LOG2_E};
use std::collections::HashMap;

use flashcore_ir::types::{F32, Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Operand, Reg, Value};
use flashcore_problem::expression::{Binary, Expression, Kind, Step, Term, Unary, Uses};

use super::block_verdict::Verdict;
use super::expression_bound::BoundExpression;
use super::expression_tables::{ANYTHING, ExpressionTables, Offset, entry, goes_with_key, largest_magnitude, read_run};
use super::interval::{SearchedTable, TileSpan, is_constant};
use super::scores::{exact_tanh_of_half, tanh_of_half};
use super::{Accumulator, ROW_STEP};
use crate::plan::LONGEST;

/// What the scores of a lane have in common.
#[derive(Debug, Clone, Copy)]
pub struct ExpressionPlace {
    /// The batch.
    pub batch: Reg<S32>,
    /// The query head.
    pub head: Reg<S32>,
    /// The first query row of the lane; the others are [`ROW_STEP`] further on each.
    pub query: Reg<S32>,
}

/// An expression for the rows of a lane.
#[derive(Debug, Clone)]
pub struct ExpressionCode {
    expression: &'static Expression,
    bound: BoundExpression,
    tables: ExpressionTables,
    place: ExpressionPlace,
    /// Whether results are to have all bits of an `f32`.
    exact: bool,
    /// One over each constant that something is divided by.
    reciprocals: HashMap<Term, Reg<F32>>,
    /// What was read before the first tile.
    known: HashMap<Spot, Lowered>,
}

/// A term for a row and a column; `None` for all, where it does not depend on them.
type Spot = (Term, Option<usize>, Option<u32>);

/// A term in registers.
#[derive(Debug, Clone, Copy)]
enum Lowered {
    Number(Value<F32>),
    Integer(Offset),
    Truth(Reg<Pred>),
}

impl Lowered {
    const fn number(self) -> Value<F32> {
        match self {
            Self::Number(number) => number,
            Self::Integer(_) | Self::Truth(_) => unreachable!(),
        }
    }

    const fn integer(self) -> Offset {
        match self {
            Self::Integer(integer) => integer,
            Self::Number(_) | Self::Truth(_) => unreachable!(),
        }
    }

    const fn truth(self) -> Reg<Pred> {
        match self {
            Self::Truth(truth) => truth,
            Self::Number(_) | Self::Integer(_) => unreachable!(),
        }
    }

    /// What makes it the same as another.
    fn identity(self) -> (Kind, Operand, i32) {
        match self {
            Self::Number(number) => (Kind::Number, number.operand(), 0),
            Self::Integer(Offset { base, plus, .. }) => {
                (Kind::Integer, base.map_or_else(|| Value::<S32>::from(0i32), Value::from).operand(), plus)
            }
            Self::Truth(truth) => (Kind::Truth, Value::from(truth).operand(), 0),
        }
    }
}

/// What was done with which registers and numbers.
type Operation = (Step, Vec<(Kind, Operand, i32)>);

impl ExpressionCode {
    /// For `rows` rows of a lane. Reads what each row needs of the tables.
    pub fn new(
        k: &mut Builder,
        bound: BoundExpression,
        tables: ExpressionTables,
        place: ExpressionPlace,
        rows: usize,
        exact: bool,
    ) -> Self {
        let expression = bound.expression;
        let reciprocals = if exact { HashMap::new() } else { reciprocals(k, bound) };
        let mut code = Self { expression, bound, tables, place, exact, reciprocals, known: HashMap::new() };
        for row in 0..rows {
            // Nothing is read here that depends on a key.
            code.read(k, place.query, row, 0, |uses| !uses.key);
        }
        code
    }

    /// Says which keys the columns 0, 1 and so on have, which need not be neighbours, and reads what each needs of the tables
    /// where that does not depend on the row.
    pub fn read_keys(&mut self, k: &mut Builder, keys: &[Reg<S32>]) {
        for (column, key) in (0..).zip(keys) {
            for term in self.expression.terms().filter(|term| self.expression.step(*term) == Step::Key) {
                let key = Lowered::Integer(Offset::within(*key, LONGEST as i64));
                self.known.insert((term, None, Some(column)), key);
            }
            self.read(k, *key, 0, column, |uses| !uses.query);
        }
    }

    /// The same for another row, the only one of the lane.
    #[must_use]
    pub fn for_row(&self, k: &mut Builder, query: Reg<S32>) -> Self {
        let mut code = Self { place: ExpressionPlace { query, ..self.place }, ..self.clone() };
        // What is known of other rows says nothing of this one.
        code.known.retain(|(_, row, _), _| row.is_none());
        code.read(k, query, 0, 0, |uses| !uses.key);
        code
    }

    fn read(&mut self, k: &mut Builder, key: Reg<S32>, row: usize, column: u32, is_wanted: fn(Uses) -> bool) {
        let mut tile = self.of_tile(key);
        for term in self.expression.terms() {
            let is_read = matches!(self.expression.step(term), Step::NumberAt(_) | Step::IntegerAt(_));
            let uses = self.expression.uses(term);
            if is_read && !uses.score && is_wanted(uses) {
                tile.term(k, term, row, column, None);
            }
        }
        self.known = tile.known;
    }

    /// For the tile whose first key, in this lane, is `key`.
    pub fn of_tile(&self, key: Reg<S32>) -> ExpressionOfTile<'_> {
        ExpressionOfTile { code: self, key, known: self.known.clone(), written: HashMap::new() }
    }

    /// Whether some row may attend some key of a tile, and whether some may not: as far as is known without asking about
    /// each. `None` where that says nothing. The lanes of a warp look through tables together.
    pub fn of_whole_tile(&self, k: &mut Builder, tile: TileSpan, lane: Reg<U32>) -> Option<[Reg<Pred>; 2]> {
        let table = SearchedTable { entries: self.tables.integers, lane };
        let Verdict { may_hold, may_fail } = Verdict::new(k, self.bound, self.place, tile, table);
        if may_hold.is_none() && may_fail.is_none() {
            return None;
        }
        Some([may_hold, may_fail].map(|may| {
            may.unwrap_or_else(|| {
                let anything = k.copy(0u32);
                k.compare(Compare::Eq, anything, 0u32)
            })
        }))
    }

    /// For the tile whose first key, in this lane, is `key`, with what its keys need of the tables read; of `scores` only
    /// the columns count, they need not be there yet.
    pub fn read_tile(&self, k: &mut Builder, scores: &Accumulator, key: Reg<S32>) -> ExpressionOfTile<'_> {
        let mut tile = self.of_tile(key);
        let mut columns = Vec::new();
        scores.each(|row, column, _| columns.extend((row == 0).then_some(column)));
        tile.read_runs(k, &columns);
        tile
    }
}

/// An expression that does nothing but add a term to scores, where nothing else is done to them but scaling.
#[derive(Debug, Clone)]
pub struct AddedTerm {
    /// The expression.
    pub code: ExpressionCode,
    /// What the term is divided by, since scores are scaled later: as what it is multiplied by.
    pub inverse_scale: Reg<F32>,
}

impl AddedTerm {
    /// Adds the term to the products of a tile, in which the first key of this lane is `key`.
    pub fn apply(&self, k: &mut Builder, products: &Accumulator, key: Reg<S32>, tile: TileSpan) {
        let ExpressionCode { expression, bound, place, .. } = self.code;
        let Some((added, sign)) = expression.added_term() else { return };
        let factor = if sign < 0.0 { k.neg(self.inverse_scale) } else { self.inverse_scale };
        let each = |k: &mut Builder| {
            let mut of_tile = self.code.of_tile(key);
            products.each(|row, column, product| {
                let term = of_tile.term(k, added, row, column, None).number();
                k.fma_to(product, term, factor);
            });
        };
        match is_constant(k, bound, added, place, tile) {
            None => each(k),
            Some(constant) => k.if_else_uniform(
                constant,
                |k| {
                    let first = self.code.for_row(k, tile.rows[0]);
                    let term = first.of_tile(tile.keys[0]).term(k, added, 0, 0, None).number();
                    let term = k.mul(term, factor);
                    products.each(|_, _, product| k.add_to(product, term));
                },
                each,
            ),
        }
    }
}

/// An expression for the scores of one tile of keys.
pub struct ExpressionOfTile<'a> {
    code: &'a ExpressionCode,
    key: Reg<S32>,
    known: HashMap<Spot, Lowered>,
    /// What was written for this tile: two rows and two keys that are as far apart have the same distance, and whatever
    /// follows from it.
    written: HashMap<Operation, Lowered>,
}

impl ExpressionOfTile<'_> {
    /// What becomes of a score in base 2, in base 2.
    pub fn score(&mut self, k: &mut Builder, row: usize, column: u32, score: Reg<F32>) -> Reg<F32> {
        let expression = self.code.expression;
        if let Some((added, sign)) = expression.added_term() {
            let added = self.term(k, added, row, column, None).number();
            return k.fma(added, sign * LOG2_E, score);
        }
        let natural = k.mul(score, LN_2);
        let result = self.term(k, expression.result(), row, column, Some(natural)).number();
        k.mul(result, LOG2_E)
    }

    /// Takes out the keys that a row does not attend.
    pub fn mask(&mut self, k: &mut Builder, scores: &Accumulator) {
        scores.each(|row, column, score| {
            let attended = self.attended(k, row, column);
            let masked = k.not(attended);
            k.set_where(score, masked, f32::NEG_INFINITY);
        });
    }

    /// Whether a row attends a key.
    pub fn attended(&mut self, k: &mut Builder, row: usize, column: u32) -> Reg<Pred> {
        self.term(k, self.code.expression.result(), row, column, None).truth()
    }

    /// Reads entries of tables that stand side by side for keys that do: where none of them is beyond an end of the table,
    /// which is asked once, they cost nothing but the reading.
    fn read_runs(&mut self, k: &mut Builder, columns: &[u32]) {
        let ExpressionCode { expression, tables, .. } = *self.code;
        for term in expression.terms() {
            let (Step::NumberAt(index) | Step::IntegerAt(index)) = expression.step(term) else { continue };
            let uses = expression.uses(term);
            if uses.query || uses.score || !goes_with_key(expression, index) {
                continue;
            }
            let places: Vec<_> = columns.iter().map(|&column| self.term(k, index, 0, column, None).integer()).collect();
            let entries: Vec<_> = if expression.kind(term) == Kind::Number {
                let entries = read_run::<F32>(k, tables.numbers, &places);
                entries.into_iter().map(|entry| Lowered::Number(entry.into())).collect()
            } else {
                let entries = read_run::<S32>(k, tables.integers, &places);
                entries.into_iter().map(|entry| Lowered::Integer(Offset::within(entry, ANYTHING))).collect()
            };
            for (column, entry) in columns.iter().zip(entries) {
                self.known.insert((term, None, Some(*column)), entry);
            }
        }
    }

    fn term(&mut self, k: &mut Builder, term: Term, row: usize, column: u32, score: Option<Reg<F32>>) -> Lowered {
        let uses = self.code.expression.uses(term);
        let spot = (term, (uses.query || uses.score).then_some(row), (uses.key || uses.score).then_some(column));
        if let Some(known) = self.known.get(&spot) {
            return *known;
        }
        let lowered = self.lower(k, term, row, column, score);
        self.known.insert(spot, lowered);
        lowered
    }

    fn lower(&mut self, k: &mut Builder, term: Term, row: usize, column: u32, score: Option<Reg<F32>>) -> Lowered {
        let ExpressionCode { expression, bound, place, .. } = *self.code;
        let position = |register, plus: u32| {
            Lowered::Integer(Offset { base: Some(register), plus: plus as i32, bound: LONGEST as i64 })
        };
        let step = expression.step(term);
        match step {
            Step::Score => Lowered::Number(score.map_or_else(|| Value::from(0.0f32), Value::from)),
            Step::Batch => position(place.batch, 0),
            Step::Head => position(place.head, 0),
            Step::Query => position(place.query, row as u32 * ROW_STEP),
            Step::Key => position(self.key, column),
            Step::NumberSlot(slot) => Lowered::Number(bound.number(slot).into()),
            Step::IntegerSlot(slot, size) => {
                Lowered::Integer(Offset::within(bound.integer(slot), largest_magnitude(size)))
            }
            Step::Number(bits) => Lowered::Number(Value::from(f32::from_bits(bits))),
            Step::Integer(value) => Lowered::Integer(Offset::number(value)),
            Step::Unary(Unary::ToNumber, a) => {
                // The magnitude of a number is free.
                let (integer, is_magnitude) = match expression.step(a) {
                    Step::Unary(Unary::Absolute, integer) => (integer, true),
                    _ => (a, false),
                };
                let integer = self.term(k, integer, row, column, score).integer();
                let number = self.number_of(k, integer);
                Lowered::Number(if is_magnitude { k.abs(number) } else { number }.into())
            }
            _ => {
                let operands: Vec<Lowered> =
                    step.operands().map(|operand| self.term(k, operand, row, column, score)).collect();
                self.operation(k, step, &operands)
            }
        }
    }

    /// What a step makes of its operands; the same of the same is written once.
    fn operation(&mut self, k: &mut Builder, step: Step, operands: &[Lowered]) -> Lowered {
        let operation = (step, operands.iter().map(|operand| operand.identity()).collect());
        if let Some(written) = self.written.get(&operation) {
            return *written;
        }
        let lowered = match (step, operands) {
            (Step::Unary(op, _), &[a]) => unary(k, op, a, self.code.exact),
            (Step::Binary(op, _, divisor), &[Lowered::Number(a), Lowered::Number(b)]) => {
                match self.code.reciprocals.get(&divisor) {
                    Some(reciprocal) if op == Binary::Divide => Lowered::Number(k.mul(a, *reciprocal).into()),
                    _ => binary_of_numbers(k, op, a, b),
                }
            }
            (Step::Binary(op, _, _), &[Lowered::Integer(a), Lowered::Integer(b)]) => {
                self.binary_of_integers(k, op, a, b)
            }
            (Step::Binary(op, _, _), &[Lowered::Truth(a), Lowered::Truth(b)]) => {
                Lowered::Truth(if op == Binary::And { k.and(a, b) } else { k.or(a, b) })
            }
            (_, &[Lowered::Truth(condition), Lowered::Number(yes), Lowered::Number(no)]) => {
                Lowered::Number(k.select(condition, yes, no).into())
            }
            (_, &[Lowered::Truth(condition), Lowered::Integer(yes), Lowered::Integer(no)]) => {
                let [one, other] = [yes, no].map(|offset| offset.register(k));
                Lowered::Integer(Offset::within(k.select(condition, one, other), yes.bound.max(no.bound)))
            }
            (Step::NumberAt(_), &[Lowered::Integer(at)]) => {
                let address = entry(k, self.code.tables.numbers, at);
                Lowered::Number(k.load_one::<F32>(address).into())
            }
            (Step::IntegerAt(_), &[Lowered::Integer(at)]) => {
                let address = entry(k, self.code.tables.integers, at);
                Lowered::Integer(Offset::within(k.load_one::<S32>(address), ANYTHING))
            }
            (Step::ShiftRight(_, bits), &[Lowered::Integer(a)]) => {
                let register = a.register(k);
                Lowered::Integer(Offset::within(k.shr(register, bits), a.bound))
            }
            // Expressions are written through handles that have the right kinds.
            _ => unreachable!("{step:?} of {operands:?}"),
        };
        self.written.insert(operation, lowered);
        lowered
    }

    fn binary_of_integers(&mut self, k: &mut Builder, op: Binary, a: Offset, b: Offset) -> Lowered {
        match op {
            Binary::Add | Binary::Subtract => Lowered::Integer(self.sum(k, op, a, b)),
            Binary::Multiply => {
                let bound = a.bound.saturating_mul(b.bound).min(ANYTHING);
                let offset = match (a.base, b.base) {
                    (Some(base), None) => Offset { plus: a.plus.wrapping_mul(b.plus), ..self.of_bases(k, op, base, b) },
                    (None, Some(base)) => Offset { plus: a.plus.wrapping_mul(b.plus), ..self.of_bases(k, op, base, a) },
                    (None, None) => Offset::number(a.plus.wrapping_mul(b.plus)),
                    (Some(_), Some(_)) => {
                        let [a, b] = [a, b].map(|offset| offset.register(k));
                        Offset::within(k.mul(a, b), ANYTHING)
                    }
                };
                Lowered::Integer(Offset { bound, ..offset })
            }
            Binary::Less | Binary::Equal => {
                let compare = if op == Binary::Less { Compare::Lt } else { Compare::Eq };
                // Differences that do not wrap can be compared with a number, and are the same for many scores of a tile.
                let fits = a.bound + b.bound < ANYTHING && (a.plus != 0 || b.plus != 0);
                Lowered::Truth(if fits {
                    let difference = self.sum(k, Binary::Subtract, a, b);
                    let base = Offset { plus: 0, ..difference }.register(k);
                    k.compare(compare, base, difference.plus.wrapping_neg())
                } else {
                    let [a, b] = [a, b].map(|offset| offset.register(k));
                    k.compare(compare, a, b)
                })
            }
            Binary::Minimum | Binary::Maximum => {
                let bound = a.bound.max(b.bound);
                let [a, b] = [a, b].map(|offset| offset.register(k));
                let result = if op == Binary::Minimum { k.min(a, b) } else { k.max(a, b) };
                Lowered::Integer(Offset::within(result, bound))
            }
            Binary::Divide | Binary::And | Binary::Or => unreachable!("{op:?} of integers"),
        }
    }

    /// A sum or difference: of the registers once, of the numbers now.
    fn sum(&mut self, k: &mut Builder, op: Binary, a: Offset, b: Offset) -> Offset {
        let bound = (a.bound + b.bound).min(ANYTHING);
        let adds = op == Binary::Add;
        let plus = if adds { a.plus.wrapping_add(b.plus) } else { a.plus.wrapping_sub(b.plus) };
        let base = match (a.base, b.base) {
            (base, None) => base,
            (None, Some(base)) if adds => Some(base),
            (None, Some(base)) => self.of_bases(k, Binary::Multiply, base, Offset::number(-1)).base,
            (Some(base), Some(other)) => self.of_bases(k, op, base, Offset::within(other, ANYTHING)).base,
        };
        Offset { base, plus, bound }
    }

    /// An integer as a number: the register once for a tile, and what is added to it as a number. That is exact up to `2^24`,
    /// as far as the number of an integer is.
    fn number_of(&mut self, k: &mut Builder, integer: Offset) -> Reg<F32> {
        let Some(base) = integer.base else { return k.copy(integer.plus as f32) };
        let step = Step::Unary(Unary::ToNumber, self.code.expression.result());
        let operation = (step, vec![Lowered::Integer(Offset { plus: 0, ..integer }).identity()]);
        let number = if let Some(Lowered::Number(known)) = self.written.get(&operation) {
            *known
        } else {
            let number = Value::from(k.to_f32(base));
            self.written.insert(operation, Lowered::Number(number));
            number
        };
        k.add(number, integer.plus as f32)
    }

    /// What is made of one register and another, or a number; once for a tile.
    fn of_bases(&mut self, k: &mut Builder, op: Binary, base: Reg<S32>, other: Offset) -> Offset {
        let step = Step::Binary(op, self.code.expression.result(), self.code.expression.result());
        let operands = [Offset::within(base, ANYTHING), other].map(Lowered::Integer);
        let operation = (step, operands.map(Lowered::identity).to_vec());
        if let Some(Lowered::Integer(written)) = self.written.get(&operation) {
            return *written;
        }
        let other: Value<S32> = other.base.map_or_else(|| Value::from(other.plus), Value::from);
        let register = match op {
            Binary::Add => k.add(base, other),
            Binary::Subtract => k.sub(base, other),
            _ => k.mul(base, other),
        };
        let written = Offset::within(register, ANYTHING);
        self.written.insert(operation, Lowered::Integer(written));
        written
    }
}

/// One over each constant that an expression divides by, which is then multiplied by: that costs one instruction for each score
/// where a division takes ten, and half a rounding step more than none. What a constant of zero, infinity or NaN gives
/// stays the same; one below `2^-128` becomes zero.
fn reciprocals(k: &mut Builder, bound: BoundExpression) -> HashMap<Term, Reg<F32>> {
    let expression = bound.expression;
    let mut reciprocals = HashMap::new();
    for step in expression.steps() {
        let Step::Binary(Binary::Divide, _, divisor) = *step else { continue };
        let divisor_value = match expression.step(divisor) {
            Step::NumberSlot(slot) => Value::from(bound.number(slot)),
            Step::Number(bits) => Value::from(f32::from_bits(bits)),
            _ => continue,
        };
        reciprocals.entry(divisor).or_insert_with(|| k.div(1.0f32, divisor_value));
    }
    reciprocals
}

fn unary(k: &mut Builder, op: Unary, a: Lowered, exact: bool) -> Lowered {
    match (op, a) {
        (Unary::Negate, Lowered::Number(a)) => Lowered::Number(k.neg(a).into()),
        (Unary::Absolute, Lowered::Number(a)) => Lowered::Number(k.abs(a).into()),
        (Unary::Exp, Lowered::Number(a)) => {
            let power = k.mul(a, LOG2_E);
            Lowered::Number(k.exp2(power).into())
        }
        (Unary::Tanh, Lowered::Number(a)) => {
            let scaled = k.mul(a, 2.0 * LOG2_E);
            Lowered::Number(if exact { exact_tanh_of_half(k, scaled) } else { tanh_of_half(k, scaled) }.into())
        }
        (Unary::Negate, Lowered::Integer(a)) => {
            let register = a.register(k);
            Lowered::Integer(Offset::within(k.sub(0i32, register), a.bound))
        }
        (Unary::Absolute, Lowered::Integer(a)) => {
            let register = a.register(k);
            Lowered::Integer(Offset::within(k.abs(register), a.bound))
        }
        (Unary::Not, Lowered::Truth(a)) => Lowered::Truth(k.not(a)),
        _ => unreachable!("{op:?} of {a:?}"),
    }
}

fn binary_of_numbers(k: &mut Builder, op: Binary, a: Value<F32>, b: Value<F32>) -> Lowered {
    let number = match op {
        Binary::Add => k.add(a, b),
        Binary::Subtract => k.sub(a, b),
        Binary::Multiply => k.mul(a, b),
        Binary::Divide => k.div(a, b),
        Binary::Minimum => k.min(a, b),
        Binary::Maximum => k.max(a, b),
        Binary::Less => return Lowered::Truth(k.compare(Compare::Lt, a, b)),
        Binary::Equal => return Lowered::Truth(k.compare(Compare::Eq, a, b)),
        Binary::And | Binary::Or => unreachable!("{op:?} of numbers"),
    };
    Lowered::Number(number.into())
}
