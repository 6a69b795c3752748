//! Races: what is one, what is none, and the whole report of each.

use crate::support::{
    SHARED, at, delay, first_thread, handover, is_lane, is_warp, kernel, one_after_the_other, race, slot_of, slots,
    threads,
};
use flashcore_ir::types::{F16x2, Pred, U32, U64};
use flashcore_ir::{Compare, GlobalAddress, ReduceOp, SharedAddress, SpecialRegister};
use flashcore_sim::GlobalMemory;

#[test]
fn a_warp_reads_what_another_wrote() {
    threads(64).check(
        |k, right| {
            let [lane, own] = slots(k, 4);
            let next = k.add::<U32>(lane, 5u32);
            let next = k.rem::<U32>(next, 32u32);
            let base = k.shared_base();
            let next = k.mad::<U32>(next, 4u32, base);
            handover(
                k,
                right,
                |k| k.section("produce", |k| k.store_shared(own, &[lane])),
                |k| {
                    k.section("consume", |k| k.load_shared::<U32>(next, 1));
                },
            );
        },
        &race(SHARED + 20, at("produce", "Store", 0).lane(5), at("consume", "Load", 1).lane(0)),
    );
}

/// The last barrier of a loop that overwrites what others still read.
#[test]
fn a_warp_overwrites_what_another_reads() {
    threads(64).check(
        |k, right| {
            let [lane, own] = slots(k, 4);
            let first = is_warp(k, 0);
            k.if_uniform(first, |k| k.store_shared(own, &[lane]));
            k.cta_sync();
            handover(
                k,
                right,
                |k| {
                    k.section("read", |k| k.load_shared::<U32>(own, 1));
                },
                |k| k.section("overwrite", |k| k.store_shared(own, &[lane])),
            );
        },
        &race(SHARED, at("read", "Load", 0).lane(0), at("overwrite", "Store", 1).lane(0)),
    );
}

/// Many warps read, and all of them must be done, whichever reads first.
#[test]
fn a_write_is_compared_with_the_reads_of_every_warp() {
    threads(128).seeds(0..20).check(
        |k, right| {
            let [lane, own] = slots(k, 4);
            let writer = is_warp(k, 3);
            k.if_uniform(writer, |k| k.store_shared(own, &[lane]));
            k.cta_sync();
            k.section("read", |k| k.load_shared::<U32>(own, 1));
            // Warps 0 and 2 meet the writer; warp 1 does not.
            let warp = k.warp();
            let (compare, other, threads) = if right { (Compare::Lt, 4u32, 128) } else { (Compare::Ne, 1, 96) };
            let meets = k.compare::<U32>(compare, warp, other);
            k.if_uniform(meets, |k| k.barrier_sync(1u32, threads));
            k.if_uniform(writer, |k| {
                delay(k);
                k.section("overwrite", |k| k.store_shared(own, &[lane]));
            });
        },
        &race(SHARED, at("read", "Load", 1).lane(0), at("overwrite", "Store", 3).lane(0)),
    );
}

#[test]
fn a_lane_reads_what_another_of_its_warp_wrote() {
    threads(32).check(
        |k, right| {
            let [lane, own] = slots(k, 4);
            let other = slot_of(k, lane, 1, 4);
            k.section("produce", |k| k.store_shared(own, &[lane]));
            if right {
                k.warp_sync();
            } else {
                // It waits for the lanes, but promises nothing about memory.
                k.reduce_warp::<U32>(ReduceOp::Add, lane);
            }
            k.section("consume", |k| k.load_shared::<U32>(other, 1));
        },
        &race(SHARED + 4, at("produce", "Store", 0).lane(1), at("consume", "Load", 0).lane(0)),
    );
}

/// `ldmatrix` hands rows to lanes that did not point at them, so even a row of one's own needs `warp_sync`.
#[test]
fn load_matrix_reads_as_the_whole_warp() {
    threads(32).check(
        |k, right| {
            let [lane, row] = slots(k, 16);
            k.section("produce", |k| k.store_shared(row, &[lane, lane, lane, lane]));
            if right {
                k.warp_sync();
            }
            k.section("consume", |k| k.load_matrix::<F16x2>(row, 4, false));
        },
        &race(SHARED, at("produce", "Store", 0).lane(0), at("consume", "LoadMatrix", 0).lane(0)),
    );
}

/// The lane that reads a row is not the one that stored it by `stmatrix`.
#[test]
fn store_matrix_writes_as_the_whole_warp() {
    threads(32).check(
        |k, right| {
            k.reserve_shared(128, 128);
            let (base, lane) = (k.shared_base(), k.lane());
            let row = k.and(lane, 7u32);
            let row = k.mad::<U32>(row, 16u32, base);
            let pair = k.reinterpret::<U32, F16x2>(lane);
            k.section("store", |k| k.store_matrix(row, &[pair], false));
            if right {
                k.warp_sync();
            }
            k.section("load", |k| k.load_shared::<U32>(row, 1));
        },
        &race(SHARED, at("store", "StoreMatrix", 0), at("load", "Load", 0).lane(0)),
    );
}

