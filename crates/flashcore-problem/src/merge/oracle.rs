//! Oracle of a merge, in `f64`, and random parts.

use super::{LseBase, MergeProblem};
use crate::{DType, InputViews, Inputs, Invalid, Outputs, SplitMix64, Tensor, TensorView};

/// Roundings of `f32` in one term and in what all terms share, beyond one for each part: the approximate power and
/// logarithm, the quotient.
const ROUNDINGS: f64 = 16.0;
/// Roundings of one weight for each 1 that its logarithm lies below the largest: a rounding of the exponent is an error of
/// the weight that is as much larger as the exponent is.
const ROUNDINGS_PER_EXPONENT: f64 = 3.0;

/// The right answer to a merge.
#[derive(Clone, Debug, PartialEq)]
pub struct MergeExpected {
    /// Output, `[token, head, column]`, with the roundings of `f32` that it may be off by.
    output: Vec<(f64, f64)>,
    /// LSE, `[token, head]`.
    lse: Vec<f64>,
}

/// Merges in `f64`.
///
/// # Panics
///
/// When the tensors do not belong to the problem; see [`MergeProblem::validate_views`].
pub fn merge_oracle(problem: &MergeProblem, inputs: &InputViews<'_>) -> Result<MergeExpected, Invalid> {
    problem.validate()?;
    let mut expected = MergeExpected { output: Vec::new(), lse: Vec::new() };
    for token in 0..problem.tokens {
        for head in 0..problem.heads {
            merge_row(problem, inputs, token, head, &mut expected);
        }
    }
    Ok(expected)
}

