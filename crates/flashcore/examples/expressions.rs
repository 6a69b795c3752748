//! Attention of one's own, fused: `cargo run --release --example expressions`
//!
//! A learned term for every distance is added to the scores, and several documents in one sequence do not see each other.
//! Both are closures of Rust. On a GPU they become part of the kernel; here they run on whatever is there.

#![expect(clippy::print_stdout, reason = "an example talks to whoever runs it")]

use flashcore::half::f16;
use flashcore::{DType, Device, Error, InputViews, MaskMod, OutputViews, Problem, ScoreMod, supports};

const HEADS: usize = 4;
const LENGTH: usize = 300;
const HEAD_DIM: usize = 64;
/// Distances that are told apart, to both sides.
const FURTHEST: i32 = 64;

fn main() -> Result<(), Error> {
    // For each head, one number for each distance from -64 to 64; what is further has that of the furthest.
    let relative = ScoreMod::new("relative", |score, at| {
        let distance = (at.query - at.key).max(-FURTHEST).min(FURTHEST);
        score + at.number(at.head * (2 * FURTHEST + 1) + distance + FURTHEST)
    });
    // The number of its document for each position.
    let documents = MaskMod::new("documents", |at| at.integer(at.query).equals(at.integer(at.key)));

    let mut problem = Problem::new(1, HEADS, LENGTH, HEAD_DIM, DType::F16);
    (problem.score_mod, problem.mask_mod) = (Some(relative), Some(documents));
    problem.aux_f32 = HEADS * (2 * FURTHEST as usize + 1);
    problem.aux_i32 = LENGTH;

    let numbers: Vec<f32> = (0..problem.aux_f32).map(|index| (index as f32 * 0.1).sin()).collect();
    let document_of: Vec<i32> = (0..LENGTH as i32).map(|position| position / 120).collect();
    let elements = HEADS * LENGTH * HEAD_DIM;
    let tensor =
        |step: f32| (0..elements).map(|index| f16::from_f32((index as f32 * step).sin())).collect::<Vec<f16>>();
    let (query, key, value) = (tensor(0.37), tensor(0.11), tensor(0.73));
    let mut output = vec![f16::ZERO; elements];

    let inputs = InputViews::new(&query, &key, &value).with_aux_f32(&numbers).with_aux_i32(&document_of);
    let plan = supports(&problem, &Device::best().device)?;
    plan.run(inputs, OutputViews::new(&mut output))?;
    println!("{problem} on {}: {:?} ...", plan.device(), &output[..4]);

    // The first document alone gives the same as the first document among others.
    let mut alone = Problem::new(1, HEADS, 120, HEAD_DIM, DType::F16);
    (alone.score_mod, alone.aux_f32) = (Some(relative), problem.aux_f32);
    let first = |tensor: &[f16]| -> Vec<f16> {
        tensor.chunks_exact(LENGTH * HEAD_DIM).flat_map(|head| &head[..120 * HEAD_DIM]).copied().collect()
    };
    let (query, key, value) = (first(&query), first(&key), first(&value));
    let mut of_first = vec![f16::ZERO; HEADS * 120 * HEAD_DIM];
    let inputs = InputViews::new(&query, &key, &value).with_aux_f32(&numbers);
    supports(&alone, &Device::best().device)?.run(inputs, OutputViews::new(&mut of_first))?;
    let difference = |(one, other): (&f16, &f16)| (one.to_f32() - other.to_f32()).abs();
    let largest = first(&output).iter().zip(&of_first).map(difference).fold(0.0, f32::max);
    assert!(largest < 2e-3, "documents do not see each other");
    println!("the first document alone: largest difference {largest:.6}");
    Ok(())
}
