//! Bugs planted in the warp-specialized product of the conformance cases: every seed finds each.

use flashcore_bench::testkit::conformance::{ConformanceCase, ExecuteError, Executor as _, SimExecutor, cases};
use flashcore_ir::{Arch, Instruction, Kernel, Op, Operand, SectionId, Space, Statement, Type};
use flashcore_sim::{AccessKind, Fault, FaultKind, InFlight, SimError, TooEarly, WaitsFor};

fn case() -> ConformanceCase {
    let name = "Wgmma of tiles that another warp loads";
    cases().into_iter().find(|case| case.name == name).unwrap_or_else(|| panic!("unknown case `{name}`"))
}

fn run(case: &ConformanceCase, seed: u64) -> Result<Vec<Vec<u8>>, ExecuteError> {
    let kernel = case.verified(Arch::Sm90a).unwrap_or_else(|errors| panic!("{}", errors[0]));
    SimExecutor { seed, ..SimExecutor::default() }.execute_case(case, &kernel, &case.input_bytes(0))
}

#[test]
fn the_product_is_the_same_under_every_seed() {
    let case = case();
    let expected = run(&case, 0).unwrap_or_else(|error| panic!("{error}"));
    for seed in 1..12 {
        assert_eq!(run(&case, seed).unwrap_or_else(|error| panic!("seed {seed}: {error}")), expected, "seed {seed}");
    }
}

/// Plants a bug and shows the fault of each seed.
fn check(plant: impl FnOnce(&mut Kernel), expected: impl Fn(&Fault)) {
    let mut case = case();
    plant(&mut case.kernel);
    for seed in 0..12 {
        match run(&case, seed) {
            Err(ExecuteError::Simulator(SimError::Fault(fault))) => expected(&fault),
            other => panic!("seed {seed}: expected a fault, got {other:?}"),
        }
    }
}

/// Calls `change` with the statements of the block that has the operation, and its index there.
fn at(kernel: &mut Kernel, is_it: impl Fn(&Op) -> bool, change: impl FnOnce(&mut Vec<Statement>, usize)) {
    let mut change = Some(change);
    kernel.blocks_mut(&mut |block| {
        let found = block
            .statements
            .iter()
            .position(|statement| matches!(statement, Statement::Instruction(Instruction { op, .. }) if is_it(op)));
        if let Some((index, change)) = found.and_then(|index| Some((index, change.take()?))) {
            change(&mut block.statements, index);
        }
    });
    assert!(change.is_none(), "the kernel has no such operation");
}

/// Puts an operation before the statement, as if it were written there.
fn insert(statements: &mut Vec<Statement>, index: usize, op: Op) {
    let origin = statements[index].origin();
    statements.insert(index, Statement::Instruction(Instruction { op, guard: None, origin }));
}

fn op(statement: &mut Statement) -> &mut Op {
    let Statement::Instruction(instruction) = statement else { panic!("a structure") };
    &mut instruction.op
}

fn is(location: &flashcore_sim::Location, name: &str) -> bool {
    location.operation.split(' ').next() == Some(name)
}

/// The consumers read what is under way, or what came in another phase; or bytes without an `expect_tx` keep a phase from ending.
#[test]
fn missing_expect() {
    let plant = |kernel: &mut Kernel| {
        at(
            kernel,
            |op| matches!(op, Op::MbarrierArriveExpect { .. }),
            |statements, index| {
                let op = op(&mut statements[index]);
                let Op::MbarrierArriveExpect { target, .. } = *op else { panic!("{op}") };
                *op = Op::MbarrierArrive { space: Space::Shared, count: Operand::Constant(1), target };
            },
        );
    };
    check(plant, |found| match &found.kind {
        FaultKind::MissingWait { in_flight: InFlight::TmaLoadTarget, touch: TooEarly::Read, started, .. } => {
            assert!(is(started, "TensorLoad") && is(&found.location, "Wgmma"), "{found}");
        }
        FaultKind::Race { .. } | FaultKind::UninitialisedMemory { .. } => {
            assert!(is(&found.location, "Wgmma"), "{found}");
        }
        FaultKind::Deadlock { waiting } => {
            let unexpected =
                waiting.iter().any(|warp| matches!(warp.waits_for, WaitsFor::Mbarrier(state) if state.bytes < 0));
            assert!(unexpected, "{found}");
        }
        FaultKind::Mbarrier { .. } => assert_eq!(found.location.warp, 4, "{found}"),
        other => panic!("{other}"),
    });
}

