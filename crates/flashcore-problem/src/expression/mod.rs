//! `score_mod` and `mask_mod`: changes to scores and masks beyond the features of a problem, written as Rust closures.
//!
//! A closure is called once, with handles instead of numbers. Its operations on them are traced into an [`Expression`],
//! which every backend uses: kernels are generated from it, the CPU and the oracle evaluate it. Its constants are not
//! part of it, but accompany it as [`Constants`]. Where there are no closures, a text says the same
//! ([`ScoreMod::parse`]).

mod constants;
mod evaluate;
mod handles;
mod text;

pub use constants::{Constants, MOST_CONSTANTS, Size, Slot};
pub use evaluate::{Evaluator, ExpressionReal, Places, Tables, WIDTH};
pub use handles::{Integer, Number, Place, Truth};
pub use text::{ExpressionError, MOST_CHARACTERS, READY_MADE, ReadyMade};

use std::collections::HashSet;
use std::fmt;
use std::sync::{LazyLock, Mutex, PoisonError};

use handles::Writer;

/// The most steps of an expression; kernels execute them for every score of a tile.
pub const MOST_STEPS: usize = 64;

/// A step of an expression, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Term(u32);

impl Term {
    /// The index among the steps.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The type of a step's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A floating-point number.
    Number,
    /// A 32-bit integer, which wraps.
    Integer,
    /// A boolean.
    Truth,
}

/// One step of an expression. Its terms are earlier steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The score so far.
    Score,
    /// The number of the batch.
    Batch,
    /// The number of the query head.
    Head,
    /// The number of the query row.
    Query,
    /// The number of the key.
    Key,
    /// The number in a slot of the constants.
    NumberSlot(Slot),
    /// The integer in a slot of the constants.
    IntegerSlot(Slot, Size),
    /// A number that is part of the structure, by the bits of an `f32`.
    Number(u32),
    /// An integer that is part of the structure.
    Integer(i32),
    /// An operation on one term.
    Unary(Unary, Term),
    /// An operation on two terms of the same kind.
    Binary(Binary, Term, Term),
    /// The second where the first is true, else the third.
    Select(Term, Term, Term),
    /// The entry of the table of numbers at an index, clamped to the table.
    NumberAt(Term),
    /// The entry of the table of integers at an index, clamped to the table.
    IntegerAt(Term),
    /// An integer divided by `2^bits`, rounded down.
    ShiftRight(Term, u32),
}

impl Step {
    /// The terms that it reads, in order.
    pub fn operands(self) -> impl Iterator<Item = Term> {
        let operands = match self {
            Self::Unary(_, a) | Self::NumberAt(a) | Self::IntegerAt(a) | Self::ShiftRight(a, _) => {
                [Some(a), None, None]
            }
            Self::Binary(_, a, b) => [Some(a), Some(b), None],
            Self::Select(a, b, c) => [Some(a), Some(b), Some(c)],
            Self::Score
            | Self::Batch
            | Self::Head
            | Self::Query
            | Self::Key
            | Self::NumberSlot(_)
            | Self::IntegerSlot(..)
            | Self::Number(_)
            | Self::Integer(_) => [None; 3],
        };
        operands.into_iter().flatten()
    }

    /// The slot that it reads.
    pub const fn slot(self) -> Option<Slot> {
        match self {
            Self::NumberSlot(slot) | Self::IntegerSlot(slot, _) => Some(slot),
            _ => None,
        }
    }
}

/// Operations on one term.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unary {
    /// `-a`, of numbers and integers.
    Negate,
    /// `|a|`, of numbers and integers.
    Absolute,
    /// `e^a`.
    Exp,
    /// `tanh(a)`.
    Tanh,
    /// An integer as a number.
    ToNumber,
    /// `!a`.
    Not,
}

