//! Products of 16-bit operands with 8-bit ones in memory: codes of `e4m3` or `e5m2` become pairs of `f16` or `bf16` in
//! registers, exactly, on their way from `ldmatrix` to `mma.sync` m16n8k16.
//!
//! `ldmatrix` moves 16-bit elements, here two codes each, and nothing is exchanged between lanes afterwards:
//!
//! * Of K, a lane with group `g` and member `t` gets columns `4t` to `4t + 3` of key `g`, of each 16 columns. The order of
//!   columns in a sum does not matter, so these are the columns of its depth slots `2t`, `2t + 1`, `2t + 8` and `2t + 9`, and
//!   [`Quads`] has the same columns of Q there.
//! * Of V, transposed, a lane gets columns `2g` and `2g + 1` of keys `2t` and `2t + 1`. One tile of results has the even
//!   columns of each 16, the next the odd ones: a lane has columns `4t` to `4t + 3` of its rows in the two
//!   ([`adjacent_columns`]).

use core::marker::PhantomData;

use flashcore_ir::target::ADA_FP8;
use flashcore_ir::types::{Bf16x2, F16x2, F32, U32};
use flashcore_ir::{Builder, Fp8, MmaShape, Reg};
use flashcore_problem::DType;

use super::fragment::{Accumulator, FragmentA, OperandA, round_pairs};
use crate::element::Element;
use crate::primitives::{MMA_N, SharedOperand};
use crate::target::Target;

/// Depth of a product.
const DEPTH: u32 = 16;
/// Columns of 8 bits in a block of `ldmatrix`: two depth steps.
const BLOCK_COLUMNS: u32 = 2 * DEPTH;
/// Signs of two codes in the upper bytes of the halves of a word.
const SIGNS: u32 = 0x8000_8000;
/// Everything but the signs of such codes.
const MAGNITUDES: u32 = 0x7f00_7f00;
/// Two times minus zero: as an addend it changes nothing, the sign of a zero included.
const MINUS_ZEROS: u32 = 0x8000_8000;

/// The way in which 8-bit codes become 16-bit floats. Both are exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Widening {
    /// Bits moved to the places of the wider type, and a multiplication by a power of two.
    Integer,
    /// `cvt.rn.f16x2.e4m3x2`, which takes `sm_89`; it gives `f16`, and `bf16` takes three more conversions.
    Convert,
}

impl Fp8Widening {
    /// The default of a GPU: the instruction where GPU and driver have it, except from `e5m2` to `f16`, where moving bits takes
    /// one instruction as well.
    ///
    /// `flashcore microbench` measures both ways on a GPU. On an H200 the instruction widens 1.6 to 2.2 times as many codes to
    /// `bf16` a clock, and 2.2 to 3.6 times as many of `e4m3` to `f16` (`notebook/fp8.md`).
    pub fn of(target: impl Into<Target>, to: DType, from: DType) -> Self {
        let target = target.into();
        let moves_once = (from, to) == (DType::E5m2, DType::F16);
        let has_instruction = target.arch.has(ADA_FP8) && target.ptx >= ADA_FP8.ptx;
        if has_instruction && !moves_once { Self::Convert } else { Self::Integer }
    }
}

/// Places of the bits of a code in a 16-bit float.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Placement {
    /// Bits that a code in the upper byte is moved down by.
    shift: u32,
    /// The power of two that makes up for the difference of the exponents' biases, twice, and what makes NaN and infinity
    /// of the codes that are none of the numbers; none where the exponents are the same.
    rebias: Option<Rebias>,
}

/// The step from magnitudes in place to the number.
#[derive(Debug, Clone, Copy)]
struct Rebias {
    /// The factor, in both halves.
    factor: u32,
    /// Added to a magnitude, this carries into `flag` for the codes of NaN and infinity alone, in both halves.
    addend: u32,
    flag: u32,
    /// The flag times this is what the exponent lacks to be all ones.
    ones: u32,
}

impl Rebias {
    const fn new(factor: u16, addend: u16, flag: u16, ones: u32) -> Self {
        const fn both(half: u16) -> u32 {
            half as u32 * 0x1_0001
        }
        Self { factor: both(factor), addend: both(addend), flag: both(flag), ones }
    }
}

/// A pair of 16-bit floats that 8-bit ones become.
pub trait Fp8Target: Element {
    /// The places of the bits of `e4m3`.
    const E4M3: Fp8Placement;
    /// The places of the bits of `e5m2`.
    const E5M2: Fp8Placement;

    /// A pair of `f16` as this type.
    fn of_f16(k: &mut Builder, pair: Reg<F16x2>) -> Reg<Self>;
}

