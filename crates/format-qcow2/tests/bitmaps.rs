//! Changes to persistent bitmaps under power cuts and faults: the image has those before or those after, and the disk
//! never changes.

use block::{File, IoError, MetaIo, block_on};
use ringdisk_format_qcow2::{
    Backing, Bitmap, BitmapAction, BitmapBits, CreateOptions, NewSnapshot, ResizeOptions, SnapshotName, apply_snapshot,
    bitmaps, create_snapshot, edit_bitmaps, read_bitmap, resize,
};
use std::sync::Arc;
use testkit::{Fault, FaultAction, OpKind, SimFile, SimFileOptions, SimStorage, qcow2_check};

const SIZE_BYTES: u64 = 4 << 20;

fn image(cluster_size: u64) -> SimStorage {
    let storage = SimStorage::new(1);
    let file = storage.create("disk", 0, SimFileOptions::default());
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = SIZE_BYTES;
        options.cluster_size = cluster_size;
        options.backing_file = Some("a-name-of-a-backing-file-that-is-quite-long".repeat(4));
        options.backing_format = Some("raw".to_owned());
    });
    block_on(ringdisk_format_qcow2::create(&io(&file), &options)).unwrap();
    storage.process_killed(0)
}

fn io(file: &Arc<SimFile>) -> MetaIo {
    MetaIo::new(file.open_blocking().unwrap())
}

fn edit(storage: &SimStorage, actions: &[(String, BitmapAction)]) -> block::Result<()> {
    let file = storage.file("disk").unwrap();
    block_on(edit_bitmaps(&io(&file), file.as_ref(), "disk", actions, &mut |_, _| true))
}

/// All bitmaps with their bits.
fn all(storage: &SimStorage) -> Vec<(Bitmap, BitmapBits)> {
    let io = io(&storage.file("disk").unwrap());
    let found = block_on(bitmaps(&io, "disk")).unwrap();
    let bits = |bitmap: &Bitmap| block_on(read_bitmap(&io, "disk", &bitmap.name)).unwrap();
    // Where they lie does not matter.
    found.into_iter().map(|bitmap| (bitmap.clone(), bits(&bitmap))).collect()
}

fn seen(storage: &SimStorage) -> Vec<(String, u8, bool, BitmapBits)> {
    let name = |(bitmap, bits): (Bitmap, BitmapBits)| (bitmap.name, bitmap.granularity_bits, bitmap.enabled, bits);
    all(storage).into_iter().map(name).collect()
}

fn action(name: &str, action: BitmapAction) -> (String, BitmapAction) {
    (name.to_owned(), action)
}

fn add(granularity_bytes: u64) -> BitmapAction {
    BitmapAction::Add { granularity_bytes: Some(granularity_bytes) }
}

fn written() -> BitmapBits {
    BitmapBits::of_ranges(12, SIZE_BYTES, &[0..1, 8192..1 << 20, SIZE_BYTES - 5000..SIZE_BYTES])
}

/// Changes, one after the other; the last of each row has to be seen all or not at all.
fn changes() -> Vec<Vec<(String, BitmapAction)>> {
    vec![
        vec![action("one", add(512)), action("two", add(4096))],
        vec![
            action("one", BitmapAction::Merge(written())),
            action("one", BitmapAction::Disable),
            action("three", add(65536)),
        ],
        vec![action("two", BitmapAction::MergeOwn("one".to_owned())), action("one", BitmapAction::Clear)],
        vec![action("one", BitmapAction::Remove), action("four", add(512))],
        vec![
            action("two", BitmapAction::Remove),
            action("three", BitmapAction::Remove),
            action("four", BitmapAction::Remove),
        ],
    ]
}

