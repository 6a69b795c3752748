//! Plans on a GPU: from a problem to a kernel that is loaded, trusted and ready to be launched.

use std::collections::HashMap;
use std::env;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use flashcore_cuda::cache::{CacheOptions, KernelCache, SelfCheck, Source};
use flashcore_cuda::{
    Context, CudaError, DeviceBuffer, Driver, JitOptions, Kernel, Kernels, L2Range, Launch, Stream, Workspaces,
};
use flashcore_ir::{Arch, TensorMap, VerifiedKernel};
use flashcore_kernels::{Argument, Buffers, Config, SideKernel};
use flashcore_problem::{
    BiasStrides, InputViews, OutputViews, Outputs, Problem, Shape, Strides, TensorView, TensorViewMut,
};

use crate::bound::upload_numbers;
use crate::report::{KernelReport, SelfCheckReport};
use crate::self_check::Trial;
use crate::tuning::Measured;
use crate::{DeviceTensors, PlanOptions, Reason};

/// A GPU that was opened: its context, its kernels, and a stream for tensors of the host.
pub(crate) struct Gpu {
    kernels: Kernels,
    arch: Arch,
    stream: Stream,
    /// What `flashcore tune` found best here.
    measured: Measured,
    /// The kernels that plans of this process have, by name. Comparing what was generated takes a fraction of printing it
    /// and hashing the text, so a plan for another length costs a fraction of a millisecond.
    planned: Mutex<HashMap<String, Planned>>,
}

/// A kernel as it was generated and as it was loaded.
struct Planned {
    generated: VerifiedKernel,
    loaded: Arc<Kernel>,
}

