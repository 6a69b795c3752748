//! The workbench as a library: verify, mutants, resources and measurements.
//!
//! * [`verify`](verify::verify) runs a [`Case`] on a [`Backend`] and judges it,
//! * [`suites`] are lists of cases,
//! * [`mutants`] plants bugs in the kernels and shows what kills each,
//! * [`resources`] compiles the kernels for every architecture and gates what they cost,
//! * [`timing`] measures.

mod case;
pub mod mutants;
pub mod resources;
mod shape;
pub mod simulate;
pub mod suites;
pub mod timing;
pub mod verify;

pub use case::{Backend, Case, mask_text, stress_name};
pub use shape::{ShapeError, parse_mask, parse_shape, shape_text};
