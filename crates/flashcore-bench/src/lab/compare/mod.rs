//! A/B comparison with an A/A control: which is faster, and is that significant?
//!
//! A round runs A, B and A once more, in random order, so that whatever disturbs the machine disturbs all three. The
//! logarithm of B over A is what is asked for; that of A over A is what the machine makes of nothing, measured in the
//! same run by the same arithmetic. The verdict follows from the median over rounds and its bootstrap interval:
//!
//! * `FASTER` or `SLOWER` when the whole interval lies beyond the minimum effect and beyond twice the A/A difference, and
//!   rounds whose labels are drawn by lot do not differ as much,
//! * `SAME` when it lies within the minimum effect on both sides,
//! * `AMBIGUOUS` otherwise.
//!
//! | module | is |
//! |---|---|
//! | `statistics` | from rounds to a verdict |
//! | `rounds` | making rounds until there is a verdict or no time |
//! | `subject` | what can be compared, by name |
//! | `in_process` | subjects of this program: CPU levels, GPU configs |
//! | `worker` | subjects of other builds, each in a process of its own |
//! | `builds` | other builds, from revisions |
//! | `records` | what was measured earlier |
//! | `comparison` | what is written down |

mod builds;
mod comparison;
mod in_process;
mod records;
mod rounds;
mod statistics;
mod subject;
mod worker;

pub use builds::{BuildError, binary_of_revision};
pub use comparison::{ComparedRow, Comparison};
pub use in_process::{compare_in_process, measure_ceilings, slack};
pub use records::{CompareRecordsError, compare_records};
pub use rounds::{Arm, Options, Progress, rounds};
pub use statistics::{Conclusion, Finding, Interval, Round, conclude, conclude_unpaired};
pub use subject::{Side, SideError, Subject};
pub use worker::{CompareError, Greeting, compare_workers, serve};
