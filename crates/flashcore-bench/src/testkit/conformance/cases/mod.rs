//! The cases, by family of operations.

mod arithmetic;
mod asynchronous;
mod atomics;
mod bits;
mod clusters;
mod control;
mod conversions;
mod exchange;
mod mbarriers;
mod memory;
mod moves;
mod special_functions;
mod synchronisation;
mod tensor;
mod tma;
mod warp_specialized;
mod warpgroups;
mod warpgroups_fp8;

use super::case::ConformanceCase;

/// Every case of the suite, in the order of the table of operations.
pub fn cases() -> Vec<ConformanceCase> {
    let mut list = Vec::new();
    for family in [
        moves::add,
        arithmetic::add,
        bits::add,
        conversions::add,
        special_functions::add,
        exchange::add,
        memory::add,
        atomics::add,
        asynchronous::add,
        tma::add,
        tensor::add,
        warpgroups::add,
        warp_specialized::add,
        synchronisation::add,
        mbarriers::add,
        clusters::add,
        control::add,
    ] {
        family(&mut list);
    }
    list
}
