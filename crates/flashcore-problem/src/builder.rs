//! Problem builder: sizes by name, and setters for everything else.

use crate::{DType, Invalid, Layout, LseForm, Mask, MaskMod, Problem, ProblemError, ScoreMod};

/// The sizes of a [`Problem`], each by its name. Made by [`Problem::builder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a builder makes a problem when `build` is called"]
pub struct ProblemBuilder {
    dtype: DType,
    batch: Option<usize>,
    query_heads: Option<usize>,
    key_heads: Option<usize>,
    query_length: Option<usize>,
    key_length: Option<usize>,
    head_dim: Option<usize>,
    value_dim: Option<usize>,
}

impl ProblemBuilder {
    /// Batches.
    pub const fn batch(mut self, batch: usize) -> Self {
        self.batch = Some(batch);
        self
    }

    /// Heads of query and output.
    pub const fn query_heads(mut self, query_heads: usize) -> Self {
        self.query_heads = Some(query_heads);
        self
    }

    /// Heads of key and value; by default those of the query.
    pub const fn key_heads(mut self, key_heads: usize) -> Self {
        self.key_heads = Some(key_heads);
        self
    }

    /// Rows of query and output.
    pub const fn query_length(mut self, query_length: usize) -> Self {
        self.query_length = Some(query_length);
        self
    }

    /// Rows of key and value; by default those of the query.
    pub const fn key_length(mut self, key_length: usize) -> Self {
        self.key_length = Some(key_length);
        self
    }

    /// Columns of query and key.
    pub const fn head_dim(mut self, head_dim: usize) -> Self {
        self.head_dim = Some(head_dim);
        self
    }

    /// Columns of value and output; by default those of query and key.
    pub const fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = Some(value_dim);
        self
    }

    /// Returns the problem, with the defaults of [`Problem::new`]; or an error that lists every missing size, or every
    /// mistake in those given.
    pub fn build(self) -> Result<Problem, Invalid> {
        let Self { dtype, batch, query_heads, key_heads, query_length, key_length, head_dim, value_dim } = self;
        let (Some(batch), Some(query_heads), Some(query_length), Some(head_dim)) =
            (batch, query_heads, query_length, head_dim)
        else {
            let needed = [
                ("batch", batch),
                ("query_heads", query_heads),
                ("query_length", query_length),
                ("head_dim", head_dim),
            ];
            let missing = needed.into_iter().filter(|(_, size)| size.is_none());
            let errors: Vec<ProblemError> = missing.map(|(argument, _)| ProblemError::NotGiven { argument }).collect();
            return Err(errors.into());
        };
        let mut problem = Problem::new(batch, query_heads, query_length, head_dim, dtype);
        problem.key_heads = key_heads.unwrap_or(query_heads);
        problem.key_length = key_length.unwrap_or(query_length);
        problem.value_dim = value_dim.unwrap_or(head_dim);
        problem.validate()?;
        Ok(problem)
    }
}

impl Problem {
    /// A builder that takes each size by its name, where the four numbers of [`new`](Self::new) could be mistaken for
    /// each other.
    ///
    /// `batch`, `query_heads`, `query_length` and `head_dim` must be given; `key_heads`, `key_length` and `value_dim`
    /// default to those of the query.
    ///
    /// ```
    /// # use flashcore_problem as flashcore;
    /// use flashcore::{Alignment, DType, Mask, Problem};
    ///
    /// let problem = Problem::builder(DType::Bf16)
    ///     .batch(1)
    ///     .query_heads(32)
    ///     .key_heads(8)
    ///     .query_length(1)
    ///     .key_length(4096)
    ///     .head_dim(128)
    ///     .build()?
    ///     .with_mask(Mask::Causal(Alignment::BottomRight))
    ///     .with_lse(true);
    /// assert_eq!(problem.key_shape().rows, 4096);
    ///
    /// let forgotten = Problem::builder(DType::Bf16).batch(1).query_heads(32).query_length(4096).build();
    /// assert_eq!(forgotten.unwrap_err().to_string(), "head_dim was not given; call .head_dim(...) before .build()");
    /// # Ok::<(), flashcore_problem::Invalid>(())
    /// ```
    pub const fn builder(dtype: DType) -> ProblemBuilder {
        ProblemBuilder {
            dtype,
            batch: None,
            query_heads: None,
            key_heads: None,
            query_length: None,
            key_length: None,
            head_dim: None,
            value_dim: None,
        }
    }
}

