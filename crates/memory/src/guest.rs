//! A guest's memory: regions of its address space, mapped from files that its monitor (or driver) shares.

use crate::share::ShareOfMapping;
use crate::{Mapping, MappingShare, Segment};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use thiserror::Error;

/// The reason why an address could not be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MemoryError {
    /// The range lies in no region, or in several that are not adjacent.
    #[error("guest memory {address:#x}+{length_bytes:#x} is outside every shared region")]
    Outside {
        /// First address.
        address: u64,
        /// The length asked for, in bytes.
        length_bytes: u64,
    },
    /// Regions overlap or wrap around.
    #[error("memory region {address:#x}+{length_bytes:#x} overlaps another or wraps around")]
    BadRegion {
        /// First address.
        address: u64,
        /// The length in bytes.
        length_bytes: u64,
    },
}

/// A peer's description of one region.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct RegionSpec {
    /// Guest physical address of the first byte.
    pub guest_address: u64,
    /// Length in bytes.
    pub length_bytes: u64,
    /// Address of the same byte in the peer's own address space (vhost-user names rings by it).
    pub user_address: u64,
    /// Offset of the first byte in the file.
    pub file_offset: u64,
}

impl RegionSpec {
    /// Describes a region at the start of its file, whose addresses in the peer are the guest's.
    #[must_use]
    pub fn new(guest_address: u64, length_bytes: u64) -> Self {
        Self { guest_address, length_bytes, user_address: guest_address, file_offset: 0 }
    }

    /// Changes some fields: `RegionSpec::new(0, 1 << 20).with(|region| region.file_offset = 4096)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

fn impossible() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the region's length or offset is impossible")
}

/// Returns how far into its first page the region begins, and how many bytes its pages have. The kernel maps whole
/// pages, which are a gibibyte each in some files.
fn part_of_file(spec: &RegionSpec, file: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let page_bytes = crate::mapping::page_bytes_of(file)? as u64;
    let skip_bytes = spec.file_offset % page_bytes;
    let end = spec.length_bytes.checked_add(skip_bytes);
    let mapped_bytes = end.and_then(|end| end.checked_next_multiple_of(page_bytes)).ok_or_else(impossible)?;
    Ok((skip_bytes, mapped_bytes))
}

/// One mapped region.
#[derive(Debug, Clone)]
pub struct GuestRegion {
    guest_address: u64,
    user_address: u64,
    length_bytes: u64,
    /// Offset of the region in the mapping: the mapping starts at a page boundary of the file.
    skip_bytes: usize,
    mapping: Arc<Mapping>,
    /// Declared after the mapping, so it is given back when that is gone.
    _share: Option<Arc<ShareOfMapping>>,
}

impl GuestRegion {
    /// As [`GuestRegion::map`], within the peer's share.
    pub fn map_in(share: &Arc<MappingShare>, spec: RegionSpec, file: BorrowedFd<'_>) -> io::Result<Self> {
        let (_, mapped_bytes) = part_of_file(&spec, file)?;
        let taken = share.take(mapped_bytes)?;
        Ok(Self { _share: Some(Arc::new(taken)), ..Self::map(spec, file)? })
    }

    /// Maps the region that `spec` describes from `file`.
    pub fn map(spec: RegionSpec, file: BorrowedFd<'_>) -> io::Result<Self> {
        let (skip_bytes, _) = part_of_file(&spec, file)?;
        // Neither overflows: the whole pages around it do not.
        let (offset, length_bytes) = (spec.file_offset - skip_bytes, spec.length_bytes + skip_bytes);
        let mapping = Mapping::shared(file, offset, usize::try_from(length_bytes).map_err(|_| impossible())?)?;
        Self::of_mapping(spec, Arc::new(mapping), skip_bytes as usize).ok_or_else(impossible)
    }

    /// Keeps each page in memory from its first touch on. Needs room in the limit of locked memory, or the privilege.
    pub fn lock_touched(&self) -> io::Result<()> {
        self.mapping.lock_touched()
    }

    /// Makes a region in an existing mapping, from `skip_bytes` on; `None` if it does not fit.
    #[must_use]
    pub fn of_mapping(spec: RegionSpec, mapping: Arc<Mapping>, skip_bytes: usize) -> Option<Self> {
        let end = u64::try_from(skip_bytes).ok()?.checked_add(spec.length_bytes)?;
        spec.guest_address.checked_add(spec.length_bytes)?;
        spec.user_address.checked_add(spec.length_bytes)?;
        (end <= mapping.length_bytes() as u64 && spec.length_bytes > 0).then_some(Self {
            guest_address: spec.guest_address,
            user_address: spec.user_address,
            length_bytes: spec.length_bytes,
            skip_bytes,
            mapping,
            _share: None,
        })
    }

