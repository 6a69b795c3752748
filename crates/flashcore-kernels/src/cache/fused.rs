//! Append inside of the attention launch: its specialization, its parameters, and the cases it does not take.
//!
//! The code is in `attention::sm80::append`.

use core::fmt::Write;

use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Argument, Builder, Reg};
use flashcore_problem::{DType, KvCacheProblem, Operand, RotaryStyle, Strides};

use super::rotary_rows::Tables;
use super::spec::{AppendSpec, RotarySpec, RowShape};
use crate::bindings::Word;
use crate::config::{AmpereConfig, Config};
use crate::launch_plan::{KernelLaunch, LaunchPlan};
use crate::target::Target;
use crate::unsupported::Reason;

/// The most new keys of a sequence: each CTA that attends them keeps them in shared memory.
pub const MAX_NEW_KEYS: u32 = 16;

/// The most of [`AmpereConfig::operand_registers`]: with more, ptxas has none left for addresses of new rows, and spills.
const MOST_OPERAND_REGISTERS: u32 = 160;

/// Everything of an append that is compiled into the attention kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FusedAppend {
    /// True if new keys are packed (`cu_seqlens_k_new`).
    pub packed_new: bool,
    /// The rotary embedding of query and new keys.
    pub rotary: Option<RotarySpec>,
    /// True if positions start where `rotary_seqlens` says.
    pub rotary_seqlens: bool,
    /// True if query rows have consecutive positions.
    pub consecutive: bool,
    /// Elements of a vector of query and new key.
    pub key_vec: u32,
    /// Elements of a vector of new value.
    pub value_vec: u32,
}

impl FusedAppend {
    /// The specialization for a valid problem.
    pub fn of(problem: &KvCacheProblem) -> Self {
        let AppendSpec { rotary, key_vec, value_vec, .. } = AppendSpec::of_sequences(problem);
        Self {
            packed_new: problem.total_new.is_some(),
            rotary,
            rotary_seqlens: problem.rotary_seqlens,
            consecutive: rotary.is_some() && problem.has_consecutive_positions(),
            key_vec,
            value_vec,
        }
    }

    /// The part that the number of keys depends on, for the kernel that combines chunks.
    pub(crate) const fn lengths(self) -> Self {
        let Self { packed_new, .. } = self;
        Self { packed_new, rotary: None, rotary_seqlens: false, consecutive: false, key_vec: 0, value_vec: 0 }
    }

    /// The end of a kernel's name.
    pub(crate) fn suffix(self) -> String {
        let Self { packed_new, rotary, rotary_seqlens, consecutive, key_vec, value_vec } = self;
        let mut name = format!("_v{key_vec}x{value_vec}");
        if let Some(RotarySpec { style, dim, table_dtype, table_vec, .. }) = rotary {
            let style = match style {
                RotaryStyle::Neox => "neox",
                RotaryStyle::GptJ => "gptj",
            };
            let _ = write!(name, "_{style}{dim}_{table_dtype}v{table_vec}");
        }
        for (switch, is_on) in [("_packednew", packed_new), ("_starts", rotary_seqlens), ("_consecutive", consecutive)]
        {
            name.push_str(if is_on { switch } else { "" });
        }
        name
    }

    /// The rows of query and new key.
    pub(crate) fn key_rows(self, dtype: DType, head_dim: u32) -> RowShape {
        RowShape::new(dtype, head_dim, self.key_vec, self.rotary)
    }

    /// The rows of new value.
    pub(crate) fn value_rows(self, dtype: DType, value_dim: u32) -> RowShape {
        RowShape::new(dtype, value_dim, self.value_vec, None)
    }
}

operation_parameters! {
    launch {
        new_key,
        new_value,
        cu_seqlens_k_new,
        rotary_seqlens,
        cos,
        sin,
    }
    plan {
        new_key_batch_stride: U64,
        new_key_row_stride: U64,
        new_key_head_stride: U64,
        new_value_batch_stride: U64,
        new_value_row_stride: U64,
        new_value_head_stride: U64,
        rotary_stride: U64,
        new_rows: U32,
        new_length: U32,
        // Rows of a sequence, at most, after the append.
        cache_length: U32,
        last_position: U32,
    }
}

