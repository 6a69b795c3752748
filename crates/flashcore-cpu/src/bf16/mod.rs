//! The microkernel of both bf16 levels: they differ only in the instructions that multiply.
//!
//! Weights are rounded to `bf16` before they meet the values, which the other levels do not; sums stay in `f32`. How they
//! come to be is [`weigh`], or where the problem allows it the faster [`narrow`]. The instructions take subnormal elements and sums as zero: see [`pack`] for what keeps small values alive.

pub(crate) mod narrow;
pub(crate) mod pack;
#[cfg(test)]
mod tests;
pub(crate) mod weave;
#[cfg(test)]
mod weave_tests;
pub(crate) mod weigh;

use crate::avx512::Avx512;
use crate::driver;
use crate::group::Group;
use crate::masking::LaneRanges;
use crate::microkernel::{LaneKeys, Microkernel, OutputProduct, ScoreProduct, Strip, Weighed, WholeMeeting, padded};
use crate::pack::Head;
use crate::scores::is_plain;
use crate::shaping::Shaping;
use crate::stream::StreamTile;
use crate::weighing::COARSE;
use core::arch::x86_64::{
    _CMP_NEQ_UQ, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_maskz_loadu_epi16, _mm512_mul_ps,
    _mm512_set1_ps, _mm512_storeu_ps, _mm512_storeu_si512,
};
use flashcore_problem::{DType, InputViews, Problem};
use pack::{DEPTH, LANES, PAIRS, VALUE_HEADER};
use std::f64::consts::LOG2_E;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// `product = left * right`, or that added to what is there, on packed pairs.
#[derive(Clone, Copy)]
pub(crate) struct PairProduct {
    /// Rows of `left` and of `product`; a multiple of 16.
    pub(crate) rows: usize,
    /// Columns of `right` and of `product`; a multiple of 16.
    pub(crate) lanes: usize,
    /// Elements from one row of `right` and of `product` to the next.
    pub(crate) stride: usize,
    /// Panels of `left`; `right` has a row for each of their pairs.
    pub(crate) panels: usize,
    /// The first row of the first panel.
    pub(crate) left: *const u32,
    /// Pairs from one panel to the next.
    pub(crate) panel_size: usize,
    pub(crate) right: *const u32,
    pub(crate) product: *mut f32,
    pub(crate) adds: bool,
}

/// The instructions that multiply pairs. Whoever has one has the processor for it.
pub(crate) trait PairMultiplier: Sync {
    /// Query rows of a strip: 32 or 64.
    const STRIP: usize;
    /// Keys of one tile.
    const KEY_TILE: usize;
    /// Whether units of their own multiply while vectors weigh, so that [`attend`](Self::attend) is there.
    const WEAVES: bool = false;
    /// # Safety
    ///
    /// Everything that [`PairProduct`] speaks of is there.
    unsafe fn multiply(&self, product: PairProduct);

    /// A whole meeting.
    ///
    /// # Safety
    ///
    /// As [`weave::attend`].
    unsafe fn attend(&self, meeting: &weave::Meeting) {
        let _ = meeting;
        unreachable!("only a multiplier that weaves is asked to");
    }

    /// Runs `work`, which multiplies, on this thread.
    fn on_thread(&self, work: impl FnOnce()) {
        work();
    }
}

/// The microkernel with the instructions of a multiplier. What is not worth writing in pairs is left to the kernel for
/// AVX-512.
pub(crate) struct Bf16Kernel<M> {
    multiplier: M,
    vectors: Avx512,
    /// Whether weights need be no more than `bf16`: the problem does not ask for more, and the processor can do it.
    has_narrow_weights: bool,
}

impl<M: PairMultiplier> Bf16Kernel<M> {
    /// The lanes of the first half of a strip, and the keys that some of their rows attends; the other half may attend
    /// more. `None` where all lanes are of the first half.
    fn first_half(lanes: usize, lane_keys: LaneKeys) -> Option<(usize, usize)> {
        const { assert!(M::STRIP.is_multiple_of(2 * LANES)) };
        let half = M::STRIP / 2;
        (lanes > half).then(|| (half, lane_keys.of_block(half / LANES - 1)))
    }

    /// `None` where the processor lacks AVX-512, which no multiplier is without.
    pub(crate) fn new(multiplier: M) -> Option<Self> {
        Avx512::detect().map(|vectors| Self { multiplier, vectors, has_narrow_weights: false })
    }

