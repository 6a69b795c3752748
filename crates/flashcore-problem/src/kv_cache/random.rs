//! Random numbers of attention with a growing KV cache: independent tensors, poison wherever nothing may be read.

use std::collections::HashSet;

use super::{KvCacheInputs, KvCacheProblem, RowMove};
use crate::append::{ZEROS, random_scale, tables, unwritten_scales};
use crate::verify::random::{fill, page_table};
use crate::{
    DType, Inputs, Operand, Scale, ScaleStrides, SequenceLengths, Shape, SplitMix64, Strides, Tensor, TensorView,
};

/// Owned inputs of attention with a growing KV cache, and the caches before.
#[derive(Clone, Debug, PartialEq)]
pub struct KvCacheData {
    /// The inputs of attention: key and value are the new ones, `seqused_k` is `cache_seqlens`.
    pub attention: Inputs,
    /// The key cache before the append.
    pub key_cache: Tensor,
    /// The value cache before the append.
    pub value_cache: Tensor,
    /// Offsets of packed new keys.
    pub cu_seqlens_k_new: Option<Vec<u32>>,
    /// Positions at which sequences start.
    pub rotary_seqlens: Option<Vec<u32>>,
    /// Cosines.
    pub cos: Tensor,
    /// Sines.
    pub sin: Tensor,
    /// Weights of the norm of the query.
    pub query_norm: Tensor,
    /// Weights of the norm of the new keys.
    pub key_norm: Tensor,
    /// The scales of the key cache before the append, where those of new keys are computed.
    pub k_scale: Option<Scale>,
    /// The scales of the value cache before the append, where those of new values are computed.
    pub v_scale: Option<Scale>,
    has_rotary: bool,
    has_norm: bool,
}

/// The stream of everything that attention alone does not have.
const NEW_STREAM: u64 = 0x4e3;
/// The stream of what a host refuses.
const CROWD_STREAM: u64 = 0x4e5;
/// The stream of the scales of an FP8 cache.
const SCALE_STREAM: u64 = 0x4e4;

impl KvCacheData {
    /// Random inputs whose sequences have lengths after the append by a pattern: rows of the cache that no sequence has
    /// yet, those of new keys among them, unused pages, rows and table entries are poison. Some sequences share the pages
    /// of full prefixes. Of an FP8 cache, given scales saturate some of the new values, and where scales are computed,
    /// some new rows are all zeros.
    ///
    /// # Panics
    ///
    /// When the problem does not validate, a sequence cannot have as many new keys as it must, or the cache has fewer
    /// batches or pages than the sequences need.
    pub fn random(problem: &KvCacheProblem, lengths: SequenceLengths, seed: u64) -> Self {
        Self::drawn(problem, lengths, seed, false)
    }

    /// [`random`](Self::random) inputs as only a device takes them: some sequences have no room for all of their new keys,
    /// and padding that reaches into the new keys.
    ///
    /// # Panics
    ///
    /// As [`random`](Self::random).
    pub fn crowded(problem: &KvCacheProblem, lengths: SequenceLengths, seed: u64) -> Self {
        Self::drawn(problem, lengths, seed, true)
    }

