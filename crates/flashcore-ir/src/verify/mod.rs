//! The verifier: proof that a kernel keeps the rules of the language, or the list of all that it breaks.
//!
//! Printer and simulator take a [`VerifiedKernel`] and may rely on the rules: register indices are valid, operand
//! types are those of the table, every register is written before it is read, and every operation exists on the
//! architecture. A rule that only a run can decide (does the warp agree, is the address in bounds) is checked by the
//! simulator.

mod assignment;
mod hopper;
mod rules;

use core::fmt;
use core::ops::Deref;

pub use rules::Rule;

use crate::kernel::{Block, Instruction, Kernel, Origin, Statement};
use crate::operand::{Operand, RegisterId};
use crate::operation::{LengthMismatch, Op, Role};
use crate::target::{AMPERE, Arch, HOPPER};
use crate::types::Type;

/// A kernel that keeps every rule of the language on an architecture. Printer and simulator accept nothing else.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifiedKernel {
    kernel: Kernel,
    arch: Arch,
}

impl VerifiedKernel {
    /// The architecture it was verified for.
    pub const fn arch(&self) -> Arch {
        self.arch
    }

    /// The lowest PTX version that has the instructions and the architecture.
    pub fn ptx(&self) -> (u8, u8) {
        let clusters = if self.kernel.cluster == [1; 3] { AMPERE } else { HOPPER };
        self.kernel.since().and(clusters).ptx.max(self.arch.ptx())
    }

    /// The kernel, to be changed and verified again.
    pub fn into_kernel(self) -> Kernel {
        self.kernel
    }
}

impl Deref for VerifiedKernel {
    type Target = Kernel;

    fn deref(&self) -> &Kernel {
        &self.kernel
    }
}

/// A broken rule and its location.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{location}: {rule}")]
pub struct VerifyError {
    /// The location of the violation.
    pub location: Location,
    /// The rule.
    pub rule: Rule,
}

/// The location of a broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// In the declarations of the kernel.
    Kernel {
        /// The name of the kernel.
        name: String,
    },
    /// At a statement.
    Statement {
        /// The number of instructions before it.
        index: usize,
        /// The operation, or the structure.
        text: String,
        /// The section it belongs to.
        section: String,
        /// The Rust file it was written in.
        file: &'static str,
        /// The line in it.
        line: u32,
    },
}

impl fmt::Display for Location {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel { name } => write!(formatter, "kernel `{name}`"),
            Self::Statement { index, text, section, file, line } => {
                write!(formatter, "instruction {index} `{text}` in `{section}` ({file}:{line})")
            }
        }
    }
}

impl Kernel {
    /// Checks every rule; returns all that are broken.
    pub fn verify(self, arch: Arch) -> Result<VerifiedKernel, Vec<VerifyError>> {
        let mut verifier = Verifier { kernel: &self, arch, index: 0, errors: Vec::new() };
        verifier.declarations();
        verifier.block(&self.body);
        // The analysis of assignments follows register indices, so it runs on kernels whose indices are sound.
        if !verifier.errors.iter().any(|error| matches!(error.rule, Rule::UnknownRegister { .. })) {
            assignment::check(&mut verifier);
        }
        let errors = verifier.errors;
        if errors.is_empty() { Ok(VerifiedKernel { kernel: self, arch }) } else { Err(errors) }
    }
}

struct Verifier<'kernel> {
    kernel: &'kernel Kernel,
    arch: Arch,
    index: usize,
    errors: Vec<VerifyError>,
}

impl Verifier<'_> {
    fn declarations(&mut self) {
        let location = Location::Kernel { name: self.kernel.name.clone() };
        for rule in rules::declarations(self.kernel, self.arch) {
            self.errors.push(VerifyError { location: location.clone(), rule });
        }
    }

    fn block(&mut self, block: &Block) {
        for statement in &block.statements {
            self.section(statement);
            match statement {
                Statement::Instruction(instruction) => {
                    self.instruction(instruction);
                    self.index += 1;
                }
                Statement::If(choice) => {
                    self.condition(choice.condition, "if", choice.origin);
                    self.block(&choice.then);
                    self.block(&choice.otherwise);
                }
                Statement::Loop(repetition) => {
                    self.block(&repetition.header);
                    self.condition(repetition.condition, "loop", repetition.origin);
                    self.block(&repetition.body);
                }
            }
        }
    }

    fn section(&mut self, statement: &Statement) {
        let origin = statement.origin();
        if !rules::has_section(self.kernel, origin.section) {
            let text = match statement {
                Statement::Instruction(instruction) => instruction.op.to_string(),
                Statement::If(_) => "if".to_owned(),
                Statement::Loop(_) => "loop".to_owned(),
            };
            let declared = self.kernel.sections.len();
            self.report(Rule::UnknownSection { section: origin.section, declared }, text, origin);
        }
    }

    fn condition(&mut self, condition: RegisterId, text: &str, origin: Origin) {
        if let Err(rule) = self.register(condition, "condition", Type::Pred) {
            self.report(rule, text.to_owned(), origin);
        }
    }

    fn instruction(&mut self, instruction: &Instruction) {
        let op = &instruction.op;
        let mut broken = Vec::new();
        if let Some(guard) = instruction.guard {
            broken.extend(self.register(guard.predicate, "guard", Type::Pred).err());
            if op.is_aligned() {
                broken.push(Rule::GuardedCollective);
            }
        }
        if let Some((ty, allowed)) = op.type_choice()
            && !allowed.contains(&ty)
        {
            broken.push(Rule::TypeNotAllowed { ty, allowed });
        }
        op.length_mismatches(&mut |mismatch| {
            let LengthMismatch { name, actual, expected } = mismatch;
            broken.push(Rule::Length { name, actual, expected });
        });
        let mut written = Vec::new();
        op.slots(&mut |slot| match slot.operand {
            Operand::Register(register) => {
                broken.extend(self.register(register, slot.name, slot.ty).err());
                if slot.role == Role::Write {
                    if written.contains(&register) {
                        broken.push(Rule::WrittenTwice { register });
                    }
                    written.push(register);
                }
            }
            Operand::Constant(bits) => {
                let movable = matches!(op, Op::Mov { .. });
                if slot.role != Role::Read || !(movable || rules::may_be_constant(slot.ty)) {
                    broken.push(Rule::ConstantNotAllowed { name: slot.name, ty: slot.ty });
                } else if slot.ty.bits() < 64 && bits >> slot.ty.bits() != 0 {
                    broken.push(Rule::ConstantTooWide { name: slot.name, bits, ty: slot.ty });
                }
            }
        });
        if !self.arch.has(op.since()) {
            broken.push(Rule::NotOnArchitecture { arch: self.arch, since: op.since() });
        }
        rules::operation(op, self.kernel, &mut broken);
        for rule in broken {
            self.report(rule, op.to_string(), instruction.origin);
        }
    }

    fn register(&self, register: RegisterId, name: &'static str, expected: Type) -> Result<(), Rule> {
        match self.kernel.register_type(register) {
            None => Err(Rule::UnknownRegister { name, register }),
            Some(actual) if actual != expected => Err(Rule::TypeMismatch { name, register, actual, expected }),
            Some(_) => Ok(()),
        }
    }

    fn report(&mut self, rule: Rule, text: String, origin: Origin) {
        let section = self.kernel.sections.get(origin.section.0 as usize).map_or_else(String::new, ToString::to_string);
        let location = Location::Statement { index: self.index, text, section, file: origin.file, line: origin.line };
        self.errors.push(VerifyError { location, rule });
    }
}