    /// The kernel for a problem whose operands were looked at.
    pub(crate) fn for_problem(self, problem: &Problem, inputs: &InputViews<'_>, survey: &Survey) -> Self {
        let has_instructions = is_x86_feature_detected!("avx512vbmi") && is_x86_feature_detected!("avx512bf16");
        let has_narrow_weights = has_instructions
            && is_plain(problem, inputs)
            && !problem.lse
            && survey.largest_score(problem) < narrow::LARGEST_SCORE;
        Self { has_narrow_weights, ..self }
    }
}

/// No strip has more lanes.
const MOST_STRIP: usize = 4 * LANES;

impl<M: PairMultiplier> Microkernel for Bf16Kernel<M> {
    type Real = f32;
    type Packed = u32;

    const STRIP: usize = M::STRIP;
    const LANE_BLOCK: usize = LANES;
    const FIRST_KEY_BLOCK: usize = DEPTH;
    const KEY_BLOCK: usize = LANES;
    const VALUE_BLOCK: usize = LANES;
    const KEY_TILE: usize = M::KEY_TILE;
    const TILES_AT_ONCE: usize = if M::WEAVES { 16 } else { 1 };
    const MOST_ITEM_ROWS: usize = if M::WEAVES { 1024 } else { crate::split::MOST_ITEM_ROWS };
    const MULTIPLIES_IN_WEIGH: bool = true;

    fn query_size(head_dim: usize) -> usize {
        pack::query_size(head_dim, M::STRIP)
    }

    fn key_size(head_dim: usize, keys: usize) -> usize {
        pack::key_size(head_dim, keys)
    }

    fn value_size(value_dim: usize, keys: usize) -> usize {
        pack::value_size(value_dim, keys)
    }

    fn weight_size(keys: usize) -> usize {
        padded(keys, DEPTH) / 2 * M::STRIP
    }

    fn on_thread(&self, work: impl FnOnce()) {
        self.multiplier.on_thread(work);
    }

    fn pack_query(&self, query: Head<'_>, rows: Range<usize>, lanes: usize, packed: &mut [u32]) {
        // SAFETY: `self.vectors` is a witness of AVX-512.
        unsafe { pack::pack_query(query, rows, lanes, packed) }
    }

    fn pack_keys(&self, key: Head<'_>, keys: Range<usize>, packed: &mut [u32]) {
        // SAFETY: `self.vectors` is a witness of AVX-512.
        unsafe { pack::pack_keys(key, keys, packed) }
    }

    fn pack_values(&self, value: Head<'_>, keys: Range<usize>, packed: &mut [u32]) {
        // SAFETY: `self.vectors` is a witness of AVX-512.
        unsafe { pack::pack_values(value, keys, packed) }
    }

    fn score(&self, product: ScoreProduct<'_, Self>) {
        let panels = pack::panels(product.head_dim);
        let panel_size = product.key.len() / panels;
        let rows = padded(product.keys.len(), LANES);
        assert!(
            product.fits()
                && (product.keys.start + rows) * PAIRS <= panel_size
                && product.query.len() >= pack::query_size(product.head_dim, product.lanes),
            "a product of tiles that are too small"
        );
        let lanes = product.lanes;
        let (first, near) = Self::first_half(lanes, product.lane_keys)
            .map_or((lanes, rows), |(first, keys)| (first, padded(keys, LANES).min(rows)));
        // SAFETY: the keys have so many rows in each panel, the query a row for each pair of a panel, and the scores a
        // row for each key, as asserted.
        unsafe {
            let whole = PairProduct {
                rows: near,
                lanes,
                stride: lanes,
                panels,
                left: product.key.as_ptr().add(product.keys.start * PAIRS),
                panel_size,
                right: product.query.as_ptr(),
                product: product.scores.as_mut_ptr(),
                adds: false,
            };
            self.multiplier.multiply(whole);
            if near < rows {
                self.multiplier.multiply(PairProduct {
                    rows: rows - near,
                    lanes: lanes - first,
                    left: whole.left.add(near * PAIRS),
                    right: whole.right.add(first),
                    product: whole.product.add(near * lanes + first),
                    ..whole
                });
            }
        }
        if product.factor != 1.0 {
            // SAFETY: `self.vectors` is a witness of AVX-512.
            unsafe { scale(&mut product.scores[..rows * product.lanes], product.factor) };
        }
    }

