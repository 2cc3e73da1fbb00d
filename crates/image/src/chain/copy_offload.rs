//! Copies by the host, from a layer's file to the file of another image's top layer. For jobs that fill an image; not
//! on the path of requests.

use crate::chain::compressed_writer::Begun;
use crate::chain::exchange::board::Pin;
use crate::chain::image::Image;
use crate::chain::layers::Chain;
use crate::chain::mapping::{Fill, Mapping, Prepared};
use block::{CopyRange, Error, ErrorKind, Extent, File, FileQueue, IoResult, MetaIo, Participant, ReactorCtx, Result};
use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Has the host copy from one image to another, on one reactor. What was copied is durable after a flush of the target.
pub struct CopyOffload {
    source: Arc<Chain>,
    source_metas: Vec<MetaIo>,
    target: Arc<Chain>,
    file: Rc<dyn FileQueue>,
    meta: MetaIo,
    /// Set if the target has epochs.
    participant: Option<Rc<RefCell<Participant>>>,
    _pin: Pin,
}

/// Bytes of a file that will be copied into the target.
struct Found<'a> {
    file: &'a Arc<dyn File>,
    offset: u64,
    length_bytes: u64,
}

impl Found<'_> {
    /// Whether the file reaches to the end of the range. The kernel copies nothing behind the file's end.
    fn is_whole(&self) -> bool {
        let end = self.offset.saturating_add(self.length_bytes);
        self.file.length_bytes().is_ok_and(|length_bytes| end <= length_bytes)
    }
}

impl Image {
    /// Prepares copies from `source` to this image. Call it on the reactor's thread.
    pub fn copy_offload(&self, source: &Self, ctx: &Rc<dyn ReactorCtx>) -> Result<CopyOffload> {
        let source = source.chain();
        let metas = source.layers.iter().map(|layer| layer.open_queues(ctx).map(|(_, meta)| meta));
        let source_metas = metas.collect::<Result<_>>()?;
        let (target, pin) = self.board.pin()?;
        let top = target.top().map_err(|error| Error::with_source(ErrorKind::Io, "an image without layers", error))?;
        let (file, meta) = top.open_queues(ctx)?;
        let participant = top.mapping.epochs().map(|epochs| Rc::new(RefCell::new(epochs.join())));
        Ok(CopyOffload { source, source_metas, target, file, meta, participant, _pin: pin })
    }
}

impl CopyOffload {
    /// Copies a range of the source to `to`. This works only if the range lies uncompressed in files and the target
    /// needs no copies around it. Otherwise returns false, and part of the range may have been copied. An error comes
    /// from the host, which will not copy the next range either. Nobody else may write there meanwhile.
    pub async fn copy(&self, from: u64, to: u64, length_bytes: u64) -> IoResult<bool> {
        self.source.check_range(from, length_bytes)?;
        self.target.check_range(to, length_bytes)?;
        if self.target.guessed_raw {
            // Writes to a guessed raw image have to be looked at.
            return Ok(false);
        }
        let mut done = 0;
        while done < length_bytes {
            let (at, left) = (from.saturating_add(done), length_bytes.saturating_sub(done));
            let place = self.source.resolve(&self.source_metas, at, left).await?;
            let Extent::Data { offset, .. } = place.extent else { return Ok(false) };
            let file = self.source.layer(place.layer)?.data_file();
            let found = Found { file, offset, length_bytes: place.length_bytes.min(left) };
            if !found.is_whole() {
                return Ok(false);
            }
            match self.copy_extent(found, to.saturating_add(done)).await? {
                0 => return Ok(false),
                copied => done = done.saturating_add(copied),
            }
        }
        Ok(true)
    }

    /// Copies the start of what was found. Returns the number of bytes copied.
    async fn copy_extent(&self, found: Found<'_>, to: u64) -> IoResult<u64> {
        let mapping = &self.target.top()?.mapping;
        if mapping.needs_padding(to.saturating_add(found.length_bytes)) {
            return Ok(0);
        }
        // If this task is dropped, the space stays taken until the copy has ended.
        let begun: Rc<dyn Any> = match (&self.participant, mapping.epochs()) {
            (Some(participant), Some(epochs)) => Rc::new(Begun::now(participant, epochs)),
            _ => Rc::new(()),
        };
        self.copy_to_space(mapping, found, to, begun).await
    }

    async fn copy_to_space(&self, mapping: &Mapping, found: Found<'_>, to: u64, begun: Rc<dyn Any>) -> IoResult<u64> {
        match mapping.prepare_write(&self.meta, to, found.length_bytes).await? {
            Prepared::InPlace { offset, length_bytes } => {
                self.start(&found, offset, length_bytes.min(found.length_bytes), begun).await
            }
            Prepared::New(allocation) => {
                let head = to.saturating_sub(allocation.guest_offset);
                let room = allocation.length_bytes.saturating_sub(head);
                let fits = (head == 0 || allocation.head == Fill::None)
                    && (room <= found.length_bytes || allocation.tail == Fill::None);
                if !fits {
                    return Ok(0);
                }
                let offset = allocation.file_offset.saturating_add(head);
                let copied = self.start(&found, offset, room.min(found.length_bytes), begun).await?;
                mapping.commit_write(&self.meta, allocation).await?;
                Ok(copied)
            }
        }
    }

    async fn start(&self, found: &Found<'_>, offset: u64, length_bytes: u64, keep: Rc<dyn Any>) -> IoResult<u64> {
        let copy = CopyRange { source: Arc::clone(found.file), source_offset: found.offset, offset, length_bytes };
        self.file.start_copy(copy, keep).await?;
        Ok(length_bytes)
    }
}