/// A wait that waits for nothing, or for a phase that does not come.
#[test]
fn wrong_phase() {
    let plant = |kernel: &mut Kernel| {
        let other = kernel.add_register(Type::U32, SectionId(0));
        // The consumers' wait shares its block with the products.
        at(
            kernel,
            |op| matches!(op, Op::WgmmaCommit {}),
            |statements, _| {
                let wait = |statement: &Statement| {
                    matches!(statement, Statement::Instruction(Instruction { op: Op::MbarrierWait { .. }, .. }))
                };
                let index = statements.iter().position(wait).expect("a wait before the products");
                let Op::MbarrierWait { parity, .. } = op(&mut statements[index]) else { return };
                let right = core::mem::replace(parity, Operand::Register(other));
                insert(statements, index, Op::Xor { ty: Type::U32, d: other, a: right, b: Operand::Constant(1) });
            },
        );
    };
    check(plant, |found| match &found.kind {
        FaultKind::MissingWait { in_flight: InFlight::TmaLoadTarget, .. }
        | FaultKind::Race { .. }
        | FaultKind::UninitialisedMemory { .. } => assert!(is(&found.location, "Wgmma"), "{found}"),
        FaultKind::Deadlock { waiting } => {
            assert!(waiting.iter().any(|warp| warp.location.warp < 4 && is(&warp.location, "MbarrierWait")), "{found}");
        }
        other => panic!("{other}"),
    });
}

#[test]
fn missing_fence_before_the_store() {
    let plant = |kernel: &mut Kernel| {
        let fence = |op: &Op| matches!(op, Op::FenceProxyAsync {});
        at(kernel, fence, |statements, index| drop(statements.remove(index)));
    };
    check(plant, |found| {
        let FaultKind::MissingProxyFence { written } = &found.kind else { panic!("{found}") };
        assert!(is(written, "Store") && is(&found.location, "TensorStore"), "{found}");
        assert_eq!((written.warp, written.lane, written.address), (0, Some(0), found.location.address));
    });
}

#[test]
fn a_sum_read_before_the_wait() {
    let plant = |kernel: &mut Kernel| {
        let d = kernel.add_register(Type::F32, SectionId(0));
        let mut sum = None;
        kernel.instructions(&mut |instruction| {
            if let Op::Wgmma { d, .. } = &instruction.op {
                sum.get_or_insert(d[0]);
            }
        });
        let a = Operand::Register(sum.expect("a product"));
        at(
            kernel,
            |op| matches!(op, Op::WgmmaWait { .. }),
            |statements, index| insert(statements, index, Op::Mul { ty: Type::F32, d, a, b: a }),
        );
    };
    check(plant, |found| {
        let FaultKind::RegisterInFlight { started, access: AccessKind::Read, .. } = &found.kind else {
            panic!("{found}")
        };
        assert!(is(started, "Wgmma") && is(&found.location, "Mul"), "{found}");
    });
}

/// The producer overwrites what products under way read; where it is slow, it is at least not ordered after their reads.
#[test]
fn a_stage_released_too_early() {
    let plant = |kernel: &mut Kernel| {
        at(
            kernel,
            |op| matches!(op, Op::WgmmaWait { .. }),
            |statements, wait| {
                assert!(matches!(op(&mut statements[wait + 1]), Op::MbarrierArrive { .. }));
                statements.swap(wait, wait + 1);
            },
        );
    };
    check(plant, |found| {
        let started = match &found.kind {
            FaultKind::MissingWait { in_flight: InFlight::WgmmaOperand, touch: TooEarly::Write, started, .. } => {
                started
            }
            FaultKind::Race { earlier, .. } => earlier,
            other => panic!("{other}"),
        };
        assert!(is(started, "Wgmma") && is(&found.location, "TensorLoad"), "{found}");
    });
}
