//! Microbenchmarks: throughput of the instructions that kernels choose between.
//!
//! Kernels with 8-bit keys and values widen codes to 16 bits in registers in one of two ways ([`Fp8Widening`]), and FP8
//! queries can be multiplied as they are. Which is faster depends on the GPU, and decode has little time to spare: each code
//! is read from memory once and converted once, so a conversion that does fewer codes in a clock than memory delivers is
//! what bounds the kernel. `flashcore microbench` measures both beside that floor.
//!
//! * [`conversions`] widens words of four codes in a loop without dependences, in the orders in which the kernels need the
//!   bytes of keys and of values; every variant is first judged on all 256 codes in all four places of a word.
//! * [`products`] repeats `mma.sync` on independent accumulators.
//! * [`measure`] times them on a GPU.
//!
//! The simulator judges the same kernels and counts instructions; it has no clock.

pub mod conversions;
pub mod measure;
pub mod products;

use flashcore_ir::{Arch, Type, VerifiedKernel};
use flashcore_kernels::Fp8Widening;
use flashcore_problem::DType;
use serde::{Deserialize, Serialize};

use super::record::{Content, Kind};
use crate::testkit::conformance::{ExecuteError, Executor, Invocation, Scalar, SimExecutor};
use crate::timing::Times;

pub use conversions::{ByteOrder, CODES, Conversion};
pub use measure::MicroGpu;
pub use products::Product;

/// Threads of a CTA of every kernel here.
pub(crate) const THREADS: u32 = 256;
/// Part by which another way must be faster than the default to be named: what is less is noise.
const NOTABLE: f64 = 0.03;

/// Reason why a microbenchmark has no result.
#[derive(Debug, thiserror::Error)]
pub enum MicrobenchError {
    /// The simulator stopped, or a parameter cannot be passed.
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    /// The GPU, its driver or its compiler failed.
    #[error(transparent)]
    Cuda(#[from] flashcore_cuda::CudaError),
    /// The verifier refuses the kernel.
    #[error("the kernel of {what} breaks a rule of the IR: {reason}")]
    Kernel {
        /// The variant.
        what: String,
        /// The rule.
        reason: String,
    },
}

/// Everything that a run of `flashcore microbench` found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Microbenchmark {
    /// The architecture whose defaults are marked.
    pub arch: String,
    /// The decode whose memory floor stands beside conversions, on a GPU.
    pub decode: Option<DecodeFloor>,
    /// Throughput of the loop without a conversion, on a GPU: no conversion can show more.
    pub loop_alone: Option<ConversionRate>,
    /// Conversions of FP8 codes to 16 bits.
    pub conversions: Vec<ConversionRow>,
    /// Products of the tensor cores.
    pub products: Vec<ProductRow>,
}

impl Content for Microbenchmark {
    const KIND: Kind = Kind::Microbenchmark;
}

/// Memory floor of a decode over an FP8 cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeFloor {
    /// The shape.
    pub shape: String,
    /// Codes of its keys and values, each of which is converted once.
    pub codes: f64,
    /// Bytes that it reads and writes.
    pub bytes: f64,
    /// Seconds of these bytes at the bandwidth that a copy has.
    pub seconds: f64,
    /// Codes that memory delivers to an SM in a clock: conversions must be faster.
    pub codes_per_clock_per_sm: f64,
}

/// A conversion: its verdict, its instructions, and on a GPU its throughput.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConversionRow {
    /// The 8-bit type.
    pub from: String,
    /// The 16-bit type.
    pub to: String,
    /// `integer` or `cvt`.
    pub way: String,
    /// The operand whose byte order it has: `keys` or `values`.
    pub order: String,
    /// True if kernels of this architecture convert this way by default ([`Fp8Widening::of`]).
    pub is_default: bool,
    /// Codes that did not become exactly their number; all of them in all places of a word were tried.
    pub wrong_codes: Vec<u8>,
    /// PTX instructions that widen four codes, register moves not counted.
    pub instructions: usize,
    /// Throughput on a GPU.
    pub measured: Option<ConversionRate>,
}

/// Throughput of a conversion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConversionRate {
    /// Codes that a launch converts.
    pub codes: f64,
    /// Seconds of each launch.
    pub seconds: Vec<f64>,
    /// Codes in a clock of an SM, by the median and the GPU's highest clock.
    pub codes_per_clock_per_sm: f64,
    /// Seconds for the codes of the decode.
    pub decode_seconds: f64,
}

/// A product: its verdict, and on a GPU its throughput.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductRow {
    /// The form, such as `m16n8k16 bf16`.
    pub form: String,
    /// True if sums of ones came out right.
    pub is_right: bool,
    /// Throughput on a GPU.
    pub measured: Option<ProductRate>,
}

