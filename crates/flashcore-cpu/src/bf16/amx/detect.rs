//! AMX detection, in four steps, each of which can be the one that fails.
//!
//! The processor must have the instructions (CPUID), the operating system must save the registers (XCR0), it must let
//! this process use them (Linux since 5.16 wants to be asked), and the instructions must then do what they should: there
//! are hypervisors that show instructions which the guest cannot execute. The last is tried in a child process, where
//! an illegal instruction ends nothing of ours.

#[cfg(target_os = "linux")]
use core::arch::asm;
use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

use super::tiles;
use crate::driver::once::Once;

/// Features that the machine lacks, in the order of the steps; a step that failed is the last that was taken. Detected
/// once.
pub(crate) fn missing() -> Vec<&'static str> {
    static MISSING: Once<Vec<&'static str>> = Once::new();
    MISSING.get(look).clone()
}

/// A step; true if it finds its feature.
type Step = fn() -> bool;

fn look() -> Vec<&'static str> {
    let instructions = [
        ("AVX-512F", is_x86_feature_detected!("avx512f")),
        ("AVX-512BW", is_x86_feature_detected!("avx512bw")),
        ("AVX-512VL", is_x86_feature_detected!("avx512vl")),
        ("AVX-512DQ", is_x86_feature_detected!("avx512dq")),
        ("AVX-512BF16", is_x86_feature_detected!("avx512bf16")),
        ("AMX-TILE", has_feature(AMX_TILE)),
        ("AMX-BF16", has_feature(AMX_BF16)),
    ];
    let missing: Vec<_> = instructions.into_iter().filter(|(_, is_there)| !is_there).map(|(name, _)| name).collect();
    if !missing.is_empty() {
        return missing;
    }
    let steps: [(&str, Step); 3] = [
        ("an operating system that saves tile registers (XCR0 bits 17 and 18)", are_tiles_saved),
        ("the operating system's permission to use tile registers (arch_prctl)", is_permitted),
        ("AMX instructions that work when tried", || survives(tiles::is_product_right)),
    ];
    steps.into_iter().find(|(_, holds)| !holds()).map(|(name, _)| name).into_iter().collect()
}

/// Bits of EDX in leaf 7, subleaf 0 of CPUID.
const AMX_BF16: u32 = 22;
const AMX_TILE: u32 = 24;

#[allow(unused_unsafe, reason = "CPUID is a safe function only in newer versions of the standard library")]
fn has_feature(bit: u32) -> bool {
    const FEATURES: u32 = 7;
    // SAFETY: every x86-64 processor has CPUID, and the leaf is asked only where it exists.
    unsafe { __cpuid(0).eax >= FEATURES && __cpuid_count(FEATURES, 0).edx >> bit & 1 == 1 }
}

/// True if the operating system saves both the configuration (bit 17) and the data (bit 18) of tiles.
fn are_tiles_saved() -> bool {
    const TILES: u64 = 0b11 << 17;
    #[target_feature(enable = "xsave")]
    fn saved() -> u64 {
        // SAFETY: register 0 exists wherever the instruction does.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: AVX-512, which was found before, is detected only where XGETBV says that its registers are saved.
    is_x86_feature_detected!("xsave") && unsafe { saved() } & TILES == TILES
}

/// Asks Linux to let this process use the data of tiles. Threads that exist and threads to come inherit the answer.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const TILE_DATA: usize = 18;
    // SAFETY: this call reads no memory, and changes nothing but how much room signal frames have for registers.
    unsafe { system_call(number::ARCH_PRCTL, [ARCH_REQ_XCOMP_PERM, TILE_DATA, 0, 0]) == 0 }
}

/// Only Linux is supported.
#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

#[cfg(target_os = "linux")]
mod number {
    pub(super) const RT_SIGACTION: usize = 13;
    pub(super) const CLONE: usize = 56;
    pub(super) const WAIT4: usize = 61;
    pub(super) const PRCTL: usize = 157;
    pub(super) const ARCH_PRCTL: usize = 158;
    pub(super) const EXIT_GROUP: usize = 231;
}

