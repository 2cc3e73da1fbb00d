//! The snapshot table (qcow2 specification, "Snapshots").

use crate::layout::geometry::Geometry;
use crate::layout::header::{Header, MAX_SNAPSHOTS};
use block::{Error, ErrorKind, IoResult, MetaIo, PastEnd, Result};

/// Length of a row's fixed part.
pub(crate) const ROW_BYTES: usize = 40;
/// The most bytes of a row's optional part.
const EXTRA_BYTES_MAX: u64 = 1024;
/// The most bytes of the table.
pub(crate) const TABLE_BYTES_MAX: u64 = 64 << 20;
const L1_BYTES_MAX: u64 = 32 << 20;

/// An internal snapshot, as its row of the table describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Snapshot {
    /// Id, unique in the image.
    pub id: String,
    /// Name, chosen by the user; may occur several times.
    pub name: String,
    /// Bytes of the virtual machine's state that the snapshot keeps.
    pub vm_state_bytes: u64,
    /// When it was taken: seconds since 1970.
    pub date_seconds: u32,
    /// The nanoseconds of that time.
    pub date_nanoseconds: u32,
    /// How long the virtual machine had run, in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// Size of the disk at that time.
    pub disk_bytes: u64,
    /// Instructions that the virtual machine had executed, if they were counted.
    pub icount: Option<u64>,
}

/// A row of the table: a snapshot, and the fields that only we need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) l1_offset: u64,
    pub(crate) l1_entries: u32,
    pub(crate) snapshot: Snapshot,
    /// The bytes of the row: an id need not be text.
    pub(crate) id: Vec<u8>,
    pub(crate) name: Vec<u8>,
    /// Whether the row records the disk's size.
    pub(crate) says_size: bool,
    /// Fields behind those that we know. They are kept.
    pub(crate) more: Vec<u8>,
}

/// The fixed part of a row.
pub(crate) struct RowHead {
    pub(crate) l1_offset: u64,
    pub(crate) l1_entries: u64,
    pub(crate) extra_bytes: u64,
    id_bytes: u64,
    name_bytes: u64,
}

impl RowHead {
    /// Decodes the first [`ROW_BYTES`] of a row. Missing bytes count as zeros.
    pub(crate) fn parse(row: &[u8]) -> Self {
        Self {
            l1_offset: number(row, 0, 8),
            l1_entries: number(row, 8, 4),
            extra_bytes: number(row, 36, 4),
            id_bytes: number(row, 12, 2),
            name_bytes: number(row, 14, 2),
        }
    }

    /// Whether the length of the optional part is allowed. If not, the next row's place is unknown.
    pub(crate) fn has_sane_extra(&self) -> bool {
        self.extra_bytes <= EXTRA_BYTES_MAX
    }

    /// Returns the length of the row, without the padding behind it.
    pub(crate) fn row_bytes(&self) -> u64 {
        let parts = [self.extra_bytes, self.id_bytes, self.name_bytes];
        parts.into_iter().fold(ROW_BYTES as u64, u64::saturating_add)
    }

    /// Returns where the next row begins if this one begins at `start`.
    pub(crate) fn next_row(&self, start: u64) -> u64 {
        start.saturating_add(self.row_bytes()).next_multiple_of(8)
    }

    pub(crate) fn l1_bytes(&self) -> u64 {
        self.l1_entries.saturating_mul(8)
    }
}

/// Reads the internal snapshots of the image in a file, oldest first.
pub async fn snapshots(io: &MetaIo, header: &Header, name: &str) -> Result<Vec<Snapshot>> {
    Ok(read_rows(io, header, name).await?.0.into_iter().map(|row| row.snapshot).collect())
}

fn number(bytes: &[u8], offset: usize, length: usize) -> u64 {
    let field = bytes.get(offset..offset.saturating_add(length)).unwrap_or_default();
    field.iter().fold(0u64, |value, byte| value.wrapping_shl(8) | u64::from(*byte))
}

/// Reads the rows. Also returns the length of the table.
pub(crate) async fn read_rows(io: &MetaIo, header: &Header, name: &str) -> Result<(Vec<Row>, u64)> {
    let failed = |error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the snapshot table"), error);
    let (mut rows, mut at) = (Vec::new(), header.snapshots_offset);
    let mut window = Window { io, start: at, bytes: Vec::new() };
    for index in 0..header.snapshots {
        let bad = |what: &str| Err(Error::new(ErrorKind::BadImage, format!("'{name}': snapshot {index} {what}")));
        let head = RowHead::parse(&window.get(at, ROW_BYTES).await.map_err(failed)?);
        if !head.has_sane_extra() {
            return bad("has more than 1024 bytes of extra data");
        }
        let bytes = window.get(at, head.row_bytes() as usize).await.map_err(failed)?;
        let row = parse_row(&bytes, &head, header.size_bytes);
        let l1_bytes = head.l1_bytes();
        let geometry: Geometry = header.geometry();
        if l1_bytes > L1_BYTES_MAX {
            return bad("has an L1 table that is too large");
        }
        if geometry.offset_in_cluster(row.l1_offset) != 0 || (row.l1_offset == 0 && l1_bytes > 0) {
            return bad("has an L1 table at an impossible place");
        }
        rows.push(row);
        at = head.next_row(at);
        if at.saturating_sub(header.snapshots_offset) > TABLE_BYTES_MAX {
            return bad("lies behind the first 64 MiB of the snapshot table, which is the most that is read");
        }
    }
    Ok((rows, at.saturating_sub(header.snapshots_offset)))
}

