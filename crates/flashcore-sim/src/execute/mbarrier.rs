//! Steps on `mbarrier`s, in the shared memory of this CTA or of another of the cluster. Their state is in
//! [`crate::state::mbarrier`].

use flashcore_ir::{Address, FenceScope, Operand, RegisterId, Space};

use crate::clocks::Participants;
use crate::error::{InternalError, Stop};
use crate::execute::cluster::{SharedLocation, locate};
use crate::execute::memory::addresses;
use crate::execute::{Attempt, Context, aligned};
use crate::fault::{AccessKind, FaultKind, MbarrierProblem};
use crate::memory::{Reason, Refusal};
use crate::race::MOST_MBARRIERS;
use crate::state::mbarrier::{MBARRIER_BYTES, Mbarrier, Refused};
use crate::state::registers::{LANES, lanes};

/// The fault for a refused operation of a lane.
pub(crate) fn refused((problem, state): Refused, lane: usize, address: u64) -> Stop {
    Stop::address(FaultKind::Mbarrier { problem, state }, lane, address)
}

/// Initialises `mbarrier`s.
pub(crate) fn initialise(context: &mut Context<'_, '_, '_>, count: Operand, target: Address) -> Result<(), Stop> {
    let counts = context.warp.registers.word(count);
    let targets = addresses(&context.warp.registers, Space::Shared, target);
    let Context { scene, clocks, cluster, rank, mask, .. } = context;
    let warps = scene.placement.ctas() * scene.placement.warps_per_cta;
    let shared = &mut cluster[*rank];
    for lane in lanes(*mask) {
        let address = targets[lane];
        aligned(Space::Shared, address, MBARRIER_BYTES, lane)?;
        let allowed = shared.mbarriers.may_initialise(address as u32, counts[lane]);
        allowed.map_err(|problem| refused(problem, lane, address))?;
        let number = clocks.add_mbarrier();
        if number >= MOST_MBARRIERS {
            let message = format!("a cluster initialises more than {MOST_MBARRIERS} mbarriers");
            return Err(Stop::Internal(InternalError { message }));
        }
        let accessor = clocks.accessor(context.warp_index, context.step);
        let access = accessor.lane(lane);
        let attempt = Attempt { space: Space::Shared, kind: AccessKind::Write, bytes: MBARRIER_BYTES, lane };
        let written = shared.write(address as u32, &[0xff; MBARRIER_BYTES as usize], &access);
        written.map_err(|refusal| scene.refused(attempt, refusal))?;
        shared.mbarriers.initialise(address as u32, counts[lane], access.stamp, (number, warps));
    }
    Ok(())
}

/// Invalidates `mbarrier`s.
pub(crate) fn invalidate(context: &mut Context<'_, '_, '_>, target: Address) -> Result<(), Stop> {
    let targets = addresses(&context.warp.registers, Space::Shared, target);
    for lane in lanes(context.mask) {
        let location = use_barrier(context, Space::Shared, targets[lane], lane)?;
        let accessor = context.clocks.accessor(context.warp_index, context.step);
        let access = accessor.lane(lane);
        let shared = &mut context.cluster[location.rank];
        let earlier = shared.mbarriers.get(location.address).map(|barrier| barrier.unordered_use(&access));
        if let Ok(Some(earlier)) = earlier {
            return Err(race(context, earlier, AccessKind::Atomic, targets[lane], lane));
        }
        shared.mbarriers.invalidate(location.address);
    }
    Ok(())
}

fn race(
    context: &Context<'_, '_, '_>,
    earlier: crate::race::Stamp,
    earlier_kind: AccessKind,
    address: u64,
    lane: usize,
) -> Stop {
    let attempt = Attempt { space: Space::Shared, kind: AccessKind::Atomic, bytes: MBARRIER_BYTES, lane };
    context.scene.refused(attempt, Refusal { address, reason: Reason::Race { earlier, earlier_kind } })
}

/// The location of a lane's `mbarrier`, if the lane is ordered after its initialisation.
fn use_barrier(
    context: &mut Context<'_, '_, '_>,
    space: Space,
    address: u64,
    lane: usize,
) -> Result<SharedLocation, Stop> {
    let location = locate(&context.scene, context.cluster, context.rank, space, address, lane)?;
    aligned(space, location.address.into(), MBARRIER_BYTES, lane)?;
    let accessor = context.clocks.accessor(context.warp_index, context.step);
    let access = accessor.lane(lane);
    let barrier = context.cluster[location.rank].mbarriers.get(location.address);
    let barrier = barrier.map_err(|problem| refused(problem, lane, address))?;
    let initialised = barrier.initialised();
    if !access.is_after(initialised) {
        return Err(race(context, initialised, AccessKind::Write, address, lane));
    }
    barrier.used(&access);
    Ok(location)
}

impl Context<'_, '_, '_> {
    fn participant(&self, lane: usize) -> Participants {
        Participants { warp: self.warp_index, lanes: 1 << lane, alive: self.warp.alive() }
    }

    /// An `mbarrier` that [`use_barrier`] has found.
    fn barrier(&mut self, location: SharedLocation) -> Result<&mut Mbarrier, Refused> {
        self.cluster[location.rank].mbarriers.get(location.address)
    }
}

/// The kind of an arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Arrives this many times.
    Count(Operand),
    /// Expects bytes (`expect_tx`) and arrives.
    Expect(Operand),
    /// Expects bytes (`expect_tx`) only.
    ExpectOnly(Operand),
}

