//! Writes kernels: each method appends one operation, or a structure around what a closure appends.
//!
//! ```
//! use flashcore_ir::{Builder, types::{F32, U32, U64}};
//!
//! // y[i] = 2 * x[i] for one warp
//! let mut k = Builder::new("double", 32);
//! let x = k.parameter::<U64>("x");
//! let y = k.parameter::<U64>("y");
//! let lane = k.lane();
//! let from = k.mad_wide(lane, 4u32, x);
//! let to = k.mad_wide(lane, 4u32, y);
//! let value = k.load_one::<F32>(from);
//! let doubled = k.mul(value, 2.0f32);
//! k.store_one(to, doubled);
//! let kernel = k.finish();
//! assert!(kernel.verify(flashcore_ir::Arch::Sm80).is_ok());
//! ```
//!
//! Rust is the macro language: a Rust loop unrolls, a Rust function specializes. [`Builder::section`] names what is
//! being written, and PTX comments, register names and fault reports carry that name.

mod arithmetic;
mod cluster;
mod collective;
mod mbarrier;
mod memory;
mod tensor_copy;
mod warpgroup;

use core::panic::Location;

use crate::Compare;
use crate::kernel::{
    Block, Guard, If, Instruction, Kernel, Loop, Origin, Parameter, ParameterType, Section, SectionId, Statement,
};
use crate::operand::{Reg, RegisterId, Value};
use crate::operation::Op;
use crate::types::{Integer, Pred, Storable, Ty, U32, U64};

pub use memory::{CopyBytes, LoadOptions};
pub use tensor_copy::{CachePolicy, TensorCopyOptions};
pub use warpgroup::{Adds, LeftMatrix, MatrixLayout, SharedMatrix};

/// The most registers per thread that hardware has.
pub const MOST_REGISTERS: u32 = 255;

/// Writes one kernel.
#[derive(Debug)]
pub struct Builder {
    kernel: Kernel,
    /// The open sequence of statements, innermost last.
    open: Vec<Block>,
    section: SectionId,
    guard: Option<Guard>,
}

impl Builder {
    /// Starts a kernel whose CTAs have `threads` threads.
    pub fn new(name: impl Into<String>, threads: u32) -> Self {
        let kernel = Kernel {
            name: name.into(),
            parameters: Vec::new(),
            threads,
            shared_bytes: 0,
            cluster: [1; 3],
            register_budget: MOST_REGISTERS,
            registers: Vec::new(),
            sections: vec![Section { path: vec!["prologue".to_owned()] }],
            body: Block::default(),
        };
        Self { kernel, open: vec![Block::default()], section: SectionId(0), guard: None }
    }

    /// The kernel as written so far.
    pub fn finish(mut self) -> Kernel {
        self.kernel.body = self.open.pop().unwrap_or_default();
        self.kernel
    }

    /// Declares the registers per thread that the compiler may use at most.
    pub fn set_register_budget(&mut self, registers: u32) {
        self.kernel.register_budget = registers;
    }

    /// Threads of the CTA.
    pub const fn threads(&self) -> u32 {
        self.kernel.threads
    }

    /// Reserves `bytes` of shared memory at a multiple of `alignment` (a power of two) and returns their offset from
    /// [`Builder::shared_base`].
    pub fn reserve_shared(&mut self, bytes: u32, alignment: u32) -> u32 {
        // More than can be counted is more than there is: the verifier refuses the kernel.
        let offset = self.kernel.shared_bytes.checked_next_multiple_of(alignment).unwrap_or(u32::MAX);
        self.kernel.shared_bytes = offset.saturating_add(bytes);
        offset
    }

    /// Appends what `write` writes, as part of the section `name` inside the present one.
    pub fn section<R>(&mut self, name: &str, write: impl FnOnce(&mut Self) -> R) -> R {
        let outer = self.section;
        let mut path = match outer {
            SectionId(0) => Vec::new(),
            _ => self.kernel.section(outer).path.clone(),
        };
        path.push(name.to_owned());
        let known = self.kernel.sections.iter().position(|section| section.path == path);
        self.section = SectionId(known.unwrap_or(self.kernel.sections.len()) as u32);
        if known.is_none() {
            self.kernel.sections.push(Section { path });
        }
        let result = write(self);
        self.section = outer;
        result
    }

