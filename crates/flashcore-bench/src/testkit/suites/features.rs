//! One value of every feature of a problem, and the case they make together.

use flashcore_cpu::Level;
use flashcore_problem::{
    Alignment, DType, Layout, LseForm, Mask, OperandSet, Problem, Shape, Stress, Strides, TensorStrides,
};

use crate::testkit::case::other_operands;
use crate::testkit::{Backend, BiasForm, Case, Numbers, Planted, expressions};

/// One value of every feature.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Features {
    pub(super) batch: usize,
    /// Of the query, and of key and value.
    pub(super) heads: (usize, usize),
    /// Of the query, and of key and value.
    pub(super) lengths: (usize, usize),
    /// Of query and key, and of value and output.
    pub(super) dims: (usize, usize),
    pub(super) dtype: DType,
    /// Factor on the usual scale.
    pub(super) scale_factor: f32,
    pub(super) mask: Mask,
    pub(super) softcap: Option<f32>,
    pub(super) alibi: bool,
    pub(super) sinks: bool,
    pub(super) bias: Option<BiasForm>,
    pub(super) seqused_k: bool,
    /// The form of the LSE, where there is one.
    pub(super) lse: Option<LseForm>,
    /// Of the [`other_operands`].
    pub(super) others: OperandSet,
    pub(super) layout: LayoutForm,
    pub(super) numbers: Numbers,
    /// Of scores and of masks, by name.
    pub(super) expressions: (Option<&'static str>, Option<&'static str>),
}

/// A layout, before the sizes are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayoutForm {
    Bhsd,
    Bshd,
    /// Needs as many keys as queries.
    PackedQkv,
    /// `[batch, head, row, column]` with padding after every row, head and batch.
    Padded,
    /// `[batch, row, head, column]` with padding after every head, row and batch.
    PaddedBshd,
    /// `[head, batch, row, column]`.
    HeadsOutermost,
    /// All batches share one key and one value, and all heads one query.
    Shared,
}

impl LayoutForm {
    pub(super) const ALL: [Self; 7] =
        [Self::Bhsd, Self::Bshd, Self::PackedQkv, Self::Padded, Self::PaddedBshd, Self::HeadsOutermost, Self::Shared];

    pub(super) fn of(self, problem: &Problem) -> Layout {
        let every = |strides: fn(Shape) -> Strides| {
            Layout::Strided(TensorStrides {
                query: strides(problem.query_shape()),
                key: strides(problem.key_shape()),
                value: strides(problem.value_shape()),
                output: strides(problem.output_shape()),
            })
        };
        match self {
            Self::Bhsd => Layout::Bhsd,
            Self::Bshd => Layout::Bshd,
            Self::PackedQkv => Layout::PackedQkv,
            Self::Padded => every(padded),
            Self::PaddedBshd => every(padded_bshd),
            Self::HeadsOutermost => every(heads_outermost),
            Self::Shared => Layout::Strided(TensorStrides {
                query: Strides { head: 0, ..Strides::bshd(problem.query_shape()) },
                key: Strides { batch: 0, ..Strides::bhsd(problem.key_shape()) },
                value: Strides { batch: 0, ..padded_bshd(problem.value_shape()) },
                output: padded(problem.output_shape()),
            }),
        }
    }
}

// Strides of what is empty must be possible too: a dimension of no size counts as 1.

fn padded(shape: Shape) -> Strides {
    let row = shape.columns + 3;
    let head = row * shape.rows.max(1) + 1;
    Strides { batch: head * shape.heads + 5, head, row }
}

fn padded_bshd(shape: Shape) -> Strides {
    let head = shape.columns + 1;
    let row = head * shape.heads + 7;
    Strides { batch: row * shape.rows.max(1) + 2, head, row }
}

fn heads_outermost(shape: Shape) -> Strides {
    let row = shape.columns;
    let batch = row * shape.rows.max(1);
    Strides { batch, head: batch * shape.batch.max(1), row }
}

/// The windows and alignments, each with the name of nothing but itself.
pub(super) const MASKS: [Mask; 12] = {
    use Alignment::{BottomRight, TopLeft};
    const fn window(left: Option<usize>, right: Option<usize>, alignment: Alignment) -> Mask {
        Mask::Window { left, right, alignment }
    }
    [
        Mask::None,
        Mask::None,
        Mask::Causal(BottomRight),
        Mask::Causal(TopLeft),
        window(Some(0), Some(0), BottomRight),
        window(Some(3), Some(0), TopLeft),
        window(Some(100), Some(0), BottomRight),
        window(Some(300), Some(200), BottomRight),
        window(Some(17), Some(40), TopLeft),
        window(None, Some(5), BottomRight),
        window(Some(200), None, BottomRight),
        window(Some(130), None, TopLeft),
    ]
};

