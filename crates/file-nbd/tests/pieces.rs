//! Requests that are longer than what is sent at once: a server gets several pieces before it answers any.

mod common;

use block::{File, FileOp, IoErrorKind, IoResult, PastEnd, block_on};
use common::{Fake, next_request, reply, shake_hands};
use memory::{AlignedBuf, BufferAccount, IoBuf};
use nbd_wire::numbers::{command, error, export};
use nbd_wire::request::Request;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MIB: usize = 1 << 20;
const LENGTH: usize = 16 * MIB;
/// A server that waits longer for a request leaves, and the client's request fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a server was asked: a command, an offset and a length.
type Asked = Arc<Mutex<Vec<(u16, u64, u64)>>>;

/// What the disk has at an offset.
fn mark(offset: u64) -> u8 {
    (offset >> 16) as u8 ^ (offset >> 9) as u8
}

fn marks(offset: u64, length: usize) -> Vec<u8> {
    (offset..offset + length as u64).map(mark).collect()
}

fn answer(stream: &mut UnixStream, request: &Request) {
    reply(stream, request.cookie, 0);
    if request.command == command::READ {
        let _ = stream.write_all(&marks(request.offset, request.length_bytes as usize));
    }
}

/// Answers a read or a write only when it has four of them, the last one first.
fn serve_in_fours(mut stream: UnixStream, asked: &Asked) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = shake_hands(&mut stream, export::SEND_FLUSH);
    let mut waiting = Vec::new();
    while let Some(request) = next_request(&mut stream).filter(|request| request.command != command::DISC) {
        asked.lock().unwrap().push((request.command, request.offset, request.length_bytes));
        let is_flush = request.command == command::FLUSH;
        waiting.push(request);
        if waiting.len() == 4 || is_flush {
            waiting.drain(..).rev().for_each(|request| answer(&mut stream, &request));
        }
    }
}

fn run(file: &Arc<dyn File>, op: FileOp) -> IoResult {
    block_on(file.open_blocking().unwrap().start(op))
}

fn write(file: &Arc<dyn File>, offset: u64) -> IoResult {
    let data = IoBuf::from_aligned(AlignedBuf::copy_of(&marks(offset, LENGTH))).whole();
    run(file, FileOp::Write { offset, data, fua: false })
}

/// The ranges of these requests are `LENGTH` bytes from `offset` on, each byte once.
fn assert_whole(asked: &[(u16, u64, u64)], command: u16, offset: u64) {
    assert!(asked.iter().all(|(what, ..)| *what == command), "{asked:?}");
    let mut ranges: Vec<_> = asked.iter().map(|(_, offset, length)| (*offset, offset + length)).collect();
    ranges.sort_unstable();
    let end = ranges.iter().fold(offset, |at, (start, end)| if *start == at { *end } else { u64::MAX });
    assert_eq!(end, offset + LENGTH as u64, "{ranges:?}");
}

#[test]
fn several_pieces_are_on_their_way_and_a_flush_comes_behind_all_of_them() {
    let asked = Asked::default();
    let seen = Arc::clone(&asked);
    let fake = Fake::start(move |_, stream| serve_in_fours(stream, &seen));
    let file = fake.open("&connections=1&reconnect-s=0", &BufferAccount::UNLIMITED);
    let taken = || std::mem::take(&mut *asked.lock().unwrap());
    for offset in [0, 512] {
        write(&file, offset).unwrap();
        run(&file, FileOp::Flush).unwrap();
        let mut asked = taken();
        assert_eq!(asked.pop().unwrap().0, command::FLUSH);
        assert_whole(&asked, command::WRITE, offset);
        assert_eq!(asked.len(), LENGTH / MIB);

        let data = IoBuf::zeroed(LENGTH).whole();
        run(&file, FileOp::Read { offset, data: data.clone(), past_end: PastEnd::Fails }).unwrap();
        assert!(data.to_vec() == marks(offset, LENGTH));
        assert_whole(&taken(), command::READ, offset);
    }
}

#[test]
fn a_write_with_a_piece_that_fails_ends_when_the_pieces_under_way_have() {
    let [received, answered] = [(); 2].map(|()| Arc::<AtomicUsize>::default());
    let (receives, answers) = (Arc::clone(&received), Arc::clone(&answered));
    let fake = Fake::start(move |_, mut stream| {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = shake_hands(&mut stream, export::SEND_FLUSH);
        let mut first = None;
        while let Some(request) = next_request(&mut stream).filter(|request| request.command != command::DISC) {
            if request.command == command::FLUSH {
                reply(&mut stream, request.cookie, 0);
                continue;
            }
            let cookie = *first.get_or_insert(request.cookie);
            if receives.fetch_add(1, Ordering::SeqCst) + 1 < 4 {
                continue;
            }
            reply(&mut stream, cookie, error::ENOSPC);
            // A write that does not wait for the others ends here.
            std::thread::sleep(Duration::from_millis(200));
            for later in 1..4 {
                answers.fetch_add(1, Ordering::SeqCst);
                reply(&mut stream, cookie + later, 0);
            }
        }
    });
    let file = fake.open("&connections=1&reconnect-s=0", &BufferAccount::UNLIMITED);
    assert_eq!(write(&file, 0).unwrap_err().kind(), IoErrorKind::NoSpace);
    assert_eq!(answered.load(Ordering::SeqCst), 3);
    // It comes behind any piece that was sent after the error.
    run(&file, FileOp::Flush).unwrap();
    assert_eq!(received.load(Ordering::SeqCst), 4);
}
