//! Access to a disk's bytes in the host's memory, without an operation.
//!
//! * A [`ReadMap`] shows a range where its bytes lie in the host's memory. It behaves like a read in flight: concurrent
//!   writes to the range may show or not, and the space is not reused while the map lives.
//! * A [`WriteMap`] collects the new bytes of a range beside the disk. They are invisible until the map is committed;
//!   dropping it cancels. All of the range is replaced.
//!
//! If a disk's bytes are not in memory, it answers `None` ([`crate::Disk::map_read`], [`crate::Disk::map_write`]), and
//! the caller uses an ordinary read or write. Others may change mapped bytes at any time, so both types only copy, and
//! lend no slices.

use crate::{IoError, IoResult, Op, OpFlags};
use memory::{AlignedBuf, IoBuf, MappedRange, MappingLost, Window};
use std::any::Any;
use std::fmt;
use std::ops::Range;

impl From<MappingLost> for IoError {
    fn from(_: MappingLost) -> Self {
        Self::EIO
    }
}

/// A part of a file, for a map.
#[derive(Debug)]
pub enum MapPiece {
    /// In memory.
    Bytes(MappedRange),
    /// This number of zeros, which lie nowhere.
    Zeros(usize),
}

impl MapPiece {
    fn length_bytes(&self) -> usize {
        match self {
            Self::Bytes(range) => range.length_bytes(),
            Self::Zeros(length_bytes) => *length_bytes,
        }
    }
}

/// The bytes of a disk's range. See the module's documentation.
pub struct ReadMap {
    pieces: Vec<MapPiece>,
    length_bytes: usize,
    /// The things that must stay while the map lives: places in epochs, files.
    keep: Box<dyn Keep>,
}

/// The things that a map keeps.
pub trait Keep: Any + Send + Sync {
    /// Whether they could be kept so far. If not, the copied bytes may be other data.
    fn is_kept(&self) -> bool {
        true
    }
}

impl Keep for () {}

impl ReadMap {
    /// Makes a map of these pieces, in order.
    #[must_use]
    pub fn new(pieces: Vec<MapPiece>, keep: Box<dyn Keep>) -> Self {
        let length_bytes = pieces.iter().map(MapPiece::length_bytes).sum();
        Self { pieces, length_bytes, keep }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length_bytes
    }

    /// Copies bytes from `skip_bytes` on; fails if they do not lie inside, or if some of them were lost.
    pub fn read_at(&self, skip_bytes: usize, target: &mut [u8]) -> IoResult {
        self.each_part(skip_bytes, target.len(), |piece, skip, at, length| {
            let part = target.get_mut(at..at.saturating_add(length)).ok_or(IoError::EIO)?;
            match piece {
                MapPiece::Bytes(range) => Ok(range.copy_to_slice(skip, part)?),
                MapPiece::Zeros(_) => {
                    part.fill(0);
                    Ok(())
                }
            }
        })
    }

    /// Reads `count` little-endian words of 8 bytes in place, from `skip_bytes` on, each once. The words are valid only
    /// if this succeeds.
    pub fn for_each_word(&self, skip_bytes: usize, count: usize, mut look: impl FnMut(u64)) -> IoResult {
        let length_bytes = count.checked_mul(8).ok_or(IoError::EIO)?;
        // The bytes of a word that began in an earlier piece.
        let (mut begun, mut have) = ([0_u8; 8], 0_usize);
        self.each_part(skip_bytes, length_bytes, |piece, mut skip, _, mut length| {
            while length > 0 {
                let whole = length / 8;
                let taken = match have == 0 && whole > 0 {
                    true => {
                        match piece {
                            MapPiece::Bytes(range) => range.for_each_word(skip, whole, &mut look)?,
                            MapPiece::Zeros(_) => (0..whole).for_each(|_| look(0)),
                        }
                        whole.saturating_mul(8)
                    }
                    false => {
                        let taken = length.min(8_usize.saturating_sub(have));
                        let part = begun.get_mut(have..have.saturating_add(taken)).ok_or(IoError::EIO)?;
                        match piece {
                            MapPiece::Bytes(range) => range.copy_to_slice(skip, part)?,
                            MapPiece::Zeros(_) => part.fill(0),
                        }
                        have = have.saturating_add(taken);
                        if have == 8 {
                            look(u64::from_le_bytes(begun));
                            have = 0;
                        }
                        taken
                    }
                };
                skip = skip.saturating_add(taken);
                length = length.saturating_sub(taken);
            }
            Ok(())
        })
    }

