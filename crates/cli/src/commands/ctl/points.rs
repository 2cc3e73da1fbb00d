//! Bitmaps, internal snapshots and backups of running disks.

use super::{Ctl, jobs, tables, whole_target};
use control::api::{
    BackupDisk, BackupMode, BitmapChange, BitmapVerb as Action, Bitmaps, ChangeBitmaps, CreateSnapshot,
    InternalSnapshots,
};
use control::path_segment;
use drive::parse_size;
use std::path::{Path, PathBuf};

/// The part of the disk to copy.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// All that the guest sees.
    Full,
    /// The data of the top layer; the copy has the same backing file.
    Top,
    /// The data that the bitmap calls dirty.
    Incremental,
}

#[derive(clap::Args)]
pub(super) struct BackupArgs {
    /// The disk.
    name: String,
    /// The image to copy to: a file, rbd:POOL/IMAGE or nbd://HOST/EXPORT. It must not exist, unless --existing is given. A
    /// new file is named TARGET.part until the backup is whole.
    target: String,
    /// Its format: qcow2 or raw.
    #[arg(long, value_name = "FORMAT", default_value = "qcow2")]
    format: String,
    /// The bitmap of the disk that says what has changed. It is cleared on success.
    #[arg(long, value_name = "BITMAP")]
    bitmap: Option<String>,
    /// What is copied [default: full; with --bitmap, what was written since the last backup with it, on which the new
    /// image then rests].
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Overwrite an existing image, a device or all of an NBD server's disk.
    #[arg(long)]
    existing: bool,
    /// The earlier backup that the new image rests on.
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// The directory for the fleece, which takes the guest's writes meanwhile; it has to be as fast and as safe as the
    /// disk [default: beside the disk's image].
    #[arg(long, value_name = "DIRECTORY")]
    fleece_dir: Option<PathBuf>,
    /// The largest size of the fleece; the space is reserved from the start. Beyond it the backup fails, and the guest
    /// goes on [default: until the file system is nearly full].
    #[arg(long, value_name = "SIZE")]
    fleece_quota: Option<String>,
    #[command(flatten)]
    how: jobs::How,
}

#[derive(clap::Subcommand)]
pub(super) enum BitmapVerb {
    /// List the bitmaps of a disk.
    List {
        /// The disk.
        name: String,
    },
    /// Add a bitmap, enabled and empty: it records writes from now on.
    Add {
        /// The disk.
        name: String,
        /// The new bitmap.
        bitmap: String,
        /// Bytes of the disk for each bit [default: the cluster size, between 4K and 64K].
        #[arg(short, long, value_name = "SIZE")]
        granularity: Option<String>,
        /// Record nothing before "ctl bitmap enable".
        #[arg(long)]
        disabled: bool,
    },
    /// Remove a bitmap.
    Remove(BitmapName),
    /// Record writes from now on.
    Enable(BitmapName),
    /// Stop recording writes.
    Disable(BitmapName),
    /// Clear all bits.
    Clear(BitmapName),
    /// Add the bits of other bitmaps of the same image.
    Merge {
        /// The disk.
        name: String,
        /// The bitmap that gets the bits.
        bitmap: String,
        /// The bitmaps to merge, which stay as they are.
        #[arg(required = true)]
        sources: Vec<String>,
    },
}

#[derive(clap::Args)]
pub(super) struct BitmapName {
    /// The disk.
    name: String,
    /// The bitmap.
    bitmap: String,
}

#[derive(clap::Args)]
pub(super) struct SnapshotArgs {
    /// The disk.
    name: String,
    /// The snapshot: a new name, or the id or name of an existing one.
    snapshot: String,
}

impl Ctl {
    pub(super) fn backup(&self, args: &BackupArgs) -> anyhow::Result<()> {
        let target = whole_target(Path::new(&args.target)).to_string_lossy().into_owned();
        let mode = args.mode.map(|mode| match mode {
            Mode::Full => BackupMode::Full,
            Mode::Top => BackupMode::Top,
            Mode::Incremental => BackupMode::Incremental,
        });
        let request = BackupDisk {
            target,
            format: Some(args.format.clone()),
            mode,
            bitmap: args.bitmap.clone(),
            existing: args.existing,
            base: args.base.as_deref().map(drive::absolute),
            fleece_directory: args.fleece_dir.as_deref().map(drive::absolute),
            fleece_quota_bytes: args.fleece_quota.as_deref().map(parse_size).transpose()?,
            bytes_per_second: args.how.bytes_per_second()?,
        };
        self.start(&args.name, "backup", &request, &args.how)
    }

    pub(super) fn bitmap(&self, verb: &BitmapVerb) -> anyhow::Result<()> {
        let change =
            |bitmap: &str, action| BitmapChange { bitmap: bitmap.to_owned(), action, granularity: None, source: None };
        let one = |which: &BitmapName, action| (which.name.clone(), vec![change(&which.bitmap, action)]);
        let (name, actions) = match verb {
            BitmapVerb::List { name } => {
                let bitmaps: Bitmaps = self.client.get(&format!("/v1/disks/{}/bitmaps", path_segment(name)))?;
                return self.show(&bitmaps, tables::bitmaps);
            }
            BitmapVerb::Add { name, bitmap, granularity, disabled } => {
                let granularity = granularity.as_deref().map(parse_size).transpose()?;
                let mut actions = vec![BitmapChange { granularity, ..change(bitmap, Action::Add) }];
                if *disabled {
                    actions.push(change(bitmap, Action::Disable));
                }
                (name.clone(), actions)
            }
            BitmapVerb::Remove(which) => one(which, Action::Remove),
            BitmapVerb::Enable(which) => one(which, Action::Enable),
            BitmapVerb::Disable(which) => one(which, Action::Disable),
            BitmapVerb::Clear(which) => one(which, Action::Clear),
            BitmapVerb::Merge { name, bitmap, sources } => {
                let merge =
                    |source: &String| BitmapChange { source: Some(source.clone()), ..change(bitmap, Action::Merge) };
                (name.clone(), sources.iter().map(merge).collect())
            }
        };
        let path = format!("/v1/disks/{}/bitmaps", path_segment(&name));
        let bitmaps: Bitmaps = self.client.post(&path, &ChangeBitmaps { actions })?;
        self.show(&bitmaps, tables::bitmaps)
    }

    pub(super) fn list_snapshots(&self, name: &str) -> anyhow::Result<()> {
        let snapshots: InternalSnapshots = self.client.get(&format!("/v1/disks/{}/snapshots", path_segment(name)))?;
        self.show(&snapshots, tables::snapshots)
    }

    pub(super) fn create_snapshot(&self, args: &SnapshotArgs) -> anyhow::Result<()> {
        let path = format!("/v1/disks/{}/snapshots", path_segment(&args.name));
        let snapshots: InternalSnapshots =
            self.client.post(&path, &CreateSnapshot { name: args.snapshot.clone(), vm_state: None })?;
        self.show(&snapshots, tables::snapshots)
    }

    pub(super) fn delete_snapshot(&self, args: &SnapshotArgs) -> anyhow::Result<()> {
        self.delete(&args.path())
    }

    pub(super) fn apply_snapshot(&self, args: &SnapshotArgs) -> anyhow::Result<()> {
        let snapshots: InternalSnapshots = self.client.post_nothing(&format!("{}/apply", args.path()))?;
        self.show(&snapshots, tables::snapshots)
    }
}

impl SnapshotArgs {
    fn path(&self) -> String {
        format!("/v1/disks/{}/snapshots/{}", path_segment(&self.name), path_segment(&self.snapshot))
    }
}
