//! The interleaved AMX pipeline against the same one step after the other, with tile registers in memory where the processor
//! has none.

use super::amx_fused::{self, FusedArgs, TileUnit};
use super::kernel::MAX_PANEL_LANES;
use super::pack::LANES;
use super::tests::Rows;
use super::{Bf16Kernel, PairMultiplier, PairProduct};
use crate::driver;
use crate::microkernel::prefetch::PrefetchPlan;
use crate::microkernel::{
    AccumulateArgs, FullBlocksArgs, FusedForward, LaneRows, MultiplyArgs, Operands, Products, Softmax, SoftmaxArgs,
    SoftmaxOutcome, padded,
};
use flashcore_problem::{Alignment, DType, Inputs, Mask, Outputs, Problem};
use std::cell::RefCell;

/// Tile registers in memory.
#[derive(Default)]
struct Registers(RefCell<[[[u32; LANES]; LANES]; 8]>);

impl TileUnit for Registers {
    fn zero<const TILE: usize>(&self) {
        self.0.borrow_mut()[TILE] = [[0; LANES]; LANES];
    }

    unsafe fn load<const TILE: usize>(&self, place: *const u8, stride: usize) {
        for (index, row) in self.0.borrow_mut()[TILE].iter_mut().enumerate() {
            // SAFETY: the caller vouches for the rows.
            *row = unsafe { place.add(index * stride).cast::<[u32; LANES]>().read_unaligned() };
        }
    }

    unsafe fn store<const TILE: usize>(&self, place: *mut u8, stride: usize) {
        for (index, row) in self.0.borrow()[TILE].iter().enumerate() {
            // SAFETY: the caller vouches for the rows.
            unsafe { place.add(index * stride).cast::<[u32; LANES]>().write_unaligned(*row) };
        }
    }

    fn multiply<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&self) {
        // Subnormal elements count as zero.
        let number = |bits: u32| Some(f32::from_bits(bits)).filter(|number| !number.is_subnormal()).unwrap_or(0.0);
        let halves = |pair: u32| [number(pair << 16), number(pair & 0xFFFF_0000)];
        let mut tiles = self.0.borrow_mut();
        let (left, right) = (tiles[LEFT], tiles[RIGHT]);
        for (sums, left) in tiles[SUM].iter_mut().zip(left) {
            for (&pair, right) in left.iter().zip(right) {
                for (sum, &other) in sums.iter_mut().zip(&right) {
                    let ([even, odd], [other_even, other_odd]) = (halves(pair), halves(other));
                    *sum = (f32::from_bits(*sum) + even * other_even + odd * other_odd).to_bits();
                }
            }
        }
    }
}

/// Products of vectors, with row panels as wide as any and the interleaved pipeline.
struct Interleaved(crate::bf16::avx512_bf16::DotProducts);

impl PairMultiplier for Interleaved {
    const PANEL_LANES: usize = MAX_PANEL_LANES;
    const TILE_ROWS: usize = 128;
    const IS_FUSED: bool = true;

    unsafe fn multiply(&self, product: PairProduct) {
        // SAFETY: the caller vouches for the operands.
        unsafe { self.0.multiply(product) }
    }

    unsafe fn attend_fused(&self, args: &FusedArgs) {
        // SAFETY: the caller vouches for the operands.
        unsafe { amx_fused::attend(&Registers::default(), args) }
    }
}

/// State of a row panel.
#[derive(Clone)]
struct State {
    row_max: Vec<f32>,
    row_sum: Vec<f32>,
    output: Vec<f32>,
}

/// Keys that a row panel attends.
struct Case {
    lanes: usize,
    head_dim: usize,
    value_dim: usize,
    keys: std::ops::Range<usize>,
    row_max: f32,
    factor: f32,
}

/// State before.
fn before(case: &Case) -> State {
    let before = if case.row_max == f32::NEG_INFINITY { 0.0 } else { 0.5 };
    let output = vec![before; padded(case.value_dim, LANES) * case.lanes];
    State { row_max: vec![case.row_max; case.lanes], row_sum: vec![before; case.lanes], output }
}

