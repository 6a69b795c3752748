//! `flashcore microbench`: throughput of the instructions that kernels choose between.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use flashcore_bench::lab::microbench::{Conversion, MicroGpu, Microbenchmark, Product, simulate};
use flashcore_bench::lab::peak::working_threads;
use flashcore_bench::lab::record::Machine;
use flashcore_bench::testkit::Workload;
use flashcore_bench::testkit::gpu::Gpu;
use flashcore_problem::DTypes;

use super::origin::write_record;
use super::reference_gpu;
use crate::output::{Cell, Column, Format, Output, Table, column};
use crate::{Ending, Failure, interrupt};

/// Measure the conversions of FP8 and the products that GPU kernels choose between
///
/// Kernels with 8-bit keys and values widen codes to 16 bits in registers, by moving bits (integer) or by the instruction
/// cvt (configs with -cvt in their name). Each is judged on all 256 codes, then timed in a loop without dependences, and
/// stands beside the memory floor of a decode: a conversion that does fewer codes in a clock than memory delivers bounds
/// the kernel. Products of mma.sync follow. A mark shows the default of the architecture; where another way is faster, the
/// last lines say so. In the simulator, without a GPU, values are judged and PTX instructions counted: counts are no times.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore microbench\n  flashcore microbench --backend sim\n  flashcore microbench --backend cuda --record microbench.json"
)]
pub(crate) struct Microbench {
    /// The machine: the first GPU by default, or the simulator if there is none
    #[arg(long, value_enum, default_value_t = BackendName::Auto)]
    backend: BackendName,
    /// The decode whose memory floor stands beside conversions, in element types bf16 kv e4m3
    /// [default: 8x32/8x1,8192x128]
    #[arg(long)]
    shape: Option<String>,
    /// Write a JSON record with the machine and every sample
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendName {
    /// The first GPU, or the simulator where there is none
    Auto,
    /// The first GPU
    Cuda,
    /// The simulator: verdicts and counts
    Sim,
}

/// The decode, where the command line names none.
const DECODE: &str = "8x32/8x1,8192x128";

impl Microbench {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        interrupt::watch();
        let types: DTypes = "bf16 kv e4m3".parse().map_err(|error| Failure::Usage(format!("{error}")))?;
        let decode = super::problem(self.shape.as_deref().unwrap_or(DECODE), types, "full")?;
        let gpu = match self.backend {
            BackendName::Sim => None,
            BackendName::Cuda => Some(Gpu::open(0).map_err(|error| Failure::Environment(error.to_string()))?),
            BackendName::Auto => Gpu::open(0).ok(),
        };
        if let (Some(shape), None) = (&self.shape, &gpu) {
            return Err(Failure::Usage(format!(
                "--shape {shape} is the decode that a GPU's memory bounds; the simulator has no times: leave it out"
            )));
        }
        let work = || self.found(&decode, gpu.as_ref(), output);
        interrupt::abandonable(output, work, |found| {
            let Some((found, machine)) = found else {
                output.note("interrupted before all was measured; nothing is written");
                return Ok(Ending::Interrupted);
            };
            self.conclude(found, machine, output)
        })
    }

    fn found(
        &self,
        decode: &Workload,
        gpu: Option<&Gpu>,
        output: &Output,
    ) -> Result<(Microbenchmark, Machine), Failure> {
        let environment = |error: &dyn std::error::Error| Failure::Environment(error.to_string());
        if let Some(gpu) = gpu {
            let micro = MicroGpu::new(gpu).map_err(|error| environment(&error))?;
            let (mut done, of) = (0, Conversion::all().count() + Product::ALL.len());
            let progress = |what: &str| {
                output.progress(done, of, what);
                done += 1;
                !interrupt::requested()
            };
            let found = micro.measure(decode, progress).map_err(|error| environment(&error))?;
            let device = gpu.device().context().ok_or_else(|| Failure::Environment("no GPU".to_owned()))?.device();
            Ok((found, Machine::gpu(device, None)))
        } else {
            if self.backend == BackendName::Auto {
                output.note("no usable GPU (`flashcore doctor` says why); the simulator judges and counts");
            }
            let found = simulate(reference_gpu::ARCH).map_err(|error| environment(&error))?;
            let machine = Machine::cpu("simulator", working_threads(), None);
            Ok((found, Machine { backend: "sim".to_owned(), ..machine }))
        }
    }

