//! Lookups and overwrites in images with extended L2 entries, which end at the end of a part of a cluster.
//!
//! The two words of an entry change one after the other. A reader without the mutex never uses words of two moments.

use crate::layout::entry::{BadEntry, Cluster};
use crate::layout::extended_entry::{CHANGING, Extended, PARTS, Part};
use crate::live::image::Overwrite;
use crate::live::state::{Inner, Need, State, Step, Stop};
use block::sync::Ordering;
use block::{CompressedExtent, Extent, Mapped, SliceView};

/// A run of parts of one kind.
struct Found {
    kind: Part,
    /// First byte in the file; `None` for a compressed cluster.
    host: Option<u64>,
    cluster: Cluster,
    bytes: u64,
}

impl Inner {
    /// Returns an entry with both words of one moment; `None` while it is being replaced.
    fn extended_in(&self, view: &SliceView<'_>, index: usize) -> Option<Result<Extended, BadEntry>> {
        let at = index.checked_mul(2)?;
        let descriptor = view.get(at)?;
        let bitmap = view.get(at.checked_add(1)?)?;
        // A writer marks the descriptor before it changes the bitmap: if the descriptor has not changed, the words
        // belong together.
        if descriptor == CHANGING || view.get(at)? != descriptor {
            return None;
        }
        Some(Extended::decode(descriptor, bitmap, &self.geometry))
    }

    /// Returns the entry of a guest cluster whose slice is in memory. Only under the mutex.
    pub(crate) fn extended(&self, slice: u64, cluster: u64) -> Step<Extended> {
        let view = self.slices.view(slice);
        let found = view.and_then(|view| self.extended_in(&view, self.geometry.index_in_slice(cluster)));
        let place = self.geometry.start_of(cluster);
        match found {
            Some(Ok(entry)) if entry.host().is_some_and(|host| self.geometry.is_misplaced(host, place)) => {
                Err(self.bad_entry_stop(cluster))
            }
            Some(entry) => entry.map_err(|_| self.bad_entry_stop(cluster)),
            None => Err(Stop::Need(Need::Slice(slice))),
        }
    }

    /// Replaces both words of an entry.
    pub(crate) fn set_extended(&self, state: &mut State, slice: u64, cluster: u64, descriptor: u64, bitmap: u64) {
        let at = self.geometry.index_in_slice(cluster).saturating_mul(2);
        let second = at.saturating_add(1);
        let old = self.slices.view(slice).and_then(|view| Some((view.get(at)?, view.get(second)?)));
        self.mapping_changes();
        if old.is_some_and(|(old, _)| old != descriptor) && old.is_none_or(|(_, old)| old != bitmap) {
            self.slices.set(slice, at, CHANGING);
        }
        self.slices.set(slice, second, bitmap);
        self.slices.set(slice, at, descriptor);
        state.book.mark_dirty(slice);
    }

    /// Returns the parts from `offset` on that are of one kind and adjacent, up to the end of a slice. `Ok(None)`: look
    /// again.
    fn parts_at(&self, offset: u64, length: u64) -> Result<Option<Found>, BadEntry> {
        let geometry = &self.geometry;
        let Some(view) = self.slices.view(geometry.slice_of(geometry.cluster_of(offset))) else { return Ok(None) };
        let mut index = geometry.index_in_slice(geometry.cluster_of(offset));
        let mut found: Option<Found> = None;
        let mut at = offset;
        while let Some(entry) = self.extended_in(&view, index) {
            let entry = match (entry, &found) {
                (Ok(entry), _) => entry,
                (Err(bad), None) => return if view.is_valid() { Err(bad) } else { Ok(None) },
                (Err(_), Some(_)) => break,
            };
            let part = geometry.part_of(at);
            let kind = entry.part(part);
            let in_cluster = geometry.offset_in_cluster(at);
            let host = entry.host().map(|host| host.saturating_add(in_cluster));
            let end_part = part.saturating_add(entry.run(part));
            let bytes = geometry.part_start(end_part).saturating_sub(in_cluster);
            match &mut found {
                None => found = Some(Found { kind, host, cluster: entry.cluster, bytes }),
                Some(found) => {
                    let follows = found.host.map(|first| first.saturating_add(found.bytes)) == host;
                    if found.kind != kind || kind == Part::Compressed || (kind == Part::Data && !follows) {
                        break;
                    }
                    found.bytes = found.bytes.saturating_add(bytes);
                }
            }
            at = at.saturating_add(bytes);
            if end_part < PARTS || at.saturating_sub(offset) >= length {
                break;
            }
            index = index.saturating_add(1);
        }
        if !view.is_valid() {
            return Ok(None);
        }
        Ok(found.map(|found| Found { bytes: found.bytes.min(length), ..found }))
    }

