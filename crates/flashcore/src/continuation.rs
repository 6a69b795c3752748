//! Continuation: attention over more keys, merged into an output and an LSE that are given.

use std::fmt;

use flashcore_problem::{InputViews, OutputViews, Problem, StateMerge, Tensor, TensorView, TensorViewMut};

use crate::device::Device;
#[cfg(feature = "cuda")]
use crate::device::Kind;
#[cfg(feature = "cuda")]
use crate::gpu::GpuContinue;
#[cfg(feature = "cuda")]
use crate::{DeviceTensors, StreamRef};
use crate::{Error, MergePlan, Plan, Reason, Report, Unsupported};

/// Bits of an LSE in a row that attention did not write: a NaN that no arithmetic makes.
const UNWRITTEN: u32 = u32::MAX;

/// Attention over more keys, merged into an output and an LSE that are given, which are replaced: what ring attention,
/// cascades and chunked prefill do for each set of keys after the first. Ready to be run any number of times, from any
/// thread.
///
/// Output and LSE are those of attention over other keys, of the same problem otherwise, or the start: output 0 and LSE
/// minus infinity. Rows that no sequence has stay as they are. A sink counts each time, so it belongs to one of the plans.
///
/// ```
/// use flashcore::{ContinuePlan, DType, Device, InputViews, OutputViews, Problem};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // One row and one key at a time, of equal scores: the output is the mean of the values so far.
/// let plan = ContinuePlan::new(&Problem::new(1, 1, 1, 2, DType::F32).with_lse(true), &Device::cpu())?;
/// let (mut output, mut lse) = ([0.0_f32; 2], [f32::NEG_INFINITY]);
/// for value in [[1.0_f32, 2.0], [3.0, 6.0]] {
///     let inputs = InputViews::new(&[0.0_f32; 2], &[0.0_f32; 2], &value);
///     plan.run(inputs, OutputViews::new(&mut output).with_lse(&mut lse))?;
/// }
/// assert_eq!((output, lse), ([2.0, 4.0], [std::f32::consts::LN_2]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ContinuePlan {
    attention: Plan,
    state: StateMerge,
    merge: MergePlan,
    #[cfg(feature = "cuda")]
    gpu: Option<GpuContinue>,
}

impl ContinuePlan {
    /// A plan for `problem`, which is that of the new keys, on `device`, or every reason against it. It needs
    /// [`lse`](Problem::lse), and an LSE that includes the sink where there is one.
    pub fn new(problem: &Problem, device: &Device) -> Result<Self, Unsupported> {
        let refuse = |errors: Vec<_>| Unsupported::new(errors.into_iter().map(Reason::Problem).collect());
        let state = StateMerge::of(problem).map_err(refuse)?;
        #[cfg_attr(not(feature = "cuda"), expect(unused_mut, reason = "there is no workspace"))]
        let mut attention = Plan::new(problem, device)?;
        let merge = MergePlan::new(&state.merge, device)?;
        #[cfg(feature = "cuda")]
        let gpu = match &device.0 {
            Kind::Cpu => None,
            Kind::Cuda(gpu) => {
                let prepared = gpu.continuation(problem, &state, attention.workspace_bytes());
                let gpu = prepared.map_err(Unsupported::new)?;
                attention.report_workspace(gpu.workspace_bytes());
                Some(gpu)
            }
        };
        Ok(Self {
            attention,
            state,
            merge,
            #[cfg(feature = "cuda")]
            gpu,
        })
    }

    /// The problem.
    pub const fn problem(&self) -> &Problem {
        self.attention.problem()
    }

    /// The device.
    pub const fn device(&self) -> &Device {
        self.attention.device()
    }

    /// Report of the attention kernel.
    pub const fn report(&self) -> &Report {
        self.attention.report()
    }

    /// Bytes of workspace: device memory for the new partial result, and for what attention needs. As for
    /// [`Plan::workspace_bytes`]; [`DeviceTensors`] can bring one.
    #[cfg(feature = "cuda")]
    pub fn workspace_bytes(&self) -> usize {
        self.gpu.as_ref().map_or(0, GpuContinue::workspace_bytes)
    }

