//! Parameters and special registers, loads and stores, and the ends of threads.

use crate::support::{bytes, kernel, run, words};
use flashcore_ir::types::{F16, F32, S32, S64, U16, U32, U64};
use flashcore_ir::{Compare, FenceScope, GlobalAddress, ReduceOp, Reg, SpecialRegister};
use flashcore_sim::{Argument, GlobalMemory, Launch, Options, launch};

#[test]
fn exit_ends_lanes() {
    let kernel = kernel(32, |k| {
        let y = k.parameter::<U64>("y");
        let lane = k.lane();
        let address = k.mad_wide(lane, 4u32, y);
        let even = k.and::<U32>(lane, 1u32);
        let even = k.compare::<U32>(Compare::Eq, even, 0u32);
        k.if_then(even, |k| {
            let low = k.compare::<U32>(Compare::Lt, lane, 8u32);
            k.when(low, |k| k.exit());
            k.store_one(address, lane);
        });
        // A thread that has exited does not come back after the branch.
        k.when(even, |k| k.store_one(GlobalAddress::from(address).plus(128), lane));
        k.unless(even, |k| k.store_one(address, lane));
        k.store_one(GlobalAddress::from(address).plus(256), lane);
    });
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 3 * 128);
    run(&kernel, &[Argument::U64(y)], &memory).unwrap();
    let left = |lane: u32| lane.is_multiple_of(2) && lane < 8;
    let expected = [
        (0..32).map(|lane| if left(lane) { u32::MAX } else { lane }).collect::<Vec<u32>>(),
        (0..32).map(|lane| if left(lane) || lane % 2 == 1 { u32::MAX } else { lane }).collect(),
        (0..32).map(|lane| if left(lane) { u32::MAX } else { lane }).collect(),
    ];
    assert_eq!(words(&memory.read(y)), expected.concat());
    assert_eq!(memory.unwritten(y)[..4], [0..4, 8..12, 16..20, 24..28]);
}

#[test]
fn special_registers_and_parameters() {
    // Those of clusters have a test of their own.
    let registers = &SpecialRegister::ALL[..11];
    let kernel = kernel(48, |k| {
        let y = k.parameter::<U64>("y");
        let a = k.parameter::<U32>("a");
        let b = k.parameter::<S32>("b");
        let c = k.parameter::<F32>("c");
        let d = k.parameter::<S64>("d");
        let [x, size] = [SpecialRegister::ThreadX, SpecialRegister::BlockX].map(|register| k.special(register));
        let cta = {
            let [x, y, z, width, height] = [
                SpecialRegister::CtaX,
                SpecialRegister::CtaY,
                SpecialRegister::CtaZ,
                SpecialRegister::GridX,
                SpecialRegister::GridY,
            ]
            .map(|register| k.special(register));
            let row = k.mad::<U32>(z, height, y);
            k.mad::<U32>(row, width, x)
        };
        let thread = k.mad::<U32>(cta, size, x);
        let fields = registers.len() as u32 + 5;
        let start = k.mul::<U32>(thread, 4 * fields);
        let start = k.mad_wide::<U32>(start, 1u32, y);
        let mut values: Vec<Reg<U32>> = registers.iter().map(|register| k.special(*register)).collect();
        values.push(a);
        values.push(k.reinterpret::<S32, U32>(b));
        values.push(k.reinterpret::<F32, U32>(c));
        let d = k.reinterpret::<S64, U64>(d);
        values.push(k.truncate(d));
        let high = k.shr::<U64>(d, 32u32);
        values.push(k.truncate(high));
        for (index, value) in values.into_iter().enumerate() {
            k.store_one(GlobalAddress::from(start).plus(4 * index as i32), value);
        }
    });
    let grid = [3, 2, 2];
    let mut memory = GlobalMemory::new();
    let y = memory.allocate_uninitialised("y", 12 * 48 * 16 * 4);
    let arguments =
        vec![Argument::U64(y), Argument::U32(7), Argument::S32(-7), Argument::F32(0.5), Argument::S64(-1 << 33)];
    launch(&kernel, &Launch { grid, arguments }, &memory, &Options::default()).unwrap();
    assert!(memory.is_written(y));
    let results = words(&memory.read(y));
    for (thread, actual) in results.chunks(16).enumerate() {
        let (cta, x) = (thread as u32 / 48, thread as u32 % 48);
        let expected = [
            x,
            0,
            0,
            48,
            cta % 3,
            cta / 3 % 2,
            cta / 6,
            3,
            2,
            2,
            x % 32,
            7,
            -7i32 as u32,
            0.5f32.to_bits(),
            0,
            (-2i32) as u32,
        ];
        assert_eq!(actual, expected, "thread {x} of CTA {cta}");
    }
}

