//! Images of a real cluster.

mod common;

use block::{FileOp, PastEnd, block_on};
use common::{conforms, handles, make_disk, reactors};
use image::Format;
use memory::IoBuf;
use ringdisk_file_rbd::{RbdName, RbdOptions, open, remove};
use std::sync::Arc;
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
        std::thread::sleep(std::time::Duration::from_millis(500));
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
