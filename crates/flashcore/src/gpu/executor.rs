//! The kernels of a plan with all their arguments but those that change from launch to launch.

use std::sync::{Arc, Mutex};
use zerocopy::IntoBytes;

use flashcore_cuda::{CudaError, DeviceBuffer, Kernel, L2Range, Launch, Stream, Workspace};
use flashcore_ir::{Argument, TensorMap};
use flashcore_kernels::{KernelLaunch, LAUNCH_BLOCKS, LAUNCH_PARAMETERS, LaunchPlan, LaunchValues, Stage};
use flashcore_problem::{InputViews, Operand, OutputViews, Problem, TensorView, TensorViewMut};

use super::{DeviceTensors, Gpu};

/// The kernels of a plan, loaded, in the order in which they are launched.
#[derive(Clone)]
pub(crate) struct Executor {
    steps: Arc<[Step]>,
    stream: Stream,
    /// Memory that the kernels of a launch use among themselves, for each stream, unless a launch brings it.
    workspace: Workspace,
    /// Offset of the block mask in that memory.
    block_mask_offset: u64,
    /// Bytes of the key that L2 is asked to keep, and of the part of L2.
    l2_key: Option<(usize, usize)>,
}

/// One kernel of a plan.
struct Step {
    kernel: Arc<Kernel>,
    launch: Launch,
    /// The tensor maps among the arguments: index, operand, and everything but the address.
    tensor_maps: Vec<(usize, Operand, TensorMap)>,
    stage: Stage,
    /// The scales whose words are among the arguments, with the index of the first word of each.
    scale_words: Vec<(usize, Operand)>,
    /// The first of the words of an append inside of the launch, where the kernel has those.
    append_words: Option<usize>,
    /// The last launch with its tensor maps, whose addresses an engine seldom changes: encoding one costs as much as half
    /// a launch.
    last: Mutex<Option<([u64; LAUNCH_PARAMETERS], Launch)>>,
}

impl Step {
    fn new(kernel: Arc<Kernel>, planned: &KernelLaunch) -> Result<Self, CudaError> {
        let launch = kernel.prepare(planned.grid, planned.template())?;
        let tensor_map = |&(index, operand): &(usize, Operand)| match planned.template()[index] {
            Argument::TensorMap(map) => Some((index, operand, map)),
            _ => None,
        };
        let tensor_maps = planned.tensor_maps().iter().filter_map(tensor_map).collect();
        let (stage, append_words) = (planned.spec.stage, planned.append_words());
        let scale_words = planned.scale_words().to_vec();
        Ok(Self { kernel, launch, tensor_maps, stage, scale_words, append_words, last: Mutex::default() })
    }

    /// The launch with these values.
    fn prepare(&self, values: &LaunchValues, words: &[u64; LAUNCH_PARAMETERS]) -> Result<Launch, CudaError> {
        let mut launch = self.prepare_tensors(values, words)?;
        for &(first, scale) in &self.scale_words {
            launch.set_words(first, &values.scale_words(scale));
        }
        Ok(launch)
    }

    /// The launch with these values, but for the scales: tensor maps do not depend on those.
    fn prepare_tensors(&self, values: &LaunchValues, words: &[u64; LAUNCH_PARAMETERS]) -> Result<Launch, CudaError> {
        let mut launch = self.launch;
        for (first, block) in LAUNCH_BLOCKS {
            launch.set_words(first, &words[block]);
        }
        if let Some(first) = self.append_words {
            launch.set_words(first, &values.append.words());
        }
        if self.tensor_maps.is_empty() {
            return Ok(launch);
        }
        // Whoever launches at the same time encodes for itself.
        let mut last = self.last.try_lock().ok();
        if let Some((_, launch)) = last.as_deref().and_then(Option::as_ref).filter(|(known, _)| known == words) {
            return Ok(*launch);
        }
        for &(index, operand, map) in &self.tensor_maps {
            let map = TensorMap { base: values.address(operand), ..map };
            self.kernel.set_argument(&mut launch, index, Argument::TensorMap(map))?;
        }
        if let Some(last) = last.as_deref_mut() {
            *last = Some((*words, launch));
        }
        Ok(launch)
    }

