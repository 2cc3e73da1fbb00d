//! The header of a kept overlay, in the first page of its index.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | [`MAGIC`] |
//! | 8 | version: 1 |
//! | 12 | bytes of a page: 4096 |
//! | 16 | bytes of the disk, which are those of the layer below |
//! | 24, 26, 28 | bytes of the three names |
//! | 32 | pages of the index that were zeroed or written, durably; pages behind them are ignored |
//! | 512 | the name of the file below, its format (empty if guessed), the name of the data file |
//!
//! Numbers are little-endian.

use crate::layout::{MAX_DISK_BYTES, PAGE_BYTES};
use block::{Error, ErrorKind, Result};
use memory::AlignedBuf;

/// The first bytes of a kept overlay's index.
pub const MAGIC: [u8; 8] = *b"RingScr\x01";

const VERSION: u32 = 1;
const NAMES_AT: usize = 512;

/// A kept overlay's description of itself. It never changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The size of the disk, and of the disk below.
    pub size_bytes: u64,
    /// The path of the file below.
    pub backing_file: String,
    /// The format of the file below, if the user gave one.
    pub backing_format: Option<String>,
    /// The name of the data file, which lies beside the index.
    pub data_file: String,
}

impl Header {
    /// Encodes the first page of an index with `pages` valid pages.
    pub(crate) fn encode(&self, name: &str, pages: u64) -> Result<AlignedBuf> {
        let mut page = AlignedBuf::zeroed(PAGE_BYTES as usize);
        let format = self.backing_format.as_deref().unwrap_or_default();
        let names = [self.backing_file.as_str(), format, self.data_file.as_str()];
        let too_long = || {
            let what = "the names of the file below and of the data file are too long together";
            Error::new(ErrorKind::Unsupported, format!("'{name}': {what}"))
        };
        let mut put = |at: usize, bytes: &[u8]| -> Option<()> {
            page.get_mut(at..at.checked_add(bytes.len())?)?.copy_from_slice(bytes);
            Some(())
        };
        let mut fill = || {
            put(0, &MAGIC)?;
            put(8, &VERSION.to_le_bytes())?;
            put(12, &(PAGE_BYTES as u32).to_le_bytes())?;
            put(16, &self.size_bytes.to_le_bytes())?;
            put(32, &pages.to_le_bytes())?;
            let mut at = NAMES_AT;
            for (index, text) in names.iter().enumerate() {
                let length = u16::try_from(text.len()).ok()?;
                put(index.checked_mul(2)?.checked_add(24)?, &length.to_le_bytes())?;
                put(at, text.as_bytes())?;
                at = at.checked_add(text.len())?;
            }
            Some(())
        };
        fill().ok_or_else(too_long)?;
        Ok(page)
    }

    /// Decodes the first page of the index `name`. Also returns the number of valid pages.
    pub(crate) fn decode(name: &str, page: &[u8]) -> Result<(Self, u64)> {
        let bad = |what: String| Error::new(ErrorKind::BadImage, format!("'{name}': {what}"));
        let short = || bad("the header of the scratch overlay is cut off".to_owned());
        if !page.starts_with(&MAGIC) {
            return Err(bad("this is no scratch overlay (it does not begin with its magic number)".to_owned()));
        }
        let u32_at = |at: usize| page.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let version = u32_at(8).ok_or_else(short)?;
        if version != VERSION || u32_at(12) != Some(PAGE_BYTES as u32) {
            let what = format!("version {version} of scratch overlays is not known (this program knows {VERSION})");
            return Err(Error::new(ErrorKind::Unsupported, format!("'{name}': {what}")));
        }
        let u64_at = |at: usize| page.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let (size_bytes, pages) = (u64_at(16).ok_or_else(short)?, u64_at(32).ok_or_else(short)?);
        if size_bytes > MAX_DISK_BYTES {
            return Err(bad(format!("its header says that the disk has {size_bytes} bytes: so large none can be")));
        }
        let mut at = NAMES_AT;
        let mut next = |length_at: usize| -> Option<String> {
            let length = page.get(length_at..)?.first_chunk().map(|bytes| u16::from_le_bytes(*bytes))?;
            let end = at.checked_add(usize::from(length))?;
            let text = std::str::from_utf8(page.get(at..end)?).ok()?.to_owned();
            at = end;
            Some(text)
        };
        let names = (|| Some([next(24)?, next(26)?, next(28)?]))();
        let [backing_file, format, data_file] =
            names.ok_or_else(|| bad("its header has impossible names".to_owned()))?;
        if backing_file.is_empty() || data_file.is_empty() {
            return Err(bad("its header does not say what it rests on, or where its data are".to_owned()));
        }
        let backing_format = Some(format).filter(|format| !format.is_empty());
        Ok((Self { size_bytes, backing_file, backing_format, data_file }, pages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_as_it_was_written_and_a_damaged_one_is_an_error() {
        for format in [Some("raw".to_owned()), None] {
            let header = Header {
                size_bytes: 3 << 30,
                backing_file: "/vms/base.raw".to_owned(),
                backing_format: format,
                data_file: "base.raw.scratch.data".to_owned(),
            };
            let page = header.encode("x", 77).unwrap();
            assert_eq!(Header::decode("x", &page).unwrap(), (header.clone(), 77));
            for length in [0, 7, 8, 20, 30, 515] {
                assert!(Header::decode("x", &page[..length]).is_err(), "{length}");
            }
            for at in 0..40 {
                let mut damaged = page.to_vec();
                damaged[at] ^= 0x80;
                // The damaged page never decodes to the same header, and nothing panics.
                let is_unused = (30..32).contains(&at);
                assert!(is_unused || Header::decode("x", &damaged).ok() != Some((header.clone(), 77)), "{at}");
            }
        }
        let long =
            Header { size_bytes: 1, backing_file: "x".repeat(3000), backing_format: None, data_file: "y".repeat(1000) };
        assert!(long.encode("x", 1).is_err());
    }
}
