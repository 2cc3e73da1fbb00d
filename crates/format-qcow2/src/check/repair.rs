//! Repairs an image and counts as `qemu-img check -r` does.
//!
//! The order never makes an image worse, whenever the power fails. Each step is durable before the next begins:
//!
//! 1. Entries lose a flag "refcount is exactly one" that is wrong or will be. Without it, a write only looks up the
//!    refcount.
//! 2. Refcounts are set to the numbers of references, one by one. This is impossible if a block is damaged or something
//!    in use has the refcount zero. Then all refcounts are written anew in space that nothing refers to, one sector of
//!    the header switches to them, and the old ones are freed. The new ones are written before step 1: if there is no
//!    room for them, nothing has changed.
//! 3. Entries get the flag where it is missing.
//! 4. The header loses its marks "dirty" and "corrupt".

use crate::check::flags::WrongFlag;
use crate::check::rebuild::Rebuilt;
use crate::check::references::Kinds;
use crate::check::report::{CheckReport, CheckWatch};
use crate::check::walk::{Mismatch, Walk, header_to_repair};
use crate::layout::entry::COPIED;
use crate::layout::header::{
    HEADER_SECTOR_BYTES, Header, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DIRTY, OFFSET_AUTOCLEAR, OFFSET_INCOMPATIBLE,
    OFFSET_REFCOUNT_TABLE, OFFSET_SNAPSHOTS,
};
use crate::layout::refcount_entry::write_entry;
use block::{Error, ErrorKind, FileOp, IoResult, MetaIo, PastEnd, Result};
use memory::AlignedBuf;
use std::collections::{BTreeMap, BTreeSet};

/// The extent of a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repair {
    /// Only free clusters that are counted but not referred to.
    Leaks,
    /// Everything that can be repaired.
    All,
}

/// The autoclear features whose structures we keep valid: bitmaps, and raw external data.
const AUTOCLEAR_KNOWN: u64 = 3;

/// Repairs the image in a file of `file_bytes`. The report counts the errors that were found, were repaired, and are
/// left. After an error the image is no worse than before.
pub async fn repair(
    io: &MetaIo,
    file_bytes: u64,
    name: &str,
    what: Repair,
    watch: &mut CheckWatch<'_>,
) -> Result<CheckReport> {
    let failed =
        |error| Error::with_source(ErrorKind::Io, format!("'{name}': the repair did not get to its end"), error);
    let (header, bitmaps, discarded) = header_to_repair(io, name, what == Repair::All).await?;
    let mut walk = Walk::begin(io, &header, file_bytes, watch).await.map_err(failed)?;
    walk.repairs = what == Repair::All;
    walk.bitmaps = bitmaps;
    if discarded > 0 {
        walk.find(format!("Discarding {discarded} overhanging snapshots"));
        walk.report.corruptions_fixed = walk.report.corruptions_fixed.saturating_add(1);
    }
    walk.count_all().await.map_err(failed)?;
    // A table that cannot be read may refer to anything: no cluster is surely free.
    if walk.report.check_errors > 0 {
        return Err(Error::new(
            ErrorKind::BadImage,
            format!("'{name}': not all of it could be checked, so it is left alone"),
        ));
    }
    let counted = walk.report;
    walk.compare().await;
    walk.go_on().map_err(|error| error.in_context(format!("'{name}'")))?;
    walk.lift_limits();
    if walk.needs_rebuild && what == Repair::Leaks {
        walk.find("ERROR need to rebuild refcount structures".to_owned());
        let text = format!("'{name}': its refcounts must be rebuilt; 'check -r all' does it");
        return Err(Error::new(ErrorKind::BadImage, text));
    }
    let mut job = Job::new(walk, io, &header);
    job.discards_snapshots = discarded > 0;
    match what {
        Repair::All => {
            let wrong = job.walk.wrong_flags(true, usize::MAX).await.map_err(failed)?;
            job.repair_all(counted, wrong).await.map_err(failed)?;
        }
        Repair::Leaks => job.repair_leaks(counted).await.map_err(failed)?,
    }
    let Job { walk, .. } = job;
    walk.end()
}

pub(crate) struct Job<'a, 'w> {
    pub(crate) walk: Walk<'a, 'w>,
    io: &'a MetaIo,
    header: &'a Header,
    /// Whether something has been written.
    started: bool,
    /// Whether the header on disk claims impossible snapshots.
    discards_snapshots: bool,
}

impl<'a, 'w> Job<'a, 'w> {
    pub(crate) fn new(walk: Walk<'a, 'w>, io: &'a MetaIo, header: &'a Header) -> Self {
        Self { walk, io, header, started: false, discards_snapshots: false }
    }

