//! A call of attention: work items computed, split-KV partials merged, rows normalized and written.

use super::output::OutputRows;
use super::parallel::{LoopSchedule, for_each};
use super::scheduler::{Item, TileScheduler, with_schedule};
use super::scratch::{Purpose, with_scratch};
use super::split_kv::Partials;
use super::workers::Workers;
use crate::attend::blocked::{AttendedPanel, MAX_LANES};
use crate::attend::decode::Following;
use crate::attend::group::Group;
use crate::attend::softmax::{Finished, finish};
use crate::attend::{blocked, decode};
use crate::microkernel::prefetch::CacheLines;
use crate::microkernel::{Decode, FusedForward};
use crate::planted::planted;
use crate::simd::real::Real;
use flashcore_problem::{InputViews, LseForm, OutputViews, Problem};
use std::array;
use std::ops::Range;
use zerocopy::FromBytes;

/// Computes a problem whose inputs and outputs validated.
pub(crate) fn attend<K: FusedForward + Decode>(
    kernel: &K,
    problem: &Problem,
    inputs: &InputViews<'_>,
    outputs: OutputViews<'_>,
) {
    if problem.output_shape().is_empty() {
        return;
    }
    let threads = Workers::find().count();
    with_schedule(problem, inputs, (K::PANEL_LANES, K::MAX_ITEM_ROWS), threads, |scheduler| {
        Call { kernel, problem, inputs, outputs: OutputRows::new(problem, outputs), scheduler }.run();
    });
}

/// One problem while it is computed.
struct Call<'a, K> {
    kernel: &'a K,
    problem: &'a Problem,
    inputs: &'a InputViews<'a>,
    outputs: OutputRows<'a>,
    scheduler: &'a TileScheduler<'a>,
}

