//! The rules of operations that came with Hopper.

use flashcore_ir::builder::{Adds, LeftMatrix, LoadOptions, SharedMatrix, TensorCopyOptions};
use flashcore_ir::types::{F16x2, F32, U32, U64};
use flashcore_ir::verify::Rule;
use flashcore_ir::{
    Arch, Builder, ClusterAddress, FenceScope, Fp8, L2Prefetch, LoadCache, Major, Op, ParameterType, ReduceOp, Reg,
    RegisterId, SharedAddress, Space, Type, Value,
};

use crate::{Case, case, cases, changed, declared, edit, mistake, set};

cases! {
    arrivals_of_none arrivals_beyond_the_count bytes_beyond_the_count parity_of_two scope_of_a_wait
    arrival_in_global_memory atomic_in_another_cta cluster_of_nine cluster_of_none cluster_before_hopper
    remote_load_hint coordinates_of_six_dimensions tensor_map_that_is_a_number bulk_load_of_part_of_a_line
    product_of_twelve_columns product_of_bf16_in_pairs product_accumulated_elsewhere transposed_registers
    transposed_fp8 product_before_hopper registers_in_fours registers_below_the_least three_matrices_stored
}

/// The first instruction of the kernels here gives the address.
fn base(k: &mut Builder) -> Reg<U32> {
    k.reserve_mbarrier();
    k.shared_base()
}

fn arrivals(count: u32, correction: u32) -> Case {
    let write = |k: &mut Builder, count: u32| {
        let base = base(k);
        k.mbarrier_init(base, count);
    };
    let text = format!("MbarrierInit count={count:#x}, target=[%0]");
    mistake(write, [count, correction], (1, &text), [Rule::MbarrierCount { count: count.into() }]).on(Arch::Sm90)
}

fn arrivals_of_none() -> Case {
    arrivals(0, 1)
}

fn arrivals_beyond_the_count() -> Case {
    arrivals(1 << 20, (1 << 20) - 1)
}

fn bytes_beyond_the_count() -> Case {
    let write = |k: &mut Builder, bytes: u32| {
        let base = base(k);
        k.mbarrier_arrive_expect(base, bytes);
    };
    let text = "MbarrierArriveExpect space=Shared bytes=0x100000, target=[%0]";
    let rule = Rule::MbarrierBytes { bytes: 1 << 20 };
    mistake(write, [1 << 20, (1 << 20) - 1], (1, text), [rule]).on(Arch::Sm90)
}

fn parity_of_two() -> Case {
    let write = |k: &mut Builder, parity: u32| {
        let base = base(k);
        k.mbarrier_wait(base, parity);
    };
    let text = "MbarrierWait scope=Cta parity=0x2, source=[%0]";
    mistake(write, [2, 1], (1, text), [Rule::Parity { parity: 2 }]).on(Arch::Sm90)
}

fn scope_of_a_wait() -> Case {
    let write = |k: &mut Builder| {
        let base = base(k);
        k.mbarrier_wait(base, 0u32);
    };
    let text = "MbarrierWait scope=Gpu parity=0x0, source=[%0]";
    let rule = Rule::MbarrierScope { scope: FenceScope::Gpu };
    changed(write, set!(MbarrierWait.scope), [FenceScope::Gpu, FenceScope::Cluster], (1, text), [rule]).on(Arch::Sm90)
}

/// The address would be one of 64 bits as well.
fn arrival_in_global_memory() -> Case {
    let write = |k: &mut Builder| {
        let base = base(k);
        k.mbarrier_arrive(base, 1u32);
    };
    let text = "MbarrierArrive space=Global count=0x1, target=[%0]";
    let (register, actual, expected) = (RegisterId(0), Type::U32, Type::U64);
    let mismatch = Rule::TypeMismatch { name: "target", register, actual, expected };
    let rules = [mismatch, Rule::NotInSpace { space: Space::Global }];
    changed(write, set!(MbarrierArrive.space), [Space::Global, Space::Cluster], (1, text), rules).on(Arch::Sm90)
}

fn atomic_in_another_cta() -> Case {
    let write = |k: &mut Builder| {
        let base = base(k);
        k.reduce::<U32, SharedAddress>(ReduceOp::Add, base, base);
    };
    let text = "Reduce space=Cluster op=Add ty=U32 a=%0, target=[%0]";
    let rule = Rule::NotInSpace { space: Space::Cluster };
    changed(write, set!(Reduce.space), [Space::Cluster, Space::Shared], (1, text), [rule]).on(Arch::Sm90)
}

