//! Tensor maps: query, key, value and output as TMA sees them.

use flashcore_ir::{Swizzle, TensorElement, TensorMap};
use flashcore_problem::{DType, Operand, Problem, Shape, Strides};

use crate::config::HopperConfig;
use crate::family::Family;
use crate::primitives::{MMA_M, SwizzledTile};
use crate::specialization::Specialization;

/// The tensor maps of the Hopper kernel, in the order of its parameters. Their addresses come with each launch.
pub(crate) fn tensor_maps(problem: &Problem, config: HopperConfig) -> impl Iterator<Item = (Operand, TensorMap)> {
    let specialization = config.specialize(Specialization::of(problem), problem);
    let strides = problem.strides();
    let [query, key, value] = config.tiles(specialization);
    let map = |operand: Operand, strides, shape: Shape, tile| {
        // Where there are no keys nothing is copied, but a map must be of something: the query.
        let (operand, rows) = if shape.rows == 0 { (Operand::Query, 1) } else { (operand, shape.rows) };
        let dtype = operand.dtype(problem).unwrap_or(problem.dtype);
        (operand, tensor_map(dtype, strides, Shape { rows, ..shape }, tile))
    };
    // Rows past the last that anyone attends are out of bounds, which TMA fills with zeros. Those of sequences lie anywhere.
    let keys =
        if problem.is_ragged() { problem.key_shape().rows } else { problem.attended_range(problem.key_length).end };
    // Of a paged cache, batches are pages, and a block is copied by boxes that lie in one.
    let boxed = |tile: SwizzledTile| match problem.paged {
        Some(_) => SwizzledTile { rows: specialization.page_box, ..tile },
        None => tile,
    };
    // A warp stores its own rows.
    let stored = SwizzledTile { rows: MMA_M, ..config.output_tile(specialization) };
    let output = map(Operand::Output, strides.output, problem.output_shape(), stored);
    let copied = [
        if config.pack_gqa {
            (Operand::Query, packed_query_map(problem, query))
        } else {
            map(Operand::Query, strides.query, problem.query_shape(), query)
        },
        map(Operand::Key, strides.key, Shape { rows: keys, ..problem.key_shape() }, boxed(key)),
        map(Operand::Value, strides.value, Shape { rows: keys, ..problem.value_shape() }, boxed(value)),
    ];
    copied.into_iter().chain(config.tma_store(specialization).then_some(output))
}

/// The stride of a dimension of size 1, which is never used.
const UNUSED: u64 = 16;

/// Columns, rows, heads and batches, copied a panel at a time.
fn tensor_map(dtype: DType, strides: Strides, shape: Shape, tile: SwizzledTile) -> TensorMap {
    let element = match dtype {
        DType::Bf16 => TensorElement::Bf16,
        DType::E4m3 | DType::E5m2 => TensorElement::U8,
        _ => TensorElement::F16,
    };
    let dimensions = [shape.columns, shape.rows, shape.heads, shape.batch].map(|size| size as u64);
    // The stride of a dimension of size 1 is never used, and may be anything.
    let sizes = [(strides.row, shape.rows), (strides.head, shape.heads), (strides.batch, shape.batch)];
    let bytes = |stride: usize| (stride as u64).saturating_mul(dtype.size_bytes() as u64);
    let strides = sizes.map(|(stride, size)| if size > 1 { bytes(stride) } else { UNUSED });
    let panel = [tile.element.panel_columns(), tile.rows, 1, 1];
    TensorMap::new(0, element, &dimensions, &strides, &panel).with_swizzle(Swizzle::Bytes128)
}

/// Columns, heads, rows and batches of a query whose heads share tiles (`pack_gqa`): a panel has the rows of one group.
fn packed_query_map(problem: &Problem, tile: SwizzledTile) -> TensorMap {
    let Shape { batch, heads, rows, columns } = problem.query_shape();
    let Strides { batch: batch_stride, head, row } = problem.strides().query;
    let swapped = Strides { batch: batch_stride, head: row, row: head };
    let map = tensor_map(problem.dtype, swapped, Shape { batch, heads: rows, rows: heads, columns }, tile);
    let group = (heads / problem.key_heads.max(1)).max(1) as u32;
    let mut box_dimensions = map.box_dimensions;
    (box_dimensions[1], box_dimensions[2]) = (group, tile.rows / group);
    TensorMap { box_dimensions, ..map }
}
