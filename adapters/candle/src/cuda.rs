//! CUDA tensors: candle's memory and stream as addresses, into a launch of the plan.
//!
//! Nothing here names a version of cudarc but the one that candle brings.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, ValidAsZeroBits};
use candle_core::cuda_backend::cudarc::driver::{CudaView, DevicePtr, DevicePtrMut, DeviceRepr};
use candle_core::{CudaDevice, CudaStorage, DType as Type, DeviceLocation, Error, Layout, Result, Shape};
use candle_core::{Storage, Tensor, bail};
use flashcore::half::{bf16, f16};
use flashcore::{DType, DeviceTensors, HostElement, Problem};

use crate::operation::{Lse, NAME, Operation, Sequences};
use crate::plans::{Place, plan};
use crate::problem::{element_type, lse_shape};

const TYPES: [(Type, DType); 3] = [(Type::F16, DType::F16), (Type::BF16, DType::Bf16), (Type::F32, DType::F32)];

type Argument<'a> = (&'a CudaStorage, &'a Layout);

pub(crate) fn forward(operation: &Operation, q: Argument, k: Argument, v: Argument) -> Result<(CudaStorage, Shape)> {
    match element_type([q, k, v].map(|(storage, _)| storage.dtype()), &TYPES, "a GPU")? {
        DType::F16 => attend::<f16>(operation, q, k, v),
        DType::Bf16 => attend::<bf16>(operation, q, k, v),
        DType::F32 => attend::<f32>(operation, q, k, v),
        DType::F64 => bail!("{NAME}: GPU kernels have no f64: convert with to_dtype"),
        DType::E4m3 | DType::E5m2 => bail!("{NAME}: GPU kernels have no FP8: convert with to_dtype"),
    }
}

/// The elements from the first of a tensor on.
fn from_first<'a, T: CudaDType>(storage: &'a CudaStorage, layout: &Layout) -> Result<CudaView<'a, T>> {
    let slice = storage.as_cuda_slice::<T>()?;
    let first = layout.start_offset();
    match slice.try_slice(first..) {
        Some(view) => Ok(view),
        None => bail!("{NAME}: a tensor begins at element {first}, past the end of its memory"),
    }
}

/// The elements of another tensor than q, k and v, which the operation holds.
fn view<'a, T: CudaDType>(storage: &'a Storage, layout: &Layout) -> Result<CudaView<'a, T>> {
    match storage {
        Storage::Cuda(storage) => from_first::<T>(storage, layout),
        _ => bail!("{NAME}: a vector is not on the GPU; move it to the device of q with to_device"),
    }
}

/// Binds the addresses of an optional tensor's elements: the lock of its memory, the view, and the address with the event
/// that is recorded when all of this is dropped, after the launch.
macro_rules! address {
    ($address:ident: $type:ty = $tensor:expr, $stream:expr) => {
        let tensor: Option<&Tensor> = $tensor;
        let storage = tensor.map(Tensor::storage_and_layout);
        let elements = storage.as_ref().map(|(storage, layout)| view::<$type>(storage, layout)).transpose()?;
        let $address = elements.as_ref().map(|elements| elements.device_ptr($stream));
    };
}

