//! The disk's serial number, asked for before any queue is open.

use crate::ring::Ring;
use crate::session::Session;
use block::Result;
use memory::{IoBuf, Mapping};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio::blk::{ID_BYTES, RequestHeader, Status, request_type};

/// Asks for the serial (GET_ID) on a ring that no queue uses yet.
pub(crate) fn read_serial(
    session: &Session,
    ring: &mut Ring,
    mapping: &Arc<Mapping>,
    timeout_ms: u64,
) -> Result<String> {
    ring.begin();
    if ring.push_bounce(ID_BYTES, 1, true) != ID_BYTES {
        return Ok(String::new());
    }
    let bounce = ring.next_bounce_offset().unwrap_or(0);
    let header = RequestHeader { kind: request_type::GET_ID, priority: 0, sector: 0 };
    let broken = |why: String| session.error(format!("reading its serial: {why}"));
    ring.start(header, 0, 0, ID_BYTES).map_err(|error| broken(error.to_string()))?;
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
            // Whatever it says, the ring is looked at again.
            let _ = poll(&mut fds, left.as_ref());
            let _ = rustix::io::read(&ring.fds.call, &mut [0; 8]);
        }
    };
    ring.disable_callbacks();
    ring.tell_progress();
    let mut id = [0; ID_BYTES];
    if let Some(buffer) = IoBuf::in_mapping(mapping, bounce, ID_BYTES, Box::new(())) {
        buffer.whole().copy_to_slice(0, &mut id);
    }
    ring.free_bounce(ended.head);
    if ended.status != Status::Ok {
        return Ok(String::new());
    }
    let text = id.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}
