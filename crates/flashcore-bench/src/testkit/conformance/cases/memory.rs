//! Loads and stores of every width, type and cache hint: moves of bits.

use flashcore_ir::{Address, Arch, L2Prefetch, LoadCache, Op, RegisterId, Space, StoreCache, Type};

use crate::testkit::conformance::case::{ConformanceCase, Tolerance};
use crate::testkit::conformance::inputs::Fill;
use crate::testkit::conformance::writer::{Writer, at, constant, register};

const THREADS: u32 = 64;
const CTAS: u32 = 8;
/// Offsets of addresses go to both sides of the base.
const BIAS: i32 = 64;

/// A vector access, and where it lies in the bytes of a thread.
#[derive(Clone, Copy)]
struct Access {
    ty: Type,
    count: u32,
    offset: u32,
}

/// Every vector access, one after the other, and the bytes that they take together.
fn accesses() -> (Vec<Access>, u32) {
    let mut accesses = Vec::new();
    let mut end = 0u32;
    for ty in Type::ALL {
        for count in [1, 2, 4] {
            let bytes = ty.bytes() * count;
            if ty == Type::Pred || bytes > 16 {
                continue;
            }
            let offset = end.next_multiple_of(bytes);
            end = offset + bytes;
            accesses.push(Access { ty, count, offset });
        }
    }
    (accesses, end.next_multiple_of(16))
}

pub(super) fn add(list: &mut Vec<ConformanceCase>) {
    for cache in LoadCache::ALL {
        for prefetch in L2Prefetch::ALL {
            let case = global_loads(*cache, *prefetch);
            if case.verified(Arch::Sm120).is_ok() {
                list.push(case);
            }
        }
    }
    list.push(shared(Tested::Load));
    for cache in StoreCache::ALL {
        list.push(global_stores(*cache));
    }
    list.push(shared(Tested::Store));
    list.push(prefetch());
}

/// The address of the bytes of this thread, beyond the middle of which offsets are negative.
fn bytes_of_thread(writer: &mut Writer, base: RegisterId, stride: u32) -> RegisterId {
    let start = writer.element(base, writer.thread, stride);
    let d = writer.register(Type::U64);
    writer.push(Op::Add { ty: Type::U64, d, a: register(start), b: constant(BIAS as u64) });
    d
}

const fn place(base: RegisterId, access: Access) -> Address {
    at(base, access.offset as i32 - BIAS)
}

/// The input and output bytes of a case.
fn buffers(writer: &mut Writer, stride: u32) -> (RegisterId, RegisterId) {
    let words = writer.count() * stride as usize / 4;
    let input = writer.input_address("bytes", Type::U32, words, Fill::Bits);
    let output = writer.output_address("bytes", Type::U32, words);
    (bytes_of_thread(writer, input, stride), bytes_of_thread(writer, output, stride))
}

fn global_loads(cache: LoadCache, prefetch: L2Prefetch) -> ConformanceCase {
    let (accesses, stride) = accesses();
    let mut writer = Writer::with_launch(format!("Load global {cache} {prefetch}"), THREADS, [CTAS, 1, 1]);
    let (input, output) = buffers(&mut writer, stride);
    for access @ Access { ty, count, .. } in accesses {
        let d: Vec<RegisterId> = (0..count).map(|_| writer.register(ty)).collect();
        let source = place(input, access);
        writer.push(Op::Load { space: Space::Global, cache, prefetch, ty, count, d: d.clone(), source });
        writer.store_many(Space::Global, ty, d, place(output, access));
    }
    writer.finish("Load", Tolerance::Bits)
}

fn global_stores(cache: StoreCache) -> ConformanceCase {
    let (accesses, stride) = accesses();
    let mut writer = Writer::with_launch(format!("Store global {cache}"), THREADS, [CTAS, 1, 1]);
    let (input, output) = buffers(&mut writer, stride);
    for access @ Access { ty, count, .. } in accesses {
        let a = writer.load_many(Space::Global, ty, count, place(input, access));
        writer.push(Op::Store { space: Space::Global, cache, ty, count, a, target: place(output, access) });
    }
    writer.finish("Store", Tolerance::Bits)
}

#[derive(Clone, Copy, PartialEq)]
enum Tested {
    Load,
    Store,
}

/// Through shared memory: in by one side in every form, out by the other in words, or the other way round.
fn shared(tested: Tested) -> ConformanceCase {
    let (accesses, stride) = accesses();
    let words: Vec<Access> = (0..stride / 4).map(|word| Access { ty: Type::U32, count: 1, offset: 4 * word }).collect();
    let (name, stores, loads) = match tested {
        Tested::Load => ("Load", &words, &accesses),
        Tested::Store => ("Store", &accesses, &words),
    };
    let mut writer = Writer::with_launch(format!("{name} shared"), THREADS, [CTAS, 1, 1]);
    let (input, output) = buffers(&mut writer, stride);
    let slot = writer.shared_slots(stride);
    let slot = writer.add(slot, constant(BIAS as u64));
    // What lies between the forms has a value too.
    if tested == Tested::Store {
        for word in &words {
            let zero = writer.set(Type::U32, 0);
            writer.store_many(Space::Shared, Type::U32, vec![zero], place(slot, *word));
        }
    }
    for access in stores {
        let a = writer.load_many(Space::Global, access.ty, access.count, place(input, *access));
        writer.store_many(Space::Shared, access.ty, a, place(slot, *access));
    }
    for access in loads {
        let d = writer.load_many(Space::Shared, access.ty, access.count, place(slot, *access));
        writer.store_many(Space::Global, access.ty, d, place(output, *access));
    }
    writer.finish(name, Tolerance::Bits)
}

/// A prefetch changes nothing.
fn prefetch() -> ConformanceCase {
    let mut writer = Writer::new("Prefetch");
    let base = writer.input_address("value", Type::U32, writer.count(), Fill::Bits);
    let address = writer.element(base, writer.thread, 4);
    writer.push(Op::Prefetch { source: at(address, 0) });
    let value = writer.load(Type::U32, address);
    writer.output("value", Type::U32, value);
    writer.finish("Prefetch", Tolerance::Bits)
}
