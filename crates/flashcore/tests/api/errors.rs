//! Messages of wrong calls, by value.

#![expect(unsafe_code, reason = "a launch that is refused is a launch")]

use flashcore::cuda::CudaError;
use flashcore::{
    AmpereConfig, Config, DType, Device, DeviceTensors, Error, InputViews, Invalid, Layout, OutputViews, Plan,
    PlanOptions, Problem, ProblemError, Reason, Shape, TensorError, UnknownConfig, Unsupported, supports,
};

fn check_problem(change: impl FnOnce(&mut Problem), expected: &[ProblemError]) {
    let mut problem = Problem::new(2, 4, 5, 8, DType::F16);
    change(&mut problem);
    let expected: Vec<Reason> = expected.iter().cloned().map(Reason::Problem).collect();
    let actual = supports(&problem, &Device::cpu()).err().map_or_else(Vec::new, |unsupported| unsupported.to_vec());
    assert_eq!(actual, expected, "{problem}");
}

#[test]
fn impossible_problems_say_everything_at_once() {
    check_problem(|_| {}, &[]);
    check_problem(
        |problem| {
            problem.query_heads = 0;
            problem.value_dim = 0;
            problem.scale = f64::INFINITY;
            problem.softcap = Some(-1.0);
        },
        &[
            ProblemError::Zero { argument: "query_heads" },
            ProblemError::Zero { argument: "value_dim" },
            ProblemError::ScaleNotFinite { scale: f64::INFINITY },
            ProblemError::SoftcapNotPositive { softcap: -1.0 },
        ],
    );
    check_problem(|problem| problem.key_heads = 3, &[ProblemError::HeadsNotMultiple { query_heads: 4, key_heads: 3 }]);
    let shape = Shape { batch: usize::MAX, heads: 4, rows: 5, columns: 8 };
    check_problem(
        |problem| problem.batch = usize::MAX,
        &["query", "key", "value", "output"].map(|tensor| ProblemError::TooLarge { tensor, shape }),
    );
    check_problem(
        |problem| {
            let mut strides = problem.strides();
            strides.output.head = 0;
            problem.layout = Layout::Strided(strides);
        },
        &[ProblemError::OutputOverlaps {
            batch: 160,
            head: 0,
            row: 8,
            shape: Shape { batch: 2, heads: 4, rows: 5, columns: 8 },
        }],
    );
}

#[test]
fn what_the_cpu_does_not_take() {
    let mut problem = Problem::new(1, 1, 1, 8, DType::F32);
    problem.head_dim = 70_000;
    let reasons = Plan::with_config(&problem, &Device::cpu(), Config::ampere()).unwrap_err();
    let expected = [
        Reason::TooWideForCpu { argument: "head_dim", value: 70_000, limit: 65_536 },
        Reason::ConfigOnCpu { config: Config::ampere() },
    ];
    assert_eq!(*reasons, expected);
    assert_eq!(
        Error::from(reasons).to_string(),
        "head_dim is 70000; the cpu backend takes at most 65536; config is one of the ampere kernel, which is for \
         GPUs; the cpu backend has no configs: leave it out"
    );
}

/// The rules of each config are checked where kernels are generated, on any device that has kernels.
#[test]
fn configs_that_do_not_exist() {
    let name = "amper".to_owned();
    assert_eq!("amper".parse::<Config>().map_err(Error::from), Err(Error::UnknownConfig(UnknownConfig { name })));
    let config = Config::from(AmpereConfig { stages: u32::MAX, warps: u32::MAX, ..AmpereConfig::default() });
    let options = PlanOptions::default().with_config(config);
    let reasons = Plan::with_options(&Problem::new(1, 1, 1, 64, DType::F16), &Device::cpu(), options).unwrap_err();
    assert_eq!(*reasons, [Reason::ConfigOnCpu { config }]);
}

/// A question mark is all that a caller needs, whatever error type the function has.
#[test]
fn question_marks_take_what_a_device_does_not() {
    fn into_own(problem: &Problem) -> Result<(), Error> {
        supports(problem, &Device::cpu())?;
        Ok(())
    }
    fn into_boxed(problem: &Problem) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        supports(problem, &Device::cpu())?;
        Plan::with_options(problem, &Device::cpu(), PlanOptions::default())?;
        Plan::with_config(problem, &Device::cpu(), Config::ampere())?;
        Ok(())
    }
    let mut problem = Problem::new(1, 8, 5, 64, DType::F16);
    (problem.key_heads, problem.softcap) = (3, Some(0.0));
    let unsupported = supports(&problem, &Device::cpu()).unwrap_err();
    let words = "query_heads is 8 and key_heads is 3; query_heads must be a multiple of key_heads; softcap is 0; it \
                 must be finite and above 0, or None for no softcap";
    assert_eq!(unsupported.to_string(), words);
    let borrowed: Vec<&Reason> = (&unsupported).into_iter().collect();
    assert_eq!(borrowed, unsupported.clone().into_iter().collect::<Vec<_>>().iter().collect::<Vec<_>>());
    assert_eq!(into_own(&problem), Err(Error::Unsupported(unsupported.clone())));
    let boxed = into_boxed(&problem).unwrap_err();
    assert_eq!(boxed.downcast_ref::<Unsupported>(), Some(&unsupported));
    assert_eq!(boxed.to_string(), words);
}

