//! Query, key, value and output as tensor copies see them.

use flashcore_ir::{Swizzle, TensorElement, TensorMap};
use flashcore_problem::{DType, Problem, Shape, Strides};

use crate::hopper_config::HopperConfig;
use crate::parameters::Buffers;
use crate::specialization::Specialization;
use crate::tile::{PANEL_COLUMNS, PanelTile, ROWS_PER_BLOCK};

/// The tensors that the Hopper kernel copies, in the order of its parameters, each with its name.
pub(crate) fn tensor_maps(
    problem: &Problem,
    config: HopperConfig,
    buffers: Buffers,
) -> impl Iterator<Item = (&'static str, TensorMap)> {
    let specialization = Specialization::of(problem);
    let strides = problem.strides();
    let [query, key, value] = config.tiles(specialization);
    let map = |base, strides, shape: Shape, tile| {
        // Where there are no keys nothing is copied, but a map must be of something.
        let (base, rows) = if shape.rows == 0 { (buffers.query, 1) } else { (base, shape.rows) };
        tensor_map(problem.dtype, base, strides, Shape { rows, ..shape }, tile)
    };
    // Rows past the last that anyone attends are out of bounds, which TMA fills with zeros.
    let keys = problem.attended_range(problem.key_length).end;
    // A warp stores its own rows.
    let stored = PanelTile { rows: ROWS_PER_BLOCK, ..value };
    let output = ("output", map(buffers.output, strides.output, problem.output_shape(), stored));
    let copied = [
        ("query", map(buffers.query, strides.query, problem.query_shape(), query)),
        ("key", map(buffers.key, strides.key, Shape { rows: keys, ..problem.key_shape() }, key)),
        ("value", map(buffers.value, strides.value, Shape { rows: keys, ..problem.value_shape() }, value)),
    ];
    copied.into_iter().chain(config.stores_by_copy(specialization).then_some(output))
}

/// The stride of a dimension of size 1, which is never used.
const UNUSED: u64 = 16;

/// Columns, rows, heads and batches, copied a panel at a time.
fn tensor_map(dtype: DType, base: u64, strides: Strides, shape: Shape, tile: PanelTile) -> TensorMap {
    let element = if dtype == DType::Bf16 { TensorElement::Bf16 } else { TensorElement::F16 };
    let dimensions = [shape.columns, shape.rows, shape.heads, shape.batch].map(|size| size as u64);
    // The stride of a dimension of size 1 is never used, and may be anything.
    let sizes = [(strides.row, shape.rows), (strides.head, shape.heads), (strides.batch, shape.batch)];
    let bytes = |stride: usize| (stride as u64).saturating_mul(dtype.size_bytes() as u64);
    let strides = sizes.map(|(stride, size)| if size > 1 { bytes(stride) } else { UNUSED });
    TensorMap::new(base, element, &dimensions, &strides, &[PANEL_COLUMNS, tile.rows, 1, 1])
        .with_swizzle(Swizzle::Bytes128)
}
