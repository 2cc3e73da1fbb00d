//! Backups of running disks: copies of one point in time to another image.
//!
//! A fleece goes on top of the disk and takes what guests write, while a thread of its own copies the disk below. The
//! fleece is taken back after the copy, or if the copy fails or the fleece becomes too large. So a target that is slow
//! or hangs keeps no guest waiting.

use super::fleece::{self, Fleece, FleeceRecord};
use super::layers::top_of;
use super::made::{MadeFile, name_until_whole, refuse_existing_target, refuse_part};
use crate::table::Found;
use block::{Disk as _, Error, ErrorKind, File, Result};
use drive::{DiskOptions, EngineOpener, check_room};
use engine::CacheMode;
use image::{
    Backing, BackingPolicy, Copied, CopyOut, CopyWatch, CreateOptions, FileName, Format, Image, ImageOptions,
    OpenedOverlay, Opener, PointInTime, Role,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// How often the fleece is looked after.
const LOOK: Duration = Duration::from_millis(10);

/// What is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackupMode {
    /// All that the guest sees.
    Full,
    /// What the top layer holds.
    Top,
    /// What a bitmap marks as written.
    Incremental,
    /// What a bitmap marks as written since the last backup with it, as a new image that rests on that one; all that
    /// the guest sees if there is none.
    SinceLast,
}

/// The options of a backup.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BackupOptions {
    /// The image to copy to. A file that is made has another name until it is whole ([`name_until_whole`]).
    pub target: FileName,
    /// Its format.
    pub format: Format,
    /// The target exists and is overwritten. Otherwise it is made.
    pub existing: bool,
    /// What is copied.
    pub mode: BackupMode,
    /// A bitmap of the top layer. It is cleared on success, and says what an incremental backup copies.
    pub bitmap: Option<String>,
    /// The backing file of a new target: an earlier backup.
    pub base: Option<PathBuf>,
    /// Where the fleece lies; by default beside the disk's image.
    pub fleece_directory: Option<PathBuf>,
    /// How large the fleece may become.
    pub fleece_quota_bytes: Option<u64>,
    /// The most bytes that are copied in each second.
    pub bytes_per_second: Option<u64>,
}

impl BackupOptions {
    /// Copies all that the guest sees to a new image of this format.
    #[must_use]
    pub fn new(target: FileName, format: Format) -> Self {
        Self {
            target,
            format,
            existing: false,
            mode: BackupMode::Full,
            bitmap: None,
            base: None,
            fleece_directory: None,
            fleece_quota_bytes: None,
            bytes_per_second: None,
        }
    }

    /// Changes some of the options: `BackupOptions::new(target, format).with(|options| ...)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// A backup that is whole and durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WholeBackup<'a> {
    /// The new image, unless it was there before, by the name that it was made with.
    pub made: Option<&'a FileName>,
    /// The bitmap that is going to be cleared, if there is one.
    pub bitmap: Option<&'a str>,
    /// The new image, if the next backup with the bitmap can rest on it.
    pub base_of_next: Option<&'a Path>,
}

/// The last backup with a bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastBackup {
    /// Its path.
    pub path: PathBuf,
    /// Whether its file is there, and the path has not got another file.
    pub is_there: bool,
}

