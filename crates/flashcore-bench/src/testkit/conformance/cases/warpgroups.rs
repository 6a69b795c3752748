//! wgmma in every layout of its operands, and the other warp operations that came with Hopper.
//!
//! Operands are whatever bytes the inputs have: a layout says which element is which, so that a machine with another
//! belief about one computes something else. With small integers every sum is exact; with normal numbers the error of
//! hardware is bounded as for `mma`, by `depth + 6` units of 2^-24 of `sum |a·b| + |c|`, which is below 64 here.

use flashcore_ir::builder::{Adds, LeftMatrix, MatrixLayout, SharedMatrix};
use flashcore_ir::types::{Accumulator, Bf16x2, F16x2, F32, HalfPair, MatrixOperand, Storable, Tf32, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, Major, Reg, SharedAddress, SpecialRegister, Swizzle, Type};

use crate::testkit::conformance::built::Plan;
use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::inputs::Fill;

const THREADS: u32 = 128;
/// 22 units of 2^-24, of a sum of 64.
const ABSOLUTE: f64 = 22.0 * 64.0 / 16_777_216.0;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    let plain = Form {
        columns: 64,
        a: Some((Major::Depth, Swizzle::Bytes128)),
        b: (Major::Depth, Swizzle::Bytes128),
        adds: Some(true),
        rounds: false,
    };
    for major in Major::ALL {
        for swizzle in Swizzle::ALL {
            let operand = (*major, *swizzle);
            let form = format!("A {major}, {swizzle}");
            list.push(product::<Bf16x2, F32>("Wgmma", &form, Form { a: Some(operand), ..plain }));
            let form = format!("B {major}, {swizzle}");
            list.push(product::<F16x2, F32>("Wgmma", &form, Form { b: operand, columns: 128, ..plain }));
        }
    }
    for columns in [8, 24, 96, 176, 256] {
        let form = format!("{columns} columns");
        list.push(product::<Bf16x2, F32>("Wgmma", &form, Form { columns, ..plain }));
        let form = format!("{columns} columns in pairs");
        list.push(product::<F16x2, F16x2>("Wgmma", &form, Form { columns, a: None, ..plain }));
    }
    list.push(product::<Bf16x2, F32>("Wgmma", "from registers", Form { a: None, ..plain }));
    list.push(product::<Bf16x2, F32>("Wgmma", "that replaces", Form { adds: Some(false), ..plain }));
    list.push(product::<F16x2, F32>("Wgmma", "that may add", Form { adds: None, ..plain }));
    list.push(product::<Bf16x2, F32>("Wgmma", "bf16x2 normal", Form { rounds: true, ..plain }));
    list.push(product::<F16x2, F32>("Wgmma", "f16x2 normal", Form { rounds: true, a: None, ..plain }));
    super::warpgroups_fp8::add(list);
    for row in ["WgmmaFence", "WgmmaCommit", "WgmmaWait"] {
        list.push(product::<Bf16x2, F32>(row, "", plain));
    }
    for count in [1, 2, 4] {
        for transposed in [false, true] {
            list.push(store_matrix::<F16x2>(count, transposed));
        }
    }
    list.push(store_matrix::<Bf16x2>(4, true));
    list.push(store_matrix::<Tf32>(2, false));
    list.push(elect());
    list.push(registers());
    for row in ["GridDependencyWait", "LaunchDependents"] {
        list.push(dependencies(row));
    }
}

#[derive(Clone, Copy)]
struct Form {
    columns: u32,
    /// Layout of A in shared memory; none for registers.
    a: Option<(Major, Swizzle)>,
    b: (Major, Swizzle),
    /// True if the product is added; none for a predicate.
    adds: Option<bool>,
    /// True if sums are rounded.
    rounds: bool,
}

fn layout((major, swizzle): (Major, Swizzle), outers: u32) -> MatrixLayout {
    let (leading_bytes, stride_bytes) = match (major, swizzle.bytes()) {
        (Major::Depth, None) => (128, 256),
        (Major::Outer, None) => (16 * outers, 128),
        (Major::Depth, Some(width)) => (0, 8 * width),
        (Major::Outer, Some(width)) => (16 * width, 8 * width),
    };
    MatrixLayout { swizzle, leading_bytes, stride_bytes }
}

