//! `ldmatrix` and `mma` against matrix products, with the fragment layouts as the manual writes them down.

use crate::support::{bytes, kernel, run, run_with, words};
use flashcore_ir::types::{Accumulator, Bf16x2, F16x2, F32, MatrixOperand, Storable, Tf32, U32, U64};
use flashcore_ir::{Arch, Builder, Fp8, GlobalAddress, MmaShape, Reg};
use flashcore_sim::{Argument, GlobalMemory, Options, TensorSum};

/// Where the manual puts element `i` of a lane: (row, column) of an operand.
type Layout = fn(lane: usize, i: usize) -> (usize, usize);

/// Section "Matrix Fragments for mma.m16n8k16 with floating point type", A.
fn a_k16(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
    let column = if i < 4 { thread * 2 + (i & 1) } else { thread * 2 + (i & 1) + 8 };
    (row, column)
}

/// The same, B.
fn b_k16(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 2 { thread * 2 + (i & 1) } else { thread * 2 + (i & 1) + 8 }, group)
}

/// Section "Matrix Fragments for mma.m16n8k8", `.f16` and `.bf16`, A.
fn a_k8(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1))
}

/// The same, B.
fn b_k8(lane: usize, i: usize) -> (usize, usize) {
    (lane % 4 * 2 + i, lane >> 2)
}

/// Section "Matrix Fragments for mma.m16n8k8", `.tf32`, A.
fn a_tf32_k8(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = if i == 0 || i == 2 { group } else { group + 8 };
    (row, if i < 2 { thread } else { thread + 4 })
}

/// The same, B.
fn b_tf32_k8(lane: usize, i: usize) -> (usize, usize) {
    (if i == 0 { lane % 4 } else { lane % 4 + 4 }, lane >> 2)
}

/// Section "Matrix Fragments for mma.m16n8k4", `.tf32`, A.
fn a_tf32_k4(lane: usize, i: usize) -> (usize, usize) {
    (if i == 0 { lane >> 2 } else { (lane >> 2) + 8 }, lane % 4)
}

/// The same, B.
fn b_tf32_k4(lane: usize, _: usize) -> (usize, usize) {
    (lane % 4, lane >> 2)
}

/// C and D of every shape.
fn c(lane: usize, i: usize) -> (usize, usize) {
    (if i < 2 { lane >> 2 } else { (lane >> 2) + 8 }, lane % 4 * 2 + (i & 1))
}

/// The packing of elements in registers.
#[derive(Clone, Copy)]
enum Element {
    F16,
    Bf16,
    /// With ones in the bits that the tensor core ignores.
    Tf32,
    F32,
}

impl Element {
    fn bytes(self, value: f32) -> Vec<u8> {
        match self {
            Self::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
            Self::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            Self::Tf32 => (value.to_bits() | 0x1fff).to_le_bytes().to_vec(),
            Self::F32 => value.to_le_bytes().to_vec(),
        }
    }
}

/// Whole numbers between -8 and 8, no two rows or columns alike.
fn element(row: usize, column: usize, salt: usize) -> f32 {
    let mixed = (row * 31 + column * 17 + salt * 7 + row * column * 5).wrapping_mul(2_654_435_761) >> 7;
    (mixed % 17) as f32 - 8.0
}

/// The registers of all lanes: lane by lane, the elements of its fragment.
fn fragments(elements: usize, layout: Layout, kind: Element, salt: usize) -> Vec<u8> {
    let lane = |lane| (0..elements).map(move |i| layout(lane, i));
    (0..32).flat_map(lane).flat_map(|(row, column)| kind.bytes(element(row, column, salt))).collect()
}

