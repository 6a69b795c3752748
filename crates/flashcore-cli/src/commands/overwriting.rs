//! Refuses outputs that would overwrite an input, or another output, of the same command.

use std::path::Path;

use flashcore_bench::util::whole_file::is_same_file;

use crate::Failure;

/// Refuses to write to a file that is read, and to write two things to one file.
pub(super) fn refuse_overwriting(read: &[&Path], written: &[&Path]) -> Result<(), Failure> {
    for (index, output) in written.iter().enumerate() {
        if let Some(input) = read.iter().find(|input| is_same_file(input, output)) {
            let also = if input == output { String::new() } else { format!(" as {}", input.display()) };
            return Err(Failure::Usage(format!(
                "{} is also read{also}, and writing it would destroy that; give the output another name",
                output.display()
            )));
        }
        if let Some(other) = written[..index].iter().find(|other| is_same_file(other, output)) {
            return Err(Failure::Usage(format!(
                "{} and {} are one file; give each output a name of its own",
                other.display(),
                output.display()
            )));
        }
    }
    Ok(())
}
