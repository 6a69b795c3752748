//! QK-norm and rotary embedding of a row that some lanes of a warp hold.

use flashcore_ir::types::{F32, Pred, S32, U32, U64};
use flashcore_ir::{Builder, Compare, Reg, ShuffleMode};
use flashcore_problem::RotaryStyle;

use super::spec::{RotarySpec, RowShape};
use crate::primitives::{VectorBits, VectorType};

/// One item of a row: two vectors, where they begin, and which of them are there.
pub(crate) struct Item {
    /// First column of each vector.
    pub(crate) columns: [Reg<U32>; 2],
    /// True if the vector is there; `None` where it always is. One that is not is another that is.
    pub(crate) exists: [Option<Reg<Pred>>; 2],
    /// True if the vectors are rotated; `None` where all items are.
    rotated: Option<Reg<Pred>>,
    /// Index of the item among those that are rotated, or of the last of those.
    rotated_index: Reg<U32>,
}

impl Item {
    /// The item of a lane in one step over the row.
    pub(crate) fn new(k: &mut Builder, shape: RowShape, lane_in_row: Reg<U32>, step: u32) -> Self {
        let RowShape { items, lanes, rotated_items, .. } = shape;
        let width = shape.vector.elements;
        let mut item = if step == 0 { lane_in_row } else { k.add(lane_in_row, step * lanes) };
        let mut exists = None;
        if (step + 1) * lanes > items {
            exists = Some(k.compare(Compare::Lt, item, items));
            item = k.min(item, items - 1);
        }
        // Pairs of adjacent vectors.
        let adjacent = k.mul(item, 2 * width);
        let mut first = adjacent;
        let mut distance = None;
        let rotated = (rotated_items < items).then(|| k.compare(Compare::Lt, item, rotated_items));
        if let Some(RotarySpec { style: RotaryStyle::Neox, dim, .. }) = shape.rotary {
            let in_half = k.mul(item, width);
            first = match rotated {
                Some(rotated) => k.select(rotated, in_half, adjacent),
                None => in_half,
            };
            distance = Some(match rotated {
                Some(rotated) => k.select(rotated, dim / 2, width),
                None => k.copy(dim / 2),
            });
        }
        let mut second = match distance {
            Some(distance) => k.add(first, distance),
            None => k.add(first, width),
        };
        let mut second_exists = exists;
        if shape.ends_with_half() {
            let is_whole = k.compare(Compare::Lt, second, shape.columns);
            second = k.select(is_whole, second, first);
            second_exists = Some(match exists {
                Some(exists) => k.and(exists, is_whole),
                None => is_whole,
            });
        }
        let rotated_index = match rotated {
            Some(_) => k.min(item, rotated_items.saturating_sub(1)),
            None => item,
        };
        Self { columns: [first, second], exists: [exists, second_exists], rotated, rotated_index }
    }
}

/// Weights and constants of a norm.
pub(super) struct Norm {
    /// Address of the weights.
    pub(super) weights: Reg<U64>,
    /// Added to the mean square.
    pub(super) eps: Reg<F32>,
}

/// Normalizes a row: every lane of the warp takes part, and the lanes of a row share its sum.
pub(super) fn normalize(
    k: &mut Builder,
    shape: RowShape,
    norm: &Norm,
    items: &[Item],
    values: &mut [[Vec<Reg<F32>>; 2]],
) {
    let sum = k.copy(0.0f32);
    for (item, vectors) in items.iter().zip(values.iter()) {
        for (vector, exists) in vectors.iter().zip(item.exists) {
            let of_vector = k.copy(0.0f32);
            for &element in vector {
                k.fma_to(of_vector, element, element);
            }
            let counted = match exists {
                Some(exists) => k.select(exists, of_vector, 0.0f32),
                None => of_vector,
            };
            k.add_to(sum, counted);
        }
    }
    let mut distance = shape.lanes / 2;
    while distance > 0 {
        let other = k.shuffle(ShuffleMode::Butterfly, sum, distance);
        k.add_to(sum, other);
        distance /= 2;
    }
    let mean = k.div(sum, shape.columns as f32);
    let with_eps = k.add(mean, norm.eps);
    let scale = k.reciprocal_sqrt(with_eps);
    for (item, vectors) in items.iter().zip(values) {
        for (vector, column) in vectors.iter_mut().zip(item.columns) {
            let address = k.mad_wide(column, shape.vector.dtype.size_bytes() as u32, norm.weights);
            let weights = shape.vector.load(k, address);
            let weights = shape.vector.widen(k, &weights);
            for (element, weight) in vector.iter_mut().zip(weights) {
                let scaled = k.mul(*element, scale);
                *element = k.mul(scaled, weight);
            }
        }
    }
}

