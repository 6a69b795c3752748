//! The cluster barrier, at which warps arrive and, later, wait.

use crate::clocks::Clocks;
use crate::error::Stop;
use crate::fault::{ClusterBarrierProblem, FaultKind};

/// See the module.
#[derive(Debug)]
pub(crate) struct ClusterBarrier {
    /// State of each warp: arrived and not waited since, or neither.
    arrived: Vec<Arrived>,
    /// The warps that have ended, which count as arrived.
    ended: Vec<bool>,
    /// The clocks that the arrivals have released, joined.
    joined: Vec<u32>,
    /// The joined clock of the arrivals when it last completed.
    completed: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arrived {
    No,
    /// Other warps have not arrived.
    Pending,
    /// All other warps have arrived.
    Complete,
}

impl ClusterBarrier {
    pub(crate) fn new(warps: usize) -> Self {
        let (joined, completed) = (Vec::new(), Vec::new());
        Self { arrived: vec![Arrived::No; warps], ended: vec![false; warps], joined, completed }
    }

    /// Warps that have arrived in the current round, and all of them.
    pub(crate) fn progress(&self) -> (u32, u32) {
        let present = (0..self.arrived.len()).filter(|&warp| self.is_present(warp)).count();
        (present as u32, self.arrived.len() as u32)
    }

    fn is_present(&self, warp: usize) -> bool {
        self.ended[warp] || self.arrived[warp] == Arrived::Pending
    }

    /// Records the arrival of a warp. Returns true if it completes the barrier.
    pub(crate) fn arrive(&mut self, warp: usize, clocks: &mut Clocks) -> Result<bool, Stop> {
        if self.arrived[warp] != Arrived::No {
            return Err(Stop::warp(FaultKind::ClusterBarrier { problem: ClusterBarrierProblem::ArrivesTwice }));
        }
        clocks.release(warp, &mut self.joined);
        self.arrived[warp] = Arrived::Pending;
        Ok(self.complete())
    }

    /// Records the end of a warp. Returns true if the others have all arrived.
    pub(crate) fn end(&mut self, warp: usize) -> bool {
        self.ended[warp] = true;
        self.complete()
    }

    fn complete(&mut self) -> bool {
        let all = (0..self.arrived.len()).all(|warp| self.is_present(warp));
        let some = self.arrived.contains(&Arrived::Pending);
        if all && some {
            self.arrived.iter_mut().filter(|arrived| **arrived == Arrived::Pending).for_each(|arrived| {
                *arrived = Arrived::Complete;
            });
            self.completed = core::mem::take(&mut self.joined);
        }
        all && some
    }

    /// Waits as a warp. Returns true if it can proceed.
    pub(crate) fn wait(&mut self, warp: usize, clocks: &mut Clocks) -> Result<bool, Stop> {
        match self.arrived[warp] {
            Arrived::No => {
                Err(Stop::warp(FaultKind::ClusterBarrier { problem: ClusterBarrierProblem::WaitsBeforeArriving }))
            }
            Arrived::Pending => Ok(false),
            Arrived::Complete => {
                clocks.acquire(warp, &self.completed);
                self.arrived[warp] = Arrived::No;
                Ok(true)
            }
        }
    }
}
