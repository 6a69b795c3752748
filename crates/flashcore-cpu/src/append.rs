//! Append to a KV cache on the CPU: a work item is one head of the query, the keys or the values of all tokens, so that no
//! two threads write one row even where two tokens have the same slot; the last of them is then the one that stays.

use crate::driver::output::Disjoint;
use crate::driver::parallel::{LoopSchedule, for_each};
use crate::rows::{HeadRows, Quantize, RowScales, Transform};
use flashcore_problem::{AppendProblem, InputViews, Invalid, OutputViews, RowMove};

/// Appends keys and values to a KV cache, as [`AppendProblem`] defines it, on all threads of rayon's current pool.
///
/// On an error the outputs are as they were.
pub fn append(problem: &AppendProblem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) -> Result<(), Invalid> {
    problem.validate_views(inputs, &outputs)?;
    let OutputViews { key_cache, value_cache, value_offset, query_output, k_scale, v_scale, .. } = outputs;
    let [k_scales, v_scales] = [RowScales::new(inputs.k_scale, k_scale), RowScales::new(inputs.v_scale, v_scale)];
    let cache_dtype = problem.cache_dtype();
    let key_cache = Disjoint::new(key_cache.data);
    let own_values = Disjoint::new(value_cache.data);
    let (value_cache, offset) = value_offset.map_or((&own_values, 0), |offset| (&key_cache, offset));
    let query_output = Disjoint::new(query_output.data);
    let (queries, keys) = (problem.query_heads, problem.key_heads);
    let strides = problem.strides;
    let position = |token| inputs.positions.map_or(0, |positions| positions.get(token));
    let transform = |weights| Some(Transform::new(problem, Some((inputs.cos, inputs.sin)), Some(weights)));
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
            let source = (!inputs.query.is_empty()).then_some((inputs.query, strides.query));
            let rows = rows(problem.head_dim, source, strides.query_output, 0);
            // SAFETY: this item alone has the rows of this head, which overlap no other by validation.
            unsafe { rows.write(&query_output, item, moves, transform(inputs.query_norm)) };
            return;
        }
        let moves = inputs.slot_mapping.unwrap_or_default().iter().enumerate().filter_map(|(token, &slot)| {
            let to = problem.place(slot)?;
            Some(RowMove { from: (0, token), to, position: position(token), sequence: 0 })
        });
        let (head, is_key) = ((item - queries) / 2, (item - queries).is_multiple_of(2));
        if is_key {
            let rows = rows(problem.head_dim, Some((inputs.new_key, strides.key)), strides.key_cache, 0);
            let rows = HeadRows { quantize: quantize(&k_scales), ..rows };
            // SAFETY: this item alone has the rows of this head of this cache and their scales; caches that share a memory lie apart by
            // validation.
            unsafe { rows.write(&key_cache, head, moves, transform(inputs.key_norm)) };
        } else {
            let rows = rows(problem.value_dim, Some((inputs.new_value, strides.value)), strides.value_cache, offset);
            let rows = HeadRows { quantize: quantize(&v_scales), ..rows };
            // SAFETY: as above.
            unsafe { rows.write(value_cache, head, moves, None) };
        }
    };
    for_each(queries + 2 * keys, problem.tokens.saturating_mul(problem.head_dim), LoopSchedule::Dynamic, work);
    Ok(())
}
