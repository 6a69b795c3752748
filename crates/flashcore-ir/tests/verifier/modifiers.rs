//! The combinations of modifiers and constants that single operations have.

use flashcore_ir::builder::{CopyBytes, LoadOptions};
use flashcore_ir::types::{F16, F16x2, F32, S32, U32, U64};
use flashcore_ir::verify::Rule;
use flashcore_ir::{
    Arch, Builder, CopyCache, GlobalAddress, Kernel, L2Prefetch, LoadCache, MmaShape, Op, ReduceOp, Rounding,
    SharedAddress, ShuffleMode, StoreCache, Type, Value,
};

use crate::support::at;
use crate::{Case, case, cases, edit};

cases! {
    parameter_beyond_the_last parameter_of_another_type
    reinterpreted_width reinterpreted_predicate
    rounding_of_a_conversion
    vector_of_three vector_of_32_bytes stored_vector_of_three
    shared_load_hint shared_load_prefetch shared_store_hint volatile_prefetch
    atomic_minimum_of_floats reduction_that_returns warp_reduction_of_signed_bits
    copy_of_twelve_bytes copy_of_eight_bytes_through_l2
    bulk_of_part_of_a_line bulk_of_nothing
    three_matrices
    product_of_halves_with_depth_4 product_accumulated_in_pairs
    shuffle_control
    bit_field_position
    bit_field_length
    barrier_sixteen barrier_of_part_of_a_warp barrier_of_more_than_the_cta barrier_of_none arrival_of_part_of_a_warp
}

fn load_parameter(parameter: u32) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 32);
    k.parameter::<F32>("scale");
    let line = line!() + 1;
    k.parameter::<U32>("rows");
    let mut kernel = k.finish();
    edit(&mut kernel, 1, |instruction| {
        if let Op::LoadParam { parameter: loaded, .. } = &mut instruction.op {
            *loaded = parameter;
        }
    });
    (kernel, line)
}

fn parameter_beyond_the_last() -> Case {
    case(load_parameter, 2, 1, |line| {
        let rule = Rule::UnknownParameter { parameter: 2, declared: 2 };
        vec![at(line, 1, "LoadParam ty=U32 parameter=2 d=%1", rule)]
    })
}

fn parameter_of_another_type() -> Case {
    case(load_parameter, 0, 1, |line| {
        let rule = Rule::ParameterType { name: "scale".to_owned(), actual: Type::F32.into(), loaded: Type::U32.into() };
        vec![at(line, 1, "LoadParam ty=U32 parameter=0 d=%1", rule)]
    })
}

fn reinterpreted_width() -> Case {
    let write = |wide: bool| {
        let mut k = Builder::new("kernel", 32);
        let lane = k.lane();
        let line = line!() + 1;
        let _ = if wide { k.reinterpret::<U32, U64>(lane).id() } else { k.reinterpret::<U32, F32>(lane).id() };
        (k.finish(), line)
    };
    case(write, true, false, |line| {
        let rule = Rule::ReinterpretWidth { to: Type::U64, from: Type::U32 };
        vec![at(line, 1, "Reinterpret to=U64 from=U32 d=%1, a=%0", rule)]
    })
}

fn reinterpreted_predicate() -> Case {
    use flashcore_ir::types::Pred;
    let write = |reinterpreted: bool| {
        let mut k = Builder::new("kernel", 32);
        let yes = k.compare(flashcore_ir::Compare::Eq, 0u32, 0u32);
        let line = line!() + 1;
        let _ = if reinterpreted { k.reinterpret::<Pred, Pred>(yes) } else { k.copy(yes) };
        (k.finish(), line)
    };
    case(write, true, false, |line| {
        let rule = Rule::ReinterpretWidth { to: Type::Pred, from: Type::Pred };
        vec![at(line, 1, "Reinterpret to=Pred from=Pred d=%1, a=%0", rule)]
    })
}

fn rounding_of_a_conversion() -> Case {
    let write = |rounding| {
        let mut k = Builder::new("kernel", 32);
        let value = k.copy(1.5f32);
        let line = line!() + 1;
        k.to_integer::<S32>(value, rounding);
        (k.finish(), line)
    };
    case(write, Rounding::NearestEven, Rounding::NearestInteger, |line| {
        let rule = Rule::NoConversion { to: Type::S32, from: Type::F32, rounding: Rounding::NearestEven };
        vec![at(line, 1, "Convert to=S32 from=F32 rounding=NearestEven d=%1, a=%0", rule)]
    })
}