    fn conclude(&self, found: Microbenchmark, machine: Machine, output: &Output) -> Result<Ending, Failure> {
        self.show(output, &found)?;
        let passed = found.passed();
        if let Some(file) = &self.record {
            write_record(file, machine, found)?;
        }
        Ok(if interrupt::requested() {
            Ending::Interrupted
        } else if passed {
            Ending::Well
        } else {
            Ending::Failed
        })
    }

    fn show(&self, output: &Output, found: &Microbenchmark) -> Result<(), Failure> {
        let is_for_people = matches!(self.format, Format::Table | Format::Markdown);
        if is_for_people {
            output.sentence(match &found.decode {
                Some(floor) => format!(
                    "{}: decode {} of bf16 kv e4m3 reads {:.1} MB in {:.2} us at the rate of a copy, {:.1} codes in a clock of an SM; conversions are to be faster",
                    found.arch,
                    floor.shape,
                    floor.bytes / 1e6,
                    floor.seconds * 1e6,
                    floor.codes_per_clock_per_sm
                ),
                None => format!(
                    "simulator, defaults of {}: all 256 codes in every place of a word, and counts of PTX instructions, which are no times; a GPU has those",
                    found.arch
                ),
            })?;
        }
        output.table(&table(found), self.format)?;
        if !is_for_people {
            return Ok(());
        }
        if let Some(rate) = &found.loop_alone {
            let alone = rate.codes_per_clock_per_sm;
            output.sentence(format!("the loop without a conversion: {alone:.1} codes in a clock of an SM"))?;
        }
        for slower in found.slower_defaults() {
            output.sentence(format!(
                "{} to {}: `{}` takes {:.0} % of the time of the default, `{}`; Fp8Widening::of is to choose it for {}",
                slower.from,
                slower.to,
                slower.faster,
                100.0 * slower.ratio,
                slower.default,
                found.arch
            ))?;
        }
        Ok(())
    }
}

/// One table for programs and people: conversions, then products, which lack the figures of conversions.
fn table(found: &Microbenchmark) -> Table {
    let shown = [
        column("what", "what"),
        column("by", "by"),
        column("bytes of", "bytes_of"),
        column("default", "default"),
        column("verdict", "verdict").verdict(),
        column("PTX instructions for 4 codes", "ptx_instructions_per_4_codes"),
    ];
    let timed = [
        column("codes per clock and SM", "codes_per_clock_per_sm"),
        column("us for the decode", "decode_us"),
        column("% of its memory floor", "part_of_floor_percent"),
        column("FLOP per clock and SM", "flops_per_clock_per_sm"),
        column("TFLOP/s", "tflops_per_s"),
    ];
    let columns: Vec<Column> = if found.decode.is_some() { [&shown[..], &timed].concat() } else { shown.to_vec() };
    let mut table = Table::new(&columns);
    for row in &found.conversions {
        let verdict = if row.wrong_codes.is_empty() {
            "exact".to_owned()
        } else {
            let wrong: Vec<String> = row.wrong_codes.iter().take(8).map(|code| format!("{code:#04x}")).collect();
            format!("WRONG: {} codes, {}", row.wrong_codes.len(), wrong.join(" "))
        };
        let mut cells = vec![
            Cell::from(format!("{} to {}", row.from, row.to)),
            Cell::from(row.way.as_str()),
            Cell::from(row.order.as_str()),
            Cell::from(if row.is_default { "default" } else { "" }),
            Cell::from(verdict),
            Cell::from(row.instructions),
        ];
        if let Some(floor) = &found.decode {
            let rate = row.measured.as_ref();
            let figure =
                |value: Option<f64>, digits| value.map_or_else(Cell::none, |value| Cell::number(value, digits));
            cells.extend([
                figure(rate.map(|rate| rate.codes_per_clock_per_sm), 1),
                figure(rate.map(|rate| rate.decode_seconds * 1e6), 2),
                figure(rate.map(|rate| 100.0 * rate.decode_seconds / floor.seconds), 0),
                Cell::none(),
                Cell::none(),
            ]);
        }
        table.push(cells);
    }
    for row in &found.products {
        let mut cells = vec![
            Cell::from(row.form.as_str()),
            Cell::from("mma.sync"),
            Cell::none(),
            Cell::none(),
            Cell::from(if row.is_right { "right" } else { "WRONG" }),
            Cell::none(),
        ];
        if found.decode.is_some() {
            cells.extend([Cell::none(), Cell::none(), Cell::none()]);
            cells.extend(row.measured.as_ref().map_or_else(
                || [Cell::none(), Cell::none()],
                |rate| [Cell::number(rate.flops_per_clock_per_sm, 0), Cell::number(rate.tflops(), 1)],
            ));
        }
        table.push(cells);
    }
    table
}
