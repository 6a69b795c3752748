//! Decoding over a paged KV cache beside a contiguous one: both in turn, so that other programs disturb them alike.
//!
//! ```text
//! cargo run --release -p flashcore-cpu --example paged_decode -- [--threads N] [--level NAME] [--dtype NAME] [--keys N]
//!     [--batch N] [--key-heads N] [--layout bhsd|bshd] [PAGE SIZE ...]
//! ```
//!
//! The figure is the median of the ratios of runs that follow each other, and the best time of each.

#![expect(clippy::print_stdout, reason = "an example is a program")]

use flashcore_cpu::{Level, attend_with};
use flashcore_problem::{DType, Inputs, Layout, Outputs, PagedKv, Problem};
use std::time::{Duration, Instant};

/// Runs of each.
const RUNS: usize = 60;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut threads, mut level, mut dtype) = (1, Level::best(), DType::Bf16);
    let (mut keys, mut batch, mut key_heads, mut layout, mut page_sizes) = (4096, 8, 8, Layout::Bhsd, Vec::new());
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
            _ => page_sizes.push(argument.parse::<usize>()?),
        }
    }
    if page_sizes.is_empty() {
        page_sizes = vec![16, 64, 256];
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let mut contiguous = Problem::new(batch, 32, 1, 128, dtype);
    (contiguous.key_heads, contiguous.key_length, contiguous.layout) = (key_heads, keys, layout);
    let inputs = Inputs::random(&contiguous, 1);
    let mut outputs = Outputs::poisoned(&contiguous);
    println!("{level} {dtype}, {threads} threads, {batch} sequences of {keys} keys, 32/{key_heads} heads of 128");
    for page_size in page_sizes {
        let table_width = keys.div_ceil(page_size);
        let paged = contiguous.clone().with_paged(Some(PagedKv::new(page_size, batch * table_width, table_width)));
        let paged_inputs = Inputs::random(&paged, 1);
        let (mut ratios, mut best) = (Vec::new(), [Duration::MAX; 2]);
        for _ in 0..RUNS {
            let mut time = |problem: &Problem, inputs: &Inputs| {
                let start = Instant::now();
                pool.install(|| attend_with(level, problem, inputs, &mut outputs)).map(|()| start.elapsed())
            };
            let times = [time(&contiguous, &inputs)?, time(&paged, &paged_inputs)?];
            ratios.push(times[1].as_secs_f64() / times[0].as_secs_f64());
            best = [best[0].min(times[0]), best[1].min(times[1])];
        }
        ratios.sort_by(f64::total_cmp);
        println!(
            "pages of {page_size:>4}: contiguous {:>9.2?}, paged {:>9.2?} ({:.3} of it), median ratio {:.3}",
            best[0],
            best[1],
            best[1].as_secs_f64() / best[0].as_secs_f64(),
            ratios[RUNS / 2]
        );
    }
    Ok(())
}
