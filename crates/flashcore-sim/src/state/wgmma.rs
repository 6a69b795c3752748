//! The state of a warpgroup: `wgmma`s in flight, the registers they use, and the lockstep of the four warps. The steps
//! on it are in `execute/wgmma.rs`.
//!
//! A `wgmma` is in flight from the step that starts it to the wait that covers its group. In between, its accumulator
//! must not be touched, nor its operands in registers or shared memory written; so the time at which it is computed
//! makes no difference, and it is computed at the last moment, by each warp for its own rows. Before a `wgmma` uses a
//! register that ordinary instructions have touched, there must be a `wgmma.fence`.

use std::collections::VecDeque;

use flashcore_ir::{Accumulation, Fp8, Major, MatrixSource, Op, RegisterId, Type};

use crate::error::Stop;
use crate::execute::matrix_descriptor::SharedMatrix;
use crate::fault::{AccessKind, FaultKind, WarpgroupProblem};
use crate::race::Stamp;

/// Warps of a warpgroup.
pub(crate) const WARPS: usize = 4;

/// The elements of a `wgmma`'s operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Elements {
    /// 16-bit elements, by the type of their pairs.
    Pairs(Type),
    /// 8-bit floats, the types of A and B.
    Fp8([Fp8; 2]),
}

/// The modifiers and registers of a `wgmma`, whatever its elements are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Form<'k> {
    pub(crate) columns: u32,
    pub(crate) elements: Elements,
    pub(crate) accumulate: Type,
    pub(crate) accumulation: Accumulation,
    pub(crate) source: MatrixSource,
    pub(crate) majors: [Major; 2],
    pub(crate) d: &'k [RegisterId],
    pub(crate) scale: &'k [RegisterId],
    pub(crate) a: &'k [RegisterId],
    pub(crate) b: &'k [RegisterId],
}

/// Shape of a product: columns, type of the accumulator, and true for the depth of 8-bit floats.
pub(crate) type Shape = (u32, Type, bool);

impl<'k> Form<'k> {
    /// The form of an operation; none if it is not a `wgmma`.
    pub(crate) fn of(op: &'k Op) -> Option<Self> {
        match *op {
            Op::Wgmma {
                columns,
                operand,
                accumulate,
                accumulation,
                source,
                a_major,
                b_major,
                ref d,
                c: _,
                ref scale,
                ref a,
                ref b,
            } => {
                let (elements, majors) = (Elements::Pairs(operand), [a_major, b_major]);
                Some(Self { columns, elements, accumulate, accumulation, source, majors, d, scale, a, b })
            }
            Op::WgmmaFp8 {
                columns,
                left,
                right,
                accumulation,
                source,
                a_major,
                b_major,
                ref d,
                c: _,
                ref scale,
                ref a,
                ref b,
            } => {
                let (elements, majors) = (Elements::Fp8([left, right]), [a_major, b_major]);
                Some(Self { columns, elements, accumulate: Type::F32, accumulation, source, majors, d, scale, a, b })
            }
            _ => None,
        }
    }

    /// A, if it is in registers.
    pub(crate) fn fragment(&self) -> &'k [RegisterId] {
        if self.source == MatrixSource::Registers { self.a } else { &[] }
    }

    /// The shape, in which two `wgmma`s on one accumulator agree.
    pub(crate) fn shape(&self) -> Shape {
        (self.columns, self.accumulate, matches!(self.elements, Elements::Fp8(_)))
    }
}

/// A `wgmma` that a warp has started.
#[derive(Debug)]
pub(crate) struct Product<'k> {
    pub(crate) started: Stamp,
    pub(crate) op: &'k Op,
    /// The number of its group among those of the warp.
    group: u32,
    pub(crate) adds: bool,
    /// A, if it is in shared memory, and B.
    pub(crate) matrices: Vec<SharedMatrix>,
}

/// The `wgmma`s of a warp in flight.
#[derive(Debug, Default)]
pub(crate) struct InFlightProducts<'k> {
    pending: Vec<Product<'k>>,
    /// Groups that were committed.
    groups: u32,
    /// True if there has been a fence.
    is_fenced: bool,
    /// For each register, the accesses of ordinary instructions since the last fence.
    touched: Vec<Touched>,
    /// For each register, the `wgmma` that uses it.
    users: Vec<Option<User>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Touched {
    #[default]
    No,
    Read,
    Written,
}

#[derive(Debug, Clone, Copy)]
struct User {
    started: Stamp,
    /// The shape of the product whose accumulator the register is part of; none for an operand.
    accumulator: Option<Shape>,
}

/// A register that a `wgmma` in flight uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InUse {
    pub(crate) register: RegisterId,
    pub(crate) access: AccessKind,
    pub(crate) started: Stamp,
}

impl<'k> InFlightProducts<'k> {
    /// For a kernel of so many registers that has `wgmma`s.
    pub(crate) fn new(registers: usize) -> Self {
        Self { touched: vec![Touched::No; registers], users: vec![None; registers], ..Self::default() }
    }

    /// Checks and records the register accesses of an ordinary instruction.
    pub(crate) fn touch(&mut self, reads: &[RegisterId], writes: &[RegisterId]) -> Result<(), InUse> {
        for &register in reads {
            let user = self.users[register.0 as usize].filter(|user| user.accumulator.is_some());
            if let Some(User { started, .. }) = user {
                return Err(InUse { register, access: AccessKind::Read, started });
            }
            let touched = &mut self.touched[register.0 as usize];
            *touched = (*touched).max(Touched::Read);
        }
        for &register in writes {
            if let Some(User { started, .. }) = self.users[register.0 as usize] {
                return Err(InUse { register, access: AccessKind::Write, started });
            }
            self.touched[register.0 as usize] = Touched::Written;
        }
        Ok(())
    }

