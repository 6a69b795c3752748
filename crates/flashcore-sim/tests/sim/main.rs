//! Tests of the simulator, one binary: small kernels, their values, their faults and their counters.

mod bulk;
mod clusters;
mod copies;
mod counters;
mod faults;
mod hopper;
mod launches;
mod mbarriers;
mod races;
mod schedule;
mod support;
mod tma;
mod values;
mod warpgroups;
