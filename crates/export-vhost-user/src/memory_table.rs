//! The peer's memory: regions added and removed by message, mapped into one address space that rings use.

use block::{Error, ErrorKind, Result};
use memory::{GuestMemory, GuestRegion, RegionSpec};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Most regions of one peer. Each is a mapping of ours.
pub(crate) const MAX_REGIONS: usize = 256;

/// The regions as the peer names them, and the address space made of them.
#[derive(Debug, Default)]
pub(crate) struct MemoryTable {
    regions: Vec<(RegionSpec, GuestRegion)>,
}

fn same(one: &RegionSpec, other: &RegionSpec) -> bool {
    // The file offset is not compared: a peer may remove a region without repeating it.
    (one.guest_address, one.length_bytes, one.user_address)
        == (other.guest_address, other.length_bytes, other.user_address)
}

fn map(spec: RegionSpec, file: &OwnedFd) -> Result<(RegionSpec, GuestRegion)> {
    let region = GuestRegion::map(spec, file.as_fd()).map_err(|error| {
        let place = format!("{:#x}+{:#x}", spec.guest_address, spec.length_bytes);
        Error::io(format!("cannot map the peer's memory region {place} at file offset {:#x}", spec.file_offset), error)
    })?;
    Ok((spec, region))
}

impl MemoryTable {
    /// The table that replaces this one: all of it is mapped, or nothing changes.
    pub(crate) fn of(regions: Vec<(RegionSpec, OwnedFd)>) -> Result<Self> {
        check_count(regions.len())?;
        let regions = regions.into_iter().map(|(spec, file)| map(spec, &file)).collect::<Result<_>>()?;
        Ok(Self { regions })
    }

    /// This table with one region more.
    pub(crate) fn with(&self, spec: RegionSpec, file: &OwnedFd) -> Result<Self> {
        check_count(self.regions.len().saturating_add(1))?;
        let mut regions = self.regions.clone();
        regions.push(map(spec, file)?);
        Ok(Self { regions })
    }

    /// This table without a region.
    pub(crate) fn without(&self, spec: &RegionSpec) -> Result<Self> {
        let mut regions = self.regions.clone();
        let Some(index) = regions.iter().position(|(other, _)| same(other, spec)) else {
            let place = format!("{:#x}+{:#x}", spec.guest_address, spec.length_bytes);
            return Err(Error::new(
                ErrorKind::Protocol,
                format!("the peer removes memory {place}, which it never added"),
            ));
        };
        regions.swap_remove(index);
        Ok(Self { regions })
    }

    /// The address space of all regions.
    pub(crate) fn address_space(&self) -> Result<Arc<GuestMemory>> {
        let regions = self.regions.iter().map(|(_, region)| region.clone()).collect();
        let memory = GuestMemory::new(regions);
        memory.map(Arc::new).map_err(|error| Error::with_source(ErrorKind::Protocol, "the peer's memory map", error))
    }
}

fn check_count(count: usize) -> Result<()> {
    match count <= MAX_REGIONS {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::Protocol,
            format!("the peer shares {count} memory regions, {MAX_REGIONS} are served"),
        )),
    }
}
