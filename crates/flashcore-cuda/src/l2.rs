//! A cold L2 cache, for measurements that need one.

use crate::context::Context;
use crate::error::CudaError;
use crate::memory::DeviceBuffer;
use crate::stream::Stream;

/// How many times the size of the cache is written, so that nothing of before stays in it whatever it prefers to keep.
const TIMES: usize = 2;

/// Memory that is written to push everything else out of the L2 cache.
#[derive(Debug)]
pub struct L2Flush {
    buffer: DeviceBuffer,
}

impl L2Flush {
    /// Takes twice the size of the cache.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let bytes = TIMES * context.device().attributes.l2_bytes as usize;
        Ok(Self { buffer: DeviceBuffer::uninitialised(context, bytes)? })
    }

    /// Bytes that one flush writes.
    pub const fn bytes(&self) -> usize {
        self.buffer.len()
    }

    /// Puts on the stream what pushes everything else out of the cache. Can be recorded in a graph.
    pub fn flush(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.buffer.fill(stream, 0)
    }
}
