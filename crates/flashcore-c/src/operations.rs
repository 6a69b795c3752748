//! Plans of every operation behind one type, and the tensors of their calls.

use std::ffi::c_void;

use api::{
    AppendPlan, AppendTensors, BiasStrides, BiasView, Config, ContinuePlan, DType, Device, DeviceTensors, InputViews,
    KvCacheInputs, KvCacheOutputs, KvCachePlan, KvCacheTensors, MergePlan, MergeTensors, Operand, OutputViews,
    PartAddresses, Plan, PlanOptions, PositionType, Positions, Problem as ApiProblem, ScaleStrides, ScaleView,
    ScaleViewMut, TensorView, TensorViewMut,
};

use crate::problem::{
    AnyProblem, FLASHCORE_DTYPE_BF16, FLASHCORE_DTYPE_E4M3, FLASHCORE_DTYPE_E5M2, FLASHCORE_DTYPE_F16,
    FLASHCORE_DTYPE_F32, FLASHCORE_DTYPE_F64, FLASHCORE_DTYPE_I32, FLASHCORE_DTYPE_I64,
};
use crate::status::{FLASHCORE_UNSUPPORTED, Failure};
use crate::tensor::{Tensor, Tensors, ValueCache};

const TYPES: [(DType, i32); 6] = [
    (DType::F16, FLASHCORE_DTYPE_F16),
    (DType::Bf16, FLASHCORE_DTYPE_BF16),
    (DType::F32, FLASHCORE_DTYPE_F32),
    (DType::F64, FLASHCORE_DTYPE_F64),
    (DType::E4m3, FLASHCORE_DTYPE_E4M3),
    (DType::E5m2, FLASHCORE_DTYPE_E5M2),
];

/// A plan of any operation.
pub(crate) enum AnyPlan {
    Attention(Plan),
    Continue(Box<ContinuePlan>),
    Append(AppendPlan),
    KvCache(KvCachePlan),
    Merge(MergePlan),
}

fn code(dtype: DType) -> i32 {
    TYPES.into_iter().find(|&(other, _)| other == dtype).map_or(0, |(_, code)| code)
}

impl AnyPlan {
    pub(crate) fn new(problem: AnyProblem, device: &Device, config: Option<Config>) -> Result<Self, Failure> {
        let options = PlanOptions::default().with_config(config);
        if let (Some(config), AnyProblem::Append(_) | AnyProblem::Merge(_) | AnyProblem::Continue(_)) =
            (config, &problem)
        {
            let message = format!("config is {config}; it must be null, for there is one kernel of this operation");
            return Err(Failure::argument(message));
        }
        Ok(match problem {
            AnyProblem::Attention(problem) => Self::Attention(Plan::with_options(&problem, device, options)?),
            AnyProblem::Continue(problem) => Self::Continue(Box::new(ContinuePlan::new(&problem, device)?)),
            AnyProblem::Append(problem) => Self::Append(AppendPlan::new(&problem, device)?),
            AnyProblem::KvCache(problem) => Self::KvCache(KvCachePlan::with_options(&problem, device, options)?),
            AnyProblem::Merge(problem) => Self::Merge(MergePlan::new(&problem, device)?),
        })
    }

    pub(crate) fn device(&self) -> &Device {
        match self {
            Self::Attention(plan) => plan.device(),
            Self::Continue(plan) => plan.device(),
            Self::Append(plan) => plan.device(),
            Self::KvCache(plan) => plan.device(),
            Self::Merge(plan) => plan.device(),
        }
    }

