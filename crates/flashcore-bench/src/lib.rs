//! The workbench as a library: verify, mutants, resources and measurements.
//!
//! * [`verify`](verify::verify) runs a [`Case`] on a [`Backend`] and judges it, and [`jobs`] does so in several processes,
//! * [`suites`] are lists of cases,
//! * [`guard_pages`] are the memory in which the CPU is verified, where one byte too far is a fault,
//! * [`mutants`] plants bugs in the kernels and shows what kills each,
//! * [`conformance`] compares every operation of the table between the simulator and a GPU,
//! * [`resources`] compiles the kernels for every architecture and gates what they cost,
//! * [`ladder`] walks from one thread a row to the fastest kernel and shows what each step brought,
//! * [`tune`] looks for the fastest config of a problem on a GPU,
//! * [`compare`] holds two things against each other and says which is faster, if that can be said,
//! * [`leaderboard`] keeps the best of each problem, and [`experiments`] what was tried,
//! * [`profile`] says what binds a kernel, and [`report`] puts everything on one page,
//! * [`repro`] packs everything that a stranger needs to repeat a claim,
//! * [`status`] says where the project stands by its records,
//! * [`record`] is the one form of everything that is written down,
//! * [`timing`] measures, [`peak`] knows how fast the processor is, [`floor`] says what no machine can be faster than, and [`roofline`] what no device can,
//! * [`svg`] draws,
//! * [`memory`] says whether a problem fits, and [`printable`] keeps text of files from terminals that obey it,
//! * [`whole_file`] writes files without destroying others, and [`temporary_folder`] makes folders that nobody else has.

mod case;
pub mod compare;
pub mod conformance;
pub mod digest;
pub mod experiments;
pub mod expressions;
pub mod floor;
pub mod gpu;
pub mod guard_pages;
pub mod jobs;
pub mod ladder;
pub mod leaderboard;
pub mod memory;
pub mod moment;
pub mod mutants;
pub mod nearest;
mod numbers;
pub mod peak;
pub mod printable;
pub mod problems;
pub mod profile;
pub mod record;
pub mod report;
pub mod repro;
pub mod resources;
pub mod roofline;
pub mod sample;
mod shape;
pub mod simulate;
pub mod status;
pub mod suites;
pub mod svg;
pub mod temporary_folder;
pub mod timing;
pub mod tune;
pub mod verify;
pub mod whole_file;

pub use case::{Backend, Case, mask_text, stress_name};
pub use numbers::{BiasForm, Numbers, Planted, attended_by_some_row};
pub use shape::{ShapeError, parse_mask, parse_shape, shape_text};
