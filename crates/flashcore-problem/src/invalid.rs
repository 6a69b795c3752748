//! Errors of a problem, or of the tensors given for it.

use crate::expression::MOST_STEPS;
use crate::{DType, DTypes, Shape};
use std::fmt;

/// A length or an offset in words. One past the largest of 32 signed bits was most likely written as a negative one.
fn signed(value: u32) -> String {
    match i32::try_from(value) {
        Ok(value) => value.to_string(),
        Err(_) => format!("{} ({value} without its sign)", value.cast_signed()),
    }
}

/// One mistake in a [`Problem`](crate::Problem).
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// Sizes of tensors that must be the same are not.
    #[error("{argument} is {actual}; it must be {expected}")]
    ShapesDiffer {
        /// The size.
        argument: &'static str,
        /// The size as given.
        actual: usize,
        /// The value that the other tensors ask for.
        expected: usize,
    },
    /// A size that must be at least one is zero.
    #[error("{argument} is 0; it must be at least 1")]
    Zero {
        /// The field.
        argument: &'static str,
    },
    /// The query heads are not a multiple of the key heads (GQA).
    #[error("query_heads is {query_heads} and key_heads is {key_heads}; query_heads must be a multiple of key_heads")]
    HeadsNotMultiple {
        /// Heads of the query.
        query_heads: usize,
        /// Heads of key and value.
        key_heads: usize,
    },
    /// A length beyond `isize::MAX`.
    #[error("{argument} is {length}; it may be at most {}", isize::MAX)]
    LengthTooLarge {
        /// The field.
        argument: &'static str,
        /// The value.
        length: usize,
    },
    /// The scale is infinite or NaN.
    #[error("scale is {scale}; it must be finite, usually 1 / sqrt(head_dim)")]
    ScaleNotFinite {
        /// The scale.
        scale: f64,
    },
    /// The scale is infinite or zero in the type that the problem is computed in.
    #[error(
        "scale is {scale:e}; {dtype} is computed in f32, where it must be 0 or have a magnitude between {:e} and {:e}, \
         usually 1 / sqrt(head_dim)",
        f32::from_bits(1),
        f32::MAX
    )]
    ScaleOutOfRange {
        /// The scale.
        scale: f64,
        /// The element type of the problem.
        dtype: DType,
    },
    /// Types of query, key and value, and output that no backend has together.
    #[error(
        "dtype, kv_dtype and out_dtype are {}, {} and {}; key and value may be e4m3 or e5m2 with a query of f16, bf16 \
         or f32 and an output of the same, or with a query of e4m3 and an output of f16 or bf16",
        types.query, types.key_value, types.output
    )]
    DTypes {
        /// The types.
        types: DTypes,
    },
    /// A query, key and value that lie side by side are of different types.
    #[error(
        "layout is packed query-key-value, the query is {} and key and value are {}; they must have one type, or use \
         another layout", types.query, types.key_value
    )]
    PackedDTypesDiffer {
        /// The types.
        types: DTypes,
    },
    /// A scale of a tensor that is not of 8 bits.
    #[error("{argument} is on and its tensor is {dtype}; scales are for e4m3 and e5m2")]
    ScaleOfWideType {
        /// The scale.
        argument: &'static str,
        /// The type of the tensor.
        dtype: DType,
    },
    /// The softcap is zero, negative, infinite or NaN.
    #[error("softcap is {softcap}; it must be finite and above 0, or None for no softcap")]
    SoftcapNotPositive {
        /// The softcap.
        softcap: f32,
    },
    /// An expression has more steps than kernels support.
    #[error(
        "{argument} has {steps} steps; at most {} are supported: precompute what does not change and read it from a table",
        MOST_STEPS
    )]
    ExpressionTooLong {
        /// The field.
        argument: &'static str,
        /// The number of steps.
        steps: usize,
    },
    /// An expression reads a table that the problem does not have.
    #[error("{argument} reads the {table}, which is 0; give it the number of its entries")]
    TableMissing {
        /// The expression.
        argument: &'static str,
        /// The table.
        table: &'static str,
    },
    /// A table beyond 32-bit indices.
    #[error("{argument} is {entries}; it may be at most {}", i32::MAX)]
    TableTooLarge {
        /// The table.
        argument: &'static str,
        /// The number of entries.
        entries: usize,
    },
    /// A window with no limit on either side.
    #[error("mask is a window with neither a left nor a right limit; give one of them, or use Mask::None")]
    WindowWithoutLimits,
    /// Packed query, key and value must have the same rows.
    #[error(
        "layout is packed query-key-value, query_length is {query_length} and key_length is {key_length}; they must be \
         equal, or use another layout"
    )]
    PackedLengthsDiffer {
        /// Rows of the query.
        query_length: usize,
        /// Rows of key and value.
        key_length: usize,
    },
    /// A row of the page table has no room for the longest sequence.
    #[error(
        "a row of the page table has {table_width} pages of {page_size} rows; key_length is {key_length}, which needs \
         {} pages", key_length.div_ceil((*page_size).max(1))
    )]
    TableTooNarrow {
        /// Bound on the keys of a sequence.
        key_length: usize,
        /// Entries of a row of the page table.
        table_width: usize,
        /// Rows of a page.
        page_size: usize,
    },
    /// Rows of the page table overlap.
    #[error("table_stride is {table_stride}; it must be at least table_width, which is {table_width}")]
    TableOverlaps {
        /// Entries from one row of the page table to the next.
        table_stride: usize,
        /// Entries of a row.
        table_width: usize,
    },
    /// Packed keys exclude a cache that has batches or pages.
    #[error("total_k (cu_seqlens_k) and {other} are both given; keys are packed, or they lie in a cache")]
    PackedKeysWith {
        /// The other.
        other: &'static str,
    },
    /// Neighbours of one dimension would share some of their columns.
    #[error(
        "the {dimension} stride of {tensor} is {stride}; it must be 0 (broadcast) or at least {columns}, its columns"
    )]
    StrideTooSmall {
        /// The tensor.
        tensor: &'static str,
        /// The dimension.
        dimension: &'static str,
        /// The stride.
        stride: usize,
        /// Columns of the tensor.
        columns: usize,
    },
    /// Two elements of the output share an address.
    #[error("the output strides (batch {batch}, head {head}, row {row}) let elements of {shape} overlap")]
    OutputOverlaps {
        /// Stride between batches.
        batch: usize,
        /// Stride between heads.
        head: usize,
        /// Stride between rows.
        row: usize,
        /// Shape of the output.
        shape: Shape,
    },
    /// A value that an operation does not take, or not with another argument.
    #[error("{argument} is {value}; it must be {allowed}")]
    OutOfRange {
        /// The field.
        argument: &'static str,
        /// The value.
        value: String,
        /// Values that are taken.
        allowed: String,
    },
    /// The tensor does not fit in the address space.
    #[error("{tensor} of {shape} spans more than {} bytes", isize::MAX)]
    TooLarge {
        /// The tensor.
        tensor: &'static str,
        /// The shape.
        shape: Shape,
    },
}

