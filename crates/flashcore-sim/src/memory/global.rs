//! Global memory: named buffers, far apart.

use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::fault::Nearest;
use crate::memory::storage::{State, Storage};

/// The global memory of the simulated device: named buffers between which nothing is mapped.
///
/// The base address of a buffer is a multiple of 256 and of nothing larger, as little as a kernel may rely on.
#[derive(Default)]
pub struct GlobalMemory {
    buffers: Vec<Buffer>,
    /// Set during a launch: the set of bytes written before it must not change meanwhile.
    launching: AtomicBool,
    /// Held during one atomic operation.
    atomics: Mutex<()>,
}

struct Buffer {
    name: String,
    length: u64,
    storage: Storage,
}

/// Address space of one buffer; the first is left out so that small numbers are not addresses.
const SLOT_SHIFT: u32 = 44;
/// The offset of a buffer in its slot.
const SLOT_OFFSET: u64 = 256;
/// The longest buffer: the rest of its slot is unmapped.
const LONGEST: u64 = (1 << SLOT_SHIFT) - (1 << 33);

/// A buffer and an offset in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BufferOffset {
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
        self.push(name, length as u64, Storage::dense(length))
    }

    /// A new buffer that must be written before it is read, of any length: it takes memory only where it is written.
    /// Returns its address.
    ///
    /// # Panics
    ///
    /// If it is longer than 16 TiB less 8 GiB.
    pub fn allocate_sparse(&mut self, name: &str, length: u64) -> u64 {
        self.push(name, length, Storage::sparse())
    }

    fn push(&mut self, name: &str, length: u64, storage: Storage) -> u64 {
        assert!(length <= LONGEST, "{name} has {length} bytes; a buffer has at most {LONGEST}");
        self.buffers.push(Buffer { name: name.to_owned(), length, storage });
        address_of(self.buffers.len() - 1)
    }

    /// Overwrites a buffer from its start.
    ///
    /// # Panics
    ///
    /// If no buffer starts at `address`, or it is shorter than `bytes`.
    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        self.write_at(address, 0, bytes);
    }

    /// Overwrites bytes of a buffer from an even offset on.
    ///
    /// # Panics
    ///
    /// If no buffer starts at `address`, it has no such bytes, or the offset is odd.
    pub fn write_at(&mut self, address: u64, offset: u64, bytes: &[u8]) {
        let buffer = &self.buffers[self.buffer_at(address)];
        let length = buffer.length;
        let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= length);
        assert!(fits, "{} bytes at {offset} do not fit into a buffer of {length}", bytes.len());
        assert!(offset.is_multiple_of(2), "bytes are written in pairs, and {offset} is odd");
        buffer.storage.put(offset, bytes, State::BeforeLaunch);
    }

    /// The bytes of the buffer at `address`; those never written are `0xff`.
    ///
    /// # Panics
    ///
    /// If no buffer starts at `address`.
    pub fn read(&self, address: u64) -> Vec<u8> {
        let length = self.buffers[self.buffer_at(address)].length;
        self.read_at(address, 0, length as usize)
    }

    /// `count` bytes of the buffer at `address` from an even offset on; those never written are `0xff`.
    ///
    /// # Panics
    ///
    /// If no buffer starts at `address`, it has no such bytes, or the offset is odd.
    pub fn read_at(&self, address: u64, offset: u64, count: usize) -> Vec<u8> {
        let buffer = self.buffer_at(address);
        let length = self.buffers[buffer].length;
        assert!(offset + count as u64 <= length, "{count} bytes at {offset} are not in a buffer of {length}");
        assert!(offset.is_multiple_of(2), "bytes are read in pairs, and {offset} is odd");
        let mut bytes = vec![0; count];
        self.load(BufferOffset { buffer, offset }, &mut bytes);
        bytes
    }

    /// True if every byte of the buffer at `address` has been written.
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
        buffer.storage.unwritten(buffer.length)
    }

    fn buffer_at(&self, address: u64) -> usize {
        let found = (0..self.buffers.len()).find(|&buffer| address_of(buffer) == address);
        found.unwrap_or_else(|| panic!("no buffer starts at {address:#x}; pass an address that `allocate` returned"))
    }

    /// Bytes of each buffer.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = u64> {
        self.buffers.iter().map(|buffer| buffer.length)
    }

    /// Begins a launch, unless another is running.
    pub(crate) fn begin_launch(&self) -> Option<LaunchGuard<'_>> {
        let free = !self.launching.swap(true, Ordering::Acquire);
        free.then(|| LaunchGuard { memory: self })
    }

    /// Locates `bytes` at `address`, if a buffer has them all.
    pub(crate) fn locate(&self, address: u64, bytes: u64) -> Result<BufferOffset, Nearest> {
        let slot = (address >> SLOT_SHIFT) as usize;
        if let Some(buffer) = slot.checked_sub(1).filter(|&buffer| buffer < self.buffers.len()) {
            let start = address_of(buffer);
            if address >= start && address - start + bytes <= self.buffers[buffer].length {
                return Ok(BufferOffset { buffer, offset: address - start });
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

    /// The address of a location.
    pub(crate) fn address(location: BufferOffset) -> u64 {
        address_of(location.buffer) + location.offset
    }

    /// True if a pair of bytes was written before the launch.
    pub(crate) fn was_written(&self, buffer: usize, pair: usize) -> bool {
        self.buffers[buffer].storage.was_written(pair)
    }

    /// Copies bytes out.
    pub(crate) fn load(&self, location: BufferOffset, bytes: &mut [u8]) {
        self.buffers[location.buffer].storage.load(location.offset, bytes);
    }

    /// Copies bytes in.
    pub(crate) fn store(&self, location: BufferOffset, bytes: &[u8]) {
        self.buffers[location.buffer].storage.put(location.offset, bytes, State::InLaunch);
    }

    /// Replaces bytes atomically with respect to other atomics.
    pub(crate) fn replace(&self, location: BufferOffset, bytes: &mut [u8], update: impl FnOnce(&mut [u8])) {
        let _guard = self.atomics.lock().unwrap_or_else(PoisonError::into_inner);
        self.load(location, bytes);
        update(bytes);
        self.store(location, bytes);
    }
}

/// A running launch.
pub(crate) struct LaunchGuard<'m> {
    memory: &'m GlobalMemory,
}

impl Drop for LaunchGuard<'_> {
    /// Counts the writes of the launch as written before the next.
    fn drop(&mut self) {
        self.memory.buffers.iter().for_each(|buffer| buffer.storage.end_launch());
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

    /// 6 GiB with a few bytes at both ends, one piece across a page.
    #[test]
    fn sparse_buffers_are_long_and_take_no_room() {
        const LENGTH: u64 = 6 << 30;
        let mut memory = GlobalMemory::new();
        let far = memory.allocate_sparse("far", LENGTH);
        let unwritten =
            |memory: &GlobalMemory| memory.unwritten(far).iter().map(|range| (range.start, range.end)).collect();
        let all: Vec<(u64, u64)> = unwritten(&memory);
        assert_eq!(all, [(0, LENGTH)]);
        memory.write_at(far, 4094, &[1, 2, 3, 4]);
        memory.write_at(far, LENGTH - 2, &[5, 6]);
        assert_eq!(memory.read_at(far, 4092, 8), [0xff, 0xff, 1, 2, 3, 4, 0xff, 0xff]);
        assert_eq!(memory.read_at(far, LENGTH - 4, 4), [0xff, 0xff, 5, 6]);
        let rest: Vec<(u64, u64)> = unwritten(&memory);
        assert_eq!(rest, [(0, 4094), (4098, LENGTH - 2)]);
        assert!(memory.locate(far + LENGTH - 2, 2).is_ok());
        assert!(memory.locate(far + LENGTH - 2, 4).is_err());
        assert!(memory.was_written(0, 2047) && !memory.was_written(0, 2046));
    }
}
