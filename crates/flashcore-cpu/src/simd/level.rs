//! SIMD levels: the instruction sets to choose from, and the detection of those that a machine has.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};

/// Environment variable that names the level to use.
const VARIABLE: &str = "FLASHCORE_CPU_LEVEL";

/// A set of instructions that a microkernel is written for. The order is that of speed, the slowest first.
///
/// Problems in `f64` are computed at the portable level whichever is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Level {
    /// Plain loops, as the compiler vectorizes them for the least processor of the architecture.
    Portable,
    /// Advanced SIMD: every 64-bit ARM processor.
    Neon,
    /// AVX2 with FMA and F16C: x86 processors since 2013 (Intel) and 2017 (AMD).
    Avx2,
    /// AVX-512 F, BW, VL and DQ: x86 server processors since 2017 (Intel) and 2022 (AMD).
    Avx512,
    /// AVX-512 BF16, for problems in `bf16`; others are computed as at [`Avx512`](Self::Avx512). Intel server processors
    /// since 2020 (all since 2023), AMD since 2022. Weights are rounded to `bf16` before the PV product.
    Avx512Bf16,
    /// AMX with BF16, for problems in `bf16`; others are computed as at [`Avx512`](Self::Avx512). Intel server processors
    /// since 2023, on Linux. Weights are rounded to `bf16` before the PV product.
    Amx,
}

/// Reason why a level cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LevelError {
    /// The processor lacks instructions.
    #[error("CPU level {level} needs {}, which this machine lacks; it has {}", missing.join(", "), listed(&Level::available()))]
    Missing {
        /// The requested level.
        level: Level,
        /// Features that the machine lacks.
        missing: Vec<&'static str>,
    },
    /// A name that is no level.
    #[error("{name:?} is no CPU level; there are {}", listed(&Level::ALL))]
    Unknown {
        /// The given name.
        name: String,
    },
    /// The environment variable names no level, or one that cannot be used.
    #[error("{VARIABLE}: {0}; change it or unset it")]
    Variable(Box<Self>),
}