/// Operations on two terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Binary {
    /// `a + b`, of numbers and integers.
    Add,
    /// `a - b`, of numbers and integers.
    Subtract,
    /// `a * b`, of numbers and integers.
    Multiply,
    /// `a / b`, of numbers.
    Divide,
    /// The smaller, of numbers and integers.
    Minimum,
    /// The larger, of numbers and integers.
    Maximum,
    /// `a < b`, of numbers and integers.
    Less,
    /// `a == b`, of numbers and integers.
    Equal,
    /// `a && b`.
    And,
    /// `a || b`.
    Or,
}

/// The inputs that a term depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each says whether one independent thing is looked at")]
pub struct Uses {
    /// The score.
    pub score: bool,
    /// The query row.
    pub query: bool,
    /// The key.
    pub key: bool,
    /// The batch.
    pub batch: bool,
    /// The head.
    pub head: bool,
}

impl Uses {
    const fn or(self, other: Self) -> Self {
        Self {
            score: self.score || other.score,
            query: self.query || other.query,
            key: self.key || other.key,
            batch: self.batch || other.batch,
            head: self.head || other.head,
        }
    }
}

/// The structure of a closure: steps that end in a result.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Expression {
    name: String,
    steps: Vec<Step>,
    kinds: Vec<Kind>,
    uses: Vec<Uses>,
    result: Term,
}

impl Expression {
    fn new(name: &str, steps: Vec<(Step, Kind)>, result: Term) -> Self {
        let mut uses: Vec<Uses> = Vec::with_capacity(steps.len());
        for (step, _) in &steps {
            let own = match step {
                Step::Score => Uses { score: true, ..Uses::default() },
                Step::Batch => Uses { batch: true, ..Uses::default() },
                Step::Head => Uses { head: true, ..Uses::default() },
                Step::Query => Uses { query: true, ..Uses::default() },
                Step::Key => Uses { key: true, ..Uses::default() },
                _ => Uses::default(),
            };
            uses.push(step.operands().fold(own, |all, term| all.or(uses[term.index()])));
        }
        let (steps, kinds) = steps.into_iter().unzip();
        Self { name: name.to_owned(), steps, kinds, uses, result }
    }

    /// The name given by the caller.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The steps; terms are indices among them.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// All terms, in order.
    pub fn terms(&self) -> impl Iterator<Item = Term> + use<> {
        (0..self.steps.len() as u32).map(Term)
    }

    /// The step whose value is the result.
    pub const fn result(&self) -> Term {
        self.result
    }

    /// The step of a term.
    pub fn step(&self, term: Term) -> Step {
        self.steps[term.index()]
    }

    /// The type of a term.
    pub fn kind(&self, term: Term) -> Kind {
        self.kinds[term.index()]
    }

    /// The inputs that a term depends on.
    pub fn uses(&self, term: Term) -> Uses {
        self.uses[term.index()]
    }

    /// The slots of the constants in order, each with the kind of its constant.
    pub fn slots(&self) -> impl Iterator<Item = (Slot, Kind)> {
        // Each slot is read by one step, and slots are counted in the order of their steps.
        self.steps.iter().zip(&self.kinds).filter_map(|(step, kind)| Some((step.slot()?, *kind)))
    }

    /// The other term, if the result is the score plus or minus a term that does not depend on the score; and its sign,
    /// 1 or -1.
    pub fn added_term(&self) -> Option<(Term, f32)> {
        let Step::Binary(op @ (Binary::Add | Binary::Subtract), a, b) = self.step(self.result) else { return None };
        let (other, sign) = match (op, self.step(a), self.step(b)) {
            (Binary::Subtract, Step::Score, _) => (b, -1.0),
            (Binary::Add, Step::Score, _) => (b, 1.0),
            (Binary::Add, _, Step::Score) => (a, 1.0),
            _ => return None,
        };
        (!self.uses(other).score).then_some((other, sign))
    }

