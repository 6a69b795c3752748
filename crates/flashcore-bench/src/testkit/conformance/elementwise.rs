//! Cases of operations without memory: each thread loads operands, executes the operation, stores all its results.

use std::collections::BTreeMap;

use flashcore_ir::forms::{ANY, of_registers};
use flashcore_ir::{Arch, Op, Operand, RegisterId, Role, Slot, Type};

use super::case::{ConformanceCase, Tolerance};
use super::inputs::Fill;
use super::writer::{CTAS, THREADS, Writer};

/// `count` registers that [`Form`] fills in.
pub(super) fn any(count: usize) -> Vec<RegisterId> {
    vec![ANY; count]
}

/// An operation in one form.
pub(super) struct Form<'a> {
    /// Suffix of the row in its name: types and modifiers.
    pub(super) modifiers: String,
    /// Tolerance between machines.
    pub(super) tolerance: Tolerance,
    /// Contents of an operand, by its name; otherwise special and random values.
    pub(super) fill: &'a dyn Fn(&str) -> Option<Fill>,
    /// Threads of a CTA and CTAs.
    pub(super) launch: (u32, u32),
    /// The operation, with a register for each operand.
    pub(super) op: Op,
}

impl Form<'_> {
    /// A form compared bit by bit.
    pub(super) fn new(op: Op) -> Self {
        let modifiers = match &op {
            Op::Mov { ty, .. } => ty.to_string(),
            Op::Reinterpret { to, from, .. } => format!("{from} as {to}"),
            Op::SetPredicate { compare, ty, .. } => format!("{compare} {ty}"),
            Op::Convert { to, from, rounding, .. } => format!("{from} to {to} {rounding}"),
            Op::ConvertFp8 { to, .. } => format!("f32 to {to}"),
            Op::WidenFp8 { from, .. } => from.to_string(),
            Op::Shuffle { mode, control, ty, .. } => format!("{mode} {control:#06x} {ty}"),
            Op::Vote { mode, .. } => mode.to_string(),
            Op::ReduceWarp { op, ty, .. } => format!("{op} {ty}"),
            other => other.type_choice().map(|(ty, _)| ty.to_string()).unwrap_or_default(),
        };
        Self { modifiers, tolerance: Tolerance::Bits, fill: &|_| None, launch: (THREADS, CTAS), op }
    }

    /// The case of this form, whatever the verifier says.
    pub(super) fn case(&self) -> ConformanceCase {
        write(self, "", core::slice::from_ref(&self.op))
    }
}

/// Adds the cases of a form, if the verifier accepts it: with registers, and with constants where it takes them.
pub(super) fn add(list: &mut Vec<ConformanceCase>, form: &Form<'_>) {
    let case = form.case();
    if case.verified(Arch::Sm120).is_err() {
        return;
    }
    list.push(case);
    let with_constants = constants(&form.op);
    if !with_constants.is_empty() {
        let mut operands = 0;
        form.op.slots(&mut |slot| operands += usize::from(slot.role != Role::Write));
        // Without another operand all threads compute the same: a warp is enough.
        let launch = if operands == 1 { (32, 1) } else { form.launch };
        let Form { modifiers, op, .. } = form;
        let form = Form { launch, modifiers: modifiers.clone(), op: op.clone(), ..*form };
        list.push(write(&form, " with constants", &with_constants));
    }
}

/// Adds the forms of a row bit by bit.
pub(super) fn add_row(list: &mut Vec<ConformanceCase>, row: &str) {
    for op in of_registers(row) {
        add(list, &Form::new(op));
    }
}

/// The operation with a constant for each operand that may be one, a few constants each, and with constants only.
fn constants(op: &Op) -> Vec<Op> {
    let mut operands = Vec::new();
    op.slots(&mut |slot| {
        if slot.role == Role::Read {
            operands.push(constants_of(op, &slot));
        }
    });
    let with = |constant: &dyn Fn(usize) -> Option<u64>| {
        let (mut op, mut next) = (op.clone(), 0);
        op.operands_mut(&mut |_, operand| {
            if let Some(value) = constant(next) {
                *operand = Operand::Constant(value);
            }
            next += 1;
        });
        op
    };
    let mut ops = Vec::new();
    for (position, values) in operands.iter().enumerate() {
        for value in *values {
            ops.push(with(&|index| (index == position).then_some(*value)));
        }
    }
    // One constant alone is all of them already.
    if operands.len() > 1 && operands.iter().all(|values| values.len() > 1) {
        ops.push(with(&|index| Some(operands[index][1])));
    }
    ops
}

