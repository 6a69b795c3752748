//! Decoding over a paged KV cache beside a contiguous one: both in turn, so that other programs disturb them alike.
//!
//! ```text
//! cargo run --release -p flashcore-cpu --example paged_decode -- [--threads N] [--level NAME] [--dtype NAME] [--keys N]
//!     [--batch N] [--key-heads N] [--layout bhsd|bshd] [--runs N] [--in-order] [PAGE SIZE ...]
//! ```
//!
//! Both read the same memory, which begins at a multiple of 4 KiB: caches in memory of their own differ by up to 15 % in where
//! the system has put them. Other memory of this size is read before every run. Pages lie in random order, or with `--in-order`
//! one after the other. Of each the fastest run and the median are printed, and the ratios of these.

#![expect(clippy::print_stdout, reason = "an example is a program")]

use flashcore_cpu::{Level, attend_with};
use flashcore_problem::{DType, InputViews, Inputs, Layout, Outputs, PagedKv, Problem};
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut threads, mut level, mut dtype, mut runs, mut in_order) = (1, Level::best(), DType::Bf16, 60, false);
    let (mut keys, mut batch, mut key_heads, mut layout, mut page_sizes) = (4096, 8, 8, Layout::Bshd, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--threads" => threads = value()?.parse()?,
            "--level" => level = value()?.parse()?,
            "--dtype" => dtype = value()?.parse()?,
            "--keys" => keys = value()?.parse()?,
            "--batch" => batch = value()?.parse()?,
            "--key-heads" => key_heads = value()?.parse()?,
            "--layout" => layout = if value()? == "bshd" { Layout::Bshd } else { Layout::Bhsd },
            "--runs" => runs = value()?.parse::<usize>()?.max(1),
            "--in-order" => in_order = true,
            _ => page_sizes.push(argument.parse::<usize>()?),
        }
    }
    if page_sizes.is_empty() {
        page_sizes = vec![16, 64, 256];
    }
    if page_sizes.iter().any(|&page_size| page_size == 0 || keys % page_size != 0) {
        return Err("the keys of a sequence are whole pages".into());
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let mut contiguous = Problem::new(batch, 32, 1, 128, dtype);
    (contiguous.key_heads, contiguous.key_length, contiguous.layout) = (key_heads, keys, layout);
    let inputs = Inputs::random(&contiguous, 1);
    let cache = [&inputs.key, &inputs.value].map(|tensor| Aligned::new(&tensor.data));
    let other: Vec<u64> = vec![1; cache.iter().map(|cache| cache.length / 8).sum()];
    let mut outputs = Outputs::poisoned(&contiguous);
    println!(
        "{level} {dtype} {layout:?}, {threads} threads, {batch} sequences of {keys} keys, 32/{key_heads} heads of 128"
    );
    for page_size in page_sizes {
        let table_width = keys.div_ceil(page_size);
        let paged = contiguous.clone().with_paged(Some(PagedKv::new(page_size, batch * table_width, table_width)));
        let mut paged_inputs = Inputs::random(&paged, 1);
        if let Some(table) = paged_inputs.page_table.as_mut().filter(|_| in_order) {
            table.sort_unstable();
        }
        let mut times = [Vec::new(), Vec::new()];
        for run in 0..2 * runs {
            // The one that comes second in a turn comes first in the next.
            let is_paged = (run + run / 2) % 2;
            let (problem, inputs) = if is_paged == 1 { (&paged, &paged_inputs) } else { (&contiguous, &inputs) };
            // Numbers that are as random in one order as in another.
            let mut views = InputViews::from(inputs);
            (views.key.data, views.value.data) = (cache[0].bytes(), cache[1].bytes());
            std::hint::black_box(other.iter().fold(0, |sum: u64, &x| sum.wrapping_add(x)));
            let start = Instant::now();
            pool.install(|| attend_with(level, problem, views, &mut outputs))?;
            times[is_paged].push(start.elapsed().as_secs_f64() * 1e3);
        }
        for times in &mut times {
            times.sort_by(f64::total_cmp);
        }
        let [[fastest, median], [paged_fastest, paged_median]] = times.map(|times| [times[0], times[runs / 2]]);
        println!(
            "pages of {page_size:>4}: fastest {fastest:.3} ms, paged {paged_fastest:.3} ({:.3} of it); \
             median {median:.3}, paged {paged_median:.3} ({:.3} of it)",
            paged_fastest / fastest,
            paged_median / median
        );
    }
    Ok(())
}

/// Bytes that begin at a multiple of 4 KiB, as those of most allocators of tensors do at a multiple of a cache line: a vector
/// never lies in two lines.
struct Aligned {
    memory: Vec<u8>,
    first: usize,
    length: usize,
}

impl Aligned {
    fn new(bytes: &[u8]) -> Self {
        const ALIGNMENT: usize = 4096;
        let length = bytes.len();
        let mut memory = vec![0; length + ALIGNMENT];
        let first = memory.as_ptr().align_offset(ALIGNMENT);
        memory[first..first + length].copy_from_slice(bytes);
        Self { memory, first, length }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.first..self.first + self.length]
    }
}
