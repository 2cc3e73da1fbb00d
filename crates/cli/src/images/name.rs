//! An image as the user names it: a file name, or with `--image-opts` a description, `driver=qcow2,file.filename=...`.

use anyhow::{Context, anyhow, bail};
use drive::{KeyValue, parse_key_values};
use image::{FileName, Format};
use std::path::{Path, PathBuf};

/// The protocols that are a file or a block device.
const FILE_DRIVERS: [&str; 2] = ["file", "host_device"];

/// A file, and its format where the user said it.
pub(crate) struct ImageName {
    pub(crate) path: PathBuf,
    pub(crate) format: Option<Format>,
}

impl ImageName {
    pub(crate) fn of(text: &Path, format: Option<&str>, image_opts: bool) -> anyhow::Result<Self> {
        if !image_opts {
            let format = parse_format(format)?;
            return match text.to_str().and_then(protocol) {
                Some(("json", description)) => from_json(description, format),
                Some(_) => Ok(Self { path: file_name(text)?, format }),
                None => Ok(Self { path: text.to_owned(), format }),
            };
        }
        if format.is_some() {
            bail!("--image-opts and --format are mutually exclusive");
        }
        let text = text.to_str().ok_or_else(|| anyhow!("--image-opts takes text"))?;
        let parse = || described(&parse_key_values(text)?);
        parse().map_err(|error| error.context(format!("Could not open '{text}'")))
    }
}

/// A protocol and what follows it. As in QEMU, a colon behind a slash is part of a file's name.
fn protocol(text: &str) -> Option<(&str, &str)> {
    text.split_once(':').filter(|(before, _)| !before.contains('/'))
}

/// The file that a name without a format stands for: what is to be made, or written to.
pub(crate) fn file_name(text: &Path) -> anyhow::Result<PathBuf> {
    if let Some(("json", _)) = text.to_str().and_then(protocol) {
        bail!("Could not open '{}': a description names no file to be written", text.display());
    }
    let name = FileName::parse(text).with_context(|| format!("Could not open '{}'", text.display()))?;
    let path = name.path().map(Path::to_owned);
    path.ok_or_else(|| {
        anyhow!("Could not open '{name}': only drives are passed as descriptors, files have a path here")
    })
}

/// How the image at `overlay` is to name the backing file that the user calls `text`: without a protocol, because of what
/// images say none is followed. As in QEMU, what stands behind a protocol lies where we are, not where the image is. If
/// nobody is going to look at it, it may be anything else.
pub(crate) fn backing_name(overlay: &Path, text: &str, look: bool) -> anyhow::Result<String> {
    let path = match protocol(text) {
        None => return Ok(text.to_owned()),
        Some((protocol, _)) if !look && !FILE_DRIVERS.contains(&protocol) => return Ok(text.to_owned()),
        Some(("json", _)) => {
            bail!("'{text}': an image names its backing file by the file's name, not by a description")
        }
        Some(_) => file_name(Path::new(text))?,
    };
    let is_here = overlay.parent().is_none_or(|directory| [Path::new(""), Path::new(".")].contains(&directory));
    let path =
        if is_here { path } else { std::path::absolute(&path).with_context(|| format!("cannot find '{text}'"))? };
    let name = path.to_str().with_context(|| format!("'{}' is not text, as names in images are", path.display()))?;
    // A colon of its own would be taken for a protocol's.
    Ok(if protocol(name).is_some() { format!("./{name}") } else { name.to_owned() })
}

/// `json:` and an object, with objects in it, as QEMU writes them.
fn from_json(text: &str, format: Option<Format>) -> anyhow::Result<ImageName> {
    let parse = || -> anyhow::Result<ImageName> {
        let mut pairs = Vec::new();
        flatten("", &serde_json::from_str(text).context("Could not parse the JSON options")?, &mut pairs)?;
        let name = described(&pairs)?;
        if format.is_some() && name.format.is_some() && format != name.format {
            bail!("the format is given twice");
        }
        Ok(ImageName { format: name.format.or(format), ..name })
    };
    parse().map_err(|error| error.context(format!("Could not open 'json:{text}'")))
}

/// `{"file": {"driver": "file"}}` is `file.driver=file`.
fn flatten(key: &str, value: &serde_json::Value, pairs: &mut Vec<KeyValue>) -> anyhow::Result<()> {
    match value {
        serde_json::Value::Object(fields) => {
            let dot = if key.is_empty() { "" } else { "." };
            fields.iter().try_for_each(|(name, value)| flatten(&format!("{key}{dot}{name}"), value, pairs))
        }
        serde_json::Value::String(value) => {
            pairs.push(KeyValue { key: key.to_owned(), value: value.clone() });
            Ok(())
        }
        other => bail!("the option '{key}' cannot be {other} (driver, file.driver and file.filename are texts)"),
    }
}

