//! Attention kernels, written in tiles on top of `flashcore-ir`.
//!
//! A [`Config`] names a kernel and every choice in it; [`Specialization`] is what a problem fixes at compile time
//! (element type, head dimension, which features are on). The two together give a kernel; everything else about a
//! problem (batch, heads, lengths, strides, scale, pointers) is a run-time parameter, so a growing key cache or a new
//! batch size never compiles anything:
//!
//! ```
//! use flashcore_ir::Arch;
//! use flashcore_kernels::{Config, LaunchPlan};
//! use flashcore_problem::{DType, Problem};
//!
//! let problem = Problem::new(1, 8, 512, 64, DType::F16);
//! let plan = LaunchPlan::new(&problem, Config::ampere(), Arch::Sm89).expect("the kernel fits the problem");
//! assert_eq!(plan.attention().grid, [8, 8, 1]);
//! ```
//!
//! [`primitives`] has what kernels are made of (pipelines, shared-memory tiles, tensor-core products, the online softmax,
//! masks), [`attention`] the kernels: `scalar`, one thread a row, the readable baseline; `ladder`, the steps between it and
//! the fast ones; `sm80`, `cp.async` and `mma` for Ampere and later; `sm90`, warp-specialized with TMA and `wgmma` for
//! Hopper; `split_kv::combine`, which reduces the splits of the others; `block_mask`, which precomputes the blocks that a
//! `mask_mod` leaves.

#[macro_use]
mod operation_parameters;

mod accuracy;
pub mod attention;
mod bindings;
pub mod cache;
pub mod config;
pub mod element;
mod family;
mod grid;
pub mod heuristics;
mod launch_plan;
mod limits;
pub mod merge;
mod parameters;
pub mod primitives;
mod spec;
mod specialization;
mod target;
mod unsupported;

pub use accuracy::{Accuracy, reference_error};
pub use bindings::{LaunchValues, Place, Word};
pub use config::{
    AmpereConfig, Config, HopperConfig, L2Window, LadderConfig, Product, QueryPlace, ScalarConfig, UnknownConfig,
    WarpScheduler,
};
pub use family::KernelTraits;
pub use flashcore_ir::Argument;
pub use launch_plan::{Between, Fill, KernelLaunch, LaunchPlan};
#[doc(hidden)]
pub use limits::LIMITS;
pub use parameters::{Parameters, ScaleParameters};
pub use primitives::{Accumulation, Exponential, Fp8Widening, Rescale, SharedLayout, Tf32Products};
pub use spec::{KernelKey, KernelSpec, Stage};
pub use specialization::Specialization;
pub use target::Target;
pub use unsupported::Reason;
