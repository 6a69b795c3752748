//! Races: what is one, what is none, and the whole report of each.

use crate::support::{At, SHARED, fault, kernel, location, one_after_the_other, run, run_seeded};
use flashcore_ir::types::{U32, U64};
use flashcore_ir::{Builder, Compare, GlobalAddress, ReduceOp, Reg, SharedAddress, Space, SpecialRegister};
use flashcore_sim::{AccessKind, Argument, Fault, FaultKind, GlobalMemory, Launch, Location, Options, launch};

fn race(space: Space, location: Location, access: AccessKind, earlier: Location, earlier_access: AccessKind) -> Fault {
    let kind = FaultKind::Race { space, access, earlier_access, earlier: Box::new(earlier) };
    Fault { kind, location }
}

/// The place of word `index` in shared memory.
fn word(k: &mut Builder, index: Reg<U32>) -> Reg<U32> {
    let base = k.shared_base();
    k.mad::<U32>(index, 4u32, base)
}

#[test]
fn a_warp_reads_what_another_wrote() {
    let write = |synchronise: bool| {
        kernel(64, |k| {
            k.reserve_shared(128, 16);
            let lane = k.lane();
            let own = word(k, lane);
            let next = k.add::<U32>(lane, 5u32);
            let next = k.rem::<U32>(next, 32u32);
            let next = word(k, next);
            one_after_the_other(
                k,
                |k| {
                    k.section("produce", |k| k.store_shared(own, &[lane]));
                    if synchronise {
                        k.cta_sync();
                    }
                },
                |k| {
                    if synchronise {
                        k.cta_sync();
                    }
                    k.section("consume", |k| k.load_shared::<U32>(next, 1));
                },
            );
        })
    };
    let wrong = write(false);
    let expected = race(
        Space::Shared,
        location(&wrong, "consume", "Load", 1).lane(0).address(SHARED + 20),
        AccessKind::Read,
        location(&wrong, "produce", "Store", 0).lane(5).address(SHARED + 20),
        AccessKind::Write,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(true), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

/// The last barrier of a loop that overwrites what others still read.
#[test]
fn a_warp_overwrites_what_another_reads() {
    let write = |synchronise: bool| {
        kernel(64, |k| {
            k.reserve_shared(128, 16);
            let lane = k.lane();
            let own = word(k, lane);
            let warp = k.warp();
            let first = k.compare::<U32>(Compare::Eq, warp, 0u32);
            k.if_uniform(first, |k| k.store_shared(own, &[lane]));
            k.cta_sync();
            one_after_the_other(
                k,
                |k| {
                    k.section("read", |k| k.load_shared::<U32>(own, 1));
                    if synchronise {
                        k.cta_sync();
                    }
                },
                |k| {
                    if synchronise {
                        k.cta_sync();
                    }
                    k.section("overwrite", |k| k.store_shared(own, &[lane]));
                },
            );
        })
    };
    let wrong = write(false);
    let expected = race(
        Space::Shared,
        location(&wrong, "overwrite", "Store", 1).lane(0).address(SHARED),
        AccessKind::Write,
        location(&wrong, "read", "Load", 0).lane(0).address(SHARED),
        AccessKind::Read,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(true), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

/// Many warps read, and all of them must be done.
#[test]
fn a_write_is_compared_with_the_reads_of_every_warp() {
    let write = |synchronise: bool| {
        kernel(128, |k| {
            k.reserve_shared(128, 16);
            let lane = k.lane();
            let own = word(k, lane);
            let warp = k.warp();
            let writer = k.compare::<U32>(Compare::Eq, warp, 3u32);
            k.if_uniform(writer, |k| k.store_shared(own, &[lane]));
            k.cta_sync();
            k.section("read", |k| k.load_shared::<U32>(own, 1));
            // Warps 0 and 2 meet the writer; warp 1 does not.
            let all = k.compare::<U32>(Compare::Lt, warp, 4u32);
            let meets = if synchronise { all } else { k.compare::<U32>(Compare::Ne, warp, 1u32) };
            let threads = if synchronise { 128 } else { 96 };
            k.if_uniform(meets, |k| k.barrier_sync(1u32, threads));
            k.if_uniform(writer, |k| {
                crate::support::delay(k);
                k.section("overwrite", |k| k.store_shared(own, &[lane]));
            });
        })
    };
    let wrong = write(false);
    let expected = race(
        Space::Shared,
        location(&wrong, "overwrite", "Store", 3).lane(0).address(SHARED),
        AccessKind::Write,
        location(&wrong, "read", "Load", 1).lane(0).address(SHARED),
        AccessKind::Read,
    );
    // Whichever warp reads first.
    let right = write(true);
    for seed in 0..20 {
        assert_eq!(fault(run_seeded(&wrong, &[], &GlobalMemory::new(), seed)), expected);
        assert_eq!(run_seeded(&right, &[], &GlobalMemory::new(), seed).map(|_| ()), Ok(()));
    }
}

#[test]
fn a_lane_reads_what_another_of_its_warp_wrote() {
    let write = |synchronise: bool| {
        kernel(32, |k| {
            k.reserve_shared(128, 16);
            let lane = k.lane();
            let own = word(k, lane);
            let other = k.xor::<U32>(lane, 1u32);
            let other = word(k, other);
            k.section("produce", |k| k.store_shared(own, &[lane]));
            if synchronise {
                k.warp_sync();
            } else {
                // It waits for the lanes, but promises nothing about memory.
                k.reduce_warp::<U32>(ReduceOp::Add, lane);
            }
            k.section("consume", |k| k.load_shared::<U32>(other, 1));
        })
    };
    let wrong = write(false);
    let expected = race(
        Space::Shared,
        location(&wrong, "consume", "Load", 0).lane(0).address(SHARED + 4),
        AccessKind::Read,
        location(&wrong, "produce", "Store", 0).lane(1).address(SHARED + 4),
        AccessKind::Write,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(true), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

/// `ldmatrix` hands rows to lanes that did not point at them, so even a row of one's own needs `warp_sync`.
#[test]
fn load_matrix_reads_as_the_whole_warp() {
    let write = |synchronise: bool| {
        kernel(32, |k| {
            k.reserve_shared(512, 16);
            let (lane, base) = (k.lane(), k.shared_base());
            let row = k.mad::<U32>(lane, 16u32, base);
            k.section("produce", |k| k.store_shared(row, &[lane, lane, lane, lane]));
            if synchronise {
                k.warp_sync();
            }
            k.section("consume", |k| k.load_matrix::<flashcore_ir::types::F16x2>(row, 4, false));
        })
    };
    let wrong = write(false);
    let expected = race(
        Space::Shared,
        location(&wrong, "consume", "LoadMatrix", 0).lane(0).address(SHARED),
        AccessKind::Read,
        location(&wrong, "produce", "Store", 0).lane(0).address(SHARED),
        AccessKind::Write,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(true), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

/// The smallest accesses have 2 bytes: neighbours do not conflict, lanes that share one do.
#[test]
fn two_lanes_of_one_store() {
    let write = |bytes: u32| {
        kernel(32, |k| {
            k.reserve_shared(128, 16);
            let (lane, base) = (k.lane(), k.shared_base());
            let location = k.mad::<U32>(lane, bytes, base);
            let location = k.and::<U32>(location, !1u32);
            let value = k.to_f32(lane);
            let value = k.f32_to_f16(value);
            k.section("store", |k| k.store_shared(location, &[value]));
        })
    };
    let wrong = write(1);
    let expected = race(
        Space::Shared,
        location(&wrong, "store", "Store", 0).lane(1).address(SHARED),
        AccessKind::Write,
        location(&wrong, "store", "Store", 0).lane(0).address(SHARED),
        AccessKind::Write,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(2), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

/// A warp that only arrives releases what it wrote; what it writes afterwards is not covered.
#[test]
fn a_write_after_arriving_is_not_released() {
    let write = |after: bool| {
        kernel(64, |k| {
            k.reserve_shared(128, 16);
            let lane = k.lane();
            let own = word(k, lane);
            let produce = |k: &mut Builder| k.section("produce", |k| k.store_shared(own, &[lane]));
            one_after_the_other(
                k,
                |k| {
                    if !after {
                        produce(k);
                    }
                    k.barrier_arrive(1u32, 64u32);
                    if after {
                        produce(k);
                    }
                },
                |k| {
                    k.barrier_sync(1u32, 64u32);
                    k.section("consume", |k| k.load_shared::<U32>(own, 1));
                },
            );
        })
    };
    let wrong = write(true);
    let expected = race(
        Space::Shared,
        location(&wrong, "consume", "Load", 1).lane(0).address(SHARED),
        AccessKind::Read,
        location(&wrong, "produce", "Store", 0).lane(0).address(SHARED),
        AccessKind::Write,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(false), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

/// A barrier that a warp only arrives at does not let it see what others wrote, nor its own lanes each other.
#[test]
fn arriving_acquires_nothing() {
    let write = |waits: bool| {
        kernel(64, |k| {
            k.reserve_shared(128, 16);
            let lane = k.lane();
            let own = word(k, lane);
            let other = k.xor::<U32>(lane, 1u32);
            let other = word(k, other);
            one_after_the_other(
                k,
                |k| k.barrier_sync(1u32, 64u32),
                |k| {
                    k.section("produce", |k| k.store_shared(own, &[lane]));
                    if waits {
                        k.barrier_sync(1u32, 64u32);
                    } else {
                        k.barrier_arrive(1u32, 64u32);
                    }
                    k.section("consume", |k| k.load_shared::<U32>(other, 1));
                },
            );
        })
    };
    let wrong = write(false);
    let expected = race(
        Space::Shared,
        location(&wrong, "consume", "Load", 1).lane(0).address(SHARED + 4),
        AccessKind::Read,
        location(&wrong, "produce", "Store", 1).lane(1).address(SHARED + 4),
        AccessKind::Write,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(true), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

/// Order is passed on: 0 before 1 at one barrier, 1 before 2 at another, so 0 before 2; but not if 1 arrives at the
/// second before it has seen the first.
#[test]
fn order_is_transitive() {
    let write = |passes_on: bool| {
        kernel(96, |k| {
            k.reserve_shared(128, 16);
            let (lane, warp) = (k.lane(), k.warp());
            let own = word(k, lane);
            let [is_0, is_1, is_2] = [0, 1, 2].map(|index| k.compare::<U32>(Compare::Eq, warp, index));
            k.if_uniform(is_0, |k| {
                k.section("produce", |k| k.store_shared(own, &[lane]));
                k.barrier_arrive(1u32, 64u32);
            });
            k.if_uniform(is_1, |k| {
                if !passes_on {
                    k.barrier_arrive(2u32, 64u32);
                }
                k.barrier_sync(1u32, 64u32);
                if passes_on {
                    k.barrier_arrive(2u32, 64u32);
                }
            });
            k.if_uniform(is_2, |k| {
                k.barrier_sync(2u32, 64u32);
                crate::support::delay(k);
                k.section("consume", |k| k.load_shared::<U32>(own, 1));
            });
        })
    };
    let wrong = write(false);
    let expected = race(
        Space::Shared,
        location(&wrong, "consume", "Load", 2).lane(0).address(SHARED),
        AccessKind::Read,
        location(&wrong, "produce", "Store", 0).lane(0).address(SHARED),
        AccessKind::Write,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(true), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

/// A barrier orders the threads that met at it; those that use it next learn nothing of them.
#[test]
fn a_barrier_forgets() {
    let write = |together: bool| {
        kernel(128, |k| {
            k.reserve_shared(128, 16);
            let (lane, warp) = (k.lane(), k.warp());
            let own = word(k, lane);
            let first = k.compare::<U32>(Compare::Eq, warp, 0u32);
            let pair = k.compare::<U32>(Compare::Lt, warp, 2u32);
            let third = k.compare::<U32>(Compare::Eq, warp, 2u32);
            k.if_uniform(first, |k| k.section("produce", |k| k.store_shared(own, &[lane])));
            if together {
                k.cta_sync();
            }
            k.if_else_uniform(
                pair,
                |k| k.barrier_sync(1u32, 64u32),
                |k| {
                    crate::support::delay(k);
                    k.barrier_sync(1u32, 64u32);
                },
            );
            k.if_uniform(third, |k| {
                k.section("consume", |k| k.load_shared::<U32>(own, 1));
            });
        })
    };
    let wrong = write(false);
    let expected = race(
        Space::Shared,
        location(&wrong, "consume", "Load", 2).lane(0).address(SHARED),
        AccessKind::Read,
        location(&wrong, "produce", "Store", 0).lane(0).address(SHARED),
        AccessKind::Write,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(true), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

#[test]
fn an_atomic_and_a_plain_access() {
    let write = |atomic: bool| {
        kernel(64, |k| {
            k.reserve_shared(4, 4);
            let base = k.shared_base();
            let thread = k.special(SpecialRegister::ThreadX);
            let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
            let zero = k.copy::<U32>(0u32);
            k.when(first, |k| k.store_shared(base, &[zero]));
            k.cta_sync();
            let add = |k: &mut Builder| k.reduce::<U32, SharedAddress>(ReduceOp::Add, base, thread);
            one_after_the_other(
                k,
                |k| k.section("count", |k| add(k)),
                |k| {
                    if atomic {
                        add(k);
                    } else {
                        k.section("look", |k| k.load_shared::<U32>(base, 1));
                    }
                },
            );
        })
    };
    let wrong = write(false);
    let mut earlier = location(&wrong, "count", "Reduce", 0).address(SHARED);
    earlier.lane = None;
    let expected = race(
        Space::Shared,
        location(&wrong, "look", "Load", 1).lane(0).address(SHARED),
        AccessKind::Read,
        earlier,
        AccessKind::Atomic,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(true), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

#[test]
fn an_atomic_after_a_plain_read() {
    let write = |synchronise: bool| {
        kernel(64, |k| {
            k.reserve_shared(4, 4);
            let base = k.shared_base();
            let thread = k.special(SpecialRegister::ThreadX);
            let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
            k.when(first, |k| k.store_shared(base, &[thread]));
            k.cta_sync();
            one_after_the_other(
                k,
                |k| {
                    k.section("look", |k| k.when(first, |k| k.load_shared::<U32>(base, 1)));
                    if synchronise {
                        k.cta_sync();
                    }
                },
                |k| {
                    if synchronise {
                        k.cta_sync();
                    }
                    k.section("count", |k| k.reduce::<U32, SharedAddress>(ReduceOp::Add, base, thread));
                },
            );
        })
    };
    let wrong = write(false);
    let expected = race(
        Space::Shared,
        location(&wrong, "count", "Reduce", 1).lane(0).address(SHARED),
        AccessKind::Atomic,
        location(&wrong, "look", "Load", 0).lane(0).address(SHARED),
        AccessKind::Read,
    );
    assert_eq!(fault(run(&wrong, &[], &GlobalMemory::new())), expected);
    assert_eq!(run(&write(true), &[], &GlobalMemory::new()).map(|_| ()), Ok(()));
}

/// Within a CTA, global memory follows the same rules.
#[test]
fn warps_race_in_global_memory() {
    let write = |synchronise: bool| {
        kernel(64, |k| {
            let y = k.parameter::<U64>("y");
            let lane = k.lane();
            let own = k.mad_wide(lane, 4u32, y);
            one_after_the_other(
                k,
                |k| {
                    k.section("produce", |k| k.store_one(own, lane));
                    if synchronise {
                        k.cta_sync();
                    }
                },
                |k| {
                    if synchronise {
                        k.cta_sync();
                    }
                    k.section("consume", |k| k.load_one::<U32>(own));
                },
            );
        })
    };
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 128);
    let wrong = write(false);
    let expected = race(
        Space::Global,
        location(&wrong, "consume", "Load", 1).lane(0).address(y),
        AccessKind::Read,
        location(&wrong, "produce", "Store", 0).lane(0).address(y),
        AccessKind::Write,
    );
    assert_eq!(fault(run(&wrong, &[Argument::U64(y)], &memory)), expected);
    assert_eq!(run(&write(true), &[Argument::U64(y)], &memory).map(|_| ()), Ok(()));
}

/// Nothing orders the CTAs of a launch; the report names the lowest and the highest, whoever came first.
#[test]
fn ctas_race_in_global_memory() {
    let write = |stride: u32| {
        kernel(32, |k| {
            let y = k.parameter::<U64>("y");
            let (lane, cta) = (k.lane(), k.special(SpecialRegister::CtaX));
            let index = k.mad::<U32>(cta, stride, lane);
            let own = k.mad_wide(index, 4u32, y);
            k.section("store", |k| k.store_one(own, lane));
        })
    };
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 8 * 128);
    let start = |kernel: &flashcore_ir::VerifiedKernel| {
        let launched = Launch { grid: [8, 1, 1], arguments: vec![Argument::U64(y)] };
        launch(kernel, &launched, &memory, &Options::default())
    };
    // Of the lanes of CTA 1, the first 31 are free; the last of CTA 0 writes what the first of CTA 1 does.
    let wrong = write(31);
    let expected = race(
        Space::Global,
        location(&wrong, "store", "Store", 0).cta(1).lane(0).address(y + 4 * 31),
        AccessKind::Write,
        location(&wrong, "store", "Store", 0).lane(31).address(y + 4 * 31),
        AccessKind::Write,
    );
    for _ in 0..20 {
        assert_eq!(fault(start(&wrong)), expected);
    }
    assert_eq!(start(&write(32)).map(|_| ()), Ok(()));
    assert!(memory.is_written(y));
}

#[test]
fn a_cta_reads_what_another_writes() {
    let write = |own_flag: bool| {
        kernel(32, |k| {
            let y = k.parameter::<U64>("y");
            let (lane, cta) = (k.lane(), k.special(SpecialRegister::CtaX));
            let first = k.compare::<U32>(Compare::Eq, lane, 0u32);
            let own = k.mad_wide(cta, 4u32, y);
            k.when(first, |k| k.section("store", |k| k.store_one(own, cta)));
            let flag = if own_flag { own } else { y };
            let last = k.compare::<U32>(Compare::Eq, cta, 3u32);
            let both = k.and::<flashcore_ir::types::Pred>(first, last);
            k.when(both, |k| k.section("look", |k| k.load_one::<U32>(flag)));
        })
    };
    let mut memory = GlobalMemory::new();
    let y = memory.allocate("y", &[0; 16]);
    let start = |kernel: &flashcore_ir::VerifiedKernel| {
        let launched = Launch { grid: [4, 1, 1], arguments: vec![Argument::U64(y)] };
        launch(kernel, &launched, &memory, &Options::default())
    };
    let wrong = write(false);
    let expected = race(
        Space::Global,
        location(&wrong, "look", "Load", 0).cta(3).lane(0).address(y),
        AccessKind::Read,
        location(&wrong, "store", "Store", 0).lane(0).address(y),
        AccessKind::Write,
    );
    assert_eq!(fault(start(&wrong)), expected);
    assert_eq!(start(&write(true)).map(|_| ()), Ok(()));
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
            k.unless(zero, |k| {
                if !look {
                    k.reduce::<U32, GlobalAddress>(ReduceOp::Add, counter, lane);
                }
            });
            if look {
                k.when(last, |k| k.section("look", |k| k.load_one::<U32>(counter)));
            }
        })
    };
    let mut memory = GlobalMemory::new();
    let counter = memory.allocate("counter", &[0; 4]);
    let start = |kernel: &flashcore_ir::VerifiedKernel| {
        let launched = Launch { grid: [8, 1, 1], arguments: vec![Argument::U64(counter)] };
        launch(kernel, &launched, &memory, &Options::default())
    };
    let wrong = write(true);
    let mut later = location(&wrong, "look", "Load", 0).cta(7).address(counter);
    later.lane = None;
    let mut earlier = location(&wrong, "count", "Reduce", 0).address(counter);
    earlier.lane = None;
    let expected = race(Space::Global, later, AccessKind::Read, earlier, AccessKind::Atomic);
    assert_eq!(fault(start(&wrong)), expected);
    memory.write(counter, &[0; 4]);
    let start = |kernel: &flashcore_ir::VerifiedKernel| {
        let launched = Launch { grid: [8, 1, 1], arguments: vec![Argument::U64(counter)] };
        launch(kernel, &launched, &memory, &Options::default())
    };
    assert_eq!(start(&write(false)).map(|_| ()), Ok(()));
    assert_eq!(memory.read(counter), (8u32 * 496).to_le_bytes());
}