/// One mistake in the tensors given for a problem.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The tensor has another element type than the problem says.
    #[error("{tensor} is {actual}; the problem's dtype is {expected}")]
    DType {
        /// The tensor.
        tensor: &'static str,
        /// The type given.
        actual: DType,
        /// The type of the problem.
        expected: DType,
    },
    /// The tensor ends before its last element.
    #[error("{tensor} has {actual} elements; its shape and strides need {needed}")]
    TooShort {
        /// The tensor.
        tensor: &'static str,
        /// Elements given.
        actual: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A scale that is zero, negative, infinite or NaN.
    #[error("{tensor}[{index}] is {value}; scales must be finite and above 0")]
    ScaleNotPositive {
        /// The scale.
        tensor: &'static str,
        /// The index of the number in its memory.
        index: usize,
        /// The number.
        value: String,
    },
    /// Scales of an append that do not lie where it can find them.
    #[error("the strides of {tensor} are (sequence {sequence}, page {batch}, row {row}, head {head}); {allowed}")]
    ScaleStrides {
        /// The scale.
        tensor: &'static str,
        /// Stride from sequence to sequence.
        sequence: usize,
        /// Stride from page to page, or from batch to batch.
        batch: usize,
        /// Stride from row to row.
        row: usize,
        /// Stride from head to head.
        head: usize,
        /// The rule, in words.
        allowed: &'static str,
    },
    /// A list has the wrong number of entries.
    #[error("{tensor} has {actual} entries; the problem needs {needed}")]
    WrongCount {
        /// The tensor.
        tensor: &'static str,
        /// Entries given.
        actual: usize,
        /// Entries needed.
        needed: usize,
    },
    /// The tensor of a feature that the problem has on is missing.
    #[error("{tensor} is missing; the problem has it switched on")]
    Missing {
        /// The tensor.
        tensor: &'static str,
    },
    /// A tensor was given that the problem does not use.
    #[error("{tensor} was given; the problem has it switched off")]
    Unexpected {
        /// The tensor.
        tensor: &'static str,
    },
    /// Two tensors that lie in one memory overlap, or may.
    #[error(
        "{tensor} begins {offset} elements into {other}; it must lie beside each of its rows, with the same strides, or \
         past its end"
    )]
    Overlap {
        /// The tensor.
        tensor: &'static str,
        /// The other tensor.
        other: &'static str,
        /// Elements from the beginning of the other to that of this one.
        offset: usize,
    },
    /// Positions are of another integer type.
    #[error("positions have another integer type; the problem's is {expected:?}")]
    PositionType {
        /// The type of the problem.
        expected: crate::PositionType,
    },
    /// A position that the rotary tables have no row for.
    #[error(
        "{of} {index} is at position {position}; cos and sin have {max_position} rows (max_position), for positions from \
         0 on: make them longer"
    )]
    Position {
        /// Token or sequence.
        of: &'static str,
        /// The token or sequence.
        index: usize,
        /// Position of the token, or the last position of the sequence.
        position: i64,
        /// Rows of the tables.
        max_position: usize,
    },
    /// A batch has more keys than `key_length`.
    #[error(
        "the key length of batch {batch} is {}; it may be at most key_length, which is {key_length}", signed(*length)
    )]
    KeyLength {
        /// The batch.
        batch: usize,
        /// The key length of the batch.
        length: u32,
        /// Rows of key and value.
        key_length: usize,
    },
    /// A sequence has no room for its new keys.
    #[error(
        "sequence {sequence} uses {} rows of the cache and gets {new} more; key_length is {key_length}: plan for longer \
         sequences, or append less", u32::try_from(*length).map_or_else(|_| length.to_string(), signed)
    )]
    CacheFull {
        /// The sequence.
        sequence: usize,
        /// Rows that it uses before the append.
        length: usize,
        /// New keys.
        new: usize,
        /// Rows that a sequence may use.
        key_length: usize,
    },
    /// Two new keys go to one row of the cache.
    #[error(
        "sequences {other} and {sequence} both append to row {row} of page (or batch) {page}; rows that are appended must \
         belong to one sequence"
    )]
    SameRow {
        /// The sequence.
        sequence: usize,
        /// The other sequence.
        other: usize,
        /// The page, or the batch of the cache.
        page: usize,
        /// The row in it.
        row: usize,
    },
    /// The offsets of packed sequences do not begin with 0.
    #[error("{tensor} begins with {}; it must begin with 0", signed(*first))]
    FirstOffset {
        /// The tensor.
        tensor: &'static str,
        /// First entry of the tensor.
        first: u32,
    },
    /// The offsets of packed sequences fall.
    #[error(
        "{tensor} falls from {} to {} at sequence {sequence}; each sequence must begin where the last ended",
        signed(*begin), signed(*end)
    )]
    OffsetsFall {
        /// The tensor.
        tensor: &'static str,
        /// The sequence.
        sequence: usize,
        /// Where it begins.
        begin: u32,
        /// Where it ends.
        end: u32,
    },
    /// A number of a sequence is beyond its bound.
    #[error("{tensor} of sequence {sequence} is {}; it may be at most {most}, {bound}", signed(*value))]
    BeyondBound {
        /// The tensor.
        tensor: &'static str,
        /// The sequence.
        sequence: usize,
        /// The number.
        value: u32,
        /// The largest number allowed.
        most: usize,
        /// The bound in words.
        bound: &'static str,
    },
    /// A page that a sequence uses is not in the cache.
    #[error("entry {entry} of the page table of sequence {sequence} is {page}; the cache has {num_pages} pages")]
    Page {
        /// The sequence.
        sequence: usize,
        /// The entry in its row.
        entry: usize,
        /// The entry's value.
        page: i32,
        /// Pages of the cache.
        num_pages: usize,
    },
    /// A slot of an append that is neither in the cache nor -1.
    #[error("the slot of token {token} is {slot}; the cache has {slots} slots, and -1 skips a token")]
    Slot {
        /// The token.
        token: usize,
        /// Slot that the token was given.
        slot: i64,
        /// Slots of the cache.
        slots: usize,
    },
    /// Two tokens of an append have one slot.
    #[error("tokens {} and {} both have slot {slot}; each must have its own, or -1", tokens.0, tokens.1)]
    SlotTwice {
        /// The slot.
        slot: i64,
        /// The tokens.
        tokens: (usize, usize),
    },
}

