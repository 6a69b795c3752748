//! TMA: bulk and tensor loads, which move bits and fill zeros outside of tensors.

use flashcore_ir::builder::{CachePolicy, TensorCopyOptions};
use flashcore_ir::types::{S32, U32};
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister, Swizzle, TensorElement, TensorMap, Type};

use super::warpgroups::shared_base;
use crate::testkit::conformance::built::Plan;
use crate::testkit::conformance::case::ConformanceCase;
use crate::testkit::conformance::inputs::Fill;

const THREADS: u32 = 64;
/// Elements of 16 bits of the tensors, at most.
const ELEMENTS: u32 = 4096;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    list.push(bulk_load("BulkLoad", ""));
    list.push(bulk_load("MbarrierArriveExpect", "with bytes"));
    list.push(bulk_load("MbarrierExpect", "with bytes"));
    let matrix = |columns: u32, swizzle: Swizzle| {
        let dimensions = [u64::from(columns) - 8, 24];
        TensorMap::new(0, TensorElement::Bf16, &dimensions, &[u64::from(columns) * 2], &[columns, 16])
            .with_swizzle(swizzle)
    };
    for (swizzle, columns) in
        [(Swizzle::None, 64), (Swizzle::Bytes32, 16), (Swizzle::Bytes64, 32), (Swizzle::Bytes128, 64)]
    {
        for (place, at) in [("inside", [0, 3]), ("across the end", [0, 17]), ("before the start", [-8, -5])] {
            let form = format!("{swizzle} {place}");
            list.push(load("TensorLoad", &form, matrix(columns, swizzle), &at, false));
            // A store that begins before its tensor is an illegal instruction on an H200.
            if at[0] >= 0 {
                list.push(store(&form, matrix(columns, swizzle), &at));
            }
        }
    }
    list.push(load("TensorMapAddress", "", matrix(64, Swizzle::Bytes128), &[0, 0], false));
    list.push(load("PrefetchTensorMap", "", matrix(64, Swizzle::Bytes128), &[0, 0], false));
    list.push(load("TensorLoad", "with a cache policy", matrix(64, Swizzle::Bytes128), &[0, 1], true));
    let line = TensorMap::new(0, TensorElement::F32, &[1000], &[], &[256]);
    list.push(load("TensorLoad", "1 dimension", line, &[900], false));
    let cube = TensorMap::new(0, TensorElement::F16, &[32, 8, 6], &[64, 512], &[32, 4, 3]);
    list.push(load("TensorLoad", "3 dimensions", cube.with_swizzle(Swizzle::Bytes64), &[0, 6, 4], false));
    let four = TensorMap::new(0, TensorElement::U32, &[8, 4, 4, 3], &[32, 128, 512], &[8, 4, 2, 2]);
    list.push(load("TensorLoad", "4 dimensions", four, &[0, 1, -1, 2], false));
    let mut five = TensorMap::new(0, TensorElement::U16, &[8, 3, 4, 2, 2], &[16, 48, 192, 384], &[8, 2, 4, 1, 2]);
    five.element_strides[2] = 2;
    list.push(load("TensorLoad", "5 dimensions with steps", five, &[0, 2, 1, 1, 0], false));
    list.push(store("3 dimensions", cube, &[0, 6, 4]));
    list.push(multicast());
}

fn first_thread(k: &mut Builder) -> Reg<flashcore_ir::types::Pred> {
    let thread = k.special(SpecialRegister::ThreadX);
    k.compare::<U32>(Compare::Eq, thread, 0u32)
}

/// A barrier of one arrival at the start of shared memory, and `bytes` at a multiple of 1024.
fn with_barrier(k: &mut Builder, bytes: u32) -> [Reg<U32>; 2] {
    let data = k.reserve_shared(bytes, 1024);
    let barrier = k.reserve_mbarrier();
    let base = shared_base(k);
    let [barrier, data] = [barrier, data].map(|offset| k.add(base, offset));
    let first = first_thread(k);
    k.when(first, |k| {
        k.mbarrier_init(barrier, 1u32);
        k.fence_mbarrier_init();
    });
    k.cta_sync();
    [barrier, data]
}

/// Writes `bytes` of shared memory out as they lie there.
fn write_out(k: &mut Builder, data: Reg<U32>, bytes: u32, output: Reg<flashcore_ir::types::U64>) {
    let thread = k.special(SpecialRegister::ThreadX);
    k.for_lanes(0u32, bytes / 4 / THREADS + 1, |k, round| {
        let index = k.mad::<U32>(round, THREADS, thread);
        let inside = k.compare::<U32>(Compare::Lt, index, bytes / 4);
        k.if_then(inside, |k| {
            let from = k.mad::<U32>(index, 4u32, data);
            let word = k.load_shared::<U32>(from, 1)[0];
            let to = k.mad_wide(index, 4u32, output);
            k.store_one(to, word);
        });
    });
}

