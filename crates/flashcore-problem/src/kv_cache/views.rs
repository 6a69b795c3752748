//! The numbers of attention with a growing KV cache, borrowed.

use std::collections::{HashMap, HashSet};

use zerocopy::IntoBytes;

use super::KvCacheProblem;
use crate::append::{Errors, ScaleSource, check_presence};
use crate::sequence_check::{check_offsets, check_sequence_operands};
use crate::{
    InputViews, Invalid, Operand, OutputViews, ScaleStrides, ScaleView, ScaleViewMut, TensorError, TensorView,
    TensorViewMut, ValueCache,
};

/// Everything that attention with a growing KV cache reads, but for the caches.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct KvCacheInputs<'a> {
    /// The inputs of attention, with new keys and values as key and value, and the rows of the cache in use before the
    /// append (`cache_seqlens`) as `seqused_k`.
    pub attention: InputViews<'a>,
    /// First row of the new keys of each sequence among those of all, and where the last ends.
    pub cu_seqlens_k_new: Option<&'a [u32]>,
    /// Position of the first new key and query row of each sequence.
    pub rotary_seqlens: Option<&'a [u32]>,
    /// Cosines, `[max_position, dim / 2]`.
    pub cos: Option<TensorView<'a>>,
    /// Sines, `[max_position, dim / 2]`.
    pub sin: Option<TensorView<'a>>,
    /// Weights of the norm of the query, one for each column.
    pub query_norm: Option<TensorView<'a>>,
    /// Weights of the norm of the new keys, one for each column.
    pub key_norm: Option<TensorView<'a>>,
}

impl<'a> KvCacheInputs<'a> {
    /// The inputs of attention with new keys and values, and `cache_seqlens` as `seqused_k`; nothing optional.
    pub const fn new(attention: InputViews<'a>) -> Self {
        Self {
            attention,
            cu_seqlens_k_new: None,
            rotary_seqlens: None,
            cos: None,
            sin: None,
            query_norm: None,
            key_norm: None,
        }
    }

    /// Adds the offsets of packed new keys.
    #[must_use]
    pub const fn with_cu_seqlens_k_new(mut self, offsets: &'a [u32]) -> Self {
        self.cu_seqlens_k_new = Some(offsets);
        self
    }

    /// Adds cosines and sines.
    #[must_use]
    pub fn with_rotary(mut self, cos: impl Into<TensorView<'a>>, sin: impl Into<TensorView<'a>>) -> Self {
        (self.cos, self.sin) = (Some(cos.into()), Some(sin.into()));
        self
    }

    /// Adds the positions at which sequences start.
    #[must_use]
    pub const fn with_rotary_seqlens(mut self, positions: &'a [u32]) -> Self {
        self.rotary_seqlens = Some(positions);
        self
    }

    /// Adds the weights of the norms of query and new keys.
    #[must_use]
    pub fn with_qk_norm(mut self, query: impl Into<TensorView<'a>>, key: impl Into<TensorView<'a>>) -> Self {
        (self.query_norm, self.key_norm) = (Some(query.into()), Some(key.into()));
        self
    }

    /// Rows of the cache that a sequence uses before the append, padding included.
    fn cache_seqlen(&self, sequence: usize) -> usize {
        self.attention.seqused_k.map_or(0, |lengths| lengths[sequence] as usize)
    }

    /// First row of the new keys of a sequence in the batch that holds them, and their number.
    fn new_rows(&self, problem: &KvCacheProblem, sequence: usize) -> (usize, usize) {
        match self.cu_seqlens_k_new {
            Some(offsets) => (offsets[sequence] as usize, (offsets[sequence + 1] - offsets[sequence]) as usize),
            None => (0, problem.new_length),
        }
    }

    /// Position at which a sequence starts.
    fn start(&self, sequence: usize) -> i64 {
        self.rotary_seqlens.map_or_else(|| self.cache_seqlen(sequence) as i64, |starts| i64::from(starts[sequence]))
    }
}

