//! Tests of the device side against the fake driver's answers.

use std::sync::Arc;

use flashcore_ir::types::{F32, U32, U64};
use flashcore_ir::{Arch, Argument, Builder, VerifiedKernel};

use crate::cache::scratch::Scratch;
use crate::cache::{CacheOptions, Compiled, KernelCache, SelfCheck, Source};
use crate::error::code;
use crate::fake::{self, FREE_BYTES, PRIMARY, SeenLaunch, TOTAL_BYTES, context, fail, state};
use crate::sys::{CUjit_option, CUlaunchAttributeID};
use crate::*;

const ILLEGAL_ADDRESS: u32 = 700;
/// A code that no header had when this was written.
const UNHEARD_OF: u32 = 987;

/// A kernel that stores one value, with three parameters of different types.
fn kernel(arch: Arch) -> VerifiedKernel {
    let mut k = Builder::new("fake_kernel", 64);
    let to = k.parameter::<U64>("to");
    let index = k.parameter::<U32>("index");
    let value = k.parameter::<F32>("value");
    let address = k.mad_wide(index, 4u32, to);
    k.store_one(address, value);
    k.finish().verify(arch).unwrap()
}

fn kernels(options: CacheOptions) -> Kernels {
    Kernels::new(&context(), Arc::new(KernelCache::open(options)), JitOptions::default())
}

fn failure(call: &'static str, code: u32) -> Failure {
    let name = format!("CUDA error {code}");
    Failure { call, code, name, text: "the driver has no words for it".to_owned(), last_launch: None }
}

#[test]
fn the_device_is_what_the_driver_says() {
    let driver = fake::driver();
    assert_eq!((driver.version(), driver.release(), driver.device_count()), (DriverVersion(13_000), Some("999.1"), 1));
    assert_eq!(driver.fingerprint(), "13000 999.1");
    let device = driver.device(0).unwrap();
    assert_eq!((device.name.as_str(), device.compute, device.memory_bytes), ("Fake H200", (9, 0), TOTAL_BYTES));
    assert_eq!((device.attributes.l2_bytes, device.attributes.shared_bytes_per_cta), (1024, 227 * 1024));
    // The number of each of these is its answer here, so a mix-up shows.
    assert_eq!(device.attributes.num_sms, 16);
    assert_eq!((device.attributes.clock_khz, device.attributes.memory_clock_khz), (13, 36));
    assert_eq!(device.arch(), Ok(Arch::Sm90));
    assert_eq!(driver.device(1).unwrap_err(), CudaError::UnknownDevice { ordinal: 1, count: 1 });
    state(|state| state.compute = (7, 5));
    let error = CudaError::DeviceTooOld { name: "Fake H200".to_owned(), compute: (7, 5) };
    assert_eq!(driver.device(0).unwrap().arch(), Err(error));
}

#[test]
fn a_driver_that_cannot_start() {
    for (answer, expected) in [
        (code::NO_DEVICE, CudaError::NoDevice),
        (code::STUB_LIBRARY, CudaError::NoDriver { reason: "only its stub is installed".to_owned() }),
        (UNHEARD_OF, CudaError::from(failure("cuInit", UNHEARD_OF))),
    ] {
        fail("cuInit", Some(answer));
        assert_eq!(Driver::initialise(fake::API, None).unwrap_err(), expected);
    }
}

#[test]
fn the_context_is_current_during_calls_and_only_then() {
    let context = context();
    assert!(state(|state| state.current.is_empty()));
    // A thread that has another context current gets it back.
    let other = 0xD0;
    state(|state| state.current.push(other));
    context.synchronize().unwrap();
    assert_eq!(state(|state| (state.current.clone(), state.count("cuCtxPushCurrent_v2"))), (vec![other], 1));
    // A thread that has ours current, as most do, pays nothing for it.
    state(|state| state.current.push(PRIMARY));
    context.synchronize().unwrap();
    assert_eq!(state(|state| state.count("cuCtxPushCurrent_v2")), 1);
    assert_eq!(state(|state| state.count("cuCtxPopCurrent_v2")), 1);
}

