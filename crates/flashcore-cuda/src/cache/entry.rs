//! An entry of the cache and its file format.
//!
//! ```text
//! bytes   what
//!     8   magic, `FLASHKRN`
//!     4   version of the format, little-endian like all numbers here
//!    32   key
//!     4   bytes of the metadata
//!     8   bytes of the payload
//!    32   SHA-256 of everything above, the metadata and the payload
//!     …   metadata, JSON
//!     …   payload
//! ```
//!
//! One file holds a whole entry, so there is no moment at which half of it exists. The checksum covers every byte but
//! itself: a file is either exactly what was written or recognised as something else. It protects against accidents,
//! not against an attacker; the check of the folder's owner and mode protects against those.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::key::Key;
use super::self_check::SelfCheck;

const MAGIC: [u8; 8] = *b"FLASHKRN";
const VERSION: u32 = 1;
/// Magic, version, key, two lengths.
const HASHED_HEADER_BYTES: usize = 8 + 4 + Key::BYTES + 4 + 8;
const CHECKSUM_BYTES: usize = 32;
const HEADER_BYTES: usize = HASHED_HEADER_BYTES + CHECKSUM_BYTES;

/// The description of a compiled kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    /// The name of the entry point.
    pub kernel: String,
    /// The architecture it was generated for.
    pub arch: String,
    /// The driver that compiled it.
    pub driver: String,
    /// The log of the compiler.
    pub log: String,
    /// Milliseconds the compilation took.
    pub compile_milliseconds: u64,
    /// The verdict of the first run.
    pub self_check: SelfCheck,
}

/// The result of a compilation, to be cached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// The description.
    pub metadata: Metadata,
    /// The code.
    pub payload: Vec<u8>,
}

/// A compiled kernel in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Key,
    /// The description.
    pub metadata: Metadata,
    /// The code.
    pub payload: Vec<u8>,
}

/// The reason why a file is not the requested entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Corruption {
    /// Shorter than the header.
    #[error("the file has {bytes} bytes; the header alone has {HEADER_BYTES}")]
    Truncated {
        /// Bytes of the file.
        bytes: usize,
    },
    /// A file of another kind.
    #[error("the file does not start with `FLASHKRN`")]
    Magic,
    /// Another version of the format, in a folder where only this version belongs.
    #[error("the file has format version {found}, not {VERSION}")]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// Truncated, or with extra bytes.
    #[error("the header says {announced} bytes, the file has {bytes}")]
    Length {
        /// The length in the header.
        announced: u64,
        /// Bytes of the file.
        bytes: u64,
    },
    /// A byte has changed since it was written.
    #[error("the checksum does not match: the file has changed since it was written")]
    Checksum,
    /// A sound entry under another entry's name.
    #[error("the file holds {stored}, not {requested}")]
    Key {
        /// The key in the file.
        stored: Key,
        /// The key of its name.
        requested: Key,
    },
    /// A sound file whose metadata cannot be read.
    #[error("the metadata cannot be read: {reason}")]
    Metadata {
        /// The parser's message.
        reason: String,
    },
}

impl Entry {
    /// The entry as a file.
    pub(super) fn encode(&self) -> Vec<u8> {
        let metadata = serde_json::to_vec(&self.metadata).expect("strings, numbers and enums have a JSON form");
        let mut file = Vec::with_capacity(HEADER_BYTES + metadata.len() + self.payload.len());
        file.extend(MAGIC);
        file.extend(VERSION.to_le_bytes());
        file.extend(self.key.bytes());
        file.extend((metadata.len() as u32).to_le_bytes());
        file.extend((self.payload.len() as u64).to_le_bytes());
        let checksum = checksum(&file, &metadata, &self.payload);
        file.extend(checksum);
        file.extend(metadata);
        file.extend(&self.payload);
        file
    }

