//! Scores in base 2: scale, softcap, `ALiBi`, bias and sinks of a problem.

use crate::attend::blocked::{MAX_KV_TILE, MAX_LANES};
use crate::attend::scales::{self, GroupScales};
use crate::microkernel::score::{Alibi, BiasRows, ScoreModifiers};
use crate::planted::planted;
use crate::simd::real::Real;
use flashcore_problem::expression::Tables;
use flashcore_problem::{InputViews, Operand, Problem, Sequence};
use std::f64::consts::LOG2_E;
use std::ops::Range;

/// True if products times a factor are scores already.
pub(crate) fn is_plain(problem: &Problem, inputs: &InputViews<'_>) -> bool {
    let is_term = |operand: Operand| operand.is_score_term() && !operand.is_scale();
    let has_terms = Operand::optional().any(|operand| is_term(operand) && inputs.bytes(operand).is_some());
    problem.softcap.is_none() && !has_terms && problem.score_mod.is_none() && !scales::differ(problem, inputs)
}

/// Turns the products of one sequence into scores.
///
/// Scores are multiplied by `log2(e)`, so that the softmax can use powers of two. A factor that comes before everything
/// else is left to the kernel that computes the products. It is not put on the query, though that would be fewer
/// multiplications: each element would be rounded once more, and sums over 256 columns then miss the gate.
pub(crate) struct Scoring<'a> {
    problem: &'a Problem,
    inputs: &'a InputViews<'a>,
    /// Index of the sequence in the batch.
    sequence: usize,
    position_offset: isize,
    pub(crate) scales: GroupScales<'a>,
}

/// Score terms of the rows of some lanes, of a problem where products are not scores already.
pub(crate) struct LaneTerms<R> {
    slopes: [R; MAX_LANES],
    positions: [R; MAX_LANES],
    bias_starts: [usize; MAX_LANES],
    /// Scales of the query rows and of the keys, where they differ.
    row_scales: Option<[R; MAX_LANES]>,
    key_scales: Option<[R; MAX_KV_TILE]>,
}

impl<'a> Scoring<'a> {
    pub(crate) fn new(
        problem: &'a Problem,
        inputs: &'a InputViews<'a>,
        sequence: &Sequence<'_>,
        scales: GroupScales<'a>,
    ) -> Self {
        Self { problem, inputs, sequence: sequence.index, position_offset: sequence.position_offset(problem), scales }
    }

    /// True if products times the [`factor`](Self::factor) are scores already.
    pub(crate) fn is_plain(&self) -> bool {
        is_plain(self.problem, self.inputs)
    }

    /// Tables that expressions read.
    pub(crate) fn tables(&self) -> Tables<'a> {
        self.inputs.tables()
    }

    /// Factor of the products, before everything else.
    pub(crate) fn factor(&self) -> f64 {
        let scale = self.problem.scale * self.scales.factor;
        match self.problem.softcap {
            Some(softcap) => scale / f64::from(softcap),
            None if self.is_plain() => scale * LOG2_E,
            None => scale,
        }
    }

    /// Score terms of each lane, given its query head and row, for some keys. `None` if products are scores already.
    pub(crate) fn lane_terms<R: Real>(
        &self,
        keys: Range<usize>,
        places: impl Iterator<Item = (usize, usize)>,
    ) -> Option<LaneTerms<R>> {
        if self.is_plain() {
            return None;
        }
        let (first_key, row_differs) = (keys.start, self.scales.rows_differ());
        let mut terms = LaneTerms {
            slopes: [R::ZERO; MAX_LANES],
            positions: [R::ZERO; MAX_LANES],
            // Lanes without a row read the term of the first row, and the result is never looked at.
            bias_starts: [usize::MAX; MAX_LANES],
            row_scales: row_differs.then_some([R::ONE; MAX_LANES]),
            key_scales: self.scales.of_keys(keys),
        };
        for (lane, (head, row)) in places.enumerate() {
            let position = row as isize + self.position_offset - first_key as isize;
            terms.positions[lane] = R::from_f64(position as f64);
            if let Some(slopes) = self.inputs.alibi_slopes {
                terms.slopes[lane] = R::from_f64(f64::from(slopes[head]));
            }
            if let Some(scales) = &mut terms.row_scales {
                scales[lane] = R::from_f64(f64::from(self.scales.of_query(self.problem, head, row)));
            }
            if let Some(bias) = &self.inputs.bias {
                let sequence = planted!(BiasOfTheFirst: 0, self.sequence);
                terms.bias_starts[lane] = bias.strides.index(sequence, head, row, first_key);
            }
        }
        let first = terms.bias_starts[0];
        for start in terms.bias_starts.iter_mut().filter(|start| **start == usize::MAX) {
            *start = first;
        }
        Some(terms)
    }

    /// Modifiers of `scores`, in lanes from `lane` on.
    pub(crate) fn modifiers<'b, R: Real>(
        &'b self,
        terms: &'b LaneTerms<R>,
        lane: usize,
        scores: &'b mut [R],
        lanes: usize,
    ) -> ScoreModifiers<'b, R> {
        let alibi = Alibi { slopes: &terms.slopes[lane..], positions: &terms.positions[lane..] };
        let bias = self.inputs.bias.as_ref().map(|bias| BiasRows {
            data: bias.data,
            starts: &terms.bias_starts[lane..],
            row_stride: bias.strides.key,
        });
        ScoreModifiers {
            scores,
            lanes,
            lane_scales: terms.row_scales.as_ref().map(|scales| &scales[lane..]),
            tile_row_scales: terms.key_scales.as_ref().map(|scales| &scales[..]),
            softcap: self.problem.softcap.map(|softcap| R::from_f64(f64::from(softcap))),
            alibi: self.inputs.alibi_slopes.map(|_| alibi),
            bias,
            base: if self.problem.score_mod.is_some() { R::ONE } else { R::from_f64(LOG2_E) },
        }
    }

    /// Sink of a head in base 2, if there is one.
    pub(crate) fn sink<R: Real>(&self, head: usize) -> Option<R> {
        self.inputs.sinks.map(|sinks| R::from_f64(f64::from(sinks[head]) * LOG2_E))
    }
}
