//! Accuracy: errors of element types, scale modes and options against `f64` on inputs that were not rounded.
//!
//! * [`Sample`] draws inputs in `f32` and has their answer in `f64`; [`Errors`] compares an output with it,
//! * a [`Case`] says which types, scales and options are taken, and who computes: the CPU, a GPU, `f64` on the rounded
//!   inputs, or a [`Model`] of a tensor-core kernel, which adds as the simulator does,
//! * [`needle`] hides a key among many and asks if its value can be read from the output,
//! * [`gates`] hold errors against what the project asks for.
//!
//! For 8-bit floats the number of bits that a tensor core keeps is a parameter of the model; [`H200_FP8_BITS`] are those of
//! an H200.

mod cases;
mod data;
mod errors;
pub mod gates;
pub mod needle;
mod tensor_core;

use serde::{Deserialize, Serialize};

pub use cases::{Case, Choice, Computation, Outcome, Row, Run, cases};
pub use data::{Distribution, Sample, Sizes};
pub use errors::Errors;
pub use gates::GateResult;
pub use tensor_core::{KEY_TILE, Levels, Model, Products};

use super::record::{Content, Kind};

/// Fraction bits that `wgmma` of an H200 keeps when it adds products of 8-bit floats, by its recorded sums.
pub const H200_FP8_BITS: u32 = 13;

/// Everything that a run of `flashcore accuracy` found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccuracyRecord {
    /// The seed of all data.
    pub seed: u64,
    /// Fraction bits of the models of FP8.
    pub fp8_bits: u32,
    /// Errors by case.
    pub rows: Vec<Row>,
    /// Needles found.
    pub needles: Vec<needle::Found>,
    /// Verdicts.
    pub gates: Vec<GateResult>,
}

impl Content for AccuracyRecord {
    const KIND: Kind = Kind::Accuracy;
}
