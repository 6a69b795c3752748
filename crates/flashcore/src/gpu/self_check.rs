//! Self-check: the first run of a kernel on a driver that has not seen it, a small problem, judged like everything else.
//!
//! Drivers have compiled valid PTX into wrong programs. So a kernel that is new to a driver computes one small problem
//! before it is trusted, and the verdict is kept with it in the cache. The problem is small enough to cost a few
//! milliseconds and large enough to reach what a kernel has: several query tiles and several key tiles of every config,
//! rows and keys past the end of both, two batches, two query heads on one key head.

use flashcore_kernels::{Config, Specialization, reference_error};
use flashcore_problem::{
    Alignment, DType, Evidence, Expected, Inputs, Invalid, Layout, Mask, Operand, Outputs, PagedKv, Problem,
    ReferenceError, Scale, ScaleStrides, Shape, Strides, TensorStrides, judge, oracle,
};

/// Policy of the self-check: kernels that are new to a driver are run once before they are trusted, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SelfCheckPolicy {
    /// Yes, unless the environment variable `FLASHCORE_SELF_CHECK` is `off`.
    #[default]
    Environment,
    /// Yes.
    On,
    /// No. A kernel that failed before is still refused.
    Off,
}

impl SelfCheckPolicy {
    /// True to check, given the value of the environment variable.
    pub(crate) fn is_on(self, variable: Option<&str>) -> bool {
        match self {
            Self::Environment => variable != Some("off"),
            Self::On => true,
            Self::Off => false,
        }
    }
}

/// Query rows and keys: beyond two query tiles of 64 and three key tiles of 64, with a rest of each.
const QUERY_LENGTH: usize = 97;
pub(super) const KEY_LENGTH: usize = 203;
pub(super) const SEED: u64 = 0x5EED;

const SOFTCAP: f32 = 2.0;
/// Entries of the tables that expressions read: how many there are is not compiled in.
const MOST_ENTRIES: usize = 4096;
/// Largest magnitude of the constants of expressions: they are not compiled in either, so those of the trial need not be
/// those of the problem, and its verdict is about all. A NaN or a huge factor must not condemn the kernel, and limits are to lie
/// among the keys, where they cut tiles.
const LARGEST_NUMBER: f32 = 64.0;
const LARGEST_INTEGER: u32 = KEY_LENGTH as u32 / 3;

/// A layout whose rows begin at multiples of so many bytes and, below 16, of no more than that: of query and key, of
/// value, and of output.
pub(super) fn layout_of_widths(problem: &Problem, [key, value, output]: [u32; 3]) -> Layout {
    let types = problem.dtypes();
    let strides = |shape: Shape, width: u32, dtype: DType| {
        let padding = match width {
            16 => 0,
            _ => width as usize / dtype.size_bytes(),
        };
        let row = shape.columns.next_multiple_of(16 / dtype.size_bytes().min(2)) + padding;
        Strides { batch: row * shape.rows * shape.heads, head: row * shape.rows, row }
    };
    Layout::Strided(TensorStrides {
        query: strides(problem.query_shape(), key, types.query),
        key: strides(problem.key_shape(), key, types.key_value),
        value: strides(problem.value_shape(), value, types.key_value),
        output: strides(problem.output_shape(), output, types.output),
    })
}

/// Rows of a page of the trial: so few that little more than [`KEY_LENGTH`] keys take two pages, and compiled into the same
/// kernels. Those depend on whether it is a power of two, and on the power of two that divides it and a KV block.
fn page_size(of: usize) -> usize {
    let odd = if of.is_power_of_two() { 1 } else { 3 };
    of.min(odd << of.trailing_zeros().min(8))
}

/// Scales of tokens, which kernels have the most to do with.
fn scale_of_tokens(operand: Operand, problem: &Problem) -> Scale {
    let strides = ScaleStrides::per_token(operand, problem);
    let scale = |token: usize| 0.25 + 0.125 * (token % 11) as f32;
    Scale { data: (0..strides.extent(operand, problem).unwrap_or(0)).map(scale).collect(), strides }
}

/// A small problem with its answer.
pub(crate) struct AttentionTrial {
    pub(crate) problem: Problem,
    pub(crate) inputs: Inputs,
    expected: Expected,
    yardstick: ReferenceError,
}

