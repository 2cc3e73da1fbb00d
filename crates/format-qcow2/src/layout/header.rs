//! The header and its extensions. Everything is checked before it is used.

use crate::layout::file_text::name_text;
use crate::layout::geometry::{Geometry, MAX_FILE_BYTES};
use block::{Error, ErrorKind, IoError, IoResult, MetaIo, PastEnd, Result};
use memory::AlignedBuf;

/// "QFI\xfb".
const MAGIC: u32 = 0x5146_49fb;
/// Bytes of a version 2 header, and of the part of a version 3 header that all images have.
const V2_HEADER_BYTES: u32 = 72;
const V3_HEADER_BYTES: u32 = 104;
/// The header's first sector. Later updates rewrite it as a whole.
pub(crate) const HEADER_SECTOR_BYTES: usize = 512;

pub(crate) const MAX_L1_BYTES: u64 = 32 << 20;
pub(crate) const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
pub(crate) const MAX_SNAPSHOTS: u32 = 65536;
const MAX_BACKING_NAME_BYTES: u32 = 1023;
const MAX_EXTENSIONS: usize = 64;

pub(crate) const EXTENSION_END: u32 = 0;
pub(crate) const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
pub(crate) const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
/// The header extension that names the place of the encryption's header.
pub(crate) const EXTENSION_ENCRYPTION: u32 = 0x0537_be77;
pub(crate) const EXTENSION_FEATURE_NAMES: u32 = 0x6803_f857;
/// A row of the feature name table: type, bit, name.
pub(crate) const FEATURE_ROW_BYTES: usize = 48;

pub(crate) const INCOMPATIBLE_DIRTY: u64 = 1 << 0;
pub(crate) const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
pub(crate) const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
pub(crate) const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
pub(crate) const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;

/// The least cluster size with extended L2 entries, as a power of two: a part of a cluster must have at least a sector.
pub(crate) const EXTENDED_L2_CLUSTER_BITS_MIN: u32 = 14;

/// A writer may postpone refcounts, under the dirty bit.
pub(crate) const COMPATIBLE_LAZY_REFCOUNTS: u64 = 1 << 0;

pub(crate) const OFFSET_REFCOUNT_TABLE: usize = 48;
pub(crate) const OFFSET_SNAPSHOTS: usize = 60;
pub(crate) const OFFSET_INCOMPATIBLE: usize = 72;
pub(crate) const OFFSET_AUTOCLEAR: usize = 88;

/// The external data file can be read as a raw image.
pub(crate) const AUTOCLEAR_DATA_FILE_RAW: u64 = 1 << 1;

/// The compression of clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// An image's encryption. Encrypted images are described but not opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encryption {
    /// AES, the legacy method.
    Aes,
    /// LUKS.
    Luks {
        /// The offset of the LUKS header in the file.
        offset: u64,
    },
}

/// A checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Cluster size as a power of two, 9 to 21.
    pub cluster_bits: u32,
    /// Width of a refcount: a power of two, 1 to 64.
    pub refcount_bits: u32,
    /// The compression of clusters.
    pub compression: Compression,
    /// The name of the layer below, as recorded in the image; [`crate::os_name`] turns it into the name of a file.
    pub backing_file: Option<String>,
    /// The format of the layer below, if the image records it.
    pub backing_format: Option<String>,
    /// The name of the external data file, as recorded in the image; `None` if the image holds its own data.
    /// [`crate::os_name`] turns it into the name of a file.
    pub data_file: Option<String>,
    /// The encryption of the guest's data.
    pub encryption: Option<Encryption>,
    /// Feature bits that a reader must know to open the image.
    pub incompatible_features: u64,
    /// Feature bits that may be ignored.
    pub compatible_features: u64,
    /// Feature bits that a writer clears if it does not know them.
    pub autoclear_features: u64,
    /// Number of internal snapshots.
    pub snapshots: u32,
    pub(crate) l1_entries: u32,
    pub(crate) l1_offset: u64,
    pub(crate) refcount_table_offset: u64,
    pub(crate) refcount_table_clusters: u32,
    pub(crate) snapshots_offset: u64,
    pub(crate) refcount_order: u32,
    /// Length of the fixed part.
    pub(crate) header_bytes: u32,
}

