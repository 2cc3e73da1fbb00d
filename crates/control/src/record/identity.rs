//! Which file has a name.

use serde::{Deserialize, Serialize};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

/// A file, whatever its name. Inodes are used again, so the time at which it was made counts, too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileIdentity {
    device: u64,
    inode: u64,
    /// In nanoseconds since 1970; `None` where the file system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    born_ns: Option<u64>,
    /// What its cluster calls an image of a cluster; `None` for all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    image: Option<String>,
}

impl FileIdentity {
    /// Of what lies at a server, which has no inode: an image of a cluster, or a disk, of which nothing is known.
    pub(crate) fn at_a_server(image: Option<String>) -> Self {
        Self { device: 0, inode: 0, born_ns: None, image }
    }

    pub(crate) fn of(found: &Metadata) -> Self {
        let born = found.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born_ns = born.and_then(|born| u64::try_from(born.as_nanos()).ok());
        Self { device: found.dev(), inode: found.ino(), born_ns, image: None }
    }

    /// Whether both are one file for certain.
    pub(crate) fn is_surely(&self, other: &Self) -> bool {
        self == other && (self.born_ns.is_some() || self.image.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_the_inode_of_another_is_not_that_file() {
        let of = |device, born_ns| FileIdentity { device, inode: 2, born_ns, image: None };
        let (made, unknown) = (of(1, Some(3)), of(1, None));
        assert!(made.is_surely(&made.clone()));
        for other in [of(1, Some(4)), of(2, Some(3)), unknown.clone()] {
            assert!(!made.is_surely(&other) && made != other);
        }
        assert!(!unknown.is_surely(&unknown.clone()), "it may be another one");
    }

    #[test]
    fn an_image_of_a_cluster_is_known_by_what_the_cluster_calls_it() {
        let [one, other] = ["one", "other"].map(|image| FileIdentity::at_a_server(Some(image.to_owned())));
        let disk = FileIdentity::at_a_server(None);
        assert!(one.is_surely(&one.clone()) && !one.is_surely(&other) && !one.is_surely(&disk));
        assert!(!disk.is_surely(&disk.clone()), "a server's disk may be another one");
    }
}
