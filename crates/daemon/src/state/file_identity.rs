//! Which file has a name.

use block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// A file, whatever its name. Inodes are used again, so the time at which it was made counts, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
    /// In nanoseconds since 1970; `None` where the file system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    born_ns: Option<u64>,
}

impl FileIdentity {
    /// Of what lies at a server, which has no inode.
    pub const AT_A_SERVER: Self = Self { device: 0, inode: 0, born_ns: None };

    /// Returns the identity of a file that was looked at.
    #[must_use]
    pub fn of(found: &Metadata) -> Self {
        let born = found.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born_ns = born.and_then(|born| u64::try_from(born.as_nanos()).ok());
        Self { device: found.dev(), inode: found.ino(), born_ns }
    }

    /// Returns which file has this name, if one has. Does not follow a symbolic link.
    pub fn find(path: &Path) -> Result<Option<Self>> {
        match path.symlink_metadata() {
            Ok(found) => Ok(Some(Self::of(&found))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(format!("cannot look at '{}'", path.display()), error)),
        }
    }

    /// Returns which file has this name. Fails if none has.
    pub fn at(path: &Path) -> Result<Self> {
        let gone = || Error::new(ErrorKind::Io, format!("'{}' is gone: somebody has removed it", path.display()));
        Self::find(path)?.ok_or_else(gone)
    }

    /// Whether both are one file for certain.
    #[must_use]
    pub fn is_surely(&self, other: &Self) -> bool {
        self == other && self.born_ns.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_the_inode_of_another_is_not_that_file() {
        let made = FileIdentity { device: 1, inode: 2, born_ns: Some(3) };
        let unknown = FileIdentity { born_ns: None, ..made };
        assert!(made.is_surely(&made.clone()));
        for other in [FileIdentity { born_ns: Some(4), ..made }, FileIdentity { device: 2, ..made }, unknown] {
            assert!(!made.is_surely(&other) && made != other);
        }
        assert!(!unknown.is_surely(&unknown.clone()), "it may be another one");
    }

    #[test]
    fn a_name_leads_to_one_file_or_to_none() {
        let directory = tempfile::tempdir().unwrap();
        let [path, link] = ["file", "link"].map(|name| directory.path().join(name));
        assert_eq!(FileIdentity::find(&path).unwrap(), None);
        assert!(FileIdentity::at(&path).unwrap_err().to_string().contains("is gone"));
        std::fs::write(&path, "").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let file = FileIdentity::at(&path).unwrap();
        assert_eq!(FileIdentity::find(&path).unwrap(), Some(file));
        assert_ne!(FileIdentity::at(&link).unwrap(), file, "a link is a file of its own");
    }
}
