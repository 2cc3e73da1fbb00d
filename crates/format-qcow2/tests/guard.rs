//! The overlap guard: a write that would land in another's table is refused, the image is marked corrupt and fails from
//! then on, and every table is as it was.
#![allow(clippy::unwrap_used)]

mod common;

use block::{ErrorKind, IoErrorKind, IoResult, block_on};
use common::{Base, Guest, NAME, blocking, created, open, open_bytes, open_options};
use ringdisk_format_qcow2::{CreateOptions, Overwrite, Qcow2};
use testkit::{SimFileOptions, SimStorage, fill_seeded};

const CLUSTER: usize = 4096;
const COPIED: u64 = 1 << 63;
/// Bytes of the disk that one L2 table maps.
const TABLE_SPAN: u64 = (CLUSTER * CLUSTER / 8) as u64;

fn options() -> CreateOptions {
    CreateOptions::default().with(|options| {
        options.size_bytes = 4 * TABLE_SPAN;
        options.cluster_size = CLUSTER as u64;
    })
}

/// A disk of several L2 tables, with data in the first two.
fn image() -> Vec<u8> {
    let (storage, file) = created(&options(), SimFileOptions::default());
    let guest = open(&file, Base::default());
    let mut data = vec![0; 10 * CLUSTER];
    fill_seeded(1, &mut data);
    block_on(async {
        guest.write(0, &data).await.unwrap();
        guest.write(TABLE_SPAN, &data).await.unwrap();
        guest.close().await.unwrap();
    });
    storage.bytes(NAME)
}

fn word(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap())
}

fn put(bytes: &mut [u8], at: u64, value: u64) {
    bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
}

/// Where the tables lie.
struct Places {
    l1: u64,
    l2: [u64; 2],
    table: u64,
    block: u64,
}

fn places(image: &[u8]) -> Places {
    let (l1, table) = (word(image, 40), word(image, 48));
    let offset = |at| word(image, at) & !COPIED;
    Places { l1, l2: [offset(l1), offset(l1 + 8)], table, block: word(image, table) }
}

fn kind(result: IoResult) -> Result<(), IoErrorKind> {
    result.map_err(|error| error.kind())
}

/// What a stopped image does: everything fails, the header says corrupt, and nothing else has changed in any table.
fn assert_stopped(storage: &SimStorage, guest: &Guest, before: &[u8], what: &str) {
    let corrupt = Err(IoErrorKind::Corrupt);
    block_on(async {
        assert_eq!(kind(guest.read(0, 512).await.map(drop)), corrupt, "{what}: reading");
        assert_eq!(kind(guest.read(3 * TABLE_SPAN, 512).await.map(drop)), corrupt, "{what}: reading what is not there");
        assert_eq!(kind(guest.write(5 * CLUSTER as u64, &[1; 512]).await), corrupt, "{what}: writing");
        assert_eq!(kind(guest.discard(0, CLUSTER as u64).await), corrupt, "{what}: discarding");
        assert_eq!(kind(guest.discard(3 * TABLE_SPAN, CLUSTER as u64).await), corrupt, "{what}: discarding nothing");
        assert_eq!(kind(guest.flush().await), corrupt, "{what}: flushing");
        assert_eq!(kind(guest.close().await), corrupt, "{what}: closing");
    });
    assert_eq!(guest.lookup_overwrite(5 * CLUSTER as u64, 512), Overwrite::Slow, "{what}");
    // The bit is durable.
    let after = storage.power_cut(1).bytes(NAME);
    assert_eq!(after[79] & 2, 2, "{what}: the corrupt bit");
    let places = places(before);
    for table in [0, places.l1, places.l2[0], places.l2[1], places.table, places.block] {
        let range = table as usize..table as usize + CLUSTER;
        let mut now = after[range.clone()].to_vec();
        if table == 0 {
            now[79] &= !2;
        }
        assert!(now == before[range], "{what}: the table at {table:#x} has changed");
    }
    let file = storage.file(NAME).unwrap();
    let info = block::File::info(&*file);
    let error = block_on(Qcow2::open(&blocking(&file), info, open_options(false))).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadImage, "{what}");
    assert!(error.to_string().contains("marked corrupt"), "{what}: {error}");
}