/// Whether a file that starts with `bytes` claims to be qcow2.
#[must_use]
pub fn probe(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC.to_be_bytes())
}

/// Returns the cluster size that the first bytes claim, so that the caller can read the whole first cluster; `None` if
/// the size is impossible.
fn claimed_cluster_bytes(bytes: &[u8]) -> Option<u64> {
    let bits = Fields(bytes).u32(20);
    (9..=21).contains(&bits).then(|| 1u64.wrapping_shl(bits))
}

/// Reads the first cluster. If the file cannot be qcow2, reads the first sector only.
pub(crate) async fn read_first_cluster(io: &MetaIo) -> IoResult<AlignedBuf> {
    let start = io.read(0, HEADER_SECTOR_BYTES, PastEnd::Zeros).await?;
    match claimed_cluster_bytes(&start).filter(|_| probe(&start)) {
        Some(length) => io.read(0, usize::try_from(length).map_err(|_| IoError::EIO)?, PastEnd::Zeros).await,
        None => Ok(start),
    }
}

/// Big-endian fields at fixed offsets. Missing bytes read as zero.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&self, offset: usize) -> [u8; N] {
        let end = offset.saturating_add(N);
        self.0.get(offset..end).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
    }

    fn u32(&self, offset: usize) -> u32 {
        u32::from_be_bytes(self.array(offset))
    }

    fn u64(&self, offset: usize) -> u64 {
        u64::from_be_bytes(self.array(offset))
    }
}

/// Checks fields; its errors name the image.
struct Checker<'a> {
    name: &'a str,
}

impl Checker<'_> {
    fn bad<T>(&self, what: impl std::fmt::Display) -> Result<T> {
        Err(Error::new(ErrorKind::BadImage, format!("'{}': not a valid qcow2 image: {what}", self.name)))
    }

    fn unsupported<T>(&self, what: impl std::fmt::Display) -> Result<T> {
        Err(Error::new(ErrorKind::Unsupported, format!("'{}': {what}", self.name)))
    }

    /// Checks a table of `length_bytes` at `offset`: it must be aligned, behind the header, and within the largest
    /// file.
    fn table(&self, field: &str, offset: u64, length_bytes: u64, geometry: &Geometry) -> Result<()> {
        if geometry.offset_in_cluster(offset) != 0 {
            return self.bad(format_args!("{field} offset {offset:#x} is not a multiple of the cluster size"));
        }
        let end = offset.checked_add(length_bytes);
        if offset == 0 || end.is_none_or(|end| end > MAX_FILE_BYTES) {
            return self.bad(format_args!("{field} at {offset:#x} with {length_bytes} bytes cannot be in a file"));
        }
        Ok(())
    }
}

impl Header {
    /// Reads and checks the header in `cluster`, the first cluster of the file. If `writable`, it refuses more.
    pub(crate) fn parse(cluster: &[u8], name: &str, writable: bool) -> Result<Self> {
        let header = Self::parse_encrypted(cluster, name, writable)?;
        let method = match header.encryption {
            None => return Ok(header),
            Some(Encryption::Aes) => "legacy AES",
            Some(Encryption::Luks { .. }) => "LUKS",
        };
        Checker { name }.unsupported(format_args!(
            "Parameter 'encrypt.key-secret' is required for cipher: it is encrypted ({method}), which is not supported"
        ))
    }

