//! The test kit: cases, the backends that run them, and the gates that judge them.

pub mod bound;
mod case;
pub mod conformance;
pub mod expressions;
pub mod gpu;
pub mod guard_pages;
pub mod jobs;
pub mod kv_cache;
pub mod memory;
pub mod mutants;
mod next_launch;
mod numbers;
pub mod operations;
pub mod resources;
pub mod sample;
mod scale_form;
mod shape;
pub mod simulate;
pub mod suites;
pub mod verify;
mod workload;
mod wrong_arrays;

pub use case::{Backend, Case, mask_text, stress_name};
pub use numbers::{BiasForm, Numbers, Planted, attended_by_some_row};
pub use scale_form::ScaleForm;
pub use shape::{ShapeError, parse_mask, parse_shape, parse_workload, shape_text};
pub use workload::Workload;
pub use wrong_arrays::Arrays;