/// The reason why a problem cannot be computed: all mistakes in it, or in its tensors.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Invalid {
    /// The problem itself.
    #[error("{}", listed(.0))]
    Problem(Vec<ProblemError>),
    /// The tensors of a valid problem.
    #[error("{}", listed(.0))]
    Tensors(Vec<TensorError>),
}

fn listed(errors: &[impl fmt::Display]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl Invalid {
    /// Nothing, or an error of all of `errors`.
    pub(crate) fn unless_empty<E>(errors: Vec<E>) -> Result<(), Self>
    where
        Self: From<Vec<E>>,
    {
        if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
    }
}

impl From<Vec<ProblemError>> for Invalid {
    fn from(errors: Vec<ProblemError>) -> Self {
        Self::Problem(errors)
    }
}

impl From<Vec<TensorError>> for Invalid {
    fn from(errors: Vec<TensorError>) -> Self {
        Self::Tensors(errors)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} batches, {} heads, {} rows and {} columns",
            self.batch, self.heads, self.rows, self.columns
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_were_negative_are_told_so() {
        for (value, text) in [
            (0, "cu_seqlens_q begins with 0; it must begin with 0"),
            (0x7fff_ffff, "cu_seqlens_q begins with 2147483647; it must begin with 0"),
            (0xffff_fffb, "cu_seqlens_q begins with -5 (4294967291 without its sign); it must begin with 0"),
        ] {
            assert_eq!(TensorError::FirstOffset { tensor: "cu_seqlens_q", first: value }.to_string(), text);
        }
    }
}
