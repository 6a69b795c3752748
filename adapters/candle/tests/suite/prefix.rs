//! `mm_prefix_ranges`: ranges of positions whose rows and keys attend each other whatever the mask says.

use candle_core::{DType, Result, Tensor};
use flashcore_candle::{MOST_PREFIX_RANGES, flash_attn_varlen_paged_windowed_with_lse};

use crate::paged::{LENGTHS, Paged};
use crate::reference::{Options, assert_close, assert_close_lse, device, types};

/// Ranges of each sequence, the last of them empty: those that reach before the rows, into them, and past the last key.
const RANGES: [[(i32, i32); MOST_PREFIX_RANGES]; 4] = [
    [(3, 200), (505, 520), (7, 7)],
    [(0, 0), (0, 407), (9, 2)],
    [(2, 9), (5, 14), (30, 1000)],
    [(0, 12), (0, 0), (0, 0)],
];

fn check(count: usize, left: Option<usize>, right: Option<usize>) -> Result<()> {
    let flat: Vec<i32> =
        RANGES.iter().flat_map(|ranges| &ranges[..count]).flat_map(|&(start, end)| [start, end]).collect();
    let ranges = Tensor::from_vec(flat, (LENGTHS.len(), count, 2), &device())?;
    for &dtype in types() {
        let paged = Paged::new(dtype, 32, DType::U32)?;
        let options = |sequence: usize| Options {
            scale: 0.125,
            left,
            right,
            ranges: RANGES[sequence][..count].iter().map(|&(start, end)| (start.into(), end.into())).collect(),
            ..Options::default()
        };
        let (output, lse) = paged.expected(options)?;
        let Paged { q, k, v, block_table, seqlens_q, seqlens_k, page_size, .. } = &paged;
        let (actual, actual_lse) = flash_attn_varlen_paged_windowed_with_lse(
            q,
            k,
            v,
            seqlens_q,
            seqlens_k,
            block_table,
            Some(&ranges),
            33,
            530,
            0.125,
            left,
            right,
            *page_size,
            None,
        )?;
        let what = format!("{count} ranges, {left:?} {right:?}, {dtype:?}");
        assert_close(&actual, &output, &what)?;
        assert_close_lse(&actual_lse, &lse, &what)?;
    }
    Ok(())
}

#[test]
fn causal() -> Result<()> {
    check(1, None, Some(0))?;
    check(MOST_PREFIX_RANGES, None, Some(0))
}

#[test]
fn windows() -> Result<()> {
    check(2, Some(10), Some(0))?;
    check(MOST_PREFIX_RANGES, Some(10), Some(2))?;
    check(1, Some(0), None)
}

#[test]
fn without_a_mask_there_is_nothing_to_bypass() -> Result<()> {
    check(MOST_PREFIX_RANGES, None, None)?;
    check(0, None, Some(0))
}
