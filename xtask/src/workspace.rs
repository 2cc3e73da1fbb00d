//! Where the tree is and what belongs to it.

use crate::command::Program;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// The root of the working tree.
pub(crate) fn root() -> PathBuf {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    xtask.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Cargo's build directory.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |path| root().join(path))
}

/// The files that git tracks (and new ones it would), relative to the root.
pub(crate) fn tracked_files() -> Result<Vec<PathBuf>> {
    let listing = Program::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .output_text()
        .context("cannot list the tree's files with git")?;
    let root = root();
    Ok(listing.lines().map(PathBuf::from).filter(|path| root.join(path).is_file()).collect())
}

/// Those of them that are text, with their contents.
pub(crate) fn tracked_texts() -> Result<Vec<(PathBuf, String)>> {
    let root = root();
    let texts = tracked_files()?.into_iter().filter_map(|path| {
        let text = String::from_utf8(std::fs::read(root.join(&path)).ok()?).ok()?;
        Some((path, text))
    });
    Ok(texts.collect())
}