#[test]
fn wrong_host_tensors_are_named_and_nothing_is_written() {
    let mut problem = Problem::new(1, 2, 5, 8, DType::F32);
    problem.sinks = true;
    let plan = Plan::new(&problem, &Device::cpu()).unwrap();
    let (good, short, double) = (vec![1.0_f32; 80], vec![1.0_f32; 79], vec![1.0_f64; 80]);
    let (mut output, mut lse) = (vec![7.0_f32; 80], vec![7.0_f32; 10]);
    let mut inputs = InputViews::new(&good, &short, &double);
    inputs.alibi_slopes = Some(&[1.0, 2.0]);
    let refused = plan.run(inputs, OutputViews::new(&mut output));
    let expected = vec![
        TensorError::TooShort { tensor: "key", actual: 79, needed: 80 },
        TensorError::DType { tensor: "value", actual: DType::F64, expected: DType::F32 },
        TensorError::Unexpected { tensor: "alibi_slopes" },
        TensorError::Missing { tensor: "sinks" },
    ];
    assert_eq!(refused, Err(Error::Invalid(Invalid::Tensors(expected))));

    let mut inputs = InputViews::new(&good, &good, &good);
    inputs.sinks = Some(&[0.0, 0.0]);
    let refused = plan.run(inputs, OutputViews::new(&mut output[..40]).with_lse(&mut lse));
    let expected = vec![
        TensorError::TooShort { tensor: "output", actual: 40, needed: 80 },
        TensorError::Unexpected { tensor: "lse" },
    ];
    assert_eq!(refused, Err(Error::Invalid(Invalid::Tensors(expected))));
    assert_eq!((output, lse), (vec![7.0; 80], vec![7.0; 10]));
}

#[test]
fn device_tensors_need_a_gpu() {
    let plan = Plan::new(&Problem::new(1, 1, 1, 8, DType::F16), &Device::cpu()).unwrap();
    let tensors = DeviceTensors::new(16, 32, 48, 64);
    // SAFETY: a plan on the CPU launches nothing.
    let refused = unsafe { plan.launch(std::ptr::null_mut::<u8>(), tensors) };
    assert_eq!(refused, Err(Error::NotOnCuda { call: "launch", device: plan.device().to_string() }));
}

/// Every address error has its own test beside the check; these are the words.
#[test]
fn messages_name_the_argument_its_value_and_what_is_allowed() {
    let table = [
        (Error::Null { argument: "key" }, "key is null; it must be the address of device memory"),
        (
            Error::Unexpected { argument: "lse", address: 64 },
            "lse is 0x40; the problem has it switched off, so it must be 0",
        ),
        (
            Error::Misaligned { argument: "query", address: 8, multiple: 16 },
            "query is 0x8; it must be a multiple of 16",
        ),
        (
            Error::AddressOverflow { argument: "value", address: 256, bytes: u64::MAX },
            "value is 0x100 and has 18446744073709551615 bytes; it must end before 0xffffffffffffffff",
        ),
        (
            Error::Aliased { written: "output", other: "query", address: 16 },
            "output and query are both 0x10; what is written must have a place of its own",
        ),
        (
            Error::NotOnCuda { call: "launch", device: "cpu (2 threads)".to_owned() },
            "launch is for device tensors, and this plan is on cpu (2 threads); use run, or plan for Device::cuda",
        ),
    ];
    for (error, message) in table {
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn a_machine_without_a_gpu_says_so() {
    let best = Device::best_or_reason();
    let devices = Device::list();
    assert_eq!(devices.devices.last().and_then(|cpu| cpu.ordinal), None);
    match Device::cuda(0) {
        Ok(device) => assert!(device.is_cuda() && best.no_gpu.is_none()),
        Err(error) => {
            assert!(matches!(error, Error::Cuda(CudaError::NoDriver { .. } | CudaError::NoDevice)), "{error:?}");
            assert!(!best.device.is_cuda() && best.device.context().is_none());
            assert_eq!(best.to_string(), format!("{}: {error}", best.device));
            assert_eq!((best.no_gpu, devices.no_gpu), (Some(error.clone()), Some(error)));
        }
    }
    assert!(Device::cuda(usize::MAX).is_err());
    assert!(devices.devices.last().unwrap().open().is_ok());
}