pub(super) const SOFTCAPS: [Option<f32>; 4] = [None, None, Some(5.0), Some(50.0)];
/// A scale of 0 gives all keys the same weight; a negative one turns their order round.
pub(super) const SCALE_FACTORS: [f32; 6] = [1.0, 1.0, 0.25, 3.0, -1.0, 0.0];

/// None as often as some; those of scores and of masks alone and together.
pub(super) const EXPRESSIONS: [(Option<&str>, Option<&str>); 14] = [
    (None, None),
    (None, None),
    (None, None),
    (None, None),
    (None, None),
    (Some("relative"), None),
    (Some("distance"), None),
    (Some("capped"), None),
    (Some("tempered"), Some("prefix")),
    (Some("near"), None),
    (None, Some("documents")),
    (None, Some("blocks")),
    (Some("relative"), Some("dilated")),
    (Some("capped"), Some("documents")),
];

/// Every kind of numbers, the ordinary ones so often that most cases of a pairwise design hold them.
pub(super) fn every_numbers() -> Vec<Numbers> {
    let ordinary = [Numbers::Normal; 26];
    let stresses = Stress::ALL.map(Numbers::Stress);
    ordinary.into_iter().chain(stresses).chain(Planted::ALL.map(Numbers::Planted)).collect()
}

/// No LSE in a third, the default form in a third, and the others.
pub(super) const LSE_FORMS: [Option<LseForm>; 9] = {
    let [default, base2, of_keys, base2_of_keys] = LseForm::ALL;
    [None, None, None, Some(default), Some(default), Some(default), Some(base2), Some(of_keys), Some(base2_of_keys)]
};

/// No bias as often as one.
pub(super) fn every_bias() -> Vec<Option<BiasForm>> {
    [None; 8].into_iter().chain(BiasForm::ALL.map(Some)).collect()
}

/// True if these numbers test something in a problem with such a bias and such sinks.
pub(super) const fn suits(numbers: Numbers, bias: Option<BiasForm>, alibi: bool, sinks: bool) -> bool {
    match numbers {
        Numbers::Planted(Planted::MinusInfiniteBias) => bias.is_some(),
        Numbers::Planted(Planted::ExtremeSinks) => sinks,
        // A weight far below the smallest `f32` and above the smallest `f64` times infinity is NaN in one and infinite in
        // the other; `ALiBi` makes such weights, and nothing else here does.
        Numbers::Planted(Planted::InfiniteValue) => !alibi,
        Numbers::Normal | Numbers::Stress(_) | Numbers::Planted(_) => true,
    }
}

/// The other operands of a row of a design, whose settings, on and off, follow those of all features.
pub(super) fn others_of(row: &[usize]) -> OperandSet {
    let settings = &row[row.len() - other_operands().count()..];
    other_operands().zip(settings).filter(|(_, setting)| **setting == 1).map(|(operand, _)| operand).collect()
}

impl Features {
    /// The problem.
    pub(super) fn problem(&self) -> Problem {
        let mut problem = Problem::new(self.batch, self.heads.0, self.lengths.0, self.dims.0, self.dtype);
        (problem.key_heads, problem.key_length, problem.value_dim) = (self.heads.1, self.lengths.1, self.dims.1);
        problem.scale *= f64::from(self.scale_factor);
        (problem.mask, problem.softcap, problem.alibi, problem.sinks) =
            (self.mask, self.softcap, self.alibi, self.sinks);
        (problem.bias, problem.seqused_k, problem.lse) = (self.bias.is_some(), self.seqused_k, self.lse.is_some());
        problem.lse_form = self.lse.unwrap_or_default();
        self.others.iter().for_each(|operand| operand.switch_on(&mut problem));
        problem.layout = self.layout.of(&problem);
        let (score, mask) = self.expressions;
        expressions::give(&mut problem, score.and_then(expressions::score_mod), mask.and_then(expressions::mask_mod));
        problem
    }

    /// The case of the CPU.
    pub(super) fn case(&self, number: u64, level: Level, command: String) -> Case {
        Case {
            numbers: self.numbers,
            bias: self.bias.unwrap_or_default(),
            command: Some(command),
            ..Case::new(self.problem(), number, Backend::Cpu(level))
        }
    }

    /// Multiplications of the oracle.
    pub(super) fn work(&self) -> usize {
        self.batch * self.heads.0 * self.lengths.0 * self.lengths.1 * (self.dims.0 + self.dims.1)
    }
}
