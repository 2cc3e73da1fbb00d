//! The options of a new image (-o), for the commands that create or measure one.

use crate::output::usage;
use drive::{parse_integer, parse_options, parse_size, unknown};
use format_qcow2::{Compression, Preallocation};
use image::Format;
use std::fmt::Write as _;

/// An option: its key, its type, whether raw images have it, and its purpose.
type Known = (&'static str, &'static str, bool, &'static str);

const SWITCH: &str = "bool (on/off)";
const OPTIONS: [Known; 15] = [
    ("backing_file", "str", false, "The image that the new one is an overlay of"),
    ("backing_fmt", "str", false, "Its format"),
    ("cluster_size", "size", false, "A power of two from 512 to 2M"),
    ("compat", "str", false, "Version of the format: 0.10 (v2) or 1.1 (v3)"),
    ("compression_type", "str", false, "How clusters are compressed: zlib, zstd"),
    ("data_file", "str", false, "An external file for the guest's data"),
    ("data_file_raw", SWITCH, false, "That file stays valid as a raw image"),
    ("encryption", SWITCH, false, "Only off: encrypted images are not supported"),
    ("extended_l2", SWITCH, false, "Clusters are allocated in 32 parts"),
    ("extent_size_hint", "size", true, "The file gets space in pieces of this size (XFS); 0: as the host likes"),
    ("lazy_refcounts", SWITCH, false, "Fewer flushes while the image grows, a repair after a crash"),
    ("nocow", SWITCH, true, "The host does not copy on write (btrfs)"),
    ("preallocation", "str", true, "Space in advance"),
    ("refcount_bits", "num", false, "1, 2, 4, 8, 16, 32 or 64"),
    ("size", "size", true, "Size of the disk"),
];
/// QEMU's formats of backing files. They are only recorded here; opening the image decides whether a format is
/// supported.
const BACKING_FORMATS: [&str; 25] = [
    "bochs",
    "cloop",
    "dmg",
    "file",
    "ftp",
    "ftps",
    "gluster",
    "host_device",
    "http",
    "https",
    "iscsi",
    "luks",
    "nbd",
    "nfs",
    "null-co",
    "parallels",
    "qcow",
    "qcow2",
    "qed",
    "raw",
    "rbd",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
];

/// A switch: as it was written, for messages, and its meaning.
#[derive(Debug, Clone, Default)]
pub(crate) struct Switch {
    said: Option<String>,
    pub(crate) is_on: bool,
}

impl Switch {
    fn parse(key: &str, value: &str) -> anyhow::Result<Self> {
        Ok(Self { said: Some(value.to_owned()), is_on: switch(key, value)? })
    }

    /// Returns it as it was written; `None` if it was not given.
    pub(crate) fn said(&self) -> Option<&str> {
        self.said.as_deref()
    }
}

/// Reads a switch that is on or off.
pub(crate) fn switch(key: &str, value: &str) -> anyhow::Result<bool> {
    match value {
        "on" | "yes" | "true" | "y" => Ok(true),
        "off" | "no" | "false" | "n" => Ok(false),
        _ => Err(usage(format!("Parameter '{key}' expects 'on' or 'off'"))),
    }
}

pub(super) fn scratch_is_not_made() -> anyhow::Error {
    usage("a scratch overlay is made by a drive with snapshot=on,keep=DIRECTORY")
}

/// Whether -o asks for the list of options.
pub(crate) fn asks_for_help(options: &[String]) -> bool {
    options.iter().any(|text| drive::asks_for_help(text))
}

/// Returns the list of a format's options in qemu-img's form. Its heading depends on whether a file was named.
pub(crate) fn options_help(format: Format, named: bool) -> String {
    let mut text = if named { "Supported options:\n".to_owned() } else { format!("Supported {format} options:\n") };
    for (key, takes, _, what) in options(format) {
        let modes = match (*key, format) {
            ("preallocation", Format::Raw) => ": off, falloc, full",
            ("preallocation", Format::Qcow2) => ": off, metadata, falloc, full",
            _ => "",
        };
        let _ = writeln!(text, "  {:<22} - {what}{modes}", format!("{key}=<{takes}>"));
    }
    text
}

fn options(format: Format) -> impl Iterator<Item = &'static Known> {
    OPTIONS.iter().filter(move |(.., raw, _)| *raw || format == Format::Qcow2)
}

/// All options of a new image, as the user wrote them. Whether their values are valid is seen when the image is made.
#[derive(Debug)]
pub(crate) struct NewImage {
    pub(crate) format: Format,
    pub(crate) size_bytes: Option<u64>,
    pub(crate) cluster_bytes: u64,
    pub(crate) refcount_bits: u64,
    pub(crate) compression: Option<String>,
    pub(crate) compat: Option<String>,
    pub(crate) encryption: Switch,
    pub(crate) lazy_refcounts: Switch,
    pub(crate) extended_l2: Switch,
    pub(crate) data_file: Option<String>,
    pub(crate) data_file_raw: Switch,
    pub(crate) preallocation: Option<String>,
    pub(crate) nocow: Switch,
    pub(crate) extent_size_hint: Option<u32>,
    pub(crate) backing_file: Option<String>,
    /// The name of a format, supported or not.
    pub(crate) backing_format: Option<String>,
}

