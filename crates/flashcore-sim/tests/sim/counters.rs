//! Counters: bank conflicts, sectors, instructions.

use crate::support::{kernel, run};
use flashcore_ir::builder::CopyBytes;
use flashcore_ir::types::{F16x2, F32, U32, U64};
use flashcore_ir::{Builder, Class, Compare, GlobalAddress, L2Prefetch, MmaShape, ReduceOp, Reg};
use flashcore_sim::{Argument, Counters, GlobalMemory, GlobalTraffic, SharedTraffic};

fn counters(threads: u32, bytes: usize, write: impl FnOnce(&mut Builder, Reg<U64>)) -> Counters {
    let kernel = kernel(threads, |k| {
        let x = k.parameter::<U64>("x");
        write(k, x);
    });
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &vec![0; bytes]);
    run(&kernel, &[Argument::U64(x)], &memory).unwrap_or_else(|error| panic!("{error}")).counters
}

/// The traffic of a store of `count` words at a location that `location` computes from the lane.
fn stores(count: usize, location: impl FnOnce(&mut Builder, Reg<U32>) -> Reg<U32>) -> SharedTraffic {
    let counters = counters(32, 4, |k, _| {
        k.reserve_shared(32 * 1024, 128);
        let (lane, base) = (k.lane(), k.shared_base());
        let offset = location(k, lane);
        let location = k.add::<U32>(offset, base);
        k.store_shared(location, &vec![lane; count]);
    });
    counters.shared_stores
}

fn traffic(requests: u64, transactions: u64, bytes: u64) -> SharedTraffic {
    SharedTraffic { requests, transactions, bytes }
}

