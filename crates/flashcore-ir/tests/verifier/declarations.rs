//! The declarations of a kernel: threads, memory, registers, parameters, names, sections.

use flashcore_ir::types::{F16, U32, U64};
use flashcore_ir::verify::Rule;
use flashcore_ir::{Arch, Builder, Kernel, Op, Parameter, Register, RegisterId, SectionId, Type};

use crate::support::at;
use crate::{Case, case, cases, declared};

cases! {
    no_threads too_many_threads threads_beyond_count
    shared_memory_of_ampere shared_memory_of_hopper shared_memory_beyond_count
    budget_too_small budget_too_large budget_times_threads budget_in_granules budget_in_whole_warps
    parameter_bytes parameter_padding duplicate_parameter parameter_type_without_form parameter_without_memory_form
    kernel_name parameter_name empty_name reserved_name
    register_section
}

/// A kernel of 32 threads that does nothing, with one declaration changed; no line leads to it.
fn declaration<T>(change: impl Fn(&mut Kernel, T), mistake: T, correction: T, rules: Vec<Rule>) -> Case {
    let write = |value| {
        let mut kernel = Builder::new("kernel", 32).finish();
        change(&mut kernel, value);
        (kernel, 0)
    };
    case(write, mistake, correction, |_| rules.into_iter().map(declared).collect())
}

fn threads(mistake: u32, correction: u32, rule: Rule) -> Case {
    declaration(|kernel, threads| kernel.threads = threads, mistake, correction, vec![rule])
}

fn no_threads() -> Case {
    threads(0, 1, Rule::Threads { threads: 0 })
}

fn too_many_threads() -> Case {
    threads(1025, 1024, Rule::Threads { threads: 1025 })
}

/// The other rules that count threads must survive them.
fn threads_beyond_count() -> Case {
    let write = |threads| {
        let mut k = Builder::new("kernel", threads);
        k.set_register_budget(64);
        let line = line!() + 1;
        k.cta_sync();
        (k.finish(), line)
    };
    case(write, u32::MAX, 1024, |line| {
        vec![
            declared(Rule::Threads { threads: u32::MAX }),
            declared(Rule::RegisterBudget { budget: 64, threads: u32::MAX }),
            at(
                line,
                0,
                "BarrierSync barrier=0x0, threads=0xffffffff",
                Rule::BarrierThreads { threads: u64::from(u32::MAX), of: u32::MAX },
            ),
        ]
    })
}

fn shared_memory(mistake: u32, limit: u32, arch: Arch) -> Case {
    let rule = Rule::SharedMemory { bytes: mistake, limit, arch };
    declaration(|kernel, bytes| kernel.shared_bytes = bytes, mistake, limit, vec![rule]).on(arch)
}

fn shared_memory_of_ampere() -> Case {
    shared_memory(163 * 1024 + 1, 163 * 1024, Arch::Sm80)
}

fn shared_memory_of_hopper() -> Case {
    shared_memory(227 * 1024 + 1, 227 * 1024, Arch::Sm90a)
}

fn shared_memory_beyond_count() -> Case {
    let write = |bytes| {
        let mut k = Builder::new("kernel", 32);
        k.reserve_shared(16, 16);
        k.reserve_shared(bytes, 128);
        k.reserve_shared(16, 128);
        (k.finish(), 0)
    };
    let limit = 163 * 1024;
    case(write, u32::MAX, 1024, |_| vec![declared(Rule::SharedMemory { bytes: u32::MAX, limit, arch: Arch::Sm80 })])
}

fn budget(threads: u32, mistake: u32, correction: u32) -> Case {
    let change = |kernel: &mut Kernel, budget| {
        kernel.threads = threads;
        kernel.register_budget = budget;
    };
    declaration(change, mistake, correction, vec![Rule::RegisterBudget { budget: mistake, threads }])
}

fn budget_too_small() -> Case {
    budget(32, 23, 24)
}

fn budget_too_large() -> Case {
    budget(32, 256, 255)
}

/// 255 is the budget of a kernel that declares none, so it promises nothing.
fn budget_times_threads() -> Case {
    budget(1024, 254, 255)
}

/// 68 · 960 registers would fit, but a lane gets 72 of them.
fn budget_in_granules() -> Case {
    budget(960, 68, 64)
}

