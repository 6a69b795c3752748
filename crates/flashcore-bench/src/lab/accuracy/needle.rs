//! Needle in a haystack: a synthetic retrieval test of long sums.
//!
//! A cache has `keys` random keys, and among them one needle for each of `trials` queries, at a random place. The needle's
//! key points the way of its query, so that it gets [`SHARE`] of the weight and every other key about as much as any; it is
//! shorter than the others, and nothing that quantisation could mistake for an outlier. Values have a mean, as those of
//! models do: `mean + noise`, the mean as large as the noise and different in each column. The needle's is `mean + AMPLITUDE *
//! code`, where the code, one of `trials` random vectors of signs, says which trial it is.
//!
//! In exact arithmetic, the output of a query is the mean plus the needle's share of its code. A reader who knows the
//! answers to all codes in `f64`, on inputs that were not rounded, takes the nearest. The codes are
//! `SHARE * AMPLITUDE = 0.02` of the mean's size, so the reader is at a loss once the output is off by a few percent:
//! * rounding does not do that, whether of inputs or of P: its errors go both ways, and of 131,072 terms they cancel;
//! * a tensor core that cuts off does. Each product is cut off to so many bits below the *sum*; once this is thousands of
//!   products large, most of a product is cut off, then all of it, and the sum stays where it is. The output shrinks
//!   towards zero while the row sum, in `f32`, does not. With two levels no sum in a tensor core has more than a key
//!   tile's terms.

use flashcore_problem::{
    DType, DTypes, Inputs, Invalid, Quantization, ScaleMode, SplitMix64, Tensor, oracle, quantize,
};
use serde::{Deserialize, Serialize};

use super::cases::{ALL_FP8, Computation, FP8_CACHE, compute};
use super::{Errors, Levels, Model, Products, Sample, Sizes};
use crate::testkit::memory::Impossible;

/// The part of a row's weight that its needle has.
pub const SHARE: f64 = 0.01;
/// The size of a code, in units of the size of values.
const AMPLITUDE: f64 = 2.0;
/// Columns of query, key and value.
pub const HEAD_DIM: usize = 64;

/// A haystack with its needles.
#[derive(Debug, Clone)]
pub struct Haystack {
    sample: Sample,
    /// The code of each trial.
    codes: Vec<Vec<f64>>,
    /// The weight of each needle, in `f64`.
    shares: Vec<f64>,
}

/// Needles found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Found {
    /// Keys of the cache.
    pub keys: usize,
    /// Element types.
    pub types: String,
    /// Who computed.
    pub computed_by: String,
    /// Needles.
    pub trials: usize,
    /// Needles found; `None` where the case was refused.
    pub found: Option<usize>,
    /// Errors of the outputs; nothing where the case was refused.
    pub errors: Option<Errors>,
    /// The reason of a refusal.
    pub refused: Option<String>,
}

impl Found {
    /// True for sums in one level, which the test shows to lose needles.
    pub fn is_negative(&self) -> bool {
        self.computed_by.contains("one level")
    }

    /// True if every needle was found.
    pub fn is_all(&self) -> bool {
        self.found == Some(self.trials)
    }
}

/// Sizes of the problem, for the memory that it needs.
pub const fn sizes(keys: usize, trials: usize) -> Sizes {
    Sizes { heads: 1, queries: trials, keys, head_dim: HEAD_DIM }
}

impl Haystack {
    /// Hides needles among keys.
    ///
    /// # Panics
    ///
    /// When there are fewer than two keys for each trial.
    pub fn new(keys: usize, trials: usize, seed: u64) -> Result<Self, Invalid> {
        assert!(trials > 0 && keys >= 2 * trials, "{keys} keys for {trials} trials");
        let normals = |stream: u64, count: usize| {
            let mut random = SplitMix64::stream(seed, stream);
            (0..count).map(|_| random.normal()).collect::<Vec<f64>>()
        };
        let (query, mut key) = (normals(0, trials * HEAD_DIM), normals(1, keys * HEAD_DIM));
        let (mut value, mean) = (normals(2, keys * HEAD_DIM), normals(3, HEAD_DIM));
        for row in value.chunks_exact_mut(HEAD_DIM) {
            row.iter_mut().zip(&mean).for_each(|(value, mean)| *value += mean);
        }
        let mut random = SplitMix64::stream(seed, 4);
        let mut sign = || if random.next_u64() >> 63 == 0 { 1.0 } else { -1.0 };
        let codes: Vec<Vec<f64>> = (0..trials).map(|_| (0..HEAD_DIM).map(|_| sign()).collect()).collect();
        // Scores are normal numbers of variance 1, times a query's length: the mean of the others' exponentials is e^(variance / 2).
        let places = places(keys, trials, &mut SplitMix64::stream(seed, 5));
        for ((trial, query), &place) in query.chunks_exact(HEAD_DIM).enumerate().zip(&places) {
            let squared: f64 = query.iter().map(|number| number * number).sum();
            let others = keys as f64 * (squared / HEAD_DIM as f64 / 2.0).exp();
            let score = (SHARE / (1.0 - SHARE) * others).ln();
            let factor = score * (HEAD_DIM as f64).sqrt() / squared;
            let at = place * HEAD_DIM..(place + 1) * HEAD_DIM;
            key[at.clone()].iter_mut().zip(query).for_each(|(key, query)| *key = factor * query);
            let coded = mean.iter().zip(&codes[trial]).map(|(mean, code)| mean + AMPLITUDE * code);
            value[at].iter_mut().zip(coded).for_each(|(value, coded)| *value = coded);
        }
        let tensor = |values: &[f64]| Tensor::from_values(DType::F32, values);
        let inputs = Inputs::new(tensor(&query), tensor(&key), tensor(&value));
        let problem = sizes(keys, trials).problem().with_lse(true);
        let expected = oracle(&problem, &inputs)?;
        let shares = places.iter().enumerate().map(|(trial, &place)| {
            let row = |tensor: &Tensor, row: usize| {
                (row * HEAD_DIM..(row + 1) * HEAD_DIM).map(|index| tensor.get(index)).collect::<Vec<f64>>()
            };
            let (query, key) = (row(&inputs.query, trial), row(&inputs.key, place));
            let product: f64 = query.iter().zip(&key).map(|(query, key)| query * key).sum();
            (product * problem.scale - expected.lse[trial]).exp()
        });
        let shares = shares.collect();
        let problem = problem.with_lse(false);
        Ok(Self { sample: Sample { problem, inputs, expected: expected.output }, codes, shares })
    }