/// The start of shared memory, which is a multiple of 128 alone, rounded up to one of 1024.
pub(super) fn shared_base(k: &mut Builder) -> Reg<U32> {
    k.reserve_shared(1024, 1);
    let base = k.shared_base();
    let end = k.add(base, 1023u32);
    k.and(end, !1023u32)
}

fn product<T: HalfPair, A: Accumulator + Storable>(row: &'static str, form: &str, how: Form) -> ConformanceCase {
    let Form { columns, a, b, adds, rounds } = how;
    let fill = if rounds { Fill::Normal } else { Fill::SmallInteger };
    let tolerance = if rounds { Tolerance::Within { relative: 0.0, absolute: ABSOLUTE } } else { Tolerance::Exact };
    let fills = [(T::TYPE, fill), (T::TYPE, fill), (A::TYPE, fill)];
    let plan = Plan { tolerance, ..product_plan(row, form, columns, fills) };
    write_product::<T, A>(plan, columns, (a, b, adds), |k, sums, left, right, adds| {
        k.wgmma::<T, A>(columns, sums, left, right, adds);
    })
}

/// A product of 64 × `columns` elements, whose inputs, two factors and the accumulator, have these types and contents.
pub(super) fn product_plan(row: &'static str, form: &str, columns: u32, [a, b, c]: [(Type, Fill); 3]) -> Plan {
    let count = columns / if c.0 == Type::F16x2 { 4 } else { 2 };
    Plan::new(row, form, THREADS)
        .input("a", a.0, 64 * 128 / 4, a.1)
        .input("b", b.0, columns * 128 / 4, b.1)
        .input("c", c.0, THREADS * count, c.1)
        .output("d", c.0, THREADS * count)
}

/// The operands of a product: A, B, and if it is added.
type Operands = (Option<(Major, Swizzle)>, (Major, Swizzle), Option<bool>);

