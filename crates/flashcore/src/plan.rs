//! Plans: from a problem and a device to something that can be run.

use std::fmt;

#[cfg(feature = "cuda")]
use flashcore_cuda::Stream;
#[cfg(feature = "cuda")]
use flashcore_kernels::Config;
use flashcore_problem::{InputViews, OutputViews, Problem};

use crate::device::{Device, Kind};
#[cfg(feature = "cuda")]
use crate::gpu::{Executor, Prepared, SelfCheckPolicy, check_lengths};
#[cfg(feature = "cpu")]
use crate::host;
#[cfg(feature = "cuda")]
use crate::process::CUDA;
#[cfg(feature = "cuda")]
use crate::{DeviceTensors, StreamRef};
use crate::{Error, Operation, Reason, Report, Unsupported};

/// The widest rows for which the CPU backend sets tiles aside: 64 rows of these are 16 MiB.
#[cfg(feature = "cpu")]
const MAX_CPU_COLUMNS: usize = 1 << 16;

/// An operation on a device, ready to be run any number of times, from any thread.
///
/// On a GPU it holds the compiled kernels. Attention:
///
/// ```
/// use flashcore::{DType, Device, InputViews, OutputViews, Plan, Problem};
///
/// # fn main() -> Result<(), flashcore::Error> {
/// let plan = Plan::new(&Problem::new(1, 1, 1, 2, DType::F32), &Device::cpu())?;
/// let mut output = [0.0_f32; 2];
/// plan.run(InputViews::new(&[0.0_f32; 2], &[1.0_f32; 2], &[3.0_f32, 4.0]), OutputViews::new(&mut output))?;
/// assert_eq!(output, [3.0, 4.0]);
/// # Ok(())
/// # }
/// ```
///
/// An append to a KV cache, by slot:
///
/// ```
/// use flashcore::{AppendProblem, DType, Device, InputViews, OutputViews, Plan};
///
/// # fn main() -> Result<(), flashcore::Error> {
/// // Three tokens with one head of two columns, into two pages of two rows; the second is skipped.
/// let plan = Plan::new(&AppendProblem::new(3, 1, 2, DType::F32, 2, 2), &Device::cpu())?;
/// let (key, value) = (vec![1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], vec![0.5_f32; 6]);
/// let (mut keys, mut values) = (vec![0.0_f32; 8], vec![0.0_f32; 8]);
/// let inputs = InputViews::default().with_new_key(&key).with_new_value(&value).with_slot_mapping(&[3, -1, 0]);
/// plan.run(inputs, OutputViews::default().with_key_cache(&mut keys).with_value_cache(&mut values))?;
/// assert_eq!(keys, [5.0, 6.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0]);
/// # Ok(())
/// # }
/// ```
///
/// An append by sequence and attention (`flash_attn_with_kvcache`):
///
/// ```
/// use flashcore::{DType, Device, InputViews, KvCacheProblem, OutputViews, Plan, Problem};
///
/// # fn main() -> Result<(), flashcore::Error> {
/// // One sequence with one head of two columns, room for four keys, and one new key for each step.
/// let attention = Problem::new(1, 1, 1, 2, DType::F32).with_key_length(4);
/// let plan = Plan::new(&KvCacheProblem::new(attention, 1), &Device::cpu())?;
/// let (mut keys, mut values, mut output) = ([f32::NAN; 8], [f32::NAN; 8], [0.0_f32; 2]);
/// for (step, value) in [[1.0_f32, 2.0], [3.0, 6.0]].iter().enumerate() {
///     let lengths = [step as u32];
///     let inputs = InputViews::default().with_query(&[0.0_f32, 0.0]).with_seqused_k(&lengths);
///     let outputs = OutputViews::new(&mut output).with_key_cache(&mut keys).with_value_cache(&mut values);
///     plan.run(inputs.with_new_key(&[5.0_f32, 7.0]).with_new_value(value), outputs)?;
/// }
/// assert_eq!((output, &values[..4]), ([2.0, 4.0], &[1.0, 2.0, 3.0, 6.0][..]));
/// # Ok(())
/// # }
/// ```
///
/// A merge of partial results:
///
/// ```
/// use flashcore::{DType, Device, InputViews, MergeProblem, OutputViews, Plan};
///
/// # fn main() -> Result<(), flashcore::Error> {
/// // One token with one head of two columns; both parts have the same LSE.
/// let plan = Plan::new(&MergeProblem::new(2, 1, 1, 2, DType::F32), &Device::cpu())?;
/// let (outputs, lses) = ([[1.0_f32, 2.0], [3.0, 6.0]], [[0.0_f32], [0.0]]);
/// let (outputs, lses) = (outputs.each_ref().map(Into::into), lses.each_ref().map(Into::into));
/// let (mut output, mut lse) = ([0.0_f32; 2], [0.0_f32]);
/// let inputs = InputViews::default().with_part_outputs(&outputs).with_part_lses(&lses);
/// plan.run(inputs, OutputViews::new(&mut output).with_lse(&mut lse))?;
/// assert_eq!((output, lse), ([2.0, 4.0], [std::f32::consts::LN_2]));
/// # Ok(())
/// # }
/// ```
///
/// Attention over more keys, merged into a state:
///
/// ```
/// use flashcore::{DType, Device, InputViews, Operation, OutputViews, Plan, Problem};
///
/// # fn main() -> Result<(), flashcore::Error> {
/// // One row and one key at a time, of equal scores: the output is the mean of the values so far.
/// let operation = Operation::Continue(Problem::new(1, 1, 1, 2, DType::F32).with_lse(true));
/// let plan = Plan::new(operation, &Device::cpu())?;
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
pub struct Plan {
    operation: Operation,
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
    /// Launches of an append with attention; other plans do not look at it.
    #[cfg(feature = "cuda")]
    pub append: AppendPolicy,
}

