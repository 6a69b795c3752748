//! The tile scheduler: cuts a problem into work items, with split-KV where there are few rows.
//!
//! An item is some rows of a [`Group`](crate::attend::group::Group) and some of its keys. Threads take items in order from
//! one counter.
//!
//! * Rows: up to [`MAX_ITEM_ROWS`], in whole row panels; fewer, down to one panel, until there are [`ITEMS_PER_THREAD`]
//!   for each thread, or equal ones that come out even. A panel gives the same bits whatever item it is in, so this may
//!   depend on the number of threads.
//! * Keys: those of the sequence that some row attends, first to last. All of them where items of one panel are at most one in
//!   [`MIN_ITEMS`] of the work; else as many splits as make them so, none shorter than [`MIN_SPLIT_KEYS`]. A long sequence
//!   among short ones has most of the splits. The split points change how sums are rounded, so they depend on the problem,
//!   its lengths and the level alone. The splits of a row are merged in their order.
//! * Sequences whose items are long come first, and of these the last rows, which under a causal mask attend the most (LPT,
//!   longest processing time first): a thread that is alone at the end is done soon.
//! * Of a sequence that is decoded, the same keys of all heads follow one another: heads lie beside each other in a page of a
//!   KV cache, and what the translation of addresses has found for one serves the next. Where they lie beside each other in
//!   every row, up to [`decode::MAX_HEADS`] of them are one item, as long as there are enough items for the threads.

use super::parallel::LoopSchedule;
use crate::attend::blocked::KV_TILE;
use crate::attend::decode;
use flashcore_problem::{InputViews, Mask, Problem, Sequence};
use std::cell::Cell;
use std::ops::Range;

/// Upper bound of the query rows that share packed keys and values, unless a kernel wants more: enough that packing costs
/// one or two hundredths of using.
pub(crate) const MAX_ITEM_ROWS: usize = 256;

/// The same of a kernel whose packed keys and values serve more rows.
pub(crate) const MAX_FUSED_ITEM_ROWS: usize = 1024;

/// Lower bound of the items for each thread where there are enough query rows: so many that threads rarely wait for the last.
const ITEMS_PER_THREAD: usize = 8;

/// The same of items that are decoded by several heads.
const DECODE_ITEMS_PER_THREAD: usize = 2;

/// Lower bound of the items where there are enough rows and keys: two for each thread of a machine with 128.
pub(crate) const MIN_ITEMS: usize = 256;

/// Lower bound of the keys of a split: merging two costs as much as attending one or two keys.
pub(crate) const MIN_SPLIT_KEYS: usize = 4 * KV_TILE;

/// Upper bound of the largest item, in mean items, of those that threads take several of at once.
const MAX_GUIDED_ITEM: usize = 2;

/// Work items of one problem.
pub(crate) struct TileScheduler<'a> {
    /// Sequences that have rows, or one that all are like.
    sequences: &'a [SequenceItems],
    key_heads: usize,
    /// Rows of an item, but for the last.
    item_rows: usize,
    /// KV heads of an item that is decoded.
    pub(crate) decode_heads: usize,
    /// Number of items.
    pub(crate) items: usize,
    /// Pairs of a row and a key.
    work: usize,
    /// Number of rows whose splits are merged, and of their partial results.
    pub(crate) split_rows: usize,
    pub(crate) partials: usize,
}

/// Work items of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SequenceItems {
    /// Index in the batch; 0 where it stands for all.
    index: usize,
    /// Rows of each group.
    rows: usize,
    /// True if rows are so few that keys and values are best read in place.
    is_decode: bool,
    /// Keys that are split: all that any row attends.
    keys: Range<usize>,
    /// Keys of a split, but for the last; a multiple of [`KV_TILE`].
    split_keys: usize,
    /// Items, rows that are merged, and their splits, of the sequences before.
    items_before: usize,
    split_rows_before: usize,
    partials_before: usize,
}

/// True if rows of a sequence are so few that keys and values are best read in place.
pub(crate) fn is_decode(problem: &Problem, sequence: &Sequence<'_>) -> bool {
    group_rows(problem, sequence.query_length) <= decode::MAX_ROWS && problem.expressions().next().is_none()
}

