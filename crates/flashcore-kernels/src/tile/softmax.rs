//! The online softmax: weights from scores, tile by tile, without having seen all scores.
//!
//! Each row keeps the maximum `m` of its scores so far and the sum `l` of their weights, and the output so far is a
//! sum of values by weights relative to `m`. When a tile raises the maximum, sum and output are multiplied by
//! `exp(m_old - m_new)`. Exponentials are powers of two with the scale of the scores folded in:
//! `exp(scale * (s - m)) = 2^(s * scale * log2(e) - m * scale * log2(e))`, one multiply-add and one `ex2`.

use core::f32::consts::LN_2;

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, ClusterAddress, Compare, Reg, SharedAddress, ShuffleMode, VoteMode};

use super::LANES;
use super::fragment::Accumulator;

/// Bytes of an `f32`.
const WORD_BYTES: u32 = 4;

/// The maximum and the sum of each of a lane's rows.
#[derive(Debug, Clone)]
pub struct OnlineSoftmax {
    /// `scale * log2(e)`, or nothing where scores are in base 2 and scaled already.
    pub(super) scale: Option<Reg<F32>>,
    /// The maximum over the whole row, the same in the four lanes that share it; with [`Rescale::Threshold`] what weights
    /// are relative to.
    pub(super) maximum: Vec<Reg<F32>>,
    /// The sum over the columns of this lane.
    pub(super) sum: Vec<Reg<F32>>,
    pub(super) rescale: Rescale,
    pub(super) exponential: Exponential,
}

/// When the output is brought to a new maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rescale {
    /// With each tile.
    Always,
    /// When the row max of some row of the warp rose.
    IfChanged,
    /// Lazy rescale with a threshold: when the row max of some row of the warp rose by more than 2^8. Until then the row
    /// max is stale, and exponentials may exceed 1, up to 2^8, which every type has room for.
    Threshold,
}

/// How exponentials of scores are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Exponential {
    /// Each by the unit for special functions.
    Unit,
    /// Every fourth by a polynomial, on the units that multiply and add, which have time where that unit has none.
    Shared,
}

impl Exponential {
    /// The other way.
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Unit => Self::Shared,
            Self::Shared => Self::Unit,
        }
    }
}

/// Of so many exponentials one is a polynomial where they are shared.
const SHARE: usize = 4;

impl OnlineSoftmax {
    /// No scores yet, in `rows` rows of a lane. `scale` is the scale of the scores times `log2(e)`, and positive.
    pub fn new(
        k: &mut Builder,
        rows: u32,
        scale: Option<Reg<F32>>,
        rescale: Rescale,
        exponential: Exponential,
    ) -> Self {
        Self {
            scale,
            maximum: (0..rows).map(|_| k.copy(f32::NEG_INFINITY)).collect(),
            sum: (0..rows).map(|_| k.copy(0.0f32)).collect(),
            rescale,
            exponential,
        }
    }

    /// Turns scores into weights, in place, and brings `output` to the new maximum.
    pub fn update(&self, k: &mut Builder, scores: &Accumulator, output: &Accumulator) {
        if self.rescale == Rescale::Threshold {
            let raised = Raised::none(k, self.maximum.len() as u32);
            self.raise(k, scores, &raised);
            self.weigh(k, scores, &raised);
            return self.rescale(k, output, &raised);
        }
        let raised = k.section("maximum", |k| self.raise_maximum(k, scores));
        k.section("rescale", |k| {
            let rescale = |k: &mut Builder| {
                for (sum, factor) in self.sum.iter().zip(&raised.factors) {
                    k.mul_to(*sum, *factor);
                }
                output.scale_rows(k, &raised.factors);
            };
            match self.rescale {
                Rescale::Always => rescale(k),
                Rescale::IfChanged | Rescale::Threshold => {
                    let mut any = k.compare(Compare::Ne, raised.factors[0], 1.0f32);
                    for factor in &raised.factors[1..] {
                        let rose = k.compare(Compare::Ne, *factor, 1.0f32);
                        any = k.or(any, rose);
                    }
                    let any = k.vote(VoteMode::Any, any);
                    k.if_uniform(any, rescale);
                }
            }
        });
        k.section("weights", |k| {
            let mut number = 0;
            scores.each(|row, _, score| {
                match self.scale {
                    Some(scale) => k.scale_add_to(score, scale, raised.shift[row]),
                    None => k.add_to(score, raised.shift[row]),
                }
                self.exp2_to(k, score, number);
                number += 1;
                k.add_to(self.sum[row], score);
            });
        });
    }

    /// `score = 2^score`, of the score of a number.
    pub(super) fn exp2_to(&self, k: &mut Builder, score: Reg<F32>, number: usize) {
        match self.exponential {
            Exponential::Shared if number.is_multiple_of(SHARE) => exp2_by_polynomial(k, score),
            _ => k.exp2_to(score),
        }
    }

