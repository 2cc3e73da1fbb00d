//! The header of LUKS, version 1 (LUKS On-Disk Format Specification 1.2.3, section 2.3). Reads only the fields that are
//! shown.

use super::extensions::field_u32;
use super::header::{Encryption, Header, read_first_cluster};
use block::{Error, ErrorKind, MetaIo, PastEnd, Result};

const MAGIC: &[u8] = b"LUKS\xba\xbe\x00\x01";
const HEADER_BYTES: usize = 592;
const SECTOR_BYTES: u64 = 512;
const TEXT_BYTES: usize = 32;
const UUID_BYTES: usize = 40;
const OFFSET_CIPHER: usize = 8;
const OFFSET_MODE: usize = 40;
const OFFSET_HASH: usize = 72;
const OFFSET_PAYLOAD: usize = 104;
const OFFSET_KEY_BYTES: usize = 108;
const OFFSET_ITERATIONS: usize = 164;
const OFFSET_UUID: usize = 168;
const OFFSET_SLOTS: usize = 208;
const SLOT_BYTES: usize = 48;
const SLOT_ACTIVE: u32 = 0x00ac_71f3;

/// A decoded LUKS header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Luks {
    /// The cipher: `aes`, for example.
    pub cipher: String,
    /// The cipher's mode: `xts`, for example.
    pub mode: String,
    /// The generator of initial vectors: `plain64`, for example.
    pub ivgen: String,
    /// The generator's hash, if it has one.
    pub ivgen_hash: Option<String>,
    /// The hash of the keys.
    pub hash: String,
    /// Length of the master key.
    pub key_bytes: u32,
    /// The offset of the data from the start of the LUKS header.
    pub payload_offset: u64,
    /// Hash iterations of the master key's digest.
    pub iterations: u32,
    /// The UUID, as text.
    pub uuid: String,
    /// The key slots.
    pub slots: Vec<LuksSlot>,
}

/// A key slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LuksSlot {
    /// The hash iterations of the password and the stripes of the key; `None` if the slot is empty.
    pub active: Option<(u32, u32)>,
    /// The offset of the key from the start of the LUKS header.
    pub key_offset: u64,
}

/// Reads the header of an image, and the LUKS header if the image is encrypted so. Decrypts nothing.
pub async fn describe(io: &MetaIo, name: &str) -> Result<(Header, Option<Luks>)> {
    let failed = |error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the header"), error);
    let header = Header::parse_encrypted(&read_first_cluster(io).await.map_err(failed)?, name, false)?;
    let Some(Encryption::Luks { offset }) = header.encryption else { return Ok((header, None)) };
    let bytes = io.read(offset, HEADER_BYTES, PastEnd::Zeros).await.map_err(failed)?;
    match Luks::parse(&bytes) {
        Some(luks) => Ok((header, Some(luks))),
        None => Err(Error::new(ErrorKind::BadImage, format!("'{name}': Volume is not in LUKS format"))),
    }
}

impl Luks {
    fn parse(bytes: &[u8]) -> Option<Self> {
        if !bytes.starts_with(MAGIC) || bytes.len() < HEADER_BYTES {
            return None;
        }
        let text = |offset: usize, length: usize| {
            let field = bytes.get(offset..offset.saturating_add(length)).unwrap_or_default();
            let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
            String::from_utf8_lossy(field.get(..end).unwrap_or_default()).into_owned()
        };
        let sectors = |offset: usize| u64::from(field_u32(bytes, offset)).saturating_mul(SECTOR_BYTES);
        let said = text(OFFSET_MODE, TEXT_BYTES);
        let (mode, vectors) = said.split_once('-').unwrap_or((&said, ""));
        let (ivgen, ivgen_hash) = match vectors.split_once(':') {
            Some((ivgen, hash)) => (ivgen, Some(hash.to_owned())),
            None => (vectors, None),
        };
        let slots = bytes.get(OFFSET_SLOTS..HEADER_BYTES)?.chunks_exact(SLOT_BYTES).map(LuksSlot::parse);
        Some(Self {
            cipher: text(OFFSET_CIPHER, TEXT_BYTES),
            mode: mode.to_owned(),
            ivgen: ivgen.to_owned(),
            ivgen_hash,
            hash: text(OFFSET_HASH, TEXT_BYTES),
            key_bytes: field_u32(bytes, OFFSET_KEY_BYTES),
            payload_offset: sectors(OFFSET_PAYLOAD),
            iterations: field_u32(bytes, OFFSET_ITERATIONS),
            uuid: text(OFFSET_UUID, UUID_BYTES),
            slots: slots.collect(),
        })
    }

    /// Returns the cipher with the bits of its key, in QEMU's notation. With XTS there are two keys.
    #[must_use]
    pub fn cipher_and_bits(&self) -> String {
        let key_bytes = if self.mode == "xts" { self.key_bytes / 2 } else { self.key_bytes };
        format!("{}-{}", self.cipher, key_bytes.saturating_mul(8))
    }
}

impl LuksSlot {
    fn parse(bytes: &[u8]) -> Self {
        let is_active = field_u32(bytes, 0) == SLOT_ACTIVE;
        Self {
            active: is_active.then(|| (field_u32(bytes, 4), field_u32(bytes, 44))),
            key_offset: u64::from(field_u32(bytes, 40)).saturating_mul(SECTOR_BYTES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_by_the_specification_and_anything_else_is_none() {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[OFFSET_CIPHER..OFFSET_CIPHER + 3].copy_from_slice(b"aes");
        bytes[OFFSET_MODE..OFFSET_MODE + 16].copy_from_slice(b"cbc-essiv:sha256");
        bytes[OFFSET_KEY_BYTES..OFFSET_KEY_BYTES + 4].copy_from_slice(&16u32.to_be_bytes());
        bytes[OFFSET_SLOTS..OFFSET_SLOTS + 4].copy_from_slice(&SLOT_ACTIVE.to_be_bytes());
        bytes[OFFSET_SLOTS + 43] = 8;
        let luks = Luks::parse(&bytes).unwrap();
        assert_eq!(
            (luks.mode.as_str(), luks.ivgen.as_str(), luks.ivgen_hash.as_deref()),
            ("cbc", "essiv", Some("sha256"))
        );
        assert_eq!((luks.cipher_and_bits().as_str(), luks.slots.len()), ("aes-128", 8));
        assert_eq!(luks.slots[0], LuksSlot { active: Some((0, 0)), key_offset: 4096 });
        assert_eq!(luks.slots[1].active, None);
        assert_eq!(Luks::parse(&bytes[..100]), None);
        bytes[7] = 2;
        assert_eq!(Luks::parse(&bytes), None, "the second version");
    }
}