impl AttentionTrial {
    /// The trial of the kernel that computes `problem` with a config: all that is compiled in is the same.
    pub(crate) fn new(problem: &Problem, config: Config) -> Result<Self, Invalid> {
        let small = Self::problem(problem);
        let mut inputs = Inputs::random(&small, SEED);
        for (operand, scale) in [(Operand::KScale, &mut inputs.k_scale), (Operand::VScale, &mut inputs.v_scale)] {
            *scale = scale.as_ref().map(|_| scale_of_tokens(operand, &small));
        }
        let expected = oracle(&small, &inputs)?;
        let yardstick = reference_error(config, &small, &inputs, &expected)?;
        Ok(Self { problem: small, inputs, expected, yardstick })
    }

    /// The small problem.
    pub(super) fn problem(problem: &Problem) -> Problem {
        let page_size = problem.paged.map(|paged| page_size(paged.page_size));
        // With pages, at least two of them, the last partial.
        let keys = page_size.map_or(KEY_LENGTH, |rows| KEY_LENGTH.max(rows + rows.div_ceil(3)));
        let keys = keys + usize::from(page_size.is_some_and(|rows| keys.is_multiple_of(rows)));
        let mut small = Problem::new(2, 2, keys, problem.head_dim, problem.dtype);
        small.key_heads = 1;
        small.query_length = QUERY_LENGTH;
        small.value_dim = problem.value_dim;
        small.scale = if problem.scale > 0.0 { small.scale } else { -small.scale };
        small = small.with_operands_of(problem);
        small.softcap = problem.softcap.map(|_| SOFTCAP);
        small.score_mod = problem.score_mod.map(|score| score.with_constants_within(LARGEST_NUMBER, LARGEST_INTEGER));
        small.mask_mod = problem.mask_mod.map(|mask| mask.with_constants_within(LARGEST_NUMBER, LARGEST_INTEGER));
        small.aux_f32 = problem.aux_f32.min(MOST_ENTRIES);
        small.aux_i32 = problem.aux_i32.min(MOST_ENTRIES);
        // Sizes of packed and paged tensors are not compiled in, but for what `page_size` keeps.
        small.total_q = problem.total_q.map(|_| 2 * QUERY_LENGTH - 3);
        small.total_k = problem.total_k.map(|_| 2 * keys - 5);
        small.kv_batch = problem.kv_batch.map(|_| 3);
        small.paged = page_size.map(|rows| {
            let width = keys.div_ceil(rows) + 1;
            PagedKv::new(rows, 3 * width, width)
        });
        small.layout = layout_of_widths(&small, [Specialization::of(problem).vec_bytes; 3]);
        small.mask = match problem.mask {
            Mask::None => Mask::None,
            // Bottom-right puts the diagonal into the middle of a tile.
            Mask::Causal(_) => Mask::Causal(Alignment::BottomRight),
            Mask::Window { left, right, .. } => Mask::Window {
                left: left.map(|_| KEY_LENGTH / 3),
                right: right.map(|_| 5),
                alignment: Alignment::BottomRight,
            },
        };
        small
    }

