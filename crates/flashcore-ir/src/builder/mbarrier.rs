//! `mbarrier`s: barriers in shared memory by which threads wait for each other and for asynchronous copies.

use super::Builder;
use crate::operand::{ClusterAddress, FenceScope, Reg, SharedAddress, Space, TypedAddress, Value};
use crate::operation::Op;
use crate::types::{Pred, U32};

impl Builder {
    /// Reserves 8 bytes of shared memory for an `mbarrier` and returns their offset from [`Builder::shared_base`].
    pub fn reserve_mbarrier(&mut self) -> u32 {
        self.reserve_shared(8, 8)
    }

    /// Makes the 8 bytes at the address an `mbarrier` whose phases complete after `count` arrivals each. One thread
    /// does this; the others may use it after a barrier, and copies after [`Builder::fence_mbarrier_init`].
    #[track_caller]
    pub fn mbarrier_init(&mut self, target: impl Into<SharedAddress>, count: impl Into<Value<U32>>) {
        self.push(Op::MbarrierInit { count: count.into().operand(), target: target.into().address() });
    }

    /// Invalidates the `mbarrier` at the address.
    #[track_caller]
    pub fn mbarrier_invalidate(&mut self, target: impl Into<SharedAddress>) {
        self.push(Op::MbarrierInvalidate { target: target.into().address() });
    }

    /// Arrives `count` times at the `mbarrier`.
    #[track_caller]
    pub fn mbarrier_arrive(&mut self, target: impl Into<SharedAddress>, count: impl Into<Value<U32>>) {
        let (count, target) = (count.into().operand(), target.into().address());
        self.push(Op::MbarrierArrive { space: Space::Shared, count, target });
    }

    /// Arrives `count` times at an `mbarrier` of another CTA of the cluster.
    #[track_caller]
    pub fn mbarrier_arrive_remote(&mut self, target: ClusterAddress, count: impl Into<Value<U32>>) {
        let (count, target) = (count.into().operand(), target.address());
        self.push(Op::MbarrierArrive { space: Space::Cluster, count, target });
    }

    /// Adds `bytes` to those that the current phase expects of copies (`expect_tx`), then arrives once.
    #[track_caller]
    pub fn mbarrier_arrive_expect(&mut self, target: impl Into<SharedAddress>, bytes: impl Into<Value<U32>>) {
        let (bytes, target) = (bytes.into().operand(), target.into().address());
        self.push(Op::MbarrierArriveExpect { space: Space::Shared, bytes, target });
    }

    /// Adds `bytes` to those that the current phase of another CTA's `mbarrier` expects, then arrives there once.
    #[track_caller]
    pub fn mbarrier_arrive_expect_remote(&mut self, target: ClusterAddress, bytes: impl Into<Value<U32>>) {
        let (bytes, target) = (bytes.into().operand(), target.address());
        self.push(Op::MbarrierArriveExpect { space: Space::Cluster, bytes, target });
    }

    /// Adds `bytes` to those that the current phase expects of copies (`expect_tx`).
    #[track_caller]
    pub fn mbarrier_expect(&mut self, target: impl Into<SharedAddress>, bytes: impl Into<Value<U32>>) {
        let (bytes, target) = (bytes.into().operand(), target.into().address());
        self.push(Op::MbarrierExpect { space: Space::Shared, bytes, target });
    }

    /// Waits until the phase of this parity is complete: 0 for the first phase, then 1 and 0 alternately. Parity 1 on
    /// an `mbarrier` in its first phase does not wait.
    #[track_caller]
    pub fn mbarrier_wait(&mut self, source: impl Into<SharedAddress>, parity: impl Into<Value<U32>>) {
        let (parity, source) = (parity.into().operand(), source.into().address());
        self.push(Op::MbarrierWait { scope: self.mbarrier_scope(), parity, source });
    }

    /// Tests if the phase of this parity is complete.
    #[track_caller]
    pub fn mbarrier_test(&mut self, source: impl Into<SharedAddress>, parity: impl Into<Value<U32>>) -> Reg<Pred> {
        self.mbarrier_ask(source.into(), parity.into(), false)
    }

    /// Tests if the phase of this parity is complete, after waiting for some time.
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

    /// Cluster scope in a cluster: threads of other CTAs and multicast copies arrive there.
    const fn mbarrier_scope(&self) -> FenceScope {
        if self.has_clusters() { FenceScope::Cluster } else { FenceScope::Cta }
    }

    /// Makes the `mbarrier`s that this thread has initialised visible to the cluster and to asynchronous copies.
    #[track_caller]
    pub fn fence_mbarrier_init(&mut self) {
        self.push(Op::FenceMbarrierInit {});
    }
}
