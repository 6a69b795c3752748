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
        match &case.kv_cache {
            Some(problem) => {
                let trial = KvCacheTrial::new(&case, problem).unwrap_or_else(|error| panic!("{case}: {error}"));
                Self::Cache(Box::new((case, trial)))
            }
            None => {
                let yardstick = Yardstick::of(&case).unwrap_or_else(|error| panic!("{case}: {error}"));
                Self::Attention(Box::new((case, yardstick)))
            }
        }
    }

    /// What is wrong, if anything is.
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

#[test]
fn every_planted_bug_is_noticed() {
    let level = Level::default_level().unwrap();
    let runner = Runner::Cpu(level);
    let step: usize = std::env::var("STEP").map_or(1, |s| s.parse().unwrap());
    let start = std::time::Instant::now();
    let cases = suites::full(runner).into_iter().step_by(step).chain(suites::serving(runner).into_iter().step_by(step));
    let old = std::env::var("OLD").is_ok();
    let new_only = std::env::var("NEW").is_ok();
    let is_new = |case: &Case| {
        case.command.as_ref().is_some_and(|c| c.contains("counts"))
            || matches!(case.numbers, flashcore_bench::testkit::Numbers::Stress(s) if s as usize > 3)
    };
    let cases: Vec<Case> = cases.filter(|case| !(old && is_new(case)) && !(new_only && !is_new(case))).collect();
    let mut checks: Vec<Check> = cases.into_par_iter().map(Check::of).collect();
    if !old { checks.extend(suites::merges().into_iter().map(Check::Merge)); }
    println!("{} checks, {:?}", checks.len(), start.elapsed());
    plant(None);
    let complaint = || checks.par_iter().find_map_any(Check::complaint);
    assert_eq!(complaint(), None, "nothing is planted");
    println!("none: {:?}", start.elapsed());
    let survivors = PlantedBug::ALL.iter().filter(|bug| {
        plant(Some(**bug));
        let killed = complaint();
        println!("{} {:?} {:?}", bug.name(), start.elapsed(), killed);
        killed.is_none()
    });
    let survivors: Vec<_> = survivors.map(|bug| bug.name()).collect();
    assert!(survivors.is_empty(), "no check notices {survivors:?}");
}
