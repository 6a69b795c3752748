//! Append kernel: new keys and values to the slots of a KV cache, with QK-norm and rotary embedding on the way.
//!
//! A row is one head of one token. Some lanes of a warp have a row, each two vectors of 16 bytes of it, which hold both
//! columns of every pair that is rotated, so that nothing but the sum of a norm crosses lanes. CTAs of the first part of
//! the grid have query rows, those of the second keys, the rest values.

use flashcore_ir::types::{F32, S32, S64, U32, U64};
use flashcore_ir::{Argument, Builder, Compare, Kernel, Reg, SpecialRegister};
use flashcore_problem::{AppendProblem, Operand, PositionType, Strides};

use super::quantize::{self, CachePlace, Quantizers};
use super::rotary_rows::{Norm, Tables};
use super::rows::{LaneRow, Pass, Placement, RowTarget, cache_address, ctas, page_and_row};
use super::spec::{AppendSpec, RotarySpec, THREADS};
use crate::bindings::Word;
use crate::launch_plan::{KernelLaunch, LaunchPlan, TokenRows};
use crate::spec::{KernelKey, KernelSpec};
use crate::target::Target;
use crate::unsupported::Reason;

operation_parameters! {
    launch {
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        query,
        query_output,
        positions,
        cos,
        sin,
        query_norm,
        key_norm,
        tokens,
    }
    plan {
        query_head_stride: U64,
        query_token_stride: U64,
        query_output_head_stride: U64,
        query_output_token_stride: U64,
        key_head_stride: U64,
        key_token_stride: U64,
        value_head_stride: U64,
        value_token_stride: U64,
        key_cache_page_stride: U64,
        key_cache_head_stride: U64,
        key_cache_row_stride: U64,
        value_cache_page_stride: U64,
        value_cache_head_stride: U64,
        value_cache_row_stride: U64,
        table_stride: U64,
        query_heads: U32,
        key_heads: U32,
        page_size: U32,
        slots: U32,
        last_position: S32,
        eps: F32,
    }
}

impl LaunchPlan {
    /// The kernel that appends by slot, or every reason against it.
    pub fn append(problem: &AppendProblem, target: impl Into<Target>) -> Result<Self, Vec<Reason>> {
        let errors = problem.errors();
        if !errors.is_empty() {
            return Err(errors.into_iter().map(Reason::from).collect());
        }
        let (spec, target) = (AppendSpec::of(problem), target.into());
        quantize::reason(problem, spec, target.arch)?;
        let (key_rows, value_rows) = (spec.key_rows(), spec.value_rows());
        let [query_heads, key_heads] = [problem.query_heads, problem.key_heads].map(|heads| heads as u32);
        let rows = [(query_heads, key_rows), (key_heads, key_rows), (key_heads, value_rows)];
        let rows = rows.map(|(per_token, shape)| TokenRows { per_token, per_cta: shape.rows_per_cta() });
        let key = KernelKey { spec: KernelSpec::Append(spec), arch: target.arch };
        let mut launch = KernelLaunch::of_tokens(key, problem.tokens as u32, rows.to_vec());
        launch.extend_with_words(quantize::words(problem));
        let words = Words {
            key: Word::address(Operand::NewKey),
            value: Word::address(Operand::NewValue),
            key_cache: Word::address(Operand::KeyCache),
            value_cache: Word::address(Operand::ValueCache),
            slot_mapping: Word::address(Operand::SlotMapping),
            query: Word::address(Operand::Query),
            query_output: Word::address(Operand::QueryOutput),
            positions: Word::address(Operand::Positions),
            cos: Word::address(Operand::Cos),
            sin: Word::address(Operand::Sin),
            query_norm: Word::address(Operand::QueryNorm),
            key_norm: Word::address(Operand::KeyNorm),
            tokens: Word::Tokens,
        };
        launch.extend_with_words(words.list());
        launch.extend(arguments(problem));
        let [key_cache, value_cache] = spec.cache_alignments();
        let alignments = [(Operand::KeyCache, key_cache), (Operand::ValueCache, value_cache)];
        let alignments = spec.alignments().into_iter().chain(alignments).collect();
        Self::of_operation(vec![launch], alignments, target)
    }
}

