//! Shows a part of a raw file as a disk (`offset=`, `size=`): for example, a partition in the image of a whole disk.
//! For commands that only read.

use block::{
    Error, ErrorKind, File, FileInfo, FileIo, FileOp, FileQueue, IoError, IoErrorKind, IoResult, Lifetime, PastEnd,
    ReactorCtx, Result, Topology, Work,
};
use image::{FileName, Opener, Role};
use memory::{BufferAccount, to_usize};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// QEMU counts files in sectors.
const SECTOR_BYTES: u64 = 512;

/// The place of the part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilePart {
    /// The part's first byte in the file.
    pub offset_bytes: u64,
    /// The part's length; `None` for the rest of the file.
    pub size_bytes: Option<u64>,
}

impl FilePart {
    /// Returns the part's length in a file of this length.
    pub fn length_in(&self, file_bytes: u64) -> Result<u64> {
        let Self { offset_bytes: offset, size_bytes } = *self;
        let bad = |what: String| Err(Error::new(ErrorKind::BadOption, what));
        let sectors_end = file_bytes.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(file_bytes);
        if offset > sectors_end {
            let what = "cannot be greater than size of the containing file";
            return bad(format!("Offset ({offset}) {what} ({sectors_end})"));
        }
        if let Some(size) = size_bytes
            && offset.checked_add(size).is_none_or(|end| end > sectors_end)
        {
            return bad(format!(
                "The sum of offset ({offset}) and size ({size}) has to be smaller or equal to the  actual size of the \
                 containing file ({sectors_end})"
            ));
        }
        if size_bytes.is_some_and(|size| !size.is_multiple_of(SECTOR_BYTES)) {
            return bad(format!("Specified size is not multiple of {SECTOR_BYTES}"));
        }
        Ok(size_bytes.unwrap_or(u64::MAX).min(file_bytes.saturating_sub(offset)))
    }
}

/// Opens the part of a file that [`FilePart`] names. An image in the part cannot name other files.
#[derive(Debug)]
pub struct PartOpener<O> {
    /// The opener of whole files.
    pub inner: O,
    /// The part; `None` for the whole file.
    pub part: Option<FilePart>,
}

impl<O: Opener> Opener for PartOpener<O> {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        let file = self.inner.open(name, role)?;
        let Some(part) = self.part else { return Ok(file) };
        let length_bytes = part.length_in(file.length_bytes()?);
        let length_bytes = length_bytes.map_err(|error| error.in_context(format!("Could not open '{name}'")))?;
        let info = FileInfo { length_bytes, read_only: true, can_grow: false, ..file.info().clone() };
        Ok(Arc::new(Part { file, info, offset: part.offset_bytes }))
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.inner.canonical(path)
    }
}

#[derive(Debug)]
struct Part {
    file: Arc<dyn File>,
    info: FileInfo,
    offset: u64,
}

impl Part {
    fn queue(&self, inner: Rc<dyn FileQueue>) -> Rc<dyn FileQueue> {
        Rc::new(PartQueue { inner, offset: self.offset, length: self.info.length_bytes })
    }
}

impl File for Part {
    fn info(&self) -> &FileInfo {
        &self.info
    }

    fn length_bytes(&self) -> Result<u64> {
        Ok(self.info.length_bytes)
    }

    fn topology(&self) -> Topology {
        self.file.topology()
    }

    fn overwrites_in_place(&self) -> bool {
        self.file.overwrites_in_place()
    }

    fn lifetime(&self) -> Option<Lifetime> {
        self.file.lifetime()
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        self.file.allocated_bytes()
    }

    fn hole_at(&self, offset: u64, length: u64) -> Result<(bool, u64)> {
        self.file.hole_at(offset.saturating_add(self.offset), length)
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        Ok(self.queue(self.file.open_queue(ctx)?))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(self.queue(self.file.open_blocking()?))
    }

    fn buffers(&self) -> &BufferAccount {
        self.file.buffers()
    }
}

struct PartQueue {
    inner: Rc<dyn FileQueue>,
    offset: u64,
    length: u64,
}

impl PartQueue {
    /// Translates a read to the whole file; `None` if nothing is to be read. A read cannot leave the part: behind its
    /// end are zeros, as behind a file's, and never the file's bytes.
    fn within(&self, op: FileOp) -> IoResult<Option<FileOp>> {
        let outside = IoError::new(IoErrorKind::OutOfRange);
        match op {
            FileOp::Flush => Ok(Some(op)),
            FileOp::Read { offset, data, past_end } => {
                let length = data.length_bytes();
                let left = self.length.saturating_sub(offset);
                let there = to_usize(left).min(length);
                let data = match past_end {
                    _ if there == length => data,
                    PastEnd::Fails => return Err(outside),
                    PastEnd::Zeros => {
                        data.slice(there, length.saturating_sub(there)).fill(0);
                        data.slice(0, there)
                    }
                };
                if there == 0 {
                    return Ok(None);
                }
                let offset = offset.checked_add(self.offset).ok_or(outside)?;
                Ok(Some(FileOp::Read { offset, data, past_end }))
            }
            _ => Err(IoError::new(IoErrorKind::ReadOnly)),
        }
    }
}

impl FileQueue for PartQueue {
    fn push(&self, io: FileIo) {
        let FileIo { op, priority, done } = io;
        match self.within(op) {
            Ok(Some(op)) => self.inner.push(FileIo { op, priority, done }),
            Ok(None) => done.complete(Ok(())),
            Err(error) => done.complete(Err(error)),
        }
    }

    fn run_aside(&self, work: Work) {
        self.inner.run_aside(work);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_lies_in_its_file() {
        let length = |offset_bytes, size_bytes, file| {
            FilePart { offset_bytes, size_bytes }.length_in(file).map_err(|error| error.to_string())
        };
        assert_eq!(length(512, Some(1024), 4096), Ok(1024));
        assert_eq!(length(100, None, 4096), Ok(3996));
        assert_eq!(length(4096, None, 4096), Ok(0));
        assert_eq!(length(512, Some(512), 1000), Ok(488), "the last sector is not whole");
        for (offset, size, named) in [
            (4097, None, "Offset (4097)"),
            (512, Some(4096), "The sum of offset (512) and size (4096)"),
            (1, Some(u64::MAX), "The sum"),
            (0, Some(100), "not multiple of 512"),
        ] {
            let said = length(offset, size, 4096).unwrap_err();
            assert!(said.contains(named), "{said}");
        }
    }
}
