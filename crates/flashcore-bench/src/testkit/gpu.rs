//! The GPU backend: launches are verified like everything else, and timed with CUDA events.

use flashcore::{Device, Plan, PlanOptions, Unsupported};
use flashcore_cuda::{Context, CudaError, DeviceBuffer, Event, L2Flush, Stream};
use flashcore_ir::Arch;
use flashcore_kernels::Config;
use flashcore_problem::{Evidence, Inputs, Outputs, Problem, Verdict};

use crate::floor::{Ceilings, Work};
use crate::testkit::bound::{Bound, BoundGraph, Contents, EmptyKernel, host_times};
use crate::testkit::sample::judge_worst;
use crate::testkit::verify::{NoVerdict, Yardstick};
use crate::timing::Times;
use crate::util::digest::sha256;

/// A GPU and how problems get there.
#[derive(Debug)]
pub struct Gpu {
    device: Device,
}

impl Gpu {
    /// The GPU of this number.
    pub fn open(ordinal: usize) -> Result<Self, flashcore::Error> {
        Ok(Self { device: Device::cuda(ordinal)? })
    }

    /// The device.
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// The kernel of a config for a problem; without a config, the one that the device takes by default.
    pub fn plan(&self, problem: &Problem, config: Option<Config>) -> Result<Plan, Unsupported> {
        Plan::with_options(problem, &self.device, PlanOptions::default().with_config(config))
    }

    /// Runs a problem and judges it: guard bands around every tensor, poisoned outputs, and `repeats` further runs that
    /// must give the same bits.
    pub fn verify(
        &self,
        problem: &Problem,
        config: Option<Config>,
        yardstick: &Yardstick,
        repeats: usize,
    ) -> Result<Verdict, NoVerdict> {
        let plan = self.plan(problem, config).map_err(NoVerdict::RefusedByGpu)?;
        let mut run = Run::new(&plan, yardstick.inputs())?;
        let first = run.once(yardstick.inputs())?;
        let mut repeated = Vec::new();
        for _ in 0..repeats {
            run.0.reset_outputs()?;
            repeated.push(run.once(yardstick.inputs())?.outputs);
        }
        let evidence = Evidence {
            inputs: yardstick.inputs(),
            inputs_after: &first.inputs,
            outputs: &first.outputs,
            repeats: &repeated,
            guards: &first.guards,
        };
        Ok(yardstick.judge_kernel(problem, run.1, &evidence)?)
    }

    /// Runs a problem once, judges it, whole or by a sample, and if it is right times it.
    pub fn time(
        &self,
        problem: &Problem,
        config: Option<Config>,
        inputs: &Inputs,
    ) -> Result<Result<GpuTimes, Verdict>, NoVerdict> {
        let plan = self.plan(problem, config).map_err(NoVerdict::RefusedByGpu)?;
        let run = Run::new(&plan, inputs)?;
        let (verdict, output_sha256) = run.judge(problem, inputs)?;
        if !verdict.passed() {
            return Ok(Err(verdict));
        }
        Ok(Ok(run.time(kernel_name(&plan), verdict, output_sha256)?))
    }

    /// Runs a plan once, judges it, whole or by a sample, and times it even if it is wrong; then the verdict says so.
    pub fn judge_and_time(&self, plan: &Plan, inputs: &Inputs) -> Result<GpuTimes, NoVerdict> {
        let run = Run::new(plan, inputs)?;
        let (verdict, output_sha256) = run.judge(run.0.problem(), inputs)?;
        run.time(kernel_name(plan), verdict, output_sha256)
    }

    /// Output of a kernel.
    pub fn outputs(&self, problem: &Problem, config: Option<Config>, inputs: &Inputs) -> Result<Outputs, NoVerdict> {
        let plan = self.plan(problem, config).map_err(NoVerdict::RefusedByGpu)?;
        let run = Run::new(&plan, inputs)?;
        Ok(run.once(inputs)?.outputs)
    }

