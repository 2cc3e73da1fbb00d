//! Requests that have to wait: a table must be read, or a cluster allocated, copied or decompressed.
//!
//! Writes to new space have two steps. The format *prepares*: space is reserved, invisible. The data and the rest of
//! the first and last cluster are written. The format *commits*: the mapping is published. A task that is dropped in
//! between gives the space back.

use crate::chain::mapping::{Allocation, Fill, Mapping, Overwrite, Prepared, Staged};
use crate::chain::place::Place;
use crate::chain::queue::Shared;
use block::latency::{counts_as, lap};
use block::{Extent, FileOp, IoError, IoResult, OpFlags, Part, Priority, turn, yield_now};
use memory::{BufferGrant, BufferUse, IoBuf, Window, to_usize};
use std::pin::pin;
use std::rc::Rc;

/// The slow rest of a request.
pub(crate) enum Slow {
    Read {
        offset: u64,
        data: Window,
        priority: Priority,
    },
    Write {
        offset: u64,
        data: Window,
        flags: OpFlags,
        priority: Priority,
    },
    /// Publish bytes that already lie in space of the top layer.
    TakeOver {
        offset: u64,
        staged: Box<Staged>,
        flags: OpFlags,
    },
    /// Reserve space for maps and writes that come.
    ReserveAhead,
    Flush,
    Discard {
        offset: u64,
        length: u64,
    },
    WriteZeroes {
        offset: u64,
        length: u64,
        may_unmap: bool,
        flags: OpFlags,
    },
}

impl Slow {
    pub(crate) async fn run(self, shared: &Shared) -> IoResult {
        match self {
            Self::Read { offset, data, priority } => shared.read(offset, data, priority).await,
            Self::Write { offset, data, flags, priority } => {
                shared.flush_before_if(flags.is_preflush()).await?;
                match shared.write(offset, data, priority).await? {
                    Written::InPlace if flags.is_fua() && !shared.chain.is_handing_over() => shared.flush_data().await,
                    _ => shared.flush_if(flags.is_fua()).await,
                }
            }
            Self::TakeOver { offset, mut staged, flags } => {
                let meta = shared.metas.first().ok_or(IoError::EIO)?;
                shared.chain.top()?.mapping.link(meta, offset, &mut staged).await?;
                shared.flush_if(flags.is_fua()).await
            }
            Self::ReserveAhead => {
                let meta = shared.metas.first().ok_or(IoError::EIO)?;
                shared.chain.top()?.mapping.reserve_ahead(meta).await;
                Ok(())
            }
            Self::Flush => shared.flush_if(true).await,
            Self::Discard { offset, length } => shared.discard(offset, length).await,
            Self::WriteZeroes { offset, length, may_unmap, flags } => {
                shared.flush_before_if(flags.is_preflush()).await?;
                shared.write_zeroes(offset, length, may_unmap).await?;
                shared.flush_if(flags.is_fua()).await
            }
        }
    }
}

/// What has to be flushed to make a write durable.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    /// Its data only: all tables that lead there are durable.
    InPlace,
    /// Its data, and perhaps tables.
    Anywhere,
}

/// The chunk of zeros that writes gather from. Long paddings list it several times.
const ZERO_CHUNK_BYTES: usize = 64 << 10;

/// The largest allocation whose old contents are read in one piece.
const READ_THROUGH_BYTES: u64 = 128 << 10;

/// The largest write to new space that is copied into a buffer with its surroundings.
const LAID_OVER_BYTES: usize = 16 << 10;

/// The most bytes of a read that are looked up at once.
const RESOLVE_BYTES: u64 = 16 << 20;

/// The most zeros that go to the file at once.
const ZERO_WRITE_BYTES: u64 = 1 << 20;

impl Shared {
    /// Reads a range of the disk into `data`. The range is as long as `data`.
    pub(crate) async fn read(&self, offset: u64, data: Window, priority: Priority) -> IoResult {
        let (mut done, mut since_yield) = (0usize, 0usize);
        while done < data.length_bytes() {
            if since_yield >= turn::STEP_BYTES {
                // All data may be in memory, so that no extent has to be waited for.
                since_yield = 0;
                yield_now().await;
            }
            let left = data.length_bytes().saturating_sub(done);
            let at = offset.saturating_add(done as u64);
            let place = self.chain.resolve(&self.metas, at, (left as u64).min(RESOLVE_BYTES)).await?;
            let length = usize::try_from(place.length_bytes).unwrap_or(left).min(left);
            if length == 0 {
                return Err(IoError::EIO);
            }
            self.read_extent(place, data.slice(done, length), priority).await?;
            done = done.saturating_add(length);
            since_yield = since_yield.saturating_add(length);
        }
        Ok(())
    }

