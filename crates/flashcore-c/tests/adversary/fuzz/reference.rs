//! Attention of one row by plain loops, and how far from it a right answer can be.
//!
//! # How far
//!
//! `u` is the roundoff of sums (2^-24, or 2^-53 for `f64`) and `g(k) = k u / (1 - k u)`, the largest relative error of `k`
//! roundings in any order (Higham, lemma 3.1). Sums may be made in any order and in any parts; nothing below depends on how.
//!
//! **A score.** The product of `d` columns is off by at most `g(d + 2) sum |q k|`, and by what is lost below the least
//! number, `d tiny`. The scale, rounded, and its product: `4 u |s|`. A softcap `c tanh(s / c)` passes errors on by at most
//! the largest slope of `tanh` within them, and adds `8 u` of itself. `ALiBi` and the bias add a rounding each of what they
//! add and of the sum, going over to base 2 two more. That is `delta`.
//!
//! **A weight** is `exp(s - m)` for some `m` that is the same for all of a row, or is corrected from part to part: the
//! argument is rounded, relative to its size and to the distance of references (`u (|s - m| + 28)`; a reference may be 20
//! powers of two off); the exponential is within `x = 4 u`; and each correction, of which there are as many as the maximum
//! rises, `r`, is one more. So it is off by `eta = exp(delta + u (|s - m| + 28)) - 1 + (1 + r) x`, relatively.
//! In `bf16`, `x` is 7.6e-6, a five-hundredth of a rounding to the type: what the polynomial of its instructions was measured
//! to be off by, over every exponent (`bf16/softmax.rs`). And `bf16` problems may have weights of 16 bits: `omega = 6.2e-3` more (a rounding to bf16 is 3.9e-3; docs/cpu.md
//! has the figure), in the numerator or in both parts.
//!
//! **The output** is `sum p v`, with `p = w / sum w`. Relative errors `eta` of the weights change it by
//! `sum p eta |v - out| / (1 - sum p eta)`; the two sums over `n` keys by `g(n + r + 8)` of `sum p |v|` and of `|out|`;
//! `omega` by its share of both; rounding by the roundoff of the type. Weights below 2^-122 of the largest (2^-108 for bf16)
//! may be taken as zero, since exponentials end at 2^-126 (and 16-bit weights at 2^-112) of the reference. What is lost
//! below the least number is `2 (n + r) tiny`; where a sink is that much larger than all keys, the factor that takes it into
//! account is subnormal, too.
//!
//! What is subtracted from scores is rounded as well, and where scores are large, that moves all weights of a row: by up to
//! `lift = 2^(1 + 2 u |s| / ln 2)`, which is 2 for scores of ordinary size, and 2^10 at most: scores from 2^26 on must be rounded
//! before. It cancels in the quotient; what is lost below the least number, and what overflows, is so much more.
//!
//! **The log-sum-exp** changes by `sum p eta / (1 - sum p eta)`, and by no more than the largest `delta` whatever that is, by
//! `g(n + r + 8)`, and by roundings of what it is made of.
//!
//! Whatever the errors of scores: the output lies between the least and the largest attended value (and zero, with a
//! sink), as far as rounding goes. That is checked too, and alone where `sum p eta` is above one half.
//!
//! Nothing is said of rows whose scores overflow, nor of an infinite or NaN output where a sum of weighted values may
//! overflow: values times keys times 2^20 (references may be 2^20 off) above the largest number.

use super::case::Case;
use super::element::Element;
use super::real::{Pair, Real};
use super::tensors::Numbers;

/// Bounds of a row.
pub(crate) enum Truth {
    /// Scores overflow: nothing is said.
    Unknown,
    /// A NaN was attended: so is everything.
    Nan,
    /// Zeros, and this log-sum-exp.
    Nothing { lse: f64, bound: f64, is_known: Vec<bool> },
    /// These columns.
    Row { columns: Vec<Column>, lse: f64, lse_bound: f64, typical_noise: f64, keys: usize },
}

/// Bounds of one element.
#[expect(clippy::struct_excessive_bools, reason = "each is an independent reason to look at an element in another way")]
pub(crate) struct Column {
    /// The exact number, in two parts.
    pub(crate) high: f64,
    pub(crate) low: f64,
    /// The largest error of a right answer.
    pub(crate) bound: f64,
    /// The values that are attended, with what rounding may add.
    pub(crate) hull: (f64, f64),
    /// `sum p |v|`.
    pub(crate) magnitude: f64,
    /// Loss below the least number, which is no small part of a rounding.
    pub(crate) is_lossy: bool,
    pub(crate) may_overflow: bool,
    /// A NaN was attended here.
    pub(crate) is_nan: bool,
    /// A NaN was attended with a weight that may be zero: nothing is said.
    pub(crate) is_unknown: bool,
}

