//! Data to measure errors on, and its answer in `f64`.

use std::fmt;
use std::str::FromStr;

use flashcore_problem::{DType, Inputs, Invalid, Problem, SplitMix64, Tensor, oracle};
use serde::{Deserialize, Serialize};

use crate::testkit::memory::{Impossible, require, require_judging};

/// Distribution of query, key and value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// Normal with variance 1.
    Gaussian,
    /// The same, and to one element of a thousand a normal number of ten times the size is added: the outliers of
    /// `FlashAttention-3`'s paper.
    Outliers,
    /// Normal, and keys have a mean in each column, three times their size: what smoothing is for.
    KeyMean,
}

impl Distribution {
    /// All.
    pub const ALL: [Self; 3] = [Self::Gaussian, Self::Outliers, Self::KeyMean];
    /// Distributions that the gates look at.
    pub const JUDGED: [Self; 2] = [Self::Gaussian, Self::Outliers];
    const MEAN_SIZE: f64 = 3.0;
    const OUTLIER_PART: f64 = 0.001;
    const OUTLIER_SIZE: f64 = 10.0;

    fn draw(self, random: &mut SplitMix64) -> f64 {
        let number = random.normal();
        match self {
            Self::Outliers if random.uniform() < Self::OUTLIER_PART => number + Self::OUTLIER_SIZE * random.normal(),
            _ => number,
        }
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Gaussian => "gaussian",
            Self::Outliers => "outliers",
            Self::KeyMean => "key-mean",
        })
    }
}

impl FromStr for Distribution {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|known| known.to_string() == text);
        found.ok_or_else(|| format!("'{text}' is no distribution; there are gaussian, outliers and key-mean"))
    }
}

/// Sizes of a problem: one batch, as many query heads as KV heads, no mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sizes {
    /// Heads.
    pub heads: usize,
    /// Query rows of a head.
    pub queries: usize,
    /// Keys.
    pub keys: usize,
    /// Columns of query, key and value.
    pub head_dim: usize,
}

impl Sizes {
    /// The problem in `f32`.
    pub fn problem(self) -> Problem {
        let mut problem = Problem::new(1, self.heads, self.queries, self.head_dim, DType::F32);
        problem.key_length = self.keys;
        problem
    }

    /// Holds the memory against what a problem takes: inputs in `f32`, in other types, and in `f64` for the answer.
    pub fn require_memory(self) -> Result<(), Impossible> {
        /// Copies in `f32` of key and value: drawn, copied while quantised, as a model reads them, and their codes.
        const COPIES: u64 = 4;
        let problem = self.problem();
        require_judging(&problem, 1)?;
        let elements = [problem.query_shape(), problem.key_shape(), problem.value_shape()]
            .iter()
            .try_fold(0_u64, |sum, shape| sum.checked_add(shape.elements()? as u64));
        // The answer in `f64` is over before the next one begins.
        let bytes = elements.and_then(|elements| elements.checked_mul(8 + COPIES * 4));
        Ok(require(&format!("measuring errors of {problem}"), bytes)?)
    }
}

/// A problem in `f32`, its inputs, and the answer.
#[derive(Debug, Clone)]
pub struct Sample {
    /// The problem.
    pub problem: Problem,
    /// Query, key and value.
    pub inputs: Inputs,
    /// The output in `f64`, contiguous.
    pub expected: Vec<f64>,
}

impl Sample {
    /// Numbers of a distribution, and the answer to them.
    pub fn draw(distribution: Distribution, sizes: Sizes, seed: u64) -> Result<Self, Invalid> {
        let problem = sizes.problem();
        problem.validate()?;
        let tensor = |stream: u64, rows: usize| {
            let mut random = SplitMix64::stream(seed, stream);
            let mut tensor = Tensor::zeros(DType::F32, sizes.heads * rows * sizes.head_dim);
            for bytes in tensor.data.chunks_exact_mut(4) {
                bytes.copy_from_slice(&(distribution.draw(&mut random) as f32).to_le_bytes());
            }
            tensor
        };
        let mut inputs = Inputs::new(tensor(0, sizes.queries), tensor(1, sizes.keys), tensor(2, sizes.keys));
        if distribution == Distribution::KeyMean {
            let mut random = SplitMix64::stream(seed, 3);
            let mean: Vec<f64> = (0..sizes.head_dim).map(|_| Distribution::MEAN_SIZE * random.normal()).collect();
            for index in 0..inputs.key.len() {
                inputs.key.set(index, inputs.key.get(index) + mean[index % sizes.head_dim]);
            }
        }
        Self::of(problem, inputs)
    }

    /// The answer to given inputs.
    pub fn of(problem: Problem, inputs: Inputs) -> Result<Self, Invalid> {
        let expected = oracle(&problem, &inputs)?.output;
        Ok(Self { problem, inputs, expected })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outliers_are_one_in_a_thousand() {
        let mut random = SplitMix64::new(5);
        let numbers: Vec<f64> = (0..200_000).map(|_| Distribution::Outliers.draw(&mut random)).collect();
        let variance = numbers.iter().map(|number| number * number).sum::<f64>() / numbers.len() as f64;
        assert!((variance - 1.1).abs() < 0.03, "{variance}");
        let large = numbers.iter().filter(|number| number.abs() > 6.0).count();
        // 55 % of the outliers are above 6, and nothing else is.
        assert!((85..135).contains(&large), "{large}");
        for distribution in Distribution::ALL {
            assert_eq!(distribution.to_string().parse(), Ok(distribution));
        }
    }

    #[test]
    fn more_than_the_memory_is_refused() {
        let sizes = Sizes { heads: 2, queries: 16, keys: 1 << 40, head_dim: 128 };
        assert!(matches!(sizes.require_memory(), Err(Impossible::Memory(_))));
        assert!(Sizes { keys: 300, ..sizes }.require_memory().is_ok());
    }
}