#[test]
fn words_by_stride() {
    for (stride, transactions) in [(1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (16, 16), (32, 32), (33, 1), (64, 32)] {
        let stored = stores(1, |k, lane| k.mul::<U32>(lane, 4 * stride));
        assert_eq!(stored, traffic(1, transactions, 128), "stride {stride}");
    }
}

/// A column of a 32-word row, once plain, once with the swizzle that spreads it over the banks.
#[test]
fn a_column_and_a_swizzled_column() {
    let plain = stores(1, |k, lane| k.mad::<U32>(lane, 128u32, 20u32));
    assert_eq!(plain.transactions_per_request().to_bits(), 32f64.to_bits());
    let swizzled = stores(1, |k, lane| {
        let column = k.xor::<U32>(lane, 5u32);
        let row = k.mul::<U32>(lane, 128u32);
        k.mad::<U32>(column, 4u32, row)
    });
    assert_eq!(swizzled.transactions_per_request().to_bits(), 1f64.to_bits());
}

/// 8 and 16 bytes for each lane are served in halves and quarters of the warp.
#[test]
fn wide_accesses() {
    assert_eq!(stores(2, |k, lane| k.mul::<U32>(lane, 8u32)), traffic(2, 2, 256));
    assert_eq!(stores(4, |k, lane| k.mul::<U32>(lane, 16u32)), traffic(4, 4, 512));
    // 16 bytes every 32: the eight lanes of a quarter share four groups of banks.
    assert_eq!(stores(4, |k, lane| k.mul::<U32>(lane, 32u32)), traffic(4, 8, 512));
    // Rows of 128 bytes: all of a quarter in one group of banks.
    assert_eq!(stores(4, |k, lane| k.mul::<U32>(lane, 128u32)), traffic(4, 32, 512));
    // The same with 16 bytes of padding.
    assert_eq!(stores(4, |k, lane| k.mul::<U32>(lane, 144u32)), traffic(4, 4, 512));
}

/// Lanes that read one word are served together, and so are the halves of a word.
#[test]
fn broadcasts() {
    let loaded = counters(32, 4, |k, _| {
        k.reserve_shared(128, 128);
        let (lane, base) = (k.lane(), k.shared_base());
        let own = k.mad::<U32>(lane, 4u32, base);
        k.store_shared(own, &[lane]);
        k.warp_sync();
        k.load_shared::<U32>(base, 1);
        let half = k.mad::<U32>(lane, 2u32, base);
        k.load_shared::<flashcore_ir::types::F16>(half, 1);
    });
    assert_eq!(loaded.shared_loads, traffic(2, 2, 128 + 64));
    assert_eq!(loaded.shared_stores, traffic(1, 1, 128));
    assert_eq!(loaded.shared(), traffic(3, 3, 320));
}

/// Requests count by their active lanes: a quarter of the warp without any is no request.
#[test]
fn idle_lanes_make_no_requests() {
    let stored = counters(32, 4, |k, _| {
        k.reserve_shared(4096, 128);
        let (lane, base) = (k.lane(), k.shared_base());
        let own = k.mad::<U32>(lane, 128u32, base);
        let some = k.compare::<U32>(Compare::Lt, lane, 9u32);
        k.when(some, |k| k.store_shared(own, &[lane, lane, lane, lane]));
    });
    assert_eq!(stored.shared_stores, traffic(2, 9, 144));
}

#[test]
fn matrices() {
    let loaded = |row_bytes: u32| {
        let counters = counters(32, 4, |k, _| {
            k.reserve_shared(32 * 144, 128);
            let (lane, base) = (k.lane(), k.shared_base());
            let row = k.mad::<U32>(lane, row_bytes, base);
            k.store_shared(row, &[lane, lane, lane, lane]);
            k.warp_sync();
            k.load_matrix::<F16x2>(row, 4, false);
            k.load_matrix::<F16x2>(row, 2, true);
        });
        counters.load_matrix
    };
    for count in [1, 2, 4] {
        let stored = counters(32, 4, |k, _| {
            k.reserve_shared(512, 128);
            let (lane, base) = (k.lane(), k.shared_base());
            let row = k.mad::<U32>(lane, 16u32, base);
            let pair = k.reinterpret::<U32, F16x2>(lane);
            k.store_matrix(row, &vec![pair; count], false);
        });
        assert_eq!(stored.store_matrix.requests, count as u64);
    }
    assert_eq!(loaded(16), traffic(6, 6, 6 * 128));
    assert_eq!(loaded(144), traffic(6, 6, 6 * 128));
    assert_eq!(loaded(128), traffic(6, 48, 6 * 128));
    assert_eq!(loaded(64), traffic(6, 24, 6 * 128));
}

#[test]
fn copies() {
    let copied = counters(32, 512, |k, x| {
        k.reserve_shared(32 * 128, 128);
        let (lane, base) = (k.lane(), k.shared_base());
        let target = k.mad::<U32>(lane, 128u32, base);
        let source = k.mad_wide(lane, 16u32, x);
        k.copy_async(target, source, CopyBytes::All(16), L2Prefetch::None);
        k.copy_async_wait_all();
    });
    assert_eq!(copied.copy_async_writes, traffic(4, 32, 512));
    assert_eq!(copied.copy_async_bytes, 512);
    assert_eq!(copied.global_loads, GlobalTraffic { requests: 1, sectors: 16, bytes: 512 });
    assert_eq!(copied.instructions_of(Class::Asynchronous), 2);
}

#[test]
fn sectors() {
    let loads = |bytes: u32, count: u32| {
        let counters = counters(32, 32 * 256, |k, x| {
            let lane = k.lane();
            let from = k.mad_wide(lane, bytes, x);
            k.load::<F32>(from, count);
        });
        counters.global_loads
    };
    let expect = |sectors: u64, bytes: u64| GlobalTraffic { requests: 1, sectors, bytes };
    assert_eq!(loads(4, 1), expect(4, 128));
    assert_eq!(loads(0, 1), expect(1, 128));
    assert_eq!(loads(8, 1), expect(8, 128));
    assert_eq!(loads(256, 1), expect(32, 128));
    assert_eq!(loads(16, 4), expect(16, 512));
    assert_eq!(loads(256, 1).sector_use().to_bits(), 0.125f64.to_bits());
}

#[test]
fn instructions() {
    let counted = counters(64, 8192, |k, x| {
        let lane = k.lane();
        let from = k.mad_wide(lane, 4u32, x);
        let [a, b] = [0, 128].map(|offset| k.load_one::<F32>(GlobalAddress::from(from).plus(offset)));
        let sum = k.add::<F32>(a, b);
        let power = k.exp2::<F32>(sum);
        let low = k.compare::<U32>(Compare::Lt, lane, 8u32);
        k.when(low, |k| k.exp2::<F32>(sum));
        let pair = k.pair::<F16x2>(power, sum);
        k.exp2::<F16x2>(pair);
        k.mma::<F16x2, F32>(MmaShape::M16N8K8, &[a, b, sum, power], &[pair, pair], &[pair]);
        k.cta_sync();
        k.reduce::<U32, GlobalAddress>(ReduceOp::Add, GlobalAddress::from(x).plus(4096), lane);
    });
    let by_class = Class::ALL.map(|class| (class, counted.instructions_of(class)));
    let expected = [
        (Class::Integer, 2 * 3),
        (Class::Float, 2),
        (Class::Convert, 2),
        (Class::SpecialFunction, 2 * 3),
        (Class::Warp, 0),
        (Class::Memory, 2 * 4),
        (Class::Asynchronous, 0),
        (Class::Tensor, 2),
        (Class::Barrier, 2),
        (Class::Control, 0),
    ];
    assert_eq!(by_class, expected);
    assert_eq!(counted.instructions_in_all(), 28);
    assert_eq!(counted.lane_operations, 28 * 32 - 2 * 24);
    assert_eq!(counted.exponentials, 2 * (32 + 8 + 64));
    assert_eq!(counted.mma, 2);
    assert_eq!(counted.tensor_flops, 2 * 2 * 16 * 8 * 8);
    assert_eq!(counted.barriers, 2);
    assert_eq!(counted.atomics, 64);
    assert_eq!(counted.transactions_per_request().to_bits(), 1f64.to_bits());
}
