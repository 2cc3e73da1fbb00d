//! When workers tell the reactor of what they have carried out.

/// So many results of jobs in turn are told at once at most, and only while they have moved no more than this.
const TOLD_AT_ONCE: usize = 16;
const TOLD_BYTES: usize = 128 << 10;

/// What a worker has carried out in turn, and the reactor was not told to look for yet. Told one by one, each would go
/// from one processor to the other and back. Half of what there is to do is told at once, so that the reactor can give
/// more while the rest is carried out. A reactor that is about to sleep looks by itself, and sleeps no longer than till it
/// is to look again: what has ended does not wait for a job behind it that is held up.
#[derive(Default)]
pub(crate) struct Untold {
    count: usize,
    moved_bytes: usize,
}

impl Untold {
    pub(crate) fn add(&mut self, result: i32) {
        self.count += 1;
        self.moved_bytes = self.moved_bytes.saturating_add(usize::try_from(result).unwrap_or(0));
    }

    /// Whether they may wait for a job that moves so much, behind which `waiting` others do.
    pub(crate) fn may_wait_for(&self, length_bytes: usize, waiting: usize) -> bool {
        self.count <= waiting
            && self.count < TOLD_AT_ONCE
            && self.moved_bytes.saturating_add(length_bytes) <= TOLD_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_waits_for_no_more_than_there_is_nor_for_much() {
        let mut untold = Untold::default();
        untold.add(4096);
        assert!(untold.may_wait_for(4096, 1) && !untold.may_wait_for(4096, 0) && !untold.may_wait_for(TOLD_BYTES, 1));
        untold.add(-libc::EIO);
        assert!(untold.may_wait_for(TOLD_BYTES - 4096, 2) && !untold.may_wait_for(TOLD_BYTES - 4095, 2));
        for _ in 3..TOLD_AT_ONCE {
            untold.add(0);
        }
        assert!(untold.may_wait_for(0, 100));
        untold.add(0);
        assert!(!untold.may_wait_for(0, 100));
    }
}
