//! Opens the files of a running disk anew: after one was replaced or changed from outside, or to open them in another
//! way.

use crate::chain::exchange::{Barrier, hold_quiet};
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::{Disk, Error, ErrorKind, File, Locks, Result, block_on};
use std::sync::{Arc, PoisonError};

impl Image {
    /// Goes over to files that `open` opens, while guests use the disk. Requests in flight end on the old files, and
    /// later ones are held. Tables in memory are written to the old files and dropped. If that fails, or the new files
    /// cannot be used, the disk goes on with the old ones. With `force`, data that cannot be written are given up.
    ///
    /// `open` opens files that are still the same without locks: the old descriptors keep those. A guest learns of a
    /// new size, which must not be smaller. Blocks; not to be called on a reactor's thread.
    pub fn reopen(&self, force: bool, open: impl FnOnce() -> Result<Self>) -> Result<()> {
        block_on(self.reopen_async(force, open))
    }

    /// Like [`Image::reopen`], as a future. Its calls still block the thread.
    #[doc(hidden)]
    pub async fn reopen_async(&self, force: bool, open: impl FnOnce() -> Result<Self>) -> Result<()> {
        let _turn = self.board.try_turn()?;
        let chain = self.chain();
        let refuse = |what: &str| Err(Error::new(ErrorKind::Unsupported, what));
        if chain.layers.iter().any(|layer| layer.name.is_temporary()) {
            return refuse("a disk with snapshot=on cannot be opened anew: what was written to it would be lost");
        }
        if chain.is_handing_over() && !force {
            return refuse("the former top layer could not be made durable");
        }
        let barrier = hold_quiet(&self.board).await?;
        if let Err(error) = close(&chain).await {
            if !force {
                barrier.give_up().await;
                return Err(error);
            }
            tracing::warn!("{error}; it is given up, because the disk is opened anew by force");
        }
        // A new mapping uses freed space again. Whoever looks at the disk without a request fails, or asks the next
        // chain.
        if let Some(epochs) =
            chain.layers.first().filter(|_| !chain.disk.read_only).and_then(|top| top.mapping.epochs())
        {
            epochs.close();
        }
        // The new chain has the same indexes.
        chain.layers.iter().for_each(|layer| layer.mapping.count_index_memory(false));
        match self.replacement(&chain, &barrier, open).await {
            Ok(next) => {
                barrier.release(vec![Arc::new(next)]).await;
                self.keep_locks(&chain);
                self.listeners.notify(|| self.info());
                Ok(())
            }
            Err(error) => {
                // The top gets a new mapping, which counts by itself.
                let stays = if chain.disk.read_only { 0 } else { 1 };
                chain.layers.iter().skip(stays).for_each(|layer| layer.mapping.count_index_memory(true));
                go_on(&chain, barrier).await;
                Err(error)
            }
        }
    }

    /// Returns the chain of the new files. The queues are ready for it.
    async fn replacement(
        &self,
        chain: &Arc<Chain>,
        barrier: &Barrier,
        open: impl FnOnce() -> Result<Self>,
    ) -> Result<Chain> {
        let opened = open()?.chain();
        let [new, old] = [&opened, chain].map(|chain| chain.layers.first().map_or(0, |top| top.size_bytes));
        if new < old {
            let message = format!(
                "the new file holds a disk of {new} bytes, the guest knows {old}: a disk in use cannot become smaller"
            );
            return Err(Error::new(ErrorKind::BadOption, message));
        }
        if opened.disk.read_only != chain.disk.read_only {
            return Err(Error::new(ErrorKind::BadOption, "the disk would change between read-only and writable"));
        }
        barrier.prepare_more(&opened.layers).await?;
        // The guest's choice of write-through stays.
        chain.disk.table_cache.set(opened.disk.table_cache.bytes());
        Ok(Chain::new(opened.layers.clone(), &chain.disk))
    }

    /// Keeps the locks of old files for new files that have none of their own.
    fn keep_locks(&self, former: &Chain) {
        let lacks = |layer: &Arc<Layer>| layer.writable && layer.file.info().locks == Locks::NotWanted;
        // A layer that is open for reading now has locks of its own.
        let written = self.written_files();
        let is_written = |file: &Arc<dyn File>| file.identity().is_some_and(|identity| written.contains(&identity));
        self.locked_to_read.lock().unwrap_or_else(PoisonError::into_inner).retain(is_written);
        let mut kept = self.locked_by.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.chain().layers.iter().any(lacks) {
            kept.clear();
            return;
        }
        let files = former.layers.iter().filter(|layer| layer.writable);
        let files = files.flat_map(|layer| [Some(&layer.file), layer.data.as_ref().map(|data| &data.file)]).flatten();
        kept.extend(files.filter(|file| file.info().locks == Locks::Held).cloned());
    }
}

/// Writes the tables in memory to the layers that are open for writing.
async fn close(chain: &Chain) -> Result<()> {
    match chain.layers.first() {
        Some(top) if !chain.disk.read_only => top.close().await,
        _ => Ok(()),
    }
}

/// Goes on with the old files. The top was closed, so it gets a new mapping.
async fn go_on(chain: &Arc<Chain>, barrier: Barrier) {
    let Some(top) = chain.layers.first().filter(|_| !chain.disk.read_only) else { return barrier.give_up().await };
    let next = match chain.reopened(top) {
        Ok(layer) => {
            let below = chain.layers.iter().skip(1).cloned();
            Chain::new(std::iter::once(Arc::new(layer)).chain(below).collect(), &chain.disk)
        }
        Err(error) => {
            tracing::error!("{error}; every request fails from now on");
            Chain::dead(chain.layers.clone(), &chain.disk)
        }
    };
    barrier.release(vec![Arc::new(next)]).await;
}
