//! The fused AVX-512 softmax: software-pipelined into the QK product of the next keys.
//!
//! Zen 4 adds, rounds and scales with other units than those it multiplies with. A softmax between two products leaves the
//! one or the other waiting; so the instructions of one vector of weights are interleaved with the multiply-adds of four steps
//! of a product, where those that do not multiply take a quarter of a cycle each. Compilers would move all loads of these steps
//! to their front and run out of registers; hence the assembly.
//!
//! The row max must be known before the scores are. It is the one so far, or where there is none that of the first keys, and
//! stale afterwards (lazy rescale): weights may exceed 1, and should they be too large, the row panel is computed again
//! without fusion.

use super::avx512::{Avx512, Zmm};
use crate::microkernel::softmax::{COARSE, Column, MAX_TILE_SUM};
use crate::microkernel::{FusedForward, Operands, SoftmaxArgs};
use crate::simd::exp2::{MIN_EXPONENT, short};
use crate::simd::vector::Vector;
use core::arch::asm;
use core::arch::x86_64::{
    __m512, _CMP_LT_OQ, _CMP_NLT_UQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_loadu_ps, _mm512_maskz_mov_ps,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};

/// Lanes of a vector.
const LANES: usize = Zmm::LANES;

/// Lanes of a row panel: two vectors.
const PANEL: usize = 2 * LANES;

/// Keys of a block. With two vectors of lanes they are 16 sums, which leave registers for the weights.
const KEYS: usize = 8;

/// Steps of a product that the weights of one key, two vectors, are interleaved with.
const STEPS: usize = 8;

/// Softmax of both vectors of lanes of a row panel, one key after the other.
struct FusedSoftmax {
    /// Scores of the next key.
    next: *mut f32,
    factor: __m512,
    row_max: [Zmm; 2],
    /// Sums of the weights.
    added: [__m512; 2],
    /// Least exponents of all weights.
    least: __m512,
}

/// Coefficients of the polynomial in memory, each of which is read for all lanes at once.
static COEFFICIENTS: [f32; 6] = short::COEFFICIENTS;

/// One key of one step: its element times both vectors of the query.
macro_rules! key {
    ($step:literal, $place:literal, $first:literal, $second:literal) => {
        concat!(
            "vbroadcastss zmm18, dword ptr [",
            $place,
            " + 4*",
            $step,
            "]\n",
            "vfmadd231ps ",
            $first,
            ", zmm18, zmm16\n",
            "vfmadd231ps ",
            $second,
            ", zmm18, zmm17\n",
        )
    };
}

/// One step of the product of eight keys and the query, with an instruction of the softmax after every second key.
macro_rules! step {
    ($step:literal, $first:expr, $second:expr, $third:expr, $fourth:expr) => {
        concat!(
            "vmovups zmm16, [{query} + 128*",
            $step,
            "]\n",
            "vmovups zmm17, [{query} + 128*",
            $step,
            " + 64]\n",
            key!($step, "{near}", "zmm0", "zmm1"),
            key!($step, "{near} + {stride}", "zmm2", "zmm3"),
            $first,
            "\n",
            key!($step, "{near} + 2*{stride}", "zmm4", "zmm5"),
            key!($step, "{near} + {three_strides}", "zmm6", "zmm7"),
            $second,
            "\n",
            key!($step, "{far}", "zmm8", "zmm9"),
            key!($step, "{far} + {stride}", "zmm10", "zmm11"),
            $third,
            "\n",
            key!($step, "{far} + 2*{stride}", "zmm12", "zmm13"),
            key!($step, "{far} + {three_strides}", "zmm14", "zmm15"),
            $fourth,
            "\n",
        )
    };
}

