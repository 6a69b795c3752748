//! Constants that kernels compare counts of a problem with, or step by, for suites that have cases at each of them and past it.

use crate::attention::sm80::config;
use crate::attention::split_kv::combine;
use crate::{merge, primitives};

/// Names of the constants, and their values.
macro_rules! limits {
    ($($module:ident::$constant:ident),* $(,)?) => {
        &[$((concat!(stringify!($module), "::", stringify!($constant)), $module::$constant as usize)),*]
    };
}

/// Every such constant.
pub const LIMITS: &[(&str, usize)] = limits![
    combine::SPLITS_AT_ONCE,
    merge::MOST_UNROLLED,
    merge::PARTS_AT_ONCE,
    primitives::LANES,
    config::MAX_SPLITS,
];