#[test]
fn tables_that_claim_too_much_together_are_refused_before_any_is_read() {
    let storage = image(512);
    edit(&storage, &[action("one", add(512)), action("two", add(512))]).unwrap();
    let mut bytes = storage.bytes("disk");
    for name in ["one", "two"] {
        // Behind its row of 24 bytes, which begins with the table's offset and entries.
        let row = bytes.windows(3).position(|found| found == name.as_bytes()).unwrap() - 24;
        bytes[row + 8..row + 12].copy_from_slice(&(5u32 << 20).to_be_bytes());
    }
    let io = io(&storage.file("disk").unwrap());
    block_on(io.write(0, memory::AlignedBuf::copy_of(&bytes))).unwrap();
    let error = block_on(bitmaps(&io, "disk")).unwrap_err();
    assert!(error.to_string().contains("tables of 83886080 bytes"), "{error}");
}

#[test]
fn a_power_cut_at_any_moment_leaves_the_bitmaps_before_or_after() {
    for cluster_size in [1024, 4096] {
        let storage = image(cluster_size);
        for actions in changes() {
            let before = seen(&storage);
            storage.record();
            edit(&storage, &actions).unwrap();
            let after = seen(&storage);
            assert_ne!(before, after, "{actions:?}");
            assert_eq!(seen(&storage.power_cut(3)), after, "durable: {actions:?}");
            let mut replay = storage.take_recording().replay();
            let mut outcomes = [0, 0];
            while replay.advance().is_some() {
                for seed in 0..3 {
                    let cut = replay.power_cut(seed);
                    qcow2_check(&cut.bytes("disk")).unwrap().sound().unwrap();
                    let found = seen(&cut);
                    assert!(found == before || found == after, "{actions:?}: neither before nor after");
                    outcomes[usize::from(found == after)] += 1;
                }
            }
            assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}");
        }
        assert!(seen(&storage).is_empty());
        assert_eq!(qcow2_check(&storage.bytes("disk")).unwrap().leaked_clusters, 0);
    }
}

/// What changes the disk as a whole.
#[derive(Debug, Clone, Copy)]
enum Whole {
    Resize(u64),
    Snapshot,
    Apply,
}

fn change_whole(storage: &SimStorage, change: Whole) -> block::Result<()> {
    let file = storage.file("disk").unwrap();
    let (io, file, watch) = (io(&file), file.as_ref(), &mut |_, _| true);
    let snapshot = NewSnapshot::new("then");
    match change {
        Whole::Resize(size_bytes) => {
            let options = ResizeOptions::to(size_bytes).with(|options| options.shrink = true);
            block_on(resize(&io, file, "disk", &options, watch))
        }
        Whole::Snapshot => block_on(create_snapshot(&io, file, "disk", &snapshot, watch)),
        Whole::Apply => block_on(apply_snapshot(&io, file, "disk", &SnapshotName::Any("then".to_owned()), watch)),
    }
}

