//! Merging partial results of attention over disjoint sets of keys, as split-KV, cascades, ring attention and chunked
//! prefill have them: `LSE = log(sum(exp(lse_i)))` and `O = sum(exp(lse_i - LSE) * O_i)`, in the order of the parts.
//!
//! A part whose LSE is minus infinity is empty, and so is one whose LSE is plus infinity: some kernels write that for a
//! row without keys. The output of an empty part is never looked at, NaN or not. A row of which all parts are empty gives
//! output 0 and an LSE of minus infinity. An LSE that is NaN makes output and LSE of its row NaN.

mod oracle;
mod state;

pub use oracle::{MergeExpected, merge_oracle};
pub use state::StateMerge;

use crate::{
    DType, ElementType, InputViews, Invalid, LseBase, Operand, OutputViews, ProblemError, Row, Shape, Strides,
};

/// The most parts.
pub const MOST_PARTS: usize = 256;
/// The most columns of a head.
pub const MOST_MERGE_COLUMNS: usize = 512;

/// Everything about a merge but the numbers in its tensors.
///
/// ```
/// use flashcore_problem::{DType, MergeProblem};
///
/// // Two parts of 1024 tokens with 32 heads of 128 columns.
/// let problem = MergeProblem::new(2, 1024, 32, 128, DType::Bf16);
/// assert!(problem.validate().is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct MergeProblem {
    /// Number of partial results, from 2 to 256.
    pub num_parts: usize,
    /// Tokens: query rows. A launch may have fewer.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Columns of the output, up to 512.
    pub value_dim: usize,
    /// Element type of the outputs of the parts: `f16`, `bf16` or `f32`.
    pub part_dtype: DType,
    /// Element type of the merged output.
    pub dtype: DType,
    /// Base of the logarithms, of the parts and of the result.
    pub base: LseBase,
    /// True if the merged LSE is written.
    pub lse: bool,
    /// Distances between elements.
    pub strides: MergeStrides,
}

/// Strides of the tensors of a merge, in elements: `row` is from one token to the next, `batch` is not used. All parts
/// have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MergeStrides {
    /// Of the output of a part.
    pub part: Strides,
    /// Of the LSE of a part.
    pub part_lse: Strides,
    /// Of the merged output.
    pub output: Strides,
    /// Of the merged LSE.
    pub lse: Strides,
}

impl MergeProblem {
    /// Contiguous outputs `[token, head, column]`, LSE `[head, token]` in base e, the merged LSE included.
    pub fn new(num_parts: usize, tokens: usize, heads: usize, value_dim: usize, dtype: DType) -> Self {
        let none = Strides { batch: 0, head: 0, row: 0 };
        let strides = MergeStrides { part: none, part_lse: none, output: none, lse: none };
        let problem = Self {
            num_parts,
            tokens,
            heads,
            value_dim,
            part_dtype: dtype,
            dtype,
            base: LseBase::Natural,
            lse: true,
            strides,
        };
        let (output, lse) = (Strides::bshd(problem.shape()), Strides::bhsd(problem.lse_shape()));
        Self { strides: MergeStrides { part: output, part_lse: lse, output, lse }, ..problem }
    }

    /// The problem with an LSE `[token, head]`, of the parts and of the result.
    #[must_use]
    pub fn with_token_major_lse(mut self) -> Self {
        self.strides.lse = Strides::bshd(self.lse_shape());
        self.strides.part_lse = self.strides.lse;
        self
    }

    /// The problem with parts of another element type.
    #[must_use]
    pub const fn with_part_dtype(mut self, dtype: DType) -> Self {
        self.part_dtype = dtype;
        self
    }

    /// The problem with another base of the logarithms.
    #[must_use]
    pub const fn with_base(mut self, base: LseBase) -> Self {
        self.base = base;
        self
    }

    /// The problem with or without a merged LSE.
    #[must_use]
    pub const fn with_lse(mut self, lse: bool) -> Self {
        self.lse = lse;
        self
    }

    /// The problem with other strides.
    #[must_use]
    pub const fn with_strides(mut self, strides: MergeStrides) -> Self {
        self.strides = strides;
        self
    }