#[track_caller]
fn check_mma<T: MatrixOperand + Storable, A: Accumulator + Storable>(
    shape: MmaShape,
    (a_layout, b_layout): (Layout, Layout),
    operand: Element,
    accumulate: Element,
) {
    let depth = shape.depth() as usize;
    let per_register = if matches!(operand, Element::Tf32) { 1 } else { 2 };
    let a_registers = (16 * depth / 32 / per_register) as u32;
    let b_registers = (8 * depth / 32 / per_register) as u32;
    let c_registers = if matches!(accumulate, Element::F16) { 2 } else { 4 };
    let kernel = kernel(32, |k| {
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| k.parameter::<U64>(name));
        let lane = k.lane();
        let a = k.mad_wide(lane, 4 * a_registers, a);
        let b = k.mad_wide(lane, 4 * b_registers, b);
        let c = k.mad_wide(lane, 4 * c_registers, c);
        let d = k.mad_wide(lane, 4 * c_registers, d);
        let (a, b) = (k.load::<T>(a, a_registers), k.load::<T>(b, b_registers));
        let c = k.load::<A>(c, c_registers);
        k.mma::<T, A>(shape, &c, &a, &b);
        k.store(d, &c);
    });
    let mut memory = GlobalMemory::new();
    let a = memory.allocate("a", &fragments(16 * depth / 32, a_layout, operand, 1));
    let b = memory.allocate("b", &fragments(8 * depth / 32, b_layout, operand, 2));
    let c_address = memory.allocate("c", &fragments(4, c, accumulate, 3));
    let d = memory.allocate_uninitialised("d", 32 * 4 * c_registers as usize);
    let arguments = [a, b, c_address, d].map(Argument::U64);
    let report = run(&kernel, &arguments, &memory).unwrap();

    let product = |row: usize, column: usize| {
        let terms = (0..depth).map(|k| element(row, k, 1) * element(k, column, 2));
        terms.sum::<f32>() + element(row, column, 3)
    };
    let expected: Vec<u8> = (0..32)
        .flat_map(|lane| (0..4).map(move |i| c(lane, i)))
        .flat_map(|(row, column)| accumulate.bytes(product(row, column)))
        .collect();
    assert_eq!(memory.read(d), expected, "{shape}");
    assert_eq!(report.counters.mma, 1);
    assert_eq!(report.counters.tensor_flops, 2 * 16 * 8 * depth as u64);
}

#[test]
fn mma_m16n8k16() {
    let layouts: (Layout, Layout) = (a_k16, b_k16);
    check_mma::<F16x2, F32>(MmaShape::M16N8K16, layouts, Element::F16, Element::F32);
    check_mma::<F16x2, F16x2>(MmaShape::M16N8K16, layouts, Element::F16, Element::F16);
    check_mma::<Bf16x2, F32>(MmaShape::M16N8K16, layouts, Element::Bf16, Element::F32);
}

#[test]
fn mma_m16n8k8() {
    let layouts: (Layout, Layout) = (a_k8, b_k8);
    check_mma::<F16x2, F32>(MmaShape::M16N8K8, layouts, Element::F16, Element::F32);
    check_mma::<F16x2, F16x2>(MmaShape::M16N8K8, layouts, Element::F16, Element::F16);
    check_mma::<Bf16x2, F32>(MmaShape::M16N8K8, layouts, Element::Bf16, Element::F32);
}

#[test]
fn mma_tf32() {
    check_mma::<Tf32, F32>(MmaShape::M16N8K8, (a_tf32_k8, b_tf32_k8), Element::Tf32, Element::F32);
    check_mma::<Tf32, F32>(MmaShape::M16N8K4, (a_tf32_k4, b_tf32_k4), Element::Tf32, Element::F32);
}

/// The element at (row, column) of a matrix in shared memory.
fn stored(matrix: usize, row: usize, column: usize) -> u16 {
    (matrix * 0x1000 + row * 0x100 + column * 0x10) as u16
}

