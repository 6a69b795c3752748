//! Appending to a KV cache: new keys and values are written into a (paged) cache by slot, with optional QK-norm and
//! rotary embedding (`RoPE`) of the keys, and of the query rows of the same tokens.
//!
//! For each token `t` and head `h`:
//!
//! 1. with [`qk_norm`](AppendProblem::qk_norm), `x = x * weight / sqrt(mean(x²) + eps)` over the head dimension, `x` being
//!    the new key or the query row;
//! 2. with [`rotary`](AppendProblem::rotary), pairs of the first `dim` columns are rotated by the angle of
//!    `positions[t]`; the other columns stay;
//! 3. the key goes to row `slot % page_size` of page `slot / page_size` of the key cache, the value, unchanged, to the
//!    same row of the value cache, `slot` being `slot_mapping[t]`. Slot -1 skips the token: nothing is written for it. A cache of another type than the tokens is FP8: the row is divided by a scale and rounded, as
//!    [`quantize`](crate::quantize) says. The scale is given, or computed from the row as it goes to the cache and
//!    written beside it;
//! 4. the query row goes to the query output, whatever its slot.
//!
//! No two tokens may have the same slot, or it is undefined which of them is written. Of tensors on the host, other slots
//! outside of the cache and positions outside of the tables are errors. On a device, such tokens are skipped and such
//! positions clamped, so that nothing outside of a tensor is read or written.

mod oracle;
mod random;
mod scale_oracle;
mod scales;
mod views;

pub use oracle::{AppendExpected, append_oracle, append_oracle_with};
pub(crate) use oracle::{CachePlace, RotaryTables, copied, transformed};
pub(crate) use random::{ZEROS, random_scale, tables, unwritten_scales};
pub use scales::ScaleSource;
pub(crate) use scales::{RowScales, check_presence};
pub(crate) use views::Errors;
pub use views::{Positions, ValueCache};

use crate::{DType, Invalid, ProblemError, Shape, Strides, TensorError};

/// The most slots of a cache: kernels divide slots by the page size in 32 bits.
pub const MOST_SLOTS: usize = i32::MAX as usize;
/// The most rows of heads that one launch writes, of query, key and value each.
const MOST_ROWS: usize = i32::MAX as usize;
/// The most columns of a head.
pub const MOST_APPEND_COLUMNS: usize = 1024;

/// Everything about an append but the numbers in its tensors.
///
/// ```
/// use flashcore_problem::{AppendProblem, DType, Rotary, RotaryStyle};
///
/// // 64 tokens of 32 query heads and 8 key heads of 128 columns, into 1000 pages of 16 rows.
/// let problem = AppendProblem::new(64, 8, 128, DType::Bf16, 1000, 16)
///     .with_query(32)
///     .with_rotary(Rotary::new(RotaryStyle::Neox, 128, 4096));
/// assert!(problem.validate().is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AppendProblem {
    /// Element type of query, key, value and, unless they have their own, caches: `f16`, `bf16` or `f32`.
    pub dtype: DType,
    /// Element type of the caches; `None` for that of the tensors, else `e4m3` or `e5m2`.
    pub cache_dtype: Option<DType>,
    /// True if keys have a scale in an FP8 cache.
    pub k_scale: bool,
    /// True if values have a scale in an FP8 cache.
    pub v_scale: bool,
    /// True if those scales are computed, one for each row and head, and written; else they are given.
    pub compute_scales: bool,
    /// Tokens: new keys and values, and query rows. A launch may have fewer.
    pub tokens: usize,
    /// Query heads; 0 for no query.
    pub query_heads: usize,
    /// Heads of key and value.
    pub key_heads: usize,
    /// Columns of query and key.
    pub head_dim: usize,
    /// Columns of value.
    pub value_dim: usize,
    /// Pages of the cache; 1 or the batch for a contiguous cache.
    pub num_pages: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// Rotary embedding of query and key.
    pub rotary: Option<Rotary>,
    /// RMS norm of query and key over the head dimension, before the rotary embedding.
    pub qk_norm: Option<QkNorm>,
    /// Distances between elements.
    pub strides: AppendStrides,
}

