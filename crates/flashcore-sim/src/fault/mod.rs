//! Faults: the mistakes of a kernel, with their locations and remedies.

mod hopper;

use core::fmt;

use flashcore_ir::{RegisterId, Space};

pub use hopper::{ClusterBarrierProblem, MbarrierProblem, MbarrierState, WarpgroupProblem};

/// A mistake of the kernel and its location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}\n  at {location}")]
pub struct Fault {
    /// The kind of mistake.
    pub kind: FaultKind,
    /// The location at which the simulator noticed.
    pub location: Location,
}

/// An operation of one warp of one CTA, and its source location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The operation as text.
    pub operation: String,
    /// The section of the kernel, outermost name first.
    pub section: String,
    /// The Rust file that wrote it.
    pub file: &'static str,
    /// The line in it.
    pub line: u32,
    /// The position of the CTA in the grid.
    pub cta: [u32; 3],
    /// The warp in the CTA.
    pub warp: u32,
    /// The first lane concerned; none where the warp acts as one.
    pub lane: Option<u32>,
    /// The address concerned.
    pub address: Option<u64>,
}

impl fmt::Display for Location {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, section, file, line, cta: [x, y, z], warp, lane, address } = self;
        write!(formatter, "`{operation}` in \"{section}\" ({file}:{line}), CTA ({x}, {y}, {z}), warp {warp}")?;
        if let Some(lane) = lane {
            write!(formatter, ", lane {lane}")?;
        }
        if let Some(address) = address {
            write!(formatter, ", address {address:#x}")?;
        }
        Ok(())
    }
}

/// The kind of an access to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Reads and writes atomically.
    Atomic,
}

impl fmt::Display for AccessKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Atomic => "atomic",
        })
    }
}

/// An access of another launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchAccess {
    /// The name of its kernel.
    pub kernel: String,
    /// The kind.
    pub access: AccessKind,
    /// The location.
    pub location: Box<Location>,
}

/// The pending access of an asynchronous copy or `wgmma` in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InFlight {
    /// `cp.async` will write its target in shared memory.
    CopyTarget,
    /// A TMA store will read its source in shared memory.
    BulkSource,
    /// A TMA store will write its target in global memory.
    BulkTarget,
    /// A TMA load will write its target in shared memory.
    TmaLoadTarget,
    /// A `wgmma` will read its operand in shared memory.
    WgmmaOperand,
}

impl InFlight {
    fn advice(self) -> &'static str {
        match self {
            Self::CopyTarget => {
                "wait with `copy_async_wait` in the thread that copies, then synchronise with the others"
            }
            Self::BulkSource => "wait with `bulk_wait(.., read: true)` in the thread that stores, then synchronise",
            Self::WgmmaOperand => "wait with `wgmma_wait` in all four warps, then synchronise",
            Self::TmaLoadTarget => "wait for the phase of its mbarrier with `mbarrier_wait`",
            Self::BulkTarget => "wait with `bulk_wait(.., read: false)` in the thread that stores, then synchronise",
        }
    }
}

/// The action that came before the wait for an asynchronous copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TooEarly {
    /// A read of the copy's bytes.
    Read,
    /// A write of the copy's bytes, by an operation or another copy.
    Write,
    /// The end of the thread that started the copy.
    Exit,
}

impl fmt::Display for TooEarly {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Read => "read of bytes that an asynchronous copy is not known to be done with",
            Self::Write => "write to bytes that an asynchronous copy is not known to be done with",
            Self::Exit => "end of a thread with an asynchronous copy still in flight",
        })
    }
}

/// The buffer nearest to an address that is in none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nearest {
    /// The name of the buffer.
    pub buffer: String,
    /// The address relative to the start of the buffer; negative before it.
    pub offset: i64,
    /// The size of the buffer in bytes.
    pub length: u64,
}

/// A wrong operand of a named barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BarrierProblem {
    /// There are 16 named barriers, 0 to 15.
    NoSuchBarrier,
    /// The lanes of the warp give different operands.
    LanesDisagree,
    /// The count is 0 or not a multiple of the 32 threads of a warp.
    NotWholeWarps,
    /// The count exceeds the threads of the CTA.
    MoreThanCta {
        /// Threads of the CTA.
        threads: u32,
    },
    /// The warp has arrived at it before, and it has not completed since: it would be counted twice.
    ArrivesTwice,
    /// A warp has arrived at it with another count.
    Disagrees {
        /// The count of the first to arrive.
        expected: u32,
    },
}

