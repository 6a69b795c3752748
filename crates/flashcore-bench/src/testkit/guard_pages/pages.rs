//! Pages from the operating system.

use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};

use super::fault::{self, Watched};
use super::{Edge, Label};

/// Bytes between two pages that nobody may touch, one of them directly beside the first or the last byte.
#[derive(Debug)]
pub struct GuardedBuffer {
    mapping: NonNull<u8>,
    mapping_bytes: usize,
    /// Of the mapping.
    payload: Range<usize>,
    page: usize,
    /// Ends before the mapping does.
    watched: Option<Watched>,
}

// SAFETY: the mapping is owned by this value alone and belongs to no thread.
unsafe impl Send for GuardedBuffer {}
// SAFETY: a shared buffer gives out shared slices, and nothing else.
unsafe impl Sync for GuardedBuffer {}

impl GuardedBuffer {
    /// A copy of `payload`.
    ///
    /// At [`Edge::End`] the first byte is aligned as far as the length is a multiple of the alignment.
    pub fn new(payload: &[u8], edge: Edge, label: Label) -> io::Result<Self> {
        fault::install()?;
        let page = page_size()?;
        let inside = payload.len().next_multiple_of(page);
        let mapping_bytes = inside + 2 * page;
        // SAFETY: an anonymous mapping at an address of the system's choice touches no memory that exists.
        let mapping = unsafe {
            libc::mmap(ptr::null_mut(), mapping_bytes, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANON, -1, 0)
        };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = NonNull::new(mapping.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let start = match edge {
            Edge::End => page + inside - payload.len(),
            Edge::Start => page,
        };
        let payload_at = start..start + payload.len();
        let mut buffer = Self { mapping, mapping_bytes, payload: payload_at, page, watched: None };
        buffer.protect(libc::PROT_READ | libc::PROT_WRITE)?;
        buffer.bytes_mut().copy_from_slice(payload);
        let address = mapping.addr().get();
        let absolute = |range: Range<usize>| address + range.start..address + range.end;
        buffer.watched = Watched::new(absolute(0..mapping_bytes), absolute(buffer.payload.clone()), label);
        Ok(buffer)
    }

    /// Makes writing to it a fault too.
    pub fn read_only(self) -> io::Result<ReadOnly> {
        self.protect(libc::PROT_READ)?;
        Ok(ReadOnly(self))
    }

    /// The payload.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the payload lies within the mapping and is readable and initialised; it is not written while this
        // borrow lasts, because writing takes `&mut self`.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().add(self.payload.start), self.payload.len()) }
    }

    /// The payload, to be written to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and the pages are writable: `read_only` takes the buffer away.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.as_ptr().add(self.payload.start), self.payload.len()) }
    }

    /// Changes what may be done to the pages between the outer two.
    fn protect(&self, protection: libc::c_int) -> io::Result<()> {
        let inside = self.mapping_bytes - 2 * self.page;
        if inside == 0 {
            return Ok(());
        }
        // SAFETY: these pages lie within the mapping, which is ours, and no slice of them is borrowed for writing.
        let status = unsafe { libc::mprotect(self.mapping.as_ptr().add(self.page).cast(), inside, protection) };
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for GuardedBuffer {
    fn drop(&mut self) {
        // Another buffer may be mapped here as soon as this one is not.
        self.watched = None;
        // SAFETY: the mapping is ours, whole, and nobody borrows from it any more. Failing would only leak it.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapping_bytes) };
    }
}

/// A [`GuardedBuffer`] that may be read and no more.
#[derive(Debug)]
pub struct ReadOnly(GuardedBuffer);

impl ReadOnly {
    /// The payload.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
}

fn page_size() -> io::Result<usize> {
    // SAFETY: asks for a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}
