//! Window: the keys that query rows attend, and the query rows that attend keys, by one definition.
//!
//! A row attends the keys from some before its position to some after it, of those there are. So a key is attended by the rows
//! from some before its own position to some after it, with the sides exchanged: [`Window::transposed`].

use flashcore_ir::types::{S32, U32};
use flashcore_ir::{Builder, Reg};

/// A window around the position of each index of one side, query rows or keys: indices of the other side.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// The position of index 0.
    pub offset: Reg<S32>,
    /// Indices that share a position, where heads are packed (`pack_gqa`).
    pub packed: Option<Reg<U32>>,
    /// Indices before the position; `None` is all.
    pub before: Option<Reg<S32>>,
    /// Indices after the position; `None` is all.
    pub after: Option<Reg<S32>>,
    /// Indices of the other side.
    pub length: Reg<S32>,
}

impl Window {
    /// The window of the other side, which has `length` indices, the rows of one head.
    #[must_use]
    pub fn transposed(self, k: &mut Builder, length: Reg<S32>) -> Self {
        Self { offset: k.neg(self.offset), packed: None, before: self.after, after: self.before, length }
    }

    /// The position of an index.
    pub fn position(&self, k: &mut Builder, index: Reg<U32>) -> Reg<S32> {
        let index = self.packed.map_or(index, |packed| k.div(index, packed));
        k.eval(index.signed() + self.offset)
    }

    /// The first index that `index` attends.
    pub fn first(&self, k: &mut Builder, index: Reg<U32>) -> Reg<S32> {
        let Some(before) = self.before else { return k.copy(0i32) };
        k.section("window", |k| {
            let position = self.position(k, index);
            k.eval((position - before).max(0).min(self.length))
        })
    }

    /// One past the last index that `index` attends; never before the first.
    pub fn end(&self, k: &mut Builder, index: Reg<U32>) -> Reg<S32> {
        let Some(after) = self.after else { return self.length };
        k.section("window", |k| {
            let position = self.position(k, index);
            k.eval((position + after + 1).min(self.length).max(0))
        })
    }

    /// The range that some of the indices from `first` to `last` attend: the first, rounded down to a multiple of `tile`, and
    /// one past the last.
    pub fn attended_by_some(&self, k: &mut Builder, [first, last]: [Reg<U32>; 2], tile: u32) -> [Reg<S32>; 2] {
        let begin = self.first(k, first);
        let begin = k.eval((begin.unsigned() / tile * tile).signed());
        [begin, self.end(k, last)]
    }

    /// The range that all of the indices from `first` to `last` attend: the first, unless that is 0, and one past the last.
    pub fn attended_by_all(&self, k: &mut Builder, [first, last]: [Reg<U32>; 2]) -> (Option<Reg<S32>>, Reg<S32>) {
        let begin = self.before.map(|_| self.first(k, last));
        (begin, self.end(k, first))
    }
}
