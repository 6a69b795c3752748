//! Tensor-core products: `mma.sync` fragments of a warp, and `wgmma` of a warpgroup.

mod fragment;
mod tf32;
mod wgmma;
mod wgmma_fp8;

pub use fragment::{Accumulation, Accumulator, LeftFragments, LeftOperand, RightFragments};
pub use tf32::{Tf32Products, Tf32Query, ValueWords, multiply_scores, multiply_values};
pub use wgmma::{PFragment, WgmmaOperand};
pub use wgmma_fp8::Fp8PFragment;
