//! The key of a call: everything about its arguments that a plan depends on.

use std::hash::{BuildHasherDefault, Hasher};

/// Most words of a key; a call with more goes the Python way.
const CAPACITY: usize = 256;

/// Words of a key, on the stack.
pub(crate) struct Key {
    words: [u64; CAPACITY],
    count: usize,
    is_full: bool,
}

impl Key {
    pub(crate) fn new() -> Self {
        Self { words: [0; CAPACITY], count: 0, is_full: false }
    }

    pub(crate) fn push(&mut self, word: u64) {
        match self.words.get_mut(self.count) {
            Some(place) => {
                *place = word;
                self.count += 1;
            }
            None => self.is_full = true,
        }
    }

    /// The words; none if there were too many.
    pub(crate) fn words(&self) -> Option<&[u64]> {
        (!self.is_full).then(|| &self.words[..self.count])
    }
}

/// A hash of words, one multiplication each: keys are sizes and flags, and nobody chooses them to collide.
#[derive(Default)]
pub(crate) struct WordHasher(u64);

impl Hasher for WordHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_ne_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        // The table takes the upper and the lower bits; the multiplication has mixed the upper ones only.
        self.0 ^ (self.0 >> 32)
    }
}

/// The hasher of the table.
pub(crate) type BuildWordHasher = BuildHasherDefault<WordHasher>;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::hash::BuildHasher;

    #[test]
    fn a_key_with_too_many_words_is_none() {
        let mut key = Key::new();
        for word in 0..CAPACITY as u64 {
            key.push(word);
        }
        assert_eq!(key.words().map(<[u64]>::len), Some(CAPACITY));
        key.push(1);
        assert_eq!(key.words(), None);
    }

    #[test]
    fn sizes_beside_each_other_have_different_hashes() {
        let hashes: HashSet<u64> = (0..4096u64)
            .map(|rows| BuildWordHasher::default().hash_one([2, rows, 8, 64, rows * 512, 512, 64, 1].as_slice()))
            .collect();
        assert_eq!(hashes.len(), 4096);
        let low: HashSet<u64> = hashes.iter().map(|hash| hash & 0xfff).collect();
        assert!(low.len() > 2000, "{} of 4096 buckets are used", low.len());
    }
}
