//! Constants that the code compares counts of a problem with, for suites that have cases at each of them and past it.

use crate::attend::{blocked, decode};
use crate::driver::scheduler;

/// Names of the constants, and their values.
macro_rules! limits {
    ($($module:ident::$constant:ident),* $(,)?) => {
        &[$((concat!(stringify!($module), "::", stringify!($constant)), $module::$constant)),*]
    };
}

/// Every such constant.
pub const LIMITS: &[(&str, usize)] = limits![
    blocked::KV_TILE,
    blocked::MAX_KV_TILE,
    blocked::MAX_LANES,
    blocked::MAX_PACKED_TILES,
    decode::INTERLEAVED_KV_TILE,
    decode::KV_TILE,
    decode::MAX_HEADS,
    decode::MAX_ROWS,
    scheduler::MAX_FUSED_ITEM_ROWS,
    scheduler::MAX_ITEM_ROWS,
    scheduler::MIN_ITEMS,
    scheduler::MIN_SPLIT_KEYS,
];
