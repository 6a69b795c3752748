//! Shared-memory tiles: their layouts, and the copies that fill them.

mod copy;
mod swizzle;
mod tile;

pub use copy::{GlobalRows, PackedHeads, TileCopy};
pub use swizzle::{PANEL_COLUMNS, PANEL_ROW_BYTES, SwizzledTile, TensorRows};
pub(crate) use tile::{CHUNK_BYTES, CHUNK_ELEMENTS};
pub use tile::{LaneRows, SharedLayout, SharedTile, TileAddresses};
