//! From candle's layouts to a problem: ranks, shapes, strides, masks.

use candle_core::{DType as Type, Layout, Result, Shape, Tensor, bail};
use flashcore::{Alignment, DType, Mask, PagedKv, Problem, ScoreMod, Strides, TensorStrides};

use crate::operation::{NAME, Operation, Pages, Sequences};

/// The most `mm_prefix_ranges` of a sequence: an expression of a kernel has so many steps.
pub const MOST_PREFIX_RANGES: usize = 3;

/// Positions from which on `f32` has no place for each: `mm_prefix_ranges` are compared in it.
const MOST_PREFIX_KEYS: usize = 1 << 24;

/// The element type of q, k and v.
pub(crate) fn element_type(types: [Type; 3], allowed: &[(Type, DType)], device: &str) -> Result<DType> {
    let [q, k, v] = types;
    if q != k || q != v {
        bail!("{NAME}: q is {q:?}, k {k:?} and v {v:?}; they must have one type: convert with to_dtype")
    }
    match allowed.iter().find(|(candle, _)| *candle == q) {
        Some((_, dtype)) => Ok(*dtype),
        None => {
            let names: Vec<_> = allowed.iter().map(|(candle, _)| format!("{candle:?}")).collect();
            bail!("{NAME}: q, k and v are {q:?}; on {device} they can be {}: convert with to_dtype", names.join(", "))
        }
    }
}

/// Sizes and strides of a tensor, `(batch or pages, rows, heads, columns)`; packed rows are one batch.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    rows: usize,
    heads: usize,
    columns: usize,
    strides: Strides,
}

impl Sizes {
    fn new(name: &str, layout: &Layout, rank: usize, form: &str) -> Result<Self> {
        let (dims, strides) = (layout.dims(), layout.stride());
        if dims.len() != rank {
            bail!("{NAME}: {name} has {} dimensions, {dims:?}; it must be {form}", dims.len())
        }
        if dims[rank - 1] > 1 && strides[rank - 1] != 1 {
            bail!("{NAME}: the columns of {name} are not adjacent: strides {strides:?}; copy it with contiguous()")
        }
        let [rows, heads, columns] = [dims[rank - 3], dims[rank - 2], dims[rank - 1]];
        let batch = if rank == 4 { dims[0] } else { 1 };
        // Where there is one of something, its stride means nothing.
        let stride = |size, stride, contiguous: usize| if size > 1 { stride } else { contiguous };
        let row_elements = heads.saturating_mul(columns);
        let strides = Strides {
            batch: stride(batch, strides[0], rows.saturating_mul(row_elements)),
            row: stride(rows, strides[rank - 3], row_elements),
            head: stride(heads, strides[rank - 2], columns),
        };
        Ok(Self { batch, rows, heads, columns, strides })
    }
}

