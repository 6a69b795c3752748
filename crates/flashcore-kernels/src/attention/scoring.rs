//! Scoring of a lane's rows: score terms and `score_mod` on the products of a block, and the `mask_mod`.

use flashcore_ir::types::{F32, S32};
use flashcore_ir::{Builder, Reg};

use super::TileContext;
use crate::primitives::{Accumulator, AddedTerm, ExpressionCode, ScorePositions, ScoreTerms};

/// Score terms and masks of a lane's rows.
pub(crate) struct Scoring {
    pub(crate) positions: ScorePositions,
    /// None where scores are only scaled, which the softmax does, or get an added term.
    terms: Option<ScoreTerms>,
    added: Option<AddedTerm>,
    pub(crate) mask_mod: Option<ExpressionCode>,
}

impl Scoring {
    pub(crate) fn new(k: &mut Builder, context: &TileContext, positions: ScorePositions) -> Self {
        let (row, rows) = (positions.rows[0], positions.rows.len());
        let has_terms = context.specialization.has_terms();
        let terms = has_terms.then(|| k.section("score terms", |k| context.score_terms(k, row, rows)));
        let added = context.added_term(k, row, rows);
        let mask_mod = context.mask_mod(k, row, rows);
        Self { positions, terms, added, mask_mod }
    }

    /// The scale that is left to the softmax.
    pub(crate) fn softmax_scale(&self, context: &TileContext) -> Option<Reg<F32>> {
        if self.terms.is_none() { Some(context.parameters.scale_log2) } else { None }
    }

    /// Applies the terms to the products of the block of `tile_m` rows and `keys` keys from `first_key` on.
    pub(crate) fn apply_terms(
        &self,
        k: &mut Builder,
        context: &TileContext,
        scores: &Accumulator,
        first_key: Reg<S32>,
        (tile_m, keys): (u32, u32),
    ) {
        if let Some(terms) = &self.terms {
            k.section("score terms", |k| terms.apply(k, scores, &self.positions, first_key));
        }
        if let Some(added) = &self.added {
            k.section("score terms", |k| {
                let key = k.add(first_key, self.positions.column);
                let block = context.score_block(k, tile_m, first_key, keys);
                added.apply(k, scores, key, block);
            });
        }
    }
}
