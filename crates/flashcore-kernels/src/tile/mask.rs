//! Keys taken out of the scores.

use flashcore_ir::types::S32;
use flashcore_ir::{Builder, Compare, Reg};

use super::ROW_STEP;
use super::fragment::Accumulator;

/// Which keys each of a lane's rows attends: a window around its position, of the keys there are.
///
/// Only tiles that are partly masked look at it, so it holds few registers and computes the rest each time.
#[derive(Debug, Clone, Copy)]
pub struct KeyMask {
    /// The position of the lane's first row among the keys. The others are [`ROW_STEP`] further on each.
    pub position: Reg<S32>,
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
    /// Takes out the keys of the tile that begins at key `first_key` that a row does not attend.
    pub fn apply(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>) {
        let first = k.add(first_key, self.column);
        let length = k.sub(self.key_length, first);
        let position = k.sub(self.position, first);
        let ends: Vec<_> = (0..self.rows)
            .map(|row| match self.right {
                Some(right) => {
                    let position = k.add(position, (row * ROW_STEP) as i32 + 1);
                    let end = k.add(position, right);
                    k.min(end, length)
                }
                None => length,
            })
            .collect();
        let starts: Option<Vec<_>> = self.left.map(|left| {
            let first = k.sub(position, left);
            (0..self.rows).map(|row| k.add(first, (row * ROW_STEP) as i32)).collect()
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
