//! Mainloop of the Ampere kernel: the KV blocks of a tile, by the warps that multiply.

use flashcore_ir::types::{F32, S32, U32};
use flashcore_ir::{Builder, Compare, Major, Reg};

use super::append::FusedRows;
use super::element::{BlockOperands, TensorElement};
use super::kv_pipeline::{KvPipeline, KvTiles};
use super::scales::KvScales;
use super::scales_fp8::RowScales;
use super::{Split, Tiles, Warp, epilogue};
use crate::attention::TileContext;
use crate::attention::kv_range::KvRange;
use crate::attention::kv_source::KvSource;
use crate::attention::scoring::Scoring;
use crate::attention::split_kv::merge::SplitExchange;
use crate::config::AmpereConfig;
use crate::element::ElementLayout;
use crate::primitives::{
    Accumulator, E4M3_WEIGHT_EXPONENT, GlobalRows, KeyMask, LANES, OnlineSoftmax, OperandA, ScorePositions,
    SharedOperand, TileCopy,
};

/// Computes a tile of query rows over a KV range, and stores it.
pub(super) fn run<T: TensorElement>(
    k: &mut Builder,
    config: AmpereConfig,
    context: &TileContext,
    warp: &Warp,
    tiles: &Tiles,
    range: &KvRange,
    splits: Option<Split>,
) {
    let append = FusedRows::new(k, config, context, warp, tiles, range, splits);
    let rotates_query = append.as_ref().is_some_and(FusedRows::rotates_query);
    let (query_copy, pipeline, scales) = k.section("copies", |k| {
        let query = context.query(k);
        let source = KvSource::new(k, context);
        let query = GlobalRows { vec_bytes: query.vec_bytes.min(config.load_bytes), ..query };
        let query_copy = (!rotates_query)
            .then(|| TileCopy::new(k, tiles.query, query, warp.shared_base, warp.thread, config.warps * LANES));
        let pipeline =
            KvPipeline::new(k, config.kv_pipeline(), &tiles.kv, range, source, warp.shared_base, warp.thread);
        let scales = KvScales::new(k, config, &tiles.kv, source.scales, warp, range);
        (query_copy, pipeline, scales)
    });
    let scaled_context = scales.scaled_context(k, context);
    let context = &scaled_context;
    let operands = k.section("copies", |k| Operands::<T>::new(k, config, &tiles.kv, warp));
    if let Some(query_copy) = query_copy {
        k.section("load query", |k| {
            let rows_left = k.sub(context.end_row, context.first_row);
            query_copy.start(k, None, rows_left);
            k.copy_async_commit();
        });
    }
    // Loads of new rows are on their way while the copies of the first blocks are started.
    let loaded = append.as_ref().map(|append| append.load(k));
    pipeline.prefetch(k, range);
    if let (Some(append), Some(loaded)) = (&append, loaded) {
        append.store(k, loaded);
    }
    let query = k.section("query fragments", |k| {
        if !rotates_query {
            k.copy_async_wait(pipeline.prefetched_groups());
        }
        warp.sync_consumers(k);
        let columns = T::QUERY_LAYOUT.padded_columns(context.specialization.head_dim);
        tiles.query_of_warp::<T>(k, config, warp, columns)
    });
    let mainloop = Mainloop::new(k, config, context, warp, (operands, scales));
    k.for_uniform(range.begin, range.end, config.tile_n as i32, |k, block_key| {
        pipeline.consumer_wait(k, range);
        if let Some(append) = &append {
            append.fill_block(k, pipeline.read_stage(), block_key);
        }
        mainloop.block(k, &query, pipeline.read_stage(), range, block_key);
        pipeline.consumer_release(k, range, block_key);
    });

    let Mainloop { softmax, output, scales, .. } = &mainloop;
    if context.specialization.has_fp8_query() {
        scales.finish_e4m3(k, softmax, output);
        // Rows of the output lie where other warps read rows of the query.
        if config.kv_split_warps == 1 {
            k.section("release query", |k| warp.sync_consumers(k));
        }
    } else {
        scales.scale_output(k, output);
    }
    let store = |k: &mut Builder| {
        k.section("epilogue", |k| epilogue::store::<T>(k, context, warp, tiles, splits, softmax, &T::output(output)));
    };
    let merge = match splits {
        Some(Split::Cluster { merge, .. }) => Some(merge),
        _ => None,
    };
    if config.kv_split_warps > 1 {
        k.section("reduce splits", |k| reduce_splits(k, config, tiles, warp, softmax, output));
        // The warps of the first split have the sums of all keys.
        let has_all = k.compare(Compare::Eq, warp.split, 0u32);
        k.if_uniform(has_all, store);
    } else {
        store(k);
    }
    if let Some(merge) = merge {
        k.section("merge in cluster", |k| merge.merge::<T>(k, context, (warp.thread, config.warps * LANES)));
    }
}

/// The registers of a warp in the loop over KV blocks.
struct Mainloop<'a, T: TensorElement> {
    config: AmpereConfig,
    context: &'a TileContext,
    warp: &'a Warp,
    operands: Operands<T>,
    scales: KvScales,
    /// Scales of query rows of 8 bits that are not folded into the softmax scale.
    row_factors: Option<Vec<Reg<F32>>>,
    scoring: Scoring,
    mask: KeyMask,
    softmax: OnlineSoftmax,
    scores: Accumulator,
    output: Accumulator,
}

