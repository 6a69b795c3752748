//! Parser of shapes and masks: `1x8x512x64`, `1x8/2x97,203x64`, `4x8/2x1,300x64+seqused_k+pages=80x16+scales=head`.

use flashcore_problem::expression::ExpressionError;
use flashcore_problem::{Alignment, DType, DTypes, Mask, MaskMod, Operand, PagedKv, Problem, ProblemError, ScoreMod};

use crate::testkit::expressions;
use crate::testkit::scale_form::ScaleForm;
use crate::testkit::workload::Workload;

/// Reason why a text is no shape.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ShapeError {
    /// Not four parts.
    #[error(
        "`{text}` has {parts} parts; a shape has four: batch x heads[/key heads] x queries[,keys] x dim[,value dim], such as 1x8x512x64 or 2x8/2x97,203x64"
    )]
    Parts {
        /// The text.
        text: String,
        /// Number of its parts.
        parts: usize,
    },
    /// A part that is no number.
    #[error("`{part}` in `{text}` is not a valid {meaning}")]
    Number {
        /// The text.
        text: String,
        /// The part of it.
        part: String,
        /// The meaning of the part.
        meaning: &'static str,
    },
    /// Not an expression, or the second of its kind.
    #[error(
        "`{name}` in `{text}` is not an expression, or a second one of its kind; allowed are one of {} for scores and one of {} for masks, or score_mod={{TEXT}} and mask_mod={{TEXT}}, and for sequences total_q=N, total_k=N, seqused_q, seqused_k, leftpad_k, kv_batch=N and pages=NUMBERxROWS[/WIDTH[/STRIDE]], and of FP8 scales[=FORM]",
        expressions::SCORE_MODS.join(", "),
        expressions::MASK_MODS.join(", ")
    )]
    Expression {
        /// The text.
        text: String,
        /// The part of it.
        name: String,
    },
    /// Not an expression: its text is wrong.
    #[error("`{name}` in `{text}`: {error}")]
    ExpressionText {
        /// The text.
        text: String,
        /// The part of it, `score_mod` or `mask_mod`.
        name: &'static str,
        /// The error, with its column between the braces.
        error: ExpressionError,
    },
    /// Not a form of scales.
    #[error(
        "`{part}` in `{text}` is no form of scales; allowed are scales (a form drawn by the seed), scales=tensor (one of a tensor), scales=head (one per KV head), scales=sequence (one per sequence and KV head) and scales=token (one per token and head), or q_scale, k_scale and v_scale for some of them"
    )]
    ScaleForm {
        /// The text.
        text: String,
        /// The part of it.
        part: String,
    },
    /// Scales without a tensor of 8 bits.
    #[error(
        "`{part}` in `{text}`: scales belong to e4m3 and e5m2, and the element types are {types}; give --dtype 'bf16 kv e4m3' or 'e4m3 out bf16', or leave the scales out"
    )]
    NoScaledType {
        /// The text.
        text: String,
        /// The part of it.
        part: String,
        /// The element types.
        types: DTypes,
    },
    /// Not a problem.
    #[error("`{text}`: {}", errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Problem {
        /// The text.
        text: String,
        /// Everything that is wrong with it.
        errors: Vec<ProblemError>,
    },
    /// Not a mask.
    #[error(
        "`{text}` is not a mask; allowed are full, causal, causal-top-left, window:LEFT,RIGHT and window-top-left:LEFT,RIGHT, with `all` for no limit"
    )]
    Mask {
        /// The text.
        text: String,
    },
}

/// Reads `batch x heads[/key heads] x queries[,keys] x dim[,value dim][+feature]...`. A feature is the name of an
/// expression, `score_mod={TEXT}` or `mask_mod={TEXT}` in the language of [`ScoreMod::parse`], or one of packed and paged sequences: `total_q=N`, `total_k=N`, `seqused_q`, `seqused_k`, `leftpad_k`,
/// `kv_batch=N`, `pages=NUMBERxROWS[/WIDTH[/STRIDE]]` with width and stride of the page table.
pub fn parse_shape(text: &str, dtype: DType) -> Result<Problem, ShapeError> {
    Ok(parse_workload(text, DTypes { query: dtype, key_value: dtype, output: dtype })?.problem)
}