/// Declares a method that sets one field, with the first line of the field's documentation.
macro_rules! setters {
    ($($(#[$documentation:meta])* $name:ident($field:ident: $type:ty);)*) => {
        /// Setters of single fields, for problems that are written as one expression.
        impl Problem {
            $(
                $(#[$documentation])*
                #[must_use]
                pub const fn $name(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}

setters! {
    /// Sets [`batch`](Self::batch).
    with_batch(batch: usize);
    /// Sets [`query_heads`](Self::query_heads).
    with_query_heads(query_heads: usize);
    /// Sets [`key_heads`](Self::key_heads).
    with_key_heads(key_heads: usize);
    /// Sets [`query_length`](Self::query_length).
    with_query_length(query_length: usize);
    /// Sets [`key_length`](Self::key_length).
    with_key_length(key_length: usize);
    /// Sets [`value_dim`](Self::value_dim).
    with_value_dim(value_dim: usize);
    /// Sets [`kv_dtype`](Self::kv_dtype).
    with_kv_dtype(kv_dtype: Option<DType>);
    /// Sets [`out_dtype`](Self::out_dtype).
    with_out_dtype(out_dtype: Option<DType>);
    /// Sets [`scale`](Self::scale).
    with_scale(scale: f64);
    /// Sets [`mask`](Self::mask).
    with_mask(mask: Mask);
    /// Sets [`softcap`](Self::softcap).
    with_softcap(softcap: Option<f32>);
    /// Sets [`score_mod`](Self::score_mod).
    with_score_mod(score_mod: Option<ScoreMod>);
    /// Sets [`mask_mod`](Self::mask_mod).
    with_mask_mod(mask_mod: Option<MaskMod>);
    /// Sets [`layout`](Self::layout).
    with_layout(layout: Layout);
    /// Sets [`lse_form`](Self::lse_form).
    with_lse_form(lse_form: LseForm);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Alignment;

    #[test]
    fn sizes_by_name_are_those_of_new() {
        let built = Problem::builder(DType::F16).head_dim(64).query_length(512).query_heads(8).batch(2).build();
        assert_eq!(built, Ok(Problem::new(2, 8, 512, 64, DType::F16)));
        let sizes = Problem::builder(DType::F32).batch(2).query_heads(8).query_length(5).head_dim(64);
        let mut expected = Problem::new(2, 8, 5, 64, DType::F32);
        (expected.key_heads, expected.key_length, expected.value_dim) = (4, 7, 32);
        assert_eq!(sizes.key_heads(4).key_length(7).value_dim(32).build(), Ok(expected));
    }

    #[test]
    fn what_was_not_given_or_does_not_go_together_is_said() {
        let missing = ["batch", "query_heads", "query_length", "head_dim"];
        let missing: Vec<_> = missing.map(|argument| ProblemError::NotGiven { argument }).into();
        assert_eq!(Problem::builder(DType::F16).key_heads(2).build(), Err(Invalid::Problem(missing)));
        let sizes = Problem::builder(DType::F16).batch(1).query_heads(8).query_length(5).head_dim(64);
        let expected = ProblemError::HeadsNotMultiple { query_heads: 8, key_heads: 3 };
        assert_eq!(sizes.key_heads(3).build(), Err(Invalid::Problem(vec![expected])));
    }

    #[test]
    fn every_setter_sets_its_field() {
        let score_mod = ScoreMod::new("twice", |score, _| score * 2.0);
        let mask_mod = MaskMod::new("earlier", |at| at.query.at_least(at.key));
        let mask = Mask::Causal(Alignment::TopLeft);
        let mut expected = Problem::new(1, 1, 1, 64, DType::F16);
        (expected.batch, expected.query_heads, expected.key_heads) = (2, 6, 3);
        (expected.query_length, expected.key_length, expected.value_dim) = (5, 7, 32);
        (expected.scale, expected.softcap, expected.mask) = (0.5, Some(30.0), mask);
        (expected.kv_dtype, expected.out_dtype) = (Some(DType::E4m3), Some(DType::Bf16));
        (expected.q_scale, expected.k_scale, expected.v_scale) = (true, true, true);
        (expected.alibi, expected.sinks, expected.bias, expected.seqused_k) = (true, true, true, true);
        (expected.score_mod, expected.mask_mod) = (Some(score_mod), Some(mask_mod));
        (expected.aux_f32, expected.aux_i32) = (11, 13);
        (expected.lse, expected.layout) = (true, Layout::Bshd);
        let set = Problem::new(1, 1, 1, 64, DType::F16)
            .with_batch(2)
            .with_query_heads(6)
            .with_key_heads(3)
            .with_query_length(5)
            .with_key_length(7)
            .with_value_dim(32)
            .with_scale(0.5)
            .with_kv_dtype(Some(DType::E4m3))
            .with_out_dtype(Some(DType::Bf16))
            .with_q_scale(true)
            .with_k_scale(true)
            .with_v_scale(true)
            .with_mask(mask)
            .with_softcap(Some(30.0))
            .with_alibi(true)
            .with_sinks(true)
            .with_bias(true)
            .with_seqused_k(true)
            .with_score_mod(Some(score_mod))
            .with_mask_mod(Some(mask_mod))
            .with_aux_f32(11)
            .with_aux_i32(13)
            .with_lse(true)
            .with_layout(Layout::Bshd);
        assert_eq!(set, expected);
    }
}