/// The case of a product that `multiply` writes, of fragments of `F`.
pub(super) fn write_product<F: Storable, A: Storable>(
    plan: Plan,
    columns: u32,
    (a, b, adds): Operands,
    multiply: impl FnOnce(&mut Builder, &[Reg<A>], LeftMatrix<'_, F>, SharedMatrix, Adds),
) -> ConformanceCase {
    let [a_bytes, b_bytes] = [64 * 128, columns * 128];
    let count = columns / if A::TYPE == Type::F16x2 { 4 } else { 2 };
    plan.case(|k, inputs, outputs| {
        let [a_at, b_at] = [a_bytes, b_bytes].map(|bytes| k.reserve_shared(bytes, 1024));
        let barrier = k.reserve_mbarrier();
        let base = shared_base(k);
        let [a_at, b_at, barrier] = [a_at, b_at, barrier].map(|offset| k.add(base, offset));
        let thread = k.special(SpecialRegister::ThreadX);
        let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
        k.when(first, |k| {
            k.mbarrier_init(barrier, 1u32);
            k.fence_mbarrier_init();
        });
        k.cta_sync();
        k.if_then(first, |k| {
            k.mbarrier_arrive_expect(barrier, a_bytes + b_bytes);
            k.bulk_load(a_at, inputs[0], a_bytes, barrier);
            k.bulk_load(b_at, inputs[1], b_bytes, barrier);
        });
        k.mbarrier_wait(barrier, 0u32);
        let own = k.mul_wide(thread, 4 * count);
        let (from, to) = (k.add(inputs[2], own), k.add(outputs[0], own));
        let address = |base: Reg<U64>, index: usize| GlobalAddress::from(base).plus(4 * index as i32);
        let sums: Vec<Reg<A>> = (0..count as usize).map(|index| k.load_one(address(from, index))).collect();
        let descriptor = k.matrix_descriptor(b_at, layout(b, columns));
        let right = SharedMatrix { descriptor, major: b.0 };
        // Whatever lies there is a fragment.
        let slot = k.mad::<U32>(thread, 16u32, a_at);
        let fragment: Vec<Reg<F>> = k.load_shared(slot, 4);
        let left = match a {
            None => LeftMatrix::Registers(&fragment),
            Some(operand) => {
                let descriptor = k.matrix_descriptor(a_at, layout(operand, 64));
                LeftMatrix::Shared(SharedMatrix { descriptor, major: operand.0 })
            }
        };
        let adds = match adds {
            Some(true) => Adds::Add,
            Some(false) => Adds::Replace,
            None => Adds::Where(k.compare::<U32>(Compare::Eq, thread, thread)),
        };
        k.wgmma_fence();
        multiply(k, &sums, left, right, adds);
        k.wgmma_commit();
        k.wgmma_wait(0);
        for (index, sum) in sums.iter().enumerate() {
            k.store_one(address(to, index), *sum);
        }
    })
}

/// Each warp stores matrices, whose rows lie in the order of the lanes, and reads them back by rows.
fn store_matrix<T: MatrixOperand + Storable>(count: u32, transposed: bool) -> ConformanceCase {
    let how = if transposed { " transposed" } else { "" };
    let name = format!("x{count}{how} {}", T::TYPE);
    Plan::new("StoreMatrix", &name, THREADS)
        .input("fragment", T::TYPE, THREADS * count, Fill::Bits)
        .output("rows", Type::U32, THREADS * count)
        .case(|k, inputs, outputs| {
            k.reserve_shared(512 * THREADS / 32, 128);
            let base = k.shared_base();
            let (thread, lane) = (k.special(SpecialRegister::ThreadX), k.lane());
            let slot = k.mad::<U32>(thread, 16u32, base);
            let own = k.mad_wide(thread, 4 * count, inputs[0]);
            let values: Vec<Reg<T>> =
                (0..count).map(|index| k.load_one(GlobalAddress::from(own).plus(4 * index as i32))).collect();
            k.store_matrix(slot, &values, transposed);
            k.warp_sync();
            // A warp has 8 · count rows of 16 bytes, which 32 lanes read in words.
            let warp = k.warp();
            let tile = k.mad::<U32>(warp, 512u32, base);
            for index in 0..count {
                let word = k.mad::<U32>(lane, 4u32, tile);
                let read = k.load_shared::<U32>(SharedAddress::from(word).plus(128 * index as i32), 1)[0];
                let place = k.mad::<U32>(thread, count, index);
                let to = k.mad_wide(place, 4u32, outputs[0]);
                k.store_one(to, read);
            }
        })
}

/// One lane of each warp is elected, whichever it is.
fn elect() -> ConformanceCase {
    Plan::new("Elect", "", THREADS).output("elected lanes", Type::U32, THREADS).case(|k, _, outputs| {
        let elected = k.elect();
        let ballot = k.ballot(elected);
        let lanes = k.pop_count(ballot);
        let thread = k.special(SpecialRegister::ThreadX);
        let to = k.mad_wide(thread, 4u32, outputs[0]);
        k.store_one(to, lanes);
    })
}

/// One warpgroup gives registers back that another takes; both go on to write.
fn registers() -> ConformanceCase {
    let threads = 2 * THREADS;
    Plan::new("SetRegisterCount", "", threads)
        .input("word", Type::U32, threads, Fill::Bits)
        .output("word", Type::U32, threads)
        .case(|k, inputs, outputs| {
            k.set_register_budget(96);
            let (warp, thread) = (k.warp(), k.special(SpecialRegister::ThreadX));
            let gives = k.compare::<U32>(Compare::Lt, warp, 4u32);
            k.if_else_uniform(gives, |k| k.decrease_registers(40), |k| k.increase_registers(152));
            let from = k.mad_wide(thread, 4u32, inputs[0]);
            let word = k.load_one::<U32>(from);
            let to = k.mad_wide(thread, 4u32, outputs[0]);
            k.store_one(to, word);
        })
}

/// Alone on its stream a kernel waits for nothing.
fn dependencies(row: &'static str) -> ConformanceCase {
    Plan::new(row, "", THREADS).input("word", Type::U32, THREADS, Fill::Bits).output("word", Type::U32, THREADS).case(
        |k, inputs, outputs| {
            k.grid_dependency_wait();
            let thread = k.special(SpecialRegister::ThreadX);
            let from = k.mad_wide(thread, 4u32, inputs[0]);
            let word = k.load_one::<U32>(from);
            k.launch_dependents();
            let to = k.mad_wide(thread, 4u32, outputs[0]);
            k.store_one(to, word);
        },
    )
}
