//! Repairing an image that was left dirty, before it is written to.
//!
//! This is the repair of `check -r all`, so a power cut at any moment leaves an image that is no worse, and still
//! dirty. But no user asked for it, so it takes a bounded amount of memory, and begins only if wrong refcounts explain
//! all errors.

use crate::check::repair::{Job, settle_header};
use crate::check::report::{CheckEvent, CheckReport, CheckWatch};
use crate::check::walk::{Walk, header_to_check};
use crate::layout::header::Header;
use crate::layout::header::read_first_cluster;
use block::{Error, ErrorKind, File, Locks, MetaIo, Result};
use std::time::{Duration, Instant};

/// How often a repair logs its progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

/// The most bytes of counts for a repair at open: enough for 16 TiB in clusters of 64 KiB.
const COUNTS_BYTES_MAX: usize = 1 << 30;
/// The most clusters with tables for a repair at open.
const TABLES_MAX: usize = 4 << 20;
/// The most entries with a wrong flag that a repair at open corrects. Each takes some 150 bytes.
const WRONG_FLAGS_MAX: usize = 1 << 20;

/// Repairs an image that is not open, if it was left dirty, before it is written to. In any case, makes the header that
/// is read durable.
pub(crate) async fn repair_if_dirty(io: &MetaIo, file: &dyn File, name: &str) -> Result<()> {
    let failed = |error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the header"), error);
    let cluster = read_first_cluster(io).await.map_err(failed)?;
    let header = Header::parse(&cluster, name, false)?;
    if header.is_dirty() {
        repair_at_open(io, file.info().locks, file.length_bytes()?, name).await?;
    }
    settle_header(io)
        .await
        .map_err(|error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot make its header durable"), error))
}

/// Repairs an image that was left dirty, and returns the new length of the file. Without locks the image is refused: it
/// may be dirty because another process uses it.
pub(crate) async fn repair_at_open(io: &MetaIo, locks: Locks, file_bytes: u64, name: &str) -> Result<u64> {
    if locks == Locks::Lacking {
        let what = format!(
            "'{name}' was not closed cleanly (dirty bit), or another program is writing to it: its file system has no \
             locks that would tell. If you know that nobody uses it, repair it with 'check -r all'"
        );
        return Err(Error::new(ErrorKind::Unsupported, what).only_for_writing());
    }
    tracing::warn!("'{name}' was not closed cleanly (dirty bit): its refcounts are repaired before it is used");
    let mut told = Instant::now();
    let mut watch = |event| {
        if let CheckEvent::Progress(done, total) = event
            && told.elapsed() >= PROGRESS_EVERY
        {
            told = Instant::now();
            tracing::info!("'{name}': repairing, step {done} of {total}");
        }
        true
    };
    let report = repair_dirty(io, file_bytes, name, &mut watch).await?;
    tracing::info!(
        "'{name}': repaired; {} refcounts were too low, {} clusters had leaked",
        report.corruptions_fixed,
        report.leaks_fixed
    );
    Ok(file_bytes.max(report.image_end_offset))
}

/// Repairs an image whose refcounts are stale (dirty bit), so that it can be written to. Before the first write, it
/// makes sure that nothing will be wrong afterwards. If it cannot, or if counting takes too much memory, the error says
/// why, and the file is unchanged.
async fn repair_dirty(io: &MetaIo, file_bytes: u64, name: &str, watch: &mut CheckWatch<'_>) -> Result<CheckReport> {
    let failed =
        |error| Error::with_source(ErrorKind::Io, format!("'{name}': the repair did not get to its end"), error);
    let hopeless = |why: String| {
        let text = format!(
            "'{name}' was not closed cleanly (dirty bit), and its refcounts alone do not explain what is wrong with it: \
             {why}. Nothing was changed. It can be opened read-only, and 'check -r all' repairs what can be repaired"
        );
        Error::new(ErrorKind::BadImage, text)
    };
    let (header, bitmaps) = header_to_check(io, name).await?;
    let mut walk = Walk::begin(io, &header, file_bytes, watch).await.map_err(failed)?;
    (walk.repairs, walk.bitmaps) = (true, bitmaps);
    walk.be_strict();
    if let Err(error) = walk.count_all().await {
        return Err(hopeless(format!("not all of it can be read ({error})")));
    }
    walk.strict = false;
    if walk.hopeless.is_none() && walk.report.check_errors > 0 {
        walk.hopeless = Some("not all of it can be read".to_owned());
    }
    if let Some(cluster) = walk.overcounted.first() {
        let offset = walk.geometry.start_of(*cluster);
        let why = format!("there are more references to the cluster at {offset:#x} than a refcount can count");
        walk.hopeless.get_or_insert(why);
    }
    if let Some(why) = walk.hopeless.take() {
        return Err(hopeless(why));
    }
    let counted = walk.report;
    walk.compare().await;
    walk.go_on().map_err(|error| hopeless(error.to_string()))?;
    walk.lift_limits();
    let mut job = Job::new(walk, io, &header);
    let wrong = job.walk.wrong_flags(true, WRONG_FLAGS_MAX).await.map_err(failed)?;
    if let Some(place) = job.untouchable(&wrong) {
        return Err(hopeless(format!("the table entry at {place:#x} lies where something else lies, too")));
    }
    if wrong.len() >= WRONG_FLAGS_MAX {
        return Err(hopeless(format!("more than {WRONG_FLAGS_MAX} entries have a wrong flag")));
    }
    job.repair_all(counted, wrong).await.map_err(failed)?;
    let Job { walk, .. } = job;
    let report = walk.end()?;
    match report.corruptions > 0 || report.check_errors > 0 {
        true => {
            let what = format!("'{name}' was not closed cleanly (dirty bit), and could be repaired in part only");
            Err(Error::new(ErrorKind::BadImage, what))
        }
        false => Ok(report),
    }
}

impl Walk<'_, '_> {
    /// Stops at errors that refcounts do not explain, and bounds the memory of the counts.
    pub(crate) fn be_strict(&mut self) {
        self.strict = true;
        self.references.set_memory_bytes(COUNTS_BYTES_MAX);
        self.own_references.set_memory_bytes(COUNTS_BYTES_MAX / 4);
    }

    /// Gives up if the counts exceed their memory.
    pub(crate) fn limit_memory(&mut self) {
        let is_full = self.references.is_full() || self.own_references.is_full();
        if is_full || self.kinds.len() > TABLES_MAX {
            self.give_up("counting its references takes more than 1 GiB of memory".to_owned());
        }
    }
}
