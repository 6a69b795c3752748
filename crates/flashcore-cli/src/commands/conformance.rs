//! `flashcore conformance`: the simulator against a GPU, operation by operation.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use flashcore_bench::testkit::conformance::{
    CaseOutcome, CaseRecord, Disagreement, ExecuteError, Executor, Header, Invocation, Record, RecordError, Replay,
    SCHEMA, Scalar, SumFit, Tolerance, cases_of, check, fit_sums, replay_while,
};
use flashcore_bench::util::printable::printable;
use flashcore_cuda::cache::{CacheOptions, KernelCache};
use flashcore_cuda::{Context, CudaError, Driver, JitOptions, Kernels};
use flashcore_ir::{Arch, Type};
use flashcore_kernels::Argument;

use super::origin::write_file;
use crate::output::{Cell, Format, Output, Table, column};
use crate::{Ending, Failure, interrupt};

/// Mismatches that people are shown; programs find all of them in the record's replay.
const SHOWN: usize = 10;

/// Compare the simulator with a GPU, operation by operation
///
/// Every operation of the kernel language has small kernels that run on the first GPU and in the simulator on the same
/// inputs; results must agree bit by bit, or within what PTX guarantees. --record keeps the results of the GPU; --replay
/// compares the simulator with such a record and needs no GPU.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashcore conformance --record results/conformance/h200.json\n  flashcore conformance --replay results/conformance/h200.json\n  flashcore conformance --replay results/conformance/h200.json --sums"
)]
pub(crate) struct Conformance {
    /// Write the results of the GPU to a JSON record
    #[arg(long, value_name = "FILE", conflicts_with = "replay")]
    record: Option<PathBuf>,
    /// Compare the simulator with a record instead of a GPU
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// With --replay: the bits that the recorded tensor cores keep when they add, by the form of the product
    #[arg(long, requires = "replay")]
    sums: bool,
    /// The seed of the inputs; a replay uses that of its record
    #[arg(long, default_value_t = 0, conflicts_with = "replay")]
    seed: u64,
    /// The output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

impl Conformance {
    pub(crate) fn run(&self, output: &Output) -> Result<Ending, Failure> {
        interrupt::watch();
        match &self.replay {
            Some(file) => self.replay(output, file),
            None => self.conduct(output),
        }
    }

    fn conduct(&self, output: &Output) -> Result<Ending, Failure> {
        let environment = |error: CudaError| Failure::Environment(error.to_string());
        let device = Driver::load().and_then(|driver| driver.device(0)).map_err(|error| {
            // The driver's own advice is to compute on the CPU, which conforms to nothing.
            let said = match &error {
                CudaError::NoDriver { reason } => format!("no NVIDIA driver: {reason}"),
                error => error.to_string(),
            };
            Failure::Environment(format!(
                "{said}; run this where there is a GPU, or compare the simulator with the record of one: \
                 flashcore conformance --replay results/conformance/h200.json"
            ))
        })?;
        let target = device.specific_arch().map_err(environment)?;
        let context = Context::new(&device).map_err(environment)?;
        // In memory: hundreds of kernels that nobody asks for again.
        let cache = Arc::new(KernelCache::open(CacheOptions::memory()));
        let gpu = CudaExecutor { kernels: Kernels::new(&context, cache, JitOptions::default()) };
        let header = Header {
            device: device.name.clone(),
            driver: device.driver().fingerprint(),
            date: today(),
            target: target.to_string(),
            seed: self.seed,
        };
        let (mut tally, mut complaints, mut left_out) = (Tally::default(), Vec::new(), 0);
        let mut record = Record { schema: SCHEMA, header, cases: Vec::<CaseRecord>::new() };
        let cases = cases_of(target);
        for (index, case) in cases.iter().enumerate() {
            if interrupt::requested() {
                left_out = cases.len() - index;
                break;
            }
            output.progress(index, cases.len(), &format!("{}, {} complaints", case.name, complaints.len()));
            let row = tally.row(case.operation, &allowed(case.tolerance));
            match check(case, &gpu, target, self.seed) {
                Ok(CaseOutcome { comparison, record: kept, .. }) => {
                    row.elements += comparison.elements;
                    row.ulps = row.ulps.max(comparison.worst.ulps);
                    row.disagreeing += usize::from(!comparison.agrees());
                    let first = comparison.first.map(|mismatch| mismatch.to_string());
                    complaints.extend(first.or_else(|| {
                        (comparison.disagreements > 0).then(|| format!("{}: outputs are too short", case.name))
                    }));
                    record.cases.push(kept);
                }
                Err(error) => {
                    row.not_run += 1;
                    complaints.push(error.to_string());
                    // After an error that ends all work on the GPU, the other cases would only repeat it.
                    if let Some(first) = context.poison() {
                        complaints.push(format!("the remaining {} cases: {first}", cases.len() - index - 1));
                        tally.stopped = true;
                        break;
                    }
                }
            }
        }
        if let Some(file) = &self.record {
            let json = record.to_json().map_err(|error| Failure::Environment(error.to_string()))?;
            write_file(file, json.as_bytes())?;
        }
        let Header { device, driver, .. } = &record.header;
        let title = format!("{device}, driver {driver}, {target}, seed {}", self.seed);
        let ending = self.report(output, &tally, &complaints, &title, left_out)?;
        if let (Some(file), true) = (&self.record, self.for_people()) {
            output.line(format!("wrote {} cases to {}", record.cases.len(), file.display()))?;
        }
        Ok(ending)
    }

