//! A launch recorded into a CUDA graph and replayed: `cargo run --release --example cuda_graph`

#![expect(clippy::print_stdout, reason = "an example talks to whoever runs it")]
#![expect(unsafe_code, reason = "a launch takes addresses")]

use std::time::Instant;

use flashcore::cuda::{DeviceBuffer, Graph, Stream};
use flashcore::verify::{Evidence, Inputs, Outputs, ReferenceError, judge, oracle};
use flashcore::{DType, Device, DeviceTensors, Error, Plan, Problem};

/// Attention layers in a graph.
const LAYERS: u32 = 32;

fn main() -> Result<(), Error> {
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(error) => {
            println!("nothing to show: {error}");
            return Ok(());
        }
    };
    let Some(context) = device.context() else { return Ok(()) };
    let problem = Problem::new(1, 8, 512, 128, DType::Bf16);
    // Before the capture: compiling and checking a kernel is nothing that a graph records.
    let plan = Plan::new(&problem, &device)?;
    println!("{}", plan.report());

    let stream = Stream::new(context)?;
    let inputs = Inputs::random(&problem, 1);
    let mut outputs = Outputs::poisoned(&problem);
    let query = DeviceBuffer::from_host(&stream, &inputs.query.data)?;
    let key = DeviceBuffer::from_host(&stream, &inputs.key.data)?;
    let value = DeviceBuffer::from_host(&stream, &inputs.value.data)?;
    let output = DeviceBuffer::from_host(&stream, &outputs.output.data)?;
    let tensors = DeviceTensors::new(query.address(), key.address(), value.address(), output.address());
    let graph = Graph::capture(&stream, |stream| {
        // SAFETY: the buffers have the sizes of the problem's tensors and outlive the graph; nobody else uses them.
        (0..LAYERS).try_for_each(|_| unsafe { plan.launch(stream, tensors) })
    })?;
    println!("recorded {} launches", graph.nodes());

    let start = Instant::now();
    // SAFETY: what was promised for the recorded launches still holds.
    unsafe { graph.launch(&stream) }?;
    stream.synchronize()?;
    println!("replayed in {:?}", start.elapsed());

    output.copy_to_host(&stream, 0, &mut outputs.output.data)?;
    let expected = oracle(&problem, &inputs)?;
    let yardstick = ReferenceError::measure(&problem, &inputs, &expected)?;
    let verdict = judge(&problem, &expected, &yardstick, &Evidence::new(&inputs, &outputs));
    assert!(verdict.passed(), "{verdict}");
    println!("right");
    Ok(())
}