impl fmt::Display for BarrierProblem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchBarrier => formatter.write_str("named barriers are numbered 0 to 15"),
            Self::LanesDisagree => formatter.write_str("the lanes of a warp must give the same barrier and count"),
            Self::NotWholeWarps => formatter.write_str("the count must be a positive multiple of 32"),
            Self::MoreThanCta { threads } => write!(formatter, "the CTA has only {threads} threads"),
            Self::ArrivesTwice => formatter
                .write_str("this warp arrives a second time before the others have come; make it wait for them first"),
            Self::Disagrees { expected } => {
                write!(formatter, "another warp waits there for {expected}; all participants must give one count")
            }
        }
    }
}

/// A warp that waits, in a deadlock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingWarp {
    /// The event that it waits for.
    pub waits_for: WaitsFor,
    /// The location of the wait.
    pub location: Location,
}

/// The event that a warp waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WaitsFor {
    /// A named barrier of the CTA.
    Barrier {
        /// The barrier.
        barrier: u32,
        /// Threads that have arrived at it.
        arrived: u32,
        /// Threads it waits for.
        expected: u32,
    },
    /// The phase of an `mbarrier`.
    Mbarrier(MbarrierState),
    /// Registers that other warps of the CTA have not given back (`setmaxnreg`).
    Registers {
        /// Registers per thread that it asks for in addition.
        wanted: u32,
        /// Registers per thread of a warp that are free.
        free: u32,
    },
    /// The cluster barrier.
    Cluster {
        /// Warps that have arrived at it.
        arrived: u32,
        /// Warps of the cluster.
        expected: u32,
    },
}

impl fmt::Display for WaitingWarp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "warp {} at ", self.location.warp)?;
        match &self.waits_for {
            WaitsFor::Barrier { barrier, arrived, expected } => {
                write!(formatter, "barrier {barrier} ({arrived} of {expected} threads arrived)")
            }
            WaitsFor::Mbarrier(state) => state.fmt(formatter),
            WaitsFor::Registers { wanted, free } => {
                write!(formatter, "an increase by {wanted} registers ({free} are free)")
            }
            WaitsFor::Cluster { arrived, expected } => {
                write!(formatter, "the cluster barrier ({arrived} of {expected} warps arrived)")
            }
        }
    }
}

