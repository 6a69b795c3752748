//! A call of attention: work items computed, split-KV partials merged, rows normalized and written.

use super::output::OutputRows;
use super::parallel::{LoopSchedule, for_each};
use super::scheduler::{Item, TileScheduler};
use super::scratch::{Purpose, with_scratch};
use super::split_kv::Partials;
use super::workers::Workers;
use crate::attend::blocked::{AttendedPanel, MAX_LANES};
use crate::attend::group::Group;
use crate::attend::softmax::{Finished, finish};
use crate::attend::{blocked, decode};
use crate::microkernel::Microkernel;
use crate::microkernel::prefetch::CacheLines;
use crate::simd::real::Real;
use flashcore_problem::{InputViews, OutputViews, Problem};
use std::ops::Range;
use zerocopy::FromBytes;

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
        scheduler: TileScheduler::new(problem, inputs, K::PANEL_ROWS, K::MAX_ITEM_ROWS, Workers::find().count()),
    };
    let num_splits = call.scheduler.num_splits();
    if num_splits == 1 {
        call.each_item(
            |group, _, row, row_max, row_sum, values| call.finish_row(group, row, row_max, row_sum, values),
            |group, _, panel| call.finish_panel(group, panel),
        );
        return;
    }
    let rows = Group::row_count(problem);
    let (all_rows, size) = (call.scheduler.groups * rows, problem.value_dim);
    let bytes = Partials::<K::Real>::scratch_bytes(all_rows, num_splits, size);
    with_scratch(Purpose::Partials, bytes, |mut arena| {
        let partials = Partials::<K::Real>::take(&mut arena, all_rows, num_splits, size);
        let store = |item: &Item, row: usize, row_max: K::Real, row_sum: K::Real, values: &[K::Real]| {
            // SAFETY: each split of a row is of one item, and each item is computed once.
            unsafe { partials.store(item.group * rows + row, item.split, row_max, row_sum, values) };
        };
        call.each_item(
            |_, item, row, row_max, row_sum, values| store(item, row, row_max, row_sum, values),
            |_, item, panel| {
                let factors = [K::Real::ONE; MAX_LANES];
                kernel.transpose(panel.columns, &factors[..panel.row_sum.len()], panel.rows_scratch);
                for (lane, (row, values)) in panel.rows.zip(panel.rows_scratch.chunks_exact(size)).enumerate() {
                    store(item, row, panel.row_max[lane], panel.row_sum[lane], values);
                }
            },
        );
        for_each(all_rows, num_splits * size, LoopSchedule::Dynamic, |index| {
            // SAFETY: each row is merged once, and the items are done.
            let (row_max, row_sum, values) = unsafe { partials.merge(index) };
            call.finish_row(&call.group(index / rows), index % rows, row_max, row_sum, values);
        });
    });
}

/// One problem while it is computed.
struct Call<'a, K> {
    kernel: &'a K,
    problem: &'a Problem,
    inputs: &'a InputViews<'a>,
    outputs: OutputRows<'a>,
    scheduler: TileScheduler,
}

