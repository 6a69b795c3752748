//! Plans: from a problem and a device to something that can be run.

use std::fmt;

#[cfg(feature = "cuda")]
use flashcore_cuda::{CudaError, Stream};
#[cfg(feature = "cuda")]
use flashcore_kernels::Config;
use flashcore_problem::{InputViews, OutputViews, Problem, Validated};

use crate::device::{Device, Kind};
#[cfg(feature = "cuda")]
use crate::gpu::{Executor, Prepared, SelfCheckPolicy, check_lengths};
#[cfg(feature = "cuda")]
use crate::process::CUDA;
#[cfg(feature = "cuda")]
use crate::{DeviceTensors, StreamRef};
use crate::{Error, Reason, Report, Unsupported};

/// The widest rows for which the CPU backend sets tiles aside: 64 rows of these are 16 MiB.
#[cfg(feature = "cpu")]
const MOST_CPU_COLUMNS: usize = 1 << 16;

/// A problem on a device, ready to be run any number of times, from any thread.
///
/// On a GPU it holds the compiled kernels.
#[derive(Clone)]
pub struct Plan {
    problem: Problem,
    device: Device,
    backend: Backend,
    report: Report,
}

#[derive(Clone)]
enum Backend {
    #[cfg(feature = "cpu")]
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(Box<Executor>),
    /// Not a single output row: there is nothing to launch.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "nothing is launched"))]
    Nothing,
}

/// Options of [`Plan::with_options`].
///
/// ```
/// use flashcore::{Config, PlanOptions, SelfCheckPolicy};
///
/// let options = PlanOptions::default().with_config(Config::ampere()).with_self_check(SelfCheckPolicy::On);
/// assert!(options.config.is_some());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// The GPU kernel to use; `None` for the default of the device. By name: `"ampere".parse()`.
    #[cfg(feature = "cuda")]
    pub config: Option<Config>,
    /// Policy of the self-check, which runs a kernel that is new to this driver once before it is trusted.
    #[cfg(feature = "cuda")]
    pub self_check: SelfCheckPolicy,
    /// Launches of a [`KvCachePlan`](crate::KvCachePlan); other plans do not look at it.
    #[cfg(feature = "cuda")]
    pub append: AppendPolicy,
}

/// Launches of a [`KvCachePlan`](crate::KvCachePlan) on a GPU: the append inside of the attention launch, or ahead of it.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AppendPolicy {
    /// Inside where a kernel has that for the problem, unless the environment variable `FLASHCORE_FUSED_APPEND` is `off`.
    #[default]
    Environment,
    /// Inside, or a plan is refused with the reasons.
    Fused,
    /// Ahead, in a launch of its own.
    Separate,
}

#[cfg(feature = "cuda")]
impl PlanOptions {
    /// Chooses the GPU kernel; `None` for the default of the device.
    #[must_use]
    pub fn with_config(mut self, config: impl Into<Option<Config>>) -> Self {
        self.config = config.into();
        self
    }

    /// Sets the launches of a [`KvCachePlan`](crate::KvCachePlan).
    #[must_use]
    pub const fn with_append(mut self, append: AppendPolicy) -> Self {
        self.append = append;
        self
    }

    /// Sets the policy of the self-check.
    #[must_use]
    pub const fn with_self_check(mut self, self_check: SelfCheckPolicy) -> Self {
        self.self_check = self_check;
        self
    }
}

/// Every reason against `problem` on `device`, without compiling anything: what is left for [`Plan::new`] to refuse is what
/// the driver says.
///
/// ```
/// use flashcore::{DType, Device, Problem, ProblemError, Reason, supports};
///
/// let mut problem = Problem::new(2, 8, 1024, 64, DType::F16);
/// assert!(supports(&problem, &Device::cpu()).is_ok());
///
/// problem.key_heads = 3;
/// problem.scale = f64::NAN;
/// let reasons = supports(&problem, &Device::cpu()).unwrap_err();
/// assert_eq!(reasons.len(), 2);
/// assert_eq!(reasons[0], Reason::Problem(ProblemError::HeadsNotMultiple { query_heads: 8, key_heads: 3 }));
/// assert_eq!(reasons[1].to_string(), "scale is NaN; it must be finite, usually 1 / sqrt(head_dim)");
/// ```
pub fn supports(problem: &Problem, device: &Device) -> Result<(), Unsupported> {
    let options = PlanOptions::default();
    match &device.0 {
        Kind::Cpu => cpu_backend(problem, options).map(|_| ()),
        #[cfg(feature = "cuda")]
        Kind::Cuda(gpu) => gpu.supports(problem, options),
    }
    .map_err(Unsupported::new)
}

impl Plan {
    /// A plan for `problem` on `device`, or every reason against it.
    ///
    /// There is no slow path beneath a plan: what the fast kernels of a device do not have is a reason here. On a GPU this
    /// generates the kernels, and compiles them if neither this process nor the cache on disk has them. A kernel depends
    /// on element type, head dimensions, which features are on and how strides are aligned, not on lengths, batch or
    /// heads: a plan for those compiles at most another config for another size, and costs microseconds if that is loaded.
    pub fn new(problem: &Problem, device: &Device) -> Result<Self, Unsupported> {
        Self::with_options(problem, device, PlanOptions::default())
    }

