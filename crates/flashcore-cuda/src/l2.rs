//! A cold L2 cache, for measurements that need one.

use crate::context::Context;
use crate::error::CudaError;
use crate::memory::DeviceBuffer;
use crate::stream::Stream;

/// Size of the flush relative to the cache, so that no old line stays, whatever the replacement policy.
const TIMES: usize = 2;

/// Memory that is written to evict everything else from the L2 cache.
#[derive(Debug)]
pub struct L2Flush {
    buffer: DeviceBuffer,
}

impl L2Flush {
    /// Allocates twice the size of the cache.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let bytes = TIMES * context.device().attributes.l2_bytes as usize;
        Ok(Self { buffer: DeviceBuffer::uninitialised(context, bytes)? })
    }

    /// Bytes that one flush writes.
    pub const fn bytes(&self) -> usize {
        self.buffer.len()
    }

    /// Enqueues a write that evicts everything else from the cache. Can be captured in a graph.
    pub fn flush(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.buffer.fill(stream, 0)
    }
}