    /// As [`Header::parse`], but also reads an encrypted image's header.
    pub(crate) fn parse_encrypted(cluster: &[u8], name: &str, writable: bool) -> Result<Self> {
        let (check, fields) = (Checker { name }, Fields(cluster));
        if !probe(cluster) || cluster.len() < V2_HEADER_BYTES as usize {
            let what = format!("'{name}': Image is not in qcow2 format (it does not start with 'QFI\\xfb')");
            return Err(Error::new(ErrorKind::BadImage, what));
        }
        let version = fields.u32(4);
        if !(2..=3).contains(&version) {
            return check.unsupported(format_args!("Unsupported qcow2 version {version} (2 and 3 are supported)"));
        }
        let cluster_bits = fields.u32(20);
        if !(9..=21).contains(&cluster_bits) {
            return check.bad(format_args!("Unsupported cluster size: 2^{cluster_bits} (2^9 to 2^21 are possible)"));
        }
        let encryption = match fields.u32(32) {
            0 => None,
            1 => Some(Encryption::Aes),
            2 => Some(Encryption::Luks { offset: 0 }),
            other => return check.unsupported(format_args!("Unsupported encryption method {other}")),
        };
        let header_bytes = if version == 2 { V2_HEADER_BYTES } else { fields.u32(100) };
        if version == 3 && (header_bytes < V3_HEADER_BYTES || header_bytes % 8 != 0) {
            return check.bad(format_args!(
                "qcow2 header too short: header_length is {header_bytes}, must be a multiple of 8 from 104 on"
            ));
        }
        if u64::from(header_bytes) > cluster.len() as u64 {
            return check.bad(format_args!("header_length {header_bytes} is larger than the first cluster"));
        }
        let mut header = Self::of_fields(&fields, version, header_bytes);
        header.encryption = encryption;
        let (backing_offset, backing_bytes) = (fields.u64(8), fields.u32(16));
        let backing = header.backing_name(&check, cluster, backing_offset, backing_bytes)?;
        let extensions_end = if backing.is_some() { backing_offset } else { cluster.len() as u64 };
        let names = header.read_extensions(&check, cluster, header_bytes, extensions_end)?;
        header.backing_file = backing;
        header.check_features(&check, &fields, header_bytes, &names, writable)?;
        header.check_tables(&check)?;
        Ok(header)
    }

    fn of_fields(fields: &Fields<'_>, version: u32, header_bytes: u32) -> Self {
        let v3 = |value: u64| if version == 3 { value } else { 0 };
        let refcount_order = if version == 3 { fields.u32(96) } else { 4 };
        let zstd = header_bytes > V3_HEADER_BYTES && fields.array::<1>(104) == [1];
        Self {
            version,
            size_bytes: fields.u64(24),
            cluster_bits: fields.u32(20),
            refcount_bits: 1u32.wrapping_shl(refcount_order),
            compression: if zstd { Compression::Zstd } else { Compression::Zlib },
            backing_file: None,
            backing_format: None,
            data_file: None,
            encryption: None,
            incompatible_features: v3(fields.u64(OFFSET_INCOMPATIBLE)),
            compatible_features: v3(fields.u64(80)),
            autoclear_features: v3(fields.u64(OFFSET_AUTOCLEAR)),
            snapshots: fields.u32(60),
            l1_entries: fields.u32(36),
            l1_offset: fields.u64(40),
            refcount_table_offset: fields.u64(OFFSET_REFCOUNT_TABLE),
            refcount_table_clusters: fields.u32(56),
            snapshots_offset: fields.u64(64),
            refcount_order,
            header_bytes,
        }
    }

