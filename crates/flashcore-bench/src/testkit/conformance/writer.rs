//! Writes the kernel of a case together with its buffers.
//!
//! The typed builder of the language knows each operation in the forms that kernels use; here every form that the
//! table has is written as the table has it, with registers of whatever type it asks for.

use core::panic::Location;

use flashcore_ir::{
    Address, Arch, Block, Compare, Guard, If, Instruction, Kernel, L2Prefetch, LoadCache, Loop, Op, Operand, Origin,
    Parameter, RegisterId, Section, SectionId, Space, SpecialRegister, Statement, StoreCache, TABLE, Type,
};

use super::case::{ConformanceCase, Input, Output, Scalar, Tolerance};
use super::inputs::Fill;

/// Threads of a CTA, unless a case needs another number: four warps.
pub(super) const THREADS: u32 = 128;
/// CTAs, unless a case needs another number.
pub(super) const CTAS: u32 = 16;

/// The parameter numbers of outputs and scalars while the number of inputs is not known.
const OUTPUTS: u32 = 1 << 16;
const SCALARS: u32 = 1 << 17;

/// A kernel being written.
pub(super) struct Writer {
    name: String,
    kernel: Kernel,
    open: Vec<Block>,
    grid: [u32; 3],
    inputs: Vec<Input>,
    outputs: Vec<Output>,
    scalars: Vec<Scalar>,
    /// The thread in the CTA.
    pub(super) local: RegisterId,
    /// The thread in the grid.
    pub(super) thread: RegisterId,
}

pub(super) const fn register(id: RegisterId) -> Operand {
    Operand::Register(id)
}

pub(super) fn constant(bits: impl Into<u64>) -> Operand {
    Operand::Constant(bits.into())
}

pub(super) const fn at(base: RegisterId, offset: i32) -> Address {
    Address { base, offset }
}

impl Writer {
    #[track_caller]
    pub(super) fn new(name: impl Into<String>) -> Self {
        Self::with_launch(name, THREADS, [CTAS, 1, 1])
    }

    #[track_caller]
    pub(super) fn with_launch(name: impl Into<String>, threads: u32, grid: [u32; 3]) -> Self {
        let name = name.into();
        let identifier: String =
            name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' }).collect();
        let kernel = Kernel {
            name: identifier,
            parameters: Vec::new(),
            threads,
            shared_bytes: 0,
            cluster: [1; 3],
            register_budget: flashcore_ir::builder::MOST_REGISTERS,
            registers: Vec::new(),
            sections: vec![Section { path: vec!["case".to_owned()] }],
            body: Block::default(),
        };
        let nothing = RegisterId(0);
        let mut writer = Self {
            name,
            kernel,
            open: vec![Block::default()],
            grid,
            inputs: Vec::new(),
            outputs: Vec::new(),
            scalars: Vec::new(),
            local: nothing,
            thread: nothing,
        };
        writer.local = writer.special(SpecialRegister::ThreadX);
        let mut cta = writer.special(SpecialRegister::CtaX);
        if grid[1] * grid[2] > 1 {
            let (y, z) = (writer.special(SpecialRegister::CtaY), writer.special(SpecialRegister::CtaZ));
            let row = writer.mad(z, grid[1], y);
            cta = writer.mad(row, grid[0], cta);
        }
        writer.thread = writer.mad(cta, threads, writer.local);
        writer
    }

    /// The threads of the grid.
    pub(super) fn count(&self) -> usize {
        self.grid.iter().product::<u32>() as usize * self.kernel.threads as usize
    }

    pub(super) fn register(&mut self, ty: Type) -> RegisterId {
        self.kernel.add_register(ty, SectionId(0))
    }

    #[track_caller]
    pub(super) fn push(&mut self, op: Op) {
        self.append(op, None);
    }

    /// An operation of the lanes for which the predicate holds, or does not.
    #[track_caller]
    pub(super) fn push_where(&mut self, predicate: RegisterId, negated: bool, op: Op) {
        self.append(op, Some(Guard { predicate, negated }));
    }

    #[track_caller]
    fn append(&mut self, op: Op, guard: Option<Guard>) {
        let origin = origin();
        self.statement(Statement::Instruction(Instruction { op, guard, origin }));
    }

    fn statement(&mut self, statement: Statement) {
        if let Some(block) = self.open.last_mut() {
            block.statements.push(statement);
        }
    }

    fn block(&mut self, write: impl FnOnce(&mut Self)) -> Block {
        self.open.push(Block::default());
        write(self);
        self.open.pop().unwrap_or_default()
    }

