//! The peer's memory: regions, added and removed by messages, and mapped into one address space for the rings.

use block::{Error, ErrorKind, Result};
use memory::{GuestMemory, GuestRegion, MappingShare, Placement, RegionSpec};
use rustix::fs::{FileType, fstat};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// The most regions of one peer. Each is a mapping of ours.
pub(crate) const MAX_REGIONS: usize = 256;

/// The most address space of one peer: an eighth of the total, so that several peers together do not use it up.
const MAX_BYTES: u64 = 8 << 40;

/// The rules for a peer's memory.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MemoryRules {
    pub(crate) placement: Placement,
    /// The most bytes of it, if there is a limit.
    pub(crate) max_bytes: Option<u64>,
}

/// The regions as the peer names them, and the resulting address space.
#[derive(Debug)]
pub(crate) struct MemoryTable {
    regions: Vec<(RegionSpec, GuestRegion)>,
    share: Arc<MappingShare>,
    rules: MemoryRules,
}

fn same(one: &RegionSpec, other: &RegionSpec) -> bool {
    // The file offset is not compared: a peer may remove a region without repeating it.
    (one.guest_address, one.length_bytes, one.user_address)
        == (other.guest_address, other.length_bytes, other.user_address)
}

fn place(spec: &RegionSpec) -> String {
    format!("{:#x}+{:#x} at file offset {:#x}", spec.guest_address, spec.length_bytes, spec.file_offset)
}

/// Checks that the region lies in a file that is long enough, or in a device. Other objects can be mapped, too, but may
/// keep other things alive: for example an io_uring in which the peer has registered its end of this session.
fn check_file(spec: &RegionSpec, file: &OwnedFd, placement: Placement) -> Result<()> {
    let stat = fstat(file).map_err(|error| Error::io("cannot look at a memory file of the peer's", error.into()))?;
    let end = spec.file_offset.checked_add(spec.length_bytes);
    let why = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile if end.is_some_and(|end| u64::try_from(stat.st_size).is_ok_and(|size| end <= size)) => {
            let refused = |error| Error::io(format!("the peer's memory region {} is not used", place(spec)), error);
            return placement.check(file.as_fd()).map_err(refused);
        }
        FileType::RegularFile => format!("is longer than its file of {:#x} bytes", stat.st_size),
        FileType::CharacterDevice => return Ok(()),
        _ => "does not lie in a file".into(),
    };
    Err(Error::new(ErrorKind::Protocol, format!("the peer's memory region {} {why}", place(spec))))
}

impl MemoryTable {
    /// Makes an empty table. Its memory will come from `share`, by these rules.
    pub(crate) fn new(share: &Arc<MappingShare>, rules: MemoryRules) -> Self {
        Self { regions: Vec::new(), share: Arc::clone(share), rules }
    }

    fn map(&self, spec: RegionSpec, file: &OwnedFd) -> Result<(RegionSpec, GuestRegion)> {
        check_file(&spec, file, self.rules.placement)?;
        let region = GuestRegion::map_in(&self.share, spec, file.as_fd())
            .map_err(|error| Error::io(format!("cannot map the peer's memory region {}", place(&spec)), error))?;
        if self.rules.placement == Placement::Locked {
            region.lock_touched().map_err(|error| {
                let what = "cannot keep in memory (guest-memory=locked; is the limit of locked memory, ulimit -l, high \
                            enough?) the peer's memory region";
                Error::io(format!("{what} {}", place(&spec)), error)
            })?;
        }
        Ok((spec, region))
    }

    /// Makes the table that replaces this one. Either all of it is mapped, or nothing changes.
    pub(crate) fn replaced_by(&self, regions: Vec<(RegionSpec, OwnedFd)>) -> Result<Self> {
        self.check_limits(regions.iter().map(|(spec, _)| spec))?;
        let regions = regions.into_iter().map(|(spec, file)| self.map(spec, &file)).collect::<Result<_>>()?;
        Ok(self.of(regions))
    }

    fn of(&self, regions: Vec<(RegionSpec, GuestRegion)>) -> Self {
        Self { regions, share: Arc::clone(&self.share), rules: self.rules }
    }

    /// Makes this table with one more region.
    pub(crate) fn with(&self, spec: RegionSpec, file: &OwnedFd) -> Result<Self> {
        self.check_limits(self.regions.iter().map(|(spec, _)| spec).chain([&spec]))?;
        let mut regions = self.regions.clone();
        regions.push(self.map(spec, file)?);
        Ok(self.of(regions))
    }