    fn weigh(&self, strip: &mut Strip<'_, Self>) -> Weighed {
        assert!(strip.fits(), "a strip of scores that is too small");
        let is_narrow = self.has_narrow_weights && !strip.keeps_weights;
        let mut weighing = weighing(strip);
        // SAFETY: `self.vectors` is a witness of AVX-512, and the processor was asked for what else narrow weights need.
        unsafe {
            if is_narrow {
                narrow::weigh(&mut weighing);
            } else {
                weigh::weigh(&mut weighing);
            }
        }
        Weighed::Done
    }

    fn attend_at_once(&self, meeting: WholeMeeting<'_, Self>) -> bool {
        let (lanes, keys) = (meeting.lanes, meeting.keys);
        let columns = padded(meeting.value_dim, LANES);
        let [key_tile, value_tile] =
            [Self::key_size(meeting.head_dim, M::KEY_TILE), Self::value_size(meeting.value_dim, M::KEY_TILE)];
        let tiles = keys.end.div_ceil(M::KEY_TILE);
        assert!(
            keys.start < keys.end
                && meeting.key.len() >= tiles * key_tile
                && meeting.value.len() >= tiles * value_tile
                && meeting.query.len() >= pack::query_size(meeting.head_dim, lanes)
                && [meeting.maximum.len(), meeting.sum.len()].iter().all(|&length| length >= lanes)
                && meeting.output.len() >= columns * lanes,
            "a meeting of tiles that are too small"
        );
        let is_first = meeting.maximum[0] == f32::NEG_INFINITY;
        if !(M::WEAVES
            && self.has_narrow_weights
            && [keys.start, keys.end, lanes].iter().all(|size| size.is_multiple_of(weave::BLOCK))
            && meeting.maximum[..lanes].iter().all(|&maximum| (maximum == f32::NEG_INFINITY) == is_first)
            && meeting.value.chunks_exact(value_tile).take(tiles).all(|tile| pack::divisor(tile).is_none()))
        {
            return false;
        }
        const { assert!(!M::WEAVES || M::KEY_TILE == weave::TILE_BLOCKS * weave::BLOCK) };
        assert!(
            meeting.scores.len() >= weave::SCORE_ROOM && meeting.weights.len() >= weave::WEIGHT_ROOM,
            "a meeting in a room that is too small"
        );
        // SAFETY: keys and values have so many tiles, the query a row for each pair of a panel, and there is room for scores,
        // weights and output, as asserted. The processor was asked for what narrow weights need.
        unsafe {
            self.multiplier.attend(&weave::Meeting {
                lanes,
                columns,
                first_block: keys.start / weave::BLOCK,
                blocks: keys.len() / weave::BLOCK,
                panels: pack::panels(meeting.head_dim),
                key: meeting.key.as_ptr(),
                key_panel: key_tile / pack::panels(meeting.head_dim),
                key_tile,
                value: meeting.value.as_ptr().add(VALUE_HEADER),
                value_tile,
                query: meeting.query.as_ptr(),
                factor: meeting.factor,
                scores: meeting.scores.as_mut_ptr(),
                weights: meeting.weights.as_mut_ptr(),
                maximum: meeting.maximum.as_mut_ptr(),
                sum: meeting.sum.as_mut_ptr(),
                output: meeting.output.as_mut_ptr(),
            });
        }
        true
    }

    fn accumulate(&self, product: OutputProduct<'_, Self>) {
        let columns = padded(product.value_dim, LANES);
        assert!(
            product.fits() && product.value.len() >= pack::value_size(product.value_dim, product.keys.end),
            "a product of tiles that are too small"
        );
        let lanes = product.lanes;
        let output = &mut product.output[..columns * lanes];
        if product.is_first {
            output.fill(0.0);
        } else {
            // SAFETY: `self.vectors` is a witness of AVX-512, and there is a correction for each lane.
            unsafe { correct(output, &product.correction[..lanes]) };
        }
        let panel_size = columns * PAIRS;
        let first_panel = &product.value[VALUE_HEADER + product.keys.start / DEPTH * panel_size..];
        let whole_panels = product.keys.len() / DEPTH;
        let values = PairProduct {
            rows: columns,
            lanes,
            stride: lanes,
            panels: whole_panels,
            left: first_panel.as_ptr(),
            panel_size,
            right: product.weights.as_ptr(),
            product: output.as_mut_ptr(),
            adds: true,
        };
        // The last keys do not fill their panel: what is beside them there may be NaNs of keys that are not attended.
        let last_keys = product.keys.len() % DEPTH;
        let last = (last_keys > 0).then(|| Last {
            keys: last_keys,
            panel: &first_panel[whole_panels * panel_size..][..panel_size],
            weights: &product.weights[whole_panels * PAIRS * lanes..][..PAIRS * lanes],
        });
        let divisor = pack::divisor(product.value);
        // SAFETY: the values have so many columns in each panel, the weights a row for each pair of a panel, and the
        // output a row for each column.
        unsafe {
            if divisor.is_none() {
                let (first, near) = Self::first_half(lanes, product.lane_keys)
                    .map_or((lanes, whole_panels), |(first, keys)| (first, keys.div_ceil(DEPTH).min(whole_panels)));
                self.multiplier.multiply(PairProduct { panels: near, ..values });
                if near < whole_panels {
                    self.multiplier.multiply(PairProduct {
                        lanes: lanes - first,
                        panels: whole_panels - near,
                        left: values.left.add(near * panel_size),
                        right: values.right.add(near * PAIRS * lanes + first),
                        product: values.product.add(first),
                        ..values
                    });
                }
                if last.is_none() {
                    return;
                }
            }
            self.accumulate_in_parts(values, divisor, last.as_ref());
        }
    }

