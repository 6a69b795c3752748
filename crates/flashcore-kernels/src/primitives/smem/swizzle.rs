//! Matrices in shared memory as tensor copies write them and products of warpgroups read them.
//!
//! A matrix is cut into *panels* of 64 columns. The rows of a panel are 128 bytes long and lie one behind the other, the
//! chunks of 16 bytes in each exchanged by the 128-byte swizzle of the copy engine, which products undo as they read. A
//! panel is one box of a tensor copy; columns that the tensor does not have are zero.

use flashcore_ir::builder::{Adds, LeftMatrix, MatrixLayout, SharedMatrix, TensorCopyOptions};
use flashcore_ir::types::{F32, Pred, S32, U32, U64};
use flashcore_ir::{Builder, Major, Reg, SharedAddress, Swizzle};

use crate::element::{ELEMENT_BYTES, Element};
use crate::primitives::{Accumulator, CHUNK_BYTES, CHUNK_ELEMENTS, PRODUCT_DEPTH, RESULT_COLUMNS};

/// Columns of a panel.
pub const PANEL_COLUMNS: u32 = 64;
/// Bytes of a row of a panel.
pub const PANEL_ROW_BYTES: u32 = PANEL_COLUMNS * ELEMENT_BYTES;
/// Chunks of 16 bytes in a row of a panel.
const CHUNKS_PER_ROW: u32 = PANEL_ROW_BYTES / CHUNK_BYTES;
/// Bytes from 8 rows to the next 8.
const EIGHT_ROWS: u32 = 8 * PANEL_ROW_BYTES;

/// A matrix of 16-bit elements in panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwizzledTile {
    /// Rows.
    pub rows: u32,
    /// Columns of the tensor.
    pub columns: u32,
}

impl SwizzledTile {
    /// Panels.
    pub const fn panels(self) -> u32 {
        self.columns.div_ceil(PANEL_COLUMNS)
    }

    /// Bytes of a panel.
    pub const fn panel_bytes(self) -> u32 {
        self.rows.saturating_mul(PANEL_ROW_BYTES)
    }

    /// Bytes of the matrix, which is also what copies bring.
    pub const fn bytes(self) -> u32 {
        self.panels().saturating_mul(self.panel_bytes())
    }

    /// Starts the copies of the rows from `row` on of one head of one batch, which report to `barrier`. Only the lane in
    /// which `leader` holds does it.
    pub fn load(self, k: &mut Builder, source: TensorRows, target: Reg<U32>, barrier: Reg<U32>, leader: Reg<Pred>) {
        let TensorRows { map, row, head, batch, policy } = source;
        for panel in 0..self.panels() {
            let column = k.copy((panel * PANEL_COLUMNS) as i32);
            let target = SharedAddress::from(target).plus((panel * self.panel_bytes()) as i32);
            let options = TensorCopyOptions { policy, ..TensorCopyOptions::default() };
            k.when(leader, |k| k.tensor_load(target, map, &[column, row, head, batch], barrier, options));
        }
    }

    /// Writes 16 rows of results, those of a warp, rounded, to an address in the matrix.
    pub fn write_rows<T: Element>(self, k: &mut Builder, results: &Accumulator, address: Reg<U32>, lane: Reg<U32>) {
        // Lanes point at the rows of 16 x 16 elements: of the left half the first 16 lanes, of the right the others.
        let (row, half) = (k.and(lane, 15u32), k.shr(lane, 4u32));
        let row_address = k.mad(row, PANEL_ROW_BYTES, address);
        let exchange = k.and(lane, CHUNKS_PER_ROW - 1);
        let steps = (0..PANEL_COLUMNS / PRODUCT_DEPTH).map(|step| {
            let chunk = k.add(half, step * PRODUCT_DEPTH / CHUNK_ELEMENTS);
            let chunk = k.xor(chunk, exchange);
            k.mad(chunk, CHUNK_BYTES, row_address)
        });
        let steps: Vec<_> = steps.collect();
        for (number, tiles) in results.blocks[0].chunks(2).enumerate() {
            let pairs = tiles.iter().flat_map(|tile| tile.chunks_exact(2));
            let words: Vec<Reg<T>> = pairs.map(|pair| k.pair(pair[0], pair[1])).collect();
            let panel = (number / steps.len()) as u32;
            let target = SharedAddress::from(steps[number % steps.len()]).plus((panel * self.panel_bytes()) as i32);
            k.store_matrix(target, &words, false);
        }
    }

    /// Starts the copies of the rows at an address to those of a tensor from `row` on. Only the lane in which `leader`
    /// holds does it.
    pub fn store(self, k: &mut Builder, target: TensorRows, source: Reg<U32>, leader: Reg<Pred>) {
        let TensorRows { map, row, head, batch, policy } = target;
        for panel in 0..self.panels() {
            let column = k.copy((panel * PANEL_COLUMNS) as i32);
            let source = SharedAddress::from(source).plus((panel * self.panel_bytes()) as i32);
            k.when(leader, |k| k.tensor_store(map, &[column, row, head, batch], source, policy));
        }
        k.when(leader, Builder::bulk_commit);
    }

    /// The matrix at an address, its rows being rows of a left operand or columns of a right one.
    pub fn by_rows(self, k: &mut Builder, address: Reg<U32>) -> WgmmaOperand {
        let layout = MatrixLayout { swizzle: Swizzle::Bytes128, leading_bytes: 0, stride_bytes: EIGHT_ROWS };
        WgmmaOperand { tile: self, descriptor: k.matrix_descriptor(address, layout) }
    }