fn vector_of_three() -> Case {
    let write = |count| {
        let mut k = Builder::new("kernel", 32);
        let rows = k.parameter::<U64>("rows");
        let line = line!() + 1;
        k.load::<F16>(rows, count);
        (k.finish(), line)
    };
    case(write, 3, 4, |line| {
        let text = "Load space=Global cache=All prefetch=None ty=F16 count=3 d=%1, d=%2, d=%3, source=[%0]";
        vec![at(line, 1, text, Rule::VectorSize { count: 3, bytes: 2 })]
    })
}

fn vector_of_32_bytes() -> Case {
    let write = |count| {
        let mut k = Builder::new("kernel", 32);
        let shared = k.shared_base();
        let line = line!() + 1;
        k.load_shared::<U64>(shared, count);
        (k.finish(), line)
    };
    case(write, 4, 2, |line| {
        let text = "Load space=Shared cache=All prefetch=None ty=U64 count=4 d=%1, d=%2, d=%3, d=%4, source=[%0]";
        vec![at(line, 1, text, Rule::VectorSize { count: 4, bytes: 8 })]
    })
}

fn stored_vector_of_three() -> Case {
    let write = |count| {
        let mut k = Builder::new("kernel", 32);
        let rows = k.parameter::<U64>("rows");
        let one = k.copy(1u32);
        let line = line!() + 1;
        k.store(rows, &vec![one; count]);
        (k.finish(), line)
    };
    case(write, 3, 2, |line| {
        let text = "Store space=Global cache=WriteBack ty=U32 count=3 a=%1, a=%1, a=%1, target=[%0]";
        vec![at(line, 2, text, Rule::VectorSize { count: 3, bytes: 4 })]
    })
}

fn shared_load(options: LoadOptions) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 32);
    let shared = k.shared_base();
    let line = line!() + 1;
    k.load_with::<U32, SharedAddress>(shared, 1, options);
    (k.finish(), line)
}

fn shared_load_hint() -> Case {
    let streaming = LoadOptions { cache: LoadCache::Streaming, ..LoadOptions::default() };
    case(shared_load, streaming, LoadOptions::default(), |line| {
        let text = "Load space=Shared cache=Streaming prefetch=None ty=U32 count=1 d=%1, source=[%0]";
        vec![at(line, 1, text, Rule::SharedCacheHint)]
    })
}

fn shared_load_prefetch() -> Case {
    let prefetch = LoadOptions { prefetch: L2Prefetch::Bytes128, ..LoadOptions::default() };
    case(shared_load, prefetch, LoadOptions::default(), |line| {
        let text = "Load space=Shared cache=All prefetch=Bytes128 ty=U32 count=1 d=%1, source=[%0]";
        vec![at(line, 1, text, Rule::SharedCacheHint)]
    })
}

fn shared_store_hint() -> Case {
    let write = |cache| {
        let mut k = Builder::new("kernel", 32);
        let shared = k.shared_base();
        let line = line!() + 1;
        k.store_with::<U32, SharedAddress>(shared, &[shared], cache);
        (k.finish(), line)
    };
    case(write, StoreCache::L2, StoreCache::WriteBack, |line| {
        let text = "Store space=Shared cache=L2 ty=U32 count=1 a=%0, target=[%0]";
        vec![at(line, 1, text, Rule::SharedCacheHint)]
    })
}

fn volatile_prefetch() -> Case {
    let write = |cache| {
        let mut k = Builder::new("kernel", 32);
        let flags = k.parameter::<U64>("flags");
        let options = LoadOptions { cache, prefetch: L2Prefetch::Bytes64 };
        let line = line!() + 1;
        k.load_with::<U32, GlobalAddress>(flags, 1, options);
        (k.finish(), line)
    };
    case(write, LoadCache::Volatile, LoadCache::ReadOnly, |line| {
        let text = "Load space=Global cache=Volatile prefetch=Bytes64 ty=U32 count=1 d=%1, source=[%0]";
        vec![at(line, 1, text, Rule::VolatilePrefetch)]
    })
}

fn atomic_minimum_of_floats() -> Case {
    let write = |op| {
        let mut k = Builder::new("kernel", 32);
        let sums = k.parameter::<U64>("sums");
        let one = k.copy(1.0f32);
        let line = line!() + 1;
        k.atomic::<F32, GlobalAddress>(op, sums, one);
        (k.finish(), line)
    };
    case(write, ReduceOp::Min, ReduceOp::Add, |line| {
        let text = "Atomic space=Global op=Min ty=F32 d=%2, a=%1, target=[%0]";
        vec![at(line, 2, text, Rule::NoReduction { op: ReduceOp::Min, ty: Type::F32 })]
    })
}

fn reduction_that_returns() -> Case {
    let write = |op| {
        let mut k = Builder::new("kernel", 32);
        let shared = k.shared_base();
        let line = line!() + 1;
        k.reduce::<U32, SharedAddress>(op, shared, shared);
        (k.finish(), line)
    };
    case(write, ReduceOp::Exchange, ReduceOp::Xor, |line| {
        let text = "Reduce space=Shared op=Exchange ty=U32 a=%0, target=[%0]";
        vec![at(line, 1, text, Rule::NoReduction { op: ReduceOp::Exchange, ty: Type::U32 })]
    })
}

