//! Global memory as one CTA sees it: the buffers, and the history of its own accesses to them.

use crate::clocks::Access;
use crate::fault::AccessKind;
use crate::memory::global::{BufferOffset, GlobalMemory};
use crate::memory::pages::Pages;
use crate::memory::{Reason, Refusal};
use crate::race::{CELL_BYTES, Cells, Claim, Shadow, Stamp, cells};
use crate::stream::Unfinished;

/// Bytes of global memory that share a page of history, created when first touched.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// For each buffer, the accesses to its pages.
pub(crate) type History = Vec<Pages<Box<Shadow>>>;

/// See the module.
#[derive(Debug)]
pub(crate) struct GlobalView<'m> {
    memory: &'m GlobalMemory,
    /// In a launch that overlaps with them, the launches that may still run.
    unfinished: Option<Unfinished<'m>>,
    warps: usize,
    /// For each buffer, its pages.
    pages: History,
}

/// Part of an access that lies in one page.
pub(crate) struct Piece {
    pub(crate) page: usize,
    /// In the page.
    pub(crate) cells: Cells,
    /// The address of the page.
    pub(crate) base: u64,
}

pub(crate) fn pieces(location: BufferOffset, bytes: u64) -> impl Iterator<Item = Piece> {
    let start = location.offset;
    let end = start + bytes;
    (start / PAGE_BYTES..end.div_ceil(PAGE_BYTES)).map(move |page| {
        let page_start = page * PAGE_BYTES;
        let from = start.max(page_start);
        let to = end.min(page_start + PAGE_BYTES);
        let base = GlobalMemory::address(BufferOffset { buffer: location.buffer, offset: page_start });
        Piece { page: page as usize, cells: cells(from - page_start, to - from), base }
    })
}

impl<'m> GlobalView<'m> {
    pub(crate) fn new(memory: &'m GlobalMemory, unfinished: Option<Unfinished<'m>>, warps: usize) -> Self {
        let pages = memory.lengths().map(|length| Pages::new(length.div_ceil(PAGE_BYTES) as usize));
        Self { memory, unfinished, warps, pages: pages.collect() }
    }

    /// Locates the bytes of an access, which no launch that may still run must conflict with.
    fn locate_ordered(
        &self,
        address: u64,
        bytes: u64,
        kind: AccessKind,
        access: &Access<'_>,
    ) -> Result<BufferOffset, Refusal> {
        let location = self.locate(address, bytes)?;
        let Some(unfinished) = &self.unfinished else { return Ok(location) };
        match unfinished.conflict(location, bytes, kind, access.has_waited()) {
            Some((address, overlap)) => Err(Refusal { address, reason: Reason::Overlap(Box::new(overlap)) }),
            None => Ok(location),
        }
    }

    fn locate(&self, address: u64, bytes: u64) -> Result<BufferOffset, Refusal> {
        let located = self.memory.locate(address, bytes);
        located.map_err(|nearest| Refusal { address, reason: Reason::OutOfBounds(Box::new(nearest)) })
    }

    fn shadow(&mut self, buffer: usize, page: usize) -> &mut Shadow {
        let warps = self.warps;
        self.pages[buffer].get_or_insert_with(page, || Box::new(Shadow::new(PAGE_BYTES, warps)))
    }

    /// Checks that bytes have a value: only those written before the launch or by this CTA have one. A write of another
    /// CTA is a race, whether or not it came first this time.
    fn initialised(&mut self, location: BufferOffset, bytes: u64) -> Result<(), Refusal> {
        let memory = self.memory;
        for Piece { page, cells, base } in pieces(location, bytes) {
            let first_pair = page * (PAGE_BYTES / CELL_BYTES) as usize;
            let shadow = self.shadow(location.buffer, page);
            for cell in cells {
                let written =
                    memory.was_written(location.buffer, first_pair + cell) || shadow.last_write(cell) != Stamp::NONE;
                if !written {
                    return Err(Refusal { address: base + cell as u64 * CELL_BYTES, reason: Reason::Uninitialised });
                }
            }
        }
        Ok(())
    }