/// Counts the rows at `offset` that can be snapshots, up to the first that cannot. For a header that claims too many.
pub(crate) async fn count_sane_rows(io: &MetaIo, offset: u64, cluster_bytes: u64) -> IoResult<u32> {
    let mut at = offset;
    let mut window = Window { io, start: at, bytes: Vec::new() };
    for index in 0..MAX_SNAPSHOTS {
        let row = RowHead::parse(&window.get(at, ROW_BYTES).await?);
        let is_aligned = row.l1_offset.is_multiple_of(cluster_bytes.max(1));
        let has_l1 = row.l1_offset > 0 && is_aligned && row.l1_bytes() <= L1_BYTES_MAX;
        at = row.next_row(at);
        let fits = row.has_sane_extra() && at.saturating_sub(offset) <= TABLE_BYTES_MAX;
        // Every snapshot has an id.
        if row.id_bytes == 0 || !has_l1 || !fits {
            return Ok(index);
        }
    }
    Ok(MAX_SNAPSHOTS)
}

/// Reads the table in pieces that are larger than rows.
struct Window<'a> {
    io: &'a MetaIo,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    async fn get(&mut self, offset: u64, length: usize) -> IoResult<Vec<u8>> {
        const PIECE_BYTES: usize = 64 << 10;
        for _ in 0..2 {
            let from = usize::try_from(offset.saturating_sub(self.start)).unwrap_or(usize::MAX);
            if let Some(part) = self.bytes.get(from..from.saturating_add(length)) {
                return Ok(part.to_vec());
            }
            let piece = length.saturating_add(PIECE_BYTES);
            self.bytes = self.io.read(offset, piece, PastEnd::Zeros).await?.to_vec();
            self.start = offset;
        }
        Ok(vec![0; length])
    }
}

fn parse_row(bytes: &[u8], head: &RowHead, disk_bytes: u64) -> Row {
    let has = |needed: u64| head.extra_bytes >= needed;
    let strings = ROW_BYTES.saturating_add(head.extra_bytes as usize);
    let names = strings.saturating_add(head.id_bytes as usize);
    let id = bytes.get(strings..names).unwrap_or_default().to_vec();
    let name = bytes.get(names..).unwrap_or_default().to_vec();
    let snapshot = Snapshot {
        id: String::from_utf8_lossy(&id).into_owned(),
        name: String::from_utf8_lossy(&name).into_owned(),
        vm_state_bytes: if has(8) { number(bytes, 40, 8) } else { number(bytes, 32, 4) },
        date_seconds: number(bytes, 16, 4) as u32,
        date_nanoseconds: number(bytes, 20, 4) as u32,
        vm_clock_nanoseconds: number(bytes, 24, 8),
        disk_bytes: if has(16) { number(bytes, 48, 8) } else { disk_bytes },
        icount: has(24).then(|| number(bytes, 56, 8)).filter(|count| *count != u64::MAX),
    };
    Row {
        l1_offset: head.l1_offset,
        l1_entries: head.l1_entries as u32,
        snapshot,
        id,
        name,
        says_size: has(16),
        more: bytes.get(ROW_BYTES.saturating_add(24)..strings).unwrap_or_default().to_vec(),
    }
}

/// Encodes a table of these rows. Each gets the extra data of version 3.
pub(crate) fn rows_bytes(rows: &[Row]) -> Vec<u8> {
    let mut table = Vec::new();
    for row in rows {
        let snapshot = &row.snapshot;
        table.extend(row.l1_offset.to_be_bytes());
        table.extend(row.l1_entries.to_be_bytes());
        table.extend((row.id.len() as u16).to_be_bytes());
        table.extend((row.name.len() as u16).to_be_bytes());
        table.extend(snapshot.date_seconds.to_be_bytes());
        table.extend(snapshot.date_nanoseconds.to_be_bytes());
        table.extend(snapshot.vm_clock_nanoseconds.to_be_bytes());
        table.extend(u32::try_from(snapshot.vm_state_bytes).unwrap_or(0).to_be_bytes());
        table.extend((row.more.len().saturating_add(24) as u32).to_be_bytes());
        table.extend(snapshot.vm_state_bytes.to_be_bytes());
        table.extend(snapshot.disk_bytes.to_be_bytes());
        table.extend(snapshot.icount.unwrap_or(u64::MAX).to_be_bytes());
        table.extend(&row.more);
        table.extend(&row.id);
        table.extend(&row.name);
        table.resize(table.len().next_multiple_of(8), 0);
    }
    table
}