fn warp_reduction_of_signed_bits() -> Case {
    let write = |op| {
        let mut k = Builder::new("kernel", 32);
        let value = k.copy(-1i32);
        let line = line!() + 1;
        k.reduce_warp(op, value);
        (k.finish(), line)
    };
    case(write, ReduceOp::And, ReduceOp::Max, |line| {
        let rule = Rule::NoReduction { op: ReduceOp::And, ty: Type::S32 };
        vec![at(line, 1, "ReduceWarp op=And ty=S32 d=%1, a=%0", rule)]
    })
}

fn copy_of_twelve_bytes() -> Case {
    let write = |bytes| {
        let mut k = Builder::new("kernel", 32);
        let (from, to) = (k.parameter::<U64>("from"), k.shared_base());
        let read = k.copy(4u32);
        let line = line!() + 1;
        k.copy_async(to, from, CopyBytes::ZeroFill { written: bytes, read }, L2Prefetch::None);
        (k.finish(), line)
    };
    case(write, 12, 8, |line| {
        let text =
            "CopyAsync bytes=12 cache=All prefetch=None zero_fill=true source_bytes=%2, target=[%1], source=[%0]";
        vec![at(line, 3, text, Rule::CopySize { bytes: 12, cache: CopyCache::All })]
    })
}

fn copy_of_eight_bytes_through_l2() -> Case {
    let write = |through| {
        let mut k = Builder::new("kernel", 32);
        let (from, to) = (k.parameter::<U64>("from"), k.shared_base());
        let line = line!() + 1;
        k.copy_async(to, from, CopyBytes::All(8), L2Prefetch::None);
        let mut kernel = k.finish();
        edit(&mut kernel, 2, |instruction| {
            if let Op::CopyAsync { cache, .. } = &mut instruction.op {
                *cache = through;
            }
        });
        (kernel, line)
    };
    case(write, CopyCache::L2, CopyCache::All, |line| {
        let text = "CopyAsync bytes=8 cache=L2 prefetch=None zero_fill=false target=[%1], source=[%0]";
        vec![at(line, 2, text, Rule::CopySize { bytes: 8, cache: CopyCache::L2 })]
    })
}

fn bulk(bytes: u32) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 32);
    let (to, from) = (k.parameter::<U64>("to"), k.shared_base());
    let line = line!() + 1;
    k.bulk_store(to, from, bytes);
    (k.finish(), line)
}

fn bulk_of_part_of_a_line() -> Case {
    let errors =
        |line| vec![at(line, 2, "BulkStore bytes=0x18, target=[%0], source=[%1]", Rule::BulkSize { bytes: 24 })];
    case(bulk, 24, 32, errors).on(Arch::Sm90)
}

fn bulk_of_nothing() -> Case {
    let errors = |line| vec![at(line, 2, "BulkStore bytes=0x0, target=[%0], source=[%1]", Rule::BulkSize { bytes: 0 })];
    case(bulk, 0, 16, errors).on(Arch::Sm90)
}

fn three_matrices() -> Case {
    let write = |count| {
        let mut k = Builder::new("kernel", 32);
        let shared = k.shared_base();
        let line = line!() + 1;
        k.load_matrix::<F16x2>(shared, count, true);
        (k.finish(), line)
    };
    case(write, 3, 2, |line| {
        let text = "LoadMatrix count=3 transposed=true ty=F16x2 d=%1, d=%2, d=%3, source=[%0]";
        vec![at(line, 1, text, Rule::MatrixCount { count: 3 })]
    })
}

/// 16-bit fragments have half as many registers as `tf32` ones; with depth 4 they would have one and none.
fn product_of_halves_with_depth_4() -> Case {
    let write = |(shape, a_registers, b_registers)| {
        let mut k = Builder::new("kernel", 32);
        let zero = k.copy(Value::<F16x2>::from_bits(0));
        let accumulator = [(); 4].map(|()| k.copy(0.0f32));
        let line = line!() + 1;
        k.mma(shape, &accumulator, &vec![zero; a_registers], &vec![zero; b_registers]);
        (k.finish(), line)
    };
    case(write, (MmaShape::M16N8K4, 1, 0), (MmaShape::M16N8K8, 2, 1), |line| {
        let text =
            "Mma shape=M16N8K4 operand=F16x2 accumulate=F32 d=%1, d=%2, d=%3, d=%4, a=%0, c=%1, c=%2, c=%3, c=%4";
        let rule = Rule::NoProduct { shape: MmaShape::M16N8K4, operand: Type::F16x2, accumulate: Type::F32 };
        vec![at(line, 5, text, rule)]
    })
}