impl Gpu {
    /// The GPU of this number. Everybody in the process has the same, as long as anybody has it.
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
            arch,
            measured: Measured::load(cache, &context),
            stream: Stream::new(&context)?,
            planned: Mutex::default(),
        });
        open.insert(ordinal, Arc::downgrade(&gpu));
        Ok(gpu)
    }

    pub(crate) const fn context(&self) -> &Context {
        self.kernels.context()
    }

    /// The kernel for a problem, ready to be launched; `None` if there is nothing to launch.
    pub(crate) fn prepare(
        &self,
        problem: &Problem,
        options: PlanOptions,
    ) -> Result<Option<(Launchable, KernelReport)>, Vec<Reason>> {
        let start = Instant::now();
        let num_sms = self.context().device().attributes.num_sms;
        // What was measured here, if it still runs the problem: its class may be wider than what the kernel takes.
        let measured = || {
            let config = self.measured.config(problem)?;
            flashcore_kernels::Plan::new(problem, config, self.arch).is_ok().then_some(config)
        };
        let default = || Config::tuned(problem, self.arch, num_sms);
        let config = options.config.or_else(measured).unwrap_or_else(default);
        let plan = match flashcore_kernels::Plan::new(problem, config, self.arch) {
            Ok(plan) => plan,
            Err(reasons) => {
                // An empty problem is legal; what else is wrong with it is told all the same.
                let not_empty = |reason: &flashcore_kernels::Reason| *reason != flashcore_kernels::Reason::Empty;
                let reasons: Vec<Reason> = reasons.into_iter().filter(not_empty).map(Reason::from).collect();
                return if reasons.is_empty() { Ok(None) } else { Err(reasons) };
            }
        };
        let plan = plan.with_at_most(num_sms);
        let one = |error: CudaError| vec![Reason::Cuda(error)];
        let (kernel, source) = self.load(&plan.kernel).map_err(one)?;
        let side = |side: &Option<SideKernel>| match side {
            Some(side) => Ok::<_, CudaError>(Some(self.load(&side.kernel)?.0)),
            None => Ok(None),
        };
        let (ranges, combine) = (side(&plan.ranges).map_err(one)?, side(&plan.combine).map_err(one)?);
        let kernels = LoadedKernels { ranges, first: kernel.clone(), combine };
        let self_check = self.trust(problem, config, &kernels, options)?;
        let launchable = Launchable::new(&plan, &kernels, self.stream.clone()).map_err(one)?;
        let report = KernelReport {
            name: kernel.name().to_owned(),
            config,
            arch: kernel.arch().to_string(),
            grid: plan.grid,
            threads: kernel.threads(),
            shared_bytes: kernel.shared_bytes(),
            workspace_bytes: plan.workspace_bytes(),
            usage: kernel.usage(),
            source,
            timings: kernel.timings(),
            plan_time: start.elapsed(),
            self_check,
            log: kernel.log().to_owned(),
        };
        Ok(Some((launchable, report)))
    }

    /// A kernel on the GPU, and where it came from.
    fn load(&self, kernel: &VerifiedKernel) -> Result<(Arc<Kernel>, Source), CudaError> {
        let planned = || self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = planned().get(&kernel.name).filter(|known| known.generated == *kernel) {
            return Ok((known.loaded.clone(), Source::Memory));
        }
        let loaded = self.kernels.load(kernel)?;
        planned().insert(kernel.name.clone(), Planned { generated: kernel.clone(), loaded: loaded.clone() });
        let source = loaded.source();
        Ok((loaded, source))
    }

    /// What stands behind the trust in a kernel, after running it for the first time if that is due.
    fn trust(
        &self,
        problem: &Problem,
        config: Config,
        kernels: &LoadedKernels,
        options: PlanOptions,
    ) -> Result<SelfCheckReport, Vec<Reason>> {
        let kernel = &kernels.first;
        let name = kernel.name().to_owned();
        match kernel.self_check() {
            SelfCheck::Passed => Ok(SelfCheckReport::PassedBefore),
            SelfCheck::Failed { reason } => Err(vec![Reason::SelfCheck { kernel: name, complaint: reason }]),
            SelfCheck::NotRun if !options.self_check.is_on(env::var(SELF_CHECK_VARIABLE).ok().as_deref()) => {
                Ok(SelfCheckReport::Off)
            }
            SelfCheck::NotRun => match self.try_kernel(problem, config, kernels)? {
                None => {
                    self.kernels.set_verdict(kernel, SelfCheck::Passed);
                    Ok(SelfCheckReport::PassedNow)
                }
                Some(complaint) => {
                    self.kernels.set_verdict(kernel, SelfCheck::Failed { reason: complaint.clone() });
                    Err(vec![Reason::SelfCheck { kernel: name, complaint }])
                }
            },
        }
    }

    /// Runs a kernel on a small problem. Gives what is wrong with its result, if anything is.
    fn try_kernel(
        &self,
        problem: &Problem,
        config: Config,
        kernels: &LoadedKernels,
    ) -> Result<Option<String>, Vec<Reason>> {
        let against =
            |reasons: Vec<flashcore_kernels::Reason>| reasons.into_iter().map(Reason::from).collect::<Vec<_>>();
        let trial = match Trial::new(problem) {
            Ok(trial) => trial,
            Err(invalid) => return Ok(Some(invalid.to_string())),
        };
        let plan = flashcore_kernels::Plan::new(&trial.problem, config, self.arch).map_err(against)?;
        let plan = plan.with_at_most(TRIAL_CTAS);
        let mut outputs = Outputs::poisoned(&trial.problem);
        let run = Launchable::new(&plan, kernels, self.stream.clone())
            .and_then(|launchable| launchable.run(&trial.problem, &trial.inputs.views(), outputs.views_mut()));
        match run {
            Ok(()) => Ok(trial.complaint(&outputs)),
            // The kernel did something that ends all work here. The next process shall not try again.
            Err(CudaError::Call(failure)) if failure.is_sticky() => Ok(Some(failure.to_string())),
            Err(error) => Err(vec![error.into()]),
        }
    }
}

/// CTAs of a trial where each takes tile after tile: fewer than there are tiles.
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
        formatter.debug_struct("Gpu").field("context", self.context()).field("arch", &self.arch).finish_non_exhaustive()
    }
}

/// The kernels of a plan on the GPU.
struct LoadedKernels {
    /// That which is launched before it.
    ranges: Option<Arc<Kernel>>,
    first: Arc<Kernel>,
    /// That which is launched behind it.
    combine: Option<Arc<Kernel>>,
}

/// Kernels with all their arguments but the addresses.
#[derive(Clone)]
pub(crate) struct Launchable {
    ranges: Option<Step>,
    first: Step,
    combine: Option<Step>,
    stream: Stream,
    /// Memory that the kernels of a launch use among themselves, for each stream, unless a launch brings it.
    workspaces: Arc<Workspaces>,
    /// Bytes of it before what is known of the tiles that an expression leaves.
    ranges_offset: u64,
    /// Where L2 is asked to keep the key: bytes of the key, and of the part of L2.
    kept_key: Option<(usize, usize)>,
}

/// One kernel of a plan.
#[derive(Clone)]
struct Step {
    kernel: Arc<Kernel>,
    launch: Launch,
    /// Where the addresses stand among the arguments.
    places: AddressPlaces,
    /// The tensors among the arguments.
    maps: MapPlaces,
}

