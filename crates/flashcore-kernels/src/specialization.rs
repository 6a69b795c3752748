//! Kernel specialization: what of a problem is compiled into its kernels.

use flashcore_problem::expression::Expression;
use flashcore_problem::{DType, LseForm, MaskMod, Operand, OperandSet, Problem, ScoreMod};

use crate::cache::FusedAppend;

/// The part of a problem that is compiled into its kernels; everything else is a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "each is true if the code of one independent feature is there")]
pub struct Specialization {
    /// The element type of the query, and of the other tensors unless they have one of their own.
    pub dtype: DType,
    /// The element type of key and value, where it is another.
    pub kv_dtype: Option<DType>,
    /// The element type of the output, where it is another.
    pub out_dtype: Option<DType>,
    /// Columns of query and key.
    pub head_dim: u32,
    /// Columns of value and output.
    pub value_dim: u32,
    /// True if a window ends on the left: rows attend no key far before their position.
    pub left: bool,
    /// True if a window ends on the right: rows attend no key far after their position, as under a causal mask.
    pub right: bool,
    /// True if scores are capped.
    pub softcap: bool,
    /// The optional operands of the problem, without the tables that expressions read.
    pub operands: OperandSet,
    /// The form of the LSE; the default without one.
    pub lse_form: LseForm,
    /// The `score_mod` expression: the structure alone, constants are arguments.
    pub score_mod: Option<&'static Expression>,
    /// The `mask_mod` expression, for keys that the mask lets a row attend.
    pub mask_mod: Option<&'static Expression>,
    /// True if the scale is not positive: scores are then scaled before `row_max` is taken, which need not be that of the
    /// products.
    pub nonpositive_scale: bool,
    /// Vector width: bytes that every row of every tensor begins at a multiple of, 16 at most.
    pub vec_bytes: u32,
    /// True if keys and values lie in pages of a power of two of rows.
    pub pow2_pages: bool,
    /// Rows of a page that one TMA copy moves: a power of two that divides pages and KV blocks; 0 without pages, and in
    /// kernels that have no TMA.
    pub page_box: u32,
    /// The append of new keys inside of the launch.
    pub append: Option<FusedAppend>,
}

impl Specialization {
    /// Plain attention.
    pub const fn new(dtype: DType, head_dim: u32) -> Self {
        Self {
            dtype,
            kv_dtype: None,
            out_dtype: None,
            head_dim,
            value_dim: head_dim,
            left: false,
            right: false,
            softcap: false,
            operands: OperandSet::NONE,
            lse_form: LseForm::DEFAULT,
            score_mod: None,
            mask_mod: None,
            nonpositive_scale: false,
            vec_bytes: MAX_VEC_BYTES,
            pow2_pages: false,
            page_box: 0,
            append: None,
        }
    }

    /// The specialization for a problem.
    pub fn of(problem: &Problem) -> Self {
        let types = problem.dtypes();
        let other = |dtype: DType| (dtype != types.query).then_some(dtype);
        let (left, right) = problem.mask.limits();
        let is_table = |operand| matches!(operand, Operand::AuxF32 | Operand::AuxI32);
        let operands = Operand::optional().filter(|&operand| operand.is_present(problem) && !is_table(operand));
        Self {
            dtype: types.query,
            kv_dtype: other(types.key_value),
            out_dtype: other(types.output),
            head_dim: problem.head_dim as u32,
            value_dim: problem.value_dim as u32,
            left: left.is_some(),
            right: right.is_some(),
            softcap: problem.softcap.is_some(),
            operands: operands.collect(),
            lse_form: LseForm::of(problem),
            score_mod: problem.score_mod.map(ScoreMod::expression),
            mask_mod: problem.mask_mod.map(MaskMod::expression),
            nonpositive_scale: problem.scale <= 0.0,
            vec_bytes: vec_bytes(problem),
            pow2_pages: problem.paged.is_some_and(|paged| paged.page_size.is_power_of_two()),
            page_box: 0,
            append: None,
        }
    }

