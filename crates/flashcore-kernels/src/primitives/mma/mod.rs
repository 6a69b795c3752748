//! Tensor-core products: `mma.sync` fragments of a warp, and `wgmma` of a warpgroup.

mod fragment;
mod wgmma;

pub use fragment::{Accumulation, Accumulator, LeftFragments, LeftOperand, RightFragments};
pub use wgmma::{PFragment, WgmmaOperand};
