//! Addressing bugs: the wrong batch, head, row, key or split, and offsets that overflow 32 bits.

use flashcore_ir::{Compare, Instruction, Kernel, Op, Operand, RegisterId, Type};

use super::Group;
use super::catalogue::{Mutation, mutations};
use super::edit::{Find, parameter, rewrite, rewrite_if};

/// The wrong batch, head, row or key.
pub const ADDRESSING: &[Mutation] = mutations! { Group::Addressing;
    "scalar": "query-of-another-batch", "batches from the fourth on have the query of the fourth" =>
        |kernel| capped(kernel, "query_batch_stride", 3);
    "scalar": "key-of-another-batch", "batches from the fourth on have the keys of the fourth" =>
        |kernel| capped(kernel, "key_batch_stride", 3);
    "scalar": "value-of-another-batch", "batches from the fourth on have the values of the fourth" =>
        |kernel| capped(kernel, "value_batch_stride", 3);
    "scalar": "output-of-another-batch", "batches from the fourth on store where the fourth does" =>
        |kernel| capped(kernel, "output_batch_stride", 3);
    "scalar": "bias-of-another-batch", "batches from the fourth on have the bias of the fourth" =>
        |kernel| capped(kernel, "bias_batch_stride", 3);
    "scalar": "query-of-another-head", "heads from the second on have the query of the second" =>
        |kernel| capped(kernel, "query_head_stride", 1);
    "scalar": "key-of-another-head", "all heads have the keys of the first" =>
        |kernel| capped(kernel, "key_head_stride", 0);
    "scalar": "value-of-another-head", "all heads have the values of the first" =>
        |kernel| capped(kernel, "value_head_stride", 0);
    "scalar": "output-of-another-head", "heads from the second on store where the second does" =>
        |kernel| capped(kernel, "output_head_stride", 1);
    "scalar": "bias-of-another-head", "heads from the second on have the bias of the second" =>
        |kernel| capped(kernel, "bias_head_stride", 1);
    "scalar": "bias-of-another-row", "rows from the seventeenth on have the bias of the sixteenth" =>
        |kernel| capped(kernel, "bias_row_stride", 15);
    "scalar": "bias-of-another-key", "keys from the 65th on have the bias of the 64th" =>
        |kernel| capped(kernel, "bias_key_stride", 63);
    "ampere": "query-of-another-batch", "batches from the fourth on have the query of the fourth" =>
        |kernel| capped(kernel, "query_batch_stride", 3);
    "ampere": "key-of-another-batch", "batches from the fourth on have the keys of the fourth" =>
        |kernel| capped(kernel, "key_batch_stride", 3);
    "ampere": "value-of-another-batch", "batches from the fourth on have the values of the fourth" =>
        |kernel| capped(kernel, "value_batch_stride", 3);
    "ampere": "output-of-another-batch", "batches from the fourth on store where the fourth does" =>
        |kernel| capped(kernel, "output_batch_stride", 3);
    "ampere": "bias-of-another-batch", "batches from the fourth on have the bias of the fourth" =>
        |kernel| capped(kernel, "bias_batch_stride", 3);
    "ampere": "query-of-another-head", "heads from the second on have the query of the second" =>
        |kernel| capped(kernel, "query_head_stride", 1);
    "ampere": "key-of-another-head", "all heads have the keys of the first" =>
        |kernel| capped(kernel, "key_head_stride", 0);
    "ampere": "value-of-another-head", "all heads have the values of the first" =>
        |kernel| capped(kernel, "value_head_stride", 0);
    "ampere": "output-of-another-head", "heads from the second on store where the second does" =>
        |kernel| capped(kernel, "output_head_stride", 1);
    "ampere": "bias-of-another-head", "heads from the second on have the bias of the second" =>
        |kernel| capped(kernel, "bias_head_stride", 1);
    "ampere": "bias-of-another-row", "rows from the seventeenth on have the bias of the sixteenth" =>
        |kernel| capped(kernel, "bias_row_stride", 15);
    "ampere": "bias-of-another-key", "keys from the 65th on have the bias of the 64th" =>
        |kernel| capped(kernel, "bias_key_stride", 63);
    "scalar": "length-of-another-batch", "batches from the fourth on have the key length of the fourth" =>
        |kernel| capped_index(kernel, "seqused_k", 3);
    "scalar": "slope-of-another-head", "heads from the third on have the slope of the third" =>
        |kernel| capped_index(kernel, "alibi_slopes", 2);
    "scalar": "sink-of-another-head", "heads from the third on have the sink of the third" =>
        |kernel| capped_index(kernel, "sinks", 2);
    "scalar": "first-head-of-a-group", "in groups of 3, 7 and so on the first query head reads the key head before" =>
        |kernel| first_of_group_before(kernel);
    "ampere": "length-of-another-batch", "batches from the fourth on have the key length of the fourth" =>
        |kernel| capped_index(kernel, "seqused_k", 3);
    "ampere": "slope-of-another-head", "heads from the third on have the slope of the third" =>
        |kernel| capped_index(kernel, "alibi_slopes", 2);
    "ampere": "sink-of-another-head", "heads from the third on have the sink of the third" =>
        |kernel| capped_index(kernel, "sinks", 2);
    "ampere": "first-head-of-a-group", "in groups of 3, 7 and so on the first query head reads the key head before" =>
        |kernel| first_of_group_before(kernel);
    "hopper": "length-of-another-batch", "batches from the fourth on have the key length of the fourth" =>
        |kernel| capped_index(kernel, "seqused_k", 3);
    "hopper": "slope-of-another-head", "heads from the third on have the slope of the third" =>
        |kernel| capped_index(kernel, "alibi_slopes", 2);
    "hopper": "sink-of-another-head", "heads from the third on have the sink of the third" =>
        |kernel| capped_index(kernel, "sinks", 2);
    "hopper": "first-head-of-a-group", "in groups of 3, 7 and so on the first query head reads the key head before" =>
        |kernel| first_of_group_before(kernel);
    "hopper": "bias-of-another-batch", "batches from the fourth on have the bias of the fourth" =>
        |kernel| capped(kernel, "bias_batch_stride", 3);
    "hopper": "bias-of-another-head", "heads from the second on have the bias of the second" =>
        |kernel| capped(kernel, "bias_head_stride", 1);
    "hopper": "bias-of-another-row", "rows from the seventeenth on have the bias of the sixteenth" =>
        |kernel| capped(kernel, "bias_row_stride", 15);
    "hopper": "query-of-another-batch", "batches from the fourth on have the query of the fourth" =>
        |kernel| capped_coordinate(kernel, &["producer", "query", "copy"], 3, 3);
    "hopper": "query-of-another-head", "heads from the second on have the query of the second" =>
        |kernel| capped_coordinate(kernel, &["producer", "query", "copy"], 2, 1);
    "hopper": "key-of-another-batch", "batches from the fourth on have the keys of the fourth" =>
        |kernel| capped_coordinate(kernel, &["producer", "keys", "copy"], 3, 3);
    "hopper": "key-of-another-head", "all heads have the keys of the first" =>
        |kernel| capped_coordinate(kernel, &["producer", "keys", "copy"], 2, 0);
    "hopper": "value-of-another-batch", "batches from the fourth on have the values of the fourth" =>
        |kernel| capped_coordinate(kernel, &["producer", "values", "copy"], 3, 3);
    "hopper": "value-of-another-head", "all heads have the values of the first" =>
        |kernel| capped_coordinate(kernel, &["producer", "values", "copy"], 2, 0);
};

