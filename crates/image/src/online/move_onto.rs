//! Giving the top layer of a running disk what it needs, so that it can rest on other layers, or on none.
//!
//! What the guest sees never changes. For a range without data in the top layer, the layers below now are compared with
//! those that will lie below. Where the two differ, the top gets a copy of what the guest sees (see
//! [`Shared::copy_up`](crate::chain::queue::Shared)), several pieces at once ([`super::lanes`]). The layers below are
//! only read, so one round is enough: what guests write meanwhile goes to the top, and stays there.
//!
//! Then requests are held until none is in flight. The top is closed, its header names the new backing file, and it is
//! opened again. Until that one sector of the header has changed, the old chain is valid, and from then on the new one.
//! So a crash at any moment leaves a chain with the same contents.

use super::lanes::{InEpochs, Pieces, copy_in_lanes};
use super::new_base::{NewBase, rest_on};
use super::watch::CopyWatch;
use crate::chain::give_up::Ends;
use crate::chain::image::Image;
use crate::chain::job_calls::JobCalls;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use crate::chain::place::Place;
use crate::chain::queue::Shared;
use crate::file_name::FileName;
use crate::open::gate::Opener;
use crate::open::layers::ImageOptions;
use block::{Error, ErrorKind, Extent, IoError, IoResult, MetaIo, Participant, Priority, Result, block_on};
use memory::IoBuf;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes that are compared and copied at once, but at least a cluster of the top layer.
const PIECE_BYTES: u64 = 256 << 10;

/// A chain that is open for reading, and on which the top layer of a running disk may come to rest.
pub struct OpenedBase {
    layers: Vec<Arc<Layer>>,
}

impl OpenedBase {
    /// Opens the image and the layers below it.
    pub fn open(options: &ImageOptions, opener: &dyn Opener) -> Result<Self> {
        let options = options.clone().with(|options| options.read_only = true);
        let image = crate::open::layers::open(&options, opener)?;
        Ok(Self { layers: image.chain().layers.clone() })
    }

    /// The name of its first layer.
    #[must_use]
    pub fn name(&self) -> Option<FileName> {
        self.layers.first().map(|layer| layer.name.clone())
    }
}

/// What the top layer of a disk is to rest on.
pub enum NewBelow {
    /// Nothing: the top layer gets all that the guest sees.
    Nothing,
    /// That layer of its own chain, counted from the top, which is 0, and what lies below it.
    Layer(usize),
    /// Another chain.
    Base(OpenedBase),
}

/// Copies into the top layer what the guest sees and the new layers below do not hold, while guests use the disk. Then
/// the top layer rests on the new layers, durably.
///
/// At the end, guests are held while their requests in flight end, and while the top layer is closed and opened again.
/// Before the header is changed, `commit` is called: whoever has to allow the new base makes that durable there. On an
/// error, or if the `watch` cancels, the disk keeps its old layers below. An image without a backing file is refused:
/// its tables do not tell zeros from what was never written. Blocks; not to be called on a reactor's thread.
pub fn move_onto(image: &Image, below: NewBelow, watch: &CopyWatch, commit: impl FnOnce() -> Result<()>) -> Result<()> {
    move_onto_or_stay(image, below, watch, commit, || ())
}

/// Like [`move_onto`]. If the image keeps its base after `commit` was called, `stay` is called, in which the caller
/// takes back what `commit` did.
pub fn move_onto_or_stay(
    image: &Image,
    below: NewBelow,
    watch: &CopyWatch,
    commit: impl FnOnce() -> Result<()>,
    stay: impl FnOnce(),
) -> Result<()> {
    block_on(move_onto_async(image, below, watch, commit, stay))
}

/// Like [`move_onto_or_stay`], as a future. Its calls still block the thread.
#[doc(hidden)]
pub async fn move_onto_async(
    image: &Image,
    below: NewBelow,
    watch: &CopyWatch,
    commit: impl FnOnce() -> Result<()>,
    stay: impl FnOnce(),
) -> Result<()> {
    let _turn = image.board.try_turn()?;
    watch.check()?;
    let chain = image.chain();
    let below = check(&chain, below).await?;
    // Refused before anything is copied.
    below.first().map(|base| base.in_header()).transpose()?;
    let Some(top) = chain.layers.first() else { return Ok(()) };
    watch.more(chain.size_bytes);
    Pulling::new(&chain, &below, watch)?.pull(chain.size_bytes, watch).await?;
    top.flush().await?;
    watch.check()?;
    let change = NewBase { layers: &chain.layers, index: 0, writer: top, below: &below };
    rest_on(image, &chain, &change, watch, commit, stay).await
}

