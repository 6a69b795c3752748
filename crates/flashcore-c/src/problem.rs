//! Parts of the problems of all operations, and the problem of attention.

use std::ffi::{CStr, c_char};

use api::expression::ExpressionError;
use api::{
    Alignment, DType, Layout, LseBase, Mask, MaskMod, Operation, PagedKv, Problem as ApiProblem, ScoreMod,
    Strides as ApiStrides, TensorStrides,
};

use crate::append::{AppendProblem, KvCacheProblem};
use crate::merge::MergeProblem;
use crate::status::{Failure, Status, guarded};

/// Attention; the problem is a flashcore_attention_problem_t.
pub const FLASHCORE_OPERATION_ATTENTION: i32 = 1;
/// Attention over more keys, merged into an output and an LSE that are given: those of attention over other keys, or the
/// start, an output of 0 and an LSE of minus infinity. The problem is a flashcore_attention_problem_t of the new keys; its
/// lse must be 1, and its lse_without_sink 0 with sinks. A sink counts each time, so it belongs to one of the plans. Output
/// and LSE are read and replaced; rows that no sequence has stay as they are.
pub const FLASHCORE_OPERATION_CONTINUE: i32 = 2;
/// An append to a paged KV cache by slots; the problem is a flashcore_append_problem_t.
pub const FLASHCORE_OPERATION_APPEND: i32 = 3;
/// Attention with a growing KV cache; the problem is a flashcore_kvcache_problem_t.
pub const FLASHCORE_OPERATION_KVCACHE: i32 = 4;
/// A merge of partial results; the problem is a flashcore_merge_problem_t.
pub const FLASHCORE_OPERATION_MERGE: i32 = 5;

/// IEEE half precision.
pub const FLASHCORE_DTYPE_F16: i32 = 1;
/// bfloat16.
pub const FLASHCORE_DTYPE_BF16: i32 = 2;
/// IEEE single precision.
pub const FLASHCORE_DTYPE_F32: i32 = 3;
/// IEEE double precision.
pub const FLASHCORE_DTYPE_F64: i32 = 4;
/// FP8: 4 exponent bits, 3 mantissa bits, up to 448, no infinity (OCP e4m3fn).
pub const FLASHCORE_DTYPE_E4M3: i32 = 5;
/// FP8: 5 exponent bits, 2 mantissa bits, up to 57344 (OCP e5m2).
pub const FLASHCORE_DTYPE_E5M2: i32 = 6;
/// Integers of 32 bits, signed or unsigned: lengths, offsets, page tables.
pub const FLASHCORE_DTYPE_I32: i32 = 7;
/// Integers of 64 bits: slots.
pub const FLASHCORE_DTYPE_I64: i32 = 8;

/// Every row attends every key.
pub const FLASHCORE_MASK_NONE: i32 = 0;
/// Rows attend the keys up to and including their own position.
pub const FLASHCORE_MASK_CAUSAL: i32 = 1;
/// Rows attend the keys from window_left before to window_right after their own position, both included.
pub const FLASHCORE_MASK_WINDOW: i32 = 2;

/// Row i stands at key i, as in PyTorch's is_causal.
pub const FLASHCORE_ALIGNMENT_TOP_LEFT: i32 = 0;
/// Row i stands at key i + key_length - query_length, as in FlashAttention and in decoding with a cache.
pub const FLASHCORE_ALIGNMENT_BOTTOM_RIGHT: i32 = 1;

/// Contiguous [batch, head, row, column], as in PyTorch.
pub const FLASHCORE_LAYOUT_BHSD: i32 = 0;
/// Contiguous [batch, row, head, column], as in FlashAttention.
pub const FLASHCORE_LAYOUT_BSHD: i32 = 1;
/// Query, key and value of one row side by side; output as in BSHD.
pub const FLASHCORE_LAYOUT_PACKED_QKV: i32 = 2;
/// The strides of the problem.
pub const FLASHCORE_LAYOUT_STRIDED: i32 = 3;

/// Natural logarithms: FlashAttention, cuDNN, PyTorch, flashcore.
pub const FLASHCORE_LSE_NATURAL: i32 = 0;
/// Logarithms of base 2: FlashInfer.
pub const FLASHCORE_LSE_BASE_2: i32 = 1;