#[test]
fn a_device_has_one_context() {
    let device = fake::driver().device(0).unwrap();
    let (first, second) = (Context::new(&device).unwrap(), Context::new(&device).unwrap());
    assert_eq!(first, second);
    assert_eq!(state(|state| state.count("cuDevicePrimaryCtxRetain")), 1);
    drop(first);
    assert_eq!(state(|state| state.count("cuDevicePrimaryCtxRelease_v2")), 0);
    drop(second);
    assert_eq!(state(|state| state.count("cuDevicePrimaryCtxRelease_v2")), 1);
}

#[test]
fn an_error_that_ends_all_work_is_reported_once_and_remembered() {
    let kernels = kernels(CacheOptions::memory());
    let context = kernels.context().clone();
    let stream = Stream::new(&context).unwrap();
    let buffer = DeviceBuffer::uninitialised(&context, 64).unwrap();
    let kernel = kernels.load(&kernel(Arch::Sm90)).unwrap();
    let launch = kernel.prepare([1, 1, 1], &[Argument::U64(8), Argument::U32(0), Argument::F32(1.0)]).unwrap();
    // SAFETY: the fake driver executes nothing.
    unsafe { kernel.launch(&stream, &launch) }.unwrap();

    fail("cuStreamSynchronize", Some(ILLEGAL_ADDRESS));
    let first = Failure {
        call: "cuStreamSynchronize",
        code: ILLEGAL_ADDRESS,
        name: "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned(),
        text: "an illegal memory access was encountered".to_owned(),
        last_launch: Some(Arc::from("fake_kernel")),
    };
    assert_eq!(stream.synchronize(), Err(CudaError::from(first.clone())));
    fail("cuStreamSynchronize", None);
    // From here on the driver is not called.
    let calls = state(|state| state.calls.values().sum::<usize>());
    let poisoned = CudaError::Poisoned { first: Box::new(first.clone()) };
    assert_eq!(stream.synchronize(), Err(poisoned.clone()));
    assert_eq!(buffer.to_host(&stream).unwrap_err(), poisoned);
    assert_eq!(DeviceBuffer::uninitialised(&context, 64).unwrap_err(), poisoned);
    // SAFETY: the fake driver executes nothing.
    assert_eq!(unsafe { kernel.launch(&stream, &launch) }, Err(poisoned.clone()));
    assert_eq!(Stream::new(&Context::new(context.device()).unwrap()).unwrap_err(), poisoned);
    drop((buffer, stream, kernel));
    assert_eq!(state(|state| state.calls.values().sum::<usize>()), calls);
    assert_eq!((context.poison(), context.drop_failure()), (Some(&first), None));
}

#[test]
fn an_error_that_concerns_one_call_ends_nothing() {
    let context = context();
    fail("cuStreamCreate", Some(UNHEARD_OF));
    assert_eq!(Stream::new(&context).unwrap_err(), CudaError::from(failure("cuStreamCreate", UNHEARD_OF)));
    fail("cuStreamCreate", None);
    assert!(Stream::new(&context).is_ok());
    assert_eq!(context.poison(), None);
}

#[test]
fn errors_of_destructors_are_kept() {
    let context = context();
    let stream = Stream::new(&context).unwrap();
    fail("cuStreamDestroy_v2", Some(UNHEARD_OF));
    drop(stream);
    assert_eq!(context.drop_failure(), Some(&failure("cuStreamDestroy_v2", UNHEARD_OF)));
}

