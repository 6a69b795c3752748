//! Kernel fingerprint: a hash of structure and operations that ignores every name.
//!
//! Registers count by the order in which the program mentions them and by their type; names of the kernel, of its
//! parameters and of its sections, source lines, and the numbers that the builder gave to registers are left out. Two
//! kernels with the same fingerprint are the same program, so a refactoring proves itself by leaving it untouched.

use core::fmt::{self, Write};

use crate::kernel::{Block, Guard, Kernel, Statement};
use crate::operand::RegisterId;

/// A 64-bit FNV-1a hash that text is written into.
struct Hash(u64);

impl Write for Hash {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    }
}

/// The walk over a kernel: the hash so far, and the number of each register that was mentioned.
struct Walk<'a> {
    kernel: &'a Kernel,
    numbers: Vec<Option<u32>>,
    mentioned: u32,
    hash: Hash,
}

impl Walk<'_> {
    fn number(&mut self, register: RegisterId) -> RegisterId {
        let Some(number) = self.numbers.get_mut(register.0 as usize) else { return register };
        let number = *number.get_or_insert_with(|| {
            let number = self.mentioned;
            self.mentioned += 1;
            let ty = self.kernel.registers[register.0 as usize].ty;
            // Writing into a hash cannot fail.
            let _ = write!(self.hash, "%{number}: {ty}; ");
            number
        });
        RegisterId(number)
    }

    fn block(&mut self, block: &Block) {
        self.text("{");
        for statement in &block.statements {
            match statement {
                Statement::Instruction(instruction) => {
                    let mut op = instruction.op.clone();
                    op.registers_mut(&mut |_, _, register| *register = self.number(*register));
                    if let Some(Guard { predicate, negated }) = instruction.guard {
                        let predicate = self.number(predicate);
                        self.write(format_args!("@{predicate} {negated} "));
                    }
                    self.write(format_args!("{op}; "));
                }
                Statement::If(choice) => {
                    let condition = self.number(choice.condition);
                    self.write(format_args!("if {condition} {}", choice.uniform));
                    self.block(&choice.then);
                    self.block(&choice.otherwise);
                }
                Statement::Loop(repetition) => {
                    self.text("loop");
                    self.block(&repetition.header);
                    let condition = self.number(repetition.condition);
                    self.write(format_args!("while {condition} {}", repetition.uniform));
                    self.block(&repetition.body);
                }
            }
        }
        self.text("}");
    }

    fn text(&mut self, text: &str) {
        self.write(format_args!("{text}"));
    }

    fn write(&mut self, text: fmt::Arguments<'_>) {
        // Writing into a hash cannot fail.
        let _ = self.hash.write_fmt(text);
    }
}

impl Kernel {
    /// The hash of structure and operations, without any name.
    pub fn fingerprint(&self) -> u64 {
        let numbers = vec![None; self.registers.len()];
        let mut walk = Walk { kernel: self, numbers, mentioned: 0, hash: Hash(0xcbf2_9ce4_8422_2325) };
        let Self { threads, shared_bytes, cluster, register_budget, .. } = self;
        walk.write(format_args!("{threads} {shared_bytes} {cluster:?} {register_budget} "));
        for parameter in &self.parameters {
            walk.write(format_args!("{}, ", parameter.ty));
        }
        walk.block(&self.body);
        walk.hash.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Builder;
    use crate::operand::Compare;
    use crate::types::U32;

    fn kernel(name: &str, section: &str, constant: u32, spare_register: bool) -> Kernel {
        let mut k = Builder::new(name, 32);
        if spare_register {
            let _ = k.register::<U32>();
        }
        let section = section.to_owned();
        k.section(&section, |k| {
            let a = k.parameter::<U32>(name);
            let b = k.add(a, constant);
            let is_less = k.compare(Compare::Lt, b, a);
            k.if_then(is_less, |k| {
                let _ = k.add(b, a);
            });
        });
        k.finish()
    }

    /// Names and register numbers do not count; a constant does.
    #[test]
    fn a_fingerprint_is_of_the_program_alone() {
        let first = kernel("a", "one", 3, false);
        assert_eq!(first.fingerprint(), kernel("b", "two", 3, true).fingerprint());
        assert_ne!(first.fingerprint(), kernel("a", "one", 4, false).fingerprint());
    }

    /// Every field that makes another program makes another fingerprint.
    #[test]
    fn launch_bounds_count() {
        let first = kernel("a", "one", 3, false);
        for change in [
            (|kernel: &mut Kernel| kernel.threads = 64) as fn(&mut Kernel),
            |kernel| kernel.shared_bytes += 1,
            |kernel| kernel.cluster = [2, 1, 1],
            |kernel| kernel.register_budget -= 8,
            |kernel| kernel.parameters.clear(),
            |kernel| {
                let _ = kernel.body.statements.pop();
            },
        ] {
            let mut changed = first.clone();
            change(&mut changed);
            assert_ne!(first.fingerprint(), changed.fingerprint());
        }
    }
}
