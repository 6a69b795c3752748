//! Cases: which types, scales and options, and who computes.

use core::fmt;

use flashcore::{Device, Plan};
use flashcore_kernels::Tf32Products;
use flashcore_problem::{
    DType, DTypes, Inputs, Outputs, Problem, Quantization, QuantizeError, Quantized, ScaleMode, oracle, quantize,
};
use flashcore_sim::TensorSum;
use serde::{Deserialize, Serialize};

use super::{Distribution, Errors, Levels, Model, Products, Sample, Sizes};

/// The seed of the signs of rotations.
const ROTATION_SEED: u64 = 1;

/// A cache in e4m3 under a query of 16 bits.
pub(super) const FP8_CACHE: DTypes = DTypes { query: DType::Bf16, key_value: DType::E4m3, output: DType::Bf16 };
/// Query, key and value in e4m3.
pub(super) const ALL_FP8: DTypes = DTypes { query: DType::E4m3, key_value: DType::E4m3, output: DType::Bf16 };

/// Who computes.
#[derive(Debug, Clone)]
pub enum Computation {
    /// The oracle on the rounded inputs: the error of rounding them, and no other.
    F64,
    /// The library, on a device.
    Device(Device),
    /// A model of a tensor-core kernel.
    Model(Model),
}

impl fmt::Display for Computation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F64 => formatter.write_str("f64"),
            Self::Device(device) if device.context().is_none() => formatter.write_str("cpu"),
            Self::Device(_) => formatter.write_str("gpu"),
            Self::Model(model) => write!(formatter, "{model}"),
        }
    }
}

/// A way to compute attention.
#[derive(Debug, Clone)]
pub struct Case {
    /// Types, scales and options.
    pub quantization: Quantization,
    /// Who computes.
    pub by: Computation,
}

/// Types, scale modes and options of which [`cases`] makes all combinations that there are.
#[derive(Debug, Clone)]
pub struct Choice {
    /// Element types.
    pub types: Vec<DTypes>,
    /// Elements that share a scale.
    pub scales: Vec<ScaleMode>,
    /// Smoothed keys, and rotation.
    pub options: Vec<(bool, bool)>,
    /// The CPU, or a GPU.
    pub device: Device,
    /// Fraction bits of the models of FP8.
    pub fp8_bits: u32,
}

impl Choice {
    /// The addition of tensor cores.
    pub const fn sum(&self) -> TensorSum {
        tensor_sum(self.fp8_bits)
    }
}

/// The addition of an H200, with a number of bits for FP8.
pub(super) const fn tensor_sum(fp8_fraction: u32) -> TensorSum {
    match TensorSum::H200 {
        TensorSum::Truncating { fraction, .. } => TensorSum::Truncating { fraction, fp8_fraction },
        TensorSum::Exact => TensorSum::Exact,
    }
}

/// All combinations, those that share their rounded inputs after one another.
pub fn cases(choice: &Choice) -> Vec<Case> {
    let mut cases = Vec::new();
    let sum = choice.sum();
    let model = |products| Computation::Model(Model { products, sum });
    let library = || Computation::Device(choice.device.clone());
    for &types in &choice.types {
        let has_scales = types.key_value.is_float8();
        let first_scale = [ScaleMode::Tensor];
        let scales = if has_scales { &choice.scales[..] } else { &first_scale };
        let no_option = [(false, false)];
        let options = if has_scales { &choice.options[..] } else { &no_option };
        for (index, &mode) in scales.iter().enumerate() {
            for &(smooth_keys, rotates) in options {
                let rotation = rotates.then_some(ROTATION_SEED);
                let quantization = Quantization::new(types, mode).with_smooth_keys(smooth_keys).with_rotation(rotation);
                let computations = match (types.query, has_scales) {
                    (DType::F32, false) => {
                        let tf32 = |products| model(Products::Tf32(products));
                        vec![library(), tf32(Tf32Products::Three), tf32(Tf32Products::One)]
                    }
                    (DType::F16 | DType::Bf16, false) => vec![library(), model(Products::Half)],
                    (DType::E4m3, _) => {
                        let levels = |levels| model(Products::Fp8(levels));
                        let mut computations = vec![Computation::F64, library(), levels(Levels::Two)];
                        // The negative, once.
                        if index == 0 && !smooth_keys && !rotates {
                            computations.push(levels(Levels::One));
                        }
                        computations
                    }
                    (DType::F16 | DType::Bf16, true) => {
                        let mut computations = vec![Computation::F64, library()];
                        if index == 0 && !smooth_keys && !rotates {
                            computations.push(model(Products::Half));
                        }
                        computations
                    }
                    (_, true) => vec![Computation::F64, library()],
                    (_, false) => vec![library()],
                };
                cases.extend(computations.into_iter().map(|by| Case { quantization, by }));
            }
        }
    }
    cases
}

