//! The key of a compiled kernel: a hash of everything that determines its code.

use core::fmt;
use core::str::FromStr;

use sha2::{Digest, Sha256};

/// Everything that determines the code of a compiled kernel. Two sources that differ in any field have different keys,
/// so an entry is never stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeySource<'source> {
    /// The whole PTX text.
    pub ptx: &'source str,
    /// Every option given to the compiler, in any fixed spelling.
    pub options: &'source str,
    /// The GPU that the code is for, as precisely as the compiler distinguishes them.
    pub arch: &'source str,
    /// The driver, which contains the compiler.
    pub driver: &'source str,
    /// The version of this crate.
    pub crate_version: &'source str,
}

/// The hash of a [`KeySource`], SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key([u8; Self::BYTES]);

impl Key {
    /// Bytes of a key.
    pub const BYTES: usize = 32;

    /// The key of a source.
    pub fn of(source: &KeySource<'_>) -> Self {
        let KeySource { ptx, options, arch, driver, crate_version } = source;
        let mut hash = Sha256::new();
        hash.update(b"flashcore kernel\0");
        for field in [ptx, options, arch, driver, crate_version] {
            // The length first: moving a character from one field to the next changes the hash.
            hash.update((field.len() as u64).to_le_bytes());
            hash.update(field.as_bytes());
        }
        Self(hash.finalize().into())
    }

    /// The key with these bytes.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    pub const fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Key({self})")
    }
}

/// A text that is not a key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a key; a key is 64 lowercase hexadecimal digits")]
pub struct InvalidKey {
    /// The text.
    pub text: String,
}

impl FromStr for Key {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidKey { text: text.to_owned() };
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let digits: Vec<u8> = text.bytes().map(digit).collect::<Option<_>>().ok_or_else(invalid)?;
        let bytes: Vec<u8> =
            digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
        if digits.len() == 2 * Self::BYTES { bytes.try_into().map(Self).map_err(|_| invalid()) } else { Err(invalid()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: KeySource<'_> =
        KeySource { ptx: ".version 7.0", options: "O4", arch: "sm_80", driver: "13000", crate_version: "0.1.0" };

    #[test]
    fn every_field_counts() {
        let variants = [
            SOURCE,
            KeySource { ptx: ".version 7.1", ..SOURCE },
            KeySource { options: "O3", ..SOURCE },
            KeySource { arch: "sm_86", ..SOURCE },
            KeySource { driver: "13010", ..SOURCE },
            KeySource { crate_version: "0.1.1", ..SOURCE },
            // The same characters, divided differently.
            KeySource { ptx: ".version 7.0O", options: "4", ..SOURCE },
        ];
        let keys: std::collections::BTreeSet<Key> = variants.iter().map(Key::of).collect();
        assert_eq!(keys.len(), variants.len());
        assert_eq!(Key::of(&SOURCE), Key::of(&SOURCE));
    }

    #[test]
    fn a_key_is_the_same_on_every_machine_and_in_every_build() {
        // Computed once; a change means that every cache in the world misses.
        assert_eq!(Key::of(&SOURCE).to_string(), "ea35a9f1539ca54f2f8d1e2ca552b0bdac3435496df00092bd095776ecc6c6c2");
    }

    #[test]
    fn text_and_back() {
        let key = Key::of(&SOURCE);
        assert_eq!(key.to_string().parse(), Ok(key));
        let text = key.to_string();
        for wrong in ["", "00", &text[1..], &text.to_uppercase(), &format!("{text}00"), &format!("{text}0")] {
            assert_eq!(wrong.parse::<Key>(), Err(InvalidKey { text: wrong.to_owned() }));
        }
    }
}