impl Fp8Target for F16x2 {
    // 2^8; a mantissa of all ones under an exponent of all ones carries into bit 14, which completes the exponent.
    const E4M3: Fp8Placement = Fp8Placement { shift: 1, rebias: Some(Rebias::new(0x5c00, 0x0080, 0x4000, 1)) };
    const E5M2: Fp8Placement = Fp8Placement { shift: 0, rebias: None };

    fn of_f16(_: &mut Builder, pair: Reg<F16x2>) -> Reg<Self> {
        pair
    }
}

impl Fp8Target for Bf16x2 {
    // 2^120.
    const E4M3: Fp8Placement = Fp8Placement { shift: 4, rebias: Some(Rebias::new(0x7b80, 0x0010, 0x0800, 15)) };
    // 2^112; every exponent of all ones carries.
    const E5M2: Fp8Placement = Fp8Placement { shift: 3, rebias: Some(Rebias::new(0x7780, 0x0080, 0x1000, 7)) };

    fn of_f16(k: &mut Builder, pair: Reg<F16x2>) -> Reg<Self> {
        let [low, high] = F16x2::widen(k, pair);
        k.pair(low, high)
    }
}

/// Makes pairs of `T` of codes.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Widener<T: Fp8Target> {
    from: Fp8,
    way: Fp8Widening,
    placement: Fp8Placement,
    /// The factor, and minus zero.
    constants: [Reg<T>; 2],
}

impl<T: Fp8Target> Fp8Widener<T> {
    /// A widener of codes of `from`.
    pub fn new(k: &mut Builder, from: Fp8, way: Fp8Widening) -> Self {
        let placement = match from {
            Fp8::E4m3 => T::E4M3,
            Fp8::E5m2 => T::E5M2,
        };
        let factor = placement.rebias.map_or(0, |rebias| rebias.factor);
        let constants = [factor, MINUS_ZEROS].map(|bits| {
            let bits = k.copy::<U32>(bits);
            k.reinterpret::<U32, T>(bits)
        });
        Self { from, way, placement, constants }
    }

    /// Two codes of a word, by their bytes, as a pair.
    pub fn widen(&self, k: &mut Builder, word: Reg<U32>, [low, high]: [u32; 2]) -> Reg<T> {
        k.section("widen fp8", |k| match self.way {
            Fp8Widening::Convert => {
                let codes = match [low, high] {
                    [0, 1] => k.halves(word).0,
                    [2, 3] => k.halves(word).1,
                    _ => {
                        let codes = k.permute(word, 0u32, low | high << 4);
                        k.halves(codes).0
                    }
                };
                let pair = k.widen_fp8(self.from, codes);
                T::of_f16(k, pair)
            }
            Fp8Widening::Integer => self.move_bits(k, word, [low, high]),
        })
    }

    fn move_bits(&self, k: &mut Builder, word: Reg<U32>, [low, high]: [u32; 2]) -> Reg<T> {
        // Byte 4 is one of zero.
        let codes = k.permute(word, 0u32, 4 | low << 4 | 4 << 8 | high << 12);
        let Some(Rebias { addend, flag, ones, .. }) = self.placement.rebias else {
            return k.reinterpret::<U32, T>(codes);
        };
        let magnitudes = k.and(codes, MAGNITUDES);
        let magnitudes = k.shr(magnitudes, self.placement.shift);
        let carried = k.add(magnitudes, addend);
        let flags = k.and(carried, flag);
        let magnitudes = if ones == 1 { k.or(magnitudes, flags) } else { k.mad(flags, ones, magnitudes) };
        let signs = k.and(codes, SIGNS);
        let pair = k.or(magnitudes, signs);
        let pair = k.reinterpret::<U32, T>(pair);
        let [factor, minus_zeros] = self.constants;
        k.fma(pair, factor, minus_zeros)
    }
}

/// Fragments of A for products with widened B: of each 16 columns `4t` to `4t + 3` in the depth slots of member `t`. A in
/// shared memory is read by [`SharedTile::quads`](crate::primitives::SharedTile).
#[derive(Debug, Clone, Copy)]
pub struct Quads<T>(PhantomData<T>);

impl<T: Element> FragmentA for Quads<T> {
    type Register = T;
    const DEPTH: u32 = DEPTH;

    /// Four columns of a row are 8 bytes: a load of a lane has the pairs of both depth halves.
    fn load(k: &mut Builder, a: SharedOperand, by_column: &[Reg<U32>], step: u32) -> [Reg<T>; 4] {
        let [upper, lower] = [0, 8].map(|row| k.load_shared::<T>(a.block(by_column, row, step * DEPTH), 2));
        [upper[0], lower[0], upper[1], lower[1]]
    }

    /// In the order of an MN-major B: the columns of a fragment of results.
    fn round(k: &mut Builder, results: &[[Reg<F32>; 4]]) -> [Reg<T>; 4] {
        round_pairs(k, results)
    }
}

