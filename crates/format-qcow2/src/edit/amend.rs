//! Other options for an image that exists: version, width of refcounts, lazy refcounts, size.

use super::compact::compact;
use super::header_layout::{V2_HEADER_BYTES, V3_HEADER_BYTES, relaid};
use super::resize::ResizeOptions;
use super::tree::Steps;
use super::{Edit, EditWatch};
use crate::layout::entry::{COPIED, Cluster};
use crate::layout::file_text::os_name;
use crate::layout::header::{
    AUTOCLEAR_DATA_FILE_RAW, COMPATIBLE_LAZY_REFCOUNTS, Compression, EXTENSION_DATA_FILE, INCOMPATIBLE_COMPRESSION,
};
use crate::layout::refcount_entry::max_count;
use block::{ErrorKind, File, IoResult, MetaIo, Result};
use memory::AlignedBuf;
use std::collections::HashMap;
use std::os::unix::ffi::OsStringExt;

/// Version 2 counts in 16 bits.
const VERSION_2_REFCOUNT_ORDER: u32 = 4;
const OFFSET_VERSION: usize = 4;
const OFFSET_INCOMPATIBLE: usize = 72;
const OFFSET_COMPATIBLE: usize = 80;
const OFFSET_REFCOUNT_ORDER: usize = 96;
const OFFSET_HEADER_BYTES: usize = 100;
const OFFSET_COMPRESSION: usize = 104;
const MAX_DATA_FILE_NAME_BYTES: usize = 1023;

/// The options to change; those that are `None` stay.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct AmendOptions {
    /// 2 (compat=0.10) or 3 (compat=1.1).
    pub version: Option<u32>,
    /// 1, 2, 4 ... 64.
    pub refcount_bits: Option<u32>,
    /// Allows writers to postpone refcounts, under the dirty bit.
    pub lazy_refcounts: Option<bool>,
    /// Another size, shrinking allowed.
    pub resize: Option<ResizeOptions>,
    /// Another name of the external data file, of an image that has one. The file stays as it is.
    pub data_file: Option<String>,
    /// Whether the external data file can be read as a raw image: only `false` makes a difference.
    pub data_file_raw: Option<bool>,
}

impl AmendOptions {
    /// Changes some options: `AmendOptions::default().with(|options| options.version = Some(3))`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Changes options of an image that is not in use. A disk becomes shorter as by [`super::resize::resize`].
pub async fn amend(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    options: &AmendOptions,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut edit = Edit::open(io, file, name, watch).await?;
    let becomes_shorter = options.resize.as_ref().is_some_and(|resize| resize.size_bytes < edit.header.size_bytes);
    let done = edit.amend(options).await;
    let freed = edit.end_freeing(done).await?;
    if becomes_shorter {
        compact(io, file, name, freed, watch).await?;
    }
    Ok(())
}

impl Edit<'_, '_> {
    async fn amend(&mut self, options: &AmendOptions) -> Result<()> {
        let version = options.version.unwrap_or(self.header.version);
        let refcount_bits = options.refcount_bits.unwrap_or(self.header.refcount_bits);
        self.check_amend(options, version, refcount_bits)?;
        self.check_data_file(options)?;
        if refcount_bits != self.header.refcount_bits {
            self.refs.change_width(refcount_bits.trailing_zeros());
        }
        if let Some(resize) = &options.resize {
            self.resize(resize).await?;
        }
        if version < self.header.version {
            if options.resize.as_ref().is_some_and(|resize| resize.size_bytes != self.header.size_bytes) {
                return self.refuse(ErrorKind::Unsupported, "change the size first, and compat=0.10 then");
            }
            self.write_zeros_out().await?;
        }
        if version != self.header.version {
            self.change_version(version, refcount_bits)?;
        }
        if version >= 3 {
            self.put_u32(OFFSET_REFCOUNT_ORDER, refcount_bits.trailing_zeros());
            let mut features = self.header.compatible_features;
            if let Some(lazy) = options.lazy_refcounts {
                features &= !COMPATIBLE_LAZY_REFCOUNTS;
                features |= u64::from(lazy).wrapping_mul(COMPATIBLE_LAZY_REFCOUNTS);
            }
            self.put_u64(OFFSET_COMPATIBLE, features);
        }
        self.amend_data_file(options)?;
        self.tell(1, 1)
    }

