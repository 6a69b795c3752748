//! The tensors of a call for a plan: views of the host's memory for a run, addresses for a launch. Everything that knows an
//! operand by its name follows from the table of operands.

use std::ffi::c_void;

use api::{
    BiasStrides, BiasView, CallStrides, DType, DeviceTensors, InputViews, Operand, Operation, OutputViews, Plan,
    Positions, ScaleStrides, ScaleView, ScaleViewMut, TensorView, TensorViewMut, Use,
};

use crate::problem::{
    FLASHCORE_DTYPE_BF16, FLASHCORE_DTYPE_E4M3, FLASHCORE_DTYPE_E5M2, FLASHCORE_DTYPE_F16, FLASHCORE_DTYPE_F32,
    FLASHCORE_DTYPE_F64, FLASHCORE_DTYPE_I32, FLASHCORE_DTYPE_I64,
};
use crate::status::Failure;
use crate::tensor::{Tensor, Tensors, ValueCache};

const TYPES: [(DType, i32); 6] = [
    (DType::F16, FLASHCORE_DTYPE_F16),
    (DType::Bf16, FLASHCORE_DTYPE_BF16),
    (DType::F32, FLASHCORE_DTYPE_F32),
    (DType::F64, FLASHCORE_DTYPE_F64),
    (DType::E4m3, FLASHCORE_DTYPE_E4M3),
    (DType::E5m2, FLASHCORE_DTYPE_E5M2),
];

/// The type of a kind of operand; `None` where the problem says it.
macro_rules! dtype_of_kind {
    (u32) => {
        Some(FLASHCORE_DTYPE_I32)
    };
    (i32) => {
        Some(FLASHCORE_DTYPE_I32)
    };
    (i64) => {
        Some(FLASHCORE_DTYPE_I64)
    };
    (f32) => {
        Some(FLASHCORE_DTYPE_F32)
    };
    (Bias) => {
        Some(FLASHCORE_DTYPE_F32)
    };
    (Scale) => {
        Some(FLASHCORE_DTYPE_F32)
    };
    ($kind:ident) => {
        None
    };
}

/// Sets the view of a kind of operand that is read.
macro_rules! read {
    (Tensor $view:expr, $tensor:expr, $operand:expr) => {
        $view = $tensor.view()
    };
    (Tensors $view:expr, $tensor:expr, $operand:expr) => {
        // Lists are made by their parts.
        let _ = $tensor;
    };
    (Bias $view:expr, $tensor:expr, $operand:expr) => {
        $view = Some(BiasView { data: $tensor.slice(), strides: bias_strides($tensor)? })
    };
    (Scale $view:expr, $tensor:expr, $operand:expr) => {
        $view = Some(ScaleView { data: $tensor.slice(), strides: scale_strides($operand, $tensor)? })
    };
    (Positions $view:expr, $tensor:expr, $operand:expr) => {
        $view = Some(match $tensor.dtype {
            FLASHCORE_DTYPE_I32 => Positions::I32($tensor.slice()),
            _ => Positions::I64($tensor.slice()),
        })
    };
    ($element:ident $view:expr, $tensor:expr, $operand:expr) => {
        $view = Some($tensor.slice::<$element>())
    };
}

/// Sets the view of a kind of operand that is written.
macro_rules! written {
    (Tensor $view:expr, $tensor:expr, $operand:expr) => {
        $view = $tensor.view_mut()
    };
    (Scale $view:expr, $tensor:expr, $operand:expr) => {
        $view = Some(ScaleViewMut { data: $tensor.slice_mut(), strides: scale_strides($operand, $tensor)? })
    };
    ($element:ident $view:expr, $tensor:expr, $operand:expr) => {
        $view = Some($tensor.slice_mut::<$element>())
    };
}

macro_rules! define_views {
    ($($(#[$doc:meta])* $name:ident: $Name:ident, $with:ident,
        $(reads $in:ident)? $(writes $out:ident)? $(, or writes $computed:ident)?;)*) => {
        /// The element type of an operand whatever the problem.
        const fn fixed_dtype(operand: Operand) -> Option<i32> {
            match operand {
                $(Operand::$Name => dtype_of_kind!($($in)? $($out)?),)*
                _ => None,
            }
        }

        /// Views of the host's memory, by the operands that the call writes.
        ///
        /// # Safety
        ///
        /// The memory can be read, and what is written is apart from everything else, for the lifetime chosen.
        unsafe fn views<'a>(
            tensors: &Tensors,
            is_written: impl Fn(Operand) -> bool,
        ) -> Result<(InputViews<'a>, OutputViews<'a>), Failure> {
            let (mut inputs, mut outputs) = (InputViews::default(), OutputViews::default());
            // SAFETY: the contract of this function; types were checked.
            unsafe {
                $(if let Some(tensor) = tensors.get(Operand::$Name) {
                    if is_written(Operand::$Name) {
                        $(written!($out outputs.$name, tensor, Operand::$Name);)?
                        $(written!($computed outputs.$name, tensor, Operand::$Name);)?
                    } else {
                        $(read!($in inputs.$name, tensor, Operand::$Name);)?
                    }
                })*
            }
            Ok((inputs, outputs))
        }
    };
}

