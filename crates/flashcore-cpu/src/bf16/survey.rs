//! Survey of query and keys before a problem: the bf16 instructions are exact for some magnitudes only.

use super::{Bf16Kernel, pack};
use crate::attend::group::Group;
use crate::driver::parallel::{LoopSchedule, for_each};
use crate::driver::scheduler::is_decode;
use crate::microkernel::softmax::COARSE;
use flashcore_problem::{InputViews, Problem};
use std::f64::consts::LOG2_E;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

impl<M> Bf16Kernel<M> {
    /// Surveys every element of query rows that attend some key, and of keys that some row attends, but for sequences that
    /// are decoded.
    #[expect(clippy::unused_self, reason = "it is a witness of AVX-512")]
    pub(crate) fn survey(&self, problem: &Problem, inputs: &InputViews<'_>) -> Survey {
        let survey = Survey::default();
        if problem.output_shape().is_empty() {
            return survey;
        }
        let groups = problem.batch * problem.key_heads;
        let rows = problem.query_length.saturating_mul(problem.query_heads / problem.key_heads);
        let elements = rows.saturating_add(problem.key_length).saturating_mul(problem.head_dim);
        for_each(groups, elements, LoopSchedule::Dynamic, |index| {
            let group = Group::new(problem, inputs, index / problem.key_heads, index % problem.key_heads);
            if is_decode(problem, &group.sequence) {
                return;
            }
            let (rows, keys) = (group.attending_rows(), group.attended_of(&(0..group.sequence.key_length)));
            // SAFETY: `self.vectors` is a witness of AVX-512.
            let [query, key] = unsafe { [pack::magnitudes(group.query, rows), pack::magnitudes(group.key, keys)] };
            if query.has_subnormal || key.has_subnormal {
                survey.has_subnormals.store(true, Ordering::Relaxed);
            }
            survey.largest_query.fetch_max(query.largest, Ordering::Relaxed);
            survey.largest_key.fetch_max(key.largest, Ordering::Relaxed);
        });
        survey
    }
}

/// Magnitudes of the elements of query and keys.
#[derive(Default)]
pub(crate) struct Survey {
    has_subnormals: AtomicBool,
    /// Bits of the largest magnitudes.
    largest_query: AtomicU32,
    largest_key: AtomicU32,
}

impl Survey {
    /// True if the products of the problem come out as those of its elements, and weights as those of the products. The
    /// instructions flush subnormal elements to zero, and keys can be so large that these count; and the softmax subtracts a
    /// rounded row max from products that are not rounded, see [`COARSE`].
    pub(crate) fn is_exact(&self, problem: &Problem) -> bool {
        // Of a NaN in one key nothing is known of the others: false too.
        self.largest_score(problem) < COARSE && !self.has_subnormals.load(Ordering::Relaxed)
    }

    /// Upper bound of the magnitude of the scores of a plain problem, in base 2. Not finite if an element is not.
    pub(super) fn largest_score(&self, problem: &Problem) -> f64 {
        let [query, key] = [&self.largest_query, &self.largest_key]
            .map(|bits| f64::from(f32::from_bits(bits.load(Ordering::Relaxed) << 16)));
        query * key * problem.head_dim as f64 * problem.scale.abs() * LOG2_E
    }
}
