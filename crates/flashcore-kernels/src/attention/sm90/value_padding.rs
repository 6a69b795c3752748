//! Padding of V blocks: rows that no query row attends are zeroed in shared memory.
//!
//! Their weights are zero, but they may hold anything, a NaN too. TMA has zeroed what lies past the end of the tensor, and the
//! transposers have zeroed such rows of 8-bit floats.

use flashcore_ir::types::{Pred, S32};
use flashcore_ir::{Builder, Compare, Reg, SharedAddress, SpecialRegister};

use super::{Cta, Mainloop, PvStrategy, WARPGROUP};
use crate::primitives::{CHUNK_BYTES, CHUNKS_PER_ROW, NamedBarrier};
use flashcore_problem::Operand;

impl<P: PvStrategy> Mainloop<'_, P> {
    /// Zeroes the V rows of a block past the last key that any row of the sequence attends, where sequences have lengths of
    /// their own.
    pub(super) fn zero_values_past_end(&self, k: &mut Builder, first_key: Reg<S32>) {
        let context = self.context;
        let has_lengths = context.specialization.has(Operand::SequsedK) || context.specialization.is_ragged();
        if !has_lengths || self.cta.shared.raw_values.is_some() {
            return;
        }
        let end = if context.specialization.is_ragged() && context.specialization.right {
            let last_row = k.sub(context.end_row, 1u32);
            context.end_key(k, last_row)
        } else {
            self.mask.key_length
        };
        let left = k.sub(end, first_key);
        let any = k.compare(Compare::Lt, left, self.cta.config.tile_n as i32);
        self.zero_values(k, any, Compare::Ge, left);
    }

    /// Zeroes the V rows of a block before the first key that any row of the batch attends, under a left window.
    pub(super) fn zero_values_before_window(&self, k: &mut Builder, block: Reg<S32>) {
        if !self.context.specialization.left || self.cta.shared.raw_values.is_some() {
            return;
        }
        let first_key = self.range.first_key(k, block);
        let first_row = k.copy(0u32);
        let first_attended = self.context.first_key(k, first_row);
        let before = k.sub(first_attended, first_key);
        let any = k.compare(Compare::Gt, before, 0i32);
        self.zero_values(k, any, Compare::Lt, before);
    }

    /// Zeroes the V rows whose index in the block compares so with `bound`, if there are any.
    fn zero_values(&self, k: &mut Builder, any: Reg<Pred>, compare: Compare, bound: Reg<S32>) {
        let Self { consumer, cta: Cta { config, shared, .. }, .. } = self;
        let threads = config.row_groups() * WARPGROUP;
        k.section("clear values", |k| {
            k.if_uniform(any, |k| {
                let thread = k.special(SpecialRegister::ThreadX);
                let (thread, barrier) = match consumer.epilogue.kv_split() {
                    Some(split) => (split.thread(k, thread), split.barrier(k)),
                    None => (k.sub(thread, WARPGROUP), k.copy(NamedBarrier::Consumers.id())),
                };
                let stage = consumer.values.stage_address(k);
                let first = k.mad(thread, CHUNK_BYTES, stage);
                let zero = k.copy(0u32);
                for chunk in (0..config.tile_n * CHUNKS_PER_ROW).step_by(threads as usize) {
                    let row = k.eval(((thread + chunk) >> CHUNKS_PER_ROW.ilog2()).signed());
                    let clears = k.compare(compare, row, bound);
                    let exists = k.compare(Compare::Lt, row, config.tile_n as i32);
                    let clears = k.and(clears, exists);
                    for panel in 0..shared.value.panels() {
                        let bytes = panel * shared.value.panel_bytes() + chunk * CHUNK_BYTES;
                        let target = SharedAddress::from(first).plus(bytes as i32);
                        k.when(clears, |k| k.store_shared(target, &[zero; 4]));
                    }
                }
                k.fence_proxy_async();
                k.barrier_sync(barrier, threads);
            });
        });
    }
}
