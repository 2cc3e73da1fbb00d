//! Files that the daemon makes, in the record.

use daemon::FileIdentity;
use serde::{Deserialize, Deserializer, Serialize};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// A file that the daemon makes for a disk, in the record from before it is made until nobody needs to know of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written")]
pub(crate) struct NotedFile {
    /// Its name, as the record has it.
    pub(crate) file: String,
    /// Which file that is, once it is made: another file may get its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) made: Option<FileIdentity>,
}

/// A [`NotedFile`] in a record. Older builds wrote its name only.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields, expecting = "a file is its name, or an object with `file` and `made`")]
enum Written {
    Named(String),
    Known {
        file: String,
        #[serde(default)]
        made: Option<FileIdentity>,
    },
}

impl From<Written> for NotedFile {
    fn from(written: Written) -> Self {
        match written {
            Written::Named(file) => Self::to_be(file),
            Written::Known { file, made } => Self { file, made },
        }
    }
}

/// Reads the files that are made for a disk. Older builds wrote one, or `null`.
pub(super) fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<NotedFile>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "files are a list of them, one name or null")]
    enum Recorded {
        More(Vec<NotedFile>),
        One(Option<String>),
    }
    Ok(match Recorded::deserialize(deserializer)? {
        Recorded::More(files) => files,
        Recorded::One(file) => file.into_iter().map(NotedFile::to_be).collect(),
    })
}

impl NotedFile {
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