    /// Returns the guest physical address of the first byte.
    #[must_use]
    pub fn guest_address(&self) -> u64 {
        self.guest_address
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    /// Returns where the region starts in our address space, and its length in bytes.
    #[must_use]
    pub fn host_range(&self) -> (NonNull<u8>, usize) {
        // Checked against the mapping when the region was made.
        let length_bytes = usize::try_from(self.length_bytes).unwrap_or(0);
        let start = self.mapping.as_ptr().as_ptr().wrapping_add(self.skip_bytes);
        (NonNull::new(start).unwrap_or(self.mapping.as_ptr()), length_bytes)
    }

    #[inline]
    fn at(&self, base: u64, address: u64, length_bytes: u64) -> Option<NonNull<u8>> {
        // An address before the base wraps to one far behind the end.
        let skip = address.wrapping_sub(base);
        if skip > self.length_bytes.checked_sub(length_bytes)? {
            return None;
        }
        // The region lies inside the mapping, so both fit.
        NonNull::new(self.mapping.as_ptr().as_ptr().wrapping_add(self.skip_bytes).wrapping_add(skip as usize))
    }
}

/// A guest's address space. Immutable: a change of the map makes a new one, and each ring changes to it when its
/// requests in flight are done.
#[derive(Debug, Default)]
pub struct GuestMemory {
    regions: Vec<GuestRegion>,
}

impl GuestMemory {
    /// Makes an address space of these regions. Fails if they overlap.
    pub fn new(mut regions: Vec<GuestRegion>) -> Result<Self, MemoryError> {
        regions.sort_by_key(|region| region.guest_address);
        for pair in regions.windows(2) {
            let [low, high] = pair else { continue };
            // Cannot wrap: `of_mapping` checked it.
            if low.guest_address + low.length_bytes > high.guest_address {
                return Err(MemoryError::BadRegion { address: high.guest_address, length_bytes: high.length_bytes });
            }
        }
        Ok(Self { regions })
    }

    /// Returns the regions, sorted by address.
    #[must_use]
    pub fn regions(&self) -> &[GuestRegion] {
        &self.regions
    }

    /// Translates `length_bytes` at guest physical `address` to our address space. The range must lie in one region.
    /// `hint` is the index of the region found last (each ring keeps its own), and is updated.
    #[inline]
    pub fn translate(&self, address: u64, length_bytes: u64, hint: &mut usize) -> Result<NonNull<u8>, MemoryError> {
        match self.regions.get(*hint).and_then(|r| r.at(r.guest_address, address, length_bytes)) {
            Some(ptr) => Ok(ptr),
            None => self.translate_elsewhere(address, length_bytes, hint),
        }
    }

    #[cold]
    fn translate_elsewhere(
        &self,
        address: u64,
        length_bytes: u64,
        hint: &mut usize,
    ) -> Result<NonNull<u8>, MemoryError> {
        let outside = MemoryError::Outside { address, length_bytes };
        let (index, region) = self.region_at(address).ok_or_else(|| outside.clone())?;
        let ptr = region.at(region.guest_address, address, length_bytes).ok_or(outside)?;
        *hint = index;
        Ok(ptr)
    }

    /// Returns the region that holds the byte at guest physical `address`, and its index. A guest with hundreds of
    /// regions can name another one with each descriptor, so this is a binary search.
    #[must_use]
    pub fn region_at(&self, address: u64) -> Option<(usize, &GuestRegion)> {
        let index = self.regions.partition_point(|region| region.guest_address <= address).checked_sub(1)?;
        let region = self.regions.get(index)?;
        (address.wrapping_sub(region.guest_address) < region.length_bytes).then_some((index, region))
    }

    /// As [`GuestMemory::translate`], but returns a segment.
    #[inline]
    pub fn segment(&self, address: u64, length_bytes: u32, hint: &mut usize) -> Result<Segment, MemoryError> {
        let ptr = self.translate(address, u64::from(length_bytes), hint)?;
        Ok(Segment::new(ptr, length_bytes as usize))
    }

    /// Translates `length_bytes` at `address` of the peer's own address space (ring addresses) to ours.
    pub fn translate_user(&self, address: u64, length_bytes: u64) -> Result<NonNull<u8>, MemoryError> {
        let found = self.regions.iter().find_map(|r| r.at(r.user_address, address, length_bytes));
        found.ok_or(MemoryError::Outside { address, length_bytes })
    }

    /// Brings all pages into memory, which may take long. Skips pages that cannot be had.
    pub fn populate(&self) {
        for region in &self.regions {
            region.mapping.populate();
        }
    }

