//! Attention on buffers and a stream of `cudarc`, which candle and burn use too:
//! `cargo run --release --example cudarc_buffers`

#![expect(clippy::print_stdout, reason = "an example talks to whoever runs it")]
#![expect(unsafe_code, reason = "a launch takes addresses")]

use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};
use flashcore::half::f16;
use flashcore::verify::{Evidence, ReferenceError, judge, oracle};
use flashcore::{Alignment, DType, Device, DeviceTensors, Inputs, Mask, Outputs, Problem, supports};

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
    let plan = supports(&problem, &device)?;
    println!("{}", plan.report());

    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let inputs = Inputs::random(&problem, 1);
    let query = stream.clone_htod(&inputs.query.data)?;
    let key = stream.clone_htod(&inputs.key.data)?;
    let value = stream.clone_htod(&inputs.value.data)?;
    let mut outputs = Outputs::poisoned(&problem);
    let mut output = stream.clone_htod(&outputs.output.data)?;
    let mut lse = stream.alloc_zeros::<f32>(2 * 8 * 1000)?;
    {
        // The guards tell cudarc when the buffers are used, so they live until after the launch.
        let (query, _query) = query.device_ptr(&stream);
        let (key, _key) = key.device_ptr(&stream);
        let (value, _value) = value.device_ptr(&stream);
        let (output, _output) = output.device_ptr_mut(&stream);
        let (lse, _lse) = lse.device_ptr_mut(&stream);
        let tensors = DeviceTensors::new(query, key, value, output).with_lse(lse);
        // SAFETY: the buffers have the sizes of the problem's tensors, nobody else uses them, and the stream is one of
        // the primary context, which cudarc uses.
        unsafe { plan.launch(stream.cu_stream(), tensors) }?;
    }
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