    /// `wgmma.fence`.
    pub(crate) fn fence(&mut self) {
        self.is_fenced = true;
        self.touched.fill(Touched::No);
    }

    /// Checks the registers of a `wgmma` that is about to start.
    pub(crate) fn check(
        &self,
        d: &[RegisterId],
        a: &[RegisterId],
        shape: Shape,
    ) -> Result<(), Result<InUse, RegisterId>> {
        let unfenced =
            |register: RegisterId, least: Touched| !self.is_fenced || self.touched[register.0 as usize] >= least;
        if let Some(&register) = d.iter().find(|register| unfenced(**register, Touched::Read)) {
            return Err(Err(register));
        }
        if let Some(&register) = a.iter().find(|register| unfenced(**register, Touched::Written)) {
            return Err(Err(register));
        }
        // `wgmma`s of one shape may follow each other on one accumulator.
        for &register in d {
            let other = self.users[register.0 as usize].filter(|user| user.accumulator != Some(shape));
            if let Some(User { started, .. }) = other {
                return Err(Ok(InUse { register, access: AccessKind::Write, started }));
            }
        }
        for &register in a {
            let other = self.users[register.0 as usize].filter(|user| user.accumulator.is_some());
            if let Some(User { started, .. }) = other {
                return Err(Ok(InUse { register, access: AccessKind::Read, started }));
            }
        }
        Ok(())
    }

    /// Records a `wgmma` that has started.
    pub(crate) fn start(&mut self, started: Stamp, op: &'k Op, adds: bool, matrices: Vec<SharedMatrix>) {
        self.pending.push(Product { started, op, group: self.groups, adds, matrices });
        self.mark();
    }

    fn mark(&mut self) {
        self.users.fill(None);
        for product in &self.pending {
            let Some(form) = Form::of(product.op) else { continue };
            for register in form.fragment() {
                self.users[register.0 as usize] = Some(User { started: product.started, accumulator: None });
            }
            for register in form.d {
                let accumulator = Some(form.shape());
                self.users[register.0 as usize] = Some(User { started: product.started, accumulator });
            }
        }
    }

    /// `wgmma.commit_group`.
    pub(crate) fn commit(&mut self) {
        self.groups += 1;
    }

    /// Takes the `wgmma`s that a wait covers, oldest first.
    pub(crate) fn take(&mut self, pending: u32) -> Vec<Product<'k>> {
        let covered = self.groups.saturating_sub(pending);
        let (done, rest) = core::mem::take(&mut self.pending).into_iter().partition(|product| product.group < covered);
        self.pending = rest;
        self.mark();
        done
    }

    /// A `wgmma` that has not been waited for.
    pub(crate) fn unfinished(&self) -> Option<&Product<'k>> {
        self.pending.first()
    }
}

/// The steps that a warpgroup executes in lockstep, from the first that some warp has not reached.
#[derive(Debug, Default)]
pub(crate) struct Warpgroup {
    /// Steps, their operands (the same in all lanes), and the warp that came first.
    log: VecDeque<(usize, Vec<u64>, usize)>,
    /// The number of the first step of the log.
    first: u64,
    /// The number of the next step of each warp.
    next: [u64; WARPS],
}

impl Warpgroup {
    /// Records that a warp reaches a lockstep step with these operands. `warp` is its number in the cluster.
    pub(crate) fn arrive(
        &mut self,
        member: usize,
        warp: usize,
        step: usize,
        operands: &[u64],
    ) -> Result<(), Disagreement> {
        let position = (self.next[member] - self.first) as usize;
        match self.log.get(position) {
            None => self.log.push_back((step, operands.to_vec(), warp)),
            Some((other, _, by)) if *other != step => {
                return Err(Disagreement { step: *other, warp: *by, same: false });
            }
            Some((other, given, by)) if given != operands => {
                return Err(Disagreement { step: *other, warp: *by, same: true });
            }
            Some(_) => {}
        }
        self.next[member] += 1;
        while self.next.iter().all(|&next| next > self.first) {
            self.log.pop_front();
            self.first += 1;
        }
        Ok(())
    }

    /// A step that another warp has executed and this one, which ends, has not.
    pub(crate) fn missed(&self, member: usize) -> Option<Disagreement> {
        let position = (self.next[member] - self.first) as usize;
        self.log.get(position).map(|&(step, _, warp)| Disagreement { step, warp, same: false })
    }
}

/// The step of another warp with which one does not agree.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Disagreement {
    pub(crate) step: usize,
    pub(crate) warp: usize,
    /// True if it is the same step, with other operands.
    pub(crate) same: bool,
}

/// The warpgroup of a warp of a CTA, and its index in it, if the CTA has all four.
pub(crate) fn membership(warp: usize, warps: usize) -> Result<(usize, usize), Stop> {
    let group = warp / WARPS;
    if (group + 1) * WARPS <= warps {
        return Ok((group, warp % WARPS));
    }
    Err(Stop::warp(FaultKind::Warpgroup { problem: WarpgroupProblem::NotWhole { warps: warps as u32 } }))
}
