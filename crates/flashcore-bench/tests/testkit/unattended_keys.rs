//! Keys that no row attends may hold anything: NaN and infinity there change no bit of an output.

use flashcore_bench::testkit::simulate::simulate;
use flashcore_bench::testkit::{parse_mask, parse_shape};
use flashcore_ir::Arch;
use flashcore_kernels::{Config, LaunchPlan};
use flashcore_problem::{Alignment, DType, Inputs, Mask, Problem, Shape, Strides, Tensor};

/// Fills the rows of keys that no query row attends.
fn fill(problem: &Problem, inputs: &mut Inputs, filling: f64) {
    let strides = problem.strides();
    for batch in 0..problem.batch {
        let attended = problem.attended_range(inputs.key_length(problem, batch));
        let unattended: Vec<usize> = (0..problem.key_length).filter(|key| !attended.contains(key)).collect();
        fill_rows(&mut inputs.key, problem.key_shape(), strides.key, batch, &unattended, filling);
        fill_rows(&mut inputs.value, problem.value_shape(), strides.value, batch, &unattended, filling);
    }
}

fn fill_rows(tensor: &mut Tensor, shape: Shape, strides: Strides, batch: usize, rows: &[usize], filling: f64) {
    for head in 0..shape.heads {
        for row in rows {
            let first = batch * strides.batch + head * strides.head + row * strides.row;
            (first..first + shape.columns).for_each(|index| tensor.set(index, filling));
        }
    }
}

/// True if the config has a kernel for the problem, which then sees nothing of what unattended keys hold.
fn check(config: Config, problem: &Problem) -> bool {
    let Ok(plan) = LaunchPlan::new(problem, config, Arch::Sm90a) else { return false };
    let mut inputs = Inputs::random(problem, 11);
    let run = |inputs: &Inputs| {
        let simulation =
            simulate(&plan, problem, inputs, 3).unwrap_or_else(|error| panic!("{config} {problem}: {error}"));
        let lse = simulation.outputs.lse.unwrap_or_default();
        (simulation.outputs.output.data, lse.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    fill(problem, &mut inputs, 0.0);
    let clean = run(&inputs);
    for filling in [f64::NAN, f64::INFINITY] {
        fill(problem, &mut inputs, filling);
        assert!(run(&inputs) == clean, "{config}: {filling} in unattended keys reaches an output of {problem}");
    }
    true
}

fn problem(shape: &str, dtype: DType, mask: Mask, seqused_k: bool) -> Problem {
    let mut problem = parse_shape(shape, dtype).expect("a shape");
    (problem.mask, problem.seqused_k, problem.lse) = (mask, seqused_k, true);
    problem
}

/// Masks with keys that no row attends, on the right, on the left and on both sides.
fn problems(dtype: DType) -> Vec<Problem> {
    let top_left = |left, right| Mask::Window { left, right, alignment: Alignment::TopLeft };
    let window = parse_mask("window:20,3").expect("a mask");
    let mut problems = vec![
        problem("1x2x70,300x32", dtype, Mask::Causal(Alignment::TopLeft), false),
        problem("1x2/1x70,300x32", dtype, window, false),
        problem("2x2/1x5,333x32", dtype, window, false),
        problem("1x1x130,300x32,16", dtype, top_left(Some(40), Some(9)), false),
        problem("3x1x70,300x32", dtype, Mask::None, true),
        problem("3x2/1x33,300x32", dtype, window, true),
        problem("2x1x70,200x32", dtype, Mask::Causal(Alignment::TopLeft), true),
        problem("2x1x90,260x64", dtype, Mask::Causal(Alignment::BottomRight), true),
        problem("1x1x5,0x32", dtype, window, false),
    ];
    problems[2].sinks = true;
    problems
}

fn check_family(family: &str, dtype: DType) {
    let configs: Vec<Config> =
        Config::all().into_iter().chain([Config::hopper()]).filter(|config| config.family() == family).collect();
    let mut checked = 0;
    for (number, problem) in problems(dtype).iter().enumerate() {
        // Each config has some of the problems, each problem several configs.
        for config in configs.iter().skip(number % 3).step_by(3) {
            checked += usize::from(check(*config, problem));
        }
    }
    assert!(checked >= problems(dtype).len(), "{family}: only {checked} were checked");
}

#[test]
fn scalar_kernels_see_nothing_of_unattended_keys() {
    for problem in problems(DType::F32) {
        assert!(check(Config::scalar(), &problem), "{problem}");
    }
}

#[test]
fn the_kernels_of_the_ladder_see_nothing_of_unattended_keys() {
    check_family("ladder", DType::F16);
}

#[test]
fn ampere_kernels_see_nothing_of_unattended_keys() {
    check_family("ampere", DType::Bf16);
}

#[test]
fn hopper_kernels_see_nothing_of_unattended_keys() {
    check_family("hopper", DType::F16);
}
