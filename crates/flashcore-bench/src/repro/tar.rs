//! The archive format that every system has a program for: headers of 512 bytes, contents padded to 512.

/// Files by name, in order.
pub type Files = Vec<(String, Vec<u8>)>;

const BLOCK: usize = 512;
/// The longest name that a header of the old form holds.
const LONGEST_NAME: usize = 100;

/// The archive of some files. Owners and times are nobody's business, so that the same files give the same bytes.
pub(super) fn write(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, contents) in files {
        let mut header = [0u8; BLOCK];
        let name = name.as_bytes();
        header[..name.len().min(LONGEST_NAME)].copy_from_slice(&name[..name.len().min(LONGEST_NAME)]);
        header[100..108].copy_from_slice(b"0000644\0");
        header[108..116].copy_from_slice(b"0000000\0");
        header[116..124].copy_from_slice(b"0000000\0");
        header[124..136].copy_from_slice(format!("{:011o}\0", contents.len()).as_bytes());
        header[136..148].copy_from_slice(b"00000000000\0");
        header[156] = b'0';
        header[257..265].copy_from_slice(b"ustar\x0000");
        let checksum = checksum_text(&header);
        header[148..156].copy_from_slice(&checksum);
        archive.extend(header);
        archive.extend(contents);
        archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    }
    // Two empty blocks are the end.
    archive.resize(archive.len() + 2 * BLOCK, 0);
    archive
}

/// The sum of the bytes of a header, with spaces where the sum itself stands.
fn checksum_text(header: &[u8]) -> [u8; 8] {
    let sum: u32 = header
        .iter()
        .enumerate()
        .map(|(place, byte)| if (148..156).contains(&place) { 32 } else { u32::from(*byte) })
        .sum();
    let mut text = [0; 8];
    text.copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    text
}

/// The files of an archive that [`write`] made; nothing for anything else.
pub(super) fn read(archive: &[u8]) -> Option<Files> {
    let mut files = Files::new();
    let mut rest = archive;
    loop {
        let (header, behind) = rest.split_at_checked(BLOCK)?;
        if header.iter().all(|byte| *byte == 0) {
            return Some(files);
        }
        if header[148..156] != checksum_text(header) || header[156] != b'0' {
            return None;
        }
        let name: Vec<u8> = header[..LONGEST_NAME].iter().copied().take_while(|byte| *byte != 0).collect();
        let size = usize::from_str_radix(std::str::from_utf8(&header[124..135]).ok()?, 8).ok()?;
        let (contents, _) = behind.split_at_checked(size)?;
        files.push((String::from_utf8(name).ok()?, contents.to_vec()));
        rest = behind.get(size.next_multiple_of(BLOCK)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_survive_the_round_trip() {
        let files: Files = vec![
            ("a/b.txt".to_owned(), b"hello".to_vec()),
            ("empty".to_owned(), vec![]),
            ("c".to_owned(), vec![7; 512]),
        ];
        let archive = write(&files);
        assert_eq!(read(&archive), Some(files));
        assert_eq!(archive.len() % BLOCK, 0);
        assert_eq!(read(&archive[..600]), None);
    }
}
