//! Tensor-core products: `mma.sync` fragments of a warp, and `wgmma` of a warpgroup.

mod fp8;
mod fragment;
mod mma_fp8;
mod tf32;
mod wgmma;

pub use fp8::{
    Fp8Placement, Fp8Target, Fp8Widener, Fp8Widening, LaneColumns, Quads, adjacent_columns, multiply_widened_k_major,
    multiply_widened_mn_major,
};
pub use fragment::{Accumulation, Accumulator, FragmentA, OperandA};
pub use mma_fp8::{E4m3, multiply_e4m3_k_major, multiply_e4m3_mn_major};
pub use tf32::{Tf32Products, ValueWords, multiply_tf32_k_major, multiply_tf32_mn_major};
pub use wgmma::{HalfTypes, WgmmaA, WgmmaFragments, WgmmaOperand, WgmmaTypes};