/// Rotary embedding: the first `dim` columns of a head, in pairs, as complex numbers times `cos + i sin` of a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotary {
    /// The columns that make a pair.
    pub style: RotaryStyle,
    /// Columns that are rotated: even, at most the head dimension.
    pub dim: usize,
    /// Rows of the tables of cosines and sines, `[max_position, dim / 2]`.
    pub max_position: usize,
    /// Distance in elements from one row of a table to the next.
    pub table_stride: usize,
    /// Element type of the tables; `None` for the type of the tensors, else `f32`.
    pub table_dtype: Option<DType>,
    /// Integer type of the positions.
    pub positions: PositionType,
}

/// Columns that make a pair of a rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RotaryStyle {
    /// Halves: columns `i` and `i + dim / 2` (GPT-NeoX, Llama in Hugging Face; `rotary_interleaved=False`).
    Neox,
    /// Adjacent columns: `2 i` and `2 i + 1` (GPT-J; `rotary_interleaved=True`).
    GptJ,
}

/// Integer type of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PositionType {
    /// 32 bits, signed.
    I32,
    /// 64 bits, signed.
    I64,
}

impl PositionType {
    /// Bytes of one position.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

/// RMS norm of query and key rows, each with a vector of `head_dim` weights of the type of the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    /// Added to the mean square.
    pub eps: f32,
}

/// Strides of the tensors of an append, in elements. Of token tensors, `row` is from one token to the next and `batch`
/// is not used; of caches, `batch` is from one page to the next and `row` from one row of a page to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AppendStrides {
    /// Of the query.
    pub query: Strides,
    /// Of the query output.
    pub query_output: Strides,
    /// Of the new keys.
    pub key: Strides,
    /// Of the new values.
    pub value: Strides,
    /// Of the key cache.
    pub key_cache: Strides,
    /// Of the value cache.
    pub value_cache: Strides,
}

impl Rotary {
    /// A rotary embedding of `dim` columns with contiguous tables of the tensors' type and 64-bit positions.
    pub const fn new(style: RotaryStyle, dim: usize, max_position: usize) -> Self {
        Self { style, dim, max_position, table_stride: dim / 2, table_dtype: None, positions: PositionType::I64 }
    }

    /// Elements of a table from the first to the last, both included; `None` when the number does not fit.
    pub fn table_extent(self) -> Option<usize> {
        self.max_position.checked_sub(1)?.checked_mul(self.table_stride)?.checked_add(self.dim / 2)
    }

    /// Row of the table for a position: on a device, positions outside of the table are clamped into it.
    pub fn clamp(self, position: i64) -> usize {
        position.clamp(0, self.max_position as i64 - 1) as usize
    }

    /// The error of a position outside of the table.
    pub(crate) const fn outside(self, of: &'static str, index: usize, position: i64) -> TensorError {
        TensorError::Position { of, index, position, max_position: self.max_position }
    }
}

impl AppendProblem {
    /// Keys and values of `tokens` tokens into pages `[page, row, head, column]`, everything contiguous, without query,
    /// norm or rotary embedding. Values are as wide as keys.
    pub fn new(
        tokens: usize,
        key_heads: usize,
        head_dim: usize,
        dtype: DType,
        num_pages: usize,
        page_size: usize,
    ) -> Self {
        let none = Strides { batch: 0, head: 0, row: 0 };
        let strides = AppendStrides {
            query: none,
            query_output: none,
            key: none,
            value: none,
            key_cache: none,
            value_cache: none,
        };
        let problem = Self {
            dtype,
            cache_dtype: None,
            k_scale: false,
            v_scale: false,
            compute_scales: false,
            tokens,
            query_heads: 0,
            key_heads,
            head_dim,
            value_dim: head_dim,
            num_pages,
            page_size,
            rotary: None,
            qk_norm: None,
            strides,
        };
        problem.contiguous()
    }

    /// The problem with contiguous tensors, `[token, head, column]` and `[page, row, head, column]`.
    #[must_use]
    pub fn contiguous(mut self) -> Self {
        self.strides = AppendStrides {
            query: Strides::bshd(self.query_shape()),
            query_output: Strides::bshd(self.query_shape()),
            key: Strides::bshd(self.key_shape()),
            value: Strides::bshd(self.value_shape()),
            key_cache: Strides::bshd(self.key_cache_shape()),
            value_cache: Strides::bshd(self.value_cache_shape()),
        };
        self
    }

