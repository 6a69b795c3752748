//! mbarriers: values that warps pass to each other through a ring of one slot.

use flashcore_ir::types::{Pred, U32, U64};
use flashcore_ir::{Builder, Compare, Reg, SpecialRegister, Type};

use crate::testkit::conformance::built::Plan;
use crate::testkit::conformance::case::ConformanceCase;
use crate::testkit::conformance::inputs::Fill;

const THREADS: u32 = 64;
const HALF: u32 = 32;
const ROUNDS: u32 = 5;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    let ring = Ring { expect_tx: ExpectTx::None, waits: Waits::Blocking, again: false };
    for row in ["MbarrierInit", "MbarrierArrive", "MbarrierWait", "FenceMbarrierInit"] {
        list.push(pass(row, "ring", ring));
    }
    list.push(pass("MbarrierArriveExpect", "ring of no bytes", Ring { expect_tx: ExpectTx::Arriving, ..ring }));
    list.push(pass("MbarrierExpect", "ring of no bytes", Ring { expect_tx: ExpectTx::Before, ..ring }));
    list.push(pass("MbarrierTest", "ring", Ring { waits: Waits::Testing, ..ring }));
    list.push(pass("MbarrierTest", "ring that suspends", Ring { waits: Waits::Trying, ..ring }));
    list.push(pass("MbarrierInvalidate", "ring, initialised again", Ring { again: true, ..ring }));
}

/// The operation that adds bytes to the transaction count.
#[derive(Clone, Copy)]
enum ExpectTx {
    None,
    Arriving,
    Before,
}

#[derive(Clone, Copy)]
enum Waits {
    Blocking,
    Testing,
    Trying,
}

#[derive(Clone, Copy)]
struct Ring {
    expect_tx: ExpectTx,
    waits: Waits,
    /// True if the barriers are invalidated, initialised anew and used again.
    again: bool,
}

/// Lanes of warp 0 read a number for each round, which the mirrored lanes of warp 1 write.
fn pass(row: &'static str, form: &str, ring: Ring) -> ConformanceCase {
    let numbers = HALF * ROUNDS;
    Plan::new(row, form, THREADS)
        .input("number", Type::U32, numbers, Fill::Bits)
        .output("number", Type::U32, numbers)
        .output("number again", Type::U32, numbers)
        .case(|k, inputs, outputs| {
            let slots = k.reserve_shared(4 * HALF, 128);
            let barriers = [k.reserve_mbarrier(), k.reserve_mbarrier()];
            let base = k.shared_base();
            let slots = k.add(base, slots);
            let [full, empty] = barriers.map(|offset| k.add(base, offset));
            let thread = k.special(SpecialRegister::ThreadX);
            let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
            for (round, output) in outputs.iter().enumerate() {
                if round == 0 || ring.again {
                    k.when(first, |k| {
                        if round > 0 {
                            k.mbarrier_invalidate(full);
                            k.mbarrier_invalidate(empty);
                        }
                        k.mbarrier_init(full, HALF);
                        k.mbarrier_init(empty, HALF);
                        k.fence_mbarrier_init();
                    });
                    k.cta_sync();
                }
                // Phases go on where the first use left them, unless the barriers are new.
                let before = if ring.again { 0 } else { round as u32 * ROUNDS };
                pass_once(k, ring, inputs[0], *output, [slots, full, empty], before);
                k.cta_sync();
            }
        })
}

fn pass_once(
    k: &mut Builder,
    ring: Ring,
    source: Reg<U64>,
    target: Reg<U64>,
    [slots, full, empty]: [Reg<U32>; 3],
    phases_before: u32,
) {
    let (lane, warp) = (k.lane(), k.warp());
    let own = k.mad::<U32>(lane, 4u32, slots);
    let mirror = k.xor(lane, 31u32);
    let other = k.mad::<U32>(mirror, 4u32, slots);
    let produces = k.compare::<U32>(Compare::Eq, warp, 0u32);
    let parity = |k: &mut Builder, round: Reg<U32>| {
        let phase = k.add(round, phases_before);
        k.and(phase, 1u32)
    };
    k.if_else_uniform(
        produces,
        |k| {
            k.for_uniform(0u32, ROUNDS, 1u32, |k, round| {
                let index = k.mad::<U32>(round, HALF, lane);
                let from = k.mad_wide(index, 4u32, source);
                let number = k.load_one::<U32>(from);
                let before = parity(k, round);
                let before = k.xor(before, 1u32);
                wait(k, ring.waits, empty, before);
                k.store_shared(own, &[number]);
                match ring.expect_tx {
                    ExpectTx::None => k.mbarrier_arrive(full, 1u32),
                    ExpectTx::Arriving => k.mbarrier_arrive_expect(full, 0u32),
                    ExpectTx::Before => {
                        k.mbarrier_expect(full, 0u32);
                        k.mbarrier_arrive(full, 1u32);
                    }
                }
            });
        },
        |k| {
            k.for_uniform(0u32, ROUNDS, 1u32, |k, round| {
                let phase = parity(k, round);
                wait(k, ring.waits, full, phase);
                let number = k.load_shared::<U32>(other, 1)[0];
                let index = k.mad::<U32>(round, HALF, lane);
                let to = k.mad_wide(index, 4u32, target);
                k.store_one(to, number);
                k.mbarrier_arrive(empty, 1u32);
            });
        },
    );
}

fn wait(k: &mut Builder, waits: Waits, barrier: Reg<U32>, parity: Reg<U32>) {
    if matches!(waits, Waits::Blocking) {
        k.mbarrier_wait(barrier, parity);
        return;
    }
    let complete = k.register::<Pred>();
    let no = k.compare::<U32>(Compare::Ne, parity, parity);
    k.set(complete, no);
    k.while_lanes(
        |k| k.not(complete),
        |k| {
            let asked = match waits {
                Waits::Trying => k.mbarrier_try_wait(barrier, parity),
                Waits::Testing | Waits::Blocking => k.mbarrier_test(barrier, parity),
            };
            k.set(complete, asked);
        },
    );
}
