//! `flashcore accuracy`: errors of element types, scale modes and options against `f64`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use flashcore::Device;
use flashcore_bench::lab::accuracy::needle::{Found, Haystack, searches};
use flashcore_bench::lab::accuracy::{
    AccuracyRecord, Choice, Distribution, GateResult, Outcome, REPORTED_FP8_BITS, Row, Run, Sample, Sizes, cases, gates,
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
    /// Element types: f32, f16, bf16, 'bf16 kv e4m3' for a cache in FP8, 'e4m3 out bf16' for all inputs in FP8
    #[arg(long, value_delimiter = ',', default_values = ["f32", "f16", "bf16", "bf16 kv e4m3", "e4m3 out bf16"])]
    types: Vec<DTypes>,
    /// Elements that share a scale: tensor, head, sequence, token, block:ROWS, or a given one, fixed:SCALE
    #[arg(long, value_delimiter = ',', default_values = ["tensor", "head", "token", "block:64"])]
    scales: Vec<ScaleMode>,
    /// Options of quantisation: none, smooth (subtract the mean key), rotate (Hadamard), smooth+rotate
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["none", "rotate"])]
    options: Vec<OptionsName>,
    /// Distributions: gaussian, outliers (0.1 % of elements get a normal number of ten times the size added), or key-mean
    /// (keys with a mean in each column, which smoothing is for)
    #[arg(long, value_delimiter = ',', default_values = ["gaussian", "outliers"])]
    data: Vec<Distribution>,
    /// Query rows of a head; few suffice, as rows differ little (with outliers, RMSE needs hundreds)
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65536))]
    queries: u32,
    /// Heads
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    heads: u32,
    /// Columns of query, key and value
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096))]
    head_dim: u32,
    /// Fraction bits that the models of tensor cores keep when they add products of FP8; the default is what others report
    #[arg(long, value_name = "BITS", default_value_t = REPORTED_FP8_BITS, value_parser = clap::value_parser!(u32).range(4..=25))]
    fp8_bits: u32,
    /// The seed of all data
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Search for needles in a haystack
    #[arg(long)]
    needle: bool,
    /// Needles
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=4096))]
    trials: u32,
    /// Keys of the haystack
    #[arg(long, value_name = "KEYS", default_value = "128k", value_parser = parse_length)]
    haystack: usize,
    /// Hold errors and needles against the project's aims
    #[arg(long)]
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

