//! Files that are made for changes of disks, and removed again if nothing came of the change.

use crate::state::file_identity::FileIdentity;
use crate::table::Found;
use block::{Disk, Error, ErrorKind, File, Result};
use drive::{EngineOpener, check_room, make_file, unmake_file};
use image::{CreateOptions, FileName, Image, OpenedOverlay, Opener, Role};
use rustix::fs::{AtFlags, CWD, RenameFlags, linkat, renameat_with};
use rustix::io::Errno;
use std::path::Path;
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
    refuse_if_there(target, "remove it first, or choose another name")
}

/// As [`refuse_existing`], for the target of a copy, which may be written over.
pub(crate) fn refuse_existing_target(target: &FileName) -> Result<()> {
    refuse_if_there(target, "remove it, choose another name, or write over it (--existing)")
}

/// Refuses a file that a job is going to make for a copy, and that exists already.
pub fn refuse_part(part: &FileName) -> Result<()> {
    refuse_if_there(part, "another job may be making it; if none is, remove it")
}

fn refuse_if_there(name: &FileName, hint: &str) -> Result<()> {
    match name.path().is_some_and(|path| path.symlink_metadata().is_ok()) {
        true => Err(Error::new(ErrorKind::BadOption, format!("'{name}' exists: {hint}"))),
        false => Ok(()),
    }
}

/// A file that was made here. Another file may get its name.
#[derive(Debug)]
pub(crate) struct MadeFile {
    pub(crate) name: FileName,
    /// `None` for what lies at a server.
    identity: Option<FileIdentity>,
}

impl MadeFile {
    /// Makes a file, which must not exist.
    pub(crate) fn make(name: &FileName, length_bytes: u64) -> Result<Self> {
        make_file(name, length_bytes)?;
        Ok(Self { name: name.clone(), identity: name.path().map(FileIdentity::at).transpose()? })
    }

    /// Whether its name still leads to it.
    fn is_there(&self) -> Result<bool> {
        let Some(path) = self.name.path() else { return Ok(true) };
        Ok(FileIdentity::find(path)?.is_some_and(|found| Some(found) == self.identity))
    }

    /// Removes it. Another file of its name stays.
    pub(crate) fn remove(&self) -> Result<()> {
        if self.is_there()? { unmake_file(&self.name) } else { Ok(()) }
    }

    /// Gives a copy that is whole its own name, durably. Refused if another file has that, or if the copy is gone.
    pub(crate) fn give_name(&mut self, target: &FileName) -> Result<()> {
        let (Some(from), Some(to)) = (self.name.path(), target.path()) else { return Ok(()) };
        if from == to {
            return Ok(());
        }
        if !self.is_there()? {
            let what = format!("'{}' was removed or replaced while the job copied to it: copy again", self.name);
            return Err(Error::new(ErrorKind::Io, what));
        }
        rename(from, to, target)?;
        self.name = target.clone();
        self.name.path().map_or(Ok(()), engine::sync_directory_of)
    }
}

/// Renames a file. Never takes the place of another one.
fn rename(from: &Path, to: &Path, target: &FileName) -> Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => return Ok(()),
        Err(Errno::EXIST) => refuse_existing(target)?,
        // Not every file system can do that in one step.
        Err(_) => {}
    }
    if rename_by_link(from, to, target)? {
        return Ok(());
    }
    // From here on nobody else takes the name.
    let empty = MadeFile::make(target, 0)?;
    std::fs::rename(from, to).map_err(|error| {
        let _ = empty.remove();
        Error::io(format!("cannot give '{}' the name '{target}'", from.display()), error)
    })
}

