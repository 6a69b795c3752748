//! The operands of a call as C has them: addresses, on a GPU or in the host's memory; or bytes in the host's memory, whose
//! numbers are checked.
//!
//! The structs are written out, because cbindgen reads this file as it stands. Everything else follows from the table of
//! operands, so that a row whose field is missing in a struct breaks the build. A new field goes to the end of its struct.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};
use std::slice;

use api::{
    BiasStrides as ApiBiasStrides, BiasView, CallStrides, DTypes, DeviceTensors as ApiDeviceTensors, InputViews,
    Operand, OutputViews, Problem as ApiProblem, ScaleStrides as ApiScaleStrides, ScaleView, ScaleViewMut, TensorView,
    TensorViewMut,
};

use crate::sized::{self, SizedStruct};
use crate::status::Failure;

/// Bytes to be read. Null with 0 bytes means that there are none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Bytes {
    /// The first byte, aligned for its elements.
    pub data: *const c_void,
    /// Number of bytes.
    pub bytes: u64,
}

/// Bytes to be written. Null with 0 bytes means that there are none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BytesMut {
    /// The first byte, aligned for its elements.
    pub data: *mut c_void,
    /// Number of bytes.
    pub bytes: u64,
}

/// Distances in elements between neighbours of each dimension of a bias; 0 repeats one element.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct BiasStrides {
    /// From one batch to the next.
    pub batch: u64,
    /// From one query head to the next.
    pub head: u64,
    /// From one query row to the next.
    pub row: u64,
    /// From one key to the next.
    pub key: u64,
}

/// Distances in elements between neighbours of each dimension of a scale of an FP8 tensor; 0 repeats one element. All 0 is
/// one scale of the tensor, key_head alone one for each KV head.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ScaleStrides {
    /// From one sequence of the batch to the next, wherever its rows lie.
    pub sequence: u64,
    /// From one batch of the tensor to the next; of a paged cache, from one page to the next.
    pub batch: u64,
    /// From one row of the tensor to the next, in its batch or page.
    pub row: u64,
    /// From one KV head to the next.
    pub key_head: u64,
    /// From one query head to the next of those that share a KV head; for the query alone.
    pub query_head: u64,
}

/// The scale of an FP8 tensor, which its codes are multiplied by.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// The first of the floats.
    pub data: *const f32,
    /// Their strides.
    pub strides: ScaleStrides,
}

/// The scale of an FP8 tensor in the host's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ScaleBytes {
    /// The floats.
    pub data: Bytes,
    /// Their strides.
    pub strides: ScaleStrides,
}

/// The scale of an FP8 tensor in the host's memory, to be written.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ScaleMutBytes {
    /// The floats.
    pub data: BytesMut,
    /// Their strides.
    pub strides: ScaleStrides,
}

/// Addresses of everything that a call reads and writes: device memory for a launch, the host's for a run. Set all of it to
/// zero first; operands that the problem does not have stay null.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensors {
    /// sizeof(flashcore_tensors_t) of the caller.
    pub struct_size: u64,
    /// The query, of the problem's dtype, 16-byte aligned on a GPU.
    pub query: *const c_void,
    /// The key, of the problem's dtype, 16-byte aligned on a GPU.
    pub key: *const c_void,
    /// The value, of the problem's dtype, 16-byte aligned on a GPU.
    pub value: *const c_void,
    /// The output, of the problem's dtype, 16-byte aligned on a GPU.
    pub output: *mut c_void,
    /// The log-sum-exp (LSE): one float per row, contiguous [batch, query head, query row]; with cu_seqlens_q,
    /// [query head, row of all sequences].
    pub lse: *mut f32,
    /// Number of keys of each sequence: one uint32_t per batch. On a GPU one that is larger than the problem's key_length
    /// counts as that.
    pub seqused_k: *const u32,
    /// ALiBi slopes: one float per query head.
    pub alibi_slopes: *const f32,
    /// Sinks: one float per query head.
    pub sinks: *const f32,
    /// The bias: floats.
    pub bias: *const f32,
    /// Strides of the bias.
    pub bias_strides: BiasStrides,
    /// Floats that score_mod and mask_mod read.
    pub aux_f32: *const f32,
    /// Integers that score_mod and mask_mod read.
    pub aux_i32: *const i32,
    /// flashcore_plan_workspace_bytes() bytes, 16-byte aligned, that nobody else uses until the launch has finished, or
    /// while a graph of it is executed; null for the workspace of the stream, which a captured launch does not have, and in
    /// a run.
    pub workspace: *mut c_void,
    /// Where the query rows of each sequence begin among all total_q, and where the last ends: batch + 1 uint32_t, the first
    /// 0, none below the one before it.
    pub cu_seqlens_q: *const u32,
    /// Where the keys of each sequence begin among all total_k, and where the last ends: batch + 1 uint32_t, like
    /// cu_seqlens_q.
    pub cu_seqlens_k: *const u32,
    /// Number of query rows of each sequence: one uint32_t per batch. Rows after them are neither read nor written.
    pub seqused_q: *const u32,
    /// Number of keys at the beginning of each sequence that are padding: one uint32_t per batch. They count in seqused_k.
    pub leftpad_k: *const u32,
    /// The batch of the KV cache, or the row of the page table, of each sequence: one uint32_t per batch, below kv_batch.
    pub kv_batch_idx: *const u32,
    /// The page table: int32_t, a row of table_width pages for each sequence, or for each of kv_batch. Entries after the last
    /// key of a sequence may hold anything.
    pub page_table: *const i32,
    /// The scale of an FP8 query.
    pub q_scale: Scale,
    /// The scale of an FP8 key; written by an append that computes scales.
    pub k_scale: Scale,
    /// The scale of an FP8 value; written by an append that computes scales.
    pub v_scale: Scale,
}

