//! Continuation on a GPU: attention into a workspace, and a merge of that into the given output and LSE.

use flashcore_cuda::{CudaError, Stream, Workspace, fill_device};
use flashcore_kernels::merge::{MergePlan as KernelPlan, MergeValues, UNWRITTEN};
use flashcore_problem::{MergeProblem, Operand, Outputs, Problem, ProblemError, StateMerge, merge_oracle};
use zerocopy::IntoBytes;

use super::merge::{SEED, trial};
use super::operation::{Operation, Uploads};
use super::{DeviceTensors, Executor, Gpu, TENSOR_ALIGNMENT};
use crate::Reason;

/// Everything of a continuation but the attention kernels.
#[derive(Clone)]
pub(crate) struct GpuContinue {
    operation: Operation,
    plan: KernelPlan,
    workspace: Workspace,
    /// Offset of the output of the new keys in the workspace.
    output_offset: u64,
    /// Offset of their LSE, and its bytes.
    lse_offset: u64,
    lse_bytes: usize,
    /// True if attention may leave rows as they are.
    has_unwritten_rows: bool,
}

impl GpuContinue {
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace.bytes()
    }

    /// Puts everything on a stream. Allocates nothing but a workspace where the stream has none as large.
    ///
    /// # Safety
    ///
    /// See [`ContinuePlan::launch`](crate::ContinuePlan::launch); the executor is that of its problem.
    pub(crate) unsafe fn launch(
        &self,
        executor: &Executor,
        state: &StateMerge,
        stream: &Stream,
        tensors: &DeviceTensors,
    ) -> Result<(), CudaError> {
        let launch_in = |workspace: u64| {
            let part = DeviceTensors {
                output: workspace + self.output_offset,
                lse: workspace + self.lse_offset,
                workspace: if executor.workspace_bytes() > 0 { workspace } else { 0 },
                ..*tensors
            };
            if self.has_unwritten_rows {
                // SAFETY: the workspace has these bytes, and nobody else uses it.
                unsafe { fill_device(stream, part.lse, self.lse_bytes, UNWRITTEN as u8) }?;
            }
            // SAFETY: the contract of this function; output and LSE lie in the workspace.
            unsafe { executor.launch(stream, &part) }?;
            (0..state.groups as u64).try_for_each(|group| {
                let words = group_values(state, tensors, &part, group).words();
                // SAFETY: as above; the lanes of a row read both parts before they store.
                unsafe { self.operation.launch(stream, self.plan.grid(state.merge.tokens), &words) }
            })
        };
        match tensors.workspace {
            0 => self.workspace.with(stream, launch_in),
            workspace => launch_in(workspace),
        }
    }
}

/// The words of the merge of one group: the first part is the state, the second what attention gave.
fn group_values(state: &StateMerge, given: &DeviceTensors, part: &DeviceTensors, group: u64) -> MergeValues {
    let output = given.output + group * (state.output_stride * state.merge.dtype.size_bytes()) as u64;
    let lse = given.lse + group * (state.lse_stride * size_of::<f32>()) as u64;
    MergeValues {
        part: output,
        part_lse: lse,
        part_stride: part.output.wrapping_sub(given.output),
        part_lse_stride: part.lse.wrapping_sub(given.lse),
        output,
        lse,
        tokens: state.merge.tokens as u64,
    }
}

impl Gpu {
    /// The continuation of a problem whose attention needs so many bytes of workspace, or every reason against it.
    pub(crate) fn continuation(
        &self,
        problem: &Problem,
        state: &StateMerge,
        attention_bytes: usize,
    ) -> Result<GpuContinue, Vec<Reason>> {
        let reasons =
            |reasons: Vec<flashcore_kernels::Reason>| reasons.into_iter().map(Reason::from).collect::<Vec<_>>();
        let plan = KernelPlan::in_place(&state.merge, self.target).map_err(reasons)?;
        let element = problem.dtype.size_bytes();
        let [multiple, _] = plan.alignments();
        if state.groups > 1 && !((state.output_stride * element) as u64).is_multiple_of(multiple) {
            return Err(vec![Reason::Problem(ProblemError::OutOfRange {
                argument: "the batch stride of output",
                value: state.output_stride.to_string(),
                allowed: format!("a multiple of {} to continue", multiple as usize / element),
            })]);
        }
        let operation = self.operation(plan.key, &plan.template, || self.try_in_place(&state.merge))?;
        let aligned = |bytes: usize| bytes.next_multiple_of(TENSOR_ALIGNMENT as usize);
        let output_bytes = problem.strides().output.extent(problem.output_shape()).unwrap_or(0) * element;
        let lse_bytes = Operand::Lse.elements(problem).unwrap_or(0) * size_of::<f32>();
        let output_offset = aligned(attention_bytes);
        let lse_offset = aligned(output_offset + output_bytes);
        Ok(GpuContinue {
            operation,
            plan,
            workspace: self.workspaces.of_plan(lse_offset + lse_bytes),
            output_offset: output_offset as u64,
            lse_offset: lse_offset as u64,
            lse_bytes,
            has_unwritten_rows: problem.total_q.is_some() || problem.seqused_q,
        })
    }

    /// Merges small parts in place. Gives what is wrong with the result, if anything is.
    fn try_in_place(&self, problem: &MergeProblem) -> Result<Option<String>, CudaError> {
        let mut small = trial(problem);
        (small.strides.output, small.strides.lse) = (small.strides.part, small.strides.part_lse);
        let Ok(plan) = KernelPlan::in_place(&small, self.target) else {
            return Ok(Some("the trial is no problem of this kernel".to_owned()));
        };
        let (kernel, _) = self.load(plan.key)?;
        let operation = Operation::new(kernel, &plan.template, self.stream.clone())?;
        let mut data = small.random(SEED);
        // A row that was not written counts as an empty one.
        data.part_lses[1].set(1, f64::NEG_INFINITY);
        let [mut output, part] = [data.part_outputs[0].clone(), data.part_outputs[1].clone()];
        let [mut lse, mut part_lse] = [0, 1].map(|part| data.part_lses[part].to_elements::<f32>());
        part_lse[1] = f32::from_bits(UNWRITTEN);
        let mut uploads = Uploads::new(&self.stream);
        let [given, part] = [uploads.add(&output.data)?, uploads.add(&part.data)?];
        let [given_lse, part_lse] = [uploads.add(lse.as_bytes())?, uploads.add(part_lse.as_bytes())?];
        let values = MergeValues {
            part: given,
            part_lse: given_lse,
            part_stride: part.wrapping_sub(given),
            part_lse_stride: part_lse.wrapping_sub(given_lse),
            output: given,
            lse: given_lse,
            tokens: small.tokens as u64,
        };
        // SAFETY: the buffers hold the whole tensors, and are used by nobody else; freeing them waits for the kernel. The
        // stream was made in the context of the kernel.
        unsafe { operation.launch(&self.stream, plan.grid(small.tokens), &values.words()) }?;
        uploads.read(given, &mut output.data)?;
        uploads.read(given_lse, lse.as_mut_bytes())?;
        let outputs = Outputs { output, lse: Some(lse), ..Outputs::default() };
        Ok(match merge_oracle(&small, &data.views()) {
            Ok(expected) => expected.check(&small, &outputs).err(),
            Err(invalid) => Some(invalid.to_string()),
        })
    }
}