/// One place of the output.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) row: usize,
}

struct Score<R> {
    key: usize,
    value: R,
    /// The largest error.
    error: f64,
    /// An error that is exceeded rarely where numbers are random: `3 sqrt(d)` roundings of a product in place of `d`.
    typical: f64,
}

/// Bounds of a row.
pub(crate) fn truth(case: &Case, numbers: &Numbers, place: Place) -> Truth {
    if case.element == Element::F64 {
        truth_in::<Pair>(case, numbers, place)
    } else {
        truth_in::<f64>(case, numbers, place)
    }
}

fn g(roundings: f64, u: f64) -> f64 {
    roundings * u / (1.0 - roundings * u)
}

/// Loss of a product, and of a weighted sum, below the least number.
fn tiny(element: Element) -> (f64, f64) {
    match element {
        // Instructions for bf16 take subnormal results as zero, and the reference of 16-bit weights is 2^-15.
        Element::Bf16 => (2_f64.powi(-126), 2_f64.powi(-110)),
        Element::F16 | Element::F32 => (Element::F32.least(), Element::F32.least()),
        Element::F64 => (Element::F64.least(), Element::F64.least()),
    }
}

/// The scores of the keys that a row attends, or what the row is without them.
fn scores<R: Real>(case: &Case, numbers: &Numbers, at: Place) -> Result<Vec<Score<R>>, Truth> {
    let u = case.element.sum_roundoff();
    let overflow = if case.element == Element::F64 { 2_f64.powi(1000) } else { 2_f64.powi(125) };
    let key_head = at.head / (case.query_heads / case.key_heads);
    let start =
        |strides: [usize; 3], head: usize, row: usize| at.batch * strides[0] + head * strides[1] + row * strides[2];
    let query_start = start(case.query_strides, at.head, at.row);
    let (position, scale, dim) = (case.position(at.batch, at.row), case.scale, case.head_dim);
    let mut scores = Vec::new();
    for key in (0..case.key_length_of(at.batch)).filter(|&key| case.attends(at.batch, at.row, key)) {
        let key_start = start(case.key_strides, key_head, key);
        let query = &numbers.query[query_start..][..dim];
        let keys = &numbers.key[key_start..][..dim];
        let (mut product, mut magnitude) = (R::from_f64(0.0), 0.0);
        for (&q, &k) in query.iter().zip(keys) {
            product = product + R::product(q, k);
            magnitude += (q * k).abs();
        }
        if product.high().is_nan() {
            return Err(Truth::Nan);
        }
        let mut value = product * R::from_f64(scale);
        if magnitude.max(magnitude * scale.abs() * 1.5) > overflow {
            return Err(Truth::Unknown);
        }
        let lost = dim as f64 * tiny(case.element).0;
        let mut error = scale.abs() * (g(dim as f64 + 2.0, u) * magnitude + lost) + 4.0 * u * value.high().abs();
        if let Some(softcap) = case.softcap.map(f64::from) {
            let inside = value / R::from_f64(softcap);
            let inside_error = error / softcap + 2.0 * u * inside.high().abs();
            let slope = (inside.high().abs() - inside_error).max(0.0).cosh().powi(-2);
            value = R::from_f64(softcap) * inside.tanh();
            error = softcap * slope * inside_error + 8.0 * u * value.high().abs() + softcap * tiny(case.element).0;
        }
        if case.has_alibi {
            let distance = (position - key as i64).unsigned_abs() as f64;
            let term = R::product(numbers.slopes[at.head], distance);
            value = value - term;
            error += u * (term.high().abs() + value.high().abs());
        }
        if let Some(strides) = case.bias {
            let index = at.batch * strides[0] + at.head * strides[1] + at.row * strides[2] + key * strides[3];
            let bias = numbers.bias[index];
            if bias == f64::NEG_INFINITY {
                // Its weight is zero, but a NaN there would be seen.
                scores.push(Score { key, value: R::from_f64(f64::NEG_INFINITY), error: 0.0, typical: 0.0 });
                continue;
            }
            value = value + R::from_f64(bias);
            error += u * value.high().abs();
        }
        error += 2.0 * u * value.high().abs();
        let typical = u * (3.0 * (dim as f64 + 2.0).sqrt() * magnitude * scale.abs() + 16.0 * value.high().abs());
        scores.push(Score { key, value, error, typical });
    }
    Ok(scores)
}

