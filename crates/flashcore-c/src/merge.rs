//! Merge of partial results of attention.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};
use std::slice;

use api::{
    DType, InputViews, MergePlan, MergeProblem as ApiProblem, MergeStrides as ApiStrides, MergeTensors as ApiTensors,
    OutputViews, PartAddresses, TensorView, TensorViewMut,
};

use crate::operands::{Bytes, BytesMut, Range, check_apart, slice_of, slice_of_mut};
use crate::problem::{Strides, dtype, lse_base, size, strides, switch};
use crate::registry;
use crate::sized::{self, SizedStruct, check_pointer};
use crate::status::{Failure, Status, guarded};

/// Natural logarithms: FlashAttention, cuDNN, PyTorch, flashcore.
pub const FLASHCORE_LSE_NATURAL: i32 = 0;
/// Logarithms of base 2: FlashInfer.
pub const FLASHCORE_LSE_BASE_2: i32 = 1;

/// A merge of partial results, ready to be run any number of times, by any number of threads at once.
pub struct MergeHandle {
    _opaque: (),
}

/// A merge of partial results of attention over disjoint keys: everything about it except the numbers in its tensors.
/// Begin with flashcore_merge_problem_init() and change fields.
///
/// A part whose log-sum-exp is infinite, of either sign, is empty, and its output is not looked at. A row of which all
/// parts are empty gives output 0 and a log-sum-exp of minus infinity.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MergeProblem {
    /// sizeof(flashcore_merge_problem_t) of the caller.
    pub struct_size: u64,
    /// Number of partial results, from 2 to 256.
    pub num_parts: u64,
    /// Tokens; a launch may have fewer.
    pub tokens: u64,
    /// Heads.
    pub heads: u64,
    /// Columns, up to 512.
    pub value_dim: u64,
    /// FLASHCORE_DTYPE_F16, _BF16 or _F32: the elements of the outputs of the parts.
    pub part_dtype: i32,
    /// FLASHCORE_DTYPE_F16, _BF16 or _F32: the elements of the merged output.
    pub dtype: i32,
    /// FLASHCORE_LSE_*: the base of the logarithms.
    pub lse_base: i32,
    /// 1 if the merged log-sum-exp is wanted; else 0.
    pub lse: i32,
    /// Strides of the output of a part; row is from one token to the next, batch is not used.
    pub part_strides: Strides,
    /// Strides of the log-sum-exp of a part.
    pub part_lse_strides: Strides,
    /// Strides of the merged output.
    pub output_strides: Strides,
    /// Strides of the merged log-sum-exp.
    pub lse_strides: Strides,
}

/// Addresses of device memory: everything that a merge reads and writes. Set all of it to zero first.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MergeTensors {
    /// sizeof(flashcore_merge_tensors_t) of the caller.
    pub struct_size: u64,
    /// Output of the first part.
    pub part: *const c_void,
    /// Log-sum-exp of the first part.
    pub part_lse: *const f32,
    /// Elements from the output of a part to that of the next.
    pub part_stride: u64,
    /// Elements from the log-sum-exp of a part to that of the next.
    pub part_lse_stride: u64,
    /// The merged output.
    pub output: *mut c_void,
    /// The merged log-sum-exp; null if the problem does not want it.
    pub lse: *mut f32,
    /// Output of the second of two parts, anywhere; null if part_stride says where the others are.
    pub second_part: *const c_void,
    /// Log-sum-exp of the second of two parts.
    pub second_part_lse: *const f32,
    /// Tokens of this launch, at most those of the problem; 0 for as many.
    pub tokens: u64,
}

/// Everything that a merge reads, in the host's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MergeInputs {
    /// sizeof(flashcore_merge_inputs_t) of the caller.
    pub struct_size: u64,
    /// Output of each part: as many as the problem has parts.
    pub part_outputs: *const Bytes,
    /// Log-sum-exp of each part: floats.
    pub part_lses: *const Bytes,
}

/// Everything that a merge writes, in the host's memory. None of it may overlap anything else.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MergeOutputs {
    /// sizeof(flashcore_merge_outputs_t) of the caller.
    pub struct_size: u64,
    /// The merged output.
    pub output: BytesMut,
    /// The merged log-sum-exp: floats; null if the problem does not want it.
    pub lse: BytesMut,
}

