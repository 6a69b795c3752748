//! Scales of 8-bit tensors: the numbers that codes are multiplied by (`descale` of `FlashAttention-3`).
//!
//! A scale is a tensor of `f32` with a stride for everything it may depend on, 0 where it does not:
//!
//! | scale | strides that are not 0 |
//! |---|---|
//! | one of the tensor | none |
//! | one per KV head | `key_head` |
//! | one per sequence and KV head, `[batch, kv_head]` (`FlashAttention-3`) | `sequence`, `key_head` |
//! | one per token and head, `[batch or page, row, head]` like the tensor itself | `batch`, `row`, `key_head`, and of the query `query_head` |
//!
//! Every scale of a row that takes part must be finite and above 0; those of rows that no query attends may be anything,
//! like the rows. Zero is refused rather than defined: a block of zeros has codes of zero under any scale, and a scale of
//! zero that was never written would hide that silently.

use crate::{BiasStrides, InputViews, Operand, Problem, Sequence, Shape, SplitMix64, Strides, TensorError};

/// The scale of a tensor of 8 bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Scale {
    /// The numbers.
    pub data: Vec<f32>,
    /// Where they lie.
    pub strides: ScaleStrides,
}

/// The scale of a tensor of 8 bits, borrowed. See [`Scale`] for an owned one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleView<'a> {
    /// The numbers.
    pub data: &'a [f32],
    /// Where they lie.
    pub strides: ScaleStrides,
}

/// The scale of a tensor of 8 bits, borrowed to be written: by an append that computes the scales of its rows.
#[derive(Debug, PartialEq)]
pub struct ScaleViewMut<'a> {
    /// The numbers.
    pub data: &'a mut [f32],
    /// Where they lie.
    pub strides: ScaleStrides,
}

/// Distances in elements between neighbours of each dimension of a scale; 0 repeats one element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScaleStrides {
    /// From one sequence of the batch to the next, wherever its rows lie.
    pub sequence: usize,
    /// From one batch of the tensor to the next; of a paged cache, from one page to the next.
    pub batch: usize,
    /// From one row of the tensor to the next, in its batch or page.
    pub row: usize,
    /// From one KV head to the next.
    pub key_head: usize,
    /// From one query head to the next of those that share a KV head; not used for key and value.
    pub query_head: usize,
}

/// Strides that come with each call: of the bias, and of the scales in the order of [`Operand::SCALES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CallStrides {
    /// Of the bias.
    pub bias: BiasStrides,
    /// Of the scales.
    pub scales: [ScaleStrides; Operand::SCALES.len()],
}

impl CallStrides {
    /// All of them 0.
    pub const NONE: Self = Self {
        bias: BiasStrides { batch: 0, head: 0, row: 0, key: 0 },
        scales: [ScaleStrides::TENSOR; Operand::SCALES.len()],
    };
}

impl From<BiasStrides> for CallStrides {
    fn from(bias: BiasStrides) -> Self {
        Self { bias, ..Self::NONE }
    }
}

impl ScaleStrides {
    /// One scale of the whole tensor.
    pub const TENSOR: Self = Self { sequence: 0, batch: 0, row: 0, key_head: 0, query_head: 0 };
    /// One scale per KV head, contiguous.
    pub const KEY_HEAD: Self = Self { key_head: 1, ..Self::TENSOR };

    /// One scale per sequence and KV head, contiguous `[sequence, kv_head]`: the `descale` of `FlashAttention-3`.
    pub const fn per_sequence(problem: &Problem) -> Self {
        Self { sequence: problem.key_heads, ..Self::KEY_HEAD }
    }

    /// One scale per row and head, contiguous `[batch or page, row, head]`.
    pub fn per_token(scale: Operand, problem: &Problem) -> Self {
        let Shape { rows, heads, .. } = scaled_shape(scale, problem);
        let batch = rows.saturating_mul(heads);
        let group = heads.checked_div(problem.key_heads).unwrap_or(1);
        Self { sequence: 0, batch, row: heads, key_head: group, query_head: usize::from(heads > problem.key_heads) }
    }

    /// One scale per row and head of a cache, contiguous `[batch or page, row, head]`.
    pub const fn per_cache_row(cache: Shape) -> Self {
        let batch = cache.rows.saturating_mul(cache.heads);
        Self { batch, row: cache.heads, ..Self::KEY_HEAD }
    }