impl Accuracy {
    pub(crate) fn run(&self, output: &mut Output) -> Result<Ending, Failure> {
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
        self.require_memory(&lengths)?;
        let (rows, mut is_complete) = self.rows(output, &device, &lengths)?;
        // Programs read one table: the last one.
        if !lengths.is_empty() && (self.is_for_people() || !searches_needles) {
            self.show_rows(output, &rows)?;
        }
        let (mut needles, mut verdicts) = (Vec::new(), Vec::new());
        if searches_needles && is_complete {
            (needles, is_complete) = self.needles(output, &device)?;
            if self.is_for_people() || !self.gate {
                self.show_needles(output, &needles)?;
            }
        }
        if self.gate && is_complete {
            (verdicts, is_complete) = self.gates(output, &device)?;
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

    fn sizes(&self, keys: usize) -> Sizes {
        let [heads, queries, head_dim] = [self.heads, self.queries, self.head_dim].map(|number| number as usize);
        Sizes { heads, queries, keys, head_dim }
    }

    /// Refuses what does not fit the memory, before anything is computed.
    fn require_memory(&self, lengths: &[usize]) -> Result<(), Failure> {
        for &keys in lengths {
            self.sizes(keys).require_memory().map_err(impossible)?;
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

    /// The rows, and true if nobody interrupted them.
    fn rows(&self, output: &mut Output, device: &Device, lengths: &[usize]) -> Result<(Vec<Row>, bool), Failure> {
        let choice = Choice {
            types: self.types.clone(),
            scales: self.scales.clone(),
            options: self.options.iter().map(|option| option.parts()).collect(),
            device: device.clone(),
            fp8_bits: self.fp8_bits,
        };
        let cases = cases(&choice);
        let of = lengths.len() * self.data.len() * cases.len();
        let mut rows = Vec::new();
        for &keys in lengths {
            for &data in &self.data {
                if interrupt::requested() {
                    continue;
                }
                output.progress(rows.len(), of, &format!("{keys} keys, {data}: the answer in f64"));
                let sizes = self.sizes(keys);
                let sample = Sample::draw(data, sizes, self.seed).map_err(|error| Failure::Usage(error.to_string()))?;
                let mut run = Run::new(&sample, sizes, data);
                for case in &cases {
                    if interrupt::requested() {
                        break;
                    }
                    output.progress(rows.len(), of, &format!("{keys} keys, {data}: {}", case.quantization.types));
                    rows.push(run.row(case));
                }
            }
        }
        note_left_out(output, "cases", rows.len(), of);
        let is_complete = rows.len() == of;
        Ok((rows, is_complete))
    }

    fn is_for_people(&self) -> bool {
        matches!(self.format, Format::Table | Format::Markdown)
    }

    fn show_rows(&self, output: &mut Output, rows: &[Row]) -> Result<(), Failure> {
        if self.is_for_people() {
            output.sentence(format!(
                "errors against f64 on inputs that were not rounded; {} query rows of {} heads, head dim {}; FP8 models keep {} bits{}",
                self.queries,
                self.heads,
                self.head_dim,
                self.fp8_bits,
                if self.fp8_bits == REPORTED_FP8_BITS { ", as others report" } else { "" }
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

    fn needles(&self, output: &mut Output, device: &Device) -> Result<(Vec<Found>, bool), Failure> {
        let searches = searches(device, self.fp8_bits);
        let (keys, trials) = (self.haystack, self.trials as usize);
        output.progress(0, searches.len(), &format!("{trials} needles among {keys} keys: the answer in f64"));
        let haystack = Haystack::new(keys, trials, self.seed).map_err(|error| Failure::Usage(error.to_string()))?;
        let mut found = Vec::new();
        for (types, by) in &searches {
            if interrupt::requested() {
                break;
            }
            output.progress(found.len(), searches.len(), &format!("needles: {types} by {by}"));
            found.push(haystack.search(*types, by));
        }
        note_left_out(output, "searches", found.len(), searches.len());
        let is_complete = found.len() == searches.len();
        Ok((found, is_complete))
    }

    fn show_needles(&self, output: &mut Output, needles: &[Found]) -> Result<(), Failure> {
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

    /// Verdicts on errors, and true if nobody interrupted them.
    fn gates(&self, output: &mut Output, device: &Device) -> Result<(Vec<GateResult>, bool), Failure> {
        let usage = |error: flashcore_problem::Invalid| Failure::Usage(error.to_string());
        let of = Distribution::JUDGED.len() + 1;
        let mut verdicts = Vec::new();
        for data in Distribution::JUDGED {
            if interrupt::requested() {
                break;
            }
            output.progress(verdicts.len(), of, &format!("gate: FP8 cache, {data}"));
            verdicts.push(gates::cache(device, data, gates::CACHE_SIZES, self.seed).map_err(usage)?);
        }
        if !interrupt::requested() {
            output.progress(verdicts.len(), of, "gate: rotation");
            let by = gates::two_levels(self.fp8_bits);
            verdicts.push(gates::rotation(by, gates::ROTATION_SIZES, self.seed).map_err(usage)?);
        }
        note_left_out(output, "gates", verdicts.len(), of);
        let is_complete = verdicts.len() == of;
        Ok((verdicts, is_complete))
    }

    fn show_gates(&self, output: &mut Output, verdicts: &[GateResult]) -> Result<(), Failure> {
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

/// Says what Ctrl-C left out.
fn note_left_out(output: &mut Output, what: &str, done: usize, of: usize) {
    let left_out = interrupt::left_out(done, of);
    if !left_out.is_empty() {
        output.note(&format!("{what}: {done} run{left_out}"));
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
