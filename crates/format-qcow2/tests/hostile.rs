//! Damaged and hostile images: refused with a reason and untouched, or served without a panic.
#![allow(clippy::unwrap_used)]

mod common;

use block::{Error, ErrorKind, IoErrorKind, block_on};
use common::{Base, DATA, NAME, blocking, created, open, open_options};
use ringdisk_format_qcow2::{CheckEvent, CreateOptions, Qcow2, check};
use testkit::{Dice, SimFileOptions, SimStorage, fill_seeded};

/// A small image with data, zero clusters and holes.
fn image() -> Vec<u8> {
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = 1 << 20;
        options.cluster_size = 4096;
    });
    let (storage, file) = created(&options, SimFileOptions::default());
    let guest = open(&file, Base::default());
    let mut data = vec![0; 100_000];
    fill_seeded(1, &mut data);
    block_on(async {
        guest.write(10_240, &data).await.unwrap();
        guest.write_zeroes(40_960, 8192, false).await.unwrap();
        guest.close().await.unwrap();
    });
    storage.bytes(NAME)
}

/// What the error must say, its kind, and what to change in a valid image.
type Case<'a> = (&'a str, ErrorKind, &'a [(usize, &'a [u8])]);

fn opened(bytes: &[u8], read_only: bool) -> (SimStorage, Result<Qcow2, Error>) {
    let storage = SimStorage::new(1);
    let file = storage.create_with(NAME, bytes, SimFileOptions::default());
    let result = block_on(Qcow2::open(&blocking(&file), block::File::info(&*file), open_options(read_only)));
    (storage, result)
}

fn patched(image: &[u8], patches: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = image.to_vec();
    for (offset, patch) in patches {
        bytes[*offset..offset + patch.len()].copy_from_slice(patch);
    }
    bytes
}

