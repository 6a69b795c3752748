//! The suite `wrong-arrays`: device arrays that the host refuses, for every kernel family and operation that reads some.

use flashcore_kernels::{AmpereConfig, Config, HopperConfig};
use flashcore_problem::{Alignment, DType, KvCacheProblem, Layout, Mask, PagedKv, Problem, Rotary, RotaryStyle};

use super::gpu_features::named;
use super::serving::{CAUSAL, laid_out};
use super::{Kernels, Runner, kernel_option, takes};
use crate::testkit::wrong_arrays::{Arrays, count};
use crate::testkit::{Backend, Case};

/// Every way in which a kernel family finds tiles and keys: by the grid, persistent CTAs, splits, clusters, chunks and a
/// combine kernel, a counter; `f32` on tensor cores; 8 bits.
const CONFIGS: [&str; 14] = [
    "scalar",
    "ampere-64x32-2stage-swizzled",
    "ampere-16x64-2stage-swizzled-4kvwarps-packgqa-3persistent-64chunk",
    "ampere-32x32-2stage-swizzled-3splits",
    "ampere-32x64-2stage-swizzled-packgqa-cluster-2splits",
    "ampere-64x32-2stage-padded-load4-5persistent",
    "ampere-64x32-2stage-swizzled-3xtf32",
    "hopper-64x48-2stage",
    "hopper-64x48-2stage-persistent",
    "hopper-64x48-2stage-persistent-dynamic",
    "hopper-64x64-4stage-2kvgroups-packgqa-pdl-128chunk",
    "hopper-64x64-4stage-2cluster",
    "hopper-64x32-2stage",
    "hopper-64x32-2stage-packgqa-64chunk",
];
/// Rounds through the arrays of each problem, with other wrong numbers each.
const ROUNDS: usize = 3;

/// Wrong arrays of attention, and of an append by sequence before it in a launch of its own and in one.
pub fn wrong_arrays(runner: Runner) -> Vec<Case> {
    let mut cases = Vec::new();
    for (form, problem) in attention().into_iter().enumerate() {
        for backend in backends(runner) {
            let problem = of_types(&problem, backend);
            if !takes(backend, &problem) {
                continue;
            }
            let numbers = ROUNDS * (count(&problem) + 1);
            let first = (form + 7 * cases.len()) * numbers;
            cases.extend((first..first + numbers).map(|number| {
                let arrays = Arrays::Wrong(number as u64);
                Case { arrays, ..Case::new(problem.clone(), number as u64 % 5, backend) }
            }));
        }
    }
    for problem in growing() {
        for backend in backends(runner) {
            let attended = problem.attended();
            // The append is the same before every attention: one kernel of each family, and those that append themselves.
            let is_plain = backend.config().is_none_or(|config| config == Config::scalar());
            let fuses = backend.config().is_some_and(|config| AmpereConfig::try_from(config).is_ok())
                && attended.dtype != DType::F32;
            if !(is_plain || fuses) || !takes(backend, &attended) {
                continue;
            }
            let arrays = count(&problem.attention) + usize::from(problem.total_new.is_some());
            let first = cases.len() * (arrays + 1);
            cases.extend((first..=first + arrays).map(|number| {
                let arrays = Arrays::Wrong(number as u64);
                Case { arrays, ..Case::with_kv_cache(problem.clone(), number as u64 % 5, backend) }
            }));
        }
    }
    let (backend, kernels) = named(runner);
    let option = kernel_option(kernels);
    let command =
        |number: usize| format!("flashcore verify --backend {backend}{option} --suite wrong-arrays --only {number}");
    cases.into_iter().enumerate().map(|(number, case)| Case { command: Some(command(number)), ..case }).collect()
}

fn backends(runner: Runner) -> Vec<Backend> {
    match runner {
        Runner::Cpu(_) | Runner::Cuda(_) | Runner::Sim(Kernels::Only(_)) => runner.backends(0),
        Runner::Sim(Kernels::All) => {
            CONFIGS.into_iter().filter_map(|name| name.parse().ok()).map(Backend::Sim).collect()
        }
    }
}

/// The problem in types that the config has.
fn of_types(problem: &Problem, backend: Backend) -> Problem {
    let mut problem = problem.clone();
    let Some(config) = backend.config() else { return problem };
    problem.dtype = Kernels::Only(config).dtype(problem.dtype);
    let is_fp8 = HopperConfig::try_from(config).is_ok_and(|hopper| hopper.tile_n == 32);
    if is_fp8 {
        (problem.out_dtype, problem.dtype) = (Some(problem.dtype), DType::E4m3);
        (problem.q_scale, problem.k_scale, problem.v_scale) = (true, true, true);
        problem.lse = false;
        problem.leftpad_k &= problem.paged.is_none();
    } else if AmpereConfig::try_from(config).is_ok_and(|ampere| ampere.num_splits == 3)
        && problem.layout == Layout::Bhsd
    {
        (problem.kv_dtype, problem.k_scale, problem.v_scale) = (Some(DType::E4m3), true, true);
    }
    problem
}

