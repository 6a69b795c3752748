//! Oracle of attention with a growing KV cache: the append in `f64`, and the inputs of the attention that follows.

use super::{KvCacheInputs, KvCacheProblem, RowMove};
use crate::append::{AppendExpected, CachePlace, RotaryTables, RowScales, copied, transformed};
use crate::{Inputs, Invalid, Operand, ScaleStrides, Shape, Strides, Tensor, TensorView};

/// The right answer to the append, and the query that attends.
#[derive(Clone, Debug, PartialEq)]
pub struct KvCacheExpected {
    /// Elements of the caches that are written.
    pub append: AppendExpected,
    /// The query after norm and rotary embedding, rounded, laid out as [`KvCacheProblem::attended`] says; poison in rows
    /// of no sequence.
    pub query: Tensor,
    /// Rows of the cache that each sequence uses after the append.
    pub lengths: Vec<u32>,
}

/// Computes the append of attention with a growing KV cache in `f64`.
///
/// # Panics
///
/// When the tensors do not belong to the problem; see [`KvCacheProblem::validate_views`].
pub fn kv_cache_oracle(problem: &KvCacheProblem, inputs: &KvCacheInputs<'_>) -> Result<KvCacheExpected, Invalid> {
    let written = ScaleStrides::per_cache_row(problem.attention.key_shape());
    kv_cache_oracle_with(problem, inputs, [written; 2])
}

/// [`kv_cache_oracle`] with computed scales of keys and of values that lie by other strides than contiguous
/// `[batch or page, row, head]`.
///
/// # Panics
///
/// As [`kv_cache_oracle`].
pub fn kv_cache_oracle_with(
    problem: &KvCacheProblem,
    inputs: &KvCacheInputs<'_>,
    written: [ScaleStrides; 2],
) -> Result<KvCacheExpected, Invalid> {
    problem.validate()?;
    let (append, attention) = (problem.append(0), inputs.attention);
    let tables = RotaryTables { rotary: problem.rotary.zip(inputs.cos.zip(inputs.sin)), norm: problem.qk_norm };
    let mut expected = AppendExpected::new(&append);
    let [k_scales, v_scales] = [
        RowScales::new(append.scale_source(Operand::KScale), attention.k_scale, Some(written[0])),
        RowScales::new(append.scale_source(Operand::VScale), attention.v_scale, Some(written[1])),
    ];
    let strides = problem.attention.strides();
    for RowMove { from, to, position, sequence } in problem.key_moves(inputs) {
        for head in 0..problem.attention.key_heads {
            let start = problem.new_key.row_start(from.0, head, from.1);
            let key = transformed(
                &tables,
                position,
                (attention.key, start),
                append.head_dim,
                inputs.key_norm.unwrap_or_default(),
            );
            let place =
                |strides: Strides| CachePlace { start: strides.row_start(to.0, head, to.1), place: to, head, sequence };
            expected.add_key(place(strides.key), key, k_scales);
            let start = problem.new_value.row_start(from.0, head, from.1);
            let value = copied((attention.value, start), append.value_dim);
            expected.add_value(place(strides.value), value, v_scales);
        }
    }
    let attended = problem.attended();
    let (shape, to_strides) = (attended.query_shape(), attended.strides().query);
    let mut query = Tensor::poisoned(attended.dtype, to_strides.extent(shape).unwrap_or(0));
    for RowMove { from, to, position, .. } in problem.query_moves(inputs) {
        for head in 0..shape.heads {
            let start = strides.query.row_start(from.0, head, from.1);
            let row = transformed(
                &tables,
                position,
                (attention.query, start),
                shape.columns,
                inputs.query_norm.unwrap_or_default(),
            );
            let start = to_strides.row_start(to.0, head, to.1);
            row.iter().enumerate().for_each(|(column, &(value, _))| query.set(start + column, value));
            expected.add_query(start, row);
        }
    }
    Ok(KvCacheExpected { append: expected, query, lengths: problem.lengths_after(inputs) })
}

impl KvCacheExpected {
    /// The inputs of [`KvCacheProblem::attended`], given the caches after the append.
    pub fn attention_inputs(
        &self,
        problem: &KvCacheProblem,
        inputs: &KvCacheInputs<'_>,
        key_cache: TensorView<'_>,
        value_cache: TensorView<'_>,
    ) -> Inputs {
        let cut = |view: TensorView<'_>, shape: Shape, strides: Strides| Tensor {
            dtype: view.dtype,
            data: view.data[..strides.extent(shape).unwrap_or(0) * view.dtype.size_bytes()].to_vec(),
        };
        let (attended, strides) = (problem.attended(), problem.attention.strides());
        let mut after = inputs.attention.to_owned_inputs();
        after.query = self.query.clone();
        after.key = cut(key_cache, attended.key_shape(), strides.key);
        after.value = cut(value_cache, attended.value_shape(), strides.value);
        after.seqused_k = Some(self.lengths.clone());
        after
    }
}
