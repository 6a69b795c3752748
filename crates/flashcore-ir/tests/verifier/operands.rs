//! Rules for the operands of every operation: registers, types, lengths, constants, guards, architecture.

use flashcore_ir::builder::CopyBytes;
use flashcore_ir::types::{Bf16x2, F16x2, F32, Pred, S32, Tf32, Ty, U32, U64};
use flashcore_ir::verify::{Location, Rule};
use flashcore_ir::{
    Arch, Builder, Compare, Guard, If, Instruction, Kernel, L2Prefetch, MmaShape, Op, Operand, Reg, RegisterId,
    SectionId, Statement, Type, Value, VerifyError,
};

use crate::support::at;
use crate::{Case, case, cases, changed, edit, mistake, reports, set};

cases! {
    unknown_operand unknown_address unknown_guard unknown_conditions
    mistyped_operand mistyped_result mistyped_address mistyped_guard mistyped_condition
    type_without_form
    short_fragment long_vector missing_source_bytes
    constant_pair constant_predicate wide_constant
    guarded_collective guarded_matrix
    pairs_before_hopper bulk_copies_before_hopper
    unwritten
    accumulator_twice
    instruction_section structure_section
}

const UNKNOWN: RegisterId = RegisterId(99);

const fn mismatch(name: &'static str, register: u32, actual: Type, expected: Type) -> Rule {
    Rule::TypeMismatch { name, register: RegisterId(register), actual, expected }
}

const DOUBLED: (usize, &str) = (1, "Add ty=U32 d=%1, a=%0, b=%0");

/// A warp with the lane in register 0, and `lane + lane` in register 1; `change` changes the wrong one.
fn doubled_lane<const N: usize>(
    change: impl FnOnce(&mut Kernel),
    (index, text): (usize, &str),
    rules: [Rule; N],
) -> Case {
    let mut k = Builder::new("kernel", 32);
    let lane = k.lane();
    k.add(lane, lane);
    let corrected = k.finish();
    let mut broken = corrected.clone();
    change(&mut broken);
    Case { arch: Arch::Sm80, errors: reports(&broken, index, text, rules), broken, corrected }
}

fn unknown_operand() -> Case {
    let wrong = Op::Add { ty: Type::U32, d: RegisterId(1), a: Operand::Constant(1), b: Operand::Register(UNKNOWN) };
    let rule = Rule::UnknownRegister { name: "b", register: UNKNOWN };
    let change = |kernel: &mut Kernel| edit(kernel, 1, |instruction| instruction.op = wrong.clone());
    doubled_lane(change, (1, "Add ty=U32 d=%1, a=0x1, b=%99"), [rule])
}

fn mistyped_operand() -> Case {
    let change = |kernel: &mut Kernel| {
        kernel.registers[0].ty = Type::S32;
        edit(kernel, 0, |instruction| {
            instruction.op = Op::Mov { ty: Type::S32, d: RegisterId(0), a: Operand::Constant(0) };
        });
    };
    doubled_lane(change, DOUBLED, ["a", "b"].map(|name| mismatch(name, 0, Type::S32, Type::U32)))
}

fn mistyped_result() -> Case {
    let change = |kernel: &mut Kernel| kernel.registers[1].ty = Type::F32;
    doubled_lane(change, DOUBLED, [mismatch("d", 1, Type::F32, Type::U32)])
}

/// The shared base in register 0, and the word that an address points at in register 1.
fn address<const N: usize>(base: RegisterId, rules: [Rule; N]) -> Case {
    let write = |k: &mut Builder| {
        let shared = k.shared_base();
        k.load_shared::<U32>(shared, 1);
        // A register of 64 bits, which no address in shared memory has.
        k.register::<U64>();
    };
    let change = |op: &mut Op, base| {
        if let Op::Load { source, .. } = op {
            source.base = base;
        }
    };
    let text = format!("Load space=Shared cache=All prefetch=None ty=U32 count=1 d=%1, source=[{base}]");
    changed(write, change, [base, RegisterId(0)], (1, &text), rules)
}

fn unknown_address() -> Case {
    address(UNKNOWN, [Rule::UnknownRegister { name: "source", register: UNKNOWN }])
}

/// Nor has it been written.
fn mistyped_address() -> Case {
    let register = RegisterId(2);
    address(register, [mismatch("source", 2, Type::U64, Type::U32), Rule::ReadBeforeWrite { register }])
}

/// A guarded addition, with the guard of choice.
fn guarded(wrong: RegisterId, rule: Rule) -> Case {
    let write = |k: &mut Builder, ()| {
        let lane = k.lane();
        let low = k.compare(Compare::Lt, lane, 16u32);
        k.when(low, |k| k.add_to(lane, 1u32));
    };
    let mut case = mistake(write, [(); 2], (2, "Add ty=U32 d=%0, a=%0, b=0x1"), [rule]);
    edit(&mut case.broken, 2, |instruction| instruction.guard = Some(Guard { predicate: wrong, negated: false }));
    case
}

