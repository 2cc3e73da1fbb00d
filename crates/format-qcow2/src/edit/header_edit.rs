//! Changing the header of an image that is not open: extensions, the backing file's name, single fields.
//!
//! The header and all its extensions are laid out in the first sector. Only that sector is overwritten, so a power cut
//! leaves the old header or the new one. A backing file's name that does not fit goes to a place in the first cluster
//! that the old header does not use. It is durable there before the first sector refers to it.

use crate::check::repair_at_open::repair_if_dirty;
use crate::edit::header_switch::switch_header;
use crate::layout::bitmap::EXTENSION_BITMAPS;
use crate::layout::extensions::{OFFSET_BACKING, extensions, field_u32, field_u64, header_bytes};
use crate::layout::file_text::os_name;
use crate::layout::header::{
    AUTOCLEAR_DATA_FILE_RAW, EXTENSION_BACKING_FORMAT, EXTENSION_DATA_FILE, EXTENSION_ENCRYPTION, EXTENSION_END,
    EXTENSION_FEATURE_NAMES, HEADER_SECTOR_BYTES, Header, INCOMPATIBLE_DATA_FILE, OFFSET_AUTOCLEAR,
    OFFSET_INCOMPATIBLE, read_first_cluster,
};
use block::{Error, ErrorKind, File, IoError, MetaIo, Result};
use memory::AlignedBuf;
use std::ops::Range;
use std::os::unix::ffi::OsStringExt;

const MAX_BACKING_NAME_BYTES: usize = 1023;
/// Autoclear bits that the changes here do not invalidate: bitmaps, raw external data.
const AUTOCLEAR_KNOWN: u64 = 0b11;

/// The backing file as the header names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backing {
    /// The name of the file.
    pub file: String,
    /// The format of the file.
    pub format: Option<String>,
}

/// Names another backing file, or none, in an image that is not open; durable when this returns. The guest sees other
/// data unless the caller has provided for that. A power cut leaves the old name or the new one. A dirty image is
/// repaired first.
pub async fn set_backing(io: &MetaIo, file: &dyn File, name: &str, backing: Option<&Backing>) -> Result<()> {
    repair_if_dirty(io, file, name).await?;
    let mut edit = HeaderEdit::read(io, name).await?;
    if backing.is_some() && edit.autoclear() & AUTOCLEAR_DATA_FILE_RAW != 0 && edit.has_data_file() {
        let what = format!(
            "'{name}': its external data file can be read as a raw image (data_file_raw), so it cannot have a backing \
             file"
        );
        return Err(Error::new(ErrorKind::BadOption, what));
    }
    edit.set_backing(backing)?;
    edit.write(io).await
}

/// A name outside the first sector: its place, and whole sectors that begin with it.
type FarName = (usize, Vec<u8>);

/// Returns the position of an extension in QEMU's order: extensions that QEMU does not know come last, in their own
/// order.
fn place_of(kind: u32) -> usize {
    const ORDER: [u32; 5] = [
        EXTENSION_BACKING_FORMAT,
        EXTENSION_DATA_FILE,
        EXTENSION_ENCRYPTION,
        EXTENSION_FEATURE_NAMES,
        EXTENSION_BITMAPS,
    ];
    ORDER.iter().position(|known| *known == kind).unwrap_or(ORDER.len())
}

/// A parsed header that can be changed.
pub(crate) struct HeaderEdit {
    name: String,
    cluster_bytes: usize,
    /// The fields in front of the extensions.
    fields: Vec<u8>,
    extensions: Vec<(u32, Vec<u8>)>,
    backing: Vec<u8>,
    /// The first sector as it is on disk.
    on_disk: Vec<u8>,
    /// The part of the first cluster that the header on disk uses.
    in_use: Vec<Range<usize>>,
}

impl HeaderEdit {
    pub(crate) async fn read(io: &MetaIo, name: &str) -> Result<Self> {
        let failed =
            |error: IoError| Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the header"), error);
        let cluster = read_first_cluster(io).await.map_err(failed)?;
        let header = Header::parse(&cluster, name, true)?;
        Self::of_cluster(&cluster, header.version, name)
    }

