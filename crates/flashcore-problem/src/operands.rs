//! The table of operands: every tensor that an operation reads or writes, one row each.
//!
//! The rows of [`operands!`](crate::operands!) are what Rust needs names for: the variant of [`Operand`], the field and the
//! setter of [`InputViews`](crate::InputViews), [`OutputViews`](crate::OutputViews), [`Inputs`](crate::Inputs) and
//! [`Outputs`](crate::Outputs), the field of the device tensors. What an operation makes of an operand is data: a
//! [`Row`](crate::Row) with its presence, access, element type, extent and random numbers, in a constant such as
//! [`Problem::OPERANDS`]. Code that treats all operands alike loops over rows. `docs/add-an-operand.md` goes through it.

use crate::{Problem, Row};

/// Hands the table of operands to the macro of this name.
///
/// A row: name, variant, setter, and what the views hold, among the inputs (`reads`) or the outputs (`writes`); `or writes`
/// where an operation may compute an input instead. The kinds: `Tensor` (any element type), `Tensors` (a list of them),
/// `Bias` and `Scale` (`f32` with strides that come with each call), `Positions` (`i32` or `i64`), or the element type of
/// a contiguous vector. The operands of attention come first, its scales last of those.
#[macro_export]
macro_rules! operands {
    ($callback:ident) => {
        $callback! {
            /// The query, `query_heads` by `query_length` by `head_dim`. An append without it transforms the query output.
            query: Query, with_query, reads Tensor;
            /// The key, `key_heads` by `key_length` by `head_dim`.
            key: Key, with_key, reads Tensor;
            /// The value, `key_heads` by `key_length` by `value_dim`.
            value: Value, with_value, reads Tensor;
            /// The output, `query_heads` by `query_length` by `value_dim`.
            output: Output, with_output, writes Tensor;
            /// The log-sum-exp (LSE) of each row, contiguous `[batch, query head, query row]`; with `cu_seqlens_q`,
            /// `[query head, row of all sequences]`.
            lse: Lse, with_lse, writes f32;
            /// Where the query rows of each sequence begin among those of all, and where the last ends (varlen).
            cu_seqlens_q: CuSeqlensQ, with_cu_seqlens_q, reads u32;
            /// Where the keys of each sequence begin among those of all, and where the last ends (varlen).
            cu_seqlens_k: CuSeqlensK, with_cu_seqlens_k, reads u32;
            /// Query rows of each sequence; the rows after them are neither read nor written.
            seqused_q: SequsedQ, with_seqused_q, reads u32;
            /// Keys of each sequence, at most `key_length`; for attention with an append, those before it
            /// (`cache_seqlens`).
            seqused_k: SequsedK, with_seqused_k, reads u32;
            /// Keys at the beginning of each sequence that are padding. They count in `seqused_k`.
            leftpad_k: LeftpadK, with_leftpad_k, reads u32;
            /// The batch of the KV cache, or the row of the page table, of each sequence.
            kv_batch_idx: KvBatchIdx, with_kv_batch_idx, reads u32;
            /// The pages of each sequence. Entries past its last key may hold anything.
            page_table: PageTable, with_page_table, reads i32;
            /// One slope per query head.
            alibi_slopes: AlibiSlopes, with_alibi_slopes, reads f32;
            /// One sink per query head.
            sinks: Sinks, with_sinks, reads f32;
            /// The floats that `score_mod` and `mask_mod` read.
            aux_f32: AuxF32, with_aux_f32, reads f32;
            /// The integers that `score_mod` and `mask_mod` read.
            aux_i32: AuxI32, with_aux_i32, reads i32;
            /// The bias that is added to the scores.
            bias: Bias, with_bias, reads Bias;
            /// The scale of an FP8 query: the number that its codes are multiplied by (`q_descale`).
            q_scale: QScale, with_q_scale, reads Scale;
            /// The scale of an FP8 key: the number that its codes are multiplied by (`k_descale`).
            k_scale: KScale, with_k_scale, reads Scale, or writes Scale;
            /// The scale of an FP8 value: the number that its codes are multiplied by (`v_descale`).
            v_scale: VScale, with_v_scale, reads Scale, or writes Scale;
            /// The keys that are appended.
            new_key: NewKey, with_new_key, reads Tensor;
            /// The values that are appended.
            new_value: NewValue, with_new_value, reads Tensor;
            /// The slot of each new key and value: page times page size plus row. -1 skips it.
            slot_mapping: SlotMapping, with_slot_mapping, reads i64;
            /// The position of each token, for the rotary embedding.
            positions: Positions, with_positions, reads Positions;
            /// Where the new keys of each sequence begin among those of all, and where the last ends.
            cu_seqlens_k_new: CuSeqlensKNew, with_cu_seqlens_k_new, reads u32;
            /// The position at which each sequence starts, instead of its keys before the append.
            rotary_seqlens: RotarySeqlens, with_rotary_seqlens, reads u32;
            /// Cosines of the rotary embedding, `[max_position, dim / 2]`.
            cos: Cos, with_cos, reads Tensor;
            /// Sines of the rotary embedding, `[max_position, dim / 2]`.
            sin: Sin, with_sin, reads Tensor;
            /// Weights of the norm of the query, one for each column.
            query_norm: QueryNorm, with_query_norm, reads Tensor;
            /// Weights of the norm of the new keys, one for each column.
            key_norm: KeyNorm, with_key_norm, reads Tensor;
            /// The key cache, which new keys are written to.
            key_cache: KeyCache, with_key_cache, writes Tensor;
            /// The value cache, which new values are written to.
            value_cache: ValueCache, with_value_cache, writes Tensor;
            /// The query after norm and rotary embedding; where no query is given, before it too.
            query_output: QueryOutput, with_query_output, writes Tensor;
            /// The outputs of partial results, in the order in which they are merged.
            part_outputs: PartOutputs, with_part_outputs, reads Tensors;
            /// The log-sum-exp of partial results, `f32`.
            part_lses: PartLses, with_part_lses, reads Tensors;
        }
    };
}