/// The beginning of every problem. The functions that fill a problem fill it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ProblemBase {
    /// FLASHCORE_OPERATION_*, which says what struct it is.
    pub operation: i32,
    /// sizeof that struct of the caller; it must be that of the library.
    pub struct_size: u32,
}

/// Distances in elements between neighbours of each dimension. Neighbouring columns are always adjacent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Strides {
    /// From one batch to the next; in the caches of an append, from one page to the next.
    pub batch: u64,
    /// From one head to the next.
    pub head: u64,
    /// From one row of the sequence, or one token, to the next.
    pub row: u64,
}

/// Attention: everything about it except the numbers in its tensors. Begin with flashcore_attention_problem_init() and
/// change fields. A field of a feature that is off stays 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionProblem {
    /// FLASHCORE_OPERATION_ATTENTION, or FLASHCORE_OPERATION_CONTINUE.
    pub base: ProblemBase,
    /// Batches, or sequences.
    pub batch: u64,
    /// Heads of query and output.
    pub query_heads: u64,
    /// Heads of key and value; query_heads must be a multiple of it.
    pub key_heads: u64,
    /// Rows of query and output; with cu_seqlens_q or seqused_q, the most that a sequence may have.
    pub query_length: u64,
    /// Rows of key and value; with cu_seqlens_k, seqused_k or page_table, the most that a sequence may have.
    pub key_length: u64,
    /// Columns of query and key.
    pub head_dim: u64,
    /// Columns of value and output.
    pub value_dim: u64,
    /// Factor of the products of query and key; used in f32 unless dtype is FLASHCORE_DTYPE_F64.
    pub scale: f64,
    /// FLASHCORE_DTYPE_*: the elements of the query, and of key, value and output unless kv_dtype or out_dtype say.
    pub dtype: i32,
    /// FLASHCORE_DTYPE_E4M3 or FLASHCORE_DTYPE_E5M2: the elements of key and value, a KV cache in FP8; 0 for dtype.
    pub kv_dtype: i32,
    /// FLASHCORE_DTYPE_F16 or FLASHCORE_DTYPE_BF16: the elements of the output where dtype is FLASHCORE_DTYPE_E4M3.
    pub out_dtype: i32,
    /// FLASHCORE_LAYOUT_*.
    pub layout: i32,
    /// FLASHCORE_MASK_*.
    pub mask: i32,
    /// FLASHCORE_ALIGNMENT_*: where a row stands among the keys, for masks.
    pub alignment: i32,
    /// Keys attended before the row's own position, for FLASHCORE_MASK_WINDOW; -1 for no limit. A "sliding window of w"
    /// that counts the row itself is w - 1 here.
    pub window_left: i64,
    /// Keys attended after the row's own position, for FLASHCORE_MASK_WINDOW; -1 for no limit.
    pub window_right: i64,
    /// score = softcap * tanh(score / softcap).
    pub softcap: f32,
    /// 1 if there is a slope per query head, subtracted for every position of distance.
    pub alibi: i32,
    /// 1 if there is a sink per query head: one more score in the denominator.
    pub sinks: i32,
    /// 1 if there is a bias that is added to the scores.
    pub bias: i32,
    /// 1 if the log-sum-exp of each row is wanted.
    pub lse: i32,
    /// FLASHCORE_LSE_*: the base of the log-sum-exp.
    pub lse_base: i32,
    /// 1 if the log-sum-exp leaves the sink out: that of the keys alone.
    pub lse_without_sink: i32,
    /// 1 if the query rows of all sequences are packed into one batch of total_q rows (varlen). Query and output are then
    /// tensors of one batch: FLASHCORE_LAYOUT_BSHD is [total_q, head, column].
    pub cu_seqlens_q: i32,
    /// 1 if the keys of all sequences are packed into one batch of total_k rows (varlen).
    pub cu_seqlens_k: i32,
    /// 1 if each sequence has a number of query rows of its own, at most query_length.
    pub seqused_q: i32,
    /// 1 if each sequence has a number of keys of its own, at most key_length.
    pub seqused_k: i32,
    /// 1 if each sequence begins with padding among its keys.
    pub leftpad_k: i32,
    /// 1 if each sequence names the batch of the KV cache, or the row of the page table, that it reads.
    pub kv_batch_idx: i32,
    /// 1 if key and value are num_pages pages of page_size rows each, which a page table gives to the sequences. The batch
    /// strides of key and value are then those from page to page.
    pub page_table: i32,
    /// 1 if an FP8 query has a scale.
    pub q_scale: i32,
    /// 1 if an FP8 key has a scale.
    pub k_scale: i32,
    /// 1 if an FP8 value has a scale.
    pub v_scale: i32,
    /// Rows of query and output in all, for cu_seqlens_q.
    pub total_q: u64,
    /// Rows of key and value in all, for cu_seqlens_k.
    pub total_k: u64,
    /// Batches of the KV cache, or rows of the page table, for kv_batch_idx.
    pub kv_batch: u64,
    /// Rows of a page, for page_table.
    pub page_size: u64,
    /// Pages of the cache, for page_table.
    pub num_pages: u64,
    /// Entries of a row of the page table, for page_table. table_width * page_size must be at least key_length.
    pub table_width: u64,
    /// Entries from one row of the page table to the next, for page_table; 0 for table_width.
    pub table_stride: u64,
    /// For FLASHCORE_LAYOUT_STRIDED.
    pub query_strides: Strides,
    /// For FLASHCORE_LAYOUT_STRIDED.
    pub key_strides: Strides,
    /// For FLASHCORE_LAYOUT_STRIDED.
    pub value_strides: Strides,
    /// For FLASHCORE_LAYOUT_STRIDED.
    pub output_strides: Strides,
    /// The change of each score, an expression like "score + 0.1 * (query - key)", with a terminating zero; null for none.
    /// docs/score-mod.md has the language. The text is not needed after the plan is made.
    pub score_mod: *const c_char,
    /// The keys that take part besides those of mask, an expression like "aux_i32[query] == aux_i32[key]"; null for all.
    pub mask_mod: *const c_char,
    /// Entries of the table of floats that score_mod and mask_mod read.
    pub aux_f32: u64,
    /// Entries of the table of integers that score_mod and mask_mod read.
    pub aux_i32: u64,
}

