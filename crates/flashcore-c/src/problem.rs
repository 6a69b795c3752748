//! `flashcore_problem_t`.

use std::ffi::{CStr, c_char};
use std::mem::{offset_of, size_of};

use api::expression::ExpressionError;
use api::{
    Alignment, DType, Layout, LseBase, Mask, MaskMod, PagedKv, Problem as ApiProblem, ScoreMod, Strides as ApiStrides,
    TensorStrides,
};

use crate::merge::{FLASHCORE_LSE_BASE_2, FLASHCORE_LSE_NATURAL};
use crate::sized::{self, SizedStruct, check_pointer};
use crate::status::{Failure, Status, guarded};

/// IEEE half precision.
pub const FLASHCORE_DTYPE_F16: i32 = 0;
/// bfloat16.
pub const FLASHCORE_DTYPE_BF16: i32 = 1;
/// IEEE single precision.
pub const FLASHCORE_DTYPE_F32: i32 = 2;
/// IEEE double precision.
pub const FLASHCORE_DTYPE_F64: i32 = 3;
/// FP8: 4 exponent bits, 3 mantissa bits, up to 448, no infinity (OCP e4m3fn).
pub const FLASHCORE_DTYPE_E4M3: i32 = 4;
/// FP8: 5 exponent bits, 2 mantissa bits, up to 57344 (OCP e5m2).
pub const FLASHCORE_DTYPE_E5M2: i32 = 5;

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

/// Distances in elements between neighbours of each dimension. Neighbouring columns are always adjacent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Strides {
    /// From one batch to the next.
    pub batch: u64,
    /// From one head to the next.
    pub head: u64,
    /// From one row of the sequence to the next.
    pub row: u64,
}