    /// Makes this table without a region.
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
        Ok(self.of(regions))
    }

    /// Returns the address space of all regions.
    pub(crate) fn address_space(&self) -> Result<Arc<GuestMemory>> {
        let regions = self.regions.iter().map(|(_, region)| region.clone()).collect();
        let memory = GuestMemory::new(regions);
        memory.map(Arc::new).map_err(|error| Error::with_source(ErrorKind::Protocol, "the peer's memory map", error))
    }

    fn check_limits<'a>(&self, regions: impl Iterator<Item = &'a RegionSpec>) -> Result<()> {
        let (mut count, mut bytes) = (0_usize, 0_u64);
        for region in regions {
            count = count.saturating_add(1);
            bytes = bytes.saturating_add(region.length_bytes);
        }
        let refused = |message: String| Err(Error::new(ErrorKind::Protocol, message));
        match self.rules.max_bytes.filter(|most| *most < MAX_BYTES) {
            _ if count > MAX_REGIONS => {
                refused(format!("the peer shares {count} memory regions, {MAX_REGIONS} are served"))
            }
            Some(most) if bytes > most => {
                refused(format!("the peer shares {bytes} bytes of memory, guest-memory-max allows {most}"))
            }
            None if bytes > MAX_BYTES => {
                refused(format!("the peer shares {bytes:#x} bytes of memory, {MAX_BYTES:#x} are served"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::Mapping;

    const FILE_BYTES: u64 = 1 << 20;

    fn table(specs: &[RegionSpec], file: &OwnedFd) -> Result<MemoryTable> {
        table_by(MemoryRules::default(), specs, file)
    }

    fn table_by(rules: MemoryRules, specs: &[RegionSpec], file: &OwnedFd) -> Result<MemoryTable> {
        let none = MemoryTable::new(&MappingShare::new().unwrap(), rules);
        none.replaced_by(specs.iter().map(|spec| (*spec, file.try_clone().unwrap())).collect())
    }

    fn region(index: u64, length_bytes: u64, file_offset: u64) -> RegionSpec {
        RegionSpec::new(index << 44, length_bytes).with(|region| region.file_offset = file_offset)
    }

    #[test]
    fn a_region_has_to_lie_in_its_file() {
        let (file, _mapping) = Mapping::anonymous_file(c"guest", FILE_BYTES as usize).unwrap();
        assert!(table(&[region(0, FILE_BYTES, 0), region(1, 4096, FILE_BYTES - 4096)], &file).is_ok());
        for (length_bytes, offset) in [(FILE_BYTES + 1, 0), (8192, FILE_BYTES - 4096), (4096, u64::MAX)] {
            let refused = table(&[region(0, length_bytes, offset)], &file).unwrap_err();
            assert!(refused.to_string().contains("longer than its file"), "{refused}");
        }
    }

    #[test]
    fn what_is_no_file_is_no_memory() {
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for fd in [epoll, OwnedFd::from(socket)] {
            let refused = table(&[region(0, 4096, 0)], &fd).unwrap_err();
            assert!(refused.to_string().contains("does not lie in a file"), "{refused}");
        }
    }

    #[test]
    fn one_peer_gets_only_its_share_of_the_address_space() {
        let (file, _mapping) = Mapping::anonymous_file(c"guest", FILE_BYTES as usize).unwrap();
        rustix::fs::ftruncate(&file, MAX_BYTES).unwrap();
        assert!(table(&[region(0, MAX_BYTES + 4096, 0)], &file).is_err());
        let half = table(&[region(0, MAX_BYTES / 2, 0)], &file).unwrap();
        let whole = half.with(region(1, MAX_BYTES / 2, 0), &file).unwrap();
        let refused = whole.with(region(2, 4096, 0), &file).unwrap_err();
        assert!(refused.to_string().contains("bytes of memory"), "{refused}");
        assert!(whole.without(&region(1, MAX_BYTES / 2, 0)).unwrap().with(region(2, 4096, 0), &file).is_ok());
    }

    #[test]
    fn memory_on_a_disk_is_refused_unless_it_is_allowed() {
        // The tree lies on a disk, the directory for temporary files perhaps not.
        let directory = env!("CARGO_MANIFEST_DIR");
        let file = OwnedFd::from(tempfile::tempfile_in(directory).unwrap());
        rustix::fs::ftruncate(&file, FILE_BYTES).unwrap();
        let by = |placement| {
            table_by(MemoryRules { placement, ..MemoryRules::default() }, &[region(0, FILE_BYTES, 0)], &file)
        };
        if Placement::Ram.check(file.as_fd()).is_ok() {
            eprintln!("skipped: {directory} lies in memory");
            return;
        }
        for placement in [Placement::Ram, Placement::Locked] {
            let refused = by(placement).unwrap_err();
            assert!(refused.to_string().contains("guest-memory=any"), "{refused}");
        }
        by(Placement::Any).unwrap();
    }

    #[test]
    fn memory_is_locked_or_refused_and_never_only_said_to_be() {
        let (file, _mapping) = Mapping::anonymous_file(c"guest", FILE_BYTES as usize).unwrap();
        let rules = MemoryRules { placement: Placement::Locked, ..MemoryRules::default() };
        // Whoever runs the tests may not be allowed to lock memory.
        let locked_kib = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
            line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap()
        };
        match table_by(rules, &[region(0, FILE_BYTES, 0)], &file) {
            Ok(table) => {
                assert!(locked_kib() >= FILE_BYTES >> 10);
                drop(table);
            }
            Err(refused) => assert!(refused.to_string().contains("ulimit -l"), "{refused}"),
        }
    }

    #[test]
    fn one_peer_shares_no_more_than_its_export_allows() {
        let (file, _mapping) = Mapping::anonymous_file(c"guest", FILE_BYTES as usize).unwrap();
        let rules = MemoryRules { max_bytes: Some(FILE_BYTES), ..MemoryRules::default() };
        let most = table_by(rules, &[region(0, FILE_BYTES / 2, 0), region(1, FILE_BYTES / 2, 0)], &file).unwrap();
        for refused in [
            most.with(region(2, 4096, 0), &file).unwrap_err(),
            table_by(rules, &[region(0, FILE_BYTES, 0), region(1, 1, 0)], &file).unwrap_err(),
        ] {
            assert!(refused.to_string().contains("guest-memory-max allows 1048576"), "{refused}");
        }
        assert!(most.without(&region(1, FILE_BYTES / 2, 0)).unwrap().with(region(2, 4096, 0), &file).is_ok());
    }
}
