//! Launches that overlap (PDL): the simulator finds missing and late waits, and early triggers, as races between launches.

use std::collections::BTreeSet;

use flashcore_bench::testkit::mutants::{Killer, Mutation, OVERLAP, Trials};
use flashcore_bench::testkit::simulate::simulate;
use flashcore_ir::{Arch, Instruction, Kernel, Op, Space, Statement, VerifiedKernel};
use flashcore_kernels::{Config, KernelLaunch, LaunchPlan, Stage, Target};
use flashcore_problem::{DType, Inputs, Problem};
use flashcore_sim::{FaultKind, SimError};

/// The output of each mutant is right, since launches run one after the other: nothing else can find these bugs. A
/// mutant is harmless in a trial where another kernel or another thread waits, and no mutant is harmless in every trial. Each
/// kernel that overlaps in a listed config dies without its waits, and with a wait at its end.
#[test]
fn every_bug_is_a_race_between_launches() {
    let trials = Trials::prepare(OVERLAP, |_, _, _| true).unwrap_or_else(|error| panic!("{error}"));
    let trials = trials.expect("trials");
    let mut dead = BTreeSet::new();
    for mutation in OVERLAP {
        for attempt in trials.attempts(*mutation) {
            let (trial, killed) = attempt.unwrap_or_else(|error| panic!("{error}"));
            let Some(kill) = killed else { continue };
            let is_race = kill.by == Killer::Fault && kill.report.starts_with("race between launches");
            assert!(is_race, "{}: {}", mutation.name, kill.report);
            dead.insert((mutation.name, trial));
        }
        assert!(dead.iter().any(|(name, _)| *name == mutation.name), "{} lives", mutation.name);
    }

    let mut tried = BTreeSet::new();
    for (trial, _, plan) in trials.plans() {
        for launch in overlapping(plan) {
            let place = waiting_place(launch);
            let dies = |bug: &str| dead.iter().any(|(name, at)| *name == format!("{}-{bug}", place.0) && *at == trial);
            if dies("does-not-wait") && dies("waits-last") {
                tried.insert(place);
            }
        }
    }
    for config in [Config::all(), Config::fp8(), Config::fp8_mma()].concat() {
        let arch = if config.family() == "hopper" { Arch::Sm90a } else { Arch::Sm90 };
        for (_, problem, _) in trials.plans() {
            let Ok(plan) = LaunchPlan::new(problem, config, arch) else { continue };
            for launch in overlapping(&plan) {
                let place = waiting_place(launch);
                assert!(tried.contains(&place), "no mutant of a kernel that waits as {config} does dies: {place:?}");
            }
        }
    }
}

fn overlapping(plan: &LaunchPlan) -> impl Iterator<Item = &KernelLaunch> {
    plan.launches.iter().filter(|launch| launch.overlaps_previous())
}

/// The kernel, as mutants call it, and the sections in which it waits and triggers.
fn waiting_place(launch: &KernelLaunch) -> (&'static str, BTreeSet<String>) {
    let name = match launch.stage() {
        Stage::Attention => "attention",
        Stage::Combine => "combine",
        Stage::ResetCounter => "reset",
        Stage::BlockMask => "block mask",
        Stage::Append | Stage::Merge => "operation",
    };
    let (kernel, mut sections) = (launch.kernel(), BTreeSet::new());
    kernel.instructions(&mut |instruction| {
        if matches!(instruction.op, Op::GridDependencyWait {} | Op::LaunchDependents {}) {
            sections.insert(kernel.section(instruction.origin.section).to_string());
        }
    });
    (name, sections)
}

fn mutation(name: &str) -> &'static Mutation {
    OVERLAP.iter().find(|mutation| mutation.name == name).expect("a mutation of that name")
}

/// Moves the wait of a kernel after its first load.
fn wait_after_the_first_load(kernel: &mut Kernel) {
    let is = |statement: &Statement, matches: fn(&Op) -> bool| matches!(statement, Statement::Instruction(Instruction { op, .. }) if matches(op));
    let statements = &mut kernel.body.statements;
    let wait = statements.iter().position(|statement| is(statement, |op| matches!(op, Op::GridDependencyWait {})));
    let wait = statements.remove(wait.expect("a wait"));
    let load =
        statements.iter().position(|statement| is(statement, |op| matches!(op, Op::Load { space: Space::Global, .. })));
    statements.insert(load.expect("a load") + 1, wait);
}

/// Chunks triggered before they waited, and the combine kernel read a length before its wait: the launch that writes the
/// lengths could still run. One of both is enough to make that safe.
#[test]
fn lengths_of_a_launch_that_still_runs() {
    let mut problem = Problem::new(3, 4, 20, 64, DType::F16).with_seqused_k(true).with_lse(true);
    (problem.key_heads, problem.key_length) = (2, 300);
    let config: Config = "hopper-64x64-2stage-pdl-128chunk".parse().expect("a config");
    let target = Target::new(Arch::Sm90a, 3);
    let plan = LaunchPlan::new(&problem, config, target).unwrap_or_else(|reasons| panic!("{reasons:?}"));
    let inputs = Inputs::random(&problem, 1);
    let changed = |stage: Stage, change: &dyn Fn(&mut Kernel)| {
        let mut kernel = VerifiedKernel::clone(&plan.launch(stage).expect("a launch").kernel()).into_kernel();
        change(&mut kernel);
        kernel.verify(Arch::Sm90a).expect("it keeps the rules")
    };
    let attention = changed(Stage::Attention, &|kernel| {
        assert!((mutation("attention-triggers-first").plant)(kernel) > 0);
    });
    let combine = changed(Stage::Combine, &wait_after_the_first_load);
    let run = |plan: &LaunchPlan| simulate(plan, &problem, &inputs, 0).map(|_| ());

    assert!(run(&plan).is_ok());
    let late = plan.with_kernel(Stage::Combine, combine);
    assert!(run(&late).is_ok(), "chunks that wait before they trigger vouch for the launches before");
    let Err(SimError::Fault(fault)) = run(&late.with_kernel(Stage::Attention, attention)) else { panic!("no fault") };
    assert!(matches!(fault.kind, FaultKind::LaunchRace { earlier: None, waited: false, .. }), "{fault}");
    assert!(fault.location.file.contains("attention"), "the combine kernel reads a length: {fault}");
}
