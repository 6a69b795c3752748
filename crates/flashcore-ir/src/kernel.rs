//! A kernel as data: parameters, registers, and a tree of statements.

use core::fmt;

use crate::operand::RegisterId;
use crate::operation::{Class, Op};
use crate::target::{AMPERE, Since};
use crate::types::Type;

/// A kernel: the code of one entry point.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// The name of the entry point.
    pub name: String,
    /// Parameters, in order.
    pub parameters: Vec<Parameter>,
    /// Threads of one CTA.
    pub threads: u32,
    /// Bytes of shared memory of one CTA.
    pub shared_bytes: u32,
    /// CTAs of a cluster in x, y and z, which run together and reach each other's shared memory (DSMEM); all 1 without
    /// clusters.
    pub cluster: [u32; 3],
    /// The most registers per thread that the compiler may use (`.maxnreg`), by which the kernel fits its occupancy.
    pub register_budget: u32,
    /// All registers.
    pub registers: Vec<Register>,
    /// The named parts of the kernel that statements and registers belong to.
    pub sections: Vec<Section>,
    /// The statements that each thread executes.
    pub body: Block,
}

/// A parameter of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// The name.
    pub name: String,
    /// The type.
    pub ty: ParameterType,
}

/// The type of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ParameterType {
    /// A value that a register holds.
    Value(Type),
    /// The 128 bytes of a [`TensorMap`](crate::TensorMap) (TMA descriptor), which the kernel uses in place.
    TensorMap,
}

impl ParameterType {
    /// Size in bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Value(ty) => ty.bytes(),
            Self::TensorMap => 128,
        }
    }

    /// Alignment in bytes.
    pub const fn alignment(self) -> u32 {
        match self {
            Self::Value(ty) => ty.bytes(),
            Self::TensorMap => 64,
        }
    }
}

impl From<Type> for ParameterType {
    fn from(ty: Type) -> Self {
        Self::Value(ty)
    }
}

impl fmt::Display for ParameterType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(ty) => ty.fmt(formatter),
            Self::TensorMap => formatter.write_str("tensor map"),
        }
    }
}

/// A register of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Register {
    /// The type.
    pub ty: Type,
    /// The section that made it.
    pub section: SectionId,
    /// The number among the registers of that section and type, which an edit elsewhere does not change.
    pub number: u32,
}

/// An index into [`Kernel::sections`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SectionId(pub u32);

/// A named part of a kernel: the words by which PTX comments and fault reports lead back to the Rust source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// The names from the outermost section to this one.
    pub path: Vec<String>,
}

impl fmt::Display for Section {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.path.join(" / "))
    }
}

/// The Rust source location of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The section it belongs to.
    pub section: SectionId,
    /// The Rust file, as the compiler names it.
    pub file: &'static str,
    /// The line in it.
    pub line: u32,
}

/// A sequence of statements.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Block {
    /// The statements, in order.
    pub statements: Vec<Statement>,
}

/// An instruction or a control structure.
#[derive(Debug, Clone, PartialEq)]
pub enum Statement {
    /// One operation.
    Instruction(Instruction),
    /// A choice.
    If(If),
    /// A repetition.
    Loop(Loop),
}

impl Statement {
    /// The origin of the statement.
    pub const fn origin(&self) -> Origin {
        match self {
            Self::Instruction(instruction) => instruction.origin,
            Self::If(choice) => choice.origin,
            Self::Loop(repetition) => repetition.origin,
        }
    }
}

/// An operation with an optional guard.
#[derive(Debug, Clone, PartialEq)]
pub struct Instruction {
    /// The operation.
    pub op: Op,
    /// The predicate that decides, per lane, whether the operation is executed.
    pub guard: Option<Guard>,
    /// The source location.
    pub origin: Origin,
}

/// A predicate or its opposite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guard {
    /// The predicate.
    pub predicate: RegisterId,
    /// True if the guard holds where the predicate is false.
    pub negated: bool,
}

/// A choice: lanes for which `condition` holds execute `then`, the others `otherwise`; all reconverge after it.
#[derive(Debug, Clone, PartialEq)]
pub struct If {
    /// A predicate.
    pub condition: RegisterId,
    /// A promise that all lanes of a warp agree, which the simulator checks.
    pub uniform: bool,
    /// Executed where the condition holds.
    pub then: Block,
    /// Executed where it does not.
    pub otherwise: Block,
    /// The source location.
    pub origin: Origin,
}

