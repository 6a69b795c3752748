//! Loads, stores, atomics and asynchronous copies.

use super::Builder;
use crate::operand::{
    CopyCache, GlobalAddress, L2Prefetch, LoadCache, ReduceOp, Reg, SharedAddress, StoreCache, TypedAddress, Value,
};
use crate::operation::Op;
use crate::types::{Storable, U32};

/// Cache operator and prefetch of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOptions {
    /// The cache operator.
    pub cache: LoadCache,
    /// The size of the L2 prefetch.
    pub prefetch: L2Prefetch,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { cache: LoadCache::All, prefetch: L2Prefetch::None }
    }
}

/// Bytes that a `cp.async` writes and reads.
#[derive(Debug, Clone, Copy)]
pub enum CopyBytes {
    /// 4, 8 or 16 bytes.
    All(u32),
    /// 4, 8 or 16 bytes written; the first `read` of them are copied, the rest is zero.
    ZeroFill {
        /// Bytes written.
        written: u32,
        /// Bytes read, at most `written`.
        read: Reg<U32>,
    },
}

impl Builder {
    /// The address at which the shared memory of the CTA begins.
    #[track_caller]
    pub fn shared_base(&mut self) -> Reg<U32> {
        let d = self.register::<U32>();
        self.push(Op::SharedBase { d: d.id() });
        d
    }

    /// Loads `count` adjacent elements.
    #[track_caller]
    pub fn load_with<T: Storable, P: TypedAddress>(
        &mut self,
        source: impl Into<P>,
        count: u32,
        options: LoadOptions,
    ) -> Vec<Reg<T>> {
        let source = source.into().address();
        let d = self.registers::<T>(count);
        self.push(Op::Load {
            space: P::SPACE,
            cache: options.cache,
            prefetch: options.prefetch,
            ty: T::TYPE,
            count,
            d: d.iter().map(|register| register.id()).collect(),
            source,
        });
        d
    }

    /// Loads `count` adjacent elements of global memory.
    #[track_caller]
    pub fn load<T: Storable>(&mut self, source: impl Into<GlobalAddress>, count: u32) -> Vec<Reg<T>> {
        self.load_with(source, count, LoadOptions::default())
    }

    /// Loads one element of global memory.
    #[track_caller]
    pub fn load_one<T: Storable>(&mut self, source: impl Into<GlobalAddress>) -> Reg<T> {
        self.load(source, 1)[0]
    }

    /// Loads `count` adjacent elements of shared memory.
    #[track_caller]
    pub fn load_shared<T: Storable>(&mut self, source: impl Into<SharedAddress>, count: u32) -> Vec<Reg<T>> {
        self.load_with(source, count, LoadOptions::default())
    }

    /// Loads one element of global memory into a register that has a value already, which lanes that a guard excludes keep.
    #[track_caller]
    pub fn load_into<T: Storable>(&mut self, target: Reg<T>, source: impl Into<GlobalAddress>) {
        let options = LoadOptions::default();
        self.push(Op::Load {
            space: GlobalAddress::SPACE,
            cache: options.cache,
            prefetch: options.prefetch,
            ty: T::TYPE,
            count: 1,
            d: vec![target.id()],
            source: source.into().address(),
        });
    }

    /// Loads adjacent elements of global memory into registers that have values already, which lanes that a guard excludes
    /// keep.
    #[track_caller]
    pub fn load_vector_into<T: Storable>(&mut self, targets: &[Reg<T>], source: impl Into<GlobalAddress>) {
        let options = LoadOptions::default();
        self.push(Op::Load {
            space: GlobalAddress::SPACE,
            cache: options.cache,
            prefetch: options.prefetch,
            ty: T::TYPE,
            count: targets.len() as u32,
            d: targets.iter().map(|target| target.id()).collect(),
            source: source.into().address(),
        });
    }

    /// Stores adjacent elements.
    #[track_caller]
    pub fn store_with<T: Storable, P: TypedAddress>(
        &mut self,
        target: impl Into<P>,
        values: &[Reg<T>],
        cache: StoreCache,
    ) {
        self.push(Op::Store {
            space: P::SPACE,
            cache,
            ty: T::TYPE,
            count: values.len() as u32,
            a: values.iter().map(|register| register.id()).collect(),
            target: target.into().address(),
        });
    }

    /// Stores adjacent elements to global memory.
    #[track_caller]
    pub fn store<T: Storable>(&mut self, target: impl Into<GlobalAddress>, values: &[Reg<T>]) {
        self.store_with::<T, GlobalAddress>(target, values, StoreCache::WriteBack);
    }

