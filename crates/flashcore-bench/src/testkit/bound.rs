//! A plan bound to guarded tensors of its own on the GPU: launches without `unsafe`.

use std::sync::Arc;
use std::time::Instant;

use flashcore::{Device, DeviceTensors, Error, Plan};
use flashcore_cuda::cache::{CacheOptions, KernelCache};
use flashcore_cuda::{DeviceBuffer, Graph, JitOptions, Kernel, Kernels, Launch, Stream};
use flashcore_ir::Builder;
use flashcore_problem::{Access, GuardError, Guarded, Inputs, Operand, Outputs, Problem, Tensor};
use zerocopy::IntoBytes as _;

use crate::timing::Times;

/// A plan of attention with tensors of its own on the GPU, each between guard bands, and the stream it is launched on.
///
/// It owns the memory that its launches touch, and everything that touches it goes through one stream, so launches and
/// copies are ordered and nothing is freed under a running kernel.
#[derive(Debug)]
pub struct Bound {
    plan: Plan,
    stream: Stream,
    buffers: Vec<Buffer>,
    tensors: DeviceTensors,
}

#[derive(Debug)]
struct Buffer {
    operand: Operand,
    device: DeviceBuffer,
    /// Contents before the first launch, of an operand that is written.
    initial: Option<Guarded>,
}

/// Tensors of a [`Bound`] as they are on the GPU.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The inputs as they are on the GPU, where nobody should have written to them.
    pub inputs: Inputs,
    /// The outputs.
    pub outputs: Outputs,
    /// The guard bands of every operand, by name.
    pub guards: Vec<(String, Result<(), GuardError>)>,
}

/// Several launches of a [`Bound`], recorded: what is timed is the kernel and not the host.
#[derive(Debug)]
pub struct BoundGraph<'a> {
    bound: &'a Bound,
    graph: Graph,
    /// Freed after the graph, once nothing on the device uses it.
    _workspace: DeviceBuffer,
}

impl Bound {
    /// Copies inputs and poisoned outputs to the GPU of the plan.
    ///
    /// # Panics
    ///
    /// If the plan is of another operation than attention.
    pub fn new(plan: &Plan, inputs: &Inputs) -> Result<Self, Error> {
        let Some(context) = plan.device().context() else {
            return Err(Error::NotOnCuda { call: "a bound plan", device: plan.device().to_string() });
        };
        let problem = plan.problem().expect("a plan of attention");
        let views = inputs.views();
        views.validate(problem)?;
        let outputs = Outputs::poisoned(problem);
        let stream = Stream::new(context)?;
        let mut tensors = DeviceTensors::new(0, 0, 0, 0);
        tensors.set_call_strides(views.call_strides());
        let mut buffers = Vec::with_capacity(Operand::COUNT);
        for &operand in Operand::ALL.iter().filter(|operand| operand.is_present(problem)) {
            let payload = match operand {
                Operand::Output => &outputs.output.data,
                Operand::Lse => outputs.lse.as_deref().unwrap_or_default().as_bytes(),
                input => views.bytes(input).unwrap_or_default(),
            };
            let guarded = Guarded::new(payload);
            let device = DeviceBuffer::from_host(&stream, guarded.bytes())?;
            tensors.set(operand, device.address() + guarded.payload_start() as u64);
            let initial = (operand.access() == Access::Write).then_some(guarded);
            buffers.push(Buffer { operand, device, initial });
        }
        tensors.validate(problem)?;
        Ok(Self { plan: plan.clone(), stream, buffers, tensors })
    }

    /// The problem of the plan.
    pub fn problem(&self) -> &Problem {
        self.plan.problem().expect("a plan of attention")
    }

    /// The stream that launches and copies go through.
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Puts one launch on the stream.
    pub fn launch(&self) -> Result<(), Error> {
        self.launch_in(None)
    }

    #[expect(unsafe_code, reason = "a launch takes addresses")]
    fn launch_in(&self, workspace: Option<&DeviceBuffer>) -> Result<(), Error> {
        let tensors = self.tensors.with_workspace(workspace.map_or(0, DeviceBuffer::address));
        // SAFETY: the addresses are those of this value's own buffers, which hold the whole tensors, as `new` checked,
        // and are apart from each other; whatever else touches them goes through the same stream. The stream is one of
        // the plan's context, and `drop` waits for it. Each graph owns its workspace.
        unsafe { self.plan.launch(&self.stream, tensors) }
    }

