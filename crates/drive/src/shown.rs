//! Properties that a guest sees instead of the disk's own.

use crate::size::parse_size;
use block::{Error, ErrorKind, Result};

/// Properties set for the guest. If not set, those of the disk and its file are shown. Whether they fit together and
/// fit the disk is checked when the disk is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ShownOptions {
    /// Cylinders of the geometry.
    pub cylinders: Option<u16>,
    /// Heads of the geometry.
    pub heads: Option<u8>,
    /// Sectors in a track of the geometry.
    pub sectors: Option<u8>,
    /// The smallest unit that the guest may address.
    pub logical_block_bytes: Option<u32>,
    /// Writes smaller than this are slow.
    pub physical_block_bytes: Option<u32>,
    /// Where the first physical block begins.
    pub alignment_offset_bytes: Option<u32>,
    /// Smallest efficient I/O.
    pub minimum_io_bytes: Option<u32>,
    /// Best I/O size.
    pub optimal_io_bytes: Option<u32>,
    /// Alignment of discards; zero for none.
    pub discard_granularity_bytes: Option<u32>,
    /// Longest data segment.
    pub size_max_bytes: Option<u32>,
    /// Most data segments in a request.
    pub seg_max: Option<u16>,
    /// Whether secure erase is offered.
    pub secure_erase: bool,
    /// Whether the guest's cache begins as write-back or as write-through.
    pub write_cache: Option<bool>,
}

fn bad<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::BadOption, message))
}

fn bytes(key: &str, value: &str) -> Result<Option<u32>> {
    let size = parse_size(value).map_err(|error| error.in_context(key))?;
    match u32::try_from(size) {
        Ok(size) => Ok(Some(size)),
        Err(_) => bad(format!("{key}={value}: it must be less than 4G")),
    }
}

fn number<T: std::str::FromStr + From<u8> + PartialOrd>(key: &str, value: &str, most: &str) -> Result<Option<T>> {
    match value.parse().ok().filter(|number| *number >= T::from(1)) {
        Some(number) => Ok(Some(number)),
        None => bad(format!("{key}={value}: takes a number from 1 to {most}")),
    }
}

impl ShownOptions {
    /// Sets `key` if it is one of these properties. Returns whether it is.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<bool> {
        match key {
            "cyls" => self.cylinders = number(key, value, "65535")?,
            "heads" => self.heads = number(key, value, "255")?,
            "secs" => self.sectors = number(key, value, "255")?,
            "logical-block-size" => self.logical_block_bytes = bytes(key, value)?,
            "physical-block-size" => self.physical_block_bytes = bytes(key, value)?,
            "alignment-offset" => self.alignment_offset_bytes = bytes(key, value)?,
            "min-io-size" => self.minimum_io_bytes = bytes(key, value)?,
            "opt-io-size" => self.optimal_io_bytes = bytes(key, value)?,
            "discard-granularity" => self.discard_granularity_bytes = bytes(key, value)?,
            "size-max" => self.size_max_bytes = bytes(key, value)?,
            "seg-max" => self.seg_max = number(key, value, "1022")?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(crate) fn check(&self) -> Result<()> {
        let parts = [self.cylinders.is_some(), self.heads.is_some(), self.sectors.is_some()];
        match parts.contains(&true) && parts.contains(&false) {
            true => bad("cyls, heads and secs go together: give all three or none".into()),
            false => Ok(()),
        }
    }
}
