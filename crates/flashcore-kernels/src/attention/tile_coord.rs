//! Tile coordinates and context: the query rows, head and batch that a CTA works on, and where their operands lie.

use core::f32::consts::LOG2_E;

use flashcore_ir::types::{F32, S32, U32, U64};
use flashcore_ir::{Builder, GlobalAddress, Reg, SpecialRegister};
use flashcore_problem::{DType, Operand};

use crate::parameters::{Parameters, TileParameters};
use crate::primitives::{
    AddedTerm, BiasTerms, BoundExpression, ExpressionCode, ExpressionTables, GlobalRows, KeyMask, LaneScores,
    PackedHeads, ScoreBlock, ScorePositions, ScoreTerms, TensorRows, Window,
};
use crate::specialization::Specialization;

/// Coordinates of a tile of query rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileCoord {
    pub(crate) first_row: Reg<U32>,
    /// The query head.
    pub(crate) head: Reg<U32>,
    pub(crate) kv_head: Reg<U32>,
    pub(crate) batch: Reg<U32>,
}

/// Source of the tile coordinates of a CTA whose grid is by tile, head and batch, or that is persistent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TileSource {
    /// The grid: one tile for each CTA.
    Grid,
    /// The grid, which has a CTA for each tile and each split of its keys.
    SplitGrid { num_splits: Reg<U32> },
    /// A linear index, of a persistent CTA that loops over tiles.
    Persistent { index: Reg<U32>, parameters: TileParameters },
}

/// Tile context: one tile of query rows, with the parameters and the specialization of the kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileContext {
    pub(crate) parameters: Parameters,
    pub(crate) specialization: Specialization,
    /// The first query row of the tile.
    pub(crate) first_row: Reg<U32>,
    /// One past the last query row there is, in this tile or after it.
    pub(crate) end_row: Reg<U32>,
    /// The sequence, as bias and expressions see it.
    pub(crate) batch: Reg<U64>,
    /// The rows and keys of the sequence.
    pub(crate) sequence: SequencePlace,
    /// The query head; with `pack_gqa`, the first of its group.
    pub(crate) head: Reg<U64>,
    /// The number of query heads, where it is not the size of the grid.
    pub(crate) heads: Option<Reg<U32>>,
    pub(crate) kv_head: Reg<U64>,
    /// With `pack_gqa`, the query heads of a KV head. Their rows alternate: the first row of each, then the second.
    pub(crate) packed: Option<Reg<U32>>,
    /// The keys of the batch.
    pub(crate) key_length: Reg<S32>,
    /// The position of query row 0 among the keys.
    pub(crate) causal_offset: Reg<S32>,
}

/// Place and lengths of a sequence, clamped so that nothing outside the tensors is touched whatever the device arrays
/// hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SequencePlace {
    /// The query rows of the sequence.
    pub(crate) query_length: Reg<U32>,
    /// The first of them among those of all sequences, where they are packed.
    pub(crate) first_row: Option<Reg<U32>>,
    /// The keys of the sequence.
    pub(crate) key_length: Reg<S32>,
    /// The first of them: after padding, and after those of the sequences before where they are packed.
    pub(crate) first_key: Option<Reg<U32>>,
    /// The batch of the cache, or the row of the page table; `None` where all keys are packed into one.
    pub(crate) cache_batch: Option<Reg<U64>>,
    /// The last keys, where they are new: they lie in tensors of their own, and are appended by this launch.
    pub(crate) new_keys: Option<NewKeys>,
}

/// New keys of a sequence, which the launch appends to its cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewKeys {
    /// Rows of the cache in use before the append, padding included.
    pub(crate) cached: Reg<U32>,
    /// The same as it is on the device, however large: positions start there, where nothing else says.
    pub(crate) cache_seqlen: Reg<U32>,
    /// The number of new keys.
    pub(crate) count: Reg<U32>,
    /// The first new key among those of all sequences, where they are packed.
    pub(crate) first_row: Option<Reg<U32>>,
    /// The index of the first new key among the keys of the sequence; below 0 where padding reaches into the new keys.
    pub(crate) first_key: Reg<S32>,
}

