//! A GQA group: the query rows of all query heads that read one key head of one sequence, packed together (`pack_gqa`).

use crate::attend::scales::GroupScales;
use crate::attend::scoring::Scoring;
use crate::microkernel::head::Head;
use crate::planted::planted;
use flashcore_problem::{InputViews, Problem, Sequence};
use std::ops::Range;

/// Query rows that share keys and values.
///
/// Rows are counted through the heads of the group, and only then along the query: row `r` is row `r / heads` of head
/// `r % heads`. Neighbours then attend almost the same keys, and a few query rows of many heads fill vectors.
pub(crate) struct Group<'a> {
    pub(crate) problem: &'a Problem,
    pub(crate) sequence: Sequence<'a>,
    key_head: usize,
    /// Query heads of the group.
    heads: usize,
    pub(crate) query: Head<'a>,
    pub(crate) key: Head<'a>,
    pub(crate) value: Head<'a>,
    pub(crate) scoring: Scoring<'a>,
}

impl<'a> Group<'a> {
    /// The group of a sequence, by its index in the batch, and a key head.
    pub(crate) fn new(problem: &'a Problem, inputs: &'a InputViews<'a>, sequence: usize, key_head: usize) -> Self {
        let strides = problem.strides();
        let heads = problem.query_heads / problem.key_heads;
        let sequence = inputs.sequence(problem, sequence);
        let (query, key, value) = (problem.query_shape(), problem.key_shape(), problem.value_shape());
        let keys_of = planted!(SequencesPast4096: inputs.sequence(problem, sequence.index % 4096), sequence);
        let of_keys = |tensor, storage| Head::of_keys(tensor, storage, &keys_of, key_head);
        Self {
            problem,
            sequence,
            key_head,
            heads,
            query: Head::of_queries(inputs.query, (query, strides.query), &sequence, key_head * heads, heads),
            key: of_keys(inputs.key, (key, strides.key)),
            value: of_keys(inputs.value, (value, strides.value)),
            scoring: Scoring::new(problem, inputs, &sequence, GroupScales::new(problem, inputs, sequence, key_head)),
        }
    }

    /// Number of rows.
    pub(crate) fn row_count(&self) -> usize {
        self.sequence.query_length * self.heads
    }

    /// Query head of a row of the group, and row of that head.
    pub(crate) fn place(&self, row: usize) -> (usize, usize) {
        (self.key_head * self.heads + row % self.heads, row / self.heads)
    }

    /// Rows of the group as rows of a batch and head of the output, if the group has one head.
    pub(crate) fn rows_of_one_head(&self, rows: &Range<usize>) -> Option<(usize, usize, Range<usize>)> {
        (self.heads == 1).then(|| {
            let (batch, first) = self.sequence.query_row(rows.start);
            (batch, self.key_head, first..first + rows.len())
        })
    }

    /// Keys that a row attends. Neither end decreases from one row to the next.
    pub(crate) fn attended(&self, row: usize) -> Range<usize> {
        // A division takes as long as all else here.
        let row = if self.heads == 1 { row } else { row / self.heads };
        let keys = self.sequence.attended_keys(self.problem, row);
        planted!(WindowOneKeyLate: if keys.start > 0 { (keys.start + 1).min(keys.end)..keys.end } else { keys }, keys)
    }

    /// Keys of `keys` that any row of the group attends. The others are as good as absent.
    pub(crate) fn attended_of(&self, keys: &Range<usize>) -> Range<usize> {
        match self.row_count() {
            0 => keys.start..keys.start,
            rows => self.attended_by(&(0..rows), keys).0,
        }
    }

    /// Rows that attend some key: contiguous, since the keys that a row attends move along with it.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn attending_rows(&self) -> Range<usize> {
        let attends = |&row: &usize| !self.attended(row).is_empty();
        let mut rows = 0..self.row_count();
        match (rows.clone().find(attends), rows.rfind(attends)) {
            (Some(first), Some(last)) => first..last + 1,
            _ => 0..0,
        }
    }

    /// Keys of `keys` that any of the rows attends, and those that all of them attend.
    pub(crate) fn attended_by(&self, rows: &Range<usize>, keys: &Range<usize>) -> (Range<usize>, Range<usize>) {
        let (first, last) = (self.attended(rows.start), self.attended(rows.end - 1));
        let cut = |range: Range<usize>| {
            let start = range.start.clamp(keys.start, keys.end);
            start..range.end.clamp(start, keys.end)
        };
        let any = cut(first.start..last.end);
        let all = last.start.clamp(any.start, any.end)..first.end.clamp(any.start, any.end);
        (any, all)
    }
}
