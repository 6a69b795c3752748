//! Attention with a growing KV cache: append by sequence, rotary embedding, attention.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};

use api::{
    DTypes, KvCacheInputs as ApiInputs, KvCacheOutputs as ApiOutputs, KvCachePlan, KvCacheProblem as ApiProblem,
    KvCacheTensors as ApiTensors, PositionType, QkNorm, TensorView, TensorViewMut,
};

use crate::append::rotary;
use crate::operands::{
    self, Bytes, BytesMut, Inputs, Outputs, Range, ScaleBytes, ScaleMutBytes, Tensors, check_apart, scale_view_mut,
    slice_of, slice_of_mut,
};
use crate::problem::{Problem, Strides, size, strides, switch};
use crate::registry;
use crate::sized::{self, SizedStruct, check_pointer};
use crate::status::{Failure, Status, guarded};

/// Attention with a growing KV cache, ready to be run any number of times, by any number of threads at once.
pub struct KvCacheHandle {
    _opaque: (),
}

/// The append before attention with a KV cache that grows (flash_attn_with_kvcache): everything about it except the numbers
/// in its tensors. Begin with flashcore_kvcache_problem_init() and change fields.
///
/// New key i of sequence b goes to row cache_seqlens[b] + i of the sequence, and is rotated by that position, or by
/// rotary_seqlens[b] + i; query row i is rotated by the same position with a causal mask or a window, else by that of row 0.
/// The query then attends cache_seqlens[b] keys and the new ones, less leftpad_k[b]. Two sequences may share pages of keys
/// that they have; rows that are appended must belong to one.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KvCacheProblem {
    /// sizeof(flashcore_kvcache_problem_t) of the caller.
    pub struct_size: u64,
    /// New keys of each sequence; with total_new, the most that a sequence may have.
    pub new_length: u64,
    /// Rows of the new keys of all sequences where they are packed into one batch (cu_seqlens_k_new); else 0.
    pub total_new: u64,
    /// FLASHCORE_ROTARY_*: the rotary embedding of query and new keys.
    pub rotary: i32,
    /// 1 if each sequence says where its positions start; 0 for cache_seqlens.
    pub rotary_seqlens: i32,
    /// Columns that are rotated: even, at most head_dim.
    pub rotary_dim: u64,
    /// Rows of the tables of cosines and sines. A position outside is an error in the host's memory, and clamped
    /// on a GPU.
    pub max_position: u64,
    /// Elements from one row of a table to the next; at least rotary_dim / 2.
    pub table_stride: u64,
    /// FLASHCORE_DTYPE_*: the elements of the tables, those of the tensors or float.
    pub table_dtype: i32,
    /// 1 if query and new keys are normalized (RMS norm over head_dim) before the rotary embedding; else 0.
    pub qk_norm: i32,
    /// Added to the mean square.
    pub norm_eps: f32,
    /// Must be 0.
    pub reserved: i32,
    /// Strides of the new keys.
    pub new_key_strides: Strides,
    /// Strides of the new values.
    pub new_value_strides: Strides,
    /// 1 if the scales of new keys and values in an FP8 cache (kv_dtype of the attention) are computed, one for each row and
    /// head, and written; 0 if they are given.
    pub compute_scales: i32,
    /// Must be 0.
    pub reserved_scales: i32,
}

/// Addresses of device memory: what attention with a growing KV cache has beside a flashcore_tensors_t. Set all of it
/// to zero first; what the problem does not have stays null.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KvCacheTensors {
    /// sizeof(flashcore_kvcache_tensors_t) of the caller.
    pub struct_size: u64,
    /// New keys.
    pub new_key: *const c_void,
    /// New values.
    pub new_value: *const c_void,
    /// Where the new keys of each sequence begin among all total_new, and where the last ends: batch + 1 uint32_t.
    pub cu_seqlens_k_new: *const u32,
    /// Position of the first new key and query row of each sequence.
    pub rotary_seqlens: *const u32,
    /// Cosines, [max_position, rotary_dim / 2].
    pub cos: *const c_void,
    /// Sines, [max_position, rotary_dim / 2].
    pub sin: *const c_void,
    /// Weights of the norm of the query: head_dim elements.
    pub query_norm: *const c_void,
    /// Weights of the norm of the key: head_dim elements.
    pub key_norm: *const c_void,
}