    fn drawn(problem: &KvCacheProblem, lengths: SequenceLengths, seed: u64, is_crowded: bool) -> Self {
        assert_eq!(problem.validate(), Ok(()), "inputs are made for valid problems");
        let attention = &problem.attention;
        let mut random = SplitMix64::stream(seed, NEW_STREAM);
        let mut inputs = Inputs::random_sequences(attention, lengths, seed);
        let new = new_lengths(problem, &mut inputs, &mut random);
        let after = inputs.seqused_k.clone().unwrap_or_default();
        let mut before: Vec<u32> = after.iter().zip(&new).map(|(after, new)| after - new).collect();
        if is_crowded {
            crowd(problem, &mut inputs, &mut before, &new, seed);
        }
        if let Some(batches) = &mut inputs.kv_batch_idx {
            *batches = distinct(attention.cache_batches(), attention.batch, &mut random);
        }
        if inputs.page_table.is_some() {
            let table = page_table(attention, attention.table_entries(), &mut random);
            inputs.page_table = Some(table);
            share_prefixes(problem, &mut inputs, &before);
        }
        let strides = attention.strides();
        let cache_dtype = attention.dtypes().key_value;
        let normal = |random: &mut SplitMix64, dtype: DType, shape: Shape, strides: Strides| {
            fill(dtype, shape, strides, &mut |_, _| random.normal())
        };
        inputs.key = normal(&mut random, cache_dtype, attention.key_shape(), strides.key);
        inputs.value = normal(&mut random, cache_dtype, attention.value_shape(), strides.value);
        inputs.reconcile_sequences(attention);
        let [k_scale, v_scale] = scales(problem, &mut inputs, seed);
        let mut data = Self {
            key_cache: inputs.key,
            value_cache: inputs.value,
            attention: Inputs {
                key: new_rows(problem, &mut random, problem.new_key_shape(), problem.new_key),
                value: new_rows(problem, &mut random, problem.new_value_shape(), problem.new_value),
                seqused_k: Some(before),
                ..inputs
            },
            cu_seqlens_k_new: problem.total_new.map(|_| offsets(&new)),
            rotary_seqlens: None,
            cos: Tensor::zeros(attention.dtype, 0),
            sin: Tensor::zeros(attention.dtype, 0),
            query_norm: Tensor::zeros(attention.dtype, 0),
            key_norm: Tensor::zeros(attention.dtype, 0),
            k_scale,
            v_scale,
            has_rotary: problem.rotary.is_some(),
            has_norm: problem.qk_norm.is_some(),
        };
        if let Some(rotary) = problem.rotary {
            (data.cos, data.sin) = tables(&problem.append(0), rotary, &mut random);
            let rows = attention.query_length.max(problem.new_length);
            let starts = (rotary.max_position + 1).saturating_sub(rows).max(1);
            data.rotary_seqlens =
                problem.rotary_seqlens.then(|| (0..attention.batch).map(|_| random.below(starts) as u32).collect());
        }
        if problem.qk_norm.is_some() {
            let mut weights = || {
                let values: Vec<f64> = (0..attention.head_dim).map(|_| 1.0 + 0.25 * random.normal()).collect();
                Tensor::from_values(attention.dtype, &values)
            };
            (data.query_norm, data.key_norm) = (weights(), weights());
        }
        data.poison_new_rows(problem);
        data
    }

    /// Poisons the rows of the caches and the scales that are to be written, and new rows of no sequence; gives new rows
    /// that no query attends scales too, where these are given.
    fn poison_new_rows(&mut self, problem: &KvCacheProblem) {
        let moves = problem.key_moves(&self.inputs());
        let strides = problem.attention.strides();
        for &RowMove { to: (page, row), .. } in &moves {
            for (cache, strides, shape) in [
                (&mut self.key_cache, strides.key, problem.attention.key_shape()),
                (&mut self.value_cache, strides.value, problem.attention.value_shape()),
            ] {
                poison(cache, strides, shape, page, row);
            }
        }
        let mut random = SplitMix64::stream(moves.len() as u64, SCALE_STREAM);
        for scale in [&mut self.attention.k_scale, &mut self.attention.v_scale].into_iter().flatten() {
            for &RowMove { to, sequence, .. } in &moves {
                for head in 0..problem.attention.key_heads {
                    let number = &mut scale.data[scale.strides.key_index(sequence, to, head)];
                    // Of a new row that no query attends.
                    *number = if number.is_nan() { random_scale(self.key_cache.dtype, &mut random) } else { *number };
                }
            }
        }
        for scale in [&mut self.k_scale, &mut self.v_scale].into_iter().flatten() {
            for &RowMove { to, sequence, .. } in &moves {
                for head in 0..problem.attention.key_heads {
                    scale.data[scale.strides.key_index(sequence, to, head)] = f32::NAN;
                }
            }
        }
        let used: HashSet<_> = moves.iter().map(|moved| moved.from).collect();
        let shape = problem.new_key_shape();
        for (batch, row) in (0..shape.batch).flat_map(|batch| (0..shape.rows).map(move |row| (batch, row))) {
            if !used.contains(&(batch, row)) {
                poison(&mut self.attention.key, problem.new_key, shape, batch, row);
                poison(&mut self.attention.value, problem.new_value, problem.new_value_shape(), batch, row);
            }
        }
    }