#[test]
fn bytes_go_to_the_device_and_back() {
    let stream = Stream::new(&context()).unwrap();
    let bytes: Vec<u8> = (0..100).collect();
    let mut buffer = DeviceBuffer::from_host(&stream, &bytes).unwrap();
    assert_eq!(buffer.to_host(&stream).unwrap(), bytes);
    let mut part = [0; 3];
    buffer.copy_to_host(&stream, 97, &mut part).unwrap();
    assert_eq!(part, [97, 98, 99]);
    // SAFETY: the buffer has these bytes.
    unsafe { read_device(&stream, buffer.address() + 50, &mut part) }.unwrap();
    assert_eq!(part, [50, 51, 52]);
    // SAFETY: as above.
    unsafe { fill_device(&stream, buffer.address() + 97, 2, 7) }.unwrap();
    assert_eq!(buffer.to_host(&stream).unwrap()[96..], [96, 7, 7, 99]);
    for (offset, length) in [(98, 3), (usize::MAX, 3), (101, 0)] {
        let error = CudaError::OutOfBounds { offset, length, bytes: 100 };
        assert_eq!(buffer.copy_to_host(&stream, offset, &mut vec![0; length]), Err(error));
    }
    let too_long = CudaError::OutOfBounds { offset: 0, length: 101, bytes: 100 };
    assert_eq!(buffer.copy_from_host(&stream, &[0; 101]), Err(too_long.clone()));
    let large = DeviceBuffer::filled(&stream, 101, 7).unwrap();
    assert_eq!(buffer.copy_from(&stream, &large), Err(too_long));
    buffer.copy_from(&stream, &DeviceBuffer::filled(&stream, 2, 5).unwrap()).unwrap();
    assert_eq!(buffer.to_host(&stream).unwrap()[..4], [5, 5, 2, 3]);
    buffer.fill(&stream, 9).unwrap();
    assert_eq!(buffer.to_host(&stream).unwrap(), [9; 100]);

    let empty = DeviceBuffer::from_host(&stream, &[]).unwrap();
    assert_eq!((empty.address(), empty.to_host(&stream).unwrap()), (0, vec![]));
    buffer.free().unwrap();
    drop((large, empty));
    assert_eq!(state(|state| state.live_allocations()), 0);
}

#[test]
fn a_full_device_says_how_full() {
    let context = context();
    fail("cuMemAlloc_v2", Some(code::OUT_OF_MEMORY));
    let error = CudaError::OutOfMemory { bytes: 1 << 40, free: FREE_BYTES, total: TOTAL_BYTES };
    assert_eq!(DeviceBuffer::uninitialised(&context, 1 << 40).unwrap_err(), error);
}

#[test]
fn a_flush_writes_more_than_the_cache_holds() {
    let context = context();
    let mut flush = L2Flush::new(&context).unwrap();
    assert_eq!(flush.bytes(), 2048);
    flush.flush(&Stream::new(&context).unwrap()).unwrap();
    assert_eq!(state(|state| state.count("cuMemsetD8Async")), 1);
}

#[test]
fn a_graph_records_and_replays() {
    let kernels = kernels(CacheOptions::memory());
    let stream = Stream::new(kernels.context()).unwrap();
    let kernel = kernels.load(&kernel(Arch::Sm90)).unwrap();
    let launch = kernel.prepare([1, 1, 1], &[Argument::U64(8), Argument::U32(0), Argument::F32(1.0)]).unwrap();
    let mut buffer = DeviceBuffer::uninitialised(kernels.context(), 4).unwrap();
    let graph = Graph::capture(&stream, |stream| {
        // Calls that would touch the host's memory at each replay are refused, and leave the recording as it was.
        let refused = |call| Err(CudaError::Capturing { call });
        assert_eq!(buffer.copy_from_host(stream, &[0; 4]), refused("a copy from the host"));
        assert_eq!(buffer.to_host(stream).map(|_| ()), refused("a copy to the host"));
        assert_eq!(stream.synchronize(), refused("a wait for a stream"));
        // SAFETY: the fake driver executes nothing.
        unsafe { kernel.launch(stream, &launch) }?;
        // SAFETY: as above.
        unsafe { kernel.launch(stream, &launch) }
    })
    .unwrap();
    assert_eq!(graph.nodes(), 2);
    // SAFETY: as above.
    unsafe { graph.launch(&stream) }.unwrap();
    drop(graph);
    let counts = ["cuGraphLaunch", "cuGraphExecDestroy", "cuGraphDestroy", "cuMemcpyHtoDAsync_v2"];
    assert_eq!(counts.map(|function| state(|state| state.count(function))), [1, 1, 1, 0]);
    assert!(!stream.is_capturing().unwrap());
}

#[test]
fn a_recording_that_fails_ends() {
    let stream = Stream::new(&context()).unwrap();
    let error = Graph::capture(&stream, |_| Err(CudaError::NoDevice)).unwrap_err();
    assert_eq!(error, CudaError::NoDevice);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        Graph::capture(&stream, |_| -> Result<(), CudaError> { std::panic::resume_unwind(Box::new("bug")) })
    }));
    assert!(panic.is_err());
    assert!(!stream.is_capturing().unwrap());
    assert_eq!(state(|state| (state.count("cuStreamEndCapture"), state.count("cuGraphDestroy"))), (2, 2));
    assert_eq!(state(|state| state.count("cuGraphInstantiateWithFlags")), 0);
}

