//! What a kernel can do wrong, and where it did.

mod hopper;

use core::fmt;

use flashcore_ir::{RegisterId, Space};

pub use hopper::{ClusterBarrierProblem, MbarrierProblem, MbarrierState, WarpgroupProblem};

/// A mistake of the kernel: what, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}\n  at {place}")]
pub struct Fault {
    /// What is wrong.
    pub kind: FaultKind,
    /// Where the simulator noticed.
    pub place: Place,
}

/// An operation of one warp of one CTA, and where it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
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

impl fmt::Display for Place {
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

/// What an access does to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Reads and writes in one step.
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

/// What an asynchronous copy that is not finished still has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InFlight {
    /// `cp.async` writes its target in shared memory.
    CopyTarget,
    /// A bulk store reads its source in shared memory.
    BulkSource,
    /// A bulk store writes its target in global memory.
    BulkTarget,
    /// A bulk load or a load of a box writes its target in shared memory.
    TransferTarget,
    /// A product of a warpgroup reads its operand in shared memory.
    ProductOperand,
}

impl InFlight {
    fn advice(self) -> &'static str {
        match self {
            Self::CopyTarget => {
                "wait with `copy_async_wait` in the thread that copies, then synchronise with the others"
            }
            Self::BulkSource => "wait with `bulk_wait(.., read: true)` in the thread that stores, then synchronise",
            Self::ProductOperand => "wait with `wgmma_wait` in all four warps, then synchronise",
            Self::TransferTarget => "wait for the phase of its mbarrier with `mbarrier_wait`",
            Self::BulkTarget => "wait with `bulk_wait(.., read: false)` in the thread that stores, then synchronise",
        }
    }
}

/// What was done before an asynchronous copy was waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TooEarly {
    /// Its bytes were read.
    Read,
    /// Its bytes were written, by an operation or another copy.
    Write,
    /// The thread that started it ended.
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
    /// Its name.
    pub buffer: String,
    /// The address relative to its start; negative before it.
    pub offset: i64,
    /// Its size in bytes.
    pub length: u64,
}

/// What is wrong with the operands of a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BarrierProblem {
    /// There are 16 barriers, 0 to 15.
    NoSuchBarrier,
    /// The lanes of the warp give different operands.
    LanesDisagree,
    /// The count is 0 or no multiple of the 32 threads of a warp.
    NotWholeWarps,
    /// The CTA has only so many threads.
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
            Self::NoSuchBarrier => formatter.write_str("barriers are numbered 0 to 15"),
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

/// A warp that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingWarp {
    /// What it waits for.
    pub waits_for: WaitsFor,
    /// Where the warp waits.
    pub place: Place,
}

/// What a warp waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WaitsFor {
    /// A barrier of the CTA.
    Barrier {
        /// The barrier.
        barrier: u32,
        /// Threads that have arrived at it.
        arrived: u32,
        /// Threads it waits for.
        expected: u32,
    },
    /// The phase of an `mbarrier` that some lanes wait for to complete.
    Mbarrier(MbarrierState),
    /// Registers that others of the CTA have not given back.
    Registers {
        /// More registers per thread that it wants.
        wanted: u32,
        /// Registers per thread of a warp that there are.
        free: u32,
    },
    /// The barrier of the cluster.
    Cluster {
        /// Warps that have arrived at it.
        arrived: u32,
        /// Warps of the cluster.
        expected: u32,
    },
}

impl fmt::Display for WaitingWarp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "warp {} at ", self.place.warp)?;
        match &self.waits_for {
            WaitsFor::Barrier { barrier, arrived, expected } => {
                write!(formatter, "barrier {barrier} ({arrived} of {expected} threads arrived)")
            }
            WaitsFor::Mbarrier(state) => state.fmt(formatter),
            WaitsFor::Registers { wanted, free } => {
                write!(formatter, "an increase by {wanted} registers ({free} are free)")
            }
            WaitsFor::Cluster { arrived, expected } => {
                write!(formatter, "the barrier of the cluster ({arrived} of {expected} warps arrived)")
            }
        }
    }
}