    /// Launches a kernel a few times and waits: something to look at for a profiler.
    pub fn launch_some(&self, problem: &Problem, config: Option<Config>, inputs: &Inputs) -> Result<(), NoVerdict> {
        const LAUNCHES: usize = 3;
        let plan = self.plan(problem, config).map_err(NoVerdict::RefusedByGpu)?;
        let run = Run::new(&plan, inputs)?;
        for _ in 0..LAUNCHES {
            run.0.launch()?;
        }
        Ok(run.0.stream().synchronize().map_err(flashcore::Error::from)?)
    }

    /// Seconds of the smallest launch: one row that attends one key, in a replayed graph. Whatever is launched takes as
    /// long.
    pub fn smallest_launch(&self) -> Result<f64, NoVerdict> {
        let problem = Problem::new(1, 1, 1, 8, flashcore_problem::DType::F16);
        let inputs = Inputs::random(&problem, 0);
        let plan = self.plan(&problem, Some(Config::scalar())).map_err(NoVerdict::RefusedByGpu)?;
        Ok(Run::new(&plan, &inputs)?.time_hot()?.quantile(0.5))
    }

    /// Seconds of the host that launch a kernel which does nothing: the driver's share of every launch.
    pub fn empty_launch(&self) -> Result<f64, flashcore::Error> {
        let empty = EmptyKernel::new(&self.device)?;
        Ok(host_times(empty.stream(), HOST_LAUNCHES, || empty.launch())?.quantile(0.5))
    }

    /// The floor of times with warm caches: what fits into the L2 cache need not come from memory.
    pub fn hot_floor(&self, ceilings: &Ceilings, work: Work) -> (f64, crate::floor::Bound) {
        let l2 = self.device.context().map_or(0, |context| context.device().attributes.l2_bytes);
        let is_cached = work.bytes <= f64::from(l2);
        Ceilings { bytes: if is_cached { f64::INFINITY } else { ceilings.bytes }, ..*ceilings }.floor(work)
    }

    /// Peak rates of the device: tensor cores by its clock and architecture, memory by a copy, measured now.
    pub fn ceilings(&self) -> Result<Ceilings, flashcore::Error> {
        let context = self
            .device
            .context()
            .ok_or_else(|| flashcore::Error::NotOnCuda { call: "ceilings", device: self.device.to_string() })?;
        let device = context.device();
        let clocks = f64::from(device.attributes.num_sms) * f64::from(device.attributes.clock_khz) * 1e3;
        Ok(Ceilings {
            flops: clocks * tensor_flops_per_clock(device.arch()?),
            bytes: measured_bandwidth(context)?,
            exponentials: clocks * EXPONENTIALS_PER_CLOCK,
        })
    }
}

/// Exponentials that an SM starts in a clock, on every architecture here.
pub(crate) const EXPONENTIALS_PER_CLOCK: f64 = 16.0;

/// Dense 16-bit operations, accumulated in `f32`, of the tensor cores of one SM in a clock.
const fn tensor_flops_per_clock(arch: Arch) -> f64 {
    match arch {
        Arch::Sm80 => 2048.0,
        Arch::Sm86 => 512.0,
        Arch::Sm89 | Arch::Sm120 => 1024.0,
        Arch::Sm90 | Arch::Sm90a => 4096.0,
    }
}

/// Bytes per second, read and written together, of a copy within the device's memory.
fn measured_bandwidth(context: &Context) -> Result<f64, CudaError> {
    const BYTES: usize = 1 << 29;
    const COPIES: usize = 10;
    let stream = Stream::new(context)?;
    let from = DeviceBuffer::filled(&stream, BYTES, 1)?;
    let mut to = DeviceBuffer::filled(&stream, BYTES, 2)?;
    let (start, end) = (Event::new(context)?, Event::new(context)?);
    let mut best = 0.0f64;
    for _ in 0..3 {
        start.record(&stream)?;
        for _ in 0..COPIES {
            to.copy_from(&stream, &from)?;
        }
        end.record(&stream)?;
        end.synchronize()?;
        let seconds = f64::from(end.milliseconds_since(&start)?) / 1e3;
        best = best.max((2 * BYTES * COPIES) as f64 / seconds);
    }
    Ok(best)
}