fn unknown_guard() -> Case {
    guarded(UNKNOWN, Rule::UnknownRegister { name: "guard", register: UNKNOWN })
}

fn mistyped_guard() -> Case {
    guarded(RegisterId(0), mismatch("guard", 0, Type::U32, Type::Pred))
}

/// A choice and a repetition with the condition of choice; the choice is on the line before the repetition.
fn structures(condition: RegisterId) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 32);
    let lane = k.lane();
    let low = k.compare(Compare::Lt, lane, 16u32);
    let header = |k: &mut Builder| {
        k.lane();
        low
    };
    let line = line!() + 1;
    k.if_then(low, Builder::exit);
    k.while_lanes(header, Builder::exit);
    let mut kernel = k.finish();
    for statement in &mut kernel.body.statements {
        match statement {
            Statement::Instruction(_) => {}
            Statement::If(choice) => choice.condition = condition,
            Statement::Loop(repetition) => repetition.condition = condition,
        }
    }
    (kernel, line)
}

fn conditions(wrong: RegisterId, rule: Rule) -> Case {
    case(structures, wrong, RegisterId(1), |line| vec![at(line, 2, "if", rule.clone()), at(line + 1, 4, "loop", rule)])
}

fn unknown_conditions() -> Case {
    conditions(UNKNOWN, Rule::UnknownRegister { name: "condition", register: UNKNOWN })
}

fn mistyped_condition() -> Case {
    conditions(RegisterId(0), mismatch("condition", 0, Type::U32, Type::Pred))
}

fn type_without_form() -> Case {
    let write = |k: &mut Builder, signed| {
        let _ = if signed { k.div::<S32>(7, 2).id() } else { k.div::<U32>(7u32, 2u32).id() };
    };
    let rule = Rule::TypeNotAllowed { ty: Type::S32, allowed: &[Type::U32, Type::F32] };
    mistake(write, [true, false], (0, "Div ty=S32 d=%0, a=0x7, b=0x2"), [rule])
}

fn zeros<T: Ty>(k: &mut Builder, count: usize) -> Vec<Reg<T>> {
    (0..count).map(|_| k.copy(Value::<T>::from_bits(0))).collect()
}

fn short_fragment() -> Case {
    let write = |k: &mut Builder, registers| {
        let (a, b) = (zeros::<F16x2>(k, registers), zeros(k, 2));
        let accumulator = zeros::<F32>(k, 4);
        k.mma(MmaShape::M16N8K16, &accumulator, &a, &b);
    };
    let text = "Mma shape=M16N8K16 operand=F16x2 accumulate=F32 d=%5, d=%6, d=%7, d=%8, a=%0, a=%1, a=%2, b=%3, \
                b=%4, c=%5, c=%6, c=%7, c=%8";
    mistake(write, [3, 4], (9, text), [Rule::Length { name: "a", actual: 3, expected: 4 }])
}

fn long_vector() -> Case {
    let write = |k: &mut Builder| {
        let rows = k.parameter::<U64>("rows");
        k.load::<F32>(rows, 4);
    };
    let text = "Load space=Global cache=All prefetch=None ty=F32 count=2 d=%1, d=%2, d=%3, d=%4, source=[%0]";
    changed(write, set!(Load.count), [2, 4], (1, text), [Rule::Length { name: "d", actual: 4, expected: 2 }])
}

fn missing_source_bytes() -> Case {
    let write = |k: &mut Builder| {
        let (from, to) = (k.parameter::<U64>("from"), k.shared_base());
        k.copy_async(to, from, CopyBytes::All(16), L2Prefetch::None);
    };
    let text = "CopyAsync bytes=16 cache=L2 prefetch=None zero_fill=true target=[%1], source=[%0]";
    let rule = Rule::Length { name: "source_bytes", actual: 0, expected: 1 };
    changed(write, set!(CopyAsync.zero_fill), [true, false], (2, text), [rule])
}

fn constant_pair() -> Case {
    let write = |k: &mut Builder, constant| {
        let ones = Value::<F16x2>::from_bits(0x3c00_3c00);
        let moved = k.copy(ones);
        k.add(moved, if constant { ones } else { moved.into() });
    };
    let rule = Rule::ConstantNotAllowed { name: "b", ty: Type::F16x2 };
    mistake(write, [true, false], (1, "Add ty=F16x2 d=%1, a=%0, b=0x3c003c00"), [rule])
}

fn constant_predicate() -> Case {
    let write = |k: &mut Builder, constant| {
        let yes = Value::<Pred>::from_bits(1);
        let moved = k.copy(yes);
        k.and::<Pred>(moved, if constant { yes } else { moved.into() });
    };
    let rule = Rule::ConstantNotAllowed { name: "b", ty: Type::Pred };
    mistake(write, [true, false], (1, "And ty=Pred d=%1, a=%0, b=0x1"), [rule])
}

