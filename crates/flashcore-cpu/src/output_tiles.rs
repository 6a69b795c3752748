//! The output cut into one part per tile of query rows, so that tiles can be written at the same time.

use flashcore_problem::{OutputViews, Problem};

/// Where one tile of query rows writes.
pub(crate) struct OutputTile<'a> {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) first_row: usize,
    /// The bytes of each row.
    pub(crate) rows: Vec<&'a mut [u8]>,
    /// The log-sum-exp of each row, where it is wanted.
    pub(crate) log_sum_exp: Option<&'a mut [f32]>,
}

/// Cuts the outputs of a valid problem into tiles of up to `tile_rows` rows, in the order (batch, head, row).
pub(crate) fn output_tiles<'a>(problem: &Problem, outputs: OutputViews<'a>, tile_rows: usize) -> Vec<OutputTile<'a>> {
    let (shape, strides) = (problem.output_shape(), problem.strides().output);
    let tiles_per_head = shape.rows.div_ceil(tile_rows);
    let mut tiles: Vec<OutputTile<'a>> = shape
        .each_row()
        .filter(|(_, _, row)| row % tile_rows == 0)
        .map(|(batch, head, first_row)| OutputTile {
            batch,
            head,
            first_row,
            rows: Vec::with_capacity(tile_rows),
            log_sum_exp: None,
        })
        .collect();

    // Strides are in any order, but valid outputs do not overlap: by the place where they begin, rows can be split off
    // one after another.
    let mut rows: Vec<(usize, usize)> = shape
        .each_row()
        .map(|(batch, head, row)| {
            let tile = (batch * shape.heads + head) * tiles_per_head + row / tile_rows;
            (strides.row_start(batch, head, row), tile)
        })
        .collect();
    rows.sort_unstable();
    let size = problem.dtype.size_bytes();
    let (mut rest, mut consumed) = (outputs.output.data, 0);
    for (start, tile) in rows {
        let (row, after) = rest[(start - consumed) * size..].split_at_mut(shape.columns * size);
        tiles[tile].rows.push(row);
        (rest, consumed) = (after, start + shape.columns);
    }

    if let Some(log_sum_exp) = outputs.log_sum_exp.filter(|rows| !rows.is_empty()) {
        let parts = log_sum_exp.chunks_mut(shape.rows).flat_map(|head| head.chunks_mut(tile_rows));
        for (tile, part) in tiles.iter_mut().zip(parts) {
            tile.log_sum_exp = Some(part);
        }
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{DType, Layout, Outputs};

    /// Every element gets the number of its row and tile, whatever the layout.
    #[test]
    fn every_row_goes_to_its_tile() {
        for layout in [Layout::Bhsd, Layout::Bshd] {
            let mut problem = Problem::new(2, 3, 7, 4, DType::F32);
            problem.log_sum_exp = true;
            problem.layout = layout;
            let mut outputs = Outputs::poisoned(&problem);
            let tiles = output_tiles(&problem, outputs.views_mut(), 3);
            assert_eq!(tiles.len(), 2 * 3 * 3);
            for tile in tiles {
                let name = (tile.batch * 100 + tile.head * 10) as f32;
                let log_sum_exp = tile.log_sum_exp.map(|rows| rows.iter_mut());
                for (index, (row, log_sum_exp)) in tile.rows.into_iter().zip(log_sum_exp.unwrap()).enumerate() {
                    let number = name + (tile.first_row + index) as f32;
                    *log_sum_exp = number;
                    for element in row.chunks_exact_mut(4) {
                        element.copy_from_slice(&number.to_le_bytes());
                    }
                }
            }
            let dense = outputs.output.dense(problem.output_shape(), problem.strides().output);
            for (index, (batch, head, row)) in problem.output_shape().each_row().enumerate() {
                let number = (batch * 100 + head * 10 + row) as f64;
                assert_eq!(dense[index * 4..][..4], [number; 4], "{layout:?}");
                assert_eq!(outputs.log_sum_exp.as_ref().map(|rows| f64::from(rows[index])), Some(number));
            }
        }
    }
}
