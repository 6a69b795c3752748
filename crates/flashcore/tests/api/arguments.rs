//! 100,000 random calls, most of them absurd: an answer or a typed error, never a panic.

#![expect(unsafe_code, reason = "launches that are refused are launches")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use flashcore::half::f16;
use flashcore::verify::SplitMix64;
use flashcore::{
    Alignment, AmpereConfig, BiasStrides, BiasView, Config, DType, Device, DeviceTensors, Error, InputViews, Layout,
    Mask, OutputViews, Plan, PlanOptions, Problem, ScalarConfig, SelfCheckPolicy, Strides, TensorStrides,
    UnknownConfig,
};
use flashcore_ir::Arch;

const CALLS: u64 = 100_000;
/// Multiplications beyond which a call is not made, because it would be right and take a year: a key that is repeated
/// by a stride of 0 can be repeated any number of times.
const MOST_WORK: f64 = 1e6;

/// Numbers as callers mistake them.
struct Absurd(SplitMix64);

impl Absurd {
    fn one_in(&mut self, count: usize) -> bool {
        self.0.below(count) == 0
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.0.below(choices.len())]
    }

    fn size(&mut self) -> usize {
        if self.one_in(40) {
            self.pick(&[0, 65_536, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 62, 1 << 63, usize::MAX / 2, usize::MAX])
        } else {
            self.pick(&[0, 1, 1, 2, 2, 3, 4, 5, 8])
        }
    }

    fn number(&mut self) -> f32 {
        self.pick(&[1.0, 1.0, 1.0, 0.125, 0.0, -1.0, f32::MAX, f32::MIN_POSITIVE, f32::NAN, f32::INFINITY])
    }

    fn limit(&mut self) -> Option<usize> {
        if self.one_in(3) { None } else { Some(self.size()) }
    }

    fn strides(&mut self, like: Strides) -> Strides {
        let mut one = |usual: usize| if self.one_in(8) { self.size() } else { usual };
        Strides { batch: one(like.batch), head: one(like.head), row: one(like.row) }
    }

    fn problem(&mut self) -> Problem {
        let dtype = self.pick(&DType::ALL);
        let mut problem = Problem::new(self.size(), self.size(), self.size(), self.size(), dtype);
        if self.one_in(3) {
            problem.key_heads = self.size();
        }
        if self.one_in(3) {
            (problem.key_length, problem.value_dim) = (self.size(), self.size());
        }
        if self.one_in(3) {
            problem.scale = f64::from(self.number());
        }
        if self.one_in(5) {
            problem.softcap = Some(self.number());
        }
        let alignment = self.pick(&[Alignment::TopLeft, Alignment::BottomRight]);
        problem.mask = match self.0.below(3) {
            0 => Mask::None,
            1 => Mask::Causal(alignment),
            _ => Mask::Window { left: self.limit(), right: self.limit(), alignment },
        };
        problem.alibi = self.one_in(4);
        problem.sinks = self.one_in(4);
        problem.bias = self.one_in(4);
        problem.seqused_k = self.one_in(4);
        problem.lse = self.one_in(2);
        problem.layout = self.pick(&[Layout::Bhsd, Layout::Bhsd, Layout::Bshd, Layout::PackedQkv]);
        if self.one_in(4) {
            let like = problem.strides();
            problem.layout = Layout::Strided(TensorStrides {
                query: self.strides(like.query),
                key: self.strides(like.key),
                value: self.strides(like.value),
                output: self.strides(like.output),
            });
        }
        problem
    }

    /// Usually as many as needed, if that is few.
    fn count(&mut self, needed: Option<usize>) -> usize {
        let needed = needed.filter(|&needed| needed < 1 << 16).unwrap_or(7);
        if self.one_in(12) { needed.saturating_sub(1) } else { needed + self.pick(&[0, 0, 0, 3]) }
    }

    fn optional(&mut self, wanted: bool, needed: usize) -> Option<usize> {
        (wanted != self.one_in(20)).then(|| if self.one_in(20) { self.0.below(9) } else { needed.min(1 << 16) })
    }

    fn config(&mut self) -> Config {
        let small = |random: &mut Self| random.pick(&[0, 1, 2, 16, 33, 64, 1 << 31, u32::MAX]);
        if self.one_in(2) {
            Config::from(ScalarConfig { threads: small(self) })
        } else {
            let (warps, tile_n, stages) = (small(self), small(self), small(self));
            Config::from(AmpereConfig { warps, tile_n, stages, ..AmpereConfig::default() })
        }
    }

    fn address(&mut self) -> u64 {
        self.pick(&[0, 1, 8, 16, 4096, 4096, 8192, 1 << 47, u64::MAX - 15, u64::MAX])
    }
}

/// Outcome of a call.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Computed,
    TooMuchWork,
    Refused,
}

fn work(problem: &Problem) -> f64 {
    let rows = problem.batch as f64 * problem.query_heads as f64 * problem.query_length as f64;
    rows * problem.key_length as f64 * (problem.head_dim + problem.value_dim) as f64
}