/// Keeps a record of the disks. Each change is durable when its call returns.
pub trait BackupRecord: FleeceRecord {
    /// Returns the last backup with this bitmap, if the bitmap notes what was written since.
    fn last_with(&self, bitmap: &str) -> Option<LastBackup>;
    /// Notes that the target will be made. Until [`BackupRecord::is_whole`] or [`BackupRecord::is_given_up`] is called,
    /// it is half a backup, which a daemon removes that finds it in the record.
    fn will_make_target(&mut self, target: &FileName) -> Result<()>;
    /// Notes that its file is there. Nothing was written to it.
    fn has_made_target(&mut self, target: &FileName) -> Result<()>;
    /// Notes that a backup is whole.
    fn is_whole(&mut self, backup: &WholeBackup<'_>) -> Result<()>;
    /// Notes that the target was removed.
    fn is_given_up(&mut self, target: &FileName) -> Result<()>;
}

/// What a backup job works with.
pub(crate) struct Backup {
    pub(crate) found: Found,
    pub(crate) policy: (BackingPolicy, Vec<PathBuf>),
    pub(crate) options: BackupOptions,
    pub(crate) fleece: PathBuf,
    /// Watches how the fleece is taken back. Nothing cancels that: the fleece holds what guests wrote.
    pub(crate) ending: Arc<CopyWatch>,
}

/// Refuses impossible options before anything is done.
pub(crate) fn check(name: &str, image: &Image, options: &BackupOptions) -> Result<()> {
    let bad = |what: String| Err(Error::new(ErrorKind::BadOption, what));
    if image.format().is_some_and(|format| !format.can_be_copied_live()) {
        let what =
            "its top layer is a scratch overlay (snapshot=on): put a layer on one that is kept first (ctl snapshot)";
        return Err(Error::new(ErrorKind::Unsupported, format!("a disk cannot be backed up while {what}")));
    }
    match (options.mode, &options.bitmap) {
        (BackupMode::Incremental | BackupMode::SinceLast, None) => {
            return bad("an incremental backup needs a bitmap (--bitmap)".to_owned());
        }
        (BackupMode::SinceLast, _)
            if options.existing || options.base.is_some() || !options.format.can_have_backing() =>
        {
            return bad(
                "what was written since the last backup goes to a new qcow2 image, which rests on that one".to_owned()
            );
        }
        (BackupMode::Top, Some(_)) => return bad("a backup of the top layer takes no bitmap".to_owned()),
        (BackupMode::Top, _) if options.existing || options.base.is_some() || !options.format.can_have_backing() => {
            return bad(
                "a backup of the top layer makes a new qcow2 image, which rests on what the top rests on".to_owned()
            );
        }
        (BackupMode::Incremental, _) if !options.existing && options.base.is_none() => {
            let what = "an incremental backup holds what has changed only: name the backup that a new image is to rest on \
                        (--base), or copy into an image that is there (--existing)";
            return bad(what.to_owned());
        }
        _ => {}
    }
    if options.base.is_some() && (options.existing || !options.format.can_have_backing()) {
        return bad("only a new qcow2 image can be made to rest on another (--base)".to_owned());
    }
    let Some(bitmap) = &options.bitmap else { return Ok(()) };
    let top = top_of(image);
    let bitmaps = image.online_bitmaps()?;
    let found = bitmaps.iter().find(|found| found.name == *bitmap && Some(&found.file) == top.as_ref());
    match found {
        Some(found) if found.inconsistent => bad(format!(
            "bitmap '{bitmap}' is inconsistent: make a full backup with a new one (ctl bitmap remove, ctl bitmap add)"
        )),
        Some(_) => Ok(()),
        None if bitmaps.iter().any(|found| found.name == *bitmap) => bad(format!(
            "bitmap '{bitmap}' is in a lower layer of the disk '{name}', and does not note what is written now"
        )),
        None => bad(format!("the disk '{name}' has no bitmap '{bitmap}': make one with 'ctl bitmap add'")),
    }
}

impl Backup {
    /// Chooses between all of the disk and what was written since the last backup. No other backup of the disk runs.
    pub(crate) fn choose_mode(&mut self, image: &Image, watch: &CopyWatch, record: &dyn BackupRecord) -> Result<()> {
        // The disk's layers and bitmaps may have changed since the call.
        check(&self.found.name, image, &self.options)?;
        let Some(bitmap) = self.options.bitmap.as_deref().filter(|_| self.options.mode == BackupMode::SinceLast) else {
            return Ok(());
        };
        let last = record.last_with(bitmap);
        let outcome = match &last {
            None => format!("a full backup: there was none with bitmap '{bitmap}'"),
            Some(base) if base.is_there => {
                format!("an incremental backup: what was written since '{}', on which it rests", base.path.display())
            }
            Some(gone) => format!("a full backup: the last one, '{}', is not there any more", gone.path.display()),
        };
        tracing::info!(disk = %self.found.name, "{outcome}");
        watch.add_outcome(outcome);
        match last.filter(|base| base.is_there) {
            None => self.options.mode = BackupMode::Full,
            Some(base) => {
                self.policy.1.push(base.path.clone());
                (self.options.mode, self.options.base) = (BackupMode::Incremental, Some(base.path));
            }
        }
        Ok(())
    }

