//! Oracle of an append: every element that is written, in `f64`, and everything else as it was.

use super::scale_oracle::ScaleElement;
use super::{AppendProblem, QkNorm, Rotary, RotaryStyle, RowScales};
use crate::quantize::saturates;
use crate::{DType, InputViews, Invalid, Operand, Outputs, ScaleStrides, Strides, TensorView};

/// Rounding errors of `f32` that a backend may make in one element, in units of its [magnitude](Element::magnitude):
/// products, a sum, and the approximate root of a norm.
const ROUNDINGS: f64 = 16.0;

/// The right value of one element that is written.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Element {
    /// Index in the storage of its tensor.
    index: usize,
    /// The value before it is rounded to the type of the tensor.
    value: f64,
    /// Sum of the magnitudes of the terms of the value; 0 for one that is copied.
    magnitude: f64,
    /// The number it is divided by before it is rounded; NaN for one that is computed until it is known.
    scale: f32,
}

/// The rows of one cache.
#[derive(Clone, Debug, Default, PartialEq)]
struct CacheRows {
    elements: Vec<Element>,
    /// Computed scales, each with the index of its first element and their number.
    scales: Vec<(ScaleElement, usize, usize)>,
}

/// The right answer to an append: elements that are written, of each tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct AppendExpected {
    dtype: DType,
    cache_dtype: DType,
    key_cache: CacheRows,
    value_cache: CacheRows,
    query: Vec<Element>,
}

/// Computes an append in `f64`. `query` holds the query rows, where they lie with strides of their own.
///
/// # Panics
///
/// When the tensors do not belong to the problem; see [`AppendProblem::validate_views`].
pub fn append_oracle(problem: &AppendProblem, inputs: &InputViews<'_>) -> Result<AppendExpected, Invalid> {
    let written = ScaleStrides::per_cache_row(problem.key_cache_shape());
    append_oracle_with(problem, inputs, [written; 2])
}

/// [`append_oracle`] with computed scales of keys and of values that lie by other strides than contiguous
/// `[page, row, head]`.
///
/// # Panics
///
/// As [`append_oracle`].
pub fn append_oracle_with(
    problem: &AppendProblem,
    inputs: &InputViews<'_>,
    written: [ScaleStrides; 2],
) -> Result<AppendExpected, Invalid> {
    problem.validate()?;
    let strides = problem.strides;
    let tables =
        RotaryTables { rotary: problem.rotary.map(|rotary| (rotary, (inputs.cos, inputs.sin))), norm: problem.qk_norm };
    let mut expected = AppendExpected::new(problem);
    let [k_scales, v_scales] = [
        RowScales::new(problem.scale_source(Operand::KScale), inputs.k_scale, Some(written[0])),
        RowScales::new(problem.scale_source(Operand::VScale), inputs.v_scale, Some(written[1])),
    ];
    for token in 0..problem.tokens {
        let position = inputs.positions.map_or(0, |positions| positions.get(token));
        if !inputs.query.is_empty() {
            for head in 0..problem.query_heads {
                let start = strides.query.row_start(0, head, token);
                let row = transformed(&tables, position, (inputs.query, start), problem.head_dim, inputs.query_norm);
                expected.add_query(strides.query_output.row_start(0, head, token), row);
            }
        }
        let Some((page, slot_row)) = problem.place(inputs.slot_mapping.map_or(-1, |slots| slots[token])) else {
            continue;
        };
        for head in 0..problem.key_heads {
            let start = strides.key.row_start(0, head, token);
            let key = transformed(&tables, position, (inputs.new_key, start), problem.head_dim, inputs.key_norm);
            let place = |strides: Strides| CachePlace {
                start: strides.row_start(page, head, slot_row),
                place: (page, slot_row),
                head,
                sequence: 0,
            };
            expected.add_key(place(strides.key_cache), key, k_scales);
            let value = copied((inputs.new_value, strides.value.row_start(0, head, token)), problem.value_dim);
            expected.add_value(place(strides.value_cache), value, v_scales);
        }
    }
    Ok(expected)
}

/// Values of a row before they are rounded, each with the magnitude of its terms.
type Row = Vec<(f64, f64)>;

/// Place of a row in a cache.
#[derive(Clone, Copy)]
pub(crate) struct CachePlace {
    /// First element.
    pub(crate) start: usize,
    /// Batch (or page) and row.
    pub(crate) place: (usize, usize),
    pub(crate) head: usize,
    pub(crate) sequence: usize,
}

fn read(view: TensorView<'_>, start: usize, columns: usize) -> Vec<f64> {
    let size = view.dtype.size_bytes();
    (start..start + columns).map(|index| view.dtype.decode(&view.data[index * size..])).collect()
}

fn placed(start: usize, row: Row, scale: f32) -> impl Iterator<Item = Element> {
    row.into_iter().enumerate().map(move |(column, (value, magnitude))| Element {
        index: start + column,
        value,
        magnitude,
        scale,
    })
}

