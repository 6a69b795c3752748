//! Launches that overlap (PDL): which accesses race with those of launches that may still run.

use crate::support::{at, fault, kernel};
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, ReduceOp, VerifiedKernel};
use flashcore_sim::{AccessKind, Argument, Fault, FaultKind, GlobalMemory, Launch, Options, SimError, Stream};

use Step::{Add, Read, Trigger, Wait, Write};

/// A step of one thread; accesses are to the word of that number.
#[derive(Debug, Clone, Copy)]
enum Step {
    Wait,
    Trigger,
    Read(u32),
    Write(u32),
    Add(u32),
}

fn steps(steps: &[Step]) -> VerifiedKernel {
    kernel(32, |k| {
        let words = k.parameter::<U64>("words");
        let lane = k.lane();
        let first = k.compare::<U32>(Compare::Eq, lane, 0u32);
        for &step in steps {
            k.if_then(first, |k| match step {
                Wait => k.grid_dependency_wait(),
                Trigger => k.launch_dependents(),
                Read(word) => {
                    let address = k.add::<U64>(words, u64::from(4 * word));
                    k.load_one::<U32>(address);
                }
                Write(word) => {
                    let address = k.add::<U64>(words, u64::from(4 * word));
                    let value = k.copy(1u32);
                    k.store_one(address, value);
                }
                Add(word) => {
                    let address = k.add::<U64>(words, u64::from(4 * word));
                    let one = k.copy(1u32);
                    k.atomic::<U32, GlobalAddress>(ReduceOp::Add, address, one);
                }
            });
        }
    })
}

/// Runs launches of one CTA, which all overlap, after an unknown one that still runs where `busy`. The first that fails is
/// given with its fault.
fn run(busy: bool, launches: &[&[Step]]) -> Option<(usize, Fault)> {
    let kernels: Vec<_> = launches.iter().map(|launch| steps(launch)).collect();
    let of_seed = |seed| {
        let mut memory = GlobalMemory::new();
        let words = memory.allocate("words", &[0; 64]);
        let mut stream = if busy { Stream::busy(&memory) } else { Stream::idle(&memory) };
        let described = Launch { grid: [1, 1, 1], arguments: vec![Argument::U64(words)] };
        let options = Options { seed, ..Options::default() };
        kernels.iter().enumerate().find_map(|(index, kernel)| {
            let result = stream.launch(kernel, &described, true, &options);
            result.is_err().then(|| (index, fault(result)))
        })
    };
    let found = of_seed(0);
    assert!((1..4).all(|seed| of_seed(seed) == found), "the verdict depends on the seed: {found:?}");
    found
}

/// The launch at fault, the kind of its access, the kind of the earlier one, and if a wait came before.
#[track_caller]
fn race(busy: bool, launches: &[&[Step]]) -> Option<(usize, AccessKind, Option<AccessKind>, bool)> {
    let (index, fault) = run(busy, launches)?;
    let FaultKind::LaunchRace { access, earlier, waited } = fault.kind else { panic!("another fault: {fault}") };
    Some((index, access, earlier.map(|earlier| earlier.access), waited))
}

const READ: AccessKind = AccessKind::Read;
const WRITE: AccessKind = AccessKind::Write;

/// The launch before may still run until the wait; what it does not touch may be used earlier.
#[test]
fn before_the_wait() {
    let writes: &[Step] = &[Trigger, Write(0), Read(1), Add(2)];
    assert_eq!(race(false, &[writes, &[Read(0), Wait]]), Some((1, READ, Some(WRITE), false)));
    assert_eq!(race(false, &[writes, &[Write(0), Wait]]), Some((1, WRITE, Some(WRITE), false)));
    assert_eq!(race(false, &[writes, &[Write(1), Wait]]), Some((1, WRITE, Some(READ), false)));
    assert_eq!(race(false, &[writes, &[Read(2), Wait]]), Some((1, READ, Some(AccessKind::Atomic), false)));
    assert_eq!(race(false, &[writes, &[Read(1), Add(2), Read(3), Write(4), Wait, Read(0), Write(1)]]), None);
    // Without an order to trigger, the next launch begins when all CTAs have ended; what they wrote is visible after the wait.
    assert_eq!(race(false, &[&[Write(0)], &[Read(0), Wait]]), Some((1, READ, Some(WRITE), false)));
    assert_eq!(race(true, &[&[Read(0), Wait]]), Some((0, READ, None, false)));
    assert_eq!(race(true, &[&[Wait, Read(0)]]), None);
}

