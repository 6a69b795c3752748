//! Tests of the kernels with the test kit, one binary: each case is run and judged.

mod append;
mod choices;
mod conformance;
mod expressions;
mod features;
mod fp8;
mod fp8_hopper;
mod fp8_mma;
mod fused_append;
mod guard_pages;
mod hopper_sequences;
mod kernels;
mod merge;
mod operation_resources;
mod overlap;
mod quantized_append;
mod sequences;
mod support;
mod tf32;
mod unattended_keys;
mod warp_specialized;
