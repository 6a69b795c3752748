//! The public API.

#![expect(unsafe_code, reason = "a launch takes addresses")]

use flashcore::cuda::cache::Source;
use flashcore::cuda::{CudaError, DeviceBuffer, Graph, Stream};
use flashcore::verify::{Evidence, Inputs, Outputs, ReferenceError, judge, oracle};
use flashcore::{
    Alignment, Config, DType, Device, DeviceTensors, Error, Invalid, KernelReason, Layout, Mask, Operation, PagedKv,
    Plan, PlanOptions, Problem, Reason, SelfCheckPolicy, SelfCheckReport, TensorError, supports,
};
use flashcore_bench::testkit::gpu::Gpu;

use crate::{Test, tests};

/// Every test of this file.
pub(crate) const TESTS: &[Test] = tests![
    every_config,
    every_layout,
    rows_without_keys_and_problems_without_rows,
    another_length_compiles_nothing,
    a_captured_launch_is_replayed,
    one_plan_on_several_streams_and_threads,
    a_split_plan_is_captured_beside_launches,
    wrong_addresses_launch_nothing,
    lengths_on_the_device_are_explained,
    continuing_is_attention_over_all_keys,
    every_reason_at_once,
];

fn check_outputs(problem: &Problem, inputs: &Inputs, outputs: &Outputs, what: &str) {
    let expected = oracle(problem, inputs).unwrap();
    let yardstick = ReferenceError::measure(problem, inputs, &expected).unwrap();
    let verdict = judge(problem, &expected, &yardstick, &Evidence::new(inputs, outputs));
    assert!(verdict.passed(), "{what} {problem}: {verdict}");
}

/// Tensors of a problem on a GPU.
struct OnDevice {
    stream: Stream,
    query: DeviceBuffer,
    key: DeviceBuffer,
    value: DeviceBuffer,
    output: DeviceBuffer,
    lse: DeviceBuffer,
}

impl OnDevice {
    fn new(device: &Device, problem: &Problem, inputs: &Inputs) -> Self {
        let stream = Stream::new(device.context().unwrap()).unwrap();
        let upload = |bytes: &[u8]| DeviceBuffer::from_host(&stream, bytes).unwrap();
        let poisoned = Outputs::poisoned(problem);
        let rows: Vec<u8> = poisoned.lse.iter().flatten().flat_map(|row| row.to_le_bytes()).collect();
        Self {
            query: upload(&inputs.query.data),
            key: upload(&inputs.key.data),
            value: upload(&inputs.value.data),
            output: upload(&poisoned.output.data),
            lse: upload(&rows),
            stream,
        }
    }

    fn tensors(&self) -> DeviceTensors {
        DeviceTensors::new(self.query.address(), self.key.address(), self.value.address(), self.output.address())
            .with_lse(self.lse.address())
    }

    fn outputs(&self, problem: &Problem) -> Outputs {
        let mut outputs = Outputs::poisoned(problem);
        outputs.output.data = self.output.to_host(&self.stream).unwrap();
        let rows = self.lse.to_host(&self.stream).unwrap();
        if let Some(lse) = &mut outputs.lse {
            let row = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
            *lse = rows.chunks_exact(4).map(row).collect();
        }
        outputs
    }
}

/// On host tensors and on device tensors, on a stream of ours and on a raw one: right, and the same bits.
fn check(device: &Device, config: Config, change: impl FnOnce(&mut Problem)) {
    let mut problem = Problem::new(2, 4, 150, 64, DType::F16);
    problem.key_heads = 2;
    problem.lse = true;
    change(&mut problem);
    let plan = Plan::with_config(&problem, device, config).unwrap();
    let inputs = Inputs::random(&problem, 21);
    let mut outputs = Outputs::poisoned(&problem);
    plan.run(&inputs, &mut outputs).unwrap();
    check_outputs(&problem, &inputs, &outputs, &config.to_string());

    for raw in [false, true] {
        let tensors = OnDevice::new(device, &problem, &inputs);
        if raw {
            // SAFETY: the tensors are whole and nobody else's, on a stream of the same context.
            unsafe { plan.launch(tensors.stream.raw(), tensors.tensors()) }.unwrap();
        } else {
            // SAFETY: as above.
            unsafe { plan.launch(&tensors.stream, tensors.tensors()) }.unwrap();
        }
        let launched = tensors.outputs(&problem);
        assert_eq!(launched.output, outputs.output, "{config} {problem}");
        let bits = |outputs: &Outputs| -> Vec<u32> { outputs.lse.iter().flatten().map(|row| row.to_bits()).collect() };
        assert_eq!(bits(&launched), bits(&outputs), "{config} {problem}");
    }
}

