//! Carries out writes on both chains.

use super::{BothSides, OneSided, micros};
use crate::chain::guessed_raw::checked_head;
use crate::chain::layers::OtherChain;
use crate::chain::queue::{OtherSide, Shared};
use block::sync::Ordering;
use block::{IoError, IoErrorKind, IoResult, Op, Priority, ReactorCtx};
use memory::{IoBuf, Window};
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The most bytes that one write to both chains copies out of the guest's memory.
const PIECE_BYTES: usize = 1 << 20;

/// What is written to both chains.
enum Change {
    Bytes(Window, Priority),
    Zeros { may_unmap: bool },
}

/// A write on its way to both chains, and the time that the second chain has added to it.
struct Way<'a> {
    shared: &'a Shared,
    other: &'a OtherSide,
    both: &'a BothSides,
    added: Duration,
}

impl Way<'_> {
    async fn change(&mut self, range: Range<u64>, change: Change) -> IoResult {
        let begun = Instant::now();
        let _range = self.both.unless_apart(self.both.lock(range.clone())).await;
        let mut sides = OneSided { both: self.both, range: range.clone(), is_even: false };
        let locked = Instant::now();
        apply(self.shared, &range, &change).await?;
        let first = locked.elapsed();
        if self.both.failure().is_none() {
            let (other, range) = (Rc::clone(&self.other.shared), range.clone());
            let call = async move { apply(&other, &range, &change).await };
            self.both.answer(self.both.of_other(&*self.other.ctx, call).await)?;
        }
        sides.is_even = true;
        self.added = self.added.saturating_add(begun.elapsed().saturating_sub(first));
        Ok(())
    }

    async fn write(&mut self, offset: u64, data: &Window, priority: Priority) -> IoResult {
        let mut done = 0_usize;
        while done < data.length_bytes() {
            let length = data.length_bytes().saturating_sub(done).min(PIECE_BYTES);
            let begun = Instant::now();
            let piece = data.slice(done, length);
            let room = self.both.unless_apart(self.both.room(length as u64)).await;
            let own = match &room {
                Some(_) => {
                    let own = IoBuf::try_zeroed(length)?.whole();
                    own.copy_from(0, &piece);
                    piece.check()?;
                    own
                }
                // It goes to one side only.
                None => piece,
            };
            self.added = self.added.saturating_add(begun.elapsed());
            let at = offset.saturating_add(done as u64);
            self.change(at..at.saturating_add(length as u64), Change::Bytes(own, priority)).await?;
            done = done.saturating_add(length);
        }
        Ok(())
    }
}

async fn apply(shared: &Shared, range: &Range<u64>, change: &Change) -> IoResult {
    match change {
        Change::Bytes(data, priority) => shared.write(range.start, data.clone(), *priority).await.map(drop),
        Change::Zeros { may_unmap } => {
            shared.write_zeroes(range.start, range.end.saturating_sub(range.start), *may_unmap).await
        }
    }
}

impl Shared {
    /// Carries out a write, a discard, or a write of zeros on both chains.
    pub(crate) async fn on_both_sides(&self, op: Op, ctx: &Rc<dyn ReactorCtx>) -> IoResult {
        let (Some(OtherChain { sides: both, .. }), Some(other)) = (&self.chain.both, &self.other) else {
            return Err(IoError::EIO);
        };
        let delay = both.delay();
        if !delay.is_zero() {
            ctx.sleep(delay).await;
            both.waited_us.fetch_add(micros(delay), Ordering::Relaxed);
        }
        let flags = op.flags();
        self.flush_before_if(flags.is_preflush()).await?;
        let mut way = Way { shared: self, other, both, added: delay };
        match op {
            Op::Write { offset, data, priority, .. } => {
                let checked = match self.chain.guessed_raw {
                    true => checked_head(offset, &data).inspect_err(|_| self.chain.log_refused_header(offset))?,
                    false => None,
                };
                way.write(offset, checked.as_ref().unwrap_or(&data), priority).await?;
            }
            Op::WriteZeroes { offset, length, may_unmap, .. } if length > 0 => {
                way.change(offset..offset.saturating_add(length), Change::Zeros { may_unmap }).await?;
            }
            Op::Discard { offset, length } if length > 0 && self.can_discard()? => {
                let range = offset..offset.saturating_add(length);
                way.change(range, Change::Zeros { may_unmap: true }).await?;
            }
            Op::SecureErase { .. } => return Err(IoError::new(IoErrorKind::Unsupported)),
            Op::WriteZeroes { .. } | Op::Discard { .. } | Op::Read { .. } | Op::Flush => {}
        }
        both.longest_us.fetch_max(micros(way.added), Ordering::Relaxed);
        self.flush_if(flags.is_fua()).await
    }

    /// Whether a discard does anything. A hint that the file cannot follow is not an error.
    fn can_discard(&self) -> IoResult<bool> {
        let top = self.chain.top()?;
        Ok(top.mapping.has_tables() || top.file_info().can_discard)
    }

    /// Makes what the other chain was given durable, if there is another chain and it has not failed.
    pub(crate) async fn flush_other_side(&self) -> IoResult {
        let (Some(OtherChain { sides: both, .. }), Some(OtherSide { shared, ctx })) = (&self.chain.both, &self.other)
        else {
            return Ok(());
        };
        if both.failure().is_some() {
            return Ok(());
        }
        let other = Rc::clone(shared);
        let flush = async move {
            let meta = other.metas.first().ok_or(IoError::EIO)?;
            other.chain.top()?.mapping.flush(meta).await
        };
        both.answer(both.of_other(&**ctx, flush).await)
    }
}
