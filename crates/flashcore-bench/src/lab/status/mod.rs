//! Project status by its own records: what is verified, measured, promoted, failing.

mod evidence;

use std::path::Path;

pub use evidence::{Found, survey};

use crate::lab::experiments::{self, Evidence};

/// State of a requirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The records say so.
    Done,
    /// The records say that it is not.
    Failing,
    /// There is no record of it.
    Missing,
}

impl State {
    /// Name of the state.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failing => "FAILING",
            Self::Missing => "missing",
        }
    }
}

/// One row of the definition of done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// The requirement.
    pub what: &'static str,
    /// State of the requirement.
    pub state: State,
    /// By which records, or what would make one.
    pub evidence: String,
}

/// The table: what has to be, and how to make the record that shows it.
const REQUIREMENTS: [(&str, &str, &str); 12] = [
    ("verified in the simulator", "verify sim", "flashcore verify --backend sim --suite full --record results/…"),
    (
        "verified on a CPU",
        "verify cpu",
        "flashcore verify --backend cpu --cpu-level all --suite full --record results/…",
    ),
    ("verified on a GPU", "verify cuda", "flashcore verify --backend cuda --suite full --record results/…"),
    ("the simulator agrees with a GPU", "conformance", "flashcore conformance --record results/conformance/…"),
    ("measured on a CPU", "measured cpu", "flashcore bench --backend cpu --record results/…"),
    ("measured on a GPU", "measured cuda", "flashcore bench --backend cuda --record results/…"),
    ("measured beside other libraries", "peers", "bench/peers/gpu.py or bench/peers/cpu.py --out results/…"),
    ("every optimization step measured", "ladder", "flashcore ladder --record results/…"),
    ("compared, with A/A noise", "compared", "flashcore compare A B --record results/…"),
    ("profiled, within the gates", "profile", "flashcore profile --gates bench/gates.toml --record results/…"),
    ("leaders promoted", "leaderboard", "flashcore leaderboard promote FILE"),
    ("bundle for others to replay", "bundle", "flashcore repro --out results/…"),
];

/// The table of a project with these folders.
pub fn status(results: &Path, experiments: &Path) -> Vec<Requirement> {
    // The evidence of experiments is evidence like any other.
    let found = [survey(results), survey(experiments)].concat();
    let mut table: Vec<Requirement> = REQUIREMENTS
        .iter()
        .map(|&(what, subject, command)| {
            let of: Vec<&Found> = found.iter().filter(|found| found.subject == subject).collect();
            let listed = |of: &[&Found]| {
                of.iter().map(|found| format!("{}: {}", found.file, found.words)).collect::<Vec<_>>().join("; ")
            };
            let failing: Vec<&Found> = of.iter().copied().filter(|found| !found.is_well).collect();
            let (state, evidence) = match (of.is_empty(), failing.is_empty()) {
                (true, _) => (State::Missing, format!("no record; {command}")),
                (false, true) => (State::Done, listed(&of)),
                (false, false) => (State::Failing, listed(&failing)),
            };
            Requirement { what, state, evidence }
        })
        .collect();
    table.push(tried(experiments));
    table
}

/// Experiments are written down, and their evidence is unchanged.
fn tried(folder: &Path) -> Requirement {
    let what = "experiments recorded";
    let experiments = match experiments::list(folder) {
        Ok(experiments) => experiments,
        Err(error) => return Requirement { what, state: State::Failing, evidence: error.to_string() },
    };
    let broken: Vec<&str> = experiments
        .iter()
        .filter(|(_, experiment)| matches!(experiment.evidence(folder), Evidence::Changed | Evidence::Missing))
        .map(|(name, _)| name.as_str())
        .collect();
    let outcomes = |outcome: &str| experiments.iter().filter(|(_, experiment)| experiment.outcome() == outcome).count();
    let (state, evidence) = if experiments.is_empty() {
        (State::Missing, "no experiment; flashcore experiments new NAME --from FILE".to_owned())
    } else if broken.is_empty() {
        let (confirmed, negative) = (outcomes("confirmed") + outcomes("partly"), outcomes("negative"));
        (State::Done, format!("{} experiments, {confirmed} with an effect, {negative} without", experiments.len()))
    } else {
        (State::Failing, format!("evidence changed or missing: {}", broken.join(", ")))
    };
    Requirement { what, state, evidence }
}
