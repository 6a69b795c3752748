//! The vector clocks of the warps of a cluster, by which accesses are ordered: the rules stand at the top of
//! [`crate::race`].

use crate::race::{ALL_LANES, Stamp};
use crate::state::registers::ALL;

/// The clocks of the warps of a cluster.
#[derive(Debug)]
pub(crate) struct Clocks {
    warps: usize,
    /// Entries of a vector: one for each warp, in a launch that overlaps one for its wait, then one for each `mbarrier`.
    width: usize,
    /// True in a launch that overlaps with the ones before it.
    overlaps: bool,
    by_warp: Vec<Clock>,
}

/// The clock of one warp.
#[derive(Debug)]
struct Clock {
    /// `c(w)`.
    epoch: u32,
    /// `V(w)`.
    vector: Vec<u32>,
    /// Clocks that some lanes have beyond `V(w)`; no lane is in two of them.
    partial: Vec<Partial>,
    /// The lanes that have accessed memory since the lanes of the warp last synchronised.
    touched: u32,
    /// The proxy fences: the epoch they closed, and the lanes that executed them.
    fences: Vec<(u32, u32)>,
    /// The fences of initialised `mbarrier`s: the epoch they closed, and the lanes that executed them.
    mbarrier_fences: Vec<(u32, u32)>,
}

/// A vector that some lanes of a warp have acquired and others have not.
#[derive(Debug)]
struct Partial {
    lanes: u32,
    vector: Vec<u32>,
}

/// The lanes of a warp that synchronise, out of all that are alive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Participants {
    pub(crate) warp: usize,
    pub(crate) lanes: u32,
    pub(crate) alive: u32,
}

fn join(target: &mut [u32], other: &[u32]) {
    for (entry, other) in target.iter_mut().zip(other) {
        *entry = (*entry).max(*other);
    }
}

impl Clocks {
    pub(crate) fn new(warps: usize, overlaps: bool) -> Self {
        let width = warps + usize::from(overlaps);
        let clock = |_| Clock {
            epoch: 1,
            vector: vec![0; width],
            partial: Vec::new(),
            touched: 0,
            fences: Vec::new(),
            mbarrier_fences: Vec::new(),
        };
        Self { warps, width, overlaps, by_warp: (0..warps).map(clock).collect() }
    }

    /// `griddepcontrol.wait` in a launch that overlaps: what follows, and what is ordered after it, is ordered after the
    /// launches that the wait covers.
    pub(crate) fn grid_dependency_wait(&mut self, participants: Participants) {
        if self.overlaps {
            let mut joined = vec![0; self.width];
            joined[self.warps] = 1;
            self.acquire_lanes(participants, &joined);
        }
    }

    /// Adds an entry for one more `mbarrier` and returns its number.
    pub(crate) fn add_mbarrier(&mut self) -> usize {
        self.width += 1;
        for clock in &mut self.by_warp {
            clock.vector.resize(self.width, 0);
            clock.partial.iter_mut().for_each(|partial| partial.vector.resize(self.width, 0));
        }
        self.width - 1 - self.warps
    }

    /// The entry of an `mbarrier` in vectors.
    pub(crate) fn mbarrier_entry(&self, mbarrier: usize) -> usize {
        self.warps + mbarrier
    }

