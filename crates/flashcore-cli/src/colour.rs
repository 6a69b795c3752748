//! Colours of verdicts on a terminal.

use std::io::IsTerminal;

/// A colour that every terminal has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Colour {
    Red,
    Green,
    Yellow,
}

impl Colour {
    /// The text between the codes that switch the colour on and off.
    pub(crate) fn paint(self, text: &str) -> String {
        let code = match self {
            Self::Red => 31,
            Self::Green => 32,
            Self::Yellow => 33,
        };
        if text.is_empty() { String::new() } else { format!("\x1b[{code}m{text}\x1b[0m") }
    }
}

/// Verdicts, as they begin: what is well, what is not, and what is undecided.
const VERDICTS: [(Colour, &[&str]); 3] = [
    (
        Colour::Green,
        &["passed", "ok", "faster", "same", "done", "agrees", "agree", "yes", "possible", "killed", "fastest"],
    ),
    (
        Colour::Red,
        &[
            "failed",
            "failing",
            "refused",
            "slower",
            "rejected",
            "regression",
            "wrong",
            "disagrees",
            "disagree",
            "no",
            "unusable",
            "impossible",
            "survived",
            "damaged",
            "unreadable",
            "changed",
            "below floor",
        ],
    ),
    (Colour::Yellow, &["ambiguous", "implausible", "hot only", "note", "not run", "missing", "no gain", "unknown"]),
];

/// The colour of a verdict; none for other texts.
pub(crate) fn verdict_colour(text: &str) -> Option<Colour> {
    let text = text.to_lowercase();
    let begins = |verdict: &str| {
        text.strip_prefix(verdict).is_some_and(|rest| !rest.starts_with(|next: char| next.is_alphanumeric()))
    };
    VERDICTS.into_iter().find(|(_, verdicts)| verdicts.iter().any(|verdict| begins(verdict))).map(|(colour, _)| colour)
}

/// A line for people with its first verdict, a word in capitals, in colour.
pub(crate) fn painted(line: &str) -> String {
    let is_word = |word: &str| word.len() > 2 && word.chars().all(char::is_uppercase);
    let mut words = line.split(|letter: char| !letter.is_alphanumeric());
    match words.find_map(|word| verdict_colour(word).filter(|_| is_word(word)).map(|colour| (word, colour))) {
        Some((word, colour)) => line.replacen(word, &colour.paint(word), 1),
        None => line.to_owned(),
    }
}

/// True if results may be coloured: on a terminal, unless `NO_COLOR` is set; or where `CLICOLOR_FORCE` asks for it.
pub(crate) fn is_wanted(stream: &impl IsTerminal) -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_forced = is_set("CLICOLOR_FORCE") && std::env::var_os("CLICOLOR_FORCE").is_some_and(|value| value != "0");
    let is_dumb = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    !is_set("NO_COLOR") && (is_forced || stream.is_terminal() && !is_dumb)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_have_colours() {
        let check = |text: &str, expected| assert_eq!(verdict_colour(text), expected, "{text}");
        check("passed", Some(Colour::Green));
        check("ok: 0 in the simulator", Some(Colour::Green));
        check("FAILED: 4 in the simulator", Some(Colour::Red));
        check("SLOWER", Some(Colour::Red));
        check("AMBIGUOUS", Some(Colour::Yellow));
        check("okay", None);
        check("", None);
    }

    #[test]
    fn the_verdict_of_a_line_is_painted() {
        assert_eq!(painted("FAILED f16"), "\x1b[31mFAILED\x1b[0m f16");
        assert_eq!(painted("1x8x512x64 f32 full: SLOWER: B"), "1x8x512x64 f32 full: \x1b[31mSLOWER\x1b[0m: B");
        assert_eq!(painted("27 passed, 0 failed"), "27 passed, 0 failed");
    }
}
