//! Divides the memory for tables over a chain, and counts what the caches did.
//!
//! An image has one budget (`l2-cache-size`). By default it covers the tables of the whole chain, up to a limit. If it
//! does not suffice, the layers below the top one get an eighth: their tables are read to fill the merged map. The top
//! layer and that map get half of the rest each. What one of them does not need goes to the others. Each layer has at
//! least two slices of 4 KiB.

use crate::chain::layer::Layer;
use crate::chain::lower_map::LowerMap;
use block::sync::{AtomicU64, Mutex, Ordering, PoisonError};
use std::sync::Arc;

/// The default: QEMU's limit on Linux.
const DEFAULT_LIMIT_BYTES: u64 = 32 << 20;
/// The least bytes of each layer: two slices.
const LEAST_BYTES: u64 = 8 << 10;
/// If at least so many layers with tables lie below the top one, their answers are merged.
const MERGED_LAYERS_MIN: usize = 2;

/// The state and counters of an image's tables in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TableCacheStats {
    /// Lookups of requests that tables in memory answered.
    pub hits: u64,
    /// Slices of tables that had to be read for a lookup.
    pub misses: u64,
    /// Slices that made room for others.
    pub evictions: u64,
    /// Bytes in memory.
    pub used_bytes: u64,
    /// The limit in bytes: the budget, or less if the image needs less.
    pub limit_bytes: u64,
}

/// Lookups of all queues. Each queue counts its own, so queues share nothing.
#[derive(Debug, Default)]
pub(crate) struct Hits {
    queues: Mutex<Vec<Arc<AtomicU64>>>,
}

impl Hits {
    pub(crate) fn join(&self) -> Arc<AtomicU64> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        // One entry holds the sum of the queues that are gone.
        let gone: u64 = queues.extract_if(.., |count| Arc::strong_count(count) == 1).map(|count| total(&count)).sum();
        let mine = Arc::new(AtomicU64::new(0));
        queues.push(Arc::clone(&mine));
        if gone > 0 {
            queues.push(Arc::new(AtomicU64::new(gone)));
        }
        mine
    }

    pub(crate) fn sum(&self) -> u64 {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|count| total(count)).sum()
    }
}

fn total(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

/// The bytes that each part wants, and later those it gets.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shares {
    top: u64,
    map: u64,
    /// The layers below the top one, in order; zero for those without tables.
    lower: Vec<u64>,
}

impl Shares {
    fn divide(mut self, budget: u64) -> Self {
        let wanted = self.clone();
        let count = self.lower.iter().filter(|bytes| **bytes > 0).count() as u64;
        let each = (budget / 8).checked_div(count).unwrap_or(0).max(LEAST_BYTES);
        self.lower.iter_mut().for_each(|bytes| *bytes = each.min(*bytes));
        let left = budget.saturating_sub(self.lower.iter().sum());
        self.map = wanted.map.min(left / 2);
        self.top = wanted.top.min(left.saturating_sub(self.map));
        self.map = wanted.map.min(left.saturating_sub(self.top));
        let mut left = left.saturating_sub(self.top).saturating_sub(self.map);
        for (bytes, wanted) in self.lower.iter_mut().zip(wanted.lower) {
            let more = wanted.saturating_sub(*bytes).min(left);
            *bytes = bytes.saturating_add(more);
            left = left.saturating_sub(more);
        }
        self
    }
}

/// Divides the memory for tables over these layers. Also returns the granule of the merged map, if there is one.
fn divide(layers: &[&Layer], budget: Option<u64>) -> (Shares, Option<u32>) {
    let size_bytes = layers.first().map_or(0, |top| top.size_bytes);
    let lower = layers.get(1..).unwrap_or_default();
    let granules = || lower.iter().filter_map(|layer| layer.mapping.granule_bits());
    let bits = granules().min().filter(|_| granules().count() >= MERGED_LAYERS_MIN);
    let wanted = |layer: &&Layer| layer.mapping.mapping_bytes();
    let shares = Shares {
        top: layers.first().map_or(0, wanted),
        map: bits.map_or(0, |bits| LowerMap::wanted_bytes(size_bytes, bits)),
        lower: lower.iter().map(wanted).collect(),
    };
    (shares.divide(budget.unwrap_or(DEFAULT_LIMIT_BYTES)), bits)
}

/// Gives each layer of a chain that is being opened its share.
pub(crate) fn share_out(layers: &mut [Layer], budget: Option<u64>) {
    let (shares, _) = divide(&layers.iter().collect::<Vec<_>>(), budget);
    for (layer, bytes) in layers.iter_mut().zip(std::iter::once(shares.top).chain(shares.lower)) {
        layer.mapping.set_cache_bytes(bytes);
    }
}

/// Sets the share of a layer that is put on top of others. The others keep theirs.
pub(crate) fn share_of_top(top: &mut Layer, below: &[Arc<Layer>], budget: Option<u64>) {
    let layers: Vec<&Layer> = std::iter::once(&*top).chain(below.iter().map(|layer| &**layer)).collect();
    let (shares, _) = divide(&layers, budget);
    top.mapping.set_cache_bytes(shares.top);
}

/// Makes the merged map of a chain, if it is to have one.
pub(crate) fn lower_map(layers: &[Arc<Layer>], budget: Option<u64>) -> Option<LowerMap> {
    let (shares, bits) = divide(&layers.iter().map(|layer| &**layer).collect::<Vec<_>>(), budget);
    let size_bytes = layers.first().map_or(0, |top| top.size_bytes);
    bits.map(|bits| LowerMap::new(size_bytes, bits, shares.map))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_that_covers_everything_is_not_used_up_and_a_smaller_one_is_kept() {
        const K: u64 = 1 << 10;
        let wanted = Shares { top: 1000 * K, map: 600 * K, lower: vec![1000 * K, 0, 500 * K] };
        assert_eq!(wanted.clone().divide(10_000 * K), wanted);
        for budget in [16 * K, 17 * K, 160 * K, 1600 * K, 2000 * K, 3000 * K] {
            let got = wanted.clone().divide(budget);
            let sum = got.top + got.map + got.lower.iter().sum::<u64>();
            assert_eq!(sum, budget, "{got:?}");
            assert!(got.top <= wanted.top && got.map <= wanted.map);
        }
        assert_eq!(
            wanted.clone().divide(1600 * K),
            Shares { top: 800 * K, map: 600 * K, lower: vec![100 * K, 0, 100 * K] }
        );
        assert_eq!(Shares { top: 9, map: 0, lower: vec![] }.divide(5), Shares { top: 5, map: 0, lower: vec![] });
    }
}