    /// Declares the next parameter and loads it.
    #[track_caller]
    pub fn parameter<T: Storable>(&mut self, name: &str) -> Reg<T> {
        let parameter = self.kernel.parameters.len() as u32;
        self.kernel.parameters.push(Parameter { name: name.to_owned(), ty: T::TYPE.into() });
        let d = self.register::<T>();
        self.push(Op::LoadParam { ty: T::TYPE, parameter, d: d.id() });
        d
    }

    /// Declares the next parameter, a tensor map, and returns its address.
    #[track_caller]
    pub fn tensor_map(&mut self, name: &str) -> Reg<U64> {
        let parameter = self.kernel.parameters.len() as u32;
        self.kernel.parameters.push(Parameter { name: name.to_owned(), ty: ParameterType::TensorMap });
        let d = self.register::<U64>();
        self.push(Op::TensorMapAddress { parameter, d: d.id() });
        d
    }

    /// A register with no value yet.
    pub fn register<T: Ty>(&mut self) -> Reg<T> {
        Reg::new(self.kernel.add_register(T::TYPE, self.section))
    }

    pub(crate) fn registers<T: Ty>(&mut self, count: u32) -> Vec<Reg<T>> {
        (0..count).map(|_| self.register()).collect()
    }

    /// Appends what `write` writes, each instruction executed only by the lanes for which `predicate` holds.
    /// Instructions only: a structure inside keeps its own condition. Inside another guard, the lanes for which both
    /// hold, by an instruction that combines them.
    #[track_caller]
    pub fn when<R>(&mut self, predicate: Reg<Pred>, write: impl FnOnce(&mut Self) -> R) -> R {
        self.guarded(Guard { predicate: predicate.id(), negated: false }, write)
    }

    /// Like [`Builder::when`], for the lanes for which `predicate` does not hold.
    #[track_caller]
    pub fn unless<R>(&mut self, predicate: Reg<Pred>, write: impl FnOnce(&mut Self) -> R) -> R {
        self.guarded(Guard { predicate: predicate.id(), negated: true }, write)
    }

    #[track_caller]
    fn guarded<R>(&mut self, guard: Guard, write: impl FnOnce(&mut Self) -> R) -> R {
        // Taken before the guards are combined: all lanes do that.
        let outer = self.guard.take();
        // A `match` and no closure, whose caller would be this line.
        self.guard = match outer {
            Some(outer) => Some(self.both(outer, guard)),
            None => Some(guard),
        };
        let result = write(self);
        self.guard = outer;
        result
    }

    /// The guard that holds where both hold.
    #[track_caller]
    fn both(&mut self, outer: Guard, inner: Guard) -> Guard {
        if outer == inner {
            return inner;
        }
        let [a, b] = [outer, inner].map(|guard| Reg::<Pred>::new(guard.predicate));
        let (predicate, negated) = match (outer.negated, inner.negated) {
            (false, false) => (self.and::<Pred>(a, b), false),
            // Neither holds where the disjunction does not.
            (true, true) => (self.or::<Pred>(a, b), true),
            (true, false) => {
                let outer = self.not::<Pred>(a);
                (self.and::<Pred>(outer, b), false)
            }
            (false, true) => {
                let inner = self.not::<Pred>(b);
                (self.and::<Pred>(a, inner), false)
            }
        };
        Guard { predicate: predicate.id(), negated }
    }

    /// `if condition { then }`, where the lanes of a warp may disagree.
    #[track_caller]
    pub fn if_then(&mut self, condition: Reg<Pred>, then: impl FnOnce(&mut Self)) {
        self.choice(condition, false, then, |_| {});
    }

    /// `if condition { then } else { otherwise }`, where the lanes of a warp may disagree.
    #[track_caller]
    pub fn if_else(&mut self, condition: Reg<Pred>, then: impl FnOnce(&mut Self), otherwise: impl FnOnce(&mut Self)) {
        self.choice(condition, false, then, otherwise);
    }

    /// `if condition { then }`, where all lanes of a warp agree: a role, or a decision about the whole tile.
    #[track_caller]
    pub fn if_uniform(&mut self, condition: Reg<Pred>, then: impl FnOnce(&mut Self)) {
        self.choice(condition, true, then, |_| {});
    }

