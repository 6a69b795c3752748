//! The combinations of modifiers and constants that single operations have.

use flashcore_ir::builder::{CopyBytes, LoadOptions};
use flashcore_ir::types::{Bf16x2, F16, F16x2, F32, HalfPair, MatrixOperand, Pred, S32, U32, U64};
use flashcore_ir::verify::Rule;
use flashcore_ir::{
    Arch, Builder, Compare, CopyCache, GlobalAddress, L2Prefetch, LoadCache, MmaShape, ReduceOp, Rounding,
    SharedAddress, ShuffleMode, StoreCache, Type, Value,
};

use crate::{Case, cases, changed, mistake, set};

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

fn load_parameter(parameter: u32, rule: Rule) -> Case {
    let write = |k: &mut Builder| {
        k.parameter::<F32>("scale");
        k.parameter::<U32>("rows");
    };
    let text = format!("LoadParam ty=U32 parameter={parameter} d=%1");
    changed(write, set!(LoadParam.parameter), [parameter, 1], (1, &text), [rule])
}

fn parameter_beyond_the_last() -> Case {
    load_parameter(2, Rule::UnknownParameter { parameter: 2, declared: 2 })
}

fn parameter_of_another_type() -> Case {
    let (actual, loaded) = (Type::F32.into(), Type::U32.into());
    load_parameter(0, Rule::ParameterType { name: "scale".to_owned(), actual, loaded })
}

fn reinterpreted_width() -> Case {
    let write = |k: &mut Builder, wide: bool| {
        let lane = k.lane();
        let _ = if wide { k.reinterpret::<U32, U64>(lane).id() } else { k.reinterpret::<U32, F32>(lane).id() };
    };
    let text = "Reinterpret to=U64 from=U32 d=%1, a=%0";
    mistake(write, [true, false], (1, text), [Rule::ReinterpretWidth { to: Type::U64, from: Type::U32 }])
}

fn reinterpreted_predicate() -> Case {
    let write = |k: &mut Builder, reinterpreted: bool| {
        let yes = k.compare(Compare::Eq, 0u32, 0u32);
        let _ = if reinterpreted { k.reinterpret::<Pred, Pred>(yes) } else { k.copy(yes) };
    };
    let text = "Reinterpret to=Pred from=Pred d=%1, a=%0";
    mistake(write, [true, false], (1, text), [Rule::ReinterpretWidth { to: Type::Pred, from: Type::Pred }])
}

fn rounding_of_a_conversion() -> Case {
    let write = |k: &mut Builder, rounding| {
        let value = k.copy(1.5f32);
        k.to_integer::<S32>(value, rounding);
    };
    let text = "Convert to=S32 from=F32 rounding=NearestEven d=%1, a=%0";
    let rule = Rule::NoConversion { to: Type::S32, from: Type::F32, rounding: Rounding::NearestEven };
    mistake(write, [Rounding::NearestEven, Rounding::NearestInteger], (1, text), [rule])
}

fn vector_of_three() -> Case {
    let write = |k: &mut Builder, count| {
        let rows = k.parameter::<U64>("rows");
        k.load::<F16>(rows, count);
    };
    let text = "Load space=Global cache=All prefetch=None ty=F16 count=3 d=%1, d=%2, d=%3, source=[%0]";
    mistake(write, [3, 4], (1, text), [Rule::VectorSize { count: 3, bytes: 2 }])
}

fn vector_of_32_bytes() -> Case {
    let write = |k: &mut Builder, count| {
        let shared = k.shared_base();
        k.load_shared::<U64>(shared, count);
    };
    let text = "Load space=Shared cache=All prefetch=None ty=U64 count=4 d=%1, d=%2, d=%3, d=%4, source=[%0]";
    mistake(write, [4, 2], (1, text), [Rule::VectorSize { count: 4, bytes: 8 }])
}

fn stored_vector_of_three() -> Case {
    let write = |k: &mut Builder, count| {
        let (rows, one) = (k.parameter::<U64>("rows"), k.copy(1u32));
        k.store(rows, &vec![one; count]);
    };
    let text = "Store space=Global cache=WriteBack ty=U32 count=3 a=%1, a=%1, a=%1, target=[%0]";
    mistake(write, [3, 2], (2, text), [Rule::VectorSize { count: 3, bytes: 4 }])
}

fn shared_load(options: LoadOptions, text: &str) -> Case {
    let write = |k: &mut Builder, options| {
        let shared = k.shared_base();
        k.load_with::<U32, SharedAddress>(shared, 1, options);
    };
    mistake(write, [options, LoadOptions::default()], (1, text), [Rule::SharedCacheHint])
}

fn shared_load_hint() -> Case {
    let streaming = LoadOptions { cache: LoadCache::Streaming, ..LoadOptions::default() };
    shared_load(streaming, "Load space=Shared cache=Streaming prefetch=None ty=U32 count=1 d=%1, source=[%0]")
}

