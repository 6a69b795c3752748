//! A product in the form of Hopper's kernels: one warp loads tiles through a ring of two stages, four warps multiply, and
//! the result leaves by a tensor store. Right under every seed, and what is planted in it is found.

use crate::support::{At, SHARED, fault, kernel, location, run_seeded};
use flashcore_ir::builder::{Adds, LeftMatrix, MatrixLayout, SharedMatrix, TensorCopyOptions};
use flashcore_ir::types::{Bf16x2, F32, Pred, S32, U32};
use flashcore_ir::{
    Builder, Compare, Major, Reg, SharedAddress, SpecialRegister, Swizzle, TensorElement, TensorMap, VerifiedKernel,
};
use flashcore_sim::{Argument, Fault, FaultKind, GlobalMemory, InFlight, SimError, TooEarly, WaitsFor};
use half::bf16;

const SIDE: u32 = 64;
const DEPTH: u32 = 192;
const STAGES: u32 = 2;
/// Depth of a stage: rows of 128 bytes.
const STEP: u32 = 64;
const TILE_BYTES: u32 = SIDE * STEP * 2;
const CONSUMERS: u32 = 128;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Planted {
    Nothing,
    MissingExpect,
    WrongPhase,
    MissingStoreFence,
    ReadBeforeWait,
    EarlyRelease,
}

/// The phase of a stage in a step: its parity.
fn parity(k: &mut Builder, step: Reg<U32>) -> Reg<U32> {
    let round = k.shr(step, 1u32);
    k.and(round, 1u32)
}

struct Ring {
    a: Reg<U32>,
    b: Reg<U32>,
    full: Reg<U32>,
    empty: Reg<U32>,
}

impl Ring {
    /// The addresses of a stage: of A, of B and of the two barriers.
    fn stage(&self, k: &mut Builder, step: Reg<U32>) -> [Reg<U32>; 4] {
        let stage = k.and(step, STAGES - 1);
        let [a, b] = [self.a, self.b].map(|tiles| k.mad::<U32>(stage, TILE_BYTES, tiles));
        let [full, empty] = [self.full, self.empty].map(|barriers| k.mad::<U32>(stage, 8u32, barriers));
        [a, b, full, empty]
    }
}

fn planted_kernel(planted: Planted) -> VerifiedKernel {
    kernel(CONSUMERS + 32, |k| {
        let [a_map, b_map, d_map] = ["a", "b", "d"].map(|name| k.tensor_map(name));
        let [a, b] = [(); 2].map(|()| k.reserve_shared(STAGES * TILE_BYTES, 1024));
        let result = k.reserve_shared(SIDE * SIDE * 2, 1024);
        let [full, empty] = [(); 2].map(|()| k.reserve_shared(8 * STAGES, 8));
        let base = k.shared_base();
        let [a, b, result, full, empty] = [a, b, result, full, empty].map(|offset| k.add(base, offset));
        let ring = Ring { a, b, full, empty };
        let thread = k.special(SpecialRegister::ThreadX);
        let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
        k.section("barriers", |k| {
            k.when(first, |k| {
                for stage in 0..STAGES {
                    let stage = 8 * stage as i32;
                    k.mbarrier_init(SharedAddress::from(full).plus(stage), 1u32);
                    k.mbarrier_init(SharedAddress::from(empty).plus(stage), CONSUMERS);
                }
                k.fence_mbarrier_init();
            });
        });
        k.cta_sync();
        let warp = k.warp();
        let produces = k.compare::<U32>(Compare::Eq, warp, CONSUMERS / 32);
        k.if_else_uniform(
            produces,
            |k| produce(k, &ring, [a_map, b_map], planted),
            |k| consume(k, &ring, result, d_map, planted),
        );
    })
}

fn produce(k: &mut Builder, ring: &Ring, [a_map, b_map]: [Reg<flashcore_ir::types::U64>; 2], planted: Planted) {
    let leader = k.elect();
    let zero = k.copy(0i32);
    k.if_then(leader, |k| {
        k.for_lanes(0u32, DEPTH / STEP, |k, step| {
            let [a, b, full, empty] = ring.stage(k, step);
            let before = parity(k, step);
            let before = k.xor(before, 1u32);
            k.section("wait for empty", |k| k.mbarrier_wait(empty, before));
            let depth = k.mul(step, STEP);
            let depth = k.reinterpret::<U32, S32>(depth);
            k.section("load", |k| {
                if planted == Planted::MissingExpect {
                    k.mbarrier_arrive(full, 1u32);
                } else {
                    k.mbarrier_arrive_expect(full, 2 * TILE_BYTES);
                }
            });
            k.section("load a", |k| k.tensor_load(a, a_map, &[depth, zero], full, TensorCopyOptions::default()));
            k.section("load b", |k| k.tensor_load(b, b_map, &[depth, zero], full, TensorCopyOptions::default()));
        });
    });
}

