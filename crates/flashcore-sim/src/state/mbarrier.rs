//! The state of `mbarrier`s: phases, arrivals and expected bytes. The steps on it are in `execute/mbarrier.rs`.
//!
//! The state is that of the PTX manual: a phase completes when no arrival is pending and all expected bytes
//! (`expect_tx`) have come (`complete_tx`). Bytes may come before they are expected, so their balance may be negative
//! for a while. The clocks that arrivals release belong to the phase, and whoever sees it complete acquires them.

use std::collections::BTreeMap;

use crate::clocks::{Access, Clocks, Participants};
use crate::fault::{MbarrierProblem, MbarrierState};
use crate::race::{MOST_PHASES, Stamp};

/// Bytes of an `mbarrier`.
pub(crate) const MBARRIER_BYTES: u32 = 8;
/// The most arrivals, and the most bytes in flight, that it counts.
const MOST: i64 = (1 << 20) - 1;

/// The `mbarrier`s of a CTA, by their addresses.
#[derive(Debug, Default)]
pub(crate) struct Mbarriers {
    barriers: BTreeMap<u32, Mbarrier>,
}

/// One `mbarrier`.
#[derive(Debug)]
pub(crate) struct Mbarrier {
    address: u32,
    /// The number in the clocks.
    number: usize,
    count: u32,
    pending: u32,
    /// Expected bytes that have not come; negative where bytes came first.
    bytes: i64,
    phase: u32,
    initialised: Stamp,
    /// The last use by each warp.
    uses: Vec<Stamp>,
    /// The clocks released to the current phase, and to the previous one.
    present: Released,
    before: Released,
}

/// The clocks that the arrivals of a phase have released.
#[derive(Debug, Default)]
struct Released {
    /// From all threads.
    by_cluster: Vec<u32>,
    /// From threads of the CTA that has the `mbarrier`, and from copies.
    by_cta: Vec<u32>,
}

/// The reason why an operation on an `mbarrier` failed.
pub(crate) type Refused = (MbarrierProblem, Option<MbarrierState>);

impl Mbarriers {
    /// The `mbarrier` at an address, which was initialised and not invalidated.
    pub(crate) fn get(&mut self, address: u32) -> Result<&mut Mbarrier, Refused> {
        self.barriers.get_mut(&address).ok_or((MbarrierProblem::NotInitialised, None))
    }

    /// The `mbarrier` that overlaps `bytes` at `address`, if there is one.
    pub(crate) fn overlapping(&self, address: u32, bytes: u32) -> Option<&Mbarrier> {
        let (_, barrier) = self.barriers.range(..address.saturating_add(bytes)).next_back()?;
        (barrier.address + MBARRIER_BYTES > address).then_some(barrier)
    }

    /// Checks that an `mbarrier` can be initialised here.
    pub(crate) fn may_initialise(&self, address: u32, count: u32) -> Result<(), Refused> {
        if let Some(existing) = self.barriers.get(&address) {
            return Err((MbarrierProblem::Reinitialised, Some(existing.state())));
        }
        if count == 0 || i64::from(count) > MOST {
            return Err((MbarrierProblem::Count { count }, None));
        }
        Ok(())
    }

    /// Initialises an `mbarrier` where [`Mbarriers::may_initialise`] allows one.
    pub(crate) fn initialise(&mut self, address: u32, count: u32, initialised: Stamp, (number, warps): (usize, usize)) {
        let barrier = Mbarrier {
            address,
            number,
            count,
            pending: count,
            bytes: 0,
            phase: 0,
            initialised,
            uses: vec![Stamp::NONE; warps],
            present: Released::default(),
            before: Released::default(),
        };
        self.barriers.insert(address, barrier);
    }

    /// Invalidates an `mbarrier`.
    pub(crate) fn invalidate(&mut self, address: u32) {
        self.barriers.remove(&address);
    }
}

impl Mbarrier {
    /// The state for a report.
    pub(crate) fn state(&self) -> MbarrierState {
        let &Self { address, phase, count, pending, bytes, .. } = self;
        MbarrierState { address, phase, pending, count, bytes }
    }

