//! Asynchronous copies, their groups and waits: moves of bits.

use flashcore_ir::{Arch, Compare, CopyCache, L2Prefetch, Op, RegisterId, Space, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{THREADS, Writer, at, constant, register};

const CTAS: u32 = 8;
/// Bytes that each thread copies at most.
const SLOT: u32 = 16;

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for bytes in [4, 8, 16] {
        for cache in CopyCache::ALL {
            for prefetch in L2Prefetch::ALL {
                for zero_fill in [false, true] {
                    let case = copy(Copy { bytes, cache: *cache, prefetch: *prefetch, zero_fill });
                    if case.verified(Arch::Sm120).is_ok() {
                        list.push(case);
                    }
                }
            }
        }
    }
    list.push(groups("CopyAsyncCommit", "CopyAsyncCommit"));
    list.push(groups("CopyAsyncWait", "CopyAsyncWait"));
    list.push(wait_for_all());
    for (row, bulk) in [
        ("BulkStore", Bulk { constant_size: true, read_first: false }),
        ("BulkStore", Bulk { constant_size: false, read_first: false }),
        ("BulkWait", Bulk { constant_size: true, read_first: true }),
        ("FenceProxyAsync", Bulk { constant_size: false, read_first: true }),
    ] {
        list.push(bulk_store(row, bulk));
    }
    list.push(bulk_groups());
}

#[derive(Clone, Copy)]
struct Copy {
    bytes: u32,
    cache: CopyCache,
    prefetch: L2Prefetch,
    zero_fill: bool,
}

/// The bytes of this thread in an input, and in the output.
fn slots(writer: &mut Writer, name: &str) -> (RegisterId, RegisterId) {
    let words = writer.count() * SLOT as usize / 4;
    let input = writer.input_address(name, Type::U32, words, Fill::Bits);
    let output = writer.output_address(name, Type::U32, words);
    (writer.element(input, writer.thread, SLOT), writer.element(output, writer.thread, SLOT))
}

/// Moves what lies in shared memory to the output.
fn write_out(writer: &mut Writer, shared: RegisterId, bytes: u32, output: RegisterId) {
    let words = writer.load_many(Space::Shared, Type::U32, bytes / 4, at(shared, 0));
    writer.store_many(Space::Global, Type::U32, words, at(output, 0));
}

fn copy(copy: Copy) -> ConformanceCase {
    let Copy { bytes, cache, prefetch, zero_fill } = copy;
    let how = if zero_fill { " zero fill" } else { "" };
    let name = format!("CopyAsync {bytes} {cache} {prefetch}{how}");
    let mut writer = Writer::with_launch(name, THREADS, [CTAS, 1, 1]);
    let (source, output) = slots(&mut writer, "bytes");
    // Every number of bytes that may be read, none included.
    let source_bytes = if zero_fill {
        vec![writer.input("source_bytes", Type::U32, Fill::Below(u64::from(bytes) + 1))]
    } else {
        Vec::new()
    };
    let target = writer.shared_slots(SLOT);
    let (target, source) = (at(target, 0), at(source, 0));
    writer.push(Op::CopyAsync { bytes, cache, prefetch, zero_fill, source_bytes, target, source });
    writer.push(Op::CopyAsyncCommit {});
    writer.push(Op::CopyAsyncWait { pending: 0 });
    write_out(&mut writer, target.base, bytes, output);
    writer.finish("CopyAsync", Tolerance::Bits)
}

fn plain_copy(writer: &mut Writer, target: RegisterId, source: RegisterId) {
    writer.push(Op::CopyAsync {
        bytes: SLOT,
        cache: CopyCache::L2,
        prefetch: L2Prefetch::None,
        zero_fill: false,
        source_bytes: Vec::new(),
        target: at(target, 0),
        source: at(source, 0),
    });
}

/// Four groups, one of them empty, each read as soon as a wait covers it; then others read what a thread copied.
fn groups(name: &str, row: &str) -> ConformanceCase {
    let mut writer = Writer::with_launch(format!("{name} groups"), THREADS, [CTAS, 1, 1]);
    let stages: Vec<_> = ["first", "second", "third"]
        .into_iter()
        .map(|name| {
            let (source, output) = slots(&mut writer, name);
            let shared = writer.shared_slots(SLOT);
            (source, output, shared)
        })
        .collect();
    for (index, (source, _, shared)) in stages.iter().enumerate() {
        plain_copy(&mut writer, *shared, *source);
        writer.push(Op::CopyAsyncCommit {});
        if index == 1 {
            writer.push(Op::CopyAsyncCommit {});
        }
    }
    // Groups: first, second, an empty one, third.
    for (pending, (_, output, shared)) in [3, 2, 0].into_iter().zip(&stages) {
        writer.push(Op::CopyAsyncWait { pending });
        write_out(&mut writer, *shared, SLOT, *output);
    }
    writer.barrier();
    let neighbour = writer.register(Type::U32);
    let (_, _, shared) = stages[1];
    // 16 bytes to a thread, slots at a multiple of 128: the other of each pair of threads.
    writer.push(Op::Xor { ty: Type::U32, d: neighbour, a: register(shared), b: constant(SLOT) });
    let word = writer.load_many(Space::Shared, Type::U32, 1, at(neighbour, 4));
    writer.output("of the neighbour", Type::U32, word[0]);
    writer.finish(row, Tolerance::Bits)
}

