//! The constants of a closure, apart from its structure.
//!
//! `|score, _| score * temperature` is one structure for all temperatures: a step says which slot it reads, and the value of
//! the slot comes along with the [`ScoreMod`](super::ScoreMod). A kernel is generated from the structure and receives the
//! constants as arguments, so another temperature compiles nothing.

/// The most constants of a closure that are apart from its structure; those written later are part of it.
pub const MOST_CONSTANTS: usize = 16;

/// A constant of a closure, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot(u8);

impl Slot {
    /// Its place among the constants.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The order of magnitude of an integer constant, all that the structure has of its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Size {
    /// At most [`Size::SMALL`] from zero: sums of a few of them with positions do not wrap.
    Small,
    /// Any integer.
    Any,
}

impl Size {
    /// The largest magnitude of a small integer.
    pub const SMALL: u32 = 1 << 24;

    /// The size of an integer.
    pub const fn of(value: i32) -> Self {
        if value.unsigned_abs() <= Self::SMALL { Self::Small } else { Self::Any }
    }
}

/// The values of the slots of an expression, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Constants {
    bits: [u32; MOST_CONSTANTS],
    count: u8,
}

impl Constants {
    /// Appends a constant, if there is room.
    pub(super) fn push(&mut self, bits: u32) -> Option<Slot> {
        let slot = Slot(self.count);
        *self.bits.get_mut(slot.index())? = bits;
        self.count += 1;
        Some(slot)
    }

    /// The bits of a slot; 0 for one that another expression has.
    pub fn bits(&self, slot: Slot) -> u32 {
        self.bits.get(slot.index()).copied().unwrap_or_default()
    }

    /// The number in a slot.
    pub fn number(&self, slot: Slot) -> f32 {
        f32::from_bits(self.bits(slot))
    }

    /// The integer in a slot.
    pub fn integer(&self, slot: Slot) -> i32 {
        self.bits(slot).cast_signed()
    }

    pub(super) fn set(&mut self, slot: Slot, bits: u32) {
        if let Some(place) = self.bits.get_mut(slot.index()) {
            *place = bits;
        }
    }
}
