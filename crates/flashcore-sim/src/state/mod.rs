//! The state of a cluster between two steps: registers and lanes of its warps, barriers, and `wgmma`s in flight. The
//! steps that change it are in [`crate::execute`], under the same names.

pub(crate) mod cluster_barrier;
pub(crate) mod mbarrier;
pub(crate) mod named_barrier;
pub(crate) mod registers;
pub(crate) mod warp;
pub(crate) mod wgmma;
