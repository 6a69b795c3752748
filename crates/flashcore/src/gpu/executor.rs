//! The kernels of a plan with all their arguments but those that change from launch to launch.

use std::sync::{Arc, Mutex};
use zerocopy::IntoBytes;

use flashcore_cuda::{CudaError, DeviceBuffer, Kernel, L2Range, Launch, Stream, Workspace};
use flashcore_ir::{Argument, TensorMap};
use flashcore_kernels::{KernelLaunch, LaunchPlan, LaunchValues, Place, Word};
use flashcore_problem::{InputViews, Operand, OutputViews, Problem, TensorView, TensorViewMut};

use super::{DeviceTensors, Gpu};

/// The kernels of a plan, loaded, in the order in which they are launched.
#[derive(Clone)]
pub(crate) struct Executor {
    steps: Arc<[Step]>,
    stream: Stream,
    /// Memory that the kernels of a launch use among themselves, for each stream, unless a launch brings it.
    workspace: Workspace,
}

/// One kernel of a plan.
struct Step {
    kernel: Arc<Kernel>,
    launch: Launch,
    /// The words that a launch brings, by the index of the argument.
    words: Vec<(usize, Word)>,
    /// The tensor maps among the arguments: index, place, and everything but the address.
    tensor_maps: Vec<(usize, Place, TensorMap)>,
    /// Memory that L2 is asked to keep, its bytes, and the bytes of that part of L2.
    kept_in_l2: Option<(Place, usize, usize)>,
    /// The last launch with its tensor maps, by the address of each, which an engine seldom changes: encoding one costs as
    /// much as half a launch.
    last: Mutex<Option<([u64; MAX_TENSOR_MAPS], Launch)>>,
}

/// The most tensor maps of a kernel.
const MAX_TENSOR_MAPS: usize = 4;

impl Step {
    fn new(kernel: Arc<Kernel>, planned: &KernelLaunch) -> Result<Self, CudaError> {
        let launch = kernel.prepare(planned.grid, planned.template())?;
        let tensor_map = |&(index, place): &(usize, Place)| match planned.template()[index] {
            Argument::TensorMap(map) => Some((index, place, map)),
            _ => None,
        };
        let tensor_maps = planned.tensor_maps().iter().filter_map(tensor_map).collect();
        let kept_in_l2 = planned.kept_in_l2.map(|(place, bytes)| {
            let kept_bytes = kernel.context().keep_in_l2()?;
            Ok::<_, CudaError>((place, bytes, kept_bytes))
        });
        let (words, kept_in_l2) = (planned.words().to_vec(), kept_in_l2.transpose()?);
        Ok(Self { kernel, launch, words, tensor_maps, kept_in_l2, last: Mutex::default() })
    }

    /// The launch with these values.
    fn prepare(&self, values: &LaunchValues) -> Result<Launch, CudaError> {
        let mut launch = self.with_tensor_maps(values)?;
        for &(index, word) in &self.words {
            launch.set_words(index, &[values.word(word)]);
        }
        if let Some((place, bytes, kept_bytes)) = self.kept_in_l2 {
            launch.set_l2_window(L2Range { address: values.place(place), bytes, kept_bytes });
        }
        Ok(launch)
    }

    /// The launch with the tensor maps of these values.
    fn with_tensor_maps(&self, values: &LaunchValues) -> Result<Launch, CudaError> {
        let mut launch = self.launch;
        if self.tensor_maps.is_empty() {
            return Ok(launch);
        }
        let mut bases = [0; MAX_TENSOR_MAPS];
        for (base, &(_, place, _)) in bases.iter_mut().zip(&self.tensor_maps) {
            *base = values.place(place);
        }
        // On contention, encode the maps again instead of waiting.
        let mut last = self.last.try_lock().ok();
        if let Some((_, launch)) = last.as_deref().and_then(Option::as_ref).filter(|(known, _)| *known == bases) {
            return Ok(*launch);
        }
        for (&base, &(index, _, map)) in bases.iter().zip(&self.tensor_maps) {
            self.kernel.set_argument(&mut launch, index, Argument::TensorMap(TensorMap { base, ..map }))?;
        }
        if let Some(last) = last.as_deref_mut() {
            *last = Some((bases, launch));
        }
        Ok(launch)
    }
}

impl Executor {
    /// The launches of a plan with the kernels of each.
    pub(super) fn new(plan: &LaunchPlan, kernels: Vec<Arc<Kernel>>, gpu: &Gpu) -> Result<Self, CudaError> {
        let Gpu { workspaces, stream, .. } = gpu;
        let steps: Result<Vec<_>, _> =
            kernels.into_iter().zip(&plan.launches).map(|(kernel, planned)| Step::new(kernel, planned)).collect();
        let workspace = workspaces.of_plan(plan.workspace_bytes as usize);
        Ok(Self { steps: steps?.into(), workspace, stream: stream.clone() })
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
        stream.context().while_current(|| {
            self.steps.iter().try_for_each(|step| {
                let launch = step.prepare(values)?;
                // SAFETY: prepared by this kernel; the rest is the contract of this function. The stream keeps the order of
                // the kernels.
                unsafe { step.kernel.launch(stream, &launch) }
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
    use super::*;
    use flashcore_ir::Arch;
    use flashcore_kernels::Config;
    use flashcore_problem::{DType, MaskMod, ScoreMod};

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
                    let is_scale = |(_, word): &&(usize, Word)| matches!(word, Word::ScaleStride(..));
                    with_scales += launch.words().iter().filter(is_scale).count();
                    assert!(launch.tensor_maps().len() <= MAX_TENSOR_MAPS, "{config}");
                }
            }
        }
        assert!(with_scales > 0);
    }
}