/// A row as it is.
pub(crate) fn copied((view, start): (TensorView<'_>, usize), columns: usize) -> Row {
    read(view, start, columns).into_iter().map(|value| (value, 0.0)).collect()
}

/// Norm and rotary embedding, with the tables of that one.
pub(crate) struct RotaryTables<'a> {
    /// The rotary embedding, cosines and sines.
    pub(crate) rotary: Option<(Rotary, (TensorView<'a>, TensorView<'a>))>,
    pub(crate) norm: Option<QkNorm>,
}

/// Norm and rotary embedding of one row: each value with its magnitude.
pub(crate) fn transformed(
    tables: &RotaryTables<'_>,
    position: i64,
    (view, start): (TensorView<'_>, usize),
    columns: usize,
    weights: TensorView<'_>,
) -> Row {
    let mut row = read(view, start, columns);
    if let Some(norm) = tables.norm {
        let weights = read(weights, 0, row.len());
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(norm.eps)).sqrt();
        row.iter_mut().zip(weights).for_each(|(x, weight)| *x *= scale * weight);
    }
    let magnitude = |x: f64| if tables.norm.is_some() { x.abs() } else { 0.0 };
    let mut result: Vec<_> = row.iter().map(|&x| (x, magnitude(x))).collect();
    if let Some((rotary, (cos, sin))) = tables.rotary {
        let start = rotary.clamp(position) * rotary.table_stride;
        let half = rotary.dim / 2;
        let (cos, sin) = (read(cos, start, half), read(sin, start, half));
        for pair in 0..half {
            let (first, second) = match rotary.style {
                RotaryStyle::Neox => (pair, pair + half),
                RotaryStyle::GptJ => (2 * pair, 2 * pair + 1),
            };
            let (x, y, cos, sin) = (row[first], row[second], cos[pair], sin[pair]);
            result[first] = (x * cos - y * sin, (x * cos).abs() + (y * sin).abs());
            result[second] = (y * cos + x * sin, (y * cos).abs() + (x * sin).abs());
        }
    }
    result
}

impl AppendExpected {
    /// Nothing is written.
    pub(crate) fn new(problem: &AppendProblem) -> Self {
        Self {
            dtype: problem.dtype,
            cache_dtype: problem.cache_dtype(),
            key_cache: CacheRows::default(),
            value_cache: CacheRows::default(),
            query: Vec::new(),
        }
    }

    /// Adds a row of the key cache.
    pub(crate) fn add_key(&mut self, place: CachePlace, row: Row, scales: RowScales<'_>) {
        self.key_cache.add(self.cache_dtype, place, row, scales);
    }

    /// Adds a row of the query output, which begins at an element.
    pub(crate) fn add_query(&mut self, start: usize, row: Row) {
        self.query.extend(placed(start, row, 1.0));
    }

    /// Adds a row of the value cache.
    pub(crate) fn add_value(&mut self, place: CachePlace, row: Row, scales: RowScales<'_>) {
        self.value_cache.add(self.cache_dtype, place, row, scales);
    }

    /// The answer under the scales of keys and of values that a backend computed, by which its codes are judged; or the
    /// first thing that is wrong with them, given those before the append. Nothing to do where none are computed.
    pub fn with_computed_scales(&self, before: [&[f32]; 2], after: [&[f32]; 2]) -> Result<Self, String> {
        let mut settled = self.clone();
        settled.key_cache.settle("k_scale", before[0], after[0])?;
        settled.value_cache.settle("v_scale", before[1], after[1])?;
        Ok(settled)
    }

    /// Elements beyond the largest number of an FP8 cache under their scale: their codes are the largest instead.
    pub fn saturated(&self) -> usize {
        let dtype = self.cache_dtype;
        let elements = self.key_cache.elements.iter().chain(&self.value_cache.elements);
        elements.filter(|element| dtype.is_float8() && saturates(dtype, element.value as f32, element.scale)).count()
    }

    /// Nothing, or the first thing that is wrong with outputs that do not share a memory, given those before.
    pub fn check(&self, before: &Outputs, after: &Outputs) -> Result<(), String> {
        let settled = self.with_computed_scales(before.scales(), after.scales())?;
        settled.check_key_cache(&before.key_cache.data, &after.key_cache.data)?;
        settled.check_value_cache(&before.value_cache.data, &after.value_cache.data)?;
        settled.check_query(&before.query_output.data, &after.query_output.data)
    }

    /// Nothing, or the first thing that is wrong with the key cache, given the bytes before and after.
    pub fn check_key_cache(&self, before: &[u8], after: &[u8]) -> Result<(), String> {
        check(self.cache_dtype, "key_cache", self.key_cache.settled()?, before, after)
    }

