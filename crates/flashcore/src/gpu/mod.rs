//! Plans on a GPU: from a problem to kernels that are loaded, trusted and ready to be launched.

pub(crate) mod check_lengths;
mod device_tensors;
mod executor;
mod self_check;
mod stream;
mod trials;
pub mod tuning;

use std::collections::HashMap;
use std::env;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use flashcore_cuda::cache::{CacheOptions, KernelCache, SelfCheck, Source};
use flashcore_cuda::{Context, CudaError, Driver, JitOptions, Kernel, Kernels, Stream, Workspaces};
use flashcore_kernels::{KernelKey, LaunchPlan, Stage, Target, heuristics};
use flashcore_problem::{KvCacheProblem, Problem, StateMerge};

pub use device_tensors::{DeviceBias, DeviceScale, DeviceTensors, TENSOR_ALIGNMENT};
pub(crate) use executor::Executor;
pub use self_check::SelfCheckPolicy;
pub use stream::StreamRef;

use crate::report::{KernelReport, SelfCheckReport};
use crate::{AppendPolicy, Operation, PlanOptions, Reason};
use trials::Trial;
use tuning::Measured;

/// A GPU that was opened: its context, its kernels, and a stream for tensors of the host.
pub(crate) struct Gpu {
    kernels: Kernels,
    target: Target,
    stream: Stream,
    /// Memory of each stream, for all plans.
    workspaces: Workspaces,
    /// The best configs that `flashcore tune` found here.
    measured: Measured,
    /// The kernels that are loaded, by everything their text depends on: a plan whose kernels are here generates, prints
    /// and compiles nothing.
    loaded: Mutex<HashMap<KernelKey, Arc<Kernel>>>,
}

/// Kernels that are ready to be launched, and what is reported of them.
pub(crate) struct Prepared {
    pub(crate) executor: Executor,
    /// The attention kernel, or else the first.
    pub(crate) kernel: Option<KernelReport>,
    pub(crate) is_fused: bool,
    /// Every reason why an append is not inside of the attention launch that it could be in.
    pub(crate) not_fused: Vec<Reason>,
}

/// A launch plan, and the parts of it that are trusted each after a trial of its own.
pub(crate) struct Planned {
    plan: LaunchPlan,
    /// Launches of each part, in order, with its trial.
    parts: Vec<(usize, Trial)>,
    is_fused: bool,
    not_fused: Vec<Reason>,
}

impl Planned {
    fn new(plan: LaunchPlan, parts: Vec<(usize, Trial)>) -> Self {
        Self { plan, parts, is_fused: false, not_fused: Vec::new() }
    }
}

fn reasons(reasons: Vec<flashcore_kernels::Reason>) -> Vec<Reason> {
    reasons.into_iter().map(Reason::from).collect()
}

fn one(error: CudaError) -> Vec<Reason> {
    vec![Reason::Cuda(error)]
}