async fn check(chain: &Chain, below: NewBelow) -> Result<Vec<Arc<Layer>>> {
    let Some(top) = chain.layers.first() else { return Ok(Vec::new()) };
    let refuse = |what: String| Err(Error::new(ErrorKind::Unsupported, format!("'{}': {what}", top.name)));
    if chain.disk.read_only {
        return refuse("the disk is read-only".to_owned());
    }
    if chain.layers.len() < 2 && !matches!(below, NewBelow::Base(_)) {
        return refuse("it rests on no other layer".to_owned());
    }
    if chain.is_handing_over() {
        return refuse("the layer below could not be made durable".to_owned());
    }
    if !top.mapping.can_reveal() {
        return refuse("an image of this format rests on nothing; only qcow2 does".to_owned());
    }
    if top.mapping.backing().is_none() {
        // Without a layer below, its tables do not record what the guest zeroes: a base would show there.
        return refuse("it names no backing file; stop the guest and use 'ringdisk rebase'".to_owned());
    }
    if top.mapping.data_file().is_some() {
        return refuse("it has an external data file; stop the guest and use 'ringdisk rebase'".to_owned());
    }
    if !top.mapping.snapshots(&top.open_blocking()?, &top.name.to_string()).await?.is_empty() {
        return refuse("it has internal snapshots, which would show something else; delete them first".to_owned());
    }
    let layers = match below {
        NewBelow::Nothing => Vec::new(),
        NewBelow::Layer(index @ 1..) if index < chain.layers.len() => {
            chain.layers.get(index..).unwrap_or_default().to_vec()
        }
        NewBelow::Layer(index) => return refuse(format!("there is no layer {index} below it")),
        NewBelow::Base(base) => base.layers,
    };
    if layers.iter().any(|layer| layer.name == top.name) {
        return refuse("an image cannot rest on itself".to_owned());
    }
    Ok(layers)
}

/// A place of the disk in layers below the top.
enum Below {
    Zeros,
    At(Arc<Layer>, Extent),
}

impl Below {
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Zeros, Self::Zeros) => true,
            (Self::At(layer, extent), Self::At(other, at)) => Arc::ptr_eq(layer, other) && extent == at,
            _ => false,
        }
    }
}

/// Copies up, by the calls of a job.
struct Pulling<'a> {
    top: &'a Layer,
    calls: Rc<JobCalls>,
    top_meta: MetaIo,
    /// The chain that guests use.
    seen: Shared,
    /// What lies below the top, now and afterwards; `None` where nothing does.
    now: Option<Shared>,
    next: Option<Shared>,
    in_top: Option<RefCell<Participant>>,
    piece_bytes: u64,
}

/// A piece on its way.
enum Found<'a> {
    /// The top has the range, or nothing changes below.
    Skip,
    /// The layers below now may differ from the new ones. The top does not use space again meanwhile, because guests'
    /// data next to the piece are read, too.
    Compare(Option<InEpochs<'a>>),
}

impl<'a> Pulling<'a> {
    fn new(chain: &'a Chain, below: &[Arc<Layer>], watch: &CopyWatch) -> Result<Self> {
        let nothing = || Error::new(ErrorKind::Io, "an image without layers");
        let top = chain.layers.first().ok_or_else(nothing)?;
        let calls = JobCalls::new(watch.given_up_by());
        let of = |layers: &[Arc<Layer>]| match layers.is_empty() {
            true => Ok(None),
            false => {
                let chain = Arc::new(Chain::plain(layers.to_vec(), &chain.disk));
                Shared::for_job(&chain, &calls, Ends::Reads).map(Some)
            }
        };
        Ok(Self {
            top,
            top_meta: calls.open(top, Ends::Reads)?,
            seen: of(&chain.layers)?.ok_or_else(nothing)?,
            now: of(chain.layers.get(1..).unwrap_or_default())?,
            next: of(below)?,
            calls,
            in_top: top.mapping.epochs().map(|epochs| RefCell::new(epochs.join())),
            piece_bytes: PIECE_BYTES.max(u64::from(top.mapping.cluster_bytes().unwrap_or(1))),
        })
    }

    async fn pull(&self, size_bytes: u64, watch: &CopyWatch) -> Result<()> {
        let all: Vec<_> = std::iter::once(0..size_bytes).collect();
        copy_in_lanes(self, &self.calls, &all, watch).await.map(drop)
    }

