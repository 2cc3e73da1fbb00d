//! The requests to a damaged image, and the checks. Rings are in `chains` and `device`, the wire in `messages`.

use crate::disk::{Disk, MARK, file_of, storage_of};
use crate::golden;
use crate::mutate::{Tables, damage};
use crate::snapshot::{is_clean, is_dirty};
use arbitrary::{Result, Unstructured};
use block::OpFlags;
use image::{CheckEvent, Format, Repair};
use std::ops::Range;
use testkit::Request;

/// The most requests of one input.
const REQUESTS_MAX: usize = 24;
const REQUEST_BYTES_MAX: u64 = 20 << 10;

/// A part of the program that is fuzzed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Opening an image, for reading and for writing.
    Open,
    /// Reading.
    Read,
    /// Writing, zeroing, discarding, flushing.
    Write,
    /// Checking and repairing.
    Check,
    /// Taking, applying, deleting and listing snapshots.
    Snapshot,
    /// The index of a kept scratch overlay.
    Scratch,
    /// Descriptor chains of a ring, split or packed.
    Chains,
    /// The driver, with a device that does anything.
    Device,
    /// A vhost-user server, with a peer that sends anything.
    Messages,
    /// A control socket, with clients that send anything.
    Control,
    /// An NBD server's handshake, with a client that sends anything.
    NbdServer,
    /// The replies that an NBD client reads.
    NbdClient,
    /// An NBD server with a disk, with a client that asks for anything.
    NbdRequests,
    /// An NBD client with a file, with a server that answers anything.
    NbdAnswers,
}

impl Target {
    /// All targets.
    pub const ALL: [Self; 14] = [
        Self::Open,
        Self::Read,
        Self::Write,
        Self::Check,
        Self::Snapshot,
        Self::Scratch,
        Self::Chains,
        Self::Device,
        Self::Messages,
        Self::Control,
        Self::NbdServer,
        Self::NbdClient,
        Self::NbdRequests,
        Self::NbdAnswers,
    ];

    /// Returns the target's name on a command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Read => "read",
            Self::Write => "write",
            Self::Check => "check",
            Self::Snapshot => "snapshot",
            Self::Scratch => "scratch",
            Self::Chains => "chains",
            Self::Device => "device",
            Self::Messages => "messages",
            Self::Control => "control",
            Self::NbdServer => "nbd-server",
            Self::NbdClient => "nbd-client",
            Self::NbdRequests => "nbd-requests",
            Self::NbdAnswers => "nbd-answers",
        }
    }

    /// Finds a target by its name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|target| target.name() == name)
    }

    /// Runs one input. If it is too short, the rest counts as zeros.
    ///
    /// # Panics
    /// If something is wrong with the code under test.
    pub fn run(self, input: &[u8]) {
        let mut u = Unstructured::new(input);
        // An error only says that the input is used up; it does not come from the code under test.
        let _ = self.try_run(&mut u);
    }

    fn try_run(self, u: &mut Unstructured<'_>) -> Result<()> {
        match self {
            Self::Scratch => return crate::scratch::scratch(u),
            Self::Chains => return crate::chains::chains(u),
            Self::Device => return crate::device::device(u),
            Self::Messages => return crate::messages::messages(u),
            Self::Control => return crate::control_socket::control(u),
            Self::NbdServer => return crate::nbd::server(u),
            Self::NbdClient => return crate::nbd::client(u),
            Self::NbdRequests => return crate::nbd::requests::requests(u),
            Self::NbdAnswers => return crate::nbd::answers::answers(u),
            _ => {}
        }
        let mut bytes = u.choose(golden::images())?.clone();
        damage(&mut bytes, u)?;
        match self {
            Self::Open => open(&bytes),
            Self::Read => read(&bytes, u)?,
            Self::Write => write(&bytes, u)?,
            Self::Check => check(&bytes),
            Self::Snapshot => crate::snapshot::snapshot(&bytes, u)?,
            _ => {}
        }
        Ok(())
    }
}

fn open(bytes: &[u8]) {
    for read_only in [true, false] {
        let storage = storage_of(bytes);
        let opened = Disk::open_in(storage.clone(), read_only);
        let repairs = !read_only && is_dirty(bytes);
        let is_open = opened.is_ok();
        if let Ok(mut disk) = opened {
            disk.close();
        }
        let after = storage.bytes("image");
        match (repairs, is_open) {
            (true, true) => assert!(is_clean(&storage), "what was left dirty was opened and not repaired"),
            // The repair may have written to unused space before it ran out of room.
            (true, false) => {
                let same = |table: &Range<usize>| bytes.get(table.clone()) == after.get(table.clone());
                assert!(Tables::of(bytes).all().all(same), "a repair that was given up has changed a table");
            }
            (false, _) => assert!(after == bytes, "opening and closing has changed the file"),
        }
    }
    let storage = storage_of(bytes);
    drop(image::inspect("image", &file_of(&storage), None));
}

