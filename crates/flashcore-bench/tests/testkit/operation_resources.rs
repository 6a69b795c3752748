//! Append and merge kernels, and attention that appends, through ptxas: no spills, no stack, and few enough registers for
//! many loads in flight.

use flashcore_ir::Arch;
use flashcore_kernels::{KernelKey, LaunchPlan, Reason, heuristics};
use flashcore_problem::{
    Alignment, AppendProblem, DType, KvCacheProblem, Layout, Mask, MergeProblem, PagedKv, Problem, Rotary, RotaryStyle,
};
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
            kernels.push((LaunchPlan::append(&problem, arch)?.launches[0].key, registers));
        }
        // Below sm_89 there is no conversion to 8 bits.
        for cache in DType::FLOAT8.into_iter().filter(|_| arch.compute() >= 89) {
            let append = |head_dim| append(head_dim).with_cache_dtype(Some(cache)).with_scales(true, true);
            for (problem, registers) in [
                (append(128), 64),
                (append(128).with_rotary(rotary(RotaryStyle::Neox, 128)).with_compute_scales(true), 96),
                (
                    append(72).with_rotary(rotary(RotaryStyle::GptJ, 24)).with_qk_norm(1e-6).with_compute_scales(true),
                    96,
                ),
            ] {
                kernels.push((LaunchPlan::append(&problem, arch)?.launches[0].key, registers));
            }
        }
        for (parts, value_dim, registers) in [(2, 128, 48), (4, 128, 64), (100, 128, 64), (9, 512, 128), (3, 33, 64)] {
            kernels.push((
                LaunchPlan::merge(&MergeProblem::new(parts, 100, 8, value_dim, dtype), arch)?.launches[0].key,
                registers,
            ));
        }
    }
    kernels.extend(fused(arch)?);
    Ok(kernels)
}

/// Attention that appends, with the config of decode: everything that makes it larger, within the budget of attention.
fn fused(arch: Arch) -> Result<Vec<(KernelKey, u32)>, Vec<Reason>> {
    let mut kernels = Vec::new();
    for (head_dim, dtype, style, queries) in [
        (64, DType::F16, RotaryStyle::Neox, 1),
        (128, DType::Bf16, RotaryStyle::GptJ, 1),
        (128, DType::F16, RotaryStyle::Neox, 9),
        (256, DType::Bf16, RotaryStyle::Neox, 1),
    ] {
        let mut attention = Problem::new(64, 32, queries, head_dim, dtype).with_layout(Layout::Bshd).with_lse(true);
        (attention.key_heads, attention.key_length) = (8, 4096);
        (attention.leftpad_k, attention.kv_batch, attention.total_q) = (true, Some(99), Some(500));
        attention.paged = Some(PagedKv::new(16, 20_000, 256));
        attention.mask = Mask::Causal(Alignment::BottomRight);
        let rotary = Rotary { table_dtype: Some(DType::F32), ..Rotary::new(style, head_dim, 4096) };
        let problem = KvCacheProblem::new(attention, 4).with_total_new(Some(300)).with_rotary(rotary);
        let plan = LaunchPlan::with_append(&problem, heuristics::select(&problem.attended(), arch), arch)?;
        for launch in &plan.launches {
            kernels.push((launch.key, launch.kernel().register_budget));
        }
    }
    Ok(kernels)
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that did not assemble says so")]
fn kernels_assemble_without_spills() {
    for arch in [Arch::Sm80, Arch::Sm89, Arch::Sm90a, Arch::Sm120] {
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
