//! Copying a running disk to another image, which may take its place.

use super::converge::{End, converge};
use super::copying::What;
use super::overlay::refuse_unless_named;
use super::watch::CopyWatch;
use crate::chain::exchange::go_over;
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use crate::chain::table_cache::share_of_top;
use crate::file_name::FileName;
use crate::guess::Format;
use crate::open::gate::Role;
use crate::open::layer::open_layer;
use block::{Error, ErrorKind, File, Result, block_on};
use std::sync::Arc;

/// How much of a disk is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MirrorScope {
    /// All that guests see: the new image rests on nothing.
    #[default]
    Full,
    /// What the top layer holds: the new image rests on what the old one rests on.
    Top,
}

/// An image that is open for writing, that nobody uses, and that a disk is going to be copied to.
pub struct MirrorTarget {
    layer: Layer,
    scope: MirrorScope,
    is_new: bool,
}

impl MirrorTarget {
    /// Opens an image of the disk's size. `file` was opened for writing. Its backing file is not opened. `is_new` says
    /// that the image was made for this and is empty: zeros need not be written to it.
    pub fn open(
        name: &FileName,
        file: Arc<dyn File>,
        format: Format,
        scope: MirrorScope,
        is_new: bool,
    ) -> Result<Self> {
        let layer = open_layer(name, file, format, Role::Writable, None)?;
        let refuse =
            |what: &str| Err(Error::new(ErrorKind::BadOption, format!("no disk can be copied to '{name}': {what}")));
        if layer.file.info().read_only {
            return refuse("it is open for reading only");
        }
        if layer.mapping.data_file().is_some() {
            return refuse("it has an external data file");
        }
        match (scope, layer.mapping.backing().is_some()) {
            (MirrorScope::Full, true) => refuse("it rests on a backing file, and all of the disk is to be copied"),
            (MirrorScope::Top, _) if !is_new => refuse("only a new image takes the top layer alone"),
            (MirrorScope::Top, false) => refuse("it names no backing file, and only the top layer is to be copied"),
            _ => Ok(Self { layer, scope, is_new }),
        }
    }
}

/// What becomes of the copy of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MirrorEnd {
    /// It takes the disk's place. The image that the disk had is closed, and holds the same as the copy at that moment.
    #[default]
    Switch,
    /// It is closed, as the disk was at one moment. The disk keeps its image.
    Keep,
}

/// Copies a disk to another image while guests use it, and ends as `end` says. It ends however fast guests write.
///
/// Before the disk goes over to the other image, when that holds everything, `record` is called, while guests go on:
/// whoever keeps a record of what the disk consists of makes it durable there. On an error, and where the `watch`
/// cancels, the disk stays on its image; what was copied by then is of no use to anybody. Blocks; not to be called on a
/// reactor's thread.
///
/// An error of `record` of the kind [`ErrorKind::Unsure`] says that nobody knows which image the record names. Then guests
/// write to both, and `record` is called again every second: until it is known, or until [`Image::ends`]. This returns
/// such an error only in the second case: both images hold everything then.
pub fn mirror(
    image: &Image,
    target: MirrorTarget,
    end: MirrorEnd,
    watch: &CopyWatch,
    record: impl FnMut() -> Result<()>,
) -> Result<()> {
    block_on(mirror_async(image, target, end, watch, record))
}

/// Like [`mirror`], as a future. Its calls still block the thread.
#[doc(hidden)]
pub async fn mirror_async(
    image: &Image,
    target: MirrorTarget,
    end: MirrorEnd,
    watch: &CopyWatch,
    record: impl FnMut() -> Result<()>,
) -> Result<()> {
    let _turn = image.board.try_turn()?;
    watch.check()?;
    let chain = image.chain();
    check(&chain, &target)?;
    let MirrorTarget { mut layer, scope, is_new, .. } = target;
    let (below, what) = match scope {
        MirrorScope::Full => (Vec::new(), What::All { skip_zeros: is_new }),
        MirrorScope::Top => (chain.layers.get(1..).unwrap_or_default().to_vec(), What::Top),
    };
    share_of_top(&mut layer, &below, chain.disk.table_cache.bytes());
    let next = std::iter::once(Arc::new(layer)).chain(below).collect();
    let next = Arc::new(Chain::new(next, &chain.disk));
    let end_of_copy = match end {
        MirrorEnd::Switch => End::Switch,
        MirrorEnd::Keep => End::Keep,
    };
    if let Err(error) = converge(image, &chain, &next, what, end_of_copy, watch, record).await {
        go_over(&image.board, Chain::new(chain.layers.clone(), &chain.disk)).await?;
        return Err(error);
    }
    let Some(former) = chain.layers.first().filter(|_| end == MirrorEnd::Switch) else { return Ok(()) };
    if let Err(error) = former.close().await {
        tracing::warn!("the disk has gone over to another image, and its former one is not closed in order: {error}");
    }
    // The former image is no longer needed. Whoever still looks at it without a request fails, or asks the next chain.
    if let Some(epochs) = former.mapping.epochs() {
        epochs.close();
    }
    Ok(())
}

fn check(chain: &Chain, target: &MirrorTarget) -> Result<()> {
    let MirrorTarget { layer: target, scope, .. } = target;
    let name = target.name.to_string();
    let refuse = |kind, what: String| Err(Error::new(kind, format!("'{name}': {what}")));
    if chain.disk.read_only {
        return refuse(ErrorKind::Unsupported, "a read-only disk is not copied; use 'ringdisk convert'".to_owned());
    }
    if chain.layers.iter().any(|layer| layer.name.is_temporary()) {
        let what = "a disk with snapshot=on goes over to no other image";
        return refuse(ErrorKind::Unsupported, what.to_owned());
    }
    if chain.layers.first().is_some_and(|top| !top.format().can_be_copied_live()) {
        let what = "a disk whose top is a kept scratch overlay goes over to no other image: put a layer on it first";
        return refuse(ErrorKind::Unsupported, what.to_owned());
    }
    if chain.is_handing_over() {
        return refuse(ErrorKind::Io, "the disk has a former top layer that could not be made durable".to_owned());
    }
    if target.size_bytes != chain.size_bytes {
        let what = format!("it has {} bytes, the disk {}: make it as large", target.size_bytes, chain.size_bytes);
        return refuse(ErrorKind::BadOption, what);
    }
    let is_it = |layer: &Arc<Layer>| {
        let files = std::iter::once(&layer.name).chain(layer.data.as_ref().map(|data| &data.name));
        Arc::ptr_eq(&layer.file, &target.file) || files.into_iter().any(|name| name.is_same_file(&target.name))
    };
    if chain.layers.iter().any(is_it) {
        return refuse(ErrorKind::BadOption, "it is part of the disk".to_owned());
    }
    if *scope == MirrorScope::Top && chain.layers.len() < 2 {
        return refuse(ErrorKind::BadOption, "the disk has one layer only: copy all of it".to_owned());
    }
    if let Some(below) = chain.layers.get(1).filter(|_| *scope == MirrorScope::Top) {
        refuse_unless_named(target, below)?;
    }
    Ok(())
}