/// 200 · 325 registers would fit, but the eleventh warp has 32 lanes as well.
fn budget_in_whole_warps() -> Case {
    budget(325, 200, 184)
}

fn parameters(kernel: &mut Kernel, types: &[Type]) {
    kernel.parameters =
        types.iter().enumerate().map(|(index, ty)| Parameter { name: format!("p{index}"), ty: (*ty).into() }).collect();
}

fn parameter_bytes() -> Case {
    let (mistake, correction) = ([Type::U64; 513].to_vec(), [Type::U64; 512].to_vec());
    let rule = Rule::ParameterBytes { bytes: 4104 };
    declaration(|kernel, types: Vec<Type>| parameters(kernel, &types), mistake, correction, vec![rule])
}

/// 257 times 12 bytes would fit, but 8 of each must begin at a multiple of 8.
fn parameter_padding() -> Case {
    let (mistake, correction) = ([Type::U32, Type::U64].repeat(257), [Type::U32, Type::U64].repeat(256));
    let rule = Rule::ParameterBytes { bytes: 4112 };
    declaration(|kernel, types: Vec<Type>| parameters(kernel, &types), mistake, correction, vec![rule])
}

fn duplicate_parameter() -> Case {
    let write = |name: &str| {
        let mut k = Builder::new("kernel", 32);
        k.parameter::<U32>("rows");
        k.parameter::<U64>("keys");
        k.parameter::<U32>(name);
        (k.finish(), 0)
    };
    case(write, "rows", "columns", |_| vec![declared(Rule::DuplicateParameter { name: "rows".to_owned() })])
}

/// The types that the table can load.
fn loadable() -> &'static [Type] {
    Op::LoadParam { ty: Type::U32, parameter: 0, d: RegisterId(0) }.type_choice().unwrap().1
}

fn parameter_type_without_form() -> Case {
    let write = |half: bool| {
        let mut k = Builder::new("kernel", 32);
        let line = line!() + 1;
        let _ = if half { k.parameter::<F16>("x").id() } else { k.parameter::<U32>("x").id() };
        (k.finish(), line)
    };
    let allowed = loadable();
    case(write, true, false, |line| {
        vec![
            declared(Rule::NoParameterType { name: "x".to_owned(), ty: Type::F16, allowed }),
            at(line, 0, "LoadParam ty=F16 parameter=0 d=%0", Rule::TypeNotAllowed { ty: Type::F16, allowed }),
        ]
    })
}

/// Even if it is never loaded, it has to be declared.
fn parameter_without_memory_form() -> Case {
    let rule = Rule::NoParameterType { name: "p1".to_owned(), ty: Type::Pred, allowed: loadable() };
    let change = |kernel: &mut Kernel, ty| parameters(kernel, &[Type::U64, ty]);
    declaration(change, Type::Pred, Type::U32, vec![rule])
}

fn kernel_name() -> Case {
    let write = |name: &str| (Builder::new(name, 32).finish(), 0);
    let rule = Rule::Name { name: "two words".to_owned() };
    let location = flashcore_ir::verify::Location::Kernel { name: "two words".to_owned() };
    case(write, "two words", "two_words", |_| vec![flashcore_ir::VerifyError { location, rule }])
}

fn named(mistake: &'static str, correction: &'static str) -> Case {
    let write = |name: &str| {
        let mut k = Builder::new("kernel", 32);
        k.parameter::<U32>(name);
        (k.finish(), 0)
    };
    case(write, mistake, correction, |_| vec![declared(Rule::Name { name: mistake.to_owned() })])
}

fn parameter_name() -> Case {
    named("2nd", "n2d")
}

fn empty_name() -> Case {
    named("", "x")
}

/// `WARP_SZ` is a number to PTX.
fn reserved_name() -> Case {
    named("WARP_SZ", "warp_sz")
}

fn register_section() -> Case {
    let change = |kernel: &mut Kernel, section| {
        let register = Register { ty: Type::U32, section: SectionId(section), number: 0 };
        kernel.registers = vec![register, Register { number: 1, ..register }];
    };
    declaration(change, 1, 0, vec![Rule::UnknownSection { section: SectionId(1), declared: 1 }])
}
