//! Seeded randomness: everything random in a test comes from here, so a seed replays the test.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// A seeded source of choices.
#[derive(Debug)]
pub struct Dice {
    rng: StdRng,
}

impl Dice {
    /// Makes dice that always fall the same way for one seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed) }
    }

    /// Returns a number below `limit`; zero if `limit` is zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        if limit == 0 { 0 } else { self.rng.random_range(0..limit) }
    }

    /// Returns an index below `limit`, which must not be zero.
    pub fn index(&mut self, limit: usize) -> usize {
        self.rng.random_range(0..limit)
    }

    /// Returns true in `percent` of a hundred throws.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Returns a new seed, for other dice.
    pub fn seed(&mut self) -> u64 {
        self.rng.random()
    }

    /// Puts `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}

/// Mixes two numbers into one that looks random (the finaliser of SplitMix64).
#[must_use]
pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_add(b.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Fills `target` with bytes that depend on `seed` only.
pub fn fill_seeded(seed: u64, target: &mut [u8]) {
    for (index, chunk) in target.chunks_mut(8).enumerate() {
        let word = mix(seed, index as u64).to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}
