//! Merge of partial results on the CPU: a work item is one token.

use crate::driver::output::Disjoint;
use crate::driver::parallel::{LoopSchedule, for_each};
use crate::elements::{round, widen};
use crate::planted::planted;
use flashcore_problem::{InputViews, Invalid, LseBase, MergeProblem, OutputViews, TensorView};

/// Merges partial results of attention, as [`MergeProblem`] defines it, on all threads of rayon's current pool.
///
/// On an error the outputs are as they were.
pub fn merge(problem: &MergeProblem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) -> Result<(), Invalid> {
    problem.validate_views(inputs, &outputs)?;
    let output = Disjoint::new(outputs.output.data);
    let lse = outputs.lse.map(Disjoint::new);
    let bytes = problem.value_dim * problem.dtype.size_bytes();
    let work = |token: usize| {
        let mut row = MergedRow::new(problem);
        for head in 0..problem.heads {
            let merged = row.merge(problem, inputs, token, head);
            let start = problem.strides.output.row_start(0, head, token) * problem.dtype.size_bytes();
            // SAFETY: this item alone has the rows of this token, which overlap no other by validation.
            round(problem.dtype, &row.sums, unsafe { output.part(start, bytes) });
            if let Some(lse) = &lse {
                // SAFETY: as above.
                let row = unsafe { lse.part(problem.strides.lse.row_start(0, head, token), 1) };
                row[0] = merged;
            }
        }
    };
    let multiply_adds = problem.num_parts.saturating_mul(problem.heads).saturating_mul(problem.value_dim);
    for_each(problem.tokens, multiply_adds, LoopSchedule::Guided, work);
    Ok(())
}

/// Memory for one row.
struct MergedRow {
    sums: Vec<f32>,
    part: Vec<f32>,
}

impl MergedRow {
    fn new(problem: &MergeProblem) -> Self {
        Self { sums: vec![0.0; problem.value_dim], part: vec![0.0; problem.value_dim] }
    }

    /// Merges one row into `sums`, and returns its LSE.
    fn merge(&mut self, problem: &MergeProblem, inputs: &InputViews<'_>, token: usize, head: usize) -> f32 {
        let power = |exponent: f32| match problem.base {
            LseBase::Natural => exponent.exp(),
            LseBase::Two => exponent.exp2(),
        };
        let index = problem.strides.part_lse.row_start(0, head, token);
        let start = problem.strides.part.row_start(0, head, token) * problem.part_dtype.size_bytes();
        let bytes = problem.value_dim * problem.part_dtype.size_bytes();
        let lse = |view: TensorView<'_>| {
            let bytes = view.data[index * size_of::<f32>()..].first_chunk().expect("validated");
            f32::from_le_bytes(*bytes)
        };
        let parts = || {
            let parts = inputs.part_lses.iter().map(lse).zip(inputs.part_outputs.iter());
            parts.filter(|(lse, _)| !lse.is_infinite())
        };
        let largest = parts().fold(f32::NEG_INFINITY, |largest, (lse, _)| largest.max(lse));
        // Where all logarithms are NaN, any number does.
        let shift = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
        let mut sum = 0.0;
        self.sums.fill(0.0);
        for (lse, output) in parts().take(planted!(PartsPast64: 64, usize::MAX)) {
            let weight = power(lse - shift);
            sum += weight;
            widen(problem.part_dtype, &output.data[start..][..bytes], &mut self.part);
            self.sums.iter_mut().zip(&self.part).for_each(|(sum, element)| *sum += element * weight);
        }
        if sum == 0.0 {
            return f32::NEG_INFINITY;
        }
        let inverse = 1.0 / sum;
        self.sums.iter_mut().for_each(|sum| *sum *= inverse);
        match problem.base {
            LseBase::Natural => shift + sum.ln(),
            LseBase::Two => shift + sum.log2(),
        }
    }
}