/// Four steps, interleaved with one vector of weights: `2^x`, as [`Zmm::exp2`] computes it, for `x = score * factor + shift`
/// in `zmm20`, with its rest in `zmm21` and the power of the rest in `zmm22`.
macro_rules! steps_with_weights {
    (
        $first:literal, $second:literal, $third:literal, $fourth:literal,
        scores: $scores:literal, shift: $shift:literal, added: $added:literal, ahead: $ahead:literal
    ) => {
        concat!(
            step!(
                $first,
                concat!("vmovaps zmm20, ", $shift),
                concat!("vfmadd231ps zmm20, zmm24, [{scores} + ", $scores, "]"),
                "vbroadcastss zmm22, dword ptr [{coefficients}]",
                "vreduceps zmm21, zmm20, 8"
            ),
            step!(
                $second,
                // The second is the result where the first is a NaN.
                "vminps zmm29, zmm20, zmm29",
                "vfmadd213ps zmm22, zmm21, dword ptr [{coefficients} + 4]{{1to16}}",
                "vfmadd213ps zmm22, zmm21, dword ptr [{coefficients} + 8]{{1to16}}",
                "vsubps zmm20, zmm20, zmm21"
            ),
            step!(
                $third,
                "vfmadd213ps zmm22, zmm21, dword ptr [{coefficients} + 12]{{1to16}}",
                "vfmadd213ps zmm22, zmm21, dword ptr [{coefficients} + 16]{{1to16}}",
                "vfmadd213ps zmm22, zmm21, dword ptr [{coefficients} + 20]{{1to16}}",
                concat!("prefetcht0 [{ahead} + ", $ahead, "]")
            ),
            step!(
                $fourth,
                "vscalefps zmm20, zmm22, zmm20",
                concat!("prefetcht0 [{ahead} + 64 + ", $ahead, "]"),
                concat!("vmovups [{scores} + ", $scores, "], zmm20"),
                concat!("vaddps ", $added, ", ", $added, ", zmm20")
            ),
        )
    };
}

/// `product[key][lane] = dot(keys[key], query[lane])` for [`KEYS`] keys and a whole row panel, interleaved with the
/// weights of the next `softmax_keys` keys.
///
/// # Safety
///
/// The operands have `depth` columns and the product has a row of lanes for each key. There are scores of the keys that get
/// weights, none of them in `product`, and `depth` is at least [`STEPS`] for each of these keys.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn multiply(
    keys: *const f32,
    query: *const f32,
    depth: usize,
    product: *mut f32,
    softmax_keys: usize,
    softmax: &mut FusedSoftmax,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; KEYS];
    // Of this block alone: a sum of sums rounds less than one long sum.
    let mut added = [_mm512_setzero_ps(); 2];
    // SAFETY: the caller vouches for operands, product and scores, which are all that is read or written. Addresses that
    // are only prefetched may be any.
    unsafe {
        let shift = softmax.row_max.map(|row_max| Zmm::splat(0.0).sub(row_max).0);
        asm!(
            "test {softmax_keys}, {softmax_keys}",
            "jz 3f",
            ".p2align 5",
            "2:",
            steps_with_weights!(0, 1, 2, 3, scores: 0, shift: "zmm25", added: "zmm27", ahead: 0),
            steps_with_weights!(4, 5, 6, 7, scores: 64, shift: "zmm26", added: "zmm28", ahead: 128),
            "add {query}, 8*128",
            "add {near}, 8*4",
            "add {far}, 8*4",
            "add {ahead}, 4*64",
            "add {scores}, 2*64",
            "dec {softmax_keys}",
            "jnz 2b",
            "3:",
            "test {plain_steps}, {plain_steps}",
            "jz 5f",
            ".p2align 5",
            "4:",
            step!(0, "prefetcht0 [{ahead}]", "", "", ""),
            "add {query}, 128",
            "add {near}, 4",
            "add {far}, 4",
            "add {ahead}, 32",
            "dec {plain_steps}",
            "jnz 4b",
            "5:",
            query = inout(reg) query => _,
            // Four keys each.
            near = inout(reg) keys => _,
            far = inout(reg) keys.add(4 * depth) => _,
            stride = in(reg) 4 * depth,
            three_strides = in(reg) 12 * depth,
            // The keys of the next block, half a line in each step.
            ahead = inout(reg) keys.wrapping_add(KEYS * depth) => _,
            scores = inout(reg) softmax.next,
            coefficients = in(reg) COEFFICIENTS.as_ptr(),
            softmax_keys = inout(reg) softmax_keys => _,
            plain_steps = inout(reg) depth - softmax_keys * STEPS => _,
            inout("zmm0") sums[0][0], inout("zmm1") sums[0][1],
            inout("zmm2") sums[1][0], inout("zmm3") sums[1][1],
            inout("zmm4") sums[2][0], inout("zmm5") sums[2][1],
            inout("zmm6") sums[3][0], inout("zmm7") sums[3][1],
            inout("zmm8") sums[4][0], inout("zmm9") sums[4][1],
            inout("zmm10") sums[5][0], inout("zmm11") sums[5][1],
            inout("zmm12") sums[6][0], inout("zmm13") sums[6][1],
            inout("zmm14") sums[7][0], inout("zmm15") sums[7][1],
            out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm20") _, out("zmm21") _, out("zmm22") _,
            in("zmm24") softmax.factor,
            in("zmm25") shift[0], in("zmm26") shift[1],
            inout("zmm27") added[0], inout("zmm28") added[1],
            inout("zmm29") softmax.least,
            options(nostack),
        );
        for (sum, added) in softmax.added.iter_mut().zip(added) {
            *sum = _mm512_add_ps(*sum, added);
        }
        for (vector, sum) in sums.as_flattened().iter().enumerate() {
            _mm512_storeu_ps(product.add(vector * LANES), *sum);
        }
    }
}

