//! TMA, bulk and tensor loads and stores: what they move, where it lies, and what goes wrong around them.

use crate::support::{At, SHARED, fault, kernel, location, missing_wait, run_seeded, words};
use flashcore_ir::builder::TensorCopyOptions;
use flashcore_ir::types::{Pred, S32, U32, U64};
use flashcore_ir::{
    Builder, Compare, GlobalAddress, Reg, Space, SpecialRegister, Swizzle, TensorElement, TensorMap, VerifiedKernel,
};
use flashcore_sim::{
    AccessKind, Argument, Fault, FaultKind, GlobalMemory, InFlight, Launch, LaunchError, MbarrierProblem,
    MbarrierState, Options, SimError, TooEarly, WaitingWarp, WaitsFor, launch,
};

/// Numbers that tell where they were.
fn numbers(count: u32) -> Vec<u8> {
    (0..count).flat_map(|index| (index as u16).to_le_bytes()).collect()
}

fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

fn first_thread(k: &mut Builder) -> Reg<Pred> {
    let thread = k.special(SpecialRegister::ThreadX);
    k.compare::<U32>(Compare::Eq, thread, 0u32)
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

/// The elements of a box without swizzle.
fn expected_box(column: i32, row: i32) -> Vec<u16> {
    let element = |row: i32, column: i32| {
        let inside = (0..24).contains(&column) && (0..10).contains(&row);
        if inside { (row * 32 + column) as u16 } else { 0 }
    };
    (0..8).flat_map(|r| (0..16).map(move |c| element(row + r, column + c))).collect()
}

#[test]
fn boxes_of_a_matrix_with_zeros_outside() {
    let source = numbers(32 * 10);
    for (column, row) in [(0, 0), (8, 1), (16, 5), (-8, -3), (3, 9), (24, 0), (0, 10), (-100, 3)] {
        for seed in 0..3 {
            assert_eq!(load(matrix(), &source, &[column, row], seed), expected_box(column, row), "({column}, {row})");
        }
    }
}

/// Each row of 16 bytes times the width; the piece of 16 bytes moves by the number of the 128-byte line.
#[test]
fn swizzles() {
    for (swizzle, columns) in [(Swizzle::Bytes32, 16u32), (Swizzle::Bytes64, 32), (Swizzle::Bytes128, 64)] {
        let rows = 16;
        let map = TensorMap::new(
            0,
            TensorElement::Bf16,
            &[u64::from(columns), rows],
            &[u64::from(columns) * 2],
            &[columns, rows as u32],
        );
        let actual = load(map.with_swizzle(swizzle), &numbers(columns * rows as u32), &[0, 0], 0);
        let pieces_per_row = columns / 8;
        let mut expected = vec![0u16; actual.len()];
        for row in 0..rows as u32 {
            for piece in 0..pieces_per_row {
                let line = (row * pieces_per_row + piece) / 8 % pieces_per_row;
                let to = (row * pieces_per_row + (piece ^ line)) * 8;
                let from = (row * pieces_per_row + piece) * 8;
                (0..8).for_each(|i| expected[(to + i) as usize] = (from + i) as u16);
            }
        }
        assert_eq!(actual, expected, "{swizzle}");
    }
}

/// Five dimensions, with steps of two in one of them, and a coordinate outside in another.
#[test]
fn five_dimensions() {
    let sizes = [8u64, 3, 4, 2, 2];
    let strides = [16, 48, 192, 384];
    let mut map = TensorMap::new(0, TensorElement::U16, &sizes, &strides, &[8, 2, 4, 1, 2]);
    map.element_strides[2] = 2;
    let actual = load(map, &numbers(8 * 3 * 4 * 2 * 2), &[0, 2, 1, 1, 0], 0);
    let mut expected = Vec::new();
    for e in 0..2 {
        for c in [1, 3] {
            for b in [2, 3] {
                expected.extend((0..8).map(|a| if b < 3 { a + 8 * b + 24 * c + 96 + 192 * e } else { 0 }));
            }
        }
    }
    assert_eq!(actual, expected);
}

#[test]
fn one_dimension_and_nan() {
    let mut map = TensorMap::new(0, TensorElement::F32, &[6], &[], &[8]);
    map.fill = flashcore_ir::OutOfBounds::Nan;
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
    use flashcore_ir::InvalidTensorMap;
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
        (
            TensorMap { element: TensorElement::U16, fill: flashcore_ir::OutOfBounds::Nan, ..matrix() },
            InvalidTensorMap::Fill,
        ),
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
        let (lane, warp) = (k.lane(), k.warp());
        let own = k.mad::<U32>(lane, 8u32, data);
        let second = k.compare::<U32>(Compare::Eq, warp, 1u32);
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
                crate::support::delay(k);
            } else if how != Through::ReadByOthersWithoutWait {
                k.section("wait", |k| k.mbarrier_wait(base, 0u32));
            } else {
                // One lane waits, which orders nothing for the others.
                let leader = k.compare::<U32>(Compare::Eq, lane, 31u32);
                k.when(leader, |k| k.mbarrier_wait(base, 0u32));
            }
            let pair = k.section("use", |k| k.load_shared::<U32>(own, 2));
            let changed: Vec<_> = pair.into_iter().map(|word| k.xor(word, 0x8000_8000u32)).collect();
            k.section("change", |k| k.store_shared(own, &changed));
            if how != Through::WithoutStoreFence {
                k.fence_proxy_async();
            }
            k.warp_sync();
            let leader = k.compare::<U32>(Compare::Eq, lane, 0u32);
            let (column, row) = (k.copy(8i32), k.copy(4i32));
            k.if_then(leader, |k| {
                k.section("store", |k| k.tensor_store(to, &[column, row], data, None));
                k.bulk_commit();
                k.bulk_wait(0, false);
            });
        });
    })
}

