//! The null disk, for measurements: reads give zeros, writes are thrown away, nothing waits.

use block::{
    Completion, Disk, DiskInfo, DiskQueue, IoError, IoErrorKind, IoResult, Op, ReactorCtx, Result, Run, Runs,
    SECTOR_BYTES, StatusQuery, Tag, Topology,
};
use std::rc::Rc;

/// A disk without storage.
#[derive(Debug)]
pub struct NullDisk {
    size_bytes: u64,
    serial: String,
}

impl NullDisk {
    /// Makes a null disk of this size, rounded down to whole sectors.
    #[must_use]
    pub fn new(size_bytes: u64, serial: String) -> Self {
        let odd_bytes = size_bytes.checked_rem(SECTOR_BYTES).unwrap_or(0);
        Self { size_bytes: size_bytes.saturating_sub(odd_bytes), serial }
    }
}

impl Disk for NullDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: self.size_bytes,
            logical_block_bytes: SECTOR_BYTES as u32,
            topology: Topology::default(),
            read_only: false,
            volatile_cache: true,
            discard: true,
            discard_granularity_bytes: SECTOR_BYTES as u32,
            write_zeroes: true,
            serial: self.serial.clone(),
        }
    }

    fn block_status(&self, query: &StatusQuery) -> Result<Runs<'_>> {
        Ok(query.answered_with(self.size_bytes, Run::of_nothing))
    }

    fn open_queue(&self, _ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        Ok(Box::new(NullQueue { size_bytes: self.size_bytes, ready: Vec::new() }))
    }
}

struct NullQueue {
    size_bytes: u64,
    ready: Vec<Completion>,
}

impl NullQueue {
    fn carry_out(&self, op: &Op) -> IoResult {
        if let Some((offset, length)) = op.range()
            && offset.checked_add(length).is_none_or(|end| end > self.size_bytes)
        {
            return Err(IoError::new(IoErrorKind::OutOfRange));
        }
        if let Op::Read { data, .. } = op {
            data.fill(0);
        }
        Ok(())
    }
}

impl DiskQueue for NullQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let result = self.carry_out(&op);
        self.ready.push(Completion { tag, result });
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        let count = self.ready.len();
        done.append(&mut self.ready);
        count
    }

    fn in_flight(&self) -> usize {
        self.ready.len()
    }
}