    /// Nothing, or what is wrong with the outputs, which were poisoned before the run.
    pub(crate) fn complaint(&self, outputs: &Outputs) -> Option<String> {
        let verdict = judge(&self.problem, &self.expected, &self.yardstick, &Evidence::new(&self.inputs, outputs));
        (!verdict.passed()).then(|| verdict.failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{MaskMod, ScoreMod};

    #[test]
    fn the_policy_and_the_environment() {
        let table = [
            (SelfCheckPolicy::Environment, None, true),
            (SelfCheckPolicy::Environment, Some("off"), false),
            (SelfCheckPolicy::Environment, Some("on"), true),
            (SelfCheckPolicy::On, Some("off"), true),
            (SelfCheckPolicy::Off, None, false),
        ];
        for (policy, variable, expected) in table {
            assert_eq!(policy.is_on(variable), expected, "{policy:?} {variable:?}");
        }
    }

    /// Constants of expressions that would make a trial of nothing do not reach it, and it is of the same kernel.
    #[test]
    fn a_trial_has_moderate_constants() {
        let tempered = |by: f32| ScoreMod::new("tempered", |score, _| score * by);
        let window = |keys: i32| MaskMod::new("window", |at| (at.query - at.key).abs().less(keys));
        let limits = [(f32::NAN, 0, 0.0, 0), (-1e30, 1_000_000, -64.0, 67), (0.5, -5, 0.5, -5)];
        for (number, integer, in_trial, keys_in_trial) in limits {
            let mut problem = Problem::new(1, 2, 4000, 64, DType::F16);
            (problem.score_mod, problem.mask_mod) = (Some(tempered(number)), Some(window(integer)));
            let trial = AttentionTrial::new(&problem, Config::ampere()).unwrap();
            assert_eq!(trial.problem.score_mod, Some(tempered(in_trial)));
            assert_eq!(trial.problem.mask_mod, Some(window(keys_in_trial)));
            assert_eq!(Specialization::of(&trial.problem), Specialization::of(&problem));
            let mut outputs = Outputs::poisoned(&trial.problem);
            flashcore_cpu::attend(&trial.problem, &trial.inputs, &mut outputs).unwrap();
            assert_eq!(trial.complaint(&outputs), None);
        }
    }

    /// Types, scales, pages and widths of an 8-bit cache are those of the problem.
    #[test]
    fn a_trial_has_the_cache_of_its_problem() {
        for (dim, padding, pages) in [(64, 0, None), (64, 4, None), (48, 0, Some(PagedKv::new(16, 100, 50)))] {
            let mut problem = Problem::new(3, 4, 9, dim, DType::Bf16).with_kv_dtype(Some(DType::E4m3));
            (problem.key_length, problem.k_scale, problem.v_scale) = (800, true, true);
            (problem.paged, problem.seqused_k) = (pages, pages.is_some());
            let mut strides = problem.strides();
            (strides.key.row, strides.key.head) = (strides.key.row + padding, strides.key.head + 800 * padding);
            strides.key.batch += 4 * 800 * padding;
            problem.layout = if padding > 0 { Layout::Strided(strides) } else { problem.layout };
            let trial = AttentionTrial::new(&problem, Config::ampere()).unwrap();
            assert_eq!(Specialization::of(&trial.problem), Specialization::of(&problem));
            assert!(trial.inputs.k_scale.as_ref().is_some_and(|scale| !scale.strides.is_constant_in(&trial.problem)));
            let mut outputs = Outputs::poisoned(&trial.problem);
            flashcore_cpu::attend(&trial.problem, &trial.inputs, &mut outputs).unwrap();
            assert_eq!(trial.complaint(&outputs), None);
        }
    }

    /// Rows of pages of a trial are compiled into the same kernels as those of its problem, and its longest sequence has
    /// several pages, the last partial, and several chunks.
    #[test]
    fn a_trial_has_several_pages() {
        let few = [1, 2, 3, 7, 16, 24, 48, 64, 96, 128, 192, 203, 256];
        let many = [257, 272, 384, 512, 640, 768, 1000, 1024, 1280, 1296, 4096, 3 << 12, 1 << 20];
        for rows in few.into_iter().chain(many) {
            let mut problem = Problem::new(3, 4, 9, 64, DType::F16).with_key_length(rows);
            (problem.paged, problem.seqused_k) = (Some(PagedKv::new(rows, 9, 3)), true);
            let small = AttentionTrial::problem(&problem);
            assert_eq!(small.validate(), Ok(()));
            let configs = [Config::ampere(), Config::hopper(), "hopper-64x256-1stage".parse().unwrap()];
            for config in configs {
                assert_eq!(config.specialization(&small), config.specialization(&problem), "{rows} {config}");
            }
            let paged = small.paged.unwrap();
            let lengths = Inputs::random(&small, SEED).seqused_k.unwrap();
            let longest = lengths.into_iter().max().unwrap() as usize;
            assert!(longest > paged.page_size && longest > 128, "{rows}");
            assert!(paged.page_size == 1 || !longest.is_multiple_of(paged.page_size), "{rows}");
        }
    }

    /// A right result passes; one wrong element, or one that was not written, does not.
    #[test]
    fn a_trial_tells_right_from_wrong() {
        for dtype in [DType::F16, DType::Bf16] {
            for mask in [Mask::None, Mask::Causal(Alignment::TopLeft)] {
                let mut problem = Problem::new(7, 8, 4000, 64, dtype);
                problem.mask = mask;
                problem.lse = true;
                let trial = AttentionTrial::new(&problem, Config::ampere()).unwrap();
                let mut outputs = Outputs::poisoned(&trial.problem);
                flashcore_cpu::attend(&trial.problem, &trial.inputs, &mut outputs).unwrap();
                assert_eq!(trial.complaint(&outputs), None);

                let last = outputs.output.len() - 1;
                let right = outputs.output.get(last);
                outputs.output.set(last, right + 0.25);
                assert!(trial.complaint(&outputs).is_some());
                let unwritten = Outputs::poisoned(&trial.problem);
                assert!(trial.complaint(&unwritten).is_some());
            }
        }
    }
}
