//! A copy of a disk that guests write to, from its beginning to the moment when the copy takes the disk's place.
//!
//! 1. **Rounds.** All is copied while guests go on. A log notes what they write meanwhile
//!    ([`crate::chain::exchange::change_log`]), which is copied in the next round. There are few rounds: until little
//!    is left, or until one leaves more than half of what it began with.
//! 2. **Both sides.** Each write goes to both chains ([`crate::chain::both_sides`]), so what is left only gets less. It
//!    is copied, and the other chain is flushed. From then on the two hold the same, and what guests know to be durable
//!    is durable in both.
//! 3. **The switch.** The record is changed while guests go on: whichever chain a restarted daemon finds there has
//!    everything. Then the queues pass a barrier to the other chain. Nothing is drained, copied or flushed while they
//!    hold. Requests in flight end on both sides. As long as nobody knows which record a restarted daemon would find,
//!    guests write to both sides.
//!
//! So the last part ends however fast guests write. With a time to keep ([`CopyWatch::set_aim`]), the rounds end as
//! soon as the time asks for it; and where the storage is too slow for guests and copy, each write waits a little
//! before it begins.

use super::copying::{Copying, What};
use super::ranges::{joined, total};
use super::watch::CopyWatch;
use crate::chain::both_sides::BothSides;
use crate::chain::exchange::board::Hold;
use crate::chain::exchange::{Barrier, go_over, go_over_to};
use crate::chain::extents::Extents;
use crate::chain::image::Image;
use crate::chain::layers::{Chain, OtherChain};
use block::{Error, ErrorKind, Result, StatusQuery};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most rounds of copying while guests write to one side only.
const ROUNDS_MAX: usize = 5;
/// The rounds end when this many bytes are left.
const LAST_ROUND_BYTES: u64 = 4 << 20;
/// How often, at most, ranges are copied again in which a write failed on one side.
const REPAIRS_MAX: usize = 5;
/// How long after a try to change the record the next one comes.
const RECORD_AGAIN: Duration = Duration::from_secs(1);
/// How often it is looked between them whether the disk ends.
const LOOK_FOR_END: Duration = Duration::from_millis(10);
/// If the data lie in more parts than this, the first round covers the whole disk.
const DATA_RUNS_MAX: usize = 1 << 20;

/// What becomes of the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It takes the disk's place.
    Switch,
    /// It is closed; the disk stays as it is.
    Keep,
}

/// Copies what guests see to another chain, which then takes its place, or is closed. Before it takes its place,
/// `record` is called, and again while its error is of the kind [`ErrorKind::Unsure`]. On an error, the queues go back to
/// the disk's own layers before the copy releases what it holds.
pub(super) async fn converge(
    image: &Image,
    chain: &Chain,
    next: &Arc<Chain>,
    what: What,
    end: End,
    watch: &CopyWatch,
    record: impl FnMut() -> Result<()>,
) -> Result<()> {
    let mut copying = Copying::new(&chain.layers, next, watch)?;
    let result = converge_by(&mut copying, image, chain, next, what, end, watch, record).await;
    if result.is_ok() {
        return result;
    }
    let went = go_over(&image.board, Chain::new(chain.layers.clone(), &chain.disk)).await;
    copying.late_calls_end().await;
    if let Err(error) = went {
        // Guests may still send writes to the other chain.
        image.board.keep(Box::new(copying.into_hold()));
        return Err(error);
    }
    result
}

#[allow(clippy::too_many_arguments, reason = "what `converge` was given")]
async fn converge_by(
    copying: &mut Copying<'_>,
    image: &Image,
    chain: &Chain,
    next: &Arc<Chain>,
    what: What,
    end: End,
    watch: &CopyWatch,
    record: impl FnMut() -> Result<()>,
) -> Result<()> {
    let left = in_rounds(image, chain, copying, what, watch).await?;
    let (both, left) = to_both_sides(image, chain, next, copying, left).await?;
    let result = on_both_sides(&both, copying, left, what, watch).await;
    note_waits(&both, watch);
    result?;
    match end {
        End::Switch => switch(image, &both, next, watch, record).await?,
        End::Keep => part(image, chain, &both, next, copying, watch).await?,
    }
    note_waits(&both, watch);
    Ok(())
}

