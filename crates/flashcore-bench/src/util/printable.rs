//! Escapes text from files for a terminal.
//!
//! A terminal obeys what is written to it: escape sequences move the cursor, change the title, hide what follows. Text
//! that comes from a file is shown with such characters spelt out.

use core::fmt::Write;
use std::borrow::Cow;

/// The text with every control character spelt out: `\n`, `\t`, `\r`, else `\u{1b}`. So it is one line, and says what it
/// holds. Characters that turn the direction of writing around count as controls.
pub fn printable(text: &str) -> Cow<'_, str> {
    spelt_out(text, is_control, |character, out| match character {
        '\n' | '\r' | '\t' => out.extend(character.escape_default()),
        _ => out.extend(character.escape_unicode()),
    })
}

/// Printable text that keeps its line breaks and tabs, for text of our own that names what is in files.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    let is_wrong = |character| is_control(character) && !matches!(character, '\n' | '\t');
    spelt_out(text, is_wrong, |character, out| match character {
        '\r' => out.push_str("\\r"),
        _ => out.extend(character.escape_unicode()),
    })
}

/// JSON with the characters that JSON leaves as they are, and a terminal does not, written as JSON writes others. They
/// only occur in strings, so it means the same.
pub fn printable_json(json: &str) -> Cow<'_, str> {
    let is_wrong = |character| is_control(character) && !character.is_ascii_whitespace();
    spelt_out(json, is_wrong, |character, out| {
        let mut units = [0; 2];
        for unit in character.encode_utf16(&mut units) {
            // Writing to a string cannot fail.
            let _ = write!(out, "\\u{unit:04x}");
        }
    })
}

/// Control characters of ASCII and Unicode, and those that separate lines or turn the direction of writing around.
fn is_control(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{061c}')
}

fn spelt_out(text: &str, is_wrong: impl Fn(char) -> bool, spell: impl Fn(char, &mut String)) -> Cow<'_, str> {
    if !text.contains(&is_wrong) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if is_wrong(character) {
            spell(character, &mut out);
        } else {
            out.push(character);
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_left() {
        let check = |text: &str, one_line: &str, lines: &str| {
            assert_eq!((&*printable(text), &*printable_lines(text)), (one_line, lines), "{text:?}");
        };
        check("1x8x512x64, é, 漢字", "1x8x512x64, é, 漢字", "1x8x512x64, é, 漢字");
        check("\x1b]0;title\x07", r"\u{1b}]0;title\u{7}", r"\u{1b}]0;title\u{7}");
        check("a\nb\tc\rd", r"a\nb\tc\rd", "a\nb\tc\\rd");
        // The control sequence introducer in one character, and text from right to left.
        check("\u{9b}2J\u{7f}", r"\u{9b}2J\u{7f}", r"\u{9b}2J\u{7f}");
        check("a\u{202e}b\u{2066}", r"a\u{202e}b\u{2066}", r"a\u{202e}b\u{2066}");
    }

    #[test]
    fn json_means_the_same() {
        let value = serde_json::json!({"a\u{9b}": "\x1b[2J\u{202e}é\u{7f}\n"});
        let text = format!("{value:#}\n");
        let shown = printable_json(&text);
        assert_eq!(shown, "{\n  \"a\\u009b\": \"\\u001b[2J\\u202eé\\u007f\\n\"\n}\n");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).expect("JSON"), value);
    }
}
