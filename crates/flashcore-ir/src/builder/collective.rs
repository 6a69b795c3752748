//! Collective operations of a warp or a CTA: shuffles, votes, `ldmatrix`, `mma`, named barriers.

use super::Builder;
use crate::operand::{
    FenceScope, Fp8, MmaShape, ReduceOp, Reg, RegisterChange, SharedAddress, ShuffleMode, Value, VoteMode,
};
use crate::operation::Op;
use crate::types::{Accumulator, F32, Integer32, MatrixOperand, Pred, U32, Word};

/// Lanes of a warp.
const LANES: u32 = 32;
/// Operand c of a shuffle over the whole warp: no segments, clamp at lane 31.
const WHOLE_WARP: u32 = 0x1f;
/// Operand c of a shuffle towards lower lanes, which clamps at lane 0.
const WHOLE_WARP_UP: u32 = 0;

impl Builder {
    /// `a` of another lane of the warp.
    #[track_caller]
    pub fn shuffle<T: Word>(&mut self, mode: ShuffleMode, a: Reg<T>, index: impl Into<Value<U32>>) -> Reg<T> {
        let control = match mode {
            ShuffleMode::Up => WHOLE_WARP_UP,
            ShuffleMode::Index | ShuffleMode::Down | ShuffleMode::Butterfly => WHOLE_WARP,
        };
        let index = index.into().operand();
        let d = self.register::<T>();
        self.push(Op::Shuffle { mode, control, ty: T::TYPE, d: d.id(), index, a: vec![a.id()] });
        d
    }

    /// The vote of all lanes on a predicate.
    #[track_caller]
    pub fn vote(&mut self, mode: VoteMode, a: Reg<Pred>) -> Reg<Pred> {
        let d = self.register::<Pred>();
        self.push(Op::Vote { mode, d: d.id(), a: vec![a.id()] });
        d
    }

    /// The predicates of all lanes as bits.
    #[track_caller]
    pub fn ballot(&mut self, a: Reg<Pred>) -> Reg<U32> {
        let d = self.register::<U32>();
        self.push(Op::Ballot { d: d.id(), a: vec![a.id()] });
        d
    }

    /// The reduction of `a` over the warp.
    #[track_caller]
    pub fn reduce_warp<T: Integer32>(&mut self, op: ReduceOp, a: Reg<T>) -> Reg<T> {
        let d = self.register::<T>();
        self.push(Op::ReduceWarp { op, ty: T::TYPE, d: d.id(), a: vec![a.id()] });
        d
    }

    /// Elects one lane of the warp, always the same one: the predicate holds there.
    #[track_caller]
    pub fn elect(&mut self) -> Reg<Pred> {
        let d = self.register::<Pred>();
        self.push(Op::Elect { d: d.id() });
        d
    }

    /// Synchronises the lanes of the warp and orders their accesses to memory.
    #[track_caller]
    pub fn warp_sync(&mut self) {
        self.push(Op::WarpSync {});
    }

    /// Loads `count` 8 × 8 matrices of 16-bit elements (`ldmatrix`), whose rows the lanes point at.
    #[track_caller]
    pub fn load_matrix<T: MatrixOperand>(
        &mut self,
        source: impl Into<SharedAddress>,
        count: u32,
        transposed: bool,
    ) -> Vec<Reg<T>> {
        let source = crate::operand::TypedAddress::address(source.into());
        let d = self.registers::<T>(count);
        self.push(Op::LoadMatrix {
            count,
            transposed,
            ty: T::TYPE,
            d: d.iter().map(|register| register.id()).collect(),
            source,
        });
        d
    }

    /// Stores 1, 2 or 4 matrices of 8 × 8 16-bit elements (`stmatrix`), whose rows the lanes point at.
    #[track_caller]
    pub fn store_matrix<T: MatrixOperand>(
        &mut self,
        target: impl Into<SharedAddress>,
        values: &[Reg<T>],
        transposed: bool,
    ) {
        self.push(Op::StoreMatrix {
            count: values.len() as u32,
            transposed,
            ty: T::TYPE,
            a: values.iter().map(|register| register.id()).collect(),
            target: crate::operand::TypedAddress::address(target.into()),
        });
    }