/// What a kernel did wrong. The display says what to change.
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
        /// What this operation does.
        access: AccessKind,
        /// What the earlier one did.
        earlier_access: AccessKind,
        /// The earlier one.
        earlier: Box<Place>,
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
    /// An address that is no multiple of what the operation demands.
    #[error(
        "misaligned address in {space} memory: it must be a multiple of {alignment}; use narrower accesses or align the data"
    )]
    Misaligned {
        /// The memory.
        space: Space,
        /// Bytes of which the address must be a multiple.
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
        /// What was done too early.
        touch: TooEarly,
        /// What the copy still has to do.
        in_flight: InFlight,
        /// Where the copy was started.
        started: Box<Place>,
    },
    /// A bulk store reads what was written without a proxy fence.
    #[error(
        "missing proxy fence: the asynchronous proxy may not see the write at {written}; the writing thread must execute \
         `fence_proxy_async` after it and before the barrier"
    )]
    MissingProxyFence {
        /// The write.
        written: Box<Place>,
    },
    /// An asynchronous copy reads global memory that the cluster has written in this launch.
    #[error(
        "the asynchronous proxy may not see the write to global memory at {written}; read it with ordinary loads, or in \
         another launch"
    )]
    UnfencedGlobal {
        /// The write.
        written: Box<Place>,
    },
    /// An address that is not that of a tensor map.
    #[error("this is no address of a tensor map; take it from `Builder::tensor_map`")]
    NoTensorMap,
    /// Coordinates of another tensor.
    #[error("{coordinates} coordinates for a tensor map of {rank} dimensions")]
    TensorRank {
        /// Dimensions of the tensor.
        rank: u32,
        /// Coordinates given.
        coordinates: u32,
    },
    /// A store that begins before the tensor, which an H200 answers with an illegal instruction.
    #[error(
        "a tensor store at coordinate {coordinate} of dimension {dimension}, which is before the tensor; clip it at the end only"
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
        written: Box<Place>,
    },
    /// Part of a warp at an operation that needs all of it.
    #[error(
        "divergent warp at an operation that all 32 lanes must execute together: active lanes are {active:#010x}; move it out of the branch"
    )]
    DivergentCollective {
        /// The lanes that execute it.
        active: u32,
    },
    /// A branch that promised agreement.
    #[error(
        "the lanes of a warp disagree at a uniform branch: it holds in {holds:#010x} of {active:#010x}; use the form whose lanes may disagree"
    )]
    NonUniformBranch {
        /// The lanes for which the condition holds.
        holds: u32,
        /// The active lanes.
        active: u32,
    },
    /// A barrier that cannot be met.
    #[error("barrier {barrier} of {threads} threads: {problem}")]
    BarrierCount {
        /// The barrier.
        barrier: u32,
        /// The count given.
        threads: u32,
        /// What is wrong with it.
        problem: BarrierProblem,
    },
    /// A wrong use of an `mbarrier`.
    #[error("{}: {problem}", mbarrier(state.as_ref()))]
    Mbarrier {
        /// What is wrong.
        problem: MbarrierProblem,
        /// The barrier, if there is one.
        state: Option<MbarrierState>,
    },
    /// Four warps that do not do together what they must.
    #[error("warpgroup: {problem}")]
    Warpgroup {
        /// What is wrong.
        problem: WarpgroupProblem,
    },
    /// A register that a product of a warpgroup uses.
    #[error("{access} of register {register}, which the product started at {started} uses; `wgmma_wait` for it first")]
    RegisterInFlight {
        /// The register.
        register: RegisterId,
        /// What was done with it.
        access: AccessKind,
        /// Where the product was started.
        started: Box<Place>,
    },
    /// A product of a warpgroup that uses what ordinary instructions have touched.
    #[error(
        "missing fence: register {register} of this product was touched by other instructions, or by none that a fence \
         orders; `wgmma_fence` before it"
    )]
    MissingWgmmaFence {
        /// The register.
        register: RegisterId,
    },
    /// A thread that ends with a product under way.
    #[error("end of a warp with the product under way that was started at {started}; `wgmma_wait` for it")]
    UnfinishedProduct {
        /// Where it was started.
        started: Box<Place>,
    },
    /// An increase that is none, or a decrease.
    #[error("a change to {count} registers per thread in the wrong direction: the warp has {current}")]
    RegisterCount {
        /// The count given.
        count: u32,
        /// What the warp has.
        current: u32,
    },
    /// A wrong use of the barrier of the cluster.
    #[error("barrier of the cluster: {problem}")]
    ClusterBarrier {
        /// What is wrong.
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
    /// No warp can go on.
    #[error("deadlock, no warp can go on: {}; some warp has exited or waits elsewhere", list(waiting))]
    Deadlock {
        /// The warps that wait, in order.
        waiting: Vec<WaitingWarp>,
    },
    /// A copy of a size that does not exist.
    #[error("invalid size of an asynchronous copy: {bytes} bytes; it must be {allowed}")]
    InvalidCopySize {
        /// The bytes given.
        bytes: u32,
        /// What is possible.
        allowed: CopySize,
    },
    /// A CTA that does not end.
    #[error("a CTA executed {limit} steps without an end; correct the loop or raise `Options::step_limit`")]
    StepLimit {
        /// The limit.
        limit: u64,
    },
}

/// The sizes an asynchronous copy can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopySize {
    /// At most so many.
    AtMost(u32),
    /// A multiple of so many, not 0.
    MultipleOf(u32),
}

impl fmt::Display for CopySize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(bytes) => write!(formatter, "at most {bytes}"),
            Self::MultipleOf(bytes) => write!(formatter, "a multiple of {bytes}, more than none"),
        }
    }
}

fn mbarrier(state: Option<&MbarrierState>) -> String {
    state.map_or_else(|| "mbarrier".to_owned(), ToString::to_string)
}

fn list(waiting: &[WaitingWarp]) -> String {
    waiting.iter().map(WaitingWarp::to_string).collect::<Vec<_>>().join(", ")
}