    /// Elements from the first to the last, both included, or `None` when the number does not fit.
    pub fn extent(self, scale: Operand, problem: &Problem) -> Option<usize> {
        self.extent_in(scaled_shape(scale, problem), problem.key_heads, problem.batch)
    }

    /// Elements from the first to the last of the scales of a cache by slot, which knows of no sequences.
    pub fn extent_of_cache(self, cache: Shape) -> Option<usize> {
        self.extent_in(cache, cache.heads, 1)
    }

    /// True if every row and head of a cache has a scale of its own, which can be written.
    pub(crate) fn is_per_token(self, cache: Shape) -> bool {
        let Self { sequence, batch, row, key_head: head, .. } = self;
        sequence == 0 && Strides { batch, head, row }.is_disjoint(Shape { columns: 1, ..cache })
    }

    fn extent_in(self, Shape { batch, rows, heads, .. }: Shape, key_heads: usize, sequences: usize) -> Option<usize> {
        let group = heads.checked_div(key_heads).unwrap_or(1);
        let sizes = [
            (self.sequence, sequences),
            (self.batch, batch),
            (self.row, rows),
            (self.key_head, key_heads),
            (self.query_head, group),
        ];
        if sizes.iter().any(|&(_, size)| size == 0) {
            return Some(0);
        }
        sizes.iter().try_fold(1_usize, |extent, &(stride, size)| extent.checked_add(stride.checked_mul(size - 1)?))
    }

    /// True if all rows of a head of a sequence share one scale.
    pub fn is_constant_in(self, problem: &Problem) -> bool {
        self.row == 0 && (self.batch == 0 || problem.paged.is_none())
    }

    /// The strides in the order of the fields.
    pub const fn to_array(self) -> [usize; 5] {
        let Self { sequence, batch, row, key_head, query_head } = self;
        [sequence, batch, row, key_head, query_head]
    }

    /// The index of the scale of a key or value: its place in the tensor is `(batch, row)`.
    pub const fn key_index(self, sequence: usize, (batch, row): (usize, usize), key_head: usize) -> usize {
        // Saturates; that of a scale that validated cannot overflow.
        let index = sequence.saturating_mul(self.sequence).saturating_add(batch.saturating_mul(self.batch));
        index.saturating_add(row.saturating_mul(self.row)).saturating_add(key_head.saturating_mul(self.key_head))
    }

    /// The index of the scale of a query row, whose head shares its KV head with `group` heads.
    pub const fn query_index(self, sequence: usize, place: (usize, usize), head: usize, group: usize) -> usize {
        let index = self.key_index(sequence, place, head / group);
        index.saturating_add((head % group).saturating_mul(self.query_head))
    }
}

impl ScaleViewMut<'_> {
    /// The same, to be read.
    pub const fn as_view(&self) -> ScaleView<'_> {
        ScaleView { data: self.data, strides: self.strides }
    }
}

/// The shape of the tensor that a scale belongs to.
fn scaled_shape(scale: Operand, problem: &Problem) -> Shape {
    match scale {
        Operand::QScale => problem.query_shape(),
        _ => problem.key_shape(),
    }
}

impl Scale {
    /// One scale of the whole tensor.
    pub fn of_tensor(scale: f32) -> Self {
        Self { data: vec![scale], strides: ScaleStrides::TENSOR }
    }

    /// The same, borrowed.
    pub fn view(&self) -> ScaleView<'_> {
        ScaleView { data: &self.data, strides: self.strides }
    }

    /// The same, to be written.
    pub fn view_mut(&mut self) -> ScaleViewMut<'_> {
        ScaleViewMut { data: &mut self.data, strides: self.strides }
    }

    /// Scales from 1/4 to 2 where they are used and NaN elsewhere, with strides of one of the forms of the table above.
    pub(crate) fn random(scale: Operand, problem: &Problem, inputs: &InputViews<'_>, random: &mut SplitMix64) -> Self {
        let strides = match random.below(5) {
            0 => ScaleStrides::TENSOR,
            1 => ScaleStrides::KEY_HEAD,
            2 => ScaleStrides::per_sequence(problem),
            _ => ScaleStrides::per_token(scale, problem),
        };
        let mut data = vec![f32::NAN; strides.extent(scale, problem).unwrap_or(0)];
        for index in used(scale, strides, problem, inputs) {
            data[index] = (random.uniform() * 3.0 - 2.0).exp2() as f32;
        }
        Self { data, strides }
    }
}