fn bulk_load(row: &'static str, form: &str) -> ConformanceCase {
    const BYTES: u32 = 2048;
    Plan::new(row, form, THREADS)
        .input("word", Type::U32, BYTES / 4, Fill::Bits)
        .output("word", Type::U32, BYTES / 4)
        .case(|k, inputs, outputs| {
            let [barrier, data] = with_barrier(k, BYTES);
            let first = first_thread(k);
            let half = k.copy(BYTES / 2);
            k.if_then(first, |k| {
                k.mbarrier_expect(barrier, half);
                k.bulk_load(data, inputs[0], half, barrier);
                k.mbarrier_arrive_expect(barrier, BYTES / 2);
                let (upper, rest) = (k.add(data, half), flashcore_ir::GlobalAddress::from(inputs[0]));
                k.bulk_load(upper, rest.plus(1024), BYTES / 2, barrier);
            });
            k.mbarrier_wait(barrier, 0u32);
            write_out(k, data, BYTES, outputs[0]);
        })
}

fn coordinates(k: &mut Builder, at: &[i32]) -> Vec<Reg<S32>> {
    at.iter().map(|&coordinate| k.copy(coordinate)).collect()
}

fn load(row: &'static str, form: &str, map: TensorMap, at: &[i32], hinted: bool) -> ConformanceCase {
    let bytes = map.box_bytes();
    Plan::new(row, form, THREADS)
        .input("pair", Type::U32, ELEMENTS / 2, Fill::Bits)
        .output("pair", Type::U32, bytes / 4)
        .tensor(0, map)
        .case(|k, _, outputs| {
            let map = k.tensor_map("map");
            let [barrier, data] = with_barrier(k, bytes);
            k.prefetch_tensor_map(map);
            let at = coordinates(k, at);
            let policy = hinted.then(|| k.cache_policy(CachePolicy::EvictLast));
            let first = first_thread(k);
            k.if_then(first, |k| {
                k.mbarrier_arrive_expect(barrier, bytes);
                k.tensor_load(data, map, &at, barrier, TensorCopyOptions { multicast: None, policy });
            });
            k.mbarrier_wait(barrier, 0u32);
            write_out(k, data, bytes, outputs[0]);
        })
}

/// A box written by threads, then stored: what lies outside the tensor stays zero.
fn store(form: &str, map: TensorMap, at: &[i32]) -> ConformanceCase {
    let bytes = map.box_bytes();
    Plan::new("TensorStore", form, THREADS)
        .input("pair", Type::U32, bytes / 4, Fill::Bits)
        .output("pair", Type::U32, ELEMENTS / 2)
        .tensor(1, map)
        .case(|k, inputs, _| {
            let map = k.tensor_map("map");
            let [_, data] = with_barrier(k, bytes);
            let thread = k.special(SpecialRegister::ThreadX);
            k.for_lanes(0u32, bytes / 4 / THREADS + 1, |k, round| {
                let index = k.mad::<U32>(round, THREADS, thread);
                let inside = k.compare::<U32>(Compare::Lt, index, bytes / 4);
                k.if_then(inside, |k| {
                    let from = k.mad_wide(index, 4u32, inputs[0]);
                    let pair = k.load_one::<U32>(from);
                    let to = k.mad::<U32>(index, 4u32, data);
                    k.store_shared(to, &[pair]);
                });
            });
            k.fence_proxy_async();
            k.cta_sync();
            let at = coordinates(k, at);
            let first = first_thread(k);
            k.if_then(first, |k| {
                k.tensor_store(map, &at, data, None);
                k.bulk_commit();
                k.bulk_wait(0, false);
            });
        })
}

/// Each of two CTAs loads half of a box for both.
fn multicast() -> ConformanceCase {
    const BYTES: u32 = 4096;
    let map = TensorMap::new(0, TensorElement::Bf16, &[64, 32], &[128], &[64, 16]).with_swizzle(Swizzle::Bytes128);
    let plan = Plan::new("TensorLoad", "multicast", THREADS)
        .input("pair", Type::U32, ELEMENTS / 2, Fill::Bits)
        .output("pair", Type::U32, 2 * BYTES / 4)
        .tensor(0, map);
    Plan { grid: [2, 1, 1], cluster: [2, 1, 1], ..plan }.case(|k, _, outputs| {
        let map = k.tensor_map("map");
        let [barrier, data] = with_barrier(k, BYTES);
        k.cluster_sync();
        let rank = k.cluster_rank();
        let target = k.mad::<U32>(rank, BYTES / 2, data);
        let row = k.shl(rank, 4u32);
        let (column, row) = (k.copy(0i32), k.reinterpret::<U32, S32>(row));
        let (first, both) = (first_thread(k), k.multicast_mask(0b11));
        k.if_then(first, |k| {
            k.mbarrier_arrive_expect(barrier, BYTES);
            let options = TensorCopyOptions { multicast: Some(both), policy: None };
            k.tensor_load(target, map, &[column, row], barrier, options);
        });
        k.mbarrier_wait(barrier, 0u32);
        let offset = k.mul_wide(rank, BYTES);
        let output = k.add(outputs[0], offset);
        write_out(k, data, BYTES, output);
        k.cluster_sync();
    })
}