impl NewKeys {
    /// The new keys of a sequence; the first key is that of a cache without padding.
    fn load(k: &mut Builder, parameters: &Parameters, entries: SequenceEntries) -> Option<Self> {
        let (append, p) = (entries.specialization.append?, parameters.append?);
        let cache_seqlen = entries.entry(k, Operand::SequsedK, parameters.seqused_k)?;
        let packed = append.packed_new.then(|| {
            let address = k.mad(entries.batch, 4u64, p.cu_seqlens_k_new);
            let begin = k.load_one::<U32>(address);
            let end = k.load_one::<U32>(GlobalAddress::from(address).plus(4));
            let begin = k.min(begin, p.new_rows);
            // Offsets that fall give no rows.
            let length = k.eval((end.min(p.new_rows).max(begin) - begin).min(p.new_length));
            (begin, length)
        });
        let cached = k.min(cache_seqlen, p.cache_length);
        Some(Self {
            cached,
            cache_seqlen,
            count: packed.map_or(p.new_length, |(_, length)| length),
            first_row: packed.map(|(begin, _)| begin),
            first_key: k.reinterpret(cached),
        })
    }

    /// Keys of the sequence after the append, without those that there is no room for.
    fn key_length(&self, k: &mut Builder, cache_length: Reg<U32>) -> Reg<U32> {
        // Both are below 2^31.
        k.eval((self.cached + self.count).min(cache_length))
    }
}

impl SequencePlace {
    /// The first query row of a sequence, where rows are packed, and their number.
    pub(crate) fn query_rows(
        k: &mut Builder,
        parameters: &Parameters,
        specialization: Specialization,
        batch: Reg<U64>,
    ) -> (Option<Reg<U32>>, Reg<U32>) {
        let entries = SequenceEntries { specialization, batch };
        let queries = entries.offsets(k, Operand::CuSeqlensQ, parameters.cu_seqlens_q, parameters.query_rows);
        let used = entries.entry(k, Operand::SequsedQ, parameters.seqused_q);
        let mut query_length = parameters.query_length;
        for length in queries.map(|(_, length)| length).into_iter().chain(used) {
            query_length = k.min(query_length, length);
        }
        (queries.map(|(begin, _)| begin), query_length)
    }

    fn load(k: &mut Builder, parameters: &Parameters, specialization: Specialization, batch: Reg<U64>) -> Self {
        let entries = SequenceEntries { specialization, batch };
        let (first_row, query_length) = Self::query_rows(k, parameters, specialization, batch);
        let keys = entries.offsets(k, Operand::CuSeqlensK, parameters.cu_seqlens_k, parameters.total_k);
        let mut new_keys = NewKeys::load(k, parameters, entries);
        let used = match (new_keys, parameters.append) {
            (Some(new_keys), Some(append)) => Some(new_keys.key_length(k, append.cache_length)),
            _ => entries.entry(k, Operand::SequsedK, parameters.seqused_k),
        };
        let mut key_length = parameters.key_length;
        for length in keys.map(|(_, length)| length).into_iter().chain(used) {
            key_length = k.min(length, key_length);
        }
        let mut first_key = keys.map(|(begin, _)| begin);
        if let Some(padding) = entries.entry(k, Operand::LeftpadK, parameters.leftpad_k) {
            let padding = k.min(padding, key_length);
            key_length = k.sub(key_length, padding);
            if let Some(new_keys) = &mut new_keys {
                new_keys.first_key = k.eval(new_keys.first_key - padding.signed());
            }
            first_key = Some(first_key.map_or(padding, |first| k.add(first, padding)));
        }
        let cache_batch = entries.entry(k, Operand::KvBatchIdx, parameters.kv_batch_idx).map(|index| {
            let index = k.min(index, parameters.last_cache_batch);
            k.widen(index)
        });
        Self {
            query_length,
            first_row,
            key_length: k.reinterpret(key_length),
            first_key,
            cache_batch: if keys.is_some() { None } else { Some(cache_batch.unwrap_or(batch)) },
            new_keys,
        }
    }
}

