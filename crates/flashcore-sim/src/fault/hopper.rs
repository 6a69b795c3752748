//! Faults of `mbarrier`s, clusters and `wgmma`.

use core::fmt;

use super::Location;

/// An `mbarrier` as a report shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MbarrierState {
    /// The address in the shared memory of its CTA.
    pub address: u32,
    /// The current phase, from 0 on.
    pub phase: u32,
    /// Arrivals that this phase still waits for.
    pub pending: u32,
    /// Arrivals of a phase.
    pub count: u32,
    /// Expected bytes (`expect_tx`) that have not come; negative where bytes came before they were expected.
    pub bytes: i64,
}

impl fmt::Display for MbarrierState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, phase, pending, count, bytes } = self;
        let arrived = count - pending;
        write!(
            formatter,
            "mbarrier {address:#x} (phase {phase}, {arrived} of {count} arrived, {bytes} bytes in flight)"
        )
    }
}

/// A wrong use of an `mbarrier`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MbarrierProblem {
    /// Nothing has initialised it, or it was invalidated.
    NotInitialised,
    /// It is in use already.
    Reinitialised,
    /// More arrivals than the phase waits for.
    OverCount {
        /// The arrivals.
        arrivals: u32,
    },
    /// A count of arrivals that does not exist.
    Count {
        /// The count.
        count: u32,
    },
    /// More bytes expected, or come unexpected, than it can count.
    Bytes {
        /// The balance that it would have.
        bytes: i64,
    },
    /// A parity that is neither 0 nor 1.
    Parity {
        /// The parity.
        parity: u32,
    },
    /// An ordinary access to its bytes, or a copy to them.
    Touched,
    /// More phases than the simulator counts.
    TooManyPhases {
        /// The most.
        most: u32,
    },
    /// The async proxy may not see that it is initialised.
    Unfenced,
}

impl fmt::Display for MbarrierProblem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotInitialised => formatter
                .write_str("there is none here; `mbarrier_init` it in one thread, then synchronise with the others"),
            Self::Reinitialised => {
                formatter.write_str("initialised while it is in use; `mbarrier_invalidate` it before, or keep it")
            }
            Self::OverCount { arrivals } => write!(
                formatter,
                "{arrivals} arrivals are not what the phase still waits for; correct its count, or wait for the phase first"
            ),
            Self::Count { count } => write!(formatter, "it counts 1 to 1048575 arrivals, not {count}"),
            Self::Bytes { bytes } => {
                write!(formatter, "a balance of {bytes} bytes is beyond the 1048575 that it counts in each direction")
            }
            Self::Parity { parity } => write!(formatter, "the parity of a phase is 0 or 1, not {parity}"),
            Self::Touched => formatter.write_str(
                "its bytes are for `mbarrier` operations alone; use others, or `mbarrier_invalidate` it before",
            ),
            Self::TooManyPhases { most } => write!(formatter, "the simulator counts {most} phases of it"),
            Self::Unfenced => formatter.write_str(
                "the async proxy may not see that it is initialised; the thread that did it must execute \
                 `fence_mbarrier_init` or `fence_proxy_async` after it and before the barrier",
            ),
        }
    }
}

/// A wrong use of the cluster barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ClusterBarrierProblem {
    /// The warp has arrived and not waited since.
    ArrivesTwice,
    /// The warp has not arrived.
    WaitsBeforeArriving,
}

impl fmt::Display for ClusterBarrierProblem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::ArrivesTwice => "this warp arrives a second time without waiting; `cluster_wait` in between",
            Self::WaitsBeforeArriving => "this warp waits without having arrived; `cluster_arrive` first",
        })
    }
}

/// A wrong use of an operation that the four warps of a warpgroup execute together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WarpgroupProblem {
    /// The CTA does not have all four warps of the group.
    NotWhole {
        /// Warps of the CTA.
        warps: u32,
    },
    /// The lanes of a warp give different operands.
    LanesDisagree,
    /// The warps of the group give different operands.
    OperandsDiffer {
        /// The other warp's operation.
        other: Box<Location>,
    },
    /// Another warp of the group executes another such operation in its place.
    Disagrees {
        /// The operation of the other warp.
        other: Box<Location>,
    },
    /// A descriptor with a base offset.
    BaseOffset {
        /// The descriptor.
        descriptor: u64,
    },
}

impl fmt::Display for WarpgroupProblem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotWhole { warps } => {
                write!(formatter, "a warpgroup is four warps from a multiple of four on, and the CTA has {warps} warps")
            }
            Self::LanesDisagree => formatter.write_str("all lanes must give the same descriptors and the same scale"),
            Self::OperandsDiffer { other } => write!(formatter, "other operands than those at {other}"),
            Self::Disagrees { other } => write!(
                formatter,
                "all four warps must execute the same wgmma operations, and another executes `{other}`"
            ),
            Self::BaseOffset { descriptor } => {
                write!(
                    formatter,
                    "descriptor {descriptor:#x} has a base offset; begin the matrix where its swizzle does"
                )
            }
        }
    }
}