impl FusedForward for Avx512 {
    fn qk_softmax_fused(&self, operands: &Operands<'_, Self>, args: &mut SoftmaxArgs<'_, Self>) -> bool {
        // SAFETY: `self` is a witness of the features.
        unsafe { qk_softmax_fused(operands, args) }
    }
}

/// [`FusedForward::qk_softmax_fused`] for whole row panels and blocks of keys.
///
/// # Safety
///
/// The processor has the features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn qk_softmax_fused(operands: &Operands<'_, Avx512>, args: &mut SoftmaxArgs<'_, Avx512>) -> bool {
    let (keys, depth) = (operands.rows.len(), operands.depth);
    let attends_all = |block| args.lane_rows.of_block(block) == keys;
    if args.updates_row_max || args.lanes != PANEL || !keys.is_multiple_of(KEYS) || !(0..2).all(attends_all) {
        return false;
    }
    let key = &operands.left[operands.rows.start * depth..operands.rows.end * depth];
    assert!(
        args.fits() && args.rows == keys && operands.right.len() >= depth * PANEL,
        "a product of tiles that are too small"
    );
    let (query, scores) = (operands.right.as_ptr(), args.scores.as_mut_ptr());
    // SAFETY: the tiles are as large as was just asserted, and the softmax reads scores that are there.
    unsafe {
        let mut softmax = FusedSoftmax {
            next: scores,
            factor: _mm512_set1_ps(args.factor),
            row_max: [0, LANES].map(|lane| Zmm::load(args.row_max.as_ptr().add(lane))),
            added: [_mm512_setzero_ps(); 2],
            least: _mm512_setzero_ps(),
        };
        let columns = [0, LANES].map(|lane| Column { scores: scores.add(lane), lanes: PANEL });
        for first in (0..keys).step_by(KEYS) {
            let softmax_keys = if first == 0 { 0 } else { KEYS.min(depth / STEPS) };
            multiply(
                key.as_ptr().add(first * depth),
                query,
                depth,
                scores.add(first * PANEL),
                softmax_keys,
                &mut softmax,
            );
            if first == 0 && !softmax.init_row_max(columns) {
                return false;
            }
        }
        softmax.flush(scores);
        let done = softmax.next.offset_from_unsigned(scores) / PANEL;
        let mut added = softmax.added.map(Zmm);
        for (vector, column) in columns.into_iter().enumerate() {
            let rest = Column { scores: column.scores.add(done * PANEL), ..column };
            let row_max = softmax.row_max[vector];
            added[vector] = added[vector].add(rest.exp_and_sum_all(keys - done, Zmm(softmax.factor), row_max));
        }
        if added.iter().any(|added| added.is_any_above(MAX_TILE_SUM as f32)) {
            args.updates_row_max = true;
            return false;
        }
        for (vector, lane) in [0, LANES].into_iter().enumerate() {
            let sum = args.row_sum.as_mut_ptr().add(lane);
            Zmm::load(sum).add(added[vector]).store(sum);
            softmax.row_max[vector].store(args.row_max.as_mut_ptr().add(lane));
            Zmm::splat(1.0).store(args.row_scale.as_mut_ptr().add(lane));
        }
    }
    true
}

