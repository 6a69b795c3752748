//! Memory between pages that cannot be touched.

use std::ffi::{c_int, c_void};

unsafe extern "C" {
    fn mmap(
        address: *mut c_void,
        bytes: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn munmap(address: *mut c_void, bytes: usize) -> c_int;
    fn mprotect(address: *mut c_void, bytes: usize, protection: c_int) -> c_int;
}

const PROT_NONE: c_int = 0;
const PROT_READ: c_int = 1;
const PROT_WRITE: c_int = 2;
const MAP_PRIVATE: c_int = 0x02;
const MAP_ANONYMOUS: c_int = 0x20;
const MAP_NORESERVE: c_int = 0x4000;
const PAGE: usize = 1 << 16;

/// Which end of the bytes meets a page that cannot be touched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Side {
    Front,
    Back,
}

/// Bytes with a page that cannot be touched on one side, and less than a page away on the other.
pub(crate) struct Pages {
    mapping: *mut u8,
    mapped: usize,
    start: *mut u8,
    len: usize,
}

impl Pages {
    /// Zeros. Memory is taken when it is first touched, so that many gigabytes of which a few are used cost little.
    pub(crate) fn new(len: usize, side: Side) -> Self {
        let inside = len.next_multiple_of(PAGE);
        let mapped = inside + 2 * PAGE;
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        // SAFETY: a new mapping, anywhere.
        let mapping = unsafe { mmap(std::ptr::null_mut(), mapped, PROT_NONE, flags, -1, 0) }.cast::<u8>();
        assert_ne!(mapping.addr(), usize::MAX, "no address space for {mapped} bytes");
        let first = mapping.wrapping_add(PAGE);
        let start = if side == Side::Front { first } else { first.wrapping_add(inside - len) };
        let pages = Self { mapping, mapped, start, len };
        pages.protect(PROT_READ | PROT_WRITE);
        pages
    }

    fn protect(&self, protection: c_int) {
        let inside = self.mapped - 2 * PAGE;
        if inside > 0 {
            // SAFETY: pages of this mapping alone.
            let status = unsafe { mprotect(self.mapping.wrapping_add(PAGE).cast(), inside, protection) };
            assert_eq!(status, 0, "mprotect failed");
        }
    }

    /// From now on a write is a fault.
    pub(crate) fn forbid_writing(&self) {
        self.protect(PROT_READ);
    }

    pub(crate) fn allow_writing(&self) {
        self.protect(PROT_READ | PROT_WRITE);
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the bytes are mapped and can be read, and are written only through `bytes_mut` or by the library, in a
        // call that ends before this one begins.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// The caller has allowed writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.start
    }

    /// Address and length, for a struct of the ABI.
    pub(crate) fn range(&self) -> (*const u8, usize) {
        (self.start, self.len)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping of this value, which nobody uses any more.
        unsafe { munmap(self.mapping.cast(), self.mapped) };
    }
}
