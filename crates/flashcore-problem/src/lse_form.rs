//! Form of the log-sum-exp (LSE): its base, and the sink in it or not.

use crate::Problem;

/// Base of the logarithm of an LSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum LseBase {
    /// Base e: `FlashAttention`, cuDNN, `PyTorch`, and this crate.
    #[default]
    Natural,
    /// Base 2: `FlashInfer`.
    Two,
}

impl LseBase {
    /// Factor from a natural logarithm to one of this base.
    pub const fn per_natural(self) -> f64 {
        match self {
            Self::Natural => 1.0,
            Self::Two => core::f64::consts::LOG2_E,
        }
    }
}

/// Form of the LSE that attention writes. A new one is natural and includes the sink.
///
/// ```
/// # use flashcore_problem as flashcore;
/// use flashcore::{DType, LseBase, LseForm, Problem};
///
/// // The LSE of the keys alone. The output has the sink in its denominator all the same, so the two are no part to merge.
/// let form = LseForm::default().with_base(LseBase::Two).without_sink();
/// let problem = Problem::new(1, 8, 512, 64, DType::Bf16).with_sinks(true).with_lse(true).with_lse_form(form);
/// assert_eq!(problem.validate(), Ok(()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub struct LseForm {
    /// Base of the logarithm.
    pub base: LseBase,
    /// True if the sink counts, as in the denominator of the output; false for the keys alone. The same without sinks.
    pub includes_sink: bool,
}

impl Default for LseForm {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl LseForm {
    /// Natural, with the sink.
    pub const DEFAULT: Self = Self { base: LseBase::Natural, includes_sink: true };

    /// Every form.
    pub const ALL: [Self; 4] = [
        Self::DEFAULT,
        Self { base: LseBase::Two, ..Self::DEFAULT },
        Self::DEFAULT.without_sink(),
        Self { base: LseBase::Two, ..Self::DEFAULT.without_sink() },
    ];

    /// The form in another base.
    #[must_use]
    pub const fn with_base(mut self, base: LseBase) -> Self {
        self.base = base;
        self
    }

    /// The form of the keys alone.
    #[must_use]
    pub const fn without_sink(mut self) -> Self {
        self.includes_sink = false;
        self
    }

    /// The form as far as it matters to a problem: the default without LSE, and with the sink where there is none.
    pub const fn of(problem: &Problem) -> Self {
        match (problem.lse, problem.sinks) {
            (false, _) => Self::DEFAULT,
            (true, false) => Self { includes_sink: true, ..problem.lse_form },
            (true, true) => problem.lse_form,
        }
    }

    /// Names of what differs from the default, for messages and kernel names.
    pub fn features(self) -> impl Iterator<Item = &'static str> {
        let features = [(self.base == LseBase::Two, "lse_base2"), (!self.includes_sink, "lse_without_sink")];
        features.into_iter().filter(|(is_on, _)| *is_on).map(|(_, feature)| feature)
    }
}
