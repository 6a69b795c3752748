//! The rules of operations that came with Hopper.

use flashcore_ir::builder::TensorCopyOptions;
use flashcore_ir::types::U32;
use flashcore_ir::verify::Rule;
use flashcore_ir::{Arch, Builder, FenceScope, Kernel, Op, ReduceOp, SharedAddress, Space};

use crate::support::at;
use crate::{Case, case, cases, declared, edit};

cases! {
    arrivals_of_none arrivals_beyond_the_count bytes_beyond_the_count parity_of_two scope_of_a_wait
    arrival_in_global_memory atomic_in_another_cta cluster_of_nine cluster_of_none cluster_before_hopper
    remote_load_hint coordinates_of_six_dimensions tensor_map_that_is_a_number bulk_load_of_part_of_a_line
    product_of_twelve_columns product_of_bf16_in_pairs product_accumulated_elsewhere transposed_registers
    transposed_fp8 product_before_hopper registers_in_fours registers_below_the_least three_matrices_stored
}

/// The first instruction of the kernels here gives the address.
fn written(write: impl FnOnce(&mut Builder, flashcore_ir::Reg<U32>)) -> Kernel {
    let mut k = Builder::new("kernel", 32);
    k.reserve_mbarrier();
    let base = k.shared_base();
    write(&mut k, base);
    k.finish()
}

fn init(count: u32) -> (Kernel, u32) {
    let line = line!() + 1;
    (written(|k, base| k.mbarrier_init(base, count)), line)
}

fn arrivals_of_none() -> Case {
    case(init, 0, 1, |line| vec![at(line, 1, "MbarrierInit count=0x0, target=[%0]", Rule::MbarrierCount { count: 0 })])
        .on(Arch::Sm90)
}

fn arrivals_beyond_the_count() -> Case {
    case(init, 1 << 20, (1 << 20) - 1, |line| {
        vec![at(line, 1, "MbarrierInit count=0x100000, target=[%0]", Rule::MbarrierCount { count: 1 << 20 })]
    })
    .on(Arch::Sm90)
}

fn bytes_beyond_the_count() -> Case {
    let write = |bytes: u32| {
        let line = line!() + 1;
        (written(|k, base| k.mbarrier_arrive_expect(base, bytes)), line)
    };
    case(write, 1 << 20, (1 << 20) - 1, |line| {
        let text = "MbarrierArriveExpect space=Shared bytes=0x100000, target=[%0]";
        vec![at(line, 1, text, Rule::MbarrierBytes { bytes: 1 << 20 })]
    })
    .on(Arch::Sm90)
}

fn parity_of_two() -> Case {
    let write = |parity: u32| {
        let line = line!() + 1;
        (written(|k, base| k.mbarrier_wait(base, parity)), line)
    };
    case(write, 2, 1, |line| {
        vec![at(line, 1, "MbarrierWait scope=Cta parity=0x2, source=[%0]", Rule::Parity { parity: 2 })]
    })
    .on(Arch::Sm90)
}

fn scope_of_a_wait() -> Case {
    let write = |scope: FenceScope| {
        let line = line!() + 1;
        let mut kernel = written(|k, base| k.mbarrier_wait(base, 0u32));
        edit(&mut kernel, 1, |instruction| {
            if let Op::MbarrierWait { scope: written, .. } = &mut instruction.op {
                *written = scope;
            }
        });
        (kernel, line)
    };
    case(write, FenceScope::Gpu, FenceScope::Cluster, |line| {
        let rule = Rule::MbarrierScope { scope: FenceScope::Gpu };
        vec![at(line, 1, "MbarrierWait scope=Gpu parity=0x0, source=[%0]", rule)]
    })
    .on(Arch::Sm90)
}

