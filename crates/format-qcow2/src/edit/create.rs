//! Making a new image, as `qemu-img create` does.

use crate::edit::header_edit::Backing;
use crate::edit::preallocate::Preallocation;
use crate::layout::file_text::os_name;
use crate::layout::geometry::{Geometry, MAX_FILE_BYTES};
use crate::layout::header::{
    AUTOCLEAR_DATA_FILE_RAW, COMPATIBLE_LAZY_REFCOUNTS, Compression, EXTENDED_L2_CLUSTER_BITS_MIN,
    EXTENSION_BACKING_FORMAT, EXTENSION_DATA_FILE, EXTENSION_END, EXTENSION_FEATURE_NAMES, FEATURE_ROW_BYTES, Header,
    INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_EXTENDED_L2,
};
use crate::live::refcounts::Refcounts;
use block::{Error, ErrorKind, MetaIo, Result};
use memory::AlignedBuf;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Header bytes of a version 3 image with the compression type.
const HEADER_BYTES: u32 = 112;

/// The features that we know, for the feature name table: type, bit, name.
const FEATURES: [(u8, u8, &str); 8] = [
    (0, 0, "dirty bit"),
    (0, 1, "corrupt bit"),
    (0, 2, "external data file"),
    (0, 3, "compression type"),
    (0, 4, "extended L2 entries"),
    (1, 0, "lazy refcounts"),
    (2, 0, "bitmaps"),
    (2, 1, "raw external data"),
];

/// Options for a new image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CreateOptions {
    /// Size of the disk; rounded up to whole sectors.
    pub size_bytes: u64,
    /// A power of two from 512 bytes to 2 MiB.
    pub cluster_size: u64,
    /// 2 (qemu's compat=0.10) or 3 (compat=1.1).
    pub version: u32,
    /// 1, 2, 4 ... 64; version 2 has 16.
    pub refcount_bits: u32,
    /// The layer below, as the image shall name it.
    pub backing_file: Option<String>,
    /// The format of the layer below.
    pub backing_format: Option<String>,
    /// The type for clusters that other tools will compress.
    pub compression: Compression,
    /// Allows writers to postpone refcounts, under the dirty bit (version 3).
    pub lazy_refcounts: bool,
    /// The file that holds the guest's data instead of the image, as the image shall name it (version 3).
    pub data_file: Option<String>,
    /// The data file stays valid as a raw image.
    pub data_file_raw: bool,
    /// Carried out by [`crate::preallocate`] after the image is created.
    pub preallocation: Preallocation,
    /// Clusters are allocated in 32 parts (version 3).
    pub extended_l2: bool,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            size_bytes: 0,
            cluster_size: 64 << 10,
            version: 3,
            refcount_bits: 16,
            backing_file: None,
            backing_format: None,
            compression: Compression::Zlib,
            lazy_refcounts: false,
            data_file: None,
            data_file_raw: false,
            preallocation: Preallocation::Off,
            extended_l2: false,
        }
    }
}

fn bad(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::BadOption, what)
}

impl CreateOptions {
    /// Changes some options: `CreateOptions::default().with(|options| options.size_bytes = 1 << 30)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Sets the backing file, or none.
    pub fn rest_on(&mut self, below: Option<Backing>) {
        (self.backing_file, self.backing_format) = below.map_or((None, None), |below| (Some(below.file), below.format));
    }

    /// Refuses options about the data file that do not go together, in qemu's words.
    fn check_data_file(&self) -> Result<()> {
        let data_file = self.data_file.as_deref().map(os_name);
        let is_no_name = |name: OsString| name.is_empty() || name.len() > 1023 || name.as_bytes().contains(&0);
        if data_file.is_some_and(is_no_name) {
            return Err(bad("the data file's name must have 1 to 1023 bytes"));
        }
        if self.data_file_raw && self.data_file.is_none() {
            return Err(bad("data-file-raw requires data-file"));
        }
        if self.data_file_raw && self.backing_file.is_some() {
            return Err(bad("Backing file and data-file-raw cannot be used at the same time"));
        }
        self.needs_version_3(self.data_file.is_some(), "External data files are only supported with")
    }