/// A struct that begins with a [`ProblemBase`].
///
/// # Safety
///
/// The struct is `repr(C)` and begins with a [`ProblemBase`]; all zeros are one.
pub(crate) unsafe trait ProblemStruct: Copy {
    /// Its name in C, without `_t`.
    const NAME: &'static str;
    /// Its operation.
    const OPERATION: i32;

    /// Zeros, with the base of its operation.
    fn zeroed() -> Self {
        // SAFETY: all zeros are one, by the contract of the trait.
        let mut zeroed = unsafe { std::mem::zeroed::<Self>() };
        let base = ProblemBase { operation: Self::OPERATION, struct_size: size_of::<Self>() as u32 };
        // SAFETY: the struct begins with its base, by the contract of the trait.
        unsafe { (&raw mut zeroed).cast::<ProblemBase>().write(base) };
        zeroed
    }

    /// Checks the size that a caller gives it. `argument` names the struct in messages.
    fn check_size(argument: &str, base: ProblemBase) -> Result<(), Failure> {
        let (given, known, name) = (base.struct_size, size_of::<Self>(), Self::NAME);
        if given as usize == known {
            return Ok(());
        }
        Err(Failure::argument(format!(
            "{argument}.base.struct_size is {given}; it must be sizeof({name}_t), which is {known}: fill the struct with \
             {name}_init, and compile with the header of this library"
        )))
    }
}

// SAFETY: `repr(C)` of a base, numbers, and pointers that may be null.
unsafe impl ProblemStruct for AttentionProblem {
    const NAME: &'static str = "flashcore_attention_problem";
    const OPERATION: i32 = FLASHCORE_OPERATION_ATTENTION;
}