/// The smallest accesses have 2 bytes: neighbours do not conflict, lanes that share one do.
#[test]
fn two_lanes_of_one_store() {
    let store = at("store", "Store", 0);
    threads(32).check(
        |k, right| {
            k.reserve_shared(128, 16);
            let (lane, base) = (k.lane(), k.shared_base());
            let location = k.mad::<U32>(lane, if right { 2u32 } else { 1 }, base);
            let location = k.and::<U32>(location, !1u32);
            let value = k.to_f32(lane);
            let value = k.f32_to_f16(value);
            k.section("store", |k| k.store_shared(location, &[value]));
        },
        &race(SHARED, store.lane(0), store.lane(1)),
    );
}

/// A warp that only arrives releases what it wrote; what it writes afterwards is not covered.
#[test]
fn a_write_after_arriving_is_not_released() {
    threads(64).check(
        |k, right| {
            let [lane, own] = slots(k, 4);
            one_after_the_other(
                k,
                |k| {
                    if !right {
                        k.barrier_arrive(1u32, 64u32);
                    }
                    k.section("produce", |k| k.store_shared(own, &[lane]));
                    if right {
                        k.barrier_arrive(1u32, 64u32);
                    }
                },
                |k| {
                    k.barrier_sync(1u32, 64u32);
                    k.section("consume", |k| k.load_shared::<U32>(own, 1));
                },
            );
        },
        &race(SHARED, at("produce", "Store", 0).lane(0), at("consume", "Load", 1).lane(0)),
    );
}

/// A barrier that a warp only arrives at does not let it see what others wrote, nor its own lanes each other.
#[test]
fn arriving_acquires_nothing() {
    threads(64).check(
        |k, right| {
            let [lane, own] = slots(k, 4);
            let other = slot_of(k, lane, 1, 4);
            one_after_the_other(
                k,
                |k| k.barrier_sync(1u32, 64u32),
                |k| {
                    k.section("produce", |k| k.store_shared(own, &[lane]));
                    if right {
                        k.barrier_sync(1u32, 64u32);
                    } else {
                        k.barrier_arrive(1u32, 64u32);
                    }
                    k.section("consume", |k| k.load_shared::<U32>(other, 1));
                },
            );
        },
        &race(SHARED + 4, at("produce", "Store", 1).lane(1), at("consume", "Load", 1).lane(0)),
    );
}

/// Order is passed on: 0 before 1 at one barrier, 1 before 2 at another, so 0 before 2; but not if 1 arrives at the
/// second before it has seen the first.
#[test]
fn order_is_transitive() {
    threads(96).check(
        |k, right| {
            let [lane, own] = slots(k, 4);
            let [is_0, is_1, is_2] = [0, 1, 2].map(|warp| is_warp(k, warp));
            k.if_uniform(is_0, |k| {
                k.section("produce", |k| k.store_shared(own, &[lane]));
                k.barrier_arrive(1u32, 64u32);
            });
            k.if_uniform(is_1, |k| {
                if !right {
                    k.barrier_arrive(2u32, 64u32);
                }
                k.barrier_sync(1u32, 64u32);
                if right {
                    k.barrier_arrive(2u32, 64u32);
                }
            });
            k.if_uniform(is_2, |k| {
                k.barrier_sync(2u32, 64u32);
                delay(k);
                k.section("consume", |k| k.load_shared::<U32>(own, 1));
            });
        },
        &race(SHARED, at("produce", "Store", 0).lane(0), at("consume", "Load", 2).lane(0)),
    );
}

/// A barrier orders the threads that met at it; those that use it next learn nothing of them.
#[test]
fn a_barrier_forgets() {
    threads(128).check(
        |k, right| {
            let [lane, own] = slots(k, 4);
            let (warp, first, third) = (k.warp(), is_warp(k, 0), is_warp(k, 2));
            let pair = k.compare::<U32>(Compare::Lt, warp, 2u32);
            k.if_uniform(first, |k| k.section("produce", |k| k.store_shared(own, &[lane])));
            if right {
                k.cta_sync();
            }
            k.if_else_uniform(pair, |_| {}, delay);
            k.barrier_sync(1u32, 64u32);
            k.if_uniform(third, |k| {
                k.section("consume", |k| k.load_shared::<U32>(own, 1));
            });
        },
        &race(SHARED, at("produce", "Store", 0).lane(0), at("consume", "Load", 2).lane(0)),
    );
}

#[test]
fn an_atomic_and_a_plain_access() {
    threads(64).check(
        |k, right| {
            k.reserve_shared(4, 4);
            let base = k.shared_base();
            let thread = k.special(SpecialRegister::ThreadX);
            let first = first_thread(k);
            let zero = k.copy::<U32>(0u32);
            k.when(first, |k| k.store_shared(base, &[zero]));
            k.cta_sync();
            one_after_the_other(
                k,
                |k| k.section("count", |k| k.reduce::<U32, SharedAddress>(ReduceOp::Add, base, thread)),
                |k| {
                    if right {
                        k.reduce::<U32, SharedAddress>(ReduceOp::Add, base, thread);
                    } else {
                        k.section("look", |k| k.load_shared::<U32>(base, 1));
                    }
                },
            );
        },
        &race(SHARED, at("count", "Reduce", 0), at("look", "Load", 1).lane(0)),
    );
}

