//! Specialization of the append kernel.

use core::fmt::Write;

use flashcore_problem::{AppendProblem, DType, KvCacheProblem, Operand, PositionType, RotaryStyle};

use super::quantize::QuantizeSpec;
use crate::primitives::{LANES, VectorType, used_strides, vector_elements};

/// Threads of a CTA.
pub(super) const THREADS: u32 = 128;

/// Everything of an append that is compiled into its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AppendSpec {
    /// The element type.
    pub dtype: DType,
    /// Columns of query and key.
    pub head_dim: u32,
    /// Columns of value.
    pub value_dim: u32,
    /// True if there is a query.
    pub query: bool,
    /// True if query and key are normalized.
    pub qk_norm: bool,
    /// The rotary embedding.
    pub rotary: Option<RotarySpec>,
    /// Elements of a vector of query and key.
    pub key_vec: u32,
    /// Elements of a vector of value.
    pub value_vec: u32,
    /// Rows go to places by sequence; `None` by slot.
    pub sequences: Option<SequenceSpec>,
    /// Quantisation to FP8 caches.
    pub quantize: Option<QuantizeSpec>,
}

/// Everything of an append by sequence that is compiled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "each is a kind of operand of its own")]
pub struct SequenceSpec {
    /// True if query rows are packed (`cu_seqlens_q`).
    pub packed_query: bool,
    /// True if new keys are packed (`cu_seqlens_k_new`).
    pub packed_new: bool,
    /// True if sequences choose their batch of the cache (`kv_batch_idx`).
    pub kv_batch: bool,
    /// True if the cache has pages.
    pub paged: bool,
    /// True if positions start where `rotary_seqlens` says.
    pub rotary_seqlens: bool,
    /// True if query rows have consecutive positions.
    pub consecutive: bool,
}

/// Everything of a rotary embedding that is compiled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RotarySpec {
    /// The columns that make a pair.
    pub style: RotaryStyle,
    /// Columns that are rotated.
    pub dim: u32,
    /// Element type of the tables.
    pub table_dtype: DType,
    /// Elements of one access to a table.
    pub table_vec: u32,
    /// Integer type of the positions.
    pub positions: PositionType,
}

impl AppendSpec {
    /// The specialization for a valid problem.
    pub fn of(problem: &AppendProblem) -> Self {
        let strides = problem.strides;
        let query = problem.query_heads > 0;
        let keys = used_strides(problem.key_shape(), strides.key)
            .chain(used_strides(problem.key_cache_shape(), strides.key_cache));
        let queries = used_strides(problem.query_shape(), strides.query)
            .chain(used_strides(problem.query_shape(), strides.query_output))
            .filter(|_| query);
        let values = used_strides(problem.value_shape(), strides.value)
            .chain(used_strides(problem.value_cache_shape(), strides.value_cache));
        Self::new(problem, query, keys.chain(queries), values)
    }

    /// The specialization for the append of a valid problem with a growing cache.
    pub fn of_sequences(problem: &KvCacheProblem) -> Self {
        let (attention, strides) = (&problem.attention, problem.attention.strides());
        let query = problem.transforms();
        let keys = used_strides(problem.new_key_shape(), problem.new_key)
            .chain(used_strides(attention.key_shape(), strides.key));
        let queries = used_strides(attention.query_shape(), strides.query)
            .chain(used_strides(attention.query_shape(), problem.attended().strides().query))
            .filter(|_| query);
        let values = used_strides(problem.new_value_shape(), problem.new_value)
            .chain(used_strides(attention.value_shape(), strides.value));
        let sequences = SequenceSpec {
            packed_query: query && attention.total_q.is_some(),
            packed_new: problem.total_new.is_some(),
            kv_batch: attention.kv_batch.is_some(),
            paged: attention.paged.is_some(),
            rotary_seqlens: problem.rotary_seqlens,
            consecutive: problem.rotary.is_some() && problem.has_consecutive_positions(),
        };
        let mut spec = Self::new(&problem.append(0), query, keys.chain(queries), values);
        spec.sequences = Some(sequences);
        // Positions follow from lengths.
        spec.rotary = spec.rotary.map(|rotary| RotarySpec { positions: PositionType::I32, ..rotary });
        spec
    }

    /// The specialization for tensors with these strides of query and key, and of value.
    fn new(
        problem: &AppendProblem,
        query: bool,
        key_strides: impl Iterator<Item = usize>,
        value_strides: impl Iterator<Item = usize>,
    ) -> Self {
        // Both halves of a pair of vectors lie within the rotated columns.
        let rotated = problem.rotary.map(|rotary| rotary.dim / 2);
        let key_vec = vector_elements(problem.dtype, key_strides.chain([problem.head_dim]).chain(rotated));
        let value_vec = vector_elements(problem.dtype, value_strides.chain([problem.value_dim]));
        let table_dtype = problem.table_dtype();
        Self {
            dtype: problem.dtype,
            head_dim: problem.head_dim as u32,
            value_dim: problem.value_dim as u32,
            query,
            qk_norm: problem.qk_norm.is_some(),
            rotary: problem.rotary.map(|rotary| RotarySpec {
                style: rotary.style,
                dim: rotary.dim as u32,
                table_dtype,
                table_vec: vector_elements(table_dtype, [rotary.table_stride, key_vec as usize]),
                positions: rotary.positions,
            }),
            key_vec,
            value_vec,
            sequences: None,
            quantize: QuantizeSpec::of(problem),
        }
    }

