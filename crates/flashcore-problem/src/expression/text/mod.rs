//! Expressions as text: `score + 0.1 * (query - key)`, for languages without closures and for the command line.
//!
//! The grammar is a part of C's, with its precedence:
//!
//! ```text
//! text       = { name "=" choice ";" } choice
//! choice     = or [ "?" choice ":" choice ]
//! or         = and { "||" and }
//! and        = comparison { "&&" comparison }
//! comparison = shift [ ( "<" | "<=" | ">" | ">=" | "==" | "!=" ) shift ]
//! shift      = sum { ">>" number }
//! sum        = product { ( "+" | "-" ) product }
//! product    = unary { ( "*" | "/" ) unary }
//! unary      = { "-" | "!" } primary
//! primary    = number | name | name "(" choice { "," choice } ")" | table "[" choice "]" | "(" choice ")"
//! ```
//!
//! Names are `score`, `batch` (`b`), `head` (`h`), `query` (`q`), `key` (`k`), those that the text itself defines, and the
//! [ready-made expressions](READY_MADE). Functions are `min`, `max`, `clamp`, `abs`, `exp`, `tanh` and `number`; tables are
//! `aux_f32` and `aux_i32`. An integer beside a number becomes one. Arithmetic of written constants is done at once;
//! integers wrap elsewhere, and are not divided.

mod lexer;
mod parser;

use std::fmt;

use super::handles::Writer;
use super::{MOST_STEPS, MaskMod, ScoreMod, Step};
use parser::{Kinds, Parser, Value};

/// The most characters of a text.
pub const MOST_CHARACTERS: usize = 4096;

/// Error of a text that is no expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpressionError {
    /// The column of the text where it is, from 1.
    pub column: usize,
    /// The part of the text from there on, or the whole of it.
    pub found: String,
    /// The mistake, and what is allowed.
    pub message: String,
}

impl fmt::Display for ExpressionError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { column, found, message } = self;
        match found.as_str() {
            "" => write!(formatter, "column {column}: {message}"),
            found => write!(formatter, "column {column}, at `{found}`: {message}"),
        }
    }
}

impl std::error::Error for ExpressionError {}

/// A ready-made expression: a name with parameters, which are constants, for a text in the same language.
#[derive(Clone, Copy, Debug)]
pub struct ReadyMade {
    /// The name.
    pub name: &'static str,
    /// The names of its parameters.
    pub parameters: &'static [&'static str],
    /// The text that it stands for.
    pub text: &'static str,
    /// The meaning, and the tables that it reads.
    pub meaning: &'static str,
}

/// The ready-made expressions: a number each for scores, a truth each for masks.
pub const READY_MADE: [ReadyMade; 9] = [
    ReadyMade {
        name: "relative",
        parameters: &["n"],
        text: "score + aux_f32[head * (2 * n + 1) + clamp(query - key, -n, n) + n]",
        meaning: "a learned term for each head and distance up to n; aux_f32 has 2 n + 1 entries for each head",
    },
    ReadyMade {
        name: "distance",
        parameters: &["slope"],
        text: "score - slope * abs(query - key)",
        meaning: "attention falls with distance, the same for all heads",
    },
    ReadyMade {
        name: "softcap",
        parameters: &["cap"],
        text: "cap * tanh(score / cap)",
        meaning: "scores between -cap and cap",
    },
    ReadyMade { name: "temperature", parameters: &["t"], text: "score / t", meaning: "softer for larger t" },
    ReadyMade {
        name: "documents",
        parameters: &[],
        text: "aux_i32[query] == aux_i32[key]",
        meaning: "several documents in one sequence; aux_i32 has the number of the document of each position",
    },
    ReadyMade {
        name: "causal",
        parameters: &[],
        text: "query >= key",
        meaning: "keys up to the row's own number, both counted from 0",
    },
    ReadyMade {
        name: "prefix",
        parameters: &["n"],
        text: "key < n || query >= key",
        meaning: "the first n keys for all rows, causal after them",
    },
    ReadyMade {
        name: "window",
        parameters: &["left", "right"],
        text: "query - key <= left && key - query <= right",
        meaning: "keys from left before to right after the row's own number",
    },
    ReadyMade {
        name: "chunks",
        parameters: &["bits"],
        text: "(query >> bits) == (key >> bits)",
        meaning: "blocks of 2^bits positions that do not see each other",
    },
];

impl ScoreMod {
    /// Reads an expression for scores. Its name, for reports, is the text with `#` in the place of constants, so that texts
    /// which differ in constants alone share a kernel.
    ///
    /// ```
    /// # use flashcore_problem as flashcore;
    /// use flashcore::ScoreMod;
    ///
    /// let score_mod = ScoreMod::parse("score + 0.1 * (query - key)").unwrap();
    /// assert_eq!(score_mod.expression().name(), "score + # * (query - key)");
    /// let error = ScoreMod::parse("score + distance").unwrap_err();
    /// assert_eq!(error.column, 9);
    /// ```
    pub fn parse(text: &str) -> Result<Self, ExpressionError> {
        Self::parse_as(&lexer::without_constants(text), text)
    }

    /// Reads an expression for scores, under a name for reports.
    pub fn parse_as(name: &str, text: &str) -> Result<Self, ExpressionError> {
        let writer = Writer::default();
        writer.number(Step::Score);
        let place = writer.place();
        let mut parser = Parser::new(&writer, place, true, text)?;
        let value = parser.whole(text)?;
        let Some(result) = value.to_number(&writer) else {
            return Err(whole(text, format!("a score_mod is a number, and this is {}", value.kind())));
        };
        let result = result.term();
        check_steps(&writer, text)?;
        Ok(Self::of(writer.finish(name, result)))
    }
}

impl MaskMod {
    /// Reads an expression for masks: true where the query row attends the key. Its name is as for [`ScoreMod::parse`].
    ///
    /// ```
    /// # use flashcore_problem as flashcore;
    /// use flashcore::MaskMod;
    ///
    /// let mask_mod = MaskMod::parse("documents && query - key < 512").unwrap();
    /// assert_eq!(mask_mod.expression().tables(), (false, true));
    /// ```
    pub fn parse(text: &str) -> Result<Self, ExpressionError> {
        Self::parse_as(&lexer::without_constants(text), text)
    }

    /// Reads an expression for masks, under a name for reports.
    pub fn parse_as(name: &str, text: &str) -> Result<Self, ExpressionError> {
        let writer = Writer::default();
        let place = writer.place();
        let mut parser = Parser::new(&writer, place, false, text)?;
        let Value::Truth(result) = parser.whole(text)? else {
            return Err(whole(text, format!("a mask_mod is {}, such as query >= key, and this is not", Kinds::TRUTH)));
        };
        let result = result.term();
        check_steps(&writer, text)?;
        Ok(Self::of(writer.finish(name, result)))
    }
}

/// An error of the text as a whole.
fn whole(text: &str, message: String) -> ExpressionError {
    ExpressionError { column: 1, found: lexer::shown(text), message }
}

/// Checked before the structure is kept for the life of the process.
fn check_steps(writer: &Writer, text: &str) -> Result<(), ExpressionError> {
    match writer.len() {
        ..=MOST_STEPS => Ok(()),
        steps => Err(whole(text, format!("it has {steps} steps; it may have at most {MOST_STEPS}"))),
    }
}

#[cfg(test)]
mod tests;
