//! Bulk copies by the asynchronous proxy: of adjacent bytes, and of boxes of tensors.

use super::Builder;
use crate::operand::{GlobalAddress, Place, Reg, SharedAddress, Value};
use crate::operation::Op;
use crate::types::{S32, U16, U32, U64};

/// How a tensor copy goes, beyond where from and where to.
#[derive(Debug, Clone, Copy, Default)]
pub struct TensorCopyOptions {
    /// For loads: the CTAs of the cluster that receive the box, one bit for each rank. Each at the same address of its own
    /// shared memory, and its own `mbarrier` at the same address hears of it.
    pub multicast: Option<Reg<U16>>,
    /// How long L2 should keep what is copied.
    pub policy: Option<Reg<U64>>,
}

/// How long L2 should keep what is copied, as the 64 bits that hardware reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CachePolicy {
    /// As long as other data.
    EvictNormal,
    /// Shorter.
    EvictFirst,
    /// Longer.
    EvictLast,
}

impl CachePolicy {
    /// What `createpolicy.fractional` makes of it for all of the data.
    pub const fn bits(self) -> u64 {
        match self {
            Self::EvictNormal => 0x1000_0000_0000_0000,
            Self::EvictFirst => 0x12f0_0000_0000_0000,
            Self::EvictLast => 0x14f0_0000_0000_0000,
        }
    }
}

impl Builder {
    /// The ranks of CTAs as the mask that [`TensorCopyOptions::multicast`] takes.
    #[track_caller]
    pub fn multicast_mask(&mut self, ranks: u16) -> Reg<U16> {
        self.copy(Value::from_bits(u64::from(ranks)))
    }

    /// A cache policy in a register.
    #[track_caller]
    pub fn cache_policy(&mut self, policy: CachePolicy) -> Reg<U64> {
        self.copy(policy.bits())
    }

    /// Starts a copy of `bytes` from global to shared memory, of which the `mbarrier` hears when it is done.
    #[track_caller]
    pub fn bulk_load(
        &mut self,
        target: impl Into<SharedAddress>,
        source: impl Into<GlobalAddress>,
        bytes: impl Into<Value<U32>>,
        barrier: impl Into<SharedAddress>,
    ) {
        self.push(Op::BulkLoad {
            bytes: bytes.into().operand(),
            target: target.into().address(),
            source: source.into().address(),
            barrier: barrier.into().address(),
        });
    }

    /// Starts a copy of the box of a tensor that begins at the coordinates, the innermost first, to shared memory. The
    /// `mbarrier` hears when it is done.
    #[track_caller]
    pub fn tensor_load(
        &mut self,
        target: impl Into<SharedAddress>,
        map: Reg<U64>,
        coordinates: &[Reg<S32>],
        barrier: impl Into<SharedAddress>,
        options: TensorCopyOptions,
    ) {
        let (target, barrier) = (target.into().address(), barrier.into().address());
        self.push(Op::TensorLoad {
            rank: coordinates.len() as u32,
            multicast: options.multicast.is_some(),
            hinted: options.policy.is_some(),
            coordinates: coordinates.iter().map(|register| register.id()).collect(),
            mask: options.multicast.iter().map(|register| register.id()).collect(),
            policy: options.policy.iter().map(|register| register.id()).collect(),
            map: vec![map.id()],
            target,
            barrier,
        });
    }

    /// Starts a copy from shared memory to the box of a tensor that begins at the coordinates, the innermost first. It
    /// belongs to the bulk group that is open.
    #[track_caller]
    pub fn tensor_store(
        &mut self,
        map: Reg<U64>,
        coordinates: &[Reg<S32>],
        source: impl Into<SharedAddress>,
        policy: Option<Reg<U64>>,
    ) {
        self.push(Op::TensorStore {
            rank: coordinates.len() as u32,
            hinted: policy.is_some(),
            coordinates: coordinates.iter().map(|register| register.id()).collect(),
            policy: policy.iter().map(|register| register.id()).collect(),
            map: vec![map.id()],
            source: source.into().address(),
        });
    }

    /// Brings a tensor map into the cache.
    #[track_caller]
    pub fn prefetch_tensor_map(&mut self, map: Reg<U64>) {
        self.push(Op::PrefetchTensorMap { map: vec![map.id()] });
    }
}
