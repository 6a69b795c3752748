//! An attention problem: everything but the numbers in its tensors.

use crate::expression::{Expression, MOST_STEPS};
use crate::{
    DType, Invalid, Layout, LseForm, Mask, MaskMod, Operand, PagedKv, Paging, ProblemError, ScoreMod, Shape, Strides,
    TensorStrides, TotalRows,
};
use std::ops::Range;

/// Declares the fields of [`Problem`] and their setters.
macro_rules! define_problem {
    ($($(#[$doc:meta])* $field:ident: $type:ty $(, $with:ident)?;)*) => {
        /// One attention problem: everything about it except the numbers in its tensors.
        ///
        /// Begin with [`Problem::new`]; then change fields, or call the method `with_...` of each:
        ///
        /// ```
        /// # use flashcore_problem as flashcore;
        /// use flashcore::{Alignment, DType, Mask, Problem};
        ///
        /// let mut problem = Problem::new(1, 32, 4096, 128, DType::Bf16);
        /// problem.key_heads = 8;
        /// problem.query_length = 1;
        /// problem.mask = Mask::Causal(Alignment::BottomRight);
        /// assert_eq!(problem.validate(), Ok(()));
        /// ```
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub struct Problem {
            $($(#[$doc])* pub $field: $type,)*
        }

        /// Setters of single fields, for problems that are written as one expression.
        impl Problem {
            $($(#[doc = concat!("Sets [`", stringify!($field), "`](Self::", stringify!($field), ").")]
            #[must_use]
            pub const fn $with(mut self, $field: $type) -> Self {
                self.$field = $field;
                self
            })?)*
        }
    };
}

define_problem! {
    /// Batches; 0 is legal and gives an empty output.
    batch: usize, with_batch;
    /// Heads of query and output.
    query_heads: usize, with_query_heads;
    /// Heads of key and value; `query_heads` must be a multiple of it (GQA).
    key_heads: usize, with_key_heads;
    /// Rows of query and output; 0 is legal and gives an empty output.
    query_length: usize, with_query_length;
    /// Rows of key and value; 0 is legal and leaves nothing to attend.
    key_length: usize, with_key_length;
    /// Columns of query and key.
    head_dim: usize;
    /// Columns of value and output.
    value_dim: usize, with_value_dim;
    /// Element type of the query, and of key, value and output unless they have their own.
    dtype: DType;
    /// Element type of key and value, where it is another than that of the query: `e4m3` or `e5m2`, a KV cache in FP8.
    kv_dtype: Option<DType>, with_kv_dtype;
    /// Element type of the output, where it is another than that of the query: `f16` or `bf16` for a query in `e4m3`,
    /// which needs it.
    out_dtype: Option<DType>, with_out_dtype;
    /// Factor of the product of query and key. Used in `f64` for `f64`, else in `f32`, which must have it. Slopes, sinks,
    /// bias and log-sum-exp are `f32` whatever the element type.
    scale: f64, with_scale;
    /// Keys that a row attends.
    mask: Mask, with_mask;
    /// `score = softcap * tanh(score / softcap)`; `None` leaves scores as they are.
    softcap: Option<f32>, with_softcap;
    /// Function of the score that is applied after everything else.
    score_mod: Option<ScoreMod>, with_score_mod;
    /// Further restriction of the keys that `mask` allows.
    mask_mod: Option<MaskMod>, with_mask_mod;
    /// Place of the elements of query, key, value and output in memory.
    layout: Layout, with_layout;
    /// Base of the log-sum-exp, and the sink in it or not; without `lse` it means nothing.
    lse_form: LseForm, with_lse_form;
    /// True to have the log-sum-exp (LSE) of each row.
    lse: bool, with_lse;
    /// Rows of query and output where those of all sequences are packed into one batch (varlen).
    total_q: TotalRows, with_total_q;
    /// Rows of key and value where those of all sequences are packed into one batch (varlen).
    total_k: TotalRows, with_total_k;
    /// True if each sequence has a number of query rows of its own, at most `query_length`.
    seqused_q: bool, with_seqused_q;
    /// True if each batch has a key length of its own, at most `key_length`.
    seqused_k: bool, with_seqused_k;
    /// True if each sequence begins with padding among its keys.
    leftpad_k: bool, with_leftpad_k;
    /// Batches of the KV cache, or rows of the page table, where sequences choose theirs.
    kv_batch: TotalRows, with_kv_batch;
    /// The paged KV cache, where key and value are pages.
    paged: Paging, with_paged;
    /// True if there is a slope per query head (`ALiBi`) that is subtracted for every position of
    /// distance.
    alibi: bool, with_alibi;
    /// True if there is a sink per query head: one more score in the denominator, with no value.
    sinks: bool, with_sinks;
    /// Entries of the table of floats that `score_mod` and `mask_mod` read; 0 is no table.
    aux_f32: usize, with_aux_f32;
    /// Entries of the table of integers that `score_mod` and `mask_mod` read; 0 is no table.
    aux_i32: usize, with_aux_i32;
    /// True if there is a bias that is added to the scores.
    bias: bool, with_bias;
    /// True if the codes of an 8-bit query have a scale.
    q_scale: bool, with_q_scale;
    /// True if the codes of an 8-bit key have a scale.
    k_scale: bool, with_k_scale;
    /// True if the codes of an 8-bit value have a scale.
    v_scale: bool, with_v_scale;
}

impl Problem {
    /// Self-attention: as many key heads as query heads, as many keys as queries, scale `1 / sqrt(head_dim)`,
    /// contiguous `[batch, head, row, column]`, nothing masked.
    ///
    /// The sizes are in the order of that shape: batches, heads, rows, columns.
    pub fn new(batch: usize, heads: usize, length: usize, head_dim: usize, dtype: DType) -> Self {
        Self {
            batch,
            query_heads: heads,
            key_heads: heads,
            query_length: length,
            key_length: length,
            head_dim,
            value_dim: head_dim,
            dtype,
            kv_dtype: None,
            out_dtype: None,
            scale: 1.0 / (head_dim as f64).sqrt(),
            mask: Mask::None,
            softcap: None,
            score_mod: None,
            mask_mod: None,
            layout: Layout::Bhsd,
            lse_form: LseForm::DEFAULT,
            lse: false,
            total_q: None,
            total_k: None,
            seqused_q: false,
            seqused_k: false,
            leftpad_k: false,
            kv_batch: None,
            paged: None,
            alibi: false,
            sinks: false,
            aux_f32: 0,
            aux_i32: 0,
            bias: false,
            q_scale: false,
            k_scale: false,
            v_scale: false,
        }
    }

    /// The keys that query row `row` attends when its batch has `batch_key_length` keys. Always a range.
    pub fn attended_keys(&self, batch_key_length: usize, row: usize) -> Range<usize> {
        self.mask.attended_keys(self.query_length, batch_key_length, row)
    }

    /// The query rows that attend key `key` of a batch that has `batch_key_length` keys: [`attended_keys`](Self::attended_keys)
    /// in the other direction.
    pub fn attending_rows(&self, batch_key_length: usize, key: usize) -> Range<usize> {
        self.mask.attending_rows(self.query_length, batch_key_length, key)
    }

    /// True if query row `row` attends key `key` when its batch has `batch_key_length` keys.
    pub fn attends(&self, batch_key_length: usize, row: usize, key: usize) -> bool {
        self.attended_keys(batch_key_length, row).contains(&key)
    }

    /// The keys that any query row attends when its batch has `batch_key_length` keys: from the first to past the last.
    ///
    /// Keys outside this range are never read, or never reach an output, whatever they hold: see [step 6](crate).
    pub fn attended_range(&self, batch_key_length: usize) -> Range<usize> {
        let Some(last_row) = self.query_length.checked_sub(1) else { return 0..0 };
        // Windows move on with the rows: the first row has the first key, and the last row the last.
        self.attended_keys(batch_key_length, 0).start..self.attended_keys(batch_key_length, last_row).end
    }

    /// The position of a query row among `batch_key_length` keys, less the row.
    pub fn position_offset(&self, batch_key_length: usize) -> isize {
        self.mask.alignment().offset(self.query_length, batch_key_length)
    }

    /// The key head that a query head reads (GQA): neighbouring query heads share one. Meaningless for a problem that
    /// does not validate.
    pub fn key_head(&self, query_head: usize) -> usize {
        let group = self.query_heads.checked_div(self.key_heads).unwrap_or(1);
        query_head / group.max(1)
    }

    /// The shape of the query.
    pub fn query_shape(&self) -> Shape {
        let (batch, rows) = self.total_q.map_or((self.batch, self.query_length), |rows| (1, rows));
        Shape { batch, heads: self.query_heads, rows, columns: self.head_dim }
    }

    /// Batches and rows of key and value, or pages and their rows.
    fn cache_shape(&self) -> (usize, usize) {
        match (self.paged, self.total_k) {
            (Some(paged), _) => (paged.num_pages, paged.page_size),
            (None, Some(rows)) => (1, rows),
            (None, None) => (self.cache_batches(), self.key_length),
        }
    }

    /// The shape of the key.
    pub fn key_shape(&self) -> Shape {
        let (batch, rows) = self.cache_shape();
        Shape { batch, heads: self.key_heads, rows, columns: self.head_dim }
    }

    /// The shape of the value.
    pub fn value_shape(&self) -> Shape {
        let (batch, rows) = self.cache_shape();
        Shape { batch, heads: self.key_heads, rows, columns: self.value_dim }
    }

    /// The shape of the output.
    pub fn output_shape(&self) -> Shape {
        let (batch, rows) = self.total_q.map_or((self.batch, self.query_length), |rows| (1, rows));
        Shape { batch, heads: self.query_heads, rows, columns: self.value_dim }
    }

    /// The strides of the four tensors. Those of a problem that does not validate are meaningless.
    pub fn strides(&self) -> TensorStrides {
        self.layout.strides(self)
    }

    /// An error that holds everything that is wrong with the problem, not only the first thing.
    pub fn validate(&self) -> Result<(), Invalid> {
        let errors = self.errors();
        if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
    }

    /// Everything that is wrong with the problem.
    pub fn errors(&self) -> Vec<ProblemError> {
        let mut errors = Vec::new();
        self.validate_sizes(&mut errors);
        self.validate_numbers(&mut errors);
        self.validate_dtypes(&mut errors);
        self.validate_expressions(&mut errors);
        self.validate_layout(&mut errors);
        self.validate_sequences(&mut errors);
        errors
    }

    fn validate_sizes(&self, errors: &mut Vec<ProblemError>) {
        let sizes = [
            ("query_heads", self.query_heads),
            ("key_heads", self.key_heads),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
        ];
        errors
            .extend(sizes.iter().filter(|(_, size)| *size == 0).map(|&(argument, _)| ProblemError::Zero { argument }));
        let (query_heads, key_heads) = (self.query_heads, self.key_heads);
        if query_heads != 0 && key_heads != 0 && query_heads % key_heads != 0 {
            errors.push(ProblemError::HeadsNotMultiple { query_heads, key_heads });
        }
        for (argument, length) in [("query_length", self.query_length), ("key_length", self.key_length)] {
            if isize::try_from(length).is_err() {
                errors.push(ProblemError::LengthTooLarge { argument, length });
            }
        }
    }

    fn validate_numbers(&self, errors: &mut Vec<ProblemError>) {
        if !self.scale.is_finite() {
            errors.push(ProblemError::ScaleNotFinite { scale: self.scale });
        } else if self.dtype.accumulator() == DType::F32 && is_lost_in_f32(self.scale) {
            errors.push(ProblemError::ScaleOutOfRange { scale: self.scale, dtype: self.dtype });
        }
        if let Some(softcap) = self.softcap.filter(|softcap| !(softcap.is_finite() && *softcap > 0.0)) {
            errors.push(ProblemError::SoftcapNotPositive { softcap });
        }
        if matches!(self.mask, Mask::Window { left: None, right: None, .. }) {
            errors.push(ProblemError::WindowWithoutLimits);
        }
    }

    /// The expressions of the problem, by the names of their fields.
    pub fn expressions(&self) -> impl Iterator<Item = (&'static str, &'static Expression)> {
        let score = self.score_mod.map(|score_mod| ("score_mod", score_mod.expression()));
        let mask = self.mask_mod.map(|mask_mod| ("mask_mod", mask_mod.expression()));
        score.into_iter().chain(mask)
    }

    fn validate_expressions(&self, errors: &mut Vec<ProblemError>) {
        let tables = [("aux_f32", self.aux_f32), ("aux_i32", self.aux_i32)];
        for (argument, expression) in self.expressions() {
            if expression.steps().len() > MOST_STEPS {
                errors.push(ProblemError::ExpressionTooLong { argument, steps: expression.steps().len() });
            }
            let (reads_numbers, reads_integers) = expression.tables();
            for ((table, entries), reads) in tables.into_iter().zip([reads_numbers, reads_integers]) {
                if reads && entries == 0 {
                    errors.push(ProblemError::TableMissing { argument, table });
                }
            }
        }
        for (argument, entries) in tables {
            if i32::try_from(entries).is_err() {
                errors.push(ProblemError::TableTooLarge { argument, entries });
            }
        }
    }

    fn validate_layout(&self, errors: &mut Vec<ProblemError>) {
        let (query, key) = (self.query_shape(), self.key_shape());
        let (query_length, key_length) = (query.rows, key.rows);
        if self.layout == Layout::PackedQkv && (query_length, query.batch) != (key_length, key.batch) {
            errors.push(ProblemError::PackedLengthsDiffer { query_length, key_length });
        }
        let strides = self.strides();
        for operand in [Operand::Query, Operand::Key, Operand::Value, Operand::Output] {
            if let (Some((shape, strides)), Some(dtype)) = (operand.tensor(self), operand.dtype(self)) {
                stride_errors(operand.name(), shape, strides, dtype, errors);
            }
        }
        let Strides { batch, head, row } = strides.output;
        if !strides.output.is_disjoint(self.output_shape()) {
            errors.push(ProblemError::OutputOverlaps { batch, head, row, shape: self.output_shape() });
        }
    }

    fn validate_sequences(&self, errors: &mut Vec<ProblemError>) {
        if let Some(PagedKv { page_size, num_pages, table_width, table_stride }) = self.paged {
            if page_size == 0 {
                errors.push(ProblemError::Zero { argument: "page_size" });
            }
            if num_pages > i32::MAX as usize {
                errors.push(ProblemError::LengthTooLarge { argument: "num_pages", length: num_pages });
            }
            let capacity = table_width.saturating_mul(page_size);
            if capacity < self.key_length {
                errors.push(ProblemError::TableTooNarrow { key_length: self.key_length, table_width, page_size });
            }
            if table_stride < table_width && self.cache_batches() > 1 {
                errors.push(ProblemError::TableOverlaps { table_stride, table_width });
            }
        }
        // Every sequence names one of them.
        if self.kv_batch == Some(0) && self.batch > 0 {
            errors.push(ProblemError::Zero { argument: "kv_batch" });
        }
        if self.total_k.is_some() {
            let others = [("paged", self.paged.is_some()), ("kv_batch", self.kv_batch.is_some())];
            for (other, _) in others.into_iter().filter(|&(_, present)| present) {
                errors.push(ProblemError::PackedKeysWith { other });
            }
        }
        for (argument, rows) in [("total_q", self.total_q), ("total_k", self.total_k)] {
            if let Some(length) = rows.filter(|&rows| rows > i32::MAX as usize) {
                errors.push(ProblemError::LengthTooLarge { argument, length });
            }
        }
    }
}

/// The mistakes in the strides of a tensor, taken by itself.
pub(crate) fn stride_errors(
    tensor: &'static str,
    shape: Shape,
    strides: Strides,
    dtype: DType,
    errors: &mut Vec<ProblemError>,
) {
    let bytes = |elements: usize| elements.checked_mul(dtype.size_bytes());
    let fits = |elements: Option<usize>| elements.and_then(bytes).is_some_and(|bytes| isize::try_from(bytes).is_ok());
    if !fits(strides.extent(shape)) || !fits(shape.elements()) {
        errors.push(ProblemError::TooLarge { tensor, shape });
    }
    let dimensions =
        [("batch", strides.batch, shape.batch), ("head", strides.head, shape.heads), ("row", strides.row, shape.rows)];
    for (dimension, stride, size) in dimensions {
        if size > 1 && stride != 0 && stride < shape.columns {
            errors.push(ProblemError::StrideTooSmall { tensor, dimension, stride, columns: shape.columns });
        }
    }
}

/// True if a finite number becomes infinite or zero in `f32`.
fn is_lost_in_f32(number: f64) -> bool {
    let narrow = number as f32;
    narrow.is_infinite() || (narrow == 0.0 && number != 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Alignment;

    fn check(change: impl FnOnce(&mut Problem), expected: &[ProblemError]) {
        let mut problem = Problem::new(2, 4, 5, 8, DType::F16);
        change(&mut problem);
        assert_eq!(problem.errors(), expected, "{problem}");
    }

    #[test]
    fn ordinary_and_empty_problems_are_legal() {
        check(|_| {}, &[]);
        check(|problem| problem.batch = 0, &[]);
        check(|problem| problem.query_length = 0, &[]);
        check(|problem| problem.key_length = 0, &[]);
        check(|problem| problem.key_heads = 2, &[]);
        check(|problem| problem.layout = Layout::PackedQkv, &[]);
        check(|problem| problem.scale = -1.0, &[]);
    }

    #[test]
    fn sequences_need_a_batch_of_the_cache() {
        check(|problem| problem.kv_batch = Some(1), &[]);
        check(|problem| (problem.kv_batch, problem.batch) = (Some(0), 0), &[]);
        check(|problem| problem.kv_batch = Some(0), &[ProblemError::Zero { argument: "kv_batch" }]);
    }

    #[test]
    fn sizes_of_sequences_are_printed() {
        let packed =
            Problem::new(2, 4, 5, 8, DType::F16).with_total_q(Some(7)).with_total_k(Some(9)).with_leftpad_k(true);
        assert_eq!(
            packed.to_string(),
            "batch 2 heads 4/4 queries 5 keys 5 dims 8/8 f16 unmasked cu_seqlens_q of 7 cu_seqlens_k of 9 leftpad_k"
        );
        let paged = PagedKv { page_size: 4, num_pages: 30, table_width: 2, table_stride: 6 };
        let paged = Problem::new(2, 4, 5, 8, DType::F16).with_kv_batch(Some(3)).with_paged(Some(paged));
        assert_eq!(
            paged.to_string(),
            "batch 2 heads 4/4 queries 5 keys 5 dims 8/8 f16 unmasked kv_batch_idx of 3 page_table 2 by 6 of 30 pages of 4"
        );
    }

    /// A scale is used in `f32` unless the problem is in `f64`: one that would become infinite or zero there is
    /// refused.
    #[test]
    fn a_scale_that_f32_does_not_have() {
        for (scale, is_lost) in
            [(1e39, true), (-1e39, true), (1e-46, true), (1e-45, false), (3.4e38, false), (0.0, false)]
        {
            for dtype in [DType::F16, DType::Bf16, DType::F32] {
                let expected = if is_lost { vec![ProblemError::ScaleOutOfRange { scale, dtype }] } else { vec![] };
                check(|problem| (problem.scale, problem.dtype) = (scale, dtype), &expected);
            }
            check(|problem| (problem.scale, problem.dtype) = (scale, DType::F64), &[]);
        }
        let error = ProblemError::ScaleOutOfRange { scale: 1e39, dtype: DType::F16 };
        assert_eq!(
            error.to_string(),
            "scale is 1e39; f16 is computed in f32, where it must be 0 or have a magnitude between 1e-45 and \
             3.4028235e38, usually 1 / sqrt(head_dim)"
        );
    }

    #[test]
    fn key_heads_of_any_problem() {
        let key_head = |query_heads, key_heads, query_head| {
            let problem = Problem::new(1, query_heads, 5, 8, DType::F16).with_key_heads(key_heads);
            problem.key_head(query_head)
        };
        assert_eq!([0, 3, 4, 7].map(|head| key_head(8, 2, head)), [0, 0, 1, 1]);
        // None of these validates, and none panics.
        assert_eq!([key_head(2, 4, 1), key_head(2, 0, 1), key_head(0, 0, 5)], [1, 1, 5]);
    }

    /// Sizes as callers mistake them: an answer, or an error, and no panic.
    #[test]
    fn helpers_answer_for_any_problem() {
        const SIZES: [usize; 4] = [0, 1, isize::MAX as usize + 1, usize::MAX];
        let masks = [
            Mask::None,
            Mask::Causal(Alignment::BottomRight),
            Mask::Window { left: Some(usize::MAX), right: Some(1), alignment: Alignment::TopLeft },
        ];
        let mut valid = 0;
        for number in 0..SIZES.len().pow(5) * masks.len() {
            let mut rest = number;
            let mut size = || {
                let size = SIZES[rest % SIZES.len()];
                rest /= SIZES.len();
                size
            };
            let mut problem = Problem::new(size(), size(), size(), size(), DType::F64);
            problem.key_heads = size();
            problem.mask = masks[rest];
            valid += usize::from(problem.validate().is_ok());
            for layout in [Layout::Bhsd, Layout::Bshd, Layout::PackedQkv] {
                problem.layout = layout;
                let (strides, shape) = (problem.strides().query, problem.query_shape());
                let _ = (strides.extent(shape), strides.is_disjoint(shape), shape.elements(), shape.each_row().next());
            }
            for at in SIZES {
                let keys = problem.attended_keys(at, at);
                assert!(keys.start <= keys.end && keys.end <= at.min(isize::MAX as usize), "{problem} {keys:?}");
                assert_eq!(problem.attends(at, at, 0), keys.contains(&0));
                let _ = (problem.key_head(at), problem.position_offset(at));
            }
            assert!(!problem.to_string().is_empty());
        }
        assert!(valid > 0);
    }

    #[test]
    fn all_errors_are_returned() {
        check(
            |problem| {
                problem.key_heads = 3;
                problem.scale = f64::INFINITY;
                problem.softcap = Some(0.0);
                problem.mask = Mask::Window { left: None, right: None, alignment: Alignment::TopLeft };
            },
            &[
                ProblemError::HeadsNotMultiple { query_heads: 4, key_heads: 3 },
                ProblemError::ScaleNotFinite { scale: f64::INFINITY },
                ProblemError::SoftcapNotPositive { softcap: 0.0 },
                ProblemError::WindowWithoutLimits,
            ],
        );
        check(
            |problem| {
                problem.key_heads = 0;
                problem.head_dim = 0;
            },
            &[ProblemError::Zero { argument: "key_heads" }, ProblemError::Zero { argument: "head_dim" }],
        );
    }

    #[test]
    fn expressions_are_checked() {
        let relative = ScoreMod::new("relative", |score, at| score + at.number(at.query - at.key));
        let documents = MaskMod::new("documents", |at| at.integer(at.query).equals(at.integer(at.key)));
        check(
            |problem| {
                (problem.score_mod, problem.mask_mod) = (Some(relative), Some(documents));
                (problem.aux_f32, problem.aux_i32) = (9, 5);
            },
            &[],
        );
        check(
            |problem| {
                (problem.score_mod, problem.mask_mod) = (Some(relative), Some(documents));
                problem.aux_f32 = 1 << 31;
            },
            &[
                ProblemError::TableMissing { argument: "mask_mod", table: "aux_i32" },
                ProblemError::TableTooLarge { argument: "aux_f32", entries: 1 << 31 },
            ],
        );
        let long = ScoreMod::new("long", |score, _| (0..64).fold(score, |sum, term| sum + term as f32));
        let steps = long.expression().steps().len();
        check(
            |problem| problem.score_mod = Some(long),
            &[ProblemError::ExpressionTooLong { argument: "score_mod", steps }],
        );
    }

    #[test]
    fn layouts_are_checked() {
        check(
            |problem| {
                problem.layout = Layout::PackedQkv;
                problem.key_length = 6;
            },
            &[ProblemError::PackedLengthsDiffer { query_length: 5, key_length: 6 }],
        );
        check(
            |problem| {
                let mut strides = problem.strides();
                strides.query.row = 0;
                strides.key.row = 7;
                strides.output.row = 4;
                problem.layout = Layout::Strided(strides);
            },
            &[
                ProblemError::StrideTooSmall { tensor: "key", dimension: "row", stride: 7, columns: 8 },
                ProblemError::StrideTooSmall { tensor: "output", dimension: "row", stride: 4, columns: 8 },
                ProblemError::OutputOverlaps {
                    batch: 160,
                    head: 40,
                    row: 4,
                    shape: Shape { batch: 2, heads: 4, rows: 5, columns: 8 },
                },
            ],
        );
        let shape = Shape { batch: 1 << 40, heads: 4, rows: 1 << 30, columns: 8 };
        check(
            |problem| {
                problem.batch = 1 << 40;
                problem.query_length = 1 << 30;
                problem.key_length = 0;
            },
            &[ProblemError::TooLarge { tensor: "query", shape }, ProblemError::TooLarge { tensor: "output", shape }],
        );
    }
}