/// Copies in rounds. Returns what is left when they are over; later writes are in the log of the disk's chain.
async fn in_rounds(
    image: &Image,
    chain: &Chain,
    copying: &mut Copying<'_>,
    what: What,
    watch: &CopyWatch,
) -> Result<Vec<Range<u64>>> {
    let noting = || Chain::noting(chain.layers.clone(), &chain.disk);
    // Writes that began before are not noted, so they have to end first.
    go_over(&image.board, noting()).await?;
    let mut ranges = first_ranges(image, chain, what)?;
    let mut what = what;
    for _ in 0..ROUNDS_MAX {
        let begun_with = total(&ranges);
        watch.round(begun_with);
        let rest = copying.copy(&ranges, what, None, |left| !watch.has_to_hurry(left)).await?;
        if !rest.is_empty() {
            watch.again(total(&rest));
            return Ok(rest);
        }
        let noted = image.chain();
        go_over(&image.board, noting()).await?;
        ranges = noted.log.as_ref().map(|log| log.ranges(chain.size_bytes)).unwrap_or_default();
        // A range that was copied may have to become zeros.
        what = later(what);
        let left = total(&ranges);
        if left <= LAST_ROUND_BYTES || left > begun_with / 2 {
            break;
        }
    }
    Ok(ranges)
}

fn later(what: What) -> What {
    match what {
        What::Top => What::Top,
        What::All { .. } => What::All { skip_zeros: false },
    }
}

/// Returns the ranges for the first round.
fn first_ranges(image: &Image, chain: &Chain, what: What) -> Result<Vec<Range<u64>>> {
    let all: Vec<_> = std::iter::once(0..chain.size_bytes).collect();
    if what != (What::All { skip_zeros: true }) {
        return Ok(all);
    }
    let mut ranges = Vec::new();
    for run in Extents::of(&image.board, &StatusQuery::all())? {
        let run = run?;
        if run.data {
            ranges.push(run.start..run.end());
        }
        if ranges.len() > DATA_RUNS_MAX {
            return Ok(all);
        }
    }
    Ok(joined([ranges]))
}

/// Makes all writes go to both chains. From here on, no more has to be copied.
async fn to_both_sides(
    image: &Image,
    chain: &Chain,
    next: &Arc<Chain>,
    copying: &Copying<'_>,
    left: Vec<Range<u64>>,
) -> Result<(Arc<Chain>, Vec<Range<u64>>)> {
    let noted = image.chain();
    let (give_up, late) = (copying.given_up_by(), copying.late());
    let both = Chain::on_both_sides(chain.layers.clone(), &chain.disk, next, give_up, late);
    go_over_to(&image.board, both, next.layers.clone()).await?;
    let noted = noted.log.as_ref().map(|log| log.ranges(chain.size_bytes)).unwrap_or_default();
    Ok((image.chain(), joined([left, noted])))
}

fn sides(chain: &Chain) -> Result<&BothSides> {
    other_chain(chain).map(|other| &other.sides)
}

fn other_chain(chain: &Chain) -> Result<&OtherChain> {
    chain
        .both
        .as_ref()
        .ok_or_else(|| Error::new(ErrorKind::Io, "the chain of this disk was exchanged by somebody else"))
}

async fn on_both_sides(
    chain: &Chain,
    copying: &mut Copying<'_>,
    mut left: Vec<Range<u64>>,
    what: What,
    watch: &CopyWatch,
) -> Result<()> {
    let OtherChain { next, sides: both } = other_chain(chain)?;
    for _ in 0..REPAIRS_MAX {
        watch.round(total(&left));
        let begun = watch.done_bytes();
        let since = Instant::now();
        let slow_down = |left| {
            let delay = watch.delay_for(left, watch.done_bytes().saturating_sub(begun), since, both.delay());
            both.set_delay(delay);
            note_waits(chain, watch);
            true
        };
        copying.copy(&left, later(what), Some(both), slow_down).await?;
        left = both.take_differences();
        if left.is_empty() {
            break;
        }
    }
    both.set_delay(std::time::Duration::ZERO);
    let next_top = next.layers.first().ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
    if !left.is_empty() {
        let what = "writes of guests fail again and again, so a copy is never the same";
        return Err(Error::new(ErrorKind::Io, format!("'{}': {what}", next_top.name)));
    }
    next_top.flush_by(&copying.next_meta()?).await?;
    watch.check()
}