impl NewImage {
    /// Reads the options of every -o.
    pub(crate) fn parse(format: Format, options: &[String]) -> anyhow::Result<Self> {
        if format == Format::Scratch {
            return Err(scratch_is_not_made());
        }
        let mut wanted = Self {
            format,
            size_bytes: None,
            cluster_bytes: 64 << 10,
            refcount_bits: 16,
            compression: None,
            compat: None,
            encryption: Switch::default(),
            lazy_refcounts: Switch::default(),
            extended_l2: Switch::default(),
            data_file: None,
            data_file_raw: Switch::default(),
            preallocation: None,
            nocow: Switch::default(),
            extent_size_hint: None,
            backing_file: None,
            backing_format: None,
        };
        for text in options {
            for pair in parse_options(text).map_err(|error| error.in_context(format!("-o {}", image::shown(text))))? {
                wanted.set(&pair.key, &pair.value)?;
            }
        }
        Ok(wanted)
    }

    fn set(&mut self, key: &str, value: &str) -> anyhow::Result<()> {
        let refused = || Err(usage(format!("{key}: encrypted images (legacy AES, LUKS) are not supported")));
        let keys: Vec<&str> = options(self.format).map(|(key, ..)| *key).collect();
        if !["backing_file", "data_file"].contains(&key)
            && value.chars().any(|char| image::escaped_byte(char).is_some())
        {
            return Err(usage(format!("{key}={value}: takes text")));
        }
        match key {
            _ if key.starts_with("encrypt.") => return refused(),
            _ if !keys.contains(&key) => {
                return Err(unknown(&format!("option of {}:", self.format), key, &keys).into());
            }
            "size" => self.size_bytes = Some(parse_size(value)?),
            "cluster_size" => self.cluster_bytes = parse_size(value)?,
            "compat" => self.compat = Some(value.to_owned()),
            "encryption" if switch(key, value)? => return refused(),
            "encryption" => self.encryption = Switch::parse(key, value)?,
            "lazy_refcounts" => self.lazy_refcounts = Switch::parse(key, value)?,
            "data_file" => self.data_file = Some(value.to_owned()),
            "data_file_raw" => self.data_file_raw = Switch::parse(key, value)?,
            "preallocation" => self.preallocation = Some(value.to_owned()),
            "nocow" => self.nocow = Switch::parse(key, value)?,
            "extent_size_hint" => {
                let too_large = |_| usage(format!("{key}={value}: has to be less than 4G"));
                self.extent_size_hint = Some(u32::try_from(parse_size(value)?).map_err(too_large)?);
            }
            "extended_l2" => self.extended_l2 = Switch::parse(key, value)?,
            "refcount_bits" => self.refcount_bits = parse_integer(value)?,
            "compression_type" => self.compression = Some(value.to_owned()),
            "backing_file" => self.backing_file = Some(value.to_owned()),
            _ => self.backing_format = Some(value.to_owned()),
        }
        Ok(())
    }

    /// Returns the version of the format.
    pub(crate) fn version(&self) -> anyhow::Result<u32> {
        let choices = [("0.10", 2), ("v2", 2), ("1.1", 3), ("v3", 3)];
        self.compat.as_deref().map_or(Ok(3), |compat| choose("compat", compat, &choices))
    }

    /// Returns how clusters are compressed.
    pub(crate) fn compression(&self) -> anyhow::Result<Compression> {
        let choices = [("zlib", Compression::Zlib), ("zstd", Compression::Zstd)];
        self.compression.as_deref().map_or(Ok(Compression::Zlib), |kind| choose("compression_type", kind, &choices))
    }

    /// Returns the kind of preallocation.
    pub(crate) fn preallocation(&self) -> anyhow::Result<Preallocation> {
        Ok(self.preallocation.as_deref().map_or(Ok(Preallocation::Off), str::parse)?)
    }
}

/// Checks the format that is recorded for a backing file that is not opened.
pub(crate) fn check_backing_format(name: &str) -> anyhow::Result<()> {
    match BACKING_FORMATS.contains(&name) {
        true => Ok(()),
        false => Err(unknown("backing format", name, &BACKING_FORMATS).into()),
    }
}

fn choose<T: Copy>(key: &str, value: &str, choices: &[(&str, T)]) -> anyhow::Result<T> {
    let found = choices.iter().find(|(name, _)| *name == value).map(|(_, choice)| *choice);
    let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
    found.ok_or_else(|| unknown(&format!("value of '{key}':"), value, &names).into())
}
