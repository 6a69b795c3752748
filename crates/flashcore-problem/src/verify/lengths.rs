//! Patterns of sequence lengths: batches as serving engines make them, and the corners of them.

use super::random::SplitMix64;
use crate::{Inputs, Problem};

/// A pattern of the lengths of sequences in random inputs.
///
/// It says what offsets and lengths hold (`cu_seqlens_q`, `cu_seqlens_k`, `seqused_q`, `seqused_k`), as far as the problem
/// has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum SequenceLengths {
    /// Random lengths, drawn for each operand on its own, some of them 0.
    #[default]
    Ragged,
    /// Every sequence as long as the problem allows.
    Full,
    /// No sequence has a key: outputs are 0.
    NoKeys,
    /// No sequence has a query row: nothing is written.
    NoQueries,
    /// One sequence as long as the problem allows among short ones.
    OneLong,
    /// Decoding with one row, alternating with chunks of prefill whose rows are the last keys.
    Chunked,
}

impl SequenceLengths {
    /// Every pattern.
    pub const ALL: [Self; 6] = [Self::Ragged, Self::Full, Self::NoKeys, Self::NoQueries, Self::OneLong, Self::Chunked];

    /// Name in the names of cases.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ragged => "ragged",
            Self::Full => "full-lengths",
            Self::NoKeys => "no-keys",
            Self::NoQueries => "no-queries",
            Self::OneLong => "one-long",
            Self::Chunked => "chunked",
        }
    }

    /// Query rows and keys of a sequence; nothing for random ones.
    fn of(self, problem: &Problem, index: usize, random: &mut SplitMix64) -> Option<(usize, usize)> {
        const FEW_ROWS: usize = 3;
        const SHORT: usize = 8;
        let (queries, keys) = (problem.query_length, problem.key_length);
        Some(match self {
            Self::Ragged => return None,
            Self::Full => (queries, keys),
            Self::NoKeys => (queries, 0),
            Self::NoQueries => (0, keys),
            Self::OneLong if index == problem.batch / 2 => (queries, keys),
            Self::OneLong => (1 + random.below(queries.min(FEW_ROWS)), 1 + random.below(keys.div_ceil(SHORT))),
            Self::Chunked if index.is_multiple_of(2) => (1, 1 + random.below(keys)),
            Self::Chunked => {
                let rows = (1 + random.below(queries)).min(keys);
                (rows, rows + random.below(keys - rows + 1))
            }
        })
    }

    /// Sets the offsets and lengths of inputs. No length exceeds its bound.
    pub(super) fn set(self, problem: &Problem, inputs: &mut Inputs, random: &mut SplitMix64) {
        let bounded = |index: usize, random: &mut SplitMix64| {
            let (queries, keys) = self.of(problem, index, random)?;
            Some((queries.min(problem.query_length), keys.min(problem.key_length)))
        };
        let Some(lengths) = (0..problem.batch).map(|index| bounded(index, random)).collect::<Option<Vec<_>>>() else {
            return;
        };
        let queries: Vec<u32> = lengths.iter().map(|&(queries, _)| queries as u32).collect();
        let keys: Vec<u32> = lengths.iter().map(|&(_, keys)| keys as u32).collect();
        inputs.cu_seqlens_q = inputs.cu_seqlens_q.is_some().then(|| offsets(&queries, problem.total_q));
        inputs.cu_seqlens_k = inputs.cu_seqlens_k.is_some().then(|| offsets(&keys, problem.total_k));
        inputs.seqused_q = inputs.seqused_q.is_some().then_some(queries);
        inputs.seqused_k = inputs.seqused_k.is_some().then_some(keys);
    }
}

/// Where sequences of these lengths begin, and where the last ends: at `total` at most.
fn offsets(lengths: &[u32], total: Option<usize>) -> Vec<u32> {
    let total = total.unwrap_or(0) as u32;
    let ends = lengths.iter().scan(0, |end, length| {
        *end = total.min(*end + length);
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn lengths(pattern: SequenceLengths, problem: &Problem) -> Vec<(usize, usize)> {
        let inputs = Inputs::random_sequences(problem, pattern, 3);
        assert_eq!(inputs.validate(problem), Ok(()), "{pattern:?}");
        inputs.views().sequences(problem).map(|sequence| (sequence.query_length, sequence.key_length)).collect()
    }

    #[test]
    fn patterns_are_what_they_say() {
        let packed =
            Problem::new(5, 1, 9, 8, DType::F32).with_key_length(40).with_total_q(Some(45)).with_total_k(Some(200));
        let used = Problem::new(5, 1, 9, 8, DType::F32).with_key_length(40).with_seqused_q(true).with_seqused_k(true);
        for problem in [packed, used] {
            assert_eq!(lengths(SequenceLengths::Full, &problem), [(9, 40); 5]);
            assert_eq!(lengths(SequenceLengths::NoKeys, &problem), [(9, 0); 5]);
            assert_eq!(lengths(SequenceLengths::NoQueries, &problem), [(0, 40); 5]);
            let long = lengths(SequenceLengths::OneLong, &problem);
            assert_eq!(long[2], (9, 40));
            let is_short = |&(queries, keys): &(usize, usize)| (1..=3).contains(&queries) && (1..=5).contains(&keys);
            assert!([0, 1, 3, 4].iter().all(|&index| is_short(&long[index])), "{long:?}");
            let chunked = lengths(SequenceLengths::Chunked, &problem);
            assert_eq!([0, 2, 4].map(|index| chunked[index].0), [1; 3]);
            assert!(chunked.iter().all(|&(queries, keys)| (1..=keys).contains(&queries)), "{chunked:?}");
        }
    }

    /// Totals too small for all of them cut the last.
    #[test]
    fn offsets_end_at_the_total() {
        let problem = Problem::new(3, 1, 9, 8, DType::F32).with_total_q(Some(20));
        let lengths = lengths(SequenceLengths::Full, &problem);
        assert_eq!(lengths, [(9, 9), (9, 9), (2, 9)]);
    }

    /// Keys and queries of no sequence are poison, those of a sequence are numbers.
    #[test]
    fn rows_of_no_sequence_are_poison() {
        let problem = Problem::new(2, 1, 4, 8, DType::F32).with_key_length(6).with_seqused_q(true).with_seqused_k(true);
        let inputs = Inputs::random_sequences(&problem, SequenceLengths::OneLong, 1);
        for (tensor, shape, is_query) in
            [(&inputs.query, problem.query_shape(), true), (&inputs.key, problem.key_shape(), false)]
        {
            let mut poisoned = 0;
            for (batch, head, row) in shape.each_row() {
                let sequence = inputs.views().sequence(&problem, batch);
                let length = if is_query { sequence.query_length } else { sequence.key_length };
                let start = shape.columns * (shape.rows * (batch * shape.heads + head) + row);
                assert_eq!(tensor.get(start).is_nan(), row >= length, "{is_query} {batch} {row}");
                poisoned += usize::from(row >= length);
            }
            assert!(poisoned > 0);
        }
    }
}