fn truth_in<R: Real>(case: &Case, numbers: &Numbers, at: Place) -> Truth {
    let u = case.element.sum_roundoff();
    let scores = match scores::<R>(case, numbers, at) {
        Ok(scores) => scores,
        Err(truth) => return truth,
    };
    let sink = numbers.sinks.get(at.head).copied();
    let (mut largest_key, mut rises) = (f64::NEG_INFINITY, 2.0);
    let mut largest = R::from_f64(f64::NEG_INFINITY);
    for score in &scores {
        if score.value.high() > largest_key {
            (largest_key, largest, rises) = (score.value.high(), score.value, rises + 1.0);
        }
    }
    let unit = Element::F32.roundoff();
    if largest_key == f64::NEG_INFINITY {
        let lse = sink.unwrap_or(f64::NEG_INFINITY);
        // A weight of zero, which is what a bias of minus infinity gives, does not hide a NaN.
        let is_nan = |score: &Score<R>, column: usize| value_at(case, numbers, at, score.key, column).is_nan();
        let is_known = |column: usize| !scores.iter().any(|score| is_nan(score, column));
        let is_known = (0..case.value_dim).map(is_known).collect();
        return Truth::Nothing { lse, bound: 8.0 * unit * sink.unwrap_or(0.0).abs(), is_known };
    }
    if sink.is_some_and(|sink| sink > largest_key) {
        largest = R::from_f64(sink.unwrap_or_default());
    }
    let top = largest.high();
    // Weights, their sum, and their relative errors times their shares.
    let finite: Vec<&Score<R>> = scores.iter().filter(|score| score.value.high().is_finite()).collect();
    let weights: Vec<R> = finite.iter().map(|score| (score.value - largest).exp()).collect();
    let of_sink = sink.map_or(R::from_f64(0.0), |sink| (R::from_f64(sink) - largest).exp());
    let total = weights.iter().fold(of_sink, |sum, &weight| sum + weight);
    let exponential = if case.element == Element::Bf16 { 7.6e-6 } else { 4.0 * u };
    let etas: Vec<f64> = finite
        .iter()
        .map(|score| {
            let rounded = u * ((score.value.high() - top).abs() + 28.0);
            (score.error + rounded).exp_m1() + (1.0 + rises) * exponential
        })
        .collect();
    let shares: Vec<f64> = weights.iter().map(|weight| weight.high() / total.high()).collect();
    let noise: f64 = shares.iter().zip(&etas).map(|(share, eta)| share * eta).sum();
    let sink_noise = sink.map_or(0.0, |sink| {
        (u * (4.0 * sink.abs() + (sink - top).abs() + 28.0) + 2.0 * exponential) * of_sink.high() / total.high()
    });
    let noise = noise + sink_noise;
    let keys = scores.len();
    let sums = g(keys as f64 + rises + 8.0, u);
    let log_total = total.high().ln();
    let lse = top + log_total;
    // Relative to the keys' part of the sum: under a sink that outweighs them, the output is as small as they are.
    let far = |score: &Score<R>| u * ((score.value.high() - top).abs() + 28.0);
    let of_keys: f64 = shares.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let typical = finite.iter().zip(&shares).map(|(score, share)| share / of_keys * (score.typical + far(score)));
    let typical_noise = typical.sum::<f64>() + 4.0 * u * sink.unwrap_or(0.0).abs();
    let largest_score = finite.iter().map(|score| score.value.high().abs()).fold(0.0, f64::max);
    let lift = (1.0 + 2.0 * u * largest_score / std::f64::consts::LN_2).min(10.0).exp2();
    let largest_error =
        finite.iter().map(|score| score.error).fold(0.0, f64::max) + 4.0 * u * sink.unwrap_or(0.0).abs();
    let spread = if noise < 0.5 { noise / (1.0 - noise) } else { largest_error + (1.0 + rises) * exponential };
    let rounding = 8.0 * u * (top.abs() + log_total.abs() + 1.0) + 2.0 * unit * lse.abs() + unit;
    let lse_bound = spread + sums + rounding;
    let row = RowSums { case, numbers, at, scores: &scores, finite: &finite, weights: &weights, etas: &etas, total };
    let scale = Scale { noise, sums, rises, largest_key, top, has_sink: sink.is_some(), lift };
    let columns = (0..case.value_dim).map(|column| row.column(column, &shares, &scale)).collect();
    Truth::Row { columns, lse, lse_bound, typical_noise, keys }
}

