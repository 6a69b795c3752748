//! A launch of the table: a plan of libflashcore, the words of its tensors, and where the addresses go.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::interpreter::{Interpreter, Owned, Ref};

/// FLASHCORE_INVALID_PLAN: the plan was destroyed meanwhile.
pub(crate) const INVALID_PLAN: i32 = 7;
/// Words of a tensor of a call, `flashcore_tensor_t`.
const TENSOR_WORDS: usize = 8;
/// Words of all tensors of a call, at most.
pub(crate) const MAX_WORDS: usize = 32 * TENSOR_WORDS;
/// Most outputs, the workspace included.
pub(crate) const MOST_OUTPUTS: usize = 4;

/// Element type of an output, and what becomes of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Of the type of the first tensor; returned.
    Output,
    /// float32; returned.
    Float,
    /// Bytes that the launch uses; not returned.
    Workspace,
    /// A tensor without elements that all calls share, in place of the shape; returned.
    Shared,
    /// float16, of an FP8 query; returned.
    Float16,
    /// bfloat16, of an FP8 query; returned.
    BFloat16,
}

/// An output to allocate.
pub(crate) struct Output {
    /// The shape, a tuple, or the tensor that is shared.
    pub(crate) shape: Owned,
    /// The shape once more, and the strides of a contiguous tensor; empty for what is shared.
    pub(crate) sizes: Vec<i64>,
    pub(crate) strides: Vec<i64>,
    pub(crate) kind: Kind,
}

/// A plan, ready to be launched with other addresses.
pub(crate) struct Launch {
    function: u64,
    plan: u64,
    /// True for `flashcore_launch`, false for `flashcore_run`, which takes no stream.
    has_stream: bool,
    template: Vec<u64>,
    /// Words, and the addresses that go there: those of the arguments, then those of the outputs.
    places: Vec<(usize, usize)>,
    pub(crate) outputs: Vec<Output>,
    pub(crate) returns_tuple: bool,
    /// The object of Python that owns the plan.
    pub(crate) owner: Owned,
    pub(crate) is_captured: AtomicBool,
}

// SAFETY: the references to objects are used and dropped with the lock of the interpreter held only; the rest is plain data.
unsafe impl Send for Launch {}
// SAFETY: as above.
unsafe impl Sync for Launch {}

impl Launch {
    /// A launch from the tuple that `miss` returns: (function, plan, has_stream, words, places, outputs, returns_tuple,
    /// owner). None, without an error, if something in it does not fit.
    ///
    /// # Safety
    ///
    /// `tuple` must live, and the lock must be held. The function must be `flashcore_launch` or
    /// `flashcore_run` of libflashcore, and the words tensors like those of the call.
    pub(crate) unsafe fn parse(python: &Interpreter, tuple: Ref, sources: usize) -> Option<Self> {
        // SAFETY: the tuple and its items live, by the caller.
        unsafe {
            let items = python.items(tuple)?;
            let &[function, plan, has_stream, words, places, outputs, returns_tuple, owner] = items.as_slice() else {
                return None;
            };
            let mut data = std::ptr::null_mut();
            let mut size = 0;
            if (python.bytes_as_slice)(words, &raw mut data, &raw mut size) != 0 {
                (python.error_clear)();
                return None;
            }
            let bytes = std::slice::from_raw_parts(data.cast::<u8>(), usize::try_from(size).ok()?);
            let template: Vec<u64> =
                bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect();
            let outputs = python
                .items(outputs)?
                .into_iter()
                .map(|output| {
                    let items = python.items(output)?;
                    let &[shape, kind] = items.as_slice() else { return None };
                    let kind = match python.integer(kind)? {
                        0 => Kind::Output,
                        1 => Kind::Float,
                        2 => Kind::Workspace,
                        3 => Kind::Shared,
                        4 => Kind::Float16,
                        5 => Kind::BFloat16,
                        _ => return None,
                    };
                    let mut sizes = Vec::new();
                    if kind != Kind::Shared {
                        for size in python.items(shape)? {
                            sizes.push(python.integer(size)?);
                        }
                    }
                    let mut strides = vec![1; sizes.len()];
                    for dimension in (1..sizes.len()).rev() {
                        strides[dimension - 1] = strides[dimension] * sizes[dimension].max(1);
                    }
                    Some(Output { shape: Owned::borrow(python, shape), sizes, strides, kind })
                })
                .collect::<Option<Vec<_>>>()?;
            let places = python
                .items(places)?
                .chunks_exact(2)
                .map(|pair| {
                    let word = usize::try_from(python.integer(pair[0])?).ok()?;
                    let source = usize::try_from(python.integer(pair[1])?).ok()?;
                    (word < template.len() && source < sources + outputs.len()).then_some((word, source))
                })
                .collect::<Option<Vec<_>>>()?;
            if template.len() > MAX_WORDS || outputs.len() > MOST_OUTPUTS {
                return None;
            }
            Some(Self {
                function: python.address(function)?,
                plan: python.address(plan)?,
                has_stream: (python.is_true)(has_stream) == 1,
                template,
                places,
                outputs,
                returns_tuple: (python.is_true)(returns_tuple) == 1,
                owner: Owned::borrow(python, owner),
                is_captured: AtomicBool::new(false),
            })
        }
    }

    /// Calls the function of libflashcore, without the lock of the interpreter; the status.
    ///
    /// # Safety
    ///
    /// As for `run_unlocked`, and the lock must be held.
    pub(crate) unsafe fn run(&self, python: &Interpreter, addresses: &[u64], stream: u64) -> i32 {
        // SAFETY: by the caller. Nothing in between touches an object.
        unsafe {
            let state = (python.save_thread)();
            let status = self.run_unlocked(addresses, stream);
            (python.restore_thread)(state);
            status
        }
    }

    /// Calls the function of libflashcore; the status. No lock is needed.
    ///
    /// # Safety
    ///
    /// `addresses` must be those of the arguments and outputs, of tensors that live and are like those of the key.
    pub(crate) unsafe fn run_unlocked(&self, addresses: &[u64], stream: u64) -> i32 {
        let mut words = [0u64; MAX_WORDS];
        words[..self.template.len()].copy_from_slice(&self.template);
        for &(word, source) in &self.places {
            words[word] = addresses[source];
        }
        let (tensors, count) = (words.as_ptr() as u64, (self.template.len() / TENSOR_WORDS) as u64);
        // SAFETY: the function takes the plan, the stream if it is a launch, and as many tensors, all of the size of a
        // pointer, by the contract of `parse`; the tensors live on the stack until it returns.
        unsafe {
            if self.has_stream {
                std::mem::transmute::<u64, unsafe extern "C" fn(u64, u64, u64, u64) -> i32>(self.function)(
                    self.plan, stream, tensors, count,
                )
            } else {
                std::mem::transmute::<u64, unsafe extern "C" fn(u64, u64, u64) -> i32>(self.function)(
                    self.plan, tensors, count,
                )
            }
        }
    }

    /// Marks the launch as part of a CUDA graph; false if it was before.
    pub(crate) fn mark_captured(&self) -> bool {
        !self.is_captured.swap(true, Ordering::Relaxed)
    }
}
