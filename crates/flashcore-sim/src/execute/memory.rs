//! Loads, stores, atomics and `ldmatrix`.

use flashcore_ir::{Address, LoadCache, ReduceOp, RegisterId, Space, Type};

use crate::error::Stop;
use crate::execute::cluster::locate;
use crate::execute::{Attempt, Context, aligned};
use crate::fault::AccessKind;
use crate::numeric::{canonical, flush};
use crate::state::registers::{LANES, Registers, lanes};

/// The most bytes that a lane loads or stores at once.
const MOST_BYTES: usize = 32;

/// The address of each lane.
pub(crate) fn addresses(registers: &Registers<'_>, space: Space, address: Address) -> [u64; LANES] {
    match space {
        Space::Shared | Space::Cluster => {
            registers.word_of(address.base).map(|base| base.wrapping_add_signed(address.offset).into())
        }
        Space::Global => registers.wide_of(address.base).map(|base| base.wrapping_add_signed(address.offset.into())),
    }
}

/// Loads adjacent elements.
pub(crate) fn load(
    context: &mut Context<'_, '_, '_>,
    space: Space,
    cache: LoadCache,
    ty: Type,
    d: &[RegisterId],
    source: Address,
) -> Result<(), Stop> {
    let element = ty.bytes() as usize;
    let bytes = element * d.len();
    let addresses = addresses(&context.warp.registers, space, source);
    let Context { scene, warp, clocks, cluster, rank, global, counters, mask, .. } = context;
    let accessor = clocks.accessor(context.warp_index, context.step);
    let mut data = [0; MOST_BYTES];
    for lane in lanes(*mask) {
        let address = addresses[lane];
        aligned(space, address, bytes as u32, lane)?;
        let access = accessor.lane(lane);
        let attempt = Attempt { space, kind: AccessKind::Read, bytes: bytes as u32, lane };
        let read = match space {
            Space::Shared | Space::Cluster => {
                let location = locate(scene, cluster, *rank, space, address, lane)?;
                let read = cluster[location.rank].read(location.address, bytes as u32, &access);
                read.map(|read| data[..bytes].copy_from_slice(read))
                    .map_err(|refusal| location.refused(address, refusal))
            }
            Space::Global if cache == LoadCache::ReadOnly => global
                .must_be_constant(address, bytes as u64)
                .and_then(|()| global.read(address, &mut data[..bytes], &access)),
            Space::Global => global.read(address, &mut data[..bytes], &access),
        };
        read.map_err(|refusal| scene.refused(attempt, refusal))?;
        for (&register, element) in d.iter().zip(data.chunks(element)) {
            warp.registers.set_lane(register, ty, lane, number(element));
        }
    }
    match space {
        Space::Shared => counters.shared_loads.count(&addresses, *mask, bytes as u32),
        Space::Cluster => counters.cluster_bytes += bytes as u64 * u64::from(mask.count_ones()),
        Space::Global => counters.global_loads.count(lanes(*mask).map(|lane| (addresses[lane], bytes as u32))),
    }
    Ok(())
}

/// Stores adjacent elements.
pub(crate) fn store(
    context: &mut Context<'_, '_, '_>,
    space: Space,
    ty: Type,
    a: &[RegisterId],
    target: Address,
) -> Result<(), Stop> {
    let element = ty.bytes() as usize;
    let bytes = element * a.len();
    let addresses = addresses(&context.warp.registers, space, target);
    let Context { scene, warp, clocks, cluster, rank, global, counters, mask, .. } = context;
    let accessor = clocks.accessor(context.warp_index, context.step);
    let mut data = [0; MOST_BYTES];
    for lane in lanes(*mask) {
        let address = addresses[lane];
        aligned(space, address, bytes as u32, lane)?;
        for (&register, bytes) in a.iter().zip(data.chunks_mut(element)) {
            bytes.copy_from_slice(&warp.registers.lane(register, ty, lane).to_le_bytes()[..element]);
        }
        let access = accessor.lane(lane);
        let attempt = Attempt { space, kind: AccessKind::Write, bytes: bytes as u32, lane };
        let written = match space {
            Space::Shared | Space::Cluster => {
                let location = locate(scene, cluster, *rank, space, address, lane)?;
                let written = cluster[location.rank].write(location.address, &data[..bytes], &access);
                written.map_err(|refusal| location.refused(address, refusal))
            }
            Space::Global => global.write(address, &data[..bytes], &access),
        };
        written.map_err(|refusal| scene.refused(attempt, refusal))?;
    }
    match space {
        Space::Shared => counters.shared_stores.count(&addresses, *mask, bytes as u32),
        Space::Cluster => counters.cluster_bytes += bytes as u64 * u64::from(mask.count_ones()),
        Space::Global => counters.global_stores.count(lanes(*mask).map(|lane| (addresses[lane], bytes as u32))),
    }
    Ok(())
}

