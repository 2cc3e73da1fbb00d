//! What a client asked for that has gone, and what waits in a filter of the disk: it changes nothing later. The client may
//! be back on another connection, repeat its writes, and write and flush newer data.

mod common;

use common::{Client, PATIENCE, Served};
use image::{FilterDisk, HoldControl, Rate, Throttle, ThrottleGroup, ThrottleLimits};
use nbd_wire::numbers::{command, command_flag};
use nbd_wire::reply::Style;
use ringdisk_export_nbd::{NbdExport, ServerOptions};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: usize = 512;
const OLD: [u8; BLOCK] = [1; BLOCK];
const NEW: [u8; BLOCK] = [2; BLOCK];

fn served(options: &str, server: ServerOptions) -> Served {
    let prepare = |directory: &Path| {
        let file = directory.join("disk.raw");
        std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
        vec![format!("file={},format=raw,name=disk,{options}", file.display())]
    };
    Served::start(prepare, server)
}

fn control(served: &Served) -> Arc<HoldControl> {
    served.disk(0).hold.clone().unwrap()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn send_write(client: &mut Client, block: usize, data: &[u8]) {
    client.send(command::WRITE, 0, (block * BLOCK) as u64, BLOCK as u64, data);
}

fn write_and_flush(client: &mut Client, block: usize, data: &[u8]) {
    send_write(client, block, data);
    assert_eq!(client.reply().0, 0);
    client.send(command::FLUSH, 0, 0, 0, &[]);
    assert_eq!(client.reply().0, 0);
}

fn read(client: &mut Client, block: usize) -> Vec<u8> {
    client.send(command::READ, 0, (block * BLOCK) as u64, BLOCK as u64, &[]);
    assert_eq!(client.reply().0, 0);
    common::read_exactly(&mut client.stream, BLOCK)
}

#[test]
fn a_held_write_of_a_client_that_has_gone_is_not_tried_again_over_newer_data() {
    let mut served = served("on-error=hold,filter=error:kinds=write:count=1", ServerOptions::default());
    let control = control(&served);
    let mut gone = Client::connect(&served, Style::Simple, &[]);
    send_write(&mut gone, 3, &OLD);
    wait_until("the write is not held", || control.held().is_some());
    drop(gone);
    let mut client = Client::connect(&served, Style::Simple, &[]);
    write_and_flush(&mut client, 3, &NEW);
    control.try_again();
    wait_until("the write is still held", || control.held().is_none());
    assert_eq!(read(&mut client, 3), NEW);
    drop(client);
    served.stop();
}

#[test]
fn a_client_that_has_gone_is_noticed_while_there_is_no_room_for_more_requests() {
    const ROOM: usize = 4;
    let options = ServerOptions::default().with(|options| options.limits.requests = ROOM);
    let mut served = served(&format!("on-error=hold,filter=error:kinds=write:count={ROOM}"), options);
    let control = control(&served);
    let mut gone = Client::connect(&served, Style::Simple, &[]);
    (0..ROOM).for_each(|_| send_write(&mut gone, 3, &OLD));
    wait_until("the writes are not held", || control.held().is_some_and(|held| held.requests == ROOM));
    // Its end comes behind this, which is not received.
    send_write(&mut gone, 4, &OLD);
    drop(gone);
    let mut client = Client::connect(&served, Style::Simple, &[]);
    write_and_flush(&mut client, 3, &NEW);
    control.try_again();
    wait_until("writes are still held", || control.held().is_none());
    assert_eq!(read(&mut client, 3), NEW);
    wait_until("the connection is still there", || served.server().connections() == 1);
    drop(client);
    served.stop();
}

#[test]
fn writes_of_a_client_that_has_gone_do_not_wait_in_line() {
    const WRITES: usize = 20;
    let mut served = Served::raw(1 << 20, ServerOptions::default());
    let limits = ThrottleLimits::default().with(|limits| limits.writes.requests = Rate::of(20));
    let slow = FilterDisk::new(Arc::clone(&served.disk(0).disk) as _, Throttle::new(ThrottleGroup::new(limits)));
    let slow = NbdExport::new("slow", Arc::new(slow));
    served.server().add(slow.clone()).unwrap();
    let mut gone = Client::connect_to(&served, "slow", Style::Simple, &[]);
    (0..WRITES).for_each(|block| send_write(&mut gone, block, &OLD));
    drop(gone);
    // What it writes does not wait.
    let mut client = Client::connect(&served, Style::Simple, &[]);
    write_and_flush(&mut client, WRITES - 1, &NEW);
    wait_until("the connection is still there", || served.server().connections() == 1);
    assert_eq!(read(&mut client, WRITES - 1), NEW);
    // Nobody met an error, and the storage had none.
    assert_eq!(slow.stats().io_errors, 0);
    drop((client, slow));
    served.stop();
}

#[test]
fn a_client_that_says_goodbye_has_its_writes_carried_out() {
    const WRITES: usize = 5;
    let mut served = served("filter=throttle:iops-write=20", ServerOptions::default());
    let mut leaving = Client::connect(&served, Style::Simple, &[]);
    for block in 0..WRITES {
        leaving.send(command::WRITE, command_flag::FUA, (block * BLOCK) as u64, BLOCK as u64, &OLD);
    }
    leaving.send(command::DISC, 0, 0, 0, &[]);
    drop(leaving);
    wait_until("the connection is still there", || served.server().connections() == 0);
    let mut client = Client::connect(&served, Style::Simple, &[]);
    for block in 0..WRITES {
        assert_eq!(read(&mut client, block), OLD, "block {block}");
    }
    drop(client);
    served.stop();
}
