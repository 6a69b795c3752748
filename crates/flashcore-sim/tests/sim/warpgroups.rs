//! Products of warpgroups: what goes wrong around them. Their values are compared with those of an H200 by the conformance
//! cases.

use crate::support::{SHARED, at, delay, fault, faulty, is_warp, kernel, missing_wait, run, threads, unfenced, words};
use flashcore_ir::builder::{Adds, LeftMatrix, MatrixLayout, SharedMatrix};
use flashcore_ir::types::{F16x2, F32, U32, U64};
use flashcore_ir::{Compare, Fp8, Major, Op, Reg, RegisterId, Space, SpecialRegister, Swizzle, VerifiedKernel};
use flashcore_sim::{AccessKind, Argument, Fault, FaultKind, GlobalMemory, InFlight, TooEarly, WarpgroupProblem};

/// The ways in which a product goes wrong.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Wrong {
    Nothing,
    WithoutFence,
    FenceBeforeTheWrite,
    ReadBeforeWait,
    ReadUnderPendingWait,
    WriteBeforeWait,
    OperandChanged,
    OperandRead,
    UnfencedOperand,
    OverwrittenOperand,
    WithoutWait,
    OneWarpMore,
    LanesDisagree,
    WarpsDisagree,
    OtherShape,
    SameShape,
    SumsWithoutValues,
}

/// A product of registers and a matrix that the threads write, and another after it.
fn wrong_kernel(threads: u32, how: Wrong) -> VerifiedKernel {
    kernel(threads, |k| {
        let b = k.reserve_shared(64 * 32, 1024);
        let base = k.shared_base();
        let b = k.add(base, b);
        let thread = k.special(SpecialRegister::ThreadX);
        let own = k.mad::<U32>(thread, 16u32, b);
        let zero = k.copy(0u32);
        k.section("fill", |k| k.store_shared(own, &[zero, zero, zero, zero]));
        if how != Wrong::UnfencedOperand {
            k.fence_proxy_async();
        }
        k.cta_sync();
        let fragment: Vec<Reg<F16x2>> = (0..4).map(|_| k.reinterpret::<U32, F16x2>(zero)).collect();
        let sums: Vec<Reg<F32>> = match how {
            Wrong::SumsWithoutValues => k.warpgroup_accumulator(64),
            _ => (0..32).map(|_| k.copy(0.0f32)).collect(),
        };
        let address = match how {
            Wrong::LanesDisagree => {
                let odd = k.and(thread, 1u32);
                k.mad::<U32>(odd, 1024u32, b)
            }
            Wrong::WarpsDisagree => {
                let odd = k.and(thread, 32u32);
                k.mad::<U32>(odd, 32u32, b)
            }
            _ => b,
        };
        let layout = MatrixLayout { swizzle: Swizzle::None, leading_bytes: 128, stride_bytes: 256 };
        let descriptor = k.matrix_descriptor(address, layout);
        let right = SharedMatrix { descriptor, major: Major::Depth };
        if how != Wrong::WithoutFence {
            k.section("fence", |k| k.wgmma_fence());
        }
        if how == Wrong::FenceBeforeTheWrite {
            k.set(sums[3], 1.0f32);
        }
        let adds = if how == Wrong::SumsWithoutValues { Adds::Replace } else { Adds::Add };
        k.section("product", |k| k.wgmma(32, &sums[..16], LeftMatrix::Registers(&fragment), right, adds));
        if how == Wrong::OneWarpMore {
            let last = is_warp(k, 3);
            k.if_uniform(last, |k| {
                delay(k);
                k.section("more", |k| k.wgmma_fence());
            });
        }
        if matches!(how, Wrong::OtherShape | Wrong::SameShape | Wrong::SumsWithoutValues) {
            let columns = if how == Wrong::OtherShape { 8 } else { 32 };
            let count = columns as usize / 2;
            k.section("again", |k| {
                k.wgmma(columns, &sums[..count], LeftMatrix::Registers(&fragment), right, Adds::Add);
            });
        }
        k.section("commit", |k| k.wgmma_commit());
        match how {
            Wrong::ReadBeforeWait => {
                k.section("early", |k| k.add(sums[5], 1.0f32));
            }
            Wrong::WriteBeforeWait => k.section("early", |k| k.set(sums[5], 1.0f32)),
            Wrong::OperandChanged => {
                let pair = k.reinterpret::<U32, F16x2>(zero);
                k.section("early", |k| k.set(fragment[2], pair));
            }
            Wrong::OperandRead => {
                k.copy(fragment[2]);
            }
            Wrong::OverwrittenOperand => k.section("early", |k| k.store_shared(own, &[zero])),
            _ => {}
        }
        if how == Wrong::ReadUnderPendingWait {
            k.wgmma_wait(1);
            k.section("early", |k| k.add(sums[5], 1.0f32));
        }
        if how != Wrong::WithoutWait {
            k.section("wait", |k| k.wgmma_wait(0));
        }
        if how == Wrong::Nothing {
            k.add(sums[5], 1.0f32);
            k.set(fragment[2], fragment[1]);
            k.cta_sync();
            k.store_shared(own, &[zero]);
        }
    })
}

