//! Writes, zeroes and discards in images with extended L2 entries: as `write` and `zero`, by parts of clusters.

use crate::layout::entry::{COPIED, Cluster};
use crate::layout::extended_entry::{ALL_ZERO, Extended, PARTS, Part, mask};
use crate::live::image::Qcow2;
use crate::live::state::{Inner, Need, State, Step, Stop, unless_block_missing};
use crate::live::write::{ALLOCATION_BYTES_MAX, Allocation, Prepared};
use crate::live::zero::Goal;
use block::Fill;
use block::IoError;
use std::ops::Range;
use std::sync::Arc;

/// The place of new parts. These are whole parts; the request may cover them only partly.
struct Room {
    start: u64,
    end: u64,
    /// First byte of the host cluster of the first guest cluster.
    host: u64,
    clusters: Range<u64>,
    fresh: bool,
    zeroed: bool,
    head: Fill,
    tail: Fill,
}

impl Qcow2 {
    /// As `try_prepare`. No write to the range's first cluster is in flight.
    pub(crate) fn try_prepare_parts(&self, state: &mut State, offset: u64, length: u64) -> Step<Prepared> {
        let inner = &*self.inner;
        let geometry = &inner.geometry;
        let first = geometry.cluster_of(offset);
        let request_end = offset.saturating_add(length);
        let slice = inner.own_slice(state, first)?;
        let limit = geometry
            .clusters_for(request_end)
            .min(geometry.slice_end(first))
            .min(first.saturating_add(geometry.cluster_of(ALLOCATION_BYTES_MAX).max(1)))
            .min(state.next_in_flight(first));
        let Some(host) = inner.owned_host(state, slice, first)? else {
            let room = inner.new_parts(state, slice, offset, request_end, limit)?;
            return Ok(self.take_room(state, room));
        };
        let entry = inner.extended(slice, first)?;
        let part = geometry.part_of(offset);
        let in_cluster = geometry.offset_in_cluster(offset);
        if entry.part(part) == Part::Data {
            let end_part = part.saturating_add(entry.run(part));
            let bytes = geometry.part_start(end_part).saturating_sub(in_cluster);
            let offset = host.saturating_add(in_cluster);
            return Ok(Prepared::InPlace { offset, length_bytes: bytes.min(length) });
        }
        let room = inner.kept_parts(state, slice, host, offset..request_end, limit)?;
        Ok(self.take_room(state, room))
    }

    fn take_room(&self, state: &mut State, room: Room) -> Prepared {
        let geometry = &self.inner.geometry;
        state.in_flight.insert(room.clusters.start, room.clusters.end);
        let host_first = geometry.cluster_of(room.host);
        let count = room.clusters.end.saturating_sub(room.clusters.start);
        let skip = room.start.saturating_sub(geometry.start_of(room.clusters.start));
        Prepared::New(Allocation {
            guest_offset: room.start,
            length_bytes: room.end.saturating_sub(room.start),
            file_offset: room.host.saturating_add(skip),
            head: room.head,
            tail: room.tail,
            zeroed: room.zeroed,
            blank: false,
            without_data: false,
            guest: room.clusters,
            unpublished: if room.fresh { host_first..host_first.saturating_add(count) } else { 0..0 },
            inner: Arc::clone(&self.inner),
        })
    }
}

impl Inner {
    /// Returns the host cluster that only this guest cluster uses. If the refcount shows that, sets the entry's flag.
    fn owned_host(&self, state: &mut State, slice: u64, cluster: u64) -> Step<Option<u64>> {
        let entry = self.extended(slice, cluster)?;
        self.guard_entry(state, &entry.cluster)?;
        Ok(match entry.cluster {
            Cluster::Data { host, copied: true } => Some(host),
            Cluster::Data { host, .. } if self.geometry.data_file => Some(host),
            Cluster::Data { host, copied: false } => {
                if self.refcount_in_use(state, self.geometry.cluster_of(host))? > 1 {
                    return Ok(None);
                }
                self.set_extended(state, slice, cluster, host | COPIED, entry.bitmap());
                Some(host)
            }
            _ => None,
        })
    }

    /// Finds parts that the guest clusters' own host clusters do not hold yet.
    fn kept_parts(&self, state: &mut State, slice: u64, host: u64, range: Range<u64>, limit: u64) -> Step<Room> {
        let geometry = &self.geometry;
        let first = geometry.cluster_of(range.start);
        let mut cluster = first;
        let (start_part, mut last_part) = (geometry.part_of(range.start), 0);
        while cluster < limit {
            let distance = geometry.start_of(cluster.saturating_sub(first));
            if cluster > first {
                let next = unless_block_missing(self.owned_host(state, slice, cluster))?.flatten();
                if next.is_none() || next != host.checked_add(distance) {
                    break;
                }
            }
            let from = if cluster == first { start_part } else { 0 };
            let run = self.extended(slice, cluster)?.missing_run(from);
            let wanted = self.parts_wanted(cluster, range.end);
            let end_part = from.saturating_add(run).min(wanted);
            if end_part == 0 {
                break;
            }
            cluster = cluster.saturating_add(1);
            last_part = end_part;
            if end_part < PARTS {
                break;
            }
        }
        let last = cluster.saturating_sub(1);
        let start = geometry.start_of(first).saturating_add(geometry.part_start(start_part));
        let end = geometry.start_of(last).saturating_add(geometry.part_start(last_part));
        let head = self.fill_part(slice, range.start, false)?;
        let tail = self.fill_part(slice, end.saturating_sub(1), false)?;
        let (head, tail) = self.fillings(start, end, &range, head, tail, Fill::Zero);
        Ok(Room { start, end, host, clusters: first..cluster, fresh: false, zeroed: false, head, tail })
    }

