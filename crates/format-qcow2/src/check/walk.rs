//! Checks an image (qcow2 specification, "Host cluster management"): counts every reference again (`count`), and compares
//! the counts with the refcounts on disk (`compare`).
//!
//! Only reads, and trusts nothing. Its memory grows with the clusters that are referred to. `repair` decides what to do
//! about the findings.

use crate::check::references::{Kinds, References};
use crate::check::report::{CheckEvent, CheckReport, CheckWatch};
use crate::layout::entry::entries;
use crate::layout::extensions::{field_u32, field_u64};
use crate::layout::geometry::Geometry;
use crate::layout::header::{Header, INCOMPATIBLE_CORRUPT, MAX_SNAPSHOTS, OFFSET_SNAPSHOTS, read_first_cluster};
use crate::layout::snapshot::count_sane_rows;
use block::{Error, ErrorKind, IoResult, MetaIo, PastEnd, Result};
use memory::AlignedBuf;
use std::collections::{BTreeMap, BTreeSet};

pub(super) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
pub(crate) const REFCOUNT_TABLE_RESERVED: u64 = 0x1ff;
pub(super) const COMPRESSED: u64 = 1 << 62;
/// The offset of the feature bits 0 to 7 in a version 3 header.
const LAST_BYTE_OF_INCOMPATIBLE: usize = 79;
/// The most wrong refcounts that are corrected one by one (24 MiB of memory). With more, all refcounts are rebuilt.
pub(crate) const MISMATCHES_MAX: usize = 1 << 20;
/// A check gives up after it has read and counted this many bytes of tables, plus [`WORK_TIMES`] the size of the file.
/// Tables of ordinary images are read once or twice. Hostile ones may refer to one place any number of times.
const WORK_BYTES_MIN: u64 = 16 << 30;
const WORK_TIMES: u64 = 64;
/// The work of reporting a finding, as bytes of tables read.
const FINDING_BYTES: u64 = 1 << 10;
/// The same limits for the memory of counts. In ordinary images, clusters in use lie together or hold data.
const COUNTS_BYTES_MIN: u64 = 512 << 20;
const COUNTS_TIMES: u64 = 4;

/// Checks the image in a file of `file_bytes`. Fails if it is no image, cannot be read, or if `watch` stopped the
/// check.
pub async fn check(io: &MetaIo, file_bytes: u64, name: &str, watch: &mut CheckWatch<'_>) -> Result<CheckReport> {
    let failed = |error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the tables"), error);
    let (header, bitmaps) = header_to_check(io, name).await?;
    let mut walk = Walk::begin(io, &header, file_bytes, watch).await.map_err(failed)?;
    walk.bitmaps = bitmaps;
    walk.count_all().await.map_err(failed)?;
    walk.keeps_mismatches = false;
    walk.compare().await;
    for wrong in walk.wrong_flags(false, usize::MAX).await.map_err(failed)? {
        walk.corrupt(wrong.what);
    }
    walk.end().map_err(|error| error.in_context(format!("'{name}'")))
}

/// Reads the header of an image that may be damaged, and the space of its bitmaps.
pub(crate) async fn header_to_check(io: &MetaIo, name: &str) -> Result<(Header, Vec<(u64, u64)>)> {
    let (header, bitmaps, _) = header_to_repair(io, name, false).await?;
    Ok((header, bitmaps))
}

/// As [`header_to_check`]. With `may_discard`, cuts an impossible number of snapshots down to those that may be real.
/// Also returns how many are left out.
pub(crate) async fn header_to_repair(
    io: &MetaIo,
    name: &str,
    may_discard: bool,
) -> Result<(Header, Vec<(u64, u64)>, u32)> {
    let failed = |error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the tables"), error);
    let mut cluster = read_first_cluster(io).await.map_err(failed)?;
    let claimed = field_u32(&cluster, OFFSET_SNAPSHOTS);
    let mut discarded = 0;
    let at = field_u64(&cluster, OFFSET_SNAPSHOTS.saturating_add(4));
    // At offset 0 lies the header, not the snapshot table.
    let is_absurd = claimed > MAX_SNAPSHOTS || (claimed > 0 && at == 0);
    if may_discard && is_absurd && cluster.starts_with(b"QFI\xfb") {
        let sane = if at == 0 { 0 } else { count_sane_rows(io, at, cluster.len() as u64).await.map_err(failed)? };
        if let Some(field) = cluster.get_mut(OFFSET_SNAPSHOTS..OFFSET_SNAPSHOTS.saturating_add(4)) {
            field.copy_from_slice(&sane.to_be_bytes());
            discarded = claimed.saturating_sub(sane);
        }
    }
    if cluster.starts_with(b"QFI\xfb\0\0\0\x03")
        && let Some(byte) = cluster.get_mut(LAST_BYTE_OF_INCOMPATIBLE)
    {
        *byte &= !(INCOMPATIBLE_CORRUPT as u8);
    }
    let header = Header::parse(&cluster, name, false)?;
    let bitmaps = crate::layout::bitmap::space(io, &header, &cluster, name).await?;
    Ok((header, bitmaps, discarded))
}

