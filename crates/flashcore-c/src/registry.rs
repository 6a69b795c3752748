//! Plans by number. What C holds is a number in the place of a pointer: a plan that is gone is not found, where a pointer
//! to it would be read.

use std::collections::HashMap;
use std::ffi::CString;
use std::ptr;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use crate::plan::PlanHandle;
use crate::status::{FLASHCORE_INVALID_PLAN, Failure};

/// A plan and its description.
pub(crate) struct Entry {
    pub(crate) plan: api::Plan,
    pub(crate) description: CString,
}

#[derive(Default)]
struct Registry {
    /// The number given out last; numbers are not given out twice.
    last: usize,
    plans: HashMap<usize, Arc<Entry>>,
}

static REGISTRY: LazyLock<RwLock<Registry>> = LazyLock::new(RwLock::default);

pub(crate) fn insert(entry: Entry) -> *mut PlanHandle {
    let mut registry = REGISTRY.write().unwrap_or_else(PoisonError::into_inner);
    registry.last += 1;
    let number = registry.last;
    registry.plans.insert(number, Arc::new(entry));
    ptr::without_provenance_mut(number)
}

pub(crate) fn find(plan: *const PlanHandle) -> Result<Arc<Entry>, Failure> {
    let registry = REGISTRY.read().unwrap_or_else(PoisonError::into_inner);
    registry.plans.get(&plan.addr()).cloned().ok_or_else(|| unknown(plan))
}

pub(crate) fn remove(plan: *const PlanHandle) -> Result<(), Failure> {
    let removed = REGISTRY.write().unwrap_or_else(PoisonError::into_inner).plans.remove(&plan.addr());
    // Dropped here, after the lock: dropping a plan may wait for the GPU.
    removed.map(drop).ok_or_else(|| unknown(plan))
}

fn unknown(plan: *const PlanHandle) -> Failure {
    let message = if plan.is_null() {
        "plan is null; it must come from flashcore_plan_create".to_owned()
    } else {
        format!("plan is {plan:p}, which is no plan; was it destroyed before?")
    };
    Failure { status: FLASHCORE_INVALID_PLAN, message }
}