    /// The problem with a query of so many heads, contiguous.
    #[must_use]
    pub fn with_query(mut self, query_heads: usize) -> Self {
        self.query_heads = query_heads;
        self.strides.query = Strides::bshd(self.query_shape());
        self.strides.query_output = self.strides.query;
        self
    }

    /// The problem with values of so many columns; values and value cache contiguous.
    #[must_use]
    pub fn with_value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self.strides.value = Strides::bshd(self.value_shape());
        self.strides.value_cache = Strides::bshd(self.value_cache_shape());
        self
    }

    /// The problem with a rotary embedding.
    #[must_use]
    pub const fn with_rotary(mut self, rotary: Rotary) -> Self {
        self.rotary = Some(rotary);
        self
    }

    /// The problem with a norm of query and key.
    #[must_use]
    pub const fn with_qk_norm(mut self, eps: f32) -> Self {
        self.qk_norm = Some(QkNorm { eps });
        self
    }

    /// The problem with other strides.
    #[must_use]
    pub const fn with_strides(mut self, strides: AppendStrides) -> Self {
        self.strides = strides;
        self
    }

    /// The problem with caches of another type, or of that of the tensors.
    #[must_use]
    pub const fn with_cache_dtype(mut self, cache_dtype: Option<DType>) -> Self {
        self.cache_dtype = cache_dtype;
        self
    }

    /// The problem with or without scales of keys and of values.
    #[must_use]
    pub const fn with_scales(mut self, k_scale: bool, v_scale: bool) -> Self {
        (self.k_scale, self.v_scale) = (k_scale, v_scale);
        self
    }

    /// The problem with scales that are computed instead of given.
    #[must_use]
    pub const fn with_compute_scales(mut self, compute_scales: bool) -> Self {
        self.compute_scales = compute_scales;
        self
    }

    /// The problem with fewer or more tokens.
    #[must_use]
    pub const fn with_tokens(mut self, tokens: usize) -> Self {
        self.tokens = tokens;
        self
    }

    const fn token_shape(&self, heads: usize, columns: usize) -> Shape {
        Shape { batch: 1, heads, rows: self.tokens, columns }
    }

    /// Shape of query and query output: one batch, tokens as rows.
    pub const fn query_shape(&self) -> Shape {
        self.token_shape(self.query_heads, self.head_dim)
    }

    /// Shape of the new keys: one batch, tokens as rows.
    pub const fn key_shape(&self) -> Shape {
        self.token_shape(self.key_heads, self.head_dim)
    }

    /// Shape of the new values: one batch, tokens as rows.
    pub const fn value_shape(&self) -> Shape {
        self.token_shape(self.key_heads, self.value_dim)
    }

    /// Shape of the key cache: pages as batches.
    pub const fn key_cache_shape(&self) -> Shape {
        Shape { batch: self.num_pages, heads: self.key_heads, rows: self.page_size, columns: self.head_dim }
    }

    /// Shape of the value cache: pages as batches.
    pub const fn value_cache_shape(&self) -> Shape {
        Shape { columns: self.value_dim, ..self.key_cache_shape() }
    }

    /// Slots of the cache. Saturates; validation refuses sizes that do not fit.
    pub const fn slots(&self) -> usize {
        self.num_pages.saturating_mul(self.page_size)
    }

    /// Page and row of a slot; `None` for one that is skipped.
    pub fn place(&self, slot: i64) -> Option<(usize, usize)> {
        let slot = usize::try_from(slot).ok().filter(|&slot| slot < self.slots())?;
        Some((slot / self.page_size, slot % self.page_size))
    }

    /// Element type of the caches.
    pub fn cache_dtype(&self) -> DType {
        self.cache_dtype.unwrap_or(self.dtype)
    }

    /// Element type of the rotary tables.
    pub fn table_dtype(&self) -> DType {
        self.rotary.and_then(|rotary| rotary.table_dtype).unwrap_or(self.dtype)
    }

    /// Nothing, or every mistake in the problem.
    pub fn validate(&self) -> Result<(), Invalid> {
        let errors = self.errors();
        if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
    }

    /// Every mistake in the problem.
    pub fn errors(&self) -> Vec<ProblemError> {
        let mut errors = Vec::new();
        let out_of_range = |argument, value: &dyn ToString, allowed: String| ProblemError::OutOfRange {
            argument,
            value: value.to_string(),
            allowed,
        };
        if self.dtype == DType::F64 || self.dtype.is_float8() {
            errors.push(out_of_range("dtype", &self.dtype, "f16, bf16 or f32".to_owned()));
        }
        for (argument, value, most) in [
            ("key_heads", self.key_heads, usize::MAX),
            ("page_size", self.page_size, MOST_SLOTS),
            ("head_dim", self.head_dim, MOST_APPEND_COLUMNS),
            ("value_dim", self.value_dim, MOST_APPEND_COLUMNS),
        ] {
            if value == 0 {
                errors.push(ProblemError::Zero { argument });
            } else if value > most {
                errors.push(out_of_range(argument, &value, format!("at most {most}")));
            }
        }
        if self.slots() > MOST_SLOTS {
            errors.push(out_of_range("num_pages * page_size", &self.slots(), format!("at most {MOST_SLOTS}")));
        }
        for (argument, heads) in [("tokens * query_heads", self.query_heads), ("tokens * key_heads", self.key_heads)] {
            let rows = self.tokens.saturating_mul(heads);
            if rows > MOST_ROWS {
                errors.push(out_of_range(argument, &rows, format!("at most {MOST_ROWS}; append in several launches")));
            }
        }
        if let Some(QkNorm { eps }) = self.qk_norm
            && !(eps.is_finite() && eps >= 0.0)
        {
            errors.push(out_of_range("the eps of qk_norm", &eps, "finite and at least 0, usually 1e-6".to_owned()));
        }
        self.scale_errors(&mut errors);
        self.rotary_errors(&mut errors);
        self.stride_errors(&mut errors);
        errors
    }

    fn rotary_errors(&self, errors: &mut Vec<ProblemError>) {
        let Some(rotary) = self.rotary else { return };
        let mut refuse = |argument, value: &dyn ToString, allowed: String| {
            errors.push(ProblemError::OutOfRange { argument, value: value.to_string(), allowed });
        };
        if rotary.dim == 0 || !rotary.dim.is_multiple_of(2) || rotary.dim > self.head_dim {
            let allowed = format!("even, at least 2 and at most head_dim, which is {}", self.head_dim);
            refuse("the dim of rotary", &rotary.dim, allowed);
        }
        if rotary.max_position == 0 || i32::try_from(rotary.max_position).is_err() {
            refuse("the max_position of rotary", &rotary.max_position, format!("from 1 to {}", i32::MAX));
        }
        if rotary.table_stride < rotary.dim / 2 {
            let allowed = format!("at least dim / 2, which is {}", rotary.dim / 2);
            refuse("the table_stride of rotary", &rotary.table_stride, allowed);
        }
        let table = self.table_dtype();
        if table != self.dtype && table != DType::F32 {
            let allowed = format!("the dtype of the tensors, {}, or f32", self.dtype);
            refuse("the table_dtype of rotary", &table, allowed);
        }
    }

    fn stride_errors(&self, errors: &mut Vec<ProblemError>) {
        let AppendStrides { query, query_output, key, value, key_cache, value_cache } = self.strides;
        for (tensor, shape, strides, is_written) in [
            ("query", self.query_shape(), query, false),
            ("query_output", self.query_shape(), query_output, true),
            ("key", self.key_shape(), key, false),
            ("value", self.value_shape(), value, false),
            ("key_cache", self.key_cache_shape(), key_cache, true),
            ("value_cache", self.value_cache_shape(), value_cache, true),
        ] {
            let is_cache = matches!(tensor, "key_cache" | "value_cache");
            let dtype = if is_cache { self.cache_dtype() } else { self.dtype };
            crate::problem::stride_errors(tensor, shape, strides, dtype, errors);
            if is_written && !strides.is_disjoint(shape) {
                let Strides { batch, head, row } = strides;
                let (value, allowed) = (format!("({batch}, {head}, {row})"), "so far apart that no rows overlap");
                let argument = match tensor {
                    "query_output" => "the (batch, head, token) strides of query_output",
                    "key_cache" => "the (page, head, row) strides of key_cache",
                    _ => "the (page, head, row) strides of value_cache",
                };
                errors.push(ProblemError::OutOfRange { argument, value, allowed: allowed.to_owned() });
            }
        }
    }
}
