//! Support for the tests: running a kernel over bytes.

use core::fmt::Debug;

use flashcore_ir::types::U32;
use flashcore_ir::{Arch, Block, Builder, Compare, Kernel, Space, Statement, VerifiedKernel};
use flashcore_sim::{
    Argument, Fault, FaultKind, GlobalMemory, InFlight, Launch, Location, Options, Report, SimError, TooEarly, launch,
};

/// The architecture that has every operation.
pub(crate) const ARCH: Arch = Arch::Sm90a;

/// The kernel that a closure writes.
pub(crate) fn kernel(threads: u32, write: impl FnOnce(&mut Builder)) -> VerifiedKernel {
    let mut builder = Builder::new("test", threads);
    write(&mut builder);
    verified(builder.finish())
}

/// A kernel that keeps the rules.
pub(crate) fn verified(kernel: Kernel) -> VerifiedKernel {
    kernel.verify(ARCH).unwrap_or_else(|errors| panic!("{errors:#?}"))
}

/// A run of one CTA.
pub(crate) fn run(kernel: &VerifiedKernel, arguments: &[Argument], memory: &GlobalMemory) -> Result<Report, SimError> {
    run_seeded(kernel, arguments, memory, 0)
}

/// A run of one CTA under a seed.
pub(crate) fn run_seeded(
    kernel: &VerifiedKernel,
    arguments: &[Argument],
    memory: &GlobalMemory,
    seed: u64,
) -> Result<Report, SimError> {
    run_with(kernel, arguments, memory, Options { seed, ..Options::default() })
}

/// A run of one CTA with options.
pub(crate) fn run_with(
    kernel: &VerifiedKernel,
    arguments: &[Argument],
    memory: &GlobalMemory,
    options: Options,
) -> Result<Report, SimError> {
    launch(kernel, &Launch { grid: [1, 1, 1], arguments: arguments.to_vec() }, memory, &options)
}

/// The fault of a run.
#[track_caller]
pub(crate) fn fault<T: Debug>(result: Result<T, SimError>) -> Fault {
    match result {
        Err(SimError::Fault(fault)) => *fault,
        other => panic!("expected a fault, got {other:#?}"),
    }
}

/// Numbers as bytes.
pub(crate) fn bytes<const N: usize, T>(values: &[T], to_bytes: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(to_bytes).collect()
}

/// Bytes as words.
pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|chunk| u32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]])).collect()
}

/// The address at which shared memory begins in the simulator.
pub(crate) const SHARED: u64 = 1024;

/// The location of the operation called `name` in a section of the kernel, executed by a warp of the first CTA.
#[track_caller]
pub(crate) fn location(kernel: &Kernel, section: &str, name: &str, warp: u32) -> Location {
    let mut found = Vec::new();
    kernel.instructions(&mut |instruction| {
        let origin = instruction.origin;
        if kernel.section(origin.section).to_string() == section && instruction.op.entry().name == name {
            found.push((instruction.op.to_string(), origin));
        }
    });
    let [(operation, origin)] = &found[..] else { panic!("`{name}` in `{section}` is {} operations", found.len()) };
    Location {
        operation: operation.clone(),
        section: section.to_owned(),
        file: origin.file,
        line: origin.line,
        cta: [0, 0, 0],
        warp,
        lane: None,
        address: None,
    }
}

/// The location of the one choice or loop in a section of the kernel, but for its text.
#[track_caller]
pub(crate) fn structure(kernel: &Kernel, section: &str, warp: u32) -> Location {
    fn collect<'k>(block: &'k Block, found: &mut Vec<&'k Statement>) {
        for statement in &block.statements {
            match statement {
                Statement::Instruction(_) => continue,
                Statement::If(choice) => {
                    collect(&choice.then, found);
                    collect(&choice.otherwise, found);
                }
                Statement::Loop(repetition) => {
                    collect(&repetition.header, found);
                    collect(&repetition.body, found);
                }
            }
            found.push(statement);
        }
    }
    let mut found = Vec::new();
    collect(&kernel.body, &mut found);
    // Of nested ones, the outermost comes last.
    let origin =
        found.into_iter().map(Statement::origin).rfind(|origin| kernel.section(origin.section).to_string() == section);
    let origin = origin.unwrap_or_else(|| panic!("no structure in `{section}`"));
    Location {
        operation: String::new(),
        section: section.to_owned(),
        file: origin.file,
        line: origin.line,
        cta: [0, 0, 0],
        warp,
        lane: None,
        address: None,
    }
}

/// Details of a location that tests add.
pub(crate) trait At {
    /// In a lane.
    fn lane(self, lane: u32) -> Self;
    /// At an address.
    fn address(self, address: u64) -> Self;
    /// In another CTA.
    fn cta(self, x: u32) -> Self;
}

impl At for Location {
    fn lane(self, lane: u32) -> Self {
        Self { lane: Some(lane), ..self }
    }

    fn address(self, address: u64) -> Self {
        Self { address: Some(address), ..self }
    }

    fn cta(self, x: u32) -> Self {
        Self { cta: [x, 0, 0], ..self }
    }
}

/// Keeps a warp busy for so long that every other one gets ahead of it.
pub(crate) fn delay(k: &mut Builder) {
    k.section("delay", |k| k.for_uniform::<U32>(0u32, 2000u32, 1u32, |_, _| {}));
}

/// Appends `first` for warp 0 and, long after it, `second` for warp 1.
pub(crate) fn one_after_the_other(
    k: &mut Builder,
    first: impl FnOnce(&mut Builder),
    second: impl FnOnce(&mut Builder),
) {
    let warp = k.warp();
    let is_first = k.compare::<U32>(Compare::Eq, warp, 0u32);
    k.if_else_uniform(is_first, first, |k| {
        delay(k);
        second(k);
    });
}

/// The report of something done before an asynchronous copy was waited for.
pub(crate) fn missing_wait(touch: TooEarly, in_flight: InFlight, started: Location, location: Location) -> Fault {
    let space = match in_flight {
        InFlight::CopyTarget | InFlight::BulkSource | InFlight::TmaLoadTarget | InFlight::WgmmaOperand => Space::Shared,
        InFlight::BulkTarget => Space::Global,
    };
    Fault { kind: FaultKind::MissingWait { space, touch, in_flight, started: Box::new(started) }, location }
}
