//! Verification: seeded inputs, the `f64` oracle, the same-precision reference, and the gate that judges a backend by
//! both.

mod double_double;
mod gate;
mod guard;
mod lengths;
mod limits;
mod oracle;
pub(crate) mod random;
mod reference;
mod rounding_bias;
mod verdict;

pub use gate::{Evidence, judge};
pub use guard::{GuardError, Guarded};
pub use lengths::SequenceLengths;
pub use limits::Limits;
pub use oracle::{Expected, oracle};
pub use random::{SplitMix64, Stress};
pub use reference::{ReferenceError, reference};
pub use verdict::{Element, Failure, Verdict, Worst};