fn described(pairs: &[KeyValue]) -> anyhow::Result<ImageName> {
    let value_of = |key: &str| pairs.iter().find(|pair| pair.key == key).map(|pair| pair.value.as_str());
    let driver = value_of("driver");
    // Without a format above it, a protocol's bytes are the disk's.
    let is_file = driver.is_some_and(|driver| FILE_DRIVERS.contains(&driver));
    let (file_key, driver_key) = if is_file { ("filename", "driver") } else { ("file.filename", "file.driver") };
    for pair in pairs {
        match pair.key.as_str() {
            "driver" => {}
            key if key == file_key => {}
            key if key == driver_key && FILE_DRIVERS.contains(&pair.value.as_str()) => {}
            key if key == driver_key => bail!("{key}={} is not supported (file and host_device are)", pair.value),
            key => bail!("the option '{key}' is not supported (driver, file.driver and file.filename are)"),
        }
    }
    let path = value_of(file_key).ok_or_else(|| anyhow!("A block device must be specified for \"file\""))?;
    let format = if is_file { Some(Format::Raw) } else { parse_format(driver)? };
    Ok(ImageName { path: PathBuf::from(path), format })
}

/// The format that the user gave, if any.
pub(crate) fn parse_format(format: Option<&str>) -> anyhow::Result<Option<Format>> {
    Ok(format.map(str::parse).transpose()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<(String, Option<Format>), String> {
        let name = ImageName::of(Path::new(text), None, true).map_err(|error| format!("{error:#}"))?;
        Ok((name.path.display().to_string(), name.format))
    }

    #[test]
    fn descriptions_name_a_file_and_its_format_and_anything_else_is_refused_by_name() {
        let good = [
            ("driver=qcow2,file.driver=file,file.filename=a,,b", "a,b", Some(Format::Qcow2)),
            ("driver=raw,file.filename=a", "a", Some(Format::Raw)),
            ("driver=file,filename=a", "a", Some(Format::Raw)),
            ("file.filename=a", "a", None),
        ];
        for (text, path, format) in good {
            assert_eq!(of(text), Ok((path.to_owned(), format)), "{text}");
        }
        for (text, named) in [
            ("driver=qcow2,file.filename=a,backing.file.filename=b", "backing.file.filename"),
            ("driver=qcow2,file.driver=nbd,file.filename=a", "file.driver=nbd"),
            ("driver=luks,file.filename=a", "luks"),
            ("driver=qcow2", "\"file\""),
            ("a.qcow2", "a.qcow2"),
        ] {
            let said = of(text).expect_err(text);
            assert!(said.contains(named), "{said}");
        }
        assert!(ImageName::of(Path::new("file.filename=a"), Some("raw"), true).is_err());
    }

    #[test]
    fn a_backing_file_is_named_without_its_protocol_and_from_where_the_image_is() {
        let name = |overlay: &str, text: &str, look| backing_name(Path::new(overlay), text, look).ok();
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
        for text in ["nbd:b", r#"json:{"file.filename":"b"}"#] {
            assert_eq!(name("u", text, true), None, "{text}");
            assert_eq!(name("u", text, false).as_deref(), Some(text));
        }
    }

    #[test]
    fn a_protocol_that_is_not_a_file_is_refused_by_name_and_never_taken_for_one() {
        let of = |text: &str, format| {
            let name = ImageName::of(Path::new(text), format, false).map_err(|error| format!("{error:#}"))?;
            Ok((name.path.display().to_string(), name.format))
        };
        let json = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"a"}}"#;
        for (text, said, path, format) in [
            ("a", None, "a", None),
            ("file:a:b", Some("raw"), "a:b", Some(Format::Raw)),
            ("host_device:/dev/sdb", None, "/dev/sdb", None),
            ("./a:b", None, "./a:b", None),
            ("/x/a:b", None, "/x/a:b", None),
            (json, None, "a", Some(Format::Qcow2)),
            (r#"json:{"file.filename":"a"}"#, Some("raw"), "a", Some(Format::Raw)),
        ] {
            assert_eq!(of(text, said), Ok((path.to_owned(), format)), "{text}");
        }
        let refused = [
            ("nbd:unix:/run/x.sock", "'nbd'"),
            ("a:b", "'./a:b'"),
            ("json:{", "JSON"),
            (r#"json:{"driver":"nbd","server":{"type":"unix"}}"#, "server.type"),
            (r#"json:{"driver":"raw","offset":512,"file":{"filename":"a"}}"#, "offset"),
        ];
        for (text, named) in refused {
            let said: Result<(String, Option<Format>), String> = of(text, None);
            let said = said.expect_err(text);
            assert!(said.contains(named), "{said}");
            let made = file_name(Path::new(text)).expect_err(text).to_string();
            assert!(made.contains("Could not open"), "{made}");
        }
        assert!(of(json, Some("raw")).is_err());
    }
}
