//! How the commands open the images that the user names.

use super::name::image_name;
use anyhow::bail;
use block::{Error, ErrorKind};
use drive::{EngineOpener, ImageName, PartOpener, parse_key_values};
use image::{BackingPolicy, EditWatch, FileName, Format, Image, ImageOptions, SnapshotName};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Which files an image may name.
#[derive(clap::Args, Clone)]
pub(crate) struct BackingArgs {
    /// Which backing files an image may open: deny, same-dir, listed, any, anywhere (files of servers, too).
    #[arg(long, value_name = "POLICY", env = "RINGDISK_ALLOW_BACKING", default_value = "same-dir")]
    allow_backing: String,
}

impl BackingArgs {
    pub(crate) fn policy(&self) -> anyhow::Result<BackingPolicy> {
        Ok(self.allow_backing.parse()?)
    }
}

/// How a named image is opened.
#[derive(clap::Args, Clone)]
pub(crate) struct OpenArgs {
    /// Cache mode for reading: writeback, none, writethrough, directsync, unsafe.
    #[arg(short = 'T', long, alias = "cache", value_name = "CACHE", default_value = "writeback")]
    source_cache: String,
    /// Read the image even if another process writes it; the data may be out of date.
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    pub(crate) gate: BackingArgs,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long, alias = "source-image-opts")]
    pub(crate) image_opts: bool,
}

impl OpenArgs {
    /// Opens an image for reading. `listed` are other files on the command line.
    pub(crate) fn open(&self, path: &Path, format: Option<&str>, listed: &[PathBuf]) -> anyhow::Result<Arc<Image>> {
        self.open_at(path, format, listed, None)
    }

    /// As `open`; with a snapshot, opens the disk as it was when the snapshot was taken.
    pub(crate) fn open_at(
        &self,
        path: &Path,
        format: Option<&str>,
        listed: &[PathBuf],
        snapshot: Option<&str>,
    ) -> anyhow::Result<Arc<Image>> {
        let ImageName { file, format, part, is_alone } = image_name(path, format, self.image_opts)?;
        let mut options = ImageOptions::new(file);
        options.format = format;
        options.read_only = true;
        options.is_alone = is_alone;
        options.snapshot = snapshot.map(snapshot_name).transpose()?;
        options.allow_backing = self.gate.policy()?;
        options.listed = listed.to_vec();
        let opener = opener(&self.source_cache)?;
        let opener = if self.force_share { opener.without_locks() } else { opener };
        let opener = PartOpener { inner: opener, part };
        Ok(Arc::new(image::open(&options, &opener).map_err(name_force_share)?))
    }
}

/// Reads the value of -l: `snapshot.id=ID,snapshot.name=NAME` (one of them is enough), or a plain id or name.
fn snapshot_name(text: &str) -> anyhow::Result<SnapshotName> {
    if !text.starts_with("snapshot.") {
        return Ok(SnapshotName::Any(text.to_owned()));
    }
    let (mut id, mut name) = (None, None);
    for pair in parse_key_values(text)? {
        match pair.key.as_str() {
            "snapshot.id" => id = Some(pair.value),
            "snapshot.name" => name = Some(pair.value),
            key => bail!("Failed in parsing snapshot param '{text}': Invalid parameter '{key}'"),
        }
    }
    Ok(SnapshotName::Exactly { id, name })
}

/// Opens an image for writing, exclusively. `listed` are other files that the user named.
pub(crate) fn open_writable(
    file: impl Into<FileName>,
    format: Option<Format>,
    cache: &str,
    allow: BackingPolicy,
    listed: &[PathBuf],
) -> anyhow::Result<Arc<Image>> {
    let options = writable(file, format, allow, listed);
    Ok(Arc::new(image::open(&options, &opener(cache)?.writing_behind())?))
}

/// As [`open_writable`], for an image that exists and is going to be filled: [`image::open_to_overwrite`].
pub(crate) fn open_to_overwrite(
    file: impl Into<FileName>,
    format: Option<Format>,
    cache: &str,
    allow: BackingPolicy,
    listed: &[PathBuf],
    watch: &mut EditWatch<'_>,
) -> anyhow::Result<Arc<Image>> {
    let options = writable(file, format, allow, listed);
    Ok(Arc::new(image::open_to_overwrite(&options, &opener(cache)?.writing_behind(), watch)?))
}

fn writable(
    file: impl Into<FileName>,
    format: Option<Format>,
    allow: BackingPolicy,
    listed: &[PathBuf],
) -> ImageOptions {
    let mut options = ImageOptions::new(file);
    options.format = format;
    options.allow_backing = allow;
    options.listed = listed.to_vec();
    options
}

/// Returns an opener with this cache mode, which chooses the engine by the file.
pub(crate) fn opener(cache: &str) -> anyhow::Result<EngineOpener> {
    Ok(files().with_cache(cache.parse()?))
}

/// Returns an opener with the commands' defaults.
pub(crate) fn files() -> EngineOpener {
    EngineOpener::default().with_lock_timeout(*LOCK_TIMEOUT.get().unwrap_or(&LOCK_TIMEOUT_DEFAULT))
}

/// Sets the lock timeout if there is no option for it.
pub(crate) const LOCK_TIMEOUT_VARIABLE: &str = "RINGDISK_LOCK_TIMEOUT_S";

/// Shorter than for a service, because a person waits for the answer.
const LOCK_TIMEOUT_DEFAULT: Duration = Duration::from_secs(5);
static LOCK_TIMEOUT: OnceLock<Duration> = OnceLock::new();

/// Sets once for the process how long commands wait for the lock of a process that was killed.
pub(crate) fn set_lock_timeout(timeout_s: u32) {
    // An error means that it was set before, but only one place sets it.
    let _ = LOCK_TIMEOUT.set(Duration::from_secs(timeout_s.into()));
}

/// Adds the option that reads an image in use, and what that means, to the error.
pub(crate) fn name_force_share(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Locked => {
            let hint = "-U (--force-share) reads it all the same; what is read may then be old, or change meanwhile";
            Error::new(ErrorKind::Locked, format!("{error}. {hint}"))
        }
        _ => error,
    }
}