    /// Views of what the problem has.
    pub fn inputs(&self) -> KvCacheInputs<'_> {
        let some = |on: bool, tensor| on.then(|| TensorView::from(tensor));
        KvCacheInputs {
            attention: self.attention.views(),
            cu_seqlens_k_new: self.cu_seqlens_k_new.as_deref(),
            rotary_seqlens: self.rotary_seqlens.as_deref(),
            cos: some(self.has_rotary, &self.cos),
            sin: some(self.has_rotary, &self.sin),
            query_norm: some(self.has_norm, &self.query_norm),
            key_norm: some(self.has_norm, &self.key_norm),
        }
    }

    /// The scales of keys and of values that are computed, before the append; empty where there are none.
    pub fn scales(&self) -> [&[f32]; 2] {
        [&self.k_scale, &self.v_scale].map(|scale| scale.as_ref().map_or(&[][..], |scale| &scale.data))
    }

    /// The strides of those scales; those of contiguous ones where there are none.
    pub fn scale_strides(&self, problem: &KvCacheProblem) -> [ScaleStrides; 2] {
        let contiguous = ScaleStrides::per_cache_row(problem.attention.key_shape());
        [&self.k_scale, &self.v_scale].map(|scale| scale.as_ref().map_or(contiguous, |scale| scale.strides))
    }
}

/// New rows of normal numbers; where scales are computed, some of them are all zeros.
fn new_rows(problem: &KvCacheProblem, random: &mut SplitMix64, shape: Shape, strides: Strides) -> Tensor {
    let zeros = |row: usize| problem.compute_scales && row % ZEROS == ZEROS - 1;
    fill(problem.attention.dtype, shape, strides, &mut |row, _| {
        let normal = random.normal();
        if zeros(row) { 0.0 } else { normal }
    })
}

/// Gives attention the scales of the rows that it has after the append, and takes those out that are computed: key, value.
fn scales(problem: &KvCacheProblem, inputs: &mut Inputs, seed: u64) -> [Option<Scale>; 2] {
    let attention = &problem.attention;
    inputs.fill_scales(attention, seed);
    let mut random = SplitMix64::stream(seed, SCALE_STREAM);
    let dtype = attention.dtypes().key_value;
    if !problem.compute_scales {
        for scale in [&mut inputs.k_scale, &mut inputs.v_scale].into_iter().flatten() {
            for number in scale.data.iter_mut().filter(|number| !number.is_nan()) {
                *number = random_scale(dtype, &mut random);
            }
        }
        return [None, None];
    }
    let mut per_token = |operand: Operand, is_on: bool, seed: u64| {
        let mut scale = unwritten_scales(attention.key_shape(), seed);
        let used = Scale::used(operand, scale.strides, attention, &inputs.views());
        for index in used {
            scale.data[index] = random_scale(dtype, &mut random);
        }
        is_on.then_some(scale)
    };
    let scales =
        [per_token(Operand::KScale, attention.k_scale, seed), per_token(Operand::VScale, attention.v_scale, seed + 1)];
    (inputs.k_scale, inputs.v_scale) = (None, None);
    scales
}

