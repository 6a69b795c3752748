//! Oracle of an append: every element that is written, in `f64`, and everything else as it was.

use super::{AppendInputs, AppendProblem, QkNorm, Rotary, RotaryStyle};
use crate::{DType, Invalid, Shape, Strides, Tensor, TensorView};

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
}

/// The right answer to an append: elements that are written, of each tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct AppendExpected {
    dtype: DType,
    key_cache: Vec<Element>,
    value_cache: Vec<Element>,
    query: Vec<Element>,
}

/// Computes an append in `f64`. `query` holds the query rows, where they lie with strides of their own.
///
/// # Panics
///
/// When the tensors do not belong to the problem; see [`AppendProblem::validate_views`].
pub fn append_oracle(problem: &AppendProblem, inputs: &AppendInputs<'_>) -> Result<AppendExpected, Invalid> {
    problem.validate()?;
    let strides = problem.strides;
    let tables = RotaryTables { rotary: problem.rotary.zip(inputs.cos.zip(inputs.sin)), norm: problem.qk_norm };
    let mut expected = AppendExpected::new(problem.dtype);
    for token in 0..problem.tokens {
        let position = inputs.positions.map_or(0, |positions| positions.get(token));
        if let Some(query) = inputs.query {
            for head in 0..problem.query_heads {
                let start = strides.query.row_start(0, head, token);
                let row = transformed(&tables, position, (query, start), problem.head_dim, inputs.query_norm);
                expected.add_query(strides.query_output.row_start(0, head, token), row);
            }
        }
        let Some((page, slot_row)) = problem.place(inputs.slot_mapping[token]) else { continue };
        for head in 0..problem.key_heads {
            let start = strides.key.row_start(0, head, token);
            let key = transformed(&tables, position, (inputs.key, start), problem.head_dim, inputs.key_norm);
            expected.add_key(strides.key_cache.row_start(page, head, slot_row), key);
            let value = copied((inputs.value, strides.value.row_start(0, head, token)), problem.value_dim);
            expected.add_value(strides.value_cache.row_start(page, head, slot_row), value);
        }
    }
    Ok(expected)
}

/// Values of a row before they are rounded, each with the magnitude of its terms.
type Row = Vec<(f64, f64)>;

fn read(view: TensorView<'_>, start: usize, columns: usize) -> Vec<f64> {
    let size = view.dtype.size_bytes();
    (start..start + columns).map(|index| view.dtype.decode(&view.data[index * size..])).collect()
}

fn placed(start: usize, row: Row) -> impl Iterator<Item = Element> {
    row.into_iter().enumerate().map(move |(column, (value, magnitude))| Element {
        index: start + column,
        value,
        magnitude,
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
    weights: Option<TensorView<'_>>,
) -> Row {
    let mut row = read(view, start, columns);
    if let (Some(norm), Some(weights)) = (tables.norm, weights) {
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
    pub(crate) const fn new(dtype: DType) -> Self {
        Self { dtype, key_cache: Vec::new(), value_cache: Vec::new(), query: Vec::new() }
    }

    /// Adds a row of the key cache, which begins at an element.
    pub(crate) fn add_key(&mut self, start: usize, row: Row) {
        self.key_cache.extend(placed(start, row));
    }

    /// Adds a row of the query output, which begins at an element.
    pub(crate) fn add_query(&mut self, start: usize, row: Row) {
        self.query.extend(placed(start, row));
    }

    /// Adds a row of the value cache, which begins at an element.
    pub(crate) fn add_value(&mut self, start: usize, row: Row) {
        self.value_cache.extend(placed(start, row));
    }

    /// Nothing, or the first thing that is wrong with the key cache, given the bytes before and after.
    pub fn check_key_cache(&self, before: &[u8], after: &[u8]) -> Result<(), String> {
        self.check("key_cache", &self.key_cache, before, after)
    }

    /// Nothing, or the first thing that is wrong with the value cache.
    pub fn check_value_cache(&self, before: &[u8], after: &[u8]) -> Result<(), String> {
        self.check("value_cache", &self.value_cache, before, after)
    }

    /// Nothing, or the first thing that is wrong with caches that share a memory, values `offset` elements after keys.
    pub fn check_interleaved(&self, offset: usize, before: &[u8], after: &[u8]) -> Result<(), String> {
        let values = self.value_cache.iter().map(|&element| Element { index: element.index + offset, ..element });
        let elements: Vec<_> = self.key_cache.iter().copied().chain(values).collect();
        self.check("cache", &elements, before, after)
    }

    /// Nothing, or the first thing that is wrong with the query output.
    pub fn check_query(&self, before: &[u8], after: &[u8]) -> Result<(), String> {
        self.check("query_output", &self.query, before, after)
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

    fn check(&self, tensor: &str, elements: &[Element], before: &[u8], after: &[u8]) -> Result<(), String> {
        let size = self.dtype.size_bytes();
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
                Some(element) if !is_right(self.dtype, element, found) => {
                    let (found, right) = (self.dtype.decode(found), element.value);
                    return Err(format!("element {index} of {tensor} is {found}; it must be {right}"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn is_right(dtype: DType, element: &Element, found: &[u8]) -> bool {
    let mut bytes = [0; 8];
    dtype.encode(element.value, &mut bytes);
    let (found, nearest) = (dtype.decode(found), dtype.decode(&bytes));
    if element.value.is_nan() || found.is_nan() {
        return element.value.is_nan() && found.is_nan();
    }
    if element.magnitude == 0.0 {
        return found == nearest;
    }
    // As far off as rounding to the type, and some roundings of f32 before it, may bring a value: rounding is monotonic.
    let error = ROUNDINGS * DType::F32.unit_roundoff() * element.magnitude + f64::from(f32::MIN_POSITIVE);
    dtype.round(element.value - error) <= found && found <= dtype.round(element.value + error)
}

/// The bytes of a tensor that a shape with strides reaches, poisoned.
pub(super) fn poisoned(dtype: DType, shape: Shape, strides: Strides) -> Tensor {
    Tensor::poisoned(dtype, strides.extent(shape).unwrap_or(0))
}