/// One attention problem: everything about it except the numbers in its tensors. Begin with flashcore_problem_init()
/// and change fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// sizeof(flashcore_problem_t) of the caller.
    pub struct_size: u64,
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
    /// FLASHCORE_MASK_*.
    pub mask: i32,
    /// FLASHCORE_ALIGNMENT_*: where a row stands among the keys, for masks.
    pub alignment: i32,
    /// FLASHCORE_LAYOUT_*.
    pub layout: i32,
    /// Keys attended before the row's own position, for FLASHCORE_MASK_WINDOW; -1 for no limit. A "sliding window of w"
    /// that counts the row itself is w - 1 here.
    pub window_left: i64,
    /// Keys attended after the row's own position, for FLASHCORE_MASK_WINDOW; -1 for no limit.
    pub window_right: i64,
    /// score = softcap * tanh(score / softcap); 0 for no softcap.
    pub softcap: f32,
    /// 1 if there is a slope per query head, subtracted for every position of distance; else 0.
    pub alibi: i32,
    /// 1 if there is a sink per query head: one more score in the denominator; else 0.
    pub sinks: i32,
    /// 1 if there is a bias that is added to the scores; else 0.
    pub bias: i32,
    /// 1 if each batch has a key length of its own; else 0.
    pub seqused_k: i32,
    /// 1 if the log-sum-exp of each row is wanted; else 0.
    pub lse: i32,
    /// Must be 0.
    pub reserved: i64,
    /// For FLASHCORE_LAYOUT_STRIDED.
    pub query_strides: Strides,
    /// For FLASHCORE_LAYOUT_STRIDED.
    pub key_strides: Strides,
    /// For FLASHCORE_LAYOUT_STRIDED.
    pub value_strides: Strides,
    /// For FLASHCORE_LAYOUT_STRIDED.
    pub output_strides: Strides,
    /// 1 if the query rows of all sequences are packed into one batch of total_q rows (varlen); else 0. Query and output
    /// are then tensors of one batch: FLASHCORE_LAYOUT_BSHD is [total_q, head, column].
    pub cu_seqlens_q: i32,
    /// 1 if the keys of all sequences are packed into one batch of total_k rows (varlen); else 0.
    pub cu_seqlens_k: i32,
    /// 1 if each sequence has a number of query rows of its own, at most query_length; else 0.
    pub seqused_q: i32,
    /// 1 if each sequence begins with padding among its keys; else 0.
    pub leftpad_k: i32,
    /// 1 if each sequence names the batch of the KV cache, or the row of the page table, that it reads; else 0.
    pub kv_batch_idx: i32,
    /// 1 if key and value are num_pages pages of page_size rows each, which a page table gives to the sequences; else 0.
    /// The batch strides of key and value are then those from page to page.
    pub page_table: i32,
    /// Rows of query and output in all, for cu_seqlens_q; else 0.
    pub total_q: u64,
    /// Rows of key and value in all, for cu_seqlens_k; else 0.
    pub total_k: u64,
    /// Batches of the KV cache, or rows of the page table, for kv_batch_idx; else 0.
    pub kv_batch: u64,
    /// Rows of a page, for page_table; else 0.
    pub page_size: u64,
    /// Pages of the cache, for page_table; else 0.
    pub num_pages: u64,
    /// Entries of a row of the page table, for page_table; else 0. table_width * page_size must be at least key_length.
    pub table_width: u64,
    /// Entries from one row of the page table to the next, for page_table; 0 for table_width.
    pub table_stride: u64,
    /// FLASHCORE_LSE_*: the base of the log-sum-exp.
    pub lse_base: i32,
    /// 1 if the log-sum-exp leaves the sink out: that of the keys alone; else 0.
    pub lse_without_sink: i32,
    /// The change of each score, an expression like "score + 0.1 * (query - key)", with a terminating zero; null for none.
    /// docs/score-mod.md has the language. The text is not needed after the plan is made.
    pub score_mod: *const c_char,
    /// The keys that take part besides those of mask, an expression like "aux_i32[query] == aux_i32[key]"; null for all.
    pub mask_mod: *const c_char,
    /// Entries of the table of floats that score_mod and mask_mod read; 0 if they read none.
    pub aux_f32: u64,
    /// Entries of the table of integers that score_mod and mask_mod read; 0 if they read none.
    pub aux_i32: u64,
    /// FLASHCORE_DTYPE_E4M3 or FLASHCORE_DTYPE_E5M2: the elements of key and value, a KV cache in FP8; 0 for dtype.
    pub kv_dtype: i32,
    /// FLASHCORE_DTYPE_F16 or FLASHCORE_DTYPE_BF16: the elements of the output where dtype is FLASHCORE_DTYPE_E4M3; else 0.
    pub out_dtype: i32,
    /// 1 if an FP8 query has a scale; else 0.
    pub q_scale: i32,
    /// 1 if an FP8 key has a scale; else 0.
    pub k_scale: i32,
    /// 1 if an FP8 value has a scale; else 0.
    pub v_scale: i32,
    /// Must be 0.
    pub reserved_scales: i32,
}

// SAFETY: `repr(C)` of integers, floats and addresses, the first of them the size.
unsafe impl SizedStruct for Problem {
    const NAME: &'static str = "flashcore_problem_t";
    const LEAST_BYTES: usize = offset_of!(Self, query_strides);
}

