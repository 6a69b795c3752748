//! Everything of this crate that only a GPU can answer, in one run: `cargo run --release --example gpu_smoke`.
//!
//! It ends with an illegal address on purpose, because nothing can follow one.

#![expect(unsafe_code, reason = "launches")]
#![expect(clippy::print_stdout, reason = "a program for people")]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flashcore_cuda::cache::{CacheOptions, KernelCache, SelfCheck};
use flashcore_cuda::{
    Context, CudaError, DeviceBuffer, Driver, Event, Graph, JitOptions, Kernel, Kernels, L2Flush, Launch, Stream,
    compile,
};
use flashcore_ir::Arch;
use flashcore_kernels::{Buffers, Config, Plan};
use flashcore_problem::{DType, Evidence, Inputs, Outputs, Problem, ReferenceError, judge, oracle};

const REPEATS: u16 = 50;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(error) => {
            println!("{error}");
            return Ok(());
        }
    };
    println!("driver: CUDA {}, release {:?}", driver.version(), driver.release());
    for device in driver.devices()? {
        println!("device {}: {} {} {:?} {:?}", device.ordinal, device.name, device.uuid, device.arch(), device);
    }
    let device = driver.device(0)?;
    let context = timed("context", || Context::new(&device))?;
    println!("memory free, total: {:?}", context.memory()?);
    let folder = std::env::temp_dir().join(format!("flashcore-smoke-{}", std::process::id()));
    let mut archs = vec![Arch::Sm80, device.arch()?];
    archs.extend(device.runs(Arch::Sm90a).then_some(Arch::Sm90a));
    for arch in archs {
        for config in [Config::scalar(), Config::ampere()] {
            attend(&context, &folder, config, arch)?;
        }
    }
    complaint(&context);
    illegal_address(&context)?;
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

/// One kernel: compiled, cached, launched, judged, timed and replayed.
fn attend(context: &Context, folder: &std::path::Path, config: Config, arch: Arch) -> Result<(), Box<dyn Error>> {
    let mut problem = Problem::new(1, 8, 512, 64, DType::F16);
    problem.lse = true;
    let plan = Plan::new(&problem, config, arch).map_err(|reasons| format!("{reasons:?}"))?;
    println!("\n== {} for {arch}", plan.kernel.name);
    let open = || {
        let options = CacheOptions::folder(folder).with_warnings(|warning| println!("warning: {warning}"));
        Kernels::new(context, Arc::new(KernelCache::open(options)), JitOptions::default())
    };
    let kernels = open();
    let kernel = timed("first load", || kernels.load(&plan.kernel))?;
    println!("{:?} {:?}\n{:?}\n{:?}", kernel.source(), kernel.timings(), kernel.usage(), kernel.report());
    println!("CTAs per SM: {}\nlog:\n{}", kernel.ctas_per_sm()?, kernel.log());
    let again = timed("load from disk", || open().load(&plan.kernel))?;
    println!("{:?} {:?}", again.source(), again.timings());

    let stream = Stream::new(context)?;
    let inputs = Inputs::random(&problem, 1);
    let mut outputs = Outputs::poisoned(&problem);
    let query = DeviceBuffer::from_host(&stream, &inputs.query.data)?;
    let key = DeviceBuffer::from_host(&stream, &inputs.key.data)?;
    let value = DeviceBuffer::from_host(&stream, &inputs.value.data)?;
    let output = DeviceBuffer::from_host(&stream, &outputs.output.data)?;
    let rows = outputs.lse.as_ref().map_or(0, Vec::len);
    let lse = DeviceBuffer::filled(&stream, 4 * rows, 0xFF)?;
    let buffers = Buffers {
        lse: lse.address(),
        ..Buffers::new(query.address(), key.address(), value.address(), output.address())
    };
    let launch = kernel.prepare(plan.grid, &plan.arguments(buffers))?;
    // SAFETY: the buffers have the sizes of the problem and are used by nobody else.
    unsafe { kernel.launch(&stream, &launch) }?;
    outputs.output.data = output.to_host(&stream)?;
    let sums = lse.to_host(&stream)?;
    outputs.lse = Some(sums.as_chunks().0.iter().map(|&bytes| f32::from_ne_bytes(bytes)).collect());
    let expected = oracle(&problem, &inputs)?;
    let yardstick = ReferenceError::measure(&problem, &inputs, &expected)?;
    let verdict = judge(&problem, &expected, &yardstick, &Evidence::new(&inputs, &outputs));
    println!("verdict: {verdict}");
    kernels.set_verdict(&kernel, if verdict.passed() { SelfCheck::Passed } else { SelfCheck::NotRun });
    println!("verdict on disk: {:?}", open().load(&plan.kernel)?.self_check());

    time(&kernel, &launch, &stream)?;
    Ok(())
}

