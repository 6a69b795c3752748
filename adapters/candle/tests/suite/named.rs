//! The crate under the name of the one whose place it takes, on the shapes of that one's tests; and the functions of v3.

use candle_core::{CustomOp3, D, DType, Device, IndexOp, Result, Tensor};

use crate::reference::{Options, assert_close, attend, device, random};
use crate::varlen::cumulative;

/// Attention of `(batch, heads, rows, head_dim)` by matmul and softmax, in `f32`, rounded at the end.
fn eager(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, softcap: Option<f64>) -> Result<Tensor> {
    let [q, k, v] = [q, k, v].map(|tensor| tensor.to_dtype(DType::F32).and_then(|tensor| tensor.contiguous()));
    let (q, k, v, dtype) = (q?, k?, v?, DType::F16);
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * scale)?;
    if let Some(softcap) = softcap {
        scores = ((scores / softcap)?.tanh()? * softcap)?;
    }
    candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?.to_dtype(dtype)
}

/// `(batch, heads, rows, head_dim)` of `f16`, numbers that rise slowly.
fn rising(shape: (usize, usize, usize, usize), [q, k, v]: [f64; 3]) -> Result<[Tensor; 3]> {
    let (a, b, c, d) = shape;
    let all = Tensor::arange(0u32, (a * b * c * d) as u32, &device())?.to_dtype(DType::F16)?.reshape(shape)?;
    Ok([(&all / q)?, (&all / k)?, (&all / v)?])
}

fn swap(tensor: &Tensor) -> Result<Tensor> {
    tensor.transpose(1, 2)
}

fn rows(tensor: &Tensor) -> Result<Vec<Vec<Vec<f32>>>> {
    tensor.to_device(&Device::Cpu)?.i(0)?.to_dtype(DType::F32)?.to_vec3::<f32>()
}

#[test]
fn three_heads_of_two_rows_to_the_last_bit() -> Result<()> {
    let [q, k, v] = rising((1, 3, 2, 8), [30., 40., 50.])?;
    let output = swap(&candle_flash_attn::flash_attn(&swap(&q)?, &swap(&k)?, &swap(&v)?, 0.5, false)?)?;
    assert_eq!(rows(&output)?, rows(&eager(&q, &k, &v, 0.5, None)?)?);
    Ok(())
}

#[test]
fn three_heads_of_five_rows_with_a_softcap() -> Result<()> {
    let [q, k, v] = rising((1, 3, 5, 8), [30., 40., 50.])?;
    let (a, b, c) = (swap(&q)?, swap(&k)?, swap(&v)?);
    let output = candle_flash_attn::flash_attn_alibi_windowed_softcap(&a, &b, &c, None, 1.0, None, None, 5.0)?;
    let difference =
        (swap(&output)?.to_dtype(DType::F32)? - eager(&q, &k, &v, 1.0, Some(5.0))?.to_dtype(DType::F32)?)?;
    assert!(difference.abs()?.max_all()?.to_scalar::<f32>()? < 1e-3, "{difference}");
    Ok(())
}

#[test]
fn one_packed_sequence_within_a_larger_bound() -> Result<()> {
    let [q, k, v] = rising((1, 3, 2, 8), [30., 40., 50.])?;
    let [a, b, c] = [&q, &k, &v].map(|tensor| tensor.squeeze(0).and_then(|tensor| tensor.transpose(0, 1)));
    let seqlens = cumulative([2].into_iter())?;
    let output = candle_flash_attn::flash_attn_varlen(&a?, &b?, &c?, &seqlens, &seqlens, 32, 32, 0.5, false)?;
    let output = output.transpose(0, 1)?.unsqueeze(0)?;
    assert_eq!(rows(&output)?, rows(&eager(&q, &k, &v, 0.5, None)?)?);
    Ok(())
}

