//! A warp: program counter, active lanes, registers, and operations in flight.

use flashcore_ir::RegisterId;

use crate::error::Stop;
use crate::execute::async_copy::InFlightCopies;
use crate::fault::FaultKind;
use crate::program::{Action, Convergence, Operation};
use crate::state::registers::{ALL, Layout, Registers};
use crate::state::wgmma::InFlightProducts;

/// The state of one warp.
#[derive(Debug)]
pub(crate) struct Warp<'k> {
    pub(crate) registers: Registers<'k>,
    pub(crate) copies: InFlightCopies,
    /// The next step.
    pub(crate) next: usize,
    /// The lanes that execute it.
    pub(crate) active: u32,
    /// The lanes that began.
    threads: u32,
    /// The lanes that have not ended.
    alive: u32,
    /// The open choices and loops, innermost last.
    open: Vec<Frame>,
    pub(crate) waiting: Waiting,
    pub(crate) products: InFlightProducts<'k>,
    /// Registers per thread.
    pub(crate) register_count: u32,
}

/// The events that a waiting warp, which will execute its step again, waits for.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// The addresses of `mbarrier`s.
    pub(crate) mbarriers: Vec<u32>,
    /// The lanes whose wait is over.
    pub(crate) done: u32,
    /// The registers per thread that it waits for.
    pub(crate) registers: u32,
    /// True if it waits at the cluster barrier.
    pub(crate) cluster: bool,
}

/// A choice or loop that a warp is in.
#[derive(Debug)]
struct Frame {
    /// The lanes that were active before it.
    outer: u32,
    /// The lanes that take the other branch of a choice.
    otherwise: u32,
}

impl<'k> Warp<'k> {
    /// A warp of the first `threads` lanes, at the start.
    pub(crate) fn new(layout: &'k Layout, threads: u32) -> Self {
        let active = if threads >= 32 { u32::MAX } else { (1 << threads) - 1 };
        Self {
            registers: Registers::new(layout),
            copies: InFlightCopies::default(),
            next: 0,
            active,
            threads: active,
            alive: active,
            open: Vec::new(),
            waiting: Waiting::default(),
            products: InFlightProducts::default(),
            register_count: 0,
        }
    }

    /// The lanes that are threads: all, except in a partial last warp of a CTA.
    pub(crate) fn threads(&self) -> u32 {
        self.threads
    }

    /// The lanes that have not ended.
    pub(crate) fn alive(&self) -> u32 {
        self.alive
    }

    /// True if every lane has ended.
    pub(crate) fn is_done(&self) -> bool {
        self.alive == 0
    }

    /// Ends lanes.
    pub(crate) fn end(&mut self, mask: u32) {
        self.alive &= !mask;
        self.active &= !mask;
    }

    /// The active lanes for which the guard holds. Checks that they are all that the operation needs, and have written
    /// what it reads.
    pub(crate) fn executing(&self, operation: &Operation<'_>) -> Result<u32, Stop> {
        let mut mask = self.active;
        if let Some(guard) = operation.guard {
            self.must_be_written(guard.predicate, mask)?;
            let holds = self.registers.predicate_of(guard.predicate);
            mask &= if guard.negated { !holds } else { holds };
        }
        if mask == 0 {
            return Ok(0);
        }
        let needed = match operation.convergence {
            Convergence::Lanes => mask,
            Convergence::Threads => self.threads(),
            Convergence::Warp => ALL,
        };
        if mask != needed {
            return Err(Stop::warp(FaultKind::DivergentCollective { active: mask }));
        }
        for &register in &operation.reads {
            self.must_be_written(register, mask)?;
        }
        Ok(mask)
    }

    /// Checks that the lanes of `mask` have written a register.
    pub(crate) fn must_be_written(&self, register: RegisterId, mask: u32) -> Result<(), Stop> {
        let missing = mask & !self.registers.written(register);
        if missing == 0 {
            return Ok(());
        }
        Err(Stop::lane(FaultKind::UninitialisedRegister { register }, missing.trailing_zeros() as usize))
    }

    /// Executes a control-flow step.
    pub(crate) fn branch(&mut self, action: &Action<'_>) -> Result<(), Stop> {
        let mut next = self.next + 1;
        match *action {
            Action::If { condition, uniform, otherwise } => {
                let holds = self.condition(condition, uniform)?;
                self.open.push(Frame { outer: self.active, otherwise: self.active & !holds });
                self.active = holds;
                if holds == 0 {
                    next = otherwise;
                }
            }
            Action::Else { end } => {
                // They have not been active since the choice, so they are all alive.
                self.active = self.open.last().map_or(0, |frame| frame.otherwise);
                if self.active == 0 {
                    next = end;
                }
            }
            Action::EndIf => self.close(),
            Action::LoopEnter => self.open.push(Frame { outer: self.active, otherwise: 0 }),
            Action::LoopTest { condition, uniform, end } => {
                self.active = self.condition(condition, uniform)?;
                if self.active == 0 {
                    self.close();
                    next = end;
                }
            }
            Action::LoopBack { header } => next = header,
            Action::Operation(_) | Action::End => {}
        }
        self.next = next;
        Ok(())
    }

    fn close(&mut self) {
        self.active = self.open.pop().map_or(0, |frame| frame.outer) & self.alive;
    }

    /// The active lanes for which a condition holds.
    fn condition(&self, condition: RegisterId, uniform: bool) -> Result<u32, Stop> {
        self.must_be_written(condition, self.active)?;
        let holds = self.registers.predicate_of(condition) & self.active;
        if uniform && holds != 0 && holds != self.active {
            return Err(Stop::warp(FaultKind::NonUniformBranch { holds, active: self.active }));
        }
        Ok(holds)
    }
}

#[cfg(test)]
mod tests {
    use flashcore_ir::{Arch, Builder, types::U32};

    use super::*;
    use crate::error::UnlocatedFault;

    /// The verifier refuses kernels that read before they write, so no launch reaches this fault; it guards against a
    /// verifier that lets one pass.
    #[test]
    fn a_lane_reads_only_what_it_has_written() {
        let mut k = Builder::new("test", 32);
        let register = k.register::<U32>().id();
        let kernel = k.finish().verify(Arch::Sm80).expect("a kernel without instructions keeps the rules");
        let layout = Layout::new(&kernel);
        let mut warp = Warp::new(&layout, 32);
        warp.registers.set_word(register, 0x0000_ff0f, &[7; 32]);
        assert!(warp.must_be_written(register, 0x0000_0f0f).is_ok());
        let stop = warp.must_be_written(register, 0x0000_0fff).expect_err("lanes 4 to 7 have not written it");
        let Stop::Fault(fault) = stop else { panic!("a fault of the kernel, not {stop:?}") };
        let UnlocatedFault { kind, lane, address } = *fault;
        assert_eq!((kind, lane, address), (FaultKind::UninitialisedRegister { register }, Some(4), None));
    }
}