    pub(crate) fn run(
        &self,
        image: &Image,
        watch: &CopyWatch,
        has_new_top: &dyn Fn(),
        record: &mut dyn BackupRecord,
    ) -> Result<()> {
        let mut target = Target::default();
        let opened = target.open(self, image, watch, record);
        let result = opened.and_then(|()| self.run_to(&mut target, image, watch, has_new_top, record));
        target.close();
        match target.made.take() {
            // A target that could not be removed stays on record: the next daemon removes it.
            Some(_) if target.is_removed => result.and(record.is_given_up(&name_until_whole(&self.options.target))),
            _ => result,
        }
    }

    fn run_to(
        &self,
        target: &mut Target,
        image: &Image,
        watch: &CopyWatch,
        has_new_top: &dyn Fn(),
        record: &mut dyn BackupRecord,
    ) -> Result<()> {
        if watch.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled: nothing was copied"));
        }
        let path = &self.fleece;
        let (point, mut fleece) = fleece::begin(&self.found, image, path, self.options.fleece_quota_bytes, record)?;
        has_new_top();
        let copy = self.copy_of(image, &point, target);
        let (copied, ended) = std::thread::scope(|scope| {
            // The copy is moved into the thread, so its files are closed when it ends.
            let copying = copy.and_then(|(copy, what)| {
                let run = move || copy.run(&what, watch);
                let started = std::thread::Builder::new().name("backup".to_owned()).spawn_scoped(scope, run);
                started.map_err(|error| Error::io("cannot start a thread for a backup", error))
            });
            let copied = copying.and_then(|copying| watched(copying, &mut fleece, watch));
            let copied = copied.and_then(|()| self.is_whole(image, target, record));
            // The copy ends early. Guests must not wait for it.
            watch.cancel();
            target.give_up_unless(copied.is_ok());
            if copied.is_err() {
                // Its result is of no use, and its thread is waited for.
                watch.give_up();
            }
            let cleared = match (&self.options.bitmap, &copied) {
                (Some(bitmap), Ok(())) => point.clear_bitmap(bitmap).map_err(|error| {
                    error.in_context(format!("the backup is whole, and bitmap '{bitmap}' could not be cleared"))
                }),
                _ => Ok(()),
            };
            let ended = fleece::end(&self.found.name, image, point, path, &self.ending, has_new_top, record);
            (copied.and(cleared), ended)
        });
        target.close();
        fleece.let_go(ended.is_ok());
        match (copied, ended) {
            (copied, Ok(())) => copied,
            (Ok(()), Err(error)) => Err(error.in_context("the backup is whole")),
            (Err(copied), Err(error)) => Err(Error::new(copied.kind(), format!("{copied}; {error}"))),
        }
    }

    /// Notes that the copy is complete and durable, before the bitmap is cleared of what it holds.
    fn is_whole(&self, image: &Image, target: &mut Target, record: &mut dyn BackupRecord) -> Result<()> {
        let bitmap = self.options.bitmap.as_deref();
        let (made, name) = (target.made.as_ref().map(|made| made.name.clone()), &self.options.target);
        if let Some(part) = &mut target.made {
            part.give_name(name)?;
        }
        if made.is_none() && bitmap.is_none() {
            return Ok(());
        }
        let is_recording = match bitmap {
            None => false,
            Some(name) => {
                image.online_bitmaps()?.iter().find(|bitmap| bitmap.name == name).is_some_and(|bitmap| bitmap.recording)
            }
        };
        // The next backup names the file it rests on by its path.
        let can_rest = made.is_some() && is_recording && self.options.format.can_have_backing();
        let base_of_next = name.path().filter(|_| can_rest);
        record.is_whole(&WholeBackup { made: made.as_ref(), bitmap, base_of_next })?;
        target.made = None;
        Ok(())
    }

    /// Returns the copy to make, and what it copies.
    fn copy_of(&self, image: &Image, point: &PointInTime<'_>, target: &mut Target) -> Result<(CopyOut, Copied)> {
        let what = match (self.options.mode, &self.options.bitmap) {
            (BackupMode::Top, _) => Copied::TopLayer,
            (BackupMode::Incremental, Some(bitmap)) => Copied::Ranges(point.read_bitmap(bitmap)?.ranges()),
            _ => Copied::All,
        };
        // From here on the layers do not change.
        refuse_own_layer(image, &self.options.target)?;
        let to = Arc::new(match target.opened.take() {
            Some(Opened::Image(image)) => image,
            Some(Opened::Overlay(overlay)) => point.image_beside_top(overlay)?,
            None => return Err(Error::new(ErrorKind::Io, "the target is not open")),
        });
        target.copied_to = Some(Arc::clone(&to));
        Ok((point.copy_out(to, target.is_blank)?, what))
    }
}

