//! Code generation of `score_mod` and `mask_mod` expressions, for each score of a block.
//!
//! Query rows and keys of a block are registers plus constants. Sums and differences of them stay like that, so that the
//! distance of a score costs no instruction of its own: the difference of the registers is computed once for a block.
//! Terms that depend on the row or the key alone are computed once for it, and table entries of a row are loaded once for
//! all blocks of keys.

use core::f32::consts::{LN_2, LOG2_E};
use std::collections::HashMap;

use flashcore_ir::types::{F32, Pred, S32, U32};
use flashcore_ir::{Builder, Compare, Operand, Reg, Value};
use flashcore_problem::expression::{Binary, Expression, Kind, Step, Term, Unary, Uses};

use super::block_verdict::Verdict;
use super::bound::BoundExpression;
use super::interval::{ScoreBlock, SearchedTable, is_constant};
use super::tables::{ANYTHING, ExpressionTables, Offset, entry, goes_with_key, largest_magnitude, read_run};
use crate::primitives::score::{exact_tanh_of_half, tanh_of_half};
use crate::primitives::{Accumulator, ROW_STEP};
use crate::unsupported::LONGEST;

/// Batch, head and first row of the scores of a lane.
#[derive(Debug, Clone, Copy)]
pub struct LaneScores {
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
    scores: LaneScores,
    /// True if results are to have all bits of an `f32`.
    exact: bool,
    /// Reciprocals of the constants that something is divided by.
    reciprocals: HashMap<Term, Reg<F32>>,
    /// Terms that were computed before the first block.
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

    /// The key by which equal terms are found.
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

/// An operation on registers and constants, as the key of its result.
type Operation = (Step, Vec<(Kind, Operand, i32)>);

impl ExpressionCode {
    /// The code for `rows` rows of a lane. Loads the table entries that each row needs.
    pub fn new(
        k: &mut Builder,
        bound: BoundExpression,
        tables: ExpressionTables,
        scores: LaneScores,
        rows: usize,
        exact: bool,
    ) -> Self {
        let expression = bound.expression;
        let reciprocals = if exact { HashMap::new() } else { reciprocals(k, bound) };
        let mut code = Self { expression, bound, tables, scores, exact, reciprocals, known: HashMap::new() };
        for row in 0..rows {
            // Nothing is read here that depends on a key.
            code.read(k, scores.query, row, 0, |uses| !uses.key);
        }
        code
    }

    /// Gives the columns 0, 1 and so on their keys, which need not be adjacent, and loads the table entries of each that
    /// do not depend on the row.
    pub fn read_keys(&mut self, k: &mut Builder, keys: &[Reg<S32>]) {
        for (column, key) in (0..).zip(keys) {
            for term in self.expression.terms().filter(|term| self.expression.step(*term) == Step::Key) {
                let key = Lowered::Integer(Offset::within(*key, LONGEST as i64));
                self.known.insert((term, None, Some(column)), key);
            }
            self.read(k, *key, 0, column, |uses| !uses.query);
        }
    }

    /// The code for another row, the only one of the lane.
    #[must_use]
    pub fn for_row(&self, k: &mut Builder, query: Reg<S32>) -> Self {
        let mut code = Self { scores: LaneScores { query, ..self.scores }, ..self.clone() };
        // Terms of other rows are not those of this one.
        code.known.retain(|(_, row, _), _| row.is_none());
        code.read(k, query, 0, 0, |uses| !uses.key);
        code
    }

    fn read(&mut self, k: &mut Builder, key: Reg<S32>, row: usize, column: u32, is_wanted: fn(Uses) -> bool) {
        let mut block = self.block(key);
        for term in self.expression.terms() {
            let is_read = matches!(self.expression.step(term), Step::NumberAt(_) | Step::IntegerAt(_));
            let uses = self.expression.uses(term);
            if is_read && !uses.score && is_wanted(uses) {
                block.term(k, term, row, column, None);
            }
        }
        self.known = block.known;
    }

    /// The code for the block whose first key, in this lane, is `key`.
    pub fn block(&self, key: Reg<S32>) -> ExpressionBlock<'_> {
        ExpressionBlock { code: self, key, known: self.known.clone(), written: HashMap::new() }
    }

    /// True if some row may attend some key of a block, and true if some may not, by interval arithmetic. `None` where that
    /// tells nothing. The lanes of a warp search tables together.
    pub fn block_verdict(&self, k: &mut Builder, block: ScoreBlock, lane: Reg<U32>) -> Option<[Reg<Pred>; 2]> {
        let table = SearchedTable { entries: self.tables.integers, lane };
        let Verdict { may_hold, may_fail } = Verdict::new(k, self.bound, self.scores, block, table);
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

    /// The code for the block whose first key, in this lane, is `key`, with the table entries of its keys loaded. Of
    /// `scores` only the columns count; their values need not be there yet.
    pub fn read_block(&self, k: &mut Builder, scores: &Accumulator, key: Reg<S32>) -> ExpressionBlock<'_> {
        let mut block = self.block(key);
        let mut columns = Vec::new();
        scores.each(|row, column, _| columns.extend((row == 0).then_some(column)));
        block.read_runs(k, &columns);
        block
    }
}

