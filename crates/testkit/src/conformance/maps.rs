//! Access without operations. A disk may provide no maps, but those that it provides must be right.

use super::Guest;
use crate::model::stamped;
use crate::request::Request;
use block::{IoResult, OpFlags, ReadMap, WriteMap};

/// Ranges in blocks: whole pages and clusters, parts of them, and ranges across their ends.
const RANGES: [(u64, u64); 7] = [(0, 8), (8, 16), (3, 1), (7, 2), (13, 37), (32, 64), (0, 120)];

/// Returns how many bytes at the start of the disk the ranges need; `None` if the disk is smaller.
fn span(guest: &Guest<'_>) -> Option<usize> {
    let bytes = 128 * guest.block();
    (bytes <= guest.info().size_bytes).then_some(bytes as usize)
}

/// The number of tries to map a range again after the disk's layers changed.
const TRIES: u32 = 1000;

/// Compares a map of a range with a read of it.
fn shows(guest: &mut Guest<'_>, offset: u64, length: usize, what: &str) -> Result<(), String> {
    let expected = guest.read(0, offset, length)?;
    let wrong = |how: String| format!("{what}: the map of {offset}+{length} {how}");
    let mut ended = None;
    for _ in 0..TRIES {
        let Some(map) = guest.disk.map_read(offset, length) else { return Ok(()) };
        if map.length_bytes() != length {
            return Err(wrong(format!("has {} bytes", map.length_bytes())));
        }
        if map.read_at(length, &mut [0]).is_ok() {
            return Err(wrong("shows what is behind its end".to_owned()));
        }
        match contents(&map).and_then(|found| map.commit().map(|()| found)) {
            Ok(found) => {
                let differs = |(found, wanted): (&u8, &u8)| found != wanted;
                let Some(at) = found.iter().zip(&expected).position(differs) else { return Ok(()) };
                return Err(wrong(format!("shows {:#04x} at byte {at}, not {:#04x}", found[at], expected[at])));
            }
            Err(error) => ended = Some(error),
        }
    }
    Err(wrong(format!("always ends: {ended:?}")))
}

/// Reads a map in odd parts.
fn contents(map: &ReadMap) -> IoResult<Vec<u8>> {
    let mut found = vec![0xa5; map.length_bytes()];
    for (skip, part) in (0..).step_by(700).zip(found.chunks_mut(700)) {
        map.read_at(skip, part)?;
    }
    Ok(found)
}

pub(super) fn maps_show_what_is_read(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block();
    let Some(span) = span(guest) else { return Ok(()) };
    let image = stamped(1, 0, span);
    for (offset, length) in RANGES.map(|(first, count)| (first * block, (count * block) as usize)) {
        shows(guest, offset, length, "before anything was written")?;
        guest.ok(0, Request::write(offset, &image[offset as usize..][..length]))?;
        shows(guest, offset, length, "of what was just written")?;
        shows(guest, 0, span, "of much more")?;
    }
    guest.ok(0, Request::Flush)?;
    let zeroes = Request::WriteZeroes { offset: 9 * block, length: 30 * block, may_unmap: true, flags: OpFlags::NONE };
    guest.ok(0, zeroes)?;
    shows(guest, 0, span, "with zeros inside")?;
    if guest.info().discard {
        guest.ok(0, Request::Discard { offset: 50 * block, length: 60 * block })?;
        shows(guest, 0, span, "with something given back")?;
    }
    guest.ok(0, Request::write(60 * block, &image[..9 * block as usize]))?;
    shows(guest, 0, span, "with a write into what was given back")?;
    let size = guest.info().size_bytes;
    shows(guest, size - block, block as usize, "at the end")?;
    for (offset, length) in [(size, block), (size - block, 2 * block), (u64::MAX, block), (u64::MAX - 511, 512)] {
        if guest.disk.map_read(offset, length as usize).is_some() {
            return Err(format!("a map shows {offset}+{length}, which the disk does not have"));
        }
        if let Some(map) = guest.disk.map_write(offset, length as usize) {
            return Err(format!("{map:?} was given, which the disk does not have"));
        }
    }
    Ok(())
}

