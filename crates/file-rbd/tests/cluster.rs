//! Images of a real cluster.

mod common;

use block::{File, FileOp, IoError, IoResult, PastEnd, block_on};
use common::{conforms, handles, make_disk, reactors};
use image::Format;
use memory::IoBuf;
use ringdisk_file_rbd::{RbdName, RbdOptions, create, open, remove};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use testkit::{CephNode, HistoryLoad, SectorHistory};

const SIZE: u64 = 8 << 20;
const SECTOR: u64 = 512;

fn read_all(name: &str) -> Vec<u8> {
    let reading = RbdOptions::default().with(|options| options.read_only = true);
    let file = open(&RbdName::parse(name).unwrap(), &reading).unwrap();
    let data = IoBuf::zeroed(file.length_bytes().unwrap() as usize).whole();
    let read = FileOp::Read { offset: 0, data: data.clone(), past_end: PastEnd::Fails };
    block_on(file.open_blocking().unwrap().start(read)).unwrap();
    data.to_vec()
}

#[test]
fn disks_in_a_real_cluster_conform() {
    let Some(cluster) = CephNode::start() else { return };
    conforms(&|number| cluster.name(&format!("image{number}")));
}

fn opened(name: &str) -> Arc<dyn File> {
    open(&RbdName::parse(name).unwrap(), &RbdOptions::default()).unwrap()
}

fn perform(file: &dyn File, op: FileOp) {
    block_on(file.open_blocking().unwrap().start(op)).unwrap();
}

fn try_to_fill(file: &dyn File, offset: u64, length: usize, byte: u8) -> IoResult {
    let data = IoBuf::zeroed(length).whole();
    data.fill(byte);
    block_on(file.open_blocking().unwrap().start(FileOp::Write { offset, data, fua: false }))
}

fn fill(file: &dyn File, offset: u64, length: usize, byte: u8) {
    try_to_fill(file, offset, length, byte).unwrap();
}

/// Where the cluster says that there are data.
fn data_of(file: &dyn File) -> Vec<Range<u64>> {
    let (mut at, mut found) = (0, Vec::new());
    while at < SIZE {
        let (is_hole, length) = file.hole_at(at, SIZE - at).unwrap();
        if !is_hole {
            found.push(at..at + length);
        }
        at += length;
    }
    found
}

#[test]
fn a_clone_shows_its_parent_and_leaves_it_alone() {
    const MIB: usize = 1 << 20;
    let Some(cluster) = CephNode::start() else { return };
    let (parent, child) = (cluster.name("parent"), cluster.name("child"));
    create(&RbdName::parse(&parent).unwrap(), SIZE).unwrap();
    let file = opened(&parent);
    fill(&*file, 0, 3 * MIB, 1);
    perform(&*file, FileOp::Flush);
    drop(file);
    for call in [&["snap", "create", "disks/parent@s"][..], &["snap", "protect", "disks/parent@s"]] {
        cluster.run("rbd", call);
    }
    cluster.run("rbd", &["clone", "disks/parent@s", "disks/child"]);
    let before = read_all(&parent);
    assert!(read_all(&child) == before);

    let file = opened(&child);
    let covers = |file: &dyn File, range: Range<u64>| {
        data_of(file).iter().any(|data| data.start <= range.start && range.end <= data.end)
    };
    assert!(covers(&*file, 0..3 << 20), "what the parent has are data: {:?}", data_of(&*file));
    fill(&*file, 1 << 20, MIB, 9);
    perform(&*file, FileOp::WriteZeroes { offset: 2 << 20, length: 1 << 20, may_unmap: true });
    fill(&*file, 6 << 20, MIB, 7);
    assert!(covers(&*file, 0..2 << 20) && covers(&*file, 6 << 20..7 << 20), "{:?}", data_of(&*file));
    perform(&*file, FileOp::Flush);
    drop(file);
    let expected = [vec![1; MIB], vec![9; MIB], vec![0; 4 * MIB], vec![7; MIB], vec![0; MIB]].concat();
    assert!(read_all(&child) == expected && read_all(&parent) == before);
    cluster.run("rbd", &["flatten", "--no-progress", "disks/child"]);
    assert!(read_all(&child) == expected);
    assert!(read_all(&cluster.name("parent@s")) == before);
}

