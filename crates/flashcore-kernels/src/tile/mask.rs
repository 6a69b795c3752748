//! Keys taken out of the scores.

use flashcore_ir::types::S32;
use flashcore_ir::{Builder, Compare, Reg};

use super::ROW_STEP;
use super::expression::ExpressionOfTile;
use super::fragment::Accumulator;

/// Which keys each of a lane's rows attends: a window around its position, of the keys there are.
///
/// Only tiles that are partly masked look at it, so it holds few registers and computes the rest each time.
#[derive(Debug, Clone)]
pub struct KeyMask {
    /// The position of the lane's first row among the keys. The others are [`ROW_STEP`] further on each, unless
    /// [`others`](Self::others) says.
    pub position: Reg<S32>,
    /// The positions of the other rows, where they are not that far apart.
    pub others: Vec<Reg<S32>>,
    /// The lane's first column.
    pub column: Reg<S32>,
    /// Keys before its position that a row attends; `None` is all.
    pub left: Option<Reg<S32>>,
    /// Keys behind its position that a row attends; `None` is all.
    pub right: Option<Reg<S32>>,
    /// Keys there are.
    pub key_length: Reg<S32>,
    /// Rows of a lane.
    pub rows: u32,
}

impl KeyMask {
    /// Takes out what is masked of a tile of `keys` keys that begins at `first_key`, by the mask and by an expression. All
    /// lanes of a warp do it.
    pub fn apply_with(
        &self,
        k: &mut Builder,
        scores: &Accumulator,
        first_key: Reg<S32>,
        keys: u32,
        expression: Option<ExpressionOfTile<'_>>,
    ) {
        let Some(mut expression) = expression else { return self.apply(k, scores, first_key) };
        self.apply_where_cut(k, scores, first_key, keys);
        expression.mask(k, scores);
    }

    /// The same without the expression, for a tile that may be cut by that alone.
    pub fn apply_where_cut(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>, keys: u32) {
        if self.left.is_none() && self.right.is_none() {
            // Most tiles that an expression cuts have all of their keys.
            let behind = k.add(first_key, keys as i32);
            let has_fewer = k.compare(Compare::Gt, behind, self.key_length);
            k.if_uniform(has_fewer, |k| self.apply(k, scores, first_key));
        } else {
            self.apply(k, scores, first_key);
        }
    }

    /// Takes out the keys of the tile that begins at key `first_key` that a row does not attend.
    pub fn apply(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>) {
        let first = k.add(first_key, self.column);
        let length = k.sub(self.key_length, first);
        let position = k.sub(self.position, first);
        let others: Vec<_> = self.others.iter().map(|other| k.sub(*other, first)).collect();
        // Where a row's position is: from which register on, and how far.
        let place = |row: u32| match row.checked_sub(1).and_then(|other| others.get(other as usize)) {
            Some(other) => (*other, 0),
            None => (position, (row * ROW_STEP) as i32),
        };
        let ends: Vec<_> = (0..self.rows)
            .map(|row| match self.right {
                Some(right) => {
                    let (position, further) = place(row);
                    let position = k.add(position, further + 1);
                    let end = k.add(position, right);
                    k.min(end, length)
                }
                None => length,
            })
            .collect();
        let starts: Option<Vec<_>> = self.left.map(|left| {
            let before = |k: &mut Builder, position| k.sub(position, left);
            let first = before(k, position);
            (0..self.rows)
                .map(|row| match place(row) {
                    (other, 0) if row > 0 => before(k, other),
                    (_, further) => k.add(first, further),
                })
                .collect()
        });
        scores.each(|row, column, score| {
            let mut masked = k.compare(Compare::Le, ends[row], column as i32);
            if let Some(starts) = &starts {
                let before = k.compare(Compare::Gt, starts[row], column as i32);
                masked = k.or(masked, before);
            }
            k.set_where(score, masked, f32::NEG_INFINITY);
        });
    }
}
