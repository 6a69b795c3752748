//! Tests of the kernels with the test kit, one binary: each case is run and judged.

mod choices;
mod conformance;
mod expressions;
mod features;
mod guard_pages;
mod hopper_sequences;
mod kernels;
mod sequences;
mod support;
mod unattended_keys;
