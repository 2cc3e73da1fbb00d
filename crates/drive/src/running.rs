//! Decides which options of a drive can change while guests use it, and gives the reasons for the others.

use crate::help;
use crate::keyval::{self, KeyValue};
use crate::options::{DiskOptions, DriveOptions};
use crate::passed::PassedDescriptors;
use block::{Error, ErrorKind, Result};

/// The prefix of keys of the filter `throttle`, as in QEMU's drive options.
pub const THROTTLING: &str = "throttling.";

/// The way in which an option of a running disk changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunningChange {
    /// The option is a limit of the filter `throttle`.
    Limit,
    /// The option is a policy for requests that the storage fails.
    Policy,
    /// The disk's files are opened again.
    Files,
}

const POLICIES: [&str; 2] = ["on-error", "on-no-space"];
const FILES: [&str; 5] = ["cache", "engine", "l2-cache-size", "lock-timeout-s", "sync"];
/// Keys that cannot change, and why.
const FIXED: &[(&[&str], &str)] = &[
    (
        &["name", "id", "file", "fd", "format", "snapshot", "keep", "size"],
        "it says which disk this is, and what guests find there ('ctl resize' makes a disk larger, 'ctl mirror' moves it to \
         another file)",
    ),
    (&["readonly", "serial", "media"], "guests were told when they connected"),
    (&["filter", "delay-ms"], "filters stay for as long as the disk is open"),
    (&["poll-max-us"], "the daemon's threads take it when they start"),
];
/// The reason why an export's keys cannot change.
const OF_EXPORT: &str = "it belongs to the disk's socket, and guests were told when they connected";

impl RunningChange {
    /// Returns how this key of a drive changes. The error says why it cannot, and which keys can.
    pub fn of_key(key: &str) -> Result<Self> {
        if key.starts_with(THROTTLING) {
            return Ok(Self::Limit);
        }
        if POLICIES.contains(&key) {
            return Ok(Self::Policy);
        }
        if FILES.contains(&key) {
            return Ok(Self::Files);
        }
        let known = help::key_names();
        if !known.contains(&key) && !["id", "num-queues"].contains(&key) {
            return Err(keyval::unknown("drive key", key, &known));
        }
        let why = FIXED.iter().find(|(keys, _)| keys.contains(&key)).map_or(OF_EXPORT, |(_, why)| why);
        let can = [&FILES[..], &POLICIES[..]].concat().join(", ");
        let message = format!(
            "{key}: cannot be changed while the disk runs: {why}. These can: {can}, {THROTTLING}iops-total and the like. For \
             others, remove the disk and add it anew"
        );
        Err(Error::new(ErrorKind::Unsupported, message))
    }
}

impl DiskOptions {
    /// Returns the options of this disk with these pairs changed. All keys must open the files again
    /// ([`RunningChange::Files`]).
    pub fn with_files_as(&self, pairs: &[(&str, &str)]) -> Result<Self> {
        let mut drive = DriveOptions::from(self.clone());
        for (key, value) in pairs {
            let pair = KeyValue { key: (*key).to_owned(), value: (*value).to_owned() };
            drive.set(&pair, &PassedDescriptors::default())?;
        }
        drive.check()?;
        Ok(drive.disk)
    }

    /// Returns the options of this disk, with the file options of `other`.
    #[must_use]
    pub fn with_files_of(&self, other: &Self) -> Self {
        Self {
            cache: other.cache,
            engine: other.engine,
            sync: other.sync,
            l2_cache_bytes: other.l2_cache_bytes,
            lock_timeout_s: other.lock_timeout_s,
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::CacheMode;

    #[test]
    fn every_key_changes_or_is_refused_with_the_reason_and_those_that_do() {
        for key in help::key_names() {
            match RunningChange::of_key(key) {
                Ok(_) => assert!(FILES.contains(&key) || POLICIES.contains(&key), "{key}"),
                Err(error) => {
                    let said = error.to_string();
                    assert!(said.contains(key) && said.contains("cache, engine, l2-cache-size"), "{said}");
                    assert_eq!(error.kind(), ErrorKind::Unsupported);
                }
            }
        }
        for (keys, _) in FIXED {
            for key in *keys {
                assert!(RunningChange::of_key(key).is_err(), "{key}");
            }
        }
        let said = RunningChange::of_key("cahce").unwrap_err().to_string();
        assert!(said.contains("did you mean 'cache'?"), "{said}");
        assert_eq!(RunningChange::of_key("throttling.bps-read").unwrap(), RunningChange::Limit);
    }

    #[test]
    fn what_opens_files_is_changed_and_nothing_else() {
        let disk = DiskOptions { serial: "S".into(), ..DiskOptions::of_file("/a") };
        let changed = disk.with_files_as(&[("cache", "none"), ("l2-cache-size", "1M"), ("sync", "on")]).unwrap();
        assert_eq!((changed.cache, changed.l2_cache_bytes, changed.sync), (CacheMode::None, Some(1 << 20), true));
        assert_eq!(changed.with_files_of(&disk), disk);
        assert_eq!(disk.with_files_of(&changed), changed);
        assert!(disk.with_files_as(&[("cache", "nothing")]).is_err());
    }
}