    /// # Safety
    ///
    /// See [`Executor::launch`].
    unsafe fn launch(
        &self,
        stream: &Stream,
        values: &LaunchValues,
        words: &[u64; LAUNCH_PARAMETERS],
        window: Option<L2Range>,
    ) -> Result<(), CudaError> {
        let mut launch = self.prepare(values, words)?;
        if let Some(window) = window.filter(|_| self.stage == Stage::Attention) {
            launch.set_l2_window(window);
        }
        // SAFETY: prepared by this kernel; the rest is the contract of this function.
        unsafe { self.kernel.launch(stream, &launch) }
    }
}

impl Executor {
    /// The launches of a plan with the kernels of each.
    pub(super) fn new(plan: &LaunchPlan, kernels: Vec<Arc<Kernel>>, gpu: &Gpu) -> Result<Self, CudaError> {
        let Gpu { workspaces, stream, .. } = gpu;
        let context = stream.context();
        let steps: Result<Vec<_>, _> =
            kernels.into_iter().zip(&plan.launches).map(|(kernel, planned)| Step::new(kernel, planned)).collect();
        Ok(Self {
            steps: steps?.into(),
            workspace: workspaces.of_plan(plan.workspace_bytes as usize),
            block_mask_offset: plan.block_mask_offset(),
            l2_key: plan.l2_key_bytes().map(|bytes| Ok::<_, CudaError>((bytes, context.keep_in_l2()?))).transpose()?,
            stream: stream.clone(),
        })
    }

    /// Bytes that the kernels use among themselves.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace.bytes()
    }

    /// Puts the kernels on a stream. Allocates nothing but a workspace where the stream has none as large.
    ///
    /// # Safety
    ///
    /// The addresses are those of device memory that holds the tensors of the problem, which nobody else uses in a way
    /// that conflicts until the launch has finished, a workspace that the launch brings included; the stream belongs to
    /// the kernel's context.
    pub(crate) unsafe fn launch(&self, stream: &Stream, tensors: &DeviceTensors) -> Result<(), CudaError> {
        // SAFETY: the contract of this function.
        unsafe { self.launch_values(stream, tensors.values()) }
    }

    /// # Safety
    ///
    /// As for [`launch`](Self::launch), of the addresses of an append inside of the launch too.
    pub(crate) unsafe fn launch_values(&self, stream: &Stream, mut values: LaunchValues) -> Result<(), CudaError> {
        if values.workspace != 0 {
            // SAFETY: the contract of this function.
            return unsafe { self.launch_in(stream, &values) };
        }
        self.workspace.with(stream, move |workspace| {
            values.workspace = workspace;
            // SAFETY: the contract of this function; nobody else uses the workspace of the stream meanwhile.
            unsafe { self.launch_in(stream, &values) }
        })
    }

    /// # Safety
    ///
    /// As for [`launch`](Self::launch), with a workspace that no other launch uses at the same time.
    unsafe fn launch_in(&self, stream: &Stream, values: &LaunchValues) -> Result<(), CudaError> {
        let words = values.words(self.block_mask_offset);
        let address = values.address(Operand::Key);
        let window = self.l2_key.map(|(bytes, kept_bytes)| L2Range { address, bytes, kept_bytes });
        stream.context().while_current(|| {
            self.steps.iter().try_for_each(|step| {
                // SAFETY: the contract of this function; the stream keeps the order of the kernels.
                unsafe { step.launch(stream, values, &words, window) }
            })
        })
    }

    /// Computes a problem whose inputs and outputs validated, in the host's memory.
    pub(crate) fn run(
        &self,
        problem: &Problem,
        inputs: &InputViews<'_>,
        outputs: OutputViews<'_>,
    ) -> Result<(), CudaError> {
        let stream = &self.stream;
        with_host_tensors(stream, problem, inputs, outputs, &[], |tensors| {
            // SAFETY: the buffers hold as many bytes as the problem's strides reach, and are used by nobody else; freeing
            // them waits for the kernel. The stream was made in the context of the kernel.
            unsafe { self.launch(stream, &tensors) }
        })
    }
}

