//! Support for the tests: running a kernel over bytes, and comparing the fault of a wrong kernel as data.

use core::fmt::Debug;
use core::ops::Range;

use flashcore_ir::types::{Pred, U32};
use flashcore_ir::{Arch, Block, Builder, Compare, Kernel, Reg, Space, SpecialRegister, Statement, VerifiedKernel};
use flashcore_sim::{
    AccessKind, Argument, Fault, FaultKind, GlobalMemory, InFlight, Launch, Location, Options, Report, SimError,
    TooEarly, WaitingWarp, WaitsFor, launch,
};

/// The architecture that has every operation.
pub(crate) const ARCH: Arch = Arch::Sm90a;

/// The address at which shared memory begins in the simulator.
pub(crate) const SHARED: u64 = 1024;

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

/// Bytes as words.
pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|chunk| u32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]])).collect()
}

/// A launch of test kernels.
#[derive(Clone)]
pub(crate) struct Setup<'m> {
    threads: u32,
    grid: [u32; 3],
    arguments: Vec<Argument>,
    memory: Option<&'m GlobalMemory>,
    seeds: Range<u64>,
}

/// One CTA of so many threads, without arguments, under seed 0.
pub(crate) fn threads(threads: u32) -> Setup<'static> {
    Setup { threads, grid: [1; 3], arguments: Vec::new(), memory: None, seeds: 0..1 }
}

impl<'m> Setup<'m> {
    /// With buffers, whose addresses are the arguments.
    pub(crate) fn on<const N: usize>(self, memory: &'m GlobalMemory, addresses: [u64; N]) -> Self {
        Self { memory: Some(memory), arguments: addresses.map(Argument::U64).to_vec(), ..self }
    }

    /// With more arguments.
    pub(crate) fn with(mut self, arguments: &[Argument]) -> Self {
        self.arguments.extend_from_slice(arguments);
        self
    }

    pub(crate) fn grid(self, grid: [u32; 3]) -> Self {
        Self { grid, ..self }
    }

    /// Under each of these seeds.
    pub(crate) fn seeds(self, seeds: Range<u64>) -> Self {
        Self { seeds, ..self }
    }

    fn run(&self, kernel: &VerifiedKernel, seed: u64) -> Result<Report, SimError> {
        let launched = Launch { grid: self.grid, arguments: self.arguments.clone() };
        let nothing = GlobalMemory::new();
        launch(kernel, &launched, self.memory.unwrap_or(&nothing), &Options { seed, ..Options::default() })
    }

    /// The kernel runs without a fault. Returns the report of the last run.
    #[track_caller]
    pub(crate) fn passes(&self, kernel: &VerifiedKernel) -> Report {
        let run = |seed| self.run(kernel, seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        self.seeds.clone().fold(None, |_, seed| Some(run(seed))).expect("a seed")
    }

    /// The kernel has this fault. Returns it.
    #[track_caller]
    pub(crate) fn fails(&self, kernel: &VerifiedKernel, expected: &Expected) -> Fault {
        let expected = expected(kernel);
        for seed in self.seeds.clone() {
            assert_eq!(fault(self.run(kernel, seed)), expected, "seed {seed}");
        }
        expected
    }

    /// The kernel that `write` writes with `false` has this fault; with `true` it has none.
    #[track_caller]
    pub(crate) fn check(&self, write: impl Fn(&mut Builder, bool), expected: &Expected) {
        let [wrong, right] = [false, true].map(|right| kernel(self.threads, |k| write(k, right)));
        self.fails(&wrong, expected);
        self.passes(&right);
    }
}

/// A fault of a kernel, whose operations give the texts and lines of its locations.
pub(crate) type Expected = Box<dyn Fn(&Kernel) -> Fault>;

/// The place of an operation: its section, its name in the table, the warp that executes it.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    section: &'static str,
    name: &'static str,
    warp: u32,
    cta: [u32; 3],
    lane: Option<u32>,
    address: Option<u64>,
}

/// An operation that a warp of the first CTA executes.
pub(crate) const fn at(section: &'static str, name: &'static str, warp: u32) -> Place {
    Place { section, name, warp, cta: [0; 3], lane: None, address: None }
}

impl Place {
    pub(crate) const fn lane(self, lane: u32) -> Self {
        Self { lane: Some(lane), ..self }
    }

    pub(crate) const fn address(self, address: u64) -> Self {
        Self { address: Some(address), ..self }
    }

    pub(crate) const fn cta(self, cta: [u32; 3]) -> Self {
        Self { cta, ..self }
    }

    /// The location in a kernel that has one operation of the name in the section.
    #[track_caller]
    pub(crate) fn of(self, kernel: &Kernel) -> Location {
        let Self { section, name, warp, cta, lane, address } = self;
        let mut found = Vec::new();
        kernel.instructions(&mut |instruction| {
            let origin = instruction.origin;
            if kernel.section(origin.section).to_string() == section && instruction.op.entry().name == name {
                found.push((instruction.op.to_string(), origin));
            }
        });
        let [(operation, origin)] = &found[..] else { panic!("`{name}` in `{section}` is {} operations", found.len()) };
        let (operation, file, line) = (operation.clone(), origin.file, origin.line);
        Location { operation, section: section.to_owned(), file, line, cta, warp, lane, address }
    }

