//! Split-KV (flash-decoding): splits of the keys, each with CTAs of its own, and the kernel that combines them.

pub(crate) mod combine;
pub(crate) mod partial;