#[test]
fn impossible_headers_are_refused_with_the_reason_and_the_file_is_untouched() {
    use ErrorKind::{BadImage, Unsupported};
    let image = image();
    let name_row = {
        // The name of incompatible feature 4 becomes that of 40.
        let at = image.windows(19).position(|window| window == b"extended L2 entries").unwrap();
        (at - 1, at)
    };
    let cases: &[Case] = &[
        ("not in qcow2 format", BadImage, &[(0, b"QFJ")]),
        ("version 4", Unsupported, &[(7, &[4])]),
        ("version 1", Unsupported, &[(7, &[1])]),
        ("cluster size: 2^8", BadImage, &[(23, &[8])]),
        ("cluster size: 2^22", BadImage, &[(23, &[22])]),
        ("legacy AES", Unsupported, &[(35, &[1])]),
        ("LUKS", Unsupported, &[(35, &[2])]),
        ("encryption method 3", Unsupported, &[(35, &[3])]),
        ("header_length is 96", BadImage, &[(103, &[96])]),
        ("header_length is 111", BadImage, &[(103, &[111])]),
        ("larger than the first cluster", BadImage, &[(100, &[0, 0, 0x20, 0])]),
        ("marked corrupt", BadImage, &[(79, &[2])]),
        ("does not say in which", BadImage, &[(79, &[4])]),
        ("clusters of at least 16 KiB", BadImage, &[(79, &[16])]),
        ("feature: 8000000000000000", Unsupported, &[(72, &[0x80])]),
        ("feature(s): warp drive", Unsupported, &[(74, &[1]), (name_row.0, &[40]), (name_row.1, b"warp drive\0")]),
        ("contradict", BadImage, &[(79, &[8])]),
        ("contradict", BadImage, &[(104, &[1])]),
        ("compression type: 2", Unsupported, &[(104, &[2]), (79, &[8])]),
        ("refcount_order is 7", BadImage, &[(99, &[7])]),
        ("Image is too big", BadImage, &[(24, &[0x80])]),
        ("L1 table has 1 entries", BadImage, &[(24, &[0, 0, 1]), (36, &[0, 0, 0, 1])]),
        ("at most 33554432", BadImage, &[(36, &[0x7f])]),
        ("L1 table offset", BadImage, &[(46, &[1])]),
        ("L1 table at", BadImage, &[(40, &[0x10])]),
        ("L1 table at 0x0", BadImage, &[(40, &[0; 8])]),
        ("its L1 table ends at byte", BadImage, &[(43, &[1])]),
        ("refcount table has 0 clusters", BadImage, &[(56, &[0; 4])]),
        ("refcount table has 4294967295", BadImage, &[(56, &[0xff; 4])]),
        ("refcount table offset", BadImage, &[(55, &[1])]),
        ("refcount table at 0x0", BadImage, &[(48, &[0; 8])]),
        ("its refcount table ends at byte", BadImage, &[(51, &[1])]),
        ("65537 internal snapshots", BadImage, &[(60, &[0, 1, 0, 1])]),
        ("snapshot table offset", BadImage, &[(63, &[1]), (71, &[1])]),
        ("1024 bytes", BadImage, &[(14, &[1, 0]), (18, &[4, 0])]),
        ("outside the first cluster", BadImage, &[(14, &[15, 255]), (18, &[0, 2])]),
        ("a zero byte", BadImage, &[(14, &[2, 0]), (19, &[1]), (512, &[0])]),
        ("header extension", BadImage, &[(112, &[1, 2, 3, 4, 0, 1, 0, 0])]),
        ("backing format's name", BadImage, &[(112, &[0xe2, 0x79, 0x2a, 0xca, 0, 0, 0, 16])]),
    ];
    for (reason, kind, patches) in cases {
        let bytes = patched(&image, patches);
        let (storage, result) = opened(&bytes, false);
        let error = result.expect_err(reason);
        let text = error.to_string();
        assert!(text.contains(reason) && text.contains(NAME), "wanted '{reason}': {text}");
        assert_eq!(error.kind(), *kind, "{text}");
        assert!(storage.bytes(NAME) == bytes, "{reason}: the file has changed");
    }
    assert!(opened(&patched(&image, &[(79, &[1])]), true).1.is_ok(), "a dirty image may be read");
    assert!(opened(&patched(&image, &[(79, &[2])]), true).1.is_ok(), "one that is marked corrupt, too");
}

#[test]
fn shorter_and_empty_files_are_refused() {
    let image = image();
    for length in [0, 1, 3, 4, 71, 103, 111, 600] {
        let said = opened(&image[..length], false).1.expect_err("it is too short").to_string();
        assert!(!(4..104).contains(&length) || said.contains("header too short"), "{length} bytes: {said}");
    }
}

/// Where the L1 table and the first L2 table lie.
fn tables(image: &[u8]) -> (usize, usize) {
    let word = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap());
    let l1 = word(40) as usize;
    (l1, (word(l1) & 0x00ff_ffff_ffff_fe00) as usize)
}

#[test]
fn damaged_entries_fail_their_requests_only() {
    let image = image();
    let (l1, l2) = tables(&image);
    let entry = |at: usize| -> [u8; 8] { image[at..at + 8].try_into().unwrap() };
    let bad_entries: &[(usize, u64)] = &[
        (l2 + 4 * 8, u64::from_be_bytes(entry(l2 + 4 * 8)) | 2),
        (l2 + 4 * 8, u64::from_be_bytes(entry(l2 + 4 * 8)) | 1 << 60),
        (l2 + 4 * 8, 1 << 63 | 0x5200),
        (l2 + 4 * 8, 1 << 62 | 0x123),
        (l1, u64::from_be_bytes(entry(l1)) | 1),
        (l1, 1 << 63 | 0x1200),
    ];
    for (at, raw) in bad_entries {
        let bytes = patched(&image, &[(*at, &raw.to_be_bytes())]);
        let (storage, guest) = common::open_bytes(&bytes, Base::default());
        block_on(async {
            let corrupt = Err(IoErrorKind::Corrupt);
            assert_eq!(guest.read(4 * 4096, 512).await.map(drop).map_err(|error| error.kind()), corrupt);
            assert_eq!(guest.write(4 * 4096, &[1; 512]).await.map_err(|error| error.kind()), corrupt);
            assert_eq!(guest.discard(4 * 4096, 4096).await.map_err(|error| error.kind()), corrupt);
            assert!(guest.write_zeroes(0, 1 << 20, true).await.is_err());
            // Others go on: 512 entries of 4 KiB a table, so the disk has but one; its other entries are good.
            if *at != l1 {
                guest.write(20 * 4096, &[2; 512]).await.unwrap();
                assert_eq!(guest.read(20 * 4096, 512).await.unwrap(), [2; 512]);
            }
            guest.flush().await.unwrap();
        });
        drop(storage);
    }
}

