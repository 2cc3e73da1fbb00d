//! Shows ranges of an image in memory, without requests. Also takes over pages of a scratch overlay that were filled
//! outside the disk.
//!
//! A map of a range to read has a place in the epochs of each layer. So space that is freed while the map lives is not
//! reused, and the map never shows data of another range. An exchange of the chain does not wait for the map: the old
//! layers still hold what the range held then. Closing a layer does not wait for it either: the map then fails.

use super::layer::Layer;
use super::layers::Chain;
use super::mapping::Staged;
use block::{EpochPin, Extent, Keep, MapPiece, Promise, ReadMap, WriteMap};
use std::sync::Arc;

/// The most pieces of one map. A range in more pieces is read instead.
const MAX_PIECES: usize = 1024;

impl Chain {
    /// Maps a range where it lies. `None` if part of it does not lie in memory, or if a table would have to be read.
    pub(crate) fn map_read(&self, offset: u64, length_bytes: usize) -> Option<ReadMap> {
        self.check_range(offset, length_bytes as u64).ok()?;
        // The epochs are joined before anything is looked up.
        let places = Places::in_layers(&self.layers)?;
        let end = offset.checked_add(length_bytes as u64)?;
        let mut pieces = Vec::with_capacity(1);
        let mut at = offset;
        while at < end {
            let place = self.lookup(at, end.saturating_sub(at))?;
            let length = usize::try_from(place.length_bytes).ok().filter(|length| *length > 0)?;
            if pieces.len() >= MAX_PIECES {
                return None;
            }
            match place.extent {
                Extent::Data { offset, .. } => {
                    let layer = self.layer(place.layer).ok()?;
                    let past_end = layer.mapping.past_end(offset);
                    layer.data_file().map(offset, length, past_end, &mut pieces).then_some(())?;
                }
                Extent::Zero | Extent::Backing => pieces.push(MapPiece::Zeros(length)),
                Extent::Compressed(_) => return None,
            }
            at = at.saturating_add(place.length_bytes);
        }
        Some(ReadMap::new(pieces, Box::new(places)))
    }

    /// Reserves space of the top layer for the new bytes of a range.
    pub(crate) fn map_write(&self, offset: u64, length_bytes: usize) -> Option<WriteMap> {
        if self.disk.read_only || !self.takes_over() {
            return None;
        }
        let top = self.layers.first()?;
        // Space is not taken for nothing.
        if !top.data_file().can_map_reserved() {
            return None;
        }
        let staged = top.mapping.try_stage(offset, length_bytes as u64)?;
        let Some(range) = top.data_file().map_reserved(staged.file_offset, length_bytes) else {
            staged.give_back();
            return None;
        };
        let zeroed = staged.zeroed;
        Some(WriteMap::in_space(offset, range, Box::new(staged), zeroed))
    }

    /// Whether the top layer may take over pages without a request.
    fn takes_over(&self) -> bool {
        !self.looks_at_writes && !self.guessed_raw && self.both.is_none()
    }

    /// Whether the top layer may ever reserve space for requests that come.
    pub(crate) fn reserves_ahead(&self) -> bool {
        self.layers.first().is_some_and(|top| top.mapping.can_stage()) && !self.disk.read_only
    }

    /// Whether the top layer should reserve space for requests that come.
    pub(crate) fn is_short(&self) -> bool {
        let top = self.layers.first().filter(|_| !self.disk.read_only && self.takes_over());
        top.is_some_and(|top| top.mapping.is_short())
    }

    /// Whether the map's space was reserved in the present top layer, so that it can be taken over.
    pub(crate) fn owns(&self, map: &WriteMap) -> bool {
        let staged = map.claim().and_then(|claim| claim.downcast_ref::<Staged>());
        let top = self.layers.first();
        self.takes_over() && staged.zip(top).is_some_and(|(staged, top)| top.mapping.owns(staged))
    }
}

/// Places in the epochs of layers, for something that makes no requests. Dropping them ends it.
pub(crate) struct Places(Vec<(EpochPin, Promise)>);

impl Places {
    /// Joins the epochs of all layers. `None` if a layer is closed and about to be replaced.
    pub(crate) fn in_layers(layers: &[Arc<Layer>]) -> Option<Self> {
        let mut places = Vec::with_capacity(layers.len());
        for layer in layers {
            let Some(epochs) = layer.mapping.epochs() else { continue };
            let promise = epochs.promise()?;
            places.push((epochs.pin(), promise));
        }
        Some(Self(places))
    }
}

impl Keep for Places {
    fn is_kept(&self) -> bool {
        self.0.iter().all(|(_, promise)| promise.is_kept())
    }
}