    /// Copies `length_bytes` from `skip_bytes` on to the start of `target`: a guest's memory, or a request's.
    pub fn copy_to(&self, skip_bytes: usize, length_bytes: usize, target: &Window) -> IoResult {
        if target.length_bytes() < length_bytes {
            return Err(IoError::EIO);
        }
        self.each_part(skip_bytes, length_bytes, |piece, skip, at, length| {
            let part = target.slice(at, length);
            match piece {
                MapPiece::Bytes(range) => Ok(range.copy_to(skip, length, &part)?),
                MapPiece::Zeros(_) => {
                    part.fill(0);
                    Ok(())
                }
            }
        })
    }

    /// Ends the map. Fails if some of the bytes that it showed were lost.
    pub fn commit(self) -> IoResult {
        for piece in &self.pieces {
            if let MapPiece::Bytes(range) = piece {
                range.check()?;
            }
        }
        self.check_kept()
    }

    /// Calls `each` with every piece that the range touches, and three numbers: the range's start in the piece, the
    /// piece's start in the range, and the length of the overlap.
    fn each_part(
        &self,
        skip_bytes: usize,
        length_bytes: usize,
        mut each: impl FnMut(&MapPiece, usize, usize, usize) -> IoResult,
    ) -> IoResult {
        let (mut skip, mut done) = (skip_bytes, 0_usize);
        let inside = skip_bytes.checked_add(length_bytes).is_some_and(|end| end <= self.length_bytes);
        if !inside {
            return Err(IoError::EIO);
        }
        for piece in &self.pieces {
            let left = length_bytes.saturating_sub(done);
            if left == 0 {
                break;
            }
            let here = piece.length_bytes();
            if skip >= here {
                skip = skip.saturating_sub(here);
                continue;
            }
            let take = left.min(here.saturating_sub(skip));
            each(piece, skip, done, take)?;
            done = done.saturating_add(take);
            skip = 0;
        }
        self.check_kept()
    }

    fn check_kept(&self) -> IoResult {
        if self.keep.is_kept() { Ok(()) } else { Err(IoError::EIO) }
    }
}

impl fmt::Debug for ReadMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadMap({} bytes, {} pieces)", self.length_bytes, self.pieces.len())
    }
}

/// Invisible space of a disk, for bytes that become the disk's without a copy. Dropping it gives the space back.
pub type Claim = Box<dyn Any + Send + Sync>;

enum Staged {
    /// Memory of our own, which an ordinary write stores.
    Own(AlignedBuf),
    /// Space that the disk can take over.
    Claimed(Claimed),
}

/// Space of the disk. Bytes behind the first `known_bytes` are left from earlier use of the space. They are never
/// shown, and are zeroed before the disk takes the space over.
struct Claimed {
    range: MappedRange,
    known_bytes: usize,
    claim: Claim,
}

impl Claimed {
    /// Writes a part, with `put`. Unknown bytes before it are zeroed.
    fn put(&mut self, part: Range<usize>, put: impl FnOnce(&MappedRange) -> Result<(), MappingLost>) -> IoResult {
        self.zero_up_to(part.start)?;
        put(&self.range)?;
        self.known_bytes = self.known_bytes.max(part.end);
        Ok(())
    }

    fn zero_up_to(&mut self, end: usize) -> IoResult {
        if let Some(length) = end.checked_sub(self.known_bytes).filter(|length| *length > 0) {
            self.range.fill(self.known_bytes, length, 0)?;
            self.known_bytes = end;
        }
        Ok(())
    }

    /// Copies bytes from `skip_bytes` on, with zeros in place of unknown ones.
    fn read_at(&self, skip_bytes: usize, target: &mut [u8]) -> IoResult {
        let known = self.known_bytes.saturating_sub(skip_bytes).min(target.len());
        let (known, unknown) = target.split_at_mut(known);
        self.range.copy_to_slice(skip_bytes, known)?;
        unknown.fill(0);
        Ok(())
    }
}

