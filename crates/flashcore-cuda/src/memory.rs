//! Device memory.

use core::ffi::c_void;

use crate::context::{Context, cuda};
use crate::error::{CudaError, code};
use crate::stream::Stream;
use crate::sys::CUdeviceptr;

/// A buffer in device memory.
///
/// Dropping it frees the memory with `cuMemFree`, which first waits for the device: a kernel that still reads the
/// buffer finishes first, and so a drop costs time that a hot path does not have. A graph that refers to a freed buffer
/// must not be launched again; that is part of the contract of [`Graph::launch`](crate::Graph::launch).
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Context,
    address: CUdeviceptr,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates memory with undefined contents.
    pub fn uninitialised(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        let mut address = 0;
        // The driver has no empty allocations; an empty buffer needs none.
        if bytes > 0 {
            let _current = context.enter()?;
            // SAFETY: the function writes one address, freed with the buffer.
            let allocated = unsafe { cuda!(context, cuMemAlloc_v2(&raw mut address, bytes)) };
            allocated.map_err(|error| match error {
                CudaError::Call(failure) if failure.code == code::OUT_OF_MEMORY => out_of_memory(context, bytes),
                other => other,
            })?;
        }
        Ok(Self { context: context.clone(), address, bytes })
    }

    /// Allocates memory with these bytes.
    pub fn from_host(stream: &Stream, bytes: &[u8]) -> Result<Self, CudaError> {
        let mut buffer = Self::uninitialised(stream.context(), bytes.len())?;
        buffer.copy_from_host(stream, bytes)?;
        Ok(buffer)
    }

    /// Allocates memory filled with one byte.
    pub fn filled(stream: &Stream, bytes: usize, byte: u8) -> Result<Self, CudaError> {
        let mut buffer = Self::uninitialised(stream.context(), bytes)?;
        buffer.fill(stream, byte)?;
        Ok(buffer)
    }

    /// The address, for the arguments of a launch; 0 if it is empty. A multiple of 256.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// The size in bytes.
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// True if it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The context.
    pub const fn context(&self) -> &Context {
        &self.context
    }

    /// Copies bytes of the host to its start, in stream order, and waits for the copy.
    pub fn copy_from_host(&mut self, stream: &Stream, from: &[u8]) -> Result<(), CudaError> {
        self.check_range(0, from.len())?;
        stream.not_capturing("a copy from the host")?;
        if from.is_empty() {
            return Ok(());
        }
        let _current = self.context.enter()?;
        let source = from.as_ptr().cast::<c_void>();
        // SAFETY: source and destination have as many bytes, and the wait below ends before either borrow does.
        unsafe { cuda!(self.context, cuMemcpyHtoDAsync_v2(self.address, source, from.len(), stream.handle())) }?;
        stream.synchronize()
    }

    /// Copies its bytes from `offset` on to the host, in stream order, and waits for the copy.
    pub fn copy_to_host(&self, stream: &Stream, offset: usize, to: &mut [u8]) -> Result<(), CudaError> {
        self.check_range(offset, to.len())?;
        stream.not_capturing("a copy to the host")?;
        if to.is_empty() {
            return Ok(());
        }
        let _current = self.context.enter()?;
        let (destination, source) = (to.as_mut_ptr().cast::<c_void>(), self.address + offset as u64);
        // SAFETY: source and destination have as many bytes, and the wait below ends before either borrow does.
        unsafe { cuda!(self.context, cuMemcpyDtoHAsync_v2(destination, source, to.len(), stream.handle())) }?;
        stream.synchronize()
    }

    /// Copies all bytes to the host.
    pub fn to_host(&self, stream: &Stream) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0; self.bytes];
        self.copy_to_host(stream, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Enqueues a copy of all bytes of `from`, a buffer of the same context, to its start.
    pub fn copy_from(&mut self, stream: &Stream, from: &Self) -> Result<(), CudaError> {
        self.check_range(0, from.bytes)?;
        if from.is_empty() {
            return Ok(());
        }
        let _current = self.context.enter()?;
        // SAFETY: both buffers have the bytes; freeing either waits for the copy.
        unsafe { cuda!(self.context, cuMemcpyDtoDAsync_v2(self.address, from.address, from.bytes, stream.handle())) }
    }

    /// Enqueues a fill of all bytes with `byte`.
    pub fn fill(&mut self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        if self.is_empty() {
            return Ok(());
        }
        let _current = self.context.enter()?;
        // SAFETY: the buffer has the bytes; freeing it waits for the write.
        unsafe { cuda!(self.context, cuMemsetD8Async(self.address, byte, self.bytes, stream.handle())) }
    }

    /// Frees it now, and returns the error if that fails.
    pub fn free(mut self) -> Result<(), CudaError> {
        let address = core::mem::take(&mut self.address);
        if address == 0 {
            return Ok(());
        }
        let _current = self.context.enter()?;
        // SAFETY: allocated by this buffer, which forgets the address before.
        unsafe { cuda!(self.context, cuMemFree_v2(address)) }
    }

    fn check_range(&self, offset: usize, length: usize) -> Result<(), CudaError> {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.bytes);
        if inside { Ok(()) } else { Err(CudaError::OutOfBounds { offset, length, bytes: self.bytes }) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.address != 0 {
            // SAFETY: allocated by this buffer, and freed here at the latest.
            self.context.destroy(|context| unsafe { cuda!(context, cuMemFree_v2(self.address)) });
        }
    }
}

/// Copies device memory at an address to the host, in stream order, and waits for the copy. Refused while the stream
/// captures a graph.
///
/// # Safety
///
/// Device memory of the stream's context has as many bytes at the address as `to`, and nobody writes them meanwhile.
pub unsafe fn read_device(stream: &Stream, address: u64, to: &mut [u8]) -> Result<(), CudaError> {
    stream.not_capturing("a copy to the host")?;
    if to.is_empty() {
        return Ok(());
    }
    let context = stream.context();
    let _current = context.enter()?;
    let destination = to.as_mut_ptr().cast::<c_void>();
    // SAFETY: the caller promises the source; the destination has as many bytes, and the wait below ends before its borrow.
    unsafe { cuda!(context, cuMemcpyDtoHAsync_v2(destination, address, to.len(), stream.handle())) }?;
    stream.synchronize()
}

/// Enqueues a fill of device memory at an address with one byte.
///
/// # Safety
///
/// Device memory of the stream's context has so many bytes at the address, and nobody else uses them until the fill has
/// finished on the stream.
pub unsafe fn fill_device(stream: &Stream, address: u64, bytes: usize, byte: u8) -> Result<(), CudaError> {
    if bytes == 0 {
        return Ok(());
    }
    let context = stream.context();
    let _current = context.enter()?;
    // SAFETY: the contract of this function.
    unsafe { cuda!(context, cuMemsetD8Async(address, byte, bytes, stream.handle())) }
}

fn out_of_memory(context: &Context, bytes: usize) -> CudaError {
    let (free, total) = context.memory().unwrap_or((0, context.device().memory_bytes));
    CudaError::OutOfMemory { bytes, free, total }
}
