//! Catalogue of planted bugs in the kernels for every GPU.
//!
//! Each changes the generated kernel, as data, in one way that history, other projects or experience say is made.
//! What each must be killed by is not written down: the matrix shows what did.

use flashcore_ir::{Compare, CopyCache, Guard, Kernel, Op, Operand, RegisterId, ShuffleMode, Type};

use super::Group;
use super::edit::{Find, change, drop, rewrite};

/// A planted bug.
#[derive(Debug, Clone, Copy)]
pub struct Mutation {
    /// A short name.
    pub name: &'static str,
    /// Description of the bug.
    pub bug: &'static str,
    /// Which kernel it is planted in.
    pub family: &'static str,
    /// The trials that must kill it.
    pub group: Group,
    /// Plants it; returns how many instructions it changed, of which there must be some.
    pub plant: fn(&mut Kernel) -> usize,
}

/// A list of them, each with the kernel that it is planted in.
macro_rules! mutations {
    ($group:expr; $($family:literal: $name:literal, $bug:literal => $plant:expr;)*) => {
        &[$($crate::testkit::mutants::Mutation { name: $name, bug: $bug, family: $family, group: $group, plant: $plant },)*]
    };
    ($($family:literal: $name:literal, $bug:literal => $plant:expr;)*) => {
        mutations! { $crate::testkit::mutants::Group::Plain; $($family: $name, $bug => $plant;)* }
    };
}

pub(super) use mutations;