/// A loop: `header`, then `body` for the lanes for which `condition` holds, and again; the other lanes wait at the end
/// of the loop.
#[derive(Debug, Clone, PartialEq)]
pub struct Loop {
    /// Computes the condition.
    pub header: Block,
    /// A predicate.
    pub condition: RegisterId,
    /// A promise that all lanes of a warp agree each time, which the simulator checks.
    pub uniform: bool,
    /// Repeated while the condition holds.
    pub body: Block,
    /// The source location.
    pub origin: Origin,
}

impl Kernel {
    /// The type of a register; `None` if there is no such register.
    pub fn register_type(&self, register: RegisterId) -> Option<Type> {
        self.registers.get(register.0 as usize).map(|register| register.ty)
    }

    /// The section by its index.
    pub fn section(&self, section: SectionId) -> &Section {
        &self.sections[section.0 as usize]
    }

    /// Visits every instruction in program order.
    pub fn instructions(&self, visit: &mut impl FnMut(&Instruction)) {
        self.body.instructions(visit);
    }

    /// Visits every instruction in program order, mutably. For tools that transform kernels.
    pub fn instructions_mut(&mut self, visit: &mut impl FnMut(&mut Instruction)) {
        self.body.instructions_mut(visit);
    }

    /// Visits every sequence of statements, outer ones first, mutably. For tools that transform kernels.
    pub fn blocks_mut(&mut self, visit: &mut impl FnMut(&mut Block)) {
        self.body.blocks_mut(visit);
    }

    /// The PTX version and architecture that the kernel needs.
    pub fn since(&self) -> Since {
        let mut since = AMPERE;
        self.instructions(&mut |instruction| since = since.and(instruction.op.since()));
        since
    }

    /// True if it waits for the launch before it (`griddepcontrol.wait`), and so may begin before that one has ended: it is
    /// launched to overlap (PDL).
    pub fn waits_for_previous(&self) -> bool {
        let mut waits = false;
        self.instructions(&mut |instruction| waits |= matches!(instruction.op, Op::GridDependencyWait {}));
        waits
    }

    /// The number of instructions of each class, as written.
    pub fn instruction_counts(&self) -> [(Class, usize); Class::ALL.len()] {
        let mut counts = Class::ALL.map(|class| (class, 0));
        self.instructions(&mut |instruction| counts[instruction.op.class() as usize].1 += 1);
        counts
    }

    /// Adds a register of a type to a section; its number follows those already there.
    pub fn add_register(&mut self, ty: Type, section: SectionId) -> RegisterId {
        let number = self
            .registers
            .iter()
            .rev()
            .find(|other| other.ty == ty && other.section == section)
            .map_or(0, |other| other.number + 1);
        let id = RegisterId(self.registers.len() as u32);
        self.registers.push(Register { ty, section, number });
        id
    }
}

impl Block {
    fn instructions(&self, visit: &mut impl FnMut(&Instruction)) {
        for statement in &self.statements {
            match statement {
                Statement::Instruction(instruction) => visit(instruction),
                Statement::If(choice) => {
                    choice.then.instructions(visit);
                    choice.otherwise.instructions(visit);
                }
                Statement::Loop(repetition) => {
                    repetition.header.instructions(visit);
                    repetition.body.instructions(visit);
                }
            }
        }
    }

    fn instructions_mut(&mut self, visit: &mut impl FnMut(&mut Instruction)) {
        for statement in &mut self.statements {
            match statement {
                Statement::Instruction(instruction) => visit(instruction),
                Statement::If(choice) => {
                    choice.then.instructions_mut(visit);
                    choice.otherwise.instructions_mut(visit);
                }
                Statement::Loop(repetition) => {
                    repetition.header.instructions_mut(visit);
                    repetition.body.instructions_mut(visit);
                }
            }
        }
    }

    fn blocks_mut(&mut self, visit: &mut impl FnMut(&mut Self)) {
        visit(self);
        for statement in &mut self.statements {
            match statement {
                Statement::Instruction(_) => {}
                Statement::If(choice) => {
                    choice.then.blocks_mut(visit);
                    choice.otherwise.blocks_mut(visit);
                }
                Statement::Loop(repetition) => {
                    repetition.header.blocks_mut(visit);
                    repetition.body.blocks_mut(visit);
                }
            }
        }
    }
}
