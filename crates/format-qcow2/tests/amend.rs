//! Amending: whatever fails, the image is the one before or the one after, and amending it again finishes it.
#![allow(clippy::unwrap_used)]

mod common;

use block::{ErrorKind, File, IoError, Result, block_on};
use common::{Base, DATA, NAME, blocking, copy, created, open, open_options};
use memory::AlignedBuf;
use ringdisk_format_qcow2::{
    AmendOptions, BitmapAction, CreateOptions, Header, NewSnapshot, Qcow2, ResizeOptions, amend, create_snapshot,
    edit_bitmaps,
};
use testkit::{Fault, FaultAction, OpKind, SimFileOptions, SimStorage, qcow2_check, stamped};

fn made(options: &CreateOptions) -> SimStorage {
    let (storage, file) = created(options, SimFileOptions::default());
    block_on(async {
        let guest = open(&file, Base::default());
        guest.write(3000, &stamped(1, 3000, 100_000)).await.unwrap();
        guest.write_zeroes(20_480, 20_480, false).await.unwrap();
        guest.close().await.unwrap();
        if options.data_file.is_none() {
            let new = NewSnapshot::new("one");
            create_snapshot(&blocking(&file), &*file, NAME, &new, &mut |_, _| true).await.unwrap();
        }
        let guest = open(&file, Base::default());
        guest.write(50_000, &stamped(2, 50_000, 20_000)).await.unwrap();
        guest.close().await.unwrap();
    });
    storage
}

fn amended(storage: &SimStorage, options: &AmendOptions) -> Result<()> {
    let file = storage.file(NAME).unwrap();
    block_on(amend(&blocking(&file), &*file, NAME, options, &mut |_, _| true))
}

/// What the header says, without the places of tables; and what the disk holds.
fn seen(storage: &SimStorage) -> (Header, Vec<u8>) {
    let file = storage.file(NAME).unwrap();
    let opened = block_on(Qcow2::open(&blocking(&file), file.info(), open_options(true)));
    let header = opened.unwrap().header().clone();
    let held = block_on(open(&copy(storage).file(NAME).unwrap(), Base::default()).read_all()).unwrap();
    let report = qcow2_check(&storage.bytes(NAME)).unwrap();
    report.sound().unwrap();
    assert_eq!(report.leaked_clusters, 0);
    (header, held)
}

/// Equal but for the places of tables.
fn same(one: &(Header, Vec<u8>), other: &(Header, Vec<u8>)) -> bool {
    let said = |header: &Header| {
        (
            (header.version, header.size_bytes, header.refcount_bits, header.snapshots),
            (header.compatible_features, header.autoclear_features, header.incompatible_features),
            header.data_file.clone(),
        )
    };
    said(&one.0) == said(&other.0) && one.1 == other.1
}

fn cases() -> Vec<(CreateOptions, AmendOptions)> {
    let plain = CreateOptions::default().with(|options| {
        options.size_bytes = 160 << 10;
        options.cluster_size = 4096;
    });
    let version_2 = plain.clone().with(|options| options.version = 2);
    let external = plain.clone().with(|options| {
        options.data_file = Some(DATA.to_owned());
        options.data_file_raw = true;
    });
    let extended = plain.clone().with(|options| {
        options.extended_l2 = true;
        options.cluster_size = 32768;
    });
    let nothing = AmendOptions::default;
    let size = |size_bytes, data_file_bytes| {
        let last_cluster = Vec::new();
        Some(ResizeOptions::to(size_bytes).with(|options| {
            options.shrink = true;
            options.data_file_bytes = data_file_bytes;
            options.last_cluster = last_cluster;
        }))
    };
    vec![
        (plain.clone(), nothing().with(|options| options.refcount_bits = Some(64))),
        (
            plain.clone(),
            nothing().with(|options| {
                options.refcount_bits = Some(2);
                options.lazy_refcounts = Some(true);
            }),
        ),
        (plain.clone(), nothing().with(|options| options.lazy_refcounts = Some(true))),
        (plain.clone(), nothing().with(|options| options.version = Some(2))),
        (
            plain,
            nothing().with(|options| {
                options.resize = size(300 << 10, None);
                options.refcount_bits = Some(8);
            }),
        ),
        (
            version_2,
            nothing().with(|options| {
                options.version = Some(3);
                options.refcount_bits = Some(32);
            }),
        ),
        (
            extended,
            nothing().with(|options| {
                options.resize = size(70 << 10, None);
                options.refcount_bits = Some(8);
            }),
        ),
        (external.clone(), nothing().with(|options| options.resize = size(300 << 10, Some(160 << 10)))),
        (external.clone(), nothing().with(|options| options.data_file = Some("elsewhere".to_owned()))),
        (
            external,
            nothing().with(|options| {
                options.refcount_bits = Some(1);
                options.data_file_raw = Some(false);
            }),
        ),
    ]
}