/// At most eight bytes as a number.
fn number(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(all)
}

/// The combining function of an atomic, of the old value and its operand.
///
/// The manual of `atom` and `red`: adding `f32` "on global memory flushes subnormal inputs and results to
/// sign-preserving zero"; on shared memory it "supports subnormal inputs and results".
fn combine(space: Space, op: ReduceOp, ty: Type) -> Result<fn(u64, u64) -> u64, Stop> {
    Ok(match (op, ty) {
        (ReduceOp::Add, Type::U32 | Type::S32 | Type::U64) => u64::wrapping_add,
        (ReduceOp::Add, Type::F32) if space == Space::Global => |old, a| {
            let [old, a] = [old, a].map(|bits| flush(f32::from_bits(bits as u32)));
            canonical(flush(old + a)).into()
        },
        (ReduceOp::Add, Type::F32) => |old, a| canonical(f32::from_bits(old as u32) + f32::from_bits(a as u32)).into(),
        (ReduceOp::Min, Type::U32 | Type::U64) => u64::min,
        (ReduceOp::Max, Type::U32 | Type::U64) => u64::max,
        (ReduceOp::Min, Type::S32) => |old, a| (old as i32).min(a as i32) as u64,
        (ReduceOp::Max, Type::S32) => |old, a| (old as i32).max(a as i32) as u64,
        (ReduceOp::And, Type::U32 | Type::S32 | Type::U64) => |old, a| old & a,
        (ReduceOp::Or, Type::U32 | Type::S32 | Type::U64) => |old, a| old | a,
        (ReduceOp::Xor, Type::U32 | Type::S32 | Type::U64) => |old, a| old ^ a,
        (ReduceOp::Exchange, Type::U32 | Type::S32 | Type::U64 | Type::F32) => |_, a| a,
        _ => return Err(Stop::no_such_form("Atomic", format_args!("{op} of {ty}"))),
    })
}

/// The value at the address becomes `op(old, a)`; `d` receives the old one.
pub(crate) fn atomic(
    context: &mut Context<'_, '_, '_>,
    space: Space,
    op: ReduceOp,
    ty: Type,
    d: Option<RegisterId>,
    a: RegisterId,
    target: Address,
) -> Result<(), Stop> {
    let combine = combine(space, op, ty)?;
    update(context, space, ty, d, target, |registers, lane, old| combine(old, registers.lane(a, ty, lane)))
}

/// The value at the address becomes `value` if it was `compare`; `d` receives the old one.
pub(crate) fn compare_and_swap(
    context: &mut Context<'_, '_, '_>,
    space: Space,
    ty: Type,
    d: RegisterId,
    [compare, value]: [RegisterId; 2],
    target: Address,
) -> Result<(), Stop> {
    update(context, space, ty, Some(d), target, |registers, lane, old| {
        if old == registers.lane(compare, ty, lane) { registers.lane(value, ty, lane) } else { old }
    })
}

