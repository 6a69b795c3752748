//! The rules of what came with Hopper.

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
