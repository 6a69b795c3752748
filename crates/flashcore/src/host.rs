//! Operations on the CPU, of tensors in the host's memory.

use flashcore_problem::{
    InputViews, Invalid, OutputViews, Problem, StateMerge, Tensor, TensorView, TensorViewMut, kv_cache_inputs,
    kv_cache_outputs,
};

use crate::{Error, Operation};

/// Bits of an LSE in a row that attention did not write: a NaN that no arithmetic makes.
const UNWRITTEN: u32 = u32::MAX;

/// Computes an operation after everything that it is given was checked.
pub(crate) fn run(operation: &Operation, inputs: &InputViews<'_>, mut outputs: OutputViews<'_>) -> Result<(), Error> {
    match operation {
        Operation::Attention(problem) => Ok(flashcore_cpu::attend(problem, *inputs, outputs)?),
        Operation::Append(problem) => Ok(flashcore_cpu::append(problem, inputs, outputs)?),
        Operation::KvCache(problem) => {
            Ok(flashcore_cpu::kv_cache(problem, &kv_cache_inputs(inputs), kv_cache_outputs(&mut outputs))?)
        }
        Operation::Merge(problem) => Ok(flashcore_cpu::merge(problem, inputs, outputs)?),
        Operation::Continue(problem) => continue_from(problem, inputs, outputs),
    }
}

/// Attends more keys and merges the result into the state that the outputs hold.
fn continue_from(problem: &Problem, inputs: &InputViews<'_>, state: OutputViews<'_>) -> Result<(), Error> {
    let groups = StateMerge::of(problem).map_err(Invalid::from)?;
    state.validate(problem)?;
    let (dtype, shape, strides) = (problem.dtypes().output, problem.output_shape(), problem.strides().output);
    let OutputViews { output, lse: Some(lse), .. } = state else { return Ok(()) };
    let mut part = Tensor::zeros(dtype, strides.extent(shape).unwrap_or(0));
    let mut part_lse = vec![f32::from_bits(UNWRITTEN); lse.len()];
    flashcore_cpu::attend(problem, *inputs, OutputViews::new(&mut part).with_lse(&mut part_lse))?;
    // Rows that were not written are merged as empty ones into a copy, and not taken from it.
    let is_written: Vec<bool> = part_lse.iter().map(|lse| lse.to_bits() != UNWRITTEN).collect();
    for (lse, _) in part_lse.iter_mut().zip(&is_written).filter(|(_, is_written)| !**is_written) {
        *lse = f32::NEG_INFINITY;
    }
    let (mut merged, mut merged_lse) = (output.data.to_vec(), lse.to_vec());
    for group in 0..groups.groups {
        let (first, first_lse) = (group * groups.output_stride * dtype.size_bytes(), group * groups.lse_stride);
        let parts =
            [TensorView { dtype, data: &output.data[first..] }, TensorView { dtype, data: &part.data[first..] }];
        let lses = [(&lse[first_lse..]).into(), (&part_lse[first_lse..]).into()];
        let inputs = InputViews::default().with_part_outputs(&parts).with_part_lses(&lses);
        let merged = TensorViewMut { dtype, data: &mut merged[first..] };
        let outputs = OutputViews::new(merged).with_lse(&mut merged_lse[first_lse..]);
        flashcore_cpu::merge(&groups.merge, &inputs, outputs)?;
    }
    let row_bytes = shape.columns * dtype.size_bytes();
    for (row, _) in is_written.iter().enumerate().filter(|(_, is_written)| **is_written) {
        let (head, in_head) = (row / shape.rows, row % shape.rows);
        let start = strides.row_start(head / shape.heads, head % shape.heads, in_head) * dtype.size_bytes();
        output.data[start..start + row_bytes].copy_from_slice(&merged[start..start + row_bytes]);
        lse[row] = merged_lse[row];
    }
    Ok(())
}