/// Offsets of 4 GiB and more.
pub const FAR: &[Mutation] = mutations! { Group::Far;
    "scalar": "query-row-in-32-bits", "offsets of rows of the query are truncated to 32 bits" =>
        |kernel| narrow(kernel, "query_row_stride");
    "scalar": "query-head-in-32-bits", "offsets of heads of the query are truncated to 32 bits" =>
        |kernel| narrow(kernel, "query_head_stride");
    "scalar": "query-batch-in-32-bits", "offsets of batches of the query are truncated to 32 bits" =>
        |kernel| narrow(kernel, "query_batch_stride");
    "scalar": "key-row-in-32-bits", "offsets of rows of the key are truncated to 32 bits" =>
        |kernel| narrow(kernel, "key_row_stride");
    "scalar": "key-head-in-32-bits", "offsets of heads of the key are truncated to 32 bits" =>
        |kernel| narrow(kernel, "key_head_stride");
    "scalar": "key-batch-in-32-bits", "offsets of batches of the key are truncated to 32 bits" =>
        |kernel| narrow(kernel, "key_batch_stride");
    "scalar": "value-row-in-32-bits", "offsets of rows of the value are truncated to 32 bits" =>
        |kernel| narrow(kernel, "value_row_stride");
    "scalar": "value-head-in-32-bits", "offsets of heads of the value are truncated to 32 bits" =>
        |kernel| narrow(kernel, "value_head_stride");
    "scalar": "value-batch-in-32-bits", "offsets of batches of the value are truncated to 32 bits" =>
        |kernel| narrow(kernel, "value_batch_stride");
    "scalar": "output-row-in-32-bits", "offsets of rows of the output are truncated to 32 bits" =>
        |kernel| narrow(kernel, "output_row_stride");
    "scalar": "output-head-in-32-bits", "offsets of heads of the output are truncated to 32 bits" =>
        |kernel| narrow(kernel, "output_head_stride");
    "scalar": "output-batch-in-32-bits", "offsets of batches of the output are truncated to 32 bits" =>
        |kernel| narrow(kernel, "output_batch_stride");
    "ampere": "query-row-in-32-bits", "offsets of rows of the query are truncated to 32 bits" =>
        |kernel| narrow(kernel, "query_row_stride");
    "ampere": "query-head-in-32-bits", "offsets of heads of the query are truncated to 32 bits" =>
        |kernel| narrow(kernel, "query_head_stride");
    "ampere": "query-batch-in-32-bits", "offsets of batches of the query are truncated to 32 bits" =>
        |kernel| narrow(kernel, "query_batch_stride");
    "ampere": "key-row-in-32-bits", "offsets of rows of the key are truncated to 32 bits" =>
        |kernel| narrow(kernel, "key_row_stride");
    "ampere": "key-head-in-32-bits", "offsets of heads of the key are truncated to 32 bits" =>
        |kernel| narrow(kernel, "key_head_stride");
    "ampere": "key-batch-in-32-bits", "offsets of batches of the key are truncated to 32 bits" =>
        |kernel| narrow(kernel, "key_batch_stride");
    "ampere": "value-row-in-32-bits", "offsets of rows of the value are truncated to 32 bits" =>
        |kernel| narrow(kernel, "value_row_stride");
    "ampere": "value-head-in-32-bits", "offsets of heads of the value are truncated to 32 bits" =>
        |kernel| narrow(kernel, "value_head_stride");
    "ampere": "value-batch-in-32-bits", "offsets of batches of the value are truncated to 32 bits" =>
        |kernel| narrow(kernel, "value_batch_stride");
    "ampere": "output-row-in-32-bits", "offsets of rows of the output are truncated to 32 bits" =>
        |kernel| narrow(kernel, "output_row_stride");
    "ampere": "output-head-in-32-bits", "offsets of heads of the output are truncated to 32 bits" =>
        |kernel| narrow(kernel, "output_head_stride");
    "ampere": "output-batch-in-32-bits", "offsets of batches of the output are truncated to 32 bits" =>
        |kernel| narrow(kernel, "output_batch_stride");
    "scalar": "bias-key-in-32-bits", "offsets of keys of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_key_stride");
    "scalar": "bias-row-in-32-bits", "offsets of rows of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_row_stride");
    "scalar": "bias-head-in-32-bits", "offsets of heads of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_head_stride");
    "scalar": "bias-batch-in-32-bits", "offsets of batches of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_batch_stride");
    "scalar": "log-sum-exp-in-32-bits", "offsets of the log-sum-exp are truncated to 32 bits" =>
        |kernel| narrow_base(kernel, "lse");
    "ampere": "bias-key-in-32-bits", "offsets of keys of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_key_stride");
    "ampere": "bias-row-in-32-bits", "offsets of rows of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_row_stride");
    "ampere": "bias-head-in-32-bits", "offsets of heads of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_head_stride");
    "ampere": "bias-batch-in-32-bits", "offsets of batches of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_batch_stride");
    "ampere": "log-sum-exp-in-32-bits", "offsets of the log-sum-exp are truncated to 32 bits" =>
        |kernel| narrow_base(kernel, "lse");
    "hopper": "bias-key-in-32-bits", "offsets of keys of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_key_stride");
    "hopper": "bias-row-in-32-bits", "offsets of rows of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_row_stride");
    "hopper": "bias-head-in-32-bits", "offsets of heads of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_head_stride");
    "hopper": "bias-batch-in-32-bits", "offsets of batches of the bias are truncated to 32 bits" =>
        |kernel| narrow(kernel, "bias_batch_stride");
    "hopper": "log-sum-exp-in-32-bits", "offsets of the log-sum-exp are truncated to 32 bits" =>
        |kernel| narrow_base(kernel, "lse");
    "ampere": "key-steps-in-32-bits", "steps from rows to rows of the key are truncated to 32 bits" =>
        |kernel| narrow_step(kernel, "key_row_stride");
    "ampere": "value-steps-in-32-bits", "steps from rows to rows of the value are truncated to 32 bits" =>
        |kernel| narrow_step(kernel, "value_row_stride");
    "ampere": "workspace-in-32-bits", "offsets of split-KV partials are truncated to 32 bits" =>
        |kernel| narrow_base(kernel, "workspace");
    "combine": "workspace-in-32-bits", "offsets of split-KV partials are truncated to 32 bits" =>
        |kernel| narrow_base(kernel, "workspace");
};