/// Arrives at `mbarrier`s or expects bytes, or both. All lanes release before one of them arrives: they execute
/// together.
pub(crate) fn arrive(
    context: &mut Context<'_, '_, '_>,
    space: Space,
    arrival: Arrival,
    target: Address,
) -> Result<(), Stop> {
    let (Arrival::Count(operand) | Arrival::Expect(operand) | Arrival::ExpectOnly(operand)) = arrival;
    let numbers = context.warp.registers.word(operand);
    let targets = addresses(&context.warp.registers, space, target);
    let mut locations = [SharedLocation { rank: 0, address: 0 }; LANES];
    for lane in lanes(context.mask) {
        locations[lane] = use_barrier(context, space, targets[lane], lane)?;
    }
    if !matches!(arrival, Arrival::ExpectOnly(_)) {
        release(context, &locations, context.mask);
    }
    for lane in lanes(context.mask) {
        let (location, address) = (locations[lane], targets[lane]);
        let Context { cluster, clocks, .. } = context;
        let done = cluster[location.rank].mbarriers.get(location.address).and_then(|barrier| match arrival {
            Arrival::Count(_) => barrier.arrive(numbers[lane], clocks),
            Arrival::Expect(_) => barrier.expect_tx(numbers[lane]).and_then(|()| barrier.arrive(1, clocks)),
            Arrival::ExpectOnly(_) => barrier.expect_tx(numbers[lane]).map(|()| false),
        });
        if done.map_err(|problem| refused(problem, lane, address))? {
            context.signals.completed.push((location.rank, location.address));
            // The lanes after this one arrive in the next phase.
            release(context, &locations, context.mask & u32::MAX.checked_shl(lane as u32 + 1).unwrap_or(0));
        }
    }
    Ok(())
}

/// Releases to the current phases of the lanes' `mbarrier`s, for lanes with the same one together.
fn release(context: &mut Context<'_, '_, '_>, locations: &[SharedLocation; LANES], mask: u32) {
    let mut rest = mask;
    while rest != 0 {
        let location = locations[rest.trailing_zeros() as usize];
        let same = lanes(rest).filter(|&lane| locations[lane] == location).fold(0, |mask, lane| mask | 1 << lane);
        rest &= !same;
        let participants = Participants { warp: context.warp_index, lanes: same, alive: context.warp.alive() };
        let here = location.rank == context.rank;
        let Context { cluster, clocks, .. } = context;
        if let Ok(barrier) = cluster[location.rank].mbarriers.get(location.address) {
            barrier.release(clocks, participants, here);
        }
    }
}

fn check_parity(parity: u32, lane: usize, address: u64) -> Result<(), Stop> {
    let wrong = || refused((MbarrierProblem::Parity { parity }, None), lane, address);
    if parity < 2 { Ok(()) } else { Err(wrong()) }
}

/// Returns true if all waiting lanes of a warp can proceed. Those that can have acquired.
pub(crate) fn wait(
    context: &mut Context<'_, '_, '_>,
    scope: FenceScope,
    parity: Operand,
    source: Address,
) -> Result<bool, Stop> {
    let parities = context.warp.registers.word(parity);
    let sources = addresses(&context.warp.registers, Space::Shared, source);
    let mut complete = context.warp.waiting.done;
    context.warp.waiting.mbarriers.clear();
    for lane in lanes(context.mask & !complete) {
        check_parity(parities[lane], lane, sources[lane])?;
        let location = use_barrier(context, Space::Shared, sources[lane], lane)?;
        let done = context.barrier(location).map(|barrier| barrier.is_complete(parities[lane]));
        if done.map_err(|problem| refused(problem, lane, sources[lane]))? {
            complete |= 1 << lane;
        } else if !context.warp.waiting.mbarriers.contains(&location.address) {
            context.warp.waiting.mbarriers.push(location.address);
        }
    }
    acquire(context, complete & !context.warp.waiting.done, scope, &sources);
    let all = complete & context.mask == context.mask;
    context.warp.waiting.done = if all { 0 } else { complete };
    Ok(all)
}

/// Acquires for lanes whose phases are complete, for those with the same `mbarrier` together.
fn acquire(context: &mut Context<'_, '_, '_>, mask: u32, scope: FenceScope, sources: &[u64; LANES]) {
    let mut rest = mask;
    while rest != 0 {
        let address = sources[rest.trailing_zeros() as usize];
        let same = lanes(rest).filter(|&lane| sources[lane] == address).fold(0, |mask, lane| mask | 1 << lane);
        rest &= !same;
        let participants = Participants { lanes: same, ..context.participant(same.trailing_zeros() as usize) };
        let Context { cluster, clocks, rank, .. } = context;
        if let Ok(barrier) = cluster[*rank].mbarriers.get(address as u32) {
            barrier.acquire(clocks, participants, scope == FenceScope::Cluster);
        }
    }
}

/// `d` is true if the phases are complete.
pub(crate) fn test(
    context: &mut Context<'_, '_, '_>,
    scope: FenceScope,
    d: RegisterId,
    parity: Operand,
    source: Address,
) -> Result<(), Stop> {
    let parities = context.warp.registers.word(parity);
    let sources = addresses(&context.warp.registers, Space::Shared, source);
    let mut complete = 0;
    for lane in lanes(context.mask) {
        check_parity(parities[lane], lane, sources[lane])?;
        let location = use_barrier(context, Space::Shared, sources[lane], lane)?;
        let done = context.barrier(location).map(|barrier| barrier.is_complete(parities[lane]));
        complete |= u32::from(done.map_err(|problem| refused(problem, lane, sources[lane]))?) << lane;
    }
    acquire(context, complete, scope, &sources);
    context.lanes().set_predicate(d, complete);
    Ok(())
}