    /// Cuts this mapping off from the peer's memory. Then requests that were given up, because their storage hangs, can
    /// end later without harm: a read does not change the peer's memory, and a write that the kernel begins later fails
    /// (`EFAULT`). Pages that a device has pinned (direct I/O, registered memory) cannot be cut off. Our own accesses
    /// find zeros. The memory counts as poisoned. Returns whether it succeeded.
    #[must_use]
    pub fn fence(&self) -> bool {
        // Counted, so that every region is fenced, also those behind one that cannot be.
        self.regions.iter().filter(|region| !region.mapping.fence()).count() == 0
    }

    /// Whether the peer shrank a file under one of the regions (see [`crate::fault`]).
    #[must_use]
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_poisoned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    fn region(guest: u64, length: u64, file_offset: u64) -> GuestRegion {
        let (fd, _) = Mapping::anonymous_file(c"guest", 1 << 20).unwrap();
        let spec =
            RegionSpec { guest_address: guest, length_bytes: length, user_address: guest + (1 << 40), file_offset };
        GuestRegion::map(spec, fd.as_fd()).unwrap()
    }

    #[test]
    fn ranges_are_found_only_inside_one_region() {
        let memory = GuestMemory::new(vec![region(0x10000, 0x4000, 100), region(0, 0x1000, 0)]).unwrap();
        let mut hint = 0;
        assert!(memory.translate(0xfff, 1, &mut hint).is_ok());
        assert!(memory.translate(0x10000, 0x4000, &mut hint).is_ok());
        assert_eq!(hint, 1);
        for (address, length) in [(0xfff, 2), (0x1000, 1), (0x13fff, 2), (u64::MAX, 2), (0x10000, u64::MAX)] {
            assert!(memory.translate(address, length, &mut hint).is_err(), "{address:#x}+{length:#x}");
        }
        assert!(memory.translate_user(0x10000 + (1 << 40), 16).is_ok());
        assert!(memory.translate_user(0x10000, 16).is_err());
    }

    #[test]
    fn among_many_regions_each_byte_is_found_in_its_own() {
        let (_, mapping) = Mapping::anonymous_file(c"guest", 1 << 20).unwrap();
        let mapping = Arc::new(mapping);
        let spec = |index: u64| RegionSpec {
            guest_address: index * 0x3000,
            // Every third region touches the next one.
            length_bytes: if u64::is_multiple_of(index, 3) { 0x3000 } else { 0x1000 },
            user_address: 0,
            file_offset: 0,
        };
        let regions =
            (0..256).rev().map(|index| GuestRegion::of_mapping(spec(index), Arc::clone(&mapping), 0).unwrap());
        let memory = GuestMemory::new(regions.collect()).unwrap();
        for address in (0..257 * 0x3000).step_by(0x400) {
            let expected = (0..256).find(|index| {
                let spec = spec(*index);
                (spec.guest_address..spec.guest_address + spec.length_bytes).contains(&address)
            });
            assert_eq!(memory.region_at(address).map(|(index, _)| index as u64), expected, "{address:#x}");
            let mut hint = 7;
            assert_eq!(memory.translate(address, 0x400, &mut hint).is_ok(), expected.is_some(), "{address:#x}");
            assert_eq!(hint as u64, expected.unwrap_or(7), "{address:#x}");
        }
    }

    #[test]
    fn a_region_takes_whole_pages_of_its_peers_share() {
        let (small, _mapping) = Mapping::anonymous_file(c"small", 1 << 20).unwrap();
        let spec = RegionSpec::new(0, 2).with(|spec| spec.file_offset = 4095);
        assert_eq!(part_of_file(&spec, small.as_fd()).unwrap(), (4095, 8192));
        assert!(part_of_file(&RegionSpec::new(0, u64::MAX), small.as_fd()).is_err());
        // SAFETY: the name is a C string.
        let raw = unsafe { libc::memfd_create(c"huge".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_HUGETLB) };
        if raw < 0 {
            eprintln!("skipped: this kernel has no huge pages");
            return;
        }
        // SAFETY: the call above just made this descriptor and nobody else knows it.
        let huge = unsafe { OwnedFd::from_raw_fd(raw) };
        let (skip_bytes, mapped_bytes) = part_of_file(&RegionSpec::new(0, 1), huge.as_fd()).unwrap();
        assert!(skip_bytes == 0 && mapped_bytes >= 2 << 20, "{mapped_bytes}");
    }

    #[test]
    fn overlapping_regions_are_refused() {
        assert!(GuestMemory::new(vec![region(0, 0x2000, 0), region(0x1fff, 0x1000, 0)]).is_err());
    }
}
