//! TMA, bulk and tensor loads and stores: what goes wrong around them. What they move is compared with an H200 by the
//! conformance cases, except for fills and boxes that these do not have.

use crate::support::{
    Expected, Place, SHARED, at, deadlock, delay, fault, faulty, first_thread, is_lane, is_warp, kernel, missing_wait,
    race, run_seeded, threads, unfenced, unseen,
};
use flashcore_ir::builder::TensorCopyOptions;
use flashcore_ir::types::{S32, U32, U64};
use flashcore_ir::{
    Builder, Compare, InvalidTensorMap, OutOfBounds, Reg, Space, Swizzle, TensorElement, TensorMap, VerifiedKernel,
};
use flashcore_sim::{
    AccessKind, Argument, Fault, FaultKind, GlobalMemory, InFlight, LaunchError, MbarrierProblem, MbarrierState,
    SimError, TooEarly, WaitsFor,
};

/// Numbers that tell where they were.
fn numbers(count: u32) -> Vec<u8> {
    (0..count).flat_map(|index| (index as u16).to_le_bytes()).collect()
}

fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

/// An `mbarrier` at the start of shared memory and `bytes` after it, at a multiple of 1024.
fn with_barrier(k: &mut Builder, bytes: u32) -> [Reg<U32>; 2] {
    k.reserve_mbarrier();
    let data = k.reserve_shared(bytes, 1024);
    let base = k.shared_base();
    let first = first_thread(k);
    k.section("init", |k| {
        k.when(first, |k| {
            k.mbarrier_init(base, 1u32);
            k.fence_mbarrier_init();
        });
    });
    k.cta_sync();
    [base, k.add(base, data)]
}

const DATA: u64 = SHARED + 1024;

/// Loads the box at run-time coordinates and copies it to `y` as it lies in shared memory, 4 bytes by 4.
fn load_kernel(rank: usize, bytes: u32) -> VerifiedKernel {
    kernel(32, |k| {
        let map = k.tensor_map("map");
        let y = k.parameter::<U64>("y");
        let coordinates: Vec<Reg<S32>> = (0..rank).map(|axis| k.parameter(&format!("c{axis}"))).collect();
        let [barrier, data] = with_barrier(k, bytes);
        let first = first_thread(k);
        k.prefetch_tensor_map(map);
        k.if_then(first, |k| {
            k.mbarrier_arrive_expect(barrier, bytes);
            k.tensor_load(data, map, &coordinates, barrier, TensorCopyOptions::default());
        });
        k.mbarrier_wait(barrier, 0u32);
        let lane = k.lane();
        k.for_uniform::<U32>(0u32, bytes / 4, 32u32, |k, start| {
            let index = k.add(start, lane);
            let inside = k.compare::<U32>(Compare::Lt, index, bytes / 4);
            k.if_then(inside, |k| {
                let from = k.mad::<U32>(index, 4u32, data);
                let word = k.load_shared::<U32>(from, 1)[0];
                let to = k.mad_wide(index, 4u32, y);
                k.store_one(to, word);
            });
        });
    })
}

fn load(map: TensorMap, source: &[u8], coordinates: &[i32], seed: u64) -> Vec<u16> {
    let kernel = load_kernel(coordinates.len(), map.box_bytes());
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", source);
    let y = memory.allocate_uninitialised("y", map.box_bytes() as usize);
    let mut arguments = vec![Argument::TensorMap(TensorMap { base: x, ..map }), Argument::U64(y)];
    arguments.extend(coordinates.iter().map(|&coordinate| Argument::S32(coordinate)));
    let report = run_seeded(&kernel, &arguments, &memory, seed).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.counters.bulk_load_bytes, u64::from(map.box_bytes()));
    halves(&memory.read(y))
}

/// A matrix of 24 columns and 10 rows, 32 columns apart in memory; boxes of 16 × 8.
fn matrix() -> TensorMap {
    TensorMap::new(0, TensorElement::F16, &[24, 10], &[64], &[16, 8])
}

/// Boxes of which nothing lies in the tensor.
#[test]
fn zeros_outside() {
    for [column, row] in [[24, 0], [0, 10], [-100, 3]] {
        let source = numbers(32 * 10);
        assert_eq!(load(matrix(), &source, &[column, row], 0), [0; 128], "({column}, {row})");
    }
}