/// The fault of a warpgroup with its kernel.
#[track_caller]
fn found(how: Wrong) -> (VerifiedKernel, Fault) {
    let kernel = wrong_kernel(128, how);
    let found = fault(run(&kernel, &[], &GlobalMemory::new()));
    (kernel, found)
}

#[test]
fn right_kernels_pass() {
    for how in [Wrong::Nothing, Wrong::OperandRead, Wrong::SameShape, Wrong::SumsWithoutValues] {
        let counters = threads(128).seeds(0..8).passes(&wrong_kernel(128, how)).counters;
        let products = if how == Wrong::Nothing || how == Wrong::OperandRead { 1 } else { 2 };
        assert_eq!((counters.wgmma, counters.tensor_flops), (4 * products, 2 * 64 * 16 * 32 * products));
    }
}

/// Register `index` of the accumulator, or of A.
fn register(kernel: &VerifiedKernel, index: usize, of_a: bool) -> RegisterId {
    let mut found = None;
    kernel.instructions(&mut |instruction| {
        if let Op::Wgmma { d, a, .. } = &instruction.op {
            found.get_or_insert(if of_a { a[index] } else { d[index] });
        }
    });
    found.expect("the kernel has a product")
}

#[test]
fn missing_fences_of_registers() {
    for (how, index) in [(Wrong::WithoutFence, 0), (Wrong::FenceBeforeTheWrite, 3)] {
        let (kernel, found) = found(how);
        let kind = FaultKind::MissingWgmmaFence { register: register(&kernel, index, false) };
        assert_eq!(found, faulty(kind, at("product", "Wgmma", found.location.warp))(&kernel));
    }
}

#[test]
fn registers_in_use() {
    for (how, section, name, access, (index, of_a)) in [
        (Wrong::ReadBeforeWait, "early", "Add", AccessKind::Read, (5, false)),
        (Wrong::ReadUnderPendingWait, "early", "Add", AccessKind::Read, (5, false)),
        (Wrong::WriteBeforeWait, "early", "Mov", AccessKind::Write, (5, false)),
        (Wrong::OperandChanged, "early", "Mov", AccessKind::Write, (2, true)),
        (Wrong::OtherShape, "again", "Wgmma", AccessKind::Write, (0, false)),
    ] {
        let (kernel, found) = found(how);
        let warp = found.location.warp;
        let (register, started) = (register(&kernel, index, of_a), at("product", "Wgmma", warp).of(&kernel));
        let kind = FaultKind::RegisterInFlight { register, access, started: Box::new(started) };
        assert_eq!(found, faulty(kind, at(section, name, warp))(&kernel), "{how:?}");
    }
}

#[test]
fn operand_without_a_proxy_fence() {
    let (kernel, found) = found(Wrong::UnfencedOperand);
    let product = at("product", "Wgmma", found.location.warp);
    assert_eq!(found, unfenced(SHARED, at("fill", "Store", 0).lane(0), product)(&kernel));
}

#[test]
fn operand_overwritten_before_the_wait() {
    let (kernel, found) = found(Wrong::OverwrittenOperand);
    let FaultKind::MissingWait { started, .. } = &found.kind else { panic!("{found}") };
    let Fault { location, .. } = &found;
    let address = location.address.unwrap_or(0);
    let product = at("product", "Wgmma", started.warp).address(address);
    let store = at("early", "Store", location.warp).lane(location.lane.unwrap_or(0)).address(address);
    assert_eq!(found, missing_wait(TooEarly::Write, InFlight::WgmmaOperand, product, store)(&kernel));
}

#[test]
fn an_end_without_a_wait() {
    let (kernel, Fault { kind, location }) = found(Wrong::WithoutWait);
    let started = Box::new(at("product", "Wgmma", location.warp).of(&kernel));
    assert_eq!(kind, FaultKind::UnfinishedWgmma { started });
}

/// Three warps commit where the fourth fences.
#[test]
fn warps_that_do_not_agree() {
    let (kernel, Fault { kind, location }) = found(Wrong::OneWarpMore);
    let FaultKind::Warpgroup { problem: WarpgroupProblem::Disagrees { other } } = kind else { panic!("{kind}") };
    assert_eq!(*other, at("commit", "WgmmaCommit", other.warp).of(&kernel));
    assert_eq!(location, at("more", "WgmmaFence", 3).of(&kernel));
}