/// Launches of an append with attention on a GPU: the append inside of the attention launch, or ahead of it.
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

    /// Sets the launches of an append with attention.
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

/// Every reason against an operation on `device`, without compiling anything: what is left for [`Plan::new`] to refuse is what
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
pub fn supports(operation: impl Into<Operation>, device: &Device) -> Result<(), Unsupported> {
    let (operation, options) = (operation.into(), PlanOptions::default());
    match &device.0 {
        Kind::Cpu => cpu_backend(&operation, options).map(|_| ()),
        #[cfg(feature = "cuda")]
        Kind::Cuda(gpu) => gpu.plan(&operation, options).map(|_| ()),
    }
    .map_err(Unsupported::new)
}

impl Plan {
    /// A plan for an operation on `device`, or every reason against it.
    ///
    /// There is no slow path beneath a plan: what the fast kernels of a device do not have is a reason here. On a GPU this
    /// generates the kernels, and compiles them if neither this process nor the cache on disk has them. A kernel depends
    /// on element type, head dimensions, which features are on and how strides are aligned, not on lengths, batch or
    /// heads: a plan for those compiles at most another config for another size, and costs microseconds if that is loaded.
    pub fn new(operation: impl Into<Operation>, device: &Device) -> Result<Self, Unsupported> {
        Self::with_options(operation, device, PlanOptions::default())
    }

    /// [`new`](Self::new) with options.
    pub fn with_options(
        operation: impl Into<Operation>,
        device: &Device,
        options: PlanOptions,
    ) -> Result<Self, Unsupported> {
        let operation = operation.into();
        let report = Report::new(&operation, device);
        let (backend, report) = match &device.0 {
            Kind::Cpu => (cpu_backend(&operation, options).map_err(Unsupported::new)?, report),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => {
                CUDA.check().map_err(|forked| Unsupported::new(vec![Reason::Forked(forked)]))?;
                let Prepared { executor, kernel, is_fused, not_fused } =
                    gpu.prepare(&operation, options).map_err(Unsupported::new)?;
                (Backend::Cuda(Box::new(executor)), Report { kernel, is_fused, not_fused, ..report })
            }
        };
        Ok(Self { operation, device: device.clone(), backend, report })
    }

