//! Conversions of FP8 codes to 16 bits in registers, as attention kernels do them between `ldmatrix` and `mma`.

use flashcore_ir::types::{Bf16x2, F16x2, U32};
use flashcore_ir::{Arch, Builder, Fp8, GlobalAddress, Kernel, Reg, SpecialRegister, Statement, VerifiedKernel};
use flashcore_kernels::Fp8Widening;
use flashcore_kernels::primitives::Fp8Widener;
use flashcore_problem::DType;

use super::{ConversionRow, Machine, MicrobenchError, Simulator, THREADS, is_default};

/// Codes of an 8-bit type.
pub const CODES: usize = 256;
/// Words that a thread of the loop converts in a turn, independent of each other.
pub(crate) const WORDS: u32 = 8;
/// Codes of a word.
pub(crate) const CODES_PER_WORD: u32 = 4;
/// Added to a word from turn to turn, so that no turn can be computed from another.
const STEP: u32 = 0x0123_4567;

/// The bytes of a word that become pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByteOrder {
    /// Adjacent bytes, as kernels have keys.
    Keys,
    /// Bytes 0 and 2, 1 and 3, as kernels have values, which `ldmatrix` transposed.
    Values,
}

impl ByteOrder {
    const fn pairs(self) -> [[u32; 2]; 2] {
        match self {
            Self::Keys => [[0, 1], [2, 3]],
            Self::Values => [[0, 2], [1, 3]],
        }
    }

    /// Name of the operand.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Values => "values",
        }
    }
}

/// A conversion in one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conversion {
    /// The type of the codes.
    pub from: Fp8,
    /// The 16-bit type.
    pub to: DType,
    /// The way.
    pub way: Fp8Widening,
    /// The order of bytes.
    pub order: ByteOrder,
}

/// The name of a way.
pub(crate) const fn way_name(way: Fp8Widening) -> &'static str {
    match way {
        Fp8Widening::Integer => "integer",
        Fp8Widening::Convert => "cvt",
    }
}

/// Widener of either target, whose pairs are words.
enum Widener {
    F16(Fp8Widener<F16x2>),
    Bf16(Fp8Widener<Bf16x2>),
}

impl Widener {
    fn widen(&self, k: &mut Builder, word: Reg<U32>, order: ByteOrder) -> [Reg<U32>; 2] {
        order.pairs().map(|bytes| match self {
            Self::F16(widener) => {
                let pair = widener.widen(k, word, bytes);
                k.reinterpret::<F16x2, U32>(pair)
            }
            Self::Bf16(widener) => {
                let pair = widener.widen(k, word, bytes);
                k.reinterpret::<Bf16x2, U32>(pair)
            }
        })
    }
}

impl Conversion {
    /// The 16-bit types.
    pub const TARGETS: [DType; 2] = [DType::F16, DType::Bf16];
    /// The ways.
    pub const WAYS: [Fp8Widening; 2] = [Fp8Widening::Integer, Fp8Widening::Convert];

    /// Every conversion.
    pub fn all() -> impl Iterator<Item = Self> {
        let types = Fp8::ALL.iter().flat_map(|from| Self::TARGETS.map(|to| (*from, to)));
        types.flat_map(|(from, to)| {
            let of_way = move |way| [ByteOrder::Keys, ByteOrder::Values].map(|order| Self { from, to, way, order });
            Self::WAYS.into_iter().flat_map(of_way)
        })
    }

    /// The type of the codes, as problems name it.
    pub const fn dtype(self) -> DType {
        match self.from {
            Fp8::E4m3 => DType::E4m3,
            Fp8::E5m2 => DType::E5m2,
        }
    }

    /// True if an architecture has the instructions.
    pub fn exists_on(self, arch: Arch) -> bool {
        arch.has(self.check_kernel().since())
    }

    fn name(self) -> String {
        let Self { from, to, way, order } = self;
        format!("{from}_{}_{}_{}", to.name(), way_name(way), order.name())
    }

    fn widener(self, k: &mut Builder) -> Widener {
        match self.to {
            DType::F16 => Widener::F16(Fp8Widener::new(k, self.from, self.way)),
            _ => Widener::Bf16(Fp8Widener::new(k, self.from, self.way)),
        }
    }

    /// The kernel of which each thread widens one word and stores the two pairs.
    fn check_kernel(self) -> Kernel {
        let mut k = Builder::new(format!("flashcore_widen_{}", self.name()), THREADS);
        let (input, output) = (k.parameter("input"), k.parameter("output"));
        let thread = k.special(SpecialRegister::ThreadX);
        let source = k.mad_wide(thread, 4u32, input);
        let word = k.load_one::<U32>(source);
        let widener = self.widener(&mut k);
        let pairs = widener.widen(&mut k, word, self.order);
        let target = k.mad_wide(thread, 8u32, output);
        k.store(target, &pairs);
        k.finish()
    }

    /// PTX instructions that widen four codes; register moves, which the compiler removes, are not counted.
    pub fn instructions(self) -> usize {
        let mut k = Builder::new("flashcore_widen_word", THREADS);
        let word = k.copy::<U32>(0u32);
        let widener = self.widener(&mut k);
        widener.widen(&mut k, word, self.order);
        let is_counted = |statement: &&Statement| match statement {
            Statement::Instruction(instruction) => !instruction.op.entry().form.starts_with("mov"),
            Statement::If(_) | Statement::Loop(_) => false,
        };
        k.finish().body.statements.iter().filter(is_counted).count()
    }

