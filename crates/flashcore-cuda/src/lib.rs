//! Runs flashcore kernels on NVIDIA GPUs, with nothing installed but the driver.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use flashcore_cuda::cache::{CacheOptions, KernelCache};
//! use flashcore_cuda::{Context, DeviceBuffer, Driver, JitOptions, Kernels, Stream};
//! use flashcore_kernels::{Buffers, Config, Plan};
//! use flashcore_problem::{DType, Inputs, Problem};
//!
//! let device = Driver::load()?.device(0)?;
//! let context = Context::new(&device)?;
//! let stream = Stream::new(&context)?;
//! let kernels = Kernels::new(&context, Arc::new(KernelCache::open(CacheOptions::default())), JitOptions::default());
//!
//! let problem = Problem::new(1, 8, 512, 64, DType::F16);
//! let inputs = Inputs::random(&problem, 1);
//! let query = DeviceBuffer::from_host(&stream, &inputs.query.data)?;
//! let key = DeviceBuffer::from_host(&stream, &inputs.key.data)?;
//! let value = DeviceBuffer::from_host(&stream, &inputs.value.data)?;
//! let output = DeviceBuffer::uninitialised(&context, inputs.query.data.len())?;
//!
//! let plan = Plan::new(&problem, Config::ampere(), device.arch()?).expect("the kernel fits the problem");
//! let kernel = kernels.load(&plan.kernel)?; // compiled once per machine, loaded once per process
//! let buffers = Buffers {
//!     lse: 0,
//!     ..Buffers::new(query.address(), key.address(), value.address(), output.address())
//! };
//! let launch = kernel.prepare(plan.grid, &plan.arguments(buffers))?; // checked here, launched often
//! // SAFETY: the buffers are as large as the problem says, and nobody else uses them.
//! unsafe { kernel.launch(&stream, &launch) }?;
//! let bytes = output.to_host(&stream)?;
//! # Ok::<(), flashcore_cuda::CudaError>(())
//! ```
//!
//! # The way of a kernel
//!
//! A verified kernel is printed as PTX; the text, the options, the GPU, the driver and the version of this crate make
//! its [key](cache::Key). Under it lies the machine code in the [cache], in memory or on disk. What is not there is
//! compiled by the driver's linker, whose log is kept: registers and spills of a kernel, complaints about its text. The
//! code is loaded, its needs are held against what the device has, and what is left for each call is one
//! `cuLaunchKernelEx`, with arguments that lie ready.
//!
//! | module | is |
//! |---|---|
//! | `api`, `sys` | the functions of the driver, found at run time, and their types |
//! | `driver`, `device`, [`arch`] | what is there: version, GPUs, which kernels they run |
//! | `context` | the device's primary context, shared with every other library; who is current; what poisons it |
//! | `stream`, `event`, `graph` | order, time, and replay |
//! | `workspace` | scratch memory between the kernels of a launch, one for each stream |
//! | `memory`, `l2` | bytes on the device, and a cold cache for measurements |
//! | `jit`, `jit_log` | PTX to machine code, and what the compiler said |
//! | `module`, `arguments`, `launch` | loaded code, and the call of it |
//! | `kernel`, `kernels` | all of the above in their order |
//! | [`cache`] | compiled kernels that outlive the process, without a word about CUDA |
//!
//! # Invariants
//!
//! * Nothing here panics for what a machine lacks. No driver, an old one, no GPU, a full one, a kernel that does not
//!   compile, an illegal address: each is a [`CudaError`] that says what to do.
//! * Every call of the driver is checked, and its error names the call. An error that ends all work is reported once;
//!   later calls say that it happened, and do not ask the driver.
//! * A destructor neither panics nor hides an error: [`Context::drop_failure`] has it.
//! * A launch allocates nothing, waits for nothing, and can be recorded in a graph.
//! * `unsafe` to call are exactly the functions that take a caller's word for addresses or handles: [`Kernel::launch`],
//!   [`run_owned`], [`Graph::launch`], [`Stream::from_raw`]. What copies from or to the host's memory waits until it is
//!   done, and is refused while a graph is recorded.
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
pub use memory::DeviceBuffer;
pub use module::{Function, Module, Usage};
pub use run_owned::run_owned;
pub use stream::Stream;
pub use tensor_map::EncodedTensorMap;
pub use workspace::Workspaces;