/// Everything that attention with a growing KV cache writes.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct KvCacheOutputs<'a> {
    /// The key cache.
    pub key_cache: TensorViewMut<'a>,
    /// The value cache.
    pub value_cache: ValueCache<'a>,
    /// Output and log-sum-exp.
    pub attention: OutputViews<'a>,
    /// The scales of keys, where those of new keys are computed: read like the cache, and written.
    pub k_scale: Option<ScaleViewMut<'a>>,
    /// The scales of values, where those of new values are computed.
    pub v_scale: Option<ScaleViewMut<'a>>,
}

impl<'a> KvCacheOutputs<'a> {
    /// Two caches, and the outputs of attention.
    pub fn new(
        key_cache: impl Into<TensorViewMut<'a>>,
        value_cache: impl Into<TensorViewMut<'a>>,
        attention: impl Into<OutputViews<'a>>,
    ) -> Self {
        let value_cache = ValueCache::Separate(value_cache.into());
        Self { key_cache: key_cache.into(), value_cache, attention: attention.into(), k_scale: None, v_scale: None }
    }

    /// One memory for both caches: values begin `offset` elements past the first key.
    pub fn interleaved(
        cache: impl Into<TensorViewMut<'a>>,
        offset: usize,
        attention: impl Into<OutputViews<'a>>,
    ) -> Self {
        let value_cache = ValueCache::InKeyCache { offset };
        Self { key_cache: cache.into(), value_cache, attention: attention.into(), k_scale: None, v_scale: None }
    }

    /// Adds the scales of keys, those of new keys to be written.
    #[must_use]
    pub fn with_k_scale(mut self, scale: ScaleViewMut<'a>) -> Self {
        self.k_scale = Some(scale);
        self
    }

    /// Adds the scales of values, those of new values to be written.
    #[must_use]
    pub fn with_v_scale(mut self, scale: ScaleViewMut<'a>) -> Self {
        self.v_scale = Some(scale);
        self
    }

    /// The scales that are written, to be read by [`KvCacheProblem::attention_inputs`].
    pub fn scales(&self) -> [Option<ScaleView<'_>>; 2] {
        [&self.k_scale, &self.v_scale].map(|scale| scale.as_ref().map(ScaleViewMut::as_view))
    }

    /// The caches, to be read.
    pub fn caches(&self) -> (TensorView<'_>, TensorView<'_>) {
        (self.key_cache.as_view(), self.value_cache.view(&self.key_cache))
    }
}

/// The way of one row of all heads from a tensor of new rows to its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowMove {
    /// Batch and row it comes from.
    pub from: (usize, usize),
    /// Batch (or page) and row it goes to.
    pub to: (usize, usize),
    /// Position for the rotary embedding.
    pub position: i64,
    /// The sequence it belongs to; 0 by slot.
    pub sequence: usize,
}