    /// Judges all codes on a machine.
    pub(crate) fn judged(self, arch: Arch, machine: &dyn Machine) -> Result<ConversionRow, MicrobenchError> {
        let kernel = verified(self.check_kernel(), arch)?;
        let words = words_of_all_codes();
        let pairs = machine.run(&kernel, &words, 2 * words.len(), &[])?;
        Ok(ConversionRow {
            from: self.from.to_string(),
            to: self.to.name().to_owned(),
            way: way_name(self.way).to_owned(),
            order: self.order.name().to_owned(),
            is_default: is_default(arch, self.to, self.dtype(), self.way),
            wrong_codes: self.wrong_codes(&words, &pairs),
            instructions: self.instructions(),
            measured: None,
        })
    }

    /// Codes that are not exactly their number in some place of a word. A NaN may have any payload.
    pub(crate) fn wrong_codes(self, words: &[u32], pairs: &[u32]) -> Vec<u8> {
        let numbers = self.dtype().float8_table().copied().unwrap_or([f32::NAN; CODES]);
        let is_right = |code: u8, half: u32| {
            let found = self.to.decode(&(half as u16).to_le_bytes());
            let number = f64::from(numbers[usize::from(code)]);
            if number.is_nan() { found.is_nan() } else { found.to_bits() == number.to_bits() }
        };
        let mut wrong = Vec::new();
        for (index, word) in words.iter().enumerate() {
            for (pair, bytes) in self.order.pairs().into_iter().enumerate() {
                for (half, byte) in bytes.into_iter().enumerate() {
                    let code = word.to_le_bytes()[byte as usize];
                    let found = pairs.get(2 * index + pair).map(|pair| pair >> (16 * half) & 0xffff);
                    if !found.is_some_and(|found| is_right(code, found)) {
                        wrong.push(code);
                    }
                }
            }
        }
        wrong.sort_unstable();
        wrong.dedup();
        wrong
    }

    /// The kernel that is timed.
    pub(crate) fn loop_kernel(self, arch: Arch) -> Result<VerifiedKernel, MicrobenchError> {
        simulated(verified(self.unverified_loop(), arch)?)
    }

    pub(crate) fn unverified_loop(self) -> Kernel {
        let order = self.order;
        loop_over_words(&self.name(), |k| {
            let widener = self.widener(k);
            move |k: &mut Builder, word| {
                let [low, high] = widener.widen(k, word, order);
                k.xor(low, high)
            }
        })
    }
}

/// The loop without a conversion: what its addition and exclusive or take.
pub(crate) fn loop_alone(arch: Arch) -> Result<VerifiedKernel, MicrobenchError> {
    simulated(verified(loop_over_words("nothing", |_| |_: &mut Builder, word| word), arch)?)
}

/// A kernel of which the simulator has executed a few turns on one CTA.
fn simulated(kernel: VerifiedKernel) -> Result<VerifiedKernel, MicrobenchError> {
    const FEW_TURNS: u32 = 3;
    let words: Vec<u32> = (0..THREADS * WORDS).collect();
    Simulator.run(&kernel, &words, THREADS as usize, &[FEW_TURNS])?;
    Ok(kernel)
}

/// A loop over words in registers. Beside `convert`, a turn has one addition and one exclusive or for each word, so that
/// the compiler can leave out nothing.
fn loop_over_words<C: Fn(&mut Builder, Reg<U32>) -> Reg<U32>>(
    name: &str,
    prepare: impl FnOnce(&mut Builder) -> C,
) -> Kernel {
    let mut k = Builder::new(format!("flashcore_widen_loop_{name}"), THREADS);
    let (input, output) = (k.parameter("input"), k.parameter("output"));
    let turns = k.parameter::<U32>("turns");
    let thread = k.special(SpecialRegister::ThreadX);
    let source = k.mad_wide(thread, 4 * WORDS, input);
    let address = GlobalAddress::from(source);
    let words: Vec<Reg<U32>> =
        (0..WORDS as i32).step_by(4).flat_map(|word| k.load::<U32>(address.plus(4 * word), 4)).collect();
    let sums: Vec<Reg<U32>> = words.iter().map(|_| k.copy::<U32>(0u32)).collect();
    let convert = prepare(&mut k);
    k.for_uniform(0u32, turns, 1u32, |k, _| {
        for (word, sum) in words.iter().zip(&sums) {
            let converted = convert(k, *word);
            let mixed = k.xor(*sum, converted);
            k.set(*sum, mixed);
            k.add_to(*word, STEP);
        }
    });
    let sum = sums[1..].iter().fold(sums[0], |all, sum| k.xor(all, *sum));
    let cta = k.special(SpecialRegister::CtaX);
    let index = k.mad(cta, THREADS, thread);
    let target = k.mad_wide(index, 4u32, output);
    k.store_one(target, sum);
    k.finish()
}

/// Words that have every code in each of their four bytes.
pub(crate) fn words_of_all_codes() -> Vec<u32> {
    (0..=u8::MAX)
        .map(|code| u32::from_le_bytes([code, code.wrapping_add(85), code.wrapping_mul(3), code ^ 0x5a]))
        .collect()
}

/// A kernel that the rules of the IR allow.
pub(crate) fn verified(kernel: Kernel, arch: Arch) -> Result<VerifiedKernel, MicrobenchError> {
    let what = kernel.name.clone();
    kernel.verify(arch).map_err(|error| MicrobenchError::Kernel { what, reason: format!("{error:?}") })
}
