//! Workspaces: scratch memory that the kernels of one launch hand to each other, one for each stream.
//!
//! A launch of several kernels (split-KV and its combine, a block-mask precompute and the kernel that reads it) keeps
//! partial results in device memory between them. Work on one stream is ordered, so all launches there share one workspace,
//! of whichever plan, as large as the largest of them needs. Launches on two streams run at the same time and must not.
//!
//! A captured launch may be executed on any stream later, by any number of executable graphs, beside anything. No memory
//! that is chosen here would be its own, so its caller brings it, and a launch that does not is refused.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::context::Context;
use crate::error::CudaError;
use crate::memory::DeviceBuffer;
use crate::stream::Stream;

/// The most streams with a workspace; one more takes the place of the least recently used one.
const MOST_STREAMS: usize = 32;

/// The workspaces of a device. They are freed when the last [`Workspace`] of a plan is gone.
#[derive(Debug)]
pub struct Workspaces {
    context: Context,
    streams: Mutex<Weak<Streams>>,
}

/// The memory of each stream, by its number, the most recently used last.
struct Streams(Mutex<Vec<(u64, Arc<OfStream>)>>);

/// The memory of one stream. Locked while a launch is put on the stream.
type OfStream = Mutex<Option<DeviceBuffer>>;

/// The workspace of a plan: its size, and a share in the memory of the streams that launch it. Clones are the same.
#[derive(Debug, Clone)]
pub struct Workspace {
    context: Context,
    bytes: usize,
    /// None where none is needed.
    streams: Option<Arc<Streams>>,
}

impl Workspaces {
    /// The workspaces of the device of a context, which has none yet.
    pub const fn new(context: Context) -> Self {
        Self { context, streams: Mutex::new(Weak::new()) }
    }

    /// The workspace of a plan that needs so many bytes. Allocates nothing: the first launch on a stream does.
    pub fn of_plan(&self, bytes: usize) -> Workspace {
        let streams = (bytes > 0).then(|| {
            let mut known = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
            known.upgrade().unwrap_or_else(|| {
                let streams = Arc::new(Streams(Mutex::default()));
                *known = Arc::downgrade(&streams);
                streams
            })
        });
        Workspace { context: self.context.clone(), bytes, streams }
    }
}

impl Workspace {
    /// Bytes that a launch needs.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Calls `launch` with the address of the stream's workspace; 0 where none is needed. Refused while the stream captures a
    /// graph.
    ///
    /// `launch` enqueues on the stream everything that uses the workspace. Meanwhile nobody else does: threads that
    /// launch on the same stream at the same time take turns, or their kernels would interleave.
    pub fn with<T>(&self, stream: &Stream, launch: impl FnOnce(u64) -> Result<T, CudaError>) -> Result<T, CudaError> {
        let Some(streams) = &self.streams else { return launch(0) };
        if stream.is_capturing()? {
            return Err(CudaError::CapturedWorkspace { bytes: self.bytes });
        }
        let of_stream = self.of_stream(streams, stream.id()?)?;
        let mut buffer = of_stream.lock().unwrap_or_else(PoisonError::into_inner);
        let known = buffer.as_ref().filter(|buffer| buffer.len() >= self.bytes).map(DeviceBuffer::address);
        let address = match known {
            Some(address) => address,
            // Another stream may capture a graph, which these calls are no part of and must not spoil.
            None => self.context.relax_capture(|context| {
                // Freeing waits for the launches that use it.
                *buffer = None;
                Ok(buffer.insert(DeviceBuffer::uninitialised(context, self.bytes)?).address())
            })?,
        };
        launch(address)
    }

    fn of_stream(&self, Streams(streams): &Streams, number: u64) -> Result<Arc<OfStream>, CudaError> {
        let mut streams = streams.lock().unwrap_or_else(PoisonError::into_inner);
        let known = streams.iter().rposition(|(other, _)| *other == number);
        let of_stream = if let Some(index) = known {
            streams.remove(index).1
        } else {
            if streams.len() == MOST_STREAMS {
                let (_, oldest) = streams.remove(0);
                // A thread that is about to launch on that stream keeps it until then.
                self.context.relax_capture(|_| {
                    drop(oldest);
                    Ok(())
                })?;
            }
            Arc::default()
        };
        streams.push((number, of_stream.clone()));
        Ok(of_stream)
    }
}

impl fmt::Debug for Streams {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Streams").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{context, state};
    use crate::graph::Graph;

    fn address(workspace: &Workspace, stream: &Stream) -> u64 {
        workspace.with(stream, Ok).unwrap()
    }

    fn allocations() -> (usize, usize) {
        state(|state| (state.count("cuMemAlloc_v2"), state.live_allocations()))
    }

