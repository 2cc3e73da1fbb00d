//! Files that are made for changes of disks, and removed again if nothing came of the change.

use crate::table::Found;
use block::{Disk, Error, ErrorKind, File, Result};
use drive::{EngineOpener, check_room, make_file, unmake_file};
use image::{CreateOptions, FileName, Image, OpenedOverlay, Opener, Role};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::sync::Arc;

/// What the name of a copy ends with until it is whole.
const PART: &str = ".part";

/// Returns the name that a copy has until it is whole. A copy in a file of this host gets its own name at the end: nobody
/// takes half of it for all of it, or finishes it in place. What lies elsewhere has its name from the start.
#[must_use]
pub fn name_until_whole(target: &FileName) -> FileName {
    let FileName::File(path) = target else { return target.clone() };
    let mut part = path.clone().into_os_string();
    part.push(PART);
    FileName::File(part.into())
}

/// Refuses a target that exists already.
pub(crate) fn refuse_existing(target: &FileName) -> Result<()> {
    if target.path().is_some_and(|path| path.symlink_metadata().is_ok()) {
        let what = format!("'{target}' exists: remove it first, or choose another name");
        return Err(Error::new(ErrorKind::BadOption, what));
    }
    Ok(())
}

/// Gives a copy that is whole its own name. Refused if another file has that. The caller makes it durable.
pub(crate) fn give_name(part: &FileName, target: &FileName) -> Result<()> {
    let (Some(from), Some(to)) = (part.path(), target.path()) else { return Ok(()) };
    if from == to {
        return Ok(());
    }
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => return Ok(()),
        Err(Errno::EXIST) => refuse_existing(target)?,
        // Not every file system can do that in one step.
        Err(_) => {}
    }
    // From here on nobody else takes the name.
    engine::create(to, 0)?;
    std::fs::rename(from, to).map_err(|error| {
        let _ = std::fs::remove_file(to);
        Error::io(format!("cannot give '{part}' the name '{target}'"), error)
    })
}

/// Files that were made. They are removed again unless they are kept.
#[derive(Default)]
pub(crate) struct Made(Vec<FileName>);

impl Made {
    /// Makes a file, which must not exist. Its name is durable: a record of disks is going to name it.
    pub(crate) fn file(&mut self, name: &FileName, length_bytes: u64) -> Result<()> {
        make_file(name, length_bytes)?;
        self.0.push(name.clone());
        name.path().map_or(Ok(()), engine::sync_directory_of)
    }

    /// Makes an empty overlay for the disk's top. Calls `has_made` when the file is there. `change` changes its options.
    pub(crate) fn overlay_with(
        &mut self,
        found: &Found,
        image: &Image,
        name: &FileName,
        has_made: impl FnOnce() -> Result<()>,
        change: impl FnOnce(CreateOptions) -> CreateOptions,
    ) -> Result<OpenedOverlay> {
        let options = change(CreateOptions::overlay(image.info().size_bytes, image.layer_in_header(0)?));
        self.file(name, 0)?;
        has_made()?;
        let file: Arc<dyn File> =
            EngineOpener::of_disk(&found.options).with_buffers(image.buffers()).open(name, Role::Writable)?;
        check_room(&*file, &options)?;
        image::create(&file, &options)?;
        OpenedOverlay::open(name, file)
    }

    /// Gives a copy that was made here and is whole its own name, durably.
    pub(crate) fn give_name(&mut self, target: &FileName) -> Result<()> {
        let part = name_until_whole(target);
        let Some(made) = self.0.iter_mut().find(|made| **made == part) else { return Ok(()) };
        give_name(&part, target)?;
        *made = target.clone();
        target.path().map_or(Ok(()), engine::sync_directory_of)
    }

    pub(crate) fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for name in &self.0 {
            if let Err(error) = unmake_file(name) {
                tracing::warn!("cannot remove '{name}', which is not used: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_gets_its_name_when_it_is_whole_and_takes_nobody_elses() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("copy");
        let target = FileName::from(path.as_path());
        let part = name_until_whole(&target);
        let mut made = Made::default();
        made.file(&part, 4096).unwrap();
        std::fs::write(&path, "somebody's").unwrap();
        assert_eq!(refuse_existing(&target).unwrap_err().kind(), ErrorKind::BadOption);
        made.give_name(&target).unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), b"somebody's");
        drop(made);
        assert!(!part.path().unwrap().exists());

        std::fs::remove_file(&path).unwrap();
        refuse_existing(&target).unwrap();
        for is_kept in [false, true] {
            let mut made = Made::default();
            made.file(&part, 4096).unwrap();
            made.give_name(&target).unwrap();
            assert!(!part.path().unwrap().exists() && path.metadata().unwrap().len() == 4096);
            if is_kept {
                made.keep();
            }
            drop(made);
            assert_eq!(path.exists(), is_kept);
        }
        let elsewhere = FileName::parse("rbd:pool/copy").unwrap();
        assert_eq!(name_until_whole(&elsewhere), elsewhere);
    }
}
