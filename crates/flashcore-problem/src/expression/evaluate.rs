//! Expressions with numbers put in, a few places at a time.

use std::ops::{Add, Div, Mul, Neg, Sub};

use super::{Binary, Constants, Expression, Kind, MaskMod, ScoreMod, Step, Term, Unary};

/// Places that are evaluated together.
pub const WIDTH: usize = 16;

/// The tables that expressions read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tables<'a> {
    /// Numbers.
    pub numbers: &'a [f32],
    /// Integers.
    pub integers: &'a [i32],
}

/// Where scores stand.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// The batch of all.
    pub batch: i32,
    /// The query head of each.
    pub head: [i32; WIDTH],
    /// The query row of each.
    pub query: [i32; WIDTH],
    /// The key of each.
    pub key: [i32; WIDTH],
}

/// What expressions compute in.
pub trait ExpressionReal:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// The same, exactly.
    fn from_f32(value: f32) -> Self;
    /// The same, rounded to an `f32` first, as everywhere.
    fn from_i32(value: i32) -> Self;
    /// The magnitude.
    #[must_use]
    fn magnitude(self) -> Self;
    /// `e` to the power of it.
    #[must_use]
    fn exponential(self) -> Self;
    /// The hyperbolic tangent.
    #[must_use]
    fn tangent(self) -> Self;
}

macro_rules! expression_real {
    ($($type:ident)*) => {
        $(impl ExpressionReal for $type {
            fn from_f32(value: f32) -> Self {
                value.into()
            }
            fn from_i32(value: i32) -> Self {
                (value as f32).into()
            }
            fn magnitude(self) -> Self {
                self.abs()
            }
            fn exponential(self) -> Self {
                self.exp()
            }
            fn tangent(self) -> Self {
                self.tanh()
            }
        })*
    };
}
expression_real!(f32 f64);

/// An expression with its constants, and room for what its steps give.
pub struct Evaluator<'a, R> {
    expression: &'static Expression,
    constants: Constants,
    tables: Tables<'a>,
    numbers: Vec<[R; WIDTH]>,
    /// Integers, and truths as 0 and 1.
    integers: Vec<[i32; WIDTH]>,
}

impl<'a, R: ExpressionReal> Evaluator<'a, R> {
    /// That of an expression and its constants, with the tables of the inputs.
    pub fn new(expression: &'static Expression, constants: Constants, tables: Tables<'a>) -> Self {
        let steps = expression.steps().len();
        let (numbers, integers) = (vec![[R::from_f32(0.0); WIDTH]; steps], vec![[0; WIDTH]; steps]);
        Self { expression, constants, tables, numbers, integers }
    }

    /// What scores become.
    pub fn scores(&mut self, places: &Places, scores: &[R; WIDTH]) -> [R; WIDTH] {
        self.evaluate(places, scores);
        self.numbers[self.expression.result().index()]
    }

    /// Which places take part.
    pub fn attended(&mut self, places: &Places) -> [bool; WIDTH] {
        self.evaluate(places, &[R::from_f32(0.0); WIDTH]);
        self.integers[self.expression.result().index()].map(|truth| truth != 0)
    }

    fn evaluate(&mut self, places: &Places, scores: &[R; WIDTH]) {
        for (index, step) in self.expression.steps().iter().enumerate() {
            match *step {
                Step::Score => self.numbers[index] = *scores,
                Step::Batch => self.integers[index] = [places.batch; WIDTH],
                Step::Head => self.integers[index] = places.head,
                Step::Query => self.integers[index] = places.query,
                Step::Key => self.integers[index] = places.key,
                Step::NumberSlot(slot) => self.numbers[index] = [R::from_f32(self.constants.number(slot)); WIDTH],
                Step::IntegerSlot(slot, _) => self.integers[index] = [self.constants.integer(slot); WIDTH],
                Step::Number(bits) => self.numbers[index] = [R::from_f32(f32::from_bits(bits)); WIDTH],
                Step::Integer(value) => self.integers[index] = [value; WIDTH],
                Step::Unary(op, a) => self.unary(index, op, a),
                Step::Binary(op, a, b) => self.binary(index, op, a, b),
                Step::Select(condition, yes, no) => self.select(index, [condition, yes, no]),
                Step::NumberAt(at) => {
                    let table = self.tables.numbers;
                    self.numbers[index] = self.integers[at.index()].map(|at| R::from_f32(nearest(table, at)));
                }
                Step::IntegerAt(at) => {
                    let table = self.tables.integers;
                    self.integers[index] = self.integers[at.index()].map(|at| nearest(table, at));
                }
                Step::ShiftRight(a, bits) => self.integers[index] = self.integers[a.index()].map(|a| a >> bits),
            }
        }
    }

