//! `flashcore tune`: the fastest config on this GPU.

use std::time::Duration;

use clap::Args;
use flashcore::tuning::{machine, problem_class};
use flashcore_bench::lab::tune::{Found, tune};
use flashcore_bench::testkit::gpu::Gpu;
use flashcore_bench::testkit::{Workload, mask_text};
use flashcore_cuda::Context;
use flashcore_cuda::cache::{CacheOptions, KernelCache};
use flashcore_cuda::tuning::{Tuned, TuningStore};
use flashcore_problem::{DType, DTypes};

use crate::output::{Cell, Format, Output, Table, column};
use crate::{Ending, Failure, interrupt};

/// Measure kernel configs on this GPU, and store the fastest
///
/// Starts with the default config of the problem and those of other problems, then changes one choice of the fastest at a
/// time until nothing is 2 % faster. Every config is verified before it is timed. The fastest is stored beside the compiled
/// kernels for this GPU, this driver and problems of the same class: the same type, dims, mask and features, and sizes up
/// to the same power of two. Later plans use it unless FLASHCORE_TUNING=off.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore tune --shape 1x8x512x64\n  flashcore tune --shape 4x32/8x1,8192x128 --dtype bf16 --lse\n  flashcore tune --shape 8x32/8x1,8192x128+scales=head --dtype 'bf16 kv e4m3'\n  flashcore tune --list\n  flashcore tune --forget all"
)]
pub(crate) struct Tune {
    /// The problem: batch x heads[/key heads] x queries[,keys] x dim[+feature]; of FP8, +scales[=tensor|head|sequence|token]
    #[arg(long)]
    shape: Option<String>,
    /// The element type, or those of query, key and value, and output, such as 'bf16 kv e4m3' or 'e4m3 out bf16'
    #[arg(long, default_value_t = super::one_type(DType::F16))]
    dtype: DTypes,
    /// The mask: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// Compute the log-sum-exp as well
    #[arg(long)]
    lse: bool,
    /// Time limit in seconds, after which no further config is tried
    #[arg(long, default_value_t = 60.0, value_parser = super::parse_seconds, allow_negative_numbers = true)]
    seconds: f64,
    /// Measure without storing the result
    #[arg(long)]
    dry_run: bool,
    /// Show the stored results
    #[arg(long, conflicts_with_all = ["shape", "dtype", "mask", "lse", "seconds", "dry_run", "forget"])]
    list: bool,
    /// Remove the result of one class of problems, as --list names it, or `all`
    #[arg(long, value_name = "CLASS", conflicts_with_all = ["shape", "dtype", "mask", "lse", "seconds", "dry_run"])]
    forget: Option<String>,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[expect(clippy::needless_pass_by_value, reason = "errors come by value")]
fn environment(error: impl ToString) -> Failure {
    Failure::Environment(error.to_string())
}

impl Tune {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        let store = || TuningStore::of(&KernelCache::open(CacheOptions::default())).map_err(environment);
        if self.list {
            return self.list(output, &store()?);
        }
        if let Some(class) = &self.forget {
            return forget(output, &store()?, class);
        }
        let problem = self.problem()?;
        interrupt::watch();
        let gpu = Gpu::open(0).map_err(environment)?;
        let context = gpu.device().context().ok_or_else(|| environment("the GPU has no context"))?;
        let arch = context.device().specific_arch().map_err(environment)?;
        let num_sms = context.device().attributes.num_sms;
        let budget = Duration::from_secs_f64(self.seconds);
        let work = || {
            let found = tune(&gpu, &problem, arch, num_sms, budget, |number, config| {
                output.progress(number, number + 1, &format!("tried, now {config}"));
                !interrupt::requested()
            });
            match found {
                Ok(found) => Ok(Some(found)),
                Err(_) if interrupt::requested() => Ok(None),
                Err(error) => Err(environment(error)),
            }
        };
        interrupt::abandonable(output, work, |found| {
            let Some(found) = found.flatten() else {
                output.note("interrupted in the middle of a config; nothing is stored");
                return Ok(Ending::Interrupted);
            };
            self.conclude(&problem, context, &found, output)
        })
    }

