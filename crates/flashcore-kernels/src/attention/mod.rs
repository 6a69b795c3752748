//! The attention kernels, and the seams that they share.

pub(crate) mod block_mask;
pub(crate) mod kv_range;
pub mod ladder;
pub mod naive;
pub(crate) mod scheduler;
pub mod sm80;
pub mod sm90;
pub mod split_kv;
pub(crate) mod tile_coord;

pub(crate) use tile_coord::{Place, Rows, TileContext, TileCoord};
