//! The table of operands: every tensor that a call of attention reads or writes, one row each.
//!
//! From a row follow the switch in [`Problem`], the field of [`Inputs`](crate::Inputs) and
//! [`InputViews`](crate::InputViews) with its setter and its checks, random inputs, the address among the device tensors
//! and its checks, the kernel parameter and its index, uploads, simulator buffers and guard pages. Code that treats all
//! operands alike loops over [`Operand::ALL`]; code that needs a name for each hands the table to a macro of its own
//! with [`operands!`](crate::operands!). `docs/add-an-operand.md` goes through it.

use crate::{CallStrides, DType, PagedKv, Paging, Problem, Shape, Strides, TotalRows};

/// Hands the table of operands to the macro of this name.
///
/// The sections: `tensors` have the element type and the layout of the problem; `outputs` and `inputs` are contiguous
/// vectors of 4-byte numbers that are there if a switch of the problem is on; `strided` are inputs of `f32` whose strides
/// come with each call; `scales` are those of 8-bit tensors, the same, and parameters of kernels that have them only. A row of a vector:
/// name, variant, element type, elements, the switch with its setter, the setter of the operand, and how random inputs fill
/// it from which stream.
#[macro_export]
macro_rules! operands {
    ($callback:ident) => {
        $callback! {
            tensors {
                /// The query, `query_heads` by `query_length` by `head_dim`.
                query: Query, Read, query_shape;
                /// The key, `key_heads` by `key_length` by `head_dim`.
                key: Key, Read, key_shape;
                /// The value, `key_heads` by `key_length` by `value_dim`.
                value: Value, Read, value_shape;
                /// The output, `query_heads` by `query_length` by `value_dim`.
                output: Output, Write, output_shape;
            }
            outputs {
                /// The log-sum-exp (LSE) of each row, contiguous `[batch, query head, query row]`; with
                /// `cu_seqlens_q`, `[query head, row of all sequences]`.
                lse: Lse, f32, |problem| {
                        let Shape { batch, heads, rows, .. } = problem.output_shape();
                        batch.saturating_mul(heads).saturating_mul(rows)
                    }, with_lse,
                    /// True to have the log-sum-exp (LSE) of each row.
                    lse: bool, with_lse;
            }
            inputs {
                /// Where the query rows of each sequence begin among those of all, and where the last ends (varlen).
                cu_seqlens_q: CuSeqlensQ, u32, |problem| problem.batch.saturating_add(1), with_cu_seqlens_q, 9, cu_seqlens_q,
                    /// Rows of query and output where those of all sequences are packed into one batch (varlen).
                    total_q: TotalRows, with_total_q;
                /// Where the keys of each sequence begin among those of all, and where the last ends (varlen).
                cu_seqlens_k: CuSeqlensK, u32, |problem| problem.batch.saturating_add(1), with_cu_seqlens_k, 10, cu_seqlens_k,
                    /// Rows of key and value where those of all sequences are packed into one batch (varlen).
                    total_k: TotalRows, with_total_k;
                /// Query rows of each sequence; the rows after them are neither read nor written.
                seqused_q: SequsedQ, u32, |problem| problem.batch, with_seqused_q, 11, seqused_q,
                    /// True if each sequence has a number of query rows of its own, at most `query_length`.
                    seqused_q: bool, with_seqused_q;
                /// One key length per batch, at most the problem's `key_length`.
                seqused_k: SequsedK, u32, |problem| problem.batch, with_seqused_k, 5, seqused_k,
                    /// True if each batch has a key length of its own, at most `key_length`.
                    seqused_k: bool, with_seqused_k;
                /// Keys at the beginning of each sequence that are padding. They count in `seqused_k`.
                leftpad_k: LeftpadK, u32, |problem| problem.batch, with_leftpad_k, 12, leftpad_k,
                    /// True if each sequence begins with padding among its keys.
                    leftpad_k: bool, with_leftpad_k;
                /// The batch of the KV cache, or the row of the page table, of each sequence.
                kv_batch_idx: KvBatchIdx, u32, |problem| problem.batch, with_kv_batch_idx, 13, kv_batch_idx,
                    /// Batches of the KV cache, or rows of the page table, where sequences choose theirs.
                    kv_batch: TotalRows, with_kv_batch;
                /// The pages of each sequence. Entries past its last key may hold anything.
                page_table: PageTable, i32, Problem::table_entries, with_page_table, 14, page_table,
                    /// The paged KV cache, where key and value are pages.
                    paged: Paging, with_paged;
                /// One slope per query head.
                alibi_slopes: AlibiSlopes, f32, |problem| problem.query_heads, with_alibi_slopes, 8, alibi_slopes,
                    /// True if there is a slope per query head (`ALiBi`) that is subtracted for every position of
                    /// distance.
                    alibi: bool, with_alibi;
                /// One sink per query head.
                sinks: Sinks, f32, |problem| problem.query_heads, with_sinks, 4, per_head,
                    /// True if there is a sink per query head: one more score in the denominator, with no value.
                    sinks: bool, with_sinks;
                /// The floats that `score_mod` and `mask_mod` read.
                aux_f32: AuxF32, f32, |problem| problem.aux_f32, with_aux_f32, 6, aux_f32,
                    /// Entries of the table of floats that `score_mod` and `mask_mod` read; 0 is no table.
                    aux_f32: usize, with_aux_f32;
                /// The integers that `score_mod` and `mask_mod` read.
                aux_i32: AuxI32, i32, |problem| problem.aux_i32, with_aux_i32, 7, aux_i32,
                    /// Entries of the table of integers that `score_mod` and `mask_mod` read; 0 is no table.
                    aux_i32: usize, with_aux_i32;
            }
            strided {
                /// The bias that is added to the scores.
                bias: Bias, with_bias, 3, bias,
                    /// True if there is a bias that is added to the scores.
                    bias: bool, with_bias;
            }
            scales {
                /// The scale of the query: the number that its codes are multiplied by (`q_descale`).
                q_scale: QScale, with_q_scale, 15,
                    /// True if the codes of an 8-bit query have a scale.
                    q_scale: bool, with_q_scale;
                /// The scale of the key: the number that its codes are multiplied by (`k_descale`).
                k_scale: KScale, with_k_scale, 16,
                    /// True if the codes of an 8-bit key have a scale.
                    k_scale: bool, with_k_scale;
                /// The scale of the value: the number that its codes are multiplied by (`v_descale`).
                v_scale: VScale, with_v_scale, 17,
                    /// True if the codes of an 8-bit value have a scale.
                    v_scale: bool, with_v_scale;
            }
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

/// A switch of a problem that says whether an operand is there.
trait Switch {
    fn is_on(&self) -> bool;
    fn switch_on(&mut self);
}

impl Switch for bool {
    fn is_on(&self) -> bool {
        *self
    }

    fn switch_on(&mut self) {
        *self = true;
    }
}

impl Switch for usize {
    fn is_on(&self) -> bool {
        *self > 0
    }

    fn switch_on(&mut self) {
        *self = 1;
    }
}

impl Switch for TotalRows {
    fn is_on(&self) -> bool {
        self.is_some()
    }

    fn switch_on(&mut self) {
        *self = Some(1);
    }
}

impl Switch for Paging {
    fn is_on(&self) -> bool {
        self.is_some()
    }

    fn switch_on(&mut self) {
        *self = Some(PagedKv::new(1, 1, 1));
    }
}

macro_rules! define_operand {
    (
        tensors { $($(#[$tensor_doc:meta])* $tensor:ident: $Tensor:ident, $access:ident, $shape:ident;)* }
        outputs { $($(#[$output_doc:meta])* $output:ident: $Output:ident, $output_type:ty, $output_extent:expr, $with_output:ident,
            $(#[$output_switch_doc:meta])* $output_switch:ident: $output_switch_type:ty, $with_output_switch:ident;)* }
        inputs { $($(#[$input_doc:meta])* $input:ident: $Input:ident, $input_type:ty, $input_extent:expr, $with_input:ident,
            $stream:literal, $fill:ident,
            $(#[$input_switch_doc:meta])* $input_switch:ident: $input_switch_type:ty, $with_input_switch:ident;)* }
        strided { $($(#[$strided_doc:meta])* $strided:ident: $Strided:ident, $with_strided:ident, $strided_stream:literal,
            $strided_fill:ident,
            $(#[$strided_switch_doc:meta])* $strided_switch:ident: $strided_switch_type:ty, $with_strided_switch:ident;)* }
        scales { $($(#[$scale_doc:meta])* $scale:ident: $Scale:ident, $with_scale:ident, $scale_stream:literal,
            $(#[$scale_switch_doc:meta])* $scale_switch:ident: $scale_switch_type:ty, $with_scale_switch:ident;)* }
    ) => {
        /// An operand of attention: a tensor that a call reads or writes.
        ///
        /// The discriminant is its index among the operands, and of its address among the values of a launch.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Operand {
            $($(#[$tensor_doc])* $Tensor,)*
            $($(#[$output_doc])* $Output,)*
            $($(#[$input_doc])* $Input,)*
            $($(#[$strided_doc])* $Strided,)*
            $($(#[$scale_doc])* $Scale,)*
        }

        impl Operand {
            /// Every operand, in the order of the table.
            pub const ALL: &'static [Self] = &[
                $(Self::$Tensor,)* $(Self::$Output,)* $(Self::$Input,)* $(Self::$Strided,)* $(Self::$Scale,)*
            ];
            /// Number of operands.
            pub const COUNT: usize = Self::ALL.len();
            /// The scales of 8-bit tensors, which are the last of all operands.
            pub const SCALES: [Self; Self::COUNT - Self::PARAMETERS] = [$(Self::$Scale,)*];
            /// Number of those whose addresses are parameters of every GPU kernel: all but the scales.
            pub const PARAMETERS: usize = Self::COUNT - [$(stringify!($Scale),)*].len();

            /// Name of the field that has it, in every struct and message.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$Tensor => stringify!($tensor),)*
                    $(Self::$Output => stringify!($output),)*
                    $(Self::$Input => stringify!($input),)*
                    $(Self::$Strided => stringify!($strided),)*
                    $(Self::$Scale => stringify!($scale),)*
                }
            }

            /// Name of its switch in [`Problem`], which is that of the feature that it brings.
            pub const fn feature(self) -> &'static str {
                match self {
                    $(Self::$Output => stringify!($output_switch),)*
                    $(Self::$Input => stringify!($input_switch),)*
                    $(Self::$Strided => stringify!($strided_switch),)*
                    $(Self::$Scale => stringify!($scale_switch),)*
                    _ => self.name(),
                }
            }

            /// Switches it on in a problem; a table gets one entry.
            pub fn switch_on(self, problem: &mut Problem) {
                match self {
                    $(Self::$Tensor)|* => {}
                    $(Self::$Output => problem.$output_switch.switch_on(),)*
                    $(Self::$Input => problem.$input_switch.switch_on(),)*
                    $(Self::$Strided => problem.$strided_switch.switch_on(),)*
                    $(Self::$Scale => problem.$scale_switch.switch_on(),)*
                }
            }

            /// Read or write access of kernels.
            pub const fn access(self) -> Access {
                match self {
                    $(Self::$Tensor => Access::$access,)*
                    $(Self::$Output)|* => Access::Write,
                    $(Self::$Input)|* | $(Self::$Strided)|* | $(Self::$Scale)|* => Access::Read,
                }
            }

            /// True if a problem has it.
            pub fn is_present(self, problem: &Problem) -> bool {
                match self {
                    $(Self::$Tensor)|* => true,
                    $(Self::$Output => problem.$output_switch.is_on(),)*
                    $(Self::$Input => problem.$input_switch.is_on(),)*
                    $(Self::$Strided => problem.$strided_switch.is_on(),)*
                    $(Self::$Scale => problem.$scale_switch.is_on(),)*
                }
            }

            /// Shape and strides of an operand that has the layout of the problem: query, key, value and output.
            pub fn tensor(self, problem: &Problem) -> Option<(Shape, Strides)> {
                let strides = problem.strides();
                match self {
                    $(Self::$Tensor => Some((problem.$shape(), strides.$tensor)),)*
                    _ => None,
                }
            }

            /// Elements of a contiguous vector of numbers; `None` for the operands with strides.
            pub fn elements(self, problem: &Problem) -> Option<usize> {
                fn count(problem: &Problem, extent: fn(&Problem) -> usize) -> Option<usize> {
                    Some(extent(problem))
                }
                match self {
                    $(Self::$Output => count(problem, $output_extent),)*
                    $(Self::$Input => count(problem, $input_extent),)*
                    _ => None,
                }
            }
        }
    };
}

operands!(define_operand);

impl Operand {
    /// The element type, where it is one that tensors of a problem can have: of query, key, value and output.
    pub const fn dtype(self, problem: &Problem) -> Option<DType> {
        let types = problem.dtypes();
        match self {
            Self::Query => Some(types.query),
            Self::Key | Self::Value => Some(types.key_value),
            Self::Output => Some(types.output),
            _ => None,
        }
    }

    /// Bytes of an element: those of the tensor's type, or 4.
    pub const fn element_bytes(self, problem: &Problem) -> usize {
        match self.dtype(problem) {
            Some(dtype) => dtype.size_bytes(),
            None => size_of::<f32>(),
        }
    }

    /// Multiple of which its device address must be: TMA and the widest accesses take 16 bytes at a time.
    pub const fn alignment(self) -> u64 {
        match self {
            Self::Query | Self::Key | Self::Value | Self::Output => 16,
            _ => 4,
        }
    }

    /// Elements from the first to the last, gaps included, or `None` when the number does not fit. Bias and scales lie by
    /// the strides of the call.
    pub fn extent(self, problem: &Problem, strides: impl Into<CallStrides>) -> Option<usize> {
        if let Some((shape, strides)) = self.tensor(problem) {
            return strides.extent(shape);
        }
        let strides = strides.into();
        match self.scale_index() {
            Some(index) => strides.scales[index].extent(self, problem),
            None => self.elements(problem).or_else(|| strides.bias.extent(problem)),
        }
    }

    /// Index among [`Operand::SCALES`]; `None` for operands that are no scale.
    pub const fn scale_index(self) -> Option<usize> {
        (self as usize).checked_sub(Self::PARAMETERS)
    }

    /// True for the scales of 8-bit tensors.
    pub const fn is_scale(self) -> bool {
        matches!(self, Self::QScale | Self::KScale | Self::VScale)
    }

    /// True if it changes scores. A new operand does, until it is listed here as one that does not: a kernel for plain
    /// scores is then never chosen by mistake. The tables of expressions change what the expressions do with them.
    pub const fn is_score_term(self) -> bool {
        !matches!(
            self,
            Self::Query
                | Self::Key
                | Self::Value
                | Self::Output
                | Self::Lse
                | Self::CuSeqlensQ
                | Self::CuSeqlensK
                | Self::SequsedQ
                | Self::SequsedK
                | Self::LeftpadK
                | Self::KvBatchIdx
                | Self::PageTable
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

    /// Operands that kernels read.
    pub fn inputs() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|operand| operand.access() == Access::Read)
    }

    /// Operands that a problem can do without.
    pub fn optional() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|operand| operand.alignment() == 4)
    }
}

/// A set of operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct OperandSet(u32);

impl OperandSet {
    /// No operand.
    pub const NONE: Self = Self(0);

    /// The operands that a problem has.
    pub fn of(problem: &Problem) -> Self {
        Operand::ALL.iter().copied().filter(|operand| operand.is_present(problem)).collect()
    }

    /// True if the operand is in it.
    pub const fn has(self, operand: Operand) -> bool {
        self.0 >> (operand as u32) & 1 == 1
    }

    /// The set with one more operand.
    #[must_use]
    pub const fn with(self, operand: Operand) -> Self {
        Self(self.0 | 1 << (operand as u32))
    }

    /// The set without an operand.
    #[must_use]
    pub const fn without(self, operand: Operand) -> Self {
        Self(self.0 & !(1 << (operand as u32)))
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
    use crate::BiasStrides;

    #[test]
    fn the_table_is_what_problems_have() {
        let mut problem = Problem::new(2, 6, 5, 8, DType::F16);
        problem.key_heads = 3;
        let names = |problem: &Problem| OperandSet::of(problem).iter().map(Operand::name).collect::<Vec<_>>();
        assert_eq!(names(&problem), ["query", "key", "value", "output"]);
        Operand::optional().for_each(|operand| operand.switch_on(&mut problem));
        (problem.aux_f32, problem.aux_i32) = (7, 9);
        (problem.total_q, problem.total_k, problem.kv_batch) = (Some(11), None, Some(4));
        problem.paged = Some(PagedKv { page_size: 4, num_pages: 3, table_width: 2, table_stride: 5 });
        let packed_keys = |name: &&str| *name != "cu_seqlens_k";
        let all = Operand::ALL.iter().map(|operand| operand.name()).filter(packed_keys);
        assert_eq!(names(&problem), all.collect::<Vec<_>>());
        let strides = BiasStrides { batch: 0, head: 25, row: 5, key: 1 };
        let extents = Operand::ALL.iter().map(|operand| operand.extent(&problem, strides));
        let expected = [528, 288, 288, 528, 66, 3, 3, 2, 2, 2, 2, 17, 6, 6, 7, 9, 150].map(Some);
        assert_eq!(extents.collect::<Vec<_>>(), [&expected[..], &[Some(1); 3]].concat());
        assert_eq!(Operand::PARAMETERS, expected.len());
        assert_eq!(Operand::inputs().count() + 2, Operand::COUNT);
        assert_eq!(Operand::optional().count() + 4, Operand::COUNT);
    }

    #[test]
    fn sets_hold_what_was_put_in() {
        let set = OperandSet::default().with(Operand::Sinks).with(Operand::Bias);
        assert!(set.has(Operand::Sinks) && set.has(Operand::Bias) && !set.has(Operand::Query));
        assert_eq!(set.without(Operand::Sinks).iter().collect::<Vec<_>>(), [Operand::Bias]);
    }
}
