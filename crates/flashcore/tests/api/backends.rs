//! Programs that were built with some of the backends, or with none.

#[cfg(not(all(feature = "cpu", feature = "cuda")))]
use flashcore::Error;
#[cfg(not(feature = "cpu"))]
use flashcore::Reason;
use flashcore::{DType, Device, Problem, supports};

#[cfg(not(feature = "cpu"))]
#[test]
fn without_the_cpu_backend_plans_say_so() {
    let mut problem = Problem::new(1, 2, 5, 8, DType::F32);
    let unsupported = supports(&problem, &Device::cpu()).unwrap_err();
    assert_eq!(*unsupported, [Reason::NotBuilt { backend: "cpu" }]);
    let words = "this program was built without the cpu backend of flashcore; turn on its cargo feature `cpu`";
    assert_eq!(Error::from(unsupported).to_string(), words);

    // What is wrong with the problem is said all the same.
    problem.key_heads = 0;
    let reasons = supports(&problem, &Device::cpu()).unwrap_err();
    let zero = Reason::Problem(flashcore::ProblemError::Zero { argument: "key_heads" });
    assert_eq!(*reasons, [zero, Reason::NotBuilt { backend: "cpu" }]);
}

#[cfg(not(feature = "cuda"))]
#[test]
fn without_the_cuda_backend_devices_say_so() {
    let not_built = Error::NotBuilt { backend: "cuda" };
    assert_eq!(Device::cuda(0).unwrap_err(), not_built);
    let best = Device::best_or_reason();
    assert_eq!((best.device.is_cuda(), best.no_gpu), (false, Some(not_built.clone())));
    let devices = Device::list();
    assert_eq!((devices.devices.len(), devices.devices[0].ordinal), (1, None));
    assert_eq!(devices.no_gpu, Some(not_built));
}

#[cfg(feature = "cpu")]
#[test]
fn the_cpu_backend_computes() {
    let plan = flashcore::Plan::new(&Problem::new(1, 1, 2, 1, DType::F32), &Device::cpu()).unwrap();
    let mut output = [0.0_f32; 2];
    let inputs = flashcore::InputViews::new(&[0.0_f32, 0.0][..], &[0.0_f32, 0.0][..], &[1.0_f32, 3.0][..]);
    plan.run(inputs, flashcore::OutputViews::new(&mut output[..])).unwrap();
    assert_eq!(output, [2.0, 2.0]);
}

/// The absence of a GPU is an error of the driver, not of the build.
#[cfg(feature = "cuda")]
#[test]
fn the_cuda_backend_is_there() {
    if let Err(error) = Device::cuda(0) {
        assert!(matches!(error, flashcore::Error::Cuda(_)), "{error:?}");
    }
}

#[test]
fn there_is_always_a_device_to_ask() {
    let problem = Problem::new(1, 1, 2, 0, DType::F32);
    assert!(supports(&problem, &Device::cpu()).is_err());
}