    /// Attends tensors in the host's memory and merges the result into `state`, and returns when that is done. Everything is
    /// checked first; on such an error the state is as it was. On a GPU this copies everything there and back: convenient,
    /// not fast.
    pub fn run<'a>(&self, inputs: impl Into<InputViews<'a>>, state: impl Into<OutputViews<'a>>) -> Result<(), Error> {
        let (problem, inputs, state) = (self.problem(), inputs.into(), state.into());
        state.validate(problem)?;
        let OutputViews { output, lse: Some(lse), .. } = state else { return Ok(()) };
        let extent = problem.strides().output.extent(problem.output_shape()).unwrap_or(0);
        let mut part = Tensor::zeros(problem.dtypes().output, extent);
        let mut part_lse = vec![f32::from_bits(UNWRITTEN); lse.len()];
        self.attention.run(inputs, OutputViews::new(&mut part).with_lse(&mut part_lse))?;
        // Rows that were not written are merged as empty ones into a copy, and not taken from it.
        let is_written: Vec<bool> = part_lse.iter().map(|lse| lse.to_bits() != UNWRITTEN).collect();
        for (lse, _) in part_lse.iter_mut().zip(&is_written).filter(|(_, is_written)| !**is_written) {
            *lse = f32::NEG_INFINITY;
        }
        let (mut merged, mut merged_lse) =
            (Tensor { dtype: problem.dtypes().output, data: output.data.to_vec() }, lse.to_vec());
        for group in 0..self.state.groups {
            let (first, first_lse) = (group * self.state.output_stride, group * self.state.lse_stride);
            let first = first * problem.dtypes().output.size_bytes();
            let before = TensorView { dtype: problem.dtypes().output, data: &output.data[first..] };
            let after = TensorView { dtype: problem.dtypes().output, data: &part.data[first..] };
            let lses = [(&lse[first_lse..]).into(), (&part_lse[first_lse..]).into()];
            let parts = [before, after];
            let output = TensorViewMut { dtype: problem.dtypes().output, data: &mut merged.data[first..] };
            let inputs = InputViews::default().with_part_outputs(&parts).with_part_lses(&lses);
            self.merge.run(&inputs, OutputViews::new(output).with_lse(&mut merged_lse[first_lse..]))?;
        }
        let (shape, strides) = (problem.output_shape(), problem.strides().output);
        let row_bytes = shape.columns * problem.dtypes().output.size_bytes();
        for (row, _) in is_written.iter().enumerate().filter(|(_, is_written)| **is_written) {
            let (head, in_head) = (row / shape.rows, row % shape.rows);
            let start = strides.row_start(head / shape.heads, head % shape.heads, in_head)
                * problem.dtypes().output.size_bytes();
            output.data[start..start + row_bytes].copy_from_slice(&merged.data[start..start + row_bytes]);
            lse[row] = merged_lse[row];
        }
        Ok(())
    }

    /// Puts attention and the merge on the caller's stream, on tensors that lie on the GPU, and returns before they have
    /// finished. [`output`](DeviceTensors::output) and [`lse`](DeviceTensors::lse) are the state, which is read and written.
    /// Otherwise everything is as for [`Plan::launch`]: nothing is waited for, and a launch can be captured into a CUDA
    /// graph.
    ///
    /// # Safety
    ///
    /// As for [`Plan::launch`], with the [workspace](Self::workspace_bytes) of this plan.
    #[cfg(feature = "cuda")]
    pub unsafe fn launch<'a>(&self, stream: impl Into<StreamRef<'a>>, tensors: DeviceTensors) -> Result<(), Error> {
        let Some(gpu) = &self.gpu else {
            return Err(Error::NotOnCuda { call: "launch", device: self.device().to_string() });
        };
        // SAFETY: the caller promises what the kernels need of addresses and stream.
        unsafe {
            self.attention.launch_with(stream.into(), &tensors, |executor, stream| {
                gpu.launch(executor, &self.state, stream, &tensors)
            })
        }
    }
}

impl fmt::Debug for ContinuePlan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ContinuePlan").field("report", self.report()).finish_non_exhaustive()
    }
}