impl Step {
    fn new(kernel: &Arc<Kernel>, grid: [u32; 3], mut arguments: Vec<Argument>) -> Result<Self, CudaError> {
        let maps = MapPlaces::take(&mut arguments);
        let launch = kernel.prepare(grid, &arguments)?;
        Ok(Self { kernel: kernel.clone(), launch, places: AddressPlaces::find(&arguments), maps })
    }

    /// # Safety
    ///
    /// That of [`Launchable::launch`].
    unsafe fn launch(&self, stream: &Stream, buffers: Buffers, window: Option<L2Range>) -> Result<(), CudaError> {
        let mut launch = self.launch;
        let brought = brought(buffers);
        for (place, address) in self.places.0.into_iter().zip(brought) {
            if let Some(index) = place {
                self.kernel.set_argument(&mut launch, index, Argument::U64(address))?;
            }
        }
        for MapPlace { index, tensor, map } in self.maps.0.into_iter().flatten() {
            let map = TensorMap { base: brought[tensor], ..map };
            self.kernel.set_argument(&mut launch, index, Argument::TensorMap(map))?;
        }
        if let Some(window) = window {
            launch.set_l2_window(window);
        }
        // SAFETY: prepared by this kernel; the rest is the contract of this function.
        unsafe { self.kernel.launch(stream, &launch) }
    }
}

impl Launchable {
    fn new(plan: &flashcore_kernels::Plan, kernels: &LoadedKernels, stream: Stream) -> Result<Self, CudaError> {
        let arguments = plan.arguments(PLACEHOLDERS);
        let context = kernels.first.context();
        let combine = match (&kernels.combine, &plan.combine) {
            (Some(kernel), Some(combine)) => Some(Step::new(kernel, combine.grid, arguments.clone())?),
            _ => None,
        };
        let ranges = match (&kernels.ranges, &plan.ranges) {
            (Some(kernel), Some(ranges)) => Some(Step::new(kernel, ranges.grid, plan.common_arguments(PLACEHOLDERS))?),
            _ => None,
        };
        Ok(Self {
            ranges,
            ranges_offset: plan.ranges_offset(),
            first: Step::new(&kernels.first, plan.grid, arguments)?,
            combine,
            workspaces: Arc::new(Workspaces::new(context, plan.workspace_bytes() as usize)?),
            kept_key: if plan.keeps_keys_in_l2() { Some((plan.key_bytes(), context.keep_in_l2()?)) } else { None },
            stream,
        })
    }

    /// Bytes that the kernels use among themselves.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspaces.bytes()
    }

    /// Puts the kernels on a stream. Allocates nothing but a workspace for a stream that launches for the first time.
    ///
    /// # Safety
    ///
    /// The addresses are those of device memory that holds the tensors of the problem, which nobody else uses in a way
    /// that conflicts until the launch has finished, a workspace that the launch brings included; the stream belongs to
    /// the kernel's context.
    pub(crate) unsafe fn launch(&self, stream: &Stream, tensors: DeviceTensors) -> Result<(), CudaError> {
        let buffers = buffers(tensors);
        if buffers.workspace != 0 {
            // SAFETY: the contract of this function.
            return unsafe { self.launch_in(stream, buffers) };
        }
        // SAFETY: the contract of this function; nobody else uses the workspace of the stream meanwhile.
        self.workspaces.with(stream, |workspace| unsafe { self.launch_in(stream, Buffers { workspace, ..buffers }) })
    }

    /// # Safety
    ///
    /// That of [`launch`](Self::launch), with a workspace that no other launch uses at the same time.
    unsafe fn launch_in(&self, stream: &Stream, mut buffers: Buffers) -> Result<(), CudaError> {
        buffers.tile_ranges = buffers.workspace + self.ranges_offset;
        if let Some(ranges) = &self.ranges {
            // SAFETY: the contract of this function; the stream keeps the order of the two.
            unsafe { ranges.launch(stream, buffers, None) }?;
        }
        let window = self.kept_key.map(|(bytes, kept_bytes)| L2Range { address: buffers.key, bytes, kept_bytes });
        // SAFETY: the contract of this function.
        unsafe { self.first.launch(stream, buffers, window) }?;
        match &self.combine {
            // SAFETY: the contract of this function; the stream keeps the order of the two.
            Some(combine) => unsafe { combine.launch(stream, buffers, None) },
            None => Ok(()),
        }
    }

    /// Computes a problem whose inputs and outputs validated, in the host's memory.
    pub(crate) fn run(
        &self,
        problem: &Problem,
        inputs: &InputViews<'_>,
        outputs: OutputViews<'_>,
    ) -> Result<(), CudaError> {
        let (stream, context) = (&self.stream, self.first.kernel.context());
        let strides = problem.strides();
        let bytes = |strides: Strides, shape: Shape| strides.extent(shape).unwrap_or(0) * problem.dtype.size_bytes();
        let upload = |view: TensorView<'_>, strides: Strides, shape: Shape| {
            DeviceBuffer::from_host(stream, &view.data[..bytes(strides, shape)])
        };
        let query = upload(inputs.query, strides.query, problem.query_shape())?;
        let key = upload(inputs.key, strides.key, problem.key_shape())?;
        let value = upload(inputs.value, strides.value, problem.value_shape())?;
        let output_shape = problem.output_shape();
        let output_bytes = bytes(strides.output, output_shape);
        // What lies between the rows of the output comes back as it was.
        let has_gaps = strides.output.extent(output_shape) != output_shape.elements();
        let output = if has_gaps {
            upload(outputs.output.as_view(), strides.output, output_shape)?
        } else {
            DeviceBuffer::uninitialised(context, output_bytes)?
        };
        let rows = outputs.lse.as_ref().map_or(0, |rows| rows.len());
        let lse = DeviceBuffer::uninitialised(context, rows * size_of::<f32>())?;
        let mut tensors = DeviceTensors::new(query.address(), key.address(), value.address(), output.address());
        tensors.lse = lse.address();
        let _numbers = upload_numbers(stream, inputs, &mut tensors)?;
        // SAFETY: the buffers hold as many bytes as the problem's strides reach, and are used by nobody else; freeing them
        // waits for the kernel. The stream was made in the context of the kernel.
        unsafe { self.launch(stream, tensors) }?;
        output.copy_to_host(stream, 0, &mut outputs.output.data[..output_bytes])?;
        if let Some(rows) = outputs.lse {
            lse.copy_to_host(stream, 0, TensorViewMut::from(rows).data)?;
        }
        Ok(())
    }
}

