//! A problem that has run before allocates nothing, on any thread.
//!
//! Alone in its program, because the allocator counts for all tests of one.

#![expect(unsafe_code, reason = "an allocator is unsafe by its nature")]

use flashcore_cpu::{Level, attend_with};
use flashcore_problem::{Alignment, DType, Inputs, Layout, Mask, Outputs, Problem};
use std::alloc::{GlobalAlloc, Layout as MemoryLayout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: MemoryLayout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller vouches for the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: MemoryLayout) {
        // SAFETY: the caller vouches for pointer and layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Prefill, grouped heads, decode, keys cut into chunks; in every layout that is packed in another way.
fn problems(dtype: DType) -> Vec<Problem> {
    let shape = |heads: (usize, usize), lengths: (usize, usize), columns: usize| {
        let mut problem = Problem::new(1, heads.0, lengths.0, columns, dtype);
        (problem.key_heads, problem.key_length) = (heads.1, lengths.1);
        problem.lse = true;
        problem
    };
    let mut everything = shape((4, 2), (70, 300), 40);
    (everything.softcap, everything.alibi, everything.sinks, everything.bias) = (Some(2.0), true, true, true);
    everything.mask = Mask::Causal(Alignment::BottomRight);
    let mut rows_apart = shape((4, 4), (200, 200), 32);
    rows_apart.layout = Layout::Bshd;
    vec![
        shape((4, 4), (200, 200), 64),
        rows_apart,
        everything,
        shape((8, 2), (1, 3000), 64),
        shape((2, 2), (3, 700), 20),
        shape((1, 1), (40, 5000), 16),
    ]
}

#[test]
fn the_second_call_allocates_nothing() {
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for dtype in DType::ALL {
            for problem in problems(dtype) {
                let inputs = Inputs::random(&problem, 1);
                let mut outputs = Outputs::poisoned(&problem);
                for level in Level::available() {
                    pool.install(|| {
                        let mut run = || attend_with(level, &problem, &inputs, &mut outputs).unwrap();
                        // Which thread takes an item is chance, so every thread has to have had one of this size: its
                        // own copy of the problem, run where it is.
                        rayon::broadcast(|_| {
                            let mut outputs = Outputs::poisoned(&problem);
                            attend_with(level, &problem, &inputs, &mut outputs).unwrap();
                        });
                        run();
                        let before = ALLOCATIONS.load(Ordering::Relaxed);
                        run();
                        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
                        assert_eq!(allocations, 0, "{problem} at level {level} on {threads} threads");
                    });
                }
            }
        }
    }
}
