//! Checks what a guest writes to the start of a disk whose format was guessed.

use crate::guess::{PROBE_BYTES, forms_a_header};
use block::{IoError, IoErrorKind, IoResult};
use memory::{IoBuf, Window};

/// Refuses a write that would give a guessed raw disk another format's header: the next guess would believe it. Returns
/// a copy of the bytes that a guess looks at, so that the guest cannot change them after the check.
pub(crate) fn checked_head(offset: u64, data: &Window) -> IoResult<Option<Window>> {
    let Some(room) = (PROBE_BYTES as u64).checked_sub(offset).filter(|room| *room > 0) else { return Ok(None) };
    let length = usize::try_from(room).unwrap_or(PROBE_BYTES).min(data.length_bytes());
    let copy = IoBuf::try_zeroed(length)?.whole();
    data.slice(0, length).copy_to(&copy);
    data.check()?;
    let mut head = [0u8; PROBE_BYTES];
    let at = usize::try_from(offset).unwrap_or(PROBE_BYTES);
    let got = head.get_mut(at..).map_or(0, |target| copy.copy_to_slice(0, target));
    if forms_a_header(head.get(..at.saturating_add(got)).unwrap_or_default()) {
        return Err(IoError::new(IoErrorKind::ReadOnly));
    }
    let rest = data.slice(length, data.length_bytes().saturating_sub(length));
    Ok(Some(IoBuf::gather(vec![copy, rest]).whole()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_that_a_guest_puts_in_after_the_check_is_not_what_is_written() {
        let memory = IoBuf::zeroed(4096).whole();
        memory.fill(7);
        let checked = checked_head(0, &memory).unwrap().unwrap();
        memory.copy_from_slice(0, b"QFI\xfb");
        memory.copy_from_slice(4000, &[9]);
        let written = checked.to_vec();
        assert_eq!((written.len(), &written[..4], written[4000]), (4096, &[7; 4][..], 9));
        assert!(checked_head(0, &memory).is_err());
        assert!(checked_head(512, &memory).unwrap().is_none());
    }
}