    /// The problem with fewer or more tokens.
    #[must_use]
    pub const fn with_tokens(mut self, tokens: usize) -> Self {
        self.tokens = tokens;
        self
    }

    /// Shape of the output, and of that of a part: one batch, tokens as rows.
    pub const fn shape(&self) -> Shape {
        Shape { batch: 1, heads: self.heads, rows: self.tokens, columns: self.value_dim }
    }

    /// Shape of an LSE: one column.
    pub const fn lse_shape(&self) -> Shape {
        Shape { columns: 1, ..self.shape() }
    }

    /// Nothing, or every mistake in the problem.
    pub fn validate(&self) -> Result<(), Invalid> {
        let errors = self.errors();
        if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
    }

    /// Every mistake in the problem.
    pub fn errors(&self) -> Vec<ProblemError> {
        let mut errors = Vec::new();
        let mut refuse = |argument, value: &dyn ToString, allowed: String| {
            errors.push(ProblemError::OutOfRange { argument, value: value.to_string(), allowed });
        };
        for (argument, value, least, most) in [
            ("num_parts", self.num_parts, 2, MOST_PARTS),
            ("heads", self.heads, 1, i32::MAX as usize),
            ("value_dim", self.value_dim, 1, MOST_MERGE_COLUMNS),
        ] {
            if !(least..=most).contains(&value) {
                refuse(argument, &value, format!("from {least} to {most}"));
            }
        }
        let rows = self.tokens.saturating_mul(self.heads);
        if rows > i32::MAX as usize {
            refuse("tokens * heads", &rows, format!("at most {}; merge in several launches", i32::MAX));
        }
        for (argument, dtype) in [("part_dtype", self.part_dtype), ("dtype", self.dtype)] {
            if dtype == DType::F64 || dtype.is_float8() {
                refuse(argument, &dtype, "f16, bf16 or f32".to_owned());
            }
        }
        let MergeStrides { part, part_lse, output, lse } = self.strides;
        for (tensor, shape, strides, dtype) in [
            ("the output of a part", self.shape(), part, self.part_dtype),
            ("the lse of a part", self.lse_shape(), part_lse, DType::F32),
            ("output", self.shape(), output, self.dtype),
            ("lse", self.lse_shape(), lse, DType::F32),
        ] {
            crate::problem::stride_errors(tensor, shape, strides, dtype, &mut errors);
        }
        let written = [
            ("the (batch, head, token) strides of output", self.shape(), output),
            ("the (batch, head, token) strides of lse", self.lse_shape(), lse),
        ];
        for (argument, shape, strides) in written {
            if !strides.is_disjoint(shape) && (self.lse || shape.columns == self.value_dim) {
                let value = format!("({}, {}, {})", strides.batch, strides.head, strides.row);
                let allowed = "so far apart that no rows overlap".to_owned();
                errors.push(ProblemError::OutOfRange { argument, value, allowed });
            }
        }
        errors
    }

    /// Nothing, or every mistake in the problem, else in its tensors.
    pub fn validate_views(&self, inputs: &InputViews<'_>, outputs: &OutputViews<'_>) -> Result<(), Invalid> {
        self.validate()?;
        let mut errors = Vec::new();
        inputs.check_rows(Self::OPERANDS, self, &mut errors);
        outputs.check_rows(Self::OPERANDS, self, &mut errors);
        Invalid::unless_empty(errors)
    }

    /// The operands of a merge.
    pub const OPERANDS: &'static [Row<Self>] = &[
        Row::tensor(
            Operand::PartOutputs,
            |problem: &Self| problem.part_dtype.into(),
            |problem| (problem.shape(), problem.strides.part),
        )
        .list(|problem| problem.num_parts),
        Row::tensor(
            Operand::PartLses,
            |_| ElementType::F32,
            |problem: &Self| (problem.lse_shape(), problem.strides.part_lse),
        )
        .list(|problem| problem.num_parts),
        Row::tensor(
            Operand::Output,
            |problem: &Self| problem.dtype.into(),
            |problem| (problem.shape(), problem.strides.output),
        ),
        Row::at_least(
            Operand::Lse,
            |_| ElementType::F32,
            |problem: &Self| problem.strides.lse.extent(problem.lse_shape()),
        )
        .when(|problem| problem.lse),
    ];
}
