//! Plans by problem and device, the most recently used first.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Error, Result};
use flashcore::{Device, Plan, Problem};

use crate::operation::NAME;

/// The most plans that are kept. A model has a few shapes at a time, each used by every layer.
const MOST_PLANS: usize = 64;

/// The plans of all threads. On a GPU they hold kernels and keep its context open.
static PLANS: Mutex<Vec<(Place, Arc<Plan>)>> = Mutex::new(Vec::new());

/// A device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(usize),
}

/// The plan for a problem: the one that is there, or a new one, made while other threads go on.
pub(crate) fn plan(problem: &Problem, place: Place) -> Result<Arc<Plan>> {
    if let Some(plan) = find(problem, place) {
        return Ok(plan);
    }
    let refused = |error: &dyn std::fmt::Display| Error::msg(format!("{NAME}: {error}")).bt();
    let device = match place {
        Place::Cpu => Device::cpu(),
        #[cfg(feature = "cuda")]
        Place::Cuda(ordinal) => gpu(ordinal).map_err(|error| refused(&error))?,
    };
    let plan = Arc::new(Plan::new(problem, &device).map_err(|reasons| refused(&reasons))?);
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    plans.truncate(MOST_PLANS - 1);
    plans.insert(0, (place, plan.clone()));
    Ok(plan)
}

/// The GPU of this number, opened once and never closed: launches may still run when their plan is replaced, and the
/// kernels that they run belong to the device.
#[cfg(feature = "cuda")]
fn gpu(ordinal: usize) -> std::result::Result<Device, flashcore::Error> {
    static GPUS: Mutex<Vec<(usize, Device)>> = Mutex::new(Vec::new());
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, device)) = gpus.iter().find(|(other, _)| *other == ordinal) {
        return Ok(device.clone());
    }
    let device = Device::cuda(ordinal)?;
    gpus.push((ordinal, device.clone()));
    Ok(device)
}

fn find(problem: &Problem, place: Place) -> Option<Arc<Plan>> {
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    let index = plans.iter().position(|(other, plan)| *other == place && plan.problem() == Some(problem))?;
    plans[..=index].rotate_right(1);
    Some(plans[0].1.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::DType;

    #[test]
    fn plans_are_kept_by_use_up_to_a_limit() {
        let problem = |rows| Problem::new(1, 1, rows, 8, DType::F32);
        let first = plan(&problem(1), Place::Cpu).unwrap();
        for rows in 2..=MOST_PLANS {
            plan(&problem(rows), Place::Cpu).unwrap();
            assert!(Arc::ptr_eq(&first, &plan(&problem(1), Place::Cpu).unwrap()), "{rows}");
        }
        let second = plan(&problem(2), Place::Cpu).unwrap();
        for rows in MOST_PLANS + 1..2 * MOST_PLANS {
            plan(&problem(rows), Place::Cpu).unwrap();
        }
        assert!(find(&problem(1), Place::Cpu).is_none(), "the least recently used goes first");
        assert!(Arc::ptr_eq(&second, &find(&problem(2), Place::Cpu).unwrap()));
        assert_eq!(PLANS.lock().unwrap().len(), MOST_PLANS);
    }

    #[test]
    fn refusals_name_the_reason() {
        let error = plan(&Problem::new(1, 1, 1, 0, DType::F32), Place::Cpu).unwrap_err().to_string();
        assert!(error.starts_with("flash-attn: head_dim is 0; it must be at least 1"), "{error}");
    }
}