    /// A choice; `uniform` promises that the lanes of a warp agree.
    #[track_caller]
    pub(super) fn choice(
        &mut self,
        condition: RegisterId,
        uniform: bool,
        then: impl FnOnce(&mut Self),
        otherwise: impl FnOnce(&mut Self),
    ) {
        let origin = origin();
        let then = self.block(then);
        let otherwise = self.block(otherwise);
        self.statement(Statement::If(If { condition, uniform, then, otherwise, origin }));
    }

    /// A loop whose header leaves the condition in a predicate.
    #[track_caller]
    pub(super) fn repeat(
        &mut self,
        condition: RegisterId,
        uniform: bool,
        header: impl FnOnce(&mut Self),
        body: impl FnOnce(&mut Self),
    ) {
        let origin = origin();
        let header = self.block(header);
        let body = self.block(body);
        self.statement(Statement::Loop(Loop { header, condition, uniform, body, origin }));
    }

    #[track_caller]
    pub(super) fn special(&mut self, register: SpecialRegister) -> RegisterId {
        let d = self.register(Type::U32);
        self.push(Op::Special { register, d });
        d
    }

    /// A register of a type with these bits.
    #[track_caller]
    pub(super) fn set(&mut self, ty: Type, bits: u64) -> RegisterId {
        let d = self.register(ty);
        self.push(Op::Mov { ty, d, a: Operand::Constant(bits) });
        d
    }

    /// `a + b` of words.
    #[track_caller]
    pub(super) fn add(&mut self, a: RegisterId, b: Operand) -> RegisterId {
        let d = self.register(Type::U32);
        self.push(Op::Add { ty: Type::U32, d, a: register(a), b });
        d
    }

    /// `a * factor + c` of words.
    #[track_caller]
    pub(super) fn mad(&mut self, a: RegisterId, factor: u32, c: RegisterId) -> RegisterId {
        let d = self.register(Type::U32);
        self.push(Op::Mad { ty: Type::U32, d, a: register(a), b: constant(factor), c: register(c) });
        d
    }

    /// `a & mask` of words.
    #[track_caller]
    pub(super) fn mask(&mut self, a: RegisterId, mask: u32) -> RegisterId {
        let d = self.register(Type::U32);
        self.push(Op::And { ty: Type::U32, d, a: register(a), b: constant(mask) });
        d
    }

    /// The address of element `index` of `bytes` bytes each.
    #[track_caller]
    pub(super) fn element(&mut self, base: RegisterId, index: RegisterId, bytes: u32) -> RegisterId {
        let d = self.register(Type::U64);
        self.push(Op::MadWide { ty: Type::U32, d, a: register(index), b: constant(bytes), c: register(base) });
        d
    }

    /// `a compare b` of words.
    #[track_caller]
    pub(super) fn compare(&mut self, compare: Compare, a: RegisterId, b: impl Into<u64>) -> RegisterId {
        let d = self.register(Type::Pred);
        self.push(Op::SetPredicate { compare, ty: Type::U32, d, a: register(a), b: constant(b) });
        d
    }

    /// Reserves shared memory and returns the address of `bytes` for each thread of the CTA.
    #[track_caller]
    pub(super) fn shared_slots(&mut self, bytes: u32) -> RegisterId {
        let base = self.shared(bytes * self.kernel.threads);
        self.mad(self.local, bytes, base)
    }

    /// Reserves shared memory and returns its address.
    #[track_caller]
    pub(super) fn shared(&mut self, bytes: u32) -> RegisterId {
        let offset = self.kernel.shared_bytes.next_multiple_of(128);
        self.kernel.shared_bytes = offset + bytes;
        let base = self.register(Type::U32);
        self.push(Op::SharedBase { d: base });
        self.add(base, constant(offset))
    }

    /// Waits for all threads of the CTA.
    #[track_caller]
    pub(super) fn barrier(&mut self) {
        self.push(Op::BarrierSync { barrier: constant(0u32), threads: constant(self.kernel.threads) });
    }

    /// The address of an input.
    #[track_caller]
    pub(super) fn input_address(&mut self, name: &str, ty: Type, count: usize, fill: Fill) -> RegisterId {
        let parameter = self.inputs.len() as u32;
        self.inputs.push(Input { name: name.to_owned(), ty, count, fill });
        self.load_parameter(Type::U64, parameter)
    }

    /// A value for each thread. Predicates are stored as words, 0 or not.
    #[track_caller]
    pub(super) fn input(&mut self, name: &str, ty: Type, fill: Fill) -> RegisterId {
        let stored = stored(ty);
        let base = self.input_address(name, stored, self.count(), fill);
        let address = self.element(base, self.thread, stored.bytes());
        let value = self.load(stored, address);
        if ty == Type::Pred { self.compare(Compare::Ne, value, 0u32) } else { value }
    }

