//! Questions to the device before any queue is open: the disk's serial number, and how worn its storage is.

use crate::ring::Ring;
use crate::session::Session;
use block::{Lifetime, Result};
use memory::{IoBuf, Mapping};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio::blk::{ID_BYTES, LIFETIME_BYTES, RequestHeader, Status, features, request_type};

/// Asks for the serial (GET_ID) on a ring that no queue uses yet.
pub(crate) fn read_serial(
    session: &Session,
    ring: &mut Ring,
    mapping: &Arc<Mapping>,
    timeout_ms: u64,
) -> Result<String> {
    let question = Question { name: "its serial", kind: request_type::GET_ID, timeout_ms };
    let Some(id) = question.ask::<ID_BYTES>(session, ring, mapping)? else { return Ok(String::new()) };
    let text = id.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}

/// Asks for the wear (GET_LIFETIME), if the device offers it.
pub(crate) fn read_lifetime(
    session: &Session,
    ring: &mut Ring,
    mapping: &Arc<Mapping>,
    timeout_ms: u64,
) -> Result<Option<Lifetime>> {
    if !session.has(features::LIFETIME) {
        return Ok(None);
    }
    let question = Question { name: "its wear", kind: request_type::GET_LIFETIME, timeout_ms };
    let answer = question.ask::<LIFETIME_BYTES>(session, ring, mapping)?;
    Ok(answer.map(|[a, b, c, d, e, f]| {
        let [end_of_life, worn_a, worn_b] = [[a, b], [c, d], [e, f]].map(u16::from_le_bytes);
        Lifetime { end_of_life, worn_a, worn_b }
    }))
}

struct Question {
    /// The name in messages.
    name: &'static str,
    /// Type of the request.
    kind: u32,
    timeout_ms: u64,
}

impl Question {
    /// Asks, and returns the answer; `None` if the device has none.
    fn ask<const BYTES: usize>(
        &self,
        session: &Session,
        ring: &mut Ring,
        mapping: &Arc<Mapping>,
    ) -> Result<Option<[u8; BYTES]>> {
        let Self { name, kind, timeout_ms } = *self;
        ring.begin();
        if ring.push_bounce(BYTES, 1, true) != BYTES {
            return Ok(None);
        }
        let bounce = ring.next_bounce_offset().unwrap_or(0);
        let header = RequestHeader { kind, priority: 0, sector: 0 };
        let broken = |why: String| session.error(format!("reading {name}: {why}"));
        ring.start(header, 0, 0, BYTES).map_err(|error| broken(error.to_string()))?;
        let until = Instant::now() + Duration::from_millis(timeout_ms);
        ring.publish();
        let ended = loop {
            if let Some(ended) = ring.pop().map_err(|error| broken(error.to_string()))? {
                break ended;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || session.is_gone() {
                return Err(broken(format!("no answer within {timeout_ms} ms")));
            }
            if !ring.enable_callbacks() {
                let mut fds = [PollFd::new(&ring.fds.call, PollFlags::IN)];
                let left = Timespec::try_from(left).ok();
                // Whatever the result, the ring is looked at again.
                let _ = poll(&mut fds, left.as_ref());
                let _ = rustix::io::read(&ring.fds.call, &mut [0; 8]);
            }
        };
        ring.disable_callbacks();
        ring.tell_progress();
        let mut answer = [0; BYTES];
        if let Some(buffer) = IoBuf::in_mapping(mapping, bounce, BYTES, Box::new(())) {
            buffer.whole().copy_to_slice(0, &mut answer);
        }
        ring.free_bounce(ended.head);
        Ok((ended.status == Status::Ok).then_some(answer))
    }
}
