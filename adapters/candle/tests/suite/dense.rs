//! Tensors with a batch: `(batch, rows, heads, head_dim)`.

use candle_core::{DType, Result, Tensor};
use flashcore_candle as attention;

use crate::reference::{Options, among_nan, assert_close, assert_close_lse, attend, device, random, types};

const SCALE: f32 = 0.125;

struct Case {
    batch: usize,
    rows: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// More than three KV tiles with a ragged tail, decode, more rows than keys, narrow and wide heads.
const CASES: [Case; 5] = [
    Case { batch: 2, rows: 67, keys: 803, heads: 4, kv_heads: 2, head_dim: 64 },
    Case { batch: 3, rows: 1, keys: 531, heads: 6, kv_heads: 1, head_dim: 128 },
    Case { batch: 1, rows: 133, keys: 133, heads: 2, kv_heads: 2, head_dim: 40 },
    Case { batch: 2, rows: 21, keys: 9, heads: 2, kv_heads: 1, head_dim: 8 },
    Case { batch: 1, rows: 35, keys: 300, heads: 2, kv_heads: 1, head_dim: 256 },
];

impl Case {
    fn tensors(&self, dtype: DType, seed: u64) -> Result<[Tensor; 3]> {
        let Self { batch, rows, keys, heads, kv_heads, head_dim } = *self;
        Ok([
            random(&[batch, rows, heads, head_dim], dtype, seed)?,
            random(&[batch, keys, kv_heads, head_dim], dtype, seed + 1)?,
            random(&[batch, keys, kv_heads, head_dim], dtype, seed + 2)?,
        ])
    }
}

/// Output and log-sum-exp of every batch.
fn expected([q, k, v]: &[Tensor; 3], options: &Options) -> Result<(Tensor, Tensor)> {
    let (mut outputs, mut lses) = (vec![], vec![]);
    for batch in 0..q.dim(0)? {
        let (output, lse) = attend(&q.get(batch)?, &k.get(batch)?, &v.get(batch)?, options)?;
        outputs.push(output);
        lses.push(lse);
    }
    Ok((Tensor::stack(&outputs, 0)?, Tensor::stack(&lses, 0)?))
}

/// Compares a function with the reference for all cases and types, on tensors among NaN.
fn check(
    options: impl Fn(&Case) -> Options,
    function: impl Fn(&Tensor, &Tensor, &Tensor, &Options) -> Result<(Tensor, Option<Tensor>)>,
) -> Result<()> {
    for (number, case) in CASES.iter().enumerate() {
        let options = options(case);
        for &dtype in types() {
            let tensors = case.tensors(dtype, 10 * number as u64)?;
            let (output, lse) = expected(&tensors, &options)?;
            let [q, k, v] = [among_nan(&tensors[0])?, among_nan(&tensors[1])?, among_nan(&tensors[2])?];
            let (actual, actual_lse) = function(&q, &k, &v, &options)?;
            let what = format!("case {number}, {dtype:?}, {options:?}");
            assert_eq!(actual.dtype(), dtype, "{what}");
            assert!(actual.is_contiguous(), "{what}");
            assert_close(&actual, &output, &what)?;
            if let Some(actual) = actual_lse {
                assert_close_lse(&actual, &lse, &what)?;
            }
        }
    }
    Ok(())
}

fn slopes(heads: usize) -> Vec<f32> {
    (0..heads).map(|head| 0.3 / (head + 1) as f32).collect()
}

fn slope_tensor(options: &Options) -> Result<Tensor> {
    Tensor::new(options.slopes.clone().unwrap_or_default(), &device())
}

fn some_lse((output, lse): (Tensor, Tensor)) -> (Tensor, Option<Tensor>) {
    (output, Some(lse))
}

#[test]
fn every_key() -> Result<()> {
    let options = |_: &Case| Options { scale: SCALE, ..Options::default() };
    check(options, |q, k, v, options| Ok((attention::flash_attn(q, k, v, options.scale, false)?, None)))?;
    check(options, |q, k, v, options| attention::flash_attn_with_lse(q, k, v, options.scale, false).map(some_lse))
}

#[test]
fn causal() -> Result<()> {
    let options = |_: &Case| Options { scale: SCALE, right: Some(0), ..Options::default() };
    check(options, |q, k, v, options| Ok((attention::flash_attn(q, k, v, options.scale, true)?, None)))?;
    check(options, |q, k, v, options| attention::flash_attn_with_lse(q, k, v, options.scale, true).map(some_lse))
}

#[test]
fn windows() -> Result<()> {
    // Case 3 has more rows than keys, where a limit of as many keys as there are is one; more is none.
    for (left, right) in
        [(Some(7), Some(3)), (Some(200), Some(0)), (None, Some(5)), (Some(0), Some(0)), (Some(4), None)]
    {
        let options = |_: &Case| Options { scale: SCALE, left, right, ..Options::default() };
        check(options, |q, k, v, options| {
            attention::flash_attn_windowed_with_lse(q, k, v, options.scale, left, right).map(some_lse)
        })?;
        check(options, |q, k, v, options| {
            Ok((attention::flash_attn_windowed(q, k, v, options.scale, left, right)?, None))
        })?;
    }
    Ok(())
}

/// The numbers as they are: `f64` has all of the others.
fn bytes(tensor: &Tensor) -> Result<Vec<u64>> {
    let numbers = tensor.to_device(&candle_core::Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    Ok(numbers.into_iter().map(f64::to_bits).collect())
}

#[test]
fn limits_beyond_the_keys_are_none() -> Result<()> {
    let options = |_: &Case| Options { scale: SCALE, ..Options::default() };
    check(options, |q, k, v, options| {
        let beyond = Some(k.dim(1)? + 1);
        attention::flash_attn_windowed_with_lse(q, k, v, options.scale, beyond, beyond).map(some_lse)
    })
}

#[test]
fn alibi() -> Result<()> {
    let options = |case: &Case| Options { scale: SCALE, slopes: Some(slopes(case.heads)), ..Options::default() };
    check(options, |q, k, v, options| {
        let slopes = slope_tensor(options)?;
        attention::flash_attn_alibi_with_lse(q, k, v, &slopes, options.scale, false).map(some_lse)
    })?;
    let causal = |case: &Case| Options { right: Some(0), ..options(case) };
    check(causal, |q, k, v, options| {
        Ok((attention::flash_attn_alibi(q, k, v, &slope_tensor(options)?, options.scale, true)?, None))
    })?;
    let windowed = |case: &Case| Options { left: Some(60), right: Some(2), ..options(case) };
    // Case 3 has so few keys that both limits are reached.
    let limits = |options: &Options, keys: usize| (options.left.filter(|&left| left <= keys), options.right);
    check(windowed, |q, k, v, options| {
        let (slopes, (left, right)) = (slope_tensor(options)?, limits(options, k.dim(1)?));
        let output = attention::flash_attn_alibi_windowed(q, k, v, &slopes, options.scale, left, right)?;
        let (_, lse) = attention::flash_attn_alibi_windowed_with_lse(q, k, v, &slopes, options.scale, left, right)?;
        Ok((output, Some(lse)))
    })
}

#[test]
fn softcap() -> Result<()> {
    // Scores of a scale of 4 reach far beyond the cap.
    let options =
        |case: &Case| Options { scale: 4.0, softcap: 3.0, slopes: Some(slopes(case.heads)), ..Options::default() };
    check(options, |q, k, v, options| {
        let slopes = slope_tensor(options)?;
        attention::flash_attn_alibi_windowed_softcap_with_lse(
            q,
            k,
            v,
            Some(&slopes),
            options.scale,
            None,
            None,
            options.softcap,
        )
        .map(some_lse)
    })?;
    let without = |_: &Case| Options { scale: 4.0, softcap: 3.0, left: Some(5), right: Some(0), ..Options::default() };
    check(without, |q, k, v, options| {
        let (left, right) = (options.left, options.right);
        let output = attention::flash_attn_alibi_windowed_softcap(q, k, v, None, 4.0, left, right, options.softcap)?;
        Ok((output, None))
    })?;
    let none = |_: &Case| Options { scale: SCALE, ..Options::default() };
    check(none, |q, k, v, options| {
        let output = attention::flash_attn_alibi_windowed_softcap(q, k, v, None, options.scale, None, None, 0.0)?;
        Ok((output, None))
    })
}

#[test]
fn layouts_of_models() -> Result<()> {
    let options = Options { scale: SCALE, right: Some(0), ..Options::default() };
    let (batch, rows, heads, kv_heads, head_dim) = (2, 300, 4, 2, 64);
    let dtype = DType::F16;
    // Projections of q, k and v side by side, which candle narrows.
    let columns = (heads + 2 * kv_heads) * head_dim;
    let packed = random(&[batch, rows, columns], dtype, 77)?.reshape((batch, rows, heads + 2 * kv_heads, head_dim))?;
    let (q, k) = (packed.narrow(2, 0, heads)?, packed.narrow(2, heads, kv_heads)?);
    let v = packed.narrow(2, heads + kv_heads, kv_heads)?;
    let output = attention::flash_attn(&q, &k, &v, SCALE, true)?;
    assert_close(&output, &expected(&[q.clone(), k.clone(), v.clone()], &options)?.0, "packed")?;

    // `(batch, heads, rows, head_dim)`, transposed.
    let [q, k, v] =
        [q, k, v].map(|tensor| tensor.transpose(1, 2).and_then(|t| t.contiguous()).and_then(|t| t.transpose(1, 2)));
    let (q, k, v) = (q?, k?, v?);
    let transposed = attention::flash_attn(&q, &k, &v, SCALE, true)?;
    assert_close(&transposed, &output, "transposed")?;

    // One key and value for all batches, by a stride of 0.
    let (k, v) = (k.narrow(0, 1, 1)?, v.narrow(0, 1, 1)?);
    let wide = |tensor: &Tensor| tensor.broadcast_as((batch, rows, kv_heads, head_dim));
    let (k, v) = (wide(&k)?, wide(&v)?);
    let output = attention::flash_attn(&q, &k, &v, SCALE, true)?;
    assert_close(&output, &expected(&[q, k, v], &options)?.0, "broadcast")
}

#[test]
fn values_of_another_width_and_nothing_at_all() -> Result<()> {
    let q = random(&[2, 33, 2, 64], DType::F32, 5)?;
    let (k, v) = (random(&[2, 401, 2, 64], DType::F32, 6)?, random(&[2, 401, 2, 24], DType::F32, 7)?);
    let output = attention::flash_attn(&q, &k, &v, SCALE, false)?;
    let options = Options { scale: SCALE, ..Options::default() };
    assert_close(&output, &expected(&[q.clone(), k.clone(), v.clone()], &options)?.0, "24 columns")?;

    let none = |tensor: &Tensor| tensor.narrow(1, 0, 0);
    let (output, lse) = attention::flash_attn_with_lse(&q, &none(&k)?, &none(&v)?, SCALE, false)?;
    assert_eq!(output.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    assert!(lse.flatten_all()?.to_vec1::<f32>()?.into_iter().all(|lse| lse == f32::NEG_INFINITY));
    assert_eq!(attention::flash_attn(&none(&q)?, &k, &v, SCALE, false)?.dims(), [2, 0, 2, 24]);
    Ok(())
}

#[test]
fn threads_share_plans() -> Result<()> {
    let tensors = CASES.iter().enumerate().map(|(number, case)| case.tensors(DType::BF16, 100 + number as u64));
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let attend = |[q, k, v]: &[Tensor; 3]| bytes(&attention::flash_attn(q, k, v, SCALE, true)?);
    let alone = tensors.iter().map(attend).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (tensors, alone) = (&tensors, &alone);
            scope.spawn(move || {
                for round in 0..5 {
                    let case = (thread + round) % tensors.len();
                    assert_eq!(attend(&tensors[case]).unwrap(), alone[case], "thread {thread}, round {round}");
                }
            });
        }
    });
    Ok(())
}