/// Packed, rectangular and paged sequences: every array, alone and with the others.
fn attention() -> Vec<Problem> {
    let base = |queries: usize, dtype: DType| {
        let mut base = Problem::new(6, 4, queries, 32, dtype).with_lse(true).with_mask(CAUSAL);
        (base.key_heads, base.key_length) = (2, 150);
        base
    };
    let window = Mask::Window { left: Some(40), right: Some(9), alignment: Alignment::BottomRight };
    let packed = base(40, DType::F16).with_total_q(Some(140)).with_total_k(Some(500));
    let mut lengths = packed.clone().with_mask(window);
    (lengths.seqused_q, lengths.seqused_k, lengths.leftpad_k) = (true, true, true);
    let mut rectangular = base(5, DType::Bf16).with_mask(Mask::None).with_kv_batch(Some(4));
    (rectangular.seqused_q, rectangular.seqused_k, rectangular.leftpad_k) = (true, true, true);
    let mut paged = base(3, DType::F16).with_total_q(Some(12)).with_kv_batch(Some(5));
    (paged.paged, paged.seqused_k, paged.leftpad_k) = (Some(PagedKv::new(16, 50, 10)), true, true);
    let mut boxes = base(33, DType::Bf16);
    (boxes.paged, boxes.seqused_k) = (Some(PagedKv { table_stride: 13, ..PagedKv::new(16, 60, 11) }), true);
    let mut odd = base(1, DType::F16).with_mask(Mask::None);
    (odd.paged, odd.seqused_k) = (Some(PagedKv::new(7, 140, 22)), true);
    let all = [packed, lengths, rectangular, paged, boxes, odd];
    all.into_iter().enumerate().map(|(number, problem)| laid_out(number, problem)).collect()
}

/// Growing caches, contiguous and paged, of 16 and of 8 bits, new keys packed and not, rotated and not.
fn growing() -> Vec<KvCacheProblem> {
    let base = |queries: usize, dtype: DType| {
        let mut base = Problem::new(6, 4, queries, 32, dtype).with_layout(Layout::Bshd).with_mask(CAUSAL);
        (base.key_heads, base.key_length) = (2, 100);
        base
    };
    let pages = |problem: &Problem, page_size: usize| {
        let width = problem.key_length.div_ceil(page_size);
        Some(PagedKv::new(page_size, problem.cache_batches() * width + 1, width))
    };
    let mut paged = base(3, DType::F16).with_kv_batch(Some(7)).with_total_q(Some(15)).with_leftpad_k(true);
    paged.paged = pages(&paged, 16);
    let paged = KvCacheProblem::new(paged, 9).with_total_new(Some(31));
    let mut contiguous = base(2, DType::Bf16).with_kv_batch(Some(8)).with_leftpad_k(true);
    contiguous.seqused_q = true;
    let rotary = Rotary::new(RotaryStyle::GptJ, 16, 60);
    let contiguous = KvCacheProblem::new(contiguous, 5).with_rotary(rotary).with_rotary_seqlens(true);
    let mut packed = base(4, DType::F16).with_mask(Mask::None).with_total_q(Some(17));
    packed.paged = pages(&packed, 4);
    let packed = KvCacheProblem::new(packed, 6).with_total_new(Some(20));
    let packed = packed.with_rotary(Rotary::new(RotaryStyle::Neox, 32, 110)).with_qk_norm(1e-6);
    let mut bytes = base(1, DType::Bf16).with_kv_batch(Some(7)).with_kv_dtype(Some(DType::E4m3));
    (bytes.k_scale, bytes.v_scale) = (true, true);
    bytes.paged = pages(&bytes, 16);
    let bytes = KvCacheProblem::new(bytes, 4).with_total_new(Some(13));
    let computed = bytes.clone().with_compute_scales(true);
    vec![paged, contiguous, packed, bytes, computed]
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_cpu::Level;
    use std::collections::HashMap;

    #[test]
    fn every_kernel_has_cases() {
        let mut counts = HashMap::new();
        for case in wrong_arrays(Runner::Sim(Kernels::All)) {
            *counts.entry((case.backend.to_string(), case.kv_cache.is_some())).or_insert(0) += 1;
        }
        for name in CONFIGS {
            let config: Config = name.parse().unwrap_or_else(|error| panic!("{name}: {error}"));
            let count = counts.get(&(Backend::Sim(config).to_string(), false)).copied().unwrap_or(0);
            assert!(count > 5, "{name}: {count}");
        }
        assert!(wrong_arrays(Runner::Cpu(Level::Portable)).len() > 50);
    }
}
