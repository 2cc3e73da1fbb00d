//! Changes to an image that is not in use, each made by one write of the header's first sector.
//!
//! An edit writes all that it needs to unused space: new tables, new refcount blocks, a new refcount table. Nothing in
//! the image refers to them. Then one sector of the header is written, and it refers to the new structure. A power cut
//! leaves the image before or the image after, without even a leak.

pub(crate) mod amend;
pub(crate) mod bitmaps;
pub(crate) mod compact;
pub(crate) mod create;
mod cut;
mod data_file;
pub(crate) mod header_edit;
mod header_layout;
mod header_switch;
mod last_cluster;
pub(crate) mod look_first;
pub(crate) mod measure;
pub(crate) mod preallocate;
pub(crate) mod refcounts;
pub(crate) mod resize;
pub(crate) mod snapshots;
mod tree;
pub(crate) mod vm_state;

use crate::check::repair_at_open::repair_if_dirty;
use crate::edit::header_edit::HeaderEdit;
use crate::layout::entry::entries;
use crate::layout::geometry::Geometry;
use crate::layout::header::read_first_cluster;
use crate::layout::header::{HEADER_SECTOR_BYTES, Header, OFFSET_AUTOCLEAR, OFFSET_REFCOUNT_TABLE, OFFSET_SNAPSHOTS};
use crate::layout::snapshot::{Row, read_rows, rows_bytes};
use block::{Error, ErrorKind, File, IoError, IoErrorKind, IoResult, MetaIo, PastEnd, Result};
use data_file::DataChange;
use header_switch::{Failed, switch_header};
use memory::AlignedBuf;
use refcounts::Refs;
use std::ops::Range;

const OFFSET_SIZE: usize = 24;
const OFFSET_L1_ENTRIES: usize = 36;
const OFFSET_L1: usize = 40;
/// Persistent bitmaps are consistent.
const AUTOCLEAR_BITMAPS: u64 = 1;
/// The external data file reads as a raw image.
const AUTOCLEAR_RAW_DATA: u64 = 2;

/// A callback that gets the steps done and their total. It returns false to give up. Then the image is unchanged; but
/// if the disk has become shorter already, only its file is longer than necessary.
pub type EditWatch<'a> = dyn FnMut(u64, u64) -> bool + 'a;

/// A moment in an edit: before all changes, or after all but those of the refcounts' own places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Before,
    After,
}

/// An image that is being changed.
pub(crate) struct Edit<'a, 'w> {
    pub(crate) io: &'a MetaIo,
    pub(crate) name: &'a str,
    pub(crate) header: Header,
    pub(crate) geometry: Geometry,
    /// The first cluster, as it will be.
    pub(crate) first_cluster: Vec<u8>,
    /// The first cluster as it is.
    old_cluster: Vec<u8>,
    pub(crate) refs: Refs<'a>,
    pub(crate) rows: Vec<Row>,
    rows_bytes: u64,
    file_bytes: u64,
    can_grow: bool,
    can_discard: bool,
    data_change: DataChange,
    file: &'a dyn File,
    /// Clusters that edits have freed, so that nothing leads there: in order and apart.
    nobodys: Vec<Range<u64>>,
    /// Whether the check of all references has found compressed clusters.
    pub(crate) has_compressed: bool,
    /// Somebody still reads by the old tables: what the change frees keeps its contents.
    pub(crate) keeps_freed: bool,
    watch: &'a mut EditWatch<'w>,
}

impl<'a, 'w> Edit<'a, 'w> {
    /// Reads the structures that every change needs, and checks all references first. Writes nothing, unless the image
    /// is dirty and its refcounts have to be repaired.
    pub(crate) async fn open(
        io: &'a MetaIo,
        file: &'a dyn File,
        name: &'a str,
        watch: &'a mut EditWatch<'w>,
    ) -> Result<Self> {
        let mut edit = Self::open_again(io, file, name, watch).await?;
        edit.look_first().await?;
        Ok(edit)
    }

