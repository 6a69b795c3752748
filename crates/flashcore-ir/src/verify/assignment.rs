//! Definite assignment: every register is written before it is read, on every path.
//!
//! A forward analysis over the statement tree: the state is the set of registers surely written. A guarded write adds
//! nothing, since some lanes may skip it; a choice adds what both arms write; a loop adds what its header writes, since
//! the body may not run. After an unguarded exit there is no lane left, so there everything counts as written.

use super::{Rule, Verifier};
use crate::kernel::{Block, Statement};
use crate::operand::{Operand, RegisterId};
use crate::operation::{Op, Role};

pub(super) fn check(verifier: &mut Verifier<'_>) {
    let mut written = vec![false; verifier.kernel.registers.len()];
    verifier.index = 0;
    let kernel = verifier.kernel;
    block(verifier, &kernel.body, &mut written);
}

fn block(verifier: &mut Verifier<'_>, statements: &Block, written: &mut [bool]) {
    for statement in &statements.statements {
        match statement {
            Statement::Instruction(instruction) => {
                let mut unwritten: Vec<RegisterId> = Vec::new();
                let mut read = |register: RegisterId| {
                    if !written[register.0 as usize] && !unwritten.contains(&register) {
                        unwritten.push(register);
                    }
                };
                if let Some(guard) = instruction.guard {
                    read(guard.predicate);
                }
                instruction.op.slots(&mut |slot| match (slot.role, slot.operand) {
                    (Role::Read | Role::ReadRegister | Role::Base, Operand::Register(register)) => read(register),
                    (Role::Write, _) | (_, Operand::Constant(_)) => {}
                });
                for register in unwritten {
                    let rule = Rule::ReadBeforeWrite { register };
                    verifier.report(rule, instruction.op.to_string(), instruction.origin);
                    // One report per register and path: later reads on the path would only repeat it.
                    written[register.0 as usize] = true;
                }
                if instruction.guard.is_none() {
                    instruction.op.slots(&mut |slot| {
                        if let (Role::Write, Operand::Register(register)) = (slot.role, slot.operand) {
                            written[register.0 as usize] = true;
                        }
                    });
                    if let Op::Exit {} = instruction.op {
                        written.fill(true);
                    }
                }
                verifier.index += 1;
            }
            Statement::If(choice) => {
                condition(verifier, choice.condition, "if", statement, written);
                let mut then = written.to_vec();
                block(verifier, &choice.then, &mut then);
                block(verifier, &choice.otherwise, written);
                for (both, then) in written.iter_mut().zip(then) {
                    *both &= then;
                }
            }
            Statement::Loop(repetition) => {
                block(verifier, &repetition.header, written);
                condition(verifier, repetition.condition, "loop", statement, written);
                let mut body = written.to_vec();
                block(verifier, &repetition.body, &mut body);
            }
        }
    }
}

fn condition(
    verifier: &mut Verifier<'_>,
    register: RegisterId,
    text: &str,
    statement: &Statement,
    written: &mut [bool],
) {
    if !written[register.0 as usize] {
        verifier.report(Rule::ReadBeforeWrite { register }, text.to_owned(), statement.origin());
        written[register.0 as usize] = true;
    }
}
