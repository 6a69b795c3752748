//! Append to a KV cache, with QK-norm and rotary embedding.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};

use api::{
    AppendPlan, AppendProblem as ApiProblem, AppendStrides as ApiStrides, AppendTensors as ApiTensors, InputViews,
    OutputViews, PositionType, Positions, QkNorm, Rotary, RotaryStyle, TensorView, TensorViewMut,
};

use crate::operands::{
    Bytes, BytesMut, Range, Scale, ScaleBytes, ScaleMutBytes, check_apart, scale_strides, scale_view, scale_view_mut,
    slice_of, slice_of_mut,
};
use crate::problem::{Strides, dtype, float8, size, strides, switch, unknown};
use crate::registry;
use crate::sized::{self, SizedStruct, check_pointer};
use crate::status::{Failure, Status, guarded};

/// No rotary embedding.
pub const FLASHCORE_ROTARY_NONE: i32 = 0;
/// Columns i and i + rotary_dim / 2 make a pair (GPT-NeoX; rotary_interleaved=False).
pub const FLASHCORE_ROTARY_NEOX: i32 = 1;
/// Columns 2 i and 2 i + 1 make a pair (GPT-J; rotary_interleaved=True).
pub const FLASHCORE_ROTARY_GPTJ: i32 = 2;

/// An append to a KV cache, ready to be run any number of times, by any number of threads at once.
pub struct AppendHandle {
    _opaque: (),
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
    /// sizeof(flashcore_append_problem_t) of the caller.
    pub struct_size: u64,
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
    /// FLASHCORE_ROTARY_*: the rotary embedding of query and key.
    pub rotary: i32,
    /// Columns that are rotated: even, at most head_dim.
    pub rotary_dim: u64,
    /// Rows of the tables of cosines and sines. A position outside is an error in the host's memory, and clamped
    /// on a GPU.
    pub max_position: u64,
    /// Elements from one row of a table to the next; at least rotary_dim / 2.
    pub table_stride: u64,
    /// FLASHCORE_DTYPE_*: the elements of the tables, those of the tensors or float.
    pub table_dtype: i32,
    /// 32 or 64: bits of a position.
    pub position_bits: i32,
    /// 1 if query and key are normalized (RMS norm over head_dim) before the rotary embedding; else 0.
    pub qk_norm: i32,
    /// Added to the mean square.
    pub norm_eps: f32,
    /// Strides of the query; row is from one token to the next, batch is not used.
    pub query_strides: Strides,
    /// Strides of the query output.
    pub query_output_strides: Strides,
    /// Strides of the new keys.
    pub key_strides: Strides,
    /// Strides of the new values.
    pub value_strides: Strides,
    /// Strides of the key cache; batch is from one page to the next, row from one row of a page to the next.
    pub key_cache_strides: Strides,
    /// Strides of the value cache.
    pub value_cache_strides: Strides,
    /// FLASHCORE_DTYPE_E4M3 or FLASHCORE_DTYPE_E5M2: the elements of the caches, to which new keys and values are
    /// quantised; 0 for dtype.
    pub cache_dtype: i32,
    /// 1 if keys have a scale in an FP8 cache; else 0.
    pub k_scale: i32,
    /// 1 if values have a scale in an FP8 cache; else 0.
    pub v_scale: i32,
    /// 1 if those scales are computed, one for each row and head of the cache, and written; 0 if they are given.
    pub compute_scales: i32,
}

