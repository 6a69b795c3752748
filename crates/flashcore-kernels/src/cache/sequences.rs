//! Append kernel by sequence: new keys and values follow the rows that each sequence uses, with QK-norm and rotary
//! embedding of query and new keys on the way, and the lengths after the append for the attention that comes next.
//!
//! The parts of the grid are those of the append by slot, and one more, a thread for each sequence, that writes lengths.
//! Where rows are packed, a binary search over the offsets finds the sequence of a row. All arrays are looked at when the
//! kernel runs: a new key that has no row in the cache is skipped.

use flashcore_ir::types::{F32, Pred, S32, U32, U64};
use flashcore_ir::{Argument, Builder, Compare, GlobalAddress, Kernel, Reg, SpecialRegister};
use flashcore_problem::{KvCacheProblem, Operand, Problem, Strides};

use super::quantize::{self, CachePlace, Quantizers};
use super::rotary_rows::{Norm, Tables};
use super::rows::{LaneRow, Pass, Placement, RowTarget, cache_address, ctas, page_and_row};
use super::spec::{AppendSpec, SequenceSpec, THREADS};
use crate::bindings::{Place, Word};
use crate::launch_plan::{Between, KernelLaunch, LaunchPlan};
use crate::spec::{KernelKey, KernelSpec};
use crate::target::Target;
use crate::unsupported::Reason;

operation_parameters! {
    launch {
        new_key,
        new_value,
        key_cache,
        value_cache,
        query,
        query_output,
        cos,
        sin,
        query_norm,
        key_norm,
        cache_seqlens,
        cu_seqlens_q,
        cu_seqlens_k_new,
        rotary_seqlens,
        kv_batch_idx,
        page_table,
        lengths,
    }
    plan {
        query_batch_stride: U64,
        query_row_stride: U64,
        query_head_stride: U64,
        query_output_batch_stride: U64,
        query_output_row_stride: U64,
        query_output_head_stride: U64,
        new_key_batch_stride: U64,
        new_key_row_stride: U64,
        new_key_head_stride: U64,
        new_value_batch_stride: U64,
        new_value_row_stride: U64,
        new_value_head_stride: U64,
        key_cache_page_stride: U64,
        key_cache_row_stride: U64,
        key_cache_head_stride: U64,
        value_cache_page_stride: U64,
        value_cache_row_stride: U64,
        value_cache_head_stride: U64,
        table_stride: U64,
        page_table_stride: U64,
        batch: U32,
        // Of the binary search: the largest power of two below the batch.
        first_step: U32,
        query_heads: U32,
        query_rows: U32,
        query_length: U32,
        key_heads: U32,
        new_rows: U32,
        new_length: U32,
        key_length: U32,
        page_size: U32,
        num_pages: U32,
        cache_batches: U32,
        last_position: U32,
        eps: F32,
    }
}

/// Alignment of the parts of a workspace.
pub(crate) const PART_ALIGNMENT: u64 = 256;

