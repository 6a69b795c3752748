//! Reproduction bundles: everything that others need to repeat a result, in one file, and its replay.
//!
//! | module | is |
//! |---|---|
//! | `bundle` | the file: a tar, compressed, and sealed so that no bit of it can change unnoticed |
//! | `tar` | the archive in it |
//! | `manifest` | what it holds |
//! | `cases` | computing a case again, wherever it can be computed |
//! | `replay` | doing everything again, and saying what agrees |

mod bundle;
mod cases;
mod manifest;
mod replay;
mod tar;

pub use bundle::{BundleError, Files, open, pack};
pub use cases::{Computed, compute, inputs_sha256};
pub use manifest::{CaseEntry, FileEntry, KernelEntry, MANIFEST, Manifest, read_manifest};
pub use replay::{Agreement, Replayed, replay_cases, replay_kernels, replay_times};
