//! Sequences: the rows and keys of each entry of a batch, rectangular, packed (varlen) or paged.
//!
//! A batch has `batch` sequences. Where a sequence begins and how long it is follows the precedence of `FlashAttention`:
//!
//! | | offset | length |
//! |---|---|---|
//! | query | `cu_seqlens_q[b]`, else 0 of batch `b` | `seqused_q[b]`, else the difference of `cu_seqlens_q`, else `query_length` |
//! | key | `cu_seqlens_k[b] + leftpad_k[b]`, else `leftpad_k[b]` of batch `kv_batch_idx[b]`, else `b` | `seqused_k[b]`, else the difference of `cu_seqlens_k`, else `key_length`; less `leftpad_k[b]` |
//!
//! `query_length` and `key_length` are upper bounds on the lengths. With a page table, row `j` of a sequence is row
//! `j % page_size` of page `page_table[b][j / page_size]`.

use crate::{InputViews, Problem};
use core::ops::Range;

/// A paged KV cache: key and value are `num_pages` pages of `page_size` rows, and a page table says which pages a sequence
/// has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PagedKv {
    /// Rows of a page.
    pub page_size: usize,
    /// Pages of the cache.
    pub num_pages: usize,
    /// Entries of a row of the page table.
    pub table_width: usize,
    /// Entries from one row of the page table to the next.
    pub table_stride: usize,
}

/// Rows of all sequences together, where they are packed or a cache has batches of its own.
pub type TotalRows = Option<usize>;

/// The pages of a KV cache, where it is paged.
pub type Paging = Option<PagedKv>;

impl PagedKv {
    /// A cache whose page table is contiguous.
    pub const fn new(page_size: usize, num_pages: usize, table_width: usize) -> Self {
        Self { page_size, num_pages, table_width, table_stride: table_width }
    }
}

impl Problem {
    /// True if rows or keys of a sequence are not simply those of its batch: packed, paged, or with lengths of its own.
    pub const fn is_ragged(&self) -> bool {
        self.total_q.is_some()
            || self.total_k.is_some()
            || self.paged.is_some()
            || self.seqused_q
            || self.leftpad_k
            || self.kv_batch.is_some()
    }

    /// True if sequences have lengths that only a launch knows.
    pub const fn has_device_lengths(&self) -> bool {
        self.total_q.is_some() || self.total_k.is_some() || self.seqused_q || self.seqused_k || self.leftpad_k
    }

    /// Rows of the page table, and batches of a cache that is not paged.
    pub fn cache_batches(&self) -> usize {
        self.kv_batch.unwrap_or(self.batch)
    }

    /// Entries from the first of the page table to the last; 0 where there is none.
    pub fn table_entries(&self) -> usize {
        let Some(paged) = self.paged else { return 0 };
        let rows = self.cache_batches().saturating_sub(1);
        rows.saturating_mul(paged.table_stride).saturating_add(paged.table_width)
    }
}

/// One sequence of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Index in the batch, which bias and expressions see.
    pub index: usize,
    /// Query rows.
    pub query_length: usize,
    /// Keys.
    pub key_length: usize,
    /// The batch of the query tensor.
    query_batch: usize,
    /// The first row in that batch.
    first_row: usize,
    /// The batch of the key tensor, unless it is paged.
    key_batch: usize,
    /// The first row in that batch, or in the pages.
    first_key: usize,
    /// The page table of the sequence, and the rows of a page.
    pages: Option<(&'a [i32], usize)>,
}

impl<'a> Sequence<'a> {
    /// The page table of the sequence, the rows of a page, and the row of the first key in the pages; `None` where the
    /// cache is not paged.
    pub const fn pages(&self) -> Option<(&'a [i32], usize, usize)> {
        match self.pages {
            Some((table, page_size)) => Some((table, page_size, self.first_key)),
            None => None,
        }
    }

    /// Batch and row of a query row in query, output and LSE.
    pub const fn query_row(&self, row: usize) -> (usize, usize) {
        (self.query_batch, self.first_row + row)
    }

    /// Batch (or page) and row of a key in key and value.
    pub fn key_row(&self, key: usize) -> (usize, usize) {
        let row = self.first_key + key;
        match self.pages {
            // Tables are validated: an entry that a sequence uses is a page of the cache.
            Some((table, page_size)) => (table[row / page_size] as usize, row % page_size),
            None => (self.key_batch, row),
        }
    }

    /// Number of keys from `key` on whose rows follow one another in memory: to the end of the page or of the sequence.
    pub const fn contiguous_keys(&self, key: usize) -> usize {
        let left = self.key_length - key;
        match self.pages {
            Some((_, page_size)) => {
                let in_page = page_size - (self.first_key + key) % page_size;
                if in_page < left { in_page } else { left }
            }
            None => left,
        }
    }

    /// The keys that a query row attends, as far as the mask says. Always a range.
    pub fn attended_keys(&self, problem: &Problem, row: usize) -> Range<usize> {
        problem.mask.attended_keys(self.query_length, self.key_length, row)
    }

    /// The position of a query row among the keys, less the row.
    pub fn position_offset(&self, problem: &Problem) -> isize {
        problem.mask.alignment().offset(self.query_length, self.key_length)
    }

    /// The keys that any query row attends: from the first to past the last.
    pub fn attended_range(&self, problem: &Problem) -> Range<usize> {
        let Some(last_row) = self.query_length.checked_sub(1) else { return 0..0 };
        self.attended_keys(problem, 0).start..self.attended_keys(problem, last_row).end
    }
}

impl<'a> InputViews<'a> {
    /// A sequence of the batch, from inputs that validate.
    pub fn sequence(&self, problem: &Problem, index: usize) -> Sequence<'a> {
        let at = |lengths: Option<&'a [u32]>| lengths.map(|lengths| lengths[index] as usize);
        let packed = |offsets: Option<&'a [u32]>| {
            offsets.map(|offsets| (offsets[index] as usize, (offsets[index + 1] - offsets[index]) as usize))
        };
        let (queries, keys) = (packed(self.cu_seqlens_q), packed(self.cu_seqlens_k));
        let leftpad = at(self.leftpad_k).unwrap_or(0);
        let capacity = keys.map_or(problem.key_length, |(_, length)| length);
        let cache_batch = at(self.kv_batch_idx).unwrap_or(index);
        let pages = problem
            .paged
            .zip(self.page_table)
            .map(|(paged, table)| (&table[cache_batch * paged.table_stride..][..paged.table_width], paged.page_size));
        Sequence {
            index,
            query_length: at(self.seqused_q)
                .unwrap_or_else(|| queries.map_or(problem.query_length, |(_, length)| length)),
            key_length: at(self.seqused_k).unwrap_or(capacity) - leftpad,
            query_batch: if queries.is_some() { 0 } else { index },
            first_row: queries.map_or(0, |(first, _)| first),
            key_batch: if keys.is_some() { 0 } else { cache_batch },
            first_key: keys.map_or(0, |(first, _)| first) + leftpad,
            pages,
        }
    }

    /// All sequences of the batch.
    pub fn sequences(&self, problem: &Problem) -> impl Iterator<Item = Sequence<'a>> {
        let (views, problem) = (*self, problem.clone());
        (0..problem.batch).map(move |index| views.sequence(&problem, index))
    }
}
