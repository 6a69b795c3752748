//! `wgmma`: asynchronous products of a warpgroup, their operands in swizzled shared memory or in registers.

use flashcore_ir::builder::{Adds, LeftMatrix, MatrixLayout, SharedMatrix};
use flashcore_ir::types::{F32, U32, U64};
use flashcore_ir::{Builder, Major, Reg, Swizzle};

use crate::element::Element;
use crate::primitives::{Accumulator, MMA_N, PANEL_ROW_BYTES, SwizzledTile};

/// Bytes from 8 rows to the next 8: the stride of a matrix descriptor.
const EIGHT_ROWS: u32 = 8 * PANEL_ROW_BYTES;

/// A `wgmma` operand in shared memory: a swizzled tile and its matrix descriptor.
#[derive(Debug, Clone, Copy)]
pub struct WgmmaOperand {
    tile: SwizzledTile,
    descriptor: Reg<U64>,
}

impl SwizzledTile {
    /// The tile at an address as a K-major operand: its rows are the rows of A, or the columns of B.
    pub fn k_major(self, k: &mut Builder, address: Reg<U32>) -> WgmmaOperand {
        let layout = MatrixLayout { swizzle: Swizzle::Bytes128, leading_bytes: 0, stride_bytes: EIGHT_ROWS };
        WgmmaOperand { tile: self, descriptor: k.matrix_descriptor(address, layout) }
    }

    /// The tile at an address as an MN-major operand: its rows are the rows of B. `wgmma` has it for 16-bit elements only.
    pub fn mn_major(self, k: &mut Builder, address: Reg<U32>) -> WgmmaOperand {
        let leading_bytes = self.panel_bytes();
        let layout = MatrixLayout { swizzle: Swizzle::Bytes128, leading_bytes, stride_bytes: EIGHT_ROWS };
        WgmmaOperand { tile: self, descriptor: k.matrix_descriptor(address, layout) }
    }
}

impl WgmmaOperand {
    /// Rows of the tile.
    pub(super) const fn rows(&self) -> u32 {
        self.tile.rows
    }

    /// Columns of one depth step, of all rows of a K-major operand.
    pub(super) fn column_step(&self, k: &mut Builder, step: u32) -> SharedMatrix {
        let element = self.tile.element;
        let steps_per_panel = element.panel_columns() / element.mma_k();
        let (panel, within) = (step / steps_per_panel, step % steps_per_panel);
        let bytes = panel * self.tile.panel_bytes() + within * element.mma_k() * element.bytes;
        SharedMatrix { descriptor: k.descriptor_plus(self.descriptor, bytes), major: Major::Depth }
    }

    /// Rows of one depth step, of all columns of an MN-major operand.
    fn row_step(&self, k: &mut Builder, step: u32) -> SharedMatrix {
        let bytes = step * self.tile.element.mma_k() * PANEL_ROW_BYTES;
        SharedMatrix { descriptor: k.descriptor_plus(self.descriptor, bytes), major: Major::Outer }
    }
}

/// The registers of a warpgroup's accumulator: in each warp, those of its 16 rows in the order of `mma`.
pub(super) fn registers(accumulator: &Accumulator) -> Vec<Reg<F32>> {
    accumulator.m_tiles.iter().flatten().flatten().copied().collect()
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

    /// Starts `A * B^T` over `depth` columns, both K-major, in place of what it holds. One `wgmma` group.
    pub fn start_qk<T: Element>(&self, k: &mut Builder, a: &WgmmaOperand, b: &WgmmaOperand, depth: u32) {
        let (registers, columns) = (registers(self), b.tile.rows);
        for step in 0..depth.div_ceil(T::LAYOUT.mma_k()) {
            let left = LeftMatrix::<T>::Shared(a.column_step(k, step));
            let right = b.column_step(k, step);
            k.wgmma(columns, &registers, left, right, if step == 0 { Adds::Replace } else { Adds::Add });
        }
        k.wgmma_commit();
    }

    /// Starts adding `P * V`, P in registers and V MN-major. One `wgmma` group.
    pub fn start_pv<T: Element>(&self, k: &mut Builder, p: &PFragment<T>, v: &WgmmaOperand) {
        let registers = registers(self);
        let columns = registers.len() as u32 * 2;
        for (step, fragment) in (0u32..).zip(&p.fragments) {
            let right = v.row_step(k, step);
            k.wgmma(columns, &registers, LeftMatrix::Registers(fragment), right, Adds::Add);
        }
        k.wgmma_commit();
    }
}

/// P fragment: softmax weights rounded to the A operand of PV, in registers of their own, so that the next scores can
/// replace the accumulator while PV still reads P.
#[derive(Debug, Clone)]
pub struct PFragment<T: Element> {
    fragments: Vec<[Reg<T>; 4]>,
}

impl<T: Element> PFragment<T> {
    /// Registers without values for `columns` columns, a multiple of the depth.
    pub fn unset(k: &mut Builder, columns: u32) -> Self {
        let steps = 0..columns / T::LAYOUT.mma_k();
        Self { fragments: steps.map(|_| core::array::from_fn(|_| k.register())).collect() }
    }

    /// Rounds the weights of an accumulator; columns past its last become zero. Two fragments of it, rounded to 16-bit
    /// pairs, are one A fragment as they stand.
    pub fn round(&self, k: &mut Builder, weights: &Accumulator) {
        let rounded = weights.m_tiles[0].len() / 2;
        for target in self.fragments.iter().skip(rounded).flatten() {
            k.pair_to(*target, 0.0f32, 0.0f32);
        }
        for (target, fragments) in self.fragments.iter().zip(weights.m_tiles[0].chunks_exact(2)) {
            let pairs = fragments.iter().flat_map(|fragment| fragment.chunks_exact(2));
            for (target, pair) in target.iter().zip(pairs) {
                k.pair_to(*target, pair[0], pair[1]);
            }
        }
    }
}
