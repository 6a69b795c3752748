//! Handles that closures compute with: symbolic numbers, integers and booleans, traced into an expression.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Shr, Sub};

use super::constants::{Constants, Size};
use super::{Binary, Expression, Kind, Step, Term, Unary};

/// The trace of operations on handles.
#[derive(Default)]
pub(super) struct Writer {
    steps: RefCell<Vec<(Step, Kind)>>,
    terms: RefCell<HashMap<Step, Term>>,
    constants: RefCell<Constants>,
}

impl Writer {
    /// Returns the term of a step, which is recorded once.
    pub(super) fn push(&self, step: Step, kind: Kind) -> Term {
        *self.terms.borrow_mut().entry(step).or_insert_with(|| {
            let mut steps = self.steps.borrow_mut();
            steps.push((step, kind));
            Term(steps.len() as u32 - 1)
        })
    }

    /// Returns the term of a constant, each in a slot of its own: which of them are equal is not part of the structure.
    /// Without a free slot, the constant is part of the structure.
    pub(super) fn constant(&self, step: Step, kind: Kind) -> Term {
        let slot = |bits| self.constants.borrow_mut().push(bits);
        let step = match step {
            Step::Number(bits) => slot(bits).map_or(step, Step::NumberSlot),
            Step::Integer(value) => {
                slot(value.cast_unsigned()).map_or(step, |slot| Step::IntegerSlot(slot, Size::of(value)))
            }
            _ => step,
        };
        self.push(step, kind)
    }

    pub(super) fn number(&self, step: Step) -> Number<'_> {
        Number { writer: self, term: self.push(step, Kind::Number) }
    }

    /// The handle of a number's term.
    pub(super) fn number_of(&self, term: Term) -> Number<'_> {
        Number { writer: self, term }
    }

    /// The handle of an integer's term.
    pub(super) fn integer_of(&self, term: Term) -> Integer<'_> {
        Integer { writer: self, term }
    }

    /// Steps so far.
    pub(super) fn len(&self) -> usize {
        self.steps.borrow().len()
    }

    fn integer(&self, step: Step) -> Integer<'_> {
        Integer { writer: self, term: self.push(step, Kind::Integer) }
    }

    fn truth(&self, step: Step) -> Truth<'_> {
        Truth { writer: self, term: self.push(step, Kind::Truth) }
    }

    pub(super) fn place(&self) -> Place<'_> {
        let [batch, head, query, key] =
            [Step::Batch, Step::Head, Step::Query, Step::Key].map(|step| self.integer(step));
        Place { batch, head, query, key }
    }

    pub(super) fn finish(self, name: &str, result: Term) -> (Expression, Constants) {
        (Expression::new(name, self.steps.into_inner(), result), self.constants.into_inner())
    }
}

/// The indices of a score: batch, head, query row, key.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    /// The number of the batch.
    pub batch: Integer<'a>,
    /// The number of the query head.
    pub head: Integer<'a>,
    /// The number of the query row.
    pub query: Integer<'a>,
    /// The number of the key.
    pub key: Integer<'a>,
}

impl<'a> Place<'a> {
    /// The entry of the problem's table of numbers at `index`, clamped to the table.
    pub fn number(&self, index: Integer<'a>) -> Number<'a> {
        index.writer.number(Step::NumberAt(index.term))
    }

    /// The entry of the problem's table of integers at `index`, clamped to the table.
    pub fn integer(&self, index: Integer<'a>) -> Integer<'a> {
        index.writer.integer(Step::IntegerAt(index.term))
    }
}

/// A floating-point number.
#[derive(Clone, Copy)]
pub struct Number<'a> {
    writer: &'a Writer,
    term: Term,
}

/// A 32-bit integer, which wraps.
#[derive(Clone, Copy)]
pub struct Integer<'a> {
    writer: &'a Writer,
    term: Term,
}

/// A boolean.
#[derive(Clone, Copy)]
pub struct Truth<'a> {
    writer: &'a Writer,
    term: Term,
}

/// A handle, or a constant that becomes one.
pub trait IntoHandle<'a, Handle> {
    /// The handle; a constant becomes a term of the closure that `beside` belongs to.
    #[doc(hidden)]
    fn handle(self, beside: Handle) -> Handle;

    /// The handle of a constant that is part of the structure.
    #[doc(hidden)]
    fn fixed_handle(self, beside: Handle) -> Handle;
}

