//! A kernel on a device, ready to be launched.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use flashcore_ir::{Arch, Argument, Parameter, TensorMap, VerifiedKernel};

use crate::arguments::Arguments;
use crate::cache::{Entry, Key, SelfCheck, Source};
use crate::context::Context;
use crate::driver::DriverVersion;
use crate::error::CudaError;
use crate::jit::JitOptions;
use crate::jit_log::JitReport;
use crate::launch::{self, L2Range, LaunchShape};
use crate::module::{Function, Module, Usage};
use crate::stream::Stream;

/// A kernel on a device. Made by [`Kernels`](crate::Kernels).
#[derive(Debug)]
pub struct Kernel {
    function: Function,
    name: Arc<str>,
    arch: Arch,
    parameters: Vec<Parameter>,
    threads: u32,
    shared_bytes: u32,
    usage: Usage,
    log: String,
    key: Key,
    source: Source,
    timings: Timings,
    self_check: RwLock<SelfCheck>,
    /// True if the kernel waits for the preceding kernel on the stream by itself (PDL), and the driver lets it start
    /// early.
    overlaps_previous: bool,
}

/// The first driver that captures programmatic dependent launches (PDL) in graphs.
const OVERLAP_IN_GRAPHS: DriverVersion = DriverVersion(12_030);

/// The parts of the time to the first launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timings {
    /// Writing the PTX.
    pub print: Duration,
    /// The cache, and the compiler on a miss.
    pub compile: Duration,
    /// Loading the code on the device.
    pub load: Duration,
}

/// A checked launch: only the driver call is left to do. It can be launched any number of times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    shape: LaunchShape,
    arguments: Arguments,
}

impl Launch {
    /// The shape.
    pub const fn shape(&self) -> &LaunchShape {
        &self.shape
    }

    /// Replaces a block of arguments, from `first` on, which are all 64-bit integers or addresses.
    ///
    /// # Panics
    ///
    /// When there are more words than the launch has room for.
    pub fn set_words(&mut self, first: usize, words: &[u64]) {
        self.arguments.set_words(first, words);
    }

    /// Replaces the number of CTAs.
    pub fn set_grid(&mut self, grid: [u32; 3]) -> Result<(), CudaError> {
        let shape = LaunchShape { grid, ..self.shape };
        shape.validate()?;
        self.shape = shape;
        Ok(())
    }

    /// Asks L2 to keep a range of memory.
    pub const fn set_l2_window(&mut self, window: L2Range) {
        self.shape.l2_window = Some(window);
    }
}

impl Kernel {
    /// Loads a compiled kernel on a device and checks that it can be launched there.
    pub(crate) fn load(
        context: &Context,
        kernel: &VerifiedKernel,
        entry: &Entry,
        source: Source,
        timings: Timings,
        options: JitOptions,
    ) -> Result<Self, CudaError> {
        let module = Module::load(context, &entry.payload, options)?;
        let function = module.function(&kernel.name)?;
        let usage = function.usage()?;
        let device = context.device();
        let too_large = |what, needed, available| CudaError::TooLarge {
            kernel: kernel.name.clone(),
            what,
            needed,
            available,
            device: device.name.clone(),
        };
        let available = device.attributes.shared_bytes_per_cta.saturating_sub(usage.static_shared_bytes);
        if kernel.shared_bytes > available {
            return Err(too_large("bytes of shared memory", kernel.shared_bytes, available));
        }
        if kernel.threads > usage.most_threads {
            return Err(too_large("threads", kernel.threads, usage.most_threads));
        }
        if kernel.shared_bytes > 0 {
            function.allow_shared_bytes(kernel.shared_bytes)?;
        }
        Ok(Self {
            function,
            name: Arc::from(kernel.name.as_str()),
            arch: kernel.arch(),
            parameters: kernel.parameters.clone(),
            threads: kernel.threads,
            shared_bytes: kernel.shared_bytes,
            usage,
            log: entry.metadata.log.clone(),
            key: entry.key,
            source,
            timings,
            self_check: RwLock::new(entry.metadata.self_check.clone()),
            overlaps_previous: kernel.waits_for_previous() && device.driver().version() >= OVERLAP_IN_GRAPHS,
        })
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The architecture it was generated for.
    pub const fn arch(&self) -> Arch {
        self.arch
    }

    /// The context.
    pub fn context(&self) -> &Context {
        self.function.context()
    }

    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        self.threads
    }

