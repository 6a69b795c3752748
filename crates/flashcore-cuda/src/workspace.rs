//! Workspaces: scratch memory that the kernels of one launch hand to each other, one for each stream.
//!
//! A launch of several kernels (split-KV and its combine, a block-mask precompute and the kernel that reads it) keeps
//! partial results in device memory between them. Work on one stream is ordered, so launches there can share a workspace;
//! launches on two streams run at the same time and must not. So a workspace belongs to a stream, and a graph that
//! records a launch has one of its own, because it may be launched on any stream later.

use std::sync::{Mutex, PoisonError};

use crate::context::Context;
use crate::error::CudaError;
use crate::memory::DeviceBuffer;
use crate::stream::Stream;

/// The most streams with a workspace; one more takes over the least recently used one.
const MOST_STREAMS: usize = 32;

/// A workspace of the same size for each stream that launches.
///
/// A stream's is allocated when it launches for the first time: making a plan allocates nothing.
#[derive(Debug)]
pub struct Workspaces {
    context: Context,
    bytes: usize,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    /// The most recently used last.
    by_stream: Vec<(u64, DeviceBuffer)>,
    /// By graph and stream.
    by_graph: Vec<([u64; 2], DeviceBuffer)>,
}

impl Workspaces {
    /// Workspaces of so many bytes; none are needed where these are 0.
    pub fn new(context: &Context, bytes: usize) -> Self {
        Self { context: context.clone(), bytes, held: Mutex::default() }
    }

    /// Bytes of each workspace.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Calls `launch` with the address of the stream's workspace; 0 where none is needed.
    ///
    /// `launch` enqueues on the stream everything that uses the workspace. Meanwhile nobody else does: threads that
    /// launch on the same stream at the same time take turns, or their kernels would interleave.
    pub fn with<T>(&self, stream: &Stream, launch: impl FnOnce(u64) -> Result<T, CudaError>) -> Result<T, CudaError> {
        if self.bytes == 0 {
            return launch(0);
        }
        let graph = stream.capture()?;
        // A stream that captures a graph does not tell its number; its handle stays its own until the graph is done.
        let owner = if graph.is_some() { stream.handle().addr() as u64 } else { stream.id()? };
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let address = match graph {
            Some(graph) => self.of_graph(&mut held, [graph, owner])?,
            None => self.of_stream(&mut held, owner)?,
        };
        launch(address)
    }

    fn of_stream(&self, held: &mut Held, stream: u64) -> Result<u64, CudaError> {
        let Held { by_stream, .. } = held;
        let known = by_stream.iter().rposition(|(owner, _)| *owner == stream);
        let buffer = match known {
            Some(index) => by_stream.remove(index).1,
            None if by_stream.len() == MOST_STREAMS => {
                // Its last user may still run, on a stream that may not exist any more.
                self.context.relax_capture(Context::synchronize)?;
                by_stream.remove(0).1
            }
            None => self.allocate()?,
        };
        let address = buffer.address();
        by_stream.push((stream, buffer));
        Ok(address)
    }

    /// A workspace that no other launch has: the graph may run at any time, on any stream.
    fn of_graph(&self, held: &mut Held, graph: [u64; 2]) -> Result<u64, CudaError> {
        let Held { by_graph, .. } = held;
        if let Some((_, buffer)) = by_graph.iter().rfind(|(owner, _)| *owner == graph) {
            return Ok(buffer.address());
        }
        let buffer = self.allocate()?;
        let address = buffer.address();
        by_graph.push((graph, buffer));
        Ok(address)
    }

    fn allocate(&self) -> Result<DeviceBuffer, CudaError> {
        // An allocation is no part of a graph that is recorded meanwhile, and must not spoil it.
        self.context.relax_capture(|context| DeviceBuffer::uninitialised(context, self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{context, state};

    fn address(workspaces: &Workspaces, stream: &Stream) -> u64 {
        workspaces.with(stream, Ok).unwrap()
    }

    #[test]
    fn each_stream_has_its_own() {
        let context = context();
        let workspaces = Workspaces::new(&context, 64);
        assert_eq!(state(|state| state.count("cuMemAlloc_v2")), 0, "a plan allocates nothing");
        let [first, second] = [(); 2].map(|()| Stream::new(&context).unwrap());
        let of_first = address(&workspaces, &first);
        assert_eq!(state(|state| state.count("cuMemAlloc_v2")), 1);
        let of_second = address(&workspaces, &second);
        assert_ne!(of_first, of_second);
        assert_eq!(
            [&first, &second, &first].map(|stream| address(&workspaces, stream)),
            [of_first, of_second, of_first]
        );
        assert_eq!(state(|state| state.count("cuMemAlloc_v2")), 2);
        drop(workspaces);
        assert_eq!(state(|state| state.live_allocations()), 0);
    }

    #[test]
    fn a_graph_has_its_own() {
        let context = context();
        let workspaces = Workspaces::new(&context, 64);
        let stream = Stream::new(&context).unwrap();
        let launched = address(&workspaces, &stream);
        let mut recorded = Vec::new();
        for graph in [7, 8] {
            state(|state| (state.capturing, state.capture_id) = (true, graph));
            recorded.push(address(&workspaces, &stream));
            assert_eq!(address(&workspaces, &stream), recorded[recorded.len() - 1], "one graph, one workspace");
            state(|state| state.capturing = false);
        }
        assert_eq!(address(&workspaces, &stream), launched);
        recorded.push(launched);
        recorded.sort_unstable();
        recorded.dedup();
        assert_eq!(recorded.len(), 3);
        // While a graph is recorded, allocating is allowed, and forbidden again afterwards.
        assert_eq!(state(|state| (state.count("cuThreadExchangeStreamCaptureMode"), state.relaxed)), (6, false));
    }

    #[test]
    fn many_streams_share_some() {
        let context = context();
        let workspaces = Workspaces::new(&context, 64);
        let streams: Vec<Stream> = (0..MOST_STREAMS + 3).map(|_| Stream::new(&context).unwrap()).collect();
        let addresses: Vec<u64> = streams.iter().map(|stream| address(&workspaces, stream)).collect();
        assert_eq!(addresses[MOST_STREAMS..], addresses[..3], "the least recently used come first");
        assert_eq!(state(|state| (state.count("cuMemAlloc_v2"), state.count("cuCtxSynchronize"))), (MOST_STREAMS, 3));
    }

    #[test]
    fn nothing_is_asked_where_none_is_needed() {
        let context = context();
        let workspaces = Workspaces::new(&context, 0);
        assert_eq!(address(&workspaces, &Stream::new(&context).unwrap()), 0);
        assert_eq!(state(|state| (state.count("cuMemAlloc_v2"), state.count("cuStreamGetId"))), (0, 0));
    }

    /// Two threads on one stream: all work of one comes before all work of the other.
    #[test]
    fn launches_on_one_stream_do_not_alternate() {
        let context = context();
        let workspaces = Workspaces::new(&context, 64);
        let stream = Stream::new(&context).unwrap();
        // The memory of the fake driver belongs to the thread that allocates it.
        let _ = address(&workspaces, &stream);
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (workspaces, stream, order) = (&workspaces, &stream, &order);
                scope.spawn(move || {
                    for _ in 0..100 {
                        workspaces
                            .with(stream, |_| {
                                order.lock().unwrap().push(thread);
                                std::thread::yield_now();
                                order.lock().unwrap().push(thread);
                                Ok(())
                            })
                            .unwrap();
                    }
                });
            }
        });
        let order = order.into_inner().unwrap();
        assert!(order.chunks_exact(2).all(|pair| pair[0] == pair[1]), "{order:?}");
    }
}
