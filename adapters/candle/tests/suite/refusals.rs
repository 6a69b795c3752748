//! Messages for what cannot be computed.

use candle_core::{DType, Result, Tensor, Var};
use flashcore_candle as attention;

use crate::reference::{device, random};

fn check(result: Result<Tensor>, message: &str) {
    let error = result.expect_err(message).to_string();
    assert_eq!(error.lines().next(), Some(message));
}

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &device()).unwrap()
}

fn offsets(offsets: &[u32]) -> Tensor {
    Tensor::new(offsets, &device()).unwrap()
}

#[test]
fn types() {
    let (half, single, integer) = (DType::F16, DType::F32, DType::U8);
    let q = |dtype| zeros(&[1, 3, 2, 8], dtype);
    check(
        attention::flash_attn(&q(half), &q(single), &q(half), 1.0, false),
        "flash-attn: q is F16, k F32 and v F16; they must have one type: convert with to_dtype",
    );
    if !device().is_cuda() {
        check(
            attention::flash_attn(&q(integer), &q(integer), &q(integer), 1.0, false),
            "flash-attn: q, k and v are U8; on the CPU they can be F16, BF16, F32, F64: convert with to_dtype",
        );
    }
    let slopes = zeros(&[2], half);
    check(
        attention::flash_attn_alibi(&q(half), &q(half), &q(half), &slopes, 1.0, false),
        "flash-attn: alibi_slopes is F16; it must be F32: convert with to_dtype",
    );
}

#[test]
fn shapes() {
    let tensor = |shape: &[usize]| zeros(shape, DType::F16);
    let q = tensor(&[2, 3, 4, 8]);
    let cases: [(&[usize], &[usize], &str); 6] = [
        (&[3, 4, 8], &[2, 3, 4, 8], "k has 3 dimensions, [3, 4, 8]; it must be (batch, rows, heads, head_dim)"),
        (&[2, 3, 4, 16], &[2, 3, 4, 8], "k is [2, 3, 4, 16] and q [2, 3, 4, 8]; they must have the same head dim"),
        (
            &[2, 3, 4, 8],
            &[2, 5, 4, 8],
            "v is [2, 5, 4, 8] and k [2, 3, 4, 8]; they must have the same shape but for the head dim",
        ),
        (&[1, 3, 4, 8], &[1, 3, 4, 8], "k is [1, 3, 4, 8] and q [2, 3, 4, 8]; they must have the same batch"),
        (
            &[2, 3, 3, 8],
            &[2, 3, 3, 8],
            "query_heads is 4 and key_heads is 3; query_heads must be a multiple of key_heads",
        ),
        (&[2, 3, 0, 8], &[2, 3, 0, 8], "key_heads is 0; it must be at least 1"),
    ];
    for (k, v, message) in cases {
        check(attention::flash_attn(&q, &tensor(k), &tensor(v), 1.0, false), &format!("flash-attn: {message}"));
    }
    check(
        attention::flash_attn_alibi(&q, &q, &q, &zeros(&[3], DType::F32), 1.0, false),
        "flash-attn: alibi_slopes is [3]; it must be [4]",
    );
}

#[test]
fn columns_that_are_not_adjacent() -> Result<()> {
    let q = zeros(&[2, 3, 8, 4], DType::F16).transpose(2, 3)?;
    check(
        attention::flash_attn(&q, &q, &q, 1.0, false),
        "flash-attn: the columns of q are not adjacent: strides [96, 32, 1, 4]; copy it with contiguous()",
    );
    attention::flash_attn(&q.contiguous()?, &q.contiguous()?, &q.contiguous()?, 1.0, false)?;

    let q = zeros(&[2, 3, 4, 8], DType::F16);
    let every_other = zeros(&[4, 2], DType::F32).narrow(1, 0, 1)?.squeeze(1)?;
    check(
        attention::flash_attn_alibi(&q, &q, &q, &every_other, 1.0, false),
        "flash-attn: alibi_slopes has strides [2]; it must be contiguous: copy it with contiguous()",
    );
    Ok(())
}

#[test]
fn numbers() {
    let q = zeros(&[1, 3, 2, 8], DType::F32);
    check(
        attention::flash_attn(&q, &q, &q, f32::NAN, false),
        "flash-attn: scale is NaN; it must be finite, usually 1 / sqrt(head_dim)",
    );
    let result = attention::flash_attn_alibi_windowed_softcap(&q, &q, &q, None, 1.0, None, None, -2.0);
    assert!(result.unwrap_err().to_string().starts_with("flash-attn: softcap is -2"));
}