#[test]
fn bitmaps_go_with_the_size_of_the_disk_and_back_to_a_snapshot_whenever_the_power_is_cut() {
    let storage = image(1024);
    edit(&storage, &changes()[0]).unwrap();
    edit(&storage, &changes()[1]).unwrap();
    // As `written` has them, in granules of 4 KiB.
    let ranges = [0..4096, 8192..1 << 20, SIZE_BYTES - 8192..SIZE_BYTES];
    // "one" is disabled and has bits; "three" is enabled, and what is added is all that it notes.
    let bits = |granularity_bits, size, ranges: &[_]| BitmapBits::of_ranges(granularity_bits, size, ranges);
    let cut = |at: u64| ranges.clone().map(|range| range.start.min(at)..range.end.min(at));
    let (large, small) = ((9 << 20) + 512, (1 << 20) - 1024);
    let added = |from: u64, to: u64| std::iter::once(from..to).collect::<Vec<_>>();
    for (change, size, one, three) in [
        (Whole::Resize(large), large, ranges.to_vec(), added(SIZE_BYTES, large)),
        (Whole::Snapshot, large, ranges.to_vec(), added(SIZE_BYTES, large)),
        (Whole::Resize(small), small, cut(small).to_vec(), vec![]),
        // The granule in which the disk ended is noted as well. What was cut off does not come back.
        (Whole::Resize(SIZE_BYTES), SIZE_BYTES, cut(small).to_vec(), added(small / 65536 * 65536, SIZE_BYTES)),
        (Whole::Apply, large, cut(small).to_vec(), added(0, large)),
    ] {
        let before = seen(&storage);
        storage.record();
        change_whole(&storage, change).unwrap();
        let after = seen(&storage);
        assert!(after[0].3 == bits(9, size, &one), "{change:?}");
        assert!(after[2].2 && after[2].3 == bits(16, size, &three), "{change:?}");
        let report = qcow2_check(&storage.bytes("disk")).unwrap();
        report.sound().unwrap();
        assert_eq!(report.leaked_clusters, 0, "{change:?}");
        let mut replay = storage.take_recording().replay();
        while replay.advance().is_some() {
            let cut = replay.power_cut(4);
            qcow2_check(&cut.bytes("disk")).unwrap().sound().unwrap();
            let found = seen(&cut);
            assert!(found == before || found == after, "{change:?}: neither before nor after");
        }
    }
    assert!(change_whole(&storage, Whole::Resize(0)).is_err());
}

#[test]
fn a_fault_at_any_step_leaves_the_bitmaps_before_or_after_and_the_change_can_be_made_again() {
    const ENOSPC: i32 = 28;
    let original = image(1024);
    edit(&original, &changes()[0]).unwrap();
    let actions = &changes()[1];
    let before = seen(&original);
    for kind in OpKind::ALL {
        for nth in 0.. {
            let storage = original.process_killed(0);
            let pushed = storage.pushed("disk", kind);
            storage.inject("disk", Fault::nth(kind, nth, FaultAction::Scatter(IoError::from_errno(ENOSPC))));
            let ended = edit(&storage, actions);
            if storage.pushed("disk", kind) <= pushed + nth {
                break;
            }
            storage.clear_faults();
            qcow2_check(&storage.bytes("disk")).unwrap().sound().unwrap();
            let found = seen(&storage);
            assert!(found == before || found.len() == 3, "{kind:?} {nth}");
            assert!(ended.is_err() || found.len() == 3, "{kind:?} {nth}: told of success");
            if found == before {
                edit(&storage, actions).unwrap();
                assert_eq!(seen(&storage).len(), 3);
            }
        }
    }
}

#[test]
fn a_new_backing_name_and_bitmaps_share_the_header_and_a_power_cut_leaves_the_old_name_or_the_new_one() {
    let storage = image(4096);
    edit(&storage, &changes()[0]).unwrap();
    let bitmaps = seen(&storage);
    let name = |storage: &SimStorage| {
        let file = storage.file("disk").unwrap();
        let options = ringdisk_format_qcow2::OpenOptions::new("disk", true);
        let opened = block_on(ringdisk_format_qcow2::Qcow2::open(&io(&file), file.info(), options)).unwrap();
        opened.header().backing_file.clone()
    };
    for new in [Some("b".repeat(900)), Some("short".to_owned()), None, Some("c".repeat(1023))] {
        let before = name(&storage);
        storage.record();
        let backing = new.clone().map(|file| Backing { file, format: Some("qcow2".to_owned()) });
        let file = storage.file("disk").unwrap();
        block_on(ringdisk_format_qcow2::set_backing(&io(&file), file.as_ref(), "disk", backing.as_ref())).unwrap();
        assert_eq!(name(&storage), new);
        let mut replay = storage.take_recording().replay();
        while replay.advance().is_some() {
            for seed in 0..4 {
                let cut = replay.power_cut(seed);
                let found = name(&cut);
                assert!(found == before || found == new, "{found:?}");
                assert_eq!(seen(&cut), bitmaps);
            }
        }
    }
}
