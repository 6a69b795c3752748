//! The numbers of an append, borrowed.

use super::{AppendProblem, PositionType};
use crate::{
    DType, Invalid, PositionNumbers, ScaleView, ScaleViewMut, Shape, Slot, Strides, TensorError, TensorView,
    TensorViewMut,
};

/// Positions of tokens in their sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions<'a> {
    /// In 32 bits.
    I32(&'a [i32]),
    /// In 64 bits.
    I64(&'a [i64]),
}

impl<'a> Positions<'a> {
    /// The memory.
    pub(crate) fn slot(self) -> Slot<'a> {
        match self {
            Self::I32(positions) => Slot::of(positions),
            Self::I64(positions) => Slot::of(positions),
        }
    }

    /// Number of positions.
    pub const fn len(self) -> usize {
        match self {
            Self::I32(positions) => positions.len(),
            Self::I64(positions) => positions.len(),
        }
    }

    /// True if there are none.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The position of a token.
    ///
    /// # Panics
    ///
    /// When there is none.
    pub fn get(self, token: usize) -> i64 {
        match self {
            Self::I32(positions) => positions[token].into(),
            Self::I64(positions) => positions[token],
        }
    }

    /// A copy that owns its memory.
    pub fn to_owned_numbers(self) -> PositionNumbers {
        match self {
            Self::I32(positions) => PositionNumbers::I32(positions.to_vec()),
            Self::I64(positions) => PositionNumbers::I64(positions.to_vec()),
        }
    }

    /// The integer type.
    pub const fn position_type(self) -> PositionType {
        match self {
            Self::I32(_) => PositionType::I32,
            Self::I64(_) => PositionType::I64,
        }
    }
}

impl<'a> From<&'a [i32]> for Positions<'a> {
    fn from(positions: &'a [i32]) -> Self {
        Self::I32(positions)
    }
}

impl<'a> From<&'a [i64]> for Positions<'a> {
    fn from(positions: &'a [i64]) -> Self {
        Self::I64(positions)
    }
}

/// Everything that an append reads.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AppendInputs<'a> {
    /// New keys.
    pub key: TensorView<'a>,
    /// New values.
    pub value: TensorView<'a>,
    /// Slot of each token; -1 skips it.
    pub slot_mapping: &'a [i64],
    /// Query rows; `None` without a query, and where the query output holds them (in place).
    pub query: Option<TensorView<'a>>,
    /// Position of each token, for the rotary embedding.
    pub positions: Option<Positions<'a>>,
    /// Cosines, `[max_position, dim / 2]`.
    pub cos: Option<TensorView<'a>>,
    /// Sines, `[max_position, dim / 2]`.
    pub sin: Option<TensorView<'a>>,
    /// Weights of the norm of the query, one for each column.
    pub query_norm: Option<TensorView<'a>>,
    /// Weights of the norm of the key, one for each column.
    pub key_norm: Option<TensorView<'a>>,
    /// The scale of keys in an FP8 cache, unless it is computed.
    pub k_scale: Option<ScaleView<'a>>,
    /// The scale of values in an FP8 cache, unless it is computed.
    pub v_scale: Option<ScaleView<'a>>,
}

impl<'a> AppendInputs<'a> {
    /// Keys and values, and nothing optional.
    pub fn new(key: impl Into<TensorView<'a>>, value: impl Into<TensorView<'a>>, slot_mapping: &'a [i64]) -> Self {
        Self {
            key: key.into(),
            value: value.into(),
            slot_mapping,
            query: None,
            positions: None,
            cos: None,
            sin: None,
            query_norm: None,
            key_norm: None,
            k_scale: None,
            v_scale: None,
        }
    }

    /// Adds the scale of keys.
    #[must_use]
    pub const fn with_k_scale(mut self, scale: ScaleView<'a>) -> Self {
        self.k_scale = Some(scale);
        self
    }

    /// Adds the scale of values.
    #[must_use]
    pub const fn with_v_scale(mut self, scale: ScaleView<'a>) -> Self {
        self.v_scale = Some(scale);
        self
    }

    /// Adds query rows that are not rotated in place.
    #[must_use]
    pub fn with_query(mut self, query: impl Into<TensorView<'a>>) -> Self {
        self.query = Some(query.into());
        self
    }

    /// Adds positions, cosines and sines.
    #[must_use]
    pub fn with_rotary(
        mut self,
        positions: impl Into<Positions<'a>>,
        cos: impl Into<TensorView<'a>>,
        sin: impl Into<TensorView<'a>>,
    ) -> Self {
        (self.positions, self.cos, self.sin) = (Some(positions.into()), Some(cos.into()), Some(sin.into()));
        self
    }

    /// Adds the weights of the norm of the key.
    #[must_use]
    pub fn with_key_norm(mut self, weights: impl Into<TensorView<'a>>) -> Self {
        self.key_norm = Some(weights.into());
        self
    }

