//! The kernel language of flashcore: a typed, structured IR one step above PTX.
//!
//! A kernel is data: [`Kernel`] holds parameters, registers and a tree of statements, each instruction an [`Op`] of
//! the one [table](operation). [`Builder`] writes it, [`Kernel::verify`] judges it, `flashcore-ptx` prints it and
//! `flashcore-sim` executes it. This crate knows nothing of CUDA, of PTX text or of attention.
#[macro_use]
mod table;

mod argument;
pub mod builder;
mod columns;
mod display;
mod fingerprint;
pub mod forms;
pub mod kernel;
mod modifier;
pub mod operand;
pub mod operation;
pub mod target;
pub mod tensor_map;
pub mod types;
pub mod verify;

pub use argument::Argument;
pub use builder::Builder;
pub use kernel::{
    Block, Guard, If, Instruction, Kernel, Loop, Origin, Parameter, ParameterType, Register, Section, SectionId,
    Statement,
};
pub use operand::*;
pub use operation::{Class, Effect, Entry, LengthMismatch, Op, Role, Slot, TABLE};
pub use target::{Arch, Since, UnknownArch};
pub use tensor_map::{InvalidTensorMap, OutOfBounds, TensorElement, TensorMap};
pub use types::Type;
pub use verify::{VerifiedKernel, VerifyError};
