//! Split-KV (flash-decoding): the keys of the same rows split among CTAs, warpgroups or warps.
//!
//! Splits of different CTAs store `partial` results in a workspace, which the `combine` kernel reduces; splits within a
//! CTA `merge` theirs through shared memory.

pub(crate) mod cluster;
pub(crate) mod combine;
pub(crate) mod merge;
pub(crate) mod partial;