    /// The tables that it reads: numbers, integers.
    pub fn tables(&self) -> (bool, bool) {
        let has = |is: fn(&Step) -> bool| self.steps.iter().any(is);
        (has(|step| matches!(step, Step::NumberAt(_))), has(|step| matches!(step, Step::IntegerAt(_))))
    }

    /// This expression for a part of a problem: the rows from `row` on of one head of one batch, which are counted from 0
    /// there.
    fn moved(&self, constants: &Constants, batch: usize, head: usize, row: usize) -> (Self, Constants) {
        let writer = Writer::default();
        let mut terms: Vec<Term> = Vec::with_capacity(self.steps.len());
        for (step, kind) in self.steps.iter().zip(&self.kinds) {
            let to = |term: Term| terms[term.index()];
            let constant = match *step {
                Step::Batch => Some(Step::Integer(batch as i32)),
                Step::Head => Some(Step::Integer(head as i32)),
                Step::NumberSlot(slot) => Some(Step::Number(constants.bits(slot))),
                Step::IntegerSlot(slot, _) => Some(Step::Integer(constants.integer(slot))),
                _ => None,
            };
            if let Some(constant) = constant {
                terms.push(writer.constant(constant, *kind));
                continue;
            }
            let moved = match *step {
                Step::Query => {
                    let query = writer.push(Step::Query, *kind);
                    Step::Binary(Binary::Add, query, writer.constant(Step::Integer(row as i32), *kind))
                }
                Step::Unary(op, a) => Step::Unary(op, to(a)),
                Step::Binary(op, a, b) => Step::Binary(op, to(a), to(b)),
                Step::Select(a, b, c) => Step::Select(to(a), to(b), to(c)),
                Step::NumberAt(a) => Step::NumberAt(to(a)),
                Step::IntegerAt(a) => Step::IntegerAt(to(a)),
                Step::ShiftRight(a, bits) => Step::ShiftRight(to(a), bits),
                _ => *step,
            };
            terms.push(writer.push(moved, *kind));
        }
        writer.finish(&self.name, terms[self.result.index()])
    }

    /// Clamps constants to these magnitudes, NaNs to 0, without changing the structure.
    fn limited(&self, constants: &Constants, numbers: f32, integers: u32) -> Constants {
        let mut limited = *constants;
        let (number, integer) = (numbers.abs(), integers.min(Size::SMALL) as i32);
        for step in &self.steps {
            match *step {
                Step::NumberSlot(slot) => {
                    let value = constants.number(slot);
                    let value = if value.is_nan() { 0.0 } else { value.max(-number).min(number) };
                    limited.set(slot, value.to_bits());
                }
                Step::IntegerSlot(slot, Size::Small) => {
                    let value = constants.integer(slot).clamp(-integer, integer);
                    limited.set(slot, value.cast_unsigned());
                }
                _ => {}
            }
        }
        limited
    }

    /// Interns the structure for the life of the process: kernels are generated from it and compared by it.
    fn kept(self) -> &'static Self {
        static KEPT: LazyLock<Mutex<HashSet<&'static Expression>>> = LazyLock::new(Mutex::default);
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kept.get(&self) {
            return known;
        }
        let expression: &'static Self = Box::leak(Box::new(self));
        kept.insert(expression);
        expression
    }
}

