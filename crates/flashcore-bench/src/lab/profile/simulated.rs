//! Counters of the simulator for a problem, or for a part that is like the whole.

use flashcore_kernels::{Config, LaunchPlan};
use flashcore_sim::Counters;

use crate::testkit::Workload;
use crate::testkit::simulate::simulate;
use crate::testkit::verify::{NoVerdict, SIMULATED_ARCH};

/// Counters of the simulator, and the part that they are of.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulated {
    /// The executed problem: one head of each group of one batch.
    pub workload: Workload,
    /// Size of the whole, as a multiple of the part.
    pub factor: f64,
    /// Counters of the part.
    pub counters: Counters,
}

/// Executes the kernel of a config on the heads that share a key head, of one batch: all others do the same work.
pub fn simulate_counters(workload: &Workload, config: Config) -> Result<Simulated, NoVerdict> {
    let Workload { problem, scales } = workload;
    let group = problem.query_heads / problem.key_heads.max(1);
    let part = problem.clone().with_batch(1).with_query_heads(group).with_key_heads(1);
    let part = Workload { problem: part, scales: *scales };
    let factor = (problem.batch * problem.key_heads) as f64;
    let plan = LaunchPlan::new(&part, config, SIMULATED_ARCH).map_err(NoVerdict::Refused)?;
    let counters = simulate(&plan, &part, &part.inputs(0), 0)?.counters;
    Ok(Simulated { workload: part, factor, counters })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_problem::{DType, Inputs, Problem};

    #[test]
    fn a_head_is_like_the_others() {
        let mut problem = Problem::new(2, 4, 80, 32, DType::F16);
        problem.key_heads = 2;
        let simulated = simulate_counters(&problem.clone().into(), Config::ampere()).expect("it runs");
        let plan = LaunchPlan::new(&problem, Config::ampere(), SIMULATED_ARCH).expect("a plan");
        let whole = simulate(&plan, &problem, &Inputs::random(&problem, 0), 0).expect("it runs").counters;
        assert_eq!(simulated.factor, 4.0);
        assert_eq!(4 * simulated.counters.mma, whole.mma);
        assert_eq!(4 * simulated.counters.shared().transactions, whole.shared().transactions);
        assert_eq!(4 * simulated.counters.global_loads.sectors, whole.global_loads.sectors);
    }
}
