//! Decoding over a paged KV cache in FP8 beside one in `f32` and one in `bf16`, each in turn.
//!
//! ```text
//! cargo run --release -p flashcore-cpu --example float8_decode -- [--threads N] [--level NAME] [--keys N] [--batch N]
//! ```
//!
//! The figures are the best time of each and the median of the ratios to `f32` of runs that follow each other.

#![expect(clippy::print_stdout, reason = "an example is a program")]

use flashcore_cpu::{Level, attend_with};
use flashcore_problem::{DType, Inputs, Operand, Outputs, PagedKv, Problem, Scale, ScaleStrides};
use std::time::{Duration, Instant};

/// Runs of each.
const RUNS: usize = 40;
const PAGE_SIZE: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut threads, mut level, mut keys, mut batch) = (1, Level::best(), 4096_usize, 4_usize);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--threads" => threads = value()?.parse()?,
            "--level" => level = value()?.parse()?,
            "--keys" => keys = value()?.parse()?,
            "--batch" => batch = value()?.parse()?,
            _ => return Err(format!("{argument} is not an option").into()),
        }
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let width = keys.div_ceil(PAGE_SIZE);
    let problem = |dtype, kv_dtype| {
        let mut problem = Problem::new(batch, 32, 1, 128, dtype).with_kv_dtype(kv_dtype);
        (problem.key_heads, problem.key_length) = (8, keys);
        problem.with_paged(Some(PagedKv::new(PAGE_SIZE, batch * width, width)))
    };
    let mut cases = vec![("f32", problem(DType::F32, None)), ("bf16", problem(DType::Bf16, None))];
    for dtype in DType::FLOAT8 {
        cases.push((dtype.name(), problem(DType::F32, Some(dtype))));
    }
    let scaled = problem(DType::F32, Some(DType::E4m3)).with_k_scale(true).with_v_scale(true);
    cases.push(("e4m3, scales per head", scaled.clone()));
    cases.push(("e4m3, scales per token", scaled));
    let mut inputs: Vec<Inputs> = cases.iter().map(|(_, problem)| Inputs::random(problem, 1)).collect();
    for ((name, problem), inputs) in cases.iter().zip(&mut inputs) {
        let strides = match *name {
            "e4m3, scales per head" => ScaleStrides::KEY_HEAD,
            "e4m3, scales per token" => ScaleStrides::per_token(Operand::KScale, problem),
            _ => continue,
        };
        let scale = Scale { data: vec![0.5; strides.extent(Operand::KScale, problem).unwrap_or(0)], strides };
        (inputs.k_scale, inputs.v_scale) = (Some(scale.clone()), Some(scale));
    }
    let mut outputs: Vec<Outputs> = cases.iter().map(|(_, problem)| Outputs::poisoned(problem)).collect();
    let (mut best, mut ratios) = (vec![Duration::MAX; cases.len()], vec![Vec::new(); cases.len()]);
    for _ in 0..RUNS {
        let mut first = 0.0;
        for (index, (_, problem)) in cases.iter().enumerate() {
            let start = Instant::now();
            pool.install(|| attend_with(level, problem, &inputs[index], &mut outputs[index]))?;
            let time = start.elapsed();
            best[index] = best[index].min(time);
            first = if index == 0 { time.as_secs_f64() } else { first };
            ratios[index].push(time.as_secs_f64() / first);
        }
    }
    println!("{level}, {threads} threads, {batch} sequences of {keys} keys in pages of {PAGE_SIZE}, 32/8 heads of 128");
    for (((name, _), best), ratios) in cases.iter().zip(best).zip(&mut ratios) {
        ratios.sort_by(f64::total_cmp);
        println!("{name:24} {best:>10.2?}, median ratio to f32 {:.3}", ratios[RUNS / 2]);
    }
    Ok(())
}
