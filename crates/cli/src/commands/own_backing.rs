//! A new image must not take the place of what it is going to rest on.

use crate::file_id::FileId;
use crate::output::usage;
use daemon::EngineOpener;
use image::{Format, Opener, Role, inspect};
use std::path::{Path, PathBuf};

/// Chains that are longer are not opened.
const LAYERS_MAX: usize = 256;

/// Refuses to empty one of `emptied`, the files that the new image is made in, if it is `backing` or lies below it. What
/// cannot be looked at is left to whoever opens it.
pub(super) fn refuse(emptied: &[PathBuf], backing: PathBuf, format: Option<Format>) -> anyhow::Result<()> {
    let mut next = Some((backing, format));
    for _ in 0..LAYERS_MAX {
        let Some((path, format)) = next.take() else { break };
        refuse_one(emptied, &path)?;
        let Ok(file) = EngineOpener::default().open(&path, Role::Backing) else { break };
        let Ok(layer) = inspect(&path, &file, format) else { break };
        let beside = |name: &str| path.parent().unwrap_or(Path::new("")).join(name);
        if let Some(name) = layer.qcow2.and_then(|header| header.data_file) {
            refuse_one(emptied, &beside(&name))?;
        }
        let format = layer.backing_format.and_then(|format| format.parse().ok());
        next = layer.backing_file.map(|name| (beside(&name), format));
    }
    Ok(())
}

fn refuse_one(emptied: &[PathBuf], below: &Path) -> anyhow::Result<()> {
    let Ok(id) = FileId::of(below) else { return Ok(()) };
    match emptied.iter().find(|path| FileId::of(path).is_ok_and(|emptied| emptied == id)) {
        None => Ok(()),
        Some(path) => Err(usage(format!(
            "{}: Trying to create an image with the same filename as the backing file, or as one below it ('{}')",
            path.display(),
            below.display()
        ))),
    }
}
