//! Asynchronous copies by `cp.async` and TMA stores, which take effect as late as the rules allow.
//!
//! A copy is an agent of its own. It claims the bytes that it will touch when it starts, so that touching them is a
//! fault, and takes effect when the thread that started it executes a wait that covers it. An agent that signals in
//! another way (an `mbarrier`) claims memory in the same way and differs in the event that ends the claim.

use flashcore_ir::{Address, Operand, RegisterId, Space};

use crate::error::Stop;
use crate::execute::memory::addresses;
use crate::execute::{Attempt, Context, aligned, wgmma};
use crate::fault::{AccessKind, CopySize, FaultKind, InFlight, TooEarly};
use crate::race::Stamp;
use crate::state::registers::{LANES, lanes};

/// The copies of a warp that have not been waited for, oldest first.
#[derive(Debug, Default)]
pub(crate) struct InFlightCopies {
    copies: Vec<Copy>,
    /// Groups that each lane has committed.
    groups: [u32; LANES],
    bulk: Vec<Bulk>,
    /// Groups of bulk copies that each lane has committed.
    bulk_groups: [u32; LANES],
}

/// A `cp.async`.
#[derive(Debug)]
struct Copy {
    started: Stamp,
    lane: usize,
    /// The number of the copy's group among those of the lane.
    group: u32,
    target: u32,
    bytes: u32,
    data: [u8; 16],
}

/// A TMA store: a bulk store or a store of a tensor box.
#[derive(Debug)]
struct Bulk {
    started: Stamp,
    lane: usize,
    group: u32,
    source: u32,
    source_bytes: u32,
    source_is_free: bool,
    /// The bytes that it writes, by address.
    pieces: Vec<(u64, Vec<u8>)>,
}

impl InFlightCopies {
    /// Closes the groups of lanes.
    pub(crate) fn commit(&mut self, mask: u32) {
        lanes(mask).for_each(|lane| self.groups[lane] += 1);
    }

    /// Closes the bulk groups of lanes.
    pub(crate) fn bulk_commit(&mut self, mask: u32) {
        lanes(mask).for_each(|lane| self.bulk_groups[lane] += 1);
    }
}

/// True if a wait that leaves `pending` groups unfinished covers a group.
fn covers(committed: u32, pending: u32, group: u32) -> bool {
    group < committed.saturating_sub(pending)
}

/// Starts copies from global to shared memory.
pub(crate) fn copy(
    context: &mut Context<'_, '_, '_>,
    bytes: u32,
    source_bytes: Option<RegisterId>,
    target: Address,
    source: Address,
) -> Result<(), Stop> {
    let targets = addresses(&context.warp.registers, Space::Shared, target);
    let sources = addresses(&context.warp.registers, Space::Global, source);
    let lengths = source_bytes.map_or([bytes; LANES], |register| *context.warp.registers.word_of(register));
    let Context { scene, warp, clocks, cluster, rank, global, counters, mask, .. } = context;
    let shared = &mut cluster[*rank];
    let accessor = clocks.accessor(context.warp_index, context.step);
    for lane in lanes(*mask) {
        let (target, source, length) = (targets[lane], sources[lane], lengths[lane]);
        if length > bytes {
            let kind = FaultKind::InvalidCopySize { bytes: length, allowed: CopySize::AtMost(bytes) };
            return Err(Stop::lane(kind, lane));
        }
        let access = accessor.lane(lane);
        aligned(Space::Shared, target, bytes, lane)?;
        let attempt = Attempt { space: Space::Shared, kind: AccessKind::Write, bytes, lane };
        let claimed = shared.start_fill(target as u32, bytes, &access);
        claimed.map_err(|refusal| scene.refused(attempt, refusal))?;
        let mut data = [0; 16];
        if length > 0 {
            aligned(Space::Global, source, bytes, lane)?;
            let attempt = Attempt { space: Space::Global, kind: AccessKind::Read, bytes: length, lane };
            let read = global.read(source, &mut data[..length as usize], &access);
            read.map_err(|refusal| scene.refused(attempt, refusal))?;
        }
        let group = warp.copies.groups[lane];
        warp.copies.copies.push(Copy { started: access.stamp, lane, group, target: target as u32, bytes, data });
        counters.copy_async_bytes += u64::from(length);
    }
    counters.copy_async_writes.count(&targets, *mask, bytes);
    counters.global_loads.count(lanes(*mask).map(|lane| (sources[lane], lengths[lane])));
    Ok(())
}

/// Completes the copies that a wait covers; without a number, all of them, committed or not.
pub(crate) fn wait(context: &mut Context<'_, '_, '_>, pending: Option<u32>) {
    let Context { warp, clocks, cluster, rank, mask, .. } = context;
    let shared = &mut cluster[*rank];
    let InFlightCopies { copies, groups, .. } = &mut warp.copies;
    copies.retain(|copy| {
        let waits = *mask >> copy.lane & 1 == 1;
        let covered = pending.is_none_or(|pending| covers(groups[copy.lane], pending, copy.group));
        if waits && covered {
            let accessor = clocks.accessor(context.warp_index, copy.started.step());
            let data = &copy.data[..copy.bytes as usize];
            shared.finish_fill(copy.target, data, copy.started, &accessor.lane(copy.lane));
        }
        !(waits && covered)
    });
}

