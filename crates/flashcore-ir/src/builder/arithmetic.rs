//! Moves, comparisons, arithmetic, bits, conversions and special functions.

use super::Builder;
use crate::operand::{Compare, Fp8, Reg, Rounding, SpecialRegister, Value};
use crate::operation::Op;
use crate::types::{
    Bf16, Bits, F16, F16x2, F32, Float, HalfPair, Integer, Integer32, Number, Pred, S32, S64, Tf32, Ty, U16, U32, U64,
};

/// Methods that compute a new register from operands of one type.
macro_rules! same_type {
    ($($(#[$doc:meta])* $method:ident<$bound:ident>($($operand:ident),*) = $op:ident;)*) => {
        impl Builder {
            $(
                $(#[$doc])*
                #[track_caller]
                pub fn $method<T: $bound>(&mut self, $($operand: impl Into<Value<T>>),*) -> Reg<T> {
                    $(let $operand = $operand.into().operand();)*
                    let d = self.register::<T>();
                    self.push(Op::$op { ty: T::TYPE, d: d.id(), $($operand),* });
                    d
                }
            )*
        }
    };
}

same_type! {
    /// `a + b`.
    add<Number>(a, b) = Add;
    /// `a - b`.
    sub<Number>(a, b) = Sub;
    /// `a * b`; the low half for integers.
    mul<Number>(a, b) = Mul;
    /// The high half of `a * b`.
    mul_high<Integer32>(a, b) = MulHigh;
    /// `a * b + c`, the low half.
    mad<Integer>(a, b, c) = Mad;
    /// `a * b + c`, rounded once.
    fma<Float>(a, b, c) = Fma;
    /// `a / b`: truncated for `u32`, rounded to nearest even for `f32`.
    div<Number>(a, b) = Div;
    /// `a mod b`.
    rem<Integer>(a, b) = Rem;
    /// The smaller.
    min<Number>(a, b) = Min;
    /// The larger.
    max<Number>(a, b) = Max;
    /// `-a`.
    neg<Number>(a) = Neg;
    /// `|a|`.
    abs<Number>(a) = Abs;
    /// `a & b`.
    and<Bits>(a, b) = And;
    /// `a | b`.
    or<Bits>(a, b) = Or;
    /// `a ^ b`.
    xor<Bits>(a, b) = Xor;
    /// `~a`.
    not<Bits>(a) = Not;
    /// `2^a`, approximately.
    exp2<Float>(a) = Exp2;
    /// `tanh(a)`, approximately.
    tanh<Float>(a) = Tanh;
}

/// Methods that compute a new register of a fixed type.
macro_rules! fixed_type {
    ($($(#[$doc:meta])* $method:ident($($operand:ident),*) -> $ty:ident = $op:ident;)*) => {
        impl Builder {
            $(
                $(#[$doc])*
                #[track_caller]
                pub fn $method(&mut self, $($operand: impl Into<Value<$ty>>),*) -> Reg<$ty> {
                    $(let $operand = $operand.into().operand();)*
                    let d = self.register::<$ty>();
                    self.push(Op::$op { d: d.id(), $($operand),* });
                    d
                }
            )*
        }
    };
}

fixed_type! {
    /// `log2(a)`, approximately.
    log2(a) -> F32 = Log2;
    /// `1/a`, approximately.
    reciprocal(a) -> F32 = Reciprocal;
    /// `1/sqrt(a)`, approximately.
    reciprocal_sqrt(a) -> F32 = ReciprocalSqrt;
    /// `sqrt(a)`, approximately.
    sqrt(a) -> F32 = Sqrt;
    /// The number of ones.
    pop_count(a) -> U32 = PopCount;
    /// The number of zeros above the highest one.
    leading_zeros(a) -> U32 = LeadingZeros;
    /// `length` bits of `a` from bit `position` on.
    bit_field_extract(a, position, length) -> U32 = BitFieldExtract;
    /// `b` with `length` bits from bit `position` on replaced by the low bits of `a`.
    bit_field_insert(a, b, position, length) -> U32 = BitFieldInsert;
    /// Four bytes chosen from the eight of `a` and `b` by the nibbles of `selector`.
    permute(a, b, selector) -> U32 = Permute;
}

impl Builder {
    /// Copies the value into a new register.
    #[track_caller]
    pub fn copy<T: Ty>(&mut self, value: impl Into<Value<T>>) -> Reg<T> {
        let d = self.register();
        self.set(d, value);
        d
    }

    /// `target = value`.
    #[track_caller]
    pub fn set<T: Ty>(&mut self, target: Reg<T>, value: impl Into<Value<T>>) {
        self.push(Op::Mov { ty: T::TYPE, d: target.id(), a: value.into().operand() });
    }

    /// `target = target + value`.
    #[track_caller]
    pub fn add_to<T: Number>(&mut self, target: Reg<T>, value: impl Into<Value<T>>) {
        self.push(Op::Add { ty: T::TYPE, d: target.id(), a: Value::from(target).operand(), b: value.into().operand() });
    }

    /// `target = target * value`.
    #[track_caller]
    pub fn mul_to<T: Number>(&mut self, target: Reg<T>, value: impl Into<Value<T>>) {
        self.push(Op::Mul { ty: T::TYPE, d: target.id(), a: Value::from(target).operand(), b: value.into().operand() });
    }

    /// `target = max(target, value)`.
    #[track_caller]
    pub fn max_to<T: Number>(&mut self, target: Reg<T>, value: impl Into<Value<T>>) {
        self.push(Op::Max { ty: T::TYPE, d: target.id(), a: Value::from(target).operand(), b: value.into().operand() });
    }

    /// `target = 2^target`, approximately.
    #[track_caller]
    pub fn exp2_to<T: Float>(&mut self, target: Reg<T>) {
        self.push(Op::Exp2 { ty: T::TYPE, d: target.id(), a: Value::from(target).operand() });
    }

    /// `target = a * b + target`.
    #[track_caller]
    pub fn fma_to<T: Float>(&mut self, target: Reg<T>, a: impl Into<Value<T>>, b: impl Into<Value<T>>) {
        let (a, b, c) = (a.into().operand(), b.into().operand(), Value::from(target).operand());
        self.push(Op::Fma { ty: T::TYPE, d: target.id(), a, b, c });
    }

    /// `target = a * target + c`.
    #[track_caller]
    pub fn scale_add_to<T: Float>(&mut self, target: Reg<T>, a: impl Into<Value<T>>, c: impl Into<Value<T>>) {
        let (a, b, c) = (a.into().operand(), Value::from(target).operand(), c.into().operand());
        self.push(Op::Fma { ty: T::TYPE, d: target.id(), a, b, c });
    }

    /// `target = condition ? value : target`.
    #[track_caller]
    pub fn set_where<T: Number>(&mut self, target: Reg<T>, condition: Reg<Pred>, value: impl Into<Value<T>>) {
        let (a, b) = (value.into().operand(), Value::from(target).operand());
        self.push(Op::Select { ty: T::TYPE, d: target.id(), a, b, condition: vec![condition.id()] });
    }

    /// `a compare b`.
    #[track_caller]
    pub fn compare<T: Number>(
        &mut self,
        compare: Compare,
        a: impl Into<Value<T>>,
        b: impl Into<Value<T>>,
    ) -> Reg<Pred> {
        let (a, b) = (a.into().operand(), b.into().operand());
        let d = self.register::<Pred>();
        self.push(Op::SetPredicate { compare, ty: T::TYPE, d: d.id(), a, b });
        d
    }

    /// `condition ? a : b`.
    #[track_caller]
    pub fn select<T: Number>(
        &mut self,
        condition: Reg<Pred>,
        a: impl Into<Value<T>>,
        b: impl Into<Value<T>>,
    ) -> Reg<T> {
        let (a, b) = (a.into().operand(), b.into().operand());
        let d = self.register::<T>();
        self.push(Op::Select { ty: T::TYPE, d: d.id(), a, b, condition: vec![condition.id()] });
        d
    }

    /// `a << bits`.
    #[track_caller]
    pub fn shl<T: Integer>(&mut self, a: impl Into<Value<T>>, bits: impl Into<Value<U32>>) -> Reg<T> {
        let (a, b) = (a.into().operand(), bits.into().operand());
        let d = self.register::<T>();
        self.push(Op::Shl { ty: T::TYPE, d: d.id(), a, b });
        d
    }

    /// `a >> bits`, filled with the sign for signed types.
    #[track_caller]
    pub fn shr<T: Integer>(&mut self, a: impl Into<Value<T>>, bits: impl Into<Value<U32>>) -> Reg<T> {
        let (a, b) = (a.into().operand(), bits.into().operand());
        let d = self.register::<T>();
        self.push(Op::Shr { ty: T::TYPE, d: d.id(), a, b });
        d
    }

    /// The bitwise function of three words that has the truth table `table`.
    #[track_caller]
    pub fn lop3(
        &mut self,
        table: u8,
        a: impl Into<Value<U32>>,
        b: impl Into<Value<U32>>,
        c: impl Into<Value<U32>>,
    ) -> Reg<U32> {
        let (a, b, c) = (a.into().operand(), b.into().operand(), c.into().operand());
        let d = self.register::<U32>();
        self.push(Op::Lop3 { table, d: d.id(), a, b, c });
        d
    }

    /// The full product of two 32-bit integers.
    #[track_caller]
    pub fn mul_wide<T: Integer32>(&mut self, a: impl Into<Value<T>>, b: impl Into<Value<T>>) -> Reg<T::Wide> {
        let (a, b) = (a.into().operand(), b.into().operand());
        let d = self.register::<T::Wide>();
        self.push(Op::MulWide { ty: T::TYPE, d: d.id(), a, b });
        d
    }

    /// `a * b + c` with a 64-bit product and sum.
    #[track_caller]
    pub fn mad_wide<T: Integer32>(
        &mut self,
        a: impl Into<Value<T>>,
        b: impl Into<Value<T>>,
        c: impl Into<Value<T::Wide>>,
    ) -> Reg<T::Wide> {
        let (a, b, c) = (a.into().operand(), b.into().operand(), c.into().operand());
        let d = self.register::<T::Wide>();
        self.push(Op::MadWide { ty: T::TYPE, d: d.id(), a, b, c });
        d
    }

    /// A special register of the thread.
    #[track_caller]
    pub fn special(&mut self, register: SpecialRegister) -> Reg<U32> {
        let d = self.register::<U32>();
        self.push(Op::Special { register, d: d.id() });
        d
    }

    /// The lane in the warp.
    #[track_caller]
    pub fn lane(&mut self) -> Reg<U32> {
        self.special(SpecialRegister::Lane)
    }

    /// The warp in the CTA, known to be the same in all its lanes.
    #[track_caller]
    pub fn warp(&mut self) -> Reg<U32> {
        let thread = self.special(SpecialRegister::ThreadX);
        self.shr(thread, 5u32)
    }

    #[track_caller]
    fn convert<From: Ty, To: Ty>(&mut self, a: Reg<From>, rounding: Rounding) -> Reg<To> {
        let d = self.register::<To>();
        self.push(Op::Convert { to: To::TYPE, from: From::TYPE, rounding, d: d.id(), a: Value::from(a).operand() });
        d
    }

    /// Zero-extends.
    #[track_caller]
    pub fn widen(&mut self, a: Reg<U32>) -> Reg<U64> {
        self.convert(a, Rounding::Exact)
    }

    /// Sign-extends.
    #[track_caller]
    pub fn widen_signed(&mut self, a: Reg<S32>) -> Reg<S64> {
        self.convert(a, Rounding::Exact)
    }

    /// The low 32 bits.
    #[track_caller]
    pub fn truncate(&mut self, a: Reg<U64>) -> Reg<U32> {
        self.convert(a, Rounding::Exact)
    }

    /// Zero-extends 16 bits.
    #[track_caller]
    pub fn widen_half(&mut self, a: Reg<U16>) -> Reg<U32> {
        self.convert(a, Rounding::Exact)
    }

    /// An integer as `f32`, rounded to nearest even.
    #[track_caller]
    pub fn to_f32<T: Integer32>(&mut self, a: Reg<T>) -> Reg<F32> {
        self.convert(a, Rounding::NearestEven)
    }

    /// An `f32` as an integer, saturating.
    #[track_caller]
    pub fn to_integer<T: Integer32>(&mut self, a: Reg<F32>, rounding: Rounding) -> Reg<T> {
        self.convert(a, rounding)
    }

    /// An `f16` as `f32`, exactly.
    #[track_caller]
    pub fn f16_to_f32(&mut self, a: Reg<F16>) -> Reg<F32> {
        self.convert(a, Rounding::Exact)
    }

    /// A `bf16` as `f32`, exactly.
    #[track_caller]
    pub fn bf16_to_f32(&mut self, a: Reg<Bf16>) -> Reg<F32> {
        self.convert(a, Rounding::Exact)
    }

    /// An `f32` rounded to `f16`.
    #[track_caller]
    pub fn f32_to_f16(&mut self, a: Reg<F32>) -> Reg<F16> {
        self.convert(a, Rounding::NearestEven)
    }

    /// An `f32` rounded to `bf16`.
    #[track_caller]
    pub fn f32_to_bf16(&mut self, a: Reg<F32>) -> Reg<Bf16> {
        self.convert(a, Rounding::NearestEven)
    }

    /// An `f32` rounded to what the tensor core reads of it.
    #[track_caller]
    pub fn f32_to_tf32(&mut self, a: Reg<F32>) -> Reg<Tf32> {
        self.convert(a, Rounding::NearestAway)
    }

    /// Two `f32` rounded into a pair, `low` in the lower half.
    #[track_caller]
    pub fn pair<T: HalfPair>(&mut self, low: impl Into<Value<F32>>, high: impl Into<Value<F32>>) -> Reg<T> {
        let (low, high) = (low.into().operand(), high.into().operand());
        let d = self.register::<T>();
        self.push(Op::ConvertPair { to: T::TYPE, d: d.id(), high, low });
        d
    }

    /// Two `f32` as 8-bit floats, saturating, `low` in the lower byte.
    #[track_caller]
    pub fn fp8_pair(&mut self, to: Fp8, low: impl Into<Value<F32>>, high: impl Into<Value<F32>>) -> Reg<U16> {
        let (low, high) = (low.into().operand(), high.into().operand());
        let d = self.register::<U16>();
        self.push(Op::ConvertFp8 { to, d: d.id(), high, low });
        d
    }

    /// Two 8-bit floats as `f16`, the lower byte in the lower half.
    #[track_caller]
    pub fn widen_fp8(&mut self, from: Fp8, a: Reg<U16>) -> Reg<F16x2> {
        let d = self.register::<F16x2>();
        self.push(Op::WidenFp8 { from, d: d.id(), a: vec![a.id()] });
        d
    }

    /// The halves of a word.
    #[track_caller]
    pub fn halves(&mut self, word: Reg<U32>) -> (Reg<U16>, Reg<U16>) {
        let (low, high) = (self.register::<U16>(), self.register::<U16>());
        self.push(Op::Unpack { from: U32::TYPE, low: low.id(), high: high.id(), a: vec![word.id()] });
        (low, high)
    }

    /// `target` = a word of two halves.
    #[track_caller]
    pub fn join_halves_to(&mut self, target: Reg<U32>, low: Reg<U16>, high: Reg<U16>) {
        self.push(Op::Pack { to: U32::TYPE, d: target.id(), low: vec![low.id()], high: vec![high.id()] });
    }

    /// `target` = two `f32` rounded into a pair, `low` in the lower half.
    #[track_caller]
    pub fn pair_to<T: HalfPair>(&mut self, target: Reg<T>, low: impl Into<Value<F32>>, high: impl Into<Value<F32>>) {
        let (low, high) = (low.into().operand(), high.into().operand());
        self.push(Op::ConvertPair { to: T::TYPE, d: target.id(), high, low });
    }

    /// Two 16-bit floats as a pair, `low` in the lower half.
    #[track_caller]
    pub fn pack<T: HalfPair>(&mut self, low: Reg<T::Element>, high: Reg<T::Element>) -> Reg<T> {
        let d = self.register::<T>();
        self.push(Op::Pack { to: T::TYPE, d: d.id(), low: vec![low.id()], high: vec![high.id()] });
        d
    }

    /// The two elements of a pair, the lower half first.
    #[track_caller]
    pub fn unpack<T: HalfPair>(&mut self, a: Reg<T>) -> (Reg<T::Element>, Reg<T::Element>) {
        let (low, high) = (self.register::<T::Element>(), self.register::<T::Element>());
        self.push(Op::Unpack { from: T::TYPE, low: low.id(), high: high.id(), a: vec![a.id()] });
        (low, high)
    }

    /// The bits of `a` as another type of the same width.
    #[track_caller]
    pub fn reinterpret<From: Ty, To: Ty>(&mut self, a: Reg<From>) -> Reg<To> {
        let d = self.register::<To>();
        self.push(Op::Reinterpret { to: To::TYPE, from: From::TYPE, d: d.id(), a: Value::from(a).operand() });
        d
    }
}