/// Waits until the copy ends, the fleece has become too large, or the job is cancelled.
fn watched(copying: ScopedJoinHandle<'_, Result<()>>, fleece: &mut Fleece, watch: &CopyWatch) -> Result<()> {
    while !copying.is_finished() {
        fleece.look_after()?;
        if watch.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled: the target is not whole"));
        }
        std::thread::sleep(LOOK);
    }
    copying.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Io, "the copy panicked")))
}

enum Opened {
    Image(Image),
    /// An overlay, to be opened over the layers below the disk's top.
    Overlay(OpenedOverlay),
}

/// The target of the copy. If it was made here and is not complete, it is removed again.
#[derive(Default)]
struct Target {
    opened: Option<Opened>,
    /// Set while a thread copies to it.
    copied_to: Option<Arc<Image>>,
    is_blank: bool,
    /// The target's file, until the backup is complete.
    made: Option<MadeFile>,
    /// The incomplete target was removed.
    is_removed: bool,
}

impl Target {
    /// Opens the target; makes it first if it is to be new.
    fn open(&mut self, backup: &Backup, image: &Image, watch: &CopyWatch, record: &mut dyn BackupRecord) -> Result<()> {
        let options = &backup.options;
        let name = if options.existing { options.target.clone() } else { name_until_whole(&options.target) };
        let name = &name;
        let create = if options.existing { None } else { Some(new_target(backup, image)?) };
        if create.is_some() {
            refuse_existing_target(&options.target)?;
            if !options.format.has_tables() && matches!(name, FileName::Nbd(_)) {
                let what =
                    format!("'{name}' exists, as a raw image is all of a server's disk: write over it (--existing)");
                return Err(Error::new(ErrorKind::BadOption, what));
            }
            self.make(name, record)?;
        }
        let buffers = image.buffers();
        let direct = direct_opener_for(name, &backup.found.options).map(|opener| opener.with_buffers(buffers.clone()));
        let cached = EngineOpener::default().writing_behind().with_buffers(buffers);
        let opener = direct.as_ref().unwrap_or(&cached);
        if let Some(create) = create {
            let file: Arc<dyn File> = opener.open(name, Role::Writable)?;
            self.is_blank = !create.has_backing();
            check_room(&*file, &create)?;
            image::create(&file, &create)?;
            if options.mode == BackupMode::Top && !self.is_blank {
                self.opened = Some(Opened::Overlay(OpenedOverlay::open(name, file)?));
                return Ok(());
            }
        }
        refuse_own_layer(image, name)?;
        let open = ImageOptions::new(name.clone()).with(|open| {
            open.format = Some(options.format);
            open.allow_backing = backup.policy.0.clone();
            open.listed.clone_from(&backup.policy.1);
        });
        let watch = options.existing.then_some(watch);
        self.opened = Some(Opened::Image(open_target(&open, opener, &cached, watch)?));
        Ok(())
    }

    /// Makes the target's file, after the record names it.
    fn make(&mut self, name: &FileName, record: &mut dyn BackupRecord) -> Result<()> {
        // What the record says of another file of this name stays.
        record.will_make_target(name)?;
        match refuse_part(name).and_then(|()| MadeFile::make(name, 0)) {
            Ok(made) => self.made = Some(made),
            Err(error) => {
                record.is_given_up(name)?;
                return Err(error);
            }
        }
        record.has_made_target(name)
    }

    /// Unless the copy is done, cancels the target's requests, so that a thread returns whose storage hangs.
    fn give_up_unless(&mut self, is_done: bool) {
        if let Some(image) = self.copied_to.take().filter(|_| !is_done) {
            image.cancel();
        }
    }

