//! The lanes that execute an operation: functions of one lane applied to all of them.

use core::array;

use flashcore_ir::{Operand, RegisterId};

use crate::numeric::{Half, canonical, join, split};
use crate::state::registers::{Registers, Wides, Words};

/// The registers of a warp and the lanes that execute.
pub(crate) struct Lanes<'r, 'k> {
    pub(crate) registers: &'r mut Registers<'k>,
    pub(crate) mask: u32,
}

impl Lanes<'_, '_> {
    pub(crate) fn word(&self, operand: Operand) -> Words {
        self.registers.word(operand)
    }

    pub(crate) fn wide(&self, operand: Operand) -> Wides {
        self.registers.wide(operand)
    }

    pub(crate) fn set_word(&mut self, d: RegisterId, values: &Words) {
        self.registers.set_word(d, self.mask, values);
    }

    pub(crate) fn set_wide(&mut self, d: RegisterId, values: &Wides) {
        self.registers.set_wide(d, self.mask, values);
    }

    pub(crate) fn set_predicate(&mut self, d: RegisterId, holds: u32) {
        self.registers.set_predicate(d, self.mask, holds);
    }

    /// `d = f(a)` of 32 bits.
    pub(crate) fn words1(&mut self, d: RegisterId, a: Operand, f: impl Fn(u32) -> u32) {
        let a = self.word(a);
        self.set_word(d, &a.map(f));
    }

    /// `d = f(a, b)` of 32 bits.
    pub(crate) fn words2(&mut self, d: RegisterId, [a, b]: [Operand; 2], f: impl Fn(u32, u32) -> u32) {
        let (a, b) = (self.word(a), self.word(b));
        self.set_word(d, &array::from_fn(|lane| f(a[lane], b[lane])));
    }

    /// `d = f(a, b, c)` of 32 bits.
    pub(crate) fn words3(&mut self, d: RegisterId, [a, b, c]: [Operand; 3], f: impl Fn(u32, u32, u32) -> u32) {
        let (a, b, c) = (self.word(a), self.word(b), self.word(c));
        self.set_word(d, &array::from_fn(|lane| f(a[lane], b[lane], c[lane])));
    }

    /// `d = f(a)` of 64 bits.
    pub(crate) fn wides1(&mut self, d: RegisterId, a: Operand, f: impl Fn(u64) -> u64) {
        let a = self.wide(a);
        self.set_wide(d, &a.map(f));
    }

    /// `d = f(a, b)` of 64 bits.
    pub(crate) fn wides2(&mut self, d: RegisterId, [a, b]: [Operand; 2], f: impl Fn(u64, u64) -> u64) {
        let (a, b) = (self.wide(a), self.wide(b));
        self.set_wide(d, &array::from_fn(|lane| f(a[lane], b[lane])));
    }

    /// `d = f(a, b, c)` of 64 bits.
    pub(crate) fn wides3(&mut self, d: RegisterId, [a, b, c]: [Operand; 3], f: impl Fn(u64, u64, u64) -> u64) {
        let (a, b, c) = (self.wide(a), self.wide(b), self.wide(c));
        self.set_wide(d, &array::from_fn(|lane| f(a[lane], b[lane], c[lane])));
    }

    /// `d = f(a)` in `f32`.
    pub(crate) fn floats1(&mut self, d: RegisterId, a: Operand, f: impl Fn(f32) -> f32) {
        self.words1(d, a, |a| canonical(f(f32::from_bits(a))));
    }

    /// `d = f(a, b)` in `f32`.
    pub(crate) fn floats2(&mut self, d: RegisterId, ab: [Operand; 2], f: impl Fn(f32, f32) -> f32) {
        self.words2(d, ab, |a, b| canonical(f(f32::from_bits(a), f32::from_bits(b))));
    }

    /// `d = f(a, b, c)` in `f32`.
    pub(crate) fn floats3(&mut self, d: RegisterId, abc: [Operand; 3], f: impl Fn(f32, f32, f32) -> f32) {
        self.words3(d, abc, |a, b, c| canonical(f(f32::from_bits(a), f32::from_bits(b), f32::from_bits(c))));
    }

    /// `d = f(a)` in each half of a pair, rounded once.
    pub(crate) fn pairs1<H: Half>(&mut self, d: RegisterId, a: Operand, f: impl Fn(f64) -> f64) {
        self.words1(d, a, |a| join(split(a).map(|a| H::encode(f(H::decode(a).into())))));
    }

    /// `d = f(a, b)` in each half of a pair, rounded once.
    pub(crate) fn pairs2<H: Half>(&mut self, d: RegisterId, ab: [Operand; 2], f: impl Fn(f64, f64) -> f64) {
        self.words2(d, ab, |a, b| {
            let (a, b) = (split(a), split(b));
            join([0, 1].map(|half| H::encode(f(H::decode(a[half]).into(), H::decode(b[half]).into()))))
        });
    }

    /// `d = f(a, b, c)` in each half of a pair, rounded once.
    pub(crate) fn pairs3<H: Half>(&mut self, d: RegisterId, abc: [Operand; 3], f: impl Fn(f64, f64, f64) -> f64) {
        self.words3(d, abc, |a, b, c| {
            let (a, b, c) = (split(a), split(b), split(c));
            join([0, 1].map(|half| {
                H::encode(f(H::decode(a[half]).into(), H::decode(b[half]).into(), H::decode(c[half]).into()))
            }))
        });
    }
}