/// Everything that is read, in the host's memory. Operands that the problem does not have stay null.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    /// sizeof(flashcore_inputs_t) of the caller.
    pub struct_size: u64,
    /// The query, of the problem's dtype.
    pub query: Bytes,
    /// The key, of the problem's dtype.
    pub key: Bytes,
    /// The value, of the problem's dtype.
    pub value: Bytes,
    /// ALiBi slopes: one float per query head.
    pub alibi_slopes: Bytes,
    /// Sinks: one float per query head.
    pub sinks: Bytes,
    /// The bias: floats.
    pub bias: Bytes,
    /// Strides of the bias.
    pub bias_strides: BiasStrides,
    /// Number of keys of each sequence: one uint32_t per batch.
    pub seqused_k: Bytes,
    /// Floats that score_mod and mask_mod read.
    pub aux_f32: Bytes,
    /// Integers (int32_t) that score_mod and mask_mod read.
    pub aux_i32: Bytes,
    /// Where the query rows of each sequence begin among all total_q, and where the last ends: batch + 1 uint32_t, the first
    /// 0, none below the one before it.
    pub cu_seqlens_q: Bytes,
    /// Where the keys of each sequence begin among all total_k, and where the last ends: batch + 1 uint32_t, like
    /// cu_seqlens_q.
    pub cu_seqlens_k: Bytes,
    /// Number of query rows of each sequence: one uint32_t per batch. Rows after them are neither read nor written.
    pub seqused_q: Bytes,
    /// Number of keys at the beginning of each sequence that are padding: one uint32_t per batch. They count in seqused_k.
    pub leftpad_k: Bytes,
    /// The batch of the KV cache, or the row of the page table, of each sequence: one uint32_t per batch, below kv_batch.
    pub kv_batch_idx: Bytes,
    /// The page table: int32_t, a row of table_width pages for each sequence, or for each of kv_batch. Entries after the last
    /// key of a sequence may hold anything.
    pub page_table: Bytes,
    /// The scale of an FP8 query.
    pub q_scale: ScaleBytes,
    /// The scale of an FP8 key.
    pub k_scale: ScaleBytes,
    /// The scale of an FP8 value.
    pub v_scale: ScaleBytes,
}