fn shared_load_prefetch() -> Case {
    let prefetch = LoadOptions { prefetch: L2Prefetch::Bytes128, ..LoadOptions::default() };
    shared_load(prefetch, "Load space=Shared cache=All prefetch=Bytes128 ty=U32 count=1 d=%1, source=[%0]")
}

fn shared_store_hint() -> Case {
    let write = |k: &mut Builder, cache| {
        let shared = k.shared_base();
        k.store_with::<U32, SharedAddress>(shared, &[shared], cache);
    };
    let text = "Store space=Shared cache=L2 ty=U32 count=1 a=%0, target=[%0]";
    mistake(write, [StoreCache::L2, StoreCache::WriteBack], (1, text), [Rule::SharedCacheHint])
}

fn volatile_prefetch() -> Case {
    let write = |k: &mut Builder, cache| {
        let flags = k.parameter::<U64>("flags");
        let options = LoadOptions { cache, prefetch: L2Prefetch::Bytes64 };
        k.load_with::<U32, GlobalAddress>(flags, 1, options);
    };
    let text = "Load space=Global cache=Volatile prefetch=Bytes64 ty=U32 count=1 d=%1, source=[%0]";
    mistake(write, [LoadCache::Volatile, LoadCache::ReadOnly], (1, text), [Rule::VolatilePrefetch])
}

fn atomic_minimum_of_floats() -> Case {
    let write = |k: &mut Builder, op| {
        let (sums, one) = (k.parameter::<U64>("sums"), k.copy(1.0f32));
        k.atomic::<F32, GlobalAddress>(op, sums, one);
    };
    let text = "Atomic space=Global op=Min ty=F32 d=%2, a=%1, target=[%0]";
    let rule = Rule::NoReduction { op: ReduceOp::Min, ty: Type::F32 };
    mistake(write, [ReduceOp::Min, ReduceOp::Add], (2, text), [rule])
}

fn reduction_that_returns() -> Case {
    let write = |k: &mut Builder, op| {
        let shared = k.shared_base();
        k.reduce::<U32, SharedAddress>(op, shared, shared);
    };
    let text = "Reduce space=Shared op=Exchange ty=U32 a=%0, target=[%0]";
    let rule = Rule::NoReduction { op: ReduceOp::Exchange, ty: Type::U32 };
    mistake(write, [ReduceOp::Exchange, ReduceOp::Xor], (1, text), [rule])
}

fn warp_reduction_of_signed_bits() -> Case {
    let write = |k: &mut Builder, op| {
        let value = k.copy(-1i32);
        k.reduce_warp(op, value);
    };
    let rule = Rule::NoReduction { op: ReduceOp::And, ty: Type::S32 };
    mistake(write, [ReduceOp::And, ReduceOp::Max], (1, "ReduceWarp op=And ty=S32 d=%1, a=%0"), [rule])
}

fn copy_of_twelve_bytes() -> Case {
    let write = |k: &mut Builder, written| {
        let (from, to) = (k.parameter::<U64>("from"), k.shared_base());
        let read = k.copy(4u32);
        k.copy_async(to, from, CopyBytes::ZeroFill { written, read }, L2Prefetch::None);
    };
    let text = "CopyAsync bytes=12 cache=All prefetch=None zero_fill=true source_bytes=%2, target=[%1], source=[%0]";
    mistake(write, [12, 8], (3, text), [Rule::CopySize { bytes: 12, cache: CopyCache::All }])
}

fn copy_of_eight_bytes_through_l2() -> Case {
    let write = |k: &mut Builder| {
        let (from, to) = (k.parameter::<U64>("from"), k.shared_base());
        k.copy_async(to, from, CopyBytes::All(8), L2Prefetch::None);
    };
    let text = "CopyAsync bytes=8 cache=L2 prefetch=None zero_fill=false target=[%1], source=[%0]";
    let rule = Rule::CopySize { bytes: 8, cache: CopyCache::L2 };
    changed(write, set!(CopyAsync.cache), [CopyCache::L2, CopyCache::All], (2, text), [rule])
}

fn bulk(bytes: u32, correction: u32) -> Case {
    let write = |k: &mut Builder, bytes: u32| {
        let (to, from) = (k.parameter::<U64>("to"), k.shared_base());
        k.bulk_store(to, from, bytes);
    };
    let text = format!("BulkStore bytes={bytes:#x}, target=[%0], source=[%1]");
    mistake(write, [bytes, correction], (2, &text), [Rule::BulkSize { bytes: bytes.into() }]).on(Arch::Sm90)
}

fn bulk_of_part_of_a_line() -> Case {
    bulk(24, 32)
}

fn bulk_of_nothing() -> Case {
    bulk(0, 16)
}

