//! Packed rows over a paged KV cache.

use candle_core::{DType, Device, Result, Tensor};
use flashcore_candle as attention;

use crate::reference::{Options, assert_close, assert_close_lse, attend, device, random, types};
use crate::varlen::cumulative;

/// Rows and keys of each sequence: chunked prefill, decode, a first prompt, nothing.
pub(crate) const LENGTHS: [(usize, usize); 4] = [(19, 530), (1, 407), (33, 33), (0, 12)];
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;

/// Sequences as they are, and the same in shuffled pages.
pub(crate) struct Paged {
    pub(crate) q: Tensor,
    /// Keys and values of each sequence.
    pub(crate) sequences: Vec<(Tensor, Tensor)>,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) block_table: Tensor,
    pub(crate) seqlens_q: Tensor,
    pub(crate) seqlens_k: Tensor,
    pub(crate) page_size: usize,
}

impl Paged {
    /// Pages of all sequences, interleaved and from the last to the first, between pages of NaN. Rows of a page past the
    /// last key are NaN, entries of the table past the last page are impossible.
    pub(crate) fn new(dtype: DType, page_size: usize, table_type: DType) -> Result<Self> {
        let rows = LENGTHS.iter().map(|(rows, _)| rows).sum();
        let q = random(&[rows, HEADS, HEAD_DIM], dtype, 21)?;
        let most_pages = LENGTHS.iter().map(|(_, keys)| keys.div_ceil(page_size)).max().unwrap_or(0) + 1;
        let page_count = LENGTHS.len() * most_pages + 1;
        let nan = |rows: usize| -> Result<Tensor> {
            Tensor::full(f64::NAN, (rows, KV_HEADS, HEAD_DIM), &Device::Cpu)?.to_dtype(dtype)?.to_device(&device())
        };
        let (mut k_pages, mut v_pages) = (vec![nan(page_size)?; page_count], vec![nan(page_size)?; page_count]);
        // A table with a column on each side, of which the middle is taken: its rows are not adjacent.
        let mut table = vec![i64::from(i32::MAX); LENGTHS.len() * (most_pages + 2)];
        let mut sequences = vec![];
        for (sequence, (_, keys)) in LENGTHS.into_iter().enumerate() {
            let k = random(&[keys, KV_HEADS, HEAD_DIM], dtype, 30 + sequence as u64)?;
            let v = random(&[keys, KV_HEADS, HEAD_DIM], dtype, 40 + sequence as u64)?;
            for page in 0..keys.div_ceil(page_size) {
                let (first, count) = (page * page_size, page_size.min(keys - page * page_size));
                let place = page_count - 1 - (page * LENGTHS.len() + sequence);
                let filled =
                    |tensor: &Tensor| Tensor::cat(&[tensor.narrow(0, first, count)?, nan(page_size - count)?], 0);
                (k_pages[place], v_pages[place]) = (filled(&k)?, filled(&v)?);
                table[sequence * (most_pages + 2) + 1 + page] = place as i64;
            }
            sequences.push((k, v));
        }
        let table = match table_type {
            DType::U32 => {
                let entries = table.into_iter().map(|page| u32::try_from(page).unwrap_or(u32::MAX)).collect();
                Tensor::from_vec::<_, u32>(entries, (LENGTHS.len(), most_pages + 2), &device())?
            }
            _ => {
                let entries = table.into_iter().map(|page| page as i32).collect();
                Tensor::from_vec::<_, i32>(entries, (LENGTHS.len(), most_pages + 2), &device())?
            }
        };
        Ok(Self {
            q,
            sequences,
            k: Tensor::stack(&k_pages, 0)?,
            v: Tensor::stack(&v_pages, 0)?,
            block_table: table.narrow(1, 1, most_pages)?,
            seqlens_q: cumulative(LENGTHS.iter().map(|(rows, _)| *rows))?,
            seqlens_k: cumulative(LENGTHS.iter().map(|(_, keys)| *keys))?,
            page_size,
        })
    }

    /// Options may differ from sequence to sequence.
    pub(crate) fn expected(&self, options: impl Fn(usize) -> Options) -> Result<(Tensor, Tensor)> {
        let (mut outputs, mut lses, mut row) = (vec![], vec![], 0);
        for (index, ((k, v), (rows, _))) in self.sequences.iter().zip(LENGTHS).enumerate() {
            if rows > 0 {
                let (output, lse) = attend(&self.q.narrow(0, row, rows)?, k, v, &options(index))?;
                outputs.push(output);
                lses.push(lse);
            }
            row += rows;
        }
        Ok((Tensor::cat(&outputs, 0)?, Tensor::cat(&lses, 1)?))
    }
}

#[test]
fn pages_of_any_size() -> Result<()> {
    for (page_size, table_type) in [(32, DType::U32), (16, DType::I32), (7, DType::U32), (256, DType::I32)] {
        for &dtype in types() {
            for (left, right) in [(None, Some(0)), (Some(100), Some(0)), (None, None)] {
                let paged = Paged::new(dtype, page_size, table_type)?;
                let options = Options { scale: 0.125, left, right, ..Options::default() };
                let (output, lse) = paged.expected(|_| options.clone())?;
                let Paged { q, k, v, block_table, seqlens_q, seqlens_k, .. } = &paged;
                // The second bound is more than the table has pages for.
                for most_keys in [530, 10_000] {
                    let (actual, actual_lse) = attention::flash_attn_varlen_paged_windowed_with_lse(
                        q,
                        k,
                        v,
                        seqlens_q,
                        seqlens_k,
                        block_table,
                        None,
                        33,
                        most_keys,
                        0.125,
                        left,
                        right,
                        page_size,
                        None,
                    )?;
                    let what = format!("pages of {page_size}, {dtype:?}, {options:?}");
                    assert_close(&actual, &output, &what)?;
                    assert_close_lse(&actual_lse, &lse, &what)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn softcap_and_lengths_that_begin_anywhere() -> Result<()> {
    let paged = Paged::new(DType::F16, 32, DType::U32)?;
    let options = Options { scale: 2.0, softcap: 3.0, right: Some(0), ..Options::default() };
    let (output, _) = paged.expected(|_| options.clone())?;
    let Paged { q, k, v, block_table, seqlens_q, seqlens_k, page_size, .. } = &paged;
    // With pages only differences of `seqlens_k` matter.
    let shifted = (seqlens_k + 5.0)?;
    for seqlens_k in [seqlens_k, &shifted] {
        let actual = attention::flash_attn_varlen_paged_windowed(
            q,
            k,
            v,
            seqlens_q,
            seqlens_k,
            block_table,
            None,
            33,
            530,
            2.0,
            None,
            Some(0),
            *page_size,
            Some(3.0),
        )?;
        assert_close(&actual, &output, "softcap")?;
    }
    Ok(())
}
