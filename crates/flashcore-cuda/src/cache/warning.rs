//! What a user should know and no caller can act on.

use std::fmt;
use std::path::PathBuf;

use super::disk::Unsound;
use super::folder::NoDisk;

/// Something about the cache that costs time and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// Said once, when the cache is opened.
    #[error("kernels are compiled anew in each process: {reason}")]
    NoDisk {
        /// Why.
        reason: NoDisk,
    },
    /// Said once, at the first write that fails; what is on disk is still read.
    #[error("new kernels are kept in memory only: cannot write to {}: {reason}", folder.display())]
    ReadOnly {
        /// The folder.
        folder: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// Said for each such file.
    #[error("{} was set aside as *.bad and is compiled again: {reason}", path.display())]
    Quarantined {
        /// Where it was.
        path: PathBuf,
        /// What was wrong.
        reason: Unsound,
    },
}

type Listener = dyn Fn(&Warning) + Send + Sync;

/// Who hears warnings.
#[derive(Default)]
pub struct Warnings(Option<Box<Listener>>);

impl Warnings {
    /// Nobody.
    pub const fn ignored() -> Self {
        Self(None)
    }

    /// This function, called in the thread that met the cause.
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