/// Adds `A · B` to `results`; B is K-major, of 8 bits.
pub fn multiply_widened_k_major<T: Fp8Target>(
    k: &mut Builder,
    (from, way): (Fp8, Fp8Widening),
    results: &Accumulator,
    a: &OperandA<'_, Quads<T>>,
    b: SharedOperand,
) {
    let widener = Fp8Widener::<T>::new(k, from, way);
    let (a_by_column, by_column) = (a.by_column(k), b.by_column(k));
    let tiles = results.m_tiles.first().map_or(0, Vec::len);
    let steps = a.steps();
    for block in (0..steps).step_by(2) {
        let lefts: Vec<_> = (block..steps.min(block + 2)).map(|step| a.step(k, &a_by_column, step)).collect();
        for tile in (0..tiles).step_by(2) {
            // Of each 8 columns of B, the matrices of two depth steps.
            let matrices = b.load::<T>(k, &by_column, tile as u32 * MMA_N, block * DEPTH);
            for (tile, matrices) in (tile..).zip(matrices.chunks_exact(2)) {
                for (lefts, matrix) in lefts.iter().zip(matrices) {
                    let word = k.reinterpret::<T, U32>(*matrix);
                    let right = [[0, 1], [2, 3]].map(|bytes| widener.widen(k, word, bytes));
                    for (left, tiles) in lefts.iter().zip(&results.m_tiles) {
                        k.mma(MmaShape::M16N8K16, &tiles[tile], left, &right);
                    }
                }
            }
        }
    }
}

/// Adds `A · B` to `results`, whose tiles have even and odd columns of each 16 in turn; B is MN-major, of 8 bits.
pub fn multiply_widened_mn_major<T: Fp8Target>(
    k: &mut Builder,
    (from, way): (Fp8, Fp8Widening),
    results: &Accumulator,
    a: &OperandA<'_, Quads<T>>,
    b: SharedOperand,
) {
    let widener = Fp8Widener::<T>::new(k, from, way);
    let by_column = b.by_column(k);
    let columns = results.m_tiles.first().map_or(0, Vec::len) as u32 * MMA_N;
    for step in 0..a.steps() {
        let lefts = a.step(k, &[], step);
        for column in (0..columns).step_by(BLOCK_COLUMNS as usize) {
            // Of each 16 columns, the matrices of the first and of the last 8 depths.
            let matrices = b.load::<T>(k, &by_column, column, step * DEPTH);
            let sixteens = (column..columns).step_by(DEPTH as usize).zip(matrices.chunks_exact(2));
            for (column, matrices) in sixteens {
                let words = [matrices[0], matrices[1]].map(|matrix| k.reinterpret::<T, U32>(matrix));
                for (parity, bytes) in [[0, 2], [1, 3]].into_iter().enumerate() {
                    let right = words.map(|word| widener.widen(k, word, bytes));
                    for (left, tiles) in lefts.iter().zip(&results.m_tiles) {
                        k.mma(MmaShape::M16N8K16, &tiles[(column / MMA_N) as usize + parity], left, &right);
                    }
                }
            }
        }
    }
}

/// The results of [`multiply_widened_mn_major`] with pairs of adjacent columns: of each two tiles, the first has columns `4t`
/// and `4t + 1` of a lane, the second `4t + 2` and `4t + 3`. The registers are the same.
#[must_use]
pub fn adjacent_columns(output: &Accumulator) -> Accumulator {
    let m_tiles = output.m_tiles.iter().map(|tiles| {
        let pairs = tiles.chunks_exact(2).flat_map(|pair| {
            let [even, odd] = [pair[0], pair[1]];
            [[even[0], odd[0], even[2], odd[2]], [even[1], odd[1], even[3], odd[3]]]
        });
        pairs.collect()
    });
    Accumulator { m_tiles: m_tiles.collect() }
}

/// Columns of a lane in a result, by tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneColumns {
    /// Two adjacent columns of each 8, as `mma` has them.
    Pairs,
    /// Four adjacent columns of each 16, in two tiles ([`adjacent_columns`]).
    Quads,
}

impl LaneColumns {
    /// Columns from one lane of a row to the next.
    pub const fn lane_step(self) -> u32 {
        match self {
            Self::Pairs => 2,
            Self::Quads => 4,
        }
    }

    /// The column of lane 0 that [`Accumulator::each`] calls `column`.
    pub const fn of_lane_0(self, column: u32) -> u32 {
        let (tile, within) = (column / MMA_N, column % MMA_N);
        match self {
            Self::Pairs => column,
            Self::Quads => tile / 2 * 2 * MMA_N + tile % 2 * 2 + within,
        }
    }
}
