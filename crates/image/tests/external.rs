//! External data files: what an image may name as one, and disks that rest on them.
#![allow(clippy::unwrap_used)]

mod common;

use block::{ErrorKind, File};
use common::{Chain, Layer, SimOpener, name};
use format_qcow2::CreateOptions as Qcow2Options;
use ringdisk_image::{BackingPolicy, CreateOptions, GrowBy, ImageOptions};
use std::sync::Arc;
use testkit::{Session, SimFileOptions, SimStorage, qcow2_check};

#[test]
fn a_data_file_that_is_another_part_of_the_disk_is_refused() {
    for (top_data, base_data) in [("top", "other"), ("base", "other"), ("data", "data"), ("data", "top")] {
        let storage = SimStorage::new(1);
        for (image, data, backing) in [("base", base_data, None), ("top", top_data, Some("base"))] {
            let file: Arc<dyn File> = storage.create(image, 0, SimFileOptions::default());
            let scratch: Arc<dyn File> = storage.create(&format!("{image}.scratch"), 0, SimFileOptions::default());
            let options = Qcow2Options::default().with(|options| {
                options.size_bytes = 1 << 20;
                options.data_file = Some(data.to_owned());
                options.backing_file = backing.map(str::to_owned);
                options.backing_format = backing.map(|_| "qcow2".to_owned());
            });
            ringdisk_image::create_with_data(&file, Some(&scratch), &CreateOptions::Qcow2(options)).unwrap();
        }
        storage.create("data", 1 << 20, SimFileOptions::default());
        storage.create("other", 1 << 20, SimFileOptions::default());
        let options = ImageOptions::new("top").with(|options| options.allow_backing = BackingPolicy::Any);
        let error = ringdisk_image::open(&options, &SimOpener(storage)).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadImage, "{error}");
        assert!(error.to_string().contains("data file"), "{error}");
    }
}

#[test]
fn a_disk_that_grows_above_an_external_data_file_shows_what_it_showed_and_then_zeros() {
    let size_bytes = (98 << 10) + 512;
    let tops = [
        Layer::qcow2(size_bytes, 65536),
        Layer::Extended { size_bytes, cluster_size: 65536 },
        Layer::External { size_bytes, cluster_size: 65536, raw: false, extended: false },
        Layer::External { size_bytes, cluster_size: 65536, raw: false, extended: true },
    ];
    for (used, top) in [false, true].into_iter().flat_map(|used| tops.clone().map(|top| (used, top))) {
        let base = Layer::External { size_bytes: 200 << 10, cluster_size: 16384, raw: false, extended: false };
        let chain = Chain { used, ..Chain::of(vec![top, base]) };
        let storage = chain.storage();
        let read = || {
            let mut session = Session::open(&storage, &|storage| chain.open(storage), 1, 1).unwrap();
            let contents = session.read_all().unwrap();
            session.close().unwrap();
            contents
        };
        let mut expected = read();
        let image = ringdisk_image::open(&ImageOptions::new(&name(0)), &SimOpener(storage.clone())).unwrap();
        image.resize(180 << 10, false, GrowBy::Nothing, &mut |_, _| true).unwrap();
        expected.resize(180 << 10, 0);
        assert!(read() == expected, "{:?}, used before: {used}", chain.top());
        let report = qcow2_check(&storage.bytes(&name(0))).unwrap();
        report.sound().unwrap();
        assert_eq!(report.leaked_clusters, 0);
    }
}
