//! Attention of ordinary slices, on the GPU if there is one and on the CPU if not:
//! `cargo run --release --example host_tensors`

#![expect(clippy::print_stdout, reason = "an example talks to whoever runs it")]

use std::time::Instant;

use flashcore::half::bf16;
use flashcore::{Alignment, DType, Device, Error, InputViews, Mask, OutputViews, Plan, Problem};

fn main() -> Result<(), Error> {
    let best = Device::best_or_reason();
    println!("on {best}");

    // One sequence of 512 tokens; 8 query heads share 2 key heads; each token attends itself and those before it.
    let mut problem = Problem::new(1, 8, 512, 64, DType::Bf16);
    problem.key_heads = 2;
    problem.mask = Mask::Causal(Alignment::BottomRight);
    problem.lse = true;

    let query = wave(8 * 512 * 64, 0.1);
    let key = wave(2 * 512 * 64, 0.2);
    let value = wave(2 * 512 * 64, 0.3);
    let mut output = vec![bf16::ZERO; query.len()];
    let mut lse = vec![0.0; 8 * 512];

    // Either a plan or every reason against it; `?` turns the reasons into one error.
    let plan = Plan::new(&problem, &best.device)?;
    println!("{}", plan.report());

    let start = Instant::now();
    let inputs = InputViews::new(&query, &key, &value);
    let outputs = OutputViews::new(&mut output).with_lse(&mut lse);
    plan.run(inputs, outputs)?;
    println!("computed in {:?}", start.elapsed());

    // The first token attends nothing but itself, so its output is its value.
    assert_eq!(output[..64], value[..64]);
    println!("first row {:?} ..., log-sum-exp {}", &output[..4], lse[0]);
    Ok(())
}

fn wave(count: usize, step: f32) -> Vec<bf16> {
    (0..count).map(|index| bf16::from_f32((index as f32 * step).sin())).collect()
}
