//! Products of warpgroups: values in every layout, and what goes wrong around them.

use crate::support::{At, SHARED, fault, kernel, location, missing_wait, run, run_seeded, words};
use flashcore_ir::builder::{Adds, LeftMatrix, MatrixLayout, SharedMatrix};
use flashcore_ir::types::{Accumulator, Bf16x2, F16x2, F32, HalfPair, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Major, Reg, Space, SpecialRegister, Swizzle, VerifiedKernel};
use flashcore_sim::{
    AccessKind, Argument, Fault, FaultKind, GlobalMemory, InFlight, SimError, TooEarly, WarpgroupProblem,
};
use half::{bf16, f16};

/// Small numbers, of which sums of products are exact in every format.
fn number(index: usize) -> f32 {
    ((index * 7 + index / 5) % 13) as f32 - 6.0
}

/// Where element (`outer`, `depth`) of a matrix lies, written down a second time: as rows of the swizzle's width whose
/// pieces of 16 bytes move with the number of the 128-byte line, or as core matrices one after the other.
fn offset(major: Major, swizzle: Swizzle, outer: usize, depth: usize, outers: usize) -> usize {
    let swizzled = |width: usize, row: usize, column: usize| {
        let line = row * width / 128 % (width / 16);
        row * width + ((column / 8) ^ line) * 16 + column % 8 * 2
    };
    match (major, swizzle.bytes().map(|bytes| bytes as usize)) {
        (Major::Depth, None) => outer / 8 * 256 + depth / 8 * 128 + outer % 8 * 16 + depth % 8 * 2,
        (Major::Outer, None) => outer / 8 * 128 + depth / 8 * 16 * outers + depth % 8 * 16 + outer % 8 * 2,
        (Major::Depth, Some(width)) => swizzled(width, outer, depth),
        (Major::Outer, Some(width)) => {
            let atom = outer / (width / 2);
            atom * 16 * width + swizzled(width, depth, outer % (width / 2))
        }
    }
}

fn layout(major: Major, swizzle: Swizzle, outers: u32) -> MatrixLayout {
    let (leading_bytes, stride_bytes) = match (major, swizzle.bytes()) {
        (Major::Depth, None) => (128, 256),
        (Major::Outer, None) => (16 * outers, 128),
        (Major::Depth, Some(width)) => (0, 8 * width),
        (Major::Outer, Some(width)) => (16 * width, 8 * width),
    };
    MatrixLayout { swizzle, leading_bytes, stride_bytes }
}

/// A matrix as it lies in shared memory.
fn image(major: Major, swizzle: Swizzle, outers: usize, element: impl Fn(usize, usize) -> u16) -> Vec<u8> {
    let width = swizzle.bytes().map_or(32, |bytes| bytes as usize);
    let mut bytes =
        vec![0u8; (outers * width.max(32)).max(16 * width * outers.div_ceil(width / 2)).next_multiple_of(16)];
    for outer in 0..outers {
        for depth in 0..16 {
            let at = offset(major, swizzle, outer, depth, outers);
            bytes[at..at + 2].copy_from_slice(&element(outer, depth).to_le_bytes());
        }
    }
    bytes
}

#[derive(Clone, Copy, Debug)]
struct Form {
    columns: u32,
    /// Where A is; none for registers.
    a: Option<(Major, Swizzle)>,
    b: (Major, Swizzle),
    adds: Option<bool>,
    is_bf16: bool,
    in_pairs: bool,
}

fn first_thread(k: &mut Builder) -> Reg<flashcore_ir::types::Pred> {
    let thread = k.special(SpecialRegister::ThreadX);
    k.compare::<U32>(Compare::Eq, thread, 0u32)
}

