//! A user's name for an image: a file name, or a description such as `driver=qcow2,file.filename=...`.

use crate::file_part::FilePart;
use crate::keyval::{KeyValue, parse as parse_key_values};
use crate::size::parse_size;
use block::{Error, ErrorKind, Result};
use image::{FileName, Format, shown};
use serde_json::Value;
use std::ffi::OsStr;

/// The protocols of files and block devices.
const FILE_DRIVERS: [&str; 2] = ["file", "host_device"];

/// A file, its format, and the part of it that is the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageName {
    /// The file.
    pub file: FileName,
    /// The format of the file; guessed from its contents if `None`.
    pub format: Option<Format>,
    /// The part of a raw file that is the disk (`offset=`, `size=`).
    pub part: Option<FilePart>,
    /// Whether to ignore the layers below (`backing` is null).
    pub is_alone: bool,
}

impl From<FileName> for ImageName {
    fn from(file: FileName) -> Self {
        Self { file, format: None, part: None, is_alone: false }
    }
}

impl ImageName {
    /// Parses a file name (see [`FileName::parse`]), or `json:` and a description as QEMU writes it. `format` is the
    /// format that the user gave separately.
    pub fn parse(text: impl AsRef<OsStr>, format: Option<Format>) -> Result<Self> {
        let text = text.as_ref();
        let parsed = match text.to_str().and_then(|text| text.strip_prefix("json:")) {
            Some(description) => from_json(description, format),
            None => FileName::parse(text).map(|file| Self { format, ..file.into() }),
        };
        parsed.map_err(|error| error.in_context(format!("Could not open '{}'", shown(text))))
    }

    /// Parses a description of the form `driver=FORMAT,file.filename=FILE`.
    pub fn parse_description(text: &str) -> Result<Self> {
        let parse = || {
            // For QEMU, a single word without a key names a node.
            if !text.contains('=') {
                let text = shown(text);
                return Err(bad(format!("Cannot find device='{text}' nor node-name='{text}': write key=value")));
            }
            described(&parse_key_values(text)?)
        };
        parse().map_err(|error| error.in_context(format!("Could not open '{}'", shown(text))))
    }

    /// Returns the file and its format, for a command that changes a whole image.
    pub fn whole(self) -> Result<(FileName, Option<Format>)> {
        match self {
            Self { file, format, part: None, is_alone: false } => Ok((file, format)),
            Self { file, .. } => Err(bad(format!(
                "Could not open '{file}': offset, size and backing=null are for commands that only read"
            ))),
        }
    }
}

fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::BadOption, message)
}

/// Parses a JSON object, which may contain objects.
fn from_json(text: &str, format: Option<Format>) -> Result<ImageName> {
    let invalid = |error: serde_json::Error| {
        let why = if error.is_eof() { "premature EOI: ".to_owned() } else { String::new() };
        bad(format!("Could not parse the JSON options: JSON parse error, {why}{error}"))
    };
    let mut pairs = Vec::new();
    let value: Value = serde_json::from_str(&with_double_quotes(text)).map_err(invalid)?;
    if !value.is_object() {
        return Err(bad(format!("Invalid JSON object given: {}", shown(value.to_string()))));
    }
    flatten("", &value, &mut pairs)?;
    let name = described(&pairs)?;
    if format.is_some() && name.format.is_some() && format != name.format {
        return Err(bad("the format is given twice"));
    }
    Ok(ImageName { format: name.format.or(format), ..name })
}

/// Replaces single quotes around strings, which QEMU's JSON allows, and in which double quotes are plain characters.
fn with_double_quotes(text: &str) -> String {
    let (mut strict, mut quote) = (String::with_capacity(text.len()), None);
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        match (quote, char) {
            (Some(_), '\\') => match chars.next() {
                Some('\'') => strict.push('\''),
                next => strict.extend(['\\'].into_iter().chain(next)),
            },
            (Some(own), _) if own == char => {
                quote = None;
                strict.push('"');
            }
            (Some(_), '"') => strict.push_str("\\\""),
            (None, '\'' | '"') => {
                quote = Some(char);
                strict.push('"');
            }
            _ => strict.push(char),
        }
    }
    strict
}