    pub(crate) async fn read_extent(&self, place: Place, data: Window, priority: Priority) -> IoResult {
        match place.extent {
            Extent::Zero | Extent::Backing => {
                fill_in_steps(&data).await;
                Ok(())
            }
            Extent::Data { offset, .. } => {
                let past_end = self.chain.layer(place.layer)?.mapping.past_end(offset);
                let file = self.files.get(place.layer).ok_or(IoError::EIO)?;
                lap(Part::Metadata);
                let result = file.start_at(FileOp::Read { offset, data, past_end }, priority).await;
                lap(Part::Engine);
                result
            }
            Extent::Compressed(extent) => {
                let mapping = &self.chain.layer(place.layer)?.mapping;
                let meta = self.metas.get(place.layer).ok_or(IoError::EIO)?;
                let needed = usize::try_from(mapping.decompress_bytes(&extent)).map_err(|_| IoError::EIO)?;
                let grant = self.chain.buffers().grant(BufferUse::Decompress, needed);
                let _grant = counts_as(Part::Queue, pin!(grant)).await;
                let cluster = counts_as(Part::Engine, pin!(mapping.read_compressed(meta, extent))).await?;
                let wanted = cluster.get(extent.skip_bytes as usize..).ok_or(IoError::EIO)?;
                copy_in_steps(&data, wanted.get(..data.length_bytes()).ok_or(IoError::EIO)?).await;
                Ok(())
            }
        }
    }

    /// Writes `data` to the disk, allocating as needed; durable only after a flush.
    pub(crate) async fn write(&self, offset: u64, data: Window, priority: Priority) -> IoResult<Written> {
        let mapping = &self.chain.top()?.mapping;
        let meta = self.metas.first().ok_or(IoError::EIO)?;
        self.chain.note_in_bitmaps(offset, data.length_bytes() as u64);
        mapping.pad(meta, offset.saturating_add(data.length_bytes() as u64)).await?;
        let (mut done, mut written) = (0usize, Written::InPlace);
        while done < data.length_bytes() {
            let rest = data.slice(done, data.length_bytes().saturating_sub(done));
            let at = offset.saturating_add(done as u64);
            let place = match mapping.lookup_overwrite(at, rest.length_bytes() as u64) {
                Overwrite::InPlace { offset, length_bytes } => Prepared::InPlace { offset, length_bytes },
                Overwrite::Slow => {
                    written = Written::Anywhere;
                    mapping.prepare_write(meta, at, rest.length_bytes() as u64).await?
                }
            };
            if !mapping.is_mapping_durable() {
                written = Written::Anywhere;
            }
            let taken = match place {
                Prepared::InPlace { offset, length_bytes } => {
                    let length = to_usize(length_bytes).min(rest.length_bytes());
                    let data = rest.slice(0, length);
                    self.start_write(offset, data, priority).await?;
                    length
                }
                Prepared::New(allocation) => self.write_new(mapping, allocation, at, &rest, priority).await?,
            };
            if taken == 0 {
                return Err(IoError::EIO);
            }
            done = done.saturating_add(taken);
        }
        Ok(written)
    }

    /// Writes to the top layer's file. If the task is dropped meanwhile, the sink holds the write's place in the
    /// image's epochs. So the space is not reused before the write has ended.
    pub(super) async fn start_write(&self, offset: u64, data: Window, priority: Priority) -> IoResult {
        let file = self.files.first().ok_or(IoError::EIO)?;
        // A task may go on long after its request was given up. A file in memory would then take zeros.
        data.check()?;
        let write = FileOp::Write { offset, data, fua: false };
        lap(Part::Metadata);
        let result = file.start_keeping_at(write, priority, Rc::clone(&self.sink) as _).await;
        lap(Part::Engine);
        result
    }