/// Entries of one sequence in the device arrays of a launch.
#[derive(Clone, Copy)]
struct SequenceEntries {
    specialization: Specialization,
    batch: Reg<U64>,
}

impl SequenceEntries {
    /// The entry in an array of one per sequence, where there is that array.
    fn entry(self, k: &mut Builder, operand: Operand, array: Reg<U64>) -> Option<Reg<U32>> {
        self.specialization.has(operand).then(|| {
            let address = k.mad(self.batch, 4u64, array);
            k.load_one::<U32>(address)
        })
    }

    /// Offset and length in an array of offsets, where there is that array; both within `total` rows.
    fn offsets(
        self,
        k: &mut Builder,
        operand: Operand,
        array: Reg<U64>,
        total: Reg<U32>,
    ) -> Option<(Reg<U32>, Reg<U32>)> {
        self.specialization.has(operand).then(|| {
            let address = k.mad(self.batch, 4u64, array);
            let begin = k.load_one::<U32>(address);
            let end = k.load_one::<U32>(GlobalAddress::from(address).plus(4));
            let begin = k.min(begin, total);
            // Offsets that fall give no rows: those of other sequences are not written.
            let length = k.eval(end.min(total).max(begin) - begin);
            (begin, length)
        })
    }
}

impl SequencePlace {
    /// TMA coordinates of rows of query or output, given those of the same rows of a sequence that is a batch.
    pub(crate) fn place_rows(&self, k: &mut Builder, rows: TensorRows) -> TensorRows {
        match self.first_row {
            Some(first) => TensorRows { row: k.eval(rows.row + first.signed()), batch: k.copy(0i32), ..rows },
            None => rows,
        }
    }
}

impl TileContext {
    /// The context of this CTA, which has `tile_m` rows of one head by its place in the grid.
    pub(crate) fn of_grid(k: &mut Builder, specialization: Specialization, tile_m: u32) -> Self {
        let parameters = Parameters::load(k, specialization);
        Self::new(k, &parameters, specialization, tile_m, TileSource::Grid, false)
    }

    /// The context of a tile of `tile_m` rows.
    pub(crate) fn new(
        k: &mut Builder,
        parameters: &Parameters,
        specialization: Specialization,
        tile_m: u32,
        source: TileSource,
        pack_gqa: bool,
    ) -> Self {
        let (mut tile, tiles, persistent) = match source {
            TileSource::Grid => (k.special(SpecialRegister::CtaX), None, None),
            TileSource::SplitGrid { num_splits } => {
                let cta = k.special(SpecialRegister::CtaX);
                let ctas = k.special(SpecialRegister::GridX);
                (k.div(cta, num_splits), Some(k.div(ctas, num_splits)), None)
            }
            TileSource::Persistent { index, parameters: TileParameters { tiles, heads, .. } } => {
                let matrix = k.div(index, tiles);
                let head_and_batch = (k.rem(matrix, heads), k.div(matrix, heads), heads);
                (k.rem(index, tiles), Some(tiles), Some(head_and_batch))
            }
        };
        if specialization.right {
            // LPT order: the last rows attend most keys, and come first, so that CTAs end together.
            let tiles = tiles.unwrap_or_else(|| k.special(SpecialRegister::GridX));
            tile = k.eval(tiles - 1 - tile);
        }
        let first_row = k.mul(tile, tile_m);
        let head = persistent.map_or_else(|| k.special(SpecialRegister::CtaY), |(head, _, _)| head);
        let group = parameters.heads_per_key_head;
        let (head, kv_head, packed) =
            if pack_gqa { (k.mul(head, group), head, Some(group)) } else { (head, k.div(head, group), None) };
        let batch = persistent.map_or_else(|| k.special(SpecialRegister::CtaZ), |(_, batch, _)| batch);
        let heads = persistent.map(|(_, _, heads)| heads);
        let context = Self::at(k, parameters, specialization, TileCoord { first_row, head, kv_head, batch }, heads);
        context.with_packed_heads(k, packed)
    }

