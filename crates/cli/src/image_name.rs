//! An image as the user names it: a file name, or with `--image-opts` a description, `driver=qcow2,file.filename=...`.

use crate::tool::parse_format;
use anyhow::{anyhow, bail};
use daemon::parse_key_values;
use image::Format;
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
            return Ok(Self { path: text.to_owned(), format: parse_format(format)? });
        }
        if format.is_some() {
            bail!("--image-opts and --format are mutually exclusive");
        }
        let text = text.to_str().ok_or_else(|| anyhow!("--image-opts takes text"))?;
        described(text).map_err(|error| error.context(format!("Could not open '{text}'")))
    }
}

fn described(text: &str) -> anyhow::Result<ImageName> {
    let pairs = parse_key_values(text)?;
    let value_of = |key: &str| pairs.iter().find(|pair| pair.key == key).map(|pair| pair.value.as_str());
    let driver = value_of("driver");
    // Without a format above it, a protocol's bytes are the disk's.
    let is_file = driver.is_some_and(|driver| FILE_DRIVERS.contains(&driver));
    let (file_key, driver_key) = if is_file { ("filename", "driver") } else { ("file.filename", "file.driver") };
    for pair in &pairs {
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
}
