//! Subjects of a comparison, by name.

use core::fmt;
use core::str::FromStr;
use std::path::{Path, PathBuf};

use flashcore_cpu::Level;
use flashcore_kernels::Config;

use crate::util::nearest::nearest;

/// One side of a comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Side {
    /// Something that this program runs.
    Subject(Subject),
    /// A subject of another program.
    Binary(PathBuf),
    /// A subject of a program built from a revision of the repository.
    Revision(String),
    /// A record.
    Record(PathBuf),
}

impl Side {
    /// The file of what was measured earlier.
    pub fn record(&self) -> Option<&Path> {
        match self {
            Self::Record(file) => Some(file),
            Self::Subject(_) | Self::Binary(_) | Self::Revision(_) => None,
        }
    }
}

/// Something that this program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The CPU backend, at its default level or at another.
    Cpu(Option<Level>),
    /// The first GPU, with its default kernel or with another.
    Cuda(Option<Config>),
}

/// Reason why a name is no side of a comparison.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{name}` cannot be compared{}; there are cpu, cpu:LEVEL, cuda, cuda:CONFIG (or a level or a config alone), rev:REVISION, bin:PATH and the .json file of a record",
    meant.as_ref().map_or_else(String::new, |meant| format!("; did you mean `{meant}`?"))
)]
pub struct SideError {
    /// The name.
    pub name: String,
    /// The nearest known name.
    pub meant: Option<String>,
}

impl fmt::Display for Subject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(None) => formatter.write_str("cpu"),
            Self::Cpu(Some(level)) => write!(formatter, "cpu:{level}"),
            Self::Cuda(None) => formatter.write_str("cuda"),
            Self::Cuda(Some(config)) => write!(formatter, "cuda:{config}"),
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Subject(subject) => subject.fmt(formatter),
            Self::Binary(path) => write!(formatter, "bin:{}", path.display()),
            Self::Revision(revision) => write!(formatter, "rev:{revision}"),
            Self::Record(path) => path.display().fmt(formatter),
        }
    }
}

impl FromStr for Subject {
    type Err = SideError;

    fn from_str(name: &str) -> Result<Self, SideError> {
        let unknown = || SideError { name: name.to_owned(), meant: meant(name) };
        match name.split_once(':') {
            None if name == "cpu" => Ok(Self::Cpu(None)),
            None if name == "cuda" => Ok(Self::Cuda(None)),
            Some(("cpu", level)) => level.parse().map(|level| Self::Cpu(Some(level))).map_err(|_| unknown()),
            Some(("cuda", config)) => config.parse().map(|config| Self::Cuda(Some(config))).map_err(|_| unknown()),
            _ => match (name.parse(), name.parse()) {
                (Ok(level), _) => Ok(Self::Cpu(Some(level))),
                (_, Ok(config)) => Ok(Self::Cuda(Some(config))),
                _ => Err(unknown()),
            },
        }
    }
}

impl FromStr for Side {
    type Err = SideError;

    fn from_str(name: &str) -> Result<Self, SideError> {
        match name.split_once(':') {
            Some(("rev", revision)) if !revision.is_empty() => Ok(Self::Revision(revision.to_owned())),
            Some(("bin", path)) if !path.is_empty() => Ok(Self::Binary(PathBuf::from(path))),
            _ if Path::new(name).extension().is_some_and(|extension| extension == "json") => {
                Ok(Self::Record(PathBuf::from(name)))
            }
            _ => name.parse().map(Self::Subject),
        }
    }
}

/// The subject whose name is nearest.
fn meant(name: &str) -> Option<String> {
    let levels = Level::ALL.into_iter().map(|level| level.to_string());
    let configs = Config::all().into_iter().map(|config| config.to_string());
    let plain: Vec<String> =
        levels.chain(configs).chain(["cpu", "cuda", "scalar", "ampere"].map(str::to_owned)).collect();
    let (prefix, rest) = name.split_once(':').map_or((None, name), |(prefix, rest)| (Some(prefix), rest));
    let found = nearest(rest, plain.iter().map(String::as_str))?;
    Some(prefix.map_or_else(|| found.to_owned(), |prefix| format!("{prefix}:{found}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for name in
            ["cpu", "cpu:avx2", "cuda", "cuda:ampere-64x64-3stage-swizzled", "rev:main~2", "bin:/tmp/a", "a.json"]
        {
            assert_eq!(name.parse::<Side>().expect("a side").to_string(), name);
        }
        assert_eq!("avx512".parse(), Ok(Side::Subject(Subject::Cpu(Some(Level::Avx512)))));
        assert_eq!("scalar".parse(), Ok(Side::Subject(Subject::Cuda(Some(Config::scalar())))));
    }

    #[test]
    fn unknown_names_are_told_with_the_nearest() {
        let check = |name: &str, meant: Option<&str>| {
            let expected = SideError { name: name.to_owned(), meant: meant.map(str::to_owned) };
            assert_eq!(name.parse::<Side>(), Err(expected));
        };
        check("cpu:avx3", Some("cpu:avx2"));
        check("ampere-64x64-2stage-swizled", Some("ampere-64x64-2stage-swizzled"));
        check("the fastest of them all", None);
    }
}