#[test]
fn space_that_holds_a_table_is_never_handed_out_whatever_the_refcounts_say() {
    let image = image();
    let word = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap()) as usize;
    let block = word(word(48));
    let (_, l2) = tables(&image);
    for table_cluster in [0, word(48) / 4096, block / 4096, word(40) / 4096, l2 / 4096] {
        let bytes = patched(&image, &[(block + 2 * table_cluster, &[0, 0])]);
        let (storage, guest) = common::open_bytes(&bytes, Base::default());
        let before = storage.bytes(NAME)[table_cluster * 4096..][..512].to_vec();
        let mut results = Vec::new();
        for cluster in 100..140 {
            results.push(block_on(guest.write(cluster * 4096, &[0xee; 4096])));
        }
        assert!(results.iter().any(|result| result.is_err()), "nobody noticed cluster {table_cluster}");
        let mut after = storage.bytes(NAME)[table_cluster * 4096..][..512].to_vec();
        if table_cluster == 0 {
            assert_eq!(after[79], 2, "the header says that the image is corrupt");
            after[79] = 0;
        }
        assert!(after == before, "table {table_cluster} is overwritten");
    }
}

#[test]
fn entries_that_lead_into_tables_are_refused_and_the_tables_stay_whole() {
    let image = image();
    let word = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap());
    let (l1, l2) = tables(&image);
    let (table, block) = (word(48), word(word(48) as usize));
    for host in [table, block, l1 as u64, l2 as u64] {
        for (at, raw) in [(l2 + 8 * 8, 1 << 63 | host), (l1, 1 << 63 | host), (l2 + 8 * 8, 1 << 62 | host)] {
            if (at, host) == (l1, l2 as u64) {
                continue;
            }
            let bytes = patched(&image, &[(at, &raw.to_be_bytes())]);
            let (storage, guest) = common::open_bytes(&bytes, Base::default());
            assert!(block_on(guest.write(8 * 4096, &[0xee; 4096])).is_err(), "{host:#x} from {at:#x}");
            let _ = block_on(guest.discard(8 * 4096, 4096));
            let _ = block_on(guest.close());
            let after = storage.bytes(NAME);
            let at = host as usize;
            assert!(after[at..at + 64] == bytes[at..at + 64], "the table at {host:#x} was overwritten");
        }
    }
}