    /// Nothing, or the first thing that is wrong with the value cache.
    pub fn check_value_cache(&self, before: &[u8], after: &[u8]) -> Result<(), String> {
        check(self.cache_dtype, "value_cache", self.value_cache.settled()?, before, after)
    }

    /// Nothing, or the first thing that is wrong with caches that share a memory, values `offset` elements after keys.
    pub fn check_interleaved(&self, offset: usize, before: &[u8], after: &[u8]) -> Result<(), String> {
        let values = self.value_cache.settled()?.iter();
        let values = values.map(|&element| Element { index: element.index + offset, ..element });
        let elements: Vec<_> = self.key_cache.settled()?.iter().copied().chain(values).collect();
        check(self.cache_dtype, "cache", &elements, before, after)
    }

    /// Nothing, or the first thing that is wrong with the query output.
    pub fn check_query(&self, before: &[u8], after: &[u8]) -> Result<(), String> {
        check(self.dtype, "query_output", &self.query, before, after)
    }

    /// Nothing, or the first thing that is wrong with the rows of the query output that are to be written; the others may
    /// hold anything.
    pub fn check_query_rows(&self, after: &[u8]) -> Result<(), String> {
        let size = self.dtype.size_bytes();
        let wrong = |element: &&Element| !is_right(self.dtype, element, &after[element.index * size..][..size]);
        self.query.iter().find(wrong).map_or(Ok(()), |element| {
            let found = self.dtype.decode(&after[element.index * size..]);
            Err(format!("element {} of the query is {found}; it must be {}", element.index, element.value))
        })
    }
}

impl CacheRows {
    fn add(&mut self, dtype: DType, place: CachePlace, row: Row, scales: RowScales<'_>) {
        let first = self.elements.len();
        let index = |strides: ScaleStrides| strides.key_index(place.sequence, place.place, place.head);
        let scale = match scales {
            RowScales::None => 1.0,
            RowScales::Given(scale) => scale.data[index(scale.strides)],
            RowScales::Computed(strides) => {
                let scale = ScaleElement::of(
                    dtype,
                    index(strides),
                    row.iter().map(|&(value, magnitude)| (value, error(magnitude))),
                );
                self.scales.push((scale, first, row.len()));
                f32::NAN
            }
        };
        self.elements.extend(placed(place.start, row, scale));
    }

    fn settle(&mut self, tensor: &str, before: &[f32], after: &[f32]) -> Result<(), String> {
        ScaleElement::check(tensor, self.scales.iter().map(|(scale, ..)| scale), before, after)?;
        for (scale, first, count) in self.scales.drain(..) {
            self.elements[first..first + count].iter_mut().for_each(|element| element.scale = after[scale.index]);
        }
        Ok(())
    }

    /// The elements, each under a scale that is known.
    fn settled(&self) -> Result<&[Element], String> {
        if self.scales.is_empty() {
            return Ok(&self.elements);
        }
        Err("the computed scales of the append were not judged before its codes".to_owned())
    }
}

fn check(dtype: DType, tensor: &str, elements: &[Element], before: &[u8], after: &[u8]) -> Result<(), String> {
    let size = dtype.size_bytes();
    if before.len() != after.len() {
        return Err(format!("{tensor} had {} bytes and has {}", before.len(), after.len()));
    }
    let mut written = vec![None; after.len() / size];
    for element in elements {
        written[element.index] = Some(element);
    }
    for (index, (expected, found)) in written.into_iter().zip(after.chunks_exact(size)).enumerate() {
        match expected {
            None if *found != before[index * size..][..size] => {
                return Err(format!("element {index} of {tensor} was written; it must stay as it was"));
            }
            Some(element) if !is_right(dtype, element, found) => {
                let (found, Element { value, scale, .. }) = (dtype.decode(found), element);
                let by = if dtype.is_float8() { format!(" / {scale}") } else { String::new() };
                return Err(format!("element {index} of {tensor} is {found}; it must be {value}{by}"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The most that a backend's `f32` may be off before it is rounded to the type of the tensor; 0 for what is copied.
fn error(magnitude: f64) -> f64 {
    if magnitude == 0.0 {
        return 0.0;
    }
    ROUNDINGS * DType::F32.unit_roundoff() * magnitude + f64::from(f32::MIN_POSITIVE)
}

fn is_right(dtype: DType, element: &Element, found: &[u8]) -> bool {
    // As far off as rounding to the type, and some roundings of f32 before it, may bring a value: rounding and a division
    // by a positive number are monotonic.
    let error = error(element.magnitude);
    // The quotient that is rounded to a code is one of f32.
    let divided = |value: f64| if dtype.is_float8() { f64::from(value as f32 / element.scale) } else { value };
    let (found, is_nan) = (dtype.decode(found), divided(element.value).is_nan());
    if is_nan || found.is_nan() {
        return is_nan && found.is_nan();
    }
    let [low, high] = [element.value - error, element.value + error].map(|value| dtype.round(divided(value)));
    low <= found && found <= high
}