    pub(crate) fn description(&self) -> String {
        match self {
            Self::Attention(plan) => plan.report().to_string(),
            Self::Continue(plan) => plan.report().to_string(),
            Self::KvCache(plan) => plan.report().to_string(),
            Self::Append(plan) => format!("{:?}", plan.problem()),
            Self::Merge(plan) => format!("{:?}", plan.problem()),
        }
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        match self {
            Self::Attention(plan) => plan.workspace_bytes(),
            Self::Continue(plan) => plan.workspace_bytes(),
            Self::KvCache(plan) => plan.workspace_bytes(),
            Self::Append(_) | Self::Merge(_) => 0,
        }
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
        fixed.or_else(|| match self {
            Self::Attention(plan) => attention(plan.problem()),
            Self::Continue(plan) => attention(plan.problem()),
            Self::KvCache(plan) => match operand {
                Operand::NewKey | Operand::NewValue | Operand::QueryNorm | Operand::KeyNorm => {
                    Some(code(plan.problem().attention.dtype))
                }
                Operand::KeyCache | Operand::ValueCache => Some(code(plan.problem().append(0).cache_dtype())),
                Operand::Cos | Operand::Sin => Some(code(plan.problem().append(0).table_dtype())),
                Operand::Key | Operand::Value => None,
                _ => attention(&plan.problem().attention),
            },
            Self::Append(plan) => match operand {
                Operand::KeyCache | Operand::ValueCache => Some(code(plan.problem().cache_dtype())),
                Operand::Cos | Operand::Sin => Some(code(plan.problem().table_dtype())),
                Operand::Positions => plan.problem().rotary.map(|rotary| match rotary.positions {
                    PositionType::I32 => FLASHCORE_DTYPE_I32,
                    PositionType::I64 => FLASHCORE_DTYPE_I64,
                }),
                O::Query | O::NewKey | O::NewValue | O::QueryOutput | O::QueryNorm | O::KeyNorm => {
                    Some(code(plan.problem().dtype))
                }
                _ => None,
            },
            Self::Merge(plan) => match operand {
                Operand::PartOutputs => Some(code(plan.problem().part_dtype)),
                Operand::Output => Some(code(plan.problem().dtype)),
                _ => None,
            },
        })
    }