    /// Returns the preallocation that the image needs. In a raw external data file every cluster has its place from the
    /// start.
    #[must_use]
    pub fn effective_preallocation(&self) -> Preallocation {
        match self.preallocation {
            Preallocation::Off if self.data_file_raw => Preallocation::Metadata,
            other => other,
        }
    }

    /// Whether these options are valid and go together.
    pub fn validate(&self) -> Result<()> {
        self.check().map(drop)
    }

    /// Refuses an option that only version 3 has, in qemu's words.
    fn needs_version_3(&self, is_wanted: bool, what: &str) -> Result<()> {
        match is_wanted && self.version == 2 {
            false => Ok(()),
            true => Err(bad(format!("{what} compatibility level 1.1 and above (use version=v3 or greater)"))),
        }
    }

    /// Checks the options that determine the size of the file.
    pub(super) fn check_sizes(&self) -> Result<()> {
        self.check_clusters()?;
        self.check_refcounts()
    }

    fn check_clusters(&self) -> Result<()> {
        if !self.cluster_size.is_power_of_two() || !(512..=2 << 20).contains(&self.cluster_size) {
            return Err(bad("Cluster size must be a power of two between 512 and 2048k"));
        }
        if self.extended_l2 && self.cluster_size < 1 << EXTENDED_L2_CLUSTER_BITS_MIN {
            return Err(bad("Extended L2 entries are only supported with cluster sizes of at least 16384 bytes"));
        }
        Ok(())
    }

    fn check_refcounts(&self) -> Result<()> {
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            return Err(bad("Refcount width must be a power of two and may not exceed 64 bits"));
        }
        if self.version == 2 && self.refcount_bits != 16 {
            let what = "Different refcount widths than 16 bits require compatibility level 1.1 or above (use version=v3 or \
                        greater)";
            return Err(bad(what));
        }
        Ok(())
    }

    /// Checks in qemu's order: of several faults the same one is told.
    fn check(&self) -> Result<Geometry> {
        if !(2..=3).contains(&self.version) {
            return Err(bad(format!("qcow2 version {} does not exist: 2 and 3 do", self.version)));
        }
        self.needs_version_3(self.extended_l2, "Extended L2 entries are only supported with")?;
        self.check_clusters()?;
        if self.backing_file.is_some() && self.preallocation != Preallocation::Off && !self.extended_l2 {
            return Err(bad("Backing file and preallocation can only be used at the same time if extended_l2 is on"));
        }
        self.needs_version_3(self.lazy_refcounts, "Lazy refcounts only supported with")?;
        self.check_refcounts()?;
        self.check_data_file()?;
        let packs_otherwise = self.compression != Compression::Zlib;
        self.needs_version_3(packs_otherwise, "Non-zlib compression type is only supported with")?;
        if self.backing_file.as_ref().is_some_and(|name| name.is_empty() || name.len() > 1023 || name.contains('\0')) {
            return Err(bad("the backing file's name must have 1 to 1023 bytes"));
        }
        if self.backing_format.as_ref().is_some_and(|name| name.len() > 15) {
            return Err(bad("the backing format's name must have at most 15 bytes"));
        }
        let too_large = || bad(format!("a disk of {} bytes is too large", self.size_bytes));
        let size_bytes = self.size_bytes.checked_next_multiple_of(512).ok_or_else(too_large)?;
        let geometry = Geometry {
            version: self.version,
            size_bytes,
            cluster_bits: self.cluster_size.trailing_zeros(),
            refcount_order: self.refcount_bits.trailing_zeros(),
            has_backing: self.backing_file.is_some(),
            extended_l2: self.extended_l2,
            data_file: self.data_file.is_some(),
        };
        if size_bytes > i64::MAX as u64 || geometry.l1_entries() > 4 << 20 {
            let what = "The image size is too large for file format 'qcow2' (try using a larger cluster size)";
            return Err(bad(what));
        }
        Ok(geometry)
    }
}