/// State after, and true if the kernel could do it, interleaved or a tile after the other.
fn attend_block<M: PairMultiplier>(kernel: &Bf16Kernel<M>, case: &Case, is_fused: bool) -> (State, bool) {
    let &Case { lanes, head_dim, value_dim, ref keys, factor, .. } = case;
    let query = Rows::scattered(lanes, head_dim, 1);
    let (key, value) = (Rows::scattered(keys.end, head_dim, 2), Rows::scattered(keys.end, value_dim, 3));
    let mut packed_query = vec![0; Bf16Kernel::<M>::right_size(head_dim)];
    kernel.pack_right(query.head(), 0..lanes, lanes, &mut packed_query);
    let key_size = Bf16Kernel::<M>::left_size(head_dim, M::TILE_ROWS);
    let value_size = Bf16Kernel::<M>::transposed_size(value_dim, M::TILE_ROWS);
    let tiles = keys.end.div_ceil(M::TILE_ROWS);
    let (mut packed_key, mut packed_value) = (vec![u32::MAX; tiles * key_size], vec![u32::MAX; tiles * value_size]);
    let tile_keys = |tile: usize| tile * M::TILE_ROWS..keys.end.min((tile + 1) * M::TILE_ROWS);
    for tile in 0..tiles {
        kernel.pack_left(key.head(), tile_keys(tile), &mut packed_key[tile * key_size..][..key_size]);
        kernel.pack_transposed(value.head(), tile_keys(tile), &mut packed_value[tile * value_size..][..value_size]);
    }
    let mut scores = vec![9.0; M::TILE_ROWS * M::PANEL_LANES];
    let mut weights = vec![7; Bf16Kernel::<M>::weight_size(M::TILE_ROWS)];
    let mut row_scale = vec![9.0; lanes];
    let mut state = before(case);
    if is_fused {
        let is_done = kernel.attend_full_blocks(FullBlocksArgs {
            head_dim,
            value_dim,
            lanes,
            keys: keys.clone(),
            key: &packed_key,
            value: &packed_value,
            query: &packed_query,
            factor,
            scores: &mut scores,
            weights: &mut weights,
            row_max: &mut state.row_max,
            row_sum: &mut state.row_sum,
            output: &mut state.output,
        });
        return (state, is_done);
    }
    for tile in 0..tiles {
        let first = tile * M::TILE_ROWS;
        let keys = keys.start.max(first) - first..tile_keys(tile).end - first;
        if keys.is_empty() {
            continue;
        }
        let lane_rows = LaneRows::new(|_| keys.len());
        let left = &packed_key[tile * key_size..][..key_size];
        let operands = Operands { depth: head_dim, rows: keys.clone(), left, right: &packed_query };
        kernel.multiply(MultiplyArgs { operands: &operands, lanes, lane_rows, factor: 1.0, product: &mut scores });
        let outcome = kernel.online_softmax(&mut SoftmaxArgs {
            lanes,
            rows: keys.len(),
            lane_rows,
            updates_row_max: false,
            factor,
            scores: &mut scores,
            weights: &mut weights,
            keeps_weights: false,
            row_max: &mut state.row_max,
            row_sum: &mut state.row_sum,
            row_scale: &mut row_scale,
        });
        assert_eq!(outcome, SoftmaxOutcome::Done);
        kernel.accumulate(AccumulateArgs {
            columns: value_dim,
            lanes,
            rows: keys,
            lane_rows,
            left: &packed_value[tile * value_size..][..value_size],
            weights: &scores,
            packed_weights: &weights,
            lane_scale: &row_scale,
            sums: &mut state.output,
            is_first: false,
            prefetch: PrefetchPlan::NOTHING,
        });
    }
    (state, true)
}

/// Both ways give the same means of values, where a row panel has so many lanes. Sums and outputs may be relative to
/// different row maxes.
fn check<M: PairMultiplier>(kernel: &Bf16Kernel<M>, case: &Case, is_expected: bool) {
    if case.lanes > M::PANEL_LANES {
        return;
    }
    let name = format!("{:?} {} {}", case.keys, case.head_dim, case.row_max);
    let (actual, is_fused) = attend_block(kernel, case, true);
    assert_eq!(is_fused, is_expected, "{name}");
    if !is_fused {
        return;
    }
    let (expected, _) = attend_block(kernel, case, false);
    for lane in 0..case.lanes {
        let scale = (actual.row_max[lane] - expected.row_max[lane]).exp2();
        let (sum, expected_sum) = (actual.row_sum[lane] * scale, expected.row_sum[lane]);
        assert!((sum - expected_sum).abs() <= 1e-2 * expected_sum, "{name}: {sum} instead of {expected_sum}");
        for column in 0..case.value_dim {
            let index = column * case.lanes + lane;
            let mean = actual.output[index] / actual.row_sum[lane];
            let expected_mean = expected.output[index] / expected.row_sum[lane];
            assert!((mean - expected_mean).abs() <= 2e-2, "{name} {lane} {column}: {mean} instead of {expected_mean}");
        }
    }
    if [&actual.row_max, &expected.row_max].iter().all(|row_max| row_max.iter().all(|&row_max| row_max == case.row_max))
    {
        for (actual, expected) in actual.output.iter().zip(&expected.output) {
            assert!((actual - expected).abs() <= 1e-5 * expected.abs().max(1e-5), "{name}: {actual}, {expected}");
        }
    }
}