/// Lengths and pages that are wrong on the GPU are errors of the check, which sees what the stream has written before; it is
/// refused in a capture.
fn lengths_on_the_device_are_explained(gpu: &Gpu) {
    let device = gpu.device();
    let mut problem = Problem::new(3, 4, 1, 64, DType::F16).with_seqused_k(true);
    (problem.key_length, problem.paged) = (100, Some(PagedKv::new(16, 30, 7)));
    let plan = Plan::new(&problem, device).unwrap();
    let inputs = Inputs::random(&problem, 3);
    let on_device = OnDevice::new(device, &problem, &inputs);
    let stream = &on_device.stream;
    let upload = |bytes: Vec<u8>| DeviceBuffer::from_host(stream, &bytes).unwrap();
    let numbers = |numbers: &[u32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    // Entries past the last key are poison.
    let mut table = [u32::MAX; 21];
    for (sequence, length) in [(0, 100_usize), (1, 33)] {
        (0..length.div_ceil(16)).for_each(|page| table[sequence * 7 + page] = (sequence * 7 + page) as u32);
    }
    let mut lengths = upload(numbers(&[100, 33, 0]));
    let mut pages = upload(numbers(&table));
    let tensors = on_device.tensors().with_lse(0).with_seqused_k(lengths.address()).with_page_table(pages.address());
    // SAFETY: the operands are whole, and nobody else's.
    let check = || unsafe { plan.check_lengths(stream, tensors) };
    assert_eq!(check(), Ok(()));
    lengths.copy_from_host(stream, &numbers(&[100, 133, 0])).unwrap();
    let error = TensorError::KeyLength { batch: 1, length: 133, key_length: 100 };
    assert_eq!(check(), Err(Error::Invalid(Invalid::Tensors(vec![error]))));
    lengths.copy_from_host(stream, &numbers(&[100, 33, 1])).unwrap();
    let error = TensorError::Page { sequence: 2, entry: 0, page: -1, num_pages: 30 };
    assert_eq!(check(), Err(Error::Invalid(Invalid::Tensors(vec![error]))));
    table[14] = 29;
    pages.copy_from_host(stream, &numbers(&table)).unwrap();
    assert_eq!(check(), Ok(()));
    let captured = Graph::capture::<Error>(stream, |_| check());
    assert_eq!(captured.err(), Some(Error::CheckWhileCapturing));
}

/// The first keys, then the rest merged into their output and LSE, launched and replayed from a graph.
fn continuing_is_attention_over_all_keys(gpu: &Gpu) {
    let device = gpu.device();
    for (layout, total_q) in [(Layout::Bhsd, None), (Layout::Bshd, None), (Layout::Bshd, Some(70))] {
        let mut problem = Problem::new(3, 4, 21, 64, DType::Bf16).with_layout(layout).with_lse(true);
        (problem.key_heads, problem.key_length, problem.total_q) = (2, 300, total_q);
        let inputs = Inputs::random(&problem, 6);
        let on_device = OnDevice::new(device, &problem, &inputs);
        let stream = &on_device.stream;
        let offsets: Vec<u8> = inputs.cu_seqlens_q.iter().flatten().flat_map(|offset| offset.to_le_bytes()).collect();
        let offsets = DeviceBuffer::from_host(stream, &offsets).unwrap();
        let part = |keys: usize| problem.clone().with_key_length(keys).with_layout(Layout::Strided(problem.strides()));
        let first = Plan::new(&part(100), device).unwrap();
        let rest = Plan::new(Operation::Continue(part(200)), device).unwrap();
        let tensors = on_device.tensors().with_cu_seqlens_q(offsets.address());
        let mut later = tensors;
        later.key += 100 * (problem.strides().key.row * 2) as u64;
        later.value += 100 * (problem.strides().value.row * 2) as u64;
        // One workspace for both: the stream, or the graph, orders them.
        let bytes = first.workspace_bytes().max(rest.workspace_bytes());
        let workspace = DeviceBuffer::uninitialised(stream.context(), bytes).unwrap();
        let graph = Graph::capture::<Error>(stream, |stream| {
            // SAFETY: the tensors are whole, nobody else's, and outlive the graph.
            unsafe { first.launch(stream, tensors.with_workspace(workspace.address())) }?;
            // SAFETY: as above.
            unsafe { rest.launch(stream, later.with_workspace(workspace.address())) }
        })
        .unwrap();
        // SAFETY: as above.
        unsafe { graph.launch(stream) }.unwrap();
        check_outputs(&problem, &inputs, &on_device.outputs(&problem), "a graph that continues");
        // SAFETY: as above.
        unsafe { first.launch(stream, tensors) }.unwrap();
        // SAFETY: as above.
        unsafe { rest.launch(stream, later) }.unwrap();
        check_outputs(&problem, &inputs, &on_device.outputs(&problem), "continue");
    }
}

fn every_config(gpu: &Gpu) {
    let device = gpu.device();
    for config in Config::all() {
        let mut runs = 0;
        for (dtype, dim) in [(DType::F16, 32), (DType::Bf16, 64), (DType::F16, 96), (DType::Bf16, 128)] {
            // A config that is made for narrow heads has no registers for wide ones.
            if Plan::with_config(&Problem::new(2, 4, 150, dim, dtype), device, config).is_err() {
                continue;
            }
            runs += 1;
            for mask in [Mask::None, Mask::Causal(Alignment::TopLeft), Mask::Causal(Alignment::BottomRight)] {
                check(device, config, |problem| {
                    (problem.dtype, problem.mask) = (dtype, mask);
                    (problem.head_dim, problem.value_dim, problem.query_length) = (dim, dim, 77);
                });
            }
        }
        // A dynamic config takes packed sequences alone, which these are not; random cases of serving have them.
        let is_dynamic = config.to_string().ends_with("-dynamic");
        assert!(runs > 0 || is_dynamic, "{config} takes none of the problems");
    }
}

fn every_layout(gpu: &Gpu) {
    let device = gpu.device();
    for layout in [Layout::Bhsd, Layout::Bshd, Layout::PackedQkv] {
        check(device, Config::ampere(), |problem| problem.layout = layout);
    }
    // Rows apart: what lies between them stays as it was, says the gate.
    check(device, Config::ampere(), |problem| {
        let mut strides = problem.strides();
        strides.output.row += 8;
        strides.output.head = strides.output.row * 151;
        strides.output.batch = strides.output.head * 5;
        strides.key.batch = 0;
        problem.layout = Layout::Strided(strides);
    });
}

fn rows_without_keys_and_problems_without_rows(gpu: &Gpu) {
    let device = gpu.device();
    check(device, Config::ampere(), |problem| problem.key_length = 0);
    check(device, Config::ampere(), |problem| {
        (problem.key_length, problem.mask) = (3, Mask::Causal(Alignment::BottomRight));
    });
    check(device, Config::ampere(), |problem| problem.batch = 0);
    check(device, Config::ampere(), |problem| problem.query_length = 0);
}

fn another_length_compiles_nothing(gpu: &Gpu) {
    let device = gpu.device();
    let mut problem = Problem::new(1, 2, 100, 64, DType::F16);
    // Of one config: the default of another length may be another.
    let first = Plan::with_config(&problem, device, Config::ampere()).unwrap();
    println!("{}", first.report());
    (problem.key_length, problem.batch) = (5000, 3);
    let second = Plan::with_config(&problem, device, Config::ampere()).unwrap();
    println!("{}", second.report());
    let kernel = second.report().kernel.as_ref().unwrap();
    assert_eq!((kernel.source, kernel.self_check), (Source::Memory, SelfCheckReport::PassedBefore));
    // Turned off, a verdict that is there is still told.
    let off = PlanOptions::default().with_self_check(SelfCheckPolicy::Off);
    assert!(Plan::with_options(&problem, device, off).is_ok());
}

fn a_captured_launch_is_replayed(gpu: &Gpu) {
    let device = gpu.device();
    let problem = Problem::new(1, 2, 100, 64, DType::Bf16);
    let plan = Plan::new(&problem, device).unwrap();
    let inputs = Inputs::random(&problem, 4);
    let tensors = OnDevice::new(device, &problem, &inputs);
    let graph = Graph::capture::<Error>(&tensors.stream, |stream| {
        // SAFETY: the tensors are whole, nobody else's, and outlive the graph.
        unsafe { plan.launch(stream, tensors.tensors()) }
    })
    .unwrap();
    let untouched = Outputs::poisoned(&problem);
    assert_eq!(tensors.outputs(&problem).output, untouched.output, "recording computes nothing");
    for _ in 0..2 {
        // SAFETY: as above.
        unsafe { graph.launch(&tensors.stream) }.unwrap();
    }
    check_outputs(&problem, &inputs, &tensors.outputs(&problem), "graph");
}

/// Threads of a round, the streams they share, and how often each launches before it looks.
const THREADS: usize = 8;
const STREAMS: usize = 2;
const LAUNCHES: usize = 3;

/// One split-KV plan, launched at the same time from several threads on several streams, always gives the bits that it
/// gives alone. `rounds` as in `FLASHCORE_ROUNDS`.
fn check_concurrent_launches(device: &Device, rounds: usize, change: impl FnOnce(&mut Problem)) {
    let mut problem = Problem::new(1, 8, 1, 128, DType::F16);
    (problem.key_heads, problem.key_length, problem.lse) = (2, 8192, true);
    change(&mut problem);
    let plan = Plan::new(&problem, device).unwrap();
    assert!(plan.workspace_bytes() > 0, "{problem} needs no workspace: {}", plan.report());
    let streams: Vec<Stream> = (0..STREAMS).map(|_| Stream::new(device.context().unwrap()).unwrap()).collect();
    let together = std::sync::Barrier::new(THREADS);
    let wrong = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (plan, problem, together, wrong) = (&plan, &problem, &together, &wrong);
            let stream = &streams[thread % STREAMS];
            scope.spawn(move || {
                let inputs = Inputs::random(problem, 100 + thread as u64);
                let alone = OnDevice::new(device, problem, &inputs);
                // SAFETY: the tensors are whole and nobody else's.
                unsafe { plan.launch(&alone.stream, alone.tensors()) }.unwrap();
                let expected = alone.outputs(problem);
                check_outputs(problem, &inputs, &expected, "alone");
                let mut tensors: Vec<OnDevice> =
                    (0..LAUNCHES).map(|_| OnDevice::new(device, problem, &inputs)).collect();
                for _ in 0..rounds {
                    for tensors in &mut tensors {
                        tensors.output.fill(stream, 0xFF).unwrap();
                    }
                    together.wait();
                    for tensors in &tensors {
                        // SAFETY: as above; this thread waits for the stream below.
                        unsafe { plan.launch(stream, tensors.tensors()) }.unwrap();
                    }
                    stream.synchronize().unwrap();
                    let right = |tensors: &OnDevice| tensors.outputs(problem).output == expected.output;
                    let wrong_now = tensors.iter().filter(|tensors| !right(tensors)).count();
                    wrong.fetch_add(wrong_now, std::sync::atomic::Ordering::Relaxed);
                }
            });
        }
    });
    let (wrong, launches) = (wrong.into_inner(), rounds * THREADS * LAUNCHES);
    println!(
        "{problem}: {rounds} rounds, {launches} launches by {THREADS} threads on {STREAMS} streams, {wrong} wrong"
    );
    assert_eq!(wrong, 0, "of {launches} launches");
}

