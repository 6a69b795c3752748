//! Which choices of the Ampere kernel go together, and the listed ones.

use crate::attention::stream::Supply;
use crate::config::{AmpereConfig, Flaw, L2Window, QueryPlace};
use crate::tile::{Exponential, SharedLayout};

/// The most KV splits.
const MAX_SPLITS: u32 = 256;

impl AmpereConfig {
    /// What no kernel can be generated with.
    pub(crate) fn flaws(self) -> Vec<Flaw> {
        let Self {
            warps,
            rows_per_warp,
            tile_n,
            kv_split_warps,
            stages,
            load_bytes,
            producers,
            persistent,
            num_splits,
            ..
        } = self;
        let flaw =
            |argument, value, allowed, is_allowed: bool| (!is_allowed).then_some(Flaw { argument, value, allowed });
        let flaws = [
            // Fewer would not copy a whole pattern of the swizzle at a time.
            flaw("warps", warps, "2, 4 or 8", matches!(warps, 2 | 4 | 8)),
            flaw(
                "kv_split_warps",
                kv_split_warps,
                "1, 2 or 4, at most the warps, with a multiple of 16 keys for each",
                matches!(kv_split_warps, 1 | 2 | 4) && kv_split_warps <= warps && tile_n % (16 * kv_split_warps) == 0,
            ),
            flaw("rows_per_warp", rows_per_warp, "16 or 32", matches!(rows_per_warp, 16 | 32)),
            flaw("tile_n", tile_n, "a multiple of 16 up to 128", tile_n % 16 == 0 && (16..=128).contains(&tile_n)),
            // Two barriers for each stage, where there are producers, and two others.
            flaw("stages", stages, "1 to 8", (1..=8).contains(&stages)),
            flaw("stages", stages, "at most 7 with producers", producers == 0 || stages <= 7),
            flaw("load_bytes", load_bytes, "4, 8 or 16", matches!(load_bytes, 4 | 8 | 16)),
            flaw("producers", producers, "0, 1 or 2", producers <= 2),
            flaw("num_splits", num_splits, "1 to 256", (1..=MAX_SPLITS).contains(&num_splits)),
            flaw(
                "num_splits",
                num_splits,
                "1 where CTAs stay and take tile after tile",
                num_splits == 1 || persistent == 0,
            ),
            flaw(
                "persistent",
                persistent,
                "0 where the heads of a key head share tiles",
                persistent == 0 || !self.pack_gqa,
            ),
        ];
        flaws.into_iter().flatten().collect()
    }

    /// How keys and values come.
    pub(crate) const fn supply(self) -> Supply {
        let Self { stages, tile_n, warps, producers, load_bytes, .. } = self;
        Supply { stages, tile_n, warps, producers, load_bytes }
    }

    /// Configs that no problem gets by default, and that gates, snapshots and tests go through all the same: between them
    /// they have every value of every choice.
    pub(crate) const LISTED: [Self; 9] = [
        Self { stages: 1, ..Self::BASE },
        Self { load_bytes: 4, layout: SharedLayout::Padded, ..Self::BASE },
        Self { load_bytes: 8, query: QueryPlace::Shared, ..Self::BASE },
        Self { exponential: Exponential::Shared, ..Self::BASE },
        Self { producers: 1, ..Self::BASE },
        Self { producers: 2, stages: 3, tile_n: 32, ..Self::BASE },
        Self { persistent: 5, ..Self::BASE },
        Self { l2: L2Window::Key, warps: 8, ..Self::BASE },
        Self { num_splits: 3, pack_gqa: true, warps: 2, ..Self::BASE },
    ];
}
