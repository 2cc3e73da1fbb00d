//! Committing a layer below the top of a running disk into the layer below it.
//!
//! Nobody writes to the two. Where the upper one says something, nobody sees what the lower one has, so that is
//! overwritten while guests go on, and one pass is enough. A lower layer that was open for reading is opened for writing
//! first ([`super::writable`]), and the queues go over to it.
//!
//! Then the layer above the two names the lower one as its backing file ([`super::new_base`]). Until that one sector of
//! its header has changed, the old chain is valid, and from then on the new one. Both show the same.

use super::copying::{Copying, What};
use super::new_base::{NewBase, rest_on};
use super::take_back::{empty, made_as_large};
use super::watch::CopyWatch;
use super::writable::{LayerOpeners, Writable};
use crate::chain::exchange::{go_over, go_over_to};
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use crate::chain::table_cache::share_of_top;
use crate::file_name::FileName;
use block::{Error, ErrorKind, Participant, Result, Ticket, block_on};
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// What is told of a layer below the top that is committed.
pub trait LayerGoes {
    /// The layer below holds all that it said. It goes, unless this fails. Until one of the others is called, the image
    /// may rest on it or not.
    fn goes(&mut self) -> Result<()>;
    /// The image does not rest on it any more. It is about to be emptied.
    fn is_gone(&mut self);
    /// The image still rests on it.
    fn stays(&mut self);
}

/// Copies what a layer below the top holds, `layer` by its canonical name, into the layer below it while guests use the
/// disk. Then the layer above it rests on the layer below it, durably, and the layer is emptied: its space goes back to
/// the host.
///
/// The layer below is made larger if it is shorter. Where it is longer, what it has beyond the end becomes zeros, as
/// guests see it. At the end guests are held while their requests in flight end, and, if the layer above is the top,
/// while that is closed and opened again. Refused where another program or disk uses the layer below, or the one above.
/// On an error, or if the `watch` cancels, the disk keeps its layers. Blocks; not to be called on a reactor's thread.
pub fn commit_layer(
    image: &Image,
    layer: &FileName,
    openers: LayerOpeners<'_>,
    watch: &CopyWatch,
    told: &mut dyn LayerGoes,
) -> Result<()> {
    block_on(commit_layer_async(image, layer, openers, watch, told))
}

/// Like [`commit_layer`], as a future. Its calls still block the thread.
#[doc(hidden)]
pub async fn commit_layer_async(
    image: &Image,
    layer: &FileName,
    openers: LayerOpeners<'_>,
    watch: &CopyWatch,
    told: &mut dyn LayerGoes,
) -> Result<()> {
    let _turn = image.board.try_turn()?;
    watch.check()?;
    watch.set_decided(false);
    let chain = image.chain();
    let index = chain
        .layers
        .iter()
        .position(|found| found.name == *layer)
        .ok_or_else(|| Error::new(ErrorKind::Locked, format!("'{layer}' is no layer of the disk any more")))?;
    let [above, layer, below] = check(&chain, index).await?;
    // Whoever else uses one of them is found before anything changes. Only emptying the layer can be left out.
    let open = |layer| Writable::open(image, layer, openers.for_writing);
    let (above, below) = (open(&above)?, open(&below)?);
    let emptied = open(&layer);
    let commit = Commit { image, chain, index, openers, watch, above, below, hold: Cell::default() };
    commit.run(told).await?;
    drop(commit);
    // No request is in flight. Whoever still looks at the layer without a request fails, or asks the next chain.
    if let Some(epochs) = layer.mapping.epochs() {
        epochs.close();
    }
    told.is_gone();
    // The disk does not need the rest: storage that hangs can be left.
    watch.set_decided(false);
    let emptied = match &emptied {
        Ok(emptied) => empty(&emptied.layer, watch).await,
        Err(error) => Err(Error::new(error.kind(), error.to_string())),
    };
    if let Err(error) = emptied {
        watch.keeps_space(&layer.name, &error);
    }
    Ok(())
}

/// Returns the layer above, the layer, and the one below.
async fn check(chain: &Chain, index: usize) -> Result<[Arc<Layer>; 3]> {
    let around = index.checked_sub(1).and_then(|above| chain.layers.get(above..)?.get(..3));
    let Some([above, layer, below]) = around else {
        let count = chain.layers.len();
        let what = format!("the disk has {count} layers: one between two others is committed so");
        return Err(Error::new(ErrorKind::BadOption, what));
    };
    let refuse =
        |what: &str| Err(Error::new(ErrorKind::Unsupported, format!("'{}' cannot be committed: {what}", layer.name)));
    if chain.disk.read_only {
        return refuse("the disk is read-only");
    }
    if chain.layers.iter().any(|layer| layer.name.is_temporary()) {
        return refuse("the disk has snapshot=on, which leaves its image as it is");
    }
    if chain.is_handing_over() {
        return refuse("a former top layer could not be made durable");
    }
    if chain.is_dead() {
        return refuse("a layer could not be opened again after a change");
    }
    if !above.mapping.can_be_edited() {
        return refuse("the layer above is no qcow2 image, and cannot name another backing file");
    }
    if !layer.mapping.can_be_edited() {
        return refuse("only qcow2 images are committed while a disk is served");
    }
    // Internal snapshots would go with the layer. Until then they would show data that the commit writes below.
    if let Some(first) = layer.internal_snapshots().await?.first() {
        let kept = &first.name;
        return refuse(&format!("it has internal snapshots ('{kept}' is one), which go with it; delete them first"));
    }
    Ok([Arc::clone(above), Arc::clone(layer), Arc::clone(below)])
}