    /// The matrix at an address, its rows being rows of a right operand.
    pub fn by_columns(self, k: &mut Builder, address: Reg<U32>) -> WgmmaOperand {
        let leading_bytes = self.panel_bytes();
        let layout = MatrixLayout { swizzle: Swizzle::Bytes128, leading_bytes, stride_bytes: EIGHT_ROWS };
        WgmmaOperand { tile: self, descriptor: k.matrix_descriptor(address, layout) }
    }
}

/// Rows of a tensor that a copy begins at.
#[derive(Debug, Clone, Copy)]
pub struct TensorRows {
    /// The tensor.
    pub map: Reg<U64>,
    /// The first row.
    pub row: Reg<S32>,
    /// The head.
    pub head: Reg<S32>,
    /// The batch.
    pub batch: Reg<S32>,
    /// How long L2 should keep them.
    pub policy: Option<Reg<U64>>,
}

/// A matrix as products read it.
#[derive(Debug, Clone, Copy)]
pub struct WgmmaOperand {
    tile: SwizzledTile,
    descriptor: Reg<U64>,
}

impl WgmmaOperand {
    /// 16 columns of all rows.
    fn column_step(&self, k: &mut Builder, step: u32) -> SharedMatrix {
        let steps_per_panel = PANEL_COLUMNS / PRODUCT_DEPTH;
        let (panel, within) = (step / steps_per_panel, step % steps_per_panel);
        let bytes = panel * self.tile.panel_bytes() + within * PRODUCT_DEPTH * ELEMENT_BYTES;
        SharedMatrix { descriptor: k.descriptor_plus(self.descriptor, bytes), major: Major::Depth }
    }

    /// 16 rows of all columns.
    fn row_step(&self, k: &mut Builder, step: u32) -> SharedMatrix {
        let bytes = step * PRODUCT_DEPTH * PANEL_ROW_BYTES;
        SharedMatrix { descriptor: k.descriptor_plus(self.descriptor, bytes), major: Major::Outer }
    }
}

/// The registers of an accumulator of a warpgroup: per warp, those of its 16 rows as `mma` has them.
fn registers(accumulator: &Accumulator) -> Vec<Reg<F32>> {
    accumulator.blocks.iter().flatten().flatten().copied().collect()
}

impl Accumulator {
    /// Registers without values for 16 rows of each warp and `columns` columns.
    pub fn unset(k: &mut Builder, columns: u32) -> Self {
        let registers = k.warpgroup_accumulator::<F32>(columns);
        let tiles = registers.chunks_exact(4).map(|tile| [tile[0], tile[1], tile[2], tile[3]]);
        Self { blocks: vec![tiles.collect()] }
    }

    /// The registers of its first columns, a multiple of 8.
    #[must_use]
    pub fn first_columns(&self, columns: u32) -> Self {
        self.parts(columns).swap_remove(0)
    }

    /// The registers of so many columns at a time, a multiple of 8; of the last, fewer.
    pub fn parts(&self, columns: u32) -> Vec<Self> {
        let tiles = (columns / RESULT_COLUMNS) as usize;
        self.blocks[0].chunks(tiles).map(|tiles| Self { blocks: vec![tiles.to_vec()] }).collect()
    }

    /// Starts the product of the rows of `left` by the rows of `right`, `depth` columns of both, in its place. One group.
    pub fn start_product_of_rows<T: Element>(
        &self,
        k: &mut Builder,
        left: &WgmmaOperand,
        right: &WgmmaOperand,
        depth: u32,
    ) {
        let (registers, columns) = (registers(self), right.tile.rows);
        for step in 0..depth.div_ceil(PRODUCT_DEPTH) {
            let a = LeftMatrix::<T>::Shared(left.column_step(k, step));
            let b = right.column_step(k, step);
            k.wgmma(columns, &registers, a, b, if step == 0 { Adds::Replace } else { Adds::Add });
        }
        k.wgmma_commit();
    }

    /// Starts adding the product of `left`, in registers, by `right`. One group.
    pub fn start_adding_product<T: Element>(&self, k: &mut Builder, left: &PFragment<T>, right: &WgmmaOperand) {
        let registers = registers(self);
        let columns = registers.len() as u32 * 2;
        for (step, fragment) in (0u32..).zip(&left.fragments) {
            let b = right.row_step(k, step);
            k.wgmma(columns, &registers, LeftMatrix::Registers(fragment), b, Adds::Add);
        }
        k.wgmma_commit();
    }
}

/// Results rounded to a left operand, in registers of their own: the results can be replaced while it is multiplied.
#[derive(Debug, Clone)]
pub struct PFragment<T: Element> {
    fragments: Vec<[Reg<T>; 4]>,
}

impl<T: Element> PFragment<T> {
    /// Registers without values for results of so many columns, a multiple of 16.
    pub fn unset(k: &mut Builder, columns: u32) -> Self {
        let steps = 0..columns / PRODUCT_DEPTH;
        Self { fragments: steps.map(|_| core::array::from_fn(|_| k.register())).collect() }
    }

    /// Rounds the results; columns behind those there are become zero.
    pub fn round(&self, k: &mut Builder, results: &Accumulator) {
        let rounded = results.blocks[0].len() / 2;
        for target in self.fragments.iter().skip(rounded).flatten() {
            k.pair_to(*target, 0.0f32, 0.0f32);
        }
        for (fragment, tiles) in self.fragments.iter().zip(results.blocks[0].chunks_exact(2)) {
            let pairs = tiles.iter().flat_map(|tile| tile.chunks_exact(2));
            for (target, pair) in fragment.iter().zip(pairs) {
                k.pair_to(*target, pair[0], pair[1]);
            }
        }
    }
}
