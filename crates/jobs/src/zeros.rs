//! Zeros, fast.

/// Whether all of `bytes` are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // The compiler vectorizes only loops without an exit in the middle, so whole blocks are checked.
    let (blocks, rest) = bytes.as_chunks::<256>();
    blocks.iter().all(|block| block.iter().fold(0, |seen, byte| seen | byte) == 0) && rest.iter().all(|byte| *byte == 0)
}
