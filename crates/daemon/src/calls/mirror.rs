//! Copies a disk in use to another image, by a job.

use crate::daemon::Daemon;
use crate::jobs::made::{Made, name_until_whole, refuse_existing_target, refuse_part};
use crate::state::status::{JobId, JobKind, NodeId};
use block::{Disk, Error, ErrorKind, File, Result};
use drive::{EngineOpener, check_room};
use image::{Aim, CreateOptions, FileName, Format, MirrorEnd, MirrorScope, MirrorTarget, Opener, Role, mirror};
use std::sync::Arc;

/// The options of a copy.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MirrorOptions {
    /// The new image's file, by its absolute path, or its name in a cluster or at an NBD server. A file that is made has
    /// another name until it is whole ([`name_until_whole`]).
    pub target: FileName,
    /// The new image's format; by default that of the disk's top layer. An image that exists must be given one.
    pub format: Option<Format>,
    /// The image exists and is overwritten. Otherwise it is made, and must not exist. At an NBD server a qcow2 image can be
    /// made on an empty disk.
    pub existing: bool,
    /// How much is copied.
    pub scope: MirrorScope,
    /// What becomes of the copy.
    pub end: MirrorEnd,
    /// The limits that the copy keeps to.
    pub aim: Aim,
    /// The most bytes that are moved in a second while guests go on.
    pub bytes_per_second: Option<u64>,
}

impl MirrorOptions {
    /// Copies all that the guest sees to a new image, which then takes the disk's place.
    #[must_use]
    pub fn new(target: FileName) -> Self {
        Self {
            target,
            format: None,
            existing: false,
            scope: MirrorScope::Full,
            end: MirrorEnd::Switch,
            aim: Aim::default(),
            bytes_per_second: None,
        }
    }

    /// Changes some of the options: `MirrorOptions::new(target).with(|options| ...)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// What a disk consists of after it has switched to a copy.
#[derive(Debug, Clone)]
pub struct MirrorSwitch {
    /// The format of the new image.
    pub format: Format,
    /// The layers below it, from the top down.
    pub below: Vec<FileName>,
}

type OpenedTarget = (Made, Arc<dyn File>, MirrorTarget, MirrorSwitch);

impl Daemon {
    /// Starts to copy a disk to another image, which then takes its place, or stays a copy. If the target's file is made
    /// here, `has_made` is called before anything is written to it. When the image holds all data, before it takes the
    /// disk's place, `record` is called while guests go on. There the caller makes its record of the disks durable. It is
    /// called again while its error is of the kind [`ErrorKind::Unsure`]: guests write to both images then. If the image
    /// stays a copy, `kept` is called when it is whole. On an error the disk stays as it is, and a target that was made
    /// for it is removed. `held` is dropped after that.
    pub fn start_mirror_with(
        &self,
        node: NodeId,
        options: &MirrorOptions,
        has_made: impl FnOnce() -> Result<()>,
        mut record: impl FnMut(&MirrorSwitch) -> Result<()> + Send + 'static,
        kept: impl FnOnce() -> Result<()> + Send + 'static,
        held: impl Send + 'static,
    ) -> Result<JobId> {
        let MirrorOptions { scope, end, aim, bytes_per_second, existing, .. } = *options;
        let name = options.target.clone();
        let (mut made, file, target, switch) = self.mirror_target(node, options, has_made, Made::holding(held))?;
        self.start_job(JobKind::Mirror, node, bytes_per_second, move |image, watch, has_new_top| {
            watch.set_aim(aim);
            if existing {
                // New data go to space that its refcounts call free, so they must be right.
                image::look_before_writing(&file, switch.format, &mut |_, _| !watch.is_cancelled())?;
            }
            drop(file);
            let below = image.layer_file_names().skip(1).map(|(own, _)| own);
            let below = if scope == MirrorScope::Top { below.collect() } else { Vec::new() };
            let switch = MirrorSwitch { below, ..switch };
            let mirrored = mirror(image, target, end, watch, || {
                made.give_name(&name)?;
                record(&switch)?;
                // From here on the target holds what guests write.
                made.keep();
                Ok(())
            });
            if mirrored.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unsure) {
                // The next daemon may serve the target.
                made.keep();
            }
            mirrored?;
            if end == MirrorEnd::Keep {
                made.give_name(&name)?;
                kept()?;
            }
            made.keep();
            if end == MirrorEnd::Switch {
                has_new_top();
            }
            Ok(())
        })
    }

    /// Opens the target, and makes it before if it is new. Returns its file, too.
    fn mirror_target(
        &self,
        node: NodeId,
        options: &MirrorOptions,
        has_made: impl FnOnce() -> Result<()>,
        mut made: Made,
    ) -> Result<OpenedTarget> {
        let MirrorOptions { target, format, existing, scope, .. } = options;
        let (_work, found, image) = self.image_for("a look at its layers".to_owned(), node, None)?;
        let bad = |what: &str| Err(Error::new(ErrorKind::BadOption, format!("'{target}': {what}")));
        let format = match (format, scope, existing) {
            (Some(format), ..) if format.can_be_made() => *format,
            (Some(_), ..) => return bad("a disk is copied to a raw or a qcow2 image (--format)"),
            (None, MirrorScope::Top, false) => Format::OF_OVERLAYS,
            (None, _, false) => image.format().filter(|format| format.can_be_made()).unwrap_or(Format::OF_OVERLAYS),
            (None, _, true) => {
                return bad("say the format (--format) of an image that exists, which is written over (--existing)");
            }
        };
        let below = if *scope == MirrorScope::Top { image.layer_in_header(1)? } else { None };
        if *scope == MirrorScope::Top && (below.is_none() || !format.can_have_backing()) {
            return bad("--top copies the top layer of a disk with several, to a qcow2 image (--format qcow2)");
        }
        if *scope == MirrorScope::Top && *existing {
            return bad(
                "only a new image takes the top layer alone (--top): an existing one (--existing) may hold data, or rest on \
                 another",
            );
        }
        if !existing && !format.has_tables() && matches!(target, FileName::Nbd(_)) {
            return bad(
                "a raw image is all of a server's disk, which exists: say that it is to be written over (--existing)",
            );
        }
        let mut opened = target.clone();
        if !existing {
            refuse_existing_target(target)?;
            opened = name_until_whole(target);
            refuse_part(&opened)?;
            let length_bytes = if format.has_tables() { 0 } else { image.info().size_bytes };
            made.file(&opened, length_bytes)?;
            has_made()?;
        }
        let opener = EngineOpener::of_disk(&found.options).with_buffers(image.buffers()).called(target);
        let file: Arc<dyn File> = opener.open(&opened, Role::Writable)?;
        if !existing && format.has_tables() {
            let options = CreateOptions::new(format, image.info().size_bytes, below)?;
            check_room(&*file, &options)?;
            image::create(&file, &options)?;
        }
        let target = MirrorTarget::open(target, Arc::clone(&file), format, *scope, !existing)?;
        Ok((made, file, target, MirrorSwitch { format, below: Vec::new() }))
    }
}