    /// Bytes of shared memory of a CTA.
    pub const fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// The resource usage, in the driver's own account.
    pub const fn usage(&self) -> Usage {
        self.usage
    }

    /// The log of its compilation.
    pub fn log(&self) -> &str {
        &self.log
    }

    /// The resource usage in the compiler's log, if it has one.
    pub fn report(&self) -> Option<JitReport> {
        JitReport::parse(&self.log)
    }

    /// The key in the cache.
    pub const fn key(&self) -> Key {
        self.key
    }

    /// The origin of the code.
    pub const fn source(&self) -> Source {
        self.source
    }

    /// The parts of the time to the first launch.
    pub const fn timings(&self) -> Timings {
        self.timings
    }

    /// The verdict of the first run.
    pub fn self_check(&self) -> SelfCheck {
        self.self_check.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) const fn set_load_time(&mut self, load: Duration) {
        self.timings.load = load;
    }

    pub(crate) fn set_self_check(&self, verdict: SelfCheck) {
        *self.self_check.write().unwrap_or_else(PoisonError::into_inner) = verdict;
    }

    /// The number of CTAs that one SM holds at a time (occupancy).
    pub fn ctas_per_sm(&self) -> Result<u32, CudaError> {
        self.function.ctas_per_sm(self.threads, self.shared_bytes)
    }

    /// Checks the arguments of a launch of `grid` CTAs.
    pub fn prepare(&self, grid: [u32; 3], arguments: &[Argument]) -> Result<Launch, CudaError> {
        let shape = LaunchShape::new(grid, self.threads, self.shared_bytes);
        self.prepare_shape(LaunchShape { overlaps_previous: self.overlaps_previous, ..shape }, arguments)
    }

    /// [`prepare`](Self::prepare) with clusters, or with overlap with the preceding kernel (PDL). Threads and shared
    /// memory are those of the kernel, whatever the shape says.
    pub fn prepare_shape(&self, shape: LaunchShape, arguments: &[Argument]) -> Result<Launch, CudaError> {
        let shape = LaunchShape { threads: self.threads, shared_bytes: self.shared_bytes, ..shape };
        shape.validate()?;
        let encode = |map: &TensorMap| self.context().encode_tensor_map(map);
        Ok(Launch { shape, arguments: Arguments::new(&self.name, &self.parameters, arguments, &encode)? })
    }

    /// Replaces one argument of a launch that this kernel prepared: the address of another tensor, say.
    pub fn set_argument(&self, launch: &mut Launch, index: usize, argument: Argument) -> Result<(), CudaError> {
        let parameter = self.parameters.get(index).ok_or_else(|| CudaError::ArgumentCount {
            kernel: self.name().to_owned(),
            expected: self.parameters.len(),
            found: index + 1,
        })?;
        let encode = |map: &TensorMap| self.context().encode_tensor_map(map);
        launch.arguments.set(&self.name, parameter, index, argument, &encode)
    }

    /// Enqueues a launch that this kernel prepared on a stream, or captures it in a graph. Allocates nothing.
    ///
    /// An error of the kernel itself surfaces at a later call that waits for it, or at the next launch.
    ///
    /// # Safety
    ///
    /// * `launch` was prepared by this kernel, or by one with the same parameters.
    /// * The addresses in it are those of memory of this device that is as large as the kernel takes it to be, and stays
    ///   so until the launch has finished; in a graph, until the last launch of the graph has.
    /// * Nobody writes to what the kernel reads, and nobody uses what it writes, until it has finished.
    /// * The stream belongs to the context of the kernel.
    pub unsafe fn launch(&self, stream: &Stream, launch: &Launch) -> Result<(), CudaError> {
        self.context().launched(&self.name);
        // SAFETY: the arguments were checked against the parameters by `prepare`; the rest is the contract.
        unsafe { launch::launch(&self.function, stream, &launch.shape, &launch.arguments) }
    }
}