fn arguments(problem: &AppendProblem) -> Vec<Argument> {
    let element = problem.dtype.size_bytes() as u64;
    let bytes = |stride: usize| Argument::U64(stride as u64 * element);
    let token = |strides: Strides| [bytes(strides.head), bytes(strides.row)];
    let cache_element = problem.cache_dtype().size_bytes() as u64;
    let cache_bytes = |stride: usize| Argument::U64(stride as u64 * cache_element);
    let cache = |strides: Strides| [cache_bytes(strides.batch), cache_bytes(strides.head), cache_bytes(strides.row)];
    let strides = problem.strides;
    let table_element = problem.table_dtype().size_bytes() as u64;
    let table_stride = problem.rotary.map_or(0, |rotary| rotary.table_stride as u64 * table_element);
    let last_position = problem.rotary.map_or(0, |rotary| rotary.max_position as i32 - 1);
    let mut arguments = Vec::new();
    arguments.extend([strides.query, strides.query_output, strides.key, strides.value].into_iter().flat_map(token));
    arguments.extend([strides.key_cache, strides.value_cache].into_iter().flat_map(cache));
    arguments.push(Argument::U64(table_stride));
    let sizes = [problem.query_heads, problem.key_heads, problem.page_size, problem.slots()];
    arguments.extend(sizes.map(|size| Argument::U32(size as u32)));
    arguments.push(Argument::S32(last_position));
    arguments.push(Argument::F32(problem.qk_norm.map_or(0.0, |norm| norm.eps)));
    arguments
}

/// Writes the kernel.
pub(super) fn kernel(spec: AppendSpec) -> Kernel {
    let mut builder = Builder::new(spec.name(), THREADS);
    let k = &mut builder;
    let quantizers = Quantizers::load(k, spec.quantize);
    let p = Parameters::load(k);
    let tokens = k.truncate(p.tokens);
    let cta = k.special(SpecialRegister::CtaX);
    let (key_rows, value_rows) = (spec.key_rows(), spec.value_rows());
    let keys = k.mul(tokens, p.key_heads);
    let tables = Tables { cos: p.cos, sin: p.sin, stride: p.table_stride };
    let first_key_cta = if spec.query {
        let queries = k.mul(tokens, p.query_heads);
        let first_key_cta = ctas(k, key_rows, queries);
        let is_query = k.compare(Compare::Lt, cta, first_key_cta);
        let first_cta = k.copy(0u32);
        k.if_uniform(is_query, |k| {
            k.section("query", |k| {
                let norm = spec.qk_norm.then_some(Norm { weights: p.query_norm, eps: p.eps });
                let (heads, transforms) = (p.query_heads, spec.transforms());
                let (rows, unwritten) = (queries, Some(p.key));
                let quantize = None;
                let pass =
                    Pass { shape: key_rows, first_cta, heads, rows, unwritten, transforms, norm, tables, quantize };
                let target = RowsTo::Tokens {
                    address: p.query_output,
                    strides: [p.query_output_token_stride, p.query_output_head_stride],
                };
                let source = (p.query, [p.query_token_stride, p.query_head_stride]);
                pass.write(k, cta, &Tokens { p: &p, rotary: spec.rotary, source, target });
            });
        });
        first_key_cta
    } else {
        k.copy(0u32)
    };
    let key_ctas = ctas(k, key_rows, keys);
    let first_value_cta = k.add(first_key_cta, key_ctas);
    let from_key = k.compare(Compare::Ge, cta, first_key_cta);
    let before_value = k.compare(Compare::Lt, cta, first_value_cta);
    let is_key = k.and(from_key, before_value);
    let pass = |shape, first_cta, transforms, norm, quantize| Pass {
        shape,
        first_cta,
        heads: p.key_heads,
        rows: keys,
        unwritten: None,
        transforms,
        norm,
        tables,
        quantize,
    };
    k.if_uniform(is_key, |k| {
        k.section("key", |k| {
            let norm = spec.qk_norm.then_some(Norm { weights: p.key_norm, eps: p.eps });
            let strides = [p.key_cache_page_stride, p.key_cache_row_stride, p.key_cache_head_stride];
            let target = RowsTo::Slots { cache: p.key_cache, strides };
            let source = (p.key, [p.key_token_stride, p.key_head_stride]);
            let rows = Tokens { p: &p, rotary: spec.rotary, source, target };
            pass(key_rows, first_key_cta, spec.transforms(), norm, quantizers.key).write(k, cta, &rows);
        });
    });
    let is_value = k.compare(Compare::Ge, cta, first_value_cta);
    k.if_uniform(is_value, |k| {
        k.section("value", |k| {
            let strides = [p.value_cache_page_stride, p.value_cache_row_stride, p.value_cache_head_stride];
            let target = RowsTo::Slots { cache: p.value_cache, strides };
            let source = (p.value, [p.value_token_stride, p.value_head_stride]);
            let rows = Tokens { p: &p, rotary: None, source, target };
            pass(value_rows, first_value_cta, false, None, quantizers.value).write(k, cta, &rows);
        });
    });
    builder.finish()
}

