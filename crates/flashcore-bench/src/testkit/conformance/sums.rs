//! The bits that the tensor cores of a recorded GPU keep when they add: the one number of
//! [`TensorSum::Truncating`] that repeats its results.

use core::ops::RangeInclusive;

use flashcore_sim::TensorSum;

use super::executor::{Executor, SimExecutor};
use super::hash::from_base64;
use super::record::{OutputRecord, Record, RecordError, cases_of};
use flashcore_ir::Arch;

/// Cases whose terms differ much in size.
const TELLING: [&str; 3] = ["normal", "wide", "no accumulator"];

/// Fit of the model to the recorded sums of one form of product, by the bits that it keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SumFit {
    /// The form of the product.
    pub product: String,
    /// Finite sums compared.
    pub elements: usize,
    /// The number of those that differ, for each number of bits below the largest exponent.
    pub differing: Vec<(u32, usize)>,
}

impl SumFit {
    /// The bits with the fewest differing sums, and their number.
    pub fn best(&self) -> (u32, usize) {
        self.differing.iter().copied().min_by_key(|(_, count)| *count).unwrap_or_default()
    }
}

/// Fits the model to the sums in `f32` of a record: tries so many bits below the largest exponent.
pub fn fit_sums(record: &Record, fractions: RangeInclusive<u32>) -> Result<Vec<SumFit>, RecordError> {
    let target: Arch = record.header.target.parse()?;
    let mut fits: Vec<SumFit> = Vec::new();
    for case in cases_of(target) {
        let Some((product, fill)) = case.name.split_once(", ") else { continue };
        let is_sum =
            ["MmaFp8", "WgmmaFp8"].contains(&case.operation) || case.operation == "Mma" && product.ends_with("in f32");
        let Some(recorded) = record.cases.iter().find(|recorded| recorded.name == case.name) else { continue };
        if !is_sum || !TELLING.contains(&fill) {
            continue;
        }
        let inputs = case.input_bytes(record.header.seed);
        if case.fingerprint(&inputs) != recorded.fingerprint {
            continue;
        }
        let kernel = case.verified(target).map_err(|mut errors| RecordError::Verify {
            case: case.name.clone(),
            error: Box::new(errors.swap_remove(0)),
        })?;
        let index = fits.iter().position(|fit| fit.product == product).unwrap_or_else(|| {
            let differing = fractions.clone().map(|fraction| (fraction, 0)).collect();
            fits.push(SumFit { product: product.to_owned(), elements: 0, differing });
            fits.len() - 1
        });
        let fit = &mut fits[index];
        let device: Vec<Vec<f32>> = recorded.outputs.iter().map(singles).collect();
        fit.elements += device.iter().flatten().filter(|value| value.is_finite()).count();
        for (fraction, count) in &mut fit.differing {
            let tensor_sum = TensorSum::Truncating { fraction: *fraction, fp8_fraction: *fraction };
            let executor = SimExecutor { tensor_sum, ..SimExecutor::default() };
            let executed = executor.execute_case(&case, &kernel, &inputs);
            let simulated = executed.map_err(|source| RecordError::Execute { case: case.name.clone(), source })?;
            for (device, simulated) in device.iter().zip(&simulated) {
                let pairs = device.iter().zip(simulated.chunks_exact(4));
                // Zeros of either sign are equal.
                *count += pairs.filter(|(device, bytes)| device.is_finite() && **device != single(bytes)).count();
            }
        }
    }
    Ok(fits)
}

/// The numbers of an output that was kept; none of one that was hashed.
fn singles(output: &OutputRecord) -> Vec<f32> {
    let OutputRecord::Bytes(text) = output else { return Vec::new() };
    from_base64(text).unwrap_or_default().chunks_exact(4).map(single).collect()
}

fn single(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
