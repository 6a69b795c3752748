//! The library as a stranger sees it: a header, a shared object, and memory. Nothing here uses flashcore's Rust crates.

#[path = "../../built/mod.rs"]
pub(crate) mod built;
pub(crate) mod header;
pub(crate) mod library;
pub(crate) mod memory;
pub(crate) mod random;