    fn shape(&self, shaping: Shaping<'_, f32>) {
        self.vectors.shape(shaping);
    }

    fn mask(&self, scores: &mut [f32], lanes: usize, ranges: &LaneRanges) {
        self.vectors.mask(scores, lanes, ranges);
    }

    fn transpose(&self, columns: &[f32], factors: &[f32], rows: &mut [f32]) {
        self.vectors.transpose(columns, factors, rows);
    }

    fn are_finite(&self, head: Head<'_>, rows: Range<usize>) -> bool {
        self.vectors.are_finite(head, rows)
    }

    fn store(&self, dtype: DType, values: &[f32], factor: f32, bytes: &mut [u8]) {
        self.vectors.store(dtype, values, factor, bytes);
    }

    /// A few rows are bound by reading the keys, which products in pairs do not make faster.
    fn stream(&self, tile: StreamTile<'_, f32>) {
        self.vectors.stream(tile);
    }
}

impl<M> Bf16Kernel<M> {
    /// Looks at every element of query rows and keys that take part: rows that attend some key, and keys that some row
    /// attends.
    #[expect(clippy::unused_self, reason = "it is a witness of AVX-512")]
    pub(crate) fn survey(&self, problem: &Problem, inputs: &InputViews<'_>) -> Survey {
        let survey = Survey::default();
        if problem.output_shape().is_empty() {
            return survey;
        }
        let groups = problem.batch * problem.key_heads;
        let elements = Group::row_count(problem).saturating_add(problem.key_length).saturating_mul(problem.head_dim);
        driver::for_each(groups, elements, driver::Order::OneByOne, |index| {
            let group = Group::new(problem, inputs, index / problem.key_heads, index % problem.key_heads);
            let (rows, keys) = (group.attending_rows(), group.attended_of(&(0..problem.key_length)));
            // SAFETY: `self.vectors` is a witness of AVX-512.
            let [query, key] = unsafe { [pack::magnitudes(group.query, rows), pack::magnitudes(group.key, keys)] };
            if query.has_subnormal || key.has_subnormal {
                survey.has_subnormals.store(true, Ordering::Relaxed);
            }
            survey.largest_query.fetch_max(query.largest, Ordering::Relaxed);
            survey.largest_key.fetch_max(key.largest, Ordering::Relaxed);
        });
        survey
    }

    /// The kernel that is exact for all.
    pub(crate) fn exact(&self) -> &Avx512 {
        &self.vectors
    }
}

/// What the softmax sees of a strip.
fn weighing<'a, M: PairMultiplier>(strip: &'a mut Strip<'_, Bf16Kernel<M>>) -> weigh::Weighing<'a> {
    weigh::Weighing {
        lanes: strip.lanes,
        keys: strip.keys,
        lane_keys: strip.lane_keys,
        factor: strip.factor,
        scores: strip.scores,
        weights: strip.weights,
        maximum: strip.maximum,
        sum: strip.sum,
        correction: strip.correction,
        keeps_weights: strip.keeps_weights,
    }
}

/// What is to be known of the elements of query and keys.
#[derive(Default)]
pub(crate) struct Survey {
    has_subnormals: AtomicBool,
    /// The bits of the largest magnitudes.
    largest_query: AtomicU32,
    largest_key: AtomicU32,
}