#[test]
fn no_space_and_failed_operations_at_any_step_leave_the_image_before_or_the_image_after() {
    let kinds = [OpKind::Read, OpKind::Write, OpKind::WriteZeroes, OpKind::Flush, OpKind::Discard, OpKind::SetLength];
    let (mut failures, mut finished) = (0, 0);
    for (create, options) in cases() {
        let original = made(&create);
        let before = seen(&original);
        let storage = copy(&original);
        amended(&storage, &options).unwrap_or_else(|error| panic!("{options:?}: {error}"));
        let after = seen(&storage);
        assert!(!same(&before, &after), "{options:?} changes nothing");
        let names = [Some(NAME), create.data_file.as_ref().map(|_| DATA)];
        let all = names.into_iter().flatten().flat_map(|name| kinds.map(|kind| (name, kind)));
        for (name, kind) in all {
            for nth in 0.. {
                let mut reached = false;
                for error in [IoError::EIO, IoError::from_errno(28)] {
                    let storage = copy(&original);
                    storage.inject(name, Fault::nth(kind, nth, FaultAction::Fail(error)));
                    let done = amended(&storage, &options);
                    reached |= storage.pushed(name, kind) > nth;
                    storage.clear_faults();
                    let what = format!("{options:?}, {name}: {kind:?} number {nth}, {error}");
                    let found = seen(&storage);
                    let is_after = same(&found, &after);
                    assert!(is_after || same(&found, &before), "{what}: {:?}", found.0);
                    assert!(done.is_err() || is_after, "{what} was not told of");
                    failures += u32::from(done.is_err());
                    if !is_after {
                        amended(&storage, &options).unwrap_or_else(|error| panic!("{what}: again: {error}"));
                        assert!(same(&seen(&storage), &after), "{what}: the second time");
                        finished += 1;
                    }
                }
                if !reached {
                    break;
                }
            }
        }
    }
    assert!(failures > 100 && finished > 100, "{failures} failed, {finished} were amended again");
}

#[test]
fn a_power_cut_while_the_data_file_is_renamed_leaves_one_of_the_names() {
    let (create, options) = cases().pop().unwrap();
    let original = made(&create);
    let name = Some("a-name-that-is-much-longer-than-the-one-before".to_owned());
    let options = options.with(|options| options.data_file = name);
    let before = seen(&original);
    let storage = copy(&original);
    storage.record();
    amended(&storage, &options).unwrap();
    let after = seen(&storage);
    assert!(after.0.data_file == options.data_file && !after.0.data_file_is_raw());
    let mut replay = storage.take_recording().replay();
    while replay.advance().is_some() {
        for outcome in 0..2 {
            let cut = replay.power_cut(outcome);
            let file = cut.file(NAME).unwrap();
            let options = open_options(true);
            let opened = block_on(Qcow2::open(&blocking(&file), file.info(), options)).unwrap();
            let found = (opened.header().clone(), after.1.clone());
            assert!(same(&found, &before) || same(&found, &after), "{:?}", found.0);
        }
    }
}

