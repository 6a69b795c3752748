//! Every form of every operation: what the verifier, the printer, ptxas, the simulator and the conformance cases are tried
//! on.
//!
//! The product of modifiers is complete on purpose: which of the combinations exist is for the verifier to say.

use crate::kernel::{Guard, Instruction, Kernel, Origin, Parameter, SectionId, Statement};
use crate::modifier::Compare;
use crate::operand::{Operand, RegisterId};
use crate::operation::{Op, Role};
use crate::target::Arch;
use crate::types::Type;
use crate::verify::Location;
use crate::{Builder, ParameterType};

/// Stands for a register that [`kernel`] fills in.
pub const ANY: RegisterId = RegisterId(0);

/// The types of the parameters of [`kernel`], before one that is a tensor map.
const PARAMETERS: [Type; 5] = [Type::U32, Type::S32, Type::F32, Type::U64, Type::S64];

/// A type of modifiers: the values that forms have.
pub(crate) trait Modifier: Copy + 'static {
    fn values(row: &str, name: &str) -> &'static [Self];
}

impl Modifier for bool {
    fn values(_: &str, _: &str) -> &'static [Self] {
        &[false, true]
    }
}

impl Modifier for Type {
    fn values(_: &str, _: &str) -> &'static [Self] {
        &Self::ALL
    }
}

/// A truth table.
impl Modifier for u8 {
    fn values(_: &str, _: &str) -> &'static [Self] {
        &[0x96]
    }
}

/// Numbers that exist, at their bounds, and next to them some that do not.
impl Modifier for u32 {
    fn values(row: &str, name: &str) -> &'static [Self] {
        match (row, name) {
            ("SetRegisterCount", "count") => &[40, 41],
            (_, "count") => &[1, 2, 3, 4],
            (_, "parameter") => &[0, 1, 2, 3, 4, 5],
            (_, "bytes") => &[2, 4, 8, 16, 32],
            (_, "rank") => &[0, 1, 2, 3, 4, 5, 6],
            ("Wgmma", "columns") => &[0, 8, 12, 256, 264],
            (_, "columns") => &[0, 8, 12, 96, 264],
            (_, "control") => &[0, 0x1f, 0x1c1f],
            _ => &[0, 2, 3],
        }
    }
}

/// A choice for each modifier and operand in turn; every combination comes once, the last choices change fastest.
#[derive(Default)]
pub(crate) struct Choices {
    /// The index and the number of the values of each.
    chosen: Vec<(usize, usize)>,
    position: usize,
}

impl Choices {
    pub(crate) fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        if self.position == self.chosen.len() {
            self.chosen.push((0, values.len()));
        }
        self.position += 1;
        values[self.chosen[self.position - 1].0]
    }

    /// A register, or a constant that the operand may be.
    pub(crate) fn operand(&mut self, name: &str) -> Operand {
        let constant = match name {
            "threads" => 32,
            "bytes" => 128,
            _ => 1,
        };
        self.pick(&[Operand::Register(ANY), Operand::Constant(constant)])
    }

    /// Advances to the next combination; false after the last.
    pub(crate) fn advance(&mut self) -> bool {
        self.position = 0;
        while let Some((index, count)) = self.chosen.pop() {
            if index + 1 < count {
                self.chosen.push((index + 1, count));
                return true;
            }
        }
        false
    }
}

/// Every combination of modifiers of every row, in the order of the table, with a register or a constant for each operand
/// that may be either.
pub fn all() -> Vec<Op> {
    let mut ops = Vec::new();
    Op::forms(None, &mut |op| ops.push(op));
    ops
}

/// The forms of one row with registers for all operands.
pub fn of_registers(row: &str) -> Vec<Op> {
    let mut ops = Vec::new();
    Op::forms(Some(row), &mut |mut op| {
        let mut has_constant = false;
        op.operands_mut(&mut |_, operand| has_constant |= matches!(operand, Operand::Constant(_)));
        if !has_constant {
            ops.push(op);
        }
    });
    ops
}

