//! Bugs in the form of the LSE: the wrong base, the sink left in.

use core::f32::consts::LN_2;

use flashcore_ir::{Kernel, Op, Operand, RegisterId, Type};

use super::Group;
use super::catalogue::{Mutation, mutations};
use super::edit::{Find, rewrite, rewrite_if};

/// The wrong base, the sink left in, where the LSE is wanted in base 2 and without the sink.
pub const LSE_FORMS: &[Mutation] = mutations! { Group::LseForms;
    "ampere": "lse-natural", "the LSE is natural where base 2 is wanted" => |kernel| natural(kernel);
    "hopper": "lse-natural", "the LSE is natural where base 2 is wanted" => |kernel| natural(kernel);
    "combine": "lse-natural", "the LSE is natural where base 2 is wanted" => |kernel| natural(kernel);
    "ampere": "sink-left-in-lse", "the LSE includes the sink where it must not" => |kernel| sink_left_in(kernel);
    "hopper": "sink-left-in-lse", "the LSE includes the sink where it must not" => |kernel| sink_left_in(kernel);
    "combine": "sink-left-in-lse", "the LSE includes the sink where it must not" => |kernel| sink_left_in(kernel);
};

fn is_log2(op: &Op) -> bool {
    matches!(op, Op::Log2 { .. })
}

/// The results of logarithms, which only an LSE has.
fn logarithms(kernel: &Kernel) -> Vec<RegisterId> {
    let mut found = Vec::new();
    kernel.instructions(&mut |instruction| {
        if let Op::Log2 { d, .. } = instruction.op {
            found.push(d);
        }
    });
    found
}

/// True for the sum of a row max and one of the logarithms.
fn is_lse(op: &Op, logarithms: &[RegisterId]) -> bool {
    matches!(op, Op::Add { b: Operand::Register(b), .. } if logarithms.contains(b))
}

fn natural(kernel: &mut Kernel) -> usize {
    let logarithms = logarithms(kernel);
    rewrite_if(
        kernel,
        |op| is_lse(op, &logarithms),
        |_, instruction| {
            let Op::Add { d, .. } = instruction.op else { return vec![instruction] };
            let b = Operand::Constant(u64::from(LN_2.to_bits()));
            let mut scaled = instruction.clone();
            scaled.op = Op::Mul { ty: Type::F32, d, a: Operand::Register(d), b };
            vec![instruction, scaled]
        },
    )
}

/// Moves each LSE to where the sink is in the row max and the row sum.
fn sink_left_in(kernel: &mut Kernel) -> usize {
    let logarithms = logarithms(kernel);
    let mut raised = Vec::new();
    let count = rewrite(kernel, Find::every(&["sink"], |op| matches!(op, Op::Max { .. })), |_, instruction| {
        if let Op::Max { d, a: Operand::Register(row_max), .. } = instruction.op {
            raised.push((row_max, d));
        }
        vec![instruction]
    });
    let (mut moved, mut was_sink) = (Vec::new(), false);
    rewrite_if(
        kernel,
        |_| true,
        |kernel, mut instruction| {
            if is_log2(&instruction.op) || is_lse(&instruction.op, &logarithms) {
                if let Op::Add { a, .. } = &mut instruction.op
                    && let Some((_, with_sink)) = raised.iter().find(|(row_max, _)| *a == Operand::Register(*row_max))
                {
                    *a = Operand::Register(*with_sink);
                }
                moved.push(instruction);
                return Vec::new();
            }
            let is_sink = kernel.section(instruction.origin.section).path.last().is_some_and(|name| *name == "sink");
            // Past the sinks of all rows that the LSE was computed of.
            let mut instructions = if was_sink && !is_sink { std::mem::take(&mut moved) } else { Vec::new() };
            was_sink = is_sink;
            instructions.push(instruction);
            instructions
        },
    );
    count
}
