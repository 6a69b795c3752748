//! Sampling: a large problem is judged by some of its rows, because the oracle's plain loops would take minutes for
//! all.

use flashcore_kernels::Config;
use flashcore_problem::{Alignment, Evidence, Inputs, Layout, Mask, Operand, Outputs, Problem, Tensor, Verdict};

use crate::floor::Work;
use crate::testkit::verify::{NoVerdict, Yardstick};

/// Operations up to which a problem is judged whole.
const WHOLE_FLOPS: f64 = 5e9;
/// Query rows of a sample.
const ROWS: usize = 64;

/// Judges the outputs of a problem: whole if it is small, and else the last rows of the first and of the last head.
///
/// A config is that of a GPU kernel, by whose accuracy it is judged.
///
/// The last rows attend the most keys, all tiles of them. Samples are of tensors that lie contiguously.
pub fn judge_outputs(
    problem: &Problem,
    config: Option<Config>,
    inputs: &Inputs,
    outputs: &Outputs,
) -> Result<Vec<Verdict>, NoVerdict> {
    // What an expression takes out, the oracle still asks about.
    let asked = Work::of(&problem.clone().with_mask_mod(None));
    if asked.flops <= WHOLE_FLOPS || !can_be_sampled(problem) {
        let yardstick = Yardstick::new(problem, inputs.clone())?;
        return Ok(vec![yardstick.judge_kernel(problem, config, &Evidence::new(inputs, outputs))?]);
    }
    [(0, 0), (problem.batch - 1, problem.query_heads - 1)]
        .into_iter()
        .map(|(batch, head)| {
            let sample = Sample::new(problem, batch, head);
            let (inputs, outputs) = (sample.inputs(inputs), sample.outputs(outputs));
            let yardstick = Yardstick::new(&sample.problem, inputs.clone())?;
            Ok(yardstick.judge_kernel(&sample.problem, config, &Evidence::new(&inputs, &outputs))?)
        })
        .collect()
}

/// Judges the outputs of a problem as [`judge_outputs`] does, and gives the worst verdict: one that complains, or else the
/// one with the largest error.
pub fn judge_worst(
    problem: &Problem,
    config: Option<Config>,
    inputs: &Inputs,
    outputs: &Outputs,
) -> Result<Verdict, NoVerdict> {
    let mut verdicts = judge_outputs(problem, config, inputs, outputs)?;
    verdicts.sort_by(|one, other| {
        one.passed().cmp(&other.passed()).then_with(|| other.max_error.total_cmp(&one.max_error))
    });
    Ok(verdicts.swap_remove(0))
}

/// True if the last rows of a head are a problem of their own.
fn can_be_sampled(problem: &Problem) -> bool {
    // Of the operands, only the log-sum-exp and the tables of expressions, which are moved, are the same for a part.
    let is_moved = |operand| matches!(operand, Operand::Lse | Operand::AuxF32 | Operand::AuxI32);
    let plain = !Operand::optional().any(|operand| operand.is_present(problem) && !is_moved(operand));
    let mask = match problem.mask {
        Mask::None | Mask::Causal(Alignment::BottomRight) => true,
        // Aligned at the other corner, the last rows of a square problem attend the same keys.
        Mask::Causal(Alignment::TopLeft) => problem.query_length == problem.key_length,
        Mask::Window { .. } => false,
    };
    problem.layout == Layout::Bhsd && problem.dtypes().are_same() && plain && mask
}

/// The last query rows of one head.
struct Sample<'a> {
    whole: &'a Problem,
    problem: Problem,
    /// The number of the matrix of the query and output, and of the key and value.
    matrices: (usize, usize),
}

impl<'a> Sample<'a> {
    fn new(whole: &'a Problem, batch: usize, head: usize) -> Self {
        let mut problem = whole.clone();
        (problem.batch, problem.query_heads, problem.key_heads) = (1, 1, 1);
        problem.query_length = whole.query_length.min(ROWS);
        if let Mask::Causal(_) = whole.mask {
            problem.mask = Mask::Causal(Alignment::BottomRight);
        }
        let first_row = whole.query_length - problem.query_length;
        problem.score_mod = whole.score_mod.map(|score_mod| score_mod.moved(batch, head, first_row));
        problem.mask_mod = whole.mask_mod.map(|mask_mod| mask_mod.moved(batch, head, first_row));
        let matrices = (batch * whole.query_heads + head, batch * whole.key_heads + whole.key_head(head));
        Self { whole, problem, matrices }
    }

    fn inputs(&self, inputs: &Inputs) -> Inputs {
        let (query, key) = self.matrices;
        Inputs {
            aux_f32: inputs.aux_f32.clone(),
            aux_i32: inputs.aux_i32.clone(),
            ..Inputs::new(
                self.last_rows(&inputs.query, query),
                self.matrix(&inputs.key, key, self.whole.head_dim),
                self.matrix(&inputs.value, key, self.whole.value_dim),
            )
        }
    }

    fn outputs(&self, outputs: &Outputs) -> Outputs {
        let lse = outputs.lse.as_ref().map(|rows| {
            let end = (self.matrices.0 + 1) * self.whole.query_length;
            rows[end - self.problem.query_length..end].to_vec()
        });
        Outputs { output: self.last_rows(&outputs.output, self.matrices.0), lse, ..Outputs::default() }
    }

    fn last_rows(&self, tensor: &Tensor, matrix: usize) -> Tensor {
        let row_bytes = self.whole.head_dim * tensor.dtype.size_bytes();
        let end = (matrix + 1) * self.whole.query_length * row_bytes;
        let start = end - self.problem.query_length * row_bytes;
        Tensor { dtype: tensor.dtype, data: tensor.data[start..end].to_vec() }
    }

    fn matrix(&self, tensor: &Tensor, matrix: usize, columns: usize) -> Tensor {
        let bytes = self.whole.key_length * columns * tensor.dtype.size_bytes();
        Tensor { dtype: tensor.dtype, data: tensor.data[matrix * bytes..(matrix + 1) * bytes].to_vec() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::expressions;
    use flashcore_problem::{DType, reference};

    #[test]
    fn a_sample_notices_what_is_wrong_in_it() {
        let mut problem = Problem::new(2, 4, 600, 64, DType::F16);
        problem.key_heads = 2;
        problem.mask = Mask::Causal(Alignment::BottomRight);
        problem.lse = true;
        expressions::give(&mut problem, expressions::score_mod("relative"), expressions::mask_mod("documents"));
        let inputs = Inputs::random(&problem, 3);
        let outputs = reference(&problem, &inputs).expect("a valid problem");
        let check = |outputs: &Outputs, expected: [bool; 2]| {
            let verdicts = [(0, 0), (1, 3)].map(|(batch, head)| {
                let sample = Sample::new(&problem, batch, head);
                let (inputs, outputs) = (sample.inputs(&inputs), sample.outputs(outputs));
                let yardstick = Yardstick::new(&sample.problem, inputs.clone()).expect("a valid sample");
                yardstick.judge(&sample.problem, &Evidence::new(&inputs, &outputs)).passed()
            });
            assert_eq!(verdicts, expected);
        };
        check(&outputs, [true, true]);
        let mut wrong = outputs.clone();
        let last = wrong.output.len() - 1;
        wrong.output.set(last, 1.0);
        check(&wrong, [true, false]);
        let mut wrong = outputs;
        wrong.lse.as_mut().expect("it was asked for")[599] += 0.1;
        check(&wrong, [false, true]);
    }
}
