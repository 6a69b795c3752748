//! Machine code on a device, and the functions in it.

use core::ffi::c_int;
use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use crate::context::{Context, cuda};
use crate::error::CudaError;
use crate::jit::{self, JitOptions};
use crate::sys::{CUfunction, CUfunction_attribute as Attribute, CUmodule};

/// Machine code loaded on a device. Clones are the same module; functions keep it loaded.
#[derive(Debug, Clone)]
pub struct Module {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    context: Context,
    raw: CUmodule,
}

// SAFETY: the driver's functions on a module may be called from any thread; the handle is never dereferenced.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver synchronises concurrent calls.
unsafe impl Sync for Inner {}

/// What a function uses, in the driver's own account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: spills and arrays.
    pub local_bytes: u32,
    /// Bytes of shared memory of a CTA whose size the module fixes.
    pub static_shared_bytes: u32,
    /// Threads that a CTA can have at most.
    pub most_threads: u32,
    /// The architecture it was compiled for, 90 for 9.0.
    pub binary_version: u32,
}

/// A function of a module.
#[derive(Debug, Clone)]
pub struct Function {
    module: Module,
    raw: CUfunction,
}

// SAFETY: the driver's functions on a function may be called from any thread; the handle is never dereferenced and is
// valid as long as its module, which is kept.
unsafe impl Send for Function {}
// SAFETY: as above; the driver synchronises concurrent calls.
unsafe impl Sync for Function {}

impl Module {
    /// Loads what was [compiled](crate::compile) with these options.
    pub fn load(context: &Context, compiled: &[u8], options: JitOptions) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let raw = match jit::load_text(context, compiled, options) {
            Some(loaded) => loaded?,
            None => load_cubin(context, compiled)?,
        };
        Ok(Self { inner: Arc::new(Inner { context: context.clone(), raw }) })
    }

    /// A function by its name.
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        let context = &self.inner.context;
        let _current = context.enter()?;
        let mut raw = ptr::null_mut();
        // A name with a zero inside is found by nobody, like the empty one.
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the function reads the name and writes one handle, which is valid as long as the module.
        unsafe { cuda!(context, cuModuleGetFunction(&raw mut raw, self.inner.raw, name.as_ptr())) }?;
        Ok(Function { module: self.clone(), raw })
    }
}

fn load_cubin(context: &Context, cubin: &[u8]) -> Result<CUmodule, CudaError> {
    let mut raw = ptr::null_mut();
    let image = aligned(cubin);
    // SAFETY: the function reads the image during the call and writes one handle. The driver takes the length from the
    // header; that the bytes are a whole image is the word of its own linker, kept by the checksum of the cache.
    unsafe { cuda!(context, cuModuleLoadData(&raw mut raw, image.as_ptr().cast())) }?;
    Ok(raw)
}

/// The bytes from an address on that the headers in them can be read from, and zeros behind them for what is shorter
/// than a header.
fn aligned(bytes: &[u8]) -> Vec<u64> {
    const HEADER_WORDS: usize = 8;
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_ne_bytes(word)
    });
    words.chain([0; HEADER_WORDS]).collect()
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: loaded by `Module::load`; nobody has a function of it any more. Launches that are still executing are
        // finished by the driver first.
        self.context.destroy(|context| unsafe { cuda!(context, cuModuleUnload(self.raw)) });
    }
}

impl Function {
    /// The context of its module.
    pub fn context(&self) -> &Context {
        &self.module.inner.context
    }

    pub(crate) const fn raw(&self) -> CUfunction {
        self.raw
    }

    /// What it uses.
    pub fn usage(&self) -> Result<Usage, CudaError> {
        Ok(Usage {
            registers: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_shared_bytes: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            most_threads: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            binary_version: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION)?,
        })
    }

    /// Allows launches with up to this many bytes of shared memory. Without it 48 KiB are the limit.
    pub fn allow_shared_bytes(&self, bytes: u32) -> Result<(), CudaError> {
        let context = self.context();
        let _current = context.enter()?;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the handle is valid as long as `self`.
        unsafe { cuda!(context, cuFuncSetAttribute(self.raw, attribute, bytes as c_int)) }
    }

    /// How many CTAs of so many threads with so much shared memory one SM holds at a time.
    pub fn ctas_per_sm(&self, threads: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        let context = self.context();
        let _current = context.enter()?;
        let mut ctas = 0;
        // SAFETY: the function writes one integer.
        unsafe {
            cuda!(
                context,
                cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &raw mut ctas,
                    self.raw,
                    threads as c_int,
                    shared_bytes as usize
                )
            )
        }?;
        Ok(ctas as u32)
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32, CudaError> {
        let context = self.context();
        let _current = context.enter()?;
        let mut value = 0;
        // SAFETY: the function writes one integer; the handle is valid as long as `self`.
        unsafe { cuda!(context, cuFuncGetAttribute(&raw mut value, attribute, self.raw)) }?;
        Ok(value as u32)
    }
}
