//! Guard pages: buffers that end, or begin, at a protected page, so that one byte too far is a fault.
//!
//! Guard bands notice what is written outside a buffer. A vector kernel that reads past the end of a row computes the
//! right answer from the right lanes, and no band and no gate ever tells; the next page tells, where there is none.
//!
//! ```text
//!                page boundary           page boundary
//!  inaccessible  |      ........ payload |  inaccessible       Edge::End
//!  inaccessible  | payload ........      |  inaccessible       Edge::Start
//! ```
//!
//! A fault is the end of the process, by the signal that it always was. Before that a line on standard error names the
//! buffer, how far from it the access was, the case and the command that repeats it.
//!
//! On Linux and macOS. Elsewhere the buffers are ordinary memory.

#[cfg(any(target_os = "linux", target_os = "macos"))]
#[expect(unsafe_code, reason = "a signal handler is installed and reads what it is given by address")]
mod fault;
#[cfg(any(target_os = "linux", target_os = "macos"))]
#[expect(unsafe_code, reason = "pages are mapped, protected and unmapped")]
mod pages;
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
#[path = "plain.rs"]
mod pages;
mod tensors;

pub use pages::GuardedBuffer;
pub use tensors::{GuardedInputs, GuardedOutputs};

use std::sync::Arc;

/// Which end of a payload lies at an inaccessible page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edge {
    /// The byte after the last is out of reach.
    End,
    /// The byte before the first is out of reach.
    Start,
}

impl Edge {
    /// The other end.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::End => Self::Start,
            Self::Start => Self::End,
        }
    }
}

/// Names by which a fault is reported.
#[derive(Debug, Clone)]
pub struct Label {
    /// The tensor in the buffer.
    pub tensor: &'static str,
    /// The case, and how to repeat it.
    pub case: Arc<str>,
}
