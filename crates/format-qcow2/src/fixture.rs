//! Images of clusters of 512 bytes for unit tests.

use crate::edit::create::{CreateOptions, create};
use crate::live::image::{OpenOptions, Qcow2};
use crate::live::write::Prepared;
use block::{File, MetaIo, block_on};
use std::ops::Range;
use std::sync::Arc;
use testkit::{SimFile, SimFileOptions, SimStorage};

pub(crate) const NAME: &str = "disk";
pub(crate) const CLUSTER: u64 = 512;

/// Creates an empty image in simulated storage.
pub(crate) fn created(size_bytes: u64) -> (SimStorage, MetaIo) {
    let storage = SimStorage::new(1);
    let io = MetaIo::new(storage.create(NAME, 0, SimFileOptions::default()).open_blocking().unwrap());
    let options = CreateOptions { size_bytes, cluster_size: CLUSTER, ..CreateOptions::default() };
    block_on(create(&io, &options)).unwrap();
    (storage, io)
}

pub(crate) fn file(storage: &SimStorage) -> Arc<SimFile> {
    storage.file(NAME).unwrap()
}

pub(crate) async fn opened(storage: &SimStorage, io: &MetaIo) -> Qcow2 {
    let options = OpenOptions { name: NAME.to_owned(), read_only: false };
    Qcow2::open(io, file(storage).info(), options).await.unwrap()
}

/// Maps all unmapped clusters of a range; their contents are undefined.
pub(crate) async fn fill(qcow2: &Qcow2, io: &MetaIo, bytes: Range<u64>) {
    let mut at = bytes.start;
    while at < bytes.end {
        let Prepared::New(new) = qcow2.prepare_write(io, at, bytes.end - at).await.unwrap() else {
            panic!("something was there before");
        };
        at = new.guest_offset + new.length_bytes;
        qcow2.commit_write(io, new).await.unwrap();
    }
}
