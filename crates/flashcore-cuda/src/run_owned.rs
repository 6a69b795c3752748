//! One launch on buffers of its own.

use flashcore_ir::Argument;

use crate::error::CudaError;
use crate::kernel::Kernel;
use crate::memory::DeviceBuffer;
use crate::stream::Stream;

/// Launches a kernel once and returns its outputs. Its arguments are the addresses of the inputs, those of the outputs,
/// which are zeroed before, and the arguments that `trailing` makes of these addresses, in this order. For suites of
/// small kernels: it allocates, copies and waits.
///
/// The buffers, and the stream that orders all work on them, belong to this call, which returns when the kernel has
/// finished; so one point of the contract of [`Kernel::launch`] is left to the caller.
///
/// # Safety
///
/// With these arguments the kernel reads and writes nothing outside the buffers whose addresses it is given.
pub unsafe fn run_owned(
    kernel: &Kernel,
    grid: [u32; 3],
    inputs: &[Vec<u8>],
    output_lengths: &[usize],
    trailing: impl FnOnce(&[u64]) -> Vec<Argument>,
) -> Result<Vec<Vec<u8>>, CudaError> {
    let stream = Stream::new(kernel.context())?;
    let inputs: Vec<DeviceBuffer> =
        inputs.iter().map(|bytes| DeviceBuffer::from_host(&stream, bytes)).collect::<Result<_, _>>()?;
    let outputs: Vec<DeviceBuffer> =
        output_lengths.iter().map(|&bytes| DeviceBuffer::filled(&stream, bytes, 0)).collect::<Result<_, _>>()?;
    let addresses: Vec<u64> = inputs.iter().chain(&outputs).map(DeviceBuffer::address).collect();
    let mut arguments: Vec<Argument> = addresses.iter().copied().map(Argument::U64).collect();
    arguments.extend(trailing(&addresses));
    let launch = kernel.prepare(grid, &arguments)?;
    // SAFETY: prepared by this kernel, on a stream of its context. The buffers are known to nobody else and outlive the
    // wait below; that the kernel stays inside them is the contract of this function.
    unsafe { kernel.launch(&stream, &launch) }?;
    stream.synchronize()?;
    outputs.iter().map(|output| output.to_host(&stream)).collect()
}
