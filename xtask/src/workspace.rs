//! The place of the tree, and its files.

use crate::command::Program;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Returns the root of the working tree.
pub(crate) fn root() -> PathBuf {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    xtask.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Returns cargo's build directory.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |path| root().join(path))
}

/// Returns the files that git tracks or would track, relative to the root; without git, all files.
pub(crate) fn tracked_files() -> Result<Vec<PathBuf>> {
    let root = root();
    // The owner of the clone may be another user.
    let list = ["-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"];
    match Program::new("git").args(list).output_text() {
        Ok(listing) => Ok(listing.lines().map(PathBuf::from).filter(|path| root.join(path).is_file()).collect()),
        Err(_) => {
            Ok(files_below(&root)?.iter().filter_map(|path| path.strip_prefix(&root).ok().map(Into::into)).collect())
        }
    }
}

fn files_below(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in directory.read_dir().with_context(|| format!("cannot list {}", directory.display()))? {
        let entry = entry?;
        if entry.file_name() == ".git" || entry.path() == target() {
            continue;
        }
        if entry.file_type()?.is_dir() {
            files.extend(files_below(&entry.path())?);
        } else {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// Returns the tracked text files, with their contents.
pub(crate) fn tracked_texts() -> Result<Vec<(PathBuf, String)>> {
    let root = root();
    let texts = tracked_files()?.into_iter().filter_map(|path| {
        let text = String::from_utf8(std::fs::read(root.join(&path)).ok()?).ok()?;
        Some((path, text))
    });
    Ok(texts.collect())
}
