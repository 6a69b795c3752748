//! Bench suites: lists of problems to time.

use flashcore_problem::{Alignment, DType, Mask, Problem};

/// A list of problems to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BenchSuite {
    /// A few, for a first look.
    Quick,
    /// The shapes of the project's history.
    Seeds,
    /// Long sequences, 16k tokens in all, as models read their prompts.
    Prefill,
    /// One query row over a long key cache, as models write.
    Decode,
}

/// The sequence lengths of the prefill suite.
const PREFILL_LENGTHS: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16_384];
/// Tokens of each prefill problem: batch times length.
const PREFILL_TOKENS: usize = 16_384;
/// Columns of all heads together: 32 heads of 64, 16 of 128.
const PREFILL_WIDTH: usize = 2048;

impl BenchSuite {
    /// Problems of the suite, each unmasked and causal, except where one query row makes them the same.
    pub fn problems(self, dtype: DType) -> Vec<Problem> {
        let square = |batch, heads, length, dim| Problem::new(batch, heads, length, dim, dtype);
        let problems: Vec<Problem> = match self {
            Self::Quick => {
                vec![square(1, 8, 512, 64), square(2, 8, 256, 64), square(2, 8, 512, 64), square(1, 8, 2048, 64)]
            }
            Self::Seeds => vec![
                square(1, 2, 64, 64),
                square(1, 4, 128, 64),
                square(2, 2, 64, 64),
                square(1, 8, 512, 64),
                square(2, 8, 256, 64),
                square(2, 8, 512, 64),
                square(8, 8, 512, 64),
                square(4, 16, 2048, 128),
            ],
            Self::Prefill => [64, 128]
                .into_iter()
                .flat_map(|dim| {
                    PREFILL_LENGTHS.map(|length| square(PREFILL_TOKENS / length, PREFILL_WIDTH / dim, length, dim))
                })
                .collect(),
            Self::Decode => {
                let lengths = [1024, 8192, 32_768];
                let batches = [1, 8, 32];
                let decode = |batch, key_length| {
                    let mut problem = square(batch, 32, 1, 128);
                    (problem.key_heads, problem.key_length) = (8, key_length);
                    problem
                };
                return batches.into_iter().flat_map(|batch| lengths.map(|length| decode(batch, length))).collect();
            }
        };
        problems
            .into_iter()
            .flat_map(|problem| {
                [Mask::None, Mask::Causal(Alignment::BottomRight)].map(|mask| problem.clone().with_mask(mask))
            })
            .collect()
    }
}
