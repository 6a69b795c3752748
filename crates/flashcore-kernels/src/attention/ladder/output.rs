//! Output of the ladder kernel: in registers, multiplied by the lanes or by tensor cores.

use flashcore_ir::types::{F32, Pred, U32};
use flashcore_ir::{Builder, Compare, GlobalAddress, Major, Reg, SharedAddress};

use super::{ROWS, Tiles, WORD_BYTES, WORDS_AT_ONCE, Warp};
use crate::attention::TileContext;
use crate::element::Element;
use crate::primitives::{Accumulation, Accumulator, GlobalRows, LANES, OperandA, ROW_STEP, SharedTile};

/// Columns of the output that a warp has at a time, two for each lane.
const COLUMNS_AT_ONCE: u32 = 2 * LANES;

/// The output of a warp's rows, in registers.
pub(super) enum Output {
    Scalar(ScalarOutput),
    Tensor(Accumulator),
}

/// Two columns of all 16 rows for each lane, in each 64 columns.
pub(super) struct ScalarOutput {
    /// By 64 columns: their position, then the registers by row.
    column_groups: Vec<(LaneColumns, Vec<[Reg<F32>; 2]>)>,
}

/// Two neighbouring columns of a lane.
struct LaneColumns {
    column: Reg<U32>,
    /// Their chunk within its panel, and what is added to its address.
    chunk: Reg<U32>,
    within: Reg<U32>,
}

impl ScalarOutput {
    pub(super) fn zero(k: &mut Builder, warp: &Warp, values: SharedTile) -> Self {
        let column_groups = (0..values.columns.div_ceil(COLUMNS_AT_ONCE)).map(|group| {
            let column = k.mad(warp.lane, 2u32, group * COLUMNS_AT_ONCE);
            // Lanes past the last columns have those of the last, and store nothing.
            let inside = k.min(column, values.columns - 2);
            let (panel, in_panel) = (k.div(inside, values.panel_columns()), k.rem(inside, values.panel_columns()));
            let per_chunk = values.element.chunk_elements();
            let (chunk, in_chunk) = (k.div(in_panel, per_chunk), k.rem(in_panel, per_chunk));
            let within = k.mul(in_chunk, values.element.bytes);
            let within = k.mad(panel, values.panel_step(1), within);
            let rows = (0..ROWS).map(|_| [k.copy(0.0f32), k.copy(0.0f32)]).collect();
            (LaneColumns { column, chunk, within }, rows)
        });
        Self { column_groups: column_groups.collect() }
    }

    fn multiply_add<T: Element>(&self, k: &mut Builder, tiles: &Tiles, warp: &Warp, stage: Reg<U32>) {
        let value = tiles.kv.value;
        let base = k.add(warp.shared_base, stage);
        let row = k.copy(0u32);
        let weights = tiles.score_row(k, warp, row);
        k.for_uniform(0u32, tiles.tile_n, WORDS_AT_ONCE, |k, first_key| {
            let weights = k.mad(first_key, WORD_BYTES, weights);
            let weights: Vec<_> = (0..ROWS)
                .map(|row| {
                    let offset = row * tiles.score_words * WORD_BYTES;
                    k.load_shared::<F32>(SharedAddress::from(weights).plus(offset as i32), WORDS_AT_ONCE)
                })
                .collect();
            for next in 0..WORDS_AT_ONCE {
                let key = k.add(first_key, next);
                for (columns, rows) in &self.column_groups {
                    let chunk = value.chunk_address(k, base, key, columns.chunk);
                    let address = k.add(chunk, columns.within);
                    let pair = k.load_shared::<T>(address, 1)[0];
                    let values = T::widen(k, pair);
                    for (row, weights) in rows.iter().zip(&weights) {
                        for (result, value) in row.iter().zip(values) {
                            k.fma_to(*result, weights[next as usize], value);
                        }
                    }
                }
            }
        });
    }
}

