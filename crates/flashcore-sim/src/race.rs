//! The memory model: which accesses are ordered, and the detector of those that are not.
//!
//! # The model
//!
//! A *thread* is a lane of a warp. Two accesses to the same bytes by different threads, one of which writes, are a
//! **race** unless one *happens before* the other; two atomics never race with each other. What makes an access
//! happen before another is the order of the program within a thread, and between threads the operations that
//! synchronise: `barrier.sync` and `barrier.arrive`, and `bar.warp.sync` within a warp. A shuffle, a vote, a tensor
//! operation or `ldmatrix` waits for the lanes of the warp but promises nothing about memory, so it orders nothing;
//! nor does a fence by itself.
//!
//! Time is measured in *epochs*. Warp `w` has a clock `c(w)`, which starts at 1, and a vector `V(w)` with an entry for
//! each warp, all 0: every access of warp `u` in an epoch up to `V(w)[u]` happens before whatever any lane of `w` does
//! next. An earlier access by lane `l` of warp `u` in epoch `e` is ordered before one by lane `m` of `w` if and only if
//!
//! * `e ≤ V(w)[u]`, or
//! * `u = w` and `l = m`.
//!
//! The rules by which clocks move:
//!
//! * `bar.warp.sync` in `w`: `V(w)[w] := c(w)`, then `c(w) += 1`. The lanes have seen each other.
//! * arriving at a barrier, with or without waiting, *releases*: the barrier joins into itself `V(w)` with
//!   `V(w)[w] = c(w)`; then `c(w) += 1`, so that what follows is not covered.
//! * when a barrier completes, each warp that waits *acquires*: `V(w) := max(V(w), what the barrier joined)`. A warp
//!   that only arrived acquires nothing, not even the order of its own lanes.
//! * `fence.proxy.async` by some lanes of `w` in epoch `f = c(w)`: `c(w) += 1`. A write of such a lane in an epoch
//!   `e ≤ f` is visible to the async proxy for those after whom the fence is ordered: `f + 1 ≤ V(issuer)[w]`, or
//!   the lane itself.
//! * arriving at an `mbarrier` releases into its phase; whoever has seen the phase complete acquires what the phase
//!   joined, and nothing of other phases. Lanes do this one by one. What some lanes of `w` acquire is known to these
//!   alone until the lanes see each other (`bar.warp.sync` or a barrier). What some lanes release covers `V(w)`, and
//!   epoch `c(w)` if no other lane has accessed memory since the lanes have last seen each other; if one has, it does
//!   not, since clocks do not tell lanes apart: synchronise the warp before one lane arrives for all.
//! * each `mbarrier` has an entry of its own in every vector, which counts its phases: a copy that completes on phase
//!   `p` of `mbarrier` `b` is ordered before one who has `V[b] > p`, which is who has seen the phase complete, or has
//!   synchronised with one who has.
//!
//! Warps are those of a cluster, whose CTAs are executed together; without clusters, those of a CTA.
//!
//! An operation that is executed by the warp as one agent (`ldmatrix` reads what its lanes point at and hands it to
//! others) accesses memory as *all lanes*: it is ordered with no lane of its own warp by the second rule.
//!
//! An asynchronous copy is an agent of its own between its start and the wait that covers it. It is ordered after what
//! the thread that started it is ordered after, and before what follows the wait *of that thread*. In between its
//! target, and the source of a bulk store, are *in flight*: touching them is not a race but a missing wait.
//!
//! Clusters of one launch are never ordered: any two accesses of different clusters that conflict are a race
//! (see [`crate::memory::grid`]).
//!
//! # The detector
//!
//! Memory is watched in cells of two bytes, the smallest thing that operations access. A cell remembers the [`Stamp`] of
//! its last write, and of its reads one stamp for each warp: the write of a race-free program is ordered after all of them,
//! so later accesses need to be compared with it alone. Most cells are read by one warp at a time, and keep that one
//! stamp in place; only when a second warp reads, unordered with the first, is a row with an entry per warp made
//! (the idea of `FastTrack`, Flanagan and Freund, 2009). Reads by several lanes of a warp are remembered as by all lanes.

use std::collections::HashMap;

use crate::clocks::Access;
use crate::fault::AccessKind;

