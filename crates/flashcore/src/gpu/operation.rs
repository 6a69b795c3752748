//! Operations beside attention: one kernel, whose first arguments are the words of a launch.

use std::sync::Arc;

use flashcore_cuda::{CudaError, DeviceBuffer, Kernel, Launch, Stream};
use flashcore_ir::Argument;
use flashcore_kernels::KernelKey;
use flashcore_kernels::cache::QUANTIZE_WORDS;

use super::{Gpu, SelfCheckPolicy};
use crate::Reason;

/// A loaded kernel with all its arguments but the words of a launch.
#[derive(Clone)]
pub(super) struct Operation {
    kernel: Arc<Kernel>,
    launch: Launch,
    /// For tensors of the host.
    pub(super) stream: Stream,
}

impl Operation {
    /// The kernel with the arguments of a plan.
    pub(super) fn new(kernel: Arc<Kernel>, template: &[Argument], stream: Stream) -> Result<Self, CudaError> {
        let launch = kernel.prepare([1, 1, 1], template)?;
        Ok(Self { kernel, launch, stream })
    }

    /// Puts the kernel on a stream. Allocates nothing and waits for nothing.
    ///
    /// # Safety
    ///
    /// The words are what the kernel takes them for: addresses of device memory that holds the tensors, which nobody else
    /// uses in a way that conflicts until the launch has finished. The stream belongs to the kernel's context.
    pub(super) unsafe fn launch(&self, stream: &Stream, grid: [u32; 3], words: &[u64]) -> Result<(), CudaError> {
        // SAFETY: the contract of this function.
        unsafe { self.launch_quantized(stream, grid, None, words) }
    }

    /// [`launch`](Self::launch) of a kernel that may quantise, whose first words are then those of scales.
    ///
    /// # Safety
    ///
    /// As for [`launch`](Self::launch).
    pub(super) unsafe fn launch_quantized(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        scales: Option<[u64; QUANTIZE_WORDS]>,
        words: &[u64],
    ) -> Result<(), CudaError> {
        let mut launch = self.launch;
        launch.set_grid(grid)?;
        let mut first = 0;
        if let Some(scales) = scales {
            launch.set_words(0, &scales);
            first = QUANTIZE_WORDS;
        }
        launch.set_words(first, words);
        // SAFETY: prepared by this kernel; the rest is the contract of this function.
        stream.context().while_current(|| unsafe { self.kernel.launch(stream, &launch) })
    }
}

impl Gpu {
    /// A kernel ready to be launched, after `complaint` has tried it if it is new to the driver: nothing, or what is wrong
    /// with the result of a small problem.
    pub(super) fn operation(
        &self,
        key: KernelKey,
        template: &[Argument],
        complaint: impl FnOnce() -> Result<Option<String>, CudaError>,
    ) -> Result<Operation, Vec<Reason>> {
        let one = |error: CudaError| vec![Reason::Cuda(error)];
        let (kernel, _) = self.load(key).map_err(one)?;
        self.trust(&kernel, SelfCheckPolicy::Environment, || match complaint() {
            Ok(complaint) => Ok(complaint),
            // The kernel did something that ends all work here. The next process shall not try again.
            Err(CudaError::Call(failure)) if failure.is_sticky() => Ok(Some(failure.to_string())),
            Err(error) => Err(one(error)),
        })?;
        Operation::new(kernel, template, self.stream.clone()).map_err(one)
    }
}

/// Host tensors on the GPU for the time of a call.
pub(super) struct Uploads<'a> {
    stream: &'a Stream,
    buffers: Vec<DeviceBuffer>,
}

impl<'a> Uploads<'a> {
    pub(super) const fn new(stream: &'a Stream) -> Self {
        Self { stream, buffers: Vec::new() }
    }

    /// Copies bytes to the GPU, and returns their address; 0 for none.
    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<u64, CudaError> {
        let buffer = DeviceBuffer::from_host(self.stream, bytes)?;
        let address = buffer.address();
        self.buffers.push(buffer);
        Ok(address)
    }

    /// Copies what lies at the address of an upload back, after everything on the stream before.
    pub(super) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        let buffer = self.buffers.iter().find(|buffer| buffer.address() == address && !bytes.is_empty());
        buffer.map_or(Ok(()), |buffer| buffer.copy_to_host(self.stream, 0, bytes))
    }
}
