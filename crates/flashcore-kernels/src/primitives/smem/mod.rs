//! Tiles in shared memory.

mod copy;
mod swizzle;
mod tile;

pub use copy::{GlobalRows, PackedHeads, TileCopy};
pub use swizzle::{PANEL_COLUMNS, PANEL_ROW_BYTES, PFragment, SwizzledTile, TensorRows, WgmmaOperand};
pub(crate) use tile::{CHUNK_BYTES, CHUNK_ELEMENTS};
pub use tile::{LaneRows, SharedLayout, SharedTile, TileAddresses};
