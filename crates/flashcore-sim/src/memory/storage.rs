//! The bytes of a buffer, and the state of each: written before or during the launch, or never.

use core::ops::Range;
use core::sync::atomic::{AtomicU8, AtomicU16, Ordering};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::memory::view::PAGE_BYTES;

/// The time at which a pair of bytes was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// Never.
    Unwritten,
    /// By the host or an earlier launch.
    BeforeLaunch,
    /// By the running launch.
    InLaunch,
}

impl State {
    /// The state after another write. A pair that was written before the launch stays so: a CTA may read it either way.
    const fn after(self, written: Self) -> Self {
        match (self, written) {
            (Self::Unwritten, _) | (_, Self::BeforeLaunch) => written,
            (before, _) => before,
        }
    }

    const fn from_bits(bits: u8) -> Self {
        match bits {
            0 => Self::Unwritten,
            1 => Self::BeforeLaunch,
            _ => Self::InLaunch,
        }
    }
}

/// The contents of unwritten memory: a NaN in every float format.
const POISON: u16 = 0xffff;

/// The bytes of a buffer, in pairs: the smallest unit that operations access. Offsets are even.
pub(super) enum Storage {
    /// All of them.
    Dense {
        pairs: Vec<AtomicU16>,
        /// For each pair, a [`State`].
        states: Vec<AtomicU8>,
    },
    /// Pages that have been written, by their number: for buffers larger than the memory of the machine.
    Sparse(Mutex<BTreeMap<u64, Page>>),
}

const PAIRS_PER_PAGE: usize = PAGE_BYTES as usize / 2;

pub(super) struct Page {
    pairs: Box<[u16; PAIRS_PER_PAGE]>,
    states: Box<[State; PAIRS_PER_PAGE]>,
}

impl Default for Page {
    fn default() -> Self {
        Self { pairs: Box::new([POISON; PAIRS_PER_PAGE]), states: Box::new([State::Unwritten; PAIRS_PER_PAGE]) }
    }
}

/// The page of a pair, and the index in it.
const fn page_and_index(pair: u64) -> (u64, usize) {
    (pair / PAIRS_PER_PAGE as u64, (pair % PAIRS_PER_PAGE as u64) as usize)
}

fn locked(pages: &Mutex<BTreeMap<u64, Page>>) -> MutexGuard<'_, BTreeMap<u64, Page>> {
    pages.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Storage {
    pub(super) fn dense(length: usize) -> Self {
        let count = length.div_ceil(2);
        Self::Dense {
            pairs: (0..count).map(|_| AtomicU16::new(POISON)).collect(),
            states: (0..count).map(|_| AtomicU8::new(State::Unwritten as u8)).collect(),
        }
    }

    pub(super) const fn sparse() -> Self {
        Self::Sparse(Mutex::new(BTreeMap::new()))
    }

    /// Copies bytes out.
    pub(super) fn load(&self, offset: u64, bytes: &mut [u8]) {
        let copy = |chunk: &mut [u8], pair: u16| chunk.copy_from_slice(&pair.to_le_bytes()[..chunk.len()]);
        match self {
            Self::Dense { pairs, .. } => {
                for (chunk, pair) in bytes.chunks_mut(2).zip(&pairs[(offset / 2) as usize..]) {
                    copy(chunk, pair.load(Ordering::Relaxed));
                }
            }
            Self::Sparse(pages) => {
                let pages = locked(pages);
                for (chunk, pair) in bytes.chunks_mut(2).zip(offset / 2..) {
                    let (page, index) = page_and_index(pair);
                    copy(chunk, pages.get(&page).map_or(POISON, |page| page.pairs[index]));
                }
            }
        }
    }

    /// Copies bytes in.
    pub(super) fn put(&self, offset: u64, bytes: &[u8], state: State) {
        let pair_of = |chunk: &[u8]| u16::from_le_bytes([chunk[0], chunk.get(1).copied().unwrap_or(POISON as u8)]);
        match self {
            Self::Dense { pairs, states } => {
                let first = (offset / 2) as usize;
                for ((chunk, pair), written) in bytes.chunks(2).zip(&pairs[first..]).zip(&states[first..]) {
                    pair.store(pair_of(chunk), Ordering::Relaxed);
                    let before = State::from_bits(written.load(Ordering::Relaxed));
                    let after = before.after(state);
                    if after != before {
                        written.store(after as u8, Ordering::Relaxed);
                    }
                }
            }
            Self::Sparse(pages) => {
                let mut pages = locked(pages);
                for (chunk, pair) in bytes.chunks(2).zip(offset / 2..) {
                    let (page, index) = page_and_index(pair);
                    let page = pages.entry(page).or_default();
                    page.pairs[index] = pair_of(chunk);
                    page.states[index] = page.states[index].after(state);
                }
            }
        }
    }

    /// True if a pair of bytes was written before the launch.
    pub(super) fn was_written(&self, pair: usize) -> bool {
        let state = match self {
            Self::Dense { states, .. } => State::from_bits(states[pair].load(Ordering::Relaxed)),
            Self::Sparse(pages) => {
                let (page, index) = page_and_index(pair as u64);
                locked(pages).get(&page).map_or(State::Unwritten, |page| page.states[index])
            }
        };
        state == State::BeforeLaunch
    }

    /// Counts the writes of the launch as written before the next.
    pub(super) fn end_launch(&self) {
        match self {
            Self::Dense { states, .. } => {
                for state in states.iter().filter(|state| state.load(Ordering::Relaxed) == State::InLaunch as u8) {
                    state.store(State::BeforeLaunch as u8, Ordering::Relaxed);
                }
            }
            Self::Sparse(pages) => {
                for state in locked(pages).values_mut().flat_map(|page| page.states.iter_mut()) {
                    if *state == State::InLaunch {
                        *state = State::BeforeLaunch;
                    }
                }
            }
        }
    }

    /// The bytes that were never written, of `length`, as ranges of offsets.
    pub(super) fn unwritten(&self, length: u64) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut add = |start: u64, end: u64| {
            let end = end.min(length);
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ if start < end => ranges.push(start..end),
                _ => {}
            }
        };
        match self {
            Self::Dense { states, .. } => {
                for (state, start) in states.iter().zip((0..).step_by(2)) {
                    if state.load(Ordering::Relaxed) == State::Unwritten as u8 {
                        add(start, start + 2);
                    }
                }
            }
            Self::Sparse(pages) => {
                let mut end = 0;
                for (number, page) in locked(pages).iter() {
                    let first = number * PAGE_BYTES;
                    add(end, first);
                    for (state, start) in page.states.iter().zip((first..).step_by(2)) {
                        if *state == State::Unwritten {
                            add(start, start + 2);
                        }
                    }
                    end = first + PAGE_BYTES;
                }
                add(end, length);
            }
        }
        ranges
    }
}
