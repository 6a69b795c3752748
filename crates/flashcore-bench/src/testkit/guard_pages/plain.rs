//! Ordinary memory, on systems whose page protection is not supported here.

use std::io;

use zerocopy::IntoBytes;

use super::{Edge, Label};

/// Bytes, aligned for `f32` and `u32`.
#[derive(Debug)]
pub struct GuardedBuffer {
    words: Vec<u32>,
    length: usize,
}

impl GuardedBuffer {
    /// A copy of `payload`.
    pub fn new(payload: &[u8], _edge: Edge, _label: Label) -> io::Result<Self> {
        let mut words = vec![0_u32; payload.len().div_ceil(size_of::<u32>())];
        words.as_mut_bytes()[..payload.len()].copy_from_slice(payload);
        Ok(Self { words, length: payload.len() })
    }

    /// The buffer, not to be written to.
    pub fn read_only(self) -> io::Result<ReadOnly> {
        Ok(ReadOnly(self))
    }

    /// The payload.
    pub fn bytes(&self) -> &[u8] {
        &self.words.as_bytes()[..self.length]
    }

    /// The payload, to be written to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.words.as_mut_bytes()[..self.length]
    }
}

/// A [`GuardedBuffer`] that may be read and no more.
#[derive(Debug)]
pub struct ReadOnly(GuardedBuffer);

impl ReadOnly {
    /// The payload.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
}