/// Reads the problem that begins here.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to the base of a problem as large as it says, with texts that end.
pub(crate) unsafe fn read(problem: *const ProblemBase) -> Result<Operation, Failure> {
    /// The whole problem.
    ///
    /// # Safety
    ///
    /// `problem` points to a base, and to as many bytes as the base says.
    unsafe fn whole<T: ProblemStruct>(problem: *const ProblemBase) -> Result<T, Failure> {
        check_pointer::<T>("problem", problem.cast())?;
        // SAFETY: the pointer is aligned, and there is a base, by the contract.
        T::check_size("problem", unsafe { problem.read() })?;
        // SAFETY: the struct has the size that the base says.
        Ok(unsafe { problem.cast::<T>().read() })
    }

    check_pointer("problem", problem)?;
    // SAFETY: not null and aligned, and the caller promises a base.
    let operation = unsafe { problem.read() }.operation;
    // SAFETY: the contract of this function.
    unsafe {
        Ok(match operation {
            FLASHCORE_OPERATION_ATTENTION => Operation::Attention(whole::<AttentionProblem>(problem)?.to_api()?),
            FLASHCORE_OPERATION_CONTINUE => Operation::Continue(whole::<AttentionProblem>(problem)?.to_api()?),
            FLASHCORE_OPERATION_APPEND => Operation::Append(whole::<AppendProblem>(problem)?.to_api()?),
            FLASHCORE_OPERATION_KVCACHE => Operation::KvCache(whole::<KvCacheProblem>(problem)?.to_api()?),
            FLASHCORE_OPERATION_MERGE => Operation::Merge(whole::<MergeProblem>(problem)?.to_api()?),
            other => return Err(unknown("base.operation", other, "FLASHCORE_OPERATION_*")),
        })
    }
}

impl AttentionProblem {
    /// The problem in Rust; the plan validates it.
    ///
    /// # Safety
    ///
    /// score_mod and mask_mod are null or texts with a terminating zero.
    pub(crate) unsafe fn to_api(self) -> Result<ApiProblem, Failure> {
        let alignment = match self.alignment {
            FLASHCORE_ALIGNMENT_TOP_LEFT => Alignment::TopLeft,
            FLASHCORE_ALIGNMENT_BOTTOM_RIGHT => Alignment::BottomRight,
            other => return Err(unknown("alignment", other, "FLASHCORE_ALIGNMENT_*")),
        };
        let mask = match self.mask {
            FLASHCORE_MASK_NONE => Mask::None,
            FLASHCORE_MASK_CAUSAL => Mask::Causal(alignment),
            FLASHCORE_MASK_WINDOW => Mask::Window {
                left: window("window_left", self.window_left)?,
                right: window("window_right", self.window_right)?,
                alignment,
            },
            other => return Err(unknown("mask", other, "FLASHCORE_MASK_*")),
        };
        let layout = match self.layout {
            FLASHCORE_LAYOUT_BHSD => Layout::Bhsd,
            FLASHCORE_LAYOUT_BSHD => Layout::Bshd,
            FLASHCORE_LAYOUT_PACKED_QKV => Layout::PackedQkv,
            FLASHCORE_LAYOUT_STRIDED => Layout::Strided(TensorStrides {
                query: strides("query_strides", self.query_strides)?,
                key: strides("key_strides", self.key_strides)?,
                value: strides("value_strides", self.value_strides)?,
                output: strides("output_strides", self.output_strides)?,
            }),
            other => return Err(unknown("layout", other, "FLASHCORE_LAYOUT_*")),
        };
        let (batch, query_heads) = (size("batch", self.batch)?, size("query_heads", self.query_heads)?);
        let key_heads = size("key_heads", self.key_heads)?;
        let query_length = size("query_length", self.query_length)?;
        let key_length = size("key_length", self.key_length)?;
        let (head_dim, value_dim) = (size("head_dim", self.head_dim)?, size("value_dim", self.value_dim)?);
        let mut problem = ApiProblem::new(batch, query_heads, query_length, head_dim, dtype("dtype", self.dtype)?);
        problem.key_heads = key_heads;
        problem.key_length = key_length;
        problem.value_dim = value_dim;
        problem.scale = self.scale;
        problem.mask = mask;
        problem.softcap = (self.softcap != 0.0).then_some(self.softcap);
        self.set_switches(&mut problem)?;
        problem.lse_form.base = lse_base(self.lse_base)?;
        problem.lse_form.includes_sink = !switch("lse_without_sink", self.lse_without_sink)?;
        problem.layout = layout;
        // SAFETY: the contract of this function.
        let (score_mod, mask_mod) =
            unsafe { (expression("score_mod", self.score_mod)?, expression("mask_mod", self.mask_mod)?) };
        let refused = |field: &str, error: ExpressionError| Failure::argument(format!("problem.{field}: {error}"));
        problem.score_mod = score_mod.map(ScoreMod::parse).transpose().map_err(|error| refused("score_mod", error))?;
        problem.mask_mod = mask_mod.map(MaskMod::parse).transpose().map_err(|error| refused("mask_mod", error))?;
        problem.kv_dtype = float8("kv_dtype", self.kv_dtype)?;
        problem.out_dtype = match (problem.dtype, self.out_dtype) {
            (DType::E4m3, FLASHCORE_DTYPE_F16) => Some(DType::F16),
            (DType::E4m3, FLASHCORE_DTYPE_BF16) => Some(DType::Bf16),
            (DType::E4m3, other) => {
                return Err(unknown("out_dtype", other, "FLASHCORE_DTYPE_F16, FLASHCORE_DTYPE_BF16"));
            }
            (_, 0) => None,
            (_, other) => return Err(unknown("out_dtype", other, "0, unless dtype is FLASHCORE_DTYPE_E4M3")),
        };
        Ok(problem)
    }

