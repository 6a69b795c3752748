//! The seeded scheduler of a cluster: interleaves its warps, and wakes those whose event has come.

use flashcore_ir::Space;

use crate::clocks::Clocks;
use crate::counters::Counters;
use crate::error::{InternalError, Stop, UnlocatedFault};
use crate::execute::tma::{self, TmaLoad};
use crate::execute::{Context, Flow, Scene, Signals, async_copy, execute, wgmma};
use crate::fault::{Fault, FaultKind, InFlight, TooEarly, WaitingWarp, WaitsFor};
use crate::launch::Options;
use crate::memory::global::GlobalMemory;
use crate::memory::shared::SharedMemory;
use crate::memory::view::{GlobalView, History};
use crate::program::{Action, Operation, is_wgmma};
use crate::race::LAST_EPOCH;
use crate::random::Random;
use crate::state::cluster_barrier::ClusterBarrier;
use crate::state::named_barrier::{Arrival, Barriers};
use crate::state::registers::{ALL, LANES, lanes};
use crate::state::warp::Warp;
use crate::state::wgmma::{InFlightProducts, WARPS, Warpgroup};
use crate::stream::{GridDependency, Unfinished};

/// The outcome of a cluster without faults.
pub(crate) struct ClusterResult {
    pub(crate) counters: Counters,
    /// The accesses to global memory.
    pub(crate) history: History,
    pub(crate) dependency: GridDependency,
}

/// The reason why a cluster did not complete.
#[derive(Debug)]
pub(crate) enum Failure {
    Fault(Box<Fault>),
    Internal(InternalError),
}

/// Executes a cluster; `random` decides which warp runs when.
pub(crate) fn run(
    scene: Scene<'_, '_>,
    memory: &GlobalMemory,
    unfinished: Option<Unfinished<'_>>,
    options: &Options,
    random: Random,
) -> Result<ClusterResult, Failure> {
    Cluster::new(scene, memory, unfinished, options, random).run()
}

struct Cluster<'c, 'k, 'm> {
    scene: Scene<'c, 'k>,
    /// The warps of all CTAs, one CTA after the other.
    warps: Vec<Warp<'k>>,
    ctas: Vec<Cta>,
    /// The shared memory of each CTA.
    shared: Vec<SharedMemory>,
    clocks: Clocks,
    global: GlobalView<'m>,
    counters: Counters,
    barrier: ClusterBarrier,
    signals: Signals,
    /// The warpgroups of all CTAs; none without `wgmma`.
    warpgroups: Vec<Warpgroup>,
    /// TMA loads in flight.
    tma_loads: Vec<TmaLoad>,
    /// The average number of turns between arrivals of loads; they also arrive when no warp can proceed.
    arrival_interval: u32,
    random: Random,
    longest_turn: u32,
    steps: u64,
    step_limit: u64,
}

/// The scheduler's state of a CTA.
struct Cta {
    /// The warps that can proceed.
    ready: u32,
    barriers: Barriers,
}