    /// Whether the refcounts are stale: the last writer postponed them and did not close the image.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.incompatible_features & INCOMPATIBLE_DIRTY != 0
    }

    /// Refuses an image that is marked corrupt: it can only be read.
    pub(crate) fn refuse_corrupt(&self, name: &str) -> Result<()> {
        match self.incompatible_features & INCOMPATIBLE_CORRUPT {
            0 => Ok(()),
            _ => Checker { name }
                .bad("qcow2: Image is corrupt; cannot be opened read/write: it is marked corrupt; repair it with 'check -r all'"),
        }
    }

    /// Whether refcounts may be postponed. With an external data file they may not: there is hardly anything to count.
    pub(crate) fn may_postpone_refcounts(&self) -> bool {
        self.compatible_features & COMPATIBLE_LAZY_REFCOUNTS != 0 && !self.has_data_file()
    }

    /// Returns the autoclear bits whose structures we keep valid, except for bitmaps.
    pub(crate) fn kept_autoclear(&self) -> u64 {
        if self.data_file_is_raw() { AUTOCLEAR_DATA_FILE_RAW } else { 0 }
    }

    /// Whether guest data lie in an external file.
    #[must_use]
    pub fn has_data_file(&self) -> bool {
        self.incompatible_features & INCOMPATIBLE_DATA_FILE != 0
    }

    /// Whether the data file can be read as a raw image. Above a backing file it cannot, whatever the header says.
    #[must_use]
    pub fn data_file_is_raw(&self) -> bool {
        let says_so = self.autoclear_features & AUTOCLEAR_DATA_FILE_RAW != 0;
        self.has_data_file() && says_so && self.backing_file.is_none()
    }

    pub(crate) fn geometry(&self) -> Geometry {
        Geometry {
            version: self.version,
            size_bytes: self.size_bytes,
            cluster_bits: self.cluster_bits,
            refcount_order: self.refcount_order,
            has_backing: self.backing_file.is_some(),
            extended_l2: self.incompatible_features & INCOMPATIBLE_EXTENDED_L2 != 0,
            data_file: self.has_data_file(),
        }
    }

    fn backing_name(&self, check: &Checker<'_>, cluster: &[u8], offset: u64, length: u32) -> Result<Option<String>> {
        if offset == 0 {
            return Ok(None);
        }
        if length > MAX_BACKING_NAME_BYTES {
            return check.bad(format_args!("the backing file name has {length} bytes, at most 1023 are allowed"));
        }
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let Some(bytes) = cluster.get(start..start.saturating_add(length as usize)) else {
            return check.bad(format_args!("the backing file name at {offset:#x} lies outside the first cluster"));
        };
        if length == 0 {
            return Ok(None);
        }
        match bytes.contains(&0) {
            false => Ok(Some(name_text(bytes))),
            true => check.bad("the backing file name has a zero byte in it"),
        }
    }

    /// Reads the header extensions. Returns the names of incompatible features.
    fn read_extensions(
        &mut self,
        check: &Checker<'_>,
        cluster: &[u8],
        header_bytes: u32,
        end: u64,
    ) -> Result<Vec<(u8, String)>> {
        let mut names = Vec::new();
        let area = cluster.get(..usize::try_from(end).unwrap_or(usize::MAX)).unwrap_or(cluster);
        let mut at = header_bytes as usize;
        for _ in 0..MAX_EXTENSIONS {
            let Some(head) = area.get(at..at.saturating_add(8)) else { break };
            let (kind, length) = (Fields(head).u32(0), Fields(head).u32(4) as usize);
            if kind == EXTENSION_END {
                break;
            }
            let start = at.saturating_add(8);
            let Some(data) = area.get(start..start.saturating_add(length)) else {
                return check.bad(format_args!(
                    "the header extension {kind:#010x} at {at:#x} with {length} bytes does not fit the first cluster"
                ));
            };
            match kind {
                EXTENSION_BACKING_FORMAT => match std::str::from_utf8(data) {
                    Ok(text) if length < 16 => self.backing_format = Some(text.to_owned()),
                    _ => return check.bad("the backing format's name is not text of less than 16 bytes"),
                },
                EXTENSION_DATA_FILE if data.contains(&0) || length > MAX_BACKING_NAME_BYTES as usize => {
                    return check.bad("the external data file's name is no name of at most 1023 bytes");
                }
                EXTENSION_DATA_FILE => self.data_file = Some(name_text(data)),
                EXTENSION_ENCRYPTION if matches!(self.encryption, Some(Encryption::Luks { .. })) => {
                    self.encryption = Some(Encryption::Luks { offset: Fields(data).u64(0) });
                }
                EXTENSION_FEATURE_NAMES => names = incompatible_names(data),
                _ => {}
            }
            at = start.saturating_add(length.next_multiple_of(8));
        }
        Ok(names)
    }

    fn check_features(
        &self,
        check: &Checker<'_>,
        fields: &Fields<'_>,
        header_bytes: u32,
        names: &[(u8, String)],
        writable: bool,
    ) -> Result<()> {
        let bits = self.incompatible_features;
        if writable {
            self.refuse_corrupt(check.name)?;
        }
        if self.has_data_file() && self.data_file.as_ref().is_none_or(String::is_empty) {
            return check.bad("it keeps its data in an external data file, but does not say in which");
        }
        if self.has_data_file() && self.snapshots > 0 {
            return check.bad("it has internal snapshots, which do not go with an external data file");
        }
        if bits & INCOMPATIBLE_EXTENDED_L2 != 0 && self.cluster_bits < EXTENDED_L2_CLUSTER_BITS_MIN {
            return check.bad("extended L2 entries need clusters of at least 16 KiB");
        }
        let unknown = bits
            & !(INCOMPATIBLE_DIRTY
                | INCOMPATIBLE_CORRUPT
                | INCOMPATIBLE_DATA_FILE
                | INCOMPATIBLE_COMPRESSION
                | INCOMPATIBLE_EXTENDED_L2);
        if unknown != 0 {
            return check.unsupported(format_args!("Unsupported qcow2 feature(s): {}", describe_bits(unknown, names)));
        }
        let compression = if header_bytes > V3_HEADER_BYTES { fields.array::<1>(104) } else { [0] };
        let flagged = bits & INCOMPATIBLE_COMPRESSION != 0;
        match compression {
            [0] if !flagged => {}
            [1] if flagged => {}
            [0 | 1] => return check.bad("compression_type and its incompatible feature bit contradict each other"),
            [other] => return check.unsupported(format_args!("qcow2: unknown compression type: {other}")),
        }
        if writable && bits & INCOMPATIBLE_DIRTY != 0 {
            return check.unsupported(
                "it was not closed cleanly (dirty bit), so its refcounts are stale; it has to be repaired before it is \
                 written to (check -r all)",
            );
        }
        Ok(())
    }

    fn check_tables(&self, check: &Checker<'_>) -> Result<()> {
        let geometry = self.geometry();
        if self.refcount_order > 6 {
            return check.bad(format_args!(
                "Reference count entry width too large; may not exceed 64 bits (refcount_order is {})",
                self.refcount_order
            ));
        }
        if self.size_bytes > i64::MAX as u64 {
            return check.bad(format_args!("Image is too big: {} bytes", self.size_bytes));
        }
        let l1_bytes = u64::from(self.l1_entries).saturating_mul(8);
        if l1_bytes > MAX_L1_BYTES {
            return check.bad(format_args!("the L1 table has {l1_bytes} bytes, at most {MAX_L1_BYTES} are allowed"));
        }
        if geometry.l1_entries() > u64::from(self.l1_entries) {
            return check.bad(format_args!(
                "the L1 table has {} entries, a disk of {} bytes needs {}",
                self.l1_entries,
                self.size_bytes,
                geometry.l1_entries()
            ));
        }
        if self.l1_entries > 0 {
            check.table("L1 table", self.l1_offset, l1_bytes, &geometry)?;
        }
        let table_bytes = u64::from(self.refcount_table_clusters).saturating_mul(geometry.cluster_bytes());
        if table_bytes == 0 || table_bytes > MAX_REFCOUNT_TABLE_BYTES {
            return check.bad(format_args!(
                "the refcount table has {} clusters ({table_bytes} bytes), it must have one and at most \
                 {MAX_REFCOUNT_TABLE_BYTES} bytes",
                self.refcount_table_clusters
            ));
        }
        check.table("refcount table", self.refcount_table_offset, table_bytes, &geometry)?;
        if self.snapshots > MAX_SNAPSHOTS {
            return check.bad(format_args!(
                "Snapshot table too large: it claims {} internal snapshots, at most 65536 are; 'check -r all' discards \
                 those that cannot be",
                self.snapshots
            ));
        }
        if self.snapshots > 0 {
            // A row of the snapshot table has at least 40 bytes.
            let least = u64::from(self.snapshots).saturating_mul(40);
            check.table("snapshot table", self.snapshots_offset, least, &geometry)?;
        }
        Ok(())
    }
}

fn incompatible_names(table: &[u8]) -> Vec<(u8, String)> {
    let mut names = Vec::new();
    for row in table.chunks_exact(FEATURE_ROW_BYTES).take(256) {
        if let [0, bit, name @ ..] = row {
            let text: Vec<u8> = name.iter().copied().take_while(|byte| *byte != 0).collect();
            names.push((*bit, String::from_utf8_lossy(&text).escape_debug().to_string()));
        }
    }
    names
}

/// Describes feature bits as qemu does: by the names in the image, and a mask of the bits without a name.
fn describe_bits(bits: u64, names: &[(u8, String)]) -> String {
    let (mut words, mut unnamed) = (Vec::new(), 0u64);
    for bit in (0u8..64).filter(|bit| bits & 1u64.wrapping_shl(u32::from(*bit)) != 0) {
        match names.iter().find(|(named, _)| *named == bit) {
            Some((_, name)) => words.push(name.clone()),
            None => unnamed |= 1u64.wrapping_shl(u32::from(bit)),
        }
    }
    if unnamed != 0 {
        words.push(format!("Unknown incompatible feature: {unnamed:x}"));
    }
    words.join(", ")
}
