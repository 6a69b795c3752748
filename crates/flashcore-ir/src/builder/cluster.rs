//! Clusters: CTAs that run together and reach each other's shared memory (DSMEM).

use super::Builder;
use crate::operand::{ClusterAddress, Reg, SharedAddress, SpecialRegister, StoreCache, Value};
use crate::operation::Op;
use crate::types::{Storable, U32};

impl Builder {
    /// Declares the CTAs of a cluster in x, y and z. To be called before the kernel is written.
    pub const fn set_cluster(&mut self, cluster: [u32; 3]) {
        self.kernel.cluster = cluster;
    }

    /// True if a cluster has more than one CTA.
    pub const fn has_clusters(&self) -> bool {
        let [x, y, z] = self.kernel.cluster;
        x != 1 || y != 1 || z != 1
    }

    /// The rank of this CTA in its cluster.
    #[track_caller]
    pub fn cluster_rank(&mut self) -> Reg<U32> {
        self.special(SpecialRegister::ClusterRank)
    }

    /// The address in the CTA of the cluster that has the rank.
    #[track_caller]
    pub fn map_shared(&mut self, address: impl Into<SharedAddress>, rank: impl Into<Value<U32>>) -> ClusterAddress {
        let SharedAddress { base, offset } = address.into();
        let rank = rank.into().operand();
        let d = self.register::<U32>();
        self.push(Op::MapShared { d: d.id(), a: Value::from(base).operand(), rank });
        ClusterAddress { base: d, offset }
    }

    /// `count` adjacent elements of the shared memory of a CTA of the cluster.
    #[track_caller]
    pub fn load_cluster<T: Storable>(&mut self, source: ClusterAddress, count: u32) -> Vec<Reg<T>> {
        self.load_with::<T, ClusterAddress>(source, count, super::LoadOptions::default())
    }

    /// Stores adjacent elements to the shared memory of a CTA of the cluster.
    #[track_caller]
    pub fn store_cluster<T: Storable>(&mut self, target: ClusterAddress, values: &[Reg<T>]) {
        self.store_with::<T, ClusterAddress>(target, values, StoreCache::WriteBack);
    }

    /// Arrives at the cluster barrier without waiting.
    #[track_caller]
    pub fn cluster_arrive(&mut self) {
        self.push(Op::ClusterArrive {});
    }

    /// Waits until all threads of the cluster have arrived at the cluster barrier.
    #[track_caller]
    pub fn cluster_wait(&mut self) {
        self.push(Op::ClusterWait {});
    }

    /// Arrives at the cluster barrier and waits for all threads of the cluster.
    #[track_caller]
    pub fn cluster_sync(&mut self) {
        self.cluster_arrive();
        self.cluster_wait();
    }
}