    /// Reads.
    pub(crate) fn read(&mut self, address: u64, data: &mut [u8], access: &Access<'_>) -> Result<(), Refusal> {
        let bytes = data.len() as u64;
        let location = self.locate_ordered(address, bytes, AccessKind::Read, access)?;
        for Piece { page, cells, base } in pieces(location, bytes) {
            let read = self.shadow(location.buffer, page).read(cells, access);
            read.map_err(|conflict| Refusal::new(conflict, base))?;
        }
        self.initialised(location, bytes)?;
        self.memory.load(location, data);
        Ok(())
    }

    /// Refuses a read through the read-only cache of bytes that this CTA has written.
    pub(crate) fn must_be_constant(&mut self, address: u64, bytes: u64) -> Result<(), Refusal> {
        let location = self.locate(address, bytes)?;
        for Piece { page, cells, base } in pieces(location, bytes) {
            let shadow = self.shadow(location.buffer, page);
            for cell in cells {
                let written = shadow.last_write(cell);
                if written != Stamp::NONE {
                    return Err(Refusal { address: base + cell as u64 * CELL_BYTES, reason: Reason::Stale(written) });
                }
            }
        }
        Ok(())
    }

    /// Writes.
    pub(crate) fn write(&mut self, address: u64, data: &[u8], access: &Access<'_>) -> Result<(), Refusal> {
        let bytes = data.len() as u64;
        let location = self.locate_ordered(address, bytes, AccessKind::Write, access)?;
        for Piece { page, cells, base } in pieces(location, bytes) {
            let write = self.shadow(location.buffer, page).write(cells, access);
            write.map_err(|conflict| Refusal::new(conflict, base))?;
        }
        self.memory.store(location, data);
        Ok(())
    }

    /// Updates bytes atomically; `data` becomes the bytes after it.
    pub(crate) fn atomic(
        &mut self,
        address: u64,
        data: &mut [u8],
        access: &Access<'_>,
        update: impl FnOnce(&mut [u8]),
    ) -> Result<(), Refusal> {
        let bytes = data.len() as u64;
        let location = self.locate_ordered(address, bytes, AccessKind::Atomic, access)?;
        for Piece { page, cells, base } in pieces(location, bytes) {
            let atomic = self.shadow(location.buffer, page).atomic(cells, access);
            atomic.map_err(|conflict| Refusal::new(conflict, base))?;
        }
        self.initialised(location, bytes)?;
        self.memory.replace(location, data, update);
        Ok(())
    }

    /// Starts a copy that will write `bytes` at `address`.
    pub(crate) fn start_fill(&mut self, address: u64, bytes: u64, access: &Access<'_>) -> Result<(), Refusal> {
        let location = self.locate_ordered(address, bytes, AccessKind::Write, access)?;
        for Piece { page, cells, base } in pieces(location, bytes) {
            let shadow = self.shadow(location.buffer, page);
            shadow.may_write(cells.clone(), access).map_err(|conflict| Refusal::new(conflict, base))?;
            shadow.claim(cells, Claim::Fill, access.stamp);
        }
        Ok(())
    }

    /// Writes the data of the copy that started with `started`.
    pub(crate) fn finish_fill(&mut self, address: u64, data: &[u8], started: Stamp, access: &Access<'_>) {
        let bytes = data.len() as u64;
        let Ok(location) = self.memory.locate(address, bytes) else { return };
        for Piece { page, cells, .. } in pieces(location, bytes) {
            let shadow = self.shadow(location.buffer, page);
            shadow.end_claim(cells.clone(), Claim::Fill, started);
            shadow.wrote(cells, access.stamp);
        }
        self.memory.store(location, data);
    }

    /// The history of this CTA, for comparison with the others.
    pub(crate) fn into_history(self) -> History {
        self.pages
    }
}