    /// The kind of its access to shared memory, or to global memory by an ordinary operation.
    fn access(self) -> AccessKind {
        match self.name {
            "Load" | "LoadMatrix" | "BulkStore" | "TensorStore" => AccessKind::Read,
            "Store" | "StoreMatrix" | "CopyAsync" | "TensorLoad" | "BulkLoad" | "MbarrierInit" => AccessKind::Write,
            "Reduce" | "Atomic" | "MbarrierArrive" | "MbarrierInvalidate" => AccessKind::Atomic,
            other => panic!("`{other}` accesses nothing"),
        }
    }

    /// The memory of its address.
    fn space(self) -> Space {
        if self.address.is_some_and(|address| address > u64::from(u32::MAX)) { Space::Global } else { Space::Shared }
    }
}

/// A fault of one place.
pub(crate) fn faulty(kind: FaultKind, place: Place) -> Expected {
    Box::new(move |kernel| Fault { kind: kind.clone(), location: place.of(kernel) })
}

/// A race of two accesses to an address.
pub(crate) fn race(address: u64, earlier: Place, later: Place) -> Expected {
    Box::new(move |kernel| {
        let [earlier_at, location] = [earlier, later].map(|place| place.address(address).of(kernel));
        let (space, access, earlier_access) = (later.address(address).space(), later.access(), earlier.access());
        Fault { kind: FaultKind::Race { space, access, earlier_access, earlier: Box::new(earlier_at) }, location }
    })
}

/// Something done before an asynchronous copy was waited for; both places have addresses.
pub(crate) fn missing_wait(touch: TooEarly, in_flight: InFlight, started: Place, place: Place) -> Expected {
    Box::new(move |kernel| {
        let started = Box::new(started.of(kernel));
        Fault {
            kind: FaultKind::MissingWait { space: place.space(), touch, in_flight, started },
            location: place.of(kernel),
        }
    })
}

/// An access that does not see an earlier write to an address.
pub(crate) fn unseen(kind: fn(Box<Location>) -> FaultKind, address: u64, written: Place, place: Place) -> Expected {
    Box::new(move |kernel| {
        let [written, location] = [written, place].map(|place| place.address(address).of(kernel));
        Fault { kind: kind(Box::new(written)), location }
    })
}

/// An access by the asynchronous proxy to what was written without a proxy fence.
pub(crate) fn unfenced(address: u64, written: Place, place: Place) -> Expected {
    unseen(|written| FaultKind::MissingProxyFence { written }, address, written, place)
}

/// Warps that wait forever; the first gives the location.
pub(crate) fn deadlock<const N: usize>(waiting: [(WaitsFor, Place); N]) -> Expected {
    Box::new(move |kernel| {
        let waiting = waiting.map(|(waits_for, place)| WaitingWarp { waits_for, location: place.of(kernel) }).to_vec();
        let location = waiting[0].location.clone();
        Fault { kind: FaultKind::Deadlock { waiting }, location }
    })
}

/// A fault of the outermost choice or loop in a section, which dumps as `text`; warp 0 executes it.
pub(crate) fn of_structure(kind: FaultKind, section: &'static str, text: &'static str) -> Expected {
    Box::new(move |kernel| {
        let location = Location { operation: text.to_owned(), ..structure(kernel, section) };
        Fault { kind: kind.clone(), location }
    })
}

/// The location of the outermost choice or loop in a section, but for its text.
#[track_caller]
pub(crate) fn structure(kernel: &Kernel, section: &str) -> Location {
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
    let (file, line, section) = (origin.file, origin.line, section.to_owned());
    Location { operation: String::new(), section, file, line, cta: [0; 3], warp: 0, lane: None, address: None }
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

/// [`one_after_the_other`], with a barrier of the CTA in between if `synchronised`.
pub(crate) fn handover(
    k: &mut Builder,
    synchronised: bool,
    first: impl FnOnce(&mut Builder),
    second: impl FnOnce(&mut Builder),
) {
    one_after_the_other(
        k,
        |k| {
            first(k);
            if synchronised {
                k.cta_sync();
            }
        },
        |k| {
            if synchronised {
                k.cta_sync();
            }
            second(k);
        },
    );
}

/// Reserves `bytes` of shared memory for each lane of a warp. Returns the lane and the address of its slot.
pub(crate) fn slots(k: &mut Builder, bytes: u32) -> [Reg<U32>; 2] {
    k.reserve_shared(32 * bytes, 16);
    let (lane, base) = (k.lane(), k.shared_base());
    [lane, k.mad::<U32>(lane, bytes, base)]
}

/// The slot of another lane, whose number is that of this one changed by the mask.
pub(crate) fn slot_of(k: &mut Builder, lane: Reg<U32>, mask: u32, bytes: u32) -> Reg<U32> {
    let (other, base) = (k.xor::<U32>(lane, mask), k.shared_base());
    k.mad::<U32>(other, bytes, base)
}

/// True in the first thread of the CTA.
pub(crate) fn first_thread(k: &mut Builder) -> Reg<Pred> {
    let thread = k.special(SpecialRegister::ThreadX);
    k.compare::<U32>(Compare::Eq, thread, 0u32)
}

/// True in one lane.
pub(crate) fn is_lane(k: &mut Builder, lane: u32) -> Reg<Pred> {
    let own = k.lane();
    k.compare::<U32>(Compare::Eq, own, lane)
}

/// True in one warp.
pub(crate) fn is_warp(k: &mut Builder, warp: u32) -> Reg<Pred> {
    let own = k.warp();
    k.compare::<U32>(Compare::Eq, own, warp)
}
