//! Exports that come and go, what they count, and what their bitmaps say.

mod common;

use block::{Completion, DirtyBitmaps, Disk, DiskInfo, DiskQueue, Op, ReactorCtx, Tag};
use common::{Client, PATIENCE, Served, tool, try_tool};
use drive::EngineOpener;
use image::{FileName, OpenedOverlay, Opener, Role};
use nbd_wire::numbers::command;
use nbd_wire::reply::Style;
use ringdisk_export_nbd::{NbdBitmap, NbdExport, ServerOptions};
use std::io::Read;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[test]
fn an_export_comes_and_goes_while_others_are_used() {
    let mut served = Served::raw(1 << 20, ServerOptions::default());
    let mut first = Client::connect(&served, Style::Extended, &[]);
    let disk: Arc<dyn Disk> = Arc::clone(&served.disk(0).disk);
    let second = NbdExport::new("second", Arc::clone(&disk)).with(|export| export.read_only = true);
    served.server().add(second.clone()).unwrap();
    let same = served.server().add(NbdExport::new("second", disk)).unwrap_err();
    assert!(same.to_string().contains("'second'"), "{same}");
    let list = tool("nbdinfo", &["--list", &served.uri("")]);
    assert!(list.contains("export=\"disk\"") && list.contains("export=\"second\""), "{list}");
    let mut client = Client::connect_to(&served, "second", Style::Structured, &[]);
    client.send(command::READ, 0, 0, 4096, &[]);
    assert_eq!(client.reply().2.len(), 8 + 4096);
    assert_eq!(second.connections(), 1);
    served.server().remove("second");
    assert_eq!(client.stream.read(&mut [0; 1]).unwrap(), 0, "a client of an export that has gone");
    assert!(!try_tool("nbdinfo", &["--size", &served.uri("second")]).status.success());
    // The other goes on.
    first.send(command::WRITE, 0, 512, 3, &[1, 2, 3]);
    first.send(command::READ, 0, 0, 4096, &[]);
    assert!(served.server().is_serving());
    // What was counted stays.
    assert_eq!((second.stats().requests, second.connections()), (1, 0));
    let latency = second.latency();
    let reads = latency.kinds.iter().find(|kind| kind.kind == "read").unwrap();
    assert_eq!((reads.bytes, reads.whole.count(), latency.oldest_ns), (4096, 1, 0));
    served.stop();
}

#[test]
fn requests_of_all_kinds_are_counted_and_timed() {
    let mut served = Served::start(
        |directory| {
            let file = directory.join("disk.qcow2");
            tool("qemu-img", &["create", "-q", "-f", "qcow2", file.to_str().unwrap(), "8M"]);
            vec![format!("file={},format=qcow2,name=disk", file.display())]
        },
        ServerOptions::default(),
    );
    let export = NbdExport::new("counted", Arc::clone(&served.disk(0).disk) as Arc<dyn Disk>);
    served.server().add(export.clone()).unwrap();
    let mut client = Client::connect_to(&served, "counted", Style::Extended, &[]);
    let mut ask = |command: u16, length: u64, payload: &[u8]| {
        client.send(command, 0, 0, length, payload);
        client.reply()
    };
    for _ in 0..10 {
        ask(command::WRITE, 4096, &[7; 4096]);
        ask(command::READ, 4096, &[]);
    }
    ask(command::FLUSH, 0, &[]);
    ask(command::TRIM, 4096, &[]);
    ask(command::WRITE_ZEROES, 65536, &[]);
    ask(command::CACHE, 4 << 20, &[]);
    // It is behind the end.
    ask(command::TRIM, 64 << 20, &[]);
    let stats = export.stats();
    assert_eq!((stats.requests, stats.failed, stats.io_errors), (24, 1, 0), "{stats:?}");
    let latency = export.latency();
    let counts: Vec<(&str, u64)> = latency.kinds.iter().map(|kind| (kind.kind, kind.whole.count())).collect();
    let expected =
        [("read", 11), ("write", 10), ("flush", 1), ("discard", 1), ("write-zeroes", 1), ("secure-erase", 0)];
    assert_eq!(counts, expected);
    for kind in &latency.kinds {
        // The parts of all requests are their whole.
        let parts: u64 = kind.parts.iter().map(|part| part.sum_ns).sum();
        let whole = kind.whole.sum_ns;
        assert!(parts <= whole && whole - parts <= kind.whole.count() * 1000, "{}: {parts} of {whole} ns", kind.kind);
    }
    drop(client);
    served.stop();
}

