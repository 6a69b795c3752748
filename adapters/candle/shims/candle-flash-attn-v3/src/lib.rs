//! The name of candle-flash-attn-v3 for `flashcore-candle`, for programs that ask for it by name:
//!
//! ```toml
//! [patch.crates-io]
//! candle-flash-attn-v3 = { git = "https://github.com/flashcore/flashcore" }
//! ```

pub use flashcore_candle::v3::*;