    /// Bytes of which the addresses of key cache and value cache must be multiples.
    pub(super) fn cache_alignments(self) -> [u64; 2] {
        let element = self.quantize.map_or(self.dtype, |quantize| quantize.dtype).size_bytes() as u64;
        [self.key_vec, self.value_vec].map(|elements| u64::from(elements) * element)
    }

    /// Bytes of which the addresses of operands must be multiples, but for those of the caches.
    pub(super) fn alignments(self) -> [(Operand, u64); 8] {
        let Self { dtype, key_vec, value_vec, rotary, .. } = self;
        let element = dtype.size_bytes() as u64;
        let [key, value] = [key_vec, value_vec].map(|elements| u64::from(elements) * element);
        let table = rotary.map_or(1, |rotary| u64::from(rotary.table_vec) * rotary.table_dtype.size_bytes() as u64);
        [
            (Operand::Query, key),
            (Operand::QueryOutput, key),
            (Operand::NewKey, key),
            (Operand::QueryNorm, key),
            (Operand::KeyNorm, key),
            (Operand::NewValue, value),
            (Operand::Cos, table),
            (Operand::Sin, table),
        ]
    }

    /// Writes the kernel.
    pub(crate) fn generate(self) -> flashcore_ir::Kernel {
        match self.sequences {
            None => super::append::kernel(self),
            Some(sequences) => super::sequences::kernel(self, sequences),
        }
    }

    /// The name of the kernel.
    pub(super) fn name(self) -> String {
        let Self { dtype, head_dim, value_dim, query, qk_norm, rotary, key_vec, value_vec, sequences, quantize } = self;
        let mut name = format!("flashcore_append_kv_{dtype}_d{head_dim}x{value_dim}_v{key_vec}x{value_vec}");
        if query {
            name.push_str("_query");
        }
        if qk_norm {
            name.push_str("_norm");
        }
        if let Some(RotarySpec { style, dim, table_dtype, table_vec, positions }) = rotary {
            let style = match style {
                RotaryStyle::Neox => "neox",
                RotaryStyle::GptJ => "gptj",
            };
            let positions = match positions {
                PositionType::I32 => "i32",
                PositionType::I64 => "i64",
            };
            let _ = write!(name, "_{style}{dim}_{table_dtype}v{table_vec}_{positions}");
        }
        if let Some(sequences) = sequences {
            let SequenceSpec { packed_query, packed_new, kv_batch, paged, rotary_seqlens, consecutive } = sequences;
            name.push_str("_sequences");
            for (switch, is_on) in [
                ("_packedq", packed_query),
                ("_packednew", packed_new),
                ("_kvbatch", kv_batch),
                ("_paged", paged),
                ("_starts", rotary_seqlens),
                ("_consecutive", consecutive),
            ] {
                name.push_str(if is_on { switch } else { "" });
            }
        }
        if let Some(quantize) = quantize {
            name.push_str(&quantize.suffix());
        }
        name
    }

    /// The rows of query and key.
    pub(super) fn key_rows(self) -> RowShape {
        RowShape::new(self.dtype, self.head_dim, self.key_vec, self.rotary)
    }

    /// The rows of value.
    pub(super) fn value_rows(self) -> RowShape {
        RowShape::new(self.dtype, self.value_dim, self.value_vec, None)
    }

    /// True if query and key are more than copied.
    pub(super) const fn transforms(self) -> bool {
        self.qk_norm || self.rotary.is_some()
    }
}

/// Rows of a head, cut into items of two vectors each, of which a lane has one or more. The two vectors of an item within
/// the rotated columns hold both columns of each of their pairs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowShape {
    /// A vector.
    pub(crate) vector: VectorType,
    /// Columns of a row.
    pub(crate) columns: u32,
    /// The rotary embedding.
    pub(crate) rotary: Option<RotarySpec>,
    /// Items that are rotated; the others follow.
    pub(crate) rotated_items: u32,
    /// Items of a row.
    pub(crate) items: u32,
    /// Lanes of a row: a power of two.
    pub(crate) lanes: u32,
}

impl RowShape {
    pub(crate) fn new(dtype: DType, columns: u32, elements: u32, rotary: Option<RotarySpec>) -> Self {
        let rotated = rotary.map_or(0, |rotary| rotary.dim);
        let rotated_items = rotated / 2 / elements;
        let items = rotated_items + ((columns - rotated) / elements).div_ceil(2);
        let lanes = items.next_power_of_two().min(LANES);
        Self { vector: VectorType::new(dtype, elements), columns, rotary, rotated_items, items, lanes }
    }

    /// True if the last item of a row has one vector only.
    pub(crate) fn ends_with_half(self) -> bool {
        let rotated = self.rotary.map_or(0, |rotary| rotary.dim);
        !((self.columns - rotated) / self.vector.elements).is_multiple_of(2)
    }

    /// Rows of a CTA.
    pub(crate) const fn rows_per_cta(self) -> u32 {
        THREADS / self.lanes
    }

    /// CTAs for so many rows.
    pub(crate) const fn ctas(self, rows: u32) -> u32 {
        rows.div_ceil(self.rows_per_cta())
    }
}
