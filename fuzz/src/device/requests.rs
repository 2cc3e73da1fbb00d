//! The requests to one queue of the driver, and how often each has ended.

use super::rings::byte_of;
use arbitrary::{Result, Unstructured};
use block::{Completion, DiskQueue, Op, OpFlags};
use driver::Driver;
use memory::IoBuf;

/// What is in memory that nobody may change.
const KEPT: u8 = 0xc3;

/// A request, before it has memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Draft {
    kind: u8,
    offset: u64,
    length: usize,
    /// Whether its memory is shared with the device, if there is some left.
    shared: bool,
    may_unmap: bool,
    flags: OpFlags,
}

impl Draft {
    pub(super) fn any(u: &mut Unstructured<'_>) -> Result<Self> {
        Ok(Self {
            kind: u.int_in_range(0..=8)?,
            length: 512 * u.int_in_range(1..=40)?,
            offset: if u.ratio(1u8, 16)? { u.arbitrary()? } else { 512 * u.int_in_range(0..=2000)? },
            shared: u.arbitrary()?,
            may_unmap: u.arbitrary()?,
            flags: *u.choose(&[OpFlags::NONE, OpFlags::FUA, OpFlags::PREFLUSH])?,
        })
    }

    fn op(self, buf: &IoBuf) -> Op {
        let Self { kind, offset, length, may_unmap, flags, .. } = self;
        let length = length as u64;
        match kind {
            0..=2 => Op::read(offset, buf.whole()),
            3 | 4 => Op::write(offset, buf.whole(), flags),
            5 => Op::Discard { offset, length },
            6 => Op::WriteZeroes { offset, length, may_unmap, flags },
            7 => Op::SecureErase { offset, length },
            _ => Op::Flush,
        }
    }
}

/// Returns memory of the driver with contents that nobody may change; `None` if none is left.
pub(super) fn kept_memory(driver: &Driver, length: usize) -> Option<IoBuf> {
    let buf = driver.alloc(length).ok()?;
    buf.whole().fill(KEPT);
    Some(buf)
}

/// Whether all bytes are those of [`kept_memory`].
pub(super) fn is_as_it_was(buf: &IoBuf) -> bool {
    holds(buf, KEPT)
}

fn holds(buf: &IoBuf, byte: u8) -> bool {
    buf.whole().to_vec().iter().all(|found| *found == byte)
}

struct Asked {
    buf: IoBuf,
    reads: bool,
    ends: u32,
    is_ok: bool,
}

/// The requests to a queue since it was opened.
#[derive(Default)]
pub(super) struct Submitted {
    all: Vec<Asked>,
    done: Vec<Completion>,
}

impl Submitted {
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    pub(super) fn submit(&mut self, draft: Draft, driver: &Driver, queue: &mut dyn DiskQueue) {
        let buf = match driver.alloc(draft.length) {
            Ok(buf) if draft.shared => buf,
            _ => IoBuf::zeroed(draft.length),
        };
        buf.whole().fill(KEPT);
        queue.submit(self.all.len() as u64, draft.op(&buf));
        self.all.push(Asked { buf, reads: draft.kind < 3, ends: 0, is_ok: false });
    }

    pub(super) fn harvest(&mut self, queue: &mut dyn DiskQueue) {
        queue.harvest(&mut self.done);
        for done in self.done.drain(..) {
            let asked = &mut self.all[done.tag as usize];
            asked.ends += 1;
            asked.is_ok = done.result.is_ok();
        }
        let left = self.all.iter().filter(|asked| asked.ends == 0).count();
        assert!(self.all.iter().all(|asked| asked.ends <= 1), "a request ended twice");
        assert_eq!(queue.in_flight(), left);
    }

    /// Whether the first `count` requests have ended.
    pub(super) fn have_ended(&self, count: usize) -> bool {
        self.all.iter().take(count).all(|asked| asked.ends == 1)
    }

    /// Checks the memory of the requests to an honest device: reads that ended well have what their own ring's device gave,
    /// and nothing is written later or elsewhere.
    pub(super) fn check_data(&self, index: usize) {
        for (tag, asked) in self.all.iter().enumerate() {
            match (asked.reads, asked.is_ok) {
                (true, true) => assert!(holds(&asked.buf, byte_of(index)), "queue {index}, read {tag}: wrong data"),
                (false, _) => assert!(is_as_it_was(&asked.buf), "queue {index}, request {tag}: its memory was written"),
                (true, false) => {}
            }
        }
    }

    /// Checks that nobody else holds the memory. The queue is gone, or has ended everything.
    pub(super) fn check_handles(&self) {
        let held = self.all.iter().filter(|asked| !asked.buf.is_unique()).count();
        assert_eq!(held, 0, "a handle stays behind");
    }
}
