//! The pairwise design over every feature of a problem, for any lists of values.

use flashcore_problem::DType;

use super::covering::{Setting, covering_rows};
use super::features::{EXPRESSIONS, Features, LSE_FORMS, LayoutForm, MASKS, SCALE_FACTORS, SOFTCAPS, others_of, suits};
use crate::testkit::case::other_operands;
use crate::testkit::{BiasForm, Numbers};

macro_rules! features {
    ($($feature:ident),*) => {
        /// A feature of a problem: a column of the design.
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub(super) enum Feature { $($feature),* }

        /// The features in the order of a row.
        const COLUMNS: &[Feature] = &[$(Feature::$feature),*];
    };
}

features! {
    HeadDim, ValueDim, Heads, Batch, Lengths, DType, ScaleFactor, Mask, Softcap, Alibi, Sinks, Bias, SequsedK, Lse,
    Layout, Numbers, Expressions
}

/// One value for each feature, as an index into its list.
pub(super) type Row = Vec<usize>;

/// The values of those features that backends differ in; the others have one list for all.
pub(super) struct Design {
    pub(super) head_dims: &'static [usize],
    /// 0 is the head dimension itself.
    pub(super) value_dims: &'static [usize],
    pub(super) heads: &'static [(usize, usize)],
    pub(super) batches: &'static [usize],
    pub(super) lengths: &'static [(usize, usize)],
    pub(super) dtypes: &'static [DType],
    pub(super) biases: Vec<Option<BiasForm>>,
    pub(super) numbers: Vec<Numbers>,
}

impl Design {
    /// At least `at_least` rows, in which every two values of every two features meet that make sense together and that
    /// `excludes` allows. It is asked with the earlier feature first.
    pub(super) fn rows(
        &self,
        excludes: impl Fn((Feature, usize), (Feature, usize)) -> bool,
        at_least: usize,
        seed: u64,
    ) -> Vec<Row> {
        let mut sizes: Vec<usize> = COLUMNS.iter().map(|feature| self.size(*feature)).collect();
        // Operands that no feature names are on or off.
        sizes.extend(other_operands().map(|_| 2));
        let excludes = |(first, x): Setting, (second, y): Setting| match (COLUMNS.get(first), COLUMNS.get(second)) {
            (Some(&first), Some(&second)) => {
                self.contradicts((first, x), (second, y)) || excludes((first, x), (second, y))
            }
            _ => false,
        };
        covering_rows(&sizes, excludes, at_least, seed)
    }

    /// Number of values of a feature.
    fn size(&self, feature: Feature) -> usize {
        match feature {
            Feature::HeadDim => self.head_dims.len(),
            Feature::ValueDim => self.value_dims.len(),
            Feature::Heads => self.heads.len(),
            Feature::Batch => self.batches.len(),
            Feature::Lengths => self.lengths.len(),
            Feature::DType => self.dtypes.len(),
            Feature::ScaleFactor => SCALE_FACTORS.len(),
            Feature::Mask => MASKS.len(),
            Feature::Softcap => SOFTCAPS.len(),
            Feature::Alibi | Feature::Sinks | Feature::SequsedK => 2,
            Feature::Lse => LSE_FORMS.len(),
            Feature::Bias => self.biases.len(),
            Feature::Layout => LayoutForm::ALL.len(),
            Feature::Numbers => self.numbers.len(),
            Feature::Expressions => EXPRESSIONS.len(),
        }
    }

    /// True if no problem has both values.
    fn contradicts(&self, (first, x): (Feature, usize), (second, y): (Feature, usize)) -> bool {
        match (first, second) {
            (Feature::Lengths, Feature::Layout) => {
                LayoutForm::ALL[y] == LayoutForm::PackedQkv && self.lengths[x].0 != self.lengths[x].1
            }
            (Feature::Alibi, Feature::Numbers) => !suits(self.numbers[y], Some(BiasForm::PerHead), x == 1, true),
            (Feature::Sinks, Feature::Numbers) => !suits(self.numbers[y], Some(BiasForm::PerHead), false, x == 1),
            (Feature::Bias, Feature::Numbers) => !suits(self.numbers[y], self.biases[x], false, true),
            _ => false,
        }
    }

    /// The values of a row.
    pub(super) fn features(&self, row: &[usize]) -> Features {
        let at = |feature: Feature| row[feature as usize];
        let head_dim = self.head_dims[at(Feature::HeadDim)];
        let value_dim = match self.value_dims[at(Feature::ValueDim)] {
            0 => head_dim,
            other => other,
        };
        Features {
            batch: self.batches[at(Feature::Batch)],
            heads: self.heads[at(Feature::Heads)],
            lengths: self.lengths[at(Feature::Lengths)],
            dims: (head_dim, value_dim),
            dtype: self.dtypes[at(Feature::DType)],
            scale_factor: SCALE_FACTORS[at(Feature::ScaleFactor)],
            mask: MASKS[at(Feature::Mask)],
            softcap: SOFTCAPS[at(Feature::Softcap)],
            alibi: at(Feature::Alibi) == 1,
            sinks: at(Feature::Sinks) == 1,
            bias: self.biases[at(Feature::Bias)],
            seqused_k: at(Feature::SequsedK) == 1,
            lse: LSE_FORMS[at(Feature::Lse)],
            others: others_of(row),
            layout: LayoutForm::ALL[at(Feature::Layout)],
            numbers: self.numbers[at(Feature::Numbers)],
            expressions: EXPRESSIONS[at(Feature::Expressions)],
        }
    }
}
