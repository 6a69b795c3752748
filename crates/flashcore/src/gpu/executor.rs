//! The kernels of a plan with all their arguments but those that change from launch to launch.

use std::sync::{Arc, Mutex};

use flashcore_cuda::{CudaError, DeviceBuffer, Kernel, L2Range, Launch, Stream, Workspace, fill_device};
use flashcore_ir::{Argument, TensorMap};
use flashcore_kernels::{Fill, KernelLaunch, LaunchPlan, LaunchValues, Place};
use flashcore_problem::{InputViews, Operand, OutputViews, ScaleStrides, TensorList};

use super::{DeviceTensors, Gpu};
use crate::{Error, Operation};

/// The kernels of a plan, loaded, in the order in which they are launched.
#[derive(Clone)]
pub(crate) struct Executor {
    steps: Arc<[Step]>,
    fill: Option<Fill>,
    /// Bytes of which the address of each operand must be a multiple, where that is more than its element.
    alignments: Arc<[u64; Operand::COUNT]>,
    stream: Stream,
    /// Memory that the kernels of a launch use among themselves, for each stream, unless a launch brings it.
    workspace: Workspace,
}

/// One kernel of a plan.
struct Step {
    kernel: Arc<Kernel>,
    planned: KernelLaunch,
    launch: Launch,
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
        // A grid without CTAs is not launched.
        let launch = kernel.prepare(planned.grid.map(|ctas| ctas.max(1)), planned.template())?;
        let kept_in_l2 = planned.kept_in_l2.map(|(place, bytes)| {
            let kept_bytes = kernel.context().keep_in_l2()?;
            Ok::<_, CudaError>((place, bytes, kept_bytes))
        });
        let kept_in_l2 = kept_in_l2.transpose()?;
        Ok(Self { kernel, planned: planned.clone(), launch, kept_in_l2, last: Mutex::default() })
    }

    /// The launch with these values; `None` if it has no CTAs.
    fn prepare(&self, values: &LaunchValues) -> Result<Option<Launch>, CudaError> {
        let grid = self.planned.grid_of(values);
        if grid.contains(&0) {
            return Ok(None);
        }
        let mut launch = self.with_tensor_maps(values)?;
        if grid != self.planned.grid {
            launch.set_grid(grid)?;
        }
        for (index, word) in self.planned.words(values) {
            launch.set_words(index, &[word]);
        }
        if let Some((place, bytes, kept_bytes)) = self.kept_in_l2 {
            launch.set_l2_window(L2Range { address: values.place(place), bytes, kept_bytes });
        }
        Ok(Some(launch))
    }

    /// The launch with the tensor maps of these values.
    fn with_tensor_maps(&self, values: &LaunchValues) -> Result<Launch, CudaError> {
        let (mut launch, mut addresses) = (self.launch, [0; MAX_TENSOR_MAPS]);
        let mut count = 0;
        for (known, (_, address)) in addresses.iter_mut().zip(self.planned.tensor_maps(values)) {
            *known = address;
            count += 1;
        }
        if count == 0 {
            return Ok(launch);
        }
        // On contention, encode the maps again instead of waiting.
        let mut last = self.last.try_lock().ok();
        if let Some((_, launch)) = last.as_deref().and_then(Option::as_ref).filter(|(known, _)| *known == addresses) {
            return Ok(*launch);
        }
        for (index, base) in self.planned.tensor_maps(values) {
            if let Argument::TensorMap(map) = self.planned.template()[index] {
                self.kernel.set_argument(&mut launch, index, Argument::TensorMap(TensorMap { base, ..map }))?;
            }
        }
        if let Some(last) = last.as_deref_mut() {
            *last = Some((addresses, launch));
        }
        Ok(launch)
    }
}

impl Executor {
    /// The launches of a plan with the kernels of each.
    pub(super) fn new(plan: &LaunchPlan, kernels: Vec<Arc<Kernel>>, gpu: &Gpu) -> Result<Self, CudaError> {
        let steps: Result<Vec<_>, _> =
            kernels.into_iter().zip(&plan.launches).map(|(kernel, planned)| Step::new(kernel, planned)).collect();
        Ok(Self {
            steps: steps?.into(),
            fill: plan.fill,
            alignments: Arc::new(std::array::from_fn(|index| plan.alignment(Operand::ALL[index]))),
            workspace: gpu.workspaces.of_plan(plan.workspace_bytes as usize),
            stream: gpu.stream.clone(),
        })
    }

