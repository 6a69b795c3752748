//! The kernels of a device: verified kernels are printed, looked up in the cache or compiled, and loaded.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use flashcore_ir::VerifiedKernel;

use crate::cache::{Compiled, KernelCache, Key, KeySource, Lookup, Metadata, SelfCheck, Source, Unsound};
use crate::context::Context;
use crate::error::{CudaError, code};
use crate::jit::{self, JitOptions};
use crate::kernel::{Kernel, Timings};

/// The crate version, part of the cache key of compiled kernels.
const CRATE_VERSION: &str = env!("CARGO_PKG_VERSION");

/// The kernels of one device: each is compiled once per machine and loaded once per process.
#[derive(Debug)]
pub struct Kernels {
    context: Context,
    cache: Arc<KernelCache>,
    options: JitOptions,
    loaded: Mutex<HashMap<Key, Arc<Kernel>>>,
}

impl Kernels {
    /// The kernels of a device, none loaded yet.
    pub fn new(context: &Context, cache: Arc<KernelCache>, options: JitOptions) -> Self {
        Self { context: context.clone(), cache, options, loaded: Mutex::default() }
    }

    /// The context they are loaded in.
    pub const fn context(&self) -> &Context {
        &self.context
    }

    /// The cache that they come from.
    pub const fn cache(&self) -> &Arc<KernelCache> {
        &self.cache
    }

    /// Loads a kernel: as it was loaded before, or from the cache, or compiled now.
    ///
    /// The verdict of its first run is in [`Kernel::self_check`]; the caller, who knows the oracle, runs the check and
    /// gives the verdict to [`set_verdict`](Self::set_verdict).
    pub fn load(&self, kernel: &VerifiedKernel) -> Result<Arc<Kernel>, CudaError> {
        let device = self.context.device();
        if !device.runs(kernel.arch()) {
            return Err(CudaError::WrongArch {
                kernel: kernel.name.clone(),
                arch: kernel.arch(),
                device: device.name.clone(),
                compute: device.compute,
            });
        }
        let start = Instant::now();
        let ptx = flashcore_ptx::print(kernel);
        let key = self.key(kernel, &ptx);
        let print = start.elapsed();
        if let Some(loaded) = self.loaded(key) {
            return Ok(loaded);
        }
        let kernel = match self.load_with(kernel, &ptx, key, print) {
            // The file was intact, but the driver does not take the code: it was made to deceive, or comes from another
            // machine with the same driver. Compile once more, from the source.
            Err(Refused { error: CudaError::Call(failure), source: Source::Memory | Source::Disk })
                if matches!(failure.code, code::INVALID_IMAGE | code::NO_BINARY_FOR_GPU | code::INVALID_SOURCE) =>
            {
                self.cache.discard(key, Unsound::Refused { reason: failure.to_string() });
                self.load_with(kernel, &ptx, key, print)
            }
            loaded => loaded,
        }
        .map_err(|refused| refused.error)?;
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been faster; then all use its kernel.
        Ok(loaded.entry(key).or_insert_with(|| Arc::new(kernel)).clone())
    }

    /// Stores the verdict of a first run with a kernel, in memory and on disk.
    pub fn set_verdict(&self, kernel: &Kernel, verdict: SelfCheck) {
        kernel.set_self_check(verdict.clone());
        self.cache.set_verdict(kernel.key(), verdict);
    }

    fn loaded(&self, key: Key) -> Option<Arc<Kernel>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
    }

    fn key(&self, kernel: &VerifiedKernel, ptx: &str) -> Key {
        let (major, minor) = self.context.device().compute;
        Key::of(&KeySource {
            ptx,
            options: &self.options.fingerprint(),
            // The code is for the device; the architecture it was generated for is in the PTX too.
            arch: &format!("{} on {major}.{minor}", kernel.arch()),
            driver: &self.context.device().driver().fingerprint(),
            crate_version: CRATE_VERSION,
        })
    }

    fn load_with(
        &self,
        kernel: &VerifiedKernel,
        ptx: &str,
        key: Key,
        print: std::time::Duration,
    ) -> Result<Kernel, Refused> {
        let start = Instant::now();
        let Lookup { entry, source } = self
            .cache
            .get_or_compile(key, || self.compile(kernel, ptx))
            .map_err(|error| Refused { error, source: Source::Compiled })?;
        let compile = start.elapsed();
        let start = Instant::now();
        let timings = Timings { print, compile, ..Timings::default() };
        let mut loaded = Kernel::load(&self.context, kernel, &entry, source, timings, self.options)
            .map_err(|error| Refused { error, source })?;
        loaded.set_load_time(start.elapsed());
        Ok(loaded)
    }

    fn compile(&self, kernel: &VerifiedKernel, ptx: &str) -> Result<Compiled, CudaError> {
        let cubin = jit::compile(&self.context, &kernel.name, ptx, kernel.arch(), self.options)?;
        let metadata = Metadata {
            kernel: kernel.name.clone(),
            arch: kernel.arch().to_string(),
            driver: self.context.device().driver().fingerprint(),
            log: cubin.log,
            compile_milliseconds: cubin.elapsed.as_millis() as u64,
            self_check: SelfCheck::NotRun,
        };
        Ok(Compiled { metadata, payload: cubin.bytes })
    }
}

/// An error, and the origin of the code that it is about.
struct Refused {
    error: CudaError,
    source: Source,
}
