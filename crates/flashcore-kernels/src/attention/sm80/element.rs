//! Elements of the Ampere kernel: pairs of 16-bit floats, and `f32` as `tf32`.
//!
//! The mainloop and the epilogue are the same for all; here is what is not: fragments, products, and the way of the output
//! through shared memory.

use flashcore_ir::types::{F32, Tf32, U32};
use flashcore_ir::{Builder, Reg, SharedAddress};

use super::{Tiles, Warp};
use crate::config::{AmpereConfig, QueryPlace};
use crate::element::{Element, ElementLayout};
use crate::primitives::{
    Accumulator, LaneRows, LeftFragments, LeftOperand, MMA_M, MMA_N, ROW_STEP, RightFragments, SharedTile, Tf32Query,
    TileAddresses, ValueWords, multiply_scores, multiply_values,
};
use flashcore_problem::DType;

/// An element type of the Ampere kernel.
pub(crate) trait TensorElement: Sized + 'static {
    /// Its layout in memory.
    const LAYOUT: ElementLayout;
    /// The query between products.
    type Query;
    /// Addresses of a lane in the tile of values.
    type Values: Copy;

    /// The query of a warp: `columns` columns of each 16 rows.
    fn query(k: &mut Builder, config: AmpereConfig, m_tiles: Vec<TileAddresses>, columns: u32) -> Self::Query;

    /// The addresses of a lane in stage 0 of the values.
    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values;

    /// Adds the products of query and keys to the scores.
    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &Self::Query,
        keys: TileAddresses,
    );

    /// Adds the products of weights and values to the output.
    fn multiply_values(
        k: &mut Builder,
        config: AmpereConfig,
        output: &Accumulator,
        weights: &Accumulator,
        values: Self::Values,
        stage: Reg<U32>,
    );

    /// Writes the warp's rows of the output to the shared-memory tile of the query.
    fn stage_output(k: &mut Builder, warp: &Warp, tiles: &Tiles, output: &Accumulator);

    /// Columns beside each other as they are in memory.
    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>>;
}

impl<T: Element> TensorElement for T {
    const LAYOUT: ElementLayout = T::LAYOUT;
    type Query = LeftOperand<'static, T>;
    type Values = TileAddresses;

    fn query(k: &mut Builder, config: AmpereConfig, m_tiles: Vec<TileAddresses>, columns: u32) -> Self::Query {
        match config.query {
            QueryPlace::Registers => LeftOperand::Registers(LeftFragments::<T>::load(k, &m_tiles, columns)),
            QueryPlace::Shared => LeftOperand::Shared(m_tiles, columns),
        }
    }

    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values {
        tile.addresses(k, base, lane, LaneRows::DownFirst)
    }

    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &Self::Query,
        keys: TileAddresses,
    ) {
        scores.multiply_add(k, query, RightFragments::Transposed(keys), config.accumulation);
    }

    fn multiply_values(
        k: &mut Builder,
        config: AmpereConfig,
        output: &Accumulator,
        weights: &Accumulator,
        values: Self::Values,
        stage: Reg<U32>,
    ) {
        let weights = LeftOperand::<T>::Accumulator(weights);
        let values = RightFragments::Straight(values.in_stage(k, stage));
        output.multiply_add(k, &weights, values, config.accumulation);
    }

    fn stage_output(k: &mut Builder, warp: &Warp, tiles: &Tiles, output: &Accumulator) {
        let tile = tiles.query;
        let row = k.add(warp.first_row, warp.position.group);
        let within_chunk = k.mul(warp.position.member, 2 * <T as Element>::LAYOUT.bytes);
        // A fragment's columns, in 16-bit pairs, are a chunk.
        for column in (0..columns(output)).step_by(MMA_N as usize) {
            let (panel, chunk) = (column / tile.panel_columns(), column % tile.panel_columns() / MMA_N);
            let chunk = k.copy(chunk);
            let chunk_address = tile.chunk_address(k, warp.shared_base, row, chunk);
            let address = k.add(chunk_address, within_chunk);
            stage_columns(k, tile, (address, panel), output, column, |k, to, pair| {
                let rounded = k.pair::<T>(pair[0], pair[1]);
                k.store_shared(to, &[rounded]);
            });
        }
    }

    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>> {
        let pairs = columns.chunks_exact(2).map(|pair| {
            let pair = k.pair::<T>(pair[0], pair[1]);
            k.reinterpret::<T, U32>(pair)
        });
        pairs.collect()
    }
}