#[test]
fn operands_that_do_not_agree() {
    let (kernel, found_in_lanes) = found(Wrong::LanesDisagree);
    let kind = FaultKind::Warpgroup { problem: WarpgroupProblem::LanesDisagree };
    let product = at("product", "Wgmma", found_in_lanes.location.warp);
    assert_eq!(found_in_lanes, faulty(kind, product)(&kernel));
    let (kernel, Fault { kind, location }) = found(Wrong::WarpsDisagree);
    let FaultKind::Warpgroup { problem: WarpgroupProblem::OperandsDiffer { other } } = kind else { panic!("{kind}") };
    assert_eq!(*other, at("product", "Wgmma", other.warp).of(&kernel));
    assert_ne!(location.warp % 2, other.warp % 2);
}

/// A CTA of three warps has no warpgroup.
#[test]
fn part_of_a_warpgroup() {
    let kernel = wrong_kernel(96, Wrong::Nothing);
    let found = fault(run(&kernel, &[], &GlobalMemory::new()));
    let kind = FaultKind::Warpgroup { problem: WarpgroupProblem::NotWhole { warps: 3 } };
    assert_eq!(found, faulty(kind, at("fence", "WgmmaFence", found.location.warp))(&kernel));
}

/// A matrix that begins in the middle of its swizzle.
#[test]
fn a_descriptor_that_is_not_aligned() {
    let kernel = kernel(128, |k| {
        k.reserve_shared(8192, 1024);
        let base = k.shared_base();
        let inside = k.add(base, 128u32);
        let layout = MatrixLayout { swizzle: Swizzle::Bytes128, leading_bytes: 0, stride_bytes: 1024 };
        let descriptor = k.matrix_descriptor(inside, layout);
        let matrix = SharedMatrix { descriptor, major: Major::Depth };
        let sums = k.warpgroup_accumulator::<F32>(8);
        k.wgmma_fence();
        k.wgmma::<F16x2, F32>(8, &sums, LeftMatrix::Shared(matrix), matrix, Adds::Replace);
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
    let Fault { kind, location } = fault(run(&kernel, &[], &GlobalMemory::new()));
    assert_eq!(kind, FaultKind::Misaligned { space: Space::Shared, alignment: 1024 });
    assert_eq!(location.address, Some(SHARED + 128));
}

/// Of factors that are zero, what is left is the accumulator, if it is added to.
#[test]
fn a_predicate_decides_if_a_product_adds() {
    for (scale, expected) in [(0, 0.0f32), (1, 1.0)] {
        for fp8 in [false, true] {
            let kernel = kernel(128, |k| {
                let (y, scale) = (k.parameter::<U64>("y"), k.parameter::<U32>("scale"));
                k.reserve_shared(256, 1024);
                let (base, thread) = (k.shared_base(), k.special(SpecialRegister::ThreadX));
                let zero = k.copy(0u32);
                let own = k.mad::<U32>(thread, 4u32, base);
                let first = k.compare::<U32>(Compare::Lt, thread, 64u32);
                k.when(first, |k| k.store_shared(own, &[zero]));
                k.fence_proxy_async();
                k.cta_sync();
                let layout = MatrixLayout { swizzle: Swizzle::None, leading_bytes: 128, stride_bytes: 256 };
                let right = SharedMatrix { descriptor: k.matrix_descriptor(base, layout), major: Major::Depth };
                let adds = Adds::Where(k.compare::<U32>(Compare::Ne, scale, 0u32));
                let sums: Vec<Reg<F32>> = (0..4).map(|_| k.copy(1.0f32)).collect();
                let pair = k.reinterpret::<U32, F16x2>(zero);
                k.wgmma_fence();
                if fp8 {
                    k.wgmma_fp8([Fp8::E4m3; 2], 8, &sums, LeftMatrix::Registers(&[zero; 4]), right, adds);
                } else {
                    k.wgmma(8, &sums, LeftMatrix::Registers(&[pair; 4]), right, adds);
                }
                k.wgmma_commit();
                k.wgmma_wait(0);
                let own = k.mad_wide(thread, 16u32, y);
                k.store(own, &sums);
            });
            let mut memory = GlobalMemory::new();
            let y = memory.allocate_uninitialised("y", 128 * 16);
            let counters = threads(128).on(&memory, [y]).with(&[Argument::U32(scale)]).passes(&kernel).counters;
            let depth = if fp8 { 32 } else { 16 };
            assert_eq!((counters.wgmma, counters.tensor_flops), (4, 2 * 64 * 8 * depth));
            assert_eq!(words(&memory.read(y)), [expected.to_bits(); 512], "scale {scale}");
        }
    }
}
