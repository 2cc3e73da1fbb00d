//! Servers that do what a server should not: they answer nothing, answer late, or leave again and again.

mod common;

use block::{File, FileOp, FileQueue, IoResult, PastEnd, block_on};
use common::{Fake, SIZE_BYTES, exactly, next_request, reply, shake_hands, shake_hands_as_long_as, shake_hands_with};
use memory::{AlignedBuf, BufferAccount, BufferBudget, IoBuf};
use nbd_wire::numbers::{chunk, command, error, export, option};
use nbd_wire::reply::Chunk;
use nbd_wire::request::Request;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

fn write_mib(file: &Arc<dyn File>, index: u64) -> IoResult {
    let queue: Rc<dyn FileQueue> = file.open_blocking().unwrap();
    let data = IoBuf::from_aligned(AlignedBuf::copy_of(&vec![1; MIB])).whole();
    block_on(queue.start(FileOp::Write { offset: index * MIB as u64, data, fua: false }))
}

/// Waits until it is so; false if it does not become so.
fn becomes(is_so: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    is_so()
}

#[test]
fn requests_to_a_server_that_does_not_answer_wait_for_room() {
    let fake = Fake::start(|_, mut stream| {
        let _ = shake_hands(&mut stream, export::SEND_FLUSH);
        while next_request(&mut stream).is_some() {}
    });
    let budget = BufferBudget::new(4 * MIB);
    let file = fake.open("", &budget.account());
    std::thread::scope(|scope| {
        for index in 0..64 {
            let file = &file;
            scope.spawn(move || assert!(write_mib(file, index).is_err()));
        }
        let wait = becomes(|| budget.stats().waiting + budget.stats().used_bytes / MIB == 64);
        // All get an error, and give back what they have.
        file.cancel();
        assert!(wait, "some requests neither wait nor have room");
    });
    let stats = budget.stats();
    assert!(stats.peak_bytes <= 4 * MIB && stats.peak_bytes >= MIB, "{stats:?}");
    assert_eq!(stats.used_bytes, 0);
}

#[test]
fn writes_wait_for_a_flush_that_takes_its_time() {
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let flushes = Arc::new(AtomicBool::new(false));
    let flushing = Arc::clone(&flushes);
    let fake = Fake::start(move |_, mut stream| {
        let _ = shake_hands(&mut stream, export::SEND_FLUSH);
        let answers = Arc::new(stream.try_clone().unwrap());
        std::thread::scope(|scope| {
            while let Some(request) = next_request(&mut stream) {
                let mut answers = answers.try_clone().unwrap();
                if request.command == command::FLUSH {
                    flushing.store(true, Ordering::SeqCst);
                    let released = &released;
                    scope.spawn(move || {
                        // Also at the end of the test.
                        let _ = released.lock().unwrap().recv();
                        reply(&mut answers, request.cookie, 0)
                    });
                } else if !reply(&mut answers, request.cookie, 0) {
                    break;
                }
            }
        });
    });
    let file = fake.open("", &BufferAccount::UNLIMITED);
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for queue in 0..8 {
            let (file, ended) = (&file, &ended);
            scope.spawn(move || {
                for index in 0..24 {
                    write_mib(file, queue * 24 + index).unwrap();
                    ended.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let full = becomes(|| flushes.load(Ordering::SeqCst) && ended.load(Ordering::SeqCst) > 50);
        // Enough for many more, if they did not wait. If it is not enough, the test sees nothing.
        std::thread::sleep(Duration::from_millis(500));
        let before = ended.load(Ordering::SeqCst);
        drop(release);
        assert!(full && before <= 64, "{before} MiB of writes ended without a flush");
    });
    assert_eq!(ended.load(Ordering::SeqCst), 8 * 24);
}

fn read_block(queue: &Rc<dyn FileQueue>) -> IoResult {
    let data = IoBuf::zeroed(4096).whole();
    block_on(queue.start(FileOp::Read { offset: 0, data, past_end: PastEnd::Fails }))
}

fn answer_read(stream: &mut UnixStream, request: &Request) -> bool {
    reply(stream, request.cookie, 0) && stream.write_all(&vec![0; request.length_bytes as usize]).is_ok()
}

#[test]
fn a_server_that_leaves_at_each_request_costs_few_connections_and_the_request_fails() {
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    let fake = Fake::start(move |_, mut stream| {
        counted.fetch_add(1, Ordering::SeqCst);
        let _ = shake_hands(&mut stream, export::SEND_FLUSH);
        let _ = next_request(&mut stream);
    });
    let file = fake.open("&reconnect-s=1", &BufferAccount::UNLIMITED);
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (other, failed) = (&file, &failed);
        scope.spawn(move || {
            read_block(&other.open_blocking().unwrap()).unwrap_err();
            failed.store(true, Ordering::SeqCst);
        });
        let fails = becomes(|| failed.load(Ordering::SeqCst) || connections.load(Ordering::SeqCst) > 1000);
        let made = connections.load(Ordering::SeqCst);
        file.cancel();
        assert!(fails && made < 30, "{made} connections");
    });
}

