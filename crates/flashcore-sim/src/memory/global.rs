//! Global memory: named buffers, far apart.

use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::fault::Nearest;

/// The global memory of the simulated device: named buffers between which nothing is mapped.
///
/// The base address of a buffer is a multiple of 256 and of nothing larger, as little as a kernel may rely on.
#[derive(Default)]
pub struct GlobalMemory {
    buffers: Vec<Buffer>,
    /// Set during a launch: what bytes a launch finds written must not change under it.
    launching: AtomicBool,
    /// Held during one atomic operation.
    atomics: Mutex<()>,
}

struct Buffer {
    name: String,
    length: u64,
    /// The bytes, in pairs: the smallest thing that operations access.
    pairs: Vec<AtomicU16>,
    /// For each pair, [`UNWRITTEN`], [`BEFORE_LAUNCH`] or [`IN_LAUNCH`].
    states: Vec<AtomicU8>,
}

/// Never written.
const UNWRITTEN: u8 = 0;
/// Written by the host or an earlier launch.
const BEFORE_LAUNCH: u8 = 1;
/// Written by the launch under way.
const IN_LAUNCH: u8 = 2;

/// Address space of one buffer; the first is left out so that small numbers are no addresses.
const SLOT_SHIFT: u32 = 36;
/// Where in its slot a buffer begins.
const SLOT_OFFSET: u64 = 256;
/// What unwritten memory holds: a NaN in every float format.
const POISON: u16 = 0xffff;

/// A place in a buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    pub(crate) buffer: usize,
    pub(crate) offset: u64,
}

impl GlobalMemory {
    /// Memory without buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// A new buffer with these bytes. Returns its address.
    pub fn allocate(&mut self, name: &str, bytes: &[u8]) -> u64 {
        let address = self.allocate_uninitialised(name, bytes.len());
        self.write(address, bytes);
        address
    }

    /// A new buffer that must be written before it is read. Returns its address.
    pub fn allocate_uninitialised(&mut self, name: &str, length: usize) -> u64 {
        let count = length.div_ceil(2);
        self.buffers.push(Buffer {
            name: name.to_owned(),
            length: length as u64,
            pairs: (0..count).map(|_| AtomicU16::new(POISON)).collect(),
            states: (0..count).map(|_| AtomicU8::new(UNWRITTEN)).collect(),
        });
        address_of(self.buffers.len() - 1)
    }

    /// Overwrites a buffer from its start.
    ///
    /// # Panics
    ///
    /// If no buffer starts at `address`, or it is shorter than `bytes`.
    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        let buffer = self.buffer_at(address);
        let length = self.buffers[buffer].length;
        assert!(bytes.len() as u64 <= length, "{} bytes do not fit into a buffer of {length}", bytes.len());
        self.put(Location { buffer, offset: 0 }, bytes, BEFORE_LAUNCH);
    }

    /// The bytes of the buffer at `address`; those never written are `0xff`.
    ///
    /// # Panics
    ///
    /// If no buffer starts at `address`.
    pub fn read(&self, address: u64) -> Vec<u8> {
        let buffer = self.buffer_at(address);
        let mut bytes = vec![0; self.buffers[buffer].length as usize];
        self.load(Location { buffer, offset: 0 }, &mut bytes);
        bytes
    }

    /// Whether every byte of the buffer at `address` has been written.
    ///
    /// # Panics
    ///
    /// If no buffer starts at `address`.
    pub fn is_written(&self, address: u64) -> bool {
        self.unwritten(address).is_empty()
    }

    /// The bytes of the buffer at `address` that were never written, as ranges of offsets.
    ///
    /// # Panics
    ///
    /// If no buffer starts at `address`.
    pub fn unwritten(&self, address: u64) -> Vec<Range<u64>> {
        let buffer = &self.buffers[self.buffer_at(address)];
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (pair, state) in buffer.states.iter().enumerate() {
            if state.load(Ordering::Relaxed) != UNWRITTEN {
                continue;
            }
            let start = pair as u64 * 2;
            let end = (start + 2).min(buffer.length);
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        ranges
    }

    fn buffer_at(&self, address: u64) -> usize {
        let found = (0..self.buffers.len()).find(|&buffer| address_of(buffer) == address);
        found.unwrap_or_else(|| panic!("no buffer starts at {address:#x}; pass an address that `allocate` returned"))
    }

    /// Bytes of each buffer.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = u64> {
        self.buffers.iter().map(|buffer| buffer.length)
    }

    /// Begins a launch, unless another is under way.
    pub(crate) fn begin_launch(&self) -> Option<LaunchGuard<'_>> {
        let free = !self.launching.swap(true, Ordering::Acquire);
        free.then(|| LaunchGuard { memory: self })
    }

    /// The place of `bytes` at `address`, if a buffer has them all.
    pub(crate) fn locate(&self, address: u64, bytes: u64) -> Result<Location, Nearest> {
        let slot = (address >> SLOT_SHIFT) as usize;
        if let Some(buffer) = slot.checked_sub(1).filter(|&buffer| buffer < self.buffers.len()) {
            let start = address_of(buffer);
            if address >= start && address - start + bytes <= self.buffers[buffer].length {
                return Ok(Location { buffer, offset: address - start });
            }
        }
        Err(self.nearest(address))
    }

    fn nearest(&self, address: u64) -> Nearest {
        let distance = |buffer: usize| {
            let start = address_of(buffer);
            let end = start + self.buffers[buffer].length;
            if address < start { start - address } else { address.saturating_sub(end) }
        };
        let Some(buffer) = (0..self.buffers.len()).min_by_key(|&buffer| distance(buffer)) else {
            return Nearest { buffer: "no buffer".to_owned(), offset: address as i64, length: 0 };
        };
        let Buffer { name, length, .. } = &self.buffers[buffer];
        Nearest { buffer: name.clone(), offset: address.wrapping_sub(address_of(buffer)) as i64, length: *length }
    }

    /// The address of a place.
    pub(crate) fn address(location: Location) -> u64 {
        address_of(location.buffer) + location.offset
    }

    /// Whether a pair of bytes was written before the launch.
    pub(crate) fn was_written(&self, buffer: usize, pair: usize) -> bool {
        self.buffers[buffer].states[pair].load(Ordering::Relaxed) == BEFORE_LAUNCH
    }

    /// Copies bytes out.
    pub(crate) fn load(&self, location: Location, bytes: &mut [u8]) {
        let pairs = &self.buffers[location.buffer].pairs[(location.offset / 2) as usize..];
        for (chunk, pair) in bytes.chunks_mut(2).zip(pairs) {
            chunk.copy_from_slice(&pair.load(Ordering::Relaxed).to_le_bytes()[..chunk.len()]);
        }
    }

    /// Copies bytes in.
    pub(crate) fn store(&self, location: Location, bytes: &[u8]) {
        self.put(location, bytes, IN_LAUNCH);
    }

    fn put(&self, location: Location, bytes: &[u8], state: u8) {
        let Buffer { pairs, states, .. } = &self.buffers[location.buffer];
        let first = (location.offset / 2) as usize;
        for ((chunk, pair), written) in bytes.chunks(2).zip(&pairs[first..]).zip(&states[first..]) {
            let high = chunk.get(1).copied().unwrap_or(POISON as u8);
            pair.store(u16::from_le_bytes([chunk[0], high]), Ordering::Relaxed);
            // What was written before the launch stays so: this CTA may read it either way.
            if written.load(Ordering::Relaxed) == UNWRITTEN || state == BEFORE_LAUNCH {
                written.store(state, Ordering::Relaxed);
            }
        }
    }

    /// Replaces bytes as one step among atomics.
    pub(crate) fn replace(&self, location: Location, bytes: &mut [u8], update: impl FnOnce(&mut [u8])) {
        let _guard = self.atomics.lock().unwrap_or_else(PoisonError::into_inner);
        self.load(location, bytes);
        update(bytes);
        self.store(location, bytes);
    }
}

