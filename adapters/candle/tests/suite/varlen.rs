//! Packed sequences: `(rows, heads, head_dim)` and cumulative lengths.

use candle_core::{DType, Device, Result, Tensor};
use flashcore_candle as attention;

use crate::reference::{Options, among_nan, assert_close, assert_close_lse, attend, device, random, types};

const SCALE: f32 = 0.2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
/// Rows and keys of each sequence: none of either, one row, more rows than keys, more than three KV tiles.
const LENGTHS: [(usize, usize); 6] = [(5, 700), (0, 3), (1, 401), (37, 37), (12, 4), (3, 0)];
/// Rows at the end that belong to no sequence.
const UNUSED: usize = 2;

pub(crate) fn cumulative(lengths: impl Iterator<Item = usize>) -> Result<Tensor> {
    let mut offsets = vec![0_u32];
    for length in lengths {
        offsets.push(offsets[offsets.len() - 1] + length as u32);
    }
    Tensor::new(offsets, &device())
}

struct Packed {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens_q: Tensor,
    seqlens_k: Tensor,
}

impl Packed {
    fn new(dtype: DType) -> Result<Self> {
        let (rows, keys) = LENGTHS.iter().fold((0, 0), |(rows, keys), (q, k)| (rows + q, keys + k));
        let nan = |rows, heads| {
            Tensor::full(f64::NAN, (rows, heads, HEAD_DIM), &Device::Cpu)?.to_dtype(dtype)?.to_device(&device())
        };
        let packed = |rows, heads, seed| {
            let used = random(&[rows, heads, HEAD_DIM], dtype, seed)?;
            among_nan(&Tensor::cat(&[&used, &nan(UNUSED, heads)?], 0)?)
        };
        Ok(Self {
            q: packed(rows, HEADS, 1)?,
            k: packed(keys, KV_HEADS, 2)?,
            v: packed(keys, KV_HEADS, 3)?,
            seqlens_q: cumulative(LENGTHS.iter().map(|(rows, _)| *rows))?,
            seqlens_k: cumulative(LENGTHS.iter().map(|(_, keys)| *keys))?,
        })
    }

    fn expected(&self, options: &Options) -> Result<(Tensor, Tensor)> {
        let (mut outputs, mut lses) = (vec![], vec![]);
        let (mut row, mut key) = (0, 0);
        for (rows, keys) in LENGTHS {
            if rows > 0 {
                let (k, v) = (self.k.narrow(0, key, keys)?, self.v.narrow(0, key, keys)?);
                let (output, lse) = attend(&self.q.narrow(0, row, rows)?, &k, &v, options)?;
                outputs.push(output);
                lses.push(lse);
            }
            (row, key) = (row + rows, key + keys);
        }
        outputs.push(Tensor::zeros((UNUSED, HEADS, HEAD_DIM), DType::F64, &Device::Cpu)?);
        lses.push(Tensor::zeros((HEADS, UNUSED), DType::F64, &Device::Cpu)?);
        Ok((Tensor::cat(&outputs, 0)?, Tensor::cat(&lses, 1)?))
    }
}

type Result2 = Result<(Tensor, Option<Tensor>)>;

fn check(options: &Options, function: impl Fn(&Packed, &Options) -> Result2) -> Result<()> {
    for &dtype in types() {
        let packed = Packed::new(dtype)?;
        let (output, lse) = packed.expected(options)?;
        let (actual, actual_lse) = function(&packed, options)?;
        let what = format!("{dtype:?}, {options:?}");
        assert_eq!(actual.dtype(), dtype, "{what}");
        assert_close(&actual, &output, &what)?;
        if let Some(actual) = actual_lse {
            assert_close_lse(&actual, &lse, &what)?;
        }
    }
    Ok(())
}

fn some_lse((output, lse): (Tensor, Tensor)) -> (Tensor, Option<Tensor>) {
    (output, Some(lse))
}

fn plain() -> Options {
    Options { scale: SCALE, ..Options::default() }
}

fn with_slopes(options: Options) -> Options {
    Options { slopes: Some(vec![0.5, 0.25, 0.125, 0.0625]), ..options }
}

