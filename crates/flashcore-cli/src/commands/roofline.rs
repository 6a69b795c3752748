//! `flashcore roofline`: the least time that a device's peak rates allow.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use flashcore_bench::lab::problems::BenchSuite;
use flashcore_bench::lab::record::{Measurements, Record};
use flashcore_bench::lab::roofline::{
    DEVICES, DeviceError, Floors, HISTORIC_TARGETS, Judgement, MeasuredPoint, Possibility, RoofDevice, Target, plot,
};
use flashcore_bench::testkit::gpu::Gpu;
use flashcore_bench::testkit::{parse_mask, parse_workload};
use flashcore_problem::{DType, DTypes, Mask, Problem};

use super::origin::write_file;
use super::overwriting::refuse_overwriting;
use crate::output::{Cell, Format, Output, PROBLEM, Table, column, problem_cells};
use crate::{Ending, Failure};

/// Show the least time that a device needs for attention, and whether a target can be met
///
/// A floor is the least time that a device's peak rates allow: for the matrix products, for reading the inputs and writing
/// the output once from and to DRAM (cold) or through the L2 cache (hot), for the exponentials, and for the smallest
/// launch where it was measured. A target below its floor is impossible for any kernel. Exit code 1 if a --target is
/// impossible.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore roofline\n  flashcore roofline --device l4\n  flashcore roofline --device h200 --shape 1x8x512x64 --target 1x8x512x64@5us\n  flashcore roofline --device this-gpu --suite prefill --record prefill.json --svg roofline.svg\n  flashcore roofline --device all --shape 4x16x2048x128\n  flashcore roofline --device h200 --suite decode --dtype 'bf16 kv e4m3'"
)]
pub(crate) struct Roofline {
    /// The device: l4, l40s, a100, h100, h200, b200, rtx-4090, rtx-5090 (data sheets), all of these, or this-cpu or
    /// this-gpu (measured) [default: this-gpu, or this-cpu if there is no GPU]
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// The problems to show
    #[arg(long, value_enum, default_value_t = SuiteName::Seeds)]
    suite: SuiteName,
    /// A single problem instead of a suite, or several: batch x heads[/key heads] x queries[,keys] x dim
    #[arg(long, conflicts_with = "suite")]
    shape: Vec<String>,
    /// The element type, or those of query, key and value, and output, such as 'bf16 kv e4m3' or 'e4m3 out bf16'
    /// [default: f32 on a CPU, f16 on a GPU]
    #[arg(long)]
    dtype: Option<DTypes>,
    /// The mask: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// A target to judge, or several: SHAPE@TIME or SHAPE@RATE, such as 1x8x512x64@5us or 1x8x512x64@80tflops
    #[arg(long, value_name = "TARGET")]
    target: Vec<String>,
    /// Judge the targets that this project once had for an L4 as well
    #[arg(long)]
    historic: bool,
    /// A record of `flashcore bench` to draw as points in --svg, or several
    #[arg(long, value_name = "FILE", requires = "svg")]
    record: Vec<PathBuf>,
    /// Write a plot as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SuiteName {
    /// Eight canonical shapes
    Seeds,
    /// Prompts of 512 to 16k tokens, 16k tokens in each batch
    Prefill,
    /// One query row over a long key cache
    Decode,
}