/// Bytes of a cell.
pub(crate) const CELL_BYTES: u64 = 2;
/// The most steps a program may have for stamps to hold their number.
pub(crate) const MOST_STEPS: usize = 1 << STEP_BITS;
/// The last epoch of a warp that stamps hold.
pub(crate) const LAST_EPOCH: u64 = ASYNCHRONOUS as u64 - 1;

/// The lane of an access that the warp makes as one.
pub(crate) const ALL_LANES: u64 = 32;
/// The lane of an access that an asynchronous copy makes.
const NO_LANE: u64 = 33;
const LANE_BITS: u32 = 6;
/// A cluster has at most 16 CTAs of 32 warps.
const WARP_BITS: u32 = 9;
const STEP_BITS: u32 = 20;
const WARP_SHIFT: u32 = LANE_BITS;
const STEP_SHIFT: u32 = WARP_SHIFT + WARP_BITS;
const EPOCH_SHIFT: u32 = STEP_SHIFT + STEP_BITS;
/// Bits of a stamp below its epoch.
pub(crate) const PLACE_BITS: u32 = EPOCH_SHIFT;
/// Marks, in the epoch of a stamp, an asynchronous copy: the other bits are an `mbarrier` and its phase.
const ASYNCHRONOUS: u32 = 1 << 27;
const PHASE_BITS: u32 = 18;
/// The most `mbarrier`s of a cluster that stamps hold.
pub(crate) const MOST_MBARRIERS: usize = 1 << (27 - PHASE_BITS);
/// The most phases of an `mbarrier` that stamps hold.
pub(crate) const MOST_PHASES: u32 = 1 << PHASE_BITS;
/// Marks, in place of a stamp, the number of a row.
const ROW: u64 = 1 << 63;

/// Who made an access, when, and by which step: (epoch, step, warp, lane) in one word. The zero stamp is no access, and
/// since its epoch is 0, it is ordered before everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Stamp(u64);

impl Stamp {
    pub(crate) const NONE: Self = Self(0);

    pub(crate) fn new(warp: usize, lane: u64, epoch: u32, step: usize) -> Self {
        let (warp, step, epoch) = (warp as u64, step as u64, u64::from(epoch));
        Self(lane | warp << WARP_SHIFT | step << STEP_SHIFT | epoch << EPOCH_SHIFT)
    }

    /// The write of an asynchronous copy that was started with `started` and completes on a phase of an `mbarrier`.
    pub(crate) fn completed_by(self, mbarrier: usize, phase: u32) -> Self {
        let epoch = ASYNCHRONOUS | (mbarrier as u32) << PHASE_BITS | phase;
        Self::new(self.warp(), NO_LANE, epoch, self.step())
    }

    /// The `mbarrier` and its phase that an asynchronous copy completed on.
    pub(crate) fn completion(self) -> Option<(usize, u32)> {
        let epoch = self.epoch();
        let rest = epoch & !ASYNCHRONOUS;
        (epoch & ASYNCHRONOUS != 0).then_some(((rest >> PHASE_BITS) as usize, rest & (MOST_PHASES - 1)))
    }

    pub(crate) fn epoch(self) -> u32 {
        (self.0 >> EPOCH_SHIFT) as u32
    }

    pub(crate) fn step(self) -> usize {
        (self.0 >> STEP_SHIFT) as usize & (MOST_STEPS - 1)
    }

    pub(crate) fn warp(self) -> usize {
        (self.0 >> WARP_SHIFT) as usize & ((1 << WARP_BITS) - 1)
    }

    pub(crate) fn raw_lane(self) -> u64 {
        self.0 & ((1 << LANE_BITS) - 1)
    }

    /// The lane; `None` for all lanes, and for an asynchronous copy.
    pub(crate) fn lane(self) -> Option<u32> {
        let lane = self.raw_lane();
        (lane < ALL_LANES).then_some(lane as u32)
    }

    /// This access without its epoch, which means nothing outside its cluster.
    pub(crate) fn without_epoch(self) -> u64 {
        self.0 & ((1 << EPOCH_SHIFT) - 1)
    }

    /// The inverse of [`Stamp::without_epoch`], of epoch 0.
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits & ((1 << EPOCH_SHIFT) - 1))
    }

    pub(crate) fn by_lane(self, lane: usize) -> Self {
        Self(self.0 | lane as u64)
    }

    pub(crate) fn by_all_lanes(self) -> Self {
        Self(self.0 & !((1 << LANE_BITS) - 1) | ALL_LANES)
    }
}

