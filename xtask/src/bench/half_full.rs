//! A typical disk: half of it data, in runs, most of which compress, with holes between.

use anyhow::{Context, Result};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Runs of data and holes are whole multiples of this.
const UNIT_BYTES: u64 = 64 << 10;
const RUN_UNITS_MAX: u64 = 32;
/// The length of the text from which data are taken. Compressors look no further back than a cluster.
const POOL_BYTES: usize = 16 << 20;
const WORDS: usize = 4096;

struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Returns words in random order, which compress to about 40 percent.
fn text(dice: &mut Dice) -> Vec<u8> {
    let mut word = || {
        let letters = dice.next();
        let length = 2 + letters as usize % 9;
        (0..length).map(|at| b'a' + (letters >> (5 * at + 4) & 15) as u8).collect::<Vec<u8>>()
    };
    let words: Vec<Vec<u8>> = (0..WORDS).map(|_| word()).collect();
    let mut pool = Vec::with_capacity(POOL_BYTES + 16);
    while pool.len() < POOL_BYTES {
        // Some words are much more frequent than others.
        let (one, other) = (dice.next() as usize % WORDS, dice.next() as usize % WORDS);
        pool.extend(&words[one * other / WORDS]);
        pool.push(b' ');
    }
    pool.truncate(POOL_BYTES);
    pool
}

fn noise(dice: &mut Dice) -> Vec<u8> {
    (0..POOL_BYTES / 8).flat_map(|_| dice.next().to_le_bytes()).collect()
}

/// Writes the disk; the same bytes each time.
pub(super) fn write_half_full(path: &Path, size_bytes: u64) -> Result<()> {
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let pools = [text(&mut dice), noise(&mut dice)];
    let file = std::fs::File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    file.set_len(size_bytes)?;
    let mut at = 0;
    while at < size_bytes {
        let run = |dice: &mut Dice| (1 + dice.next() % RUN_UNITS_MAX) * UNIT_BYTES;
        let (length, gap) = (run(&mut dice).min(size_bytes - at), run(&mut dice));
        let pool = &pools[usize::from(dice.next().is_multiple_of(4))];
        // No two long parts are the same.
        let start = dice.next() as usize % (POOL_BYTES - length as usize);
        file.write_all_at(&pool[start..start + length as usize], at)?;
        at += length + gap;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn half_of_it_is_data() {
        let path = std::env::temp_dir().join(format!("ringdisk-half-full-{}", std::process::id()));
        write_half_full(&path, 64 << 20).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let share = (meta.blocks() * 512) as f64 / meta.len() as f64;
        assert!(meta.len() == 64 << 20 && (0.35..0.65).contains(&share), "{share}");
    }
}