#[test]
fn vectors_through_shared_and_global_memory() {
    let kernel = kernel(32, |k| {
        let (x, y) = (k.parameter::<U64>("x"), k.parameter::<U64>("y"));
        let offset = k.reserve_shared(512, 16);
        let base = k.shared_base();
        let lane = k.lane();
        let from = k.mad_wide(lane, 16u32, x);
        let four = k.load::<F32>(from, 4);
        let location = k.mad::<U32>(lane, 16u32, base);
        k.store_shared(flashcore_ir::SharedAddress::from(location).plus(offset as i32), &four);
        k.warp_sync();
        // The neighbour's 16 bytes, as two wide numbers, and again as 16-bit numbers.
        let other = k.xor::<U32>(lane, 1u32);
        let location = k.mad::<U32>(other, 16u32, base);
        let two = k.load_shared::<U64>(location, 2);
        let to = k.mad_wide(lane, 32u32, y);
        k.store(to, &two);
        let halves = k.load_shared::<F16>(flashcore_ir::SharedAddress::from(location).plus(8), 4);
        k.store(GlobalAddress::from(to).plus(16), &halves);
        let last = k.load_shared::<U16>(flashcore_ir::SharedAddress::from(location).plus(2), 1);
        k.store(GlobalAddress::from(to).plus(24), &[last[0], last[0], last[0], last[0]]);
        k.fence(FenceScope::Gpu);
        k.prefetch(to);
    });
    let input: Vec<u32> = (0..128).map(|i| i * 0x0101_0101).collect();
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &bytes(&input, |word| word.to_le_bytes()));
    let y = memory.allocate_uninitialised("y", 32 * 32);
    run(&kernel, &[Argument::U64(x), Argument::U64(y)], &memory).unwrap();
    for (lane, actual) in words(&memory.read(y)).chunks(8).enumerate() {
        let source = &input[4 * (lane ^ 1)..][..4];
        let twice = (source[0] >> 16) * 0x1_0001;
        assert_eq!(actual, [source[0], source[1], source[2], source[3], source[2], source[3], twice, twice]);
    }
}

#[test]
fn atomics() {
    let kernel = kernel(64, |k| {
        let (sum, old, shared_sums) =
            (k.parameter::<U64>("sum"), k.parameter::<U64>("old"), k.parameter::<U64>("shared_sums"));
        let offset = k.reserve_shared(8, 4);
        assert_eq!(offset, 0);
        let base = k.shared_base();
        let thread = k.special(SpecialRegister::ThreadX);
        let first = k.compare::<U32>(Compare::Eq, thread, 0u32);
        let zero = k.copy::<U32>(0u32);
        k.when(first, |k| k.store_shared(base, &[zero, zero]));
        k.cta_sync();
        let one = k.copy::<U32>(1u32);
        let ticket = k.atomic::<U32, GlobalAddress>(ReduceOp::Add, sum, one);
        let to = k.mad_wide(ticket, 4u32, old);
        k.store_one(to, ticket);
        let maximum = GlobalAddress::from(sum).plus(4);
        k.reduce::<U32, GlobalAddress>(ReduceOp::Max, maximum, thread);
        let real = GlobalAddress::from(sum).plus(8);
        let half = k.copy::<F32>(0.5f32);
        k.reduce::<F32, GlobalAddress>(ReduceOp::Add, real, half);
        let wide = GlobalAddress::from(sum).plus(16);
        let thread64 = k.widen(thread);
        k.reduce::<U64, GlobalAddress>(ReduceOp::Add, wide, thread64);
        let swapped = GlobalAddress::from(sum).plus(24);
        let expected = k.copy::<U32>(9u32);
        k.compare_and_swap::<U32, GlobalAddress>(swapped, expected, one);
        k.reduce::<U32, flashcore_ir::SharedAddress>(ReduceOp::Add, base, thread);
        k.atomic::<U32, flashcore_ir::SharedAddress>(
            ReduceOp::Or,
            flashcore_ir::SharedAddress::from(base).plus(4),
            thread,
        );
        k.cta_sync();
        let sums = k.load_shared::<U32>(base, 2);
        k.when(first, |k| k.store(shared_sums, &sums));
    });
    let mut memory = GlobalMemory::new();
    let sum = memory.allocate("sum", &bytes(&[0u32, 0, 0, 0, 0, 0, 9, 0], |word| word.to_le_bytes()));
    let old = memory.allocate_uninitialised("old", 64 * 4);
    let shared = memory.allocate_uninitialised("shared_sums", 8);
    run(&kernel, &[Argument::U64(sum), Argument::U64(old), Argument::U64(shared)], &memory).unwrap();
    assert_eq!(words(&memory.read(sum)), [64, 63, 32f32.to_bits(), 0, 2016, 0, 1, 0]);
    assert_eq!(words(&memory.read(old)), (0..64).collect::<Vec<u32>>());
    assert_eq!(words(&memory.read(shared)), [2016, 63]);
}
