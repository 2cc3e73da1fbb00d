//! The fleece: a file that takes what guests write while the disk below it is copied, or its internal snapshots change.
//! Also watches how much room it has.

use super::layers::{TakenOff, top_of};
use super::made::Made;
use crate::table::Found;
use block::{Disk, Error, ErrorKind, Result};
use image::{CopyWatch, CreateOptions, FileName, Image, OpenedOverlay, PointInTime};
use rustix::fs::{FallocateFlags, fallocate, ftruncate, statvfs};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The cluster size of the new file. Small writes copy nothing from below, and take no more space than their length.
/// They lie one behind the other, so the file has few extents, and is quickly removed.
const CLUSTER_BYTES: u64 = 4 << 10;
/// The cluster size for disks whose tables would be too large with small clusters. They are allocated in parts, so
/// small writes copy nothing.
const CLUSTER_BYTES_OF_LARGE: u64 = 128 << 10;
/// Disks of more bytes are large.
const LARGE_BYTES: u64 = 1 << 40;
/// How long a file is kept open after its disk let go of it: requests that have just ended may still hold it.
const KEPT_OPEN: Duration = Duration::from_secs(1);
/// Without a quota, one part in this many of the file system stays free for others, but at most this many bytes.
const SPARE_PART: u64 = 20;
const SPARE_BYTES_MAX: u64 = 1 << 30;
/// Space reserved beyond the quota, for what guests write while the fleece is taken back. It is one part in this many
/// of the quota, but at least this many bytes.
const RESERVE_PART: u64 = 8;
const RESERVE_BYTES_LEAST: u64 = 16 << 20;
/// Without a quota, so much space is reserved behind the end of the file. A direct write to reserved space goes to the
/// storage at once. Where a file system has to find space first, it refuses what must not wait, and a worker writes.
const AHEAD_BYTES: u64 = 32 << 20;

/// Keeps a record of a disk's fleece. Each change is durable when its call returns.
pub trait FleeceRecord: Send {
    /// Notes that a fleece will be made.
    fn will_make(&mut self, fleece: &Path) -> Result<()>;
    /// Notes that its file is there. Nothing was written to it.
    fn has_made(&mut self, fleece: &Path) -> Result<()>;
    /// Notes that the fleece is the top from here on.
    fn is_on_top(&mut self, fleece: &Path) -> Result<()>;
    /// Notes that the fleece was taken off, and that the layer below is the top from here on. Called again after an error of
    /// the kind [`ErrorKind::Unsure`].
    fn is_off(&mut self, layers: &TakenOff) -> Result<()>;
    /// Notes that a fleece was not made, or was made and is no layer.
    fn is_unmade(&mut self, fleece: &Path) -> Result<()>;
    /// Notes that the fleece's file is gone.
    fn is_removed(&mut self, fleece: &Path) -> Result<()>;
}

/// Makes a fleece and puts it on a disk. On an error the disk is as before.
pub(crate) fn begin<'a>(
    found: &Found,
    image: &'a Image,
    path: &Path,
    quota_bytes: Option<u64>,
    record: &mut dyn FleeceRecord,
) -> Result<(PointInTime<'a>, Fleece)> {
    record.will_make(path)?;
    let mut made = Made::default();
    let fleece = Fleece::make(&mut made, found, image, path, quota_bytes, || record.has_made(path));
    let mut is_named = false;
    let name = || {
        is_named = true;
        record.is_on_top(path)
    };
    let begun = fleece.and_then(|(fleece, overlay)| Ok((PointInTime::begin(image, overlay, name)?, fleece)));
    match begun {
        Ok(begun) => {
            made.keep();
            Ok(begun)
        }
        Err(error) => {
            // A file that was never the top goes before the record forgets it: after a kill, the next run knows its name.
            if !is_named {
                drop(std::mem::take(&mut made));
            }
            // Another top of this name is not ours.
            let undone = if is_named { record.is_removed(path) } else { record.is_unmade(path) };
            if let Err(second) = undone {
                // If the record may name it as the top of the disk, it stays, and is empty.
                made.keep();
                tracing::error!("the record may still name the fleece '{}': {second}", path.display());
            }
            Err(error)
        }
    }
}

/// Takes the fleece of the disk `name` back and removes it. `watch` watches that. On an error the fleece stays on top.
pub(crate) fn end(
    name: &str,
    image: &Image,
    point: PointInTime<'_>,
    path: &Path,
    watch: &CopyWatch,
    has_new_top: &dyn Fn(),
    record: &mut dyn FleeceRecord,
) -> Result<()> {
    let layers = TakenOff::of(image).ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
    point.end(watch, || record.is_off(&layers)).map_err(|error| {
        let path = path.display();
        let what = match error.kind() {
            ErrorKind::Unsure => format!("what guests have written since is in '{path}' and in the layer below it"),
            _ => format!(
                "what guests have written since stays in '{path}', which is the top of the disk; 'ctl commit {name}' takes it \
                 back"
            ),
        };
        error.in_context(what)
    })?;
    has_new_top();
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!("cannot remove '{}', which is not used any more: {error}", path.display());
    }
    record.is_removed(path)
}