/// Split-KV.
pub const PARTS: &[Mutation] = mutations! { Group::Parts;
    "combine": "splits-from-the-32nd-on", "splits from the 33rd on are read as the 32nd" =>
        |kernel| capped(kernel, "rows", 31);
    "combine": "splits-begin-again", "splits from the 33rd on are read as the first ones" =>
        |kernel| masked(kernel, "rows", 31);
    "ampere": "splits-stored-as-others", "splits from the 33rd on are stored as the 32nd" =>
        |kernel| capped(kernel, "rows", 31);
    "combine": "split-sums-forgotten", "the row sums of the splits are not added up" =>
        |kernel| rewrite(kernel, Find::nth(&["splits"], |op| matches!(op, Op::Fma { .. }), 0), |_, _| Vec::new());
};

/// Clamps an index that is multiplied by a stride to `most`.
pub(super) fn capped(kernel: &mut Kernel, stride: &str, most: u64) -> usize {
    with_factor(kernel, stride, |d, a| Op::Min { ty: Type::U64, d, a, b: Operand::Constant(most) })
}

/// Keeps some bits of an index that is multiplied by a stride.
fn masked(kernel: &mut Kernel, stride: &str, bits: u64) -> usize {
    with_factor(kernel, stride, |d, a| Op::And { ty: Type::U64, d, a, b: Operand::Constant(bits) })
}