struct Commit<'a> {
    image: &'a Image,
    chain: Arc<Chain>,
    index: usize,
    openers: LayerOpeners<'a>,
    watch: &'a CopyWatch,
    above: Writable,
    below: Writable,
    /// Nothing that the layer below frees is used again while the copy runs: guests may be reading it.
    hold: Cell<Option<(Participant, Ticket)>>,
}

impl Commit<'_> {
    async fn run(&self, told: &mut dyn LayerGoes) -> Result<()> {
        let layers = self.with_writable_below().await?;
        let done = self.copy_and_exchange(&layers, told).await;
        let Err(error) = done else { return Ok(()) };
        if let Err(second) = self.go_back().await {
            // Guests go on with the writer, so nobody else may use it.
            self.below.stays_after_error(self.image);
            tracing::error!("after a commit that failed ({error}): {second}");
        }
        Err(error)
    }

    /// Has guests read the layer below by the mapping that is going to change. Returns the layers.
    async fn with_writable_below(&self) -> Result<Vec<Arc<Layer>>> {
        let layers = self.with_below(&self.chain.layers, &self.below.layer);
        if self.below.is_opened() {
            let next = Chain::new(layers.clone(), &self.chain.disk);
            go_over_to(&self.image.board, next, vec![Arc::clone(&self.below.layer)]).await?;
        }
        Ok(layers)
    }

    fn with_below(&self, layers: &[Arc<Layer>], below: &Arc<Layer>) -> Vec<Arc<Layer>> {
        let mut layers = layers.to_vec();
        if let Some(place) = layers.get_mut(self.index.saturating_add(1)) {
            *place = Arc::clone(below);
        }
        layers
    }

    /// Has guests read the layer below as before, by a file that is open for reading if it was. On an error they go on with
    /// the writer.
    async fn go_back(&self) -> Result<()> {
        let present = self.image.chain();
        let is_layer = |chain: &Chain| chain.layers.get(self.index).cloned();
        let still = is_layer(&present).zip(is_layer(&self.chain)).is_some_and(|(now, was)| Arc::ptr_eq(&now, &was));
        // If the layer above rests on the layer below all the same, or no request can succeed, nothing goes back.
        let below = present.layers.get(self.index.saturating_add(1)).filter(|_| still && !present.is_dead());
        let Some(below) = below else { return Ok(()) };
        // Reads that are in flight may be of space that was freed.
        go_over(&self.image.board, Chain::new(present.layers.clone(), &self.chain.disk)).await?;
        drop(self.hold.take());
        below.close().await?;
        let Some(read_again) = self.below_read_again()? else { return Ok(()) };
        let next = Chain::new(self.with_below(&present.layers, &read_again), &self.chain.disk);
        go_over_to(&self.image.board, next, vec![read_again]).await
    }

    fn below_read_again(&self) -> Result<Option<Arc<Layer>>> {
        Ok(self.below.read_again(self.openers)?.map(|mut layer| {
            let lower = self.chain.layers.get(self.index.saturating_add(2)..).unwrap_or_default();
            share_of_top(&mut layer, lower, self.chain.disk.table_cache.bytes());
            Arc::new(layer)
        }))
    }

    async fn copy_and_exchange(&self, layers: &[Arc<Layer>], told: &mut dyn LayerGoes) -> Result<()> {
        let Self { image, watch, index, .. } = self;
        let at_below = index.saturating_add(1);
        let size_bytes = layers.get(*index).map_or(0, |layer| layer.size_bytes);
        if self.below.is_opened() {
            // New data go to space that its refcounts call free, so they must be right.
            self.below.layer.look_before_edit(&mut |_, _| !watch.is_cancelled()).await?;
            watch.check()?;
        }
        let layers = made_as_large(image, layers, at_below, size_bytes, watch).await?;
        let lower = Arc::new(Chain::new(layers.get(at_below..).unwrap_or_default().to_vec(), &self.chain.disk));
        let copying = Copying::new(layers.get(*index..).unwrap_or_default(), &lower, watch)?;
        let copied = self.copy(&copying, &lower, size_bytes).await;
        self.hold.set(copying.into_hold());
        copied?;
        // Closing gives back at once what the copy has freed. Reads that began before may be of that.
        go_over(&image.board, Chain::new(layers.clone(), &self.chain.disk)).await?;
        drop(self.hold.take());
        if let Some(below) = lower.layers.first() {
            below.close().await?;
        }
        watch.check()?;
        let mut below = lower.layers.clone();
        if let Some((first, read_again)) = below.first_mut().zip(self.below_read_again()?) {
            *first = read_again;
        }
        let change =
            NewBase { layers: &layers, index: index.saturating_sub(1), writer: &self.above.layer, below: &below };
        let told = RefCell::new(told);
        rest_on(image, &self.chain, &change, watch, || told.borrow_mut().goes(), || told.borrow_mut().stays()).await
    }

    async fn copy(&self, copying: &Copying<'_>, lower: &Chain, size_bytes: u64) -> Result<()> {
        let (watch, Some(below)) = (self.watch, lower.layers.first()) else { return Ok(()) };
        let all: Vec<_> = std::iter::once(0..size_bytes).collect();
        watch.more(size_bytes);
        copying.copy(&all, What::Top, None, |_| true).await?;
        copying.zero(size_bytes..below.size_bytes).await?;
        below.flush_by(&copying.next_meta()?).await?;
        watch.check()
    }
}