#[test]
fn interleaved_is_one_step_after_the_other() {
    const NONE: f32 = f32::NEG_INFINITY;
    if !is_x86_feature_detected!("avx512vbmi") {
        return;
    }
    let case =
        |lanes, head_dim, value_dim, keys, row_max, factor| Case { lanes, head_dim, value_dim, keys, row_max, factor };
    let cases = [
        (case(64, 64, 64, 0..128, 20.0, 0.3), true),
        (case(64, 40, 64, 32..128, 20.0, 0.3), true),
        (case(32, 128, 128, 0..64, 18.0, 0.3), true),
        (case(32, 128, 128, 32..480, -90.0, 9.0), true),
        (case(32, 40, 48, 0..224, NONE, 0.3), true),
        (case(64, 7, 32, 64..96, 18.0, 0.3), true),
        (case(64, 100, 96, 0..96, 18.0, 0.3), true),
        (case(64, 64, 64, 96..480, 20.0, 0.3), true),
        (case(32, 64, 64, 128..320, NONE, 0.3), true),
        (case(64, 64, 80, 0..64, 20.0, 0.3), true),
        // The first keys of all.
        (case(64, 64, 64, 0..128, NONE, 0.3), true),
        (case(32, 64, 64, 0..32, NONE, 3.0), true),
        // The row max must be updated.
        (case(64, 64, 64, 0..128, -90.0, 0.3), true),
        (case(64, 64, 64, 32..416, -90.0, 9.0), true),
        (case(32, 64, 64, 0..416, NONE, 40.0), true),
        (case(64, 64, 64, 0..64, 15.0, 9.0), true),
        // No whole blocks.
        (case(64, 64, 64, 0..40, 20.0, 0.3), false),
        (case(48, 64, 64, 0..64, 20.0, 0.3), false),
        (case(16, 64, 64, 0..64, 20.0, 0.3), false),
    ];
    for (case, is_fused) in &cases {
        if let Some(level) = crate::bf16::avx512_bf16::detect() {
            let (multiplier, vectors) = (Interleaved(level.multiplier), level.vectors);
            check(&Bf16Kernel { multiplier, vectors, has_softmax16: true }, case, *is_fused);
        }
        if let Some(level) = crate::bf16::amx::detect() {
            check(&Bf16Kernel { has_softmax16: true, ..level }, case, *is_fused);
        }
    }
}

/// Problems of several tiles, and of more keys than are packed at once.
#[test]
fn interleaved_attention_is_attention() {
    let Some(level) = crate::bf16::avx512_bf16::detect().filter(|_| is_x86_feature_detected!("avx512vbmi")) else {
        return;
    };
    let kernel = Bf16Kernel { multiplier: Interleaved(level.multiplier), vectors: level.vectors, has_softmax16: true };
    let problem = |heads: usize, queries, keys, dim, mask| {
        let mut problem = Problem::new(1, heads, queries, dim, DType::Bf16);
        (problem.key_heads, problem.key_length, problem.mask) = (1, keys, mask);
        problem
    };
    let causal = Mask::Causal(Alignment::BottomRight);
    let window = Mask::Window { left: Some(150), right: Some(10), alignment: Alignment::BottomRight };
    for problem in [
        problem(1, 64, 200, 64, Mask::None),
        problem(3, 50, 2300, 32, Mask::None),
        problem(1, 300, 300, 64, causal),
        problem(2, 200, 2500, 40, causal),
        problem(1, 400, 500, 64, window),
    ] {
        let inputs = Inputs::random(&problem, 1);
        let run = |is_fused: bool| {
            let mut outputs = Outputs::poisoned(&problem);
            let (views, places) = (inputs.views(), outputs.views_mut());
            if is_fused {
                driver::attend(&kernel, &problem, &views, places);
            } else {
                driver::attend(kernel.exact(), &problem, &views, places);
            }
            outputs.output.dense(problem.output_shape(), problem.strides().output)
        };
        for (index, (actual, expected)) in run(true).into_iter().zip(run(false)).enumerate() {
            assert!((actual - expected).abs() <= 1e-2, "{problem}, {index}: {actual} instead of {expected}");
        }
    }
}