    async fn repair_leaks(&mut self, counted: CheckReport) -> IoResult {
        let mismatches = std::mem::take(&mut self.walk.mismatches);
        let (leaks, others): (Vec<_>, Vec<_>) = mismatches.into_iter().partition(|m| m.refcount > m.references);
        self.set_refcounts(&leaks).await?;
        let report = &mut self.walk.report;
        *report = CheckReport {
            corruptions: counted.corruptions.saturating_add(others.len() as u64),
            leaks: 0,
            leaks_fixed: leaks.len() as u64,
            ..*report
        };
        let safe = report.corruptions == 0 && report.check_errors == 0;
        let wrong = self.walk.wrong_flags(false, usize::MAX).await?;
        match safe {
            true => self.set_flags(wrong).await?,
            false => wrong.into_iter().for_each(|wrong| self.walk.corrupt(wrong.what)),
        }
        self.say_clean().await
    }

    /// Returns an entry that needs a change and must not be changed, if there is one.
    pub(crate) fn untouchable(&self, wrong: &[WrongFlag]) -> Option<u64> {
        let mut entries = wrong.iter().map(|wrong| wrong.at).chain(self.walk.new_entries.keys().copied());
        entries.find(|at| !self.may_change(*at))
    }

    /// Repairs everything. `wrong` are the flags that are wrong, or will be.
    pub(crate) async fn repair_all(&mut self, counted: CheckReport, wrong: Vec<WrongFlag>) -> IoResult {
        if self.discards_snapshots {
            self.begin_writing().await?;
            let left = self.header.snapshots.to_be_bytes();
            self.change_header(|sector| put(sector, OFFSET_SNAPSHOTS, &left)).await?;
        }
        // The new refcounts may not fit, so they come first: until something refers to them, nothing has changed.
        let rebuilt = if self.walk.needs_rebuild { Some(self.write_rebuilt().await?) } else { None };
        if rebuilt.is_none() && self.walk.outside_bytes > self.walk.file_bytes {
            self.begin_writing().await?;
            self.io.set_length(self.walk.outside_bytes).await?;
        }
        self.write_new_entries().await?;
        let wrong = wrong.into_iter().filter(|wrong| wrong.entry & COPIED != 0 && self.may_change(wrong.at)).collect();
        self.set_flags(wrong).await?;
        let rebuilt_anew = rebuilt.is_some();
        let flags_fixed = self.walk.report.corruptions_fixed.saturating_sub(counted.corruptions_fixed);
        match rebuilt {
            Some(rebuilt) => self.rebuild(rebuilt).await?,
            None => {
                let mismatches = std::mem::take(&mut self.walk.mismatches);
                self.set_refcounts(&mismatches).await?;
                let leaks = mismatches.iter().filter(|m| m.refcount > m.references).count() as u64;
                let raised = (mismatches.len() as u64).saturating_sub(leaks);
                let report = &mut self.walk.report;
                *report = CheckReport {
                    corruptions: counted.corruptions,
                    leaks: 0,
                    leaks_fixed: leaks,
                    corruptions_fixed: counted.corruptions_fixed.saturating_add(flags_fixed).saturating_add(raised),
                    ..*report
                };
            }
        }
        let wrong = self.walk.wrong_flags(false, usize::MAX).await?;
        self.set_flags(wrong).await?;
        self.own_up(rebuilt_anew);
        self.say_clean().await
    }

    /// Corrects the report: entries in a cluster that also holds something else were counted as repaired, but left
    /// alone.
    fn own_up(&mut self, counted_again: bool) {
        let words = self.walk.geometry.entry_words();
        let left = self.walk.new_entries.keys().filter(|at| !self.may_change(**at)).step_by(words).count() as u64;
        let report = &mut self.walk.report;
        report.corruptions_fixed = report.corruptions_fixed.saturating_sub(left);
        if !counted_again {
            report.corruptions = report.corruptions.saturating_add(left);
        }
    }

    /// Writes new refcounts to new space, durably. Nothing refers to them yet.
    async fn write_rebuilt(&mut self) -> IoResult<Rebuilt> {
        let mut rebuilt = Rebuilt::plan(&mut self.walk)?;
        self.begin_writing().await?;
        if let Err(error) = rebuilt.write(self.io).await {
            if rebuilt.end_bytes() > self.walk.file_bytes {
                // Best effort: only space would be lost.
                let _ = self.io.set_length(self.walk.file_bytes).await;
            }
            return Err(error);
        }
        rebuilt.forget_references();
        self.io.flush().await?;
        Ok(rebuilt)
    }