    /// Adds the weights of the norm of the query.
    #[must_use]
    pub fn with_query_norm(mut self, weights: impl Into<TensorView<'a>>) -> Self {
        self.query_norm = Some(weights.into());
        self
    }
}

/// Place of the value cache.
#[derive(Debug, PartialEq, Eq)]
pub enum ValueCache<'a> {
    /// Memory of its own.
    Separate(TensorViewMut<'a>),
    /// The memory of the key cache, so many elements past its beginning: K and V interleaved.
    InKeyCache {
        /// Elements from the first of the key cache to the first of the value cache.
        offset: usize,
    },
}

impl ValueCache<'_> {
    /// The value cache, to be read; empty where it begins past the end of the key cache.
    pub fn view<'a>(&'a self, key_cache: &'a TensorViewMut<'_>) -> TensorView<'a> {
        match self {
            Self::Separate(cache) => cache.as_view(),
            Self::InKeyCache { offset } => {
                let memory = key_cache.as_view();
                let start = offset.saturating_mul(memory.dtype.size_bytes()).min(memory.data.len());
                TensorView { data: &memory.data[start..], ..memory }
            }
        }
    }
}

/// Everything that an append writes.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct AppendOutputs<'a> {
    /// The key cache.
    pub key_cache: TensorViewMut<'a>,
    /// The value cache.
    pub value_cache: ValueCache<'a>,
    /// The query output; it is read first where the inputs have no query.
    pub query: Option<TensorViewMut<'a>>,
    /// The scales of keys, where they are computed.
    pub k_scale: Option<ScaleViewMut<'a>>,
    /// The scales of values, where they are computed.
    pub v_scale: Option<ScaleViewMut<'a>>,
}

impl<'a> AppendOutputs<'a> {
    /// Two caches.
    pub fn new(key_cache: impl Into<TensorViewMut<'a>>, value_cache: impl Into<TensorViewMut<'a>>) -> Self {
        Self::of(key_cache.into(), ValueCache::Separate(value_cache.into()))
    }

    /// One memory for both caches: values begin `offset` elements past the first key.
    pub fn interleaved(cache: impl Into<TensorViewMut<'a>>, offset: usize) -> Self {
        Self::of(cache.into(), ValueCache::InKeyCache { offset })
    }

    const fn of(key_cache: TensorViewMut<'a>, value_cache: ValueCache<'a>) -> Self {
        Self { key_cache, value_cache, query: None, k_scale: None, v_scale: None }
    }

    /// Adds the scales of keys, to be written.
    #[must_use]
    pub fn with_k_scale(mut self, scale: ScaleViewMut<'a>) -> Self {
        self.k_scale = Some(scale);
        self
    }

    /// Adds the scales of values, to be written.
    #[must_use]
    pub fn with_v_scale(mut self, scale: ScaleViewMut<'a>) -> Self {
        self.v_scale = Some(scale);
        self
    }

    /// Adds the query output.
    #[must_use]
    pub fn with_query(mut self, query: impl Into<TensorViewMut<'a>>) -> Self {
        self.query = Some(query.into());
        self
    }
}

/// A list of mistakes that grows.
pub(crate) struct Errors(pub(crate) Vec<TensorError>);

impl Errors {
    pub(crate) fn tensor(&mut self, tensor: &'static str, view: TensorView<'_>, dtype: DType, needed: Option<usize>) {
        if view.dtype != dtype {
            self.0.push(TensorError::DType { tensor, actual: view.dtype, expected: dtype });
        }
        let needed = needed.unwrap_or(usize::MAX);
        if view.len() < needed {
            self.0.push(TensorError::TooShort { tensor, actual: view.len(), needed });
        }
    }

    pub(crate) fn presence(&mut self, tensor: &'static str, needed: bool, given: bool) {
        match (needed, given) {
            (true, false) => self.0.push(TensorError::Missing { tensor }),
            (false, true) => self.0.push(TensorError::Unexpected { tensor }),
            _ => {}
        }
    }

    pub(crate) fn count(&mut self, tensor: &'static str, actual: usize, needed: usize) {
        if actual != needed {
            self.0.push(TensorError::WrongCount { tensor, actual, needed });
        }
    }
}