/// The address would be one of 64 bits as well.
fn arrival_in_global_memory() -> Case {
    let write = |space: Space| {
        let line = line!() + 1;
        let mut kernel = written(|k, base| k.mbarrier_arrive(base, 1u32));
        edit(&mut kernel, 1, |instruction| {
            if let Op::MbarrierArrive { space: written, .. } = &mut instruction.op {
                *written = space;
            }
        });
        (kernel, line)
    };
    case(write, Space::Global, Space::Cluster, |line| {
        use flashcore_ir::{RegisterId, Type};
        let text = "MbarrierArrive space=Global count=0x1, target=[%0]";
        let (register, actual, expected) = (RegisterId(0), Type::U32, Type::U64);
        vec![
            at(line, 1, text, Rule::TypeMismatch { name: "target", register, actual, expected }),
            at(line, 1, text, Rule::NotInSpace { space: Space::Global }),
        ]
    })
    .on(Arch::Sm90)
}

fn atomic_in_another_cta() -> Case {
    let write = |space: Space| {
        let line = line!() + 1;
        let mut kernel = written(|k, base| k.reduce::<U32, SharedAddress>(ReduceOp::Add, base, base));
        edit(&mut kernel, 1, |instruction| {
            if let Op::Reduce { space: written, .. } = &mut instruction.op {
                *written = space;
            }
        });
        (kernel, line)
    };
    case(write, Space::Cluster, Space::Shared, |line| {
        let text = "Reduce space=Cluster op=Add ty=U32 a=%0, target=[%0]";
        vec![at(line, 1, text, Rule::NotInSpace { space: Space::Cluster })]
    })
    .on(Arch::Sm90)
}

fn cluster(size: [u32; 3]) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 32);
    k.set_cluster(size);
    (k.finish(), 0)
}

fn cluster_of_nine() -> Case {
    case(cluster, [3, 3, 1], [2, 2, 2], |_| vec![declared(Rule::ClusterSize { cluster: [3, 3, 1] })]).on(Arch::Sm90)
}

fn cluster_of_none() -> Case {
    case(cluster, [0, 1, 1], [1, 1, 1], |_| vec![declared(Rule::ClusterSize { cluster: [0, 1, 1] })])
}

fn cluster_before_hopper() -> Case {
    let rule = Rule::NoClusters { arch: Arch::Sm89, cluster: [2, 1, 1] };
    case(cluster, [2, 1, 1], [1, 1, 1], |_| vec![declared(rule)]).on(Arch::Sm89)
}

fn remote_load_hint() -> Case {
    use flashcore_ir::builder::LoadOptions;
    use flashcore_ir::{ClusterAddress, L2Prefetch, LoadCache};
    let write = |cache: LoadCache| {
        let line = line!() + 3;
        let kernel = written(|k, base| {
            let remote = k.map_shared(base, 0u32);
            k.load_with::<U32, ClusterAddress>(remote, 1, LoadOptions { cache, prefetch: L2Prefetch::None });
        });
        (kernel, line)
    };
    case(write, LoadCache::Streaming, LoadCache::All, |line| {
        let text = "Load space=Cluster cache=Streaming prefetch=None ty=U32 count=1 d=%2, source=[%1]";
        vec![at(line, 2, text, Rule::SharedCacheHint)]
    })
    .on(Arch::Sm90)
}

fn coordinates_of_six_dimensions() -> Case {
    let write = |rank: usize| {
        let line = line!() + 5;
        let kernel = written(|k, base| {
            let map = k.tensor_map("map");
            let zero = k.copy(0i32);
            let coordinates = vec![zero; rank];
            k.tensor_load(base, map, &coordinates, base, TensorCopyOptions::default());
        });
        (kernel, line)
    };
    case(write, 6, 5, |line| {
        let text = "TensorLoad rank=6 multicast=false hinted=false map=%1, coordinates=%2, coordinates=%2, coordinates=%2, \
                    coordinates=%2, coordinates=%2, coordinates=%2, target=[%0], barrier=[%0]";
        vec![at(line, 3, text, Rule::TensorRank { rank: 6 })]
    })
    .on(Arch::Sm90)
}

