//! Keys taken out of the scores.

use flashcore_ir::types::S32;
use flashcore_ir::{Builder, Compare, Reg};

use super::fragment::Accumulator;

/// For each of a lane's two rows, how many keys from the first on it attends.
#[derive(Debug, Clone, Copy)]
pub struct KeyMask {
    limits: [Reg<S32>; 2],
}

impl KeyMask {
    /// Rows that attend all keys before `limits`, counted from this lane's first column of key 0.
    pub const fn new(limits: [Reg<S32>; 2]) -> Self {
        Self { limits }
    }

    /// Takes out the keys of the tile that begins at key `first_key` that a row does not attend.
    pub fn apply(&self, k: &mut Builder, scores: &Accumulator, first_key: Reg<S32>) {
        let left = self.limits.map(|limit| k.sub(limit, first_key));
        scores.each(|row, column, score| {
            let masked = k.compare(Compare::Le, left[row], column as i32);
            k.set_where(score, masked, f32::NEG_INFINITY);
        });
    }
}