fn three_matrices() -> Case {
    let write = |k: &mut Builder, count| {
        let shared = k.shared_base();
        k.load_matrix::<F16x2>(shared, count, true);
    };
    let text = "LoadMatrix count=3 transposed=true ty=F16x2 d=%1, d=%2, d=%3, source=[%0]";
    mistake(write, [3, 2], (1, text), [Rule::MatrixCount { count: 3 }])
}

/// 16-bit fragments have half as many registers as `tf32` ones; with depth 4 they would have one and none.
fn product_of_halves_with_depth_4() -> Case {
    let write = |k: &mut Builder, (shape, a_registers, b_registers)| {
        let zero = k.copy(Value::<F16x2>::from_bits(0));
        let accumulator = [(); 4].map(|()| k.copy(0.0f32));
        k.mma(shape, &accumulator, &vec![zero; a_registers], &vec![zero; b_registers]);
    };
    let text = "Mma shape=M16N8K4 operand=F16x2 accumulate=F32 d=%1, d=%2, d=%3, d=%4, a=%0, c=%1, c=%2, c=%3, c=%4";
    let rule = Rule::NoProduct { shape: MmaShape::M16N8K4, operand: Type::F16x2, accumulate: Type::F32 };
    mistake(write, [(MmaShape::M16N8K4, 1, 0), (MmaShape::M16N8K8, 2, 1)], (5, text), [rule])
}

fn product_accumulated_in_pairs() -> Case {
    fn product<T: HalfPair + MatrixOperand>(k: &mut Builder) {
        let zero = k.copy(Value::<T>::from_bits(0));
        let accumulator = [(); 2].map(|()| k.copy(Value::<F16x2>::from_bits(0)));
        k.mma(MmaShape::M16N8K8, &accumulator, &[zero, zero], &[zero]);
    }
    let write = |k: &mut Builder, product: fn(&mut Builder)| product(k);
    let text = "Mma shape=M16N8K8 operand=Bf16x2 accumulate=F16x2 d=%1, d=%2, a=%0, a=%0, b=%0, c=%1, c=%2";
    let rule = Rule::NoProduct { shape: MmaShape::M16N8K8, operand: Type::Bf16x2, accumulate: Type::F16x2 };
    mistake(write, [product::<Bf16x2>, product::<F16x2>], (3, text), [rule])
}

fn shuffle_control() -> Case {
    let write = |k: &mut Builder| {
        let lane = k.lane();
        k.shuffle(ShuffleMode::Butterfly, lane, 1u32);
    };
    let text = "Shuffle mode=Butterfly control=7999 ty=U32 d=%1, index=0x1, a=%0";
    changed(write, set!(Shuffle.control), [0x1f3f, 0x1f1f], (1, text), [Rule::ShuffleControl { control: 0x1f3f }])
}

fn bit_field(field: [u32; 2], correction: [u32; 2], rule: Rule) -> Case {
    let write = |k: &mut Builder, [position, length]: [u32; 2]| {
        let lane = k.lane();
        k.bit_field_extract(lane, position, length);
    };
    let text = format!("BitFieldExtract d=%1, a=%0, position={:#x}, length={:#x}", field[0], field[1]);
    mistake(write, [field, correction], (1, &text), [rule])
}

fn bit_field_position() -> Case {
    bit_field([256, 1], [255, 1], Rule::BitField { name: "position", value: 256 })
}

fn bit_field_length() -> Case {
    bit_field([0, 300], [0, 32], Rule::BitField { name: "length", value: 300 })
}

/// A CTA of one warp and a half.
fn barrier(wrong: [u32; 2], correction: [u32; 2], rule: Rule) -> Case {
    let write = |k: &mut Builder, [barrier, threads]: [u32; 2]| k.barrier_sync(barrier, threads);
    let text = format!("BarrierSync barrier={:#x}, threads={:#x}", wrong[0], wrong[1]);
    mistake(write, [wrong, correction], (0, &text), [rule]).of_threads(48)
}

fn barrier_sixteen() -> Case {
    barrier([16, 64], [15, 64], Rule::BarrierNumber { barrier: 16 })
}

fn barrier_of_part_of_a_warp() -> Case {
    barrier([1, 48], [1, 32], Rule::BarrierThreads { threads: 48, of: 48 })
}

fn barrier_of_more_than_the_cta() -> Case {
    barrier([1, 96], [1, 64], Rule::BarrierThreads { threads: 96, of: 48 })
}

fn barrier_of_none() -> Case {
    barrier([0, 0], [0, 32], Rule::BarrierThreads { threads: 0, of: 48 })
}

fn arrival_of_part_of_a_warp() -> Case {
    let write = |k: &mut Builder, [barrier, threads]: [u32; 2]| k.barrier_arrive(barrier, threads);
    let rules = [Rule::BarrierNumber { barrier: 17 }, Rule::BarrierThreads { threads: 31, of: 64 }];
    let text = "BarrierArrive barrier=0x11, threads=0x1f";
    mistake(write, [[17, 31], [2, 64]], (0, text), rules).of_threads(64)
}