/// The kinds of mistakes. The display says what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// Two accesses to the same bytes that nothing orders.
    #[error(
        "race in {space} memory: this {access} is not ordered after the {earlier_access} at {earlier}; synchronise \
         between them (a barrier between warps, `warp_sync` within one; CTAs of a launch cannot)"
    )]
    Race {
        /// The memory.
        space: Space,
        /// The access of this operation.
        access: AccessKind,
        /// The access of the earlier operation.
        earlier_access: AccessKind,
        /// The location of the earlier operation.
        earlier: Box<Location>,
    },
    /// An access to bytes of a launch that overlaps with this one (PDL) and may still run.
    #[error(
        "race between launches: {} may still run, and this {access} is not ordered after {}; {}",
        launch_of(earlier.as_ref()), access_of(earlier.as_ref()), launch_advice(*waited)
    )]
    LaunchRace {
        /// The access of this operation.
        access: AccessKind,
        /// The access of the earlier launch; none of one of which nothing is known.
        earlier: Option<LaunchAccess>,
        /// True if this access is ordered after a `griddepcontrol.wait`, which does not cover that launch.
        waited: bool,
    },
    /// An access outside every buffer, or outside the shared memory of the CTA.
    #[error(
        "{bytes} bytes out of bounds in {space} memory: byte {} of `{}`, which has {}; guard the access or correct the address",
        nearest.offset, nearest.buffer, nearest.length
    )]
    OutOfBounds {
        /// The memory.
        space: Space,
        /// Bytes accessed.
        bytes: u32,
        /// The nearest buffer.
        nearest: Nearest,
    },
    /// An address without the alignment that the operation demands.
    #[error(
        "misaligned address in {space} memory: it must be a multiple of {alignment}; use narrower accesses or align the data"
    )]
    Misaligned {
        /// The memory.
        space: Space,
        /// The alignment in bytes.
        alignment: u32,
    },
    /// A read of bytes that neither the host nor this CTA has written.
    #[error("read of {space} memory that was never written; write it first, or guard the read")]
    UninitialisedMemory {
        /// The memory.
        space: Space,
    },
    /// A read of a register in a lane that has not written it.
    #[error("read of register {register}, which this lane has not written; give it a value on every path")]
    UninitialisedRegister {
        /// The register.
        register: RegisterId,
    },
    /// An asynchronous copy was not waited for.
    #[error("missing wait: {touch}, started at {started}; {}", in_flight.advice())]
    MissingWait {
        /// The memory touched.
        space: Space,
        /// The premature action.
        touch: TooEarly,
        /// The pending access of the copy.
        in_flight: InFlight,
        /// The location at which the copy was started.
        started: Box<Location>,
    },
    /// A TMA store reads bytes that were written without a proxy fence.
    #[error(
        "missing proxy fence: the async proxy may not see the write at {written}; the writing thread must execute \
         `fence_proxy_async` after it and before the barrier"
    )]
    MissingProxyFence {
        /// The write.
        written: Box<Location>,
    },
    /// An asynchronous copy reads global memory that the cluster has written in this launch.
    #[error(
        "the async proxy may not see the write to global memory at {written}; read it with ordinary loads, or in \
         another launch"
    )]
    UnfencedGlobal {
        /// The write.
        written: Box<Location>,
    },
    /// An address that is not that of a tensor map.
    #[error("this is not the address of a tensor map; take it from `Builder::tensor_map`")]
    NoTensorMap,
    /// More or fewer coordinates than the tensor has dimensions.
    #[error("{coordinates} coordinates for a tensor map of {rank} dimensions")]
    TensorRank {
        /// Dimensions of the tensor.
        rank: u32,
        /// Coordinates given.
        coordinates: u32,
    },
    /// A TMA store that begins before the tensor, which an H200 answers with an illegal instruction.
    #[error(
        "a TMA store at coordinate {coordinate} of dimension {dimension}, before the start of the tensor; only its end may be clipped"
    )]
    TensorStoreBefore {
        /// The dimension.
        dimension: u32,
        /// The coordinate.
        coordinate: i32,
    },
    /// A read through the read-only cache of bytes that this launch has written.
    #[error(
        "read through the read-only cache of bytes that this kernel writes, at {written}; load them with another cache mode"
    )]
    StaleRead {
        /// The write.
        written: Box<Location>,
    },
    /// A divergent warp at an operation that needs all its lanes.
    #[error(
        "divergent warp at an operation that all 32 lanes must execute together: active lanes are {active:#010x}; move it out of the branch"
    )]
    DivergentCollective {
        /// The lanes that execute it.
        active: u32,
    },
    /// A branch that was promised to be uniform.
    #[error(
        "the lanes of a warp disagree at a uniform branch: it holds in {holds:#010x} of {active:#010x}; use the form whose lanes may disagree"
    )]
    NonUniformBranch {
        /// The lanes for which the condition holds.
        holds: u32,
        /// The active lanes.
        active: u32,
    },
    /// A named barrier that cannot complete.
    #[error("barrier {barrier} of {threads} threads: {problem}")]
    BarrierCount {
        /// The barrier.
        barrier: u32,
        /// The count given.
        threads: u32,
        /// The problem.
        problem: BarrierProblem,
    },
    /// A wrong use of an `mbarrier`.
    #[error("{}: {problem}", mbarrier(state.as_ref()))]
    Mbarrier {
        /// The problem.
        problem: MbarrierProblem,
        /// The `mbarrier`, if there is one.
        state: Option<MbarrierState>,
    },
    /// Four warps of a warpgroup that do not execute in lockstep.
    #[error("warpgroup: {problem}")]
    Warpgroup {
        /// The problem.
        problem: WarpgroupProblem,
    },
    /// A register that a `wgmma` in flight uses.
    #[error("{access} of register {register}, which the wgmma started at {started} uses; `wgmma_wait` for it first")]
    RegisterInFlight {
        /// The register.
        register: RegisterId,
        /// The access to it.
        access: AccessKind,
        /// The location at which the `wgmma` was started.
        started: Box<Location>,
    },
    /// A `wgmma` that uses a register which ordinary instructions have accessed since the last fence.
    #[error(
        "missing fence: other instructions have accessed register {register} of this wgmma since the last `wgmma_fence`, or \
         there was none; execute `wgmma_fence` before it"
    )]
    MissingWgmmaFence {
        /// The register.
        register: RegisterId,
    },
    /// A thread that ends with a `wgmma` in flight.
    #[error("end of a warp with the wgmma started at {started} still in flight; `wgmma_wait` for it first")]
    UnfinishedWgmma {
        /// The location at which it was started.
        started: Box<Location>,
    },
    /// A `setmaxnreg` increase that does not increase, or a decrease that does not decrease.
    #[error("setmaxnreg to {count} registers per thread goes in the wrong direction: the warp has {current}")]
    RegisterCount {
        /// The count given.
        count: u32,
        /// The registers per thread that the warp has.
        current: u32,
    },
    /// A wrong use of the cluster barrier.
    #[error("cluster barrier: {problem}")]
    ClusterBarrier {
        /// The problem.
        problem: ClusterBarrierProblem,
    },
    /// A CTA that the cluster does not have.
    #[error("the cluster has {ctas} CTAs, and none of rank {rank}")]
    NoSuchCta {
        /// The rank given.
        rank: u32,
        /// CTAs of the cluster.
        ctas: u32,
    },
    /// The shared memory of a CTA that has ended.
    #[error(
        "the CTA ({}, {}, {}) has ended, and its shared memory with it; end all with a `cluster_sync`",
        cta[0], cta[1], cta[2]
    )]
    EndedCta {
        /// The CTA.
        cta: [u32; 3],
    },
    /// No warp can proceed.
    #[error("deadlock, no warp can proceed: {}; some warp has exited or waits elsewhere", list(waiting))]
    Deadlock {
        /// The warps that wait, in order.
        waiting: Vec<WaitingWarp>,
    },
    /// A copy of a size that does not exist.
    #[error("invalid size of an asynchronous copy: {bytes} bytes; it must be {allowed}")]
    InvalidCopySize {
        /// The bytes given.
        bytes: u32,
        /// The allowed sizes.
        allowed: CopySize,
    },
    /// A CTA that does not end.
    #[error("a CTA executed {limit} steps without ending; correct the loop or raise `Options::step_limit`")]
    StepLimit {
        /// The limit.
        limit: u64,
    },
}