fn consume(k: &mut Builder, ring: &Ring, result: Reg<U32>, d_map: Reg<flashcore_ir::types::U64>, planted: Planted) {
    let sums: Vec<Reg<F32>> = (0..SIDE / 2).map(|_| k.copy(0.0f32)).collect();
    let layout = MatrixLayout { swizzle: Swizzle::Bytes128, leading_bytes: 0, stride_bytes: 1024 };
    k.for_uniform::<U32>(0u32, DEPTH / STEP, 1u32, |k, step| {
        let [a, b, full, empty] = ring.stage(k, step);
        let phase = parity(k, step);
        let phase = if planted == Planted::WrongPhase { k.xor(phase, 1u32) } else { phase };
        k.section("wait for full", |k| k.mbarrier_wait(full, phase));
        let [a, b] = [a, b].map(|tile| k.matrix_descriptor(tile, layout));
        k.section("multiply", |k| {
            k.wgmma_fence();
            for slice in 0..STEP / 16 {
                let [left, right] = [a, b].map(|matrix| {
                    let descriptor = k.descriptor_plus(matrix, 32 * slice);
                    SharedMatrix { descriptor, major: Major::Depth }
                });
                k.section(&format!("slice {slice}"), |k| {
                    k.wgmma::<Bf16x2, F32>(SIDE, &sums, LeftMatrix::Shared(left), right, Adds::Add);
                });
            }
            k.wgmma_commit();
        });
        if planted == Planted::EarlyRelease {
            k.section("release", |k| k.mbarrier_arrive(empty, 1u32));
        }
        if planted == Planted::ReadBeforeWait {
            k.section("early", |k| k.mul(sums[0], 2.0f32));
        }
        k.section("wait", |k| k.wgmma_wait(0));
        if planted != Planted::EarlyRelease {
            k.section("release", |k| k.mbarrier_arrive(empty, 1u32));
        }
    });
    k.section("result", |k| {
        let (warp, lane) = (k.warp(), k.lane());
        let (group, pair) = (k.shr(lane, 2u32), k.and(lane, 3u32));
        let row = k.mad::<U32>(warp, 16u32, group);
        let corner = k.mad::<U32>(row, 2 * SIDE, result);
        let corner = k.mad::<U32>(pair, 4u32, corner);
        for (index, values) in (0u32..).zip(sums.chunks(2)) {
            let packed = k.pair::<Bf16x2>(values[0], values[1]);
            let target = k.add(corner, index % 2 * 8 * 2 * SIDE + index / 2 * 16);
            k.section(&format!("piece {index}"), |k| k.store_shared(target, &[packed]));
        }
        if planted != Planted::MissingStoreFence {
            k.fence_proxy_async();
        }
        k.barrier_sync(1u32, CONSUMERS);
        let thread = k.special(SpecialRegister::ThreadX);
        let first: Reg<Pred> = k.compare::<U32>(Compare::Eq, thread, 0u32);
        let zero = k.copy(0i32);
        k.if_then(first, |k| {
            k.section("store", |k| k.tensor_store(d_map, &[zero, zero], result, None));
            k.bulk_commit();
            k.bulk_wait(0, true);
        });
    });
}

fn value(row: u32, depth: u32, salt: u32) -> f32 {
    ((row * 31 + depth * 17 + salt * 7 + row * depth) % 9) as f32 - 4.0
}

fn run_planted(planted: Planted, seed: u64) -> (VerifiedKernel, Result<Vec<f32>, SimError>) {
    let kernel = planted_kernel(planted);
    let matrix = |salt: u32| -> Vec<u8> {
        let values = (0..SIDE).flat_map(|row| (0..DEPTH).map(move |depth| value(row, depth, salt)));
        values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect()
    };
    let mut memory = GlobalMemory::new();
    let (a, b) = (memory.allocate("a", &matrix(1)), memory.allocate("b", &matrix(2)));
    let d = memory.allocate_uninitialised("d", (SIDE * SIDE * 2) as usize);
    let sides = [u64::from(DEPTH), u64::from(SIDE)];
    let operand = |base: u64| {
        TensorMap::new(base, TensorElement::Bf16, &sides, &[u64::from(DEPTH) * 2], &[STEP, SIDE])
            .with_swizzle(Swizzle::Bytes128)
    };
    let square = [u64::from(SIDE); 2];
    let output = TensorMap::new(d, TensorElement::Bf16, &square, &[u64::from(SIDE) * 2], &[SIDE, SIDE]);
    let arguments = [operand(a), operand(b), output].map(Argument::TensorMap);
    let result = run_seeded(&kernel, &arguments, &memory, seed).map(|report| {
        assert_eq!(report.counters.tensor_flops, u64::from(2 * SIDE * SIDE * DEPTH));
        assert_eq!(report.counters.bulk_load_bytes, u64::from(2 * SIDE * DEPTH * 2));
        memory.read(d).chunks_exact(2).map(|bytes| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()).collect()
    });
    (kernel, result)
}