#[test]
fn a_user_reaches_what_its_key_is_for_and_no_message_has_the_key() {
    let Some(cluster) = CephNode::start() else { return };
    cluster.run("rbd", &["namespace", "create", "disks/tenant"]);
    for image in ["tenant/disk", "theirs"] {
        create(&RbdName::parse(&cluster.name(image)).unwrap(), SIZE).unwrap();
    }
    assert_eq!(cluster.run("rbd", &["ls", "disks/tenant"]).trim(), "disk");
    let keyring = cluster.add_user("vm", "profile rbd pool=disks namespace=tenant");
    let as_user = |image: &str, user: &str, keyring: &Path| {
        RbdName::parse(&format!("{}:id={user}:keyring={}", cluster.name(image), keyring.display())).unwrap()
    };
    let own = as_user("tenant/disk", "vm", &keyring);
    let file = open(&own, &RbdOptions::default()).unwrap();
    fill(&*file, 4096, 4096, 5);
    perform(&*file, FileOp::Flush);
    drop(file);
    assert_eq!(read_all(&cluster.name("tenant/disk"))[4095..8193], [&[0][..], &[5; 4096], &[0]].concat());

    // A key that is not this user's, and places that it is not for.
    let wrong = keyring.with_file_name("wrong.keyring");
    cluster.run("ceph-authtool", &["--create-keyring", wrong.to_str().unwrap(), "--gen-key", "-n", "client.vm"]);
    let keys = [&keyring, &wrong].map(|file| {
        let text = std::fs::read_to_string(file).unwrap();
        text.lines().find_map(|line| line.trim().strip_prefix("key = ")).unwrap().to_owned()
    });
    for (name, hint) in [
        (as_user("tenant/disk", "vm", &wrong), "does not know this user"),
        (as_user("tenant/disk", "nobody", &keyring), "cannot connect"),
        (as_user("theirs", "vm", &keyring), "cannot open the image"),
        (as_user("disk", "vm", &keyring), "cannot open the image"),
    ] {
        let error = open(&name, &RbdOptions::default()).unwrap_err();
        let told = format!("{error} {error:?} {name} {name:?}");
        assert!(told.contains(hint), "{told}");
        assert!(keys.iter().all(|key| !told.contains(key.as_str())), "{told}");
    }
}

#[test]
fn requests_wait_for_an_osd_that_is_killed_and_nothing_is_lost() {
    let Some(mut cluster) = CephNode::start() else { return };
    let name = cluster.name("disk");
    let disk = make_disk(&name, Format::Raw, SIZE, false);
    let history = Arc::new(SectorHistory::new((SIZE / SECTOR) as usize));
    let threads = reactors(2);
    let load = HistoryLoad::default().start(&disk, &handles(&threads), &history);
    for _ in 0..3 {
        load.wait_for_more(300);
        cluster.kill_osd();
        // What is in flight stays there.
        std::thread::sleep(Duration::from_millis(500));
        cluster.start_osd();
        load.wait_for_more(300);
    }
    assert_eq!(load.finish(), [""; 0]);
    threads.into_iter().for_each(|thread| thread.stop().unwrap());
    drop(disk);
    // Without librbd's cache, what has ended is durable.
    cluster.kill_osd();
    cluster.start_osd();
    for (sector, bytes) in read_all(&name).chunks(SECTOR as usize).enumerate() {
        history.check_survivors(sector as u64, bytes).unwrap();
    }
    remove(&RbdName::parse(&name).unwrap()).unwrap();
}

#[test]
fn an_image_whose_lock_was_broken_is_opened_anew_over_another_connection_and_the_old_one_stays_out() {
    let Some(cluster) = CephNode::start() else { return };
    let name = cluster.name("disk");
    create(&RbdName::parse(&name).unwrap(), SIZE).unwrap();
    let fenced = opened(&name);
    fill(&*fenced, 0, 4096, 1);
    let owners = cluster.run("rbd", &["lock", "ls", "disks/disk", "--format", "json"]);
    let address = owners.split("\"address\":\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    cluster.run("ceph", &["osd", "blocklist", "add", address]);
    let error = loop {
        // Until the OSD knows.
        match try_to_fill(&*fenced, 0, 4096, 1) {
            Ok(()) => std::thread::sleep(Duration::from_millis(20)),
            Err(error) => break error,
        }
    };
    assert_eq!(error, IoError::from_errno(108));
    let patient = RbdOptions::default().with(|options| options.lock_timeout = Duration::from_secs(120));
    let again = open(&RbdName::parse(&name).unwrap(), &patient).unwrap();
    fill(&*again, 0, 4096, 2);
    // Nobody has the lock any more.
    drop(again);
    cluster.run("ceph", &["osd", "blocklist", "rm", address]);
    assert_eq!(try_to_fill(&*fenced, 0, 4096, 1), Err(IoError::from_errno(108)));
    drop(fenced);
    assert_eq!(read_all(&name)[..4096], [2; 4096]);
}