impl Roofline {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        let read: Vec<&Path> = self.record.iter().map(PathBuf::as_path).collect();
        refuse_overwriting(&read, self.svg.as_deref().as_slice())?;
        let devices = self.devices()?;
        let is_cpu = devices.iter().all(|device| device.key == "this-cpu");
        let types = self.dtype.unwrap_or(super::one_type(if is_cpu { DType::F32 } else { DType::F16 }));
        let devices = with_products_of(devices, types, output)?;
        let problems = self.problems(types)?;
        let mut targets = Vec::new();
        for text in &self.target {
            targets.push((Target::parse(text, types).map_err(|error| Failure::Usage(error.to_string()))?, ""));
        }
        let is_for_people = matches!(self.format, Format::Table | Format::Markdown);
        if self.historic {
            for historic in HISTORIC_TARGETS {
                let target = Target::parse(historic.target, types);
                targets.push((target.map_err(|error| Failure::Usage(error.to_string()))?, historic.name));
            }
        }
        if is_for_people {
            for device in &devices {
                output.sentence(words(device))?;
            }
            output.line("")?;
        }
        // No program reads two tables in one output; whoever asks for targets gets targets.
        if is_for_people || targets.is_empty() {
            output.table(&floors_table(&devices, &problems), self.format)?;
        }
        let mut ending = Ending::Well;
        if !targets.is_empty() {
            if is_for_people {
                output.line("")?;
            }
            output.table(&targets_table(&devices, &targets), self.format)?;
            let is_impossible = |target: &Target| {
                devices.iter().any(|device| Judgement::of(target, device).possibility == Possibility::Impossible)
            };
            if targets.iter().any(|(target, name)| name.is_empty() && is_impossible(target)) {
                ending = Ending::Failed;
            }
        }
        if let Some(file) = &self.svg {
            let [device] = &devices[..] else {
                return Err(Failure::Usage("--svg draws one device; name it with --device".to_owned()));
            };
            let picture = plot(device, types, &problems, &self.measured(types)?);
            write_file(file, picture.file().as_bytes())?;
        }
        Ok(ending)
    }

    fn devices(&self) -> Result<Vec<RoofDevice>, Failure> {
        let named = match self.device.as_deref() {
            Some("all") => return Ok(RoofDevice::table()),
            Some(name) => RoofDevice::named(name),
            None => match Gpu::open(0) {
                Ok(gpu) => RoofDevice::this_gpu(&gpu).map_err(DeviceError::from),
                Err(_) => Ok(RoofDevice::this_cpu()),
            },
        };
        match named {
            Ok(device) => Ok(vec![device]),
            Err(error @ DeviceError::Unknown(_)) => Err(Failure::Usage(format!("{error}, all"))),
            Err(error @ DeviceError::NoGpu(_)) => {
                let others =
                    DEVICES.into_iter().filter(|name| !name.starts_with("this")).collect::<Vec<_>>().join(", ");
                Err(Failure::Environment(format!("{error}; the table has {others}")))
            }
        }
    }

    fn problems(&self, types: DTypes) -> Result<Vec<Problem>, Failure> {
        let usage = |error: flashcore_bench::testkit::ShapeError| Failure::Usage(error.to_string());
        let mask = parse_mask(&self.mask).map_err(usage)?;
        let problems: Vec<Problem> = if self.shape.is_empty() {
            let suite = match self.suite {
                SuiteName::Seeds => BenchSuite::Seeds,
                SuiteName::Prefill => BenchSuite::Prefill,
                SuiteName::Decode => BenchSuite::Decode,
            };
            let problems = suite.problems(types.query).into_iter().filter(|problem| problem.mask == Mask::None);
            problems.map(|problem| problem.with_dtypes(types)).collect()
        } else {
            let shapes = self.shape.iter().map(|shape| Ok(parse_workload(shape, types)?.problem));
            shapes.collect::<Result<_, _>>().map_err(usage)?
        };
        let problems: Vec<Problem> = problems.into_iter().map(|problem| problem.with_mask(mask)).collect();
        problems.iter().try_for_each(super::valid)?;
        Ok(problems)
    }

    fn measured(&self, types: DTypes) -> Result<Vec<MeasuredPoint>, Failure> {
        let mut points = Vec::new();
        for file in &self.record {
            let record = Record::<Measurements>::read(file).map_err(|error| Failure::Usage(error.to_string()))?;
            for row in record.content.rows {
                let problem = row.problem.problem().map_err(|error| Failure::Usage(error.to_string()))?;
                if problem.dtypes() == types {
                    points.push(MeasuredPoint { seconds: row.median(), kernel: row.kernel, problem });
                }
            }
        }
        Ok(points)
    }
}

/// The devices that can multiply these types. One that was asked for alone and cannot is an error; of several, those that
/// cannot are left out.
fn with_products_of(devices: Vec<RoofDevice>, types: DTypes, output: &Output) -> Result<Vec<RoofDevice>, Failure> {
    let (able, unable): (Vec<RoofDevice>, Vec<RoofDevice>) =
        devices.into_iter().partition(|device| device.flops(types).is_some());
    let names = unable.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", ");
    if able.is_empty() {
        return Err(Failure::Usage(format!(
            "{names} has no tensor cores for {}; use --dtype 'bf16 kv {}', whose products are of 16 bits, or a --device from Ada or Hopper on",
            types.query, types.key_value
        )));
    }
    if !unable.is_empty() {
        output.note(&format!("left out, for lack of tensor cores for {}: {names}", types.query));
    }
    Ok(able)
}

