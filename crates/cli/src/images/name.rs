//! Images and files as the user of a command names them.

use anyhow::{Context, anyhow, bail};
use drive::ImageName;
use file_rbd::RbdName;
use image::{FileName, Format, os_name, path_with_protocol, shown};
use std::path::{Path, PathBuf};

/// Reads the name of an existing image: with `--image-opts` the text is a description.
pub(crate) fn image_name(text: &Path, format: Option<&str>, image_opts: bool) -> anyhow::Result<ImageName> {
    if !image_opts {
        return Ok(ImageName::parse(text, parse_format(format)?)?);
    }
    if format.is_some() {
        bail!("--image-opts and --format are mutually exclusive");
    }
    let text = text.to_str().ok_or_else(|| anyhow!("--image-opts takes text"))?;
    Ok(ImageName::parse_description(text)?)
}

/// Splits a name into its protocol and the rest. As in QEMU, a colon behind a slash is part of a file's name.
fn protocol(text: &str) -> Option<(&str, &str)> {
    text.split_once(':').filter(|(before, _)| !before.contains('/'))
}

/// Returns the path of a file that will be created or written to.
pub(crate) fn file_name(text: &Path) -> anyhow::Result<PathBuf> {
    if let Some(("json", _)) = text.to_str().and_then(protocol) {
        bail!("Could not open '{}': a description names no file to be written", shown(text));
    }
    path_of(&FileName::parse(text).with_context(|| format!("Could not open '{}'", shown(text)))?)
}

/// The beginnings of names of servers' disks.
const SERVERS: [&str; 8] =
    ["vhost-user:", "nbd://", "nbd+unix://", "nbds://", "nbds+unix://", "http://", "https://", "rbd:"];

/// Whether a target's path is a server's disk or a cluster's image (see [`path_of`]).
pub(crate) fn is_socket(path: &Path) -> bool {
    path.to_str().is_some_and(|path| SERVERS.iter().any(|server| path.starts_with(server)))
}

/// Returns a target's path as a name for the opener.
pub(crate) fn opened_name(path: &Path) -> FileName {
    match is_socket(path).then(|| FileName::parse(path)) {
        Some(Ok(server)) => server,
        _ => FileName::from(path),
    }
}

/// Returns the cluster's image of a target's path, if it is one. Unlike servers' disks, cluster images can be created.
pub(crate) fn cluster_image(path: &Path) -> anyhow::Result<Option<RbdName>> {
    match opened_name(path) {
        FileName::Rbd(name) => Ok(Some(RbdName::parse(&name)?)),
        _ => Ok(None),
    }
}

/// Returns the path of a target that is written to by name. A server's disk keeps its protocol. A file whose own name
/// begins with such a protocol gets another path.
pub(crate) fn path_of(name: &FileName) -> anyhow::Result<PathBuf> {
    match (name, name.path()) {
        (FileName::Http(_), _) => Err(anyhow!("Could not open '{name}': a file on a web server can only be read")),
        (FileName::VhostUser(_) | FileName::Nbd(_), _) => Ok(PathBuf::from(name.to_string())),
        (FileName::Rbd(text), _) => {
            // The parser refuses secrets, so the name may be shown.
            RbdName::parse(text)?;
            Ok(PathBuf::from(text))
        }
        (_, Some(path)) if is_socket(path) => Ok(Path::new(".").join(path)),
        (_, Some(path)) => Ok(path.to_owned()),
        (_, None) => Err(anyhow!("Could not open '{name}': name a target by its path, not by a descriptor")),
    }
}

