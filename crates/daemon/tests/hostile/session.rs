//! One hostile monitor: right and wrong messages in any order, and rings in between, until it goes.

use super::dice::Dice;
use super::ground::{Ground, Ring};
use super::packed::PackedRequests;
use super::requests::Requests;
use super::wire::{MAX_FDS, NEEDS_REPLY, VERSION, Wire, code, words32, words64};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::net::{RecvFlags, recv};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

const GROUND_BYTES: u64 = 4 << 20;
const QUEUES: u32 = 2;

/// The feature that makes rings packed.
const RING_PACKED: u64 = 1 << 34;

/// A ring in a guest's hands.
pub(crate) trait Haunted {
    /// Sets it up and starts it.
    fn start(&mut self, wire: &Wire) -> io::Result<()>;

    /// Stops it and, mostly, sets it up again where it was.
    fn restart(&mut self, wire: &Wire, dice: &mut Dice) -> io::Result<()>;

    /// Offers some requests whose chains keep the rules, whatever they ask for. Returns how many.
    fn honest_burst(&mut self, ground: &Ground, dice: &mut Dice) -> u64;

    /// Waits until all have come back.
    fn await_all(&mut self, ground: &Ground);

    /// Breaks the rules of the ring in one way or another. Returns how many requests that were.
    fn break_rules(&mut self, ground: &Ground, dice: &mut Dice) -> u64;
}

/// What a run has done.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) sessions: u64,
    pub(crate) messages: u64,
    pub(crate) requests: u64,
    /// Guests with packed rings.
    pub(crate) packed: u64,
    /// Clients of NBD.
    pub(crate) nbd: u64,
}

/// A descriptor that has no business in the message that it comes with, or has.
fn any_fd(dice: &mut Dice, wire: &Wire, ground: &Ground) -> Option<OwnedFd> {
    let dev = |path: &str| File::open(path).ok().map(OwnedFd::from);
    match dice.below(14) {
        0..5 => eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok(),
        5 => eventfd(7, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).ok(),
        6 => ground.file.try_clone().ok(),
        7 => rustix::pipe::pipe().ok().map(|(reader, writer)| if dice.percent(50) { reader } else { writer }),
        8 => {
            let (near, far) = UnixStream::pair().ok()?;
            // Its queue holds our own end.
            let inside = Wire::over(near);
            let _ = inside.send_bytes(&[1], &[wire.stream().as_fd()]);
            Some(far.into())
        }
        9 => wire.stream().as_fd().try_clone_to_owned().ok(),
        10 => dev("/dev/null"),
        11 => dev("/"),
        12 => dev("/dev/zero"),
        _ => epoll::create(epoll::CreateFlags::CLOEXEC).ok(),
    }
}

/// A message's body as it could be, with any of its numbers wrong.
fn body(code: u32, dice: &mut Dice) -> Vec<u8> {
    let index = match dice.percent(80) {
        true => dice.below(u64::from(QUEUES)) as u32,
        false => dice.edge(u64::from(QUEUES)) as u32,
    };
    match code {
        code::SET_MEM_TABLE => {
            let count = dice.pick(&[0, 1, 1, 1, 2, 8, 9, 33, u32::MAX]);
            let mut body = words32(&[count, 0]);
            for _ in 0..count.min(9) {
                body.extend(region(dice));
            }
            body
        }
        code::ADD_MEM_REG | code::REM_MEM_REG => {
            let mut body = words64(&[0]);
            body.extend(region(dice));
            body
        }
        code::SET_VRING_NUM => words32(&[index, dice.pick(&[0, 1, 2, 3, 64, 128, 1024, 2048, 32768, u32::MAX])]),
        code::SET_VRING_BASE | code::GET_VRING_BASE => words32(&[index, dice.edge(0x1_0000) as u32]),
        code::SET_VRING_ENABLE => words32(&[index, dice.pick(&[0, 1, 1, 2, u32::MAX])]),
        code::SET_VRING_ADDR => {
            let mut body = words32(&[index, dice.pick(&[0, 0, 1, u32::MAX])]);
            body.extend(words64(&[dice.edge(GROUND_BYTES), dice.edge(0x1000), dice.edge(0x2000), dice.next()]));
            body
        }
        code::SET_VRING_KICK | code::SET_VRING_CALL | code::SET_VRING_ERR => {
            words64(&[u64::from(index & 0xff) | dice.pick(&[0, 0, 0, 1 << 8, u64::MAX << 9])])
        }
        code::SET_FEATURES => words64(&[dice.pick(&[0, 1 << 30, 1 << 32, dice.clone().next(), u64::MAX])]),
        code::SET_PROTOCOL_FEATURES => words64(&[dice.pick(&[0, 0xffff, 8, dice.clone().next()])]),
        code::GET_CONFIG | code::SET_CONFIG => {
            let size = dice.pick(&[0, 1, 8, 60, 256, 257, u32::MAX]);
            let mut body = words32(&[dice.edge(60) as u32, size, dice.below(4) as u32]);
            body.extend(dice.bytes(size.min(300) as usize));
            body
        }
        code::GET_INFLIGHT_FD | code::SET_INFLIGHT_FD => {
            let mut body = words64(&[dice.edge(4096), dice.edge(4096)]);
            body.extend(dice.bytes(8));
            body
        }
        _ => {
            let length = dice.pick(&[0, 0, 8, 8, 40, 4096]);
            dice.bytes(length)
        }
    }
}