#[test]
fn lengths() {
    let q = zeros(&[10, 2, 8], DType::F16);
    let varlen = |of_q: &Tensor, of_k: &Tensor, most: usize| {
        attention::flash_attn_varlen(&q, &q, &q, of_q, of_k, most, most, 1.0, false)
    };
    let good = offsets(&[0, 4, 10]);
    let signed = good.to_dtype(DType::I64).unwrap();
    check(varlen(&signed, &good, 10), "flash-attn: seqlens_q is I64; it must be U32: convert with to_dtype");
    check(varlen(&good, &offsets(&[0, 10]), 10), "flash-attn: seqlens_k is [2]; it must be [3]");
    check(
        varlen(&offsets(&[0]), &offsets(&[0]), 10),
        "flash-attn: seqlens_q has 1 entries; it must have one more than there are sequences, at least 2",
    );
    if device().is_cuda() {
        return; // The numbers are on the device, where they are clamped.
    }
    for (of_q, most) in [([0, 7, 5], 10), ([0, 4, 11], 11), ([1, 4, 10], 10), ([0, 4, 10], 5)] {
        let error = varlen(&offsets(&of_q), &good, most).unwrap_err().to_string();
        assert!(error.starts_with("flash-attn: cu_seqlens_q"), "{error}");
    }
}

#[test]
fn pages() {
    let q = zeros(&[10, 2, 8], DType::F16);
    let cache = zeros(&[5, 16, 2, 8], DType::F16);
    let good = offsets(&[0, 4, 10]);
    let paged = |table: &Tensor, ranges: Option<&Tensor>, of_k: &Tensor, page_size: usize| {
        attention::flash_attn_varlen_paged_windowed(
            &q,
            &cache,
            &cache,
            &good,
            of_k,
            table,
            ranges,
            6,
            40,
            1.0,
            None,
            Some(0),
            page_size,
            None,
        )
    };
    let table = Tensor::new(&[[0_u32, 1], [2, 3]], &device()).unwrap();
    let keys = offsets(&[0, 20, 50]);
    paged(&table, None, &keys, 16).unwrap();
    check(
        paged(&table, None, &keys, 32),
        "flash-attn: page_block_size is 32, and k has pages of 16 rows; both must be the same",
    );
    check(
        paged(&table.get(0).unwrap(), None, &keys, 16),
        "flash-attn: block_table has 1 dimensions, [2]; it must be (batch, most pages)",
    );
    check(
        paged(&table.narrow(0, 0, 1).unwrap(), None, &keys, 16),
        "flash-attn: block_table has 1 rows and seqlens_q 3 entries; it must have 2 rows",
    );
    check(
        paged(&table.t().unwrap(), None, &keys, 16),
        "flash-attn: entries of block_table are not adjacent: strides [1, 2]; copy it with contiguous()",
    );
    let many = zeros(&[2, 9, 2], DType::I64).to_dtype(DType::I32).unwrap();
    check(
        paged(&table, Some(&many), &keys, 16),
        "flash-attn: mm_prefix_ranges has 9 ranges for each sequence; it can have up to 3",
    );
    check(
        paged(&table, Some(&zeros(&[2, 1, 2], DType::U32)), &keys, 16),
        "flash-attn: mm_prefix_ranges is U32; it must be I32: convert with to_dtype",
    );
    if device().is_cuda() {
        return; // The numbers are on the device, where they are clamped.
    }
    check(
        paged(&table, None, &offsets(&[0, 20, 10]), 16),
        "flash-attn: seqlens_k falls from 20 to 10 at sequence 1; it must never fall",
    );
    let missing = Tensor::new(&[[0_u32, 1], [2, u32::MAX]], &device()).unwrap();
    let error = paged(&missing, None, &keys, 16).unwrap_err().to_string();
    assert!(error.starts_with("flash-attn: ") && error.contains("page"), "{error}");
}

#[test]
fn gradients() -> Result<()> {
    let q = Var::from_tensor(&random(&[1, 3, 2, 8], DType::F32, 1)?)?;
    let message = "flash-attn has no backward pass; detach() its result, or compute attention with matmul and softmax \
                   where gradients are needed";
    let (output, lse) = attention::flash_attn_with_lse(&q, &q, &q, 1.0, false)?;
    for result in [&attention::flash_attn(&q, &q, &q, 1.0, false)?, &output, &lse] {
        let error = result.sum_all()?.backward().map(|_| ()).expect_err("no backward").to_string();
        assert_eq!(error.lines().next(), Some(message));
        result.detach().sum_all()?.backward()?;
    }
    Ok(())
}