impl KvCacheProblem {
    /// Nothing, or every mistake in the problem, else in its tensors.
    pub fn validate_views(&self, inputs: &KvCacheInputs<'_>, outputs: &KvCacheOutputs<'_>) -> Result<(), Invalid> {
        self.validate()?;
        let mut errors = Errors(Vec::new());
        let dtype = self.attention.dtype;
        errors.tensor("new_key", inputs.attention.key, dtype, self.new_key.extent(self.new_key_shape()));
        errors.tensor("new_value", inputs.attention.value, dtype, self.new_value.extent(self.new_value_shape()));
        if let ValueCache::InKeyCache { offset } = outputs.value_cache
            && !self.append(0).is_interleaved_apart(offset)
        {
            errors.0.push(TensorError::Overlap { tensor: "value_cache", other: "key_cache", offset });
        }
        for (tensor, table) in [("cos", inputs.cos), ("sin", inputs.sin)] {
            errors.presence(tensor, self.rotary.is_some(), table.is_some());
            if let (Some(rotary), Some(table)) = (self.rotary, table) {
                errors.tensor(tensor, table, self.append(0).table_dtype(), rotary.table_extent());
            }
        }
        for (tensor, weights) in [("query_norm", inputs.query_norm), ("key_norm", inputs.key_norm)] {
            errors.presence(tensor, self.qk_norm.is_some(), weights.is_some());
            if let (Some(_), Some(weights)) = (self.qk_norm, weights) {
                errors.tensor(tensor, weights, dtype, Some(self.attention.head_dim));
            }
        }
        self.check_scales(inputs, outputs, &mut errors.0);
        self.check_vectors(inputs, &mut errors);
        if !errors.0.is_empty() {
            return Err(errors.0.into());
        }
        // Everything else is what attention checks, with the lengths after the append: pages of new keys too.
        let lengths = self.lengths_after(inputs);
        let attention = self.attention_inputs(inputs, outputs.caches(), outputs.scales(), &lengths);
        let mut written = [HashSet::new(), HashSet::new()];
        if self.compute_scales {
            // Scales do not say where keys are: the attention without them does.
            let (mut problem, mut without) = (self.attention.clone(), attention);
            (problem.k_scale, problem.v_scale, without.k_scale, without.v_scale) = (false, false, None, None);
            without.validate(&problem)?;
            for (scale, written) in [attention.k_scale, attention.v_scale].into_iter().zip(&mut written) {
                *written = scale.map(|scale| self.new_scales(inputs, scale.strides).collect()).unwrap_or_default();
            }
        }
        let [k_written, v_written] = written;
        attention.validate_read(&self.attention, |operand, index| {
            if operand == Operand::KScale { k_written.contains(&index) } else { v_written.contains(&index) }
        })?;
        outputs.attention.validate(&self.attention)?;
        self.check_rows(inputs, &lengths)?;
        self.check_positions(inputs, &mut errors.0);
        // Scales of new rows that no query attends divide too.
        for (operand, scale) in [(Operand::KScale, attention.k_scale), (Operand::VScale, attention.v_scale)] {
            if let (false, Some(scale)) = (self.compute_scales, scale) {
                scale.check_positive(operand.name(), self.new_scales(inputs, scale.strides), &mut errors.0);
            }
        }
        if errors.0.is_empty() { Ok(()) } else { Err(errors.0.into()) }
    }

    /// Everything that is wrong with the vectors that say where sequences, their new keys and their positions lie, and with
    /// nothing else, as [`check_sequence_operands`](crate::check_sequence_operands) does for attention: `cache_seqlens` is
    /// `seqused_k`, and `cu_seqlens_k_new` and `rotary_seqlens` are given apart.
    ///
    /// # Panics
    ///
    /// When `bytes` gives numbers that are not aligned or not whole.
    pub fn check_sequence_operands<'a>(
        &self,
        bytes: impl Fn(Operand) -> Option<&'a [u8]>,
        [cu_seqlens_k_new, rotary_seqlens]: [Option<&'a [u32]>; 2],
    ) -> Result<(), Invalid> {
        self.validate()?;
        let attention = InputViews::vectors(|operand| bytes(operand).filter(|_| operand.is_of_sequences()));
        let inputs = KvCacheInputs { cu_seqlens_k_new, rotary_seqlens, ..KvCacheInputs::new(attention) };
        let mut errors = Errors(Vec::new());
        self.check_vectors(&inputs, &mut errors);
        if !errors.0.is_empty() {
            return Err(errors.0.into());
        }
        let lengths = self.lengths_after(&inputs);
        let after = |operand| match operand {
            Operand::SequsedK => Some(lengths.as_bytes()),
            other => attention.bytes(other),
        };
        check_sequence_operands(&self.attention, after)?;
        self.check_rows(&inputs, &lengths)?;
        self.check_positions(&inputs, &mut errors.0);
        if errors.0.is_empty() { Ok(()) } else { Err(errors.0.into()) }
    }

    /// Vectors that attention does not have, and room in the cache.
    fn check_vectors(&self, inputs: &KvCacheInputs<'_>, errors: &mut Errors) {
        let batch = self.attention.batch;
        for (tensor, values, needed, count) in [
            ("cache_seqlens", inputs.attention.seqused_k, true, batch),
            ("rotary_seqlens", inputs.rotary_seqlens, self.rotary_seqlens, batch),
            ("cu_seqlens_k_new", inputs.cu_seqlens_k_new, self.total_new.is_some(), batch.saturating_add(1)),
        ] {
            errors.presence(tensor, needed, values.is_some());
            if let (true, Some(values)) = (needed, values) {
                errors.count(tensor, values.len(), count);
            }
        }
        if errors.0.is_empty() {
            let bound = (self.new_length, "new_length");
            check_offsets("cu_seqlens_k_new", inputs.cu_seqlens_k_new, bound, self.total_new, &mut errors.0);
        }
        if errors.0.is_empty() {
            self.check_room(inputs, &mut errors.0);
        }
    }

