//! The caller's stream.

use std::ffi::c_void;

use flashcore_cuda::{Context, Stream};

/// A CUDA stream of the caller, on which a launch is put.
///
/// A [`Stream`] of this crate's [`cuda`](crate::cuda) module, or a raw `CUstream`, whichever crate or language it comes
/// from: `stream.cu_stream()` of `cudarc`, `torch.cuda.current_stream().cuda_stream` of Python. A raw null is the default
/// stream of the device's primary context.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum StreamRef<'a> {
    /// A stream of this crate.
    Owned(&'a Stream),
    /// A `CUstream` of somebody else.
    Raw(*mut c_void),
}

impl StreamRef<'_> {
    /// Calls `launch` with the stream.
    ///
    /// # Safety
    ///
    /// A raw stream is a stream of `context`, or null for the default stream.
    pub(crate) unsafe fn with<R>(self, context: &Context, launch: impl FnOnce(&Stream) -> R) -> R {
        match self {
            Self::Owned(stream) => launch(stream),
            Self::Raw(raw) => {
                // SAFETY: the contract of this function; it is used during this call only.
                let stream = unsafe { Stream::from_raw(context, raw.cast()) };
                launch(&stream)
            }
        }
    }
}

impl<'a> From<&'a Stream> for StreamRef<'a> {
    fn from(stream: &'a Stream) -> Self {
        Self::Owned(stream)
    }
}

impl<T> From<*mut T> for StreamRef<'_> {
    fn from(stream: *mut T) -> Self {
        Self::Raw(stream.cast())
    }
}
