//! Attention kernels, and the seams that they share.
//!
//! | seam | what it decides |
//! |---|---|
//! | `tile_coord` | the rows, head and batch of a tile, and where its operands lie |
//! | `scheduler` | which tiles a CTA works on, in which order |
//! | `kv_range` | the keys that a tile attends: full and partial blocks |
//! | `kv_source` | the address of key row `j` |
//! | `scoring` | the terms that turn products into scores |
//! | `block_mask` | the KV blocks that a `mask_mod` leaves (block sparsity) |
//! | `split_kv` | keys split among CTAs, warpgroups or warps, and the reduction of the splits |

pub(crate) mod block_mask;
pub(crate) mod epilogue;
pub(crate) mod kv_range;
pub(crate) mod kv_source;
pub mod ladder;
pub mod scalar;
pub(crate) mod scheduler;
pub(crate) mod scoring;
pub mod sm80;
pub mod sm90;
pub mod split_kv;
pub(crate) mod tile_coord;

pub(crate) use tile_coord::{TileContext, TileCoord, TileSource};
