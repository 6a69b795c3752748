//! Append and merge kernels through ptxas: no spills, no stack, and few enough registers for many loads in flight.

use flashcore_ir::Arch;
use flashcore_kernels::cache::AppendPlan;
use flashcore_kernels::merge::MergePlan;
use flashcore_kernels::{KernelKey, Reason};
use flashcore_problem::{AppendProblem, DType, MergeProblem, Rotary, RotaryStyle};
use flashcore_ptx::{assemble, print, ptxas};

fn kernels(arch: Arch) -> Result<Vec<(KernelKey, u32)>, Vec<Reason>> {
    let mut kernels = Vec::new();
    for dtype in [DType::F16, DType::Bf16, DType::F32] {
        let append = |head_dim| AppendProblem::new(64, 8, head_dim, dtype, 100, 16).with_query(32);
        let rotary = |style, dim| Rotary::new(style, dim, 4096);
        for (problem, registers) in [
            (append(128), 40),
            (append(128).with_rotary(rotary(RotaryStyle::Neox, 128)), 64),
            (append(128).with_rotary(rotary(RotaryStyle::GptJ, 64)).with_qk_norm(1e-6), 80),
            (append(72).with_rotary(rotary(RotaryStyle::Neox, 20)), 96),
            (append(576), 56),
        ] {
            kernels.push((AppendPlan::new(&problem, arch)?.key, registers));
        }
        for (parts, value_dim, registers) in [(2, 128, 48), (4, 128, 64), (100, 128, 64), (9, 512, 128), (3, 33, 64)] {
            kernels.push((MergePlan::new(&MergeProblem::new(parts, 100, 8, value_dim, dtype), arch)?.key, registers));
        }
    }
    Ok(kernels)
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that did not assemble says so")]
fn kernels_assemble_without_spills() {
    for arch in [Arch::Sm80, Arch::Sm90a, Arch::Sm120] {
        for (key, most_registers) in kernels(arch).unwrap_or_else(|reasons| panic!("{reasons:?}")) {
            let kernel = key.kernel().unwrap_or_else(|errors| panic!("{errors:?}"));
            let text = print(&kernel);
            if let Err(reason) = ptxas::find() {
                eprintln!("{} printed for {arch}, but not assembled: {reason}", kernel.name);
                continue;
            }
            let resources = assemble(&text, arch).unwrap_or_else(|error| panic!("{}: {error}", kernel.name));
            let spilled = resources.spill_store_bytes + resources.spill_load_bytes + resources.stack_frame_bytes;
            assert_eq!(spilled, 0, "{} on {arch}", kernel.name);
            let registers = resources.registers;
            assert!(registers <= most_registers, "{} on {arch} has {registers} registers", kernel.name);
        }
    }
}
