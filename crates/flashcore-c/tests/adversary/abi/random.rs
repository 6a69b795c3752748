//! Random numbers of the fuzz, by counter: the number at a place does not depend on what was asked before.

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

/// Mixes all bits of a number (the finaliser of `MurmurHash3`, with other multipliers: Stafford's mix 4).
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 33)).wrapping_mul(0x62a9_d9ed_7997_05f5);
    bits = (bits ^ (bits >> 28)).wrapping_mul(0xcb24_d0a5_c88c_35b3);
    bits ^ (bits >> 32)
}

/// A number in [0, 1) for a place.
pub(crate) fn uniform_at(seed: u64, place: u64) -> f64 {
    (mix(seed ^ mix(place.wrapping_add(0x9e37_79b9_7f4a_7c15))) >> 11) as f64 / (1_u64 << 53) as f64
}

/// A normally distributed number for a place (Box and Muller).
pub(crate) fn normal_at(seed: u64, place: u64) -> f64 {
    let radius = (-2.0 * (1.0 - uniform_at(seed, 2 * place)).ln()).sqrt();
    radius * (std::f64::consts::TAU * uniform_at(seed, 2 * place + 1)).cos()
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x5851_f42d_4c95_7f2d))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }

    /// A number from `first` to `last`, both included.
    pub(crate) fn within(&mut self, first: usize, last: usize) -> usize {
        first + self.below(last - first + 1)
    }

    /// True once in `times`.
    pub(crate) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}
