//! Speed of attention on this machine, beside the peak of its arithmetic units.
//!
//! ```text
//! cargo run --release -p flashcore-cpu --example speed -- [--threads N] [--level NAME] [--dtype NAME] [SHAPE ...]
//! ```
//!
//! A shape is `batch x heads[/key heads] x queries[,keys] x columns`, with `c` after it for a causal mask. The figure is
//! the best of many repetitions, because other programs only ever make a run slower.

#![expect(clippy::print_stdout, reason = "an example is a program")]

use flashcore_cpu::{Level, attend_with, measured_peak_of};
use flashcore_problem::{Alignment, DType, Inputs, Mask, Outputs, Problem};
use std::time::{Duration, Instant};

const SHAPES: [&str; 12] = [
    "1x8x512x64",
    "2x8x256x64",
    "2x8x512x64",
    "8x8x512x64",
    "1x8x2048x64",
    "1x8x2048x128",
    "1x8x512x64c",
    "2x8x256x64c",
    "2x8x512x64c",
    "8x8x512x64c",
    "1x8x2048x64c",
    "1x8x2048x128c",
];

/// Time for which a shape is repeated.
const TIME: Duration = Duration::from_millis(700);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut threads, mut level, mut dtype, mut shapes) = (1, Level::best(), DType::F32, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--threads" => threads = value()?.parse()?,
            "--level" => level = value()?.parse()?,
            "--dtype" => dtype = value()?.parse()?,
            _ => shapes.push(argument),
        }
    }
    if shapes.is_empty() {
        shapes = SHAPES.map(str::to_owned).to_vec();
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let peak = measured_peak_of(level, dtype, threads) / 1e9;
    println!("{level} {dtype}, {threads} threads, peak {peak:.0} GFLOP/s");
    for shape in shapes {
        let problem = parse(&shape, dtype).ok_or(format!("{shape:?} is no shape such as 1x8x512x64c"))?;
        let inputs = Inputs::random(&problem, 1);
        let mut outputs = Outputs::poisoned(&problem);
        let (begin, mut best, mut runs) = (Instant::now(), Duration::MAX, 0);
        while begin.elapsed() < TIME || runs < 5 {
            let start = Instant::now();
            pool.install(|| attend_with(level, &problem, &inputs, &mut outputs))?;
            best = best.min(start.elapsed());
            runs += 1;
        }
        let rows =
            (0..problem.query_length).map(|row| problem.attended_keys(problem.key_length, row).len()).sum::<usize>();
        let heads = problem.batch * problem.query_heads;
        let speed = 2.0 * (heads * rows * (problem.head_dim + problem.value_dim)) as f64 / best.as_secs_f64() / 1e9;
        let bytes = problem.batch * problem.key_heads * problem.key_length * (problem.head_dim + problem.value_dim);
        let read = (bytes * dtype.size_bytes()) as f64 / best.as_secs_f64() / 1e9;
        println!(
            "{shape:>18} {best:>12.2?} {speed:>7.1} GFLOP/s {:>5.1} %  keys and values {read:>6.2} GB/s",
            100.0 * speed / peak
        );
    }
    Ok(())
}

fn parse(shape: &str, dtype: DType) -> Option<Problem> {
    let (sizes, is_causal) = shape.strip_suffix('c').map_or((shape, false), |sizes| (sizes, true));
    let parts: Vec<&str> = sizes.split('x').collect();
    let [batch, heads, lengths, columns] = parts[..] else { return None };
    let pair = |text: &str, separator: char| -> Option<(usize, usize)> {
        let (first, second) = text.split_once(separator).unwrap_or((text, text));
        Some((first.parse().ok()?, second.parse().ok()?))
    };
    let ((query_heads, key_heads), (queries, keys)) = (pair(heads, '/')?, pair(lengths, ',')?);
    let mut problem = Problem::new(batch.parse().ok()?, query_heads, queries, columns.parse().ok()?, dtype);
    (problem.key_heads, problem.key_length) = (key_heads, keys);
    if is_causal {
        problem.mask = Mask::Causal(Alignment::BottomRight);
    }
    Some(problem)
}