    /// Bytes that the kernels use among themselves.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace.bytes()
    }

    /// Bytes of which the address of an operand must be a multiple, where that is more than its element.
    pub(crate) fn alignment(&self, operand: Operand) -> u64 {
        self.alignments[operand as usize]
    }

    /// Puts the kernels on a stream. Allocates nothing but a workspace where the stream has none as large.
    ///
    /// # Safety
    ///
    /// The addresses are those of device memory that holds the tensors of the operation, which nothing else uses in a way
    /// that conflicts until the launch has finished, a workspace that the launch brings included; the stream belongs to
    /// the kernels' context.
    pub(crate) unsafe fn launch(&self, stream: &Stream, mut values: LaunchValues) -> Result<(), CudaError> {
        if values.workspace != 0 {
            // SAFETY: the contract of this function.
            return unsafe { self.launch_in(stream, &values) };
        }
        self.workspace.with(stream, move |workspace| {
            values.workspace = workspace;
            // SAFETY: the contract of this function; nothing else uses the workspace of the stream meanwhile.
            unsafe { self.launch_in(stream, &values) }
        })
    }

    /// # Safety
    ///
    /// As for [`launch`](Self::launch), with a workspace that no other launch uses at the same time.
    unsafe fn launch_in(&self, stream: &Stream, values: &LaunchValues) -> Result<(), CudaError> {
        if let Some(Fill { place, bytes, value }) = self.fill {
            // SAFETY: plans fill memory of the workspace only, which has these bytes.
            unsafe { fill_device(stream, values.place(place), bytes as usize, value) }?;
        }
        stream.context().while_current(|| {
            self.steps.iter().try_for_each(|step| {
                let Some(launch) = step.prepare(values)? else { return Ok(()) };
                // SAFETY: prepared by this kernel; the rest is the contract of this function. The stream keeps the order of
                // the kernels.
                unsafe { step.kernel.launch(stream, &launch) }
            })
        })
    }

    /// Computes an operation whose inputs and outputs validated, in the host's memory.
    pub(crate) fn run(
        &self,
        operation: &Operation,
        inputs: &InputViews<'_>,
        outputs: &mut OutputViews<'_>,
    ) -> Result<(), Error> {
        self.run_in(0, operation, inputs, outputs)
    }

    /// [`run`](Self::run) with the workspace at an address; that of the stream where it is 0.
    pub(super) fn run_in(
        &self,
        workspace: u64,
        operation: &Operation,
        inputs: &InputViews<'_>,
        outputs: &mut OutputViews<'_>,
    ) -> Result<(), Error> {
        let mut tensors = DeviceTensors::NONE.with_workspace(workspace);
        let (mut strides, written) = (inputs.call_strides(), outputs.call_strides());
        for (stride, written) in strides.scales.iter_mut().zip(written.scales) {
            *stride = if written == ScaleStrides::TENSOR { *stride } else { written };
        }
        tensors.set_call_strides(strides);
        let uses = operation.uses(strides, None);
        let mut buffers = Vec::new();
        for (&operand, of) in Operand::ALL.iter().zip(&uses) {
            let Some(of) = of else { continue };
            let is_in_key_cache = operand == Operand::ValueCache && outputs.value_offset.is_some();
            if is_in_key_cache {
                continue;
            }
            if let Some(list) = inputs.list(operand) {
                let (stacked, stride) = stacked(list, of.bytes() as usize);
                buffers.push((operand, DeviceBuffer::from_host(&self.stream, &stacked)?));
                tensors.part_strides[usize::from(operand == Operand::PartLses)] = stride as u64;
            } else {
                let slot = if of.is_written { outputs.slot(operand) } else { inputs.slot(operand) };
                let data = slot.map_or(&[][..], |slot| slot.data);
                // A view may be longer than its tensor. What lies between the rows of an output comes back as it was.
                let used = used_bytes(operand, of.bytes(), data.len(), outputs);
                buffers.push((operand, DeviceBuffer::from_host(&self.stream, &data[..used])?));
            }
            tensors.set(operand, buffers[buffers.len() - 1].1.address());
        }
        if let (Some(offset), Some(cache)) = (outputs.value_offset, &uses[Operand::ValueCache as usize]) {
            tensors.value_cache = tensors.key_cache + (offset * cache.element_bytes) as u64;
        }
        // An append without a query transforms the query output.
        if tensors.query == 0 {
            tensors.query = tensors.query_output;
        }
        tensors.check(operation, |operand| self.alignment(operand))?;
        // SAFETY: the buffers hold the whole tensors, which validated, and nothing else uses them; freeing them waits for the
        // kernels. The stream was made in the context of the kernels.
        unsafe { self.launch(&self.stream, tensors.values()) }?;
        for (operand, buffer) in &buffers {
            if uses[*operand as usize].is_some_and(|of| of.is_written)
                && let Some(data) = outputs.bytes_mut(*operand)
            {
                let used = buffer.len().min(data.len());
                buffer.copy_to_host(&self.stream, 0, &mut data[..used])?;
            }
        }
        Ok(())
    }
}

/// Bytes of an operand on the host that are copied: all of a key cache that values lie in too.
fn used_bytes(operand: Operand, needed: u64, given: usize, outputs: &OutputViews<'_>) -> usize {
    let is_shared = operand == Operand::KeyCache && outputs.value_offset.is_some();
    if is_shared { given } else { given.min(usize::try_from(needed).unwrap_or(usize::MAX)) }
}

/// The tensors of a list one after another, and the distance between them: each begins where the widest access may.
fn stacked(list: TensorList<'_>, bytes: usize) -> (Vec<u8>, usize) {
    let stride = bytes.next_multiple_of(16);
    let mut stacked = vec![0; stride * list.len()];
    for (index, tensor) in list.iter().enumerate() {
        stacked[index * stride..][..bytes].copy_from_slice(&tensor.data[..bytes]);
    }
    (stacked, stride)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ir::Arch;
    use flashcore_kernels::Config;
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
                    let specialization = launch.key.spec.specialization();
                    with_scales += specialization.map_or(0, |specialization| specialization.scales().count());
                    assert!(launch.tensor_maps(&LaunchValues::NONE).count() <= MAX_TENSOR_MAPS, "{config}");
                }
            }
        }
        assert!(with_scales > 0);
    }
}