fn connecting_threads() -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let name = |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
    names.map(name).filter(|name| name.trim() == "nbd-connect").count()
}

#[test]
fn further_connections_that_a_server_leaves_open_have_one_thread() {
    // A connection that is made while another one is served gets no word.
    let served = Arc::new(std::sync::Mutex::new(None::<(u64, UnixStream)>));
    let silent = Arc::new(AtomicUsize::new(0));
    let (one, others) = (Arc::clone(&served), Arc::clone(&silent));
    let fake = Fake::start(move |number, mut stream| {
        let is_first = {
            let mut one = one.lock().unwrap();
            let is_first = one.is_none();
            one.get_or_insert_with(|| (number, stream.try_clone().unwrap()));
            is_first
        };
        if is_first {
            let _ = shake_hands(&mut stream, export::SEND_FLUSH | export::CAN_MULTI_CONN);
            while let Some(request) = next_request(&mut stream) {
                if !answer_read(&mut stream, &request) {
                    break;
                }
            }
            let _ = one.lock().unwrap().take_if(|(served, _)| *served == number);
        } else {
            others.fetch_add(1, Ordering::SeqCst);
            let _ = exactly(&mut stream, 1);
        }
    });
    let file = fake.open("&reconnect-s=60", &BufferAccount::UNLIMITED);
    let (queue, _other) = (file.open_blocking().unwrap(), file.open_blocking().unwrap());
    assert!(becomes(|| silent.load(Ordering::SeqCst) > 0), "there is no second connection");
    for round in 0..50 {
        read_block(&queue).unwrap();
        let threads = connecting_threads();
        assert!(threads <= 1, "{threads} threads in round {round}");
        let (_, first) = served.lock().unwrap().take().unwrap();
        first.shutdown(std::net::Shutdown::Both).unwrap();
    }
}

#[test]
fn a_server_that_goes_while_writes_are_repeated_loses_none() {
    let (acknowledged, again) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (first, last) = (Arc::clone(&acknowledged), Arc::clone(&again));
    let fake = Fake::start(move |number, mut stream| {
        let _ = shake_hands(&mut stream, export::SEND_FLUSH);
        while let Some(request) = next_request(&mut stream) {
            let is_write = request.command == command::WRITE;
            let error = if number == 1 { error::ESHUTDOWN } else { 0 };
            match number {
                0 if is_write => _ = first.fetch_add(1, Ordering::SeqCst),
                // It leaves as soon as it is to flush.
                0 => break,
                1 => {}
                _ => _ = last.fetch_add(usize::from(is_write), Ordering::SeqCst),
            }
            if !reply(&mut stream, request.cookie, error) || number == 1 {
                break;
            }
        }
    });
    let file = fake.open("&reconnect-s=60", &BufferAccount::UNLIMITED);
    write_mib(&file, 0).unwrap();
    write_mib(&file, 1).unwrap();
    let queue = file.open_blocking().unwrap();
    block_on(queue.start(FileOp::Flush)).unwrap();
    let (before, after) = (acknowledged.load(Ordering::SeqCst), again.load(Ordering::SeqCst));
    assert_eq!((before, after), (2, 2));
}