/// Mutations of the kernels for every GPU.
pub const CATALOGUE: &[Mutation] = mutations! {
    // Synchronisation
    "ampere": "drop-tile-barrier", "no barrier after a tile has arrived" =>
        |kernel| drop(kernel, Find::every(&["wait"], is_barrier));
    "ampere": "drop-tile-wait", "a tile is read while its copies are in flight" =>
        |kernel| drop(kernel, Find::every(&["wait"], is_wait));
    "ampere": "wait-for-one-less", "the wait leaves one group too many in flight" =>
        |kernel| change(kernel, Find::every(&["wait"], is_wait), |op| {
            if let Op::CopyAsyncWait { pending } = op { *pending += 1; }
        });
    "ampere": "drop-tile-commit", "the copies of a tile are never committed" =>
        |kernel| drop(kernel, Find::nth(&[], is_commit, 1));
    "ampere": "drop-loop-commit", "the copies inside the loop are never committed" =>
        |kernel| drop(kernel, Find::nth(&[], is_commit, 2));
    "ampere": "drop-query-barrier", "no barrier after the query has arrived" =>
        |kernel| drop(kernel, Find::every(&["query fragments"], is_barrier));
    "ampere": "drop-query-wait", "the query is read while its copies are in flight" =>
        |kernel| drop(kernel, Find::every(&["query fragments"], is_wait));
    "ampere": "barrier-forgets-a-warp", "the barrier of the loop counts one warp too few" =>
        |kernel| change(kernel, Find::every(&["wait"], is_barrier), |op| {
            if let Op::BarrierSync { threads: Operand::Constant(threads), .. } = op { *threads -= 32; }
        });
    "ampere": "barrier-counts-too-many", "the barrier of the loop counts a warp that does not exist" =>
        |kernel| change(kernel, Find::every(&["wait"], is_barrier), |op| {
            if let Op::BarrierSync { threads: Operand::Constant(threads), .. } = op { *threads += 32; }
        });
    "ampere": "barrier-under-guard", "a barrier that only some lanes execute" => guard_barrier;
    "ampere": "drop-first-warp-sync", "the output is staged while the query may still be read" =>
        |kernel| drop(kernel, Find::nth(&["epilogue"], |op| matches!(op, Op::WarpSync {}), 0));
    "ampere": "drop-second-warp-sync", "the staged output is read before all lanes have written it" =>
        |kernel| drop(kernel, Find::nth(&["epilogue"], |op| matches!(op, Op::WarpSync {}), 1));
    "ampere": "reading-stage-stands-still", "every tile is read from the first stage" =>
        |kernel| drop(kernel, Find::nth(&["advance"], is_add, 2));
    "ampere": "filling-stage-stands-still", "every tile of the loop is copied into the same stage" =>
        |kernel| drop(kernel, Find::nth(&["advance"], is_add, 1));

    // Operands
    "ampere": "swap-key-and-value", "key and value are exchanged" => |kernel| swap_parameters(kernel, 1, 2);
    "scalar": "swap-key-and-value", "key and value are exchanged" => |kernel| swap_parameters(kernel, 1, 2);
    "ampere": "forget-groups", "every query head reads the key head of the same number" => |kernel| forget_groups(kernel);
    "scalar": "forget-groups", "every query head reads the key head of the same number" => |kernel| forget_groups(kernel);
    "ampere": "value-not-transposed", "values are loaded without transposing" =>
        |kernel| change(kernel, Find::every(&["output"], is_load_matrix), flip_transpose);
    "ampere": "one-value-not-transposed", "one block of values is loaded without transposing" =>
        |kernel| change(kernel, Find::nth(&["output"], is_load_matrix, 3), flip_transpose);
    "ampere": "key-transposed", "keys are loaded transposed" =>
        |kernel| change(kernel, Find::every(&["scores"], is_load_matrix), flip_transpose);
    "ampere": "depth-step-missing", "one tensor-core product of the scores is missing" =>
        |kernel| drop(kernel, Find::nth(&["scores"], is_mma, 30));
    "ampere": "value-product-missing", "one tensor-core product of the output is missing" =>
        |kernel| drop(kernel, Find::nth(&["output"], is_mma, 7));
    "ampere": "operand-type-mixed", "one product reads its operands as the other 16-bit type" =>
        |kernel| change(kernel, Find::nth(&["scores"], is_mma, 0), |op| {
            if let Op::Mma { operand, .. } = op {
                *operand = if *operand == Type::F16x2 { Type::Bf16x2 } else { Type::F16x2 };
            }
        });
    "ampere": "scores-not-cleared", "the scores of a tile are added to those of the tile before" =>
        |kernel| drop(kernel, Find { section: &["scores"], matches: is_move_of_zero, pick: super::edit::Pick::Nth(33) });
    "ampere": "output-not-cleared", "the output begins with what the register held" =>
        |kernel| drop(kernel, Find::nth(&["output"], is_move_of_zero, 0));
    "ampere": "pair-order", "the halves of each stored pair are exchanged" =>
        |kernel| change(kernel, Find::every(&["stage output"], is_pair), |op| {
            if let Op::ConvertPair { high, low, .. } = op { core::mem::swap(high, low); }
        });
    "ampere": "weights-out-of-order", "two halves of one pair of weights are exchanged" =>
        |kernel| change(kernel, Find::nth(&["output"], is_pair, 5), |op| {
            if let Op::ConvertPair { high, low, .. } = op { core::mem::swap(high, low); }
        });

    // Masks and tails
    "ampere": "mask-one-key-more", "each row attends one key past its limit" =>
        |kernel| change(kernel, Find::every(&["mask"], |op| is_compare(op, Compare::Le)), |op| set_compare(op, Compare::Lt));
    "ampere": "causal-limit-one-less", "the causal limit leaves out the row's own key" =>
        |kernel| change(kernel, Find::every(&["mask"], |op| matches!(op, Op::Add { b: Operand::Constant(rows), .. } if rows % 8 == 1)), |op| {
            if let Op::Add { b: Operand::Constant(rows), .. } = op { *rows -= 1; }
        });
    "scalar": "causal-limit-one-less", "the causal limit leaves out the row's own key" =>
        |kernel| drop_one_of_limit(kernel);
    "ampere": "mask-never-applied", "no tile is taken to be partly masked" =>
        |kernel| change(kernel, Find::every(&["mask"], |op| is_compare(op, Compare::Gt)), |op| {
            if let Op::SetPredicate { a, .. } = op { *a = Operand::Constant(0); }
        });
    "ampere": "mask-diagonal-tile-only-if-beyond", "a tile that ends one key past the limit is taken as unmasked" =>
        |kernel| change(kernel, Find::every(&["mask"], |op| is_compare(op, Compare::Gt)), |op| {
            if let Op::SetPredicate { a, b, .. } = op { core::mem::swap(a, b); }
        });
    "ampere": "tail-not-zero-filled", "rows past the last are copied like the others" =>
        |kernel| change(kernel, Find::every(&["load values"], is_select), always_copy);
    "ampere": "query-tail-not-zero-filled", "query rows past the last are copied like the others" =>
        |kernel| change(kernel, Find::every(&["load query"], is_select), always_copy);
    "ampere": "store-past-the-end", "output rows past the last are stored too" =>
        |kernel| unguard(kernel, &["store output"]);
    "ampere": "store-one-row-more", "one output row past the last is stored too" =>
        |kernel| change(kernel, Find::every(&["store output"], |op| is_compare(op, Compare::Lt)), |op| set_compare(op, Compare::Le));
    "scalar": "row-past-the-end", "one row past the last is computed too" =>
        |kernel| change(kernel, Find::nth(&["prologue"], |op| is_compare(op, Compare::Lt), 0), |op| set_compare(op, Compare::Le));
    "ampere": "first-key-tile-dropped", "the loop begins at the second tile" =>
        |kernel| change(kernel, Find::nth(&["kv range"], |op| matches!(op, Op::Mov { ty: Type::S32, a: Operand::Constant(0), .. }), 0), |op| {
            if let Op::Mov { a, .. } = op { *a = Operand::Constant(64); }
        });
    "ampere": "last-key-tile-dropped", "the loop ends one tile early" =>
        |kernel| drop_last_tile(kernel);
    "ampere": "half-a-chunk-copied", "copies move 8 of 16 bytes" =>
        |kernel| change(kernel, Find::every(&["load keys"], |op| matches!(op, Op::CopyAsync { .. })), |op| {
            if let Op::CopyAsync { bytes, cache, .. } = op { (*bytes, *cache) = (8, CopyCache::All); }
        });

    // Softmax
    "ampere": "output-not-rescaled", "the output keeps the scale of an old row max" =>
        |kernel| drop(kernel, Find::nth(&["softmax", "rescale"], is_mul, 2));
    "ampere": "sum-not-rescaled", "the sum keeps the scale of an old row max" =>
        |kernel| drop(kernel, Find::nth(&["softmax", "rescale"], is_mul, 0));
    "scalar": "sum-not-rescaled", "the sum keeps the scale of an old row max" =>
        |kernel| change(kernel, Find::every(&["softmax"], |op| matches!(op, Op::Fma { .. })), |op| {
            if let Op::Fma { a, .. } = op { *a = Operand::Constant(u64::from(1.0f32.to_bits())); }
        });
    "scalar": "output-not-rescaled", "the output keeps the scale of an old row max" =>
        |kernel| drop(kernel, Find::nth(&["accumulate"], is_mul, 0));
    "ampere": "row-max-of-two-lanes", "the row max leaves out two of the four lanes that share a row" =>
        |kernel| drop_shuffle_step(kernel, &["softmax", "row max"]);
    "ampere": "row-max-mixes-rows", "the row max is exchanged with a lane of another row" =>
        |kernel| change(kernel, Find::nth(&["softmax", "row max"], is_shuffle, 1), |op| set_distance(op, 4));
    "ampere": "sum-of-two-lanes", "the row sum leaves out two of the four lanes that share a row" =>
        |kernel| change(kernel, Find::nth(&["epilogue"], is_shuffle, 1), |op| set_distance(op, 1));
    "ampere": "sum-misses-a-column", "one column of each tile is left out of the sum" =>
        |kernel| drop(kernel, Find::nth(&["softmax", "exp and sum"], is_add, 9));
    "ampere": "scale-forgotten", "scores are not scaled" =>
        |kernel| change(kernel, Find::every(&["softmax", "exp and sum"], |op| matches!(op, Op::Fma { .. })), |op| {
            if let Op::Fma { a, .. } = op { *a = Operand::Constant(u64::from(1.0f32.to_bits())); }
        });
    "ampere": "empty-row-has-a-row-max", "minus infinity is taken as the row max of a row without keys" =>
        |kernel| change(kernel, Find::every(&["softmax", "row max"], is_select), take_second);
    "ampere": "empty-row-divided", "a row without keys is divided by its sum of 0" =>
        |kernel| change(kernel, Find::every(&["epilogue"], is_select), take_second);
    "scalar": "empty-row-divided", "a row without keys is divided by its sum of 0" =>
        |kernel| change(kernel, Find::every(&["epilogue"], is_select), take_second);
    "ampere": "not-normalised", "the output is not divided by the sum" =>
        |kernel| change(kernel, Find::every(&["epilogue"], is_select), |op| {
            if let Op::Select { b, .. } = op { *b = Operand::Constant(u64::from(1.0f32.to_bits())); }
        });
    "ampere": "log-sum-exp-base-two", "the log-sum-exp is left in base two" =>
        |kernel| change(kernel, Find::every(&["epilogue"], |op| is_mul_by(op, core::f32::consts::LN_2)), |op| {
            if let Op::Mul { b, .. } = op { *b = Operand::Constant(u64::from(1.0f32.to_bits())); }
        });
    "ampere": "log-sum-exp-without-row-max", "the log-sum-exp leaves out the row max" =>
        |kernel| change(kernel, Find::every(&["epilogue"], is_sum_of_two), |op| {
            if let Op::Add { a, .. } = op { *a = Operand::Constant(0); }
        });
    "ampere": "weights-in-eight-bits", "weights are rounded to three bits of mantissa before the product" =>
        |kernel| truncate_weights(kernel, 0xfff0_0000);
    "ampere": "weights-in-bf16", "P of an f16 problem is truncated to the precision of bf16" =>
        |kernel| truncate_weights(kernel, 0xffff_0000);

    // Shared memory
    "ampere": "swizzle-forgotten-on-reading", "blocks beside the first are read as if chunks were not exchanged" =>
        |kernel| change(kernel, Find::nth(&["scores", "swizzle"], is_xor, 1), |op| {
            if let Op::Xor { ty, d, a, b } = *op { *op = Op::Add { ty, d, a, b }; }
        });
    "ampere": "swizzle-forgotten-on-writing", "keys are written as if chunks were not exchanged" =>
        |kernel| change(kernel, Find::nth(&["copies", "swizzle"], is_and, 1), clear_pattern);
    "ampere": "swizzle-half-as-wide", "chunks are exchanged with half of the rows: right, but in conflict" =>
        |kernel| change(kernel, Find::every(&["swizzle"], is_and), |op| {
            if let Op::And { b: Operand::Constant(mask), .. } = op { *mask &= 3; }
        });
    "ampere": "stage-overlaps", "the second stage begins inside the first" =>
        |kernel| change(kernel, Find::every(&["advance"], is_add), |op| {
            if let Op::Add { b: Operand::Constant(bytes), .. } = op { *bytes -= 128; }
        });
    "ampere": "shared-base-forgotten", "addresses leave out where shared memory begins" =>
        |kernel| change(kernel, Find::every(&[], |op| matches!(op, Op::SharedBase { .. })), |op| {
            if let Op::SharedBase { d } = *op { *op = Op::Mov { ty: Type::U32, d, a: Operand::Constant(0) }; }
        });
};

