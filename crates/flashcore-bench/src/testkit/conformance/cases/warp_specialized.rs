//! A warp-specialized product in the form of Hopper's kernels: one producer warp loads tiles through a ring of two
//! stages, four warps multiply, and the result leaves by a TMA store. What single operations do alone, they do here
//! together.

use flashcore_ir::builder::{Adds, LeftMatrix, MatrixLayout, SharedMatrix, TensorCopyOptions};
use flashcore_ir::types::{Bf16x2, F32, S32, U32, U64};
use flashcore_ir::{
    Builder, Compare, Major, Reg, SharedAddress, SpecialRegister, Swizzle, TensorElement, TensorMap, Type,
};

use crate::testkit::conformance::built::Plan;
use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::inputs::Fill;

const SIDE: u32 = 64;
const DEPTH: u32 = 448;
const STAGES: u32 = 2;
/// Depth of a stage: rows of 128 bytes.
const STEP: u32 = 64;
const TILE_BYTES: u32 = SIDE * STEP * 2;
const CONSUMERS: u32 = 128;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    let operand =
        TensorMap::new(0, TensorElement::Bf16, &[DEPTH.into(), SIDE.into()], &[u64::from(DEPTH) * 2], &[STEP, SIDE])
            .with_swizzle(Swizzle::Bytes128);
    let result = TensorMap::new(0, TensorElement::Bf16, &[SIDE.into(); 2], &[u64::from(SIDE) * 2], &[SIDE, SIDE]);
    let plan = Plan::new("Wgmma", "of tiles that another warp loads", CONSUMERS + 32)
        .input("a", Type::Bf16x2, SIDE * DEPTH / 2, Fill::SmallInteger)
        .input("b", Type::Bf16x2, SIDE * DEPTH / 2, Fill::SmallInteger)
        .output("d", Type::Bf16x2, SIDE * SIDE / 2)
        .tensor(0, operand)
        .tensor(1, operand)
        .tensor(2, result);
    list.push(Plan { tolerance: Tolerance::Exact, ..plan }.case(|k, _, _| write(k)));
}

struct Ring {
    a: Reg<U32>,
    b: Reg<U32>,
    full: Reg<U32>,
    empty: Reg<U32>,
}

impl Ring {
    /// The addresses of a stage, of A, of B and of the two barriers, and the parity of its phase.
    fn stage(&self, k: &mut Builder, step: Reg<U32>) -> ([Reg<U32>; 4], Reg<U32>) {
        let stage = k.and(step, STAGES - 1);
        let [a, b] = [self.a, self.b].map(|tiles| k.mad::<U32>(stage, TILE_BYTES, tiles));
        let [full, empty] = [self.full, self.empty].map(|barriers| k.mad::<U32>(stage, 8u32, barriers));
        let round = k.shr(step, 1u32);
        ([a, b, full, empty], k.and(round, 1u32))
    }
}

fn write(k: &mut Builder) {
    let maps = ["a", "b", "d"].map(|name| k.tensor_map(name));
    let [a, b] = [(); 2].map(|()| k.reserve_shared(STAGES * TILE_BYTES, 1024));
    let result = k.reserve_shared(SIDE * SIDE * 2, 1024);
    let [full, empty] = [(); 2].map(|()| k.reserve_shared(8 * STAGES, 8));
    let base = k.shared_base();
    let [a, b, result, full, empty] = [a, b, result, full, empty].map(|offset| k.add(base, offset));
    let thread = k.special(SpecialRegister::ThreadX);
    let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
    k.when(first, |k| {
        for stage in 0..STAGES as i32 {
            k.mbarrier_init(SharedAddress::from(full).plus(8 * stage), 1u32);
            k.mbarrier_init(SharedAddress::from(empty).plus(8 * stage), CONSUMERS);
        }
        k.fence_mbarrier_init();
    });
    k.cta_sync();
    let ring = Ring { a, b, full, empty };
    let warp = k.warp();
    let produces = k.compare::<U32>(Compare::Eq, warp, CONSUMERS / 32);
    k.if_else_uniform(
        produces,
        |k| produce(k, &ring, [maps[0], maps[1]]),
        |k| {
            let sums = multiply(k, &ring);
            store(k, &sums, result, maps[2]);
        },
    );
}

fn produce(k: &mut Builder, ring: &Ring, [a_map, b_map]: [Reg<U64>; 2]) {
    let leader = k.elect();
    let zero = k.copy(0i32);
    k.if_then(leader, |k| {
        k.for_lanes(0u32, DEPTH / STEP, |k, step| {
            let ([a, b, full, empty], parity) = ring.stage(k, step);
            let before = k.xor(parity, 1u32);
            k.mbarrier_wait(empty, before);
            let depth = k.mul(step, STEP);
            let depth = k.reinterpret::<U32, S32>(depth);
            k.mbarrier_arrive_expect(full, 2 * TILE_BYTES);
            k.tensor_load(a, a_map, &[depth, zero], full, TensorCopyOptions::default());
            k.tensor_load(b, b_map, &[depth, zero], full, TensorCopyOptions::default());
        });
    });
}

fn multiply(k: &mut Builder, ring: &Ring) -> Vec<Reg<F32>> {
    let sums: Vec<Reg<F32>> = (0..SIDE / 2).map(|_| k.copy(0.0f32)).collect();
    let layout = MatrixLayout { swizzle: Swizzle::Bytes128, leading_bytes: 0, stride_bytes: 1024 };
    k.for_uniform::<U32>(0u32, DEPTH / STEP, 1u32, |k, step| {
        let ([a, b, full, empty], parity) = ring.stage(k, step);
        k.mbarrier_wait(full, parity);
        let [a, b] = [a, b].map(|tile| k.matrix_descriptor(tile, layout));
        k.wgmma_fence();
        for slice in 0..STEP / 16 {
            let [left, right] = [a, b].map(|matrix| {
                let descriptor = k.descriptor_plus(matrix, 32 * slice);
                SharedMatrix { descriptor, major: Major::Depth }
            });
            k.wgmma::<Bf16x2, F32>(SIDE, &sums, LeftMatrix::Shared(left), right, Adds::Add);
        }
        k.wgmma_commit();
        k.wgmma_wait(0);
        k.mbarrier_arrive(empty, 1u32);
    });
    sums
}

fn store(k: &mut Builder, sums: &[Reg<F32>], result: Reg<U32>, map: Reg<U64>) {
    let (warp, lane) = (k.warp(), k.lane());
    let (group, pair) = (k.shr(lane, 2u32), k.and(lane, 3u32));
    let row = k.mad::<U32>(warp, 16u32, group);
    let corner = k.mad::<U32>(row, 2 * SIDE, result);
    let corner = k.mad::<U32>(pair, 4u32, corner);
    for (index, values) in (0u32..).zip(sums.chunks(2)) {
        let packed = k.pair::<Bf16x2>(values[0], values[1]);
        let target = k.add(corner, index % 2 * 8 * 2 * SIDE + index / 2 * 16);
        k.store_shared(target, &[packed]);
    }
    k.fence_proxy_async();
    k.barrier_sync(1u32, CONSUMERS);
    let thread = k.special(SpecialRegister::ThreadX);
    let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
    let zero = k.copy(0i32);
    k.if_then(first, |k| {
        k.tensor_store(map, &[zero, zero], result, None);
        k.bulk_commit();
        k.bulk_wait(0, true);
    });
}
