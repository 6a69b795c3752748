//! TMA: bulk loads and tensor loads and stores, agents of the async proxy.
//!
//! A load reads its source when it starts. From then on its target is claimed: touching it is a fault. At a moment that
//! the scheduler chooses, the bytes appear and the `mbarrier` counts them (`complete_tx`); they count as written by the
//! phase in which that happens, so that only those who have seen this phase complete may touch them. A multicast load
//! arrives at each CTA at its own time. A store is waited for in bulk groups.

use std::rc::Rc;

use flashcore_ir::{Address, Operand, RegisterId, Space};

use crate::clocks::Clocks;
use crate::error::{Stop, UnlocatedFault};
use crate::execute::async_copy::BULK_UNIT;
use crate::execute::memory::addresses;
use crate::execute::tma_box::{Piece, TensorBox};
use crate::execute::{Attempt, Context, Signals, aligned};
use crate::fault::{AccessKind, CopySize, FaultKind, MbarrierProblem};
use crate::memory::shared::SharedMemory;
use crate::memory::{Reason, Refusal};
use crate::race::Stamp;
use crate::state::registers::{LANES, lanes};

/// A TMA load in flight to one CTA.
#[derive(Debug)]
pub(crate) struct TmaLoad {
    pub(crate) started: Stamp,
    pub(crate) lane: usize,
    /// The CTA that receives.
    pub(crate) rank: usize,
    /// The target address.
    pub(crate) target: u32,
    data: Rc<[u8]>,
    barrier: u32,
}

/// The targets of a load of one lane.
struct Destination {
    lane: usize,
    /// The CTAs that receive, one bit for each.
    ranks: u32,
    target: u32,
    barrier: u32,
}

/// Checks and claims the targets of a load of `data`, and puts it in flight.
fn start(context: &mut Context<'_, '_, '_>, destination: &Destination, data: Vec<u8>) -> Result<(), Stop> {
    let Destination { lane, ranks, target, barrier } = *destination;
    let bytes = data.len() as u32;
    let data: Rc<[u8]> = data.into();
    let Context { scene, clocks, cluster, counters, tma_loads, warp_index, step, .. } = context;
    let accessor = clocks.accessor(*warp_index, *step);
    let access = accessor.lane(lane);
    aligned(Space::Shared, barrier.into(), crate::state::mbarrier::MBARRIER_BYTES, lane)?;
    for rank in lanes(ranks) {
        let Some(shared) = cluster.get_mut(rank) else {
            let kind = FaultKind::NoSuchCta { rank: rank as u32, ctas: scene.placement.ctas() as u32 };
            return Err(Stop::lane(kind, lane));
        };
        if shared.has_ended {
            let kind = FaultKind::EndedCta { cta: scene.placement.cta(rank) };
            return Err(Stop::address(kind, lane, target.into()));
        }
        let found = shared.mbarriers.get(barrier);
        let found = found.map_err(|problem| super::mbarrier::refused(problem, lane, barrier.into()))?;
        let initialised = found.initialised();
        if !access.is_after(initialised) {
            let attempt = Attempt { space: Space::Shared, kind: AccessKind::Atomic, bytes: 8, lane };
            let reason = Reason::Race { earlier: initialised, earlier_kind: AccessKind::Write };
            return Err(scene.refused(attempt, Refusal { address: barrier.into(), reason }));
        }
        if !clocks.is_initialisation_fenced(initialised, &access) {
            let problem = (MbarrierProblem::Unfenced, Some(found.state()));
            return Err(super::mbarrier::refused(problem, lane, barrier.into()));
        }
        found.used(&access);
        let attempt = Attempt { space: Space::Shared, kind: AccessKind::Write, bytes, lane };
        let claimed = shared.start_tma_load(target, bytes, &access, clocks);
        claimed.map_err(|refusal| scene.refused(attempt, refusal))?;
        tma_loads.push(TmaLoad { started: access.stamp, lane, rank, target, data: Rc::clone(&data), barrier });
        counters.bulk_load_bytes += u64::from(bytes);
    }
    Ok(())
}

/// Completes a load. A fault here is reported at the operation that started it.
pub(crate) fn finish(
    load: &TmaLoad,
    cluster: &mut [SharedMemory],
    clocks: &Clocks,
    signals: &mut Signals,
) -> Result<(), Stop> {
    let TmaLoad { started, lane, rank, target, ref data, barrier } = *load;
    let shared = &mut cluster[rank];
    let refuse = |problem| {
        let (problem, state) = problem;
        let kind = FaultKind::Mbarrier { problem, state };
        Stop::Fault(Box::new(UnlocatedFault { kind, lane: Some(lane as u32), address: Some(barrier.into()) }))
    };
    let found = shared.mbarriers.get(barrier).map_err(refuse)?;
    let written = found.completion(started);
    let completes = found.complete_tx(data.len() as u32, clocks).map_err(refuse)?;
    shared.finish_tma_load(target, data, started, written);
    if completes {
        signals.completed.push((rank, barrier));
    }
    Ok(())
}

