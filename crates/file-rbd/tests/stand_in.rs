//! Images behind a library that plays librbd, and fails as it is told.

mod common;

use block::{Error, ErrorKind, File, FileOp, FileQueue, IoError, IoErrorKind, IoResult, Locks, PastEnd, block_on};
use common::{conforms, reactors};
use memory::{AlignedBuf, IoBuf};
use ringdisk_file_rbd::{RbdName, RbdOptions, create, load_from, open, remove, wait_for_closes};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use testkit::{Dice, RbdStandIn};

const PATIENCE: Duration = Duration::from_secs(60);
const SIZE: u64 = 1 << 20;

fn stand_in() -> RbdStandIn {
    let stand_in = RbdStandIn::new();
    load_from(&stand_in.library()).unwrap();
    stand_in
}

fn name_of(stand_in: &RbdStandIn, image: &str) -> RbdName {
    RbdName::parse(&stand_in.name(image)).unwrap()
}

fn opened(name: &RbdName) -> Arc<dyn File> {
    open(name, &RbdOptions::default()).unwrap()
}

fn reading() -> RbdOptions {
    RbdOptions::default().with(|options| options.read_only = true)
}

fn perform(queue: &Rc<dyn FileQueue>, op: FileOp) -> IoResult {
    block_on(queue.start(op))
}

fn read(queue: &Rc<dyn FileQueue>, offset: u64, length: usize) -> IoResult<Vec<u8>> {
    let data = IoBuf::zeroed(length).whole();
    perform(queue, FileOp::Read { offset, data: data.clone(), past_end: PastEnd::Fails })?;
    Ok(data.to_vec())
}

fn write_of(offset: u64, bytes: &[u8], fua: bool) -> FileOp {
    FileOp::Write { offset, data: IoBuf::from_aligned(AlignedBuf::copy_of(bytes)).whole(), fua }
}