    fn check_amend(&self, options: &AmendOptions, version: u32, refcount_bits: u32) -> Result<()> {
        let bad = |what: &str| self.refuse(ErrorKind::BadOption, what);
        if !(2..=3).contains(&version) {
            return bad("Unknown compatibility level: 0.10 and 1.1 are known");
        }
        if !refcount_bits.is_power_of_two() || refcount_bits > 64 {
            return bad("Refcount width must be a power of two and may not exceed 64 bits");
        }
        if version >= 3 {
            return Ok(());
        }
        if options.lazy_refcounts == Some(true) {
            return bad(
                "Lazy refcounts only supported with compatibility level 1.1 and above (use compat=1.1 or greater)",
            );
        }
        if refcount_bits != 16 {
            return bad("compat=0.10 requires refcount_bits=16");
        }
        if self.header.version < 3 {
            return Ok(());
        }
        if self.header.incompatible_features & !INCOMPATIBLE_COMPRESSION != 0 {
            return bad("Cannot downgrade an image with incompatible features set");
        }
        if self.header.compression != Compression::Zlib && self.has_compressed {
            return bad("it holds clusters compressed with zstd, which compat=0.10 cannot say; convert it instead");
        }
        if self.has_bitmaps() {
            return bad("compat=0.10 has no persistent bitmaps; remove them first (bitmap --remove)");
        }
        let prevents = |row: &crate::layout::snapshot::Row| {
            row.snapshot.vm_state_bytes > u64::from(u32::MAX) || row.snapshot.disk_bytes != self.header.size_bytes
        };
        match self.rows.iter().any(prevents) {
            true => bad("Internal snapshots prevent downgrade of image"),
            false => Ok(()),
        }
    }

    fn check_data_file(&self, options: &AmendOptions) -> Result<()> {
        let bad = |what: &str| self.refuse(ErrorKind::BadOption, what);
        match options.data_file.as_deref() {
            Some(_) if !self.header.has_data_file() => {
                return bad("data-file can only be set for images that use an external data file");
            }
            Some(_) if options.resize.as_ref().is_some_and(|resize| resize.size_bytes != self.header.size_bytes) => {
                return self.refuse(ErrorKind::Unsupported, "change the size first, and the data file then");
            }
            Some("") => return bad("an image whose data file has no name could not be opened here; name another one"),
            Some(name) if os_name(name).len() > MAX_DATA_FILE_NAME_BYTES || name.contains('\0') => {
                return bad("the data file's name must have 1 to 1023 bytes");
            }
            _ => {}
        }
        match options.data_file_raw {
            Some(true) if !self.header.data_file_is_raw() => bad("data-file-raw cannot be set on existing images"),
            _ => Ok(()),
        }
    }

    fn amend_data_file(&mut self, options: &AmendOptions) -> Result<()> {
        let no_longer_raw = options.data_file_raw == Some(false) && self.header.has_data_file();
        if !no_longer_raw && options.data_file.is_none() {
            // The header may have become one of version 2, which says less.
            return Ok(());
        }
        let mut header = self.header_edit()?;
        if no_longer_raw {
            header.set_autoclear(header.autoclear() & !AUTOCLEAR_DATA_FILE_RAW);
        }
        if let Some(name) = &options.data_file {
            header.set_extension(EXTENSION_DATA_FILE, Some(os_name(name).into_vec()));
        }
        header.put_into(&mut self.first_cluster)
    }

    fn change_version(&mut self, version: u32, refcount_bits: u32) -> Result<()> {
        let old_bytes = match self.header.version {
            2 => V2_HEADER_BYTES,
            _ => usize::try_from(self.header.header_bytes).unwrap_or(V3_HEADER_BYTES),
        };
        let mut fields = self.first_cluster.get(..V2_HEADER_BYTES).unwrap_or_default().to_vec();
        if version >= 3 {
            fields.resize(V3_HEADER_BYTES, 0);
        }
        let Some(cluster) = relaid(&self.first_cluster, old_bytes, &fields) else {
            let what = "its header has no room for the other version's fields";
            return self.refuse(ErrorKind::Unsupported, what);
        };
        self.first_cluster = cluster;
        self.put_u32(OFFSET_VERSION, version);
        if version >= 3 {
            let zstd = self.header.compression == Compression::Zstd;
            self.put_u64(OFFSET_INCOMPATIBLE, if zstd { INCOMPATIBLE_COMPRESSION } else { 0 });
            self.put_u32(OFFSET_REFCOUNT_ORDER, refcount_bits.trailing_zeros());
            self.put_u32(OFFSET_HEADER_BYTES, V3_HEADER_BYTES as u32);
            self.put_u32(OFFSET_COMPRESSION, 0);
        }
        Ok(())
    }

