//! From a problem to work items, and from what they give to the output.

use crate::group::Group;
use crate::microkernel::{Lines, Microkernel};
use crate::output::{Disjoint, OutputRows};
use crate::real::Real;
use crate::scratch::{Purpose, arena_bytes, with_scratch};
use crate::softmax::{Finished, correction, finish};
use crate::split::{Item, Split};
use crate::tiles::{AttendedStrip, MOST_LANES};
use crate::workers::Workers;
use crate::{linger, stream, tiles};
use flashcore_problem::{InputViews, OutputViews, Problem};
use rayon::Scope;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use zerocopy::FromBytes;

/// Multiply-adds, at least, that another thread is woken for: a few microseconds of work.
const SMALLEST_SHARE: usize = 1 << 18;

/// Computes a problem whose inputs and outputs validated.
pub(crate) fn attend<K: Microkernel>(kernel: &K, problem: &Problem, inputs: &InputViews<'_>, outputs: OutputViews<'_>) {
    if problem.output_shape().is_empty() {
        return;
    }
    let call = Call {
        kernel,
        problem,
        inputs,
        outputs: OutputRows::new(problem, outputs),
        split: Split::new(problem, inputs, K::STRIP, K::MOST_ITEM_ROWS, Workers::find().count()),
    };
    let chunks = call.split.chunks();
    if chunks == 1 {
        call.each_item(
            |group, _, row, maximum, sum, values| call.finish_row(group, row, maximum, sum, values),
            |group, _, strip| call.finish_strip(group, strip),
        );
        return;
    }
    let (groups, rows) = (call.split.groups, Group::row_count(problem));
    let parts = groups * rows * chunks;
    let size = problem.value_dim;
    let bytes = 2 * arena_bytes::<K::Real>(parts) + arena_bytes::<K::Real>(parts * size);
    with_scratch(Purpose::Partials, bytes, |mut arena| {
        let partials = Partials {
            maximum: Disjoint::new(arena.take::<K::Real>(parts)),
            sum: Disjoint::new(arena.take::<K::Real>(parts)),
            values: Disjoint::new(arena.take::<K::Real>(parts * size)),
            size,
        };
        let keep = |item: &Item, row: usize, maximum: K::Real, sum: K::Real, values: &[K::Real]| {
            // SAFETY: each chunk of a row is of one item, and each item is computed once.
            let part = unsafe { partials.get((item.group * rows + row) * chunks + item.chunk, 1) };
            (part.maximum[0], part.sum[0]) = (maximum, sum);
            part.values.copy_from_slice(values);
        };
        call.each_item(
            |_, item, row, maximum, sum, values| keep(item, row, maximum, sum, values),
            |_, item, strip| {
                let factors = [K::Real::ONE; MOST_LANES];
                kernel.transpose(strip.columns, &factors[..strip.sum.len()], strip.room);
                for (lane, (row, values)) in strip.rows.zip(strip.room.chunks_exact(size)).enumerate() {
                    keep(item, row, strip.maximum[lane], strip.sum[lane], values);
                }
            },
        );
        for_each(groups * rows, chunks * size, Order::OneByOne, |index| {
            // SAFETY: each row is put together once, and the items are done.
            let mut parts = unsafe { partials.get(index * chunks, chunks) };
            let (maximum, sum) = parts.put_together();
            call.finish_row(&call.group(index / rows), index % rows, maximum, sum, &parts.values[..size]);
        });
    });
}

/// One problem while it is computed.
struct Call<'a, K> {
    kernel: &'a K,
    problem: &'a Problem,
    inputs: &'a InputViews<'a>,
    outputs: OutputRows<'a>,
    split: Split,
}