fn write(queue: &Rc<dyn FileQueue>, offset: u64, bytes: &[u8]) -> IoResult {
    perform(queue, write_of(offset, bytes, false))
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn random_requests_end_as_the_model_says_and_writing_behind_the_end_makes_the_image_longer() {
    let stand_in = stand_in();
    let name = name_of(&stand_in, "disk");
    create(&name, SIZE).unwrap();
    let file = opened(&name);
    let (queue, mut dice) = (file.open_blocking().unwrap(), Dice::new(3));
    let mut model = vec![0; SIZE as usize];
    for number in 0..400 {
        let offset = dice.below(model.len() as u64 + 4096);
        let length = 1 + dice.below(100_000);
        let range = offset as usize..(offset + length) as usize;
        let is_inside = range.end <= model.len();
        match dice.below(8) {
            0..=2 => {
                let mut bytes = vec![0; length as usize];
                testkit::fill_seeded(number + 1, &mut bytes);
                model.resize(model.len().max(range.end), 0);
                perform(&queue, write_of(offset, &bytes, dice.below(4) == 0)).unwrap();
                model[range].copy_from_slice(&bytes);
            }
            3 => {
                model.resize(model.len().max(range.end), 0);
                perform(&queue, FileOp::WriteZeroes { offset, length, may_unmap: dice.below(2) == 0 }).unwrap();
                model[range].fill(0);
            }
            4 => perform(&queue, FileOp::Flush).unwrap(),
            5 if (offset as usize) < model.len() => {
                let (is_hole, length) = file.hole_at(offset, length).unwrap();
                assert!(length > 0);
                let zeros = model[offset as usize..(offset + length) as usize].iter().all(|byte| *byte == 0);
                assert!(zeros || !is_hole, "a hole at {offset} with data in it");
            }
            _ if is_inside => assert!(read(&queue, offset, length as usize).unwrap() == model[range], "{number}"),
            _ => {
                let data = IoBuf::zeroed(length as usize).whole();
                data.fill(9);
                perform(&queue, FileOp::Read { offset, data: data.clone(), past_end: PastEnd::Zeros }).unwrap();
                let there = model.get(offset as usize..).unwrap_or_default();
                let mut expected = there[..there.len().min(length as usize)].to_vec();
                expected.resize(length as usize, 0);
                assert!(data.to_vec() == expected, "request {number}, behind the end");
                assert!(read(&queue, offset, length as usize).is_err());
            }
        }
        assert_eq!(file.length_bytes().unwrap(), model.len() as u64);
    }
    assert!(read(&queue, 0, model.len()).unwrap() == model);
    perform(&queue, FileOp::SetLength { length: 4096 }).unwrap();
    assert_eq!(write(&queue, u64::MAX - 1, &[1, 2]).unwrap_err().kind(), IoErrorKind::OutOfRange);
    drop((queue, file));
    assert!(std::fs::read(stand_in.file("disk")).unwrap() == model[..4096]);
}

#[test]
fn disks_in_a_cluster_conform() {
    let stand_in = stand_in();
    conforms(&|number| stand_in.name(&format!("image{number}")));
}

#[test]
fn what_librbd_fails_with_is_what_the_request_fails_with() {
    let stand_in = stand_in();
    let name = name_of(&stand_in, "disk");
    create(&name, SIZE).unwrap();
    let file = opened(&name);
    let queue = file.open_blocking().unwrap();
    write(&queue, 0, &[1; 4096]).unwrap();
    let (offset, length) = (0, 4096);
    for (errno, kind) in [(5, IoErrorKind::Io), (28, IoErrorKind::NoSpace)] {
        let calls = ["read", "write", "zeroes", "discard", "flush", "resize"];
        stand_in.set_faults(&calls.map(|call| format!("{call} error {errno}\n")).concat());
        let failed = Err(IoError::from_errno(errno));
        assert_eq!(read(&queue, 0, 4096).map(|_| ()), failed);
        assert_eq!(write(&queue, 0, &[2; 4096]), failed);
        assert_eq!(perform(&queue, FileOp::WriteZeroes { offset, length, may_unmap: true }), failed);
        assert_eq!(perform(&queue, FileOp::Discard { offset, length }), failed);
        // Only a write says that there is no space.
        assert_eq!(perform(&queue, FileOp::Flush), Err(IoError::EIO));
        // Behind the end.
        assert_eq!(write(&queue, SIZE, &[2; 512]), failed);
        assert_eq!(IoError::from_errno(errno).kind(), kind);
    }
    // Durable, or failed.
    stand_in.set_faults("flush error 5\n");
    assert!(perform(&queue, write_of(0, &[3; 4096], true)).is_err());
    stand_in.set_faults("read short 0\n");
    assert!(read(&queue, 0, 4096).is_err(), "a short read is believed");
    stand_in.set_faults("diff error 5\n");
    let told = file.hole_at(0, SIZE).unwrap_err().to_string();
    assert!(told.contains("rbd:pool/disk"), "{told}");
    stand_in.set_faults("");
    assert!(read(&queue, 0, 4096).unwrap() == [3; 4096]);
    assert_eq!(file.length_bytes().unwrap(), SIZE);
}

#[test]
fn who_was_shut_out_by_the_cluster_stays_out_until_the_image_is_opened_over_another_connection() {
    let stand_in = stand_in();
    let names = ["disk", "other"].map(|image| name_of(&stand_in, image));
    names.iter().for_each(|name| create(name, SIZE).unwrap());
    let files = names.each_ref().map(opened);
    let queues = files.each_ref().map(|file| file.open_blocking().unwrap());
    write(&queues[0], 0, &[1; 4096]).unwrap();
    stand_in.set_faults("write error 108\n");
    let shut_out = Err(IoError::from_errno(108));
    assert_eq!(write(&queues[0], 0, &[2; 4096]), shut_out);
    // The cluster forgets whom it has shut out. But another client had the lock, and may have written.
    stand_in.set_faults("");
    for queue in &queues {
        assert_eq!(write(queue, 0, &[2; 4096]), shut_out);
        assert_eq!(write(queue, SIZE, &[2; 4096]), shut_out, "behind the end");
        assert_eq!(perform(queue, FileOp::Flush), shut_out);
        assert_eq!(read(queue, 0, 4096).map(|_| ()), shut_out);
    }
    assert!(files[0].hole_at(0, SIZE).is_err());
    // The other image still has the old connection.
    let [file, _other] = files;
    let [queue, _others] = queues;
    drop((queue, file));
    let again = opened(&names[0]);
    let queue = again.open_blocking().unwrap();
    assert!(read(&queue, 0, 4096).unwrap() == [1; 4096]);
    write(&queue, 0, &[3; 4096]).unwrap();
    assert_eq!(perform(&queue, FileOp::Flush), Ok(()));
}

#[test]
fn after_a_failed_flush_of_cached_writes_none_succeeds_until_the_image_is_opened_anew() {
    let stand_in = stand_in();
    let name = name_of(&stand_in, "disk");
    create(&name, SIZE).unwrap();
    for cached in [true, false] {
        let options = RbdOptions::default().with(|options| options.cached = cached);
        let file = open(&name, &options).unwrap();
        let [one, other] = [0, 1].map(|_| file.open_blocking().unwrap());
        write(&one, 0, &[1; 4096]).unwrap();
        stand_in.set_faults("flush error 28\n");
        assert_eq!(perform(&one, FileOp::Flush), Err(IoError::EIO));
        stand_in.set_faults("");
        // What librbd had acknowledged may be gone. Without its cache it had all of it at the cluster.
        assert_eq!(perform(&other, FileOp::Flush).is_err(), cached);
        assert_eq!(perform(&other, write_of(0, &[2; 4096], true)).is_err(), cached);
        assert!(read(&one, 0, 4096).unwrap() == [2; 4096], "reads and writes go on");
        drop((one, other, file));
        let again = open(&name, &options).unwrap();
        assert_eq!(perform(&again.open_blocking().unwrap(), FileOp::Flush), Ok(()));
    }
}

#[test]
fn a_failed_flush_is_remembered_if_nobody_waits_for_it_any_more() {
    let stand_in = stand_in();
    let name = name_of(&stand_in, "disk");
    create(&name, SIZE).unwrap();
    let file = open(&name, &RbdOptions::default().with(|options| options.cached = true)).unwrap();
    let other = file.open_blocking().unwrap();
    write(&other, 0, &[1; 4096]).unwrap();
    stand_in.set_faults("flush hold 0\n");
    let threads = reactors(1);
    let (sender, receiver) = std::sync::mpsc::channel();
    let given = Arc::clone(&file);
    let pushed = block::run_and_wait(&*threads[0].handle(), move |ctx| {
        let queue = given.open_queue(ctx).unwrap();
        drop(queue.start(FileOp::Flush));
        let data = IoBuf::zeroed(4096).whole();
        let read = queue.start(FileOp::Read { offset: 0, data, past_end: PastEnd::Fails });
        ctx.spawn(block::Task::new(async move { sender.send(read.await).unwrap() }));
    });
    pushed.unwrap();
    // Whoever is behind the flush has ended, so that is on its way.
    receiver.recv().unwrap().unwrap();
    threads.into_iter().for_each(|thread| thread.stop().unwrap());
    stand_in.set_faults("flush error 28\n");
    wait_until("the flush has failed", || stand_in.file("disk.failed").exists());
    stand_in.set_faults("");
    assert_eq!(perform(&other, FileOp::Flush), Err(IoError::EIO));
}

#[test]
fn requests_outlive_whoever_waits_for_them_and_the_image_is_closed_after_them() {
    let stand_in = stand_in();
    let name = name_of(&stand_in, "disk");
    create(&name, SIZE).unwrap();
    let file = opened(&name);
    assert_eq!(file.info().locks, Locks::Held);
    stand_in.set_faults("write hold 0\n");
    let threads = reactors(1);
    let given = Arc::clone(&file);
    let pushed = block::run_and_wait(&*threads[0].handle(), move |ctx| {
        let queue = given.open_queue(ctx).unwrap();
        for block in 0..8 {
            // Nobody waits, and the queue is dropped.
            drop(queue.start(write_of(block * 4096, &[7; 4096], false)));
        }
    });
    pushed.unwrap();
    // The reactor goes, and so does the file.
    threads.into_iter().for_each(|thread| thread.stop().unwrap());
    drop(file);
    assert!(stand_in.file("disk.lock").exists(), "closed under its requests");
    stand_in.set_faults("");
    wait_until("the lock is free", || !stand_in.file("disk.lock").exists());
    let bytes = std::fs::read(stand_in.file("disk")).unwrap();
    for block in bytes[..8 * 4096].chunks(4096) {
        // What had not reached librbd when the reactor ended is gone; nothing else was written.
        assert!(block == [7; 4096] || block == [0; 4096]);
    }
    drop(opened(&name));
}

#[test]
fn a_request_that_never_ends_is_given_up_and_holds_nobody_up() {
    let stand_in = stand_in();
    let name = name_of(&stand_in, "disk");
    create(&name, SIZE).unwrap();
    let file = opened(&name);
    let queue = file.open_blocking().unwrap();
    for call in ["read", "write", "flush", "diff"] {
        stand_in.set_faults(&format!("{call} never 0\n"));
        let file = open(&name, &RbdOptions::default().with(|options| options.lock = false)).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let queue = file.open_blocking().unwrap();
                match call {
                    "read" => read(&queue, 0, 4096).map(|_| ()),
                    "write" => write(&queue, 0, &[1; 4096]),
                    "flush" => perform(&queue, FileOp::Flush),
                    _ => file.hole_at(0, SIZE).map(|_| ()).map_err(|_| IoError::EIO),
                }
            });
            // With or without the request on its way.
            std::thread::sleep(Duration::from_millis(50));
            assert!(file.cancel());
            assert_eq!(waits.join().unwrap(), Err(IoError::EIO), "{call}");
        });
        assert_eq!(perform(&file.open_blocking().unwrap(), FileOp::Flush), Err(IoError::EIO));
        // Others go on.
        stand_in.set_faults("");
        write(&queue, 0, &[1; 4096]).unwrap();
    }
}

