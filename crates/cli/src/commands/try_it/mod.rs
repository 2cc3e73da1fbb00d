//! `ringdisk try`: the main job in one command. A temporary qcow2 disk is served over a real vhost-user socket, a guest
//! attaches it, writes and verifies data, and is measured against the host's own file.

mod built_in;
mod measure;
mod real;
mod table;

use crate::images::files;
use crate::output::{self, Bar, usage};
use crate::scratch;
use crate::signals;
use anyhow::bail;
use daemon::DaemonConfig;
use drive::{DiskOptions, DriveFormat, DriveOptions, open_disk, parse_size};
use engine::{CacheMode, EngineKind};
use guestlab::GuestKind;
use image::{BackingPolicy, CreateOptions, Opener, Role};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

/// Serve a temporary disk to a guest, verify it and measure it.
///
/// The host's own storage is measured beside it, for comparison. Nothing stays behind.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A real Linux guest instead of the built-in driver.
    #[arg(long, value_enum)]
    guest: Option<Guest>,
    /// The directory for temporary files [default: $TMPDIR, or /tmp].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// How much is written, verified and measured.
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    size: String,
    /// How long to measure in total.
    #[arg(long, value_name = "SECONDS", default_value_t = 12.0)]
    seconds: f64,
    /// Engine of both sides.
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    engine: EngineKind,
    /// Cache mode of both sides [default: none, or writeback if the file system has no direct I/O].
    #[arg(long, value_name = "MODE")]
    cache: Option<CacheMode>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Guest {
    /// User Mode Linux: a kernel as a process, one CPU.
    Uml,
    /// QEMU with a Debian kernel.
    Qemu,
}

impl Guest {
    fn kind(self) -> GuestKind {
        match self {
            Self::Uml => GuestKind::Uml,
            Self::Qemu => GuestKind::Qemu,
        }
    }
}

/// Less than this leaves nothing to spread random requests over.
const MIN_SIZE_BYTES: u64 = 8 << 20;
/// The load generator needs at least this much to verify with its requests in flight.
const KEPT_MIN_BYTES: u64 = 4 << 20;

/// A real guest needs at least this much for a file system, files and fio's data, however little is measured.
const GUEST_DISK_MIN_BYTES: u64 = 192 << 20;

/// The settings and files of the run.
struct Plan {
    scratch: Scratch,
    /// The disk that the guest gets.
    guest_drive: DriveOptions,
    /// The file of the same size that the host is measured on.
    host_disk: DiskOptions,
    size_bytes: u64,
    seconds: f64,
    cancel: Arc<AtomicBool>,
}

/// The temporary directory; gone when this is dropped.
struct Scratch {
    directory: TempDir,
    /// A second directory, if the first one's name is too long for a socket in it.
    sockets: Option<TempDir>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let guest = args.guest.map(Guest::kind);
    if let Some(kind) = guest {
        guestlab::check_tools(kind)?;
    }
    let plan = Plan::new(args)?;
    let bar = Bar::start("starting");
    let done = match guest {
        None => built_in::run(&plan, &bar),
        Some(kind) => real::run(&plan, kind, &bar),
    };
    bar.finish();
    output::print(&done?)
}

impl Plan {
    fn new(args: &Args) -> anyhow::Result<Self> {
        let size_bytes = parse_size(&args.size)?;
        if size_bytes < MIN_SIZE_BYTES {
            return Err(usage(format!("--size {}: at least {} MiB", args.size, MIN_SIZE_BYTES >> 20)));
        }
        if !(args.seconds.is_finite() && args.seconds > 0.0) {
            return Err(usage(format!("--seconds {} is not a time", args.seconds)));
        }
        let size_bytes = size_bytes.next_multiple_of(measure::LARGEST_BLOCK_BYTES);
        let cancel = signals::interrupted()?;
        let scratch = Scratch::new(args.dir.as_deref())?;
        let (qcow2, raw) = (scratch.file("disk.qcow2"), scratch.file("host.raw"));
        let disk_bytes = size_bytes + kept_bytes(size_bytes);
        let disk_bytes = if args.guest.is_some() { disk_bytes.max(GUEST_DISK_MIN_BYTES) } else { disk_bytes };
        create(&qcow2, &CreateOptions::overlay(disk_bytes, None))?;
        create(&raw, &CreateOptions::raw(size_bytes))?;
        let cache = args.cache.map_or_else(|| default_cache(&raw, args.engine), Ok)?;
        let disk = |file: PathBuf, format| {
            let mut disk = DiskOptions::of_file(file);
            (disk.format, disk.engine, disk.cache) = (Some(format), args.engine, cache);
            disk
        };
        let mut guest_drive = DriveOptions::from(disk(qcow2, DriveFormat::Qcow2));
        guest_drive.export.socket = Some(scratch.socket());
        // Where /dev/shm is small, User Mode Linux keeps its memory in a file beside the disk.
        guest_drive.export.guest_memory = drive::Placement::Any;
        Ok(Self {
            guest_drive,
            host_disk: disk(raw, DriveFormat::Raw),
            scratch,
            size_bytes,
            seconds: args.seconds,
            cancel,
        })
    }

    fn socket(&self) -> PathBuf {
        self.scratch.socket()
    }

    fn daemon_config(&self, reactors: usize) -> DaemonConfig {
        DaemonConfig::default().with(|config| {
            config.reactors = reactors;
            config.allow_backing = BackingPolicy::Deny;
        })
    }

    /// Fails if the user has asked to stop.
    fn check_cancelled(&self) -> anyhow::Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }
}

/// Returns how much of the disk behind the measured part is written once and checked at the end.
fn kept_bytes(size_bytes: u64) -> u64 {
    (size_bytes / 8).max(KEPT_MIN_BYTES).next_multiple_of(measure::LARGEST_BLOCK_BYTES)
}

/// Chooses direct I/O if the file system has it: the path and the storage are to be measured, not the page cache.
fn default_cache(file: &Path, engine: EngineKind) -> anyhow::Result<CacheMode> {
    let mut direct = DiskOptions::of_file(file);
    (direct.format, direct.engine, direct.cache) = (Some(DriveFormat::Raw), engine, CacheMode::None);
    match open_disk(&direct, BackingPolicy::Deny, &[]) {
        Ok(opened) => opened.close().map(|()| CacheMode::None).map_err(Into::into),
        Err(error) => {
            tracing::warn!("measuring through the page cache (cache=writeback): {error}");
            Ok(CacheMode::Writeback)
        }
    }
}

fn create(path: &Path, options: &CreateOptions) -> anyhow::Result<()> {
    engine::create(path, 0)?;
    let file = files().open(&path.into(), Role::Writable)?;
    Ok(image::create(&file, options)?)
}

impl Scratch {
    fn new(parent: Option<&Path>) -> anyhow::Result<Self> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
        let directory = scratch::temporary_directory(&parent)?;
        let is_too_long = scratch::is_too_long_for_sockets(directory.path());
        let sockets = if is_too_long { Some(scratch::temporary_directory(Path::new("/tmp"))?) } else { None };
        Ok(Self { directory, sockets })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.sockets.as_ref().unwrap_or(&self.directory).path().join("disk.sock")
    }
}