impl Scale {
    /// The indices of scales in use.
    pub(crate) fn used(
        scale: Operand,
        strides: ScaleStrides,
        problem: &Problem,
        inputs: &InputViews<'_>,
    ) -> Vec<usize> {
        used(scale, strides, problem, inputs).collect()
    }
}

impl<'a> ScaleView<'a> {
    /// One scale of the whole tensor.
    pub const fn of_tensor(scale: &'a [f32; 1]) -> Self {
        Self { data: scale, strides: ScaleStrides::TENSOR }
    }

    /// A copy in memory of its own.
    pub fn to_owned_scale(self) -> Scale {
        Scale { data: self.data.to_vec(), strides: self.strides }
    }

    /// The scale of a key or value of a sequence.
    ///
    /// # Panics
    ///
    /// When the sequence does not have the key, or the scale does not validate.
    pub fn of_key(self, sequence: &Sequence<'_>, key: usize, key_head: usize) -> f32 {
        self.data[self.strides.key_index(sequence.index, sequence.key_row(key), key_head)]
    }

    /// The scale of a query row of a sequence.
    ///
    /// # Panics
    ///
    /// When the sequence does not have the row, or the scale does not validate.
    pub fn of_query(self, problem: &Problem, sequence: &Sequence<'_>, row: usize, head: usize) -> f32 {
        let group = problem.query_heads / problem.key_heads;
        self.data[self.strides.query_index(sequence.index, sequence.query_row(row), head, group)]
    }

    /// Names the first scale in use that is zero, negative, infinite or NaN. Those that are `written` before they are used
    /// may be anything.
    pub(crate) fn check_numbers(
        self,
        scale: Operand,
        problem: &Problem,
        inputs: &InputViews<'_>,
        written: impl Fn(usize) -> bool,
        errors: &mut Vec<TensorError>,
    ) {
        let read = used(scale, self.strides, problem, inputs).filter(|&index| !written(index));
        self.check_positive(scale.name(), read, errors);
    }

    /// Names the first of some scales that is zero, negative, infinite or NaN.
    pub(crate) fn check_positive(
        self,
        tensor: &'static str,
        mut indices: impl Iterator<Item = usize>,
        errors: &mut Vec<TensorError>,
    ) {
        let is_wrong = |index: &usize| !(self.data[*index] > 0.0 && self.data[*index].is_finite());
        if let Some(index) = indices.find(is_wrong) {
            let value = self.data[index].to_string();
            errors.push(TensorError::ScaleNotPositive { tensor, index, value });
        }
    }
}

/// The indices of the scales of rows that take part, some of them several times.
fn used<'a>(
    scale: Operand,
    strides: ScaleStrides,
    problem: &'a Problem,
    inputs: &InputViews<'a>,
) -> impl Iterator<Item = usize> {
    let is_query = scale == Operand::QScale;
    let group = problem.query_heads / problem.key_heads;
    // Of what a scale does not depend on, the first says all.
    let first_if = |is_one: bool, count: usize| if is_one { count.min(1) } else { count };
    let heads = if is_query {
        first_if(strides.key_head == 0 && strides.query_head == 0, problem.query_heads)
    } else {
        first_if(strides.key_head == 0, problem.key_heads)
    };
    inputs.sequences(problem).flat_map(move |sequence| {
        let mut rows = if is_query {
            0..first_if(strides.row == 0, sequence.query_length)
        } else {
            let keys = sequence.attended_range(problem);
            keys.start..keys.start + first_if(strides.is_constant_in(problem), keys.len())
        };
        // Rows that follow one another: of a paged cache, those of one page.
        let runs = std::iter::from_fn(move || {
            let row = rows.next()?;
            let (place, count) = if is_query {
                (sequence.query_row(row), rows.len() + 1)
            } else {
                (sequence.key_row(row), sequence.contiguous_keys(row).min(rows.len() + 1))
            };
            rows.start = row + count;
            Some((place, count))
        });
        runs.flat_map(move |(place, count)| {
            (0..heads).flat_map(move |head| {
                let first = if is_query {
                    strides.query_index(sequence.index, place, head, group)
                } else {
                    strides.key_index(sequence.index, place, head)
                };
                (0..count).map(move |row| first + row * strides.row)
            })
        })
    })
}