    /// Allocates host clusters, and decides which data must be copied to them from the old ones.
    fn new_parts(&self, state: &mut State, slice: u64, offset: u64, request_end: u64, limit: u64) -> Step<Room> {
        let geometry = &self.geometry;
        let first = geometry.cluster_of(offset);
        let mut end = first.saturating_add(1);
        while end < limit && unless_block_missing(self.owned_host(state, slice, end))? == Some(None) {
            end = end.saturating_add(1);
        }
        let (host, zeroed, fresh) = if geometry.data_file {
            (geometry.start_of(first), false, false)
        } else {
            let run = self.allocate(state, end.saturating_sub(first))?;
            end = first.saturating_add(run.count);
            (geometry.start_of(run.first), run.zeroed, true)
        };
        let last = end.saturating_sub(1);
        let (first_entry, last_entry) = (self.extended(slice, first)?, self.extended(slice, last)?);
        let start_part = geometry.part_of(offset).min(first_held(&first_entry));
        let end_part = self.parts_wanted(last, request_end).max(end_held(&last_entry));
        let start = geometry.start_of(first).saturating_add(geometry.part_start(start_part));
        let end_bytes = geometry.start_of(last).saturating_add(geometry.part_start(end_part));
        // If other parts are copied as well, the request's own parts may be of any kind.
        let head = match start_part < geometry.part_of(offset) {
            true => Fill::Copy,
            false => self.fill_part(slice, offset, zeroed)?,
        };
        let tail = match end_part > self.parts_wanted(last, request_end) {
            true => Fill::Copy,
            false => self.fill_part(slice, end_bytes.saturating_sub(1), zeroed)?,
        };
        let behind = if zeroed { Fill::None } else { Fill::Zero };
        let (head, tail) = self.fillings(start, end_bytes, &(offset..request_end), head, tail, behind);
        Ok(Room { start, end: end_bytes, host, clusters: first..end, fresh, zeroed, head, tail })
    }

    /// Returns how many parts of a cluster a range touches that reaches the cluster and ends at `end`.
    fn parts_wanted(&self, cluster: u64, end: u64) -> u32 {
        let left = end.saturating_sub(self.geometry.start_of(cluster));
        match left >= self.geometry.cluster_bytes() {
            true => PARTS,
            false => self.geometry.part_of(left.saturating_sub(1)).saturating_add(1),
        }
    }

    /// Adjusts how the parts before and behind the request are filled. `behind` is for parts behind the end of the
    /// disk.
    fn fillings(&self, start: u64, end: u64, range: &Range<u64>, head: Fill, tail: Fill, behind: Fill) -> (Fill, Fill) {
        let head = if range.start == start { Fill::None } else { head };
        let tail = match tail {
            _ if range.end >= end => Fill::None,
            Fill::Copy if range.end >= self.geometry.size_bytes => behind,
            tail => tail,
        };
        (head, tail)
    }

    /// Returns how to fill the rest of the part that holds `offset` in its new place.
    fn fill_part(&self, slice: u64, offset: u64, zeroed: bool) -> Step<Fill> {
        let entry = self.extended(slice, self.geometry.cluster_of(offset))?;
        let zeros = if zeroed { Fill::None } else { Fill::Zero };
        Ok(match entry.part(self.geometry.part_of(offset)) {
            Part::Unallocated if self.geometry.has_backing => Fill::Copy,
            Part::Unallocated | Part::Zero => zeros,
            Part::Data | Part::Compressed => Fill::Copy,
        })
    }