/// Numbers that no other argument has, in the place of addresses and of what else a launch brings along.
const PLACEHOLDERS: Buffers = Buffers {
    query: u64::MAX,
    key: u64::MAX - 1,
    value: u64::MAX - 2,
    output: u64::MAX - 3,
    lse: u64::MAX - 4,
    seqused_k: u64::MAX - 5,
    alibi_slopes: u64::MAX - 6,
    sinks: u64::MAX - 7,
    bias: u64::MAX - 8,
    bias_strides: BiasStrides { batch: BIAS_STRIDE, head: BIAS_STRIDE - 1, row: BIAS_STRIDE - 2, key: BIAS_STRIDE - 3 },
    aux_f32: u64::MAX - 10,
    aux_i32: u64::MAX - 11,
    tile_ranges: u64::MAX - 12,
    workspace: u64::MAX - 9,
};
/// Four times this, in bytes, is neither the stride of a tensor that exists nor one of the addresses above.
const BIAS_STRIDE: usize = usize::MAX >> 3;
/// What a launch brings along: thirteen addresses and the four strides of the bias.
const BROUGHT: usize = 17;

/// Where what a launch brings along stands among the arguments of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AddressPlaces([Option<usize>; BROUGHT]);

impl AddressPlaces {
    fn find(arguments: &[Argument]) -> Self {
        let place = |address: u64| arguments.iter().position(|&argument| argument == Argument::U64(address));
        Self(brought(PLACEHOLDERS).map(place))
    }
}

/// A tensor map among the arguments of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MapPlace {
    index: usize,
    /// Which of what a launch brings along its tensor is.
    tensor: usize,
    /// All but the address.
    map: TensorMap,
}

/// The tensor maps of a kernel that has no more than this.
const MOST_MAPS: usize = 4;

/// The tensor maps among the arguments of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MapPlaces([Option<MapPlace>; MOST_MAPS]);

impl MapPlaces {
    /// Finds them, and gives them an address that a tensor can have.
    fn take(arguments: &mut [Argument]) -> Self {
        let tensors = brought(PLACEHOLDERS);
        let found = arguments.iter_mut().enumerate().filter_map(|(index, argument)| {
            let Argument::TensorMap(map) = argument else { return None };
            let tensor = tensors.iter().position(|&address| address == map.base)?;
            map.base = 0;
            Some(MapPlace { index, tensor, map: *map })
        });
        let mut places = [None; MOST_MAPS];
        places.iter_mut().zip(found).for_each(|(place, found)| *place = Some(found));
        Self(places)
    }
}