    /// Decodes the entry in a file, if the file is exactly what was written for this key.
    pub(super) fn decode(file: &[u8], requested: Key) -> Result<Self, Corruption> {
        let (header, body) = file.split_at_checked(HEADER_BYTES).ok_or(Corruption::Truncated { bytes: file.len() })?;
        let (hashed, stored_checksum) = header.split_at(HASHED_HEADER_BYTES);
        let mut fields = Fields(hashed);
        if fields.take::<8>() != MAGIC {
            return Err(Corruption::Magic);
        }
        let found = u32::from_le_bytes(fields.take());
        if found != VERSION {
            return Err(Corruption::Version { found });
        }
        let key = Key::from_bytes(fields.take());
        let metadata_bytes = u64::from(u32::from_le_bytes(fields.take()));
        let payload_bytes = u64::from_le_bytes(fields.take());
        let announced = metadata_bytes.saturating_add(payload_bytes).saturating_add(HEADER_BYTES as u64);
        if announced != file.len() as u64 {
            return Err(Corruption::Length { announced, bytes: file.len() as u64 });
        }
        let (metadata, payload) = body.split_at(metadata_bytes as usize);
        if checksum(hashed, metadata, payload) != stored_checksum {
            return Err(Corruption::Checksum);
        }
        if key != requested {
            return Err(Corruption::Key { stored: key, requested });
        }
        let metadata =
            serde_json::from_slice(metadata).map_err(|error| Corruption::Metadata { reason: error.to_string() })?;
        Ok(Self { key, metadata, payload: payload.to_vec() })
    }
}

fn checksum(header: &[u8], metadata: &[u8], payload: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let mut hash = Sha256::new();
    hash.update(header);
    hash.update(metadata);
    hash.update(payload);
    hash.finalize().into()
}

/// The unread rest of a header of known length.
struct Fields<'header>(&'header [u8]);

impl Fields<'_> {
    fn take<const BYTES: usize>(&mut self) -> [u8; BYTES] {
        let (field, rest) = self.0.split_first_chunk().expect("the header has room for all its fields");
        self.0 = rest;
        *field
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn entry(name: &str, payload: &[u8]) -> Entry {
        Entry {
            key: Key::from_bytes(Sha256::digest(name).into()),
            metadata: Metadata {
                kernel: name.to_owned(),
                arch: "sm_90".to_owned(),
                driver: "13000 580.65.06".to_owned(),
                log: "used 168 registers\n\u{20ac}".to_owned(),
                compile_milliseconds: 12,
                self_check: SelfCheck::NotRun,
            },
            payload: payload.to_vec(),
        }
    }

    fn check(file: &[u8], requested: Key, expected: &Result<Entry, Corruption>) {
        assert_eq!(&Entry::decode(file, requested), expected);
    }

    #[test]
    fn what_was_written_is_read() {
        for payload in [Vec::new(), b"\x7fELF".to_vec(), vec![7; 100_000]] {
            let entry = entry("k", &payload);
            check(&entry.encode(), entry.key, &Ok(entry));
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let entry = entry("k", b"some code");
        let file = entry.encode();
        for position in 0..file.len() {
            for bit in 0..8 {
                let mut file = file.clone();
                file[position] ^= 1 << bit;
                let error = Entry::decode(&file, entry.key).expect_err("a bit is wrong");
                let expected = match position {
                    0..8 => Corruption::Magic,
                    8..12 => Corruption::Version { found: VERSION ^ 1 << (8 * (position - 8) + bit) },
                    44..56 => {
                        assert!(matches!(error, Corruption::Length { .. }), "{error:?} at {position}");
                        continue;
                    }
                    _ => Corruption::Checksum,
                };
                assert_eq!(error, expected, "bit {bit} of byte {position}");
            }
        }
    }

    #[test]
    fn every_truncation_and_growth_is_noticed() {
        let entry = entry("k", b"some code");
        let file = entry.encode();
        let announced = file.len() as u64;
        for bytes in 0..file.len() {
            let expected = if bytes < HEADER_BYTES {
                Corruption::Truncated { bytes }
            } else {
                Corruption::Length { announced, bytes: bytes as u64 }
            };
            check(&file[..bytes], entry.key, &Err(expected));
        }
        let grown = [&file[..], b"\0"].concat();
        check(&grown, entry.key, &Err(Corruption::Length { announced, bytes: announced + 1 }));
    }

    #[test]
    fn another_entry_under_this_name() {
        let (stored, requested) = (entry("a", b"code of a"), entry("b", b"code of b").key);
        check(&stored.encode(), requested, &Err(Corruption::Key { stored: stored.key, requested }));
    }

    #[test]
    fn lengths_that_overflow() {
        let entry = entry("k", b"");
        let mut file = entry.encode();
        file[48..56].copy_from_slice(&u64::MAX.to_le_bytes());
        let bytes = file.len() as u64;
        check(&file, entry.key, &Err(Corruption::Length { announced: u64::MAX, bytes }));
    }
}
