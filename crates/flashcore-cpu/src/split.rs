//! How a problem is cut into work items.
//!
//! An item is some rows of a [`Group`] and some of its keys. Threads take items in order from one counter.
//!
//! * Rows: up to [`MOST_ITEM_ROWS`], in whole strips; fewer, down to one strip, until there are [`ITEMS_PER_THREAD`] for
//!   each thread, or equal ones that come out even. A strip gives the same bits whatever item it is in, so this may depend on the number of threads.
//! * Keys: those that some row of some batch attends, first to last. All of them where one strip to an item makes [`WANTED_ITEMS`]; else as many chunks as it takes to make them,
//!   none shorter than [`LEAST_CHUNK`]. Where the keys are cut changes how sums are rounded, so this depends on the
//!   problem and the level alone. What the chunks of a row give is put together in their order.
//! * The last rows come first, which under a causal mask attend the most: a thread that is alone at the end is done soon.

use crate::group::Group;
use crate::stream;
use crate::tiles::KEY_TILE;
use flashcore_problem::{InputViews, Mask, Problem};
use std::ops::Range;

/// Query rows that share packed keys and values, at most, unless a kernel wants more: enough that packing costs one or two
/// hundredths of using.
pub(crate) const MOST_ITEM_ROWS: usize = 256;

/// Items for each thread, at least, where there are enough query rows: so many that threads rarely wait for the last.
const ITEMS_PER_THREAD: usize = 8;

/// Items, at least, where there are enough rows and keys: two for each thread of a machine with 128.
const WANTED_ITEMS: usize = 256;

/// Keys of a chunk, at least: putting two together costs as much as attending one or two keys.
const LEAST_CHUNK: usize = 4 * KEY_TILE;

/// How one problem is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    /// Batches times key heads.
    pub(crate) groups: usize,
    /// Rows of each group.
    rows: usize,
    /// Rows of an item, but for the last.
    item_rows: usize,
    /// The keys that are cut: all that any row attends.
    pub(crate) keys: Range<usize>,
    /// Keys of a chunk, but for the last; a multiple of [`KEY_TILE`].
    chunk_keys: usize,
    /// Whether rows are so few that keys and values are best read where they lie.
    pub(crate) is_streamed: bool,
}

/// Whether rows are so few that keys and values are best read where they lie.
pub(crate) fn is_streamed(problem: &Problem) -> bool {
    Group::row_count(problem) <= stream::MOST_ROWS && problem.expressions().next().is_none()
}

/// The keys from the first that any row of any batch attends to the last; none where no row attends any.
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
    pub(crate) chunk: usize,
    pub(crate) keys: Range<usize>,
}

impl Split {
    /// For a kernel whose strips have `strip` rows, on `threads` threads, with up to `most_item_rows` in an item.
    pub(crate) fn new(
        problem: &Problem,
        inputs: &InputViews<'_>,
        strip: usize,
        most_item_rows: usize,
        threads: usize,
    ) -> Self {
        let (groups, rows) = (problem.batch * problem.key_heads, Group::row_count(problem));
        let is_streamed = is_streamed(problem);
        let keys = attended_keys(problem, inputs);
        let strips = groups * if is_streamed { 1 } else { rows.div_ceil(strip) };
        let most_chunks = (keys.len() / LEAST_CHUNK).max(1);
        let chunks = WANTED_ITEMS.div_ceil(strips.max(1)).clamp(1, most_chunks);
        let chunk_keys = keys.len().div_ceil(chunks).next_multiple_of(KEY_TILE).max(KEY_TILE);

        let mut split = Self { groups, rows, item_rows: rows, keys, chunk_keys, is_streamed };
        if !is_streamed {
            split.item_rows = most_item_rows.max(strip);
            let are_equal = problem.mask == Mask::None && !problem.seqused_k;
            let is_enough = |split: &Self| {
                let items = split.items();
                let is_even = are_equal && rows.is_multiple_of(split.item_rows) && items.is_multiple_of(threads);
                is_even || items >= ITEMS_PER_THREAD * threads
            };
            while split.item_rows > strip && !is_enough(&split) {
                split.item_rows = (split.item_rows / 2).next_multiple_of(strip);
            }
        }
        split
    }

