//! Attention in plain `f64` loops, inputs, and comparison.

use candle_core::{DType, Device, Result, Tensor};

/// Everything about attention of one sequence but its tensors.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    pub(crate) scale: f32,
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
    pub(crate) softcap: f32,
    pub(crate) slopes: Option<Vec<f32>>,
    /// Ranges of positions whose rows and keys attend each other whatever the window says.
    pub(crate) ranges: Vec<(i64, i64)>,
}

/// Output `(rows, heads, columns)` and log-sum-exp `(heads, rows)` of one sequence.
pub(crate) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options) -> Result<(Tensor, Tensor)> {
    let (q, k, v) = (numbers(q)?, numbers(k)?, numbers(v)?);
    let (rows, keys) = (q.len() as i64, k.len() as i64);
    let (heads, kv_heads) = (q.first().map_or(0, Vec::len), k.first().map_or(1, Vec::len));
    let columns = v.first().map_or_else(|| q[0][0].len(), |row| row[0].len());
    let (mut output, mut lse) = (vec![], vec![0.0_f64; heads * q.len()]);
    for row in 0..rows {
        let position = row + keys - rows;
        for head in 0..heads {
            let kv_head = head * kv_heads / heads;
            let attended: Vec<(f64, &[f64])> = (0..keys)
                .filter(|&key| {
                    let in_window = options.left.is_none_or(|left| key >= position - left as i64)
                        && options.right.is_none_or(|right| key <= position + right as i64);
                    let inside = |&(start, end): &(i64, i64), place| start <= place && place < end;
                    in_window || options.ranges.iter().any(|range| inside(range, position) && inside(range, key))
                })
                .map(|key| {
                    let (query, keys) = (&q[row as usize][head], &k[key as usize][kv_head]);
                    let dot: f64 = query.iter().zip(keys).map(|(a, b)| a * b).sum();
                    let mut score = dot * f64::from(options.scale);
                    if options.softcap != 0.0 {
                        let softcap = f64::from(options.softcap);
                        score = softcap * (score / softcap).tanh();
                    }
                    if let Some(slopes) = &options.slopes {
                        score -= f64::from(slopes[head]) * (position - key).abs() as f64;
                    }
                    (score, v[key as usize][kv_head].as_slice())
                })
                .collect();
            let row_max = attended.iter().fold(f64::NEG_INFINITY, |most, (score, _)| most.max(*score));
            let row_sum: f64 = attended.iter().map(|(score, _)| (score - row_max).exp()).sum();
            lse[head * q.len() + row as usize] = row_sum.ln() + row_max;
            let column = |column: usize| -> f64 {
                attended.iter().map(|(score, value)| (score - row_max).exp() * value[column]).sum::<f64>() / row_sum
            };
            output.extend((0..columns).map(|index| if attended.is_empty() { 0.0 } else { column(index) }));
        }
    }
    let lse = lse.into_iter().map(|lse| if lse.is_nan() { f64::NEG_INFINITY } else { lse }).collect::<Vec<_>>();
    Ok((
        Tensor::from_vec(output, (q.len(), heads, columns), &Device::Cpu)?,
        Tensor::from_vec(lse, (heads, q.len()), &Device::Cpu)?,
    ))
}

fn numbers(tensor: &Tensor) -> Result<Vec<Vec<Vec<f64>>>> {
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec3::<f64>()
}

/// The device under test: the CPU, or GPU 0 if asked for.
pub(crate) fn device() -> Device {
    if cfg!(feature = "cuda") && std::env::var_os("FLASHCORE_CANDLE_CUDA").is_some() {
        return Device::new_cuda(0).expect("a GPU, as FLASHCORE_CANDLE_CUDA says");
    }
    Device::Cpu
}

/// Element types of the device under test.
pub(crate) fn types() -> &'static [DType] {
    if device().is_cuda() {
        &[DType::F16, DType::BF16, DType::F32]
    } else {
        &[DType::F16, DType::BF16, DType::F32, DType::F64]
    }
}

/// Independent numbers between -1 and 1.
pub(crate) fn random(shape: &[usize], dtype: DType, seed: u64) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D;
    let count = shape.iter().product();
    let numbers: Vec<f64> = std::iter::repeat_with(|| {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    })
    .take(count)
    .collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(&device())
}

/// The tensor as a part of a larger one that is NaN everywhere else. The columns stay adjacent.
pub(crate) fn among_nan(tensor: &Tensor) -> Result<Tensor> {
    let mut tensor = tensor.clone();
    for dimension in 0..tensor.rank() {
        // Sixteen bytes of alignment are what GPU kernels ask of columns.
        let padding = if dimension + 1 == tensor.rank() { 8 } else { 1 };
        let size = tensor.dim(dimension)?;
        let mut shape = tensor.dims().to_vec();
        shape[dimension] = padding;
        let nan = Tensor::full(f64::NAN, shape, &Device::Cpu)?.to_dtype(tensor.dtype())?.to_device(tensor.device())?;
        let padded = Tensor::cat(&[&nan, &tensor.contiguous()?, &nan], dimension)?;
        tensor = padded.narrow(dimension, padding, size)?;
    }
    Ok(tensor)
}

/// Largest difference of the output of attention, for values up to 1 in magnitude: of rounding the output and, in 16 bits,
/// the weights.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        DType::F32 => 2e-6,
        _ => 1e-13,
    }
}

/// Asserts that a tensor is another but for rounding.
pub(crate) fn assert_close(actual: &Tensor, expected: &Tensor, what: &str) -> Result<()> {
    assert_eq!(actual.dims(), expected.dims(), "{what}");
    assert_close_within(actual, expected, tolerance(actual.dtype()), what)
}

/// Asserts that a log-sum-exp is another. Scores are computed in `f32` from any 16-bit type.
pub(crate) fn assert_close_lse(actual: &Tensor, expected: &Tensor, what: &str) -> Result<()> {
    assert_eq!((actual.dims(), actual.dtype()), (expected.dims(), DType::F32), "{what}");
    assert_close_within(actual, expected, 2e-5, what)
}

fn assert_close_within(actual: &Tensor, expected: &Tensor, tolerance: f64, what: &str) -> Result<()> {
    let flat = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    for (index, (actual, expected)) in flat(actual)?.into_iter().zip(flat(expected)?).enumerate() {
        let is_close = actual == expected || (actual - expected).abs() <= tolerance;
        assert!(is_close, "{what}: {actual} at {index}, expected {expected} within {tolerance:e}");
    }
    Ok(())
}
