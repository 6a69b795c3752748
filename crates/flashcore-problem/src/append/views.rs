//! The numbers of an append, borrowed.

use super::{AppendProblem, PositionType, Rotary};
use crate::{
    DType, ElementType, Extent, InputViews, Invalid, Operand, OutputViews, PositionNumbers, Row, Shape, Slot, Strides,
    TensorError, TensorView, TensorViewMut,
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
    /// The operands of an append.
    pub const OPERANDS: &'static [Row<Self>] = &[
        Row::tensor(
            Operand::Query,
            |problem: &Self| problem.dtype.into(),
            |problem| (problem.query_shape(), problem.strides.query),
        )
        .when(Self::has_query)
        .optional(),
        Row::tensor(
            Operand::NewKey,
            |problem: &Self| problem.dtype.into(),
            |problem| (problem.key_shape(), problem.strides.key),
        ),
        Row::tensor(
            Operand::NewValue,
            |problem: &Self| problem.dtype.into(),
            |problem| (problem.value_shape(), problem.strides.value),
        ),
        Row::vector(Operand::SlotMapping, |_| ElementType::I64, |problem: &Self| problem.tokens),
        Row::vector(Operand::Positions, Self::position_element, |problem| problem.tokens).when(Self::has_rotary),
        Row::at_least(Operand::Cos, |problem: &Self| problem.table_dtype().into(), Self::table_extent)
            .when(Self::has_rotary),
        Row::at_least(Operand::Sin, |problem: &Self| problem.table_dtype().into(), Self::table_extent)
            .when(Self::has_rotary),
        Row::at_least(Operand::QueryNorm, |problem: &Self| problem.dtype.into(), |problem| Some(problem.head_dim))
            .when(|problem| problem.qk_norm.is_some() && problem.has_query()),
        Row::at_least(Operand::KeyNorm, |problem: &Self| problem.dtype.into(), |problem| Some(problem.head_dim))
            .when(|problem| problem.qk_norm.is_some()),
        Row::tensor(
            Operand::KeyCache,
            |problem: &Self| problem.cache_dtype().into(),
            |problem| (problem.key_cache_shape(), problem.strides.key_cache),
        ),
        Row::tensor(
            Operand::ValueCache,
            |problem: &Self| problem.cache_dtype().into(),
            |problem| (problem.value_cache_shape(), problem.strides.value_cache),
        ),
        Row::tensor(
            Operand::QueryOutput,
            |problem: &Self| problem.dtype.into(),
            |problem| (problem.query_shape(), problem.strides.query_output),
        )
        .when(Self::has_query),
        Row::new(
            Operand::KScale,
            Extent::Strided(|problem: &Self, strides| strides.scales[1].extent_of_cache(problem.key_cache_shape())),
        )
        .when(|problem| problem.k_scale)
        .written_if(|problem| problem.compute_scales),
        Row::new(
            Operand::VScale,
            Extent::Strided(|problem: &Self, strides| strides.scales[2].extent_of_cache(problem.key_cache_shape())),
        )
        .when(|problem| problem.v_scale)
        .written_if(|problem| problem.compute_scales),
    ];

    fn has_query(&self) -> bool {
        self.query_heads > 0
    }

    fn has_rotary(&self) -> bool {
        self.rotary.is_some()
    }

    fn position_element(&self) -> ElementType {
        self.rotary.map_or(PositionType::I64, |rotary| rotary.positions).into()
    }

    fn table_extent(&self) -> Option<usize> {
        self.rotary.map_or(Some(0), Rotary::table_extent)
    }

    /// Nothing, or every mistake in the problem, else in its tensors.
    pub fn validate_views(&self, inputs: &InputViews<'_>, outputs: &OutputViews<'_>) -> Result<(), Invalid> {
        self.validate()?;
        let mut errors = Vec::new();
        inputs.check_rows(Self::OPERANDS, self, &mut errors);
        outputs.check_rows(Self::OPERANDS, self, &mut errors);
        if let Some(offset) = outputs.value_offset.filter(|&offset| !self.is_interleaved_apart(offset)) {
            errors.push(TensorError::Overlap { tensor: "value_cache", other: "key_cache", offset });
        }
        self.check_scales(inputs, outputs, &mut errors);
        if errors.is_empty() {
            let slots = inputs.slot_mapping.unwrap_or_default();
            errors.extend(self.token_errors(slots, inputs.positions).next());
        }
        Invalid::unless_empty(errors)
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