fn product_accumulated_in_pairs() -> Case {
    use flashcore_ir::types::{Bf16x2, HalfPair, MatrixOperand};
    fn product<T: HalfPair + MatrixOperand>() -> (Kernel, u32) {
        let mut k = Builder::new("kernel", 32);
        let zero = k.copy(Value::<T>::from_bits(0));
        let accumulator = [(); 2].map(|()| k.copy(Value::<F16x2>::from_bits(0)));
        let line = line!() + 1;
        k.mma(MmaShape::M16N8K8, &accumulator, &[zero, zero], &[zero]);
        (k.finish(), line)
    }
    let write = |operand| if operand == Type::Bf16x2 { product::<Bf16x2>() } else { product::<F16x2>() };
    case(write, Type::Bf16x2, Type::F16x2, |line| {
        let text = "Mma shape=M16N8K8 operand=Bf16x2 accumulate=F16x2 d=%1, d=%2, a=%0, a=%0, b=%0, c=%1, c=%2";
        let rule = Rule::NoProduct { shape: MmaShape::M16N8K8, operand: Type::Bf16x2, accumulate: Type::F16x2 };
        vec![at(line, 3, text, rule)]
    })
}

fn shuffle_control() -> Case {
    let write = |control| {
        let mut k = Builder::new("kernel", 32);
        let lane = k.lane();
        let line = line!() + 1;
        k.shuffle(ShuffleMode::Butterfly, lane, 1u32);
        let mut kernel = k.finish();
        edit(&mut kernel, 1, |instruction| {
            if let Op::Shuffle { control: present, .. } = &mut instruction.op {
                *present = control;
            }
        });
        (kernel, line)
    };
    case(write, 0x1f3f, 0x1f1f, |line| {
        let text = "Shuffle mode=Butterfly control=7999 ty=U32 d=%1, index=0x1, a=%0";
        vec![at(line, 1, text, Rule::ShuffleControl { control: 0x1f3f })]
    })
}

fn bit_field((position, length): (u32, u32)) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 32);
    let lane = k.lane();
    let line = line!() + 1;
    k.bit_field_extract(lane, position, length);
    (k.finish(), line)
}

fn bit_field_position() -> Case {
    case(bit_field, (256, 1), (255, 1), |line| {
        let text = "BitFieldExtract d=%1, a=%0, position=0x100, length=0x1";
        vec![at(line, 1, text, Rule::BitField { name: "position", value: 256 })]
    })
}

fn bit_field_length() -> Case {
    case(bit_field, (0, 300), (0, 32), |line| {
        let text = "BitFieldExtract d=%1, a=%0, position=0x0, length=0x12c";
        vec![at(line, 1, text, Rule::BitField { name: "length", value: 300 })]
    })
}

/// A CTA of one warp and a half.
fn barrier((barrier, threads): (u32, u32)) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 48);
    let line = line!() + 1;
    k.barrier_sync(barrier, threads);
    (k.finish(), line)
}

fn barrier_sixteen() -> Case {
    case(barrier, (16, 64), (15, 64), |line| {
        vec![at(line, 0, "BarrierSync barrier=0x10, threads=0x40", Rule::BarrierNumber { barrier: 16 })]
    })
}

fn barrier_of_part_of_a_warp() -> Case {
    case(barrier, (1, 48), (1, 32), |line| {
        vec![at(line, 0, "BarrierSync barrier=0x1, threads=0x30", Rule::BarrierThreads { threads: 48, of: 48 })]
    })
}

fn barrier_of_more_than_the_cta() -> Case {
    case(barrier, (1, 96), (1, 64), |line| {
        vec![at(line, 0, "BarrierSync barrier=0x1, threads=0x60", Rule::BarrierThreads { threads: 96, of: 48 })]
    })
}

fn barrier_of_none() -> Case {
    case(barrier, (0, 0), (0, 32), |line| {
        vec![at(line, 0, "BarrierSync barrier=0x0, threads=0x0", Rule::BarrierThreads { threads: 0, of: 48 })]
    })
}

fn arrival_of_part_of_a_warp() -> Case {
    let write = |(barrier, threads): (u32, u32)| {
        let mut k = Builder::new("kernel", 64);
        let line = line!() + 1;
        k.barrier_arrive(barrier, threads);
        (k.finish(), line)
    };
    case(write, (17, 31), (2, 64), |line| {
        let text = "BarrierArrive barrier=0x11, threads=0x1f";
        vec![
            at(line, 0, text, Rule::BarrierNumber { barrier: 17 }),
            at(line, 0, text, Rule::BarrierThreads { threads: 31, of: 64 }),
        ]
    })
}