fn one_plan_on_several_streams_and_threads(gpu: &Gpu) {
    let device = gpu.device();
    let rounds = std::env::var("FLASHCORE_ROUNDS").map_or(50, |rounds| rounds.parse().unwrap());
    check_concurrent_launches(device, rounds, |_| {});
    check_concurrent_launches(device, rounds, |problem| {
        (problem.query_length, problem.mask) = (16, Mask::Causal(Alignment::BottomRight));
    });
}

fn a_split_plan_is_captured_beside_launches(gpu: &Gpu) {
    let device = gpu.device();
    let mut problem = Problem::new(1, 8, 1, 128, DType::F16);
    (problem.key_heads, problem.key_length) = (2, 8192);
    let plan = Plan::new(&problem, device).unwrap();
    assert!(plan.workspace_bytes() > 0);
    let inputs: Vec<Inputs> = (0..2).map(|seed| Inputs::random(&problem, seed)).collect();
    let [captured, launched] = [0, 1].map(|index| OnDevice::new(device, &problem, &inputs[index]));
    let capture = |tensors: DeviceTensors| {
        // SAFETY: the tensors are whole, nobody else's, and outlive the graph.
        Graph::capture::<Error>(&captured.stream, |stream| unsafe { plan.launch(stream, tensors) })
    };
    let refused = Error::Cuda(CudaError::CapturedWorkspace { bytes: plan.workspace_bytes() });
    assert_eq!(capture(captured.tensors()).err(), Some(refused));
    let workspace = DeviceBuffer::uninitialised(captured.stream.context(), plan.workspace_bytes()).unwrap();
    let graph = capture(captured.tensors().with_workspace(workspace.address())).unwrap();
    for _ in 0..200 {
        // SAFETY: as above, for both.
        unsafe { graph.launch(&captured.stream) }.unwrap();
        // SAFETY: as above.
        unsafe { plan.launch(&launched.stream, launched.tensors()) }.unwrap();
    }
    check_outputs(&problem, &inputs[0], &captured.outputs(&problem), "graph");
    check_outputs(&problem, &inputs[1], &launched.outputs(&problem), "beside it");
}