fn attend<T: HostElement + CudaDType + DeviceRepr + ValidAsZeroBits>(
    operation: &Operation,
    (q, q_layout): Argument,
    (k, k_layout): Argument,
    (v, v_layout): Argument,
) -> Result<(CudaStorage, Shape)> {
    let device = q.device();
    let DeviceLocation::Cuda { gpu_id } = device.location() else {
        bail!("{NAME}: a CUDA tensor is on {:?}", device.location())
    };
    let (problem, shape) = operation.problem(T::DTYPE, q_layout, k_layout, v_layout)?;
    let plan = plan(&problem, Place::Cuda(gpu_id))?;
    let stream = device.cuda_stream();

    // Rows that no sequence has are not written.
    let is_packed = operation.sequences.is_some();
    let mut output = allocate::<T>(device, shape.elem_count(), is_packed)?;
    let lse_shape = lse_shape(&problem);
    let mut lse =
        operation.lse.as_ref().map(|_| allocate::<f32>(device, lse_shape.elem_count(), is_packed)).transpose()?;
    let workspace_bytes = Some(plan.workspace_bytes()).filter(|&bytes| bytes > 0);
    let mut workspace = workspace_bytes.map(|bytes| allocate::<u8>(device, bytes, false)).transpose()?;

    let derived = operation.sequences.as_ref().map(|sequences| Derived::new(sequences, &problem)).transpose()?;
    let sequences = operation.sequences.as_ref();
    let pages = sequences.and_then(|sequences| sequences.pages.as_ref());
    let table = pages.map(|pages| &pages.block_table);
    let of_type = |dtype: Type| table.filter(|table| table.dtype() == dtype);
    address!(slopes: f32 = operation.alibi_slopes.as_ref(), &stream);
    address!(offsets_q: u32 = sequences.map(|sequences| &sequences.seqlens_q), &stream);
    address!(
        offsets_k: u32 = sequences.filter(|_| pages.is_none()).map(|sequences| &sequences.seqlens_k),
        &stream
    );
    address!(lengths_k: u32 = derived.as_ref().and_then(|derived| derived.lengths_k.as_ref()), &stream);
    address!(positions: f32 = derived.as_ref().and_then(|derived| derived.positions.as_ref()), &stream);
    // Kernels clamp pages to those that there are, read as signed or as unsigned numbers.
    address!(unsigned_pages: u32 = of_type(Type::U32), &stream);
    address!(signed_pages: i32 = of_type(Type::I32), &stream);
    let ranges = pages.and_then(|pages| pages.mm_prefix_ranges.as_ref());
    address!(ranges: i32 = ranges.filter(|_| problem.aux_i32 > 0), &stream);

    let (q, k, v) = (from_first::<T>(q, q_layout)?, from_first::<T>(k, k_layout)?, from_first::<T>(v, v_layout)?);
    {
        let (query, _query_use) = q.device_ptr(&stream);
        let (key, _key_use) = k.device_ptr(&stream);
        let (value, _value_use) = v.device_ptr(&stream);
        let (output, _output_use) = output.device_ptr_mut(&stream);
        let lse = lse.as_mut().map(|lse| lse.device_ptr_mut(&stream));
        let workspace = workspace.as_mut().map(|workspace| workspace.device_ptr_mut(&stream));

        let mut tensors = DeviceTensors::new(query, key, value, output);
        if let Some((address, _)) = &lse {
            tensors = tensors.with_lse(*address);
        }
        if let Some((address, _)) = &workspace {
            tensors = tensors.with_workspace(*address);
        }
        if let Some((address, _)) = &slopes {
            tensors = tensors.with_alibi_slopes(*address);
        }
        if let Some((address, _)) = &offsets_q {
            tensors = tensors.with_cu_seqlens_q(*address);
        }
        if let Some((address, _)) = &offsets_k {
            tensors = tensors.with_cu_seqlens_k(*address);
        }
        if let Some((address, _)) = &lengths_k {
            tensors = tensors.with_seqused_k(*address);
        }
        if let Some((address, _)) = unsigned_pages.as_ref().or(signed_pages.as_ref()) {
            tensors = tensors.with_page_table(*address);
        }
        if let Some((address, _)) = &positions {
            tensors = tensors.with_aux_f32(*address);
        }
        if let Some((address, _)) = &ranges {
            tensors = tensors.with_aux_i32(*address);
        }
        // SAFETY:
        // * Each address is that of candle's memory on this device, from the first element of a tensor with the shape and
        //   the strides that the problem has; the workspace has the bytes that the plan asked for. Lengths, offsets of
        //   sequences and page numbers, which kernels read from the device, are clamped there and lead past no tensor.
        // * Output, log-sum-exp and workspace were allocated above, so they lie apart from all else, and nobody knows of
        //   them until this function returns. The guards hold what is read; after them, `cudarc` makes whoever writes or
        //   frees a buffer wait for the events that they record after the launch.
        // * The stream is one of the primary context, which candle takes too.
        // * A plan may be dropped from the list of plans before the launch has finished: it owns nothing that the launch
        //   uses. The workspace is candle's, and the kernels are those of a device that is never closed.
        let launched = unsafe { plan.launch(stream.cu_stream(), tensors) };
        launched.map_err(|error| Error::msg(format!("{NAME}: {error}{}", advice(&error))).bt())?;
    }

    if let (Some(slot), Some(lse)) = (&operation.lse, lse) {
        slot.put(Lse::Cuda(CudaStorage::wrap_cuda_slice(lse, device.clone()), lse_shape));
    }
    Ok((CudaStorage::wrap_cuda_slice(output, device.clone()), shape))
}

/// Advice for an error whose message cannot know of candle.
fn advice(error: &flashcore::Error) -> &'static str {
    match error {
        flashcore::Error::Misaligned { .. } => "; the tensor is a part of another: copy it with contiguous()",
        _ => "",
    }
}

/// New memory on the stream of the device; at least one element, so that it has an address.
fn allocate<T: DeviceRepr + ValidAsZeroBits>(
    device: &CudaDevice,
    elements: usize,
    zeroed: bool,
) -> Result<CudaSlice<T>> {
    if zeroed {
        return device.alloc_zeros::<T>(elements.max(1));
    }
    // SAFETY: nobody reads it before a launch has written it.
    unsafe { device.alloc::<T>(elements.max(1)) }
}

/// Arrays that follow from those of a call, computed on the device.
struct Derived {
    /// Numbers of keys in pages, `u32`.
    lengths_k: Option<Tensor>,
    /// The position of the first row of each sequence, `f32`.
    positions: Option<Tensor>,
}

impl Derived {
    fn new(sequences: &Sequences, problem: &Problem) -> Result<Self> {
        let batch = problem.batch;
        let lengths = |offsets: &Tensor| offsets.narrow(0, 1, batch)? - offsets.narrow(0, 0, batch)?;
        let lengths_k = sequences.pages.as_ref().map(|_| lengths(&sequences.seqlens_k)).transpose()?;
        let positions = if problem.aux_f32 > 0 {
            let [keys, rows] = [&sequences.seqlens_k, &sequences.seqlens_q]
                .map(|offsets| lengths(offsets).and_then(|lengths| lengths.to_dtype(Type::F32)));
            Some((keys? - rows?)?)
        } else {
            None
        };
        Ok(Self { lengths_k, positions })
    }
}