fn with_factor(kernel: &mut Kernel, stride: &str, other: impl Fn(RegisterId, Operand) -> Op) -> usize {
    let Some(stride) = parameter(kernel, stride).map(Operand::Register) else { return 0 };
    let multiplies = |op: &Op| matches!(op, Op::Mad { ty: Type::U64, b, .. } if *b == stride);
    rewrite_if(kernel, multiplies, |kernel, mut instruction| {
        let Op::Mad { a, .. } = &mut instruction.op else { return vec![instruction] };
        let changed = kernel.add_register(Type::U64, instruction.origin.section);
        let change = other(changed, *a);
        *a = Operand::Register(changed);
        vec![Instruction { op: change, ..instruction.clone() }, instruction]
    })
}

/// The index into an array of 4-byte elements becomes at most `most`.
pub(super) fn capped_index(kernel: &mut Kernel, array: &str, most: u64) -> usize {
    let Some(array) = parameter(kernel, array).map(Operand::Register) else { return 0 };
    let indexes = |op: &Op| matches!(op, Op::Mad { ty: Type::U64, c, .. } if *c == array);
    rewrite_if(kernel, indexes, |kernel, mut instruction| {
        let Op::Mad { a, .. } = &mut instruction.op else { return vec![instruction] };
        let changed = kernel.add_register(Type::U64, instruction.origin.section);
        let change = Op::Min { ty: Type::U64, d: changed, a: *a, b: Operand::Constant(most) };
        *a = Operand::Register(changed);
        vec![Instruction { op: change, ..instruction.clone() }, instruction]
    })
}