fn tensor_map_that_is_a_number() -> Case {
    use flashcore_ir::{ParameterType, Type};
    let write = |ty: ParameterType| {
        let line = line!() + 2;
        let mut kernel = written(|k, _| {
            k.tensor_map("map");
        });
        kernel.parameters[0].ty = ty;
        (kernel, line)
    };
    case(write, Type::U64.into(), ParameterType::TensorMap, |line| {
        let (actual, loaded) = (Type::U64.into(), ParameterType::TensorMap);
        let rule = Rule::ParameterType { name: "map".to_owned(), actual, loaded };
        vec![at(line, 1, "TensorMapAddress parameter=0 d=%1", rule)]
    })
    .on(Arch::Sm90)
}

fn bulk_load_of_part_of_a_line() -> Case {
    use flashcore_ir::types::U64;
    let write = |bytes: u32| {
        let line = line!() + 3;
        let kernel = written(|k, base| {
            let source = k.parameter::<U64>("source");
            k.bulk_load(base, source, bytes, base);
        });
        (kernel, line)
    };
    case(write, 24, 32, |line| {
        let text = "BulkLoad bytes=0x18, target=[%0], source=[%1], barrier=[%0]";
        vec![at(line, 2, text, Rule::BulkSize { bytes: 24 })]
    })
    .on(Arch::Sm90)
}

/// A product of 8 columns with A in registers, changed by `change`.
fn product(change: fn(&mut Op)) -> (Kernel, u32) {
    use flashcore_ir::builder::{Adds, LeftMatrix, SharedMatrix};
    use flashcore_ir::types::{F16x2, F32};
    use flashcore_ir::{Major, Value};
    let mut k = Builder::new("kernel", 128);
    let descriptor = k.copy(0u64);
    let pair = k.copy::<F16x2>(Value::from_bits(0));
    let sums: Vec<_> = (0..4).map(|_| k.copy(0.0f32)).collect();
    k.copy(1.0f32);
    let line = line!() + 2;
    let b = SharedMatrix { descriptor, major: Major::Depth };
    k.wgmma::<F16x2, F32>(8, &sums, LeftMatrix::Registers(&[pair; 4]), b, Adds::Add);
    let mut kernel = k.finish();
    edit(&mut kernel, 7, |instruction| change(&mut instruction.op));
    (kernel, line)
}

fn product_text(columns: u32, accumulate: &str, a_major: &str, d: [u32; 4]) -> String {
    let list = |name: &str, ids: [u32; 4]| ids.map(|id| format!("{name}=%{id}")).join(", ");
    format!(
        "Wgmma columns={columns} operand=F16x2 accumulate={accumulate} accumulation=Add source=Registers \
         a_major={a_major} b_major=Depth {}, {}, {}, b=%0",
        list("d", d),
        list("c", [2, 3, 4, 5]),
        list("a", [1; 4])
    )
}

fn product_of_twelve_columns() -> Case {
    let change: fn(&mut Op) = |op| {
        if let Op::Wgmma { columns, .. } = op {
            *columns = 9;
        }
    };
    case(
        product,
        change,
        |_| {},
        |line| {
            let text = product_text(9, "F32", "Depth", [2, 3, 4, 5]);
            vec![at(line, 7, &text, Rule::ProductColumns { columns: 9 })]
        },
    )
    .on(Arch::Sm90a)
}

fn product_of_bf16_in_pairs() -> Case {
    use flashcore_ir::{RegisterId, Type};
    let change: fn(&mut Op) = |op| {
        if let Op::Wgmma { accumulate, .. } = op {
            *accumulate = Type::S32;
        }
    };
    case(
        product,
        change,
        |_| {},
        |line| {
            let text = product_text(8, "S32", "Depth", [2, 3, 4, 5]);
            let wrong = |name, id| Rule::TypeMismatch {
                name,
                register: RegisterId(id),
                actual: Type::F32,
                expected: Type::S32,
            };
            let rules = [2, 3, 4, 5].map(|id| wrong("d", id)).into_iter().chain([2, 3, 4, 5].map(|id| wrong("c", id)));
            let rules = rules.chain([Rule::NoWarpgroupProduct { operand: Type::F16x2, accumulate: Type::S32 }]);
            rules.map(|rule| at(line, 7, &text, rule)).collect()
        },
    )
    .on(Arch::Sm90a)
}