    /// The numbers of bits that repeat the sums of a record.
    fn sums(&self, output: &Output, record: &Record) -> Result<Ending, Failure> {
        /// From fewer bits than 8-bit floats are said to keep to more than `f32` has.
        const TRIED: core::ops::RangeInclusive<u32> = 8..=30;
        let work = || fit_sums(record, TRIED).map_err(|error| Failure::Environment(error.to_string()));
        interrupt::abandonable(output, work, |fits| {
            fits.map_or(Ok(Ending::Interrupted), |fits| self.show_sums(output, &fits))
        })
    }

    fn show_sums(&self, output: &Output, fits: &[SumFit]) -> Result<Ending, Failure> {
        let mut table = Table::new(&[
            column("product", "product"),
            column("sums", "sums"),
            column("bits kept", "bits"),
            column("differing", "differing"),
        ]);
        for fit in fits {
            let (bits, differing) = fit.best();
            table.push(vec![
                Cell::from(&*fit.product),
                Cell::from(fit.elements),
                Cell::from(bits),
                Cell::from(differing),
            ]);
        }
        output.table(&table, self.format)?;
        let repeated = !fits.is_empty() && fits.iter().all(|fit| fit.best().1 == 0);
        Ok(if repeated { Ending::Well } else { Ending::Failed })
    }

    fn replay(&self, output: &Output, file: &Path) -> Result<Ending, Failure> {
        let shown = file.display();
        let json = std::fs::read_to_string(file).map_err(|error| {
            Failure::Usage(format!(
                "cannot read {shown}: {error}; --replay needs a record of `flashcore conformance --record`"
            ))
        })?;
        let usage = |error: RecordError| Failure::Usage(format!("{shown}: {error}"));
        let record = Record::parse(&json).map_err(usage)?;
        let target: Arch = record.header.target.parse().map_err(|error| usage(RecordError::Target(error)))?;
        if self.sums {
            return self.sums(output, &record);
        }
        let count = record.cases.len();
        let done = AtomicUsize::new(0);
        let work = || {
            Ok(replay_while(&record, |index, name| {
                done.store(index, Ordering::Relaxed);
                output.progress(index, count, name);
                !interrupt::requested()
            }))
        };
        interrupt::abandonable(output, work, |replayed| match replayed {
            Some(Ok(replayed)) => self.show_replay(output, &record, target, &replayed),
            // The simulator stopped, or a case broke a rule: the suite is at fault, not the file.
            Some(Err(error)) => {
                output.complain(&error.to_string());
                Ok(Ending::Failed)
            }
            None => {
                let done = done.load(Ordering::Relaxed);
                output.note(&format!("{done} cases replayed{}", interrupt::left_out(done, count)));
                Ok(Ending::Interrupted)
            }
        })
    }

