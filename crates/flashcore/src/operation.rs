//! Operations: what a plan computes.

use std::fmt;

use flashcore_problem::{
    Access, AppendProblem, CallStrides, DType, InputViews, Invalid, KvCacheProblem, MergeProblem, Operand, OutputViews,
    Problem, ProblemError, Rotary, ScaleSource, Shape, StateMerge, Strides, kv_cache_inputs, kv_cache_outputs,
};

/// Operation that a [`Plan`](crate::Plan) computes.
///
/// Made from a problem by `into()`; a continuation has the problem of attention, and is made by name.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Operation {
    /// Attention.
    Attention(Problem),
    /// Append of new keys and values to the slots of a KV cache, with QK-norm and rotary embedding.
    Append(AppendProblem),
    /// Append by sequence, then attention on the caches (`flash_attn_with_kvcache`).
    KvCache(KvCacheProblem),
    /// Merge of partial results of attention by their LSE.
    Merge(MergeProblem),
    /// Attention over more keys, merged into an output and an LSE that are given, which are replaced: what ring attention,
    /// cascades and chunked prefill do for each set of keys after the first.
    ///
    /// Output and LSE are those of attention over other keys, of the same problem otherwise, or the start: output 0 and
    /// LSE minus infinity. Rows that no sequence has stay as they are. A sink counts each time, so it belongs to one of
    /// the plans.
    Continue(Problem),
}

/// Memory of an operand of an operation.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Use {
    /// True if kernels write it.
    pub is_written: bool,
    /// The element type, of a tensor.
    pub dtype: Option<DType>,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Elements from the first to the last, of one tensor of a list; so many that nothing holds them if they overflow.
    pub elements: usize,
}

impl Use {
    fn new(operand: Operand, dtype: DType, elements: Option<usize>) -> Self {
        let is_written = operand.access() == Access::Write;
        let elements = elements.unwrap_or(usize::MAX);
        Self { is_written, dtype: Some(dtype), element_bytes: dtype.size_bytes(), elements }
    }

    fn numbers(element_bytes: usize, elements: usize) -> Self {
        Self { is_written: false, dtype: None, element_bytes, elements }
    }

    /// Bytes from the first element to the last.
    pub fn bytes(self) -> u64 {
        (self.elements as u64).saturating_mul(self.element_bytes as u64)
    }
}

impl Operation {
    /// The problem of attention, where the operation has attention.
    pub const fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Attention(problem) | Self::Continue(problem) => Some(problem),
            Self::KvCache(problem) => Some(&problem.attention),
            Self::Append(_) | Self::Merge(_) => None,
        }
    }

    /// Everything that is wrong with the operation.
    pub fn errors(&self) -> Vec<ProblemError> {
        match self {
            Self::Attention(problem) => problem.errors(),
            Self::Append(problem) => problem.errors(),
            Self::KvCache(problem) => problem.errors(),
            Self::Merge(problem) => problem.errors(),
            Self::Continue(problem) => StateMerge::of(problem).err().unwrap_or_default(),
        }
    }

    /// Everything that is wrong with the operation, or else with these tensors for it.
    pub fn validate(&self, inputs: &InputViews<'_>, outputs: &mut OutputViews<'_>) -> Result<(), Invalid> {
        match self {
            Self::Attention(problem) | Self::Continue(problem) => {
                inputs.validate(problem)?;
                outputs.validate(problem)
            }
            Self::Append(problem) => problem.validate_views(inputs, outputs),
            Self::KvCache(problem) => problem.validate_views(&kv_cache_inputs(inputs), &kv_cache_outputs(outputs)),
            Self::Merge(problem) => problem.validate_views(inputs, outputs),
        }
    }

    /// The memory of each operand, in the order of the table, for strides of the call and tokens of a launch. Of an
    /// operation that validates.
    pub fn uses(&self, strides: CallStrides, tokens: Option<usize>) -> [Option<Use>; Operand::COUNT] {
        let with_tokens = match self {
            Self::Append(problem) => Self::Append(problem.with_tokens(tokens.unwrap_or(problem.tokens))),
            Self::Merge(problem) => Self::Merge(problem.with_tokens(tokens.unwrap_or(problem.tokens))),
            _ => return std::array::from_fn(|index| self.use_of(Operand::ALL[index], strides)),
        };
        std::array::from_fn(|index| with_tokens.use_of(Operand::ALL[index], strides))
    }

    fn use_of(&self, operand: Operand, strides: CallStrides) -> Option<Use> {
        match self {
            Self::Attention(problem) | Self::Continue(problem) => of_attention(problem, operand, strides),
            Self::Append(problem) => of_append(problem, operand, strides),
            Self::KvCache(problem) => of_kv_cache(problem, operand, strides),
            Self::Merge(problem) => of_merge(problem, operand),
        }
    }
}

