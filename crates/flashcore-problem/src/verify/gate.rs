//! The gate: judges the outputs of every backend.

use super::reference::ErrorNorms;
use crate::{
    DType, Element, Expected, Failure, GuardError, Inputs, Limits, Operand, Outputs, Problem, ReferenceError, Shape,
    Strides, Tensor, Verdict, Worst,
};

/// The evidence of a run: the state of its buffers.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// The inputs that were given to the backend.
    pub inputs: &'a Inputs,
    /// The inputs as they were after the run.
    pub inputs_after: &'a Inputs,
    /// The outputs, [poisoned](Outputs::poisoned) before the run.
    pub outputs: &'a Outputs,
    /// The outputs of further runs on the same inputs, poisoned before each.
    pub repeats: &'a [Outputs],
    /// The state of guard bands after the run, with the name of the buffer they surround.
    pub guards: &'a [(String, Result<(), GuardError>)],
}

impl<'a> Evidence<'a> {
    /// One run of a backend that could not have written to its inputs, without guard bands.
    pub fn new(inputs: &'a Inputs, outputs: &'a Outputs) -> Self {
        Self { inputs, inputs_after: inputs, outputs, repeats: &[], guards: &[] }
    }
}

/// Judges one run of a backend.
///
/// A run passes when all of this holds:
///
/// * every element of the output, and of the log-sum-exp where it is wanted, was written, and nothing else was: not the
///   inputs, not the guard bands, not the storage between the output's rows;
/// * the output is finite exactly where the oracle is, and exactly zero in rows that attend nothing;
/// * the largest error, the relative L2 error, the relative bias and the error of the log-sum-exp are within [`Limits`];
/// * every repeated run gave the same bits.
///
/// Returns all failures, not only the first.
pub fn judge(problem: &Problem, expected: &Expected, reference: &ReferenceError, evidence: &Evidence<'_>) -> Verdict {
    let mut verdict = Verdict {
        failures: Vec::new(),
        max_error: f64::NAN,
        reference_max_error: reference.max_error,
        relative_l2: f64::NAN,
        relative_bias: f64::NAN,
        worst: None,
    };
    if let Err(invalid) = evidence.outputs.validate(problem) {
        verdict.failures.push(Failure::WrongOutputs(invalid));
        return verdict;
    }
    let needed = problem.output_shape().elements().unwrap_or(usize::MAX);
    let rows = needed.checked_div(problem.value_dim).unwrap_or(0);
    let [actual, needed] = [[expected.output.len(), expected.lse.len()], [needed, rows]];
    if actual != needed {
        verdict.failures.push(Failure::WrongExpected { actual, needed });
        return verdict;
    }
    let limits = Limits::new(problem, expected, reference);
    let (shape, strides) = (problem.output_shape(), problem.strides().output);
    let output = &evidence.outputs.output;
    let actual = output.dense(shape, strides);

    let untouched = &expected.untouched;
    verdict.failures.extend(unwritten(output, shape, strides, untouched));
    verdict.failures.extend(touched(output, shape, strides, untouched));
    verdict.failures.extend(gap_written(output, shape, strides));
    verdict.failures.extend(not_finite(shape, &actual, &expected.output));
    verdict.failures.extend(empty_row_not_zero(shape, &actual, &expected.output));

    let errors = ErrorNorms::measure(&actual, &expected.output);
    verdict.max_error = errors.max_error;
    verdict.relative_l2 = errors.relative_l2;
    verdict.relative_bias = errors.relative_bias;
    verdict.worst = errors.worst.map(|index| worst_at(shape, index, &actual, &expected.output));
    if let Some(worst) = verdict.worst.filter(|worst| worst.error() > limits.max_error) {
        verdict.failures.push(Failure::MaxError { worst, limit: limits.max_error });
    }
    if errors.relative_l2 > limits.relative_l2 {
        verdict.failures.push(Failure::RelativeL2 { relative_l2: errors.relative_l2, limit: limits.relative_l2 });
    }
    if errors.relative_bias.abs() > limits.relative_bias {
        let (relative_bias, limit) = (errors.relative_bias, limits.relative_bias);
        verdict.failures.push(Failure::Biased { relative_bias, limit });
    }
    if let Some(lse) = &evidence.outputs.lse {
        verdict.failures.extend(lse_failures(shape, lse, expected, limits.lse));
    }

    verdict.failures.extend(changed_inputs(evidence.inputs, evidence.inputs_after));
    for (buffer, state) in evidence.guards {
        verdict.failures.extend(state.err().map(|error| Failure::Guard { buffer: buffer.clone(), error }));
    }
    verdict.failures.extend(evidence.repeats.iter().enumerate().filter_map(|(index, repeat)| {
        let (tensor, byte) = first_difference(evidence.outputs, repeat)?;
        Some(Failure::NotRepeatable { run: index + 1, tensor, byte })
    }));
    verdict
}

/// The element at `index` of a contiguous `[batch, head, row, column]` tensor.
fn element_at(shape: Shape, index: usize) -> Element {
    let (rest, column) = (index / shape.columns, index % shape.columns);
    let (rest, row) = (rest / shape.rows, rest % shape.rows);
    Element { batch: rest / shape.heads, head: rest % shape.heads, row, column }
}

fn worst_at(shape: Shape, index: usize, actual: &[f64], expected: &[f64]) -> Worst {
    Worst { element: element_at(shape, index), expected: expected[index], actual: actual[index] }
}

/// True for a row that belongs to no sequence, by its index among all rows.
fn is_untouched(untouched: &[bool], row: usize) -> bool {
    untouched.get(row).copied().unwrap_or(false)
}