    /// `accumulator = a · b + accumulator` on the tensor cores.
    #[track_caller]
    pub fn mma<T: MatrixOperand, A: Accumulator>(
        &mut self,
        shape: MmaShape,
        accumulator: &[Reg<A>],
        a: &[Reg<T>],
        b: &[Reg<T>],
    ) {
        fn ids<T: crate::types::Ty>(registers: &[Reg<T>]) -> Vec<crate::RegisterId> {
            registers.iter().map(|register| register.id()).collect()
        }
        self.push(Op::Mma {
            shape,
            operand: T::TYPE,
            accumulate: A::TYPE,
            d: ids(accumulator),
            a: ids(a),
            b: ids(b),
            c: ids(accumulator),
        });
    }

    /// `accumulator = a · b + accumulator` of 8-bit floats on the tensor cores, 16 × 8 × 32.
    #[track_caller]
    pub fn mma_fp8(&mut self, types: [Fp8; 2], accumulator: &[Reg<F32>; 4], a: &[Reg<U32>; 4], b: &[Reg<U32>; 2]) {
        let [left, right] = types;
        let d: Vec<_> = accumulator.iter().map(|register| register.id()).collect();
        let [a, b] = [&a[..], b].map(|registers| registers.iter().map(|register| register.id()).collect());
        self.push(Op::MmaFp8 { left, right, d: d.clone(), a, b, c: d });
    }

    /// Waits at named barrier `barrier` until `threads` threads have arrived.
    #[track_caller]
    pub fn barrier_sync(&mut self, barrier: impl Into<Value<U32>>, threads: impl Into<Value<U32>>) {
        self.push(Op::BarrierSync { barrier: barrier.into().operand(), threads: threads.into().operand() });
    }

    /// Arrives at named barrier `barrier` of `threads` threads without waiting.
    #[track_caller]
    pub fn barrier_arrive(&mut self, barrier: impl Into<Value<U32>>, threads: impl Into<Value<U32>>) {
        self.push(Op::BarrierArrive { barrier: barrier.into().operand(), threads: threads.into().operand() });
    }

    /// Waits at barrier 0 for all threads of the CTA. A barrier counts warps, so a partial last warp counts as a whole
    /// one.
    #[track_caller]
    pub fn cta_sync(&mut self) {
        self.barrier_sync(0u32, self.threads().div_ceil(LANES).saturating_mul(LANES));
    }

    /// Orders this thread's accesses to memory, as seen by the threads of the scope.
    #[track_caller]
    pub fn fence(&mut self, scope: FenceScope) {
        self.push(Op::Fence { scope });
    }

    /// Gives registers of the warpgroup back, down to `count` per thread (`setmaxnreg`).
    #[track_caller]
    pub fn decrease_registers(&mut self, count: u32) {
        self.push(Op::SetRegisterCount { change: RegisterChange::Decrease, count });
    }

    /// Takes registers that other warpgroups have given back, up to `count` per thread (`setmaxnreg`).
    #[track_caller]
    pub fn increase_registers(&mut self, count: u32) {
        self.push(Op::SetRegisterCount { change: RegisterChange::Increase, count });
    }

    /// Waits until the preceding kernels on the stream have finished (PDL).
    #[track_caller]
    pub fn grid_dependency_wait(&mut self) {
        self.push(Op::GridDependencyWait {});
    }

    /// Lets the next kernel on the stream start (PDL).
    #[track_caller]
    pub fn launch_dependents(&mut self) {
        self.push(Op::LaunchDependents {});
    }

    /// Ends the thread.
    #[track_caller]
    pub fn exit(&mut self) {
        self.push(Op::Exit {});
    }
}