fn call(random: &mut Absurd, problem: &Problem) -> Result<Answer, Error> {
    let device = Device::cpu();
    let config = random.one_in(30).then(|| random.config());
    let self_check = random.pick(&[SelfCheckPolicy::Environment, SelfCheckPolicy::On, SelfCheckPolicy::Off]);
    let lse = random.address();
    let tensors =
        DeviceTensors::new(random.address(), random.address(), random.address(), random.address()).with_lse(lse);
    let checked = tensors.validate(problem);
    let plan =
        Plan::with_options(problem, &device, PlanOptions::default().with_config(config).with_self_check(self_check))?;
    assert_eq!(problem.validate(), Ok(()), "a plan is for a problem that makes sense");
    // SAFETY: a plan on the CPU launches nothing.
    let launched = unsafe { plan.launch(std::ptr::null_mut::<u8>(), tensors) };
    assert!(matches!(launched, Err(Error::NotOnCuda { .. })));
    if random.one_in(30) {
        checked?;
    }

    let strides = problem.strides();
    let size = problem.dtype.size_bytes();
    let mut tensor = |strides: Strides, shape| vec![0x3C_u8; random.count(strides.extent(shape)) * size];
    let query = tensor(strides.query, problem.query_shape());
    let key = tensor(strides.key, problem.key_shape());
    let value = tensor(strides.value, problem.value_shape());
    let mut output = tensor(strides.output, problem.output_shape());
    let other_type = vec![f16::ONE; query.len() / 2];
    let view = |data| flashcore::TensorView { dtype: problem.dtype, data };
    let mut inputs = InputViews::new(view(&query), view(&key), view(&value));
    if random.one_in(30) {
        inputs.query = (&other_type).into();
    }
    let heads = problem.query_heads;
    let floats = vec![0.5_f32; 1 << 16];
    inputs.alibi_slopes = random.optional(problem.alibi, heads).map(|count| &floats[..count]);
    inputs.sinks = random.optional(problem.sinks, heads).map(|count| &floats[..count]);
    let lengths = vec![random.pick(&[0, 1, 1, u32::MAX]); problem.batch.min(1 << 16)];
    inputs.seqused_k =
        random.optional(problem.seqused_k, problem.batch).map(|count| &lengths[..count.min(lengths.len())]);
    let strides = BiasStrides { batch: 0, head: random.size(), row: random.size(), key: random.pick(&[0, 1]) };
    inputs.bias = random.optional(problem.bias, 4096).map(|count| BiasView { data: &floats[..count], strides });
    let rows = (heads.saturating_mul(problem.batch)).saturating_mul(problem.query_length);
    let mut lse = random.optional(problem.lse, rows).map(|count| vec![0.0; count]);

    let output = flashcore::TensorViewMut { dtype: problem.dtype, data: &mut output };
    let mut outputs = OutputViews::new(output);
    outputs.lse = lse.as_deref_mut();
    if work(problem) > MOST_WORK && inputs.validate(problem).is_ok() && outputs.validate(problem).is_ok() {
        return Ok(Answer::TooMuchWork);
    }
    plan.run(inputs, outputs)?;
    Ok(Answer::Computed)
}

#[test]
fn random_arguments_are_answered() {
    let (mut computed, mut refused, mut skipped) = (0, 0, 0);
    for seed in 0..CALLS {
        let mut random = Absurd(SplitMix64::new(seed));
        let problem = random.problem();
        let answer = catch_unwind(AssertUnwindSafe(|| {
            // An error is only as good as its message.
            call(&mut random, &problem).unwrap_or_else(|error| {
                assert!(!error.to_string().is_empty());
                Answer::Refused
            })
        }));
        match answer.ok() {
            Some(Answer::Computed) => computed += 1,
            Some(Answer::Refused) => refused += 1,
            Some(Answer::TooMuchWork) => skipped += 1,
            None => panic!("call {seed} panicked: {problem:?}"),
        }
    }
    assert!(computed > 10_000 && refused > 10_000 && skipped < 100, "{computed} {refused} {skipped}");
}

/// The generator, which a plan of a GPU asks before it asks the GPU, gives a kernel or reasons, no panic.
#[test]
fn random_problems_and_configs_are_answered_by_the_generator() {
    let (mut generated, mut refused) = (0, 0);
    for seed in 0..5_000 {
        let mut random = Absurd(SplitMix64::new(seed));
        let mut problem = random.problem();
        if random.one_in(2) {
            (problem.dtype, problem.head_dim, problem.value_dim) = (DType::F16, 64, 64);
            (problem.softcap, problem.mask, problem.layout) = (None, Mask::None, Layout::Bshd);
            (problem.alibi, problem.sinks, problem.bias, problem.seqused_k) = (false, false, false, false);
        }
        let config = if random.one_in(2) { random.config() } else { random.pick(&Config::all()) };
        match flashcore_kernels::LaunchPlan::new(&problem, config, Arch::Sm90a) {
            Ok(_) => generated += 1,
            Err(reasons) => {
                refused += 1;
                assert!(reasons.iter().all(|reason| !reason.to_string().is_empty()));
            }
        }
    }
    assert!(generated > 100 && refused > 1_000, "{generated} {refused}");
}

#[test]
fn random_names_are_no_configs() {
    let mut random = SplitMix64::new(1);
    for _ in 0..1_000 {
        let name: String = (0..random.below(12)).filter_map(|_| char::from_u32(random.below(0x250) as u32)).collect();
        assert_eq!(name.parse::<Config>(), Err(UnknownConfig { name }));
    }
}
