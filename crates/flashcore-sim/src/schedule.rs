//! A CTA: its warps, interleaved by a seeded scheduler, and the barriers between them.

use flashcore_ir::Operand;

use crate::counters::Counters;
use crate::error::{InternalError, Stop};
use crate::execute::{Context, Flow, Scene, asynchronous, execute};
use crate::fault::{BarrierProblem, Fault, FaultKind, WaitingWarp};
use crate::launch::Options;
use crate::memory::global::GlobalMemory;
use crate::memory::shared::SharedMemory;
use crate::memory::view::GlobalView;
use crate::program::{Action, Together};
use crate::race::{Clocks, LAST_EPOCH, Shadow};
use crate::registers::{ALL, LANES, lanes};
use crate::warp::Warp;

/// Barriers of a CTA.
const BARRIERS: u32 = 16;

/// What a CTA leaves behind.
pub(crate) struct Finished {
    pub(crate) counters: Counters,
    /// Its accesses to global memory.
    pub(crate) history: Vec<Vec<Option<Box<Shadow>>>>,
}

/// Why a CTA did not end.
#[derive(Debug)]
pub(crate) enum Failure {
    Fault(Box<Fault>),
    Internal(InternalError),
}

/// Executes a CTA; `random` decides which warp goes on when.
pub(crate) fn run(
    scene: Scene<'_, '_>,
    memory: &GlobalMemory,
    options: &Options,
    random: Random,
) -> Result<Finished, Failure> {
    Cta::new(scene, memory, options, random).run()
}

struct Cta<'c, 'k, 'm> {
    scene: Scene<'c, 'k>,
    warps: Vec<Warp<'k>>,
    /// The warps that can go on.
    ready: u32,
    barriers: Vec<Barrier>,
    clocks: Clocks,
    shared: SharedMemory,
    global: GlobalView<'m>,
    counters: Counters,
    random: Random,
    longest_turn: u32,
    steps: u64,
    step_limit: u64,
}

#[derive(Debug, Clone)]
struct Barrier {
    /// Threads it waits for; 0 before the first arrives.
    expected: u32,
    /// The warps that have arrived.
    participants: u32,
    /// Those of them that wait.
    waiting: u32,
    /// What those that arrived have released.
    joined: Vec<u32>,
}

impl Barrier {
    /// Threads that have arrived. A warp counts whole.
    fn arrived(&self) -> u32 {
        self.participants.count_ones() * LANES as u32
    }
}

