//! A new image must not overwrite a file that it will rest on.

use super::file_id::FileId;
use super::name::{beside_image, opened_name};
use super::open::files;
use crate::output::usage;
use image::{BackingPolicy, Format, Opener, Role, inspect, pass_gate};
use std::path::{Path, PathBuf};

/// Longer chains are not opened.
const LAYERS_MAX: usize = 256;

/// Refuses to empty a file of `emptied`, the files of the new image, if it is `backing` or, with `look`, lies below it.
/// Files that images name are opened only through the gate. A file that cannot be opened ends the search; opening the
/// image reports it.
pub(super) fn refuse(emptied: &[PathBuf], backing: &Path, format: Option<Format>, look: bool) -> anyhow::Result<()> {
    refuse_one(emptied, backing)?;
    let said = std::env::var("RINGDISK_ALLOW_BACKING").ok();
    let policy: BackingPolicy = said.map_or(Ok(BackingPolicy::default()), |policy| policy.parse())?;
    let mut next = Some((backing.to_owned(), format)).filter(|_| look);
    for _ in 0..LAYERS_MAX {
        let Some((path, format)) = next.take() else { break };
        let named = opened_name(&path);
        let Ok(file) = files().open(&named, Role::Backing) else { break };
        let Ok(layer) = inspect(named.clone(), &file, format) else { break };
        if let Some(name) = layer.qcow2.and_then(|header| header.data_file) {
            refuse_one(emptied, &beside_image(&path, &name))?;
        }
        let Some(name) = layer.backing_file else { break };
        refuse_one(emptied, &beside_image(&path, &name))?;
        let opener = files();
        if pass_gate(&policy, opened_name(backing), &[], named, &name, &opener).is_err() {
            break;
        }
        next = Some((beside_image(&path, &name), layer.backing_format.and_then(|format| format.parse().ok())));
    }
    Ok(())
}

fn refuse_one(emptied: &[PathBuf], below: &Path) -> anyhow::Result<()> {
    let (named, id) = (opened_name(below), FileId::of(below).ok());
    let is_it = |path: &&PathBuf| match named.is_remote() {
        true => opened_name(path).is_same_file(&named),
        false => id.is_some() && FileId::of(path).ok() == id,
    };
    match emptied.iter().find(is_it) {
        None => Ok(()),
        Some(path) => Err(usage(format!(
            "{}: Trying to create an image with the same filename as the backing file, or as one below it ('{}')",
            opened_name(path),
            opened_name(below)
        ))),
    }
}