    /// Looks up one slice's part of a range. `Ok(None)` if it is not in memory, or is being changed.
    pub(crate) fn lookup_parts(&self, offset: u64, length: u64) -> Result<Option<Mapped>, BadEntry> {
        let Some(found) = self.parts_at(offset, length)? else { return Ok(None) };
        let skip_bytes = self.geometry.offset_in_cluster(offset);
        let extent = match (found.kind, found.cluster, found.host) {
            (Part::Unallocated, ..) => Extent::Backing,
            (Part::Zero, ..) => Extent::Zero,
            (Part::Data, _, Some(place)) if !self.geometry.is_misplaced(place, offset) => {
                Extent::Data { file: u8::from(self.geometry.data_file), offset: place }
            }
            (Part::Compressed, Cluster::Compressed { offset, length_bytes }, _) => {
                Extent::Compressed(CompressedExtent { offset, length_bytes, skip_bytes: skip_bytes as u32 })
            }
            _ => return Err(BadEntry),
        };
        Ok(Some(Mapped { extent, length_bytes: found.bytes }))
    }

    /// As [`crate::Qcow2::lookup_overwrite`]: adjacent parts in one slice.
    pub(crate) fn overwrite_parts(&self, offset: u64, length: u64) -> Option<Overwrite> {
        let geometry = &self.geometry;
        let cluster = geometry.cluster_of(offset);
        self.table(geometry.l1_index(cluster)).ok().flatten().filter(|table| table.copied)?;
        let view = self.slices.view(geometry.slice_of(cluster))?;
        let in_cluster = geometry.offset_in_cluster(offset);
        let mut index = geometry.index_in_slice(cluster);
        let mut start: Option<u64> = None;
        let mut bytes = 0u64;
        while bytes < length {
            let Some(Ok(entry)) = self.extended_in(&view, index) else { break };
            let Cluster::Data { host, copied: true } = entry.cluster else { break };
            let skip = if start.is_none() { in_cluster } else { 0 };
            let part = geometry.part_of(skip);
            let here = host.saturating_add(skip);
            if self.may_hold_table(host) || geometry.is_misplaced(here, offset.saturating_add(bytes)) {
                break;
            }
            if entry.part(part) != Part::Data || start.is_some_and(|start| start.saturating_add(bytes) != here) {
                break;
            }
            start = start.or(Some(here));
            let end_part = part.saturating_add(entry.run(part));
            bytes = bytes.saturating_add(geometry.part_start(end_part).saturating_sub(skip));
            if end_part < PARTS {
                break;
            }
            index = index.saturating_add(1);
        }
        let offset = start.filter(|_| view.is_valid() && self.header_ready.load(Ordering::Acquire))?;
        Some(Overwrite::InPlace { offset, length_bytes: bytes.min(length) })
    }

    /// As [`crate::Qcow2::empty_space`].
    pub(crate) fn empty_space_of_parts(&self, offset: u64, length: u64) -> (Option<u64>, u64) {
        let geometry = &self.geometry;
        let Some(view) = self.slices.view(geometry.slice_of(geometry.cluster_of(offset))) else {
            return (None, length);
        };
        let mut found: Option<(Option<u64>, u64)> = None;
        let mut kind = None;
        let mut at = offset;
        let mut index = geometry.index_in_slice(geometry.cluster_of(offset));
        while at < offset.saturating_add(length) {
            let Some(Ok(entry)) = self.extended_in(&view, index) else { break };
            let (part, in_cluster) = (geometry.part_of(at), geometry.offset_in_cluster(at));
            let here = entry.host().map(|host| host.saturating_add(in_cluster));
            let goes_on = found.is_none_or(|(first, bytes)| first.map(|first| first.saturating_add(bytes)) == here);
            let is_empty = matches!(entry.part(part), Part::Zero | Part::Unallocated);
            if !is_empty || !goes_on || kind.is_some_and(|kind| kind != entry.part(part)) {
                break;
            }
            kind = Some(entry.part(part));
            let end_part = part.saturating_add(entry.run(part));
            let bytes = geometry.part_start(end_part).saturating_sub(in_cluster);
            let (first, so_far) = found.unwrap_or((here, 0));
            found = Some((first, so_far.saturating_add(bytes)));
            at = at.saturating_add(bytes);
            if end_part < PARTS {
                break;
            }
            index = index.saturating_add(1);
        }
        found.map_or((None, length), |(first, bytes)| (first, bytes.min(length)))
    }
}