    /// Records `launches` launches, one after another.
    pub fn record(&self, launches: usize) -> Result<BoundGraph<'_>, Error> {
        let workspace = DeviceBuffer::uninitialised(self.stream.context(), self.plan.workspace_bytes())?;
        let record = |_: &Stream| (0..launches).try_for_each(|_| self.launch_in(Some(&workspace)));
        let graph = Graph::capture::<Error>(&self.stream, record)?;
        Ok(BoundGraph { bound: self, graph, _workspace: workspace })
    }

    /// Waits for the launches, and copies outputs and their guard bands back to what they were at first.
    pub fn reset_outputs(&mut self) -> Result<(), Error> {
        for Buffer { device, initial, .. } in &mut self.buffers {
            if let Some(initial) = initial {
                device.copy_from_host(&self.stream, initial.bytes())?;
            }
        }
        Ok(())
    }

    /// Waits for the launches and copies everything to the host; `inputs` are those it was made from.
    pub fn contents(&self, inputs: &Inputs) -> Result<Contents, Error> {
        let problem = self.problem();
        let mut after = vec![Vec::new(); Operand::COUNT];
        let mut outputs = Outputs { output: Tensor::zeros(problem.dtypes().output, 0), ..Outputs::default() };
        let mut guards = Vec::with_capacity(self.buffers.len());
        for Buffer { operand, device, .. } in &self.buffers {
            let guarded = Guarded::from_bytes(device.to_host(&self.stream)?);
            guards.push((operand.name().to_owned(), guarded.check()));
            let payload = guarded.payload();
            match operand {
                Operand::Output => outputs.output.data = payload.to_vec(),
                Operand::Lse => outputs.lse = Some(floats_of(payload)),
                input => after[*input as usize] = payload.to_vec(),
            }
        }
        let inputs = inputs.views().in_other_memory(|operand| &after[operand as usize]).to_owned_inputs();
        Ok(Contents { inputs, outputs, guards })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // The buffers are freed after this; an error of the stream is the context's to remember.
        let _ = self.stream.synchronize();
    }
}

impl BoundGraph<'_> {
    /// Puts the recorded launches on the stream.
    #[expect(unsafe_code, reason = "a graph refers to addresses")]
    pub fn launch(&self) -> Result<(), Error> {
        // SAFETY: what was recorded refers to the buffers and the kernel of `bound`, which is borrowed and goes on
        // owning them; everything else that touches them goes through the same stream.
        Ok(unsafe { self.graph.launch(&self.bound.stream) }?)
    }
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

/// Launches on the stream before the host waits: a full queue would be timed instead of the call.
const QUEUED: usize = 50;

/// Times on the host of so many calls that put launches on a stream.
pub fn host_times(stream: &Stream, launches: usize, launch: impl Fn() -> Result<(), Error>) -> Result<Times, Error> {
    let mut seconds = Vec::with_capacity(launches);
    for index in 0..launches {
        if index % QUEUED == 0 {
            stream.synchronize()?;
        }
        let start = Instant::now();
        launch()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    stream.synchronize()?;
    Ok(Times { seconds })
}

/// A kernel that does nothing, without parameters: its launch is the floor of every other.
#[derive(Debug)]
pub struct EmptyKernel {
    kernel: Arc<Kernel>,
    launch: Launch,
    stream: Stream,
}

impl EmptyKernel {
    /// The kernel on a GPU, with a stream of its own.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let context =
            device.context().ok_or_else(|| Error::NotOnCuda { call: "launch", device: device.to_string() })?;
        let kernel = Builder::new("flashcore_empty", 32).finish().verify(context.device().arch()?);
        let kernel = kernel.expect("a kernel without an instruction breaks no rule");
        let cache = Arc::new(KernelCache::open(CacheOptions::default()));
        let kernel = Kernels::new(context, cache, JitOptions::default()).load(&kernel)?;
        let launch = kernel.prepare([1, 1, 1], &[])?;
        Ok(Self { kernel, launch, stream: Stream::new(context)? })
    }

    /// The stream that it is launched on.
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Puts one launch on the stream.
    #[expect(unsafe_code, reason = "launches a kernel that touches no memory")]
    pub fn launch(&self) -> Result<(), Error> {
        // SAFETY: prepared by this kernel, which touches no memory, for a stream of its context.
        Ok(unsafe { self.kernel.launch(&self.stream, &self.launch) }?)
    }
}
