//! The sixteen named barriers of a CTA: who has arrived, and who waits.

use flashcore_ir::Operand;

use crate::clocks::Clocks;
use crate::error::Stop;
use crate::fault::{BarrierProblem, FaultKind};
use crate::state::registers::{LANES, lanes};
use crate::state::warp::Warp;

/// Named barriers of a CTA.
const BARRIERS: usize = 16;

/// The named barriers of a CTA.
#[derive(Debug)]
pub(crate) struct Barriers {
    /// The number of its first warp in the cluster.
    first_warp: usize,
    barriers: [Barrier; BARRIERS],
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Barrier {
    /// Threads that it waits for; 0 before the first arrives.
    pub(crate) expected: u32,
    /// The warps that have arrived.
    participants: u32,
    /// The warps among them that wait.
    pub(crate) waiting: u32,
    /// The clocks that the arrivals have released, joined.
    joined: Vec<u32>,
}

/// A warp's arrival at a named barrier.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    /// The warp in the CTA.
    pub(crate) warp: usize,
    pub(crate) barrier: Operand,
    pub(crate) threads: Operand,
    pub(crate) waits: bool,
    /// Threads of the CTA.
    pub(crate) cta_threads: u32,
}

impl Barrier {
    /// Threads that have arrived. A partial warp counts as a whole one.
    pub(crate) fn arrived(&self) -> u32 {
        self.participants.count_ones() * LANES as u32
    }
}

impl Barriers {
    pub(crate) fn new(first_warp: usize) -> Self {
        Self { first_warp, barriers: Default::default() }
    }

    /// The barriers with their numbers.
    pub(crate) fn numbered(&self) -> impl Iterator<Item = (u32, &Barrier)> {
        (0u32..).zip(&self.barriers)
    }

    /// Records the arrival of a warp, which waits or proceeds. Updates the ready warps of the CTA.
    pub(crate) fn arrive(
        &mut self,
        arrival: Arrival,
        registers: &Warp<'_>,
        clocks: &mut Clocks,
        ready: &mut u32,
    ) -> Result<(), Stop> {
        let Arrival { warp, barrier, threads, waits, cta_threads } = arrival;
        let (barriers, counts) = (registers.registers.word(barrier), registers.registers.word(threads));
        let (index, threads) = (barriers[0], counts[0]);
        let differs = |lane: usize| barriers[lane] != index || counts[lane] != threads;
        let problem = |problem| Err(Stop::warp(FaultKind::BarrierCount { barrier: index, threads, problem }));
        if lanes(registers.threads()).any(differs) {
            return problem(BarrierProblem::LanesDisagree);
        }
        let Some(barrier) = self.barriers.get_mut(index as usize) else {
            return problem(BarrierProblem::NoSuchBarrier);
        };
        if threads == 0 || !threads.is_multiple_of(LANES as u32) {
            return problem(BarrierProblem::NotWholeWarps);
        }
        // A barrier counts warps: a partial last warp counts as a whole one.
        if threads > cta_threads.next_multiple_of(LANES as u32) {
            return problem(BarrierProblem::MoreThanCta { threads: cta_threads });
        }
        if barrier.expected != 0 && barrier.expected != threads {
            return problem(BarrierProblem::Disagrees { expected: barrier.expected });
        }
        if barrier.participants >> warp & 1 == 1 {
            return problem(BarrierProblem::ArrivesTwice);
        }
        barrier.expected = threads;
        barrier.participants |= 1 << warp;
        clocks.release(self.first_warp + warp, &mut barrier.joined);
        if waits {
            barrier.waiting |= 1 << warp;
            *ready &= !(1 << warp);
        }
        if barrier.arrived() == threads {
            for waiting in lanes(barrier.waiting) {
                clocks.acquire(self.first_warp + waiting, &barrier.joined);
            }
            *ready |= barrier.waiting;
            barrier.expected = 0;
            barrier.participants = 0;
            barrier.waiting = 0;
            barrier.joined.fill(0);
        }
        Ok(())
    }
}