#[test]
fn the_lock_of_a_living_client_is_left_alone_and_that_of_a_dead_one_is_taken() {
    const OTHER: &str = "192.0.2.9:0/77\n";
    let stand_in = stand_in();
    let name = name_of(&stand_in, "disk");
    create(&name, SIZE).unwrap();
    let (lock, watchers) = (stand_in.file("disk.lock"), stand_in.file("disk.watchers"));
    std::fs::write(&lock, OTHER).unwrap();
    std::fs::write(&watchers, OTHER).unwrap();
    let refused = open(&name, &RbdOptions::default()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Locked);
    assert!(refused.to_string().contains("192.0.2.9:0/77") && refused.is_only_for_writing(), "{refused}");
    assert_eq!(std::fs::read_to_string(&lock).unwrap(), OTHER);
    assert_eq!(std::fs::read_to_string(&watchers).unwrap(), OTHER, "the image is still open");
    // Reading needs no lock.
    assert_eq!(open(&name, &reading()).unwrap().info().locks, Locks::NotWanted);
    // It is waited for, and then ours.
    let patient = RbdOptions::default().with(|options| options.lock_timeout = PATIENCE);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| open(&name, &patient).unwrap().info().locks);
        wait_until("somebody waits", || std::fs::read_to_string(&watchers).unwrap().lines().count() > 1);
        std::fs::remove_file(&lock).unwrap();
        assert_eq!(waits.join().unwrap(), Locks::Held);
    });
    // The cluster does not see its owner any more.
    std::fs::write(&lock, OTHER).unwrap();
    std::fs::write(&watchers, "").unwrap();
    let file = opened(&name);
    assert_eq!(file.info().locks, Locks::Held);
    // Ours, too, is left alone.
    assert_eq!(open(&name, &RbdOptions::default()).unwrap_err().kind(), ErrorKind::Locked);
    drop(file);
    assert!(!lock.exists(), "it is free when the file has been dropped");
    stand_in.set_faults("features set 1\n");
    assert_eq!(opened(&name).info().locks, Locks::Lacking);
}