impl LaunchPlan {
    /// Attention with a growing cache in two steps, an append by sequence and this plan of the attention
    /// ([`KvCacheProblem::attended`]) if there is anything to attend, or every reason against it. The append leaves the
    /// rotated query and the lengths after it in the workspace.
    pub fn kv_cache(
        problem: &KvCacheProblem,
        attention: Option<Self>,
        target: impl Into<Target>,
    ) -> Result<Self, Vec<Reason>> {
        let errors = problem.errors();
        if !errors.is_empty() {
            return Err(errors.into_iter().map(Reason::from).collect());
        }
        let (spec, target) = (AppendSpec::of_sequences(problem), target.into());
        quantize::reason(&problem.append(0), spec, target.arch)?;
        let attended = problem.attended();
        let lengths = attention.as_ref().map_or(0, |plan| plan.workspace_bytes).next_multiple_of(PART_ALIGNMENT);
        let query = (lengths + attended.batch as u64 * 4).next_multiple_of(PART_ALIGNMENT);
        let extent = attended.strides().query.extent(attended.query_shape()).unwrap_or(0) as u64;
        let query_bytes = if problem.transforms() { extent * attended.dtype.size_bytes() as u64 } else { 0 };
        let between = Between { lengths, query };
        let [lengths, rotated] = [lengths, query].map(Place::in_workspace);
        let key = KernelKey { spec: KernelSpec::Append(spec), arch: target.arch };
        let mut launch = KernelLaunch::new(key, [grid(spec, problem), 1, 1]);
        launch.extend_with_words(quantize::words(&problem.append(0)));
        let words = Words {
            new_key: Word::address(Operand::NewKey),
            new_value: Word::address(Operand::NewValue),
            key_cache: Word::address(Operand::KeyCache),
            value_cache: Word::address(Operand::ValueCache),
            query: Word::address(Operand::Query),
            query_output: Word::address(rotated),
            cos: Word::address(Operand::Cos),
            sin: Word::address(Operand::Sin),
            query_norm: Word::address(Operand::QueryNorm),
            key_norm: Word::address(Operand::KeyNorm),
            cache_seqlens: Word::address(Operand::SequsedK),
            cu_seqlens_q: Word::address(Operand::CuSeqlensQ),
            cu_seqlens_k_new: Word::address(Operand::CuSeqlensKNew),
            rotary_seqlens: Word::address(Operand::RotarySeqlens),
            kv_batch_idx: Word::address(Operand::KvBatchIdx),
            page_table: Word::address(Operand::PageTable),
            lengths: Word::address(lengths),
        };
        launch.extend_with_words(words.list());
        launch.extend(arguments(problem));
        let [key_cache, value_cache] = spec.cache_alignments();
        let caches = [(Operand::KeyCache, key_cache), (Operand::ValueCache, value_cache)];
        let alignments = spec.alignments().into_iter().chain(caches).collect();
        let mut plan = Self::of_operation(vec![launch], alignments, target)?;
        plan.workspace_bytes = query + query_bytes;
        plan.between = Some(between);
        if let Some(attention) = attention {
            let mut attention = attention.on_caches().moved(Operand::SequsedK, lengths);
            if problem.transforms() {
                attention = attention.moved(Operand::Query, rotated);
            }
            plan.config = attention.config;
            plan.launches.extend(attention.launches);
            plan.alignments.extend(attention.alignments);
        }
        Ok(plan)
    }

    /// The plan of attention whose keys and values are the caches that an append writes.
    pub(super) fn on_caches(self) -> Self {
        self.moved(Operand::Key, Operand::KeyCache).moved(Operand::Value, Operand::ValueCache)
    }
}

/// Rows of query and of new keys, without heads.
fn rows(problem: &KvCacheProblem) -> [usize; 2] {
    [problem.attention.query_shape(), problem.new_key_shape()].map(|shape| shape.batch * shape.rows)
}

fn grid(spec: AppendSpec, problem: &KvCacheProblem) -> u32 {
    if problem.attention.batch == 0 {
        return 0;
    }
    let [queries, keys] = rows(problem);
    let (queries, keys) = (queries * problem.attention.query_heads, (keys * problem.attention.key_heads) as u32);
    let queries = if spec.query { queries as u32 } else { 0 };
    let (key_rows, value_rows) = (spec.key_rows(), spec.value_rows());
    let lengths = (problem.attention.batch as u32).div_ceil(THREADS);
    key_rows.ctas(queries) + key_rows.ctas(keys) + value_rows.ctas(keys) + lengths
}

fn arguments(problem: &KvCacheProblem) -> Vec<Argument> {
    let element = problem.attention.dtype.size_bytes() as u64;
    let bytes = |strides: Strides, element: u64| {
        [strides.batch, strides.row, strides.head].map(|stride| Argument::U64(stride as u64 * element))
    };
    let cache_element = problem.attention.dtypes().key_value.size_bytes() as u64;
    let strides = problem.attention.strides();
    let attended = problem.attended().strides();
    let (Problem { batch, query_heads, query_length, key_heads, key_length, .. }, caches) =
        (&problem.attention, problem.attention.key_shape());
    let mut arguments = Vec::new();
    let tensors = [strides.query, attended.query, problem.new_key, problem.new_value];
    arguments.extend(tensors.into_iter().flat_map(|strides| bytes(strides, element)));
    arguments.extend([strides.key, strides.value].into_iter().flat_map(|strides| bytes(strides, cache_element)));
    let table_element = problem.append(0).table_dtype().size_bytes();
    let table_stride = problem.rotary.map_or(0, |rotary| rotary.table_stride * table_element);
    let page_table_stride = problem.attention.paged.map_or(0, |paged| paged.table_stride * size_of::<i32>());
    arguments.extend([table_stride, page_table_stride].map(|stride| Argument::U64(stride as u64)));
    let [query_rows, new_rows] = rows(problem);
    let first_step = batch.next_power_of_two() / 2;
    let last_position = problem.rotary.map_or(0, |rotary| rotary.max_position - 1);
    let sizes = [
        *batch,
        first_step,
        *query_heads,
        query_rows,
        *query_length,
        *key_heads,
        new_rows,
        problem.new_length,
        *key_length,
        caches.rows,
        caches.batch,
        problem.attention.cache_batches(),
        last_position,
    ];
    arguments.extend(sizes.map(|size| Argument::U32(size as u32)));
    arguments.push(Argument::F32(problem.qk_norm.map_or(0.0, |norm| norm.eps)));
    arguments
}