    /// The context of a tile of the rows of all query heads of a key head (`pack_gqa`), of which the context has the first.
    pub(crate) fn with_packed_heads(self, k: &mut Builder, group: Option<Reg<U32>>) -> Self {
        let end_row = group.map_or(self.end_row, |group| k.mul(self.end_row, group));
        Self { end_row, packed: group, ..self }
    }

    /// The context of the tile of one head at `coord`. `heads` is the number of query heads, unless the grid has it.
    pub(crate) fn at(
        k: &mut Builder,
        parameters: &Parameters,
        specialization: Specialization,
        coord: TileCoord,
        heads: Option<Reg<U32>>,
    ) -> Self {
        let TileCoord { first_row, head, kv_head, batch } = coord;
        let (batch, head, kv_head) = (k.widen(batch), k.widen(head), k.widen(kv_head));
        let sequence = SequencePlace::load(k, parameters, specialization, batch);
        let SequencePlace { query_length, key_length, .. } = sequence;
        let mut causal_offset = parameters.position_offset;
        if specialization.has_key_lengths() || specialization.has_query_lengths() {
            causal_offset = k.mad(key_length, parameters.position_per_key, causal_offset);
        }
        if specialization.has_query_lengths() {
            let fewer = k.eval(query_length.signed() * parameters.position_per_key);
            causal_offset = k.sub(causal_offset, fewer);
        }
        let context = Self {
            parameters: *parameters,
            specialization,
            first_row,
            end_row: query_length,
            batch,
            sequence,
            head,
            heads,
            kv_head,
            packed: None,
            key_length,
            causal_offset,
        };
        if !(specialization.right && specialization.is_ragged()) {
            return context;
        }
        // Keys that no row of the sequence attends may hold anything: under a top-left mask there may be some at the end.
        let last_row = k.eval(query_length.max(1) - 1);
        let key_length = context.end_key(k, last_row);
        Self { key_length, ..context }
    }

    /// The query rows of the tile.
    pub(crate) fn query(&self, k: &mut Builder) -> GlobalRows {
        let Parameters { query, query_batch_stride, query_head_stride, query_row_stride: stride, .. } = self.parameters;
        let head = self.query_head(k, query, query_batch_stride, query_head_stride, stride);
        self.tile_rows(k, head, stride, query_head_stride, self.specialization.head_dim)
    }

    /// The output rows of the tile.
    pub(crate) fn output(&self, k: &mut Builder) -> GlobalRows {
        let Parameters { output, output_batch_stride, output_head_stride, output_row_stride: stride, .. } =
            self.parameters;
        let head = self.query_head(k, output, output_batch_stride, output_head_stride, stride);
        self.tile_rows(k, head, stride, output_head_stride, self.specialization.value_dim)
    }

    /// The address of row 0 of this sequence and head in query or output.
    fn query_head(
        &self,
        k: &mut Builder,
        tensor: Reg<U64>,
        batch_stride: Reg<U64>,
        head_stride: Reg<U64>,
        row_stride: Reg<U64>,
    ) -> Reg<U64> {
        match self.sequence.first_row {
            Some(first) => k.eval(self.head.mul_add(head_stride, first.widen().mul_add(row_stride, tensor))),
            None => self.matrix(k, tensor, batch_stride, head_stride, self.head),
        }
    }

    /// The address of a head of this batch in a tensor.
    pub(crate) fn matrix(
        &self,
        k: &mut Builder,
        tensor: Reg<U64>,
        batch_stride: Reg<U64>,
        head_stride: Reg<U64>,
        head: Reg<U64>,
    ) -> Reg<U64> {
        k.eval(head.mul_add(head_stride, self.batch.mul_add(batch_stride, tensor)))
    }