    /// Switches the header to new refcounts. Errors that are not found again count as repaired.
    async fn rebuild(&mut self, rebuilt: Rebuilt) -> IoResult {
        self.walk.find("Rebuilding refcount structure".to_owned());
        let before = self.walk.report;
        let (offset, clusters) = rebuilt.table();
        self.change_header(|sector| {
            put(sector, OFFSET_REFCOUNT_TABLE, &offset.to_be_bytes());
            put(sector, OFFSET_REFCOUNT_TABLE.saturating_add(8), &clusters.to_be_bytes());
        })
        .await?;
        let header = Header { refcount_table_offset: offset, refcount_table_clusters: clusters, ..self.header.clone() };
        let file_bytes = self.walk.file_bytes.max(rebuilt.end_bytes());
        // Finds the space that the switch has freed, and references behind the former end of the file.
        let Recount { mismatches, report: after, kinds, overcounted } =
            recount(self.io, &header, file_bytes, &self.walk).await?;
        let table = rebuilt.entries();
        self.set_refcounts_in(&table, &mismatches).await?;
        // Clusters that no block counts are repaired in a second run, as by qemu-img.
        let is_counted = |cluster| {
            let block = usize::try_from(header.geometry().block_of(cluster)).unwrap_or(usize::MAX);
            table.get(block).is_some_and(|offset| *offset != 0)
        };
        self.tell_refcounts(mismatches.iter().filter(|mismatch| is_counted(mismatch.cluster)));
        let too_low = mismatches.iter().filter(|m| m.references > m.refcount && !is_counted(m.cluster)).count() as u64;
        let left = after.corruptions.saturating_add(too_low);
        self.walk.table = table;
        self.walk.block = None;
        self.walk.kinds = kinds;
        self.walk.overcounted = overcounted;
        self.walk.report = CheckReport {
            corruptions: left,
            leaks: 0,
            leaks_fixed: before.leaks,
            corruptions_fixed: before.corruptions_fixed.saturating_add(before.corruptions.saturating_sub(left)),
            image_end_offset: after.image_end_offset,
            check_errors: after.check_errors,
            ..before
        };
        Ok(())
    }

    async fn write_new_entries(&mut self) -> IoResult {
        if self.walk.new_entries.is_empty() {
            return Ok(());
        }
        self.begin_writing().await?;
        let entries = self.walk.new_entries.iter().map(|(at, entry)| (*at, *entry));
        let entries = entries.filter(|(at, _)| self.may_change(*at)).collect();
        self.write_entries(entries).await
    }

    fn may_change(&self, at: u64) -> bool {
        self.walk.kinds.may_change(self.walk.geometry.cluster_of(at))
    }

    /// Sets or clears the wrong flags.
    async fn set_flags(&mut self, wrong: Vec<WrongFlag>) -> IoResult {
        // A table whose cluster also holds data or another kind of table is left alone.
        let (wrong, others): (Vec<_>, Vec<_>) = wrong.into_iter().partition(|wrong| self.may_change(wrong.at));
        others.into_iter().for_each(|other| self.walk.corrupt(other.what));
        if wrong.is_empty() {
            return Ok(());
        }
        self.begin_writing().await?;
        let report = &mut self.walk.report;
        report.corruptions_fixed = report.corruptions_fixed.saturating_add(wrong.len() as u64);
        let entries = wrong.iter().map(|wrong| (wrong.at, wrong.entry ^ COPIED)).collect();
        for wrong in wrong {
            self.walk.find(format!("Repairing {}", wrong.what));
        }
        self.write_entries(entries).await
    }

    /// Writes table entries durably; the entries of a sector go together.
    async fn write_entries(&mut self, entries: Vec<(u64, u64)>) -> IoResult {
        let mut sectors: BTreeMap<u64, Vec<(usize, u64)>> = BTreeMap::new();
        for (at, entry) in entries {
            sectors.entry(at & !511).or_default().push(((at & 511) as usize, entry));
        }
        for (at, entries) in sectors {
            let mut sector = self.io.read(at, 512, PastEnd::Zeros).await?;
            entries.into_iter().for_each(|(skip, entry)| put(&mut sector, skip, &entry.to_be_bytes()));
            self.io.write(at, sector).await?;
        }
        self.io.flush().await
    }

    async fn set_refcounts(&mut self, mismatches: &[Mismatch]) -> IoResult {
        let table = self.walk.table.clone();
        self.set_refcounts_in(&table, mismatches).await?;
        self.tell_refcounts(mismatches.iter());
        Ok(())
    }

