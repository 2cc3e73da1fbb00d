//! A machine's state in a file: QEMU's migration stream, followed by its length and a checksum.
//!
//! | bytes of the trailer | what |
//! |---|---|
//! | 0 | `RingdiskState` and zeros |
//! | 16 | bytes of the stream before it |
//! | 24 | XXH3 with 128 bits of the stream |
//!
//! Numbers are little-endian.

use crate::files::NewFile;
use block::{Error, ErrorKind, Result};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

const MAGIC: [u8; 16] = *b"RingdiskState\0\0\x01";
const TRAILER_BYTES: usize = 40;
const PIECE_BYTES: usize = 1 << 20;

/// A file that holds a machine's state.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    /// Bytes of the machine's state.
    pub stream_bytes: u64,
    checksum: u128,
}

impl StateFile {
    /// Writes all of `source` to the new file `path`, durably. `told` gets the number of bytes written so far.
    pub fn write(path: &Path, source: &mut dyn Read, told: &mut dyn FnMut(u64) -> Result<()>) -> Result<Self> {
        let mut file = NewFile::create(path)?;
        let (mut hash, mut stream_bytes) = (Xxh3::new(), 0u64);
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let length = match source.read(&mut piece) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Error::io("cannot read the machine's state", error)),
            };
            hash.update(&piece[..length]);
            file.write(&piece[..length])?;
            stream_bytes += length as u64;
            told(stream_bytes)?;
        }
        let checksum = hash.digest128();
        let mut trailer = [0; TRAILER_BYTES];
        trailer[..16].copy_from_slice(&MAGIC);
        trailer[16..24].copy_from_slice(&stream_bytes.to_le_bytes());
        trailer[24..].copy_from_slice(&checksum.to_le_bytes());
        file.write(&trailer)?;
        file.sync()?;
        Ok(Self { path: path.to_owned(), stream_bytes, checksum })
    }

    /// Reads the end of a file: whether it holds a state, and how long that is. Does not check the contents.
    pub fn open(path: &Path) -> Result<Self> {
        let bad = |what: &str| Error::new(ErrorKind::BadImage, format!("'{}': {what}", path.display()));
        let failed = |error| Error::io(format!("cannot read '{}'", path.display()), error);
        let mut file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let end = || bad("it does not end as a machine's state does: it is cut off, or something else");
        let stream_bytes = length.checked_sub(TRAILER_BYTES as u64).ok_or_else(end)?;
        let mut trailer = [0; TRAILER_BYTES];
        file.seek(SeekFrom::Start(stream_bytes)).and_then(|_| file.read_exact(&mut trailer)).map_err(failed)?;
        let said = trailer[16..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        if trailer[..16] != MAGIC || said != Some(stream_bytes) {
            return Err(end());
        }
        let checksum = trailer[24..].first_chunk().map_or(0, |bytes| u128::from_le_bytes(*bytes));
        Ok(Self { path: path.to_owned(), stream_bytes, checksum })
    }

    /// Copies the machine's state without the trailer, and compares it with its checksum.
    pub fn extract(&self, target: &mut dyn Write) -> Result<()> {
        self.extract_telling(target, &mut |_| Ok(()))
    }

    /// Like [`StateFile::extract`]. `told` gets the number of bytes copied, and may end the copy.
    pub fn extract_telling(&self, target: &mut dyn Write, told: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
        let failed = |error| Error::io(format!("cannot read '{}'", self.path.display()), error);
        let mut stream = File::open(&self.path).map_err(failed)?.take(self.stream_bytes);
        let mut piece = vec![0; PIECE_BYTES];
        let (mut hash, mut copied) = (Xxh3::new(), 0);
        loop {
            let length = stream.read(&mut piece).map_err(failed)?;
            if length == 0 {
                break;
            }
            hash.update(&piece[..length]);
            target.write_all(&piece[..length]).map_err(|error| Error::io("cannot write the machine's state", error))?;
            copied += length as u64;
            told(copied)?;
        }
        target.flush().map_err(|error| Error::io("cannot write the machine's state", error))?;
        if copied == self.stream_bytes && hash.digest128() == self.checksum {
            return Ok(());
        }
        let what = "its checksum is wrong: the file is damaged, do not resume a machine from it";
        Err(Error::new(ErrorKind::BadImage, format!("'{}': {what}", self.path.display())))
    }

    /// Compares the machine's state with its checksum.
    pub fn check(&self) -> Result<()> {
        self.extract(&mut std::io::sink())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_comes_out_as_it_went_in_and_any_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let stream: Vec<u8> = (0..3_000_001u32).map(|index| (index / 7) as u8).collect();
        let mut told = 0;
        let written = StateFile::write(&path, &mut stream.as_slice(), &mut |bytes| {
            told = bytes;
            Ok(())
        });
        assert_eq!((written.unwrap().stream_bytes, told), (3_000_001, 3_000_001));
        assert!(StateFile::write(&path, &mut [0u8].as_slice(), &mut |_| Ok(())).is_err(), "none is overwritten");
        let mut out = Vec::new();
        StateFile::open(&path).unwrap().extract(&mut out).unwrap();
        assert!(out == stream);
        let whole = std::fs::read(&path).unwrap();
        for at in [0, 2_999_999, 3_000_001, 3_000_020, 3_000_030, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert!(StateFile::open(&path).and_then(|file| file.check()).is_err(), "byte {at}");
        }
        for length in [0, 39, 40, 1000, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(StateFile::open(&path).and_then(|file| file.check()).is_err(), "{length} bytes");
        }
    }
}