impl<'c, 'k, 'm> Cluster<'c, 'k, 'm>
where
    'c: 'k,
{
    fn new(
        scene: Scene<'c, 'k>,
        memory: &'m GlobalMemory,
        unfinished: Option<Unfinished<'m>>,
        options: &Options,
        random: Random,
    ) -> Self {
        let kernel = scene.program.kernel;
        let count = scene.placement.warps_per_cta;
        let ctas = scene.placement.ctas();
        let warp = |warp: usize| Warp::new(&scene.program.layout, kernel.threads - (warp % count * LANES) as u32);
        let groups = if scene.program.has_wgmma { ctas * count.div_ceil(WARPS) } else { 0 };
        let ready = if count == 32 { ALL } else { (1 << count) - 1 };
        let mut warps: Vec<Warp<'k>> = (0..ctas * count).map(warp).collect();
        if scene.program.has_wgmma {
            for warp in &mut warps {
                warp.products = InFlightProducts::new(kernel.registers.len());
                warp.register_count = kernel.register_budget.next_multiple_of(8);
            }
        }
        Self {
            scene,
            warps,
            ctas: (0..ctas).map(|rank| Cta { ready, barriers: Barriers::new(rank * count) }).collect(),
            shared: (0..ctas).map(|_| SharedMemory::new(kernel.shared_bytes, ctas * count)).collect(),
            clocks: Clocks::new(ctas * count, unfinished.is_some()),
            global: GlobalView::new(memory, unfinished, ctas * count),
            counters: Counters::default(),
            barrier: ClusterBarrier::new(ctas * count),
            signals: Signals::default(),
            warpgroups: core::iter::repeat_with(Warpgroup::default).take(groups).collect(),
            tma_loads: Vec::new(),
            arrival_interval: 0,
            random,
            longest_turn: options.longest_turn.max(1),
            steps: 0,
            step_limit: options.step_limit.min(LAST_EPOCH - 1),
        }
    }

    fn run(mut self) -> Result<ClusterResult, Failure> {
        loop {
            if !self.tma_loads.is_empty() && self.is_time_to_arrive() {
                self.arrive()?;
                continue;
            }
            let Some(warp) = self.choose() else { break };
            let turn = 1 + self.random.below(self.longest_turn);
            for _ in 0..turn {
                let step = self.warps[warp].next;
                self.step(warp).map_err(|stop| self.failure(stop, warp, step))?;
                if !self.signals.completed.is_empty() {
                    self.wake_completed();
                }
                if core::mem::take(&mut self.signals.released_registers) {
                    self.wake(|_, warp| core::mem::take(&mut warp.waiting.registers) > 0);
                }
                if !self.is_ready(warp) {
                    break;
                }
            }
        }
        if self.warps.iter().all(Warp::is_done) {
            let Self { counters, global, signals, .. } = self;
            return Ok(ClusterResult {
                counters,
                history: global.into_history(),
                dependency: signals.dependency.of_cluster(),
            });
        }
        Err(Failure::Fault(Box::new(self.deadlock())))
    }

    /// Returns true if a load arrives before a warp proceeds. Under some seeds loads are fast, under others slow.
    fn is_time_to_arrive(&mut self) -> bool {
        if self.arrival_interval == 0 {
            self.arrival_interval = 1 << (2 * self.random.below(4));
        }
        let someone_goes_on = self.ctas.iter().any(|cta| cta.ready != 0);
        !someone_goes_on || self.random.below(self.arrival_interval) == 0
    }

    /// Completes one of the loads in flight.
    fn arrive(&mut self) -> Result<(), Failure> {
        let chosen = self.random.below(self.tma_loads.len() as u32) as usize;
        let load = self.tma_loads.swap_remove(chosen);
        let finished = tma::finish(&load, &mut self.shared, &self.clocks, &mut self.signals);
        finished.map_err(|stop| self.failure(stop, load.started.warp(), load.started.step()))?;
        if !self.signals.completed.is_empty() {
            self.wake_completed();
        }
        Ok(())
    }

    /// One of the warps that can proceed.
    fn choose(&mut self) -> Option<usize> {
        let ready: u32 = self.ctas.iter().map(|cta| cta.ready.count_ones()).sum();
        if ready == 0 {
            return None;
        }
        let mut chosen = self.random.below(ready);
        let count = self.scene.placement.warps_per_cta;
        for (rank, cta) in self.ctas.iter().enumerate() {
            if let Some(warp) = lanes(cta.ready).nth(chosen as usize) {
                return Some(rank * count + warp);
            }
            chosen -= cta.ready.count_ones();
        }
        None
    }

    fn is_ready(&self, warp: usize) -> bool {
        let (rank, warp) = self.scene.placement.rank_and_warp(warp);
        self.ctas[rank].ready >> warp & 1 == 1
    }

    fn failure(&self, stop: Stop, warp: usize, step: usize) -> Failure {
        match stop {
            Stop::Fault(fault) => {
                let mut location = self.scene.location(step, warp);
                location.lane = fault.lane;
                location.address = fault.address;
                Failure::Fault(Box::new(Fault { kind: fault.kind, location }))
            }
            Stop::Internal(error) => Failure::Internal(error),
        }
    }

    fn deadlock(&self) -> Fault {
        let count = self.scene.placement.warps_per_cta;
        let mut waiting = Vec::new();
        for (rank, cta) in self.ctas.iter().enumerate() {
            for (index, barrier) in cta.barriers.numbered() {
                let (arrived, expected) = (barrier.arrived(), barrier.expected);
                waiting.extend(lanes(barrier.waiting).map(|warp| rank * count + warp).map(|warp| WaitingWarp {
                    waits_for: WaitsFor::Barrier { barrier: index, arrived, expected },
                    // A warp that waits has gone past its barrier.
                    location: self.scene.location(self.warps[warp].next - 1, warp),
                }));
            }
        }
        for (warp, waits) in self.warps.iter().enumerate() {
            let location = || self.scene.location(waits.next, warp);
            let (rank, _) = self.scene.placement.rank_and_warp(warp);
            for &address in &waits.waiting.mbarriers {
                if let Some(barrier) = self.shared[rank].mbarriers.overlapping(address, 1) {
                    let mut location = location();
                    location.address = Some(address.into());
                    waiting.push(WaitingWarp { waits_for: WaitsFor::Mbarrier(barrier.state()), location });
                }
            }
            if waits.waiting.registers > 0 {
                let (wanted, free) = (waits.waiting.registers, self.shared[rank].free_registers);
                waiting.push(WaitingWarp { waits_for: WaitsFor::Registers { wanted, free }, location: location() });
            }
            if waits.waiting.cluster {
                let (arrived, expected) = self.barrier.progress();
                waiting.push(WaitingWarp { waits_for: WaitsFor::Cluster { arrived, expected }, location: location() });
            }
        }
        waiting.sort_by_key(|waiting| (waiting.location.cta, waiting.location.warp));
        let location = waiting[0].location.clone();
        Fault { kind: FaultKind::Deadlock { waiting }, location }
    }

    /// Executes the next step of a warp.
    fn step(&mut self, warp_index: usize) -> Result<(), Stop> {
        if self.steps == self.step_limit {
            return Err(Stop::warp(FaultKind::StepLimit { limit: self.step_limit }));
        }
        self.steps += 1;
        let program = self.scene.program;
        let warp = &mut self.warps[warp_index];
        match &program.steps[warp.next].action {
            Action::Operation(operation) => self.operation(warp_index, operation),
            Action::End => {
                let (step, mask) = (warp.next, warp.active);
                async_copy::end(&mut self.context(warp_index, step, mask))?;
                self.exit(warp_index, mask)
            }
            action @ (Action::If { .. }
            | Action::Else { .. }
            | Action::EndIf
            | Action::LoopEnter
            | Action::LoopTest { .. }
            | Action::LoopBack { .. }) => warp.branch(action),
        }
    }

    /// Executes an operation of a warp, and counts it unless the warp has to wait and execute it again.
    fn operation(&mut self, warp_index: usize, operation: &Operation<'k>) -> Result<(), Stop> {
        let warp = &mut self.warps[warp_index];
        let step = warp.next;
        warp.next += 1;
        let mask = warp.executing(operation)?;
        if mask == 0 {
            return Ok(());
        }
        if operation.touches {
            self.clocks.touch(warp_index, mask);
        }
        if self.scene.program.has_wgmma && !is_wgmma(operation.op) {
            let touched = warp.products.touch(&operation.reads, &operation.writes);
            touched.map_err(|used| wgmma::in_use(&self.context(warp_index, step, mask), used))?;
        }
        let flow = execute(&mut self.context(warp_index, step, mask), operation.op)?;
        let (rank, local) = self.scene.placement.rank_and_warp(warp_index);
        match flow {
            Flow::Next => {}
            Flow::Wait => {
                self.ctas[rank].ready &= !(1 << local);
                self.warps[warp_index].next = step;
                return Ok(());
            }
            Flow::Barrier { barrier, threads, waits } => {
                let cta_threads = self.scene.program.kernel.threads;
                let arrival = Arrival { warp: local, barrier, threads, waits, cta_threads };
                let Cta { ready, barriers } = &mut self.ctas[rank];
                barriers.arrive(arrival, &self.warps[warp_index], &mut self.clocks, ready)?;
                self.counters.barriers += 1;
            }
            Flow::ClusterArrive => {
                self.counters.barriers += 1;
                if self.barrier.arrive(warp_index, &mut self.clocks)? {
                    self.wake(|_, warp| core::mem::take(&mut warp.waiting.cluster));
                }
            }
            Flow::Exit => self.exit(warp_index, mask)?,
        }
        self.counters.instructions[operation.class as usize] += 1;
        self.counters.lane_operations += u64::from(mask.count_ones());
        Ok(())
    }

    /// Ends lanes of a warp, and with the last of them the warp.
    fn exit(&mut self, warp_index: usize, mask: u32) -> Result<(), Stop> {
        let warp = &mut self.warps[warp_index];
        warp.end(mask);
        if warp.is_done() { self.end(warp_index) } else { Ok(()) }
    }

    /// Handles the end of a warp, and perhaps of its CTA.
    fn end(&mut self, warp: usize) -> Result<(), Stop> {
        let (rank, local) = self.scene.placement.rank_and_warp(warp);
        self.ctas[rank].ready &= !(1 << local);
        if self.barrier.end(warp) {
            self.wake(|_, warp| core::mem::take(&mut warp.waiting.cluster));
        }
        let count = self.scene.placement.warps_per_cta;
        self.shared[rank].has_ended = self.warps[rank * count..][..count].iter().all(Warp::is_done);
        if !self.shared[rank].has_ended {
            return Ok(());
        }
        // A load that arrives after the CTA has ended would write into memory that no longer exists.
        let Some(late) = self.tma_loads.iter().find(|load| load.rank == rank) else { return Ok(()) };
        let address = u64::from(late.target);
        let mut started = self.scene.location_of(late.started, address);
        started.lane = Some(late.lane as u32);
        let kind = FaultKind::MissingWait {
            space: Space::Shared,
            touch: TooEarly::Exit,
            in_flight: InFlight::TmaLoadTarget,
            started: Box::new(started),
        };
        Err(Stop::Fault(Box::new(UnlocatedFault { kind, lane: None, address: Some(address) })))
    }

    /// Makes the warps ready for which `wakes` returns true.
    fn wake(&mut self, mut wakes: impl FnMut(usize, &mut Warp<'k>) -> bool) {
        let placement = self.scene.placement;
        for (index, warp) in self.warps.iter_mut().enumerate() {
            let (rank, local) = placement.rank_and_warp(index);
            if wakes(rank, warp) {
                self.ctas[rank].ready |= 1 << local;
            }
        }
    }

    /// Makes the warps ready that wait for completed phases.
    fn wake_completed(&mut self) {
        let completed = core::mem::take(&mut self.signals.completed);
        self.wake(|rank, warp| {
            let waits = &mut warp.waiting.mbarriers;
            let woken = waits.iter().any(|address| completed.contains(&(rank, *address)));
            if woken {
                waits.clear();
            }
            woken
        });
    }

    fn context(&mut self, warp_index: usize, step: usize, mask: u32) -> Context<'_, 'k, 'm> {
        Context {
            scene: self.scene,
            warp_index,
            rank: warp_index / self.scene.placement.warps_per_cta,
            step,
            mask,
            warp: &mut self.warps[warp_index],
            clocks: &mut self.clocks,
            cluster: &mut self.shared,
            global: &mut self.global,
            counters: &mut self.counters,
            cluster_barrier: &mut self.barrier,
            signals: &mut self.signals,
            tma_loads: &mut self.tma_loads,
            warpgroups: &mut self.warpgroups,
        }
    }
}

