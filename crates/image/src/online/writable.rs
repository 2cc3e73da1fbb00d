//! A layer below the top that is opened for writing while guests read it.

use super::watch::CopyWatch;
use crate::chain::exchange::go_over_to;
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use crate::chain::table_cache::share_of_top;
use crate::open::gate::{Opener, Role};
use crate::open::layer::open_layer;
use block::{Error, ErrorKind, File, Result, block_on};
use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

/// Opens files of layers that are open for reading.
#[derive(Clone, Copy)]
pub struct LayerOpeners<'a> {
    /// Opens for writing, and takes no locks: the file that is open for reading gets a writer's locks.
    pub for_writing: &'a dyn Opener,
    /// Opens for reading, with locks.
    pub for_reading: &'a dyn Opener,
}

/// Opens the layer below the top for writing, for as long as the disk is open, so that it can take the top back. Nothing
/// is done if it was the top before. Fails if anybody else uses it. `opener` takes no locks. Blocks; not to be called on
/// a reactor's thread.
pub fn open_below_for_writing(image: &Image, opener: &dyn Opener, watch: &CopyWatch) -> Result<()> {
    block_on(open_below_async(image, opener, watch))
}

async fn open_below_async(image: &Image, opener: &dyn Opener, watch: &CopyWatch) -> Result<()> {
    let _turn = image.board.try_turn()?;
    let chain = image.chain();
    // What is thrown away, and what only the image tool commits, is not taken back.
    let is_taken_back =
        |top: &&Arc<Layer>| !chain.disk.read_only && !top.name.is_temporary() && top.mapping.can_be_edited();
    let top = chain.layers.first().filter(is_taken_back).filter(|_| !chain.is_dead());
    let Some((top, below)) = top.zip(chain.layers.get(1)).filter(|(_, below)| !below.writable) else { return Ok(()) };
    let rest = chain.layers.get(2..).unwrap_or_default();
    let mut opened = Writable::open(image, below, opener)?;
    if let Some(layer) = Arc::get_mut(&mut opened.layer) {
        share_of_top(layer, rest, chain.disk.table_cache.bytes());
    }
    // New data go to space that its refcounts call free, so they must be right.
    opened.layer.look_before_edit(&mut |_, _| !watch.is_cancelled()).await?;
    watch.check()?;
    let layers = [Arc::clone(top), Arc::clone(&opened.layer)].into_iter().chain(rest.iter().cloned()).collect();
    go_over_to(&image.board, Chain::new(layers, &chain.disk), vec![Arc::clone(&opened.layer)]).await?;
    opened.stays(image);
    Ok(())
}

/// A layer that can be written to. Dropped, it is locked as it was before.
pub(super) struct Writable {
    /// The layer as it is open for writing.
    pub(super) layer: Arc<Layer>,
    /// The layer as it was, if it was open for reading. It has the locks.
    reader: RefCell<Option<Arc<Layer>>>,
}

impl Writable {
    /// Opens a layer for writing, unless it is. Fails if anybody else uses its file.
    pub(super) fn open(image: &Image, layer: &Arc<Layer>, opener: &dyn Opener) -> Result<Self> {
        if layer.writable {
            lock_for_writing(image, layer)?;
            return Ok(Self { layer: Arc::clone(layer), reader: RefCell::default() });
        }
        let refuse = |what: &str| Err(Error::new(ErrorKind::Unsupported, format!("'{}' {what}", layer.name)));
        if layer.name.path().is_none() {
            return refuse("is open for reading only, and is no file of this host that could be locked for writing");
        }
        if layer.data.is_some() {
            return refuse("is open for reading only, and has an external data file");
        }
        if layer.guessed && !layer.mapping.has_tables() {
            return refuse(
                "was guessed to be raw, and a guest's data could make it look like another format: name its format in \
                 the layer above (ringdisk rebase -u -F raw)",
            );
        }
        layer.file.lock_again(true)?;
        match Self::opened(layer, opener) {
            Ok(opened) => Ok(Self { layer: Arc::new(opened), reader: RefCell::new(Some(Arc::clone(layer))) }),
            Err(error) => {
                lock_for_reading(&*layer.file);
                Err(error)
            }
        }
    }

