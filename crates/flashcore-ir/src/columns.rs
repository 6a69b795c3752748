//! The columns of the table of operations, apart from the name and the operands.

use crate::operand::{Operand, Space};
use crate::types::Type;

/// The columns of a row that do not depend on the modifiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The name of the [`Op`](crate::Op) variant.
    pub name: &'static str,
    /// One sentence that defines the result.
    pub summary: &'static str,
    /// The form in the notation of the PTX manual. For readers; the printer writes the text.
    pub form: &'static str,
    /// The anchor of the section in the PTX manual.
    pub manual: &'static str,
}

impl Entry {
    /// The address of the section in the PTX manual.
    pub fn manual_url(&self) -> String {
        format!("https://docs.nvidia.com/cuda/parallel-thread-execution/index.html#{}", self.manual)
    }
}

/// The kind of work of an operation, by which the simulator counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Integer arithmetic, logic, comparisons and moves.
    Integer,
    /// Floating-point arithmetic.
    Float,
    /// Conversions between types.
    Convert,
    /// The special-function unit: exponential, logarithm, reciprocal, roots, hyperbolic tangent.
    SpecialFunction,
    /// Exchange between the lanes of a warp.
    Warp,
    /// Loads, stores and atomics.
    Memory,
    /// Asynchronous copies, their groups and waits: `cp.async`, bulk copies and TMA.
    Asynchronous,
    /// Tensor cores and the loads of their fragments.
    Tensor,
    /// Barriers and fences.
    Barrier,
    /// The end of a thread.
    Control,
}

impl Class {
    /// Every class, in order.
    pub const ALL: [Self; 10] = [
        Self::Integer,
        Self::Float,
        Self::Convert,
        Self::SpecialFunction,
        Self::Warp,
        Self::Memory,
        Self::Asynchronous,
        Self::Tensor,
        Self::Barrier,
        Self::Control,
    ];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Integer => "integer",
            Self::Float => "float",
            Self::Convert => "convert",
            Self::SpecialFunction => "special function",
            Self::Warp => "warp",
            Self::Memory => "memory",
            Self::Asynchronous => "asynchronous",
            Self::Tensor => "tensor",
            Self::Barrier => "barrier",
            Self::Control => "control",
        }
    }
}

/// The memory an operation touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// None.
    None,
    /// Reads the space.
    Read(Space),
    /// Writes the space.
    Write(Space),
    /// Reads and writes the space atomically.
    Atomic(Space),
    /// Reads global and writes shared memory at some time before its group, or its `mbarrier`, is waited for.
    CopyToShared,
    /// Reads shared and writes global memory, through the async proxy, before its group is waited for.
    CopyToGlobal,
    /// Touches none, but orders the accesses of other threads or of this one.
    Order,
}

/// The direction of an operand: read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Written.
    Write,
    /// Read; may be a constant.
    Read,
    /// Read; must be a register.
    ReadRegister,
    /// The base register of an address.
    Base,
}

/// One operand of an operation, with the type that the table demands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Read or written.
    pub role: Role,
    /// The operand's name in the form.
    pub name: &'static str,
    /// The operand.
    pub operand: Operand,
    /// The type it must have.
    pub ty: Type,
}

/// A vector operand whose length is not what the modifiers demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LengthMismatch {
    /// The operand's name in the form.
    pub name: &'static str,
    /// The length it has.
    pub actual: usize,
    /// The length it must have.
    pub expected: usize,
}