#[test]
fn events_take_the_time() {
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let (start, end) = (Event::new(&context).unwrap(), Event::new(&context).unwrap());
    start.record(&stream).unwrap();
    end.record(&stream).unwrap();
    stream.wait_for(&end).unwrap();
    fail("cuEventQuery", Some(code::NOT_READY));
    assert_eq!(end.has_happened(), Ok(false));
    fail("cuEventQuery", None);
    assert_eq!(end.has_happened(), Ok(true));
    end.synchronize().unwrap();
    assert_eq!(end.milliseconds_since(&start), Ok(1.0));
}

#[test]
fn a_launch_reaches_the_driver_as_it_was_prepared() {
    let kernels = kernels(CacheOptions::memory());
    let stream = Stream::new(kernels.context()).unwrap();
    let kernel = kernels.load(&kernel(Arch::Sm90)).unwrap();
    let arguments = [Argument::U64(0x7000_0000_1000), Argument::U32(3), Argument::F32(1.5)];
    let mut launch = kernel.prepare([4, 2, 1], &arguments).unwrap();
    state(|state| state.argument_count = 3);
    // SAFETY: the fake driver executes nothing.
    unsafe { kernel.launch(&stream, &launch) }.unwrap();
    kernel.set_argument(&mut launch, 1, Argument::U32(9)).unwrap();
    // SAFETY: as above.
    unsafe { kernel.launch(&stream, &launch) }.unwrap();
    let shape = LaunchShape { cluster: Some([2, 1, 1]), overlaps_previous: true, ..*launch.shape() };
    let clustered = kernel.prepare_shape(shape, &arguments).unwrap();
    // SAFETY: as above.
    unsafe { kernel.launch(&stream, &clustered) }.unwrap();

    let plain = SeenLaunch {
        function: state(|state| state.launches[0].function),
        grid: [4, 2, 1],
        block: [64, 1, 1],
        shared_bytes: 0,
        stream: stream.raw().addr(),
        attributes: vec![],
        arguments: vec![0x7000_0000_1000, 3, u64::from(1.5f32.to_bits())],
    };
    let mut changed = plain.clone();
    changed.arguments[1] = 9;
    let mut clustered = plain.clone();
    clustered.attributes = vec![
        (CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as u32, [2, 1, 1]),
        (CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as u32, [1, 0, 0]),
    ];
    assert_eq!(state(|state| state.launches.clone()), [plain, changed, clustered]);

    assert_eq!(kernel.prepare([0, 1, 1], &arguments), Err(CudaError::Grid { grid: [0, 1, 1] }));
    let wrong = kernel.set_argument(&mut launch, 3, Argument::U32(0)).unwrap_err();
    assert_eq!(wrong, CudaError::ArgumentCount { kernel: "fake_kernel".to_owned(), expected: 3, found: 4 });
}

#[test]
fn a_tensor_map_reaches_the_driver_as_it_was_described() {
    use flashcore_ir::{InvalidTensorMap, OutOfBounds, Swizzle, TensorElement, TensorMap};
    let context = context();
    let mut map = TensorMap::new(0x7000_0000_1000, TensorElement::Bf16, &[64, 100, 3], &[128, 12_800], &[32, 16, 1]);
    map.element_strides[1] = 2;
    map.fill = OutOfBounds::Nan;
    let encoded = context.encode_tensor_map(&map.with_swizzle(Swizzle::Bytes64)).unwrap();
    let words: Vec<u64> = encoded.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
    // Element 9 is bf16, swizzle 2 is 64 bytes, fill 1 is NaN.
    let expected = [0x7000_0000_1000, 9 | 2 << 16 | 1 << 24, 64, 100, 3, 0, 0, 128, 12_800, 0, 0, 32 << 8 | 1];
    assert_eq!(words[..12], expected);
    assert_eq!(words[12..], [16 << 8 | 2, 1 << 8 | 1, 0, 0]);

    let invalid = context.encode_tensor_map(&TensorMap { base: 8, ..map });
    assert_eq!(invalid, Err(CudaError::TensorMap(InvalidTensorMap::Base { base: 8 })));
    assert_eq!(state(|state| state.count("cuTensorMapEncodeTiled")), 1);
    fail("cuTensorMapEncodeTiled", Some(code::INVALID_VALUE));
    let CudaError::Call(failure) = context.encode_tensor_map(&map).unwrap_err() else { panic!("no failed call") };
    assert_eq!((failure.call, failure.code), ("cuTensorMapEncodeTiled", code::INVALID_VALUE));
}

