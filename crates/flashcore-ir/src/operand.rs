//! The operands of operations: registers, constants and addresses.

use core::fmt;
use core::marker::PhantomData;

pub use crate::modifier::*;
use crate::types::{F32, S32, S64, Ty, U32, U64};

/// An untyped register: an index into [`crate::Kernel::registers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegisterId(pub u32);

impl fmt::Display for RegisterId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "%{}", self.0)
    }
}

/// A register of a known type. It is a variable: operations may write it more than once.
#[derive(Debug)]
pub struct Reg<T: Ty> {
    id: RegisterId,
    marker: PhantomData<T>,
}

#[expect(clippy::expl_impl_clone_on_copy, reason = "a derive would demand `T: Clone` of the marker")]
impl<T: Ty> Clone for Reg<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T: Ty> Copy for Reg<T> {}

impl<T: Ty> Reg<T> {
    pub(crate) const fn new(id: RegisterId) -> Self {
        Self { id, marker: PhantomData }
    }

    /// The untyped handle.
    pub const fn id(self) -> RegisterId {
        self.id
    }
}

/// An input of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// The value of a register.
    Register(RegisterId),
    /// A constant, as the bits of the operand's type.
    Constant(u64),
}

impl fmt::Display for Operand {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Register(register) => register.fmt(formatter),
            Self::Constant(bits) => write!(formatter, "{bits:#x}"),
        }
    }
}

/// An input of a known type: a register or a constant.
#[derive(Debug)]
pub struct Value<T: Ty> {
    operand: Operand,
    marker: PhantomData<T>,
}

#[expect(clippy::expl_impl_clone_on_copy, reason = "a derive would demand `T: Clone` of the marker")]
impl<T: Ty> Clone for Value<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T: Ty> Copy for Value<T> {}

impl<T: Ty> Value<T> {
    /// A constant given by its bits.
    pub const fn from_bits(bits: u64) -> Self {
        Self { operand: Operand::Constant(bits), marker: PhantomData }
    }

    /// The untyped operand.
    pub const fn operand(self) -> Operand {
        self.operand
    }
}

impl<T: Ty> From<Reg<T>> for Value<T> {
    fn from(register: Reg<T>) -> Self {
        Self { operand: Operand::Register(register.id), marker: PhantomData }
    }
}

macro_rules! constants {
    ($($rust:ty => $marker:ident: |$value:ident| $bits:expr;)*) => {
        $(impl From<$rust> for Value<$marker> {
            fn from($value: $rust) -> Self {
                Self::from_bits($bits)
            }
        })*
    };
}

constants! {
    u32 => U32: |value| u64::from(value);
    i32 => S32: |value| u64::from(value as u32);
    f32 => F32: |value| u64::from(value.to_bits());
    u64 => U64: |value| value;
    i64 => S64: |value| value as u64;
}

/// A memory address: a register (32 bits for shared memory, 64 for global) plus a constant number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address {
    /// The register that holds the base.
    pub base: RegisterId,
    /// Bytes added to it.
    pub offset: i32,
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.offset {
            0 => write!(formatter, "[{}]", self.base),
            offset => write!(formatter, "[{}{offset:+}]", self.base),
        }
    }
}

/// A shared-memory address: a base register and a constant offset.
#[derive(Debug, Clone, Copy)]
pub struct SharedAddress {
    pub(crate) base: Reg<U32>,
    pub(crate) offset: i32,
}

/// An address in the shared memory of a CTA of the cluster (DSMEM): a base register and a constant offset.
#[derive(Debug, Clone, Copy)]
pub struct ClusterAddress {
    pub(crate) base: Reg<U32>,
    pub(crate) offset: i32,
}

/// A global-memory address: a base register and a constant offset.
#[derive(Debug, Clone, Copy)]
pub struct GlobalAddress {
    pub(crate) base: Reg<U64>,
    pub(crate) offset: i32,
}

impl From<Reg<U32>> for SharedAddress {
    fn from(base: Reg<U32>) -> Self {
        Self { base, offset: 0 }
    }
}

impl From<Reg<U64>> for GlobalAddress {
    fn from(base: Reg<U64>) -> Self {
        Self { base, offset: 0 }
    }
}

impl SharedAddress {
    /// The address `bytes` further on.
    #[must_use]
    pub const fn plus(self, bytes: i32) -> Self {
        Self { base: self.base, offset: self.offset + bytes }
    }
}

impl ClusterAddress {
    /// The address `bytes` further on.
    #[must_use]
    pub const fn plus(self, bytes: i32) -> Self {
        Self { base: self.base, offset: self.offset + bytes }
    }
}

impl GlobalAddress {
    /// The base register.
    pub const fn base(self) -> Reg<U64> {
        self.base
    }

    /// The address `bytes` further on.
    #[must_use]
    pub const fn plus(self, bytes: i32) -> Self {
        Self { base: self.base, offset: self.offset + bytes }
    }
}

/// An address whose memory space is part of its Rust type.
pub trait TypedAddress: Copy {
    /// The space it points into.
    const SPACE: Space;
    /// The untyped address.
    fn address(self) -> Address;
}

impl TypedAddress for SharedAddress {
    const SPACE: Space = Space::Shared;
    fn address(self) -> Address {
        Address { base: self.base.id(), offset: self.offset }
    }
}

impl TypedAddress for ClusterAddress {
    const SPACE: Space = Space::Cluster;
    fn address(self) -> Address {
        Address { base: self.base.id(), offset: self.offset }
    }
}

impl TypedAddress for GlobalAddress {
    const SPACE: Space = Space::Global;
    fn address(self) -> Address {
        Address { base: self.base.id(), offset: self.offset }
    }
}
