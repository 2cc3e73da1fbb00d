//! Tables in memory over a chain: the budget is kept, what the layers below say is asked for once, and what is counted.

mod common;

use block::Disk;
use common::{Chain, Layer, SimOpener, name};
use ringdisk_image::{Format, Image, ImageOptions};
use std::sync::Arc;
use testkit::{OpenedDisk, Request, Session, SimStorage, stamped};

const SIZE: u64 = 8 << 20;
const CLUSTER: u64 = 4096;

fn open(storage: &SimStorage, table_cache_bytes: Option<u64>) -> Arc<Image> {
    let options = ImageOptions::new(&name(0)).with(|options| {
        options.format = Some(Format::Qcow2);
        options.table_cache_bytes = table_cache_bytes;
    });
    Arc::new(ringdisk_image::open(&options, &SimOpener(storage.clone())).unwrap())
}

fn session(storage: &SimStorage, image: &Arc<Image>) -> Session {
    let disk = |_: &SimStorage| {
        let closing = Arc::clone(image);
        let disk: Arc<dyn Disk> = Arc::clone(image) as Arc<dyn Disk>;
        Ok(OpenedDisk { disk, close: Box::new(move || closing.close()) })
    };
    Session::open(storage, &disk, 1, 1).unwrap()
}

fn read_all(session: &mut Session) {
    for offset in (0..SIZE).step_by(CLUSTER as usize) {
        session.call(Request::read(offset, 512)).unwrap();
    }
}

fn chain(layers: usize) -> Chain {
    Chain::of(vec![Layer::qcow2(SIZE, CLUSTER); layers])
}

#[test]
fn a_chain_whose_tables_fit_reads_each_once_and_afterwards_only_hits() {
    let storage = chain(5).storage();
    let image = open(&storage, None);
    let mut session = session(&storage, &image);
    read_all(&mut session);
    let first = image.cache_stats();
    assert!(first.misses > 0 && first.evictions == 0, "{first:?}");
    assert!(first.used_bytes <= first.limit_bytes, "{first:?}");
    read_all(&mut session);
    let second = image.cache_stats();
    assert_eq!((second.misses, second.evictions), (first.misses, 0));
    assert_eq!(second.hits - first.hits, SIZE / CLUSTER);
    session.close().unwrap();
}

#[test]
fn layers_below_whose_tables_do_not_fit_are_asked_once() {
    let storage = chain(4).storage();
    // For the top layer and for the merged map, and two slices of four for each layer below.
    let image = open(&storage, Some(56 << 10));
    let mut session = session(&storage, &image);
    read_all(&mut session);
    let first = image.cache_stats();
    assert!(first.evictions > 0, "{first:?}");
    read_all(&mut session);
    assert_eq!(image.cache_stats().misses, first.misses);
    session.close().unwrap();
}

#[test]
fn a_budget_is_kept_over_all_layers() {
    let storage = chain(5).storage();
    let budget = 80 << 10;
    let image = open(&storage, Some(budget));
    let mut session = session(&storage, &image);
    read_all(&mut session);
    read_all(&mut session);
    let stats = image.cache_stats();
    assert!(stats.used_bytes <= stats.limit_bytes && stats.limit_bytes <= budget, "{stats:?}");
    session.close().unwrap();
}

#[test]
fn what_the_top_layer_takes_over_hides_what_the_layers_below_said() {
    let storage = chain(4).storage();
    let image = open(&storage, None);
    let mut session = session(&storage, &image);
    read_all(&mut session);
    read_all(&mut session);
    let (at, bytes) = (10 * CLUSTER, stamped(77, 10 * CLUSTER, CLUSTER as usize));
    session.call(Request::write(at, bytes.clone())).unwrap();
    assert_eq!(session.call(Request::read(at, CLUSTER as usize)).unwrap(), bytes);
    session.call(Request::Discard { offset: at, length: CLUSTER }).unwrap();
    assert_eq!(session.call(Request::read(at, CLUSTER as usize)).unwrap(), vec![0; CLUSTER as usize]);
    session.close().unwrap();
}