/// Direction of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Kernels read it.
    Read,
    /// Kernels write it.
    Write,
}

macro_rules! access {
    (reads $kind:ident) => {
        Access::Read
    };
    (writes $kind:ident) => {
        Access::Write
    };
}

macro_rules! define_operand {
    ($($(#[doc = $doc:literal])* $name:ident: $Name:ident, $with:ident,
        $(reads $in:ident)? $(writes $out:ident)? $(, or writes $computed:ident)?;)*) => {
        /// An operand: a tensor that an operation reads or writes.
        ///
        /// The discriminant is its index among the operands.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Operand {
            $($(#[doc = $doc])* $Name,)*
        }

        impl Operand {
            /// Every operand, in the order of the table.
            pub const ALL: &'static [Self] = &[$(Self::$Name,)*];
            /// Number of operands.
            pub const COUNT: usize = Self::ALL.len();

            /// Name of the field that has it, in every struct and message.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$Name => stringify!($name),)*
                }
            }

            /// Its description, as text.
            pub const fn doc(self) -> &'static str {
                match self {
                    $(Self::$Name => concat!($($doc),*),)*
                }
            }

            /// Access of kernels, unless an operation computes what is read elsewhere.
            pub const fn access(self) -> Access {
                match self {
                    $(Self::$Name => [$(access!(reads $in),)? $(access!(writes $out),)?][0],)*
                }
            }
        }
    };
}

operands!(define_operand);

impl Operand {
    /// The scales of 8-bit tensors, which are the last operands of attention.
    pub const SCALES: [Self; 3] = [Self::QScale, Self::KScale, Self::VScale];
    /// Number of the operands of attention whose addresses are parameters of every attention kernel: all but the scales.
    pub const PARAMETERS: usize = Self::QScale as usize;

    /// Index among [`Operand::SCALES`]; `None` for operands that are no scale.
    pub const fn scale_index(self) -> Option<usize> {
        if self.is_scale() { Some(self as usize - Self::PARAMETERS) } else { None }
    }

