//! The bundle file: an ordinary `tar.gz`, with a seal.
//!
//! A gzip file can have several members, one after another. The first is the archive; the second is the SHA-256 of all
//! bytes of the first, in a form that leaves no bit open. So every program unpacks the file, and whatever bit of it
//! changes, the seal is another: checksums inside of an archive would not notice a change of its padding.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;

pub use super::tar::Files;

use super::tar;
use crate::util::digest::sha256;

/// Reason why a bundle is refused.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// Too short, or of another program.
    #[error("not a bundle of `flashcore repro`: it has no seal")]
    NoSeal,
    /// It was changed.
    #[error("the bundle was changed after it was made: its contents do not match its seal")]
    Broken,
    /// The seal is right and the contents make no sense.
    #[error("the bundle cannot be unpacked: {0}")]
    Unpack(String),
    /// The manifest names something that cannot be computed by anybody.
    #[error("the manifest names an invalid problem: {0}")]
    Problem(String),
    /// A file in it does not match the manifest.
    #[error("{file} does not match the manifest: {reason}")]
    File {
        /// The file.
        file: String,
        /// The cause.
        reason: String,
    },
}

/// Bytes of the second member, around and including the hash: a header, one stored block, its checksum and length.
const SEAL_BYTES: usize = 10 + 5 + HASH_BYTES + 8;
const HASH_BYTES: usize = 65;

/// The most bytes of an archive; a small file can unpack to any number of them.
const MOST_ARCHIVE_BYTES: u64 = 1 << 30;

/// The file of a bundle.
pub fn pack(files: &Files) -> std::io::Result<Vec<u8>> {
    tar::check_names(files.iter().map(|(name, _)| name.as_str())).map_err(std::io::Error::other)?;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&tar::write(files))?;
    let mut bundle = encoder.finish()?;
    bundle.extend(seal(&bundle));
    Ok(bundle)
}

/// The second member for a first: gzip without compression, every byte of it given.
fn seal(member: &[u8]) -> Vec<u8> {
    let text = format!("{}\n", sha256(member));
    let mut seal = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let length = text.len() as u16;
    seal.push(1);
    seal.extend(length.to_le_bytes());
    seal.extend((!length).to_le_bytes());
    seal.extend(text.as_bytes());
    let mut checksum = flate2::Crc::new();
    checksum.update(text.as_bytes());
    seal.extend(checksum.sum().to_le_bytes());
    seal.extend(u32::from(length).to_le_bytes());
    seal
}

/// The files of a bundle that nobody has changed.
pub fn open(bundle: &[u8]) -> Result<Files, BundleError> {
    let end = bundle.len().checked_sub(SEAL_BYTES).ok_or(BundleError::NoSeal)?;
    let (member, found) = bundle.split_at(end);
    if member.get(..2) != Some(&[0x1f, 0x8b]) {
        return Err(BundleError::NoSeal);
    }
    if found != seal(member) {
        return Err(BundleError::Broken);
    }
    let archive = unpack(member, MOST_ARCHIVE_BYTES).map_err(BundleError::Unpack)?;
    tar::read(&archive).map_err(BundleError::Unpack)
}

/// The archive in a first member, if it is all that is in it, and at most `most` bytes.
fn unpack(member: &[u8], most: u64) -> Result<Vec<u8>, String> {
    let mut archive = Vec::new();
    let mut unpacked = GzDecoder::new(member).take(most + 1);
    unpacked.read_to_end(&mut archive).map_err(|error| error.to_string())?;
    if archive.len() as u64 > most {
        return Err(format!("it has more than {most} bytes, which no bundle has"));
    }
    // Programs that unpack would go on with it.
    if !unpacked.into_inner().into_inner().is_empty() {
        return Err("there is more between the compressed archive and the seal".to_owned());
    }
    Ok(archive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_noticed() {
        let files: Files = vec![("manifest.json".to_owned(), b"{}".repeat(100)), ("b".to_owned(), vec![1, 2, 3])];
        let bundle = pack(&files).expect("a bundle");
        assert_eq!(open(&bundle).expect("nobody has changed it"), files);
        for place in 0..bundle.len() {
            for bit in 0..8 {
                let mut changed = bundle.clone();
                changed[place] ^= 1 << bit;
                assert!(open(&changed).is_err(), "bit {bit} of byte {place}");
            }
        }
        assert!(matches!(open(&bundle[..40]), Err(BundleError::NoSeal)));
        assert!(matches!(open(&bundle[..bundle.len() - 1]), Err(BundleError::Broken)));
    }

    #[test]
    fn other_programs_can_unpack_it() {
        // A reader of all members sees the archive and, after its end, the hash.
        let files: Files = vec![("a".to_owned(), b"hello".to_vec())];
        let bundle = pack(&files).expect("a bundle");
        let mut unpacked = Vec::new();
        flate2::bufread::MultiGzDecoder::new(&bundle[..]).read_to_end(&mut unpacked).expect("gzip");
        let archive = tar::write(&files);
        assert_eq!(open(&bundle).expect("a bundle"), files);
        assert_eq!(unpacked[..archive.len()], archive);
        assert_eq!(unpacked.len(), archive.len() + HASH_BYTES);
    }

    /// A bundle of bytes that are the first member, sealed as whoever makes a bundle can.
    fn sealed(member: Vec<u8>) -> Vec<u8> {
        let seal = seal(&member);
        [member, seal].concat()
    }

    fn compressed(archive: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(archive).expect("memory");
        encoder.finish().expect("memory")
    }

    #[test]
    fn what_is_sealed_is_all_there_is() {
        let check = |member: Vec<u8>, expected: &str| {
            let error = open(&sealed(member)).expect_err("it is to be refused").to_string();
            assert_eq!(error, format!("the bundle cannot be unpacked: {expected}"));
        };
        let archive = tar::write(&[("a".to_owned(), b"hello".to_vec())]);
        let member = compressed(&archive);
        let between = "there is more between the compressed archive and the seal";
        check([member.clone(), compressed(&archive)].concat(), between);
        check([member.clone(), b"more".to_vec()].concat(), between);
        check([member, vec![0]].concat(), between);
        check(compressed(&[&archive[..], b"more"].concat()), "there is more after the end of the archive in it");
        let large = compressed(&[0; 1025]);
        assert_eq!(unpack(&large, 1025).map(|archive| archive.len()), Ok(1025));
        assert_eq!(unpack(&large, 1024), Err("it has more than 1024 bytes, which no bundle has".to_owned()));
        let twice = vec![("a".to_owned(), vec![]), ("a".to_owned(), vec![])];
        check(compressed(&tar::write(&twice)), "there are two files of the name `a`");
        assert_eq!(pack(&twice).expect_err("not made either").to_string(), "there are two files of the name `a`");
    }
}
