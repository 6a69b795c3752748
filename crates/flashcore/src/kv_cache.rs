//! Plans of attention with a growing KV cache: append and attention, in one launch or two.

#[cfg(feature = "cuda")]
use std::env;
use std::fmt;

use flashcore_problem::{KvCacheInputs, KvCacheOutputs, KvCacheProblem};

use crate::device::Device;
#[cfg(feature = "cuda")]
use crate::device::Kind;
#[cfg(feature = "cuda")]
use crate::gpu::{Gpu, GpuKvCache};
#[cfg(feature = "cuda")]
use crate::process::CUDA;
#[cfg(feature = "cuda")]
use crate::{AppendPolicy, KvCacheTensors, StreamRef};
use crate::{Error, Plan, PlanOptions, Reason, Report, Unsupported};

/// Attention with a KV cache that grows (`flash_attn_with_kvcache`) on a device, ready to be run any number of times, from
/// any thread. See [`KvCacheProblem`].
///
/// ```
/// use flashcore::{DType, Device, InputViews, KvCacheInputs, KvCacheOutputs, KvCachePlan, KvCacheProblem, OutputViews, Problem};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // One sequence with one head of two columns, room for four keys, and one new key for each step.
/// let attention = Problem::new(1, 1, 1, 2, DType::F32).with_key_length(4);
/// let plan = KvCachePlan::new(&KvCacheProblem::new(attention, 1), &Device::cpu())?;
/// let (mut keys, mut values, mut output) = ([f32::NAN; 8], [f32::NAN; 8], [0.0_f32; 2]);
/// for (step, value) in [[1.0_f32, 2.0], [3.0, 6.0]].iter().enumerate() {
///     let lengths = [step as u32];
///     let inputs = InputViews::new(&[0.0_f32, 0.0], &[5.0_f32, 7.0], value).with_seqused_k(&lengths);
///     let outputs = KvCacheOutputs::new(&mut keys, &mut values, OutputViews::new(&mut output));
///     plan.run(&KvCacheInputs::new(inputs), outputs)?;
/// }
/// assert_eq!((output, &values[..4]), ([2.0, 4.0], &[1.0, 2.0, 3.0, 6.0][..]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct KvCachePlan {
    problem: KvCacheProblem,
    device: Device,
    report: Report,
    #[cfg(feature = "cuda")]
    gpu: Option<GpuKvCache>,
    /// Every reason why the append is not inside of the attention launch.
    #[cfg(feature = "cuda")]
    not_fused: Vec<Reason>,
}

/// Keeps the append out of the attention launch where it is `off`.
#[cfg(feature = "cuda")]
const FUSED_APPEND_VARIABLE: &str = "FLASHCORE_FUSED_APPEND";

impl KvCachePlan {
    /// A plan for `problem` on `device`, or every reason against it. On a GPU this compiles the kernels, if neither this
    /// process nor the cache on disk has them.
    pub fn new(problem: &KvCacheProblem, device: &Device) -> Result<Self, Unsupported> {
        Self::with_options(problem, device, PlanOptions::default())
    }

    /// [`new`](Self::new) with options of the attention.
    pub fn with_options(problem: &KvCacheProblem, device: &Device, options: PlanOptions) -> Result<Self, Unsupported> {
        let errors: Vec<_> = problem.errors().into_iter().map(Reason::Problem).collect();
        if !errors.is_empty() {
            return Err(Unsupported::new(errors));
        }
        #[cfg(feature = "cuda")]
        if let Kind::Cuda(gpu) = &device.0 {
            CUDA.check().map_err(|forked| Unsupported::new(vec![Reason::Forked(forked)]))?;
            return Self::on_gpu(problem, device, gpu, options);
        }
        let report = Plan::with_options(&problem.attended(), device, options)?.report().clone();
        Ok(Self {
            problem: problem.clone(),
            device: device.clone(),
            report,
            #[cfg(feature = "cuda")]
            gpu: None,
            #[cfg(feature = "cuda")]
            not_fused: Vec::new(),
        })
    }

    /// The append inside of the attention launch where that is wanted and there is a kernel for it, else ahead of it.
    #[cfg(feature = "cuda")]
    fn on_gpu(problem: &KvCacheProblem, device: &Device, gpu: &Gpu, options: PlanOptions) -> Result<Self, Unsupported> {
        let plan = |report, launches, not_fused| Self {
            problem: problem.clone(),
            device: device.clone(),
            report,
            gpu: Some(launches),
            not_fused,
        };
        let is_off = options.append == AppendPolicy::Separate
            || options.append == AppendPolicy::Environment
                && env::var(FUSED_APPEND_VARIABLE).is_ok_and(|value| value == "off");
        let mut not_fused = Vec::new();
        if !is_off {
            match gpu.fused_kv_cache(problem, options) {
                Ok((launches, kernel)) => {
                    let report = Report { kernel: Some(kernel), ..Report::new(&problem.attention, device) };
                    return Ok(plan(report, launches, not_fused));
                }
                Err(reasons) if options.append == AppendPolicy::Fused => return Err(Unsupported::new(reasons)),
                Err(reasons) => not_fused = reasons,
            }
        }
        let mut attention = Plan::with_options(&problem.attended(), device, options)?;
        let launches = gpu.separate_kv_cache(problem, attention.executor().cloned()).map_err(Unsupported::new)?;
        attention.report_workspace(launches.workspace_bytes());
        Ok(plan(attention.report().clone(), launches, not_fused))
    }

