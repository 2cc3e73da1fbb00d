//! Disks in a cluster, of whichever kind.

#![allow(dead_code, reason = "each test file uses its part")]

use block::{Disk, File, ReactorHandle};
use engine::{Reactor, ReactorConfig, ReactorThread};
use format_qcow2::CreateOptions as Qcow2Options;
use image::{CreateOptions, FileName, Format, ImageOptions, Opener, Role};
use ringdisk_file_rbd::{RbdName, RbdOptions, create, open};
use std::sync::Arc;
use testkit::ThreadHarness;
use testkit::conformance::{Subject, run};

const SIZE: u64 = 1 << 20;

/// Opens images of a cluster.
pub(crate) struct InCluster;

impl Opener for InCluster {
    fn open(&self, name: &FileName, role: Role) -> block::Result<Arc<dyn File>> {
        let FileName::Rbd(name) = name else { panic!("'{name}' is opened") };
        open(&RbdName::parse(name)?, &RbdOptions::default().with(|options| options.read_only = role != Role::Writable))
    }
}

/// A disk in a new image.
pub(crate) fn make_disk(name: &str, format: Format, size_bytes: u64, read_only: bool) -> Arc<dyn Disk> {
    create(&RbdName::parse(name).unwrap(), 0).unwrap();
    let options = match format {
        Format::Qcow2 => CreateOptions::Qcow2(Qcow2Options::default().with(|options| {
            options.size_bytes = size_bytes;
            options.cluster_size = 4096;
        })),
        _ => CreateOptions::raw(size_bytes),
    };
    let file = InCluster.open(&FileName::parse(name).unwrap(), Role::Writable).unwrap();
    image::create(&file, &options).unwrap();
    drop(file);
    open_disk(name, format, read_only)
}

pub(crate) fn open_disk(name: &str, format: Format, read_only: bool) -> Arc<dyn Disk> {
    let options = ImageOptions::new(FileName::parse(name).unwrap()).with(|options| {
        options.format = Some(format);
        options.read_only = read_only;
    });
    Arc::new(image::open(&options, &InCluster).unwrap())
}

pub(crate) fn reactors(count: usize) -> Vec<ReactorThread> {
    let config = |index| ReactorConfig::default().with(|config| config.name = format!("test-{index}"));
    (0..count).map(|index| Reactor::spawn(config(index)).unwrap()).collect()
}

pub(crate) fn handles(reactors: &[ReactorThread]) -> Vec<Arc<dyn ReactorHandle>> {
    reactors.iter().map(ReactorThread::handle).collect()
}

/// Runs the suite on raw and qcow2 disks, each in an image that gets its name by a number.
pub(crate) fn conforms(name: &dyn Fn(usize) -> String) {
    let mut number = 0;
    for format in [Format::Raw, Format::Qcow2] {
        let mut make = |read_only| {
            number += 1;
            Some(make_disk(&name(number), format, SIZE, read_only))
        };
        let threads = reactors(2);
        let mut subject = Subject { make: &mut make, keeps_data: true, seed: 1 };
        let report = run(&mut ThreadHarness::new(handles(&threads)), &mut subject);
        assert!(report.failures.is_empty() && report.skipped.is_empty(), "{format}: {report:#?}");
        threads.into_iter().for_each(|thread| thread.stop().unwrap());
    }
}
