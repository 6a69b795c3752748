//! Register expressions: operators on [`Reg`], so that index arithmetic reads like arithmetic.
//!
//! An operator builds a tree and writes nothing; [`Builder::eval`] writes the tree in post-order, left to right: the
//! instructions that nested calls of the builder's methods write, each with the line of the `eval` as its origin.
//! `a * b + c` is a product and a sum, as written; [`mul_add`](Reg::mul_add) is the one instruction.
//!
//! ```
//! use flashcore_ir::{Builder, types::U32};
//!
//! let mut k = Builder::new("tile", 32);
//! let [index, tiles] = ["index", "tiles"].map(|name| k.parameter::<U32>(name));
//! let head = k.eval(index / tiles);
//! let tile = k.eval(index - head * tiles);
//! let is_last = k.eval(tile.ge(tiles - 1) & index.gt(0));
//! # let _ = is_last;
//! ```

use core::marker::PhantomData;
use core::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Not, Rem, Shl, Shr, Sub};

use super::Builder;
use crate::kernel::Origin;
use crate::operand::{Compare, Operand, Reg, RegisterId, Rounding, Value};
use crate::operation::Op;
use crate::types::{Bits, Integer, Number, Pred, S32, Ty, Type, U32, U64};

/// An expression of registers and constants, of which nothing is written yet.
#[derive(Debug, Clone)]
pub struct Expr<T: Ty> {
    node: Node,
    marker: PhantomData<T>,
}

#[derive(Debug, Clone)]
enum Node {
    Operand(Operand),
    Operation { write: Write, result: Type, operands: Vec<Node> },
}

/// The instruction of a node, given its destination and its operands.
type Write = fn(Type, RegisterId, &[Operand]) -> Op;

impl<T: Ty, V: Into<Value<T>>> From<V> for Expr<T> {
    fn from(value: V) -> Self {
        Self { node: Node::Operand(value.into().operand()), marker: PhantomData }
    }
}

impl<T: Ty> Expr<T> {
    fn operation(write: Write, operands: Vec<Node>) -> Self {
        Self { node: Node::Operation { write, result: T::TYPE, operands }, marker: PhantomData }
    }
}