#[test]
fn a_cache_in_order_and_shuffled() -> Result<()> {
    let (rows, page_size, pool) = (296, 32, 17);
    // GPU kernels have head dims up to 256.
    let head_dims: &[usize] = if device().is_cuda() { &[256] } else { &[256, 512] };
    for &head_dim in head_dims {
        let q = random(&[rows, 8, head_dim], DType::BF16, 1)?;
        let (k, v) = (random(&[rows, 2, head_dim], DType::BF16, 2)?, random(&[rows, 2, head_dim], DType::BF16, 3)?);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let options = Options { scale, left: Some(1024), right: Some(0), ..Options::default() };
        let (expected, _) = attend(&q, &k, &v, &options)?;
        let seqlens = cumulative([rows].into_iter())?;
        let pages = rows.div_ceil(page_size);
        for stride in [1, 5] {
            let places: Vec<u32> = (0..pages).map(|page| ((page * stride + 3) % pool) as u32).collect();
            let scatter = |tensor: &Tensor| -> Result<Tensor> {
                let zeros = Tensor::zeros((page_size, 2, head_dim), DType::BF16, &device())?;
                let mut cache = vec![zeros.clone(); pool];
                let padded = Tensor::cat(&[tensor, &zeros], 0)?;
                for (page, &place) in places.iter().enumerate() {
                    cache[place as usize] = padded.narrow(0, page * page_size, page_size)?;
                }
                Tensor::stack(&cache, 0)
            };
            let table = Tensor::from_slice(&places, (1, pages), &device())?;
            let output = candle_flash_attn::flash_attn_varlen_paged_windowed(
                &q,
                &scatter(&k)?,
                &scatter(&v)?,
                &seqlens,
                &seqlens,
                &table,
                None,
                rows,
                rows,
                scale,
                Some(1024),
                Some(0),
                page_size,
                None,
            )?;
            assert_close(&output, &expected, &format!("head dim {head_dim}, stride {stride}"))?;
        }
    }
    Ok(())
}

#[test]
fn v3_on_its_shapes() -> Result<()> {
    use candle_flash_attn::v3;

    // Four query heads share one KV head.
    let (q, k) = (random(&[1, 2, 4, 64], DType::F16, 1)?, random(&[1, 2, 1, 64], DType::F16, 2)?);
    let (expected, _) = attend(&q.get(0)?, &k.get(0)?, &k.get(0)?, &Options { scale: 0.125, ..Options::default() })?;
    for packing in [false, true] {
        assert_close(&v3::flash_attn(&q, &k, &k, 0.125, false, packing)?.get(0)?, &expected, "GQA")?;
    }
    let head_dims: &[usize] = if device().is_cuda() { &[64, 128, 256] } else { &[64, 128, 256, 512] };
    for &head_dim in head_dims {
        for rows in [2, 4, 9] {
            let q = random(&[rows, 3, head_dim], DType::F16, 3)?;
            let (k, v) = (random(&[rows, 3, head_dim], DType::F16, 4)?, random(&[rows, 3, head_dim], DType::F16, 5)?);
            let seqlens = cumulative([rows].into_iter())?;
            let output = v3::flash_attn_varlen(&q, &k, &v, &seqlens, &seqlens, rows, rows, 0.5, false, false)?;
            let (expected, _) = attend(&q, &k, &v, &Options { scale: 0.5, ..Options::default() })?;
            assert_close(&output, &expected, &format!("{rows} rows of head dim {head_dim}"))?;
        }
    }
    Ok(())
}