/// In one order for placeholders and for what takes their place; the strides of the bias in bytes.
const fn brought(buffers: Buffers) -> [u64; BROUGHT] {
    let Buffers { query, key, value, output, lse, .. } = buffers;
    let Buffers { seqused_k, alibi_slopes, sinks, bias, bias_strides, workspace, .. } = buffers;
    let Buffers { aux_f32, aux_i32, tile_ranges, .. } = buffers;
    let BiasStrides { batch, head, row, key: bias_key } = bias_strides;
    let bytes = size_of::<f32>() as u64;
    let [batch, head, row, bias_key] =
        [batch as u64 * bytes, head as u64 * bytes, row as u64 * bytes, bias_key as u64 * bytes];
    [
        query,
        key,
        value,
        output,
        lse,
        seqused_k,
        alibi_slopes,
        sinks,
        bias,
        batch,
        head,
        row,
        bias_key,
        workspace,
        aux_f32,
        aux_i32,
        tile_ranges,
    ]
}

const fn buffers(tensors: DeviceTensors) -> Buffers {
    let DeviceTensors { query, key, value, output, lse, .. } = tensors;
    let DeviceTensors { seqused_k, alibi_slopes, sinks, bias, bias_strides, workspace, .. } = tensors;
    let DeviceTensors { aux_f32, aux_i32, .. } = tensors;
    Buffers {
        lse,
        seqused_k,
        alibi_slopes,
        sinks,
        bias,
        bias_strides,
        workspace,
        aux_f32,
        aux_i32,
        ..Buffers::new(query, key, value, output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_kernels::Specialization;
    use flashcore_problem::{Alignment, Mask, MaskMod, ScoreMod};

    /// The kernel that is tried must be the kernel that is used, whatever is compiled into it.
    #[test]
    fn the_trial_of_a_problem_has_its_kernel() {
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
        for config in Config::all() {
            for (number, change) in features.into_iter().enumerate() {
                let dtype = Specialization::DTYPES[number % 2];
                let mut problem = Problem::new(3, 4, 1000, [24, 64, 128][number % 3], dtype);
                change(&mut problem);
                let trial = Trial::new(&problem).unwrap().problem;
                let ptx = |problem: &Problem| {
                    let plan = flashcore_kernels::Plan::new(problem, config, Arch::Sm90a);
                    plan.map(|plan| flashcore_ptx::print(&plan.kernel))
                };
                assert_eq!(ptx(&problem), ptx(&trial), "{config} {problem}");
            }
        }
    }

    /// With as many constants of expressions as there can be.
    #[test]
    fn a_launch_has_room_for_the_arguments_of_every_kernel() {
        let score = ScoreMod::new("score", |score, _| (0..20).fold(score, |sum, term| sum + term as f32));
        let mask = MaskMod::new("mask", |at| (0..20).fold(at.key, |sum, term| sum + term).less(9));
        let mut problem = Problem::new(3, 4, 1000, 64, flashcore_problem::DType::F16);
        (problem.score_mod, problem.mask_mod) = (Some(score), Some(mask));
        let parts = "ampere-64x64-2stage-swizzled-2splits".parse().unwrap();
        for config in Config::all().into_iter().chain([parts]) {
            let Ok(plan) = flashcore_kernels::Plan::new(&problem, config, Arch::Sm90a) else { continue };
            let arguments = plan.arguments(PLACEHOLDERS);
            assert_eq!(arguments.len(), plan.kernel.parameters.len(), "{config}");
            assert!(arguments.len() <= flashcore_cuda::MOST_ARGUMENTS, "{config} has {}", arguments.len());
        }
    }

    #[test]
    fn every_address_has_its_place() {
        let mut problem = Problem::new(1, 2, 70, 64, flashcore_problem::DType::F16);
        problem.lse = true;
        let config = "ampere-64x64-2stage-swizzled-2splits".parse().unwrap();
        let plan = flashcore_kernels::Plan::new(&problem, config, Arch::Sm80).unwrap();
        let AddressPlaces(places) = AddressPlaces::find(&plan.arguments(PLACEHOLDERS));
        let buffers = Buffers {
            lse: 80,
            seqused_k: 96,
            alibi_slopes: 112,
            sinks: 128,
            bias: 144,
            bias_strides: BiasStrides { batch: 40, head: 44, row: 48, key: 52 },
            workspace: 224,
            aux_f32: 240,
            aux_i32: 256,
            tile_ranges: 272,
            ..Buffers::new(16, 32, 48, 64)
        };
        let arguments = plan.arguments(buffers);
        let found = places.map(|place| arguments[place.unwrap()]);
        let expected = [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 272];
        assert_eq!(found, expected.map(Argument::U64));
    }
}