/// Makes an offset and a length, in sectors, near the existing data.
fn range(u: &mut Unstructured<'_>, size_bytes: u64) -> Result<(u64, u64)> {
    // A mutated header may say that the disk is huge.
    let near = if u.ratio(7u8, 8)? { size_bytes.min(128 << 10) } else { size_bytes };
    let offset = u.int_in_range(0..=near / 512)? * 512;
    Ok((offset, u.int_in_range(1..=REQUEST_BYTES_MAX / 512)? * 512))
}

fn read(bytes: &[u8], u: &mut Unstructured<'_>) -> Result<()> {
    let Ok(mut disk) = Disk::open(bytes, true) else { return Ok(()) };
    for _ in 0..u.int_in_range(1..=REQUESTS_MAX)? {
        let (offset, length) = range(u, disk.size_bytes())?;
        disk.ask(vec![Request::read(offset, length as usize)]);
    }
    disk.close();
    assert!(disk.bytes() == bytes, "reading has changed the file");
    Ok(())
}

fn request(u: &mut Unstructured<'_>, size_bytes: u64) -> Result<Request> {
    let (offset, length) = range(u, size_bytes)?;
    Ok(match u.int_in_range(0..=9)? {
        0..=4 => Request::write(offset, vec![MARK; length as usize]),
        5 => Request::WriteZeroes { offset, length, may_unmap: u.arbitrary()?, flags: OpFlags::NONE },
        6 => Request::Discard { offset, length },
        7 => Request::Flush,
        _ => Request::read(offset, length as usize),
    })
}

fn write(bytes: &[u8], u: &mut Unstructured<'_>) -> Result<()> {
    let Ok(mut disk) = Disk::open(bytes, false) else { return Ok(()) };
    // Opening may have repaired the image.
    let before = disk.bytes();
    let mut tables = Tables::of(&before).into_all();
    for _ in 0..u.int_in_range(1..=REQUESTS_MAX / 3)? {
        let together = u.int_in_range(1..=3)?;
        let requests = (0..together).map(|_| request(u, disk.size_bytes())).collect::<Result<Vec<_>>>()?;
        disk.ask(requests);
        assert_no_data_in(&mut tables, &before, &disk.bytes());
    }
    disk.close();
    assert_no_data_in(&mut tables, &before, &disk.bytes());
    Ok(())
}

/// Checks that no table of `before` that the file still uses holds the guest's data. Tables that have moved are no
/// longer watched: their place may be given to data.
fn assert_no_data_in(tables: &mut Vec<Range<usize>>, before: &[u8], after: &[u8]) {
    let used = Tables::of(after).into_all();
    tables.retain(|table| used.contains(table));
    for table in tables {
        let (Some(before), Some(now)) = (before.get(table.clone()), after.get(table.clone())) else { continue };
        for (index, (old, new)) in before.chunks(512).zip(now.chunks(512)).enumerate() {
            let is_guests = new.iter().all(|byte| *byte == MARK) && old != new;
            assert!(!is_guests, "the guest's data lies in the table at {:#x}, sector {index}", table.start);
        }
    }
}

fn check(bytes: &[u8]) {
    let storage = storage_of(bytes);
    let file = file_of(&storage);
    // The check is stopped after some reports: tables can claim very much.
    let mut events = 0u32;
    drop(image::check("image", &file, Some(Format::Qcow2), None, &mut |event| {
        events += u32::from(matches!(event, CheckEvent::Finding(_)));
        events < 10_000
    }));
    assert!(storage.bytes("image") == bytes, "checking has changed the file");
    let repair = || image::check("image", &file, Some(Format::Qcow2), Some(Repair::All), &mut |_| true);
    // If a repair reports that all is well, a second one must find nothing to do.
    if let Ok(first) = repair()
        && (first.corruptions, first.leaks, first.check_errors) == (0, 0, 0)
    {
        let second = repair();
        let done = second.as_ref().map(|second| (second.corruptions_fixed, second.leaks_fixed)).ok();
        assert!(done == Some((0, 0)), "{first:?}, and once more: {second:?}");
    }
}