    fn failed(&self, at: u64, error: IoError) -> Error {
        self.top.failed(&format!("cannot copy to it from byte {at} on"), error)
    }

    /// Whether the first part of a range may have to be copied, and the length of that part.
    async fn look(&self, at: u64, length_bytes: u64) -> IoResult<(bool, u64)> {
        let mapped = self.top.mapping.resolve(&self.top_meta, at, length_bytes).await?;
        let length_bytes = mapped.length_bytes.min(length_bytes);
        if length_bytes == 0 {
            return Err(IoError::EIO);
        }
        if mapped.extent != Extent::Backing {
            return Ok((false, length_bytes));
        }
        let (now, length_bytes) = place(self.now.as_ref(), at, length_bytes).await?;
        let (next, length_bytes) = place(self.next.as_ref(), at, length_bytes).await?;
        if now.is_same(&next) {
            return Ok((false, length_bytes));
        }
        // Pieces end where clusters of the top do: no two share one.
        let rest = at.checked_rem(self.piece_bytes).unwrap_or(0);
        Ok((true, length_bytes.min(self.piece_bytes.saturating_sub(rest))))
    }

    /// Whether a range holds the same in both chains below.
    async fn is_same_below(&self, at: u64, length_bytes: u64) -> IoResult<bool> {
        let now = bytes(self.now.as_ref(), at, length_bytes).await?;
        match &self.next {
            None => Ok(now.iter().all(|byte| *byte == 0)),
            next => Ok(now == bytes(next.as_ref(), at, length_bytes).await?),
        }
    }

    /// Compares a range, and copies it if it differs.
    async fn copy_range(&self, at: u64, length_bytes: u64) -> IoResult {
        if self.is_same_below(at, length_bytes).await? {
            return Ok(());
        }
        let (mut at, end) = (at, at.saturating_add(length_bytes));
        // One call copies what one allocation takes, so the loop copies the rest.
        while at < end {
            at = at.saturating_add(self.seen.copy_up(at, end.saturating_sub(at)).await?);
        }
        Ok(())
    }
}

impl Pieces for Pulling<'_> {
    type Found<'a>
        = Found<'a>
    where
        Self: 'a;

    async fn find(&self, at: u64, length_bytes: u64) -> Result<(Found<'_>, u64)> {
        let in_top = InEpochs::enter(self.in_top.as_ref(), self.top.mapping.epochs());
        let looked = self.look(at, length_bytes).await.map_err(|error| self.failed(at, error))?;
        let (differs, length_bytes) = looked;
        Ok((if differs { Found::Compare(in_top) } else { Found::Skip }, length_bytes))
    }

    async fn copy<'a>(&'a self, at: u64, length_bytes: u64, found: Found<'a>) -> Result<u64> {
        let Found::Compare(_in_top) = found else { return Ok(0) };
        self.copy_range(at, length_bytes).await.map_err(|error| self.failed(at, error))?;
        Ok(length_bytes)
    }

    fn goes_on(&self, _left_bytes: u64) -> bool {
        true
    }
}

/// Where the first part of a range lies.
async fn place(shared: Option<&Shared>, at: u64, length_bytes: u64) -> IoResult<(Below, u64)> {
    let Some(shared) = shared else { return Ok((Below::Zeros, length_bytes)) };
    let inside = shared.chain.size_bytes.saturating_sub(at).min(length_bytes);
    if inside == 0 {
        return Ok((Below::Zeros, length_bytes));
    }
    let Place { layer, extent, length_bytes } = shared.chain.resolve(&shared.metas, at, inside).await?;
    let below = match extent {
        Extent::Zero | Extent::Backing => Below::Zeros,
        extent => Below::At(Arc::clone(shared.chain.layer(layer)?), extent),
    };
    if length_bytes == 0 { Err(IoError::EIO) } else { Ok((below, length_bytes.min(inside))) }
}

/// What a range holds.
async fn bytes(shared: Option<&Shared>, at: u64, length_bytes: u64) -> IoResult<Vec<u8>> {
    let length = usize::try_from(length_bytes).map_err(|_| IoError::EIO)?;
    let data = IoBuf::try_zeroed(length)?.whole();
    if let Some(shared) = shared {
        let inside = shared.chain.size_bytes.saturating_sub(at).min(length_bytes);
        let inside = usize::try_from(inside).map_err(|_| IoError::EIO)?;
        shared.read(at, data.slice(0, inside), Priority::NONE).await?;
    }
    Ok(data.to_vec())
}
