//! What a client of NBD says: mostly what it may, some of what it should not.

use super::peer::Told;
use arbitrary::{Result, Unstructured};
use block::SECTOR_BYTES;
use nbd_wire::numbers::{BASE_ALLOCATION, command, command_flag, option};
use nbd_wire::option::{InfoRequest, MetaRequest, put_option};
use nbd_wire::request::Request;
use std::collections::BTreeMap;

/// The part of the disk that most requests are about.
pub(crate) const SIZE_BYTES: u64 = 256 << 10;
const REQUESTS_MAX: usize = 32;
/// The longest payload that is really sent.
const PAYLOAD_BYTES_MAX: u64 = 48 << 10;

pub(crate) fn range(offset: u64, length: u64) -> std::ops::Range<usize> {
    offset as usize..(offset + length) as usize
}

/// Puts an option that is right, or nearly right.
pub(crate) fn put_any_option(u: &mut Unstructured<'_>, out: &mut Vec<u8>) -> Result<()> {
    let name: &[u8] = match u.int_in_range(0..=2)? {
        0 => b"",
        1 => b"one",
        _ => u.arbitrary()?,
    };
    let known = [
        option::EXPORT_NAME,
        option::ABORT,
        option::LIST,
        option::STARTTLS,
        option::INFO,
        option::GO,
        option::STRUCTURED_REPLY,
        option::LIST_META_CONTEXT,
        option::SET_META_CONTEXT,
        option::EXTENDED_HEADERS,
    ];
    let kind = if u.ratio(15u8, 16)? { *u.choose(&known)? } else { u.arbitrary()? };
    let data = match u.int_in_range(0..=4)? {
        0 => Vec::new(),
        1 => InfoRequest { name, wanted: u.arbitrary()? }.to_bytes(),
        2 => MetaRequest { name, queries: vec![BASE_ALLOCATION.as_bytes(), u.arbitrary()?] }.to_bytes(),
        3 => name.to_vec(),
        _ => u.arbitrary()?,
    };
    put_option(out, kind, &data);
    // Some byte of it is changed.
    if u.ratio(1u8, 4)? {
        let at = u.choose_index(out.len())?;
        out[at] = u.arbitrary()?;
    }
    Ok(())
}

/// A client's messages, and the expected results.
pub(crate) struct Talk {
    pub(crate) bytes: Vec<u8>,
    pub(crate) asked: Vec<Request>,
    payloads: BTreeMap<u64, Vec<u8>>,
    /// The messages keep to the protocol.
    pub(crate) is_right: bool,
}

fn offset(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=7)? {
        0 => u.arbitrary()?,
        1 => SIZE_BYTES - u.int_in_range(0..=SECTOR_BYTES)?,
        2 => u.int_in_range(0..=SIZE_BYTES)?,
        _ => u.int_in_range(0..=SIZE_BYTES / SECTOR_BYTES - 1)? * SECTOR_BYTES,
    })
}

fn length(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=9)? {
        0 => u.arbitrary()?,
        1 => u.int_in_range(0..=SIZE_BYTES)?,
        2 => u.int_in_range(0..=PAYLOAD_BYTES_MAX)?,
        _ => u.int_in_range(0..=PAYLOAD_BYTES_MAX / SECTOR_BYTES)? * SECTOR_BYTES,
    })
}

impl Talk {
    pub(crate) fn plan(u: &mut Unstructured<'_>, extended: bool) -> Result<Self> {
        let mut talk = Self { bytes: Vec::new(), asked: Vec::new(), payloads: BTreeMap::new(), is_right: true };
        for cookie in 0..u.int_in_range(1..=REQUESTS_MAX)? as u64 {
            talk.ask(u, extended, cookie)?;
        }
        if u.ratio(1u8, 4)? {
            // Some byte is changed, or the end is not sent.
            talk.is_right = false;
            let at = u.choose_index(talk.bytes.len())?;
            match u.arbitrary()? {
                true => talk.bytes[at] = u.arbitrary()?,
                false => talk.bytes.truncate(at),
            }
        }
        let goodbye = Request { flags: 0, command: command::DISC, cookie: u64::MAX, offset: 0, length_bytes: 0 };
        goodbye.put(&mut talk.bytes, extended);
        Ok(talk)
    }

