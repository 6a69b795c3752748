//! The name of candle-flash-attn for `flashcore-candle`, for programs that ask for it by name:
//!
//! ```toml
//! [patch.crates-io]
//! candle-flash-attn = { git = "https://github.com/flashcore/flashcore" }
//! ```

pub use flashcore_candle::*;