impl<K: FusedForward + Decode> Call<'_, K> {
    fn run(&self) {
        let (scheduler, size) = (self.scheduler, self.problem.value_dim);
        if scheduler.partials == 0 {
            self.each_item(
                |group, _, row, row_max, row_sum, values| self.finish_row(group, row, row_max, row_sum, values),
                |group, _, panel| self.finish_panel(group, panel),
            );
            return;
        }
        let bytes = Partials::<K::Real>::scratch_bytes(scheduler.partials, size);
        with_scratch(Purpose::Partials, bytes, |mut arena| {
            let partials = Partials::<K::Real>::take(&mut arena, scheduler.partials, size);
            self.each_item(
                |group, place, row, row_max, row_sum, values| match place {
                    // SAFETY: each split of a row is of one item, and each item is computed once.
                    Some(place) => unsafe { partials.store(place, row_max, row_sum, values) },
                    None => self.finish_row(group, row, row_max, row_sum, values),
                },
                |group, item, panel| {
                    let Some(split) = &item.partials else { return self.finish_panel(group, panel) };
                    let factors = [K::Real::ONE; MAX_LANES];
                    self.kernel.transpose(panel.columns, &factors[..panel.row_sum.len()], panel.rows_scratch);
                    for (lane, (row, values)) in panel.rows.zip(panel.rows_scratch.chunks_exact(size)).enumerate() {
                        // SAFETY: each split of a row is of one item, and each item is computed once.
                        unsafe {
                            partials.store(split.place(0, row), panel.row_max[lane], panel.row_sum[lane], values);
                        };
                    }
                },
            );
            let rows = scheduler.split_rows;
            for_each(rows, scheduler.partials / rows * size, LoopSchedule::Dynamic, |index| {
                let row = scheduler.split_row(index);
                // SAFETY: each row is merged once, and the items are done.
                let (row_max, row_sum, values) = unsafe { partials.merge(&row.partials) };
                self.finish_row(&self.group(row.sequence, row.key_head), row.row, row_max, row_sum, values);
            });
        });
    }

    /// Computes all items. Hands each of their rows with the place of its partial result, if it has one, row max, row sum and
    /// weighted sum to `deliver_row`, or each row panel to `deliver_panel`.
    fn each_item(
        &self,
        deliver_row: impl Fn(&Group<'_>, Option<usize>, usize, K::Real, K::Real, &[K::Real]) + Sync,
        deliver_panel: impl Fn(&Group<'_>, &Item, AttendedPanel<'_, K::Real>) + Sync,
    ) {
        let (problem, scheduler) = (self.problem, self.scheduler);
        let work = scheduler.mean_item().saturating_mul(problem.head_dim + problem.value_dim);
        let of_decode =
            if scheduler.has_decode() { decode::scratch_bytes::<K::Real>(problem, scheduler.decode_heads) } else { 0 };
        let of_blocks = scheduler.largest_rows().map_or(0, |rows| blocked::scratch_bytes::<K>(problem, rows));
        for_each(scheduler.items, work, scheduler.loop_schedule(), |index| {
            let item = scheduler.item(index);
            let groups: [_; decode::MAX_HEADS] =
                array::from_fn(|head| (head < item.heads).then(|| self.group(item.sequence, item.key_head + head)));
            let Some(group) = &groups[0] else { return };
            with_scratch(Purpose::Item, of_decode.max(of_blocks), |mut arena| {
                let (rows, keys) = (item.rows.clone(), item.keys.clone());
                self.kernel.on_thread(|| {
                    if item.is_decode {
                        decode::attend_rows(
                            self.kernel,
                            &groups,
                            keys,
                            self.following(index + 1),
                            &mut arena,
                            |head, row, row_max, row_sum, values| {
                                let place = item.partials.as_ref().map(|split| split.place(head, row));
                                if let Some(group) = &groups[head] {
                                    deliver_row(group, place, row, row_max, row_sum, values);
                                }
                            },
                        );
                    } else {
                        let output_lines = |rows: &Range<usize>| self.output_lines(group, &item, rows);
                        blocked::attend_rows(self.kernel, group, rows, keys, &mut arena, output_lines, |panel| {
                            deliver_panel(group, &item, panel);
                        });
                    }
                });
            });
        });
    }

    /// Keys and values of an item, if there is one and it is decoded.
    fn following(&self, index: usize) -> Option<Following<'_>> {
        let item = (index < self.scheduler.items).then(|| self.scheduler.item(index)).filter(|item| item.is_decode)?;
        let Group { key, value, .. } = self.group(item.sequence, item.key_head);
        Some(Following { key, value, first_key: item.keys.start })
    }

    fn group(&self, sequence: usize, key_head: usize) -> Group<'_> {
        Group::new(self.problem, self.inputs, sequence, key_head)
    }

    /// Cache lines that rows will be written to when they have attended their last keys; none unless they are contiguous.
    fn output_lines(&self, group: &Group<'_>, item: &Item, rows: &Range<usize>) -> CacheLines {
        let rows = group.rows_of_one_head(rows).filter(|_| item.partials.is_none());
        rows.and_then(|(batch, head, rows)| self.outputs.addresses(batch, head, &rows))
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
                places[lane] = self.lse(finished.as_ref(), row_max, row_sum);
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
        let dtype = self.problem.dtypes().output;
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
        let (batch, head, rows) = group.rows_of_one_head(&panel.rows)?;
        if rows.len() != panel.row_sum.len() {
            return None;
        }
        // SAFETY: the caller vouches for the rows.
        let (bytes, lse) = unsafe { self.outputs.contiguous_rows(batch, head, rows)? };
        Some((head, bytes, lse))
    }

    /// Writes the output of a row whose keys have all been attended.
    fn finish_row(&self, group: &Group<'_>, row: usize, row_max: K::Real, row_sum: K::Real, values: &[K::Real]) {
        let (head, row) = group.place(row);
        let finished = finish(row_max, row_sum, group.scoring.sink(head));
        let (batch, row) = group.sequence.query_row(row);
        // SAFETY: each row is finished once, and sequences do not overlap.
        let (bytes, lse) = unsafe { self.outputs.row(batch, head, row) };
        if let Some(finished) = &finished {
            self.kernel.store(self.problem.dtypes().output, values, finished.factor, bytes);
        } else {
            bytes.fill(0);
        }
        if let Some(place) = lse {
            *place = self.lse(finished.as_ref(), row_max, row_sum);
        }
    }

    /// Log-sum-exp that is written for a finished row, in the form that the problem wants; minus infinity if nothing was
    /// attended.
    fn lse(&self, finished: Option<&Finished<K::Real>>, row_max: K::Real, row_sum: K::Real) -> f32 {
        let LseForm { base, includes_sink, .. } = self.problem.lse_form;
        let includes_sink = planted!(LseWithSink: true, includes_sink);
        let of_keys = if includes_sink { None } else { finish(row_max, row_sum, None) };
        let finished = if includes_sink { finished } else { of_keys.as_ref() };
        finished.map_or(f32::NEG_INFINITY, |finished| finished.lse(base).to_f64() as f32)
    }
}