    fn tell_refcounts<'m>(&mut self, repaired: impl Iterator<Item = &'m Mismatch>) {
        for Mismatch { cluster, refcount, references } in repaired {
            self.walk.find(format!("Repairing cluster {cluster} refcount={refcount} reference={references}"));
        }
    }

    /// Sets refcounts to the numbers of references, block by block, durably. After a power cut, any part of the writes
    /// is an improvement.
    async fn set_refcounts_in(&mut self, table: &[u64], mismatches: &[Mismatch]) -> IoResult {
        if mismatches.is_empty() {
            return Ok(());
        }
        self.begin_writing().await?;
        let geometry = self.walk.geometry;
        let length = usize::try_from(geometry.cluster_bytes()).map_err(|_| block::IoError::EIO)?;
        for group in mismatches.chunk_by(|a, b| geometry.block_of(a.cluster) == geometry.block_of(b.cluster)) {
            let Some(number) = group.first().map(|first| geometry.block_of(first.cluster)) else { continue };
            let offset = usize::try_from(number).ok().and_then(|index| table.get(index)).copied().unwrap_or(0);
            if offset == 0 {
                continue;
            }
            let mut block = self.io.read(offset, length, PastEnd::Zeros).await?;
            for mismatch in group {
                let index = mismatch.cluster.saturating_sub(geometry.block_start(number));
                write_entry(&mut block, index, geometry.refcount_order, mismatch.references);
            }
            self.io.write(offset, block).await?;
        }
        self.walk.block = None;
        self.io.flush().await
    }

    /// Prepares the first write. Makes durable what was read: a killed program or a failed sync may have left tables or
    /// a header that are not durable, and the writes rely on them. Clears the autoclear bits of structures that we do
    /// not keep valid.
    async fn begin_writing(&mut self) -> IoResult {
        if self.started {
            return Ok(());
        }
        if let Some(data) = self.io.data() {
            data.start(FileOp::Flush).await?;
        }
        settle_header(self.io).await?;
        self.started = true;
        let known = self.header.autoclear_features & AUTOCLEAR_KNOWN;
        if known == self.header.autoclear_features {
            return Ok(());
        }
        self.change_header(|sector| put(sector, OFFSET_AUTOCLEAR, &known.to_be_bytes())).await
    }

    /// Clears the marks "dirty" and "corrupt" of an image that has no errors left but leaks. Also makes the header
    /// durable.
    async fn say_clean(&mut self) -> IoResult {
        if !self.started {
            settle_header(self.io).await?;
        }
        let report = self.walk.report;
        if self.header.version < 3 || report.check_errors > 0 || report.corruptions > 0 {
            return Ok(());
        }
        let last = OFFSET_INCOMPATIBLE.saturating_add(7);
        let marks = (INCOMPATIBLE_CORRUPT | INCOMPATIBLE_DIRTY) as u8;
        let sector = self.io.read(0, HEADER_SECTOR_BYTES, PastEnd::Fails).await?;
        if sector.get(last).is_none_or(|byte| byte & marks == 0) {
            return Ok(());
        }
        self.begin_writing().await?;
        self.change_header(|sector| {
            if let Some(byte) = sector.get_mut(last) {
                *byte &= !marks;
            }
        })
        .await
    }

    /// Changes the header's first sector, durably. Writes nothing if nothing changes.
    async fn change_header(&mut self, change: impl FnOnce(&mut AlignedBuf)) -> IoResult {
        let old = self.io.read(0, HEADER_SECTOR_BYTES, PastEnd::Fails).await?;
        let mut sector = AlignedBuf::copy_of(&old);
        change(&mut sector);
        if *sector == *old {
            return Ok(());
        }
        self.io.write(0, sector).await?;
        self.io.flush().await
    }
}

/// Writes the header that was read once more, durably. After a failed sync the storage may have another header than the
/// page cache, and no later sync writes it unless it is written again.
pub(crate) async fn settle_header(io: &MetaIo) -> IoResult {
    let sector = io.read(0, HEADER_SECTOR_BYTES, PastEnd::Fails).await?;
    io.write(0, sector).await?;
    io.flush().await
}

/// The result of [`recount`].
struct Recount {
    mismatches: Vec<Mismatch>,
    report: CheckReport,
    kinds: Kinds,
    overcounted: BTreeSet<u64>,
}

/// Counts all references again: refcounts that are too high now belong to the old refcounts' space.
async fn recount(io: &MetaIo, header: &Header, file_bytes: u64, before: &Walk<'_, '_>) -> IoResult<Recount> {
    let mut silent = |_| true;
    let mut walk = Walk::begin(io, header, file_bytes, &mut silent).await?;
    walk.lift_limits();
    walk.clusters = walk.clusters.max(before.clusters);
    walk.bitmaps.clone_from(&before.bitmaps);
    walk.count_all().await?;
    let counted = walk.report;
    walk.compare().await;
    let image_end_offset = walk.report.image_end_offset;
    let report = CheckReport { image_end_offset, ..counted };
    let Walk { mismatches, kinds, overcounted, .. } = walk;
    Ok(Recount { mismatches, report, kinds, overcounted })
}

fn put(target: &mut [u8], at: usize, new: &[u8]) {
    for (target, byte) in target.iter_mut().skip(at).zip(new) {
        *target = *byte;
    }
}
