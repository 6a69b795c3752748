//! What the gate says.

use crate::{GuardError, Invalid};
use std::fmt;

/// The gate's judgement of one run of one backend.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Everything that is wrong; empty when the run passed.
    pub failures: Vec<Failure>,
    /// The largest absolute error of an output element.
    pub max_error: f64,
    /// What `max_error` is for the same-precision reference.
    pub reference_max_error: f64,
    /// The Euclidean norm of the errors over that of the expected output.
    pub relative_l2: f64,
    /// The mean of the relative errors with their signs, each element counted by its square: the factor, less 1, by which
    /// the output is too large as a whole.
    pub relative_bias: f64,
    /// The element with the largest error; `None` when there is no element to compare.
    pub worst: Option<Worst>,
}

impl Verdict {
    /// Whether nothing is wrong.
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }
}

/// The place of an output element, or with column 0 of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Element {
    /// Batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query row.
    pub row: usize,
    /// Value column.
    pub column: usize,
}

/// An element, what it should be and what it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worst {
    /// Where.
    pub element: Element,
    /// What the oracle says.
    pub expected: f64,
    /// What the backend says.
    pub actual: f64,
}

impl Worst {
    /// The absolute error.
    pub fn error(&self) -> f64 {
        (self.actual - self.expected).abs()
    }
}

/// One way in which a run is wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The outputs do not have the size or type of the problem.
    #[error("the outputs do not belong to the problem: {0}")]
    WrongOutputs(Invalid),
    /// The expected values are those of another problem.
    #[error(
        "what is expected has {} elements and {} rows; the output of the problem has {} and {}: ask the oracle about it",
        actual[0], actual[1], needed[0], needed[1]
    )]
    WrongExpected {
        /// Elements and rows that are expected.
        actual: [usize; 2],
        /// Those of the problem.
        needed: [usize; 2],
    },
    /// Output elements still hold the poison.
    #[error("{count} output elements were never written, the first at {first}")]
    Unwritten {
        /// How many.
        count: usize,
        /// The first of them.
        first: Element,
    },
    /// Log-sum-exp rows still hold the poison.
    #[error("{count} rows of the log-sum-exp were never written, the first at {first}")]
    LseUnwritten {
        /// How many.
        count: usize,
        /// The first of them.
        first: Element,
    },
    /// Storage between the elements of a strided output no longer holds the poison.
    #[error(
        "{count} places between the output's rows were overwritten, the first at index {first_index} of its storage"
    )]
    GapWritten {
        /// How many.
        count: usize,
        /// The first of them, in elements from the beginning of the output.
        first_index: usize,
    },
    /// NaN or infinite where the oracle is not, or the other way round.
    #[error(
        "{count} output elements are finite where they should not be or not finite where they should, the first at {first}"
    )]
    NotFinite {
        /// How many.
        count: usize,
        /// The first of them.
        first: Worst,
    },
    /// A row that attends no key is not exactly zero.
    #[error("{count} elements of rows that attend nothing are not zero, the first at {first}")]
    EmptyRowNotZero {
        /// How many.
        count: usize,
        /// The first of them.
        first: Worst,
    },
    /// One element is too far off.
    #[error("largest error {:.3e} is above {limit:.3e}, at {worst}", worst.error())]
    MaxError {
        /// The worst element.
        worst: Worst,
        /// What is allowed.
        limit: f64,
    },
    /// All elements together are too far off.
    #[error("relative L2 error {relative_l2:.3e} is above {limit:.3e}")]
    RelativeL2 {
        /// The relative error.
        relative_l2: f64,
        /// What is allowed.
        limit: f64,
    },
    /// All elements together are too large or too small, by more than errors of rounding to nearest add up to.
    #[error(
        "the output is {:.3e} of itself too {} on average, above {limit:.3e}: are weights or outputs cut instead of rounded?",
        relative_bias.abs(),
        if *relative_bias < 0.0 { "small" } else { "large" }
    )]
    Biased {
        /// The relative bias.
        relative_bias: f64,
        /// What is allowed.
        limit: f64,
    },
    /// A log-sum-exp is too far off, or not finite where it should be, or the other way round.
    #[error("log-sum-exp error {:.3e} is above {limit:.3e}, at {worst}", worst.error())]
    Lse {
        /// The worst row.
        worst: Worst,
        /// What is allowed.
        limit: f64,
    },
    /// The backend wrote to something it should only read.
    #[error("the backend changed its input {tensor}")]
    InputChanged {
        /// The tensor.
        tensor: &'static str,
    },
    /// The backend wrote outside a buffer.
    #[error("{buffer}: {error}")]
    Guard {
        /// The buffer.
        buffer: String,
        /// What was found.
        error: GuardError,
    },
    /// Another run on the same inputs gave other bits.
    #[error("run {run} gave other bits than run 0, first at byte {byte} of {tensor}")]
    NotRepeatable {
        /// The run that differs, counted from 1.
        run: usize,
        /// The output that differs.
        tensor: &'static str,
        /// The first byte that differs.
        byte: usize,
    },
}

impl fmt::Display for Element {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, head, row, column } = self;
        write!(formatter, "(batch {batch}, head {head}, row {row}, column {column})")
    }
}

impl fmt::Display for Worst {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: expected {:.6e}, got {:.6e}", self.element, self.expected, self.actual)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{}: max error {:.3e} (reference {:.3e}), relative L2 {:.3e}",
            if self.passed() { "passed" } else { "failed" },
            self.max_error,
            self.reference_max_error,
            self.relative_l2
        )?;
        self.failures.iter().try_for_each(|failure| write!(formatter, "\n  {failure}"))
    }
}