fn run_through(how: Through, seed: u64) -> (VerifiedKernel, Result<Vec<u16>, SimError>) {
    let kernel = through_kernel(how);
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &numbers(128));
    let y = memory.allocate("y", &vec![0; 16 * 8 * 2]);
    let map = |base| TensorMap::new(base, TensorElement::F16, &[16, 8], &[32], &[16, 8]);
    let arguments = [Argument::TensorMap(map(x)), Argument::TensorMap(map(y)), Argument::U64(x)];
    let result = run_seeded(&kernel, &arguments, &memory, seed).map(|_| halves(&memory.read(y)));
    (kernel, result)
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
            assert_eq!(run_through(how, seed).1, Ok(expected.clone()));
        }
    }
}

fn state(phase: u32, pending: u32, bytes: i64) -> MbarrierState {
    MbarrierState { address: SHARED as u32, phase, pending, count: 1, bytes }
}

/// The phase completes before the bytes have come, and what is read is under way, or came in a later phase; or it never
/// does, since no `expect_tx` counted the bytes that came first.
#[test]
fn missing_expect() {
    let mut kinds = [0; 3];
    for seed in 0..48 {
        let (kernel, result) = run_through(Through::WithoutExpect, seed);
        let at = location(&kernel, "use", "Load", 1).lane(0).address(DATA);
        let load = location(&kernel, "load", "TensorLoad", 0).address(DATA);
        let early = missing_wait(TooEarly::Read, InFlight::TmaLoadTarget, load.clone().lane(0), at.clone());
        let race = Fault {
            kind: FaultKind::Race {
                space: Space::Shared,
                access: AccessKind::Read,
                earlier_access: AccessKind::Write,
                earlier: Box::new(load),
            },
            location: at,
        };
        let waits = location(&kernel, "wait", "MbarrierWait", 1).address(SHARED);
        let waits_for = WaitsFor::Mbarrier(state(0, 0, -i64::from(TILE)));
        let waiting = vec![WaitingWarp { waits_for, location: waits.clone() }];
        let stuck = Fault { kind: FaultKind::Deadlock { waiting }, location: waits };
        let found = fault(result);
        let kind = [early, race, stuck].iter().position(|expected| *expected == found);
        kinds[kind.unwrap_or_else(|| panic!("{found}"))] += 1;
    }
    assert!(kinds.iter().all(|&count| count > 0), "{kinds:?}");
}

#[test]
fn missing_wait_for_the_phase() {
    for how in [Through::WithoutWait, Through::ReadByOthersWithoutWait] {
        for seed in 0..16 {
            let (kernel, result) = run_through(how, seed);
            let Fault { kind, location: at } = fault(result);
            // Under some seeds the bytes have come when they are read, and some were never there before.
            let noticed = matches!(
                kind,
                FaultKind::MissingWait { in_flight: InFlight::TmaLoadTarget, touch: TooEarly::Read, .. }
                    | FaultKind::Race { access: AccessKind::Read, earlier_access: AccessKind::Write, .. }
                    | FaultKind::UninitialisedMemory { space: Space::Shared }
            );
            assert!(noticed, "{kind}");
            assert_eq!(at, location(&kernel, "use", "Load", 1).lane(0).address(DATA));
        }
    }
}

#[test]
fn missing_fence_of_the_barrier() {
    let (kernel, result) = run_through(Through::WithoutInitFence, 0);
    let expected = Fault {
        kind: FaultKind::Mbarrier { problem: MbarrierProblem::Unfenced, state: Some(state(0, 0, i64::from(TILE))) },
        location: location(&kernel, "load", "TensorLoad", 0).lane(0).address(SHARED),
    };
    assert_eq!(fault(result), expected);
}

#[test]
fn missing_fence_before_a_store() {
    let (kernel, result) = run_through(Through::WithoutStoreFence, 0);
    let expected = Fault {
        kind: FaultKind::MissingProxyFence {
            written: Box::new(location(&kernel, "change", "Store", 1).lane(0).address(DATA)),
        },
        location: location(&kernel, "store", "TensorStore", 1).lane(0).address(DATA),
    };
    assert_eq!(fault(result), expected);
}

