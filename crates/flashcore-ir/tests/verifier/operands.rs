//! Rules for the operands of every operation: registers, types, lengths, constants, guards, architecture.

use flashcore_ir::types::{F16x2, F32, Pred, S32, Tf32, U32, U64};
use flashcore_ir::verify::Rule;
use flashcore_ir::{
    Arch, Builder, Compare, If, Instruction, Kernel, MmaShape, Op, Operand, Reg, RegisterId, SectionId, Statement,
    Type, Value,
};

use crate::support::at;
use crate::{Case, case, cases, edit};

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

/// A warp with the lane in register 0, and `lane + lane` in register 1.
fn doubled_lane() -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 32);
    let lane = k.lane();
    let line = line!() + 1;
    k.add(lane, lane);
    (k.finish(), line)
}

fn unknown_operand() -> Case {
    let write = |b| {
        let (mut kernel, line) = doubled_lane();
        edit(&mut kernel, 1, |instruction| {
            instruction.op = Op::Add { ty: Type::U32, d: RegisterId(1), a: Operand::Constant(1), b };
        });
        (kernel, line)
    };
    case(write, Operand::Register(UNKNOWN), Operand::Register(RegisterId(0)), |line| {
        vec![at(line, 1, "Add ty=U32 d=%1, a=0x1, b=%99", Rule::UnknownRegister { name: "b", register: UNKNOWN })]
    })
}

/// The shared base in register 0, and the word it points at in register 1.
fn shared_word(base: RegisterId) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 32);
    let shared = k.shared_base();
    let line = line!() + 1;
    k.load_shared::<U32>(shared, 1);
    let mut kernel = k.finish();
    // A register of 64 bits, which no address in shared memory has.
    kernel.add_register(Type::U64, SectionId(0));
    edit(&mut kernel, 1, |instruction| {
        if let Op::Load { source, .. } = &mut instruction.op {
            source.base = base;
        }
    });
    (kernel, line)
}

fn unknown_address() -> Case {
    case(shared_word, UNKNOWN, RegisterId(0), |line| {
        let text = "Load space=Shared cache=All prefetch=None ty=U32 count=1 d=%1, source=[%99]";
        vec![at(line, 1, text, Rule::UnknownRegister { name: "source", register: UNKNOWN })]
    })
}

fn mistyped_address() -> Case {
    case(shared_word, RegisterId(2), RegisterId(0), |line| {
        let text = "Load space=Shared cache=All prefetch=None ty=U32 count=1 d=%1, source=[%2]";
        let rule =
            Rule::TypeMismatch { name: "source", register: RegisterId(2), actual: Type::U64, expected: Type::U32 };
        // Nor has it been written.
        vec![at(line, 1, text, rule), at(line, 1, text, Rule::ReadBeforeWrite { register: RegisterId(2) })]
    })
}

/// A guarded addition, with the guard of choice.
fn guarded(predicate: RegisterId) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 32);
    let lane = k.lane();
    let low = k.compare(Compare::Lt, lane, 16u32);
    let line = line!() + 1;
    k.when(low, |k| k.add_to(lane, 1u32));
    let mut kernel = k.finish();
    edit(&mut kernel, 2, |instruction| {
        if let Some(guard) = &mut instruction.guard {
            guard.predicate = predicate;
        }
    });
    (kernel, line)
}

fn unknown_guard() -> Case {
    case(guarded, UNKNOWN, RegisterId(1), |line| {
        let rule = Rule::UnknownRegister { name: "guard", register: UNKNOWN };
        vec![at(line, 2, "Add ty=U32 d=%0, a=%0, b=0x1", rule)]
    })
}

fn mistyped_guard() -> Case {
    case(guarded, RegisterId(0), RegisterId(1), |line| {
        let rule =
            Rule::TypeMismatch { name: "guard", register: RegisterId(0), actual: Type::U32, expected: Type::Pred };
        vec![at(line, 2, "Add ty=U32 d=%0, a=%0, b=0x1", rule)]
    })
}