fn words(device: &RoofDevice) -> String {
    let tera = |rate: f64| format!("{:.3}", rate / 1e12);
    let l2 = if device.l2_bytes.is_finite() {
        format!(", L2 at most {} TB/s and {:.0} MB", tera(device.l2_bytes), device.l2_size / 1e6)
    } else {
        String::new()
    };
    let fp8 = device.fp8_flops.map_or_else(String::new, |rate| format!(", {} in FP8", tera(rate)));
    let exponentials = if device.exponentials.is_finite() {
        format!(", {} T exponentials/s", tera(device.exponentials))
    } else {
        String::new()
    };
    format!(
        "{}: {} TFLOP/s in 16-bit products{fp8}, {} in f32, memory {} TB/s{l2}{exponentials} ({})",
        device.name,
        tera(device.tensor_flops),
        tera(device.vector_flops),
        tera(device.dram_bytes),
        device.source
    )
}

fn floors_table(devices: &[RoofDevice], problems: &[Problem]) -> Table {
    let columns = [
        column("device", "device").minor(),
        column("GFLOP", "gflop").minor(),
        column("MB", "megabytes").minor(),
        column("FLOP/B", "flops_per_byte").minor(),
        column("products us", "products_us").minor(),
        column("DRAM us", "dram_us").minor(),
        column("L2 us", "l2_us").minor(),
        column("exp us", "exponentials_us").minor(),
        column("launch us", "launch_us").minor(),
        column("hot floor us", "hot_floor_us"),
        column("hot bound by", "hot_bound_by"),
        column("cold floor us", "cold_floor_us"),
        column("cold bound by", "cold_bound_by"),
    ];
    let mut table = Table::new(&[&PROBLEM[..], &columns].concat());
    let us = |seconds: f64| Cell::precise(seconds * 1e6, 2);
    // What is not known of a device limits nothing.
    let known = |seconds: f64| if seconds > 0.0 { us(seconds) } else { Cell::none() };
    for device in devices {
        for problem in problems {
            let floors = Floors::of(problem, device);
            let ((hot, hot_limit), (cold, cold_limit)) = (floors.hot(), floors.cold());
            let mut cells = problem_cells(problem);
            cells.extend([
                Cell::from(device.key.as_str()),
                Cell::precise(floors.work.flops / 1e9, 3),
                Cell::precise(floors.work.bytes / 1e6, 2),
                Cell::number(floors.intensity(), 0),
                us(floors.tensor),
                us(floors.dram),
                known(floors.l2),
                known(floors.exponentials),
                floors.launch.map_or_else(Cell::none, us),
                us(hot),
                Cell::from(hot_limit.to_string()),
                us(cold),
                Cell::from(cold_limit.to_string()),
            ]);
            table.push(cells);
        }
    }
    table
}

fn targets_table(devices: &[RoofDevice], targets: &[(Target, &str)]) -> Table {
    let mut table = Table::new(&[
        column("target", "target"),
        column("device", "device").minor(),
        column("wanted as", "wanted_as").minor(),
        column("needs TFLOP/s", "needed_tflops_per_s"),
        column("% of peak", "part_of_peak_percent"),
        column("% of DRAM, cold", "part_of_dram_cold_percent"),
        column("verdict", "verdict").verdict(),
        column("reason", "reason"),
    ]);
    for device in devices {
        for (target, name) in targets {
            let judgement = Judgement::of(target, device);
            table.push(vec![
                Cell::from(target.to_string()),
                Cell::from(device.key.as_str()),
                Cell::from(*name),
                Cell::number(judgement.flops / 1e12, 1),
                Cell::number(100.0 * judgement.part_of_peak, 0),
                Cell::number(100.0 * judgement.part_of_dram, 0),
                Cell::from(judgement.possibility.to_string()),
                Cell::from(judgement.reason),
            ]);
        }
    }
    table
}