/// A reply that is complete, has an error in its midst, and ends with a chunk that has none.
fn answer_with_an_error(stream: &mut UnixStream, request: &Request) -> bool {
    let Request { cookie, offset, length_bytes, .. } = *request;
    let head = |flags, kind, length_bytes| Chunk { flags, kind, cookie, offset: 0, length_bytes }.head(false);
    let mut out = Vec::new();
    if request.command == command::READ {
        out.extend_from_slice(head(0, chunk::OFFSET_DATA, 8 + length_bytes).as_bytes());
        out.extend_from_slice(&offset.to_be_bytes());
        out.resize(out.len() + length_bytes as usize, 0);
    }
    let at = if request.command == command::READ { &offset.to_be_bytes()[..] } else { &[] };
    let kind = if at.is_empty() { chunk::ERROR } else { chunk::ERROR_OFFSET };
    out.extend_from_slice(head(0, kind, 6 + at.len() as u64).as_bytes());
    out.extend_from_slice(&error::ENOSPC.to_be_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(at);
    out.extend_from_slice(head(chunk::DONE, chunk::NONE, 0).as_bytes());
    stream.write_all(&out).is_ok()
}

#[test]
fn an_error_in_the_midst_of_a_reply_fails_the_request_whatever_ends_the_reply() {
    let fake = Fake::start(|_, mut stream| {
        let _ = shake_hands_with(&mut stream, export::SEND_FLUSH | export::SEND_FUA, &[option::STRUCTURED_REPLY]);
        while next_request(&mut stream).is_some_and(|request| answer_with_an_error(&mut stream, &request)) {}
    });
    let file = fake.open("", &BufferAccount::UNLIMITED);
    let queue = file.open_blocking().unwrap();
    let data = IoBuf::from_aligned(AlignedBuf::copy_of(&[1; 4096])).whole();
    let ended = [
        read_block(&queue),
        block_on(queue.start(FileOp::Write { offset: 0, data, fua: true })),
        block_on(queue.start(FileOp::Flush)),
    ];
    assert!(ended.iter().all(Result::is_err), "{ended:?}");
}

#[test]
fn only_time_without_a_connection_counts_until_requests_fail() {
    let fake = Fake::start(|number, mut stream| {
        let _ = shake_hands(&mut stream, export::SEND_FLUSH);
        while let Some(request) = next_request(&mut stream) {
            match (number, request.command) {
                (0, command::FLUSH) => break,
                // It is at what is written again for longer than requests wait for a server, and goes.
                (1, _) => {
                    std::thread::sleep(Duration::from_millis(4500));
                    break;
                }
                _ if reply(&mut stream, request.cookie, 0) => {}
                _ => break,
            }
        }
    });
    let file = fake.open("&reconnect-s=4", &BufferAccount::UNLIMITED);
    write_mib(&file, 0).unwrap();
    block_on(file.open_blocking().unwrap().start(FileOp::Flush)).unwrap();
}

/// A part of a reply to a read: data of this value, or a hole.
fn chunk_of(cookie: u64, offset: u64, length_bytes: u64, value: Option<u8>, done: bool) -> Vec<u8> {
    let flags = if done { chunk::DONE } else { 0 };
    let (kind, rest) = match value {
        Some(value) => (chunk::OFFSET_DATA, vec![value; length_bytes as usize]),
        None => (chunk::OFFSET_HOLE, (length_bytes as u32).to_be_bytes().to_vec()),
    };
    let head = Chunk { flags, kind, cookie, offset: 0, length_bytes: 8 + rest.len() as u64 }.head(false);
    [head.as_bytes(), &offset.to_be_bytes(), &rest].concat()
}

#[test]
fn bytes_that_are_sent_twice_do_not_stand_for_others_that_never_come() {
    // A reader's memory holds what somebody else has read before.
    const OLD: u8 = 7;
    let fake = Fake::start(|number, mut stream| {
        let _ = shake_hands_with(&mut stream, export::SEND_FLUSH, &[option::STRUCTURED_REPLY]);
        while let Some(Request { cookie, length_bytes, .. }) = next_request(&mut stream) {
            let half = length_bytes / 2;
            let out = match number {
                0 => [chunk_of(cookie, 0, half, Some(1), false), chunk_of(cookie, 0, half, Some(1), true)].concat(),
                1 => [chunk_of(cookie, half, half, None, false), chunk_of(cookie, half - 1, half, None, true)].concat(),
                // In any order, but each byte once.
                _ => [chunk_of(cookie, half, half, Some(3), false), chunk_of(cookie, 0, half, None, true)].concat(),
            };
            if stream.write_all(&out).is_err() {
                break;
            }
        }
    });
    let file = fake.open("&reconnect-s=60", &BufferAccount::UNLIMITED);
    let queue = file.open_blocking().unwrap();
    let data = IoBuf::zeroed(256 << 10).whole();
    data.fill(OLD);
    block_on(queue.start(FileOp::Read { offset: 0, data: data.clone(), past_end: PastEnd::Fails })).unwrap();
    let bytes = data.to_vec();
    assert!(bytes[..128 << 10].iter().all(|byte| *byte == 0) && bytes[128 << 10..].iter().all(|byte| *byte == 3));
}

#[test]
fn a_disk_that_has_grown_at_its_server_is_as_long_when_it_is_asked_to_be() {
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    let fake = Fake::start(move |number, mut stream| {
        counted.fetch_add(1, Ordering::SeqCst);
        let size_bytes = if number == 0 { SIZE_BYTES } else { SIZE_BYTES + 4096 };
        let _ = shake_hands_as_long_as(size_bytes, &mut stream, export::SEND_FLUSH, &[]);
        while let Some(request) = next_request(&mut stream) {
            // As a server that looks at the size at each connection.
            let is_inside = request.offset + request.length_bytes <= size_bytes;
            let answered = match request.command {
                command::READ if is_inside => answer_read(&mut stream, &request),
                _ => reply(&mut stream, request.cookie, if is_inside { 0 } else { error::EINVAL }),
            };
            if !answered {
                break;
            }
        }
    });
    let file = fake.open("", &BufferAccount::UNLIMITED);
    let queue = file.open_blocking().unwrap();
    let read_end = || {
        let data = IoBuf::zeroed(4096).whole();
        block_on(queue.start(FileOp::Read { offset: SIZE_BYTES, data, past_end: PastEnd::Fails }))
    };
    let set_length = |length| block_on(queue.start(FileOp::SetLength { length }));
    read_end().unwrap_err();
    set_length(SIZE_BYTES).unwrap();
    assert_eq!(connections.load(Ordering::SeqCst), 1, "nothing to ask for");
    write_mib(&file, 0).unwrap();
    set_length(SIZE_BYTES + 4096).unwrap();
    assert_eq!((file.length_bytes().unwrap(), connections.load(Ordering::SeqCst)), (SIZE_BYTES + 4096, 2));
    read_end().unwrap();
    set_length(SIZE_BYTES + 8192).unwrap_err();
    set_length(SIZE_BYTES).unwrap_err();
    assert_eq!(file.length_bytes().unwrap(), SIZE_BYTES + 4096);
}

/// Where the disk of a test's server is longer than the first connection was told.
const GROWN_BYTES: u64 = SIZE_BYTES + 4096;

fn set_length(file: &Arc<dyn File>, length: u64) -> IoResult {
    block_on(file.open_blocking().unwrap().start(FileOp::SetLength { length }))
}

/// Serves a disk without data. `sees` is told each request, and may take its time.
fn serve_with(size_bytes: u64, mut stream: UnixStream, sees: impl Fn(&Request)) {
    let _ = shake_hands_as_long_as(size_bytes, &mut stream, export::SEND_FLUSH, &[]);
    while let Some(request) = next_request(&mut stream) {
        sees(&request);
        let answered = match request.command {
            command::DISC => false,
            command::READ => answer_read(&mut stream, &request),
            _ => reply(&mut stream, request.cookie, 0),
        };
        if !answered {
            break;
        }
    }
}

#[test]
fn a_write_that_takes_its_time_ends_before_a_connection_that_knows_the_new_size_is_used() {
    // Longer than a server that has gone gets for what is under way.
    const HELD: Duration = Duration::from_secs(3);
    let [is_held, has_ended, is_early] = [(); 3].map(|()| Arc::<AtomicBool>::default());
    let (holds, ends, earlier) = (Arc::clone(&is_held), Arc::clone(&has_ended), Arc::clone(&is_early));
    let fake = Fake::start(move |number, stream| {
        serve_with(if number == 0 { SIZE_BYTES } else { GROWN_BYTES }, stream, |request| match number {
            // The second one may come here, too: before it is known that the disk has grown.
            0 if request.command == command::WRITE && !holds.swap(true, Ordering::SeqCst) => {
                std::thread::sleep(HELD);
                ends.store(true, Ordering::SeqCst);
            }
            0 => {}
            _ if ends.load(Ordering::SeqCst) => {}
            _ => earlier.store(true, Ordering::SeqCst),
        });
    });
    let file = fake.open("", &BufferAccount::UNLIMITED);
    std::thread::scope(|scope| {
        scope.spawn(|| write_mib(&file, 0).unwrap());
        assert!(becomes(|| is_held.load(Ordering::SeqCst)), "the write does not arrive");
        // It would be carried out before the one that is held.
        scope.spawn(|| write_mib(&file, 0).unwrap());
        set_length(&file, GROWN_BYTES).unwrap();
    });
    assert!(has_ended.load(Ordering::SeqCst) && !is_early.load(Ordering::SeqCst), "a write was sent twice at once");
    assert_eq!(file.length_bytes().unwrap(), GROWN_BYTES);
}

#[test]
fn a_server_that_does_not_end_a_write_fails_the_change_of_the_length_and_no_request() {
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let others = Arc::new(AtomicUsize::new(0));
    let (is_held, counted) = (Arc::new(AtomicBool::new(false)), Arc::clone(&others));
    let holds = Arc::clone(&is_held);
    let fake = Fake::start(move |number, stream| {
        serve_with(if number == 0 { SIZE_BYTES } else { GROWN_BYTES }, stream, |request| match number {
            0 if request.command == command::WRITE => {
                holds.store(true, Ordering::SeqCst);
                // Also at the end of the test.
                let _ = released.lock().unwrap().recv();
            }
            0 => {}
            _ => _ = counted.fetch_add(usize::from(request.command != command::DISC), Ordering::SeqCst),
        });
    });
    let file = fake.open("", &BufferAccount::UNLIMITED);
    std::thread::scope(|scope| {
        scope.spawn(|| write_mib(&file, 0).unwrap());
        assert!(becomes(|| is_held.load(Ordering::SeqCst)), "the write does not arrive");
        let changed = set_length(&file, GROWN_BYTES);
        drop(release);
        changed.unwrap_err();
    });
    read_block(&file.open_blocking().unwrap()).unwrap();
    assert_eq!((file.length_bytes().unwrap(), others.load(Ordering::SeqCst)), (SIZE_BYTES, 0));
    // Now it can be.
    set_length(&file, GROWN_BYTES).unwrap();
    read_block(&file.open_blocking().unwrap()).unwrap();
}

#[test]
fn a_server_that_ends_with_its_last_client_is_never_left_alone() {
    let size_bytes = Arc::new(AtomicU64::new(SIZE_BYTES));
    let (size, clients, is_over) = (Arc::clone(&size_bytes), AtomicUsize::new(0), Arc::new(AtomicBool::new(false)));
    let ends = Arc::clone(&is_over);
    let fake = Fake::start(move |_, stream| {
        if ends.load(Ordering::SeqCst) {
            return;
        }
        clients.fetch_add(1, Ordering::SeqCst);
        serve_with(size.load(Ordering::SeqCst), stream, |_| {});
        if clients.fetch_sub(1, Ordering::SeqCst) == 1 {
            ends.store(true, Ordering::SeqCst);
        }
    });
    let file = fake.open("&reconnect-s=2", &BufferAccount::UNLIMITED);
    set_length(&file, GROWN_BYTES).unwrap_err();
    read_block(&file.open_blocking().unwrap()).unwrap();
    size_bytes.store(GROWN_BYTES, Ordering::SeqCst);
    set_length(&file, GROWN_BYTES).unwrap();
    read_block(&file.open_blocking().unwrap()).unwrap();
    assert!(!is_over.load(Ordering::SeqCst));
}