pub(super) fn is_barrier(op: &Op) -> bool {
    matches!(op, Op::BarrierSync { .. })
}
fn is_wait(op: &Op) -> bool {
    matches!(op, Op::CopyAsyncWait { .. })
}
fn is_commit(op: &Op) -> bool {
    matches!(op, Op::CopyAsyncCommit {})
}
fn is_add(op: &Op) -> bool {
    matches!(op, Op::Add { .. })
}
/// Of numbers in registers, into another one.
fn is_sum_of_two(op: &Op) -> bool {
    matches!(op, Op::Add { ty: Type::F32, d, a: Operand::Register(a), .. } if a != d)
}
pub(super) fn is_mul(op: &Op) -> bool {
    matches!(op, Op::Mul { .. })
}
fn is_and(op: &Op) -> bool {
    matches!(op, Op::And { .. })
}
fn is_xor(op: &Op) -> bool {
    matches!(op, Op::Xor { .. })
}
pub(super) fn is_mma(op: &Op) -> bool {
    matches!(op, Op::Mma { .. })
}
fn is_pair(op: &Op) -> bool {
    matches!(op, Op::ConvertPair { .. })
}
pub(super) fn is_select(op: &Op) -> bool {
    matches!(op, Op::Select { .. })
}
fn is_shuffle(op: &Op) -> bool {
    matches!(op, Op::Shuffle { mode: ShuffleMode::Butterfly, .. })
}
fn is_load_matrix(op: &Op) -> bool {
    matches!(op, Op::LoadMatrix { .. })
}
fn is_move_of_zero(op: &Op) -> bool {
    matches!(op, Op::Mov { ty: Type::F32, a: Operand::Constant(0), .. })
}
fn is_mul_by(op: &Op, factor: f32) -> bool {
    matches!(op, Op::Mul { b: Operand::Constant(bits), .. } if *bits == u64::from(factor.to_bits()))
}
pub(super) fn is_compare(op: &Op, wanted: Compare) -> bool {
    matches!(op, Op::SetPredicate { compare, .. } if *compare == wanted)
}