// SAFETY: `repr(C)` of integers, the first of them the size.
unsafe impl SizedStruct for MergeProblem {
    const NAME: &'static str = "flashcore_merge_problem_t";
    const LEAST_BYTES: usize = size_of::<Self>();
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for MergeTensors {
    const NAME: &'static str = "flashcore_merge_tensors_t";
    const LEAST_BYTES: usize = offset_of!(Self, lse);
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for MergeInputs {
    const NAME: &'static str = "flashcore_merge_inputs_t";
    const LEAST_BYTES: usize = size_of::<Self>();
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for MergeOutputs {
    const NAME: &'static str = "flashcore_merge_outputs_t";
    const LEAST_BYTES: usize = offset_of!(Self, lse);
}

impl MergeProblem {
    fn to_api(self) -> Result<ApiProblem, Failure> {
        let (num_parts, tokens) = (size("num_parts", self.num_parts)?, size("tokens", self.tokens)?);
        let (heads, value_dim) = (size("heads", self.heads)?, size("value_dim", self.value_dim)?);
        let strides = ApiStrides {
            part: strides("part_strides", self.part_strides)?,
            part_lse: strides("part_lse_strides", self.part_lse_strides)?,
            output: strides("output_strides", self.output_strides)?,
            lse: strides("lse_strides", self.lse_strides)?,
        };
        Ok(ApiProblem::new(num_parts, tokens, heads, value_dim, dtype(self.dtype)?)
            .with_part_dtype(dtype(self.part_dtype)?)
            .with_base(lse_base("lse_base", self.lse_base)?)
            .with_lse(switch("lse", self.lse)?)
            .with_strides(strides))
    }
}

/// Fills the problem of a merge: contiguous outputs [token, head, column] of one element type, natural log-sum-exp
/// [head, token], the merged one included.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to a flashcore_merge_problem_t that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_merge_problem_init(
    problem: *mut MergeProblem,
    num_parts: u64,
    tokens: u64,
    heads: u64,
    value_dim: u64,
    dtype: i32,
) -> Status {
    guarded(|| {
        check_pointer("problem", problem)?;
        self::dtype(dtype)?;
        let row = heads.saturating_mul(value_dim);
        let output = Strides { batch: row.saturating_mul(tokens), head: value_dim, row };
        let lse = Strides { batch: heads.saturating_mul(tokens), head: tokens, row: 1 };
        let initial = MergeProblem {
            num_parts,
            tokens,
            heads,
            value_dim,
            part_dtype: dtype,
            dtype,
            lse: 1,
            part_strides: output,
            part_lse_strides: lse,
            output_strides: output,
            lse_strides: lse,
            ..sized::zeroed()
        };
        // SAFETY: not null and aligned, and the caller promises that it can be written.
        unsafe { problem.write(initial) };
        Ok(())
    })
}

/// Makes a plan for a merge on a device. On a GPU this compiles the kernel, or finds it in the cache.
///
/// # Safety
///
/// `problem` must be null, which is an error, or point to a flashcore_merge_problem_t. `plan` must be null, which is an
/// error, or point to a pointer that can be written: it becomes the plan, or null if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_merge_create(
    problem: *const MergeProblem,
    device_kind: i32,
    ordinal: i32,
    plan: *mut *mut MergeHandle,
) -> Status {
    let make = || {
        // SAFETY: the caller promises that it is null or a problem of its size.
        let problem = unsafe { sized::read("problem", problem) }?.to_api()?;
        let device = crate::device::open(device_kind, ordinal)?;
        Ok(MergePlan::new(&problem, &device)?)
    };
    // SAFETY: the caller promises of `plan` what is asked here.
    unsafe { registry::create(plan, make) }
}

/// Launches a merge on a CUDA stream and returns before it has finished. Nothing is allocated and nothing is waited for; a
/// launch can be captured into a CUDA graph.
///
/// `stream` is a CUstream or cudaStream_t of the device's primary context, null for the default stream.
///
/// # Safety
///
/// `tensors` must be null, which is an error, or point to a flashcore_merge_tensors_t. Until the launch has finished, and
/// whenever a graph with it is executed, the memory that it names must hold the whole tensors, as far as the problem's
/// strides reach, and nobody may write the parts or use the outputs. The plan must not be destroyed before the stream has
/// finished, or before a graph with the launch is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_merge_launch(
    plan: *const MergeHandle,
    stream: *mut c_void,
    tensors: *const MergeTensors,
) -> Status {
    guarded(|| {
        let plan = registry::find(plan)?;
        // SAFETY: the caller promises that it is null or tensors of their size.
        let given = unsafe { sized::read("tensors", tensors) }?;
        let (part, lse) = (given.part.addr() as u64, given.part_lse.addr() as u64);
        let parts = if given.second_part.is_null() {
            let (output_stride, lse_stride) = (given.part_stride, given.part_lse_stride);
            PartAddresses::Stacked { output: part, output_stride, lse, lse_stride }
        } else {
            let second = [given.second_part.addr() as u64, given.second_part_lse.addr() as u64];
            PartAddresses::Two { outputs: [part, second[0]], lses: [lse, second[1]] }
        };
        let mut tensors = ApiTensors::new(parts, given.output.addr() as u64).with_lse(given.lse.addr() as u64);
        if given.tokens != 0 {
            tensors = tensors.with_tokens(size("tokens", given.tokens)?);
        }
        // SAFETY: what the caller promises of stream and memory is what the launch asks for.
        unsafe { plan.launch(stream, tensors) }.map_err(Failure::from)
    })
}