/// By events around launches, cold and hot, and by replay of a graph.
fn time(kernel: &Kernel, launch: &Launch, stream: &Stream) -> Result<(), CudaError> {
    let context = kernel.context();
    let (start, end) = (Event::new(context)?, Event::new(context)?);
    let mut flush = L2Flush::new(context)?;
    for cold in [false, true] {
        let mut total = 0.0;
        for _ in 0..REPEATS {
            if cold {
                flush.flush(stream)?;
            }
            start.record(stream)?;
            // SAFETY: the buffers of `attend` are alive.
            unsafe { kernel.launch(stream, launch) }?;
            end.record(stream)?;
            end.synchronize()?;
            total += end.milliseconds_since(&start)?;
        }
        println!("by events, cold {cold}: {:.4} ms", total / f32::from(REPEATS));
    }
    let graph = Graph::capture(stream, |stream| {
        (0..REPEATS).try_for_each(|_| {
            // SAFETY: as above, until after the last launch of the graph.
            unsafe { kernel.launch(stream, launch) }
        })
    })?;
    start.record(stream)?;
    // SAFETY: as above.
    unsafe { graph.launch(stream) }?;
    end.record(stream)?;
    end.synchronize()?;
    let each = end.milliseconds_since(&start)? / f32::from(REPEATS);
    println!("by a graph of {} launches: {each:.4} ms", graph.nodes());
    let start = Instant::now();
    for _ in 0..1000 {
        // SAFETY: as above.
        unsafe { kernel.launch(stream, launch) }?;
    }
    println!("host time of a launch: {:?}", start.elapsed() / 1000);
    stream.synchronize()
}

/// What a user sees whose kernel does not compile, and that the context survives it.
fn complaint(context: &Context) {
    let ptx = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n    bogus.u32 %r1, 1;\n}\n";
    println!(
        "\n== a kernel that does not compile\n{:?}",
        compile(context, "k", ptx, Arch::Sm80, JitOptions::default())
    );
    println!("context afterwards: {:?}", context.synchronize());
    println!("no room: {:?}", DeviceBuffer::uninitialised(context, 1 << 50).map(|_| ()));
}

fn illegal_address(context: &Context) -> Result<(), Box<dyn Error>> {
    println!("\n== an illegal address");
    let problem = Problem::new(1, 1, 64, 64, DType::F16);
    let plan = Plan::new(&problem, Config::scalar(), Arch::Sm80).map_err(|reasons| format!("{reasons:?}"))?;
    let kernels = Kernels::new(context, Arc::new(KernelCache::open(CacheOptions::memory())), JitOptions::default());
    let kernel = kernels.load(&plan.kernel)?;
    let stream = Stream::new(context)?;
    let nowhere = Buffers { lse: 16, ..Buffers::new(16, 16, 16, 16) };
    let launch = kernel.prepare(plan.grid, &plan.arguments(nowhere))?;
    // SAFETY: there is none. The device faults, which is the point; the host's memory is not touched.
    println!("launch: {:?}", unsafe { kernel.launch(&stream, &launch) });
    println!("wait: {}", stream.synchronize().unwrap_err());
    println!("later: {}", stream.synchronize().unwrap_err());
    drop((stream, kernel, kernels));
    println!("drop failure: {:?}", context.drop_failure());
    Ok(())
}

fn timed<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = work();
    let elapsed: Duration = start.elapsed();
    println!("{what}: {elapsed:?}");
    value
}
