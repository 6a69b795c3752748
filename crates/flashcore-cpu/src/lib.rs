//! Attention on the CPU in pure Rust.