/// Place that rows of tokens go to.
enum RowsTo {
    /// Rows of the same tokens, by token and head strides.
    Tokens { address: Reg<U64>, strides: [Reg<U64>; 2] },
    /// Slots of a cache, by page, row and head strides.
    Slots { cache: Reg<U64>, strides: [Reg<U64>; 3] },
}

/// Rows of tokens in a row.
struct Tokens<'a> {
    p: &'a Parameters,
    rotary: Option<RotarySpec>,
    /// Address of the first token, and token and head strides.
    source: (Reg<U64>, [Reg<U64>; 2]),
    target: RowsTo,
}

impl Placement for Tokens<'_> {
    type Place = ();

    fn find(&self, _: &mut Builder, _: &LaneRow) {}

    fn source(&self, k: &mut Builder, row: &LaneRow, (): &()) -> Reg<U64> {
        let (address, [token_stride, head_stride]) = self.source;
        let token = k.widen(row.row);
        let source = k.mad(token, token_stride, address);
        k.mad(row.head, head_stride, source)
    }

    fn target(&self, k: &mut Builder, row: &LaneRow, (): &()) -> RowTarget {
        match self.target {
            RowsTo::Tokens { address, strides: [token_stride, head_stride] } => {
                let token = k.widen(row.row);
                let address = k.mad(token, token_stride, address);
                RowTarget { address: k.mad(row.head, head_stride, address), is_stored: row.exists, place: None }
            }
            RowsTo::Slots { cache, strides } => slot_address(k, self.p, row, cache, strides),
        }
    }

    fn position(&self, k: &mut Builder, row: &LaneRow, (): &()) -> Reg<S32> {
        let p = self.p;
        match self.rotary.map(|rotary| rotary.positions) {
            None | Some(PositionType::I32) => {
                let address = k.mad_wide(row.row, 4u32, p.positions);
                let position = k.load_one::<S32>(address);
                let position = k.max(position, 0i32);
                k.min(position, p.last_position)
            }
            Some(PositionType::I64) => {
                let address = k.mad_wide(row.row, 8u32, p.positions);
                let position = k.load_one::<S64>(address);
                let zero = k.copy(0i32);
                let zero = k.widen_signed(zero);
                let position = k.max(position, zero);
                let last = k.widen_signed(p.last_position);
                let position = k.min(position, last);
                let position = k.reinterpret::<S64, U64>(position);
                let position = k.truncate(position);
                k.reinterpret(position)
            }
        }
    }
}

/// The address of the row of a cache that a token's slot names, and if the slot is one of the cache: a slot that is
/// negative or past the last page is skipped.
fn slot_address(k: &mut Builder, p: &Parameters, row: &LaneRow, cache: Reg<U64>, strides: [Reg<U64>; 3]) -> RowTarget {
    let address = k.mad_wide(row.row, 8u32, p.slot_mapping);
    let slot = k.load_one::<S64>(address);
    // As an unsigned number, a negative slot is past every cache.
    let slot = k.reinterpret::<S64, U64>(slot);
    let slots = k.widen(p.slots);
    let is_slot = k.compare(Compare::Lt, slot, slots);
    let slot = k.truncate(slot);
    let slot = k.select(is_slot, slot, 0u32);
    let (page, row_in_page) = page_and_row(k, slot, p.page_size);
    RowTarget {
        address: cache_address(k, cache, strides, [page, row_in_page], row.head),
        is_stored: k.and(row.exists, is_slot),
        place: Some(CachePlace { sequence: None, page, row: row_in_page }),
    }
}