/// Everything that is written, in the host's memory. None of it may overlap anything else.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Outputs {
    /// sizeof(flashcore_outputs_t) of the caller.
    pub struct_size: u64,
    /// The output, of the problem's dtype.
    pub output: BytesMut,
    /// The log-sum-exp (LSE): one float per row, contiguous [batch, query head, query row]; with cu_seqlens_q,
    /// [query head, row of all sequences]. Null if the problem does not want it.
    pub lse: BytesMut,
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for Tensors {
    const NAME: &'static str = "flashcore_tensors_t";
    const LEAST_BYTES: usize = offset_of!(Self, lse);
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for Inputs {
    const NAME: &'static str = "flashcore_inputs_t";
    const LEAST_BYTES: usize = offset_of!(Self, alibi_slopes);
}

// SAFETY: `repr(C)` of addresses and integers, the first of them the size.
unsafe impl SizedStruct for Outputs {
    const NAME: &'static str = "flashcore_outputs_t";
    const LEAST_BYTES: usize = offset_of!(Self, lse);
}

macro_rules! define_conversions {
    (
        outputs { $($output:ident: $Output:ident, $output_type:ty;)* }
        inputs { $($input:ident: $Input:ident, $input_type:ty;)* }
        scales { $($scale:ident: $Scale:ident, $with_scale:ident;)* }
    ) => {
        impl Tensors {
            /// The tensors of a launch in Rust.
            pub(crate) fn to_api(self) -> Result<ApiDeviceTensors, Failure> {
                let mut tensors = ApiDeviceTensors::new(0, 0, 0, 0);
                (tensors.query, tensors.key) = (self.query.addr() as u64, self.key.addr() as u64);
                (tensors.value, tensors.output) = (self.value.addr() as u64, self.output.addr() as u64);
                $(tensors.$output = self.$output.addr() as u64;)*
                $(tensors.$input = self.$input.addr() as u64;)*
                tensors = tensors.with_bias(self.bias.addr() as u64, bias_strides(self.bias_strides)?);
                $(tensors = tensors.$with_scale(
                    self.$scale.data.addr() as u64, scale_strides(stringify!($scale), self.$scale.strides)?,
                );)*
                tensors.workspace = self.workspace.addr() as u64;
                Ok(tensors)
            }

            /// The tensors of a run, each with as many bytes as the problem needs.
            pub(crate) fn to_host(self, problem: &ApiProblem) -> Result<(Inputs, Outputs), Failure> {
                if !self.workspace.is_null() {
                    let message = "tensors.workspace is set; it is for a launch on a GPU and must be null in a run";
                    return Err(Failure::argument(message));
                }
                let strides = CallStrides {
                    bias: bias_strides(self.bias_strides)?,
                    scales: [$(scale_strides(stringify!($scale), self.$scale.strides)?,)*],
                };
                let bytes = |operand: Operand, data: *const c_void| -> Result<Bytes, Failure> {
                    if data.is_null() {
                        return Ok(Bytes { data, bytes: 0 });
                    }
                    let bytes = operand
                        .extent(problem, strides)
                        .and_then(|elements| elements.checked_mul(operand.element_bytes(problem)));
                    let bytes = bytes.ok_or_else(|| {
                        let name = operand.name();
                        Failure::argument(format!("tensors.{name} reaches beyond the address space; check its strides"))
                    })?;
                    Ok(Bytes { data, bytes: bytes as u64 })
                };
                let written = |operand: Operand, data: *mut c_void| {
                    bytes(operand, data.cast_const()).map(|Bytes { bytes, .. }| BytesMut { data, bytes })
                };
                let inputs = Inputs {
                    query: bytes(Operand::Query, self.query)?,
                    key: bytes(Operand::Key, self.key)?,
                    value: bytes(Operand::Value, self.value)?,
                    bias: bytes(Operand::Bias, self.bias.cast())?,
                    bias_strides: self.bias_strides,
                    $($input: bytes(Operand::$Input, self.$input.cast())?,)*
                    $($scale: ScaleBytes {
                        data: bytes(Operand::$Scale, self.$scale.data.cast())?,
                        strides: self.$scale.strides,
                    },)*
                    ..sized::zeroed()
                };
                let outputs = Outputs {
                    output: written(Operand::Output, self.output)?,
                    $($output: written(Operand::$Output, self.$output.cast())?,)*
                    ..sized::zeroed()
                };
                Ok((inputs, outputs))
            }
        }

        /// The memory of a run: what is read, and what is written.
        pub(crate) fn ranges(inputs: &Inputs, outputs: &Outputs, types: DTypes) -> Result<[Vec<Option<Range>>; 2], Failure> {
            let [size, key_size, output_size] = sizes(types);
            let read = vec![
                Range::read("inputs.query", inputs.query, size)?,
                Range::read("inputs.key", inputs.key, key_size)?,
                Range::read("inputs.value", inputs.value, key_size)?,
                Range::read("inputs.bias", inputs.bias, size_of::<f32>())?,
                $(Range::read(concat!("inputs.", stringify!($input)), inputs.$input, size_of::<$input_type>())?,)*
                $(Range::read(concat!("inputs.", stringify!($scale)), inputs.$scale.data, size_of::<f32>())?,)*
            ];
            let written = vec![
                Range::written("outputs.output", outputs.output, output_size)?,
                $(Range::written(
                    concat!("outputs.", stringify!($output)), outputs.$output, size_of::<$output_type>()
                )?,)*
            ];
            Ok([read, written])
        }

        /// The views of a run.
        ///
        /// # Safety
        ///
        /// The memory that the structs point to can be read, and written where it is an output, for the lifetime chosen.
        pub(crate) unsafe fn views<'a>(
            inputs: &Inputs,
            outputs: &Outputs,
            types: DTypes,
        ) -> Result<(InputViews<'a>, OutputViews<'a>), Failure> {
            let [size, key_size, output_size] = sizes(types);
            let query = Range::read("inputs.query", inputs.query, size)?;
            let key = Range::read("inputs.key", inputs.key, key_size)?;
            let value = Range::read("inputs.value", inputs.value, key_size)?;
            let bias = Range::read("inputs.bias", inputs.bias, size_of::<f32>())?;
            $(let $input =
                Range::read(concat!("inputs.", stringify!($input)), inputs.$input, size_of::<$input_type>())?;)*
            $(let $scale =
                Range::read(concat!("inputs.", stringify!($scale)), inputs.$scale.data, size_of::<f32>())?;)*
            let output = Range::written("outputs.output", outputs.output, output_size)?;
            $(let $output =
                Range::written(concat!("outputs.", stringify!($output)), outputs.$output, size_of::<$output_type>())?;)*
            check_apart(&[query, key, value, $($input,)* bias, $($scale,)*], &[output, $($output,)*])?;

            // SAFETY: the ranges were checked, do not overlap what is written, and can be read as the caller promises.
            let inputs = unsafe {
                let tensor = |dtype, range| TensorView { dtype, data: slice_of(range).unwrap_or_default() };
                let [query, key, value] =
                    [(types.query, query), (types.key_value, key), (types.key_value, value)]
                        .map(|(dtype, range)| tensor(dtype, range));
                let mut views = InputViews::new(query, key, value);
                $(views.$input = slice_of($input);)*
                views.bias = slice_of(bias)
                    .map(|data| Ok::<_, Failure>(BiasView { data, strides: bias_strides(inputs.bias_strides)? }))
                    .transpose()?;
                $(views.$scale = scale_view(stringify!($scale), $scale, inputs.$scale.strides)?;)*
                views
            };
            // SAFETY: the ranges were checked, overlap nothing else, and can be written as the caller promises.
            let outputs = unsafe {
                let data = slice_of_mut(output).unwrap_or_default();
                let mut views = OutputViews::new(TensorViewMut { dtype: types.output, data });
                $(views.$output = slice_of_mut($output);)*
                views
            };
            Ok((inputs, outputs))
        }
    };
}