#[test]
fn an_image_whose_tables_lead_into_each_other_is_stopped_by_the_first_write_that_would_harm_one() {
    let image = image();
    let Places { l1, l2, table, block } = places(&image);
    let entry = l2[0] + 5 * 8;
    // Which word is changed, and to what.
    let owners = [("L1", l1), ("L2", l2[0]), ("the next L2", l2[1]), ("a refcount block", block), ("the table", table)];
    let mut cases: Vec<(String, u64, u64)> =
        owners.into_iter().map(|(name, at)| (format!("data lead into {name}"), entry, at | COPIED)).collect();
    cases.extend(
        [
            ("an L2 table lies in the refcount block", l1, block | COPIED),
            ("an L2 table lies in the refcount table", l1, table | COPIED),
            ("an L2 table lies in L1", l1, l1 | COPIED),
            ("two parts of the disk share an L2 table", l1, l2[1] | COPIED),
            ("the refcount block lies in an L2 table", table, l2[0]),
            ("the refcount block lies in L1", table, l1),
            ("a second refcount block lies in an L2 table that is idle", table + 8, l2[1]),
        ]
        .map(|(what, at, value)| (what.to_owned(), at, value)),
    );
    for (what, at, value) in cases {
        let mut bytes = image.clone();
        put(&mut bytes, at, value);
        let (storage, guest) = open_bytes(&bytes, Base::default());
        // Some of it comes to light where it would be written.
        let results = block_on(async {
            let overwrites = guest.write(5 * CLUSTER as u64, &[0xee; CLUSTER]).await;
            let allocates = guest.write(2 * TABLE_SPAN, &[0xee; CLUSTER]).await;
            let idle = guest.write(TABLE_SPAN, &[0xee; 512]).await;
            [overwrites, allocates, idle, guest.flush().await]
        });
        assert!(results.contains(&Err(block::IoError::new(IoErrorKind::Corrupt))), "{what}: nobody noticed");
        assert_stopped(&storage, &guest, &bytes, &what);
    }
}

#[test]
fn a_table_that_was_only_read_so_far_is_not_overwritten_either() {
    let mut bytes = image();
    let Places { l2, block, .. } = places(&bytes);
    put(&mut bytes, l2[0] + 5 * 8, block | COPIED);
    let (storage, guest) = open_bytes(&bytes, Base::default());
    let target = 5 * CLUSTER as u64;
    block_on(async {
        // The slice is in memory now, and nobody has asked to write yet.
        guest.read(target, 512).await.unwrap();
        assert_eq!(guest.lookup_overwrite(target, 512), Overwrite::Slow);
        assert_eq!(kind(guest.write(target, &[0xee; 512]).await), Err(IoErrorKind::Corrupt));
    });
    assert_stopped(&storage, &guest, &bytes, "data lead into a refcount block");
}

#[test]
fn a_table_is_guarded_until_the_copy_that_takes_its_place_is_published() {
    let mut bytes = image();
    let Places { l1, l2, block, .. } = places(&bytes);
    // As with a snapshot the table is used twice, so that the first write copies it; and data of its own lead into it.
    put(&mut bytes, l1, l2[0]);
    let count = (block + l2[0] / CLUSTER as u64 * 2) as usize;
    assert_eq!(bytes[count..count + 2], [0, 1], "this is not its refcount");
    bytes[count + 1] = 2;
    put(&mut bytes, l2[0] + 5 * 8, l2[0] | COPIED);
    let (storage, guest) = open_bytes(&bytes, Base::default());
    let target = 5 * CLUSTER as u64;
    block_on(async {
        guest.write(0, &[1; 512]).await.unwrap();
        assert_eq!(guest.lookup_overwrite(target, 512), Overwrite::Slow);
        assert_eq!(kind(guest.write(target, &[0xee; 512]).await), Err(IoErrorKind::Corrupt));
    });
    assert_stopped(&storage, &guest, &bytes, "data lead into a table that is being copied");
}