/// Loads both operands by bulk loads, multiplies, and writes the accumulator out register by register.
fn product_kernel<T: HalfPair, A: Accumulator + flashcore_ir::types::Storable>(
    form: Form,
    [a_bytes, b_bytes]: [u32; 2],
) -> VerifiedKernel {
    let initial = |k: &mut Builder| {
        k.copy::<A>(flashcore_ir::Value::from_bits(if form.in_pairs { 0x4000_3c00 } else { 0x3f80_0000 }))
    };
    kernel(128, |k| {
        let [x, y, z] = ["x", "y", "z"].map(|name| k.parameter::<U64>(name));
        let scale = k.parameter::<U32>("scale");
        let barrier = k.reserve_mbarrier();
        let [a, b] = [a_bytes, b_bytes].map(|bytes| k.reserve_shared(bytes, 1024));
        let base = k.shared_base();
        let [barrier, a, b] = [barrier, a, b].map(|offset| k.add(base, offset));
        let first = first_thread(k);
        k.when(first, |k| {
            k.mbarrier_init(barrier, 1u32);
            k.fence_mbarrier_init();
        });
        k.cta_sync();
        k.if_then(first, |k| {
            k.mbarrier_arrive_expect(barrier, a_bytes + b_bytes);
            k.bulk_load(a, x, a_bytes, barrier);
            k.bulk_load(b, y, b_bytes, barrier);
        });
        k.mbarrier_wait(barrier, 0u32);
        let thread = k.special(SpecialRegister::ThreadX);
        let count = form.columns / if form.in_pairs { 4 } else { 2 };
        let sums: Vec<Reg<A>> = (0..count).map(|_| initial(k)).collect();
        let (b_major, b_swizzle) = form.b;
        let descriptor = k.matrix_descriptor(b, layout(b_major, b_swizzle, form.columns));
        let right = SharedMatrix { descriptor, major: b_major };
        let adds = match form.adds {
            Some(true) => Adds::Add,
            Some(false) => Adds::Replace,
            None => Adds::Where(k.compare::<U32>(Compare::Ne, scale, 0u32)),
        };
        let fragment: Vec<Reg<T>> = match form.a {
            // Rows of A are 32 bytes, by rows: the fragment of `mma` at row and pair of columns.
            None => (0..4u32)
                .map(|register| {
                    let (warp, lane) = (k.warp(), k.lane());
                    let (group, pair) = (k.shr(lane, 2u32), k.and(lane, 3u32));
                    let row = k.mad::<U32>(warp, 16u32, group);
                    let row = k.add(row, 8 * (register % 2));
                    let at = k.mad::<U32>(row, 32u32, a);
                    let at = k.mad::<U32>(pair, 4u32, at);
                    let at = k.add(at, 16 * (register / 2));
                    k.load_shared::<T>(at, 1)[0]
                })
                .collect(),
            Some(_) => Vec::new(),
        };
        let left = match form.a {
            None => LeftMatrix::Registers(&fragment),
            Some((major, swizzle)) => {
                let descriptor = k.matrix_descriptor(a, layout(major, swizzle, 64));
                LeftMatrix::Shared(SharedMatrix { descriptor, major })
            }
        };
        k.wgmma_fence();
        k.wgmma::<T, A>(form.columns, &sums, left, right, adds);
        k.wgmma_commit();
        k.wgmma_wait(0);
        let target = k.mul_wide(thread, 4 * count);
        let target = k.add(target, z);
        for (index, sum) in sums.iter().enumerate() {
            k.store_one(GlobalAddress::from(target).plus(4 * index as i32), *sum);
        }
    })
}

fn check(form: Form) {
    let encode =
        |value: f32| if form.is_bf16 { bf16::from_f32(value).to_bits() } else { f16::from_f32(value).to_bits() };
    let (a, b) = (|m: usize, k: usize| number(m * 16 + k), |k: usize, n: usize| number(1000 + n * 16 + k));
    let a_image = match form.a {
        Some((major, swizzle)) => image(major, swizzle, 64, |m, k| encode(a(m, k))),
        None => (0..64 * 16).flat_map(|index| encode(a(index / 16, index % 16)).to_le_bytes()).collect(),
    };
    let columns = form.columns as usize;
    let b_image = image(form.b.0, form.b.1, columns, |n, k| encode(b(k, n)));
    let sizes = [a_image.len() as u32, b_image.len() as u32];
    let kernel = match (form.is_bf16, form.in_pairs) {
        (false, false) => product_kernel::<F16x2, F32>(form, sizes),
        (false, true) => product_kernel::<F16x2, F16x2>(form, sizes),
        (true, _) => product_kernel::<Bf16x2, F32>(form, sizes),
    };
    for (seed, scale) in [(0, 0u32), (1, 1)] {
        let mut memory = GlobalMemory::new();
        let (x, y) = (memory.allocate("x", &a_image), memory.allocate("y", &b_image));
        let count = columns / if form.in_pairs { 4 } else { 2 };
        let z = memory.allocate_uninitialised("z", 128 * count * 4);
        let arguments = [Argument::U64(x), Argument::U64(y), Argument::U64(z), Argument::U32(scale)];
        let report = run_seeded(&kernel, &arguments, &memory, seed).unwrap_or_else(|error| panic!("{form:?}: {error}"));
        assert_eq!((report.counters.wgmma, report.counters.tensor_flops), (4, 2 * 64 * 16 * u64::from(form.columns)));
        let adds = form.adds.unwrap_or(scale != 0);
        let sum = |m: usize, n: usize| (0..16).map(|k| a(m, k) * b(k, n)).sum::<f32>();
        for (thread, registers) in words(&memory.read(z)).chunks(count).enumerate() {
            let (warp, lane) = (thread / 32, thread % 32);
            for (register, &bits) in registers.iter().enumerate() {
                let column = 2 * (lane % 4);
                let (expected, actual) = if form.in_pairs {
                    let (row, column) = (16 * warp + lane / 4 + 8 * (register % 2), 8 * (register / 2) + column);
                    let start = if adds { [1.0, 2.0] } else { [0.0; 2] };
                    let pair = [0, 1].map(|half| f16::from_f32(start[half] + sum(row, column + half)).to_f32());
                    (pair, [bits as u16, (bits >> 16) as u16].map(|bits| f16::from_bits(bits).to_f32()))
                } else {
                    let row = 16 * warp + lane / 4 + 8 * (register / 2 % 2);
                    let column = 8 * (register / 4) + column + register % 2;
                    let start = if adds { 1.0 } else { 0.0 };
                    ([start + sum(row, column), 0.0], [f32::from_bits(bits), 0.0])
                };
                assert_eq!(actual, expected, "{form:?} thread {thread}, register {register}");
            }
        }
    }
}