/// Tensors that attention with a growing KV cache reads beside a flashcore_inputs_t, in the host's memory. What the
/// problem does not have stays null.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KvCacheInputs {
    /// sizeof(flashcore_kvcache_inputs_t) of the caller.
    pub struct_size: u64,
    /// Where the new keys of each sequence begin among all total_new, and where the last ends: batch + 1 uint32_t.
    pub cu_seqlens_k_new: Bytes,
    /// Position of the first new key and query row of each sequence: uint32_t.
    pub rotary_seqlens: Bytes,
    /// Cosines.
    pub cos: Bytes,
    /// Sines.
    pub sin: Bytes,
    /// Weights of the norm of the query.
    pub query_norm: Bytes,
    /// Weights of the norm of the key.
    pub key_norm: Bytes,
}

/// The caches, which are read and written, in the host's memory. None of it may overlap anything else.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KvCaches {
    /// sizeof(flashcore_kvcaches_t) of the caller.
    pub struct_size: u64,
    /// The key cache.
    pub key_cache: BytesMut,
    /// The value cache; null if it lies in the memory of the key cache.
    pub value_cache: BytesMut,
    /// Elements from the first of the key cache to the first of the value cache, where that is null.
    pub value_offset: u64,
    /// The scales of the key cache, where those of new keys are computed.
    pub k_scale: ScaleMutBytes,
    /// The scales of the value cache, where those of new values are computed.
    pub v_scale: ScaleMutBytes,
}

// SAFETY: `repr(C)` of integers and floats, the first of them the size.
unsafe impl SizedStruct for KvCacheProblem {
    const NAME: &'static str = "flashcore_kvcache_problem_t";
    const LEAST_BYTES: usize = offset_of!(Self, compute_scales);
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for KvCacheTensors {
    const NAME: &'static str = "flashcore_kvcache_tensors_t";
    const LEAST_BYTES: usize = offset_of!(Self, cu_seqlens_k_new);
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for KvCacheInputs {
    const NAME: &'static str = "flashcore_kvcache_inputs_t";
    const LEAST_BYTES: usize = offset_of!(Self, query_norm);
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for KvCaches {
    const NAME: &'static str = "flashcore_kvcaches_t";
    const LEAST_BYTES: usize = offset_of!(Self, k_scale);
}

impl KvCacheProblem {
    fn to_api(self, attention: api::Problem) -> Result<ApiProblem, Failure> {
        if self.reserved != 0 {
            return Err(Failure::argument(format!("problem.reserved is {}; it must be 0", self.reserved)));
        }
        if self.reserved_scales != 0 {
            let given = self.reserved_scales;
            return Err(Failure::argument(format!("problem.reserved_scales is {given}; it must be 0")));
        }
        let is_lengths_on = attention.seqused_k;
        let mut problem = ApiProblem::new(attention, size("new_length", self.new_length)?);
        problem.attention.seqused_k = is_lengths_on;
        problem.total_new = Some(size("total_new", self.total_new)?).filter(|&rows| rows > 0);
        let table = [self.rotary_dim, self.max_position, self.table_stride];
        problem.rotary = rotary(self.rotary, table, self.table_dtype, PositionType::I32)?;
        problem.rotary_seqlens = switch("rotary_seqlens", self.rotary_seqlens)?;
        problem.qk_norm = switch("qk_norm", self.qk_norm)?.then_some(QkNorm { eps: self.norm_eps });
        problem.compute_scales = switch("compute_scales", self.compute_scales)?;
        problem.new_key = strides("new_key_strides", self.new_key_strides)?;
        problem.new_value = strides("new_value_strides", self.new_value_strides)?;
        Ok(problem)
    }
}

/// Fills the append before attention: new_length keys for each sequence of the attention, new keys and values contiguous
/// [batch, row, head, column], without rotary embedding and norm.
///
/// The function writes the fields up to new_value_strides, and their size: a program that was compiled with an older header
/// has no room for more. In C and C++ a macro of the same name takes its place and writes all fields; other languages call
/// flashcore_kvcache_problem_init_sized().
///
/// # Safety
///
/// `attention` must be null, which is an error, or point to a flashcore_problem_t. `problem` must be null, which is an
/// error, or point to a flashcore_kvcache_problem_t that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_kvcache_problem_init(
    problem: *mut KvCacheProblem,
    attention: *const Problem,
    new_length: u64,
) -> Status {
    let struct_size = KvCacheProblem::LEAST_BYTES as u64;
    // SAFETY: the caller promises that the fields of the first header can be written.
    unsafe { flashcore_kvcache_problem_init_sized(problem, struct_size, attention, new_length) }
}

/// Like flashcore_kvcache_problem_init(), with all fields: `struct_size` is sizeof(flashcore_kvcache_problem_t) of the caller.
///
/// # Safety
///
/// `attention` must be null, which is an error, or point to a flashcore_problem_t. `problem` must be null, which is an
/// error, or point to `struct_size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_kvcache_problem_init_sized(
    problem: *mut KvCacheProblem,
    struct_size: u64,
    attention: *const Problem,
    new_length: u64,
) -> Status {
    guarded(|| {
        check_pointer("problem", problem)?;
        let bytes = sized::possible_size::<KvCacheProblem>("", struct_size)?;
        // SAFETY: the caller promises that it is null or a problem of its size.
        let attention = unsafe { sized::read("attention", attention) }?;
        let contiguous = |columns: u64| {
            let row = attention.key_heads.saturating_mul(columns);
            Strides { batch: row.saturating_mul(new_length), head: columns, row }
        };
        let initial = KvCacheProblem {
            struct_size,
            new_length,
            table_dtype: attention.dtype,
            new_key_strides: contiguous(attention.head_dim),
            new_value_strides: contiguous(attention.value_dim),
            ..sized::zeroed()
        };
        // SAFETY: not null and aligned, and the caller promises that so many bytes can be written.
        unsafe { sized::write(problem, bytes, &initial) };
        Ok(())
    })
}

/// Makes a plan for attention with a growing KV cache on a device. Key and value of the attention are the caches, and its
/// seqused_k must be 1. On a GPU this compiles the kernels, or finds them in the cache.
///
/// # Safety
///
/// `attention` and `problem` must be null, which is an error, or point to their structs. `plan` must be null, which is an
/// error, or point to a pointer that can be written: it becomes the plan, or null if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_kvcache_create(
    attention: *const Problem,
    problem: *const KvCacheProblem,
    device_kind: i32,
    ordinal: i32,
    plan: *mut *mut KvCacheHandle,
) -> Status {
    let make = || {
        // SAFETY: the caller promises that they are null or these structs, of their sizes.
        let (attention, problem) = unsafe { (sized::read("attention", attention)?, sized::read("problem", problem)?) };
        // SAFETY: the caller promises texts that end.
        let problem = problem.to_api(unsafe { attention.to_api() }?)?;
        let device = crate::device::open(device_kind, ordinal)?;
        Ok(KvCachePlan::new(&problem, &device)?)
    };
    // SAFETY: the caller promises of `plan` what is asked here.
    unsafe { registry::create(plan, make) }
}

