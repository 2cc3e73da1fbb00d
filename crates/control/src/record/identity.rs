//! Which file has a name, and files that the daemon makes.

use serde::{Deserialize, Deserializer, Serialize};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

/// A file, whatever its name. Inodes are used again, so the time at which it was made counts, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileIdentity {
    device: u64,
    inode: u64,
    /// In nanoseconds since 1970; `None` where the file system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    born_ns: Option<u64>,
}

impl FileIdentity {
    /// Of what lies at a server, which has no inode.
    pub(crate) const AT_A_SERVER: Self = Self { device: 0, inode: 0, born_ns: None };

    pub(crate) fn of(found: &Metadata) -> Self {
        let born = found.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born_ns = born.and_then(|born| u64::try_from(born.as_nanos()).ok());
        Self { device: found.dev(), inode: found.ino(), born_ns }
    }

    /// Whether both are one file for certain.
    pub(crate) fn is_surely(&self, other: &Self) -> bool {
        self == other && self.born_ns.is_some()
    }
}

/// A file that the daemon makes for a disk, in the record from before it is made until nobody needs to know of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "RecordedFile")]
pub(crate) struct MadeFile {
    /// Its name, as the record has it.
    pub(crate) file: String,
    /// Which file that is, once it is made: another file may get its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) made: Option<FileIdentity>,
}

/// A [`MadeFile`] in a record. Older builds wrote its name only.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields, expecting = "a file is its name, or an object with `file` and `made`")]
enum RecordedFile {
    Named(String),
    Known {
        file: String,
        #[serde(default)]
        made: Option<FileIdentity>,
    },
}

impl From<RecordedFile> for MadeFile {
    fn from(recorded: RecordedFile) -> Self {
        match recorded {
            RecordedFile::Named(file) => Self::to_be(file),
            RecordedFile::Known { file, made } => Self { file, made },
        }
    }
}

/// Reads the files that are made for a disk. Older builds wrote one, or `null`.
pub(super) fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<MadeFile>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "files are a list of them, one name or null")]
    enum Recorded {
        More(Vec<MadeFile>),
        One(Option<String>),
    }
    Ok(match Recorded::deserialize(deserializer)? {
        Recorded::More(files) => files,
        Recorded::One(file) => file.into_iter().map(MadeFile::to_be).collect(),
    })
}

impl MadeFile {
    /// A file that is going to be made.
    pub(crate) fn to_be(file: impl Into<String>) -> Self {
        Self { file: file.into(), made: None }
    }

    /// Whether this is surely the file that was made, which has the name still. Nothing was written to one that was not
    /// noted as made, so that one may also be any file without contents.
    pub(crate) fn is_surely(&self, found: &Metadata) -> bool {
        match self.made {
            Some(made) => made.is_surely(&FileIdentity::of(found)),
            None => found.is_file() && found.len() == 0 && found.blocks() == 0,
        }
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
}
