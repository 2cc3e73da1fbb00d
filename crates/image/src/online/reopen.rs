//! Opens the files of a running disk anew: after one was replaced or changed from outside, or to open them in another
//! way.

use crate::chain::exchange::{Barrier, hold_quiet};
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::{Disk, Error, ErrorKind, File, Locks, Result, block_on};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

impl Image {
    /// Goes over to files that `open` opens, while guests use the disk. Requests in flight end on the old files, and
    /// later ones are held. Tables in memory are written to the old files and dropped. If that fails, or the new files
    /// cannot be used, the disk goes on with the old ones. With `force`, data that cannot be written are given up if the
    /// new files can be used. The next flush then fails, so that guests learn of it.
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
        let barrier = hold_quiet(&self.board).await?;
        let unwritten = match close(&chain, force).await {
            Ok(unwritten) => unwritten,
            Err(error) => {
                barrier.give_up().await;
                return Err(error);
            }
        };
        // The new chain has the same indexes.
        chain.layers.iter().for_each(|layer| layer.mapping.count_index_memory(false));
        match self.replacement(&chain, &barrier, open).await {
            Ok(next) => {
                // A new mapping uses freed space again. Whoever looks at the disk without a request fails, or asks the
                // next chain.
                chain.layers.iter().filter(|layer| layer.writable).for_each(|layer| layer.end_promises());
                give_up_data(&chain, &unwritten);
                barrier.release(vec![Arc::new(next)]).await;
                self.keep_locks(&chain);
                self.listeners.notify(|| self.info());
                Ok(())
            }
            Err(error) => {
                go_on(&chain, &unwritten, barrier).await;
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

/// Writes the tables in memory to the layers that guests have written to. With `force`, tries each of them, and returns
/// those that could not be written.
async fn close(chain: &Chain, force: bool) -> Result<Vec<usize>> {
    let mut unwritten = Vec::new();
    for (index, layer) in chain.unclosed() {
        match layer.close().await {
            Err(error) if force => {
                tracing::warn!("{error}; the disk is opened anew by force all the same");
                unwritten.push(index);
            }
            closed => closed?,
        }
    }
    Ok(unwritten)
}

/// Notes that what could not be written to these layers is lost.
fn give_up_data(chain: &Chain, lost: &[usize]) {
    for layer in lost.iter().filter_map(|index| chain.layers.get(*index)) {
        chain.disk.has_lost.store(true, Ordering::Relaxed);
        tracing::error!(
            "'{}': what guests have written and not flushed is given up, because the disk was opened anew by force; \
             the disk's next flush fails, so that they learn of it",
            layer.name
        );
    }
}

/// Goes on with the old files. A top that was closed gets a new mapping. A layer that could not be closed keeps what it
/// has in memory, unless its file may have been repaired when it was opened anew: what is in memory would not fit it.
async fn go_on(chain: &Arc<Chain>, unwritten: &[usize], barrier: Barrier) {
    let mut layers = chain.layers.clone();
    let (mut lost, mut is_dead) = (Vec::new(), false);
    for (index, layer) in chain.layers.iter().enumerate() {
        let is_unwritten = unwritten.contains(&index);
        let is_anew = match is_unwritten {
            true => layer.mapping.may_be_repaired(),
            false => index == 0 && !chain.disk.read_only,
        };
        if !is_anew {
            layer.mapping.count_index_memory(true);
            continue;
        }
        layer.end_promises();
        lost.extend(is_unwritten.then_some(index));
        // A new mapping counts by itself.
        let lower = Chain::plain(chain.layers.get(index..).unwrap_or_default().to_vec(), &chain.disk);
        match (lower.reopened(layer), layers.get_mut(index)) {
            (Ok(opened), Some(place)) => *place = Arc::new(opened),
            (Err(error), _) => {
                tracing::error!("{error}; every request fails from now on");
                is_dead = true;
            }
            _ => {}
        }
    }
    give_up_data(chain, if is_dead { unwritten } else { &lost });
    let next = match is_dead {
        true => Chain::dead(chain.layers.clone(), &chain.disk),
        false if unwritten.is_empty() => Chain::new(layers, &chain.disk),
        // Its flushes cover what they have covered before.
        false => chain.with_layers(layers),
    };
    barrier.release(vec![Arc::new(next)]).await;
}
