//! Shared-memory tile: plain, padded or swizzled rows, and the addresses of `ldmatrix` in them.
//!
//! Shared memory has 32 banks of 4 bytes; a request of 128 bytes takes one transaction when its words lie in different
//! banks. `ldmatrix` asks for 16 bytes (a *chunk*) of eight consecutive rows at a time. In a [`SharedLayout::Plain`]
//! tile whose rows are a multiple of 128 bytes long, those eight chunks lie in the same banks, and the request takes
//! eight transactions. [`SharedLayout::Padded`] spends one chunk per row to shift the rows against each other.
//! [`SharedLayout::Swizzled`] cuts the tile into panels of 128 (or 64) bytes and exchanges the chunks within each
//! 128 bytes by an exclusive or with the row, which costs no memory.

use core::fmt;

use flashcore_ir::types::{MatrixOperand, U32};
use flashcore_ir::{Builder, Major, Reg, SharedAddress};

use crate::element::ElementLayout;
use crate::primitives::FragmentPosition;

/// Bytes of a chunk: what a lane moves at a time.
pub(crate) const CHUNK_BYTES: u32 = 16;
/// Bytes of half a register: the narrowest load and store.
pub(crate) const HALF_BYTES: u32 = 2;
/// Alignment of tiles, so that the exclusive or of the swizzle touches no bit of the base.
const TILE_ALIGNMENT: u32 = 128;
/// The period, in rows, of every layout's pattern of chunks.
pub(crate) const PATTERN_ROWS: u32 = 8;

/// Layout of a tile in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SharedLayout {
    /// Row after row.
    Plain,
    /// Row after row, with one unused chunk after each.
    Padded,
    /// Panels whose chunks are exchanged by an exclusive or with the row.
    Swizzled,
}

impl SharedLayout {
    /// Every layout.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Padded, Self::Swizzled];

    /// The name in tables and kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Padded => "padded",
            Self::Swizzled => "swizzled",
        }
    }
}

impl fmt::Display for SharedLayout {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Bytes of shared memory that `reserve` reserves, as it does for a kernel.
pub(crate) fn shared_bytes(reserve: impl FnOnce(&mut Builder)) -> u32 {
    let mut k = Builder::new(String::new(), 0);
    reserve(&mut k);
    k.finish().shared_bytes
}

/// A matrix in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedTile {
    /// Bytes from the beginning of shared memory.
    pub offset: u32,
    /// Rows.
    pub rows: u32,
    /// Columns, a multiple of the depth of a product.
    pub columns: u32,
    /// Their layout.
    pub layout: SharedLayout,
    /// The layout of an element.
    pub element: ElementLayout,
}

impl SharedTile {
    /// Reserves the memory of a tile.
    pub fn reserve(k: &mut Builder, rows: u32, columns: u32, layout: SharedLayout, element: ElementLayout) -> Self {
        let unplaced = Self { offset: 0, rows, columns, layout, element };
        Self { offset: k.reserve_shared(unplaced.bytes(), TILE_ALIGNMENT), ..unplaced }
    }

    /// Columns of a tile for so many columns of a tensor: whole panels that are not too narrow. Elements that lanes read one
    /// by one have panels of 128 bytes: in narrower ones rows that are two apart share banks.
    pub const fn columns_for(columns: u32, element: ElementLayout) -> u32 {
        if element.bytes == 4 {
            return columns.next_multiple_of(element.panel_columns());
        }
        let narrowest = element.mma_k();
        if columns <= narrowest { narrowest } else { columns.next_multiple_of(2 * narrowest) }
    }

    /// Bytes of the tile, rounded up to the alignment of the next.
    pub const fn bytes(self) -> u32 {
        (self.panels() * self.panel_bytes()).next_multiple_of(TILE_ALIGNMENT)
    }

    /// Columns of a panel: the columns within which the swizzle exchanges chunks, and of which a copy has one chunk per
    /// thread.
    pub const fn panel_columns(self) -> u32 {
        let widest = self.element.panel_columns();
        if self.columns.is_multiple_of(widest) {
            widest
        } else if self.columns.is_multiple_of(widest / 2) {
            widest / 2
        } else {
            widest / 4
        }
    }

    /// Chunks of one row of a panel.
    pub const fn panel_chunks(self) -> u32 {
        self.panel_columns() / self.element.chunk_elements()
    }