define_conversions! {
    outputs {
        lse: Lse, f32;
    }
    inputs {
        cu_seqlens_q: CuSeqlensQ, u32;
        cu_seqlens_k: CuSeqlensK, u32;
        seqused_q: SequsedQ, u32;
        seqused_k: SequsedK, u32;
        leftpad_k: LeftpadK, u32;
        kv_batch_idx: KvBatchIdx, u32;
        page_table: PageTable, i32;
        alibi_slopes: AlibiSlopes, f32;
        sinks: Sinks, f32;
        aux_f32: AuxF32, f32;
        aux_i32: AuxI32, i32;
    }
    scales {
        q_scale: QScale, with_q_scale;
        k_scale: KScale, with_k_scale;
        v_scale: VScale, with_v_scale;
    }
}

/// Bytes of an element of query, of key and value, and of the output.
const fn sizes(types: DTypes) -> [usize; 3] {
    [types.query.size_bytes(), types.key_value.size_bytes(), types.output.size_bytes()]
}

/// A valid range of addresses: not null, aligned, whole elements, within the address space.
#[derive(Clone, Copy)]
pub(crate) struct Range {
    argument: &'static str,
    data: *mut c_void,
    bytes: usize,
}

impl Range {
    pub(crate) fn read(argument: &'static str, bytes: Bytes, element: usize) -> Result<Option<Self>, Failure> {
        Self::written(argument, BytesMut { data: bytes.data.cast_mut(), bytes: bytes.bytes }, element)
    }