impl<K: Microkernel> Call<'_, K> {
    /// Computes all items. Hands each of their rows with its maximum, sum and weighted sum to `deliver_row`, or each strip
    /// of rows to `deliver_strip`.
    fn each_item(
        &self,
        deliver_row: impl Fn(&Group<'_>, &Item, usize, K::Real, K::Real, &[K::Real]) + Sync,
        deliver_strip: impl Fn(&Group<'_>, &Item, AttendedStrip<'_, K::Real>) + Sync,
    ) {
        let (problem, split) = (self.problem, &self.split);
        let (rows, keys) = (Group::row_count(problem), split.keys.len());
        let columns = problem.head_dim + problem.value_dim;
        let work = split.groups.saturating_mul(rows).saturating_mul(keys).saturating_mul(columns) / split.items();
        let bytes = if split.is_streamed {
            stream::scratch_bytes::<K::Real>(problem)
        } else {
            tiles::scratch_bytes::<K>(problem, split.largest_rows())
        };
        let order = if split.is_streamed { Order::InRuns } else { Order::OneByOne };
        for_each(split.items(), work, order, |index| {
            let item = split.item(index);
            let group = self.group(item.group);
            with_scratch(Purpose::Item, bytes, |mut arena| {
                let (rows, keys) = (item.rows.clone(), item.keys.clone());
                self.kernel.on_thread(|| {
                    if split.is_streamed {
                        stream::attend_rows(self.kernel, &group, keys, &mut arena, |row, maximum, sum, values| {
                            deliver_row(&group, &item, row, maximum, sum, values);
                        });
                    } else {
                        let place_of = |rows: &Range<usize>| self.place_of(&group, rows);
                        tiles::attend_rows(self.kernel, &group, rows, keys, &mut arena, place_of, |strip| {
                            deliver_strip(&group, &item, strip);
                        });
                    }
                });
            });
        });
    }

    fn group(&self, index: usize) -> Group<'_> {
        Group::new(self.problem, self.inputs, index / self.problem.key_heads, index % self.problem.key_heads)
    }

    /// Where rows will be written when they have met their last keys, if that is one place.
    fn place_of(&self, group: &Group<'_>, rows: &Range<usize>) -> Lines {
        let rows = group.rows_of_one_head(rows).filter(|_| self.split.chunks() == 1);
        rows.and_then(|(head, rows)| self.outputs.addresses(group.batch, head, &rows)).map_or(Lines::NONE, Lines::new)
    }

    /// Writes the output of a strip of rows whose keys have all been attended: at once where they lie one behind the other.
    fn finish_strip(&self, group: &Group<'_>, strip: AttendedStrip<'_, K::Real>) {
        let (lanes, value_dim) = (strip.sum.len(), self.problem.value_dim);
        let mut factors = [K::Real::ONE; MOST_LANES];
        // SAFETY: each row is finished once.
        let Some((head, bytes, mut lse)) = (unsafe { self.neighbours(group, &strip) }) else {
            self.kernel.transpose(strip.columns, &factors[..lanes], strip.room);
            for (lane, (row, values)) in strip.rows.zip(strip.room.chunks_exact(value_dim)).enumerate() {
                self.finish_row(group, row, strip.maximum[lane], strip.sum[lane], values);
            }
            return;
        };
        let sink = group.scoring.sink(head);
        let mut attend_nothing = [false; MOST_LANES];
        for (lane, (&maximum, &sum)) in strip.maximum.iter().zip(strip.sum).enumerate() {
            let finished = finish(maximum, sum, sink);
            if let Some(places) = &mut lse {
                places[lane] = lse_of(finished.as_ref());
            }
            attend_nothing[lane] = finished.is_none();
            factors[lane] = finished.map_or(K::Real::ZERO, |finished| finished.factor);
        }
        let write = |rows: &mut [K::Real]| {
            self.kernel.transpose(strip.columns, &factors[..lanes], rows);
            for (row, &attends_nothing) in rows.chunks_exact_mut(value_dim).zip(&attend_nothing) {
                if attends_nothing {
                    row.fill(K::Real::ZERO);
                }
            }
        };
        let dtype = self.problem.dtype;
        if dtype == K::Real::DTYPE
            && let Ok(rows) = <[K::Real]>::mut_from_bytes(bytes)
        {
            write(rows);
        } else {
            write(strip.room);
            self.kernel.store(dtype, strip.room, K::Real::ONE, bytes);
        }
    }

    /// The head of a strip and where its rows are written, with their log-sum-exps where those are wanted, if every lane is
    /// a row, and they lie one behind the other.
    ///
    /// # Safety
    ///
    /// No row of the strip is in use.
    #[expect(clippy::type_complexity, reason = "two places are written")]
    #[expect(clippy::mut_from_ref, reason = "callers vouch that no row is in use")]
    unsafe fn neighbours(
        &self,
        group: &Group<'_>,
        strip: &AttendedStrip<'_, K::Real>,
    ) -> Option<(usize, &mut [u8], Option<&mut [f32]>)> {
        let (head, rows) = group.rows_of_one_head(&strip.rows)?;
        if rows.len() != strip.sum.len() {
            return None;
        }
        // SAFETY: the caller vouches for the rows.
        let (bytes, lse) = unsafe { self.outputs.neighbours(group.batch, head, rows)? };
        Some((head, bytes, lse))
    }

    /// Writes the output of a row whose keys have all been attended.
    fn finish_row(&self, group: &Group<'_>, row: usize, maximum: K::Real, sum: K::Real, values: &[K::Real]) {
        let (head, row) = group.place(row);
        let finished = finish(maximum, sum, group.scoring.sink(head));
        // SAFETY: each row is finished once.
        let (bytes, lse) = unsafe { self.outputs.row(group.batch, head, row) };
        if let Some(finished) = &finished {
            self.kernel.store(self.problem.dtype, values, finished.factor, bytes);
        } else {
            bytes.fill(0);
        }
        if let Some(place) = lse {
            *place = lse_of(finished.as_ref());
        }
    }
}

