//! Masks: causal, sliding-window and length masks, and `mask_mod` expressions, applied to the scores of a block.

use flashcore_ir::types::S32;
use flashcore_ir::{Builder, Compare, Reg};

use super::{Accumulator, ExpressionBlock, ROW_STEP};

/// Key mask of a lane's rows: a window around the position of each, of the keys there are.
///
/// Only partial blocks look at it, so it holds few registers and computes the rest each time.
#[derive(Debug, Clone)]
pub struct KeyMask {
    /// The position of the lane's first row among the keys. The others are [`ROW_STEP`] further on each, unless
    /// [`others`](Self::others) has them.
    pub position: Reg<S32>,
    /// The positions of the other rows, where they are not that far apart (`pack_gqa`).
    pub others: Vec<Reg<S32>>,
    /// The lane's first column.
    pub column: Reg<S32>,
    /// Keys before its position that a row attends; `None` is all.
    pub left: Option<Reg<S32>>,
    /// Keys after its position that a row attends; `None` is all.
    pub right: Option<Reg<S32>>,
    /// Keys of the batch.
    pub key_length: Reg<S32>,
    /// Rows of a lane.
    pub rows: u32,
}

impl KeyMask {
    /// Masks the partial block of `keys` keys that begins at `first_key`, by the window and by a `mask_mod`. All lanes of
    /// a warp do it.
    pub fn apply_with(
        &self,
        k: &mut Builder,
        scores: &Accumulator,
        first_key: Reg<S32>,
        keys: u32,
        expression: Option<ExpressionBlock<'_>>,
    ) {
        let Some(mut expression) = expression else { return self.apply(k, scores, first_key) };
        self.apply_window(k, scores, first_key, keys);
        expression.mask(k, scores);
    }

    /// Applies the window to a block that may be partial because of a `mask_mod` alone.
    pub fn apply_window(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>, keys: u32) {
        if self.left.is_none() && self.right.is_none() {
            // Most blocks that are partial by a `mask_mod` have all of their keys.
            let is_short = k.eval((first_key + keys as i32).gt(self.key_length));
            k.if_uniform(is_short, |k| self.apply(k, scores, first_key));
        } else {
            self.apply(k, scores, first_key);
        }
    }

    /// Sets to minus infinity the scores of the block from `first_key` on that lie outside of the window.
    pub fn apply(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>) {
        let first = k.add(first_key, self.column);
        let length = k.sub(self.key_length, first);
        let position = k.sub(self.position, first);
        let others: Vec<_> = self.others.iter().map(|other| k.sub(*other, first)).collect();
        // A row's position: a register, and the distance from it.
        let position_of = |row: u32| match row.checked_sub(1).and_then(|other| others.get(other as usize)) {
            Some(other) => (*other, 0),
            None => (position, (row * ROW_STEP) as i32),
        };
        let ends: Vec<_> = (0..self.rows)
            .map(|row| match self.right {
                Some(right) => {
                    let (position, distance) = position_of(row);
                    k.eval((position + (distance + 1) + right).min(length))
                }
                None => length,
            })
            .collect();
        let starts: Option<Vec<_>> = self.left.map(|left| {
            let before = |k: &mut Builder, position| k.sub(position, left);
            let first = before(k, position);
            (0..self.rows)
                .map(|row| match position_of(row) {
                    (other, 0) if row > 0 => before(k, other),
                    (_, distance) => k.add(first, distance),
                })
                .collect()
        });
        scores.each(|row, column, score| {
            let mut masked = k.compare(Compare::Le, ends[row], column as i32);
            if let Some(starts) = &starts {
                masked = k.eval(masked | starts[row].gt(column as i32));
            }
            k.set_where(score, masked, f32::NEG_INFINITY);
        });
    }
}
