//! The laboratory: timings, comparisons, profiles, errors of element types, and the records of all of them.

pub mod accuracy;
pub mod compare;
pub mod experiments;
pub mod ladder;
pub mod leaderboard;
pub mod load;
pub mod microbench;
pub mod peak;
pub mod problems;
pub mod profile;
pub mod record;
pub mod report;
pub mod repro;
pub mod roofline;
pub mod status;
pub mod svg;
pub mod tune;