fn cluster(mistake: [u32; 3], correction: [u32; 3], rule: Rule) -> Case {
    let write = |size| {
        let mut k = Builder::new("kernel", 32);
        k.set_cluster(size);
        (k.finish(), 0)
    };
    case(write, mistake, correction, |_| vec![declared(rule)])
}

fn cluster_of_nine() -> Case {
    cluster([3, 3, 1], [2, 2, 2], Rule::ClusterSize { cluster: [3, 3, 1] }).on(Arch::Sm90)
}

fn cluster_of_none() -> Case {
    cluster([0, 1, 1], [1, 1, 1], Rule::ClusterSize { cluster: [0, 1, 1] })
}

fn cluster_before_hopper() -> Case {
    let rule = Rule::NoClusters { arch: Arch::Sm89, cluster: [2, 1, 1] };
    cluster([2, 1, 1], [1, 1, 1], rule).on(Arch::Sm89)
}

fn remote_load_hint() -> Case {
    let write = |k: &mut Builder, cache| {
        let base = base(k);
        let remote = k.map_shared(base, 0u32);
        k.load_with::<U32, ClusterAddress>(remote, 1, LoadOptions { cache, prefetch: L2Prefetch::None });
    };
    let text = "Load space=Cluster cache=Streaming prefetch=None ty=U32 count=1 d=%2, source=[%1]";
    let caches = [LoadCache::Streaming, LoadCache::All];
    mistake(write, caches, (2, text), [Rule::SharedCacheHint]).on(Arch::Sm90)
}

fn coordinates_of_six_dimensions() -> Case {
    let write = |k: &mut Builder, rank| {
        let base = base(k);
        let (map, zero) = (k.tensor_map("map"), k.copy(0i32));
        k.tensor_load(base, map, &vec![zero; rank], base, TensorCopyOptions::default());
    };
    let text = "TensorLoad rank=6 multicast=false hinted=false map=%1, coordinates=%2, coordinates=%2, coordinates=%2, \
                coordinates=%2, coordinates=%2, coordinates=%2, target=[%0], barrier=[%0]";
    mistake(write, [6, 5], (3, text), [Rule::TensorRank { rank: 6 }]).on(Arch::Sm90)
}

fn tensor_map_that_is_a_number() -> Case {
    let write = |k: &mut Builder, ()| {
        base(k);
        k.tensor_map("map");
    };
    let (actual, loaded) = (Type::U64.into(), ParameterType::TensorMap);
    let rule = Rule::ParameterType { name: "map".to_owned(), actual, loaded };
    let mut case = mistake(write, [(); 2], (1, "TensorMapAddress parameter=0 d=%1"), [rule]).on(Arch::Sm90);
    case.broken.parameters[0].ty = actual;
    case
}

fn bulk_load_of_part_of_a_line() -> Case {
    let write = |k: &mut Builder, bytes: u32| {
        let base = base(k);
        let source = k.parameter::<U64>("source");
        k.bulk_load(base, source, bytes, base);
    };
    let text = "BulkLoad bytes=0x18, target=[%0], source=[%1], barrier=[%0]";
    mistake(write, [24, 32], (2, text), [Rule::BulkSize { bytes: 24 }]).on(Arch::Sm90)
}

/// A product of 8 columns with A in registers, and a mistake in it.
fn product<const N: usize>(
    change: impl Fn(&mut Op),
    columns: u32,
    [accumulate, a_major]: [&str; 2],
    d: [u32; 4],
    rules: [Rule; N],
) -> Case {
    let write = |k: &mut Builder, ()| {
        let descriptor = k.copy(0u64);
        let pair = k.copy::<F16x2>(Value::from_bits(0));
        let sums: Vec<_> = (0..4).map(|_| k.copy(0.0f32)).collect();
        k.copy(1.0f32);
        let b = SharedMatrix { descriptor, major: Major::Depth };
        k.wgmma::<F16x2, F32>(8, &sums, LeftMatrix::Registers(&[pair; 4]), b, Adds::Add);
    };
    let list = |name: &str, ids: [u32; 4]| ids.map(|id| format!("{name}=%{id}")).join(", ");
    let text = format!(
        "Wgmma columns={columns} operand=F16x2 accumulate={accumulate} accumulation=Add source=Registers \
         a_major={a_major} b_major=Depth {}, {}, {}, b=%0",
        list("d", d),
        list("c", [2, 3, 4, 5]),
        list("a", [1; 4])
    );
    let mut case = mistake(write, [(); 2], (7, &text), rules).of_threads(128).on(Arch::Sm90a);
    edit(&mut case.broken, 7, |instruction| change(&mut instruction.op));
    case
}