    /// A plan with the GPU kernel of this config, or every reason against it.
    #[cfg(feature = "cuda")]
    pub fn with_config(operation: impl Into<Operation>, device: &Device, config: Config) -> Result<Self, Unsupported> {
        Self::with_options(operation, device, PlanOptions::default().with_config(config))
    }

    /// The operation.
    pub const fn operation(&self) -> &Operation {
        &self.operation
    }

    /// The problem of attention, where the operation has attention.
    pub const fn problem(&self) -> Option<&Problem> {
        self.operation.problem()
    }

    /// The device.
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Report: the kernel, where it came from, how long that took.
    pub const fn report(&self) -> &Report {
        &self.report
    }

    /// Bytes of workspace: device memory that the kernels of one launch use among themselves, for split-KV partial
    /// results, block masks, and what an append or a continuation hands to attention or has from it. Each stream has one for
    /// all plans, as large as the largest that it launched, until the last of those plans is dropped; [`DeviceTensors`] can
    /// bring another, and does for a captured launch.
    #[cfg(feature = "cuda")]
    pub fn workspace_bytes(&self) -> usize {
        match &self.backend {
            Backend::Cuda(executor) => executor.workspace_bytes(),
            #[cfg(feature = "cpu")]
            Backend::Cpu => 0,
        }
    }

