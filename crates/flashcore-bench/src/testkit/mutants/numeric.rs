//! Numeric bugs, and bugs that come late: truncated instead of rounded, slightly off, right until the n-th time.

use core::f32::consts::LN_2;

use flashcore_ir::{Compare, Guard, Instruction, Kernel, Op, Operand, RegisterId, Space, Type};

use super::Group;
use super::catalogue::{Mutation, is_mul, mutations};
use super::edit::{Find, change_from, drop, parameter, rewrite, rewrite_if};
use super::hopper::{is_cluster_wait, is_mbarrier_wait};

/// Cut instead of rounded, slightly off.
pub const NUMERIC: &[Mutation] = mutations! { Group::Numeric;
    "ampere": "p-truncated", "P is truncated to 16 bits instead of rounded" =>
        |kernel| rewrite(kernel, Find::every(&["output"], is_pair), cut_pair);
    "ampere": "output-truncated", "the output is truncated to 16 bits instead of rounded" =>
        |kernel| rewrite(kernel, Find::every(&["stage output"], is_pair), cut_pair);
    "scalar": "output-truncated", "the output is truncated to 16 bits instead of rounded" =>
        |kernel| rewrite(kernel, Find::every(&["epilogue"], is_rounding), cut_single);
    "hopper": "p-truncated", "P is truncated to 16 bits instead of rounded" => |kernel| {
        rewrite(kernel, Find::every(&["first softmax"], is_pair), cut_pair)
            + rewrite(kernel, Find::every(&["full block"], is_pair), cut_pair)
            + rewrite(kernel, Find::every(&["partial block"], is_pair), cut_pair)
    };
    "hopper": "output-truncated", "the output is truncated to 16 bits instead of rounded" => |kernel| {
        rewrite(kernel, Find::every(&["write output"], is_pair), cut_pair)
            + rewrite(kernel, Find::every(&["store output"], is_pair), cut_pair)
    };
    "scalar": "last-key-of-64n-plus-1", "the last key is left out where there are 64 n + 1" =>
        |kernel| last_key_dropped(kernel);
    "ampere": "last-key-of-64n-plus-1", "the last key is left out where there are 64 n + 1" =>
        |kernel| last_key_dropped(kernel);
    "ampere": "log-sum-exp-off-by-3e-5", "the log-sum-exp is 3e-5 too large" =>
        |kernel| shifted_lse(kernel, 3e-5);
    "ampere": "log-sum-exp-scaled", "the log-sum-exp is too large by 1 in 50,000" =>
        |kernel| scaled_lse(kernel);
    "ampere": "lse-in-base-2", "the LSE is in base 2 where the natural one is wanted" => |kernel| base2_lse(kernel);
    "hopper": "lse-in-base-2", "the LSE is in base 2 where the natural one is wanted" => |kernel| base2_lse(kernel);
    "hopper": "last-key-of-64n-plus-1", "the last key is left out where there are 64 n + 1" =>
        |kernel| last_key_dropped(kernel);
    "hopper": "log-sum-exp-off-by-3e-5", "the log-sum-exp is 3e-5 too large" =>
        |kernel| shifted_lse(kernel, 3e-5);
    "hopper": "log-sum-exp-scaled", "the log-sum-exp is too large by 1 in 50,000" =>
        |kernel| scaled_lse(kernel);
};