    /// A plain load of one element of global memory.
    #[track_caller]
    pub(super) fn load(&mut self, ty: Type, address: RegisterId) -> RegisterId {
        self.load_many(Space::Global, ty, 1, at(address, 0))[0]
    }

    #[track_caller]
    pub(super) fn load_many(&mut self, space: Space, ty: Type, count: u32, source: Address) -> Vec<RegisterId> {
        let d: Vec<RegisterId> = (0..count).map(|_| self.register(ty)).collect();
        let (cache, prefetch) = (LoadCache::All, L2Prefetch::None);
        self.push(Op::Load { space, cache, prefetch, ty, count, d: d.clone(), source });
        d
    }

    #[track_caller]
    pub(super) fn store_many(&mut self, space: Space, ty: Type, a: Vec<RegisterId>, target: Address) {
        let (cache, count) = (StoreCache::WriteBack, a.len() as u32);
        self.push(Op::Store { space, cache, ty, count, a, target });
    }

    /// The address of an output.
    #[track_caller]
    pub(super) fn output_address(&mut self, name: &str, ty: Type, count: usize) -> RegisterId {
        let parameter = OUTPUTS + self.outputs.len() as u32;
        self.outputs.push(Output { name: name.to_owned(), ty, count });
        self.load_parameter(Type::U64, parameter)
    }

    /// Stores a value of each thread. Predicates are stored as words, 0 or 1.
    #[track_caller]
    pub(super) fn output(&mut self, name: &str, ty: Type, value: RegisterId) {
        let stored = stored(ty);
        let base = self.output_address(name, stored, self.count());
        let address = self.element(base, self.thread, stored.bytes());
        let value = if ty == Type::Pred {
            let d = self.register(Type::U32);
            let (a, b) = (constant(1u32), constant(0u32));
            self.push(Op::Select { ty: Type::U32, d, a, b, condition: vec![value] });
            d
        } else {
            value
        };
        self.store_many(Space::Global, stored, vec![value], at(address, 0));
    }

    /// A scalar parameter, after the addresses.
    #[track_caller]
    pub(super) fn scalar(&mut self, scalar: Scalar) -> RegisterId {
        let parameter = SCALARS + self.scalars.len() as u32;
        self.scalars.push(scalar);
        self.load_parameter(scalar.ty, parameter)
    }

    #[track_caller]
    fn load_parameter(&mut self, ty: Type, parameter: u32) -> RegisterId {
        let d = self.register(ty);
        self.push(Op::LoadParam { ty, parameter, d });
        d
    }

    /// The case.
    pub(super) fn finish(mut self, operation: &str, tolerance: Tolerance) -> ConformanceCase {
        self.kernel.body = self.open.pop().unwrap_or_default();
        let (inputs, outputs) = (self.inputs.len() as u32, self.outputs.len() as u32);
        self.kernel.instructions_mut(&mut |instruction| {
            if let Op::LoadParam { parameter, .. } = &mut instruction.op {
                *parameter = match *parameter {
                    scalar @ SCALARS.. => inputs + outputs + scalar - SCALARS,
                    output @ OUTPUTS.. => inputs + output - OUTPUTS,
                    input => input,
                };
            }
        });
        let name = |kind: &str, index: usize| format!("{kind}{index}");
        let addresses = (0..self.inputs.len())
            .map(|index| name("input", index))
            .chain((0..self.outputs.len()).map(|index| name("output", index)))
            .map(|name| Parameter { name, ty: Type::U64.into() });
        let scalars = self.scalars.iter().enumerate();
        let scalars = scalars.map(|(index, scalar)| Parameter { name: name("scalar", index), ty: scalar.ty.into() });
        self.kernel.parameters = addresses.chain(scalars).collect();
        let since = self.kernel.since();
        ConformanceCase {
            name: self.name,
            operation: row(operation),
            arch: Arch::ALL.into_iter().find(|arch| arch.has(since)).unwrap_or(Arch::Sm120),
            kernel: self.kernel,
            grid: self.grid,
            inputs: self.inputs,
            outputs: self.outputs,
            scalars: self.scalars,
            tensor_maps: Vec::new(),
            tolerance,
        }
    }
}

/// The name of a row of the table; one that is no row stays visible as such in the tests.
fn row(operation: &str) -> &'static str {
    TABLE.iter().map(|entry| entry.name).find(|name| *name == operation).unwrap_or("no row of the table")
}

/// The type under which memory holds values of a type.
const fn stored(ty: Type) -> Type {
    match ty {
        Type::Pred => Type::U32,
        _ => ty,
    }
}

#[track_caller]
fn origin() -> Origin {
    let location = Location::caller();
    Origin { section: SectionId(0), file: location.file(), line: location.line() }
}