impl Parameters {
    /// The tables of the rotary embedding.
    pub(crate) const fn tables(&self) -> Tables {
        Tables { cos: self.cos, sin: self.sin, stride: self.rotary_stride }
    }
}

/// Adds the arguments of an append to a launch of attention.
pub(crate) fn extend(launch: &mut KernelLaunch, problem: &KvCacheProblem) {
    let words = Words {
        new_key: Word::address(Operand::NewKey),
        new_value: Word::address(Operand::NewValue),
        cu_seqlens_k_new: Word::address(Operand::CuSeqlensKNew),
        rotary_seqlens: Word::address(Operand::RotarySeqlens),
        cos: Word::address(Operand::Cos),
        sin: Word::address(Operand::Sin),
    };
    launch.extend_with_words(words.list());
    let element = problem.attention.dtype.size_bytes() as u64;
    let bytes = |strides: Strides| {
        [strides.batch, strides.row, strides.head].map(|stride| Argument::U64(stride as u64 * element))
    };
    let table_element = problem.append(0).table_dtype().size_bytes();
    let table_stride = problem.rotary.map_or(0, |rotary| rotary.table_stride * table_element);
    let shape = problem.new_key_shape();
    let last_position = problem.rotary.map_or(0, |rotary| rotary.max_position - 1);
    let sizes = [shape.batch * shape.rows, problem.new_length, problem.attention.key_length, last_position];
    launch.extend([problem.new_key, problem.new_value].into_iter().flat_map(bytes));
    launch.extend([Argument::U64(table_stride as u64)]);
    launch.extend(sizes.map(|size| Argument::U32(size as u32)));
}

impl LaunchPlan {
    /// The kernels of `config` for attention that appends the new keys itself, or all reasons against it.
    pub fn with_append(
        problem: &KvCacheProblem,
        config: Config,
        target: impl Into<Target>,
    ) -> Result<Self, Vec<Reason>> {
        let errors = problem.errors();
        if !errors.is_empty() {
            return Err(errors.into_iter().map(Reason::from).collect());
        }
        let reasons = reasons(problem, config);
        if !reasons.is_empty() {
            return Err(reasons);
        }
        let mut plan = Self::of_attention(&problem.attention, config, target.into(), Some(problem))?.on_caches();
        plan.alignments.extend(AppendSpec::of_sequences(problem).alignments());
        Ok(plan)
    }
}

/// Every reason why the attention kernel of a config cannot append the new keys of a problem itself.
pub(crate) fn reasons(problem: &KvCacheProblem, config: Config) -> Vec<Reason> {
    let attention = &problem.attention;
    let mut reasons = Vec::new();
    let mut refuse = |feature, is_there: bool| {
        if is_there {
            reasons.push(Reason::Append { feature });
        }
    };
    let ampere = AmpereConfig::try_from(config);
    match ampere {
        Ok(AmpereConfig { producers, .. }) => refuse("producer warps", producers > 0),
        Err(_) => refuse("a kernel other than ampere", true),
    }
    refuse("f32", attention.dtype == DType::F32);
    refuse("an FP8 cache", attention.dtypes().key_value.is_float8());
    refuse("qk_norm", problem.qk_norm.is_some());
    refuse("mask_mod", attention.mask_mod.is_some());
    refuse("a cache without pages", attention.paged.is_some_and(|paged| paged.num_pages == 0));
    refuse("a cache without batches", Operand::KvBatchIdx.is_present(attention) && attention.cache_batches() == 0);
    let FusedAppend { key_vec, value_vec, .. } = FusedAppend::of(problem);
    refuse(
        "vectors of 2 bytes, by its strides or half of the rotary dim,",
        key_vec.min(value_vec) as usize * attention.dtype.size_bytes() < size_of::<u32>(),
    );
    if let Ok(ampere) = ampere {
        let (registers, limit) = (ampere.operand_registers(config.specialization(attention)), MOST_OPERAND_REGISTERS);
        if registers > limit {
            reasons.push(Reason::Registers { config, registers, limit });
        }
    }
    if problem.new_length > MAX_NEW_KEYS as usize {
        reasons.push(Reason::NewKeys { new_length: problem.new_length, most: MAX_NEW_KEYS });
    }
    reasons
}