impl<K: Microkernel> Call<'_, K> {
    /// Computes all items. Hands each of their rows with its row max, row sum and weighted sum to `deliver_row`, or each row
    /// panel to `deliver_panel`.
    fn each_item(
        &self,
        deliver_row: impl Fn(&Group<'_>, &Item, usize, K::Real, K::Real, &[K::Real]) + Sync,
        deliver_panel: impl Fn(&Group<'_>, &Item, AttendedPanel<'_, K::Real>) + Sync,
    ) {
        let (problem, scheduler) = (self.problem, &self.scheduler);
        let (rows, keys) = (Group::row_count(problem), scheduler.keys.len());
        let columns = problem.head_dim + problem.value_dim;
        let work =
            scheduler.groups.saturating_mul(rows).saturating_mul(keys).saturating_mul(columns) / scheduler.items();
        let (bytes, schedule) = if scheduler.is_decode {
            (decode::scratch_bytes::<K::Real>(problem), LoopSchedule::Guided)
        } else {
            (blocked::scratch_bytes::<K>(problem, scheduler.largest_rows()), LoopSchedule::Dynamic)
        };
        for_each(scheduler.items(), work, schedule, |index| {
            let item = scheduler.item(index);
            let group = self.group(item.group);
            with_scratch(Purpose::Item, bytes, |mut arena| {
                let (rows, keys) = (item.rows.clone(), item.keys.clone());
                self.kernel.on_thread(|| {
                    if scheduler.is_decode {
                        decode::attend_rows(self.kernel, &group, keys, &mut arena, |row, row_max, row_sum, values| {
                            deliver_row(&group, &item, row, row_max, row_sum, values);
                        });
                    } else {
                        let output_lines = |rows: &Range<usize>| self.output_lines(&group, rows);
                        blocked::attend_rows(self.kernel, &group, rows, keys, &mut arena, output_lines, |panel| {
                            deliver_panel(&group, &item, panel);
                        });
                    }
                });
            });
        });
    }

    fn group(&self, index: usize) -> Group<'_> {
        Group::new(self.problem, self.inputs, index / self.problem.key_heads, index % self.problem.key_heads)
    }

    /// Cache lines that rows will be written to when they have attended their last keys; none unless they are contiguous.
    fn output_lines(&self, group: &Group<'_>, rows: &Range<usize>) -> CacheLines {
        let rows = group.rows_of_one_head(rows).filter(|_| self.scheduler.num_splits() == 1);
        rows.and_then(|(head, rows)| self.outputs.addresses(group.batch, head, &rows))
            .map_or(CacheLines::NONE, CacheLines::new)
    }

    /// Writes the output of a row panel whose keys have all been attended: at once where its rows are contiguous.
    fn finish_panel(&self, group: &Group<'_>, panel: AttendedPanel<'_, K::Real>) {
        let (lanes, value_dim) = (panel.row_sum.len(), self.problem.value_dim);
        let mut factors = [K::Real::ONE; MAX_LANES];
        // SAFETY: each row is finished once.
        let Some((head, bytes, mut lse)) = (unsafe { self.contiguous_rows(group, &panel) }) else {
            self.kernel.transpose(panel.columns, &factors[..lanes], panel.rows_scratch);
            for (lane, (row, values)) in panel.rows.zip(panel.rows_scratch.chunks_exact(value_dim)).enumerate() {
                self.finish_row(group, row, panel.row_max[lane], panel.row_sum[lane], values);
            }
            return;
        };
        let sink = group.scoring.sink(head);
        let mut attend_nothing = [false; MAX_LANES];
        for (lane, (&row_max, &row_sum)) in panel.row_max.iter().zip(panel.row_sum).enumerate() {
            let finished = finish(row_max, row_sum, sink);
            if let Some(places) = &mut lse {
                places[lane] = lse_of(finished.as_ref());
            }
            attend_nothing[lane] = finished.is_none();
            factors[lane] = finished.map_or(K::Real::ZERO, |finished| finished.factor);
        }
        let write = |rows: &mut [K::Real]| {
            self.kernel.transpose(panel.columns, &factors[..lanes], rows);
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
            write(panel.rows_scratch);
            self.kernel.store(dtype, panel.rows_scratch, K::Real::ONE, bytes);
        }
    }

    /// Head of a row panel and the memory of its rows, with their log-sum-exps where those are wanted, if every lane is a row
    /// and the rows are contiguous.
    ///
    /// # Safety
    ///
    /// No row of the panel is in use.
    #[expect(clippy::type_complexity, reason = "two places are written")]
    #[expect(clippy::mut_from_ref, reason = "callers vouch that no row is in use")]
    unsafe fn contiguous_rows(
        &self,
        group: &Group<'_>,
        panel: &AttendedPanel<'_, K::Real>,
    ) -> Option<(usize, &mut [u8], Option<&mut [f32]>)> {
        let (head, rows) = group.rows_of_one_head(&panel.rows)?;
        if rows.len() != panel.row_sum.len() {
            return None;
        }
        // SAFETY: the caller vouches for the rows.
        let (bytes, lse) = unsafe { self.outputs.contiguous_rows(group.batch, head, rows)? };
        Some((head, bytes, lse))
    }

    /// Writes the output of a row whose keys have all been attended.
    fn finish_row(&self, group: &Group<'_>, row: usize, row_max: K::Real, row_sum: K::Real, values: &[K::Real]) {
        let (head, row) = group.place(row);
        let finished = finish(row_max, row_sum, group.scoring.sink(head));
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

/// Log-sum-exp that is written for a row; minus infinity if nothing was attended.
fn lse_of<R: Real>(finished: Option<&Finished<R>>) -> f32 {
    finished.map_or(f32::NEG_INFINITY, |finished| finished.lse().to_f64() as f32)
}