    /// Shows what was found, and stores the fastest.
    fn conclude(
        &self,
        problem: &Workload,
        context: &Context,
        found: &Found,
        output: &Output,
    ) -> Result<Ending, Failure> {
        self.show(output, found)?;
        if interrupt::requested() {
            let said =
                format!("{} configs tried; the search was interrupted, so nothing is stored", found.trials.len());
            self.say(output, &said)?;
            return Ok(Ending::Interrupted);
        }
        let store = || TuningStore::of(&KernelCache::open(CacheOptions::default())).map_err(environment);
        let Found { best, seconds, default, default_seconds, .. } = *found;
        let (device, driver) = machine(context);
        let class = problem_class(problem);
        if best == default {
            self.say(output, &format!("the default, {default}, is the fastest; nothing to store"))?;
            // What an earlier run remembered would stand in its way.
            if !self.dry_run {
                store()?.forget(|tuned| tuned.class == class && tuned.device == device).map_err(environment)?;
            }
            return Ok(Ending::Well);
        }
        let percent = 100.0 * (default_seconds / seconds - 1.0);
        self.say(output, &format!("{best} is {percent:.1} % faster than the default, {default}"))?;
        if !self.dry_run {
            let store = store()?;
            store
                .remember(Tuned {
                    device,
                    driver,
                    class: class.clone(),
                    config: best.to_string(),
                    seconds,
                    default_config: default.to_string(),
                    default_seconds,
                    problem: format!("{} {} {}", problem.shape(), problem.dtypes(), mask_text(problem.mask)),
                })
                .map_err(environment)?;
            self.say(output, &format!("stored for `{class}` in {}", store.path().display()))?;
        }
        Ok(Ending::Well)
    }

    fn problem(&self) -> Result<Workload, Failure> {
        let Some(shape) = &self.shape else {
            // On a machine without a GPU a shape would not help.
            Gpu::open(0).map_err(environment)?;
            return Err(Failure::Usage(
                "tune needs the problem to tune for: give --shape, such as --shape 1x8x512x64, or --list or --forget"
                    .to_owned(),
            ));
        };
        let mut problem = super::computable_problem(shape, self.dtype, &self.mask)?;
        problem.problem.lse = self.lse;
        Ok(problem)
    }

    fn show(&self, output: &Output, found: &Found) -> Result<(), Failure> {
        let mut table = Table::new(&[
            column("kernel", "kernel"),
            column("p50 us", "p50_us"),
            column("speedup over default", "speedup_over_default"),
            column("verdict", "verdict").verdict(),
        ]);
        for trial in &found.trials {
            let seconds = trial.seconds.as_ref().ok().copied();
            let verdict = match &trial.seconds {
                Ok(_) if trial.config == found.best => "fastest".to_owned(),
                Ok(_) => String::new(),
                Err(reason) => format!("not used: {reason}"),
            };
            table.push(vec![
                Cell::from(trial.config.to_string()),
                Cell::figure(seconds.map(|seconds| seconds * 1e6), 2),
                Cell::figure(seconds.map(|seconds| found.default_seconds / seconds), 3),
                Cell::from(verdict),
            ]);
        }
        Ok(output.table(&table, self.format)?)
    }

    /// A line for people; formats for programs have the table.
    fn say(&self, output: &Output, text: &str) -> Result<(), Failure> {
        if matches!(self.format, Format::Table | Format::Markdown) {
            output.line(text)?;
        }
        Ok(())
    }

    fn list(&self, output: &Output, store: &TuningStore) -> Result<Ending, Failure> {
        let all = store.read().map_err(environment)?;
        let mut table = Table::new(&[
            column("class", "class"),
            column("kernel", "kernel"),
            column("p50 us", "p50_us"),
            column("default", "default_kernel"),
            column("default us", "default_p50_us"),
            column("device", "device").minor(),
            column("driver", "driver").minor(),
            column("measured on", "problem").minor(),
        ]);
        for tuned in &all {
            table.push(vec![
                Cell::from(tuned.class.as_str()),
                Cell::from(tuned.config.as_str()),
                Cell::number(tuned.seconds * 1e6, 2),
                Cell::from(tuned.default_config.as_str()),
                Cell::number(tuned.default_seconds * 1e6, 2),
                Cell::from(tuned.device.as_str()),
                Cell::from(tuned.driver.as_str()),
                Cell::from(tuned.problem.as_str()),
            ]);
        }
        if all.is_empty() {
            self.say(output, &format!("nothing is stored in {}", store.path().display()))?;
        }
        if !all.is_empty() || !matches!(self.format, Format::Table | Format::Markdown) {
            output.table(&table, self.format)?;
        }
        Ok(Ending::Well)
    }
}

fn forget(output: &Output, store: &TuningStore, class: &str) -> Result<Ending, Failure> {
    if class == "all" {
        let was_there = store.forget_all().map_err(environment)?;
        output.line(if was_there { "removed all stored results" } else { "there was nothing to remove" })?;
        return Ok(Ending::Well);
    }
    match store.forget(|tuned| tuned.class == class) {
        Ok(0) => Err(Failure::Usage(format!("nothing is stored for `{class}`; --list shows what is"))),
        Ok(count) => {
            output.line(format!("removed {count} for `{class}`"))?;
            Ok(Ending::Well)
        }
        Err(error) => Err(environment(error)),
    }
}