pub(super) fn set_compare(op: &mut Op, wanted: Compare) {
    if let Op::SetPredicate { compare, .. } = op {
        *compare = wanted;
    }
}

fn flip_transpose(op: &mut Op) {
    if let Op::LoadMatrix { transposed, .. } = op {
        *transposed = !*transposed;
    }
}

fn set_distance(op: &mut Op, distance: u64) {
    if let Op::Shuffle { index, .. } = op {
        *index = Operand::Constant(distance);
    }
}

pub(super) fn take_second(op: &mut Op) {
    if let Op::Select { a, b, .. } = op {
        *a = *b;
    }
}

pub(super) fn always_copy(op: &mut Op) {
    if let Op::Select { a, b, .. } = op {
        *b = *a;
    }
}

fn clear_pattern(op: &mut Op) {
    if let Op::And { b, .. } = op {
        *b = Operand::Constant(0);
    }
}

/// Gives the barriers of the loop the first predicate of the kernel as their guard.
fn guard_barrier(kernel: &mut Kernel) -> usize {
    let predicate = kernel.registers.iter().position(|register| register.ty == Type::Pred);
    let Some(predicate) = predicate.map(|index| RegisterId(index as u32)) else { return 0 };
    rewrite(kernel, Find::every(&["wait"], is_barrier), |_, mut instruction| {
        instruction.guard = Some(Guard { predicate, negated: false });
        vec![instruction]
    })
}

