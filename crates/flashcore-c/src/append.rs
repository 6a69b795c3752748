//! Problems of appends to a KV cache, alone and before attention, with QK-norm and rotary embedding.

use api::{
    AppendProblem as ApiAppend, AppendStrides, KvCacheProblem as ApiKvCache, PositionType, QkNorm, Rotary as ApiRotary,
    RotaryStyle,
};

use crate::problem::{
    AttentionProblem, FLASHCORE_DTYPE_I32, FLASHCORE_DTYPE_I64, FLASHCORE_OPERATION_APPEND,
    FLASHCORE_OPERATION_KVCACHE, ProblemBase, ProblemStruct, Strides, check_pointer, dtype, fill, float8, size,
    strides, switch, unknown,
};
use crate::status::{Failure, Status};

/// No rotary embedding.
pub const FLASHCORE_ROTARY_NONE: i32 = 0;
/// Columns i and i + dim / 2 make a pair (GPT-NeoX; rotary_interleaved=False).
pub const FLASHCORE_ROTARY_NEOX: i32 = 1;
/// Columns 2 i and 2 i + 1 make a pair (GPT-J; rotary_interleaved=True).
pub const FLASHCORE_ROTARY_GPTJ: i32 = 2;

/// The rotary embedding of query and new keys.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// FLASHCORE_ROTARY_*.
    pub style: i32,
    /// FLASHCORE_DTYPE_*: the elements of the tables of cosines and sines, those of the tensors or float.
    pub table_dtype: i32,
    /// Columns that are rotated: even, at most head_dim.
    pub dim: u64,
    /// Rows of the tables. A position outside is an error in the host's memory, and clamped on a GPU.
    pub max_position: u64,
    /// Elements from one row of a table to the next; at least dim / 2.
    pub table_stride: u64,
}

/// An append of new keys and values to a paged KV cache: everything about it except the numbers in its tensors. Begin with
/// flashcore_append_problem_init() and change fields.
///
/// The key of token t goes to row slot % page_size of page slot / page_size, slot being slot_mapping[t]; so does its value.
/// Slot -1 skips a token; any other that the cache does not have is an error in the host's memory, and skipped on
/// a GPU. No two tokens may have the same slot.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AppendProblem {
    /// FLASHCORE_OPERATION_APPEND.
    pub base: ProblemBase,
    /// Tokens; a launch may have fewer.
    pub tokens: u64,
    /// Heads of the query; 0 for no query.
    pub query_heads: u64,
    /// Heads of key and value.
    pub key_heads: u64,
    /// Columns of query and key.
    pub head_dim: u64,
    /// Columns of value.
    pub value_dim: u64,
    /// Pages of the cache.
    pub num_pages: u64,
    /// Rows of a page.
    pub page_size: u64,
    /// FLASHCORE_DTYPE_F16, _BF16 or _F32: the elements of all tensors, but for caches with a cache_dtype.
    pub dtype: i32,
    /// FLASHCORE_DTYPE_E4M3 or FLASHCORE_DTYPE_E5M2: the elements of the caches, to which new keys and values are
    /// quantized; 0 for dtype.
    pub cache_dtype: i32,
    /// FLASHCORE_DTYPE_I32 or FLASHCORE_DTYPE_I64: the positions, for rotary.
    pub position_dtype: i32,
    /// 1 if query and key are normalized (RMS norm over head_dim) before the rotary embedding; else 0.
    pub qk_norm: i32,
    /// Added to the mean square.
    pub norm_eps: f32,
    /// 1 if keys have a scale in an FP8 cache; else 0.
    pub k_scale: i32,
    /// 1 if values have a scale in an FP8 cache; else 0.
    pub v_scale: i32,
    /// 1 if those scales are computed, one for each row and head of the cache, and written; 0 if they are given.
    pub compute_scales: i32,
    /// The rotary embedding.
    pub rotary: Rotary,
    /// Strides of the query; batch is not used.
    pub query_strides: Strides,
    /// Strides of the query output; batch is not used.
    pub query_output_strides: Strides,
    /// Strides of the new keys; batch is not used.
    pub key_strides: Strides,
    /// Strides of the new values; batch is not used.
    pub value_strides: Strides,
    /// Strides of the key cache.
    pub key_cache_strides: Strides,
    /// Strides of the value cache.
    pub value_cache_strides: Strides,
}

