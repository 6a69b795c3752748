//! `flashcore accuracy`: errors of element types, scale modes and options against `f64`.

use std::path::PathBuf;
use std::sync::Mutex;

use clap::{Args, ValueEnum};
use flashcore::Device;
use flashcore_bench::lab::accuracy::needle::{Found, Haystack, searches};
use flashcore_bench::lab::accuracy::{
    AccuracyRecord, Choice, Distribution, GateResult, H200_FP8_BITS, Outcome, Row, Run, Sample, Sizes, cases, gates,
};
use flashcore_bench::lab::peak::working_threads;
use flashcore_bench::lab::record::Machine;
use flashcore_bench::util::printable::printable;
use flashcore_cpu::Level;
use flashcore_problem::{DTypes, ScaleMode};

use super::impossible;
use super::origin::write_record;
use super::threads::Threads;
use crate::output::{Cell, Format, Output, Table, column, field};
use crate::{Ending, Failure, interrupt};

/// Show the error of each element type, scale mode and option against f64
///
/// Query, key and value are drawn in f32, rounded or quantised to each type, and the output is compared with f64 on the
/// inputs as they were drawn. `computed by` says who did: f64 (the oracle on the rounded inputs: the error of rounding
/// alone), cpu or gpu (the library), or a model of a tensor-core kernel, which rounds P and adds as the simulator does,
/// P times V in one level or two (an accumulator of each key tile).
///
/// `size bias` is |O| / |O of f64| - 1; `projection bias` leaves out what errors at random add to it.
///
/// --needle hides one key in 128k for each of 100 queries and reads the outputs; exit code 1 if any but the model of one
/// level, the negative, misses one. --gate holds errors and needles against the project's aims; exit code 1 if one fails.
/// Both leave out the table, unless --lengths asks for it.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore accuracy\n  flashcore accuracy --lengths 1k,16k,128k --types 'e4m3 out bf16' --record accuracy.json\n  flashcore accuracy --types 'bf16 kv e4m3' --scales fixed:1,head,token --options none --data outliers\n  flashcore accuracy --backend cuda\n  flashcore accuracy --needle\n  flashcore accuracy --gate"
)]
pub(crate) struct Accuracy {
    /// The device of the library's rows; types that it refuses have the reason in their row
    #[arg(long, value_enum, default_value_t)]
    backend: BackendName,
    /// Numbers of keys; k is 1024 [default: 1k,4k]
    #[arg(long, value_delimiter = ',', value_parser = parse_length)]
    lengths: Option<Vec<usize>>,
    #[command(flatten)]
    of_rows: OfRows,
    /// Fraction bits that the models of tensor cores keep when they add products of FP8; the default is that of an H200
    #[arg(long, value_name = "BITS", default_value_t = H200_FP8_BITS, value_parser = clap::value_parser!(u32).range(4..=25))]
    fp8_bits: u32,
    /// The seed of all data
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Search for needles in a haystack
    #[arg(long, group = "searches")]
    needle: bool,
    /// Needles, of --needle and --gate
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=4096), requires = "searches")]
    trials: u32,
    /// Keys of the haystack, of --needle and --gate
    #[arg(long, value_name = "KEYS", default_value = "128k", value_parser = parse_length, requires = "searches")]
    haystack: usize,
    /// Hold errors and needles against the project's aims
    #[arg(long, group = "searches")]
    gate: bool,
    /// Write a JSON record with everything that was found
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    #[command(flatten)]
    threads: Threads,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Choices of the rows: --needle and --gate have theirs.
#[derive(Debug, Args)]
struct OfRows {
    /// Element types: f32, f16, bf16, 'bf16 kv e4m3' for a cache in FP8, 'e4m3 out bf16' for all inputs in FP8
    /// [default: these five]
    #[arg(long, value_delimiter = ',')]
    types: Vec<DTypes>,
    /// Elements that share a scale: tensor, head, sequence, token, block:ROWS, or a given one, fixed:SCALE
    /// [default: tensor,head,token,block:64]
    #[arg(long, value_delimiter = ',')]
    scales: Vec<ScaleMode>,
    /// Options of quantisation: none, smooth (subtract the mean key), rotate (Hadamard), smooth+rotate
    /// [default: none,rotate]
    #[arg(long, value_enum, value_delimiter = ',')]
    options: Vec<OptionsName>,
    /// Distributions: gaussian, outliers (0.1 % of elements get a normal number of ten times the size added), or key-mean
    /// (keys with a mean in each column, which smoothing is for) [default: gaussian,outliers]
    #[arg(long, value_delimiter = ',')]
    data: Vec<Distribution>,
    /// Query rows of a head; few suffice, as rows differ little (with outliers, RMSE needs hundreds) [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    queries: Option<u32>,
    /// Heads [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    heads: Option<u32>,
    /// Columns of query, key and value [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    head_dim: Option<u32>,
}

