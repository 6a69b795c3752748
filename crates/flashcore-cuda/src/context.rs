//! The primary context of a device, which every call here needs, and which a sticky error ends.

use core::ffi::{c_uint, c_void};
use core::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use crate::api::{Api, Code};
use crate::device::Device;
use crate::error::{CudaError, Failure, code};
use crate::sys::{CUcontext, CUlimit, CUstreamCaptureMode};

/// Calls a function of the driver in a context: `cuda!(context, cuMemFree_v2(address))`, in an `unsafe` block.
/// Evaluates to `Result<(), CudaError>`.
macro_rules! cuda {
    ($context:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $context.check(stringify!($function), ($context.api().$function)($($argument),*))
    };
}
pub(crate) use cuda;

/// The primary context of a device, which everything in a process that uses the device shares: `PyTorch`, candle, cudarc
/// and the runtime library too, so their pointers and streams can be used here.
///
/// It is retained as long as a `Context` or anything made from one exists, and made current around each call, on the
/// thread of the call; the previously current context is restored afterwards. Clones are the same context, and so are
/// two contexts of one device.
///
/// An illegal address or another error that ends all work on the device *poisons* it: the call that met the error
/// reports it, every later one returns [`CudaError::Poisoned`] without calling the driver.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    device: Device,
    raw: CUcontext,
    /// The first sticky error, after which nothing works.
    poison: OnceLock<Failure>,
    /// The first error of a destructor.
    drop_failure: OnceLock<Failure>,
    last_launch: Mutex<Option<Arc<str>>>,
}

// SAFETY: the driver's functions may be called from any thread that has the context current, and it is made current
// around each call; the handle itself is never dereferenced. The other fields are Send and Sync by themselves.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver synchronises concurrent calls on one context.
unsafe impl Sync for Inner {}

impl Context {
    /// The primary context of a device. The driver takes some hundred milliseconds to create the first of a process.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let driver = device.driver;
        let mut contexts = driver.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(inner) = contexts.get(&device.raw).and_then(Weak::upgrade) {
            return Ok(Self { inner });
        }
        let mut raw = ptr::null_mut();
        // SAFETY: the function writes one handle; it is released when the last user of `Inner` is gone.
        let answer = unsafe { (driver.api.cuDevicePrimaryCtxRetain)(&raw mut raw, device.raw) };
        driver.check("cuDevicePrimaryCtxRetain", answer)?;
        let inner = Arc::new(Inner {
            device: device.clone(),
            raw,
            poison: OnceLock::new(),
            drop_failure: OnceLock::new(),
            last_launch: Mutex::new(None),
        });
        contexts.insert(device.raw, Arc::downgrade(&inner));
        Ok(Self { inner })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The driver's handle, a `CUcontext`, for use with other libraries. Valid as long as this context.
    pub fn raw(&self) -> *mut c_void {
        self.inner.raw.cast()
    }

