//! Properties that a guest sees instead of the disk's own.

use crate::choices::switch;
use crate::keyval;
use crate::size::parse_size;
use block::{Error, ErrorKind, Result};

/// The keys of these properties.
pub const SHOWN_KEYS: [&str; 14] = [
    "alignment-offset",
    "cyls",
    "discard-granularity",
    "heads",
    "logical-block-size",
    "min-io-size",
    "opt-io-size",
    "packed",
    "physical-block-size",
    "secs",
    "secure-erase",
    "seg-max",
    "size-max",
    "write-cache",
];

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
    /// The offset of the first physical block.
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
    /// Whether secure erase is offered; not by default.
    pub secure_erase: Option<bool>,
    /// Whether the guest's cache begins as write-back or as write-through.
    pub write_cache: Option<bool>,
    /// Whether packed rings are offered; not by default.
    pub packed: Option<bool>,
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
    /// Sets `key` if it is one of these properties. Returns whether it is one.
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
            "secure-erase" => self.secure_erase = Some(switch(key, value)?),
            "write-cache" => self.write_cache = Some(switch(key, value)?),
            "packed" => self.packed = Some(switch(key, value)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Reads properties of one export. Other keys of a drive are refused.
    pub fn parse<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        let mut shown = Self::default();
        for (key, value) in pairs {
            if !shown.set(key, value)? {
                return Err(keyval::unknown("property that an export has of its own", key, &SHOWN_KEYS));
            }
        }
        shown.check()?;
        Ok(shown)
    }

    /// Returns these properties, with those of `disk` in place of unset ones. A guest that cannot write (`read_only`)
    /// does not get the disk's properties about writing.
    #[must_use]
    pub fn or_of(self, disk: &Self, read_only: bool) -> Self {
        // The three make one geometry.
        let (cylinders, heads, sectors) = match self.cylinders {
            Some(_) => (self.cylinders, self.heads, self.sectors),
            None => (disk.cylinders, disk.heads, disk.sectors),
        };
        let of_writing = |own| if read_only { None } else { own };
        Self {
            cylinders,
            heads,
            sectors,
            logical_block_bytes: self.logical_block_bytes.or(disk.logical_block_bytes),
            physical_block_bytes: self.physical_block_bytes.or(disk.physical_block_bytes),
            alignment_offset_bytes: self.alignment_offset_bytes.or(disk.alignment_offset_bytes),
            minimum_io_bytes: self.minimum_io_bytes.or(disk.minimum_io_bytes),
            optimal_io_bytes: self.optimal_io_bytes.or(disk.optimal_io_bytes),
            discard_granularity_bytes: self.discard_granularity_bytes.or(disk.discard_granularity_bytes),
            size_max_bytes: self.size_max_bytes.or(disk.size_max_bytes),
            seg_max: self.seg_max.or(disk.seg_max),
            secure_erase: self.secure_erase.or(of_writing(disk.secure_erase)),
            write_cache: self.write_cache.or(of_writing(disk.write_cache)),
            packed: self.packed.or(disk.packed),
        }
    }

    /// Returns the keys of the properties that are set.
    #[must_use]
    pub fn keys(&self) -> Vec<&'static str> {
        let is_set = [
            self.alignment_offset_bytes.is_some(),
            self.cylinders.is_some(),
            self.discard_granularity_bytes.is_some(),
            self.heads.is_some(),
            self.logical_block_bytes.is_some(),
            self.minimum_io_bytes.is_some(),
            self.optimal_io_bytes.is_some(),
            self.packed.is_some(),
            self.physical_block_bytes.is_some(),
            self.sectors.is_some(),
            self.secure_erase.is_some(),
            self.seg_max.is_some(),
            self.size_max_bytes.is_some(),
            self.write_cache.is_some(),
        ];
        SHOWN_KEYS.into_iter().zip(is_set).filter_map(|(key, is_set)| is_set.then_some(key)).collect()
    }

    pub(crate) fn check(&self) -> Result<()> {
        let parts = [self.cylinders.is_some(), self.heads.is_some(), self.sectors.is_some()];
        match parts.contains(&true) && parts.contains(&false) {
            true => bad("cyls, heads and secs go together: give all three or none".into()),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(pairs: &[(&str, &str)]) -> ShownOptions {
        ShownOptions::parse(pairs.iter().copied()).unwrap()
    }

    #[test]
    fn every_key_sets_a_property_of_its_own() {
        for key in SHOWN_KEYS {
            let value = if ["packed", "secure-erase", "write-cache"].contains(&key) { "on" } else { "64" };
            let mut one = ShownOptions::default();
            assert!(one.set(key, value).unwrap());
            assert_eq!(one.keys(), [key]);
        }
        let said = ShownOptions::parse([("cache", "none")]).unwrap_err().to_string();
        assert!(said.contains("cache") && said.contains("write-cache"), "{said}");
        assert!(ShownOptions::parse([("cyls", "3")]).unwrap_err().to_string().contains("together"));
    }

    #[test]
    fn an_export_says_only_what_differs_from_the_disk() {
        let disk =
            shown(&[("cyls", "1"), ("heads", "2"), ("secs", "3"), ("write-cache", "off"), ("secure-erase", "on")]);
        let own = shown(&[("cyls", "7"), ("heads", "8"), ("secs", "9"), ("seg-max", "5")]);
        let both = own.or_of(&disk, false);
        assert_eq!((both.cylinders, both.heads, both.sectors, both.seg_max), (Some(7), Some(8), Some(9), Some(5)));
        assert_eq!((both.write_cache, both.secure_erase), (Some(false), Some(true)));
        assert_eq!(ShownOptions::default().or_of(&disk, false), disk);
        let reader = ShownOptions::default().or_of(&disk, true);
        assert_eq!((reader.cylinders, reader.write_cache, reader.secure_erase), (Some(1), None, None));
    }
}