    /// The identity under which `warp` accesses memory in `step`.
    pub(crate) fn accessor(&self, warp: usize, step: usize) -> Accessor<'_> {
        let Clock { epoch, vector, partial, .. } = &self.by_warp[warp];
        let stamp = Stamp::new(warp, 0, *epoch, step);
        Accessor { stamp, warp, warps: self.warps, overlaps: self.overlaps, vector, partial }
    }

    /// Records that lanes of a warp access memory.
    pub(crate) fn touch(&mut self, warp: usize, lanes: u32) {
        self.by_warp[warp].touched |= lanes;
    }

    /// `bar.warp.sync`.
    pub(crate) fn warp_sync(&mut self, warp: usize) {
        let clock = &mut self.by_warp[warp];
        for partial in clock.partial.drain(..) {
            join(&mut clock.vector, &partial.vector);
        }
        clock.vector[warp] = clock.epoch;
        clock.epoch += 1;
        clock.touched = 0;
    }

    /// Joins the clock of all threads of `warp` into `joined`: a release.
    pub(crate) fn release(&mut self, warp: usize, joined: &mut Vec<u32>) {
        self.release_lanes(Participants { warp, lanes: ALL, alive: ALL }, joined);
    }

    /// Joins the clock of some lanes into `joined`: a release. The accesses of other lanes are covered only up to the
    /// last synchronisation of the warp's lanes.
    pub(crate) fn release_lanes(&mut self, participants: Participants, joined: &mut Vec<u32>) {
        let Participants { warp, lanes, alive } = participants;
        joined.resize(self.width, 0);
        let clock = &mut self.by_warp[warp];
        join(joined, &clock.vector);
        for partial in clock.partial.iter().filter(|partial| partial.lanes & lanes != 0) {
            join(joined, &partial.vector);
        }
        if clock.touched & alive & !lanes == 0 {
            joined[warp] = joined[warp].max(clock.epoch);
            clock.epoch += 1;
        }
    }

    /// Takes a barrier's joined clock over into all threads of `warp`, which have released before: an acquire.
    pub(crate) fn acquire(&mut self, warp: usize, joined: &[u32]) {
        let clock = &mut self.by_warp[warp];
        join(&mut clock.vector, joined);
        clock.partial.clear();
        clock.touched = 0;
    }

    /// Takes a released clock over into some lanes: an acquire.
    pub(crate) fn acquire_lanes(&mut self, participants: Participants, joined: &[u32]) {
        let Participants { warp, lanes, alive } = participants;
        let clock = &mut self.by_warp[warp];
        if lanes & alive == alive {
            join(&mut clock.vector, joined);
            clock.partial.iter_mut().for_each(|partial| join(&mut partial.vector, joined));
            return;
        }
        let mut rest = lanes;
        let mut split = Vec::new();
        for partial in &mut clock.partial {
            let both = partial.lanes & lanes;
            if both == 0 {
                continue;
            }
            rest &= !both;
            if both != partial.lanes {
                split.push(Partial { lanes: partial.lanes & !both, vector: partial.vector.clone() });
            }
            partial.lanes = both;
            join(&mut partial.vector, joined);
        }
        clock.partial.append(&mut split);
        if rest != 0 {
            let mut vector = clock.vector.clone();
            join(&mut vector, joined);
            clock.partial.push(Partial { lanes: rest, vector });
        }
    }

    /// `fence.proxy.async` by the lanes of `mask`.
    pub(crate) fn fence_proxy(&mut self, warp: usize, mask: u32) {
        let clock = &mut self.by_warp[warp];
        clock.fences.push((clock.epoch, mask));
        clock.epoch += 1;
    }

    /// `fence.mbarrier_init` by the lanes of `mask`.
    pub(crate) fn fence_mbarrier_init(&mut self, warp: usize, mask: u32) {
        let clock = &mut self.by_warp[warp];
        clock.mbarrier_fences.push((clock.epoch, mask));
        clock.epoch += 1;
    }

    /// True if a write is visible to the async proxy when it acts for `access`.
    pub(crate) fn is_fenced(&self, write: Stamp, access: &Access<'_>) -> bool {
        write.completion().is_some() || fenced(&self.by_warp[write.warp()].fences, write, access)
    }

    /// True if an `mbarrier` that was initialised by `write` is visible to the async proxy.
    pub(crate) fn is_initialisation_fenced(&self, write: Stamp, access: &Access<'_>) -> bool {
        self.is_fenced(write, access) || fenced(&self.by_warp[write.warp()].mbarrier_fences, write, access)
    }
}

/// True if a fence by the writer lies between a write and an access.
fn fenced(fences: &[(u32, u32)], write: Stamp, access: &Access<'_>) -> bool {
    let writer = write.warp();
    let first = fences.partition_point(|&(epoch, _)| epoch < write.epoch());
    let by_writer = |&&(_, mask): &&(u32, u32)| write.lane().map_or(mask == ALL, |lane| mask >> lane & 1 == 1);
    let Some(&(epoch, _)) = fences[first..].iter().find(by_writer) else { return false };
    epoch < access.vector[writer] || writer == access.warp && access.is_same_lane(write)
}

/// The identity under which a warp accesses memory in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Accessor<'a> {
    stamp: Stamp,
    warp: usize,
    warps: usize,
    overlaps: bool,
    vector: &'a [u32],
    partial: &'a [Partial],
}

impl Accessor<'_> {
    /// As one lane.
    pub(crate) fn lane(&self, lane: usize) -> Access<'_> {
        let vector = if self.partial.is_empty() { self.vector } else { self.vector_of(lane) };
        let Self { warp, warps, overlaps, .. } = *self;
        Access { stamp: self.stamp.by_lane(lane), warp, warps, overlaps, vector }
    }

    #[cold]
    fn vector_of(&self, lane: usize) -> &[u32] {
        let known = self.partial.iter().find(|partial| partial.lanes >> lane & 1 == 1);
        known.map_or(self.vector, |partial| &partial.vector)
    }

    /// As the warp, which knows only what each of its lanes knows.
    pub(crate) fn all_lanes(&self) -> Access<'_> {
        let stamp = self.stamp.by_lane(ALL_LANES as usize);
        let Self { warp, warps, overlaps, vector, .. } = *self;
        Access { stamp, warp, warps, overlaps, vector }
    }
}

/// One access: its stamp, and the clock of what is ordered before it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access<'a> {
    pub(crate) stamp: Stamp,
    pub(crate) warp: usize,
    warps: usize,
    overlaps: bool,
    vector: &'a [u32],
}

impl Access<'_> {
    /// True if it is ordered after a `griddepcontrol.wait` of a launch that overlaps.
    pub(crate) fn has_waited(&self) -> bool {
        self.overlaps && self.vector[self.warps] > 0
    }

    pub(crate) fn is_after(&self, earlier: Stamp) -> bool {
        let warp = earlier.warp();
        earlier.epoch() <= self.vector[warp]
            || warp == self.warp && self.is_same_lane(earlier)
            || earlier.completion().is_some_and(|(mbarrier, phase)| self.vector[self.warps + mbarrier] > phase)
    }

    fn is_same_lane(&self, earlier: Stamp) -> bool {
        earlier.raw_lane() == self.stamp.raw_lane() && earlier.lane().is_some()
    }

    /// The stamp to keep for this read and an earlier one of the same warp.
    pub(crate) fn merge(&self, earlier: Stamp) -> Stamp {
        if self.is_after(earlier) { self.stamp } else { self.stamp.by_all_lanes() }
    }
}
