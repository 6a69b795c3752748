//! Times of the loops on a GPU: one wave of CTAs, by events.

use std::sync::Arc;

use flashcore::Device;
use flashcore_cuda::cache::{CacheOptions, KernelCache};
use flashcore_cuda::{Context, DeviceBuffer, Event, JitOptions, Kernels, Stream};
use flashcore_ir::{Arch, Argument, VerifiedKernel};
use flashcore_problem::{Problem, SplitMix64};

use super::conversions::{CODES_PER_WORD, WORDS, loop_alone};
use super::{
    Conversion, ConversionRate, DecodeFloor, Machine, MicrobenchError, Microbenchmark, Product, ProductRate, Simulator,
    THREADS, bytes_of, words_of,
};
use crate::floor::Work;
use crate::testkit::gpu::Gpu;
use crate::testkit::shape_text;
use crate::timing::Times;

/// Turns of a loop in a launch: some milliseconds.
const TURNS: u32 = 4096;
/// Launches that are timed, after those that warm up.
const LAUNCHES: usize = 20;
const WARM_UP: usize = 3;

/// A GPU that is measured.
pub struct MicroGpu {
    context: Context,
    kernels: Kernels,
    arch: Arch,
    num_sms: u32,
    /// The highest clock, in Hz.
    clock: f64,
    /// Bytes per second of a copy.
    bandwidth: f64,
}

impl MicroGpu {
    /// A GPU, with its bandwidth measured now.
    pub fn new(gpu: &Gpu) -> Result<Self, flashcore::Error> {
        let device: &Device = gpu.device();
        let not_a_gpu = || flashcore::Error::NotOnCuda { call: "a microbenchmark", device: device.to_string() };
        let context = device.context().ok_or_else(not_a_gpu)?;
        let attributes = context.device().attributes;
        // In memory: nobody asks for these kernels again.
        let cache = Arc::new(KernelCache::open(CacheOptions::memory()));
        Ok(Self {
            kernels: Kernels::new(context, cache, JitOptions::default()),
            arch: context.device().specific_arch()?,
            num_sms: attributes.num_sms,
            clock: f64::from(attributes.clock_khz) * 1e3,
            bandwidth: gpu.ceilings()?.bytes,
            context: context.clone(),
        })
    }

    /// Judges everything that the architecture has, and times what is right.
    pub fn measure(
        &self,
        decode: &Problem,
        mut progress: impl FnMut(&str) -> bool,
    ) -> Result<Microbenchmark, MicrobenchError> {
        let floor = self.decode_floor(decode);
        let loop_alone = Some(self.time_codes(&loop_alone(self.arch)?, &floor)?);
        let (mut conversions, mut products) = (Vec::new(), Vec::new());
        for conversion in Conversion::all().filter(|conversion| conversion.exists_on(self.arch)) {
            let mut row = conversion.judged(self.arch, self)?;
            if !progress(&format!("{} to {}, {}, {}", row.from, row.to, row.way, row.order)) {
                break;
            }
            if row.wrong_codes.is_empty() {
                row.measured = Some(self.time_codes(&conversion.loop_kernel(self.arch)?, &floor)?);
            }
            conversions.push(row);
        }
        for product in Product::ALL.into_iter().filter(|product| product.exists_on(self.arch)) {
            let mut row = product.judged(self.arch, self)?;
            if !progress(&row.form) {
                break;
            }
            if row.is_right {
                row.measured = Some(self.time_product(product)?);
            }
            products.push(row);
        }
        Ok(Microbenchmark { arch: self.arch.to_string(), decode: Some(floor), loop_alone, conversions, products })
    }

    fn decode_floor(&self, decode: &Problem) -> DecodeFloor {
        let elements = |shape: flashcore_problem::Shape| shape.elements().unwrap_or(0) as f64;
        let bytes = Work::of(decode).bytes;
        DecodeFloor {
            shape: shape_text(decode),
            codes: elements(decode.key_shape()) + elements(decode.value_shape()),
            bytes,
            seconds: bytes / self.bandwidth,
            codes_per_clock_per_sm: self.bandwidth / self.clocks(),
        }
    }