/// Writes the kernel.
pub(super) fn kernel(spec: AppendSpec, sequences: SequenceSpec) -> Kernel {
    let mut builder = Builder::new(spec.name(), THREADS);
    let k = &mut builder;
    let quantizers = Quantizers::load(k, spec.quantize);
    let p = Parameters::load(k);
    let cta = k.special(SpecialRegister::CtaX);
    let (key_rows, value_rows) = (spec.key_rows(), spec.value_rows());
    let keys = k.mul(p.new_rows, p.key_heads);
    let tables = Tables { cos: p.cos, sin: p.sin, stride: p.table_stride };
    let pass = |shape, first_cta, heads, rows, transforms, norm, quantize| Pass {
        shape,
        first_cta,
        heads,
        rows,
        unwritten: None,
        transforms,
        norm,
        tables,
        quantize,
    };
    let mut first_cta = k.copy(0u32);
    if spec.query {
        let queries = k.mul(p.query_rows, p.query_heads);
        let query_ctas = ctas(k, key_rows, queries);
        let is_query = k.compare(Compare::Lt, cta, query_ctas);
        k.if_uniform(is_query, |k| {
            k.section("query", |k| {
                let norm = spec.qk_norm.then_some(Norm { weights: p.query_norm, eps: p.eps });
                let rows = QueryRows { p: &p, sequences };
                pass(key_rows, first_cta, p.query_heads, queries, true, norm, None).write(k, cta, &rows);
            });
        });
        first_cta = query_ctas;
    }
    let key_ctas = ctas(k, key_rows, keys);
    let first_value_cta = k.add(first_cta, key_ctas);
    let value_ctas = ctas(k, value_rows, keys);
    let first_length_cta = k.add(first_value_cta, value_ctas);
    let is_between = |k: &mut Builder, first: Reg<U32>, end: Reg<U32>| {
        let from = k.compare(Compare::Ge, cta, first);
        let before = k.compare(Compare::Lt, cta, end);
        k.and(from, before)
    };
    let is_key = is_between(k, first_cta, first_value_cta);
    k.if_uniform(is_key, |k| {
        k.section("key", |k| {
            let norm = spec.qk_norm.then_some(Norm { weights: p.key_norm, eps: p.eps });
            let rows = NewRows {
                p: &p,
                sequences,
                source: (p.new_key, [p.new_key_batch_stride, p.new_key_row_stride, p.new_key_head_stride]),
                cache: (p.key_cache, [p.key_cache_page_stride, p.key_cache_row_stride, p.key_cache_head_stride]),
            };
            pass(key_rows, first_cta, p.key_heads, keys, spec.transforms(), norm, quantizers.key).write(k, cta, &rows);
        });
    });
    let is_value = is_between(k, first_value_cta, first_length_cta);
    k.if_uniform(is_value, |k| {
        k.section("value", |k| {
            let rows = NewRows {
                p: &p,
                sequences,
                source: (p.new_value, [p.new_value_batch_stride, p.new_value_row_stride, p.new_value_head_stride]),
                cache: (
                    p.value_cache,
                    [p.value_cache_page_stride, p.value_cache_row_stride, p.value_cache_head_stride],
                ),
            };
            pass(value_rows, first_value_cta, p.key_heads, keys, false, None, quantizers.value).write(k, cta, &rows);
        });
    });
    let is_length = k.compare(Compare::Ge, cta, first_length_cta);
    k.if_uniform(is_length, |k| k.section("lengths", |k| write_length(k, &p, sequences, cta, first_length_cta)));
    builder.finish()
}