    /// Fills and publishes an allocation with the start of `data`, which belongs at `at`. Returns how many bytes of
    /// `data` it used. What is copied around the data is read without a priority.
    async fn write_new(
        &self,
        mapping: &Mapping,
        allocation: Allocation,
        at: u64,
        data: &Window,
        priority: Priority,
    ) -> IoResult<usize> {
        let head_bytes = at.checked_sub(allocation.guest_offset).ok_or(IoError::EIO)?;
        let room = allocation.length_bytes.checked_sub(head_bytes).ok_or(IoError::EIO)?;
        let length = to_usize(room).min(data.length_bytes());
        let tail_bytes = room.saturating_sub(length as u64);
        let tail_at = at.saturating_add(length as u64);

        let copies = |fill, bytes| fill == Fill::Copy && bytes > 0;
        if copies(allocation.head, head_bytes) || copies(allocation.tail, tail_bytes) {
            counts_as(Part::Queue, pin!(self.chain.below_is_quiet())).await;
        }
        let mut grant = self.grant_for_copies(&allocation, head_bytes, tail_bytes).await;
        let data = data.slice(0, length);
        let (head, tail) = ((allocation.guest_offset, head_bytes), (tail_at, tail_bytes));
        let (offset, data) = match allocation.head == Fill::Copy || allocation.tail == Fill::Copy {
            true => {
                let with_copies = pin!(self.with_copies(&allocation, [head, tail], data, &mut grant));
                counts_as(Part::CopyOnWrite, with_copies).await?
            }
            false => between_zeros(&allocation, head_bytes, data, tail_bytes),
        };
        // The buffers keep their part of the grant.
        drop(grant);
        self.start_write(offset, data, priority).await?;
        let meta = self.metas.first().ok_or(IoError::EIO)?;
        mapping.commit_write(meta, allocation).await?;
        Ok(length)
    }

    /// Returns the bytes to write for `data` in new space, and their offset in the file.
    async fn with_copies(
        &self,
        allocation: &Allocation,
        [head, tail]: [(u64, u64); 2],
        data: Window,
        grant: &mut BufferGrant,
    ) -> IoResult<(u64, Window)> {
        if let Some(whole) = self.laid_over(allocation, head.1, &data, grant).await {
            return Ok((allocation.file_offset, whole));
        }
        let head_bytes = head.1;
        let [head, tail] = self.surroundings(allocation, head, tail, grant).await?;
        let skip = if head.is_some() { 0 } else { head_bytes };
        Ok((allocation.file_offset.saturating_add(skip), joined(head, data, tail)))
    }

    /// Waits for memory for all copies around a write to new space. If one side took its buffer and then waited for
    /// the other's, it could wait for ever.
    async fn grant_for_copies(&self, allocation: &Allocation, head_bytes: u64, tail_bytes: u64) -> BufferGrant {
        let size = |bytes: u64| BufferGrant::size_of(to_usize(bytes));
        let copied = |fill, bytes: u64| if fill == Fill::Copy && bytes > 0 { size(bytes) } else { 0 };
        let apart = copied(allocation.head, head_bytes).saturating_add(copied(allocation.tail, tail_bytes));
        let bytes = match allocation.length_bytes {
            _ if apart == 0 => return BufferGrant::default(),
            // Both sides may come from one read.
            whole if whole <= READ_THROUGH_BYTES => apart.max(size(whole)),
            _ => apart,
        };
        counts_as(Part::Queue, pin!(self.chain.buffers().grant(BufferUse::Copy, bytes))).await
    }

    /// Handles the common case of a small write above data. Reads the whole range of the allocation from the one place
    /// where it lies, and lays the write over it. `None` if it lies in several places, or if the read fails: the
    /// failure may lie under the write, where no data are needed.
    async fn laid_over(
        &self,
        allocation: &Allocation,
        head_bytes: u64,
        data: &Window,
        grant: &mut BufferGrant,
    ) -> Option<Window> {
        let Allocation { guest_offset, length_bytes, head, tail, .. } = *allocation;
        let copies = head == Fill::Copy && tail == Fill::Copy;
        let inside = guest_offset.checked_add(length_bytes).is_some_and(|end| end <= self.chain.size_bytes);
        if !copies || !inside || length_bytes > READ_THROUGH_BYTES || data.length_bytes() > LAID_OVER_BYTES {
            return None;
        }
        let place = self.chain.resolve(&self.metas, guest_offset, length_bytes).await.ok()?;
        if place.length_bytes < length_bytes || !matches!(place.extent, Extent::Data { .. }) {
            return None;
        }
        let whole = grant.buffer(usize::try_from(length_bytes).ok()?).ok()?.whole();
        self.read_extent(place, whole.clone(), Priority::NONE).await.ok()?;
        let copied = whole.copy_from(head_bytes as usize, data);
        (copied == data.length_bytes() && data.check().is_ok()).then_some(whole)
    }