/// Launches append and attention on a CUDA stream and returns before they have finished. Key and value of `attention` are
/// the caches, its seqused_k are the rows that each sequence uses before the append (cache_seqlens), and its workspace, if
/// any, has flashcore_kvcache_workspace_bytes(). Nothing is waited for; a launch can be captured into a CUDA graph, and
/// workspaces are as for flashcore_plan_launch_tensors().
///
/// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream.
///
/// # Safety
///
/// `attention` and `tensors` must be null, which is an error, or point to their structs. Until the launch has finished, and
/// whenever a graph with it is executed, the memory that they name must hold the whole tensors, as far as the problem's
/// strides reach, nobody may write the inputs, and nobody may use the outputs, the rows of the caches that are written, or
/// a workspace that the launch brings. The plan must not be destroyed before the stream has finished, or before a graph with
/// the launch is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_kvcache_launch(
    plan: *const KvCacheHandle,
    stream: *mut c_void,
    attention: *const Tensors,
    tensors: *const KvCacheTensors,
) -> Status {
    guarded(|| {
        let plan = registry::find(plan)?;
        // SAFETY: the caller promises that they are null or these structs, of their sizes.
        let (attention, given) = unsafe { (sized::read("attention", attention)?, sized::read("tensors", tensors)?) };
        let at = |pointer: *const c_void| pointer.addr() as u64;
        let tensors = ApiTensors::new(attention.to_api()?, at(given.new_key), at(given.new_value))
            .with_cu_seqlens_k_new(at(given.cu_seqlens_k_new.cast()))
            .with_rotary_seqlens(at(given.rotary_seqlens.cast()))
            .with_rotary(at(given.cos), at(given.sin))
            .with_qk_norm(at(given.query_norm), at(given.key_norm));
        // SAFETY: what the caller promises of stream and memory is what the launch asks for.
        unsafe { plan.launch(stream, tensors) }.map_err(Failure::from)
    })
}

/// Bytes of device memory that the kernels of a launch use among themselves; 0 on the CPU, and if it is no plan, which
/// flashcore_last_error() then says.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_kvcache_workspace_bytes(plan: *const KvCacheHandle) -> u64 {
    registry::number_of(plan, KvCachePlan::workspace_bytes)
}

