//! One call, with its bytes.

use super::End;
use block::{Done, FileIo, FileOp, FileQueue, IoResult, PastEnd, Waiter, block_on, reclaim};
use memory::{AlignedBuf, IoBuf};

/// An operation that owns its bytes, so that another thread can carry it out.
pub(super) enum Call {
    Read {
        offset: u64,
        length_bytes: usize,
        past_end: PastEnd,
    },
    Write {
        offset: u64,
        data: AlignedBuf,
        fua: bool,
    },
    /// A call without bytes.
    Other(Bare),
}

#[derive(Clone, Copy)]
pub(super) enum Bare {
    Flush,
    Discard { offset: u64, length: u64 },
    WriteZeroes { offset: u64, length: u64, may_unmap: bool },
    SetLength { length: u64 },
}

impl Call {
    pub(super) fn of(op: &FileOp) -> IoResult<Self> {
        Ok(match op {
            FileOp::Read { offset, data, past_end } => {
                Self::Read { offset: *offset, length_bytes: data.length_bytes(), past_end: *past_end }
            }
            FileOp::Write { offset, data, fua } => {
                let mut copy = AlignedBuf::try_zeroed(data.length_bytes())?;
                data.copy_to_slice(0, &mut copy);
                data.check()?;
                Self::Write { offset: *offset, data: copy, fua: *fua }
            }
            FileOp::Flush => Self::Other(Bare::Flush),
            FileOp::Discard { offset, length } => Self::Other(Bare::Discard { offset: *offset, length: *length }),
            FileOp::WriteZeroes { offset, length, may_unmap } => {
                Self::Other(Bare::WriteZeroes { offset: *offset, length: *length, may_unmap: *may_unmap })
            }
            FileOp::SetLength { length } => Self::Other(Bare::SetLength { length: *length }),
        })
    }

    /// Carries out the call. Blocks.
    pub(super) fn carry_out(self, queue: &dyn FileQueue) -> End {
        let run = |op| {
            let waiter = Waiter::new();
            queue.push(FileIo::new(op, Done::Waiter(waiter.clone())));
            block_on(Waiter::wait(&waiter))
        };
        match self {
            Self::Read { offset, length_bytes, past_end } => {
                let buf = IoBuf::try_zeroed(length_bytes)?;
                run(FileOp::Read { offset, data: buf.whole(), past_end })?;
                Ok(Some(reclaim(buf)))
            }
            Self::Write { offset, data, fua } => {
                run(FileOp::Write { offset, data: IoBuf::from_aligned(data).whole(), fua }).map(|()| None)
            }
            Self::Other(bare) => run(match bare {
                Bare::Flush => FileOp::Flush,
                Bare::Discard { offset, length } => FileOp::Discard { offset, length },
                Bare::WriteZeroes { offset, length, may_unmap } => FileOp::WriteZeroes { offset, length, may_unmap },
                Bare::SetLength { length } => FileOp::SetLength { length },
            })
            .map(|()| None),
        }
    }
}