#[test]
fn a_kernel_is_compiled_once_per_machine_and_loaded_once_per_process() {
    let scratch = Scratch::new("kernels");
    let verified = kernel(Arch::Sm90);
    let first = kernels(CacheOptions::folder(scratch.path()));
    let loaded = first.load(&verified).unwrap();
    assert_eq!(loaded.source(), Source::Compiled);
    assert_eq!(state(|state| state.ptx.clone()), flashcore_ptx::print(&verified));
    assert_eq!((loaded.usage().registers, loaded.report().map(|report| report.registers)), (40, Some(40)));
    assert_eq!(loaded.ctas_per_sm(), Ok(32));
    assert!(Arc::ptr_eq(&loaded, &first.load(&verified).unwrap()));
    first.set_verdict(&loaded, SelfCheck::Passed);
    assert_eq!(loaded.self_check(), SelfCheck::Passed);

    let second = kernels(CacheOptions::folder(scratch.path()));
    let again = second.load(&verified).unwrap();
    assert_eq!((again.source(), again.self_check(), again.key()), (Source::Disk, SelfCheck::Passed, loaded.key()));
    assert_eq!(again.log(), loaded.log());
    assert_eq!(state(|state| (state.count("cuLinkComplete"), state.count("cuModuleLoadData"))), (1, 2));
    let listed = second.cache().list().unwrap();
    assert_eq!((listed[0].metadata.arch.as_str(), listed[0].metadata.driver.as_str()), ("sm_90", "13000 999.1"));

    // Another GPU, another driver or other options: another kernel.
    let options = JitOptions { optimisation: 0, ..JitOptions::default() };
    let slower = Kernels::new(first.context(), first.cache().clone(), options);
    assert_eq!(slower.load(&verified).unwrap().source(), Source::Compiled);
    state(|state| state.compute = (10, 0));
    let newer = kernels(CacheOptions::folder(scratch.path()));
    assert_eq!(newer.load(&verified).unwrap().source(), Source::Compiled);
}

#[test]
fn code_that_the_driver_refuses_is_compiled_again() {
    let scratch = Scratch::new("refused");
    let verified = kernel(Arch::Sm90);
    let key = kernels(CacheOptions::folder(scratch.path())).load(&verified).unwrap().key();
    // A sound entry with unusable code, as an attacker or another machine would leave it.
    let cache = KernelCache::open(CacheOptions::folder(scratch.path()));
    let listed = cache.list().unwrap().remove(0);
    cache.clear().unwrap();
    let planted = Compiled { metadata: listed.metadata, payload: b"no code".to_vec() };
    cache.get_or_compile(key, || Ok::<_, CudaError>(planted)).unwrap();

    let kernels = kernels(CacheOptions::folder(scratch.path()));
    assert_eq!(kernels.load(&verified).unwrap().source(), Source::Compiled);
    assert!(scratch.path().join(format!("v1/{key}.bad")).exists());
    // Code that is refused right after compilation is an error, not a loop.
    fail("cuModuleLoadData", Some(code::INVALID_IMAGE));
    let other = self::kernels(CacheOptions::memory());
    let error = CudaError::from(failure("cuModuleLoadData", code::INVALID_IMAGE));
    assert_eq!(other.load(&verified).unwrap_err(), error);
    assert_eq!(state(|state| state.count("cuLinkComplete")), 3);
}