/// Outcome of a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Errors of its output.
    Errors(Errors),
    /// The reason why there is no output.
    Refused(String),
}

/// Errors of a case on a sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Sizes of the problem.
    pub sizes: Sizes,
    /// Distribution of its inputs.
    pub data: Distribution,
    /// Element types.
    pub types: String,
    /// The scale mode; nothing where no tensor has 8 bits.
    pub scales: Option<String>,
    /// Options: `smooth`, `rotate`, both, or nothing.
    pub options: String,
    /// Who computed: `f64`, `cpu`, `gpu` with the kernel, or a model.
    pub computed_by: String,
    /// Elements of the inputs that were cut down to the largest number.
    pub saturated: usize,
    /// The errors, or a reason.
    pub outcome: Outcome,
}

/// Computes the cases of a sample one after the other.
pub struct Run<'a> {
    sample: &'a Sample,
    sizes: Sizes,
    data: Distribution,
    /// The inputs of the last case.
    last: Option<(Quantization, Result<Quantized, QuantizeError>)>,
}

impl<'a> Run<'a> {
    /// A run on a sample of these sizes and distribution.
    pub const fn new(sample: &'a Sample, sizes: Sizes, data: Distribution) -> Self {
        Self { sample, sizes, data, last: None }
    }

    /// The errors of a case.
    pub fn row(&mut self, case: &Case) -> Row {
        let Case { quantization, by } = case;
        if self.last.as_ref().is_none_or(|(last, _)| last != quantization) {
            // The inputs before go first.
            self.last = None;
            let quantized = quantize(&self.sample.problem, &self.sample.inputs.views(), *quantization);
            self.last = Some((*quantization, quantized));
        }
        let mut computed_by = by.to_string();
        let (mut saturated, mut outcome) = (0, Outcome::Refused(String::new()));
        match &self.last {
            Some((_, Ok(quantized))) => {
                saturated = quantized.saturated.total();
                outcome = match compute(by, &quantized.problem, &quantized.inputs) {
                    Ok((actual, kernel)) => {
                        if let Some(kernel) = kernel {
                            computed_by = format!("{computed_by} {kernel}");
                        }
                        Outcome::Errors(Errors::measure(&actual, &self.sample.expected))
                    }
                    Err(reason) => Outcome::Refused(reason),
                };
            }
            Some((_, Err(error))) => outcome = Outcome::Refused(error.to_string()),
            None => {}
        }
        Row {
            sizes: self.sizes,
            data: self.data,
            types: quantization.types.to_string(),
            scales: quantization.types.key_value.is_float8().then(|| quantization.scales.to_string()),
            options: options_text(quantization),
            computed_by,
            saturated,
            outcome,
        }
    }
}

/// Options by their names.
fn options_text(Quantization { smooth_keys, rotation, .. }: &Quantization) -> String {
    let names = [("smooth", *smooth_keys), ("rotate", rotation.is_some())];
    names.iter().filter(|(_, is_on)| *is_on).map(|(name, _)| *name).collect::<Vec<_>>().join("+")
}