/// Questions of a launch.
#[cfg(feature = "cuda")]
impl Operation {
    /// Tokens of an operation whose launches may have fewer.
    pub(crate) const fn tokens(&self) -> Option<usize> {
        match self {
            Self::Append(problem) => Some(problem.tokens),
            Self::Merge(problem) => Some(problem.tokens),
            Self::Attention(_) | Self::KvCache(_) | Self::Continue(_) => None,
        }
    }

    /// True if an output may have the address of an input.
    pub(crate) fn is_in_place(&self, written: Operand, read: Operand) -> bool {
        match self {
            Self::Append(AppendProblem { strides, .. }) => {
                (written, read) == (Operand::QueryOutput, Operand::Query) && strides.query == strides.query_output
            }
            _ => false,
        }
    }

    /// The first stride of scales that an append cannot write by.
    pub(crate) fn scale_stride_error(&self, strides: CallStrides) -> Option<flashcore_problem::TensorError> {
        let append = match self {
            Self::Append(problem) => *problem,
            Self::KvCache(problem) if problem.compute_scales => problem.append(0),
            _ => return None,
        };
        let of = |operand: Operand| append.scale_stride_error(operand, strides.scales[operand.scale_index()?]);
        of(Operand::KScale).or_else(|| of(Operand::VScale))
    }
}

fn of_attention(problem: &Problem, operand: Operand, strides: CallStrides) -> Option<Use> {
    operand.is_present(problem).then(|| Use {
        is_written: operand.access() == Access::Write,
        dtype: operand.dtype(problem),
        element_bytes: operand.element_bytes(problem),
        elements: operand.extent(problem, strides).unwrap_or(usize::MAX),
    })
}

/// A table of the rotary embedding.
fn table(operand: Operand, append: &AppendProblem) -> Option<Use> {
    append.rotary.map(|rotary| Use::new(operand, append.table_dtype(), Rotary::table_extent(rotary)))
}

fn of_append(problem: &AppendProblem, operand: Operand, strides: CallStrides) -> Option<Use> {
    let tensor = |dtype, shape: Shape, strides: Strides| Some(Use::new(operand, dtype, strides.extent(shape)));
    let has_query = problem.query_heads > 0;
    match operand {
        Operand::NewKey => tensor(problem.dtype, problem.key_shape(), problem.strides.key),
        Operand::NewValue => tensor(problem.dtype, problem.value_shape(), problem.strides.value),
        Operand::KeyCache => tensor(problem.cache_dtype(), problem.key_cache_shape(), problem.strides.key_cache),
        Operand::ValueCache => tensor(problem.cache_dtype(), problem.value_cache_shape(), problem.strides.value_cache),
        Operand::Query if has_query => tensor(problem.dtype, problem.query_shape(), problem.strides.query),
        Operand::QueryOutput if has_query => tensor(problem.dtype, problem.query_shape(), problem.strides.query_output),
        Operand::SlotMapping => Some(Use::numbers(size_of::<i64>(), problem.tokens)),
        Operand::Positions => problem.rotary.map(|rotary| Use::numbers(rotary.positions.size_bytes(), problem.tokens)),
        Operand::Cos | Operand::Sin => table(operand, problem),
        Operand::QueryNorm if !has_query => None,
        Operand::QueryNorm | Operand::KeyNorm => {
            problem.qk_norm.map(|_| Use::new(operand, problem.dtype, Some(problem.head_dim)))
        }
        Operand::KScale | Operand::VScale => {
            let source = problem.scale_source(operand);
            let extent = strides.scales[operand.scale_index()?].extent_of_cache(problem.key_cache_shape());
            let scale = Use { is_written: source == ScaleSource::Computed, ..Use::new(operand, DType::F32, extent) };
            (source != ScaleSource::None).then_some(Use { dtype: None, ..scale })
        }
        _ => None,
    }
}

