//! Blocked attention: row panels of queries over packed KV tiles.
//!
//! A row panel is as many query rows as the widest block of a kernel has lanes. It keeps its row max, row sum and output
//! while KV tiles pass by; [`block`] is what one panel and one tile do.

use super::block::{self, BlockScratch};
use super::group::Group;
use crate::driver::scratch::{Arena, arena_bytes};
use crate::microkernel::prefetch::{CacheLines, PrefetchPlan};
use crate::microkernel::{FusedForward, Products, padded};
use crate::planted::planted;
use crate::simd::real::Real;
use flashcore_problem::Problem;
use std::ops::Range;

/// Keys of a KV tile, unless a kernel wants others. The scores of a panel of 32 query rows are then 16 KiB, which stay in
/// a first-level cache between the two products, and keys and values of 128 columns 64 KiB each, which stay in a
/// second-level cache. A mask wastes no more with large tiles than with small ones, since each panel takes only the keys of
/// a tile that it attends.
pub(crate) const KV_TILE: usize = 128;

/// Upper bound of every kernel's KV tile.
pub(crate) const MAX_KV_TILE: usize = 256;

/// Upper bound of the KV tiles that are packed at once.
pub(crate) const MAX_PACKED_TILES: usize = 16;

/// Upper bound of the lanes of a row panel.
pub(crate) const MAX_LANES: usize = 64;

/// Bytes that [`attend_rows`] takes of an arena for so many rows.
pub(crate) fn scratch_bytes<K: FusedForward>(problem: &Problem, rows: usize) -> usize {
    let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
    let (panels, tiles) = (panels_kept::<K>(problem, rows), packed_tiles::<K>(problem));
    let packed = [
        panels * K::right_size(head_dim),
        tiles * K::left_size(head_dim, K::TILE_ROWS),
        tiles * K::transposed_size(value_dim, K::TILE_ROWS),
        K::weight_size(K::TILE_ROWS),
    ];
    let real = [
        panels * padded(value_dim, K::COLUMN_BLOCK) * K::PANEL_LANES,
        panels * K::PANEL_LANES,
        panels * K::PANEL_LANES,
        padded(K::TILE_ROWS, K::ROW_BLOCK) * K::PANEL_LANES,
        K::PANEL_LANES,
        value_dim * K::PANEL_LANES,
    ];
    packed.iter().map(|&count| arena_bytes::<K::Packed>(count)).sum::<usize>()
        + real.iter().map(|&count| arena_bytes::<K::Real>(count)).sum::<usize>()
}

/// Number of tiles that are packed before the first panel attends them.
fn packed_tiles<K: FusedForward>(problem: &Problem) -> usize {
    problem.key_length.div_ceil(K::TILE_ROWS).clamp(1, K::PACKED_TILES)
}

/// Number of panels whose state is kept: where all keys are packed at once, a panel is done before the next begins.
fn panels_kept<K: FusedForward>(problem: &Problem, rows: usize) -> usize {
    if problem.key_length <= packed_tiles::<K>(problem) * K::TILE_ROWS { 1 } else { rows.div_ceil(K::PANEL_LANES) }
}

/// A row panel that has attended its keys, still side by side in lanes.
pub(crate) struct AttendedPanel<'a, R> {
    pub(crate) rows: Range<usize>,
    /// Row max of each lane; lanes past the rows are undefined.
    pub(crate) row_max: &'a [R],
    pub(crate) row_sum: &'a [R],
    /// The weighted sums, a row of lanes for each column.
    pub(crate) columns: &'a [R],
    /// Memory for them as rows.
    pub(crate) rows_scratch: &'a mut [R],
}