#[test]
fn a_second_mapping_of_space_that_has_become_a_table_cannot_eat_the_table() {
    let mut bytes = image();
    let Places { l2, .. } = places(&bytes);
    // Two clusters of the disk in one place, counted once.
    let shared = word(&bytes, l2[0]);
    put(&mut bytes, l2[0] + 5 * 8, shared);
    let (storage, guest) = open_bytes(&bytes, Base::default());
    let second = 5 * CLUSTER as u64;
    let eaten = block_on(async {
        guest.write(second, &[0xaa; 512]).await.unwrap();
        assert!(matches!(guest.lookup_overwrite(second, 512), Overwrite::InPlace { .. }));
        // The first mapping frees the space; a new L2 table takes it.
        guest.discard(0, CLUSTER as u64).await.unwrap();
        guest.flush().await.unwrap();
        guest.write(3 * TABLE_SPAN, &[0xbb; CLUSTER]).await.unwrap();
        guest.flush().await.unwrap();
        guest.write(second, &[0xee; CLUSTER]).await
    });
    let table = word(&storage.bytes(NAME), word(&bytes, 40) + 3 * 8) & !COPIED;
    assert_eq!(table, shared & !COPIED, "the table took the space, or this shows nothing");
    assert_eq!(kind(eaten), Err(IoErrorKind::Corrupt));
    let after = storage.bytes(NAME);
    assert!(!after[table as usize..table as usize + CLUSTER].contains(&0xee), "the guest's data are in an L2 table");
    assert_eq!(after[79] & 2, 2);
}

#[test]
fn tables_of_snapshots_are_guarded_too() {
    if !common::has_tool("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshot.qcow2");
    std::fs::write(&path, image()).unwrap();
    common::run("qemu-img", &["snapshot", "-c", "one", path.to_str().unwrap()]);
    let bytes = std::fs::read(&path).unwrap();
    let (_, guest) = open_bytes(&bytes, Base::default());
    block_on(guest.write(0, &[7; CLUSTER])).unwrap();
    block_on(guest.close()).unwrap();

    let (snapshots, l1) = (word(&bytes, 64), word(&bytes, 40));
    let snapshot_l1 = word(&bytes, snapshots);
    let snapshot_l2 = word(&bytes, snapshot_l1) & !COPIED;
    assert_eq!(snapshot_l2, word(&bytes, l1), "shared with the snapshot");
    // Data into each table of the snapshot, through the second L2 table, made our own first.
    let (storage, guest) = open_bytes(&bytes, Base::default());
    block_on(guest.write(TABLE_SPAN, &[7; CLUSTER])).unwrap();
    block_on(guest.close()).unwrap();
    let own = storage.bytes(NAME);
    let l2 = word(&own, l1 + 8) & !COPIED;
    let mut cases = vec![("L2 of the snapshot", l1, snapshot_l2 | COPIED, 0)];
    for (what, at) in [("snapshot table", snapshots), ("L1 of the snapshot", snapshot_l1), ("its L2", snapshot_l2)] {
        cases.push((what, l2 + 5 * 8, at | COPIED, TABLE_SPAN + 5 * CLUSTER as u64));
    }
    for (what, at, value, target) in cases {
        let mut bytes = own.clone();
        put(&mut bytes, at, value);
        let (storage, guest) = open_bytes(&bytes, Base::default());
        assert_eq!(kind(block_on(guest.write(target, &[0xee; 512]))), Err(IoErrorKind::Corrupt), "{what}");
        let after = storage.bytes(NAME);
        assert_eq!(after[79] & 2, 2, "{what}");
        assert!(after.iter().zip(&bytes).enumerate().all(|(at, (new, old))| at == 79 || new == old), "{what}");
    }
}