impl Gpu {
    /// The GPU with this ordinal: shared by the process, and dropped with the last handle.
    pub(crate) fn open(driver: &'static Driver, ordinal: usize) -> Result<Arc<Self>, CudaError> {
        static OPEN: OnceLock<Mutex<HashMap<usize, Weak<Gpu>>>> = OnceLock::new();
        static CACHE: OnceLock<Arc<KernelCache>> = OnceLock::new();
        let device = driver.device(ordinal)?;
        let arch = device.specific_arch()?;
        let mut open = OPEN.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = open.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(gpu);
        }
        let context = Context::new(&device)?;
        let cache = CACHE.get_or_init(|| Arc::new(KernelCache::open(CacheOptions::default())));
        let gpu = Arc::new(Self {
            kernels: Kernels::new(&context, cache.clone(), JitOptions::default()),
            target: Target::new(arch, device.attributes.num_sms).with_ptx(driver.version().ptx()),
            measured: Measured::load(cache, &context),
            stream: Stream::new(&context)?,
            workspaces: Workspaces::new(context),
            loaded: Mutex::default(),
        });
        open.insert(ordinal, Arc::downgrade(&gpu));
        Ok(gpu)
    }

    pub(crate) const fn context(&self) -> &Context {
        self.kernels.context()
    }

    /// The launch plan of attention; `None` if there is nothing to launch.
    fn attention(&self, problem: &Problem, options: PlanOptions) -> Result<Option<LaunchPlan>, Vec<Reason>> {
        let plan = |config| LaunchPlan::new(problem, config, self.target);
        // A config that was measured here is taken if it still runs the problem: its class may be wider than the kernel.
        let measured = || self.measured.config(problem).and_then(|config| plan(config).ok());
        let planned = match options.config {
            Some(config) => plan(config),
            None => measured().map_or_else(|| plan(heuristics::select(problem, self.target)), Ok),
        };
        planned.map(Some).or_else(|found| {
            // An empty problem is legal; what else is wrong with it is told all the same.
            let not_empty = |reason: &flashcore_kernels::Reason| *reason != flashcore_kernels::Reason::Empty;
            let found = reasons(found.into_iter().filter(not_empty).collect());
            if found.is_empty() { Ok(None) } else { Err(found) }
        })
    }

    /// The launch plan of an operation, or every reason against it that can be told without compiling a kernel.
    pub(crate) fn plan(&self, operation: &Operation, options: PlanOptions) -> Result<Planned, Vec<Reason>> {
        let errors = operation.errors();
        if !errors.is_empty() && !matches!(operation, Operation::Attention(_)) {
            return Err(errors.into_iter().map(Reason::Problem).collect());
        }
        let attention = |problem: &Problem| {
            let plan = self.attention(problem, options)?;
            let part = plan.as_ref().map(|plan| (plan.launches.len(), Trial::attention(problem, plan)));
            Ok::<_, Vec<Reason>>((plan, part))
        };
        match operation {
            Operation::Attention(problem) => {
                let (plan, part) = attention(problem)?;
                Ok(Planned::new(plan.unwrap_or_default(), part.into_iter().collect()))
            }
            Operation::Append(problem) => {
                let plan = LaunchPlan::append(problem, self.target).map_err(reasons)?;
                Ok(Planned::new(plan, vec![(1, Trial::Append(*problem))]))
            }
            Operation::Merge(problem) => {
                let plan = LaunchPlan::merge(problem, self.target).map_err(reasons)?;
                Ok(Planned::new(plan, vec![(1, Trial::Merge(*problem))]))
            }
            Operation::Continue(problem) => {
                let (plan, part) = attention(problem)?;
                let state = StateMerge::of(problem)
                    .map_err(|errors| errors.into_iter().map(Reason::Problem).collect::<Vec<_>>())?;
                let plan = LaunchPlan::continued(problem, plan, self.target).map_err(reasons)?;
                let merges = plan.launches.len() - part.as_ref().map_or(0, |(launches, _)| *launches);
                let merge = (merges > 0).then_some((merges, Trial::InPlace(state.merge)));
                Ok(Planned::new(plan, part.into_iter().chain(merge).collect()))
            }
            Operation::KvCache(problem) => {
                let is_wanted = match options.append {
                    AppendPolicy::Environment => !env::var(FUSED_APPEND_VARIABLE).is_ok_and(|value| value == "off"),
                    AppendPolicy::Fused => true,
                    AppendPolicy::Separate => false,
                };
                let not_fused = match is_wanted.then(|| self.fused(problem, options)) {
                    Some(Ok(planned)) => return Ok(planned),
                    Some(Err(found)) if options.append == AppendPolicy::Fused => return Err(found),
                    Some(Err(found)) => found,
                    None => Vec::new(),
                };
                let (plan, part) = attention(&problem.attended())?;
                let plan = LaunchPlan::kv_cache(problem, plan, self.target).map_err(reasons)?;
                let append = (1, Trial::Sequences(Box::new(problem.clone())));
                let parts = [append].into_iter().chain(part).collect();
                Ok(Planned { not_fused, ..Planned::new(plan, parts) })
            }
        }
    }

    /// The launch plan of attention that appends itself.
    fn fused(&self, problem: &KvCacheProblem, options: PlanOptions) -> Result<Planned, Vec<Reason>> {
        let config = self.attention(&problem.attended(), options).ok().flatten().and_then(|plan| plan.config);
        let config = config.unwrap_or_else(|| heuristics::select(&problem.attention, self.target));
        let plan = LaunchPlan::with_append(problem, config, self.target).map_err(reasons)?;
        let trial = Trial::Fused(Box::new(problem.clone()), config);
        Ok(Planned { is_fused: true, ..Planned::new(plan.clone(), vec![(plan.launches.len(), trial)]) })
    }

    /// The kernels of an operation, ready to be launched.
    pub(crate) fn prepare(&self, operation: &Operation, options: PlanOptions) -> Result<Prepared, Vec<Reason>> {
        let start = Instant::now();
        let planned = self.plan(operation, options)?;
        match self.prepare_plan(&planned, options, start) {
            Err(found) if planned.is_fused && options.append == AppendPolicy::Environment => {
                let options = options.with_append(AppendPolicy::Separate);
                Ok(Prepared { not_fused: found, ..self.prepare(operation, options)? })
            }
            prepared => prepared,
        }
    }

    /// The kernels of a plan, ready to be launched, after trials of those that are new to the driver.
    fn prepare_plan(&self, planned: &Planned, options: PlanOptions, start: Instant) -> Result<Prepared, Vec<Reason>> {
        let Planned { plan, parts, is_fused, not_fused } = planned;
        let loaded: Result<Vec<_>, _> = plan.launches.iter().map(|launch| self.load(launch.key)).collect();
        let loaded = loaded.map_err(one)?;
        let kernels: Vec<_> = loaded.iter().map(|(kernel, _)| kernel.clone()).collect();
        let attention = plan.launches.iter().position(|launch| launch.stage() == Stage::Attention);
        let (mut first, mut self_check) = (0, SelfCheckReport::Off);
        for (launches, trial) in parts {
            let part = first..first + launches;
            // The verdict on the attention kernel is about those beside it too.
            let judged = attention.filter(|index| part.contains(index)).unwrap_or(first);
            let report =
                self.trust(&kernels[judged], options.self_check, || trial.complaint(self, &kernels[part.clone()]))?;
            if attention.is_none_or(|index| index == judged) {
                self_check = report;
            }
            first = part.end;
        }
        let executor = Executor::new(plan, kernels, self).map_err(one)?;
        let report = attention.unwrap_or(0);
        let kernel = loaded.get(report).map(|(kernel, source)| {
            KernelReport::new(kernel, plan, &plan.launches[report], *source, self_check, start.elapsed())
        });
        Ok(Prepared { executor, kernel, is_fused: *is_fused, not_fused: not_fused.clone() })
    }

    /// A kernel on the GPU, and where it came from.
    fn load(&self, key: KernelKey) -> Result<(Arc<Kernel>, Source), CudaError> {
        let lock = || self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&key) {
            return Ok((known.clone(), Source::Memory));
        }
        let generated = key.kernel().expect("the launch plan has checked the kernel");
        let kernel = self.kernels.load(&generated)?;
        let source = kernel.source();
        Ok((lock().entry(key).or_insert(kernel).clone(), source))
    }

    /// The reason to trust a kernel, after trying it for the first time if that is due: a trial gives what is wrong.
    fn trust(
        &self,
        kernel: &Kernel,
        policy: SelfCheckPolicy,
        try_kernel: impl FnOnce() -> Result<Option<String>, Vec<Reason>>,
    ) -> Result<SelfCheckReport, Vec<Reason>> {
        let refused = |complaint| Err(vec![Reason::SelfCheck { kernel: kernel.name().to_owned(), complaint }]);
        match kernel.self_check() {
            SelfCheck::Passed => Ok(SelfCheckReport::PassedBefore),
            SelfCheck::Failed { reason } => refused(reason),
            SelfCheck::NotRun if !policy.is_on(env::var(SELF_CHECK_VARIABLE).ok().as_deref()) => {
                Ok(SelfCheckReport::Off)
            }
            SelfCheck::NotRun => match try_kernel()? {
                None => {
                    self.kernels.set_verdict(kernel, SelfCheck::Passed);
                    Ok(SelfCheckReport::PassedNow)
                }
                Some(complaint) => {
                    self.kernels.set_verdict(kernel, SelfCheck::Failed { reason: complaint.clone() });
                    refused(complaint)
                }
            },
        }
    }
}

/// Keeps an append out of the attention launch where it is `off`.
const FUSED_APPEND_VARIABLE: &str = "FLASHCORE_FUSED_APPEND";
/// Turns the self-check off where it is `off`.
const SELF_CHECK_VARIABLE: &str = "FLASHCORE_SELF_CHECK";

impl fmt::Display for Gpu {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.context().device();
        write!(formatter, "cuda:{} ({})", device.ordinal, device.name)
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Gpu")
            .field("context", self.context())
            .field("target", &self.target)
            .finish_non_exhaustive()
    }
}