api::operands!(define_views);

impl Tensor {
    fn float(&self) -> DType {
        // Types were checked against those of the plan.
        TYPES.into_iter().find(|&(_, code)| code == self.dtype).map_or(DType::F32, |(dtype, _)| dtype)
    }

    /// # Safety
    ///
    /// As for [`Tensor::slice`].
    unsafe fn view<'a>(&self) -> TensorView<'a> {
        // SAFETY: the contract of this function.
        TensorView { dtype: self.float(), data: unsafe { self.slice() } }
    }

    /// # Safety
    ///
    /// As for [`Tensor::slice_mut`].
    unsafe fn view_mut<'a>(&self) -> TensorViewMut<'a> {
        // SAFETY: the contract of this function.
        TensorViewMut { dtype: self.float(), data: unsafe { self.slice_mut() } }
    }
}

fn bias_strides(tensor: &Tensor) -> Result<BiasStrides, Failure> {
    let [batch, head, row, key, _] = tensor.sizes(Operand::Bias)?;
    Ok(BiasStrides { batch, head, row, key })
}

fn scale_strides(operand: Operand, tensor: &Tensor) -> Result<ScaleStrides, Failure> {
    let [sequence, batch, row, key_head, query_head] = tensor.sizes(operand)?;
    Ok(ScaleStrides { sequence, batch, row, key_head, query_head })
}

/// The strides that come with the call.
fn call_strides(tensors: &Tensors) -> Result<CallStrides, Failure> {
    let mut strides = CallStrides::NONE;
    if let Some(bias) = tensors.get(Operand::Bias) {
        strides.bias = bias_strides(bias)?;
    }
    for (of, operand) in strides.scales.iter_mut().zip(Operand::SCALES) {
        if let Some(scale) = tensors.get(operand) {
            *of = scale_strides(operand, scale)?;
        }
    }
    Ok(strides)
}

type Uses = [Option<Use>; Operand::COUNT];

/// Checks operands and types against those of a plan.
fn check_types(tensors: &Tensors, uses: &Uses) -> Result<(), Failure> {
    tensors.check_types(|operand| {
        let of = uses[operand as usize]?;
        let of_problem = || of.dtype.and_then(|dtype| TYPES.into_iter().find(|&(other, _)| other == dtype));
        let positions = if of.element_bytes == 4 { FLASHCORE_DTYPE_I32 } else { FLASHCORE_DTYPE_I64 };
        Some(fixed_dtype(operand).or_else(|| of_problem().map(|(_, code)| code)).unwrap_or(positions))
    })
}

/// Computes in the host's memory.
///
/// # Safety
///
/// The memory of the tensors can be read, and written where they are outputs, as far as they say.
pub(crate) unsafe fn run(plan: &Plan, tensors: &Tensors) -> Result<(), Failure> {
    let uses = plan.operation().uses(call_strides(tensors)?, None);
    check_types(tensors, &uses)?;
    let is_written = |operand: Operand| uses[operand as usize].is_some_and(|of| of.is_written);
    tensors.check_run(is_written)?;
    let (outputs_of_parts, lses_of_parts) =
        (parts(tensors, plan, Operand::PartOutputs)?, parts(tensors, plan, Operand::PartLses)?);
    // SAFETY: the contract of this function; what is written was found to be apart from everything else.
    let (part_outputs, part_lses): (Vec<_>, Vec<_>) = unsafe {
        (
            outputs_of_parts.iter().map(|part| part.view()).collect(),
            lses_of_parts.iter().map(|part| part.view()).collect(),
        )
    };
    // SAFETY: as above.
    let (mut inputs, mut outputs) = unsafe { views(tensors, is_written) }?;
    (inputs.part_outputs, inputs.part_lses) = ((&part_outputs[..]).into(), (&part_lses[..]).into());
    if tensors.query_apart().is_none() {
        // In place: the output holds the query.
        inputs.query = TensorView::default();
    }
    if let ValueCache::InKeyCache { memory, bytes } = tensors.caches()? {
        // SAFETY: as above; the memory of both caches becomes one view.
        outputs.key_cache = unsafe { memory.view_mut() };
        outputs.value_cache = TensorViewMut::default();
        outputs.value_offset = Some(bytes / memory.float().size_bytes());
    }
    plan.run(inputs, outputs).map_err(Failure::from)
}

