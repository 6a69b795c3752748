//! Memory of random calls.

use std::ffi::CString;

use crate::abi::memory::{Pages, Side};
use crate::abi::random::{Random, normal_at};

/// Bytes of each piece of memory.
pub(super) const MEMORY: usize = 1 << 16;
const POISON: u8 = 0x5A;

/// Content of inputs.
#[derive(Clone, Copy)]
pub(super) enum Pattern {
    Floats,
    Zeros,
    Ones,
    Counted,
    Garbage,
    /// Other numbers than those of the query.
    Keys,
    Values,
    /// Scales of FP8 tensors: a half.
    Scales,
}

/// Memory of calls: inputs that cannot be written, and outputs.
pub(crate) struct Memory {
    inputs: Vec<Pages>,
    pub(super) outputs: Vec<Pages>,
    /// Texts for scores come first, then those for masks, then wrong ones.
    pub(super) texts: Vec<CString>,
}

impl Memory {
    pub(crate) fn new() -> Self {
        let floats = |seed: u64, index: u64| {
            let number = |place: u64| u64::from((normal_at(seed, place) as f32).to_bits());
            number(2 * index + 1) << 32 | number(2 * index)
        };
        let word = |pattern: usize, index: u64| match pattern {
            0 => floats(1, index),
            1 => 0,
            2 => 0x0000_0001_0000_0001,
            3 => (2 * index + 1) << 32 | (2 * index),
            4 => Random::new(index).next(),
            7 => 0x3F00_0000_3F00_0000,
            seed => floats(seed as u64, index),
        };
        let piece = |pattern: usize| {
            let mut pages = Pages::new(MEMORY, Side::Back);
            for (index, bytes) in pages.bytes_mut().chunks_exact_mut(8).enumerate() {
                bytes.copy_from_slice(&word(pattern, index as u64).to_ne_bytes());
            }
            pages.forbid_writing();
            pages
        };
        let outputs = (0..6).map(|_| {
            let mut pages = Pages::new(MEMORY, Side::Back);
            pages.bytes_mut().fill(POISON);
            pages
        });
        let texts: [&[u8]; 16] = [
            b"score",
            b"score + 0.1 * (q - k)",
            b"relative(2)",
            b"softcap(5)",
            b"q >= k ? score : score - aux_f32[k + h]",
            b"documents",
            b"causal && k != 3",
            b"window(2, 1) || b == 0",
            b"prefix(3)",
            b"d = q - k; d * d < aux_i32[h]",
            b"",
            b"score +",
            b"q / 2 < k",
            b"aux_f32[score]",
            b"score \xFF\xFE",
            b"((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((q",
        ];
        let texts = texts.iter().map(|text| CString::new(*text).unwrap()).collect();
        Self { inputs: (0..8).map(piece).collect(), outputs: outputs.collect(), texts }
    }

    /// The last bytes of a piece.
    pub(super) fn input(&self, pattern: Pattern, bytes: usize) -> (*const u8, usize) {
        let pages = &self.inputs[pattern as usize];
        (pages.address().cast_const().wrapping_add(MEMORY - bytes.min(MEMORY)), bytes.min(MEMORY))
    }

    pub(super) fn poison(&mut self) {
        self.outputs.iter_mut().for_each(|pages| pages.bytes_mut().fill(POISON));
    }

    pub(super) fn is_poison(&self) -> bool {
        self.outputs.iter().all(|pages| pages.bytes().iter().all(|&byte| byte == POISON))
    }
}
