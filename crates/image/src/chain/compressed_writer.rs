//! Writes compressed clusters for jobs that fill an image; not on the path of requests.

use crate::chain::exchange::board::Pin;
use crate::chain::image::Image;
use crate::chain::layers::Chain;
use crate::chain::mapping::Mapping;
use block::{
    Epochs, Error, ErrorKind, FileOp, FileQueue, IoError, IoResult, MetaIo, Participant, ReactorCtx, Result, Ticket,
};
use format_qcow2::{Compressor, PackedCluster};
use memory::Window;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Writes compressed clusters to the top layer, on one reactor. Readers see a cluster once it is written; it is durable
/// after a flush of the disk.
pub struct CompressedWriter {
    chain: Arc<Chain>,
    file: Rc<dyn FileQueue>,
    meta: MetaIo,
    participant: Rc<RefCell<Participant>>,
    _pin: Pin,
}

impl Image {
    /// Opens a writer of compressed clusters; call it on the reactor's thread. Unsupported if the format has no
    /// compressed clusters.
    pub fn compressed_writer(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<CompressedWriter> {
        let (chain, pin) = self.board.pin()?;
        let top = chain.layers.first().ok_or_else(unsupported)?;
        let epochs = top.mapping.epochs().filter(|_| top.mapping.can_compress()).ok_or_else(unsupported)?;
        let (file, meta) = top.open_queues(ctx)?;
        let participant = Rc::new(RefCell::new(epochs.join()));
        Ok(CompressedWriter { chain, file, meta, participant, _pin: pin })
    }
}

fn unsupported() -> Error {
    Error::new(ErrorKind::Unsupported, "Compression not supported for this file format")
}

/// An operation's place in the image's epochs.
pub(crate) struct Begun {
    participant: Rc<RefCell<Participant>>,
    ticket: Ticket,
}

impl Begun {
    /// Joins the epochs until dropped.
    pub(crate) fn now(participant: &Rc<RefCell<Participant>>, epochs: &Epochs) -> Self {
        let ticket = participant.borrow_mut().begin(epochs);
        Self { participant: Rc::clone(participant), ticket }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.participant.borrow_mut().end(self.ticket);
    }
}

impl CompressedWriter {
    fn mapping(&self) -> Option<&Mapping> {
        self.chain.layers.first().map(|top| &top.mapping)
    }

    /// Returns a compressor of the image's type. Each task needs its own.
    pub fn compressor(&self) -> Result<Compressor> {
        self.mapping().and_then(Mapping::compressor).ok_or_else(unsupported)?
    }

    /// Writes clusters whose compressed bytes lie one after the other in `data`. Nobody else may write these clusters
    /// of the disk meanwhile.
    pub async fn write(&self, clusters: &[PackedCluster], data: &Window) -> IoResult {
        let mapping = self.mapping().ok_or(IoError::EIO)?;
        let begun = Rc::new(Begun::now(&self.participant, mapping.epochs().ok_or(IoError::EIO)?));
        let allocation = mapping.prepare_compressed(&self.meta, clusters).await?;
        let mut started = Vec::new();
        let (mut skip, mut length) = (0usize, 0usize);
        let mut places = clusters.iter().zip(&allocation.file_offsets).peekable();
        while let Some((cluster, offset)) = places.next() {
            let end = offset.saturating_add(u64::from(cluster.length_bytes));
            length = length.saturating_add(cluster.length_bytes as usize);
            if places.peek().is_some_and(|(_, next)| **next == end) {
                continue;
            }
            let offset = end.saturating_sub(length as u64);
            let part = data.slice(skip, length);
            let write = FileOp::Write { offset, data: part, fua: false };
            // If this task is dropped, the space stays taken until the write has ended.
            started.push(self.file.start_keeping(write, Rc::clone(&begun) as _));
            (skip, length) = (skip.saturating_add(length), 0);
        }
        let mut result = Ok(());
        for write in started {
            result = result.and(write.await);
        }
        result?;
        mapping.commit_compressed(&self.meta, allocation).await
    }
}