/// A fleece's file, and its limits.
pub(crate) struct Fleece {
    path: PathBuf,
    file: File,
    quota_bytes: Option<u64>,
    /// The quota's space is not reserved, so the file system may run out of space.
    watches_space: bool,
    /// Where the space ends that is reserved ahead; `None` if the file system reserves none.
    reserved_end: Option<u64>,
}

impl Fleece {
    /// Makes the file, which must not exist, and calls `has_made` before it writes. Reserves its space if there is a quota.
    pub(crate) fn make(
        made: &mut Made,
        found: &Found,
        image: &Image,
        path: &Path,
        quota_bytes: Option<u64>,
        has_made: impl FnOnce() -> Result<()>,
    ) -> Result<(Self, OpenedOverlay)> {
        let is_large = image.info().size_bytes > LARGE_BYTES;
        let cluster_bytes = if is_large { CLUSTER_BYTES_OF_LARGE } else { CLUSTER_BYTES };
        let in_clusters = |options: CreateOptions| options.in_clusters(cluster_bytes, is_large);
        let overlay = made.overlay_with(found, image, &FileName::from(path), has_made, in_clusters)?;
        let failed = |error| Error::io(format!("cannot open the fleece '{}'", path.display()), error);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
        let mut fleece = Self { path: path.to_owned(), file, quota_bytes, watches_space: true, reserved_end: Some(0) };
        if let Some(quota_bytes) = quota_bytes {
            fleece.reserve(quota_bytes)?;
        }
        fleece.look_after()?;
        Ok((fleece, overlay))
    }

    /// Closes the file last, on a thread of its own: a file system may take seconds to free the space, and neither a
    /// reactor nor the job may wait for that. `is_off` says that the disk no longer uses the file and its contents are
    /// not needed: then its space is freed at once.
    pub(crate) fn let_go(self, is_off: bool) {
        let close = std::thread::Builder::new().name("fleece".to_owned()).spawn(move || self.close_last(is_off));
        if let Err(error) = close {
            tracing::debug!("cannot start a thread that closes a fleece: {error}");
        }
    }

    fn close_last(self, is_off: bool) {
        if is_off && let Err(error) = self.give_space_back() {
            tracing::debug!("the space of a fleece comes back when it is closed: {error}");
        }
        std::thread::sleep(KEPT_OPEN);
    }

