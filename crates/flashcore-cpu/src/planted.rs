//! Planted bugs: each is one wrong expression beside the right one, and shows whether a check notices it.
//!
//! [`planted!`] writes both down where the code is. Without the feature `planted` the macro expands to the right expression
//! alone, so a library that ships holds no bug, no branch and no table. With the feature, one bug at a time can be chosen:
//! by [`plant`], or for a whole process by the environment variable `FLASHCORE_PLANTED_BUG`.
//! `crates/flashcore-bench/tests/cpu_mutants.rs` plants all of them.

/// The second expression; the first where the feature `planted` is on and the bug is chosen.
macro_rules! planted {
    ($bug:ident: $wrong:expr, $right:expr) => {{
        #[cfg(feature = "planted")]
        let value = if $crate::planted::is_planted($crate::planted::Bug::$bug) { $wrong } else { $right };
        #[cfg(not(feature = "planted"))]
        let value = $right;
        value
    }};
}
pub(crate) use planted;

#[cfg(feature = "planted")]
pub(crate) use bugs::is_planted;
#[cfg(feature = "planted")]
pub use bugs::{Bug, plant};

#[cfg(feature = "planted")]
mod bugs {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    macro_rules! bugs {
        ($($bug:ident $name:literal $what:literal;)*) => {
            /// A bug that can be planted.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub enum Bug {
                $(#[doc = $what] $bug,)*
            }

            impl Bug {
                /// Every bug.
                pub const ALL: &[Self] = &[$(Self::$bug),*];

                /// Its name.
                pub const fn name(self) -> &'static str {
                    match self { $(Self::$bug => $name,)* }
                }

                /// The wrong behaviour, in words.
                pub const fn what(self) -> &'static str {
                    match self { $(Self::$bug => $what,)* }
                }
            }
        };
    }

    bugs! {
        SplitsPast16 "splits-past-16" "splits of a row past the sixteenth are not merged";
        RowMaxOf32Splits "row-max-of-32-splits" "the row max of a merge is that of the first 32 splits";
        SplitWeightOfAnother "split-weight-of-another" "a split is merged with the weight of the split before";
        TilesPast16 "tiles-past-16" "KV tiles past the sixteenth of a split are not attended";
        DecodeTilesPast16 "decode-tiles-past-16" "KV tiles past the sixteenth of a split are not decoded";
        StaleRowMax "stale-row-max" "a row max that is far too low stays, however large the weights get";
        RescaleNeverBelow "rescale-never-below" "an output is rescaled by 2^-16 at least";
        TailOfAPanel "tail-of-a-panel" "the query of the last row of a ragged panel is not packed";
        WindowOneKeyLate "window-one-key-late" "a window begins one key late";
        GroupHeadsPast8 "group-heads-past-8" "query heads of a group past the eighth have the query of the eighth";
        PagesPast1024 "pages-past-1024" "pages of a sequence past number 1,024 are that page";
        LeftpadPastAPage "leftpad-past-a-page" "padding of whole pages is left out";
        PrefetchPastTheEnd "prefetch-past-the-end" "rows past the last page are looked up for prefetching";
        SequencesPast4096 "sequences-past-4096" "sequences past number 4,096 have the keys of the first ones";
        SinkNotInMaximum "sink-not-in-maximum" "the maximum of a row leaves its sink out";
        LseWithSink "lse-with-sink" "the LSE counts the sink, whatever its form says";
        LseNatural "lse-natural" "the LSE is to the base e, whatever its form says";
        BiasOfTheFirst "bias-of-the-first" "every sequence has the bias of the first";
        AppendPast32 "append-past-32" "sequences past the thirty-second append nothing";
        RotaryPast128 "rotary-past-128" "rows at positions past 128 are rotated as at 128";
        PartsPast64 "parts-past-64" "parts past the sixty-fourth are not merged";
        AppendBeforeCheck "append-before-check" "new keys that have room are appended before a call is refused";
    }

    /// Number of the bug that is planted; one past the last where none is.
    static PLANTED: LazyLock<AtomicUsize> = LazyLock::new(|| {
        let wanted = std::env::var("FLASHCORE_PLANTED_BUG").ok();
        let found = wanted.map_or(Some(Bug::ALL.len()), |name| Bug::ALL.iter().position(|bug| bug.name() == name));
        AtomicUsize::new(found.expect("FLASHCORE_PLANTED_BUG is the name of a planted bug"))
    });

    /// Plants one bug in this process in the place of the one before, or none.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.store(bug.map_or(Bug::ALL.len(), |bug| bug as usize), Ordering::Relaxed);
    }

    /// True if this bug is planted.
    pub(crate) fn is_planted(bug: Bug) -> bool {
        PLANTED.load(Ordering::Relaxed) == bug as usize
    }
}
