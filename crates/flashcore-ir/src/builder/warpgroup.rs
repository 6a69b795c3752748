//! `wgmma`, and the matrix descriptors of its operands in shared memory.

use super::Builder;
use crate::operand::{Accumulation, Fp8, Major, MatrixSource, Reg, RegisterId, Swizzle};
use crate::operation::Op;
use crate::types::{Accumulator, F32, HalfPair, Pred, Ty, Type, U32, U64};

/// The layout of a matrix in shared memory. Its strides count bytes, so that it serves elements of 16 and of 8 bits.
///
/// It is made of *core matrices* of 8 × 16 bytes: 8 lines of 16 bytes, which follow each other without swizzle, and lie
/// in 8 rows of the swizzle's width with one. The meaning of the two strides depends on the [`Major`] and the swizzle:
///
/// | major | swizzle | `leading_bytes` | `stride_bytes` |
/// |---|---|---|---|
/// | depth | none | between core matrices along the depth | between groups of 8 outer elements |
/// | depth | some | not used | between groups of 8 outer elements |
/// | outer | none | between groups of 8 along the depth | between core matrices along the outer dimension |
/// | outer | some | between pieces as wide as the swizzle along the outer dimension | between groups of 8 along the depth |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixLayout {
    /// The swizzle.
    pub swizzle: Swizzle,
    /// See the table.
    pub leading_bytes: u32,
    /// See the table.
    pub stride_bytes: u32,
}

impl MatrixLayout {
    /// The bits of a descriptor apart from the address.
    pub const fn bits(self) -> u64 {
        let swizzle: u64 = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::Bytes128 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes32 => 3,
        };
        (self.leading_bytes as u64 >> 4 & 0x3fff) << 16 | (self.stride_bytes as u64 >> 4 & 0x3fff) << 32 | swizzle << 62
    }
}

/// A matrix in shared memory.
#[derive(Debug, Clone, Copy)]
pub struct SharedMatrix {
    /// The descriptor, from [`Builder::matrix_descriptor`].
    pub descriptor: Reg<U64>,
    /// The dimension along which elements are adjacent.
    pub major: Major,
}

/// The A operand of a `wgmma`: 64 rows of 32 bytes.
#[derive(Debug, Clone, Copy)]
pub enum LeftMatrix<'a, T: Ty> {
    /// In shared memory.
    Shared(SharedMatrix),
    /// In four registers of each lane: for warp `w`, the `mma` fragment of the 16 rows from 16 `w` on.
    Registers(&'a [Reg<T>]),
}

impl<T: Ty> LeftMatrix<'_, T> {
    fn parts(self) -> (MatrixSource, Major, Vec<RegisterId>) {
        match self {
            LeftMatrix::Shared(matrix) => (MatrixSource::Shared, matrix.major, vec![matrix.descriptor.id()]),
            LeftMatrix::Registers(registers) => (MatrixSource::Registers, Major::Depth, ids(registers)),
        }
    }
}

/// The use of the old accumulator in a `wgmma`.
#[derive(Debug, Clone, Copy)]
pub enum Adds {
    /// The product replaces it.
    Replace,
    /// The product is added to it.
    Add,
    /// The product is added where the predicate holds, and replaces it elsewhere. All lanes of the warpgroup agree.
    Where(Reg<Pred>),
}

impl Adds {
    /// The modifier, the registers of the accumulator that are read, and the predicate.
    fn parts(self, d: &[RegisterId]) -> (Accumulation, Vec<RegisterId>, Vec<RegisterId>) {
        match self {
            Adds::Replace => (Accumulation::Replace, Vec::new(), Vec::new()),
            Adds::Add => (Accumulation::Add, d.to_vec(), Vec::new()),
            Adds::Where(predicate) => (Accumulation::AddWhere, d.to_vec(), vec![predicate.id()]),
        }
    }
}

fn ids<T: Ty>(registers: &[Reg<T>]) -> Vec<RegisterId> {
    registers.iter().map(|register| register.id()).collect()
}

impl Builder {
    /// The descriptor of a matrix at a shared-memory address.
    #[track_caller]
    pub fn matrix_descriptor(&mut self, address: Reg<U32>, layout: MatrixLayout) -> Reg<U64> {
        let start = self.bit_field_extract(address, 4u32, 14u32);
        let start = self.widen(start);
        self.or(start, layout.bits())
    }

    /// The descriptor of the same matrix `bytes` (a multiple of 16) further on.
    #[track_caller]
    pub fn descriptor_plus(&mut self, descriptor: Reg<U64>, bytes: u32) -> Reg<U64> {
        self.add(descriptor, u64::from(bytes >> 4))
    }

    /// Starts a product of 64 × 16 by 16 × `columns` elements. All four warps of the warpgroup execute it together.
    #[track_caller]
    pub fn wgmma<T: HalfPair, A: Accumulator>(
        &mut self,
        columns: u32,
        accumulator: &[Reg<A>],
        a: LeftMatrix<'_, T>,
        b: SharedMatrix,
        adds: Adds,
    ) {
        let (source, a_major, a) = a.parts();
        let d = ids(accumulator);
        let (accumulation, c, scale) = adds.parts(&d);
        self.push(Op::Wgmma {
            columns,
            operand: T::TYPE,
            accumulate: A::TYPE,
            accumulation,
            source,
            a_major,
            b_major: b.major,
            d,
            c,
            scale,
            a,
            b: vec![b.descriptor.id()],
        });
    }

    /// Starts a product of 64 × 32 by 32 × `columns` 8-bit floats, of the types of A and B. Both operands are K-major. All
    /// four warps of the warpgroup execute it together.
    #[track_caller]
    pub fn wgmma_fp8(
        &mut self,
        [left, right]: [Fp8; 2],
        columns: u32,
        accumulator: &[Reg<F32>],
        a: LeftMatrix<'_, U32>,
        b: SharedMatrix,
        adds: Adds,
    ) {
        let (source, a_major, a) = a.parts();
        let d = ids(accumulator);
        let (accumulation, c, scale) = adds.parts(&d);
        self.push(Op::WgmmaFp8 {
            columns,
            left,
            right,
            accumulation,
            source,
            a_major,
            b_major: b.major,
            d,
            c,
            scale,
            a,
            b: vec![b.descriptor.id()],
        });
    }

    /// Registers for the accumulator of a `wgmma`, not yet written: 64 × `columns` elements over the warpgroup.
    pub fn warpgroup_accumulator<A: Accumulator>(&mut self, columns: u32) -> Vec<Reg<A>> {
        let per_register = if A::TYPE == Type::F16x2 { 4 } else { 2 };
        self.registers(columns / per_register)
    }

    /// Orders earlier accesses to registers before `wgmma`s that use them.
    #[track_caller]
    pub fn wgmma_fence(&mut self) {
        self.push(Op::WgmmaFence {});
    }

    /// Closes the group of the `wgmma`s started since the last commit.
    #[track_caller]
    pub fn wgmma_commit(&mut self) {
        self.push(Op::WgmmaCommit {});
    }

    /// Waits until at most `pending` `wgmma` groups are unfinished.
    #[track_caller]
    pub fn wgmma_wait(&mut self, pending: u32) {
        self.push(Op::WgmmaWait { pending });
    }
}