    fn raise_maximum(&self, k: &mut Builder, scores: &Accumulator) -> Raised {
        let before: Vec<_> = self.maximum.iter().map(|maximum| k.copy(*maximum)).collect();
        scores.each(|row, _, score| k.max_to(self.maximum[row], score));
        for maximum in &self.maximum {
            over_row(k, *maximum, |k, maximum, other| k.max_to(maximum, other));
        }
        let mut shift = Vec::new();
        let mut factors = Vec::new();
        for (maximum, before) in self.maximum.iter().zip(before) {
            let negative = self.shift(k, *maximum);
            let exponent = self.relative(k, before, negative);
            factors.push(k.exp2(exponent));
            shift.push(negative);
        }
        Raised { shift, factors }
    }

    /// What is added to scaled scores: minus the maximum. A row with no key so far has none; its weights are
    /// `2^(-inf - 0) = 0`.
    pub(super) fn shift(&self, k: &mut Builder, maximum: Reg<F32>) -> Reg<F32> {
        let none = k.compare(Compare::Eq, maximum, f32::NEG_INFINITY);
        let finite = k.select(none, 0.0f32, maximum);
        let scaled = self.scaled(k, finite);
        k.neg(scaled)
    }

    /// A maximum of before, scaled and shifted: exactly 0 if it is still that of the shift, so that its factor is 1. In one
    /// step, what rounding took from the shift would be left, and again with every tile of keys.
    pub(super) fn relative(&self, k: &mut Builder, maximum: Reg<F32>, shift: Reg<F32>) -> Reg<F32> {
        let scaled = self.scaled(k, maximum);
        k.add(scaled, shift)
    }

    /// A raw score or maximum in base 2.
    pub(super) fn scaled(&self, k: &mut Builder, score: Reg<F32>) -> Reg<F32> {
        match self.scale {
            Some(scale) => k.mul(score, scale),
            None => score,
        }
    }

    /// Stores maxima, sums and `output` for another warp, a register after the other, each with one word for each lane.
    pub fn send(&self, k: &mut Builder, output: &Accumulator, lane_address: Reg<U32>) {
        let address = SharedAddress::from(lane_address);
        self.each_sent(output, |offset, register| k.store_shared(address.plus(offset), &[register]));
    }

    /// The same for a warp of another CTA of the cluster.
    pub fn send_to_cta(&self, k: &mut Builder, output: &Accumulator, lane_address: ClusterAddress) {
        self.each_sent(output, |offset, register| k.store_cluster(lane_address.plus(offset), &[register]));
    }

    /// Does `store` with each register, and the bytes from the lane's first word to its own.
    fn each_sent(&self, output: &Accumulator, mut store: impl FnMut(i32, Reg<F32>)) {
        for (index, register) in self.registers(output).into_iter().enumerate() {
            store((index as u32 * LANES * WORD_BYTES) as i32, register);
        }
    }

    /// Adds what the same lane of another warp sent: the softmax of other keys of the same rows.
    pub fn receive(&self, k: &mut Builder, output: &Accumulator, lane_address: Reg<U32>) {
        let count = self.registers(output).len();
        let mut received = (0..count).map(|index| {
            let offset = index as u32 * LANES * WORD_BYTES;
            SharedAddress::from(lane_address).plus(offset as i32)
        });
        let rows = self.maximum.len();
        let maxima: Vec<_> = received.by_ref().take(rows).map(|from| k.load_shared::<F32>(from, 1)[0]).collect();
        let sums: Vec<_> = received.by_ref().take(rows).map(|from| k.load_shared::<F32>(from, 1)[0]).collect();
        let mut factors = Vec::new();
        for row in 0..rows {
            let before = k.copy(self.maximum[row]);
            k.max_to(self.maximum[row], maxima[row]);
            let shift = self.shift(k, self.maximum[row]);
            let [mine, other] = [before, maxima[row]].map(|maximum| {
                let exponent = self.relative(k, maximum, shift);
                k.exp2(exponent)
            });
            k.mul_to(self.sum[row], mine);
            k.fma_to(self.sum[row], sums[row], other);
            factors.push((mine, other));
        }
        output.each(|row, _, element| {
            if let Some(from) = received.next() {
                let other = k.load_shared::<F32>(from, 1)[0];
                k.mul_to(element, factors[row].0);
                k.fma_to(element, other, factors[row].1);
            }
        });
    }

    /// Bytes that [`send`](Self::send) takes.
    pub fn sent_bytes(&self, output: &Accumulator) -> u32 {
        self.registers(output).len() as u32 * LANES * WORD_BYTES
    }

    fn registers(&self, output: &Accumulator) -> Vec<Reg<F32>> {
        let mut registers: Vec<_> = self.maximum.iter().chain(&self.sum).copied().collect();
        output.each(|_, _, element| registers.push(element));
        registers
    }

    /// The maxima, in base 2, and the sums over all columns of a lane's rows, of the keys so far.
    pub fn partial(&self, k: &mut Builder) -> RowSums {
        for sum in &self.sum {
            over_row(k, *sum, |k, sum, other| k.add_to(sum, other));
        }
        let maximum = self.maximum.iter().map(|maximum| self.scaled(k, *maximum)).collect();
        RowSums { maximum, sum: self.sum.clone() }
    }

