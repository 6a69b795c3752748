//! Warnings: conditions that a user should know of and no caller can act on.

use std::fmt;
use std::path::PathBuf;

use super::disk::Unsound;
use super::folder::NoDisk;

/// A condition of the cache that costs time and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// Reported once, when the cache is opened.
    #[error("kernels are compiled anew in each process: {reason}")]
    NoDisk {
        /// The reason.
        reason: NoDisk,
    },
    /// Reported once, at the first write that fails; files on disk are still read.
    #[error("new kernels are kept in memory only: cannot write to {}: {reason}", folder.display())]
    ReadOnly {
        /// The folder.
        folder: PathBuf,
        /// The system's message.
        reason: String,
    },
    /// Reported for each such file.
    #[error("{} was set aside as *.bad and is compiled again: {reason}", path.display())]
    Quarantined {
        /// The path of the file.
        path: PathBuf,
        /// The reason.
        reason: Unsound,
    },
}

type Listener = dyn Fn(&Warning) + Send + Sync;

/// The listener for warnings.
#[derive(Default)]
pub struct Warnings(Option<Box<Listener>>);

impl Warnings {
    /// No listener.
    pub const fn ignored() -> Self {
        Self(None)
    }

    /// A listener, called in the thread that met the cause.
    pub fn to(listener: impl Fn(&Warning) + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(listener)))
    }

    pub(super) fn say(&self, warning: &Warning) {
        if let Some(listener) = &self.0 {
            listener(warning);
        }
    }
}

impl fmt::Debug for Warnings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() { "Warnings(heard)" } else { "Warnings(ignored)" })
    }
}
