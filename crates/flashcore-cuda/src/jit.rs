//! JIT: PTX to machine code, by the compiler in the driver.
//!
//! The driver's linker returns machine code, which can be cached. But it compiles parts that may be linked with others,
//! and ignores `setmaxnreg` in them; then `wgmma`s have too few registers and wait for each other: a third of the
//! speed, measured on an H200. Kernels that reallocate registers are compiled as the driver loads them instead, and the
//! cache keeps their PTX; the driver has a cache of its own, in which it finds code that it has compiled with the same
//! options.

use core::ffi::{c_uint, c_void};
use std::ffi::CString;
use std::ptr;
use std::slice;
use std::time::{Duration, Instant};

use flashcore_ir::Arch;

use crate::context::{Context, cuda};
use crate::error::{CudaError, code};
use crate::jit_log::JitReport;
use crate::sys::{CUjit_option as Option_, CUjit_target, CUjitInputType, CUlinkState, CUmodule};

/// Buffer size for the compiler's log. The driver cuts off more.
const LOG_BYTES: usize = 64 * 1024;

/// Compiler options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JitOptions {
    /// From 0 to 4, the driver's default.
    pub optimisation: u32,
    /// True to give profilers the lines of the PTX.
    pub line_info: bool,
}

impl Default for JitOptions {
    fn default() -> Self {
        Self { optimisation: 4, line_info: false }
    }
}

impl JitOptions {
    /// All options in one text, part of the cache key of compiled kernels.
    pub fn fingerprint(&self) -> String {
        let Self { optimisation, line_info } = self;
        format!("optimisation={optimisation} line_info={line_info}")
    }
}

/// A compiled kernel, as a file for the GPU, or as PTX that the driver has compiled once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cubin {
    /// The file.
    pub bytes: Vec<u8>,
    /// The compiler's log.
    pub log: String,
    /// The resource usage in the log, if it has one.
    pub report: Option<JitReport>,
    /// The compile time.
    pub elapsed: Duration,
}

/// Compiles PTX, generated for `arch`, for the device of the context. `kernel` is its name in messages.
pub fn compile(
    context: &Context,
    kernel: &str,
    ptx: &str,
    arch: Arch,
    options: JitOptions,
) -> Result<Cubin, CudaError> {
    let start = Instant::now();
    let _current = context.enter()?;
    if ptx.contains(WHOLE_ONLY) {
        let loaded = load_whole(context, ptx, options);
        return finished(loaded, kernel, ptx, start);
    }
    let mut linked = link(context, ptx, kernel, options, Target::of(arch));
    // A driver that does not take the target by name may take it from the context, which is the default.
    if let Err(Refused { error: CudaError::Call(failure), log }) = &linked
        && Target::of(arch) != Target::Context
        && log.is_empty()
        && matches!(failure.code, code::INVALID_VALUE | code::NO_BINARY_FOR_GPU)
    {
        linked = link(context, ptx, kernel, options, Target::Context);
    }
    finished(linked, kernel, ptx, start)
}

/// The instruction that is honoured in whole programs only.
const WHOLE_ONLY: &str = "setmaxnreg.";

fn finished(linked: Result<Linked, Refused>, kernel: &str, ptx: &str, start: Instant) -> Result<Cubin, CudaError> {
    match linked {
        Ok(Linked { bytes, log }) => {
            let report = JitReport::parse(&log);
            Ok(Cubin { bytes, log, report, elapsed: start.elapsed() })
        }
        Err(Refused { error: CudaError::Call(failure), log }) if !failure.is_sticky() => Err(CudaError::Compile {
            kernel: kernel.to_owned(),
            failure,
            log: flashcore_ptx::log::with_lines(&log, ptx),
        }),
        Err(Refused { error, .. }) => Err(error),
    }
}

/// The target that the linker compiles for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// The device of the context: the default, which is not passed.
    Context,
    /// An architecture with instructions that the plain one of the device lacks.
    Accelerated(CUjit_target),
}

impl Target {
    const fn of(arch: Arch) -> Self {
        match arch {
            Arch::Sm90a => Self::Accelerated(CUjit_target::CU_TARGET_COMPUTE_90A),
            Arch::Sm80 | Arch::Sm86 | Arch::Sm89 | Arch::Sm90 | Arch::Sm120 => Self::Context,
        }
    }
}

struct Linked {
    bytes: Vec<u8>,
    log: String,
}

struct Refused {
    error: CudaError,
    /// The error log, if there is one.
    log: String,
}

fn link(context: &Context, ptx: &str, name: &str, options: JitOptions, target: Target) -> Result<Linked, Refused> {
    let mut link = Link::new(options, target);
    let linked = link.run(context, ptx, name);
    linked
        .map(|bytes| Linked { bytes, log: link.info.text() })
        .map_err(|error| Refused { error, log: link.errors.text() })
}

/// Compiles PTX as a whole program, by loading it. Returns the PTX.
fn load_whole(context: &Context, ptx: &str, options: JitOptions) -> Result<Linked, Refused> {
    let mut link = Link::new(options, Target::Context);
    let text = [ptx.as_bytes(), b"\0"].concat();
    let refused = |error, link: &Link| Refused { error, log: link.errors.text() };
    let raw = link.load(context, &text).map_err(|error| refused(error, &link))?;
    // SAFETY: loaded just now, and nobody has a function of it.
    unsafe { cuda!(context, cuModuleUnload(raw)) }.map_err(|error| refused(error, &link))?;
    Ok(Linked { bytes: text, log: link.info.text() })
}