/// A `score_mod`: the change of each score, given its indices.
///
/// The closure is called once, and its structure is separated from its constants, the `f32` and `i32` that were written in
/// it or captured by it:
///
/// * The structure (the operations in their order, and the name) is kept for the life of the process, once however
///   often it is written, and a GPU kernel is compiled for it.
/// * The constants are in this value, and are arguments of the kernel. `|score, _| score * temperature` keeps and compiles
///   nothing for another temperature.
///
/// Also part of the structure are: integer factors (`at.head * 257`), the bits of `>>`, whether an integer is more than
/// `2^24` from zero, and constants beyond the first [`MOST_CONSTANTS`]. Where those change from call to call, read them
/// from a table of the problem. Every constant counts, also a repeated one; an expression with constants that is needed
/// twice is computed once if it is bound to a name.
///
/// ```
/// # use flashcore_problem as flashcore;
/// use flashcore::{DType, Problem, ScoreMod};
///
/// // A learned term for every distance up to 128, the same for all that are further.
/// let relative = ScoreMod::new("relative", |score, at| score + at.number(at.query - at.key + 128));
/// let mut problem = Problem::new(1, 8, 1000, 64, DType::F16);
/// problem.score_mod = Some(relative);
/// problem.aux_f32 = 257;
/// assert_eq!(problem.validate(), Ok(()));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScoreMod {
    expression: &'static Expression,
    constants: Constants,
}

/// A `mask_mod`: the keys that take part, besides the limits of the mask.
///
/// The lifetime of structures, and what is compiled for them, are as for [`ScoreMod`].
///
/// ```
/// # use flashcore_problem as flashcore;
/// use flashcore::{DType, MaskMod, Problem};
///
/// // Several documents in one sequence, by a number for each position: rows attend keys of their own document.
/// let documents = MaskMod::new("documents", |at| at.integer(at.query).equals(at.integer(at.key)));
/// let mut problem = Problem::new(1, 8, 1000, 64, DType::F16);
/// problem.mask_mod = Some(documents);
/// problem.aux_i32 = 1000;
/// assert_eq!(problem.validate(), Ok(()));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MaskMod {
    expression: &'static Expression,
    constants: Constants,
}

impl ScoreMod {
    /// Traces the closure, under a name for reports.
    pub fn new(name: &str, write: impl for<'a> FnOnce(Number<'a>, Place<'a>) -> Number<'a>) -> Self {
        let writer = Writer::default();
        let score = writer.number(Step::Score);
        let result = write(score, writer.place()).term();
        Self::of(writer.finish(name, result))
    }
}

impl MaskMod {
    /// Traces the closure, under a name for reports: true where the query row attends the key.
    pub fn new(name: &str, write: impl for<'a> FnOnce(Place<'a>) -> Truth<'a>) -> Self {
        let writer = Writer::default();
        let result = write(writer.place()).term();
        Self::of(writer.finish(name, result))
    }
}