/// Flattens nested objects: `{"file": {"driver": "file"}}` becomes `file.driver=file`.
fn flatten(key: &str, value: &Value, pairs: &mut Vec<KeyValue>) -> Result<()> {
    match value {
        Value::Object(fields) => {
            let dot = if key.is_empty() { "" } else { "." };
            fields.iter().try_for_each(|(name, value)| flatten(&format!("{key}{dot}{name}"), value, pairs))
        }
        Value::String(value) => {
            pairs.push(KeyValue { key: key.to_owned(), value: value.clone() });
            Ok(())
        }
        Value::Number(number) if ["offset", "size"].contains(&key) => {
            pairs.push(KeyValue { key: key.to_owned(), value: number.to_string() });
            Ok(())
        }
        // As in QEMU, `null` and an empty text mean the same.
        Value::Null if key == "backing" => {
            pairs.push(KeyValue { key: key.to_owned(), value: String::new() });
            Ok(())
        }
        other => {
            let other = shown(other.to_string());
            Err(bad(format!("the option '{key}' cannot be {other} (driver, file.driver and file.filename are texts)")))
        }
    }
}

fn described(pairs: &[KeyValue]) -> Result<ImageName> {
    let value_of = |key: &str| pairs.iter().find(|pair| pair.key == key).map(|pair| pair.value.as_str());
    let driver = value_of("driver");
    // Without a format above a protocol, the file's bytes are the disk's.
    let is_file = driver.is_some_and(|driver| FILE_DRIVERS.contains(&driver));
    let (file_key, driver_key) = if is_file { ("filename", "driver") } else { ("file.filename", "file.driver") };
    for KeyValue { key, value } in pairs {
        match key.as_str() {
            "driver" => {}
            key if key == file_key => {}
            "offset" | "size" if driver == Some("raw") => {}
            "backing" if value.is_empty() => {}
            key if key == driver_key && FILE_DRIVERS.contains(&value.as_str()) => {}
            key if key == driver_key => {
                return Err(bad(format!("{key}={value} is not supported (file and host_device are)")));
            }
            key => {
                let what = "driver, file.driver, file.filename, of raw offset and size, and backing=null are";
                let format = driver.unwrap_or("raw");
                return Err(bad(format!("Block format '{format}' does not support the option '{key}' ({what})")));
            }
        }
    }
    let path = value_of(file_key).ok_or_else(|| bad("A block device must be specified for \"file\""))?;
    // The file itself is the disk.
    let format = if is_file { Some(Format::Raw) } else { driver.map(driver_format).transpose()? };
    let size = |key: &str| value_of(key).map(parse_size).transpose();
    let (offset_bytes, size_bytes) = (size("offset")?, size("size")?);
    let is_part = offset_bytes.is_some() || size_bytes.is_some();
    let part = is_part.then(|| FilePart { offset_bytes: offset_bytes.unwrap_or(0), size_bytes });
    Ok(ImageName { format, part, is_alone: value_of("backing").is_some(), ..FileName::from(path).into() })
}