/// Copies of which some were committed and some were not.
fn wait_for_all() -> ConformanceCase {
    let mut writer = Writer::with_launch("CopyAsyncWaitAll", THREADS, [CTAS, 1, 1]);
    let (first, first_output) = slots(&mut writer, "committed");
    let (second, second_output) = slots(&mut writer, "not committed");
    let (first_shared, second_shared) = (writer.shared_slots(SLOT), writer.shared_slots(SLOT));
    plain_copy(&mut writer, first_shared, first);
    writer.push(Op::CopyAsyncCommit {});
    plain_copy(&mut writer, second_shared, second);
    writer.push(Op::CopyAsyncWaitAll {});
    write_out(&mut writer, first_shared, SLOT, first_output);
    write_out(&mut writer, second_shared, SLOT, second_output);
    writer.finish("CopyAsyncWaitAll", Tolerance::Bits)
}

#[derive(Clone, Copy)]
struct Bulk {
    /// True if the number of bytes is a constant.
    constant_size: bool,
    /// True if the source is waited for first, and overwritten.
    read_first: bool,
}

/// Every thread puts its bytes into shared memory; the first thread sends them all away.
fn bulk_store(row: &str, bulk: Bulk) -> ConformanceCase {
    let Bulk { constant_size, read_first } = bulk;
    let how = match (constant_size, read_first) {
        (true, false) => "of constant size",
        (false, false) => "of a size in a register",
        (true, true) => "read, then overwritten",
        (false, true) => "of a size in a register, read, then overwritten",
    };
    let mut writer = Writer::with_launch(format!("{row} {how}"), THREADS, [CTAS, 1, 1]);
    let words = writer.count() * SLOT as usize / 4;
    let input = writer.input_address("bytes", Type::U32, words, Fill::Bits);
    let output = writer.output_address("bytes", Type::U32, words);
    let source = writer.element(input, writer.thread, SLOT);
    let slot = writer.shared_slots(SLOT);
    let values = writer.load_many(Space::Global, Type::U32, 4, at(source, 0));
    writer.store_many(Space::Shared, Type::U32, values, at(slot, 0));
    writer.push(Op::FenceProxyAsync {});
    writer.barrier();
    let total = THREADS * SLOT;
    let size = if constant_size { constant(total) } else { register(writer.set(Type::U32, total.into())) };
    let first = writer.compare(Compare::Eq, writer.local, 0u32);
    let cta = writer.element(output, writer.thread, SLOT);
    writer.choice(
        first,
        false,
        |writer| {
            writer.push(Op::BulkStore { bytes: size, target: at(cta, 0), source: at(slot, 0) });
            writer.push(Op::BulkCommit {});
            if read_first {
                writer.push(Op::BulkWait { pending: 0, read: true });
            } else {
                writer.push(Op::BulkWait { pending: 0, read: false });
            }
        },
        |_| {},
    );
    if read_first {
        writer.barrier();
        let zero = writer.set(Type::U32, 0);
        writer.store_many(Space::Shared, Type::U32, vec![zero], at(slot, 0));
        writer.choice(first, false, |writer| writer.push(Op::BulkWait { pending: 0, read: false }), |_| {});
    }
    writer.finish(row, Tolerance::Bits)
}

/// Two groups of each of the first threads, from slots that it wrote itself.
fn bulk_groups() -> ConformanceCase {
    const SENDERS: u32 = 32;
    let mut writer = Writer::with_launch("BulkCommit groups", SENDERS, [CTAS * 4, 1, 1]);
    let stages: Vec<_> = ["first", "second"]
        .into_iter()
        .map(|name| {
            let (source, output) = slots(&mut writer, name);
            let shared = writer.shared_slots(SLOT);
            let values = writer.load_many(Space::Global, Type::U32, 4, at(source, 0));
            writer.store_many(Space::Shared, Type::U32, values, at(shared, 0));
            (output, shared)
        })
        .collect();
    writer.push(Op::FenceProxyAsync {});
    for (output, shared) in &stages {
        writer.push(Op::BulkStore { bytes: constant(SLOT), target: at(*output, 0), source: at(*shared, 0) });
        writer.push(Op::BulkCommit {});
    }
    writer.push(Op::BulkWait { pending: 1, read: true });
    let zero = writer.set(Type::U32, 0);
    writer.store_many(Space::Shared, Type::U32, vec![zero], at(stages[0].1, 0));
    writer.push(Op::BulkWait { pending: 1, read: false });
    writer.push(Op::BulkWait { pending: 0, read: false });
    writer.finish("BulkCommit", Tolerance::Bits)
}