/// A `score_mod` that only adds a term to scores that are otherwise only scaled.
#[derive(Debug, Clone)]
pub struct AddedTerm {
    /// The expression.
    pub code: ExpressionCode,
    /// One over the scale, by which the term is multiplied, since scores are scaled later.
    pub inverse_scale: Reg<F32>,
}

impl AddedTerm {
    /// Adds the term to the products of a block, in which the first key of this lane is `key`.
    pub fn apply(&self, k: &mut Builder, products: &Accumulator, key: Reg<S32>, block: ScoreBlock) {
        let ExpressionCode { expression, bound, scores, .. } = self.code;
        let Some((added, sign)) = expression.added_term() else { return };
        let factor = if sign < 0.0 { k.neg(self.inverse_scale) } else { self.inverse_scale };
        let each = |k: &mut Builder| {
            let mut block = self.code.block(key);
            products.each(|row, column, product| {
                let term = block.term(k, added, row, column, None).number();
                k.fma_to(product, term, factor);
            });
        };
        match is_constant(k, bound, added, scores, block) {
            None => each(k),
            Some(constant) => k.if_else_uniform(
                constant,
                |k| {
                    let first = self.code.for_row(k, block.rows[0]);
                    let term = first.block(block.keys[0]).term(k, added, 0, 0, None).number();
                    let term = k.mul(term, factor);
                    products.each(|_, _, product| k.add_to(product, term));
                },
                each,
            ),
        }
    }
}

/// An expression for the scores of one block of keys.
pub struct ExpressionBlock<'a> {
    code: &'a ExpressionCode,
    key: Reg<S32>,
    known: HashMap<Spot, Lowered>,
    /// Results written for this block: two rows and two keys that are as far apart share the distance, and all that
    /// follows from it.
    written: HashMap<Operation, Lowered>,
}

impl ExpressionBlock<'_> {
    /// The modified score, in base 2 as the score is.
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

    /// Sets the scores that a row does not attend to minus infinity.
    pub fn mask(&mut self, k: &mut Builder, scores: &Accumulator) {
        scores.each(|row, column, score| {
            let attended = self.attended(k, row, column);
            let masked = k.not(attended);
            k.set_where(score, masked, f32::NEG_INFINITY);
        });
    }

    /// True if a row attends a key.
    pub fn attended(&mut self, k: &mut Builder, row: usize, column: u32) -> Reg<Pred> {
        self.term(k, self.code.expression.result(), row, column, None).truth()
    }

    /// Loads runs of adjacent table entries for adjacent keys: where none is past an end of the table, which is tested
    /// once, they cost nothing but the loads.
    fn read_runs(&mut self, k: &mut Builder, columns: &[u32]) {
        let ExpressionCode { expression, tables, .. } = *self.code;
        for term in expression.terms() {
            let (Step::NumberAt(index) | Step::IntegerAt(index)) = expression.step(term) else { continue };
            let uses = expression.uses(term);
            if uses.query || uses.score || !goes_with_key(expression, index) {
                continue;
            }
            let indices: Vec<_> =
                columns.iter().map(|&column| self.term(k, index, 0, column, None).integer()).collect();
            let entries: Vec<_> = if expression.kind(term) == Kind::Number {
                let entries = read_run::<F32>(k, tables.numbers, &indices);
                entries.into_iter().map(|entry| Lowered::Number(entry.into())).collect()
            } else {
                let entries = read_run::<S32>(k, tables.integers, &indices);
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
        let ExpressionCode { expression, bound, scores, .. } = *self.code;
        let position = |register, plus: u32| {
            Lowered::Integer(Offset { base: Some(register), plus: plus as i32, bound: LONGEST as i64 })
        };
        let step = expression.step(term);
        match step {
            Step::Score => Lowered::Number(score.map_or_else(|| Value::from(0.0f32), Value::from)),
            Step::Batch => position(scores.batch, 0),
            Step::Head => position(scores.head, 0),
            Step::Query => position(scores.query, row as u32 * ROW_STEP),
            Step::Key => position(self.key, column),
            Step::NumberSlot(slot) => Lowered::Number(bound.number(slot).into()),
            Step::IntegerSlot(slot, size) => {
                Lowered::Integer(Offset::within(bound.integer(slot), largest_magnitude(size)))
            }
            Step::Number(bits) => Lowered::Number(Value::from(f32::from_bits(bits))),
            Step::Integer(value) => Lowered::Integer(Offset::number(value)),
            Step::Unary(Unary::ToNumber, a) => {
                // The absolute value of a float is free.
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

    /// The result of a step; equal operations on equal operands are written once.
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
            // Expressions are built through handles of the right kinds.
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
                // Differences that do not wrap can be compared with a constant, and many scores of a block share them.
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

    /// A sum or difference: of the registers once for the block, of the constants now.
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

    /// An integer as a float: the register is converted once for a block, and the constant added as a float. That is exact
    /// up to `2^24`, like the conversion itself.
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

    /// The result of a register and another, or a constant; written once for a block.
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

/// Reciprocals of the constants that an expression divides by: a product costs one instruction for each score where a
/// division takes ten, and half a rounding step more. Constants of zero, infinity or NaN give what division gives; one
/// below `2^-128` becomes zero.
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