#[test]
fn the_compiler_is_told_what_to_do() {
    let context = context();
    let number = |key: CUjit_option| key as u32;
    let options = || state(|state| state.jit_options.clone());
    let ptx = ".version 8.0\n";
    let plain = compile(&context, "k", ptx, Arch::Sm90, JitOptions::default()).unwrap();
    assert_eq!(plain.bytes, b"cubin of .version 8.0\n");
    assert_eq!(plain.report.map(|report| report.registers), Some(40));
    assert!(options().contains(&(number(CUjit_option::CU_JIT_LOG_VERBOSE), 1)));
    assert!(options().contains(&(number(CUjit_option::CU_JIT_OPTIMIZATION_LEVEL), 4)));
    assert!(!options().iter().any(|option| option.0 == number(CUjit_option::CU_JIT_TARGET)));
    compile(&context, "k", ptx, Arch::Sm90a, JitOptions { line_info: true, ..JitOptions::default() }).unwrap();
    assert!(options().contains(&(number(CUjit_option::CU_JIT_TARGET), 0x1_0000 + 90)));
    assert!(options().contains(&(number(CUjit_option::CU_JIT_GENERATE_LINE_INFO), 1)));
    assert_eq!(state(|state| state.count("cuLinkDestroy")), 2);

    // A driver that takes no target by name: retried without it.
    fail("cuLinkCreate_v2", Some(code::INVALID_VALUE));
    let refused = compile(&context, "k", ptx, Arch::Sm90a, JitOptions::default()).unwrap_err();
    let failure = Box::new(failure("cuLinkCreate_v2", code::INVALID_VALUE));
    assert_eq!(refused, CudaError::Compile { kernel: "k".to_owned(), failure, log: String::new() });
    assert_eq!(state(|state| state.count("cuLinkCreate_v2")), 4);
}

/// The linker ignores `setmaxnreg`; a program loaded whole does not.
#[test]
fn kernels_that_reallocate_registers_are_compiled_whole() {
    let context = context();
    let ptx = ".version 8.0\nsetmaxnreg.inc.sync.aligned.u32 232;\n";
    let whole = compile(&context, "k", ptx, Arch::Sm90a, JitOptions::default()).unwrap();
    assert_eq!(whole.bytes, [ptx.as_bytes(), b"\0"].concat());
    assert_eq!(whole.report.map(|report| report.registers), Some(40));
    let counts =
        state(|state| ["cuLinkCreate_v2", "cuModuleLoadDataEx", "cuModuleUnload"].map(|call| state.count(call)));
    assert_eq!(counts, [0, 1, 1]);
    // With the same options, by which the driver finds it in its cache.
    let options = || state(|state| state.jit_options.clone());
    let compiled_with = options();
    assert!(Module::load(&context, &whole.bytes, JitOptions::default()).is_ok());
    assert_eq!(state(|state| (state.count("cuModuleLoadDataEx"), state.count("cuModuleLoadData"))), (2, 0));
    assert_eq!(options().len(), compiled_with.len());
    Module::load(&context, &whole.bytes, JitOptions { line_info: true, ..JitOptions::default() }).unwrap();
    assert_eq!(options().len(), compiled_with.len() + 1);

    state(|state| state.errors = "ptxas application ptx input, line 2; error   : Unknown symbol 'x'\n");
    let error = compile(&context, "k", ptx, Arch::Sm90a, JitOptions::default()).unwrap_err();
    assert!(matches!(error, CudaError::Compile { log, .. } if log.contains("2 | setmaxnreg")));
}

#[test]
fn complaints_of_the_compiler_reach_the_user_with_their_lines() {
    state(|state| state.errors = "ptxas application ptx input, line 2; error   : Unknown symbol 'x'\n");
    let error =
        compile(&context(), "k", ".version 8.0\nmov.u32 x, 1;\n", Arch::Sm90a, JitOptions::default()).unwrap_err();
    let expected = CudaError::Compile {
        kernel: "k".to_owned(),
        failure: Box::new(failure("cuLinkAddData_v2", code::INVALID_SOURCE)),
        log: "ptxas application ptx input, line 2; error   : Unknown symbol 'x'\n     2 | mov.u32 x, 1;".to_owned(),
    };
    assert_eq!(error, expected);
    assert_eq!(state(|state| (state.count("cuLinkAddData_v2"), state.count("cuLinkDestroy"))), (1, 1));
}

#[test]
fn a_kernel_for_another_gpu_is_not_compiled() {
    state(|state| state.compute = (10, 0));
    let kernels = kernels(CacheOptions::memory());
    let expected = CudaError::WrongArch {
        kernel: "fake_kernel".to_owned(),
        arch: Arch::Sm90a,
        device: "Fake H200".to_owned(),
        compute: (10, 0),
    };
    assert_eq!(kernels.load(&kernel(Arch::Sm90a)).unwrap_err(), expected);
    assert_eq!(state(|state| state.count("cuLinkCreate_v2")), 0);
}