/// The wait covers the launch before, and the ones that this one has waited for.
#[test]
fn older_launches() {
    let writes: &[Step] = &[Trigger, Write(0)];
    let reads_early: &[Step] = &[Read(0), Wait];
    assert_eq!(race(false, &[writes, &[Wait, Trigger], reads_early]), None);
    assert_eq!(race(false, &[writes, &[Trigger, Wait], reads_early]), Some((2, READ, Some(WRITE), false)));
    assert_eq!(race(false, &[writes, &[Trigger], reads_early]), Some((2, READ, Some(WRITE), false)));
    // Triggered or not, one that ends without a wait vouches for nothing.
    assert_eq!(race(false, &[writes, &[Trigger, Wait], &[Wait, Read(0)]]), None);
    assert_eq!(race(false, &[writes, &[Trigger], &[Wait, Read(0)]]), Some((2, READ, Some(WRITE), true)));
    assert_eq!(race(false, &[writes, &[], &[Wait, Write(0)]]), Some((2, WRITE, Some(WRITE), true)));
    assert_eq!(race(true, &[&[], &[Wait, Trigger], &[Wait, Read(0)]]), Some((2, READ, None, true)));
    // What follows the wait is ordered after all launches but these.
    assert_eq!(race(false, &[writes, &[Write(1)], &[Wait, Read(1), Read(0)]]), Some((2, READ, Some(WRITE), true)));
}

/// A launch without the attribute begins when all before it have ended.
#[test]
fn a_launch_that_does_not_overlap() {
    let mut memory = GlobalMemory::new();
    let words = memory.allocate("words", &[0; 64]);
    let described = Launch { grid: [1, 1, 1], arguments: vec![Argument::U64(words)] };
    let [writes, reads] = [steps(&[Trigger, Write(0)]), steps(&[Read(0)])];
    let mut stream = Stream::busy(&memory);
    let options = Options::default();
    assert!(stream.launch(&writes, &described, false, &options).is_ok());
    assert!(stream.launch(&reads, &described, false, &options).is_ok());
    assert!(stream.launch(&writes, &described, true, &options).is_err(), "the launch before reads that word");
}

/// Some CTA waits before it triggers, and so all dependents begin after that; a thread that triggers too early does so for
/// its CTA.
#[test]
fn ctas_and_threads() {
    let of_cta = |write: fn(&mut Builder)| {
        kernel(64, |k| {
            let _words = k.parameter::<U64>("words");
            let (cta, warp) = (k.special(flashcore_ir::SpecialRegister::CtaX), k.warp());
            let second = k.compare::<U32>(Compare::Eq, cta, 1u32);
            let first_warp = k.compare::<U32>(Compare::Eq, warp, 0u32);
            k.if_uniform(second, |k| {
                k.if_else_uniform(first_warp, write, |k| {
                    k.grid_dependency_wait();
                    k.launch_dependents();
                });
            });
        })
    };
    let reads_early = steps(&[Read(0), Wait]);
    let verdict = |kernel: &VerifiedKernel| -> Result<(), SimError> {
        let mut memory = GlobalMemory::new();
        let words = memory.allocate("words", &[0; 64]);
        let mut stream = Stream::busy(&memory);
        let described = |grid| Launch { grid, arguments: vec![Argument::U64(words)] };
        stream.launch(kernel, &described([3, 1, 1]), true, &Options::default())?;
        stream.launch(&reads_early, &described([1, 1, 1]), true, &Options::default())?;
        Ok(())
    };
    assert!(verdict(&of_cta(|_| {})).is_ok());
    let early = fault(verdict(&of_cta(|k| k.launch_dependents())));
    assert!(matches!(early.kind, FaultKind::LaunchRace { earlier: None, .. }), "{early}");
}

/// One thread waits for others: they are ordered after its wait by a barrier, and by nothing else.
#[test]
fn the_wait_of_another_thread() {
    let through = |barrier: bool| {
        kernel(64, |k| {
            let words = k.parameter::<U64>("words");
            let (warp, lane) = (k.warp(), k.lane());
            let waits = k.compare::<U32>(Compare::Eq, warp, 0u32);
            k.if_uniform(waits, |k| k.section("first warp", |k| k.grid_dependency_wait()));
            if barrier {
                k.cta_sync();
            }
            let first = k.compare::<U32>(Compare::Eq, lane, 0u32);
            k.if_else_uniform(
                waits,
                |_| {},
                |k| {
                    k.section("read", |k| k.when(first, |k| k.load_one::<U32>(words)));
                },
            );
        })
    };
    let verdict = |kernel: &VerifiedKernel, seed| {
        let mut memory = GlobalMemory::new();
        let words = memory.allocate("words", &[0; 64]);
        let described = Launch { grid: [1, 1, 1], arguments: vec![Argument::U64(words)] };
        let options = Options { seed, ..Options::default() };
        Stream::busy(&memory).launch(kernel, &described, true, &options).map(|_| words)
    };
    for seed in 0..8 {
        assert!(verdict(&through(true), seed).is_ok());
        let wrong = through(false);
        let fault = fault(verdict(&wrong, seed));
        let expected = FaultKind::LaunchRace { access: AccessKind::Read, earlier: None, waited: false };
        assert_eq!(fault.kind, expected, "seed {seed}");
        assert_eq!(fault.location.line, at("read", "Load", 1).of(&wrong).line);
    }
}
