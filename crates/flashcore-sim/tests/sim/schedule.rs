//! Schedules of warps: results that no seed changes, and barriers between producers and consumers.

use crate::support::{
    at, deadlock, fault, faulty, is_warp, kernel, one_after_the_other, run_seeded, threads, verified, words,
};
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{
    Builder, GlobalAddress, Op, Operand, Reg, SharedAddress, SpecialRegister, Statement, VerifiedKernel,
};
use flashcore_sim::{Argument, BarrierProblem, FaultKind, GlobalMemory, Launch, Options, WaitsFor, launch};

const TILES: u32 = 6;
const FULL: u32 = 1;
const EMPTY: u32 = 3;

/// Warp 0 fills two stages of a ring, warps 1 to 3 read them, each a third time as slow as the last. The barriers are
/// those of a ring of stages: `FULL + stage` and `EMPTY + stage`.
fn ring(consumers: u32) -> VerifiedKernel {
    let threads = 32 * (consumers + 1);
    kernel(threads, |k| {
        let y = k.parameter::<U64>("y");
        k.reserve_shared(2 * 128, 16);
        let (lane, warp, base) = (k.lane(), k.warp(), k.shared_base());
        let own = k.mad::<U32>(lane, 4u32, base);
        let producer = is_warp(k, 0);
        k.if_else_uniform(
            producer,
            |k| {
                for tile in 0..TILES {
                    let stage = tile % 2;
                    if tile >= 2 {
                        k.section(&format!("wait for empty {tile}"), |k| k.barrier_sync(EMPTY + stage, threads));
                    }
                    let value = k.mad::<U32>(lane, 1u32, 1000 * tile);
                    k.store_shared(SharedAddress::from(own).plus(128 * stage as i32), &[value]);
                    k.barrier_arrive(FULL + stage, threads);
                }
            },
            |k| {
                for tile in 0..TILES {
                    let stage = tile % 2;
                    k.section(&format!("wait for full {tile}"), |k| k.barrier_sync(FULL + stage, threads));
                    // A lane reads what another wrote.
                    let other = k.sub::<U32>(31u32, lane);
                    let other = k.mad::<U32>(other, 4u32, base);
                    let value = k.load_shared::<U32>(SharedAddress::from(other).plus(128 * stage as i32), 1);
                    if tile + 2 < TILES {
                        k.barrier_arrive(EMPTY + stage, threads);
                    }
                    store(k, y, warp, lane, tile, value[0]);
                }
            },
        );
    })
}

/// `y[warp - 1][tile][lane] = value`.
fn store(k: &mut Builder, y: Reg<U64>, warp: Reg<U32>, lane: Reg<U32>, tile: u32, value: Reg<U32>) {
    let row = k.mad::<U32>(warp, TILES, tile);
    let index = k.mad::<U32>(row, 32u32, lane);
    let to = k.mad_wide(index, 4u32, y);
    k.store_one(GlobalAddress::from(to).plus(-(TILES as i32) * 128), value);
}