#[test]
fn the_product_is_right_under_many_seeds() {
    let sum = |row: u32, column: u32| {
        let sum: f32 = (0..DEPTH).map(|depth| value(row, depth, 1) * value(column, depth, 2)).sum();
        bf16::from_f32(sum).to_f32()
    };
    let expected: Vec<f32> = (0..SIDE).flat_map(|row| (0..SIDE).map(move |column| sum(row, column))).collect();
    for seed in 0..40 {
        let actual = run_planted(Planted::Nothing, seed).1.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(actual == expected, "seed {seed}");
    }
}

/// Every one of 12 seeds finds what is planted.
fn check(planted: Planted, expected: impl Fn(&VerifiedKernel, &Fault)) {
    for seed in 0..12 {
        let (kernel, result) = run_planted(planted, seed);
        expected(&kernel, &fault(result));
    }
}

const FULL: u32 = SHARED as u32 + 4 * TILE_BYTES + SIDE * SIDE * 2;

/// The consumers read what is under way, or what came in another phase; or bytes without an `expect_tx` keep a phase from ending.
#[test]
fn missing_expect() {
    check(Planted::MissingExpect, |kernel, found| match &found.kind {
        FaultKind::MissingWait { in_flight: InFlight::TmaLoadTarget, touch: TooEarly::Read, started, .. } => {
            assert_eq!(started.operation, location(kernel, &started.section, "TensorLoad", 4).operation);
            assert!(found.location.section.starts_with("multiply"), "{found}");
        }
        FaultKind::Race { .. } | FaultKind::UninitialisedMemory { .. } => {
            assert!(found.location.section.starts_with("multiply"), "{found}");
        }
        FaultKind::Deadlock { waiting } => {
            let unexpected = waiting.iter().any(
                |warp| matches!(warp.waits_for, WaitsFor::Mbarrier(state) if state.bytes < 0 && state.address < FULL + 16),
            );
            assert!(unexpected, "{found}");
        }
        FaultKind::Mbarrier { .. } => assert!(found.location.section.starts_with("load"), "{found}"),
        other => panic!("{other}"),
    });
}

/// A wait that waits for nothing, or for a phase that does not come.
#[test]
fn wrong_phase() {
    check(Planted::WrongPhase, |_, found| match &found.kind {
        FaultKind::MissingWait { in_flight: InFlight::TmaLoadTarget, .. }
        | FaultKind::Race { .. }
        | FaultKind::UninitialisedMemory { .. } => {
            assert!(found.location.section.starts_with("multiply"), "{found}");
        }
        FaultKind::Deadlock { waiting } => {
            let full = waiting.iter().filter(|warp| warp.location.section == "wait for full").count();
            assert!(full > 0, "{found}");
        }
        other => panic!("{other}"),
    });
}

#[test]
fn missing_fence_before_the_store() {
    check(Planted::MissingStoreFence, |kernel, found| {
        let FaultKind::MissingProxyFence { written } = &found.kind else { panic!("{found}") };
        assert_eq!(
            **written,
            location(kernel, &written.section, "Store", 0).lane(0).address(found.location.address.unwrap_or(0))
        );
        assert_eq!(found.location.section, "result / store");
    });
}

#[test]
fn a_sum_read_before_the_wait() {
    check(Planted::ReadBeforeWait, |kernel, found| {
        let FaultKind::RegisterInFlight { started, .. } = &found.kind else { panic!("{found}") };
        assert!(started.section.starts_with("multiply / slice"), "{found}");
        assert_eq!(found.location, location(kernel, "early", "Mul", found.location.warp));
    });
}

/// The producer overwrites what products under way read; where it is slow, it is at least not ordered after their reads.
#[test]
fn a_stage_released_too_early() {
    check(Planted::EarlyRelease, |_, found| {
        match &found.kind {
            FaultKind::MissingWait { in_flight: InFlight::WgmmaOperand, touch: TooEarly::Write, started, .. } => {
                assert!(started.section.starts_with("multiply / slice"), "{found}");
            }
            FaultKind::Race { earlier, .. } => assert!(earlier.section.starts_with("multiply / slice"), "{found}"),
            other => panic!("{other}"),
        }
        assert!(["load a", "load b"].contains(&&*found.location.section), "{found}");
    });
}