    /// Sets the switches of operands, with the sizes that belong to them.
    fn set_switches(self, problem: &mut ApiProblem) -> Result<(), Failure> {
        problem.alibi = switch("alibi", self.alibi)?;
        problem.sinks = switch("sinks", self.sinks)?;
        problem.bias = switch("bias", self.bias)?;
        problem.lse = switch("lse", self.lse)?;
        problem.seqused_q = switch("seqused_q", self.seqused_q)?;
        problem.seqused_k = switch("seqused_k", self.seqused_k)?;
        problem.leftpad_k = switch("leftpad_k", self.leftpad_k)?;
        problem.q_scale = switch("q_scale", self.q_scale)?;
        problem.k_scale = switch("k_scale", self.k_scale)?;
        problem.v_scale = switch("v_scale", self.v_scale)?;
        problem.aux_f32 = size("aux_f32", self.aux_f32)?;
        problem.aux_i32 = size("aux_i32", self.aux_i32)?;
        let rows = |operand, switch, field, value| -> Result<Option<usize>, Failure> {
            Ok(sizes((operand, switch), [(field, value)])?.map(|[rows]| rows))
        };
        problem.total_q = rows("cu_seqlens_q", self.cu_seqlens_q, "total_q", self.total_q)?;
        problem.total_k = rows("cu_seqlens_k", self.cu_seqlens_k, "total_k", self.total_k)?;
        problem.kv_batch = rows("kv_batch_idx", self.kv_batch_idx, "kv_batch", self.kv_batch)?;
        let paging = [
            ("page_size", self.page_size),
            ("num_pages", self.num_pages),
            ("table_width", self.table_width),
            ("table_stride", self.table_stride),
        ];
        problem.paged = sizes(("page_table", self.page_table), paging)?.map(|[page_size, num_pages, width, stride]| {
            let paged = PagedKv::new(page_size, num_pages, width);
            if stride > 0 { PagedKv { table_stride: stride, ..paged } } else { paged }
        });
        Ok(())
    }
}

/// The text of an expression.
///
/// # Safety
///
/// `text` is null or has a terminating zero, and stays as it is for the lifetime chosen.
unsafe fn expression<'a>(field: &str, text: *const c_char) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and the caller promises a terminating zero.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|error| Failure::argument(format!("problem.{field} is not UTF-8: {error}")))
}

/// The sizes that a switch needs, if it is on. A size without its switch is refused: it would be ignored.
fn sizes<const N: usize>(
    (operand, value): (&str, i32),
    fields: [(&str, u64); N],
) -> Result<Option<[usize; N]>, Failure> {
    if switch(operand, value)? {
        let mut sizes = [0; N];
        for (size, (field, value)) in sizes.iter_mut().zip(fields) {
            *size = self::size(field, value)?;
        }
        return Ok(Some(sizes));
    }
    match fields.into_iter().find(|&(_, value)| value != 0) {
        None => Ok(None),
        Some((field, value)) => Err(Failure::argument(format!(
            "problem.{field} is {value} and problem.{operand} is 0; set {operand} to 1, or {field} to 0"
        ))),
    }
}

/// Checks that a pointer is not null and is aligned.
pub(crate) fn check_pointer<T>(argument: &str, pointer: *const T) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::argument(format!("{argument} is null; it must not be")));
    }
    if !pointer.is_aligned() {
        let alignment = align_of::<T>();
        return Err(Failure::argument(format!("{argument} is {pointer:p}; it must be a multiple of {alignment}")));
    }
    Ok(())
}