/// Addresses of device memory: everything that an append reads and writes. Set all of it to zero first; what the problem
/// does not have stays null.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AppendTensors {
    /// sizeof(flashcore_append_tensors_t) of the caller.
    pub struct_size: u64,
    /// New keys.
    pub key: *const c_void,
    /// New values.
    pub value: *const c_void,
    /// The key cache.
    pub key_cache: *mut c_void,
    /// The value cache; it may lie beside the rows of the key cache.
    pub value_cache: *mut c_void,
    /// Slot of each token.
    pub slot_mapping: *const i64,
    /// The query.
    pub query: *const c_void,
    /// The query output; it may be the query, with the same strides.
    pub query_output: *mut c_void,
    /// Position of each token, int32_t or int64_t.
    pub positions: *const c_void,
    /// Cosines, [max_position, rotary_dim / 2].
    pub cos: *const c_void,
    /// Sines, [max_position, rotary_dim / 2].
    pub sin: *const c_void,
    /// Weights of the norm of the query: head_dim elements.
    pub query_norm: *const c_void,
    /// Weights of the norm of the key: head_dim elements.
    pub key_norm: *const c_void,
    /// Tokens of this launch, at most those of the problem; 0 for as many.
    pub tokens: u64,
    /// The scale of keys in an FP8 cache; written where scales are computed.
    pub k_scale: Scale,
    /// The scale of values in an FP8 cache; written where scales are computed.
    pub v_scale: Scale,
}

/// Everything that an append reads, in the host's memory. What the problem does not have stays null.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AppendInputs {
    /// sizeof(flashcore_append_inputs_t) of the caller.
    pub struct_size: u64,
    /// New keys.
    pub key: Bytes,
    /// New values.
    pub value: Bytes,
    /// Slot of each token: int64_t.
    pub slot_mapping: Bytes,
    /// The query; null if the query output holds it.
    pub query: Bytes,
    /// Position of each token, int32_t or int64_t.
    pub positions: Bytes,
    /// Cosines.
    pub cos: Bytes,
    /// Sines.
    pub sin: Bytes,
    /// Weights of the norm of the query.
    pub query_norm: Bytes,
    /// Weights of the norm of the key.
    pub key_norm: Bytes,
    /// The scale of keys in an FP8 cache, where it is given.
    pub k_scale: ScaleBytes,
    /// The scale of values in an FP8 cache, where it is given.
    pub v_scale: ScaleBytes,
}

/// Everything that an append writes, in the host's memory. None of it may overlap anything else.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AppendOutputs {
    /// sizeof(flashcore_append_outputs_t) of the caller.
    pub struct_size: u64,
    /// The key cache.
    pub key_cache: BytesMut,
    /// The value cache; null if it lies in the memory of the key cache.
    pub value_cache: BytesMut,
    /// Elements from the first of the key cache to the first of the value cache, where that is null.
    pub value_offset: u64,
    /// The query output.
    pub query: BytesMut,
    /// The scales of keys in an FP8 cache, where they are computed.
    pub k_scale: ScaleMutBytes,
    /// The scales of values in an FP8 cache, where they are computed.
    pub v_scale: ScaleMutBytes,
}

