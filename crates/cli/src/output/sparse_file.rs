//! A new file in which blocks of zeros are holes.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

/// What file systems allocate at least.
const BLOCK_BYTES: u64 = 4096;

/// Writes a file that was empty, from its start to its end. Blocks of zeros take no space.
pub(crate) struct SparseFile<'a> {
    file: &'a File,
    at: u64,
}

impl<'a> SparseFile<'a> {
    pub(crate) fn new(file: &'a File) -> Self {
        Self { file, at: 0 }
    }

    /// Gives the file its length: a hole at its end is there as well.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.file.set_len(self.at)
    }
}

/// How many bytes at the start of `bytes` belong into one run: all blocks of zeros, or none. `at` is where they begin.
fn run_of(bytes: &[u8], at: u64) -> (usize, bool) {
    let block_at = |skip: usize| {
        let left = BLOCK_BYTES - (at + skip as u64) % BLOCK_BYTES;
        let end = skip.saturating_add(left as usize).min(bytes.len());
        (bytes[skip..end].iter().all(|byte| *byte == 0), end)
    };
    let (is_zero, mut end) = block_at(0);
    while end < bytes.len() {
        let (is_zero_too, next) = block_at(end);
        if is_zero_too != is_zero {
            break;
        }
        end = next;
    }
    (end, is_zero)
}

impl Write for SparseFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let (length, is_zero) = run_of(bytes, self.at);
        if !is_zero {
            self.file.write_all_at(&bytes[..length], self.at)?;
        }
        self.at += length as u64;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn zeros_become_holes_and_the_contents_are_the_same_however_they_come() {
        let mut bytes = vec![0; (1 << 20) + 100];
        bytes[100] = 1;
        bytes[70_000..70_010].fill(2);
        let last = bytes.len() - 4097;
        bytes[last] = 3;
        for piece in [1, 511, 4096, 5000, bytes.len()] {
            for zeros_behind in [0, 300_000] {
                let mut wanted = bytes.clone();
                wanted.resize(bytes.len() + zeros_behind, 0);
                let named = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
                let mut sparse = SparseFile::new(named.as_file());
                wanted.chunks(piece).for_each(|piece| sparse.write_all(piece).unwrap());
                sparse.finish().unwrap();
                named.as_file().sync_all().unwrap();
                assert!(std::fs::read(named.path()).unwrap() == wanted, "{piece}, {zeros_behind}");
                let full = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
                full.as_file().write_all(&vec![1; wanted.len()]).unwrap();
                full.as_file().sync_all().unwrap();
                let [sparse, full] = [&named, &full].map(|file| file.as_file().metadata().unwrap().blocks());
                assert!((1..full / 4).contains(&sparse), "{sparse} of {full} sectors by pieces of {piece}");
            }
        }
    }
}