    /// Parts that the keys of a group are cut into; 1 where there are none.
    pub(crate) fn chunks(&self) -> usize {
        self.keys.len().div_ceil(self.chunk_keys).max(1)
    }

    /// The rows of the largest item.
    pub(crate) fn largest_rows(&self) -> usize {
        self.item_rows.min(self.rows)
    }

    pub(crate) fn items(&self) -> usize {
        self.groups * self.chunks() * self.rows.div_ceil(self.item_rows)
    }

    /// The item that is taken as number `index`.
    pub(crate) fn item(&self, index: usize) -> Item {
        let (chunks, row_items) = (self.chunks(), self.rows.div_ceil(self.item_rows));
        let chunk = index % chunks;
        let first_row = (row_items - 1 - index / chunks % row_items) * self.item_rows;
        let first_key = self.keys.start + chunk * self.chunk_keys;
        Item {
            group: index / chunks / row_items,
            rows: first_row..self.rows.min(first_row + self.item_rows),
            chunk,
            keys: first_key..self.keys.end.min(first_key.saturating_add(self.chunk_keys)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{Alignment, DType, InputViews, TensorView};

    const STRIP: usize = 32;

    fn shape(batch: usize, heads: (usize, usize), lengths: (usize, usize), is_causal: bool) -> Problem {
        let mut problem = Problem::new(batch, heads.0, lengths.0, 128, DType::F32);
        (problem.key_heads, problem.key_length) = (heads.1, lengths.1);
        if is_causal {
            problem.mask = Mask::Causal(Alignment::BottomRight);
        }
        problem
    }

    /// Inputs that nobody looks at, but for key lengths.
    fn no_inputs(seqused_k: Option<&[u32]>) -> InputViews<'_> {
        let nothing = TensorView { dtype: DType::F32, data: &[] };
        let mut inputs = InputViews::new(nothing, nothing, nothing);
        inputs.seqused_k = seqused_k;
        inputs
    }

    fn split(problem: &Problem, threads: usize) -> Split {
        Split::new(problem, &no_inputs(None), STRIP, MOST_ITEM_ROWS, threads)
    }

    /// Pairs of a row and a key that an item attends to.
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
                    assert_eq!(item.keys.start, item.chunk * split.chunk_keys);
                    for row in item.rows {
                        // The chunks of a row come in order.
                        assert_eq!(seen[item.group][row], item.keys.start, "{problem}");
                        seen[item.group][row] = item.keys.end;
                    }
                }
                assert!(seen.iter().flatten().all(|&end| end == problem.key_length), "{problem}: {seen:?}");
            }
        }
    }

    /// Bits of a result do not depend on the number of threads, so neither may the chunks.
    #[test]
    fn chunks_do_not_depend_on_threads() {
        for keys in [1, 511, 1024, 5000, 100_000] {
            for rows in [1, 8, 9, 32, 500, 4000] {
                let problem = shape(1, (2, 2), (rows, keys), false);
                let one = split(&problem, 1);
                for threads in [2, 16, 128] {
                    let other = split(&problem, threads);
                    assert_eq!((other.chunk_keys, other.is_streamed), (one.chunk_keys, one.is_streamed));
                }
            }
        }
    }

    /// Keys that no row attends are cut off before the rest is cut: a cache may be far larger than what is in it.
    #[test]
    fn only_attended_keys_are_cut() {
        let check = |problem: &Problem, seqused_k: Option<&[u32]>, expected: Range<usize>| {
            let split = Split::new(problem, &no_inputs(seqused_k), STRIP, MOST_ITEM_ROWS, 4);
            let first = split.item(0).keys.start;
            let last = split.item(split.chunks() - 1).keys.end;
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

    /// How busy threads are that each take the next item as soon as they are done with one: the work of all over that
    /// of the busiest times their number.
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

    /// The table in `docs/cpu.md` is what the code does.
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
        let documentation = include_str!("../../../docs/cpu.md");
        assert!(documentation.contains(&table), "docs/cpu.md should have\n{table}");
    }
}