/// A way to name a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotName {
    /// The snapshot with this id, or else the first with this name.
    Any(String),
    /// The first snapshot with this id and this name, as far as they are given.
    Exactly {
        /// The id.
        id: Option<String>,
        /// The name.
        name: Option<String>,
    },
    /// As `Any`, but means the machine's state in the snapshot, as a disk that ends with the state, rounded up to
    /// sectors.
    StateOf(String),
}

/// Returns the header of the disk as it was when a snapshot was taken. If the disk has grown since then, zeros follow,
/// as with qemu-img. If it has shrunk, nothing is cut off.
pub(crate) async fn of_snapshot(io: &MetaIo, header: Header, name: &str, which: &SnapshotName) -> Result<Header> {
    let (rows, _) = read_rows(io, &header, name).await?;
    let found = find(&rows, which).and_then(|index| rows.get(index));
    let Some(row) = found else {
        return Err(Error::new(ErrorKind::NotFound, format!("'{name}': it has no snapshot {which}")));
    };
    if let SnapshotName::StateOf(_) = which {
        return of_state(header, name, row);
    }
    let (disk_bytes, now_bytes) = (row.snapshot.disk_bytes, header.size_bytes);
    let then = Header { l1_offset: row.l1_offset, l1_entries: row.l1_entries, size_bytes: disk_bytes, ..header };
    let needed = then.geometry().l1_entries();
    if needed > u64::from(row.l1_entries) {
        let what = format!("'{name}': the snapshot's L1 table is too small for its disk of {disk_bytes} bytes");
        return Err(Error::new(ErrorKind::BadImage, what));
    }
    if now_bytes <= disk_bytes {
        return Ok(then);
    }
    // Behind the snapshot's own disk, its table maps the state of a virtual machine.
    let l1_entries = u32::try_from(needed).unwrap_or(row.l1_entries);
    Ok(Header { l1_entries, size_bytes: now_bytes, ..then })
}

/// Returns the header of a disk that ends with the machine's state in a snapshot. The state begins at the first L1
/// entry behind the disk's own.
fn of_state(header: Header, name: &str, row: &Row) -> Result<Header> {
    let bad = |what: &str| Error::new(ErrorKind::BadImage, format!("'{name}': {what}"));
    let Snapshot { disk_bytes, vm_state_bytes, .. } = row.snapshot;
    if vm_state_bytes == 0 {
        return Err(Error::new(ErrorKind::NotFound, format!("'{name}': that snapshot keeps no machine's state")));
    }
    let then = Header { l1_offset: row.l1_offset, l1_entries: row.l1_entries, size_bytes: disk_bytes, ..header };
    let of_disk = then.geometry().l1_entries();
    let entry_bytes = then.geometry().l1_entry_bytes();
    let end = of_disk.checked_mul(entry_bytes).and_then(|start| start.checked_add(vm_state_bytes));
    let end = end.and_then(|end| end.checked_next_multiple_of(512));
    let size_bytes = end.ok_or_else(|| bad("the snapshot's machine state is larger than any disk"))?;
    let whole = Header { size_bytes, ..then };
    if whole.geometry().l1_entries() > u64::from(row.l1_entries) {
        return Err(bad("the snapshot's L1 table is too small for the machine's state that it says it keeps"));
    }
    Ok(whole)
}

/// Finds a snapshot.
pub(crate) fn find(rows: &[Row], which: &SnapshotName) -> Option<usize> {
    which.position(rows.iter().map(|row| &row.snapshot))
}

impl SnapshotName {
    /// Names the first snapshot with this name, whatever its id.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self::Exactly { id: None, name: Some(name.to_owned()) }
    }

    /// Returns the snapshot of this name, if there is one.
    #[must_use]
    pub fn find_in<'a>(&self, snapshots: &'a [Snapshot]) -> Option<&'a Snapshot> {
        snapshots.get(self.position(snapshots.iter())?)
    }

    fn position<'a>(&self, mut snapshots: impl Iterator<Item = &'a Snapshot> + Clone) -> Option<usize> {
        match self {
            Self::Any(text) | Self::StateOf(text) => {
                let by_id = snapshots.clone().position(|snapshot| snapshot.id == *text);
                by_id.or_else(|| snapshots.position(|snapshot| snapshot.name == *text))
            }
            Self::Exactly { id, name } => snapshots.position(|snapshot| {
                let (id, name) = (id.as_ref(), name.as_ref());
                id.is_none_or(|id| *id == snapshot.id) && name.is_none_or(|name| *name == snapshot.name)
            }),
        }
    }
}

impl std::fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Any(text) | Self::StateOf(text) => write!(f, "'{text}'"),
            Self::Exactly { id, name } => {
                let id = id.as_ref().map(|id| format!("with the id '{id}'"));
                let name = name.as_ref().map(|name| format!("named '{name}'"));
                write!(f, "{}", id.into_iter().chain(name).collect::<Vec<_>>().join(" and "))
            }
        }
    }
}
