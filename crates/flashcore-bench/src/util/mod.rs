//! Files, folders, names and text.

pub mod command_line;
pub mod digest;
pub mod moment;
pub mod nearest;
pub mod printable;
pub mod temporary_folder;
pub mod whole_file;
