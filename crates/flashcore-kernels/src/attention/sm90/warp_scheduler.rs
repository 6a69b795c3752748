//! Warp-scheduler barrier (ping-pong): consumer warpgroups go through a phase of the mainloop one at a time.

use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Compare, Reg};

use super::WARPGROUP;
use crate::config::WarpScheduler;
use crate::primitives::NamedBarrier;

/// Threads that meet at a barrier: those of the warpgroup that waits, and of the one that lets it go on.
const THREADS: u32 = 2 * WARPGROUP;

/// The named barriers of a warpgroup: each waits for the one before it.
#[derive(Debug, Clone, Copy)]
pub(super) struct WarpSchedulerBarrier {
    /// The phase that one warpgroup has at a time.
    phase: WarpScheduler,
    barriers: Option<Barriers>,
}

/// The place of a warpgroup in the cycle.
#[derive(Debug, Clone, Copy)]
struct Barriers {
    warpgroup: Reg<U32>,
    warpgroups: u32,
    /// The barrier at which this warpgroup waits.
    own: Reg<U32>,
    /// The barrier at which the next one does.
    next: Reg<U32>,
}

impl WarpSchedulerBarrier {
    pub(super) fn new(k: &mut Builder, phase: WarpScheduler, warpgroup: Reg<U32>, warpgroups: u32) -> Self {
        let barriers = (phase != WarpScheduler::Free && warpgroups > 1).then(|| {
            let own = NamedBarrier::WarpScheduler.indexed(k, warpgroup);
            let is_last = k.compare(Compare::Eq, warpgroup, warpgroups - 1);
            let next = k.add(own, 1u32);
            Barriers { warpgroup, warpgroups, own, next: k.select(is_last, NamedBarrier::WarpScheduler.id(), next) }
        });
        Self { phase, barriers }
    }

    /// Lets the first warpgroup go first: the last one does it.
    pub(super) fn init(&self, k: &mut Builder) {
        if let Some(Barriers { warpgroup, warpgroups, next, .. }) = self.barriers {
            let is_last = k.compare(Compare::Eq, warpgroup, warpgroups - 1);
            k.if_uniform(is_last, |k| k.barrier_arrive(next, THREADS));
        }
    }

    /// Waits for the previous warpgroup, if `phase` is the one that warpgroups have one at a time.
    pub(super) fn sync(&self, k: &mut Builder, phase: WarpScheduler) {
        if let Some(barriers) = self.barriers.filter(|_| self.phase == phase) {
            k.barrier_sync(barriers.own, THREADS);
        }
    }

    /// Lets the next warpgroup go on.
    pub(super) fn arrive(&self, k: &mut Builder, phase: WarpScheduler) {
        if let Some(barriers) = self.barriers.filter(|_| self.phase == phase) {
            k.barrier_arrive(barriers.next, THREADS);
        }
    }

    /// Drains the last arrival: the first warpgroup waits for it, since the last one has arrived at its barrier.
    pub(super) fn finish(&self, k: &mut Builder) {
        if let Some(Barriers { warpgroup, own, .. }) = self.barriers {
            let is_first = k.compare(Compare::Eq, warpgroup, 0u32);
            k.if_uniform(is_first, |k| k.barrier_sync(own, THREADS));
        }
    }
}