fn poison(tensor: &mut Tensor, strides: Strides, shape: Shape, batch: usize, row: usize) {
    for head in 0..shape.heads {
        let start = strides.row_start(batch, head, row);
        (start..start + shape.columns).for_each(|index| tensor.set(index, f64::NAN));
    }
}

/// New keys of each sequence, some of packed ones without any; lengths after the append and padding are made to fit.
fn new_lengths(problem: &KvCacheProblem, inputs: &mut Inputs, random: &mut SplitMix64) -> Vec<u32> {
    let (new_length, mut left) = (problem.new_length as u32, problem.total_new.unwrap_or(0) as u32);
    let lengths = inputs.seqused_k.as_mut().expect("problems with a cache have lengths");
    let mut new = Vec::new();
    for (sequence, length) in lengths.iter_mut().enumerate() {
        let most = problem.attention.key_length as u32;
        let count = match problem.total_new {
            None => new_length,
            Some(_) if sequence % 5 == 3 => 0,
            Some(_) => (1 + random.below(problem.new_length) as u32).min(left).min(most),
        };
        assert!(count <= most, "a sequence of {most} keys cannot have {count} new ones");
        left = left.saturating_sub(count);
        if let Some(padding) = &mut inputs.leftpad_k {
            padding[sequence] = padding[sequence].min(most - count);
            *length = (*length).max(padding[sequence] + count);
        }
        *length = (*length).max(count);
        new.push(count);
    }
    new
}

/// Fills the cache of one sequence with new keys, and of one in three others, until there is no room for the last new key
/// or for any, and pads some up to any of their keys.
fn crowd(problem: &KvCacheProblem, inputs: &mut Inputs, before: &mut [u32], new: &[u32], seed: u64) {
    let mut random = SplitMix64::stream(seed, CROWD_STREAM);
    let most = problem.attention.key_length as u32;
    let with_new: Vec<usize> = (0..new.len()).filter(|&sequence| new[sequence] > 0).collect();
    let first = with_new.get(random.below(with_new.len().max(1)));
    for &sequence in &with_new {
        let (is_full, is_padded) = (random.below(3) == 0, random.below(3) == 0);
        if is_full || Some(&sequence) == first {
            before[sequence] = most - random.below(new[sequence] as usize) as u32;
            inputs.seqused_k.iter_mut().for_each(|after| after[sequence] = most);
        }
        let after = (before[sequence] + new[sequence]).min(most);
        if let Some(padding) = inputs.leftpad_k.as_mut().filter(|_| is_padded) {
            padding[sequence] = before[sequence] + random.below((after - before[sequence] + 1) as usize) as u32;
        }
    }
}

fn offsets(lengths: &[u32]) -> Vec<u32> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// `count` different numbers below `most`, in random order.
fn distinct(most: usize, count: usize, random: &mut SplitMix64) -> Vec<u32> {
    assert!(count <= most, "{count} sequences that append need as many batches; the cache has {most}");
    let mut all: Vec<u32> = (0..most as u32).collect();
    (0..count).map(|_| all.swap_remove(random.below(all.len()))).collect()
}

/// Gives every other sequence the pages of the first, as far as both have filled them before the append.
fn share_prefixes(problem: &KvCacheProblem, inputs: &mut Inputs, before: &[u32]) {
    let (Some(paged), Some(table)) = (problem.attention.paged, &mut inputs.page_table) else { return };
    assert!(paged.num_pages >= table.len(), "appended rows need pages of their own");
    let row_of = |sequence: usize| {
        inputs.kv_batch_idx.as_ref().map_or(sequence, |batches| batches[sequence] as usize) * paged.table_stride
    };
    for sequence in (2..before.len()).step_by(2) {
        let full = (before[sequence].min(before[0]) as usize / paged.page_size).min(3);
        for entry in 0..full {
            table[row_of(sequence) + entry] = table[row_of(0) + entry];
        }
    }
}