#[test]
fn data_that_do_not_lie_at_their_place_in_the_data_file_are_refused() {
    const CLUSTER: u64 = 16384;
    for extended_l2 in [false, true] {
        let original = of_kind(external().with(|options| options.extended_l2 = extended_l2));
        let image = original.bytes(NAME);
        let (_, l2) = tables(&image);
        let fourth = l2 + 4 * if extended_l2 { 16 } else { 8 };
        for host in [7 * CLUSTER, 1 << 40] {
            let storage = SimStorage::new(1);
            let bytes = patched(&image, &[(fourth, &(1 << 63 | host).to_be_bytes())]);
            storage.create_with(NAME, &bytes, SimFileOptions::default());
            storage.create_with(DATA, &original.bytes(DATA), SimFileOptions::default());
            let guest = open(&storage.file(NAME).unwrap(), Base::default());
            block_on(async {
                let corrupt = Err(IoErrorKind::Corrupt);
                for _ in 0..2 {
                    let (read, written) = (guest.read(4 * CLUSTER, 512), guest.write(4 * CLUSTER, &[1; 512]));
                    assert_eq!(read.await.map(drop).map_err(|error| error.kind()), corrupt);
                    assert_eq!(written.await.map_err(|error| error.kind()), corrupt);
                    // Others go on.
                    guest.write(7 * CLUSTER, &[2; 512]).await.unwrap();
                    assert_eq!(guest.read(7 * CLUSTER, 512).await.unwrap(), [2; 512]);
                }
            });
            assert_eq!(storage.bytes(DATA).len(), 1 << 20, "written outside the disk");
        }
    }
}

#[test]
fn a_data_file_above_a_backing_file_is_not_raw_whatever_the_image_says() {
    let base: Base = vec![9; 1 << 20].into();
    let options = external().with(|options| options.backing_file = Some("base.raw".to_owned()));
    let (original, _) = created(&options, SimFileOptions::default());
    let storage = SimStorage::new(1);
    let bytes = patched(&original.bytes(NAME), &[(95, &[2])]);
    storage.create_with(NAME, &bytes, SimFileOptions::default());
    storage.create_with(DATA, &original.bytes(DATA), SimFileOptions::default());
    let guest = open(&storage.file(NAME).unwrap(), base);
    block_on(async {
        guest.write_zeroes(0, 100_000, true).await.unwrap();
        guest.discard(200_000, 100_000).await.unwrap();
        assert!(guest.read(0, 99_840).await.unwrap().iter().all(|byte| *byte == 0), "what lies below shows");
        assert_eq!(guest.read(131_072, 512).await.unwrap(), [9; 512]);
        guest.close().await.unwrap();
    });
    assert_eq!(storage.bytes(NAME)[95], 0, "the promise was kept in words only");
}

fn external() -> CreateOptions {
    let data_file = Some(DATA.to_owned());
    CreateOptions::default().with(|options| {
        options.size_bytes = 1 << 20;
        options.cluster_size = 16384;
        options.data_file = data_file;
    })
}

/// An image of another kind, with data, zeros and holes.
fn of_kind(options: CreateOptions) -> SimStorage {
    let (storage, file) = created(&options, SimFileOptions::default());
    let guest = open(&file, Base::default());
    let mut data = vec![0; 200_000];
    fill_seeded(1, &mut data);
    block_on(async {
        guest.write(10_240, &data).await.unwrap();
        guest.write_zeroes(40_960, 8192, false).await.unwrap();
        guest.close().await.unwrap();
    });
    storage
}

#[test]
fn no_damage_to_tables_makes_anything_panic() {
    let extended = external().with(|options| {
        options.data_file = None;
        options.extended_l2 = true;
    });
    let kinds = [of_kind(extended).bytes(NAME), of_kind(external()).bytes(NAME)];
    for (image, times) in std::iter::once((image(), 1500)).chain(kinds.map(|image| (image, 500))) {
        damage(&image, times);
    }
}