/// Right until the n-th time.
pub const LATE: &[Mutation] = mutations! { Group::Late;
    "hopper": "keys-parity-from-round-3", "the producer of keys waits for the wrong phase from the third time on" =>
        |kernel| wrong_parity_from(kernel, Find::every(&["producer", "keys", "producer acquire"], is_mbarrier_wait), 2);
    "hopper": "keys-parity-from-round-8", "the producer of keys waits for the wrong phase from the eighth time on" =>
        |kernel| wrong_parity_from(kernel, Find::every(&["producer", "keys", "producer acquire"], is_mbarrier_wait), 7);
    "hopper": "values-parity-from-round-3", "the producer of values waits for the wrong phase from the third time on" =>
        |kernel| wrong_parity_from(kernel, Find::every(&["producer", "values", "producer acquire"], is_mbarrier_wait), 2);
    "hopper": "values-parity-from-round-8", "the producer of values waits for the wrong phase from the eighth time on" =>
        |kernel| wrong_parity_from(kernel, Find::every(&["producer", "values", "producer acquire"], is_mbarrier_wait), 7);
    "hopper": "keys-read-parity-from-round-3", "a consumer of keys waits for the wrong phase from the third time on" =>
        |kernel| wrong_parity_from(kernel, Find::nth(&["full block", "consumer wait"], is_mbarrier_wait, 0), 2);
    "hopper": "keys-read-parity-from-round-8", "a consumer of keys waits for the wrong phase from the eighth time on" =>
        |kernel| wrong_parity_from(kernel, Find::nth(&["full block", "consumer wait"], is_mbarrier_wait, 0), 7);
    "hopper": "values-read-parity-from-round-3", "a consumer of values waits for the wrong phase from the third time on" =>
        |kernel| wrong_parity_from(kernel, Find::nth(&["full block", "consumer wait"], is_mbarrier_wait, 1), 2);
    "hopper": "values-read-parity-from-round-8", "a consumer of values waits for the wrong phase from the eighth time on" =>
        |kernel| wrong_parity_from(kernel, Find::nth(&["full block", "consumer wait"], is_mbarrier_wait, 1), 7);
    "hopper": "query-parity-from-round-3", "the producer of queries waits for the wrong phase from the third time on" =>
        |kernel| wrong_parity_from(kernel, Find::every(&["producer", "query", "producer acquire"], is_mbarrier_wait), 2);
    "hopper": "query-parity-from-round-5", "the producer of queries waits for the wrong phase from the fifth time on" =>
        |kernel| wrong_parity_from(kernel, Find::every(&["producer", "query", "producer acquire"], is_mbarrier_wait), 4);
    "hopper": "query-read-parity-from-round-3", "a consumer of queries waits for the wrong phase from the third time on" =>
        |kernel| wrong_parity_from(kernel, Find::every(&["query", "consumer wait"], is_mbarrier_wait), 2);
    "hopper": "query-read-parity-from-round-5", "a consumer of queries waits for the wrong phase from the fifth time on" =>
        |kernel| wrong_parity_from(kernel, Find::every(&["query", "consumer wait"], is_mbarrier_wait), 4);
    "ampere": "sum-not-rescaled-from-tile-10", "the sum keeps the scale of an old row max from the tenth tile on" =>
        |kernel| skipped_from(kernel, Find::nth(&["softmax", "rescale"], is_mul, 0), 9);
    "hopper": "sum-not-rescaled-from-tile-10", "the sum keeps the scale of an old row max from the tenth tile on" =>
        |kernel| skipped_from(kernel, Find::nth(&["full block", "exp and sum"], is_mul, 0), 8);
    "hopper": "first-head-from-round-5", "persistent CTAs take the first head from their fifth tile on" =>
        |kernel| zeroed_from(kernel, Find::nth(&["scheduler"], is_u32_sub, 1), 4);
};

/// Clusters whose CTAs each have one warpgroup for the keys of a row.
pub const CLUSTERS: &[Mutation] = mutations! { Group::Clusters;
    "hopper": "partials-read-before-they-are-stored", "the first CTA does not wait for the partial of the other" =>
        |kernel| drop(kernel, Find::nth(&["reduce cluster"], is_cluster_wait, 1));
    "hopper": "sent-to-a-cta-that-has-not-begun", "a CTA sends without knowing that the other is there" =>
        |kernel| drop(kernel, Find::nth(&["reduce cluster"], is_cluster_wait, 0));
    "hopper": "no-cta-waits", "no CTA waits for the other" =>
        |kernel| drop(kernel, Find::every(&["reduce cluster"], is_cluster_wait));
    "hopper": "a-cta-sends-nothing", "what the other CTA has is not sent" =>
        |kernel| drop(kernel, Find::every(&["reduce cluster"], |op| matches!(op, Op::Store { space: Space::Cluster, .. })));
};

fn is_pair(op: &Op) -> bool {
    matches!(op, Op::ConvertPair { .. })
}

fn is_rounding(op: &Op) -> bool {
    matches!(op, Op::Convert { from: Type::F32, to: Type::F16 | Type::Bf16, .. })
}

fn is_u32_sub(op: &Op) -> bool {
    matches!(op, Op::Sub { ty: Type::U32, .. })
}

/// The bits of an `f32` that a 16-bit type has.
const fn kept(to: Type) -> u64 {
    match to {
        Type::F16 | Type::F16x2 => 0xffff_e000,
        _ => 0xffff_0000,
    }
}

/// A number with its lowest bits truncated.
fn cut(kernel: &mut Kernel, instruction: &Instruction, number: &mut Operand, keep: u64) -> [Instruction; 3] {
    let section = instruction.origin.section;
    let [bits, kept] = [(); 2].map(|()| kernel.add_register(Type::U32, section));
    let result = kernel.add_register(Type::F32, section);
    let ops = [
        Op::Reinterpret { to: Type::U32, from: Type::F32, d: bits, a: *number },
        Op::And { ty: Type::U32, d: kept, a: Operand::Register(bits), b: Operand::Constant(keep) },
        Op::Reinterpret { to: Type::F32, from: Type::U32, d: result, a: Operand::Register(kept) },
    ];
    *number = Operand::Register(result);
    ops.map(|op| Instruction { op, ..instruction.clone() })
}

fn cut_pair(kernel: &mut Kernel, mut instruction: Instruction) -> Vec<Instruction> {
    let Op::ConvertPair { to, mut high, mut low, d } = instruction.op else { return vec![instruction] };
    let mut instructions = cut(kernel, &instruction, &mut high, kept(to)).to_vec();
    instructions.extend(cut(kernel, &instruction, &mut low, kept(to)));
    instruction.op = Op::ConvertPair { to, high, low, d };
    instructions.push(instruction);
    instructions
}

