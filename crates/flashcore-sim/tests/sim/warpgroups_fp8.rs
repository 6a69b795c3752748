//! Products of warpgroups of 8-bit floats: values in every layout, and the bits that an H200 is modelled to keep.

use crate::support::{kernel, run_with, words};
use flashcore_ir::builder::{Adds, LeftMatrix, MatrixLayout, SharedMatrix};
use flashcore_ir::types::{F32, U32, U64};
use flashcore_ir::{Compare, Fp8, GlobalAddress, Major, Reg, SpecialRegister, Swizzle, VerifiedKernel};
use flashcore_sim::{Argument, GlobalMemory, Options, TensorSum};

const ROWS: usize = 64;
const DEPTH: usize = 32;

/// The codes of 0, 1, 2, 3 and 4, and their signs: integers whose sums of products are exact.
fn code(ty: Fp8, integer: i32) -> u8 {
    let magnitudes = match ty {
        Fp8::E4m3 => [0, 0x38, 0x40, 0x44, 0x48],
        Fp8::E5m2 => [0, 0x3c, 0x40, 0x42, 0x44],
    };
    let sign = if integer < 0 { 0x80 } else { 0 };
    sign | magnitudes[integer.unsigned_abs() as usize]
}

fn number(index: usize) -> i32 {
    ((index * 7 + index / 5) % 9) as i32 - 4
}

/// Where byte (`outer`, `depth`) of a K-major matrix lies, written down a second time.
fn offset(swizzle: Swizzle, outer: usize, depth: usize) -> usize {
    match swizzle.bytes().map(|bytes| bytes as usize) {
        None => outer / 8 * 256 + depth / 16 * 128 + outer % 8 * 16 + depth % 16,
        Some(width) => {
            let line = outer * width / 128 % (width / 16);
            outer * width + ((depth / 16) ^ line) * 16 + depth % 16
        }
    }
}

fn layout(swizzle: Swizzle) -> MatrixLayout {
    let (leading_bytes, stride_bytes) = swizzle.bytes().map_or((128, 256), |width| (0, 8 * width));
    MatrixLayout { swizzle, leading_bytes, stride_bytes }
}

fn image(swizzle: Swizzle, outers: usize, element: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    let width = swizzle.bytes().map_or(32, |bytes| bytes as usize);
    let mut bytes = vec![0u8; outers * width];
    for (outer, depth) in (0..outers).flat_map(|outer| (0..DEPTH).map(move |depth| (outer, depth))) {
        bytes[offset(swizzle, outer, depth)] = element(outer, depth);
    }
    bytes
}

#[derive(Clone, Copy, Debug)]
struct Form {
    columns: u32,
    types: [Fp8; 2],
    /// The swizzle of A in shared memory; none for registers.
    a: Option<Swizzle>,
    b: Swizzle,
    adds: Option<bool>,
}

/// Loads both operands by bulk loads, multiplies, and writes the accumulator out register by register.
fn product_kernel(form: Form, [a_bytes, b_bytes]: [u32; 2], start: f32) -> VerifiedKernel {
    kernel(128, |k| {
        let [x, y, z] = ["x", "y", "z"].map(|name| k.parameter::<U64>(name));
        let scale = k.parameter::<U32>("scale");
        let barrier = k.reserve_mbarrier();
        let [a, b] = [a_bytes, b_bytes].map(|bytes| k.reserve_shared(bytes, 1024));
        let base = k.shared_base();
        let [barrier, a, b] = [barrier, a, b].map(|offset| k.add(base, offset));
        let thread = k.special(SpecialRegister::ThreadX);
        let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
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
        let sums: Vec<Reg<F32>> = (0..form.columns / 2).map(|_| k.copy(start)).collect();
        let descriptor = k.matrix_descriptor(b, layout(form.b));
        let right = SharedMatrix { descriptor, major: Major::Depth };
        let adds = match form.adds {
            Some(true) => Adds::Add,
            Some(false) => Adds::Replace,
            None => Adds::Where(k.compare::<U32>(Compare::Ne, scale, 0u32)),
        };
        // Rows of A are 32 bytes, by rows: register `r` of a lane has four bytes of row `lane / 4 + 8 (r % 2)`.
        let fragment: Vec<Reg<U32>> = (0..4u32)
            .map(|register| {
                let (warp, lane) = (k.warp(), k.lane());
                let (group, member) = (k.shr(lane, 2u32), k.and(lane, 3u32));
                let row = k.mad::<U32>(warp, 16u32, group);
                let row = k.add(row, 8 * (register % 2));
                let at = k.mad::<U32>(row, 32u32, a);
                let at = k.mad::<U32>(member, 4u32, at);
                let at = k.add(at, 16 * (register / 2));
                k.load_shared::<U32>(at, 1)[0]
            })
            .collect();
        let left = match form.a {
            None => LeftMatrix::Registers(&fragment),
            Some(swizzle) => {
                let descriptor = k.matrix_descriptor(a, layout(swizzle));
                LeftMatrix::Shared(SharedMatrix { descriptor, major: Major::Depth })
            }
        };
        k.wgmma_fence();
        k.wgmma_fp8(form.types, form.columns, &sums, left, right, adds);
        k.wgmma_commit();
        k.wgmma_wait(0);
        let target = k.mul_wide(thread, 2 * form.columns);
        let target = k.add(target, z);
        for (index, sum) in sums.iter().enumerate() {
            k.store_one(GlobalAddress::from(target).plus(4 * index as i32), *sum);
        }
    })
}