/// The new bytes of a range, until they are committed. See the module's documentation.
pub struct WriteMap {
    offset: u64,
    staged: Staged,
}

impl WriteMap {
    /// Makes a map for `length_bytes` at `offset` of a disk, all zeros at first, in memory of its own.
    #[must_use]
    pub fn in_memory(offset: u64, length_bytes: usize) -> Self {
        Self { offset, staged: Staged::Own(AlignedBuf::zeroed(length_bytes)) }
    }

    /// Makes a map in space of the disk, which only the disk interprets. `zeroed` says whether the space reads as
    /// zeros.
    #[must_use]
    pub fn in_space(offset: u64, range: MappedRange, claim: Claim, zeroed: bool) -> Self {
        let known_bytes = if zeroed { range.length_bytes() } else { 0 };
        Self { offset, staged: Staged::Claimed(Claimed { range, known_bytes, claim }) }
    }

    /// Returns the offset of the first byte on the disk.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        match &self.staged {
            Staged::Own(buf) => buf.len(),
            Staged::Claimed(claimed) => claimed.range.length_bytes(),
        }
    }

    /// Whether the map lies in the disk's space, so that committing it copies nothing.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        matches!(self.staged, Staged::Claimed(..))
    }

    /// Writes bytes, from `skip_bytes` on.
    pub fn write_at(&mut self, skip_bytes: usize, bytes: &[u8]) -> IoResult {
        let part = self.part(skip_bytes, bytes.len())?;
        match &mut self.staged {
            Staged::Own(buf) => buf.get_mut(part).ok_or(IoError::EIO)?.copy_from_slice(bytes),
            Staged::Claimed(claimed) => claimed.put(part, |range| range.copy_from_slice(skip_bytes, bytes))?,
        }
        Ok(())
    }

    /// Writes the bytes of a guest's memory, or of a request's, from `skip_bytes` on.
    pub fn copy_from(&mut self, skip_bytes: usize, source: &Window) -> IoResult {
        let part = self.part(skip_bytes, source.length_bytes())?;
        match &mut self.staged {
            Staged::Own(buf) => {
                source.copy_to_slice(0, buf.get_mut(part).ok_or(IoError::EIO)?);
            }
            Staged::Claimed(claimed) => claimed.put(part, |range| range.copy_from(skip_bytes, source))?,
        }
        Ok(())
    }

    /// Writes `length_bytes` of one value, from `skip_bytes` on.
    pub fn fill(&mut self, skip_bytes: usize, length_bytes: usize, byte: u8) -> IoResult {
        let part = self.part(skip_bytes, length_bytes)?;
        match &mut self.staged {
            Staged::Own(buf) => buf.get_mut(part).ok_or(IoError::EIO)?.fill(byte),
            Staged::Claimed(claimed) => claimed.put(part, |range| range.fill(skip_bytes, length_bytes, byte))?,
        }
        Ok(())
    }

    /// Writes words of 8 bytes, from `skip_bytes` on, directly in place: `word` gives each by its number. No other copy
    /// of the bytes is needed.
    pub fn put_words(&mut self, skip_bytes: usize, count: usize, mut word: impl FnMut(usize) -> u64) -> IoResult {
        let part = self.part(skip_bytes, count.checked_mul(8).ok_or(IoError::EIO)?)?;
        match &mut self.staged {
            Staged::Own(buf) => {
                let words = buf.get_mut(part).ok_or(IoError::EIO)?.as_chunks_mut().0;
                for (number, place) in words.iter_mut().enumerate() {
                    *place = word(number).to_le_bytes();
                }
            }
            Staged::Claimed(claimed) => claimed.put(part, |range| range.put_words(skip_bytes, count, word))?,
        }
        Ok(())
    }

    /// Copies back bytes of the map, from `skip_bytes` on.
    pub fn read_at(&self, skip_bytes: usize, target: &mut [u8]) -> IoResult {
        let part = self.part(skip_bytes, target.len())?;
        match &self.staged {
            Staged::Own(buf) => target.copy_from_slice(buf.get(part).ok_or(IoError::EIO)?),
            Staged::Claimed(claimed) => claimed.read_at(skip_bytes, target)?,
        }
        Ok(())
    }

    /// Fails if some of the bytes were lost. A map to be committed must pass.
    pub fn check(&self) -> IoResult {
        match &self.staged {
            Staged::Own(_) => Ok(()),
            Staged::Claimed(claimed) => Ok(claimed.range.check()?),
        }
    }

    /// Returns the disk's space that the map is in, if the disk gave any.
    #[must_use]
    pub fn claim(&self) -> Option<&Claim> {
        match &self.staged {
            Staged::Own(_) => None,
            Staged::Claimed(claimed) => Some(&claimed.claim),
        }
    }

    /// Takes the disk's space out of the map. Fails if the disk gave none, or if some of the bytes were lost.
    pub fn into_claim(self) -> IoResult<Claim> {
        match self.staged {
            Staged::Own(_) => Err(IoError::EIO),
            Staged::Claimed(mut claimed) => {
                claimed.zero_up_to(claimed.range.length_bytes())?;
                claimed.range.check()?;
                Ok(claimed.claim)
            }
        }
    }

    /// Turns the map into an ordinary write, on this thread. Fails if some of the bytes were lost.
    ///
    /// Bytes in a disk's space are copied first: its file may become shorter at any time, and zeros in place of a lost
    /// page must not be written as the new bytes.
    pub fn into_op(self, flags: OpFlags) -> IoResult<Op> {
        let buf = match self.staged {
            Staged::Own(buf) => buf,
            Staged::Claimed(claimed) => {
                let mut copy = AlignedBuf::zeroed(claimed.range.length_bytes());
                claimed.read_at(0, &mut copy)?;
                copy
            }
        };
        Ok(Op::write(self.offset, IoBuf::from_aligned(buf).whole(), flags))
    }

    fn part(&self, skip_bytes: usize, length_bytes: usize) -> IoResult<Range<usize>> {
        let end = skip_bytes.checked_add(length_bytes).filter(|end| *end <= self.length_bytes());
        Ok(skip_bytes..end.ok_or(IoError::EIO)?)
    }
}