    /// The number of panels.
    pub const fn panels(self) -> u32 {
        self.columns / self.panel_columns()
    }

    /// Bytes from one row to the next within a panel.
    pub const fn row_bytes(self) -> u32 {
        match self.layout {
            SharedLayout::Plain => self.columns * self.element.bytes,
            SharedLayout::Padded => self.columns * self.element.bytes + CHUNK_BYTES,
            SharedLayout::Swizzled => self.panel_columns() * self.element.bytes,
        }
    }

    /// Bytes from one panel to the next.
    const fn panel_bytes(self) -> u32 {
        match self.layout {
            SharedLayout::Plain => self.rows * self.columns * self.element.bytes / self.panels(),
            SharedLayout::Padded => self.rows * (self.columns * self.element.bytes + CHUNK_BYTES) / self.panels(),
            SharedLayout::Swizzled => self.rows * self.row_bytes(),
        }
    }

    /// Bytes from the chunk in `panel` 0 to the same chunk of another panel.
    pub(crate) const fn panel_step(self, panel: u32) -> u32 {
        match self.layout {
            SharedLayout::Plain | SharedLayout::Padded => panel * self.panel_columns() * self.element.bytes,
            SharedLayout::Swizzled => panel * self.panel_bytes(),
        }
    }

    /// The address of chunk `chunk` of row `row` of panel 0, which a lane computes once; `base` is the address of shared
    /// memory, plus the stage.
    pub(crate) fn chunk_address(self, k: &mut Builder, base: Reg<U32>, row: Reg<U32>, chunk: Reg<U32>) -> Reg<U32> {
        let row_start = k.mad(row, self.row_bytes(), self.offset);
        let chunk = match self.layout {
            SharedLayout::Plain | SharedLayout::Padded => chunk,
            SharedLayout::Swizzled => {
                let pattern = self.swizzle_pattern(k, row);
                k.xor(chunk, pattern)
            }
        };
        k.eval(base + chunk.mul_add(CHUNK_BYTES, row_start))
    }

    /// The swizzle pattern of a row, which the index of a chunk is combined with. Rows shorter than 128 bytes share one.
    fn swizzle_pattern(self, k: &mut Builder, row: Reg<U32>) -> Reg<U32> {
        k.section("swizzle", |k| {
            let rows_per_line = PATTERN_ROWS / self.panel_chunks();
            let line = match rows_per_line {
                1 => row,
                _ => k.shr(row, rows_per_line.ilog2()),
            };
            k.and(line, self.panel_chunks() - 1)
        })
    }

    /// The tile as the A operand of a product, read by `ldmatrix`: its rows are the rows of A if K-major, else the columns.
    pub fn operand_a(self, k: &mut Builder, base: Reg<U32>, lane: Reg<U32>, major: Major) -> SharedOperand {
        let order = match major {
            Major::Depth => MatrixOrder::DownFirst,
            Major::Outer => MatrixOrder::AcrossFirst,
        };
        self.operand(k, base, lane, (major, order))
    }

    /// The tile as the B operand of a product, read by `ldmatrix`: its rows are the columns of B if K-major, else the rows.
    pub fn operand_b(self, k: &mut Builder, base: Reg<U32>, lane: Reg<U32>, major: Major) -> SharedOperand {
        let order = match major {
            Major::Depth => MatrixOrder::AcrossFirst,
            Major::Outer => MatrixOrder::DownFirst,
        };
        self.operand(k, base, lane, (major, order))
    }

    fn operand(
        self,
        k: &mut Builder,
        base: Reg<U32>,
        lane: Reg<U32>,
        (major, order): (Major, MatrixOrder),
    ) -> SharedOperand {
        let (row, chunk) = order.of_lane(k, lane);
        let first = self.chunk_address(k, base, row, chunk);
        SharedOperand { tile: self, first, major, row: 0, column: 0 }
    }

    /// The tile as a K-major A operand of which a lane reads four adjacent 16-bit columns of its row of a fragment, in each 16
    /// columns.
    pub(crate) fn quads(self, k: &mut Builder, base: Reg<U32>, lane: Reg<U32>) -> SharedOperand {
        let FragmentPosition { group, member } = FragmentPosition::new(k, lane);
        let chunk = k.shr(member, 1u32);
        let half = k.and(member, 1u32);
        let chunk = self.chunk_address(k, base, group, chunk);
        let first = k.mad(half, CHUNK_BYTES / 2, chunk);
        SharedOperand { tile: self, first, major: Major::Depth, row: 0, column: 0 }
    }
}

