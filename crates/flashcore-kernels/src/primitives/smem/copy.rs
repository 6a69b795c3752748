//! Tile copy: `cp.async` of a tile from global to shared memory by all threads of a CTA.

use flashcore_ir::builder::CopyBytes;
use flashcore_ir::types::{F16x2, Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, L2Prefetch, Reg, SharedAddress};

use super::tile::{CHUNK_BYTES, HALF_BYTES, PATTERN_ROWS, SharedLayout, SharedTile};

/// Rows of a matrix in global memory.
#[derive(Debug, Clone, Copy)]
pub struct GlobalRows {
    /// The address of the first.
    pub first: Reg<U64>,
    /// Bytes from one to the next.
    pub stride: Reg<U64>,
    /// Columns that exist: whole chunks, at most as many as the tile has.
    pub columns: u32,
    /// Vector width: bytes that addresses are a multiple of, and that are moved at a time: 2, 4, 8 or 16.
    pub vec_bytes: u32,
    /// Set where the rows are those of several heads (`pack_gqa`).
    pub packed: Option<PackedHeads>,
    /// Set where the rows lie in pages.
    pub paged: Option<PagedRows>,
}

/// Rows of a paged KV cache.
#[derive(Debug, Clone, Copy)]
pub struct PagedRows {
    /// The address of the sequence's row of the page table.
    pub table: Reg<U64>,
    /// Bytes from one page to the next.
    pub page_stride: Reg<U64>,
    /// Rows of a page, or their logarithm.
    pub page_size: Reg<U32>,
    /// True if [`page_size`](Self::page_size) is the logarithm.
    pub is_log2: bool,
    /// The last page: a number beyond it must not lead out of the cache.
    pub last_page: Reg<U32>,
    /// The index in the sequence from which rows count.
    pub first_row: Reg<U32>,
    /// True if a tile may have none of its rows here: the others are new keys.
    pub may_be_none: bool,
}

/// Rows of several query heads packed into one tile (`pack_gqa`): row 0 of each head, then row 1 of each, and so on.
#[derive(Debug, Clone, Copy)]
pub struct PackedHeads {
    /// Query heads per KV head.
    pub group: Reg<U32>,
    /// Bytes from one head to the next.
    pub head_stride: Reg<U64>,
    /// The index of the first row, from which rows count.
    pub first_row: Reg<U32>,
}

impl GlobalRows {
    /// The address of a row.
    pub(crate) fn row(&self, k: &mut Builder, row: Reg<U32>) -> Reg<U64> {
        if let Some(paged) = self.paged {
            return self.paged_row(k, paged, row);
        }
        let Some(PackedHeads { group, head_stride, first_row }) = self.packed else {
            return k.eval(row.widen().mul_add(self.stride, self.first));
        };
        let row = k.add(row, first_row);
        let (head, row) = (k.rem(row, group), k.div(row, group));
        let (head, row) = (k.widen(head), k.widen(row));
        k.eval(head.mul_add(head_stride, row.mul_add(self.stride, self.first)))
    }
}

impl GlobalRows {
    /// The address of a row in its page. The table is read: the row must be one that the sequence has.
    fn paged_row(&self, k: &mut Builder, paged: PagedRows, row: Reg<U32>) -> Reg<U64> {
        let index = k.add(paged.first_row, row);
        let (entry, row) = paged.entry(k, index);
        let page = paged.page(k, entry);
        let page = k.widen(page);
        k.eval(row.widen().mul_add(self.stride, page.mul_add(paged.page_stride, self.first)))
    }
}

impl PagedRows {
    /// The entry of the table that has the page of a row, and the row in that page.
    pub(crate) fn entry(&self, k: &mut Builder, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let Self { page_size, is_log2, .. } = *self;
        if is_log2 {
            let entry = k.shr(index, page_size);
            let first = k.shl(entry, page_size);
            (entry, k.sub(index, first))
        } else {
            let entry = k.div(index, page_size);
            (entry, k.eval(index - entry * page_size))
        }
    }

    /// The page of an entry of the table, which must be one that the sequence has.
    pub(crate) fn page(&self, k: &mut Builder, entry: Reg<U32>) -> Reg<U32> {
        let address = k.mad_wide(entry, 4u32, self.table);
        let page = k.load_one::<U32>(address);
        k.min(page, self.last_page)
    }
}