impl fmt::Debug for WriteMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.is_in_place() { "in place" } else { "in memory" };
        write!(f, "WriteMap({} bytes at {}, {place})", self.length_bytes(), self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::Mapping;
    use std::os::fd::AsFd;
    use std::sync::Arc;

    #[test]
    fn a_map_of_pieces_reads_as_one_range_and_refuses_what_is_outside() {
        let (_file, mapping) = Mapping::anonymous_file(c"map", 4096).unwrap();
        let mapping = Arc::new(mapping);
        let range = |skip, length| MappedRange::new(&mapping, skip, length).unwrap();
        range(0, 8).copy_from_slice(0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        let pieces = vec![MapPiece::Bytes(range(2, 3)), MapPiece::Zeros(2), MapPiece::Bytes(range(0, 2))];
        let map = ReadMap::new(pieces, Box::new(()));
        let mut bytes = [9; 7];
        map.read_at(0, &mut bytes).unwrap();
        assert_eq!((bytes, map.length_bytes()), ([3, 4, 5, 0, 0, 1, 2], 7));
        map.read_at(4, &mut bytes[..2]).unwrap();
        assert_eq!(bytes[..2], [0, 1]);
        let window = IoBuf::zeroed(4).whole();
        map.copy_to(1, 4, &window).unwrap();
        assert_eq!(window.to_vec(), [4, 5, 0, 0]);
        let pieces = vec![MapPiece::Bytes(range(2, 3)), MapPiece::Zeros(17), MapPiece::Bytes(range(0, 8))];
        let longer = ReadMap::new(pieces, Box::new(()));
        for (skip, count) in [(0, 3), (1, 3), (3, 3), (4, 3), (20, 1), (28, 0)] {
            let (mut bytes, mut words) = (vec![9; count * 8], Vec::new());
            longer.read_at(skip, &mut bytes).unwrap();
            longer.for_each_word(skip, count, |word| words.extend(word.to_le_bytes())).unwrap();
            assert_eq!(words, bytes, "{count} words at {skip}");
        }
        assert!(longer.for_each_word(21, 1, |_| ()).is_err() && longer.for_each_word(0, usize::MAX, |_| ()).is_err());
        for (skip, length) in [(7, 1), (6, 2), (usize::MAX, 1), (0, 8)] {
            assert!(map.read_at(skip, &mut vec![0; length]).is_err());
        }
        assert!(map.copy_to(0, 5, &window).is_err(), "the target is shorter");
        map.commit().unwrap();
    }

    #[test]
    fn what_is_put_into_a_write_map_is_what_it_writes_wherever_that_is() {
        let (_file, mapping) = Mapping::anonymous_file(c"map", 4096).unwrap();
        let range = MappedRange::new(&Arc::new(mapping), 1024, 512).unwrap();
        range.fill(0, 512, 0xa5).unwrap();
        for mut map in [WriteMap::in_memory(4096, 512), WriteMap::in_space(4096, range, Box::new(()), false)] {
            map.write_at(1, &[1, 2]).unwrap();
            map.fill(510, 2, 7).unwrap();
            let source = IoBuf::zeroed(2).whole();
            source.fill(3);
            map.copy_from(3, &source).unwrap();
            assert!(map.write_at(511, &[1, 2]).is_err() && map.fill(0, 513, 1).is_err());
            let mut bytes = [0; 6];
            map.read_at(0, &mut bytes).unwrap();
            assert_eq!(bytes, [0, 1, 2, 3, 3, 0]);
            map.put_words(80, 2, |number| number as u64 + 5).unwrap();
            assert!(map.put_words(504, 2, |_| 0).is_err() && map.put_words(0, usize::MAX, |_| 0).is_err());
            map.check().unwrap();
            let Ok(Op::Write { offset, data, .. }) = map.into_op(OpFlags::NONE) else { panic!("a write") };
            let bytes = data.to_vec();
            assert_eq!((offset, bytes.len(), &bytes[..5], bytes[511]), (4096, 512, &[0, 1, 2, 3, 3][..], 7));
            assert_eq!((bytes[80], bytes[88], bytes[5..80].iter().any(|byte| *byte != 0)), (5, 6, false));
        }
    }

    #[test]
    fn what_space_held_before_is_never_shown_and_is_zeroed_before_it_is_taken_over() {
        let (_file, mapping) = Mapping::anonymous_file(c"map", 4096).unwrap();
        let whole = MappedRange::new(&Arc::new(mapping), 0, 4096).unwrap();
        for puts in [vec![], vec![(100, 50)], vec![(4095, 1)], vec![(200, 10), (50, 20), (205, 100)], vec![(0, 4096)]] {
            whole.fill(0, 4096, 0xa5).unwrap();
            let mut expected = [0_u8; 4096];
            let mut map = WriteMap::in_space(0, whole.clone(), Box::new(()), false);
            for (number, (skip, length)) in puts.into_iter().enumerate() {
                map.fill(skip, length, number as u8 + 1).unwrap();
                expected[skip..][..length].fill(number as u8 + 1);
                let mut shown = vec![9; 4096];
                map.read_at(0, &mut shown).unwrap();
                assert!(shown == expected, "{skip}+{length}");
                map.read_at(4000, &mut shown[..96]).unwrap();
                assert_eq!(shown[..96], expected[4000..]);
            }
            map.into_claim().unwrap();
            let mut taken = vec![9; 4096];
            whole.copy_to_slice(0, &mut taken).unwrap();
            assert!(taken == expected);
        }
    }

    /// The file becomes shorter after all was checked, and before it is written.
    #[test]
    fn what_is_lost_before_it_is_written_is_an_error_and_never_zeros() {
        let (file, mapping) = Mapping::anonymous_file(c"map", 8192).unwrap();
        let mapping = Mapping::of_storage(file.as_fd(), mapping.length_bytes(), true).unwrap();
        let range = MappedRange::new(&Arc::new(mapping), 0, 8192).unwrap();
        let mut map = WriteMap::in_space(0, range, Box::new(()), true);
        map.fill(0, 8192, 7).unwrap();
        map.check().unwrap();
        std::fs::File::from(file).set_len(4096).unwrap();
        assert_eq!(map.into_op(OpFlags::NONE).map(drop), Err(IoError::EIO));
    }
}