fn product_of_twelve_columns() -> Case {
    let rule = Rule::ProductColumns { columns: 9 };
    product(|op| set!(Wgmma.columns)(op, 9), 9, ["F32", "Depth"], [2, 3, 4, 5], [rule])
}

fn product_of_bf16_in_pairs() -> Case {
    let wrong = |name, id| {
        let (register, actual, expected) = (RegisterId(id), Type::F32, Type::S32);
        Rule::TypeMismatch { name, register, actual, expected }
    };
    let [d, c] = ["d", "c"].map(|name| [2, 3, 4, 5].map(|id| wrong(name, id)));
    let ([d0, d1, d2, d3], [c0, c1, c2, c3]) = (d, c);
    let none = Rule::NoWarpgroupProduct { operand: Type::F16x2, accumulate: Type::S32 };
    let rules = [d0, d1, d2, d3, c0, c1, c2, c3, none];
    product(|op| set!(Wgmma.accumulate)(op, Type::S32), 8, ["S32", "Depth"], [2, 3, 4, 5], rules)
}

fn product_accumulated_elsewhere() -> Case {
    let change = |op: &mut Op| {
        if let Op::Wgmma { d, .. } = op {
            d[3] = RegisterId(6);
        }
    };
    product(change, 8, ["F32", "Depth"], [2, 3, 4, 6], [Rule::AccumulatorMoved])
}

fn transposed_registers() -> Case {
    let change = |op: &mut Op| set!(Wgmma.a_major)(op, Major::Outer);
    product(change, 8, ["F32", "Outer"], [2, 3, 4, 5], [Rule::RegisterMajor])
}

/// Only 16-bit elements can be adjacent along the outer dimension.
fn transposed_fp8() -> Case {
    let write = |k: &mut Builder, major| {
        let descriptor = k.copy(0u64);
        let sums: Vec<_> = (0..4).map(|_| k.copy(0.0f32)).collect();
        let matrix = SharedMatrix { descriptor, major };
        k.wgmma_fp8([Fp8::E4m3; 2], 8, &sums, LeftMatrix::Shared(matrix), matrix, Adds::Replace);
    };
    let text = "WgmmaFp8 columns=8 left=E4m3 right=E4m3 accumulation=Replace source=Shared a_major=Outer \
                b_major=Outer d=%1, d=%2, d=%3, d=%4, a=%0, b=%0";
    let rules = ["A", "B"].map(|operand| Rule::TransposedFp8 { operand });
    mistake(write, [Major::Outer, Major::Depth], (5, text), rules).of_threads(128).on(Arch::Sm90a)
}

/// Neither the plain target has it nor a later GPU.
fn product_before_hopper() -> Case {
    let write = |k: &mut Builder, fence| if fence { k.wgmma_fence() } else { k.warp_sync() };
    let rule = Rule::NotOnArchitecture { arch: Arch::Sm120, since: flashcore_ir::target::HOPPER_ONLY };
    mistake(write, [true, false], (0, "WgmmaFence"), [rule]).of_threads(128).on(Arch::Sm120)
}

fn registers(count: u32, correction: u32) -> Case {
    let write = |k: &mut Builder, count| k.decrease_registers(count);
    let text = format!("SetRegisterCount change=Decrease count={count}");
    mistake(write, [count, correction], (0, &text), [Rule::RegisterCount { count }]).of_threads(128).on(Arch::Sm90a)
}

fn registers_in_fours() -> Case {
    registers(44, 48)
}

fn registers_below_the_least() -> Case {
    registers(16, 24)
}

fn three_matrices_stored() -> Case {
    let write = |k: &mut Builder, count| {
        let base = base(k);
        let pair = k.reinterpret::<U32, F16x2>(base);
        k.store_matrix(base, &vec![pair; count], false);
    };
    let text = "StoreMatrix count=3 transposed=false ty=F16x2 a=%1, a=%1, a=%1, target=[%0]";
    mistake(write, [3, 4], (2, text), [Rule::MatrixCount { count: 3 }]).on(Arch::Sm90)
}