    fn refuse(&self, problem: MbarrierProblem) -> Refused {
        (problem, Some(self.state()))
    }

    /// The operation that initialised it.
    pub(crate) fn initialised(&self) -> Stamp {
        self.initialised
    }

    /// The stamp of a copy's write that completes in the current phase.
    pub(crate) fn completion(&self, started: Stamp) -> Stamp {
        started.completed_by(self.number, self.phase)
    }

    /// Records a use.
    pub(crate) fn used(&mut self, access: &Access<'_>) {
        let entry = &mut self.uses[access.warp];
        *entry = access.merge(*entry);
    }

    /// A use that an access is not ordered after.
    pub(crate) fn unordered_use(&self, access: &Access<'_>) -> Option<Stamp> {
        self.uses.iter().copied().find(|&earlier| !access.is_after(earlier))
    }

    /// True if the phase of a parity, the one before the current, is complete.
    pub(crate) fn is_complete(&self, parity: u32) -> bool {
        self.phase % 2 != parity
    }

    /// Acquires for lanes what was released to the previous phase, within a CTA or a cluster.
    pub(crate) fn acquire(&self, clocks: &mut Clocks, participants: Participants, whole_cluster: bool) {
        let Released { by_cluster, by_cta } = &self.before;
        clocks.acquire_lanes(participants, if whole_cluster { by_cluster } else { by_cta });
    }

    /// Releases for lanes to the current phase; `here` if they are of the CTA that has the `mbarrier`.
    pub(crate) fn release(&mut self, clocks: &mut Clocks, participants: Participants, here: bool) {
        let Released { by_cluster, by_cta } = &mut self.present;
        if here {
            clocks.release_lanes(participants, by_cta);
            join(by_cluster, by_cta);
        } else {
            clocks.release_lanes(participants, by_cluster);
        }
    }

    /// Arrives. Returns true if that completes the phase.
    pub(crate) fn arrive(&mut self, count: u32, clocks: &Clocks) -> Result<bool, Refused> {
        if count == 0 || count > self.pending {
            return Err(self.refuse(MbarrierProblem::OverCount { arrivals: count }));
        }
        self.pending -= count;
        self.advance(clocks)
    }

    /// Expects bytes. Never completes a phase, since an arrival is pending or bytes are.
    pub(crate) fn expect_tx(&mut self, bytes: u32) -> Result<(), Refused> {
        let sum = self.bytes + i64::from(bytes);
        if sum > MOST {
            return Err(self.refuse(MbarrierProblem::Bytes { bytes: sum }));
        }
        self.bytes = sum;
        Ok(())
    }

    /// Counts bytes that have come. Returns true if that completes the phase.
    pub(crate) fn complete_tx(&mut self, bytes: u32, clocks: &Clocks) -> Result<bool, Refused> {
        let sum = self.bytes - i64::from(bytes);
        if sum < -MOST {
            return Err(self.refuse(MbarrierProblem::Bytes { bytes: sum }));
        }
        self.bytes = sum;
        self.advance(clocks)
    }

    fn advance(&mut self, clocks: &Clocks) -> Result<bool, Refused> {
        if self.pending > 0 || self.bytes != 0 {
            return Ok(false);
        }
        if self.phase + 1 == MOST_PHASES {
            return Err(self.refuse(MbarrierProblem::TooManyPhases { most: MOST_PHASES }));
        }
        self.phase += 1;
        self.pending = self.count;
        self.before = core::mem::take(&mut self.present);
        let entry = clocks.mbarrier_entry(self.number);
        for released in [&mut self.before.by_cluster, &mut self.before.by_cta] {
            released.resize(released.len().max(entry + 1), 0);
            released[entry] = self.phase;
        }
        Ok(true)
    }
}

fn join(target: &mut Vec<u32>, other: &[u32]) {
    target.resize(target.len().max(other.len()), 0);
    for (entry, other) in target.iter_mut().zip(other) {
        *entry = (*entry).max(*other);
    }
}