    fn opened(layer: &Layer, opener: &dyn Opener) -> Result<Layer> {
        let file = opener.open(&layer.name, Role::Writable)?;
        if file.identity() != layer.file.identity() {
            let what = format!("'{}' is another file than the one that the disk has open", layer.name);
            return Err(Error::new(ErrorKind::Locked, what));
        }
        let opened = open_layer(&layer.name, file, layer.format(), Role::Writable, None)?;
        Ok(Layer { said: layer.said.clone(), guessed: layer.guessed, ..opened })
    }

    /// Leaves it open for writing. The layer's locks stay with the disk.
    pub(super) fn stays(&self, image: &Image) {
        if let Some(reader) = self.reader.take() {
            keep(&image.locked_by, &reader.file);
        }
    }

    /// As [`Self::stays`], after an error: the locks may be a reader's. If others keep them from being a writer's again,
    /// the next who writes has to get them first.
    pub(super) fn stays_after_error(&self, image: &Image) {
        let Some(reader) = self.reader.take() else { return };
        match reader.file.lock_again(true) {
            Ok(()) => keep(&image.locked_by, &reader.file),
            Err(error) => {
                tracing::error!("'{}' stays open for writing, and may be used by others: {error}", reader.name);
                keep(&image.locked_to_read, &reader.file);
            }
        }
    }

    /// Whether it was opened here.
    pub(super) fn is_opened(&self) -> bool {
        self.reader.borrow().is_some()
    }

    /// Opens the layer for reading again, as its file is after the writes. The writer is closed, and nobody writes. On an
    /// error the locks are a writer's, unless others came in.
    pub(super) fn read_again(&self, openers: LayerOpeners<'_>) -> Result<Option<Layer>> {
        let Some(reader) = self.reader.borrow().clone() else { return Ok(None) };
        reader.file.lock_again(false)?;
        Self::opened_to_read(&reader, openers.for_reading).map(Some).inspect_err(|_| {
            if let Err(error) = reader.file.lock_again(true) {
                tracing::error!("'{}' is open for writing, and may be used by others: {error}", reader.name);
            }
        })
    }

    fn opened_to_read(reader: &Layer, opener: &dyn Opener) -> Result<Layer> {
        let file = opener.open(&reader.name, Role::Backing)?;
        if file.identity() != reader.file.identity() {
            let what = format!("'{}' is another file than the one that the disk has open", reader.name);
            return Err(Error::new(ErrorKind::Locked, what));
        }
        let opened = open_layer(&reader.name, file, reader.format(), Role::Backing, None)?;
        Ok(Layer { said: reader.said.clone(), guessed: reader.guessed, ..opened })
    }
}

impl Drop for Writable {
    fn drop(&mut self) {
        if let Some(reader) = self.reader.take() {
            lock_for_reading(&*reader.file);
        }
    }
}

fn keep(list: &Mutex<Vec<Arc<dyn File>>>, file: &Arc<dyn File>) {
    list.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(file));
}

/// Locks a layer that is open for writing, if an error left it with the locks of a reader. Fails if anybody else uses it.
pub(super) fn lock_for_writing(image: &Image, layer: &Layer) -> Result<()> {
    let identity = layer.file.identity();
    let mut lacking = image.locked_to_read.lock().unwrap_or_else(PoisonError::into_inner);
    let found = lacking.iter().find(|file| identity.is_some() && file.identity() == identity).cloned();
    let Some(file) = found else { return Ok(()) };
    file.lock_again(true)?;
    lacking.retain(|other| !Arc::ptr_eq(other, &file));
    keep(&image.locked_by, &file);
    Ok(())
}

fn lock_for_reading(file: &dyn File) {
    if let Err(error) = file.lock_again(false) {
        tracing::warn!("'{}' stays locked as a file that is written to: {error}", file.info().name);
    }
}