fn of_kv_cache(problem: &KvCacheProblem, operand: Operand, strides: CallStrides) -> Option<Use> {
    let attention = &problem.attention;
    let cache = |of: Operand| of_attention(attention, of, strides).map(|cache| Use { is_written: true, ..cache });
    let tensor = |shape: Shape, strides: Strides| Some(Use::new(operand, attention.dtype, strides.extent(shape)));
    match operand {
        Operand::Key | Operand::Value => None,
        Operand::KeyCache => cache(Operand::Key),
        Operand::ValueCache => cache(Operand::Value),
        Operand::KScale | Operand::VScale if problem.compute_scales => cache(operand),
        Operand::NewKey => tensor(problem.new_key_shape(), problem.new_key),
        Operand::NewValue => tensor(problem.new_value_shape(), problem.new_value),
        Operand::CuSeqlensKNew => problem.total_new.map(|_| Use::numbers(4, attention.batch + 1)),
        Operand::RotarySeqlens => problem.rotary_seqlens.then(|| Use::numbers(4, attention.batch)),
        Operand::Cos | Operand::Sin => table(operand, &problem.append(0)),
        Operand::QueryNorm | Operand::KeyNorm => {
            problem.qk_norm.map(|_| Use::new(operand, attention.dtype, Some(attention.head_dim)))
        }
        other => of_attention(attention, other, strides),
    }
}

fn of_merge(problem: &MergeProblem, operand: Operand) -> Option<Use> {
    let tensor = |dtype, shape: Shape, strides: Strides| Some(Use::new(operand, dtype, strides.extent(shape)));
    let strides = problem.strides;
    match operand {
        Operand::PartOutputs => tensor(problem.part_dtype, problem.shape(), strides.part),
        Operand::PartLses => tensor(DType::F32, problem.lse_shape(), strides.part_lse),
        Operand::Output => tensor(problem.dtype, problem.shape(), strides.output),
        Operand::Lse if problem.lse => tensor(DType::F32, problem.lse_shape(), strides.lse),
        _ => None,
    }
}

macro_rules! operations {
    ($($Operation:ident($Problem:ident);)*) => {
        $(impl From<&$Problem> for Operation {
            fn from(problem: &$Problem) -> Self {
                Self::$Operation(problem.clone())
            }
        })*
    };
}

operations! {
    Attention(Problem);
    KvCache(KvCacheProblem);
}

impl From<&AppendProblem> for Operation {
    fn from(problem: &AppendProblem) -> Self {
        Self::Append(*problem)
    }
}

impl From<&MergeProblem> for Operation {
    fn from(problem: &MergeProblem) -> Self {
        Self::Merge(*problem)
    }
}

impl From<&Self> for Operation {
    fn from(operation: &Self) -> Self {
        operation.clone()
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attention(problem) => problem.fmt(formatter),
            Self::KvCache(problem) => problem.fmt(formatter),
            Self::Continue(problem) => write!(formatter, "continuation of {problem}"),
            Self::Append(problem) => write!(
                formatter,
                "append of {} tokens with {} heads of {}x{} {}",
                problem.tokens, problem.key_heads, problem.head_dim, problem.value_dim, problem.dtype
            ),
            Self::Merge(problem) => write!(
                formatter,
                "merge of {} parts of {} tokens with {} heads of {} {}",
                problem.num_parts, problem.tokens, problem.heads, problem.value_dim, problem.dtype
            ),
        }
    }
}
