//! Tensors in the host's memory, as C has them.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};
use std::slice;

use api::{BiasStrides as ApiBiasStrides, BiasView, DType, InputViews, OutputViews, TensorView, TensorViewMut};

use crate::sized::SizedStruct;
use crate::status::Failure;

/// Bytes to be read. Null with 0 bytes means that there are none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Bytes {
    /// The first byte, aligned for its elements.
    pub data: *const c_void,
    /// How many bytes there are.
    pub bytes: u64,
}

/// Bytes to be written. Null with 0 bytes means that there are none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BytesMut {
    /// The first byte, aligned for its elements.
    pub data: *mut c_void,
    /// How many bytes there are.
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

/// Everything that is read, in the host's memory. Tensors that the problem has switched off stay null.
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
    /// One float per query head.
    pub alibi_slopes: Bytes,
    /// One float per query head.
    pub sinks: Bytes,
    /// Floats.
    pub bias: Bytes,
    /// Where the floats of the bias lie.
    pub bias_strides: BiasStrides,
    /// One uint32_t per batch.
    pub seqused_k: Bytes,
}

/// Everything that is written, in the host's memory. None of it may overlap anything else.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Outputs {
    /// sizeof(flashcore_outputs_t) of the caller.
    pub struct_size: u64,
    /// The output, of the problem's dtype.
    pub output: BytesMut,
    /// One float per row, contiguous [batch, query head, query row]; null if the problem does not want it.
    pub lse: BytesMut,
}

/// Not null and aligned.
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

/// A range of addresses that is one: not null, aligned, whole elements, within the address space.
#[derive(Clone, Copy)]
struct Range {
    argument: &'static str,
    start: usize,
    bytes: usize,
}

impl Range {
    /// `None` for null without bytes.
    fn new(argument: &'static str, data: *const c_void, bytes: u64, element: usize) -> Result<Option<Self>, Failure> {
        let start = data.addr();
        if data.is_null() {
            return match bytes {
                0 => Ok(None),
                _ => Err(Failure::argument(format!("{argument} is null and has {bytes} bytes; it must not be null"))),
            };
        }
        if !start.is_multiple_of(element) {
            return Err(Failure::argument(format!("{argument} is {data:p}; it must be a multiple of {element}")));
        }
        let fits = usize::try_from(bytes).ok().filter(|&bytes| isize::try_from(bytes).is_ok());
        let Some(bytes) = fits.filter(|&bytes| start.checked_add(bytes).is_some()) else {
            return Err(Failure::argument(format!(
                "{argument} is {data:p} and has {bytes} bytes; it must end within the address space"
            )));
        };
        if !bytes.is_multiple_of(element) {
            return Err(Failure::argument(format!("{argument} has {bytes} bytes; its elements have {element} each")));
        }
        Ok(Some(Self { argument, start, bytes }))
    }

    fn overlaps(self, other: Self) -> bool {
        self.bytes > 0
            && other.bytes > 0
            && self.start < other.start + other.bytes
            && other.start < self.start + self.bytes
    }
}

/// The views of a run.
///
/// # Safety
///
/// What the structs point to can be read, and written where it is an output, for the lifetime chosen.
pub(crate) unsafe fn views<'a>(
    inputs: &Inputs,
    outputs: &Outputs,
    dtype: DType,
) -> Result<(InputViews<'a>, OutputViews<'a>), Failure> {
    let size = dtype.size_bytes();
    let read = [
        Range::new("inputs.query", inputs.query.data, inputs.query.bytes, size)?,
        Range::new("inputs.key", inputs.key.data, inputs.key.bytes, size)?,
        Range::new("inputs.value", inputs.value.data, inputs.value.bytes, size)?,
        Range::new("inputs.alibi_slopes", inputs.alibi_slopes.data, inputs.alibi_slopes.bytes, size_of::<f32>())?,
        Range::new("inputs.sinks", inputs.sinks.data, inputs.sinks.bytes, size_of::<f32>())?,
        Range::new("inputs.bias", inputs.bias.data, inputs.bias.bytes, size_of::<f32>())?,
        Range::new("inputs.seqused_k", inputs.seqused_k.data, inputs.seqused_k.bytes, size_of::<u32>())?,
    ];
    let output = Range::new("outputs.output", outputs.output.data, outputs.output.bytes, size)?;
    let lse = Range::new("outputs.lse", outputs.lse.data, outputs.lse.bytes, size_of::<f32>())?;
    check_apart(&read, output, lse)?;

    let [query, key, value, alibi_slopes, sinks, bias, seqused_k] = read;
    // SAFETY: the ranges were checked, do not overlap what is written, and can be read as the caller promises.
    let inputs = unsafe {
        let mut views = InputViews::new(
            TensorView { dtype, data: slice_of(query, inputs.query.data).unwrap_or_default() },
            TensorView { dtype, data: slice_of(key, inputs.key.data).unwrap_or_default() },
            TensorView { dtype, data: slice_of(value, inputs.value.data).unwrap_or_default() },
        );
        views.alibi_slopes = slice_of(alibi_slopes, inputs.alibi_slopes.data);
        views.sinks = slice_of(sinks, inputs.sinks.data);
        views.bias = slice_of(bias, inputs.bias.data)
            .map(|data| Ok::<_, Failure>(BiasView { data, strides: bias_strides(inputs.bias_strides)? }))
            .transpose()?;
        views.seqused_k = slice_of(seqused_k, inputs.seqused_k.data);
        views
    };
    // SAFETY: the ranges were checked, overlap nothing else, and can be written as the caller promises.
    let outputs = unsafe {
        let data = slice_of_mut(output, outputs.output.data).unwrap_or_default();
        let mut views = OutputViews::new(TensorViewMut { dtype, data });
        views.lse = slice_of_mut(lse, outputs.lse.data);
        views
    };
    Ok((inputs, outputs))
}

fn check_apart(read: &[Option<Range>], output: Option<Range>, lse: Option<Range>) -> Result<(), Failure> {
    let all: Vec<Range> = read.iter().copied().flatten().collect();
    for written in [output, lse].into_iter().flatten() {
        let others = all.iter().copied().chain(lse.filter(|_| written.argument == "outputs.output"));
        if let Some(other) = others.into_iter().find(|&other| written.overlaps(other)) {
            let (written, other) = (written.argument, other.argument);
            return Err(Failure::argument(format!("{written} overlaps {other}; what is written must be apart")));
        }
    }
    Ok(())
}

pub(crate) fn bias_strides(strides: BiasStrides) -> Result<ApiBiasStrides, Failure> {
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

/// # Safety
///
/// `data` is the start of the range, which can be read and is not written for the lifetime chosen; any bytes are a `T`.
unsafe fn slice_of<'a, T>(range: Option<Range>, data: *const c_void) -> Option<&'a [T]> {
    // SAFETY: not null, aligned and within the address space by the checks of the range; the rest by the contract.
    range.map(|range| unsafe { slice::from_raw_parts(data.cast(), range.bytes / size_of::<T>()) })
}

/// # Safety
///
/// `data` is the start of the range, which nobody else reads or writes for the lifetime chosen; any bytes are a `T`.
unsafe fn slice_of_mut<'a, T>(range: Option<Range>, data: *mut c_void) -> Option<&'a mut [T]> {
    // SAFETY: not null, aligned and within the address space by the checks of the range; the rest by the contract.
    range.map(|range| unsafe { slice::from_raw_parts_mut(data.cast(), range.bytes / size_of::<T>()) })
}
