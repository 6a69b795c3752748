//! DSMEM: addresses in the shared memory of the CTAs of a cluster.
//!
//! An address made by `mapa` has, above its 24 low bits, the rank of the CTA plus one; without it, the address is one
//! of the executing CTA.

use flashcore_ir::{Operand, RegisterId, Space};

use crate::error::Stop;
use crate::execute::{Context, Scene};
use crate::fault::FaultKind;
use crate::memory::Refusal;
use crate::memory::shared::SharedMemory;
use crate::state::registers::lanes;

const WINDOW_BITS: u32 = 24;
const WINDOW_MASK: u32 = (1 << WINDOW_BITS) - 1;

/// A location in the shared memory of a CTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedLocation {
    /// The CTA in the cluster.
    pub(crate) rank: usize,
    /// The address as that CTA knows it.
    pub(crate) address: u32,
}

impl SharedLocation {
    /// The refusal of an access to this location, at the address that the executing CTA has used.
    pub(crate) fn refused(self, address: u64, refusal: Refusal) -> Refusal {
        Refusal { address: refusal.address + (address - u64::from(self.address)), ..refusal }
    }
}

/// `d` is the address `a` in the CTA of a rank.
pub(crate) fn map(context: &mut Context<'_, '_, '_>, d: RegisterId, a: Operand, rank: Operand) -> Result<(), Stop> {
    let registers = &context.warp.registers;
    let (a, ranks) = (registers.word(a), registers.word(rank));
    let ctas = context.scene.placement.ctas() as u32;
    if let Some(lane) = lanes(context.mask).find(|&lane| ranks[lane] >= ctas) {
        return Err(Stop::lane(FaultKind::NoSuchCta { rank: ranks[lane], ctas }, lane));
    }
    let mapped = core::array::from_fn(|lane| a[lane] & WINDOW_MASK | ranks[lane].wrapping_add(1) << WINDOW_BITS);
    context.lanes().set_word(d, &mapped);
    Ok(())
}

/// The location that an address means to the executing CTA.
pub(crate) fn locate(
    scene: &Scene<'_, '_>,
    cluster: &[SharedMemory],
    executing: usize,
    space: Space,
    address: u64,
    lane: usize,
) -> Result<SharedLocation, Stop> {
    let here = SharedLocation { rank: executing, address: address as u32 };
    let window = address as u32 >> WINDOW_BITS;
    if space != Space::Cluster || window == 0 {
        return Ok(here);
    }
    let rank = window as usize - 1;
    let ctas = cluster.len();
    if rank >= ctas {
        let kind = FaultKind::NoSuchCta { rank: rank as u32, ctas: ctas as u32 };
        return Err(Stop::address(kind, lane, address));
    }
    if cluster[rank].has_ended {
        return Err(Stop::address(FaultKind::EndedCta { cta: scene.placement.cta(rank) }, lane, address));
    }
    Ok(SharedLocation { rank, address: address as u32 & WINDOW_MASK })
}