/// The output, contiguous, and the kernel of a GPU; or the reason why there is none.
pub(super) fn compute(
    by: &Computation,
    problem: &Problem,
    inputs: &Inputs,
) -> Result<(Vec<f64>, Option<String>), String> {
    match by {
        Computation::F64 => {
            oracle(problem, inputs).map(|expected| (expected.output, None)).map_err(|error| error.to_string())
        }
        Computation::Model(model) => Ok((model.attend(problem, inputs), None)),
        Computation::Device(device) => {
            let plan = Plan::new(problem, device).map_err(|reasons| reasons.to_string())?;
            let mut outputs = Outputs::poisoned(problem);
            plan.run(inputs, &mut outputs).map_err(|error| error.to_string())?;
            let kernel =
                plan.report().kernel.as_ref().and_then(|kernel| kernel.config).map(|config| config.to_string());
            Ok((outputs.output.dense(problem.output_shape(), problem.strides().output), kernel))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(types: &[&str]) -> Choice {
        Choice {
            types: types.iter().map(|types| types.parse().expect("types")).collect(),
            scales: vec![ScaleMode::KeyHead, ScaleMode::Token],
            options: vec![(false, false), (true, true)],
            device: Device::cpu(),
            fp8_bits: 13,
        }
    }

    /// Errors of every kind of case on few keys, against what rounding explains.
    #[test]
    fn errors_are_those_of_the_types() {
        let sizes = Sizes { heads: 2, queries: 4, keys: 300, head_dim: 64 };
        let sample = Sample::draw(Distribution::Gaussian, sizes, 3).expect("a sample");
        let types = ["f32", "f16", "bf16", "bf16 kv e4m3", "e4m3 out bf16"];
        let mut run = Run::new(&sample, sizes, Distribution::Gaussian);
        let rows: Vec<Row> = cases(&choice(&types)).iter().map(|case| run.row(case)).collect();
        assert_eq!(rows.len(), 3 + 2 + 2 + 4 * 2 + 1 + 4 * 3 + 1);
        for row in &rows {
            let Outcome::Errors(errors) = row.outcome else { panic!("{row:?}") };
            let (least, most) = match (row.types.as_str(), row.computed_by.as_str()) {
                ("f32", "cpu" | "model 3xTF32, 25 bits") => (1e-9, 1e-6),
                ("f32" | "f16", _) => (5e-5, 1e-3),
                ("bf16", _) => (5e-4, 8e-3),
                ("bf16 kv e4m3", _) => (0.01, 0.06),
                ("e4m3 out bf16", _) => (0.02, 0.09),
                other => panic!("{other:?}"),
            };
            assert!((least..most).contains(&errors.relative_l2), "{row:?}");
            assert!((errors.cosine - (1.0 - errors.relative_l2.powi(2) / 2.0)).abs() < 2e-3, "{row:?}");
            assert_eq!(row.saturated, 0);
        }
    }

    /// A scale of 1 is no scale; one that is too small saturates, and is counted.
    #[test]
    fn saturation_is_counted() {
        let sizes = Sizes { heads: 1, queries: 2, keys: 200, head_dim: 32 };
        let sample = Sample::draw(Distribution::Outliers, sizes, 3).expect("a sample");
        let mut run = Run::new(&sample, sizes, Distribution::Outliers);
        let mut row = |scale| {
            let quantization = Quantization::new("bf16 kv e4m3".parse().expect("types"), ScaleMode::Fixed(scale));
            run.row(&Case { quantization, by: Computation::F64 })
        };
        assert_eq!(row(1.0).saturated, 0);
        let small = row(1.0 / 448.0);
        assert!(small.saturated > 1000, "{small:?}");
        let Outcome::Errors(errors) = small.outcome else { panic!("{small:?}") };
        assert!(errors.relative_l2 > 0.2, "{errors:?}");
    }

    /// Smoothing is for keys with a mean, rotation for outliers.
    #[test]
    fn options_lower_the_errors_that_they_are_for() {
        let sizes = Sizes { heads: 1, queries: 64, keys: 500, head_dim: 64 };
        let check = |data, option: (bool, bool), factor: f64| {
            let sample = Sample::draw(data, sizes, 3).expect("a sample");
            let mut run = Run::new(&sample, sizes, data);
            let mut error = |(smooth, rotates): (bool, bool)| {
                let quantization = Quantization::new(ALL_FP8, ScaleMode::Tensor).with_smooth_keys(smooth);
                let quantization = quantization.with_rotation(rotates.then_some(ROTATION_SEED));
                let row = run.row(&Case { quantization, by: Computation::F64 });
                let Outcome::Errors(errors) = row.outcome else { panic!("{row:?}") };
                errors.relative_l2
            };
            let (without, with) = (error((false, false)), error(option));
            assert!(with < factor * without, "{data}: {with} and {without}");
        };
        check(Distribution::KeyMean, (true, false), 0.7);
        check(Distribution::Outliers, (false, true), 0.9);
    }

    #[test]
    fn a_refusal_is_a_row() {
        let sizes = Sizes { heads: 1, queries: 2, keys: 50, head_dim: 24 };
        let sample = Sample::draw(Distribution::Gaussian, sizes, 3).expect("a sample");
        let mut run = Run::new(&sample, sizes, Distribution::Gaussian);
        let quantization = Quantization::new("bf16 kv e4m3".parse().expect("types"), ScaleMode::Tensor);
        let row = run.row(&Case { quantization: quantization.with_rotation(Some(1)), by: Computation::F64 });
        let Outcome::Refused(reason) = row.outcome else { panic!("{row:?}") };
        assert!(reason.starts_with("a Hadamard rotation needs a head dimension"), "{reason}");
    }
}