impl Output {
    /// Multiplies all rows by their row scale.
    fn scale(&self, k: &mut Builder, tiles: &Tiles, warp: &Warp) {
        let factors = tiles.factors_of_warp(k, warp);
        match self {
            Self::Scalar(output) => {
                for row in 0..ROWS {
                    let offset = (row * WORD_BYTES) as i32;
                    let factor = k.load_shared::<F32>(SharedAddress::from(factors).plus(offset), 1)[0];
                    for (_, rows) in &output.column_groups {
                        rows[row as usize].iter().for_each(|result| k.mul_to(*result, factor));
                    }
                }
            }
            Self::Tensor(output) => {
                let first = k.mad(warp.position.group, WORD_BYTES, factors);
                let factors: Vec<_> = [0, ROW_STEP]
                    .into_iter()
                    .map(|row| {
                        let offset = (row * WORD_BYTES) as i32;
                        k.load_shared::<F32>(SharedAddress::from(first).plus(offset), 1)[0]
                    })
                    .collect();
                output.scale_rows(k, &factors);
            }
        }
    }

    /// Rescales the rows to the new row max, and adds PV.
    pub(super) fn multiply_add<T: Element>(&self, k: &mut Builder, tiles: &Tiles, warp: &Warp, stage: Reg<U32>) {
        k.section("rescale", |k| self.scale(k, tiles, warp));
        match self {
            Self::Scalar(output) => output.multiply_add::<T>(k, tiles, warp, stage),
            Self::Tensor(output) => {
                let (weights, value) = (tiles.weights, tiles.kv.value);
                let (weight_base, value_base) = (warp.base_of_rows(k, weights), k.add(warp.shared_base, stage));
                let left = weights.operand_a(k, weight_base, warp.lane, Major::Depth);
                let right = value.operand_b(k, value_base, warp.lane, Major::Outer);
                let left = OperandA::<T>::Shared(vec![left], tiles.tile_n);
                output.multiply(k, &left, right, Accumulation::F32);
            }
        }
    }

    /// Divides the rows by their sums and stores them, two columns at a time.
    pub(super) fn store<T: Element>(&self, k: &mut Builder, context: &TileContext, tiles: &Tiles, warp: &Warp) {
        self.scale(k, tiles, warp);
        let rows = context.output(k);
        match self {
            Self::Scalar(output) => {
                for (columns, results) in &output.column_groups {
                    let there = k.compare(Compare::Lt, columns.column, rows.columns);
                    for (row, pair) in (0..).zip(results) {
                        let row = k.add(warp.first_row, row);
                        store_pair::<T>(k, context, rows, (row, columns.column), *pair, Some(there));
                    }
                }
            }
            Self::Tensor(output) => {
                let column = k.mul(warp.position.member, 2u32);
                each_pair(output, |row, further, pair| {
                    if further < rows.columns {
                        let row = k.eval(warp.first_row + (warp.position.group + row * ROW_STEP));
                        let column = k.add(column, further);
                        store_pair::<T>(k, context, rows, (row, column), pair, None);
                    }
                });
            }
        }
    }
}

/// Stores two neighbouring elements, by their row in the tile and their column, where they exist.
fn store_pair<T: Element>(
    k: &mut Builder,
    context: &TileContext,
    rows: GlobalRows,
    (row, column): (Reg<U32>, Reg<U32>),
    pair: [Reg<F32>; 2],
    there: Option<Reg<Pred>>,
) {
    let start = rows.row(k, row);
    let to = GlobalAddress::from(k.mad_wide(column, T::LAYOUT.bytes, start));
    let exists = k.eval((context.first_row + row).lt(context.end_row));
    let exists = match there {
        Some(there) => k.and(exists, there),
        None => exists,
    };
    let rounded = k.pair::<T>(pair[0], pair[1]);
    if rows.vec_bytes > T::LAYOUT.bytes {
        k.when(exists, |k| k.store_one(to, rounded));
    } else {
        let (low, high) = k.unpack(rounded);
        k.when(exists, |k| {
            k.store_one(to, low);
            k.store_one(to.plus(T::LAYOUT.bytes as i32), high);
        });
    }
}

/// Visits two neighbouring elements at a time: the index of their row among the lane's two, and the column of the first, less
/// twice the lane's member.
pub(super) fn each_pair(accumulator: &Accumulator, mut visit: impl FnMut(u32, u32, [Reg<F32>; 2])) {
    let mut left = None;
    accumulator.each(|row, column, element| match left.take() {
        None => left = Some(element),
        Some(first) => visit(row as u32, column - 1, [first, element]),
    });
}