fn update(
    context: &mut Context<'_, '_, '_>,
    space: Space,
    ty: Type,
    d: Option<RegisterId>,
    target: Address,
    new: impl Fn(&Registers<'_>, usize, u64) -> u64,
) -> Result<(), Stop> {
    let bytes = ty.bytes() as usize;
    let addresses = addresses(&context.warp.registers, space, target);
    let Context { scene, warp, clocks, cluster, rank, global, counters, mask, .. } = context;
    let accessor = clocks.accessor(context.warp_index, context.step);
    for lane in lanes(*mask) {
        let address = addresses[lane];
        aligned(space, address, bytes as u32, lane)?;
        let access = accessor.lane(lane);
        let attempt = Attempt { space, kind: AccessKind::Atomic, bytes: bytes as u32, lane };
        let mut old = 0;
        let apply = |data: &mut [u8]| {
            old = number(data);
            data.copy_from_slice(&new(&warp.registers, lane, old).to_le_bytes()[..bytes]);
        };
        let updated = match space {
            Space::Shared => cluster[*rank].atomic(address as u32, bytes as u32, &access).map(apply),
            Space::Cluster => return Err(Stop::no_such_form("Atomic", space)),
            Space::Global => global.atomic(address, &mut [0; 8][..bytes], &access, apply),
        };
        updated.map_err(|refusal| scene.refused(attempt, refusal))?;
        if let Some(d) = d {
            warp.registers.set_lane(d, ty, lane, old);
        }
    }
    counters.atomics += u64::from(mask.count_ones());
    Ok(())
}

/// Bytes of a row of a matrix.
const ROW_BYTES: u32 = 16;
const ROWS: usize = 8;

/// Stores 8 × 8 matrices whose rows the lanes point at. The warp writes as one agent: a row has elements of several
/// lanes.
pub(crate) fn store_matrix(
    context: &mut Context<'_, '_, '_>,
    transposed: bool,
    a: &[RegisterId],
    target: Address,
) -> Result<(), Stop> {
    let addresses = addresses(&context.warp.registers, Space::Shared, target);
    let Context { scene, warp, clocks, cluster, rank, counters, .. } = context;
    let accessor = clocks.accessor(context.warp_index, context.step);
    let access = accessor.all_lanes();
    for (matrix, register) in a.iter().enumerate() {
        let words = warp.registers.word_of(*register);
        for row in 0..ROWS {
            let mut bytes = [0; ROW_BYTES as usize];
            for (column, element) in bytes.chunks_exact_mut(2).enumerate() {
                let (row, column) = if transposed { (column, row) } else { (row, column) };
                let pair = crate::numeric::split(words[4 * row + column / 2]);
                element.copy_from_slice(&pair[column % 2].to_le_bytes());
            }
            let lane = ROWS * matrix + row;
            let address = addresses[lane];
            aligned(Space::Shared, address, ROW_BYTES, lane)?;
            let attempt = Attempt { space: Space::Shared, kind: AccessKind::Write, bytes: ROW_BYTES, lane };
            let written = cluster[*rank].write(address as u32, &bytes, &access);
            written.map_err(|refusal| scene.refused(attempt, refusal))?;
        }
        let rows = addresses[ROWS * matrix..][..ROWS].iter().copied();
        counters.store_matrix.count_request(rows, ROW_BYTES);
    }
    Ok(())
}

/// Loads 8 × 8 matrices whose rows the lanes point at. The warp reads as one agent: the lane that gives the address of
/// a row is not the one that receives it.
pub(crate) fn load_matrix(
    context: &mut Context<'_, '_, '_>,
    transposed: bool,
    d: &[RegisterId],
    source: Address,
) -> Result<(), Stop> {
    let addresses = addresses(&context.warp.registers, Space::Shared, source);
    let Context { scene, warp, clocks, cluster, rank, counters, mask, .. } = context;
    let shared = &mut cluster[*rank];
    let accessor = clocks.accessor(context.warp_index, context.step);
    let access = accessor.all_lanes();
    // All rows are read before a register is written: the base may be among the targets.
    let mut matrices = [[[0u16; 8]; ROWS]; 4];
    for (matrix, rows) in matrices.iter_mut().enumerate().take(d.len()) {
        for (row, elements) in rows.iter_mut().enumerate() {
            let lane = ROWS * matrix + row;
            let address = addresses[lane];
            aligned(Space::Shared, address, ROW_BYTES, lane)?;
            let attempt = Attempt { space: Space::Shared, kind: AccessKind::Read, bytes: ROW_BYTES, lane };
            let read = shared.read(address as u32, ROW_BYTES, &access);
            let read = read.map_err(|refusal| scene.refused(attempt, refusal))?;
            for (element, bytes) in elements.iter_mut().zip(read.chunks_exact(2)) {
                *element = u16::from_le_bytes([bytes[0], bytes[1]]);
            }
        }
        let rows = addresses[ROWS * matrix..][..ROWS].iter().copied();
        counters.load_matrix.count_request(rows, ROW_BYTES);
    }
    for (register, matrix) in d.iter().zip(&matrices) {
        let words = core::array::from_fn(|lane| {
            let (group, pair) = (lane / 4, 2 * (lane % 4));
            let elements = if transposed {
                [matrix[pair][group], matrix[pair + 1][group]]
            } else {
                [matrix[group][pair], matrix[group][pair + 1]]
            };
            crate::numeric::join(elements)
        });
        warp.registers.set_word(*register, *mask, &words);
    }
    Ok(())
}