fn merge_row(problem: &MergeProblem, inputs: &InputViews<'_>, token: usize, head: usize, expected: &mut MergeExpected) {
    let base = match problem.base {
        LseBase::Natural => core::f64::consts::E,
        LseBase::Two => 2.0,
    };
    let lse_start = problem.strides.part_lse.row_start(0, head, token);
    let start = problem.strides.part.row_start(0, head, token);
    let lse = |view: TensorView<'_>| DType::F32.decode(&view.data[lse_start * 4..]);
    let counted: Vec<(f64, TensorView<'_>)> = inputs
        .part_lses
        .iter()
        .map(lse)
        .zip(inputs.part_outputs.iter())
        .filter(|(lse, _)| !lse.is_infinite())
        .collect();
    let largest = counted.iter().fold(f64::NEG_INFINITY, |largest, (lse, _)| largest.max(*lse));
    let sum: f64 = counted.iter().map(|(lse, _)| base.powf(lse - largest)).sum();
    let is_nan = counted.iter().any(|(lse, _)| lse.is_nan());
    let lse = if counted.is_empty() { f64::NEG_INFINITY } else { largest + sum.log(base) };
    expected.lse.push(if is_nan { f64::NAN } else { lse });
    for column in 0..problem.value_dim {
        let (mut value, mut error) = (0.0, 0.0);
        for (lse, output) in &counted {
            let element = output.dtype.decode(&output.data[(start + column) * output.dtype.size_bytes()..]);
            let term = base.powf(lse - largest) / sum * element;
            value += term;
            let exponent = (largest - lse) * base.log2();
            error += term.abs() * (ROUNDINGS + problem.num_parts as f64 + ROUNDINGS_PER_EXPONENT * exponent);
        }
        expected.output.push(if is_nan { (f64::NAN, 0.0) } else { (value, error) });
    }
}

impl MergeExpected {
    /// Nothing, or the first thing that is wrong with the outputs, which were poisoned before.
    pub fn check(&self, problem: &MergeProblem, outputs: &Outputs) -> Result<(), String> {
        let output = &outputs.output;
        let mut written = vec![false; output.len()];
        let mut next = self.output.iter();
        for (token, head) in rows(problem) {
            let start = problem.strides.output.row_start(0, head, token);
            written[start..][..problem.value_dim].fill(true);
            for index in start..start + problem.value_dim {
                let &(value, roundings) = next.next().ok_or("the outputs are those of another problem")?;
                let found = output.get(index);
                let error = roundings * DType::F32.unit_roundoff() + f64::from(f32::MIN_POSITIVE);
                let round = |value| problem.dtype.round(value);
                let right = if value.is_nan() || found.is_nan() {
                    value.is_nan() && found.is_nan() && !output.is_poisoned(index)
                } else {
                    found == round(value) || round(value - error) <= found && found <= round(value + error)
                };
                if !right {
                    return Err(format!("output of token {token}, head {head} is {found}; it must be {value}"));
                }
            }
        }
        if let Some(index) = (0..output.len()).find(|&index| !written[index] && !output.is_poisoned(index)) {
            return Err(format!("element {index} between the rows of the output was written"));
        }
        outputs.lse.as_ref().map_or(Ok(()), |lse| self.check_lse(problem, lse))
    }

    fn check_lse(&self, problem: &MergeProblem, found: &[f32]) -> Result<(), String> {
        let mut written = vec![false; found.len()];
        for ((token, head), &right) in rows(problem).zip(&self.lse) {
            let index = problem.strides.lse.row_start(0, head, token);
            written[index] = true;
            let value = f64::from(found[index]);
            let error = DType::F32.unit_roundoff() * (4.0 * right.abs() + 16.0 + problem.num_parts as f64);
            let is_right =
                if right.is_nan() { value.is_nan() } else { value == right || (value - right).abs() <= error };
            if !is_right || is_poison(found[index]) {
                return Err(format!("lse of token {token}, head {head} is {value}; it must be {right}"));
            }
        }
        let touched = (0..found.len()).find(|&index| !written[index] && !is_poison(found[index]));
        touched.map_or(Ok(()), |index| Err(format!("element {index} between the rows of lse was written")))
    }
}

fn is_poison(value: f32) -> bool {
    u64::from(value.to_bits()) == DType::F32.poison()
}

/// Each token with each head.
fn rows(problem: &MergeProblem) -> impl Iterator<Item = (usize, usize)> {
    let heads = problem.heads;
    (0..problem.tokens).flat_map(move |token| (0..heads).map(move |head| (token, head)))
}

impl MergeProblem {
    /// Random parts. A third of them is empty, with an LSE of minus or plus infinity and poison for an output; some rows
    /// have nothing but empty parts. Gaps between rows are poisoned. Some logarithms are far apart.
    pub fn random(&self, seed: u64) -> Inputs {
        let mut random = SplitMix64::new(seed);
        let (strides, parts) = (self.strides, self.num_parts);
        let output = Tensor::poisoned(self.part_dtype, strides.part.extent(self.shape()).unwrap_or(0));
        let lse = Tensor::poisoned(DType::F32, strides.part_lse.extent(self.lse_shape()).unwrap_or(0));
        let (mut outputs, mut lses) = (vec![output; parts], vec![lse; parts]);
        for (token, head) in rows(self) {
            let all_empty = random.below(8) == 0;
            let level = [0.0, 10.0, -300.0, 5000.0][random.below(4)];
            for (output, lse) in outputs.iter_mut().zip(&mut lses) {
                let index = strides.part_lse.row_start(0, head, token);
                if all_empty || random.below(3) == 0 {
                    lse.set(index, if random.below(2) == 0 { f64::NEG_INFINITY } else { f64::INFINITY });
                    continue;
                }
                let spread = if random.below(8) == 0 { 200.0 } else { 3.0 };
                lse.set(index, level + spread * random.normal());
                let start = strides.part.row_start(0, head, token);
                (start..start + self.value_dim).for_each(|index| output.set(index, random.normal()));
            }
        }
        Inputs { part_outputs: outputs, part_lses: lses, ..Inputs::default() }
    }

    /// Outputs full of poison.
    pub fn poisoned(&self) -> Outputs {
        Outputs::poisoned_rows(Self::OPERANDS, self)
    }
}
