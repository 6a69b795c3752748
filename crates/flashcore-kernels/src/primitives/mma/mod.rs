//! Tensor-core products: `mma.sync` fragments of a warp, and `wgmma` of a warpgroup.

mod fp8;
mod fragment;
mod mma_fp8;
mod tf32;
mod wgmma;

pub use fp8::{
    Fp8Placement, Fp8Query, Fp8Target, Fp8Widener, Fp8Widening, LaneColumns, adjacent_columns, multiply_fp8_keys,
    multiply_fp8_values,
};
pub use fragment::{Accumulation, Accumulator, LeftFragments, LeftOperand, RightFragments};
pub use mma_fp8::{E4m3Query, E4m3Weights, multiply_e4m3_query, multiply_e4m3_weights};
pub use tf32::{Tf32Products, Tf32Query, ValueWords, multiply_scores, multiply_values};
pub use wgmma::{HalfTypes, WgmmaA, WgmmaFragments, WgmmaOperand, WgmmaTypes};