/// A cluster whose refcount differs from its number of references.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mismatch {
    pub(crate) cluster: u64,
    pub(crate) refcount: u64,
    pub(crate) references: u64,
}

pub(crate) struct Walk<'a, 'w> {
    pub(crate) io: &'a MetaIo,
    pub(crate) geometry: Geometry,
    pub(crate) header: &'a Header,
    pub(crate) file_bytes: u64,
    /// The end of the last refcount block outside the file.
    pub(crate) outside_bytes: u64,
    /// Clusters of the file, and the one behind it if something refers to that.
    pub(crate) clusters: u64,
    /// The refcount table.
    pub(crate) table: Vec<u64>,
    /// The refcount block that was used last, with its number.
    pub(crate) block: Option<(u64, AlignedBuf)>,
    pub(crate) references: References,
    /// References to the refcounts' own clusters.
    pub(crate) own_references: References,
    /// Which clusters hold tables.
    pub(crate) kinds: Kinds,
    /// Host clusters that a damaged entry names. The references are not counted.
    pub(crate) claimed: BTreeSet<u64>,
    pub(crate) report: CheckReport,
    pub(crate) mismatches: Vec<Mismatch>,
    /// Whether the refcounts cannot be corrected in place.
    pub(crate) needs_rebuild: bool,
    /// Entries that a repair changes: offset and new value.
    pub(crate) new_entries: BTreeMap<u64, u64>,
    /// The space of the bitmaps and of their directory.
    pub(crate) bitmaps: Vec<(u64, u64)>,
    /// Whether errors are to be repaired.
    pub(crate) repairs: bool,
    /// Whether to give up at the first error that refcounts do not explain.
    pub(crate) strict: bool,
    /// Clusters with more references than a refcount can count.
    pub(crate) overcounted: BTreeSet<u64>,
    /// The reason why the check was given up.
    pub(crate) hopeless: Option<String>,
    /// L2 tables of snapshots without errors, and how often they have to be counted once more.
    pub(super) again: BTreeMap<u64, u32>,
    /// The number of findings so far.
    pub(super) findings: u64,
    /// Whether anything is compressed, in the disk or in a snapshot.
    pub(crate) has_compressed: bool,
    /// Whether mismatches are kept. A check that only reports does not keep them.
    pub(crate) keeps_mismatches: bool,
    /// How many more bytes may be read and counted.
    pub(crate) work_bytes: u64,
    counts_bytes_max: u64,
    exhausted: bool,
    progress: (u64, u64),
    watch: &'a mut CheckWatch<'w>,
    pub(crate) stopped: bool,
}

