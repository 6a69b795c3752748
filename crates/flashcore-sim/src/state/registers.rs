//! The registers of a warp: 32 lanes of each, and the lanes that have been written.

use core::array;

use flashcore_ir::{Kernel, Operand, RegisterId, Type};

/// Lanes of a warp.
pub(crate) const LANES: usize = 32;
/// The mask of all lanes.
pub(crate) const ALL: u32 = u32::MAX;

/// One value of at most 32 bits for each lane.
pub(crate) type Words = [u32; LANES];
/// One value of 64 bits for each lane.
pub(crate) type Wides = [u64; LANES];

/// The lanes of a mask, lowest first.
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    core::iter::from_fn(move || {
        let lane = rest.trailing_zeros();
        rest &= rest.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

/// The slot of each register of a kernel, by its width.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The index in the file of the register's width.
    slots: Vec<u32>,
    words: usize,
    wides: usize,
    predicates: usize,
}

impl Layout {
    pub(crate) fn new(kernel: &Kernel) -> Self {
        let (mut words, mut wides, mut predicates) = (0, 0, 0);
        let slots = kernel.registers.iter().map(|register| {
            let file = match register.ty {
                Type::Pred => &mut predicates,
                Type::U64 | Type::S64 => &mut wides,
                Type::U16
                | Type::F16
                | Type::Bf16
                | Type::U32
                | Type::S32
                | Type::F32
                | Type::Tf32
                | Type::F16x2
                | Type::Bf16x2 => &mut words,
            };
            *file += 1;
            (*file - 1) as u32
        });
        let slots = slots.collect();
        Self { slots, words, wides, predicates }
    }
}

/// The registers of one warp.
#[derive(Debug)]
pub(crate) struct Registers<'k> {
    layout: &'k Layout,
    words: Vec<Words>,
    wides: Vec<Wides>,
    predicates: Vec<u32>,
    /// For each register of the kernel, the lanes that have written it.
    written: Vec<u32>,
}

impl<'k> Registers<'k> {
    pub(crate) fn new(layout: &'k Layout) -> Self {
        Self {
            layout,
            words: vec![[0; LANES]; layout.words],
            wides: vec![[0; LANES]; layout.wides],
            predicates: vec![0; layout.predicates],
            written: vec![0; layout.slots.len()],
        }
    }

    fn slot(&self, register: RegisterId) -> usize {
        self.layout.slots[register.0 as usize] as usize
    }

    /// The lanes that have written a register.
    pub(crate) fn written(&self, register: RegisterId) -> u32 {
        self.written[register.0 as usize]
    }

    /// A register of at most 32 bits.
    pub(crate) fn word_of(&self, register: RegisterId) -> &Words {
        &self.words[self.slot(register)]
    }

    /// An operand of at most 32 bits.
    pub(crate) fn word(&self, operand: Operand) -> Words {
        match operand {
            Operand::Register(register) => *self.word_of(register),
            Operand::Constant(bits) => [bits as u32; LANES],
        }
    }

    /// A register of 64 bits.
    pub(crate) fn wide_of(&self, register: RegisterId) -> &Wides {
        &self.wides[self.slot(register)]
    }

    /// An operand of 64 bits.
    pub(crate) fn wide(&self, operand: Operand) -> Wides {
        match operand {
            Operand::Register(register) => *self.wide_of(register),
            Operand::Constant(bits) => [bits; LANES],
        }
    }

    /// The lanes for which a predicate register holds.
    pub(crate) fn predicate_of(&self, register: RegisterId) -> u32 {
        self.predicates[self.slot(register)]
    }

    /// The lanes for which a predicate operand holds.
    pub(crate) fn predicate(&self, operand: Operand) -> u32 {
        match operand {
            Operand::Register(register) => self.predicate_of(register),
            Operand::Constant(0) => 0,
            Operand::Constant(_) => ALL,
        }
    }

    /// Counts a register as written by all lanes: an operation in flight will write it.
    pub(crate) fn will_be_written(&mut self, register: RegisterId) {
        self.written[register.0 as usize] = ALL;
    }

    /// Writes a register of at most 32 bits in the lanes of `mask`.
    pub(crate) fn set_word(&mut self, register: RegisterId, mask: u32, values: &Words) {
        let slot = self.slot(register);
        blend(&mut self.words[slot], mask, values);
        self.written[register.0 as usize] |= mask;
    }

    /// Writes a register of 64 bits in the lanes of `mask`.
    pub(crate) fn set_wide(&mut self, register: RegisterId, mask: u32, values: &Wides) {
        let slot = self.slot(register);
        blend(&mut self.wides[slot], mask, values);
        self.written[register.0 as usize] |= mask;
    }

    /// The bits of a register that memory can hold, in one lane.
    pub(crate) fn lane(&self, register: RegisterId, ty: Type, lane: usize) -> u64 {
        if ty.bits() == 64 { self.wide_of(register)[lane] } else { self.word_of(register)[lane].into() }
    }

    /// Writes a register that memory can hold, in one lane.
    pub(crate) fn set_lane(&mut self, register: RegisterId, ty: Type, lane: usize, bits: u64) {
        let slot = self.slot(register);
        if ty.bits() == 64 {
            self.wides[slot][lane] = bits;
        } else {
            self.words[slot][lane] = bits as u32;
        }
        self.written[register.0 as usize] |= 1 << lane;
    }

    /// Writes a predicate in the lanes of `mask`.
    pub(crate) fn set_predicate(&mut self, register: RegisterId, mask: u32, holds: u32) {
        let slot = self.slot(register);
        self.predicates[slot] = self.predicates[slot] & !mask | holds & mask;
        self.written[register.0 as usize] |= mask;
    }
}

fn blend<T: Copy>(target: &mut [T; LANES], mask: u32, values: &[T; LANES]) {
    if mask == ALL {
        *target = *values;
    } else {
        *target = array::from_fn(|lane| if mask >> lane & 1 == 1 { values[lane] } else { target[lane] });
    }
}
