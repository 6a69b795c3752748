//! Races between clusters, or between CTAs where there are no clusters.
//!
//! Clusters of a launch are not ordered, so two accesses of different ones to the same bytes are a race if one of them
//! writes and not both are atomic. Which comes second depends on the threads of the host, so nothing is decided while
//! they run: each cluster, when it ends, adds its history, and of each cell the accesses of the lowest and of the highest
//! are kept, by kind. Minimum and maximum do not depend on the order of the additions, so the report does not either.

use std::sync::{Mutex, PoisonError};

use crate::fault::AccessKind;
use crate::memory::global::{BufferOffset, GlobalMemory};
use crate::memory::pages::Pages;
use crate::memory::view::{History, PAGE_BYTES, Piece, pieces};
use crate::race::{CELL_BYTES, PLACE_BITS, Stamp};

/// The accesses of all clusters to global memory.
#[derive(Debug)]
pub(crate) struct GridHistory {
    /// For each buffer, its pages.
    buffers: Vec<Mutex<Pages<Page>>>,
}

/// For each kind of access, the lowest and the highest of each cell; empty without any.
#[derive(Debug, Default)]
struct Page {
    kinds: [Vec<Extremes>; 3],
}

#[derive(Debug, Clone, Copy)]
struct Extremes {
    lowest: u64,
    highest: u64,
}

const NEVER: Extremes = Extremes { lowest: u64::MAX, highest: 0 };

/// Bits below the cluster for the step, the warp and the lane.
const CLUSTER_SHIFT: u32 = PLACE_BITS;
/// The most CTAs a launch can have.
pub(crate) const MOST_CTAS: u64 = 1 << (63 - CLUSTER_SHIFT);

const KINDS: [AccessKind; 3] = [AccessKind::Write, AccessKind::Read, AccessKind::Atomic];

/// True if accesses of both kinds to the same bytes must be ordered.
fn conflicts(one: AccessKind, other: AccessKind) -> bool {
    !matches!((one, other), (AccessKind::Read, AccessKind::Read) | (AccessKind::Atomic, AccessKind::Atomic))
}

fn kind_index(kind: AccessKind) -> usize {
    match kind {
        AccessKind::Write => 0,
        AccessKind::Read => 1,
        AccessKind::Atomic => 2,
    }
}

/// An access by some cluster.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GridAccess {
    pub(crate) cluster: u64,
    pub(crate) kind: AccessKind,
    pub(crate) stamp: Stamp,
}

/// Two accesses that conflict.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GridRace {
    pub(crate) address: u64,
    /// By the lower cluster.
    pub(crate) first: GridAccess,
    /// By the higher one.
    pub(crate) second: GridAccess,
}

impl GridHistory {
    pub(crate) fn new(memory: &GlobalMemory) -> Self {
        let buffers = memory.lengths().map(|length| Mutex::new(Pages::new(length.div_ceil(PAGE_BYTES) as usize)));
        Self { buffers: buffers.collect() }
    }

    /// Adds the history of a cluster.
    pub(crate) fn add(&self, cluster: u64, history: &History) {
        for (buffer, touched) in self.buffers.iter().zip(history) {
            let mut pages = buffer.lock().unwrap_or_else(PoisonError::into_inner);
            for (page, shadow) in touched.iter() {
                let page = pages.get_or_insert_with(page, Page::default);
                for (cell, kind, stamp) in shadow.summary() {
                    let accesses = &mut page.kinds[kind_index(kind)];
                    if accesses.is_empty() {
                        accesses.resize((PAGE_BYTES / CELL_BYTES) as usize, NEVER);
                    }
                    let key = cluster << CLUSTER_SHIFT | stamp.without_epoch();
                    let Extremes { lowest, highest } = &mut accesses[cell];
                    *lowest = key.min(*lowest);
                    *highest = key.max(*highest);
                }
            }
        }
    }

    /// An access to some of the bytes that conflicts with one of another launch, at the lowest address.
    pub(crate) fn conflict(&self, location: BufferOffset, bytes: u64, kind: AccessKind) -> Option<(u64, GridAccess)> {
        let pages = self.buffers[location.buffer].lock().unwrap_or_else(PoisonError::into_inner);
        pieces(location, bytes).find_map(|Piece { page, cells, base }| {
            let accesses = pages.get(page)?;
            cells.into_iter().find_map(|cell| {
                let found = KINDS.into_iter().filter(|&earlier| conflicts(earlier, kind));
                let [access, _] = found.into_iter().find_map(|earlier| accesses.extremes(earlier, cell))?;
                Some((base + cell as u64 * CELL_BYTES, access))
            })
        })
    }

    /// The race at the lowest address.
    pub(crate) fn race(&self) -> Option<GridRace> {
        self.buffers.iter().enumerate().find_map(|(buffer, pages)| {
            let pages = pages.lock().unwrap_or_else(PoisonError::into_inner);
            pages.iter().find_map(|(page, accesses)| {
                let (cell, first, second) = accesses.race()?;
                let offset = page as u64 * PAGE_BYTES + cell as u64 * CELL_BYTES;
                Some(GridRace { address: GlobalMemory::address(BufferOffset { buffer, offset }), first, second })
            })
        })
    }
}

impl Page {
    fn race(&self) -> Option<(usize, GridAccess, GridAccess)> {
        let cells = self.kinds.iter().map(Vec::len).max().unwrap_or(0);
        (0..cells).find_map(|cell| self.race_at(cell).map(|(first, second)| (cell, first, second)))
    }

    /// The accesses of a kind to a cell by the lowest and by the highest cluster.
    fn extremes(&self, kind: AccessKind, cell: usize) -> Option<[GridAccess; 2]> {
        let found = self.kinds[kind_index(kind)].get(cell).copied().filter(|found| found.lowest != u64::MAX)?;
        let access = |key: u64| GridAccess { cluster: key >> CLUSTER_SHIFT, kind, stamp: Stamp::from_bits(key) };
        Some([access(found.lowest), access(found.highest)])
    }

    fn race_at(&self, cell: usize) -> Option<(GridAccess, GridAccess)> {
        // Every conflict has a plain write, or an atomic and a plain read; its partner of another cluster is an extreme.
        let conflicts = |one: AccessKind, other: AccessKind| {
            let (ones, others) = (self.extremes(one, cell)?, self.extremes(other, cell)?);
            ones.into_iter()
                .flat_map(|one| others.into_iter().map(move |other| (one, other)))
                .find(|(one, other)| one.cluster != other.cluster)
        };
        let pairs = KINDS.into_iter().map(|other| (AccessKind::Write, other));
        let pairs = pairs.chain([(AccessKind::Atomic, AccessKind::Read)]);
        pairs
            .into_iter()
            .find_map(|(one, other)| conflicts(one, other))
            .map(|(one, other)| if one.cluster < other.cluster { (one, other) } else { (other, one) })
    }
}