#[test]
fn every_key_and_causal() -> Result<()> {
    // Bounds may be larger than any sequence.
    for (most_rows, most_keys) in [(37, 700), (1000, 5000)] {
        check(&plain(), |Packed { q, k, v, seqlens_q, seqlens_k }, options| {
            let scale = options.scale;
            attention::flash_attn_varlen_with_lse(q, k, v, seqlens_q, seqlens_k, most_rows, most_keys, scale, false)
                .map(some_lse)
        })?;
        let causal = Options { right: Some(0), ..plain() };
        check(&causal, |Packed { q, k, v, seqlens_q, seqlens_k }, options| {
            let scale = options.scale;
            let output =
                attention::flash_attn_varlen(q, k, v, seqlens_q, seqlens_k, most_rows, most_keys, scale, true)?;
            Ok((output, None))
        })?;
    }
    Ok(())
}

#[test]
fn windows() -> Result<()> {
    for (left, right) in [(Some(3), Some(2)), (Some(300), Some(0)), (None, Some(1)), (Some(5), None)] {
        check(&Options { left, right, ..plain() }, |Packed { q, k, v, seqlens_q, seqlens_k }, options| {
            attention::flash_attn_varlen_windowed_with_lse(
                q,
                k,
                v,
                seqlens_q,
                seqlens_k,
                37,
                700,
                options.scale,
                left,
                right,
            )
            .map(some_lse)
        })?;
    }
    check(&plain(), |Packed { q, k, v, seqlens_q, seqlens_k }, options| {
        // More than the bound of keys is no limit.
        let limit = Some(701);
        let scale = options.scale;
        let output =
            attention::flash_attn_varlen_windowed(q, k, v, seqlens_q, seqlens_k, 37, 700, scale, limit, limit)?;
        Ok((output, None))
    })
}

#[test]
fn alibi() -> Result<()> {
    let slopes = |options: &Options| Tensor::new(options.slopes.clone().unwrap_or_default(), &device());
    check(&with_slopes(plain()), |Packed { q, k, v, seqlens_q, seqlens_k }, options| {
        let (slopes, scale) = (slopes(options)?, options.scale);
        attention::flash_attn_varlen_alibi_with_lse(q, k, v, &slopes, seqlens_q, seqlens_k, 37, 700, scale, false)
            .map(some_lse)
    })?;
    let causal = with_slopes(Options { right: Some(0), ..plain() });
    check(&causal, |Packed { q, k, v, seqlens_q, seqlens_k }, options| {
        let (slopes, scale) = (slopes(options)?, options.scale);
        let output = attention::flash_attn_varlen_alibi(q, k, v, &slopes, seqlens_q, seqlens_k, 37, 700, scale, true)?;
        Ok((output, None))
    })?;
    let windowed = with_slopes(Options { left: Some(9), right: Some(4), ..plain() });
    check(&windowed, |Packed { q, k, v, seqlens_q, seqlens_k }, options| {
        let (slopes, scale, left, right) = (slopes(options)?, options.scale, options.left, options.right);
        let output = attention::flash_attn_varlen_alibi_windowed(
            q, k, v, &slopes, seqlens_q, seqlens_k, 37, 700, scale, left, right,
        )?;
        let (same, lse) = attention::flash_attn_varlen_alibi_windowed_with_lse(
            q, k, v, &slopes, seqlens_q, seqlens_k, 37, 700, scale, left, right,
        )?;
        assert_close(&same, &output.to_dtype(DType::F64)?, "the same")?;
        Ok((output, Some(lse)))
    })
}

#[test]
fn softcap() -> Result<()> {
    let slopes = [0.5_f32, 0.25, 0.125, 0.0625];
    for alibi in [false, true] {
        let options = Options { scale: 3.0, softcap: 2.5, left: Some(50), right: Some(0), ..Options::default() };
        let options = if alibi { with_slopes(options) } else { options };
        check(&options, |Packed { q, k, v, seqlens_q, seqlens_k }, options| {
            let slopes = Tensor::new(&slopes, &device())?;
            let slopes = options.slopes.as_ref().map(|_| &slopes);
            let (scale, left, right, softcap) = (options.scale, options.left, options.right, options.softcap);
            let output = attention::flash_attn_varlen_alibi_windowed_softcap(
                q, k, v, slopes, seqlens_q, seqlens_k, 37, 700, scale, left, right, softcap,
            )?;
            let (_, lse) = attention::flash_attn_varlen_alibi_windowed_softcap_with_lse(
                q, k, v, slopes, seqlens_q, seqlens_k, 37, 700, scale, left, right, softcap,
            )?;
            Ok((output, Some(lse)))
        })?;
    }
    Ok(())
}
