//! A GQA group: the query rows of all query heads that read one key head of one batch, packed together (`pack_gqa`).

use crate::attend::scoring::Scoring;
use crate::microkernel::head::Head;
use flashcore_problem::{InputViews, Problem};
use std::ops::Range;

/// Query rows that share keys and values.
///
/// Rows are counted through the heads of the group, and only then along the query: row `r` is row `r / heads` of head
/// `r % heads`. Neighbours then attend almost the same keys, and a few query rows of many heads fill vectors.
pub(crate) struct Group<'a> {
    pub(crate) problem: &'a Problem,
    pub(crate) batch: usize,
    key_head: usize,
    /// Query heads of the group.
    heads: usize,
    key_length: usize,
    pub(crate) query: Head<'a>,
    pub(crate) key: Head<'a>,
    pub(crate) value: Head<'a>,
    pub(crate) scoring: Scoring<'a>,
}

impl<'a> Group<'a> {
    pub(crate) fn new(problem: &'a Problem, inputs: &'a InputViews<'a>, batch: usize, key_head: usize) -> Self {
        let strides = problem.strides();
        let heads = problem.query_heads / problem.key_heads;
        let first_head = key_head * heads;
        Self {
            problem,
            batch,
            key_head,
            heads,
            key_length: inputs.key_length(problem, batch),
            query: Head::of_group(inputs.query, problem.query_shape(), strides.query, batch, first_head, heads),
            key: Head::new(inputs.key, problem.key_shape(), strides.key, batch, key_head),
            value: Head::new(inputs.value, problem.value_shape(), strides.value, batch, key_head),
            scoring: Scoring::new(problem, inputs, batch),
        }
    }

    /// Number of rows of a group of this problem.
    pub(crate) fn row_count(problem: &Problem) -> usize {
        problem.query_length * (problem.query_heads / problem.key_heads)
    }

    /// Query head of a row of the group, and row of that head.
    pub(crate) fn place(&self, row: usize) -> (usize, usize) {
        (self.key_head * self.heads + row % self.heads, row / self.heads)
    }

    /// Query head of rows of the group, and rows of that head, if the group has one head.
    pub(crate) fn rows_of_one_head(&self, rows: &Range<usize>) -> Option<(usize, Range<usize>)> {
        (self.heads == 1).then(|| (self.key_head, rows.clone()))
    }

    /// Keys that a row attends. Neither end decreases from one row to the next.
    pub(crate) fn attended(&self, row: usize) -> Range<usize> {
        // A division takes as long as all else here.
        let row = if self.heads == 1 { row } else { row / self.heads };
        self.problem.attended_keys(self.key_length, row)
    }

    /// Keys of `keys` that any row of the group attends. The others are as good as absent.
    pub(crate) fn attended_of(&self, keys: &Range<usize>) -> Range<usize> {
        self.attended_by(&(0..Self::row_count(self.problem)), keys).0
    }

    /// Rows that attend some key: contiguous, since the keys that a row attends move along with it.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn attending_rows(&self) -> Range<usize> {
        let attends = |&row: &usize| !self.attended(row).is_empty();
        let mut rows = 0..Self::row_count(self.problem);
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
