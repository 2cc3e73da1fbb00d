//! Taking, applying and deleting internal snapshots.

use super::tree::{Direction, Steps};
use super::vm_state::VmState;
use super::{Edit, EditWatch};
use crate::layout::geometry::Geometry;
use crate::layout::header::{MAX_L1_BYTES, MAX_SNAPSHOTS};
use crate::layout::snapshot::{Row, Snapshot, SnapshotName, TABLE_BYTES_MAX, find, rows_bytes};
use block::{ErrorKind, File, MetaIo, Result};
use std::ops::Range;

/// Longest name and id that a row can hold.
const NAME_BYTES_MAX: usize = u16::MAX as usize;
/// The most bytes of a row without its name.
const ROW_BYTES_MOST: usize = 128;

/// The properties of a new snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct NewSnapshot {
    /// Its name; need not be unique.
    pub name: String,
    /// When it is taken: seconds since 1970.
    pub date_seconds: u32,
    /// The nanoseconds of that time.
    pub date_nanoseconds: u32,
}

impl NewSnapshot {
    /// Makes a snapshot of this name, taken in 1970.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Changes some properties: `NewSnapshot::new("before").with(|new| new.date_seconds = 1_800_000_000)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Takes a snapshot of the disk. The image must not be in use.
pub async fn create_snapshot(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    new: &NewSnapshot,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut edit = Edit::of_snapshots(io, file, name, watch).await?;
    let done = edit.create_snapshot(new, None).await;
    edit.end(done).await
}

/// Takes a snapshot that also holds the state of a machine: all of it, or nothing. The image must not be in use.
pub async fn create_snapshot_with_state(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    new: &NewSnapshot,
    state: &mut VmState<'_>,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut edit = Edit::of_snapshots(io, file, name, watch).await?;
    let done = edit.create_snapshot(new, Some(state)).await;
    edit.end(done).await
}

/// Reverts the disk to the snapshot `which`. The image must not be in use.
pub async fn apply_snapshot(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    which: &SnapshotName,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut edit = Edit::of_snapshots(io, file, name, watch).await?;
    let done = edit.apply_snapshot(which).await;
    edit.end(done).await
}

/// Deletes the snapshot `which`. The image must not be in use.
pub async fn delete_snapshot(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    which: &SnapshotName,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut edit = Edit::of_snapshots(io, file, name, watch).await?;
    let done = edit.delete_snapshot(which).await;
    edit.end(done).await
}

/// A change of the snapshots of an image that others read.
#[derive(Debug, Clone, Copy)]
pub enum SnapshotChange<'a> {
    /// Take one.
    Create(&'a NewSnapshot),
    /// Delete one.
    Delete(&'a SnapshotName),
}

/// Changes the snapshots of an image that nobody writes to. Whoever opened it before may go on reading: what the change
/// frees keeps its contents. Returns it, in bytes of the file. It may be discarded when those have gone, before anybody
/// writes to the image.
pub async fn change_snapshots_beside_readers(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    change: SnapshotChange<'_>,
    watch: &mut EditWatch<'_>,
) -> Result<Vec<Range<u64>>> {
    let mut edit = Edit::of_snapshots(io, file, name, watch).await?;
    edit.keeps_freed = true;
    let geometry = edit.geometry;
    let done = match change {
        SnapshotChange::Create(new) => edit.create_snapshot(new, None).await,
        SnapshotChange::Delete(which) => edit.delete_snapshot(which).await,
    };
    let freed = edit.end_freeing(done).await?;
    Ok(freed.into_iter().map(|range| geometry.start_of(range.start)..geometry.start_of(range.end)).collect())
}

impl<'a, 'w> Edit<'a, 'w> {
    /// As [`Edit::open`]. Refuses images with an external data file: its clusters cannot be shared with snapshots.
    async fn of_snapshots(
        io: &'a MetaIo,
        file: &'a dyn File,
        name: &'a str,
        watch: &'a mut EditWatch<'w>,
    ) -> Result<Self> {
        let edit = Self::open(io, file, name, watch).await?;
        match edit.header.has_data_file() {
            true => edit.refuse(ErrorKind::Unsupported, "an image with an external data file has no snapshots"),
            false => Ok(edit),
        }
    }
}

impl Edit<'_, '_> {
    /// Commits the prepared change, or gives its space back.
    pub(super) async fn end(self, prepared: Result<()>) -> Result<()> {
        self.end_freeing(prepared).await.map(drop)
    }

    /// As [`Edit::end`]; returns the clusters that are unused.
    pub(super) async fn end_freeing(self, prepared: Result<()>) -> Result<Vec<Range<u64>>> {
        match prepared {
            Ok(()) => self.commit().await,
            Err(error) => {
                self.undo().await;
                Err(error)
            }
        }
    }

    fn next_id(&self) -> String {
        let ids = self.rows.iter().filter_map(|row| row.snapshot.id.parse::<u64>().ok());
        ids.max().unwrap_or(0).saturating_add(1).to_string()
    }

    async fn create_snapshot(&mut self, new: &NewSnapshot, state: Option<&mut VmState<'_>>) -> Result<()> {
        if self.rows.len() as u64 >= u64::from(MAX_SNAPSHOTS) {
            return self.refuse(ErrorKind::Unsupported, "it has 65536 snapshots, which is the most that an image has");
        }
        if new.name.len() > NAME_BYTES_MAX || new.name.contains('\0') {
            return self.refuse(ErrorKind::BadOption, "a snapshot's name has at most 65535 bytes and no zero byte");
        }
        let table_bytes = rows_bytes(&self.rows).len().saturating_add(new.name.len()).saturating_add(ROW_BYTES_MOST);
        if table_bytes as u64 > TABLE_BYTES_MAX {
            return self
                .refuse(ErrorKind::Unsupported, "its snapshot table has 64 MiB, which is the most that is read");
        }
        let mut l1 = self.active_l1().await.map_err(|error| self.failed(error))?;
        let mut steps = Steps::new(l1.len().saturating_mul(2));
        // Behind the disk, the active table may still refer to an old machine state. A new state takes that place in
        // the snapshot.
        let of_disk = usize::try_from(self.geometry.l1_entries()).unwrap_or(usize::MAX).min(l1.len());
        let shared = if state.is_some() { of_disk } else { l1.len() };
        let (shares, rest) = l1.split_at_mut(shared);
        self.count_tree(shares, Direction::Up, &mut steps).await?;
        // The disk and the snapshot share these tables.
        self.retag(shares, 2, &mut steps).await?;
        self.retag(rest, 1, &mut steps).await?;
        let mut own = shares.to_vec();
        let vm_state_bytes = state.as_ref().map_or(0, |state| state.length_bytes);
        if let Some(state) = state {
            own.extend(self.add_vm_state(state).await?);
        }
        let bytes: Vec<u8> = own.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let snapshot = Snapshot {
            id: self.next_id(),
            name: new.name.clone(),
            vm_state_bytes,
            date_seconds: new.date_seconds,
            date_nanoseconds: new.date_nanoseconds,
            vm_clock_nanoseconds: 0,
            disk_bytes: self.header.size_bytes,
            // As qemu-img writes it.
            icount: Some(0),
        };
        let prepared = async {
            let l1_offset = if bytes.is_empty() { 0 } else { self.add_table(&bytes, 1).await? };
            let l1_entries = own.len() as u32;
            let (id, name) = (snapshot.id.clone().into_bytes(), snapshot.name.clone().into_bytes());
            self.rows.push(Row { l1_offset, l1_entries, snapshot, id, name, says_size: true, more: Vec::new() });
            self.set_rows().await?;
            self.set_l1(&l1).await
        };
        prepared.await.map_err(|error| self.failed(error))
    }

    fn row(&self, which: &SnapshotName) -> Result<(usize, Row)> {
        let found = find(&self.rows, which).and_then(|index| Some((index, self.rows.get(index)?.clone())));
        match found {
            Some(found) => Ok(found),
            None => self.refuse(ErrorKind::NotFound, format_args!("it has no snapshot {which}")),
        }
    }

    async fn apply_snapshot(&mut self, which: &SnapshotName) -> Result<()> {
        let (_, row) = self.row(which)?;
        let size_bytes = row.snapshot.disk_bytes;
        let old = self.active_l1().await.map_err(|error| self.failed(error))?;
        let mut l1 = self.read_l1(row.l1_offset, row.l1_entries).await.map_err(|error| self.failed(error))?;
        let needed = Geometry { size_bytes, ..self.geometry }.l1_entries();
        if needed.saturating_mul(8) > MAX_L1_BYTES {
            let what =
                format_args!("snapshot '{which}' says that its disk has {size_bytes} bytes, which is impossible");
            return self.refuse(ErrorKind::BadImage, what);
        }
        l1.resize(l1.len().max(usize::try_from(needed).unwrap_or(0)), 0);
        let mut steps = Steps::new(old.len().saturating_add(l1.len().saturating_mul(2)));
        // Counts go up first, so that clusters in both trees never seem free in between.
        self.count_tree(&l1, Direction::Up, &mut steps).await?;
        self.count_tree(&old, Direction::Down, &mut steps).await?;
        self.retag(&mut l1, 1, &mut steps).await?;
        // It is unknown which parts differ from the former contents.
        self.fit_bitmaps(size_bytes, true).await?;
        self.set_size(size_bytes);
        self.set_l1(&l1).await.map_err(|error| self.failed(error))
    }

    async fn delete_snapshot(&mut self, which: &SnapshotName) -> Result<()> {
        let (index, row) = self.row(which)?;
        let deleted = self.read_l1(row.l1_offset, row.l1_entries).await.map_err(|error| self.failed(error))?;
        let old = self.active_l1().await.map_err(|error| self.failed(error))?;
        let mut steps = Steps::new(deleted.len().saturating_add(old.len().saturating_mul(2)));
        self.require_counted(&old, &mut steps).await?;
        self.count_tree(&deleted, Direction::Down, &mut steps).await?;
        let mut l1 = old.clone();
        self.retag(&mut l1, 1, &mut steps).await?;
        self.rows.remove(index);
        let prepared = async {
            self.drop_table(row.l1_offset, u64::from(row.l1_entries).saturating_mul(8)).await?;
            self.set_rows().await?;
            if l1 != old {
                self.set_l1(&l1).await?;
            }
            Ok(())
        };
        prepared.await.map_err(|error| self.failed(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use block::block_on;

    const SIZE: u64 = 1 << 20;

    /// When a guest has written, the file has as much space ahead as it is long. Each change takes what the one before has
    /// freed.
    #[test]
    fn changes_beside_readers_do_not_make_the_file_longer_and_longer() {
        let (storage, io) = fixture::created(SIZE);
        let file = fixture::file(&storage);
        let (new, name) = (NewSnapshot::new("s"), SnapshotName::named("s"));
        let mut lengths = Vec::new();
        block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            fixture::fill(&qcow2, &io, 0..SIZE).await;
            qcow2.close(&io).await.unwrap();
            for _ in 0..10 {
                for change in [SnapshotChange::Create(&new), SnapshotChange::Delete(&name)] {
                    let before = file.length_bytes().unwrap();
                    let mut watch = |_, _| true;
                    let freed = change_snapshots_beside_readers(&io, &*file, fixture::NAME, change, &mut watch).await;
                    let freed = freed.unwrap();
                    let after = file.length_bytes().unwrap();
                    assert!(
                        freed.iter().all(|range| range.end <= after),
                        "{before} {after}: readers miss what was freed"
                    );
                    for range in freed {
                        io.discard(range.start, range.end - range.start).await.unwrap();
                    }
                    if matches!(change, SnapshotChange::Create(_)) {
                        let qcow2 = fixture::opened(&storage, &io).await;
                        fixture::fill(&qcow2, &io, 0..fixture::CLUSTER).await;
                        qcow2.close(&io).await.unwrap();
                    }
                }
                lengths.push(file.length_bytes().unwrap());
            }
        });
        // A guest's cluster may come behind the others each time.
        let (first, last) = (lengths[0], lengths[lengths.len() - 1]);
        assert!(last < first + 100 * fixture::CLUSTER, "{lengths:?}");
        testkit::qcow2_check(&storage.bytes(fixture::NAME)).unwrap().sound().unwrap();
    }
}
