//! Merge of partial softmax results: warps with the same rows and other keys exchange them through shared memory.
//!
//! A partial result is the row max, the row sum and the output of every row of a lane: one register after the other, each
//! with one word for each lane.

use flashcore_ir::types::{F32, U32};
use flashcore_ir::{Builder, ClusterAddress, Reg, SharedAddress};

use super::OnlineSoftmax;
use crate::primitives::{Accumulator, LANES};

/// Bytes of an `f32`.
const WORD_BYTES: u32 = 4;

impl OnlineSoftmax {
    /// Stores the partial result for another warp of the CTA.
    pub fn store_partial(&self, k: &mut Builder, output: &Accumulator, lane_address: Reg<U32>) {
        let address = SharedAddress::from(lane_address);
        self.each_word(output, |offset, register| k.store_shared(address.plus(offset), &[register]));
    }

    /// Stores the partial result for a warp of another CTA of the cluster, in its shared memory (DSMEM).
    pub fn store_partial_to_cluster(&self, k: &mut Builder, output: &Accumulator, lane_address: ClusterAddress) {
        self.each_word(output, |offset, register| k.store_cluster(lane_address.plus(offset), &[register]));
    }

    /// Visits each register of the partial result, with its offset from the lane's first word.
    fn each_word(&self, output: &Accumulator, mut store: impl FnMut(i32, Reg<F32>)) {
        for (index, register) in self.partial_registers(output).into_iter().enumerate() {
            store((index as u32 * LANES * WORD_BYTES) as i32, register);
        }
    }

    /// Merges the partial result that the same lane of another warp stored: the softmax of other keys of the same rows.
    pub fn merge_partial(&self, k: &mut Builder, output: &Accumulator, lane_address: Reg<U32>) {
        let count = self.partial_registers(output).len();
        let mut words = (0..count).map(|index| {
            let offset = index as u32 * LANES * WORD_BYTES;
            SharedAddress::from(lane_address).plus(offset as i32)
        });
        let rows = self.row_max.len();
        let other_max: Vec<_> = words.by_ref().take(rows).map(|from| k.load_shared::<F32>(from, 1)[0]).collect();
        let other_sum: Vec<_> = words.by_ref().take(rows).map(|from| k.load_shared::<F32>(from, 1)[0]).collect();
        let mut factors = Vec::new();
        for row in 0..rows {
            let before = k.copy(self.row_max[row]);
            k.max_to(self.row_max[row], other_max[row]);
            let shift = self.shift(k, row, self.row_max[row]);
            let [own, other] = [before, other_max[row]].map(|row_max| {
                let exponent = self.relative(k, row, row_max, shift);
                k.exp2(exponent)
            });
            k.mul_to(self.row_sum[row], own);
            k.fma_to(self.row_sum[row], other_sum[row], other);
            factors.push((own, other));
        }
        output.each(|row, _, element| {
            if let Some(from) = words.next() {
                let other = k.load_shared::<F32>(from, 1)[0];
                k.mul_to(element, factors[row].0);
                k.fma_to(element, other, factors[row].1);
            }
        });
    }

    /// Bytes of the partial result of a warp.
    pub fn partial_bytes(&self, output: &Accumulator) -> u32 {
        self.partial_registers(output).len() as u32 * LANES * WORD_BYTES
    }

    fn partial_registers(&self, output: &Accumulator) -> Vec<Reg<F32>> {
        let mut registers: Vec<_> = self.row_max.iter().chain(&self.row_sum).copied().collect();
        output.each(|_, _, element| registers.push(element));
        registers
    }
}