/// A coordinate of TMA loads becomes at most `most`.
fn capped_coordinate(kernel: &mut Kernel, section: &'static [&'static str], axis: usize, most: u64) -> usize {
    rewrite(kernel, Find::every(section, |op| matches!(op, Op::TensorLoad { .. })), |kernel, mut instruction| {
        let Op::TensorLoad { coordinates, .. } = &mut instruction.op else { return vec![instruction] };
        let changed = kernel.add_register(Type::S32, instruction.origin.section);
        let a = Operand::Register(coordinates[axis]);
        coordinates[axis] = changed;
        let change = Op::Min { ty: Type::S32, d: changed, a, b: Operand::Constant(most) };
        vec![Instruction { op: change, guard: None, ..instruction.clone() }, instruction]
    })
}

/// Takes one from a query head, if it can be, before it is divided by the size of a GQA group that is one less than a
/// multiple of four.
fn first_of_group_before(kernel: &mut Kernel) -> usize {
    let Some(group) = parameter(kernel, "heads_per_key_head").map(Operand::Register) else { return 0 };
    let divides = |op: &Op| matches!(op, Op::Div { ty: Type::U32, b, .. } if *b == group);
    rewrite_if(kernel, divides, |kernel, mut instruction| {
        let Op::Div { a, .. } = &mut instruction.op else { return vec![instruction] };
        let section = instruction.origin.section;
        let [bits, one, taken, changed] = [(); 4].map(|()| kernel.add_register(Type::U32, section));
        let is_odd = kernel.add_register(Type::Pred, section);
        let (ty, head) = (Type::U32, *a);
        *a = Operand::Register(changed);
        let ops = [
            Op::And { ty, d: bits, a: group, b: Operand::Constant(3) },
            Op::SetPredicate {
                compare: Compare::Eq,
                ty,
                d: is_odd,
                a: Operand::Register(bits),
                b: Operand::Constant(3),
            },
            Op::Select { ty, d: one, a: Operand::Constant(1), b: Operand::Constant(0), condition: vec![is_odd] },
            Op::Min { ty, d: taken, a: Operand::Register(one), b: head },
            Op::Sub { ty, d: changed, a: head, b: Operand::Register(taken) },
        ];
        let mut instructions: Vec<_> = ops.into_iter().map(|op| Instruction { op, ..instruction.clone() }).collect();
        instructions.push(instruction);
        instructions
    })
}

/// Truncates the product of an index and a stride to 32 bits before it is added to an address.
fn narrow(kernel: &mut Kernel, stride: &str) -> usize {
    let Some(stride) = parameter(kernel, stride).map(Operand::Register) else { return 0 };
    rewrite_if(kernel, |op| matches!(op, Op::Mad { ty: Type::U64, b, .. } if *b == stride), narrowed)
}

/// Truncates what is added to a base address to 32 bits.
fn narrow_base(kernel: &mut Kernel, base: &str) -> usize {
    let Some(base) = parameter(kernel, base).map(Operand::Register) else { return 0 };
    rewrite_if(kernel, |op| matches!(op, Op::Mad { ty: Type::U64, c, .. } if *c == base), narrowed)
}

const LOW_BITS: u64 = 0xffff_ffff;

fn narrowed(kernel: &mut Kernel, instruction: Instruction) -> Vec<Instruction> {
    let Op::Mad { ty, d, a, b, c } = instruction.op else { return vec![instruction] };
    let section = instruction.origin.section;
    let [product, low] = [(); 2].map(|()| kernel.add_register(ty, section));
    let ops = [
        Op::Mul { ty, d: product, a, b },
        Op::And { ty, d: low, a: Operand::Register(product), b: Operand::Constant(LOW_BITS) },
        Op::Add { ty, d, a: Operand::Register(low), b: c },
    ];
    ops.into_iter().map(|op| Instruction { op, ..instruction.clone() }).collect()
}

/// Multiples of a stride are truncated to 32 bits.
fn narrow_step(kernel: &mut Kernel, stride: &str) -> usize {
    let Some(stride) = parameter(kernel, stride).map(Operand::Register) else { return 0 };
    let multiplies = |op: &Op| matches!(op, Op::Mul { ty: Type::U64, a, .. } if *a == stride);
    rewrite_if(kernel, multiplies, |_, instruction| {
        let Op::Mul { ty, d, .. } = instruction.op else { return vec![instruction] };
        let cut = Op::And { ty, d, a: Operand::Register(d), b: Operand::Constant(LOW_BITS) };
        vec![instruction.clone(), Instruction { op: cut, ..instruction }]
    })
}
