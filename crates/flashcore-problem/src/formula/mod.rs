//! What is done to scores beyond the features of a problem: formulas, written as Rust closures.
//!
//! A closure is called once, with handles instead of numbers. What it does with them is written down as a [`Formula`],
//! from which every backend follows: kernels are generated from it, the CPU and the oracle evaluate it.

mod evaluate;
mod handles;

pub use evaluate::{Evaluator, FormulaReal, Places, Tables, WIDTH};
pub use handles::{Integer, Number, Place, Truth};

use std::fmt;
use std::sync::{Mutex, PoisonError};

use handles::Writer;

/// The most steps of a formula; kernels repeat them for every score of a tile.
pub const MOST_STEPS: usize = 64;

/// A step of a formula, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Term(u32);

impl Term {
    /// Its place among the steps.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a step gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A floating-point number.
    Number,
    /// A 32-bit integer, which wraps.
    Integer,
    /// True or false.
    Truth,
}

/// One step of a formula. Terms are steps before it.
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
    /// A number, by the bits of an `f32`.
    Number(u32),
    /// An integer.
    Integer(i32),
    /// Of one term.
    Unary(Unary, Term),
    /// Of two terms, of the same kind.
    Binary(Binary, Term, Term),
    /// The second where the first is true, else the third.
    Select(Term, Term, Term),
    /// What the table of numbers has at an index; at its nearest end where that is outside.
    NumberAt(Term),
    /// What the table of integers has at an index; at its nearest end where that is outside.
    IntegerAt(Term),
    /// An integer divided by `2^bits`, rounded down.
    ShiftRight(Term, u32),
}

impl Step {
    /// The terms that it is made of, in order.
    pub fn operands(self) -> impl Iterator<Item = Term> {
        let operands = match self {
            Self::Unary(_, a) | Self::NumberAt(a) | Self::IntegerAt(a) | Self::ShiftRight(a, _) => {
                [Some(a), None, None]
            }
            Self::Binary(_, a, b) => [Some(a), Some(b), None],
            Self::Select(a, b, c) => [Some(a), Some(b), Some(c)],
            Self::Score | Self::Batch | Self::Head | Self::Query | Self::Key | Self::Number(_) | Self::Integer(_) => {
                [None; 3]
            }
        };
        operands.into_iter().flatten()
    }
}

/// What can be done with one term.
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

/// What can be done with two terms.
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

/// What a term depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each says whether one independent thing is looked at")]
pub struct Uses {
    /// On the score.
    pub score: bool,
    /// On the query row.
    pub query: bool,
    /// On the key.
    pub key: bool,
    /// On the batch.
    pub batch: bool,
    /// On the head.
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

/// Steps that end in a result.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Formula {
    name: String,
    steps: Vec<Step>,
    kinds: Vec<Kind>,
    result: Term,
}

impl Formula {
    /// What it was called.
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

    /// What a term is.
    pub fn kind(&self, term: Term) -> Kind {
        self.kinds[term.index()]
    }

    /// What a term depends on.
    pub fn uses(&self, term: Term) -> Uses {
        let mut uses = [Uses::default(); MOST_STEPS];
        for (index, step) in self.steps.iter().enumerate().take(term.index() + 1) {
            let own = match step {
                Step::Score => Uses { score: true, ..Uses::default() },
                Step::Batch => Uses { batch: true, ..Uses::default() },
                Step::Head => Uses { head: true, ..Uses::default() },
                Step::Query => Uses { query: true, ..Uses::default() },
                Step::Key => Uses { key: true, ..Uses::default() },
                _ => Uses::default(),
            };
            uses[index] = step.operands().fold(own, |all, term| all.or(uses[term.index()]));
        }
        uses[term.index()]
    }

    /// The other term, where the result is the score plus or minus a term that does not depend on the score; and what it is
    /// multiplied by, 1 or -1.
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

    /// Whether it reads the table of numbers, and that of integers.
    pub fn tables(&self) -> (bool, bool) {
        let has = |is: fn(&Step) -> bool| self.steps.iter().any(is);
        (has(|step| matches!(step, Step::NumberAt(_))), has(|step| matches!(step, Step::IntegerAt(_))))
    }

    /// The same for a part of a problem: the rows from `row` on of one head of one batch, which are counted from 0 there.
    fn moved(&self, batch: usize, head: usize, row: usize) -> Self {
        let writer = Writer::default();
        let mut terms: Vec<Term> = Vec::with_capacity(self.steps.len());
        for (step, kind) in self.steps.iter().zip(&self.kinds) {
            let to = |term: Term| terms[term.index()];
            let moved = match *step {
                Step::Batch => Step::Integer(batch as i32),
                Step::Head => Step::Integer(head as i32),
                Step::Query => {
                    let [query, first] = [Step::Query, Step::Integer(row as i32)].map(|step| writer.push(step, *kind));
                    Step::Binary(Binary::Add, query, first)
                }
                Step::Unary(op, a) => Step::Unary(op, to(a)),
                Step::Binary(op, a, b) => Step::Binary(op, to(a), to(b)),
                Step::Select(a, b, c) => Step::Select(to(a), to(b), to(c)),
                Step::NumberAt(a) => Step::NumberAt(to(a)),
                Step::IntegerAt(a) => Step::IntegerAt(to(a)),
                Step::ShiftRight(a, bits) => Step::ShiftRight(to(a), bits),
                Step::Score | Step::Key | Step::Number(_) | Step::Integer(_) => *step,
            };
            terms.push(writer.push(moved, *kind));
        }
        writer.formula(&self.name, terms[self.result.index()])
    }