    /// [`new`](Self::new) with options.
    pub fn with_options(problem: &Problem, device: &Device, options: PlanOptions) -> Result<Self, Unsupported> {
        match &device.0 {
            Kind::Cpu => {
                let backend = cpu_backend(problem, options).map_err(Unsupported::new)?;
                let report = Report::new(problem, device);
                Ok(Self { problem: problem.clone(), device: device.clone(), backend, report })
            }
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => {
                CUDA.check().map_err(|forked| Unsupported::new(vec![Reason::Forked(forked)]))?;
                let (backend, kernel) = match gpu.prepare(problem, options).map_err(Unsupported::new)? {
                    Some(Prepared { executor, kernel }) => (Backend::Cuda(Box::new(executor)), Some(kernel)),
                    None => (Backend::Nothing, None),
                };
                let report = Report { kernel, ..Report::new(problem, device) };
                Ok(Self { problem: problem.clone(), device: device.clone(), backend, report })
            }
        }
    }

    /// A plan with the GPU kernel of this config, or every reason against it.
    #[cfg(feature = "cuda")]
    pub fn with_config(problem: &Problem, device: &Device, config: Config) -> Result<Self, Unsupported> {
        Self::with_options(problem, device, PlanOptions::default().with_config(config))
    }

    /// The problem.
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The device.
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Report: the kernel, where it came from, how long that took.
    pub const fn report(&self) -> &Report {
        &self.report
    }

    /// Bytes of workspace: device memory that the kernels of one launch use among themselves, for split-KV partial results
    /// and block masks. Each stream has one for all plans, as large as the largest that it launched, until the last of those
    /// plans is dropped; [`DeviceTensors`] can bring another, and does for a captured launch.
    #[cfg(feature = "cuda")]
    pub fn workspace_bytes(&self) -> usize {
        self.executor().map_or(0, Executor::workspace_bytes)
    }

    /// Reports a workspace of so many bytes, for a plan that launches more than its attention.
    #[cfg(feature = "cuda")]
    pub(crate) fn report_workspace(&mut self, bytes: usize) {
        if let Some(kernel) = &mut self.report.kernel {
            kernel.workspace_bytes = bytes as u64;
        }
    }

    /// The kernels on a GPU; `None` on the CPU, and where there is nothing to launch.
    #[cfg(feature = "cuda")]
    pub(crate) fn executor(&self) -> Option<&Executor> {
        match &self.backend {
            Backend::Cuda(executor) => Some(executor),
            #[cfg(feature = "cpu")]
            Backend::Cpu => None,
            Backend::Nothing => None,
        }
    }

    /// Computes attention of tensors in the host's memory, and returns when the outputs are there.
    ///
    /// Takes [`InputViews`] and [`OutputViews`] over slices, or owned [`Inputs`](crate::verify::Inputs) and
    /// [`Outputs`](crate::verify::Outputs) by reference. Length, element type and everything else is checked; on such an error
    /// the outputs are as they were. What lies between the rows of a strided output stays as it was.
    ///
    /// On a GPU this allocates device memory, copies the inputs there, launches and copies the outputs back: convenient,
    /// not fast. [`launch`](Self::launch) is for tensors that are on the GPU already.
    pub fn run<'a>(&self, inputs: impl Into<InputViews<'a>>, outputs: impl Into<OutputViews<'a>>) -> Result<(), Error> {
        let call = Validated::new(&self.problem, inputs.into(), outputs.into())?;
        match &self.backend {
            #[cfg(feature = "cpu")]
            Backend::Cpu => Ok(flashcore_cpu::attend_validated(flashcore_cpu::Level::default_level()?, call)?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(executor) => {
                CUDA.check()?;
                let (problem, inputs, outputs) = call.into_parts();
                Ok(executor.run(problem, &inputs, outputs)?)
            }
            Backend::Nothing => Ok(()),
        }
    }

