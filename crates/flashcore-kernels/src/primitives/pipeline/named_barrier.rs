//! Named barriers: the ids of every `bar.sync` and `bar.arrive`, in one place.
//!
//! A CTA has 16. Which of them meet in one kernel is written down in [`SETS`], and the build fails if two of a set share
//! an id.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Reg};

/// A barrier, or a run of barriers that an index selects from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NamedBarrier {
    /// All threads of the CTA: `__syncthreads`.
    Cta,
    /// sm80 with producer warps: the consumer warps.
    Sm80Consumers,
    /// sm80 with producer warps, by stage: its tile has arrived; then, by stage again, its tile may be replaced.
    Sm80Stages,
    /// sm90, by consumer warpgroup: the warp-scheduler barrier (ping-pong).
    WarpScheduler,
    /// sm90: all consumer warpgroups.
    Consumers,
    /// sm90 with split KV, by split: the consumer warpgroups of one split of the CTA.
    KvSplit,
    /// sm90 with TMA stores, by warpgroup: its warps, before they overwrite their rows of the Q stage with output.
    OutputTile,
}

/// Barriers of a CTA.
const BARRIERS: u32 = 16;
/// The most consumer warpgroups, and so splits, of a CTA.
const WARPGROUPS: u32 = 4;
/// The most stages of an sm80 kernel with producer warps.
const STAGES: u32 = 7;

/// The barriers of each kind of kernel. A kernel with split KV has no TMA stores: its epilogue is one of the two.
const SETS: [&[NamedBarrier]; 3] = [
    &[NamedBarrier::Cta, NamedBarrier::Sm80Consumers, NamedBarrier::Sm80Stages],
    &[NamedBarrier::Cta, NamedBarrier::WarpScheduler, NamedBarrier::Consumers, NamedBarrier::KvSplit],
    &[NamedBarrier::Cta, NamedBarrier::WarpScheduler, NamedBarrier::Consumers, NamedBarrier::OutputTile],
];

impl NamedBarrier {
    /// The first id, and the number of ids.
    const fn ids(self) -> (u32, u32) {
        match self {
            Self::Cta => (0, 1),
            Self::Sm80Consumers => (1, 1),
            Self::Sm80Stages => (2, 2 * STAGES),
            Self::WarpScheduler => (1, WARPGROUPS),
            Self::Consumers => (8, 1),
            Self::KvSplit => (9, WARPGROUPS),
            Self::OutputTile => (12, WARPGROUPS),
        }
    }

    /// The first id.
    pub(crate) const fn id(self) -> u32 {
        self.ids().0
    }

    /// The id that an index selects.
    pub(crate) fn indexed(self, k: &mut Builder, index: Reg<U32>) -> Reg<U32> {
        k.add(index, self.id())
    }
}

/// True if no two runs of ids share one, and none passes the last.
const fn is_disjoint(set: &[NamedBarrier]) -> bool {
    let mut used = 0u32;
    let mut index = 0;
    while index < set.len() {
        let (first, count) = set[index].ids();
        let ids = ((1 << count) - 1) << first;
        if first + count > BARRIERS || used & ids != 0 {
            return false;
        }
        used |= ids;
        index += 1;
    }
    true
}

const _: () = assert!(is_disjoint(SETS[0]) && is_disjoint(SETS[1]) && is_disjoint(SETS[2]));