#[test]
fn missing_fence_before_a_load_over_a_write() {
    let (kernel, result) = run_through(Through::LoadedOverUnfencedWrite, 0);
    let expected = Fault {
        kind: FaultKind::MissingProxyFence {
            written: Box::new(location(&kernel, "before", "Store", 1).lane(0).address(DATA)),
        },
        location: location(&kernel, "load", "TensorLoad", 0).lane(0).address(DATA),
    };
    assert_eq!(fault(result), expected);
}

/// Another warp has read the buffer, and nothing orders the load after that.
#[test]
fn missing_order_between_a_read_and_a_load() {
    let (kernel, result) = run_through(Through::LoadedOverRead, 0);
    let expected = Fault {
        kind: FaultKind::Race {
            space: Space::Shared,
            access: AccessKind::Write,
            earlier_access: AccessKind::Read,
            earlier: Box::new(location(&kernel, "read", "Load", 1).lane(0).address(DATA)),
        },
        location: location(&kernel, "load", "TensorLoad", 0).lane(0).address(DATA),
    };
    assert_eq!(fault(result), expected);
}

#[test]
fn an_end_before_the_bytes_have_come() {
    let mut noticed = 0;
    for seed in 0..16 {
        let (kernel, result) = run_through(Through::WithoutEnd, seed);
        let Err(SimError::Fault(found)) = result else { continue };
        let FaultKind::MissingWait { touch: TooEarly::Exit, in_flight, started, .. } = found.kind else {
            panic!("{found}")
        };
        assert_eq!(in_flight, InFlight::TmaLoadTarget);
        assert_eq!(*started, location(&kernel, "load", "TensorLoad", 0).lane(0).address(DATA));
        noticed += 1;
    }
    assert!(noticed > 0);
}

/// `expect_tx` counts more bytes than come.
#[test]
fn too_many_bytes_expected() {
    let (kernel, result) = run_through(Through::TooManyBytes, 0);
    let at = location(&kernel, "wait", "MbarrierWait", 1).address(SHARED);
    let waits_for = WaitsFor::Mbarrier(state(0, 0, i64::from(TILE)));
    let waiting = vec![WaitingWarp { waits_for, location: at.clone() }];
    assert_eq!(fault(result), Fault { kind: FaultKind::Deadlock { waiting }, location: at });
}

#[test]
fn wrong_operands() {
    for (how, kind, address) in [
        (Through::Misaligned, FaultKind::Misaligned { space: Space::Shared, alignment: 128 }, Some(DATA + 16)),
        (Through::OneCoordinate, FaultKind::TensorRank { rank: 2, coordinates: 1 }, None),
    ] {
        let (kernel, result) = run_through(how, 0);
        let at = location(&kernel, "load", "TensorLoad", 0).lane(0);
        assert_eq!(fault(result), Fault { kind, location: flashcore_sim::Location { address, ..at } });
    }
    let (_, result) = run_through(Through::NoMap, 0);
    assert_eq!(fault(result).kind, FaultKind::NoTensorMap);
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
    let expected = Fault {
        kind: FaultKind::UnfencedGlobal { written: Box::new(location(&wrong, "write", "Store", 0).lane(0).address(x)) },
        location: location(&wrong, "load", "BulkLoad", 0).lane(0).address(x),
    };
    assert_eq!(fault(run_seeded(&wrong, &[Argument::U64(x)], &memory, 0)), expected);
}

/// One CTA of two loads a half each for both; each waits for both halves at its own barrier.
#[test]
fn multicast() {
    let kernel = kernel(32, |k| {
        k.set_cluster([2, 1, 1]);
        let map = k.tensor_map("map");
        let y = k.parameter::<U64>("y");
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
        let lane = k.lane();
        let own = k.mad::<U32>(lane, 8u32, data);
        let pair = k.load_shared::<U32>(own, 2);
        let index = k.mad::<U32>(rank, 32u32, lane);
        let to = k.mad_wide(index, 8u32, y);
        k.store(GlobalAddress::from(to), &pair);
        k.cluster_sync();
    });
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &numbers(128));
    let y = memory.allocate_uninitialised("y", 512);
    let map = TensorMap::new(x, TensorElement::U16, &[16, 8], &[32], &[16, 4]);
    let arguments = vec![Argument::TensorMap(map), Argument::U64(y)];
    for seed in 0..16 {
        let options = Options { seed, ..Options::default() };
        let report = launch(&kernel, &Launch { grid: [2, 1, 1], arguments: arguments.clone() }, &memory, &options);
        let report = report.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(report.counters.bulk_load_bytes, 512);
        assert_eq!(memory.read(y), numbers(128).repeat(2));
    }
    assert_eq!(words(&memory.read(y)).len(), 128);
}
