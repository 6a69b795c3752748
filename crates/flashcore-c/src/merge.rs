//! The problem of a merge of partial results of attention.

use api::{MergeProblem as ApiProblem, MergeStrides};

use crate::problem::{
    FLASHCORE_OPERATION_MERGE, ProblemBase, ProblemStruct, Strides, dtype, fill, lse_base, size, strides, switch,
};
use crate::status::{Failure, Status};

/// A merge of partial results of attention over disjoint keys: everything about it except the numbers in its tensors.
/// Begin with flashcore_merge_problem_init() and change fields.
///
/// A part whose log-sum-exp is infinite, of either sign, is empty, and its output is not looked at. A row of which all
/// parts are empty gives output 0 and a log-sum-exp of minus infinity.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MergeProblem {
    /// FLASHCORE_OPERATION_MERGE.
    pub base: ProblemBase,
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
    /// Strides of the output of a part; batch is not used.
    pub part_strides: Strides,
    /// Strides of the log-sum-exp of a part; batch is not used.
    pub part_lse_strides: Strides,
    /// Strides of the merged output; batch is not used.
    pub output_strides: Strides,
    /// Strides of the merged log-sum-exp; batch is not used.
    pub lse_strides: Strides,
}

// SAFETY: `repr(C)` of a base and integers.
unsafe impl ProblemStruct for MergeProblem {
    const NAME: &'static str = "flashcore_merge_problem";
    const OPERATION: i32 = FLASHCORE_OPERATION_MERGE;
}

impl MergeProblem {
    pub(crate) fn to_api(self) -> Result<ApiProblem, Failure> {
        let (num_parts, tokens) = (size("num_parts", self.num_parts)?, size("tokens", self.tokens)?);
        let (heads, value_dim) = (size("heads", self.heads)?, size("value_dim", self.value_dim)?);
        let strides = MergeStrides {
            part: strides("part_strides", self.part_strides)?,
            part_lse: strides("part_lse_strides", self.part_lse_strides)?,
            output: strides("output_strides", self.output_strides)?,
            lse: strides("lse_strides", self.lse_strides)?,
        };
        Ok(ApiProblem::new(num_parts, tokens, heads, value_dim, dtype("dtype", self.dtype)?)
            .with_part_dtype(dtype("part_dtype", self.part_dtype)?)
            .with_base(lse_base(self.lse_base)?)
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
    let make = || {
        self::dtype("dtype", dtype)?;
        let row = heads.saturating_mul(value_dim);
        let output = Strides { batch: row.saturating_mul(tokens), head: value_dim, row };
        let lse = Strides { batch: heads.saturating_mul(tokens), head: tokens, row: 1 };
        Ok(MergeProblem {
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
            ..ProblemStruct::zeroed()
        })
    };
    // SAFETY: the contract is the same.
    unsafe { fill(problem, make) }
}
