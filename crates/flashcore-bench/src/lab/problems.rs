//! Bench suites: lists of problems to time.

use flashcore_problem::{Alignment, DType, Mask, PagedKv, Problem, SequenceLengths};

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
    /// One query row over a paged KV cache, its pages in random order.
    Paged,
    /// Prompts of random lengths, packed.
    Varlen,
    /// Chunks of prompts among rows that decode, over a paged KV cache.
    Chunked,
}

/// The sequence lengths of the prefill suite.
const PREFILL_LENGTHS: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16_384];
/// Tokens of each prefill problem: batch times length.
const PREFILL_TOKENS: usize = 16_384;
/// Columns of all heads together: 32 heads of 64, 16 of 128.
const PREFILL_WIDTH: usize = 2048;

/// Page sizes of the suites.
const PAGES: [usize; 3] = [16, 64, 256];

/// A paged cache that holds every sequence of a problem at its longest.
fn paged(problem: Problem, page_size: usize) -> Problem {
    let width = problem.key_length.div_ceil(page_size);
    let pages = PagedKv::new(page_size, problem.batch * width, width);
    problem.with_seqused_k(true).with_paged(Some(pages))
}

impl BenchSuite {
    /// Lengths of the sequences of the suite.
    pub const fn lengths(self) -> SequenceLengths {
        match self {
            Self::Paged => SequenceLengths::Full,
            Self::Chunked => SequenceLengths::Chunked,
            Self::Quick | Self::Seeds | Self::Prefill | Self::Decode | Self::Varlen => SequenceLengths::Ragged,
        }
    }

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
            Self::Paged => {
                let decode = |(batch, key_length)| {
                    let mut problem = square(batch, 32, 1, 128);
                    (problem.key_heads, problem.key_length) = (8, key_length);
                    problem
                };
                let sizes = [(1, 8192), (8, 2048), (32, 1024)].map(decode);
                return sizes.into_iter().flat_map(|problem| PAGES.map(|page| paged(problem.clone(), page))).collect();
            }
            Self::Varlen => [(4, 512), (8, 256), (64, 48)]
                .map(|(batch, length)| {
                    let total = Some(batch * length * 2 / 3);
                    square(batch, 8, length, 128).with_total_q(total).with_total_k(total)
                })
                .to_vec(),
            Self::Chunked => {
                let mut problem = square(8, 8, 128, 128);
                (problem.key_heads, problem.key_length) = (2, 2048);
                (problem.total_q, problem.mask) = (Some(8 * 128), Mask::Causal(Alignment::BottomRight));
                return PAGES.map(|page| paged(problem.clone(), page)).to_vec();
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
