//! Bugs of the chunk scheduler, of the partials that it stores, and of the kernel that combines them.
//!
//! The combine kernel adds chunks in the order of keys; another fixed order differs in rounding only, within every gate, so
//! no bug here is about that.

use flashcore_ir::{Compare, Instruction, Kernel, Op, Operand, ShuffleMode, Type};

use super::Group;
use super::addressing::capped;
use super::catalogue::{Mutation, is_compare, mutations, set_compare};
use super::edit::{Find, change, parameter, rewrite, rewrite_if};

/// Wrong ends, sequences and workspace rows of chunks; partials that are left out or have wrong weights.
pub const CHUNKS: &[Mutation] = mutations! { Group::Sequences;
    "ampere": "chunk-ends-one-key-late", "a chunk has the first key of the next one too" =>
        |kernel| longer_chunk(kernel, 1);
    "ampere": "chunk-ends-one-block-early", "the last block of keys of a chunk is left out" =>
        |kernel| longer_chunk(kernel, -32);
    "ampere": "chunk-begins-one-late", "every chunk is taken as the next one" => next_chunk;
    "ampere": "last-chunk-not-computed", "the number of chunks of a sequence is rounded down" => rounded_down;
    "ampere": "chunk-of-the-sequence-before", "the first chunk of a sequence is taken as one more of the sequence before" =>
        |kernel| change(kernel, Find::every(&["find"], |op| is_compare(op, Compare::Gt)), |op| set_compare(op, Compare::Ge));
    "ampere": "chunk-count-of-another-sequence", "every sequence has as many chunks as the first" =>
        |kernel| change(kernel, Find::nth(&["find"], is_broadcast, 1), from_lane_zero);
    "ampere": "chunk-numbered-from-the-batch", "chunks are counted from the beginning of the batch" =>
        |kernel| change(kernel, Find::nth(&["find"], is_broadcast, 3), from_lane_zero);
    "ampere": "chunk-partials-in-one-place", "the partials of all chunks are stored as those of the first" =>
        |kernel| capped(kernel, "rows", 0);
    "ampere": "chunk-partial-of-the-next-row", "a partial is stored as that of the next row" => |kernel| next_row(kernel);
    "ampere": "one-chunk-stored-as-partial", "a sequence of one chunk is stored in the workspace and not in the output" =>
        |kernel| change(kernel, Find::nth(&["epilogue"], |op| is_compare(op, Compare::Gt), 0), |op| set_compare(op, Compare::Ge));
    "combine": "last-chunk-skipped", "the partial of the last chunk has no weight" =>
        |kernel| one_fewer(kernel, Find::nth(&["splits"], |op| is_compare(op, Compare::Lt), 1));
    "combine": "ragged-chunk-skipped", "the number of chunks is rounded down" => rounded_down;
    "combine": "chunk-weight-of-another", "the second chunk is added with the weight of the first" =>
        |kernel| change(kernel, Find::nth(&["splits"], is_broadcast, 1), from_lane_zero);
    "combine": "chunk-partial-of-the-next-row", "a partial is read from the next row" => |kernel| next_row(kernel);
    "combine": "one-chunk-combined", "a sequence of one chunk, which has no partial, is combined too" =>
        |kernel| change(kernel, Find::nth(&["prologue"], |op| is_compare(op, Compare::Gt), 0), |op| set_compare(op, Compare::Ge));
};

/// More than 16 and more than 32 sequences, of which a warp scans 32 at a time.
pub const SCANS: &[Mutation] = mutations! { Group::Scans;
    "ampere": "scan-of-16", "units of sequences more than 16 before are not counted" => scan_of_16;
    "ampere": "scan-again", "the second scan has the sequences of the first" => scan_again;
    "hopper": "scan-of-16", "units of sequences more than 16 before are not counted" => scan_of_16;
    "hopper": "scan-again", "the second scan has the sequences of the first" => scan_again;
};

/// The last step of the prefix sum adds nothing.
fn scan_of_16(kernel: &mut Kernel) -> usize {
    let half = Operand::Constant(16);
    let is_last = |op: &Op| matches!(op, Op::Shuffle { mode: ShuffleMode::Up, index, .. } if *index == half);
    rewrite_if(kernel, is_last, |_, mut instruction| {
        if let Op::Shuffle { ty, d, .. } = instruction.op {
            instruction.op = Op::Mov { ty, d, a: Operand::Constant(0) };
        }
        vec![instruction]
    })
}