    /// True for operands that a run writes.
    fn is_written(&self, operand: Operand) -> bool {
        let computes_scales = match self {
            Self::Append(plan) => plan.problem().compute_scales,
            Self::KvCache(plan) => plan.problem().compute_scales,
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
        match self {
            Self::Attention(_) | Self::Continue(_) => (operand as u32) <= O::VScale as u32,
            Self::KvCache(_) => {
                of_append
                    || matches!(operand, O::CuSeqlensKNew | O::RotarySeqlens)
                    || (operand as u32) <= O::VScale as u32 && !matches!(operand, O::Key | O::Value)
            }
            Self::Append(_) => {
                of_append || matches!(operand, O::Query | O::QueryOutput | O::SlotMapping | O::Positions)
            }
            Self::Merge(_) => matches!(operand, O::PartOutputs | O::PartLses | O::Output | O::Lse),
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
        match self {
            Self::Attention(plan) => plan.run(inputs, outputs),
            Self::Continue(plan) => plan.run(inputs, outputs),
            Self::Append(plan) => plan.run(&inputs, outputs),
            Self::KvCache(plan) => {
                let (inputs, outputs) = kv_cache(&inputs, outputs);
                plan.run(&inputs, outputs)
            }
            Self::Merge(plan) => {
                let num_parts = plan.problem().num_parts;
                let of_parts = |operand| parts(tensors, num_parts, operand);
                let (part_outputs, part_lses) = (of_parts(Operand::PartOutputs)?, of_parts(Operand::PartLses)?);
                // SAFETY: as above; each part lies inside of the memory of its tensor.
                let views = |parts: &[Tensor]| parts.iter().map(|part| unsafe { part.view() }).collect::<Vec<_>>();
                let (part_outputs, part_lses) = (views(&part_outputs), views(&part_lses));
                let inputs = inputs.with_part_outputs(&part_outputs[..]).with_part_lses(&part_lses[..]);
                plan.run(&inputs, outputs)
            }
        }
        .map_err(Failure::from)
    }

    /// Launches on device memory.
    ///
    /// # Safety
    ///
    /// As for `flashcore_launch`.
    pub(crate) unsafe fn launch(&self, stream: *mut c_void, tensors: &Tensors) -> Result<(), Failure> {
        let at = |operand| tensors.address(operand);
        let has_tokens = matches!(self, Self::Append(_) | Self::Merge(_));
        if let Some(tokens) = tensors.tokens.filter(|_| !has_tokens) {
            let message = format!("FLASHCORE_TOKENS is {tokens}; it is for an append or a merge");
            return Err(Failure::argument(message));
        }
        if let (Some(workspace), bytes) = (tensors.workspace, self.workspace_bytes() as u64)
            && workspace.bytes < bytes
        {
            let given = workspace.bytes;
            return Err(Failure::argument(format!("FLASHCORE_WORKSPACE has {given} bytes; the plan needs {bytes}")));
        }
        // SAFETY: the contract of this function.
        unsafe {
            match self {
                Self::Attention(plan) => plan.launch(stream, addresses(tensors, [Operand::Key, Operand::Value])?),
                Self::Continue(plan) => plan.launch(stream, addresses(tensors, [Operand::Key, Operand::Value])?),
                Self::KvCache(plan) => {
                    let attention = addresses(tensors, [Operand::KeyCache, Operand::ValueCache])?;
                    let tensors = KvCacheTensors::new(attention, at(Operand::NewKey), at(Operand::NewValue))
                        .with_cu_seqlens_k_new(at(Operand::CuSeqlensKNew))
                        .with_rotary_seqlens(at(Operand::RotarySeqlens))
                        .with_rotary(at(Operand::Cos), at(Operand::Sin))
                        .with_qk_norm(at(Operand::QueryNorm), at(Operand::KeyNorm));
                    plan.launch(stream, tensors)
                }
                Self::Append(plan) => plan.launch(stream, append_addresses(tensors)?),
                Self::Merge(plan) => plan.launch(stream, merge_addresses(tensors)?),
            }
        }
        .map_err(Failure::from)
    }

    /// Checks lengths, pages and slots of a launch.
    ///
    /// # Safety
    ///
    /// As for `flashcore_check`.
    pub(crate) unsafe fn check(&self, stream: *mut c_void, tensors: &Tensors) -> Result<(), Failure> {
        // SAFETY: the contract of this function.
        unsafe {
            match self {
                Self::Attention(plan) => {
                    plan.check_lengths(stream, addresses(tensors, [Operand::Key, Operand::Value])?)
                }
                Self::Append(plan) => plan.check_slots(stream, append_addresses(tensors)?),
                Self::Continue(_) | Self::KvCache(_) | Self::Merge(_) => {
                    let message = "flashcore_check is for attention and append; run the others in the host's memory";
                    return Err(Failure { status: FLASHCORE_UNSUPPORTED, message: message.to_owned() });
                }
            }
        }
        .map_err(Failure::from)
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

/// Views of attention with a growing cache: the key and the value of its attention are the new ones.
fn kv_cache<'a>(given: &InputViews<'a>, written: OutputViews<'a>) -> (KvCacheInputs<'a>, KvCacheOutputs<'a>) {
    let mut attention = InputViews::new(given.query, given.new_key, given.new_value);
    attention.cu_seqlens_q = given.cu_seqlens_q;
    attention.cu_seqlens_k = given.cu_seqlens_k;
    attention.seqused_q = given.seqused_q;
    attention.seqused_k = given.seqused_k;
    attention.leftpad_k = given.leftpad_k;
    attention.kv_batch_idx = given.kv_batch_idx;
    attention.page_table = given.page_table;
    attention.alibi_slopes = given.alibi_slopes;
    attention.sinks = given.sinks;
    (attention.aux_f32, attention.aux_i32) = (given.aux_f32, given.aux_i32);
    attention.bias = given.bias;
    (attention.q_scale, attention.k_scale, attention.v_scale) = (given.q_scale, given.k_scale, given.v_scale);
    let mut inputs = KvCacheInputs::new(attention);
    (inputs.cu_seqlens_k_new, inputs.rotary_seqlens) = (given.cu_seqlens_k_new, given.rotary_seqlens);
    let there = |tensor: TensorView<'a>| (!tensor.data.is_empty()).then_some(tensor);
    (inputs.cos, inputs.sin) = (there(given.cos), there(given.sin));
    (inputs.query_norm, inputs.key_norm) = (there(given.query_norm), there(given.key_norm));
    let mut attended = OutputViews::new(written.output);
    attended.lse = written.lse;
    let mut outputs = match written.value_offset {
        None => KvCacheOutputs::new(written.key_cache, written.value_cache, attended),
        Some(offset) => KvCacheOutputs::interleaved(written.key_cache, offset, attended),
    };
    (outputs.k_scale, outputs.v_scale) = (written.k_scale, written.v_scale);
    (inputs, outputs)
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

/// Addresses of attention.
fn addresses(tensors: &Tensors, [key, value]: [Operand; 2]) -> Result<DeviceTensors, Failure> {
    let at = |operand| tensors.address(operand);
    let mut made = DeviceTensors::new(at(Operand::Query), at(key), at(value), at(Operand::Output))
        .with_lse(at(Operand::Lse))
        .with_cu_seqlens_q(at(Operand::CuSeqlensQ))
        .with_cu_seqlens_k(at(Operand::CuSeqlensK))
        .with_seqused_q(at(Operand::SequsedQ))
        .with_seqused_k(at(Operand::SequsedK))
        .with_leftpad_k(at(Operand::LeftpadK))
        .with_kv_batch_idx(at(Operand::KvBatchIdx))
        .with_page_table(at(Operand::PageTable))
        .with_alibi_slopes(at(Operand::AlibiSlopes))
        .with_sinks(at(Operand::Sinks))
        .with_aux_f32(at(Operand::AuxF32))
        .with_aux_i32(at(Operand::AuxI32))
        .with_workspace(tensors.workspace.as_ref().map_or(0, Tensor::address));
    if let Some(bias) = tensors.get(Operand::Bias) {
        made = made.with_bias(bias.address(), bias_strides(bias)?);
    }
    if let Some(scale) = tensors.get(Operand::QScale) {
        made = made.with_q_scale(scale.address(), scale_strides(Operand::QScale, scale)?);
    }
    if let Some(scale) = tensors.get(Operand::KScale) {
        made = made.with_k_scale(scale.address(), scale_strides(Operand::KScale, scale)?);
    }
    if let Some(scale) = tensors.get(Operand::VScale) {
        made = made.with_v_scale(scale.address(), scale_strides(Operand::VScale, scale)?);
    }
    Ok(made)
}

fn append_addresses(tensors: &Tensors) -> Result<AppendTensors, Failure> {
    let at = |operand| tensors.address(operand);
    let (key, value) = (at(Operand::NewKey), at(Operand::NewValue));
    let mut made =
        AppendTensors::new(key, value, at(Operand::KeyCache), at(Operand::ValueCache), at(Operand::SlotMapping))
            .with_query(at(Operand::Query), at(Operand::QueryOutput))
            .with_rotary(at(Operand::Positions), at(Operand::Cos), at(Operand::Sin))
            .with_qk_norm(at(Operand::QueryNorm), at(Operand::KeyNorm));
    if let Some(scale) = tensors.get(Operand::KScale) {
        made = made.with_k_scale(scale.address(), scale_strides(Operand::KScale, scale)?);
    }
    if let Some(scale) = tensors.get(Operand::VScale) {
        made = made.with_v_scale(scale.address(), scale_strides(Operand::VScale, scale)?);
    }
    Ok(match tensors.tokens {
        Some(tokens) => made.with_tokens(tokens),
        None => made,
    })
}

fn merge_addresses(tensors: &Tensors) -> Result<MergeTensors, Failure> {
    let of = |operand: Operand| tensors.all(operand).collect::<Vec<_>>();
    let (outputs, lses) = (of(Operand::PartOutputs), of(Operand::PartLses));
    let parts = match (outputs.as_slice(), lses.as_slice()) {
        ([output], [lse]) => PartAddresses::Stacked {
            output: output.address(),
            output_stride: output.sizes(Operand::PartOutputs)?[0] as u64,
            lse: lse.address(),
            lse_stride: lse.sizes(Operand::PartLses)?[0] as u64,
        },
        ([first, second], [first_lse, second_lse]) => PartAddresses::Two {
            outputs: [first.address(), second.address()],
            lses: [first_lse.address(), second_lse.address()],
        },
        (outputs, lses) => {
            return Err(Failure::argument(format!(
                "tensors has {} part_outputs and {} part_lses; a launch takes one of each with the stride of parts, or two",
                outputs.len(),
                lses.len()
            )));
        }
    };
    let made = MergeTensors::new(parts, tensors.address(Operand::Output)).with_lse(tensors.address(Operand::Lse));
    Ok(match tensors.tokens {
        Some(tokens) => made.with_tokens(tokens),
        None => made,
    })
}