/// Operators and methods of registers and expressions. Each row is an instruction.
macro_rules! expressions {
    (
        $(operator $trait:ident::$operator:ident<$bound:ident>($other:ty) = $op:ident;)*
        $($(#[$doc:meta])* method $method:ident<$method_bound:ident>($($operand:ident: $operand_ty:ty),*)
            -> $result:ty { |$ty:ident, $d:ident, $o:ident| $write:expr })*
    ) => {
        expressions! { @of Reg $(operator $trait::$operator<$bound>($other) = $op;)* }
        expressions! { @of Expr $(operator $trait::$operator<$bound>($other) = $op;)* }
        $(
            impl<T: $method_bound> Reg<T> {
                $(#[$doc])*
                pub fn $method(self, $($operand: impl Into<Expr<$operand_ty>>),*) -> Expr<$result> {
                    Expr::from(self).$method($($operand),*)
                }
            }

            impl<T: $method_bound> Expr<T> {
                $(#[$doc])*
                #[must_use]
                pub fn $method(self, $($operand: impl Into<Expr<$operand_ty>>),*) -> Expr<$result> {
                    Expr::operation(|$ty, $d, $o| $write, vec![self.node, $($operand.into().node),*])
                }
            }
        )*
    };
    (@of $self:ident $(operator $trait:ident::$operator:ident<$bound:ident>($other:ty) = $op:ident;)*) => {
        $(impl<T: $bound, B: Into<Expr<$other>>> $trait<B> for $self<T> {
            type Output = Expr<T>;

            fn $operator(self, other: B) -> Expr<T> {
                let operands = vec![Expr::<T>::from(self).node, other.into().node];
                Expr::operation(|ty, d, operands| Op::$op { ty, d, a: operands[0], b: operands[1] }, operands)
            }
        })*
    };
}

/// `SetPredicate` of two operands of a type.
macro_rules! comparison {
    ($compare:ident, $d:ident, $o:ident) => {
        Op::SetPredicate { compare: Compare::$compare, ty: T::TYPE, d: $d, a: $o[0], b: $o[1] }
    };
}

expressions! {
    operator Add::add<Number>(T) = Add;
    operator Sub::sub<Number>(T) = Sub;
    operator Mul::mul<Number>(T) = Mul;
    operator Div::div<Number>(T) = Div;
    operator Rem::rem<Integer>(T) = Rem;
    operator Shl::shl<Integer>(U32) = Shl;
    operator Shr::shr<Integer>(U32) = Shr;
    operator BitAnd::bitand<Bits>(T) = And;
    operator BitOr::bitor<Bits>(T) = Or;
    operator BitXor::bitxor<Bits>(T) = Xor;

    /// The smaller.
    method min<Number>(other: T) -> T { |ty, d, o| Op::Min { ty, d, a: o[0], b: o[1] } }
    /// The larger.
    method max<Number>(other: T) -> T { |ty, d, o| Op::Max { ty, d, a: o[0], b: o[1] } }
    /// `self * factor + summand` by one instruction.
    method mul_add<Integer>(factor: T, summand: T) -> T { |ty, d, o| Op::Mad { ty, d, a: o[0], b: o[1], c: o[2] } }
    /// True if less.
    method lt<Number>(other: T) -> Pred { |_ty, d, o| comparison!(Lt, d, o) }
    /// True if less or equal.
    method le<Number>(other: T) -> Pred { |_ty, d, o| comparison!(Le, d, o) }
    /// True if greater.
    method gt<Number>(other: T) -> Pred { |_ty, d, o| comparison!(Gt, d, o) }
    /// True if greater or equal.
    method ge<Number>(other: T) -> Pred { |_ty, d, o| comparison!(Ge, d, o) }
    /// True if equal.
    method eq<Number>(other: T) -> Pred { |_ty, d, o| comparison!(Eq, d, o) }
    /// True if not equal.
    method ne<Number>(other: T) -> Pred { |_ty, d, o| comparison!(Ne, d, o) }
}

/// Conversions of registers and expressions: the same bits as another type, or zero-extended.
macro_rules! conversions {
    ($($(#[$doc:meta])* $method:ident: $from:ident -> $to:ident { |$d:ident, $a:ident| $write:expr })*) => {
        $(
            impl Reg<$from> {
                $(#[$doc])*
                pub fn $method(self) -> Expr<$to> {
                    Expr::from(self).$method()
                }
            }

            impl Expr<$from> {
                $(#[$doc])*
                #[must_use]
                pub fn $method(self) -> Expr<$to> {
                    Expr::operation(|_, $d, operands| { let $a = operands[0]; $write }, vec![self.node])
                }
            }
        )*
    };
}

conversions! {
    /// The same bits as a signed integer.
    signed: U32 -> S32 { |d, a| Op::Reinterpret { to: Type::S32, from: Type::U32, d, a } }
    /// The same bits as an unsigned integer.
    unsigned: S32 -> U32 { |d, a| Op::Reinterpret { to: Type::U32, from: Type::S32, d, a } }
    /// Zero-extended.
    widen: U32 -> U64 {
        |d, a| Op::Convert { to: Type::U64, from: Type::U32, rounding: Rounding::Exact, d, a }
    }
}

impl<T: Bits> Not for Expr<T> {
    type Output = Self;

    fn not(self) -> Self {
        Self::operation(|ty, d, operands| Op::Not { ty, d, a: operands[0] }, vec![self.node])
    }
}

impl<T: Bits> Not for Reg<T> {
    type Output = Expr<T>;

    fn not(self) -> Expr<T> {
        !Expr::from(self)
    }
}

impl Builder {
    /// Writes an expression, and returns the register of its value: of a register alone, that register.
    #[track_caller]
    pub fn eval<T: Ty>(&mut self, expression: impl Into<Expr<T>>) -> Reg<T> {
        let origin = self.origin();
        match self.write_node(expression.into().node, origin) {
            Operand::Register(register) => Reg::new(register),
            Operand::Constant(bits) => self.copy(Value::from_bits(bits)),
        }
    }

    fn write_node(&mut self, node: Node, origin: Origin) -> Operand {
        match node {
            Node::Operand(operand) => operand,
            Node::Operation { write, result, operands } => {
                let operands: Vec<_> = operands.into_iter().map(|node| self.write_node(node, origin)).collect();
                let d = self.kernel.add_register(result, self.section);
                self.push_at(write(result, d, &operands), origin);
                Operand::Register(d)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernel;

    fn kernel(write: impl FnOnce(&mut Builder, [Reg<U32>; 3])) -> Kernel {
        let mut k = Builder::new("expression", 32);
        let registers = ["a", "b", "c"].map(|name| k.parameter::<U32>(name));
        write(&mut k, registers);
        k.finish()
    }

    /// `expression` writes what `calls` writes, and nothing else does.
    fn check<T: Ty>(
        expression: impl Fn([Reg<U32>; 3]) -> Expr<T>,
        calls: impl FnOnce(&mut Builder, [Reg<U32>; 3]) -> Reg<T>,
    ) {
        let written = kernel(|k, registers| {
            let _ = k.eval(expression(registers));
        });
        let called = kernel(|k, registers| {
            let _ = calls(k, registers);
        });
        let swapped = kernel(|k, [a, b, c]| {
            let _ = k.eval(expression([b, a, c]));
        });
        assert_eq!(written.fingerprint(), called.fingerprint());
        assert_ne!(swapped.fingerprint(), called.fingerprint());
    }

    #[test]
    fn expressions_write_what_nested_calls_write() {
        check(
            |[a, b, c]| (a + 1) * (b - c),
            |k, [a, b, c]| {
                let (sum, difference) = (k.add(a, 1u32), k.sub(b, c));
                k.mul(sum, difference)
            },
        );
        check(
            |[a, b, c]| a.mul_add(b / 3, c).min(a % b),
            |k, [a, b, c]| {
                let quotient = k.div(b, 3u32);
                let sum = k.mad(a, quotient, c);
                let rest = k.rem(a, b);
                k.min(sum, rest)
            },
        );
        check(
            |[a, b, c]| ((a << b) | (b & c) ^ (a >> 2)).max(7),
            |k, [a, b, c]| {
                let left = k.shl(a, b);
                let masked = k.and(b, c);
                let right = k.shr(a, 2u32);
                let exclusive = k.xor(masked, right);
                let bits = k.or(left, exclusive);
                k.max(bits, 7u32)
            },
        );
        check(
            |[a, b, _]| (a.signed() - 1).unsigned().widen() + b.widen(),
            |k, [a, b, _]| {
                let signed = k.reinterpret::<U32, S32>(a);
                let less = k.sub(signed, 1i32);
                let unsigned = k.reinterpret::<S32, U32>(less);
                let (a, b) = (k.widen(unsigned), k.widen(b));
                k.add(a, b)
            },
        );
    }

    #[test]
    fn comparisons_give_predicates() {
        check(
            |[a, b, c]| a.lt(b) & !(a.ge(c) | b.eq(2)),
            |k, [a, b, c]| {
                let less = k.compare(Compare::Lt, a, b);
                let not_less = k.compare(Compare::Ge, a, c);
                let is_two = k.compare(Compare::Eq, b, 2u32);
                let either = k.or(not_less, is_two);
                let neither = k.not(either);
                k.and(less, neither)
            },
        );
        check(
            |[a, b, c]| a.le(b) | a.gt(c) | a.ne(b),
            |k, [a, b, c]| {
                let first = k.compare(Compare::Le, a, b);
                let second = k.compare(Compare::Gt, a, c);
                let either = k.or(first, second);
                let third = k.compare(Compare::Ne, a, b);
                k.or(either, third)
            },
        );
    }

    /// A register alone is itself, and a constant alone is copied.
    #[test]
    fn leaves_write_no_operation() {
        let with_register = kernel(|k, [a, ..]| assert_eq!(k.eval::<U32>(a).id(), a.id()));
        assert_eq!(with_register.fingerprint(), kernel(|_, _| {}).fingerprint());
        let with_constant = kernel(|k, _| {
            let _ = k.eval::<U32>(3u32);
        });
        let copied = kernel(|k, _| {
            let _ = k.copy(3u32);
        });
        assert_eq!(with_constant.fingerprint(), copied.fingerprint());
    }
}