/// True if `trial` returns true in a child process: a trial that dies of a signal takes only the child along.
///
/// A handler of SIGILL in this process would be shorter, but handlers belong to the whole process: it would stand in for
/// those of the program and of other libraries while it is there. The child is made by a bare `clone`, which copies
/// memory and shares nothing; it sends no SIGCHLD when it ends, and only a wait for such children sees it. In
/// it runs nothing that allocates, locks or unwinds, since other threads may have held any lock when it was copied.
#[cfg(target_os = "linux")]
fn survives(trial: Step) -> bool {
    const WALL: usize = 0x4000_0000;
    const INTERRUPTED: isize = -4;
    // SAFETY: without flags the child has memory, stack and files of its own and goes on from here, as after `fork`.
    let child = unsafe { system_call(number::CLONE, [0; 4]) };
    match usize::try_from(child) {
        Err(_) => false,
        Ok(0) => in_child(trial),
        Ok(child) => loop {
            let mut status = -1_i32;
            // SAFETY: the status outlives the call, which writes nothing else.
            let waited = unsafe { system_call(number::WAIT4, [child, (&raw mut status).addr(), WALL, 0]) };
            if waited != INTERRUPTED {
                // Zero is an ordinary end with status 0; another's wait may have taken the child, and then who knows.
                return waited == child as isize && status == 0;
            }
        },
    }
}

/// The whole life of the child.
#[cfg(target_os = "linux")]
fn in_child(trial: Step) -> ! {
    const PR_SET_DUMPABLE: usize = 4;
    // SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV: what a bad instruction or its operands may bring.
    const FATAL_SIGNALS: [usize; 5] = [4, 5, 7, 8, 11];
    // `struct sigaction` of the kernel: the default action, no flags, an empty mask.
    let default_action = [0_u64; 4];
    // SAFETY: these calls read what is given to them and change nothing outside of the child.
    unsafe {
        system_call(number::PRCTL, [PR_SET_DUMPABLE, 0, 0, 0]);
        for signal in FATAL_SIGNALS {
            system_call(number::RT_SIGACTION, [signal, (&raw const default_action).addr(), 0, size_of::<u64>()]);
        }
    }
    let status = usize::from(!trial());
    loop {
        // SAFETY: ends the child, which owns nothing that would have to be given back.
        unsafe { system_call(number::EXIT_GROUP, [status, 0, 0, 0]) };
    }
}

#[cfg(not(target_os = "linux"))]
fn survives(_trial: Step) -> bool {
    false
}

/// Makes a system call.
///
/// # Safety
///
/// The effects of the call on memory and process are those that the caller intends.
#[cfg(target_os = "linux")]
unsafe fn system_call(number: usize, arguments: [usize; 4]) -> isize {
    let [first, second, third, fourth] = arguments;
    let result: isize;
    // SAFETY: the calling convention of Linux on x86-64; the caller vouches for the call.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            // The fifth argument of `clone`; no call here has another use for it.
            in("r8") 0_usize,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An instruction that every processor refuses.
    #[cfg(target_os = "linux")]
    fn dies() -> bool {
        // SAFETY: it raises an exception, which ends the process; this is called in a child only.
        unsafe { asm!("ud2") };
        true
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_trial_that_dies_takes_nothing_along() {
        for (trial, expected) in [(dies as Step, false), (|| true, true), (|| false, false)] {
            assert_eq!(survives(trial), expected);
        }
    }

    #[test]
    fn missing_features_are_told_step_by_step() {
        let missing = missing();
        let has_instructions = has_feature(AMX_TILE) && has_feature(AMX_BF16) && is_x86_feature_detected!("avx512bf16");
        assert!(missing.len() <= 1 || !has_instructions, "{missing:?}");
        assert_eq!(missing.contains(&"AMX-TILE"), !has_feature(AMX_TILE));
        assert_eq!(missing, look());
    }
}