    /// The features that are on, by name: the one list that kernel names, problem classes and messages follow.
    pub fn features(self) -> impl Iterator<Item = &'static str> {
        let Self {
            dtype: _,
            kv_dtype: _,
            out_dtype: _,
            head_dim: _,
            value_dim: _,
            left,
            right,
            softcap,
            operands,
            lse_form,
            score_mod,
            mask_mod,
            nonpositive_scale,
            vec_bytes: _,
            pow2_pages,
            page_box: _,
            append,
        } = self;
        let features = [
            (left, "left"),
            (right, "right"),
            (softcap, "softcap"),
            (score_mod.is_some(), "score_mod"),
            (mask_mod.is_some(), "mask_mod"),
            (nonpositive_scale, "nonpositive_scale"),
            (pow2_pages, "pow2_pages"),
            (append.is_some(), "append"),
        ];
        let features = features.into_iter().filter(|(is_on, _)| *is_on).map(|(_, feature)| feature);
        features.chain(operands.iter().map(Operand::feature)).chain(lse_form.features())
    }

    /// The element type of key and value.
    pub const fn key_value_dtype(self) -> DType {
        match self.kv_dtype {
            Some(dtype) => dtype,
            None => self.dtype,
        }
    }

    /// The element type of the output.
    pub const fn output_dtype(self) -> DType {
        match self.out_dtype {
            Some(dtype) => dtype,
            None => self.dtype,
        }
    }

    /// True if query, key and value are of 8 bits.
    pub const fn has_fp8_query(self) -> bool {
        self.dtype.is_float8()
    }

    /// The scales of 8-bit tensors that the problem has, in the order of the table.
    pub fn scales(self) -> impl Iterator<Item = Operand> {
        Operand::SCALES.into_iter().filter(move |&scale| self.has(scale))
    }

    /// True if the problem has an optional operand.
    pub const fn has(self, operand: Operand) -> bool {
        self.operands.has(operand)
    }

    /// The specialization with one more operand.
    #[must_use]
    pub const fn with(self, operand: Operand) -> Self {
        Self { operands: self.operands.with(operand), ..self }
    }

    /// The specialization of kernels that do not look at the limits of rows.
    pub(crate) const fn without_limits(self) -> Self {
        let operands = self.operands.without(Operand::SequsedK).without(Operand::LeftpadK).without(Operand::CuSeqlensK);
        Self { left: false, right: false, operands, ..self }
    }

    /// The features as the end of a kernel's name.
    pub(crate) fn suffix(self) -> String {
        self.features().flat_map(|feature| ["_", feature]).collect()
    }

    /// The specialization of the combine kernel: limits and scores matter no more.
    pub(crate) fn for_combine(self) -> Self {
        let operands = self
            .operands
            .iter()
            .filter(|operand| {
                matches!(operand, Operand::Sinks | Operand::Lse | Operand::CuSeqlensQ | Operand::SequsedQ)
            })
            .collect();
        Self { operands, lse_form: self.lse_form, ..Self::new(self.output_dtype(), self.value_dim) }
    }

    /// The specialization of the combine kernel of chunks, which follow from lengths and limits.
    pub(crate) fn for_chunk_combine(self) -> Self {
        let combined = |operand: &Operand| {
            matches!(
                operand,
                Operand::Sinks
                    | Operand::Lse
                    | Operand::CuSeqlensQ
                    | Operand::SequsedQ
                    | Operand::CuSeqlensK
                    | Operand::SequsedK
                    | Operand::LeftpadK
            )
        };
        let operands = self.operands.iter().filter(combined).collect();
        let (left, right, lse_form) = (self.left, self.right, self.lse_form);
        let append = self.append.map(FusedAppend::lengths);
        Self { left, right, operands, lse_form, append, ..Self::new(self.output_dtype(), self.value_dim) }
    }

    /// True if a sequence may have fewer query rows than the problem.
    pub const fn has_query_lengths(self) -> bool {
        self.has(Operand::CuSeqlensQ) || self.has(Operand::SequsedQ)
    }

    /// True if a sequence may have fewer keys than the problem.
    pub const fn has_key_lengths(self) -> bool {
        self.has(Operand::CuSeqlensK) || self.has(Operand::SequsedK) || self.has(Operand::LeftpadK)
    }

    /// True if rows or keys of a sequence are not simply those of its batch, or are fewer for a reason other than
    /// `seqused_k`.
    pub fn is_ragged(self) -> bool {
        self.operands.iter().any(is_ragged)
    }

    /// True if scores are more than products times a positive number.
    pub fn has_terms(self) -> bool {
        self.has_more_than_expressions() || self.score_mod.is_some() && !self.only_adds()
    }

    /// True if there is an expression.
    pub const fn has_expressions(self) -> bool {
        self.score_mod.is_some() || self.mask_mod.is_some()
    }

    fn has_more_than_expressions(self) -> bool {
        // Scales of a query and of keys of 8 bits are multiplied into products, or into the scale.
        let is_term = |operand: Operand| operand.is_score_term() && !operand.is_scale();
        self.softcap || self.nonpositive_scale || self.operands.iter().any(is_term)
    }

    /// True if all that is done to products, besides multiplying them by a positive number, is that an expression adds a term.
    pub fn only_adds(self) -> bool {
        let adds = self.score_mod.is_some_and(|expression| expression.added_term().is_some());
        adds && !self.has_more_than_expressions() && !matches!(self.dtype, DType::F32)
    }

    /// Head dimensions that tables go through; the kernels have every multiple of 8 up to 256.
    pub const HEAD_DIMS: [u32; 6] = [32, 64, 96, 128, 192, 256];
    /// The element types that every kernel has.
    pub const DTYPES: [DType; 2] = [DType::F16, DType::Bf16];
}

/// True for an operand that says where the rows or keys of a sequence lie.
pub(crate) const fn is_ragged(operand: Operand) -> bool {
    matches!(
        operand,
        Operand::CuSeqlensQ
            | Operand::CuSeqlensK
            | Operand::SequsedQ
            | Operand::LeftpadK
            | Operand::KvBatchIdx
            | Operand::PageTable
    )
}

/// Bytes of the widest access.
pub(crate) const MAX_VEC_BYTES: u32 = 16;

/// Bytes that every row of every tensor begins at a multiple of, if the tensors do; 16 at most.
fn vec_bytes(problem: &Problem) -> u32 {
    let strides = problem.strides();
    let types = problem.dtypes();
    let shapes = [
        (strides.query, problem.query_shape(), types.query),
        (strides.key, problem.key_shape(), types.key_value),
        (strides.value, problem.value_shape(), types.key_value),
        (strides.output, problem.output_shape(), types.output),
    ];
    let bytes = shapes.into_iter().flat_map(|(strides, shape, dtype)| {
        // The stride of a dimension of size 1 is never used.
        let sizes = [(strides.batch, shape.batch), (strides.head, shape.heads), (strides.row, shape.rows)];
        let used = sizes.into_iter().filter(|&(_, size)| size > 1);
        used.map(move |(stride, _)| stride.wrapping_mul(dtype.size_bytes()))
    });
    // The lowest bit that is set in any of them.
    let lowest = bytes.fold(MAX_VEC_BYTES as usize, |all, bytes| all | bytes);
    1 << lowest.trailing_zeros()
}