    /// Waits until everything launched on the device in this context has finished.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.enter()?;
        // SAFETY: the function takes nothing.
        unsafe { cuda!(self, cuCtxSynchronize()) }
    }

    /// Makes a call that would invalidate a graph capture and is not part of the graph: an allocation, a wait.
    pub(crate) fn relax_capture<T>(&self, call: impl FnOnce(&Self) -> Result<T, CudaError>) -> Result<T, CudaError> {
        let _current = self.enter()?;
        // As a number: a newer driver may have more modes than the enum.
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        let mode: *mut CUstreamCaptureMode = (&raw mut mode).cast();
        // SAFETY: the function exchanges an enum with the size of the integer.
        unsafe { cuda!(self, cuThreadExchangeStreamCaptureMode(mode)) }?;
        let result = call(self);
        // SAFETY: as above; this restores the previous mode.
        unsafe { cuda!(self, cuThreadExchangeStreamCaptureMode(mode)) }?;
        result
    }

    /// Free and total bytes of memory.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the function writes two sizes.
        unsafe { cuda!(self, cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
        Ok((free, total))
    }

    /// Sets aside as much of L2 for persisting accesses as the device allows, and returns how much; 0 where it cannot.
    pub fn keep_in_l2(&self) -> Result<usize, CudaError> {
        let bytes = self.inner.device.attributes.persisting_l2_bytes as usize;
        if bytes > 0 {
            let _current = self.enter()?;
            // SAFETY: the function takes two numbers.
            unsafe { cuda!(self, cuCtxSetLimit(CUlimit::CU_LIMIT_PERSISTING_L2_CACHE_SIZE, bytes)) }?;
        }
        Ok(bytes)
    }

    /// The sticky error that ended all work here, if one did.
    pub fn poison(&self) -> Option<&Failure> {
        self.inner.poison.get()
    }

    /// The first error of a destructor, which cannot return it: it neither panics nor hides it.
    pub fn drop_failure(&self) -> Option<&Failure> {
        self.inner.drop_failure.get()
    }

    pub(crate) fn api(&self) -> &Api {
        &self.inner.device.driver.api
    }

    /// Makes the context current on this thread until the guard is dropped, unless it is poisoned.
    pub(crate) fn enter(&self) -> Result<Current<'_>, CudaError> {
        if let Some(first) = self.inner.poison.get() {
            return Err(CudaError::Poisoned { first: Box::new(first.clone()) });
        }
        let mut current = ptr::null_mut();
        // SAFETY: the function writes one handle.
        unsafe { cuda!(self, cuCtxGetCurrent(&raw mut current)) }?;
        let pushed = current != self.inner.raw;
        if pushed {
            // SAFETY: the handle is retained as long as `self`.
            unsafe { cuda!(self, cuCtxPushCurrent_v2(self.inner.raw)) }?;
        }
        Ok(Current { context: self, pushed, thread: PhantomData })
    }

    /// Runs `work` with this context current, so that each call in it need not make it so.
    pub fn while_current<R>(&self, work: impl FnOnce() -> Result<R, CudaError>) -> Result<R, CudaError> {
        let _current = self.enter()?;
        work()
    }

    /// Ok or the failure, which poisons the context if it is sticky.
    pub(crate) fn check(&self, call: &'static str, answer: Code) -> Result<(), CudaError> {
        if answer == code::SUCCESS { Ok(()) } else { Err(self.failure(call, answer).into()) }
    }

    /// Runs the destructor of an object of this context. Objects of a poisoned context are gone already.
    pub(crate) fn destroy(&self, destructor: impl FnOnce(&Self) -> Result<(), CudaError>) {
        match self.enter().and_then(|_current| destructor(self)) {
            // The process is exiting and the driver with it.
            Err(CudaError::Call(failure)) if failure.code != code::DEINITIALIZED => {
                // The first one is kept; the others are its consequences.
                let _ = self.inner.drop_failure.set(*failure);
            }
            _ => {}
        }
    }

    /// Records the kernel that later errors may come from.
    pub(crate) fn launched(&self, kernel: &Arc<str>) {
        let mut last = self.inner.last_launch.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|last| !Arc::ptr_eq(last, kernel)) {
            *last = Some(kernel.clone());
        }
    }

    fn failure(&self, call: &'static str, answer: Code) -> Failure {
        let mut failure = self.inner.device.driver.failure(call, answer);
        failure.last_launch.clone_from(&self.inner.last_launch.lock().unwrap_or_else(PoisonError::into_inner));
        if failure.is_sticky() {
            // The first one is the cause; the others are its consequences.
            let _ = self.inner.poison.set(failure.clone());
        }
        failure
    }
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.inner.raw == other.inner.raw
    }
}

impl Eq for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Context")
            .field("device", &self.inner.device.name)
            .field("poison", &self.inner.poison.get())
            .finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once when this was made. The answer is ignored: the context has no user left here.
        let _ = unsafe { (self.device.driver.api.cuDevicePrimaryCtxRelease_v2)(self.device.raw) };
    }
}

/// A guard: while it exists, the context is current on this thread.
pub(crate) struct Current<'context> {
    context: &'context Context,
    pushed: bool,
    /// The stack of contexts belongs to the thread, so the guard stays on it.
    thread: PhantomData<*mut ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: the function writes one handle; the context that it pops is the one that `enter` pushed.
            let popping = unsafe { cuda!(self.context, cuCtxPopCurrent_v2(&raw mut popped)) };
            if let Err(CudaError::Call(failure)) = popping {
                let _ = self.context.inner.drop_failure.set(*failure);
            }
        }
    }
}
