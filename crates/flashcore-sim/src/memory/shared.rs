//! The shared memory of a CTA (smem).

use crate::clocks::{Access, Clocks};
use crate::execute::matrix_descriptor::CHUNK_BYTES;
use crate::fault::Nearest;
use crate::memory::{Reason, Refusal};
use crate::race::{CELL_BYTES, Cells, Claim, Shadow, Stamp, cells};
use crate::state::mbarrier::Mbarriers;

/// The address at which shared memory begins: not 0, so that a kernel that forgets to add the base faults, and a
/// multiple of the 1024 bytes that the widest swizzle needs.
pub(crate) const SHARED_BASE: u32 = 1024;

/// Bytes of a chunk, the unit in which `wgmma` reads.
const CHUNK: usize = CHUNK_BYTES as usize;

/// The bytes of a CTA and their history.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    bytes: Vec<u8>,
    shadow: Shadow,
    /// For each chunk of 16 bytes, the number of warps with `wgmma`s in flight that read it, and the last of them.
    /// Empty without `wgmma`.
    product_readers: Vec<(u32, Stamp)>,
    pub(crate) mbarriers: Mbarriers,
    /// Registers per thread that warps of the CTA have given back, summed over warps.
    pub(crate) free_registers: u32,
    /// True once its CTA has ended.
    pub(crate) has_ended: bool,
}

impl SharedMemory {
    pub(crate) fn new(bytes: u32, warps: usize) -> Self {
        Self {
            bytes: vec![0xff; bytes as usize],
            shadow: Shadow::new(u64::from(bytes), warps),
            product_readers: Vec::new(),
            mbarriers: Mbarriers::default(),
            free_registers: 0,
            has_ended: false,
        }
    }

    fn offset(&self, address: u32, bytes: u32) -> Result<usize, Refusal> {
        let length = self.bytes.len() as u64;
        let (address, bytes, base) = (u64::from(address), u64::from(bytes), u64::from(SHARED_BASE));
        if address >= base && address - base + bytes <= length {
            if let Some(barrier) = self.mbarriers.overlapping(address as u32, bytes as u32) {
                return Err(Refusal { address, reason: Reason::Mbarrier(barrier.state()) });
            }
            return Ok((address - base) as usize);
        }
        let offset = address as i64 - base as i64;
        let nearest = Nearest { buffer: "shared memory".to_owned(), offset, length };
        Err(Refusal { address, reason: Reason::OutOfBounds(Box::new(nearest)) })
    }

    fn initialised(&self, offset: usize, bytes: u32) -> Result<(), Refusal> {
        match self.shadow.unwritten(cells(offset as u64, u64::from(bytes))) {
            None => Ok(()),
            Some(cell) => {
                Err(Refusal { address: u64::from(SHARED_BASE) + cell as u64 * 2, reason: Reason::Uninitialised })
            }
        }
    }

    /// Reads.
    pub(crate) fn read(&mut self, address: u32, bytes: u32, access: &Access<'_>) -> Result<&[u8], Refusal> {
        let offset = self.offset(address, bytes)?;
        let range = cells(offset as u64, u64::from(bytes));
        // A race or a missing wait explains more than the absence of a value.
        self.shadow.read(range, access).map_err(|conflict| Refusal::new(conflict, SHARED_BASE.into()))?;
        self.initialised(offset, bytes)?;
        Ok(&self.bytes[offset..offset + bytes as usize])
    }

    /// Refuses a write to bytes that a `wgmma` in flight reads.
    fn no_product_reads(&self, offset: usize, bytes: u32) -> Result<(), Refusal> {
        if self.product_readers.is_empty() {
            return Ok(());
        }
        let chunks = offset / CHUNK..(offset + bytes as usize).div_ceil(CHUNK);
        let Some(chunk) = chunks.into_iter().find(|&chunk| self.product_readers[chunk].0 > 0) else { return Ok(()) };
        let address = u64::from(SHARED_BASE) + (chunk * CHUNK).max(offset) as u64;
        Err(Refusal { address, reason: Reason::Draining(self.product_readers[chunk].1) })
    }

    /// Starts to read a chunk of 16 bytes for a `wgmma`.
    pub(crate) fn start_product(&mut self, address: u32, access: &Access<'_>, clocks: &Clocks) -> Result<(), Refusal> {
        let offset = self.offset(address, CHUNK as u32)?;
        let range = cells(offset as u64, CHUNK as u64);
        self.shadow.read(range.clone(), access).map_err(|conflict| Refusal::new(conflict, SHARED_BASE.into()))?;
        self.initialised(offset, CHUNK as u32)?;
        self.must_be_fenced(range, access, clocks)?;
        if self.product_readers.is_empty() {
            self.product_readers.resize(self.bytes.len().div_ceil(CHUNK), (0, Stamp::NONE));
        }
        let (count, last) = &mut self.product_readers[offset / CHUNK];
        *count += 1;
        *last = access.stamp;
        Ok(())
    }

    /// The bytes of a chunk that a `wgmma` in flight reads.
    pub(crate) fn chunk(&self, address: u32) -> [u8; CHUNK] {
        let offset = (address - SHARED_BASE) as usize;
        core::array::from_fn(|index| self.bytes[offset + index])
    }

