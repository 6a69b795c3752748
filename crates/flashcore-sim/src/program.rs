//! A kernel as a sequence of steps: the statement tree flattened, so that a warp can stop and resume at any of them.

use flashcore_ir::{Block, Class, Effect, Guard, Op, Operand, Origin, RegisterId, Role, Statement, VerifiedKernel};

use crate::fault::Location;
use crate::placement::Placement;
use crate::race::Stamp;
use crate::state::registers::Layout;

/// A kernel ready to be executed.
#[derive(Debug)]
pub(crate) struct Program<'k> {
    pub(crate) kernel: &'k VerifiedKernel,
    pub(crate) layout: Layout,
    pub(crate) steps: Vec<Step<'k>>,
    /// True if it has `wgmma`s.
    pub(crate) has_wgmma: bool,
}

/// The action of a warp at one value of its program counter.
#[derive(Debug)]
pub(crate) struct Step<'k> {
    pub(crate) action: Action<'k>,
    pub(crate) origin: Origin,
}

/// An operation, or a change of the active lanes.
#[derive(Debug)]
pub(crate) enum Action<'k> {
    /// Executes an operation.
    Operation(Operation<'k>),
    /// Opens a choice; a warp whose lanes all decline jumps to the `Else` at `otherwise`.
    If { condition: RegisterId, uniform: bool, otherwise: usize },
    /// Activates the lanes that declined; without any, the warp jumps to `end`.
    Else { end: usize },
    /// Reconverges the lanes of the choice.
    EndIf,
    /// Opens a loop.
    LoopEnter,
    /// Deactivates the lanes for which the condition fails; without any left, the warp jumps to `end`, the loop closed.
    LoopTest { condition: RegisterId, uniform: bool, end: usize },
    /// Back to the header.
    LoopBack { header: usize },
    /// The end of the kernel.
    End,
}

/// An operation with precomputed properties for the inner loop.
#[derive(Debug)]
pub(crate) struct Operation<'k> {
    pub(crate) op: &'k Op,
    pub(crate) guard: Option<Guard>,
    pub(crate) class: Class,
    pub(crate) convergence: Convergence,
    /// True if it accesses memory.
    pub(crate) touches: bool,
    /// Every register it reads.
    pub(crate) reads: Box<[RegisterId]>,
    /// Every register it writes.
    pub(crate) writes: Box<[RegisterId]>,
}

/// The lanes of a warp that must execute an operation together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Convergence {
    /// The active ones, whichever they are.
    Lanes,
    /// Every thread of the warp; the last warp of a CTA may have less than 32.
    Threads,
    /// All 32, among which the operation exchanges values.
    Warp,
}

fn convergence(op: &Op) -> Convergence {
    match (op.is_aligned(), op.class()) {
        (false, _) => Convergence::Lanes,
        (true, Class::Barrier) => Convergence::Threads,
        (
            true,
            Class::Integer
            | Class::Float
            | Class::Convert
            | Class::SpecialFunction
            | Class::Warp
            | Class::Memory
            | Class::Asynchronous
            | Class::Tensor
            | Class::Control,
        ) => Convergence::Warp,
    }
}

/// True if all four warps of a warpgroup execute the operation.
pub(crate) fn is_wgmma(op: &Op) -> bool {
    matches!(
        op,
        Op::Wgmma { .. }
            | Op::WgmmaFp8 { .. }
            | Op::WgmmaFence {}
            | Op::WgmmaCommit {}
            | Op::WgmmaWait { .. }
            | Op::SetRegisterCount { .. }
    )
}

impl<'k> Program<'k> {
    pub(crate) fn new(kernel: &'k VerifiedKernel) -> Self {
        let mut steps = Vec::new();
        flatten(&kernel.body, &mut steps);
        let last = steps.last().map(|step| step.origin);
        let origin = last.unwrap_or(Origin { section: flashcore_ir::SectionId(0), file: "", line: 0 });
        steps.push(Step { action: Action::End, origin });
        let has_wgmma = steps.iter().any(|step| match &step.action {
            Action::Operation(operation) => is_wgmma(operation.op),
            _ => false,
        });
        Self { kernel, layout: Layout::new(kernel), steps, has_wgmma }
    }

    /// The location of a step, without the lane and the address.
    pub(crate) fn location(&self, step: usize, placement: &Placement, warp: usize) -> Location {
        let Step { action, origin } = &self.steps[step];
        let operation = match action {
            Action::Operation(operation) => operation.op.to_string(),
            Action::If { condition, .. } => format!("If condition={condition}"),
            Action::LoopTest { condition, .. } => format!("Loop condition={condition}"),
            Action::Else { .. } => "Else".to_owned(),
            Action::EndIf => "EndIf".to_owned(),
            Action::LoopEnter | Action::LoopBack { .. } => "Loop".to_owned(),
            Action::End => "End".to_owned(),
        };
        let section = self.kernel.section(origin.section).to_string();
        let (rank, warp) = placement.rank_and_warp(warp);
        let (cta, warp) = (placement.cta(rank), warp as u32);
        Location { operation, section, file: origin.file, line: origin.line, cta, warp, lane: None, address: None }
    }

    /// The location of an earlier access.
    pub(crate) fn location_of(&self, stamp: Stamp, placement: &Placement, address: u64) -> Location {
        let mut location = self.location(stamp.step(), placement, stamp.warp());
        location.lane = stamp.lane();
        location.address = Some(address);
        location
    }
}

fn flatten<'k>(block: &'k Block, steps: &mut Vec<Step<'k>>) {
    for statement in &block.statements {
        let origin = statement.origin();
        let at = steps.len();
        match statement {
            Statement::Instruction(instruction) => {
                let op = &instruction.op;
                let (mut reads, mut writes) = (Vec::new(), Vec::new());
                op.slots(&mut |slot| match (slot.role, slot.operand) {
                    (Role::Read | Role::ReadRegister | Role::Base, Operand::Register(register)) => reads.push(register),
                    (Role::Write, Operand::Register(register)) => writes.push(register),
                    (_, Operand::Constant(_)) => {}
                });
                steps.push(Step {
                    action: Action::Operation(Operation {
                        op,
                        guard: instruction.guard,
                        class: op.class(),
                        convergence: convergence(op),
                        touches: !matches!(op.effect(), Effect::None | Effect::Order),
                        reads: reads.into(),
                        writes: writes.into(),
                    }),
                    origin,
                });
            }
            Statement::If(choice) => {
                steps.push(Step { action: Action::EndIf, origin });
                flatten(&choice.then, steps);
                let otherwise = steps.len();
                steps.push(Step { action: Action::EndIf, origin });
                flatten(&choice.otherwise, steps);
                let end = steps.len();
                steps.push(Step { action: Action::EndIf, origin });
                steps[at].action = Action::If { condition: choice.condition, uniform: choice.uniform, otherwise };
                steps[otherwise].action = Action::Else { end };
            }
            Statement::Loop(repetition) => {
                steps.push(Step { action: Action::LoopEnter, origin });
                let header = steps.len();
                flatten(&repetition.header, steps);
                let test = steps.len();
                steps.push(Step { action: Action::EndIf, origin });
                flatten(&repetition.body, steps);
                steps.push(Step { action: Action::LoopBack { header }, origin });
                let (condition, uniform, end) = (repetition.condition, repetition.uniform, steps.len());
                steps[test].action = Action::LoopTest { condition, uniform, end };
            }
        }
    }
}