    fn unary(&mut self, index: usize, op: Unary, a: Term) {
        let (number, integer) = (self.numbers[a.index()], self.integers[a.index()]);
        match (op, self.expression.kind(a)) {
            (Unary::ToNumber, _) => self.numbers[index] = integer.map(R::from_i32),
            (Unary::Negate, Kind::Number) => self.numbers[index] = number.map(|a| -a),
            (Unary::Absolute, Kind::Number) => self.numbers[index] = number.map(R::magnitude),
            (Unary::Exp, _) => self.numbers[index] = number.map(R::exponential),
            (Unary::Tanh, _) => self.numbers[index] = number.map(R::tangent),
            (Unary::Negate, _) => self.integers[index] = integer.map(i32::wrapping_neg),
            (Unary::Absolute, _) => self.integers[index] = integer.map(i32::wrapping_abs),
            (Unary::Not, _) => self.integers[index] = integer.map(|a| 1 - a),
        }
    }

    fn binary(&mut self, index: usize, op: Binary, a: Term, b: Term) {
        if self.expression.kind(a) == Kind::Number {
            let (a, b) = (self.numbers[a.index()], self.numbers[b.index()]);
            let each = |of: fn(R, R) -> R| std::array::from_fn(|lane| of(a[lane], b[lane]));
            let compared = |of: fn(R, R) -> bool| std::array::from_fn(|lane| i32::from(of(a[lane], b[lane])));
            match op {
                Binary::Add => self.numbers[index] = each(|a, b| a + b),
                Binary::Subtract => self.numbers[index] = each(|a, b| a - b),
                Binary::Multiply => self.numbers[index] = each(|a, b| a * b),
                Binary::Divide => self.numbers[index] = each(|a, b| a / b),
                Binary::Minimum => self.numbers[index] = each(|a, b| if b < a { b } else { a }),
                Binary::Maximum => self.numbers[index] = each(|a, b| if b > a { b } else { a }),
                Binary::Less => self.integers[index] = compared(|a, b| a < b),
                Binary::Equal => self.integers[index] = compared(|a, b| a == b),
                Binary::And | Binary::Or => {}
            }
            return;
        }
        let (a, b) = (self.integers[a.index()], self.integers[b.index()]);
        let each = |of: fn(i32, i32) -> i32| std::array::from_fn(|lane| of(a[lane], b[lane]));
        self.integers[index] = match op {
            Binary::Add => each(i32::wrapping_add),
            Binary::Subtract => each(i32::wrapping_sub),
            Binary::Multiply => each(i32::wrapping_mul),
            Binary::Minimum => each(i32::min),
            Binary::Maximum => each(i32::max),
            Binary::Less => each(|a, b| i32::from(a < b)),
            Binary::Equal => each(|a, b| i32::from(a == b)),
            Binary::And => each(|a, b| a & b),
            Binary::Or => each(|a, b| a | b),
            // Integers are not divided.
            Binary::Divide => a,
        };
    }

    fn select(&mut self, index: usize, [condition, yes, no]: [Term; 3]) {
        let condition = self.integers[condition.index()];
        if self.expression.kind(yes) == Kind::Number {
            let (yes, no) = (self.numbers[yes.index()], self.numbers[no.index()]);
            self.numbers[index] = std::array::from_fn(|lane| if condition[lane] != 0 { yes[lane] } else { no[lane] });
        } else {
            let (yes, no) = (self.integers[yes.index()], self.integers[no.index()]);
            self.integers[index] = std::array::from_fn(|lane| if condition[lane] != 0 { yes[lane] } else { no[lane] });
        }
    }
}

/// What a table has at an index, or at its nearest end; 0 where it is empty, which problems that validate do not have.
fn nearest<T: Copy + Default>(table: &[T], index: i32) -> T {
    let nearest = (index.max(0) as usize).min(table.len().saturating_sub(1));
    table.get(nearest).copied().unwrap_or_default()
}

/// Keys of one row, so many at a time.
fn places_of_row(batch: usize, head: usize, row: usize, keys: &[usize]) -> Places {
    let key = std::array::from_fn(|lane| keys.get(lane).copied().unwrap_or(0) as i32);
    Places { batch: batch as i32, head: [head as i32; WIDTH], query: [row as i32; WIDTH], key }
}

impl ScoreMod {
    /// Replaces the scores of some keys of a row. Entries of a table that is empty are 0.
    pub fn apply_to_row<R: ExpressionReal>(
        self,
        tables: Tables<'_>,
        (batch, head, row): (usize, usize, usize),
        keys: &[usize],
        scores: &mut [R],
    ) {
        let mut evaluator = Evaluator::new(self.expression(), self.constants(), tables);
        for (keys, scores) in keys.chunks(WIDTH).zip(scores.chunks_mut(WIDTH)) {
            let padded = std::array::from_fn(|lane| scores.get(lane).copied().unwrap_or(R::from_f32(0.0)));
            let changed = evaluator.scores(&places_of_row(batch, head, row, keys), &padded);
            scores.copy_from_slice(&changed[..scores.len()]);
        }
    }
}

