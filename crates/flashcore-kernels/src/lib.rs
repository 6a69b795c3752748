//! Attention kernels, written in tiles on top of `flashcore-ir`.
//!
//! A [`Config`] names a kernel and every choice in it; [`Specialization`] is what a problem fixes at compile time
//! (element type, head dimension, which features are on). The two together give a kernel; everything else about a
//! problem (batch, heads, lengths, strides, scale, pointers) is a run-time parameter, so a growing key cache or a new
//! batch size never compiles anything:
//!
//! ```
//! use flashcore_ir::Arch;
//! use flashcore_kernels::{Config, Plan};
//! use flashcore_problem::{DType, Problem};
//!
//! let problem = Problem::new(1, 8, 512, 64, DType::F16);
//! let plan = Plan::new(&problem, Config::ampere(), Arch::Sm89).expect("the kernel fits the problem");
//! assert_eq!(plan.grid, [8, 8, 1]);
//! ```
//!
//! [`tile`] is the vocabulary, [`attention`] the kernels: `scalar`, one thread a row, the readable baseline; `steps`,
//! what came between it and the fast ones; `ampere`, tensor cores from end to end; `combine`, which adds up what others
//! have for parts of the keys; and `hopper`, where copies and products run by themselves beside the softmax.

mod ampere_config;
pub mod attention;
mod config;
mod element;
mod hopper_config;
mod ladder_config;
mod name;
mod neighbours;
mod parameters;
mod plan;
mod specialization;
mod tensor_maps;
pub mod tile;
mod tuned;
mod tuned_hopper;

pub use config::{AmpereConfig, Config, L2Window, QueryPlace, ScalarConfig};
pub use hopper_config::{HopperConfig, WarpScheduler};
pub use ladder_config::{LadderConfig, Product};
pub use name::UnknownConfig;
pub use parameters::{Argument, Buffers, Parameters};
pub use plan::{Plan, Reason, SideKernel};
pub use specialization::Specialization;
pub use tile::{Accumulation, Exponential, Rescale, SharedLayout};