#[test]
fn an_atomic_after_a_plain_read() {
    threads(64).check(
        |k, right| {
            k.reserve_shared(4, 4);
            let base = k.shared_base();
            let thread = k.special(SpecialRegister::ThreadX);
            let first = first_thread(k);
            k.when(first, |k| k.store_shared(base, &[thread]));
            k.cta_sync();
            handover(
                k,
                right,
                |k| {
                    k.section("look", |k| k.when(first, |k| k.load_shared::<U32>(base, 1)));
                },
                |k| k.section("count", |k| k.reduce::<U32, SharedAddress>(ReduceOp::Add, base, thread)),
            );
        },
        &race(SHARED, at("look", "Load", 0).lane(0), at("count", "Reduce", 1).lane(0)),
    );
}

/// Within a CTA, global memory follows the same rules.
#[test]
fn warps_race_in_global_memory() {
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 128);
    threads(64).on(&memory, [y]).check(
        |k, right| {
            let y = k.parameter::<U64>("y");
            let lane = k.lane();
            let own = k.mad_wide(lane, 4u32, y);
            handover(
                k,
                right,
                |k| k.section("produce", |k| k.store_one(own, lane)),
                |k| {
                    k.section("consume", |k| k.load_one::<U32>(own));
                },
            );
        },
        &race(y, at("produce", "Store", 0).lane(0), at("consume", "Load", 1).lane(0)),
    );
}

/// Nothing orders the CTAs of a launch; the report names the lowest and the highest, whichever came first.
#[test]
fn ctas_race_in_global_memory() {
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 8 * 128);
    let store = at("store", "Store", 0);
    // Of the lanes of CTA 1, the first 31 are free; the last of CTA 0 writes what the first of CTA 1 does.
    threads(32).on(&memory, [y]).grid([8, 1, 1]).seeds(0..20).check(
        |k, right| {
            let y = k.parameter::<U64>("y");
            let (lane, cta) = (k.lane(), k.special(SpecialRegister::CtaX));
            let index = k.mad::<U32>(cta, if right { 32u32 } else { 31 }, lane);
            let own = k.mad_wide(index, 4u32, y);
            k.section("store", |k| k.store_one(own, lane));
        },
        &race(y + 4 * 31, store.lane(31), store.cta([1, 0, 0]).lane(0)),
    );
    assert!(memory.is_written(y));
}

#[test]
fn a_cta_reads_what_another_writes() {
    let mut memory = GlobalMemory::new();
    let y = memory.allocate("y", &[0; 16]);
    threads(32).on(&memory, [y]).grid([4, 1, 1]).check(
        |k, right| {
            let y = k.parameter::<U64>("y");
            let (first, cta) = (is_lane(k, 0), k.special(SpecialRegister::CtaX));
            let own = k.mad_wide(cta, 4u32, y);
            k.when(first, |k| k.section("store", |k| k.store_one(own, cta)));
            let flag = if right { own } else { y };
            let last = k.compare::<U32>(Compare::Eq, cta, 3u32);
            let both = k.and::<Pred>(first, last);
            k.when(both, |k| k.section("look", |k| k.load_one::<U32>(flag)));
        },
        &race(y, at("store", "Store", 0).lane(0), at("look", "Load", 0).cta([3, 0, 0]).lane(0)),
    );
}

/// CTAs may count together; a plain read of the counter is a race.
#[test]
fn ctas_meet_in_atomics() {
    let write = |look: bool| {
        kernel(32, |k| {
            let counter = k.parameter::<U64>("counter");
            let (lane, cta) = (k.lane(), k.special(SpecialRegister::CtaX));
            let (zero, last) = (k.compare::<U32>(Compare::Eq, cta, 0u32), k.compare::<U32>(Compare::Eq, cta, 7u32));
            k.if_uniform(zero, |k| {
                k.section("count", |k| k.reduce::<U32, GlobalAddress>(ReduceOp::Add, counter, lane));
            });
            if look {
                k.when(last, |k| k.section("look", |k| k.load_one::<U32>(counter)));
            } else {
                k.unless(zero, |k| k.reduce::<U32, GlobalAddress>(ReduceOp::Add, counter, lane));
            }
        })
    };
    let mut memory = GlobalMemory::new();
    let counter = memory.allocate("counter", &[0; 4]);
    let race = race(counter, at("count", "Reduce", 0), at("look", "Load", 0).cta([7, 0, 0]));
    threads(32).on(&memory, [counter]).grid([8, 1, 1]).fails(&write(true), &race);
    memory.write(counter, &[0; 4]);
    threads(32).on(&memory, [counter]).grid([8, 1, 1]).passes(&write(false));
    assert_eq!(memory.read(counter), (8u32 * 496).to_le_bytes());
}