fn cut_single(kernel: &mut Kernel, mut instruction: Instruction) -> Vec<Instruction> {
    let Op::Convert { to, from, rounding, d, mut a } = instruction.op else { return vec![instruction] };
    let mut instructions = cut(kernel, &instruction, &mut a, kept(to)).to_vec();
    instruction.op = Op::Convert { to, from, rounding, d, a };
    instructions.push(instruction);
    instructions
}

fn is_natural(op: &Op) -> bool {
    matches!(op, Op::Mul { b: Operand::Constant(bits), .. } if *bits == u64::from(LN_2.to_bits()))
}

fn shifted_lse(kernel: &mut Kernel, by: f32) -> usize {
    rewrite_if(kernel, is_natural, |_, instruction| {
        let Op::Mul { ty, d, .. } = instruction.op else { return vec![instruction] };
        let shift = Op::Add { ty, d, a: Operand::Register(d), b: Operand::Constant(u64::from(by.to_bits())) };
        vec![instruction.clone(), Instruction { op: shift, ..instruction }]
    })
}

fn base2_lse(kernel: &mut Kernel) -> usize {
    rewrite_if(kernel, is_natural, |_, mut instruction| {
        if let Op::Mul { ty, d, a, .. } = instruction.op {
            instruction.op = Op::Mov { ty, d, a };
        }
        vec![instruction]
    })
}

fn scaled_lse(kernel: &mut Kernel) -> usize {
    rewrite_if(kernel, is_natural, |_, mut instruction| {
        if let Op::Mul { b, .. } = &mut instruction.op {
            *b = Operand::Constant(u64::from((LN_2 * 1.000_02).to_bits()));
        }
        vec![instruction]
    })
}

/// One less than the number of keys where that is one more than a multiple of 64, and more than 65.
fn last_key_dropped(kernel: &mut Kernel) -> usize {
    let Some(length) = parameter(kernel, "key_length") else { return 0 };
    let loads = |op: &Op| matches!(op, Op::LoadParam { d, .. } if *d == length);
    rewrite_if(kernel, loads, |kernel, instruction| {
        let section = instruction.origin.section;
        let [rest, one] = [(); 2].map(|()| kernel.add_register(Type::U32, section));
        let [is_one, is_long] = [(); 2].map(|()| kernel.add_register(Type::Pred, section));
        let both = kernel.add_register(Type::Pred, section);
        let (ty, number) = (Type::U32, Operand::Register(length));
        let of = |register: RegisterId| Operand::Register(register);
        let ops = [
            Op::And { ty, d: rest, a: number, b: Operand::Constant(63) },
            Op::SetPredicate { compare: Compare::Eq, ty, d: is_one, a: of(rest), b: Operand::Constant(1) },
            Op::SetPredicate { compare: Compare::Gt, ty, d: is_long, a: number, b: Operand::Constant(65) },
            Op::And { ty: Type::Pred, d: both, a: of(is_one), b: of(is_long) },
            Op::Select { ty, d: one, a: Operand::Constant(1), b: Operand::Constant(0), condition: vec![both] },
            Op::Sub { ty, d: length, a: number, b: of(one) },
        ];
        let more = ops.into_iter().map(|op| Instruction { op, ..instruction.clone() });
        core::iter::once(instruction.clone()).chain(more).collect()
    })
}

fn wrong_parity_from(kernel: &mut Kernel, find: Find, first: u64) -> usize {
    change_from(kernel, find, first, |kernel, is_late, mut instruction| {
        let Op::MbarrierWait { parity, .. } = &mut instruction.op else { return vec![instruction] };
        let section = instruction.origin.section;
        let [flip, wrong] = [(); 2].map(|()| kernel.add_register(Type::U32, section));
        let (ty, right) = (Type::U32, *parity);
        *parity = Operand::Register(wrong);
        let ops = [
            Op::Select { ty, d: flip, a: Operand::Constant(1), b: Operand::Constant(0), condition: vec![is_late] },
            Op::Xor { ty, d: wrong, a: right, b: Operand::Register(flip) },
        ];
        let mut instructions: Vec<_> =
            ops.into_iter().map(|op| Instruction { op, guard: None, ..instruction.clone() }).collect();
        instructions.push(instruction);
        instructions
    })
}

/// The instructions found do nothing from the time number `first` on.
pub(super) fn skipped_from(kernel: &mut Kernel, find: Find, first: u64) -> usize {
    change_from(kernel, find, first, |_, is_late, mut instruction| {
        instruction.guard = Some(Guard { predicate: is_late, negated: true });
        vec![instruction]
    })
}

/// The differences found are zero from the time number `first` on.
fn zeroed_from(kernel: &mut Kernel, find: Find, first: u64) -> usize {
    change_from(kernel, find, first, |_, is_late, instruction| {
        let Op::Sub { ty, d, .. } = instruction.op else { return vec![instruction] };
        let (a, b) = (Operand::Constant(0), Operand::Register(d));
        let zero = Op::Select { ty, d, a, b, condition: vec![is_late] };
        vec![instruction.clone(), Instruction { op: zero, ..instruction }]
    })
}
