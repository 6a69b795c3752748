//! Masks: the keys that a query row attends.

use std::fmt;
use std::ops::Range;

/// The keys that each query row attends, apart from the batch's key length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Every key.
    None,
    /// The keys up to and including the row's own position.
    Causal(Alignment),
    /// The keys from `left` before to `right` after the row's own position, both inclusive; `None` is no limit.
    ///
    /// `left: Some(w)` with `right: Some(0)` attends `w + 1` keys. Hugging Face's `sliding_window = w` counts the row
    /// itself, so it is `left: Some(w - 1)` here.
    Window {
        /// Number of attended keys before the row's own position.
        left: Option<usize>,
        /// Number of attended keys after the row's own position.
        right: Option<usize>,
        /// The alignment of the row's own position.
        alignment: Alignment,
    },
}

/// The position of query row `i` among the keys when there are not as many keys as queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// Row `i` stands at key `i`: the first query is aligned with the first key, as in `PyTorch`.
    TopLeft,
    /// Row `i` stands at key `i + key_length - query_length`: the last query is aligned with the last key, as in
    /// `FlashAttention` and in decoding with a KV cache. The key length is the batch's own where there is one.
    BottomRight,
}

impl Alignment {
    /// The position of a query row among the keys, less the row.
    pub fn offset(self, query_length: usize, key_length: usize) -> isize {
        match self {
            Self::TopLeft => 0,
            Self::BottomRight => signed(key_length) - signed(query_length),
        }
    }
}

impl Mask {
    /// The alignment of positions. Without a mask only `ALiBi` depends on it, and there it is bottom-right, as in
    /// `FlashAttention`.
    pub fn alignment(self) -> Alignment {
        match self {
            Self::None => Alignment::BottomRight,
            Self::Causal(alignment) | Self::Window { alignment, .. } => alignment,
        }
    }

    /// The mask as a window: the number of keys attended to the left and to the right of the row's own position.
    pub fn limits(self) -> (Option<usize>, Option<usize>) {
        match self {
            Self::None => (None, None),
            Self::Causal(_) => (None, Some(0)),
            Self::Window { left, right, .. } => (left, right),
        }
    }

    /// The keys that query row `row` attends, of `key_length` keys; empty when there are none.
    pub(crate) fn attended_keys(self, query_length: usize, key_length: usize, row: usize) -> Range<usize> {
        let offset = self.alignment().offset(query_length, key_length);
        let (left, right) = self.limits();
        window(signed(row).saturating_add(offset), left, right, key_length)
    }

    /// The query rows that attend key `key`, of `query_length` rows: the same windows, with their sides exchanged.
    pub(crate) fn attending_rows(self, query_length: usize, key_length: usize, key: usize) -> Range<usize> {
        let offset = self.alignment().offset(query_length, key_length);
        let (left, right) = self.limits();
        window(signed(key).saturating_sub(offset), right, left, query_length)
    }
}

/// The indices from `before` before a position to `after` after it, of `length`; `None` is no limit.
fn window(position: isize, before: Option<usize>, after: Option<usize>, length: usize) -> Range<usize> {
    let length = signed(length);
    let first = before.map_or(0, |before| position.saturating_sub(signed(before)));
    let end = after.map_or(length, |after| position.saturating_add(signed(after)).saturating_add(1));
    let first = first.clamp(0, length) as usize;
    let end = end.clamp(0, length) as usize;
    first..end.max(first)
}

/// Lengths beyond `isize::MAX` do not pass validation; a window that large is no limit.
fn signed(length: usize) -> isize {
    isize::try_from(length).unwrap_or(isize::MAX)
}

impl fmt::Display for Alignment {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::TopLeft => "top-left",
            Self::BottomRight => "bottom-right",
        })
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |limit: Option<usize>| limit.map_or_else(|| "-".to_owned(), |keys| keys.to_string());
        match self {
            Self::None => formatter.write_str("unmasked"),
            Self::Causal(alignment) => write!(formatter, "causal {alignment}"),
            Self::Window { left, right, alignment } => {
                write!(formatter, "window {}..{} {alignment}", side(*left), side(*right))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Alignment::{BottomRight, TopLeft};
    use super::*;

    /// The attended keys of every row, drawn: `x` is attended.
    fn check(mask: Mask, query_length: usize, key_length: usize, expected: &[&str]) {
        let drawn: Vec<String> = (0..query_length)
            .map(|row| {
                let keys = mask.attended_keys(query_length, key_length, row);
                (0..key_length).map(|key| if keys.contains(&key) { 'x' } else { '.' }).collect()
            })
            .collect();
        assert_eq!(drawn, expected, "{mask} of {query_length} queries and {key_length} keys");
    }

    fn between(left: impl Into<Option<usize>>, right: impl Into<Option<usize>>, alignment: Alignment) -> Mask {
        Mask::Window { left: left.into(), right: right.into(), alignment }
    }

    #[test]
    fn causal_alignments_differ_when_lengths_do() {
        check(Mask::None, 2, 3, &["xxx", "xxx"]);
        check(Mask::Causal(TopLeft), 3, 3, &["x..", "xx.", "xxx"]);
        check(Mask::Causal(BottomRight), 3, 3, &["x..", "xx.", "xxx"]);
        check(Mask::Causal(TopLeft), 2, 4, &["x...", "xx.."]);
        check(Mask::Causal(BottomRight), 2, 4, &["xxx.", "xxxx"]);
        check(Mask::Causal(TopLeft), 4, 2, &["x.", "xx", "xx", "xx"]);
        check(Mask::Causal(BottomRight), 4, 2, &["..", "..", "x.", "xx"]);
    }

    #[test]
    fn windows_are_inclusive_on_both_sides() {
        check(between(1, 0, TopLeft), 4, 4, &["x...", "xx..", ".xx.", "..xx"]);
        check(between(0, 1, TopLeft), 4, 4, &["xx..", ".xx.", "..xx", "...x"]);
        check(between(0, 0, BottomRight), 2, 4, &["..x.", "...x"]);
        check(between(1, None, BottomRight), 2, 4, &[".xxx", "..xx"]);
        check(between(None, 1, TopLeft), 2, 4, &["xx..", "xxx."]);
        check(between(0, 0, TopLeft), 4, 2, &["x.", ".x", "..", ".."]);
        check(between(usize::MAX, usize::MAX, BottomRight), 2, 2, &["xx", "xx"]);
    }
    /// Rows of a key are the transpose of keys of a row, for every mask of every small shape.
    #[test]
    fn both_directions_agree() {
        let limits = [None, Some(0), Some(1), Some(3), Some(usize::MAX)];
        let mut masks = vec![Mask::None, Mask::Causal(TopLeft), Mask::Causal(BottomRight)];
        for (left, right) in limits.iter().flat_map(|left| limits.map(|right| (*left, right))) {
            masks.extend([TopLeft, BottomRight].map(|alignment| between(left, right, alignment)));
        }
        for (mask, queries, keys) in
            masks.iter().flat_map(|mask| (0..9).flat_map(move |queries| (0..9).map(move |keys| (mask, queries, keys))))
        {
            let attended: Vec<_> = (0..queries).map(|row| mask.attended_keys(queries, keys, row)).collect();
            for key in 0..keys {
                let rows: Vec<_> = (0..queries).filter(|row| attended[*row].contains(&key)).collect();
                let range: Vec<_> = mask.attending_rows(queries, keys, key).collect();
                assert_eq!(range, rows, "key {key} of {mask}, {queries} queries and {keys} keys");
            }
        }
    }
}