/// The places in a new image, in clusters: header, refcount table, refcount blocks, L1 table.
struct Layout {
    table_clusters: u64,
    blocks: u64,
    l1_clusters: u64,
}

impl Layout {
    fn of(geometry: &Geometry) -> Self {
        let l1_clusters = geometry.clusters_for(geometry.l1_entries().saturating_mul(8));
        let (mut table_clusters, mut blocks) = (1u64, 1u64);
        loop {
            let layout = Self { table_clusters, blocks, l1_clusters };
            let blocks_needed = geometry.block_of(layout.end().saturating_sub(1)).saturating_add(1);
            let table_needed = geometry.clusters_for(blocks_needed.saturating_mul(8));
            if blocks_needed <= blocks && table_needed <= table_clusters {
                return layout;
            }
            (table_clusters, blocks) = (table_needed.max(table_clusters), blocks_needed.max(blocks));
        }
    }

    fn first_block(&self) -> u64 {
        self.table_clusters.saturating_add(1)
    }

    fn l1(&self) -> u64 {
        self.first_block().saturating_add(self.blocks)
    }

    fn end(&self) -> u64 {
        self.l1().saturating_add(self.l1_clusters)
    }
}

/// Makes an image in a file that exists and is empty; durable when this returns.
pub async fn create(io: &MetaIo, options: &CreateOptions) -> Result<()> {
    let geometry = options.check()?;
    let layout = Layout::of(&geometry);
    let header = header_cluster(options, &geometry, &layout)?;
    // Make sure that we would open what we write.
    let mut whole = header.clone();
    whole.resize(usize::try_from(geometry.cluster_bytes()).unwrap_or(header.len()), 0);
    Header::parse(&whole, "the new image", true)?;
    debug_assert!(geometry.start_of(layout.end()) < MAX_FILE_BYTES);

    let failed = |error| Error::with_source(ErrorKind::Io, "cannot write the new image", error);
    write_tables(io, &geometry, &layout).await.map_err(failed)?;
    io.write(0, AlignedBuf::copy_of(&whole)).await.map_err(failed)?;
    io.flush().await.map_err(failed)
}

/// Returns the size of the L1 table, in whole sectors.
fn l1_bytes(geometry: &Geometry) -> u64 {
    geometry.l1_entries().saturating_mul(8).next_multiple_of(512)
}

async fn write_tables(io: &MetaIo, geometry: &Geometry, layout: &Layout) -> block::IoResult {
    // The L1 table stays like this. As with qemu the file ends behind its last entry.
    let l1_end = geometry.start_of(layout.l1()).saturating_add(l1_bytes(geometry));
    let (start, end) = (geometry.cluster_bytes(), l1_end);
    io.write_zeroes(start, end.saturating_sub(start), true).await?;
    let entries = usize::try_from(geometry.start_of(layout.table_clusters) / 8).unwrap_or(0);
    let mut refcounts = Refcounts::new(*geometry, vec![0; entries], geometry.cluster_bytes(), 0);
    for block in 0..layout.blocks {
        refcounts.add_block(block, geometry.start_of(layout.first_block().saturating_add(block)));
        let end = geometry.block_end(block).min(layout.end());
        for cluster in geometry.block_start(block)..end {
            refcounts.set(cluster, 1).map_err(|_| block::IoError::EIO)?;
        }
    }
    let writes = refcounts.begin_writing();
    for piece in writes.blocks.into_iter().chain(writes.entries) {
        io.write(piece.offset, AlignedBuf::copy_of(&piece.bytes)).await?;
    }
    Ok(())
}