impl OfRows {
    /// The name of an option that was given.
    fn given(&self) -> Option<&'static str> {
        let given = [
            ("--types", !self.types.is_empty()),
            ("--scales", !self.scales.is_empty()),
            ("--options", !self.options.is_empty()),
            ("--data", !self.data.is_empty()),
            ("--queries", self.queries.is_some()),
            ("--heads", self.heads.is_some()),
            ("--head-dim", self.head_dim.is_some()),
        ];
        given.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
    }

    fn types(&self) -> Result<Vec<DTypes>, Failure> {
        if !self.types.is_empty() {
            return Ok(self.types.clone());
        }
        let all = ["f32", "f16", "bf16", "bf16 kv e4m3", "e4m3 out bf16"].map(str::parse);
        all.into_iter().collect::<Result<_, _>>().map_err(|error| Failure::Usage(format!("{error}")))
    }

    fn scales(&self) -> Result<Vec<ScaleMode>, Failure> {
        if !self.scales.is_empty() {
            return Ok(self.scales.clone());
        }
        let all = ["tensor", "head", "token", "block:64"].map(str::parse);
        all.into_iter().collect::<Result<_, _>>().map_err(|error| Failure::Usage(format!("{error}")))
    }

    fn options(&self) -> &[OptionsName] {
        if self.options.is_empty() { &[OptionsName::None, OptionsName::Rotate] } else { &self.options }
    }

    fn data(&self) -> &[Distribution] {
        if self.data.is_empty() { &[Distribution::Gaussian, Distribution::Outliers] } else { &self.data }
    }

    fn sizes(&self, keys: usize) -> Sizes {
        let [heads, queries, head_dim] =
            [self.heads.unwrap_or(2), self.queries.unwrap_or(16), self.head_dim.unwrap_or(128)]
                .map(|number| number as usize);
        Sizes { heads, queries, keys, head_dim }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum BackendName {
    /// This machine's CPU
    #[default]
    Cpu,
    /// The first GPU
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OptionsName {
    /// Quantise as it is
    None,
    /// Subtract the mean of the keys
    Smooth,
    /// Rotate query and key
    Rotate,
    /// Both
    #[value(name = "smooth+rotate")]
    Both,
}

impl OptionsName {
    const fn parts(self) -> (bool, bool) {
        match self {
            Self::None => (false, false),
            Self::Smooth => (true, false),
            Self::Rotate => (false, true),
            Self::Both => (true, true),
        }
    }
}

/// Keys such as 4096, 16k or 1m.
fn parse_length(text: &str) -> Result<usize, String> {
    const MOST: usize = 1 << 30;
    let (digits, factor) = match text.char_indices().last() {
        Some((end, 'k' | 'K')) => (&text[..end], 1 << 10),
        Some((end, 'm' | 'M')) => (&text[..end], 1 << 20),
        _ => (text, 1),
    };
    let length = digits.parse().ok().and_then(|number: usize| number.checked_mul(factor));
    length
        .filter(|length| (1..=MOST).contains(length))
        .ok_or_else(|| format!("a length is a number of keys from 1 to {MOST}, such as 4096 or 16k"))
}

/// Results so far.
#[derive(Default)]
struct Kept {
    rows: Vec<Row>,
    needles: Vec<Found>,
    verdicts: Vec<GateResult>,
    /// Name and length of each list that was begun.
    begun: Vec<(&'static str, usize)>,
}

impl Accuracy {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        self.threads.apply()?;
        self.threads.start()?;
        interrupt::watch();
        let device = match self.backend {
            BackendName::Cpu => Device::cpu(),
            BackendName::Cuda => Device::cuda(0).map_err(|error| Failure::Environment(error.to_string()))?,
        };
        let searches_needles = self.needle || self.gate;
        let lengths = match &self.lengths {
            Some(lengths) => lengths.clone(),
            None if searches_needles => Vec::new(),
            None => vec![1 << 10, 1 << 12],
        };
        if let (true, Some(option)) = (lengths.is_empty(), self.of_rows.given()) {
            return Err(Failure::Usage(format!(
                "{option} is a choice of the table of rows, which --needle and --gate leave out; give --lengths for the table, or leave it out"
            )));
        }
        self.require_memory(&lengths)?;
        let kept = Mutex::new(Kept::default());
        let work = || {
            Ok(self.rows(&device, &lengths, &kept, output)?
                && (!searches_needles || self.needles(&device, &kept, output)?)
                && (!self.gate || self.gates(&device, &kept, output)?))
        };
        interrupt::abandonable(output, work, |is_complete| {
            let kept = std::mem::take(&mut *interrupt::aside(&kept));
            self.conclude(&device, lengths.is_empty(), kept, is_complete.unwrap_or(false), output)
        })
    }

    /// Shows and records what was found.
    fn conclude(
        &self,
        device: &Device,
        has_no_lengths: bool,
        kept: Kept,
        is_complete: bool,
        output: &Output,
    ) -> Result<Ending, Failure> {
        let searches_needles = self.needle || self.gate;
        let Kept { rows, needles, mut verdicts, begun } = kept;
        for (what, of) in begun {
            let done = match what {
                "cases" => rows.len(),
                "searches" => needles.len(),
                _ => verdicts.len(),
            };
            let left_out = interrupt::left_out(done, of);
            if !left_out.is_empty() {
                output.note(&format!("{what}: {done} run{left_out}"));
            }
        }
        // Programs read one table: the last one.
        if !has_no_lengths && (self.is_for_people() || !searches_needles) {
            self.show_rows(output, &rows)?;
        }
        if searches_needles && (self.is_for_people() || !self.gate) && !needles.is_empty() {
            self.show_needles(output, &needles)?;
        }
        if self.gate && !verdicts.is_empty() {
            verdicts.extend(gates::needles(&needles));
            self.show_gates(output, &verdicts)?;
        }
        let has_missed = needles.iter().any(|row| !row.is_negative() && row.refused.is_none() && !row.is_all());
        let has_failed = has_missed || verdicts.iter().any(|gate| !gate.passed);
        if let Some(file) = &self.record {
            let machine = match device.context() {
                None => {
                    let level = Level::default_level().map_err(|error| Failure::Environment(error.to_string()))?;
                    Machine::cpu(&level.to_string(), working_threads(), None)
                }
                Some(context) => Machine::gpu(context.device(), None),
            };
            let (seed, fp8_bits) = (self.seed, self.fp8_bits);
            write_record(file, machine, AccuracyRecord { seed, fp8_bits, rows, needles, gates: verdicts })?;
        }
        Ok(match (has_failed, is_complete) {
            (true, _) => Ending::Failed,
            (false, false) => Ending::Interrupted,
            (false, true) => Ending::Well,
        })
    }

    /// Refuses what does not fit the memory, before anything is computed.
    fn require_memory(&self, lengths: &[usize]) -> Result<(), Failure> {
        for &keys in lengths {
            self.of_rows.sizes(keys).require_memory().map_err(impossible)?;
        }
        if self.needle || self.gate {
            let trials = self.trials as usize;
            if self.haystack < 2 * trials {
                let Self { haystack, .. } = self;
                return Err(Failure::Usage(format!(
                    "{haystack} keys hold no {trials} needles; give --haystack twice as many keys as --trials or more"
                )));
            }
            Haystack::require_memory(self.haystack, trials).map_err(impossible)?;
        }
        if self.gate {
            gates::ROTATION_SIZES.require_memory().map_err(impossible)?;
        }
        Ok(())
    }

    /// Keeps the rows; true if nobody interrupted them.
    fn rows(&self, device: &Device, lengths: &[usize], kept: &Mutex<Kept>, output: &Output) -> Result<bool, Failure> {
        let choice = Choice {
            types: self.of_rows.types()?,
            scales: self.of_rows.scales()?,
            options: self.of_rows.options().iter().map(|option| option.parts()).collect(),
            device: device.clone(),
            fp8_bits: self.fp8_bits,
        };
        let cases = cases(&choice);
        let of = lengths.len() * self.of_rows.data().len() * cases.len();
        interrupt::aside(kept).begun.push(("cases", of));
        let done = || interrupt::aside(kept).rows.len();
        for &keys in lengths {
            for &data in self.of_rows.data() {
                if interrupt::requested() {
                    continue;
                }
                output.progress(done(), of, &format!("{keys} keys, {data}: the answer in f64"));
                let sizes = self.of_rows.sizes(keys);
                let sample = Sample::draw(data, sizes, self.seed).map_err(|error| Failure::Usage(error.to_string()))?;
                let mut run = Run::new(&sample, sizes, data);
                for case in &cases {
                    if interrupt::requested() {
                        break;
                    }
                    output.progress(done(), of, &format!("{keys} keys, {data}: {}", case.quantization.types));
                    let row = run.row(case);
                    interrupt::aside(kept).rows.push(row);
                }
            }
        }
        Ok(done() == of)
    }

    fn is_for_people(&self) -> bool {
        matches!(self.format, Format::Table | Format::Markdown)
    }

    fn show_rows(&self, output: &Output, rows: &[Row]) -> Result<(), Failure> {
        if self.is_for_people() {
            let Sizes { queries, heads, head_dim, .. } = self.of_rows.sizes(0);
            output.sentence(format!(
                "errors against f64 on inputs that were not rounded; {queries} query rows of {heads} heads, head dim {head_dim}; FP8 models keep {} bits{}",
                self.fp8_bits,
                if self.fp8_bits == H200_FP8_BITS { ", as an H200" } else { "" }
            ))?;
            output.line("")?;
        }
        let mut table = Table::new(&[
            column("keys", "keys"),
            column("data", "data"),
            column("types", "types"),
            column("scales", "scales"),
            column("options", "options"),
            column("computed by", "computed_by"),
            column("relative L2", "relative_l2"),
            column("RMSE", "rmse"),
            column("max error", "max_error").minor(),
            column("cosine", "cosine").minor(),
            column("size bias %", "size_bias_percent"),
            column("projection bias %", "projection_bias_percent").minor(),
            column("saturated", "saturated").minor(),
            field("heads"),
            field("queries"),
            field("head_dim"),
            field("refused"),
        ]);
        for row in rows {
            let errors = match &row.outcome {
                Outcome::Errors(errors) => Some(errors),
                Outcome::Refused(_) => None,
            };
            let refused = match &row.outcome {
                Outcome::Errors(_) => Cell::none(),
                Outcome::Refused(reason) => Cell::from(reason.as_str()),
            };
            table.push(vec![
                Cell::from(row.sizes.keys),
                Cell::from(row.data.to_string()),
                Cell::from(row.types.as_str()),
                Cell::count(row.scales.as_deref()),
                Cell::from(row.options.as_str()),
                Cell::from(row.computed_by.as_str()),
                Cell::scientific(errors.map(|errors| errors.relative_l2)),
                Cell::scientific(errors.map(|errors| errors.rmse)),
                Cell::scientific(errors.map(|errors| errors.max_error)),
                Cell::figure(errors.map(|errors| errors.cosine), 6),
                Cell::figure(errors.map(|errors| 100.0 * errors.size_bias), 3),
                Cell::figure(errors.map(|errors| 100.0 * errors.projection_bias), 3),
                Cell::from(row.saturated),
                Cell::from(row.sizes.heads),
                Cell::from(row.sizes.queries),
                Cell::from(row.sizes.head_dim),
                refused,
            ]);
        }
        output.table(&table, self.format)?;
        if self.is_for_people() {
            // Each reason once, not for each length.
            let mut said: Vec<String> = Vec::new();
            for row in rows {
                let Outcome::Refused(reason) = &row.outcome else { continue };
                let text = format!("{} by {}: refused: {reason}", row.types, row.computed_by);
                if !said.contains(&text) {
                    output.line(printable(&text))?;
                    said.push(text);
                }
            }
        }
        Ok(())
    }

    /// Keeps what searches found; true if nobody interrupted them.
    fn needles(&self, device: &Device, kept: &Mutex<Kept>, output: &Output) -> Result<bool, Failure> {
        let searches = searches(device, self.fp8_bits);
        let (keys, trials) = (self.haystack, self.trials as usize);
        interrupt::aside(kept).begun.push(("searches", searches.len()));
        output.progress(0, searches.len(), &format!("{trials} needles among {keys} keys: the answer in f64"));
        let haystack = Haystack::new(keys, trials, self.seed).map_err(|error| Failure::Usage(error.to_string()))?;
        let mut done = 0;
        for (types, by) in &searches {
            if interrupt::requested() {
                break;
            }
            output.progress(done, searches.len(), &format!("needles: {types} by {by}"));
            let found = haystack.search(*types, by);
            interrupt::aside(kept).needles.push(found);
            done += 1;
        }
        Ok(done == searches.len())
    }

    fn show_needles(&self, output: &Output, needles: &[Found]) -> Result<(), Failure> {
        if self.is_for_people() {
            output.sentence(format!(
                "\n{} needles among {} keys; each has about 1 % of its row's weight, and is found if its output is nearest to its answer",
                self.trials, self.haystack
            ))?;
            output.line("")?;
        }
        let mut table = Table::new(&[
            column("keys", "keys"),
            column("types", "types"),
            column("computed by", "computed_by"),
            column("found", "found"),
            column("of", "trials"),
            column("relative L2", "relative_l2"),
            column("size bias %", "size_bias_percent"),
            column("projection bias %", "projection_bias_percent").minor(),
            field("refused"),
        ]);
        for row in needles {
            let errors = row.errors.as_ref();
            table.push(vec![
                Cell::from(row.keys),
                Cell::from(row.types.as_str()),
                Cell::from(row.computed_by.as_str()),
                Cell::count(row.found),
                Cell::from(row.trials),
                Cell::scientific(errors.map(|errors| errors.relative_l2)),
                Cell::figure(errors.map(|errors| 100.0 * errors.size_bias), 3),
                Cell::figure(errors.map(|errors| 100.0 * errors.projection_bias), 3),
                Cell::count(row.refused.as_deref()),
            ]);
        }
        output.table(&table, self.format)?;
        if self.is_for_people() {
            for row in needles {
                if let Some(reason) = &row.refused {
                    output.line(printable(&format!("{} by {}: refused: {reason}", row.types, row.computed_by)))?;
                }
            }
        }
        Ok(())
    }

    /// Keeps verdicts on errors; true if nobody interrupted them.
    fn gates(&self, device: &Device, kept: &Mutex<Kept>, output: &Output) -> Result<bool, Failure> {
        let usage = |error: flashcore_problem::Invalid| Failure::Usage(error.to_string());
        let of = Distribution::JUDGED.len() + 1;
        interrupt::aside(kept).begun.push(("gates", of));
        let done = || interrupt::aside(kept).verdicts.len();
        for data in Distribution::JUDGED {
            if interrupt::requested() {
                break;
            }
            output.progress(done(), of, &format!("gate: FP8 cache, {data}"));
            let verdict = gates::cache(device, data, gates::CACHE_SIZES, self.seed).map_err(usage)?;
            interrupt::aside(kept).verdicts.push(verdict);
        }
        if !interrupt::requested() {
            output.progress(done(), of, "gate: rotation");
            let by = gates::two_levels(self.fp8_bits);
            let verdict = gates::rotation(by, gates::ROTATION_SIZES, self.seed).map_err(usage)?;
            interrupt::aside(kept).verdicts.push(verdict);
        }
        Ok(done() == of)
    }

    fn show_gates(&self, output: &Output, verdicts: &[GateResult]) -> Result<(), Failure> {
        if self.is_for_people() {
            output.line("")?;
        }
        let mut table = Table::new(&[
            column("gate", "gate"),
            column("computed by", "computed_by"),
            column("value", "value"),
            column("bound", "bound"),
            column("verdict", "verdict").verdict(),
            column("note", "note").minor(),
        ]);
        for gate in verdicts {
            table.push(vec![
                Cell::from(gate.name.as_str()),
                Cell::from(gate.computed_by.as_str()),
                gate.value.map_or_else(Cell::none, |value| Cell::precise(value, 2)),
                Cell::from(gate.bound.as_str()),
                Cell::from(if gate.passed { "passed" } else { "FAILED" }),
                Cell::from(gate.note.as_str()),
            ]);
        }
        output.table(&table, self.format)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_read() {
        for (text, expected) in [("1", 1), ("4096", 4096), ("16k", 16384), ("128K", 131_072), ("1m", 1 << 20)] {
            assert_eq!(parse_length(text), Ok(expected), "{text}");
        }
        for text in ["", "k", "0", "0k", "-1", "1.5k", "2000m", "99999999999999999999", "12kk"] {
            assert!(parse_length(text).is_err(), "{text}");
        }
    }
}