impl MaskMod {
    /// Of some keys, those that a row attends. Entries of a table that is empty are 0.
    pub fn attended(
        self,
        tables: Tables<'_>,
        (batch, head, row): (usize, usize, usize),
        keys: impl Iterator<Item = usize>,
    ) -> Vec<usize> {
        let mut evaluator = Evaluator::<f32>::new(self.expression(), self.constants(), tables);
        let keys: Vec<usize> = keys.collect();
        let mut attended = Vec::with_capacity(keys.len());
        for keys in keys.chunks(WIDTH) {
            let takes_part = evaluator.attended(&places_of_row(batch, head, row, keys));
            attended.extend(keys.iter().zip(takes_part).filter(|&(_, takes_part)| takes_part).map(|(key, _)| *key));
        }
        attended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLES: Tables<'_> = Tables { numbers: &[0.5, 1.5, 2.5], integers: &[7, 7, -3, 9] };

    /// The scores 10, 11, 12 of keys 0, 1, 2 of row 1 of head 2 of batch 3 become these.
    #[track_caller]
    fn check(score_mod: ScoreMod, expected: [f64; 3]) {
        let mut scores = [10.0, 11.0, 12.0];
        score_mod.apply_to_row(TABLES, (3, 2, 1), &[0, 1, 2], &mut scores);
        assert_eq!(scores, expected, "{score_mod:?}");
        let mut scores = [10.0_f32, 11.0, 12.0];
        score_mod.apply_to_row(TABLES, (3, 2, 1), &[0, 1, 2], &mut scores);
        assert_eq!(scores, expected.map(|score| score as f32), "{score_mod:?}");
    }

    #[test]
    fn every_step() {
        check(ScoreMod::new("same", |score, _| score), [10.0, 11.0, 12.0]);
        check(ScoreMod::new("places", |_, at| (at.batch * 100 + at.head * 10 + at.query).to_number()), [321.0; 3]);
        check(ScoreMod::new("key", |_, at| (3 - at.key).to_number()), [3.0, 2.0, 1.0]);
        check(ScoreMod::new("table", |score, at| score + at.number(at.key)), [10.5, 12.5, 14.5]);
        check(ScoreMod::new("beyond", |_, at| at.number(at.key * 5 - 1)), [0.5, 2.5, 2.5]);
        check(ScoreMod::new("integers", |_, at| at.integer(at.key + 1).to_number()), [7.0, -3.0, 9.0]);
        check(ScoreMod::new("arithmetic", |score, _| (score - 1.0) * 2.0 / 4.0), [4.5, 5.0, 5.5]);
        check(ScoreMod::new("negative", |score, at| -score + (-at.key).abs().to_number()), [-10.0, -10.0, -10.0]);
        check(ScoreMod::new("magnitude", |score, _| (11.0 - score).abs()), [1.0, 0.0, 1.0]);
        check(ScoreMod::new("limits", |score, _| score.min(11.0).max(10.5)), [10.5, 11.0, 11.0]);
        check(ScoreMod::new("integer limits", |_, at| at.key.min(1).max(at.query - 1).to_number()), [0.0, 1.0, 1.0]);
        check(ScoreMod::new("choice", |score, at| at.key.less(1).number(score, 0.0)), [10.0, 0.0, 0.0]);
        check(
            ScoreMod::new("integer choice", |_, at| at.key.more(at.query).integer(5, at.key).to_number()),
            [0.0, 1.0, 5.0],
        );
        check(ScoreMod::new("powers", |score, _| (score - score).exp() + (score - score).tanh()), [1.0; 3]);
        check(ScoreMod::new("blocks", |_, at| ((at.key - 1) >> 1).to_number()), [-1.0, 0.0, 0.0]);
    }

    #[test]
    fn masks() {
        let attended = |mask_mod: MaskMod| mask_mod.attended(TABLES, (0, 0, 1), 0..20);
        assert_eq!(attended(MaskMod::new("causal", |at| at.query.at_least(at.key))), [0, 1]);
        assert_eq!(attended(MaskMod::new("documents", |at| at.integer(at.query).equals(at.integer(at.key)))), [0, 1]);
        let ends = MaskMod::new("ends", |at| at.key.less(1) | !at.key.at_most(18) & at.key.at_least(2));
        assert_eq!(attended(ends), [0, 19]);
        let far = MaskMod::new("numbers", |at| at.key.to_number().more(17.5));
        assert_eq!(attended(far), [18, 19]);
        assert_eq!(attended(MaskMod::new("none", |at| at.key.less(0))), Vec::<usize>::new());
    }
}