/// The accumulator of a product by row and column, from `start` on.
fn product(
    form: Form,
    start: f32,
    options: Options,
    scale: u32,
    [a, b]: [&dyn Fn(usize, usize) -> u8; 2],
) -> Vec<Vec<f32>> {
    let columns = form.columns as usize;
    // Without a swizzle of its own A lies by rows, of which lanes read their fragments.
    let a_image = match form.a {
        Some(swizzle) => image(swizzle, ROWS, a),
        None => (0..ROWS * DEPTH).map(|index| a(index / DEPTH, index % DEPTH)).collect(),
    };
    let b_image = image(form.b, columns, b);
    let kernel = product_kernel(form, [a_image.len() as u32, b_image.len() as u32], start);
    let mut memory = GlobalMemory::new();
    let (x, y) = (memory.allocate("x", &a_image), memory.allocate("y", &b_image));
    let z = memory.allocate_uninitialised("z", 128 * columns * 2);
    let arguments = [Argument::U64(x), Argument::U64(y), Argument::U64(z), Argument::U32(scale)];
    let report = run_with(&kernel, &arguments, &memory, options).unwrap_or_else(|error| panic!("{form:?}: {error}"));
    assert_eq!((report.counters.wgmma, report.counters.tensor_flops), (4, 2 * 64 * 32 * u64::from(form.columns)));
    let mut sums = vec![vec![f32::NAN; columns]; ROWS];
    for (thread, registers) in words(&memory.read(z)).chunks(columns / 2).enumerate() {
        let (warp, lane) = (thread / 32, thread % 32);
        for (register, &bits) in registers.iter().enumerate() {
            let row = 16 * warp + lane / 4 + 8 * (register / 2 % 2);
            sums[row][8 * (register / 4) + 2 * (lane % 4) + register % 2] = f32::from_bits(bits);
        }
    }
    sums
}

fn check(form: Form) {
    let [left, right] = form.types;
    let (a, b) = (|m: usize, k: usize| number(m * DEPTH + k), |n: usize, k: usize| number(1000 + n * DEPTH + k));
    for (seed, scale) in [(0, 0), (1, 1)] {
        // Integers are kept whole by any model of the sum.
        let options = Options { seed, tensor_sum: TensorSum::H200, ..Options::default() };
        let sums = product(form, 1.0, options, scale, [&|m, k| code(left, a(m, k)), &|n, k| code(right, b(n, k))]);
        let start = i32::from(form.adds.unwrap_or(scale != 0));
        for (m, row) in sums.iter().enumerate() {
            for (n, sum) in row.iter().enumerate() {
                let expected: i32 = (0..DEPTH).map(|k| a(m, k) * b(n, k)).sum();
                assert_eq!(*sum, (start + expected) as f32, "{form:?} row {m}, column {n}");
            }
        }
    }
}

const PLAIN: Form =
    Form { columns: 64, types: [Fp8::E4m3; 2], a: Some(Swizzle::Bytes128), b: Swizzle::Bytes128, adds: Some(false) };

#[test]
fn layouts() {
    for swizzle in Swizzle::ALL {
        check(Form { a: Some(*swizzle), ..PLAIN });
        check(Form { b: *swizzle, ..PLAIN });
        check(Form { a: None, b: *swizzle, columns: 128, adds: Some(true), ..PLAIN });
    }
}

#[test]
fn shapes_and_types() {
    for columns in [8, 24, 96, 176, 256] {
        check(Form { columns, ..PLAIN });
        check(Form { columns, a: None, adds: Some(true), ..PLAIN });
    }
    for left in Fp8::ALL {
        for right in Fp8::ALL {
            check(Form { types: [*left, *right], ..PLAIN });
            check(Form { types: [*left, *right], a: None, adds: None, ..PLAIN });
        }
    }
}

/// A term that lies 13 bits below the accumulator is kept, one of 14 bits is not; exact sums keep both.
#[test]
fn an_h200_keeps_thirteen_bits() {
    let one_product = |start: f32, tensor_sum: TensorSum| {
        // 1 · 1 at depth 0 alone.
        let element = |_: usize, depth: usize| if depth == 0 { 0x38 } else { 0 };
        let form = Form { adds: Some(true), ..PLAIN };
        let options = Options { tensor_sum, ..Options::default() };
        product(form, start, options, 0, [&element, &element])[17][5]
    };
    assert_eq!(one_product(8192.0, TensorSum::H200), 8193.0);
    assert_eq!(one_product(16384.0, TensorSum::H200), 16384.0);
    assert_eq!(one_product(16384.0, TensorSum::Exact), 16385.0);
    let more = TensorSum::Truncating { fraction: 25, fp8_fraction: 14 };
    assert_eq!(one_product(16384.0, more), 16385.0);
}