    /// Publishes the parts of an allocation: the rest of `try_commit`.
    pub(crate) fn commit_parts(&self, state: &mut State, slice: u64, allocation: &Allocation) -> Step<()> {
        let geometry = &self.geometry;
        let skip = geometry.offset_in_cluster(allocation.guest_offset);
        let mut host = allocation.file_offset.checked_sub(skip).ok_or(IoError::EIO)?;
        let end = allocation.guest_offset.saturating_add(allocation.length_bytes);
        let mut old_hosts = Vec::new();
        for cluster in allocation.guest.clone() {
            let old = self.extended(slice, cluster)?;
            let first = if cluster == allocation.guest.start { geometry.part_of(skip) } else { 0 };
            let parts = mask(first, self.parts_wanted(cluster, end));
            // The data of the old host cluster have been copied.
            let alloc = if old.host() == Some(host) { old.alloc | parts } else { parts };
            let new = match allocation.without_data {
                true => old,
                false => Extended { alloc, zero: old.zero & !parts, ..old },
            };
            if old.host().is_some_and(|old| old != host) && old.alloc & !parts != 0 {
                return Err(Stop::Fail(IoError::EIO));
            }
            state.needs_order = true;
            self.set_extended(state, slice, cluster, host | COPIED, new.bitmap());
            let old_clusters = old.cluster.host_clusters(geometry);
            if !geometry.data_file && !old_clusters.is_empty() && old.host() != Some(host) {
                old_hosts.push(old_clusters);
            }
            host = host.checked_add(geometry.cluster_bytes()).ok_or(IoError::EIO)?;
        }
        self.unlink(state, old_hosts);
        Ok(())
    }

    /// Zeroes or discards the parts of a range, up to the end of a slice. The range begins and ends with whole parts.
    /// Compressed clusters that are covered only partly stay as they are. Returns where to go on.
    pub(crate) fn change_parts(&self, state: &mut State, range: Range<u64>, goal: Goal) -> Step<u64> {
        let geometry = &self.geometry;
        let first = geometry.cluster_of(range.start);
        let part_end = geometry.start_of(geometry.slice_end(first)).min(range.end);
        if (!geometry.has_backing || goal == Goal::Revealed)
            && self.table_or_complain(geometry.l1_index(first))?.is_none()
        {
            return Ok(geometry.start_of(geometry.table_end(first)).min(range.end));
        }
        let clusters = first..geometry.clusters_for(part_end);
        if let Some(busy) = state.overlapping(&clusters) {
            return Err(Stop::Need(Need::Idle(busy)));
        }
        let slice = self.own_slice(state, first)?;
        let mut changes = Vec::new();
        for cluster in clusters {
            let from = if cluster == first { geometry.part_of(range.start) } else { 0 };
            let old = self.extended(slice, cluster)?;
            let parts = mask(from, self.parts_wanted(cluster, part_end));
            if let Some((descriptor, bitmap)) = self.changed_parts(&old, parts, goal) {
                self.guard_entry(state, &old.cluster)?;
                changes.push((cluster, old, descriptor, bitmap));
            }
        }
        let mut freed: Vec<Range<u64>> = Vec::new();
        for (cluster, old, descriptor, bitmap) in changes {
            self.set_extended(state, slice, cluster, descriptor, bitmap);
            let hosts = old.cluster.host_clusters(geometry);
            match freed.last_mut() {
                _ if descriptor != 0 || hosts.is_empty() || geometry.data_file => {}
                Some(last) if last.end == hosts.start => last.end = hosts.end,
                _ => freed.push(hosts),
            }
        }
        self.unlink(state, freed);
        Ok(part_end)
    }

    /// Returns the new entry, or `None` if the old one will do.
    fn changed_parts(&self, old: &Extended, parts: u32, goal: Goal) -> Option<(u64, u64)> {
        if goal == Goal::Revealed {
            let says_something = old.cluster != Cluster::Unallocated || old.zero != 0;
            return (parts == u32::MAX && says_something).then_some((0, 0));
        }
        let shows_backing = self.geometry.has_backing;
        let zero_needed = shows_backing || goal != Goal::Discarded;
        let gone = if zero_needed { ALL_ZERO } else { 0 };
        let Cluster::Data { host, copied } = old.cluster else {
            return match old.cluster {
                Cluster::Compressed { .. } => (parts == u32::MAX).then_some((0, gone)),
                // A part that reads as zeros stays as it is.
                _ if !shows_backing => None,
                _ => {
                    let new = Extended { zero: old.zero | parts, ..*old };
                    (new != *old).then_some((0, new.bitmap()))
                }
            };
        };
        let new = Extended { alloc: old.alloc & !parts, zero: old.zero | parts, ..*old };
        let keeps = goal == Goal::Zeroed && (copied || self.geometry.data_file);
        if new.alloc == 0 && !keeps {
            // No part lies in the host cluster any more.
            let zero = if zero_needed { new.bitmap() } else { 0 };
            return Some((0, zero));
        }
        let flag = if copied || self.geometry.data_file { COPIED } else { 0 };
        (new != *old).then_some((host | flag, new.bitmap()))
    }
}

/// Returns the first part that a host cluster (or a compressed one) holds.
fn first_held(entry: &Extended) -> u32 {
    match entry.cluster {
        Cluster::Compressed { .. } => 0,
        _ => entry.alloc.trailing_zeros(),
    }
}

/// Returns the end of the last such part.
fn end_held(entry: &Extended) -> u32 {
    match entry.cluster {
        Cluster::Compressed { .. } => PARTS,
        _ => PARTS.saturating_sub(entry.alloc.leading_zeros()),
    }
}