pub(crate) fn unknown(field: &str, value: i32, allowed: &str) -> Failure {
    Failure::argument(format!("problem.{field} is {value}; it must be one of {allowed}"))
}

pub(crate) fn dtype(field: &str, value: i32) -> Result<DType, Failure> {
    match value {
        FLASHCORE_DTYPE_F16 => Ok(DType::F16),
        FLASHCORE_DTYPE_BF16 => Ok(DType::Bf16),
        FLASHCORE_DTYPE_F32 => Ok(DType::F32),
        FLASHCORE_DTYPE_F64 => Ok(DType::F64),
        FLASHCORE_DTYPE_E4M3 => Ok(DType::E4m3),
        FLASHCORE_DTYPE_E5M2 => Ok(DType::E5m2),
        other => Err(unknown(field, other, "FLASHCORE_DTYPE_F16 to FLASHCORE_DTYPE_E5M2")),
    }
}

/// The type of an FP8 cache; 0 for none.
pub(crate) fn float8(field: &str, value: i32) -> Result<Option<DType>, Failure> {
    match value {
        0 => Ok(None),
        FLASHCORE_DTYPE_E4M3 => Ok(Some(DType::E4m3)),
        FLASHCORE_DTYPE_E5M2 => Ok(Some(DType::E5m2)),
        other => Err(unknown(field, other, "0, FLASHCORE_DTYPE_E4M3, FLASHCORE_DTYPE_E5M2")),
    }
}

pub(crate) fn lse_base(value: i32) -> Result<LseBase, Failure> {
    match value {
        FLASHCORE_LSE_NATURAL => Ok(LseBase::Natural),
        FLASHCORE_LSE_BASE_2 => Ok(LseBase::Two),
        other => Err(unknown("lse_base", other, "FLASHCORE_LSE_*")),
    }
}

pub(crate) fn size(field: &str, value: u64) -> Result<usize, Failure> {
    usize::try_from(value).map_err(|_| {
        Failure::argument(format!("problem.{field} is {value}; it may be at most {} on this machine", usize::MAX))
    })
}

fn window(field: &str, value: i64) -> Result<Option<usize>, Failure> {
    match value {
        -1 => Ok(None),
        ..-1 => Err(Failure::argument(format!("problem.{field} is {value}; it must be 0 or more, or -1 for no limit"))),
        0.. => Ok(Some(usize::try_from(value).unwrap_or(usize::MAX))),
    }
}

pub(crate) fn switch(field: &str, value: i32) -> Result<bool, Failure> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Failure::argument(format!("problem.{field} is {other}; it must be 0 or 1"))),
    }
}

pub(crate) fn strides(field: &str, strides: Strides) -> Result<ApiStrides, Failure> {
    Ok(ApiStrides {
        batch: size(field, strides.batch)?,
        head: size(field, strides.head)?,
        row: size(field, strides.row)?,
    })
}

/// Body of a function that fills a problem.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to a `T` that can be written.
pub(crate) unsafe fn fill<T>(problem: *mut T, make: impl FnOnce() -> Result<T, Failure>) -> Status {
    guarded(|| {
        check_pointer("problem", problem)?;
        let made = make()?;
        // SAFETY: not null and aligned, and the caller promises that it can be written.
        unsafe { problem.write(made) };
        Ok(())
    })
}

/// Fills a problem with self-attention: as many key heads as query heads, as many keys as queries, scale
/// 1 / sqrt(head_dim), contiguous [batch, head, row, column], nothing masked, nothing optional.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to a flashcore_attention_problem_t that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_attention_problem_init(
    problem: *mut AttentionProblem,
    batch: u64,
    heads: u64,
    length: u64,
    head_dim: u64,
    dtype: i32,
) -> Status {
    let make = || {
        self::dtype("dtype", dtype)?;
        Ok(AttentionProblem {
            batch,
            query_heads: heads,
            key_heads: heads,
            query_length: length,
            key_length: length,
            head_dim,
            value_dim: head_dim,
            dtype,
            scale: 1.0 / (head_dim as f64).sqrt(),
            alignment: FLASHCORE_ALIGNMENT_BOTTOM_RIGHT,
            window_left: -1,
            window_right: -1,
            ..ProblemStruct::zeroed()
        })
    };
    // SAFETY: the contract is the same.
    unsafe { fill(problem, make) }
}