impl Problem {
    /// The problem in Rust; the plan validates it.
    ///
    /// # Safety
    ///
    /// score_mod and mask_mod are null or texts with a terminating zero.
    pub(crate) unsafe fn to_api(self) -> Result<ApiProblem, Failure> {
        if self.reserved != 0 {
            return Err(Failure::argument(format!("problem.reserved is {}; it must be 0", self.reserved)));
        }
        if self.reserved_scales != 0 {
            let given = self.reserved_scales;
            return Err(Failure::argument(format!("problem.reserved_scales is {given}; it must be 0")));
        }
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
        let mut problem = ApiProblem::new(batch, query_heads, query_length, head_dim, dtype(self.dtype)?);
        problem.key_heads = key_heads;
        problem.key_length = key_length;
        problem.value_dim = value_dim;
        problem.scale = self.scale;
        problem.mask = mask;
        problem.softcap = (self.softcap != 0.0).then_some(self.softcap);
        self.set_switches(&mut problem)?;
        problem.lse_form.base = lse_base("lse_base", self.lse_base)?;
        problem.lse_form.includes_sink = !switch("lse_without_sink", self.lse_without_sink)?;
        problem.layout = layout;
        // SAFETY: the contract of this function.
        let (score_mod, mask_mod) =
            unsafe { (expression("score_mod", self.score_mod)?, expression("mask_mod", self.mask_mod)?) };
        let refused = |field: &str, error: ExpressionError| Failure::argument(format!("problem.{field}: {error}"));
        problem.score_mod = score_mod.map(ScoreMod::parse).transpose().map_err(|error| refused("score_mod", error))?;
        problem.mask_mod = mask_mod.map(MaskMod::parse).transpose().map_err(|error| refused("mask_mod", error))?;
        (problem.kv_dtype, problem.out_dtype) = self.other_dtypes(problem.dtype)?;
        Ok(problem)
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

/// Reads the switch of an operand, with the sizes that belong to it.
macro_rules! read_switch {
    ($from:ident, $to:ident, $operand:ident, $switch:ident: bool) => {
        $to.$switch = switch(stringify!($switch), $from.$switch)?
    };
    ($from:ident, $to:ident, $operand:ident, $switch:ident: usize) => {
        $to.$switch = size(stringify!($switch), $from.$switch)?
    };
    ($from:ident, $to:ident, $operand:ident, $switch:ident: TotalRows) => {
        $to.$switch =
            sizes((stringify!($operand), $from.$operand), [(stringify!($switch), $from.$switch)])?.map(|[rows]| rows)
    };
    ($from:ident, $to:ident, $operand:ident, $switch:ident: Paging) => {
        $to.$switch = $from.paging((stringify!($operand), $from.$operand))?
    };
}

impl Problem {
    /// Sets the switches of the operands.
    fn set_switches(self, problem: &mut ApiProblem) -> Result<(), Failure> {
        read_switch!(self, problem, lse, lse: bool);
        read_switch!(self, problem, cu_seqlens_q, total_q: TotalRows);
        read_switch!(self, problem, cu_seqlens_k, total_k: TotalRows);
        read_switch!(self, problem, seqused_q, seqused_q: bool);
        read_switch!(self, problem, seqused_k, seqused_k: bool);
        read_switch!(self, problem, leftpad_k, leftpad_k: bool);
        read_switch!(self, problem, kv_batch_idx, kv_batch: TotalRows);
        read_switch!(self, problem, page_table, paged: Paging);
        read_switch!(self, problem, alibi_slopes, alibi: bool);
        read_switch!(self, problem, sinks, sinks: bool);
        read_switch!(self, problem, aux_f32, aux_f32: usize);
        read_switch!(self, problem, aux_i32, aux_i32: usize);
        read_switch!(self, problem, bias, bias: bool);
        read_switch!(self, problem, q_scale, q_scale: bool);
        read_switch!(self, problem, k_scale, k_scale: bool);
        read_switch!(self, problem, v_scale, v_scale: bool);
        Ok(())
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

impl Problem {
    /// The types of key and value and of the output, where they are not that of the query.
    fn other_dtypes(self, query: DType) -> Result<(Option<DType>, Option<DType>), Failure> {
        let kv_dtype = float8("kv_dtype", self.kv_dtype)?;
        let out_dtype = match (query, self.out_dtype) {
            (DType::E4m3, FLASHCORE_DTYPE_F16) => Some(DType::F16),
            (DType::E4m3, FLASHCORE_DTYPE_BF16) => Some(DType::Bf16),
            (DType::E4m3, other) => {
                return Err(unknown("out_dtype", other, "FLASHCORE_DTYPE_F16, FLASHCORE_DTYPE_BF16"));
            }
            (_, 0) => None,
            (_, other) => return Err(unknown("out_dtype", other, "0, unless dtype is FLASHCORE_DTYPE_E4M3")),
        };
        Ok((kv_dtype, out_dtype))
    }
}

impl Problem {
    /// The paged KV cache, where there is a page table.
    fn paging(self, table: (&str, i32)) -> Result<Option<PagedKv>, Failure> {
        let fields = [
            ("page_size", self.page_size),
            ("num_pages", self.num_pages),
            ("table_width", self.table_width),
            ("table_stride", self.table_stride),
        ];
        let Some([page_size, num_pages, table_width, table_stride]) = sizes(table, fields)? else { return Ok(None) };
        let mut paged = PagedKv::new(page_size, num_pages, table_width);
        if table_stride > 0 {
            paged.table_stride = table_stride;
        }
        Ok(Some(paged))
    }
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

pub(crate) fn unknown(field: &str, value: i32, allowed: &str) -> Failure {
    Failure::argument(format!("problem.{field} is {value}; it must be one of {allowed}"))
}

pub(crate) fn dtype(value: i32) -> Result<DType, Failure> {
    match value {
        FLASHCORE_DTYPE_F16 => Ok(DType::F16),
        FLASHCORE_DTYPE_BF16 => Ok(DType::Bf16),
        FLASHCORE_DTYPE_F32 => Ok(DType::F32),
        FLASHCORE_DTYPE_F64 => Ok(DType::F64),
        FLASHCORE_DTYPE_E4M3 => Ok(DType::E4m3),
        FLASHCORE_DTYPE_E5M2 => Ok(DType::E5m2),
        other => Err(unknown("dtype", other, "FLASHCORE_DTYPE_*")),
    }
}

pub(crate) fn lse_base(field: &str, value: i32) -> Result<LseBase, Failure> {
    match value {
        FLASHCORE_LSE_NATURAL => Ok(LseBase::Natural),
        FLASHCORE_LSE_BASE_2 => Ok(LseBase::Two),
        other => Err(unknown(field, other, "FLASHCORE_LSE_*")),
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

/// Fills a problem with self-attention: as many key heads as query heads, as many keys as queries, scale
/// 1 / sqrt(head_dim), contiguous [batch, head, row, column], nothing masked, nothing optional.
///
/// The function writes the fields of version 0.1, up to output_strides, and their size: a program that was compiled with the
/// first header has no room for more. In C and C++ a macro of the same name takes its place and writes all fields; other
/// languages call flashcore_problem_init_sized().
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to a flashcore_problem_t that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_problem_init(
    problem: *mut Problem,
    batch: u64,
    heads: u64,
    length: u64,
    head_dim: u64,
    dtype: i32,
) -> Status {
    // SAFETY: the caller promises that the fields of version 0.1 can be written.
    unsafe { flashcore_problem_init_sized(problem, INITIAL_BYTES as u64, batch, heads, length, head_dim, dtype) }
}

/// Like flashcore_problem_init(), with the fields that came after version 0.1: `struct_size` is sizeof(flashcore_problem_t)
/// of the caller. Fields that came later are read only if struct_size reaches that far.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to `struct_size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_problem_init_sized(
    problem: *mut Problem,
    struct_size: u64,
    batch: u64,
    heads: u64,
    length: u64,
    head_dim: u64,
    dtype: i32,
) -> Status {
    guarded(|| {
        check_pointer("problem", problem)?;
        let bytes = sized::possible_size::<Problem>("", struct_size)?;
        self::dtype(dtype)?;
        let initial = Problem {
            struct_size,
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
            ..sized::zeroed()
        };
        // SAFETY: not null and aligned, and the caller promises that so many bytes can be written.
        unsafe { sized::write(problem, bytes, &initial) };
        Ok(())
    })
}

/// Bytes of the fields of version 0.1.
pub(crate) const INITIAL_BYTES: usize = offset_of!(Problem, output_strides) + size_of::<Strides>();
