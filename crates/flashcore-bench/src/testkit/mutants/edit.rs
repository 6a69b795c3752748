//! Small changes to kernels: find an instruction by its section and kind, and drop it, change it, or add to it.

use flashcore_ir::{Block, Compare, Instruction, Kernel, Op, Operand, Origin, RegisterId, Statement, Type};

/// Which instructions a change is about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Find {
    /// The last names of the path of its section.
    pub section: &'static [&'static str],
    /// Kind of the operation.
    pub matches: fn(&Op) -> bool,
    /// Which of those, in program order.
    pub pick: Pick,
}

/// Which of the instructions found.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pick {
    /// The one with this number.
    Nth(usize),
    /// All of them.
    Every,
}

impl Find {
    pub(super) const fn every(section: &'static [&'static str], matches: fn(&Op) -> bool) -> Self {
        Self { section, matches, pick: Pick::Every }
    }

    pub(super) const fn nth(section: &'static [&'static str], matches: fn(&Op) -> bool, number: usize) -> Self {
        Self { section, matches, pick: Pick::Nth(number) }
    }

    fn is_in_section(&self, kernel: &Kernel, origin: Origin) -> bool {
        let path = &kernel.section(origin.section).path;
        path.iter().rev().zip(self.section.iter().rev()).all(|(actual, wanted)| actual == wanted)
            && path.len() >= self.section.len()
    }

    /// The places of the instructions found, counted in program order.
    fn indices(&self, kernel: &Kernel) -> Vec<usize> {
        let mut found = Vec::new();
        let mut index = 0;
        kernel.instructions(&mut |instruction| {
            if (self.matches)(&instruction.op) && self.is_in_section(kernel, instruction.origin) {
                found.push(index);
            }
            index += 1;
        });
        match self.pick {
            Pick::Every => found,
            Pick::Nth(number) => found.get(number).copied().into_iter().collect(),
        }
    }
}

/// Drops the instructions found; returns how many there were.
pub(super) fn drop(kernel: &mut Kernel, find: Find) -> usize {
    rewrite(kernel, find, |_, _| Vec::new())
}

/// Changes the instructions found; returns how many there were.
pub(super) fn change(kernel: &mut Kernel, find: Find, change: impl Fn(&mut Op)) -> usize {
    rewrite(kernel, find, |_, mut instruction| {
        change(&mut instruction.op);
        vec![instruction]
    })
}

/// Puts other instructions in the place of those found; returns how many there were.
pub(super) fn rewrite(
    kernel: &mut Kernel,
    find: Find,
    mut replace: impl FnMut(&mut Kernel, Instruction) -> Vec<Instruction>,
) -> usize {
    let indices = find.indices(kernel);
    let mut body = core::mem::take(&mut kernel.body);
    let mut index = 0;
    rewrite_block(&mut body, &mut index, &mut |index, instruction| {
        if indices.binary_search(&index).is_ok() { replace(kernel, instruction) } else { vec![instruction] }
    });
    kernel.body = body;
    indices.len()
}

/// Puts other instructions in the place of those that match, wherever they are; returns how many there were.
pub(super) fn rewrite_if(
    kernel: &mut Kernel,
    matches: impl Fn(&Op) -> bool,
    mut replace: impl FnMut(&mut Kernel, Instruction) -> Vec<Instruction>,
) -> usize {
    let mut body = core::mem::take(&mut kernel.body);
    let (mut index, mut count) = (0, 0);
    rewrite_block(&mut body, &mut index, &mut |_, instruction| {
        if !matches(&instruction.op) {
            return vec![instruction];
        }
        count += 1;
        replace(kernel, instruction)
    });
    kernel.body = body;
    count
}

/// The register that a parameter is loaded into.
pub(super) fn parameter(kernel: &Kernel, name: &str) -> Option<RegisterId> {
    let mut found = None;
    kernel.instructions(&mut |instruction| {
        if let Op::LoadParam { parameter, d, .. } = &instruction.op
            && kernel.parameters[*parameter as usize].name == name
        {
            found = Some(*d);
        }
    });
    found
}

/// Has every warp count how often it comes past the instructions found, each time before it executes them; returns how
/// many there were. `change` gets a predicate that holds from the time number `first` on, counted from 0.
pub(super) fn change_from(
    kernel: &mut Kernel,
    find: Find,
    first: u64,
    change: impl Fn(&mut Kernel, RegisterId, Instruction) -> Vec<Instruction>,
) -> usize {
    let Some(origin) = kernel.body.statements.first().map(Statement::origin) else { return 0 };
    let times = kernel.add_register(Type::U32, origin.section);
    let count = rewrite(kernel, find, |kernel, instruction| {
        let (section, origin) = (instruction.origin.section, instruction.origin);
        let is_late = kernel.add_register(Type::Pred, section);
        let plain = |op| Instruction { op, guard: None, origin };
        let (a, b) = (Operand::Register(times), Operand::Constant(first));
        let compared = plain(Op::SetPredicate { compare: Compare::Ge, ty: Type::U32, d: is_late, a, b });
        let counted = plain(Op::Add { ty: Type::U32, d: times, a, b: Operand::Constant(1) });
        let mut instructions = vec![compared, counted];
        instructions.extend(change(kernel, is_late, instruction));
        instructions
    });
    let begin = Op::Mov { ty: Type::U32, d: times, a: Operand::Constant(0) };
    kernel.body.statements.insert(0, Statement::Instruction(Instruction { op: begin, guard: None, origin }));
    count
}

fn rewrite_block(
    block: &mut Block,
    index: &mut usize,
    replace: &mut impl FnMut(usize, Instruction) -> Vec<Instruction>,
) {
    for statement in core::mem::take(&mut block.statements) {
        match statement {
            Statement::Instruction(instruction) => {
                let replaced = replace(*index, instruction);
                *index += 1;
                block.statements.extend(replaced.into_iter().map(Statement::Instruction));
            }
            Statement::If(mut choice) => {
                rewrite_block(&mut choice.then, index, replace);
                rewrite_block(&mut choice.otherwise, index, replace);
                block.statements.push(Statement::If(choice));
            }
            Statement::Loop(mut repetition) => {
                rewrite_block(&mut repetition.header, index, replace);
                rewrite_block(&mut repetition.body, index, replace);
                block.statements.push(Statement::Loop(repetition));
            }
        }
    }
}