fn note_waits(chain: &Chain, watch: &CopyWatch) {
    if let Some(both) = &chain.both {
        let (waited, longest) = both.sides.waits();
        watch.note_waits(waited, longest);
    }
}

/// Fails if a guest's write has failed since, because the two sides may then differ again.
fn are_even(both: &BothSides) -> Result<()> {
    match both.take_differences().is_empty() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Io, "a guest's write failed on the old side only; try again")),
    }
}

async fn switch(
    image: &Image,
    chain: &Chain,
    next: &Arc<Chain>,
    watch: &CopyWatch,
    record: impl FnMut() -> Result<()>,
) -> Result<()> {
    let both = sides(chain)?;
    let failed = |error| match next.layers.first() {
        Some(top) => top.failed("cannot write to it", error),
        None => Error::with_source(ErrorKind::Io, "cannot write to it", error),
    };
    both.decide().map_err(failed)?;
    watch.set_decided(true);
    if let Err(error) = are_even(both).and_then(|()| until_known(image, watch, record)) {
        if error.kind() == ErrorKind::Unsure
            && let Some(top) = next.layers.first()
            && let Err(error) = top.close().await
        {
            tracing::error!("'{}' may be on record, and is not closed in order: {error}", top.name);
        }
        watch.set_decided(false);
        both.follow();
        return Err(error);
    }
    // From here on there is no way back: the record names the other chain.
    let over = image.board.over();
    let begun = Instant::now();
    let barrier = loop {
        // The queues have all files open, so they can only be late.
        match Barrier::prepare(vec![(Arc::clone(&image.board), Vec::new())], Hold::Requests).await {
            Ok(barrier) => break barrier,
            Err(error) => tracing::warn!("a queue is not ready for the chain that its disk goes over to: {error}"),
        }
    };
    if let Some(top) = next.layers.first() {
        // The guest may have switched to write-through since its last write.
        top.mapping.flush_with_next_write();
    }
    barrier.release(vec![Arc::clone(next)]).await;
    watch.note_hold(begun.elapsed());
    over.wait().await;
    Ok(())
}

/// Calls `record` until it is known which record the next daemon finds. Until then guests write to both sides, so that one
/// has everything with either. When no guest uses the disk any more, both sides can be left as they are.
fn until_known(image: &Image, watch: &CopyWatch, mut record: impl FnMut() -> Result<()>) -> Result<()> {
    let mut is_first = true;
    loop {
        let is_last = image.board.is_ending();
        let error = match record() {
            Err(error) if error.kind() == ErrorKind::Unsure && !is_last => error,
            result => {
                watch.waits_for(None);
                return result;
            }
        };
        let what = format!(
            "nobody knows which record of the disk is on storage ({error}): guests write to both images until one can be \
             written"
        );
        if std::mem::take(&mut is_first) {
            tracing::error!("{what}");
        }
        watch.waits_for(Some(what));
        let since = Instant::now();
        while since.elapsed() < RECORD_AGAIN && !image.board.is_ending() {
            std::thread::sleep(LOOK_FOR_END);
        }
    }
}

/// Lets the disk go on alone. The other chain keeps the contents of that moment.
async fn part(
    image: &Image,
    chain: &Chain,
    both_chain: &Chain,
    next: &Arc<Chain>,
    copying: &Copying<'_>,
    watch: &CopyWatch,
) -> Result<()> {
    let both = sides(both_chain)?;
    let over = image.board.over();
    let begun = Instant::now();
    let barrier = Barrier::prepare(vec![(Arc::clone(&image.board), Vec::new())], Hold::Requests).await?;
    barrier.release(vec![Arc::new(Chain::new(chain.layers.clone(), &chain.disk))]).await;
    watch.note_hold(begun.elapsed());
    over.wait().await;
    let Some(top) = next.layers.first() else { return Ok(()) };
    if let Some(error) = both.failure() {
        return Err(top.failed("cannot write to it", error));
    }
    are_even(both)?;
    top.close_by(&copying.next_meta()?).await
}
