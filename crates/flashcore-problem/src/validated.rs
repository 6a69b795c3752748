//! A call whose tensors have been checked, once, for whatever computes it.

use crate::{InputViews, Invalid, OutputViews, Problem};

/// A problem with inputs and outputs that [validate](InputViews::validate): a backend that takes it checks nothing again.
#[derive(Debug)]
pub struct Validated<'a> {
    problem: &'a Problem,
    inputs: InputViews<'a>,
    outputs: OutputViews<'a>,
}

impl<'a> Validated<'a> {
    /// Checks all of them. An error names everything that is wrong with the problem, or else with the inputs, or else with the
    /// outputs.
    pub fn new(problem: &'a Problem, inputs: InputViews<'a>, outputs: OutputViews<'a>) -> Result<Self, Invalid> {
        inputs.validate(problem)?;
        outputs.validate(problem)?;
        Ok(Self { problem, inputs, outputs })
    }

    /// The problem, the inputs and the outputs.
    pub fn into_parts(self) -> (&'a Problem, InputViews<'a>, OutputViews<'a>) {
        (self.problem, self.inputs, self.outputs)
    }
}