/// Rows that belong to no sequence hold the poison still.
fn touched(output: &Tensor, shape: Shape, strides: Strides, untouched: &[bool]) -> Option<Failure> {
    let rows = shape.each_row().enumerate().filter(|&(index, _)| is_untouched(untouched, index));
    let elements = rows.flat_map(|(_, (batch, head, row))| {
        let start = strides.row_start(batch, head, row);
        start..start + shape.columns
    });
    let mut written = elements.filter(|&index| !output.is_poisoned(index));
    let first_index = written.next()?;
    Some(Failure::GapWritten { count: 1 + written.count(), first_index })
}

fn unwritten(output: &Tensor, shape: Shape, strides: Strides, untouched: &[bool]) -> Option<Failure> {
    let rows = shape.each_row().enumerate().filter(|&(index, _)| !is_untouched(untouched, index));
    let elements = rows.flat_map(|(_, (batch, head, row))| {
        let start = strides.row_start(batch, head, row);
        (0..shape.columns).map(move |column| (start + column, Element { batch, head, row, column }))
    });
    let mut poisoned = elements.filter(|&(index, _)| output.is_poisoned(index)).map(|(_, element)| element);
    let first = poisoned.next()?;
    Some(Failure::Unwritten { count: 1 + poisoned.count(), first })
}

fn gap_written(output: &Tensor, shape: Shape, strides: Strides) -> Option<Failure> {
    let mut is_gap = vec![true; output.len()];
    for (batch, head, row) in shape.each_row() {
        let start = strides.row_start(batch, head, row);
        is_gap[start..start + shape.columns].fill(false);
    }
    let mut written = (0..output.len()).filter(|&index| is_gap[index] && !output.is_poisoned(index));
    let first_index = written.next()?;
    Some(Failure::GapWritten { count: 1 + written.count(), first_index })
}

fn not_finite(shape: Shape, actual: &[f64], expected: &[f64]) -> Option<Failure> {
    let agrees = |actual: f64, expected: f64| {
        (actual.is_finite() && expected.is_finite()) || (actual.is_nan() && expected.is_nan()) || actual == expected
    };
    let mut wrong = (0..actual.len()).filter(|&index| !agrees(actual[index], expected[index]));
    let first = worst_at(shape, wrong.next()?, actual, expected);
    Some(Failure::NotFinite { count: 1 + wrong.count(), first })
}

/// A row of exact zeros is one that attends nothing, or whose values are all zero; both give exact zeros in any
/// precision.
fn empty_row_not_zero(shape: Shape, actual: &[f64], expected: &[f64]) -> Option<Failure> {
    let empty_rows = (0..expected.len())
        .step_by(shape.columns)
        .filter(|&start| expected[start..start + shape.columns].iter().all(|&value| value == 0.0));
    let mut wrong = empty_rows
        .flat_map(|start| start..start + shape.columns)
        .filter(|&index| actual[index].is_finite() && actual[index] != 0.0);
    let first = worst_at(shape, wrong.next()?, actual, expected);
    Some(Failure::EmptyRowNotZero { count: 1 + wrong.count(), first })
}

fn lse_failures(shape: Shape, actual: &[f32], expected: &Expected, limit: f64) -> Vec<Failure> {
    let rows = Shape { columns: 1, ..shape };
    let poison = DType::F32.poison() as u32;
    let (untouched, expected) = (&expected.untouched, &expected.lse);
    let is_poisoned = |index: usize| actual[index].to_bits() == poison;
    let wrong = |index: &usize| is_poisoned(*index) != is_untouched(untouched, *index);
    let (unwritten, written): (Vec<usize>, Vec<usize>) =
        (0..actual.len()).filter(wrong).partition(|&index| is_poisoned(index));
    let mut failures = Vec::new();
    if let Some(&first_index) = written.first() {
        failures.push(Failure::GapWritten { count: written.len(), first_index });
    }
    if let Some(&first) = unwritten.first() {
        let first = element_at(rows, first);
        failures.push(Failure::LseUnwritten { count: unwritten.len(), first });
    }
    // Written so that a NaN against a number counts as infinitely wrong.
    let error = |index: usize| {
        let (actual, expected) = (f64::from(actual[index]), expected[index]);
        match actual == expected || (actual.is_nan() && expected.is_nan()) {
            true => 0.0,
            false if actual.is_finite() && expected.is_finite() => (actual - expected).abs(),
            false => f64::INFINITY,
        }
    };
    let worst = (0..actual.len()).max_by(|&left, &right| error(left).total_cmp(&error(right)));
    if let Some(index) = worst.filter(|&index| error(index) > limit) {
        let (actual, expected) = (f64::from(actual[index]), expected[index]);
        failures.push(Failure::Lse { worst: Worst { element: element_at(rows, index), expected, actual }, limit });
    }
    failures
}

fn changed_inputs(before: &Inputs, after: &Inputs) -> Vec<Failure> {
    let (before, after) = (before.views(), after.views());
    let changed = Operand::inputs().filter(|&operand| before.bytes(operand) != after.bytes(operand));
    changed.map(|operand| Failure::InputChanged { tensor: operand.name() }).collect()
}

/// The first byte in which two outputs differ.
fn first_difference(first: &Outputs, second: &Outputs) -> Option<(&'static str, usize)> {
    let bytes =
        |outputs: &Outputs| -> Vec<u8> { outputs.lse.iter().flatten().flat_map(|value| value.to_le_bytes()).collect() };
    let differs = |left: &[u8], right: &[u8]| {
        let common = left.len().min(right.len());
        (0..common).find(|&index| left[index] != right[index]).or((left.len() != right.len()).then_some(common))
    };
    differs(&first.output.data, &second.output.data)
        .map(|byte| ("output", byte))
        .or_else(|| differs(&bytes(first), &bytes(second)).map(|byte| ("lse", byte)))
}