#[test]
fn one_dimension_and_nan() {
    let mut map = TensorMap::new(0, TensorElement::F32, &[6], &[], &[8]);
    map.fill = OutOfBounds::Nan;
    let source: Vec<u8> = (0..6u32).flat_map(|value| (value as f32).to_le_bytes()).collect();
    let floats: Vec<f32> = load(map, &source, &[-1], 0)
        .chunks_exact(2)
        .map(|pair| f32::from_bits(u32::from(pair[0]) | u32::from(pair[1]) << 16))
        .collect();
    assert!(floats[0].is_nan() && floats[7].is_nan());
    assert_eq!(floats[1..7], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
fn maps_that_hardware_has_no_form_for() {
    let kernel = load_kernel(2, 256);
    let memory = GlobalMemory::new();
    for (map, reason) in [
        (TensorMap { base: 8, ..matrix() }, InvalidTensorMap::Base { base: 8 }),
        (TensorMap { strides: [24, 0, 0, 0], ..matrix() }, InvalidTensorMap::Stride { axis: 1, stride: 24 }),
        (TensorMap { box_dimensions: [4, 8, 1, 1, 1], ..matrix() }, InvalidTensorMap::InnerBox { bytes: 8 }),
        (TensorMap { box_dimensions: [16, 257, 1, 1, 1], ..matrix() }, InvalidTensorMap::Box { axis: 1, size: 257 }),
        (TensorMap { dimensions: [0, 8, 1, 1, 1], ..matrix() }, InvalidTensorMap::Dimension { axis: 0, size: 0 }),
        (TensorMap { rank: 6, ..matrix() }, InvalidTensorMap::Rank { rank: 6 }),
        (
            TensorMap { element_strides: [2, 1, 1, 1, 1], ..matrix() },
            InvalidTensorMap::ElementStride { axis: 0, stride: 2 },
        ),
        (
            TensorMap { box_dimensions: [32, 8, 1, 1, 1], ..matrix() }.with_swizzle(Swizzle::Bytes32),
            InvalidTensorMap::SwizzledBox { bytes: 64, swizzle: Swizzle::Bytes32 },
        ),
        (TensorMap { element: TensorElement::U16, fill: OutOfBounds::Nan, ..matrix() }, InvalidTensorMap::Fill),
    ] {
        let arguments = [Argument::TensorMap(map), Argument::U64(0), Argument::S32(0), Argument::S32(0)];
        let expected = LaunchError::TensorMap { index: 0, name: "map".to_owned(), reason };
        assert_eq!(run_seeded(&kernel, &arguments, &memory, 0), Err(SimError::Launch(expected)));
    }
}

/// The way of a tile through shared memory, and the ways to get it wrong.
#[derive(Clone, Copy, PartialEq)]
enum Through {
    Right,
    BulkLoad,
    WithoutExpect,
    WithoutWait,
    ReadByOthersWithoutWait,
    WithoutInitFence,
    WithoutEnd,
    TooManyBytes,
    WithoutStoreFence,
    LoadedOverUnfencedWrite,
    LoadedOverRead,
    Misaligned,
    NoMap,
    OneCoordinate,
}

const TILE: u32 = 256;

/// The first thread of warp 0 loads a box; warp 1 changes it in place and stores it shifted by (8, 4).
fn through_kernel(how: Through) -> VerifiedKernel {
    kernel(64, |k| {
        let (from, to) = (k.tensor_map("from"), k.tensor_map("to"));
        let x = k.parameter::<U64>("x");
        k.reserve_mbarrier();
        let data = k.reserve_shared(TILE + 128, 1024);
        let base = k.shared_base();
        let data = k.add(base, data);
        let data = if how == Through::Misaligned { k.add(data, 16u32) } else { data };
        let first = first_thread(k);
        k.section("init", |k| {
            k.when(first, |k| {
                k.mbarrier_init(base, 1u32);
                if how != Through::WithoutInitFence {
                    k.fence_mbarrier_init();
                }
            });
        });
        let (lane, second) = (k.lane(), is_warp(k, 1));
        let own = k.mad::<U32>(lane, 8u32, data);
        if matches!(how, Through::LoadedOverUnfencedWrite | Through::LoadedOverRead) {
            k.if_uniform(second, |k| k.section("before", |k| k.store_shared(own, &[lane, lane])));
            if how == Through::LoadedOverRead {
                k.fence_proxy_async();
            }
        }
        k.cta_sync();
        if how == Through::LoadedOverRead {
            k.if_uniform(second, |k| {
                k.section("read", |k| k.load_shared::<U32>(own, 1));
            });
        }
        let zero = k.copy(0i32);
        let coordinates = [zero, zero];
        k.if_then(first, |k| {
            k.section("slow", |k| k.for_lanes(0u32, 500u32, |_, _| {}));
            match how {
                Through::WithoutExpect => {}
                Through::TooManyBytes => k.mbarrier_arrive_expect(base, 2 * TILE),
                _ => k.mbarrier_arrive_expect(base, TILE),
            }
            k.section("load", |k| match how {
                Through::BulkLoad => k.bulk_load(data, x, TILE, base),
                Through::NoMap => k.tensor_load(data, x, &coordinates, base, TensorCopyOptions::default()),
                Through::OneCoordinate => {
                    k.tensor_load(data, from, &coordinates[..1], base, TensorCopyOptions::default());
                }
                _ => k.tensor_load(data, from, &coordinates, base, TensorCopyOptions::default()),
            });
            if how == Through::WithoutExpect {
                k.mbarrier_arrive(base, 1u32);
            }
        });
        if how == Through::WithoutEnd {
            k.exit();
        }
        k.if_uniform(second, |k| {
            if how == Through::WithoutWait {
                delay(k);
            } else if how != Through::ReadByOthersWithoutWait {
                k.section("wait", |k| k.mbarrier_wait(base, 0u32));
            } else {
                // One lane waits, which orders nothing for the others.
                let leader = is_lane(k, 31);
                k.when(leader, |k| k.mbarrier_wait(base, 0u32));
            }
            let pair = k.section("use", |k| k.load_shared::<U32>(own, 2));
            let changed: Vec<_> = pair.into_iter().map(|word| k.xor(word, 0x8000_8000u32)).collect();
            k.section("change", |k| k.store_shared(own, &changed));
            if how != Through::WithoutStoreFence {
                k.fence_proxy_async();
            }
            k.warp_sync();
            let leader = is_lane(k, 0);
            let (column, row) = (k.copy(8i32), k.copy(4i32));
            k.if_then(leader, |k| {
                k.section("store", |k| k.tensor_store(to, &[column, row], data, None));
                k.bulk_commit();
                k.bulk_wait(0, false);
            });
        });
    })
}

fn launched(seed: u64, how: Through, run: impl FnOnce(&VerifiedKernel, Result<Vec<u16>, SimError>)) {
    let kernel = through_kernel(how);
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &numbers(128));
    let y = memory.allocate("y", &vec![0; 16 * 8 * 2]);
    let map = |base| TensorMap::new(base, TensorElement::F16, &[16, 8], &[32], &[16, 8]);
    let arguments = [Argument::TensorMap(map(x)), Argument::TensorMap(map(y)), Argument::U64(x)];
    let result = run_seeded(&kernel, &arguments, &memory, seed).map(|_| halves(&memory.read(y)));
    run(&kernel, result);
}

#[track_caller]
fn fails(how: Through, expected: &Expected) {
    launched(0, how, |kernel, result| assert_eq!(fault(result), expected(kernel)));
}

/// A store does not write outside the tensor.
#[test]
fn a_tile_through_shared_memory() {
    let mut expected = vec![0u16; 128];
    for row in 0..4 {
        (0..8).for_each(|column| expected[(row + 4) * 16 + column + 8] = (row * 16 + column) as u16 ^ 0x8000);
    }
    for how in [Through::Right, Through::BulkLoad] {
        for seed in 0..16 {
            launched(seed, how, |_, result| assert_eq!(result, Ok(expected.clone())));
        }
    }
}

const LOAD: Place = at("load", "TensorLoad", 0).lane(0);
const USE: Place = at("use", "Load", 1).lane(0).address(DATA);

fn state(bytes: i64) -> MbarrierState {
    MbarrierState { address: SHARED as u32, phase: 0, pending: 0, count: 1, bytes }
}

/// Warp 1 waits for a phase that lacks these bytes.
fn waits_for_bytes(bytes: i64) -> Expected {
    deadlock([(WaitsFor::Mbarrier(state(bytes)), at("wait", "MbarrierWait", 1).address(SHARED))])
}

/// The phase completes before the bytes have come, and what is read is under way, or came in a later phase; or it never
/// does, since no `expect_tx` counted the bytes that came first.
#[test]
fn missing_expect() {
    let possible = [
        missing_wait(TooEarly::Read, InFlight::TmaLoadTarget, LOAD.address(DATA), USE),
        race(DATA, at("load", "TensorLoad", 0), USE),
        waits_for_bytes(-i64::from(TILE)),
    ];
    let mut kinds = [0; 3];
    for seed in 0..48 {
        launched(seed, Through::WithoutExpect, |kernel, result| {
            let found = fault(result);
            let kind = possible.iter().position(|expected| expected(kernel) == found);
            kinds[kind.unwrap_or_else(|| panic!("{found}"))] += 1;
        });
    }
    assert!(kinds.iter().all(|&count| count > 0), "{kinds:?}");
}

#[test]
fn missing_wait_for_the_phase() {
    for how in [Through::WithoutWait, Through::ReadByOthersWithoutWait] {
        for seed in 0..16 {
            launched(seed, how, |kernel, result| {
                let Fault { kind, location } = fault(result);
                // Under some seeds the bytes have come when they are read, and some were never there before.
                let noticed = matches!(
                    kind,
                    FaultKind::MissingWait { in_flight: InFlight::TmaLoadTarget, touch: TooEarly::Read, .. }
                        | FaultKind::Race { access: AccessKind::Read, earlier_access: AccessKind::Write, .. }
                        | FaultKind::UninitialisedMemory { space: Space::Shared }
                );
                assert!(noticed, "{kind}");
                assert_eq!(location, USE.of(kernel));
            });
        }
    }
}

#[test]
fn missing_fences() {
    let kind = FaultKind::Mbarrier { problem: MbarrierProblem::Unfenced, state: Some(state(TILE.into())) };
    fails(Through::WithoutInitFence, &faulty(kind, LOAD.address(SHARED)));
    let (change, store) = (at("change", "Store", 1).lane(0), at("store", "TensorStore", 1).lane(0));
    fails(Through::WithoutStoreFence, &unfenced(DATA, change, store));
    fails(Through::LoadedOverUnfencedWrite, &unfenced(DATA, at("before", "Store", 1).lane(0), LOAD));
}

/// Another warp has read the buffer, and nothing orders the load after that.
#[test]
fn missing_order_between_a_read_and_a_load() {
    fails(Through::LoadedOverRead, &race(DATA, at("read", "Load", 1).lane(0), LOAD));
}

#[test]
fn an_end_before_the_bytes_have_come() {
    let mut noticed = 0;
    for seed in 0..16 {
        launched(seed, Through::WithoutEnd, |kernel, result| {
            let Err(SimError::Fault(found)) = result else { return };
            let FaultKind::MissingWait { touch: TooEarly::Exit, in_flight, started, .. } = found.kind else {
                panic!("{found}")
            };
            assert_eq!((in_flight, *started), (InFlight::TmaLoadTarget, LOAD.address(DATA).of(kernel)));
            noticed += 1;
        });
    }
    assert!(noticed > 0);
}

/// `expect_tx` counts more bytes than come.
#[test]
fn too_many_bytes_expected() {
    fails(Through::TooManyBytes, &waits_for_bytes(TILE.into()));
}

#[test]
fn wrong_operands() {
    let misaligned = FaultKind::Misaligned { space: Space::Shared, alignment: 128 };
    fails(Through::Misaligned, &faulty(misaligned, LOAD.address(DATA + 16)));
    fails(Through::OneCoordinate, &faulty(FaultKind::TensorRank { rank: 2, coordinates: 1 }, LOAD));
    launched(0, Through::NoMap, |_, result| assert_eq!(fault(result).kind, FaultKind::NoTensorMap));
}

/// TMA loads of a kernel do not see what the kernel itself has written.
#[test]
fn a_load_of_what_the_kernel_wrote() {
    let wrong = kernel(32, |k| {
        let x = k.parameter::<U64>("x");
        let [barrier, data] = with_barrier(k, 128);
        let lane = k.lane();
        let own = k.mad_wide(lane, 4u32, x);
        k.section("write", |k| k.store_one(own, lane));
        k.warp_sync();
        let first = first_thread(k);
        k.if_then(first, |k| {
            k.mbarrier_arrive_expect(barrier, 128u32);
            k.section("load", |k| k.bulk_load(data, x, 128u32, barrier));
        });
        k.mbarrier_wait(barrier, 0u32);
    });
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &[0; 128]);
    let (store, load) = (at("write", "Store", 0).lane(0), at("load", "BulkLoad", 0).lane(0));
    let expected = unseen(|written| FaultKind::UnfencedGlobal { written }, x, store, load);
    threads(32).on(&memory, [x]).fails(&wrong, &expected);
}