/// True if that holds for all sequences.
#[cfg(target_arch = "x86_64")]
pub(crate) fn is_all_decode(problem: &Problem, inputs: &InputViews<'_>) -> bool {
    problem.batch == 0 || {
        let longest = if problem.has_device_lengths() { 0..problem.batch } else { 0..1 };
        longest.into_iter().all(|index| is_decode(problem, &inputs.sequence(problem, index)))
    }
}

/// Rows of a group of a sequence that has so many query rows.
fn group_rows(problem: &Problem, query_length: usize) -> usize {
    query_length * (problem.query_heads / problem.key_heads)
}

/// One work item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    /// Index of the sequence in the batch.
    pub(crate) sequence: usize,
    pub(crate) key_head: usize,
    /// KV heads from `key_head` on.
    pub(crate) heads: usize,
    pub(crate) is_decode: bool,
    pub(crate) rows: Range<usize>,
    pub(crate) keys: Range<usize>,
    /// Place of the partial results, unless the item has all keys.
    pub(crate) partials: Option<Partial>,
}

/// Place of the partial results of one split of the rows of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Partial {
    /// Place of the first split of the first row of the first group.
    first: usize,
    /// Partial results of a group.
    of_group: usize,
    num_splits: usize,
    split: usize,
}

impl Partial {
    /// Place of the partial result of a row of a group, by the number of its KV head in the item.
    pub(crate) fn place(&self, head: usize, row: usize) -> usize {
        self.first + head * self.of_group + row * self.num_splits + self.split
    }
}

/// A row whose splits are merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SplitRow {
    pub(crate) sequence: usize,
    pub(crate) key_head: usize,
    /// Row of the group.
    pub(crate) row: usize,
    /// Places of its partial results.
    pub(crate) partials: Range<usize>,
}

impl SequenceItems {
    fn new(problem: &Problem, sequence: &Sequence<'_>) -> Self {
        Self {
            index: sequence.index,
            rows: group_rows(problem, sequence.query_length),
            is_decode: is_decode(problem, sequence),
            keys: attended_keys(problem, sequence),
            split_keys: usize::MAX,
            items_before: 0,
            split_rows_before: 0,
            partials_before: 0,
        }
    }

    /// Row panels of a group, of which decoding has one.
    fn panels(&self, panel: usize) -> usize {
        if self.is_decode { 1 } else { self.rows.div_ceil(panel) }
    }

    /// Splits the keys so that a panel and a split are at most one in [`MIN_ITEMS`] of all pairs of a panel and a key.
    fn split(&mut self, all_pairs: u128) {
        let keys = self.keys.len();
        let max_splits = (keys / MIN_SPLIT_KEYS).max(1);
        let num_splits = (MIN_ITEMS as u128 * keys as u128).div_ceil(all_pairs.max(1)).clamp(1, max_splits as u128);
        self.split_keys = keys.div_ceil(num_splits as usize).next_multiple_of(KV_TILE).max(KV_TILE);
    }

    /// Number of splits of the keys of a group; 1 where there are no keys.
    fn num_splits(&self) -> usize {
        self.keys.len().div_ceil(self.split_keys).max(1)
    }

    /// Number of items that the rows of a group are in.
    fn row_items(&self, item_rows: usize) -> usize {
        if self.is_decode { 1 } else { self.rows.div_ceil(item_rows) }
    }

    /// Rows of the largest item.
    fn largest_rows(&self, item_rows: usize) -> usize {
        if self.is_decode { self.rows } else { self.rows.min(item_rows) }
    }

    /// Pairs of a row and a key of the largest item.
    fn largest_item(&self, item_rows: usize) -> usize {
        self.largest_rows(item_rows).saturating_mul(self.split_keys.min(self.keys.len()))
    }
}

/// Keys from the first that any row attends to the last; none if no row attends any.
fn attended_keys(problem: &Problem, sequence: &Sequence<'_>) -> Range<usize> {
    let keys = sequence.attended_range(problem);
    if keys.is_empty() { 0..0 } else { keys }
}

thread_local! {
    /// Memory for the sequences of a call, kept for the next.
    static KEPT: Cell<Vec<SequenceItems>> = const { Cell::new(Vec::new()) };
}