    /// As [`Edit::open`], after an edit that has checked all references.
    pub(crate) async fn open_again(
        io: &'a MetaIo,
        file: &'a dyn File,
        name: &'a str,
        watch: &'a mut EditWatch<'w>,
    ) -> Result<Self> {
        let failed =
            |what: &str, error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the {what}"), error);
        if file.info().read_only {
            return Err(Error::new(ErrorKind::BadOption, format!("'{name}' was opened for reading only")));
        }
        repair_if_dirty(io, file, name).await?;
        let cluster = read_first_cluster(io).await.map_err(|error| failed("header", error))?.to_vec();
        let header = Header::parse(&cluster, name, true)?;
        let geometry = header.geometry();
        let table_bytes = geometry.start_of(u64::from(header.refcount_table_clusters));
        let table_bytes = usize::try_from(table_bytes).unwrap_or(0);
        let table = io.read(header.refcount_table_offset, table_bytes, PastEnd::Fails).await;
        let table: Vec<u64> = entries(&table.map_err(|error| failed("refcount table", error))?).collect();
        let file_bytes = file.length_bytes()?;
        let mut refs = Refs::new(io, geometry, table, header.refcount_table_offset, file_bytes);
        let can_grow = file.info().can_grow && !file.info().block_device;
        if !can_grow {
            refs.within_the_file(file_bytes);
        }
        let (rows, rows_bytes) = read_rows(io, &header, name).await?;
        let l1_bytes =
            rows.iter().fold(0u64, |sum, row| sum.saturating_add(u64::from(row.l1_entries).saturating_mul(8)));
        if l1_bytes > file_bytes {
            let what = format!("'{name}': its snapshots claim L1 tables of {l1_bytes} bytes, more than the file has");
            return Err(Error::new(ErrorKind::BadImage, what));
        }
        let old_cluster = cluster.clone();
        let mut edit = Self {
            io,
            name,
            geometry,
            first_cluster: cluster,
            old_cluster,
            refs,
            rows,
            rows_bytes,
            file_bytes,
            can_grow,
            can_discard: file.info().can_discard,
            data_change: DataChange::default(),
            file,
            nobodys: Vec::new(),
            has_compressed: false,
            keeps_freed: false,
            header,
            watch,
        };
        edit.check_tables(When::Before).await?;
        edit.clear_unknown_autoclear();
        Ok(edit)
    }

    /// Turns the error of a step into words for a person.
    pub(crate) fn failed(&self, error: IoError) -> Error {
        let name = self.name;
        match error.kind() {
            IoErrorKind::Corrupt => Error::new(
                ErrorKind::BadImage,
                format!("'{name}': its tables and refcounts contradict each other; check it first (check -r all)"),
            ),
            IoErrorKind::OutOfRange => {
                let bits = self.header.refcount_bits;
                Error::new(ErrorKind::Unsupported, format!("'{name}': a reference count does not fit {bits} bits"))
            }
            _ => Error::with_source(ErrorKind::Io, format!("'{name}': cannot change the image"), error),
        }
    }

    pub(crate) fn refuse<T>(&self, kind: ErrorKind, what: impl std::fmt::Display) -> Result<T> {
        Err(Error::new(kind, format!("'{}': {what}", self.name)))
    }

    /// Fails if a table lies in space that counts as free. Before the change, new tables would be put there. After it,
    /// that space would be given back to the host. Such an image is damaged: refcounts are wrong, or data refer to a
    /// table.
    async fn check_tables(&mut self, when: When) -> Result<()> {
        let header = match when {
            When::Before => self.header.clone(),
            When::After => Header::parse(&self.first_cluster, self.name, true)?,
        };
        let checked = self.check_tables_of(&header, when).await;
        checked.map_err(|error| self.failed(error))
    }