/// Appends and attends tensors in the host's memory, and returns when caches and outputs are written. Key and value of
/// `attention` are the new ones, and its seqused_k are the rows that each sequence uses before the append (cache_seqlens).
/// Everything is checked first: a sequence without room for its new keys is an error, and nothing is written. On a GPU this
/// copies everything there and back: convenient, not fast.
///
/// # Safety
///
/// The pointers must be null, which is an error, or point to their structs; what those point to must be readable, and
/// writable where it is a cache or an output, for as many bytes as they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_kvcache_run_host(
    plan: *const KvCacheHandle,
    attention: *const Inputs,
    inputs: *const KvCacheInputs,
    caches: *const KvCaches,
    outputs: *const Outputs,
) -> Status {
    guarded(|| {
        let plan = registry::find(plan)?;
        // SAFETY: the caller promises that they are null or these structs, of their sizes.
        let (attention, inputs, caches, outputs) = unsafe {
            (
                sized::read("attention", attention)?,
                sized::read("inputs", inputs)?,
                sized::read("caches", caches)?,
                sized::read("outputs", outputs)?,
            )
        };
        // SAFETY: the caller promises that the memory can be used as the structs say during this call.
        let (inputs, outputs) = unsafe { views(plan.problem(), &attention, &inputs, &caches, &outputs) }?;
        plan.run(&inputs, outputs).map_err(Failure::from)
    })
}

/// Like flashcore_kvcache_run_host(), with the structs of a launch: addresses of the host's memory, without numbers of bytes.
/// As in a launch, key and value of `attention` are the caches, here each in memory of its own.
///
/// # Safety
///
/// `attention` and `tensors` must be null, which is an error, or point to their structs. The memory that they name must hold
/// the whole tensors, as far as the problem's strides reach; caches and outputs must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_kvcache_run_tensors(
    plan: *const KvCacheHandle,
    attention: *const Tensors,
    tensors: *const KvCacheTensors,
) -> Status {
    guarded(|| {
        let plan = registry::find(plan)?;
        // SAFETY: the caller promises that they are null or these structs, of their sizes.
        let (attention, tensors) = unsafe { (sized::read("attention", attention)?, sized::read("tensors", tensors)?) };
        let (mut inputs, outputs) = attention.to_host(&plan.problem().attention)?;
        let written = |Bytes { data, bytes }: Bytes| BytesMut { data: data.cast_mut(), bytes };
        let mut caches =
            KvCaches { key_cache: written(inputs.key), value_cache: written(inputs.value), ..sized::zeroed() };
        if plan.problem().compute_scales {
            // Scales that are computed are written, and no inputs.
            let nothing = sized::zeroed::<Inputs>();
            let moved = |ScaleBytes { data, strides }: ScaleBytes| ScaleMutBytes { data: written(data), strides };
            (caches.k_scale, caches.v_scale) = (moved(inputs.k_scale), moved(inputs.v_scale));
            (inputs.k_scale, inputs.v_scale) = (nothing.k_scale, nothing.v_scale);
        }
        if caches.value_cache.data.is_null() {
            return Err(Failure::argument("attention.value is null; it must be the value cache"));
        }
        let (key, value, tables) = tensors.to_host(plan.problem())?;
        let inputs = Inputs { key, value, ..inputs };
        // SAFETY: the caller promises that the memory holds the whole tensors during this call.
        let (inputs, outputs) = unsafe { views(plan.problem(), &inputs, &tables, &caches, &outputs) }?;
        plan.run(&inputs, outputs).map_err(Failure::from)
    })
}

impl KvCacheTensors {
    /// New keys, new values and the rest of a run, each with as many bytes as the problem needs.
    fn to_host(self, problem: &ApiProblem) -> Result<(Bytes, Bytes, KvCacheInputs), Failure> {
        let (batch, dtype) = (problem.attention.batch, problem.attention.dtype);
        let bytes = |name: &str, data: *const c_void, elements: Option<usize>, size: usize| -> Result<Bytes, Failure> {
            if data.is_null() {
                return Ok(Bytes { data, bytes: 0 });
            }
            let bytes = elements.and_then(|elements| elements.checked_mul(size)).ok_or_else(|| {
                Failure::argument(format!("tensors.{name} reaches beyond the address space; check its strides"))
            })?;
            Ok(Bytes { data, bytes: bytes as u64 })
        };
        let (element, table) = (dtype.size_bytes(), problem.append(0).table_dtype().size_bytes());
        let new_keys = problem.new_key.extent(problem.new_key_shape());
        let new_values = problem.new_value.extent(problem.new_value_shape());
        // Without a rotary embedding there is no table; one that is given is refused by its presence.
        let entries = problem.rotary.map_or(Some(0), api::Rotary::table_extent);
        let columns = Some(problem.attention.head_dim);
        let tables = KvCacheInputs {
            cu_seqlens_k_new: bytes("cu_seqlens_k_new", self.cu_seqlens_k_new.cast(), batch.checked_add(1), 4)?,
            rotary_seqlens: bytes("rotary_seqlens", self.rotary_seqlens.cast(), Some(batch), 4)?,
            cos: bytes("cos", self.cos, entries, table)?,
            sin: bytes("sin", self.sin, entries, table)?,
            query_norm: bytes("query_norm", self.query_norm, columns, element)?,
            key_norm: bytes("key_norm", self.key_norm, columns, element)?,
            ..sized::zeroed()
        };
        let key = bytes("new_key", self.new_key, new_keys, element)?;
        Ok((key, bytes("new_value", self.new_value, new_values, element)?, tables))
    }
}