fn listed(levels: &[Level]) -> String {
    levels.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl Level {
    /// All levels, the slowest first.
    pub const ALL: [Self; 6] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The levels that work on this machine, the slowest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|level| level.missing().is_empty()).collect()
    }

    /// The fastest level that works on this machine.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|level| level.pays() && level.missing().is_empty()).unwrap_or(Self::Portable)
    }

    /// True if a level is faster than those below it on this machine, if it works there.
    ///
    /// AMD's processors multiply pairs of `bf16` at twice the rate of `f32`, Intel's at half of that: on Emerald Rapids
    /// the level is as fast as AVX-512 with 64 columns and slower with 128.
    fn pays(self) -> bool {
        match self {
            Self::Avx512Bf16 => is_amd(),
            Self::Portable | Self::Neon | Self::Avx2 | Self::Avx512 | Self::Amx => true,
        }
    }

    /// The level that [`attend`](crate::attend) uses: that of [`set_default`](Self::set_default), or else the one that the
    /// environment variable `FLASHCORE_CPU_LEVEL` named when it was first looked at, or else the best.
    pub fn default_level() -> Result<Self, LevelError> {
        if let Some(level) = Self::ALL.get(usize::from(CHOSEN.load(Ordering::Relaxed))) {
            return Ok(*level);
        }
        let level =
            from_variable(std::env::var(VARIABLE).ok().as_deref()).map_err(Box::new).map_err(LevelError::Variable)?;
        // Another thread may have been first; what it chose stays.
        match CHOSEN.compare_exchange(NONE_CHOSEN, level as u8, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Ok(level),
            Err(chosen) => Ok(Self::ALL.get(usize::from(chosen)).copied().unwrap_or(level)),
        }
    }

    /// Makes [`attend`](crate::attend) use this level from now on, in the whole process.
    pub fn set_default(self) -> Result<(), LevelError> {
        self.check()?;
        CHOSEN.store(self as u8, Ordering::Relaxed);
        Ok(())
    }

    /// Returns an error that names the features that the machine lacks for this level.
    pub(crate) fn check(self) -> Result<(), LevelError> {
        let missing = self.missing();
        if missing.is_empty() { Ok(()) } else { Err(LevelError::Missing { level: self, missing }) }
    }

    /// Features that the machine lacks for this level.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn missing(self) -> Vec<&'static str> {
        let avx512 = || {
            vec![
                ("AVX-512F", is_x86_feature_detected!("avx512f")),
                ("AVX-512BW", is_x86_feature_detected!("avx512bw")),
                ("AVX-512VL", is_x86_feature_detected!("avx512vl")),
                ("AVX-512DQ", is_x86_feature_detected!("avx512dq")),
            ]
        };
        let features = match self {
            Self::Portable => vec![],
            Self::Neon => vec![(ARM, false)],
            Self::Avx2 => vec![
                ("AVX2", is_x86_feature_detected!("avx2")),
                ("FMA", is_x86_feature_detected!("fma")),
                ("F16C", is_x86_feature_detected!("f16c")),
            ],
            Self::Avx512 => avx512(),
            Self::Avx512Bf16 => [avx512(), vec![("AVX-512BF16", is_x86_feature_detected!("avx512bf16"))]].concat(),
            Self::Amx => return crate::bf16::amx::missing(),
        };
        features.into_iter().filter(|(_, is_there)| !is_there).map(|(name, _)| name).collect()
    }

    /// Features that the machine lacks for this level.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn missing(self) -> Vec<&'static str> {
        match self {
            Self::Portable => vec![],
            Self::Neon if cfg!(target_arch = "aarch64") => vec![],
            Self::Neon => vec![ARM],
            Self::Avx2 | Self::Avx512 | Self::Avx512Bf16 | Self::Amx => vec!["an x86-64 processor"],
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "CPUID is a safe function only in newer versions of the standard library")]
#[expect(unsafe_code, reason = "in older versions of the standard library")]
fn is_amd() -> bool {
    // SAFETY: every x86-64 processor has CPUID and its first leaf.
    let vendor = unsafe { core::arch::x86_64::__cpuid(0) };
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_amd() -> bool {
    false
}

/// Requirement of [`Level::Neon`].
const ARM: &str = "an AArch64 processor";

/// Index in [`Level::ALL`] of the level in use, or [`NONE_CHOSEN`].
static CHOSEN: AtomicU8 = AtomicU8::new(NONE_CHOSEN);
const NONE_CHOSEN: u8 = u8::MAX;

/// The level for a value of the environment variable. An empty one is as good as none.
fn from_variable(value: Option<&str>) -> Result<Level, LevelError> {
    match value.filter(|value| !value.is_empty()) {
        Some(value) => {
            let level: Level = value.parse()?;
            level.check()?;
            Ok(level)
        }
        None => Ok(Level::best()),
    }
}

impl fmt::Display for Level {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        })
    }
}

impl FromStr for Level {
    type Err = LevelError;

    fn from_str(name: &str) -> Result<Self, LevelError> {
        Self::ALL
            .into_iter()
            .find(|level| level.to_string() == name)
            .ok_or_else(|| LevelError::Unknown { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for (place, level) in Level::ALL.into_iter().enumerate() {
            assert_eq!(level.to_string().parse(), Ok(level));
            assert_eq!(usize::from(level as u8), place);
        }
    }

    #[test]
    fn the_variable_chooses() {
        let unknown = LevelError::Unknown { name: "sse9".to_owned() };
        assert_eq!(
            unknown.to_string(),
            r#""sse9" is no CPU level; there are portable, neon, avx2, avx512, avx512bf16, amx"#
        );
        for (value, expected) in [
            (None, Ok(Level::best())),
            (Some(""), Ok(Level::best())),
            (Some("portable"), Ok(Level::Portable)),
            (Some("sse9"), Err(unknown)),
        ] {
            assert_eq!(from_variable(value), expected, "{value:?}");
        }
        for level in Level::ALL {
            let expected = if Level::available().contains(&level) {
                Ok(level)
            } else {
                Err(LevelError::Missing { level, missing: level.missing() })
            };
            assert_eq!(from_variable(Some(&level.to_string())), expected);
        }
    }

    #[test]
    fn the_best_is_the_last_available_that_pays() {
        assert_eq!(Level::available().into_iter().rfind(|level| level.pays()), Some(Level::best()));
        assert_eq!(Level::available().first(), Some(&Level::Portable));
    }
}