    /// Replaces flags "reads as zeros", which version 2 lacks. Without a layer below, the cluster becomes unallocated.
    /// Above a backing file, a cluster of zeros is needed; one such cluster serves many entries.
    async fn write_zeros_out(&mut self) -> Result<()> {
        let mut l1s = vec![(self.header.l1_offset, self.header.l1_entries)];
        l1s.extend(self.rows.iter().map(|row| (row.l1_offset, row.l1_entries)));
        let total = l1s.iter().fold(0usize, |sum, (_, count)| sum.saturating_add(*count as usize));
        let total = total.saturating_add(self.header.l1_entries as usize);
        let mut steps = Steps::new(total);
        let mut moved = HashMap::new();
        let mut zeros = None;
        let mut active = Vec::new();
        for (number, (offset, count)) in l1s.into_iter().enumerate() {
            let old = self.read_l1(offset, count).await.map_err(|error| self.failed(error))?;
            let mut l1 = old.clone();
            for raw in &mut l1 {
                if let Some(offset) = self.l2_offset(*raw) {
                    let place = match moved.get(&offset) {
                        Some(place) => Ok(*place),
                        None => self.without_zero_flags(offset, &mut zeros).await,
                    };
                    let place = place.map_err(|error| self.failed(error))?;
                    moved.insert(offset, place);
                    // The flag stays: the new table has as many references as the old one had.
                    *raw = (*raw & COPIED) | place;
                }
                steps.one(self)?;
            }
            match number.checked_sub(1) {
                None => active = l1,
                Some(row) if l1 != old => {
                    self.replace_l1(row, &l1).await.map_err(|error| self.failed(error))?;
                }
                Some(_) => {}
            }
        }
        // A cluster of zeros with only one reference gets the flag "refcount is exactly one".
        self.retag(&mut active, 1, &mut steps).await?;
        let done = async {
            self.set_l1(&active).await?;
            self.set_rows().await
        };
        done.await.map_err(|error| self.failed(error))
    }

    async fn replace_l1(&mut self, row: usize, l1: &[u64]) -> IoResult {
        let bytes: Vec<u8> = l1.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let offset = self.add_table(&bytes, 1).await?;
        if let Some(row) = self.rows.get_mut(row) {
            let (old, bytes) = (row.l1_offset, u64::from(row.l1_entries).saturating_mul(8));
            row.l1_offset = offset;
            self.drop_table(old, bytes).await?;
        }
        Ok(())
    }

    /// Writes a copy of an L2 table without the flags that version 2 lacks, if it has any. Returns the place of the
    /// table.
    async fn without_zero_flags(&mut self, offset: u64, zeros: &mut Option<u64>) -> IoResult<u64> {
        let mut l2 = self.read_l2(offset).await?;
        let references = self.refs.get(self.geometry.cluster_of(offset)).await?;
        let mut changed = false;
        for word in &mut l2 {
            let old = self.decode(*word)?;
            if !matches!(old, Cluster::Zero | Cluster::ZeroAllocated { .. }) {
                continue;
            }
            changed = true;
            self.refs.lower(old.host_clusters(&self.geometry), references).await?;
            *word = match self.geometry.has_backing {
                true => self.zero_cluster(references, zeros).await?,
                false => 0,
            };
        }
        if !changed {
            return Ok(offset);
        }
        let place = self.add_l2(&l2, references).await?;
        self.refs.lower(self.cluster_at(offset), references).await?;
        Ok(place)
    }

    /// Returns a cluster of zeros, with `references` more references to it.
    async fn zero_cluster(&mut self, references: u64, zeros: &mut Option<u64>) -> IoResult<u64> {
        if let Some(cluster) = *zeros {
            let count = self.refs.get(cluster).await?;
            if count.saturating_add(references) <= max_count(VERSION_2_REFCOUNT_ORDER) {
                self.refs.raise(cluster..cluster.saturating_add(1), references).await?;
                return Ok(self.geometry.start_of(cluster));
            }
        }
        let cluster = self.refs.allocate(1, references).await?;
        let length = usize::try_from(self.geometry.cluster_bytes()).unwrap_or(0);
        self.io.write(self.geometry.start_of(cluster), AlignedBuf::zeroed(length)).await?;
        *zeros = Some(cluster);
        Ok(self.geometry.start_of(cluster))
    }
}
