//! Plans of every operation behind one type, and the tensors of their calls.

use std::ffi::c_void;

use api::{
    BiasStrides, BiasView, Config, DType, Device, DeviceTensors, InputViews, Operand, Operation, OutputViews, Plan,
    PlanOptions, PositionType, Positions, Problem as ApiProblem, ScaleStrides, ScaleView, ScaleViewMut, TensorView,
    TensorViewMut,
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

fn code(dtype: DType) -> i32 {
    TYPES.into_iter().find(|&(other, _)| other == dtype).map_or(0, |(_, code)| code)
}

/// A plan of any operation and the tensors of its calls.
pub(crate) struct AnyPlan(pub(crate) Plan);

impl AnyPlan {
    pub(crate) fn new(operation: Operation, device: &Device, config: Option<Config>) -> Result<Self, Failure> {
        if let (Some(config), Operation::Append(_) | Operation::Merge(_) | Operation::Continue(_)) =
            (config, &operation)
        {
            let message = format!("config is {config}; it must be null, for there is one kernel of this operation");
            return Err(Failure::argument(message));
        }
        Ok(Self(Plan::with_options(operation, device, PlanOptions::default().with_config(config))?))
    }

    /// The element type of an operand; `None` if it is none of the operation.
    fn dtype(&self, operand: Operand) -> Option<i32> {
        use Operand as O;
        let fixed = match operand {
            O::Lse
            | O::AlibiSlopes
            | O::Sinks
            | O::AuxF32
            | O::Bias
            | O::QScale
            | O::KScale
            | O::VScale
            | O::PartLses => Some(FLASHCORE_DTYPE_F32),
            O::CuSeqlensQ
            | O::CuSeqlensK
            | O::SequsedQ
            | O::SequsedK
            | O::LeftpadK
            | O::KvBatchIdx
            | O::PageTable
            | O::AuxI32
            | O::CuSeqlensKNew
            | O::RotarySeqlens => Some(FLASHCORE_DTYPE_I32),
            O::SlotMapping => Some(FLASHCORE_DTYPE_I64),
            _ => None,
        };
        let attention = |problem: &ApiProblem| {
            let types = problem.dtypes();
            match operand {
                Operand::Query => Some(code(types.query)),
                Operand::Key | Operand::Value => Some(code(types.key_value)),
                Operand::Output => Some(code(types.output)),
                _ => None,
            }
        };
        fixed.or_else(|| match self.0.operation() {
            Operation::Attention(problem) | Operation::Continue(problem) => attention(problem),
            Operation::KvCache(problem) => match operand {
                Operand::NewKey | Operand::NewValue | Operand::QueryNorm | Operand::KeyNorm => {
                    Some(code(problem.attention.dtype))
                }
                Operand::KeyCache | Operand::ValueCache => Some(code(problem.append(0).cache_dtype())),
                Operand::Cos | Operand::Sin => Some(code(problem.append(0).table_dtype())),
                Operand::Key | Operand::Value => None,
                _ => attention(&problem.attention),
            },
            Operation::Append(problem) => match operand {
                Operand::KeyCache | Operand::ValueCache => Some(code(problem.cache_dtype())),
                Operand::Cos | Operand::Sin => Some(code(problem.table_dtype())),
                Operand::Positions => problem.rotary.map(|rotary| match rotary.positions {
                    PositionType::I32 => FLASHCORE_DTYPE_I32,
                    PositionType::I64 => FLASHCORE_DTYPE_I64,
                }),
                O::Query | O::NewKey | O::NewValue | O::QueryOutput | O::QueryNorm | O::KeyNorm => {
                    Some(code(problem.dtype))
                }
                _ => None,
            },
            Operation::Merge(problem) => match operand {
                Operand::PartOutputs => Some(code(problem.part_dtype)),
                Operand::Output => Some(code(problem.dtype)),
                _ => None,
            },
            _ => None,
        })
    }

    /// True for operands that a run writes.
    fn is_written(&self, operand: Operand) -> bool {
        let computes_scales = match self.0.operation() {
            Operation::Append(problem) => problem.compute_scales,
            Operation::KvCache(problem) => problem.compute_scales,
            _ => false,
        };
        match operand {
            Operand::Output | Operand::Lse | Operand::KeyCache | Operand::ValueCache | Operand::QueryOutput => true,
            Operand::KScale | Operand::VScale => computes_scales,
            _ => false,
        }
    }

    /// True for operands of the operation.
    fn takes(&self, operand: Operand) -> bool {
        use Operand as O;
        let of_append = matches!(
            operand,
            O::NewKey
                | O::NewValue
                | O::KeyCache
                | O::ValueCache
                | O::Cos
                | O::Sin
                | O::QueryNorm
                | O::KeyNorm
                | O::KScale
                | O::VScale
        );
        match self.0.operation() {
            Operation::Attention(_) | Operation::Continue(_) => (operand as u32) <= O::VScale as u32,
            Operation::KvCache(_) => {
                of_append
                    || matches!(operand, O::CuSeqlensKNew | O::RotarySeqlens)
                    || (operand as u32) <= O::VScale as u32 && !matches!(operand, O::Key | O::Value)
            }
            Operation::Append(_) => {
                of_append || matches!(operand, O::Query | O::QueryOutput | O::SlotMapping | O::Positions)
            }
            Operation::Merge(_) => matches!(operand, O::PartOutputs | O::PartLses | O::Output | O::Lse),
            _ => false,
        }
    }

    /// Checks operands and types.
    pub(crate) fn check_tensors(&self, tensors: &Tensors) -> Result<(), Failure> {
        tensors.check_types(|operand| self.dtype(operand).filter(|_| self.takes(operand)))
    }

    /// Computes in the host's memory.
    ///
    /// # Safety
    ///
    /// The memory of the tensors can be read, and written where they are outputs, as far as they say.
    pub(crate) unsafe fn run(&self, tensors: &Tensors) -> Result<(), Failure> {
        tensors.check_run(|operand| self.is_written(operand))?;
        // SAFETY: the contract of this function; what is written was found to be apart from everything else.
        let (mut inputs, mut outputs) = unsafe { views(tensors, |operand| self.is_written(operand)) }?;
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
        let Operation::Merge(problem) = self.0.operation() else {
            return self.0.run(inputs, outputs).map_err(Failure::from);
        };
        let of_parts = |operand| parts(tensors, problem.num_parts, operand);
        let (part_outputs, part_lses) = (of_parts(Operand::PartOutputs)?, of_parts(Operand::PartLses)?);
        // SAFETY: as above; each part lies inside of the memory of its tensor.
        let views = |parts: &[Tensor]| parts.iter().map(|part| unsafe { part.view() }).collect::<Vec<_>>();
        let (part_outputs, part_lses) = (views(&part_outputs), views(&part_lses));
        let inputs = inputs.with_part_outputs(&part_outputs[..]).with_part_lses(&part_lses[..]);
        self.0.run(inputs, outputs).map_err(Failure::from)
    }

    /// Launches on device memory.
    ///
    /// # Safety
    ///
    /// As for `flashcore_launch`.
    pub(crate) unsafe fn launch(&self, stream: *mut c_void, tensors: &Tensors) -> Result<(), Failure> {
        let has_tokens = matches!(self.0.operation(), Operation::Append(_) | Operation::Merge(_));
        if let Some(tokens) = tensors.tokens.filter(|_| !has_tokens) {
            let message = format!("FLASHCORE_TOKENS is {tokens}; it is for an append or a merge");
            return Err(Failure::argument(message));
        }
        if let (Some(workspace), bytes) = (tensors.workspace, self.0.workspace_bytes() as u64)
            && workspace.bytes < bytes
        {
            let given = workspace.bytes;
            return Err(Failure::argument(format!("FLASHCORE_WORKSPACE has {given} bytes; the plan needs {bytes}")));
        }
        let tensors = addresses(tensors)?;
        // SAFETY: the contract of this function.
        unsafe { self.0.launch(stream, tensors) }.map_err(Failure::from)
    }

    /// Checks lengths, pages and slots of a launch.
    ///
    /// # Safety
    ///
    /// As for `flashcore_check`.
    pub(crate) unsafe fn check(&self, stream: *mut c_void, tensors: &Tensors) -> Result<(), Failure> {
        let tensors = addresses(tensors)?;
        // SAFETY: the contract of this function.
        unsafe { self.0.check_lengths(stream, tensors) }.map_err(Failure::from)
    }
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

fn scale_strides(operand: Operand, tensor: &Tensor) -> Result<ScaleStrides, Failure> {
    let [sequence, batch, row, key_head, query_head] = tensor.sizes(operand)?;
    Ok(ScaleStrides { sequence, batch, row, key_head, query_head })
}

fn bias_strides(tensor: &Tensor) -> Result<BiasStrides, Failure> {
    let [batch, head, row, key, _] = tensor.sizes(Operand::Bias)?;
    Ok(BiasStrides { batch, head, row, key })
}

/// The tensors of a list: one entry for each part of a merge, or one for all with the distance between them.
fn parts(tensors: &Tensors, num_parts: usize, operand: Operand) -> Result<Vec<Tensor>, Failure> {
    let given: Vec<Tensor> = tensors.all(operand).copied().collect();
    let name = operand.name();
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

/// Addresses of a launch.
fn addresses(tensors: &Tensors) -> Result<DeviceTensors, Failure> {
    let mut made = DeviceTensors::NONE.with_workspace(tensors.workspace.as_ref().map_or(0, Tensor::address));
    made.tokens = tensors.tokens;
    for &operand in Operand::ALL {
        let Some(tensor) = tensors.get(operand) else { continue };
        made = match operand {
            Operand::Bias => made.with_bias(tensor.address(), bias_strides(tensor)?),
            Operand::QScale => made.with_q_scale(tensor.address(), scale_strides(operand, tensor)?),
            Operand::KScale => made.with_k_scale(tensor.address(), scale_strides(operand, tensor)?),
            Operand::VScale => made.with_v_scale(tensor.address(), scale_strides(operand, tensor)?),
            Operand::PartOutputs | Operand::PartLses => continue,
            _ => {
                made.set(operand, tensor.address());
                made
            }
        };
    }
    let of = |operand: Operand| tensors.all(operand).collect::<Vec<_>>();
    let (outputs, lses) = (of(Operand::PartOutputs), of(Operand::PartLses));
    match (outputs.as_slice(), lses.as_slice()) {
        ([], []) => Ok(made),
        ([output], [lse]) => {
            let strides = [part_stride(Operand::PartOutputs, output)?, part_stride(Operand::PartLses, lse)?];
            Ok(made.with_stacked_parts((output.address(), strides[0]), (lse.address(), strides[1])))
        }
        ([first, second], [first_lse, second_lse]) => {
            Ok(made.with_two_parts([first.address(), second.address()], [first_lse.address(), second_lse.address()]))
        }
        (outputs, lses) => Err(Failure::argument(format!(
            "tensors has {} part_outputs and {} part_lses; a launch takes one of each with the stride of parts, or two",
            outputs.len(),
            lses.len()
        ))),
    }
}
