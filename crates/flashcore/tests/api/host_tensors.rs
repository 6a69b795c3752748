//! Host tensors through the public API, before the judge.

use flashcore::half::{bf16, f16};
use flashcore::verify::{Evidence, Inputs, Outputs, ReferenceError, Stress, judge, oracle};
use flashcore::{
    Alignment, BiasView, DType, Device, InputViews, Layout, Mask, OutputViews, Plan, Problem, Tensor, TensorView,
};

/// Runs a plan on slices of `$element`, as a user has them, and gives what it wrote.
macro_rules! run_on_slices {
    ($plan:expr, $inputs:expr, $outputs:expr, $element:ident) => {{
        let typed = |tensor: &Tensor| -> Vec<$element> {
            let bytes = tensor.data.chunks_exact(size_of::<$element>());
            bytes.map(|bytes| $element::from_le_bytes(bytes.try_into().unwrap())).collect()
        };
        let (query, key, value) = (typed(&$inputs.query), typed(&$inputs.key), typed(&$inputs.value));
        let mut output = typed(&$outputs.output);
        let mut views = InputViews::new(&query, &key, &value);
        views.alibi_slopes = $inputs.alibi_slopes.as_deref();
        views.sinks = $inputs.sinks.as_deref();
        views.bias = $inputs.bias.as_ref().map(|bias| BiasView { data: &bias.data, strides: bias.strides });
        views.seqused_k = $inputs.seqused_k.as_deref();
        let output_views = match &mut $outputs.lse {
            Some(rows) => OutputViews::new(&mut output).with_lse(rows),
            None => OutputViews::new(&mut output),
        };
        $plan.run(views, output_views).unwrap();
        $outputs.output.data = TensorView::from(&output).data.to_vec();
    }};
}

fn run(plan: &Plan, inputs: &Inputs) -> Outputs {
    let mut outputs = Outputs::poisoned(plan.problem().unwrap());
    match plan.problem().unwrap().dtype {
        DType::F16 => run_on_slices!(plan, inputs, outputs, f16),
        DType::Bf16 => run_on_slices!(plan, inputs, outputs, bf16),
        DType::F32 => run_on_slices!(plan, inputs, outputs, f32),
        DType::F64 => run_on_slices!(plan, inputs, outputs, f64),
        DType::E4m3 | DType::E5m2 => unreachable!("no problem is of 8 bits throughout"),
    }
    outputs
}

/// A problem of each type, as slices and as owned tensors: right by the gate, and the same bits.
fn check(change: impl Fn(&mut Problem)) {
    for dtype in DType::ALL {
        let mut problem = Problem::new(2, 4, 70, 32, dtype);
        problem.lse = true;
        change(&mut problem);
        let plan = Plan::new(&problem, &Device::cpu()).unwrap();
        let inputs = Inputs::random(&problem, 11);
        let outputs = run(&plan, &inputs);
        let mut owned = Outputs::poisoned(&problem);
        plan.run(&inputs, &mut owned).unwrap();

        let expected = oracle(&problem, &inputs).unwrap();
        let yardstick = ReferenceError::measure(&problem, &inputs, &expected).unwrap();
        let repeats = [owned];
        let evidence = Evidence { repeats: &repeats, ..Evidence::new(&inputs, &outputs) };
        let verdict = judge(&problem, &expected, &yardstick, &evidence);
        assert!(verdict.passed(), "{problem}: {verdict}");
    }
}

#[test]
fn plain_and_masked() {
    check(|_| {});
    for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
        check(|problem| {
            problem.query_length = 33;
            problem.mask = Mask::Causal(alignment);
        });
        check(|problem| {
            problem.key_length = 33;
            problem.mask = Mask::Window { left: Some(9), right: Some(2), alignment };
        });
    }
}

#[test]
fn features() {
    check(|problem| {
        problem.batch = 3;
        problem.key_heads = 2;
        problem.value_dim = 48;
        problem.softcap = Some(2.0);
        (problem.alibi, problem.sinks, problem.bias, problem.seqused_k) = (true, true, true, true);
    });
}

#[test]
fn layouts() {
    check(|problem| problem.layout = Layout::Bshd);
    check(|problem| problem.layout = Layout::PackedQkv);
    check(|problem| {
        let mut strides = problem.strides();
        // Rows apart, heads apart, one key for all batches; what lies between stays poison, says the gate.
        for strides in [&mut strides.query, &mut strides.key, &mut strides.value, &mut strides.output] {
            (strides.row, strides.head, strides.batch) = (37, 37 * 71, 37 * 71 * 4 + 5);
        }
        strides.key.batch = 0;
        problem.layout = Layout::Strided(strides);
    });
}

#[test]
fn empty_problems() {
    check(|problem| problem.batch = 0);
    check(|problem| problem.query_length = 0);
    check(|problem| problem.key_length = 0);
}

#[test]
fn extreme_numbers() {
    for stress in Stress::ALL {
        let problem = Problem::new(1, 2, 100, 64, DType::F16);
        let inputs = Inputs::stress(&problem, stress, 5);
        let outputs = run(&Plan::new(&problem, &Device::cpu()).unwrap(), &inputs);
        let expected = oracle(&problem, &inputs).unwrap();
        let yardstick = ReferenceError::measure(&problem, &inputs, &expected).unwrap();
        let verdict = judge(&problem, &expected, &yardstick, &Evidence::new(&inputs, &outputs));
        assert!(verdict.passed(), "{stress:?}: {verdict}");
    }
}

/// A plan is used by several threads at once.
#[test]
fn plans_are_shared() {
    let problem = Problem::new(1, 2, 64, 32, DType::F32);
    let plan = Plan::new(&problem, &Device::cpu()).unwrap();
    let inputs = Inputs::random(&problem, 3);
    let expected = run(&plan, &inputs);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(run(&plan, &inputs), expected));
        }
    });
}