/// Attention with a KV cache that grows (flash_attn_with_kvcache): everything about it except the numbers in its tensors.
/// Begin with flashcore_kvcache_problem_init() and change fields.
///
/// New key i of sequence b goes to row seqused_k[b] + i of the sequence, and is rotated by that position, or by
/// rotary_seqlens[b] + i; query row i is rotated by the same position with a causal mask or a window, else by that of row 0.
/// The query then attends seqused_k[b] keys and the new ones, less leftpad_k[b]. Two sequences may share pages of keys
/// that they have; rows that are appended must belong to one.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KvCacheProblem {
    /// FLASHCORE_OPERATION_KVCACHE.
    pub base: ProblemBase,
    /// The attention: its key and value are the caches, and its seqused_k must be 1.
    pub attention: AttentionProblem,
    /// New keys of each sequence; with total_new, the most that a sequence may have.
    pub new_length: u64,
    /// Rows of the new keys of all sequences where they are packed into one batch (cu_seqlens_k_new); else 0.
    pub total_new: u64,
    /// The rotary embedding.
    pub rotary: Rotary,
    /// 1 if each sequence says where its positions start; 0 for seqused_k.
    pub rotary_seqlens: i32,
    /// 1 if query and new keys are normalized (RMS norm over head_dim) before the rotary embedding; else 0.
    pub qk_norm: i32,
    /// Added to the mean square.
    pub norm_eps: f32,
    /// 1 if the scales of new keys and values in an FP8 cache (kv_dtype of the attention) are computed, one for each row and
    /// head, and written; 0 if they are given.
    pub compute_scales: i32,
    /// Strides of the new keys.
    pub new_key_strides: Strides,
    /// Strides of the new values.
    pub new_value_strides: Strides,
}

// SAFETY: `repr(C)` of a base and numbers.
unsafe impl ProblemStruct for AppendProblem {
    const NAME: &'static str = "flashcore_append_problem";
    const OPERATION: i32 = FLASHCORE_OPERATION_APPEND;
}

// SAFETY: `repr(C)` of a base, numbers, and an attention problem, of which all zeros are one.
unsafe impl ProblemStruct for KvCacheProblem {
    const NAME: &'static str = "flashcore_kvcache_problem";
    const OPERATION: i32 = FLASHCORE_OPERATION_KVCACHE;
}

impl Rotary {
    fn to_api(self, positions: PositionType) -> Result<Option<ApiRotary>, Failure> {
        let style = match self.style {
            FLASHCORE_ROTARY_NONE => return Ok(None),
            FLASHCORE_ROTARY_NEOX => RotaryStyle::Neox,
            FLASHCORE_ROTARY_GPTJ => RotaryStyle::GptJ,
            other => return Err(unknown("rotary.style", other, "FLASHCORE_ROTARY_*")),
        };
        Ok(Some(ApiRotary {
            style,
            dim: size("rotary.dim", self.dim)?,
            max_position: size("rotary.max_position", self.max_position)?,
            table_stride: size("rotary.table_stride", self.table_stride)?,
            table_dtype: Some(dtype("rotary.table_dtype", self.table_dtype)?),
            positions,
        }))
    }
}

impl AppendProblem {
    pub(crate) fn to_api(self) -> Result<ApiAppend, Failure> {
        let (tokens, key_heads) = (size("tokens", self.tokens)?, size("key_heads", self.key_heads)?);
        let (head_dim, dtype) = (size("head_dim", self.head_dim)?, dtype("dtype", self.dtype)?);
        let (num_pages, page_size) = (size("num_pages", self.num_pages)?, size("page_size", self.page_size)?);
        let mut problem = ApiAppend::new(tokens, key_heads, head_dim, dtype, num_pages, page_size);
        problem.query_heads = size("query_heads", self.query_heads)?;
        problem.value_dim = size("value_dim", self.value_dim)?;
        problem.qk_norm = switch("qk_norm", self.qk_norm)?.then_some(QkNorm { eps: self.norm_eps });
        problem.cache_dtype = float8("cache_dtype", self.cache_dtype)?;
        (problem.k_scale, problem.v_scale) = (switch("k_scale", self.k_scale)?, switch("v_scale", self.v_scale)?);
        problem.compute_scales = switch("compute_scales", self.compute_scales)?;
        let positions = match self.position_dtype {
            FLASHCORE_DTYPE_I32 => PositionType::I32,
            FLASHCORE_DTYPE_I64 => PositionType::I64,
            other => return Err(unknown("position_dtype", other, "FLASHCORE_DTYPE_I32, FLASHCORE_DTYPE_I64")),
        };
        problem.rotary = self.rotary.to_api(positions)?;
        problem.strides = AppendStrides {
            query: strides("query_strides", self.query_strides)?,
            query_output: strides("query_output_strides", self.query_output_strides)?,
            key: strides("key_strides", self.key_strides)?,
            value: strides("value_strides", self.value_strides)?,
            key_cache: strides("key_cache_strides", self.key_cache_strides)?,
            value_cache: strides("value_cache_strides", self.value_cache_strides)?,
        };
        Ok(problem)
    }
}

