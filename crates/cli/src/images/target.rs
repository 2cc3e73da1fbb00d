//! A target file: checks before anything is written, and steps after everything is.

use super::file_id::FileId;
use super::name::{cluster_image, is_socket, opened_name};
use crate::output::program;
use anyhow::{Context, bail};
use engine::CacheMode;
use image::{FileName, Format, Image};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The number of symbolic links that Linux follows.
const LINKS_MAX: usize = 40;

/// Whether the target shows old bytes wherever nothing is written: a raw target on a device or a server's disk.
pub(crate) fn holds_old_bytes(target: &Path, format: Option<Format>) -> bool {
    let is_device = || std::fs::metadata(target).is_ok_and(|meta| meta.file_type().is_block_device());
    let is_served = || is_socket(target) && !cluster_image(target).is_ok_and(|image| image.is_some());
    format.is_some_and(|format| !format.has_tables()) && (is_served() || is_device())
}

/// Refuses to overwrite a file of the source, whether it lies here or at a server.
pub(crate) fn refuse_same_file(source: &Image, target: &FileName) -> anyhow::Result<()> {
    let path = target.look_at();
    let target_id = match target.is_remote() {
        true => None,
        false if !path.exists() => return Ok(()),
        false => Some(FileId::of(&path).with_context(|| format!("Could not open '{target}'"))?),
    };
    let is_target = |name: &FileName| match target_id {
        None => name.is_same_file(target),
        Some(target_id) => FileId::of(&name.look_at()).is_ok_and(|id| id == target_id),
    };
    let said = source.said_image_names().next().map(|name| name.to_string()).unwrap_or_default();
    let what = match source.file_names().position(|name| is_target(&name)) {
        None => return Ok(()),
        Some(0) => format!("the source '{said}' itself"),
        Some(_) => format!("a file that the source '{said}' rests on"),
    };
    let why = format!("The target '{target}' is {what}: nothing was written, choose another target");
    match program::is_qemu_img() {
        true => bail!("Failed to get \"write\" lock\nIs another process using the image [{target}]?\n{why}"),
        false => bail!(why),
    }
}

/// Follows symbolic links, also to a file that does not exist yet.
pub(crate) fn behind_links(mut path: PathBuf) -> PathBuf {
    for _ in 0..LINKS_MAX {
        match std::fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("")).join(target),
            Err(_) => break,
        }
    }
    path
}

/// Removes a file, or an image of a cluster.
pub(super) fn remove_file(path: &Path) -> anyhow::Result<()> {
    match cluster_image(path)? {
        Some(image) => Ok(file_rbd::remove(&image)?),
        None => Ok(std::fs::remove_file(path)?),
    }
}

/// Removes an incomplete target, and adds to the error what happened to it.
/// `is_only` says that it has no data file.
pub(crate) fn remove_target(target: &Path, error: anyhow::Error, interrupted: bool, is_only: bool) -> anyhow::Error {
    let what = if interrupted { error.context("interrupted") } else { error };
    let is_in_cluster = cluster_image(target).is_ok_and(|image| image.is_some());
    let fate = match is_in_cluster || std::fs::metadata(target).is_ok_and(|meta| meta.is_file()) {
        false => INCOMPLETE,
        true if remove_file(&behind_links(target.to_owned())).is_ok() => REMOVED,
        true => "is incomplete and could not be removed",
    };
    with_fate(what, target, fate, is_only)
}

/// The fate of a target that was new.
pub(super) const REMOVED: &str = "was removed again";
/// The fate of a target that was there before.
pub(crate) const INCOMPLETE: &str = "is incomplete";

/// Says before an error what has become of a target. If the error names the only target, it is not named twice.
pub(crate) fn with_fate(error: anyhow::Error, target: &Path, fate: &str, is_only: bool) -> anyhow::Error {
    let name = format!("'{}'", opened_name(target));
    let is_named = is_only && format!("{error:#}").contains(&name);
    error.context(format!("{} {fate}", if is_named { "the target" } else { &name }))
}

/// With a direct cache mode, drops the file's pages from the page cache: the new image was created through it. Call it
/// when the image is closed.
pub(crate) fn leave_page_cache(path: &Path, cache: &str) -> anyhow::Result<()> {
    if cache.parse::<CacheMode>()?.is_direct() && path.is_file() {
        engine::forget_cached(path)?;
    }
    Ok(())
}

/// Makes the names in the directory of a target durable, if the directory can be synced.
pub(crate) fn sync_directory(path: &Path) -> anyhow::Result<()> {
    if is_socket(path) { Ok(()) } else { Ok(engine::sync_directory_of(path)?) }
}
