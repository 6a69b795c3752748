//! CUDA graphs: work captured once and launched many times, without the cost of each single launch.

use core::ptr;

use crate::context::{Context, cuda};
use crate::error::CudaError;
use crate::stream::Stream;
use crate::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};

/// Captured work, ready to be launched.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    executable: CUgraphExec,
    nodes: usize,
}

// SAFETY: the driver's functions on an executable graph may be called from any thread, and the handle is never
// dereferenced. They may not be called from two threads at once, so a graph is Send and not Sync.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the work that `work` enqueues on the stream, instead of executing it.
    ///
    /// Only work of this stream, by this thread, is captured; other threads may keep using the device. If `work` fails
    /// or panics, the capture is discarded and the stream is as it was before.
    pub fn capture<E: From<CudaError>>(
        stream: &Stream,
        work: impl FnOnce(&Stream) -> Result<(), E>,
    ) -> Result<Self, E> {
        let context = stream.context();
        let capture = Capture::begin(stream)?;
        work(stream)?;
        let graph = capture.end()?;
        Ok(graph.instantiate(context)?)
    }

    /// The number of captured operations.
    pub const fn nodes(&self) -> usize {
        self.nodes
    }

    /// Enqueues all of it on a stream.
    ///
    /// # Safety
    ///
    /// The contract of each captured launch holds now, and until this launch has finished: the addresses and the
    /// kernels that were captured are still valid, and nobody else uses the memory in a way that conflicts.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        // SAFETY: both handles are valid as long as their borrows; what the graph refers to is valid by the contract.
        unsafe { cuda!(self.context, cuGraphLaunch(self.executable, stream.handle())) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `instantiate` and used by nobody else any more. A launch that is still executing is finished by
        // the driver.
        self.context.destroy(|context| unsafe { cuda!(context, cuGraphExecDestroy(self.executable)) });
    }
}

/// A stream in capture.
struct Capture<'stream> {
    stream: &'stream Stream,
    recording: bool,
}

impl<'stream> Capture<'stream> {
    fn begin(stream: &'stream Stream) -> Result<Self, CudaError> {
        let context = stream.context();
        let _current = context.enter()?;
        // Calls of other threads at the same time do not affect this capture.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the handle is valid as long as the borrow.
        unsafe { cuda!(context, cuStreamBeginCapture_v2(stream.handle(), mode)) }?;
        Ok(Self { stream, recording: true })
    }

    fn end(mut self) -> Result<Template, CudaError> {
        self.recording = false;
        end(self.stream)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.recording {
            // The stream must leave capture mode. The error that led here is already being returned.
            let _ = end(self.stream);
        }
    }
}

fn end(stream: &Stream) -> Result<Template, CudaError> {
    let context = stream.context();
    let _current = context.enter()?;
    let mut graph = ptr::null_mut();
    // SAFETY: the function writes one handle, null if the capture was invalidated; it is destroyed with `Template`.
    let ended = unsafe { cuda!(context, cuStreamEndCapture(stream.handle(), &raw mut graph)) };
    let template = Template { context: context.clone(), graph };
    ended.map(|()| template)
}

/// The captured graph, before it is made executable.
struct Template {
    context: Context,
    graph: CUgraph,
}

impl Template {
    fn instantiate(&self, context: &Context) -> Result<Graph, CudaError> {
        let _current = context.enter()?;
        let mut nodes = 0;
        // SAFETY: without a place for the nodes the function writes their number alone.
        unsafe { cuda!(context, cuGraphGetNodes(self.graph, ptr::null_mut(), &raw mut nodes)) }?;
        let mut executable = ptr::null_mut();
        // SAFETY: the function writes one handle, destroyed with `Graph`; it does not refer to the template.
        unsafe { cuda!(context, cuGraphInstantiateWithFlags(&raw mut executable, self.graph, 0)) }?;
        Ok(Graph { context: context.clone(), executable, nodes })
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: made by `cuStreamEndCapture` and used by nobody else any more.
            self.context.destroy(|context| unsafe { cuda!(context, cuGraphDestroy(self.graph)) });
        }
    }
}