    /// Divides `output` by the sums of its rows, and returns what the rows were. A sink, in base 2, is one more score
    /// that has no value.
    pub fn finish(&self, k: &mut Builder, output: &Accumulator, sink: Option<Reg<F32>>) -> RowSums {
        let RowSums { maximum, .. } = self.partial(k);
        let (maximum, factors) = match sink {
            None => (maximum, None),
            Some(sink) => {
                let rows = maximum.iter().zip(&self.sum).map(|(maximum, sum)| add_sink(k, *maximum, *sum, sink));
                let (maximum, factors) = rows.unzip::<_, _, Vec<_>, Vec<_>>();
                (maximum, Some(factors))
            }
        };
        let inverse: Vec<_> = (0..self.sum.len())
            .map(|row| {
                let empty = k.compare(Compare::Eq, self.sum[row], 0.0f32);
                let inverse = k.reciprocal(self.sum[row]);
                let inverse = k.select(empty, 0.0f32, inverse);
                match &factors {
                    Some(factors) => k.mul(inverse, factors[row]),
                    None => inverse,
                }
            })
            .collect();
        output.scale_rows(k, &inverse);
        RowSums { maximum, sum: self.sum.clone() }
    }
}

/// What came of a new maximum, for each row of a lane.
#[derive(Debug, Clone)]
pub struct Raised {
    /// What is added to the scaled scores.
    pub(super) shift: Vec<Reg<F32>>,
    /// What earlier weights are multiplied by.
    pub(super) factors: Vec<Reg<F32>>,
}

/// Adds a sink, in base 2 like the maximum, to the sum of a row; returns the new maximum and what the output is
/// multiplied by.
pub fn add_sink(k: &mut Builder, maximum: Reg<F32>, sum: Reg<F32>, sink: Reg<F32>) -> (Reg<F32>, Reg<F32>) {
    k.section("sink", |k| {
        let raised = k.max(maximum, sink);
        // Where both are minus infinity, the difference would be a NaN.
        let none = k.compare(Compare::Eq, raised, f32::NEG_INFINITY);
        let finite = k.select(none, 0.0f32, raised);
        let lost = k.sub(maximum, finite);
        let factor = k.exp2(lost);
        let exponent = k.sub(sink, finite);
        let weight = k.exp2(exponent);
        k.scale_add_to(sum, factor, weight);
        (raised, factor)
    })
}

/// `target = 2^target` for numbers that are not positive: a polynomial for the fraction, and the whole part into the bits of
/// the exponent. Good to a relative error of `3e-6`; what is below the smallest normal number becomes zero.
fn exp2_by_polynomial(k: &mut Builder, target: Reg<F32>) {
    /// Added to a number, it leaves the nearest whole number in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    /// `2^x` from -1/2 to 1/2, the highest power first: least squares of the relative error at Chebyshev nodes.
    const COEFFICIENTS: [f32; 5] = [0.009_560_51, 0.055_917_04, 0.240_249_81, 0.693_121_97, 0.999_999_2];
    const SMALLEST: f32 = -126.0;
    const MANTISSA_BITS: u32 = 23;
    let vanishes = k.compare(Compare::Lt, target, SMALLEST);
    let clamped = k.max(target, SMALLEST);
    let shifted = k.add(clamped, MAGIC);
    let whole = k.sub(shifted, MAGIC);
    let fraction = k.sub(clamped, whole);
    let power = k.copy(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        k.scale_add_to(power, fraction, *coefficient);
    }
    let bits = k.reinterpret::<F32, U32>(shifted);
    let exponent = k.shl(bits, MANTISSA_BITS);
    let power = k.reinterpret::<F32, U32>(power);
    let bits = k.add(power, exponent);
    let power = k.reinterpret::<U32, F32>(bits);
    let result = k.select(vanishes, 0.0f32, power);
    k.set(target, result);
}

/// Combines `value` over the four lanes that share a row.
pub(super) fn over_row(k: &mut Builder, value: Reg<F32>, combine: impl Fn(&mut Builder, Reg<F32>, Reg<F32>)) {
    for distance in [1u32, 2] {
        let other = k.shuffle(ShuffleMode::Butterfly, value, distance);
        combine(k, value, other);
    }
}

/// The finished maxima, in base 2, and sums of a lane's rows.
#[derive(Debug, Clone)]
pub struct RowSums {
    pub(crate) maximum: Vec<Reg<F32>>,
    pub(crate) sum: Vec<Reg<F32>>,
}

impl RowSums {
    /// The natural logarithm of the sum of the exponentials of the scores; minus infinity for an empty row.
    pub fn lse(&self, k: &mut Builder) -> Vec<Reg<F32>> {
        let rows = self.maximum.iter().zip(&self.sum);
        rows.map(|(maximum, sum)| {
            // In an empty row both terms are minus infinity, and so is their sum.
            let logarithm = k.log2(*sum);
            let base_two = k.add(*maximum, logarithm);
            k.mul(base_two, LN_2)
        })
        .collect()
    }
}