/// Times of one launch.
#[derive(Debug, Clone)]
pub struct GpuTimes {
    /// In a replayed graph of launches on the same tensors: the caches are warm and the host is out of the way.
    pub hot: Times,
    /// Each after a flush of the L2 cache, between two events.
    pub cold: Times,
    /// Calls of the host that launch it, one or two kernels each.
    pub launch: Times,
    /// The config that was taken.
    pub kernel: String,
    /// Verdict of the gates on the output, before anything was timed.
    pub verdict: Verdict,
    /// The SHA-256 of that output.
    pub output_sha256: String,
}

/// Launches in one graph; the time of one is the time of the graph over this.
const LAUNCHES_PER_GRAPH: usize = 20;
/// Graphs that are replayed and timed.
const REPLAYS: usize = 30;
/// Cold launches that are timed.
const COLD_LAUNCHES: usize = 30;
/// Launches whose time on the host counts.
const HOST_LAUNCHES: usize = 200;
/// The same, of long ones.
const FEW_HOST_LAUNCHES: usize = 7;
/// A graph longer than this is not repeated more than the results need.
const LONG_GRAPH_MILLISECONDS: f32 = 50.0;

/// A launch longer than this is timed alone: what it takes to start does not show.
const LONG_LAUNCH_MILLISECONDS: f32 = 10.0;

/// A plan on the device that is judged and timed.
struct Run(Bound, Option<Config>);

impl Run {
    fn new(plan: &Plan, inputs: &Inputs) -> Result<Self, NoVerdict> {
        let config = plan.report().kernel.as_ref().and_then(|kernel| kernel.config);
        Ok(Self(Bound::new(plan, inputs)?, config))
    }

    fn once(&self, inputs: &Inputs) -> Result<Contents, NoVerdict> {
        self.0.launch()?;
        Ok(self.0.contents(inputs)?)
    }

    /// Runs once: the worst verdict, and the hash of the output.
    fn judge(&self, problem: &Problem, inputs: &Inputs) -> Result<(Verdict, String), NoVerdict> {
        let after = self.once(inputs)?;
        let verdict = judge_worst(problem, self.1, inputs, &after.outputs)?;
        Ok((verdict, sha256(&after.outputs.output.data)))
    }

    fn time(&self, kernel: String, verdict: Verdict, output_sha256: String) -> Result<GpuTimes, NoVerdict> {
        let (hot, cold, launch) = (self.time_hot()?, self.time_cold()?, self.time_launch()?);
        Ok(GpuTimes { hot, cold, launch, kernel, verdict, output_sha256 })
    }

    /// Times of calls on the host.
    fn time_launch(&self) -> Result<Times, NoVerdict> {
        let is_long = self.milliseconds()? > LONG_LAUNCH_MILLISECONDS;
        let launches = if is_long { FEW_HOST_LAUNCHES } else { HOST_LAUNCHES };
        Ok(host_times(self.0.stream(), launches, || self.0.launch())?)
    }

    /// Milliseconds of one launch, by two events.
    fn milliseconds(&self) -> Result<f32, NoVerdict> {
        let stream = self.0.stream();
        let (start, end) = self.events()?;
        start.record(stream).map_err(flashcore::Error::from)?;
        self.0.launch()?;
        end.record(stream).map_err(flashcore::Error::from)?;
        end.synchronize().map_err(flashcore::Error::from)?;
        Ok(end.milliseconds_since(&start).map_err(flashcore::Error::from)?)
    }

    fn time_hot(&self) -> Result<Times, NoVerdict> {
        let stream = self.0.stream();
        let launches = if self.milliseconds()? > LONG_LAUNCH_MILLISECONDS { 1 } else { LAUNCHES_PER_GRAPH };
        let graph = self.0.record(launches)?;
        let (start, end) = self.events()?;
        let mut seconds = Vec::new();
        // The first replays warm clocks and caches and do not count.
        for replay in 0..REPLAYS + 3 {
            start.record(stream).map_err(flashcore::Error::from)?;
            graph.launch()?;
            end.record(stream).map_err(flashcore::Error::from)?;
            end.synchronize().map_err(flashcore::Error::from)?;
            let milliseconds = end.milliseconds_since(&start).map_err(flashcore::Error::from)?;
            if replay >= 3 {
                seconds.push(f64::from(milliseconds) / 1e3 / launches as f64);
            }
            if milliseconds > LONG_GRAPH_MILLISECONDS && seconds.len() >= 7 {
                break;
            }
        }
        Ok(Times { seconds })
    }

