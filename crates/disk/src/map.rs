//! Access to a disk's contents without an operation for each request.

use crate::buffer::Buffer;
use crate::disk::Disk;
use crate::operation::Operation;
use block::{Error, ErrorKind, IoResult, ReadMap, Result, WriteMap};
use std::fmt;
use std::ops::Range;

/// The purpose of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// See what the disk holds.
    Read,
    /// Prepare new bytes, which replace the whole range.
    Write,
}

/// A range of a disk, open for access.
///
/// A map for reading shows what the disk holds, in place if possible. Concurrent writes to the range may show or not. A
/// map for writing begins with zeros. Nobody sees its bytes before [`Map::commit`] has ended, and dropping the map
/// cancels. The bytes shown may change at any time, so they are only copied in and out.
pub struct Map<'a> {
    disk: &'a Disk,
    offset: u64,
    kind: Kind,
}

enum Kind {
    Shown(ReadMap),
    Copied(Buffer),
    New(WriteMap),
}

impl Disk {
    /// Opens a range for access. Data that do not lie in the host's memory (compressed, remote, past the page cache)
    /// are first read into a buffer. This call waits for them. `range` is in bytes, in multiples of 512.
    ///
    /// ```no_run
    /// # fn main() -> ringdisk_disk::Result<()> {
    /// use ringdisk_disk::{Access, Options};
    ///
    /// let disk = Options::drive("file=base.raw,format=raw,snapshot=on")?.open()?;
    /// let mut sum = 0u64;
    /// let map = disk.map(0..65536, Access::Read)?;
    /// map.for_each_word(0, 65536 / 8, |word| sum = sum.wrapping_add(word))?;
    /// let mut map = disk.map(4096..8192, Access::Write)?;
    /// map.put_words(0, 4096 / 8, |number| sum ^ number as u64)?;
    /// map.commit().wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn map(&self, range: Range<u64>, access: Access) -> Result<Map<'_>> {
        let (offset, length_bytes) = (range.start, self.length_to_map(&range, access)?);
        if let Some(kind) = self.kind_in_place(offset, length_bytes, access) {
            return Ok(Map { disk: self, offset, kind });
        }
        let kind = match access {
            Access::Read => Kind::Copied(self.read(offset, length_bytes).wait()?),
            Access::Write => Kind::New(WriteMap::in_memory(offset, length_bytes)),
        };
        Ok(Map { disk: self, offset, kind })
    }

    /// As [`Disk::map`], but `None` if it would need a buffer or would have to wait.
    pub fn try_map(&self, range: Range<u64>, access: Access) -> Result<Option<Map<'_>>> {
        let (offset, length_bytes) = (range.start, self.length_to_map(&range, access)?);
        Ok(self.kind_in_place(offset, length_bytes, access).map(|kind| Map { disk: self, offset, kind }))
    }

    fn kind_in_place(&self, offset: u64, length_bytes: usize, access: Access) -> Option<Kind> {
        let disk = self.image()?;
        match access {
            Access::Read => disk.map_read(offset, length_bytes).map(Kind::Shown),
            Access::Write => disk.map_write(offset, length_bytes).map(Kind::New),
        }
    }

    fn length_to_map(&self, range: &Range<u64>, access: Access) -> Result<usize> {
        let length_bytes = range.end.saturating_sub(range.start);
        self.check("map", range.start, length_bytes)?;
        if access == Access::Write && self.is_read_only() {
            return Err(self.map_failed("map for writing", range.start, "the disk is read-only"));
        }
        usize::try_from(length_bytes).map_err(|_| self.map_failed("map", range.start, "it is longer than any memory"))
    }
}

