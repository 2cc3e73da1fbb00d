//! A guest's read of a compressed cluster that is held in the storage, while a commit overwrites the cluster.

use super::changing::Untold;
use super::common::{SimOpener, name, open_as};
use block::{Disk, File, Task};
use format_qcow2::CreateOptions as Qcow2Options;
use memory::{AlignedBuf, IoBuf};
use ringdisk_image::{CopyWatch, CreateOptions, Format, Image, ImageOptions, LayerOpeners, PackedCluster};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use testkit::{
    Fault, FaultAction, Harness, OpKind, Request, Session, SimFileOptions, SimHarness, SimStorage, qcow2_check, stamped,
};

const SIZE: u64 = 64 << 10;

fn contents() -> Vec<u8> {
    (0..SIZE).map(|at| (at / 512 % 7) as u8 + 1).collect()
}

fn create(storage: &SimStorage, index: usize, cluster_size: u64, below: Option<usize>) {
    let file: Arc<dyn File> = storage.create(&name(index), 0, SimFileOptions::default());
    let options = Qcow2Options::default().with(|options| {
        options.size_bytes = SIZE;
        options.cluster_size = cluster_size;
        options.backing_file = below.map(name);
        options.backing_format = below.map(|_| "qcow2".to_owned());
    });
    ringdisk_image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
}

fn open(storage: &SimStorage, index: usize) -> Arc<Image> {
    let options = ImageOptions::new(name(index).as_str()).with(|options| {
        options.format = Some(Format::Qcow2);
        options.former_tops = 2;
    });
    Arc::new(ringdisk_image::open(&options, &SimOpener(storage.clone())).unwrap())
}

/// Three layers: the lowest is one compressed cluster, of which the middle one has a part.
fn layers(harness: &SimHarness) -> SimStorage {
    let storage = SimStorage::new(1);
    create(&storage, 2, SIZE, None);
    let image = open(&storage, 2);
    let (its, ctx) = (Arc::clone(&image), harness.reactor().ctx());
    harness.reactor().run(async move {
        let writer = its.compressed_writer(&ctx).unwrap();
        let (mut compressor, mut output) = (writer.compressor().unwrap(), vec![0; SIZE as usize]);
        let length = compressor.compress(&contents(), &mut output).unwrap();
        let cluster = PackedCluster { guest_offset: 0, length_bytes: length as u32 };
        let data = IoBuf::from_aligned(AlignedBuf::copy_of(&output[..length])).whole();
        writer.write(&[cluster], &data).await.unwrap();
    });
    image.close().unwrap();
    create(&storage, 1, 4096, Some(2));
    let open_middle = |storage: &SimStorage| open_as(storage, 1, Format::Qcow2, false, &[]);
    let mut session = Session::open(&storage, &open_middle, 1, 1).unwrap();
    session.call(Request::write(4096, stamped(3, 4096, 4096))).unwrap();
    session.close().unwrap();
    create(&storage, 0, 4096, Some(1));
    storage
}

/// Lets time pass until nothing more comes. Returns what a read of `queue` has found meanwhile, if it has ended.
fn until_idle(harness: &mut SimHarness, queue: u64) -> Option<Vec<u8>> {
    let mut found = None;
    loop {
        let turn = harness.turn();
        for (of, reply) in turn.replies {
            assert_eq!(of, queue);
            reply.result.unwrap();
            found = Some(reply.data);
        }
        if turn.idle {
            return found;
        }
    }
}

#[test]
fn a_commit_does_not_give_back_what_a_read_that_began_before_still_reads() {
    let mut harness = SimHarness::new(1, 2);
    let storage = layers(&harness);
    let image = open(&storage, 0);
    let disk: Arc<dyn Disk> = Arc::clone(&image) as _;
    let queue = harness.open(&disk, 1).unwrap();
    // From here on the tables are in memory, so the next read is of the compressed data.
    harness.submit(queue, vec![(1, Request::read(32 << 10, 4096))]);
    assert!(until_idle(&mut harness, queue).is_some());
    storage.inject(&name(2), Fault::nth(OpKind::Read, 0, FaultAction::Stall));
    harness.submit(queue, vec![(2, Request::read(16 << 10, 4096))]);
    assert_eq!(until_idle(&mut harness, queue), None);

    let (its, is_done) = (Arc::clone(&image), Rc::new(Cell::new(false)));
    let (opener, done) = (SimOpener(storage.clone()), Rc::clone(&is_done));
    harness.reactor().ctx().spawn(Task::new(async move {
        let openers = LayerOpeners { for_writing: &opener, for_reading: &opener };
        let (layer, _) = its.layer_file_names().nth(1).unwrap();
        let watch = CopyWatch::default();
        ringdisk_image::commit_layer_async(&its, &layer, openers, &watch, &mut Untold).await.unwrap();
        done.set(true);
    }));
    // It goes as far as it can.
    assert_eq!(until_idle(&mut harness, queue), None);
    assert!(!is_done.get(), "the layer is gone, and a read of the compressed cluster has not ended");
    storage.release_stalled();
    assert_eq!(until_idle(&mut harness, queue).unwrap(), contents()[16 << 10..20 << 10]);
    assert!(is_done.get() && image.layer_file_names().count() == 2);

    let mut expected = contents();
    expected[4096..8192].copy_from_slice(&stamped(3, 4096, 4096));
    harness.submit(queue, vec![(3, Request::read(0, SIZE as usize))]);
    assert_eq!(until_idle(&mut harness, queue).unwrap(), expected);
    harness.close(queue);
    drop(disk);
    image.close().unwrap();
    qcow2_check(&storage.bytes(&name(2))).unwrap().sound().unwrap();
}