    /// Closes the target, and removes it if it was made here and is not complete.
    fn close(&mut self) {
        (self.opened, self.copied_to) = (None, None);
        let Some(made) = self.made.as_ref().filter(|_| !self.is_removed) else { return };
        match made.remove() {
            Ok(()) => self.is_removed = true,
            Err(error) => tracing::warn!("cannot remove '{}', which is half a backup: {error}", made.name),
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.close();
    }
}

/// Returns an opener for direct I/O, if the disk uses direct I/O and the target's file system can. Else much would be
/// written back at once, and guests of the same storage would wait.
fn direct_opener_for(target: &FileName, disk: &DiskOptions) -> Option<EngineOpener> {
    let direct = EngineOpener::default().with_cache(CacheMode::None);
    let can_be_direct = || direct.clone().without_locks().open(target, Role::Backing).is_ok();
    (disk.cache.is_direct() && target.path().is_some() && can_be_direct()).then_some(direct)
}

/// Opens a target. If it was not made here, it is checked first, until the `watch` cancels. If opening fails, direct
/// I/O may be impossible for a layer below the target, so it is opened again without.
fn open_target(
    options: &ImageOptions,
    opener: &dyn Opener,
    cached: &dyn Opener,
    watch: Option<&CopyWatch>,
) -> Result<Image> {
    let open = |opener| match watch {
        Some(watch) => image::open_to_overwrite(options, opener, &mut |_, _| !watch.is_cancelled()),
        None => image::open(options, opener),
    };
    open(opener).or_else(|error| match error.kind() {
        ErrorKind::Io => open(cached),
        _ => Err(error),
    })
}

/// Refuses a target that is a layer of the disk: the copy would destroy the disk.
fn refuse_own_layer(image: &Image, target: &FileName) -> Result<()> {
    let canonical = target.path().and_then(|path| path.canonicalize().ok()).map(FileName::from);
    let target_is = |file: &FileName| file.is_same_file(canonical.as_ref().unwrap_or(target));
    let is_it =
        |(own, data): (FileName, Option<FileName>)| target_is(&own) || data.is_some_and(|data| target_is(&data));
    if image.layer_file_names().any(is_it) {
        return Err(Error::new(ErrorKind::BadOption, format!("'{target}' is part of the disk: choose another target")));
    }
    Ok(())
}

/// Returns how to create a new target.
fn new_target(backup: &Backup, image: &Image) -> Result<CreateOptions> {
    let size_bytes = image.info().size_bytes;
    let named = |path: &Path| {
        let text = path.to_str().map(str::to_owned);
        text.ok_or_else(|| Error::new(ErrorKind::Unsupported, format!("'{}' is not UTF-8", path.display())))
    };
    let base = match (backup.options.mode, &backup.options.base) {
        (BackupMode::Top, _) => image.layer_in_header(1)?,
        (_, Some(base)) => {
            let file = EngineOpener::default().open(&FileName::from(base.as_path()), Role::Backing)?;
            let found = image::inspect(base.as_path(), &file, None)?;
            Some(Backing { file: named(base)?, format: Some(found.format.to_string()) })
        }
        _ => None,
    };
    CreateOptions::new(backup.options.format, size_bytes, base)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An opener that fails for one file, as direct I/O does on some file systems.
    struct Direct<'a>(&'a Path);

    impl Opener for Direct<'_> {
        fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
            if name.path() == Some(self.0) {
                return Err(Error::io(format!("Could not open '{name}'"), rustix::io::Errno::INVAL.into()));
            }
            EngineOpener::default().open(name, role)
        }
    }

    #[test]
    fn a_target_may_rest_on_an_image_that_cannot_be_opened_past_the_page_cache() {
        let directory = tempfile::tempdir().unwrap();
        let [base, target] = ["base", "target"].map(|name| directory.path().canonicalize().unwrap().join(name));
        let create = |path: &Path, options: &CreateOptions| {
            engine::create(path, 0).unwrap();
            image::create(&EngineOpener::default().open(&path.into(), Role::Writable).unwrap(), options).unwrap();
        };
        create(&base, &CreateOptions::raw(1 << 20));
        let below = Backing { file: base.display().to_string(), format: Some("raw".to_owned()) };
        create(&target, &CreateOptions::overlay(1 << 20, Some(below)));
        let options = ImageOptions::new(target.as_path()).with(|options| options.format = Some(Format::OF_OVERLAYS));
        let image = open_target(&options, &Direct(&base), &EngineOpener::default(), None).unwrap();
        assert_eq!(image.layer_file_names().count(), 2);
        image.close().unwrap();
        std::fs::remove_file(&base).unwrap();
        assert!(open_target(&options, &Direct(&base), &EngineOpener::default(), None).is_err());
    }
}
