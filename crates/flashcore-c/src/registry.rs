//! Registry of plans. A handle in C is a number in the place of a pointer: a plan that is gone is not found, where a
//! pointer to it would be read.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr;
use std::sync::{Arc, PoisonError, RwLock};

use crate::append::AppendHandle;
use crate::continuation::ContinueHandle;
use crate::kvcache::KvCacheHandle;
use crate::merge::MergeHandle;
use crate::plan::PlanHandle;
use crate::sized::check_pointer;
use crate::status::{FLASHCORE_INVALID_PLAN, Failure, Status, guarded};

/// A plan and its description.
pub(crate) struct Entry {
    pub(crate) plan: api::Plan,
    pub(crate) description: CString,
}

pub(crate) struct Registry {
    /// The number given out last; numbers are not given out twice.
    last: usize,
    plans: Table<Entry>,
    appends: Table<api::AppendPlan>,
    kv_caches: Table<api::KvCachePlan>,
    merges: Table<api::MergePlan>,
    continuations: Table<api::ContinuePlan>,
}

type Table<T> = BTreeMap<usize, Arc<T>>;

/// A handle in C, and what it stands for.
pub(crate) trait Handle {
    /// The plan.
    type Entry;
    /// The function that makes one.
    const CREATE: &'static str;
    /// The table of these plans.
    fn table(registry: &Registry) -> &Table<Self::Entry>;
    /// The table, to be changed.
    fn table_mut(registry: &mut Registry) -> &mut Table<Self::Entry>;
}

macro_rules! handles {
    ($($Handle:ty: $Entry:ty, $table:ident, $create:literal;)*) => {
        $(impl Handle for $Handle {
            type Entry = $Entry;
            const CREATE: &'static str = $create;
            fn table(registry: &Registry) -> &Table<$Entry> {
                &registry.$table
            }
            fn table_mut(registry: &mut Registry) -> &mut Table<$Entry> {
                &mut registry.$table
            }
        })*
    };
}

handles! {
    PlanHandle: Entry, plans, "flashcore_plan_create";
    AppendHandle: api::AppendPlan, appends, "flashcore_append_create";
    KvCacheHandle: api::KvCachePlan, kv_caches, "flashcore_kvcache_create";
    MergeHandle: api::MergePlan, merges, "flashcore_merge_create";
    ContinueHandle: api::ContinuePlan, continuations, "flashcore_continue_create";
}

static REGISTRY: RwLock<Registry> = RwLock::new(Registry {
    last: 0,
    plans: BTreeMap::new(),
    appends: BTreeMap::new(),
    kv_caches: BTreeMap::new(),
    merges: BTreeMap::new(),
    continuations: BTreeMap::new(),
});

fn insert<H: Handle>(entry: H::Entry) -> *mut H {
    #[cfg(unix)]
    fork::watch();
    let mut registry = REGISTRY.write().unwrap_or_else(PoisonError::into_inner);
    registry.last += 1;
    let number = registry.last;
    H::table_mut(&mut registry).insert(number, Arc::new(entry));
    ptr::without_provenance_mut(number)
}

pub(crate) fn find<H: Handle>(plan: *const H) -> Result<Arc<H::Entry>, Failure> {
    let registry = REGISTRY.read().unwrap_or_else(PoisonError::into_inner);
    H::table(&registry).get(&plan.addr()).cloned().ok_or_else(|| unknown(plan))
}

fn remove<H: Handle>(plan: *const H) -> Result<(), Failure> {
    let removed = H::table_mut(&mut REGISTRY.write().unwrap_or_else(PoisonError::into_inner)).remove(&plan.addr());
    // Dropped here, after the lock: dropping a plan may wait for the GPU.
    removed.map(drop).ok_or_else(|| unknown(plan))
}

/// Body of a function that creates a plan: `plan` becomes the new one, or null if there is none.
///
/// # Safety
///
/// `plan` must be null, which is an error, or point to a pointer that can be written.
pub(crate) unsafe fn create<H: Handle>(plan: *mut *mut H, make: impl FnOnce() -> Result<H::Entry, Failure>) -> Status {
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

/// Body of a function that destroys a plan.
pub(crate) fn destroy<H: Handle>(plan: *mut H) -> Status {
    guarded(|| if plan.is_null() { Ok(()) } else { remove(plan) })
}

/// Body of a function that asks a plan for a number: 0 if it is no plan.
pub(crate) fn number_of<H: Handle>(plan: *const H, number: impl FnOnce(&H::Entry) -> usize) -> u64 {
    let mut found = 0;
    guarded(|| {
        found = number(&*find(plan)?) as u64;
        Ok(())
    });
    found
}

fn unknown<H: Handle>(plan: *const H) -> Failure {
    let message = if plan.is_null() {
        format!("plan is null; it must come from {}", H::CREATE)
    } else {
        format!("plan is {plan:p}, which is no plan of {}; was it destroyed before?", H::CREATE)
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
