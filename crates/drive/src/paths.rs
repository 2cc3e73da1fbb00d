//! Absolute paths, also in a drive's options.

use crate::filters::FilterOptions;
use block::{Error, ErrorKind, Result};
use image::FileName;
use std::path::{Path, PathBuf};

/// Makes `path` absolute without looking at its last part: a socket may not exist yet.
#[must_use]
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Makes the path in the value of a drive's key absolute, by `whole`: whoever opens the drive may have another working
/// directory. Returns `None` if the value names no path.
pub fn with_whole_path(key: &str, value: &str, whole: impl Fn(&Path) -> PathBuf) -> Result<Option<String>> {
    let text = |path: &Path| {
        let path = whole(path);
        let what = || format!("{key}: the path '{}' is not UTF-8, which a record cannot name", path.display());
        path.to_str().map(str::to_owned).ok_or_else(|| Error::new(ErrorKind::BadOption, what()))
    };
    match key {
        _ if value.is_empty() => Ok(None),
        "file" => match FileName::parse(value) {
            Ok(FileName::File(path)) => text(&path).map(Some),
            Ok(FileName::HostDevice(path)) => Ok(Some(format!("host_device:{}", text(&path)?))),
            // Whoever opens it says what is wrong.
            _ => Ok(None),
        },
        "socket" if !value.starts_with("fd:") => text(Path::new(value)).map(Some),
        "keep" => text(Path::new(value)).map(Some),
        "filter" => match FilterOptions::parse(value) {
            // A filter's options cannot say a colon.
            Ok(FilterOptions::Log(path)) => Ok(Some(text(&path)?).filter(|path| !path.contains(':')).map(log_at)),
            _ => Ok(None),
        },
        _ => Ok(None),
    }
}

fn log_at(path: String) -> String {
    format!("log:file={path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_that_names_a_path_is_known() {
        let whole = |path: &Path| Path::new("/base").join(path);
        for (key, value, expected) in [
            ("file", "a.qcow2", Some("/base/a.qcow2")),
            ("file", "file:a.qcow2", Some("/base/a.qcow2")),
            ("file", "./a:b.qcow2", Some("/base/./a:b.qcow2")),
            ("file", "/a:b.qcow2", Some("/a:b.qcow2")),
            ("file", "host_device:sda", Some("host_device:/base/sda")),
            ("file", "fd:3", None),
            ("file", "nbd://host/disk", None),
            ("file", "https://host/a.raw", None),
            ("file", "rbd:pool/image", None),
            ("file", "a:b.qcow2", None),
            ("socket", "a.sock", Some("/base/a.sock")),
            ("socket", "fd:4", None),
            ("keep", "kept", Some("/base/kept")),
            ("keep", "", None),
            ("filter", "log:file=changes.log", Some("log:file=/base/changes.log")),
            ("filter", "throttle:iops-total=5", None),
            ("name", "a", None),
        ] {
            assert_eq!(with_whole_path(key, value, whole).unwrap().as_deref(), expected, "{key}={value}");
        }
        let colon = |path: &Path| Path::new("/a:b").join(path);
        assert_eq!(with_whole_path("filter", "log:file=c", colon).unwrap(), None);
    }
}