    fn show_replay(
        &self,
        output: &Output,
        record: &Record,
        target: Arch,
        replayed: &Replay,
    ) -> Result<Ending, Failure> {
        let disagreeing: Vec<&str> = replayed.disagreements.iter().map(case_of).collect();
        let mut tally = Tally::default();
        for case in cases_of(target) {
            let row = tally.row(case.operation, &allowed(case.tolerance));
            let kept = record.cases.iter().find(|kept| kept.name == case.name);
            row.disagreeing += usize::from(disagreeing.contains(&case.name.as_str()));
            let is_run =
                ![&replayed.new, &replayed.changed, &replayed.left_out].iter().any(|of| of.contains(&case.name));
            row.not_run += usize::from(!is_run);
            if let Some(kept) = kept {
                row.elements += kept.elements;
                row.ulps = row.ulps.max(kept.worst.ulps);
            }
        }
        let Header { device, driver, date, .. } = &record.header;
        let title =
            format!("record of {device}, driver {driver}, {target}, {date}, compared with this build's simulator");
        // A case that is gone from the suite is in no row, and fails the replay all the same.
        tally.stopped = !replayed.gone.is_empty();
        self.report(output, &tally, &replayed.complaints(), &title, replayed.left_out.len())
    }

    fn report(
        &self,
        output: &Output,
        tally: &Tally,
        complaints: &[String],
        title: &str,
        left_out: usize,
    ) -> Result<Ending, Failure> {
        let mut table = Table::new(&[
            column("operation", "operation"),
            column("cases", "cases"),
            column("elements", "elements"),
            column("allowed", "allowed"),
            column("max ULP", "max_ulp"),
            column("disagree", "disagree"),
            column("not run", "not_run"),
            column("verdict", "verdict").verdict(),
        ]);
        for (operation, row) in &tally.rows {
            table.push(vec![
                Cell::from(*operation),
                Cell::from(row.cases),
                Cell::from(row.elements),
                Cell::from(row.tolerances.join(" / ")),
                Cell::from(row.ulps),
                Cell::from(row.disagreeing),
                Cell::from(row.not_run),
                Cell::from(row.verdict()),
            ]);
        }
        if self.for_people() {
            output.line(printable(title))?;
        }
        output.table(&table, self.format)?;
        if self.for_people() {
            for complaint in complaints.iter().take(SHOWN) {
                output.verdict(printable(&format!("FAILED {complaint}")))?;
            }
            if complaints.len() > SHOWN {
                output.line(format!("and {} more", complaints.len() - SHOWN))?;
            }
            let sum = |count: fn(&Row) -> usize| tally.rows.values().map(count).sum::<usize>();
            output.line(format!(
                "{} operations, {} cases: {} disagree, {} not run{}",
                tally.rows.len(),
                sum(|row| row.cases),
                sum(|row| row.disagreeing),
                sum(|row| row.not_run),
                if left_out > 0 { ": interrupted" } else { "" }
            ))?;
        }
        if left_out > 0 {
            return Ok(Ending::Interrupted);
        }
        let passed = !tally.stopped && complaints.is_empty() && tally.rows.values().all(Row::agrees);
        Ok(if passed { Ending::Well } else { Ending::Failed })
    }

    const fn for_people(&self) -> bool {
        matches!(self.format, Format::Table | Format::Markdown)
    }
}

/// Results of the suite, by operation.
#[derive(Debug, Default)]
struct Tally {
    rows: BTreeMap<&'static str, Row>,
    /// True if cases are missing from the rows.
    stopped: bool,
}

#[derive(Debug, Default)]
struct Row {
    cases: usize,
    elements: usize,
    tolerances: Vec<String>,
    ulps: u64,
    disagreeing: usize,
    not_run: usize,
}

impl Tally {
    /// The row of an operation, with one more case.
    fn row(&mut self, operation: &'static str, tolerance: &str) -> &mut Row {
        let row = self.rows.entry(operation).or_default();
        row.cases += 1;
        if row.tolerances.iter().all(|known| known != tolerance) {
            row.tolerances.push(tolerance.to_owned());
        }
        row
    }
}

impl Row {
    const fn agrees(&self) -> bool {
        self.disagreeing == 0 && self.not_run == 0
    }

