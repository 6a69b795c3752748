//! Events: points in the work of a stream, and the time between two of them.

use core::ffi::c_uint;
use std::ptr;

use crate::context::{Context, cuda};
use crate::error::{CudaError, code};
use crate::stream::Stream;
use crate::sys::{CUevent, CUevent_flags};

/// A point in the work of a stream, with the time at which the device passed it.
#[derive(Debug)]
pub struct Event {
    context: Context,
    raw: CUevent,
}

// SAFETY: the driver's functions on an event may be called from any thread; the handle is never dereferenced.
unsafe impl Send for Event {}
// SAFETY: as above; the driver synchronises concurrent calls on one event.
unsafe impl Sync for Event {}

impl Event {
    /// A new event with timing.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the function writes one handle, destroyed with the event.
        unsafe { cuda!(context, cuEventCreate(&raw mut raw, CUevent_flags::CU_EVENT_DEFAULT as c_uint)) }?;
        Ok(Self { context: context.clone(), raw })
    }

    /// Records it on a stream: it happens when the work before it has finished.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        // SAFETY: both handles are valid as long as their borrows; the driver keeps what it needs of them.
        unsafe { cuda!(self.context, cuEventRecord(self.raw, stream.handle())) }
    }

    /// True if it has happened. An event that was never recorded has.
    pub fn has_happened(&self) -> Result<bool, CudaError> {
        let _current = self.context.enter()?;
        // SAFETY: the handle is valid as long as `self`.
        match unsafe { (self.context.api().cuEventQuery)(self.raw) } {
            code::NOT_READY => Ok(false),
            answer => self.context.check("cuEventQuery", answer).map(|()| true),
        }
    }

    /// Waits until it has happened.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        // SAFETY: the handle is valid as long as `self`.
        unsafe { cuda!(self.context, cuEventSynchronize(self.raw)) }
    }

    /// Milliseconds on the device from `earlier` to this event, both of which must have happened. The clock has a
    /// resolution of half a microsecond.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32, CudaError> {
        let _current = self.context.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: the function writes one float; both handles are valid as long as their borrows.
        unsafe { cuda!(self.context, cuEventElapsedTime(&raw mut milliseconds, earlier.raw, self.raw)) }?;
        Ok(milliseconds)
    }

    pub(crate) const fn raw(&self) -> CUevent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `Event::new` and used by nobody else any more. One that has not happened yet is destroyed by
        // the driver when it has.
        self.context.destroy(|context| unsafe { cuda!(context, cuEventDestroy_v2(self.raw)) });
    }
}