/// Calls `work` with the items of a problem, for a kernel whose row panels have `panel` rows, on `threads` threads, with up to
/// `max_item_rows` in an item.
pub(crate) fn with_schedule<T>(
    problem: &Problem,
    inputs: &InputViews<'_>,
    (panel, max_item_rows): (usize, usize),
    threads: usize,
    work: impl FnOnce(&TileScheduler<'_>) -> T,
) -> T {
    let mut sequences = KEPT.take();
    sequences.clear();
    // Without lengths of their own, all are like the first.
    let (count, alike) = if problem.has_device_lengths() { (problem.batch, 1) } else { (1, problem.batch) };
    let all = (0..count).map(|index| SequenceItems::new(problem, &inputs.sequence(problem, index)));
    sequences.extend(all.filter(|sequence| sequence.rows > 0));
    let result = work(&TileScheduler::new(problem, &mut sequences, alike, (panel, max_item_rows), threads));
    KEPT.set(sequences);
    result
}

impl<'a> TileScheduler<'a> {
    /// From sequences, each of which stands for `alike` of them.
    fn new(
        problem: &Problem,
        sequences: &'a mut [SequenceItems],
        alike: usize,
        (panel, max_item_rows): (usize, usize),
        threads: usize,
    ) -> Self {
        let key_heads = problem.key_heads;
        let pairs = |sequence: &SequenceItems| sequence.panels(panel) as u128 * sequence.keys.len() as u128;
        let groups = alike * key_heads;
        let all_pairs = sequences.iter().map(pairs).sum::<u128>() * groups as u128;
        for sequence in &mut *sequences {
            sequence.split(all_pairs);
        }

        let items_of =
            |sequence: &SequenceItems, item_rows: usize| groups * sequence.num_splits() * sequence.row_items(item_rows);
        let mut item_rows = max_item_rows.max(panel);
        let is_even = |items: usize, item_rows: usize| {
            let is_cut_even = |sequence: &SequenceItems| sequence.rows.is_multiple_of(item_rows);
            let are_equal = problem.mask == Mask::None && !problem.has_device_lengths();
            are_equal && items.is_multiple_of(threads) && sequences.iter().all(is_cut_even)
        };
        let is_enough = |item_rows: usize| {
            let items = sequences.iter().map(|sequence| items_of(sequence, item_rows)).sum::<usize>();
            items >= ITEMS_PER_THREAD * threads || is_even(items, item_rows)
        };
        while item_rows > panel && !is_enough(item_rows) && !sequences.iter().all(|sequence| sequence.is_decode) {
            item_rows = (item_rows / 2).next_multiple_of(panel);
        }

        let decoded = |sequence: &&SequenceItems| sequence.is_decode;
        let decode_items: usize = sequences.iter().filter(decoded).map(|sequence| items_of(sequence, item_rows)).sum();
        let interleaves = decode::interleaves_heads(problem);
        let fits = |heads: &usize| {
            interleaves && key_heads.is_multiple_of(*heads) && decode_items / heads >= DECODE_ITEMS_PER_THREAD * threads
        };
        let decode_heads = (2..=decode::MAX_HEADS).rev().find(fits).unwrap_or(1);
        let items_of = |sequence: &SequenceItems, item_rows: usize| {
            items_of(sequence, item_rows) / if sequence.is_decode { decode_heads } else { 1 }
        };

        sequences.sort_unstable_by_key(|sequence| (usize::MAX - sequence.largest_item(item_rows), sequence.index));
        let (mut items, mut split_rows, mut partials, mut work) = (0, 0, 0, 0_usize);
        for sequence in &mut *sequences {
            (sequence.items_before, sequence.split_rows_before, sequence.partials_before) =
                (items, split_rows, partials);
            items += items_of(sequence, item_rows);
            if sequence.num_splits() > 1 {
                split_rows += groups * sequence.rows;
                partials += groups * sequence.rows * sequence.num_splits();
            }
            let pairs = groups.saturating_mul(sequence.rows).saturating_mul(sequence.keys.len());
            work = work.saturating_add(pairs);
        }
        Self { sequences, key_heads, item_rows, decode_heads, items, work, split_rows, partials }
    }

    /// Mean number of pairs of a row and a key of an item.
    pub(crate) fn mean_item(&self) -> usize {
        self.work / self.items.max(1)
    }

    /// True if some item is decoded.
    pub(crate) fn has_decode(&self) -> bool {
        self.sequences.iter().any(|sequence| sequence.is_decode)
    }

    /// Number of rows of the largest item that is not decoded, if there is one.
    pub(crate) fn largest_rows(&self) -> Option<usize> {
        let blocked = self.sequences.iter().filter(|sequence| !sequence.is_decode);
        blocked.map(|sequence| sequence.largest_rows(self.item_rows)).max()
    }

    /// Items that a thread takes at once: several where all are decoded, unless some are far larger than others.
    pub(crate) fn loop_schedule(&self) -> LoopSchedule {
        let largest = self.sequences.iter().map(|sequence| sequence.largest_item(self.item_rows)).max().unwrap_or(0);
        let are_similar = largest <= self.mean_item().saturating_mul(MAX_GUIDED_ITEM);
        if are_similar && self.largest_rows().is_none() { LoopSchedule::Guided } else { LoopSchedule::Dynamic }
    }

    /// Item number `index`.
    pub(crate) fn item(&self, index: usize) -> Item {
        let (sequence, before) = self.sequence_of(index, |sequence| sequence.items_before);
        let (num_splits, row_items) = (sequence.num_splits(), sequence.row_items(self.item_rows));
        let index = index - before;
        let (group, row_item, split) = if sequence.is_decode {
            let blocks = self.key_heads / self.decode_heads;
            let (sequence, index) = (index / (blocks * num_splits), index % (blocks * num_splits));
            (sequence * self.key_heads + index % blocks * self.decode_heads, 0, index / blocks)
        } else {
            (index / num_splits / row_items, index / num_splits % row_items, index % num_splits)
        };
        let item_rows = sequence.largest_rows(self.item_rows);
        let first_row = (row_items - 1 - row_item) * item_rows;
        let first_key = sequence.keys.start + split * sequence.split_keys;
        let of_group = sequence.rows * num_splits;
        let first = sequence.partials_before + group * of_group;
        Item {
            sequence: sequence.index + group / self.key_heads,
            key_head: group % self.key_heads,
            heads: if sequence.is_decode { self.decode_heads } else { 1 },
            is_decode: sequence.is_decode,
            rows: first_row..sequence.rows.min(first_row + item_rows),
            keys: first_key..sequence.keys.end.min(first_key.saturating_add(sequence.split_keys)),
            partials: (num_splits > 1).then_some(Partial { first, of_group, num_splits, split }),
        }
    }

    /// Row number `index` of those whose splits are merged.
    pub(crate) fn split_row(&self, index: usize) -> SplitRow {
        let (sequence, before) = self.sequence_of(index, |sequence| sequence.split_rows_before);
        let (rows, num_splits) = (sequence.rows, sequence.num_splits());
        let (group, row) = ((index - before) / rows, (index - before) % rows);
        let first = sequence.partials_before + (group * rows + row) * num_splits;
        SplitRow {
            sequence: sequence.index + group / self.key_heads,
            key_head: group % self.key_heads,
            row,
            partials: first..first + num_splits,
        }
    }

    /// The last sequence that has no more than `index` before it, and those.
    fn sequence_of(&self, index: usize, before: impl Fn(&SequenceItems) -> usize) -> (&SequenceItems, usize) {
        let following = self.sequences.partition_point(|sequence| before(sequence) <= index);
        let sequence = &self.sequences[following - 1];
        (sequence, before(sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::group::Group;
    use flashcore_problem::{Alignment, DType, Layout, TensorView};
    use std::collections::{BTreeMap, BTreeSet};

    const PANEL_ROWS: usize = 32;

    fn shape(batch: usize, heads: (usize, usize), lengths: (usize, usize), is_causal: bool) -> Problem {
        let mut problem = Problem::new(batch, heads.0, lengths.0, 128, DType::F32);
        (problem.key_heads, problem.key_length) = (heads.1, lengths.1);
        if is_causal {
            problem.mask = Mask::Causal(Alignment::BottomRight);
        }
        problem
    }

    /// Inputs of which only lengths are looked at.
    fn no_inputs() -> InputViews<'static> {
        let nothing = TensorView { dtype: DType::F32, data: &[] };
        InputViews::new(nothing, nothing, nothing)
    }

    fn schedule<T>(
        problem: &Problem,
        inputs: &InputViews<'_>,
        threads: usize,
        work: impl FnOnce(&TileScheduler<'_>) -> T,
    ) -> T {
        with_schedule(problem, inputs, (PANEL_ROWS, MAX_ITEM_ROWS), threads, work)
    }

    fn items(problem: &Problem, inputs: &InputViews<'_>, threads: usize) -> Vec<Item> {
        schedule(problem, inputs, threads, |scheduler| {
            (0..scheduler.items).map(|index| scheduler.item(index)).collect()
        })
    }

    /// Pairs of a row and a key that an item attends.
    fn work(problem: &Problem, inputs: &InputViews<'_>, item: &Item) -> usize {
        let group = Group::new(problem, inputs, item.sequence, item.key_head);
        item.rows.clone().map(|row| group.attended_by(&(row..row + 1), &item.keys).0.len()).sum()
    }

    /// Every row is in items that have all of its keys, in order, and the partial results of its splits are found again.
    fn check_cover(problem: &Problem, inputs: &InputViews<'_>, threads: usize) {
        let sequence = |index: usize| inputs.sequence(problem, index);
        let rows_of = |index: usize| group_rows(problem, sequence(index).query_length);
        let keys_of = |index: usize| attended_keys(problem, &sequence(index));
        let mut seen: BTreeMap<_, Vec<(Range<usize>, Option<usize>)>> = BTreeMap::new();
        schedule(problem, inputs, threads, |scheduler| {
            for item in (0..scheduler.items).map(|index| scheduler.item(index)) {
                let most = if item.is_decode { 0 } else { scheduler.largest_rows().unwrap() };
                assert!(item.rows.len() <= most.max(decode::MAX_ROWS) && !item.rows.is_empty(), "{problem}: {item:?}");
                for (head, row) in (0..item.heads).flat_map(|head| item.rows.clone().map(move |row| (head, row))) {
                    let place = item.partials.as_ref().map(|split| split.place(head, row));
                    let splits = seen.entry((item.sequence, item.key_head + head, row)).or_default();
                    splits.push((item.keys.clone(), place));
                }
            }
            let all = (0..problem.batch).map(|index| rows_of(index) * problem.key_heads).sum::<usize>();
            assert_eq!(seen.len(), all, "{problem}");
            for (&(index, _, row), splits) in &seen {
                assert!(row < rows_of(index), "{problem}");
                let end = splits.iter().fold(keys_of(index).start, |end, (keys, _)| {
                    assert_eq!(keys.start, end, "{problem}: the splits of a row come in order");
                    keys.end
                });
                assert_eq!(end, keys_of(index).end, "{problem}");
            }
            let mut places = Vec::new();
            for row in (0..scheduler.split_rows).map(|index| scheduler.split_row(index)) {
                let splits = seen.remove(&(row.sequence, row.key_head, row.row)).unwrap();
                let stored: Vec<usize> = splits.into_iter().filter_map(|(_, place)| place).collect();
                assert_eq!(stored, row.partials.clone().collect::<Vec<_>>(), "{problem}");
                places.extend(stored);
            }
            assert!(seen.values().all(|splits| splits.len() == 1 && splits[0].1.is_none()), "{problem}");
            places.sort_unstable();
            assert_eq!(places, (0..scheduler.partials).collect::<Vec<_>>(), "{problem}");
        });
    }

    /// Heads that are adjacent share items as long as there are two for each thread.
    #[test]
    fn adjacent_heads_share_items() {
        let heads = |key_heads: usize, layout: Layout, threads: usize| {
            let mut problem = shape(8, (2 * key_heads, key_heads), (1, 4096), false);
            problem.layout = layout;
            check_cover(&problem, &no_inputs(), threads);
            schedule(&problem, &no_inputs(), threads, |scheduler| scheduler.decode_heads)
        };
        assert_eq!([1, 16, 32, 64, 128].map(|threads| heads(8, Layout::Bshd, threads)), [8, 8, 4, 2, 1]);
        assert_eq!([1, 6, 7, 11, 12, 32].map(|key_heads| heads(key_heads, Layout::Bshd, 1)), [1, 6, 7, 1, 6, 8]);
        assert_eq!(heads(8, Layout::Bhsd, 1), 1);
    }

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
                check_cover(&problem, &no_inputs(), threads);
            }
        }
    }

    /// Sequences of any lengths, some decoded, some split, some without rows or keys.
    #[test]
    fn items_of_ragged_sequences_cover_everything_once() {
        for is_causal in [false, true] {
            for heads in [(2, 2), (4, 1)] {
                let mut problem = shape(7, heads, (700, 20_000), is_causal);
                (problem.seqused_q, problem.seqused_k) = (true, true);
                let inputs = no_inputs()
                    .with_seqused_q(&[1, 0, 700, 2, 33, 1, 40])
                    .with_seqused_k(&[20_000, 300, 700, 0, 5000, 17, 9000]);
                for threads in [1, 2, 7, 64] {
                    check_cover(&problem, &inputs, threads);
                }
            }
        }
    }

    /// Bits of a result do not depend on the number of threads, so neither may the splits.
    #[test]
    fn splits_do_not_depend_on_threads() {
        for keys in [1, 511, 1024, 5000, 100_000] {
            for rows in [1, 8, 9, 32, 500, 4000] {
                let problem = shape(1, (2, 2), (rows, keys), false);
                let splits = |threads: usize| -> BTreeSet<(usize, bool)> {
                    let items = items(&problem, &no_inputs(), threads);
                    items.into_iter().map(|item| (item.keys.start, item.is_decode)).collect()
                };
                let one = splits(1);
                for threads in [2, 16, 128] {
                    assert_eq!(splits(threads), one, "{problem}");
                }
            }
        }
    }

    /// Keys that no row attends are cut off before the rest is split: a cache may be far larger than its content.
    #[test]
    fn only_attended_keys_are_cut() {
        let check = |problem: &Problem, seqused_k: Option<&[u32]>, expected: &[Range<usize>]| {
            let mut inputs = no_inputs();
            inputs.seqused_k = seqused_k;
            let items = items(problem, &inputs, 4);
            for (index, expected) in expected.iter().enumerate() {
                let keys: Vec<&Range<usize>> =
                    items.iter().filter(|item| item.sequence == index).map(|item| &item.keys).collect();
                let (first, last) = (keys.iter().map(|keys| keys.start).min(), keys.iter().map(|keys| keys.end).max());
                assert_eq!((first, last), (Some(expected.start), Some(expected.end)), "{problem}");
            }
        };
        let mut decode = shape(3, (8, 2), (1, 1 << 40), false);
        check(&decode, None, &[0..1 << 40, 0..1 << 40, 0..1 << 40]);
        decode.seqused_k = true;
        check(&decode, Some(&[5, 4000, 0]), &[0..5, 0..4000, 0..0]);
        check(&decode, Some(&[0, 0, 0]), &[0..0, 0..0, 0..0]);
        let alignment = Alignment::BottomRight;
        decode.mask = Mask::Window { left: Some(9), right: Some(0), alignment };
        check(&decode, Some(&[100, 4000, 0]), &[90..100, 3990..4000, 0..0]);
        (decode.mask, decode.seqused_k) = (Mask::Causal(Alignment::TopLeft), false);
        check(&decode, None, &[0..1, 0..1, 0..1]);
        check(&shape(1, (1, 1), (1000, 300), true), None, std::slice::from_ref(&(0..300)));
    }

    /// One long sequence among short ones is split over all threads, and comes first.
    #[test]
    fn a_long_sequence_among_short_ones_is_split() {
        let mut problem = shape(64, (8, 2), (1, 100_000), false);
        problem.seqused_k = true;
        let mut lengths = [100; 64];
        lengths[41] = 100_000;
        let inputs = no_inputs().with_seqused_k(&lengths);
        let items = items(&problem, &inputs, 16);
        let splits = items.iter().filter(|item| item.sequence == 41 && item.key_head == 0).count();
        assert!((100..=200).contains(&splits), "{splits} splits");
        assert!(items[..2 * splits].iter().all(|item| item.sequence == 41));
        assert_eq!(items.len(), 2 * (63 + splits));
    }

    /// Efficiency of threads that each take the next item as soon as they are done with one: the work of all over that of
    /// the busiest times their number.
    fn efficiency(problem: &Problem, threads: usize) -> (usize, f64, f64) {
        let (inputs, mut busy) = (no_inputs(), vec![0; threads]);
        let items = items(problem, &inputs, threads);
        let (mut total, mut largest) = (0, 0);
        for item in &items {
            let work = work(problem, &inputs, item);
            if let Some(next) = busy.iter_mut().min() {
                *next += work;
            }
            (total, largest) = (total + work, largest.max(work));
        }
        let longest = busy.into_iter().max().unwrap_or(0);
        let share = largest as f64 / total as f64;
        (items.len(), share, total as f64 / (longest * threads) as f64)
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