/// Each of two CTAs loads half a box for both: the bytes count where they arrive.
#[test]
fn multicast_counts_the_bytes_of_every_cta() {
    let kernel = kernel(32, |k| {
        k.set_cluster([2, 1, 1]);
        let map = k.tensor_map("map");
        let [barrier, data] = with_barrier(k, 256);
        k.cluster_sync();
        let (first, rank) = (first_thread(k), k.cluster_rank());
        let row = k.shl(rank, 2u32);
        let (row, column) = (k.reinterpret::<U32, S32>(row), k.copy(0i32));
        let target = k.mad::<U32>(rank, 128u32, data);
        let both = k.multicast_mask(0b11);
        k.if_then(first, |k| {
            k.mbarrier_arrive_expect(barrier, 256u32);
            let options = TensorCopyOptions { multicast: Some(both), policy: None };
            k.tensor_load(target, map, &[column, row], barrier, options);
        });
        k.mbarrier_wait(barrier, 0u32);
        k.cluster_sync();
    });
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &numbers(128));
    let map = Argument::TensorMap(TensorMap::new(x, TensorElement::U16, &[16, 8], &[32], &[16, 4]));
    let launched = threads(32).on(&memory, []).with(&[map]).grid([2, 1, 1]).seeds(0..16);
    assert_eq!(launched.passes(&kernel).counters.bulk_load_bytes, 512);
}