fn product_accumulated_elsewhere() -> Case {
    use flashcore_ir::RegisterId;
    let change: fn(&mut Op) = |op| {
        if let Op::Wgmma { d, .. } = op {
            d[3] = RegisterId(6);
        }
    };
    case(
        product,
        change,
        |_| {},
        |line| vec![at(line, 7, &product_text(8, "F32", "Depth", [2, 3, 4, 6]), Rule::AccumulatorMoved)],
    )
    .on(Arch::Sm90a)
}

fn transposed_registers() -> Case {
    let change: fn(&mut Op) = |op| {
        if let Op::Wgmma { a_major, .. } = op {
            *a_major = flashcore_ir::Major::Outer;
        }
    };
    case(
        product,
        change,
        |_| {},
        |line| vec![at(line, 7, &product_text(8, "F32", "Outer", [2, 3, 4, 5]), Rule::RegisterMajor)],
    )
    .on(Arch::Sm90a)
}

/// Only 16-bit elements can be adjacent along the outer dimension.
fn transposed_fp8() -> Case {
    use flashcore_ir::builder::{Adds, LeftMatrix, SharedMatrix};
    use flashcore_ir::{Fp8, Major};
    let write = |major: Major| {
        let mut k = Builder::new("kernel", 128);
        let descriptor = k.copy(0u64);
        let sums: Vec<_> = (0..4).map(|_| k.copy(0.0f32)).collect();
        let line = line!() + 2;
        let matrix = SharedMatrix { descriptor, major };
        k.wgmma_fp8([Fp8::E4m3; 2], 8, &sums, LeftMatrix::Shared(matrix), matrix, Adds::Replace);
        (k.finish(), line)
    };
    case(write, Major::Outer, Major::Depth, |line| {
        let text = "WgmmaFp8 columns=8 left=E4m3 right=E4m3 accumulation=Replace source=Shared a_major=Outer \
                    b_major=Outer d=%1, d=%2, d=%3, d=%4, a=%0, b=%0";
        ["A", "B"].map(|operand| at(line, 5, text, Rule::TransposedFp8 { operand })).to_vec()
    })
    .on(Arch::Sm90a)
}

/// Neither the plain target has it nor a later GPU.
fn product_before_hopper() -> Case {
    let write = |fence: bool| {
        let mut k = Builder::new("kernel", 128);
        let line = line!() + 2;
        if fence {
            k.wgmma_fence();
        } else {
            k.warp_sync();
        }
        (k.finish(), line)
    };
    case(write, true, false, |line| {
        let rule = Rule::NotOnArchitecture { arch: Arch::Sm120, since: flashcore_ir::target::HOPPER_ONLY };
        vec![at(line, 0, "WgmmaFence", rule)]
    })
    .on(Arch::Sm120)
}

fn registers(count: u32) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 128);
    let line = line!() + 1;
    k.decrease_registers(count);
    (k.finish(), line)
}

fn registers_in_fours() -> Case {
    case(registers, 44, 48, |line| {
        vec![at(line, 0, "SetRegisterCount change=Decrease count=44", Rule::RegisterCount { count: 44 })]
    })
    .on(Arch::Sm90a)
}

fn registers_below_the_least() -> Case {
    case(registers, 16, 24, |line| {
        vec![at(line, 0, "SetRegisterCount change=Decrease count=16", Rule::RegisterCount { count: 16 })]
    })
    .on(Arch::Sm90a)
}

fn three_matrices_stored() -> Case {
    use flashcore_ir::types::F16x2;
    let write = |count: usize| {
        let line = line!() + 3;
        let kernel = written(|k, base| {
            let pair = k.reinterpret::<U32, F16x2>(base);
            k.store_matrix(base, &vec![pair; count], false);
        });
        (kernel, line)
    };
    case(write, 3, 4, |line| {
        let text = "StoreMatrix count=3 transposed=false ty=F16x2 a=%1, a=%1, a=%1, target=[%0]";
        vec![at(line, 2, text, Rule::MatrixCount { count: 3 })]
    })
    .on(Arch::Sm90)
}
