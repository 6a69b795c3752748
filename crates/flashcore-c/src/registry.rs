//! Registry of plans. A handle in C is a number in the place of a pointer: a plan that is gone is not found, where a
//! pointer to it would be read.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr;
use std::sync::{Arc, PoisonError, RwLock};

use crate::plan::PlanHandle;
use crate::problem::check_pointer;
use crate::status::{FLASHCORE_INVALID_PLAN, Failure, Status, guarded};

/// A plan and its description.
pub(crate) struct Entry {
    pub(crate) plan: api::Plan,
    pub(crate) description: CString,
}

pub(crate) struct Registry {
    /// The number given out last; numbers are not given out twice.
    last: usize,
    plans: BTreeMap<usize, Arc<Entry>>,
}

static REGISTRY: RwLock<Registry> = RwLock::new(Registry { last: 0, plans: BTreeMap::new() });

fn insert(entry: Entry) -> *mut PlanHandle {
    #[cfg(unix)]
    fork::watch();
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

/// Body of a function that creates a plan: `plan` becomes the new one, or null if there is none.
///
/// # Safety
///
/// `plan` must be null, which is an error, or point to a pointer that can be written.
pub(crate) unsafe fn create(plan: *mut *mut PlanHandle, make: impl FnOnce() -> Result<Entry, Failure>) -> Status {
    guarded(|| {
        check_pointer("plan", plan)?;
        // SAFETY: not null and aligned, and the caller promises that it can be written.
        unsafe { plan.write(ptr::null_mut()) };
        let handle = insert(make()?);
        // SAFETY: as for the write above.
        unsafe { plan.write(handle) };
        Ok(())
    })
}

fn unknown(plan: *const PlanHandle) -> Failure {
    let message = if plan.is_null() {
        "plan is null; it must come from flashcore_plan_create".to_owned()
    } else {
        format!("plan is {plan:p}, which is no plan of flashcore_plan_create; was it destroyed before?")
    };
    Failure { status: FLASHCORE_INVALID_PLAN, message }
}

/// Keeps the table whole and its lock free in forked children: who forks has the lock meanwhile. Another thread that had it
/// would not be there in the child to give it back.
#[cfg(unix)]
mod fork {
    use super::{REGISTRY, Registry};
    use std::cell::Cell;
    use std::ffi::c_int;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{PoisonError, RwLockWriteGuard};

    thread_local! {
        static HELD: Cell<Option<RwLockWriteGuard<'static, Registry>>> = const { Cell::new(None) };
    }

    type Handler = unsafe extern "C" fn();

    unsafe extern "C" {
        fn pthread_atfork(prepare: Option<Handler>, parent: Option<Handler>, child: Option<Handler>) -> c_int;
    }

    /// Asks the system to call the handlers, before there is a plan.
    pub(super) fn watch() {
        static IS_WATCHED: AtomicBool = AtomicBool::new(false);
        if !IS_WATCHED.swap(true, Ordering::AcqRel) {
            // SAFETY: the handlers take and give back a lock, on the thread that forks.
            let is_registered = unsafe { pthread_atfork(Some(take), Some(give_back), Some(give_back)) } == 0;
            // Where there was no memory for it, the next call tries again.
            if !is_registered {
                IS_WATCHED.store(false, Ordering::Release);
            }
        }
    }

    extern "C" fn take() {
        let _ = HELD.try_with(|held| held.set(Some(REGISTRY.write().unwrap_or_else(PoisonError::into_inner))));
    }

    extern "C" fn give_back() {
        let _ = HELD.try_with(|held| held.set(None));
    }
}