impl Survey {
    /// Whether the products of the problem come out as those of its elements, and weights as those of the products. The
    /// instructions take subnormal elements as zero, and keys can be so large that these count; and the softmax subtracts
    /// what is rounded from what is not, see [`COARSE`].
    pub(crate) fn is_exact(&self, problem: &Problem) -> bool {
        // Of a NaN in one key nothing is known of the others: false too.
        self.largest_score(problem) < COARSE && !self.has_subnormals.load(Ordering::Relaxed)
    }

    /// No score of a plain problem is farther from 0, in base 2. Not a finite number where an element is none.
    fn largest_score(&self, problem: &Problem) -> f64 {
        let [query, key] = [&self.largest_query, &self.largest_key]
            .map(|bits| f64::from(f32::from_bits(bits.load(Ordering::Relaxed) << 16)));
        query * key * problem.head_dim as f64 * problem.scale.abs() * LOG2_E
    }
}

/// The last keys, which do not fill their panel.
struct Last<'a> {
    keys: usize,
    panel: &'a [u32],
    weights: &'a [u32],
}

impl<M: PairMultiplier> Bf16Kernel<M> {
    /// What is rare, for a few columns at a time: values that were multiplied when they were packed, and the last keys.
    ///
    /// # Safety
    ///
    /// As [`PairMultiplier::multiply`].
    unsafe fn accumulate_in_parts(&self, values: PairProduct, divisor: Option<f32>, last: Option<&Last<'_>>) {
        const COLUMNS: usize = 2 * LANES;
        for first in (0..values.rows).step_by(COLUMNS) {
            let rows = (values.rows - first).min(COLUMNS);
            let mut panel = [[0; PAIRS]; COLUMNS];
            let mut products = [0.0; COLUMNS * MOST_STRIP];
            // SAFETY: the caller vouches for the whole, of which these are some rows; `panel` and `products` have room
            // for these, and the lanes of a strip.
            unsafe {
                let output = values.product.add(first * values.lanes);
                let target = if divisor.is_some() { products.as_mut_ptr() } else { output };
                let left = values.left.wrapping_add(first * PAIRS);
                let part = PairProduct { rows, left, product: target, ..values };
                if divisor.is_some() {
                    self.multiplier.multiply(PairProduct { adds: false, ..part });
                }
                if let Some(last) = last {
                    copy_first_elements(&last.panel[first * PAIRS..], &mut panel[..rows], last.keys);
                    let (left, right) = (panel.as_ptr().cast(), last.weights.as_ptr());
                    self.multiplier.multiply(PairProduct { panels: 1, left, right, adds: true, ..part });
                }
                if let Some(divisor) = divisor {
                    add_times(&products[..rows * values.lanes], 1.0 / divisor, output);
                }
            }
        }
    }
}

/// Copies rows of a panel, with zeros for all but the first elements of each.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn copy_first_elements(panel: &[u32], rows: &mut [[u32; PAIRS]], elements: usize) {
    let mask = (1_u32 << elements) - 1;
    for (row, source) in rows.iter_mut().zip(panel.chunks_exact(PAIRS)) {
        // SAFETY: both have a whole vector.
        unsafe {
            let vector = _mm512_maskz_loadu_epi16(mask, source.as_ptr().cast());
            _mm512_storeu_si512(row.as_mut_ptr().cast(), vector);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn scale(scores: &mut [f32], factor: f32) {
    for score in scores {
        *score *= factor;
    }
}

/// Rows of the output times the correction of each lane, unless all corrections are 1.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn correct(output: &mut [f32], correction: &[f32]) {
    let lanes = correction.len();
    for lane in (0..lanes).step_by(LANES) {
        // SAFETY: the lanes are whole vectors, and so are the rows of the output.
        unsafe {
            let factor = _mm512_loadu_ps(correction.as_ptr().add(lane));
            if _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(factor, _mm512_set1_ps(1.0)) == 0 {
                continue;
            }
            for row in output.chunks_exact_mut(lanes) {
                let place = row.as_mut_ptr().add(lane);
                _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), factor));
            }
        }
    }
}

/// Adds `products` times `factor` to as many elements of the output.
///
/// # Safety
///
/// The output has as many elements, which are whole vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn add_times(products: &[f32], factor: f32, output: *mut f32) {
    for (index, products) in products.chunks_exact(LANES).enumerate() {
        // SAFETY: the caller vouches for the output.
        unsafe {
            let place = output.add(index * LANES);
            let sum =
                _mm512_fmadd_ps(_mm512_loadu_ps(products.as_ptr()), _mm512_set1_ps(factor), _mm512_loadu_ps(place));
            _mm512_storeu_ps(place, sum);
        }
    }
}
