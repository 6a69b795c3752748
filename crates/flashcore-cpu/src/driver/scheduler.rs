//! The tile scheduler: cuts a problem into work items, with split-KV where there are few rows.
//!
//! An item is some rows of a [`Group`] and some of its keys. Threads take items in order from one counter.
//!
//! * Rows: up to [`MAX_ITEM_ROWS`], in whole row panels; fewer, down to one panel, until there are [`ITEMS_PER_THREAD`]
//!   for each thread, or equal ones that come out even. A panel gives the same bits whatever item it is in, so this may
//!   depend on the number of threads.
//! * Keys: those that some row of some batch attends, first to last. All of them where one panel to an item makes
//!   [`MIN_ITEMS`]; else as many splits as it takes to make them, none shorter than [`MIN_SPLIT_KEYS`]. The split points
//!   change how sums are rounded, so they depend on the problem and the level alone. The splits of a row are merged in
//!   their order.
//! * The last rows come first, which under a causal mask attend the most (LPT, longest processing time first): a thread
//!   that is alone at the end is done soon.

use crate::attend::blocked::KV_TILE;
use crate::attend::decode;
use crate::attend::group::Group;
use flashcore_problem::{InputViews, Mask, Problem};
use std::ops::Range;

/// Upper bound of the query rows that share packed keys and values, unless a kernel wants more: enough that packing costs
/// one or two hundredths of using.
pub(crate) const MAX_ITEM_ROWS: usize = 256;

/// Lower bound of the items for each thread where there are enough query rows: so many that threads rarely wait for the last.
const ITEMS_PER_THREAD: usize = 8;

/// Lower bound of the items where there are enough rows and keys: two for each thread of a machine with 128.
const MIN_ITEMS: usize = 256;

/// Lower bound of the keys of a split: merging two costs as much as attending one or two keys.
const MIN_SPLIT_KEYS: usize = 4 * KV_TILE;

/// Work items of one problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TileScheduler {
    /// Batches times key heads.
    pub(crate) groups: usize,
    /// Rows of each group.
    rows: usize,
    /// Rows of an item, but for the last.
    item_rows: usize,
    /// Keys that are split: all that any row attends.
    pub(crate) keys: Range<usize>,
    /// Keys of a split, but for the last; a multiple of [`KV_TILE`].
    split_keys: usize,
    /// True if rows are so few that keys and values are best read in place.
    pub(crate) is_decode: bool,
}

/// True if rows are so few that keys and values are best read in place.
pub(crate) fn is_decode(problem: &Problem) -> bool {
    Group::row_count(problem) <= decode::MAX_ROWS && problem.expressions().next().is_none()
}

/// Keys from the first that any row of any batch attends to the last; none if no row attends any.
fn attended_keys(problem: &Problem, inputs: &InputViews<'_>) -> Range<usize> {
    let of_batch = |batch: usize| Group::new(problem, inputs, batch, 0).attended_of(&(0..problem.key_length));
    let ranges = (0..problem.batch).map(of_batch).filter(|keys| !keys.is_empty());
    ranges.reduce(|all, keys| all.start.min(keys.start)..all.end.max(keys.end)).unwrap_or(0..0)
}

/// One work item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) group: usize,
    pub(crate) rows: Range<usize>,
    pub(crate) split: usize,
    pub(crate) keys: Range<usize>,
}

impl TileScheduler {
    /// For a kernel whose row panels have `panel` rows, on `threads` threads, with up to `max_item_rows` in an item.
    pub(crate) fn new(
        problem: &Problem,
        inputs: &InputViews<'_>,
        panel: usize,
        max_item_rows: usize,
        threads: usize,
    ) -> Self {
        let (groups, rows) = (problem.batch * problem.key_heads, Group::row_count(problem));
        let is_decode = is_decode(problem);
        let keys = attended_keys(problem, inputs);
        let panels = groups * if is_decode { 1 } else { rows.div_ceil(panel) };
        let max_splits = (keys.len() / MIN_SPLIT_KEYS).max(1);
        let num_splits = MIN_ITEMS.div_ceil(panels.max(1)).clamp(1, max_splits);
        let split_keys = keys.len().div_ceil(num_splits).next_multiple_of(KV_TILE).max(KV_TILE);

        let mut scheduler = Self { groups, rows, item_rows: rows, keys, split_keys, is_decode };
        if !is_decode {
            scheduler.item_rows = max_item_rows.max(panel);
            let are_equal = problem.mask == Mask::None && !problem.seqused_k;
            let is_enough = |scheduler: &Self| {
                let items = scheduler.items();
                let is_even = are_equal && rows.is_multiple_of(scheduler.item_rows) && items.is_multiple_of(threads);
                is_even || items >= ITEMS_PER_THREAD * threads
            };
            while scheduler.item_rows > panel && !is_enough(&scheduler) {
                scheduler.item_rows = (scheduler.item_rows / 2).next_multiple_of(panel);
            }
        }
        scheduler
    }