/// Starts bulk loads.
pub(crate) fn bulk_load(
    context: &mut Context<'_, '_, '_>,
    bytes: Operand,
    target: Address,
    source: Address,
    barrier: Address,
) -> Result<(), Stop> {
    let registers = &context.warp.registers;
    let lengths = registers.word(bytes);
    let targets = addresses(registers, Space::Shared, target);
    let sources = addresses(registers, Space::Global, source);
    let barriers = addresses(registers, Space::Shared, barrier);
    for lane in lanes(context.mask) {
        let (bytes, target, source) = (lengths[lane], targets[lane], sources[lane]);
        if bytes == 0 || !bytes.is_multiple_of(BULK_UNIT) {
            let kind = FaultKind::InvalidCopySize { bytes, allowed: CopySize::MultipleOf(BULK_UNIT) };
            return Err(Stop::lane(kind, lane));
        }
        aligned(Space::Shared, target, BULK_UNIT, lane)?;
        aligned(Space::Global, source, BULK_UNIT, lane)?;
        let mut data = vec![0; bytes as usize];
        read(context, source, &mut data, lane)?;
        context.counters.global_loads.count_bulk(source, bytes);
        let ranks = 1 << context.rank;
        let destination = Destination { lane, ranks, target: target as u32, barrier: barriers[lane] as u32 };
        start(context, &destination, data)?;
    }
    Ok(())
}

/// Reads global memory for the async proxy.
fn read(context: &mut Context<'_, '_, '_>, source: u64, data: &mut [u8], lane: usize) -> Result<(), Stop> {
    let Context { scene, clocks, global, .. } = context;
    let accessor = clocks.accessor(context.warp_index, context.step);
    let attempt = Attempt { space: Space::Global, kind: AccessKind::Read, bytes: data.len() as u32, lane };
    let unwritten = global.must_be_constant(source, data.len() as u64).map_err(|refusal| match refusal.reason {
        Reason::Stale(written) => Refusal { reason: Reason::UnfencedGlobal(written), ..refusal },
        _ => refusal,
    });
    unwritten
        .and_then(|()| global.read(source, data, &accessor.lane(lane)))
        .map_err(|refusal| scene.refused(attempt, refusal))
}

/// The box of a tensor at the coordinates that a lane gives.
fn tensor_box(
    context: &Context<'_, '_, '_>,
    map: RegisterId,
    coordinates: &[RegisterId],
    lane: usize,
) -> Result<TensorBox, Stop> {
    let registers = &context.warp.registers;
    let address = registers.wide_of(map)[lane];
    let Some(map) = context.scene.arguments.tensor_map(address) else {
        return Err(Stop::address(FaultKind::NoTensorMap, lane, address));
    };
    if map.rank as usize != coordinates.len() {
        let kind = FaultKind::TensorRank { rank: map.rank, coordinates: coordinates.len() as u32 };
        return Err(Stop::lane(kind, lane));
    }
    let at = core::array::from_fn(|axis| {
        coordinates.get(axis).map_or(0, |register| registers.word_of(*register)[lane] as i32)
    });
    Ok(TensorBox { map, at })
}

/// The alignment of boxes in shared memory: the period of their swizzle, and at least 128.
fn box_alignment(tensor_box: &TensorBox) -> u32 {
    tensor_box.map.swizzle.period().max(128)
}

/// Starts TMA loads of tensor boxes.
pub(crate) fn tensor_load(
    context: &mut Context<'_, '_, '_>,
    map: RegisterId,
    coordinates: &[RegisterId],
    mask: Option<RegisterId>,
    target: Address,
    barrier: Address,
) -> Result<(), Stop> {
    let registers = &context.warp.registers;
    let targets = addresses(registers, Space::Shared, target);
    let barriers = addresses(registers, Space::Shared, barrier);
    let masks = mask.map_or([1 << context.rank; LANES], |register| *registers.word_of(register));
    for lane in lanes(context.mask) {
        let tensor_box = tensor_box(context, map, coordinates, lane)?;
        let target = targets[lane] as u32;
        aligned(Space::Shared, target.into(), box_alignment(&tensor_box), lane)?;
        let mut data = tensor_box.filled();
        let mut row = Vec::new();
        context.counters.global_loads.requests += 1;
        for piece in tensor_box.pieces() {
            row.resize(piece.bytes as usize, 0);
            read(context, piece.address, &mut row, lane)?;
            context.counters.global_loads.count_part(piece.address, piece.bytes);
            tensor_box.write_piece(target, piece, &row, &mut data);
        }
        let destination = Destination { lane, ranks: masks[lane], target, barrier: barriers[lane] as u32 };
        start(context, &destination, data)?;
    }
    Ok(())
}

/// Starts TMA stores of tensor boxes.
pub(crate) fn tensor_store(
    context: &mut Context<'_, '_, '_>,
    map: RegisterId,
    coordinates: &[RegisterId],
    source: Address,
) -> Result<(), Stop> {
    let sources = addresses(&context.warp.registers, Space::Shared, source);
    for lane in lanes(context.mask) {
        let tensor_box = tensor_box(context, map, coordinates, lane)?;
        if let Some(dimension) = tensor_box.at.iter().position(|&coordinate| coordinate < 0) {
            let (dimension, coordinate) = (dimension as u32, tensor_box.at[dimension]);
            return Err(Stop::lane(FaultKind::TensorStoreBefore { dimension, coordinate }, lane));
        }
        let source = sources[lane] as u32;
        aligned(Space::Shared, source.into(), box_alignment(&tensor_box), lane)?;
        context.counters.global_stores.requests += 1;
        let pieces: Vec<Piece> = tensor_box.pieces().collect();
        for piece in &pieces {
            context.counters.global_stores.count_part(piece.address, piece.bytes);
        }
        super::async_copy::start_store(context, lane, source, tensor_box.map.box_bytes(), |data| {
            pieces.iter().map(|piece| (piece.address, tensor_box.read_piece(source, *piece, data))).collect()
        })?;
    }
    Ok(())
}
