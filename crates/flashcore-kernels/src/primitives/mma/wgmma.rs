//! `wgmma`: asynchronous products of a warpgroup, A in swizzled shared memory or in registers, B in swizzled shared memory.
//!
//! A depth step has 32 bytes of each row of A: 16 columns of 16-bit elements, or 32 of 8-bit floats. Two 8-column fragments of
//! an accumulator, rounded to 16-bit pairs, are an A fragment as they stand. Of 8-bit floats, a lane of an accumulator has
//! columns `2t` and `2t + 1` of each 8, and A wants four adjacent ones in a register. The order of the depth is free if B has
//! the same, so four fragments, rounded, are an A fragment too, and the transposition of V puts keys 0, 1, 8, 9, 2, 3, 10, 11,
//! 4, 5, 12, 13, 6, 7, 14, 15 of each 16 in that order ([`TileTranspose`](crate::primitives::TileTranspose)).

use core::marker::PhantomData;

use flashcore_ir::builder::{Adds, LeftMatrix, MatrixLayout, SharedMatrix};
use flashcore_ir::types::{F32, Ty, U32, U64};
use flashcore_ir::{Builder, Fp8, Major, Reg, Swizzle};

use crate::element::Element;
use crate::primitives::{Accumulator, MMA_N, PANEL_ROW_BYTES, SwizzledTile};

/// Bytes from 8 rows to the next 8: the stride of a matrix descriptor.
const EIGHT_ROWS: u32 = 8 * PANEL_ROW_BYTES;
/// Columns of a depth step of 8-bit floats.
const FP8_DEPTH: u32 = 32;

/// Element types of A and B.
pub trait WgmmaTypes: Copy {
    /// A register of A.
    type Register: Ty;

    /// Starts a product of one depth step.
    fn wgmma(
        self,
        k: &mut Builder,
        accumulator: &[Reg<F32>],
        a: LeftMatrix<'_, Self::Register>,
        b: SharedMatrix,
        adds: Adds,
    );
}

/// A and B of 16-bit elements, in registers as pairs `T`.
#[derive(Debug, Clone, Copy)]
pub struct HalfTypes<T>(pub PhantomData<T>);

impl<T: Element> WgmmaTypes for HalfTypes<T> {
    type Register = T;

    fn wgmma(self, k: &mut Builder, d: &[Reg<F32>], a: LeftMatrix<'_, T>, b: SharedMatrix, adds: Adds) {
        k.wgmma(columns(d), d, a, b, adds);
    }
}

/// A and B of 8-bit floats, both K-major; in registers four elements of A.
impl WgmmaTypes for [Fp8; 2] {
    type Register = U32;

    fn wgmma(self, k: &mut Builder, d: &[Reg<F32>], a: LeftMatrix<'_, U32>, b: SharedMatrix, adds: Adds) {
        k.wgmma_fp8(self, columns(d), d, a, b, adds);
    }
}

/// Columns of the accumulator that a lane has `registers` of.
const fn columns(registers: &[Reg<F32>]) -> u32 {
    registers.len() as u32 * 2
}

/// A `wgmma` operand in shared memory: a swizzled tile and its matrix descriptor.
#[derive(Debug, Clone, Copy)]
pub struct WgmmaOperand {
    tile: SwizzledTile,
    descriptor: Reg<U64>,
    major: Major,
}

impl SwizzledTile {
    /// The tile at an address as a K-major operand: its rows are the rows of A, or the columns of B.
    pub fn k_major(self, k: &mut Builder, address: Reg<U32>) -> WgmmaOperand {
        self.operand(k, address, Major::Depth, 0)
    }

    /// The tile at an address as an MN-major operand: its columns are the rows of A, or the columns of B. `wgmma` has it for
    /// 16-bit elements only.
    pub fn mn_major(self, k: &mut Builder, address: Reg<U32>) -> WgmmaOperand {
        self.operand(k, address, Major::Outer, self.panel_bytes())
    }

    fn operand(self, k: &mut Builder, address: Reg<U32>, major: Major, leading_bytes: u32) -> WgmmaOperand {
        let layout = MatrixLayout { swizzle: Swizzle::Bytes128, leading_bytes, stride_bytes: EIGHT_ROWS };
        WgmmaOperand { tile: self, descriptor: k.matrix_descriptor(address, layout), major }
    }
}

impl WgmmaOperand {
    /// Depth steps of the tile.
    const fn steps(&self) -> u32 {
        let depth = match self.major {
            Major::Depth => self.tile.columns,
            Major::Outer => self.tile.rows,
        };
        depth.div_ceil(self.tile.element.mma_k())
    }

    /// One depth step.
    fn step(&self, k: &mut Builder, step: u32) -> SharedMatrix {
        let element = self.tile.element;
        let bytes = match self.major {
            Major::Depth => {
                let steps_per_panel = element.panel_columns() / element.mma_k();
                let (panel, within) = (step / steps_per_panel, step % steps_per_panel);
                panel * self.tile.panel_bytes() + within * element.mma_k() * element.bytes
            }
            Major::Outer => step * element.mma_k() * PANEL_ROW_BYTES,
        };
        SharedMatrix { descriptor: k.descriptor_plus(self.descriptor, bytes), major: self.major }
    }
}