/// The sequence of a lane is that of the first scan, whichever scan it is.
fn scan_again(kernel: &mut Kernel) -> usize {
    let mut first = None;
    rewrite(kernel, Find::nth(&["scan"], |op| matches!(op, Op::Add { ty: Type::U32, .. }), 0), |_, instruction| {
        if let Op::Add { a, .. } = instruction.op {
            first = Some(a);
        }
        vec![instruction]
    });
    let is_sequence = |op: &Op| matches!(op, Op::Add { a, b: Operand::Register(_), .. } if Some(*a) == first);
    rewrite_if(kernel, is_sequence, |_, mut instruction| {
        if let Op::Add { ty, d, b, .. } = instruction.op {
            instruction.op = Op::Mov { ty, d, a: b };
        }
        vec![instruction]
    })
}

fn is_broadcast(op: &Op) -> bool {
    matches!(op, Op::Shuffle { mode: ShuffleMode::Index, .. })
}

fn from_lane_zero(op: &mut Op) {
    if let Op::Shuffle { index, .. } = op {
        *index = Operand::Constant(0);
    }
}

/// Changes the keys from the first of a chunk to its end.
fn longer_chunk(kernel: &mut Kernel, keys: i32) -> usize {
    let Some(chunk_keys) = parameter(kernel, "chunk_keys").map(Operand::Register) else { return 0 };
    let converts = |op: &Op| matches!(op, Op::Reinterpret { to: Type::S32, a, .. } if *a == chunk_keys);
    rewrite_if(kernel, converts, |_, instruction| {
        let Op::Reinterpret { d, .. } = instruction.op else { return vec![instruction] };
        let (a, b) = (Operand::Register(d), Operand::Constant(u64::from(keys.cast_unsigned())));
        let longer = Instruction { op: Op::Add { ty: Type::S32, d, a, b }, ..instruction.clone() };
        vec![instruction, longer]
    })
}

/// The first key of a chunk is that of the next.
fn next_chunk(kernel: &mut Kernel) -> usize {
    let Some(chunk_keys) = parameter(kernel, "chunk_keys").map(Operand::Register) else { return 0 };
    let multiplies = |op: &Op| matches!(op, Op::Mul { ty: Type::U32, b, .. } if *b == chunk_keys);
    rewrite_if(kernel, multiplies, |_, mut instruction| {
        let Op::Mul { ty, d, a, b } = instruction.op else { return vec![instruction] };
        instruction.op = Op::Mad { ty, d, a, b, c: b };
        vec![instruction]
    })
}

/// Keys over those of a chunk are rounded down instead of up.
fn rounded_down(kernel: &mut Kernel) -> usize {
    let Some(chunk_keys) = parameter(kernel, "chunk_keys").map(Operand::Register) else { return 0 };
    let takes_one =
        |op: &Op| matches!(op, Op::Sub { ty: Type::U32, a, b: Operand::Constant(1), .. } if *a == chunk_keys);
    rewrite_if(kernel, takes_one, |_, mut instruction| {
        if let Op::Sub { b, .. } = &mut instruction.op {
            *b = chunk_keys;
        }
        vec![instruction]
    })
}

/// The index of a partial is one row further.
fn next_row(kernel: &mut Kernel) -> usize {
    let Some(rows) = parameter(kernel, "rows").map(Operand::Register) else { return 0 };
    let indexes = |op: &Op| matches!(op, Op::Mad { ty: Type::U64, b, .. } if *b == rows);
    rewrite_if(kernel, indexes, |_, instruction| {
        let Op::Mad { ty, d, .. } = instruction.op else { return vec![instruction] };
        let further = Op::Add { ty, d, a: Operand::Register(d), b: Operand::Constant(1) };
        vec![instruction.clone(), Instruction { op: further, ..instruction }]
    })
}

/// Comparisons of an index with a count take the count less one.
pub(super) fn one_fewer(kernel: &mut Kernel, find: Find) -> usize {
    rewrite(kernel, find, |kernel, mut instruction| {
        let Op::SetPredicate { ty, b, .. } = &mut instruction.op else { return vec![instruction] };
        let (ty, count) = (*ty, *b);
        let fewer = kernel.add_register(ty, instruction.origin.section);
        *b = Operand::Register(fewer);
        let op = Op::Sub { ty, d: fewer, a: count, b: Operand::Constant(1) };
        vec![Instruction { op, guard: None, ..instruction.clone() }, instruction]
    })
}
