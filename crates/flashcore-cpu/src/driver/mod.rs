//! The driver: from a problem to work items on threads, and from their results to the output.

#[expect(unsafe_code, reason = "threads write parts of one output")]
mod call;
#[cfg_attr(unix, expect(unsafe_code, reason = "the system is asked to tell of forks"))]
mod fork;
#[expect(unsafe_code, reason = "a value that is shared without a lock")]
pub(crate) mod once;
#[expect(unsafe_code, reason = "threads write parts of one output")]
pub(crate) mod output;
pub(crate) mod parallel;
pub(crate) mod scheduler;
pub(crate) mod scratch;
mod spin_wait;
#[expect(unsafe_code, reason = "threads write parts of one array")]
mod split_kv;
#[expect(unsafe_code, reason = "a pool that is shared without a lock")]
pub(crate) mod workers;

pub(crate) use call::attend;
