//! The steps of the ladder, in the order of the project's history.

use flashcore_ir::Arch;
use flashcore_kernels::{
    Accumulation, AmpereConfig, Config, Exponential, L2Window, LadderConfig, LaunchPlan, Product, QueryPlace, Rescale,
    SharedLayout,
};
use flashcore_problem::Problem;

/// One step: a config, and the step that it changes one thing of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// A short name.
    pub name: &'static str,
    /// The change from the step before.
    pub what: &'static str,
    /// The config.
    pub config: Config,
    /// The number of the step that it is compared with; `None` for the first, and for the last, which is compared with the
    /// best of all.
    pub from: Option<usize>,
}

/// Persistent CTAs per SM.
const RESIDENT_CTAS: u32 = 2;
/// Largest head dimension for which large tiles fit.
const NARROW: usize = 64;

/// The steps from one thread a row to `tuned`, on a GPU with so many SMs.
pub fn steps(problem: &Problem, tuned: Config, arch: Arch, num_sms: u32) -> Vec<Step> {
    let is_narrow = problem.head_dim.max(problem.value_dim) <= NARROW;
    let mut list = List::default();
    list.push("scalar", "one thread a row, everything from global memory", Config::scalar(), None);

    let tiles = LadderConfig { tile_n: if is_narrow { 64 } else { 32 }, ..LadderConfig::default() };
    let first =
        list.step("shared tiles", "tiles of query, keys and values in shared memory; the lanes multiply", tiles, 0);
    let padded = LadderConfig { layout: SharedLayout::Padded, ..tiles };
    list.step("padding", "16 unused bytes after each row", padded, first);
    let swizzled = LadderConfig { layout: SharedLayout::Swizzled, ..tiles };
    let swizzle = list.step("swizzle", "chunks exchanged by an exclusive or with the row instead", swizzled, first);
    list.step("8-byte loads", "copies of 8 bytes instead of 4", LadderConfig { load_bytes: 8, ..swizzled }, swizzle);
    let wide = LadderConfig { load_bytes: 16, ..swizzled };
    let wide_loads = list.step("16-byte loads", "copies of 16 bytes instead of 4", wide, swizzle);
    let two = LadderConfig { stages: 2, ..wide };
    let two_stages = list.step("2 stages", "the next tile is on its way while one is multiplied", two, wide_loads);
    list.step("3 stages", "the next two tiles are", LadderConfig { stages: 3, ..two }, two_stages);
    let scores = LadderConfig { scores: Product::Tensor, ..two };
    list.step(
        "tensor cores for QK",
        "tensor cores multiply query and keys, lanes weights and values",
        scores,
        two_stages,
    );
    let output = LadderConfig { output: Product::Tensor, ..two };
    list.step("tensor cores for PV", "the other way round", output, two_stages);
    let both = LadderConfig { scores: Product::Tensor, ..output };
    let tensor = list.step("tensor cores for both", "tensor cores multiply both", both, two_stages);

    let fused = AmpereConfig { tile_n: tiles.tile_n, query: QueryPlace::Shared, ..AmpereConfig::default() };
    let in_registers =
        list.ampere("softmax in registers", "scores and weights never leave the registers", fused, tensor);
    let query = AmpereConfig { query: QueryPlace::Registers, ..fused };
    let query_step =
        list.ampere("query in registers", "the query is read from shared memory once", query, in_registers);
    // Compilers for other GPUs run out of registers with twice the keys.
    let is_hopper = matches!(arch, Arch::Sm90 | Arch::Sm90a);
    let tile_n = if is_hopper { 2 * query.tile_n } else { query.tile_n / 2 * 3 };
    let wider = AmpereConfig { tile_n, ..query };
    let wider_step = list.ampere("more keys a tile", "fewer barriers and maxima for each key", wider, query_step);
    list.ampere("3 stages again", "two tiles ahead", AmpereConfig { stages: 3, ..wider }, wider_step);
    let shared_keys = AmpereConfig { kv_split_warps: 2, tile_n: wider.tile_n.next_multiple_of(32), ..wider };
    let what = "two warps have the same rows and half of the keys each: more CTAs, which end sooner";
    list.ampere("warps share keys", what, shared_keys, wider_step);
    // With 32 rows a warp there are no registers for both kinds of sums.
    let halves = AmpereConfig { accumulation: Accumulation::F16, ..wider };
    list.ampere("f16 sums", "products of a tile are added up in f16", halves, wider_step);
    let rows = AmpereConfig { rows_per_warp: 32, query: QueryPlace::Shared, ..wider };
    let rows_step = list.ampere(
        "32 rows a warp",
        "each key is read from shared memory for 32 rows instead of 16",
        rows,
        wider_step,
    );
    let lazy = AmpereConfig { rescale: Rescale::IfChanged, ..rows };
    list.ampere("lazy rescale", "the output is rescaled only if the row max changed", lazy, rows_step);
    let kept = if is_narrow { rows } else { lazy };
    let kept_step = if is_narrow { rows_step } else { list.0.len() - 1 };
    let tried: [(&'static str, &'static str, AmpereConfig); 5] = [
        (
            "shared exponentials",
            "every fourth exponential by a polynomial",
            AmpereConfig { exponential: Exponential::Shared, ..kept },
        ),
        ("1 producer warp", "one warp more, which only copies", AmpereConfig { producers: 1, ..kept }),
        ("2 producer warps", "two such warps", AmpereConfig { producers: 2, ..kept }),
        ("persistent CTAs", "persistent CTAs", AmpereConfig { persistent: RESIDENT_CTAS * num_sms, ..kept }),
        ("L2 window", "a part of L2 is set aside for the keys", AmpereConfig { l2: L2Window::Key, ..kept }),
    ];
    for (name, what, config) in tried {
        list.ampere(name, what, config, kept_step);
    }
    let hopper = Config::hopper();
    if LaunchPlan::new(problem, hopper, arch).is_ok() {
        let what = "TMA, and wgmma from shared memory";
        list.push("warpgroups", what, hopper, Some(kept_step));
    }
    list.push("tuned", "what this shape gets by default", tuned, None);
    list.0
}