impl Operation {
    /// The problem, and the shape of the output.
    pub(crate) fn problem(&self, dtype: DType, q: &Layout, k: &Layout, v: &Layout) -> Result<(Problem, Shape)> {
        let pages = self.sequences.as_ref().and_then(|sequences| sequences.pages.as_ref());
        let (rank, form) = match &self.sequences {
            None => (4, "(batch, rows, heads, head_dim)"),
            Some(_) => (3, "(rows, heads, head_dim)"),
        };
        let (cache_rank, cache_form) = match pages {
            None => (rank, form),
            Some(_) => (4, "(pages, page_block_size, heads, head_dim)"),
        };
        let query = Sizes::new("q", q, rank, form)?;
        let key = Sizes::new("k", k, cache_rank, cache_form)?;
        let value = Sizes::new("v", v, cache_rank, cache_form)?;
        if key.columns != query.columns {
            bail!("{NAME}: k is {:?} and q {:?}; they must have the same head dim", k.dims(), q.dims())
        }
        if (value.batch, value.rows, value.heads) != (key.batch, key.rows, key.heads) {
            bail!(
                "{NAME}: v is {:?} and k {:?}; they must have the same shape but for the head dim",
                v.dims(),
                k.dims()
            )
        }
        if self.sequences.is_none() && key.batch != query.batch {
            bail!("{NAME}: k is {:?} and q {:?}; they must have the same batch", k.dims(), q.dims())
        }

        let mut problem = Problem::new(query.batch, query.heads, query.rows, query.columns, dtype);
        problem.key_heads = key.heads;
        problem.key_length = key.rows;
        problem.value_dim = value.columns;
        problem.scale = f64::from(self.softmax_scale);
        // Elsewhere 0 stands for none; what is negative or no number is refused with the problem.
        problem.softcap = Some(self.softcap).filter(|&softcap| softcap != 0.0);
        problem.alibi = self.alibi_slopes.is_some();
        problem.lse = self.lse.is_some();
        problem.mask = mask(self.window, self.sequences.as_ref().map_or(key.rows, |sequences| sequences.max_seqlen_k));
        if let Some(slopes) = &self.alibi_slopes {
            check_vector("alibi_slopes", slopes, &[Type::F32], &[query.heads])?;
        }
        if let Some(sequences) = &self.sequences {
            sequences.describe(&mut problem, query.rows, key)?;
        }

        let mut dims = q.dims().to_vec();
        dims[rank - 1] = value.columns;
        let output_row = query.heads.saturating_mul(value.columns);
        let output = Strides { batch: query.rows.saturating_mul(output_row), row: output_row, head: value.columns };
        problem.layout = flashcore::Layout::Strided(TensorStrides {
            query: query.strides,
            key: key.strides,
            value: value.strides,
            output,
        });
        Ok((problem, dims.into()))
    }
}

/// The shape of the log-sum-exp.
pub(crate) fn lse_shape(problem: &Problem) -> Shape {
    match problem.total_q {
        Some(rows) => (problem.query_heads, rows).into(),
        None => (problem.batch, problem.query_heads, problem.query_length).into(),
    }
}

impl Sequences {
    fn describe(&self, problem: &mut Problem, query_rows: usize, key: Sizes) -> Result<()> {
        let offsets = self.seqlens_q.elem_count();
        check_vector("seqlens_q", &self.seqlens_q, &[Type::U32], &[offsets])?;
        check_vector("seqlens_k", &self.seqlens_k, &[Type::U32], &[offsets])?;
        if offsets < 2 {
            bail!("{NAME}: seqlens_q has {offsets} entries; it must have one more than there are sequences, at least 2")
        }
        problem.batch = offsets - 1;
        problem.total_q = Some(query_rows);
        // A bound is no promise that a sequence is as long.
        problem.query_length = self.max_seqlen_q.min(query_rows);
        match &self.pages {
            None => {
                problem.total_k = Some(key.rows);
                problem.key_length = self.max_seqlen_k.min(key.rows);
                Ok(())
            }
            Some(pages) => pages.describe(problem, self.max_seqlen_k, key),
        }
    }
}

impl Pages {
    fn describe(&self, problem: &mut Problem, max_seqlen_k: usize, key: Sizes) -> Result<()> {
        let page_block_size = self.page_block_size;
        if page_block_size != key.rows {
            bail!(
                "{NAME}: page_block_size is {page_block_size}, and k has pages of {} rows; both must be the same",
                key.rows
            )
        }
        let (dims, strides, batch) = (self.block_table.dims(), self.block_table.stride(), problem.batch);
        let &[rows, width] = dims else {
            bail!("{NAME}: block_table has {} dimensions, {dims:?}; it must be (batch, most pages)", dims.len())
        };
        if rows != batch {
            bail!("{NAME}: block_table has {rows} rows and seqlens_q {} entries; it must have {batch} rows", batch + 1)
        }
        check_type("block_table", &self.block_table, &[Type::U32, Type::I32])?;
        if width > 1 && strides[1] != 1 {
            bail!("{NAME}: entries of block_table are not adjacent: strides {strides:?}; copy it with contiguous()")
        }
        let table_stride = if rows > 1 { strides[0] } else { width };
        problem.seqused_k = true;
        problem.paged = Some(PagedKv { table_stride, ..PagedKv::new(page_block_size, key.batch, width) });
        problem.key_length = max_seqlen_k.min(width.saturating_mul(page_block_size));
        match &self.mm_prefix_ranges {
            Some(ranges) => prefix_ranges(ranges, problem),
            None => Ok(()),
        }
    }
}