    const fn verdict(&self) -> &'static str {
        match (self.disagreeing, self.not_run) {
            (0, 0) => "agrees",
            (0, _) => "NOT RUN",
            _ => "DISAGREES",
        }
    }
}

/// A tolerance in a word; a mismatch tells the numbers.
fn allowed(tolerance: Tolerance) -> String {
    match tolerance {
        Tolerance::Bits | Tolerance::Exact => "exact".to_owned(),
        Tolerance::Ulps { most, .. } => format!("{most} ULP"),
        Tolerance::Within { .. } => "part of result".to_owned(),
        Tolerance::Sum { .. } => "part of sum".to_owned(),
    }
}

fn case_of(disagreement: &Disagreement) -> &str {
    match disagreement {
        Disagreement::Hash { case, .. } | Disagreement::Unusable { case, .. } => case,
        Disagreement::Element(mismatch) => &mismatch.case,
    }
}

/// The first GPU. Only [`check`] may call it, which has executed the same launch in the simulator before.
struct CudaExecutor {
    kernels: Kernels,
}

impl Executor for CudaExecutor {
    fn execute(&self, invocation: &Invocation<'_>) -> Result<Vec<Vec<u8>>, ExecuteError> {
        let Invocation { kernel, grid, inputs, output_lengths, scalars, tensor_maps } = *invocation;
        let failed = |error: CudaError| ExecuteError::Device(Box::new(error));
        let mut scalars: Vec<Argument> = scalars.iter().copied().map(argument).collect::<Result<_, _>>()?;
        let kernel = self.kernels.load(kernel).map_err(failed)?;
        let further = |addresses: &[u64]| {
            scalars.extend(tensor_maps.iter().map(|map| Argument::TensorMap(map.at(addresses))));
            scalars
        };
        #[expect(unsafe_code, reason = "a kernel is launched that only the simulator can vouch for")]
        // SAFETY: this type is private to this file, which passes it to `check` alone. That executes the same kernel on
        // the same grid, inputs and scalars in the simulator first, where an access outside of the buffers is a fault,
        // and does not come here after one.
        let outputs = unsafe { flashcore_cuda::run_owned(&kernel, grid, inputs, output_lengths, further) };
        outputs.map_err(failed)
    }
}

fn argument(scalar: Scalar) -> Result<Argument, ExecuteError> {
    match scalar.ty {
        Type::U32 => Ok(Argument::U32(scalar.bits as u32)),
        Type::S32 => Ok(Argument::S32(scalar.bits as i32)),
        Type::F32 => Ok(Argument::F32(f32::from_bits(scalar.bits as u32))),
        Type::U64 => Ok(Argument::U64(scalar.bits)),
        Type::S64 => Ok(Argument::S64(scalar.bits as i64)),
        ty => Err(ExecuteError::Device(
            format!("a launch on a GPU cannot pass a parameter of type {ty}; it passes u32, s32, f32, u64 and s64")
                .into(),
        )),
    }
}

/// The day in UTC, 2026-01-31.
fn today() -> String {
    const SECONDS_PER_DAY: u64 = 86_400;
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    date(seconds / SECONDS_PER_DAY)
}

/// The date of a day, counted from 1970-01-01: years from March on, so that the leap day is the last of a year.
fn date(days_since_1970: u64) -> String {
    const DAYS_TO_1970: u64 = 719_468;
    const DAYS_OF_400_YEARS: u64 = 146_097;
    let days = days_since_1970 + DAYS_TO_1970;
    let (era, day) = (days / DAYS_OF_400_YEARS, days % DAYS_OF_400_YEARS);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + next_year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_453, "2025-12-31"),
            (20_454, "2026-01-01"),
        ] {
            assert_eq!(date(days), expected);
        }
    }
}