    fn tile_rows(
        &self,
        k: &mut Builder,
        head: Reg<U64>,
        stride: Reg<U64>,
        head_stride: Reg<U64>,
        columns: u32,
    ) -> GlobalRows {
        if let Some(group) = self.packed {
            let packed = PackedHeads { group, head_stride, first_row: self.first_row };
            return GlobalRows { packed: Some(packed), ..self.rows(head, stride, columns) };
        }
        let first = k.eval(self.first_row.widen().mul_add(stride, head));
        self.rows(first, stride, columns)
    }

    /// Rows from an address on.
    pub(crate) const fn rows(&self, first: Reg<U64>, stride: Reg<U64>, columns: u32) -> GlobalRows {
        GlobalRows { first, stride, columns, vec_bytes: self.specialization.vec_bytes, packed: None, paged: None }
    }

    /// The index of a row of the tile among the rows of all heads and batches.
    pub(crate) fn global_row(&self, k: &mut Builder, row: Reg<U32>) -> Reg<U64> {
        let heads = match (self.heads, self.packed) {
            (Some(heads), _) => heads,
            (None, None) => k.special(SpecialRegister::GridY),
            (None, Some(group)) => {
                let kv_heads = k.special(SpecialRegister::GridY);
                k.mul(kv_heads, group)
            }
        };
        let heads = k.widen(heads);
        let (length, matrix) = if self.sequence.first_row.is_some() {
            (k.widen(self.parameters.query_rows), self.head)
        } else {
            let length = k.widen(self.parameters.query_length);
            (length, k.mad(self.batch, heads, self.head))
        };
        let (matrix, row) = match self.packed {
            None => (matrix, row),
            Some(group) => {
                let head = k.eval((row % group).widen());
                (k.add(matrix, head), k.div(row, group))
            }
        };
        let row = self.sequence.first_row.map_or(row, |first| k.add(row, first));
        k.eval(matrix.mul_add(length, row.widen()))
    }

    /// The address of the LSE of a row.
    pub(crate) fn lse_address(&self, k: &mut Builder, row: Reg<U32>) -> Reg<U64> {
        let index = self.global_row(k, row);
        k.mad(index, 4u64, self.parameters.lse)
    }

    /// The keys that the query rows attend.
    pub(crate) fn window(&self) -> Window {
        let Self { parameters, specialization, .. } = self;
        Window {
            offset: self.causal_offset,
            packed: self.packed,
            before: specialization.left.then_some(parameters.window_left),
            after: specialization.right.then_some(parameters.window_right),
            length: self.key_length,
        }
    }

    /// The position of a query row among the keys.
    pub(crate) fn position(&self, k: &mut Builder, row: Reg<U32>) -> Reg<S32> {
        self.window().position(k, row)
    }

    /// The first key that a query row attends.
    pub(crate) fn first_key(&self, k: &mut Builder, row: Reg<U32>) -> Reg<S32> {
        self.window().first(k, row)
    }

    /// One past the last key that a query row attends; never before the first.
    pub(crate) fn end_key(&self, k: &mut Builder, row: Reg<U32>) -> Reg<S32> {
        self.window().end(k, row)
    }

    /// The entry of the query head in an array of one `f32` per head.
    fn head_value(&self, k: &mut Builder, array: Reg<U64>) -> Reg<F32> {
        let address = k.mad(self.head, 4u64, array);
        k.load_one::<F32>(address)
    }

    /// The attention sink of the head in base 2, where there is one.
    pub(crate) fn sink(&self, k: &mut Builder) -> Option<Reg<F32>> {
        self.specialization.has(Operand::Sinks).then(|| {
            let sink = self.head_value(k, self.parameters.sinks);
            k.mul(sink, LOG2_E)
        })
    }

    /// The code of an expression for `rows` rows of a lane, from `row` on.
    pub(crate) fn expression(
        &self,
        k: &mut Builder,
        expression: BoundExpression,
        row: Reg<U32>,
        rows: usize,
    ) -> ExpressionCode {
        k.section("expression", |k| {
            let parameters = self.parameters;
            let tables = ExpressionTables {
                numbers: (parameters.aux_f32, parameters.last_aux_f32),
                integers: (parameters.aux_i32, parameters.last_aux_i32),
            };
            let [batch, head] = [self.batch, self.head].map(|index| k.truncate(index));
            let [batch, head, query] = [batch, head, row].map(|index| k.reinterpret::<U32, S32>(index));
            let exact = self.specialization.dtype == DType::F32;
            ExpressionCode::new(k, expression, tables, LaneScores { batch, head, query }, rows, exact)
        })
    }