/// The forms that the verifier accepts for an architecture.
pub fn accepted(arch: Arch) -> Vec<Op> {
    let mut ops = all();
    // Most of the product: its reports would take long to write.
    ops.retain(|op| op.type_choice().is_none_or(|(ty, allowed)| allowed.contains(&ty)));
    let kernel = kernel(&ops);
    let before = kernel.body.statements.len() - ops.len();
    let mut refused = vec![false; before + ops.len()];
    for error in kernel.verify(arch).err().unwrap_or_default() {
        if let Location::Statement { index, .. } = error.location {
            refused[index] = true;
        }
    }
    let mut refused = refused.into_iter().skip(before);
    ops.retain(|_| refused.next() == Some(false));
    ops
}

/// A kernel of these operations, not verified, with registers of the right types: those they read have been written, those they
/// write are new.
pub fn kernel(ops: &[Op]) -> Kernel {
    let mut kernel = Builder::new("every_operation", 32).finish();
    kernel.parameters = PARAMETERS.map(|ty| Parameter { name: format!("p_{ty}"), ty: ty.into() }).to_vec();
    kernel.parameters.push(Parameter { name: "p_map".to_owned(), ty: ParameterType::TensorMap });
    kernel.shared_bytes = 1024;
    let sources = Type::ALL.map(|ty| kernel.add_register(ty, SectionId(0)));
    let source = |ty: Type| sources[ty as usize];
    let zero = Operand::Constant(0);
    for ty in Type::ALL.into_iter().filter(|ty| *ty != Type::Pred) {
        let d = source(ty);
        let op = match PARAMETERS.iter().position(|parameter| *parameter == ty) {
            Some(parameter) => Op::LoadParam { ty, parameter: parameter as u32, d },
            None => Op::Mov { ty, d, a: zero },
        };
        append(&mut kernel, op, None);
    }
    let a = Operand::Register(source(Type::U32));
    let set = Op::SetPredicate { compare: Compare::Eq, ty: Type::U32, d: source(Type::Pred), a, b: zero };
    append(&mut kernel, set, None);
    let first = kernel.body.statements.len();
    let mut accumulators = Vec::new();
    for op in ops {
        let mut types = Vec::new();
        op.slots(&mut |slot| {
            if let Operand::Register(_) = slot.operand {
                types.push(slot.ty);
            }
        });
        let mut types = types.into_iter();
        let mut op = op.clone();
        op.registers_mut(&mut |role, _, register| {
            if let Some(ty) = types.next() {
                *register = if role == Role::Write { kernel.add_register(ty, SectionId(0)) } else { source(ty) };
            }
        });
        // An operation that accumulates in place reads its result register, which must have a value.
        let in_place = match &mut op {
            Op::Wgmma { accumulate, d, c, .. } => Some((*accumulate, d, c)),
            Op::WgmmaFp8 { d, c, .. } => Some((Type::F32, d, c)),
            _ => None,
        };
        if let Some((accumulate, d, c)) = in_place
            && !c.is_empty()
        {
            c.clone_from(d);
            accumulators.extend(d.iter().map(|register| (*register, accumulate)));
        }
        // Code after an unconditional exit would not be compiled.
        let guard = matches!(op, Op::Exit {}).then(|| Guard { predicate: source(Type::Pred), negated: true });
        append(&mut kernel, op, guard);
    }
    let rest = kernel.body.statements.split_off(first);
    for (d, ty) in accumulators {
        append(&mut kernel, Op::Mov { ty, d, a: zero }, None);
    }
    kernel.body.statements.extend(rest);
    kernel
}

fn append(kernel: &mut Kernel, op: Op, guard: Option<Guard>) {
    let origin = Origin { section: SectionId(0), file: file!(), line: line!() };
    kernel.body.statements.push(Statement::Instruction(Instruction { op, guard, origin }));
}