/// A disk whose storage never answers.
struct Hangs(DiskInfo);

struct HangingQueue(usize);

impl Disk for Hangs {
    fn info(&self) -> DiskInfo {
        self.0.clone()
    }

    fn open_queue(&self, _: &Rc<dyn ReactorCtx>) -> block::Result<Box<dyn DiskQueue>> {
        Ok(Box::new(HangingQueue(0)))
    }
}

impl DiskQueue for HangingQueue {
    fn submit(&mut self, _: Tag, _: Op) {
        self.0 += 1;
    }

    fn harvest(&mut self, _: &mut Vec<Completion>) -> usize {
        0
    }

    fn in_flight(&self) -> usize {
        self.0
    }
}

#[test]
fn requests_that_never_end_are_seen_and_given_up() {
    let mut served = Served::raw(1 << 20, ServerOptions::default());
    let export = NbdExport::new("slow", Arc::new(Hangs(served.disk(0).disk.info())));
    served.server().add(export.clone()).unwrap();
    let mut client = Client::connect_to(&served, "slow", Style::Structured, &[]);
    client.send(command::READ, 0, 0, 4096, &[]);
    wait_until("the request is not seen", || {
        export.ask_for_oldest();
        export.latency().oldest_ns > 0
    });
    let removal = std::thread::scope(|scope| {
        let server = served.server();
        let removal = scope.spawn(move || server.remove("slow"));
        wait_until("the export is still there", || {
            !tool("nbdinfo", &["--list", &format!("nbd+unix:///?socket={}", served.socket.display())])
                .contains("\"slow\"")
        });
        export.give_up();
        removal.join()
    });
    removal.unwrap();
    assert_eq!(client.stream.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(export.connections(), 0);
    served.stop();
}

#[test]
fn bitmaps_are_told_as_qemu_nbd_tells_them() {
    let mut served = Served::start(
        |directory| {
            let file = directory.join("disk.qcow2");
            let image = file.to_str().unwrap();
            tool("qemu-img", &["create", "-q", "-f", "qcow2", image, "8M"]);
            tool("qemu-img", &["bitmap", "--add", "--enable", image, "live"]);
            tool("qemu-img", &["bitmap", "--add", "--enable", image, "done"]);
            tool("qemu-io", &["-c", "write 1M 64k", "-c", "write 5M 1k", image]);
            tool("qemu-img", &["bitmap", "--disable", image, "done"]);
            vec![format!("file={image},format=qcow2,name=disk")]
        },
        ServerOptions::default(),
    );
    let source = served.disk(0).image.clone().unwrap() as Arc<dyn DirtyBitmaps>;
    assert!(source.dirty_bitmap("none").unwrap_err().to_string().contains("'none'"));
    let bitmap = |name: &str| NbdBitmap { name: name.to_owned(), source: Arc::clone(&source) };
    let export = NbdExport::new("with", Arc::clone(&served.disk(0).disk) as Arc<dyn Disk>);
    served.server().add(export.with(|export| export.bitmaps = vec![bitmap("live"), bitmap("done")])).unwrap();
    let list = tool("nbdinfo", &[&served.uri("with")]);
    assert!(list.contains("qemu:dirty-bitmap:live") && list.contains("qemu:dirty-bitmap:done"), "{list}");
    assert!(!tool("nbdinfo", &[&served.uri("disk")]).contains("dirty-bitmap"));
    let map = |bitmap: &str| {
        let map = tool("nbdinfo", &[&format!("--map=qemu:dirty-bitmap:{bitmap}"), &served.uri("with")]);
        let numbers = |line: &str| line.split_whitespace().take(3).map(|word| word.parse().unwrap()).collect();
        map.lines().map(numbers).collect::<Vec<Vec<u64>>>()
    };
    let expected = vec![
        vec![0, 1 << 20, 0],
        vec![1 << 20, 64 << 10, 1],
        vec![(1 << 20) + (64 << 10), (4 << 20) - (64 << 10), 0],
        vec![5 << 20, 64 << 10, 1],
        vec![(5 << 20) + (64 << 10), (3 << 20) - (64 << 10), 0],
    ];
    assert_eq!((map("live"), map("done")), (expected.clone(), expected.clone()));
    // Writes are noted in one of them.
    tool("qemu-io", &["-f", "raw", "-c", "write 3M 64k", &served.uri("with")]);
    assert_eq!(map("done"), expected);
    assert!(map("live").contains(&vec![3 << 20, 64 << 10, 1]), "{:?}", map("live"));
    served.stop();
}

#[test]
fn a_removed_disk_is_held_by_no_client_of_another_and_by_none_that_still_chooses() {
    let mut served = Served::raw(1 << 20, ServerOptions::default());
    let other: Arc<dyn Disk> = Arc::new(Hangs(served.disk(0).disk.info()));
    let held = Arc::downgrade(&other);
    served.server().add(NbdExport::new("other", other)).unwrap();
    // One that uses the first disk, and one that was greeted and says nothing.
    let mut first = Client::connect(&served, Style::Structured, &[]);
    let mut choosing = common::greet(served.connect());
    let mut user = Client::connect_to(&served, "other", Style::Structured, &[]);
    served.server().remove("other");
    assert!(held.upgrade().is_none(), "a disk that was removed is still held");
    assert_eq!(user.stream.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(choosing.read(&mut [0; 1]).unwrap(), 0, "it knew the disk that has gone");
    first.send(command::READ, 0, 0, 4096, &[]);
    assert_eq!(first.reply().2.len(), 8 + 4096);
    served.stop();
}

/// A bitmap of one bit for 64 KiB that does not record.
struct Changes(std::sync::Mutex<u8>);

impl DirtyBitmaps for Changes {
    fn dirty_bitmap(&self, _: &str) -> block::Result<block::DirtyMap> {
        Ok(block::DirtyMap::new(16, 1 << 20, vec![*self.0.lock().unwrap(); 2], false))
    }
}

#[test]
fn whoever_begins_anew_sees_what_has_become_of_a_bitmap() {
    let mut served = Served::raw(1 << 20, ServerOptions::default());
    let source = Arc::new(Changes(std::sync::Mutex::new(0)));
    let bitmap = NbdBitmap { name: "b".to_owned(), source: Arc::clone(&source) as Arc<dyn DirtyBitmaps> };
    let export = NbdExport::new("with", Arc::clone(&served.disk(0).disk) as Arc<dyn Disk>);
    served.server().add(export.with(|export| export.bitmaps = vec![bitmap])).unwrap();
    let mut client = Client::connect_to(&served, "with", Style::Structured, &["qemu:dirty-bitmap:b"]);
    let mut is_dirty = |offset: u64| {
        client.send(command::BLOCK_STATUS, 0, offset, 64 << 10, &[]);
        let payload = client.reply().2;
        payload.last() == Some(&1)
    };
    assert!(!is_dirty(0));
    *source.0.lock().unwrap() = 0xff;
    assert!(!is_dirty(64 << 10), "parts of one moment");
    assert!(is_dirty(0) && is_dirty(64 << 10), "of the next moment");
    served.stop();
}

/// The last reply has the overlay reserve space ahead. Nobody asks the queue for anything when that ends.
#[test]
fn a_new_layer_does_not_wait_for_an_idle_client() {
    const SIZE: u64 = 8 << 20;
    let mut served = Served::start(
        |directory| {
            let file = directory.join("disk.raw");
            std::fs::File::create(&file).unwrap().set_len(SIZE).unwrap();
            vec![format!("file={},format=raw,snapshot=on,keep={},name=disk", file.display(), directory.display())]
        },
        ServerOptions::default(),
    );
    let mut client = Client::connect(&served, Style::Structured, &[]);
    // More than half of what is reserved at first.
    let length = (2 << 20) + 4096;
    let cookie = client.send(command::WRITE, 0, 0, length, &vec![7; length as usize]);
    assert_eq!(client.reply().1, cookie);
    let directory = served.directory.path().canonicalize().unwrap();
    let (index, overlay) = (directory.join("disk.scratch"), directory.join("overlay"));
    let [below, above] = [&index, &overlay].map(|path| path.to_str().unwrap());
    tool("qemu-img", &["create", "-q", "-u", "-f", "qcow2", "-b", below, "-F", "raw", above, &SIZE.to_string()]);
    let name = FileName::from(overlay.as_path());
    let file = EngineOpener::default().open(&name, Role::Writable).unwrap();
    let layer = OpenedOverlay::open(&name, file).unwrap();
    let image = Arc::clone(served.disk(0).image.as_ref().unwrap());
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(image::put_overlay(vec![(image, layer)], || Ok(()))));
    let results = told.recv_timeout(PATIENCE).expect("the former layer is never over").unwrap();
    results.into_iter().for_each(Result::unwrap);
    drop(client);
    served.stop();
}