/// [`parse_shape`] with types of key and value and of the output, and with `scales[=FORM]`: scales of all tensors of
/// 8 bits, of a [`ScaleForm`].
pub fn parse_workload(text: &str, types: DTypes) -> Result<Workload, ShapeError> {
    let (sizes, names) = text.split_once('+').unwrap_or((text, ""));
    let parts: Vec<&str> = sizes.split(['x', '×']).map(str::trim).collect();
    let [batch, heads, lengths, dims] = parts[..] else {
        return Err(ShapeError::Parts { text: text.to_owned(), parts: parts.len() });
    };
    let number = |part: &str, meaning: &'static str| {
        part.parse::<usize>().map_err(|_| ShapeError::Number { text: text.to_owned(), part: part.to_owned(), meaning })
    };
    let pair = |part: &str, separator: char, first: &'static str, second: &'static str| match part.split_once(separator)
    {
        Some((a, b)) => Ok((number(a, first)?, number(b, second)?)),
        None => number(part, first).map(|both| (both, both)),
    };
    let batch = number(batch, "batch")?;
    let (query_heads, key_heads) = pair(heads, '/', "heads", "key heads")?;
    let (query_length, key_length) = pair(lengths, ',', "queries", "keys")?;
    let (head_dim, value_dim) = pair(dims, ',', "head dim", "value dim")?;
    let mut problem = Problem::new(batch, query_heads, query_length, head_dim, types.query).with_dtypes(types);
    problem.key_heads = key_heads;
    problem.key_length = key_length;
    problem.value_dim = value_dim;
    let (mut score, mut mask, mut scales) = (None, None, None);
    for name in features(names).into_iter().filter(|name| !name.is_empty()) {
        let wrong = |name, error| ShapeError::ExpressionText { text: text.to_owned(), name, error };
        if let Some(expression) = written(name, "score_mod").filter(|_| score.is_none()) {
            // The name is the text, so that a table or a record that has it can be read again.
            score = Some(ScoreMod::parse_as(expression, expression).map_err(|error| wrong("score_mod", error))?);
            continue;
        }
        if let Some(expression) = written(name, "mask_mod").filter(|_| mask.is_none()) {
            mask = Some(MaskMod::parse_as(expression, expression).map_err(|error| wrong("mask_mod", error))?);
            continue;
        }
        if set_scales(&mut problem, name, &mut scales).map_err(|wrong| wrong.of(text, name, types))? {
            continue;
        }
        let is_of_sequences = set_sequences(&mut problem, name).map_err(|meaning| ShapeError::Number {
            text: text.to_owned(),
            part: name.to_owned(),
            meaning,
        })?;
        if is_of_sequences {
            continue;
        }
        match (expressions::score_mod(name), expressions::mask_mod(name)) {
            (Some(score_mod), _) if score.is_none() => score = Some(score_mod),
            (None, Some(mask_mod)) if mask.is_none() => mask = Some(mask_mod),
            _ => return Err(ShapeError::Expression { text: text.to_owned(), name: name.to_owned() }),
        }
    }
    expressions::give(&mut problem, score, mask);
    Ok(Workload { problem, scales })
}

/// The error of a feature of scales.
enum WrongScales {
    Form,
    Type,
}

impl WrongScales {
    fn of(self, text: &str, part: &str, types: DTypes) -> ShapeError {
        let (text, part) = (text.to_owned(), part.to_owned());
        match self {
            Self::Form => ShapeError::ScaleForm { text, part },
            Self::Type => ShapeError::NoScaledType { text, part, types },
        }
    }
}

/// Scales that the types of a problem can have.
fn possible_scales(problem: &Problem) -> impl Iterator<Item = Operand> {
    let DTypes { query, key_value, .. } = problem.dtypes();
    let is_possible = move |scale: &Operand| {
        if *scale == Operand::QScale { query.is_float8() } else { key_value.is_float8() }
    };
    Operand::SCALES.into_iter().filter(is_possible)
}