    fn time_cold(&self) -> Result<Times, NoVerdict> {
        let stream = self.0.stream();
        let mut flush = L2Flush::new(stream.context()).map_err(flashcore::Error::from)?;
        let (start, end) = self.events()?;
        let mut seconds = Vec::new();
        for _ in 0..COLD_LAUNCHES {
            flush.flush(stream).map_err(flashcore::Error::from)?;
            start.record(stream).map_err(flashcore::Error::from)?;
            self.0.launch()?;
            end.record(stream).map_err(flashcore::Error::from)?;
            end.synchronize().map_err(flashcore::Error::from)?;
            let milliseconds = end.milliseconds_since(&start).map_err(flashcore::Error::from)?;
            seconds.push(f64::from(milliseconds) / 1e3);
            if milliseconds > LONG_LAUNCH_MILLISECONDS && seconds.len() >= 7 {
                break;
            }
        }
        Ok(Times { seconds })
    }

    fn events(&self) -> Result<(Event, Event), flashcore::Error> {
        let context = self.0.stream().context();
        let event = || Event::new(context).map_err(|error: CudaError| flashcore::Error::from(error));
        Ok((event()?, event()?))
    }
}

/// The config of a plan.
fn kernel_name(plan: &Plan) -> String {
    let config = plan.report().kernel.as_ref().and_then(|kernel| kernel.config);
    config.map_or_else(|| "none".to_owned(), |config| config.to_string())
}

/// One of several kernels that are timed alternately.
pub(crate) struct GpuArm {
    run: Run,
    kernel: String,
}

impl GpuArm {
    /// A kernel on tensors of its own, launched once.
    pub(crate) fn new(
        gpu: &Gpu,
        problem: &Problem,
        config: Option<Config>,
        inputs: &Inputs,
    ) -> Result<Self, NoVerdict> {
        let plan = gpu.plan(problem, config).map_err(NoVerdict::RefusedByGpu)?;
        let kernel = kernel_name(&plan);
        let run = Run::new(&plan, inputs)?;
        run.0.launch()?;
        Ok(Self { run, kernel })
    }

    /// The config that was taken.
    pub(crate) fn name(&self) -> String {
        self.kernel.clone()
    }

    /// Verdict of the gates on its output now, and the hash of that output.
    pub(crate) fn judge(&self, problem: &Problem, inputs: &Inputs) -> Result<(Verdict, String), NoVerdict> {
        let after = self.run.once(inputs)?;
        let verdict = judge_worst(problem, self.run.1, inputs, &after.outputs)?;
        Ok((verdict, sha256(&after.outputs.output.data)))
    }

    /// A timer of its launches.
    pub(crate) fn timer(&self) -> Result<GpuTimer<'_>, NoVerdict> {
        let (start, end) = self.run.events()?;
        Ok(GpuTimer { graph: self.run.0.record(LAUNCHES_PER_GRAPH)?, stream: self.run.0.stream(), start, end })
    }
}

/// A graph of launches of one kernel, and the clock of the device.
pub(crate) struct GpuTimer<'a> {
    graph: BoundGraph<'a>,
    stream: &'a Stream,
    start: Event,
    end: Event,
}

impl GpuTimer<'_> {
    /// Seconds of one launch, of those in a replayed graph.
    pub(crate) fn seconds(&mut self) -> Result<f64, NoVerdict> {
        self.start.record(self.stream).map_err(flashcore::Error::from)?;
        self.graph.launch()?;
        self.end.record(self.stream).map_err(flashcore::Error::from)?;
        self.end.synchronize().map_err(flashcore::Error::from)?;
        let milliseconds = self.end.milliseconds_since(&self.start).map_err(flashcore::Error::from)?;
        Ok(f64::from(milliseconds) / 1e3 / LAUNCHES_PER_GRAPH as f64)
    }
}