/// The sizes that an asynchronous copy can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopySize {
    /// At most this many bytes.
    AtMost(u32),
    /// A positive multiple of this many bytes.
    MultipleOf(u32),
}

impl fmt::Display for CopySize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(bytes) => write!(formatter, "at most {bytes}"),
            Self::MultipleOf(bytes) => write!(formatter, "a positive multiple of {bytes}"),
        }
    }
}

fn launch_of(earlier: Option<&LaunchAccess>) -> String {
    earlier.map_or_else(|| "the launch before".to_owned(), |earlier| format!("the launch of `{}`", earlier.kernel))
}

fn access_of(earlier: Option<&LaunchAccess>) -> String {
    let of = |LaunchAccess { access, location, .. }: &LaunchAccess| format!("its {access} at {location}");
    earlier.map_or_else(|| "what it reads and writes".to_owned(), of)
}

const fn launch_advice(waited: bool) -> &'static str {
    if waited {
        "`grid_dependency_wait` covers the launch directly before, which has not waited for that one: wait in every launch \
         that overlaps"
    } else {
        "execute `grid_dependency_wait` before it; in every launch, wait before `launch_dependents`"
    }
}

fn mbarrier(state: Option<&MbarrierState>) -> String {
    state.map_or_else(|| "mbarrier".to_owned(), ToString::to_string)
}

fn list(waiting: &[WaitingWarp]) -> String {
    waiting.iter().map(WaitingWarp::to_string).collect::<Vec<_>>().join(", ")
}
