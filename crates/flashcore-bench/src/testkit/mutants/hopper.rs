//! Bugs in the Hopper kernel: mostly of TMA, mbarriers and wgmma.

use flashcore_ir::{Accumulation, Compare, Major, Op, Operand, Space};

use super::catalogue::{Mutation, is_compare, is_mul, is_select, mutations, set_compare, unguard};
use super::edit::{Find, change, drop};

/// All of them.
pub const HOPPER: &[Mutation] = mutations! {
    // Copies and their barriers
    "hopper": "no-expect-tx", "there is no expect_tx for the bytes of a tile of keys" =>
        |kernel| change(kernel, Find::every(&["producer", "keys"], is_expect_tx), |op| {
            if let Op::MbarrierArriveExpect { target, .. } = op {
                let count = Operand::Constant(1);
                *op = Op::MbarrierArrive { space: Space::Shared, count, target: *target };
            }
        });
    "hopper": "too-few-bytes-expected", "expect_tx has 16 bytes too few" =>
        |kernel| change(kernel, Find::every(&["producer", "values"], is_expect_tx), |op| {
            if let Op::MbarrierArriveExpect { bytes: Operand::Constant(bytes), .. } = op { *bytes -= 16; }
        });
    "hopper": "keys-overwritten", "keys are loaded without waiting until the stage is empty" =>
        |kernel| drop(kernel, Find::every(&["producer", "keys", "producer acquire"], is_mbarrier_wait));
    "hopper": "values-overwritten", "values are loaded without waiting until the stage is empty" =>
        |kernel| drop(kernel, Find::every(&["producer", "values", "producer acquire"], is_mbarrier_wait));
    "hopper": "query-overwritten", "the next query is loaded without waiting until its stage is empty" =>
        |kernel| drop(kernel, Find::every(&["producer", "query", "producer acquire"], is_mbarrier_wait));
    "hopper": "wrong-phase", "the producer waits for the phase before" =>
        |kernel| change(kernel, Find::every(&["producer", "keys", "producer acquire"], |op| matches!(op, Op::Xor { .. })), |op| {
            if let Op::Xor { b, .. } = op { *b = Operand::Constant(0); }
        });
    "hopper": "keys-read-too-early", "keys are multiplied before they have arrived" =>
        |kernel| drop(kernel, Find::nth(&["full block", "consumer wait"], is_mbarrier_wait, 0));
    "hopper": "values-read-too-early", "values are multiplied before they have arrived" =>
        |kernel| drop(kernel, Find::nth(&["full block", "consumer wait"], is_mbarrier_wait, 1));
    "hopper": "query-read-too-early", "the query is multiplied before it has arrived" =>
        |kernel| drop(kernel, Find::every(&["query", "consumer wait"], is_mbarrier_wait));
    "hopper": "keys-not-released", "a tile of keys is never released" =>
        |kernel| drop(kernel, Find::nth(&["full block", "consumer release"], is_arrival, 0));
    "hopper": "query-not-released", "the query is never released" =>
        |kernel| drop(kernel, Find::every(&["tma store wait", "consumer release"], is_arrival));
    "hopper": "one-lane-releases", "one lane releases a stage before the others have read it" =>
        |kernel| drop(kernel, Find::every(&["full block", "consumer release"], |op| matches!(op, Op::WarpSync {})));
    "hopper": "barrier-for-one-warp-less", "a stage is empty when one warp still reads it" =>
        |kernel| change(kernel, Find::every(&["barriers"], |op| matches!(op, Op::MbarrierInit { .. })), |op| {
            if let Op::MbarrierInit { count: Operand::Constant(count @ 2..), .. } = op { *count -= 1; }
        });
    "hopper": "barriers-not-published", "copies use barriers that they need not see yet" =>
        |kernel| drop(kernel, Find::every(&["barriers"], |op| matches!(op, Op::FenceMbarrierInit {})));
    "hopper": "stage-stands-still", "the readers stay in one stage of keys" =>
        |kernel| drop(kernel, Find::nth(&["full block", "advance"], |op| matches!(op, Op::Add { .. }), 0));

    // Keys that CTAs share
    "hopper": "partials-read-before-they-are-stored", "the first CTA does not wait for the partial of the other" =>
        |kernel| drop(kernel, Find::nth(&["reduce cluster"], is_cluster_wait, 1));
    "hopper": "sent-to-a-cta-that-has-not-begun", "a CTA sends without knowing that the other is there" =>
        |kernel| drop(kernel, Find::nth(&["reduce cluster"], is_cluster_wait, 0));
    "hopper": "a-cta-sends-nothing", "what the other CTA has is not sent" =>
        |kernel| drop(kernel, Find::every(&["reduce cluster"], |op| matches!(op, Op::Store { space: Space::Cluster, .. })));
    "hopper": "both-ctas-store", "the other CTA stores its part of the rows as well" =>
        |kernel| change(kernel, Find::every(&["is first"], |op| matches!(op, Op::Or { .. })), |op| {
            if let Op::Or { b, .. } = op { *b = Operand::Constant(0); }
        });

    // Products under way
    "hopper": "scores-read-too-early", "scores are read while they are multiplied" =>
        |kernel| drop(kernel, Find::nth(&["full block"], is_product_wait, 0));
    "hopper": "output-touched-too-early", "the output is rescaled, and weights replaced, while they are multiplied" =>
        |kernel| drop(kernel, Find::nth(&["full block"], is_product_wait, 1));
    "hopper": "wait-for-one-product-less", "the wait before the weights are replaced leaves their product under way" =>
        |kernel| change(kernel, Find::nth(&["full block"], is_product_wait, 1), |op| {
            if let Op::WgmmaWait { pending } = op { *pending = 1; }
        });
    "hopper": "no-fence-before-scores", "scores are multiplied into registers that may still be read" =>
        |kernel| drop(kernel, Find::every(&["full block", "scores"], is_product_fence));
    "hopper": "no-fence-before-output", "weights are multiplied from registers that may still be written" =>
        |kernel| drop(kernel, Find::every(&["full block", "output"], is_product_fence));
    "hopper": "products-not-committed", "the products of the scores are in the group of those of the output" =>
        |kernel| drop(kernel, Find::every(&["full block", "scores"], |op| matches!(op, Op::WgmmaCommit {})));
    "hopper": "scores-added-up", "the scores of a tile are added to the weights of the tile before" =>
        |kernel| change(kernel, Find::nth(&["full block", "scores"], is_product, 0), |op| {
            if let Op::Wgmma { accumulation, c, d, .. } = op { (*accumulation, *c) = (Accumulation::Add, d.clone()); }
        });
    "hopper": "values-as-keys", "values are multiplied as if their columns were rows" =>
        |kernel| change(kernel, Find::every(&["full block", "output"], is_product), |op| {
            if let Op::Wgmma { b_major, .. } = op { *b_major = Major::Depth; }
        });
    "hopper": "one-depth-missing", "one step of the depth of the scores is missing" =>
        |kernel| drop(kernel, Find::nth(&["full block", "scores"], is_product, 2));
    "hopper": "last-output-missing", "one product of the last output is missing" =>
        |kernel| drop(kernel, Find::nth(&["last output"], is_product, 1));
    "hopper": "turn-not-passed", "a warpgroup keeps its turn" =>
        |kernel| drop(kernel, Find::every(&["full block"], |op| matches!(op, Op::BarrierArrive { .. })));

    // Order, masks, softmax, output
    "hopper": "rounds-do-not-turn", "a CTA goes on over the others instead of back, and takes tiles of theirs" =>
        |kernel| change(kernel, Find::every(&["serpentine"], |op| matches!(op, Op::Sub { .. })), |op| {
            if let Op::Sub { ty, d, b, .. } = op { *op = Op::Mov { ty: *ty, d: *d, a: *b }; }
        });
    "hopper": "forget-groups", "every query head reads the key head of the same number" =>
        |kernel| change(kernel, Find::nth(&["scheduler"], |op| matches!(op, Op::Div { .. }), 2), |op| {
            if let Op::Div { ty, d, a, .. } = op { *op = Op::Mov { ty: *ty, d: *d, a: *a }; }
        });
    "hopper": "mask-one-key-more", "each row attends one key past its limit" =>
        |kernel| change(kernel, Find::every(&["mask"], |op| is_compare(op, Compare::Le)), |op| set_compare(op, Compare::Lt));
    "hopper": "partial-tiles-not-masked", "partial tiles count as full, but for the first" =>
        |kernel| drop(kernel, Find::every(&["partial block", "mask"], is_select));
    "hopper": "output-not-rescaled", "the output keeps the scale of an old row max" =>
        |kernel| drop(kernel, Find::nth(&["full block", "output", "rescale"], is_mul, 2));
    "hopper": "sum-not-rescaled", "the sum keeps the scale of an old row max" =>
        |kernel| drop(kernel, Find::nth(&["full block", "exp and sum"], is_mul, 0));
    "hopper": "columns-exchanged-wrongly", "lanes exchange their columns with the wrong ones" =>
        |kernel| change(kernel, Find::nth(&["exchange"], |op| matches!(op, Op::Shuffle { .. }), 0), |op| {
            if let Op::Shuffle { index, .. } = op { *index = Operand::Constant(2); }
        });
    "hopper": "output-written-over-the-query", "a warp writes its output while others still read the query" =>
        |kernel| drop(kernel, Find::every(&["write output"], |op| matches!(op, Op::BarrierSync { .. })));
    "hopper": "output-not-published", "TMA stores output that it need not see yet" =>
        |kernel| drop(kernel, Find::every(&["write output"], |op| matches!(op, Op::FenceProxyAsync {})));
    "hopper": "output-stored-by-one-lane-alone", "the copy of the output starts before all lanes have written theirs" =>
        |kernel| drop(kernel, Find::every(&["write output"], |op| matches!(op, Op::WarpSync {})));
    "hopper": "place-let-go-while-stored", "the next query comes where output is still stored from" =>
        |kernel| drop(kernel, Find::every(&["tma store wait"], |op| matches!(op, Op::BulkWait { .. })));
    "hopper": "output-chunks-not-exchanged", "output is written as if TMA did not swizzle" =>
        |kernel| change(kernel, Find::every(&["write output"], |op| matches!(op, Op::Xor { .. })), |op| {
            if let Op::Xor { b, .. } = op { *b = Operand::Constant(0); }
        });
    "hopper": "store-past-the-end", "output rows past the last are stored too" =>
        |kernel| unguard(kernel, &["store output"]);
};

const fn is_expect_tx(op: &Op) -> bool {
    matches!(op, Op::MbarrierArriveExpect { .. })
}

pub(super) const fn is_mbarrier_wait(op: &Op) -> bool {
    matches!(op, Op::MbarrierWait { .. })
}

pub(super) const fn is_arrival(op: &Op) -> bool {
    matches!(op, Op::MbarrierArrive { .. })
}

pub(super) const fn is_cluster_wait(op: &Op) -> bool {
    matches!(op, Op::ClusterWait {})
}

const fn is_product(op: &Op) -> bool {
    matches!(op, Op::Wgmma { .. })
}

const fn is_product_wait(op: &Op) -> bool {
    matches!(op, Op::WgmmaWait { .. })
}

const fn is_product_fence(op: &Op) -> bool {
    matches!(op, Op::WgmmaFence {})
}
