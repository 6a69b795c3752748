//! Recursive-descent parser that traces an expression while it reads.

use std::collections::BTreeMap;

use super::super::handles::{Integer, Number, Place, Truth, Writer};
use super::super::{Kind, Step};
use super::lexer::{self, Placed, Token};
use super::{ExpressionError, READY_MADE, ReadyMade};

/// The deepest nesting of brackets, signs and choices: the parser calls itself for each.
const DEEPEST: usize = 64;

/// The value of a part of the text.
#[derive(Clone, Copy)]
pub(super) enum Value<'a> {
    /// A written integer: a number beside numbers.
    ConstantInteger(i32),
    /// A written number.
    ConstantNumber(f32),
    Integer(Integer<'a>),
    Number(Number<'a>),
    Truth(Truth<'a>),
}

/// Names of kinds in messages.
pub(super) struct Kinds;

impl Kinds {
    pub(super) const TRUTH: &'static str = "true or false";
}

impl<'a> Value<'a> {
    pub(super) const fn kind(self) -> &'static str {
        match self {
            Self::ConstantInteger(_) | Self::Integer(_) => "an integer",
            Self::ConstantNumber(_) | Self::Number(_) => "a number",
            Self::Truth(_) => Kinds::TRUTH,
        }
    }

    /// The value as a number; `None` for truths.
    pub(super) fn to_number(self, writer: &'a Writer) -> Option<Number<'a>> {
        match self {
            Self::ConstantInteger(value) => Some(writer.constant_number(value as f32)),
            Self::ConstantNumber(value) => Some(writer.constant_number(value)),
            Self::Integer(value) => Some(value.to_number()),
            Self::Number(value) => Some(value),
            Self::Truth(_) => None,
        }
    }

    fn to_integer(self, writer: &'a Writer) -> Option<Integer<'a>> {
        match self {
            Self::ConstantInteger(value) => Some(writer.constant_integer(value)),
            Self::Integer(value) => Some(value),
            _ => None,
        }
    }
}

/// One side of an operation: a handle, or a written constant.
#[derive(Clone, Copy)]
enum Side<H, C> {
    Handle(H),
    Constant(C),
}

/// Two values of one kind.
enum Pair<'a> {
    ConstantIntegers(i32, i32),
    ConstantNumbers(f32, f32),
    Integers(Side<Integer<'a>, i32>, Side<Integer<'a>, i32>),
    Numbers(Side<Number<'a>, f32>, Side<Number<'a>, f32>),
}

impl<'a> Pair<'a> {
    /// The two, as numbers if one of them is; `None` if one is a truth.
    fn of(a: Value<'a>, b: Value<'a>) -> Option<Self> {
        let integer = |value| match value {
            Value::ConstantInteger(constant) => Some(Side::Constant(constant)),
            Value::Integer(handle) => Some(Side::Handle(handle)),
            _ => None,
        };
        let number = |value| match value {
            Value::ConstantInteger(constant) => Some(Side::Constant(constant as f32)),
            Value::ConstantNumber(constant) => Some(Side::Constant(constant)),
            Value::Integer(handle) => Some(Side::Handle(handle.to_number())),
            Value::Number(handle) => Some(Side::Handle(handle)),
            Value::Truth(_) => None,
        };
        Some(match (integer(a), integer(b)) {
            (Some(Side::Constant(a)), Some(Side::Constant(b))) => Self::ConstantIntegers(a, b),
            (Some(a), Some(b)) => Self::Integers(a, b),
            _ => match (number(a)?, number(b)?) {
                (Side::Constant(a), Side::Constant(b)) => Self::ConstantNumbers(a, b),
                (a, b) => Self::Numbers(a, b),
            },
        })
    }
}

/// An operator between two sides, of which one at least is a handle.
macro_rules! operate {
    ($writer:expr, $constant:ident, $a:expr, $b:expr, $operator:tt) => {
        match ($a, $b) {
            (Side::Handle(a), Side::Handle(b)) => a $operator b,
            (Side::Handle(a), Side::Constant(b)) => a $operator b,
            (Side::Constant(a), Side::Handle(b)) => a $operator b,
            (Side::Constant(a), Side::Constant(b)) => $writer.$constant(a) $operator b,
        }
    };
}

/// A method of two sides that may be exchanged, with the method that is right when they are.
macro_rules! call {
    ($writer:expr, $constant:ident, $a:expr, $b:expr, $method:ident, $exchanged:ident) => {
        match ($a, $b) {
            (Side::Handle(a), Side::Handle(b)) => a.$method(b),
            (Side::Handle(a), Side::Constant(b)) => a.$method(b),
            (Side::Constant(a), Side::Handle(b)) => b.$exchanged(a),
            (Side::Constant(a), Side::Constant(b)) => $writer.$constant(a).$method(b),
        }
    };
}

pub(super) struct Parser<'w, 't> {
    writer: &'w Writer,
    place: Place<'w>,
    /// True for scores, which have a score.
    has_score: bool,
    text: &'t str,
    tokens: Vec<Placed<'t>>,
    next: usize,
    depth: usize,
    names: BTreeMap<&'t str, Value<'w>>,
}

type Parsed<T> = Result<T, ExpressionError>;

impl<'w, 't> Parser<'w, 't> {
    pub(super) fn new(writer: &'w Writer, place: Place<'w>, has_score: bool, text: &'t str) -> Parsed<Self> {
        let tokens = lexer::tokens(text)?;
        Ok(Self { writer, place, has_score, text, tokens, next: 0, depth: 0, names: BTreeMap::new() })
    }

    /// Reads definitions and the result, up to the end.
    pub(super) fn whole(&mut self, text: &str) -> Parsed<Value<'w>> {
        while let (Token::Name(name), Token::Sign("=")) = (self.peek().token, self.peek_second()) {
            let at = self.peek().at;
            if self.known(name, at).is_ok() || is_reserved(name) {
                return Err(self.error(at, format!("`{name}` has a meaning already; choose another name")));
            }
            self.next += 2;
            let value = self.choice()?;
            self.expect(";", "a definition ends with `;`, and the result follows")?;
            self.names.insert(name, value);
        }
        let value = self.choice()?;
        match self.peek() {
            Placed { token: Token::End, .. } => Ok(value),
            Placed { token: Token::Sign("="), at } => Err(self.error(at, "equality is written ==")),
            Placed { token: Token::Sign("<" | "<=" | ">" | ">=" | "==" | "!="), at } => {
                Err(self.error(at, "comparisons are not chained; write a < b && b < c"))
            }
            Placed { at, .. } => {
                let message = if text.is_empty() { "the text is empty" } else { "an operator is missing before this" };
                Err(self.error(at, message))
            }
        }
    }

    fn error(&self, at: usize, message: impl Into<String>) -> ExpressionError {
        lexer::error(self.text, at, message)
    }

    fn peek(&self) -> Placed<'t> {
        // The end is the last token, and is not gone past.
        self.tokens[self.next.min(self.tokens.len() - 1)]
    }

    fn peek_second(&self) -> Token<'t> {
        self.tokens.get(self.next + 1).map_or(Token::End, |placed| placed.token)
    }

    /// Takes the sign, if it is next, and says where it was.
    fn take(&mut self, sign: &'static str) -> Option<usize> {
        let Placed { token, at } = self.peek();
        (token == Token::Sign(sign)).then(|| {
            self.next += 1;
            at
        })
    }

    fn take_one_of(&mut self, signs: &[&'static str]) -> Option<(&'static str, usize)> {
        signs.iter().find_map(|sign| self.take(sign).map(|at| (*sign, at)))
    }

    fn expect(&mut self, sign: &'static str, message: &str) -> Parsed<()> {
        let at = self.peek().at;
        self.take(sign).map(drop).ok_or_else(|| self.error(at, message))
    }

    fn nested<T>(&mut self, read: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.depth == DEEPEST {
            let at = self.peek().at;
            return Err(self.error(at, format!("this is nested more than {DEEPEST} deep; define parts: name = ...;")));
        }
        self.depth += 1;
        let result = read(self);
        self.depth -= 1;
        result
    }

    fn choice(&mut self) -> Parsed<Value<'w>> {
        self.nested(|parser| {
            let condition = parser.or()?;
            let Some(at) = parser.take("?") else { return Ok(condition) };
            let condition = parser.truth(condition, at, "before `?`")?;
            let yes = parser.choice()?;
            parser.expect(":", "a choice is written condition ? one : other, and its `:` is missing")?;
            let no = parser.choice()?;
            parser.select(condition, yes, no, at)
        })
    }

    fn select(&self, condition: Truth<'w>, yes: Value<'w>, no: Value<'w>, at: usize) -> Parsed<Value<'w>> {
        if let (Value::Truth(yes), Value::Truth(no)) = (yes, no) {
            return Ok(Value::Truth((condition & yes) | (!condition & no)));
        }
        if let (Value::ConstantInteger(_) | Value::Integer(_), Value::ConstantInteger(_) | Value::Integer(_)) =
            (yes, no)
            && let (Some(yes), Some(no)) = (yes.to_integer(self.writer), no.to_integer(self.writer))
        {
            return Ok(Value::Integer(condition.integer(yes, no)));
        }
        match (yes.to_number(self.writer), no.to_number(self.writer)) {
            (Some(yes), Some(no)) => Ok(Value::Number(condition.number(yes, no))),
            _ => Err(self.error(at, format!("a choice between {} and {}", yes.kind(), no.kind()))),
        }
    }

    fn or(&mut self) -> Parsed<Value<'w>> {
        let mut value = self.and()?;
        while let Some(at) = self.take("||") {
            let other = self.and()?;
            value = Value::Truth(self.truth(value, at, "before `||`")? | self.truth(other, at, "after `||`")?);
        }
        Ok(value)
    }

    fn and(&mut self) -> Parsed<Value<'w>> {
        let mut value = self.comparison()?;
        while let Some(at) = self.take("&&") {
            let other = self.comparison()?;
            value = Value::Truth(self.truth(value, at, "before `&&`")? & self.truth(other, at, "after `&&`")?);
        }
        Ok(value)
    }

    fn truth(&self, value: Value<'w>, at: usize, place: &str) -> Parsed<Truth<'w>> {
        match value {
            Value::Truth(truth) => Ok(truth),
            other => {
                let (wanted, found) = (Kinds::TRUTH, other.kind());
                Err(self.error(at, format!("{place} stands {found}; it must be {wanted}, such as query >= key")))
            }
        }
    }

    fn comparison(&mut self) -> Parsed<Value<'w>> {
        let a = self.shift()?;
        let Some((sign, at)) = self.take_one_of(&["<=", ">=", "==", "!=", "<", ">"]) else { return Ok(a) };
        let b = self.shift()?;
        let pair = self.pair(sign, a, b, at)?;
        macro_rules! compare {
            ($method:ident, $exchanged:ident) => {
                match pair {
                    Pair::Integers(a, b) => call!(self.writer, constant_integer, a, b, $method, $exchanged),
                    Pair::Numbers(a, b) => call!(self.writer, constant_number, a, b, $method, $exchanged),
                    Pair::ConstantIntegers(..) | Pair::ConstantNumbers(..) => {
                        return Err(self.error(at, "this compares two constants"));
                    }
                }
            };
        }
        Ok(Value::Truth(match sign {
            "<" => compare!(less, more),
            ">" => compare!(more, less),
            "<=" => compare!(at_most, at_least),
            ">=" => compare!(at_least, at_most),
            "==" => compare!(equals, equals),
            _ => !compare!(equals, equals),
        }))
    }

    fn pair(&self, sign: &str, a: Value<'w>, b: Value<'w>, at: usize) -> Parsed<Pair<'w>> {
        Pair::of(a, b).ok_or_else(|| {
            let (a, b) = (a.kind(), b.kind());
            self.error(at, format!("`{sign}` is for numbers and integers, and here it has {a} and {b}"))
        })
    }

    fn shift(&mut self) -> Parsed<Value<'w>> {
        let mut value = self.sum()?;
        while let Some(at) = self.take(">>") {
            let bits = self.sum()?;
            let (Some(integer), Value::ConstantInteger(bits @ 0..=31)) = (value.to_integer(self.writer), bits) else {
                let message =
                    "`>>` divides an integer by a power of two: the bits after it are a constant from 0 to 31";
                return Err(self.error(at, message));
            };
            value = Value::Integer(integer >> bits.unsigned_abs());
        }
        Ok(value)
    }

    fn sum(&mut self) -> Parsed<Value<'w>> {
        let mut value = self.product()?;
        while let Some((sign, at)) = self.take_one_of(&["+", "-"]) {
            let other = self.product()?;
            value = self.arithmetic(sign, value, other, at)?;
        }
        Ok(value)
    }

    fn product(&mut self) -> Parsed<Value<'w>> {
        let mut value = self.unary()?;
        while let Some((sign, at)) = self.take_one_of(&["*", "/", "%"]) {
            if sign == "%" {
                return Err(self.error(at, "there is no remainder; for powers of two, x - (x >> 3) * 8 is that of 8"));
            }
            let other = self.unary()?;
            value = self.arithmetic(sign, value, other, at)?;
        }
        Ok(value)
    }

    fn arithmetic(&self, sign: &str, a: Value<'w>, b: Value<'w>, at: usize) -> Parsed<Value<'w>> {
        let writer = self.writer;
        macro_rules! operation {
            ($checked:ident, $operator:tt) => {
                match self.pair(sign, a, b, at)? {
                    Pair::ConstantIntegers(a, b) => match a.$checked(b) {
                        Some(value) => Value::ConstantInteger(value),
                        None => return Err(self.error(at, format!("{a} {sign} {b} is no 32-bit integer"))),
                    },
                    Pair::ConstantNumbers(a, b) => Value::ConstantNumber(a $operator b),
                    Pair::Integers(a, b) => Value::Integer(operate!(writer, constant_integer, a, b, $operator)),
                    Pair::Numbers(a, b) => Value::Number(operate!(writer, constant_number, a, b, $operator)),
                }
            };
        }
        Ok(match sign {
            "+" => operation!(checked_add, +),
            "-" => operation!(checked_sub, -),
            "*" => operation!(checked_mul, *),
            _ => match self.pair(sign, a, b, at)? {
                Pair::ConstantNumbers(a, b) => Value::ConstantNumber(a / b),
                Pair::Numbers(a, b) => Value::Number(operate!(writer, constant_number, a, b, /)),
                Pair::ConstantIntegers(..) | Pair::Integers(..) => {
                    let message = "integers are not divided; x >> 3 is x divided by 8 and rounded down, and number(x) is \
                                   x as a number";
                    return Err(self.error(at, message));
                }
            },
        })
    }

    fn unary(&mut self) -> Parsed<Value<'w>> {
        let Some((sign, at)) = self.take_one_of(&["-", "!"]) else { return self.primary() };
        let value = self.nested(Self::unary)?;
        match (sign, value) {
            ("!", value) => Ok(Value::Truth(!self.truth(value, at, "after `!`")?)),
            (_, Value::ConstantInteger(value)) => {
                let negative = value.checked_neg().map(Value::ConstantInteger);
                negative.ok_or_else(|| self.error(at, format!("-({value}) is no 32-bit integer")))
            }
            (_, Value::ConstantNumber(value)) => Ok(Value::ConstantNumber(-value)),
            (_, Value::Integer(value)) => Ok(Value::Integer(-value)),
            (_, Value::Number(value)) => Ok(Value::Number(-value)),
            (_, Value::Truth(_)) => Err(self.error(at, "`-` is for numbers; the opposite of a truth is written !")),
        }
    }

    fn primary(&mut self) -> Parsed<Value<'w>> {
        let Placed { token, at } = self.peek();
        self.next += 1;
        match token {
            Token::Integer(value) => Ok(Value::ConstantInteger(value)),
            Token::Number(value) => Ok(Value::ConstantNumber(value)),
            Token::Sign("(") => {
                let value = self.choice()?;
                self.expect(")", "a `)` is missing here")?;
                Ok(value)
            }
            Token::Name(name) if self.take("[").is_some() => self.entry(name, at),
            Token::Name(name) if self.take("(").is_some() => {
                let arguments = self.arguments()?;
                self.call(name, &arguments, at)
            }
            Token::Name(name) => self.known(name, at),
            Token::Sign(_) | Token::End => Err(self.error(at, "a number, a name or a `(` must stand here")),
        }
    }

    fn arguments(&mut self) -> Parsed<Vec<Value<'w>>> {
        let mut arguments = Vec::new();
        if self.take(")").is_some() {
            return Ok(arguments);
        }
        loop {
            arguments.push(self.choice()?);
            if self.take(",").is_none() {
                self.expect(")", "a `,` or a `)` is missing here")?;
                return Ok(arguments);
            }
        }
    }

    /// An entry of a table.
    fn entry(&mut self, name: &str, at: usize) -> Parsed<Value<'w>> {
        let index = self.choice()?;
        self.expect("]", "a `]` is missing here")?;
        if !matches!(name, "aux_f32" | "aux_i32") {
            return Err(self.error(at, format!("`{name}` is no table; tables are aux_f32 and aux_i32")));
        }
        let Some(index) = index.to_integer(self.writer) else {
            let kind = index.kind();
            return Err(self.error(at, format!("the index of {name} is {kind}; it must be an integer")));
        };
        Ok(if name == "aux_f32" {
            Value::Number(self.place.number(index))
        } else {
            Value::Integer(self.place.integer(index))
        })
    }

    /// A name without arguments.
    fn known(&self, name: &str, at: usize) -> Parsed<Value<'w>> {
        if let Some(&value) = self.names.get(name) {
            return Ok(value);
        }
        let Place { batch, head, query, key } = self.place;
        Ok(match name {
            "score" if self.has_score => Value::Number(self.writer.number(Step::Score)),
            "score" => return Err(self.error(at, "a mask_mod does not know the score; it is for score_mod")),
            "batch" | "b" => Value::Integer(batch),
            "head" | "h" => Value::Integer(head),
            "query" | "q" => Value::Integer(query),
            "key" | "k" => Value::Integer(key),
            "aux_f32" | "aux_i32" => {
                return Err(self.error(at, format!("{name} is a table: {name}[index] is an entry")));
            }
            _ => return self.ready_made(name, &[], at),
        })
    }

    fn call(&self, name: &str, arguments: &[Value<'w>], at: usize) -> Parsed<Value<'w>> {
        let writer = self.writer;
        let number = |value: Value<'w>| {
            value.to_number(writer).ok_or_else(|| self.error(at, format!("{name} is for numbers, not for truths")))
        };
        let wants = |wanted: &str| {
            let given = arguments.len();
            Err(self.error(at, format!("{name} has {given} arguments; it is written {wanted}")))
        };
        match (name, arguments) {
            ("exp", &[value]) => Ok(Value::Number(number(value)?.exp())),
            ("tanh", &[value]) => Ok(Value::Number(number(value)?.tanh())),
            ("number", &[value]) => Ok(Value::Number(number(value)?)),
            ("abs", &[value]) => Ok(match value {
                Value::ConstantInteger(value) => match value.checked_abs() {
                    Some(value) => Value::ConstantInteger(value),
                    None => return Err(self.error(at, format!("abs({value}) is no 32-bit integer"))),
                },
                Value::Integer(value) => Value::Integer(value.abs()),
                value => Value::Number(number(value)?.abs()),
            }),
            ("min" | "max", &[a, b]) => self.extreme(name, a, b, at),
            ("clamp", &[value, least, most]) => {
                let raised = self.extreme("max", value, least, at)?;
                self.extreme("min", raised, most, at)
            }
            ("exp" | "tanh" | "number" | "abs", _) => wants(&format!("{name}(x)")),
            ("min" | "max", _) => wants(&format!("{name}(x, y)")),
            ("clamp", _) => wants("clamp(x, least, most)"),
            _ => self.ready_made(name, arguments, at),
        }
    }

    fn extreme(&self, name: &str, a: Value<'w>, b: Value<'w>, at: usize) -> Parsed<Value<'w>> {
        let writer = self.writer;
        macro_rules! extreme {
            ($method:ident) => {
                match self.pair(name, a, b, at)? {
                    Pair::ConstantIntegers(a, b) => Value::ConstantInteger(a.$method(b)),
                    Pair::ConstantNumbers(a, b) => Value::ConstantNumber(a.$method(b)),
                    Pair::Integers(a, b) => Value::Integer(call!(writer, constant_integer, a, b, $method, $method)),
                    Pair::Numbers(a, b) => Value::Number(call!(writer, constant_number, a, b, $method, $method)),
                }
            };
        }
        Ok(if name == "min" { extreme!(min) } else { extreme!(max) })
    }

    fn ready_made(&self, name: &str, arguments: &[Value<'w>], at: usize) -> Parsed<Value<'w>> {
        let Some(ready) = READY_MADE.iter().find(|ready| ready.name == name) else {
            return Err(self.error(at, unknown(name, self.has_score)));
        };
        let ReadyMade { parameters, text, .. } = *ready;
        if parameters.len() != arguments.len() {
            let (given, wanted) = (arguments.len(), parameters.join(", "));
            return Err(self.error(at, format!("{name} has {given} arguments; it is written {name}({wanted})")));
        }
        let mut parser = Parser::new(self.writer, self.place, self.has_score, text)?;
        for (parameter, &argument) in parameters.iter().zip(arguments) {
            if !matches!(argument, Value::ConstantInteger(_) | Value::ConstantNumber(_)) {
                let kind = argument.kind();
                return Err(self.error(at, format!("{parameter} of {name} is {kind} that is no constant")));
            }
            parser.names.insert(parameter, argument);
        }
        // A name of one letter, like `b` or `k`, is the parameter's before it is that of a position.
        parser.whole(text).map_err(|inner| {
            let message = inner.message;
            self.error(at, format!("{name} is `{text}`, and so {message}"))
        })
    }
}

/// Names that are no values, and mean something.
fn is_reserved(name: &str) -> bool {
    matches!(name, "exp" | "tanh" | "number" | "abs" | "min" | "max" | "clamp" | "aux_f32" | "aux_i32" | "score")
        || READY_MADE.iter().any(|ready| ready.name == name)
}

fn unknown(name: &str, has_score: bool) -> String {
    let score = if has_score { "score, " } else { "" };
    let ready: Vec<&str> = READY_MADE.iter().map(|ready| ready.name).collect();
    format!(
        "there is no `{name}`; names are {score}batch, head, query, key, aux_f32[..], aux_i32[..], functions are min, max, \
         clamp, abs, exp, tanh, number, and ready-made are {}",
        ready.join(", ")
    )
}

impl Writer {
    fn constant_number(&self, value: f32) -> Number<'_> {
        self.number_of(self.constant(Step::Number(value.to_bits()), Kind::Number))
    }

    fn constant_integer(&self, value: i32) -> Integer<'_> {
        self.integer_of(self.constant(Step::Integer(value), Kind::Integer))
    }
}