impl FusedSoftmax {
    /// Initializes the row max of lanes that have none from the first block of keys. False if one still has none, or one so
    /// large that scores must be rounded before it is subtracted.
    ///
    /// # Safety
    ///
    /// There are scores of a block of keys.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn init_row_max(&mut self, columns: [Column<f32>; 2]) -> bool {
        // SAFETY: the caller vouches for the scores.
        unsafe {
            let nothing = Zmm::splat(f32::NEG_INFINITY);
            for (row_max, column) in self.row_max.iter_mut().zip(columns) {
                if !row_max.is_finite() {
                    let first = column.largest::<Zmm>(KEYS).mul(Zmm(self.factor));
                    *row_max = row_max.if_equal(nothing, first, *row_max);
                }
            }
            let is_coarse = |row_max: Zmm| row_max.max(Zmm::splat(0.0).sub(row_max)).is_any_above(COARSE as f32);
            self.row_max.iter().all(|&row_max| row_max.is_finite() && !is_coarse(row_max))
        }
    }

    /// Flushes subnormal weights to zero, where there may be any: multiplications with them take long on Intel's
    /// processors. A comparison of each would take longer than checking the least of them.
    ///
    /// # Safety
    ///
    /// The weights from `weights` to the next have been computed.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn flush(&self, mut weights: *mut f32) {
        if _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.least, _mm512_set1_ps(MIN_EXPONENT)) == 0 {
            return;
        }
        while weights < self.next {
            // SAFETY: the caller vouches for the weights, which are whole vectors.
            unsafe {
                let weight = _mm512_loadu_ps(weights);
                // Not less than, which a NaN is not either.
                let is_normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(weight, _mm512_set1_ps(f32::MIN_POSITIVE));
                _mm512_storeu_ps(weights, _mm512_maskz_mov_ps(is_normal, weight));
                weights = weights.add(LANES);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::microkernel::{LaneRows, MultiplyArgs, Products, Softmax, SoftmaxOutcome};

    /// A row panel with one tile of keys.
    struct Case {
        depth: usize,
        keys: usize,
        key: Vec<f32>,
        query: Vec<f32>,
        row_max: Vec<f32>,
    }

    /// Outcome of the softmax.
    struct Outcome {
        is_done: bool,
        updates_row_max: bool,
        weights: Vec<f32>,
        row_max: Vec<f32>,
        row_sum: Vec<f32>,
    }

    impl Case {
        /// Products between -1 and 1, and lanes that have attended a key or not.
        fn new(depth: usize, keys: usize, row_max: f32) -> Self {
            let element = |index: usize| ((index * 7919 + 13) % 1009) as f32 / 504.5 - 1.0;
            Self {
                depth,
                keys,
                key: (0..depth * keys).map(element).collect(),
                query: (0..depth * PANEL).map(|index| element(index + 5) / depth as f32).collect(),
                row_max: vec![row_max; PANEL],
            }
        }

        /// The score of one key becomes `score` in one lane; all others are 0 there.
        fn set_score(&mut self, key: usize, lane: usize, score: f32) {
            for (index, row) in self.key.chunks_exact_mut(self.depth).enumerate() {
                row[0] = if index == key { score } else { 0.0 };
            }
            for (index, row) in self.query.chunks_exact_mut(PANEL).enumerate() {
                row[lane] = 0.0;
                if index == 0 {
                    row.fill(0.0);
                    row[lane] = 1.0;
                }
            }
        }

        /// Row sum before.
        fn sum(&self) -> Vec<f32> {
            self.row_max.iter().map(|row_max| if row_max.is_finite() { 0.5 } else { 0.0 }).collect()
        }

        /// Fused, or one after the other.
        fn run(&self, is_fused: bool) -> Option<Outcome> {
            let kernel = Avx512::detect()?;
            let mut scores = vec![9.0; self.keys * PANEL];
            let (mut row_max, mut sum, mut row_scale) = (self.row_max.clone(), self.sum(), vec![9.0; PANEL]);
            let lane_rows = LaneRows::new(|_| self.keys);
            let operands = Operands { depth: self.depth, rows: 0..self.keys, left: &self.key, right: &self.query };
            if !is_fused {
                let product = &mut scores;
                kernel.multiply(MultiplyArgs { operands: &operands, lanes: PANEL, lane_rows, factor: 1.0, product });
            }
            let mut args = SoftmaxArgs {
                lanes: PANEL,
                rows: self.keys,
                lane_rows,
                updates_row_max: false,
                factor: 1.5,
                scores: &mut scores,
                weights: &mut [],
                keeps_weights: false,
                row_max: &mut row_max,
                row_sum: &mut sum,
                row_scale: &mut row_scale,
            };
            let is_done = if is_fused {
                kernel.qk_softmax_fused(&operands, &mut args)
            } else {
                kernel.online_softmax(&mut args) == SoftmaxOutcome::Done
            };
            let updates_row_max = args.updates_row_max;
            Some(Outcome { is_done, updates_row_max, weights: scores, row_max, row_sum: sum })
        }
    }

    fn is_same(left: f32, right: f32) -> bool {
        left == right || left.is_nan() && right.is_nan() || (left - right).abs() <= 2e-6 * right.abs()
    }

    /// Compares with QK and softmax one after the other, relative to the row max that each of them chose.
    fn check(case: &Case, name: &str) {
        let (Some(fused), Some(apart)) = (case.run(true), case.run(false)) else { return };
        assert!(fused.is_done && apart.is_done && !fused.updates_row_max, "{name}");
        for lane in 0..PANEL {
            let factor = (fused.row_max[lane] - apart.row_max[lane]).exp2();
            for key in 0..case.keys {
                let at = key * PANEL + lane;
                let (weight, expected) = (fused.weights[at] * factor, apart.weights[at]);
                assert!(is_same(weight, expected), "{name}: ({key}, {lane}) {weight} for {expected}");
            }
            let (sum, expected) = (fused.row_sum[lane] * factor, apart.row_sum[lane]);
            assert!(is_same(sum, expected), "{name}: sum {sum} for {expected} in lane {lane}");
        }
    }

    #[test]
    fn all_depths_and_numbers_of_keys() {
        for depth in (1..20).chain([31, 63, 64, 65, 72, 128]) {
            for keys in [KEYS, 2 * KEYS, 5 * KEYS, 128] {
                for row_max in [f32::NEG_INFINITY, 0.25] {
                    check(&Case::new(depth, keys, row_max), &format!("depth {depth}, {keys} keys, row_max {row_max}"));
                }
            }
        }
    }

    /// Wherever a score rises too far, the row max must be updated, and nothing has changed but scores.
    #[test]
    fn scores_that_rise_too_far() {
        for row_max in [f32::NEG_INFINITY, 0.25] {
            for lane in [0, LANES - 1, LANES, PANEL - 1] {
                for key in [KEYS, 40, 119, 127] {
                    let mut case = Case::new(64, 128, row_max);
                    case.set_score(key, lane, 9.0);
                    let Some(outcome) = case.run(true) else { return };
                    assert!(!outcome.is_done && outcome.updates_row_max, "{key} {lane}");
                    assert!(outcome.row_max == case.row_max && outcome.row_sum == case.sum(), "{key} {lane}");
                    case.set_score(key, lane, 6.0);
                    check(&case, &format!("a score that does not rise too far: {key} {lane}"));
                }
            }
        }
    }

    /// As without fusion: no weight is subnormal, NaNs show in weight and row sum, infinities are refused.
    #[test]
    fn special_scores() {
        for lane in [3, LANES + 3] {
            for key in [40, 127] {
                for score in [-83.9, -84.1, -90.0, -99.0, -1000.0, f32::NAN] {
                    let mut case = Case::new(64, 128, 0.25);
                    case.set_score(key, lane, score);
                    check(&case, &format!("a score of {score} at ({key}, {lane})"));
                    let Some(outcome) = case.run(true) else { return };
                    assert!(!outcome.weights.iter().any(|weight| weight.is_subnormal()), "{score} at ({key}, {lane})");
                }
                let mut case = Case::new(64, 128, f32::NEG_INFINITY);
                case.set_score(key, lane, f32::INFINITY);
                let Some(outcome) = case.run(true) else { return };
                assert!(!outcome.is_done, "an infinity at ({key}, {lane})");
            }
        }
    }
}