/// Attends `keys`, which begin with a tile, with `rows`, which begin with a panel. Hands each panel to `deliver`, which will
/// write its rows to `output_lines`.
pub(crate) fn attend_rows<K: FusedForward>(
    kernel: &K,
    group: &Group<'_>,
    rows: Range<usize>,
    keys: Range<usize>,
    arena: &mut Arena<'_>,
    output_lines: impl Fn(&Range<usize>) -> CacheLines,
    mut deliver: impl FnMut(AttendedPanel<'_, K::Real>),
) {
    const { assert!(K::PANEL_LANES <= MAX_LANES && K::TILE_ROWS.is_multiple_of(K::ROW_ALIGNMENT)) };
    const { assert!(MAX_KV_TILE.is_multiple_of(K::TILE_ROWS)) };
    let mut states = PanelStates::<K>::take(arena, group.problem, rows.len());
    let mut tiles = PackedTiles::<K>::take(arena, group.problem);
    let rows_scratch = arena.take::<K::Real>(group.problem.value_dim * K::PANEL_LANES);
    let mut scratch = BlockScratch::<K>::take(arena);
    let panels = rows.len().div_ceil(K::PANEL_LANES);
    let panel_rows = |index: usize| {
        let first = rows.start + index * K::PANEL_LANES;
        first..rows.end.min(first + K::PANEL_LANES)
    };

    // Keys that no row of the group attends are as good as absent: neither their bits nor their number matter. Tiles begin
    // and end with keys that some row attends, whichever rows are here, so that a panel gives the same bits with any.
    let keys = group.attended_of(&keys);
    let (attended, _) = group.attended_by(&rows, &keys);
    let first = attended.start - (attended.start - keys.start) % K::TILE_ROWS;
    let span_keys = tiles.count * K::TILE_ROWS;
    // Rows that attend nothing have an output too.
    let attended = planted!(TilesPast16: attended.start..attended.end.min(first + 16 * K::TILE_ROWS), attended);
    for start in (first..attended.end.max(first + 1)).step_by(span_keys) {
        let span = Span { keys: start..attended.end.min(start + span_keys), last_key: keys.end };
        let (is_first, is_last) = (start == first, start + span_keys >= attended.end);
        tiles.pack(kernel, group, &span);
        for index in 0..panels {
            let mut panel = states.panel(index, panel_rows(index), is_first);
            if is_last {
                panel.prefetch.output = output_lines(&panel.rows);
            }
            if K::FUSED_PREFETCH {
                let next = span.keys.end..attended.end.min(span.keys.end + span_keys);
                panel.prefetch.tile = share_of_tiles(group, &next, index, panels);
            }
            if is_first {
                let next = panel_rows(index + 1);
                match group.query.bytes(&next).filter(|_| K::FUSED_PREFETCH) {
                    Some(bytes) => panel.prefetch.query = CacheLines::new(bytes),
                    None => group.query.prefetch(next),
                }
                let packed = planted!(
                    TailOfAPanel: panel.rows.start..panel.rows.end - usize::from(panel.rows.len() % K::PANEL_LANES > 1),
                    panel.rows.clone()
                );
                kernel.pack_right(group.query, packed, panel.lanes(), panel.query);
                panel.row_max.fill(K::Real::NEGATIVE_INFINITY);
                panel.row_sum.fill(K::Real::ZERO);
            }
            tiles.attend(kernel, group, &span, &mut panel, &mut scratch);
            // A panel that attended none of the keys so far.
            panel.zero_if_first();
            if is_last {
                let (lanes, value_dim) = (panel.lanes(), group.problem.value_dim);
                deliver(AttendedPanel {
                    rows: panel.rows,
                    row_max: &panel.row_max[..lanes],
                    row_sum: &panel.row_sum[..lanes],
                    columns: &panel.output[..value_dim * lanes],
                    rows_scratch: &mut rows_scratch[..value_dim * lanes],
                });
            }
        }
    }
}

/// Share of the following keys and values that one of so many panels prefetches, so that together they prefetch all.
fn share_of_tiles(group: &Group<'_>, keys: &Range<usize>, panel: usize, panels: usize) -> [CacheLines; 2] {
    let share = keys.len().div_ceil(panels);
    let start = keys.end.min(keys.start + panel * share);
    let those = start..keys.end.min(start + share);
    [group.key, group.value].map(|head| CacheLines::of_rows(head, &those))
}

/// Query rows side by side in vector lanes, with the state of their online softmax.
pub(super) struct RowPanel<'a, K: Products> {
    pub(super) rows: Range<usize>,
    pub(super) query: &'a mut [K::Packed],
    /// A row of lanes for each column of the value, padded.
    pub(super) output: &'a mut [K::Real],
    pub(super) row_max: &'a mut [K::Real],
    pub(super) row_sum: &'a mut [K::Real],
    /// True while nothing has been written to the output, which counts as zero.
    pub(super) is_first: bool,
    /// Memory that is needed after the panel has attended a tile.
    pub(super) prefetch: PrefetchPlan,
}

impl<K: Products> RowPanel<'_, K> {
    pub(super) fn lanes(&self) -> usize {
        padded(self.rows.len(), K::LANE_BLOCK)
    }

    /// Zeroes the output if nothing has been written to it.
    pub(super) fn zero_if_first(&mut self) {
        if self.is_first {
            self.output.fill(K::Real::ZERO);
            self.is_first = false;
        }
    }
}

/// Packed queries, outputs and softmax states of the panels that are kept.
struct PanelStates<'a, K: Products> {
    kept: usize,
    query_size: usize,
    output_size: usize,
    query: &'a mut [K::Packed],
    output: &'a mut [K::Real],
    row_max: &'a mut [K::Real],
    row_sum: &'a mut [K::Real],
}

