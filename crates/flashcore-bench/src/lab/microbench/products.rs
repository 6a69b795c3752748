//! Products of the tensor cores by `mma.sync`, on accumulators that do not depend on each other.

use flashcore_ir::types::{Bf16x2, F16x2, F32, U32};
use flashcore_ir::{Arch, Builder, Fp8, GlobalAddress, Kernel, MmaShape, Reg, SpecialRegister, VerifiedKernel};

use super::conversions::verified;
use super::{Machine, MicrobenchError, ProductRow, THREADS};

/// Tiles of 16 by 8 results of a warp.
pub(crate) const TILES: u32 = 8;
/// Words of the operands of a lane: four of A, two of B, and two of nothing.
const LANE_WORDS: u32 = 8;
const LANES: u32 = 32;

/// A form of product that kernels choose between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    /// m16n8k16 of `f16`.
    F16,
    /// m16n8k16 of `bf16`.
    Bf16,
    /// m16n8k32 of `e4m3`.
    E4m3,
}

impl Product {
    /// Every form.
    pub const ALL: [Self; 3] = [Self::F16, Self::Bf16, Self::E4m3];

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "m16n8k16 f16",
            Self::Bf16 => "m16n8k16 bf16",
            Self::E4m3 => "m16n8k32 e4m3",
        }
    }

    const fn depth(self) -> u32 {
        match self {
            Self::F16 | Self::Bf16 => 16,
            Self::E4m3 => 32,
        }
    }

    /// A word of ones.
    const fn ones(self) -> u32 {
        match self {
            Self::F16 => 0x3c00_3c00,
            Self::Bf16 => 0x3f80_3f80,
            Self::E4m3 => 0x3838_3838,
        }
    }

    /// The bits of a random word that leave numbers below 2.
    pub(crate) const fn small(self) -> u32 {
        match self {
            Self::F16 | Self::Bf16 => 0xbfff_bfff,
            Self::E4m3 => 0xbfbf_bfbf,
        }
    }

    /// Operations of the turns of one warp.
    pub(crate) fn flops(self, turns: u32) -> f64 {
        2.0 * 16.0 * 8.0 * f64::from(self.depth()) * f64::from(TILES) * f64::from(turns)
    }

    /// True if an architecture has the instruction.
    pub fn exists_on(self, arch: Arch) -> bool {
        arch.has(self.unverified().since())
    }

    /// Words of the operands of a warp.
    pub(crate) const fn input_words() -> usize {
        (LANES * LANE_WORDS) as usize
    }

    /// A loop of products. Accumulators begin with different numbers, so that the compiler cannot take one for another.
    fn unverified(self) -> Kernel {
        let name = self.name().replace(' ', "_");
        let mut k = Builder::new(format!("flashcore_products_{name}"), THREADS);
        let (input, output) = (k.parameter("input"), k.parameter("output"));
        let turns = k.parameter::<U32>("turns");
        let lane = k.lane();
        let source = k.mad_wide(lane, 4 * LANE_WORDS, input);
        let address = GlobalAddress::from(source);
        let left = k.load::<U32>(address, 4);
        let right = k.load::<U32>(address.plus(16), 2);
        let (left, right) = ([left[0], left[1], left[2], left[3]], [right[0], right[1]]);
        let tiles: Vec<[Reg<F32>; 4]> = (0..TILES)
            .map(|tile| core::array::from_fn(|element| k.copy::<F32>((4 * tile + element as u32) as f32)))
            .collect();
        match self {
            Self::F16 => {
                let left = left.map(|word| k.reinterpret::<U32, F16x2>(word));
                let right = right.map(|word| k.reinterpret::<U32, F16x2>(word));
                repeat(&mut k, turns, &tiles, |k, tile| k.mma(MmaShape::M16N8K16, tile, &left, &right));
            }
            Self::Bf16 => {
                let left = left.map(|word| k.reinterpret::<U32, Bf16x2>(word));
                let right = right.map(|word| k.reinterpret::<U32, Bf16x2>(word));
                repeat(&mut k, turns, &tiles, |k, tile| k.mma(MmaShape::M16N8K16, tile, &left, &right));
            }
            Self::E4m3 => repeat(&mut k, turns, &tiles, |k, tile| k.mma_fp8([Fp8::E4m3; 2], tile, &left, &right)),
        }
        let sum = k.copy::<F32>(0.0);
        for element in tiles.iter().flatten() {
            k.add_to(sum, *element);
        }
        let (cta, thread) = (k.special(SpecialRegister::CtaX), k.special(SpecialRegister::ThreadX));
        let index = k.mad(cta, THREADS, thread);
        let target = k.mad_wide(index, 4u32, output);
        k.store_one(target, sum);
        k.finish()
    }

    /// The kernel that is timed.
    pub(crate) fn loop_kernel(self, arch: Arch) -> Result<VerifiedKernel, MicrobenchError> {
        verified(self.unverified(), arch)
    }

    /// Judges sums of ones on a machine: each element of each tile grows by the depth in each turn.
    pub(crate) fn judged(self, arch: Arch, machine: &dyn Machine) -> Result<ProductRow, MicrobenchError> {
        const TURNS: u32 = 3;
        let kernel = self.loop_kernel(arch)?;
        let ones = vec![self.ones(); Self::input_words()];
        let sums = machine.run(&kernel, &ones, THREADS as usize, &[TURNS])?;
        let elements = 4 * TILES;
        let expected = (elements * (elements - 1) / 2 + elements * self.depth() * TURNS) as f32;
        let is_right = sums.len() == THREADS as usize
            && sums.iter().all(|sum| f32::from_bits(*sum).to_bits() == expected.to_bits());
        Ok(ProductRow { form: self.name().to_owned(), is_right, measured: None })
    }
}

fn repeat(k: &mut Builder, turns: Reg<U32>, tiles: &[[Reg<F32>; 4]], multiply: impl Fn(&mut Builder, &[Reg<F32>; 4])) {
    k.for_uniform(0u32, turns, 1u32, |k, _| tiles.iter().for_each(|tile| multiply(k, tile)));
}