    /// The length stays: the file may be mapped. Old requests for what lies where find that nothing does.
    fn give_space_back(&self) -> std::io::Result<()> {
        let length_bytes = self.file.metadata()?.len();
        if length_bytes > 0 {
            fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, length_bytes)?;
        }
        // What is reserved lies behind the end.
        Ok(ftruncate(&self.file, length_bytes)?)
    }

    fn reserve(&mut self, quota_bytes: u64) -> Result<()> {
        let more = (quota_bytes / RESERVE_PART).max(RESERVE_BYTES_LEAST);
        match fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, quota_bytes.saturating_add(more)) {
            Ok(()) => self.watches_space = false,
            // Its space is watched instead.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(errno) => {
                let what = format!("cannot keep {quota_bytes} bytes for the fleece '{}'", self.path.display());
                return Err(Error::io(what, errno.into()));
            }
        }
        Ok(())
    }

    /// Fails if the fleece has become too large. Reserves space for what guests write next.
    pub(crate) fn look_after(&mut self) -> Result<()> {
        let path = self.path.display();
        let failed = |error| Error::io(format!("cannot look at the fleece '{path}'"), error);
        let used_bytes = self.file.metadata().map_err(failed)?.len();
        if let Some(quota_bytes) = self.quota_bytes.filter(|quota_bytes| used_bytes > *quota_bytes) {
            let what = format!(
                "broken off: while it ran, guests overwrote more than the fleece's quota of {quota_bytes} \
                 bytes takes. Give it a larger one (--fleece-quota), or a faster target"
            );
            return Err(Error::new(ErrorKind::Io, what));
        }
        if !self.watches_space {
            return Ok(());
        }
        let space = statvfs(&self.path).map_err(|errno| failed(errno.into()))?;
        let in_bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
        let free_bytes = in_bytes(space.f_bavail);
        let spare_bytes = (in_bytes(space.f_blocks) / SPARE_PART).min(SPARE_BYTES_MAX);
        if free_bytes < spare_bytes {
            let what = format!(
                "broken off: fewer than {spare_bytes} bytes are left for the fleece '{path}'. Make room, or \
                 choose another place for the fleece of a backup (--fleece-dir)"
            );
            return Err(Error::new(ErrorKind::Io, what));
        }
        // Where little is left, nothing is taken that may not be needed.
        if free_bytes / 2 >= spare_bytes.saturating_add(AHEAD_BYTES) {
            self.reserve_ahead(used_bytes);
        }
        Ok(())
    }

    /// Reserves space behind the end of the file, unless there is enough.
    fn reserve_ahead(&mut self, length_bytes: u64) {
        let Some(end) = self.reserved_end.map(|end| end.max(length_bytes)) else { return };
        if end.saturating_sub(length_bytes) >= AHEAD_BYTES {
            return;
        }
        match fallocate(&self.file, FallocateFlags::KEEP_SIZE, end, AHEAD_BYTES) {
            Ok(()) => self.reserved_end = Some(end.saturating_add(AHEAD_BYTES)),
            Err(errno) => {
                // Space is found for each write.
                tracing::debug!("no space is reserved ahead for '{}': {errno}", self.path.display());
                self.reserved_end = None;
            }
        }
    }

    /// Returns a free name for a new fleece of the disk `name`: beside the disk's image, or in `directory`.
    pub(crate) fn path_for(image: &Image, name: &str, directory: Option<&Path>) -> Result<PathBuf> {
        let top = top_of(image);
        let top = top.as_ref().and_then(|top| top.path());
        let beside = match (directory, top) {
            (Some(directory), _) => directory,
            (None, Some(top)) if std::fs::metadata(top).is_ok_and(|meta| meta.file_type().is_block_device()) => {
                let what = format!("'{}' is a device, beside which no fleece can lie", top.display());
                return Err(Error::new(ErrorKind::Unsupported, format!("{what}: say where (--fleece-dir)")));
            }
            (None, Some(top)) => top.parent().unwrap_or(Path::new("/")),
            (None, None) => {
                let what = "the disk's image is no file beside which a fleece could lie: say where (--fleece-dir)";
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
        };
        // In one directory for several disks, two images may have one name. A disk's name may hold a slash.
        let own = top.and_then(Path::file_name).filter(|_| directory.is_none());
        let stem = own.map_or_else(|| name.replace('/', "-"), |own| own.to_string_lossy().into_owned());
        let name = |number: u32| beside.join(format!("{stem}.fleece{number}"));
        let free = (0..u32::MAX).map(name).find(|path| !path.exists());
        free.ok_or_else(|| Error::new(ErrorKind::Io, "no name is free for a fleece"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;
    use std::time::Instant;

    /// Whatever takes longer than this hangs.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A fleece, and another who has its file open.
    fn fleece(quota_bytes: Option<u64>) -> (Fleece, File) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fleece");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        let other = file.try_clone().unwrap();
        let mut fleece = Fleece { path, file, quota_bytes, watches_space: true, reserved_end: Some(0) };
        if let Some(quota_bytes) = quota_bytes {
            fleece.reserve(quota_bytes).unwrap();
        }
        std::os::unix::fs::FileExt::write_all_at(&fleece.file, &[7; 64 << 10], 0).unwrap();
        (fleece, other)
    }

    #[test]
    fn the_space_of_a_fleece_is_back_though_others_still_have_it_open() {
        let (fleece, other) = fleece(Some(1 << 20));
        if fleece.watches_space {
            return;
        }
        assert!(other.metadata().unwrap().blocks() > 0);
        fleece.let_go(true);
        let begun = Instant::now();
        while other.metadata().unwrap().blocks() > 0 {
            assert!(begun.elapsed() < PATIENCE, "{} blocks are left", other.metadata().unwrap().blocks());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(other.metadata().unwrap().len(), 64 << 10, "it may be mapped");
    }

    #[test]
    fn a_fleece_that_stays_on_the_disk_keeps_its_contents() {
        let (fleece, other) = fleece(Some(1 << 20));
        fleece.close_last(false);
        let mut bytes = vec![0; 64 << 10];
        std::os::unix::fs::FileExt::read_exact_at(&other, &mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn space_is_reserved_ahead_of_guests_and_is_back_when_the_fleece_is_off() {
        let directory = tempfile::tempdir().unwrap();
        let (mut fleece, other) = fleece(None);
        // Its own directory is gone.
        fleece.path = directory.path().to_owned();
        for length_bytes in [64 << 10, 100 << 20] {
            other.set_len(length_bytes).unwrap();
            // A file system may have little room, or may not reserve any.
            if fleece.look_after().is_err() {
                return;
            }
            let Some(end) = fleece.reserved_end.filter(|end| *end >= length_bytes) else { return };
            let found = other.metadata().unwrap();
            assert!(end >= length_bytes + AHEAD_BYTES && found.blocks() * 512 >= AHEAD_BYTES, "{end}, {found:?}");
            assert_eq!(found.len(), length_bytes);
            let enough = fleece.reserved_end;
            fleece.look_after().unwrap();
            assert_eq!(fleece.reserved_end, enough);
        }
        fleece.give_space_back().unwrap();
        assert_eq!((other.metadata().unwrap().blocks(), other.metadata().unwrap().len()), (0, 100 << 20));
    }
}
