//! Formats by name and by content.

use block::{Error, ErrorKind, Result};
use std::fmt;
use std::str::FromStr;

/// A format of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The guest's bytes as they are.
    Raw,
    /// qcow2, versions 2 and 3.
    Qcow2,
    /// The layer that `snapshot=on` puts on top of a disk: an index and dense data, in files without names or in kept
    /// files.
    Scratch,
}

impl Format {
    /// All formats, for messages.
    pub const ALL: [Self; 3] = [Self::Raw, Self::Qcow2, Self::Scratch];

    /// The format of a file in which nothing was recognised, if its user lets that be guessed.
    pub(crate) const OF_UNRECOGNISED: Self = Self::Raw;
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Scratch => "scratch",
        })
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|format| format.to_string() == name);
        found.ok_or_else(|| {
            Error::new(ErrorKind::BadOption, format!("unknown image format '{name}': valid are raw, qcow2, scratch"))
        })
    }
}

/// How many bytes from the start of a file [`guess_format`] needs.
pub(crate) const PROBE_BYTES: usize = 512;

/// The magics of our formats and of those that QEMU knows: the offset, the bytes, and the format's name.
const MAGICS: [(usize, &[u8], &str); 17] = [
    (0, b"QFI\xfb\0\0\0\x01", "qcow"),
    (0, b"QFI\xfb", "qcow2"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    (0, b"vhdxfile", "vhdx"),
    (0x40, b"\x7f\x10\xda\xbe", "vdi"),
    (0, b"conectix", "vpc"),
    (0, b"LUKS\xba\xbe", "luks"),
    (0, b"QED\0", "qed"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    (0, b"Bochs Virtual HD Image", "bochs"),
    (0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop", "cloop"),
    (0, b"koly", "dmg"),
    (0, b"encrcdsa", "dmg"),
    (0, &format_scratch::MAGIC, "scratch"),
];

/// Returns the name of the format that the header belongs to; `None` if it is not recognised (perhaps raw).
fn name_of_header(head: &[u8]) -> Option<&'static str> {
    let found = MAGICS.iter().find(|(at, magic, _)| head.get(*at..).is_some_and(|rest| rest.starts_with(magic)));
    found.map(|(_, _, name)| *name)
}

/// Guesses the format from the first 512 bytes of a file. `Ok(None)` means that nothing was recognised: raw, but
/// only as a guess. A known format that is not served is an error.
pub fn guess_format(name: &str, head: &[u8]) -> Result<Option<Format>> {
    match name_of_header(head) {
        None => Ok(None),
        Some("qcow2") => Ok(Some(Format::Qcow2)),
        Some("scratch") => Ok(Some(Format::Scratch)),
        Some(other) => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "'{name}': looks like a {other} image, which is not supported; say format=raw (in the image tool: -f raw) to \
                 get its bytes as they are"
            ),
        )),
    }
}

/// Whether bytes that a guest wants to write to the start of a disk would look like a format's header.
pub(crate) fn forms_a_header(head: &[u8]) -> bool {
    name_of_header(head).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_recognised_and_foreign_formats_refused_by_name() {
        assert_eq!(guess_format("x", b"QFI\xfb\0\0\0\x03").unwrap(), Some(Format::Qcow2));
        assert_eq!(guess_format("x", &[0; 512]).unwrap(), None);
        assert_eq!(guess_format("x", b"QF").unwrap(), None);
        for (_, magic, other) in MAGICS.iter().filter(|(at, ..)| *at == 0) {
            match guess_format("x", magic) {
                Ok(format) => assert_eq!(format.unwrap().to_string(), *other),
                Err(error) => assert!(error.to_string().contains(&format!("looks like a {other} image")), "{error}"),
            }
        }
        assert!(guess_format("x", b"QFI\xfb\0\0\0\x01").is_err(), "the first version of qcow is another format");
    }
}