/// Merges tensors in the host's memory, and returns when the outputs are there. On a GPU this copies everything there and
/// back: convenient, not fast.
///
/// # Safety
///
/// `inputs` and `outputs` must be null, which is an error, or point to their structs; the arrays of parts must have as many
/// entries as the problem has parts, and what all of them point to must be readable, and writable where it is an output,
/// for as many bytes as they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_merge_run_host(
    plan: *const MergeHandle,
    inputs: *const MergeInputs,
    outputs: *const MergeOutputs,
) -> Status {
    guarded(|| {
        let plan = registry::find(plan)?;
        let problem = plan.problem();
        // SAFETY: the caller promises that they are null or these structs, of their sizes.
        let (inputs, outputs) = unsafe { (sized::read("inputs", inputs)?, sized::read("outputs", outputs)?) };
        check_pointer("inputs.part_outputs", inputs.part_outputs)?;
        check_pointer("inputs.part_lses", inputs.part_lses)?;
        // SAFETY: not null and aligned, and the caller promises an entry for each part.
        let (part_outputs, part_lses) = unsafe {
            (
                slice::from_raw_parts(inputs.part_outputs, problem.num_parts),
                slice::from_raw_parts(inputs.part_lses, problem.num_parts),
            )
        };
        let (float, part_element) = (size_of::<f32>(), problem.part_dtype.size_bytes());
        let mut read = Vec::with_capacity(2 * problem.num_parts);
        for &output in part_outputs {
            read.push(Range::read("an entry of inputs.part_outputs", output, part_element)?);
        }
        for &lse in part_lses {
            read.push(Range::read("an entry of inputs.part_lses", lse, float)?);
        }
        let output = Range::written("outputs.output", outputs.output, problem.dtype.size_bytes())?;
        let lse = Range::written("outputs.lse", outputs.lse, float)?;
        check_apart(&read, &[output, lse])?;
        let (part_outputs, part_lses) = read.split_at(problem.num_parts);
        // SAFETY: the caller promises that the memory can be used as the structs say during this call; what is written is
        // apart from everything else.
        let (parts, outputs) = unsafe {
            let views = |ranges: &[Option<Range>], dtype| {
                let view = |range: &Option<Range>| TensorView { dtype, data: slice_of(*range).unwrap_or_default() };
                ranges.iter().map(view).collect::<Vec<_>>()
            };
            let parts = (views(part_outputs, problem.part_dtype), views(part_lses, DType::F32));
            let data = slice_of_mut(output).unwrap_or_default();
            let mut outputs = OutputViews::new(TensorViewMut { dtype: problem.dtype, data });
            outputs.lse = slice_of_mut(lse);
            (parts, outputs)
        };
        let inputs = InputViews::default().with_part_outputs(&parts.0[..]).with_part_lses(&parts.1[..]);
        plan.run(&inputs, outputs).map_err(Failure::from)
    })
}

/// Destroys the plan of a merge. Null is nothing to destroy and fine; one that was destroyed before is an error.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_merge_destroy(plan: *mut MergeHandle) -> Status {
    registry::destroy(plan)
}