impl<'a, K: FusedForward> PanelStates<'a, K> {
    fn take(arena: &mut Arena<'a>, problem: &Problem, rows: usize) -> Self {
        let kept = panels_kept::<K>(problem, rows);
        let query_size = K::right_size(problem.head_dim);
        let output_size = padded(problem.value_dim, K::COLUMN_BLOCK) * K::PANEL_LANES;
        Self {
            kept,
            query_size,
            output_size,
            query: arena.take(kept * query_size),
            output: arena.take(kept * output_size),
            row_max: arena.take(kept * K::PANEL_LANES),
            row_sum: arena.take(kept * K::PANEL_LANES),
        }
    }

    /// The panel number `index` of an item, which is that of `rows`.
    fn panel(&mut self, index: usize, rows: Range<usize>, is_first: bool) -> RowPanel<'_, K> {
        let (place, query_size, output_size) = (index % self.kept, self.query_size, self.output_size);
        RowPanel {
            rows,
            query: &mut self.query[place * query_size..][..query_size],
            output: &mut self.output[place * output_size..][..output_size],
            row_max: &mut self.row_max[place * K::PANEL_LANES..][..K::PANEL_LANES],
            row_sum: &mut self.row_sum[place * K::PANEL_LANES..][..K::PANEL_LANES],
            is_first,
            prefetch: PrefetchPlan::NOTHING,
        }
    }
}

/// Keys whose tiles are packed at once. Only the last tile of all may have fewer keys than the others.
struct Span {
    keys: Range<usize>,
    /// End of the last tile of all.
    last_key: usize,
}

impl Span {
    /// Keys of each tile.
    fn tiles<K: Products>(&self) -> impl Iterator<Item = Range<usize>> {
        self.keys.clone().step_by(K::TILE_ROWS).map(|start| start..self.last_key.min(start + K::TILE_ROWS))
    }
}

/// A tile of keys and values, packed or in place, or several packed ones.
pub(super) struct KvTile<'a, K: Products> {
    pub(super) keys: Range<usize>,
    pub(super) key: &'a [K::Packed],
    pub(super) value: &'a [K::Packed],
}

/// Memory for the packed tiles of a span.
struct PackedTiles<'a, K: Products> {
    count: usize,
    key_size: usize,
    value_size: usize,
    key: &'a mut [K::Packed],
    value: &'a mut [K::Packed],
}

impl<'a, K: FusedForward> PackedTiles<'a, K> {
    fn take(arena: &mut Arena<'a>, problem: &Problem) -> Self {
        let count = packed_tiles::<K>(problem);
        let key_size = K::left_size(problem.head_dim, K::TILE_ROWS);
        let value_size = K::transposed_size(problem.value_dim, K::TILE_ROWS);
        let (key, value) = (arena.take(count * key_size), arena.take(count * value_size));
        Self { count, key_size, value_size, key, value }
    }

    /// Packs what cannot be used in place.
    fn pack(&mut self, kernel: &K, group: &Group<'_>, span: &Span) {
        let packed = self.key.chunks_exact_mut(self.key_size).zip(self.value.chunks_exact_mut(self.value_size));
        for (keys, (key, value)) in span.tiles::<K>().zip(packed) {
            if K::in_place(group.key, keys.clone()).is_none() {
                kernel.pack_left(group.key, keys.clone(), key);
            }
            if K::in_place(group.value, keys.clone()).is_none() {
                kernel.pack_transposed(group.value, keys.clone(), value);
                if let Some(scales) = group.scoring.scales.of_values(keys.clone()) {
                    kernel.scale_rows(value, group.problem.value_dim, &scales[..keys.len()]);
                }
            }
        }
    }

    /// The panel attends all tiles of a span: full blocks at once where the kernel can, the others one by one.
    fn attend(
        &self,
        kernel: &K,
        group: &Group<'_>,
        span: &Span,
        panel: &mut RowPanel<'_, K>,
        scratch: &mut BlockScratch<'_, K>,
    ) {
        let packed = KvTile::<K> { keys: span.keys.clone(), key: self.key, value: self.value };
        let done = block::attend_full_blocks(kernel, group, &packed, panel, scratch);
        let packed = self.key.chunks_exact(self.key_size).zip(self.value.chunks_exact(self.value_size));
        for (keys, (key, value)) in span.tiles::<K>().zip(packed) {
            let tile = KvTile::<K> {
                key: K::in_place(group.key, keys.clone()).unwrap_or(key),
                value: K::in_place(group.value, keys.clone()).unwrap_or(value),
                keys: keys.clone(),
            };
            for keys in [keys.start..keys.end.min(done.start), keys.start.max(done.end)..keys.end] {
                if !keys.is_empty() {
                    block::attend_block(kernel, group, &tile, keys, panel, scratch);
                }
            }
        }
    }
}