/// A launch under way.
pub(crate) struct LaunchGuard<'m> {
    memory: &'m GlobalMemory,
}

impl Drop for LaunchGuard<'_> {
    /// What the launch wrote is now what was written before the next.
    fn drop(&mut self) {
        for state in self.memory.buffers.iter().flat_map(|buffer| &buffer.states) {
            if state.load(Ordering::Relaxed) == IN_LAUNCH {
                state.store(BEFORE_LAUNCH, Ordering::Relaxed);
            }
        }
        self.memory.launching.store(false, Ordering::Release);
    }
}

impl fmt::Debug for GlobalMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let buffers = self.buffers.iter().enumerate();
        formatter
            .debug_list()
            .entries(buffers.map(|(index, buffer)| (&buffer.name, address_of(index), buffer.length)))
            .finish()
    }
}

/// The address at which a buffer starts.
const fn address_of(buffer: usize) -> u64 {
    ((buffer as u64 + 1) << SLOT_SHIFT) + SLOT_OFFSET
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_launch_at_a_time() {
        let memory = GlobalMemory::new();
        let first = memory.begin_launch();
        assert!(first.is_some());
        assert!(memory.begin_launch().is_none());
        assert!(memory.begin_launch().is_none(), "a launch that was refused does not end the one under way");
        drop(first);
        assert!(memory.begin_launch().is_some());
    }

    #[test]
    fn buffers_lie_far_apart_and_are_aligned_to_256_bytes_only() {
        let mut memory = GlobalMemory::new();
        let [a, b] = ["a", "b"].map(|name| memory.allocate(name, &[1, 2, 3]));
        assert!(b - a > 1 << 32, "no 32-bit mistake leads from one into the other");
        assert_eq!([a, b].map(|address| address % 512), [256, 256]);
        assert!(memory.locate(a + 2, 1).is_ok());
        assert_eq!(
            memory.locate(a + 2, 2).err().map(|nearest| (nearest.buffer, nearest.offset)),
            Some(("a".into(), 2))
        );
        assert_eq!(
            memory.locate(b - 1, 1).err().map(|nearest| (nearest.buffer, nearest.offset)),
            Some(("b".into(), -1))
        );
    }

    #[test]
    fn unwritten_bytes_are_poison() {
        let mut memory = GlobalMemory::new();
        let odd = memory.allocate_uninitialised("odd", 5);
        let unwritten =
            |memory: &GlobalMemory| memory.unwritten(odd).iter().map(|range| (range.start, range.end)).collect();
        assert_eq!((memory.read(odd), unwritten(&memory)), (vec![0xff; 5], vec![(0, 5)]));
        memory.write(odd, &[1, 2]);
        assert_eq!((memory.read(odd), unwritten(&memory)), (vec![1, 2, 0xff, 0xff, 0xff], vec![(2, 5)]));
        memory.write(odd, &[1, 2, 3, 4, 5]);
        assert!(memory.is_written(odd));
        let empty = memory.allocate_uninitialised("empty", 0);
        assert!(memory.is_written(empty) && memory.read(empty).is_empty());
    }
}
