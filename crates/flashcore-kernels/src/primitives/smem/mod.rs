//! Shared-memory tiles: their layouts, and the copies that fill them.

mod copy;
mod swizzle;
mod tile;
mod transpose;
mod write;

pub use copy::{GlobalRows, PackedHeads, PagedRows, TileCopy};
pub(crate) use swizzle::CHUNKS_PER_ROW;
pub use swizzle::{PANEL_ROW_BYTES, SwizzledTile, TensorRows};
pub(crate) use tile::{CHUNK_BYTES, HALF_BYTES, shared_bytes};
pub use tile::{SharedLayout, SharedOperand, SharedTile};
pub use transpose::{TileTranspose, TransposedRows};
pub use write::StoredElement;
