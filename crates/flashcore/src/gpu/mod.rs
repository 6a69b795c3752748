//! Plans on a GPU: from a problem to kernels that are loaded, trusted and ready to be launched.

mod append;
pub(crate) mod check_lengths;
mod continuation;
mod device_tensors;
mod executor;
mod fused_trial;
mod kv_cache;
mod kv_cache_trial;
mod merge;
mod operation;
mod self_check;
mod stream;
pub mod tuning;

use std::collections::HashMap;
use std::env;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use flashcore_cuda::cache::{CacheOptions, KernelCache, SelfCheck, Source};
use flashcore_cuda::{Context, CudaError, Driver, JitOptions, Kernel, Kernels, Stream, Workspaces};
use flashcore_kernels::{Config, KernelKey, LaunchPlan, Stage, Target, heuristics};
use flashcore_problem::{Outputs, Problem};

pub use append::AppendTensors;
pub(crate) use append::GpuAppend;
pub(crate) use continuation::GpuContinue;
pub use device_tensors::{DeviceBias, DeviceScale, DeviceTensors, TENSOR_ALIGNMENT};
pub(crate) use executor::Executor;
pub(crate) use kv_cache::GpuKvCache;
pub use kv_cache::KvCacheTensors;
pub(crate) use merge::GpuMerge;
pub use merge::{MergeTensors, PartAddresses};
pub use self_check::SelfCheckPolicy;
pub use stream::StreamRef;

use crate::report::{KernelReport, SelfCheckReport};
use crate::{PlanOptions, Reason};
use self_check::Trial;
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

/// Kernels that are ready to be launched, and the report of the attention kernel.
pub(crate) struct Prepared {
    pub(crate) executor: Executor,
    pub(crate) kernel: KernelReport,
}

impl Gpu {
    /// The GPU with this ordinal. Everybody in the process has the same, as long as anybody has it.
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

    /// The launch plan for a problem; `None` if there is nothing to launch.
    fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<Option<LaunchPlan>, Vec<Reason>> {
        let plan = |config| LaunchPlan::new(problem, config, self.target);
        // A config that was measured here is taken if it still runs the problem: its class may be wider than the kernel.
        let measured = || self.measured.config(problem).and_then(|config| plan(config).ok());
        let planned = match options.config {
            Some(config) => plan(config),
            None => measured().map_or_else(|| plan(heuristics::select(problem, self.target)), Ok),
        };
        planned.map(Some).or_else(|reasons| {
            // An empty problem is legal; what else is wrong with it is told all the same.
            let not_empty = |reason: &flashcore_kernels::Reason| *reason != flashcore_kernels::Reason::Empty;
            let reasons: Vec<Reason> = reasons.into_iter().filter(not_empty).map(Reason::from).collect();
            if reasons.is_empty() { Ok(None) } else { Err(reasons) }
        })
    }

    /// The config for a problem, if some plan has it: the one that was asked for, the one that was measured here, or the
    /// default.
    fn config(&self, problem: &Problem, options: PlanOptions) -> Option<Config> {
        self.plan(problem, options).ok().flatten().map(|plan| plan.config)
    }

    /// Every reason against a problem that can be told without compiling a kernel.
    pub(crate) fn supports(&self, problem: &Problem, options: PlanOptions) -> Result<(), Vec<Reason>> {
        self.plan(problem, options).map(|_| ())
    }

    /// The kernels for a problem, ready to be launched; `None` if there is nothing to launch.
    pub(crate) fn prepare(&self, problem: &Problem, options: PlanOptions) -> Result<Option<Prepared>, Vec<Reason>> {
        let start = Instant::now();
        let Some(plan) = self.plan(problem, options)? else { return Ok(None) };
        self.prepare_plan(&plan, options, start, |kernels| self.try_kernels(problem, &plan, kernels)).map(Some)
    }