#[test]
fn a_ring_gives_the_same_under_every_seed() {
    let consumers = 3;
    let kernel = ring(consumers);
    let expected: Vec<u32> = (0..consumers)
        .flat_map(|_| (0..TILES).flat_map(|tile| (0..32).map(move |lane| 1000 * tile + 31 - lane)))
        .collect();
    let mut reports = Vec::new();
    for seed in 0..50 {
        let mut memory = GlobalMemory::new();
        let y = memory.allocate_uninitialised("y", 4 * expected.len());
        let report = run_seeded(&kernel, &[Argument::U64(y)], &memory, seed);
        reports.push(report.unwrap_or_else(|error| panic!("seed {seed}: {error}")));
        assert_eq!(words(&memory.read(y)), expected, "seed {seed}");
    }
    // Nor does what is counted depend on the seed.
    assert!(reports.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(reports[0].counters.barriers, u64::from(TILES + (TILES - 2) + consumers * (TILES + TILES - 2)));
}

/// Without the barrier that says a stage is empty, the producer overwrites what is being read or arrives twice; every
/// seed finds one or the other.
#[test]
fn every_seed_faults_in_a_ring_without_empty_barriers() {
    let broken = |k: &VerifiedKernel| {
        let mut kernel = k.clone().into_kernel();
        kernel.blocks_mut(&mut |block| {
            block.statements.retain(|statement| match statement {
                Statement::Instruction(instruction) => !is_empty_barrier(&instruction.op),
                Statement::If(_) | Statement::Loop(_) => true,
            });
        });
        verified(kernel)
    };
    let kernel = broken(&ring(3));
    for seed in 0..50 {
        let mut memory = GlobalMemory::new();
        let y = memory.allocate_uninitialised("y", 3 * TILES as usize * 128);
        let fault = fault(run_seeded(&kernel, &[Argument::U64(y)], &memory, seed));
        let found = match fault.kind {
            FaultKind::Race { .. } => true,
            FaultKind::BarrierCount { problem, .. } => problem == BarrierProblem::ArrivesTwice,
            _ => false,
        };
        assert!(found, "seed {seed}: {fault}");
    }
}

fn is_empty_barrier(op: &Op) -> bool {
    let mut barrier = None;
    op.slots(&mut |slot| {
        if let ("barrier", Operand::Constant(index)) = (slot.name, slot.operand) {
            barrier = Some(index);
        }
    });
    barrier.is_some_and(|index| index >= u64::from(EMPTY))
}

/// A consumer too many: the barrier waits for a warp that the kernel does not have at it.
#[test]
fn a_missing_participant_is_a_deadlock() {
    let waits_for = WaitsFor::Barrier { barrier: FULL, arrived: 64, expected: 96 };
    threads(96).seeds(0..10).check(
        |k, right| {
            let threads = if right { 64u32 } else { 96 };
            let [producer, consumer] = [0, 1].map(|warp| is_warp(k, warp));
            k.if_uniform(producer, |k| k.barrier_arrive(FULL, threads));
            k.if_uniform(consumer, |k| k.section("consume", |k| k.barrier_sync(FULL, threads)));
        },
        &deadlock([(waits_for, at("consume", "BarrierSync", 1))]),
    );
}

/// A barrier can be used again at once: its participants cannot overtake each other.
#[test]
fn barriers_are_used_again() {
    let kernel = kernel(128, |k| {
        let y = k.parameter::<U64>("y");
        k.reserve_shared(512, 16);
        let (thread, base) = (k.special(SpecialRegister::ThreadX), k.shared_base());
        let own = k.mad::<U32>(thread, 4u32, base);
        let next = k.add::<U32>(thread, 33u32);
        let next = k.and::<U32>(next, 127u32);
        let next = k.mad::<U32>(next, 4u32, base);
        let value = k.copy::<U32>(thread);
        k.for_uniform::<U32>(0u32, 10u32, 1u32, |k, _| {
            k.store_shared(own, &[value]);
            k.cta_sync();
            let received = k.load_shared::<U32>(next, 1);
            k.set::<U32>(value, received[0]);
            k.cta_sync();
        });
        let to = k.mad_wide(thread, 4u32, y);
        k.store_one(to, value);
    });
    for seed in 0..20 {
        let mut memory = GlobalMemory::new();
        let y = memory.allocate_uninitialised("y", 512);
        run_seeded(&kernel, &[Argument::U64(y)], &memory, seed).unwrap();
        let expected: Vec<u32> = (0..128).map(|thread| (thread + 330) % 128).collect();
        assert_eq!(words(&memory.read(y)), expected);
    }
}

#[test]
fn a_warp_arrives_twice() {
    let problem = BarrierProblem::ArrivesTwice;
    threads(64).check(
        |k, right| {
            one_after_the_other(
                k,
                |k| {
                    k.barrier_arrive(FULL, 64u32);
                    if right {
                        k.barrier_sync(EMPTY, 64u32);
                    }
                    k.section("again", |k| k.barrier_arrive(FULL, 64u32));
                },
                |k| {
                    k.barrier_sync(FULL, 64u32);
                    if right {
                        k.barrier_arrive(EMPTY, 64u32);
                    }
                    k.barrier_sync(FULL, 64u32);
                },
            );
        },
        &faulty(FaultKind::BarrierCount { barrier: FULL, threads: 64, problem }, at("again", "BarrierArrive", 0)),
    );
}

/// Turns of one step are the finest interleaving.
#[test]
fn turns_of_any_length_agree() {
    let kernel = ring(2);
    for longest_turn in [0, 1, 2, 1000] {
        let mut memory = GlobalMemory::new();
        let y = memory.allocate_uninitialised("y", 2 * TILES as usize * 128);
        let options = Options { longest_turn, ..Options::default() };
        let launched = Launch { grid: [1, 1, 1], arguments: vec![Argument::U64(y)] };
        assert_eq!(launch(&kernel, &launched, &memory, &options).map(|_| ()), Ok(()));
        assert!(memory.is_written(y));
    }
}