/// Sets a feature of scales; false if it is none.
fn set_scales(problem: &mut Problem, feature: &str, form: &mut Option<ScaleForm>) -> Result<bool, WrongScales> {
    let (name, value) = feature.split_once('=').map_or((feature, None), |(name, value)| (name, Some(value)));
    let wanted: Vec<Operand> = if name == "scales" {
        *form = value.map(|value| value.parse().map_err(|()| WrongScales::Form)).transpose()?;
        possible_scales(problem).collect()
    } else if let Some(scale) = Operand::SCALES.into_iter().find(|scale| scale.name() == name) {
        if value.is_some() {
            return Err(WrongScales::Form);
        }
        possible_scales(problem).filter(|possible| *possible == scale).collect()
    } else {
        return Ok(false);
    };
    if wanted.is_empty() {
        return Err(WrongScales::Type);
    }
    for scale in wanted {
        match scale {
            Operand::QScale => problem.q_scale = true,
            Operand::KScale => problem.k_scale = true,
            _ => problem.v_scale = true,
        }
    }
    Ok(true)
}

/// The features of scales, as [`parse_workload`] reads them.
fn scales_text(problem: &Problem, form: Option<ScaleForm>) -> String {
    let is_there = |scale: &Operand| scale.is_present(problem);
    let present: Vec<Operand> = Operand::SCALES.into_iter().filter(is_there).collect();
    if present.is_empty() {
        return String::new();
    }
    if present.iter().copied().eq(possible_scales(problem)) {
        return form.map_or_else(|| "+scales".to_owned(), |form| format!("+scales={form}"));
    }
    present.iter().flat_map(|scale| ["+", scale.name()]).collect()
}

/// The features of a shape: parts between `+` that are not within braces.
fn features(names: &str) -> Vec<&str> {
    let (mut depth, mut begun, mut parts) = (0_usize, 0, Vec::new());
    for (index, character) in names.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            '+' if depth == 0 => {
                parts.push(&names[begun..index]);
                begun = index + 1;
            }
            _ => {}
        }
    }
    parts.push(&names[begun..]);
    parts
}

/// The text of `name={TEXT}`.
fn written<'a>(feature: &'a str, name: &str) -> Option<&'a str> {
    feature.strip_prefix(name)?.strip_prefix("={")?.strip_suffix('}')
}

/// Sets a feature of packed and paged sequences; false if it is none, and its meaning if its numbers are none.
fn set_sequences(problem: &mut Problem, feature: &str) -> Result<bool, &'static str> {
    let (name, value) = feature.split_once('=').map_or((feature, None), |(name, value)| (name, Some(value)));
    let rows = |value: &str, meaning: &'static str| value.parse::<usize>().map(Some).map_err(|_| meaning);
    match (name, value) {
        ("seqused_q", None) => problem.seqused_q = true,
        ("seqused_k", None) => problem.seqused_k = true,
        ("leftpad_k", None) => problem.leftpad_k = true,
        ("total_q", Some(value)) => problem.total_q = rows(value, "number of rows")?,
        ("total_k", Some(value)) => problem.total_k = rows(value, "number of keys")?,
        ("kv_batch", Some(value)) => problem.kv_batch = rows(value, "number of batches")?,
        ("pages", Some(value)) => problem.paged = Some(pages(value, problem.key_length).ok_or("paged cache")?),
        _ => return Ok(false),
    }
    Ok(true)
}

/// Reads `NUMBERxROWS[/WIDTH[/STRIDE]]`. By default the page table is as wide as the keys need.
fn pages(text: &str, key_length: usize) -> Option<PagedKv> {
    let mut parts = text.split('/');
    let (num_pages, page_size) = parts.next()?.split_once('x')?;
    let (num_pages, page_size): (usize, usize) = (num_pages.parse().ok()?, page_size.parse().ok()?);
    let mut next = |otherwise: usize| parts.next().map_or(Some(otherwise), |part| part.parse().ok());
    let table_width = next(key_length.div_ceil(page_size.max(1)))?;
    let table_stride = next(table_width)?;
    parts.next().is_none().then_some(PagedKv { page_size, num_pages, table_width, table_stride })
}

/// The features of packed and paged sequences, as [`parse_shape`] reads them.
fn sequences_text(problem: &Problem) -> String {
    let sized = |name: &str, size: Option<usize>| size.map(|size| format!("+{name}={size}"));
    let flag = |name: &str, is_on: bool| is_on.then(|| format!("+{name}"));
    let paged = problem.paged.map(|PagedKv { page_size, num_pages, table_width, table_stride }| {
        let needed = problem.key_length.div_ceil(page_size.max(1));
        match (table_width == needed, table_stride == table_width) {
            (true, true) => format!("+pages={num_pages}x{page_size}"),
            (false, true) => format!("+pages={num_pages}x{page_size}/{table_width}"),
            (_, false) => format!("+pages={num_pages}x{page_size}/{table_width}/{table_stride}"),
        }
    });
    let parts = [
        sized("total_q", problem.total_q),
        sized("total_k", problem.total_k),
        flag("seqused_q", problem.seqused_q),
        flag("seqused_k", problem.seqused_k),
        flag("leftpad_k", problem.leftpad_k),
        sized("kv_batch", problem.kv_batch),
        paged,
    ];
    parts.into_iter().flatten().collect()
}

