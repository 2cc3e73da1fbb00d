//! The images that mutation starts from: small ones, one for each structure that parsers may fail on.

use crate::disk::{Disk, MARK};
use block::{MetaIo, OpFlags, block_on};
use format_qcow2::{CreateOptions, create};
use std::sync::OnceLock;
use testkit::{Request, SimFileOptions, SimStorage, stamped};

/// The size of the disks that we make.
const SIZE_BYTES: u64 = 96 << 10;

/// Images made by other programs: snapshots, both compressions.
const FOREIGN: [&[u8]; 3] = [
    include_bytes!("../seeds/snapshot.qcow2"),
    include_bytes!("../seeds/zlib.qcow2"),
    include_bytes!("../seeds/zstd.qcow2"),
];

/// Returns all golden images.
pub(crate) fn images() -> &'static [Vec<u8>] {
    static IMAGES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    IMAGES.get_or_init(|| {
        let ours = [(512, 3, 16), (4096, 3, 1), (512, 2, 16), (1024, 3, 64)];
        let ours = ours.into_iter().map(|(cluster_size, version, refcount_bits)| {
            made(&CreateOptions::default().with(|options| {
                options.size_bytes = SIZE_BYTES;
                options.cluster_size = cluster_size;
                options.version = version;
                options.refcount_bits = refcount_bits;
            }))
        });
        ours.chain(FOREIGN.into_iter().map(<[u8]>::to_vec)).collect()
    })
}

fn made(options: &CreateOptions) -> Vec<u8> {
    let storage = SimStorage::new(1);
    let file = storage.create("golden", 0, SimFileOptions::default());
    let io = block::File::open_blocking(&*file).map(MetaIo::new);
    let created = io.and_then(|io| block_on(create(&io, options)));
    assert!(created.is_ok(), "a golden image cannot be made: {created:?}");
    let mut disk = match Disk::open(&storage.bytes("golden"), false) {
        Ok(disk) => disk,
        Err(error) => panic!("a golden image cannot be opened: {error}"),
    };
    let zeroes = |may_unmap| Request::WriteZeroes { offset: 8 << 10, length: 8 << 10, may_unmap, flags: OpFlags::NONE };
    disk.ask(vec![
        Request::write(0, stamped(1, 0, 24 << 10)),
        zeroes(false),
        Request::write(70 << 10, stamped(2, 70 << 10, 10 << 10)),
        Request::write(90 << 10, vec![MARK; 512]),
    ]);
    disk.ask(vec![Request::Discard { offset: 20 << 10, length: 4096 }, Request::Flush]);
    disk.close();
    disk.bytes()
}
