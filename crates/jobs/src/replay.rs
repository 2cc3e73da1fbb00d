//! Playing a write log on a disk, up to any entry.

use crate::pipeline::{Pipeline, Spread, Worker};
use crate::{Control, JobDisk};
use block::{DiskIo, Error, ErrorKind, IoError, Op, OpFlags, ReactorHandle, Result};
use image::{LogReader, LoggedKind, LoggedRequest};
use memory::AlignedBuf;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The most bytes of data that are read and written at once.
const PIECE_BYTES: usize = 512 << 10;

/// Plays the `entries` of `log` on `target`, in their order, and makes them durable. A discard writes zeros, so that the
/// same log always gives the same disk. No queue of the target may be open.
pub fn replay(
    mut log: LogReader,
    entries: Range<u64>,
    target: &JobDisk,
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<()> {
    let total = entries.end.saturating_sub(entries.start);
    let size_bytes = target.info().size_bytes;
    // One task, since entries follow one another.
    let first = reactors.get(..1).unwrap_or_default();
    let pipeline = {
        let target = target.clone();
        Pipeline::start(first, Spread::OneTaskEach, 1, total, move |ctx| Ok(Player { target: target.open(ctx)? }))
    };
    let mut handed_out = Ok(());
    loop {
        let request = match log.next_entry() {
            Ok(Some(request)) if request.index < entries.end => request,
            Ok(_) => break,
            Err(error) => {
                // The log may be cut off. The disk keeps what came before, and is closed.
                handed_out = Err(error);
                break;
            }
        };
        if request.index < entries.start || request.entry.kind == LoggedKind::Mark {
            continue;
        }
        if request.entry.offset.saturating_add(request.entry.length_bytes) > size_bytes {
            let message = format!(
                "entry {} of the log ends behind the disk of {size_bytes} bytes: give the target the size of the disk \
                 that was logged",
                request.index
            );
            handed_out = Err(Error::new(ErrorKind::BadOption, message));
            break;
        }
        if !pipeline.push(request, 1, control) {
            break;
        }
    }
    let finished = target.finish(pipeline.finish(control), false, reactors, control);
    handed_out.and(finished)
}

struct Player {
    target: Rc<DiskIo>,
}

impl Worker for Player {
    type Item = LoggedRequest;
    type Scratch = AlignedBuf;

    fn scratch(&self) -> AlignedBuf {
        AlignedBuf::zeroed(PIECE_BYTES)
    }

    async fn work(&self, request: LoggedRequest, buf: &mut AlignedBuf) -> Result<()> {
        let entry = request.entry;
        let failed = |error: IoError| {
            let message = format!("cannot play entry {} at byte {}", request.index, entry.offset);
            Error::with_source(ErrorKind::Io, message, error)
        };
        match entry.kind {
            LoggedKind::Write { .. } => self.write(&request, buf, failed).await,
            LoggedKind::Flush => self.target.run(Op::Flush).await.map_err(failed),
            LoggedKind::Discard if entry.length_bytes > 0 => {
                let (offset, length) = (entry.offset, entry.length_bytes);
                let zeroes = Op::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE };
                self.target.run(zeroes).await.map_err(failed)
            }
            LoggedKind::Discard | LoggedKind::Mark => Ok(()),
        }
    }
}

impl Player {
    async fn write(
        &self,
        request: &LoggedRequest,
        buf: &mut AlignedBuf,
        failed: impl Fn(IoError) -> Error,
    ) -> Result<()> {
        let entry = request.entry;
        let mut done = 0;
        while done < entry.length_bytes {
            let length = (entry.length_bytes - done).min(PIECE_BYTES as u64);
            let part = 0..length as usize;
            request.read_data(done, &mut buf[part.clone()])?;
            self.target.write(entry.offset + done, buf, part).await.map_err(&failed)?;
            done += length;
        }
        Ok(())
    }
}