    /// The term of a `score_mod` that only adds one to scores that are otherwise only scaled.
    pub(crate) fn added_term(&self, k: &mut Builder, row: Reg<U32>, rows: usize) -> Option<AddedTerm> {
        let score_mod = self.parameters.score_mod.filter(|_| self.specialization.only_adds())?;
        let code = self.expression(k, score_mod, row, rows);
        Some(AddedTerm { code, inverse_scale: self.parameters.inverse_scale })
    }

    /// The block of scores of the tile's rows and the keys from `first_key` on.
    pub(crate) fn score_block(&self, k: &mut Builder, rows: u32, first_key: Reg<S32>, keys: u32) -> ScoreBlock {
        let first_row = k.reinterpret::<U32, S32>(self.first_row);
        let rows_interval = [first_row, k.add(first_row, rows as i32 - 1)];
        let keys_interval = [first_key, k.add(first_key, keys as i32 - 1)];
        ScoreBlock { rows: rows_interval, max_rows: rows, keys: keys_interval, max_keys: keys }
    }

    /// The code of the `mask_mod`, where there is one.
    pub(crate) fn mask_mod(&self, k: &mut Builder, row: Reg<U32>, rows: usize) -> Option<ExpressionCode> {
        self.parameters.mask_mod.map(|mask_mod| self.expression(k, mask_mod, row, rows))
    }

    /// The score terms of `rows` rows of a lane, from `row` on.
    pub(crate) fn score_terms(&self, k: &mut Builder, row: Reg<U32>, rows: usize) -> ScoreTerms {
        let parameters = self.parameters;
        let specialization = self.specialization;
        ScoreTerms {
            scale: parameters.scale_log2,
            softcap: specialization.softcap.then_some(parameters.softcap_log2),
            scale_rest: (specialization.dtype == DType::F32).then_some(parameters.scale_log2_rest),
            slope: specialization.has(Operand::AlibiSlopes).then(|| {
                let slope = self.head_value(k, parameters.alibi_slopes);
                k.mul(slope, -LOG2_E)
            }),
            bias: specialization.has(Operand::Bias).then(|| {
                let Parameters { bias, bias_batch_stride, bias_head_stride, .. } = parameters;
                let first = self.matrix(k, bias, bias_batch_stride, bias_head_stride, self.head);
                BiasTerms { first, row_stride: parameters.bias_row_stride, key_stride: parameters.bias_key_stride }
            }),
            expression: parameters.score_mod.map(|score_mod| self.expression(k, score_mod, row, rows)),
        }
    }

    /// The positions of the scores of a lane with `member` in its fragments. `rows` gives its query rows, clamped to the
    /// last, and the position of the first.
    pub(crate) fn score_positions(
        &self,
        k: &mut Builder,
        member: Reg<U32>,
        rows: impl FnOnce(&mut Builder, Reg<U32>) -> (Vec<Reg<U32>>, Reg<S32>),
    ) -> ScorePositions {
        let column = k.eval((member << 1).signed());
        let last_row = k.sub(self.end_row, 1u32);
        let (rows, position) = rows(k, last_row);
        let last_key = k.sub(self.key_length, 1i32);
        ScorePositions { rows, position, column, last_key }
    }

    /// The mask of the keys that the rows of a lane attend. `others` are the positions of all rows but the first, where
    /// these are not as far apart as in a fragment.
    pub(crate) fn key_mask(&self, positions: &ScorePositions, others: Vec<Reg<S32>>) -> KeyMask {
        let Window { before: left, after: right, length: key_length, .. } = self.window();
        let ScorePositions { position, column, .. } = *positions;
        KeyMask { position, others, column, left, right, key_length, rows: positions.rows.len() as u32 }
    }
}
