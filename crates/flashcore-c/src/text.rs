//! Fixed texts.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use api::Config;

use crate::status::c_text;

/// The version of the library, like "0.1.0". Never null, valid forever.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Names of GPU kernel configs for flashcore_plan_create(), one per line, tested and measured. Never null, valid
/// forever.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_configs() -> *const c_char {
    static NAMES: OnceLock<CString> = OnceLock::new();
    let names = || Config::all().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    NAMES.get_or_init(|| c_text(&names())).as_ptr()
}
