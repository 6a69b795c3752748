//! The memory of a kernel: global buffers, the shared memory of a CTA, and the reasons to refuse an access.

pub(crate) mod global;
pub(crate) mod grid;
pub(crate) mod pages;
pub(crate) mod shared;
mod storage;
pub(crate) mod view;

use crate::fault::{AccessKind, MbarrierState, Nearest};
use crate::race::{CELL_BYTES, Conflict, Stamp};
use crate::stream::Overlap;

/// A refused access. The step that made it turns it into a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The first address concerned.
    pub(crate) address: u64,
    pub(crate) reason: Reason,
}

/// See [`Refusal`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reason {
    OutOfBounds(Box<Nearest>),
    Uninitialised,
    Race {
        earlier: Stamp,
        earlier_kind: AccessKind,
    },
    /// A launch that may still run accesses it.
    Overlap(Box<Overlap>),
    /// An asynchronous copy will write it.
    Filling(Stamp),
    /// An asynchronous copy will read it.
    Draining(Stamp),
    /// The async proxy may not see this write.
    Unfenced(Stamp),
    /// The read-only cache may not see this write.
    Stale(Stamp),
    /// The async proxy may not see this write to global memory.
    UnfencedGlobal(Stamp),
    /// It belongs to an `mbarrier`.
    Mbarrier(MbarrierState),
}

impl Refusal {
    /// A conflict in a stretch of memory whose cells begin at `base`.
    fn new(conflict: Conflict, base: u64) -> Self {
        let (cell, reason) = match conflict {
            Conflict::Race { cell, earlier, earlier_kind } => (cell, Reason::Race { earlier, earlier_kind }),
            Conflict::Filling { cell, started } => (cell, Reason::Filling(started)),
            Conflict::Draining { cell, started } => (cell, Reason::Draining(started)),
        };
        Self { address: base + cell as u64 * CELL_BYTES, reason }
    }
}
