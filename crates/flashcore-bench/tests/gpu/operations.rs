//! Append and merge on a GPU: host tensors, and a captured launch whose slots change between replays.

#![expect(unsafe_code, reason = "a launch takes addresses")]

use flashcore::cuda::{DeviceBuffer, Graph, Stream};
use flashcore::verify::{Inputs, Outputs, append_oracle, merge_oracle};
use flashcore::{AppendProblem, DType, DeviceTensors, Error, MergeProblem, Operand, Plan, Rotary, RotaryStyle};
use flashcore_bench::testkit::gpu::Gpu;

use crate::{Test, tests};

/// Every test of this file.
pub(crate) const TESTS: &[Test] =
    tests![appends_are_right, merges_are_right, a_captured_append_takes_new_slots, two_parts_lie_anywhere];

const DTYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

fn appends_are_right(gpu: &Gpu) {
    for dtype in DTYPES {
        for (head_dim, page_size) in [(128, 16), (72, 1), (33, 7), (256, 64)] {
            let plain = AppendProblem::new(500, 8, head_dim, dtype, 1024 / page_size, page_size).with_query(32);
            let rotary = |style| Rotary::new(style, head_dim / 4 * 2, 300);
            for problem in [
                plain,
                plain.with_qk_norm(1e-6),
                plain.with_rotary(rotary(RotaryStyle::Neox)).with_qk_norm(1e-6),
                plain.with_rotary(rotary(RotaryStyle::GptJ)),
            ] {
                let plan = Plan::new(&problem, gpu.device()).unwrap();
                let (inputs, before) = (problem.random(11), problem.poisoned());
                let mut after = before.clone();
                plan.run(inputs.views(), after.views_mut()).unwrap();
                check_append(&problem, &inputs, &before, &after);
            }
        }
    }
}

fn check_append(problem: &AppendProblem, inputs: &Inputs, before: &Outputs, after: &Outputs) {
    append_oracle(problem, &inputs.views()).unwrap().check(before, after).unwrap();
}

fn merges_are_right(gpu: &Gpu) {
    for dtype in DTYPES {
        for (num_parts, value_dim) in [(2, 128), (4, 64), (9, 512), (256, 128), (3, 33)] {
            let problem = MergeProblem::new(num_parts, 77, 8, value_dim, dtype);
            for problem in [problem, problem.with_part_dtype(DType::F32).with_token_major_lse()] {
                let plan = Plan::new(&problem, gpu.device()).unwrap();
                let (inputs, mut outputs) = (problem.random(12), problem.poisoned());
                plan.run(inputs.views(), outputs.views_mut()).unwrap();
                merge_oracle(&problem, &inputs.views()).unwrap().check(&problem, &outputs).unwrap();
            }
        }
    }
}

fn bytes(inputs: &Inputs, operand: Operand) -> &[u8] {
    inputs.views().bytes(operand).unwrap()
}

/// One captured launch, with other slots and positions in the same memory each time.
fn a_captured_append_takes_new_slots(gpu: &Gpu) {
    let problem = AppendProblem::new(64, 8, 128, DType::Bf16, 40, 16).with_query(32).with_rotary(Rotary::new(
        RotaryStyle::Neox,
        128,
        500,
    ));
    let plan = Plan::new(&problem, gpu.device()).unwrap();
    let stream = Stream::new(gpu.device().context().unwrap()).unwrap();
    let upload = |bytes: &[u8]| DeviceBuffer::from_host(&stream, bytes).unwrap();
    let first = problem.random(0);
    let mut before = problem.poisoned();
    let mut inputs =
        [&first.new_key, &first.new_value, &first.query, &first.cos, &first.sin].map(|tensor| upload(&tensor.data));
    let (mut slots, mut positions) =
        (upload(bytes(&first, Operand::SlotMapping)), upload(bytes(&first, Operand::Positions)));
    let outputs = [&before.key_cache, &before.value_cache, &before.query_output].map(|tensor| upload(&tensor.data));
    let [key, value, query, cos, sin] = inputs.each_ref().map(DeviceBuffer::address);
    let [key_cache, value_cache, query_output] = outputs.each_ref().map(DeviceBuffer::address);
    let tensors = DeviceTensors::NONE
        .with_new_key(key)
        .with_new_value(value)
        .with_key_cache(key_cache)
        .with_value_cache(value_cache)
        .with_slot_mapping(slots.address())
        .with_query(query)
        .with_query_output(query_output)
        .with_positions(positions.address())
        .with_cos(cos)
        .with_sin(sin);
    // SAFETY: the tensors are whole, nobody else's, and outlive the graph.
    let graph = Graph::capture::<Error>(&stream, |stream| unsafe { plan.launch(stream, tensors) }).unwrap();
    for seed in 0..5 {
        let data = problem.random(seed);
        for (buffer, tensor) in
            inputs.iter_mut().zip([&data.new_key, &data.new_value, &data.query, &data.cos, &data.sin])
        {
            buffer.copy_from_host(&stream, &tensor.data).unwrap();
        }
        slots.copy_from_host(&stream, bytes(&data, Operand::SlotMapping)).unwrap();
        positions.copy_from_host(&stream, bytes(&data, Operand::Positions)).unwrap();
        // SAFETY: as above.
        unsafe { graph.launch(&stream) }.unwrap();
        let mut after = before.clone();
        let tensors = [&mut after.key_cache, &mut after.value_cache, &mut after.query_output];
        for (tensor, buffer) in tensors.into_iter().zip(&outputs) {
            tensor.data = buffer.to_host(&stream).unwrap();
        }
        check_append(&problem, &data, &before, &after);
        before = after;
    }
}

/// The second part before the first in memory, and fewer tokens than the plan has.
fn two_parts_lie_anywhere(gpu: &Gpu) {
    let problem = MergeProblem::new(2, 100, 32, 128, DType::F16).with_token_major_lse();
    let plan = Plan::new(&problem, gpu.device()).unwrap();
    let stream = Stream::new(gpu.device().context().unwrap()).unwrap();
    let upload = |bytes: &[u8]| DeviceBuffer::from_host(&stream, bytes).unwrap();
    let fewer = problem.with_tokens(61);
    let inputs = fewer.random(13);
    let [second, first] = [1, 0].map(|part: usize| upload(&inputs.part_outputs[part].data));
    let lses = [0, 1].map(|part: usize| upload(&inputs.part_lses[part].data));
    let mut outputs = fewer.poisoned();
    let (output_buffer, lse_buffer) = (upload(&outputs.output.data), upload(outputs.slot(Operand::Lse).unwrap().data));
    let tensors = DeviceTensors::NONE
        .with_two_parts([first.address(), second.address()], lses.each_ref().map(DeviceBuffer::address))
        .with_output(output_buffer.address())
        .with_lse(lse_buffer.address())
        .with_tokens(61);
    // SAFETY: the tensors are whole for so many tokens, and nobody else's.
    unsafe { plan.launch(&stream, tensors) }.unwrap();
    outputs.output.data = output_buffer.to_host(&stream).unwrap();
    let lse_bytes = lse_buffer.to_host(&stream).unwrap();
    let words = lse_bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    outputs.lse = Some(words.collect());
    merge_oracle(&fewer, &inputs.views()).unwrap().check(&fewer, &outputs).unwrap();
}
