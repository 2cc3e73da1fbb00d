//! Many requests at a time, on one queue and on several.

use super::Guest;
use crate::dice::{Dice, mix};
use crate::model::{ModelDisk, stamped};
use crate::request::Request;
use crate::workload::{Workload, brief};
use block::IoErrorKind;

pub(super) fn one_queue_many_requests(guest: &mut Guest<'_>) -> Result<(), String> {
    many_requests(guest, 1)
}

pub(super) fn several_queues_many_requests(guest: &mut Guest<'_>) -> Result<(), String> {
    many_requests(guest, 4)
}

/// Checks a random workload against the model; afterwards every queue must see the same.
fn many_requests(guest: &mut Guest<'_>, queues: usize) -> Result<(), String> {
    while guest.queues.len() < queues {
        guest.open(guest.queues.len())?;
    }
    let info = guest.info();
    let span = info.size_bytes.min(1 << 18) / guest.block() * guest.block();
    let contents = guest.read(0, 0, span as usize)?;
    let mixes = guest.harness.overlapping_reads_mix();
    let mut model = ModelDisk::new(&contents, info.volatile_cache).with_mixed_reads(mixes);
    let granule = if queues == 1 { 4096 } else { 1 << 16 };
    let workload = Workload {
        depth: 8,
        block_bytes: guest.block(),
        first_tag: guest.next_tag,
        may_fail: !info.discard,
        ..Workload::new(mix(guest.seed, queues as u64), 400, span, granule)
    };
    guest.next_tag += workload.requests;
    let story = workload.run(guest.harness, &guest.queues, &mut model, &|| 0)?;
    for (request, error) in &story.errors {
        if !matches!(request, Request::Discard { .. }) || error.kind() != IoErrorKind::Unsupported {
            return Err(format!("{} failed: {error}", brief(request)));
        }
    }
    let settled = guest.read(0, 0, span as usize)?;
    model.check_live(&settled)?;
    for queue in 1..queues {
        guest.expect(queue, 0, &settled, "the same bytes seen from another queue")?;
    }
    Ok(())
}

pub(super) fn overlapping_writes_tear_no_sector(guest: &mut Guest<'_>) -> Result<(), String> {
    while guest.queues.len() < 3 {
        guest.open(guest.queues.len())?;
    }
    let block = guest.block();
    let mut dice = Dice::new(guest.seed);
    for round in 0..10 {
        let span = 64 * block;
        let base = round * span % (guest.info().size_bytes - span + 1) / block * block;
        let mut model = ModelDisk::new(&guest.read(0, base, span as usize)?, true);
        let mut tag = guest.next_tag;
        for _ in 0..24 {
            let first = dice.below(63);
            let (offset, length) = (first * block, (1 + dice.below(64 - first)) * block);
            let data: std::sync::Arc<[u8]> = stamped(tag, offset, length as usize).into();
            model.submit(tag, &Request::write(offset, std::sync::Arc::clone(&data)));
            let queue = dice.index(guest.queues.len());
            tag = guest.submit(queue, vec![Request::write(base + offset, data)]) + 1;
        }
        for reply in guest.drain()? {
            reply.result.map_err(|error| format!("an overlapping write failed: {error}"))?;
            model.complete(&reply)?;
        }
        let settled = guest.read(0, base, span as usize)?;
        model.check_live(&settled)?;
        for queue in 0..3 {
            guest.expect(queue, base, &settled, "settled bytes read again")?;
        }
    }
    Ok(())
}

/// Requests of a dropped queue may or may not happen, in whole sectors. Everything else goes on.
pub(super) fn a_queue_dropped_in_flight_harms_nobody(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block();
    let span = 32 * block;
    // One model for all rounds: requests of a dropped queue may still land rounds later.
    let mut model = ModelDisk::new(&guest.read(0, 0, span as usize)?, true);
    for round in 0..6 {
        let second = guest.open(1 + round as usize)?;
        let mut requests = Vec::new();
        for index in 0..8 {
            let (offset, id) = (index * 4 * block, guest.next_tag + index);
            let request = match (index + round) % 4 {
                0 => Request::Flush,
                1 => Request::read(offset, 4 * block as usize),
                _ => Request::write(offset, stamped(id, offset, 3 * block as usize)),
            };
            model.submit(id, &request);
            requests.push(request);
        }
        guest.submit(second, requests);
        for _ in 0..round {
            for (_, reply) in guest.harness.turn().replies {
                model.complete(&reply)?;
            }
        }
        let queue = guest.queues.remove(second);
        guest.harness.close(queue);
        // The other queue works at once, on sectors that no request in flight touches.
        let bytes = stamped(guest.next_tag, span, block as usize);
        guest.ok(0, Request::write(span, &bytes[..]))?;
        guest.ok(0, Request::Flush)?;
        guest.expect(0, span, &bytes, "a write beside a dropped queue")?;
        guest.harness.settle();
        // For the model, the write stays in flight for ever: old and new contents are allowed, nothing else.
        model.check_live(&guest.read(0, 0, span as usize)?)?;
    }
    Ok(())
}