    async fn check_tables_of(&mut self, header: &Header, when: When) -> IoResult {
        let geometry = self.geometry;
        let clusters = |offset: u64, bytes: u64| {
            let first = geometry.cluster_of(offset);
            first..first.saturating_add(geometry.clusters_for(bytes))
        };
        let rows_bytes = match header.snapshots_offset == self.header.snapshots_offset {
            true => self.rows_bytes,
            false => rows_bytes(&self.rows).len() as u64,
        };
        let refcount_table_bytes = geometry.start_of(u64::from(header.refcount_table_clusters));
        let mut tables: Vec<Range<u64>> = vec![
            0..1,
            clusters(header.refcount_table_offset, refcount_table_bytes),
            clusters(header.snapshots_offset, rows_bytes),
        ];
        tables.extend(self.refs.blocks_in_place().map(|offset| clusters(offset, 1)));
        let space = crate::layout::bitmap::space(self.io, header, &self.first_cluster, self.name).await;
        let space = space.map_err(|_| IoError::new(IoErrorKind::Corrupt))?;
        tables.extend(space.into_iter().map(|(offset, bytes)| clusters(offset, bytes)));
        self.check_used(tables, when).await?;
        let mut l1s = vec![(header.l1_offset, header.l1_entries)];
        l1s.extend(self.rows.iter().map(|row| (row.l1_offset, row.l1_entries)));
        l1s.sort_unstable();
        l1s.dedup();
        // One table at a time: an image may claim many tables, and all may be the same one.
        for (offset, count) in l1s {
            let mut tables = vec![clusters(offset, u64::from(count).saturating_mul(8))];
            let l1 = self.read_l1(offset, count).await?;
            tables.extend(l1.iter().filter_map(|raw| self.l2_offset(*raw)).map(|offset| clusters(offset, 1)));
            self.check_used(tables, when).await?;
        }
        Ok(())
    }

    async fn check_used(&mut self, mut tables: Vec<Range<u64>>, when: When) -> IoResult {
        tables.sort_unstable_by_key(|range| range.start);
        tables.dedup();
        for range in tables {
            match when {
                When::Before => self.refs.require_used(range).await?,
                When::After => self.refs.require_kept(range).await?,
            }
            // Refcount changes are not undone here: blocks would find new places, and their old ones are among
            // `tables`.
        }
        Ok(())
    }

    /// Structures that we do not know are not kept up to date (specification, "Feature bits").
    fn clear_unknown_autoclear(&mut self) {
        if self.header.version >= 3 {
            let kept = self.header.autoclear_features & (AUTOCLEAR_BITMAPS | AUTOCLEAR_RAW_DATA);
            self.put_u64(OFFSET_AUTOCLEAR, kept);
        }
    }

    pub(crate) fn has_bitmaps(&self) -> bool {
        self.header.autoclear_features & AUTOCLEAR_BITMAPS != 0
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        if let Some(field) = self.first_cluster.get_mut(offset..offset.saturating_add(bytes.len())) {
            field.copy_from_slice(bytes);
        }
    }

    pub(crate) fn put_u32(&mut self, offset: usize, value: u32) {
        self.put(offset, &value.to_be_bytes());
    }

    pub(crate) fn put_u64(&mut self, offset: usize, value: u64) {
        self.put(offset, &value.to_be_bytes());
    }

    /// Returns an edit of the new first cluster, for changes that reach beyond its fields.
    pub(crate) fn header_edit(&self) -> Result<HeaderEdit> {
        HeaderEdit::of_changed(&self.first_cluster, &self.old_cluster, self.header.version, self.name)
    }

    /// Sets the size that the disk will have.
    pub(crate) fn set_size(&mut self, size_bytes: u64) {
        self.put_u64(OFFSET_SIZE, size_bytes);
    }