#[cfg(test)]
mod tests {
    use flashcore_ir::types::U32;
    use flashcore_ir::{Arch, Builder, Compare};

    use crate::{GlobalMemory, Launch, Options, launch};

    /// A wait that has to be executed again counts once, like one whose phase is complete.
    #[test]
    fn a_wait_counts_once() {
        let mut k = Builder::new("test", 64);
        let offset = k.reserve_mbarrier();
        let base = k.shared_base();
        let barrier = k.add::<U32>(base, offset);
        let (warp, lane) = (k.warp(), k.lane());
        let producer = k.compare::<U32>(Compare::Eq, warp, 0u32);
        let first = k.compare::<U32>(Compare::Eq, lane, 0u32);
        k.if_uniform(producer, |k| k.when(first, |k| k.mbarrier_init(barrier, 32)));
        k.cta_sync();
        k.if_else_uniform(
            producer,
            |k| {
                (0..20).for_each(|_| k.warp_sync());
                k.mbarrier_arrive(barrier, 1);
            },
            |k| k.mbarrier_wait(barrier, 0),
        );
        let kernel = k.finish().verify(Arch::Sm90).expect("the kernel keeps the rules");
        // Both warps execute what comes before the roles, except that one alone initialises.
        let (written, roles) = (kernel.instruction_counts().iter().map(|&(_, count)| count).sum::<usize>(), 20 + 1 + 1);
        let expected = (2 * (written - roles) - 1 + roles) as u64;
        for seed in 0..8 {
            let options = Options { seed, longest_turn: 1, ..Options::default() };
            let run = Launch { grid: [1, 1, 1], arguments: Vec::new() };
            let report = launch(&kernel, &run, &GlobalMemory::new(), &options).expect("a kernel without faults");
            assert_eq!(report.counters.instructions_in_all(), expected, "seed {seed}");
        }
    }
}