/// What is written for a row; minus infinity where nothing was attended.
fn lse_of<R: Real>(finished: Option<&Finished<R>>) -> f32 {
    finished.map_or(f32::NEG_INFINITY, |finished| finished.lse().to_f64() as f32)
}

/// What the chunks of all rows have given: those of a row lie one beside the other, in order.
struct Partials<'a, R> {
    maximum: Disjoint<'a, R>,
    sum: Disjoint<'a, R>,
    values: Disjoint<'a, R>,
    /// Elements of `values` for each chunk of a row.
    size: usize,
}

/// Some of them.
struct Parts<'a, R> {
    maximum: &'a mut [R],
    sum: &'a mut [R],
    values: &'a mut [R],
}

impl<R: Real> Partials<'_, R> {
    /// # Safety
    ///
    /// None of them is in use.
    unsafe fn get(&self, first: usize, count: usize) -> Parts<'_, R> {
        // SAFETY: the caller vouches that nobody else uses these parts.
        unsafe {
            Parts {
                maximum: self.maximum.part(first, count),
                sum: self.sum.part(first, count),
                values: self.values.part(first * self.size, count * self.size),
            }
        }
    }
}

impl<R: Real> Parts<'_, R> {
    /// Returns maximum and sum of the whole row; its weighted sum is left in the first part.
    fn put_together(&mut self) -> (R, R) {
        let maximum = self.maximum.iter().fold(R::NEGATIVE_INFINITY, |largest, &other| largest.maximum(other));
        let (first, others) = self.values.split_at_mut(self.values.len() / self.sum.len());
        let factor = correction(self.maximum[0], maximum);
        let mut sum = self.sum[0] * factor;
        for element in &mut *first {
            *element *= factor;
        }
        for (part, values) in others.chunks_exact(first.len()).enumerate() {
            let factor = correction(self.maximum[part + 1], maximum);
            sum += self.sum[part + 1] * factor;
            for (element, &value) in first.iter_mut().zip(values) {
                *element += value * factor;
            }
        }
        (maximum, sum)
    }
}