/// Throughput of a product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductRate {
    /// Operations of a launch, a multiplication and an addition each two.
    pub flops: f64,
    /// Seconds of each launch.
    pub seconds: Vec<f64>,
    /// Operations in a clock of an SM, by the median and the GPU's highest clock.
    pub flops_per_clock_per_sm: f64,
}

impl ProductRate {
    /// Operations per second, by the median, in units of 10^12.
    pub fn tflops(&self) -> f64 {
        self.flops / Times { seconds: self.seconds.clone() }.quantile(0.5) / 1e12
    }
}

/// A default that is not the fastest way.
#[derive(Debug, Clone, PartialEq)]
pub struct SlowerDefault {
    /// The 8-bit type.
    pub from: String,
    /// The 16-bit type.
    pub to: String,
    /// The default.
    pub default: String,
    /// The faster way.
    pub faster: String,
    /// Time of the faster way for keys and values over that of the default.
    pub ratio: f64,
}

impl Microbenchmark {
    /// True if every conversion was exact and every product right.
    pub fn passed(&self) -> bool {
        self.conversions.iter().all(|row| row.wrong_codes.is_empty()) && self.products.iter().all(|row| row.is_right)
    }

    /// Defaults that another way beats on this GPU, over keys and values together.
    pub fn slower_defaults(&self) -> Vec<SlowerDefault> {
        let mut found = Vec::new();
        let of = |from: &str, to: &str, way: &str| -> Option<(bool, f64)> {
            let rows = self.conversions.iter().filter(|row| row.from == from && row.to == to && row.way == way);
            rows.map(|row| row.measured.as_ref().map(|rate| (row.is_default, rate.decode_seconds)))
                .reduce(|one, other| Some((one?.0, one?.1 + other?.1)))?
        };
        for (from, to) in DType::FLOAT8.iter().flat_map(|from| Conversion::TARGETS.map(|to| (from.name(), to.name()))) {
            let ways =
                Conversion::WAYS.map(|way| (conversions::way_name(way), of(from, to, conversions::way_name(way))));
            let [(one, Some((one_is_default, one_time))), (other, Some((_, other_time)))] = ways else { continue };
            let (default, default_time, faster, time) =
                if one_is_default { (one, one_time, other, other_time) } else { (other, other_time, one, one_time) };
            if time < default_time * (1.0 - NOTABLE) {
                let [from, to, default, faster] = [from, to, default, faster].map(str::to_owned);
                found.push(SlowerDefault { from, to, default, faster, ratio: time / default_time });
            }
        }
        found
    }
}

/// Judges everything in the simulator, with the defaults of an architecture and what it has.
pub fn simulate(arch: Arch) -> Result<Microbenchmark, MicrobenchError> {
    let conversions = Conversion::all().filter(|conversion| conversion.exists_on(arch));
    let products = Product::ALL.into_iter().filter(|product| product.exists_on(arch));
    Ok(Microbenchmark {
        arch: arch.to_string(),
        decode: None,
        loop_alone: None,
        conversions: conversions.map(|conversion| conversion.judged(arch, &Simulator)).collect::<Result<_, _>>()?,
        products: products.map(|product| product.judged(arch, &Simulator)).collect::<Result<_, _>>()?,
    })
}

/// A machine that runs the kernels of this module once, each after the simulator ran it.
pub(crate) trait Machine {
    /// The words that a launch of one CTA writes.
    fn run(
        &self,
        kernel: &VerifiedKernel,
        input: &[u32],
        outputs: usize,
        scalars: &[u32],
    ) -> Result<Vec<u32>, MicrobenchError>;
}

/// The simulator.
pub(crate) struct Simulator;

impl Machine for Simulator {
    fn run(
        &self,
        kernel: &VerifiedKernel,
        input: &[u32],
        outputs: usize,
        scalars: &[u32],
    ) -> Result<Vec<u32>, MicrobenchError> {
        let scalars: Vec<Scalar> = scalars.iter().map(|&word| Scalar { ty: Type::U32, bits: word.into() }).collect();
        let invocation = Invocation {
            kernel,
            grid: [1; 3],
            inputs: &[bytes_of(input)],
            output_lengths: &[4 * outputs],
            scalars: &scalars,
            tensor_maps: &[],
        };
        let written = SimExecutor::default().execute(&invocation)?;
        Ok(written.first().map(|bytes| words_of(bytes)).unwrap_or_default())
    }
}

pub(crate) fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

/// True if kernels of an architecture widen these codes this way by default.
fn is_default(arch: Arch, to: DType, from: DType, way: Fp8Widening) -> bool {
    Fp8Widening::of(arch, to, from) == way
}

#[cfg(test)]
mod tests;