    /// Indices of the scales of new rows, from inputs whose lengths and tables validate.
    fn new_scales(&self, inputs: &KvCacheInputs<'_>, strides: ScaleStrides) -> impl Iterator<Item = usize> {
        let heads = self.attention.key_heads;
        let moves = self.key_moves(inputs).into_iter();
        moves.flat_map(move |moved| (0..heads).map(move |head| strides.key_index(moved.sequence, moved.to, head)))
    }

    /// Given scales are inputs of attention, those that are computed outputs.
    fn check_scales(&self, inputs: &KvCacheInputs<'_>, outputs: &KvCacheOutputs<'_>, errors: &mut Vec<TensorError>) {
        let append = self.append(0);
        for (operand, given, written) in [
            (Operand::KScale, inputs.attention.k_scale, &outputs.k_scale),
            (Operand::VScale, inputs.attention.v_scale, &outputs.v_scale),
        ] {
            let source = append.scale_source(operand);
            check_presence(operand, source, given.is_some(), written.is_some(), errors);
            if let (ScaleSource::Computed, Some(written)) = (source, written) {
                errors.extend(append.scale_stride_error(operand, written.strides));
            }
        }
    }

    /// Room in the cache for the new keys of each sequence, and padding within the keys it has.
    fn check_room(&self, inputs: &KvCacheInputs<'_>, errors: &mut Vec<TensorError>) {
        let key_length = self.attention.key_length;
        for sequence in 0..self.attention.batch {
            let (length, (_, new)) = (inputs.cache_seqlen(sequence), inputs.new_rows(self, sequence));
            if length.saturating_add(new) > key_length {
                errors.push(TensorError::CacheFull { sequence, length, new, key_length });
            }
            // A vector of another length is an error of attention.
            let padding = inputs.attention.leftpad_k.and_then(|padding| padding.get(sequence).copied());
            if let Some(value) = padding.filter(|&padding| padding as usize > length) {
                let bound = "its rows before the append";
                errors.push(TensorError::BeyondBound { tensor: "leftpad_k", sequence, value, most: length, bound });
            }
        }
    }

    /// The rotary tables have a row for every new key and query row, once every vector is right.
    fn check_positions(&self, inputs: &KvCacheInputs<'_>, errors: &mut Vec<TensorError>) {
        let Some(rotary) = self.rotary else { return };
        for index in 0..self.attention.batch {
            let queries = inputs.attention.sequence(&self.attention, index).query_length;
            let queries = if self.has_consecutive_positions() { queries } else { queries.min(1) };
            let rows = queries.max(inputs.new_rows(self, index).1) as i64;
            let last = inputs.start(index) + rows - 1;
            if rows > 0 && last >= rotary.max_position as i64 {
                errors.push(rotary.outside("sequence", index, last));
            }
        }
    }

    /// No two new keys go to one row of the cache.
    fn check_rows(&self, inputs: &KvCacheInputs<'_>, lengths: &[u32]) -> Result<(), Invalid> {
        let mut owners = HashMap::new();
        for sequence in 0..self.attention.batch {
            for RowMove { to: (page, row), .. } in self.key_moves_of(inputs, lengths, sequence) {
                if let Some(other) = owners.insert((page, row), sequence) {
                    return Err(vec![TensorError::SameRow { sequence, other, page, row }].into());
                }
            }
        }
        Ok(())
    }

    /// Rows of the cache that each sequence uses after the append, without new keys that there is no room for, from inputs
    /// whose vectors have their sizes.
    pub fn lengths_after(&self, inputs: &KvCacheInputs<'_>) -> Vec<u32> {
        let new = |sequence| inputs.new_rows(self, sequence).1;
        let after = |sequence| (inputs.cache_seqlen(sequence) + new(sequence)).min(self.attention.key_length);
        (0..self.attention.batch).map(|sequence| after(sequence) as u32).collect()
    }

