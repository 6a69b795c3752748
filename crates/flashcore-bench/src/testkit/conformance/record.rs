//! The record of a run on a GPU, from which machines without one can tell whether the simulator still agrees with it.
//!
//! For operations that are exact a record keeps a hash of each output; where results may differ within a bound it keeps
//! the results themselves, since the simulator is compared with those.

use flashcore_ir::{Arch, UnknownArch};
use serde::{Deserialize, Serialize};

use super::case::{ConformanceCase, Output};
use super::cases::cases;
use super::compare::{Comparison, Mismatch, Worst, canonical, compare};
use super::executor::{ExecuteError, Executor, SimExecutor};
use super::hash::{Fnv, from_base64, to_base64};

/// The version of the format. A record of another one is refused.
pub const SCHEMA: u32 = 1;

/// Cases that a complaint names.
const MOST_NAMES: usize = 12;

/// Device, driver, date and target of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The name of the device.
    pub device: String,
    /// The version of its driver.
    pub driver: String,
    /// The day of the run, as its caller writes it.
    pub date: String,
    /// The architecture that PTX was printed for, as compilers spell it.
    pub target: String,
    /// The seed of the inputs.
    pub seed: u64,
}

/// A run of the suite on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The version of the format.
    pub schema: u32,
    /// Device, driver, date and target.
    #[serde(flatten)]
    pub header: Header,
    /// Result of each case.
    pub cases: Vec<CaseRecord>,
}

/// Result of a device for a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseRecord {
    /// The name of the case.
    pub name: String,
    /// Fingerprint of everything that decides the results: program, launch and inputs.
    pub fingerprint: String,
    /// Elements of all outputs; each half of a pair is one.
    pub elements: usize,
    /// Distance from the simulator of that day.
    pub worst: Worst,
    /// The outputs, in order.
    pub outputs: Vec<OutputRecord>,
}

/// Output of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputRecord {
    /// The hash of the bytes, every NaN the same unless bits are compared.
    Hash(String),
    /// The bytes, as base64.
    Bytes(String),
}

/// Reason why a record could not be read or made.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// No JSON of a record.
    #[error("not a record of `flashcore conformance`: {0}")]
    Json(#[from] serde_json::Error),
    /// Another version of the format.
    #[error(
        "the record has schema {found}, this program knows {SCHEMA}; make a new one with `flashcore conformance` on the device"
    )]
    Schema {
        /// The version found.
        found: u64,
    },
    /// The target is none of ours.
    #[error(transparent)]
    Target(#[from] UnknownArch),
    /// A case could not be executed.
    #[error("{case}: {source}")]
    Execute {
        /// The case.
        case: String,
        /// The cause.
        source: ExecuteError,
    },
    /// A case breaks a rule of the language on the target.
    #[error("{case} is not a valid kernel: {error}")]
    Verify {
        /// The case.
        case: String,
        /// The rule and its place.
        error: Box<flashcore_ir::VerifyError>,
    },
}

impl Record {
    /// Reads a record; one of another schema is refused by its number, whatever else it holds.
    pub fn parse(json: &str) -> Result<Self, RecordError> {
        let value: serde_json::Value = serde_json::from_str(json)?;
        match value.get("schema").and_then(serde_json::Value::as_u64) {
            Some(found) if found != u64::from(SCHEMA) => Err(RecordError::Schema { found }),
            _ => Ok(serde_json::from_value(value)?),
        }
    }

    /// The record as JSON, one case to a line, so that diffs are of cases.
    pub fn to_json(&self) -> Result<String, RecordError> {
        let head = serde_json::to_string(&Self { cases: Vec::new(), ..self.clone() })?;
        let cases: Vec<String> = self.cases.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let head = head.strip_suffix("[]}").unwrap_or(&head);
        Ok(format!("{head}[\n{}\n]}}\n", cases.join(",\n")))
    }
}

/// Result of one case in a run.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseOutcome {
    /// The name of the case.
    pub name: String,
    /// The row of the table.
    pub operation: &'static str,
    /// The device compared with the simulator.
    pub comparison: Comparison,
    /// Entry of the record.
    pub record: CaseRecord,
}