fn header_cluster(options: &CreateOptions, geometry: &Geometry, layout: &Layout) -> Result<Vec<u8>> {
    let backing = os_name(options.backing_file.as_deref().unwrap_or("")).into_vec();
    let names = feature_names();
    let cluster_bytes = usize::try_from(geometry.cluster_bytes()).unwrap_or(0);
    // The names are a courtesy: with small clusters they may not fit.
    for with_names in [true, false] {
        let names = (with_names && options.version == 3).then_some(&names[..]);
        let extensions = extensions(options, names);
        let header_bytes = if options.version == 2 { 72 } else { HEADER_BYTES };
        let backing_offset = (header_bytes as usize).saturating_add(extensions.len());
        if backing_offset.saturating_add(backing.len()) > cluster_bytes {
            continue;
        }
        let backing_offset = if backing.is_empty() { 0 } else { backing_offset as u64 };
        let mut header = fields(options, geometry, layout, backing_offset);
        header.extend(extensions);
        header.extend(backing);
        return Ok(header);
    }
    Err(bad(format!("the backing file's name does not fit a cluster of {cluster_bytes} bytes")))
}

fn fields(options: &CreateOptions, geometry: &Geometry, layout: &Layout, backing_offset: u64) -> Vec<u8> {
    let mut header = Vec::new();
    let backing_bytes = options.backing_file.as_deref().map_or(0, |name| os_name(name).len()) as u32;
    header.extend(b"QFI\xfb");
    header.extend(options.version.to_be_bytes());
    header.extend(backing_offset.to_be_bytes());
    header.extend(backing_bytes.to_be_bytes());
    header.extend(geometry.cluster_bits.to_be_bytes());
    header.extend(geometry.size_bytes.to_be_bytes());
    header.extend(0u32.to_be_bytes()); // not encrypted
    header.extend((geometry.l1_entries() as u32).to_be_bytes());
    let l1_offset = if layout.l1_clusters == 0 { 0 } else { geometry.start_of(layout.l1()) };
    header.extend(l1_offset.to_be_bytes());
    header.extend(geometry.cluster_bytes().to_be_bytes()); // the refcount table
    header.extend((layout.table_clusters as u32).to_be_bytes());
    header.extend(0u32.to_be_bytes()); // no snapshots
    header.extend(0u64.to_be_bytes());
    if options.version == 3 {
        let zstd = options.compression == Compression::Zstd;
        let mut incompatible = if zstd { INCOMPATIBLE_COMPRESSION } else { 0 };
        if options.extended_l2 {
            incompatible |= INCOMPATIBLE_EXTENDED_L2;
        }
        if options.data_file.is_some() {
            incompatible |= INCOMPATIBLE_DATA_FILE;
        }
        let autoclear = if options.data_file_raw { AUTOCLEAR_DATA_FILE_RAW } else { 0 };
        let compatible = if options.lazy_refcounts { COMPATIBLE_LAZY_REFCOUNTS } else { 0 };
        header.extend(incompatible.to_be_bytes());
        header.extend(compatible.to_be_bytes());
        header.extend(autoclear.to_be_bytes());
        header.extend(geometry.refcount_order.to_be_bytes());
        header.extend(HEADER_BYTES.to_be_bytes());
        header.extend([u8::from(zstd), 0, 0, 0, 0, 0, 0, 0]);
    }
    header
}

fn extensions(options: &CreateOptions, names: Option<&[u8]>) -> Vec<u8> {
    let format = options.backing_format.as_ref().map(|format| (EXTENSION_BACKING_FORMAT, format.as_bytes()));
    let data_file = options.data_file.as_deref().map(os_name);
    let data_file = data_file.as_ref().map(|name| (EXTENSION_DATA_FILE, name.as_bytes()));
    let names = names.map(|names| (EXTENSION_FEATURE_NAMES, names));
    let end = (EXTENSION_END, &[][..]);
    let mut bytes = Vec::new();
    for (kind, data) in format.into_iter().chain(data_file).chain(names).chain([end]) {
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    bytes
}

pub(crate) fn feature_names() -> Vec<u8> {
    let mut table = Vec::new();
    for (kind, bit, name) in FEATURES {
        let row_end = table.len().saturating_add(FEATURE_ROW_BYTES);
        table.extend([kind, bit]);
        table.extend(name.as_bytes());
        table.resize(row_end, 0);
    }
    table
}