/// Constants of a type: none where an instruction takes none. Zero is left out for the sake of divisors.
fn constants_of(op: &Op, slot: &Slot) -> &'static [u64] {
    match slot.ty {
        // ptxas refuses constants outside of the byte that counts.
        Type::U32 if matches!(slot.name, "position" | "length") => &[1, 7, 33, 255],
        Type::U32 | Type::S32 => &[1, 7, 0x8000_0000, 0xffff_ffff],
        Type::F32 => &[0x3fc0_0000, 0x8000_0000, 0x7f80_0000, 0x0000_0001, 0x7fc0_0000],
        Type::U64 | Type::S64 => &[3, 0x1_0000_0001, 1 << 63, u64::MAX],
        _ if !matches!(op, Op::Mov { .. }) => &[],
        Type::Pred => &[0, 1],
        Type::U16 => &[7, 0xffff],
        Type::F16 | Type::Bf16 => &[0x3c00, 0xffc1],
        Type::Tf32 | Type::F16x2 | Type::Bf16x2 => &[0x3c00_4000, 0xffc1_0001],
    }
}

pub(super) fn write(form: &Form<'_>, variant: &str, ops: &[Op]) -> ConformanceCase {
    let row = ops[0].entry().name;
    let space = if form.modifiers.is_empty() { "" } else { " " };
    let (threads, ctas) = form.launch;
    let mut writer = Writer::with_launch(format!("{row}{space}{}{variant}", form.modifiers), threads, [ctas, 1, 1]);
    let mut operands = BTreeMap::new();
    // All operands of all operations, so that each knows how many there are.
    let mut wanted: Vec<(String, &'static str, Type)> = Vec::new();
    for op in ops {
        for_registers(op, |slot, key| {
            if slot.role != Role::Write && !wanted.iter().any(|(known, ..)| *known == key) {
                wanted.push((key, slot.name, slot.ty));
            }
        });
    }
    for (position, (key, name, ty)) in wanted.iter().enumerate() {
        let mixed = Fill::Mixed { operand: position as u32, of: wanted.len() as u32 };
        let fill = (form.fill)(name).unwrap_or(if *ty == Type::Pred { Fill::Below(2) } else { mixed });
        operands.insert(key.clone(), writer.input(key, *ty, fill));
    }
    for (index, op) in ops.iter().enumerate() {
        let mut registers = Vec::new();
        let mut results = Vec::new();
        for_registers(op, |slot, key| {
            registers.push(if slot.role == Role::Write {
                let result = writer.register(slot.ty);
                results.push((key, slot.ty, result));
                result
            } else {
                operands[&key]
            });
        });
        let mut op = op.clone();
        let mut next = registers.into_iter();
        op.registers_mut(&mut |_, _, register| {
            if let Some(chosen) = next.next() {
                *register = chosen;
            }
        });
        writer.push(op.clone());
        for (key, ty, result) in results {
            let name = if ops.len() == 1 { key } else { format!("{key} {index} with {}", difference(&op)) };
            writer.output(&name, ty, result);
        }
    }
    writer.finish(row, form.tolerance)
}

/// Visits every register operand with its name, numbered where there are several of a name.
fn for_registers(op: &Op, mut visit: impl FnMut(Slot, String)) {
    let mut seen: BTreeMap<&'static str, u32> = BTreeMap::new();
    let mut total: BTreeMap<&'static str, u32> = BTreeMap::new();
    op.slots(&mut |slot| *total.entry(slot.name).or_default() += 1);
    op.slots(&mut |slot| {
        let number = seen.entry(slot.name).or_default();
        let key = if total[slot.name] > 1 { format!("{}{number}", slot.name) } else { slot.name.to_owned() };
        *number += 1;
        if let Operand::Register(_) = slot.operand {
            visit(slot, key);
        }
    });
}

/// Suffix that tells the operations of a case apart: constants, or the truth table.
fn difference(op: &Op) -> String {
    if let Op::Lop3 { table, .. } = op {
        return format!("table {table:#04x}");
    }
    let mut text = Vec::new();
    op.slots(&mut |slot| {
        if let Operand::Constant(_) = slot.operand {
            text.push(format!("{}={}", slot.name, slot.operand));
        }
    });
    text.join(", ")
}