fn driver_format(driver: &str) -> Result<Format> {
    driver.parse().map_err(|error| bad(format!("Unknown driver '{driver}': {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Found = std::result::Result<(String, Option<Format>), String>;

    fn found(name: Result<ImageName>) -> Found {
        name.map(|name| (name.file.to_string(), name.format)).map_err(|error| error.to_string())
    }

    #[test]
    fn descriptions_name_a_file_and_its_format_and_anything_else_is_refused_by_name() {
        let of = |text: &str| found(ImageName::parse_description(text));
        for (text, path, format) in [
            ("driver=qcow2,file.driver=file,file.filename=a,,b", "a,b", Some(Format::Qcow2)),
            ("driver=raw,file.filename=a", "a", Some(Format::Raw)),
            ("driver=file,filename=a", "a", Some(Format::Raw)),
            ("file.filename=a", "a", None),
        ] {
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
    }

    #[test]
    fn a_protocol_that_is_not_a_file_is_refused_by_name_and_never_taken_for_one() {
        let of = |text: &str, format| found(ImageName::parse(text, format));
        let json = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"a"}}"#;
        for (text, said, path, format) in [
            ("a", None, "a", None),
            ("file:a:b", Some(Format::Raw), "a:b", Some(Format::Raw)),
            ("host_device:/dev/sdb", None, "/dev/sdb", None),
            ("fd:3", None, "fd:3", None),
            ("./a:b", None, "./a:b", None),
            ("/x/a:b", None, "/x/a:b", None),
            (json, None, "a", Some(Format::Qcow2)),
            ("json:{'driver': 'qcow2', 'file': {'filename': 'a'}}", None, "a", Some(Format::Qcow2)),
            (r#"json:{'file.filename': 'a"b', "driver": "raw"}"#, None, "a\"b", Some(Format::Raw)),
            (r#"json:{'file.filename': 'it\'s', "driver": 'raw'}"#, None, "it's", Some(Format::Raw)),
            (r#"json:{"file.filename": "it's"}"#, None, "it's", None),
            (r#"json:{"file.filename":"a"}"#, Some(Format::Raw), "a", Some(Format::Raw)),
        ] {
            assert_eq!(of(text, said), Ok((path.to_owned(), format)), "{text}");
        }
        for (text, named) in [
            ("nbd:unix:/run/x.sock", "'nbd'"),
            ("a:b", "'./a:b'"),
            ("json:{", "JSON parse error, premature EOI"),
            ("json:[]", "Invalid JSON object given"),
            ("json:{'driver': 'nope', 'file.filename': 'a'}", "Unknown driver 'nope'"),
            ("json:{'driver': 'raw', 'file.filename': 'a', 'x': 'y'}", "format 'raw' does not support the option 'x'"),
            (r#"json:{"driver":"nbd","server":{"type":"unix"}}"#, "server.type"),
            (r#"json:{"driver":"qcow2","offset":512,"file":{"filename":"a"}}"#, "offset"),
            (r#"json:{"driver":"raw","offset":true,"file":{"filename":"a"}}"#, "offset"),
            (r#"json:{"driver":"raw","offset":-1,"file":{"filename":"a"}}"#, "-1"),
            (r#"json:{"driver":"qcow2","backing":"b","file":{"filename":"a"}}"#, "backing"),
            (r#"json:{"driver":"qcow2","file":{"filename":null}}"#, "file.filename"),
        ] {
            let said = of(text, None).expect_err(text);
            assert!(said.contains(named) && said.contains("Could not open"), "{said}");
        }
        assert!(of(json, Some(Format::Raw)).is_err());
    }

    #[test]
    fn a_part_of_a_raw_file_and_an_image_without_its_backing_file_are_for_reading() {
        let of = |text: &str| ImageName::parse(text, None).unwrap();
        let part = |offset_bytes, size_bytes| Some(FilePart { offset_bytes, size_bytes });
        for (text, expected) in [
            (r#"json:{"driver":"raw","offset":512,"size":"64k","file.filename":"a"}"#, part(512, Some(65536))),
            (r#"json:{"driver":"raw","offset":"1M","file.filename":"a"}"#, part(1 << 20, None)),
            (r#"json:{"driver":"raw","file.filename":"a"}"#, None),
        ] {
            assert_eq!(of(text).part, expected, "{text}");
            assert_eq!(of(text).whole().is_ok(), expected.is_none(), "{text}");
        }
        let alone = of(r#"json:{"driver":"qcow2","backing":null,"file.filename":"a"}"#);
        assert!(alone.is_alone && alone.whole().is_err());
    }
}