    #[test]
    fn each_stream_has_one_for_all_plans() {
        let context = context();
        let workspaces = Workspaces::new(context.clone());
        let plans = [64, 200, 64].map(|bytes| workspaces.of_plan(bytes));
        assert_eq!(allocations(), (0, 0), "a plan allocates nothing");
        let [first, second] = [(); 2].map(|()| Stream::new(&context).unwrap());
        let small = address(&plans[0], &first);
        assert_eq!(address(&plans[2], &first), small);
        assert_eq!(allocations(), (1, 1));
        let large = address(&plans[1], &first);
        assert_eq!(allocations(), (2, 1), "the smaller one is freed");
        assert_eq!([0, 2].map(|plan| address(&plans[plan], &first)), [large; 2]);
        assert_ne!(address(&plans[0], &second), large);
        assert_eq!(address(&plans[0], &first), large);
        assert_eq!(allocations(), (3, 2));
        let [a, b, c] = plans;
        drop([a, c]);
        assert_eq!((allocations(), address(&b, &first)), ((3, 2), large));
        drop(b);
        assert_eq!(allocations(), (3, 0), "no plan needs them any more");
        let again = workspaces.of_plan(8);
        let _ = address(&again, &first);
        assert_eq!(allocations(), (4, 1));
    }

    /// 60 batch sizes that an engine captures, with the memory that it brings: nothing is kept for any of them. Without it,
    /// a graph that is executed twice at once would have one workspace for both, and is refused.
    #[test]
    fn a_captured_launch_brings_its_own() {
        let context = context();
        let workspaces = Workspaces::new(context.clone());
        let stream = Stream::new(&context).unwrap();
        for batch in 1..=60 {
            let plan = workspaces.of_plan(batch * 1000);
            let captured = Graph::capture(&stream, |stream| plan.with(stream, |_| Ok(())));
            assert_eq!(captured.map(|_| ()), Err(CudaError::CapturedWorkspace { bytes: batch * 1000 }));
        }
        assert_eq!(allocations(), (0, 0));
        let plan = workspaces.of_plan(0);
        assert!(Graph::capture(&stream, |stream| plan.with(stream, |_| Ok(()))).is_ok(), "it needs none");
        // Launches of the 60 sizes hold as much as the largest.
        let plans: Vec<_> = (1..=60).map(|batch| workspaces.of_plan(batch * 1000)).collect();
        for plan in plans.iter().rev().chain(&plans) {
            let _ = address(plan, &stream);
        }
        assert_eq!(allocations(), (1, 1));
    }

    #[test]
    fn the_least_recently_used_stream_gives_way() {
        let context = context();
        let workspace = Workspaces::new(context.clone()).of_plan(64);
        let streams: Vec<Stream> = (0..MOST_STREAMS + 3).map(|_| Stream::new(&context).unwrap()).collect();
        let _ = address(&workspace, &streams[0]);
        let _ = address(&workspace, &streams[1]);
        let kept = address(&workspace, &streams[0]);
        for stream in &streams[2..=MOST_STREAMS] {
            let _ = address(&workspace, stream);
        }
        assert_eq!(allocations(), (MOST_STREAMS + 1, MOST_STREAMS));
        assert_eq!(address(&workspace, &streams[0]), kept);
        for stream in &streams[MOST_STREAMS + 1..] {
            let _ = address(&workspace, stream);
        }
        assert_eq!(address(&workspace, &streams[0]), kept);
        assert_eq!(allocations(), (MOST_STREAMS + 3, MOST_STREAMS));
    }

    #[test]
    fn memory_that_is_not_there_is_asked_for_again() {
        let context = context();
        let workspaces = Workspaces::new(context.clone());
        let (small, large) = (workspaces.of_plan(64), workspaces.of_plan(128));
        let stream = Stream::new(&context).unwrap();
        let _ = address(&small, &stream);
        crate::fake::fail("cuMemAlloc_v2", Some(crate::error::code::OUT_OF_MEMORY));
        assert!(matches!(large.with(&stream, Ok), Err(CudaError::OutOfMemory { bytes: 128, .. })));
        crate::fake::fail("cuMemAlloc_v2", None);
        assert_ne!(address(&small, &stream), 0);
        assert!(!state(|state| state.relaxed), "a failed allocation leaves captures as they were");
    }

    #[test]
    fn nothing_is_asked_where_none_is_needed() {
        let context = context();
        let workspace = Workspaces::new(context.clone()).of_plan(0);
        assert_eq!(address(&workspace, &Stream::new(&context).unwrap()), 0);
        assert_eq!(state(|state| (state.count("cuMemAlloc_v2"), state.count("cuStreamGetId"))), (0, 0));
    }

    /// Two plans by several threads on one stream: all work of one launch comes before all work of another.
    #[test]
    fn launches_on_one_stream_do_not_alternate() {
        let context = context();
        let workspaces = Workspaces::new(context.clone());
        let plans = [workspaces.of_plan(64), workspaces.of_plan(32)];
        let stream = Stream::new(&context).unwrap();
        // The memory of the fake driver belongs to the thread that allocates it.
        let _ = address(&plans[0], &stream);
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (plan, stream, order) = (&plans[thread % 2], &stream, &order);
                scope.spawn(move || {
                    for _ in 0..100 {
                        plan.with(stream, |_| {
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