/// Makes a map of new bytes, in the disk's space if it gives some.
fn new_bytes(guest: &Guest<'_>, offset: u64, bytes: &[u8]) -> Result<WriteMap, String> {
    let given = guest.disk.map_write(offset, bytes.len());
    let mut map = given.unwrap_or_else(|| WriteMap::in_memory(offset, bytes.len()));
    let mut first = vec![0xa5; bytes.len()];
    map.read_at(0, &mut first).map_err(|error| format!("{map:?}: {error}"))?;
    if first.iter().any(|byte| *byte != 0) {
        return Err(format!("{map:?} begins with something else than zeros"));
    }
    map.write_at(0, bytes).map_err(|error| format!("{map:?}: {error}"))?;
    Ok(map)
}

pub(super) fn a_cancelled_map_was_never_there(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block();
    let Some(span) = span(guest) else { return Ok(()) };
    let other = guest.open(1)?;
    let image = stamped(1, 0, span);
    guest.ok(0, Request::write(16 * block, &image[16 * block as usize..]))?;
    let before = guest.read(0, 0, span)?;
    let mut maps = Vec::new();
    for round in 0..3_u64 {
        for (offset, length) in RANGES.map(|(first, count)| (first * block, (count * block) as usize)) {
            maps.push(new_bytes(guest, offset, &stamped(7 + round, offset, length))?);
            for queue in [0, other] {
                guest.expect(queue, 0, &before, "while new bytes are put together")?;
            }
            shows(guest, 0, span, "while new bytes are put together")?;
        }
        // Dropped one after the other, in another order than they were made.
        while !maps.is_empty() {
            drop(maps.swap_remove(maps.len() / 2));
        }
        for queue in [0, other] {
            guest.expect(queue, 0, &before, "after a cancel")?;
        }
    }
    Ok(())
}

pub(super) fn a_committed_map_is_seen_by_all(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block();
    let Some(span) = span(guest) else { return Ok(()) };
    let other = guest.open(1)?;
    let mut image = guest.read(0, 0, span)?;
    for (id, (first, count)) in RANGES.into_iter().chain(RANGES).enumerate() {
        let (offset, length) = (first * block, (count * block) as usize);
        let bytes = stamped(20 + id as u64, offset, length);
        guest.ok(id % 2 * other, Request::WriteByMap { offset, data: bytes[..].into() })?;
        image[offset as usize..][..length].copy_from_slice(&bytes);
        for queue in [other, 0] {
            guest.expect(queue, 0, &image, "after a commit")?;
        }
        shows(guest, 0, span, "after a commit")?;
        // Bytes that the disk took over can be overwritten like all others.
        let over = stamped(60 + id as u64, offset, block as usize);
        guest.ok(other, Request::write(offset, &over[..]))?;
        image[offset as usize..][..over.len()].copy_from_slice(&over);
        guest.expect(0, 0, &image, "after a write over it")?;
    }
    guest.ok(0, Request::Flush)?;
    guest.expect(0, 0, &image, "after a flush")
}

pub(super) fn a_read_only_disk_gives_no_space(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block();
    let Some(span) = span(guest) else { return Ok(()) };
    shows(guest, 0, span, "of a read-only disk")?;
    for (offset, length) in RANGES.map(|(first, count)| (first * block, (count * block) as usize)) {
        if let Some(map) = guest.disk.map_write(offset, length) {
            return Err(format!("{map:?} was given"));
        }
    }
    let data = vec![1; 8 * block as usize].into();
    let before = guest.read(0, 0, 8 * block as usize)?;
    guest.refused(Request::WriteByMap { offset: 0, data }, block::IoErrorKind::ReadOnly)?;
    guest.expect(0, 0, &before, "after a commit that was refused")
}