/// The views of a run.
///
/// # Safety
///
/// The memory that the structs point to can be read, and written where it is a cache or an output, for the lifetime chosen.
unsafe fn views<'a>(
    problem: &ApiProblem,
    attention: &Inputs,
    inputs: &KvCacheInputs,
    caches: &KvCaches,
    outputs: &Outputs,
) -> Result<(ApiInputs<'a>, ApiOutputs<'a>), Failure> {
    let dtype = problem.attention.dtype;
    let table_dtype = problem.append(0).table_dtype();
    let (element, table) = (dtype.size_bytes(), table_dtype.size_bytes());
    let offsets = Range::read("inputs.cu_seqlens_k_new", inputs.cu_seqlens_k_new, size_of::<u32>())?;
    let starts = Range::read("inputs.rotary_seqlens", inputs.rotary_seqlens, size_of::<u32>())?;
    let cos = Range::read("inputs.cos", inputs.cos, table)?;
    let sin = Range::read("inputs.sin", inputs.sin, table)?;
    let query_norm = Range::read("inputs.query_norm", inputs.query_norm, element)?;
    let key_norm = Range::read("inputs.key_norm", inputs.key_norm, element)?;
    let cache_dtype = problem.append(0).cache_dtype();
    let key_cache = Range::written("caches.key_cache", caches.key_cache, cache_dtype.size_bytes())?;
    let value_cache = Range::written("caches.value_cache", caches.value_cache, cache_dtype.size_bytes())?;
    let k_scale = Range::written("caches.k_scale", caches.k_scale.data, size_of::<f32>())?;
    let v_scale = Range::written("caches.v_scale", caches.v_scale.data, size_of::<f32>())?;
    // Key and value of the attention are the new ones, of the type of the query.
    let types = DTypes { key_value: dtype, ..problem.attention.dtypes() };
    let [mut read, mut written] = operands::ranges(attention, outputs, types)?;
    read.extend([offsets, starts, cos, sin, query_norm, key_norm]);
    written.extend([key_cache, value_cache, k_scale, v_scale]);
    check_apart(&read, &written)?;
    // SAFETY: the contract of this function; what is written is apart from everything else.
    unsafe {
        let (attention, attended) = operands::views(attention, outputs, types)?;
        let view = |range, dtype| slice_of(range).map(|data| TensorView { dtype, data });
        let mut views = ApiInputs::new(attention);
        (views.cu_seqlens_k_new, views.rotary_seqlens) = (slice_of(offsets), slice_of(starts));
        (views.cos, views.sin) = (view(cos, table_dtype), view(sin, table_dtype));
        (views.query_norm, views.key_norm) = (view(query_norm, dtype), view(key_norm, dtype));
        let key_cache = TensorViewMut { dtype: cache_dtype, data: slice_of_mut(key_cache).unwrap_or_default() };
        let mut outputs = match slice_of_mut(value_cache) {
            Some(data) => ApiOutputs::new(key_cache, TensorViewMut { dtype: cache_dtype, data }, attended),
            None => ApiOutputs::interleaved(key_cache, size("value_offset", caches.value_offset)?, attended),
        };
        outputs.k_scale = scale_view_mut("k_scale", k_scale, caches.k_scale.strides)?;
        outputs.v_scale = scale_view_mut("v_scale", v_scale, caches.v_scale.strides)?;
        Ok((views, outputs))
    }
}

/// Destroys a plan of attention with a growing KV cache. Null is nothing to destroy and fine; one that was destroyed before
/// is an error.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_kvcache_destroy(plan: *mut KvCacheHandle) -> Status {
    registry::destroy(plan)
}
