//! Copies what a guest sees into the top layer, without a write of the guest.

use crate::chain::mapping::{Allocation, Prepared};
use crate::chain::queue::Shared;
use block::{Extent, IoError, IoResult, Priority};
use memory::IoBuf;

impl Shared {
    /// Copies into the top layer what the guest sees in a range that the layer does not hold. Returns how many bytes of
    /// the range are dealt with. Guests may write meanwhile, and their data stay. Nobody else changes a cluster between
    /// its *prepare* and its *commit*, and the copy is read in between.
    pub(crate) async fn copy_up(&self, offset: u64, length_bytes: u64) -> IoResult<u64> {
        let mapping = &self.chain.top()?.mapping;
        let meta = self.metas.first().ok_or(IoError::EIO)?;
        let allocation = match mapping.prepare_copy(meta, offset, length_bytes).await? {
            // A guest has written there.
            Prepared::InPlace { length_bytes: there, .. } => return Ok(there.clamp(1, length_bytes)),
            Prepared::New(allocation) => allocation,
        };
        let start = allocation.guest_offset;
        let end = start.checked_add(allocation.length_bytes).ok_or(IoError::EIO)?;
        let dealt_with = end.saturating_sub(offset).clamp(1, length_bytes);
        if !self.top_says_nothing_of_some(start, end).await? {
            // It reads as zeros since then. The space goes back.
            return Ok(dealt_with);
        }
        self.fill_with_what_is_seen(&allocation).await?;
        mapping.commit_write(meta, allocation).await?;
        Ok(dealt_with)
    }

    async fn top_says_nothing_of_some(&self, start: u64, end: u64) -> IoResult<bool> {
        let top = self.chain.top()?;
        let meta = self.metas.first().ok_or(IoError::EIO)?;
        let (mut at, end) = (start, end.min(top.size_bytes));
        while at < end {
            let mapped = top.mapping.resolve(meta, at, end.saturating_sub(at)).await?;
            if mapped.extent == Extent::Backing {
                return Ok(true);
            }
            at = at.saturating_add(mapped.length_bytes.max(1));
        }
        Ok(false)
    }

    async fn fill_with_what_is_seen(&self, allocation: &Allocation) -> IoResult {
        let length = usize::try_from(allocation.length_bytes).map_err(|_| IoError::EIO)?;
        let data = IoBuf::try_zeroed(length)?.whole();
        let inside = self.chain.size_bytes.saturating_sub(allocation.guest_offset).min(allocation.length_bytes);
        let inside = usize::try_from(inside).map_err(|_| IoError::EIO)?;
        self.read(allocation.guest_offset, data.slice(0, inside), Priority::NONE).await?;
        self.start_write(allocation.file_offset, data, Priority::NONE).await
    }
}
