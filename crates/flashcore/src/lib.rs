//! FlashAttention for Rust with nothing to compile.