    /// Reads the header in a first cluster that was checked before.
    pub(crate) fn of_cluster(cluster: &[u8], version: u32, name: &str) -> Result<Self> {
        let damaged = || Error::new(ErrorKind::BadImage, format!("'{name}': the header does not fit its cluster"));
        let header_bytes = header_bytes(cluster, version);
        let fields = cluster.get(..header_bytes).ok_or_else(damaged)?.to_vec();
        let (start, length) = (field_u64(cluster, OFFSET_BACKING) as usize, field_u32(cluster, 16) as usize);
        let name_range = start..start.saturating_add(length);
        let end = if start == 0 { cluster.len() } else { start };
        let (extensions, extensions_end) = extensions(cluster.get(..end).unwrap_or(cluster), header_bytes);
        Ok(Self {
            name: name.to_owned(),
            cluster_bytes: cluster.len(),
            fields,
            extensions,
            backing: if start == 0 {
                Vec::new()
            } else {
                cluster.get(name_range.clone()).ok_or_else(damaged)?.to_vec()
            },
            on_disk: cluster.get(..HEADER_SECTOR_BYTES).ok_or_else(damaged)?.to_vec(),
            in_use: vec![0..extensions_end, name_range],
        })
    }

    /// As [`HeaderEdit::of_cluster`], for a first cluster that was changed since it was read. The header on disk is
    /// that of `on_disk`, and the bytes that it uses must not change.
    pub(crate) fn of_changed(cluster: &[u8], on_disk: &[u8], version: u32, name: &str) -> Result<Self> {
        let Self { in_use, on_disk, .. } = Self::of_cluster(on_disk, version, name)?;
        Ok(Self { in_use, on_disk, ..Self::of_cluster(cluster, version, name)? })
    }

    /// Replaces the extension of this kind. `None` removes it.
    pub(crate) fn set_extension(&mut self, kind: u32, data: Option<Vec<u8>>) {
        self.extensions.retain(|(other, _)| *other != kind);
        self.extensions.extend(data.map(|data| (kind, data)));
    }

    pub(crate) fn set_backing(&mut self, backing: Option<&Backing>) -> Result<()> {
        let file = os_name(backing.map_or("", |backing| backing.file.as_str())).into_vec();
        let format = backing.and_then(|backing| backing.format.as_deref());
        let bad = |what: &str| Err(Error::new(ErrorKind::BadOption, format!("'{}': {what}", self.name)));
        if file.len() > MAX_BACKING_NAME_BYTES || file.contains(&0) {
            return bad("the backing file's name has to be text of at most 1023 bytes");
        }
        if format.is_some_and(|format| format.len() > 15) {
            return bad("the name of the backing format has at most 15 bytes");
        }
        self.backing = file;
        self.set_extension(EXTENSION_BACKING_FORMAT, format.map(|format| format.as_bytes().to_vec()));
        Ok(())
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset.saturating_add(bytes.len());
        if let Some(place) = self.fields.get_mut(offset..end) {
            place.copy_from_slice(bytes);
        }
    }

    /// Returns the autoclear feature bits; none in version 2.
    pub(crate) fn autoclear(&self) -> u64 {
        if self.fields.len() < OFFSET_AUTOCLEAR.saturating_add(8) {
            0
        } else {
            field_u64(&self.fields, OFFSET_AUTOCLEAR)
        }
    }

    fn has_data_file(&self) -> bool {
        field_u64(&self.fields, OFFSET_INCOMPATIBLE) & INCOMPATIBLE_DATA_FILE != 0
    }

    pub(crate) fn set_autoclear(&mut self, bits: u64) {
        self.put(OFFSET_AUTOCLEAR, &bits.to_be_bytes());
    }

    /// Puts the changes into a first cluster in memory.
    pub(crate) fn put_into(mut self, cluster: &mut [u8]) -> Result<()> {
        let (sector, far_name) = self.lay_out()?;
        for (offset, bytes) in far_name.into_iter().chain([(0, sector)]) {
            if let Some(place) = cluster.get_mut(offset..offset.saturating_add(bytes.len())) {
                place.copy_from_slice(&bytes);
            }
        }
        Ok(())
    }