impl<'a, T: TensorElement> Mainloop<'a, T> {
    fn new(
        k: &mut Builder,
        config: AmpereConfig,
        context: &'a TileContext,
        warp: &'a Warp,
        (operands, scales): (Operands<T>, KvScales),
    ) -> Self {
        let value_columns =
            ElementLayout::of(context.specialization.output_dtype()).padded_columns(context.specialization.value_dim);
        let output = k.section("output", |k| Accumulator::zero(k, warp.m_tiles, value_columns));
        let positions = k.section("rows", |k| score_positions(k, context, warp));
        let scoring = Scoring::new(k, context, positions);
        let scale = scoring.softmax_scale(context);
        let softmax = k
            .section("softmax", |k| OnlineSoftmax::new(k, 2 * warp.m_tiles, scale, config.rescale, config.exponential));
        let (softmax, row_factors) = if context.specialization.has_fp8_query() {
            let scales = k.section("scales", |k| RowScales::new(k, context, &scoring.positions, scale));
            (softmax.with_weight_exponent(E4M3_WEIGHT_EXPONENT, scales.softmax), scales.of_scores)
        } else {
            (softmax, None)
        };
        let mask = k.section("rows", |k| key_mask(k, context, warp, &scoring.positions));
        let scores = k.section("scores", |k| Accumulator::zero(k, warp.m_tiles, config.keys_per_warp()));
        Self { config, context, warp, operands, scales, row_factors, scoring, mask, softmax, scores, output }
    }

    /// One KV block, which begins at `block_key`.
    fn block(
        &self,
        k: &mut Builder,
        query: &OperandA<'_, T::Fragment>,
        read_stage: Reg<U32>,
        range: &KvRange,
        block_key: Reg<S32>,
    ) {
        let Self { config, scores, scoring, output, .. } = self;
        let keys_per_warp = config.keys_per_warp();
        let first_key = self.warp.first_key(k, *config, block_key);
        k.section("scores", |k| {
            scores.clear(k);
            let keys = self.operands.keys.in_stage(k, read_stage);
            T::multiply_scores(k, *config, scores, query, keys);
        });
        if let Some(factors) = &self.row_factors {
            k.section("row scales", |k| scores.scale_rows(k, factors));
        }
        self.scales.scale_scores(k, scores, read_stage);
        scoring.apply_terms(k, self.context, scores, first_key, (config.tile_m(), keys_per_warp));
        k.section("mask", |k| {
            let is_partial = range.is_partial(k, first_key);
            k.if_uniform(is_partial, |k| {
                let mask_mod = scoring.mask_mod.as_ref().map(|mask_mod| {
                    let key = k.add(first_key, scoring.positions.column);
                    mask_mod.read_block(k, scores, key)
                });
                self.mask.apply_with(k, scores, first_key, keys_per_warp, mask_mod);
            });
        });
        let operands = BlockOperands {
            config: *config,
            softmax: &self.softmax,
            scales: &self.scales,
            scores,
            output,
            values: self.operands.values,
            stage: read_stage,
        };
        T::multiply_values(k, &operands);
    }
}

/// A warp's keys and values, in stage 0.
struct Operands<T: TensorElement> {
    keys: SharedOperand,
    values: T::Values,
}

impl<T: TensorElement> Operands<T> {
    fn new(k: &mut Builder, config: AmpereConfig, tiles: &KvTiles, warp: &Warp) -> Self {
        let KvTiles { key, value, .. } = *tiles;
        let [key_base, value_base] = [key, value].map(|tile| warp.split_base(k, config, tile));
        Self {
            keys: key.operand_b(k, key_base, warp.lane, Major::Depth),
            values: T::values(k, value, value_base, warp.lane),
        }
    }
}

/// Reduces the splits of the warps that have the same rows, through the memory of keys and values: of one stage, or of the
/// first on.
fn reduce_splits(
    k: &mut Builder,
    config: AmpereConfig,
    tiles: &Tiles,
    warp: &Warp,
    softmax: &OnlineSoftmax,
    output: &Accumulator,
) {
    let (row_warps, bytes) = (config.row_warps(), softmax.partial_bytes(output));
    let lane = k.eval(warp.lane.mul_add(4, warp.shared_base + tiles.kv.key.offset));
    let address = k.eval((warp.first_row / config.rows_per_warp).mul_add(bytes, lane));
    let exchange = SplitExchange { address, stride: row_warps * bytes };
    // Nobody reads keys and values any more.
    warp.sync_consumers(k);
    let splits = (warp.split, config.kv_split_warps);
    exchange.reduce_splits(k, splits, softmax, output, |k| warp.sync_consumers(k));
}

/// The positions of a lane's scores.
fn score_positions(k: &mut Builder, context: &TileContext, warp: &Warp) -> ScorePositions {
    context.score_positions(k, warp.position.member, |k, last_row| {
        let rows: Vec<_> = (0..2 * warp.m_tiles).map(|index| warp.row(k, context, index)).collect();
        let position = context.position(k, rows[0]);
        (rows.into_iter().map(|row| k.min(row, last_row)).collect(), position)
    })
}

/// The key mask of a lane's rows.
fn key_mask(k: &mut Builder, context: &TileContext, warp: &Warp, positions: &ScorePositions) -> KeyMask {
    let has_window = context.specialization.left || context.specialization.right;
    // Packed rows of several heads are not as far apart as they are in the tile.
    let others = if context.packed.is_some() && has_window { 1..positions.rows.len() as u32 } else { 1..1 };
    let others = others.map(|index| {
        let row = warp.row(k, context, index);
        context.position(k, row)
    });
    context.key_mask(positions, others.collect())
}