    /// Ends the read of a chunk by a `wgmma`.
    pub(crate) fn finish_product(&mut self, address: u32, access: &Access<'_>) {
        let offset = (address - SHARED_BASE) as usize;
        self.product_readers[offset / CHUNK].0 -= 1;
        self.shadow.drained(cells(offset as u64, CHUNK as u64), access);
    }

    /// Writes.
    pub(crate) fn write(&mut self, address: u32, data: &[u8], access: &Access<'_>) -> Result<(), Refusal> {
        let offset = self.offset(address, data.len() as u32)?;
        self.no_product_reads(offset, data.len() as u32)?;
        let range = cells(offset as u64, data.len() as u64);
        self.shadow.write(range, access).map_err(|conflict| Refusal::new(conflict, SHARED_BASE.into()))?;
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
        Ok(())
    }

    /// The bytes for an atomic operation.
    pub(crate) fn atomic(&mut self, address: u32, bytes: u32, access: &Access<'_>) -> Result<&mut [u8], Refusal> {
        let offset = self.offset(address, bytes)?;
        self.no_product_reads(offset, bytes)?;
        let range = cells(offset as u64, u64::from(bytes));
        self.shadow.atomic(range, access).map_err(|conflict| Refusal::new(conflict, SHARED_BASE.into()))?;
        self.initialised(offset, bytes)?;
        Ok(&mut self.bytes[offset..offset + bytes as usize])
    }

    /// Starts a copy that will write `bytes` at `address`.
    pub(crate) fn start_fill(&mut self, address: u32, bytes: u32, access: &Access<'_>) -> Result<(), Refusal> {
        let offset = self.offset(address, bytes)?;
        self.no_product_reads(offset, bytes)?;
        let range = cells(offset as u64, u64::from(bytes));
        let allowed = self.shadow.may_write(range.clone(), access);
        allowed.map_err(|conflict| Refusal::new(conflict, SHARED_BASE.into()))?;
        self.shadow.claim(range, Claim::Fill, access.stamp);
        Ok(())
    }

    /// Writes the data of the copy that started with `started`.
    pub(crate) fn finish_fill(&mut self, address: u32, data: &[u8], started: Stamp, access: &Access<'_>) {
        let offset = (address - SHARED_BASE) as usize;
        let range = cells(offset as u64, data.len() as u64);
        self.shadow.end_claim(range.clone(), Claim::Fill, started);
        self.shadow.wrote(range, access.stamp);
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
    }

    /// Starts a TMA load that will write `bytes` at `address`. Writes of the generic proxy there must be fenced, or
    /// they might take effect later.
    pub(crate) fn start_tma_load(
        &mut self,
        address: u32,
        bytes: u32,
        access: &Access<'_>,
        clocks: &Clocks,
    ) -> Result<(), Refusal> {
        let offset = self.offset(address, bytes)?;
        self.no_product_reads(offset, bytes)?;
        let range = cells(offset as u64, u64::from(bytes));
        let allowed = self.shadow.may_write(range.clone(), access);
        allowed.map_err(|conflict| Refusal::new(conflict, SHARED_BASE.into()))?;
        self.must_be_fenced(range.clone(), access, clocks)?;
        self.shadow.claim(range, Claim::Fill, access.stamp);
        Ok(())
    }

    /// Writes the data of the TMA load that started with `started`, with the stamp `written`.
    pub(crate) fn finish_tma_load(&mut self, address: u32, data: &[u8], started: Stamp, written: Stamp) {
        let offset = (address - SHARED_BASE) as usize;
        let range = cells(offset as u64, data.len() as u64);
        self.shadow.end_claim(range.clone(), Claim::Fill, started);
        self.shadow.wrote(range, written);
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
    }

    /// Refuses an access of the async proxy to bytes that the generic proxy has written without a fence.
    fn must_be_fenced(&self, range: Cells, access: &Access<'_>, clocks: &Clocks) -> Result<(), Refusal> {
        let unfenced = |cell: usize| {
            let write = self.shadow.last_write(cell);
            write != Stamp::NONE && !clocks.is_fenced(write, access)
        };
        let Some(cell) = range.clone().find(|&cell| unfenced(cell)) else { return Ok(()) };
        let reason = Reason::Unfenced(self.shadow.last_write(cell));
        Err(Refusal { address: u64::from(SHARED_BASE) + cell as u64 * CELL_BYTES, reason })
    }

    /// Starts a TMA store that will read `bytes` at `address`.
    pub(crate) fn start_drain(
        &mut self,
        address: u32,
        bytes: u32,
        access: &Access<'_>,
        clocks: &Clocks,
    ) -> Result<&[u8], Refusal> {
        let offset = self.offset(address, bytes)?;
        let range = cells(offset as u64, u64::from(bytes));
        let base = u64::from(SHARED_BASE);
        self.shadow.read(range.clone(), access).map_err(|conflict| Refusal::new(conflict, base))?;
        self.initialised(offset, bytes)?;
        self.must_be_fenced(range.clone(), access, clocks)?;
        self.shadow.claim(range, Claim::Drain, access.stamp);
        Ok(&self.bytes[offset..offset + bytes as usize])
    }

    /// Ends the read of the TMA store that started with `started`.
    pub(crate) fn finish_drain(&mut self, address: u32, bytes: u32, started: Stamp, access: &Access<'_>) {
        let range = cells(u64::from(address - SHARED_BASE), u64::from(bytes));
        self.shadow.end_claim(range.clone(), Claim::Drain, started);
        self.shadow.drained(range, access);
    }
}