#[derive(Default)]
struct List(Vec<Step>);

impl List {
    fn push(&mut self, name: &'static str, what: &'static str, config: Config, from: Option<usize>) -> usize {
        self.0.push(Step { name, what, config, from });
        self.0.len() - 1
    }

    fn step(&mut self, name: &'static str, what: &'static str, config: LadderConfig, from: usize) -> usize {
        self.push(name, what, config.into(), Some(from))
    }

    fn ampere(&mut self, name: &'static str, what: &'static str, config: AmpereConfig, from: usize) -> usize {
        self.push(name, what, config.into(), Some(from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_kernels::{Target, heuristics};
    use flashcore_problem::DType;

    #[test]
    fn every_step_changes_one_that_stands_before_it_and_can_run() {
        for (dim, arch) in [(64, Arch::Sm90), (128, Arch::Sm90), (64, Arch::Sm89), (128, Arch::Sm89), (128, Arch::Sm80)]
        {
            let problem = Problem::new(1, 8, 512, dim, DType::F16);
            let tuned = heuristics::select(&problem, Target::new(arch, 132));
            let steps = steps(&problem, tuned, arch, 132);
            assert!(steps.len() >= 20, "{}", steps.len());
            let mut refused = Vec::new();
            for (number, step) in steps.iter().enumerate() {
                assert!(step.from.is_none_or(|from| from < number), "{}", step.name);
                if let Err(reasons) = LaunchPlan::new(&problem, step.config, arch) {
                    refused.push(format!("{} {}: {reasons:?}", step.name, step.config));
                }
                if let Some(from) = step.from {
                    assert_ne!(steps[from].config, step.config, "{}", step.name);
                }
            }
            assert_eq!(refused, Vec::<String>::new(), "{arch} {dim}");
            assert_eq!(steps.last().map(|step| step.config), Some(tuned));
        }
    }
}