/// The tensors of a list: one entry for each part of a merge, or one for all with the distance between them.
fn parts(tensors: &Tensors, plan: &Plan, operand: Operand) -> Result<Vec<Tensor>, Failure> {
    let given: Vec<Tensor> = tensors.all(operand).copied().collect();
    let (name, Operation::Merge(problem)) = (operand.name(), plan.operation()) else { return Ok(given) };
    let num_parts = problem.num_parts;
    let [stacked] = given.as_slice() else {
        let count = given.len();
        return if count == num_parts {
            Ok(given)
        } else {
            Err(Failure::argument(format!(
                "tensors has {count} {name}; it must have one with the stride of parts, or {num_parts}"
            )))
        };
    };
    let stride = part_stride(operand, stacked)?;
    (0..num_parts as u64)
        .map(|part| {
            let start = stride.checked_mul(part).filter(|&start| start <= stacked.bytes);
            let Some(start) = start else {
                let message = format!(
                    "tensors.{name} has {} bytes, and part {part} begins after them, {stride} bytes from one to the next",
                    stacked.bytes
                );
                return Err(Failure::argument(message));
            };
            Ok(Tensor { data: stacked.data.wrapping_byte_add(start as usize), bytes: stacked.bytes - start, ..*stacked })
        })
        .collect()
}

/// Bytes from one part to the next.
fn part_stride(operand: Operand, tensor: &Tensor) -> Result<u64, Failure> {
    let stride = tensor.sizes(operand)?[0] as u64;
    stride.checked_mul(tensor.float().size_bytes() as u64).ok_or_else(|| {
        let name = operand.name();
        Failure::argument(format!("tensors.{name} has strides[0] {stride}; its bytes must fit 64 bits"))
    })
}

/// Addresses and strides of a launch, whose types and sizes are right.
fn device_tensors(plan: &Plan, tensors: &Tensors) -> Result<DeviceTensors, Failure> {
    let strides = call_strides(tensors)?;
    if let (Some(tokens), Operation::Attention(_) | Operation::Continue(_) | Operation::KvCache(_)) =
        (tensors.tokens, plan.operation())
    {
        return Err(Failure::argument(format!("FLASHCORE_TOKENS is {tokens}; it is for an append or a merge")));
    }
    let uses = plan.operation().uses(strides, tensors.tokens);
    check_types(tensors, &uses)?;
    let mut made = DeviceTensors::NONE;
    for &operand in Operand::ALL {
        let Some(of) = uses[operand as usize] else { continue };
        for tensor in tensors.all(operand) {
            let (name, given, needed) = (operand.name(), tensor.bytes, of.bytes());
            if given < needed {
                return Err(Failure::argument(format!("tensors.{name} has {given} bytes; the plan needs {needed}")));
            }
        }
        made.set(operand, tensors.address(operand));
    }
    made.set_call_strides(strides);
    let all = |operand| tensors.all(operand).collect::<Vec<_>>();
    let (outputs, lses) = (all(Operand::PartOutputs), all(Operand::PartLses));
    made = match (outputs.as_slice(), lses.as_slice()) {
        ([], []) => made,
        ([output], [lse]) => {
            let strides = [part_stride(Operand::PartOutputs, output)?, part_stride(Operand::PartLses, lse)?];
            made.with_stacked_parts((output.address(), strides[0]), (lse.address(), strides[1]))
        }
        ([first, second], [first_lse, second_lse]) => {
            made.with_two_parts([first.address(), second.address()], [first_lse.address(), second_lse.address()])
        }
        (outputs, lses) => {
            return Err(Failure::argument(format!(
                "tensors has {} part_outputs and {} part_lses; a launch takes one of each with the stride of parts, or two",
                outputs.len(),
                lses.len()
            )));
        }
    };
    made.tokens = tensors.tokens;
    if let Some(workspace) = tensors.workspace {
        let (given, needed) = (workspace.bytes, plan.workspace_bytes() as u64);
        if given < needed {
            return Err(Failure::argument(format!("FLASHCORE_WORKSPACE has {given} bytes; the plan needs {needed}")));
        }
        made.workspace = workspace.address();
    }
    Ok(made)
}

/// Launches on device memory.
///
/// # Safety
///
/// As for `flashcore_launch`.
pub(crate) unsafe fn launch(plan: &Plan, stream: *mut c_void, tensors: &Tensors) -> Result<(), Failure> {
    // SAFETY: the contract of this function.
    unsafe { plan.launch(stream, device_tensors(plan, tensors)?) }.map_err(Failure::from)
}

/// Checks lengths, pages and slots of a launch.
///
/// # Safety
///
/// As for `flashcore_check`.
pub(crate) unsafe fn check(plan: &Plan, stream: *mut c_void, tensors: &Tensors) -> Result<(), Failure> {
    // SAFETY: the contract of this function.
    unsafe { plan.check_lengths(stream, device_tensors(plan, tensors)?) }.map_err(Failure::from)
}