    /// Makes the changes durable, all or none.
    pub(crate) async fn write(mut self, io: &MetaIo) -> Result<()> {
        // A writer clears the autoclear bits that it does not know (specification, "Feature bits").
        self.set_autoclear(self.autoclear() & AUTOCLEAR_KNOWN);
        let (sector, far_name) = self.lay_out()?;
        let name = &self.name;
        let failed =
            |error: IoError| Error::with_source(ErrorKind::Io, format!("'{name}': cannot write the header"), error);
        if let Some((offset, bytes)) = far_name {
            io.write(offset as u64, AlignedBuf::copy_of(&bytes)).await.map_err(failed)?;
            io.flush().await.map_err(failed)?;
        }
        switch_header(io, name, &self.on_disk, &sector).await.map_err(|failed| failed.error)
    }

    /// Lays out the new first sector. If the backing file's name does not fit there, also returns the name and its
    /// place.
    fn lay_out(&mut self) -> Result<(Vec<u8>, Option<FarName>)> {
        self.extensions.sort_by_key(|(kind, _)| place_of(*kind));
        // The names of features help people who see an image from the future. Everything else is more important.
        let mut area = self.extension_area();
        if self.fields.len().saturating_add(area.len()) > HEADER_SECTOR_BYTES {
            self.extensions.retain(|(kind, _)| *kind != EXTENSION_FEATURE_NAMES);
            area = self.extension_area();
        }
        let used = self.fields.len().saturating_add(area.len());
        if used > HEADER_SECTOR_BYTES {
            return Err(self.too_long("the header's extensions"));
        }
        let name_bytes = self.backing.len();
        let (offset, far) = match name_bytes {
            0 => (0, None),
            _ if used.saturating_add(name_bytes) <= HEADER_SECTOR_BYTES => (used, None),
            _ => {
                let offset = self.free_place(name_bytes).ok_or_else(|| self.too_long("the backing file's name"))?;
                let mut bytes = self.backing.clone();
                bytes.resize(name_bytes.next_multiple_of(HEADER_SECTOR_BYTES), 0);
                (offset, Some((offset, bytes)))
            }
        };
        self.put(OFFSET_BACKING, &(offset as u64).to_be_bytes());
        self.put(16, &(u32::try_from(name_bytes).unwrap_or(0)).to_be_bytes());
        let mut sector = self.fields.clone();
        sector.extend(area);
        if far.is_none() {
            sector.extend(&self.backing);
        }
        sector.resize(HEADER_SECTOR_BYTES, 0);
        Ok((sector, far))
    }

    fn too_long(&self, what: &str) -> Error {
        Error::new(ErrorKind::Unsupported, format!("'{}': no room in the first cluster for {what}", self.name))
    }

    fn extension_area(&self) -> Vec<u8> {
        let mut area = Vec::new();
        for (kind, data) in &self.extensions {
            area.extend(kind.to_be_bytes());
            area.extend((u32::try_from(data.len()).unwrap_or(0)).to_be_bytes());
            area.extend(data);
            area.resize(area.len().next_multiple_of(8), 0);
        }
        area.extend(EXTENSION_END.to_be_bytes());
        area.extend([0; 4]);
        area
    }

    /// Finds whole sectors behind the first that the header on disk does not use.
    fn free_place(&self, length_bytes: usize) -> Option<usize> {
        let length = length_bytes.next_multiple_of(HEADER_SECTOR_BYTES);
        let is_free = |start: usize| {
            let sectors = start..start.saturating_add(length);
            self.in_use.iter().all(|used| {
                let end = used.end.next_multiple_of(HEADER_SECTOR_BYTES);
                used.is_empty() || end <= sectors.start || sectors.end <= used.start
            })
        };
        let last = self.cluster_bytes.checked_sub(length)?;
        (HEADER_SECTOR_BYTES..=last).step_by(HEADER_SECTOR_BYTES).find(|start| is_free(*start))
    }
}