/// Loads matrices whose rows lie in any order: row `r` of matrix `i` at line `(5r + 3i) % 8` of block `3 - i`.
#[track_caller]
fn check_load_matrix(count: u32, transposed: bool) {
    let line = |matrix: usize, row: usize| (3 - matrix) * 8 + (5 * row + 3 * matrix) % 8;
    let kernel = kernel(32, |k: &mut Builder| {
        let [x, lines, y] = ["x", "lines", "y"].map(|name| k.parameter::<U64>(name));
        k.reserve_shared(512, 16);
        let (base, lane) = (k.shared_base(), k.lane());
        let from = k.mad_wide(lane, 16u32, x);
        let chunk = k.load::<U32>(from, 4);
        let location = k.mad::<U32>(lane, 16u32, base);
        k.store_shared(location, &chunk);
        k.warp_sync();
        let own_line = k.mad_wide(lane, 4u32, lines);
        let own_line = k.load_one::<U32>(own_line);
        let row = k.mad::<U32>(own_line, 16u32, base);
        let fragments: Vec<Reg<F16x2>> = k.load_matrix(row, count, transposed);
        let to = k.mad_wide(lane, 16u32, y);
        for (index, fragment) in fragments.into_iter().enumerate() {
            k.store_one(GlobalAddress::from(to).plus(4 * index as i32), fragment);
        }
    });
    let mut lines = vec![0u32; 32];
    let mut image = vec![0u16; 256];
    for matrix in 0..4 {
        for row in 0..8 {
            lines[8 * matrix + row] = line(matrix, row) as u32;
            for column in 0..8 {
                image[8 * line(matrix, row) + column] = stored(matrix, row, column);
            }
        }
    }
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &bytes(&image, |element| element.to_le_bytes()));
    let lines = memory.allocate("lines", &bytes(&lines, |line| line.to_le_bytes()));
    let y = memory.allocate_uninitialised("y", 512);
    run(&kernel, &[x, lines, y].map(Argument::U64), &memory).unwrap();
    for (lane, actual) in words(&memory.read(y)).chunks(4).enumerate() {
        for (matrix, &pair) in actual.iter().enumerate() {
            let (row, column) = (lane / 4, lane % 4 * 2);
            let expected = match (matrix < count as usize, transposed) {
                (false, _) => u32::MAX,
                (true, false) => {
                    u32::from(stored(matrix, row, column)) | u32::from(stored(matrix, row, column + 1)) << 16
                }
                (true, true) => {
                    u32::from(stored(matrix, column, row)) | u32::from(stored(matrix, column + 1, row)) << 16
                }
            };
            assert_eq!(pair, expected, "lane {lane}, matrix {matrix} of {count}, transposed: {transposed}");
        }
    }
}

#[test]
fn load_matrix() {
    for count in [1, 2, 4] {
        check_load_matrix(count, false);
        check_load_matrix(count, true);
    }
}

/// QK and PV of attention: scores leave one `mma` as an accumulator and enter the next as operand A.
#[test]
fn accumulator_of_one_product_is_operand_of_the_next() {
    for lane in 0..32 {
        for i in 0..4 {
            let (row, column) = c(lane, i);
            assert_eq!(a_k8(lane, i), (row, column));
            assert_eq!(a_k16(lane, i), (row, column));
            assert_eq!(a_k16(lane, i + 4), (row, column + 8));
        }
    }
}

