//! Views of attention with a growing cache, as the views of every operation and back.

use crate::{
    InputViews, KvCacheInputs, KvCacheOutputs, OutputViews, ScaleViewMut, TensorView, TensorViewMut, ValueCache,
};

fn given(view: TensorView<'_>) -> Option<TensorView<'_>> {
    (!view.data.is_empty()).then_some(view)
}

fn reborrowed<'a>(view: &'a mut TensorViewMut<'_>) -> TensorViewMut<'a> {
    TensorViewMut { dtype: view.dtype, data: view.data }
}

fn scale<'a>(scale: &'a mut Option<ScaleViewMut<'_>>) -> Option<ScaleViewMut<'a>> {
    scale.as_mut().map(|scale| ScaleViewMut { data: scale.data, strides: scale.strides })
}

/// The inputs of attention with a growing cache.
pub fn kv_cache_inputs<'a>(inputs: &InputViews<'a>) -> KvCacheInputs<'a> {
    let mut attention = *inputs;
    (attention.key, attention.value) = (inputs.new_key, inputs.new_value);
    for moved in [
        &mut attention.new_key,
        &mut attention.new_value,
        &mut attention.cos,
        &mut attention.sin,
        &mut attention.query_norm,
        &mut attention.key_norm,
    ] {
        *moved = TensorView::default();
    }
    (attention.cu_seqlens_k_new, attention.rotary_seqlens) = (None, None);
    let mut kv_cache = KvCacheInputs::new(attention);
    (kv_cache.cu_seqlens_k_new, kv_cache.rotary_seqlens) = (inputs.cu_seqlens_k_new, inputs.rotary_seqlens);
    (kv_cache.cos, kv_cache.sin) = (given(inputs.cos), given(inputs.sin));
    (kv_cache.query_norm, kv_cache.key_norm) = (given(inputs.query_norm), given(inputs.key_norm));
    kv_cache
}

/// The outputs of attention with a growing cache.
pub fn kv_cache_outputs<'a>(outputs: &'a mut OutputViews<'_>) -> KvCacheOutputs<'a> {
    let mut attention = OutputViews::new(reborrowed(&mut outputs.output));
    attention.lse = outputs.lse.as_deref_mut();
    let key_cache = reborrowed(&mut outputs.key_cache);
    let mut kv_cache = match outputs.value_offset {
        Some(offset) => KvCacheOutputs::interleaved(key_cache, offset, attention),
        None => KvCacheOutputs::new(key_cache, reborrowed(&mut outputs.value_cache), attention),
    };
    (kv_cache.k_scale, kv_cache.v_scale) = (scale(&mut outputs.k_scale), scale(&mut outputs.v_scale));
    kv_cache
}

impl<'a> From<&KvCacheInputs<'a>> for InputViews<'a> {
    fn from(inputs: &KvCacheInputs<'a>) -> Self {
        Self {
            key: TensorView::default(),
            value: TensorView::default(),
            new_key: inputs.attention.key,
            new_value: inputs.attention.value,
            cu_seqlens_k_new: inputs.cu_seqlens_k_new,
            rotary_seqlens: inputs.rotary_seqlens,
            cos: inputs.cos.unwrap_or_default(),
            sin: inputs.sin.unwrap_or_default(),
            query_norm: inputs.query_norm.unwrap_or_default(),
            key_norm: inputs.key_norm.unwrap_or_default(),
            ..inputs.attention
        }
    }
}

impl<'a> OutputViews<'a> {
    fn with_caches(mut self, key_cache: TensorViewMut<'a>, value_cache: ValueCache<'a>) -> Self {
        self.key_cache = key_cache;
        match value_cache {
            ValueCache::Separate(cache) => self.value_cache = cache,
            ValueCache::InKeyCache { offset } => self.value_offset = Some(offset),
        }
        self
    }
}

impl<'a> From<KvCacheOutputs<'a>> for OutputViews<'a> {
    fn from(outputs: KvCacheOutputs<'a>) -> Self {
        let KvCacheOutputs { key_cache, value_cache, attention, k_scale, v_scale } = outputs;
        Self { k_scale, v_scale, ..attention }.with_caches(key_cache, value_cache)
    }
}
