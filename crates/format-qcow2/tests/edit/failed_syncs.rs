//! A sync that fails within an edit: the page cache then shows what the storage may not have, and no later sync writes it.

use super::{Base, NAME, Verb, carry_out, copy, created, everything, open, prepared, scribble};
use block::{ErrorKind, File, IoError, MetaIo, block_on};
use common::{blocking, open_options};
use ringdisk_format_qcow2::{Backing, CreateOptions, Qcow2, set_backing};
use std::sync::Arc;
use testkit::{Dice, Fault, FaultAction, OpKind, SimFileOptions, SimStorage, qcow2_check, stamped};

use super::common;

fn losing(nth: u64, count: u64) -> Fault {
    Fault { kind: Some(OpKind::Flush), after: nth, count, action: FaultAction::Lose(IoError::EIO) }
}

/// An image of version 2 with two snapshots, and verbs for it.
fn of_version_2() -> (SimStorage, Vec<Verb>) {
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = 160 << 10;
        options.cluster_size = 1024;
        options.version = 2;
    });
    let (storage, _) = created(&options, SimFileOptions::default());
    let mut dice = Dice::new(8);
    for name in ["one", "two"] {
        scribble(&storage, &Base::default(), &mut dice);
        carry_out(&storage, &Verb::Create(name.to_owned()), &Base::default()).unwrap();
    }
    scribble(&storage, &Base::default(), &mut dice);
    let verbs = ["Create", "Apply", "Delete"].map(|verb| match verb {
        "Create" => Verb::Create("three".to_owned()),
        "Apply" => Verb::Apply("one".to_owned()),
        _ => Verb::Delete("one".to_owned()),
    });
    (storage, verbs.into())
}

/// Writes all of the disk, so that all space is taken that seems free, and makes it durable.
fn fill(storage: &SimStorage, base: &Base, seed: u64) {
    let guest = open(&storage.file(NAME).unwrap(), Arc::clone(base));
    let size = guest.qcow2.size_bytes() as usize;
    block_on(async {
        guest.write(0, &stamped(seed, 0, size)).await.unwrap();
        guest.qcow2.flush(&guest.io).await.unwrap();
    });
}

/// Whatever the power cuts find is what was there.
fn nothing_is_lost_by_a_cut(storage: &SimStorage, base: &Base, what: &str) {
    let now = everything(storage, base);
    for seed in 0..6 {
        let cut = storage.power_cut(seed);
        qcow2_check(&cut.bytes(NAME)).unwrap().sound().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(everything(&cut, base) == now, "{what}: {:?}, not {now:?}", everything(&cut, base));
    }
}

#[test]
fn after_a_failed_sync_in_an_edit_nothing_is_taken_that_either_header_refers_to() {
    let base = Base::default();
    for (original, verbs) in [prepared(1, 1024, &base), prepared(2, 4096, &base), of_version_2()] {
        let before = everything(&original, &base);
        for verb in verbs {
            // One sync fails, or all do from there on.
            for count in [1, u64::MAX] {
                for nth in 0.. {
                    let storage = copy(&original);
                    storage.inject(NAME, losing(nth, count));
                    let pushed = storage.pushed(NAME, OpKind::Flush);
                    let done = carry_out(&storage, &verb, &base);
                    let reached = storage.pushed(NAME, OpKind::Flush) - pushed > nth;
                    storage.clear_faults();
                    let what = format!("{verb:?}, {count} syncs from {nth} on, {done:?}");
                    let shown = everything(&storage, &base);
                    if done.is_err() && !matches!(verb, Verb::Resize(..)) {
                        assert!(shown == before, "{what}: {shown:?}, not {before:?}");
                    }
                    fill(&storage, &base, nth);
                    nothing_is_lost_by_a_cut(&storage, &base, &what);
                    if !reached {
                        break;
                    }
                }
            }
        }
    }
}

#[test]
fn an_edit_after_one_whose_sync_failed_begins_with_what_is_durable() {
    let base = Base::default();
    for (original, verbs) in [prepared(1, 1024, &base), of_version_2()] {
        for first in &verbs {
            for nth in 0..4 {
                let storage = copy(&original);
                storage.inject(NAME, losing(nth, u64::MAX));
                let done = carry_out(&storage, first, &base);
                storage.clear_faults();
                carry_out(&storage, &Verb::Create("next".to_owned()), &base).unwrap();
                nothing_is_lost_by_a_cut(&storage, &base, &format!("{first:?}, syncs from {nth} on, {done:?}"));
            }
        }
    }
}

/// The sync of the new header fails, and then nothing else can be written: nothing marks the header that may not be there.
#[test]
fn a_header_that_could_not_be_marked_is_made_durable_before_the_next_write() {
    let base = Base::default();
    let (original, verbs) = prepared(1, 1024, &base);
    let mut unmarked = 0;
    for verb in verbs.iter().filter(|verb| !matches!(verb, Verb::Resize(..))) {
        let done = copy(&original);
        let counts = |storage: &SimStorage| [OpKind::Flush, OpKind::Write].map(|kind| storage.pushed(NAME, kind));
        let [flushes_before, writes_before] = counts(&done);
        carry_out(&done, verb, &base).unwrap();
        let [flushes, writes] = counts(&done);
        for nth in 0..flushes - flushes_before {
            for written in 1..=writes - writes_before {
                let storage = copy(&original);
                storage.inject(NAME, losing(nth, u64::MAX));
                let action = FaultAction::Fail(IoError::EIO);
                storage.inject(NAME, Fault::from_nth(OpKind::Write, written, action));
                let done = carry_out(&storage, verb, &base);
                storage.clear_faults();
                unmarked +=
                    usize::from(done.as_ref().is_err_and(|error| error.to_string().contains("another program")));
                fill(&storage, &base, nth);
                let what = format!("{verb:?}, syncs from {nth} and writes from {written} on, {done:?}");
                nothing_is_lost_by_a_cut(&storage, &base, &what);
            }
        }
    }
    assert!(unmarked > 0);
}

fn backing_of(io: &MetaIo, storage: &SimStorage) -> Option<String> {
    let options = open_options(true);
    let qcow2 = block_on(Qcow2::open(io, storage.file(NAME).unwrap().info(), options)).unwrap();
    qcow2.header().backing_file.clone()
}

#[test]
fn another_backing_file_whose_sync_fails_is_taken_back_or_settled_by_the_next_writer() {
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = 64 << 10;
        options.backing_file = Some("old".to_owned());
        options.backing_format = Some("raw".to_owned());
    });
    let (original, _) = created(&options, SimFileOptions::default());
    for (count, what) in [(1, "as before"), (u64::MAX, "nobody can say")] {
        let storage = copy(&original);
        let file = storage.file(NAME).unwrap();
        let io = blocking(&file);
        // The first sync is of the header that was there.
        storage.inject(NAME, losing(1, count));
        let new = Backing { file: "new".to_owned(), format: Some("raw".to_owned()) };
        let error = block_on(set_backing(&io, &*file, NAME, Some(&new))).unwrap_err();
        storage.clear_faults();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains(what), "{error}");
        assert_eq!(backing_of(&io, &storage).as_deref(), Some("old"));
        drop(open(&file, Base::default()));
        for seed in 0..6 {
            let cut = storage.power_cut(seed);
            assert_eq!(backing_of(&blocking(&cut.file(NAME).unwrap()), &cut).as_deref(), Some("old"), "{what}");
        }
    }
}