/// Renames a file in two steps: it has both names between them. Returns whether the file system has such links.
fn rename_by_link(from: &Path, to: &Path, target: &FileName) -> Result<bool> {
    match linkat(CWD, from, CWD, to, AtFlags::empty()) {
        Ok(()) => {}
        Err(Errno::EXIST) => {
            refuse_existing(target)?;
            return Ok(false);
        }
        Err(_) => return Ok(false),
    }
    // After a power cut it has one of its names.
    let removed = engine::sync_directory_of(to).and_then(|()| {
        let failed = |error| Error::io(format!("cannot take the name '{}' from a copy", from.display()), error);
        std::fs::remove_file(from).map_err(failed)
    });
    if removed.is_err() {
        let _ = std::fs::remove_file(to);
    }
    removed.map(|()| true)
}

/// Files that were made. They are removed again unless they are kept.
#[derive(Default)]
pub(crate) struct Made {
    files: Vec<MadeFile>,
    /// Dropped after the files are removed.
    _held: Option<Box<dyn Send>>,
}

impl Made {
    /// Holds something until the files are removed.
    pub(crate) fn holding(held: impl Send + 'static) -> Self {
        Self { files: Vec::new(), _held: Some(Box::new(held)) }
    }

    /// Makes a file, which must not exist. Its name is durable: a record of disks is going to name it.
    pub(crate) fn file(&mut self, name: &FileName, length_bytes: u64) -> Result<()> {
        self.files.push(MadeFile::make(name, length_bytes)?);
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
        self.files.iter_mut().find(|made| made.name == part).map_or(Ok(()), |made| made.give_name(target))
    }

    pub(crate) fn keep(&mut self) {
        self.files.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for file in &self.files {
            if let Err(error) = file.remove() {
                tracing::warn!("cannot remove '{}', which is not used: {error}", file.name);
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
        // In a file system that cannot rename without taking the place of another file.
        std::fs::write(&path, "somebody's").unwrap();
        let [from, to] = ["from", "to"].map(|name| directory.path().join(name));
        std::fs::write(&from, "whole").unwrap();
        rename_by_link(&from, &path, &target).unwrap_err();
        assert!(std::fs::read(&from).unwrap() == b"whole" && std::fs::read(&path).unwrap() == b"somebody's");
        assert!(rename_by_link(&from, &to, &FileName::from(to.as_path())).unwrap() && !from.exists());
        assert_eq!(std::fs::read(&to).unwrap(), b"whole");
        let elsewhere = FileName::parse("rbd:pool/copy").unwrap();
        assert_eq!(name_until_whole(&elsewhere), elsewhere);
    }

    /// Says whether a file is there when this is dropped.
    struct AtTheEnd(std::path::PathBuf, std::sync::mpsc::Sender<bool>);

    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            self.1.send(self.0.exists()).unwrap();
        }
    }

    #[test]
    fn a_file_that_has_got_the_name_of_a_part_is_neither_renamed_nor_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("copy");
        let target = FileName::from(path.as_path());
        let part = name_until_whole(&target);
        let part_path = part.path().unwrap();
        for is_replaced in [true, false] {
            let mut made = Made::default();
            made.file(&part, 4096).unwrap();
            // The first file lives on, as one that is open does.
            std::fs::rename(part_path, directory.path().join("other")).unwrap();
            if is_replaced {
                std::fs::write(part_path, "another job's").unwrap();
                assert!(refuse_part(&part).unwrap_err().to_string().contains("another job may be making it"));
            }
            let refused = made.give_name(&target).unwrap_err().to_string();
            assert!(refused.contains("was removed or replaced") && !path.exists(), "{refused}");
            drop(made);
            assert_eq!(part_path.exists(), is_replaced);
            let _ = std::fs::remove_file(part_path);
        }
        refuse_part(&part).unwrap();
        // What is held goes after the file: a record names the file as long as it is there.
        let (sender, receiver) = std::sync::mpsc::channel();
        let mut made = Made::holding(AtTheEnd(part_path.to_owned(), sender));
        made.file(&part, 4096).unwrap();
        drop(made);
        assert_eq!(receiver.recv(), Ok(false));
    }
}
