//! Attention on buffers and a stream of `cudarc`, which candle and burn use too:
//! `cargo run --release --features cudarc --example cudarc_buffers`

#![expect(clippy::print_stdout, reason = "an example talks to whoever runs it")]

use cudarc::driver::CudaContext;
use flashcore::cudarc::{TypedTensors, launch};
use flashcore::half::f16;
use flashcore::verify::{Evidence, Inputs, Outputs, ReferenceError, judge, oracle};
use flashcore::{Alignment, DType, Device, Mask, Plan, Problem};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Before cudarc is asked for anything: where there is no driver, it panics.
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(error) => {
            println!("nothing to show: {error}");
            return Ok(());
        }
    };
    let mut problem = Problem::new(2, 8, 1000, 64, DType::F16);
    problem.mask = Mask::Causal(Alignment::BottomRight);
    problem.lse = true;
    let plan = Plan::new(&problem, &device)?;
    println!("{}", plan.report());

    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let inputs = Inputs::random(&problem, 1);
    // Bytes; with the feature `f16` of cudarc they can be a `CudaSlice<f16>`.
    let query = stream.clone_htod(&inputs.query.data)?;
    let key = stream.clone_htod(&inputs.key.data)?;
    let value = stream.clone_htod(&inputs.value.data)?;
    let mut outputs = Outputs::poisoned(&problem);
    let mut output = stream.clone_htod(&outputs.output.data)?;
    let mut lse = stream.alloc_zeros::<f32>(2 * 8 * 1000)?;
    launch(&plan, &stream, TypedTensors::new(&query, &key, &value, &mut output).with_lse(&mut lse))?;
    outputs.output.data = stream.clone_dtoh(&output)?;
    outputs.lse = Some(stream.clone_dtoh(&lse)?);

    let expected = oracle(&problem, &inputs)?;
    let yardstick = ReferenceError::measure(&problem, &inputs, &expected)?;
    let verdict = judge(&problem, &expected, &yardstick, &Evidence::new(&inputs, &outputs));
    assert!(verdict.passed(), "{verdict}");
    let first = f16::from_le_bytes([outputs.output.data[0], outputs.output.data[1]]);
    println!("right; the first element is {first}");
    Ok(())
}
