//! Guard bands: buffers that detect a write past either end.

/// Bytes of the canary on each side of the payload by default: more than any tile row, and a multiple of the 256 bytes
/// to which device memory is aligned.
const DEFAULT_GUARD_BYTES: usize = 4096;

/// A payload between two guard bands.
///
/// A harness gives the backend the whole of [`bytes`](Self::bytes) with the payload beginning at
/// [`payload_start`](Self::payload_start), so that a write a little outside lands in a band and does not crash. Padding
/// *between* the elements of a strided output is guarded by its poison, see
/// [`Outputs::poisoned`](crate::Outputs::poisoned).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guarded {
    bytes: Vec<u8>,
    guard: usize,
}

impl Guarded {
    /// `payload` between two bands of 4096 bytes.
    pub fn new(payload: &[u8]) -> Self {
        Self::with_guard(payload, DEFAULT_GUARD_BYTES)
    }

    /// `payload` between two bands of `guard` bytes.
    pub fn with_guard(payload: &[u8], guard: usize) -> Self {
        let band = |start: usize| (start..start + guard).map(canary);
        let bytes = band(0).chain(payload.iter().copied()).chain(band(guard + payload.len())).collect();
        Self { bytes, guard }
    }

    /// Reassembles the [`bytes`](Self::bytes) of a payload between bands of 4096 bytes after use elsewhere, to be
    /// checked.
    ///
    /// # Panics
    ///
    /// When there are fewer bytes than two bands.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        assert!(bytes.len() >= 2 * DEFAULT_GUARD_BYTES, "{} bytes have no room for two guard bands", bytes.len());
        Self { bytes, guard: DEFAULT_GUARD_BYTES }
    }

    /// The payload with both bands.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The payload with both bands, for a backend to write to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The start of the payload in [`bytes`](Self::bytes).
    pub fn payload_start(&self) -> usize {
        self.guard
    }

    /// The payload.
    pub fn payload(&self) -> &[u8] {
        &self.bytes[self.guard..self.bytes.len() - self.guard]
    }

    /// The payload, to be changed.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        let end = self.bytes.len() - self.guard;
        &mut self.bytes[self.guard..end]
    }

    /// Checks that both bands are unchanged.
    pub fn check(&self) -> Result<(), GuardError> {
        let end = self.bytes.len() - self.guard;
        let changed = |&index: &usize| self.bytes[index] != canary(index);
        // The change nearest to the payload says most about the mistake.
        if let Some(index) = (0..self.guard).rev().find(changed) {
            return Err(GuardError::Before { distance: self.guard - index, found: self.bytes[index] });
        }
        if let Some(index) = (end..self.bytes.len()).find(changed) {
            return Err(GuardError::After { distance: index - end, found: self.bytes[index] });
        }
        Ok(())
    }
}

/// A byte that differs from its neighbours and is neither a zero nor all ones, so that copies of other data, zero
/// fills and memsets all show.
fn canary(index: usize) -> u8 {
    0xA0 | (index % 13) as u8
}

/// A guard band was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuardError {
    /// The band before the payload.
    #[error("the byte {distance} bytes before the buffer was overwritten with {found:#04x}")]
    Before {
        /// Bytes from the changed byte to the beginning of the payload; 1 is the byte just before it.
        distance: usize,
        /// The value there now.
        found: u8,
    },
    /// The band after the payload.
    #[error("the byte {distance} bytes after the end of the buffer was overwritten with {found:#04x}")]
    After {
        /// Bytes from the end of the payload to the changed byte; 0 is the byte just after it.
        distance: usize,
        /// The value there now.
        found: u8,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(write: impl FnOnce(&mut Guarded), expected: Result<(), GuardError>) {
        let mut guarded = Guarded::with_guard(&[7; 100], 64);
        write(&mut guarded);
        assert_eq!(guarded.check(), expected);
    }

    #[test]
    fn writes_outside_are_found_and_inside_are_not() {
        check(|_| {}, Ok(()));
        check(|guarded| guarded.payload_mut().fill(0), Ok(()));
        check(|guarded| guarded.bytes_mut()[63] = 0, Err(GuardError::Before { distance: 1, found: 0 }));
        check(|guarded| guarded.bytes_mut()[164] = 9, Err(GuardError::After { distance: 0, found: 9 }));
        check(|guarded| guarded.bytes_mut()[227] = 9, Err(GuardError::After { distance: 63, found: 9 }));
    }

    /// A backend that shifts everything by a few bytes, or fills with one value, cannot rebuild the bands.
    #[test]
    fn no_fill_and_no_shift_keeps_the_bands() {
        for fill in 0..=u8::MAX {
            let mut guarded = Guarded::with_guard(&[], 16);
            guarded.bytes_mut().fill(fill);
            assert!(guarded.check().is_err(), "fill {fill:#04x}");
        }
        for shift in 1..13 {
            let mut guarded = Guarded::with_guard(&[], 64);
            guarded.bytes_mut().rotate_left(shift);
            assert!(guarded.check().is_err(), "shift {shift}");
        }
    }

    #[test]
    fn the_payload_is_kept() {
        let guarded = Guarded::new(&[1, 2, 3]);
        assert_eq!(guarded.payload(), [1, 2, 3]);
        assert_eq!(guarded.bytes().len(), 2 * guarded.payload_start() + 3);
    }
}