/// The tables of a rotary embedding, at the position of a token.
pub(crate) struct TableRow {
    vector: VectorType,
    cos: Reg<U64>,
    sin: Reg<U64>,
}

/// Parameters of the tables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tables {
    pub(crate) cos: Reg<U64>,
    pub(crate) sin: Reg<U64>,
    /// Bytes from one row to the next.
    pub(crate) stride: Reg<U64>,
}

impl TableRow {
    /// The rows for a position that is in the tables.
    pub(crate) fn new(
        k: &mut Builder,
        shape: RowShape,
        rotary: RotarySpec,
        tables: Tables,
        position: Reg<S32>,
    ) -> Self {
        let position = k.reinterpret::<S32, U32>(position);
        let position = k.widen(position);
        let [cos, sin] = [tables.cos, tables.sin].map(|table| k.mad(position, tables.stride, table));
        let access_bytes = rotary.table_vec * rotary.table_dtype.size_bytes() as u32;
        let vector = VectorType { access_bytes, ..VectorType::new(rotary.table_dtype, shape.vector.elements) };
        Self { vector, cos, sin }
    }

    /// Loads cosines and sines of an item.
    pub(crate) fn load(&self, k: &mut Builder, item: &Item) -> [VectorBits; 2] {
        [self.cos, self.sin].map(|table| {
            let address = k.mad_wide(item.rotated_index, self.vector.bytes(), table);
            self.vector.load(k, address)
        })
    }

    /// Rotates the pairs of an item.
    pub(crate) fn rotate(&self, k: &mut Builder, style: RotaryStyle, item: &Item, values: &mut [Vec<Reg<F32>>; 2]) {
        let [cos, sin] = [self.cos, self.sin].map(|table| {
            let address = k.mad_wide(item.rotated_index, self.vector.bytes(), table);
            let bits = self.vector.load(k, address);
            self.vector.widen(k, &bits)
        });
        self.rotate_by(k, style, item, values, [&cos, &sin]);
    }

    /// Rotates the pairs of an item by cosines and sines that were loaded before.
    pub(crate) fn rotate_loaded(
        &self,
        k: &mut Builder,
        style: RotaryStyle,
        item: &Item,
        values: &mut [Vec<Reg<F32>>; 2],
        loaded: &[VectorBits; 2],
    ) {
        let [cos, sin] = [&loaded[0], &loaded[1]].map(|bits| self.vector.widen(k, bits));
        self.rotate_by(k, style, item, values, [&cos, &sin]);
    }

    fn rotate_by(
        &self,
        k: &mut Builder,
        style: RotaryStyle,
        item: &Item,
        values: &mut [Vec<Reg<F32>>; 2],
        [cos, sin]: [&[Reg<F32>]; 2],
    ) {
        let width = self.vector.elements as usize;
        let place = |pair: usize| match style {
            RotaryStyle::Neox => [(0, pair), (1, pair)],
            // Adjacent columns of the two vectors, one after the other.
            RotaryStyle::GptJ => [2 * pair, 2 * pair + 1].map(|column| (column / width, column % width)),
        };
        for pair in 0..width {
            let [first, second] = place(pair);
            let (x, y, cos, sin) = (values[first.0][first.1], values[second.0][second.1], cos[pair], sin[pair]);
            let y_sin = k.mul(y, sin);
            let y_sin = k.neg(y_sin);
            let new_x = k.fma(x, cos, y_sin);
            let x_sin = k.mul(x, sin);
            let new_y = k.fma(y, cos, x_sin);
            for ((vector, element), rotated, old) in [(first, new_x, x), (second, new_y, y)] {
                values[vector][element] = match item.rotated {
                    Some(is_rotated) => k.select(is_rotated, rotated, old),
                    None => rotated,
                };
            }
        }
    }
}