#[test]
fn the_end_of_a_program_waits_for_a_thread_that_still_has_an_image() {
    let stand_in = stand_in();
    let name = name_of(&stand_in, "disk");
    create(&name, SIZE).unwrap();
    let file = opened(&name);
    let lock = stand_in.file("disk.lock");
    assert!(lock.exists());
    let holder = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(file);
    });
    wait_for_closes();
    assert!(!lock.exists(), "the next run would wait for a lock of nobody");
    holder.join().unwrap();
}

#[test]
fn snapshots_are_read_only_and_extents_are_told() {
    let stand_in = stand_in();
    std::fs::write(stand_in.file("disk@snap"), vec![0; 1 << 20]).unwrap();
    std::fs::write(stand_in.file("disk"), vec![1; 100]).unwrap();
    let snapshot = name_of(&stand_in, "disk@snap");
    let refused = open(&snapshot, &RbdOptions::default()).unwrap_err();
    assert!(refused.is_only_for_writing() && refused.to_string().contains("snapshot"), "{refused}");
    let file = open(&snapshot, &reading()).unwrap();
    let queue = file.open_blocking().unwrap();
    assert_eq!(write(&queue, 0, &[1; 512]).unwrap_err().kind(), IoErrorKind::ReadOnly);
    assert_eq!(file.length_bytes().unwrap(), 1 << 20);
    assert_eq!(read(&queue, 0, 512).unwrap(), [0; 512]);
    let name = name_of(&stand_in, "sparse");
    create(&name, 4 << 20).unwrap();
    let file = opened(&name);
    let queue = file.open_blocking().unwrap();
    write(&queue, (1 << 20) + 5, &[1]).unwrap();
    assert_eq!(file.hole_at(0, 4 << 20).unwrap(), (true, 1 << 20));
    // Whole objects of 64 KiB, from the map.
    assert_eq!(file.hole_at(1 << 20, 4 << 20).unwrap(), (false, 65536));
    assert_eq!(file.hole_at((1 << 20) + 65536, 100).unwrap(), (true, 100));
    // An answer holds until something is written.
    write(&queue, 0, &[1]).unwrap();
    assert_eq!(file.hole_at(0, 4 << 20).unwrap(), (false, 65536));
}

