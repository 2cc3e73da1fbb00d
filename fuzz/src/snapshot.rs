//! Snapshots of a damaged image: taken, applied, deleted, listed.

use crate::disk::{Disk, file_of, storage_of};
use crate::mutate::Tables;
use arbitrary::{Result, Unstructured};
use block::IoResult;
use image::{Edit, Format, NewSnapshot, SnapshotName};
use testkit::{Request, SimStorage};

const STEPS_MAX: usize = 5;
/// The most reports before a check is stopped: tables can claim very much.
const TOLD_MAX: u32 = 10_000;
const READ_BYTES: usize = 96 << 10;

pub(crate) fn snapshot(bytes: &[u8], u: &mut Unstructured<'_>) -> Result<()> {
    let storage = storage_of(bytes);
    for _ in 0..u.int_in_range(1..=STEPS_MAX)? {
        step(&storage, &edit(u)?);
    }
    Ok(())
}

fn edit(u: &mut Unstructured<'_>) -> Result<Edit> {
    // Snapshots of the golden image, and those that are taken here.
    let which = |u: &mut Unstructured<'_>| Ok(SnapshotName::Any((*u.choose(&["1", "2", "3", "new", ""])?).to_owned()));
    Ok(match u.int_in_range(0..=2)? {
        0 => Edit::CreateSnapshot(NewSnapshot::new("new".to_owned()).with(|options| {
            options.date_seconds = 1;
            options.date_nanoseconds = 2;
        })),
        1 => Edit::ApplySnapshot(which(u)?),
        _ => Edit::DeleteSnapshot(which(u)?),
    })
}

fn step(storage: &SimStorage, edit: &Edit) {
    let before = storage.bytes("image");
    let (was_clean, listed) = (is_clean(storage), list(storage));
    let mut told = 0;
    let mut watch = |_, _| {
        told += 1;
        told < TOLD_MAX
    };
    let done = image::edit("image", &file_of(storage), Some(Format::Qcow2), edit, &mut watch);
    let after = storage.bytes("image");
    if done.is_err() && !is_dirty(&before) {
        for table in Tables::of(&before).all() {
            assert!(before.get(table.clone()) == after.get(table.clone()), "{edit:?} failed and changed {table:x?}");
        }
    }
    if let (Ok(()), Some(before), Some(after)) = (&done, listed, list(storage)) {
        let expected = match edit {
            Edit::CreateSnapshot(_) => before + 1,
            Edit::ApplySnapshot(_) => before,
            Edit::DeleteSnapshot(_) => before - 1,
        };
        assert_eq!(after, expected, "{edit:?}");
    }
    if was_clean && is_clean(&longer(&before, after.len())) {
        assert!(is_clean(storage), "{edit:?} ({done:?}) has damaged a good image");
        if done.is_err() || !matches!(edit, Edit::ApplySnapshot(_)) {
            assert!(contents(&before) == contents(&after), "{edit:?} ({done:?}) has changed the disk");
        }
    }
}

/// Extends the image's file: references behind the file's end were no leaks before.
fn longer(bytes: &[u8], length: usize) -> SimStorage {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().max(length), 0);
    storage_of(&bytes)
}

/// Whether a check finds no error.
pub(crate) fn is_clean(storage: &SimStorage) -> bool {
    let mut told = 0;
    let mut watch = |_| {
        told += 1;
        told < TOLD_MAX
    };
    let report = image::check("image", &file_of(storage), Some(Format::Qcow2), None, &mut watch);
    report.is_ok_and(|report| (report.corruptions, report.leaks, report.check_errors) == (0, 0, 0))
}

/// Whether an image says that its refcounts are stale: the next writer repairs them.
pub(crate) fn is_dirty(bytes: &[u8]) -> bool {
    bytes.get(7) == Some(&3) && bytes.get(79).is_some_and(|byte| byte & 1 != 0)
}

/// Returns the number of snapshots.
fn list(storage: &SimStorage) -> Option<usize> {
    let found = image::inspect("image", &file_of(storage), Some(Format::Qcow2));
    found.ok().map(|description| description.snapshots.len())
}

/// Returns the data that the guest reads at the start of its disk.
fn contents(bytes: &[u8]) -> Option<Vec<(IoResult, Vec<u8>)>> {
    let mut disk = Disk::open(bytes, true).ok()?;
    let length = usize::try_from(disk.size_bytes()).map_or(READ_BYTES, |size| size.min(READ_BYTES));
    let replies = (length > 0).then(|| disk.ask(vec![Request::read(0, length)]));
    disk.close();
    Some(replies.unwrap_or_default().into_iter().map(|reply| (reply.result, reply.data)).collect())
}