    /// Puts the kernel on the caller's stream, on tensors that lie on the GPU, and returns before it has finished.
    ///
    /// A plan can be launched from any threads, on any streams, at the same time. Nothing is waited for, and a launch can
    /// be captured into a CUDA graph. Device memory is allocated only where [`workspace_bytes`](Self::workspace_bytes) is
    /// not 0, the tensors bring no workspace, and the stream has none as large. Then a smaller one is freed, and from the 33rd
    /// stream on that of another stream, which waits for the device. A captured launch brings its workspace, or is refused: a
    /// graph can be executed on any stream, beside anything. Addresses that [`DeviceTensors::validate`] refuses are an error, and nothing is
    /// launched. Errors that happen on the GPU surface at a later call, usually a wait for the stream.
    ///
    /// # Safety
    ///
    /// From the launch until it has finished on the stream (and for a captured launch, whenever the graph is executed):
    ///
    /// * each address is that of device memory of this plan's device that holds the whole tensor, as far as the
    ///   problem's strides reach;
    /// * nobody writes query, key or value, and nobody reads or writes output or log-sum-exp;
    /// * no element of output or log-sum-exp lies where another tensor has one;
    /// * a workspace that the tensors bring has [`workspace_bytes`](Self::workspace_bytes) bytes, and nobody else uses it;
    /// * of the executable graphs made from one captured launch, one is executed at a time: they share outputs and workspace;
    /// * a raw stream is a stream of the primary context of this plan's device, or null for the default stream.
    ///
    /// The plan may be dropped earlier than that only if the stream has finished, or if the graph is not executed again.
    #[cfg(feature = "cuda")]
    pub unsafe fn launch<'a>(&self, stream: impl Into<StreamRef<'a>>, tensors: DeviceTensors) -> Result<(), Error> {
        // SAFETY: the caller promises what the kernels need of addresses and stream.
        unsafe { self.launch_with(stream.into(), &tensors, |executor, stream| executor.launch(stream, &tensors)) }
    }

    /// Checks what a launch checks, and calls `launch` with the kernels and the stream, if there is anything to launch.
    ///
    /// # Safety
    ///
    /// As for [`launch`](Self::launch).
    #[cfg(feature = "cuda")]
    pub(crate) unsafe fn launch_with(
        &self,
        stream: StreamRef<'_>,
        tensors: &DeviceTensors,
        launch: impl FnOnce(&Executor, &Stream) -> Result<(), CudaError>,
    ) -> Result<(), Error> {
        let (Backend::Cuda(_) | Backend::Nothing, Kind::Cuda(gpu)) = (&self.backend, &self.device.0) else {
            return Err(Error::NotOnCuda { call: "launch", device: self.device.to_string() });
        };
        tensors.check(&self.problem)?;
        let Backend::Cuda(executor) = &self.backend else { return Ok(()) };
        CUDA.check()?;
        let launch = |stream: &Stream| {
            if check_lengths::is_on() {
                // SAFETY: the contract of this function.
                unsafe { check_lengths::check_lengths(&self.problem, stream, tensors) }?;
            }
            Ok(launch(executor, stream)?)
        };
        // SAFETY: the caller promises what the kernel needs of addresses and stream.
        unsafe { stream.with(gpu.context(), launch) }
    }

    /// Reads offsets, lengths and page tables of a launch back from the GPU and checks them, to explain wrong results: the
    /// errors are those that [`run`](Self::run) has for tensors of the host. A launch clamps instead.
    ///
    /// They are read in stream order, and this waits for them: a debug aid. It is refused while the stream captures a graph;
    /// call it before the capture, and before a replay. With `FLASHCORE_CHECK_LENGTHS=1` in the environment every launch
    /// does it first, and is not put on the stream if anything is wrong.
    ///
    /// # Safety
    ///
    /// As for [`launch`](Self::launch), of which nothing but the operands that say where sequences lie is read.
    #[cfg(feature = "cuda")]
    pub unsafe fn check_lengths<'a>(
        &self,
        stream: impl Into<StreamRef<'a>>,
        tensors: DeviceTensors,
    ) -> Result<(), Error> {
        let (Backend::Cuda(_) | Backend::Nothing, Kind::Cuda(gpu)) = (&self.backend, &self.device.0) else {
            return Err(Error::NotOnCuda { call: "check_lengths", device: self.device.to_string() });
        };
        tensors.check(&self.problem)?;
        CUDA.check()?;
        // SAFETY: the caller promises what a launch needs of addresses and stream.
        unsafe {
            stream.into().with(gpu.context(), |stream| check_lengths::check_lengths(&self.problem, stream, &tensors))
        }
    }
}

/// The CPU, or every reason against a problem there.
#[cfg_attr(not(all(feature = "cpu", feature = "cuda")), expect(unused_variables, reason = "there are no options"))]
fn cpu_backend(problem: &Problem, options: PlanOptions) -> Result<Backend, Vec<Reason>> {
    let mut reasons: Vec<Reason> = problem.errors().into_iter().map(Reason::Problem).collect();
    #[cfg(not(feature = "cpu"))]
    {
        reasons.push(Reason::NotBuilt { backend: "cpu" });
        Err(reasons)
    }
    #[cfg(feature = "cpu")]
    {
        for (argument, value) in [("head_dim", problem.head_dim), ("value_dim", problem.value_dim)] {
            if value > MOST_CPU_COLUMNS {
                reasons.push(Reason::TooWideForCpu { argument, value, limit: MOST_CPU_COLUMNS });
            }
        }
        #[cfg(feature = "cuda")]
        reasons.extend(options.config.map(|config| Reason::ConfigOnCpu { config }));
        if reasons.is_empty() { Ok(Backend::Cpu) } else { Err(reasons) }
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Plan").field("report", &self.report).finish_non_exhaustive()
    }
}
