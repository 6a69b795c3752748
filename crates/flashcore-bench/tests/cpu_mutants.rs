//! Bugs planted in the CPU backend: the suites notice each, and nothing where none is planted.
//!
//! A bug is planted for the whole process, so this binary has one test.

use flashcore_bench::testkit::Case;
use flashcore_bench::testkit::kv_cache::KvCacheTrial;
use flashcore_bench::testkit::operations::check_merge_on_cpu;
use flashcore_bench::testkit::suites::{self, Runner};
use flashcore_bench::testkit::verify::{Yardstick, verify_with};
use flashcore_cpu::{Level, PlantedBug, plant};
use flashcore_problem::MergeProblem;
use rayon::prelude::*;

/// Something that is run and judged.
enum Check {
    Attention(Box<(Case, Yardstick)>),
    Cache(Box<(Case, KvCacheTrial)>),
    Merge(MergeProblem),
}

impl Check {
    fn of(case: Case) -> Self {
        if let Some(problem) = &case.kv_cache {
            let trial = KvCacheTrial::new(&case, problem).unwrap_or_else(|error| panic!("{case}: {error}"));
            return Self::Cache(Box::new((case, trial)));
        }
        let yardstick = Yardstick::of(&case).unwrap_or_else(|error| panic!("{case}: {error}"));
        Self::Attention(Box::new((case, yardstick)))
    }

    /// The first complaint, if there is one.
    fn complaint(&self) -> Option<String> {
        match self {
            Self::Attention(check) => {
                let (case, yardstick) = &**check;
                let complaints = verify_with(case, yardstick, None).complaints();
                (!complaints.is_empty()).then(|| format!("{case}: {}", complaints[0]))
            }
            Self::Cache(check) => {
                let (case, trial) = &**check;
                match trial.verify(case, None) {
                    Ok(verdict) => verdict.failures.first().map(|failure| format!("{case}: {failure}")),
                    Err(no_verdict) => Some(format!("{case}: {no_verdict}")),
                }
            }
            Self::Merge(problem) => check_merge_on_cpu(problem, 0).err().map(|wrong| format!("{problem:?}: {wrong}")),
        }
    }
}

/// One in so many of the other cases.
const STEP: usize = 9;

/// Every case of the suite `counts`, and some of the suites that are about features.
fn checks() -> Vec<Check> {
    let runner = Runner::Cpu(Level::default_level().expect("a level"));
    let sampled =
        [suites::full(runner), suites::serving(runner)].into_iter().flat_map(|suite| suite.into_iter().step_by(STEP));
    let cases: Vec<Case> = suites::counts(runner).into_iter().chain(sampled).collect();
    // One run of each: whether two give the same bits is not the question.
    let checks = cases.into_par_iter().map(|case| Check::of(Case { repeats: 0, ..case }));
    checks.chain(suites::merges().into_par_iter().map(Check::Merge)).collect()
}

#[test]
fn every_planted_bug_is_noticed() {
    let checks = checks();
    let complaint = || checks.par_iter().find_map_any(Check::complaint);
    plant(None);
    assert_eq!(complaint(), None, "nothing is planted");
    let survives = |bug: &&PlantedBug| {
        plant(Some(**bug));
        complaint().is_none()
    };
    let survivors: Vec<_> = PlantedBug::ALL.iter().filter(survives).map(|bug| bug.name()).collect();
    assert!(survivors.is_empty(), "no check notices {survivors:?}");
}
