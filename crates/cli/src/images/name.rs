//! Images and files as the user of a command names them.

use anyhow::{Context, anyhow, bail};
use drive::ImageName;
use file_rbd::RbdName;
use image::{FileName, Format, name_text, os_name, shown};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The protocols that are a file or a block device.
const FILE_DRIVERS: [&str; 2] = ["file", "host_device"];

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

/// Returns the name that the image at `overlay` records for the backing file `text`. The name has no protocol, because
/// protocols in images are not followed. As in QEMU, a name with a protocol is relative to the working directory, not
/// to the image. Without `look`, the name may be anything else.
pub(crate) fn backing_name(overlay: Option<&Path>, text: &str, look: bool) -> anyhow::Result<String> {
    let path = match protocol(text) {
        None => return Ok(text.to_owned()),
        Some((protocol, _)) if !look && !FILE_DRIVERS.contains(&protocol) => return Ok(text.to_owned()),
        Some(("json", _)) => {
            bail!("'{}': an image names its backing file by the file's name, not by a description", shown(text))
        }
        Some(("vhost-user", _)) => bail!("'{text}': a backing file is a file, not the disk of a vhost-user server"),
        Some(_) if let Some(remote) = remote_name(text) => {
            // Options for reading it are given when it is opened, not recorded.
            return Ok(remote.address().map_or_else(|| text.to_owned(), |address| address.into_owned()));
        }
        Some(_) => file_name(Path::new(&os_name(text)))?,
    };
    let is_here = |directory: &Path| [Path::new(""), Path::new(".")].contains(&directory);
    let is_here = overlay.is_some_and(|overlay| overlay.parent().is_none_or(is_here));
    let path =
        if is_here { path } else { std::path::absolute(&path).with_context(|| format!("cannot find '{text}'"))? };
    let name = name_text(path.as_os_str().as_bytes());
    // A colon in the name would look like a protocol.
    Ok(if protocol(&name).is_some() { format!("./{name}") } else { name })
}

/// Returns where the file is that the image at `overlay` names as its backing file: beside it, or at a server.
pub(super) fn beside_image(overlay: &Path, backing: &str) -> PathBuf {
    match remote_name(backing) {
        Some(_) => PathBuf::from(backing),
        None => overlay.parent().unwrap_or(Path::new("")).join(os_name(backing)),
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
    fn a_backing_file_is_named_without_its_protocol_and_from_where_the_image_is() {
        let name = |overlay: &str, text: &str, look| backing_name(Some(Path::new(overlay)), text, look).ok();
        let here = std::env::current_dir().unwrap();
        let absolute = here.join("b").display().to_string();
        for (overlay, text, expected) in [
            ("u", "b", "b"),
            ("sub/u", "b", "b"),
            ("u", "file:b", "b"),
            ("./u", "host_device:/dev/sdb", "/dev/sdb"),
            ("sub/u", "file:b", &absolute),
            ("sub/u", "file:/x/b", "/x/b"),
            ("u", "file:a:b", "./a:b"),
        ] {
            assert_eq!(name(overlay, text, true).as_deref(), Some(expected), "{text} of {overlay}");
            assert_eq!(name(overlay, text, false).as_deref(), Some(expected), "{text} of {overlay}");
        }
        for (text, recorded) in [
            ("nbd://h/x", "nbd://h/x"),
            ("nbds://me@h/x?tls-certificates=/pki/me&reconnect-s=5", "nbds://h/x"),
            ("nbd+unix:///x?connections=1&socket=/run/s", "nbd+unix:///x?socket=/run/s"),
            ("https://h/x?y#cache=/c", "https://h/x?y"),
            ("rbd:p/i@s:conf=/c", "rbd:p/i@s"),
        ] {
            assert_eq!(name("sub/u", text, true).as_deref(), Some(recorded), "{text}");
        }
        for text in ["nbd:b", "vhost-user:/run/s", r#"json:{"file.filename":"b"}"#] {
            assert_eq!(name("u", text, true), None, "{text}");
            assert_eq!(name("u", text, false).as_deref(), Some(text));
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
