//! Lazy statics without a lock: values that are computed at first use.
//!
//! A thread that holds a lock while another forks is not there in the child, and the lock stays held for ever. So threads
//! that come first at the same time all compute the value, and one of the results is kept.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value that is computed at first use and then stays.
pub(crate) struct Once<T>(AtomicPtr<T>);

impl<T: Send + Sync + 'static> Once<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the value, which `compute` gives the first time. It must give the same each time.
    pub(crate) fn get(&'static self, compute: impl FnOnce() -> T) -> &'static T {
        let mut value = self.0.load(Ordering::Acquire);
        if value.is_null() {
            let computed = Box::into_raw(Box::new(compute()));
            let empty = ptr::null_mut();
            value = match self.0.compare_exchange(empty, computed, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => computed,
                Err(first) => {
                    // SAFETY: it is from a box, and nobody else has seen it.
                    drop(unsafe { Box::from_raw(computed) });
                    first
                }
            };
        }
        // SAFETY: it is from a box that is never freed once it is here.
        unsafe { &*value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_get_the_same_value() {
        static VALUE: Once<Vec<i32>> = Once::new();
        let addresses: Vec<usize> = std::thread::scope(|scope| {
            let get = || ptr::from_ref(VALUE.get(|| vec![1, 2, 3])).addr();
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(get)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(addresses.iter().all(|&address| address == addresses[0]), "{addresses:?}");
        assert_eq!(VALUE.get(Vec::new), &[1, 2, 3]);
    }
}