/// The shape of a problem, as [`parse_shape`] reads it.
pub fn shape_text(problem: &Problem) -> String {
    text(problem, None)
}

/// The shape of a problem with scales of a form, as [`parse_workload`] reads it.
pub(super) fn text(problem: &Problem, scales: Option<ScaleForm>) -> String {
    let pair = |first: usize, separator: char, second: usize| {
        if first == second { first.to_string() } else { format!("{first}{separator}{second}") }
    };
    let expression_text = |(kind, name): (&str, &str)| {
        let is_ready = expressions::SCORE_MODS.contains(&name) || expressions::MASK_MODS.contains(&name);
        if is_ready { format!("+{name}") } else { format!("+{kind}={{{name}}}") }
    };
    let expressions: String =
        problem.expressions().map(|(kind, expression)| expression_text((kind, expression.name()))).collect();
    format!(
        "{}x{}x{}x{}{expressions}{}{}",
        problem.batch,
        pair(problem.query_heads, '/', problem.key_heads),
        pair(problem.query_length, ',', problem.key_length),
        pair(problem.head_dim, ',', problem.value_dim),
        sequences_text(problem),
        scales_text(problem, scales)
    )
}

/// Reads a mask.
pub fn parse_mask(text: &str) -> Result<Mask, ShapeError> {
    let unknown = || ShapeError::Mask { text: text.to_owned() };
    let (name, limits) = match text.split_once(':') {
        Some((name, limits)) => (name, Some(limits)),
        None => (text, None),
    };
    let window = |alignment| {
        let (left, right) = limits.and_then(|limits| limits.split_once(',')).ok_or_else(unknown)?;
        let side = |limit: &str| match limit {
            "all" => Ok(None),
            limit => limit.parse().map(Some).map_err(|_| unknown()),
        };
        Ok(Mask::Window { left: side(left)?, right: side(right)?, alignment })
    };
    match (name, limits) {
        ("full", None) => Ok(Mask::None),
        ("causal", None) => Ok(Mask::Causal(Alignment::BottomRight)),
        ("causal-top-left", None) => Ok(Mask::Causal(Alignment::TopLeft)),
        ("window", Some(_)) => window(Alignment::BottomRight),
        ("window-top-left", Some(_)) => window(Alignment::TopLeft),
        _ => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::mask_text;

    #[test]
    fn shapes_survive_the_round_trip() {
        for text in [
            "1x8x512x64",
            "2x8/2x97,203x64",
            "1x1x1x32,64",
            "0x4x0,7x128",
            "1x2x99x64+relative+documents",
            "1x2x99x64+blocks",
            "1x2x99x64+score_mod={score + 0.1 * (q - k)}+documents",
            "2x2x99x64+score_mod={relative(128)}+mask_mod={q >= k && (k >> 3) != 1}+seqused_k",
            "3x4/2x9,50x64+relative+total_q=20+total_k=77+seqused_q+seqused_k+leftpad_k",
            "3x4/2x1,50x64+seqused_k+kv_batch=5+pages=33x16",
            "3x4/2x1,50x64+pages=33x16/9",
            "3x4/2x1,50x64+pages=33x1/50/64",
        ] {
            let problem = parse_shape(text, DType::F16).expect("a shape");
            assert_eq!(shape_text(&problem), text);
        }
    }

    #[test]
    fn shapes_with_scales_survive_the_round_trip() {
        let check = |types: &str, text: &str, scales: [bool; 3], form: Option<ScaleForm>| {
            let workload = parse_workload(text, types.parse().expect("types")).expect("a shape");
            let Problem { q_scale, k_scale, v_scale, .. } = workload.problem;
            assert_eq!(([q_scale, k_scale, v_scale], workload.scales), (scales, form), "{text} {types}");
            assert_eq!(workload.shape(), text);
        };
        check("bf16 kv e4m3", "1x8x512x64", [false; 3], None);
        check("bf16 kv e4m3", "1x8x512x64+scales", [false, true, true], None);
        check("e4m3 out bf16", "1x8x512x64+scales", [true; 3], None);
        for form in ScaleForm::ALL {
            let text = format!("3x4/2x1,50x64+seqused_k+pages=33x16+scales={form}");
            check("bf16 kv e5m2", &text, [false, true, true], Some(form));
            check("e4m3 out f16", &text, [true; 3], Some(form));
        }
        check("bf16 kv e4m3", "1x8x512x64+v_scale", [false, false, true], None);
        check("e4m3 out bf16", "1x8x512x64+q_scale+k_scale", [true, true, false], None);
    }

    #[test]
    fn bad_scales_say_what_there_is() {
        let check = |types: &str, part: &str, expected: &str| {
            let text = format!("1x8x512x64+{part}");
            let error = parse_workload(&text, types.parse().expect("types")).expect_err("no scales");
            assert_eq!(error.to_string(), format!("`{part}` in `{text}`{expected}"));
        };
        let forms = " is no form of scales; allowed are scales (a form drawn by the seed), scales=tensor (one of a \
                     tensor), scales=head (one per KV head), scales=sequence (one per sequence and KV head) and \
                     scales=token (one per token and head), or q_scale, k_scale and v_scale for some of them";
        for part in ["scales=block", "scales=", "k_scale=head"] {
            check("bf16 kv e4m3", part, forms);
        }
        let types = |types: &str| {
            format!(
                ": scales belong to e4m3 and e5m2, and the element types are {types}; give --dtype 'bf16 kv e4m3' or \
                 'e4m3 out bf16', or leave the scales out"
            )
        };
        check("f16", "scales=head", &types("f16"));
        check("bf16 kv e4m3", "q_scale", &types("bf16 kv e4m3"));
    }

    #[test]
    fn bad_shapes_say_which_part_is_bad() {
        let check = |text: &str, expected: ShapeError| assert_eq!(parse_shape(text, DType::F16), Err(expected));
        check("1x8x512", ShapeError::Parts { text: "1x8x512".to_owned(), parts: 3 });
        let number = |text: &str, part: &str, meaning| ShapeError::Number {
            text: text.to_owned(),
            part: part.to_owned(),
            meaning,
        };
        check("1x8x-5x64", number("1x8x-5x64", "-5", "queries"));
        let expression =
            |text: &str, name: &str| ShapeError::Expression { text: text.to_owned(), name: name.to_owned() };
        check("1x8x5x64+nothing", expression("1x8x5x64+nothing", "nothing"));
        check("1x8x5x64+mask_mod={k < 2}+prefix", expression("1x8x5x64+mask_mod={k < 2}+prefix", "prefix"));
        for text in ["1x8x5x64+score_mod=score", "1x8x5x64+score_mod={score", "1x8x5x64+score_mod"] {
            check(text, expression(text, text.split_once('+').unwrap().1));
        }
        let error = ScoreMod::parse("score + 2 * x").unwrap_err();
        let text = "1x8x5x64+score_mod={score + 2 * x}".to_owned();
        assert!(error.to_string().starts_with("column 13, at `x`: "), "{error}");
        check(&text.clone(), ShapeError::ExpressionText { text, name: "score_mod", error });
        check("1x8x5x64+blocks+prefix", expression("1x8x5x64+blocks+prefix", "prefix"));
        check("1x8/x5x64", number("1x8/x5x64", "", "key heads"));
        check("1x8x5x64+total_q=", number("1x8x5x64+total_q=", "total_q=", "number of rows"));
        for pages in ["pages=4", "pages=4x", "pages=4x2/", "pages=4x2/3/4/5"] {
            let text = format!("1x8x5x64+{pages}");
            check(&text, number(&text, pages, "paged cache"));
        }
        check("1x8x5x64+seqused_k=1", expression("1x8x5x64+seqused_k=1", "seqused_k=1"));
    }

    #[test]
    fn masks_survive_the_round_trip() {
        for text in ["full", "causal", "causal-top-left", "window:3,all", "window-top-left:all,0"] {
            assert_eq!(mask_text(parse_mask(text).expect("a mask")), text);
        }
        for text in ["", "causal:1", "window", "window:1", "window:1,x"] {
            assert_eq!(parse_mask(text), Err(ShapeError::Mask { text: text.to_owned() }));
        }
    }
}