impl Map<'_> {
    /// Returns the first byte on the disk.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the length of the range in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        match &self.kind {
            Kind::Shown(map) => map.length_bytes(),
            Kind::Copied(buffer) => buffer.len(),
            Kind::New(map) => map.length_bytes(),
        }
    }

    /// Whether the map shows the disk's own bytes, or bytes that the disk will take over, so that nothing is copied.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        match &self.kind {
            Kind::Shown(_) => true,
            Kind::Copied(_) => false,
            Kind::New(map) => map.is_in_place(),
        }
    }

    /// Copies bytes from `skip_bytes` on to `target`. A map for writing returns what was written to it.
    ///
    /// Fails if the bytes do not lie in the map, or if the file below was cut off.
    pub fn read_at(&self, skip_bytes: usize, target: &mut [u8]) -> Result<()> {
        let read = match &self.kind {
            Kind::Shown(map) => map.read_at(skip_bytes, target),
            Kind::Copied(buffer) => {
                let end = skip_bytes.checked_add(target.len());
                match end.and_then(|end| buffer.get(skip_bytes..end)) {
                    Some(part) => {
                        target.copy_from_slice(part);
                        Ok(())
                    }
                    None => Err(block::IoError::EIO),
                }
            }
            Kind::New(map) => map.read_at(skip_bytes, target),
        };
        self.ended("look at", skip_bytes, target.len(), read)
    }

    /// Writes bytes to a map for writing, from `skip_bytes` on.
    pub fn write_at(&mut self, skip_bytes: usize, bytes: &[u8]) -> Result<()> {
        let written = self.new_bytes()?.write_at(skip_bytes, bytes);
        self.ended("put", skip_bytes, bytes.len(), written)
    }

    /// Fills `length_bytes` of a map for writing with one value, from `skip_bytes` on.
    pub fn fill(&mut self, skip_bytes: usize, length_bytes: usize, byte: u8) -> Result<()> {
        let filled = self.new_bytes()?.fill(skip_bytes, length_bytes, byte);
        self.ended("put", skip_bytes, length_bytes, filled)
    }

    /// Makes `count` words of 8 bytes where they are to lie in a map for writing, from `skip_bytes` on: `word` gives each by
    /// its number. They are stored little-endian. With [`Map::is_in_place`], this is the only copy of the bytes.
    pub fn put_words(&mut self, skip_bytes: usize, count: usize, word: impl FnMut(usize) -> u64) -> Result<()> {
        let put = self.new_bytes()?.put_words(skip_bytes, count, word);
        self.ended("put", skip_bytes, count.saturating_mul(8), put)
    }

    /// Looks at `count` words of 8 bytes where they lie, little-endian, from `skip_bytes` on. Each is read once. What was
    /// seen is right only if this succeeds.
    pub fn for_each_word(&self, skip_bytes: usize, count: usize, mut look: impl FnMut(u64)) -> Result<()> {
        let looked = match &self.kind {
            Kind::Shown(map) => map.for_each_word(skip_bytes, count, look),
            Kind::Copied(_) | Kind::New(_) => {
                for number in 0..count {
                    let mut word = [0; 8];
                    self.read_at(skip_bytes.saturating_add(number.saturating_mul(8)), &mut word)?;
                    look(u64::from_le_bytes(word));
                }
                Ok(())
            }
        };
        self.ended("look at", skip_bytes, count.saturating_mul(8), looked)
    }

    /// Ends the map. When this has ended, the disk has the new bytes; a flush that begins then makes them durable. For
    /// a map for reading, returns whether everything that it showed could be read.
    pub fn commit(self) -> Operation<()> {
        let Self { disk, offset, kind } = self;
        match kind {
            Kind::New(map) => disk.commit_map(offset, map),
            Kind::Copied(_) => Operation::ended(Ok(())),
            Kind::Shown(map) => {
                let ended = map.commit();
                Operation::ended(
                    ended.map_err(|_| disk.map_failed("map", offset, "the file beneath has become shorter")),
                )
            }
        }
    }

    fn new_bytes(&mut self) -> Result<&mut WriteMap> {
        let (disk, offset) = (self.disk, self.offset);
        match &mut self.kind {
            Kind::New(map) => Ok(map),
            Kind::Shown(_) | Kind::Copied(_) => Err(disk.map_failed("put bytes", offset, "the map is for reading")),
        }
    }

    fn ended(&self, what: &str, skip_bytes: usize, length_bytes: usize, result: IoResult) -> Result<()> {
        let Err(error) = result else { return Ok(()) };
        let is_outside = skip_bytes.checked_add(length_bytes).is_none_or(|end| end > self.length_bytes());
        let why = match is_outside {
            true => format!("the map has {} bytes", self.length_bytes()),
            false => format!("a page cannot be had; a file beneath may have become shorter ({error})"),
        };
        let kind = if is_outside { ErrorKind::BadOption } else { ErrorKind::Io };
        let at = format!("cannot {what} {length_bytes} bytes at {skip_bytes} of a map at byte {}", self.offset);
        Err(Error::new(kind, format!("{at} of '{}': {why}", self.disk.name())))
    }
}

impl fmt::Debug for Map<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.is_in_place() { "in place" } else { "copied" };
        write!(f, "Map({} bytes at {} of '{}', {place})", self.length_bytes(), self.offset, self.disk.name())
    }
}
