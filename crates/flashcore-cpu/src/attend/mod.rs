//! Attention of one work item: online softmax over KV tiles.

mod block;
pub(crate) mod blocked;
pub(crate) mod decode;
pub(crate) mod group;
pub(crate) mod scales;
mod score_mod;
pub(crate) mod scoring;
pub(crate) mod softmax;
