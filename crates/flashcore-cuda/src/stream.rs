//! Streams: queues of work on a device.

use core::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use crate::context::{Context, cuda};
use crate::error::CudaError;
use crate::event::Event;
use crate::sys::{CUstream, CUstream_flags, CUstreamCaptureStatus};

/// A queue of work on a device, which executes in order. Clones are the same stream.
#[derive(Debug, Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    context: Context,
    raw: CUstream,
    owned: bool,
}

// SAFETY: the driver's functions on a stream may be called from any thread; the handle is never dereferenced.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver synchronises concurrent calls on one stream.
unsafe impl Sync for Inner {}

impl Stream {
    /// A new stream, which does not wait for the default stream.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the function writes one handle, destroyed with `Inner`.
        unsafe { cuda!(context, cuStreamCreate(&raw mut raw, CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint)) }?;
        Ok(Self { inner: Arc::new(Inner { context: context.clone(), raw, owned: true }) })
    }

    /// The default stream of the context, which libraries use unless told otherwise. It cannot be captured.
    pub fn default_of(context: &Context) -> Self {
        Self { inner: Arc::new(Inner { context: context.clone(), raw: ptr::null_mut(), owned: false }) }
    }

    /// A stream that another library owns and destroys.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of `context`, and stays one as long as the returned value, its clones or a graph made from them
    /// are used.
    pub unsafe fn from_raw(context: &Context, raw: *mut c_void) -> Self {
        Self { inner: Arc::new(Inner { context: context.clone(), raw: raw.cast(), owned: false }) }
    }

    /// The context.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The driver's handle, a `CUstream`. Valid as long as this stream.
    pub fn raw(&self) -> *mut c_void {
        self.inner.raw.cast()
    }

    pub(crate) fn handle(&self) -> CUstream {
        self.inner.raw
    }

    /// Waits until everything on it has finished. Errors of its kernels surface here.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.not_capturing("a wait for a stream")?;
        let _current = self.context().enter()?;
        // SAFETY: the handle is valid as long as `self`.
        unsafe { cuda!(self.context(), cuStreamSynchronize(self.handle())) }
    }

    /// Makes later work on it wait for an event.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        let _current = self.context().enter()?;
        // SAFETY: both handles are valid as long as their borrows; the driver keeps what it needs of the event.
        unsafe { cuda!(self.context(), cuStreamWaitEvent(self.handle(), event.raw(), 0)) }
    }

    /// True while it captures a graph instead of executing.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        // The default stream cannot be captured, and the query fails while another is.
        if self.handle().is_null() {
            return Ok(false);
        }
        let _current = self.context().enter()?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the function writes one number.
        unsafe { cuda!(self.context(), cuStreamIsCapturing(self.handle(), &raw mut status)) }?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// A number that no other stream of the process has or will have. The default stream of each thread has its own.
    /// Refused while it captures a graph.
    pub(crate) fn id(&self) -> Result<u64, CudaError> {
        // The default stream is not queried: it refuses while another stream that waits for it captures a graph.
        if self.handle().is_null() {
            return Ok(u64::MAX);
        }
        let _current = self.context().enter()?;
        let mut id = 0;
        // SAFETY: the function writes one number.
        unsafe { cuda!(self.context(), cuStreamGetId(self.handle(), &raw mut id)) }?;
        Ok(id)
    }

    /// An error while it captures a graph, for calls that would otherwise touch the host's memory when the graph is
    /// launched, or invalidate the capture.
    pub(crate) fn not_capturing(&self, call: &'static str) -> Result<(), CudaError> {
        if self.is_capturing()? { Err(CudaError::Capturing { call }) } else { Ok(()) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: made by `Stream::new` and used by nobody else any more. Work still on it is finished by the driver.
            self.context.destroy(|context| unsafe { cuda!(context, cuStreamDestroy_v2(self.raw)) });
        }
    }
}
