//! CUDA driver backend: runs flashcore kernels on NVIDIA GPUs, with nothing installed but the driver.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use flashcore_cuda::cache::{CacheOptions, KernelCache};
//! use flashcore_cuda::{Context, DeviceBuffer, Driver, JitOptions, Kernels, Stream};
//! use flashcore_ir::types::{U32, U64};
//! use flashcore_ir::{Argument, Builder};
//!
//! let device = Driver::load()?.device(0)?;
//! let context = Context::new(&device)?;
//! let stream = Stream::new(&context)?;
//! let kernels = Kernels::new(&context, Arc::new(KernelCache::open(CacheOptions::default())), JitOptions::default());
//!
//! let mut k = Builder::new("answer", 32);
//! let target = k.parameter::<U64>("target");
//! let answer = k.copy::<U32>(42);
//! k.store_one(target, answer);
//! let verified = k.finish().verify(device.arch()?).expect("a kernel that keeps the rules");
//!
//! let kernel = kernels.load(&verified)?; // compiled once per machine, loaded once per process
//! let target = DeviceBuffer::uninitialised(&context, 4)?;
//! let launch = kernel.prepare([1, 1, 1], &[Argument::U64(target.address())])?; // checked here, launched often
//! // SAFETY: the buffer is as large as the kernel takes it to be, and nobody else uses it.
//! unsafe { kernel.launch(&stream, &launch) }?;
//! let bytes = target.to_host(&stream)?;
//! # Ok::<(), flashcore_cuda::CudaError>(())
//! ```
//!
//! # The path of a kernel
//!
//! A verified kernel is printed as PTX; the text, the options, the GPU, the driver and the version of this crate make
//! its [key](cache::Key). The [cache] has the machine code by key, in memory or on disk. On a miss the driver's linker
//! compiles it, and its log is kept: registers and spills of a kernel, complaints about its text. The code is loaded,
//! its needs are checked against the device, and each call is one `cuLaunchKernelEx`, with arguments that are ready.
//!
//! | module | is |
//! |---|---|
//! | `api`, `sys` | the functions of the driver, found at run time, and their types |
//! | `driver`, `device`, [`arch`] | version, GPUs, and the kernels that they run |
//! | `context` | the device's primary context, shared with every other library; which one is current; what poisons it |
//! | `stream`, `event`, `graph` | order, time, and replay |
//! | `workspace` | scratch memory between the kernels of a launch, one for each stream, shared by all plans |
//! | `memory`, `l2` | device memory, and a cold cache for measurements |
//! | `jit`, `jit_log` | PTX to machine code, and the compiler's log |
//! | `module`, `arguments`, `launch` | loaded code, and the call of it |
//! | `kernel`, `kernels` | all of the above in order |
//! | [`cache`] | compiled kernels that outlive the process, independent of CUDA |
//!
//! # Invariants
//!
//! * Nothing here panics because a machine lacks something. No driver, an old one, no GPU, a full one, a kernel that
//!   does not compile, an illegal address: each is a [`CudaError`] that says what to do.
//! * Every call of the driver is checked, and its error names the call. A sticky error is reported once; later calls
//!   say that it happened, and do not call the driver.
//! * A destructor neither panics nor hides an error: [`Context::drop_failure`] has it.
//! * A launch allocates nothing, waits for nothing, and can be recorded in a graph.
//! * `unsafe` to call are exactly the functions that rely on the caller for addresses or handles: [`Kernel::launch`],
//!   [`run_owned`], [`Graph::launch`], [`Stream::from_raw`]. A copy from or to the host's memory waits until it is
//!   done, and is refused while a graph is captured.
//! * Every thread that calls has its own current context back afterwards.
//! * Nothing of the CUDA toolkit is needed, at build time or at run time.
//! * No test needs a GPU: the table of the driver's functions is data, and tests fill it with their own.

#![expect(unsafe_code, reason = "the driver is a C library; every block says why it may be called so")]

mod api;
pub mod arch;
mod arguments;
pub mod cache;
mod context;
mod device;
#[cfg(test)]
mod device_tests;
mod driver;
mod error;
mod event;
#[cfg(test)]
mod fake;
mod graph;
mod jit;
mod jit_log;
mod kernel;
mod kernels;
mod l2;
mod launch;
mod memory;
mod module;
mod run_owned;
mod stream;
mod sys;
mod tensor_map;
pub mod tuning;
mod workspace;

pub use arguments::MOST_ARGUMENTS;
pub use context::Context;
pub use device::{Attributes, Device, Uuid};
pub use driver::{Driver, DriverVersion, OLDEST_DRIVER};
pub use error::{CudaError, Failure};
pub use event::Event;
pub use graph::Graph;
pub use jit::{Cubin, JitOptions, compile};
pub use jit_log::JitReport;
pub use kernel::{Kernel, Launch, Timings};
pub use kernels::Kernels;
pub use l2::L2Flush;
pub use launch::{L2Range, LaunchShape};
pub use memory::{DeviceBuffer, fill_device, read_device};
pub use module::{Function, Module, Usage};
pub use run_owned::run_owned;
pub use stream::Stream;
pub use tensor_map::EncodedTensorMap;
pub use workspace::{Workspace, Workspaces};
