//! tar, the archive format that every system can read: headers of 512 bytes, contents padded to 512.

use std::collections::BTreeSet;

use crate::util::printable::printable;

/// Files by name, in order.
pub type Files = Vec<(String, Vec<u8>)>;

const BLOCK: usize = 512;
/// The longest name that a header of the old form holds.
const LONGEST_NAME: usize = 100;
/// Two empty blocks are the end.
const END: usize = 2 * BLOCK;

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
    archive.resize(archive.len() + END, 0);
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

/// The files of an archive, if it is one that [`write`] makes; else what is wrong with it. Programs that unpack archives
/// take far more than that, and each might see other files in the rest.
pub(super) fn read(archive: &[u8]) -> Result<Files, String> {
    let damaged = || "the archive in it is damaged".to_owned();
    let mut files = Files::new();
    let mut rest = archive;
    loop {
        let (header, contents) = rest.split_at_checked(BLOCK).ok_or_else(damaged)?;
        if header.iter().all(|byte| *byte == 0) {
            break;
        }
        if header[148..156] != checksum_text(header) {
            return Err(damaged());
        }
        let name: Vec<u8> = header[..LONGEST_NAME].iter().copied().take_while(|byte| *byte != 0).collect();
        let name = String::from_utf8(name).map_err(|_| damaged())?;
        match header[156] {
            b'0' => {}
            b'1' | b'2' => return Err(format!("`{}` is a link; a bundle has files only", printable(&name))),
            b'3' | b'4' | b'6' => return Err(format!("`{}` is a device; a bundle has files only", printable(&name))),
            _ => return Err(format!("`{}` is no plain file; a bundle has files only", printable(&name))),
        }
        let size = std::str::from_utf8(&header[124..135]).ok().and_then(|size| usize::from_str_radix(size, 8).ok());
        let size = size.ok_or_else(damaged)?;
        files.push((name, contents.get(..size).ok_or_else(damaged)?.to_vec()));
        rest = contents.get(size.next_multiple_of(BLOCK)..).ok_or_else(damaged)?;
    }
    check_names(files.iter().map(|(name, _)| name.as_str()))?;
    if rest.len() > END || rest.iter().any(|byte| *byte != 0) {
        return Err("there is more after the end of the archive in it".to_owned());
    }
    // Owners, times, modes, names in two parts, padding: whatever is left that could be read otherwise.
    if write(&files) != archive {
        return Err("the archive in it is not of the form that `flashcore repro` writes".to_owned());
    }
    Ok(files)
}

/// Refuses names that lead out of the folder in which an archive is unpacked, or that two files would share.
pub(super) fn check_names<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let mut taken = BTreeSet::new();
    for name in names {
        let shown = printable(name);
        if name.len() > LONGEST_NAME {
            return Err(format!("the name `{shown}` has {} bytes; {LONGEST_NAME} is the most", name.len()));
        }
        if name.starts_with('/') || name.contains(['\\', ':']) {
            return Err(format!("the name `{shown}` is absolute, or would be on some system"));
        }
        if name.chars().any(char::is_control) {
            return Err(format!("the name `{shown}` has control characters"));
        }
        if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(format!(
                "the name `{shown}` does not stay in its folder; names of parts are not empty, `.` or `..`"
            ));
        }
        // Some systems take capitals for small letters.
        if !taken.insert(name.to_lowercase()) {
            return Err(format!("there are two files of the name `{shown}`"));
        }
    }
    let is_folder_of = |folder: &str, name: &str| name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
    match taken.iter().find(|name| taken.iter().any(|other| is_folder_of(name, other))) {
        Some(name) => Err(format!("`{name}` is a file and a folder")),
        None => Ok(()),
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
        assert_eq!(read(&archive), Ok(files));
        assert_eq!(archive.len() % BLOCK, 0);
        assert_eq!(read(&archive[..600]), Err("the archive in it is damaged".to_owned()));
    }

    /// Changes bytes of a header, and gives it the checksum that goes with them.
    fn with_header(archive: &[u8], place: usize, bytes: &[u8]) -> Vec<u8> {
        let mut archive = archive.to_vec();
        archive[place..place + bytes.len()].copy_from_slice(bytes);
        let checksum = checksum_text(&archive[..BLOCK]);
        archive[148..156].copy_from_slice(&checksum);
        archive
    }

    #[test]
    fn what_others_would_unpack_otherwise_is_refused() {
        let check = |archive: &[u8], expected: &str| assert_eq!(read(archive), Err(expected.to_owned()));
        let of =
            |names: &[&str]| write(&names.iter().map(|name| ((*name).to_owned(), b"x".to_vec())).collect::<Vec<_>>());
        check(&of(&["a", "b", "a"]), "there are two files of the name `a`");
        check(&of(&["manifest.json", "Manifest.json"]), "there are two files of the name `Manifest.json`");
        check(&of(&["a", "a/b"]), "`a` is a file and a folder");
        check(&of(&["/etc/evil"]), "the name `/etc/evil` is absolute, or would be on some system");
        check(&of(&["C:evil"]), "the name `C:evil` is absolute, or would be on some system");
        check(&of(&["..\\evil"]), "the name `..\\evil` is absolute, or would be on some system");
        let stays = "does not stay in its folder; names of parts are not empty, `.` or `..`";
        for name in ["../evil", "a/../../evil", "a/..", ".", "./a", "a//b", "a/", ""] {
            check(&of(&[name]), &format!("the name `{name}` {stays}"));
        }
        check(&of(&["a\x1b[2J"]), r"the name `a\u{1b}[2J` has control characters");
        let archive = of(&["a"]);
        for (kind, words) in [
            (b'1', "a link"),
            (b'2', "a link"),
            (b'3', "a device"),
            (b'4', "a device"),
            (b'5', "no plain file"),
            (b'6', "a device"),
            (b'x', "no plain file"),
            (b'L', "no plain file"),
        ] {
            check(&with_header(&archive, 156, &[kind]), &format!("`a` is {words}; a bundle has files only"));
        }
        let form = "the archive in it is not of the form that `flashcore repro` writes";
        // A name in two parts, the target of a link, the mode of a program that others may start.
        check(&with_header(&archive, 345, b"../.."), form);
        check(&with_header(&archive, 157, b"/etc/passwd"), form);
        check(&with_header(&archive, 100, b"0004755"), form);
        // Padding, and one empty block in place of two.
        let mut padded = archive.clone();
        padded[BLOCK + 1] = 1;
        check(&padded, form);
        check(&archive[..archive.len() - BLOCK], form);
        let trailing = "there is more after the end of the archive in it";
        check(&[&archive[..], &of(&["b"])].concat(), trailing);
        check(&[&archive[..], &[0; BLOCK]].concat(), trailing);
        let mut between = archive.clone();
        between[3 * BLOCK + 5] = 1;
        check(&between, trailing);
    }
}