    /// Its name among the outputs, in messages.
    pub const fn output_name(self) -> &'static str {
        match self {
            Self::KScale => "k_scale of the outputs",
            Self::VScale => "v_scale of the outputs",
            other => other.name(),
        }
    }

    /// True for the scales of 8-bit tensors.
    pub const fn is_scale(self) -> bool {
        matches!(self, Self::QScale | Self::KScale | Self::VScale)
    }

    /// True if it changes scores. A new operand of attention does, until it is listed here as one that does not: a kernel
    /// for plain scores is then never chosen by mistake. The tables of expressions change what the expressions do with them.
    pub const fn is_score_term(self) -> bool {
        (self as usize) < Problem::OPERANDS.len()
            && !self.is_of_sequences()
            && !matches!(
                self,
                Self::Query
                    | Self::Key
                    | Self::Value
                    | Self::Output
                    | Self::Lse
                    | Self::Sinks
                    | Self::VScale
                    | Self::AuxF32
                    | Self::AuxI32
            )
    }

    /// True if it says where the rows of sequences lie: offsets, lengths, cache batches and the page table.
    pub const fn is_of_sequences(self) -> bool {
        matches!(
            self,
            Self::CuSeqlensQ
                | Self::CuSeqlensK
                | Self::SequsedQ
                | Self::SequsedK
                | Self::LeftpadK
                | Self::KvBatchIdx
                | Self::PageTable
        )
    }
}

/// A set of operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct OperandSet(u64);

const _: () = assert!(Operand::COUNT <= u64::BITS as usize, "an OperandSet has a bit for every operand");

impl OperandSet {
    /// No operand.
    pub const NONE: Self = Self(0);

    /// The operands that a problem has, of those that an operation has.
    pub fn of_rows<P>(rows: &[Row<P>], problem: &P) -> Self {
        rows.iter().filter(|row| row.is_present(problem)).map(|row| row.operand).collect()
    }

    /// The operands that a problem of attention has.
    pub fn of(problem: &Problem) -> Self {
        Self::of_rows(Problem::OPERANDS, problem)
    }

    /// True if the operand is in it.
    pub const fn has(self, operand: Operand) -> bool {
        self.0 >> (operand as u64) & 1 == 1
    }

    /// The set with one more operand.
    #[must_use]
    pub const fn with(self, operand: Operand) -> Self {
        Self(self.0 | 1 << (operand as u64))
    }

    /// The set without an operand.
    #[must_use]
    pub const fn without(self, operand: Operand) -> Self {
        Self(self.0 & !(1 << (operand as u64)))
    }

    /// The operands of the set, in the order of the table.
    pub fn iter(self) -> impl Iterator<Item = Operand> {
        Operand::ALL.iter().copied().filter(move |&operand| self.has(operand))
    }
}

impl FromIterator<Operand> for OperandSet {
    fn from_iter<T: IntoIterator<Item = Operand>>(operands: T) -> Self {
        operands.into_iter().fold(Self::NONE, Self::with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_hold_what_was_put_in() {
        let set = OperandSet::default().with(Operand::Sinks).with(Operand::Bias).with(Operand::PartLses);
        assert!(set.has(Operand::Sinks) && set.has(Operand::Bias) && !set.has(Operand::Query));
        assert_eq!(set.without(Operand::Sinks).iter().collect::<Vec<_>>(), [Operand::Bias, Operand::PartLses]);
    }

    #[test]
    fn names_are_unique_and_have_a_description() {
        let names: std::collections::HashSet<_> = Operand::ALL.iter().map(|operand| operand.name()).collect();
        assert_eq!(names.len(), Operand::COUNT);
        assert!(Operand::ALL.iter().all(|operand| operand.doc().ends_with(['.', ')'])));
        assert_eq!(Operand::SCALES.map(Operand::scale_index), [0, 1, 2].map(Some));
        assert_eq!(Operand::NewKey.scale_index(), None);
    }
}
