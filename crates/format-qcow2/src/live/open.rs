//! Opens an image. Reads the header, the L1 table and, for writing, the refcount table. Everything else is read when it
//! is needed.

use crate::check::repair_at_open::repair_at_open;
use crate::layout::entry::{entries, more_than_data};
use crate::layout::geometry::Geometry;
use crate::layout::header::{HEADER_SECTOR_BYTES, Header, probe, read_first_cluster};
use crate::layout::snapshot::{SnapshotName, of_snapshot};
use crate::live::bitmap_tracking::BitmapTracking;
use crate::live::flush_queue::FlushQueue;
use crate::live::image::{OpenOptions, Qcow2};
use crate::live::metadata_map::TableBits;
use crate::live::refcounts::Refcounts;
use crate::live::state::{DirtyBit, Inner, Space, State};
use block::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex};
use block::{Epochs, Error, ErrorKind, FileInfo, MetaIo, PastEnd, Result, SliceBook, WaitList};
use memory::AlignedBuf;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Length of a version 3 header without later additions.
const HEADER_BYTES_MIN: u64 = 104;

impl Qcow2 {
    /// Opens the disk, or the disk as it was when a snapshot was taken.
    pub(super) async fn open_part(
        io: &MetaIo,
        file: &FileInfo,
        options: OpenOptions,
        snapshot: Option<&SnapshotName>,
        cache: u64,
    ) -> Result<Self> {
        let name = options.name;
        let read_only = options.read_only || file.read_only;
        let (cluster, mut header, file_bytes) = read_header(io, file, &name, read_only).await?;
        if let Some(which) = snapshot {
            header = of_snapshot(io, header, &name, which).await?;
        }
        let geometry = header.geometry();
        let reader = TableReader { io, name: &name, file_bytes };
        let mut l1 = reader.read("L1 table", header.l1_offset, u64::from(header.l1_entries).saturating_mul(8)).await?;
        // A snapshot of a smaller disk has fewer entries.
        l1.resize(l1.len().max(usize::try_from(geometry.l1_entries()).unwrap_or(0)), 0);
        let (table, tracking) = match read_only {
            true => (Vec::new(), None),
            false => {
                let length = geometry.start_of(u64::from(header.refcount_table_clusters));
                let table = reader.read("refcount table", header.refcount_table_offset, length).await?;
                (table, BitmapTracking::open(io, &header, &cluster, &name).await?)
            }
        };
        let refcounts = Refcounts::new(geometry, table, header.refcount_table_offset, cache / 8);
        let space = space_at_open(file, file_bytes, &geometry, &refcounts);
        let inner = Inner {
            read_only,
            lazy: !read_only && header.may_postpone_refcounts(),
            geometry,
            can_grow: file.can_grow && !file.block_device,
            can_discard: file.can_discard,
            discard_zeroes: file.discard_zeroes && !file.block_device,
            file_clusters: geometry.cluster_of(file_bytes),
            l1: l1.into_iter().map(AtomicU64::new).collect(),
            slices: geometry.slice_cache(cache),
            more_than_data: more_than_data(&geometry),
            slices_read: AtomicU64::new(0),
            epochs: Epochs::default(),
            state: Mutex::new(new_state(&cluster, refcounts, space)),
            loaded: WaitList::default(),
            idle: WaitList::default(),
            flushed: WaitList::default(),
            table_writes: Arc::default(),
            extensions: Arc::default(),
            tracking,
            header_ready: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            marked: AtomicBool::new(false),
            table_bits: TableBits::for_clusters(if read_only { 0 } else { geometry.cluster_of(file_bytes) }),
            mapping_is_durable: AtomicBool::new(false),
            complained: AtomicBool::new(false),
            skipped_barriers: AtomicU32::new(0),
            header,
            name,
        };
        Ok(Self { inner: Arc::new(inner) })
    }
}

/// Reads the tables that opening needs.
struct TableReader<'a> {
    io: &'a MetaIo,
    name: &'a str,
    file_bytes: u64,
}

impl TableReader<'_> {
    async fn read(&self, what: &str, offset: u64, length: u64) -> Result<Vec<u64>> {
        if length == 0 {
            return Ok(Vec::new());
        }
        let Self { io, name, file_bytes } = self;
        let end = offset.saturating_add(length);
        let read = io.read(offset, usize::try_from(length).unwrap_or(0), PastEnd::Fails).await;
        let table = read.map_err(|error| match end > *file_bytes {
            true => {
                let text = format!(
                    "'{name}': its {what} ends at byte {end}, the file at {file_bytes}: it was cut off or is damaged"
                );
                Error::new(ErrorKind::BadImage, text)
            }
            false => Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the {what}"), error),
        })?;
        Ok(entries(&table).collect())
    }
}

/// Makes the state of an image that was just opened.
fn new_state(cluster: &[u8], refcounts: Refcounts, space: Space) -> State {
    let sector = cluster.get(..HEADER_SECTOR_BYTES).and_then(|bytes| bytes.try_into().ok());
    State {
        book: SliceBook::default(),
        l1_dirty: BTreeSet::new(),
        l1_writing: BTreeSet::new(),
        fresh_tables: HashMap::new(),
        refcounts,
        space,
        in_flight: BTreeMap::new(),
        tentative: None,
        busy: HashSet::new(),
        unlinked: Vec::new(),
        unlinked_clusters: 0,
        retired: Vec::new(),
        flushes: FlushQueue::default(),
        dirty: DirtyBit::default(),
        needs_order: false,
        header_sector: sector.unwrap_or([0; HEADER_SECTOR_BYTES]),
        tables: None,
        snapshots_known: false,
        header_settled: false,
    }
}

/// Returns the first cluster, its header, and the length of the file. Before it is opened for writing, an image that
/// was left dirty is repaired.
async fn read_header(io: &MetaIo, file: &FileInfo, name: &str, read_only: bool) -> Result<(AlignedBuf, Header, u64)> {
    let failed = |error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the header"), error);
    let cluster = read_first_cluster(io).await.map_err(failed)?;
    let header = Header::parse(&cluster, name, false).map_err(|error| match file.length_bytes {
        length @ 4..HEADER_BYTES_MIN if probe(&cluster) => {
            let what =
                format!("'{name}': not a valid qcow2 image: qcow2 header too short: the file has {length} bytes");
            Error::new(ErrorKind::BadImage, what)
        }
        _ => error,
    })?;
    if !read_only {
        header.refuse_corrupt(name)?;
    }
    if read_only || !header.is_dirty() {
        return Ok((cluster, header, file.length_bytes));
    }
    let file_bytes = repair_at_open(io, file.locks, file.length_bytes, name).await?;
    let cluster = read_first_cluster(io).await.map_err(failed)?;
    let header = Header::parse(&cluster, name, true)?;
    Ok((cluster, header, file_bytes))
}

/// Decides where space comes from at first. A file that can grow gives space behind its end. Another file gives space
/// behind everything that refcount blocks count, and where the scan finds some.
fn space_at_open(file: &FileInfo, file_bytes: u64, geometry: &Geometry, refcounts: &Refcounts) -> Space {
    let grows = file.can_grow && !file.block_device;
    let frontier = match grows {
        true => geometry.clusters_for(file_bytes),
        false => refcounts.last_block().map_or(0, |block| geometry.block_end(block)),
    };
    let frontier = frontier.max(1);
    Space {
        frontier,
        scan_limit: frontier.min(geometry.cluster_of(file_bytes)),
        can_extend: grows && file.fast_zeroes,
        ..Space::default()
    }
}