#[test]
fn v3_is_the_same_with_one_more_argument() -> Result<()> {
    use candle_flash_attn as v2;
    use candle_flash_attn::v3;

    let (q, k, v) = (
        random(&[1, 40, 4, 64], DType::F16, 1)?,
        random(&[1, 410, 2, 64], DType::F16, 2)?,
        random(&[1, 410, 2, 64], DType::F16, 3)?,
    );
    let (q, k, v) = (&q, &k, &v);
    let slopes = &Tensor::new(&[0.5_f32, 0.25, 0.125, 0.0625], &device())?;
    let (left, right) = (Some(50), Some(1));
    let same = |(a, b): (Result<(Tensor, Tensor)>, Result<(Tensor, Tensor)>), without: Result<Tensor>| -> Result<()> {
        let ((a, a_lse), (b, b_lse), without) = (a?, b?, without?);
        let numbers = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        assert_eq!(numbers(&a)?, numbers(&b)?);
        // With and without the log-sum-exp are two plans, whose bits may differ.
        assert_close(&without, &a.to_dtype(DType::F64)?, "without the log-sum-exp")?;
        assert_eq!(numbers(&a_lse)?, numbers(&b_lse)?);
        Ok(())
    };
    same(
        (v3::flash_attn_with_lse(q, k, v, 0.1, true, true), v2::flash_attn_with_lse(q, k, v, 0.1, true)),
        v3::flash_attn(q, k, v, 0.1, true, false),
    )?;
    same(
        (
            v3::flash_attn_windowed_with_lse(q, k, v, 0.1, left, right, true),
            v2::flash_attn_windowed_with_lse(q, k, v, 0.1, left, right),
        ),
        v3::flash_attn_windowed(q, k, v, 0.1, left, right, false),
    )?;
    same(
        (
            v3::flash_attn_alibi_with_lse(q, k, v, slopes, 0.1, true, true),
            v2::flash_attn_alibi_with_lse(q, k, v, slopes, 0.1, true),
        ),
        v3::flash_attn_alibi(q, k, v, slopes, 0.1, true, false),
    )?;
    same(
        (
            v3::flash_attn_alibi_windowed_with_lse(q, k, v, slopes, 0.1, left, right, true),
            v2::flash_attn_alibi_windowed_with_lse(q, k, v, slopes, 0.1, left, right),
        ),
        v3::flash_attn_alibi_windowed(q, k, v, slopes, 0.1, left, right, false),
    )?;

    let [q, k, v] = [q, k, v].map(|tensor| tensor.squeeze(0));
    let (q, k, v) = (&q?, &k?, &v?);
    let (of_q, of_k) = (&cumulative([15, 25].into_iter())?, &cumulative([400, 10].into_iter())?);
    same(
        (
            v3::flash_attn_varlen_with_lse(q, k, v, of_q, of_k, 25, 400, 0.1, true, true),
            v2::flash_attn_varlen_with_lse(q, k, v, of_q, of_k, 25, 400, 0.1, true),
        ),
        v3::flash_attn_varlen(q, k, v, of_q, of_k, 25, 400, 0.1, true, false),
    )?;
    same(
        (
            v3::flash_attn_varlen_windowed_with_lse(q, k, v, of_q, of_k, 25, 400, 0.1, left, right, true),
            v2::flash_attn_varlen_windowed_with_lse(q, k, v, of_q, of_k, 25, 400, 0.1, left, right),
        ),
        v3::flash_attn_varlen_windowed(q, k, v, of_q, of_k, 25, 400, 0.1, left, right, false),
    )?;
    same(
        (
            v3::flash_attn_varlen_alibi_with_lse(q, k, v, slopes, of_q, of_k, 25, 400, 0.1, true, true),
            v2::flash_attn_varlen_alibi_with_lse(q, k, v, slopes, of_q, of_k, 25, 400, 0.1, true),
        ),
        v3::flash_attn_varlen_alibi(q, k, v, slopes, of_q, of_k, 25, 400, 0.1, true, false),
    )?;
    same(
        (
            v3::flash_attn_varlen_alibi_windowed_with_lse(q, k, v, slopes, of_q, of_k, 25, 400, 0.1, left, right, true),
            v2::flash_attn_varlen_alibi_windowed_with_lse(q, k, v, slopes, of_q, of_k, 25, 400, 0.1, left, right),
        ),
        v3::flash_attn_varlen_alibi_windowed(q, k, v, slopes, of_q, of_k, 25, 400, 0.1, left, right, false),
    )
}

#[test]
fn structs_are_operations() -> Result<()> {
    let (q, k) = (random(&[1, 40, 2, 64], DType::F16, 1)?, random(&[1, 410, 2, 64], DType::F16, 2)?);
    let options = Options { scale: 0.3, left: Some(30), right: Some(0), softcap: 2.0, ..Options::default() };
    let operation = candle_flash_attn::FlashAttn {
        softmax_scale: 0.3,
        alibi_slopes: None,
        window_size_left: Some(30),
        window_size_right: Some(0),
        softcap: Some(2.0),
    };
    assert_eq!(operation.name(), "flash-attn");
    let (expected, _) = attend(&q.get(0)?, &k.get(0)?, &k.get(0)?, &options)?;
    assert_close(&q.apply_op3(&k, &k, operation)?.get(0)?, &expected, "FlashAttn")?;

    let operation = candle_flash_attn::v3::FlashAttn {
        softmax_scale: 0.3,
        alibi_slopes: None,
        window_size_left: Some(30),
        window_size_right: Some(0),
        use_gqa_packing: true,
    };
    let (expected, _) = attend(&q.get(0)?, &k.get(0)?, &k.get(0)?, &Options { softcap: 0.0, ..options })?;
    assert_close(&q.apply_op3(&k, &k, operation)?.get(0)?, &expected, "v3::FlashAttn")
}
