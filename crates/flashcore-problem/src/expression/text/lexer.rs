//! Tokens of an expression, with the columns where they begin.

use super::{ExpressionError, MOST_CHARACTERS};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Token<'a> {
    Name(&'a str),
    Integer(i32),
    Number(f32),
    /// An operator or a bracket.
    Sign(&'static str),
    End,
}

/// A token, and the byte where it begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Placed<'a> {
    pub(super) token: Token<'a>,
    pub(super) at: usize,
}

/// Longer ones first.
const SIGNS: [&str; 24] = [
    ">>", "<=", ">=", "==", "!=", "&&", "||", "+", "-", "*", "/", "<", ">", "!", "?", ":", "(", ")", "[", "]", ",",
    ";", "=", "%",
];

/// An error at a byte of the text.
pub(super) fn error(text: &str, at: usize, message: impl Into<String>) -> ExpressionError {
    let (before, rest) = (text.get(..at).unwrap_or(text), text.get(at..).unwrap_or(""));
    ExpressionError { column: before.chars().count() + 1, found: shown(rest), message: message.into() }
}

/// The beginning of a text, for a message.
pub(super) fn shown(text: &str) -> String {
    let mut characters = text.trim_end().chars();
    let begun: String = characters.by_ref().take(24).map(|c| if c.is_control() { '\u{FFFD}' } else { c }).collect();
    if characters.next().is_some() { format!("{begun}...") } else { begun }
}

/// The tokens of a text, the last of them the end.
pub(super) fn tokens(text: &str) -> Result<Vec<Placed<'_>>, ExpressionError> {
    if text.chars().count() > MOST_CHARACTERS {
        return Err(error(text, text.len(), format!("a text may have at most {MOST_CHARACTERS} characters")));
    }
    let (mut found, mut at) = (Vec::new(), 0);
    loop {
        let rest = text[at..].trim_start();
        at = text.len() - rest.len();
        let Some(first) = rest.chars().next() else {
            found.push(Placed { token: Token::End, at });
            return Ok(found);
        };
        let (token, length) = if first.is_ascii_digit() || first == '.' {
            let length = number_length(rest);
            (number(&rest[..length]).map_err(|message| error(text, at, message))?, length)
        } else if first.is_ascii_alphabetic() || first == '_' {
            let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let length = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            (Token::Name(&rest[..length]), length)
        } else if let Some(sign) = SIGNS.iter().find(|sign| rest.starts_with(**sign)) {
            (Token::Sign(sign), sign.len())
        } else {
            let hint = match first {
                '&' => "; both of two truths is written &&",
                '|' => "; one of two truths is written ||",
                _ => "",
            };
            return Err(error(text, at, format!("there is no sign `{}` in expressions{hint}", first.escape_debug())));
        };
        found.push(Placed { token, at });
        at += length;
    }
}

/// Bytes of the number at the beginning: digits, a point, an exponent with its sign, and letters that do not belong there.
fn number_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut length = 0;
    while let Some(&byte) = bytes.get(length) {
        let is_sign = matches!(byte, b'+' | b'-') && length > 0 && matches!(bytes[length - 1], b'e' | b'E');
        if !(byte.is_ascii_alphanumeric() || byte == b'.' || is_sign) {
            break;
        }
        length += 1;
    }
    length
}

fn number(text: &str) -> Result<Token<'static>, String> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        let value = text.parse::<i32>();
        return value
            .map(Token::Integer)
            .map_err(|_| format!("integers go up to {}; write {text}.0 for a number", i32::MAX));
    }
    match text.parse::<f32>() {
        Ok(value) if value.is_finite() => Ok(Token::Number(value)),
        Ok(_) => Err("this is more than a float holds".to_owned()),
        Err(_) => Err("this is not a number; write 2, 0.5 or 1e-3".to_owned()),
    }
}

/// The text on one line, with `#` in the place of constants.
pub(super) fn without_constants(text: &str) -> String {
    let Ok(tokens) = tokens(text) else { return String::new() };
    let mut name = String::with_capacity(text.len());
    for pair in tokens.windows(2) {
        let written = &text[pair[0].at..pair[1].at];
        let is_spaced = written.ends_with(char::is_whitespace) && pair[1].token != Token::End;
        match pair[0].token {
            Token::Integer(_) | Token::Number(_) => name.push('#'),
            _ => name.push_str(written.trim_end()),
        }
        if is_spaced {
            name.push(' ');
        }
    }
    name
}
