//! Encodings of outputs: a hash for what must be equal, base64 for what must be kept.

/// The 128-bit FNV-1a hash. Records are compared with what we computed ourselves, so nobody chooses collisions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fnv(u128);

impl Fnv {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

    pub(super) const fn new() -> Self {
        Self(Self::OFFSET)
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(Self::PRIME);
        }
    }

    pub(super) fn of(bytes: &[u8]) -> u128 {
        let mut hash = Self::new();
        hash.add(bytes);
        hash.0
    }

    pub(super) fn text(self) -> String {
        format!("{:032x}", self.0)
    }
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The bytes as base64, padded.
pub(super) fn to_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let mut three = [0; 3];
        three[..chunk.len()].copy_from_slice(chunk);
        let bits = u32::from_be_bytes([0, three[0], three[1], three[2]]);
        for position in 0..4 {
            let digit = bits >> (18 - 6 * position) & 63;
            text.push(if position <= chunk.len() { char::from(ALPHABET[digit as usize]) } else { '=' });
        }
    }
    text
}

/// The bytes of base64; `None` for what is none.
pub(super) fn from_base64(text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let padding = text.iter().rev().take_while(|byte| **byte == b'=').count();
    if padding > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for chunk in text.chunks(4) {
        let mut bits = 0;
        for byte in chunk {
            let digit = match byte {
                b'=' => 0,
                _ => ALPHABET.iter().position(|letter| letter == byte)?,
            };
            bits = bits << 6 | digit as u32;
        }
        bytes.extend(&bits.to_be_bytes()[1..]);
    }
    bytes.truncate(bytes.len() - padding);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_what_the_definition_says() {
        // The published test vectors of FNV-1a, 128 bits.
        assert_eq!(Fnv::new().text(), "6c62272e07bb014262b821756295c58d");
        assert_eq!(format!("{:032x}", Fnv::of(b"a")), "d228cb696f1a8caf78912b704e4a8964");
        assert_eq!(format!("{:032x}", Fnv::of(b"foobar")), "343e1662793c64bf6f0d3597ba446f18");
    }

    #[test]
    fn base64_is_that_of_the_standard() {
        // RFC 4648, section 10.
        let vectors = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ];
        for (plain, encoded) in vectors {
            assert_eq!(to_base64(plain.as_bytes()), encoded);
            assert_eq!(from_base64(encoded).as_deref(), Some(plain.as_bytes()));
        }
        for wrong in ["Zg=", "Z?==", "====", "Zm9vY"] {
            assert_eq!(from_base64(wrong), None, "{wrong}");
        }
    }
}
