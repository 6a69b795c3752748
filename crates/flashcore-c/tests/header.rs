//! `include/flashcore.h` says what the source and the table of operands say.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

use api::Operand;

/// Generates the header again and compares. With `FLASHCORE_BLESS=1` the header is written instead.
#[test]
fn the_header_is_that_of_the_source() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).expect("cbindgen.toml is a config");
    config.after_includes = Some(version_macros() + &operand_macros());
    // File by file, so that no cargo is asked about the workspace.
    let sources = ["status", "problem", "append", "merge", "tensor", "device", "plan", "text"];
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

/// The number of each operand, with its description, from the table.
fn operand_macros() -> String {
    let mut macros = "\n/* The operands of operations, for flashcore_tensor_t. */\n".to_owned();
    for (index, operand) in Operand::ALL.iter().enumerate() {
        let mut line = "//".to_owned();
        // The words of the table are those of Rust's documentation.
        for word in operand.doc().replace('`', "").split_whitespace() {
            if line.len() + 1 + word.len() > 120 {
                writeln!(macros, "{line}").expect("a text can grow");
                "//".clone_into(&mut line);
            }
            write!(line, " {word}").expect("a text can grow");
        }
        let name = operand.name().to_uppercase();
        write!(macros, "{line}\n#define FLASHCORE_{name} {}\n\n", index + 1).expect("a text can grow");
    }
    macros.truncate(macros.trim_end().len());
    macros
}

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
",
        env!("CARGO_PKG_VERSION")
    )
}
