//! Barriers in shared memory, by which threads wait for each other and for asynchronous copies.

use super::Builder;
use crate::operand::{ClusterAddress, FenceScope, Place, Reg, SharedAddress, Space, Value};
use crate::operation::Op;
use crate::types::{Pred, U32};

impl Builder {
    /// Reserves 8 bytes of shared memory for an `mbarrier` and returns their offset from [`Builder::shared_base`].
    pub fn reserve_mbarrier(&mut self) -> u32 {
        self.reserve_shared(8, 8)
    }

    /// Makes the 8 bytes at the address a barrier whose phases complete after `count` arrivals each. One thread does this;
    /// the others use it behind a barrier, and copies behind [`Builder::fence_mbarrier_init`].
    #[track_caller]
    pub fn mbarrier_init(&mut self, target: impl Into<SharedAddress>, count: impl Into<Value<U32>>) {
        self.push(Op::MbarrierInit { count: count.into().operand(), target: target.into().address() });
    }

    /// Ends the barrier at the address.
    #[track_caller]
    pub fn mbarrier_invalidate(&mut self, target: impl Into<SharedAddress>) {
        self.push(Op::MbarrierInvalidate { target: target.into().address() });
    }

    /// Arrives `count` times at the barrier.
    #[track_caller]
    pub fn mbarrier_arrive(&mut self, target: impl Into<SharedAddress>, count: impl Into<Value<U32>>) {
        let (count, target) = (count.into().operand(), target.into().address());
        self.push(Op::MbarrierArrive { space: Space::Shared, count, target });
    }

    /// Arrives `count` times at a barrier of another CTA of the cluster.
    #[track_caller]
    pub fn mbarrier_arrive_remote(&mut self, target: ClusterAddress, count: impl Into<Value<U32>>) {
        let (count, target) = (count.into().operand(), target.address());
        self.push(Op::MbarrierArrive { space: Space::Cluster, count, target });
    }

    /// Announces `bytes` that copies will bring in the present phase, then arrives once.
    #[track_caller]
    pub fn mbarrier_arrive_expect(&mut self, target: impl Into<SharedAddress>, bytes: impl Into<Value<U32>>) {
        let (bytes, target) = (bytes.into().operand(), target.into().address());
        self.push(Op::MbarrierArriveExpect { space: Space::Shared, bytes, target });
    }

    /// Announces `bytes` that copies will bring in the present phase of a barrier of another CTA, then arrives there once.
    #[track_caller]
    pub fn mbarrier_arrive_expect_remote(&mut self, target: ClusterAddress, bytes: impl Into<Value<U32>>) {
        let (bytes, target) = (bytes.into().operand(), target.address());
        self.push(Op::MbarrierArriveExpect { space: Space::Cluster, bytes, target });
    }

    /// Announces `bytes` that copies will bring in the present phase.
    #[track_caller]
    pub fn mbarrier_expect(&mut self, target: impl Into<SharedAddress>, bytes: impl Into<Value<U32>>) {
        let (bytes, target) = (bytes.into().operand(), target.into().address());
        self.push(Op::MbarrierExpect { space: Space::Shared, bytes, target });
    }

    /// Waits until the phase of this parity is complete: 0 for the first phase, then 1 and 0 in turn. Parity 1 on a
    /// barrier in its first phase waits for nothing.
    #[track_caller]
    pub fn mbarrier_wait(&mut self, source: impl Into<SharedAddress>, parity: impl Into<Value<U32>>) {
        let (parity, source) = (parity.into().operand(), source.into().address());
        self.push(Op::MbarrierWait { scope: self.mbarrier_scope(), parity, source });
    }

    /// Whether the phase of this parity is complete.
    #[track_caller]
    pub fn mbarrier_test(&mut self, source: impl Into<SharedAddress>, parity: impl Into<Value<U32>>) -> Reg<Pred> {
        self.mbarrier_ask(source.into(), parity.into(), false)
    }

    /// Whether the phase of this parity is complete, after waiting for some time.
    #[track_caller]
    pub fn mbarrier_try_wait(&mut self, source: impl Into<SharedAddress>, parity: impl Into<Value<U32>>) -> Reg<Pred> {
        self.mbarrier_ask(source.into(), parity.into(), true)
    }

    #[track_caller]
    fn mbarrier_ask(&mut self, source: SharedAddress, parity: Value<U32>, suspends: bool) -> Reg<Pred> {
        let d = self.register::<Pred>();
        let (parity, source) = (parity.operand(), source.address());
        self.push(Op::MbarrierTest { suspends, scope: self.mbarrier_scope(), d: d.id(), parity, source });
        d
    }

    /// In a cluster, threads of other CTAs and copies for several of them arrive.
    const fn mbarrier_scope(&self) -> FenceScope {
        if self.has_clusters() { FenceScope::Cluster } else { FenceScope::Cta }
    }

    /// Makes the barriers that this thread has initialised visible to the cluster and to asynchronous copies.
    #[track_caller]
    pub fn fence_mbarrier_init(&mut self) {
        self.push(Op::FenceMbarrierInit {});
    }
}