    /// The problem.
    pub const fn problem(&self) -> &KvCacheProblem {
        &self.problem
    }

    /// The device.
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Report on the kernel of the attention: where it came from, how long that took.
    pub const fn report(&self) -> &Report {
        &self.report
    }

    /// True if the append is inside of the attention launch, false if it is a launch of its own, or on the CPU.
    #[cfg(feature = "cuda")]
    pub fn is_fused(&self) -> bool {
        self.gpu.as_ref().is_some_and(GpuKvCache::is_fused)
    }

    /// Every reason why the append is not inside of the attention launch; empty where it is, where that was not wanted,
    /// and on the CPU.
    #[cfg(feature = "cuda")]
    pub fn reasons_against_fusing(&self) -> &[Reason] {
        &self.not_fused
    }

    /// Bytes of workspace: device memory that the kernels of one launch use among themselves, for lengths, the rotated
    /// query and partial results. As for [`Plan::workspace_bytes`];
    /// [`DeviceTensors::with_workspace`](crate::DeviceTensors::with_workspace) of the attention brings one.
    #[cfg(feature = "cuda")]
    pub fn workspace_bytes(&self) -> usize {
        self.gpu.as_ref().map_or(0, GpuKvCache::workspace_bytes)
    }

    /// Appends and attends tensors in the host's memory, and returns when caches and outputs are there. Everything is
    /// checked first; on such an error nothing is written. On a GPU this copies everything there and back: convenient, not
    /// fast.
    #[cfg_attr(
        not(any(feature = "cpu", feature = "cuda")),
        expect(clippy::needless_pass_by_value, reason = "backends consume it")
    )]
    pub fn run(&self, inputs: &KvCacheInputs<'_>, outputs: KvCacheOutputs<'_>) -> Result<(), Error> {
        self.problem.validate_views(inputs, &outputs)?;
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            CUDA.check()?;
            return gpu.run(&self.problem, inputs, outputs);
        }
        #[cfg(feature = "cpu")]
        return flashcore_cpu::kv_cache(&self.problem, inputs, outputs).map_err(Error::from);
        #[cfg(not(feature = "cpu"))]
        Err(Error::NotBuilt { backend: "cpu" })
    }

    /// Puts the kernels on the caller's stream, on tensors that lie on the GPU, and returns before they have finished.
    /// Nothing is waited for, and a launch can be captured into a CUDA graph. Device memory is allocated as for
    /// [`Plan::launch`]. Lengths, offsets and tables are read when the kernels run: new keys without a row in the cache are
    /// skipped, everything else is clamped.
    ///
    /// # Safety
    ///
    /// From the launch until it has finished on the stream (and for a captured launch, whenever the graph is executed):
    ///
    /// * each address is that of device memory of this plan's device that holds the whole tensor, as far as the
    ///   problem's strides reach;
    /// * nobody writes what is read, and nobody uses output, log-sum-exp or the rows of the caches that are written;
    /// * no element that is written lies where another tensor has one;
    /// * a workspace that the tensors bring has [`workspace_bytes`](Self::workspace_bytes) bytes, and nobody else uses it;
    /// * of the executable graphs made from one captured launch, one is executed at a time: they share outputs and workspace;
    /// * a raw stream is a stream of the primary context of this plan's device, or null for the default stream.
    ///
    /// The plan may be dropped earlier than that only if the stream has finished, or if the graph is not executed again.
    #[cfg(feature = "cuda")]
    pub unsafe fn launch<'a>(&self, stream: impl Into<StreamRef<'a>>, tensors: KvCacheTensors) -> Result<(), Error> {
        let (Some(gpu), Kind::Cuda(device)) = (&self.gpu, &self.device().0) else {
            return Err(Error::NotOnCuda { call: "launch", device: self.device().to_string() });
        };
        CUDA.check()?;
        // SAFETY: the caller promises what the kernels need of addresses and stream.
        unsafe { stream.into().with(device.context(), |stream| gpu.launch(&self.problem, stream, &tensors)) }
    }
}

impl fmt::Debug for KvCachePlan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("KvCachePlan").field("problem", &self.problem).finish_non_exhaustive()
    }
}
