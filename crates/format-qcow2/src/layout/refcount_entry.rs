//! Entries of refcount blocks: 1 to 64 bits wide (qcow2 specification, "Host cluster management").

/// Returns the highest count of a width of `1 << order` bits.
pub(crate) fn max_count(order: u32) -> u64 {
    u64::MAX.wrapping_shr(64u32.saturating_sub(1u32.wrapping_shl(order)))
}

/// Reads a refcount. Refcounts narrower than a byte fill it from its least significant bit; wider ones are big-endian.
pub(crate) fn read_entry(bytes: &[u8], index: u64, order: u32) -> u64 {
    let index = usize::try_from(index).unwrap_or(usize::MAX);
    if order < 3 {
        let per_byte_bits = 3u32.saturating_sub(order);
        let byte = bytes.get(index.wrapping_shr(per_byte_bits)).copied().unwrap_or(0);
        let shift = (index as u32 & 7u32.wrapping_shr(order)).wrapping_shl(order);
        let mask = 1u32.wrapping_shl(1u32.wrapping_shl(order)).saturating_sub(1);
        return u64::from(u32::from(byte).wrapping_shr(shift) & mask);
    }
    let width = 1usize.wrapping_shl(order.saturating_sub(3));
    let start = index.saturating_mul(width);
    let entry = bytes.get(start..start.saturating_add(width)).unwrap_or(&[]);
    entry.iter().fold(0u64, |value, byte| value.wrapping_shl(8) | u64::from(*byte))
}

/// Writes a refcount. Returns the first byte that changed.
pub(crate) fn write_entry(bytes: &mut [u8], index: u64, order: u32, value: u64) -> usize {
    let index = usize::try_from(index).unwrap_or(usize::MAX);
    if order < 3 {
        let at = index.wrapping_shr(3u32.saturating_sub(order));
        let shift = (index as u32 & 7u32.wrapping_shr(order)).wrapping_shl(order);
        let mask = 1u32.wrapping_shl(1u32.wrapping_shl(order)).saturating_sub(1).wrapping_shl(shift);
        if let Some(byte) = bytes.get_mut(at) {
            let new = (u32::from(*byte) & !mask) | ((value as u32).wrapping_shl(shift) & mask);
            *byte = new as u8;
        }
        return at;
    }
    let width = 1usize.wrapping_shl(order.saturating_sub(3));
    let start = index.saturating_mul(width);
    let big_endian = value.to_be_bytes();
    let tail = big_endian.get(8usize.saturating_sub(width)..).unwrap_or(&[]);
    if let Some(entry) = bytes.get_mut(start..start.saturating_add(width)) {
        entry.copy_from_slice(tail);
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_reads_back_what_it_wrote_and_leaves_its_neighbours() {
        for order in 0..=6 {
            let mut bytes = vec![0u8; 512];
            let max = u64::MAX >> (64 - (1u32 << order));
            for index in [0, 1, 5, 6, 7, 8, 63] {
                write_entry(&mut bytes, index, order, max);
            }
            write_entry(&mut bytes, 6, order, 1);
            for index in 0..64 {
                let expected = match index {
                    0 | 1 | 5 | 7 | 8 | 63 => max,
                    6 => 1,
                    _ => 0,
                };
                assert_eq!(read_entry(&bytes, index, order), expected, "order {order}, index {index}");
            }
        }
    }
}