fn wrong_addresses_launch_nothing(gpu: &Gpu) {
    let device = gpu.device();
    let problem = Problem::new(1, 2, 100, 64, DType::Bf16);
    let plan = Plan::new(&problem, device).unwrap();
    let inputs = Inputs::random(&problem, 4);
    let tensors = OnDevice::new(device, &problem, &inputs);
    let good = tensors.tensors();
    let (address, argument) = (good.value + 8, "value");
    let wrong = |change: fn(&mut DeviceTensors)| {
        let mut tensors = good;
        change(&mut tensors);
        tensors
    };
    let cases = [
        (wrong(|tensors| tensors.key = 0), Error::Null { argument: "key" }),
        (wrong(|tensors| tensors.value += 8), Error::Misaligned { argument, address, multiple: 16 }),
        (
            wrong(|tensors| tensors.output = tensors.query),
            Error::Aliased { written: "output", other: "query", address: good.query },
        ),
        (wrong(|tensors| tensors.lse = 16), Error::Unexpected { argument: "lse", address: 16 }),
    ];
    for (wrong, expected) in cases {
        // SAFETY: nothing is launched, which is what this test is about.
        assert_eq!(unsafe { plan.launch(&tensors.stream, wrong) }, Err(expected));
    }
    assert_eq!(tensors.outputs(&problem).output, Outputs::poisoned(&problem).output);
    // SAFETY: the tensors are whole and nobody else's.
    unsafe { plan.launch(&tensors.stream, good) }.unwrap();
    check_outputs(&problem, &inputs, &tensors.outputs(&problem), "after errors");
}

fn every_reason_at_once(gpu: &Gpu) {
    let device = gpu.device();
    let mut problem = Problem::new(1, 2, 100, 2000, DType::F64);
    problem.value_dim = 64;
    let kernel = "scalar";
    let expected = [
        KernelReason::DType { kernel, dtype: DType::F64, has: &[DType::F16, DType::Bf16, DType::F32] },
        KernelReason::Dim { kernel, argument: "head_dim", dim: 2000, multiple: 1, most: 1024 },
    ];
    assert_eq!(*supports(&problem, device).unwrap_err(), expected.map(Reason::Kernel));
}