macro_rules! handles {
    ($($handle:ident, $constant:ty, $step:expr, $write:ident;)*) => {
        $(
            impl<'a> $handle<'a> {
                fn unary(self, op: Unary) -> Self {
                    self.writer.$write(Step::Unary(op, self.term))
                }

                fn binary(self, op: Binary, other: impl IntoHandle<'a, Self>) -> Self {
                    self.writer.$write(Step::Binary(op, self.term, other.handle(self).term))
                }

                fn compared(self, op: Binary, other: impl IntoHandle<'a, Self>) -> Truth<'a> {
                    self.writer.truth(Step::Binary(op, self.term, other.handle(self).term))
                }

                /// The magnitude.
                #[must_use]
                pub fn abs(self) -> Self {
                    self.unary(Unary::Absolute)
                }

                /// The smaller of the two.
                #[must_use]
                pub fn min(self, other: impl IntoHandle<'a, Self>) -> Self {
                    self.binary(Binary::Minimum, other)
                }

                /// The larger of the two.
                #[must_use]
                pub fn max(self, other: impl IntoHandle<'a, Self>) -> Self {
                    self.binary(Binary::Maximum, other)
                }

                /// `self < other`.
                pub fn less(self, other: impl IntoHandle<'a, Self>) -> Truth<'a> {
                    self.compared(Binary::Less, other)
                }

                /// `self > other`.
                pub fn more(self, other: impl IntoHandle<'a, Self>) -> Truth<'a> {
                    let other = other.handle(self);
                    other.compared(Binary::Less, self)
                }

                /// `self <= other`.
                pub fn at_most(self, other: impl IntoHandle<'a, Self>) -> Truth<'a> {
                    !self.more(other)
                }

                /// `self >= other`.
                pub fn at_least(self, other: impl IntoHandle<'a, Self>) -> Truth<'a> {
                    !self.less(other)
                }

                /// `self == other`.
                pub fn equals(self, other: impl IntoHandle<'a, Self>) -> Truth<'a> {
                    self.compared(Binary::Equal, other)
                }
            }

            impl<'a> IntoHandle<'a, $handle<'a>> for $handle<'a> {
                fn handle(self, _: $handle<'a>) -> $handle<'a> {
                    self
                }

                fn fixed_handle(self, _: $handle<'a>) -> $handle<'a> {
                    self
                }
            }

            impl<'a> IntoHandle<'a, $handle<'a>> for $constant {
                fn handle(self, beside: $handle<'a>) -> $handle<'a> {
                    let step: fn($constant) -> Step = $step;
                    $handle { term: beside.writer.constant(step(self), Kind::$handle), ..beside }
                }

                fn fixed_handle(self, beside: $handle<'a>) -> $handle<'a> {
                    let step: fn($constant) -> Step = $step;
                    beside.writer.$write(step(self))
                }
            }

            impl Neg for $handle<'_> {
                type Output = Self;

                fn neg(self) -> Self {
                    self.unary(Unary::Negate)
                }
            }
        )*
    };
}

handles! {
    Number, f32, |number| Step::Number(number.to_bits()), number;
    Integer, i32, Step::Integer, integer;
}

macro_rules! operators {
    ($($handle:ident, $constant:ty: $($operator:ident $method:ident $op:ident $into:ident),*;)*) => {
        $($(
            impl<'a, Other: IntoHandle<'a, $handle<'a>>> $operator<Other> for $handle<'a> {
                type Output = Self;

                fn $method(self, other: Other) -> Self {
                    self.binary(Binary::$op, other.$into(self))
                }
            }

            impl<'a> $operator<$handle<'a>> for $constant {
                type Output = $handle<'a>;

                fn $method(self, other: $handle<'a>) -> $handle<'a> {
                    self.$into(other).binary(Binary::$op, other)
                }
            }
        )*)*
    };
}

// An integer factor is part of the structure: the spread of its products in a tile follows from it.
operators! {
    Number, f32: Add add Add handle, Sub sub Subtract handle, Mul mul Multiply handle, Div div Divide handle;
    Integer, i32: Add add Add handle, Sub sub Subtract handle, Mul mul Multiply fixed_handle;
}

impl Number<'_> {
    pub(super) const fn term(self) -> Term {
        self.term
    }

    /// `e` to the power of the number.
    #[must_use]
    pub fn exp(self) -> Self {
        self.unary(Unary::Exp)
    }

    /// The hyperbolic tangent.
    #[must_use]
    pub fn tanh(self) -> Self {
        self.unary(Unary::Tanh)
    }
}

impl<'a> Integer<'a> {
    /// The integer as a number, rounded if it has more than 24 bits.
    pub fn to_number(self) -> Number<'a> {
        self.writer.number(Step::Unary(Unary::ToNumber, self.term))
    }
}

/// Divided by a power of two and rounded down: `key >> 7` is the number of a block of 128 keys.
impl Shr<u32> for Integer<'_> {
    type Output = Self;

    fn shr(self, bits: u32) -> Self {
        self.writer.integer(Step::ShiftRight(self.term, bits.min(31)))
    }
}

impl<'a> Truth<'a> {
    pub(super) const fn term(self) -> Term {
        self.term
    }

    /// One number where it is true, another where it is false.
    pub fn number(self, yes: impl IntoHandle<'a, Number<'a>>, no: impl IntoHandle<'a, Number<'a>>) -> Number<'a> {
        let beside = Number { writer: self.writer, term: self.term };
        let (yes, no) = (yes.handle(beside), no.handle(beside));
        self.writer.number(Step::Select(self.term, yes.term, no.term))
    }

    /// One integer where it is true, another where it is false.
    pub fn integer(self, yes: impl IntoHandle<'a, Integer<'a>>, no: impl IntoHandle<'a, Integer<'a>>) -> Integer<'a> {
        let beside = Integer { writer: self.writer, term: self.term };
        let (yes, no) = (yes.handle(beside), no.handle(beside));
        self.writer.integer(Step::Select(self.term, yes.term, no.term))
    }
}

impl BitAnd for Truth<'_> {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        self.writer.truth(Step::Binary(Binary::And, self.term, other.term))
    }
}

impl BitOr for Truth<'_> {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        self.writer.truth(Step::Binary(Binary::Or, self.term, other.term))
    }
}

impl Not for Truth<'_> {
    type Output = Self;

    fn not(self) -> Self {
        self.writer.truth(Step::Unary(Unary::Not, self.term))
    }
}
