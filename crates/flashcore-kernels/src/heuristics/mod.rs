//! Heuristics: the config that a problem gets unless another is asked for, and where a search for a better one goes.
//!
//! [`select`] decides from the problem and the target alone, makes no plan and generates no kernel: every question about a
//! config is answered by `unsupported`. The search makes plans, because only the verifier knows if a
//! kernel far from the defaults keeps all rules.

mod search;

use flashcore_ir::target::{ADA_FP8, ADA_FP8_MMA};
use flashcore_problem::{DType, Problem};

use crate::attention::sm80::heuristics as sm80;
use crate::attention::sm90::heuristics as sm90;
use crate::config::Config;
use crate::primitives::Fp8Widening;
use crate::target::Target;

pub use search::{search_space, starting_points};

/// The config for a problem on a GPU unless another is asked for.
pub fn select(problem: &Problem, target: impl Into<Target>) -> Config {
    let target = target.into();
    if problem.dtype.is_float8() {
        // Under a driver that has none, the config for the oldest that has one: the driver is then the only reason.
        let mut drivers = [target.ptx, ADA_FP8.ptx, ADA_FP8_MMA.ptx].into_iter().filter(|&ptx| ptx >= target.ptx);
        let config = drivers.find_map(|ptx| select_fp8(problem, target.with_ptx(ptx)));
        return config.unwrap_or_else(Config::ampere);
    }
    if problem.dtype == DType::F32 {
        return sm80::select_f32(problem, target).map_or_else(Config::scalar, Config::from);
    }
    if !Config::ampere().traits().dtypes.contains(&problem.dtype) {
        return Config::scalar();
    }
    let packed = || sm90::select_packed(problem, target).map(Config::from);
    let decode = || sm80::select_decode(problem, target).map(Config::from);
    let hopper = || sm90::select(problem, target).map(Config::from);
    let config = packed().or_else(decode).or_else(hopper).unwrap_or_else(|| sm80::select(problem, target).into());
    with_fp8_widening(config, problem, target)
}

/// The config with the default way of a GPU to widen keys and values of 8 bits, where the problem has those.
pub(crate) fn with_fp8_widening(config: Config, problem: &Problem, target: Target) -> Config {
    let types = problem.dtypes();
    let widening = || config.with_fp8_widening(Fp8Widening::of(target, types.query, types.key_value));
    types.key_value.is_float8().then(widening).flatten().unwrap_or(config)
}

/// The config for query, key and value of 8 bits, if a kernel takes them.
fn select_fp8(problem: &Problem, target: Target) -> Option<Config> {
    let hopper = sm90::select_fp8(problem, target);
    // Decode with fewer tiles than SMs is left to `wgmma`.
    let chunked = hopper.filter(|config| config.chunk_keys > 0).map(Config::from);
    let decode = || sm80::select_decode(problem, target).map(Config::from);
    let ampere = || sm80::select_fp8(problem, target).map(Config::from);
    chunked.or_else(decode).or(hopper.map(Config::from)).or_else(ampere)
}
