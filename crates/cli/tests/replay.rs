//! A drive with `filter=log` writes down what its guest does, and `ringdisk replay` makes the disk of any moment of it.

mod common;

use ::disk::{Disk, Operation, Options};
use common::{at, directory, path_str, run_fails, run_ok};
use std::fs::File;
use std::path::Path;

const SIZE: usize = 1 << 20;
/// Each has one request in flight at a time.
const SLOTS: u64 = 8;
const SLOT_BYTES: u64 = SIZE as u64 / SLOTS;

/// Numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn open(disk: &Path, log: &Path) -> disk::Result<Disk> {
    Options::drive(&format!("file={},format=raw,filter=log:file={}", disk.display(), log.display()))?.open()
}

fn empty(path: &Path) {
    File::create(path).unwrap().set_len(SIZE as u64).unwrap();
}

/// One request in a slot of the disk, and what it does to the model.
fn request(disk: &Disk, model: &mut [u8], numbers: &mut Numbers, slot: u64) -> Operation<()> {
    let length = (1 + numbers.below(SLOT_BYTES / 512)) * 512;
    let offset = slot * SLOT_BYTES + numbers.below((SLOT_BYTES - length) / 512 + 1) * 512;
    let place = &mut model[offset as usize..(offset + length) as usize];
    match numbers.below(4) {
        0 => {
            place.fill(0);
            disk.write_zeroes(offset, length)
        }
        1 => {
            // On a file it leaves zeros.
            place.fill(0);
            disk.discard(offset, length)
        }
        _ => {
            place.fill(1 + numbers.below(255) as u8);
            disk.write(offset, &*place)
        }
    }
}

/// Plays requests on the disk, eight at once, with a flush now and then; returns what it held at each flush.
fn play(disk: &Disk, model: &mut [u8], seed: u64) -> Vec<Vec<u8>> {
    let (mut numbers, mut at_flush) = (Numbers(seed), Vec::new());
    for round in 0..40 {
        let running: Vec<_> = (0..SLOTS).map(|slot| request(disk, model, &mut numbers, slot)).collect();
        running.into_iter().for_each(|operation| operation.wait().unwrap());
        if round % 4 == 3 {
            disk.flush().wait().unwrap();
            at_flush.push(model.to_vec());
        }
    }
    at_flush
}

#[test]
fn a_log_gives_the_disk_of_any_flush_and_is_carried_on_by_the_next_daemon() {
    let directory = directory();
    let [disk, log, copy] = ["disk.raw", "changes.log", "copy.raw"].map(|name| at(&directory, name));
    empty(&disk);
    let mut model = vec![0; SIZE];
    let opened = open(&disk, &log).unwrap();
    let at_flush = play(&opened, &mut model, 1);
    opened.close().unwrap();
    let opened = open(&disk, &log).unwrap();
    play(&opened, &mut model, 2);
    opened.close().unwrap();
    assert!(std::fs::read(&disk).unwrap() == model);
    for (index, state) in at_flush.iter().enumerate().step_by(4) {
        empty(&copy);
        let flushes = (index + 1).to_string();
        run_ok(&["replay", "-f", "raw", "--flushes", &flushes, path_str(&log), path_str(&copy)]);
        assert!(std::fs::read(&copy).unwrap() == *state, "after {flushes} flushes");
    }
    // In another format, and the whole.
    let qcow2 = at(&directory, "copy.qcow2");
    run_ok(&["create", "-f", "qcow2", path_str(&qcow2), "1M"]);
    run_ok(&["replay", path_str(&log), path_str(&qcow2)]);
    assert_eq!(run_ok(&["compare", path_str(&qcow2), path_str(&disk)]), "Images are identical.\n");
}

#[test]
fn a_log_in_use_or_of_another_kind_is_left_alone() {
    let directory = directory();
    let [disk, log, other, small] = ["disk.raw", "log", "other", "small"].map(|name| at(&directory, name));
    empty(&disk);
    let opened = open(&disk, &log).unwrap();
    opened.write(SIZE as u64 - 512, &[7; 512][..]).wait().unwrap();
    let second = at(&directory, "second.raw");
    empty(&second);
    assert!(open(&second, &log).err().unwrap().to_string().contains("in use"));
    std::fs::write(&other, [7; 2000]).unwrap();
    assert!(open(&second, &other).err().unwrap().to_string().contains("no write log"));
    assert_eq!(std::fs::read(&other).unwrap(), [7; 2000]);
    // What the guest was told is in the log at once.
    assert_eq!(run_ok(&["replay", "--list", path_str(&log)]), format!("0 write {} 512\n", SIZE - 512));
    std::fs::write(&small, [0; 512]).unwrap();
    let said = run_fails(2, &["replay", "-f", "raw", path_str(&log), path_str(&small)]);
    assert!(said.contains("entry 0") && said.contains("ends behind the disk"), "{said}");
    assert!(run_fails(1, &["replay", "-f", "raw", path_str(&other), path_str(&small)]).contains("no write log"));
    assert!(
        run_fails(1, &["replay", "-f", "raw", "--flushes", "9", path_str(&log), path_str(&small)]).contains("too many")
    );
}

#[test]
fn a_log_that_was_cut_off_gives_a_closed_disk_with_what_came_before() {
    let directory = directory();
    let [disk, log, copy] = ["disk.raw", "changes.log", "copy.qcow2"].map(|name| at(&directory, name));
    empty(&disk);
    let opened = open(&disk, &log).unwrap();
    for (slot, byte) in (0..4).zip(1..) {
        opened.write(slot * SLOT_BYTES, &*vec![byte; SLOT_BYTES as usize]).wait().unwrap();
    }
    opened.close().unwrap();
    let file = File::options().write(true).open(&log).unwrap();
    let length_bytes = file.metadata().unwrap().len();
    // In the data of the last entry, and before its header.
    for (cut_bytes, said) in [(SLOT_BYTES / 2, "entry 3"), (SLOT_BYTES + 512, "entry 3")] {
        file.set_len(length_bytes - cut_bytes).unwrap();
        run_ok(&["create", "-q", "-f", "qcow2", path_str(&copy), "1M"]);
        let told = run_fails(1, &["replay", path_str(&log), path_str(&copy)]);
        assert!(told.contains("ends in the midst") && told.contains(said), "{told}");
        run_ok(&["check", path_str(&copy)]);
        let raw = at(&directory, "copy.raw");
        run_ok(&["convert", "-O", "raw", path_str(&copy), path_str(&raw)]);
        let bytes = std::fs::read(&raw).unwrap();
        for (slot, byte) in bytes.chunks(SLOT_BYTES as usize).zip(1..=3) {
            assert!(slot.iter().all(|found| *found == byte), "entry {} is not there", byte - 1);
        }
        std::fs::remove_file(&copy).unwrap();
    }
}
