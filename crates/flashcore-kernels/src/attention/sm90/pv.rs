//! P · V of a consumer warpgroup, by element type: how weights become P, and how products reach the output.
//!
//! The mainloop is the same for all: it says when P · V of a block starts and ends, and when the row max has changed.

use core::marker::PhantomData;

use flashcore_ir::builder::Adds;
use flashcore_ir::types::{F32, Pred, S32, U32};
use flashcore_ir::{Builder, Reg};

use super::Cta;
use crate::attention::TileContext;
use crate::element::Element;
use crate::primitives::{
    Accumulator, HalfTypes, OnlineSoftmax, RowScale, ScorePositions, SwizzledTile, WgmmaA, WgmmaFragments, WgmmaTypes,
};

/// P · V: the registers that it takes beside the output, which last from tile to tile.
pub(crate) trait PvStrategy: Sized {
    /// Pairs of the output in memory.
    type Output: Element;
    /// Element types of a product.
    type Types: WgmmaTypes;
    /// State of a tile: scales of its tensors.
    type Scales;

    fn new(k: &mut Builder, cta: &Cta) -> Self;

    /// The types of Q and K.
    fn query_key_types(&self) -> Self::Types;

    /// The scales of a tile, and the softmax of its rows under them.
    fn load_scales(k: &mut Builder, softmax: OnlineSoftmax, tile: &TileRows<'_>) -> (OnlineSoftmax, Self::Scales);

    /// Multiplies the products of a block of Q · K by what of the scales is not part of the softmax scale.
    fn scale_scores(k: &mut Builder, scales: &Self::Scales, scores: &Accumulator, block: &BlockKeys<'_>);

    /// Rounds the weights of a block to P.
    fn round(&self, k: &mut Builder, scales: &Self::Scales, weights: &Accumulator, block: &BlockKeys<'_>);

    /// Rescales the output to the new row max, unless that is done as products are added.
    fn rescale_output(&self, k: &mut Builder, softmax: &OnlineSoftmax, output: &Accumulator, row_scale: &RowScale) {
        softmax.rescale_output(k, output, row_scale);
    }

    /// Starts P · V of a block, whose V is in the stage at `values`.
    fn start(&self, k: &mut Builder, values: Reg<U32>, output: &Accumulator);

    /// Keeps the row scale of the block whose P · V is under way, before that of the next replaces it.
    fn keep_row_scale(&self, _: &mut Builder, _: &RowScale) {}

    /// Adds to the output what P · V has computed elsewhere. The product that [`start`](Self::start) started has ended;
    /// `release` releases V.
    fn finish(
        &self,
        k: &mut Builder,
        _: &Self::Scales,
        _: Reg<U32>,
        _: &Accumulator,
        release: impl FnOnce(&mut Builder),
    ) {
        release(k);
    }

    /// Multiplies the output of all blocks by what of the scales is left to the end.
    fn scale_output(k: &mut Builder, scales: &Self::Scales, softmax: &OnlineSoftmax, output: &Accumulator);
}

/// The rows of a tile, as its scales are found.
pub(crate) struct TileRows<'a> {
    pub(super) context: &'a TileContext,
    pub(super) positions: &'a ScorePositions,
    /// The scale that is left to the softmax.
    pub(super) softmax_scale: Option<Reg<F32>>,
    /// False if no row attends any key.
    pub(super) nonempty: Reg<Pred>,
}

/// A block of keys, as scales of tokens are found.
pub(crate) struct BlockKeys<'a> {
    pub(super) positions: &'a ScorePositions,
    pub(super) first_key: Reg<S32>,
}

/// P · V of 16-bit elements: products are added to the output as they are computed.
pub(super) struct PlainPv<T: Element> {
    p: WgmmaFragments<T>,
    value: SwizzledTile,
}

impl<T: Element> PvStrategy for PlainPv<T> {
    type Output = T;
    type Types = HalfTypes<T>;
    type Scales = ();

    fn new(k: &mut Builder, cta: &Cta) -> Self {
        Self { p: k.section("p", |k| WgmmaFragments::<T>::unset(k, cta.config.tile_n)), value: cta.shared.value }
    }

    fn query_key_types(&self) -> HalfTypes<T> {
        HalfTypes(PhantomData)
    }

    fn load_scales(_: &mut Builder, softmax: OnlineSoftmax, _: &TileRows<'_>) -> (OnlineSoftmax, ()) {
        (softmax, ())
    }

    fn scale_scores(_: &mut Builder, (): &(), _: &Accumulator, _: &BlockKeys<'_>) {}

    fn round(&self, k: &mut Builder, (): &(), weights: &Accumulator, _: &BlockKeys<'_>) {
        self.p.round(k, weights);
    }

    fn start(&self, k: &mut Builder, values: Reg<U32>, output: &Accumulator) {
        let values = self.value.mn_major(k, values);
        output.multiply_async(k, HalfTypes(PhantomData), WgmmaA::Registers(&self.p), &values, Adds::Add);
    }

    fn scale_output(_: &mut Builder, (): &(), _: &OnlineSoftmax, _: &Accumulator) {}
}