    /// Sizes, held against the memory.
    pub fn require_memory(keys: usize, trials: usize) -> Result<(), Impossible> {
        sizes(keys, trials).require_memory()
    }

    /// Looks for the needles in the outputs of a computation.
    pub fn search(&self, types: DTypes, by: &Computation) -> Found {
        let result = self.outputs(types, by);
        let trials = self.codes.len();
        let (found, errors, refused) = match &result {
            Ok((outputs, _)) => {
                (Some(self.count(outputs)), Some(Errors::measure(outputs, &self.sample.expected)), None)
            }
            Err(reason) => (None, None, Some(reason.clone())),
        };
        let kernel = result.ok().and_then(|(_, kernel)| kernel);
        let computed_by = kernel.map_or_else(|| by.to_string(), |kernel| format!("{by} {kernel}"));
        let keys = self.sample.problem.key_length;
        Found { keys, types: types.to_string(), computed_by, trials, found, errors, refused }
    }

    fn outputs(&self, types: DTypes, by: &Computation) -> Result<(Vec<f64>, Option<String>), String> {
        // One scale per (sequence, head), as FlashAttention-3 has.
        let quantization = Quantization::new(types, ScaleMode::Sequence);
        let Sample { problem, inputs, .. } = &self.sample;
        let quantized = quantize(problem, &inputs.views(), quantization).map_err(|error| error.to_string())?;
        compute(by, &quantized.problem, &quantized.inputs)
    }

    /// Outputs whose nearest answer is that of their own code.
    fn count(&self, outputs: &[f64]) -> usize {
        let rows = outputs.chunks_exact(HEAD_DIM).zip(self.sample.expected.chunks_exact(HEAD_DIM));
        let is_found = |(trial, (actual, expected)): (usize, (&[f64], &[f64]))| {
            let unit = self.shares[trial] * AMPLITUDE;
            let distance = |code: &Vec<f64>| -> f64 {
                let answer = expected.iter().zip(code).zip(&self.codes[trial]);
                let answer = answer.map(|((expected, code), own)| expected + unit * (code - own));
                actual.iter().zip(answer).map(|(actual, answer)| (actual - answer).powi(2)).sum()
            };
            let own = distance(&self.codes[trial]);
            // An output that is NaN is nearest to nothing.
            own.is_finite() && self.codes.iter().enumerate().all(|(other, code)| other == trial || distance(code) > own)
        };
        rows.enumerate().filter(|row| is_found(*row)).count()
    }
}

/// Different places for all trials.
fn places(keys: usize, trials: usize, random: &mut SplitMix64) -> Vec<usize> {
    // One in each of as many stretches of the cache.
    let stretch = keys / trials;
    let mut places: Vec<usize> = (0..trials).map(|trial| trial * stretch + random.below(stretch)).collect();
    for last in (1..trials).rev() {
        places.swap(last, random.below(last + 1));
    }
    places
}

/// The computations that a search compares: types, and who computes.
pub fn searches(device: &flashcore::Device, fp8_bits: u32) -> Vec<(DTypes, Computation)> {
    const BF16: DTypes = DTypes { query: DType::Bf16, key_value: DType::Bf16, output: DType::Bf16 };
    let library = || Computation::Device(device.clone());
    let sum = super::cases::tensor_sum(fp8_bits);
    let levels = |levels| Computation::Model(Model { products: Products::Fp8(levels), sum });
    vec![
        (BF16, library()),
        (FP8_CACHE, library()),
        (ALL_FP8, library()),
        (ALL_FP8, levels(Levels::Two)),
        (ALL_FP8, levels(Levels::One)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needles_have_places_of_their_own() {
        let mut places = places(1000, 37, &mut SplitMix64::new(3));
        assert!(!places.is_sorted());
        places.sort_unstable();
        places.dedup();
        assert!(places.len() == 37 && places[36] < 1000);
    }

    /// Few keys: everyone finds all, and shares are what they are meant to be.
    #[test]
    fn exact_answers_find_every_needle_and_garbage_finds_none() {
        let haystack = Haystack::new(3000, 20, 5).expect("a haystack");
        for share in &haystack.shares {
            assert!((SHARE / 3.0..SHARE * 3.0).contains(share), "{share}");
        }
        let f32 = DTypes { query: DType::F32, key_value: DType::F32, output: DType::F32 };
        assert!(haystack.search(f32, &Computation::F64).is_all());
        assert!(haystack.search(ALL_FP8, &Computation::F64).is_all());
        // Outputs that have shrunk, of other trials, and NaN.
        let shrunk: Vec<f64> = haystack.sample.expected.iter().map(|number| 0.2 * number).collect();
        assert!(haystack.count(&shrunk) < 8, "{}", haystack.count(&shrunk));
        let mut shifted = haystack.sample.expected.clone();
        shifted.rotate_left(HEAD_DIM);
        assert!(haystack.count(&shifted) < 4);
        assert_eq!(haystack.count(&vec![f64::NAN; shifted.len()]), 0);
    }
}