/// Sequence of the four 8 × 8 matrices that `ldmatrix` loads of a block of 16 rows and 32 bytes. A fragment of A has the matrix
/// below the first second, one of B the matrix of the same columns; in a tile that `ldmatrix` transposes, below is beside.
#[derive(Debug, Clone, Copy)]
enum MatrixOrder {
    /// The matrix below the first comes second: A as it is, or B transposed.
    DownFirst,
    /// The matrix beside the first comes second: A transposed, or B as it is.
    AcrossFirst,
}

impl MatrixOrder {
    /// Row and chunk of the block that a lane points at.
    fn of_lane(self, k: &mut Builder, lane: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let within = k.and(lane, PATTERN_ROWS - 1);
        let second = k.bit_field_extract(lane, 3u32, 1u32);
        let pair = k.shr(lane, 4u32);
        let (down, across) = match self {
            Self::DownFirst => (second, pair),
            Self::AcrossFirst => (pair, second),
        };
        (k.mad(down, PATTERN_ROWS, within), across)
    }
}

/// An operand of `mma.sync` in shared memory, as one lane reads it: any block of 16 rows and 32 bytes of its tile.
///
/// A K-major operand has the depth of the product in the columns of its tile, an MN-major one in the rows, and `ldmatrix`
/// transposes it, which it does for 16-bit elements only.
#[derive(Debug, Clone, Copy)]
pub struct SharedOperand {
    tile: SharedTile,
    first: Reg<U32>,
    major: Major,
    /// Rows and columns of the tile from where the register points.
    row: u32,
    column: u32,
}

impl SharedOperand {
    /// The operand in the stage that is `bytes` further on.
    pub(crate) fn in_stage(self, k: &mut Builder, bytes: Reg<U32>) -> Self {
        Self { first: k.add(self.first, bytes), ..self }
    }

    /// The operand from row `outer` of A, or column `outer` of B, on: a multiple of 8, and of 16 of an MN-major operand.
    #[must_use]
    pub const fn from_outer(self, outer: u32) -> Self {
        match self.major {
            Major::Depth => Self { row: self.row + outer, ..self },
            Major::Outer => Self { column: self.column + outer, ..self },
        }
    }

    /// The base register of a lane's addresses for each depth step of a panel.
    pub(crate) fn by_column(self, k: &mut Builder) -> Vec<Reg<U32>> {
        let steps = self.tile.panel_columns() / self.tile.element.mma_k();
        (0..steps)
            .map(|step| match (self.tile.layout, step) {
                (SharedLayout::Swizzled, 1..) => k.section("swizzle", |k| k.xor(self.first, step * 2 * CHUNK_BYTES)),
                _ => self.first,
            })
            .collect()
    }

    /// Loads the block at row `outer` of A, or column `outer` of B, and depth `depth`, given [`Self::by_column`]. The index
    /// of a row of the tile is a multiple of 8, that of a column one of 32 bytes.
    pub(crate) fn load<T: MatrixOperand>(
        self,
        k: &mut Builder,
        by_column: &[Reg<U32>],
        outer: u32,
        depth: u32,
    ) -> [Reg<T>; 4] {
        let matrices = k.load_matrix(self.block(by_column, outer, depth), 4, self.major == Major::Outer);
        [matrices[0], matrices[1], matrices[2], matrices[3]]
    }

    /// The address of the block that [`load`](Self::load) loads.
    pub(crate) fn block(self, by_column: &[Reg<U32>], outer: u32, depth: u32) -> SharedAddress {
        let (row, column) = match self.major {
            Major::Depth => (outer, depth),
            Major::Outer => (depth, outer),
        };
        let (row, column) = (self.row + row, self.column + column);
        let (panel, within) = (column / self.tile.panel_columns(), column % self.tile.panel_columns());
        let step = within / self.tile.element.mma_k();
        let beside = match self.tile.layout {
            SharedLayout::Swizzled => 0,
            SharedLayout::Plain | SharedLayout::Padded => within * self.tile.element.bytes,
        };
        let offset = row * self.tile.row_bytes() + self.tile.panel_step(panel) + beside;
        SharedAddress::from(by_column[step as usize]).plus(offset as i32)
    }
}