/// Writes the rows that the sequence of this thread uses after the append.
fn write_length(k: &mut Builder, p: &Parameters, spec: SequenceSpec, cta: Reg<U32>, first_cta: Reg<U32>) {
    let thread = k.special(SpecialRegister::ThreadX);
    let cta = k.sub(cta, first_cta);
    let sequence = k.mad(cta, THREADS, thread);
    let exists = k.compare(Compare::Lt, sequence, p.batch);
    k.if_then(exists, |k| {
        let mut new = p.new_length;
        if spec.packed_new {
            let (begin, end) = offsets(k, p.cu_seqlens_k_new, sequence, p.new_rows);
            new = k.sub(end, begin);
            new = k.min(new, p.new_length);
        }
        let address = k.mad_wide(sequence, 4u32, p.cache_seqlens);
        let length = k.load_one::<U32>(address);
        let length = k.min(length, p.key_length);
        // Both are below 2^31.
        let length = k.add(length, new);
        let length = k.min(length, p.key_length);
        let address = k.mad_wide(sequence, 4u32, p.lengths);
        k.store_one(address, length);
    });
}

/// Where the packed rows of a sequence begin and end, within `total` rows; offsets that fall give no rows.
fn offsets(k: &mut Builder, array: Reg<U64>, sequence: Reg<U32>, total: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
    let address = k.mad_wide(sequence, 4u32, array);
    let begin = k.load_one::<U32>(address);
    let end = k.load_one::<U32>(GlobalAddress::from(address).plus(4));
    let begin = k.min(begin, total);
    let end = k.min(end, total);
    (begin, k.max(begin, end))
}

/// A row of a sequence.
struct SequenceRow {
    sequence: Reg<U32>,
    /// Index among the rows of the sequence.
    index: Reg<U32>,
    /// True if the sequence has it; `None` where it always does.
    exists: Option<Reg<Pred>>,
}

impl SequenceRow {
    /// The row of a rectangular batch, `length` for each sequence.
    fn rectangular(k: &mut Builder, row: Reg<U32>, length: Reg<U32>) -> Self {
        let (sequence, index) = page_and_row(k, row, length);
        Self { sequence, index, exists: None }
    }

    /// The row among `total` packed ones: the last sequence that begins at it or before. Sequences have at most `length`.
    fn packed(
        k: &mut Builder,
        p: &Parameters,
        offsets_of: Reg<U64>,
        row: Reg<U32>,
        [total, length]: [Reg<U32>; 2],
    ) -> Self {
        let sequence = k.copy(0u32);
        let step = k.copy(p.first_step);
        let last = k.sub(p.batch, 1u32);
        k.while_uniform(
            |k| k.compare(Compare::Gt, step, 0u32),
            |k| {
                let candidate = k.add(sequence, step);
                let is_sequence = k.compare(Compare::Lt, candidate, p.batch);
                let looked_at = k.min(candidate, last);
                let address = k.mad_wide(looked_at, 4u32, offsets_of);
                let begin = k.load_one::<U32>(address);
                let has_begun = k.compare(Compare::Le, begin, row);
                let is_later = k.and(is_sequence, has_begun);
                k.set_where(sequence, is_later, candidate);
                let half = k.shr(step, 1u32);
                k.set(step, half);
            },
        );
        let (begin, end) = offsets(k, offsets_of, sequence, total);
        // Where the offsets are wrong and the row lies before its sequence, the index is large, and not below the length.
        let index = k.sub(row, begin);
        let before_end = k.compare(Compare::Lt, row, end);
        let is_bounded = k.compare(Compare::Lt, index, length);
        Self { sequence, index, exists: Some(k.and(before_end, is_bounded)) }
    }

    /// Position of a row so many after the first of its sequence, clamped into the tables.
    fn position(&self, k: &mut Builder, p: &Parameters, spec: SequenceSpec, is_consecutive: bool) -> Reg<S32> {
        let starts = if spec.rotary_seqlens { p.rotary_seqlens } else { p.cache_seqlens };
        let address = k.mad_wide(self.sequence, 4u32, starts);
        let start = k.load_one::<U32>(address);
        let mut position = k.min(start, p.last_position);
        if is_consecutive {
            // Both are below 2^31.
            let index = k.min(self.index, p.last_position);
            position = k.add(position, index);
            position = k.min(position, p.last_position);
        }
        k.reinterpret(position)
    }

    /// Address of a head of the row, by batch, row and head strides; packed rows are one batch.
    fn address(&self, k: &mut Builder, row: &LaneRow, (tensor, strides): (Reg<U64>, [Reg<U64>; 3])) -> Reg<U64> {
        let place = if self.exists.is_some() { [k.copy(0u32), row.row] } else { [self.sequence, self.index] };
        cache_address(k, tensor, strides, place, row.head)
    }
}

/// Query rows, which go to the same place of another tensor.
struct QueryRows<'a> {
    p: &'a Parameters,
    sequences: SequenceSpec,
}