/// Why an access must not happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Conflict {
    /// It is not ordered after an earlier one.
    Race { cell: usize, earlier: Stamp, earlier_kind: AccessKind },
    /// The target of an asynchronous copy.
    Filling { cell: usize, started: Stamp },
    /// A write to the source of an asynchronous copy.
    Draining { cell: usize, started: Stamp },
}

/// An asynchronous copy's claim on a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// It will write the cell.
    Fill,
    /// It will read the cell.
    Drain,
}

#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    /// The last write.
    write: Stamp,
    /// The last read, or [`ROW`] and the number of a row.
    read: u64,
    /// The start of an asynchronous copy that will write the cell.
    filling: Stamp,
    /// The start of an asynchronous copy that will read the cell; of several, the latest.
    draining: Stamp,
}

/// The history of a stretch of memory.
#[derive(Debug)]
pub(crate) struct Shadow {
    warps: usize,
    cells: Vec<Cell>,
    /// Rows of one stamp per warp, for cells that several warps read.
    rows: Vec<Stamp>,
    /// Atomic accesses, one stamp per warp.
    atomics: HashMap<usize, Vec<Stamp>>,
}

/// A range of cells.
pub(crate) type Cells = core::ops::Range<usize>;

/// The cells of `bytes` at `offset`.
pub(crate) fn cells(offset: u64, bytes: u64) -> Cells {
    (offset / CELL_BYTES) as usize..(offset + bytes).div_ceil(CELL_BYTES) as usize
}

impl Shadow {
    pub(crate) fn new(bytes: u64, warps: usize) -> Self {
        let count = bytes.div_ceil(CELL_BYTES) as usize;
        Self { warps, cells: vec![Cell::default(); count], rows: Vec::new(), atomics: HashMap::new() }
    }

    /// The first cell of the range that nothing has written.
    pub(crate) fn unwritten(&self, range: Cells) -> Option<usize> {
        let start = range.start;
        self.cells[range].iter().position(|cell| cell.write == Stamp::NONE).map(|index| start + index)
    }

    /// The last write of a cell.
    pub(crate) fn last_write(&self, cell: usize) -> Stamp {
        self.cells[cell].write
    }

    /// Checks a read and remembers it.
    pub(crate) fn read(&mut self, range: Cells, access: &Access<'_>) -> Result<(), Conflict> {
        for index in range {
            let cell = &mut self.cells[index];
            if cell.filling != Stamp::NONE {
                return Err(Conflict::Filling { cell: index, started: cell.filling });
            }
            if !access.is_after(cell.write) {
                return Err(Conflict::Race { cell: index, earlier: cell.write, earlier_kind: AccessKind::Write });
            }
            if !self.atomics.is_empty() {
                self.after_atomics(index, access)?;
            }
            self.remember_read(index, access);
        }
        Ok(())
    }

    fn remember_read(&mut self, index: usize, access: &Access<'_>) {
        let cell = &mut self.cells[index];
        if cell.read & ROW != 0 {
            let entry = &mut self.rows[(cell.read & !ROW) as usize * self.warps + access.warp];
            *entry = access.merge(*entry);
            return;
        }
        let earlier = Stamp(cell.read);
        if earlier.warp() == access.warp || access.is_after(earlier) {
            cell.read = access.merge(earlier).0;
            return;
        }
        let row = self.rows.len() / self.warps;
        cell.read = ROW | row as u64;
        self.rows.resize(self.rows.len() + self.warps, Stamp::NONE);
        let entries = &mut self.rows[row * self.warps..];
        entries[earlier.warp()] = earlier;
        entries[access.warp] = access.stamp;
    }

    /// Checks that a write may happen, without remembering it.
    pub(crate) fn may_write(&self, range: Cells, access: &Access<'_>) -> Result<(), Conflict> {
        for index in range {
            self.may_replace(index, access)?;
            if !self.atomics.is_empty() {
                self.after_atomics(index, access)?;
            }
        }
        Ok(())
    }

    /// Remembers a write that [`Shadow::may_write`] has allowed.
    pub(crate) fn wrote(&mut self, range: Cells, stamp: Stamp) {
        for cell in &mut self.cells[range] {
            cell.write = stamp;
        }
    }