macro_rules! of_both {
    ($($name:ident)*) => {
        $(
            impl $name {
                fn of((expression, constants): (Expression, Constants)) -> Self {
                    Self { expression: expression.kept(), constants }
                }

                /// This value for a part of a problem: the rows from `row` on of one head of one batch, which are
                /// counted from 0 there.
                #[must_use]
                pub fn moved(self, batch: usize, head: usize, row: usize) -> Self {
                    Self::of(self.expression.moved(&self.constants, batch, head, row))
                }

                /// This structure with constants clamped to these magnitudes, NaNs to 0; integers beyond
                /// [`Size::SMALL`] stay as they are.
                #[must_use]
                pub fn with_constants_within(self, numbers: f32, integers: u32) -> Self {
                    Self { constants: self.expression.limited(&self.constants, numbers, integers), ..self }
                }

                /// The structure.
                pub const fn expression(self) -> &'static Expression {
                    self.expression
                }

                /// The values of the constants.
                pub const fn constants(self) -> Constants {
                    self.constants
                }
            }

            impl fmt::Debug for $name {
                fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                    write!(formatter, concat!(stringify!($name), "({}"), self.expression.name)?;
                    for (slot, kind) in self.expression.slots() {
                        match kind {
                            Kind::Number => write!(formatter, ", {:?}", self.constants.number(slot))?,
                            Kind::Integer | Kind::Truth => write!(formatter, ", {}", self.constants.integer(slot))?,
                        }
                    }
                    formatter.write_str(")")
                }
            }
        )*
    };
}
of_both!(ScoreMod MaskMod);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_closures_are_one_expression() {
        let write = || ScoreMod::new("twice", |score, _| score * 2.0);
        assert!(std::ptr::eq(write().expression(), write().expression()));
        assert_eq!(write(), write());
        assert_ne!(write(), ScoreMod::new("twice", |score, _| score * 3.0));
        assert_ne!(write(), ScoreMod::new("twice", |score, _| score + 2.0));
        assert_ne!(write(), ScoreMod::new("doubled", |score, _| score * 2.0));
    }

    /// Among them are temperatures that equal the other constant, 0 and NaN.
    #[test]
    fn captured_constants_are_no_part_of_the_structure() {
        let tempered = |temperature: f32| ScoreMod::new("tempered", |score, _| (score * temperature).min(2.0));
        let windowed = |window: i32| MaskMod::new("windowed", |at| (at.query - at.key).less(window));
        let (first, window) = (tempered(0.5), windowed(0));
        for number in 0..1000_i16 {
            let (other, wider) = (tempered(f32::from(number) / 8.0), windowed(number.into()));
            assert!(std::ptr::eq(first.expression(), other.expression()), "{other:?}");
            assert!(std::ptr::eq(window.expression(), wider.expression()), "{wider:?}");
            let mut scores = [0.25, -1.0];
            other.apply_to_row(Tables::default(), (0, 0, 0), &[0, 1], &mut scores);
            assert_eq!(scores, [(f64::from(number) / 32.0).min(2.0), -f64::from(number) / 8.0]);
            let attended = wider.attended(Tables::default(), (0, 0, 600), 0..601);
            assert_eq!(attended.len(), 601.min(number as usize), "{wider:?}");
        }
        assert!(std::ptr::eq(first.expression(), tempered(f32::NAN).expression()));
        assert_eq!(format!("{first:?} {window:?}"), "ScoreMod(tempered, 0.5, 2.0) MaskMod(windowed, 0)");
    }

    /// Factors, bits, orders of magnitude, and constants for which no slot is left.
    #[test]
    fn constants_that_are_part_of_the_structure() {
        let same = |one: MaskMod, other: MaskMod| std::ptr::eq(one.expression(), other.expression());
        let limit = |limit: i32| MaskMod::new("limit", |at| at.key.less(limit));
        assert!(same(limit(-(1 << 24)), limit(1 << 24)));
        assert!(!same(limit(1 << 24), limit((1 << 24) + 1)));
        assert!(same(limit(i32::MIN), limit(i32::MAX)));
        let factor = |factor: i32| MaskMod::new("factor", |at| (at.key * factor + factor).less(100));
        assert!(same(factor(3), factor(3)) && !same(factor(3), factor(4)));
        assert_eq!(factor(3).attended(Tables::default(), (0, 0, 0), 30..40), [30, 31, 32]);
        let many = |last: f32| {
            ScoreMod::new("many", |score, _| (0..MOST_CONSTANTS).fold(score, |sum, term| sum + term as f32) + last)
        };
        assert!(!std::ptr::eq(many(1.0).expression(), many(2.0).expression()));
        let mut scores = [0.0];
        many(0.5).apply_to_row(Tables::default(), (0, 0, 0), &[0], &mut scores);
        assert_eq!(scores, [120.5]);
    }

    #[test]
    fn constants_within_limits() {
        let write = |number, least, integer| {
            ScoreMod::new("limited", |score, at| (score * number).max(least) + (at.key + integer).to_number())
        };
        let limited = |number, integer| write(number, f32::NEG_INFINITY, integer).with_constants_within(64.0, 99);
        assert_eq!(limited(-700.0, 300), write(-64.0, -64.0, 99));
        assert_eq!(limited(f32::NAN, -300), write(0.0, -64.0, -99));
        assert_eq!(limited(0.25, 1 << 25), write(0.25, -64.0, 1 << 25));
    }

    /// Problems refuse it, and none of its methods panics.
    #[test]
    fn a_expression_of_too_many_steps() {
        let long = ScoreMod::new("long", |score, at| (0..1000).fold(score, |sum, _| sum + at.number(at.key) * 0.5));
        let expression = long.expression();
        assert_eq!(expression.steps().len(), 1040);
        let uses = Uses { score: true, key: true, ..Uses::default() };
        assert_eq!(
            (expression.uses(expression.result()), expression.tables(), expression.added_term()),
            (uses, (true, false), None)
        );
        let tables = Tables { numbers: &[2.0], integers: &[] };
        let mut scores = [1.0];
        long.moved(0, 0, 5).apply_to_row(tables, (0, 0, 0), &[0], &mut scores);
        assert_eq!(scores, [1001.0]);
        // A missing table.
        long.apply_to_row(Tables::default(), (0, 0, 0), &[0], &mut scores);
        assert_eq!(scores, [1001.0]);
    }

    #[test]
    fn what_is_written_twice_is_one_step() {
        let expression = ScoreMod::new("shared", |score, at| {
            let distance = (at.query - at.key).to_number();
            score + distance * (at.query - at.key).to_number()
        });
        let steps = expression.expression().steps();
        let differences = steps.iter().filter(|step| matches!(step, Step::Binary(Binary::Subtract, _, _))).count();
        assert_eq!(differences, 1, "{steps:?}");
    }

    #[test]
    fn what_terms_depend_on() {
        let expression = ScoreMod::new("uses", |score, at| score * at.number(at.head) + at.number(at.key - at.query));
        let expression = expression.expression();
        let all = Uses { score: true, query: true, key: true, batch: false, head: true };
        assert_eq!(expression.uses(expression.result()), all);
        assert_eq!(expression.added_term(), None);
        assert_eq!(expression.tables(), (true, false));
        let Step::Binary(Binary::Add, product, term) = expression.step(expression.result()) else {
            panic!("{expression:?}")
        };
        assert_eq!(expression.uses(term), Uses { query: true, key: true, ..Uses::default() });
        assert_eq!(expression.uses(product), Uses { score: true, head: true, ..Uses::default() });
    }

    /// Row 5 of head 2 of batch 1 is row 3 of a part that begins at row 2.
    #[test]
    fn a_part_of_a_problem_has_the_same_scores() {
        let whole = ScoreMod::new("whole", |score, at| {
            score + (at.batch * 1000 + at.head * 100 + at.query * 10 + at.key).to_number()
        });
        let tables = Tables::default();
        let (mut scores, mut part) = ([0.5_f64; 20], [0.5_f64; 20]);
        let keys: Vec<usize> = (0..20).collect();
        whole.apply_to_row(tables, (1, 2, 5), &keys, &mut scores);
        whole.moved(1, 2, 2).apply_to_row(tables, (0, 0, 3), &keys, &mut part);
        assert_eq!((scores, scores[7]), (part, 1257.5));
    }

    #[test]
    fn a_term_that_is_only_added_is_found() {
        let added = |score_mod: ScoreMod| {
            let expression = score_mod.expression();
            let constant = |term| expression.step(term).slot().map(|slot| score_mod.constants().number(slot));
            expression.added_term().map(|(term, sign)| (constant(term), sign))
        };
        let two = Some(2.0);
        assert_eq!(added(ScoreMod::new("left", |score, _| score + 2.0)), Some((two, 1.0)));
        assert_eq!(added(ScoreMod::new("right", |score, _| 2.0 + score)), Some((two, 1.0)));
        assert_eq!(added(ScoreMod::new("less", |score, _| score - 2.0)), Some((two, -1.0)));
        assert_eq!(added(ScoreMod::new("from", |score, _| 2.0 - score)), None);
        assert_eq!(added(ScoreMod::new("both", |score, _| score + score)), None);
        assert_eq!(added(ScoreMod::new("product", |score, _| score * 2.0)), None);
    }
}