/// Calls `work` with each index below `count`, on as many [threads](Workers) as it is worth.
///
/// Threads take indices in order from one counter, as `order` says. A calling thread that is none of the pool takes part in place of one of
/// them: were it to wait, as many threads as it asks for would have to be woken, and a scheduler that puts two of them on
/// the core it still sees busy leaves another idle for as long as a small problem takes.
///
/// Nothing is allocated inside of the pool, where a thread that comes late, or never, is not waited for. From outside,
/// rayon allocates a few bytes for each helper.
pub(crate) fn for_each(count: usize, multiply_adds: usize, order: Order, work: impl Fn(usize) + Sync) {
    let worth = (count.saturating_mul(multiply_adds) / SMALLEST_SHARE).max(1);
    let workers = Workers::find();
    let threads = workers.count().min(count).min(worth);
    if threads <= 1 {
        return (0..count).for_each(work);
    }
    let next = AtomicUsize::new(0);
    let take = || {
        let after = |first: usize| (first < count).then(|| first + order.run(count - first, threads));
        while let Ok(first) = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after) {
            (first..after(first).unwrap_or(count)).for_each(&work);
        }
    };
    let done = AtomicUsize::new(0);
    match workers {
        Workers::Alone => return take(),
        Workers::Current => return (0..threads).into_par_iter().with_max_len(1).for_each(|_| take()),
        Workers::Global => rayon::in_place_scope(|scope| share(scope, threads, &done, &take)),
        Workers::Own(pool) => pool.in_place_scope(|scope| share(scope, threads, &done, &take)),
    }
    linger::keep_awake(threads - 1, workers);
}

/// Calls `take` on so many threads, the calling one included, which waits for the others awake: they are about to be done,
/// and a thread that sleeps takes as long to wake as a small problem.
fn share<'scope>(scope: &Scope<'scope>, threads: usize, done: &'scope AtomicUsize, take: &'scope (impl Fn() + Sync)) {
    for _ in 1..threads {
        scope.spawn(|_| {
            take();
            done.fetch_add(1, Ordering::Release);
        });
    }
    take();
    linger::wait_until(|| done.load(Ordering::Acquire) == threads - 1);
}

/// How indices are handed out to threads.
#[derive(Clone, Copy)]
pub(crate) enum Order {
    /// One after the other, to whoever asks next.
    OneByOne,
    /// Several neighbours at once, fewer and fewer, to threads that are faster when they read on where they have read. What
    /// is asked for ahead of time is then what the same thread needs next.
    InRuns,
}

impl Order {
    /// How many indices are handed out at once, when so many are left.
    fn run(self, left: usize, threads: usize) -> usize {
        match self {
            Self::OneByOne => 1,
            Self::InRuns => (left / (RUNS_PER_THREAD * threads)).max(1),
        }
    }
}

/// Runs that each thread would have if all were as long as the first: so many that threads rarely wait for the last.
const RUNS_PER_THREAD: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    /// Every index once, on any number of threads, in either order.
    #[test]
    fn every_index_is_handed_out_once() {
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for order in [Order::OneByOne, Order::InRuns] {
                for count in [0, 1, 5, 256, 1000] {
                    let taken: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    let take = |index: usize| _ = taken[index].fetch_add(1, Ordering::Relaxed);
                    pool.install(|| for_each(count, SMALLEST_SHARE, order, take));
                    for_each(count, SMALLEST_SHARE, order, take);
                    assert!(taken.iter().all(|times| times.load(Ordering::Relaxed) == 2), "{count} on {threads}");
                }
            }
        }
    }

    /// 256 items on 8 threads: the first runs are of 8, the last of 1.
    #[test]
    fn runs_get_shorter() {
        let runs: Vec<usize> = [256, 255, 128, 63, 1].map(|left| Order::InRuns.run(left, 8)).to_vec();
        assert_eq!(runs, [8, 7, 4, 1, 1]);
        assert_eq!(Order::OneByOne.run(256, 8), 1);
    }
}