#[test]
fn what_cannot_be_opened_made_or_removed_says_why() {
    let stand_in = stand_in();
    let told = |result: Result<Arc<dyn File>, Error>| result.map(|_| ()).unwrap_err().to_string();
    let in_pool = name_of(&stand_in, "none");
    let elsewhere = RbdName::parse(&stand_in.name("x").replace("pool/", "nowhere/")).unwrap();
    let no_conf = RbdName::parse(&format!("{}:conf=/nowhere/c", stand_in.name("x"))).unwrap();
    let unknown = RbdName::parse(&format!("{}:unknown=secret", stand_in.name("x"))).unwrap();
    for (name, hint) in [
        (&in_pool, "none of that name"),
        (&elsewhere, "no pool of that name"),
        (&no_conf, "/nowhere/c"),
        (&unknown, "'unknown'"),
    ] {
        let said = told(open(name, &reading()));
        assert!(said.contains(hint) && said.contains("rbd:") && !said.contains("secret"), "{said}");
    }
    stand_in.set_faults("connect error 110\n");
    // Connections are shared, so with another one.
    let other = RbdName::parse(&format!("{}:id=other", stand_in.name("x"))).unwrap();
    assert!(told(open(&other, &reading())).contains("no monitor answers"));
    stand_in.set_faults("");
    create(&in_pool, SIZE).unwrap();
    assert!(create(&in_pool, SIZE).unwrap_err().to_string().contains("exists"));
    let watchers = stand_in.file("none.watchers");
    std::fs::write(&watchers, "another-client\n").unwrap();
    assert!(remove(&in_pool).unwrap_err().to_string().contains("somebody has it open"));
    std::fs::remove_file(watchers).unwrap();
    remove(&in_pool).unwrap();
    assert!(!stand_in.file("none").exists());
}

#[test]
fn an_image_that_another_thread_is_about_to_close_is_waited_for_and_removed() {
    let stand_in = stand_in();
    let name = name_of(&stand_in, "brief");
    create(&name, SIZE).unwrap();
    let file = opened(&name);
    let closes = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(file);
    });
    remove(&name).unwrap();
    closes.join().unwrap();
    assert!(!stand_in.file("brief").exists());
}
