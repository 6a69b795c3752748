//! `include/flashcore.h` says what the source says.

use std::path::Path;
use std::{env, fs};

/// Generates the header again and compares. With `FLASHCORE_BLESS=1` the header is written instead.
#[test]
fn the_header_is_that_of_the_source() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).expect("cbindgen.toml is a config");
    config.after_includes = Some(version_macros());
    config.trailer = Some(INIT_MACRO.to_owned());
    // File by file, so that no cargo is asked about the workspace.
    let sources =
        ["status", "problem", "operands", "device", "plan", "append", "kvcache", "merge", "continuation", "text"];
    let builder = sources.iter().fold(cbindgen::Builder::new().with_config(config), |builder, name| {
        builder.with_src(folder.join(format!("src/{name}.rs")))
    });
    let mut generated = Vec::new();
    builder.generate().expect("the source is what cbindgen can read").write(&mut generated);
    let generated = String::from_utf8(generated).expect("the source is text");

    let path = folder.join("include/flashcore.h");
    if env::var_os("FLASHCORE_BLESS").is_some() {
        fs::write(&path, &generated).expect("the header can be written");
    }
    let header = fs::read_to_string(&path).unwrap_or_default();
    assert!(header == generated, "{} is out of date: FLASHCORE_BLESS=1 cargo test -p flashcore-c", path.display());
}

/// Programs that are compiled with this header have room for all fields; the function is for those compiled with the first.
const INIT_MACRO: &str = "
/* flashcore_problem_init() of a program that is compiled with this header fills all fields of its flashcore_problem_t. */
#define flashcore_problem_init(problem, batch, heads, length, head_dim, dtype) \\
  flashcore_problem_init_sized(problem, sizeof(flashcore_problem_t), batch, heads, length, head_dim, dtype)
/* So do those of append and kvcache. */
#define flashcore_append_problem_init(problem, tokens, query_heads, key_heads, head_dim, num_pages, page_size, dtype) \\
  flashcore_append_problem_init_sized(problem, sizeof(flashcore_append_problem_t), tokens, query_heads, key_heads, \\
                                      head_dim, num_pages, page_size, dtype)
#define flashcore_kvcache_problem_init(problem, attention, new_length) \\
  flashcore_kvcache_problem_init_sized(problem, sizeof(flashcore_kvcache_problem_t), attention, new_length)";

/// The version as numbers for the preprocessor, and as a text.
fn version_macros() -> String {
    let [major, minor, patch] =
        [env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"), env!("CARGO_PKG_VERSION_PATCH")];
    format!(
        "
/* The version of this header; flashcore_version() is that of the library. */
#define FLASHCORE_VERSION_MAJOR {major}
#define FLASHCORE_VERSION_MINOR {minor}
#define FLASHCORE_VERSION_PATCH {patch}
/* For comparisons: 0.1.0 is 100, 1.2.3 is 10203. */
#define FLASHCORE_VERSION_NUMBER (FLASHCORE_VERSION_MAJOR * 10000 + FLASHCORE_VERSION_MINOR * 100 + FLASHCORE_VERSION_PATCH)
#define FLASHCORE_VERSION \"{}\"

/* The name that flashcore_tensors_t had first. */
#define flashcore_device_tensors_t flashcore_tensors_t",
        env!("CARGO_PKG_VERSION")
    )
}
