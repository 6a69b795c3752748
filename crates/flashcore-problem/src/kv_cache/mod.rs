//! Attention with a KV cache that grows: `flash_attn_with_kvcache`. New keys and values are appended to the cache of each
//! sequence, with optional QK-norm and rotary embedding (`RoPE`) of new keys and query, and the query attends the result.
//!
//! For each sequence `b`, with `cache_seqlens[b]` rows of the cache in use before (padding by `leftpad_k` included) and
//! `new[b]` new keys:
//!
//! 1. query rows and new keys are normalized and rotated as in an [`AppendProblem`]; the position of new key `i` is
//!    `start + i`, that of query row `i` is `start + i` with a causal mask or a window, else `start`, where `start` is
//!    `rotary_seqlens[b]`, else `cache_seqlens[b]`;
//! 2. new key and value `i` go to row `cache_seqlens[b] + i` of the sequence, by the page table and `kv_batch_idx`;
//!    An FP8 cache (`kv_dtype` of the attention) is quantised to as in an [`AppendProblem`], with the scales of the
//!    attention: `k_scale` and `v_scale` are given, or computed for each new row and head and written;
//! 3. the query attends the keys of the cache, `cache_seqlens[b] + new[b] - leftpad_k[b]` of them.
//!
//! Host tensors are checked first: a sequence that has no room for its new keys, or a position that the rotary tables have
//! no row for, is an error, and nothing is written. On a GPU such keys are skipped, and so are those whose page or batch the
//! cache does not have; such positions are clamped into the tables.
//!
//! Two sequences may share pages of the keys they have; rows that are appended belong to one sequence.

mod oracle;
mod random;
mod views;

pub use oracle::{KvCacheExpected, kv_cache_oracle, kv_cache_oracle_with};
pub use random::KvCacheData;
pub use views::{KvCacheInputs, KvCacheOutputs, RowMove};

use core::fmt::{self, Write};

use crate::problem::stride_errors;
use crate::{
    AppendProblem, Invalid, Layout, Mask, Problem, ProblemError, QkNorm, Rotary, RotaryStyle, Shape, Strides,
    TensorStrides, TotalRows,
};

/// The most rows of heads, of the query and of the new keys each.
const MOST_ROWS: usize = i32::MAX as usize;

/// Everything about attention with a growing KV cache but the numbers in its tensors.
///
/// ```
/// use flashcore_problem::{Alignment, DType, KvCacheProblem, Layout, Mask, PagedKv, Problem, Rotary, RotaryStyle};
///
/// // 64 sequences decode one token each over pages of 16 rows; 32 query heads share 8 KV heads.
/// let mut attention = Problem::new(64, 32, 1, 128, DType::Bf16)
///     .with_layout(Layout::Bshd)
///     .with_mask(Mask::Causal(Alignment::BottomRight))
///     .with_paged(Some(PagedKv::new(16, 20_000, 256)));
/// (attention.key_heads, attention.key_length) = (8, 4096);
/// let problem = KvCacheProblem::new(attention, 1).with_rotary(Rotary::new(RotaryStyle::Neox, 128, 4096));
/// assert!(problem.validate().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct KvCacheProblem {
    /// The attention after the append. Its key and value are the caches, `key_length` bounds the rows of a sequence after
    /// the append, and `seqused_k` is on.
    pub attention: Problem,
    /// New keys of a sequence: as many of each, or at most so many where they are packed.
    pub new_length: usize,
    /// Rows of the new keys where those of all sequences are packed into one batch (`cu_seqlens_k_new`).
    pub total_new: TotalRows,
    /// Rotary embedding of query and new keys. Its type of positions is not used: they follow from lengths.
    pub rotary: Option<Rotary>,
    /// True if each sequence says where its positions start (`rotary_seqlens`), instead of at `cache_seqlens`.
    pub rotary_seqlens: bool,
    /// RMS norm of query and new keys over the head dimension, before the rotary embedding.
    pub qk_norm: Option<QkNorm>,
    /// True if the scales of new rows in an FP8 cache are computed and written, else they are given. Those that the
    /// attention has on (`k_scale`, `v_scale`) are one for each row and head then.
    pub compute_scales: bool,
    /// Strides of the new keys.
    pub new_key: Strides,
    /// Strides of the new values.
    pub new_value: Strides,
}

impl KvCacheProblem {
    /// Attention after an append of `new_length` keys to each sequence, new keys and values contiguous
    /// `[batch, row, head, column]`. Switches `seqused_k` on.
    pub fn new(attention: Problem, new_length: usize) -> Self {
        let none = Strides { batch: 0, head: 0, row: 0 };
        let attention = attention.with_seqused_k(true);
        let problem = Self {
            attention,
            new_length,
            total_new: None,
            rotary: None,
            rotary_seqlens: false,
            qk_norm: None,
            compute_scales: false,
            new_key: none,
            new_value: none,
        };
        problem.contiguous()
    }

