//! Attention with a growing KV cache on the CPU: the append, one head of query, new keys or new values at a time, then
//! attention.

use crate::driver::output::Disjoint;
use crate::driver::parallel::{LoopSchedule, for_each};
use crate::planted::planted;
use crate::rows::{HeadRows, Quantize, RowScales, Transform};
use crate::{CpuError, Level, attend_with};
use flashcore_problem::{KvCacheInputs, KvCacheOutputs, KvCacheProblem, ScaleViewMut, TensorView, ValueCache};

/// Appends new keys and values to the caches of their sequences and attends them, as [`KvCacheProblem`] defines it, on all
/// threads of rayon's current pool.
///
/// On an error caches and outputs are as they were.
pub fn kv_cache(
    problem: &KvCacheProblem,
    inputs: &KvCacheInputs<'_>,
    outputs: KvCacheOutputs<'_>,
) -> Result<(), CpuError> {
    kv_cache_with(Level::default_level()?, problem, inputs, outputs)
}

/// [`kv_cache`] with the instructions of one level, which is an error where the machine lacks them.
pub fn kv_cache_with(
    level: Level,
    problem: &KvCacheProblem,
    inputs: &KvCacheInputs<'_>,
    outputs: KvCacheOutputs<'_>,
) -> Result<(), CpuError> {
    kv_cache_and_query(level, problem, inputs, outputs).map(|_| ())
}

/// [`kv_cache_with`] for whoever judges attention apart from the append: the elements of the query after norm and rotary
/// embedding, none where it stays as it is.
pub fn kv_cache_and_query(
    level: Level,
    problem: &KvCacheProblem,
    inputs: &KvCacheInputs<'_>,
    mut outputs: KvCacheOutputs<'_>,
) -> Result<Vec<u8>, CpuError> {
    level.check()?;
    let early: Option<Vec<u8>> = planted!(AppendBeforeCheck: Some(append(problem, inputs, &mut outputs)), None);
    problem.validate_views(inputs, &outputs)?;
    let query = early.unwrap_or_else(|| append(problem, inputs, &mut outputs));
    let lengths = problem.lengths_after(inputs);
    let KvCacheOutputs { key_cache, value_cache, attention: attended, k_scale, v_scale, .. } = outputs;
    let caches = (key_cache.as_view(), value_cache.view(&key_cache));
    let scales = [&k_scale, &v_scale].map(|scale| scale.as_ref().map(ScaleViewMut::as_view));
    let mut attention = problem.attention_inputs(inputs, caches, scales, &lengths);
    if problem.transforms() {
        attention.query = TensorView { dtype: problem.attention.dtype, data: &query };
    }
    attend_with(level, &problem.attended(), attention, attended)?;
    Ok(query)
}

/// Writes new keys and values to the caches, and returns the query after norm and rotary embedding; empty where it stays
/// as it is.
fn append(problem: &KvCacheProblem, inputs: &KvCacheInputs<'_>, outputs: &mut KvCacheOutputs<'_>) -> Vec<u8> {
    let (attention, append) = (&problem.attention, problem.append(0));
    let (strides, attended) = (attention.strides(), problem.attended());
    let queries = if problem.transforms() { attention.query_heads } else { 0 };
    let elements = attended.strides().query.extent(attended.query_shape()).unwrap_or(0);
    let mut query = vec![0; if queries > 0 { elements * attention.dtype.size_bytes() } else { 0 }];
    let (key_moves, query_moves) = (problem.key_moves(inputs), problem.query_moves(inputs));
    let key_moves = planted!(
        AppendPast32: key_moves.into_iter().filter(|moved| moved.sequence < 32).collect::<Vec<_>>(),
        key_moves
    );
    {
        let query_output = Disjoint::new(&mut query[..]);
        let key_cache = Disjoint::new(&mut *outputs.key_cache.data);
        let (own_values, offset) = match &mut outputs.value_cache {
            ValueCache::Separate(cache) => (Some(Disjoint::new(&mut *cache.data)), 0),
            ValueCache::InKeyCache { offset } => (None, *offset),
        };
        let value_cache = own_values.as_ref().unwrap_or(&key_cache);
        let transform = |weights| Some(Transform::new(&append, inputs.cos.zip(inputs.sin), weights));
        let rows = |columns, source, target, offset| HeadRows {
            dtype: attention.dtype,
            columns,
            source,
            target,
            offset,
            quantize: None,
        };
        let cache_dtype = append.cache_dtype();
        let quantize = |scales| cache_dtype.is_float8().then_some(Quantize { dtype: cache_dtype, scales });
        let k_scales = RowScales::new(inputs.attention.k_scale, outputs.k_scale.as_mut().map(reborrowed));
        let v_scales = RowScales::new(inputs.attention.v_scale, outputs.v_scale.as_mut().map(reborrowed));
        let work = |item: usize| {
            let (head, is_key) = (item.saturating_sub(queries) / 2, item.saturating_sub(queries).is_multiple_of(2));
            if item < queries {
                let source = Some((inputs.attention.query, strides.query));
                let rows = rows(attention.head_dim, source, attended.strides().query, 0);
                // SAFETY: this item alone has the rows of this head of a contiguous tensor.
                unsafe { rows.write(&query_output, item, query_moves.iter().copied(), transform(inputs.query_norm)) };
            } else if is_key {
                let source = Some((inputs.attention.key, problem.new_key));
                let rows = rows(attention.head_dim, source, strides.key, 0);
                let rows = HeadRows { quantize: quantize(&k_scales), ..rows };
                // SAFETY: this item alone has the rows of this head of this cache and their scales; caches that share a
                // memory lie apart by validation.
                unsafe { rows.write(&key_cache, head, key_moves.iter().copied(), transform(inputs.key_norm)) };
            } else {
                let source = Some((inputs.attention.value, problem.new_value));
                let rows = rows(attention.value_dim, source, strides.value, offset);
                let rows = HeadRows { quantize: quantize(&v_scales), ..rows };
                // SAFETY: as above.
                unsafe { rows.write(value_cache, head, key_moves.iter().copied(), None) };
            }
        };
        let row_count = key_moves.len().max(query_moves.len());
        let items = queries + 2 * attention.key_heads;
        for_each(items, row_count.saturating_mul(attention.head_dim), LoopSchedule::Dynamic, work);
    }
    query
}

fn reborrowed<'a>(scale: &'a mut ScaleViewMut<'_>) -> ScaleViewMut<'a> {
    ScaleViewMut { data: scale.data, strides: scale.strides }
}