impl<'a, 'w> Walk<'a, 'w> {
    pub(crate) async fn begin(
        io: &'a MetaIo,
        header: &'a Header,
        file_bytes: u64,
        watch: &'a mut CheckWatch<'w>,
    ) -> IoResult<Self> {
        let geometry = header.geometry();
        let report = CheckReport {
            total_clusters: geometry.guest_clusters(),
            image_end_offset: geometry.cluster_bytes(),
            ..CheckReport::default()
        };
        let content_bytes = io.content_bytes().unwrap_or(file_bytes).min(file_bytes);
        let counts_bytes_max = content_bytes.saturating_mul(COUNTS_TIMES).saturating_add(COUNTS_BYTES_MIN);
        let mut walk = Self {
            io,
            geometry,
            header,
            file_bytes,
            outside_bytes: 0,
            table: Vec::new(),
            block: None,
            references: References::default(),
            own_references: References::default(),
            kinds: Kinds::default(),
            claimed: BTreeSet::new(),
            clusters: geometry.clusters_for(file_bytes),
            report,
            mismatches: Vec::new(),
            needs_rebuild: false,
            new_entries: BTreeMap::new(),
            bitmaps: Vec::new(),
            repairs: false,
            strict: false,
            overcounted: BTreeSet::new(),
            hopeless: None,
            again: BTreeMap::new(),
            findings: 0,
            has_compressed: false,
            keeps_mismatches: true,
            work_bytes: content_bytes.saturating_mul(WORK_TIMES).saturating_add(WORK_BYTES_MIN),
            counts_bytes_max,
            exhausted: false,
            progress: (0, 0),
            watch,
            stopped: false,
        };
        walk.references.set_memory_bytes(usize::try_from(counts_bytes_max).unwrap_or(usize::MAX));
        let table = walk.read(header.refcount_table_offset, walk.table_bytes()).await?;
        walk.table = entries(&table).collect();
        Ok(walk)
    }

    pub(super) fn table_bytes(&self) -> u64 {
        self.geometry.start_of(u64::from(self.header.refcount_table_clusters))
    }

    pub(crate) fn end(&self) -> Result<CheckReport> {
        self.go_on().map(|()| self.report)
    }

    pub(crate) fn go_on(&self) -> Result<()> {
        match (self.stopped, self.exhausted) {
            (_, true) => {
                let what = "its tables lead to the same places over and over, or far apart, as no program writes them: \
                            counting them all would take too long, or too much memory. Nothing was changed";
                Err(Error::new(ErrorKind::BadImage, what))
            }
            (true, false) => Err(Error::new(ErrorKind::Io, "interrupted")),
            (false, false) => Ok(()),
        }
    }

    /// Lifts the limits, for work that is known to end.
    pub(crate) fn lift_limits(&mut self) {
        (self.work_bytes, self.counts_bytes_max) = (u64::MAX, u64::MAX);
        self.references.set_memory_bytes(usize::MAX);
    }

    /// Charges work: bytes of tables that are read or counted. Gives up if it becomes too much.
    pub(crate) fn charge(&mut self, bytes: u64) {
        let counts = self.references.used_bytes().saturating_add(self.kinds.used_bytes()) as u64;
        match self.work_bytes.checked_sub(bytes) {
            Some(left) if counts <= self.counts_bytes_max && !self.references.is_full() => self.work_bytes = left,
            _ if self.strict => self.give_up("counting its references takes too long, or too much memory".to_owned()),
            _ => (self.exhausted, self.stopped) = (true, true),
        }
    }

    pub(crate) async fn read(&self, offset: u64, length: u64) -> IoResult<AlignedBuf> {
        let length = usize::try_from(length).map_err(|_| block::IoError::EIO)?;
        // A table that ends behind the file's end is damaged, and opening the image would fail.
        let past_end = if self.strict { PastEnd::Fails } else { PastEnd::Zeros };
        match length {
            0 => Ok(AlignedBuf::zeroed(0)),
            _ => self.io.read(offset, length, past_end).await,
        }
    }

    pub(crate) fn find(&mut self, what: String) {
        self.findings = self.findings.saturating_add(1);
        self.charge(FINDING_BYTES);
        self.stopped |= !(self.watch)(CheckEvent::Finding(what));
    }

    pub(crate) fn corrupt(&mut self, what: String) {
        if self.strict {
            return self.give_up(what);
        }
        self.report.corruptions = self.report.corruptions.saturating_add(1);
        self.find(format!("ERROR {what}"));
    }

    pub(crate) fn give_up(&mut self, why: String) {
        self.stopped = true;
        self.hopeless.get_or_insert(why);
    }

    pub(crate) fn tell(&mut self, done: u64, total: u64) {
        self.progress = (done, total);
        self.stopped |= !(self.watch)(CheckEvent::Progress(done, total));
    }

    /// Asks whether to go on, without new progress.
    pub(super) fn ask(&mut self) {
        let (done, total) = self.progress;
        self.tell(done, total);
    }
}