/// The A operand of a `wgmma`: 64 rows.
#[derive(Debug, Clone, Copy)]
pub enum WgmmaA<'a, R: Ty> {
    /// In registers.
    Registers(&'a WgmmaFragments<R>),
    /// In shared memory.
    Shared(&'a WgmmaOperand),
}

impl Accumulator {
    /// Registers without values for 16 rows of each warp and `columns` columns.
    pub fn unset(k: &mut Builder, columns: u32) -> Self {
        let registers = k.warpgroup_accumulator::<F32>(columns);
        let fragments = registers.chunks_exact(4).map(|fragment| [fragment[0], fragment[1], fragment[2], fragment[3]]);
        Self { m_tiles: vec![fragments.collect()] }
    }

    /// The registers of its first columns, a multiple of 8.
    #[must_use]
    pub fn first_columns(&self, columns: u32) -> Self {
        self.column_slices(columns).swap_remove(0)
    }

    /// The registers of `columns` columns from `first` on, both multiples of 8.
    #[must_use]
    pub fn columns(&self, first: u32, columns: u32) -> Self {
        let fragments = &self.m_tiles[0][(first / MMA_N) as usize..][..(columns / MMA_N) as usize];
        Self { m_tiles: vec![fragments.to_vec()] }
    }

    /// Slices of `columns` columns, a multiple of 8; the last may have fewer.
    pub fn column_slices(&self, columns: u32) -> Vec<Self> {
        let fragments = (columns / MMA_N) as usize;
        self.m_tiles[0].chunks(fragments).map(|fragments| Self { m_tiles: vec![fragments.to_vec()] }).collect()
    }

    /// Starts `A · B` over the depth of A: in place of what it holds, or added to it. One `wgmma` group.
    pub fn multiply_async<T: WgmmaTypes>(
        &self,
        k: &mut Builder,
        types: T,
        a: WgmmaA<'_, T::Register>,
        b: &WgmmaOperand,
        adds: Adds,
    ) {
        let registers: Vec<_> = self.m_tiles.iter().flatten().flatten().copied().collect();
        let steps = match a {
            WgmmaA::Registers(fragments) => fragments.steps.len() as u32,
            WgmmaA::Shared(operand) => operand.steps(),
        };
        for step in 0..steps {
            let left = match a {
                WgmmaA::Registers(fragments) => LeftMatrix::Registers(&fragments.steps[step as usize]),
                WgmmaA::Shared(operand) => LeftMatrix::Shared(operand.step(k, step)),
            };
            let right = b.step(k, step);
            types.wgmma(k, &registers, left, right, if step == 0 { adds } else { Adds::Add });
        }
        k.wgmma_commit();
    }
}

/// A in registers, four for each depth step: a rounded accumulator in registers of its own, so that the next product can
/// replace the accumulator while one still reads A.
#[derive(Debug, Clone)]
pub struct WgmmaFragments<R: Ty> {
    steps: Vec<[Reg<R>; 4]>,
}

impl<R: Ty> WgmmaFragments<R> {
    fn unset_steps(k: &mut Builder, steps: u32) -> Self {
        Self { steps: (0..steps).map(|_| core::array::from_fn(|_| k.register())).collect() }
    }
}

impl<T: Element> WgmmaFragments<T> {
    /// Registers without values for `columns` columns, a multiple of the depth.
    pub fn unset(k: &mut Builder, columns: u32) -> Self {
        Self::unset_steps(k, columns / T::LAYOUT.mma_k())
    }

    /// Rounds an accumulator; columns past its last become zero.
    pub fn round(&self, k: &mut Builder, results: &Accumulator) {
        let results = results.m_tiles[0].chunks_exact(2);
        for target in self.steps.iter().skip(results.len()).flatten() {
            k.pair_to(*target, 0.0f32, 0.0f32);
        }
        for (target, fragments) in self.steps.iter().zip(results) {
            let pairs = fragments.iter().flat_map(|fragment| fragment.chunks_exact(2));
            for (target, pair) in target.iter().zip(pairs) {
                k.pair_to(*target, pair[0], pair[1]);
            }
        }
    }
}

impl WgmmaFragments<U32> {
    /// Registers without values for `columns` columns of e4m3, a multiple of 32.
    pub fn unset_e4m3(k: &mut Builder, columns: u32) -> Self {
        Self::unset_steps(k, columns / FP8_DEPTH)
    }

    /// Rounds an accumulator, whose columns are a multiple of 32, to e4m3; columns past its last become zero. Results that
    /// e4m3 has no room for become its largest number.
    pub fn round_e4m3(&self, k: &mut Builder, results: &Accumulator) {
        let results = results.m_tiles[0].chunks_exact(4);
        for target in self.steps.iter().skip(results.len()).flatten() {
            k.set(*target, 0u32);
        }
        for (target, fragments) in self.steps.iter().zip(results) {
            for (index, target) in target.iter().enumerate() {
                // Two fragments are the depths of a register, and two elements of each those of a row.
                let (first, row) = (index / 2 * 2, index % 2 * 2);
                let [low, high] = [first, first + 1].map(|fragment| {
                    let elements = fragments[fragment];
                    k.fp8_pair(Fp8::E4m3, elements[row], elements[row + 1])
                });
                k.join_halves_to(*target, low, high);
            }
        }
    }
}