/// `f32`, multiplied as `tf32`.
impl TensorElement for Tf32 {
    const LAYOUT: ElementLayout = ElementLayout::of(DType::F32);
    type Query = Tf32Query;
    type Values = ValueWords;

    fn query(k: &mut Builder, config: AmpereConfig, m_tiles: Vec<TileAddresses>, columns: u32) -> Self::Query {
        match config.query {
            QueryPlace::Registers => Tf32Query::load(k, &m_tiles, columns),
            QueryPlace::Shared => Tf32Query::Shared(m_tiles, columns),
        }
    }

    fn values(k: &mut Builder, tile: SharedTile, base: Reg<U32>, lane: Reg<U32>) -> Self::Values {
        ValueWords::new(k, tile, base, lane)
    }

    fn multiply_scores(
        k: &mut Builder,
        config: AmpereConfig,
        scores: &Accumulator,
        query: &Self::Query,
        keys: TileAddresses,
    ) {
        multiply_scores(k, config.tf32_products(), scores, query, keys);
    }

    fn multiply_values(
        k: &mut Builder,
        config: AmpereConfig,
        output: &Accumulator,
        weights: &Accumulator,
        values: Self::Values,
        stage: Reg<U32>,
    ) {
        let values = values.in_stage(k, stage);
        multiply_values(k, config.tf32_products(), output, weights, values);
    }

    fn stage_output(k: &mut Builder, warp: &Warp, tiles: &Tiles, output: &Accumulator) {
        let tile = tiles.query;
        let row = k.add(warp.first_row, warp.position.group);
        // A lane's two columns are half a chunk; a fragment's are two chunks.
        let lane_chunk = k.shr(warp.position.member, 1u32);
        let half = k.and(warp.position.member, 1u32);
        for column in (0..columns(output)).step_by(MMA_N as usize) {
            let panel = column / tile.panel_columns();
            let chunk = k.add(lane_chunk, column % tile.panel_columns() / tile.element.chunk_elements());
            let chunk_address = tile.chunk_address(k, warp.shared_base, row, chunk);
            let address = k.mad(half, 2 * tile.element.bytes, chunk_address);
            stage_columns(k, tile, (address, panel), output, column, |k, to, pair| k.store_shared(to, pair));
        }
    }

    fn words(k: &mut Builder, columns: &[Reg<F32>]) -> Vec<Reg<U32>> {
        columns.iter().map(|column| k.reinterpret::<F32, U32>(*column)).collect()
    }
}

/// Columns of the output, padded.
fn columns(output: &Accumulator) -> u32 {
    output.m_tiles.first().map_or(0, Vec::len) as u32 * MMA_N
}

/// Stores the lane's pairs of columns of one fragment in each of its rows; `address` is that of the first row in panel 0.
fn stage_columns(
    k: &mut Builder,
    tile: SharedTile,
    (address, panel): (Reg<U32>, u32),
    output: &Accumulator,
    column: u32,
    mut store: impl FnMut(&mut Builder, SharedAddress, &[Reg<F32>]),
) {
    for (m_tile, fragments) in output.m_tiles.iter().enumerate() {
        for (half, pair) in fragments[(column / MMA_N) as usize].chunks_exact(2).enumerate() {
            let rows_below = m_tile as u32 * MMA_M + half as u32 * ROW_STEP;
            let below = rows_below * tile.row_bytes() + tile.panel_step(panel);
            store(k, SharedAddress::from(address).plus(below as i32), pair);
        }
    }
}
