//! Kernels, judged like those in the simulator.

use flashcore_bench::testkit::gpu::Gpu;
use flashcore_bench::testkit::verify::verify;
use flashcore_bench::testkit::{Backend, Case};
use flashcore_problem::DType;

use crate::Test;
use crate::support::{config, each_kernel_case, problem};

fn check(gpu: &Gpu, name: &str, shape: &str, dtype: DType, mask: &str) {
    let case = Case::new(problem(shape, dtype, mask), 0, Backend::Cuda(config(name)));
    let outcome = verify(&case, Some(gpu));
    assert!(outcome.passed(), "{case}: {:#?}", outcome.complaints());
}

macro_rules! kernel_tests {
    ($($name:ident: $config:literal, $shape:literal, $dtype:ident, $mask:literal;)*) => {
        /// Every kernel case.
        pub(crate) const TESTS: &[Test] =
            &[$((stringify!($name), |gpu| check(gpu, $config, $shape, DType::$dtype, $mask))),*];
    };
}

each_kernel_case!(kernel_tests);