    /// Each formula is kept once, for the life of the process: kernels are generated from it and compared by it.
    fn kept(self) -> &'static Self {
        static KEPT: Mutex<Vec<&'static Formula>> = Mutex::new(Vec::new());
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kept.iter().find(|known| ***known == self) {
            return known;
        }
        let formula: &'static Self = Box::leak(Box::new(self));
        kept.push(formula);
        formula
    }
}

/// What becomes of a score: of each score, given where it stands.
///
/// ```
/// # use flashcore_problem as flashcore;
/// use flashcore::{DType, Problem, ScoreMod};
///
/// // A learned term for every distance up to 128, the same for all that are further.
/// let relative = ScoreMod::new("relative", |score, at| score + at.number(at.query - at.key + 128));
/// let mut problem = Problem::new(1, 8, 1000, 64, DType::F16);
/// problem.score_mod = Some(relative);
/// problem.number_table = 257;
/// assert_eq!(problem.validate(), Ok(()));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScoreMod(&'static Formula);

/// Which keys take part, besides those that a mask takes out.
///
/// ```
/// # use flashcore_problem as flashcore;
/// use flashcore::{DType, MaskMod, Problem};
///
/// // Several documents in one sequence, by a number for each position: rows attend keys of their own document.
/// let documents = MaskMod::new("documents", |at| at.integer(at.query).equals(at.integer(at.key)));
/// let mut problem = Problem::new(1, 8, 1000, 64, DType::F16);
/// problem.mask_mod = Some(documents);
/// problem.integer_table = 1000;
/// assert_eq!(problem.validate(), Ok(()));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MaskMod(&'static Formula);

impl ScoreMod {
    /// What the closure does, under a name for reports.
    pub fn new(name: &str, write: impl for<'a> FnOnce(Number<'a>, Place<'a>) -> Number<'a>) -> Self {
        let writer = Writer::default();
        let score = writer.number(Step::Score);
        let result = write(score, writer.place()).term();
        Self(writer.formula(name, result).kept())
    }

    /// The same for a part of a problem: the rows from `row` on of one head of one batch, which are counted from 0 there.
    #[must_use]
    pub fn moved(self, batch: usize, head: usize, row: usize) -> Self {
        Self(self.0.moved(batch, head, row).kept())
    }

    /// Its steps.
    pub const fn formula(self) -> &'static Formula {
        self.0
    }
}

impl MaskMod {
    /// What the closure says, under a name for reports: true where the query row attends the key.
    pub fn new(name: &str, write: impl for<'a> FnOnce(Place<'a>) -> Truth<'a>) -> Self {
        let writer = Writer::default();
        let result = write(writer.place()).term();
        Self(writer.formula(name, result).kept())
    }

    /// The same for a part of a problem: the rows from `row` on of one head of one batch, which are counted from 0 there.
    #[must_use]
    pub fn moved(self, batch: usize, head: usize, row: usize) -> Self {
        Self(self.0.moved(batch, head, row).kept())
    }

    /// Its steps.
    pub const fn formula(self) -> &'static Formula {
        self.0
    }
}

impl fmt::Debug for ScoreMod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ScoreMod({})", self.0.name)
    }
}

impl fmt::Debug for MaskMod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "MaskMod({})", self.0.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_closures_are_one_formula() {
        let write = || ScoreMod::new("twice", |score, _| score * 2.0);
        assert!(std::ptr::eq(write().formula(), write().formula()));
        assert_ne!(write(), ScoreMod::new("twice", |score, _| score * 3.0));
        assert_ne!(write(), ScoreMod::new("doubled", |score, _| score * 2.0));
    }

    #[test]
    fn what_is_written_twice_is_one_step() {
        let formula = ScoreMod::new("shared", |score, at| {
            let distance = (at.query - at.key).to_number();
            score + distance * (at.query - at.key).to_number()
        });
        let steps = formula.formula().steps();
        let differences = steps.iter().filter(|step| matches!(step, Step::Binary(Binary::Subtract, _, _))).count();
        assert_eq!(differences, 1, "{steps:?}");
    }

    #[test]
    fn what_terms_depend_on() {
        let formula = ScoreMod::new("uses", |score, at| score * at.number(at.head) + at.number(at.key - at.query));
        let formula = formula.formula();
        let all = Uses { score: true, query: true, key: true, batch: false, head: true };
        assert_eq!(formula.uses(formula.result()), all);
        assert_eq!(formula.added_term(), None);
        assert_eq!(formula.tables(), (true, false));
        let Step::Binary(Binary::Add, product, term) = formula.step(formula.result()) else { panic!("{formula:?}") };
        assert_eq!(formula.uses(term), Uses { query: true, key: true, ..Uses::default() });
        assert_eq!(formula.uses(product), Uses { score: true, head: true, ..Uses::default() });
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
            let formula = score_mod.formula();
            formula.added_term().map(|(term, sign)| (formula.step(term), sign))
        };
        let two = Step::Number(2.0_f32.to_bits());
        assert_eq!(added(ScoreMod::new("left", |score, _| score + 2.0)), Some((two, 1.0)));
        assert_eq!(added(ScoreMod::new("right", |score, _| 2.0 + score)), Some((two, 1.0)));
        assert_eq!(added(ScoreMod::new("less", |score, _| score - 2.0)), Some((two, -1.0)));
        assert_eq!(added(ScoreMod::new("from", |score, _| 2.0 - score)), None);
        assert_eq!(added(ScoreMod::new("both", |score, _| score + score)), None);
        assert_eq!(added(ScoreMod::new("product", |score, _| score * 2.0)), None);
    }
}