    /// The kernels of a plan, ready to be launched, after `try_kernels` has tried them if they are new to the driver.
    fn prepare_plan(
        &self,
        plan: &LaunchPlan,
        options: PlanOptions,
        start: Instant,
        try_kernels: impl FnOnce(&[Arc<Kernel>]) -> Result<Option<String>, Vec<Reason>>,
    ) -> Result<Prepared, Vec<Reason>> {
        let one = |error: CudaError| vec![Reason::Cuda(error)];
        let loaded: Result<Vec<_>, _> = plan.launches.iter().map(|launch| self.load(launch.key)).collect();
        let loaded = loaded.map_err(one)?;
        let attention = plan.launches.iter().position(|launch| launch.stage() == Stage::Attention).unwrap_or(0);
        let source = loaded[attention].1;
        let kernels: Vec<_> = loaded.into_iter().map(|(kernel, _)| kernel).collect();
        let kernel = kernels[attention].clone();
        let self_check = self.trust(&kernel, options.self_check, || try_kernels(&kernels))?;
        let executor = Executor::new(plan, kernels, self).map_err(one)?;
        let kernel = KernelReport::new(&kernel, plan, source, self_check, start.elapsed());
        Ok(Prepared { executor, kernel })
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

    /// Runs the kernels of a plan on a small problem. Gives what is wrong with the result, if anything is.
    fn try_kernels(
        &self,
        problem: &Problem,
        plan: &LaunchPlan,
        kernels: &[Arc<Kernel>],
    ) -> Result<Option<String>, Vec<Reason>> {
        let trial = match Trial::new(problem, plan.config) {
            Ok(trial) => trial,
            Err(invalid) => return Ok(Some(invalid.to_string())),
        };
        let target = Target { num_sms: TRIAL_CTAS, ..self.target };
        let config = trial_config(plan, &trial.problem);
        let plan = LaunchPlan::new(&trial.problem, config, target)
            .map_err(|reasons| reasons.into_iter().map(Reason::from).collect::<Vec<_>>())?;
        let mut outputs = Outputs::poisoned(&trial.problem);
        let run = Executor::new(&plan, kernels.to_vec(), self)
            .and_then(|executor| executor.run(&trial.problem, &trial.inputs.views(), outputs.views_mut()));
        match run {
            Ok(()) => Ok(trial.complaint(&outputs)),
            // The kernel did something that ends all work here. The next process shall not try again.
            Err(CudaError::Call(failure)) if failure.is_sticky() => Ok(Some(failure.to_string())),
            Err(error) => Err(vec![error.into()]),
        }
    }
}

/// Persistent CTAs of a trial: fewer than there are tiles.
const TRIAL_CTAS: u32 = 2;
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

/// The config of a trial of the kernels of a plan: with several chunks of keys where one of them combines those, else one.
fn trial_config(plan: &LaunchPlan, trial: &Problem) -> Config {
    let is_combined = plan.launch(Stage::Combine).is_some();
    plan.config.with_chunk_keys(if is_combined { 1 } else { trial.key_length as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ir::Arch;
    use flashcore_kernels::Specialization;
    use flashcore_problem::{Alignment, Mask, MaskMod, ScoreMod};

    /// The kernels that are tried must be the kernels that are used, whatever is compiled into them.
    #[test]
    fn the_trial_of_a_problem_has_its_kernels() {
        let features: [fn(&mut Problem); 9] = [
            |_| {},
            |problem| (problem.mask, problem.lse) = (Mask::Causal(Alignment::TopLeft), true),
            |problem| problem.mask = Mask::Window { left: Some(7), right: None, alignment: Alignment::BottomRight },
            |problem| (problem.softcap, problem.alibi) = (Some(50.0), true),
            |problem| (problem.bias, problem.sinks) = (true, true),
            |problem| (problem.seqused_k, problem.value_dim) = (true, 72),
            |problem| problem.scale = -0.5,
            |problem| {
                let relative = ScoreMod::new("relative", |score, at| score + at.number(at.query - at.key + 100));
                let documents = MaskMod::new("documents", |at| at.integer(at.query).equals(at.integer(at.key)));
                (problem.score_mod, problem.mask_mod) = (Some(relative), Some(documents));
                (problem.aux_f32, problem.aux_i32) = (201, 1000);
            },
            |problem| {
                let mut strides = problem.strides();
                strides.key.row += 2;
                problem.layout = flashcore_problem::Layout::Strided(strides);
            },
        ];
        let one_chunk = |config: &Config| config.chunk_keys().map(|_| config.with_chunk_keys(4096));
        let configs = Config::all();
        for config in configs.iter().copied().chain(configs.iter().filter_map(one_chunk)) {
            for (number, change) in features.into_iter().enumerate() {
                let dtype = Specialization::DTYPES[number % 2];
                let mut problem = Problem::new(3, 4, 1000, [24, 64, 128][number % 3], dtype);
                change(&mut problem);
                let trial = Trial::new(&problem, Config::ampere()).unwrap().problem;
                let specs = |plan: LaunchPlan| plan.launches.iter().map(|launch| launch.key).collect::<Vec<_>>();
                let plan = LaunchPlan::new(&problem, config, Arch::Sm90a);
                let of_trial = plan.as_ref().map_or(config, |plan| trial_config(plan, &trial));
                let of_trial = LaunchPlan::new(&trial, of_trial, Arch::Sm90a);
                assert_eq!(plan.map(specs), of_trial.map(specs), "{config} {problem}");
            }
        }
    }
}