impl Placement for QueryRows<'_> {
    type Place = SequenceRow;

    fn find(&self, k: &mut Builder, row: &LaneRow) -> SequenceRow {
        let p = self.p;
        if self.sequences.packed_query {
            SequenceRow::packed(k, p, p.cu_seqlens_q, row.row, [p.query_rows, p.query_length])
        } else {
            SequenceRow::rectangular(k, row.row, p.query_length)
        }
    }

    fn source(&self, k: &mut Builder, row: &LaneRow, found: &SequenceRow) -> Reg<U64> {
        let p = self.p;
        found.address(k, row, (p.query, [p.query_batch_stride, p.query_row_stride, p.query_head_stride]))
    }

    fn target(&self, k: &mut Builder, row: &LaneRow, found: &SequenceRow) -> RowTarget {
        let p = self.p;
        let strides = [p.query_output_batch_stride, p.query_output_row_stride, p.query_output_head_stride];
        let address = found.address(k, row, (p.query_output, strides));
        let is_stored = found.exists.map_or(row.exists, |exists| k.and(row.exists, exists));
        RowTarget { address, is_stored, place: None }
    }

    fn position(&self, k: &mut Builder, _: &LaneRow, found: &SequenceRow) -> Reg<S32> {
        found.position(k, self.p, self.sequences, self.sequences.consecutive)
    }
}

/// New keys or values, which follow the rows that their sequence uses.
struct NewRows<'a> {
    p: &'a Parameters,
    sequences: SequenceSpec,
    /// Address, and batch, row and head strides.
    source: (Reg<U64>, [Reg<U64>; 3]),
    /// Address, and page, row and head strides.
    cache: (Reg<U64>, [Reg<U64>; 3]),
}

impl Placement for NewRows<'_> {
    type Place = SequenceRow;

    fn find(&self, k: &mut Builder, row: &LaneRow) -> SequenceRow {
        let p = self.p;
        if self.sequences.packed_new {
            SequenceRow::packed(k, p, p.cu_seqlens_k_new, row.row, [p.new_rows, p.new_length])
        } else {
            SequenceRow::rectangular(k, row.row, p.new_length)
        }
    }

    fn source(&self, k: &mut Builder, row: &LaneRow, found: &SequenceRow) -> Reg<U64> {
        found.address(k, row, self.source)
    }

    /// The row of the cache; one past the bound, on a page or in a batch that the cache does not have is not stored.
    fn target(&self, k: &mut Builder, row: &LaneRow, found: &SequenceRow) -> RowTarget {
        let p = self.p;
        let mut is_stored = found.exists.map_or(row.exists, |exists| k.and(row.exists, exists));
        let address = k.mad_wide(found.sequence, 4u32, p.cache_seqlens);
        let length = k.load_one::<U32>(address);
        let used = k.min(length, p.key_length);
        let room = k.sub(p.key_length, used);
        let has_room = k.compare(Compare::Lt, found.index, room);
        is_stored = k.and(is_stored, has_room);
        let cache_row = k.add(used, found.index);
        let mut cache_row = k.select(is_stored, cache_row, 0u32);
        let mut batch = found.sequence;
        if self.sequences.kv_batch {
            let address = k.mad_wide(found.sequence, 4u32, p.kv_batch_idx);
            let index = k.load_one::<U32>(address);
            let is_batch = k.compare(Compare::Lt, index, p.cache_batches);
            is_stored = k.and(is_stored, is_batch);
            batch = k.select(is_batch, index, 0u32);
        }
        if self.sequences.paged {
            let (entry, row_in_page) = page_and_row(k, cache_row, p.page_size);
            let batch_wide = k.widen(batch);
            let table_row = k.mad(batch_wide, p.page_table_stride, p.page_table);
            let address = k.mad_wide(entry, 4u32, table_row);
            // As an unsigned number, a negative page is past every cache.
            let page = k.load_one::<U32>(address);
            let is_page = k.compare(Compare::Lt, page, p.num_pages);
            is_stored = k.and(is_stored, is_page);
            (batch, cache_row) = (k.select(is_page, page, 0u32), row_in_page);
        }
        let (cache, strides) = self.cache;
        let address = cache_address(k, cache, strides, [batch, cache_row], row.head);
        let place = Some(CachePlace { sequence: Some(found.sequence), page: batch, row: cache_row });
        RowTarget { address, is_stored, place }
    }

    fn position(&self, k: &mut Builder, _: &LaneRow, found: &SequenceRow) -> Reg<S32> {
        found.position(k, self.p, self.sequences, true)
    }
}