impl AppendProblem {
    /// Nothing, or every mistake in the problem, else in its tensors.
    pub fn validate_views(&self, inputs: &AppendInputs<'_>, outputs: &AppendOutputs<'_>) -> Result<(), Invalid> {
        self.validate()?;
        let mut errors = Errors(Vec::new());
        let dtype = self.dtype;
        let extent = |shape: Shape, strides: Strides| strides.extent(shape);
        let strides = self.strides;
        errors.tensor("key", inputs.key, dtype, extent(self.key_shape(), strides.key));
        errors.tensor("value", inputs.value, dtype, extent(self.value_shape(), strides.value));
        errors.count("slot_mapping", inputs.slot_mapping.len(), self.tokens);
        let key_cache = extent(self.key_cache_shape(), strides.key_cache);
        let value_cache = extent(self.value_cache_shape(), strides.value_cache);
        let cache_dtype = self.cache_dtype();
        errors.tensor("key_cache", outputs.key_cache.as_view(), cache_dtype, key_cache);
        match &outputs.value_cache {
            ValueCache::Separate(cache) => errors.tensor("value_cache", cache.as_view(), cache_dtype, value_cache),
            ValueCache::InKeyCache { offset } => {
                let end = value_cache.and_then(|elements| elements.checked_add(*offset));
                errors.tensor("value_cache", outputs.key_cache.as_view(), cache_dtype, end);
                if !self.is_interleaved_apart(*offset) {
                    errors.0.push(TensorError::Overlap { tensor: "value_cache", other: "key_cache", offset: *offset });
                }
            }
        }
        let has_query = self.query_heads > 0;
        errors.presence("query_output", has_query, outputs.query.is_some());
        if let Some(query) = inputs.query {
            errors.presence("query", has_query, true);
            errors.tensor("query", query, dtype, extent(self.query_shape(), strides.query));
        }
        if let Some(query) = &outputs.query {
            errors.tensor("query_output", query.as_view(), dtype, extent(self.query_shape(), strides.query_output));
        }
        errors.presence("positions", self.rotary.is_some(), inputs.positions.is_some());
        if let (Some(rotary), Some(positions)) = (self.rotary, inputs.positions) {
            errors.count("positions", positions.len(), self.tokens);
            if positions.position_type() != rotary.positions {
                errors.0.push(TensorError::PositionType { expected: rotary.positions });
            }
        }
        for (tensor, table) in [("cos", inputs.cos), ("sin", inputs.sin)] {
            errors.presence(tensor, self.rotary.is_some(), table.is_some());
            if let (Some(rotary), Some(table)) = (self.rotary, table) {
                errors.tensor(tensor, table, self.table_dtype(), rotary.table_extent());
            }
        }
        let norms = [
            ("query_norm", inputs.query_norm, self.qk_norm.is_some() && has_query),
            ("key_norm", inputs.key_norm, self.qk_norm.is_some()),
        ];
        for (tensor, weights, needed) in norms {
            errors.presence(tensor, needed, weights.is_some());
            if let (true, Some(weights)) = (needed, weights) {
                errors.tensor(tensor, weights, dtype, Some(self.head_dim));
            }
        }
        self.check_scales(inputs, outputs, &mut errors.0);
        if errors.0.is_empty() {
            errors.0.extend(self.token_errors(inputs.slot_mapping, inputs.positions).next());
        }
        if errors.0.is_empty() { Ok(()) } else { Err(errors.0.into()) }
    }

    /// Slots that are neither in the cache nor -1, and positions that the rotary tables have no row for, of as many tokens
    /// as there are slots.
    pub fn token_errors(
        &self,
        slot_mapping: &[i64],
        positions: Option<Positions<'_>>,
    ) -> impl Iterator<Item = TensorError> {
        slot_mapping.iter().enumerate().filter_map(move |(token, &slot)| {
            if slot != -1 && self.place(slot).is_none() {
                return Some(TensorError::Slot { token, slot, slots: self.slots() });
            }
            // A token that is skipped has no key to rotate.
            let (rotary, positions) = self.rotary.zip(positions).filter(|_| slot != -1 || self.query_heads > 0)?;
            let position = positions.get(token);
            (rotary.clamp(position) as i64 != position).then(|| rotary.outside("token", token, position))
        })
    }

    /// True if no row of the value cache, beginning `offset` elements past the key cache, overlaps a row of that one, as
    /// far as that can be decided cheaply: past its end, beside each of its rows with the same strides, or beside each of
    /// its pages.
    pub fn is_interleaved_apart(&self, offset: usize) -> bool {
        let key = self.strides.key_cache.extent(self.key_cache_shape()).unwrap_or(usize::MAX);
        if offset >= key {
            return true;
        }
        let page = |shape: Shape, strides: Strides| strides.extent(Shape { batch: 1, ..shape }).unwrap_or(usize::MAX);
        let key_page = page(self.key_cache_shape(), self.strides.key_cache);
        let value_end = offset.saturating_add(page(self.value_cache_shape(), self.strides.value_cache));
        let page_stride = self.strides.key_cache.batch;
        if offset >= key_page && page_stride == self.strides.value_cache.batch && value_end <= page_stride {
            return true;
        }
        // K and V of one row as one row that is wider.
        let together = Shape { columns: offset.saturating_add(self.value_dim), ..self.key_cache_shape() };
        offset >= self.head_dim
            && self.strides.key_cache == self.strides.value_cache
            && self.strides.key_cache.is_disjoint(together)
    }
}
