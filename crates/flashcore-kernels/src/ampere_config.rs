//! Which choices of the Ampere kernel go together, and the listed ones.

use crate::attention::stream::Supply;
use crate::config::{AmpereConfig, Flaw, L2Window, Packing, QueryPlace};
use crate::tile::{Exponential, SharedLayout};

/// The most parts of the keys.
const MOST_PARTS: u32 = 256;

impl AmpereConfig {
    /// What no kernel can be generated with.
    pub(crate) fn flaws(self) -> Vec<Flaw> {
        let Self {
            warps, rows_per_warp, key_rows, key_warps, stages, load_bytes, producers, persistent, parts, ..
        } = self;
        let flaw =
            |argument, value, allowed, is_allowed: bool| (!is_allowed).then_some(Flaw { argument, value, allowed });
        let flaws = [
            // Fewer would not copy a whole pattern of the swizzle at a time.
            flaw("warps", warps, "2, 4 or 8", matches!(warps, 2 | 4 | 8)),
            flaw(
                "key_warps",
                key_warps,
                "1, 2 or 4, at most the warps, with a multiple of 16 keys for each",
                matches!(key_warps, 1 | 2 | 4) && key_warps <= warps && key_rows % (16 * key_warps) == 0,
            ),
            flaw("rows_per_warp", rows_per_warp, "16 or 32", matches!(rows_per_warp, 16 | 32)),
            flaw(
                "key_rows",
                key_rows,
                "a multiple of 16 up to 128",
                key_rows % 16 == 0 && (16..=128).contains(&key_rows),
            ),
            // Two barriers for each stage, where there are producers, and two others.
            flaw("stages", stages, "1 to 8", (1..=8).contains(&stages)),
            flaw("stages", stages, "at most 7 with producers", producers == 0 || stages <= 7),
            flaw("load_bytes", load_bytes, "4, 8 or 16", matches!(load_bytes, 4 | 8 | 16)),
            flaw("producers", producers, "0, 1 or 2", producers <= 2),
            flaw("parts", parts, "1 to 256", (1..=MOST_PARTS).contains(&parts)),
            flaw("parts", parts, "1 where CTAs stay and take tile after tile", parts == 1 || persistent == 0),
            flaw(
                "persistent",
                persistent,
                "0 where the heads of a key head share tiles",
                persistent == 0 || self.packing == Packing::OneHead,
            ),
        ];
        flaws.into_iter().flatten().collect()
    }

    /// How keys and values come.
    pub(crate) const fn supply(self) -> Supply {
        let Self { stages, key_rows, warps, producers, load_bytes, .. } = self;
        Supply { stages, key_rows, warps, producers, load_bytes }
    }

    /// Configs that no problem gets by default, and that gates, snapshots and tests go through all the same: between them
    /// they have every value of every choice.
    pub(crate) const LISTED: [Self; 9] = [
        Self { stages: 1, ..Self::BASE },
        Self { load_bytes: 4, layout: SharedLayout::Padded, ..Self::BASE },
        Self { load_bytes: 8, query: QueryPlace::Shared, ..Self::BASE },
        Self { exponential: Exponential::Shared, ..Self::BASE },
        Self { producers: 1, ..Self::BASE },
        Self { producers: 2, stages: 3, key_rows: 32, ..Self::BASE },
        Self { persistent: 5, ..Self::BASE },
        Self { l2: L2Window::Key, warps: 8, ..Self::BASE },
        Self { parts: 3, packing: Packing::KeyHead, warps: 2, ..Self::BASE },
    ];
}