    /// The problem with contiguous new keys and values, `[batch, row, head, column]`.
    #[must_use]
    pub fn contiguous(mut self) -> Self {
        self.new_key = Strides::bshd(self.new_key_shape());
        self.new_value = Strides::bshd(self.new_value_shape());
        self
    }

    /// The problem with new keys of all sequences packed into so many rows, contiguous.
    #[must_use]
    pub fn with_total_new(mut self, total_new: TotalRows) -> Self {
        self.total_new = total_new;
        self.contiguous()
    }

    /// The problem with a rotary embedding.
    #[must_use]
    pub const fn with_rotary(mut self, rotary: Rotary) -> Self {
        self.rotary = Some(rotary);
        self
    }

    /// The problem with positions that start where `rotary_seqlens` says.
    #[must_use]
    pub const fn with_rotary_seqlens(mut self, rotary_seqlens: bool) -> Self {
        self.rotary_seqlens = rotary_seqlens;
        self
    }

    /// The problem with a norm of query and new keys.
    #[must_use]
    pub const fn with_qk_norm(mut self, eps: f32) -> Self {
        self.qk_norm = Some(QkNorm { eps });
        self
    }

    /// The problem with scales that are computed instead of given.
    #[must_use]
    pub const fn with_compute_scales(mut self, compute_scales: bool) -> Self {
        self.compute_scales = compute_scales;
        self
    }

    /// The problem with other strides of the new keys and values.
    #[must_use]
    pub const fn with_new_strides(mut self, new_key: Strides, new_value: Strides) -> Self {
        (self.new_key, self.new_value) = (new_key, new_value);
        self
    }

    /// Shape of the new keys: packed rows are one batch.
    pub const fn new_key_shape(&self) -> Shape {
        let Problem { batch, key_heads: heads, head_dim: columns, .. } = self.attention;
        match self.total_new {
            Some(rows) => Shape { batch: 1, heads, rows, columns },
            None => Shape { batch, heads, rows: self.new_length, columns },
        }
    }

    /// Shape of the new values: packed rows are one batch.
    pub const fn new_value_shape(&self) -> Shape {
        Shape { columns: self.attention.value_dim, ..self.new_key_shape() }
    }

    /// True if the query is changed before it attends: normalized or rotated.
    pub const fn transforms(&self) -> bool {
        self.rotary.is_some() || self.qk_norm.is_some()
    }

    /// True if query row `i` has position `i` from the start: with a mask. Else all rows have the position of the first.
    pub fn has_consecutive_positions(&self) -> bool {
        self.attention.mask != Mask::None
    }

    /// The attention on the query as it is after norm and rotary embedding: contiguous `[batch, row, head, column]`,
    /// where there are any.
    pub fn attended(&self) -> Problem {
        if !self.transforms() {
            return self.attention.clone();
        }
        let query = Strides::bshd(self.attention.query_shape());
        let layout = Layout::Strided(TensorStrides { query, ..self.attention.strides() });
        self.attention.clone().with_layout(layout)
    }

    /// An append of so many tokens to the slots of the same caches, with the same norm and rotary embedding.
    pub fn append(&self, tokens: usize) -> AppendProblem {
        let Problem { key_heads, head_dim, value_dim, dtype, .. } = self.attention;
        let caches = self.attention.key_shape();
        let mut append =
            AppendProblem::new(tokens, key_heads, head_dim, dtype, caches.batch, caches.rows).with_value_dim(value_dim);
        (append.rotary, append.qk_norm) = (self.rotary, self.qk_norm);
        append.cache_dtype = self.attention.kv_dtype.filter(|&cache| cache != dtype);
        (append.k_scale, append.v_scale) = (self.attention.k_scale, self.attention.v_scale);
        append.compute_scales = self.compute_scales;
        let strides = self.attention.strides();
        (append.strides.key_cache, append.strides.value_cache) = (strides.key, strides.value);
        append
    }

    /// Nothing, or every mistake in the problem.
    pub fn validate(&self) -> Result<(), Invalid> {
        let errors = self.errors();
        if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
    }