    /// Number of splits of the keys of a group; 1 where there are no keys.
    pub(crate) fn num_splits(&self) -> usize {
        self.keys.len().div_ceil(self.split_keys).max(1)
    }

    /// Number of rows of the largest item.
    pub(crate) fn largest_rows(&self) -> usize {
        self.item_rows.min(self.rows)
    }

    pub(crate) fn items(&self) -> usize {
        self.groups * self.num_splits() * self.rows.div_ceil(self.item_rows)
    }

    /// Item number `index`.
    pub(crate) fn item(&self, index: usize) -> Item {
        let (num_splits, row_items) = (self.num_splits(), self.rows.div_ceil(self.item_rows));
        let split = index % num_splits;
        let first_row = (row_items - 1 - index / num_splits % row_items) * self.item_rows;
        let first_key = self.keys.start + split * self.split_keys;
        Item {
            group: index / num_splits / row_items,
            rows: first_row..self.rows.min(first_row + self.item_rows),
            split,
            keys: first_key..self.keys.end.min(first_key.saturating_add(self.split_keys)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{Alignment, DType, InputViews, TensorView};

    const PANEL_ROWS: usize = 32;

    fn shape(batch: usize, heads: (usize, usize), lengths: (usize, usize), is_causal: bool) -> Problem {
        let mut problem = Problem::new(batch, heads.0, lengths.0, 128, DType::F32);
        (problem.key_heads, problem.key_length) = (heads.1, lengths.1);
        if is_causal {
            problem.mask = Mask::Causal(Alignment::BottomRight);
        }
        problem
    }

    /// Inputs of which only `seqused_k` is looked at.
    fn no_inputs(seqused_k: Option<&[u32]>) -> InputViews<'_> {
        let nothing = TensorView { dtype: DType::F32, data: &[] };
        let mut inputs = InputViews::new(nothing, nothing, nothing);
        inputs.seqused_k = seqused_k;
        inputs
    }

    fn split(problem: &Problem, threads: usize) -> TileScheduler {
        TileScheduler::new(problem, &no_inputs(None), PANEL_ROWS, MAX_ITEM_ROWS, threads)
    }

    /// Pairs of a row and a key that an item attends.
    fn work(problem: &Problem, item: &Item) -> usize {
        let inputs = no_inputs(None);
        let (batch, key_head) = (item.group / problem.key_heads, item.group % problem.key_heads);
        let group = Group::new(problem, &inputs, batch, key_head);
        item.rows.clone().map(|row| group.attended_by(&(row..row + 1), &item.keys).0.len()).sum()
    }

    /// Every pair is in one item.
    #[test]
    fn items_cover_everything_once() {
        for problem in [
            shape(2, (4, 2), (70, 70), false),
            shape(1, (1, 1), (1000, 3000), true),
            shape(1, (8, 1), (1, 9000), false),
            shape(1, (2, 2), (300, 0), false),
            shape(3, (3, 3), (33, 100_000), true),
        ] {
            for threads in [1, 2, 7, 64] {
                let split = split(&problem, threads);
                let mut seen = vec![vec![0; split.rows]; split.groups];
                for item in (0..split.items()).map(|index| split.item(index)) {
                    assert!(item.rows.len() <= split.largest_rows() && item.rows.start.is_multiple_of(split.item_rows));
                    assert_eq!(item.keys.start, item.split * split.split_keys);
                    for row in item.rows {
                        // The splits of a row come in order.
                        assert_eq!(seen[item.group][row], item.keys.start, "{problem}");
                        seen[item.group][row] = item.keys.end;
                    }
                }
                assert!(seen.iter().flatten().all(|&end| end == problem.key_length), "{problem}: {seen:?}");
            }
        }
    }

    /// Bits of a result do not depend on the number of threads, so neither may the splits.
    #[test]
    fn splits_do_not_depend_on_threads() {
        for keys in [1, 511, 1024, 5000, 100_000] {
            for rows in [1, 8, 9, 32, 500, 4000] {
                let problem = shape(1, (2, 2), (rows, keys), false);
                let one = split(&problem, 1);
                for threads in [2, 16, 128] {
                    let other = split(&problem, threads);
                    assert_eq!((other.split_keys, other.is_decode), (one.split_keys, one.is_decode));
                }
            }
        }
    }

    /// Keys that no row attends are cut off before the rest is split: a cache may be far larger than its content.
    #[test]
    fn only_attended_keys_are_cut() {
        let check = |problem: &Problem, seqused_k: Option<&[u32]>, expected: Range<usize>| {
            let split = TileScheduler::new(problem, &no_inputs(seqused_k), PANEL_ROWS, MAX_ITEM_ROWS, 4);
            let first = split.item(0).keys.start;
            let last = split.item(split.num_splits() - 1).keys.end;
            assert_eq!((&split.keys, first..last), (&expected, expected.clone()), "{problem}");
        };
        let mut decode = shape(3, (8, 2), (1, 1 << 40), false);
        check(&decode, None, 0..1 << 40);
        check(&decode, Some(&[5, 4000, 0]), 0..4000);
        check(&decode, Some(&[0, 0, 0]), 0..0);
        let alignment = Alignment::BottomRight;
        decode.mask = Mask::Window { left: Some(9), right: Some(0), alignment };
        check(&decode, Some(&[100, 4000, 0]), 90..4000);
        decode.mask = Mask::Causal(Alignment::TopLeft);
        check(&decode, None, 0..1);
        check(&shape(1, (1, 1), (1000, 300), true), None, 0..300);
    }

    /// Efficiency of threads that each take the next item as soon as they are done with one: the work of all over that of
    /// the busiest times their number.
    fn efficiency(problem: &Problem, threads: usize) -> (usize, f64, f64) {
        let split = split(problem, threads);
        let mut busy = vec![0; threads];
        let (mut total, mut largest) = (0, 0);
        for item in (0..split.items()).map(|index| split.item(index)) {
            let work = work(problem, &item);
            if let Some(next) = busy.iter_mut().min() {
                *next += work;
            }
            (total, largest) = (total + work, largest.max(work));
        }
        let longest = busy.into_iter().max().unwrap_or(0);
        let share = largest as f64 / total as f64;
        (split.items(), share, total as f64 / (longest * threads) as f64)
    }

    /// The table in `docs/cpu.md` says what the code does.
    #[test]
    fn the_table_in_the_documentation_is_right() {
        let shapes = [
            ("1x8x512, causal", shape(1, (8, 8), (512, 512), true)),
            ("1x1x4096", shape(1, (1, 1), (4096, 4096), false)),
            ("1x1x4096, causal", shape(1, (1, 1), (4096, 4096), true)),
            ("64x16x128", shape(64, (16, 16), (128, 128), false)),
            ("1x1x32 over 100000 keys", shape(1, (1, 1), (32, 100_000), false)),
            ("1x32x1 over 4096 keys", shape(1, (32, 32), (1, 4096), false)),
            ("1x32/8x1 over 32768 keys", shape(1, (32, 8), (1, 32_768), false)),
        ];
        let machines = [2, 16, 64, 128];
        let row = |name: &str, cells: [String; 4]| format!("| {name} | {} |\n", cells.join(" | "));
        let mut table = row("shape", machines.map(|threads| format!("{threads} threads"))) + "|---|---|---|---|---|\n";
        for (name, problem) in &shapes {
            let cells = machines.map(|threads| {
                let (items, share, efficiency) = efficiency(problem, threads);
                format!("{items} items, {:.1} %: {:.0} %", 100.0 * share, 100.0 * efficiency)
            });
            table += &row(name, cells);
        }
        let documentation = include_str!("../../../../docs/cpu.md");
        assert!(documentation.contains(&table), "docs/cpu.md should have\n{table}");
    }
}