pub(super) fn unguard(kernel: &mut Kernel, section: &'static [&'static str]) -> usize {
    rewrite(kernel, Find::every(section, |op| matches!(op, Op::Store { .. })), |_, mut instruction| {
        instruction.guard = None;
        vec![instruction]
    })
}

fn swap_parameters(kernel: &mut Kernel, first: u32, second: u32) -> usize {
    change(kernel, Find::every(&[], |op| matches!(op, Op::LoadParam { .. })), |op| {
        if let Op::LoadParam { parameter, .. } = op {
            if *parameter == first {
                *parameter = second;
            } else if *parameter == second {
                *parameter = first;
            }
        }
    })
}

fn forget_groups(kernel: &mut Kernel) -> usize {
    change(kernel, Find::every(&[], |op| matches!(op, Op::Div { ty: Type::U32, .. })), |op| {
        if let Op::Div { b, .. } = op {
            *b = Operand::Constant(1);
        }
    })
}

fn drop_one_of_limit(kernel: &mut Kernel) -> usize {
    let adds_one = |op: &Op| matches!(op, Op::Add { ty: Type::S32, b: Operand::Constant(1), .. });
    change(kernel, Find::every(&["window"], adds_one), |op| {
        if let Op::Add { b, .. } = op {
            *b = Operand::Constant(0);
        }
    })
}

/// The loop's condition compares with the end less one tile: the comparison's index is moved one tile on.
fn drop_last_tile(kernel: &mut Kernel) -> usize {
    let is_loop_test = |op: &Op| matches!(op, Op::SetPredicate { compare: Compare::Lt, ty: Type::S32, .. });
    rewrite(kernel, Find::nth(&["prologue"], is_loop_test, 1), |kernel, mut instruction| {
        let Op::SetPredicate { a, .. } = &mut instruction.op else { return vec![instruction] };
        let moved = kernel.add_register(Type::S32, instruction.origin.section);
        let op = Op::Add { ty: Type::S32, d: moved, a: *a, b: Operand::Constant(64) };
        *a = Operand::Register(moved);
        let add = flashcore_ir::Instruction { op, ..instruction.clone() };
        vec![add, instruction]
    })
}

fn drop_shuffle_step(kernel: &mut Kernel, section: &'static [&'static str]) -> usize {
    change(kernel, Find::nth(section, is_shuffle, 1), |op| set_distance(op, 1))
}

/// Cuts bits off the weights, between the exponential and its use.
fn truncate_weights(kernel: &mut Kernel, keep: u64) -> usize {
    rewrite(
        kernel,
        Find::every(&["softmax", "exp and sum"], |op| matches!(op, Op::Exp2 { .. })),
        |kernel, instruction| {
            let Op::Exp2 { d, .. } = instruction.op else { return vec![instruction] };
            let section = instruction.origin.section;
            let (bits, kept) = (kernel.add_register(Type::U32, section), kernel.add_register(Type::U32, section));
            let ops = [
                Op::Reinterpret { to: Type::U32, from: Type::F32, d: bits, a: Operand::Register(d) },
                Op::And { ty: Type::U32, d: kept, a: Operand::Register(bits), b: Operand::Constant(keep) },
                Op::Reinterpret { to: Type::F32, from: Type::U32, d, a: Operand::Register(kept) },
            ];
            let more: Vec<_> =
                ops.into_iter().map(|op| flashcore_ir::Instruction { op, ..instruction.clone() }).collect();
            [vec![instruction], more].concat()
        },
    )
}