    /// Every mistake in the problem.
    pub fn errors(&self) -> Vec<ProblemError> {
        let mut errors = self.attention.errors();
        if errors.is_empty() {
            errors = self.append(0).errors();
        }
        let mut refuse = |argument, value: &dyn ToString, allowed: &str| {
            errors.push(ProblemError::OutOfRange { argument, value: value.to_string(), allowed: allowed.to_owned() });
        };
        if !self.attention.seqused_k {
            refuse("seqused_k of the attention", &false, "true: cache_seqlens are the lengths before the append");
        }
        if let Some(total) = self.attention.total_k {
            refuse("total_k of the attention", &total, "None: keys lie in a cache; total_new packs the new ones");
        }
        if self.rotary_seqlens && self.rotary.is_none() {
            refuse("rotary_seqlens", &true, "false without a rotary embedding");
        }
        for (argument, rows, heads) in [
            ("query rows * query_heads", self.attention.query_shape(), self.attention.query_heads),
            ("new keys * key_heads", self.new_key_shape(), self.attention.key_heads),
        ]
        .map(|(argument, shape, heads)| (argument, shape.batch.saturating_mul(shape.rows), heads))
        {
            let rows = rows.saturating_mul(heads);
            if rows > MOST_ROWS {
                refuse(argument, &rows, &format!("at most {MOST_ROWS}"));
            }
        }
        for (argument, value) in [
            ("new_length", Some(self.new_length)),
            ("total_new", self.total_new),
            ("key_length", Some(self.attention.key_length)),
        ] {
            if value == Some(0) {
                errors.push(ProblemError::Zero { argument });
            }
        }
        let dtype = self.attention.dtype;
        stride_errors("new_key", self.new_key_shape(), self.new_key, dtype, &mut errors);
        stride_errors("new_value", self.new_value_shape(), self.new_value, dtype, &mut errors);
        errors
    }
}

impl KvCacheProblem {
    /// The append in words, without the attention after it.
    pub fn append_text(&self) -> String {
        let mut text = format!("new {}", self.new_length);
        if let Some(total) = self.total_new {
            let _ = write!(text, " cu_seqlens_k_new of {total}");
        }
        if let Some(Rotary { style, dim, max_position, .. }) = self.rotary {
            let style = match style {
                RotaryStyle::Neox => "neox",
                RotaryStyle::GptJ => "gpt-j",
            };
            let _ = write!(text, " rotary {style} {dim} of {max_position}");
        }
        let contiguous = (Strides::bshd(self.new_key_shape()), Strides::bshd(self.new_value_shape()));
        for (name, is_on) in [
            (" rotary_seqlens", self.rotary_seqlens),
            (" qk-norm", self.qk_norm.is_some()),
            (" computed-scales", self.compute_scales),
            (" strided-new", (self.new_key, self.new_value) != contiguous),
        ] {
            text.push_str(if is_on { name } else { "" });
        }
        text
    }
}

impl fmt::Display for KvCacheProblem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.attention, self.append_text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn problem() -> KvCacheProblem {
        KvCacheProblem::new(Problem::new(2, 4, 5, 8, DType::F16).with_key_length(40), 3)
    }

    #[track_caller]
    fn check(change: impl FnOnce(&mut KvCacheProblem), expected: &str) {
        let mut problem = problem();
        change(&mut problem);
        let found: Vec<_> = problem.errors().iter().map(ToString::to_string).collect();
        assert_eq!(found.join("; "), expected);
    }

    #[test]
    fn mistakes_are_named() {
        check(|_| {}, "");
        check(|problem| problem.new_length = 0, "new_length is 0; it must be at least 1");
        check(
            |problem| problem.attention.seqused_k = false,
            "seqused_k of the attention is false; it must be true: cache_seqlens are the lengths before the append",
        );
        check(
            |problem| problem.rotary_seqlens = true,
            "rotary_seqlens is true; it must be false without a rotary embedding",
        );
        check(
            |problem| problem.rotary = Some(Rotary::new(RotaryStyle::Neox, 10, 40)),
            "the dim of rotary is 10; it must be even, at least 2 and at most head_dim, which is 8",
        );
        check(
            |problem| {
                let mut strides = problem.attention.strides();
                strides.key.batch = 0;
                problem.attention.layout = Layout::Strided(strides);
            },
            "the (page, head, row) strides of key_cache is (0, 320, 8); it must be so far apart that no rows overlap",
        );
        check(
            |problem| problem.new_key.row = 3,
            "the row stride of new_key is 3; it must be 0 (broadcast) or at least 8, its columns",
        );
        check(|problem| problem.attention.dtype = DType::F64, "dtype is f64; it must be f16, bf16 or f32");
    }

    #[test]
    fn the_query_that_attends_is_contiguous_where_it_is_rotated() {
        let plain = problem();
        assert_eq!(plain.attended(), plain.attention);
        let rotated = plain.clone().with_rotary(Rotary::new(RotaryStyle::GptJ, 4, 40)).attended();
        assert_eq!(rotated.strides().query, Strides { batch: 160, head: 8, row: 32 });
        assert_eq!(rotated.strides().key, plain.attention.strides().key);
    }
}