/// Replaces the mask by an expression: rows and keys of one range attend each other whatever it says.
fn prefix_ranges(ranges: &Tensor, problem: &mut Problem) -> Result<()> {
    let &[rows, count, two] = ranges.dims() else {
        bail!("{NAME}: mm_prefix_ranges is {:?}; it must be (batch, ranges, 2)", ranges.dims())
    };
    check_vector("mm_prefix_ranges", ranges, &[Type::I32], &[problem.batch, count, 2])?;
    let (left, right) = problem.mask.limits();
    if count == 0 || (left, right) == (None, None) {
        return Ok(());
    }
    if count > MOST_PREFIX_RANGES {
        bail!("{NAME}: mm_prefix_ranges has {count} ranges for each sequence; it can have up to {MOST_PREFIX_RANGES}")
    }
    if problem.key_length >= MOST_PREFIX_KEYS {
        let keys = problem.key_length;
        bail!(
            "{NAME}: sequences have up to {keys} keys; with mm_prefix_ranges it must be fewer than {MOST_PREFIX_KEYS}"
        )
    }
    problem.aux_f32 = problem.batch;
    problem.aux_i32 = rows * count * two;
    problem.mask = Mask::None;
    problem.score_mod = Some(ScoreMod::new("mm_prefix", |score, at| {
        let (position, key) = (at.query.to_number() + at.number(at.batch), at.key.to_number());
        let (first, last) = (position.min(key), position.max(key));
        // Limits are at most the keys, of which there are fewer than 2^24.
        let within = |limit: usize| limit as f32;
        let after_left = left.map(|left| key.at_least(position - within(left)));
        let before_right = right.map(|right| key.at_most(position + within(right)));
        let in_window = match (after_left, before_right) {
            (Some(left), Some(right)) => left & right,
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => key.equals(key),
        };
        let beginning = at.batch * (2 * count) as i32;
        let attended = (0..count as i32).fold(in_window, |attended, range| {
            let index = if range == 0 { beginning } else { beginning + 2 * range };
            let (start, end) = (at.integer(index).to_number(), at.integer(index + 1).to_number());
            attended | (first.at_least(start) & last.less(end))
        });
        attended.number(score, f32::NEG_INFINITY)
    }));
    Ok(())
}

/// The mask of a window. A limit beyond the number of keys is none, as in candle-flash-attn.
fn mask((left, right): (Option<usize>, Option<usize>), keys: usize) -> Mask {
    let limited = |limit: Option<usize>| limit.filter(|&limit| limit <= keys);
    match (limited(left), limited(right)) {
        (None, None) => Mask::None,
        (None, Some(0)) => Mask::Causal(Alignment::BottomRight),
        (left, right) => Mask::Window { left, right, alignment: Alignment::BottomRight },
    }
}

fn check_type(name: &str, tensor: &Tensor, types: &[Type]) -> Result<()> {
    if types.contains(&tensor.dtype()) {
        return Ok(());
    }
    let allowed: Vec<_> = types.iter().map(|dtype| format!("{dtype:?}")).collect();
    bail!("{NAME}: {name} is {:?}; it must be {}: convert with to_dtype", tensor.dtype(), allowed.join(" or "))
}

fn check_vector(name: &str, tensor: &Tensor, types: &[Type], dims: &[usize]) -> Result<()> {
    check_type(name, tensor, types)?;
    if tensor.dims() != dims {
        bail!("{NAME}: {name} is {:?}; it must be {dims:?}", tensor.dims())
    }
    if !tensor.is_contiguous() {
        bail!("{NAME}: {name} has strides {:?}; it must be contiguous: copy it with contiguous()", tensor.stride())
    }
    Ok(())
}