/// Runs one case on a device and in the simulator, for the same target: `mma` of 8-bit floats adds otherwise on Hopper.
pub fn check(
    case: &ConformanceCase,
    device: &dyn Executor,
    target: Arch,
    seed: u64,
) -> Result<CaseOutcome, RecordError> {
    let inputs = case.input_bytes(seed);
    let expected = run(case, &SimExecutor::default(), target, &inputs)?;
    let actual = run(case, device, target, &inputs)?;
    let comparison = compare(case, &inputs, &expected, &actual);
    let record = CaseRecord {
        name: case.name.clone(),
        fingerprint: case.fingerprint(&inputs),
        elements: comparison.elements,
        worst: comparison.worst,
        outputs: case.outputs.iter().zip(&actual).map(|(output, bytes)| keep(case, output, bytes)).collect(),
    };
    Ok(CaseOutcome { name: case.name.clone(), operation: case.operation, comparison, record })
}

/// Runs the suite on a device and compares it with the simulator. Cases that the target lacks are left out. `progress`
/// hears of each case.
pub fn conduct(
    header: Header,
    device: &dyn Executor,
    progress: &mut dyn FnMut(&CaseOutcome),
) -> Result<Record, RecordError> {
    let target: Arch = header.target.parse()?;
    let mut record = Record { schema: SCHEMA, header, cases: Vec::new() };
    for case in cases_of(target) {
        let outcome = check(&case, device, target, record.header.seed)?;
        progress(&outcome);
        record.cases.push(outcome.record);
    }
    Ok(record)
}

/// The cases that an architecture has.
pub fn cases_of(arch: Arch) -> Vec<ConformanceCase> {
    let mut cases = cases();
    cases.retain(|case| arch.has(case.kernel.since()));
    cases
}

fn run(
    case: &ConformanceCase,
    executor: &dyn Executor,
    arch: Arch,
    inputs: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, RecordError> {
    let kernel = case.verified(arch).map_err(|mut errors| RecordError::Verify {
        case: case.name.clone(),
        error: Box::new(errors.swap_remove(0)),
    })?;
    let executed = executor.execute_case(case, &kernel, inputs);
    executed.map_err(|source| RecordError::Execute { case: case.name.clone(), source })
}

fn keep(case: &ConformanceCase, output: &Output, bytes: &[u8]) -> OutputRecord {
    if case.tolerance.is_exact() {
        OutputRecord::Hash(hash(case, output, bytes))
    } else {
        OutputRecord::Bytes(to_base64(bytes))
    }
}

fn hash(case: &ConformanceCase, output: &Output, bytes: &[u8]) -> String {
    let mut hash = Fnv::new();
    hash.add(&canonical(output.ty, bytes, case.tolerance));
    hash.text()
}

/// Result of a replay.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Replay {
    /// Cases compared.
    pub compared: usize,
    /// Cases in which the simulator is no longer what the device was.
    pub disagreements: Vec<Disagreement>,
    /// Cases of the suite that the record lacks.
    pub new: Vec<String>,
    /// Cases of the record that the suite lacks.
    pub gone: Vec<String>,
    /// Cases whose program or inputs are no longer those of the record.
    pub changed: Vec<String>,
    /// Cases that were not executed because somebody stopped it.
    pub left_out: Vec<String>,
}

/// A case in which the simulator is not what the device was.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Disagreement {
    /// An output of an exact operation.
    #[error(
        "{case}: `{output}` hashes to {simulated} in the simulator and to {recorded} on the device; \
         `flashcore conformance` on the device shows the element"
    )]
    Hash {
        /// The case.
        case: String,
        /// The output.
        output: String,
        /// The hash in the simulator.
        simulated: String,
        /// The hash on the device.
        recorded: String,
    },
    /// An element further away than allowed.
    #[error("{0}")]
    Element(Box<Mismatch>),
    /// An output that the record holds in another form, or as bytes that are none.
    #[error(
        "{case}: the record of `{output}` cannot be used; make a new one with `flashcore conformance` on the device"
    )]
    Unusable {
        /// The case.
        case: String,
        /// The output.
        output: String,
    },
}