    /// Computes the operation on tensors in the host's memory, and returns when the outputs are there.
    ///
    /// Takes [`InputViews`] and [`OutputViews`] over slices, or owned [`Inputs`](crate::verify::Inputs) and
    /// [`Outputs`](crate::verify::Outputs) by reference. Length, element type and everything else is checked; on such an error
    /// the outputs are as they were. What lies between the rows of a strided output stays as it was.
    ///
    /// On a GPU this allocates device memory, copies the tensors there, launches and copies the outputs back: convenient,
    /// not fast. [`launch`](Self::launch) is for tensors that are on the GPU already.
    pub fn run<'a>(&self, inputs: impl Into<InputViews<'a>>, outputs: impl Into<OutputViews<'a>>) -> Result<(), Error> {
        #[cfg_attr(not(any(feature = "cpu", feature = "cuda")), expect(unused_variables, reason = "no plan exists"))]
        #[cfg_attr(not(feature = "cuda"), expect(unused_mut, reason = "the CPU takes them whole"))]
        let (inputs, mut outputs) = (inputs.into(), outputs.into());
        match self.backend {
            #[cfg(feature = "cpu")]
            Backend::Cpu => host::run(&self.operation, &inputs, outputs),
            #[cfg(feature = "cuda")]
            Backend::Cuda(ref executor) => {
                self.operation.validate(&inputs, &mut outputs)?;
                CUDA.check()?;
                executor.run(&self.operation, &inputs, &mut outputs)
            }
        }
    }

    /// Puts the kernels on the caller's stream, on tensors that lie on the GPU, and returns before they have finished.
    ///
    /// A plan can be launched from any threads, on any streams, at the same time. Nothing is waited for, and a launch can
    /// be captured into a CUDA graph. Device memory is allocated only where [`workspace_bytes`](Self::workspace_bytes) is
    /// not 0, the tensors bring no workspace, and the stream has none as large. Then a smaller one is freed, and from the 33rd
    /// stream on that of another stream, which waits for the device. A captured launch brings its workspace, or is refused: a
    /// graph can be executed on any stream, beside anything. Addresses that [`DeviceTensors::validate`] refuses are an error,
    /// and nothing is launched. Errors that happen on the GPU surface at a later call, usually a wait for the stream.
    ///
    /// Lengths, offsets, tables, slots and positions are read when the kernels run. New keys without a row in the cache and
    /// slots out of range are skipped, everything else is clamped.
    ///
    /// # Safety
    ///
    /// From the launch until it has finished on the stream (and for a captured launch, whenever the graph is executed):
    ///
    /// * each address is that of device memory of this plan's device that holds the whole tensor, as far as the
    ///   problem's strides reach for the tokens of the launch;
    /// * nothing else writes the inputs, and nothing else uses the outputs or the rows of the caches that are written;
    /// * no element that is written lies where another tensor has one, but for a query output that is the query;
    /// * a workspace that the tensors bring has [`workspace_bytes`](Self::workspace_bytes) bytes, and nothing else uses it;
    /// * of the executable graphs made from one captured launch, one is executed at a time: they share outputs and workspace;
    /// * a raw stream is a stream of the primary context of this plan's device, or null for the default stream.
    ///
    /// The plan may be dropped earlier than that only if the stream has finished, or if the graph is not executed again.
    #[cfg(feature = "cuda")]
    pub unsafe fn launch<'a>(&self, stream: impl Into<StreamRef<'a>>, tensors: DeviceTensors) -> Result<(), Error> {
        let launch = |executor: &Executor, stream: &Stream| {
            if check_lengths::is_on() {
                // SAFETY: the contract of this function.
                unsafe { check_lengths::check(&self.operation, stream, &tensors) }?;
            }
            // SAFETY: the contract of this function.
            Ok(unsafe { executor.launch(stream, tensors.values()) }?)
        };
        // SAFETY: the contract of this function.
        unsafe { self.on_stream("launch", stream.into(), &tensors, launch) }
    }

    /// Reads lengths, offsets, tables, slots and positions of a launch back from the GPU and checks them, to explain wrong
    /// results: the errors are those that [`run`](Self::run) has for tensors of the host, and a slot of two tokens. A launch
    /// skips or clamps instead.
    ///
    /// They are read in stream order, and this waits for them: a debug aid. It is refused while the stream captures a graph;
    /// call it before the capture, and before a replay. With `FLASHCORE_CHECK_LENGTHS=1` in the environment every launch
    /// does it first, and is not put on the stream if anything is wrong.
    ///
    /// # Safety
    ///
    /// As for [`launch`](Self::launch), of which nothing but these operands is read.
    #[cfg(feature = "cuda")]
    pub unsafe fn check_lengths<'a>(
        &self,
        stream: impl Into<StreamRef<'a>>,
        tensors: DeviceTensors,
    ) -> Result<(), Error> {
        // SAFETY: the contract of this function.
        let check = |_: &Executor, stream: &Stream| unsafe { check_lengths::check(&self.operation, stream, &tensors) };
        // SAFETY: the contract of this function.
        unsafe { self.on_stream("check_lengths", stream.into(), &tensors, check) }
    }

    /// Checks device tensors, and calls `run` with the kernels and the stream.
    ///
    /// # Safety
    ///
    /// As for [`launch`](Self::launch).
    #[cfg(feature = "cuda")]
    unsafe fn on_stream(
        &self,
        call: &'static str,
        stream: StreamRef<'_>,
        tensors: &DeviceTensors,
        run: impl FnOnce(&Executor, &Stream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (Backend::Cuda(executor), Kind::Cuda(gpu)) = (&self.backend, &self.device.0) else {
            return Err(Error::NotOnCuda { call, device: self.device.to_string() });
        };
        tensors.check(&self.operation, |operand| executor.alignment(operand))?;
        CUDA.check()?;
        // SAFETY: the contract of this function.
        unsafe { stream.with(gpu.context(), |stream| run(executor, stream)) }
    }
}

/// The CPU, or every reason against an operation there.
#[cfg_attr(not(all(feature = "cpu", feature = "cuda")), expect(unused_variables, reason = "there are no options"))]
fn cpu_backend(operation: &Operation, options: PlanOptions) -> Result<Backend, Vec<Reason>> {
    let mut reasons: Vec<Reason> = operation.errors().into_iter().map(Reason::Problem).collect();
    #[cfg(not(feature = "cpu"))]
    {
        reasons.push(Reason::NotBuilt { backend: "cpu" });
        Err(reasons)
    }
    #[cfg(feature = "cpu")]
    {
        let dims = operation.problem().map(|problem| [problem.head_dim, problem.value_dim]).unwrap_or_default();
        for (argument, value) in ["head_dim", "value_dim"].into_iter().zip(dims) {
            if value > MAX_CPU_COLUMNS {
                reasons.push(Reason::TooWideForCpu { argument, value, limit: MAX_CPU_COLUMNS });
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