fn region(dice: &mut Dice) -> Vec<u8> {
    let length = dice.pick(&[0, 1, 4096, 1 << 16, GROUND_BYTES, GROUND_BYTES + 4096, 1 << 46, u64::MAX]);
    let address = dice.pick(&[0, 0x1000, 1 << 20, 1 << 40, u64::MAX - 4095, dice.clone().next()]);
    words64(&[address, length, address, dice.pick(&[0, 0, 1, 4096, GROUND_BYTES, u64::MAX])])
}

/// Sends a message with whatever is wrong with it.
fn send_any(wire: &Wire, ground: &Ground, dice: &mut Dice) -> io::Result<()> {
    let code = match dice.percent(90) {
        true => dice.below(u64::from(code::END)) as u32,
        false => dice.next() as u32,
    };
    let mut body = body(code, dice);
    if dice.percent(5) {
        body.resize(dice.below(4200) as usize, 0xa5);
    }
    let flags = match dice.below(10) {
        0 => dice.next() as u32,
        1..5 => VERSION,
        _ => VERSION | NEEDS_REPLY,
    };
    let length = match dice.percent(3) {
        true => dice.edge(body.len() as u64) as u32,
        false => body.len() as u32,
    };
    let wants_fd = matches!(
        code,
        code::SET_MEM_TABLE
            | code::ADD_MEM_REG
            | code::SET_VRING_KICK
            | code::SET_VRING_CALL
            | code::SET_VRING_ERR
            | code::SET_BACKEND_REQ_FD
            | code::SET_INFLIGHT_FD
    );
    let count = match dice.below(20) {
        0 => dice.below(MAX_FDS as u64),
        1..3 => 2,
        3..6 => u64::from(!wants_fd),
        _ => u64::from(wants_fd),
    };
    let fds: Vec<OwnedFd> = (0..count).filter_map(|_| any_fd(dice, wire, ground)).collect();
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut bytes = words32(&[code, flags, length]);
    bytes.extend(body);
    wire.send_bytes(&bytes, &fds)?;
    drain(wire);
    Ok(())
}

/// Throws away answers that have come.
fn drain(wire: &Wire) {
    while recv(wire.stream(), &mut [0; 4096][..], RecvFlags::DONTWAIT).is_ok_and(|(_, length)| length > 0) {}
}

/// Waits for an answer that belongs to what is asked here, so that what follows is asked in step; false if the session has
/// ended.
fn is_alive(wire: &Wire) -> bool {
    if wire.send(code::GET_FEATURES, 0, &[], &[]).is_err() {
        return false;
    }
    // Answers to any messages may come before.
    std::iter::repeat_with(|| wire.answer()).map_while(Result::ok).any(|body| body.len() == 8)
}

/// Plays one session; `requests` of them at least, if it gets so far.
pub(crate) fn play(socket: &Path, disk_sectors: u64, dice: &mut Dice, requests: u64, tally: &mut Tally) {
    tally.sessions += 1;
    let Ok(wire) = Wire::connect(socket) else { return };
    let ground = Ground::new(GROUND_BYTES);
    match dice.below(8) {
        0 => {
            let length = dice.below(5000) as usize;
            let _ = wire.send_bytes(&dice.bytes(length), &[]);
        }
        1 | 2 => {
            for _ in 0..1 + dice.below(30) {
                tally.messages += 1;
                if send_any(&wire, &ground, dice).is_err() {
                    return;
                }
            }
        }
        _ => {
            // In the middle of anything, the peer may be gone.
            let _ = guest(&wire, &ground, disk_sectors, dice, requests, tally);
        }
    }
}

/// A monitor that begins well, and what its guest does.
fn guest(
    wire: &Wire,
    ground: &Ground,
    disk_sectors: u64,
    dice: &mut Dice,
    wanted: u64,
    tally: &mut Tally,
) -> io::Result<()> {
    let is_packed = dice.percent(40);
    tally.packed += u64::from(is_packed);
    let offered = wire.negotiate(if is_packed { 0 } else { RING_PACKED })?;
    assert!(!is_packed || offered & RING_PACKED != 0, "packed rings are not on offer");
    ground.share(wire)?;
    let size = dice.pick(&[8, 64, 128]);
    let mut queues: Vec<Box<dyn Haunted>> = Vec::new();
    for index in 0..QUEUES {
        let at = u64::from(index) * Ring::bytes(size);
        let mut queue: Box<dyn Haunted> = match is_packed {
            true => Box::new(PackedRequests::new(index, size, at, disk_sectors)),
            false => Box::new(Requests::new(Ring::new(index, size, at), disk_sectors)),
        };
        queue.start(wire)?;
        queues.push(queue);
    }
    let mut offered = 0;
    while offered < wanted {
        for queue in &mut queues {
            offered += queue.honest_burst(ground, dice);
        }
        if dice.percent(2) {
            // With requests in flight.
            break;
        }
        queues.iter_mut().for_each(|queue| queue.await_all(ground));
        if dice.percent(5) {
            tally.messages += 1;
            send_any(wire, ground, dice)?;
            // The rings may be anything by now.
            break;
        }
    }
    tally.requests += offered;
    for _ in 0..dice.below(6) {
        for queue in &mut queues {
            tally.requests += queue.break_rules(ground, dice);
        }
        match dice.below(4) {
            0 => restart(wire, &mut queues, dice)?,
            1 => {
                tally.messages += 1;
                send_any(wire, ground, dice)?;
            }
            2 if dice.percent(20) => {
                rustix::fs::ftruncate(&ground.file, dice.pick(&[0, 4096, 1 << 20]))?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Stops the rings and sets them up again where they were.
fn restart(wire: &Wire, queues: &mut [Box<dyn Haunted>], dice: &mut Dice) -> io::Result<()> {
    if !is_alive(wire) {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    queues.iter_mut().try_for_each(|queue| queue.restart(wire, dice))
}