fn value_at(case: &Case, numbers: &Numbers, at: Place, key: usize, column: usize) -> f64 {
    let strides = case.value_strides;
    let head = at.head / (case.query_heads / case.key_heads);
    numbers.value[at.batch * strides[0] + head * strides[1] + key * strides[2] + column]
}

struct RowSums<'a, R> {
    case: &'a Case,
    numbers: &'a Numbers,
    at: Place,
    scores: &'a [Score<R>],
    finite: &'a [&'a Score<R>],
    weights: &'a [R],
    etas: &'a [f64],
    total: R,
}

struct Scale {
    noise: f64,
    sums: f64,
    rises: f64,
    largest_key: f64,
    top: f64,
    has_sink: bool,
    lift: f64,
}

impl<R: Real> RowSums<'_, R> {
    fn value(&self, key: usize, column: usize) -> f64 {
        value_at(self.case, self.numbers, self.at, key, column)
    }

    fn column(&self, column: usize, shares: &[f64], scale: &Scale) -> Column {
        let element = self.case.element;
        let (tiny, least_weight, omega) = match element {
            Element::F64 => (tiny(element).1, 2_f64.powi(-1010), 0.0),
            Element::Bf16 => (tiny(element).1, 2_f64.powi(-108), 6.2e-3),
            Element::F16 | Element::F32 => (tiny(element).1, 2_f64.powi(-122), 0.0),
        };
        let (tiny, least_weight) = (tiny * scale.lift, least_weight * scale.lift);
        let mut sum = R::from_f64(0.0);
        let (mut magnitude, mut unscaled, mut largest_value) = (0.0, 0.0, 0.0_f64);
        let (mut low, mut high) = if scale.has_sink { (0.0, 0.0) } else { (f64::INFINITY, f64::NEG_INFINITY) };
        let (mut is_nan, mut is_unknown) = (false, false);
        for ((score, &weight), &share) in self.finite.iter().zip(self.weights).zip(shares) {
            let value = self.value(score.key, column);
            if value.is_nan() {
                is_nan |= weight.high() > 2_f64.powi(-100);
                is_unknown |= weight.high() <= 2_f64.powi(-100);
                continue;
            }
            sum = sum + weight * R::from_f64(value);
            magnitude += share * value.abs();
            unscaled += weight.high() * value.abs();
            largest_value = largest_value.max(value.abs());
            if weight.high() < least_weight {
                (low, high) = (low.min(0.0), high.max(0.0));
            }
            (low, high) = (low.min(value), high.max(value));
        }
        // A weight of zero does not hide what is infinite or no number.
        is_unknown |= self.scores.len() > self.finite.len()
            && self
                .scores
                .iter()
                .any(|score| score.value.high().is_infinite() && self.value(score.key, column).is_nan());
        let exact = sum / self.total;
        let out = exact.high();
        let (mut shifted, mut flushed) = (0.0, 0.0);
        for (((score, &weight), &share), &eta) in self.finite.iter().zip(self.weights).zip(shares).zip(self.etas) {
            let value = self.value(score.key, column);
            shifted += share * eta * (value - out).abs();
            if weight.high() < least_weight {
                flushed += share * (value.abs() + out.abs());
            }
        }
        let keys = self.scores.len() as f64;
        let mut floor = 2.0 * (keys + scale.rises) * tiny + element.least() / 2.0 + flushed;
        if (scale.largest_key - scale.top).exp() < 2_f64.powi(-90) {
            // The factor of the row is subnormal; weights are up to 2^11 above what they are relative to.
            floor += scale.lift * 2_f64.powi(-149 + 12) * unscaled / (scale.largest_key - scale.top).exp().max(1e-300);
        }
        let rounding = element.roundoff() * (1.0 + scale.noise.min(1.0));
        let bound = if scale.noise < 0.5 {
            shifted / (1.0 - scale.noise)
                + (scale.sums + omega) * (magnitude + out.abs())
                + rounding * (out.abs() + shifted + omega * magnitude)
                + floor
        } else {
            f64::INFINITY
        };
        let reach = (scale.sums + 2.0 * omega + 2.0 * element.roundoff()) * largest_value + 2.0 * floor;
        let limit = if element == Element::F64 { f64::MAX } else { f64::from(f32::MAX) };
        Column {
            high: out,
            low: exact.low(),
            bound: bound * 1.0001,
            hull: (low - reach, high + reach),
            magnitude,
            is_lossy: floor > 0.05 * element.roundoff() * magnitude,
            may_overflow: largest_value > limit / 2_f64.powi(20) / keys / scale.lift,
            is_nan,
            is_unknown,
        }
    }
}