    /// Checks a write and remembers it.
    pub(crate) fn write(&mut self, range: Cells, access: &Access<'_>) -> Result<(), Conflict> {
        self.may_write(range.clone(), access)?;
        self.wrote(range, access.stamp);
        Ok(())
    }

    /// Checks an atomic access and remembers it.
    pub(crate) fn atomic(&mut self, range: Cells, access: &Access<'_>) -> Result<(), Conflict> {
        for index in range {
            self.may_replace(index, access)?;
            let entries = self.atomics.entry(index).or_insert_with(|| vec![Stamp::NONE; self.warps]);
            entries[access.warp] = access.merge(entries[access.warp]);
        }
        Ok(())
    }

    /// Claims cells for an asynchronous copy.
    pub(crate) fn claim(&mut self, range: Cells, claim: Claim, stamp: Stamp) {
        for cell in &mut self.cells[range] {
            match claim {
                Claim::Fill => cell.filling = stamp,
                Claim::Drain => cell.draining = stamp,
            }
        }
    }

    /// Ends the claim of the copy that started with `stamp`.
    pub(crate) fn end_claim(&mut self, range: Cells, claim: Claim, stamp: Stamp) {
        for cell in &mut self.cells[range] {
            let claimed = match claim {
                Claim::Fill => &mut cell.filling,
                Claim::Drain => &mut cell.draining,
            };
            if *claimed == stamp {
                *claimed = Stamp::NONE;
            }
        }
    }

    /// Remembers a read by an asynchronous copy, made at the time of the wait for it.
    pub(crate) fn drained(&mut self, range: Cells, access: &Access<'_>) {
        for index in range {
            self.remember_read(index, access);
        }
    }

    /// Checks that a write or an atomic is ordered after the plain accesses to a cell, and that no copy claims it.
    fn may_replace(&self, index: usize, access: &Access<'_>) -> Result<(), Conflict> {
        let cell = &self.cells[index];
        if cell.filling != Stamp::NONE {
            return Err(Conflict::Filling { cell: index, started: cell.filling });
        }
        if cell.draining != Stamp::NONE {
            return Err(Conflict::Draining { cell: index, started: cell.draining });
        }
        if !access.is_after(cell.write) {
            return Err(Conflict::Race { cell: index, earlier: cell.write, earlier_kind: AccessKind::Write });
        }
        self.after_reads(index, access)
    }

    fn after_reads(&self, index: usize, access: &Access<'_>) -> Result<(), Conflict> {
        let read = self.cells[index].read;
        let conflict = if read & ROW == 0 {
            Some(Stamp(read)).filter(|&earlier| !access.is_after(earlier))
        } else {
            let row = (read & !ROW) as usize * self.warps;
            self.rows[row..row + self.warps].iter().copied().find(|&earlier| !access.is_after(earlier))
        };
        conflict.map_or(Ok(()), |earlier| Err(Conflict::Race { cell: index, earlier, earlier_kind: AccessKind::Read }))
    }

    fn after_atomics(&self, index: usize, access: &Access<'_>) -> Result<(), Conflict> {
        let entries = self.atomics.get(&index).map_or(&[][..], Vec::as_slice);
        let conflict = entries.iter().copied().find(|&earlier| !access.is_after(earlier));
        conflict
            .map_or(Ok(()), |earlier| Err(Conflict::Race { cell: index, earlier, earlier_kind: AccessKind::Atomic }))
    }

    /// One write, one read and one atomic of each cell that had any, for comparison with other CTAs.
    pub(crate) fn summary(&self) -> impl Iterator<Item = (usize, AccessKind, Stamp)> {
        let plain = self.cells.iter().enumerate().flat_map(|(index, cell)| {
            let read = if cell.read & ROW == 0 {
                Stamp(cell.read)
            } else {
                let row = (cell.read & !ROW) as usize * self.warps;
                self.rows[row..row + self.warps].iter().copied().find(|&stamp| stamp != Stamp::NONE).unwrap_or_default()
            };
            [(index, AccessKind::Write, cell.write), (index, AccessKind::Read, read)]
        });
        let atomic = self.atomics.iter().filter_map(|(&index, entries)| {
            entries.iter().find(|&&stamp| stamp != Stamp::NONE).map(|&stamp| (index, AccessKind::Atomic, stamp))
        });
        plain.chain(atomic).filter(|&(_, _, stamp)| stamp != Stamp::NONE)
    }
}