/// One thread's share of the copies of tiles of one shape: a chunk in each of several rows, in each panel.
#[derive(Debug, Clone, Copy)]
pub struct TileCopy {
    tile: SharedTile,
    /// The first row of this thread.
    row: Reg<U32>,
    /// The chunk of this thread.
    chunk: Reg<U32>,
    /// The target of its first chunk, in stage 0.
    target: Reg<U32>,
    /// The source of its first chunk of the next tile, unless rows lie in pages.
    source: Reg<U64>,
    rows: GlobalRows,
    rows_per_step: u32,
}

impl TileCopy {
    /// Divides the tile among `threads` threads, of which this is `thread`; copies begin at the first of `rows`.
    pub fn new(
        k: &mut Builder,
        tile: SharedTile,
        rows: GlobalRows,
        base: Reg<U32>,
        thread: Reg<U32>,
        threads: u32,
    ) -> Self {
        let chunks = tile.panel_chunks();
        let row = k.shr(thread, chunks.ilog2());
        let chunk = k.and(thread, chunks - 1);
        let target = tile.chunk_address(k, base, row, chunk);
        // The table of pages is read when it is known which rows exist.
        let source = if rows.paged.is_some() {
            k.copy(rows.first)
        } else {
            let row_start = rows.row(k, row);
            k.mad_wide(chunk, CHUNK_BYTES, row_start)
        };
        let mut rows = rows;
        if let Some(paged) = &mut rows.paged {
            paged.first_row = k.copy(paged.first_row);
        }
        Self { tile, row, chunk, target, source, rows, rows_per_step: threads / chunks }
    }

    /// Starts the copy of the next tile into the stage at `stage` bytes. Its first `rows_left` rows exist, which may be
    /// none or more than the tile has; the others become zero, like columns that do not exist.
    pub fn start(&self, k: &mut Builder, stage: Option<Reg<U32>>, rows_left: Reg<U32>) {
        self.start_from(k, stage, None, rows_left);
    }

    /// Starts the copy with the first `skipped` rows, which may be fewer than none, zeroed as well.
    pub fn start_from(&self, k: &mut Builder, stage: Option<Reg<U32>>, skipped: Option<Reg<S32>>, rows_left: Reg<U32>) {
        let target = match stage {
            Some(stage) => k.add(self.target, stage),
            None => self.target,
        };
        let step_bytes = k.mul(self.rows.stride, u64::from(self.rows_per_step));
        let mut source = self.source;
        let targets = self.targets(k, target);
        let sources = self.paged_sources(k, rows_left);
        for step in 0..self.tile.rows.div_ceil(self.rows_per_step) {
            let row = k.add(self.row, step * self.rows_per_step);
            if self.rows.packed.is_some() && step > 0 {
                let row_start = self.rows.row(k, row);
                source = k.mad_wide(self.chunk, CHUNK_BYTES, row_start);
            }
            if let Some(sources) = &sources {
                source = sources[step as usize];
            }
            let target = targets[step as usize % targets.len()];
            let exists = k.section("tail", |k| {
                let exists = k.compare(Compare::Lt, row, rows_left);
                skipped.map_or(exists, |skipped| k.eval(exists & row.signed().ge(skipped)))
            });
            let inside = self.overhangs(step).then(|| k.compare(Compare::Lt, row, self.tile.rows));
            for panel in 0..self.rows.columns.div_ceil(self.tile.panel_columns()) {
                let exists = self.columns_exist(k, panel, exists);
                let below = step * self.rows_per_step * self.tile.row_bytes();
                let to = SharedAddress::from(target).plus((below + self.tile.panel_step(panel)) as i32);
                let beside = panel * self.tile.panel_columns() * self.tile.element.bytes;
                let from = GlobalAddress::from(source).plus(beside as i32);
                match self.rows.vec_bytes {
                    HALF_BYTES => copy_by_halves(k, to, from, exists, inside),
                    _ => self.cp_async(k, to, from, exists, inside),
                }
            }
            if sources.is_none() {
                source = k.add(source, step_bytes);
            }
        }
    }