    /// The inputs of attention after the append, with the query as it is given and the scales that are computed.
    pub fn attention_inputs<'a>(
        &self,
        inputs: &KvCacheInputs<'a>,
        (key_cache, value_cache): (TensorView<'a>, TensorView<'a>),
        [k_scale, v_scale]: [Option<ScaleView<'a>>; 2],
        lengths_after: &'a [u32],
    ) -> InputViews<'a> {
        let mut attention = inputs.attention;
        (attention.key, attention.value, attention.seqused_k) = (key_cache, value_cache, Some(lengths_after));
        (attention.k_scale, attention.v_scale) = (k_scale.or(attention.k_scale), v_scale.or(attention.v_scale));
        attention
    }

    fn key_moves_of(
        &self,
        inputs: &KvCacheInputs<'_>,
        lengths_after: &[u32],
        sequence: usize,
    ) -> impl Iterator<Item = RowMove> {
        // Padding is before the rows in use, or reaches into the new ones: it moves no row.
        let mut attention = inputs.attention;
        (attention.seqused_k, attention.leftpad_k) = (Some(lengths_after), None);
        let place = attention.sequence(&self.attention, sequence);
        let (first, _) = inputs.new_rows(self, sequence);
        let batch = if self.total_new.is_some() { 0 } else { sequence };
        let (start, before) = (inputs.start(sequence), inputs.cache_seqlen(sequence));
        let move_of = |index: usize| RowMove {
            from: (batch, first + index),
            to: place.key_row(before + index),
            position: start + index as i64,
            sequence,
        };
        // New keys without room are left out.
        (0..place.key_length - before).map(move_of).collect::<Vec<_>>().into_iter()
    }

    /// The way of every new key and value to the caches, from inputs that validate.
    pub fn key_moves(&self, inputs: &KvCacheInputs<'_>) -> Vec<RowMove> {
        let lengths = self.lengths_after(inputs);
        (0..self.attention.batch).flat_map(|sequence| self.key_moves_of(inputs, &lengths, sequence)).collect()
    }

    /// Place and position of every query row that a sequence has, from inputs that validate.
    pub fn query_moves(&self, inputs: &KvCacheInputs<'_>) -> Vec<RowMove> {
        let lengths = self.lengths_after(inputs);
        let mut attention = inputs.attention;
        attention.seqused_k = Some(&lengths);
        let consecutive = i64::from(self.has_consecutive_positions());
        let mut moves = Vec::new();
        for sequence in attention.sequences(&self.attention) {
            let start = inputs.start(sequence.index);
            moves.extend((0..sequence.query_length).map(|row| {
                let place = sequence.query_row(row);
                let position = start + consecutive * row as i64;
                RowMove { from: place, to: place, position, sequence: sequence.index }
            }));
        }
        moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Alignment, DType, KvCacheData, Mask, Outputs, PagedKv, Problem, Rotary, RotaryStyle, SequenceLengths};

    /// Three sequences over pages of 4 rows, at most 3 new keys each, packed; two query rows each.
    fn problem(mask: Mask) -> KvCacheProblem {
        let mut attention = Problem::new(3, 1, 2, 2, DType::F32).with_mask(mask).with_leftpad_k(true);
        (attention.key_length, attention.kv_batch) = (12, Some(4));
        attention.paged = Some(PagedKv { page_size: 4, num_pages: 20, table_width: 3, table_stride: 4 });
        KvCacheProblem::new(attention, 3).with_total_new(Some(6))
    }

    const TABLE: [i32; 15] = [9, 8, 7, -1, 6, 5, 4, -1, 3, 2, 1, -1, 19, 18, 17];

    fn check_error(inputs: &KvCacheInputs<'_>, expected: &str) {
        let problem = problem(Mask::None);
        let (mut keys, mut values) = (vec![0.0_f32; 160], vec![0.0_f32; 160]);
        let mut output = vec![0.0_f32; 12];
        let outputs = KvCacheOutputs::new(&mut keys, &mut values, OutputViews::new(&mut output));
        let found = problem.validate_views(inputs, &outputs).err();
        let of_vectors = problem.check_sequence_operands(
            |operand| inputs.attention.bytes(operand),
            [inputs.cu_seqlens_k_new, inputs.rotary_seqlens],
        );
        assert_eq!(of_vectors.err(), found);
        assert_eq!(found.map_or_else(String::new, |error| error.to_string()), expected);
    }

    #[test]
    fn new_keys_follow_the_rows_in_use() {
        let (query, new) = ([0.0_f32; 12], [0.0_f32; 12]);
        let attention = InputViews::new(&query, &new, &new)
            .with_seqused_k(&[3, 8, 9])
            .with_leftpad_k(&[0, 3, 9])
            .with_kv_batch_idx(&[2, 0, 3])
            .with_page_table(&TABLE);
        let inputs = KvCacheInputs::new(attention).with_cu_seqlens_k_new(&[0, 3, 4, 6]);
        check_error(&inputs, "");
        let plain = problem(Mask::None);
        let moves: Vec<_> =
            plain.key_moves(&inputs).iter().map(|moved| (moved.from, moved.to, moved.position)).collect();
        let expected = [
            ((0, 0), (3, 3), 3),
            ((0, 1), (2, 0), 4),
            ((0, 2), (2, 1), 5),
            ((0, 3), (7, 0), 8),
            ((0, 4), (17, 1), 9),
            ((0, 5), (17, 2), 10),
        ];
        assert_eq!(moves, expected);
        assert_eq!(plain.lengths_after(&inputs), [6, 9, 11]);
        let positions = |problem: &KvCacheProblem, inputs: &KvCacheInputs<'_>| {
            problem.query_moves(inputs).iter().map(|moved| moved.position).collect::<Vec<_>>()
        };
        assert_eq!(positions(&plain, &inputs), [3, 3, 8, 8, 9, 9]);
        let causal = problem(Mask::Causal(Alignment::BottomRight));
        assert_eq!(positions(&causal, &inputs), [3, 4, 8, 9, 9, 10]);
        let given = inputs.with_rotary_seqlens(&[1, 20, 300]);
        assert_eq!(positions(&causal, &given), [1, 2, 20, 21, 300, 301]);
    }

    /// Tables are long enough for the last new key and the last query row of every sequence, or it is an error.
    #[test]
    fn positions_past_the_tables_are_named() {
        let (query, new) = ([0.0_f32; 12], [0.0_f32; 12]);
        let attention = InputViews::new(&query, &new, &new)
            .with_seqused_k(&[3, 8, 9])
            .with_leftpad_k(&[0, 3, 9])
            .with_kv_batch_idx(&[2, 0, 3])
            .with_page_table(&TABLE);
        let table = [0.0_f32; 400];
        let inputs = KvCacheInputs::new(attention).with_cu_seqlens_k_new(&[0, 3, 4, 6]).with_rotary(&table, &table);
        let starts = inputs.with_rotary_seqlens(&[0, 2, 300]);
        let causal = Mask::Causal(Alignment::BottomRight);
        let at =
            |index, position, max_position| TensorError::Position { of: "sequence", index, position, max_position };
        let cases = [
            (Mask::None, false, 11, None),
            (Mask::None, false, 10, Some(at(2, 10, 10))),
            (causal, false, 11, None),
            (causal, true, 302, None),
            (causal, true, 301, Some(at(2, 301, 301))),
        ];
        for (mask, has_starts, max_position, expected) in cases {
            let mut problem = problem(mask).with_rotary(Rotary::new(RotaryStyle::Neox, 2, max_position));
            problem.rotary_seqlens = has_starts;
            let (mut keys, mut values) = (vec![0.0_f32; 160], vec![0.0_f32; 160]);
            let mut output = vec![0.0_f32; 12];
            let outputs = KvCacheOutputs::new(&mut keys, &mut values, OutputViews::new(&mut output));
            let inputs = if has_starts { &starts } else { &inputs };
            let found = problem.validate_views(inputs, &outputs).err();
            let starts = inputs.rotary_seqlens;
            let of_vectors = |operand| inputs.attention.bytes(operand);
            let of_vectors = problem.check_sequence_operands(of_vectors, [inputs.cu_seqlens_k_new, starts]);
            assert_eq!(of_vectors.err(), found);
            assert_eq!(found, expected.map(|error| vec![error].into()), "{mask:?} {max_position}");
        }
        assert_eq!(
            at(2, 10, 10).to_string(),
            "sequence 2 is at position 10; cos and sin have 10 rows (max_position), for positions from 0 on: make them \
             longer"
        );
    }

    #[test]
    fn mistakes_are_named_before_anything_is_written() {
        let (query, new) = ([0.0_f32; 12], [0.0_f32; 12]);
        let good = InputViews::new(&query, &new, &new)
            .with_seqused_k(&[3, 8, 9])
            .with_leftpad_k(&[0, 3, 9])
            .with_kv_batch_idx(&[2, 0, 3])
            .with_page_table(&TABLE);
        let packed = |attention| KvCacheInputs::new(attention).with_cu_seqlens_k_new(&[0, 3, 4, 6]);
        check_error(
            &packed(good.with_seqused_k(&[3, 8, 11])),
            "sequence 2 uses 11 rows of the cache and gets 2 more; key_length is 12: plan for longer sequences, or append \
             less",
        );
        check_error(
            &packed(good.with_leftpad_k(&[0, 9, 9])),
            "leftpad_k of sequence 1 is 9; it may be at most 8, its rows before the append",
        );
        check_error(
            &packed(good.with_seqused_k(&[9, 8, 9]).with_kv_batch_idx(&[2, 0, 2])),
            "sequences 0 and 2 both append to row 1 of page (or batch) 1; rows that are appended must belong to one \
             sequence",
        );
        // The page of a new key, not of those before.
        let mut table = TABLE;
        table[9] = 20;
        check_error(
            &packed(good.with_page_table(&table)),
            "entry 1 of the page table of sequence 0 is 20; the cache has 20 pages",
        );
        check_error(
            &KvCacheInputs::new(good).with_cu_seqlens_k_new(&[0, 4, 4, 6]),
            "cu_seqlens_k_new of sequence 0 is 4; it may be at most 3, new_length",
        );
        check_error(&KvCacheInputs::new(good), "cu_seqlens_k_new is missing; the problem has it switched on");
        check_error(
            &packed(good).with_rotary_seqlens(&[0; 3]),
            "rotary_seqlens was given; the problem has it switched off",
        );
        check_error(&packed(good.with_seqused_k(&[3, 8])), "cache_seqlens has 2 entries; the problem needs 3");
    }

    /// Random data is valid, and poison where a new key goes.
    #[test]
    fn random_data_is_valid() {
        let rotary = Rotary::new(RotaryStyle::Neox, 2, 12);
        for lengths in SequenceLengths::ALL {
            for seed in 0..20 {
                let problem = problem(Mask::None).with_rotary(rotary).with_rotary_seqlens(true).with_qk_norm(1e-6);
                let data = KvCacheData::random(&problem, lengths, seed);
                let (mut keys, mut values) = (data.key_cache.clone(), data.value_cache.clone());
                let mut outputs = Outputs::poisoned(&problem.attention);
                let outputs = KvCacheOutputs::new(&mut keys, &mut values, outputs.views_mut());
                assert_eq!(problem.validate_views(&data.inputs(), &outputs), Ok(()), "{lengths:?} {seed}");
                let strides = problem.attention.strides();
                let moves = problem.key_moves(&data.inputs());
                assert!(!moves.is_empty());
                for moved in moves {
                    assert!(data.key_cache.get(strides.key.row_start(moved.to.0, 0, moved.to.1)).is_nan());
                    assert!(!data.attention.key.get(problem.new_key.row_start(moved.from.0, 0, moved.from.1)).is_nan());
                }
                let crowded = KvCacheData::crowded(&problem, lengths, seed);
                let (mut keys, mut values) = (crowded.key_cache.clone(), crowded.value_cache.clone());
                let mut outputs = Outputs::poisoned(&problem.attention);
                let outputs = KvCacheOutputs::new(&mut keys, &mut values, outputs.views_mut());
                let refusal = problem.validate_views(&crowded.inputs(), &outputs).map_err(|error| error.to_string());
                assert!(refusal.is_err_and(|error| !error.contains("cu_seqlens")), "{lengths:?} {seed}");
            }
        }
    }
}