/// The alignment and the unit of size of bulk copies.
pub(crate) const BULK_UNIT: u32 = 16;

/// Starts bulk copies from shared to global memory.
pub(crate) fn bulk_store(
    context: &mut Context<'_, '_, '_>,
    bytes: Operand,
    target: Address,
    source: Address,
) -> Result<(), Stop> {
    let lengths = context.warp.registers.word(bytes);
    let targets = addresses(&context.warp.registers, Space::Global, target);
    let sources = addresses(&context.warp.registers, Space::Shared, source);
    for lane in lanes(context.mask) {
        let (bytes, target, source) = (lengths[lane], targets[lane], sources[lane]);
        if bytes == 0 || !bytes.is_multiple_of(BULK_UNIT) {
            let kind = FaultKind::InvalidCopySize { bytes, allowed: CopySize::MultipleOf(BULK_UNIT) };
            return Err(Stop::lane(kind, lane));
        }
        aligned(Space::Shared, source, BULK_UNIT, lane)?;
        aligned(Space::Global, target, BULK_UNIT, lane)?;
        start_store(context, lane, source as u32, bytes, |data| vec![(target, data.to_vec())])?;
        context.counters.global_stores.count_bulk(target, bytes);
    }
    Ok(())
}

/// Starts a TMA store of `bytes` at `source`; `pieces` maps them to target addresses.
pub(crate) fn start_store(
    context: &mut Context<'_, '_, '_>,
    lane: usize,
    source: u32,
    bytes: u32,
    pieces: impl FnOnce(&[u8]) -> Vec<(u64, Vec<u8>)>,
) -> Result<(), Stop> {
    let Context { scene, warp, clocks, cluster, rank, global, warp_index, .. } = context;
    let accessor = clocks.accessor(*warp_index, context.step);
    let access = accessor.lane(lane);
    let attempt = Attempt { space: Space::Shared, kind: AccessKind::Read, bytes, lane };
    let data = cluster[*rank].start_drain(source, bytes, &access, clocks);
    let pieces = pieces(data.map_err(|refusal| scene.refused(attempt, refusal))?);
    for (target, data) in &pieces {
        let attempt = Attempt { space: Space::Global, kind: AccessKind::Write, bytes: data.len() as u32, lane };
        let claimed = global.start_fill(*target, data.len() as u64, &access);
        claimed.map_err(|refusal| scene.refused(attempt, refusal))?;
    }
    let (started, group) = (access.stamp, warp.copies.bulk_groups[lane]);
    let (source_bytes, source_is_free) = (bytes, false);
    warp.copies.bulk.push(Bulk { started, lane, group, source, source_bytes, source_is_free, pieces });
    Ok(())
}

/// Completes the bulk copies that a wait covers; with `read`, only their claim on the source.
pub(crate) fn bulk_wait(context: &mut Context<'_, '_, '_>, pending: u32, read: bool) {
    let mask = context.mask;
    let groups = context.warp.copies.bulk_groups;
    end_bulk(context, read, |lane, group| mask >> lane & 1 == 1 && covers(groups[lane], pending, group));
}

fn end_bulk(context: &mut Context<'_, '_, '_>, read: bool, covered: impl Fn(usize, u32) -> bool) {
    let Context { warp, clocks, cluster, rank, global, .. } = context;
    let shared = &mut cluster[*rank];
    warp.copies.bulk.retain_mut(|bulk| {
        if !covered(bulk.lane, bulk.group) {
            return true;
        }
        let accessor = clocks.accessor(context.warp_index, bulk.started.step());
        let access = accessor.lane(bulk.lane);
        if !bulk.source_is_free {
            shared.finish_drain(bulk.source, bulk.source_bytes, bulk.started, &access);
            bulk.source_is_free = true;
        }
        if !read {
            for (target, data) in &bulk.pieces {
                global.finish_fill(*target, data, bulk.started, &access);
            }
        }
        read
    });
}

/// Checks that lanes may end: a copy in flight still needs the shared memory of the CTA, which ends with them. A TMA
/// store that has read its source completes on its own.
pub(crate) fn end(context: &mut Context<'_, '_, '_>) -> Result<(), Stop> {
    if context.scene.program.has_wgmma {
        wgmma::end(context)?;
    }
    let mask = context.mask;
    let ends = |lane: usize| mask >> lane & 1 == 1;
    let InFlightCopies { copies, bulk, .. } = &context.warp.copies;
    let copy = copies.iter().find(|copy| ends(copy.lane));
    let bulk = bulk.iter().find(|bulk| ends(bulk.lane) && !bulk.source_is_free);
    let unfinished = copy
        .map(|copy| (copy.started, copy.lane, copy.target, InFlight::CopyTarget))
        .or(bulk.map(|bulk| (bulk.started, bulk.lane, bulk.source, InFlight::BulkSource)));
    if let Some((started, lane, address, in_flight)) = unfinished {
        let started = Box::new(context.scene.location_of(started, address.into()));
        let kind = FaultKind::MissingWait { space: Space::Shared, touch: TooEarly::Exit, in_flight, started };
        return Err(Stop::address(kind, lane, address.into()));
    }
    end_bulk(context, false, |lane, _| ends(lane));
    Ok(())
}