    /// `if condition { then } else { otherwise }`, where all lanes of a warp agree.
    #[track_caller]
    pub fn if_else_uniform(
        &mut self,
        condition: Reg<Pred>,
        then: impl FnOnce(&mut Self),
        otherwise: impl FnOnce(&mut Self),
    ) {
        self.choice(condition, true, then, otherwise);
    }

    #[track_caller]
    fn choice(
        &mut self,
        condition: Reg<Pred>,
        uniform: bool,
        then: impl FnOnce(&mut Self),
        otherwise: impl FnOnce(&mut Self),
    ) {
        let origin = self.origin();
        let then = self.block(then);
        let otherwise = self.block(otherwise);
        self.append(Statement::If(If { condition: condition.id(), uniform, then, otherwise, origin }));
    }

    /// `while condition() { body }`, where all lanes of a warp agree each time.
    #[track_caller]
    pub fn while_uniform(&mut self, condition: impl FnOnce(&mut Self) -> Reg<Pred>, body: impl FnOnce(&mut Self)) {
        self.repeat(true, condition, body);
    }

    /// `while condition() { body }`, where the lanes of a warp may disagree.
    #[track_caller]
    pub fn while_lanes(&mut self, condition: impl FnOnce(&mut Self) -> Reg<Pred>, body: impl FnOnce(&mut Self)) {
        self.repeat(false, condition, body);
    }

    #[track_caller]
    fn repeat(&mut self, uniform: bool, condition: impl FnOnce(&mut Self) -> Reg<Pred>, body: impl FnOnce(&mut Self)) {
        let origin = self.origin();
        let mut predicate = None;
        let header = self.block(|k| predicate = Some(condition(k).id()));
        let body = self.block(body);
        let condition = predicate.unwrap_or(RegisterId(u32::MAX));
        self.append(Statement::Loop(Loop { header, condition, uniform, body, origin }));
    }

    /// `for index in start..end step { body }`, where all lanes of a warp have the same bounds.
    #[track_caller]
    pub fn for_uniform<T: Integer>(
        &mut self,
        start: impl Into<Value<T>>,
        end: impl Into<Value<T>>,
        step: impl Into<Value<T>>,
        body: impl FnOnce(&mut Self, Reg<T>),
    ) {
        self.count(true, start.into(), end.into(), step.into(), body);
    }

    /// A loop like [`Builder::for_uniform`] whose bounds may differ between the lanes of a warp.
    #[track_caller]
    pub fn for_lanes(
        &mut self,
        start: impl Into<Value<U32>>,
        end: impl Into<Value<U32>>,
        body: impl FnOnce(&mut Self, Reg<U32>),
    ) {
        self.count(false, start.into(), end.into(), 1u32.into(), body);
    }

    #[track_caller]
    fn count<T: Integer>(
        &mut self,
        uniform: bool,
        start: Value<T>,
        end: Value<T>,
        step: Value<T>,
        body: impl FnOnce(&mut Self, Reg<T>),
    ) {
        // The caller of a closure is whoever calls it, here; so the instructions of the loop itself are given the
        // origin of the loop.
        let origin = self.origin();
        let index = self.copy(start);
        let (current, end, step) = (Value::from(index).operand(), end.operand(), step.operand());
        self.repeat(
            uniform,
            |k| {
                let d = k.register::<Pred>();
                let compare = Compare::Lt;
                k.push_at(Op::SetPredicate { compare, ty: T::TYPE, d: d.id(), a: current, b: end }, origin);
                d
            },
            |k| {
                body(k, index);
                k.push_at(Op::Add { ty: T::TYPE, d: index.id(), a: current, b: step }, origin);
            },
        );
    }

    fn block(&mut self, write: impl FnOnce(&mut Self)) -> Block {
        let guard = self.guard.take();
        self.open.push(Block::default());
        write(self);
        self.guard = guard;
        self.open.pop().unwrap_or_default()
    }

    #[track_caller]
    pub(crate) fn push(&mut self, op: Op) {
        self.push_at(op, self.origin());
    }

    fn push_at(&mut self, op: Op, origin: Origin) {
        let guard = self.guard;
        self.append(Statement::Instruction(Instruction { op, guard, origin }));
    }

    fn append(&mut self, statement: Statement) {
        if let Some(block) = self.open.last_mut() {
            block.statements.push(statement);
        }
    }

    #[track_caller]
    fn origin(&self) -> Origin {
        let location = Location::caller();
        Origin { section: self.section, file: location.file(), line: location.line() }
    }
}