    /// Shows steps done; fails once the user gave up.
    pub(crate) fn tell(&mut self, done: u64, total: u64) -> Result<()> {
        match (self.watch)(done, total) {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Io, "interrupted")),
        }
    }

    /// Writes a table to new space; `references` is how many tables will name it.
    pub(crate) async fn add_table(&mut self, bytes: &[u8], references: u64) -> IoResult<u64> {
        let count = self.geometry.clusters_for(bytes.len() as u64);
        let first = self.refs.allocate(count, references).await?;
        let offset = self.geometry.start_of(first);
        let mut whole = bytes.to_vec();
        whole.resize(usize::try_from(self.geometry.start_of(count)).unwrap_or(whole.len()), 0);
        self.io.write(offset, AlignedBuf::copy_of(&whole)).await?;
        self.refs.relieve().await?;
        Ok(offset)
    }

    /// Drops one reference to a table of `bytes` at `offset`.
    pub(crate) async fn drop_table(&mut self, offset: u64, bytes: u64) -> IoResult {
        let first = self.geometry.cluster_of(offset);
        self.refs.lower(first..first.saturating_add(self.geometry.clusters_for(bytes)), 1).await
    }

    /// Gives the disk another L1 table.
    pub(crate) async fn set_l1(&mut self, l1: &[u64]) -> IoResult {
        let old_bytes = u64::from(self.header.l1_entries).saturating_mul(8);
        let bytes: Vec<u8> = l1.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let offset = if bytes.is_empty() { 0 } else { self.add_table(&bytes, 1).await? };
        self.drop_table(self.header.l1_offset, old_bytes).await?;
        self.put_u32(OFFSET_L1_ENTRIES, l1.len() as u32);
        self.put_u64(OFFSET_L1, offset);
        Ok(())
    }

    /// Gives the image the snapshot table that `rows` make.
    pub(crate) async fn set_rows(&mut self) -> IoResult {
        let bytes = rows_bytes(&self.rows);
        let offset = if bytes.is_empty() { 0 } else { self.add_table(&bytes, 1).await? };
        self.drop_table(self.header.snapshots_offset, self.rows_bytes).await?;
        self.put_u32(OFFSET_SNAPSHOTS, self.rows.len() as u32);
        self.put_u64(OFFSET_SNAPSHOTS.saturating_add(4), offset);
        Ok(())
    }

    /// Makes the prepared change durable, and frees unused space, unless that is kept. Returns the clusters that are
    /// unused.
    pub(crate) async fn commit(mut self) -> Result<Vec<Range<u64>>> {
        let prepared = self.prepare().await;
        if let Err(error) = prepared {
            self.undo().await;
            return Err(error);
        }
        if let Err(failed) = self.switch().await {
            return self.not_switched(failed).await;
        }
        self.cut_data_file().await;
        if self.keeps_freed {
            let freed = cut::joined(self.refs.freed());
            // Only space is lost. What was freed may still be read.
            let _ = self.cut_off_unused(freed.last().map_or(0, |last| last.end)).await;
            return Ok(freed);
        }
        // Only space is lost.
        let _ = self.give_back().await;
        Ok(self.nobodys)
    }

    /// Writes the sector of the header that refers to the prepared structure.
    async fn switch(&mut self) -> Result<(), Failed> {
        let [old, new] = [&self.old_cluster, &self.first_cluster]
            .map(|cluster| cluster.get(..HEADER_SECTOR_BYTES).unwrap_or_default());
        switch_header(self.io, self.name, old, new).await
    }

    /// Frees the prepared space, unless the header may refer to it.
    async fn not_switched<T>(&self, failed: Failed) -> Result<T> {
        if failed.is_undone {
            self.undo().await;
        }
        Err(failed.error)
    }

    /// Writes everything but the sector that switches.
    async fn prepare(&mut self) -> Result<()> {
        self.check_tables(When::After).await?;
        let table = self.refs.finish().await.map_err(|error| self.failed(error))?;
        if let Some(table) = table {
            self.put_u64(OFFSET_REFCOUNT_TABLE, table.offset);
            self.put_u32(OFFSET_REFCOUNT_TABLE.saturating_add(8), table.clusters);
        }
        // Make sure that we could open the new image.
        Header::parse(&self.first_cluster, self.name, true)?;
        let rest = (self.old_cluster.get(HEADER_SECTOR_BYTES..), self.first_cluster.get(HEADER_SECTOR_BYTES..));
        if let (Some(old), Some(new)) = rest
            && old != new
        {
            let written = self.io.write(HEADER_SECTOR_BYTES as u64, AlignedBuf::copy_of(new)).await;
            written.map_err(|error| self.failed(error))?;
        }
        self.flush_data_file().await.map_err(|error| self.failed(error))?;
        self.io.flush().await.map_err(|error| self.failed(error))
    }

    /// Cuts off the space that was added behind the file's end. The image is unchanged.
    pub(crate) async fn undo(&self) {
        self.undo_data_file().await;
        if self.can_grow {
            // Only space is lost.
            let _ = self.io.set_length(self.file_bytes).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use block::block_on;

    #[test]
    fn blocks_of_refcounts_do_not_move_while_it_is_looked_whether_their_places_are_kept() {
        let (storage, io) = fixture::created(1 << 20);
        let file = fixture::file(&storage);
        block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            fixture::fill(&qcow2, &io, 0..1 << 20).await;
            qcow2.close(&io).await.unwrap();
            let mut watch = |_, _| true;
            let mut edit = Edit::open(&io, &*file, fixture::NAME, &mut watch).await.unwrap();
            edit.refs.raise(100..101, 1).await.unwrap();
            edit.refs.have_no_room();
            edit.check_tables(When::After).await.unwrap();
        });
    }
}
