//! Append to a KV cache on the CPU: a work item is one head of the query, the keys or the values of all tokens, so that no
//! two threads write one row even where two tokens have the same slot; the last of them is then the one that stays.

use crate::driver::output::Disjoint;
use crate::driver::parallel::{LoopSchedule, for_each};
use crate::rows::{HeadRows, Quantize, RowScales, Transform};
use flashcore_problem::{AppendInputs, AppendOutputs, AppendProblem, Invalid, RowMove, TensorViewMut, ValueCache};

/// Appends keys and values to a KV cache, as [`AppendProblem`] defines it, on all threads of rayon's current pool.
///
/// On an error the outputs are as they were.
pub fn append(problem: &AppendProblem, inputs: &AppendInputs<'_>, outputs: AppendOutputs<'_>) -> Result<(), Invalid> {
    problem.validate_views(inputs, &outputs)?;
    let AppendOutputs { key_cache, value_cache, query, k_scale, v_scale, .. } = outputs;
    let [k_scales, v_scales] = [RowScales::new(inputs.k_scale, k_scale), RowScales::new(inputs.v_scale, v_scale)];
    let cache_dtype = problem.cache_dtype();
    let key_cache = Disjoint::new(key_cache.data);
    let (own_values, offset) = match value_cache {
        ValueCache::Separate(TensorViewMut { data, .. }) => (Some(Disjoint::new(data)), 0),
        ValueCache::InKeyCache { offset } => (None, offset),
    };
    let value_cache = own_values.as_ref().unwrap_or(&key_cache);
    let query_output = query.map(|query| Disjoint::new(query.data));
    let (queries, keys) = (problem.query_heads, problem.key_heads);
    let strides = problem.strides;
    let position = |token| inputs.positions.map_or(0, |positions| positions.get(token));
    let transform = |weights| Some(Transform::new(problem, inputs.cos.zip(inputs.sin), weights));
    let rows = |columns, source, target, offset| HeadRows {
        dtype: problem.dtype,
        columns,
        source,
        target,
        offset,
        quantize: None,
    };
    let quantize = |scales| cache_dtype.is_float8().then_some(Quantize { dtype: cache_dtype, scales });
    let work = |item: usize| {
        if item < queries {
            let moves = (0..problem.tokens).map(|token| RowMove {
                from: (0, token),
                to: (0, token),
                position: position(token),
                sequence: 0,
            });
            let source = inputs.query.map(|query| (query, strides.query));
            let rows = rows(problem.head_dim, source, strides.query_output, 0);
            if let Some(output) = &query_output {
                // SAFETY: this item alone has the rows of this head, which overlap no other by validation.
                unsafe { rows.write(output, item, moves, transform(inputs.query_norm)) };
            }
            return;
        }
        let moves = inputs.slot_mapping.iter().enumerate().filter_map(|(token, &slot)| {
            let to = problem.place(slot)?;
            Some(RowMove { from: (0, token), to, position: position(token), sequence: 0 })
        });
        let (head, is_key) = ((item - queries) / 2, (item - queries).is_multiple_of(2));
        if is_key {
            let rows = rows(problem.head_dim, Some((inputs.key, strides.key)), strides.key_cache, 0);
            let rows = HeadRows { quantize: quantize(&k_scales), ..rows };
            // SAFETY: this item alone has the rows of this head of this cache and their scales; caches that share a memory lie apart by
            // validation.
            unsafe { rows.write(&key_cache, head, moves, transform(inputs.key_norm)) };
        } else {
            let rows = rows(problem.value_dim, Some((inputs.value, strides.value)), strides.value_cache, offset);
            let rows = HeadRows { quantize: quantize(&v_scales), ..rows };
            // SAFETY: as above.
            unsafe { rows.write(value_cache, head, moves, None) };
        }
    };
    for_each(queries + 2 * keys, problem.tokens.saturating_mul(problem.head_dim), LoopSchedule::Dynamic, work);
    Ok(())
}