    /// Stores one element to global memory.
    #[track_caller]
    pub fn store_one<T: Storable>(&mut self, target: impl Into<GlobalAddress>, value: Reg<T>) {
        self.store(target, &[value]);
    }

    /// Stores adjacent elements to shared memory.
    #[track_caller]
    pub fn store_shared<T: Storable>(&mut self, target: impl Into<SharedAddress>, values: &[Reg<T>]) {
        self.store_with::<T, SharedAddress>(target, values, StoreCache::WriteBack);
    }

    /// Prefetches the cache line at the address into L2.
    #[track_caller]
    pub fn prefetch(&mut self, source: impl Into<GlobalAddress>) {
        self.push(Op::Prefetch { source: source.into().address() });
    }

    /// The old value at the address, which becomes `op(old, value)`.
    #[track_caller]
    pub fn atomic<T: Storable, P: TypedAddress>(
        &mut self,
        op: ReduceOp,
        target: impl Into<P>,
        value: Reg<T>,
    ) -> Reg<T> {
        let d = self.register::<T>();
        let target = target.into().address();
        self.push(Op::Atomic { space: P::SPACE, op, ty: T::TYPE, d: d.id(), a: vec![value.id()], target });
        d
    }

    /// The old value at the address, which becomes `value` if it was `compare`.
    #[track_caller]
    pub fn compare_and_swap<T: Storable, P: TypedAddress>(
        &mut self,
        target: impl Into<P>,
        compare: Reg<T>,
        value: Reg<T>,
    ) -> Reg<T> {
        let d = self.register::<T>();
        let target = target.into().address();
        self.push(Op::CompareAndSwap {
            space: P::SPACE,
            ty: T::TYPE,
            d: d.id(),
            compare: vec![compare.id()],
            value: vec![value.id()],
            target,
        });
        d
    }

    /// The value at the address becomes `op(old, value)`.
    #[track_caller]
    pub fn reduce<T: Storable, P: TypedAddress>(&mut self, op: ReduceOp, target: impl Into<P>, value: Reg<T>) {
        let target = target.into().address();
        self.push(Op::Reduce { space: P::SPACE, op, ty: T::TYPE, a: vec![value.id()], target });
    }

    /// Starts a copy from global to shared memory; 16-byte copies go through L2 only.
    #[track_caller]
    pub fn copy_async(
        &mut self,
        target: impl Into<SharedAddress>,
        source: impl Into<GlobalAddress>,
        bytes: CopyBytes,
        prefetch: L2Prefetch,
    ) {
        let (bytes, source_bytes) = match bytes {
            CopyBytes::All(bytes) => (bytes, Vec::new()),
            CopyBytes::ZeroFill { written, read } => (written, vec![read.id()]),
        };
        self.push(Op::CopyAsync {
            bytes,
            cache: if bytes == 16 { CopyCache::L2 } else { CopyCache::All },
            prefetch,
            zero_fill: !source_bytes.is_empty(),
            source_bytes,
            target: target.into().address(),
            source: source.into().address(),
        });
    }

    /// Closes the group of the copies started since the last commit.
    #[track_caller]
    pub fn copy_async_commit(&mut self) {
        self.push(Op::CopyAsyncCommit {});
    }

    /// Waits until at most `pending` groups are unfinished.
    #[track_caller]
    pub fn copy_async_wait(&mut self, pending: u32) {
        self.push(Op::CopyAsyncWait { pending });
    }

    /// Waits for all copies, committed or not.
    #[track_caller]
    pub fn copy_async_wait_all(&mut self) {
        self.push(Op::CopyAsyncWaitAll {});
    }

    /// Starts a bulk copy (TMA) from shared to global memory by the async proxy.
    #[track_caller]
    pub fn bulk_store(
        &mut self,
        target: impl Into<GlobalAddress>,
        source: impl Into<SharedAddress>,
        bytes: impl Into<Value<U32>>,
    ) {
        let (target, source) = (target.into().address(), source.into().address());
        self.push(Op::BulkStore { bytes: bytes.into().operand(), target, source });
    }

    /// Closes the group of the bulk copies started since the last commit.
    #[track_caller]
    pub fn bulk_commit(&mut self) {
        self.push(Op::BulkCommit {});
    }

    /// Waits until at most `pending` bulk groups are unfinished; with `read`, until they have read their source.
    #[track_caller]
    pub fn bulk_wait(&mut self, pending: u32, read: bool) {
        self.push(Op::BulkWait { pending, read });
    }

    /// Makes this thread's accesses to shared memory visible to the async proxy.
    #[track_caller]
    pub fn fence_proxy_async(&mut self) {
        self.push(Op::FenceProxyAsync {});
    }
}