impl Replay {
    /// True if the record is of this suite and the simulator agrees with all of it.
    pub fn passed(&self) -> bool {
        self.left_out.is_empty() && self.complaints().is_empty()
    }

    /// Complaints, one line each.
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints: Vec<String> = self.disagreements.iter().map(ToString::to_string).collect();
        for (names, what) in [
            (&self.new, "are new and not in the record"),
            (&self.gone, "are in the record and no longer in the suite"),
            (&self.changed, "have another program or other inputs than in the record"),
        ] {
            if !names.is_empty() {
                let shown = names[..names.len().min(MOST_NAMES)].join(", ");
                let more = if names.len() > MOST_NAMES { ", …" } else { "" };
                complaints.push(format!(
                    "{} cases {what}; make a new record with `flashcore conformance` on the device: {shown}{more}",
                    names.len(),
                ));
            }
        }
        complaints
    }
}

/// Executes every case of a record in the simulator and compares it with what the device made of it.
pub fn replay(record: &Record) -> Result<Replay, RecordError> {
    replay_while(record, |_, _| true)
}

/// Replays a record until `go_on`, which hears how many cases are done and which comes next, says no.
pub fn replay_while(record: &Record, mut go_on: impl FnMut(usize, &str) -> bool) -> Result<Replay, RecordError> {
    let target: Arch = record.header.target.parse()?;
    let cases = cases_of(target);
    let mut replay = Replay::default();
    for recorded in &record.cases {
        if !cases.iter().any(|case| case.name == recorded.name) {
            replay.gone.push(recorded.name.clone());
        }
    }
    for case in &cases {
        let Some(recorded) = record.cases.iter().find(|recorded| recorded.name == case.name) else {
            replay.new.push(case.name.clone());
            continue;
        };
        let inputs = case.input_bytes(record.header.seed);
        if case.fingerprint(&inputs) != recorded.fingerprint || recorded.outputs.len() != case.outputs.len() {
            replay.changed.push(case.name.clone());
            continue;
        }
        if !replay.left_out.is_empty() || !go_on(replay.compared, &case.name) {
            replay.left_out.push(case.name.clone());
            continue;
        }
        let simulated = run(case, &SimExecutor::default(), target, &inputs)?;
        replay.compared += 1;
        replay.disagreements.extend(disagreements(case, recorded, &inputs, &simulated));
    }
    Ok(replay)
}

fn disagreements(
    case: &ConformanceCase,
    recorded: &CaseRecord,
    inputs: &[Vec<u8>],
    simulated: &[Vec<u8>],
) -> Vec<Disagreement> {
    let mut found = Vec::new();
    // Outputs that were compared by their hash agree with themselves below.
    let mut device = simulated.to_vec();
    for (index, (output, recorded)) in case.outputs.iter().zip(&recorded.outputs).enumerate() {
        let (case_name, output_name) = (case.name.clone(), output.name.clone());
        let unusable = Disagreement::Unusable { case: case_name.clone(), output: output_name.clone() };
        match recorded {
            OutputRecord::Hash(recorded) if case.tolerance.is_exact() => {
                let simulated = hash(case, output, &simulated[index]);
                if simulated != *recorded {
                    let recorded = recorded.clone();
                    found.push(Disagreement::Hash { case: case_name, output: output_name, simulated, recorded });
                }
            }
            OutputRecord::Bytes(recorded) if !case.tolerance.is_exact() => {
                let bytes = from_base64(recorded).filter(|bytes| bytes.len() == output.bytes());
                found.extend(bytes.is_none().then_some(unusable));
                if let Some(bytes) = bytes {
                    device[index] = bytes;
                }
            }
            OutputRecord::Hash(_) | OutputRecord::Bytes(_) => found.push(unusable),
        }
    }
    if !case.tolerance.is_exact() {
        let mismatch = compare(case, inputs, simulated, &device).first;
        found.extend(mismatch.map(|mismatch| Disagreement::Element(Box::new(mismatch))));
    }
    found
}
