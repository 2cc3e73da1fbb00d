//! Making the file of a disk's top layer as short as what it holds, while guests use the disk, by a job.
//!
//! What the top layer holds is copied to a new file beside the old one, as a mirror does it, and the new file takes the old
//! one's name. So the tables move, too, and the file is as short as it can be. The host needs room for both meanwhile.
//!
//! The new file is linked in the old one's place when the disk has gone over to it. Until then whoever keeps the record
//! names it by its own name, so that it is found whenever the daemon dies.

use crate::change::Made;
use crate::daemon::Daemon;
use crate::status::{JobId, JobKind, NodeId};
use block::{Disk, Error, ErrorKind, File, Result, StatusQuery};
use drive::EngineOpener;
use image::{Aim, CreateOptions, FileName, Format, Image, MirrorEnd, MirrorScope, MirrorTarget, Opener, Role, mirror};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Behind the name of an image while a shorter one is made.
const SUFFIX: &str = ".compact";
/// Bits of the features in a header, which the specification of qcow2 numbers.
const EXTENDED_L2: u64 = 1 << 4;
const LAZY_REFCOUNTS: u64 = 1 << 0;

impl Daemon {
    /// The file in which a shorter image for a disk is made.
    pub fn compact_file(&self, node: NodeId) -> Result<PathBuf> {
        let (_work, _, image) = self.image_for("a look at its layers".to_owned(), node, None)?;
        Ok(with_suffix(&path_of(&image)?, SUFFIX))
    }

    /// Starts to make the file of a disk's top layer as short as what it holds. Before the disk goes over to the new file,
    /// `moved` is called; when that has the old one's name, `named` is. Whoever keeps a record of the disks makes it durable
    /// there which of the two names the disk has. `until_end` is dropped when the job has ended. Refused for images with internal snapshots, bitmaps or compressed
    /// clusters, which a copy would not keep, and for raw images, which give space back by themselves.
    pub fn start_compact_with(
        &self,
        node: NodeId,
        aim: Aim,
        bytes_per_second: Option<u64>,
        moved: impl FnOnce() -> Result<()> + Send + 'static,
        named: impl FnOnce() -> Result<()> + Send + 'static,
        until_end: impl Send + 'static,
    ) -> Result<JobId> {
        let (_work, found, image) = self.image_for("a look at its layers".to_owned(), node, None)?;
        let options = EngineOpener::of_disk(&found.options).with_buffers(image.buffers());
        let (mut made, target, paths) = shorter(&image, &options)?;
        drop((found, image));
        self.start_job(JobKind::Compact, node, bytes_per_second, move |image, watch, _| {
            watch.set_aim(aim);
            mirror(image, target, MirrorEnd::Switch, watch, || {
                moved()?;
                made.keep();
                Ok(())
            })?;
            let (_until_end, (old, new)) = (until_end, paths);
            let lies = |error: Error| error.in_context(format!("the disk lies in '{}' now", new.display()));
            put_in_place(&new, &old).map_err(lies)?;
            named()?;
            let removed = std::fs::remove_file(&new).and_then(|()| sync_directory(&new));
            removed.map_err(|error| {
                Error::io(format!("cannot remove '{}', another name of the disk", new.display()), error)
            })
        })
    }
}

/// Makes an empty image like the top layer of a disk, beside it.
fn shorter(image: &Image, opener: &EngineOpener) -> Result<(Made, MirrorTarget, (PathBuf, PathBuf))> {
    let old = path_of(image)?;
    let refuse = |what: &str| {
        Err(Error::new(ErrorKind::Unsupported, format!("'{}' is not made shorter: {what}", old.display())))
    };
    let Some(header) = image.qcow2_header() else {
        return refuse("only qcow2 images are; a raw one gives back what the guest discards by itself");
    };
    if header.snapshots > 0 {
        return refuse("it has internal snapshots, which a copy would not have");
    }
    if header.data_file.is_some() || header.encryption.is_some() {
        return refuse("it has an external data file, or is encrypted");
    }
    if !image.bitmaps()?.is_empty() {
        return refuse("it has bitmaps, which a copy would not have");
    }
    for run in image.block_status(&StatusQuery::all().with(|query| query.layers = 1))? {
        if run?.compressed {
            return refuse("it has compressed clusters, which would be unpacked");
        }
    }
    let layers = image.layer_file_names().count();
    let scope = if layers > 1 { MirrorScope::Top } else { MirrorScope::Full };
    let options = format_qcow2::CreateOptions::default().with(|options| {
        options.size_bytes = header.size_bytes;
        options.cluster_size = 1u64.wrapping_shl(header.cluster_bits);
        options.version = header.version;
        options.refcount_bits = header.refcount_bits;
        options.compression = header.compression;
        options.backing_file.clone_from(&header.backing_file);
        options.backing_format.clone_from(&header.backing_format);
        options.extended_l2 = header.incompatible_features & EXTENDED_L2 != 0;
        options.lazy_refcounts = header.compatible_features & LAZY_REFCOUNTS != 0;
    });
    let new = with_suffix(&old, SUFFIX);
    let mut made = Made::default();
    made.file(&new, 0)?;
    keep_owner(&old, &new)?;
    let file: Arc<dyn File> = opener.open(&FileName::from(&new), Role::Writable)?;
    image::create(&file, &CreateOptions::Qcow2(options))?;
    // It will have that name.
    let target = MirrorTarget::open(&FileName::from(&old), file, Format::Qcow2, scope, true)?.replacing_top();
    Ok((made, target, (old, new)))
}

fn path_of(image: &Image) -> Result<PathBuf> {
    let top = image.file_names().next();
    let path = top.as_ref().and_then(FileName::path).map(Path::to_owned);
    path.ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "the disk has no path beside which a shorter image could lie")
    })
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Whoever may use the old file may use the new one.
fn keep_owner(old: &Path, new: &Path) -> Result<()> {
    use std::os::unix::fs::{MetadataExt, chown};
    let failed = |error| Error::io(format!("cannot give '{}' the mode of '{}'", new.display(), old.display()), error);
    let meta = std::fs::metadata(old).map_err(failed)?;
    std::fs::set_permissions(new, meta.permissions()).map_err(failed)?;
    // Only root may give files away; then there is nothing to give, or nothing to be done.
    let _ = chown(new, Some(meta.uid()), Some(meta.gid()));
    Ok(())
}

/// Gives the file `new` the name `old`, in place of the file that has it. It keeps its own name, too. May be repeated.
pub fn put_in_place(new: &Path, old: &Path) -> Result<()> {
    let failed =
        |error| Error::io(format!("cannot put '{}' in the place of '{}'", new.display(), old.display()), error);
    let link = with_suffix(new, ".link");
    let forget = || match std::fs::remove_file(&link) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    forget().and_then(|()| std::fs::hard_link(new, &link)).map_err(failed)?;
    // Where both are one file already, nothing is renamed.
    std::fs::rename(&link, old).and_then(|()| forget()).and_then(|()| sync_directory(old)).map_err(failed)
}

fn sync_directory(file: &Path) -> std::io::Result<()> {
    std::fs::File::open(file.parent().unwrap_or(Path::new("/")))?.sync_all()
}