#[test]
fn a_power_cut_while_the_header_is_laid_out_twice_leaves_the_backing_files_name() {
    let backing = "a-name-of-a-backing-file-that-is-quite-long".repeat(8);
    let create = CreateOptions::default().with(|options| {
        options.size_bytes = 160 << 10;
        options.cluster_size = 4096;
        options.data_file = Some(DATA.to_owned());
        options.backing_file = Some(backing.clone());
    });
    let (storage, file) = created(&create, SimFileOptions::default());
    let io = blocking(&file);
    let add = [("bits".to_owned(), BitmapAction::Add { granularity_bytes: None })];
    block_on(edit_bitmaps(&io, &*file, NAME, &add, &mut |_, _| true)).unwrap();
    // Where other programs may put it: behind the first sector, and not at a sector's start.
    let mut bytes = storage.bytes(NAME)[..4096].to_vec();
    bytes[512..].fill(0);
    bytes[700..700 + backing.len()].copy_from_slice(backing.as_bytes());
    bytes[8..16].copy_from_slice(&700u64.to_be_bytes());
    block_on(io.write(0, AlignedBuf::copy_of(&bytes))).unwrap();
    let storage = copy(&storage);
    storage.record();
    // The bitmap needs another directory, and the data file another flag.
    let resize = ResizeOptions::to(300 << 10).with(|options| options.data_file_bytes = Some(160 << 10));
    let options = AmendOptions::default().with(|options| {
        options.resize = Some(resize);
        options.data_file_raw = Some(false);
    });
    amended(&storage, &options).unwrap();
    let mut replay = storage.take_recording().replay();
    let mut seen = [0, 0];
    while replay.advance().is_some() {
        for outcome in 0..2 {
            let cut = replay.power_cut(outcome);
            let file = cut.file(NAME).unwrap();
            let opened = block_on(Qcow2::open(&blocking(&file), file.info(), open_options(true))).unwrap();
            assert_eq!(opened.header().backing_file.as_ref(), Some(&backing));
            seen[usize::from(opened.size_bytes() == 300 << 10)] += 1;
        }
    }
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
}

#[test]
fn what_cannot_be_said_of_a_data_file_is_refused() {
    let plain = made(&cases()[0].0);
    let external = made(&cases().pop().unwrap().0);
    let named = |name: &str| AmendOptions::default().with(|options| options.data_file = Some(name.to_owned()));
    let raw = |raw| AmendOptions::default().with(|options| options.data_file_raw = Some(raw));
    for (storage, options, reason) in [
        (&plain, named("x"), "can only be set for images that use an external data file"),
        (&plain, raw(true), "cannot be set on existing images"),
        (&external, named(""), "could not be opened"),
        (&external, named("a\0b"), "1 to 1023 bytes"),
    ] {
        let bytes = storage.bytes(NAME);
        let error = amended(storage, &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadOption, "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        assert!(storage.bytes(NAME) == bytes, "{error}: the image has changed");
    }
    // The data would be cut or kept in the file that the image is about to forget.
    let both = named("elsewhere").with(|options| options.resize = Some(ResizeOptions::to(1 << 20)));
    let bytes = external.bytes(NAME);
    assert_eq!(amended(&external, &both).unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(external.bytes(NAME) == bytes);
    amended(&external, &raw(true)).unwrap();
    amended(&external, &raw(false)).unwrap();
    let error = amended(&external, &raw(true)).unwrap_err();
    assert!(error.to_string().contains("cannot be set on existing images"), "{error}");
    // It has no snapshots, and gets none.
    let file = external.file(NAME).unwrap();
    let new = NewSnapshot::new("one");
    let error = block_on(create_snapshot(&blocking(&file), &*file, NAME, &new, &mut |_, _| true)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

#[test]
fn a_directory_of_bitmaps_that_is_not_valid_any_more_does_not_keep_an_image_from_becoming_version_2() {
    let create = CreateOptions::default().with(|options| {
        options.size_bytes = 160 << 10;
        options.cluster_size = 4096;
    });
    let (storage, file) = created(&create, SimFileOptions::default());
    let io = blocking(&file);
    let add = [("bits".to_owned(), BitmapAction::Add { granularity_bytes: None })];
    block_on(edit_bitmaps(&io, &*file, NAME, &add, &mut |_, _| true)).unwrap();
    // As a program that knows nothing of bitmaps leaves it.
    let mut header = storage.bytes(NAME)[..512].to_vec();
    header[88..96].fill(0);
    block_on(io.write(0, AlignedBuf::copy_of(&header))).unwrap();
    amended(&storage, &AmendOptions::default().with(|options| options.version = Some(2))).unwrap();
    assert_eq!(block_on(open(&file, Base::default()).read_all()).unwrap(), vec![0; 160 << 10]);
    assert_eq!(storage.bytes(NAME)[7], 2);
}