/// The first element of the sum of an `mma` of e4m3 with an accumulator, where `factors` are codes of the first row of A and of
/// the first column of B by their depth.
fn first_of_fp8(arch: Arch, start: f32, factors: &[(usize, u8, u8)]) -> f32 {
    let mut builder = Builder::new("test", 32);
    let k = &mut builder;
    let [a, b, d] = ["a", "b", "d"].map(|name| k.parameter::<U64>(name));
    let lane = k.lane();
    let [a, b] = [(a, 16u32), (b, 8u32)].map(|(base, bytes)| k.mad_wide(lane, bytes, base));
    let (left, right) = (k.load::<U32>(a, 4), k.load::<U32>(b, 2));
    let sums = [(); 4].map(|()| k.copy(start));
    k.mma_fp8([Fp8::E4m3; 2], &sums, &[left[0], left[1], left[2], left[3]], &[right[0], right[1]]);
    let target = k.mad_wide(lane, 4u32, d);
    k.store_one(target, sums[0]);
    let kernel = builder.finish().verify(arch).expect("it keeps the rules");
    // Lane t has depths 4t to 4t + 3 of the first 16 in register 0 of both, and the others in register 2 of A and 1 of B.
    let (mut left, mut right) = (vec![0; 32 * 16], vec![0; 32 * 8]);
    for &(depth, of_a, of_b) in factors {
        let (half, lane, byte) = (depth / 16, depth % 16 / 4, depth % 4);
        left[16 * lane + 8 * half + byte] = of_a;
        right[8 * lane + 4 * half + byte] = of_b;
    }
    let mut memory = GlobalMemory::new();
    let [a, b] = [("a", &left), ("b", &right)].map(|(name, bytes)| memory.allocate(name, bytes));
    let d = memory.allocate_uninitialised("d", 128);
    let options = Options { tensor_sum: TensorSum::H200, ..Options::default() };
    let arguments = [a, b, d].map(Argument::U64);
    run_with(&kernel, &arguments, &memory, options).unwrap_or_else(|error| panic!("{error}"));
    f32::from_bits(words(&memory.read(d))[0])
}

/// Tensor cores that multiply 8-bit floats keep 13 bits below the largest term, the accumulator among them. Hopper multiplies
/// them as `f16`, in two steps from zero, and rounds as it adds the accumulator.
#[test]
fn sums_of_fp8_by_architecture() {
    const ONE: u8 = 0x38;
    const SIXTEEN: u8 = 0x58;
    /// `2^-9`, and three times that.
    const LEAST: u8 = 1;
    const THREE_LEAST: u8 = 3;
    for arch in [Arch::Sm89, Arch::Sm120] {
        assert_eq!(first_of_fp8(arch, 8192.0, &[(0, ONE, ONE)]), 8193.0);
        assert_eq!(first_of_fp8(arch, 16384.0, &[(0, ONE, ONE)]), 16384.0);
        assert_eq!(first_of_fp8(arch, 0.0, &[(0, SIXTEEN, SIXTEEN), (2, LEAST, LEAST)]), 256.0);
    }
    let ulp = |of: f32| of * f32::EPSILON;
    // Eight products of 2^-18, half of them in each half of the depth.
    let small = |byte: usize| (0..8).map(move |lane| (4 * lane + byte, LEAST, LEAST));
    for arch in [Arch::Sm90, Arch::Sm90a] {
        assert_eq!(first_of_fp8(arch, 16384.0, &[(0, ONE, ONE)]), 16385.0);
        // The step of the lower bytes comes first, and its sum is one term of the step of the upper ones.
        let lower_then_upper: Vec<_> = small(0).chain([(2, SIXTEEN, SIXTEEN)]).collect();
        assert_eq!(first_of_fp8(arch, 0.0, &lower_then_upper), 256.0 + ulp(256.0));
        let together: Vec<_> = small(3).chain([(2, SIXTEEN, SIXTEEN)]).collect();
        assert_eq!(first_of_fp8(arch, 0.0, &together), 256.0);
        let upper_after_lower: Vec<_> = small(2).chain([(0, SIXTEEN, SIXTEEN)]).collect();
        assert_eq!(first_of_fp8(arch, 0.0, &upper_after_lower), 256.0);
        // Three quarters of a unit are rounded up.
        assert_eq!(first_of_fp8(arch, 128.0, &[(5, THREE_LEAST, LEAST)]), 128.0 + ulp(128.0));
    }
    assert_eq!(first_of_fp8(Arch::Sm89, 128.0, &[(5, THREE_LEAST, LEAST)]), 128.0);
}
