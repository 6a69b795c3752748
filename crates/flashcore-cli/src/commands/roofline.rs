//! `flashcore roofline`: how fast can it be at all?

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use flashcore_bench::problems::BenchSuite;
use flashcore_bench::record::{Measurements, Record};
use flashcore_bench::roofline::{
    DEVICES, DeviceError, Floors, HISTORIC_TARGETS, Judgement, MeasuredPoint, Possibility, RoofDevice, Target, plot,
};
use flashcore_bench::{mask_text, parse_mask, parse_shape, shape_text};
use flashcore_problem::{DType, Mask, Problem};

use super::origin::write_file;
use super::overwriting::refuse_overwriting;
use crate::output::{Cell, Format, Output, Table};
use crate::{Ending, Failure};

/// Say how fast attention can be on a device, and which targets nothing can meet
///
/// A floor is the time under which a device cannot do what a problem needs: multiplying matrices at its peak, reading
/// the inputs and writing the output once from and to memory (cold) or through the ports of the L2 cache (hot), the
/// exponentials, the smallest launch where it was measured. Targets are held against the floors: a time below one is
/// impossible, whoever writes the kernel. Exit code 1 when a --target is impossible.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore roofline --device l4\n  flashcore roofline --device h200 --shape 1x8x512x64 --target 1x8x512x64@5us\n  flashcore roofline --device this-gpu --suite prefill --record prefill.json --svg roofline.svg\n  flashcore roofline --device all --shape 4x16x2048x128"
)]
pub(crate) struct Roofline {
    /// The device: l4, l40s, a100, h100, h200, b200, rtx-4090, rtx-5090, this-cpu or this-gpu (both measured), or all of
    /// the table
    #[arg(long, default_value = "l4", value_name = "NAME")]
    device: String,
    /// The problems
    #[arg(long, value_enum, default_value_t = SuiteName::Seeds)]
    suite: SuiteName,
    /// One problem instead, or several: batch x heads[/key heads] x queries[,keys] x dim
    #[arg(long, conflicts_with = "suite")]
    shape: Vec<String>,
    /// The element type
    #[arg(long, default_value_t = DType::F16)]
    dtype: DType,
    /// The mask: full, causal, causal-top-left or window:LEFT,RIGHT
    #[arg(long, default_value = "full")]
    mask: String,
    /// A target to judge, or several: SHAPE@TIME or SHAPE@RATE, such as 1x8x512x64@5us or 1x8x512x64@80tflops
    #[arg(long, value_name = "TARGET")]
    target: Vec<String>,
    /// Judge the targets of the project's history too: on any device; on the L4 that they were for, they are judged unless
    /// shapes or a format for programs are asked for
    #[arg(long)]
    historic: bool,
    /// A record of `flashcore bench` whose times are drawn as points, or several
    #[arg(long, value_name = "FILE")]
    record: Vec<PathBuf>,
    /// A file for the picture
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// How tables are written
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SuiteName {
    /// The shapes of the project's history
    Seeds,
    /// Long sequences, 16k tokens in all
    Prefill,
    /// One query row over a long key cache
    Decode,
}

impl Roofline {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
        let read: Vec<&Path> = self.record.iter().map(PathBuf::as_path).collect();
        refuse_overwriting(&read, self.svg.as_deref().as_slice())?;
        let devices = self.devices()?;
        let problems = self.problems()?;
        let mut targets = Vec::new();
        for text in &self.target {
            targets.push((Target::parse(text, self.dtype).map_err(|error| Failure::Usage(error.to_string()))?, ""));
        }
        let is_for_people = matches!(self.format, Format::Table | Format::Markdown);
        let is_of_history = self.device == "l4" && self.suite == SuiteName::Seeds && self.shape.is_empty();
        if self.historic || is_of_history && is_for_people {
            for historic in HISTORIC_TARGETS {
                let target = Target::parse(historic.target, self.dtype);
                targets.push((target.map_err(|error| Failure::Usage(error.to_string()))?, historic.wish));
            }
        }
        if is_for_people {
            for device in &devices {
                output.line(words(device))?;
            }
            output.line("")?;
        }
        // Two tables in one output would be read by no program; those who ask for targets get targets.
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
            if targets.iter().any(|(target, wish)| wish.is_empty() && is_impossible(target)) {
                ending = Ending::Failed;
            }
        }
        if let Some(file) = &self.svg {
            let [device] = &devices[..] else {
                return Err(Failure::Usage("--svg draws one device; name it with --device".to_owned()));
            };
            let picture = plot(device, self.dtype, &problems, &self.measured()?);
            write_file(file, picture.file().as_bytes())?;
        }
        Ok(ending)
    }

    fn devices(&self) -> Result<Vec<RoofDevice>, Failure> {
        if self.device == "all" {
            return Ok(RoofDevice::table());
        }
        match RoofDevice::named(&self.device) {
            Ok(device) => Ok(vec![device]),
            Err(error @ DeviceError::Unknown(_)) => Err(Failure::Usage(format!("{error}, all"))),
            Err(error @ DeviceError::NoGpu(_)) => {
                let others =
                    DEVICES.into_iter().filter(|name| !name.starts_with("this")).collect::<Vec<_>>().join(", ");
                Err(Failure::Environment(format!("{error}; the table has {others}")))
            }
        }
    }

    fn problems(&self) -> Result<Vec<Problem>, Failure> {
        let usage = |error: flashcore_bench::ShapeError| Failure::Usage(error.to_string());
        let mask = parse_mask(&self.mask).map_err(usage)?;
        let problems: Vec<Problem> = if self.shape.is_empty() {
            let suite = match self.suite {
                SuiteName::Seeds => BenchSuite::Seeds,
                SuiteName::Prefill => BenchSuite::Prefill,
                SuiteName::Decode => BenchSuite::Decode,
            };
            suite.problems(self.dtype).into_iter().filter(|problem| problem.mask == Mask::None).collect()
        } else {
            let shapes = self.shape.iter().map(|shape| parse_shape(shape, self.dtype));
            shapes.collect::<Result<_, _>>().map_err(usage)?
        };
        let problems: Vec<Problem> = problems.into_iter().map(|problem| Problem { mask, ..problem }).collect();
        for problem in &problems {
            if let Err(errors) = problem.validate() {
                return Err(Failure::Usage(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")));
            }
        }
        Ok(problems)
    }

    fn measured(&self) -> Result<Vec<MeasuredPoint>, Failure> {
        let mut points = Vec::new();
        for file in &self.record {
            let record = Record::<Measurements>::read(file).map_err(|error| Failure::Usage(error.to_string()))?;
            for row in record.content.rows {
                let problem = row.problem.problem().map_err(|error| Failure::Usage(error.to_string()))?;
                if problem.dtype == self.dtype {
                    points.push(MeasuredPoint { seconds: row.median(), kernel: row.kernel, problem });
                }
            }
        }
        Ok(points)
    }
}

fn words(device: &RoofDevice) -> String {
    let tera = |rate: f64| format!("{:.3}", rate / 1e12);
    let l2 = if device.l2_bytes.is_finite() {
        format!(", L2 at most {} TB/s and {:.0} MB", tera(device.l2_bytes), device.l2_size / 1e6)
    } else {
        String::new()
    };
    let exponentials = if device.exponentials.is_finite() {
        format!(", {} T exponentials/s", tera(device.exponentials))
    } else {
        String::new()
    };
    format!(
        "{}: {} TFLOP/s in 16-bit products, {} in f32, memory {} TB/s{l2}{exponentials} ({})",
        device.name,
        tera(device.tensor_flops),
        tera(device.vector_flops),
        tera(device.dram_bytes),
        device.source
    )
}

fn floors_table(devices: &[RoofDevice], problems: &[Problem]) -> Table {
    let mut table = Table::new(&[
        "device",
        "shape",
        "dtype",
        "mask",
        "GFLOP",
        "MB",
        "FLOP/B",
        "tensor us",
        "DRAM cold us",
        "L2 us",
        "exp us",
        "launch us",
        "hot floor us",
        "by",
        "cold floor us",
        "by cold",
    ]);
    let us = |seconds: f64| Cell::number(seconds * 1e6, 2);
    for device in devices {
        for problem in problems {
            let floors = Floors::of(problem, device);
            let ((hot, hot_limit), (cold, cold_limit)) = (floors.hot(), floors.cold());
            table.push(vec![
                Cell::from(device.key.as_str()),
                Cell::from(shape_text(problem)),
                Cell::from(problem.dtype.to_string()),
                Cell::from(mask_text(problem.mask)),
                Cell::number(floors.work.flops / 1e9, 3),
                Cell::number(floors.work.bytes / 1e6, 2),
                Cell::number(floors.intensity(), 0),
                us(floors.tensor),
                us(floors.dram),
                us(floors.l2),
                us(floors.exponentials),
                floors.launch.map_or_else(|| Cell::from("-"), us),
                us(hot),
                Cell::from(hot_limit.to_string()),
                us(cold),
                Cell::from(cold_limit.to_string()),
            ]);
        }
    }
    table
}

fn targets_table(devices: &[RoofDevice], targets: &[(Target, &str)]) -> Table {
    let mut table =
        Table::new(&["device", "target", "wish", "needs TFLOP/s", "% of peak", "% of DRAM cold", "verdict", "because"]);
    for device in devices {
        for (target, wish) in targets {
            let judgement = Judgement::of(target, device);
            table.push(vec![
                Cell::from(device.key.as_str()),
                Cell::from(target.to_string()),
                Cell::from(*wish),
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
