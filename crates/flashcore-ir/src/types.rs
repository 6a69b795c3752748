//! The types a register can have, as values ([`Type`]) and as Rust marker types ([`F32`], [`U32`], …).
//!
//! The marker types exist so that most mistakes fail in `cargo check`; the values are what the table of operations,
//! the verifier, the printer and the simulator work with.

use core::fmt;

/// The type of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Type {
    /// One bit per thread: the result of a comparison.
    Pred,
    /// 16-bit unsigned integer.
    U16,
    /// IEEE half precision.
    F16,
    /// The upper 16 bits of an `f32`.
    Bf16,
    /// 32-bit unsigned integer; also a shared-memory address.
    U32,
    /// 32-bit signed integer.
    S32,
    /// IEEE single precision.
    F32,
    /// An `f32` whose low 13 mantissa bits the tensor core ignores.
    Tf32,
    /// Two `f16`, the element with the lower index in the lower half.
    F16x2,
    /// Two `bf16`, the element with the lower index in the lower half.
    Bf16x2,
    /// 64-bit unsigned integer; also a global-memory address.
    U64,
    /// 64-bit signed integer.
    S64,
}

impl Type {
    /// Every type, in order.
    pub const ALL: [Self; 12] = [
        Self::Pred,
        Self::U16,
        Self::F16,
        Self::Bf16,
        Self::U32,
        Self::S32,
        Self::F32,
        Self::Tf32,
        Self::F16x2,
        Self::Bf16x2,
        Self::U64,
        Self::S64,
    ];

    /// Width in bits; a predicate counts as one.
    pub const fn bits(self) -> u32 {
        match self {
            Self::Pred => 1,
            Self::U16 | Self::F16 | Self::Bf16 => 16,
            Self::U32 | Self::S32 | Self::F32 | Self::Tf32 | Self::F16x2 | Self::Bf16x2 => 32,
            Self::U64 | Self::S64 => 64,
        }
    }

    /// Width in bytes of a value of this type in memory. Predicates have no memory form; theirs is 0.
    pub const fn bytes(self) -> u32 {
        self.bits() / 8
    }

    /// The short name used in dumps and register names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pred => "pred",
            Self::U16 => "u16",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::U32 => "u32",
            Self::S32 => "s32",
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::F16x2 => "f16x2",
            Self::Bf16x2 => "bf16x2",
            Self::U64 => "u64",
            Self::S64 => "s64",
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust marker for a register type.
pub trait Ty: sealed::Sealed + Copy + 'static {
    /// The marked type as a value.
    const TYPE: Type;
}

/// Types with `add`, `sub`, `mul`, `min` and `max`.
pub trait Number: Ty {}
/// Integers.
pub trait Integer: Number {}
/// 32-bit integers, which have wide products.
pub trait Integer32: Integer {
    /// The type of the full product.
    type Wide: Integer;
}
/// Floating-point numbers and pairs of them.
pub trait Float: Number {}
/// Integers and predicates, which have bitwise logic.
pub trait Bits: Ty {}
/// Types that a 32-bit register holds, which shuffles move.
pub trait Word: Ty {}
/// Types that memory can hold.
pub trait Storable: Ty {}
/// A pair of 16-bit floats in one register: the operand type of the 16-bit tensor-core operations.
pub trait HalfPair: Float + Word + Storable {
    /// The type of one element of the pair.
    type Element: Ty + Storable;
}
/// Operand types of the tensor cores.
pub trait MatrixOperand: Word {}
/// Accumulator types of the tensor cores: `f32`, or `f16` in pairs.
pub trait Accumulator: Word {}

macro_rules! markers {
    ($($(#[$doc:meta])* $name:ident: $($bound:ident)*;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub struct $name;
            impl sealed::Sealed for $name {}
            impl Ty for $name {
                const TYPE: Type = Type::$name;
            }
            $(impl $bound for $name {})*
        )*
    };
}

markers! {
    /// Marker of [`Type::Pred`].
    Pred: Bits;
    /// Marker of [`Type::U16`].
    U16: Storable;
    /// Marker of [`Type::F16`].
    F16: Storable;
    /// Marker of [`Type::Bf16`].
    Bf16: Storable;
    /// Marker of [`Type::U32`].
    U32: Number Integer Bits Word Storable;
    /// Marker of [`Type::S32`].
    S32: Number Integer Bits Word Storable;
    /// Marker of [`Type::F32`].
    F32: Number Float Word Storable Accumulator;
    /// Marker of [`Type::Tf32`].
    Tf32: Word Storable MatrixOperand;
    /// Marker of [`Type::F16x2`].
    F16x2: Number Float Word Storable MatrixOperand Accumulator;
    /// Marker of [`Type::Bf16x2`].
    Bf16x2: Number Float Word Storable MatrixOperand;
    /// Marker of [`Type::U64`].
    U64: Number Integer Bits Storable;
    /// Marker of [`Type::S64`].
    S64: Number Integer Bits Storable;
}

impl Integer32 for U32 {
    type Wide = U64;
}
impl Integer32 for S32 {
    type Wide = S64;
}
impl HalfPair for F16x2 {
    type Element = F16;
}
impl HalfPair for Bf16x2 {
    type Element = Bf16;
}