impl<'c, 'k, 'm> Cta<'c, 'k, 'm>
where
    'c: 'k,
{
    fn new(scene: Scene<'c, 'k>, memory: &'m GlobalMemory, options: &Options, random: Random) -> Self {
        let kernel = scene.program.kernel;
        let count = kernel.threads.div_ceil(LANES as u32);
        let warps = (0..count).map(|warp| Warp::new(&scene.program.layout, kernel.threads - warp * LANES as u32));
        let barrier = Barrier { expected: 0, participants: 0, waiting: 0, joined: vec![0; count as usize] };
        Self {
            scene,
            warps: warps.collect(),
            ready: if count == 32 { ALL } else { (1 << count) - 1 },
            barriers: vec![barrier; BARRIERS as usize],
            clocks: Clocks::new(count as usize),
            shared: SharedMemory::new(kernel.shared_bytes, count as usize),
            global: GlobalView::new(memory, count as usize),
            counters: Counters::default(),
            random,
            longest_turn: options.longest_turn.max(1),
            steps: 0,
            step_limit: options.step_limit.min(LAST_EPOCH - 1),
        }
    }

    fn run(mut self) -> Result<Finished, Failure> {
        while self.ready != 0 {
            let chosen = self.random.below(self.ready.count_ones());
            let warp = lanes(self.ready).nth(chosen as usize).unwrap_or(0);
            let turn = 1 + self.random.below(self.longest_turn);
            for _ in 0..turn {
                let step = self.warps[warp].next;
                self.step(warp).map_err(|stop| self.failure(stop, warp, step))?;
                if self.ready >> warp & 1 == 0 {
                    break;
                }
            }
        }
        if self.warps.iter().all(Warp::is_done) {
            return Ok(Finished { counters: self.counters, history: self.global.into_history() });
        }
        Err(Failure::Fault(Box::new(self.deadlock())))
    }

    fn failure(&self, stop: Stop, warp: usize, step: usize) -> Failure {
        match stop {
            Stop::Fault(trouble) => {
                let mut place = self.scene.program.place(step, self.scene.cta, warp as u32);
                place.lane = trouble.lane;
                place.address = trouble.address;
                Failure::Fault(Box::new(Fault { kind: trouble.kind, place }))
            }
            Stop::Internal(error) => Failure::Internal(error),
        }
    }

    fn deadlock(&self) -> Fault {
        let mut waiting: Vec<_> = (0u32..)
            .zip(&self.barriers)
            .flat_map(|(index, barrier)| {
                lanes(barrier.waiting).map(move |warp| WaitingWarp {
                    barrier: index,
                    arrived: barrier.arrived(),
                    expected: barrier.expected,
                    // A warp that waits has gone past its barrier.
                    place: self.scene.program.place(self.warps[warp].next - 1, self.scene.cta, warp as u32),
                })
            })
            .collect();
        waiting.sort_by_key(|waiting| waiting.place.warp);
        let place = waiting[0].place.clone();
        Fault { kind: FaultKind::Deadlock { waiting }, place }
    }

    /// Executes the next step of a warp.
    fn step(&mut self, warp_index: usize) -> Result<(), Stop> {
        if self.steps == self.step_limit {
            return Err(Stop::warp(FaultKind::StepLimit { limit: self.step_limit }));
        }
        self.steps += 1;
        let program = self.scene.program;
        let warp = &mut self.warps[warp_index];
        let step = warp.next;
        let flow = match &program.steps[step].action {
            Action::Operation(operation) => {
                warp.next += 1;
                let mut mask = warp.active;
                if let Some(guard) = operation.guard {
                    warp.must_be_written(guard.predicate, mask)?;
                    let holds = warp.registers.predicate_of(guard.predicate);
                    mask &= if guard.negated { !holds } else { holds };
                }
                if mask == 0 {
                    return Ok(());
                }
                let together = match operation.together {
                    Together::Lanes => mask,
                    Together::Threads => warp.threads(),
                    Together::Warp => ALL,
                };
                if mask != together {
                    return Err(Stop::warp(FaultKind::DivergentCollective { active: mask }));
                }
                for &register in &operation.reads {
                    warp.must_be_written(register, mask)?;
                }
                self.counters.instructions[operation.class as usize] += 1;
                self.counters.lane_operations += u64::from(mask.count_ones());
                let mut context = self.context(warp_index, step, mask);
                let flow = execute(&mut context, operation.op)?;
                (flow, mask)
            }
            Action::End => {
                let mask = warp.active;
                asynchronous::end(&mut self.context(warp_index, step, mask))?;
                (Flow::Exit, mask)
            }
            action @ (Action::If { .. }
            | Action::Else { .. }
            | Action::EndIf
            | Action::LoopEnter
            | Action::LoopTest { .. }
            | Action::LoopBack { .. }) => return warp.branch(action),
        };
        match flow {
            (Flow::Next, _) => Ok(()),
            (Flow::Barrier { barrier, threads, waits }, _) => self.arrive(warp_index, barrier, threads, waits),
            (Flow::Exit, mask) => {
                let warp = &mut self.warps[warp_index];
                warp.end(mask);
                if warp.is_done() {
                    self.ready &= !(1 << warp_index);
                }
                Ok(())
            }
        }
    }

    fn context(&mut self, warp_index: usize, step: usize, mask: u32) -> Context<'_, 'k, 'm> {
        Context {
            scene: self.scene,
            warp_index,
            step,
            mask,
            warp: &mut self.warps[warp_index],
            clocks: &mut self.clocks,
            shared: &mut self.shared,
            global: &mut self.global,
            counters: &mut self.counters,
        }
    }

    /// A warp arrives at a barrier, to wait or to go on.
    fn arrive(&mut self, warp: usize, barrier: Operand, threads: Operand, waits: bool) -> Result<(), Stop> {
        let registers = &self.warps[warp].registers;
        let (barriers, counts) = (registers.word(barrier), registers.word(threads));
        let (index, threads) = (barriers[0], counts[0]);
        let differs = |lane: usize| barriers[lane] != index || counts[lane] != threads;
        let cta_threads = self.scene.program.kernel.threads;
        let problem = |problem| Err(Stop::warp(FaultKind::BarrierCount { barrier: index, threads, problem }));
        if lanes(self.warps[warp].threads()).any(differs) {
            return problem(BarrierProblem::LanesDisagree);
        }
        let Some(barrier) = self.barriers.get_mut(index as usize) else {
            return problem(BarrierProblem::NoSuchBarrier);
        };
        if threads == 0 || !threads.is_multiple_of(LANES as u32) {
            return problem(BarrierProblem::NotWholeWarps);
        }
        // A barrier counts warps: a last one that is not full is whole to it.
        if threads > cta_threads.next_multiple_of(LANES as u32) {
            return problem(BarrierProblem::MoreThanCta { threads: cta_threads });
        }
        if barrier.expected != 0 && barrier.expected != threads {
            return problem(BarrierProblem::Disagrees { expected: barrier.expected });
        }
        if barrier.participants >> warp & 1 == 1 {
            return problem(BarrierProblem::ArrivesTwice);
        }
        self.counters.barriers += 1;
        barrier.expected = threads;
        barrier.participants |= 1 << warp;
        self.clocks.release(warp, &mut barrier.joined);
        if waits {
            barrier.waiting |= 1 << warp;
            self.ready &= !(1 << warp);
        }
        if barrier.arrived() == threads {
            for waiting in lanes(barrier.waiting) {
                self.clocks.acquire(waiting, &barrier.joined);
            }
            self.ready |= barrier.waiting;
            barrier.expected = 0;
            barrier.participants = 0;
            barrier.waiting = 0;
            barrier.joined.fill(0);
        }
        Ok(())
    }
}

/// A sequence of random numbers (`SplitMix64`, Steele, Lea and Flood, 2014).
#[derive(Debug, Clone)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// The sequence of a CTA under a seed.
    pub(crate) fn new(seed: u64, cta: u64) -> Self {
        let mut random = Self { state: seed };
        random.state = random.next() ^ cta;
        random
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number below `bound`.
    fn below(&mut self, bound: u32) -> u32 {
        (((self.next() >> 32) * u64::from(bound)) >> 32) as u32
    }
}
