//! CPU tensors: candle's memory as it is, through the CPU backend.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType as Type, Error, Layout, Result, Shape, Storage, Tensor, WithDType, bail};
use flashcore::half::{bf16, f16};
use flashcore::{DType, HostElement, InputViews, OutputViews, Problem};

use crate::operation::{Lse, NAME, Operation, Sequences};
use crate::plans::{Place, plan};
use crate::problem::{element_type, lse_shape};

const TYPES: [(Type, DType); 4] =
    [(Type::F16, DType::F16), (Type::BF16, DType::Bf16), (Type::F32, DType::F32), (Type::F64, DType::F64)];

type Argument<'a> = (&'a CpuStorage, &'a Layout);

pub(crate) fn forward(operation: &Operation, q: Argument, k: Argument, v: Argument) -> Result<(CpuStorage, Shape)> {
    match element_type([q, k, v].map(|(storage, _)| storage.dtype()), &TYPES, "the CPU")? {
        DType::F16 => attend::<f16>(operation, q, k, v),
        DType::Bf16 => attend::<bf16>(operation, q, k, v),
        DType::F32 => attend::<f32>(operation, q, k, v),
        DType::F64 => attend::<f64>(operation, q, k, v),
        // Not among `TYPES`.
        DType::E4m3 | DType::E5m2 => bail!("{NAME}: FP8 is not taken yet: convert with to_dtype"),
    }
}

/// The elements from the first of a tensor on; what follows the last is not looked at.
fn from_first<'a, T>(data: &'a [T], layout: &Layout) -> &'a [T] {
    data.get(layout.start_offset()..).unwrap_or_default()
}

fn attend<T: HostElement + WithDType>(
    operation: &Operation,
    (q, q_layout): Argument,
    (k, k_layout): Argument,
    (v, v_layout): Argument,
) -> Result<(CpuStorage, Shape)> {
    let (problem, shape) = operation.problem(<T as HostElement>::DTYPE, q_layout, k_layout, v_layout)?;
    let plan = plan(&problem, Place::Cpu)?;

    let slopes = operation.alibi_slopes.as_ref().map(numbers::<f32>).transpose()?;
    let sequences = operation.sequences.as_ref().map(HostSequences::new).transpose()?;
    let mut inputs = InputViews::new(
        from_first(q.as_slice::<T>()?, q_layout),
        from_first(k.as_slice::<T>()?, k_layout),
        from_first(v.as_slice::<T>()?, v_layout),
    );
    if let Some(slopes) = &slopes {
        inputs = inputs.with_alibi_slopes(slopes);
    }
    if let Some(sequences) = &sequences {
        inputs = sequences.put_into(inputs, &problem);
    }

    let mut output = vec![T::from_f64(0.0); shape.elem_count()];
    let lse_shape = lse_shape(&problem);
    let mut lse = operation.lse.as_ref().map(|_| vec![0.0; lse_shape.elem_count()]);
    let mut outputs = OutputViews::new(&mut output);
    outputs.lse = lse.as_deref_mut();
    plan.run(inputs, outputs).map_err(|error| Error::msg(format!("{NAME}: {error}")).bt())?;
    if let (Some(slot), Some(lse)) = (&operation.lse, lse) {
        slot.put(Lse::Cpu(lse, lse_shape));
    }
    Ok((T::to_cpu_storage_owned(output), shape))
}

/// The arrays of packed sequences.
struct HostSequences {
    cu_seqlens_q: Vec<u32>,
    /// Offsets of packed keys.
    cu_seqlens_k: Option<Vec<u32>>,
    /// Numbers of keys in pages, and the pages.
    paged: Option<(Vec<u32>, Vec<i32>)>,
    /// The position of the first row of each sequence, and the ranges.
    prefix: Option<(Vec<f32>, Vec<i32>)>,
}

impl HostSequences {
    fn new(sequences: &Sequences) -> Result<Self> {
        let (cu_seqlens_q, offsets_k) = (numbers::<u32>(&sequences.seqlens_q)?, numbers::<u32>(&sequences.seqlens_k)?);
        let Some(pages) = &sequences.pages else {
            return Ok(Self { cu_seqlens_q, cu_seqlens_k: Some(offsets_k), paged: None, prefix: None });
        };
        let lengths_k = lengths("seqlens_k", &offsets_k)?;
        let prefix = match &pages.mm_prefix_ranges {
            None => None,
            Some(ranges) => {
                let lengths_q = lengths("seqlens_q", &cu_seqlens_q)?;
                let first = |(&keys, &rows): (&u32, &u32)| (i64::from(keys) - i64::from(rows)) as f32;
                Some((lengths_k.iter().zip(&lengths_q).map(first).collect(), numbers::<i32>(ranges)?))
            }
        };
        let paged = Some((lengths_k, page_table(&pages.block_table)?));
        Ok(Self { cu_seqlens_q, cu_seqlens_k: None, paged, prefix })
    }

    fn put_into<'a>(&'a self, mut inputs: InputViews<'a>, problem: &Problem) -> InputViews<'a> {
        inputs = inputs.with_cu_seqlens_q(&self.cu_seqlens_q);
        if let Some(offsets) = &self.cu_seqlens_k {
            inputs = inputs.with_cu_seqlens_k(offsets);
        }
        if let Some((lengths, table)) = &self.paged {
            inputs = inputs.with_seqused_k(lengths).with_page_table(table);
        }
        // Without a mask ranges have nothing to bypass, and the problem has no tables.
        if let Some((positions, ranges)) = self.prefix.as_ref().filter(|_| problem.score_mod.is_some()) {
            inputs = inputs.with_aux_f32(positions).with_aux_i32(ranges);
        }
        inputs
    }
}

/// Differences of cumulative lengths.
fn lengths(name: &str, offsets: &[u32]) -> Result<Vec<u32>> {
    let length = |(sequence, pair): (usize, &[u32])| match pair[1].checked_sub(pair[0]) {
        Some(length) => Ok(length),
        None => {
            bail!("{NAME}: {name} falls from {} to {} at sequence {sequence}; it must never fall", pair[0], pair[1])
        }
    };
    offsets.windows(2).enumerate().map(length).collect()
}

/// The block table from its first entry to its last, as signed numbers. A page that does not fit is none of the cache.
fn page_table(table: &Tensor) -> Result<Vec<i32>> {
    let (rows, width) = table.dims2()?;
    let entries = rows.saturating_sub(1).saturating_mul(table.stride()[0]).saturating_add(width);
    if table.dtype() == Type::I32 {
        return first_numbers(table, entries);
    }
    let pages = first_numbers::<u32>(table, entries)?;
    Ok(pages.into_iter().map(|page| i32::try_from(page).unwrap_or(i32::MAX)).collect())
}

/// The numbers of a contiguous tensor.
fn numbers<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    first_numbers(tensor, tensor.elem_count())
}

/// So many numbers in memory from the first of a tensor on.
fn first_numbers<T: WithDType>(tensor: &Tensor, count: usize) -> Result<Vec<T>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        bail!("{NAME}: a vector is on {:?}; it must be on the CPU, like q", tensor.device().location())
    };
    match from_first(storage.as_slice::<T>()?, layout).get(..count) {
        Some(numbers) => Ok(numbers.to_vec()),
        None => bail!("{NAME}: a tensor of {count} numbers ends past its memory"),
    }
}