fn damage(image: &[u8], times: u32) {
    let (l1, l2) = tables(image);
    let cluster = 1 << image[23];
    let mut dice = Dice::new(11);
    let (mut refused, mut failed) = (0, 0);
    for _ in 0..times {
        let mut bytes = image.to_vec();
        for _ in 0..1 + dice.below(4) {
            let at = match dice.below(5) {
                0 => dice.index(200),
                1 => l1 + dice.index(16),
                2 => l2 + dice.index(40 * 8),
                3 => cluster + dice.index(8),
                _ => dice.index(bytes.len()),
            };
            bytes[at] = match dice.below(3) {
                0 => bytes[at] ^ (1 << dice.below(8)),
                1 => [0, 1, 0x7f, 0x80, 0xff][dice.index(5)],
                _ => dice.below(256) as u8,
            };
        }
        let (storage, result) = opened(&bytes, dice.chance(20));
        let Ok(qcow2) = result else {
            assert!(storage.bytes(NAME) == bytes);
            refused += 1;
            continue;
        };
        let io = blocking(&storage.file(NAME).unwrap());
        let guest = common::Guest { qcow2: qcow2.into(), io, base: Base::default() };
        let size = guest.qcow2.size_bytes();
        for _ in 0..12 {
            let offset = dice.below(size.min(1 << 20) / 512 + 1) * 512;
            let length = (1 + dice.below(64)) * 512;
            let result = block_on(async {
                match dice.below(6) {
                    0 | 1 => guest.write(offset, &vec![5; length as usize]).await,
                    2 => guest.discard(offset, length).await,
                    3 => guest.write_zeroes(offset, length, dice.chance(50)).await,
                    4 => guest.flush().await,
                    _ => guest.read(offset, length as usize).await.map(drop),
                }
            });
            failed += u32::from(result.is_err());
        }
        let _ = block_on(guest.close());
    }
    let enough = refused * 15 > times && failed * 3 > times;
    assert!(enough, "the damage did nothing: {refused} refused, {failed} failed, of {times}");
}

/// An image whose snapshots, so many, all have an L1 table that leads to the disk's L2 table with every entry.
fn with_snapshots_over_and_over(snapshots: usize) -> Vec<u8> {
    const CLUSTER: usize = 4096;
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = 2 << 20;
        options.cluster_size = CLUSTER as u64;
        options.refcount_bits = 64;
    });
    let (storage, file) = created(&options, SimFileOptions::default());
    let guest = open(&file, Base::default());
    block_on(async {
        guest.write(0, &vec![7; 2 << 20]).await.unwrap();
        guest.close().await.unwrap();
    });
    let mut bytes = storage.bytes(NAME);
    let (_, l2) = tables(&bytes);
    bytes.resize(bytes.len().next_multiple_of(CLUSTER), 0);
    let l1 = bytes.len();
    bytes.extend((0..CLUSTER / 8).flat_map(|_| (l2 as u64).to_be_bytes()));
    let table = bytes.len();
    for index in 0..snapshots as u64 {
        let mut row = vec![0; 64];
        row[..8].copy_from_slice(&(l1 as u64).to_be_bytes());
        row[8..12].copy_from_slice(&(CLUSTER as u32 / 8).to_be_bytes());
        (row[13], row[39]) = (8, 16);
        row[48..56].copy_from_slice(&(2_u64 << 20).to_be_bytes());
        row[56..].copy_from_slice(&index.to_be_bytes());
        bytes.extend(row);
    }
    bytes[60..64].copy_from_slice(&(snapshots as u32).to_be_bytes());
    bytes[64..72].copy_from_slice(&(table as u64).to_be_bytes());
    bytes
}

#[test]
fn a_table_that_snapshots_lead_to_over_and_over_is_read_twice() {
    let storage = SimStorage::new(1);
    let file = storage.create_with(NAME, &with_snapshots_over_and_over(1000), SimFileOptions::default());
    let (io, length) = (blocking(&file), block::File::length_bytes(&*file).unwrap());
    let mut steps = 0_u64;
    let watch = &mut |event: CheckEvent| {
        steps += u64::from(matches!(event, CheckEvent::Progress(..)));
        true
    };
    let report = block_on(check(&io, length, NAME, watch)).unwrap();
    assert!(report.corruptions > 0, "{report:?}");
    assert!(steps < 1000, "half a million L1 entries lead to one table, and it was walked {steps} times");
    // Who gives up is heard, also while snapshots are looked at.
    let mut left = 3;
    let give_up = &mut |_: CheckEvent| {
        left -= 1;
        left > 0
    };
    assert!(block_on(check(&io, length, NAME, give_up)).unwrap_err().to_string().contains("interrupted"));
}
