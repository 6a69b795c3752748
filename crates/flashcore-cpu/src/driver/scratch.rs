//! Scratch memory that each thread keeps from call to call, so that a call allocates nothing once a larger or equal one has run
//! on the same threads.

use std::cell::Cell;
use zerocopy::{FromBytes, IntoBytes};

/// Tiles begin at multiples of a cache line, so that no vector crosses one.
const ALIGNMENT: usize = 64;

/// Purpose that a thread keeps memory for. A thread may need both at once.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// The tiles of one work item.
    Item,
    /// Split-KV partial results of a call.
    Partials,
}

thread_local! {
    static KEPT: [Cell<Vec<[u8; ALIGNMENT]>>; 2] = const { [const { Cell::new(Vec::new()) }; 2] };
}

/// Calls `work` with at least `bytes` of memory, which holds anything.
///
/// The memory is taken away while `work` runs: should the thread turn to another call meanwhile, as it may while it
/// waits for others of its pool, that call gets memory of its own.
pub(crate) fn with_scratch<T>(purpose: Purpose, bytes: usize, work: impl FnOnce(Arena<'_>) -> T) -> T {
    let slot = purpose as usize;
    let mut memory = KEPT.with(|kept| kept[slot].take());
    // One more, because the first may have to be cut off at the front.
    let lines = bytes.div_ceil(ALIGNMENT) + 1;
    if memory.len() < lines {
        memory.resize(lines, [0; ALIGNMENT]);
    }
    let unaligned = memory.as_flattened_mut();
    let first = unaligned.as_ptr().align_offset(ALIGNMENT).min(unaligned.len());
    let result = work(Arena { rest: &mut unaligned[first..] });
    KEPT.with(|kept| {
        let other = kept[slot].take();
        kept[slot].set(if other.len() > memory.len() { other } else { memory });
    });
    result
}

/// Memory that tiles are cut from.
pub(crate) struct Arena<'a> {
    rest: &'a mut [u8],
}

impl<'a> Arena<'a> {
    /// Takes `count` elements, which hold what was there before.
    ///
    /// # Panics
    ///
    /// When less is left than [`arena_bytes`] says.
    pub(crate) fn take<T: FromBytes + IntoBytes>(&mut self, count: usize) -> &'a mut [T] {
        let bytes = count * size_of::<T>();
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut(arena_bytes::<T>(count));
        self.rest = rest;
        match <[T]>::mut_from_bytes(&mut taken[..bytes]) {
            Ok(elements) => elements,
            Err(error) => unreachable!("{error}: the memory is aligned and of the right size"),
        }
    }
}

/// Bytes that so many elements take of an arena.
pub(crate) const fn arena_bytes<T>(count: usize) -> usize {
    (count * size_of::<T>()).next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_aligned_and_apart() {
        let bytes = arena_bytes::<f32>(5) + arena_bytes::<f64>(9);
        with_scratch(Purpose::Item, bytes, |mut arena| {
            let (few, many) = (arena.take::<f32>(5), arena.take::<f64>(9));
            few.fill(1.0);
            many.fill(2.0);
            assert_eq!((few.as_ptr().addr() % 64, many.as_ptr().addr() % 64), (0, 0));
            assert_eq!((few.to_vec(), many.to_vec()), (vec![1.0; 5], vec![2.0; 9]));
        });
    }

    #[test]
    fn memory_is_kept_and_nested_calls_get_their_own() {
        let address = |mut arena: Arena<'_>| arena.take::<f32>(1).as_ptr().addr();
        let first = with_scratch(Purpose::Item, 1000, address);
        assert_eq!(with_scratch(Purpose::Item, 500, address), first);
        with_scratch(Purpose::Item, 500, |arena| {
            assert_eq!(address(arena), first);
            assert_ne!(with_scratch(Purpose::Item, 500, address), first);
        });
        assert_eq!(with_scratch(Purpose::Item, 1000, address), first);
    }
}
