//! Gates: errors held against what the project asks of 8-bit floats.
//!
//! They have sizes of their own, so that a verdict does not depend on what was shown before.

use flashcore::Device;
use flashcore_problem::{DType, DTypes, Invalid, Quantization, ScaleMode};
use serde::{Deserialize, Serialize};

use super::cases::{ALL_FP8, FP8_CACHE, tensor_sum};
use super::needle::Found;
use super::{Case, Computation, Distribution, Levels, Model, Outcome, Products, Run, Sample, Sizes};

/// Error of an FP8 cache over that of quantising key and value and computing in `f64`.
pub const CACHE_RATIO: f64 = 1.05;
/// RMSE of all-FP8 attention on data with outliers, with rotation.
pub const ROTATED_RMSE: f64 = 1.0e-2;

/// Sizes of the gate of the cache.
pub const CACHE_SIZES: Sizes = Sizes { heads: 2, queries: 16, keys: 8192, head_dim: 128 };
/// Sizes of the gate of the rotation. Outliers meet in few rows, so there are many.
pub const ROTATION_SIZES: Sizes = Sizes { heads: 2, queries: 128, keys: 8192, head_dim: 128 };

/// A figure, and what it is held against.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateResult {
    /// The thing measured.
    pub name: String,
    /// Who computed.
    pub computed_by: String,
    /// The figure; nothing where the case was refused.
    pub value: Option<f64>,
    /// The bound, in words.
    pub bound: String,
    /// True if it is within the bound.
    pub passed: bool,
    /// More about it.
    pub note: String,
}

/// The error of an FP8 cache under a 16-bit query, over that of quantising alone.
pub fn cache(device: &Device, data: Distribution, sizes: Sizes, seed: u64) -> Result<GateResult, Invalid> {
    let sample = Sample::draw(data, sizes, seed)?;
    let mut run = Run::new(&sample, sizes, data);
    let quantization = Quantization::new(FP8_CACHE, ScaleMode::KeyHead);
    let actual = run.row(&Case { quantization, by: Computation::Device(device.clone()) });
    // The query as it is, so that only key and value are rounded.
    let types = DTypes { query: DType::F32, output: DType::F32, ..FP8_CACHE };
    let alone = run.row(&Case { quantization: Quantization { types, ..quantization }, by: Computation::F64 });
    let name = format!("FP8 cache, scales per head, {data}: error over that of quantising in f64");
    let (value, note) = match (&actual.outcome, &alone.outcome) {
        (Outcome::Errors(actual), Outcome::Errors(alone)) => {
            let note = format!("relative L2 {:.3e} and {:.3e}", actual.relative_l2, alone.relative_l2);
            (Some(actual.relative_l2 / alone.relative_l2), note)
        }
        (Outcome::Refused(reason), _) | (_, Outcome::Refused(reason)) => (None, reason.clone()),
    };
    let passed = value.is_some_and(|value| value <= CACHE_RATIO);
    Ok(GateResult { name, computed_by: actual.computed_by, value, bound: format!("<= {CACHE_RATIO}"), passed, note })
}

/// The RMSE of all-FP8 attention with rotation on data with outliers.
pub fn rotation(by: Computation, sizes: Sizes, seed: u64) -> Result<GateResult, Invalid> {
    let data = Distribution::Outliers;
    let sample = Sample::draw(data, sizes, seed)?;
    let mut run = Run::new(&sample, sizes, data);
    let plain = Quantization::new(ALL_FP8, ScaleMode::Sequence);
    let rotated = run.row(&Case { quantization: plain.with_rotation(Some(1)), by });
    let name = "all-FP8, scales per (sequence, head), outliers, rotation: RMSE".to_owned();
    let without = run.row(&Case { quantization: plain, by: Computation::F64 });
    let (value, note) = match (&rotated.outcome, &without.outcome) {
        (Outcome::Errors(rotated), Outcome::Errors(without)) => {
            (Some(rotated.rmse), format!("quantising alone without rotation: {:.2e}", without.rmse))
        }
        (Outcome::Refused(reason), _) | (_, Outcome::Refused(reason)) => (None, reason.clone()),
    };
    let passed = value.is_some_and(|value| value <= ROTATED_RMSE);
    let bound = format!("<= {ROTATED_RMSE:e}");
    Ok(GateResult { name, computed_by: rotated.computed_by, value, bound, passed, note })
}

/// The model of a kernel with two levels.
pub const fn two_levels(fp8_bits: u32) -> Computation {
    Computation::Model(Model { products: Products::Fp8(Levels::Two), sum: tensor_sum(fp8_bits) })
}

/// Verdicts on needles: everyone but one level finds all, and one level fails, or the test shows nothing.
pub fn needles(found: &[Found]) -> Vec<GateResult> {
    let verdict = |row: &Found| {
        let is_negative = row.is_negative();
        // A failure by chance would not be clear.
        let few = row.trials / 2;
        let passed = match row.found {
            Some(found) if is_negative => found < few,
            Some(found) => found == row.trials,
            None => false,
        };
        let bound = if is_negative { format!("< {few}") } else { format!("= {}", row.trials) };
        let what = if is_negative { ", the negative" } else { "" };
        GateResult {
            name: format!("needles found at {} keys, {}{what}", row.keys, row.types),
            computed_by: row.computed_by.clone(),
            value: row.found.map(|found| found as f64),
            bound,
            passed,
            note: row.refused.clone().unwrap_or_default(),
        }
    };
    // A device that refuses a type has not failed at it.
    found.iter().filter(|row| row.refused.is_none()).map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_on_the_cpu_is_as_good_as_quantising() {
        let sizes = Sizes { heads: 2, queries: 8, keys: 700, head_dim: 64 };
        for data in Distribution::JUDGED {
            let gate = cache(&Device::cpu(), data, sizes, 1).expect("sizes are possible");
            assert!(gate.passed, "{gate:?}");
        }
        let sizes = Sizes { heads: 1, queries: 8, keys: 700, head_dim: 64 };
        let gate = rotation(Computation::F64, sizes, 1).expect("sizes are possible");
        assert!(gate.value.is_some_and(|rmse| (1e-3..2e-2).contains(&rmse)), "{gate:?}");
    }

    #[test]
    fn needles_are_judged_and_the_negative_must_fail() {
        let row = |computed_by: &str, found| Found {
            keys: 1000,
            types: "e4m3 out bf16".to_owned(),
            computed_by: computed_by.to_owned(),
            trials: 100,
            found,
            errors: None,
            refused: found.is_none().then(|| "no kernel".to_owned()),
        };
        let passed = |computed_by: &str, found| {
            let verdicts = needles(&[row(computed_by, found)]);
            verdicts.first().map(|verdict| verdict.passed)
        };
        assert_eq!(passed("model two levels, 13 bits", Some(100)), Some(true));
        assert_eq!(passed("model two levels, 13 bits", Some(99)), Some(false));
        assert_eq!(passed("model one level, 13 bits", Some(7)), Some(true));
        assert_eq!(passed("model one level, 13 bits", Some(100)), Some(false));
        assert_eq!(passed("gpu", None), None);
    }
}