/// Loads the result of [`compile`] if it is PTX: with the options it was compiled with, so that the driver finds it in
/// its cache. The text ends with a zero.
pub(crate) fn load_text(context: &Context, text: &[u8], options: JitOptions) -> Option<Result<CUmodule, CudaError>> {
    let is_text = !text.starts_with(b"\x7fELF") && text.ends_with(b"\0");
    let is_whole = || text.windows(WHOLE_ONLY.len()).any(|part| part == WHOLE_ONLY.as_bytes());
    (is_text && is_whole()).then(|| Link::new(options, Target::Context).load(context, text))
}

/// A call of the linker, with everything that must stay in place until its end.
struct Link {
    info: Log,
    errors: Log,
    keys: Vec<Option_>,
    /// Each value is a number or an address in the form of a pointer, as `cuLinkCreate` takes them. The driver writes
    /// the lengths of the logs into theirs.
    values: Vec<*mut c_void>,
}

impl Link {
    fn new(options: JitOptions, target: Target) -> Self {
        let mut info = Log::new();
        let mut errors = Log::new();
        let number = ptr::without_provenance_mut::<c_void>;
        let mut all = vec![
            (Option_::CU_JIT_INFO_LOG_BUFFER, info.0.as_mut_ptr().cast()),
            (Option_::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, number(LOG_BYTES)),
            (Option_::CU_JIT_ERROR_LOG_BUFFER, errors.0.as_mut_ptr().cast()),
            (Option_::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, number(LOG_BYTES)),
            (Option_::CU_JIT_LOG_VERBOSE, number(1)),
            (Option_::CU_JIT_OPTIMIZATION_LEVEL, number(options.optimisation as usize)),
        ];
        if options.line_info {
            all.push((Option_::CU_JIT_GENERATE_LINE_INFO, number(1)));
        }
        if let Target::Accelerated(target) = target {
            all.push((Option_::CU_JIT_TARGET, number(target as usize)));
        }
        let (keys, values) = all.into_iter().unzip();
        Self { info, errors, keys, values }
    }

    fn load(&mut self, context: &Context, text: &[u8]) -> Result<CUmodule, CudaError> {
        let mut raw = ptr::null_mut();
        let (count, keys, values) = (self.keys.len() as c_uint, self.keys.as_mut_ptr(), self.values.as_mut_ptr());
        // SAFETY: keys and values are of the given number and each value is what its key asks for. The driver reads the
        // text, which ends with a zero, during the call, and writes one handle.
        unsafe { cuda!(context, cuModuleLoadDataEx(&raw mut raw, text.as_ptr().cast(), count, keys, values)) }?;
        Ok(raw)
    }

    fn run(&mut self, context: &Context, ptx: &str, name: &str) -> Result<Vec<u8>, CudaError> {
        let mut raw = ptr::null_mut();
        let (keys, values) = (self.keys.as_mut_ptr(), self.values.as_mut_ptr());
        // SAFETY: keys and values are of the given number and each value is what its key asks for. They and the logs live
        // in `self`, longer than the linker.
        unsafe { cuda!(context, cuLinkCreate_v2(self.keys.len() as c_uint, keys, values, &raw mut raw)) }?;
        let linker = Linker { context, raw };
        // PTX is a text with a terminating zero, which counts. A zero inside is an error of the compiler, not of ours.
        let text = [ptx.as_bytes(), b"\0"].concat();
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the driver reads the text and the name during the call; there are no options of this input.
        unsafe {
            cuda!(
                context,
                cuLinkAddData_v2(
                    linker.raw,
                    CUjitInputType::CU_JIT_INPUT_PTX,
                    text.as_ptr().cast_mut().cast(),
                    text.len(),
                    name.as_ptr(),
                    0,
                    ptr::null_mut(),
                    ptr::null_mut(),
                )
            )
        }?;
        let (mut bytes, mut length) = (ptr::null_mut(), 0);
        // SAFETY: the function writes an address and a length.
        unsafe { cuda!(context, cuLinkComplete(linker.raw, &raw mut bytes, &raw mut length)) }?;
        // SAFETY: the file belongs to the linker, which lives until the end of this function; it is copied here.
        Ok(unsafe { slice::from_raw_parts(bytes.cast::<u8>(), length) }.to_vec())
    }
}

/// The driver's linker.
struct Linker<'context> {
    context: &'context Context,
    raw: CUlinkState,
}

impl Drop for Linker<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `cuLinkCreate` and used by nobody else any more.
        self.context.destroy(|context| unsafe { cuda!(context, cuLinkDestroy(self.raw)) });
    }
}

/// A buffer for text that the driver writes, zero after its end.
struct Log(Vec<u8>);

impl Log {
    fn new() -> Self {
        Self(vec![0; LOG_BYTES])
    }

    fn text(&self) -> String {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(LOG_BYTES);
        String::from_utf8_lossy(&self.0[..end]).trim().to_owned()
    }
}
