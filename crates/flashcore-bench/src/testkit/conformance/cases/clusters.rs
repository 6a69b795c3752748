//! Clusters: special registers, and words that CTAs write into each other's shared memory.

use flashcore_ir::types::U32;
use flashcore_ir::{Compare, SpecialRegister, Type};

use crate::testkit::conformance::built::Plan;
use crate::testkit::conformance::case::ConformanceCase;
use crate::testkit::conformance::inputs::Fill;

const THREADS: u32 = 64;
const CTAS: u32 = 8;
const CLUSTER: u32 = 4;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for row in ["MapShared", "ClusterArrive", "ClusterWait"] {
        list.push(exchange(row, "exchange", false));
    }
    list.push(exchange("Load", "from another CTA", true));
    list.push(exchange("Store", "to another CTA", false));
    list.push(remote_arrival());
    list.push(special_registers());
}

fn plan(row: &'static str, form: &str) -> Plan {
    let threads = CTAS * THREADS;
    let plan =
        Plan::new(row, form, THREADS).input("word", Type::U32, threads, Fill::Bits).output("word", Type::U32, threads);
    Plan { grid: [CTAS, 1, 1], cluster: [CLUSTER, 1, 1], ..plan }
}

/// Each thread gives a word to the next CTA of its cluster, or takes one from there.
fn exchange(row: &'static str, form: &str, takes: bool) -> ConformanceCase {
    plan(row, form).case(|k, inputs, outputs| {
        k.reserve_shared(4 * THREADS, 128);
        let base = k.shared_base();
        let thread = k.special(SpecialRegister::ThreadX);
        let cta = k.special(SpecialRegister::CtaX);
        let index = k.mad::<U32>(cta, THREADS, thread);
        let from = k.mad_wide(index, 4u32, inputs[0]);
        let word = k.load_one::<U32>(from);
        let own = k.mad::<U32>(thread, 4u32, base);
        let rank = k.cluster_rank();
        let next = k.add(rank, 1u32);
        let next = k.and(next, CLUSTER - 1);
        let remote = k.map_shared(own, next);
        // A CTA may begin before the others have their memory.
        k.cluster_sync();
        let received = if takes {
            k.store_shared(own, &[word]);
            k.cluster_sync();
            k.load_cluster::<U32>(remote, 1)[0]
        } else {
            k.store_cluster(remote, &[word]);
            k.cluster_sync();
            k.load_shared::<U32>(own, 1)[0]
        };
        let to = k.mad_wide(index, 4u32, outputs[0]);
        k.store_one(to, received);
        k.cluster_sync();
    })
}

/// Variant of the above in which each CTA waits at an `mbarrier` of its own, at which the threads of the other arrive.
fn remote_arrival() -> ConformanceCase {
    plan("MbarrierArrive", "in another CTA").case(|k, inputs, outputs| {
        let slots = k.reserve_shared(4 * THREADS, 128);
        let barrier = k.reserve_mbarrier();
        let base = k.shared_base();
        let (slots, barrier) = (k.add(base, slots), k.add(base, barrier));
        let thread = k.special(SpecialRegister::ThreadX);
        let cta = k.special(SpecialRegister::CtaX);
        let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
        k.when(first, |k| {
            k.mbarrier_init(barrier, THREADS);
            k.fence_mbarrier_init();
        });
        k.cluster_sync();
        let index = k.mad::<U32>(cta, THREADS, thread);
        let from = k.mad_wide(index, 4u32, inputs[0]);
        let word = k.load_one::<U32>(from);
        let own = k.mad::<U32>(thread, 4u32, slots);
        let rank = k.cluster_rank();
        let next = k.xor(rank, 1u32);
        let (remote, remote_barrier) = (k.map_shared(own, next), k.map_shared(barrier, next));
        k.store_cluster(remote, &[word]);
        k.mbarrier_arrive_remote(remote_barrier, 1u32);
        k.mbarrier_wait(barrier, 0u32);
        let received = k.load_shared::<U32>(own, 1)[0];
        let to = k.mad_wide(index, 4u32, outputs[0]);
        k.store_one(to, received);
        k.cluster_sync();
    })
}

fn special_registers() -> ConformanceCase {
    let registers: Vec<_> =
        SpecialRegister::ALL.iter().filter(|special| special.name().starts_with("cluster")).collect();
    let (threads, count) = (32, 2 * 4 * 2);
    let mut plan = Plan::new("Special", "of clusters", threads);
    for special in &registers {
        plan = plan.output(&format!("1 + {special}"), Type::U32, threads * count);
    }
    plan = Plan { grid: [2, 4, 2], cluster: [2, 2, 1], ..plan };
    plan.case(|k, _, outputs| {
        let thread = k.special(SpecialRegister::ThreadX);
        let [x, y, z] =
            [SpecialRegister::CtaX, SpecialRegister::CtaY, SpecialRegister::CtaZ].map(|axis| k.special(axis));
        let row = k.mad::<U32>(z, 4u32, y);
        let cta = k.mad::<U32>(row, 2u32, x);
        let index = k.mad::<U32>(cta, threads, thread);
        for (special, output) in registers.iter().zip(outputs) {
            let value = k.special(**special);
            let more = k.add(value, 1u32);
            let to = k.mad_wide(index, 4u32, *output);
            k.store_one(to, more);
        }
    })
}