    /// `None` for null without bytes.
    pub(crate) fn written(argument: &'static str, range: BytesMut, element: usize) -> Result<Option<Self>, Failure> {
        let BytesMut { data, bytes } = range;
        if data.is_null() {
            return match bytes {
                0 => Ok(None),
                _ => Err(Failure::argument(format!("{argument} is null and has {bytes} bytes; it must not be null"))),
            };
        }
        if !data.addr().is_multiple_of(element) {
            return Err(Failure::argument(format!("{argument} is {data:p}; it must be a multiple of {element}")));
        }
        let fits = usize::try_from(bytes).ok().filter(|&bytes| isize::try_from(bytes).is_ok());
        let Some(bytes) = fits.filter(|&bytes| data.addr().checked_add(bytes).is_some()) else {
            return Err(Failure::argument(format!(
                "{argument} is {data:p} and has {bytes} bytes; it must end within the address space"
            )));
        };
        if !bytes.is_multiple_of(element) {
            return Err(Failure::argument(format!("{argument} has {bytes} bytes; its elements have {element} each")));
        }
        Ok(Some(Self { argument, data, bytes }))
    }

    fn overlaps(self, other: Self) -> bool {
        let (start, other_start) = (self.data.addr(), other.data.addr());
        self.bytes > 0 && other.bytes > 0 && start < other_start + other.bytes && other_start < start + self.bytes
    }
}

pub(crate) fn check_apart(read: &[Option<Range>], written: &[Option<Range>]) -> Result<(), Failure> {
    for (index, range) in written.iter().enumerate().filter_map(|(index, range)| Some((index, (*range)?))) {
        let mut others = read.iter().chain(&written[index + 1..]).copied().flatten();
        if let Some(other) = others.find(|&other| range.overlaps(other)) {
            let (written, other) = (range.argument, other.argument);
            return Err(Failure::argument(format!("{written} overlaps {other}; what is written must be apart")));
        }
    }
    Ok(())
}

fn bias_strides(strides: BiasStrides) -> Result<ApiBiasStrides, Failure> {
    let size = |value: u64| {
        usize::try_from(value).map_err(|_| Failure::argument(format!("a stride of the bias is {value}; too large")))
    };
    Ok(ApiBiasStrides {
        batch: size(strides.batch)?,
        head: size(strides.head)?,
        row: size(strides.row)?,
        key: size(strides.key)?,
    })
}

pub(crate) fn scale_strides(scale: &str, strides: ScaleStrides) -> Result<ApiScaleStrides, Failure> {
    let size = |value: u64| {
        usize::try_from(value).map_err(|_| Failure::argument(format!("a stride of {scale} is {value}; too large")))
    };
    Ok(ApiScaleStrides {
        sequence: size(strides.sequence)?,
        batch: size(strides.batch)?,
        row: size(strides.row)?,
        key_head: size(strides.key_head)?,
        query_head: size(strides.query_head)?,
    })
}

/// The view of a scale, where there is one.
///
/// # Safety
///
/// As for [`slice_of`].
pub(crate) unsafe fn scale_view<'a>(
    scale: &str,
    range: Option<Range>,
    strides: ScaleStrides,
) -> Result<Option<ScaleView<'a>>, Failure> {
    let strides = scale_strides(scale, strides)?;
    // SAFETY: the contract of this function.
    Ok(unsafe { slice_of(range) }.map(|data| ScaleView { data, strides }))
}

/// The view of a scale that is written, where there is one.
///
/// # Safety
///
/// As for [`slice_of_mut`].
pub(crate) unsafe fn scale_view_mut<'a>(
    scale: &str,
    range: Option<Range>,
    strides: ScaleStrides,
) -> Result<Option<ScaleViewMut<'a>>, Failure> {
    let strides = scale_strides(scale, strides)?;
    // SAFETY: the contract of this function.
    Ok(unsafe { slice_of_mut(range) }.map(|data| ScaleViewMut { data, strides }))
}

/// # Safety
///
/// The range can be read and is not written for the lifetime chosen; any bytes are a `T`.
pub(crate) unsafe fn slice_of<'a, T>(range: Option<Range>) -> Option<&'a [T]> {
    // SAFETY: not null, aligned and within the address space by the checks of the range; the rest by the contract.
    range.map(|range| unsafe { slice::from_raw_parts(range.data.cast_const().cast(), range.bytes / size_of::<T>()) })
}

/// # Safety
///
/// Nobody else reads or writes the range for the lifetime chosen; any bytes are a `T`.
pub(crate) unsafe fn slice_of_mut<'a, T>(range: Option<Range>) -> Option<&'a mut [T]> {
    // SAFETY: not null, aligned and within the address space by the checks of the range; the rest by the contract.
    range.map(|range| unsafe { slice::from_raw_parts_mut(range.data.cast(), range.bytes / size_of::<T>()) })
}
