//! Tensor-core products.

mod fragment;

pub use fragment::{Accumulation, Accumulator, LeftFragments, LeftOperand, RightFragments};