impl KvCacheProblem {
    /// The problem in Rust; the plan validates it.
    ///
    /// # Safety
    ///
    /// Expressions of the attention are null or texts with a terminating zero.
    pub(crate) unsafe fn to_api(self) -> Result<ApiKvCache, Failure> {
        AttentionProblem::check_size("problem.attention", self.attention.base)?;
        // SAFETY: the contract of this function.
        let attention = unsafe { self.attention.to_api() }?;
        let has_lengths = attention.seqused_k;
        let mut problem = ApiKvCache::new(attention, size("new_length", self.new_length)?);
        problem.attention.seqused_k = has_lengths;
        problem.total_new = Some(size("total_new", self.total_new)?).filter(|&rows| rows > 0);
        problem.rotary = self.rotary.to_api(PositionType::I32)?;
        problem.rotary_seqlens = switch("rotary_seqlens", self.rotary_seqlens)?;
        problem.qk_norm = switch("qk_norm", self.qk_norm)?.then_some(QkNorm { eps: self.norm_eps });
        problem.compute_scales = switch("compute_scales", self.compute_scales)?;
        problem.new_key = strides("new_key_strides", self.new_key_strides)?;
        problem.new_value = strides("new_value_strides", self.new_value_strides)?;
        Ok(problem)
    }
}

/// Fills the problem of an append: contiguous [token, head, column] and [page, row, head, column], values as wide as keys,
/// positions of 64 bits, without rotary embedding and norm.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to a flashcore_append_problem_t that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_append_problem_init(
    problem: *mut AppendProblem,
    tokens: u64,
    query_heads: u64,
    key_heads: u64,
    head_dim: u64,
    num_pages: u64,
    page_size: u64,
    dtype: i32,
) -> Status {
    let make = || {
        self::dtype("dtype", dtype)?;
        let token = |heads: u64| {
            let row = heads.saturating_mul(head_dim);
            Strides { batch: row.saturating_mul(tokens), head: head_dim, row }
        };
        let keys = token(key_heads);
        let cache = Strides { batch: keys.row.saturating_mul(page_size), ..keys };
        Ok(AppendProblem {
            tokens,
            query_heads,
            key_heads,
            head_dim,
            value_dim: head_dim,
            num_pages,
            page_size,
            dtype,
            position_dtype: FLASHCORE_DTYPE_I64,
            rotary: Rotary { table_dtype: dtype, ..no_rotary() },
            query_strides: token(query_heads),
            query_output_strides: token(query_heads),
            key_strides: keys,
            value_strides: keys,
            key_cache_strides: cache,
            value_cache_strides: cache,
            ..ProblemStruct::zeroed()
        })
    };
    // SAFETY: the contract is the same.
    unsafe { fill(problem, make) }
}

const fn no_rotary() -> Rotary {
    Rotary { style: FLASHCORE_ROTARY_NONE, table_dtype: 0, dim: 0, max_position: 0, table_stride: 0 }
}

/// Fills the problem of a growing KV cache: new_length keys for each sequence of the attention, which is copied, new keys
/// and values contiguous [batch, row, head, column], without rotary embedding and norm.
///
/// # Safety
///
/// `attention` must be null, which is an error, or point to a flashcore_attention_problem_t. `problem` must be null, which
/// is an error, or point to a flashcore_kvcache_problem_t that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_kvcache_problem_init(
    problem: *mut KvCacheProblem,
    attention: *const AttentionProblem,
    new_length: u64,
) -> Status {
    let make = || {
        check_pointer("attention", attention)?;
        // SAFETY: not null and aligned, and the caller promises a problem.
        AttentionProblem::check_size("attention", unsafe { (*attention).base })?;
        // SAFETY: it has the size of one.
        let attention = unsafe { attention.read() };
        let contiguous = |columns: u64| {
            let row = attention.key_heads.saturating_mul(columns);
            Strides { batch: row.saturating_mul(new_length), head: columns, row }
        };
        Ok(KvCacheProblem {
            attention,
            new_length,
            rotary: Rotary { table_dtype: attention.dtype, ..no_rotary() },
            new_key_strides: contiguous(attention.head_dim),
            new_value_strides: contiguous(attention.value_dim),
            ..ProblemStruct::zeroed()
        })
    };
    // SAFETY: the contract is the same.
    unsafe { fill(problem, make) }
}