    /// The sources of all steps where rows lie in pages: all entries of the table are asked for before the first is
    /// waited for. Rows past the last read where the last lies.
    fn paged_sources(&self, k: &mut Builder, rows_left: Reg<U32>) -> Option<Vec<Reg<U64>>> {
        let paged = self.rows.paged?;
        let rows_left = if paged.may_be_none { k.max(rows_left, 1u32) } else { rows_left };
        let last = k.sub(rows_left, 1u32);
        let steps = 0..self.tile.rows.div_ceil(self.rows_per_step);
        let sources = steps.map(|step| {
            let row = k.eval((self.row + step * self.rows_per_step).min(last));
            let row_start = self.rows.row(k, row);
            k.mad_wide(self.chunk, CHUNK_BYTES, row_start)
        });
        Some(sources.collect())
    }

    /// Targets of the chunks of even and of odd steps, before the rows of the steps are added: few threads copy fewer
    /// rows at a time than the period of the swizzle.
    fn targets(&self, k: &mut Builder, target: Reg<U32>) -> Vec<Reg<U32>> {
        match self.tile.layout {
            SharedLayout::Swizzled if self.rows_per_step < PATTERN_ROWS => {
                vec![target, k.section("swizzle", |k| k.xor(target, self.rows_per_step * CHUNK_BYTES))]
            }
            _ => vec![target],
        }
    }

    /// True if this step of a tile with fewer rows than threads would write past its end.
    const fn overhangs(&self, step: u32) -> bool {
        (step + 1) * self.rows_per_step > self.tile.rows
    }

    /// True if this thread's chunk of a panel exists in a row that exists if `row_exists`.
    fn columns_exist(&self, k: &mut Builder, panel: u32, row_exists: Reg<Pred>) -> Reg<Pred> {
        let first = panel * self.tile.panel_columns();
        if first + self.tile.panel_columns() <= self.rows.columns {
            return row_exists;
        }
        let chunks = self.rows.columns.saturating_sub(first) / self.tile.element.chunk_elements();
        k.eval(self.chunk.lt(chunks) & row_exists)
    }

    fn cp_async(
        &self,
        k: &mut Builder,
        to: SharedAddress,
        from: GlobalAddress,
        exists: Reg<Pred>,
        inside: Option<Reg<Pred>>,
    ) {
        let written = self.rows.vec_bytes;
        let read = k.select(exists, written, 0u32);
        let copy = |k: &mut Builder| {
            for offset in (0..CHUNK_BYTES).step_by(written as usize) {
                let bytes = CopyBytes::ZeroFill { written, read };
                k.copy_async(to.plus(offset as i32), from.plus(offset as i32), bytes, L2Prefetch::Bytes128);
            }
        };
        match inside {
            Some(inside) => k.when(inside, copy),
            None => copy(k),
        }
    }

    /// Moves the source to the next tile.
    pub fn advance(&self, k: &mut Builder) {
        if let Some(paged) = self.rows.paged {
            k.add_to(paged.first_row, self.tile.rows);
            return;
        }
        let tile_bytes = k.mul(self.rows.stride, u64::from(self.tile.rows));
        k.add_to(self.source, tile_bytes);
    }
}

/// Copies a chunk of rows that begin at odd multiples of 16 bits: through registers, since no `cp.async` is that narrow.
fn copy_by_halves(
    k: &mut Builder,
    to: SharedAddress,
    from: GlobalAddress,
    exists: Reg<Pred>,
    inside: Option<Reg<Pred>>,
) {
    // The bits pass through as they are, whichever type the elements have.
    let words: Vec<_> = (0..CHUNK_BYTES)
        .step_by(2 * HALF_BYTES as usize)
        .map(|word| {
            let zero = k.copy::<U32>(0u32);
            let zero = k.reinterpret::<U32, F16x2>(zero);
            let (low, high) = k.unpack(zero);
            for (index, half) in [low, high].into_iter().enumerate() {
                let offset = word + index as u32 * HALF_BYTES;
                k.when(exists, |k| k.load_into(half, from.plus(offset as i32)));
            }
            let word = k.pack::<F16x2>(low, high);
            k.reinterpret::<F16x2, U32>(word)
        })
        .collect();
    match inside {
        Some(inside) => k.when(inside, |k| k.store_shared(to, &words)),
        None => k.store_shared(to, &words),
    }
}
