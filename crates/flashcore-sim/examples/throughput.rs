//! Simulator throughput on the operations that attention consists of: copies, `ldmatrix`, `mma`, exponentials,
//! barriers.
//!
//! `cargo run --release -p flashcore-sim --example throughput`, on one thread with `RAYON_NUM_THREADS=1`.

#![allow(clippy::print_stdout, reason = "it is a program that prints a result")]

use std::time::Instant;

use flashcore_ir::builder::CopyBytes;
use flashcore_ir::types::{F16x2, F32, U32, U64};
use flashcore_ir::{Arch, Builder, L2Prefetch, MmaShape, Reg, SharedAddress, VerifiedKernel};
use flashcore_sim::{Argument, GlobalMemory, Launch, Options, launch};

const WARPS: u32 = 4;
const TILES: u32 = 512;
/// A tile has 64 rows of 128 bytes.
const TILE_BYTES: u32 = 64 * 128;

fn write() -> VerifiedKernel {
    let mut k = Builder::new("throughput", 32 * WARPS);
    let x = k.parameter::<U64>("x");
    let y = k.parameter::<U64>("y");
    k.reserve_shared(2 * TILE_BYTES, 128);
    let (lane, base) = (k.lane(), k.shared_base());
    let thread = k.special(flashcore_ir::SpecialRegister::ThreadX);
    let sums: Vec<Reg<F32>> = (0..16).map(|_| k.copy::<F32>(0.0f32)).collect();
    let zero = k.copy::<F32>(0.0f32);
    let query: Vec<Reg<F16x2>> = (0..4).map(|_| k.pair::<F16x2>(zero, zero)).collect();
    // 16 bytes for each thread, four times: rows thread / 8 and every sixteenth, chunk thread % 8, swizzled.
    let row = k.shr::<U32>(thread, 3u32);
    let chunk = k.xor::<U32>(thread, row);
    let chunk = k.and::<U32>(chunk, 7u32);
    let row_place = k.mad::<U32>(row, 128u32, base);
    let target = k.mad::<U32>(chunk, 16u32, row_place);
    let source = k.mad_wide(thread, 16u32, x);
    let key_row = k.and::<U32>(lane, 7u32);
    k.for_uniform::<U32>(0u32, TILES, 1u32, |k, _| {
        for part in 0..4 {
            let from = flashcore_ir::GlobalAddress::from(source).plus(2048 * part);
            let to = SharedAddress::from(target).plus(2048 * part);
            k.copy_async(to, from, CopyBytes::All(16), L2Prefetch::Bytes128);
        }
        k.copy_async_commit();
        k.copy_async_wait(0);
        k.cta_sync();
        for depth in 0..4u32 {
            let chunk = k.shr::<U32>(lane, 3u32);
            let chunk = k.add::<U32>(chunk, 2 * depth);
            let chunk = k.xor::<U32>(chunk, key_row);
            let chunk = k.and::<U32>(chunk, 7u32);
            let address = k.mad::<U32>(key_row, 128u32, base);
            let address = k.mad::<U32>(chunk, 16u32, address);
            for keys in 0..4 {
                let key = k.load_matrix::<F16x2>(SharedAddress::from(address).plus(1024 * keys), 4, false);
                let sums = &sums[4 * keys as usize..][..4];
                for half in key.chunks(2) {
                    for _ in 0..2 {
                        k.mma::<F16x2, F32>(MmaShape::M16N8K16, sums, &query, half);
                    }
                }
            }
        }
        for sum in &sums {
            let scaled = k.fma::<F32>(*sum, 0.5f32, -1.0f32);
            let power = k.exp2::<F32>(scaled);
            let other = k.shuffle(flashcore_ir::ShuffleMode::Butterfly, power, 1u32);
            let largest = k.max::<F32>(power, other);
            k.fma_to::<F32>(*sum, largest, 0.0f32);
            k.mul_to::<F32>(*sum, 0.25f32);
            k.pair::<F16x2>(*sum, largest);
        }
        k.cta_sync();
    });
    let to = k.mad_wide(thread, 64u32, y);
    for (index, four) in sums.chunks(4).enumerate() {
        k.store(flashcore_ir::GlobalAddress::from(to).plus(16 * index as i32), four);
    }
    k.finish().verify(Arch::Sm80).unwrap_or_else(|errors| panic!("{errors:#?}"))
}

fn main() {
    let kernel = write();
    let mut memory = GlobalMemory::new();
    let x = memory.allocate("x", &vec![0x3c; TILE_BYTES as usize]);
    let y = memory.allocate_uninitialised("y", 32 * WARPS as usize * 64);
    let launched = Launch { grid: [1, 1, 1], arguments: vec![Argument::U64(x), Argument::U64(y)] };
    let start = Instant::now();
    let report = launch(&kernel, &launched, &memory, &Options::default()).unwrap_or_else(|error| panic!("{error}"));
    let seconds = start.elapsed().as_secs_f64();
    let counters = report.counters;
    let instructions = counters.instructions_in_all();
    println!("{instructions} warp instructions, {} of them mma, in {seconds:.2} s", counters.mma);
    println!("{:.2} million warp instructions per second", instructions as f64 / seconds / 1e6);
    println!("{:.2} shared transactions per request", counters.transactions_per_request());
}