    /// Returns the parts that go before and behind a write into new clusters, each given by its offset and length. The
    /// result is parts to gather, or `None` if nothing has to be written.
    async fn surroundings(
        &self,
        allocation: &Allocation,
        head: (u64, u64),
        tail: (u64, u64),
        grant: &mut BufferGrant,
    ) -> IoResult<[Option<Vec<Window>>; 2]> {
        let Allocation { zeroed, length_bytes, .. } = *allocation;
        let head_fill = self.without_zeros(allocation.head, zeroed, head).await?;
        let tail_fill = self.without_zeros(allocation.tail, zeroed, tail).await?;
        let copies = |fill, (_, length): (u64, u64)| fill == Fill::Copy && length > 0;
        // Both sides of a small write come from one read, which also covers what lies between. If it fails, the failure
        // may lie between, where no data are needed.
        if copies(head_fill, head)
            && copies(tail_fill, tail)
            && length_bytes <= READ_THROUGH_BYTES
            && let Ok(Some(mut parts)) = self.filling(Fill::Copy, head.0, length_bytes, grant).await
        {
            let whole = parts.pop().ok_or(IoError::EIO)?;
            let (before, behind) = (head.1 as usize, tail.1 as usize);
            let tail = whole.slice(whole.length_bytes().saturating_sub(behind), behind);
            return Ok([Some(vec![whole.slice(0, before)]), Some(vec![tail])]);
        }
        let head = self.filling(head_fill, head.0, head.1, grant).await?;
        Ok([head, self.filling(tail_fill, tail.0, tail.1, grant).await?])
    }

    /// Avoids the read if what is to be copied reads as zeros, and the write too if the new space reads as zeros.
    async fn without_zeros(&self, fill: Fill, zeroed: bool, (at, length_bytes): (u64, u64)) -> IoResult<Fill> {
        if fill != Fill::Copy || length_bytes == 0 {
            return Ok(fill);
        }
        // What lies behind the end of the disk counts as zero.
        let end = at.saturating_add(length_bytes).min(self.chain.size_bytes);
        let mut at = at;
        while at < end {
            let place = self.chain.resolve(&self.metas, at, end.saturating_sub(at)).await?;
            if !matches!(place.extent, Extent::Zero | Extent::Backing) {
                return Ok(Fill::Copy);
            }
            at = at.saturating_add(place.length_bytes.max(1));
        }
        Ok(if zeroed { Fill::None } else { Fill::Zero })
    }

    /// Returns one part of the surroundings.
    async fn filling(
        &self,
        fill: Fill,
        at: u64,
        length_bytes: u64,
        grant: &mut BufferGrant,
    ) -> IoResult<Option<Vec<Window>>> {
        let length = usize::try_from(length_bytes).map_err(|_| IoError::EIO)?;
        match fill {
            _ if length == 0 => Ok(None),
            Fill::None => Ok(None),
            Fill::Zero => Ok(Some(zeros(length))),
            Fill::Copy => {
                let buf = grant.buffer(length)?.whole();
                let inside = self.chain.size_bytes.saturating_sub(at).min(length_bytes);
                let inside = usize::try_from(inside).map_err(|_| IoError::EIO)?;
                // What lies behind the end of the disk is zero.
                buf.slice(inside, length.saturating_sub(inside)).fill(0);
                self.read(at, buf.slice(0, inside), Priority::NONE).await?;
                Ok(Some(vec![buf]))
            }
        }
    }

    /// Makes the guest's data durable, but not tables that are still in memory.
    async fn flush_data(&self) -> IoResult {
        let file = self.files.first().ok_or(IoError::EIO)?;
        counts_as(Part::Flush, pin!(file.start(FileOp::Flush))).await
    }

    pub(super) async fn flush_if(&self, wanted: bool) -> IoResult {
        if !wanted {
            return Ok(());
        }
        let count = if self.chain.is_handing_over() { 2 } else { 1 };
        for (layer, meta) in self.chain.layers.iter().zip(&self.metas).take(count).rev() {
            counts_as(Part::Flush, pin!(layer.mapping.flush(meta))).await?;
        }
        if self.chain.both.is_some() {
            self.flush_other_side().await?;
        }
        Ok(())
    }