/// A choice and a repetition with the condition of choice; the choice is on the line before the repetition.
fn structures(condition: RegisterId) -> (Kernel, u32) {
    let mut k = Builder::new("kernel", 32);
    let lane = k.lane();
    let low = k.compare(Compare::Lt, lane, 16u32);
    let line = line!() + 1;
    k.if_then(low, Builder::exit);
    k.while_lanes(
        |k| {
            k.lane();
            low
        },
        Builder::exit,
    );
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

fn unknown_conditions() -> Case {
    case(structures, UNKNOWN, RegisterId(1), |line| {
        let rule = Rule::UnknownRegister { name: "condition", register: UNKNOWN };
        vec![at(line, 2, "if", rule.clone()), at(line + 1, 4, "loop", rule)]
    })
}

fn mistyped_condition() -> Case {
    case(structures, RegisterId(0), RegisterId(1), |line| {
        let rule =
            Rule::TypeMismatch { name: "condition", register: RegisterId(0), actual: Type::U32, expected: Type::Pred };
        vec![at(line, 2, "if", rule.clone()), at(line + 1, 4, "loop", rule)]
    })
}

fn mistyped_operand() -> Case {
    let write = |ty| {
        let (mut kernel, line) = doubled_lane();
        kernel.registers[0].ty = ty;
        edit(&mut kernel, 0, |instruction| {
            instruction.op = Op::Mov { ty, d: RegisterId(0), a: Operand::Constant(0) };
        });
        (kernel, line)
    };
    case(write, Type::S32, Type::U32, |line| {
        let rule = |name| Rule::TypeMismatch { name, register: RegisterId(0), actual: Type::S32, expected: Type::U32 };
        let text = "Add ty=U32 d=%1, a=%0, b=%0";
        vec![at(line, 1, text, rule("a")), at(line, 1, text, rule("b"))]
    })
}

fn mistyped_result() -> Case {
    let write = |ty| {
        let (mut kernel, line) = doubled_lane();
        kernel.registers[1].ty = ty;
        (kernel, line)
    };
    case(write, Type::F32, Type::U32, |line| {
        let rule = Rule::TypeMismatch { name: "d", register: RegisterId(1), actual: Type::F32, expected: Type::U32 };
        vec![at(line, 1, "Add ty=U32 d=%1, a=%0, b=%0", rule)]
    })
}

fn type_without_form() -> Case {
    let write = |signed: bool| {
        let mut k = Builder::new("kernel", 32);
        let line = line!() + 1;
        let _ = if signed { k.div::<S32>(7, 2).id() } else { k.div::<U32>(7u32, 2u32).id() };
        (k.finish(), line)
    };
    case(write, true, false, |line| {
        let rule = Rule::TypeNotAllowed { ty: Type::S32, allowed: &[Type::U32, Type::F32] };
        vec![at(line, 0, "Div ty=S32 d=%0, a=0x7, b=0x2", rule)]
    })
}

fn zeros<T: flashcore_ir::types::Ty>(k: &mut Builder, count: usize) -> Vec<Reg<T>> {
    (0..count).map(|_| k.copy(Value::<T>::from_bits(0))).collect()
}

fn short_fragment() -> Case {
    let write = |registers| {
        let mut k = Builder::new("kernel", 32);
        let (a, b) = (zeros::<F16x2>(&mut k, registers), zeros(&mut k, 2));
        let accumulator = zeros::<F32>(&mut k, 4);
        let line = line!() + 1;
        k.mma(MmaShape::M16N8K16, &accumulator, &a, &b);
        (k.finish(), line)
    };
    case(write, 3, 4, |line| {
        let text = "Mma shape=M16N8K16 operand=F16x2 accumulate=F32 d=%5, d=%6, d=%7, d=%8, a=%0, a=%1, a=%2, b=%3, \
                    b=%4, c=%5, c=%6, c=%7, c=%8";
        vec![at(line, 9, text, Rule::Length { name: "a", actual: 3, expected: 4 })]
    })
}

fn long_vector() -> Case {
    let write = |count| {
        let mut k = Builder::new("kernel", 32);
        let rows = k.parameter::<U64>("rows");
        let line = line!() + 1;
        k.load::<F32>(rows, 4);
        let mut kernel = k.finish();
        edit(&mut kernel, 1, |instruction| {
            if let Op::Load { count: declared, .. } = &mut instruction.op {
                *declared = count;
            }
        });
        (kernel, line)
    };
    case(write, 2, 4, |line| {
        let text = "Load space=Global cache=All prefetch=None ty=F32 count=2 d=%1, d=%2, d=%3, d=%4, source=[%0]";
        vec![at(line, 1, text, Rule::Length { name: "d", actual: 4, expected: 2 })]
    })
}

fn missing_source_bytes() -> Case {
    let write = |fill| {
        let mut k = Builder::new("kernel", 32);
        let (from, to) = (k.parameter::<U64>("from"), k.shared_base());
        let line = line!() + 1;
        k.copy_async(to, from, flashcore_ir::builder::CopyBytes::All(16), flashcore_ir::L2Prefetch::None);
        let mut kernel = k.finish();
        edit(&mut kernel, 2, |instruction| {
            if let Op::CopyAsync { zero_fill, .. } = &mut instruction.op {
                *zero_fill = fill;
            }
        });
        (kernel, line)
    };
    case(write, true, false, |line| {
        let text = "CopyAsync bytes=16 cache=L2 prefetch=None zero_fill=true target=[%1], source=[%0]";
        vec![at(line, 2, text, Rule::Length { name: "source_bytes", actual: 0, expected: 1 })]
    })
}

/// Two ones in `f16`.
const ONES: Value<F16x2> = Value::from_bits(0x3c00_3c00);

fn constant_pair() -> Case {
    let write = |moved| {
        let mut k = Builder::new("kernel", 32);
        let ones = k.copy(ONES);
        let value = if moved { ones.into() } else { ONES };
        let line = line!() + 1;
        k.add(ones, value);
        (k.finish(), line)
    };
    case(write, false, true, |line| {
        let rule = Rule::ConstantNotAllowed { name: "b", ty: Type::F16x2 };
        vec![at(line, 1, "Add ty=F16x2 d=%1, a=%0, b=0x3c003c00", rule)]
    })
}

fn constant_predicate() -> Case {
    let write = |moved| {
        let mut k = Builder::new("kernel", 32);
        let yes = k.copy(Value::<Pred>::from_bits(1));
        let value = if moved { yes.into() } else { Value::<Pred>::from_bits(1) };
        let line = line!() + 1;
        k.and::<Pred>(yes, value);
        (k.finish(), line)
    };
    case(write, false, true, |line| {
        let rule = Rule::ConstantNotAllowed { name: "b", ty: Type::Pred };
        vec![at(line, 1, "And ty=Pred d=%1, a=%0, b=0x1", rule)]
    })
}

fn wide_constant() -> Case {
    let write = |bits| {
        let mut k = Builder::new("kernel", 32);
        let line = line!() + 1;
        k.copy(Value::<U32>::from_bits(bits));
        (k.finish(), line)
    };
    case(write, 1 << 32, u64::from(u32::MAX), |line| {
        let rule = Rule::ConstantTooWide { name: "a", bits: 1 << 32, ty: Type::U32 };
        vec![at(line, 0, "Mov ty=U32 d=%0, a=0x100000000", rule)]
    })
}

fn guarded_collective() -> Case {
    let write = |alone: bool| {
        let mut k = Builder::new("kernel", 32);
        let lane = k.lane();
        let first = k.compare(Compare::Eq, lane, 0u32);
        let line = line!() + 3;
        if alone {
            k.when(first, |k| {
                k.warp_sync();
            });
        } else {
            k.warp_sync();
        }
        (k.finish(), line)
    };
    case(write, true, false, |line| vec![at(line, 2, "WarpSync", Rule::GuardedCollective)])
}

/// A guard of the wrong type and a collective under it are two mistakes.
fn guarded_matrix() -> Case {
    let write = |guard| {
        let mut k = Builder::new("kernel", 32);
        let shared = k.shared_base();
        let line = line!() + 1;
        k.load_matrix::<Tf32>(shared, 1, false);
        let mut kernel = k.finish();
        edit(&mut kernel, 1, |instruction| instruction.guard = guard);
        (kernel, line)
    };
    let guard = flashcore_ir::Guard { predicate: RegisterId(0), negated: true };
    case(write, Some(guard), None, |line| {
        let text = "LoadMatrix count=1 transposed=false ty=Tf32 d=%1, source=[%0]";
        let rule =
            Rule::TypeMismatch { name: "guard", register: RegisterId(0), actual: Type::U32, expected: Type::Pred };
        vec![at(line, 1, text, rule), at(line, 1, text, Rule::GuardedCollective)]
    })
}

fn pairs_before_hopper() -> Case {
    let write = |add: bool| {
        let mut k = Builder::new("kernel", 32);
        let pair = k.pair::<flashcore_ir::types::Bf16x2>(1.0f32, 2.0f32);
        let line = line!() + 1;
        let _ = if add { k.add(pair, pair) } else { k.max(pair, pair) };
        (k.finish(), line)
    };
    let errors = |line| {
        let rule = Rule::NotOnArchitecture { arch: Arch::Sm89, since: flashcore_ir::target::HOPPER_PAIRS };
        vec![at(line, 1, "Add ty=Bf16x2 d=%1, a=%0, b=%0", rule)]
    };
    case(write, true, false, errors).on(Arch::Sm89)
}

fn bulk_copies_before_hopper() -> Case {
    let write = |bulk: bool| {
        let mut k = Builder::new("kernel", 32);
        let line = line!() + 2;
        if bulk {
            k.bulk_commit();
        } else {
            k.copy_async_commit();
        }
        (k.finish(), line)
    };
    case(write, true, false, |line| {
        let rule = Rule::NotOnArchitecture { arch: Arch::Sm80, since: flashcore_ir::target::HOPPER };
        vec![at(line, 0, "BulkCommit", rule)]
    })
}

fn unwritten() -> Case {
    let write = |initial: Option<u32>| {
        let mut k = Builder::new("kernel", 32);
        let sum = k.register::<U32>();
        if let Some(value) = initial {
            k.set(sum, value);
        }
        let line = line!() + 1;
        k.add_to(sum, 1u32);
        (k.finish(), line)
    };
    case(write, None, Some(0), |line| {
        vec![at(line, 0, "Add ty=U32 d=%0, a=%0, b=0x1", Rule::ReadBeforeWrite { register: RegisterId(0) })]
    })
}

fn accumulator_twice() -> Case {
    let write = |rows: [usize; 4]| {
        let mut k = Builder::new("kernel", 32);
        let (a, b) = (zeros::<Tf32>(&mut k, 2), zeros(&mut k, 1));
        let accumulator = zeros::<F32>(&mut k, 4);
        let line = line!() + 1;
        k.mma(MmaShape::M16N8K4, &rows.map(|row| accumulator[row]), &a, &b);
        (k.finish(), line)
    };
    case(write, [0, 1, 0, 3], [0, 1, 2, 3], |line| {
        let text = "Mma shape=M16N8K4 operand=Tf32 accumulate=F32 d=%3, d=%4, d=%3, d=%6, a=%0, a=%1, b=%2, c=%3, \
                    c=%4, c=%3, c=%6";
        vec![at(line, 7, text, Rule::WrittenTwice { register: RegisterId(3) })]
    })
}

/// The report of a statement whose section is unknown has no name for it.
fn nameless(error: flashcore_ir::VerifyError) -> flashcore_ir::VerifyError {
    let mut error = error;
    if let flashcore_ir::verify::Location::Statement { section, .. } = &mut error.location {
        section.clear();
    }
    error
}

fn instruction_section() -> Case {
    let write = |section| {
        let (mut kernel, line) = doubled_lane();
        edit(&mut kernel, 1, |Instruction { origin, .. }| origin.section = SectionId(section));
        (kernel, line)
    };
    case(write, 1, 0, |line| {
        let rule = Rule::UnknownSection { section: SectionId(1), declared: 1 };
        vec![nameless(at(line, 1, "Add ty=U32 d=%1, a=%0, b=%0", rule))]
    })
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