const PLAIN: Form = Form {
    columns: 64,
    a: Some((Major::Depth, Swizzle::Bytes128)),
    b: (Major::Depth, Swizzle::Bytes128),
    adds: Some(false),
    is_bf16: true,
    in_pairs: false,
};

#[test]
fn layouts() {
    for swizzle in Swizzle::ALL {
        for major in Major::ALL {
            check(Form { a: Some((*major, *swizzle)), ..PLAIN });
            check(Form { b: (*major, *swizzle), ..PLAIN });
            check(Form { columns: 128, b: (*major, *swizzle), adds: Some(true), is_bf16: false, ..PLAIN });
        }
    }
}

#[test]
fn shapes_and_types() {
    for columns in [8, 16, 24, 96, 176, 256] {
        check(Form { columns, ..PLAIN });
        check(Form { columns, a: None, is_bf16: false, in_pairs: true, adds: Some(true), ..PLAIN });
    }
    for adds in [None, Some(true), Some(false)] {
        check(Form { a: None, adds, ..PLAIN });
        check(Form { adds, is_bf16: false, in_pairs: true, ..PLAIN });
    }
}

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
            let warp = k.warp();
            let last = k.compare::<U32>(Compare::Eq, warp, 3u32);
            k.if_uniform(last, |k| {
                crate::support::delay(k);
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

fn found(how: Wrong) -> (VerifiedKernel, Result<(), SimError>) {
    let kernel = wrong_kernel(128, how);
    let result = run(&kernel, &[], &GlobalMemory::new()).map(|_| ());
    (kernel, result)
}

#[test]
fn right_kernels_pass() {
    for how in [Wrong::Nothing, Wrong::OperandRead, Wrong::SameShape, Wrong::SumsWithoutValues] {
        for seed in 0..8 {
            let result = run_seeded(&wrong_kernel(128, how), &[], &GlobalMemory::new(), seed);
            assert!(result.is_ok(), "{how:?}: {result:?}");
        }
    }
}

/// The accumulator registers are those of the first 16 `copy`s; which they are the kernel knows.
fn sum_register(kernel: &VerifiedKernel, index: usize) -> flashcore_ir::RegisterId {
    let mut found = None;
    kernel.instructions(&mut |instruction| {
        if let flashcore_ir::Op::Wgmma { d, .. } = &instruction.op {
            found.get_or_insert(d[index]);
        }
    });
    found.unwrap_or_else(|| panic!("the kernel has a product"))
}

fn operand_register(kernel: &VerifiedKernel, index: usize) -> flashcore_ir::RegisterId {
    let mut found = None;
    kernel.instructions(&mut |instruction| {
        if let flashcore_ir::Op::Wgmma { a, .. } = &instruction.op {
            found.get_or_insert(a[index]);
        }
    });
    found.unwrap_or_else(|| panic!("the kernel has a product"))
}

#[test]
fn missing_fences_of_registers() {
    for (how, index) in [(Wrong::WithoutFence, 0), (Wrong::FenceBeforeTheWrite, 3)] {
        let (kernel, result) = found(how);
        let Fault { kind, location: at } = fault(result);
        assert_eq!(kind, FaultKind::MissingWgmmaFence { register: sum_register(&kernel, index) });
        assert_eq!(at, location(&kernel, "product", "Wgmma", at.warp));
    }
}

#[test]
fn registers_in_use() {
    for (how, name, access, is_operand) in [
        (Wrong::ReadBeforeWait, "Add", AccessKind::Read, false),
        (Wrong::ReadUnderPendingWait, "Add", AccessKind::Read, false),
        (Wrong::WriteBeforeWait, "Mov", AccessKind::Write, false),
        (Wrong::OperandChanged, "Mov", AccessKind::Write, true),
    ] {
        let (kernel, result) = found(how);
        let register = if is_operand { operand_register(&kernel, 2) } else { sum_register(&kernel, 5) };
        let Fault { kind, location: at } = fault(result);
        let started = Box::new(location(&kernel, "product", "Wgmma", at.warp));
        assert_eq!(kind, FaultKind::RegisterInFlight { register, access, started }, "{how:?}");
        assert_eq!(at, location(&kernel, "early", name, at.warp));
    }
}

#[test]
fn another_shape_on_the_same_accumulator() {
    let (kernel, result) = found(Wrong::OtherShape);
    let Fault { kind, location: at } = fault(result);
    let started = Box::new(location(&kernel, "product", "Wgmma", at.warp));
    let register = sum_register(&kernel, 0);
    assert_eq!(kind, FaultKind::RegisterInFlight { register, access: AccessKind::Write, started });
    assert_eq!(at, location(&kernel, "again", "Wgmma", at.warp));
}

#[test]
fn operand_without_a_proxy_fence() {
    let (kernel, result) = found(Wrong::UnfencedOperand);
    let Fault { kind, location: at } = fault(result);
    let written = Box::new(location(&kernel, "fill", "Store", 0).lane(0).address(SHARED));
    assert_eq!(kind, FaultKind::MissingProxyFence { written });
    assert_eq!(at, location(&kernel, "product", "Wgmma", at.warp).address(SHARED));
}

#[test]
fn operand_overwritten_before_the_wait() {
    let (kernel, result) = found(Wrong::OverwrittenOperand);
    let found = fault(result);
    let FaultKind::MissingWait { started, .. } = &found.kind else { panic!("{found}") };
    let (warp, address, lane) =
        (found.location.warp, found.location.address.unwrap_or(0), found.location.lane.unwrap_or(0));
    let product = location(&kernel, "product", "Wgmma", started.warp).address(address);
    let at = location(&kernel, "early", "Store", warp).lane(lane).address(address);
    assert_eq!(found, missing_wait(TooEarly::Write, InFlight::WgmmaOperand, product, at));
}

#[test]
fn an_end_without_a_wait() {
    let (kernel, result) = found(Wrong::WithoutWait);
    let Fault { kind, location: at } = fault(result);
    let started = Box::new(location(&kernel, "product", "Wgmma", at.warp));
    assert_eq!(kind, FaultKind::UnfinishedWgmma { started });
}

/// Three warps commit where the fourth fences.
#[test]
fn warps_that_do_not_agree() {
    let (kernel, result) = found(Wrong::OneWarpMore);
    let Fault { kind, location: at } = fault(result);
    let FaultKind::Warpgroup { problem: WarpgroupProblem::Disagrees { other } } = kind else { panic!("{kind}") };
    assert_eq!(*other, location(&kernel, "commit", "WgmmaCommit", other.warp));
    assert_eq!(at, location(&kernel, "more", "WgmmaFence", 3));
}

#[test]
fn operands_that_do_not_agree() {
    let (kernel, result) = found(Wrong::LanesDisagree);
    let Fault { kind, location: at } = fault(result);
    assert_eq!(kind, FaultKind::Warpgroup { problem: WarpgroupProblem::LanesDisagree });
    assert_eq!(at, location(&kernel, "product", "Wgmma", at.warp));
    let (kernel, result) = found(Wrong::WarpsDisagree);
    let Fault { kind, location: at } = fault(result);
    let FaultKind::Warpgroup { problem: WarpgroupProblem::OperandsDiffer { other } } = kind else { panic!("{kind}") };
    assert_eq!(*other, location(&kernel, "product", "Wgmma", other.warp));
    assert_ne!(at.warp % 2, other.warp % 2);
}

/// A CTA of three warps has no warpgroup.
#[test]
fn part_of_a_warpgroup() {
    let kernel = wrong_kernel(96, Wrong::Nothing);
    let Fault { kind, location: at } = fault(run(&kernel, &[], &GlobalMemory::new()));
    assert_eq!(kind, FaultKind::Warpgroup { problem: WarpgroupProblem::NotWhole { warps: 3 } });
    assert_eq!(at, location(&kernel, "fence", "WgmmaFence", at.warp));
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
        k.section("product", |k| {
            k.wgmma::<F16x2, F32>(8, &sums, LeftMatrix::Shared(matrix), matrix, Adds::Replace);
        });
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
    let Fault { kind, location: at } = fault(run(&kernel, &[], &GlobalMemory::new()));
    assert_eq!(kind, FaultKind::Misaligned { space: Space::Shared, alignment: 1024 });
    assert_eq!(at.address, Some(SHARED + 128));
}
