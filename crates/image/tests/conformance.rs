//! The suite that every disk runs, over raw and qcow2 images, chains, and the null disk.

mod common;

use block::Disk;
use common::{Chain, Layer, open_as};
use ringdisk_image::NullDisk;
use std::sync::Arc;
use testkit::conformance::{Subject, run};
use testkit::{SimFileOptions, SimHarness};

const SIZE: u64 = 1 << 20;

fn conforms(chain: &Chain) {
    for seed in common::seeds(1) {
        let format = match chain.top() {
            Layer::Raw(_) => ringdisk_image::Format::Raw,
            Layer::Qcow2 { .. } | Layer::Extended { .. } | Layer::External { .. } => ringdisk_image::Format::Qcow2,
        };
        let mut make = |read_only| {
            let opened = match read_only {
                true => open_as(&chain.storage(), 0, format, true, &[]),
                false => chain.open(&chain.storage()),
            };
            Some(opened.unwrap_or_else(|error| panic!("{chain:?}: {error}")).disk)
        };
        let mut subject = Subject { make: &mut make, keeps_data: true, seed };
        let report = run(&mut SimHarness::new(seed, 3), &mut subject);
        assert!(report.failures.is_empty(), "{chain:?}: {:#?}", report.failures);
        assert!(report.skipped.is_empty(), "{:?}", report.skipped);
    }
}

fn versions() -> impl Iterator<Item = (u32, u32)> {
    [(2, 16)].into_iter().chain([1, 2, 4, 8, 16, 32, 64].map(|bits| (3, bits)))
}

#[test]
fn raw_files_and_devices_conform() {
    conforms(&Chain::of(vec![Layer::Raw(SIZE)]));
    conforms(&Chain::of(vec![Layer::Raw(SIZE + 100)]));
    let cannot = SimFileOptions { can_discard: false, fast_zeroes: false, ..SimFileOptions::default() };
    conforms(&Chain { file: cannot, ..Chain::of(vec![Layer::Raw(SIZE)]) });
    let device = SimFileOptions { block_device: true, discard_zeroes: true, ..SimFileOptions::default() };
    conforms(&Chain { file: device, ..Chain::of(vec![Layer::Raw(SIZE)]) });
}

#[test]
fn qcow2_conforms_with_every_refcount_width_and_version() {
    for (version, refcount_bits) in versions() {
        conforms(&Chain::of(vec![Layer::Qcow2 { size_bytes: SIZE, cluster_size: 4096, version, refcount_bits }]));
    }
}

#[test]
fn qcow2_conforms_with_small_and_large_clusters() {
    for cluster_size in [512, 1024, 65536, 2 << 20] {
        conforms(&Chain::of(vec![Layer::qcow2(SIZE, cluster_size)]));
    }
}

#[test]
fn qcow2_conforms_where_the_file_promises_less() {
    for (can_discard, discard_zeroes, fast_zeroes) in [(false, false, false), (true, false, true), (true, true, false)]
    {
        let file = SimFileOptions { can_discard, discard_zeroes, fast_zeroes, ..SimFileOptions::default() };
        conforms(&Chain { file, ..Chain::of(vec![Layer::qcow2(SIZE, 4096)]) });
    }
    let file = SimFileOptions { block_device: true, ..SimFileOptions::default() };
    conforms(&Chain { file, device_bytes: Some(4 << 20), ..Chain::of(vec![Layer::qcow2(SIZE, 4096)]) });
}

#[test]
fn qcow2_conforms_with_clusters_in_parts() {
    for cluster_size in [16384, 65536, 2 << 20] {
        conforms(&Chain::of(vec![Layer::Extended { size_bytes: SIZE + 1536, cluster_size }]));
    }
    let extended = |size_bytes| Layer::Extended { size_bytes, cluster_size: 16384 };
    conforms(&Chain::of(vec![extended(SIZE), Layer::Raw(SIZE / 2 + 100)]));
    conforms(&Chain::of(vec![extended(SIZE), Layer::qcow2(SIZE / 4, 4096), extended(SIZE)]));
    let file = SimFileOptions { can_discard: false, fast_zeroes: false, ..SimFileOptions::default() };
    conforms(&Chain { file, ..Chain::of(vec![extended(SIZE)]) });
}

#[test]
fn qcow2_conforms_with_an_external_data_file() {
    let external = |raw, extended| Layer::External { size_bytes: SIZE + 1536, cluster_size: 16384, raw, extended };
    conforms(&Chain::of(vec![external(false, false)]));
    conforms(&Chain::of(vec![external(true, false)]));
    conforms(&Chain::of(vec![external(true, true)]));
    conforms(&Chain::of(vec![external(false, true), Layer::Raw(SIZE / 2 + 100)]));
    conforms(&Chain::of(vec![external(false, false), external(true, false)]));
}

#[test]
fn chains_conform() {
    // Below: as large, larger, smaller and not at a cluster's end; other clusters; several layers.
    conforms(&Chain::of(vec![Layer::qcow2(SIZE, 4096), Layer::Raw(SIZE)]));
    conforms(&Chain::of(vec![Layer::qcow2(SIZE, 65536), Layer::Raw(SIZE / 2 + 100)]));
    conforms(&Chain::of(vec![Layer::qcow2(SIZE + 512, 512), Layer::qcow2(SIZE * 2, 65536)]));
    let old = Layer::Qcow2 { size_bytes: SIZE, cluster_size: 8192, version: 2, refcount_bits: 16 };
    conforms(&Chain::of(vec![old, Layer::qcow2(SIZE / 4, 4096), Layer::Raw(SIZE)]));
}

#[test]
fn chains_conform_with_the_smallest_cache_there_can_be() {
    let chain = vec![Layer::qcow2(SIZE, 512), Layer::qcow2(SIZE / 2 + 512, 4096), Layer::qcow2(SIZE, 1024)];
    conforms(&Chain { table_cache_bytes: Some(0), ..Chain::of(chain) });
}

#[test]
fn the_null_disk_conforms_in_all_that_needs_no_data() {
    let mut make =
        |read_only: bool| (!read_only).then(|| Arc::new(NullDisk::new(1 << 32, String::new())) as Arc<dyn Disk>);
    let mut subject = Subject { make: &mut make, keeps_data: false, seed: 1 };
    run(&mut SimHarness::new(1, 2), &mut subject).assert_passed();
}