/// Returns the name that an image records for the backing file `text`: as the user gave it. So, as in QEMU, one with the
/// protocol `file:` or `host_device:` is relative to the working directory of whoever opens the image. Without `look`,
/// the name may be anything.
pub(crate) fn backing_name(text: &str, look: bool) -> anyhow::Result<String> {
    match protocol(text) {
        _ if !look => Ok(text.to_owned()),
        None => Ok(text.to_owned()),
        Some(("json", _)) => {
            bail!("'{}': an image names its backing file by the file's name, not by a description", shown(text))
        }
        Some(("vhost-user", _)) => bail!("'{text}': a backing file is a file, not the disk of a vhost-user server"),
        Some(_) if let Some(remote) = remote_name(text) => {
            // Options for reading it are given when it is opened, not recorded.
            Ok(remote.address().map_or_else(|| text.to_owned(), |address| address.into_owned()))
        }
        Some(_) => file_name(Path::new(&os_name(text))).map(|_| text.to_owned()),
    }
}

/// Returns where the file is that the image at `overlay` names as its backing file: beside it, or at a server. With a
/// protocol it is where the path says.
pub(crate) fn beside_image(overlay: &Path, backing: &str) -> PathBuf {
    match (remote_name(backing), path_with_protocol(backing)) {
        (Some(_), _) => PathBuf::from(backing),
        (None, Some(path)) => PathBuf::from(os_name(path)),
        (None, None) => overlay.parent().unwrap_or(Path::new("")).join(os_name(backing)),
    }
}

/// Returns the name if it is a server's disk or file.
pub(crate) fn remote_name(text: &str) -> Option<FileName> {
    FileName::parse(text).ok().filter(FileName::is_remote)
}

/// Reads the format that the user gave, if any.
pub(crate) fn parse_format(format: Option<&str>) -> anyhow::Result<Option<Format>> {
    Ok(format.map(str::parse).transpose()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backing_file_is_named_as_it_was_given_without_options_for_reading_it() {
        let name = |text: &str, look| backing_name(text, look).ok();
        for text in ["b", "/x/b", "file:b", "file:/x/b", "file:a:b", "host_device:/dev/sdb"] {
            assert_eq!(name(text, true).as_deref(), Some(text));
            assert_eq!(name(text, false).as_deref(), Some(text));
        }
        assert_eq!(beside_image(Path::new("sub/u"), "b"), Path::new("sub/b"));
        assert_eq!(beside_image(Path::new("sub/u"), "file:b"), Path::new("b"));
        for (text, recorded) in [
            ("nbd://h/x", "nbd://h/x"),
            ("nbds://me@h/x?tls-certificates=/pki/me&reconnect-s=5", "nbds://h/x"),
            ("nbd+unix:///x?connections=1&socket=/run/s", "nbd+unix:///x?socket=/run/s"),
            ("https://h/x?y#cache=/c", "https://h/x?y"),
            ("rbd:p/i@s:conf=/c", "rbd:p/i@s"),
        ] {
            assert_eq!(name(text, true).as_deref(), Some(recorded), "{text}");
        }
        for text in ["nbd:b", "vhost-user:/run/s", r#"json:{"file.filename":"b"}"#] {
            assert_eq!(name(text, true), None, "{text}");
            assert_eq!(name(text, false).as_deref(), Some(text));
        }
    }

    #[test]
    fn a_file_to_be_made_has_a_path() {
        assert_eq!(file_name(Path::new("file:a:b")).unwrap(), Path::new("a:b"));
        for (text, opened) in [
            ("vhost-user:/run/s", FileName::VhostUser("/run/s".into())),
            ("nbd+unix:///?socket=/run/s", FileName::Nbd("nbd+unix:///?socket=/run/s".into())),
            ("rbd:p/i:id=a", FileName::Rbd("rbd:p/i:id=a".into())),
            ("file:rbd:p", FileName::File("./rbd:p".into())),
            ("file:vhost-user:s", FileName::File("./vhost-user:s".into())),
        ] {
            assert_eq!(opened_name(&file_name(Path::new(text)).unwrap()), opened, "{text}");
        }
        for text in ["fd:3", "https://h/x", "nbd:unix:/run/x.sock", "a:b", r#"json:{"file.filename":"a"}"#] {
            let said = file_name(Path::new(text)).expect_err(text).to_string();
            assert!(said.contains("Could not open"), "{said}");
        }
        assert!(image_name(Path::new("file.filename=a"), Some("raw"), true).is_err());
    }
}