    /// As `flush_if`, for a guest that wants what it has written before to be durable.
    pub(super) async fn flush_before_if(&self, wanted: bool) -> IoResult {
        if wanted {
            self.chain.look_at_flush()?;
        }
        self.flush_if(wanted).await
    }

    async fn discard(&self, offset: u64, length: u64) -> IoResult {
        let meta = self.metas.first().ok_or(IoError::EIO)?;
        self.chain.note_in_bitmaps(offset, length);
        self.chain.top()?.mapping.discard(meta, offset, length).await
    }

    pub(crate) async fn write_zeroes(&self, offset: u64, length: u64, may_unmap: bool) -> IoResult {
        let meta = self.metas.first().ok_or(IoError::EIO)?;
        self.chain.note_in_bitmaps(offset, length);
        for range in self.chain.top()?.mapping.write_zeroes(meta, offset, length, may_unmap).await? {
            self.zero_by_writing(range.start, range.end).await?;
        }
        Ok(())
    }

    async fn zero_by_writing(&self, start: u64, end: u64) -> IoResult {
        let mut at = start;
        while at < end {
            let length = end.saturating_sub(at).min(ZERO_WRITE_BYTES);
            let bytes = usize::try_from(length).map_err(|_| IoError::EIO)?;
            self.write(at, IoBuf::gather(zeros(bytes)).whole(), Priority::NONE).await?;
            at = at.saturating_add(length);
        }
        Ok(())
    }
}

/// Returns the bytes to write for `data` in new space without copies, and their offset in the file.
fn between_zeros(allocation: &Allocation, head_bytes: u64, data: Window, tail_bytes: u64) -> (u64, Window) {
    let side = |fill, bytes: u64| {
        let bytes = to_usize(bytes);
        (fill == Fill::Zero && bytes > 0).then(|| zeros(bytes))
    };
    let (head, tail) = (side(allocation.head, head_bytes), side(allocation.tail, tail_bytes));
    let skip = if head.is_some() { 0 } else { head_bytes };
    (allocation.file_offset.saturating_add(skip), joined(head, data, tail))
}

/// Joins a write and its surroundings into one window.
fn joined(head: Option<Vec<Window>>, data: Window, tail: Option<Vec<Window>>) -> Window {
    match (head, tail) {
        (None, None) => data,
        (head, tail) => {
            let parts = head.into_iter().flatten().chain([data]).chain(tail.into_iter().flatten());
            IoBuf::gather(parts.collect()).whole()
        }
    }
}

/// Zeroes `data` in steps, so that other work of the reactor comes between.
async fn fill_in_steps(data: &Window) {
    for (done, length) in steps(data.length_bytes()) {
        data.slice(done, length).fill(0);
        turn::moved(length).await;
    }
}

/// Copies `bytes` to `data` in the same way.
async fn copy_in_steps(data: &Window, bytes: &[u8]) {
    for (done, length) in steps(data.length_bytes()) {
        let part = bytes.get(done..done.saturating_add(length)).unwrap_or_default();
        data.copy_from_slice(done, part);
        turn::moved(length).await;
    }
}

/// Returns the steps in which so many bytes are moved: the start and length of each.
fn steps(length_bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let begins = (0..length_bytes).step_by(turn::STEP_BYTES);
    begins.map(move |done| (done, length_bytes.saturating_sub(done).min(turn::STEP_BYTES)))
}

thread_local! {
    static ZEROS: IoBuf = IoBuf::zeroed(ZERO_CHUNK_BYTES);
}

/// Returns `length` zero bytes, as windows over one chunk that all requests of the thread share.
fn zeros(length: usize) -> Vec<Window> {
    let chunk = ZEROS.try_with(IoBuf::clone).unwrap_or_else(|_| IoBuf::zeroed(ZERO_CHUNK_BYTES)).whole();
    let mut parts = Vec::with_capacity(length.div_ceil(ZERO_CHUNK_BYTES));
    let mut left = length;
    while left > 0 {
        let take = left.min(chunk.length_bytes());
        parts.push(chunk.slice(0, take));
        left = left.saturating_sub(take);
    }
    parts
}
