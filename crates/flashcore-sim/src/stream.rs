//! Launches on a stream, which may overlap: programmatic dependent launch (PDL).
//!
//! # The model
//!
//! The launches of a stream begin in order. One that *overlaps* may begin as soon as each CTA of the launch before it has
//! triggered (`griddepcontrol.launch_dependents`) or ended; any other begins when all before it have ended.
//! `griddepcontrol.wait` returns when the launch before has ended and its accesses to memory are done and visible. It covers
//! that launch alone: of older ones it says what the launch before knew.
//!
//! So a launch knows that these have ended:
//!
//! * before its wait, what the launch before knew when it triggered: what that one knew after its own wait, if it waited
//!   before it triggered, and else what it knew before;
//! * after its wait, the launch before, and what that one knew after its own wait, if it waited at all.
//!
//! A launch that does not overlap knows that all before it have ended.
//!
//! Launches run one after the other here. An access is a **race between launches** if a launch that is not known to have
//! ended accesses the same bytes, and one of both writes; two atomics never race. The wait of a thread holds for all that is
//! ordered after it, by the rules at the top of [`crate::race`]. Neither depends on time, so that the verdict is the same
//! under every seed.
//!
//! A CTA triggers as soon as one of its threads does: it has waited before, if every thread that triggers is ordered after a
//! wait. The launch has, if one of its CTAs has, since the others alone start nothing.

use std::sync::Arc;

use flashcore_ir::VerifiedKernel;

use crate::error::SimError;
use crate::fault::{AccessKind, LaunchAccess};
use crate::launch::{Finished, Launch, Options, Report, placement, run_launch};
use crate::memory::global::{BufferOffset, GlobalMemory};
use crate::memory::grid::GridAccess;

/// Launches that follow each other, and overlap as far as they may.
#[derive(Debug)]
pub struct Stream<'k, 'm> {
    memory: &'m GlobalMemory,
    /// The launches that one which overlaps does not know to have ended before its wait.
    at_start: Vec<Arc<Earlier<'k>>>,
    /// The same after its wait.
    after_wait: Vec<Arc<Earlier<'k>>>,
}

/// A launch that may still run.
#[derive(Debug)]
pub(crate) enum Earlier<'k> {
    /// One of which nothing is known: it reads and writes any bytes.
    Unknown,
    /// One that ran here.
    Known(Box<Finished<'k>>),
}

/// The launches that may still run while another one does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unfinished<'e> {
    /// Before its wait.
    pub(crate) at_start: &'e [Arc<Earlier<'e>>],
    /// After its wait.
    pub(crate) after_wait: &'e [Arc<Earlier<'e>>],
}

/// A conflict with a launch that may still run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// The access of the earlier launch; none of one of which nothing is known.
    pub(crate) earlier: Option<LaunchAccess>,
    /// True if the later access is ordered after a wait.
    pub(crate) waited: bool,
}

/// Waits and triggers of CTAs in programmatic dependent launch.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GridDependency {
    /// True if a thread has waited.
    pub(crate) waits: bool,
    /// True if a thread has triggered that is not ordered after a wait.
    pub(crate) triggers_early: bool,
    /// True if some cluster waited and did not trigger early.
    waits_first: bool,
}

impl GridDependency {
    /// These waits and triggers, of a cluster that has ended.
    pub(crate) const fn of_cluster(self) -> Self {
        Self { waits_first: self.waits && !self.triggers_early, ..self }
    }

    /// Waits and triggers of both.
    pub(crate) const fn merge(self, other: Self) -> Self {
        Self {
            waits: self.waits || other.waits,
            triggers_early: self.triggers_early || other.triggers_early,
            waits_first: self.waits_first || other.waits_first,
        }
    }
}

impl<'k, 'm> Stream<'k, 'm> {
    /// A stream on which nothing runs.
    pub const fn idle(memory: &'m GlobalMemory) -> Self {
        Self { memory, at_start: Vec::new(), after_wait: Vec::new() }
    }

    /// A stream whose last launch still runs, has let the next one start, and reads and writes any memory.
    pub fn busy(memory: &'m GlobalMemory) -> Self {
        Self { memory, at_start: vec![Arc::new(Earlier::Unknown)], after_wait: Vec::new() }
    }

    /// Runs the next launch; one that `overlaps` may begin before those before it have ended.
    pub fn launch(
        &mut self,
        kernel: &'k VerifiedKernel,
        launch: &Launch,
        overlaps: bool,
        options: &Options,
    ) -> Result<Report, SimError> {
        if !overlaps {
            (self.at_start, self.after_wait) = (Vec::new(), Vec::new());
        }
        let unfinished = overlaps.then_some(Unfinished { at_start: &self.at_start, after_wait: &self.after_wait });
        let finished = run_launch(kernel, launch, self.memory, unfinished, options)?;
        let (counters, GridDependency { waits, waits_first, .. }) = (finished.counters, finished.dependency);
        let known = Arc::new(Earlier::Known(Box::new(finished)));
        let before_wait = core::mem::take(&mut self.at_start);
        self.at_start = if waits_first { self.after_wait.clone() } else { before_wait.clone() };
        self.at_start.push(known);
        if !waits {
            self.after_wait = before_wait;
        }
        Ok(Report { counters })
    }
}

impl Unfinished<'_> {
    /// The first conflict of an access with a launch that may still run.
    pub(crate) fn conflict(
        &self,
        location: BufferOffset,
        bytes: u64,
        kind: AccessKind,
        waited: bool,
    ) -> Option<(u64, Overlap)> {
        let unfinished = if waited { self.after_wait } else { self.at_start };
        unfinished.iter().find_map(|earlier| {
            let (address, earlier) = earlier.conflict(location, bytes, kind)?;
            Some((address, Overlap { earlier, waited }))
        })
    }
}

impl Earlier<'_> {
    fn conflict(&self, location: BufferOffset, bytes: u64, kind: AccessKind) -> Option<(u64, Option<LaunchAccess>)> {
        let Self::Known(finished) = self else { return Some((GlobalMemory::address(location), None)) };
        let Finished { program, grid, history, .. } = &**finished;
        let (address, GridAccess { cluster, kind: access, stamp }) = history.conflict(location, bytes, kind)?;
        let location = Box::new(program.location_of(stamp, &placement(program, *grid, cluster), address));
        Some((address, Some(LaunchAccess { kernel: program.kernel.name.clone(), access, location })))
    }
}