    fn ask(&mut self, u: &mut Unstructured<'_>, extended: bool, cookie: u64) -> Result<()> {
        use command::{BLOCK_STATUS, CACHE, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};
        use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
        let command = match u.ratio(1u8, 24)? {
            true => u.arbitrary()?,
            false => *u.choose(&[READ, WRITE, READ, WRITE, FLUSH, TRIM, CACHE, WRITE_ZEROES, BLOCK_STATUS])?,
        };
        let flags = match u.int_in_range(0..=11)? {
            0 => u.arbitrary()?,
            1..=3 => *u.choose(&[DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE])?,
            _ => 0,
        };
        let (offset, mut length_bytes) = (offset(u)?, length(u)?);
        if !extended {
            length_bytes &= u64::from(u32::MAX);
        }
        let request = Request { flags, command, cookie, offset, length_bytes };
        request.put(&mut self.bytes, extended);
        let has_payload = command == WRITE || extended && flags & PAYLOAD_LEN != 0;
        if has_payload && length_bytes <= PAYLOAD_BYTES_MAX {
            let payload = vec![u.arbitrary()?; length_bytes as usize];
            self.bytes.extend_from_slice(&payload);
            self.payloads.insert(cookie, payload);
        }
        // The bytes that follow are not understood, or none follow.
        self.is_right &= !(has_payload && length_bytes > PAYLOAD_BYTES_MAX) && command != command::DISC;
        self.asked.push(request);
        Ok(())
    }

    /// Carries out the requests that the server says it has carried out, in order.
    pub(crate) fn check(&self, told: &BTreeMap<u64, Told>, found: &[u8]) {
        let mut bytes = vec![0; SIZE_BYTES as usize];
        for request in &self.asked {
            let Request { command, cookie, offset, length_bytes, flags } = *request;
            let Some(told) = told.get(&cookie) else { panic!("{request:?} has no reply") };
            assert!(told.is_done, "the reply to {request:?} does not end");
            let is_inside = offset.checked_add(length_bytes).is_some_and(|end| end <= SIZE_BYTES);
            if told.error != 0 {
                let is_whole = (offset | length_bytes) % SECTOR_BYTES == 0;
                let is_plain = matches!(command, command::READ | command::WRITE | command::TRIM | command::CACHE);
                let must = is_plain && flags == 0 && is_inside && is_whole && length_bytes <= PAYLOAD_BYTES_MAX;
                assert!(!must, "{request:?} fails with {}", told.error);
                continue;
            }
            assert!(is_inside || command == command::FLUSH, "{request:?} outside succeeds");
            match command {
                command::READ => {
                    assert_eq!(told.data.len() as u64, length_bytes, "{request:?}");
                    assert!(length_bytes == 0 || told.data == bytes[range(offset, length_bytes)], "{request:?}");
                }
                command::WRITE if length_bytes > 0 => {
                    bytes[range(offset, length_bytes)].copy_from_slice(&self.payloads[&cookie]);
                }
                command::WRITE_ZEROES if length_bytes > 0 => bytes[range(offset, length_bytes)].fill(0),
                command::TRIM => {
                    let start = offset.next_multiple_of(SECTOR_BYTES);
                    let end = (offset + length_bytes) / SECTOR_BYTES * SECTOR_BYTES;
                    if start < end {
                        bytes[range(start, end - start)].fill(0);
                    }
                }
                _ => {}
            }
        }
        assert_eq!(told.len(), self.asked.len(), "a reply to nothing");
        assert!(bytes == found, "the disk has other bytes than were written");
    }
}
