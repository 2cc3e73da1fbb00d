//! Zeros, fast.

/// Whether all of `bytes` are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // Blocks without a way out in the middle are what the compiler makes vectors of.
    let (blocks, rest) = bytes.as_chunks::<256>();
    blocks.iter().all(|block| block.iter().fold(0, |seen, byte| seen | byte) == 0) && rest.iter().all(|byte| *byte == 0)
}
