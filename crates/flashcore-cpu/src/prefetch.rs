//! Asking for memory before it is needed.

/// Asks for bytes that will be read soon. Does nothing where the processor cannot be asked.
pub(crate) fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        /// Bytes that come to a cache together.
        const LINE: usize = 64;
        for line in bytes.chunks(LINE) {
            // SAFETY: every processor of this architecture has it, and it has no effect but on caches.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}
