//! A workload: a problem, and what its inputs are drawn by beside a seed.

use core::ops::Deref;

use flashcore_problem::{Inputs, Mask, Problem, SequenceLengths};

use super::scale_form::ScaleForm;
use super::shape::text;

/// A problem with the form of its scales.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// The problem.
    pub problem: Problem,
    /// Form of the scales of its 8-bit tensors; without it, the seed draws one.
    pub scales: Option<ScaleForm>,
}

impl From<Problem> for Workload {
    fn from(problem: Problem) -> Self {
        Self { problem, scales: None }
    }
}

impl Deref for Workload {
    type Target = Problem;

    fn deref(&self) -> &Problem {
        &self.problem
    }
}

impl Workload {
    /// Random inputs of a seed.
    pub fn inputs(&self, seed: u64) -> Inputs {
        self.inputs_of_lengths(SequenceLengths::Ragged, seed)
    }

    /// Random inputs of a seed, with sequences of lengths by a pattern.
    pub fn inputs_of_lengths(&self, lengths: SequenceLengths, seed: u64) -> Inputs {
        let mut inputs = Inputs::random_sequences(&self.problem, lengths, seed);
        if let Some(form) = self.scales {
            form.draw(&self.problem, &mut inputs, seed);
        }
        inputs
    }

    /// The shape, as [`parse_workload`](super::parse_workload) reads it.
    pub fn shape(&self) -> String {
        text(&self.problem, self.scales)
    }

    /// The same with a mask.
    #[must_use]
    pub fn with_mask(self, mask: Mask) -> Self {
        Self { problem: self.problem.with_mask(mask), ..self }
    }
}
