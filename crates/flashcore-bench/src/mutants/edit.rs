//! Small changes to kernels: find an instruction by its section and kind, and drop it, change it, or add to it.

use flashcore_ir::{Block, Instruction, Kernel, Op, Origin, Statement};

/// Which instructions a change is about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Find {
    /// The last names of the path of its section.
    pub section: &'static [&'static str],
    /// Its kind.
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