    /// Clocks of all SMs in a second.
    fn clocks(&self) -> f64 {
        f64::from(self.num_sms) * self.clock
    }

    fn time_codes(&self, kernel: &VerifiedKernel, floor: &DecodeFloor) -> Result<ConversionRate, MicrobenchError> {
        let (threads, times) = self.time(kernel, &random_words((THREADS * WORDS) as usize, u32::MAX))?;
        let codes = f64::from(CODES_PER_WORD * WORDS) * f64::from(TURNS) * threads;
        let rate = codes / times.quantile(0.5);
        Ok(ConversionRate {
            codes,
            seconds: times.seconds,
            codes_per_clock_per_sm: rate / self.clocks(),
            decode_seconds: floor.codes / rate,
        })
    }

    fn time_product(&self, product: Product) -> Result<ProductRate, MicrobenchError> {
        let kernel = product.loop_kernel(self.arch)?;
        let (threads, times) = self.time(&kernel, &random_words(Product::input_words(), product.small()))?;
        let flops = product.flops(TURNS) * threads / 32.0;
        let flops_per_clock_per_sm = flops / times.quantile(0.5) / self.clocks();
        Ok(ProductRate { flops, seconds: times.seconds, flops_per_clock_per_sm })
    }

    /// Threads of a launch that fills the GPU once, and its times.
    fn time(&self, kernel: &VerifiedKernel, input: &[u32]) -> Result<(f64, Times), MicrobenchError> {
        let kernel = self.kernels.load(kernel)?;
        let ctas = self.num_sms * kernel.ctas_per_sm()?.max(1);
        let threads = ctas * THREADS;
        let stream = Stream::new(&self.context)?;
        let input = DeviceBuffer::from_host(&stream, &bytes_of(input))?;
        let output = DeviceBuffer::filled(&stream, 4 * threads as usize, 0)?;
        let arguments = [Argument::U64(input.address()), Argument::U64(output.address()), Argument::U32(TURNS)];
        let launch = kernel.prepare([ctas, 1, 1], &arguments)?;
        let (start, end) = (Event::new(&self.context)?, Event::new(&self.context)?);
        let mut seconds = Vec::with_capacity(LAUNCHES);
        for index in 0..WARM_UP + LAUNCHES {
            start.record(&stream)?;
            #[expect(unsafe_code, reason = "a launch takes addresses")]
            // SAFETY: prepared by this kernel, on a stream of its context. A thread reads the words of its place in the
            // CTA, or of its lane, which `input` has, and writes the word of its place in the grid, which `output` has;
            // both buffers are this call's own and outlive the wait below.
            unsafe {
                kernel.launch(&stream, &launch)?;
            }
            end.record(&stream)?;
            end.synchronize()?;
            if index >= WARM_UP {
                seconds.push(f64::from(end.milliseconds_since(&start)?) / 1e3);
            }
        }
        Ok((f64::from(threads), Times { seconds }))
    }
}

impl Machine for MicroGpu {
    fn run(
        &self,
        kernel: &VerifiedKernel,
        input: &[u32],
        outputs: usize,
        scalars: &[u32],
    ) -> Result<Vec<u32>, MicrobenchError> {
        Simulator.run(kernel, input, outputs, scalars)?;
        let kernel = self.kernels.load(kernel)?;
        let trailing = |_: &[u64]| scalars.iter().map(|word| Argument::U32(*word)).collect();
        #[expect(unsafe_code, reason = "a kernel is launched that only the simulator can vouch for")]
        // SAFETY: the simulator has just executed the same kernel on one CTA and the same words, where an access outside
        // of the buffers is a fault.
        let written =
            unsafe { flashcore_cuda::run_owned(&kernel, [1; 3], &[bytes_of(input)], &[4 * outputs], trailing) }?;
        Ok(written.first().map(|bytes| words_of(bytes)).unwrap_or_default())
    }
}

/// Random words with only these bits.
fn random_words(count: usize, bits: u32) -> Vec<u32> {
    let mut random = SplitMix64::new(0);
    (0..count).map(|_| random.next_u64() as u32 & bits).collect()
}
