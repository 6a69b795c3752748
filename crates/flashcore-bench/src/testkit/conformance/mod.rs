//! The conformance suite: does the simulator compute what a GPU computes?
//!
//! A simulator and the kernels tested in it can share one wrong belief. So every operation of the table, in every form
//! that decides a value, is a kernel here ([`cases`]) that is executed by the simulator and by a GPU on the same
//! inputs, special values crossed with each other and random ones. The results are [compared](compare()) bit by bit, or
//! within what PTX promises where it bounds the error only; each case says its [`Tolerance`].
//!
//! * [`conduct`] runs the suite on a device, which is an [`Executor`], and makes a [`Record`];
//! * [`replay`] executes the cases of a record in the simulator and compares it with what the device gave, on machines
//!   without a GPU.
//!
//! ```
//! use flashcore_bench::testkit::conformance::{SimExecutor, cases, check};
//! use flashcore_ir::Arch;
//!
//! // The simulator agrees with itself, whatever the order of its warps.
//! let case = cases().into_iter().find(|case| case.name == "Add f16x2").unwrap();
//! let outcome = check(&case, &SimExecutor { seed: 1, ..SimExecutor::default() }, Arch::Sm90, 0)?;
//! assert!(outcome.comparison.agrees());
//! assert_eq!(outcome.comparison.elements, 2 * 2048);
//! # Ok::<(), flashcore_bench::testkit::conformance::RecordError>(())
//! ```

mod built;
mod case;
mod cases;
mod compare;
mod elementwise;
mod executor;
mod hash;
mod inputs;
mod products;
mod record;
mod sums;
mod writer;

pub use case::{BufferMap, ConformanceCase, Input, Output, Scalar, Tolerance};
pub use cases::cases;
pub use compare::{Comparison, Mismatch, Worst, compare};
pub use executor::{ExecuteError, Executor, Invocation, SimExecutor};
pub use inputs::Fill;
pub use products::Products;
pub use record::{
    CaseOutcome, CaseRecord, Disagreement, Header, OutputRecord, Record, RecordError, Replay, SCHEMA, cases_of, check,
    conduct, replay, replay_while,
};
pub use sums::{SumFit, fit_sums};