// SAFETY: `repr(C)` of integers and floats, the first of them the size.
unsafe impl SizedStruct for AppendProblem {
    const NAME: &'static str = "flashcore_append_problem_t";
    const LEAST_BYTES: usize = offset_of!(Self, cache_dtype);
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for AppendTensors {
    const NAME: &'static str = "flashcore_append_tensors_t";
    const LEAST_BYTES: usize = offset_of!(Self, query);
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for AppendInputs {
    const NAME: &'static str = "flashcore_append_inputs_t";
    const LEAST_BYTES: usize = offset_of!(Self, query);
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for AppendOutputs {
    const NAME: &'static str = "flashcore_append_outputs_t";
    const LEAST_BYTES: usize = offset_of!(Self, query);
}

impl AppendProblem {
    fn to_api(self) -> Result<ApiProblem, Failure> {
        let (tokens, key_heads) = (size("tokens", self.tokens)?, size("key_heads", self.key_heads)?);
        let (head_dim, dtype_of) = (size("head_dim", self.head_dim)?, dtype(self.dtype)?);
        let (num_pages, page_size) = (size("num_pages", self.num_pages)?, size("page_size", self.page_size)?);
        let mut problem = ApiProblem::new(tokens, key_heads, head_dim, dtype_of, num_pages, page_size);
        problem.query_heads = size("query_heads", self.query_heads)?;
        problem.value_dim = size("value_dim", self.value_dim)?;
        problem.qk_norm = switch("qk_norm", self.qk_norm)?.then_some(QkNorm { eps: self.norm_eps });
        problem.cache_dtype = float8("cache_dtype", self.cache_dtype)?;
        (problem.k_scale, problem.v_scale) = (switch("k_scale", self.k_scale)?, switch("v_scale", self.v_scale)?);
        problem.compute_scales = switch("compute_scales", self.compute_scales)?;
        let positions = match self.position_bits {
            32 => PositionType::I32,
            64 => PositionType::I64,
            _ if self.rotary == FLASHCORE_ROTARY_NONE => PositionType::I64,
            other => return Err(Failure::argument(format!("problem.position_bits is {other}; it must be 32 or 64"))),
        };
        let table = [self.rotary_dim, self.max_position, self.table_stride];
        problem.rotary = rotary(self.rotary, table, self.table_dtype, positions)?;
        problem.strides = ApiStrides {
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

/// A rotary embedding: style, then dim, rows and stride of its tables.
pub(crate) fn rotary(
    style: i32,
    [dim, max_position, table_stride]: [u64; 3],
    table_dtype: i32,
    positions: PositionType,
) -> Result<Option<Rotary>, Failure> {
    let style = match style {
        FLASHCORE_ROTARY_NONE => return Ok(None),
        FLASHCORE_ROTARY_NEOX => RotaryStyle::Neox,
        FLASHCORE_ROTARY_GPTJ => RotaryStyle::GptJ,
        other => return Err(unknown("rotary", other, "FLASHCORE_ROTARY_*")),
    };
    Ok(Some(Rotary {
        style,
        dim: size("rotary_dim", dim)?,
        max_position: size("max_position", max_position)?,
        table_stride: size("table_stride", table_stride)?,
        table_dtype: Some(dtype(table_dtype)?),
        positions,
    }))
}

/// Fills the problem of an append: contiguous [token, head, column] and [page, row, head, column], values as wide as keys,
/// without rotary embedding and norm.
///
/// The function writes the fields up to value_cache_strides, and their size: a program that was compiled with an older
/// header has no room for more. In C and C++ a macro of the same name takes its place and writes all fields; other languages
/// call flashcore_append_problem_init_sized().
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
    let struct_size = AppendProblem::LEAST_BYTES as u64;
    // SAFETY: the caller promises that the fields of the first header can be written.
    unsafe {
        flashcore_append_problem_init_sized(
            problem,
            struct_size,
            tokens,
            query_heads,
            key_heads,
            head_dim,
            num_pages,
            page_size,
            dtype,
        )
    }
}

/// Like flashcore_append_problem_init(), with all fields: `struct_size` is sizeof(flashcore_append_problem_t) of the caller.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to `struct_size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_append_problem_init_sized(
    problem: *mut AppendProblem,
    struct_size: u64,
    tokens: u64,
    query_heads: u64,
    key_heads: u64,
    head_dim: u64,
    num_pages: u64,
    page_size: u64,
    dtype: i32,
) -> Status {
    guarded(|| {
        check_pointer("problem", problem)?;
        let bytes = sized::possible_size::<AppendProblem>("", struct_size)?;
        self::dtype(dtype)?;
        let token = |heads: u64| {
            let row = heads.saturating_mul(head_dim);
            Strides { batch: row.saturating_mul(tokens), head: head_dim, row }
        };
        let keys = token(key_heads);
        let cache = Strides { batch: keys.row.saturating_mul(page_size), ..keys };
        let initial = AppendProblem {
            struct_size,
            tokens,
            query_heads,
            key_heads,
            head_dim,
            value_dim: head_dim,
            num_pages,
            page_size,
            dtype,
            table_dtype: dtype,
            position_bits: 64,
            query_strides: token(query_heads),
            query_output_strides: token(query_heads),
            key_strides: keys,
            value_strides: keys,
            key_cache_strides: cache,
            value_cache_strides: cache,
            ..sized::zeroed()
        };
        // SAFETY: not null and aligned, and the caller promises that so many bytes can be written.
        unsafe { sized::write(problem, bytes, &initial) };
        Ok(())
    })
}

/// Makes a plan for an append on a device. On a GPU this compiles the kernel, or finds it in the cache.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to a flashcore_append_problem_t. `plan` must be null, which is an
/// error, or point to a pointer that can be written: it becomes the plan, or null if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_append_create(
    problem: *const AppendProblem,
    device_kind: i32,
    ordinal: i32,
    plan: *mut *mut AppendHandle,
) -> Status {
    let make = || {
        // SAFETY: the caller promises that it is null or a problem of its size.
        let problem = unsafe { sized::read("problem", problem) }?.to_api()?;
        let device = crate::device::open(device_kind, ordinal)?;
        Ok(AppendPlan::new(&problem, &device)?)
    };
    // SAFETY: the caller promises of `plan` what is asked here.
    unsafe { registry::create(plan, make) }
}

/// Launches an append on a CUDA stream and returns before it has finished. Nothing is allocated and nothing is waited for;
/// a launch can be captured into a CUDA graph.
///
/// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream.
///
/// # Safety
///
/// `tensors` must be null, which is an error, or point to a flashcore_append_tensors_t. Until the launch has finished, and
/// whenever a graph with it is executed, the memory that it names must hold the whole tensors, as far as the problem's
/// strides reach, nobody may write the inputs, and nobody may use the query output or the rows of the caches that are
/// written. The plan must not be destroyed before the stream has finished, or before a graph with the launch is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_append_launch(
    plan: *const AppendHandle,
    stream: *mut c_void,
    tensors: *const AppendTensors,
) -> Status {
    guarded(|| {
        let plan = registry::find(plan)?;
        // SAFETY: the caller promises that it is null or tensors of their size.
        let given = unsafe { sized::read("tensors", tensors) }?;
        let at = |pointer: *const c_void| pointer.addr() as u64;
        let mut tensors = ApiTensors::new(
            at(given.key),
            at(given.value),
            at(given.key_cache),
            at(given.value_cache),
            at(given.slot_mapping.cast()),
        )
        .with_query(at(given.query), at(given.query_output))
        .with_rotary(at(given.positions), at(given.cos), at(given.sin))
        .with_qk_norm(at(given.query_norm), at(given.key_norm))
        .with_k_scale(at(given.k_scale.data.cast()), scale_strides("k_scale", given.k_scale.strides)?)
        .with_v_scale(at(given.v_scale.data.cast()), scale_strides("v_scale", given.v_scale.strides)?);
        if given.tokens != 0 {
            tensors = tensors.with_tokens(size("tokens", given.tokens)?);
        }
        // SAFETY: what the caller promises of stream and memory is what the launch asks for.
        unsafe { plan.launch(stream, tensors) }.map_err(Failure::from)
    })
}

/// Appends tensors in the host's memory, and returns when the caches are written. On a GPU this copies everything there and
/// back: convenient, not fast.
///
/// # Safety
///
/// `inputs` and `outputs` must be null, which is an error, or point to their structs; what those point to must be
/// readable, and writable where it is an output, for as many bytes as they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_append_run_host(
    plan: *const AppendHandle,
    inputs: *const AppendInputs,
    outputs: *const AppendOutputs,
) -> Status {
    guarded(|| {
        let plan = registry::find(plan)?;
        // SAFETY: the caller promises that they are null or these structs, of their sizes.
        let (inputs, outputs) = unsafe { (sized::read("inputs", inputs)?, sized::read("outputs", outputs)?) };
        // SAFETY: the caller promises that the memory can be used as the structs say during this call.
        let (inputs, outputs) = unsafe { views(plan.problem(), &inputs, &outputs) }?;
        plan.run(&inputs, outputs).map_err(Failure::from)
    })
}

/// The views of a run.
///
/// # Safety
///
/// The memory that the structs point to can be read, and written where it is an output, for the lifetime chosen.
unsafe fn views<'a>(
    problem: &ApiProblem,
    inputs: &AppendInputs,
    outputs: &AppendOutputs,
) -> Result<(InputViews<'a>, OutputViews<'a>), Failure> {
    let (dtype, table_dtype) = (problem.dtype, problem.table_dtype());
    let (element, table) = (dtype.size_bytes(), table_dtype.size_bytes());
    let position_type = problem.rotary.map_or(PositionType::I64, |rotary| rotary.positions);
    let key = Range::read("inputs.key", inputs.key, element)?;
    let value = Range::read("inputs.value", inputs.value, element)?;
    let slots = Range::read("inputs.slot_mapping", inputs.slot_mapping, size_of::<i64>())?;
    let query = Range::read("inputs.query", inputs.query, element)?;
    let positions = Range::read("inputs.positions", inputs.positions, position_type.size_bytes())?;
    let cos = Range::read("inputs.cos", inputs.cos, table)?;
    let sin = Range::read("inputs.sin", inputs.sin, table)?;
    let query_norm = Range::read("inputs.query_norm", inputs.query_norm, element)?;
    let key_norm = Range::read("inputs.key_norm", inputs.key_norm, element)?;
    let cache_dtype = problem.cache_dtype();
    let key_cache = Range::written("outputs.key_cache", outputs.key_cache, cache_dtype.size_bytes())?;
    let value_cache = Range::written("outputs.value_cache", outputs.value_cache, cache_dtype.size_bytes())?;
    let query_output = Range::written("outputs.query", outputs.query, element)?;
    let k_given = Range::read("inputs.k_scale", inputs.k_scale.data, size_of::<f32>())?;
    let v_given = Range::read("inputs.v_scale", inputs.v_scale.data, size_of::<f32>())?;
    let k_written = Range::written("outputs.k_scale", outputs.k_scale.data, size_of::<f32>())?;
    let v_written = Range::written("outputs.v_scale", outputs.v_scale.data, size_of::<f32>())?;
    let read = [key, value, slots, query, positions, cos, sin, query_norm, key_norm, k_given, v_given];
    check_apart(&read, &[key_cache, value_cache, query_output, k_written, v_written])?;
    // SAFETY: the contract of this function; what is written is apart from everything else.
    unsafe {
        let view = |range, dtype| TensorView { dtype, data: slice_of(range).unwrap_or_default() };
        let mut views = InputViews::default();
        (views.new_key, views.new_value) = (view(key, dtype), view(value, dtype));
        (views.query, views.slot_mapping) = (view(query, dtype), Some(slice_of(slots).unwrap_or_default()));
        views.positions = match position_type {
            PositionType::I32 => slice_of(positions).map(Positions::I32),
            PositionType::I64 => slice_of(positions).map(Positions::I64),
        };
        (views.cos, views.sin) = (view(cos, table_dtype), view(sin, table_dtype));
        (views.query_norm, views.key_norm) = (view(query_norm, dtype), view(key_norm, dtype));
        views.k_scale = scale_view("k_scale", k_given, inputs.k_scale.strides)?;
        views.v_scale = scale_view("v_scale", v_given, inputs.v_scale.strides)?;
        let key_cache = TensorViewMut { dtype: cache_dtype, data: slice_of_mut(key_cache).unwrap_or_default() };
        let mut written = OutputViews::default().with_key_cache(key_cache);
        match slice_of_mut(value_cache) {
            Some(data) => written.value_cache = TensorViewMut { dtype: cache_dtype, data },
            None => written.value_offset = Some(size("value_offset", outputs.value_offset)?),
        }
        written.query_output = TensorViewMut { dtype, data: slice_of_mut(query_output).unwrap_or_default() };
        written.k_scale = scale_view_mut("k_scale", k_written, outputs.k_scale.strides)?;
        written.v_scale = scale_view_mut("v_scale", v_written, outputs.v_scale.strides)?;
        Ok((views, written))
    }
}

/// Destroys the plan of an append. Null is nothing to destroy and fine; one that was destroyed before is an error.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_append_destroy(plan: *mut AppendHandle) -> Status {
    registry::destroy(plan)
}