/// Copies tensors of the host that validated to the GPU, calls `launch` with their addresses, and copies the outputs back.
/// Operands that are `given` lie on the GPU already.
pub(super) fn with_host_tensors(
    stream: &Stream,
    problem: &Problem,
    inputs: &InputViews<'_>,
    outputs: OutputViews<'_>,
    given: &[(Operand, u64)],
    launch: impl FnOnce(DeviceTensors) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    let mut tensors = DeviceTensors::new(0, 0, 0, 0);
    let _inputs = upload_inputs(stream, problem, inputs, given, &mut tensors)?;
    let (shape, strides) = (problem.output_shape(), problem.strides().output);
    let output_bytes = strides.extent(shape).unwrap_or(0) * Operand::Output.element_bytes(problem);
    // The gaps between the rows of the output, and rows of no sequence, come back as they were.
    let has_untouched_rows = problem.total_q.is_some() || problem.seqused_q;
    let has_gaps = strides.extent(shape) != shape.elements() || has_untouched_rows;
    let TensorView { data, .. } = outputs.output.as_view();
    let output = if has_gaps {
        DeviceBuffer::from_host(stream, &data[..output_bytes])?
    } else {
        DeviceBuffer::uninitialised(stream.context(), output_bytes)?
    };
    let rows = outputs.lse.as_ref().map_or(0, |rows| rows.len());
    let lse = match &outputs.lse {
        Some(rows) if has_untouched_rows => DeviceBuffer::from_host(stream, rows.as_bytes())?,
        _ => DeviceBuffer::uninitialised(stream.context(), rows * size_of::<f32>())?,
    };
    (tensors.output, tensors.lse) = (output.address(), lse.address());
    launch(tensors)?;
    output.copy_to_host(stream, 0, &mut outputs.output.data[..output_bytes])?;
    if let Some(rows) = outputs.lse {
        lse.copy_to_host(stream, 0, TensorViewMut::from(rows).data)?;
    }
    Ok(())
}

/// Copies the inputs that the problem has to the GPU, and their addresses to `tensors`.
fn upload_inputs(
    stream: &Stream,
    problem: &Problem,
    inputs: &InputViews<'_>,
    given: &[(Operand, u64)],
    tensors: &mut DeviceTensors,
) -> Result<Vec<DeviceBuffer>, CudaError> {
    let strides = inputs.call_strides();
    tensors.set_call_strides(strides);
    let mut buffers = Vec::with_capacity(Operand::COUNT);
    for operand in Operand::inputs().filter(|operand| operand.is_present(problem)) {
        if let Some(&(_, address)) = given.iter().find(|(known, _)| *known == operand) {
            tensors.set(operand, address);
            continue;
        }
        let bytes = inputs.bytes(operand).unwrap_or_default();
        // A view may be longer than its tensor.
        let used = operand.extent(problem, strides).unwrap_or(0) * operand.element_bytes(problem);
        let buffer = DeviceBuffer::from_host(stream, &bytes[..used.min(bytes.len())])?;
        tensors.set(operand, buffer.address());
        buffers.push(buffer);
    }
    Ok(buffers)
}

#[cfg(test)]
mod tests {
    use flashcore_ir::Arch;
    use flashcore_kernels::{Config, LaunchPlan};
    use flashcore_problem::{DType, MaskMod, Problem, ScoreMod};

    /// With as many constants of expressions as there can be.
    #[test]
    fn a_launch_has_room_for_the_arguments_of_every_kernel() {
        let score = ScoreMod::new("score", |score, _| (0..20).fold(score, |sum, term| sum + term as f32));
        let mask = MaskMod::new("mask", |at| (0..20).fold(at.key, |sum, term| sum + term).less(9));
        let mut problem = Problem::new(3, 4, 1000, 64, DType::F16);
        (problem.score_mod, problem.mask_mod) = (Some(score), Some(mask));
        let scaled = problem.clone().with_kv_dtype(Some(DType::E4m3)).with_k_scale(true).with_v_scale(true);
        let splits = "ampere-64x64-2stage-swizzled-2splits".parse().unwrap();
        let mut with_scales = 0;
        for config in Config::all().into_iter().chain([splits]) {
            for problem in [&problem, &scaled] {
                let Ok(plan) = LaunchPlan::new(problem, config, Arch::Sm90a) else { continue };
                for launch in &plan.launches {
                    let arguments = launch.template();
                    assert_eq!(arguments.len(), launch.kernel().parameters.len(), "{config}");
                    assert!(arguments.len() <= flashcore_cuda::MOST_ARGUMENTS, "{config} has {}", arguments.len());
                    with_scales += launch.scale_words().len();
                }
            }
        }
        assert!(with_scales > 0);
    }
}
