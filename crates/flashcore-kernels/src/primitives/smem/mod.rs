//! Tiles in shared memory.

mod copy;
mod swizzle;
mod tile;

pub use copy::{GlobalRows, PackedHeads, TileCopy};
pub use swizzle::{PANEL_COLUMNS, PANEL_ROW_BYTES, PanelMatrix, PanelTile, Rounded, TensorRows};
pub(crate) use tile::{CHUNK_BYTES, CHUNK_ELEMENTS};
pub use tile::{LaneRows, SharedLayout, SharedTile, TileAddresses};
