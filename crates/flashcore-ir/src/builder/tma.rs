//! TMA: bulk copies by the async proxy, of adjacent bytes and of boxes of tensors.

use super::Builder;
use crate::operand::{GlobalAddress, Reg, SharedAddress, TypedAddress, Value};
use crate::operation::Op;
use crate::types::{S32, U16, U32, U64};

/// Options of a TMA copy of a tensor box.
#[derive(Debug, Clone, Copy, Default)]
pub struct TensorCopyOptions {
    /// For loads: the CTAs of the cluster that receive the box (multicast), one bit for each rank. Each receives it at
    /// the same address of its own shared memory, and its own `mbarrier` at the same address counts the bytes.
    pub multicast: Option<Reg<U16>>,
    /// The L2 cache policy of the copied data.
    pub policy: Option<Reg<U64>>,
}

/// An L2 cache policy, as the 64 bits that hardware reads.
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
    /// The result of `createpolicy.fractional` for all of the data.
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

    /// Starts a bulk copy of `bytes` from global to shared memory, whose completion the `mbarrier` counts.
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

    /// Starts a TMA load of the box of a tensor that begins at the coordinates, the innermost first, to shared memory.
    /// The `mbarrier` counts its completion.
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

    /// Starts a TMA store from shared memory to the box of a tensor that begins at the coordinates, the innermost
    /// first. It belongs to the open bulk group.
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

    /// Prefetches a tensor map (TMA descriptor) into the cache.
    #[track_caller]
    pub fn prefetch_tensor_map(&mut self, map: Reg<U64>) {
        self.push(Op::PrefetchTensorMap { map: vec![map.id()] });
    }
}