fn wide_constant() -> Case {
    let write = |k: &mut Builder, bits| {
        k.copy(Value::<U32>::from_bits(bits));
    };
    let rule = Rule::ConstantTooWide { name: "a", bits: 1 << 32, ty: Type::U32 };
    mistake(write, [1 << 32, u64::from(u32::MAX)], (0, "Mov ty=U32 d=%0, a=0x100000000"), [rule])
}

fn guarded_collective() -> Case {
    let write = |k: &mut Builder, alone| {
        let lane = k.lane();
        let first = k.compare(Compare::Eq, lane, 0u32);
        if alone { k.when(first, |k| k.warp_sync()) } else { k.warp_sync() }
    };
    mistake(write, [true, false], (2, "WarpSync"), [Rule::GuardedCollective])
}

/// A guard of the wrong type and a collective under it are two mistakes.
fn guarded_matrix() -> Case {
    let write = |k: &mut Builder, ()| {
        let shared = k.shared_base();
        k.load_matrix::<Tf32>(shared, 1, false);
    };
    let text = "LoadMatrix count=1 transposed=false ty=Tf32 d=%1, source=[%0]";
    let rules = [mismatch("guard", 0, Type::U32, Type::Pred), Rule::GuardedCollective];
    let mut case = mistake(write, [(); 2], (1, text), rules);
    let guard = Guard { predicate: RegisterId(0), negated: true };
    edit(&mut case.broken, 1, |instruction| instruction.guard = Some(guard));
    case
}

fn pairs_before_hopper() -> Case {
    let write = |k: &mut Builder, add| {
        let pair = k.pair::<Bf16x2>(1.0f32, 2.0f32);
        let _ = if add { k.add(pair, pair) } else { k.max(pair, pair) };
    };
    let rule = Rule::NotOnArchitecture { arch: Arch::Sm89, since: flashcore_ir::target::HOPPER_PAIRS };
    mistake(write, [true, false], (1, "Add ty=Bf16x2 d=%1, a=%0, b=%0"), [rule]).on(Arch::Sm89)
}

fn bulk_copies_before_hopper() -> Case {
    let write = |k: &mut Builder, bulk| if bulk { k.bulk_commit() } else { k.copy_async_commit() };
    let rule = Rule::NotOnArchitecture { arch: Arch::Sm80, since: flashcore_ir::target::HOPPER };
    mistake(write, [true, false], (0, "BulkCommit"), [rule])
}

fn unwritten() -> Case {
    let write = |k: &mut Builder, written| {
        let (sum, lane) = (k.register::<U32>(), k.lane());
        k.set(if written { sum } else { lane }, 0u32);
        k.add_to(sum, 1u32);
    };
    let rule = Rule::ReadBeforeWrite { register: RegisterId(0) };
    mistake(write, [false, true], (2, "Add ty=U32 d=%0, a=%0, b=0x1"), [rule])
}

fn accumulator_twice() -> Case {
    let write = |k: &mut Builder, rows: [usize; 4]| {
        let (a, b) = (zeros::<Tf32>(k, 2), zeros(k, 1));
        let accumulator = zeros::<F32>(k, 4);
        k.mma(MmaShape::M16N8K4, &rows.map(|row| accumulator[row]), &a, &b);
    };
    let text = "Mma shape=M16N8K4 operand=Tf32 accumulate=F32 d=%3, d=%4, d=%3, d=%6, a=%0, a=%1, b=%2, c=%3, \
                c=%4, c=%3, c=%6";
    let rule = Rule::WrittenTwice { register: RegisterId(3) };
    mistake(write, [[0, 1, 0, 3], [0, 1, 2, 3]], (7, text), [rule])
}

/// The report of a statement whose section is unknown has no name for it.
fn nameless(mut error: VerifyError) -> VerifyError {
    if let Location::Statement { section, .. } = &mut error.location {
        section.clear();
    }
    error
}

fn instruction_section() -> Case {
    let rule = Rule::UnknownSection { section: SectionId(1), declared: 1 };
    let mut case = doubled_lane(|_| {}, DOUBLED, [rule]);
    edit(&mut case.broken, 1, |Instruction { origin, .. }| origin.section = SectionId(1));
    case.errors = case.errors.into_iter().map(nameless).collect();
    case
}

fn structure_section() -> Case {
    let write = |section| {
        let (mut kernel, line) = structures(RegisterId(1));
        for statement in &mut kernel.body.statements {
            if let Statement::If(If { origin, .. }) = statement {
                origin.section = SectionId(section);
            }
        }
        (kernel, line)
    };
    case(write, 7, 0, |line| {
        vec![nameless(at(line, 2, "if", Rule::UnknownSection { section: SectionId(7), declared: 1 }))]
    })
}
