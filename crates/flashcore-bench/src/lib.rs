//! The workbench as a library, in two rooms.
//!
//! [`testkit`] decides whether kernels are right:
//!
//! * [`verify`](testkit::verify) runs a [`Case`](testkit::Case) on a [`Backend`](testkit::Backend) and judges it;
//!   [`jobs`](testkit::jobs) does so in several processes; [`suites`](testkit::suites) are lists of cases,
//! * [`guard_pages`](testkit::guard_pages) hold the CPU's tensors, so that one byte too far is a fault,
//! * [`mutants`](testkit::mutants) plants bugs in the kernels and shows which check kills each,
//! * [`conformance`](testkit::conformance) compares every operation of the IR between the simulator and a GPU,
//! * [`resources`](testkit::resources) assembles the kernels for every architecture and gates registers and spills.
//!
//! [`lab`] decides whether they are fast:
//!
//! * [`compare`](lab::compare) measures A against B; [`leaderboard`](lab::leaderboard) keeps the best time of each
//!   problem; [`experiments`](lab::experiments) records what was tried,
//! * [`roofline`](lab::roofline) and [`peak`](lab::peak) bound the time of a problem from below,
//! * [`profile`](lab::profile) names the bottleneck of a kernel; [`tune`](lab::tune) searches for the fastest config,
//! * [`ladder`](lab::ladder) goes from one thread per row to the fastest kernel, one optimization at a time,
//! * [`accuracy`](lab::accuracy) measures the errors of element types against `f64`,
//! * [`record`](lab::record) is the file format of all results; [`report`](lab::report) puts them on one page,
//!   [`repro`](lab::repro) bundles them for replay, [`status`](lab::status) sums up the project's own.
//!
//! The lab builds on the test kit, never the reverse.
//! Both use [`floor`] (FLOPs, bytes and lower bounds of a problem), [`timing`], and [`util`].

pub mod floor;
pub mod lab;
pub mod testkit;
pub mod timing;
pub mod util;
