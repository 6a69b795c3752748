//! `wgmma` of 8-bit floats: QK with both operands K-major, and PV with P in registers and V transposed.
//!
//! A step of PV takes 32 keys. Of P, a lane has the columns `2t` and `2t + 1` of each 8 keys; the operand wants four adjacent
//! ones in a register. The order of keys is free if V has the same, so P goes into the operand as it stands, and the
//! transposition of V puts keys 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15 of each 16 in that order.

use flashcore_ir::builder::{Adds, LeftMatrix};
use flashcore_ir::types::U32;
use flashcore_ir::{Builder, Fp8, Reg};

use super::wgmma::{WgmmaOperand, registers};
use crate::primitives::Accumulator;

/// Keys of a step.
const STEP: u32 = 32;

/// P fragment of 8-bit floats (e4m3): softmax weights rounded to the A operand of PV, in registers of their own.
#[derive(Debug, Clone)]
pub struct Fp8PFragment {
    fragments: Vec<[Reg<U32>; 4]>,
}

impl Fp8PFragment {
    /// Registers without values for `columns` columns, a multiple of 32.
    pub fn unset(k: &mut Builder, columns: u32) -> Self {
        Self { fragments: (0..columns / STEP).map(|_| core::array::from_fn(|_| k.register())).collect() }
    }

    /// Rounds the weights of an accumulator, whose columns are a multiple of 32; columns past its last become zero. Weights
    /// that e4m3 has no room for become its largest number.
    pub fn round(&self, k: &mut Builder, weights: &Accumulator) {
        let weights = weights.m_tiles[0].chunks_exact(4);
        for target in self.fragments.iter().skip(weights.len()).flatten() {
            k.set(*target, 0u32);
        }
        for (target, fragments) in self.fragments.iter().zip(weights) {
            for (index, target) in target.iter().enumerate() {
                // Two fragments are the keys of a register, and two elements of each those of a row.
                let (first, row) = (index / 2 * 2, index % 2 * 2);
                let [low, high] = [first, first + 1].map(|fragment| {
                    let elements = fragments[fragment];
                    k.fp8_pair(Fp8::E4m3, elements[row], elements[row + 1])
                });
                k.join_halves_to(*target, low, high);
            }
        }
    }
}

impl Accumulator {
    /// Starts `A * B^T` over `depth` columns of 8-bit floats, in place of what it holds. One `wgmma` group.
    pub fn start_qk_fp8(&self, k: &mut Builder, types: [Fp8; 2], (a, b): (&WgmmaOperand, &WgmmaOperand), depth: u32) {
        let (registers, columns) = (registers(self), b.rows());
        for step in 0..depth.div_ceil(STEP) {
            let left = LeftMatrix::Shared(a.column_step(k, step));
            let right = b.column_step(k, step);
            k.wgmma_fp8(types, columns, &registers, left, right, if step == 0 { Adds::Replace } else { Adds::Add });
        }
        k.wgmma_commit();
    }

    /// Starts `P * V` of P in registers and V of this type transposed: in place of what it holds, or added to it. One `wgmma`
    /// group.
    pub fn start_pv_fp8(&self, k: &mut Builder, ty: Fp8, p: &Fp8PFragment, v: &WgmmaOperand, first: Adds) {
        let registers = registers(self);
        let columns = registers.len() as u32 * 2;
        for (step, fragment) in (0u32..).zip(&p.fragments) {
            let right = v.column_step(k, step);
            let adds = if step == 0 { first } else { Adds::Add };
            k.wgmma_fp8([Fp8::E4m3, ty], columns, &registers, LeftMatrix::Registers(fragment), right, adds);
        }
        k.wgmma_commit();
    }
}
