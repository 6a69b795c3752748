//! Arguments of a launch: the values of a kernel's parameters.

use crate::kernel::ParameterType;
use crate::tensor_map::TensorMap;
use crate::types::Type;

/// The value of a kernel parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 32-bit signed integer.
    S32(i32),
    /// A single-precision float.
    F32(f32),
    /// A 64-bit unsigned integer, or an address.
    U64(u64),
    /// A 64-bit signed integer.
    S64(i64),
    /// A tensor in global memory that TMA copies.
    TensorMap(TensorMap),
}

impl Argument {
    /// The type of the parameter that takes it.
    pub const fn ty(self) -> ParameterType {
        match self {
            Self::U32(_) => ParameterType::Value(Type::U32),
            Self::S32(_) => ParameterType::Value(Type::S32),
            Self::F32(_) => ParameterType::Value(Type::F32),
            Self::U64(_) => ParameterType::Value(Type::U64),
            Self::S64(_) => ParameterType::Value(Type::S64),
            Self::TensorMap(_) => ParameterType::TensorMap,
        }
    }
}
